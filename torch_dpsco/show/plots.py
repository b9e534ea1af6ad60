"""Small pictures of public numbers: panels of lines and dots in one matplotlib Figure.

Numbers and names in, a Figure out: nothing here knows a plan or a report. Names are shown as they are: matplotlib does
not read "$" as mathematics. Lines differ in style and marker, so that they can be told apart in print and without
color; colors stand out from white and from black, and a picture for a dark page has no background. No setting of
matplotlib is changed, and pyplot is not used.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Panel: TypeAlias = "Callable[[Axes], None]"

LOOKS = (
    ("#3d7fc4", "-", "o"),
    ("#c26a1b", "--", "s"),
    ("#4b9450", ":", "^"),
    ("#a862b4", "-.", "D"),
)
_FIXED = {
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.grid": True,
    "grid.color": "#d9d9d9",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.fontsize": 8.0,
    "legend.framealpha": 0.9,
    "svg.hashsalt": "torch_dpsco",  # the same picture is the same file
}
_INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
_BARE = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")
_DARK = {
    **dict.fromkeys(_INKED, "#dddddd"),
    **dict.fromkeys(_BARE, "none"),
    "grid.color": "#4a4a4a",
    "legend.facecolor": "#181818",
    "legend.edgecolor": "#4a4a4a",
}
PRINTED: list[Any] = [  # a style, for pages
    "default",
    _FIXED,
    {"font.size": 7.5, "axes.titlesize": 8.5, "legend.fontsize": 7.0, "lines.markersize": 4},
]
_LEVEL: dict[str, Any] = {"linewidth": 1.2, "linestyle": (0, (1, 1))}
_LONG = 24


class Line(NamedTuple):
    """A line of a panel: its name and its points."""

    label: str
    x: Sequence[float]
    y: Sequence[float]


def lines(
    title: str,
    x_label: str,
    y_label: str,
    drawn: Sequence[Line],
    *,
    limit: tuple[str, float] | None = None,
    mark: tuple[str, float, float] | None = None,
) -> Panel:
    """Returns a panel of lines from 0 up.

    Args:
        title: in plain words.
        x_label: with the unit.
        y_label: with the unit.
        drawn: at most four.
        limit: name and height of a level line.
        mark: name and place of one point.
    """

    def panel(axes: Axes) -> None:
        for line, (color, style, marker) in zip(drawn, LOOKS, strict=False):
            every = max(1, len(line.x) // 8)
            axes.plot(
                line.x,
                line.y,
                style,
                color=color,
                marker=marker,
                markersize=4,
                markevery=every,
                label=line.label,
            )
        if limit is not None:
            axes.axhline(limit[1], **_LEVEL, color=_ink(axes), label=limit[0])
        if mark is not None:
            axes.plot(*mark[1:], "*", color=_ink(axes), markersize=11, label=mark[0])
        _name_axes(axes, title, x_label, y_label)
        axes.set_xlim(left=min(min(line.x) for line in drawn))
        axes.set_ylim(bottom=0)
        if all(x == int(x) for line in drawn for x in line.x):
            axes.locator_params(axis="x", integer=True)
        _name_series(axes)

    return panel


def dots(
    title: str,
    x_label: str,
    rows: Sequence[str],
    drawn: Mapping[str, Sequence[float]],
    whole: tuple[str, float],
) -> Panel:
    """Returns a panel of one row per name, with one dot per series, on a logarithmic scale.

    Args:
        title: in plain words.
        x_label: with the unit.
        rows: from the top down.
        drawn: name of a series to its values > 0, one per row.
        whole: name and place of a line to compare with.
    """

    def panel(axes: Axes) -> None:
        for (label, values), (color, _, marker) in zip(drawn.items(), LOOKS, strict=False):
            axes.plot(values, range(len(rows)), marker, color=color, markersize=8, label=label)
            for row, value in enumerate(values):
                axes.annotate(
                    f"{value:.2g}",
                    (value, row),
                    (7, 0),
                    textcoords="offset points",
                    va="center",
                    size=7,
                )
        axes.axvline(whole[1], **_LEVEL, color=_ink(axes), label=whole[0])
        _name_rows(axes, rows)
        axes.set_xscale("log")
        _name_axes(axes, title, x_label)
        axes.margins(x=0.15)
        _name_series(axes)

    return panel


def ranges(
    title: str,
    x_label: str,
    rows: Sequence[str],
    values: NDArray[np.float64],
    ends: NDArray[np.float64] | None,
    label: str,
    *,
    line: tuple[str, float] | None = ("0", 0.0),
    notes: Sequence[str] = (),
    within: tuple[float, float | None] | None = None,
) -> Panel:
    """Returns a panel of one row per name, with a point, a bar from end to end, and a line to compare with.

    Args:
        title: in plain words.
        x_label: with the unit.
        rows: from the top down.
        values: points, one per row.
        ends: (k, 2), low and high of the bar of each row; None for points alone.
        label: of points and bars, for the legend.
        line: its name and place; None for none.
        notes: what is written above each point, if anything.
        within: (low, high) of the axis; None, or a high of None, for what is drawn.
    """

    def panel(axes: Axes) -> None:
        arms = None if ends is None else np.abs(np.transpose(ends) - values)
        look: dict[str, Any] = {"fmt": "o", "color": LOOKS[0][0], "capsize": 4, "label": label}
        axes.errorbar(values, range(len(rows)), xerr=arms, **look)
        for row, note in enumerate(notes):
            place: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "size": 8}
            axes.annotate(note, (values[row], row), (0, 7), **place, parse_math=False)
        if line is not None:
            axes.axvline(line[1], **_LEVEL, color=_ink(axes), label=line[0])
        _name_rows(axes, rows)
        axes.margins(x=0.2)
        if within is not None:
            axes.set_xlim(*within)
        _name_axes(axes, title, x_label)
        _name_series(axes)

    return panel


def words(title: str, text: str) -> Panel:
    """Returns a panel that says why there is no picture."""

    def panel(axes: Axes) -> None:
        _name_axes(axes, title)
        axes.set_axis_off()
        axes.text(
            0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, parse_math=False
        )

    return panel


def figure(title: str, *panels: Panel, columns: int = 2, dark: bool = False) -> Figure:
    """Returns the panels below a title if it is not empty.

    Args:
        title: of all of them.
        panels: from left to right, and then down.
        columns: at most so many in a row.
        dark: whether it is for a dark page: light on no background.

    Raises:
        ImportError: matplotlib is not installed.

    Example:
        >>> drawn = figure("Costs", lines("Epsilon", "steps", "epsilon", [Line("this plan", [0, 1], [0.0, 0.5])]))
        >>> encoded(drawn, "svg")[:5]
        b'<?xml'
    """
    style, figures = matplotlib()
    with style.context(
        ["default", _FIXED, _DARK if dark else {}]
    ):  # whatever the caller's style is
        wide = min(columns, len(panels))
        high = -(-len(panels) // columns)
        made: Figure = figures.Figure(figsize=(4.6 * wide, 4.2 * high), layout="constrained")
        if title:
            made.suptitle(title, fontsize=11, parse_math=False)
        for k, panel in enumerate(panels, 1):
            panel(made.add_subplot(high, wide, k))
    shown: Any = made
    # notebooks show it, whether pyplot was imported or not
    shown._repr_svg_ = partial(_svg, made)
    return made


def encoded(drawn: Figure, kind: str) -> bytes:
    """Returns a figure as a file of a kind: "svg", "png" or "pdf"."""
    style, _ = matplotlib()
    file = io.BytesIO()
    with style.context(["default", _FIXED]):
        drawn.savefig(
            file,
            format=kind,
            facecolor=drawn.get_facecolor(),
            dpi=150,
            metadata={"Date": None} if kind == "svg" else None,
        )
    return file.getvalue()


def _svg(drawn: Figure) -> str:
    return encoded(drawn, "svg").decode()


def _ink(axes: Axes) -> Any:
    """Returns the color of its text."""
    return axes.xaxis.label.get_color()


def _name_axes(axes: Axes, title: str, x_label: str = "", y_label: str = "") -> None:
    axes.set_title(title, parse_math=False)
    axes.set_xlabel(x_label, parse_math=False)
    axes.set_ylabel(y_label, parse_math=False)


def _name_series(axes: Axes) -> None:
    longest = max((len(label) for label in axes.get_legend_handles_labels()[1]), default=0)
    legend = axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        borderaxespad=4.4,  # below the name of the axis, whatever the height of the panel
        ncols=1 if longest > _LONG else 2,
    )
    for name in legend.get_texts():
        name.set_parse_math(False)


def _name_rows(axes: Axes, rows: Sequence[str]) -> None:
    axes.set_yticks(range(len(rows)), rows, parse_math=False)
    axes.set_ylim(len(rows) - 0.5, -0.5)


def matplotlib() -> tuple[Any, Any]:
    """Returns its styles and its figures; raises ImportError where it is not installed."""
    try:
        from matplotlib import figure as figures
        from matplotlib import style
    except ImportError as error:
        raise ImportError(
            "pictures must be drawn by matplotlib: pip install 'torch_dpsco[plots]'"
        ) from error
    return style, figures
