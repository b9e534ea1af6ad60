"""Records that no memory holds: they are read part by part, and nothing of one record outlives its part.

A part is in memory while it is read, as `Records` of 2^k blocks of rows. So the binary counter of a part holds one sum,
of rank k, with which the counter of the parts goes on: each sum over the records is formed by the additions, in the
order, of the same records in memory (docs/proofs/rounding.md#sums-over-parts), and all bounds on rounding are theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from torch_dpsco.errors import ConditionError
from torch_dpsco.estimators.records import PairwiseSum, RawPart, Records

_PART_ENTRIES = 2**22  # 32 MiB of float64
_SAMPLE_ENTRIES = 2**22  # of a first guess


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
