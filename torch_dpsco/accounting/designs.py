"""Sampling designs: how batches are drawn, as frozen values that turn a query's event into that of the drawn query.

A design is what accounting knows about a sampler; the sampler of `torch_dpsco.sampling` carries it, so that noise is
never accounted for a sampling that did not happen. `n` and `batch_size` are public constants: under replace_one `n` is
the size of the data set, under add_remove any public reference size (the true one is private).

Source: docs/proofs/accounting.md#sampling-designs.

Designs of partitions: batches that records are assigned to, repeated passes, phases on separate parts.

A differing record lies in one part only, so that all draws together cost what the costliest part costs; less where its
part is secret and drawn by itself (`Assigned`). Which record is in which part is drawn without looking at the data.

Proof: docs/proofs/heavy_tailed.md#disjoint-parts.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias, TypeGuard, cast

from torch_dpsco import _validate as check
from torch_dpsco._validate import check_fields
from torch_dpsco.accounting.events import (
    ADD_REMOVE,
    CLIP_UNITS,
    REPLACE_ONE,
    ZERO_OUT,
    AboveThreshold,
    Adjacency,
    Event,
    Failure,
    Gaussian,
    NonPrivate,
    Parallel,
    PoissonGaussian,
    RandomAllocation,
    Repeat,
    Sequential,
    SimpleEvent,
    Stated,
    WORGaussian,
)
from torch_dpsco.errors import AdjacencyError, UnknownSamplerError

# of a query on one given batch; sampling amplifies `Gaussian` alone
BaseEvent: TypeAlias = SimpleEvent | Sequential | Repeat


@dataclass(frozen=True)
class Draw:
    """One batch drawn by a sampler: its size (private) and, for positional designs, its part of a partition.

    `index` is its place among the draws of a one-pass design.
    """

    size: int
    partition: str = ""
    part: str = ""
    index: int = 0


_CHECKS = {
    "n": check.positive_count,
    "batch_size": check.positive_count,
    "passes": check.positive_count,
    "amplification": check.flag,
}


class Design(ABC):
    """How batches are drawn. Subclasses are frozen dataclasses with `batch_size` (expected) and `n`.

    Attributes:
        positional: whether steps are charged for a part of the positions, so that no batch may be skipped unseen.
        one_pass: whether the parts are those of one partition that is used once.
        ordered: whether replacing a record leaves all other records at their places in their batches. A query that
            looks at places (groups of consecutive rows) needs that.
    """

    batch_size: int
    n: int
    positional = one_pass = ordered = False
    passes = 1

    def __post_init__(self) -> None:
        check_fields(self)
        check.fields(self, **_CHECKS)

    @property
    def batches(self) -> int:
        """Draws of one pass, which touch each record once on average: ceil(n / batch_size)."""
        return math.ceil(self.n / self.batch_size)

    @property
    def steps_per_epoch(self) -> int:
        """Draws of all passes: `batches`, except for designs of several."""
        return self.batches * self.passes

    @property
    def secret(self) -> bool:
        """Whether a guarantee may need draws that nobody else can know, so that fresh bits must make them."""
        return False

    def covers(self, base: BaseEvent, draw: Draw) -> int:
        """Returns how many draws, this one and those that follow, the `draw_event` of this one pays for."""
        return 1

    def event(self, base: BaseEvent, draws: int = 1) -> Event:
        """Returns the event of the first `draws` draws of a sampler of this design, for planning.

        Args:
            base: event of the query on one given batch, in clip units (`events.clipped_gaussian`).
            draws: number of draws, >= 0.
        """
        return Repeat(self.draw_event(base, Draw(0)), draws)

    def _require_room(self, draws: int) -> None:
        """Raises ValueError for more draws than a design of a fixed number has."""
        if check.count(draws=draws) > self.steps_per_epoch and self.one_pass:
            raise ValueError(
                f"draws must be <= {self.steps_per_epoch}, those of {self} (got {draws})"
            )

    def between(
        self, start: int, stop: int, bases: Sequence[BaseEvent], partition: str = "planned"
    ) -> Event:
        """Returns the event of the draws start, .., stop - 1 of a run.

        Args:
            start: draws made before, >= 0.
            stop: >= start.
            bases: event of the query, in each part for designs that have parts of their own.
            partition: of a one-pass design, by which the ledger knows what was drawn before.
        """
        if (
            self.one_pass
        ):  # batches cost the same, each on records of its own: one stands for all that are left
            return (
                self.draw_event(bases[0], Draw(0, partition, str(start)))
                if stop > start
                else Sequential(())
            )
        return self.event(bases[0], stop - start)

    def charges_left(self, draw: Draw, left: int, *, of_passes: bool) -> int:
        """Returns how many charges like that of a draw are ahead, this one included.

        Args:
            draw: the next one.
            left: draws that a run has left, this one included.
            of_passes: whether a charge is of a whole pass of secret draws.
        """
        return 1 if draw.partition else left

    @abstractmethod
    def draw_event(self, base: BaseEvent, draw: Draw) -> Event:
        """Returns the event of one draw, for the ledger. Its sum over draws never costs more than `event`."""


@dataclass(frozen=True)
class SizedDesign(Design):
    """A design of batches of some size out of n records, plain integers: its repr enters the digests of checkpoints."""

    batch_size: int
    n: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size > self.n:
            raise ValueError(f"batch_size must be <= n={self.n} (got {self.batch_size})")


def noise_ratio(base: BaseEvent, adjacency: Adjacency) -> float:
    """Returns noise over sensitivity of a query on a sampled batch; raises AdjacencyError unless it is Gaussian."""
    if not isinstance(base, Gaussian):
        # PRIVACY: (test_sampling_amplifies_gaussian_queries_only)
        raise AdjacencyError(
            "design must be Disjoint, Shuffled or Parts for this query, for which no amplification"
            f" by sampling is proved (got {type(base).__name__})"
        )
    if base.failure:
        # PRIVACY: the events of sampled batches hold no failure (test_sampled_designs_refuse_a_failure)
        raise ValueError(
            f"failure must be 0 for a query on sampled batches (got {base.failure})"
        )
    return base.sigma / base.sensitivity(adjacency)


def is_exact(base: object) -> TypeGuard[Gaussian]:
    """Returns whether an event is that of a Gaussian query whose noise is drawn in integers."""
    return isinstance(base, Gaussian) and base.exact


@dataclass(frozen=True)
class Poisson(SizedDesign):
    """Each record is in each batch independently with rate batch_size / n; all three adjacencies.

    Args:
        batch_size: expected batch size, and the public divisor of the mean.
        n: public (reference) number of records.

    Example:
        >>> from torch_dpsco.accounting.events import clipped_gaussian
        >>> Poisson(batch_size=5, n=100).event(clipped_gaussian(1.0), 3)
        Repeat(event=PoissonGaussian(noise_multiplier=1.0, q=0.05), n=3)
    """

    @property
    def sample_rate(self) -> float:
        """The rate q = batch_size / n."""
        return self.batch_size / self.n

    def draw_event(self, base: BaseEvent, draw: Draw) -> Event:
        """Returns the event of one draw."""
        if isinstance(base, NonPrivate):
            return base
        # PRIVACY: noise relative to ONE row's contribution; replace_one is a pair of its own, not twice that
        # (test_poisson_replace_one_is_neither_sigma_nor_half_of_it)
        noise = noise_ratio(base, ADD_REMOVE)
        return PoissonGaussian(noise, self.sample_rate, exact=is_exact(base))


@dataclass(frozen=True)
class Fixed(SizedDesign):
    """Each batch is an independent uniformly random subset of exactly batch_size of the n records (n public)."""

    def draw_event(self, base: BaseEvent, draw: Draw) -> Event:
        """Returns the event of one draw."""
        if isinstance(base, NonPrivate):
            return base
        # WORGaussian takes the noise per clip norm; a replaced row moves the sum by twice that
        return WORGaussian(
            2.0 * noise_ratio(base, REPLACE_ONE), self.batch_size, self.n, is_exact(base)
        )


def positional_event(base: BaseEvent) -> BaseEvent:
    """Returns the event of a query on given positions: removing a record shifts all later ones."""
    # PRIVACY: add_remove has no bound here (test_positional_designs_refuse_add_remove)
    return _restricted(base, (ZERO_OUT, REPLACE_ONE))


def _restricted(base: BaseEvent, adjacencies: tuple[Adjacency, ...]) -> BaseEvent:
    if isinstance(base, NonPrivate):
        return base
    if isinstance(base, Gaussian):
        return base.only(*([a for a in adjacencies if a in dict(base.sens)] or adjacencies))
    if isinstance(base, Sequential):
        return Sequential(
            tuple(_restricted(cast(BaseEvent, event), adjacencies) for event in base.events)
        )
    if isinstance(base, Repeat):
        return Repeat(_restricted(cast(BaseEvent, base.event), adjacencies), base.n)
    if isinstance(
        base, (AboveThreshold, Failure)
    ):  # with a sensitivity per adjacency; for all adjacencies
        return base
    if isinstance(base, Stated):
        kept = tuple(a for a in base.adjacencies if a in adjacencies)
        return cast(BaseEvent, replace(base, adjacencies=kept))
    raise AdjacencyError(
        f"a query on one batch must be a Gaussian or a stated event (got {type(base).__name__})"
    )


class CutDesign(SizedDesign):
    """A design of batches that are cut from a permutation of the records.

    No amplification is claimed: a pass costs one unsampled Gaussian, and a started pass counts as a whole one.
    """

    positional = ordered = True

    def event(self, base: BaseEvent, draws: int = 1) -> Event:
        """Returns the event of the first `draws` draws."""
        self._require_room(draws)
        return Repeat(positional_event(base), math.ceil(draws / self.batches))

    def draw_event(self, base: BaseEvent, draw: Draw) -> Event:
        """Returns the event of one draw."""
        return Parallel({draw.part: (positional_event(base),)}, draw.partition)


@dataclass(frozen=True)
class Shuffled(CutDesign):
    """Epochs over a fresh random permutation cut into batches: each record is in one batch of each epoch."""


@dataclass(frozen=True)
class Disjoint(CutDesign):
    """One pass over a random permutation cut into batches: all draws together cost one unsampled Gaussian."""

    one_pass = True


@dataclass(frozen=True)
class Full(Design):
    """Every batch is the whole data set; `n` is the public divisor; all three adjacencies, no amplification."""

    n: int

    @property
    def batch_size(self) -> int:  # type: ignore[override]
        """Equals n."""
        return self.n

    def draw_event(self, base: BaseEvent, draw: Draw) -> Event:
        """Returns the event of one draw."""
        return base


@dataclass(frozen=True)
class Undeclared(Design):
    """Nothing is known except that a batch holds each record at most once and does not depend on the data.

    Each step is one unsampled Gaussian, under replace_one only.
    """

    batch_size: int

    @property
    def n(self) -> int:  # type: ignore[override]
        """Not declared."""
        raise ValueError(
            "n was not declared: give n= (Poisson sampling) or sampling= to the plan (design= to a"
            " PrivateOptimizer)"
        )

    def draw_event(self, base: BaseEvent, draw: Draw) -> Event:
        """Returns the event of one draw."""
        return _restricted(base, (REPLACE_ONE,))


@dataclass(frozen=True)
class Assigned(SizedDesign):
    """Passes over batches to which each record is assigned independently and uniformly; all three adjacencies.

    In each pass every record is in one batch, which it draws by itself, and anew for the next pass. A pass is charged
    as one `RandomAllocation` before its first step: it costs what Poisson batches do, or less. Draws and sizes of
    batches stay secret, and `batch_size` is the public divisor.

    Amplified are sums of clipped rows with Gaussian noise only. Other queries, and all with `amplification=False`, are
    charged one unsampled release a pass: a record is in one batch, whoever knows which. So a sampler with a `seed=`
    has such a design, which an optimizer that counts on secret draws refuses.

    Args:
        batch_size: public divisor, about the expected size of a batch.
        n: public (reference) number of records.
        parts: number of batches; default ceil(n / batch_size).
        amplification: whether draws are secret, so that they hide records.
        passes: number of passes, fixed in advance.

    Source: docs/proofs/allocation.md.

    Example:
        >>> from torch_dpsco.accounting.events import clipped_gaussian
        >>> Assigned(batch_size=5, n=100, passes=3).event(clipped_gaussian(1.0), 60)
        Repeat(event=RandomAllocation(noise_multiplier=1.0, steps=20), n=3)
    """

    parts: int | None = None
    amplification: bool = True
    passes: int = 1
    one_pass = True  # of one partition a pass, all from one secret

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parts is not None:
            check.fields(self, parts=check.positive_count)

    @property
    def batches(self) -> int:
        """Number of batches of a pass."""
        return self.parts or super().batches

    @property
    def secret(self) -> bool:
        """Whether who is in which batch must be secret: `amplification`."""
        return self.amplification

    def amplifies(self, base: BaseEvent) -> TypeGuard[Gaussian]:
        """Returns whether a pass of such queries is charged as a `RandomAllocation`."""
        if not self.amplification or not isinstance(base, Gaussian):
            return False
        # PRIVACY: the theorem is of sums that one record moves by one clip, with Gaussian noise
        # (test_only_clipped_gaussian_sums_are_amplified)
        return dict(base.sens) == dict(CLIP_UNITS) and not base.failure and base.sigma > 0

    def covers(self, base: BaseEvent, draw: Draw) -> int:
        """Returns how many draws of the pass are left, where it is charged as a whole."""
        return self.batches - draw.index % self.batches if self.amplifies(base) else 1

    def charges_left(self, draw: Draw, left: int, *, of_passes: bool) -> int:
        """Returns how many charges like that of a draw are ahead: one for each pass, or for this batch alone."""
        return math.ceil(left / self.batches) if of_passes else 1

    def event(self, base: BaseEvent, draws: int = 1) -> Event:
        """Returns the event of the first `draws` draws: a pass that is begun counts as a whole one."""
        self._require_room(draws)
        return Repeat(self._whole(base), math.ceil(draws / self.batches))

    def between(
        self, start: int, stop: int, bases: Sequence[BaseEvent], partition: str = "planned"
    ) -> Event:
        """Returns the event of the draws start, .., stop - 1: that of all passes that they touch."""
        if stop <= start:
            return Sequential(())
        first = start // self.batches
        last = (stop - 1) // self.batches
        if self.amplifies(bases[0]):
            return Repeat(self._whole(bases[0]), last - first + 1)
        draws = [max(start, k * self.batches) for k in range(first, last + 1)]
        events = [
            self.draw_event(bases[0], Draw(0, partition, str(k % self.batches), k))
            for k in draws
        ]
        return events[0] if len(events) == 1 else Sequential(tuple(events))

    def draw_event(self, base: BaseEvent, draw: Draw) -> Event:
        """Returns the event of one draw; of its whole pass where that is amplified, see `covers`."""
        if self.amplifies(base):
            # PRIVACY: of the whole pass, since a prefix that outputs have chosen is no cheaper
            # (test_a_pass_that_is_stopped_early_was_charged_as_a_whole)
            return self._whole(base)
        name = (
            draw.partition
            if draw.index < self.batches
            else f"{draw.partition}/{draw.index // self.batches}"
        )
        # PRIVACY: the key is drawn per record, whatever the record is, so that a replaced one keeps it
        # (test_assigned_batches_hold_under_every_adjacency)
        return Parallel({draw.part: (base,)}, name, "keyed", key_public=True)

    def _whole(self, base: BaseEvent) -> BaseEvent:
        return (
            RandomAllocation(base.sigma, self.batches, exact=base.exact)
            if self.amplifies(base)
            else base
        )


@dataclass(frozen=True)
class Cyclic(CutDesign):
    """Several passes over one random permutation cut into batches, in the same order each time.

    Two steps of one record are at least `batches` apart.

    Args:
        batch_size: of all batches but the last of a pass.
        n: public number of records.
        passes: number of passes.
    """

    passes: int
    one_pass = True  # of one partition

    def between(
        self, start: int, stop: int, bases: Sequence[BaseEvent], partition: str = "planned"
    ) -> Event:
        """Returns the event of the draws start, .., stop - 1, of the batches that come most often."""
        if stop <= start:
            return Sequential(())
        often = {
            0: math.ceil(stop / self.batches) - math.ceil(start / self.batches),
            start % self.batches: math.ceil((stop - start) / self.batches),
        }
        base = positional_event(bases[0])
        return Parallel(
            {str(part): (Repeat(base, count),) for part, count in often.items() if count},
            partition,
        )


@dataclass(frozen=True)
class Parts(Design):
    """One random permutation cut into parts, each with a design and a number of draws of its own; parts run in order.

    A record lies in one part at most, so that all draws together cost what the costliest part costs. A part that is cut
    further by secret picks (`Assigned`) is charged as `Assigned` says: for each pass that is begun one
    `RandomAllocation`, as an event of the part, or, where nothing is amplified, one unsampled release for its one pass.
    Which part a record is in counts as known, but its batches inside of the part do not.

    Args:
        parts: (design, draws) per part; designs are Full, Poisson, Fixed, or Disjoint or Assigned (which cut the part
            further), with the part's number of records as n.
        n: public number of records, at least those of all parts.

    Example:
        >>> from torch_dpsco.accounting.events import clipped_gaussian
        >>> design = Parts(((Full(50), 3), (Full(25), 4)), n=100)
        >>> design.steps_per_epoch, design.part_of(3), len(design.event(clipped_gaussian(2.0), 4).items())
        (7, 1, 2)
    """

    parts: tuple[tuple[Full | Poisson | Fixed | Disjoint | Assigned, int], ...]
    n: int
    positional = one_pass = ordered = True
    cut: ClassVar[tuple[str, bool]] = ("positional", False)  # and whether its key is public
    inner: ClassVar[tuple[type[Design], ...]] = (
        Full,
        Poisson,
        Fixed,
        Disjoint,
        Assigned,
    )  # designs of a part

    def __post_init__(self) -> None:
        super().__post_init__()
        parts = tuple((d, check.positive_count(draws=draws)) for d, draws in self.parts)
        object.__setattr__(self, "parts", parts)
        if not self.parts or not all(isinstance(design, self.inner) for design, _ in self.parts):
            names = ", ".join(kind.__name__ for kind in self.inner)
            raise ValueError(
                f"parts must be ({names}; draws) pairs, at least one (got {self.parts})"
            )
        for design, draws in self.parts:
            if design.one_pass and draws > design.steps_per_epoch:
                raise ValueError(
                    f"draws must be <= {design.steps_per_epoch}, one pass over {design} (got"
                    f" {draws})"
                )
            if isinstance(design, Assigned) and not design.amplification:
                _require_one_pass(design)
        used = sum(design.n for design, _ in self.parts)
        if used > self.n:
            raise ValueError(f"parts must have at most n={self.n} records together (got {used})")

    @property
    def batch_size(self) -> int:  # type: ignore[override]
        """That of the first part."""
        return self.parts[0][0].batch_size

    @property
    def batches(self) -> int:
        """Draws of all parts."""
        return sum(draws for _, draws in self.parts)

    def part_of(self, draw: int) -> int:
        """Returns the part of draw 0, 1, ..."""
        return self._locate(draw)[0]

    def charges_left(self, draw: Draw, left: int, *, of_passes: bool) -> int:
        """Returns how many charges like that of a draw are ahead: those of its part."""
        part, here = self._locate(draw.index)
        return 1 if self.parts[part][0].one_pass else here

    def _locate(self, draw: int) -> tuple[int, int]:
        k = draw
        for part, (_, draws) in enumerate(self.parts):
            if k < draws:
                return part, draws - k
            k -= draws
        raise ValueError(f"draw must be < {self.steps_per_epoch} (got {draw})")

    def between(
        self, start: int, stop: int, bases: Sequence[BaseEvent], partition: str = "planned"
    ) -> Event:
        """Returns the event of the draws start, .., stop - 1, given the query's event in each part."""
        first = 0
        used: dict[str, tuple[Event, ...]] = {}
        for part, ((design, draws), base) in enumerate(zip(self.parts, bases, strict=True)):
            count = min(stop, first + draws) - max(start, first)
            if count > 0:
                begin = max(start, first) - first
                used[str(part)] = (self._spent(design, base, begin, begin + count),)
            first += draws
        return self._parallel(used, partition) if used else Sequential(())

    def event(self, base: BaseEvent, draws: int = 1) -> Event:
        """Returns the event of the first `draws` draws: that of the part of which most cost is used."""
        self._require_room(draws)
        return self.between(0, draws, [base] * len(self.parts))

    @property
    def secret(self) -> bool:
        """Whether who is in which batch of a part must be secret."""
        return any(design.secret for design, _ in self.parts)

    def covers(self, base: BaseEvent, draw: Draw) -> int:
        """Returns how many draws of a pass inside of a part are left, where it is charged as a whole."""
        part, left = self._locate(draw.index)
        if draw.part.partition("/")[0] != str(part):
            raise ValueError(
                f"draw {draw.index} must be of part {part} (got one of {draw.part!r})"
            )
        design, draws = self.parts[part]
        # PRIVACY: a pass that its phase does not finish pays for no step of the next one
        # (test_a_pass_pays_for_no_step_of_the_next_part)
        return min(left, design.covers(base, replace(draw, index=draws - left)))

    def draw_event(self, base: BaseEvent, draw: Draw) -> Event:
        """Returns the event of one draw; of its whole pass where that is amplified, see `covers`."""
        part = draw.part.partition("/")[0]  # a batch k of a part that is cut further is "part/k"
        design, _ = self.parts[int(part)]
        if isinstance(design, Assigned) and design.amplifies(base):
            # PRIVACY: all batches of a pass are one part, of records that are in some of them
            # (test_a_pass_inside_of_a_part_is_charged_to_the_part)
            return self._parallel({part: (design.draw_event(base, draw),)}, draw.partition)
        return self._parallel({draw.part: (self._inside(design, base),)}, draw.partition)

    def _parallel(self, used: dict[str, tuple[Event, ...]], partition: str) -> Event:
        return Parallel(used, partition, *self.cut)

    def _spent(self, design: Design, base: BaseEvent, start: int, stop: int) -> Event:
        """Returns the event of the draws start, .., stop - 1 of a part."""
        if isinstance(design, Assigned) and design.amplifies(base):
            return design.between(start, stop, [base])
        once = design.one_pass or isinstance(base, Sequential)  # which is that of a whole phase
        return Repeat(self._inside(design, base), 1 if once else stop - start)

    def _inside(self, design: Design, base: BaseEvent) -> Event:
        """Returns the event of a draw of a part's design."""
        if isinstance(design, Assigned):
            _require_one_pass(design)  # of a query that is not amplified
        if isinstance(design, (Full, Disjoint, Assigned)):
            # those of given positions: add_remove is refused
            return positional_event(base) if self.positional else base
        return design.draw_event(base, Draw(0))


