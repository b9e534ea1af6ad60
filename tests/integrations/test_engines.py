"""Adapters of dask, Ray Data and Spark: what columns are read as; and fits on the engines themselves (slow)."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from tests.integrations.engine_fits import KINDS, N
from tests.integrations.test_launchers import run, skip_without
from torch_dpsco.integrations import engines
from torch_dpsco.integrations._columns import Columns

FRAME = pd.DataFrame(
    {
        "a": np.array([1.0, np.nan, 3.0], dtype=np.float32),
        "b": pd.array([4, None, 6], dtype="Int64"),
        "c": [True, False, True],
        "label": pd.Series(["x", None, "y"], dtype=object),
    }
)


def columns_of(frame: pd.DataFrame, target: str, features: list[str] | None = None) -> Columns:
    schema = pa.schema(
        [(name, engines._arrow_kind(dtype)) for name, dtype in frame.dtypes.items()]
    )
    return Columns.of(schema, target, features, None)


def test_a_pandas_partition_is_read_as_the_same_arrow_table():
    columns = columns_of(FRAME, "label")
    (X, y), (other, labels) = (
        columns.pandas_block(FRAME),
        columns.arrow_block(pa.Table.from_pandas(FRAME)),
    )
    np.testing.assert_array_equal(X, [[1, 4, 1], [np.nan, np.nan, 0], [3, 6, 1]])
    np.testing.assert_array_equal(X, other)
    assert X.dtype == other.dtype == columns.empty()[0].dtype == np.float64
    assert y.tolist() == labels.tolist() == ["x", None, "y"]


def test_single_precision_is_kept_where_all_features_are_single():
    columns = columns_of(FRAME, "b", ["a"])
    X, y = columns.pandas_block(FRAME)
    assert (X.dtype, y.dtype) == (np.float32, np.float64)
    assert columns.empty()[0].dtype == np.float32
    assert np.isnan(y[1])


@pytest.mark.parametrize("values", [["1", "two", "3"], [{}, 1, None]])
def test_a_partition_of_another_type_is_refused_by_its_type(values):
    other = FRAME.assign(b=pd.Series(values, dtype=object))
    with pytest.raises(TypeError, match="'b' must be of numbers in each partition") as refusal:
        columns_of(FRAME, "label").pandas_block(other)
    assert "two" not in str(refusal.value)
    with pytest.raises(TypeError, match="'b' must be of numbers in each block"):
        columns_of(FRAME, "label").arrow_block(
            pa.table({"a": [1.0], "b": ["two"], "c": [True], "label": ["x"]})
        )


def test_a_block_in_which_all_is_missing_is_read_as_numbers():
    table = pa.table({"a": [1.0], "b": pa.nulls(1), "c": [True], "label": pa.nulls(1)})
    X, y = columns_of(FRAME, "label").arrow_block(table)
    np.testing.assert_array_equal(X, [[1.0, np.nan, 1.0]])
    assert y.tolist() == [None]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_fit_on_an_engine_is_that_of_the_same_rows_in_memory(kind: str) -> None:
    if importlib.util.find_spec("dask" if kind == "dask" else "torch_dpsco") is None:
        pytest.skip("dask is not installed: pip install '.[dask]', or .ci/weekly engines")
    skip_without(kind)
    done = run("-m", "tests.integrations.engine_fits", kind)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["label"] < 1e-9
    assert said["real"] < 1e-9
    sizes = said["label partitions"]
    assert sum(sizes) == N
    assert 0 in sizes
    assert said.get("refused", False) == (kind != "ray")
    assert "'label' must be of numbers" in said["text"]
    assert f"engines.{kind}_partitions(X, target)" in said["as it is"]
