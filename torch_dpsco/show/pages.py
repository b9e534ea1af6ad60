"""Typeset pages: headings, paragraphs, tables and pictures, one below the other on A4, as a PDF with page numbers.

Drawn by matplotlib, in the proportional font that it comes with: what pictures need is enough for pages.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from torch_dpsco.show import plots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDE = 595.0  # points
_HIGH = 842.0
_LEFT = 64.0
_TOP = 62.0
_BOTTOM = 64.0
_FOOT = 36.0  # of the page's number
_ROOM = _WIDE - 2 * _LEFT
_SIZE = 8.5  # of the font
_LINE = 1.4  # line heights, in sizes of the font
_PANEL = 205.0  # height of a row of pictures


def typeset(title: str, write: Callable[[Paper], None], date: datetime) -> bytes:
    """Returns a PDF.

    Args:
        title: at the foot of each page, beside its number.
        write: what fills the pages.
        date: of the file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    style, _ = plots.matplotlib()
    from matplotlib.backends.backend_pdf import PdfPages

    file = io.BytesIO()
    told = {"CreationDate": date, "Title": title}
    with style.context(plots.PRINTED), PdfPages(file, metadata=told) as pages:
        paper = Paper()
        write(paper)
        said: dict[str, Any] = {"size": 7.5, "color": "#666666", "parse_math": False}
        for number, page in enumerate(paper.pages, 1):
            page.text(_LEFT / _WIDE, _FOOT / _HIGH, title, **said)
            count = f"{number} / {len(paper.pages)}"
            page.text(1.0 - _LEFT / _WIDE, _FOOT / _HIGH, count, ha="right", **said)
            pages.savefig(page)
    return file.getvalue()


class Paper:
    """Pages that fill from the top down."""

    def __init__(self) -> None:
        self.pages: list[Figure] = []
        self.turn()

    def turn(self) -> None:
        """Begins a page."""
        _, figures = plots.matplotlib()
        self.pages.append(figures.Figure(figsize=(_WIDE / 72.0, _HIGH / 72.0)))
        self._at = _TOP
        self._drawn = False

    def heading(self, words: str, size: float = 11.0) -> None:
        """Writes a heading, which is not left alone at the foot of a page."""
        self._at += 1.1 * size
        self._need(_LINE * size + 40.0)
        self._lines(words, _LEFT, _ROOM, True, size)

    def text(self, words: str, size: float = _SIZE, mark: str = "") -> None:
        """Writes a paragraph, with a mark before it if there is one."""
        self._at += 3.0
        self._need(_LINE * size)
        indent = 10.0 if mark else 0.0
        self._line(mark, _LEFT, size, False)
        self._lines(words, _LEFT + indent, _ROOM - indent, False, size)

    def table(
        self, rows: Sequence[Sequence[str]], shares: Sequence[float], headed: bool
    ) -> None:
        """Writes rows of cells, whose columns have shares of the width; the first row is bold, or the first column."""
        self._at += 4.0
        for number, row in enumerate(rows):
            bold = [number == 0 if headed else column == 0 for column in range(len(row))]
            wide = [share * _ROOM for share in shares]
            cells = zip(row, wide, bold, strict=True)
            lines = max(len(list(_wrapped(cell, w - 8.0, _SIZE, b))) for cell, w, b in cells)
            self._need(_LINE * _SIZE * lines + 6.0)
            self._rule()
            top = self._at + 3.0
            for column, words in enumerate(row):
                self._at = top
                left = _LEFT + sum(wide[:column])
                self._lines(words, left, wide[column] - 8.0, bold[column], _SIZE)
            self._at = top + _LINE * _SIZE * lines + 3.0
        self._rule()

    def pictures(self, panels: Sequence[plots.Panel]) -> None:
        """Draws panels, two in a row; once on a page, which has one layout."""
        high = -(-len(panels) // 2) * _PANEL
        if self._drawn:
            self.turn()
        self._need(high + 8.0)
        page: Any = self.pages[-1]
        bottom = 1.0 - (self._at + 8.0 + high) / _HIGH
        frame = (_LEFT / _WIDE, bottom, _ROOM / _WIDE, high / _HIGH)
        page.set_layout_engine("constrained", rect=frame, hspace=0.06, wspace=0.06)
        grid = page.add_gridspec(-(-len(panels) // 2), 2)
        for k, panel in enumerate(panels):
            panel(page.add_subplot(grid[divmod(k, 2)]))
        self._at += high + 14.0
        self._drawn = True

    def _need(self, height: float) -> None:
        if self._at + height > _HIGH - _BOTTOM and self._at > _TOP:
            self.turn()

    def _lines(self, words: str, left: float, room: float, bold: bool, size: float) -> None:
        for line in _wrapped(words, room, size, bold):
            self._need(_LINE * size)
            self._line(line, left, size, bold)
            self._at += _LINE * size

    def _line(self, words: str, left: float, size: float, bold: bool) -> None:
        place = left / _WIDE, 1.0 - (self._at + size) / _HIGH
        weight = "bold" if bold else "normal"
        self.pages[-1].text(*place, words, size=size, weight=weight, parse_math=False)

    def _rule(self) -> None:
        from matplotlib.lines import Line2D

        ends = [_LEFT / _WIDE, 1.0 - _LEFT / _WIDE]
        height = 1.0 - self._at / _HIGH
        self.pages[-1].add_artist(Line2D(ends, [height, height], color="#bbbbbb", linewidth=0.6))


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
