"""Records in partitions on an engine (dask, Ray, Spark): each is read where it is, and only sums come back.

What travels to a partition is what is summed there: a loss, a point, public numbers and released units; never noise.
What comes back is private: sums, number and digest of the partition's records. Two things make the guarantee that of
records in memory, see docs/proofs/rounding.md#sums-over-partitions:

* blocks of half as many rows, so that no term passes through more additions than public numbers allow for;
* every partition must be, in each reading, what it was in the first, and be read by the same arithmetic.

What `fit` is given, where it is not in memory as rows (`as_blocks`):

| given | read as |
|---|---|
| a callable | at each call a fresh iterator over blocks (X, y) or (X, y, sample_weight), the same records each time |
| scipy sparse rows | one such block |
| `Partitions` | blocks of each partition of a table, read where an engine holds it |

Rows of a sparse block are made dense a few at a time, 2^22 numbers at most.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NoReturn, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from torch_dpsco import native
from torch_dpsco._validate import shown
from torch_dpsco.errors import ConditionError, NotCertifiedError
from torch_dpsco.estimators.reading import dense_rows, is_sparse, record_weights
from torch_dpsco.estimators.records import BLOCK_ROWS, PairwiseSum, RawPart, Records, Stored
from torch_dpsco.streams.blocks import PartedRecords, RawBlocks, copied

PARTITION_ROWS = BLOCK_ROWS // 2  # of a block
_NO_PART = torch.zeros(0, 0), torch.zeros(0), torch.zeros(0)
_Result = TypeVar("_Result")


@runtime_checkable
class Partitions(Protocol):
    """A table in partitions, as `fit` takes it: the same blocks at each call, in the same order."""

    def run(self, function: Callable[[Iterator[Any]], _Result]) -> list[_Result]:
        """Calls a function, once for each partition, with a fresh iterator over its blocks.

        Args:
            function: takes blocks (X, y) or (X, y, sample_weight); it is pickled by cloudpickle where it must travel.

        Returns:
            What it returned, in the order of the partitions.
        """


@dataclass(frozen=True)
class _Reading:
    """What one reading of a partition brings back, NOT private but for the arithmetic: it must not be shown or logged.

    Args:
        noted: number and digest of the records.
        empty: a part without rows, like those of the first block; None without blocks.
        sums: over the records.
        arithmetic: of the worker, a fact of its machine.
    """

    noted: tuple[int, bytes]
    empty: RawPart | None
    sums: tuple[Tensor, ...]
    arithmetic: tuple[str, ...]


class RawPartitions(Stored):
    """Raw records of a table in partitions.

    Args:
        partitions: the table.
        read: makes raw parts of its blocks, see `RawBlocks`; it travels to the partitions.
    """

    def __init__(
        self, partitions: Partitions, read: Callable[[Iterable[Any]], Iterator[RawPart]]
    ) -> None:
        self._partitions = partitions
        self._read = read
        self._first: list[_Reading] | None = None

    def __getstate__(self) -> NoReturn:
        raise TypeError("partitions must not be pickled: what is summed must not hold them")

    @property
    def sizes(self) -> list[int]:
        """Numbers of records of the partitions, of the first reading."""
        return [reading.noted[0] for reading in self._readings()]

    def count(self, most: int) -> int:
        """Returns the number of records."""
        return sum(self.sizes)

    def empty(self) -> RawPart:
        """Returns a part without rows, of the dtypes and widths of all blocks."""
        found = [reading.empty for reading in self._readings() if reading.empty is not None]
        if not found:
            raise ValueError(
                "partitions must have a block, which may have no rows, of shape (0, d): there was"
                " none"
            )
        kinds = {tuple((column.dtype, column.shape) for column in part[:2]) for part in found}
        if len(kinds) > 1:
            raise ValueError(
                "partitions must have rows and targets of one dtype and width (got"
                f" {sorted(map(str, kinds))})"
            )
        return found[0]

    def records(self, prepared: Callable[..., Records], most: int) -> PartitionedRecords:
        """Returns records that stay in their partitions."""
        # PRIVACY: in blocks of half as many rows, since merging partitions takes additions, too
        # (test_records_know_how_many_additions_there_are)
        return PartitionedRecords(self, partial(prepared, block_rows=PARTITION_ROWS))

    def sums(self, of: Callable[[RawBlocks], tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
        """Returns what each partition that has records sums up to; of the first one, where none has any.

        Raises:
            NotCertifiedError: the records are not those of the first reading, which is outside of any guarantee.
        """
        first = self._readings()
        readings = self._run(self.empty(), of)
        # PRIVACY: as in `RawBlocks` (test_a_partition_that_changes_between_readings_is_refused)
        if [reading.noted for reading in readings] != [reading.noted for reading in first]:
            raise NotCertifiedError(
                "partitions must be the same records in the same order at each reading: they were"
                " not. Persist the table, or read it from files, so that no partition is made anew"
            )
        return [reading.sums for reading in readings if reading.noted[0]] or [readings[0].sums]

    def _readings(self) -> list[_Reading]:
        if self._first is None:
            self._first = self._run(None, _counted)
            self.noted = sorted(reading.noted for reading in self._first)
        return self._first

    def _run(
        self, empty: RawPart | None, of: Callable[[RawBlocks], tuple[Tensor, ...]]
    ) -> list[_Reading]:
        readings = list(self._partitions.run(partial(_read_partition, self._read, empty, of)))
        if not readings or not all(isinstance(reading, _Reading) for reading in readings):
            raise ValueError(
                "run must return what the function returned, of each partition, and there must"
                " be one"
            )
        # PRIVACY: a record more moves others to other workers, which must prepare them alike, to the last bit
        # (test_workers_of_several_kinds_are_refused)
        kinds = {reading.arithmetic for reading in chain(readings, self._first or ())}
        if len(kinds) > 1:
            raise ConditionError(
                "workers must be of one kind, with one version of torch and the accelerator on all"
                f" or none (got {sorted(kinds)})"
            )
        return readings


class PartitionedRecords(PartedRecords):
    """Records in partitions of which sums are all that is known.

    Args:
        raw: their source.
        prepared: makes records in memory of a raw part, in blocks of `PARTITION_ROWS`; it travels to the partitions.
    """

    def __init__(self, raw: RawPartitions, prepared: Callable[[RawPart], Records]) -> None:
        super().__init__(_of_workers, prepared, raw.empty(), sum(raw.sizes))
        self._partitions = raw
        self._merged = sum(size > 0 for size in raw.sizes)

    def __getstate__(self) -> NoReturn:
        # PRIVACY: an objective has them, and noise (test_no_noise_travels_to_a_partition)
        raise TypeError(
            "records in partitions must not be pickled: what is summed must not hold them"
        )

    @property
    def depth(self) -> int:
        """As in `Records`: in a partition, and from there on."""
        return super().depth + max(0, self._merged - 1).bit_length()

    def sum(self, of: Callable[[Records], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Sums over all records, in one pass over the partitions."""
        partials = self._partitions.sums(partial(_summed, self._prepared, of))
        totals = [PairwiseSum(torch.zeros_like(term)) for term in partials[0]]
        for terms in partials:
            for total, term in zip(totals, terms, strict=True):
                total.add(term)
        return tuple(total.result() for total in totals)

    def thinning(self, step: int) -> int:
        """1: no record leaves its partition, so that a first guess is of all of them."""
        return 1

    def thinned(self, step: int) -> Records:
        """All records; `step` is 1."""
        return self


