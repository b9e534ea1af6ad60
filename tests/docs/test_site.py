"""The documentation site: every public name is on a page, and its link check sees what is broken."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import torch_dpsco

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
EXAMPLES = sorted(
    path
    for path in (ROOT / "examples").glob("*.py")
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
)
# of what a reader of each door of the landing page reads before their first result
DOORS = {
    "A table": (1500, "study.md", "schema.md"),
    "A net": (1500, "nets.md"),
    "A trainer": (1000, "integrations/lightning.md"),
}


def listed(page: Path) -> Iterator[str]:
    """Yields the pages, without their endings, that the tables of contents in a page list."""
    for block in re.findall(
        r"```\{toctree\}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL
    ):
        for name in re.findall(r"^(?!:)(?:.*<)?([\w/.]+)>?$", block, re.MULTILINE):
            yield (page.parent / name).resolve().relative_to(DOCS).as_posix()


def words(text: str) -> int:
    """Returns how many words of a page are prose."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return len(re.sub(r"^:.*$", "", prose, flags=re.MULTILINE).split())


def test_the_sidebar_is_short_and_every_page_is_below_one_entry() -> None:
    first = list(listed(DOCS / "index.md"))
    assert len(first) <= 25
    pending, seen = list(first), []
    while pending:
        seen.append(name := pending.pop())
        if (page := DOCS / f"{name}.md").is_file():
            pending += listed(page)
    pages = [page for page in DOCS.rglob("*.md") if "_build" not in page.parts]
    names = {page.relative_to(DOCS).with_suffix("").as_posix() for page in pages} - {"index"}
    assert sorted(seen) == sorted({*names, "gallery/index"})


@pytest.mark.parametrize("first", ["README.md", "docs/index.md"])
@pytest.mark.parametrize("door", DOORS)
def test_a_door_leads_to_a_result_within_its_words(door: str, first: str) -> None:
    limit, *pages = DOORS[door]
    front = (ROOT / first).read_text(encoding="utf-8")
    head, *sections = front.split("\n## ")
    (section,) = (text for text in sections if text.startswith(f"{door}\n"))
    read = [head, section, *((DOCS / page).read_text(encoding="utf-8") for page in pages[:1])]
    read += [(DOCS / page).read_text(encoding="utf-8").split("\n## ")[0] for page in pages[1:]]
    assert 200 < sum(words(text) for text in read) <= limit


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_an_example_has_a_quick_run_and_says_so(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert 'add_argument("--quick"' in text
    assert f"{path.name} --quick" in text.split('"""')[1]


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
