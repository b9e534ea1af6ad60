"""Mean oracles: the only place where data become public.

A `MeanOracle` receives per-sample gradients of one logical batch, possibly in several physical ones, and releases a
noisy mean. It alone knows how far one record can move that mean, and builds its accounting event from that number and
nothing else, so that noise can never be scaled to another one.

Weights by which rows stay within a clip, and what else oracles need of norms and shapes.

Source: docs/proofs/rounding.md#clip-weights.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_dpsco._doors import type_members
from torch_dpsco.accounting.designs import BaseEvent, Design, Draw
from torch_dpsco.accounting.events import Adjacency, Event
from torch_dpsco.errors import AdjacencyError, ConditionError, PrivacyError, SequenceError
from torch_dpsco.rng import Source
from torch_dpsco.rows import GradBatch, LinearBlock, row_norm


class Charge(NamedTuple):
    """What a release is charged, before it is made.

    Args:
        event: sampling of the design included.
        covers: number of releases that the event pays for: this one and those that follow it, in one run. Where it is
            more than one, the releases share something secret, such as the noise of a threshold or past noise. The
            optimizer then refuses whatever would make one of them twice: copies, another cut of the records, a
            checkpoint that is loaded in place of `resume`.
        adaptive: whether the next charge depends on what is released.
    """

    event: Event
    covers: int = 1
    adaptive: bool = False


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

    unit = "example"  # whose rows count as one
    assumptions: tuple[
        str, ...
    ] = ()  # what it takes for granted beside what all oracles do, in sentences
    jumps = False  # whether a release may jump if all rows change in their last bits
    _taken = False
    _sampled: tuple[BaseEvent, Design, Event] | None = None  # the last draw that was charged

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        type_members(cls, "__init__", "calibrated")

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size

    def __setattr__(self, name: str, value: Any) -> None:
        # PRIVACY: the ledger was told these numbers (test_what_the_ledger_relies_on_cannot_be_reassigned)
        if not name.startswith("_"):
            constant = not callable(
                getattr(type(self), name, len)
            )  # a property, or a flag of the class
            if name in self.__dict__ or constant:
                raise PrivacyError(
                    f"{name} is fixed at construction: make a new oracle and optimizer"
                )
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

    @abstractmethod
    def discard(self) -> None:
        """Forgets the logical batch."""

    @abstractmethod
    def sensitivity(self, adjacency: Adjacency) -> float:
        """Returns the L2 sensitivity of the released mean of the open batch, rounding included."""

    @abstractmethod
    def event(self) -> BaseEvent:
        """Returns the accounting event of a release of the open batch (before the first: of one at 0), unsampled."""

    @property
    def members(self) -> tuple[MeanOracle, ...]:
        """The oracles that answer, phase by phase: only itself, except for `Phased`."""
        return (self,)

    def charge(self, design: Design, draw: Draw) -> Charge:
        """Returns what the release of the open batch is charged: `event`, sampled as the design says.

        Overridden by oracles that pay for several releases at once, whose event has the sampling in it already, whose
        next event depends on what is released, or that admit some designs only.

        Args:
            design: how batches are drawn.
            draw: the open batch; before the first one some batch of the design.

        Raises:
            AdjacencyError: nothing is proved for this design.
        """
        base = self.event()
        known = self._sampled
        if known is not None and known[0] is base and known[1] is design and not draw.partition:
            return Charge(known[2])
        event = design.draw_event(base, draw)
        covers = design.covers(base, draw)
        if not draw.partition and covers == 1:  # else draws differ in their part
            self.__dict__["_sampled"] = (base, design, event)
        return Charge(event, covers)

    @abstractmethod
    def release(self, generator: Source) -> Release:
        """Adds noise to the mean, ends the logical batch, and returns the private answer."""

    def use_exact_noise(self) -> None:
        """Draws the noise of all releases in integers (`accounting.analysis.rounding`); call it before the first batch.

        Raises:
            ConditionError: the oracle's releases are no Gaussian sums, or have no noise.
        """
        raise ConditionError(
            f"secure must be None for {type(self).__name__}: exact noise is that of sums of clipped"
            " rows, as those of Clipped; use UserClippedSGD where users are protected"
        )

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Returns public constants that a checkpoint must agree with."""

    def _named(self, *names: str, **others: Any) -> dict[str, Any]:
        """Returns settings: the name of the class, attributes by their names, and other numbers."""
        return (
            {"oracle": type(self).__name__}
            | {name: getattr(self, name) for name in names}
            | others
        )

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint must keep, nothing for most oracles; a `SecretState` unless all of it is released.

        It holds tensors, primitives, and containers of them.
        """
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

        Raises:
            SequenceError: without it the oracle cannot go on.
        """
        return halted

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """Returns public numbers about the last release."""


