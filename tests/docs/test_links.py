"""What code cites and pages link is there: files, and anchors by GitHub's rule for headings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("torch_dpsco", "tests", "docs", "examples", "benchmarks")
PAGES = sorted(
    [*ROOT.glob("*.md"), *(path for name in FOLDERS for path in (ROOT / name).rglob("*.md"))]
)
CODE = sorted(
    [*ROOT.glob("*.py"), *(path for name in FOLDERS for path in (ROOT / name).rglob("*.py"))]
)

CITED = re.compile(r"\bdocs/[\w./-]+\.md(?:#[\w-]*)?")
LINK = re.compile(r"\[[^\]]*\]\(\s*([^)\s]+)\s*\)")
# Proofs were cited by section of documents that are not in the repository. Families of documents:
FAMILIES = ("holder", "perf", "heavytail", "output", "accounting", "userlevel", "allocation")
OLD = re.compile(rf"\b(?:{'|'.join(FAMILIES)})(?:\.md,? (?:sections? )?[0-9A-Z]| spec\b)")


def prose(text: str) -> str:
    """Returns a page without its code, in which nothing is a link or a heading."""
    text = re.sub(r"^(```|~~~).*?^\1[^\n]*$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"^(?: {4}|\t).*$", "", text, flags=re.MULTILINE)


def slug(heading: str) -> str:
    """Returns the anchor that GitHub gives a heading: small letters, no punctuation, a hyphen for each space."""
    shown = (
        LINK.sub(lambda link: link[0][1 : link[0].index("](")], heading)
        .strip()
        .rstrip("#")
        .strip()
    )
    return re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")


@cache
def anchors(page: Path) -> frozenset[str]:
    """Returns the anchors of a page; the second of two equal headings is counted on."""
    found: dict[str, int] = {}
    for heading in re.findall(
        r"^#{1,6} +(.+)$", prose(page.read_text(encoding="utf-8")), flags=re.MULTILINE
    ):
        name = slug(heading)
        repeated = found.get(name, 0)
        found[name] = repeated + 1
        if repeated:
            found[f"{name}-{repeated}"] = 1
    return frozenset(found)


def broken(target: str, base: Path) -> bool:
    """Returns whether a path, with or without an anchor, leads nowhere from a folder; # alone is the page itself."""
    path, _, anchor = target.partition("#")
    page = base.parent / path if path else base
    return not page.exists() or (
        anchor != "" and (page.suffix != ".md" or anchor not in anchors(page))
    )


def citations(path: Path) -> Iterator[tuple[str, Path]]:
    """Yields (target, what it is relative to) of a file of code, or of a page."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from ((target, ROOT / "README.md") for target in CITED.findall(text))
        return
    # ` code ` is no link, and may span lines
    for target in LINK.findall(re.sub(r"`[^`]*`", "`", prose(text))):
        if not re.match(r"[a-z]+:", target):
            yield target, path


@pytest.mark.slow
def test_what_code_cites_and_pages_link_is_there() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {t}"
        for path in PAGES + CODE
        for t, base in citations(path)
        if broken(t, base)
    ]
    assert not wrong, "\n".join(wrong)


def spelled_out(path: str) -> list[str]:
    """Returns the paths that `a/{b,c}.py` stands for."""
    found = re.search(r"\{([^{}]*)\}", path)
    return [path.replace(found[0], name) for name in found[1].split(",")] if found else [path]


def test_files_and_folders_that_pages_name_are_there() -> None:
    places = [ROOT / name for name in ("", "torch_dpsco", "tests", "docs")]
    wrong = []
    for page in (page for page in PAGES if page.name != "CHANGELOG.md"):
        named = re.findall(
            r"`([\w{},*]+/[\w/{},*]*(?:\.py|/))`", page.read_text(encoding="utf-8")
        )
        paths = [path for name in named for path in spelled_out(name)]
        wrong += [
            f"{page.relative_to(ROOT)}: {path}"
            for path in paths
            if not any([*p.glob(path)] for p in places)
        ]
    assert not wrong, "\n".join(wrong)


def test_proofs_are_cited_by_page_and_anchor() -> None:
    wrong = []
    for path in (path for path in PAGES + CODE if path != Path(__file__)):
        name = path.relative_to(ROOT)
        wrong += [
            f"{name}: {citation}" for citation in OLD.findall(path.read_text(encoding="utf-8"))
        ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("heading", "anchor"),
    [
        ("Not proved", "not-proved"),
        ("Two runs, in floating point!", "two-runs-in-floating-point"),
        ("A `z`-scale and 1/B", "a-z-scale-and-1b"),
        ("See [noise](noise.md)", "see-noise"),
        ("1. The grid", "1-the-grid"),
    ],
)
def test_headings_have_the_anchors_of_github(heading: str, anchor: str) -> None:
    assert slug(heading) == anchor


def test_a_link_that_leads_nowhere_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One\n\n## Two\n\n## Two\n\n    # code\n\n[a](#two-1) [b](page.md#one) [c](https://x.y/z#q) `[d](no.md)`\n"
    )
    assert anchors(page) == {"one", "two", "two-1"}
    assert [target for target, _ in citations(page)] == ["#two-1", "page.md#one"]
    assert not any(broken(target, base) for target, base in citations(page))
    assert all(
        broken(target, page) for target in ("#three", "other.md", "page.md#code", "page.md#Two")
    )
    assert OLD.search("holder.md 3.5")
    assert OLD.search("holder spec, section 4")
    assert not OLD.search("docs/proofs/holder.md#promises")
