"""How batches are drawn: samplers that follow a design, the log of what was delivered, ids of records.

Parts of processes. Process r of W owns the positions r, r + W, r + 2W, ... A Poisson draw takes each position
independently with probability q. So each process can draw its own positions by itself, from a stream of its own, and
the union over the processes IS a draw of the design:

    P(batch = S) = prod_r P(S_r drawn by r),    S_r = the positions of S that r owns

The same holds where each process has a shard, records of its own that it numbers by itself (`own=True`).
Every position has exactly one owner, so that no record is in a batch twice. A process that draws nothing delivers an
empty batch, so that all make the same number of steps. "Full" batches are split in the same way. Designs whose
positions depend on each other (fixed sizes, permutations) are refused.

Fingerprints. Whether a run that continues has the data set that it began with is told by one tag of 128 bits over all
records in their order, under a random key of 128 bits (BLAKE2b). Without the key it tells nothing; with the key one can
try data sets, so that key and tag stay in the private checkpoint. That two data sets differ is all that is ever said.

The log by which an optimizer makes sure that rows are those of one draw, once. A delivery is logged in the main process
and in order, so that prefetching workers, broken-off epochs and physical batches cannot shift it. A draw that was
delivered is what the next step uses, whatever happens in between. Who could have another one instead would choose
batches by their size or by who is in them, and no design allows for that (docs/guarantees.md). So a loop cannot leave a
draw out; `discard()` and failed steps give it up, and then the next iteration delivers the same draw.

Batches that records pick by a keyed hash of their ids: alike in every reading and process, in any order. Pick of a
pass: BLAKE2b of the id under the run's secret key of 256 bits, personalized by the pass, 512 bits modulo T. For who
does not know the key the picks of different ids, and of different passes, are independent and uniform, up to n passes
T 2^-512 in total variation and the security of the key, as for all draws of `noise.KeyedStream`; neither is charged
(docs/proofs/allocation.md#picks-by-ids).
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import replace
from decimal import Context, Decimal, localcontext
from hashlib import blake2b, sha256
from itertools import islice
from types import NoneType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Sampler, TensorDataset

from torch_dpsco import _validate as check
from torch_dpsco import native
from torch_dpsco._validate import type_members, typed
from torch_dpsco.accounting.designs import (
    Assigned,
    AssignedParts,
    Design,
    Draw,
    Fixed,
    Full,
    Poisson,
    Shuffled,
)
from torch_dpsco.compat import tree_flatten
from torch_dpsco.errors import (
    PrivacyError,
    SequenceError,
    UnitError,
    UnknownSamplerError,
    UtilityWarning,
)
from torch_dpsco.noise import Stream, rank_generator, sampling_generator
from torch_dpsco.sampling.datasets import Gathered

_Indices = npt.NDArray[np.int64]


class DesignSampler(Sampler[list[int]], ABC):
    """Draws batches of positions 0..size-1 by a design; usable as `batch_sampler` of a DataLoader.

    Args:
        design: how to draw, of the sampler's kind; its `n` must be the data set's size where that is public.
        size: number of records there are; default design.n. A Poisson, Full or assigned design under add_remove may
            have another size, because then the true one is private and `n` only a public reference.
        steps: draws per iteration; default one epoch (`Design.steps_per_epoch`). A public constant.

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
    ) -> None:
        self.require_kind(design)
        self.design = design
        self.size = check.count(size=design.n if size is None else size)
        self.steps = check.positive_count(
            steps=design.steps_per_epoch if steps is None else steps
        )
        self.log = DrawLog(self.size)
        self.rng = sampling_generator()
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
        self.rng = sampling_generator()
        self.log = DrawLog(self.size)

    @abstractmethod
    def draws(self) -> Iterator[tuple[Draw, _Indices]]:
        """Yields the draws of one iteration with their positions."""

    def dealt(self) -> Iterator[Drawn]:
        """Returns the draws of one iteration; one that was given up is repeated in its place."""
        again = self.log.again
        return self.draws() if again is None else self._repeated(again)

    def _repeated(self, again: Drawn) -> Iterator[Drawn]:
        if self.design.one_pass:  # a partition that goes on: draws have their places
            for drawn in self.draws():
                yield again if drawn[0].index == again[0].index else drawn
        else:
            yield again
            yield from islice(self._after(again[0]), self.steps - 1)

    def _after(self, draw: Draw) -> Iterator[Drawn]:
        """Yields the draws that follow a repeated one."""
        return self.draws()

    def __iter__(self) -> Iterator[list[int]]:
        log = self.log
        log.restart()
        for drawn in self.dealt():
            if log.progress.steps >= log.planned:
                return
            draw = replace(drawn[0])
            log.deliver(Chunk(draw, draw.size, draw.size, last=True, source=drawn))
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
        bits = rng.read(8 * chunk)
        # PRIVACY: None where a word decides no gap (test_gaps_in_c_are_the_true_ones_or_left_to_more_bits,
        # test_the_gap_method_reaches_the_first_and_the_last_position)
        positions = native.gaps(bits, log_miss, error, size, last)
        if positions is None:
            words = np.frombuffer(bits, dtype=np.uint64) >> np.uint64(1)
            positions = last + np.cumsum(_gaps(words, rate, size, error, rng) + 1)
            positions = positions[: positions.searchsorted(size) + 1]
        found.append(positions)
        last = int(positions[-1])
    joined: _Indices = found[0] if len(found) == 1 else np.concatenate(found)
    return joined[:-1]  # the last one is outside


