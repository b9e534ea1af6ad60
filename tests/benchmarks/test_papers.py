"""The exhibits of docs/papers: bounds are recomputed, pictures are there, and slopes are what they are called."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCS, FOLDER = ROOT / "docs", ROOT / "benchmarks"
BLOCK = re.compile(r"<!-- table: (\w+) -->\n(.*?)\n<!-- end -->", re.DOTALL)
PICTURES = {
    "hoelder": ["hoelder_figure_1", "hoelder_table_1", "hoelder_bounds", "hoelder_risk"],
    "heavy_tails": [
        "heavy_rates",
        "heavy_bounds",
        "heavy_instances",
        "heavy_squares",
        "heavy_pareto",
    ],
    "users": ["users_needed", "users_noise", "users_smoothing", "users_error"],
    "output": [
        "output_sample",
        "output_new",
        "output_tilted",
        "output_time",
        "output_risk",
        "output_adult",
    ],
}


@pytest.fixture(scope="module")
def papers() -> Iterator[ModuleType]:
    """Imports the command; the scripts find each other beside themselves, as they do when they are run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        before = set(sys.modules)
        import papers as module

        yield module
        for name in {path.stem for path in FOLDER.glob("*.py")} & (set(sys.modules) - before):
            del sys.modules[name]


def blocks(page: str) -> dict[str, str]:
    return dict(BLOCK.findall((DOCS / "papers" / f"{page}.md").read_text(encoding="utf-8")))


@pytest.mark.parametrize("page", PICTURES)
def test_each_exhibit_has_its_picture_and_one_sentence(page: str) -> None:
    found = blocks(page)
    assert [name for name in found if name not in ("counts", "items")] == PICTURES[page]
    for name in PICTURES[page]:
        told, target = re.findall(r"!\[(.*?)\]\((.*?)\)", found[name])[0]
        picture = (DOCS / "papers" / target).resolve()
        assert picture.stem == name
        assert picture.read_bytes().startswith(b"<?xml")
        assert f"**{told}**" in found[name]
        assert len(re.findall(r"\.(?:\s|$)", told)) == 1, told
        assert "nan" not in told, told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "name", "make"),
    [
        ("output", "output_new", lambda p: p.paper_output.exhibits(False)),
        ("output", "output_tilted", lambda p: p.paper_output.exhibits(False)),
        ("heavy_tails", "heavy_rates", lambda p: p.paper_heavy.exhibits(False)),
        ("heavy_tails", "heavy_bounds", lambda p: p.paper_heavy.exhibits(False)),
        ("users", "users_needed", lambda p: p.paper_users.exhibits(False)),
        (
            "users",
            "users_smoothing",
            lambda p: iter([p.paper_users.smoothing(p.paper_users.DIMS)]),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_computed_by_formula_is_what_the_page_says(
    papers: ModuleType, page: str, name: str, make: Callable[[ModuleType], Iterator[Any]]
) -> None:
    exhibit = next(made for made in make(papers) if made.name == name)
    assert papers.block(exhibit) == blocks(page)[name]


def test_the_slope_of_a_power_is_its_exponent_and_its_error_grows_with_the_spread(
    papers: ModuleType,
) -> None:
    drawing = sys.modules["paper_drawing"]
    sizes = (100, 1_000, 10_000)
    assert drawing.slope(sizes, [n**-0.75 for n in sizes]) == pytest.approx(-0.75)
    assert math.isnan(drawing.slope((1, 2), (1.0, 0.0)))
    runs = [[n**-1.0 * factor for factor in (0.5, 1.0, 2.0)] for n in sizes]
    same = [[n**-1.0] * 3 for n in sizes]
    assert drawing.slope_error(sizes, same) == pytest.approx(0.0, abs=1e-12)
    assert drawing.slope_error(sizes, runs) > 0.05


def test_a_paper_that_is_not_there_is_refused(
    papers: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        papers.main(["s5"])
    assert "papers must be of s1, s2, s3, s4 (got s5)" in capsys.readouterr().err


def test_an_exhibit_is_drawn_and_put_into_its_page(
    papers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawing = sys.modules["paper_drawing"]
    panel = drawing.loglog("t", "x", "y", [drawing.Series("a", (1, 10), (1.0, 0.1), "-", 0)])
    made = drawing.Exhibit("one", "It falls.", "| a |", [panel])
    monkeypatch.setitem(papers.EXHIBITS, "s4", ("page", lambda smoke: iter([made])))
    (tmp_path / "papers").mkdir()
    page = tmp_path / "papers" / "page.md"
    page.write_text("# Page\n\n<!-- table: one -->\n\n<!-- end -->\n", encoding="utf-8")
    papers.main(["s4", "--update", str(tmp_path)])
    assert "![It falls.](../images/papers/one.svg)\n\n**It falls.**\n\n| a |" in page.read_text()
    assert (tmp_path / "images" / "papers" / "one.svg").read_bytes().startswith(b"<?xml")
