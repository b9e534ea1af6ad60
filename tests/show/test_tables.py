"""The commands for tables: four of them from an export of Excel to predictions, and what each says of bad files."""

from __future__ import annotations

import csv
import datetime
import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from torch_dpsco.accounting.ledger_file import LedgerCopy
from torch_dpsco.estimators import Category, Date, Dialect, Number, Schema
from torch_dpsco.show.cli import main
from torch_dpsco.show.first_schema import drafted, guessed_dialect

HEAD = ["Patienten-Nr", "Alter", "Gewicht kg", "Geschlecht", "Aufnahme", "verstorben", "Befund"]
ANSWERS = {  # what the code book of the ward says
    "verstorben": '["nein", "ja"]',
    "Alter": ("18", "110"),
    "Gewicht kg": ("20", "250"),
    "Geschlecht": '["männlich", "weiblich"]',
    "Aufnahme": ('"2019-01-01"', '"2023-12-31"'),
}


def patients(rows: int, seed: int = 0, oldest: int = 95) -> list[list[str]]:
    """Rows of a ward: some people several times, some weights missing, notes with quotes and line breaks."""
    draws = np.random.default_rng(seed)
    found = []
    for k in range(rows):
        age = int(draws.integers(18, oldest))
        day = datetime.date(2019, 1, 1) + datetime.timedelta(days=int(draws.integers(0, 1800)))
        weight = "" if draws.random() < 0.05 else f"{draws.normal(75, 12):.1f}".replace(".", ",")
        note = draws.choice(["", 'sagt "gut"; stabil', "nach Sturz,\nzur Kontrolle", f"Nr {k}"])
        who = f"P{draws.integers(10_000, 10_000 + rows)}"
        sex = draws.choice(["männlich", "weiblich"])
        died = "ja" if age > 60 else "nein"
        found.append([who, str(age), weight, sex, day.strftime("%d.%m.%Y"), died, note])
    return found


def excel(path: str | Path, rows: list[list[str]]) -> None:
    """Writes rows as Excel does in most of Europe."""
    with open(path, "w", encoding="cp1252", newline="") as file:
        csv.writer(file, delimiter=";").writerows([HEAD, *rows])


def answer(path: str, answers: dict[str, object]) -> None:
    """Answers the questions of a schema, in an editor so to say."""
    lines = []
    place: object = answers["verstorben"]
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        if named := re.fullmatch(r'\[columns\."(.*)"\]', line):
            place = answers[named[1]]
        told = place if isinstance(place, tuple) else (place, place)
        asked = line.startswith(("low", "high", "levels", "labels"))
        end = str(told[line.startswith("high")])
        lines.append(re.sub(r'\["\?"\]|"\?"', end, line) if asked else line)
    Path(path).write_text("\n".join(lines), encoding="utf-8")


