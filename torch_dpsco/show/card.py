"""The privacy card: a statement with its pictures, as one file that needs no other and no network.

Everything in it is public, as in `statement`: what was charged, and what follows from it.
"""

from __future__ import annotations

import base64
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.risk import Risk, percent
from torch_dpsco.accounting.calibrate import rounded_up
from torch_dpsco.accounting.ledger import Ledger
from torch_dpsco.accounting.report import PrivacyReport
from torch_dpsco.accounting.statement import table
from torch_dpsco.show import pages, plots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from torch_dpsco.accounting.statement import Statement

SUFFIXES = (".html", ".pdf", ".md", ".json")
_POINTS = 12
_APPENDIX = "how it was computed, and what was spent"
_ALARMS = (0.01, 0.001)  # false positive rates that are marked
_STYLE = (
    "body{max-width:52em;margin:2em auto;padding:0 1em;font:16px/1.5 sans-serif;"
    "color:#222;background:#fff;overflow-wrap:break-word}"
    "table{border-collapse:collapse}"
    "td,th{border-bottom:1px solid #8888;padding:.3em .8em .3em 0;text-align:left;vertical-align:top}"
    ".worlds td:nth-child(n+3){white-space:nowrap}"
    ".pictures{display:flex;flex-wrap:wrap;gap:.5em}"
    "picture{flex:1 1 20em;min-width:min(18em,100%);max-width:min(100%,30em)}"
    "img{width:100%}"
    "summary{cursor:pointer;font-weight:bold;margin:1em 0}"
    ".warn{border-left:4px solid #c33;padding-left:1em}"
    "@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}}"
    "@media print{body{color:#000;background:#fff}}"
)


def draw(report: PrivacyReport) -> Figure:
    """Returns the pictures of a report: what a test can find out, and what was spent when."""
    title = (
        f"({rounded_up(report.epsilon)}, {rounded_up(report.delta)})-differential privacy for one"
        f" {report.unit_name}"
    )
    pictures = (*panels(report), *accounts(report))
    return plots.figure(f"{title} ({report.in_words}){report.proviso}", *pictures)


def save(
    statement: Statement,
    path: str | os.PathLike[str],
    date: datetime | None,
    overwrite: bool,
    results: Sequence[plots.Panel] = (),
) -> None:
    """Writes the card; see `Statement.save`.

    Args:
        statement: what it says.
        path: of the file.
        date: of the card; None for now.
        overwrite: replace a file that is there.
        results: pictures of what was released, which come first.
    """
    suffix = Path(path).suffix
    if suffix not in SUFFIXES:
        raise ValueError(f"path must end in {', '.join(SUFFIXES)} (got {os.fspath(path)!r})")
    date = datetime.now(UTC) if date is None else date
    content = {".html": _html, ".pdf": _pdf, ".md": _markdown, ".json": _json}[suffix](
        statement, date, results
    )
    try:
        with open(path, "wb" if overwrite else "xb") as file:
            file.write(content)
    except FileExistsError as error:
        raise FileExistsError(
            f"path must be that of a new file, or overwrite=True be given (got {os.fspath(path)!r})"
        ) from error


# -- pictures ---------------------------------------------------------------------------------------------------------


def panels(report: PrivacyReport) -> Iterator[plots.Panel]:
    """Yields the pictures of a report: what can be found out about one unit."""
    if math.isinf(report.epsilon):
        yield plots.words("No guarantee", "epsilon is infinite")
        return
    risk = report.risk()
    yield _found_out(report, risk)
    yield _proved(report, risk)


def bet(report: PrivacyReport) -> plots.Panel:
    """Returns the picture of an even bet on whether the data of one unit were used."""
    won = 50.0 + 50.0 * report.advantage
    return plots.ranges(
        f"What can be found out about one {report.unit_name}",
        "bets won on whether its data were used, in %",
        ["even\nbets"],
        np.array([won]),
        np.array([[50.0, won]]),
        "by the best possible test",
        line=("by a coin", 50.0),
        notes=[f"at most {percent(won / 100.0)}"],
        within=(0.0, 105.0),
    )


