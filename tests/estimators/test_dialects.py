"""How files write cells: separators, decimal signs, encodings, dates, sheets; no value decides how others are read."""

from __future__ import annotations

import datetime
import math
import sys
import traceback
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_dpsco.estimators import Category, Date, Dialect, Number, Ordered, Schema, files

KINDS = {
    "größe": Number(0, 3000, missing=True),
    "farbe": Category(["grün", "rot, hell"]),
    "tag": Date("2020-01-01", "2020-12-31", "%d.%m.%Y", missing=True),
    "stufe": Ordered([1.5, 2.5], missing=True),
}
ROWS = [
    ("1234.5", "grün", "01.01.2020", "1.5", "ja", "1.234"),
    ("0.25", "rot, hell", "31.12.2020", "2.5", "nein", "1234"),
    ("-7", "blau", "31.02.2020", "x", "ja", "007"),
    ("", "", "", "", "?", "a"),
]


def schema(dialect: Dialect) -> Schema:
    return Schema(KINDS, "y", ["nein", "ja"], ids="id", rows_per_unit=None, dialect=dialect)


def written(path: Path, dialect: Dialect, rows=ROWS) -> Path:
    """Writes rows as their dialect has them."""

    def cell(text: str, is_number: bool) -> str:
        if is_number and text[:1].isdigit():
            whole, _, part = text.partition(".")
            whole = f"{int(whole):,}".replace(",", dialect.thousands)
            text = whole + (dialect.decimal + part if part else "")
        return f"{dialect.quote}{text}{dialect.quote}"

    head = [f"{dialect.quote}{name}{dialect.quote}" for name in (*KINDS, "y", "id")]
    lines = [[cell(text, k in (0, 3)) for k, text in enumerate(row)] for row in rows]
    text = "\r\n".join(dialect.separator.join(line) for line in (head, *lines))
    path.write_bytes(text.encode(dialect.encoding))
    return path


@pytest.mark.parametrize(
    "dialect",
    [
        Dialect(),
        Dialect(";", ",", encoding="latin-1"),
        Dialect(";", ",", ".", encoding="cp1252"),
        Dialect("\t", ".", ",", encoding="utf-16"),
        Dialect("|", ",", " ", quote="'"),
        Dialect("\t", ",", "'", quote=""),
    ],
)
def test_one_table_in_any_dialect_is_one_table(dialect, tmp_path):
    wanted = schema(Dialect()).read(written(tmp_path / "table.csv", Dialect()))
    found = schema(dialect).read(written(tmp_path / "other.TXT", dialect))
    assert found.X.tobytes() == wanted.X.tobytes()
    assert found.y.tolist() == wanted.y.tolist() == ["ja", "nein", "ja", ""]
    assert found.groups.tolist() == ["=1.234", "=1234", "=007", "=a"]
    assert wanted.X[0].tolist() == [2 * 1234.5 / 3000 - 1, 0, 1, 0, -1, 0, -1, 0]


@pytest.mark.parametrize(
    ("dialect", "values"),
    [
        (Dialect(), {"1.5": 1.5, "1,5": None, "1,234.5": None, " 2 ": 2.0, "1e3": 1000.0}),
        (Dialect(decimal=","), {"1,5": 1.5, "1.5": None, "1.234,5": None, "-,5": -0.5}),
        (
            Dialect(decimal=",", thousands="."),
            {"1.234,5": 1234.5, "1.234": 1234.0, "1.5": None, "12.34,5": None, "1.234.5": None},
        ),
        (Dialect(thousands=","), {"1,234,567.5": 1234567.5, "1,5": None, "1234.5": 1234.5}),
        (Dialect(thousands=" "), {"1\xa0234": 1234.0, "1\u202f234": 1234.0, "1 2": None}),
    ],
)
def test_a_number_is_read_in_one_way_or_not_at_all(dialect, values, tmp_path):
    one = Schema({"v": Number(-1e9, 1e9)}, "y", target_range=(-1e9, 1e9), dialect=dialect)
    path = tmp_path / "table.csv"
    path.write_text("\n".join(["v|y", *(f"{text}|{text}" for text in values)]))
    bars = Dialect("|", dialect.decimal, dialect.thousands)
    table = Schema(one.columns, "y", target_range=one.target_range, dialect=bars).read(path)
    assert [None if math.isnan(y) else y for y in table.y] == list(values.values())


