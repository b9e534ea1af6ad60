"""Schemas as files, tables in files, and what plans and loaders take of both."""

from __future__ import annotations

import json
import math
import traceback
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torch_dpsco as dp
from torch_dpsco import losses
from torch_dpsco.errors import UnitError
from torch_dpsco.estimators import Category, Number, Ordered, Schema, files
from torch_dpsco.estimators import reading as frames
from torch_dpsco.estimators.schema import key

COLUMNS = {
    "age": Number(17, 90),
    "sex": Category(["f", "m"]),
    "stage": Ordered(["I", "II", 3], missing=True),
}
SCHEMA = Schema(
    COLUMNS, target="died", labels=["no", "yes"], ids="id", rows_per_unit=None, unit="patient"
)
BINARY = Schema({"v": Number(0, 1)}, target="y", labels=["no", "yes"])

# -- schemas ----------------------------------------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
NAMES = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=8).filter(
    lambda name: name != "?"  # which asks for a name
)
ENDS = st.tuples(st.floats(-1e9, 0), st.floats(1, 1e9))
LEVELS = st.lists(TEXT, min_size=2, max_size=4, unique_by=key)
KINDS = st.one_of(
    st.builds(lambda ends, missing: Number(*ends, missing), ENDS, st.booleans()),
    st.builds(Category, LEVELS),
    st.builds(Ordered, LEVELS, st.booleans()),
)


@pytest.mark.slow
@given(
    st.dictionaries(NAMES, KINDS, min_size=1, max_size=3),
    NAMES,
    LEVELS,
    st.sampled_from([1, 3, None]),
)
def test_a_file_holds_the_whole_schema(tmp_path_factory, columns, target, labels, rows):
    columns.pop(target, None)
    if not columns or "the id" in (*columns, target):
        return
    schema = Schema(columns, target, labels, ids="the id", rows_per_unit=rows, unit="patient")
    path = tmp_path_factory.mktemp("schema") / "schema.toml"
    schema.save(path)
    assert Schema.load(path) == schema
    assert Schema.from_dict(json.loads(json.dumps(schema.to_dict()))) == schema
    assert list(Schema.load(path).names) == schema.names


def test_a_file_is_not_written_over(tmp_path):
    path = tmp_path / "schema.toml"
    SCHEMA.save(path)
    with pytest.raises(FileExistsError):
        SCHEMA.save(path)
    SCHEMA.save(path, overwrite=True)


def test_other_fields_are_kept():
    real = Schema({"v": Number(np.float64(0), np.int64(2))}, "y", target_range=(0, 1.5))
    assert Schema.from_dict(real.to_dict()) == real
    assert "rows_per_unit" in real.to_dict()
    promised = Schema({"v": Number(0, 1)}, "y", [0, 1], unit="patient", one_row_per_unit=True)
    assert Schema.from_dict(promised.to_dict()) == promised


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"colour": 1}, "colour must be left out"),
        ({"columns": 3}, "columns must be a table"),
        ({"columns": {"age": {"kind": "day"}}}, "kind of column 'age'"),
        ({"columns": {"age": {"kind": ["number"]}}}, "kind of column 'age'"),
        ({"columns": {"age": {"kind": "number", "low": 1}}}, "column 'age'.*high"),
        (
            {"columns": {"age": {"kind": "number", "low": 1, "high": 0}}},
            "column 'age': low must be below high",
        ),
        ({"labels": "no"}, "labels must be"),
        ({"rows_per_unit": "many"}, "rows_per_unit"),
        ({"unit": ""}, "unit must be of letters"),
        ({"unit": "stay", "ids": None}, "unit must have ids"),
    ],
)
def test_what_is_no_schema_is_refused(change, words):
    with pytest.raises((ValueError, TypeError), match=words):
        Schema.from_dict(SCHEMA.to_dict() | change)
    without = {name: value for name, value in SCHEMA.to_dict().items() if name != "target"}
    with pytest.raises(ValueError, match="target must be given"):
        Schema.from_dict(without)


def test_a_broken_file_is_named(tmp_path):
    path = tmp_path / "schema.toml"
    path.write_bytes(b"\xff = 1")
    with pytest.raises(ValueError, match="path must be a TOML file"):
        Schema.load(path)


# -- tables -----------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True) | st.floats(-2, 4), max_size=20),
    st.booleans(),
    st.sampled_from([np.float64, np.float32]),
)
def test_arrays_are_coded_as_their_values(values, missing, dtype):
    with np.errstate(over="ignore"):
        array = np.array(values, dtype=dtype)
    for kind in (Number(-1.7, 3.1, missing), Number(-1e300, 1e-300, missing)):
        assert kind.code(array).tobytes() == kind.code(array.tolist()).tobytes()