def _gaps(words: Any, rate: float, size: int, error: float, rng: Stream) -> _Indices:
    """Returns the gap of each word of 63 bits, at most size + 1; `error`: of a quotient."""
    quotients = np.log((words + 0.5) * 2.0**-63) / math.log1p(-rate)
    whole = np.floor(quotients)
    beside = np.abs(quotients - whole - 0.5)  # 1/2 at an integer
    # a gap of size + 1 already leads outside, larger ones only risk an overflow
    gaps: _Indices = np.minimum(whole, size + 1).astype(np.int64)
    if not (beside.max() < 0.5 - error and words.min() >= _FEW):
        unsure = (beside >= 0.5 - error) & (quotients <= size + 1 + error)
        for place in np.flatnonzero(unsure | (words < _FEW)):
            # PRIVACY: the rate is that of the charge (test_gaps_have_exactly_the_law_of_the_rate_that_is_charged)
            gaps[place] = min(_sure_gap(int(words[place]), rate, rng), size + 1)
    return gaps


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
        digits = (
            bits + 53 - math.frexp(rate)[1]
        )  # 1 - rate is exact, errors are far below 2^-bits
        with localcontext(Context(prec=digits)):
            log_miss = (1 - Decimal(rate)).ln()
            scale = Decimal(2) ** bits
            # wider than what is known of V by more than these errors
            first, last = (
                int((Decimal(end) / scale).ln() / log_miss)
                for end in (max(word, 2) - 1, word + 2)
            )
        if word > 1 and first == last:
            return first


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
        if self.log.order is not None:  # its permutation goes on
            parts = _parts(self.log.order, self.design.batch_size, self.design.steps_per_epoch)
            rest = [drawn for drawn in parts if drawn[0].partition == draw.partition]
            yield from rest[int(draw.part) + 1 :]
        yield from self.draws()


def _parts(
    permutation: _Indices, batch_size: int, steps: int
) -> Iterator[tuple[Draw, _Indices]]:
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
            f" knowing of each other (got {design}): give the plan n= and"
            " sampling='poisson' or 'full'; for records sampling='allocated' does too"
        )


def rank_of(rank: int, processes: int) -> tuple[int, int]:
    """Returns the rank and the number of processes; raises ValueError unless it is one of them."""
    processes = check.positive_count(processes=processes)
    rank = check.count(rank=rank)
    if rank >= processes:
        raise ValueError(f"rank must be < processes={processes} (got {rank})")
    return rank, processes


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
        self.own = self.log.own = own
        self.rank, self.processes = rank_of(rank, processes)
        self._owned = (
            range(self.size) if self.own else range(self.rank, self.size, self.processes)
        )
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


_BLOCK = 1 << 16  # records that are read at a time


