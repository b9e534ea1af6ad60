"""Raw records that a source gives in blocks, as often as a fit reads them, held one part at a time.

A fit reads all records several times, and which reading is the last depends on the data. So its guarantee is that of
one data set only if every reading gives the same one: each is compared with the first by a digest, and what was summed
in a reading that differs is not used. See docs/proofs/objective.md#records-that-are-read-again.

A part is in memory while it is read, as `Records` of 2^k blocks of rows. So the binary counter of a part holds one sum,
of rank k, with which the counter of the parts goes on: each sum over the records is formed by the additions, in the
order, of the same records in memory (docs/proofs/rounding.md#sums-over-parts), and all bounds on rounding are theirs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from torch_dpsco.errors import ConditionError, NotCertifiedError
from torch_dpsco.estimators.records import PairwiseSum, RawPart, Records, Stored
from torch_dpsco.sampling.datasets import owned

_PART_ENTRIES = 2**22  # 32 MiB of float64
_SAMPLE_ENTRIES = 2**22  # of a first guess


class RawBlocks(Stored):
    """Records of a source that can be read again.

    Args:
        read: returns a fresh iterator over blocks (features (m, d), targets (m,), weights (m,)) at each call, m >= 0;
            the same records in the same order, in blocks of any sizes.
        empty: a part without rows, of the dtypes and widths of all blocks; None for those of the first block.

    Attributes:
        noted: number and digest of the records of the last reading, as private as they are; None before it.
    """

    def __init__(
        self, read: Callable[[], Iterator[RawPart]], empty: RawPart | None = None
    ) -> None:
        self._read = read
        self._empty = empty

    def count(self, most: int) -> int:
        """Returns the number of records, of a first reading; one that exceeds `most` where there are more."""
        if self.noted is None:
            for _ in self._noted(2**16, most):
                pass
        return int(self.noted[0])

    def empty(self) -> RawPart:
        """Returns a part without rows, of the dtypes and widths of the first block."""
        if self._empty is None:
            block = next(self._read(), None)
            if block is None:
                raise ValueError(
                    "blocks must be at least one, which may have no rows, of shape (0, d): there"
                    " was none"
                )
            self._empty = copied(block, slice(0))
        return self._empty

    def records(self, prepared: Callable[..., Records], most: int) -> PartedRecords:
        """Returns records that are read part by part."""
        count = self.count(most)
        return PartedRecords(self.parts, prepared, self.empty(), count)

    def parts(self, rows: int) -> Iterator[RawPart]:
        """Yields parts of so many rows, but for the last, and at least one.

        Raises:
            NotCertifiedError: after the last part, if the records are not those of the first reading. This tells that
                the promise of the source was broken, and is outside of any guarantee.
        """
        first = self.noted
        yield from self._noted(rows)
        # PRIVACY: the answer of several readings is that of one data set only if all are of it
        # (test_a_source_that_gives_other_records_at_a_later_reading_is_refused)
        if first is not None and self.noted != first:
            self.noted = first
            raise NotCertifiedError(
                "blocks must be the same records in the same order at each reading: they were not"
            )

    def _noted(self, rows: int, most: int | None = None) -> Iterator[RawPart]:
        """Yields parts, and notes the number of records and their digest."""
        columns = [hashlib.sha256(), hashlib.sha256(), hashlib.sha256()]
        seen = 0
        for part in _rows_together(self._read(), rows, self.empty()):
            for digest, column in zip(columns, part, strict=True):
                if len(column):
                    digest.update(column.contiguous().cpu().view(torch.uint8).numpy().data)
            seen += len(part[0])
            yield part
            if most is not None and seen > most:
                break
        self.noted = seen, b"".join(digest.digest() for digest in columns)


def _rows_together(blocks: Iterator[RawPart], rows: int, empty: RawPart) -> Iterator[RawPart]:
    """Yields the rows of blocks in parts of so many rows; the last one has fewer."""
    held = []
    size = 0
    none = True
    # PRIVACY: a source may fill one block again while others are held
    # (test_a_source_that_fills_one_block_again_gives_each_record_once)
    for block in map(owned, blocks):
        _require_like(block, empty)
        held.append(block)
        size += len(block[0])
        if size < rows:
            continue
        joined = _joined(held)
        del block
        held.clear()
        full = size - size % rows
        for start in range(0, full, rows):
            none = False
            features, targets, weights = (column[start : start + rows] for column in joined)
            yield features, targets, weights
        size -= full
        if size:
            held.append(copied(joined, slice(full, None)))
        del joined
    if held or none:
        yield _joined(held or [empty])


def copied(part: RawPart, rows: slice) -> RawPart:
    """Returns rows of a part, of which nothing else is kept."""
    features, targets, weights = (column[rows].clone() for column in part)
    return features, targets, weights


def _require_like(block: RawPart, empty: RawPart) -> None:
    kinds = [[(c.dtype, c.device, c.shape[1:]) for c in (*part[:2],)] for part in (block, empty)]
    if kinds[0] != kinds[1]:
        found, first = (
            [f"{dtype} {tuple(shape)} on {device}" for dtype, device, shape in kind]
            for kind in kinds
        )
        raise ValueError(
            f"blocks must have rows and targets of the same dtype and width, {first} (got {found})"
        )


def _joined(blocks: list[RawPart]) -> RawPart:
    if len(blocks) == 1:
        return blocks[0]
    features, targets, weights = (torch.cat(columns) for columns in zip(*blocks, strict=True))
    return features, targets, weights


class PartedRecords(Records):
    """Records of which sums are all that is known; as `Records`, without columns.

    Args:
        read: returns raw parts (features, targets, weights), of so many rows each, but for the last, and at least one:
            a fresh iterator at each call, over the same records.
        prepared: makes records in memory of a raw part.
        empty: a raw part without rows.
        count: n.
    """

    def __init__(
        self,
        read: Callable[[int], Iterator[RawPart]],
        prepared: Callable[[RawPart], Records],
        empty: RawPart,
        count: int,
    ) -> None:
        like = prepared(empty)
        self.count = count
        self.dim = like.dim
        self.device = like.device
        self.num_classes = like.num_classes
        self._raw = read
        self._prepared = prepared
        self._empty = empty
        self._rows = like._rows
        # as many blocks as memory is for: a power of two
        blocks = max(1, _PART_ENTRIES // (self._rows * self.dim))
        self.part_rows = self._rows * 2 ** int(math.log2(blocks))

    def sum(self, of: Callable[[Records], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Sums over all records, in one pass over the parts."""
        totals: list[PairwiseSum] = []
        for raw in self._raw(self.part_rows):
            terms = of(self._prepared(raw))
            totals = totals or [PairwiseSum(torch.zeros_like(term)) for term in terms]
            for total, term in zip(totals, terms, strict=True):
                total.add(term)
        return tuple(total.result() for total in totals)

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Refuses what needs a number for each record."""
        raise ConditionError("records must be in memory for this: of parts there are sums only")

    def thinning(self, step: int) -> int:
        """A multiple of `step` that leaves no more rows than memory is for."""
        return step * math.ceil(self.count * self.dim / (step * _SAMPLE_ENTRIES))

    def thinned(self, step: int) -> Records:
        """Every step-th record, in memory, in one piece: many, made between parts, would keep the memory of parts."""
        rows = len(range(0, self.count, step))
        features, targets, weights = (
            column.new_empty((rows, *column.shape[1:])) for column in self._empty
        )
        kept = features, targets, weights
        seen = found = 0
        for raw in self._raw(self.part_rows):
            chosen = slice(-seen % step, None, step)
            fits = min(
                len(raw[0][chosen]), rows - found
            )  # of a source that changes, which is refused after this
            for whole, column in zip(kept, raw, strict=True):
                whole[found : found + fits] = column[chosen][:fits]
            seen = seen + len(raw[0])
            found = found + fits
        return self._prepared(kept)
