"""The tables of docs/papers: each numbered item of the four papers beside our function, constants, test and errata.

    python benchmarks/paper_items.py                        # names what is out of date
    python benchmarks/paper_items.py --update               # puts the tables of items.toml into the pages
    python benchmarks/paper_items.py --texts FOLDER         # prints the numbers of the items in the papers' texts
    python benchmarks/paper_items.py --texts FOLDER --update    # ... and keeps them in numbers.toml

items.toml is written by hand; numbers.toml and the tables are not. tests/docs/test_papers.py checks that each number
has its item, and that functions, tests, proofs and errata of each item exist.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from blocks import replaced

DOCS = Path(__file__).parents[1] / "docs"
FOLDER = DOCS / "papers"
TITLES = {  # how the text of each paper begins
    "hoelder": "Differentially Private SGD with Non-Smooth Losses",
    "heavy_tails": "Private Stochastic Optimization with Large Worst-Case Lipschitz Parameter",
    "users": "User-level Differentially Private Stochastic Convex Optimization",
    "output": "Output Perturbation for Differentially Private Convex Optimization",
}
KINDS = (
    "Definition|Assumption|Example|Theorem|Proposition|Lemma|Corollary|Remark",  # have headings
    "Algorithm|Table|Figure",  # some captions are lost: wherever they are named
)
NUMBER = r"((?:[A-Z]\.)?\d+(?:\.\d+)?)"
HEADING = re.compile(rf"^ *({KINDS[0]}) {NUMBER}(?=\.? ?$|\.? \(|\. )", re.MULTILINE)
NAMED = re.compile(rf"\b({KINDS[1]})[ \u00a0]{NUMBER}")
CITED = re.compile(r"\[[^\[\]]*\]")  # theorems of others
REFERENCE = "reference: "
HEAD = "| item | function | theirs | ours | test | errata |\n|---|---|---|---|---|---|"

Item = Mapping[str, Any]


def read(name: str) -> dict[str, Any]:
    """Returns a file of data of the pages."""
    return tomllib.loads((FOLDER / name).read_text(encoding="utf-8"))


def in_order(number: str) -> tuple[tuple[bool, int, str], ...]:
    """Returns what numbers are sorted by: 2.9, 2.10, then B.1."""
    parts = number.split(".")
    return tuple(
        (not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts
    )


def numbers_of(text: str) -> dict[str, list[str]]:
    """Returns the numbers of each kind of item in a paper's text."""
    own = CITED.sub("", text)
    found: dict[str, set[str]] = {}
    for kind, number in [*HEADING.findall(own), *NAMED.findall(own)]:
        found.setdefault(kind, set()).add(number)
    return {kind: sorted(found[kind], key=in_order) for kind in sorted(found)}


def read_texts(folder: Path) -> dict[str, dict[str, list[str]]]:
    """Returns the numbers of each paper whose text is in a folder."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.txt"))]
    return {
        paper: numbers_of(text)
        for paper, title in TITLES.items()
        for text in texts
        if title in text[:2_000]
    }


def as_toml(numbers: Mapping[str, Mapping[str, Sequence[str]]]) -> str:
    """Returns the text of numbers.toml."""
    lines = ["# Written by `python benchmarks/paper_items.py --texts FOLDER --update`."]
    for paper, kinds in numbers.items():
        lines += ["", f"[{paper}]"]
        lines += [f"{kind} = {json.dumps(kinds[kind])}" for kind in sorted(kinds)]
    return "\n".join(lines) + "\n"


def cell(text: str) -> str:
    """Returns text that a cell of a table can hold."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def functions(item: Item) -> str:
    """Returns the functions of an item, or why there is none."""
    code: list[str] = item.get("code", [])
    ours = [f"`{name}`" for name in code if not name.startswith(REFERENCE)]
    tests_only = [f"`{name[len(REFERENCE) :]}`" for name in code if name.startswith(REFERENCE)]
    if not code:
        return f"none: {cell(item['none'])}"
    if not ours:
        return f"reference only: {', '.join(tests_only)}"
    return ", ".join(ours) + (f"; reference: {', '.join(tests_only)}" if tests_only else "")


def row(name: str, item: Item) -> str:
    """Returns the row of an item."""
    proof = f"([proof](../proofs/{item['proof']}))" if "proof" in item else ""
    ours = " ".join(part for part in (cell(item.get("ours", "")), proof) if part)
    tests = ", ".join(f"`{test}`" for test in item.get("tests", []))
    cells = [
        f"**{name}** {cell(item['says'])}",
        functions(item),
        cell(item.get("theirs", "")),
        ours,
        tests,
        ", ".join(item.get("errata", [])),
    ]
    return f"| {' | '.join(text or '-' for text in cells)} |"


def counts(items: Mapping[str, Item]) -> str:
    """Returns how many items have which kind of function."""
    shown = [functions(item) for item in items.values()]
    none = sum(text.startswith("none") for text in shown)
    reference = sum(text.startswith("reference only") for text in shown)
    return (
        f"{len(items)} items: {len(items) - none - reference} with a function of the library, {reference} "
        "with one in "
        f'the tests only ("reference only"), {none} with none.'
    )


def tables() -> Iterator[tuple[Path, dict[str, str]]]:
    """Yields each page, and what its blocks hold."""
    for paper, items in read("items.toml").items():
        rows = [row(name, item) for name, item in items.items()]
        yield (
            FOLDER / f"{paper}.md",
            {"counts": counts(items), "items": "\n".join([HEAD, *rows])},
        )


def updated(path: Path, blocks: Mapping[str, str]) -> str:
    """Returns the text of a page with its blocks as they should be."""
    text = path.read_text(encoding="utf-8")
    for name, table in blocks.items():
        text = replaced(text, name, table)
    return text


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", type=Path, help="folder with the papers' texts")
    parser.add_argument("--update", action="store_true", help="write numbers.toml, or the pages")
    args = parser.parse_args(argv)
    if args.texts is not None:
        numbers = as_toml(read_texts(args.texts))
        print(numbers)
        if args.update:
            (FOLDER / "numbers.toml").write_text(numbers, encoding="utf-8")
        return
    old = []
    for path, blocks in tables():
        text = updated(path, blocks)
        if text != path.read_text(encoding="utf-8"):
            old.append(path.name)
            if args.update:
                path.write_text(text, encoding="utf-8")
        print(f"{path.name}: {blocks['counts']}")
    if old and not args.update:
        sys.exit(f"not as items.toml says: {', '.join(old)}")


if __name__ == "__main__":
    main()
