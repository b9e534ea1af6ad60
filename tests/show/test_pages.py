"""Typeset pages: nothing leaves the paper, no heading stands alone, every page has its number."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

pytest.importorskip("matplotlib")
from matplotlib.backends.backend_agg import FigureCanvasAgg

from torch_dpsco.show import pages, plots

DATE = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
WORDS = (
    "Whatever somebody may conclude from the release, its probability $x_1$ hardly differs. " * 6
)


def written(write: Any) -> list[Any]:
    """Returns the pages as figures, with numbers."""
    kept: list[Any] = []

    def all_of_it(paper: pages.Paper) -> None:
        write(paper)
        kept.append(paper)

    assert pages.typeset("A card", all_of_it, DATE).startswith(b"%PDF")
    found: list[Any] = kept[0].pages
    return found


def texts(page: Any) -> list[Any]:
    return [text for text in page.texts if text.get_text()]


def within(page: Any) -> None:
    """Asserts that all text is between the margins, and no line on another one."""
    renderer = FigureCanvasAgg(page).get_renderer()
    boxes = [text.get_window_extent(renderer) for text in texts(page)]
    wide, high = page.get_size_inches() * page.dpi
    for box in boxes:
        assert box.x0 >= 0.1 * wide
        assert box.x1 <= 0.9 * wide
        assert box.y0 >= 0.03 * high
        assert box.y1 <= 0.95 * high
    for k, one in enumerate(boxes):
        for other in boxes[k + 1 :]:
            apart = min(one.x1, other.x1) <= max(one.x0, other.x0) + 1
            below = min(one.y1, other.y1) <= max(one.y0, other.y0) + 2
            assert apart or below


def test_paragraphs_and_tables_stay_on_the_paper() -> None:
    def write(paper: pages.Paper) -> None:
        paper.heading(f"A title that takes more than one line: {WORDS[:90]}", 17.0)
        for _ in range(12):
            paper.text(WORDS, mark="-")
        paper.table([("first", WORDS), ("second", WORDS)] * 3, (0.2, 0.8), headed=False)

    found = written(write)
    assert len(found) > 1
    for page in found:
        within(page)


def test_every_page_has_its_number_and_the_title() -> None:
    found = written(lambda paper: [paper.text(WORDS) for _ in range(60)])
    for number, page in enumerate(found, 1):
        said = [text.get_text() for text in texts(page)]
        assert said[-2:] == ["A card", f"{number} / {len(found)}"]


@pytest.mark.parametrize("lines", range(40, 62, 3))
def test_no_heading_is_the_last_line_of_a_page(lines: int) -> None:
    def write(paper: pages.Paper) -> None:
        for _ in range(lines):
            paper.text("short")
        paper.heading("A heading")
        paper.text("what it is of")

    for page in written(write):
        *_, last, _, _ = texts(page)
        assert last.get_weight() != "bold"


def test_a_word_wider_than_the_paper_is_a_line_of_its_own() -> None:
    (page,) = written(lambda paper: paper.text(f"short {'x' * 300} short"))
    assert [len(text.get_text()) for text in texts(page)[:3]] == [5, 300, 5]


def test_pictures_keep_off_the_text() -> None:
    panel = plots.lines(
        "a", "b", "c", [plots.Line("a name of a line that is long", [0, 1], [0, 1])]
    )

    def write(paper: pages.Paper) -> None:
        paper.text(WORDS)
        paper.pictures([panel] * 3)
        paper.text(WORDS)

    (page,) = written(write)
    renderer = FigureCanvasAgg(page).get_renderer()
    drawn = [axes.get_tightbbox(renderer) for axes in page.axes]
    assert len(drawn) == 3
    for text in texts(page):
        box = text.get_window_extent(renderer)
        assert not any(box.overlaps(other) for other in drawn)


def test_two_blocks_of_pictures_are_on_two_pages() -> None:
    panel = plots.words("a", "b")

    def write(paper: pages.Paper) -> None:
        paper.pictures([panel])
        paper.pictures([panel, panel])

    assert [len(page.axes) for page in written(write)] == [1, 2]
