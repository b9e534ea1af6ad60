"""Whether the cells of a CSV file are those of its records: a rule of quotes by which none reaches another record.

A quote opens at the beginning of a cell, closes at its end, and is doubled inside (RFC 4180, as all writers of CSV do
it); there may be line breaks between quotes. Any other quote shows that whoever wrote the file paid no heed to quotes.
Then a note that begins with one swallows the rows up to the next quote, or all that follow: one record would decide how
many others there are. So a file with such a quote is refused, also where a reader would take the quote for text.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

_BLOCK = 1 << 20  # bytes that are looked at together
_MARK = b"\xef\xbb\xbf"  # of UTF-8, before the first cell
_QUOTE = ord('"')
_OUTSIDE = np.isin(
    np.arange(256), [*b',\r\n"']
)  # what may be on the outer side of a quote; another quote doubles it


class Readable(Protocol):
    """A file of bytes."""

    def read(self, size: int, /) -> bytes:
        """Returns the next bytes, at most so many; none at the end."""


def has_whole_cells(file: Readable) -> bool:
    r"""Returns whether all quotes of a file, which is read to its end, enclose whole cells or are doubled inside.

    Example:
        >>> import io
        >>> [has_whole_cells(io.BytesIO(text)) for text in (b'1,"a ""b""\n"', b'1,"a\n2,b', b'1,a "b"', b'1,"a"b')]
        [True, False, False, False]
    """
    before = b"\n"
    block = file.read(_BLOCK).removeprefix(_MARK)
    inside = 0
    while block:
        after = file.read(_BLOCK)
        codes = np.frombuffer(before + block + (after[:1] or b"\n"), dtype=np.uint8)
        quotes = 1 + np.flatnonzero(codes[1:-1] == _QUOTE)
        opening = quotes[inside::2]
        closing = quotes[1 - inside :: 2]
        # PRIVACY: (test_no_quote_of_a_record_swallows_others)
        if not (_OUTSIDE[codes[opening - 1]].all() and _OUTSIDE[codes[closing + 1]].all()):
            return False
        before = block[-1:]
        block = after
        inside = (inside + len(quotes)) % 2
    return not inside
