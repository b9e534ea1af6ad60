"""The privacy card: a statement with its pictures, as one file that needs no other and no network.

Everything in it is public, as in `statement`: what was charged, and what follows from it.
"""

from __future__ import annotations

import base64
import json
import math
import os
import platform
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from torch_dpsco.accounting.analysis.risk import Risk, percent
from torch_dpsco.accounting.calibrate import rounded_up
from torch_dpsco.accounting.events import Event
from torch_dpsco.accounting.ledger import Ledger
from torch_dpsco.accounting.report import PrivacyReport, trade_off
from torch_dpsco.accounting.statement import table
from torch_dpsco.show import plots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from torch_dpsco.accounting.statement import Statement

SUFFIXES = (".html", ".pdf", ".md", ".json")
_POINTS = 12
_SHOWN = 8
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
    """Returns the pictures of a report: what a test can find out, what was spent when, and on what."""
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
    if sum(count for _, count in report.spent) < 2:
        return  # no more to see than in the headline
    yield from _spent(report)


_SHARES = [k / 100 for k in range(101)]


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


def _spent(report: PrivacyReport) -> Iterator[plots.Panel]:
    names, alone = _kinds(report)
    level = f"epsilon at delta {rounded_up(report.delta)}"
    target = None if report.budget is None or report.budget.risk else report.budget.epsilon
    budget = None if target is None else (f"budget: {target:g}", target)
    x_label = "charges" if len(names) == 1 else "charges, one kind after the other"
    yield plots.lines(
        "What was spent", x_label, level, [plots.Line("so far", *_spending(report))], limit=budget
    )
    if len(names) > 1:
        whole = (f"all together: {rounded_up(report.epsilon)}", report.epsilon)
        yield plots.bars("What each kind of charge costs by itself", level, names, alone, whole)


def _spending(report: PrivacyReport) -> tuple[list[float], list[float]]:
    total = sum(count for _, count in report.spent)
    marks = iter(sorted({1, *(math.ceil(total * k / _POINTS) for k in range(1, _POINTS + 1))}))
    ledger = Ledger()
    made = 0
    mark = next(marks)
    x = [0.0]
    y = [0.0]
    for event, count in report.spent:
        left = count
        while left:
            now = min(left, mark - made)
            ledger.add(event, now)
            left = left - now
            made = made + now
            if made == mark:
                x.append(float(made))
                y.append(ledger.epsilon(report.delta, report.adjacency))
                mark = next(marks, total)
    return x, y


def _kinds(report: PrivacyReport) -> tuple[list[str], list[float]]:
    ledgers: dict[str, Ledger] = {}
    for event, count in report.spent:
        name = _kind(event, len(report.charges) <= _SHOWN)
        ledgers.setdefault(name, Ledger()).add(event, count)
    costs = [ledger.epsilon(report.delta, report.adjacency) for ledger in ledgers.values()]
    return [f"{len(ledger)} x {name}" for name, ledger in ledgers.items()], costs


def _kind(event: Event, in_full: bool) -> str:
    ((_, _, simple, _),) = Ledger([event]).entries()
    name = type(simple).__name__
    numbers = [(own.name, getattr(simple, own.name)) for own in fields(simple)] if in_full else []
    return "".join(
        [
            name,
            *(f"\n{own}={value:.4g}" for own, value in numbers[:1] if isinstance(value, float)),
        ]
    )


# -- files ------------------------------------------------------------------------------------------------------------


def _facts(date: datetime) -> dict[str, str]:
    versions = {name: version(name) for name in ("torch", "numpy", "scipy")}
    return {
        "date": date.isoformat(timespec="seconds"),
        "python": platform.python_version(),
        **versions,
    }


def _made(statement: Statement, date: datetime) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in _facts(date).items())
    return f"Card made with torch_dpsco {statement.version}; {facts}."


def _json(statement: Statement, date: datetime) -> bytes:
    return json.dumps({**json.loads(statement.json()), "card": _facts(date)}, indent=2).encode()


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
