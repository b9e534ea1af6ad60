"""The privacy card: a statement with its pictures, as one file that needs no other and no network.

Everything in it is public, as in `statement`: what was charged, and what follows from it.
"""

from __future__ import annotations

import base64
import json
import math
import os
import textwrap
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
from torch_dpsco.show import plots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from torch_dpsco.accounting.statement import Statement

SUFFIXES = (".html", ".pdf", ".md", ".json")
_POINTS = 12
_ALARMS = (0.01, 0.001)  # false positive rates that are marked
_STYLE = (
    "body{max-width:52em;margin:2em auto;padding:0 1em;font:16px/1.5 sans-serif;"
    "color:#222;background:#fff;overflow-wrap:break-word}"
    "table{border-collapse:collapse}"
    "td,th{border:1px solid #999;padding:.3em .6em;text-align:left}"
    "td:nth-child(n+3){white-space:nowrap}"
    ".pictures{display:flex;flex-wrap:wrap;gap:.5em}"
    "img{flex:1 1 20em;min-width:18em;max-width:min(100%,30em)}"
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
    return plots.figure(f"{title} ({report.in_words}){report.proviso}", *panels(report))


def save(
    statement: Statement, path: str | os.PathLike[str], date: datetime | None, overwrite: bool
) -> None:
    """Writes the card; see `Statement.save`."""
    suffix = Path(path).suffix
    if suffix not in SUFFIXES:
        raise ValueError(f"path must end in {', '.join(SUFFIXES)} (got {os.fspath(path)!r})")
    date = datetime.now(UTC) if date is None else date
    content = {".html": _html, ".pdf": _pdf, ".md": _markdown, ".json": _json}[suffix](
        statement, date
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
    """Yields the pictures of a report."""
    if math.isinf(report.epsilon):
        yield plots.words("No guarantee", "epsilon is infinite")
        return
    risk = report.risk()
    yield _found_out(report, risk)
    yield _proved(report, risk)
    if sum(count for _, count in report.spent) > 1:  # else no more to see than in the headline
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
    marks = sorted({1, *(math.ceil(ends[-1] * k / _POINTS) for k in range(1, _POINTS + 1))})
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


def _json(statement: Statement, date: datetime) -> bytes:
    return json.dumps(
        {**json.loads(statement.json()), "card": {"date": _written(date)}}, indent=2
    ).encode()


def _markdown(statement: Statement, date: datetime) -> bytes:
    return f"{statement.markdown()}\n{_made(statement, date)}\n".encode()


def _pdf(statement: Statement, date: datetime) -> bytes:
    made = textwrap.wrap(_made(statement, date), 100)
    text = ["PRIVACY STATEMENT", "", *str(statement).splitlines(), "", *made]
    return plots.document(text, draw(statement.figures), date)


def _html(statement: Statement, date: datetime) -> bytes:
    report = statement.figures
    sections = [("Read this first", statement.warnings)] if statement.warnings else []
    body = [
        f"<h1>Privacy statement</h1><p><strong>{escape(statement.headline)}</strong></p>",
        (
            f"<table>{''.join(_row(cells, 'td' if k else 'th') for k, cells in enumerate(table(report)))}</table>"
        ),
        *(_section(title, sentences, " class=warn") for title, sentences in sections),
        f"<p class=pictures>{''.join(map(_picture, panels(report)))}</p>",
        *(_section(title, sentences) for title, sentences in statement.sections),
        f"<p><small>{escape(_made(statement, date))}</small></p>",
    ]
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><title>Privacy'
        " statement</title>"
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        f"style-src 'unsafe-inline'\"><style>{_STYLE}</style></head>"
    )
    return "\n".join([head, "<body>", *body, "</body></html>\n"]).encode()


def _row(cells: tuple[str, ...], kind: str) -> str:
    return f"<tr>{''.join(f'<{kind}>{escape(cell)}</{kind}>' for cell in cells)}</tr>"


def _picture(panel: plots.Panel) -> str:
    drawn = plots.figure("", panel)
    encoded = base64.b64encode(plots.encoded(drawn, "svg")).decode()
    return f'<img alt="{escape(drawn.axes[0].get_title())}" src="data:image/svg+xml;base64,{encoded}">'


def _section(title: str, sentences: Sequence[str], kind: str = "") -> str:
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f"<section{kind}><h2>{escape(title)}</h2><ul>{items}</ul></section>"
