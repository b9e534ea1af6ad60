"""Tables of several kinds, column by column: pandas, Arrow, dicts of columns, and files.

Whether the cells of a CSV file are those of its records: a rule of quotes by which none reaches another record.

A quote opens at the beginning of a cell, closes at its end, and is doubled inside (RFC 4180, as all writers of CSV do
it); there may be line breaks between quotes. Any other quote shows that whoever wrote the file paid no heed to quotes.
Then a note that begins with one swallows the rows up to the next quote, or all that follow: one record would decide how
many others there are. So a file with such a quote is refused, also where a reader would take the quote for text.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from torch_dpsco._validate import shown

Column = (
    NDArray[Any] | list[Any]
)  # numbers by dtype, missing ones NaN; else values, each by itself
_DATES = ("datetime", "timedelta", "timestamp", "date", "complex")


def opened(frame: Any, wanted: list[str] | None) -> Any:
    """Returns a table; that of a path with these columns alone, or all of them."""
    if isinstance(frame, Mapping) or hasattr(frame, "columns"):
        return frame
    path = os.fspath(frame) if isinstance(frame, (str, os.PathLike)) else ""
    if not path.endswith((".csv", ".parquet")):
        raise ValueError(
            "frame must be a table with named columns, or the path of a .csv or .parquet file (got"
            f" {shown(frame)})"
        )
    if not os.path.isfile(path):
        raise FileNotFoundError(f"frame must be a file that is there (got {path!r})")
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError(
            "files must be read by pyarrow: pip install 'torch_dpsco[parquet]'"
        ) from error
    try:
        if path.endswith(".csv"):
            return _read_csv(path)
        present = parquet.read_schema(path).names
        chosen = present if wanted is None else [name for name in wanted if name in present]
        return parquet.read_table(path, columns=chosen)
    except (pyarrow.ArrowException, UnicodeDecodeError):
        # PRIVACY: pyarrow quotes the row (test_no_row_of_a_broken_file_is_quoted)
        raise ValueError(
            f"frame must be a valid {path.rpartition('.')[2]} file (got {path!r})"
        ) from None


def names(frame: Any) -> list[str]:
    """Returns the names of the columns."""
    if isinstance(frame, Mapping):
        return list(frame)
    return list(getattr(frame, "column_names", None) or frame.columns)


def columns_of(frame: Any, wanted: list[str]) -> dict[str, Column]:
    """Returns columns of a table by name; raises ValueError unless each is there once, and all have one length."""
    there = names(frame)
    for name in wanted:
        if (times := there.count(name)) != 1:
            raise ValueError(
                f"column {name!r} must be in the frame, once (got it {times} times)"
            )
    columns = {name: column(name, frame[name]) for name in wanted}
    lengths = {name: len(found) for name, found in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"columns must have one length (got {lengths})")
    return columns


def column(name: str, found: Any) -> Column:
    """Returns a column of pandas, Arrow or numpy, or a list; raises ValueError unless it is of numbers or text."""
    kind = str(getattr(found, "dtype", getattr(found, "type", type(found).__name__)))
    listed = hasattr(found, "__len__") and not isinstance(found, (str, bytes))
    if not listed or kind.startswith(_DATES) or getattr(found, "ndim", 1) != 1:
        raise ValueError(
            f"column {name!r} of the frame must be a list or array (n,) of numbers or text (got"
            f" {kind})"
        )
    if hasattr(found, "to_pylist"):
        whole = kind.startswith(("int", "uint", "bool")) and not found.null_count
        if whole or kind.startswith(("float", "double", "halffloat")):
            return np.asarray(found.to_numpy(zero_copy_only=False))
        return list(found.to_pylist())
    if isinstance(getattr(found, "dtype", None), np.dtype) and found.dtype.kind in "biuf":
        return np.asarray(found)
    return list(found.tolist() if hasattr(found, "tolist") else found)


def _read_csv(path: str) -> Any:
    """Returns all columns of a file, as text."""
    import pyarrow
    from pyarrow import csv

    # PRIVACY: else one record could become many (test_a_record_of_many_lines_stays_one)
    lines = csv.ParseOptions(newlines_in_values=True)
    before = _version(path)
    with pyarrow.OSFile(path) as file:
        if not has_whole_cells(file):
            # PRIVACY: a note that begins with a quote would swallow the rows after it
            # (test_no_quote_of_a_record_swallows_others)
            raise ValueError(
                "frame must be a .csv file whose quotes enclose whole cells, and are doubled"
                f" inside, as CSV writers do (got {path!r}): one that is left open swallows the"
                " rows after it; write the file anew from its source, or as .parquet"
            )
    # each reader opens the file itself: threads of pyarrow read ahead, also after a reader is done, so that one file
    # for both would lose rows (test_no_row_of_a_slow_file_is_lost)
    with csv.open_csv(path, parse_options=lines) as reader:
        head = reader.schema.names
    # PRIVACY: text, since types would be guessed from values (test_no_value_of_a_file_decides_how_others_are_read)
    text = csv.ConvertOptions(column_types=dict.fromkeys(head, pyarrow.string()))
    table = csv.read_csv(path, parse_options=lines, convert_options=text)
    if _version(path) != before:
        raise ValueError(
            f"frame must be a file that nobody writes while it is read (got {path!r})"
        )
    return table


def _version(path: str) -> tuple[int, int, int]:
    found = os.stat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns


_BLOCK = 1 << 20  # bytes that are looked at together
_MARK = b"\xef\xbb\xbf"  # of UTF-8, before the first cell
_QUOTE = ord('"')
_OUTSIDE = np.isin(
    np.arange(256), [*b',\r\n"']
)  # what may be on the outer side of a quote; another quote doubles it


def has_whole_cells(file: BinaryIO) -> bool:
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
