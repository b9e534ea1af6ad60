"""Slots: where records stand in batches of one fixed public size, so that no record's arithmetic depends on others.

* Units (records, or users) get places in [0, capacity), uniformly without replacement, from a secret stream; a unit
  more takes a place that was free, and all others stay. Only where a draw has more units than the capacity does one
  other unit move; it is chosen so that a Poisson draw of the declared size has more with probability below 2^-60.
* The rows of a user stand side by side in one block, in as many columns as the next power of 2, the first of them a
  multiple of it that the place fixes; users of more rows than a block has fill whole blocks first. Which of the blocks
  a row is in depends on other users, but blocks are all of one shape; the order of a user's own rows never changes.
* Where no number of records is declared (scores of held-out records), each record draws a slot by itself, and records
  of one slot stand in blocks one after another.

Proof and limits: docs/proofs/record_isolation.md.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from torch_dpsco.accounting.designs import Assigned, AssignedParts, Design, Full, Parts, Poisson
from torch_dpsco.noise import Stream, sampling_generator

_Indices = npt.NDArray[np.int64]
# a draw has more units than the capacity with probability below 2^-60
_RARE = 60.0 * math.log(2.0)
_MULTIPLE = 8  # a friendly number of rows
_SPARE = 4  # a block has room for so much of the usual size more, where draws come in several
# of blocks of users: rows of a user, rows, numbers of all rows
_EACH = 4
_LEAST = 64
_MOST = 8192
_NUMBERS = 2**26


def capacity(design: Design, *, processes: int = 1, records: int | None = None) -> int:
    """Returns how many units the blocks of a draw have room for: public, from the design alone.

    By the bound of Chernoff: a sum of independent indicators of mean m exceeds m + x with probability at most
    exp(-m h(x / m)), h(t) = (1 + t) log(1 + t) - t.

    Args:
        design: how units are drawn.
        processes: over which the units of a draw are spread.
        records: that are drawn from, at most, where that is fewer than n: public.

    Example:
        >>> capacity(Poisson(256, 60_000)), capacity(Poisson(4096, 60_000))
        (416, 4696)
    """
    if isinstance(design, Parts):
        # PRIVACY: a part of all its records has a random number of them, if they were assigned to it
        # (test_a_part_of_assigned_records_overflows_as_rarely)
        drawn = isinstance(design, AssignedParts)
        found = []
        for part, _ in design.parts:
            inner = Poisson(part.n, design.n) if drawn and isinstance(part, Full) else part
            found.append(capacity(inner, processes=processes, records=records))
        return max(found)
    if not isinstance(design, (Full, Poisson, Assigned)):
        return max(1, math.ceil(design.batch_size / processes))
    # PRIVACY: a neighbor has one record more than the declared number
    # (test_a_record_more_than_declared_overflows_as_rarely)
    held = min(design.n, design.n if records is None else records) + 1
    expected = float(design.batch_size)
    if isinstance(design, Assigned):  # which may have fewer batches, and a divisor of its own
        expected = max(expected, design.n / design.batches)
    mean = expected * held / design.n / processes
    most = math.ceil(held / processes)
    most += (
        8 * math.isqrt(most) + 16
    )  # the number of all may be private, and near the declared one
    room = most if isinstance(design, Full) else math.ceil(mean)
    while room < most and mean * _rate(room / mean - 1.0) < _RARE:
        room += 1
    return min(most, room + -room % _MULTIPLE)


def _rate(excess: float) -> float:
    return (1.0 + excess) * math.log1p(excess) - excess


class Slots:
    """Assigns the rows of draws to slots of blocks.

    Args:
        design: how units are drawn.
        of_users: whether units have any number of rows, or exactly one.
        physical_batch_size: most rows of a block, public; default the capacity, or 64 to 8192 rows of users.
        processes: over which the units of a draw are spread.
        records: that are drawn from, see `capacity`.
        dim: numbers in the gradient of a row; blocks of users hold 2^26 numbers, or 64 rows.
    """

    def __init__(
        self,
        design: Design,
        *,
        of_users: bool = False,
        physical_batch_size: int | None = None,
        processes: int = 1,
        records: int | None = None,
        dim: int = 1,
    ) -> None:
        self.capacity = capacity(design, processes=processes, records=records)
        self._users = of_users
        self._dim = dim
        self.block = self._fitting(physical_batch_size)
        # rows of a draw, as far as that is known: users have any number of them
        usual = self.block if of_users else math.ceil(design.batch_size / processes)
        self.usual = min(usual, self.block)
        # a larger draw comes in several batches: four standard deviations are passed by one in 30,000
        self.most = (
            self.block if of_users else min(self.block, usual + 4 * math.isqrt(usual) + 4)
        )
        self.public = False  # whether all draws come in as many blocks, some of them empty
        self._rng = sampling_generator()
        self._keeps = isinstance(design, Full)
        self._kept = np.empty(0, dtype=np.int64)

    @property
    def parts(self) -> int:
        """Blocks of a draw at least."""
        return math.ceil(self.capacity / self.block) if self.public else 1

    def _fitting(self, most: int | None) -> int:
        if self._users:
            rows = max(_LEAST, min(_EACH * self.capacity, _MOST, _NUMBERS // self._dim))
            return most or 1 << (rows.bit_length() - 1)  # a power of 2, which all widths divide
        blocks = math.ceil(self.capacity / min(most or self.capacity, self.capacity))
        return math.ceil(self.capacity / blocks)

    def of_size(self, physical_batch_size: int) -> Slots:
        """Returns slots of smaller blocks for the same draws."""
        part = copy.copy(self)
        part.block = part.most = part._fitting(physical_batch_size)
        part.usual = min(part.usual, part.block)
        return part

    def part(self) -> None:
        """Cuts draws of records into a public number of blocks of about the usual size."""
        half = -(-self.most // 2)  # two batches have room for what one had
        size = max(_MULTIPLE, self.usual + self.usual // _SPARE, half)
        if not self.public and not self._users and size < self.most:
            self.block = self._fitting(size)
            self.most = size
            self.public = True

    def places(self, units: int) -> _Indices:
        """Returns the places of that many units; those past the capacity have the places of another round."""
        if self._keeps and len(self._kept) == units:
            return self._kept  # the same units as in the draw before, which was of all
        rounds = range(max(1, math.ceil(units / self.capacity)))
        drawn = [self._rng.permutation(self.capacity) + k * self.capacity for k in rounds]
        # PRIVACY: places in the order of the records would move with each record before them
        # (test_places_are_uniform_without_replacement)
        self._kept = np.concatenate(drawn)[:units]
        return self._kept

    def of_records(self, places: _Indices) -> list[tuple[_Indices, _Indices]]:
        """Returns (records, slots) of each block, each record in the first one in which its slot is free.

        Args:
            places: of the records of the draw.
        """
        made = list(_first_free(places % self.block))
        nobody = places[:0]
        return made + [(nobody, nobody)] * (self.parts - len(made))

    def of_users(self, sizes: _Indices, places: _Indices) -> Iterator[tuple[_Indices, _Indices]]:
        """Yields (rows, slots) of each block that has any, for rows that are in order of their users.

        Args:
            sizes: rows of each user of the draw.
            places: of these users.
        """
        # a user's rows in pieces: whole blocks, and what is left
        whole, rest = np.divmod(sizes, self.block)
        pieces = whole + (rest > 0)
        owner = np.repeat(np.arange(len(sizes)), pieces)
        length = np.full(len(owner), self.block)
        length[np.cumsum(pieces)[rest > 0] - 1] = rest[rest > 0]
        # PRIVACY: columns by the user's own rows and place
        # (test_the_slots_of_a_user_do_not_depend_on_the_rows_of_others)
        width = np.minimum(2 ** np.ceil(np.log2(length)).astype(np.int64), self.block)
        column = places[owner] % (self.block // width) * width
        block = _stacked(column, width, self.block)
        # of its piece's rows
        nth = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
        return _grouped(np.repeat(block, length), np.repeat(column, length) + nth)


def free_slots(records: int, block: int, source: Stream) -> Iterator[tuple[_Indices, _Indices]]:
    """Yields (records, slots) of each block, one empty block for no records: each record has a slot of its own draw.

    Args:
        records: their number, which may be private.
        block: rows of a block, public.
        source: of the draws, which stay secret.
    """
    # PRIVACY: a slot in the order of the records would move with each record before it
    # (test_a_record_that_leaves_moves_no_other)
    return _first_free(source.integers(block, records))


def _first_free(slots: _Indices) -> Iterator[tuple[_Indices, _Indices]]:
    """Yields (records, slots) of each block: which one a record is in depends on others, and its slot does not."""
    return _grouped(_before(slots), slots)


def _stacked(column: _Indices, width: _Indices, columns: int) -> _Indices:
    """Returns the block of each piece, the wide ones first: the first one in which its columns, and later, are free."""
    block = np.empty_like(column)
    used = np.zeros(columns, dtype=np.int64)
    for wide in np.unique(width)[::-1]:
        mine = np.flatnonzero(width == wide)
        # narrower widths divide this one: all columns of a piece are used equally far
        block[mine] = used[column[mine]] + _before(column[mine])
        cells = used[: columns // wide * wide].reshape(-1, wide)  # a view
        cells += np.bincount(column[mine] // wide, minlength=len(cells))[:, None]
    return block


def _before(group: _Indices) -> _Indices:
    """Returns the number of earlier entries of the same group."""
    # all different, so that the fastest sort will do
    order = np.argsort(group * len(group) + np.arange(len(group)))
    starts = np.flatnonzero(np.diff(group[order], prepend=-1))
    out = np.empty_like(order)
    sizes = np.diff(starts, append=len(group))
    out[order] = np.arange(len(group)) - np.repeat(starts, sizes)
    return out


def _grouped(blocks: _Indices, slots: _Indices) -> Iterator[tuple[_Indices, _Indices]]:
    """Yields (indices, slots) of each block in use, by slot."""
    order = np.argsort(blocks * (slots.max(initial=0) + 1) + slots)
    for part in np.split(order, np.flatnonzero(np.diff(blocks[order])) + 1):
        yield part, slots[part]
