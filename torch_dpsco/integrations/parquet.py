"""Parquet files, Arrow tables and streams of these, in bounded memory.

`ParquetRows` is a data set for `optimizer.loader` and `fit`; `parquet_blocks` is what estimators are fitted to.

Draws want records at random places, and Parquet has them in compressed groups. So the columns that are used are read
once, from start to end, into an unnamed private file of rows (`sampling.datasets`), from which batches are gathered.

| in the source | in the data set |
|---|---|
| integers, floats, decimals, booleans | numbers of `dtype` |
| a record with null, NaN or infinity (also after rounding to `dtype`) in a used column | a null record |
| a class that is no integer, with an integer `target_dtype` | a null record |
| another type of numbers than in the table before, or none (null) | numbers of `dtype`, null records |
| text, categories, dates, lists; a column that is missing, in a later table too | ValueError, by the column's name |
| an iterable without a table | no records |
| a file that is there twice, under one name or two, or by a link | UnitError |

A null record has inputs of NaN and the target 0. It is a record like any other, and is drawn; its row is not finite and
contributes exactly 0 (`step.oracle`). A loss that raises for outputs of NaN would tell of it: `BCEWithLogitsLoss`
does not, `BCELoss` does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import torch

from torch_dpsco import _validate as check
from torch_dpsco._validate import typed
from torch_dpsco.integrations._columns import Block, Columns, is_number
from torch_dpsco.integrations._files import RowFile, require_sound, row_dtype

_ROWS = 1 << 16  # that are in memory at a time
_BUFFERED = pads.ParquetFragmentScanOptions(pre_buffer=False, use_buffered_stream=True)


class ParquetRows(RowFile):
    """A map-style data set of (inputs, target) pairs from columns of numbers, read once, here.

    Args:
        source: path of a Parquet file or folder, list of paths, `pyarrow.dataset.Dataset`, Arrow table; or an iterable
            of tables or record batches, as `ray_dataset.iter_batches(batch_format="pyarrow")`, gone through once.
        inputs: names of the columns of the inputs, in order.
        target: name of the column of the target.
        dtype: of the inputs: torch.float32 or torch.float64.
        target_dtype: default `dtype`, for targets of shape (1,); torch.int64 for classes, of shape ().
        folder: in which the private file is; it needs room for all rows. Default that of `tempfile`.

    Raises:
        UnitError: a file is there twice, under one name or two, or by a link.
        ValueError: a column is missing, or does not hold numbers; or the source cannot be read. No value is quoted.

    Example:
        >>> data = ParquetRows(pa.table({"a": [1.0, None], "b": [3, 4], "y": [0, 1]}), inputs=["a", "b"], target="y")
        >>> len(data), data[0], data[1]
        (2, (tensor([1., 3.]), tensor([0.])), (tensor([nan, nan]), tensor([0.])))
    """

    @typed
    def __init__(
        self,
        source: Any,
        inputs: Sequence[str],
        target: str,
        *,
        dtype: torch.dtype = torch.float32,
        target_dtype: torch.dtype | None = None,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        if not len(inputs):
            raise ValueError(f"inputs must be a list of names of columns (got {inputs!r})")
        names = [*inputs, target]
        if len(set(names)) < len(names):
            raise ValueError(
                "inputs must hold each column once, and not the target (got one twice)"
            )
        of_target = target_dtype or dtype
        row = row_dtype(
            dtype, [len(inputs)], of_target, [1] if of_target.is_floating_point else []
        )
        super().__init__(_blocks(_tables(source, names), names, row), row, folder)


def _tables(source: Any, names: Sequence[str]) -> Iterator[Any]:
    """Returns an iterator of the tables or record batches of a source, which are read when it comes to them."""
    if isinstance(source, (pa.Table, pa.RecordBatch)):
        return iter([source])
    if not _is_stored(source):
        try:
            return iter(source)
        except TypeError:
            raise ValueError(
                "source must be Parquet files, a pyarrow.dataset.Dataset, an Arrow table or an"
                " iterable of tables, as ray_dataset.iter_batches(batch_format='pyarrow') (got a"
                f" {type(source).__name__})"
            ) from None
    source = _dataset(source)
    _require_numbers(source.schema, names)
    options: dict[str, Any] = {
        "batch_size": _ROWS,
        "batch_readahead": 2,
        "fragment_readahead": 1,
    }
    if isinstance(
        getattr(source, "format", None), pads.ParquetFileFormat
    ):  # else whole files are buffered
        options["fragment_scan_options"] = _BUFFERED
    batches: Iterator[Any] = source.to_batches(columns=list(names), **options)
    return batches


def _require_numbers(schema: pa.Schema, names: Sequence[str]) -> None:
    for name in names:
        if schema.get_field_index(name) < 0:
            raise ValueError(
                f"inputs and target must be columns of the source, each once (got {name!r})"
            )
        kind = schema.field(name).type
        # a part without values has no type where types are found out from values, as by Ray and pandas
        if not (is_number(kind) or pa.types.is_decimal(kind) or pa.types.is_null(kind)):
            raise ValueError(
                f"column {name!r} must hold numbers (got {kind}): leave it out of inputs, or write"
                " a column of 0 and 1 for each category that is publicly known"
            )


def _blocks(
    tables: Iterator[Any], names: Sequence[str], row: np.dtype[Any]
) -> Iterator[npt.NDArray[Any]]:
    """Yields the rows of the tables in order."""
    while True:
        try:
            table = next(tables)
        except StopIteration:
            return
        except (pa.ArrowException, OSError) as error:
            # PRIVACY: its message may quote a value (test_a_source_that_cannot_be_read_is_not_quoted)
            raise ValueError(
                f"source must be readable to its end (got {type(error).__name__})"
            ) from None
        if not isinstance(table, (pa.Table, pa.RecordBatch)):
            raise ValueError(
                f"source must give Arrow tables or record batches (got a {type(table).__name__})"
            )
        _require_numbers(table.schema, names)
        parts = (
            [table]
            if isinstance(table, pa.RecordBatch)
            else table.select(list(names)).to_batches()
        )
        for part in parts:
            for start in range(0, len(part), _ROWS):
                batch = part.slice(start, _ROWS)
                yield _block([_numbers(batch.column(name)) for name in names], row)


def _numbers(column: pa.Array) -> npt.NDArray[Any]:
    """Returns a column as numbers; what is null is NaN."""
    if pa.types.is_boolean(column.type):
        column = pc.cast(column, pa.uint8())
    elif pa.types.is_decimal(column.type) or pa.types.is_null(column.type):
        column = pc.cast(column, pa.float64(), safe=False)
    found: npt.NDArray[Any] = column.to_numpy(zero_copy_only=False)
    return found


def _block(columns: Sequence[npt.NDArray[Any]], row: np.dtype[Any]) -> npt.NDArray[Any]:
    """Returns columns, the target last, as rows; those of null records are NaN, with target 0."""
    *inputs, target = columns
    block = np.zeros(len(target), dtype=row)
    of_target = block["target"].reshape(-1)
    with np.errstate(over="ignore"):  # is infinite, and makes a null record
        for j, column in enumerate(inputs):
            block["inputs"][:, j] = column
        known = np.isfinite(target)
        if row["target"].kind == "i" and target.dtype.kind == "f":
            known &= (np.floor(target) == target) & (np.abs(target) < 2.0**63)
        elif target.dtype == np.uint64 and row["target"].kind == "i":
            known &= target < 2**63
        of_target[known] = target[known]
    # PRIVACY: a value that is missing or too large would fail, or spread to other records
    # (test_records_that_cannot_be_used_become_null_records)
    null = ~(known & np.isfinite(of_target) & np.isfinite(block["inputs"]).all(axis=1))
    block["inputs"][null], of_target[null] = np.nan, 0
    return block


def _is_stored(source: Any) -> bool:
    """Returns whether a source is a path, a list of paths, or a data set of pyarrow."""
    paths = source if isinstance(source, (list, tuple)) else [source]
    return isinstance(source, pads.Dataset) or all(check.is_path(path) for path in paths)


def _dataset(source: Any) -> Any:
    """Returns the data set of a stored source; raises where there is none, or a file is there twice."""
    if not isinstance(source, pads.Dataset):
        try:
            source = pads.dataset(source, format="parquet")
        except (pa.ArrowInvalid, FileNotFoundError):
            raise ValueError(
                f"source must be Parquet files where it has paths (got {check.shown(source)})"
            ) from None
    require_sound(source)
    return source


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
        >>> import pyarrow.dataset as ds
        >>> table = pa.table({"a": [1.0, None], "b": [3, 4], "label": ["x", "y"]})
        >>> _, (X, y) = parquet_blocks(ds.dataset(table), target="label")()  # the first block has no rows
        >>> X.tolist(), y.tolist()
        ([[1.0, 3.0], [nan, 4.0]], ['x', 'y'])
    """
    if not _is_stored(source):
        raise ValueError(
            "source must be a path, a list of paths, or a pyarrow.dataset.Dataset (got"
            f" {check.shown(source)})"
        )
    table = _dataset(source)
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
            options = _BUFFERED
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