CELLS = st.text("0123456789.,;+-eE ' \xa0ab", max_size=6)


@given(st.lists(st.tuples(CELLS, CELLS), max_size=5), st.sampled_from([",", "."]))
def test_other_rows_of_a_dialect_do_not_matter(tmp_path_factory, others, decimal):
    """Rows keep their values, whatever other rows hold (quotes: test_cells.py)."""
    thousands = "." if decimal == "," else ","
    dialect = Dialect("|", decimal, thousands)
    one = Schema({"v": Number(0, 9, missing=True)}, "y", target_range=(0, 9), dialect=dialect)
    path = tmp_path_factory.mktemp("tables") / "table.csv"
    kept = [f"3{decimal}5|1{thousands}234", "?|2"]
    path.write_text("\n".join(["v|y", *kept]))
    alone = one.read(path)
    path.write_text("\n".join(["v|y", *(f"{v}|{y}" for v, y in others), *kept]))
    table = one.read(path)
    assert table.X[len(others) :].tobytes() == alone.X.tobytes()
    assert table.y[len(others) :].tobytes() == alone.y.tobytes()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"separator": ":"}, "separator must be one of ',', ';'"),
        ({"separator": ""}, "separator must be one of"),
        ({"decimal": ";"}, "decimal must be"),
        ({"thousands": "."}, "thousands must not be the decimal sign"),
        ({"quote": "a"}, "quote must be"),
        ({"encoding": 3}, "encoding must be text"),
    ],
)
def test_a_dialect_is_one_of_few(wrong, words):
    with pytest.raises(ValueError, match=words):
        Dialect(**wrong)


@pytest.mark.parametrize(
    "encoding", ["utf-7", "iso2022_jp", "hz", "gbk", "idna", "rot13", "unicode_escape"]
)
def test_no_record_shifts_how_others_are_decoded(encoding):
    """In these bytes of one record may decide what those of the next ones mean."""
    with pytest.raises(ValueError, match="encoding must be one of"):
        Dialect(encoding=encoding)


def test_no_byte_of_a_record_swallows_others(tmp_path):
    """In each encoding a file with any byte in one cell is refused, or has as many rows as before."""
    path = tmp_path / "table.csv"
    for encoding in files.ALLOWED["encoding"]:
        one = Schema(
            {"v": Number(0, 9)}, "y", target_range=(0, 9), dialect=Dialect(encoding=encoding)
        )
        head, row = "v,note,y\n".encode(encoding), "1,\u0000,2\n".encode(encoding)
        row = row.removeprefix(b"\xff\xfe")
        for byte in set(range(256)) - {*b'\n\r,"'}:
            path.write_bytes(head + row + row.replace(b"\0", bytes([byte]), 1) + row * 3)
            try:
                table = one.read(path)
            except files.FileError:
                continue
            assert len(table.X) == 5


def test_without_quotes_a_quote_is_text(tmp_path):
    plain = Dialect(quote="")
    one = Schema({"v": Number(0, 9)}, "y", ['"a', "b"], dialect=plain)
    path = tmp_path / "table.csv"
    path.write_text('v,y\n1,"a\n2,b\n')
    assert one.read(path).y.tolist() == ['"a', "b"]
    path.write_text('v,y\n1,"a,b"\n')
    with pytest.raises(ValueError, match="as many cells in each row as in its first line"):
        one.read(path)


def test_text_needs_no_pyarrow(tmp_path, monkeypatch):
    """Whose threads, once started, abort some processes at their end."""
    path = written(tmp_path / "table.csv", Dialect())
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    assert len(schema(Dialect()).read(path).X) == 4
    for name, package in (("t.parquet", "pyarrow"), ("t.xlsx", "openpyxl")):
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(
            ImportError, match=rf"{package}: pip install 'torch_dpsco\[tables\]'"
        ):
            schema(Dialect()).read(tmp_path / name)