def accounts(report: PrivacyReport) -> Iterator[plots.Panel]:
    """Yields the picture of what was spent when, if it shows more than the headline."""
    if sum(count for _, count in report.spent) > 1 and math.isfinite(report.epsilon):
        yield _spent(report)


_SHARES = [k / 100 for k in range(101)]


def trade_off(curve: Iterable[tuple[float, float]], false_positive: float) -> float:
    """Returns a lower bound on the false negative rate of every test which of two neighboring data sets was used.

    Proof. For a test with true positive rate t and false positive rate f, (epsilon, delta)-DP of "says yes" gives
    t <= e^epsilon f + delta, and of "says no", with the data sets exchanged, 1 - f <= e^epsilon (1 - t) + delta.

    Args:
        curve: pairs (epsilon, delta) that hold for the same releases, in both directions.
        false_positive: rate f in [0, 1].

    Example:
        >>> trade_off([(0.0, 0.1)], 0.5), trade_off([(float("inf"), 0.0)], 0.5)
        (0.4, 0.0)
    """
    f = check.between(0.0, 1.0, false_positive=false_positive)
    best = 0.0
    for epsilon, delta in curve:
        if epsilon < 700:  # e^epsilon fits
            best = max(
                best, 1.0 - delta - math.exp(epsilon) * f, math.exp(-epsilon) * (1.0 - delta - f)
            )
    return best


def _found_out(report: PrivacyReport, risk: Risk) -> plots.Panel:
    found = {f: risk.true_positive(f) for f in _ALARMS}
    # where the curve, which is symmetric, is nearest to no error at all
    even = 0.5 - 0.5 * risk.advantage
    curve = ((report.epsilon, report.delta), *risk.points)
    places = sorted({*_SHARES, *_ALARMS, even})
    missed = [trade_off(curve, place) for place in places]
    return plots.lines(
        f"What a test can find out about one {report.unit_name}",
        "share of false alarms",
        "share of misses, at least",
        [
            plots.Line("best possible test", places, missed),
            plots.Line("blind guess", _SHARES, _SHARES[::-1]),
            *(
                plots.Line(f"{100 * f:g} % false alarms: {percent(t)} found", [f], [1.0 - t])
                for f, t in found.items()
            ),
        ],
        mark=(f"guesses right: {percent(1.0 - even)}", even, even),
    )


def _proved(report: PrivacyReport, risk: Risk) -> plots.Panel:
    after = {f: [risk.posterior(share, f) for share in _SHARES] for f in _ALARMS}
    return plots.lines(
        f"What an alarm proves about one {report.unit_name}",
        "thought likely before (share)",
        "likely after an alarm, at most",
        [
            *(plots.Line(f"{100 * f:g} % false alarms", _SHARES, y) for f, y in after.items()),
            plots.Line("without a test", _SHARES, _SHARES),
        ],
    )


def _spent(report: PrivacyReport) -> plots.Panel:
    level = f"epsilon at delta {rounded_up(report.delta)}"
    target = None if report.budget is None or report.budget.risk else report.budget.epsilon
    budget = None if target is None else (f"budget: {target:g}", target)
    so_far = plots.Line("so far", *_spending(report))
    return plots.lines("What was spent", "charges", level, [so_far], limit=budget)


def _spending(report: PrivacyReport) -> tuple[list[float], list[float]]:
    ends = np.cumsum([count for _, count in report.spent])
    even = (math.ceil(ends[-1] * k / _POINTS) for k in range(1, _POINTS + 1))
    marks = sorted({1, *even})
    ledger = Ledger()
    made = 0
    y = [0.0]
    for mark in marks:
        for (event, count), end in zip(report.spent, ends, strict=True):
            if (now := min(mark, end) - max(made, end - count)) > 0:
                ledger.add(event, int(now))
        made = mark
        y.append(ledger.epsilon(report.delta, report.adjacency))
    return [0.0, *map(float, marks)], y


# -- files ------------------------------------------------------------------------------------------------------------


def _made(statement: Statement, date: datetime) -> str:
    return f"Card made with torch_dpsco {statement.version}, {_written(date)}."