@pytest.fixture
def ward(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    excel("ward.csv", patients(400))
    excel("new.csv", patients(5, seed=1))


def run(capsys, words: str) -> tuple[int, str, str]:
    code = main(shlex.split(words))
    return code, *capsys.readouterr()


@pytest.mark.slow
def test_four_commands_make_a_model_of_an_export_of_excel(ward, capsys):
    init = "init ward.csv --out schema.toml --target verstorben"
    code, out, err = run(capsys, init)
    assert (code, err) == (0, "")
    assert "separator ';', decimal ',', thousands '', quote '\"', encoding 'cp1252'" in out
    assert "ids        Patienten-Nr" in out
    assert "Aufnahme %d.%m.%Y" in out
    assert "8 questions are open in schema.toml" in out
    code, _, err = run(capsys, "check ward.csv --schema schema.toml")
    assert code == 2
    assert "labels; low and high of column 'Alter'; low and high of column 'Gewicht kg'" in err
    answer("schema.toml", ANSWERS)
    code, out, err = run(capsys, "check ward.csv --schema schema.toml")
    assert (code, err) == (0, "")
    assert out.startswith("LOCAL CHECK, NOT PRIVATE")
    fit = "fit ward.csv --schema schema.toml --epsilon 8 --out study"
    assert f"next: dpsco {fit.replace('8', '1')}" in out
    code, out, _ = run(capsys, fit)
    assert code == 0
    assert "of 'verstorben': auc 0.9" in out
    code, out, err = run(capsys, "predict study/model.json new.csv --out predictions.csv")
    assert (code, err) == (0, "")
    assert "nothing protects what that tells about these people" in out
    rows = list(csv.reader(Path("predictions.csv").read_text(encoding="utf-8").splitlines()))
    assert rows[0] == ["prediction", "probability of nein", "probability of ja"]
    assert [row[0] for row in rows[1:]] == [row[5] for row in patients(5, seed=1)]


def scored(out):
    return next(line for line in out.splitlines() if "auc" in line and "95 %" in line)


@pytest.mark.slow
@pytest.mark.filterwarnings("always:the answer to this plan was paid for")
def test_a_second_fit_without_a_ledger_is_noticed(ward, capsys):
    run(capsys, "init ward.csv --out schema.toml --target verstorben")
    answer("schema.toml", ANSWERS)
    fit = "fit ward.csv --schema schema.toml --epsilon 8 --out"
    code, out, _ = run(capsys, f"{fit} study")
    assert code == 0
    assert (
        "what was spent on these data is in ward.ledger and ward.ledger.* (confidential)" in out
    )
    assert not list(Path("study").glob("*.ledger"))  # which is not published
    charged = len(LedgerCopy("ward.ledger").book.ledger)
    code, again, err = run(capsys, f"{fit} again")
    assert code == 0, err  # the same answer, for nothing
    assert "paid for by an earlier run" in err
    assert scored(again) == scored(out)
    code, _, err = run(capsys, f"{fit.replace('8', '4')} other")
    assert code, err
    assert re.search(r"must be new, .* this ledger holds \d+ events of a run of .*study", err), (
        err
    )
    assert "spent at delta" in err
    assert "inf" not in err
    assert "raise epsilon" not in err
    assert not Path("other").exists()
    Path("mine").mkdir()
    assert run(capsys, f"{fit.replace('8', '4')} mine")[0]
    assert Path("mine").is_dir()  # which was there before
    assert len(LedgerCopy("ward.ledger").book.ledger) == charged


def test_a_first_schema_asks_for_all_that_must_be_public(ward, capsys):
    """Tables whose numbers and levels differ have one first schema: none of them got into it."""
    first = drafted("ward.csv", {}, target="verstorben")
    rows = patients(300, seed=7, oldest=60)
    for row in rows:
        row[3] = row[3].replace("weiblich", "divers")
        row[5] = "vielleicht" if row[5] == "ja" else "nein"
    excel("ward.csv", rows)
    assert str(drafted("ward.csv", {}, target="verstorben")) == str(first)
    text = str(first)
    assert not re.search(r"männlich|weiblich|Sturz|P1\d|\d,\d|20[12]\d", text)
    assert text.count('"?"') == 1 + 8
    assert "'Befund'" in text


def test_with_a_public_table_answers_are_those_of_it(ward, capsys):
    rows = patients(50, seed=3, oldest=70)
    excel("public.csv", [*rows, ["P1", "19", "50,5", "weiblich", "01.02.2019", "ja", ""]])
    words = "init ward.csv --out schema.toml --target verstorben --public public.csv"
    code, out, err = run(capsys, words)
    assert (code, err) == (0, "")
    assert "0 questions are open" in out
    text = Path("schema.toml").read_text(encoding="utf-8")
    assert "# Ranges and levels are those of public.csv, which is public." in text
    schema = Schema.load("schema.toml")
    ages = [int(row[1]) for row in rows]
    assert (schema.columns["Alter"].low, schema.columns["Alter"].high) == (min(ages), max(ages))
    assert schema.columns["Geschlecht"] == Category(["männlich", "weiblich"])
    assert isinstance(schema.columns["Aufnahme"], Date)
    assert schema.labels == ("ja", "nein")
    assert schema.columns["Gewicht kg"].high < 130
    assert max(int(row[1]) for row in patients(400)) > max(ages)  # of the private table


def test_a_schema_without_ids_says_what_is_protected(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("age,y\n" + "".join(f"{k},{k % 2}\n" for k in range(90)))
    text = str(drafted(str(path), {}, target="y"))
    assert "Without ids each row is protected by itself, and not a person" in text
    assert 'labels = ["?"]' in text
    text = str(drafted(str(path), {}, target="age"))
    assert 'target_range = ["?", "?"]' in text
    assert 'target = "?"' in str(drafted(str(path), {}))


@pytest.mark.parametrize(
    ("text", "encoding", "wanted"),
    [
        ("a;b\n1,5;2,25\n", "utf-8", Dialect(";", ",")),
        ("a;b\n1.5;2.25\n", "utf-8", Dialect(";", ".")),
        ("a;b\n1.234,5;2\n", "cp1252", Dialect(";", ",", ".")),
        ("a,b\n1.5,2\n", "utf-8", Dialect()),
        ('a,b\n"1,234.5",2\n', "utf-8", Dialect(",", ".", ",")),
        ("a\tb, c\n1\t2,5\n", "utf-8", Dialect("\t", ",")),
        ("a|b\nx|1'234.5\n", "utf-8", Dialect("|", ".", "'")),
        ("ä;b\n1;2\n", "cp1252", Dialect(";", ",", encoding="cp1252")),
        ("ä;b\n1;2\n", "utf-16", Dialect(";", ",", encoding="utf-16")),
        ("ä,b\n1,2\n", "utf-8-sig", Dialect()),
        ("a\n1\n", "utf-8", Dialect()),
        ('a,b\n"x;y;z",2\n"x;y;z",3\n', "utf-8", Dialect()),
        ("", "utf-8", Dialect()),
    ],
)
def test_dialects_are_told_by_files(text, encoding, wanted, tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(text.encode(encoding))
    assert guessed_dialect(str(path), {}) == wanted


def test_a_dialect_may_be_given(ward, capsys):
    words = "init ward.csv --out s.toml --target Alter --separator ; --encoding latin-1 --thousands ."
    assert run(capsys, words)[0] == 0
    text = Path("s.toml").read_text(encoding="utf-8")
    assert 'encoding = "latin-1"' in text
    assert 'thousands = "."' in text
    for name, sign in (("separator", "x"), ("encoding", "utf-7"), ("decimal", ";")):
        code, _, err = run(capsys, f"init ward.csv --out t.toml --{name} '{sign}'")
        assert code == 2
        assert err.startswith(f"dpsco: --{name} must be one of")


@pytest.mark.parametrize(
    ("days", "form"),
    [
        (["13.02.2020", "01.02.2020"], "%d.%m.%Y"),
        (["2020-02-13", "2020-02-01"], "%Y-%m-%d"),
        (["02/13/2020", "02/01/2020"], "%m/%d/%Y"),
        (["02/03/2020", "02/01/2020"], "?"),
        (["2020-02-13 10:11:12", "2020-02-13 23:00:00"], "%Y-%m-%d %H:%M:%S"),
        (["13.02.20", "01.02.21"], "%d.%m.%y"),
    ],
)
def test_a_format_that_is_not_sure_is_asked_for(days, form, tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("\n".join(["day;y", *(f"{day};{k % 2}" for k, day in enumerate(days * 20))]))
    assert drafted(str(path), {}, target="y").columns["day"].format == form


def test_people_are_units_and_not_their_cases_nor_wards(tmp_path):
    path = tmp_path / "t.csv"
    lines = [f"{k},{k % 60},{k % 12},{k % 7 * 10},{k % 2}" for k in range(300)]
    path.write_text("\n".join(["case_id,patientId,ward_no,number_of_visits,y", *lines]))
    draft = drafted(str(path), {}, target="y")
    assert draft.ids == "patientId"
    assert draft.unit == "patient"
    assert list(draft.features) == ["number_of_visits"]
    assert "'case_id', 'ward_no'" in str(draft)
    assert drafted(str(path), {}, target="y", ids="case_id").ids == "case_id"


BAD = {
    "ragged.csv": ("a,b\n1,2\n1,2,3\n", r"as many cells in each row .* \(line 3\)"),
    "quotes.csv": ('a,b\n1,"x\n', r"quotes enclose whole cells.* \(line 2\)"),
    "huge.csv": (f"a,b\n1,{'x' * 200_000}\n", r"characters at most.* \(line 2\)"),
    "latin.csv": ("a,b\n1,ü\n", "file in utf-8"),
    "empty.csv": ("", "begin with a line of column names"),
    "semicolons.csv": ("a;b\n1;2\n", "one column alone; see the separator"),
    "head.csv": ("a,b\n", "there are no rows"),
    "nul.csv": ("a,b\n1\0,yes\n2,no\n", "text that cannot be read, first in line 2"),
    "other.csv": ("a,c\n1,2\n", "column 'b' must be in TABLE, once"),
    "book.xlsx": ("PK", "valid .xlsx file without a password"),
}


@pytest.fixture
def bad(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, (text, _) in BAD.items():
        Path(name).write_bytes(text.encode("latin-1"))
    Schema({"a": Number(0, 9)}, "b", ["no", "yes"]).save("schema.toml")


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_with_a_file_is_said_with_its_line(name, bad, capsys):
    if name.endswith(".xlsx"):
        pytest.importorskip("openpyxl")
    code, out, err = run(capsys, f"check {name} --schema schema.toml")
    assert (code, err) == (1, "")
    assert re.search(BAD[name][1], out), out
    code, _, err = run(capsys, f"fit {name} --schema schema.toml --epsilon 1 --out study")
    assert code == 2
    assert "(line " not in err.splitlines()[-1]


@pytest.mark.weekly
@pytest.mark.parametrize("name", BAD)
def test_no_process_aborts(name, bad):
    """Threads of pyarrow's reader of CSV did so at the end of some."""
    words = [sys.executable, "-m", "torch_dpsco", "check", name, "--schema", "schema.toml"]
    assert subprocess.run(words, capture_output=True).returncode == 1


def test_of_a_data_frame_in_parquet_the_index_is_left_out_and_people_are_ids(tmp_path):
    pandas = pytest.importorskip("pandas")
    columns = {
        "user": np.arange(40) // 2 + 10**6,
        "age": np.arange(40.0),
        "late": ["a", "b"] * 20,
    }
    frame = pandas.DataFrame(columns).sample(frac=1, random_state=0)
    frame.to_parquet(path := str(tmp_path / "t.parquet"))
    first = drafted(path, {}, target="late")
    assert first.ids == "user"
    assert list(first.features) == ["age"]
    assert first.left_out == ["'__index_level_0__'"]
    assert "[dialect]" not in str(first)  # cells of Parquet have types
    assert 'decimal = ","' in str(drafted(path, {"decimal": ","}, target="late"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("init ward.csv --out new.csv", "--out must be a new file"),
        ("init nowhere.csv --out s.toml", "TABLE must be a file that is there"),
        ("init ward.csv --out s.toml --public nowhere", "--public must be a file that is there"),
        ("init ward.csv --out s.toml --target x", "--target must be a column of 'ward.csv'"),
        ("init ward.csv --out s.toml --ids x", "--ids must be a column of 'ward.csv'"),
        ("init s.doc --out s.toml", "TABLE must be a file that is there"),
        (
            "check ward.csv",
            "--schema must be .*: dpsco init ward.csv --out schema.toml writes one",
        ),
        (
            "fit ward.csv --epsilon 1 --out o",
            "--schema must be .*: dpsco init ward.csv --out schema.toml writes one",
        ),
        (
            "fit ward.csv --schema s.toml --epsilon 1 --out o",
            "--schema must be .*: dpsco init ward.csv --out s.toml writes one",
        ),
    ],
)
def test_messages_name_options_that_are_there(words, says, ward, capsys):
    code, out, err = run(capsys, words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert re.search(says, err), err


def test_what_is_not_installed_is_said_in_one_line(ward, capsys, monkeypatch):
    drafted("ward.csv", {})
    Schema({"Alter": Number(0, 9)}, "verstorben", ["ja", "nein"]).save("schema.toml")
    for name in ("t.xlsx", "t.parquet"):
        Path(name).write_bytes(b"")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for words, names in (
        ("init t.xlsx --out s.toml", "openpyxl"),
        ("check t.parquet --schema schema.toml", "pyarrow"),
        ("fit ward.csv --schema schema.toml --epsilon 1 --out o", "matplotlib"),
        ("fit t.xlsx --schema schema.toml --epsilon 1 --out o", "matplotlib and openpyxl"),
    ):
        code, out, err = run(capsys, words)
        assert (code, out) == (2, "")
        assert err == f"dpsco: {names} must be installed: pip install 'torch_dpsco[tables]'\n"
    assert not Path("o").exists()


def test_a_record_is_no_line_of_names(ward, capsys):
    """Without a line of names the first patient would be in the schema."""
    excel("ward.csv", patients(40))
    Path("bare.csv").write_bytes(Path("ward.csv").read_bytes().split(b"\r\n", 1)[1])
    code, out, err = run(capsys, "init bare.csv --out schema.toml")
    assert (code, out) == (2, "")
    assert err.startswith("dpsco: TABLE must begin with a line of column names (got a number in")
    assert not Path("schema.toml").exists()