def records_of(dataset: Any, order: list[int] | None = None) -> Iterator[Any]:
    """Yields the records of a map-style data set, or its tensors, which hold the same, in order or in another one."""
    if type(dataset) is TensorDataset:  # a subclass may override __getitem__
        yield from (tensor if order is None else tensor[order] for tensor in dataset.tensors)
    elif isinstance(dataset, Gathered):
        places = np.arange(len(dataset)) if order is None else np.array(order, dtype=np.int64)
        for start in range(0, len(places), _BLOCK):
            yield dataset.gather(places[start : start + _BLOCK])
    else:
        yield from (dataset[i] for i in (range(len(dataset)) if order is None else order))


def fingerprint(key: str, contents: Iterable[Any]) -> str:
    """Returns the tag of some contents (nested tensors, arrays, numbers, strings and bytes) under a hexadecimal key."""
    found = blake2b(key=bytes.fromhex(key), digest_size=16)
    for item in contents:
        leaves, shape = tree_flatten(item)
        found.update(f"{shape}".encode())
        for leaf in leaves:
            for part in _bytes_of(leaf):
                found.update(part)
    return found.hexdigest()


def _bytes_of(leaf: Any) -> Iterator[Any]:
    """Yields what tells a value from others, and then its bytes."""
    if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
        yield f"{leaf.dtype}{tuple(leaf.shape)}".encode()
        yield leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    elif isinstance(leaf, (bytes, str, int, float, complex, NoneType)):
        yield type(leaf).__name__.encode()
        yield leaf if isinstance(leaf, bytes) else repr(leaf).encode()
    elif hasattr(leaf, "__array_interface__") and not np.asarray(leaf).dtype.hasobject:
        # their scalars, images
        values = np.asarray(leaf)
        yield f"{values.dtype}{values.shape}".encode()
        yield values.tobytes()
    else:
        # PRIVACY: others may look alike (test_records_that_cannot_be_told_apart_are_refused)
        raise PrivacyError(
            "dataset must hold dense tensors, arrays of numbers, numbers or strings, so that a run"
            f" of one pass knows its records again (got a {type(leaf).__name__})"
        )


Drawn = tuple[Draw, _Indices]


class Chunk(NamedTuple):
    """What one delivered batch is: (a part of) one draw.

    Args:
        draw: of the sampler.
        rows: the most records that the batch can have.
        size: rows of the batch, filling included.
        last: whether the draw is complete with it.
        start: rows of the draw before it.
        source: what the sampler drew, to deliver it again.
        users: the user of each row of the batch, where users are drawn; -1 for filling.
        slots: (rows,) int64, ascending, or a slice of the first ones: where the records are in the batch, all other
            rows of which are filling; None for a batch of records only.
        places: of the draw's units, see `Slots`: a draw that is delivered again keeps them.
    """

    draw: Draw
    rows: int
    size: int
    last: bool
    start: int = 0
    source: Drawn | None = None
    users: Tensor | None = None
    slots: Tensor | slice | None = None
    places: _Indices | None = None

    def records(self, first: int, rows: int) -> Tensor | slice | None:
        """Returns which of some rows of the batch are records: indices from the first on; None for all of them."""
        if self.slots is None:
            return None
        if isinstance(self.slots, slice):
            return slice(0, min(max(self.rows - first, 0), rows))
        index = self.slots - first
        return index[(index >= 0) & (index < rows)]


_UNUSED = (
    "the previous batch was not used: call optimizer.step() for every batch of a private loader,"
    " also an empty one (a draw that is left out by its size or its records voids the sampling), or"
    " optimizer.discard() to have it again; use another loader for evaluation; do not accumulate"
    " batches, but plan a larger batch_size, which optimizer.loader(dataset, physical_batch_size=...,"
    " num_workers=...) delivers in parts, and ahead, as a BatchMemoryManager with workers must not"
)
_GIVEN_UP = (
    "the draw was given up, by discard() or by a step that failed, and is the next one again: start"
    " a new loop over the loader (of one pass: over optimizer.loader(dataset, resume=True)), which"
    " delivers it from its beginning"
)


_OVER = "all planned steps are made: this loop has no batches; make a new optimizer for more"


