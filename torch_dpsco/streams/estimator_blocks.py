"""Records that `fit` does not find in memory as rows: blocks that are read again and again, partitions, sparse rows.

| given | read as |
|---|---|
| a callable | at each call a fresh iterator over blocks (X, y) or (X, y, sample_weight), the same records each time |
| scipy sparse rows | one such block |
| `streams.partitions.Partitions` | blocks of each partition of a table, read where an engine holds it |

Rows of a sparse block are made dense a few at a time, 2^22 numbers at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_dpsco._validate import shown
from torch_dpsco.estimators.reading import dense_rows, is_sparse, record_weights
from torch_dpsco.estimators.records import RawPart
from torch_dpsco.streams.blocks import RawBlocks
from torch_dpsco.streams.partitions import Partitions, RawPartitions

_ADAPTERS = {
    "pyarrow": "parquet.parquet_blocks",
    "dask": "engines.dask_partitions",
    "ray": "engines.ray_partitions",
    "pyspark": "engines.spark_partitions",
}
_Read = Callable[[Any, int, torch.device], tuple[Tensor, Tensor | None]]


def as_blocks(
    X: Any, y: Any, sample_weight: Any, read: _Read
) -> RawBlocks | RawPartitions | None:
    """Returns records in blocks or partitions, if that is what `fit` was given; else None.

    Args:
        X: as `fit` takes it.
        y: targets, None beside a callable or partitions.
        sample_weight: weights, likewise.
        read: targets (m,) of a block, and public weights by class or None; it travels to partitions.

    Raises:
        ValueError: targets or weights are given beside a callable or partitions; or a table that an adapter is for.
    """
    adapter = _ADAPTERS.get(type(X).__module__.partition(".")[0])
    if adapter is not None and y is None:
        raise ValueError(
            f"X must be rows, blocks or partitions (got {type(X).__name__}): "
            f"use torch_dpsco.integrations.{adapter}(X, target)"
        )
    if callable(X) or isinstance(X, Partitions):
        if y is not None or sample_weight is not None:
            raise ValueError(
                "X must be rows, since y or sample_weight is given: blocks have their own, and"
                f" y=None beside them (got {shown(X)})"
            )
        return (
            RawBlocks(lambda: _tensors(read, X()))
            if callable(X)
            else RawPartitions(X, partial(_tensors, read))
        )
    return RawBlocks(lambda: _tensors(read, [(X, y, sample_weight)])) if is_sparse(X) else None


def _tensors(read: _Read, blocks: Any) -> Iterator[RawPart]:
    """Yields the records of blocks as tensors, with weights."""
    if not isinstance(blocks, Iterable):
        raise ValueError(
            f"X must return an iterator over blocks when it is called (got {shown(blocks)})"
        )
    for block in blocks:
        if not isinstance(block, (tuple, list)) or len(block) not in (2, 3):
            raise ValueError(
                "blocks must be pairs (X, y), or (X, y, sample_weight) (got"
                f" {type(block).__name__})"
            )
        X, y, given = (*block, None)[:3]
        columns: tuple[Tensor, Tensor] | None = None
        start = 0
        for rows in dense_rows(X):
            if columns is None:
                count = X.shape[0] if is_sparse(X) else len(rows)
                targets, factors = read(y, count, rows.device)
                weights = record_weights(given, factors, count, rows.device)
                columns = (
                    targets,
                    (
                        torch.ones_like(targets, dtype=torch.float64)
                        if weights is None
                        else weights
                    ),
                )
            yield (
                rows,
                columns[0][start : start + len(rows)],
                columns[1][start : start + len(rows)].double(),
            )
            start += len(rows)
