"""How values show themselves: one short line for `repr`, and a table of HTML for notebooks. All of it is public.

Colours and fonts are those of the page, light or dark.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

MOST = 200  # characters of a line


def line(value: object, words: str) -> str:
    """Returns the kind of a value with some words about it, in one line of at most 200 characters.

    Example:
        >>> line([], "four of them")
        '<list: four of them>'
    """
    text = f"<{type(value).__name__}: {' '.join(words.split())}>"
    return text if len(text) <= MOST else f"{text[: MOST - 4]}...>"


def table(title: str, rows: Iterable[Sequence[str]], text: str = "") -> str:
    """Returns HTML: a title, a row for each tuple of cells, the first of which names it, and a text that is folded up.

    Example:
        >>> table("Tom & Jo", [("age", "< 90")])
        '<div><strong>Tom &amp; Jo</strong><table><tr><th>age</th><td>&lt; 90</td></tr></table></div>'
    """
    body = "".join(
        f"<tr><th>{escape(name)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
        for name, *cells in rows
    )
    folded = (
        f"<details><summary>all of it</summary><pre>{escape(text)}</pre></details>"
        if text
        else ""
    )
    return f"<div><strong>{escape(title)}</strong><table>{body}</table>{folded}</div>"
