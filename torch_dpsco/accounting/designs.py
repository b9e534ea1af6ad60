"""Sampling designs: how batches are drawn, as frozen values that turn a query's event into that of the drawn query.

A design is what accounting knows about a sampler; the sampler of `torch_dpsco.sampling` carries it, so that noise is
never accounted for a sampling that did not happen. `n` and `batch_size` are public constants: under replace_one `n` is
the size of the data set, under add_remove any public reference size (the true one is private).

Source: docs/proofs/accounting.md#sampling-designs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeGuard, cast

from torch_dpsco import _validate as check
from torch_dpsco.accounting.adjacency import ADD_REMOVE, REPLACE_ONE, ZERO_OUT, Adjacency
from torch_dpsco.accounting.events import (
    AboveThreshold,
    Event,
    Gaussian,
    NonPrivate,
    Parallel,
    PoissonGaussian,
    Repeat,
    Sequential,
    SimpleEvent,
    WORGaussian,
)
from torch_dpsco.accounting.stated import Failure, Stated
from torch_dpsco.errors import AdjacencyError

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

    @property
    def steps_per_epoch(self) -> int:
        """Draws that touch each record once on average: ceil(n / batch_size)."""
        return math.ceil(self.n / self.batch_size)

    @property
    def batches(self) -> int:
        """Draws of one pass: `steps_per_epoch`, except for designs of several passes."""
        return self.steps_per_epoch

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

    def draws_left(self, draw: int) -> int:
        """Returns how many draws of one part are left at draw 0, 1, ..., this one included."""
        return 1

    def charges_left(self, draw: Draw, left: int, *, of_passes: bool) -> int:
        """Returns how many charges like that of a draw are ahead, this one included.

        Args:
            draw: the next one.
            left: draws that a run has left, this one included.
            of_passes: whether a charge is of a whole pass of secret draws.
        """
        return self.draws_left(draw.index) if draw.partition else left

    @abstractmethod
    def draw_event(self, base: BaseEvent, draw: Draw) -> Event:
        """Returns the event of one draw, for the ledger. Its sum over draws never costs more than `event`."""


@dataclass(frozen=True)
class SizedDesign(Design):
    """A design of batches of some size out of n records, plain integers: its repr enters the digests of checkpoints."""

    batch_size: int
    n: int

    def __post_init__(self) -> None:
        check.fields(self, n=check.positive_count, batch_size=check.positive_count)
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
        raise ValueError(f"failure must be 0 for a query on sampled batches (got {base.failure})")
    return base.sigma / base.sensitivity(adjacency)


def is_exact(base: object) -> TypeGuard[Gaussian]:
    """Returns whether an event is that of a Gaussian query whose noise is drawn in integers."""
    return isinstance(base, Gaussian) and base.exact


def poisson_event(base: BaseEvent, rate: float) -> Event:
    """Returns the event of a query on a batch that holds each record independently with that rate."""
    if isinstance(base, NonPrivate):
        return base
    # PRIVACY: noise relative to ONE row's contribution; replace_one is a pair of its own, not twice that
    # (test_poisson_replace_one_is_neither_sigma_nor_half_of_it)
    return PoissonGaussian(noise_ratio(base, ADD_REMOVE), rate, exact=is_exact(base))


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
        return poisson_event(base, self.sample_rate)


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
    """A design of batches that are cut from a permutation of the records."""

    positional = ordered = True

    def draw_event(self, base: BaseEvent, draw: Draw) -> Event:
        """Returns the event of one draw."""
        return Parallel({draw.part: (positional_event(base),)}, draw.partition)


@dataclass(frozen=True)
class Shuffled(CutDesign):
    """Epochs over a fresh random permutation cut into batches: each record is in one batch of each epoch.

    No amplification is claimed: a pass costs one unsampled Gaussian, and a started pass counts as a whole one.
    """

    def event(self, base: BaseEvent, draws: int = 1) -> Event:
        """Returns the event of the first `draws` draws."""
        return Repeat(
            positional_event(base), math.ceil(check.count(draws=draws) / self.steps_per_epoch)
        )


@dataclass(frozen=True)
class Disjoint(CutDesign):
    """One pass over a random permutation cut into batches: all draws together cost one unsampled Gaussian."""

    one_pass = True

    def event(self, base: BaseEvent, draws: int = 1) -> Event:
        """Returns the event of the first `draws` draws."""
        if check.count(draws=draws) > self.steps_per_epoch:
            raise ValueError(
                f"draws must be <= {self.steps_per_epoch}, one pass over the data (got {draws})"
            )
        return Repeat(positional_event(base), min(draws, 1))


@dataclass(frozen=True)
class Full(Design):
    """Every batch is the whole data set; `n` is the public divisor; all three adjacencies, no amplification."""

    n: int

    def __post_init__(self) -> None:
        check.fields(self, n=check.positive_count)

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

    def __post_init__(self) -> None:
        check.fields(self, batch_size=check.positive_count)

    @property
    def n(self) -> int:  # type: ignore[override]
        """Not declared."""
        raise ValueError(
            "n was not declared: give n= (Poisson sampling) or design= to the optimizer"
        )

    def draw_event(self, base: BaseEvent, draw: Draw) -> Event:
        """Returns the event of one draw."""
        return _restricted(base, (REPLACE_ONE,))
