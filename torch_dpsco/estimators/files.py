"""Tables in files (.csv, .xlsx, .parquet): how they write cells, which is public, and the cells, each as it is there.

Whether the cells of a text file are those of its records: a rule of quotes by which none reaches another record.

A quote opens at the beginning of a cell, closes at its end, and is doubled inside (RFC 4180, as all writers of CSV do
it); there may be line breaks between quotes. Any other quote shows that whoever wrote the file paid no heed to quotes.
Then a note that begins with one swallows the rows up to the next quote, or all that follow: one record would decide how
many others there are. So a file with such a quote is refused, also where a reader would take the quote for text.

Text is read by Python's own `csv`: pyarrow's threads may outlive what they read, and abort the process at its end.
"""

from __future__ import annotations

import csv
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TextIO
from xml.etree.ElementTree import ParseError
from zipfile import BadZipFile

import numpy as np

from torch_dpsco._validate import check_fields, shown

TEXT = (".csv", ".tsv", ".txt")
_SWAPPED = str.maketrans(".,", ",.")
_SPACES = str.maketrans("\xa0\u202f", "  ")
_BLOCK = 1 << 20  # characters that are looked at together


class FileError(ValueError):
    """A file that cannot be read. Its message tells no row; `line` does, to who holds the file (`dpsco check`)."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True)
class Dialect:
    """How files write cells. It is public, and never found out from values while a table is read.

    Args:
        separator: between cells of text files: "," or ";" or "|" or a tab.
        decimal: of numbers that are written as text: "." or ",".
        thousands: between groups of three digits: "" for none, or one of "." "," "'" and a space.
        quote: around cells with separators or line breaks: '"' or "'", or "" where quotes are nothing but text.
        encoding: of text files: "utf-8" "utf-16" "latin-1" "cp1250" "cp1251" or "cp1252".
        sheet: of .xlsx files; "" for the first one.
    """

    separator: str = ","
    decimal: str = "."
    thousands: str = ""
    quote: str = '"'
    encoding: str = "utf-8"
    sheet: str = ""

    def __post_init__(self) -> None:
        check_fields(self)
        for name, allowed in ALLOWED.items():
            if (given := getattr(self, name)) not in allowed:
                # PRIVACY: in other encodings bytes shift what others mean, so that one record would
                # (test_no_record_shifts_how_others_are_decoded)
                raise ValueError(
                    f"{name} must be one of {', '.join(map(repr, allowed))} (got {given!r})"
                )
        if self.decimal == self.thousands:
            raise ValueError(f"thousands must not be the decimal sign (got {self.thousands!r})")

    def number(self, value: Any) -> Any:
        """Returns text with a number of this dialect as Python writes it; what is no number here is none there.

        Example:
            >>> [Dialect(decimal=",", thousands=".").number(text) for text in ("1.234,5", "1.5")]
            ['1234.5', '1,5']
        """
        if not isinstance(value, str):
            return value
        text = value.translate(_SPACES)
        if self.thousands and self._groups.fullmatch(text):
            text = text.replace(self.thousands, "")
        return text.translate(_SWAPPED) if self.decimal == "," else text

    def reader(self, lines: Iterable[str]) -> Any:
        """Returns a reader of `csv`."""
        return csv.reader(
            lines,
            delimiter=self.separator,
            quotechar=self.quote or None,
            quoting=csv.QUOTE_MINIMAL if self.quote else csv.QUOTE_NONE,
            strict=True,
        )

    @property
    def _groups(self) -> re.Pattern[str]:
        mark, point = map(re.escape, (self.thousands, self.decimal))
        return re.compile(rf"\s*[+-]?\d{{1,3}}({mark}\d{{3}})+({point}\d*)?\s*")


ALLOWED = {
    "separator": (",", ";", "\t", "|"),
    "decimal": (".", ","),
    "thousands": ("", ".", ",", " ", "'"),
    "quote": ('"', "'", ""),
    "encoding": ("utf-8", "utf-16", "latin-1", "cp1250", "cp1251", "cp1252"),
}
DEFAULT = Dialect()


@dataclass(frozen=True)
class Cells:
    """A table that was read from text or a sheet: columns by name, and the line that each row ends in."""

    column_names: list[str]
    columns: Mapping[str, list[Any]]
    lines: list[int]

    def __getitem__(self, name: str) -> list[Any]:
        return self.columns[name]


def opened(frame: Any, wanted: list[str] | None, dialect: Dialect = DEFAULT) -> Any:
    """Returns a table; that of a path with these columns alone, or all of them."""
    if isinstance(frame, Mapping) or hasattr(frame, "columns"):
        return frame
    path = os.fspath(frame) if isinstance(frame, (str, os.PathLike)) else ""
    kind = os.path.splitext(str(path))[1].lower()
    if kind not in (*TEXT, ".xlsx", ".parquet"):
        raise ValueError(
            f"frame must be a table with named columns, or the path of a {', '.join(TEXT)}, .xlsx"
            f" or .parquet file (got {shown(frame)})"
        )
    if not os.path.isfile(path):
        raise FileNotFoundError(f"frame must be a file that is there (got {path!r})")
    if kind == ".parquet":
        return _read_parquet(path, wanted)
    if kind == ".xlsx":
        return _read_sheet(path, wanted, dialect)
    try:
        return _read_text(path, wanted, dialect)
    except UnicodeError:
        # PRIVACY: the error holds the row (test_no_row_of_a_broken_file_is_quoted)
        raise FileError(
            f"frame must be a file in {dialect.encoding}, as its dialect says (got {path!r}): other"
            f" encodings are {', '.join(ALLOWED['encoding'])}"
        ) from None


def _reader(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ImportError(
            f"such a file must be read by {package}: pip install 'torch_dpsco[tables]'"
        ) from error


def _read_parquet(path: str, wanted: list[str] | None) -> Any:
    parquet = _reader("pyarrow.parquet")
    arrow = _reader("pyarrow")
    try:
        present = parquet.read_schema(path).names
        chosen = present if wanted is None else [name for name in wanted if name in present]
        return parquet.read_table(path, columns=chosen)
    except arrow.ArrowException:
        # PRIVACY: pyarrow may quote a row (test_no_row_of_a_broken_file_is_quoted)
        raise FileError(f"frame must be a valid parquet file (got {path!r})") from None


def _read_sheet(path: str, wanted: list[str] | None, dialect: Dialect) -> Cells:
    """Returns the columns of a sheet, each cell as Excel keeps it: a number, a date or text."""
    excel = _reader("openpyxl")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what else is in the book
            book = excel.load_workbook(path, read_only=True, data_only=True)
            with closing(book):
                sheet = book[dialect.sheet or book.sheetnames[0]]
                sheet.reset_dimensions()  # which some writers get wrong
                rows = sheet.iter_rows(values_only=True)
                head = ["" if name is None else str(name) for name in next(rows, ())]
                whole = (_as_long(row, len(head)) for row in rows)
                return _cells(path, head, enumerate(whole, 2), wanted)
    except (BadZipFile, KeyError, ParseError, TypeError, ValueError) as error:
        if isinstance(error, FileError):
            raise
        # PRIVACY: openpyxl may quote a cell (test_no_cell_of_a_broken_book_is_quoted)
        raise FileError(
            f"frame must be a valid .xlsx file without a password, with sheet {dialect.sheet!r}"
            f" (got {path!r})"
        ) from None


def _as_long(row: tuple[Any, ...], width: int) -> tuple[Any, ...]:
    """Returns a row of a sheet, whose last empty cells may be left out; without cells nothing, as a blank line."""
    if not any(cell is not None for cell in row):
        return ()
    return row[:width] + (None,) * (width - len(row))


def _read_text(path: str, wanted: list[str] | None, dialect: Dialect) -> Cells:
    """Returns columns of a file, as text."""
    # PRIVACY: text, since types would be guessed from values (test_no_value_of_a_file_decides_how_others_are_read)
    encoding = dialect.encoding.replace("utf-8", "utf-8-sig")  # with a mark or without
    before = _version(path)
    with open(path, encoding=encoding, newline="") as file:
        if dialect.quote and (line := odd_quote(file, dialect)):
            # PRIVACY: a note that begins with a quote would swallow the rows after it
            # (test_no_quote_of_a_record_swallows_others)
            raise FileError(
                "frame must be a file whose quotes enclose whole cells, and are doubled inside, as"
                f" CSV writers do (got {path!r}): one that is left open swallows the rows after"
                " it. Write the file anew from its source; or, if it never puts quotes around"
                " cells, give the dialect quote ''",
                line,
            )
    with open(path, encoding=encoding, newline="") as file:
        rows = dialect.reader(file)
        try:
            head: list[str] = next(rows, [])
            cells = _cells(path, head, ((rows.line_num, row) for row in rows), wanted)
        except csv.Error as error:
            most = f"frame must have cells of {csv.field_size_limit()} characters at most"
            raise FileError(f"{most} (got {path!r}): {error}", rows.line_num) from None
    if _version(path) != before:
        raise ValueError(
            f"frame must be a file that nobody writes while it is read (got {path!r})"
        )
    return cells


def _cells(
    path: str,
    head: list[str],
    rows: Iterable[tuple[int, Any]],
    wanted: list[str] | None,
) -> Cells:
    """Returns columns of numbered rows; raises FileError where a row is of another length than the head."""
    if not head:
        raise FileError(f"frame must begin with a line of column names (got {path!r}: no line)")
    kept = {name: place for place, name in enumerate(head) if wanted is None or name in wanted}
    columns: dict[str, list[Any]] = {name: [] for name in kept}
    lists = [(place, columns[name]) for name, place in kept.items()]
    lines = []
    for line, row in rows:
        if not row:
            continue
        if len(row) != len(head):
            raise FileError(
                f"frame must have as many cells in each row as in its first line, {len(head)} (got"
                f" {path!r}): see the separator, and whether cells with one in them are in quotes",
                line,
            )
        lines.append(line)
        for place, column in lists:
            column.append(row[place])
    return Cells(head, columns, lines)


def _version(path: str) -> tuple[int, int, int]:
    found = os.stat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns


def odd_quote(file: TextIO, dialect: Dialect = DEFAULT) -> int:
    r"""Returns the line of the first quote that neither encloses a whole cell nor is doubled inside; 0 for none.

    Example:
        >>> import io
        >>> [odd_quote(io.StringIO(text)) for text in ('1,"a ""b""\n"', '1,"a\n2,b', '1\n1,a "b"', '1,"a"b')]
        [0, 1, 2, 1]
    """
    # what may be on the outer side of a quote; another quote doubles it
    outside = [ord(sign) for sign in f"{dialect.separator}{dialect.quote}\r\n"]
    before = "\n"
    inside = 0
    opened_at = 0
    line = 1
    block = file.read(_BLOCK)
    while block:
        after = file.read(_BLOCK)
        text = before + block + (after[:1] or "\n")
        codes = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
        quotes = 1 + np.flatnonzero(codes[1:-1] == ord(dialect.quote))
        beside = codes[quotes + 1]
        beside[inside::2] = codes[quotes[inside::2] - 1]  # of those that open
        # PRIVACY: (test_no_quote_of_a_record_swallows_others)
        odd = quotes[~np.isin(beside, outside)]
        if len(odd):
            return line + text.count("\n", 1, int(odd[0]))
        if len(quotes):
            opened_at = line + text.count("\n", 1, int(quotes[-1]))
        inside = (inside + len(quotes)) % 2
        line += block.count("\n")
        before = block[-1:]
        block = after
    return opened_at if inside else 0
