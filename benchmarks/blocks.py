"""Blocks of documents that a command writes: `<!-- table: NAME -->`, what it made, `<!-- end -->`."""

from __future__ import annotations

import re

BLOCK = "<!-- table: {} -->\n{}\n<!-- end -->"


def replaced(text: str, name: str, table: str) -> str:
    """Returns a document with one table exchanged; raises ValueError if it has no place for it."""
    pattern = re.escape(BLOCK).replace(re.escape("{}"), "{}").format(re.escape(name), ".*?")
    found, count = re.subn(pattern, lambda _: BLOCK.format(name, table), text, flags=re.DOTALL)
    if count != 1:
        raise ValueError(
            f"the document must have one block {BLOCK.format(name, '')!r} (got {count})"
        )
    return found
