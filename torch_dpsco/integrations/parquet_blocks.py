"""Parquet and Arrow tables as blocks that estimators are fitted to, a batch in memory at a time; needs pyarrow.

    model.fit(parquet_blocks("table.parquet", target="label"))

What a column is read as follows from the schema, which is public, never from values. A missing value is NaN: it makes a
record without influence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow.dataset as ds

from torch_dpsco import _validate as check
from torch_dpsco._doors import typed
from torch_dpsco.integrations._columns import Block, Columns
from torch_dpsco.integrations._files import require_sound


@typed
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
        UnitError: a file is there twice, under one name or two, or by a link.
        ValueError: a column is not there.

    Example:
        >>> import pyarrow as pa, pyarrow.dataset as ds
        >>> table = pa.table({"a": [1.0, None], "b": [3, 4], "label": ["x", "y"]})
        >>> _, (X, y) = parquet_blocks(ds.dataset(table), target="label")()  # the first block has no rows
        >>> X.tolist(), y.tolist()
        ([[1.0, 3.0], [nan, 4.0]], ['x', 'y'])
    """
    paths = source if isinstance(source, list) else [source]
    if not isinstance(source, ds.Dataset) and not all(check.is_path(path) for path in paths):
        raise ValueError(
            "source must be a path, a list of paths, or a pyarrow.dataset.Dataset (got"
            f" {check.shown(source)})"
        )
    table = source if isinstance(source, ds.Dataset) else ds.dataset(source, format="parquet")
    require_sound(table)
    chosen = Columns.of(table.schema, target, features, sample_weight)
    size = check.positive_count(rows=rows)

    def read() -> Iterator[Block]:
        yield chosen.empty()
        for batch in _batches(table, [*chosen.names, *chosen.others], size):
            yield chosen.arrow_block(batch)

    return read


def _batches(table: Any, columns: list[str], size: int) -> Iterator[Any]:
    """Yields batches in the order of the table, one row group after the other: a scan of all would read far ahead."""
    for fragment in table.get_fragments():
        options = None
        pieces = [fragment]
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
