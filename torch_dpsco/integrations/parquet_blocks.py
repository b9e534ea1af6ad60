"""Parquet and Arrow tables as blocks that estimators are fitted to, a batch in memory at a time; needs pyarrow.

    model.fit(parquet_blocks("table.parquet", target="label"))

What a column is read as follows from the schema, which is public, never from values. A missing value is NaN: it makes a
record without influence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
from numpy.typing import NDArray

from torch_dpsco import _validate as check

Block = tuple[NDArray[Any], ...]


def parquet_blocks(
    source: Any,
    target: str,
    features: Sequence[str] | None = None,
    *,
    sample_weight: str | None = None,
    rows: int = 2**17,
) -> Callable[[], Iterator[Block]]:
    """Returns a callable for `fit`, which reads the table anew, in the same order, at each call.

    Args:
        source: path of a Parquet file or of a folder of them, a list of paths, or a pyarrow dataset.
        target: name of the column of targets.
        features: names of the columns of features; None for all others.
        sample_weight: name of the column of weights; None for none.
        rows: of a block, at most.

    Raises:
        TypeError: a column of features is not of numbers.
        ValueError: a column is not there.

    Example:
        >>> import pyarrow as pa, pyarrow.dataset as ds
        >>> table = pa.table({"a": [1.0, None], "b": [3, 4], "label": ["x", "y"]})
        >>> _, (X, y) = parquet_blocks(ds.dataset(table), target="label")()  # the first block has no rows
        >>> X.tolist(), y.tolist()
        ([[1.0, 3.0], [nan, 4.0]], ['x', 'y'])
    """
    table = source if isinstance(source, ds.Dataset) else ds.dataset(source, format="parquet")
    others = [target] if sample_weight is None else [target, sample_weight]
    names = [name for name in table.schema.names if name not in others] if features is None else list(features)
    size = check.positive_count(rows=rows)
    for name in (*names, *others):
        if table.schema.names.count(name) != 1:
            raise ValueError(f"columns must be in the table, once each (got {name!r}, of {table.schema.names})")
    kinds = [table.schema.field(name).type for name in names]
    for name, kind in zip(names, kinds, strict=True):
        if not _is_number(kind):
            raise TypeError(f"column {name!r} must be of numbers (got {kind}): encode it by public rules")
    single = all(kind == pa.float32() for kind in kinds)

    def read() -> Iterator[Block]:
        yield _empty(len(names), single, len(others))
        for batch in _batches(table, [*names, *others], size):
            block = np.empty((len(batch), len(names)), dtype=np.float32 if single else np.float64)
            for place in range(len(names)):
                block[:, place] = _numbers(batch.column(place))
            yield block, *(_column(batch.column(len(names) + place)) for place in range(len(others)))

    return read


def _batches(table: Any, columns: list[str], size: int) -> Iterator[Any]:
    """Yields batches in the order of the table, one row group after the other: a scan of all would read far ahead."""
    for fragment in table.get_fragments():
        options, pieces = None, [fragment]
        if hasattr(fragment, "split_by_row_group"):
            options = ds.ParquetFragmentScanOptions(pre_buffer=False, use_buffered_stream=True)
            pieces = fragment.split_by_row_group()
        for piece in pieces:
            yield from piece.scanner(
                schema=table.schema,
                columns=columns,
                batch_size=size,
                batch_readahead=1,
                fragment_scan_options=options,
                use_threads=False,
            ).to_batches()


def _is_number(kind: Any) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _empty(width: int, single: bool, columns: int) -> Block:
    """Returns a block without rows: a table may have none."""
    return np.empty((0, width), dtype=np.float32 if single else np.float64), *(np.empty(0) for _ in range(columns))


def _numbers(column: Any) -> NDArray[Any]:
    """Returns numbers, NaN for missing ones."""
    kind = column.type if pa.types.is_floating(column.type) else pa.float64()
    return np.asarray(column.cast(kind, safe=False).to_numpy(zero_copy_only=False))


def _column(column: Any) -> NDArray[Any]:
    """Returns numbers, or labels of any other type."""
    if _is_number(column.type):
        return _numbers(column).astype(np.float64, copy=False)
    labels = np.empty(len(column), dtype=object)
    labels[:] = column.to_pylist()
    return labels
