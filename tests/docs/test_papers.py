"""docs/papers: every numbered item of the four papers is there, and what its row names exists."""

from __future__ import annotations

import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ERRATA = {
    "hoelder": "Paper 1",
    "heavy_tails": "Paper 2",
    "users": "Paper 3",
    "output": "Paper 4",
}
UNNUMBERED = re.compile(r"Equation \d|Appendix [CF]")  # items that have no heading in the text
FIELDS = {"says", "code", "none", "theirs", "ours", "proof", "tests", "errata"}


@pytest.fixture(scope="module")
def paper_items() -> Iterator[ModuleType]:
    """The script that makes the tables."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import paper_items as module

        yield module
        for name in ("paper_items", "blocks"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def items(paper_items: ModuleType) -> dict[str, dict[str, Any]]:
    """The rows of each paper."""
    found: dict[str, dict[str, Any]] = paper_items.read("items.toml")
    return found


def rows(items: dict[str, dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (where, row) of all papers."""
    for paper, of_paper in items.items():
        for name, row in of_paper.items():
            yield f"{paper}, {name}", row


def exists(name: str) -> bool:
    """Returns whether a dotted name can be imported."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def missing(items: dict[str, dict[str, Any]], paper_items: ModuleType) -> list[str]:
    """Returns the functions that rows name and nobody can import."""
    wrong = []
    for where, row in rows(items):
        for name in row.get("code", []):
            inside = name.removeprefix(paper_items.REFERENCE)
            folder = "torch_dpsco" if inside == name else "tests.reference"
            if not exists(f"{folder}.{inside}"):
                wrong.append(f"{where}: {name}")
    return wrong


def test_every_numbered_item_has_a_row_and_no_row_is_invented(
    items: dict[str, dict[str, Any]], paper_items: ModuleType
) -> None:
    numbers = paper_items.read("numbers.toml")
    assert list(numbers) == list(items) == list(ERRATA)
    for paper, kinds in numbers.items():
        listed = {f"{kind} {number}" for kind in kinds for number in kinds[kind]}
        own = {name for name in items[paper] if not UNNUMBERED.fullmatch(name)}
        assert own == listed
    assert sum(map(len, items.values())) > 225


def test_the_numbers_are_those_of_the_papers_texts(paper_items: ModuleType) -> None:
    texts = [p / "shared" / "papers" for p in ROOT.parents if (p / "shared" / "papers").is_dir()]
    if not texts:
        pytest.skip("the texts of the papers are not beside the repository")
    assert paper_items.read_texts(texts[0]) == paper_items.read("numbers.toml")


def test_headings_are_items_and_citations_are_not(paper_items: ModuleType) -> None:
    text = "Theorem 7.\nLemma 3 with p\nLemma 4 (Name).\n[X22, Theorem 9]\nsee Algorithm 2\nLemma B.1.\nLemma 2.10.\n"
    assert paper_items.numbers_of(text) == {
        "Algorithm": ["2"],
        "Lemma": ["2.10", "4", "B.1"],
        "Theorem": ["7"],
    }


def test_rows_have_known_fields_and_say_what_is_missing(
    items: dict[str, dict[str, Any]],
) -> None:
    for where, row in rows(items):
        assert set(row) <= FIELDS, where
        assert row["says"], where
        assert ("code" in row) != ("none" in row), where
        assert "code" not in row or (row["theirs"] and row["ours"] and row["tests"]), where


def test_functions_of_rows_can_be_imported(
    items: dict[str, dict[str, Any]], paper_items: ModuleType
) -> None:
    assert missing(items, paper_items) == []
    broken = {
        "users": {"Lemma 1": {"code": ["HolderSGD", "no.such", "reference: papers.output.no"]}}
    }
    assert missing(broken, paper_items) == [
        "users, Lemma 1: no.such",
        "users, Lemma 1: reference: papers.output.no",
    ]


def test_tests_of_rows_exist(items: dict[str, dict[str, Any]]) -> None:
    text = "\n".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")
    )
    there = set(re.findall(r"def (test_\w+)\(", text))
    wrong = [
        f"{where}: {test}"
        for where, row in rows(items)
        for test in row.get("tests", [])
        if test not in there
    ]
    assert wrong == []


def test_errata_of_rows_are_those_of_their_paper_and_all_are_named(
    items: dict[str, dict[str, Any]],
) -> None:
    text = (DOCS / "errata.md").read_text(encoding="utf-8")
    for paper, title in ERRATA.items():
        (section,) = (part for part in text.split("\n## ")[1:] if part.startswith(title))
        listed = re.findall(r"^\| ([EH]\d+) \|", section, re.MULTILINE)
        named = {erratum for row in items[paper].values() for erratum in row.get("errata", [])}
        assert named == set(listed), paper


def test_the_tables_of_the_pages_are_those_of_the_file(paper_items: ModuleType) -> None:
    for path, blocks in paper_items.tables():
        assert paper_items.updated(path, blocks) == path.read_text(encoding="utf-8"), (
            "run `python benchmarks/paper_items.py --update`"
        )


def test_a_cell_never_breaks_its_table(
    items: dict[str, dict[str, Any]], paper_items: ModuleType
) -> None:
    for of_paper in items.values():
        for name, row in of_paper.items():
            line = paper_items.row(name, row)
            assert len(re.findall(r"(?<!\\)\|", line)) == 7, line
            assert "\n" not in line


def test_pages_begin_with_what_the_paper_gives_and_which_class_to_take() -> None:
    index = (DOCS / "papers" / "index.md").read_text(encoding="utf-8")
    for paper in ERRATA:
        assert f"]({paper}.md)" in index
        page = (DOCS / "papers" / f"{paper}.md").read_text(encoding="utf-8")
        head = page.split("\n## ")[0]
        assert head.index("**What it gives you.**") < head.index("**Which class to take.**")
        told = head.split("**What it gives you.**")[1].split("\n\n")[0]
        assert len(re.findall(r"\.(?:\s|$)", told)) == 3, paper