def require_places(oracle: MeanOracle, design: Design) -> None:
    """Raises AdjacencyError unless a design suits an oracle that looks at the places of rows, see `Design.ordered`."""
    if not design.ordered:
        # PRIVACY: a record more or less in a batch would move all rows after it to other groups
        # (test_an_oracle_that_looks_at_places_needs_a_design_that_keeps_them)
        raise AdjacencyError(
            f"design must keep the places of rows for {type(oracle).__name__}: use Disjoint,"
            f" Shuffled, Cyclic or Parts (got {design})"
        )


Cut = tuple[torch.Size, tuple[int, ...], int]  # shape, strides and place in a vector
_ROUNDED = 1.0 - 8 * 2.0**-52  # covers the roundings of a weight, and of its product with a row


def clip_weights(norms: Tensor, clip: float) -> Tensor:
    """Returns min(1, clip / norm), a little below it, and 0 for rows that must not count.

    Args:
        norms: (B,) float64 upper bounds of the rows' norms; NaN and inf mark rows to drop.
        clip: largest norm a row may contribute, > 0.

    Returns:
        (B,) float64 in [0, 1]; weight * norm <= clip also after rounding.
    """
    scaled = norms.reciprocal().mul_(clip * _ROUNDED)
    # PRIVACY: clip / inf = 0 and NaN becomes 0 (test_non_finite_rows_contribute_nothing)
    return scaled.clamp_(max=1.0).nan_to_num_(nan=0.0)


def clipped_slopes(rows: LinearBlock, clip: float) -> tuple[LinearBlock, Tensor]:
    """Returns the rows that count, and s_i f_i clipped to [-C, C]: divided by f_i, the weights of (x_i, 1).

    A weight w computed from it has |w| |(x, 1)| <= C: a product, the limit, a quotient, 1/B and a product are rounded,
    and a float32 f has room for 14 roundings (see `linear_factors`); in float64 the limit has it, also for those of f.
    What underflows in a product belongs to a row far shorter than C.

    Args:
        rows: s_i (x_i, 1) with the bounds f_i.
        clip: C, far from overflow and underflow.
    """
    norms = rows.slopes * rows.factors
    if not math.isfinite(torch.dot(norms, norms)):
        # PRIVACY: dropped, not multiplied by 0 (test_linear_rows_are_clipped_dropped_and_summed_as_all_others)
        index = torch.isfinite(norms).nonzero().squeeze(1)
        rows = rows.select(index)
        norms = norms[index]
    limit = limit_of(clip)
    return rows, norms.clamp_(-limit, limit)


def limit_of(clip: float) -> float:
    """Returns the length to which rows are cut, so that they are within the clip after rounding."""
    return clip * _ROUNDED


def in_float32(clip: float) -> bool:
    """Returns whether such rows are far from overflow and underflow of float32, which its error bounds leave out."""
    return 2.0**-40 < clip < 2.0**40


def joint_norm(tensors: Sequence[Tensor]) -> float:
    """Returns an upper bound of the L2 norm of the concatenated tensors; inf if it is not finite."""
    # one row of all tensors, unless a weight and a bias are read faster by themselves
    flat = (
        tensors if len(tensors) <= 2 else [torch.cat([t.detach().reshape(-1) for t in tensors])]
    )
    norm = math.hypot(*[row_norm(t.detach()) for t in flat]) * (1.0 + 2.0**-50)
    return norm if math.isfinite(norm) else math.inf


def cuts(shapes: Sequence[torch.Size]) -> tuple[list[Cut], int]:
    """Returns where tensors of some shapes lie in one vector, and its length."""
    found = []
    place = 0
    for shape in shapes:
        found.append((shape, torch.empty(shape, device="meta").stride(), place))
        place += shape.numel()
    return found, place


def views(flat: Tensor, places: Sequence[Cut]) -> list[Tensor]:
    """Returns parts of a contiguous vector as tensors of their shapes, without copying."""
    start = int(flat.storage_offset())
    return [flat.as_strided(shape, strides, start + place) for shape, strides, place in places]


def split_like(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Returns (D,) as one tensor per shape."""
    parts = flat.split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
