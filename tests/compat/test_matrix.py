"""docs/compatibility.md names each test of this folder, each of its cases, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.compat.test_layers import CASES, FACTORED_CASES
from tests.compat.test_refused_models import AT_ATTACH, IN_TRAINING
from tests.compat.test_updates import INNER, SCHEDULERS

FOLDER = Path(__file__).parent
TEXT = (FOLDER.parents[1] / "docs" / "compatibility.md").read_text(encoding="utf-8")


def names_in(folder: Path) -> set[str]:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in folder.rglob("test_*.py")]
    found = {
        node.name
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    }
    return {name for name in found if name.startswith("test_")}


@pytest.mark.weekly
def test_the_matrix_names_every_test_here_and_only_tests_that_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", TEXT))
    assert len(named) >= 60
    assert not named - names_in(FOLDER.parent)
    assert not names_in(FOLDER) - named - names_of_this_file()


def names_of_this_file() -> set[str]:
    tree = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_the_matrix_names_every_case_and_only_cases_that_exist() -> None:
    cases = [*CASES, *FACTORED_CASES, *AT_ATTACH, *IN_TRAINING, *SCHEDULERS, *INNER]
    named = re.findall(r"(?<!\()\[([^\]`]+)\]", TEXT)
    assert sorted(set(named) - {"..."}) == sorted(set(cases))


def test_every_row_of_the_matrix_has_a_test_or_a_case() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("| ") and " | " in line]
    headings = [row for row in rows if re.search(r"\| (test|cases?) \|$", row)]
    assert len(headings) == 9
    assert not [
        row
        for row in rows
        if row not in headings and not re.search(r"`test_\w+`|\[[^\]]+\]", row)
    ]
