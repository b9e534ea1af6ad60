"""A schema: bounds that hold for whatever a table holds, units that do not meet, errors that name the column."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_dpsco.estimators import (
    Category,
    HuberRegressor,
    LinearSVC,
    LogisticRegression,
    Number,
    Ordered,
    QuantileRegressor,
    Ridge,
    Schema,
    SoftmaxRegression,
)

COLUMNS = {
    "age": Number(17, 90),
    "pay": Number(-1e308, 0.3, missing=True),
    "sex": Category(["f", "m"]),
    "stage": Ordered([1, 2, 3], missing=True),
}
VALUES = st.one_of(
    st.none(),
    st.floats(),
    st.integers(),
    st.text(),
    st.booleans(),
    st.just(10**400),
    st.just("m"),
)


@pytest.mark.slow
@given(st.lists(VALUES, min_size=5, max_size=5))
def test_no_row_is_longer_than_the_bound(row):
    schema = Schema(COLUMNS, target="y", target_range=(-1, 2))
    table = schema.read(
        {name: [value] for name, value in zip([*COLUMNS, "y"], row, strict=True)}
    )
    assert table.X.shape == (1, len(schema.names))
    assert not np.linalg.norm(table.X) > schema.bound_x
    assert np.isnan(table.y[0]) or -1 <= table.y[0] <= 2


def test_levels_and_labels_compare_by_one_rule():
    schema = Schema({"s": Category([0, 1])}, target="y", labels=["no", "yes"])
    table = schema.read({"s": [1, 1.0, True, "1", "x"], "y": ["yes", "no", "yes ", None, 1]})
    assert table.X.tolist() == [[0, 1]] * 4 + [[0, 0]]
    assert table.y.tolist() == ["yes", "no", "", "", ""]


IDS = st.sampled_from(["a", "b", "c", None])


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("most", [1, 2, None])
@given(
    rows=st.lists(st.tuples(IDS, st.integers(-9, 9)), max_size=8),
    other=st.lists(st.integers(-9, 9), max_size=4),
)
def test_rows_of_other_units_do_not_matter(most, rows, other):
    """A neighbor whose unit "x" has other rows, anywhere: all other units keep what they had."""
    schema = Schema(
        {"v": Number(-9, 9)}, target="y", target_range=(-9, 9), ids="id", rows_per_unit=most
    )

    def kept(records):
        table = schema.read(
            {
                "v": [v for _, v in records],
                "y": [v for _, v in records],
                "id": [i for i, _ in records],
            }
        )
        return [(v, y) for v, y in zip(table.X[:, 0] * 9, table.y, strict=True)], table.groups

    alone, _ = kept(rows)
    with_x, groups = kept([("x", v) for v in other] + rows)
    own = len(other) if most is None else min(most, len(other))
    assert len(with_x) == len(alone) + own
    assert np.allclose(with_x[own:], alone, equal_nan=True)
    assert (groups is None) == (most == 1)
    if groups is not None:
        assert groups[:own].tolist() == ["=x"] * own


def test_a_row_without_an_id_is_a_null_record():
    schema = Schema(
        {"v": Number(0, 1)}, target="y", target_range=(0, 9), ids="id", rows_per_unit=None
    )
    for missing in (10**5000, 1.5, "", None, math.nan, math.inf, 2.0**53, True):
        table = schema.read({"v": [0, 1], "y": [1, 2], "id": [missing, 7]})
        assert table.X.tolist()[1] == [1.0]
        assert math.isnan(table.X[0, 0])
        assert table.groups.tolist() == ["?0", "=7"]
    for same in (7, 7.0, np.int64(7), np.float32(7.0)):
        assert schema.read({"v": [0], "y": [1], "id": [same]}).groups.tolist() == ["=7"]
    with pytest.raises(ValueError, match="ids 'id' must be integers or text"):
        schema.read({"v": [0], "y": [1], "id": np.array([True])})


@pytest.mark.slow
def test_units_are_protected_by_their_groups():
    schema = Schema({"v": Number(0, 1)}, target="y", labels=[0, 1], ids="id", rows_per_unit=None)
    draws = np.random.default_rng(0).random(900)
    table = schema.read({"v": draws, "y": (draws > 0.5).astype(int), "id": np.arange(900) % 300})
    model = LogisticRegression(epsilon=2.0, n=300, **schema.settings()).fit(**table.arguments())
    assert model.privacy_.unit == "user"


def test_frames_of_pandas_and_arrow_are_read_alike():
    pandas, arrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    columns = {
        "age": [20, None, 90],
        "sex": ["f", "m", None],
        "y": ["no", "yes", "no"],
        "id": [1, None, 3],
    }
    schema = Schema(
        {"age": Number(17, 90), "sex": Category(["f", "m"])},
        target="y",
        labels=["no", "yes"],
        ids="id",
    )
    tables = [
        schema.read(frame)
        for frame in (columns, pandas.DataFrame(columns), arrow.table(columns))
    ]
    for table in tables[1:]:
        assert np.array_equal(table.X, tables[0].X, equal_nan=True)
        assert table.y.tolist() == tables[0].y.tolist()


def test_a_baseline_has_no_feature():
    kind = Category(["f", "m", "x"], baseline=True)
    assert kind.names("sex") == ["sex=m", "sex=x"]
    assert kind.code(["f", "m", "x", None]).tolist() == [
        [0, 0],
        [1, 0],
        [0, 1],
        [0, 0],
    ]
    schema = Schema({"sex": kind}, target="y", labels=[0, 1])
    assert schema.read({"sex": ["f", "x"], "y": [0, 1]}).X.tolist() == [[0, 0], [0, 1]]
    assert Schema.from_dict(schema.to_dict()) == schema


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("kind", [LogisticRegression, LinearSVC, SoftmaxRegression])
def test_classifiers_take_the_settings(kind):
    schema = Schema({"v": Number(0, 100)}, target="y", labels=["no", "yes"])
    table = schema.read(
        {"v": np.arange(2000) % 101, "y": ["yes" if i % 101 > 50 else "no" for i in range(2000)]}
    )
    model = kind(epsilon=20.0, n=2000, **schema.settings()).fit(table.X, table.y)
    assert model.predict([[-1.0], [1.0]]).tolist() == ["no", "yes"]


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("kind", [Ridge, HuberRegressor, QuantileRegressor])
def test_regressors_take_the_settings(kind):
    schema = Schema({"v": Number(0, 100)}, target="y", target_range=(0, 1))
    table = schema.read({"v": np.arange(2000) % 101, "y": (np.arange(2000) % 101) / 100})
    assert kind(epsilon=20.0, n=2000, **schema.settings()).fit(table.X, table.y).coef_[0] > 0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: Number(2, 1), "low must be below high"),
        (lambda: Number(-1e308, 1e308), "finite distance"),
        (lambda: Number(0, math.nan), "high"),
        (lambda: Category(["a"]), "2 or more"),
        (lambda: Ordered([1, "1"]), "distinct"),
        (lambda: Schema(COLUMNS, target="age", labels=[0, 1]), "among the features"),
        (lambda: Schema(COLUMNS, target="y"), "labels or target_range"),
        (lambda: Schema(COLUMNS, target="y", labels=[0, 1], rows_per_unit=3), "without ids"),
        (
            lambda: Schema({1: Number(0, 1)}, target="y", labels=[0, 1]),
            "must have names of printable text",
        ),
        (
            lambda: Schema({"a\nb": Number(0, 1)}, target="y", labels=[0, 1]),
            "must have names of printable",
        ),
        (
            lambda: Schema(COLUMNS, target=" ", labels=[0, 1]),
            "must have names of printable text",
        ),
        (lambda: Schema(COLUMNS, target="y", labels=[0, 1]).read({"y": [1]}), "'age'"),
        (
            lambda: Schema({"a": Number(0, 1)}, "y", [0, 1]).read({"a": [1, 2], "y": [1]}),
            "one length",
        ),
    ],
)
def test_mistakes_are_named(wrong, words):
    with pytest.raises(ValueError, match=words):
        wrong()


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ("a patient with several rows would not be protected", {"unit": "patient"}),
        (
            "one_row_per_unit must be left out",
            {"unit": "patient", "ids": "id", "one_row_per_unit": True},
        ),
        ("one_row_per_unit must be left out", {"one_row_per_unit": True}),
        ("unit must be of letters", {"unit": "Patient_1", "ids": "id"}),
        ("unit must be of letters", {"unit": "patient (adult)", "one_row_per_unit": True}),
    ],
)
def test_a_name_of_units_needs_ids_or_a_promise(words, fields):
    """A name is one that reports take, and says more than "row" only where it is said why a row is that."""
    with pytest.raises(ValueError, match=words):
        Schema(COLUMNS, target="y", labels=[0, 1], **fields)
    for fine in (
        {"ids": "id"},
        {"ids": "id", "rows_per_unit": None},
        {"one_row_per_unit": True},
    ):
        assert (
            Schema(COLUMNS, target="y", labels=[0, 1], unit=" patient ", **fine).unit
            == "patient"
        )


@pytest.mark.slow
def test_the_code_of_the_page_runs():
    page = (Path(__file__).parents[2] / "docs" / "schema.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    exec(compile("\n".join(blocks), "docs/schema.md", "exec"), {})
