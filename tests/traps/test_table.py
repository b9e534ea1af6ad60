"""The last section of docs/mistakes.md is made of the docstrings of the trap tests, which measure what they say.

After a change of theirs: python -c "from tests.traps.test_table import write; write()"
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
PAGE = FOLDER.parents[1] / "docs" / "mistakes.md"
HEAD = """## What Opacus lets pass silently

What goes wrong without an error in training loops with Opacus 1.6.0, and what happens in the same loops here. The texts
are those of the tests (in `tests/traps`), each of which first measures what Opacus does and then what `torch_dpsco`
does. T7 and the wrong declaration in T9 are found by a check before training; all others cannot happen. The numbers are
of models with one parameter and clip 1, so that a release can be read off the parameter.

| # | the trap | Opacus 1.6 | here | test |
|---|---|---|---|---|
"""
TITLE = HEAD.splitlines()[0]


def trap_tests() -> dict[int, dict[str, str]]:
    """Returns the tests of each trap with their docstrings."""
    found: dict[int, dict[str, str]] = {}
    for path in sorted(FOLDER.glob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            match = isinstance(node, ast.FunctionDef) and re.match(r"test_t(\d\d)_", node.name)
            if match:
                found.setdefault(int(match[1]), {})[node.name] = ast.get_docstring(node) or ""
    return found


def row(number: int, tests: dict[str, str]) -> str:
    """Returns the line of a trap: one of its tests has three paragraphs on it."""
    (text,) = filter(None, tests.values())
    trap, opacus, here = (" ".join(part.split()) for part in text.split("\n\n"))
    cells = [
        trap.removeprefix(f"T{number}: "),
        opacus.removeprefix("Opacus 1.6: "),
        here.removeprefix("Here: "),
    ]
    assert cells[0] != trap
    assert cells[1] != opacus
    assert cells[2] != here
    return f"| T{number} | {' | '.join(cells)} | {', '.join(f'`{name}`' for name in tests)} |\n"


def section() -> str:
    return HEAD + "".join(row(number, tests) for number, tests in sorted(trap_tests().items()))


def write() -> None:
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(text[: text.index(TITLE)] + section(), encoding="utf-8")


def test_each_trap_has_its_test() -> None:
    assert sorted(trap_tests()) == list(range(1, 17))


@pytest.mark.cases(12, 4)
@pytest.mark.parametrize("number", range(1, 17))
def test_the_table_says_of_each_trap_what_its_test_says(number: int) -> None:
    assert row(number, trap_tests()[number]) in PAGE.read_text(encoding="utf-8")


def test_the_table_holds_nothing_else() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text[text.index(TITLE) :] == section()