def _of_workers(rows: int) -> NoReturn:
    raise NotImplementedError("parts are read where they are")


def _read_partition(
    read: Callable[[Iterable[Any]], Iterator[RawPart]],
    empty: RawPart | None,
    of: Callable[[RawBlocks], tuple[Tensor, ...]],
    blocks: Iterable[Any],
) -> _Reading:
    """Reads a partition once, on its worker."""
    parts = read(blocks)
    head = next(parts, None)
    like = None if head is None else copied(head, slice(0))
    raw = RawBlocks(
        lambda: parts if head is None else chain([head], parts), empty or like or _NO_PART
    )
    sums = of(raw)
    assert raw.noted is not None
    here = (
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
        platform.machine(),
        native.arithmetic(),
    )
    return _Reading(raw.noted, like, sums, here)


def _counted(raw: RawBlocks) -> tuple[Tensor, ...]:
    for _ in raw.parts(2**16):
        pass
    return ()


def _summed(
    prepared: Callable[[RawPart], Records],
    of: Callable[[Records], tuple[Tensor, ...]],
    raw: RawBlocks,
) -> tuple[Tensor, ...]:
    return PartedRecords(raw.parts, prepared, raw.empty(), 0).sum(of)


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
        start = 0
        for rows in dense_rows(X):
            if not start:
                count = X.shape[0] if is_sparse(X) else len(rows)
                targets, factors = read(y, count, rows.device)
                own = record_weights(given, factors, count, rows.device)
                weights = torch.ones_like(targets, dtype=torch.float64) if own is None else own
            here = slice(start, start + len(rows))
            yield rows, targets[here], weights[here].double()
            start += len(rows)