class DrawLog:
    """Which delivered rows a step may use: those of one draw, once.

    Args:
        size: number of records, or users, that draws are from; None if nothing was ever drawn.
    """

    def __init__(self, size: int | None = None) -> None:
        self.size = size
        self.own = False  # whether draws are from records that only this process has
        self.waiting: deque[Chunk] = deque()
        self.taken: Chunk | None = None  # by a step that has not ended it
        self.held: Chunk | None = None  # of the draw that the next step must use
        self.order: _Indices | None = None  # newest permutation, where batches are parts of one
        self.made = 0  # draws of one pass that steps have used
        self.dataset: Any = None  # that is drawn from
        self.owner: Any = None  # whose steps use the draws
        self.on_restart: Callable[[], None] = lambda: None
        self.progress: Any = SimpleNamespace(
            steps=0
        )  # of the run, whose loops end with its plan
        self.planned: float = math.inf
        self.on_delivery: Callable[[Chunk], None] = lambda chunk: None
        self._given_up = False
        self._replaced = False  # by the log of another loader
        self._split: Chunk | None = None  # delivered in parts, the last one is still to come

    @property
    def again(self) -> Drawn | None:
        """The draw that an iteration must begin with, because it was given up."""
        return None if self.held is None else self.held.source

    def restart(self) -> None:
        """Begins a new iteration; warns if there is nothing to deliver, since all planned steps are made.

        Raises:
            SequenceError: the draw that was delivered last was neither used nor given up; another loader has taken the
                place of this one.
        """
        if self._replaced:
            self._refuse_replaced()
        if self.held is not None and not self._given_up:
            # PRIVACY: another draw instead is one that was chosen (test_a_loop_cannot_leave_a_draw_out)
            raise SequenceError(_UNUSED)
        self.on_restart()
        self.give_up()
        if self.progress.steps >= self.planned:
            warnings.warn(_OVER, UtilityWarning, stacklevel=3)

    @staticmethod
    def _refuse_replaced() -> NoReturn:
        # PRIVACY: of several loaders that were looked at one could be chosen
        # (test_of_several_loaders_only_the_newest_delivers)
        raise SequenceError(
            "this loader was replaced by a later one of the same optimizer (iterate over that"
            " one), or by a checkpoint, which goes on with its own pass (iterate over"
            " optimizer.loader(dataset, resume=True))"
        )

    def deliver(self, chunk: Chunk) -> None:
        """Notes a delivered batch.

        Raises:
            SequenceError: the batch before it was not used up by a step, or its draw was given up; it is a part of
                another draw than the one in progress; another loader has taken the place of this one.
        """
        if self._replaced:
            self._refuse_replaced()
        if self._given_up and (chunk.start or chunk.source is not self.again):
            # PRIVACY: as for an iteration that begins anew (test_a_draw_that_was_given_up_is_the_next_one_again)
            raise SequenceError(_GIVEN_UP)
        # PRIVACY: a loop that has seen several batches could use those that it likes; with parts of two draws in one
        # release a record of both would count twice
        # (test_no_part_of_a_draw_comes_before_the_one_before_it_is_used, test_a_release_never_joins_parts_of_two_draws)
        if self.waiting or self.taken is not None:
            raise SequenceError(_UNUSED)
        if self._split is not None:
            raise SequenceError(
                "the previous draw is not complete: signal_skip_step(True) was called for its last"
                " part; leave the calls to BatchMemoryManager, or use optimizer.loader(dataset,"
                " physical_batch_size=...)"
            )
        begins = chunk.start == 0 and (self.held is None or self._given_up)
        continues = self.held is not None and not self._given_up and chunk.draw is self.held.draw
        if not begins and not continues:
            # PRIVACY: the rest of a draw that a newer iteration has delivered, and a step used up, would be given up
            # and delivered once more; or another draw would take the place of one of which parts were seen
            # (test_parts_of_two_iterations_are_never_joined, test_the_rest_of_a_draw_that_was_used_up_is_refused)
            raise SequenceError(
                "an older iteration of the loader was continued inside of a newer one: finish one"
                " loop over a loader before starting the next, or call optimizer.discard() and"
                " start a new one"
            )
        self.waiting.append(chunk)
        self.held = chunk
        self._given_up = False
        self.on_delivery(chunk)

    def split(self, *, more: bool) -> None:
        """Notes that the batch that comes next is a part of the newest draw (Opacus' BatchMemoryManager says so).

        Args:
            more: whether another part follows.

        Raises:
            SequenceError: there is no draw, it was given up, or the part before was not used.
        """
        if self._split is not None:
            if self.waiting or self.taken is not None:
                raise SequenceError(_UNUSED)
            self.waiting.append(self._split._replace(last=not more))
        elif self.waiting:
            self.waiting[-1] = self.waiting[-1]._replace(last=not more)
        elif self._given_up:
            raise SequenceError(_GIVEN_UP)
        else:
            raise SequenceError(
                "signal_skip_step() must follow a new draw of the optimizer's own loader: give the"
                " loader of optimizer.loader(dataset) to BatchMemoryManager"
            )
        self._split = self.waiting[-1] if more else None

    def take(self) -> Chunk:
        """Returns the batch that the next step must use; raises SequenceError if there is none."""
        if not self.waiting:
            raise SequenceError(
                "no batch is outstanding: each step needs one batch of this optimizer's own loader"
                " (made by optimizer.loader(dataset) or optimizer.bind(loader)) and can use it once"
            )
        self.taken = self.waiting.popleft()
        return self.taken

    def use_up(self) -> None:
        """Notes that a release was made from the draw, or a step that is not shown."""
        if self.taken is not None:
            self.made = self.taken.draw.index + 1
        self.waiting.clear()
        self.taken = self.held = self._split = None

    def give_up(self) -> None:
        """Forgets what was delivered of the draw in progress: the next iteration begins with it again."""
        self.waiting.clear()
        self.taken = self._split = None
        self._given_up = self.held is not None

    def succeed(self, old: DrawLog) -> None:
        """Takes the place of the log of another loader, with the draw that was given up there.

        Raises:
            SequenceError: a draw of either is outstanding; or it was made for another number of records.
        """
        if old is self:
            return
        if old.held is not None and not old._given_up:
            raise SequenceError(_UNUSED)
        if self.held is not None:
            # PRIVACY: of several samplers that were looked at one could be chosen
            # (test_a_loader_whose_draw_was_seen_is_not_bound)
            raise SequenceError(
                "loader must be bound before its first batch is drawn: bind a new one"
            )
        # PRIVACY: places that ranks have drawn in their shards may be places of one record in a common data set
        # (test_a_draw_given_up_is_refused_on_a_data_set_of_another_size,
        # test_a_draw_of_a_shard_is_no_draw_of_all_records)
        if old.held is not None and (old.size, old.own) != (self.size, self.own):
            raise SequenceError(
                "a draw was given up and is the next one again: use a loader of the same data set,"
                " by optimizer.loader(dataset)"
            )
        begun = old.held is not None and old.order is not None and old.held.draw.part != "0"
        if begun and (self.dataset is None or self.dataset is not old.dataset):
            # PRIVACY: another data set, or the same in another order, may hold a record at the given-up places that an
            # earlier batch of this permutation has used (test_a_permutation_that_was_begun_keeps_its_data_set,
            # test_a_permutation_that_was_begun_by_a_sampler_alone_is_not_gone_on_with)
            raise SequenceError(
                "a draw was given up in the middle of a shuffled pass, which goes on with the same"
                " dataset object: iterate over the loader again, or make a new one of that object"
            )
        if old.held is not None and old.held.draw.part == "0":
            # PRIVACY: only from its start, since another data set may hold a record that was used at a place to come
            # (test_a_permutation_that_was_begun_goes_on_in_its_own_loader_only)
            self.order = old.order
        self.held = old.held
        old.held = None
        old._replaced = True
        self._replaced = False
        old.give_up()
        self.give_up()


