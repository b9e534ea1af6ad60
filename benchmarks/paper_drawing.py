"""What the exhibits of papers.py have in common: panels of lines on logarithmic axes, slopes, tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from torch_dpsco.show import plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("#3d7fc4", "#c26a1b", "#4b9450", "#a862b4", "#555555", "#b03060")
MARKERS = "os^Dvx"
PUBLISHED, OURS, LOWER = (
    "--",
    "-",
    ":",
)  # of the lines of a kind: read off the legend of each picture


class Series(NamedTuple):
    """A line: its name, its points, its style and color, and whiskers if it was measured."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    style: str
    color: int
    whiskers: Sequence[tuple[float, float]] = ()


class Exhibit(NamedTuple):
    """A picture with what it says in one sentence, and the table of its numbers."""

    name: str
    says: str
    table: str
    panels: Sequence[Callable[[Axes], None]]
    columns: int = 2
    note: str = ""  # how it was made


def loglog(
    title: str,
    x_label: str,
    y_label: str,
    drawn: Sequence[Series],
    *,
    low: float | None = None,
    legend: bool = True,
    linear: bool = False,
) -> Callable[[Axes], None]:
    """Returns a panel of lines on logarithmic axes, but for the values if `linear`; what is measured has whiskers."""

    def panel(axes: Axes) -> None:
        for series in drawn:
            look = {"color": COLORS[series.color % 6], "linestyle": series.style}
            if series.whiskers:
                arms = np.abs(np.transpose(series.whiskers) - np.asarray(series.y))
                look |= {"marker": MARKERS[series.color % 6]}
                axes.errorbar(
                    series.x, series.y, arms, label=series.label, capsize=3, ms=4, **look
                )
            else:
                axes.plot(series.x, series.y, label=series.label, linewidth=1.2, **look)
        axes.set_xscale("log")
        axes.set_yscale("linear" if linear else "log")
        axes.set(title=title, xlabel=x_label, ylabel=y_label)
        places = sorted({x for series in drawn for x in series.x})
        short = all(float(f"{place:.2g}") == place for place in places)
        if (
            short and places[-1] / places[0] < 100 and len(places) < 9
        ):  # names of ticks would overlap
            axes.tick_params(axis="x", which="minor", labelbottom=False)
            axes.set_xticks(places, [f"{place:,g}" for place in places])
        if low is not None:
            axes.set_ylim(bottom=low)
        if legend:
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0.0), borderaxespad=4.4)

    return panel


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Returns the slope on log-log of the points above 0; NaN for fewer than two."""
    kept = [(math.log(a), math.log(b)) for a, b in zip(x, y, strict=True) if b > 0]
    if len(kept) < 2:
        return math.nan
    return float(np.polyfit(*np.transpose(kept), 1)[0])


def slope_error(x: Sequence[float], runs: Sequence[Sequence[float]]) -> float:
    """Returns the standard error of the slope of the medians, by drawing runs of each size again."""
    generator = np.random.default_rng(0)
    again = [
        slope(x, [float(np.median(generator.choice(each, len(each)))) for each in runs])
        for _ in range(200)
    ]
    return float(np.std(again))


def measured(
    label: str, x: Sequence[float], runs: Sequence[Sequence[float]], color: int, style: str
) -> Series:
    """Returns the medians of runs, with whiskers from the lowest to the highest."""
    ends = [(min(each), max(each)) for each in runs]
    return Series(label, x, [float(np.median(each)) for each in runs], style, color, ends)


def words(number: float) -> str:
    """Returns a number with two digits, without exponents."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.2g}"


def table(head: Sequence[str], rows: Mapping[str, Sequence[object]]) -> str:
    """Returns a table in Markdown; numbers with three digits."""

    def cell(value: object) -> str:
        if isinstance(value, float):
            return f"{value:,.0f}" if 1_000 <= abs(value) < 1e10 else f"{value:.3g}"
        return f"{value:,}" if isinstance(value, int) else str(value)

    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    lines += [f"| {' | '.join([name, *map(cell, row)])} |" for name, row in rows.items()]
    return "\n".join(lines)


def svg(exhibit: Exhibit) -> bytes:
    """Returns the picture of an exhibit."""
    drawn = plots.figure("", *exhibit.panels, columns=exhibit.columns)
    return plots.encoded(drawn, "svg")


def png(exhibit: Exhibit) -> bytes:
    """Returns the picture of an exhibit as a raster."""
    return plots.encoded(plots.figure("", *exhibit.panels, columns=exhibit.columns), "png")
