"""Samplers that draw batches as their design says, and carry the design for the accounting.

The part of one process in the batches of a run of several: positions rank, rank + W, rank + 2W, ... of W processes.

A Poisson draw takes each position independently with probability q. So each process can draw its own positions by
itself, from a stream of its own, and the union over the processes IS a draw of the design:

    P(batch = S) = prod_r P(S_r drawn by r),    S_r = the positions of S that r owns

The same holds where each process has a shard, records of its own that it numbers by itself (`own=True`).
Every position has exactly one owner, so that no record is in a batch twice. A process that draws nothing delivers an
empty batch, so that all make the same number of steps. "Full" batches are split in the same way. Designs whose
positions depend on each other (fixed sizes, permutations) are refused.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from decimal import Context, Decimal, localcontext
from hashlib import sha256
from itertools import islice
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from torch_dpsco import _validate as check
from torch_dpsco._doors import type_members, typed
from torch_dpsco.accounting.designs import Design, Draw, Fixed, Full, Poisson, Shuffled
from torch_dpsco.accounting.parts import Assigned, AssignedParts
from torch_dpsco.errors import UnitError, UnknownSamplerError
from torch_dpsco.rng import Stream, rank_generator, sampling_generator
from torch_dpsco.sampling.draws import Chunk, DrawLog, Drawn

_Indices = npt.NDArray[np.int64]


class DesignSampler(Sampler[list[int]], ABC):
    """Draws batches of positions 0..size-1 by a design; usable as `batch_sampler` of a DataLoader.

    Args:
        design: how to draw, of the sampler's kind; its `n` must be the data set's size where that is public.
        size: number of records there are; default design.n. A Poisson, Full or assigned design under add_remove may
            have another size, because then the true one is private and `n` only a public reference.
        steps: draws per iteration; default one epoch (`Design.steps_per_epoch`). A public constant.
        seed: makes the draws repeatable (and warns); tests only.

    Raises:
        UnknownSamplerError: the design is of another kind than the sampler.
        UnitError: the size is not n where the design needs it to be.
    """

    kind: ClassVar[type[Design]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        type_members(cls, "__init__")

    @typed
    def __init__(
        self,
        design: Design,
        *,
        size: int | None = None,
        steps: int | None = None,
        seed: int | None = None,
    ) -> None:
        self.require_kind(design)
        if seed is not None and seed < 0:
            raise ValueError(f"seed must be >= 0 (got {seed})")
        self.design = design
        self.size = check.count(size=design.n if size is None else size)
        self.steps = check.positive_count(steps=design.steps_per_epoch if steps is None else steps)
        self.log = DrawLog(self.size)
        self.seeded = seed is not None
        self.rng = sampling_generator(seed)
        if self.size != design.n and not isinstance(
            design, (Poisson, Full, Assigned, AssignedParts)
        ):
            raise UnitError(
                f"size must be n={design.n}, the declared number of records (got {self.size})"
            )

    @classmethod
    def require_kind(cls, design: Design) -> None:
        """Raises UnknownSamplerError unless the design is of this sampler's kind."""
        if not isinstance(design, cls.kind):
            # PRIVACY: accounting believes the design that a sampler carries (test_a_sampler_refuses_a_foreign_design)
            raise UnknownSamplerError(
                f"design must be {cls.kind.__name__} for {cls.__name__} (got {design})"
            )

    def __len__(self) -> int:
        return self.steps

    def __getstate__(self) -> dict[str, Any]:
        # a copy must not draw the same batches; a worker process gets no stream at all
        return {key: value for key, value in self.__dict__.items() if key not in ("rng", "log")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.rng, self.log, self.seeded = sampling_generator(), DrawLog(self.size), False

    @abstractmethod
    def draws(self) -> Iterator[tuple[Draw, _Indices]]:
        """Yields the draws of one iteration with their positions."""

    def dealt(self) -> Iterator[Drawn]:
        """Yields the draws of one iteration; one that was given up is repeated in its place."""
        again = self.log.again
        if again is None:
            yield from self.draws()
        elif self.design.one_pass:  # a partition that goes on: draws have their places
            for drawn in self.draws():
                yield again if drawn[0].index == again[0].index else drawn
        else:
            yield again
            yield from islice(self._after(again[0]), self.steps - 1)

    def _after(self, draw: Draw) -> Iterator[Drawn]:
        """Yields the draws that follow a repeated one."""
        return self.draws()

    def __iter__(self) -> Iterator[list[int]]:
        self.log.restart()
        for drawn in self.dealt():
            self.log.deliver(Chunk(replace(drawn[0]), drawn[0].size, last=True, source=drawn))
            yield drawn[1].tolist()


class PoissonSampler(DesignSampler):
    """Each position is in each draw independently with the design's rate; O(batch) time by geometric gaps."""

    kind = Poisson

    def draws(self) -> Iterator[tuple[Draw, _Indices]]:
        """Yields the draws of one iteration with their positions."""
        rate = self.design.batch_size / self.design.n
        for _ in range(self.steps):
            indices = poisson_positions(self.size, rate, self.rng)
            yield Draw(len(indices)), indices


def poisson_positions(size: int, rate: float, rng: Stream) -> _Indices:
    """Returns the sorted positions of a Poisson sample: each of 0..size-1 independently with probability rate, exactly.

    The gap before the next success is geometric: P(gap >= k) = (1 - rate)^k. It is floor(log V / log(1 - rate)) for a
    uniform V in (0, 1), computed in float64 from 63 bits of V where these are sure to decide it, else by `_sure_gap`.
    """
    if rate >= 1.0:
        return np.arange(size, dtype=np.int64)
    log_miss = math.log1p(-rate)
    mean = size * rate
    error = -_UNSURE / log_miss
    chunk = int(mean + 6.0 * math.sqrt(mean) + 16.0)
    last = -1
    found = []
    while last < size:
        words = rng.words(chunk).view(np.uint64) >> np.uint64(1)
        quotients = np.log((words + 0.5) * 2.0**-63) / log_miss
        whole = np.floor(quotients)
        beside = np.abs(quotients - whole - 0.5)  # 1/2 at an integer
        # a gap of size + 1 already leads outside, larger ones only risk an overflow
        gaps = np.minimum(whole, size + 1).astype(np.int64)
        if not (beside.max() < 0.5 - error and words.min() >= _FEW):
            unsure = (beside >= 0.5 - error) & (quotients <= size + 1 + error)
            for place in np.flatnonzero(unsure | (words < _FEW)):
                # PRIVACY: the rate is that of the charge (test_gaps_have_exactly_the_law_of_the_rate_that_is_charged)
                gaps[place] = min(_sure_gap(int(words[place]), rate, rng), size + 1)
        positions = last + np.cumsum(gaps + 1)
        found.append(positions)
        last = int(positions[-1])
    joined = np.concatenate(found) if found else np.empty(0, dtype=np.int64)
    return joined[joined < size]


# a word of 2^40 or more, its half added, gives log V to 2^-41, and arithmetic is off by less than 2^-44 (numpy's log: 4
# units in the last place)
_FEW = 2**40
_UNSURE = 2.0**-40


def _sure_gap(word: int, rate: float, rng: Stream) -> int:
    """Returns floor(log V / log(1 - rate)), V = word 2^-63 + further bits, as many as it takes."""
    bits = 63
    while True:
        word = (word << 64) + rng.integer(64)
        bits = bits + 64
        digits = bits + 53 - math.frexp(rate)[1]  # 1 - rate is exact, errors are far below 2^-bits
        with localcontext(Context(prec=digits)):
            log_miss = (1 - Decimal(rate)).ln()
            scale = Decimal(2) ** bits
            # wider than what is known of V by more than these errors
            ends = {
                int((Decimal(end) / scale).ln() / log_miss) for end in (max(word, 2) - 1, word + 2)
            }
        if word > 1 and len(ends) == 1:
            return ends.pop()


class FixedSampler(DesignSampler):
    """Each draw is an independent uniformly random subset of exactly batch_size positions."""

    kind = Fixed

    def draws(self) -> Iterator[tuple[Draw, _Indices]]:
        """Yields the draws of one iteration with their positions."""
        for _ in range(self.steps):
            indices = self.rng.subset(self.size, self.design.batch_size)
            yield Draw(len(indices)), indices


class ShuffledSampler(DesignSampler):
    """Fresh random permutations, one after another, cut into batches; each iteration starts a new one."""

    kind = Shuffled

    def draws(self) -> Iterator[tuple[Draw, _Indices]]:
        """Yields the draws of one iteration with their positions."""
        epoch = self.design.steps_per_epoch
        for start in range(0, self.steps, epoch):
            steps = min(epoch, self.steps - start)
            self.log.order = self.rng.permutation(self.size)
            yield from _parts(self.log.order, self.design.batch_size, steps)

    def _after(self, draw: Draw) -> Iterator[Drawn]:
        rest: list[Drawn] = []
        if self.log.order is not None:  # its permutation goes on
            parts = _parts(self.log.order, self.design.batch_size, self.design.steps_per_epoch)
            rest = [
                (other, indices) for other, indices in parts if other.partition == draw.partition
            ]
        yield from rest[int(draw.part) + 1 :]
        yield from self.draws()


def _parts(permutation: _Indices, batch_size: int, steps: int) -> Iterator[tuple[Draw, _Indices]]:
    # PRIVACY: the ledger takes the largest of the parts of one name, so that the name must fix how positions were cut
    # (test_partitions_of_different_cuts_have_different_names)
    name = f"positions/{sha256(permutation.tobytes()).hexdigest()[:32]}/{batch_size}"
    for k in range(steps):
        indices = permutation[k * batch_size : (k + 1) * batch_size]
        yield Draw(len(indices), name, str(k)), indices


class FullSampler(DesignSampler):
    """Every draw is all positions."""

    kind = Full

    def draws(self) -> Iterator[tuple[Draw, _Indices]]:
        """Yields the draws of one iteration with their positions."""
        everyone = np.arange(self.size, dtype=np.int64)
        for _ in range(self.steps):
            yield Draw(self.size), everyone


_KINDS: tuple[type[DesignSampler], ...] = (
    PoissonSampler,
    FixedSampler,
    ShuffledSampler,
    FullSampler,
)


def kind_of(design: Design) -> type[DesignSampler]:
    """Returns the sampler class of a design without parts; raises UnknownSamplerError if it has none."""
    for sampler in _KINDS:
        if isinstance(design, sampler.kind):
            return sampler
    raise UnknownSamplerError(
        "no sampling was declared: give n= (Poisson sampling) or sampling= to the plan (design= to"
        " a PrivateOptimizer) to get a loader from the optimizer"
    )


def require_divisible(design: Design) -> None:
    """Raises UnknownSamplerError unless processes can draw their own positions without knowing what others draw."""
    if not isinstance(design, (Poisson, Full)):
        # PRIVACY: parts that are drawn independently are no batch of another design
        # (test_designs_whose_positions_depend_on_each_other_are_refused)
        raise UnknownSamplerError(
            "design must be Poisson or Full in a run of several processes, which draw without"
            f" knowing of each other (got {design}): give the plan n= (n_users= for users) and"
            " sampling='poisson' or 'full'; for records sampling='allocated' does too"
        )


class RankSampler(DesignSampler):
    """Draws the positions that one of several processes owns.

    Args:
        design: Poisson or Full; of all processes together.
        rank: of this process, 0..processes-1.
        processes: how many there are.
        key: 32 secret bytes, the same on all processes, for this sampler only.
        size: number of records there are, those of the others included; default design.n.
        steps: draws per iteration, equal on all processes; default one epoch.
        own: whether the records are a shard, `size` of them, which no other process has.

    Raises:
        UnknownSamplerError: another design.
        UnitError: the size is not n where the design needs it to be.

    Guarantee:
        The union over the ranks of the k-th draws has the law of one draw of the design: streams of different ranks are
        distinct and independent whatever seeds the processes have set. Assumes that all ranks read the same records in
        the same order; or, of shards, that each record is on one rank, whatever its values are.

    Example:
        >>> parts = [RankSampler(Full(5), rank=r, processes=2, key=bytes(32), steps=1) for r in (0, 1)]
        >>> [indices.tolist() for part in parts for _, indices in part.draws()]
        [[0, 2, 4], [1, 3]]
    """

    kind = Design

    def __init__(
        self,
        design: Design,
        *,
        rank: int,
        processes: int,
        key: bytes,
        size: int | None = None,
        steps: int | None = None,
        own: bool = False,
    ) -> None:
        require_divisible(design)
        super().__init__(design, size=size, steps=steps)
        self.own = self.log.own = check.choice((True, False), own=own)
        self.processes = check.positive_count(processes=processes)
        self.rank = check.count(rank=rank)
        if self.rank >= self.processes:
            raise ValueError(f"rank must be < processes={self.processes} (got {self.rank})")
        self._owned = range(self.size) if self.own else range(self.rank, self.size, self.processes)
        self._own = kind_of(design)(design, size=len(self._owned), steps=self.steps)
        # PRIVACY: streams that are equal draw equal places, and a batch is no Poisson draw any more
        # (test_equal_streams_of_ranks_are_caught)
        self._own.rng = rank_generator(key, self.rank)
        self._iterations = 0

    def draws(self) -> Iterator[tuple[Draw, _Indices]]:
        """Yields the draws of one iteration, numbered across iterations, with this rank's positions."""
        first = self._iterations * self.steps
        self._iterations += 1
        for index, (draw, indices) in enumerate(self._own.draws(), start=first):
            yield Draw(draw.size, index=index), self._owned.start + self._owned.step * indices
