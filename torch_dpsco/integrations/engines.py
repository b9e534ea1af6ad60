"""Tables on dask, Ray Data or Spark as partitions that estimators are fitted to, each where its engine holds it.

    model.fit(dask_partitions(frame, target="label"))

What a column is read as follows from the schema, as for `parquet_blocks`. Needs pyarrow, the engine, and this package
on every worker. See docs/integrations/engines.md for what reaches whom.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from torch_dpsco import _validate as check
from torch_dpsco._validate import typed
from torch_dpsco.integrations._columns import Block, Columns, pandas_is_number

_Function = Callable[[Iterator[Block]], Any]


@typed
def dask_partitions(
    frame: Any,
    target: str,
    features: Sequence[str] | None = None,
    *,
    sample_weight: str | None = None,
) -> _Table:
    """Returns the partitions of a dask data frame, for `fit`; each is one pandas frame in the memory of a worker.

    Args:
        frame: `dask.dataframe.DataFrame`; persist it where it is not cheap to make, or not the same each time.
        target: name of the column of targets.
        features: names of the columns of features; None for all others.
        sample_weight: name of the column of weights; None for none.

    Raises:
        TypeError: a column of features is not of numbers.
        ValueError: a column is not there.
    """
    _require_table("to_delayed", "a dask.dataframe.DataFrame", frame=frame)
    kinds = [(name, _arrow_kind(dtype)) for name, dtype in frame.dtypes.items()]
    columns = Columns.of(pa.schema(kinds), target, features, sample_weight)
    frames = frame.to_delayed()

    def run(function: _Function) -> list[Any]:
        import dask

        task = dask.delayed(_of_pandas, pure=False)
        return list(dask.compute(*(task(function, columns, part) for part in frames)))

    return _Table(run)


@typed
def ray_partitions(
    dataset: Any,
    target: str,
    features: Sequence[str] | None = None,
    *,
    sample_weight: str | None = None,
) -> _Table:
    """Returns the blocks of a Ray data set, for `fit`; it is materialized, once, in the object store.

    Args:
        dataset: `ray.data.Dataset`.
        target: as in `dask_partitions`.
        features: likewise.
        sample_weight: likewise.

    Raises:
        TypeError: a column of features is not of numbers.
        ValueError: a column is not there.
    """
    _require_table("materialize", "a ray.data.Dataset", dataset=dataset)
    import ray

    tables = dataset.materialize().to_arrow_refs()
    schemas = ray.get([ray.remote(_schema).remote(table) for table in tables])
    first = next((schema for schema in schemas if schema.names), pa.schema([]))
    columns = Columns.of(first, target, features, sample_weight)

    def run(function: _Function) -> list[Any]:
        task = ray.remote(_of_table)
        shared = ray.put(function)
        return list(ray.get([task.remote(shared, columns, table) for table in tables]))

    return _Table(run)


@typed
def spark_partitions(
    frame: Any,
    target: str,
    features: Sequence[str] | None = None,
    *,
    sample_weight: str | None = None,
) -> _Table:
    """Returns the partitions of a Spark data frame, for `fit`; they are read in Arrow batches, a few in memory each.

    Args:
        frame: `pyspark.sql.DataFrame`; persist it, or write it to files, if it was shuffled: a shuffle that Spark makes
            again gives another order of rows, which is refused.
        target: as in `dask_partitions`.
        features: likewise.
        sample_weight: likewise.

    Raises:
        TypeError: a column of features is not of numbers.
        ValueError: a column is not there.
    """
    _require_table("mapInArrow", "a pyspark.sql.DataFrame", frame=frame)
    columns = Columns.of(frame.limit(0).toArrow().schema, target, features, sample_weight)
    chosen = frame.select(*(f"`{name}`" for name in (*columns.names, *columns.others)))

    def run(function: _Function) -> list[Any]:
        def partition(batches: Iterator[Any]) -> Iterator[Any]:  # a data frame does not travel
            from pyspark import TaskContext

            place = TaskContext.get().partitionId()
            result = pickle.dumps(function(_arrow_blocks(columns, batches)))
            yield pa.RecordBatch.from_pydict(
                {"place": pa.array([place], pa.int32()), "result": [result]}
            )

        rows = chosen.mapInArrow(partition, "place int, result binary").collect()
        return [pickle.loads(row.result) for row in sorted(rows, key=lambda row: row.place)]

    return _Table(run)


def _require_table(method: str, kind: str, **table: Any) -> None:
    """Raises ValueError for what has not this method of a table of the engine."""
    ((name, value),) = table.items()
    if isinstance(value, type) or not hasattr(value, method):
        raise ValueError(f"{name} must be {kind} (got {check.shown(value)})")


class _Table:
    """`streams.partitions.Partitions` on an engine.

    Args:
        run: as in `Partitions`.
    """

    def __init__(self, run: Callable[[_Function], list[Any]]) -> None:
        self.run = run


def _of_pandas(function: _Function, columns: Columns, frame: Any) -> Any:
    return function(iter([columns.pandas_block(frame)]))


def _of_table(function: _Function, columns: Columns, table: Any) -> Any:
    return function(_arrow_blocks(columns, [table] if len(table) else []))


def _arrow_blocks(columns: Columns, tables: Iterable[Any]) -> Iterator[Block]:
    yield columns.empty()
    for table in tables:
        yield columns.arrow_block(table)


def _schema(table: Any) -> Any:
    return table.schema


def _arrow_kind(dtype: Any) -> Any:
    """Returns the type of numbers in Arrow that a dtype of pandas is read as; a string for others."""
    if not pandas_is_number(dtype):
        return pa.string()
    return pa.float32() if dtype == np.float32 else pa.float64()