_WIDTH = 16  # bytes of a digest by which processes compare ids


class RecordIds:
    """The id of each record. A record is its id: nothing is protected that has several.

    Args:
        ids: integers, strings or bytes, which may be mixed (1 and "1" are two ids); a list, an array, a tensor or a
            column.
        records: how many there are; default as many as ids.

    Raises:
        UnitError: not one id per record, or of another kind. No id is quoted: it may be a name.
    """

    @typed
    def __init__(self, ids: Any, records: int | None = None) -> None:
        if isinstance(ids, (str, bytes, Mapping, Set)) or not isinstance(ids, Iterable):
            raise UnitError(f"record_ids must hold one id per record (got {type(ids).__name__})")
        if isinstance(ids, (Tensor, np.ndarray)) and ids.ndim != 1:
            raise UnitError(f"record_ids must hold one id per record (got {ids.ndim}D)")
        plain = ids.tolist() if isinstance(ids, (Tensor, np.ndarray)) else ids
        self._names = [id_bytes(thing) for thing in plain]
        if records is not None and len(self) != records:
            raise UnitError("record_ids must hold one id per record (got more or fewer)")

    @classmethod
    def of(cls, ids: Any, records: int | None) -> RecordIds:
        """Returns ids as they are, or made of what else they may be."""
        return ids if isinstance(ids, RecordIds) else cls(ids, records)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return "RecordIds(SECRET)"

    def require_unique(self) -> None:
        """Raises UnitError if two records have one id."""
        if len(set(self._names)) < len(self):
            raise UnitError(SEVERAL)

    def picks(self, key: bytes, k: int, batches: int) -> _Indices:
        """Returns the batch of each record in pass k, 0..batches - 1.

        Args:
            key: 32 secret bytes.
            k: pass.
            batches: of a pass.
        """
        start = start_of_pass(key, k)
        return np.array([pick(start, name, batches) for name in self._names], dtype=np.int64)

    def digests(self, key: bytes) -> _Indices:
        """Returns (n, 2) words by which holders of a key can tell whether ids are equal."""
        start = blake2b(key=key, person=b"equal", digest_size=_WIDTH)
        found = bytearray()
        for name in self._names:
            one = start.copy()
            one.update(name)
            found += one.digest()
        return np.frombuffer(bytes(found), dtype=np.int64).reshape(-1, 2)

    def contents(self, dataset: Any) -> Iterator[Any]:
        """Yields what tells the ids and their records from others, in an order that is that of no reading."""
        names = [blake2b(name, digest_size=32).digest() for name in self._names]
        order = sorted(range(len(names)), key=names.__getitem__)
        yield b"".join(names[i] for i in order)
        yield from records_of(dataset, order)