@dataclass(frozen=True)
class AssignedParts(Parts):
    """Parts to which each record was assigned independently, with probabilities as their sizes; all three adjacencies.

    What `Parts` is for a public number of records. The sizes of the parts are random, hence private; those of the
    designs are public divisors, and their sum is n, the (reference) number of records.

    Args:
        parts: (design, draws) per part; designs are Full, Poisson, or Assigned (which is cut further).
        n: public number of records.

    Source: docs/proofs/heavy_tailed.md#disjoint-parts.
    """

    positional = ordered = False
    # PRIVACY: as for `Assigned` (test_records_are_assigned_to_parts_under_every_adjacency)
    cut = ("keyed", True)
    inner = (Full, Poisson, Assigned)

    def __post_init__(self) -> None:
        super().__post_init__()
        used = sum(design.n for design, _ in self.parts)
        if used != self.n:
            raise ValueError(f"parts must have n={self.n} records together (got {used})")


def _require_one_pass(design: Assigned) -> None:
    """Raises ValueError for several passes inside of a part, where batches are charged and no passes."""
    if design.passes > 1:
        # PRIVACY: a batch of one pass and one of another have records in common, and would count as disjoint
        # (test_a_part_is_assigned_to_batches_once)
        raise ValueError(
            "passes must be 1 for a part that is cut further, where none is amplified (got"
            f" {design})"
        )


