"""Raw records that a source gives in blocks, as often as a fit reads them, held one part at a time.

A fit reads all records several times, and which reading is the last depends on the data. So its guarantee is that of
one data set only if every reading gives the same one: each is compared with the first by a digest, and what was summed
in a reading that differs is not used. See docs/proofs/objective.md#records-that-are-read-again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import torch

from torch_dpsco.errors import NotCertifiedError
from torch_dpsco.estimators.records import Prepare, RawPart, Stored
from torch_dpsco.sampling.datasets import owned
from torch_dpsco.streams.parts import PartedRecords


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
        self.noted: tuple[int, bytes] | None = None

    def count(self, most: int) -> int:
        """Returns the number of records, of a first reading; one that exceeds `most` where there are more."""
        if self.noted is None:
            for _ in self._noted(2**16, most):
                pass
        assert self.noted is not None
        return self.noted[0]

    def empty(self) -> RawPart:
        """Returns a part without rows, of the dtypes and widths of the first block."""
        if self._empty is None:
            block = next(self._read(), None)
            if block is None:
                raise ValueError(
                    "blocks must be at least one, which may have no rows, of shape (0, d): there"
                    " was none"
                )
            self._empty = block[0][:0].clone(), block[1][:0].clone(), block[2][:0].clone()
        return self._empty

    def records(self, prepared: Prepare, most: int) -> PartedRecords:
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
            yield (
                joined[0][start : start + rows],
                joined[1][start : start + rows],
                joined[2][start : start + rows],
            )
        size -= full
        if size:
            held.append(
                (joined[0][full:].clone(), joined[1][full:].clone(), joined[2][full:].clone())
            )
        del joined
    if held or none:
        yield _joined(held or [empty])


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
