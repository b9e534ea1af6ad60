"""A schema: bounds that hold for whatever a table holds, units that do not meet, errors that name the column."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_dpsco.estimators import HuberRegressor, LinearSVC, LogisticRegression, QuantileRegressor, Ridge
from torch_dpsco.schema import Category, Number, Ordered, Schema

COLUMNS = {
    "age": Number(17, 90),
    "pay": Number(-1e308, 0.3, missing=True),
    "sex": Category(["f", "m"]),
    "stage": Ordered([1, 2, 3], missing=True),
}
VALUES = st.one_of(st.none(), st.floats(), st.integers(), st.text(), st.booleans(), st.just(10**400), st.just("m"))


@given(st.lists(VALUES, min_size=5, max_size=5))
def test_no_row_is_longer_than_the_bound(row):
    schema = Schema(COLUMNS, target="y", target_range=(-1, 2))
    table = schema.read({name: [value] for name, value in zip([*COLUMNS, "y"], row, strict=True)})
    assert table.X.shape == (1, len(schema.names))
    assert not np.linalg.norm(table.X) > schema.bound_x
    assert np.isnan(table.y[0]) or -1 <= table.y[0] <= 2


def test_levels_and_labels_compare_by_one_rule():
    schema = Schema({"s": Category([0, 1])}, target="y", labels=["no", "yes"])
    table = schema.read({"s": [1, 1.0, True, "1", "x"], "y": ["yes", "no", "yes ", None, 1]})
    assert table.X.tolist() == [[0, 1]] * 4 + [[0, 0]]
    assert table.y.tolist() == ["yes", "no", "", "", ""]


@pytest.mark.parametrize(("most", "kept"), [(1, [0, 2]), (2, [0, 1, 2]), (None, [0, 1, 2, 4])])
def test_rows_of_other_units_do_not_matter(most, kept):
    schema = Schema({"v": Number(-9, 9)}, target="y", target_range=(0, 9), ids="id", rows_per_unit=most)
    table = schema.read({"v": [0] * 5, "y": [0, 1, 2, 3, 4], "id": ["a", "a", "b", None, "a"]})
    assert table.y.tolist() == kept
    alone = schema.read({"v": [0], "y": [2], "id": ["b"]})
    assert set(alone.y) <= set(table.y)
    assert (table.groups is None) == (most == 1)


@pytest.mark.parametrize("kind", [LogisticRegression, LinearSVC])
def test_classifiers_take_the_settings(kind):
    schema = Schema({"v": Number(0, 100)}, target="y", labels=["no", "yes"])
    table = schema.read({"v": np.arange(2000) % 101, "y": ["yes" if i % 101 > 50 else "no" for i in range(2000)]})
    model = kind(epsilon=4.0, n=2000, **schema.settings()).fit(table.X, table.y)
    assert model.predict([[-1.0], [1.0]]).tolist() == ["no", "yes"]


@pytest.mark.parametrize("kind", [Ridge, HuberRegressor, QuantileRegressor])
def test_regressors_take_the_settings(kind):
    schema = Schema({"v": Number(0, 100)}, target="y", target_range=(0, 1))
    table = schema.read({"v": np.arange(2000) % 101, "y": (np.arange(2000) % 101) / 100})
    assert kind(epsilon=4.0, n=2000, **schema.settings()).fit(table.X, table.y).coef_[0] > 0


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
        (lambda: Schema(COLUMNS, target="y", labels=[0, 1]).read({"y": [1]}), "'age'"),
        (lambda: Schema({"a": Number(0, 1)}, "y", [0, 1]).read({"a": [1, 2], "y": [1]}), "one length"),
        (lambda: Schema({"a": Number(0, 1)}, "y", [0, 1], ids="i").read({"a": [1], "y": [1], "i": np.ones(1)}), "ids"),
    ],
)
def test_mistakes_are_named(wrong, words):
    with pytest.raises(ValueError, match=words):
        wrong()


def test_an_id_that_cannot_be_read_drops_its_row_only():
    schema = Schema({"v": Number(0, 1)}, target="y", target_range=(0, 9), ids="id")
    assert schema.read({"v": [0] * 4, "y": [0, 1, 2, 3], "id": [10**5000, 7, 1.5, ""]}).y.tolist() == [1]