def test_the_line_that_is_wrong_is_told_beside_the_message(tmp_path):
    path = tmp_path / "table.csv"
    one = Schema({"v": Number(0, 9)}, "y", target_range=(0, 9))
    for text, line in (
        ('v,y\n1,"a\nb"\n1,2,3\n', 4),
        ('v,y\n1,2\n1,a"b\n', 3),
        ('v,y\n1,2\n1,"secret\n1,2\n', 3),
        (f"v,y\n1,2\n1,{'x' * 200_000}\n", 3),
        ("", None),
    ):
        path.write_text(text)
        with pytest.raises(files.FileError) as caught:
            one.read(path)
        assert caught.value.line == line
        assert "secret" not in "".join(traceback.format_exception(caught.value))
        assert f"line {line}" not in str(caught.value)


# -- dates ------------------------------------------------------------------------------------------------------------

YEAR = Date("2020-01-01", datetime.date(2020, 12, 31), "%d.%m.%Y", missing=True)


def test_a_date_is_a_number_of_days():
    texts = ["01.01.2020", " 31.12.2020 ", "01.07.2020", "1.1.1950", "01.01.2099"]
    days = YEAR.code(texts)
    assert days[:, 1].tolist() == [0] * 5
    assert days[[0, 1, 3, 4], 0].tolist() == [-1, 1, -1, 1]
    assert days[2, 0] == Number(0, 365).code([182])[0, 0]
    for none in (
        "2020-01-01",
        "31.02.2020",
        "",
        None,
        5,
        5.0,
        True,
        [1],
        b"01.01.2020",
        math.nan,
    ):
        assert YEAR.code([none, "01.01.2020"]).tolist() == [[0, 1], [-1, 0]]
    assert YEAR.names("day") == ["day", "day missing"]


def test_dates_of_frames_are_read_alike():
    pandas, arrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    one = Schema({"day": YEAR}, "y", target_range=(0, 9))
    days = [datetime.date(2020, 7, 1), None, datetime.date(2020, 12, 31)]
    text = ["01.07.2020", "", "31.12.2020"]
    stamps = pandas.to_datetime(pandas.Series(days))
    wanted = one.read({"day": text, "y": [1, 2, 3]}).X
    for column in (
        days,
        stamps,
        stamps.dt.tz_localize("Europe/Berlin"),
        stamps.to_numpy(),
        arrow.array(days, arrow.date32()),
        arrow.array(days, arrow.date32()).cast(arrow.timestamp("ns")),
    ):
        assert one.read({"day": column, "y": [1, 2, 3]}).X.tobytes() == wanted.tobytes()
    other = Schema({"day": Number(0, 9)}, "y", target_range=(0, 9))
    with pytest.raises(ValueError, match=r"'day' of the frame must be .* Date \(got datetime64"):
        other.read({"day": stamps.to_numpy(), "y": [1, 2, 3]})


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (("2020", "2021-01-01"), "low must be a day"),
        (("2021-01-01", "2021-01-01"), "low must be before high"),
        (("2020-01-01", "2021-01-01", "%d.%m."), "format must say day, month and year"),
        (("2020-01-01", "2021-01-01", "%Q"), "format must say"),
        ((2020, "2021-01-01"), "low must be a date or text"),
    ],
)
def test_what_is_no_date_is_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        Date(*wrong)


# -- sheets -----------------------------------------------------------------------------------------------------------


def book(path: Path, *sheets: tuple[str, list[list[object]]]) -> Path:
    excel = pytest.importorskip("openpyxl")
    made = excel.Workbook()
    made.remove(made.active)
    for name, rows in sheets:
        sheet = made.create_sheet(name)
        for row in rows:
            sheet.append(row)
    made.save(path)
    return path


