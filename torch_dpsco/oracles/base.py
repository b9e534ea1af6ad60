"""Mean oracles: the only place where data become private.

A `MeanOracle` receives per-sample gradients of one logical batch, possibly in several physical ones, and releases a
noisy mean. It alone knows how far one record can move that mean, and builds its accounting event from that number and
nothing else, so that noise can never be scaled to another one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from torch_dpsco._doors import type_members
from torch_dpsco.accounting.designs import BaseEvent
from torch_dpsco.accounting.events import Adjacency
from torch_dpsco.errors import ConditionError, PrivacyError, SequenceError
from torch_dpsco.gradbatch import GradBatch, LinearRows
from torch_dpsco.rng import Source

__all__ = ["MeanOracle", "Release"]


class Release(NamedTuple):
    """A private answer.

    Args:
        mean: one tensor (*p.shape) per parameter, float32 or float64; the oracle's next release may overwrite them.
        halted: whether the oracle answered for the last time.
        still: whether the release is no mean (a pilot chose a clip): nothing moves.
    """

    mean: list[Tensor]
    halted: bool = False
    still: bool = False


class MeanOracle(ABC):
    """Releases noisy means of per-sample gradients, one per logical batch: open, observe*, release.

    Args:
        batch_size: public divisor of the mean.
    """

    adaptive = False  # whether the event of a release depends on what was released before
    unit = "example"  # whose rows count as one
    confidential = False  # whether its state holds what must stay secret
    per_run = False  # whether its event is that of all its releases, charged with the first one
    sampled = False  # whether its event has the sampling of the design in it already
    assumptions: tuple[str, ...] = ()  # what it takes for granted beside what all oracles do, in sentences
    ordered = False  # whether it looks at the places of rows in their batch, see `Design.ordered`
    _taken = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        type_members(cls, "__init__", "calibrated")

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size

    def __setattr__(self, name: str, value: Any) -> None:
        # PRIVACY: the ledger was told these numbers (test_what_the_ledger_relies_on_cannot_be_reassigned)
        if not name.startswith("_"):
            constant = not callable(getattr(type(self), name, len))  # a property, or a flag of the class
            if name in self.__dict__ or constant:
                raise PrivacyError(f"{name} is fixed at construction: make a new oracle and optimizer")
        super().__setattr__(name, value)

    def take(self) -> None:
        """Makes the oracle that of one optimizer; raises SequenceError if it is another one's already."""
        if self._taken:
            # PRIVACY: rows of two optimizers would meet in one sum (test_an_oracle_serves_one_optimizer)
            raise SequenceError("oracle is another optimizer's: make one for each optimizer")
        self._taken = True

    @abstractmethod
    def open(self, query: Sequence[Tensor], step: int = 0) -> None:
        """Starts a logical batch; forgets an unfinished one.

        Args:
            query: the public point at which gradients are taken.
            step: number of steps made before, >= 0.
        """

    @abstractmethod
    def observe(self, rows: GradBatch, users: Tensor | None = None) -> None:
        """Takes the rows of one physical batch. `users` is for oracles whose unit is a user."""

    def observe_linear(self, rows: LinearRows) -> None:
        """Takes rows of a linear model with one score, weight and bias, as `observe` does."""
        self.observe(GradBatch([rows.block()]))

    @abstractmethod
    def discard(self) -> None:
        """Forgets the logical batch."""

    @abstractmethod
    def sensitivity(self, adjacency: Adjacency) -> float:
        """Returns the L2 sensitivity of the released mean of the open batch, rounding included."""

    @abstractmethod
    def event(self) -> BaseEvent:
        """Returns the accounting event of a release of the open batch (before the first: of one at 0), unsampled."""

    @abstractmethod
    def release(self, generator: Source) -> Release:
        """Adds noise to the mean, ends the logical batch, and returns the private answer."""

    def use_exact_noise(self) -> None:
        """Draws the noise of all releases in integers (`theory.exact_noise`); call it before the first batch.

        Raises:
            ConditionError: the oracle's releases are no Gaussian sums, or have no noise.
        """
        raise ConditionError(
            f"secure must be None for {type(self).__name__}: exact noise is that of sums of clipped rows, as those of "
            f"Clipped; use UserClippedSGD where users are protected"
        )

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Returns public constants that a checkpoint must agree with."""

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint must keep, private releases only; nothing for most oracles."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:  # noqa: B027  (most oracles have nothing to restore)
        """Restores what `state` returned."""

    def prepare(self, generator: Source) -> None:  # noqa: B027
        """Draws what several releases of a run share, so that a checkpoint made before the first one holds it."""

    def lose(self, step: int, *, halted: bool) -> bool:
        """Notes that a release was charged, and maybe made, of which nothing is known but whether it was a halt.

        Args:
            step: number of steps before it.
            halted: whether it was the last answer.

        Returns:
            Whether the oracle has answered for the last time.
        """
        return halted

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """Returns public numbers about the last release."""
