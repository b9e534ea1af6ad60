"""Typeset pages: headings, paragraphs, tables and pictures, one below the other on A4, as a PDF with page numbers.

Drawn by matplotlib, in the proportional font that it comes with: what pictures need is enough for pages.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from torch_dpsco.show import plots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDE, _HIGH = 595.0, 842.0  # points
_LEFT = 64.0
_TOP = 62.0
_BOTTOM = 64.0
_FOOT = 36.0  # of the page's number
_ROOM = _WIDE - 2 * _LEFT
_LINE = 1.4  # line heights, in sizes of the font
_PANEL = 205.0  # height of a row of pictures


class Text(NamedTuple):
    """A paragraph, with a mark before it and some room above it; a heading stays with what follows."""

    words: str
    size: float = 8.5
    bold: bool = False
    mark: str = ""
    above: float = 3.0
    follows: float = 0.0


class Table(NamedTuple):
    """Rows of cells, whose columns have shares of the width; the first column is bold, or the first row."""

    rows: Sequence[Sequence[str]]
    shares: Sequence[float]
    headed: bool = False


class Pictures(NamedTuple):
    """Panels, two in a row; one such block on a page."""

    panels: Sequence[plots.Panel]


class End(NamedTuple):
    """The end of a page."""


Block: TypeAlias = Text | Table | Pictures | End


def heading(words: str, size: float = 11.0) -> Text:
    """Returns a heading, which is not left alone at the foot of a page."""
    return Text(words, size, True, above=1.1 * size, follows=40.0)


def typeset(title: str, blocks: Sequence[Block], date: datetime) -> bytes:
    """Returns a PDF.

    Args:
        title: at the foot of each page, beside its number.
        blocks: from the top down.
        date: of the file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    style, _ = plots.matplotlib()
    from matplotlib.backends.backend_pdf import PdfPages

    file = io.BytesIO()
    told = {"CreationDate": date, "Title": title}
    with style.context(plots.PRINTED), PdfPages(file, metadata=told) as pages:
        paper = _Paper()
        for block in blocks:
            paper.put(block)
        for number, page in enumerate(paper.pages, 1):
            said: dict[str, Any] = {"size": 7.5, "color": "#666666", "parse_math": False}
            page.text(_LEFT / _WIDE, _FOOT / _HIGH, title, **said)
            count = f"{number} / {len(paper.pages)}"
            page.text(1.0 - _LEFT / _WIDE, _FOOT / _HIGH, count, ha="right", **said)
            pages.savefig(page)
    return file.getvalue()


class _Paper:
    """Pages that fill from the top down."""

    def __init__(self) -> None:
        self.pages: list[Figure] = []
        self._turn()

    def put(self, block: Block) -> None:
        """Writes a block below the last one."""
        if isinstance(block, Text):
            self._write(block)
        elif isinstance(block, Table):
            self._tabulate(block)
        elif isinstance(block, Pictures):
            self._draw(block)
        else:
            self._turn()

    def _turn(self) -> None:
        _, figures = plots.matplotlib()
        self.pages.append(figures.Figure(figsize=(_WIDE / 72.0, _HIGH / 72.0)))
        self._at = _TOP
        self._drawn = False

    def _need(self, height: float) -> None:
        if self._at + height > _HIGH - _BOTTOM and self._at > _TOP:
            self._turn()

    def _line(self, words: str, left: float, size: float, bold: bool) -> None:
        place = left / _WIDE, 1.0 - (self._at + size) / _HIGH
        weight = "bold" if bold else "normal"
        self.pages[-1].text(*place, words, size=size, weight=weight, parse_math=False)

    def _write(self, block: Text) -> None:
        indent = 10.0 if block.mark else 0.0
        self._need(block.above + _LINE * block.size + block.follows)
        self._at += block.above
        mark = block.mark
        for line in _wrapped(block.words, _ROOM - indent, block.size, block.bold):
            self._need(_LINE * block.size)
            self._line(mark, _LEFT, block.size, False)
            self._line(line, _LEFT + indent, block.size, block.bold)
            self._at += _LINE * block.size
            mark = ""

    def _tabulate(self, block: Table) -> None:
        size = 8.5
        for number, row in enumerate(block.rows):
            cells = []
            for column, (words, share) in enumerate(zip(row, block.shares, strict=True)):
                bold = number == 0 if block.headed else column == 0
                cells.append((list(_wrapped(words, share * _ROOM - 8.0, size, bold)), bold))
            height = _LINE * size * max(len(lines) for lines, _ in cells) + 6.0
            self._need(height)
            self._rule()
            self._at += 3.0
            top, left = self._at, _LEFT
            for (lines, bold), share in zip(cells, block.shares, strict=True):
                self._at = top
                for line in lines:
                    self._line(line, left, size, bold)
                    self._at += _LINE * size
                left += share * _ROOM
            self._at = top + height - 3.0
        self._rule()
        self._at += 4.0

    def _rule(self) -> None:
        from matplotlib.lines import Line2D

        height = 1.0 - self._at / _HIGH
        ends = [_LEFT / _WIDE, 1.0 - _LEFT / _WIDE]
        self.pages[-1].add_artist(Line2D(ends, [height, height], color="#bbbbbb", linewidth=0.6))

    def _draw(self, block: Pictures) -> None:
        rows = -(-len(block.panels) // 2)
        if self._drawn:
            self._turn()
        self._need(rows * _PANEL + 8.0)
        self._at += 8.0
        page: Any = self.pages[-1]
        bottom = 1.0 - (self._at + rows * _PANEL) / _HIGH
        frame = (_LEFT / _WIDE, bottom, _ROOM / _WIDE, rows * _PANEL / _HIGH)
        page.set_layout_engine("constrained", rect=frame, hspace=0.06, wspace=0.06)
        grid = page.add_gridspec(rows, 2)
        for k, panel in enumerate(block.panels):
            panel(page.add_subplot(grid[divmod(k, 2)]))
        self._at += rows * _PANEL + 6.0
        self._drawn = True


def _wrapped(words: str, room: float, size: float, bold: bool) -> Iterator[str]:
    """Yields lines that are no wider than the room, but for single words."""
    line, wide = "", 0.0
    for word in words.split():
        more = _width(f" {word}", size, bold)
        if line and wide + more > room:
            yield line
            line, wide = "", 0.0
        line = f"{line} {word}" if line else word
        wide += more
    yield line


@lru_cache(4096)
def _width(words: str, size: float, bold: bool) -> float:
    """Returns how wide a text is, in points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(size=size, weight="bold" if bold else "normal")
    wide, _, _ = text_to_path.get_text_width_height_descent(words, font, ismath=False)
    return float(wide)