def _written(date: datetime) -> str:
    return date.isoformat(timespec="seconds")


def _json(statement: Statement, date: datetime, results: Sequence[plots.Panel]) -> bytes:
    return json.dumps(
        {**json.loads(statement.json()), "card": {"date": _written(date)}}, indent=2
    ).encode()


def _markdown(statement: Statement, date: datetime, results: Sequence[plots.Panel]) -> bytes:
    return f"{statement.markdown()}\n{_made(statement, date)}\n".encode()


def _pdf(statement: Statement, date: datetime, results: Sequence[plots.Panel]) -> bytes:
    report = statement.figures

    def write(paper: pages.Paper) -> None:
        paper.heading(statement.title, 17.0)
        paper.text(statement.headline, 10.0)
        _list(paper, "Read this first", statement.warnings)
        paper.heading("In short")
        paper.table([_pair(line) for line in statement.in_short], (0.16, 0.84), headed=False)
        paper.pictures([*results, *panels(report)])
        for section in statement.main:
            _list(paper, *section)
        paper.turn()
        paper.heading(f"Appendix: {_APPENDIX}", 14.0)
        paper.table(table(report), (0.24, 0.5, 0.13, 0.13), headed=True)
        if drawn := list(accounts(report)):
            paper.pictures(drawn)
        for section in statement.appendix:
            _list(paper, *section)
        paper.text(_made(statement, date), 7.5)

    return pages.typeset(statement.title, write, date)


def _list(paper: pages.Paper, title: str, sentences: Sequence[str]) -> None:
    if sentences:
        paper.heading(title)
    for sentence in sentences:
        paper.text(sentence, mark="\N{EN DASH}")


def _html(statement: Statement, date: datetime, results: Sequence[plots.Panel]) -> bytes:
    report = statement.figures
    warnings = statement.warnings
    body = [
        f"<h1>{escape(statement.title)}</h1><p><strong>{escape(statement.headline)}</strong></p>",
        _section("Read this first", warnings, " class=warn") if warnings else "",
        "<table>",
        *(_row(("th", "td"), _pair(line)) for line in statement.in_short),
        "</table>",
        _pictures([*results, *panels(report)]),
        *(_section(*section) for section in statement.main),
        f"<details><summary>{_APPENDIX[0].upper()}{_APPENDIX[1:]}</summary><table class=worlds>",
        *(_row(["td" if k else "th"] * 4, cells) for k, cells in enumerate(table(report))),
        "</table>",
        _pictures(accounts(report)),
        *(_section(*section) for section in statement.appendix),
        "</details>",
        f"<p><small>{escape(_made(statement, date))}</small></p>",
    ]
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(statement.title)}</title>"
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        f"style-src 'unsafe-inline'\"><style>{_STYLE}</style></head>"
    )
    return "\n".join([head, "<body>", *body, "</body></html>\n"]).encode()


def _pair(sentence: str) -> tuple[str, str]:
    """Returns what a sentence is about, and the rest of it."""
    about, _, rest = sentence.partition(": ")
    return about, rest


def _row(kinds: Sequence[str], cells: Sequence[str]) -> str:
    marked = zip(kinds, cells, strict=True)
    return f"<tr>{''.join(f'<{kind}>{escape(cell)}</{kind}>' for kind, cell in marked)}</tr>"


def _pictures(panels: Iterable[plots.Panel]) -> str:
    return f"<p class=pictures>{''.join(map(_picture, panels))}</p>"


def _picture(panel: plots.Panel) -> str:
    drawn = plots.figure("", panel)
    dark = _encoded(plots.figure("", panel, dark=True))
    alt = escape(drawn.axes[0].get_title())
    return (
        f'<picture><source media="screen and (prefers-color-scheme:dark)" srcset="{dark}">'
        f'<img alt="{alt}" src="{_encoded(drawn)}"></picture>'
    )


def _encoded(drawn: Figure) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(plots.encoded(drawn, 'svg')).decode()}"


def _section(title: str, sentences: Sequence[str], kind: str = "") -> str:
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f"<section{kind}><h2>{escape(title)}</h2><ul>{items}</ul></section>"
