"""The documentation site: every public name is on a page, and its link check sees what is broken."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import torch_dpsco

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", torch_dpsco.__all__)
def test_every_public_name_is_on_a_page(name: str) -> None:
    documented = "\n".join(
        page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md")
    )
    assert f":: {name}\n" in documented or f".{name}\n" in documented


def test_the_link_check_of_the_site_names_what_leads_nowhere(tmp_path: Path) -> None:
    def check() -> tuple[int, str]:
        command = [sys.executable, str(ROOT / ".ci" / "site"), "--check", str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.returncode, done.stdout

    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "b.html").write_text(
        '<h1 id="here">b</h1><a href="../a.html#top">a</a>'
    )
    whole = '<p id="top"><a href="#top">1</a><a href="folder/b.html#here">2</a><a href="https://x.y/z#q">3</a>'
    (tmp_path / "a.html").write_text(whole)
    assert check()[0] == 0
    (tmp_path / "a.html").write_text(
        f'{whole}<a href="folder/b.html#gone">4</a><img src="c.png"><a href="#no">5</a>'
    )
    code, said = check()
    assert code == 1
    assert said.splitlines()[:3] == [
        "a.html: #no",
        "a.html: c.png",
        "a.html: folder/b.html#gone",
    ]