def test_columns_of_arrow_are_coded_as_their_values():
    arrow = pytest.importorskip("pyarrow")
    for values, kind in (
        ([2**63 - 1, None, -5], "int64"),
        ([0.1, None, float("nan"), float("inf")], "float32"),
        ([7, 8], "uint8"),
    ):
        column = arrow.chunked_array(
            [arrow.array(values[:2], kind), arrow.array(values[2:], kind)]
        )
        for number in (Number(-3, 2**62), Number(0, 9, missing=True)):
            one_by_one = np.concatenate([number.code([value]) for value in column.to_pylist()])
            assert number.code(frames.column("v", column)).tobytes() == one_by_one.tobytes()


def test_integers_and_truth_values_are_coded_alike():
    kind = Number(-5, 2**62)
    for array in (
        np.array([2**63 - 1, -(2**63), 7]),
        np.array([True, False]),
        np.array([2**64 - 1], dtype=np.uint64),
    ):
        assert kind.code(array).tolist() == kind.code(array.tolist()).tolist()


def frame(n: int = 2) -> dict[str, Any]:
    return {
        "age": [20, 90][:n],
        "sex": ["f", "m"][:n],
        "stage": ["I", 3][:n],
        "died": ["no", "yes"],
        "id": ["a", "b"],
    }


def test_files_are_read_like_tables(tmp_path):
    arrow, csv = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.csv")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = frame() | {"stage": ["I", "3"], "extra": [1, 2]}
    csv.write_csv(arrow.table(columns), tmp_path / "table.csv")
    parquet.write_table(arrow.table(columns), tmp_path / "table.parquet")
    wanted = SCHEMA.read(columns)
    for name in ("table.csv", "table.parquet"):
        table = SCHEMA.read(tmp_path / name)
        assert (table.X == wanted.X).all()
        assert table.y.tolist() == wanted.y.tolist()
        assert table.groups.tolist() == wanted.groups.tolist()
        assert (SCHEMA.features(str(tmp_path / name)) == wanted.X).all()


def test_no_value_of_a_file_decides_how_others_are_read(tmp_path):
    pytest.importorskip("pyarrow")
    schema = Schema(
        {"v": Number(0, 9, missing=True), "c": Category(["true", "false"])},
        "y",
        target_range=(0, 9),
    )
    path = tmp_path / "table.csv"
    rows = ["1,true,5", "2,false,7"]
    path.write_text("\n".join(["v,c,y", *rows]))
    alone = schema.read(path)
    for odd in ("x,y,z", "1e400,,", "2024-01-01,1,false", '"a ""b""",1.0,1'):
        path.write_text("\n".join(["v,c,y", odd, *rows]))
        table = schema.read(path)
        assert table.X[1:].tobytes() == alone.X.tobytes()
        assert table.y[1:].tobytes() == alone.y.tobytes()


def test_a_record_of_many_lines_stays_one(tmp_path):
    pytest.importorskip("pyarrow")
    schema = Schema({"v": Number(0, 9)}, "y", target_range=(0, 9))
    path = tmp_path / "table.csv"
    rows = [
        f"{k % 10},{k % 7},pad{k:08d}" for k in range(80_000)
    ]  # more than a block of the reader, 1 MiB
    rows[65_500] = (
        '1,2,"a\n' + "3,4,zzzzzzzzzzz\n" * 60 + '5,6,c"'
    )  # across the end of the first block
    path.write_text("\n".join(["v,y,note", *rows]) + "\n")
    assert len(schema.read(path).X) == len(rows)