def test_a_sheet_is_read_as_its_cells_are(tmp_path):
    dialect = Dialect(decimal=",")
    day = datetime.datetime(2020, 12, 31, 13, 30)
    rows = [
        ["größe", "farbe", "tag", "stufe", "y", "id", None],
        [1234.5, "grün", "01.01.2020", "1,5", "ja", 7],
        ["0,25", None, day, 2.5, "nein", "7"],
        [],
        [None, None, "x", None, None, "a"],
        ["1.5", "rot, hell"],
    ]
    table = schema(dialect).read(book(tmp_path / "Table.XLSX", ("one", rows)))
    assert table.groups.tolist() == ["=7", "=7", "=a", "?3"]
    assert table.y.tolist() == ["ja", "nein", "", ""]
    assert table.X[0].tolist() == [2 * 1234.5 / 3000 - 1, 0, 1, 0, -1, 0, -1, 0]
    assert table.X[1].tolist() == [2 * 0.25 / 3000 - 1, 0, 0, 0, 1, 0, 1, 0]
    assert np.isnan(table.X[3]).all()
    assert "first in line 5" in str(schema(dialect).check(tmp_path / "Table.XLSX"))


def test_the_sheet_is_that_of_the_dialect(tmp_path):
    path = book(tmp_path / "t.xlsx", ("a", [["v", "y"], [1, 1]]), ("b", [["v", "y"], [2, 2]]))
    for sheet, value in (("", 1), ("a", 1), ("b", 2)):
        one = Schema({"v": Number(0, 9)}, "y", target_range=(0, 9), dialect=Dialect(sheet=sheet))
        assert one.read(path).y.tolist() == [value]
    one = Schema({"v": Number(0, 9)}, "y", target_range=(0, 9), dialect=Dialect(sheet="c"))
    with pytest.raises(files.FileError, match=r"with sheet 'c' \(got .*t.xlsx"):
        one.read(path)
    path.write_bytes(b"PK\3\4 no book")
    with pytest.raises(files.FileError, match=r"valid \.xlsx file without a password"):
        one.read(path)


def test_no_cell_of_a_broken_book_is_quoted(tmp_path):
    path = book(tmp_path / "t.xlsx", ("a", [["v", "y"], [4711, 1]]))
    with zipfile.ZipFile(path) as old:
        parts = {name: old.read(name) for name in old.namelist()}
    name = "xl/worksheets/sheet1.xml"
    parts[name] = parts[name].replace(b"4711", b"secret")
    with zipfile.ZipFile(path, "w") as new:
        for part, content in parts.items():
            new.writestr(part, content)
    with pytest.raises(files.FileError) as caught:
        Schema({"v": Number(0, 9)}, "y", target_range=(0, 9)).read(path)
    assert "secret" not in "".join(traceback.format_exception(caught.value))


# -- schemas ----------------------------------------------------------------------------------------------------------


def test_a_schema_keeps_its_dialect(tmp_path):
    whole = schema(Dialect("\t", ",", " ", "'", "cp1252", "one"))
    whole.save(tmp_path / "schema.toml")
    assert Schema.load(tmp_path / "schema.toml") == whole == Schema.from_dict(whole.to_dict())
    assert "dialect" not in schema(Dialect()).to_dict()
    with pytest.raises(ValueError, match="separator must be one of"):
        Schema.from_dict(whole.to_dict() | {"dialect": {"separator": "x"}})


def test_all_questions_are_asked_together():
    state = schema(Dialect()).to_dict()
    state |= {"target": "?", "labels": ["?", "?"]}
    state["columns"]["größe"] |= {"low": "?", "high": "?"}
    state["columns"]["farbe"]["levels"] = ["?"]
    with pytest.raises(ValueError, match="answered from public knowledge") as caught:
        Schema.from_dict(state)
    for asked in (
        "target and labels",
        "low and high of column 'größe'",
        "levels of column 'farbe'",
    ):
        assert asked in str(caught.value)
    assert "tag" not in str(caught.value)
    known = schema(Dialect()).to_dict()
    known["columns"]["farbe"]["levels"] = ["?", "rot"]  # a level that is a question mark is none
    assert Schema.from_dict(known).columns["farbe"].levels == ("?", "rot")
