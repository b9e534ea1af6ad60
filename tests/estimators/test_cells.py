"""Quotes of CSV files: what a writer makes is one record each, and no quote of a record reaches another one."""

from __future__ import annotations

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_dpsco.estimators import Number, Schema
from torch_dpsco.estimators import files as cells


def csv_of(path, notes, end="\n"):
    """Writes records with notes as they are, which nobody has encoded."""
    path.write_text("v,note,y\n" + "\n".join(f"1,{note},2" for note in notes) + end)
    return path


def odd_quote(text: str) -> int:
    return cells.odd_quote(io.StringIO(text, newline=""))


NOTE = Schema({"v": Number(0, 9)}, "y", target_range=(0, 9))
ODD = [
    '"ouch',
    'ouch"',
    'a "b" c',
    '"a" b',
    '"a""',
    '"',
    '"""',
    ' "a"',
    r'"a \"b\" c"',
    '"a\nb',
    "5' 3\"",
]


@pytest.mark.parametrize("note", ODD)
@pytest.mark.parametrize("place", [0, 4, 9])
def test_no_quote_of_a_record_swallows_others(tmp_path, note, place):
    for end in ("", "\n", "\r\n"):
        notes = ["fine"] * 10
        notes[place] = note
        path = csv_of(tmp_path / "table.csv", notes, end)
        for read in (NOTE.read, NOTE.features, NOTE.check):
            with pytest.raises(
                ValueError, match=r"quotes enclose whole cells.*table\.csv"
            ) as caught:
                read(path)
            assert "fine" not in str(caught.value)
            assert note not in str(caught.value)
    notes[(place + 1) % 10] = 'a "b"'  # two of them, after one of which all quotes are even
    with pytest.raises(ValueError, match="quotes enclose whole cells"):
        NOTE.read(csv_of(path, notes))


@pytest.mark.parametrize(
    "note",
    [
        '"a"',
        '""',
        '"a ""b"" c"',
        '""""',
        '"a, b"',
        '"a\nb"',
        '"a\r\n\r\nb"',
        "it's",
        "a\0b",
        "ü",
    ],
)
@pytest.mark.parametrize("place", [0, 4, 9])
def test_what_a_writer_of_csv_makes_is_one_record_each(tmp_path, note, place):
    for end in ("", "\n", "\n\n"):
        notes = ["fine"] * 10
        notes[place] = note
        path = csv_of(tmp_path / "table.csv", notes, end)
        assert len(NOTE.read(path).X) == 10
        path.write_bytes(
            b"\xef\xbb\xbf"
            + path.read_bytes().replace(b"v,", b'"v",', 1).replace(b"\n", b"\r\n")
        )
        assert len(NOTE.read(path).X) == 10


def test_the_check_tells_of_line_breaks(tmp_path):
    """Two notes that nobody has encoded may look like one of several lines; only who has the file can tell."""
    path = csv_of(tmp_path / "table.csv", ["fine", '"ouch', "fine", 'the "end"'])
    with pytest.raises(ValueError, match="quotes enclose whole cells"):
        NOTE.check(path)
    found = NOTE.check(csv_of(path, [*["fine"] * 10, '"ouch', "fine", 'the end"']))
    assert "note: 9.1% of cells have line breaks" in str(found)
    assert "line breaks" not in str(NOTE.check(csv_of(path, ["fine"] * 10)))


@pytest.mark.parametrize(
    "text", ["v,note,y\n1,a,2\n1,a\n", "v,note,y\n1,a,2\n1,a,2,3\n", "v,note,y\n1,a\nb,2\n"]
)
def test_rows_of_other_numbers_of_cells_are_refused(tmp_path, text):
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match="as many cells in each row"):
        NOTE.read(path)


def test_quotes_are_followed_from_block_to_block(monkeypatch):
    good = '"a, ""b""\n",c\r\n1,""\n"",""""\n'
    bad = [
        good + '"',
        good + 'a"b\n',
        good.replace("c", 'c"'),
        '"' + good,
        good + '"a"b',
        good[:-2],
    ]
    for size in range(1, len(good) + 3):
        monkeypatch.setattr(cells, "_BLOCK", size)
        assert not odd_quote(good)
        assert all(odd_quote(text) for text in bad)


@given(
    st.lists(
        st.lists(st.text('ab",;\r\n', max_size=4), min_size=2, max_size=2),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 9),
)
def test_whole_cells_are_those_that_a_writer_makes(rows, size):
    """What the writer of Python makes is accepted; not with a quote less, nor cut off inside of a cell."""
    text = io.StringIO(newline="")
    csv.writer(text, quoting=csv.QUOTE_ALL).writerows(rows)
    file = text.getvalue()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cells, "_BLOCK", size)
        assert not odd_quote(file)
        assert odd_quote(file.replace('"', "", 1))
        assert odd_quote(file[: file.rindex('"')])
