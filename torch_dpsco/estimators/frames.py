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
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from torch_dpsco.estimators.columns import Category, Number, Ordered

_ARROW = (
    "int",
    "uint",
    "float",
    "double",
    "halffloat",
)  # types of numbers, of which missing ones become NaN


def opened(frame: Any, wanted: list[str] | None) -> Any:
    """Returns a table; that of a path with these columns alone, or all of them."""
    if not isinstance(frame, (str, os.PathLike)):
        if (
            not hasattr(frame, "columns")
            and not isinstance(frame, Mapping)
            and not hasattr(frame, "column_names")
        ):
            raise ValueError(
                f"frame must be a table with named columns, or a path (got {type(frame).__name__})"
            )
        return frame
    path = os.fspath(frame)
    if not path.endswith((".csv", ".parquet")):
        raise ValueError(
            f"frame must be a table, or the path of a .csv or .parquet file (got {path!r})"
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
        if path.endswith(".parquet"):
            present = parquet.read_schema(path).names
            return parquet.read_table(
                path, columns=None if wanted is None else [n for n in wanted if n in present]
            )
        return _read_csv(path)
    except (pyarrow.ArrowException, UnicodeDecodeError):
        # PRIVACY: pyarrow quotes the row (test_no_row_of_a_broken_file_is_quoted)
        raise ValueError(
            f"frame must be a valid {path.rpartition('.')[2]} file (got {path!r})"
        ) from None


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


def names(frame: Any) -> list[str]:
    """Returns the names of the columns."""
    return list(
        getattr(
            frame, "column_names", frame.keys() if isinstance(frame, Mapping) else frame.columns
        )
    )


def others(frame: Any, wanted: list[str]) -> dict[Any, Any]:
    """Returns the columns beside those that are wanted, as far as they are columns."""
    there = names(frame)
    found = {name: frame[name] for name in there if name not in wanted and there.count(name) == 1}
    return {
        name: one
        for name, one in found.items()
        if hasattr(one, "__len__") and not isinstance(one, (str, bytes))
    }


def column(frame: Any, name: str) -> Any:
    """Returns a column as it is; raises ValueError unless it is there once, of numbers or text."""
    if (times := names(frame).count(name)) != 1:
        raise ValueError(f"column {name!r} must be in the frame, once (got it {times} times)")
    found = frame[name]
    if not hasattr(found, "__len__") or isinstance(found, (str, bytes)):
        raise ValueError(
            f"column {name!r} of the frame must be a list or array of values (got"
            f" {type(found).__name__})"
        )
    if kind_of(found).startswith(("datetime", "timedelta", "timestamp", "date", "complex")):
        raise ValueError(
            f"column {name!r} of the frame must be of numbers or text (got {kind_of(found)})"
        )
    if getattr(found, "ndim", 1) != 1:
        raise ValueError(
            f"column {name!r} of the frame must have one value per row (got shape"
            f" {tuple(found.shape)})"
        )
    return found


def with_line_breaks(frame: Any) -> dict[str, float]:
    """Returns the share of cells with line breaks, by the names of columns of an Arrow table that have some."""
    if not (hasattr(frame, "column_names") and hasattr(frame, "schema")):
        return {}
    from pyarrow import compute, types

    texts = {
        field.name: frame[i]
        for i, field in enumerate(frame.schema)
        if types.is_string(field.type)
    }
    breaks = {
        name: compute.sum(compute.match_substring_regex(text, "[\r\n]")).as_py()
        for name, text in texts.items()
    }
    return {name: count / len(frame) for name, count in breaks.items() if count}


def kind_of(column: Any) -> str:
    """Returns the name of a column's dtype; empty for lists."""
    return str(getattr(column, "dtype", getattr(column, "type", "")))


def values(column: Any) -> list[Any]:
    """Returns the values of a column."""
    for reader in ("to_pylist", "tolist"):
        if hasattr(column, reader):
            return list(getattr(column, reader)())
    return list(column)


def array(column: Any) -> NDArray[Any] | None:
    """Returns the values of a column of numbers by its dtype, missing ones as NaN; None for any other."""
    dtype = getattr(column, "dtype", None)
    if isinstance(dtype, np.dtype) and dtype.kind in "biuf":
        return np.asarray(column)
    if kind_of(column).startswith(_ARROW) and hasattr(column, "to_numpy"):
        return np.asarray(column.to_numpy(zero_copy_only=False))
    return None


def coded(kind: Number | Category | Ordered, column: Any, width: int) -> NDArray[np.float64]:
    """Returns the features (n, width) of a column, each value by itself."""
    if isinstance(kind, Number) and (numbers := array(column)) is not None:
        return kind.code_all(numbers)
    known: dict[Any, list[float]] = {}
    rows = []
    for value in values(column):
        try:
            row = known.get(value)
            if row is None:
                row = known[value] = kind.code(value)
        except TypeError:  # a list: no value, and no key
            row = kind.code(value)
        rows.append(row)
    return np.array(rows, dtype=np.float64).reshape(len(rows), width)


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
