"""Records in partitions on an engine (dask, Ray, Spark): each is read where it is, and only sums come back.

What travels to a partition is what is summed there: a loss, a point, public numbers and released units; never noise.
What comes back is private: sums, number and digest of the partition's records. Two things make the guarantee that of
records in memory, see docs/proofs/rounding.md#sums-over-partitions:

* blocks of half as many rows, so that no term passes through more additions than public numbers allow for;
* every partition must be, in each reading, what it was in the first, and be read by the same arithmetic.
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
from torch_dpsco.errors import ConditionError, NotCertifiedError
from torch_dpsco.estimators.records import PairwiseSum, Prepare, RawPart, Records, Stored
from torch_dpsco.estimators.solvers import BLOCK_ROWS
from torch_dpsco.streams.blocks import RawBlocks
from torch_dpsco.streams.parts import PartedRecords

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

    def records(self, prepared: Prepare, most: int) -> PartitionedRecords:
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
        like = prepared(raw.empty())
        self.count = sum(raw.sizes)
        self.dim = like.dim
        self.device = like.device
        self.num_classes = like.num_classes
        self._rows = like._rows
        self._partitions = raw
        self._prepared = prepared
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


def _read_partition(
    read: Callable[[Iterable[Any]], Iterator[RawPart]],
    empty: RawPart | None,
    of: Callable[[RawBlocks], tuple[Tensor, ...]],
    blocks: Iterable[Any],
) -> _Reading:
    """Reads a partition once, on its worker."""
    parts = read(blocks)
    head = next(parts, None)
    like = (
        None if head is None else (head[0][:0].clone(), head[1][:0].clone(), head[2][:0].clone())
    )
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