def identify(loader: Any) -> Design:
    """Returns the design of a loader, of its batch sampler, or of a sampler itself, if it is one of torch_dpsco.

    The optimizers of torch_dpsco ask here: they need the draw log that only these samplers keep. A sampler of
    torch_dpsco given as `sampler=` is not believed: the loader would join several draws into a batch. A shuffled or
    fixed-size loader accounted as Poisson would under-report epsilon by more than 10 times.

    Raises:
        UnknownSamplerError: the sampler is not one of torch_dpsco.
    """
    # PRIVACY: (test_a_design_sampler_under_another_batch_sampler_is_refused)
    for source in (loader, getattr(loader, "batch_sampler", None)):
        design = getattr(source, "design", None)
        if isinstance(design, Design):
            return design
    parts = [loader, *(getattr(loader, name, None) for name in ("batch_sampler", "sampler"))]
    names = " > ".join(type(part).__name__ for part in parts if part is not None) or "NoneType"
    raise UnknownSamplerError(
        f"loader must draw by a sampler of torch_dpsco (got {names}). Ways out:"
        " optimizer.loader(dataset) draws Poisson batches; DataLoader(dataset,"
        " batch_sampler=PoissonSampler(...)) keeps your own loader; or build the optimizer"
        " without n= and design=, which claims no amplification"
    )