SEVERAL = (
    "record_ids must be unique (got one of several records): who has several records is protected as a"
    " user, by UserClippedSGD and optimizer.loader(dataset, users=...)"
)
SPREAD = "users must be on one rank each, with all of their records (got one who is on several)"


def id_bytes(thing: Any) -> bytes:
    """Returns bytes that no other id has, the same in every process.

    Raises:
        UnitError: no integer, string or bytes.
    """
    if isinstance(thing, (np.generic, Tensor)) and not thing.ndim:
        thing = thing.item()
    if isinstance(thing, str):
        return b"s" + thing.encode("utf-8", "surrogatepass")
    if isinstance(thing, bytes):
        return b"b" + thing
    # PRIVACY: 1, 1.0 and True are equal, and hash() is another one in each process
    # (test_ids_that_are_not_the_same_everywhere_are_refused)
    if not isinstance(thing, int) or isinstance(thing, bool):
        raise UnitError(
            f"record_ids must be integers, strings or bytes, one id each (got a {type(thing).__name__})"
        )
    return b"i%x" % thing


def start_of_pass(key: bytes, k: int) -> Any:
    """Returns what the hashes of pass k begin with.

    Args:
        key: 32 secret bytes.
        k: pass.
    """
    # PRIVACY: other picks in each pass, and under each key (test_picks_by_ids_are_uniform_and_independent)
    return blake2b(key=key, person=b"pass" + k.to_bytes(12, "little"))


def pick(start: Any, name: bytes, batches: int) -> int:
    """Returns the batch, 0..batches - 1, of a record in the pass of `start`; `name` has the bytes of its id."""
    one = start.copy()
    # PRIVACY: of its own id, and of its id alone
    # (test_picks_by_ids_are_uniform_and_independent, test_a_record_less_moves_no_other_wherever_it_was)
    one.update(name)
    return int.from_bytes(one.digest(), "little") % batches