def test_a_file_that_is_written_while_it_is_read_is_refused(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    path = tmp_path / "table.csv"
    path.write_text("v,y\n0.5,no\n")

    def changed(file: Any, dialect: Any) -> int:
        path.write_text("v,y\n0.5,no\n0.7,yes\n")
        return 0

    monkeypatch.setattr(files, "odd_quote", changed)
    with pytest.raises(
        ValueError, match="frame must be a file that nobody writes while it is read"
    ):
        BINARY.read(path)


def test_no_row_of_a_broken_file_is_quoted(tmp_path):
    for name, content in (
        ("table.csv", b"v,y\n1,2\nsecret,1,1,1\n"),
        ("table.csv", b"v,y\n\xffsecret,1\n"),
        ("table.parquet", b"PAR1 secret"),
    ):
        if name.endswith(".parquet"):
            pytest.importorskip("pyarrow")
        (tmp_path / name).write_bytes(content)
        with pytest.raises(
            files.FileError, match=r"as many cells|file in utf-8|valid parquet"
        ) as caught:
            Schema({"v": Number(0, 1)}, "y", target_range=(0, 1)).read(tmp_path / name)
        assert "secret" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (3, "frame must be a table"),
        ([1, 2], "frame must be a table"),
        ("table.xls", "frame must be a table with named columns, or the path"),
        ({"v": 3, "y": [1]}, "column 'v' of the frame must be a list or array"),
        (
            {"v": np.zeros((2, 2)), "y": ["no", "yes"]},
            "column 'v' of the frame must be a list or array",
        ),
    ],
)
def test_what_is_no_table_is_refused(wrong, words):
    for read in (BINARY.read, BINARY.features):
        with pytest.raises(ValueError, match=words):
            read(wrong)
    with pytest.raises(FileNotFoundError, match="frame must be a file that is there"):
        BINARY.read("nowhere.csv")


# -- plans and loaders ------------------------------------------------------------------------------------------------


def test_targets_are_coded_as_a_loss_wants_them():
    table = BINARY.read({"v": [0.0, 1.0, 0.5, None], "y": ["no", "yes", "?", "yes"]})
    rows, signs = table.dataset(losses.Logistic()).tensors
    assert signs[:2].tolist() == [-1.0, 1.0]
    assert rows.isnan().flatten().tolist() == [False, False, True, True]
    assert rows.dtype == signs.dtype == torch.get_default_dtype()
    classes = table.dataset(losses.SoftmaxCrossEntropy(2)).tensors[1]
    assert classes[:2].tolist() == [0, 1]
    assert classes.dtype == torch.int64
    real = Schema({"v": Number(0, 1)}, "y", target_range=(0, 2)).read(
        {"v": [0.0, 1.0], "y": [5, "x"]}
    )
    rows, targets = real.dataset(losses.Squared()).tensors
    assert targets.tolist() == [2.0, 0.0]
    assert rows.isnan().flatten().tolist() == [False, True]


def test_rows_of_users_are_not_taken_for_units():
    table, loss = SCHEMA.read(frame() | {"stage": ["I", 3]}), losses.Logistic()
    with pytest.raises(UnitError, match="unit must be 'user'"):
        table.dataset(loss)
    assert len(table.dataset(loss, unit="user")) == len(table.groups) == 2
    with pytest.raises(UnitError, match="unit must be 'user'"):
        BINARY.read({"v": [0.0], "y": ["no"]}).dataset(loss, unit="user")


@pytest.mark.slow
def test_a_loop_is_planned_and_run_from_a_schema():
    loss, n = losses.Logistic(), 1000
    draws = np.random.default_rng(0).random(n)
    table = BINARY.read({"v": draws, "y": np.where(draws > 0.5, "yes", "no")})
    plan = dp.HolderSGD.plan(
        problem=BINARY.problem(loss), n=n, budget=dp.Budget(8.0, 1e-5), batch_size=100, epochs=2
    )
    model = torch.nn.Linear(1, 1)
    dp.attach(model)
    optimizer = dp.HolderSGD(model.parameters(), plan)
    for x, y in optimizer.loader(table.dataset(loss)):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    optimizer.finalize()
    assert model.weight.item() > 0


def test_the_bias_counts_as_a_feature():
    bound = BINARY.problem(losses.Logistic()).bound_x
    assert math.sqrt(2) <= bound < 1.4143
    assert 1 <= BINARY.problem(losses.Logistic(), intercept=False).bound_x < 1.0001
    real = Schema({"v": Number(0, 1)}, "y", target_range=(-3, 2)).problem(
        losses.Squared(), radius=2.0
    )
    assert (real.bound_y, real.radius) == (3.0, 2.0)


@pytest.mark.parametrize(
    ("schema", "loss"),
    [
        (BINARY, losses.Squared()),
        (Schema({"v": Number(0, 1)}, "y", target_range=(0, 1)), losses.Logistic()),
        (Schema({"v": Number(0, 1)}, "y", labels=[0, 1, 2]), losses.Logistic()),
        (Schema({"v": Number(0, 1)}, "y", labels=[0, 1, 2]), losses.SoftmaxCrossEntropy(2)),
    ],
)
def test_a_loss_of_other_targets_is_refused(schema, loss):
    with pytest.raises(ValueError, match="loss must be one of"):
        schema.problem(loss)
    with pytest.raises(ValueError, match="loss must be one of"):
        schema.read({"v": [0], "y": [1]}).dataset(loss)


# -- public tables ----------------------------------------------------------------------------------------------------
