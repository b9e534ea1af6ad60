"""What a stranger adds to the library needs the installed package and its public names alone."""

from __future__ import annotations

import ast
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import torch_dpsco

ROOT = Path(__file__).parents[2]
FILES = sorted((Path(__file__).parent / "stranger").glob("*.py"))
PAGE = (ROOT / "docs" / "your_own.md").read_text(encoding="utf-8")
SHOWN = dict(re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))

RUN = """
import importlib.util, runpy, sys
assert importlib.util.find_spec("tests") is None, "the repository is on the path"
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def private_names(tree: ast.AST) -> set[str]:
    """Returns the underscored names that a file reads, sets, defines or imports; not dunders."""
    found: set[str] = set()
    for node in ast.walk(tree):
        names = [getattr(node, name, None) for name in ("attr", "id", "name", "arg", "module")]
        found.update(part for name in names if isinstance(name, str) for part in name.split("."))
    return {name for name in found if re.match("_[a-zA-Z]", name)}


@pytest.mark.weekly
def test_what_a_stranger_writes_has_no_underscored_name_of_the_library() -> None:
    package = Path(torch_dpsco.__file__).parent
    theirs = set().union(*(private_names(ast.parse(path.read_bytes())) for path in package.rglob("*.py")))
    assert {"_validate", "_corner", "_form"} - theirs == {"_corner"}
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert private_names(ast.parse(text)) & theirs == set(), path.name
        assert "getattr(" not in text
        assert "noqa" not in text


def test_the_page_shows_these_files_and_no_others() -> None:
    assert sorted(SHOWN) == sorted(path.read_text(encoding="utf-8") for path in FILES)
    assert PAGE.count("```python") == len(FILES)


def test_the_walk_through_counts_the_lines_of_these_files(tmp_path: Path) -> None:
    count = runpy.run_path(str(ROOT / ".ci" / "size"))["lines_of_code"]
    counted = {}
    for path in FILES:
        above = tmp_path / path.name  # what only tries the file is not counted
        above.write_text(
            re.split(r"^(?:def train|if __name__)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[0]
        )
        counted[path.name] = count(above)
    told = re.findall(
        r"\(tests/outside/stranger/(\w+\.py)\) \| (\d+) \|", (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    )
    assert {name: int(lines) for name, lines in told} == counted
    assert max(counted.values()) < 60


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_stranger_needs_the_installed_package_alone(path: Path, tmp_path: Path) -> None:
    installed, home = tmp_path / "installed", tmp_path / "home"
    installed.mkdir()
    home.mkdir()
    (installed / "torch_dpsco").symlink_to(Path(torch_dpsco.__file__).parent)
    script = home / path.name
    script.write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    run = subprocess.run(
        [sys.executable, "-c", RUN, script.name],
        cwd=home,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == SHOWN[script.read_text(encoding="utf-8")]
