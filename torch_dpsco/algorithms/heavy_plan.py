"""Plans for heavy-tailed gradients: public numbers, and how they are chosen.

A pilot group that chooses the clip before the steps of a planned run.

Minibatches of the phases of a run: Poisson ones, of a fixed size, or whole passes of secret draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch_dpsco import _validate as check
from torch_dpsco._validate import check_fields, typed
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.designs import (
    Assigned,
    AssignedParts,
    Design,
    Disjoint,
    Fixed,
    Full,
    Parts,
    Poisson,
)
from torch_dpsco.accounting.events import ADD_REMOVE, CLIP_UNITS, Adjacency
from torch_dpsco.algorithms.clips import (
    C_MAX,
    C_MIN,
    RULES,
    PilotClipped,
    QuantilePilot,
    pilot_size,
    target_quantile,
)
from torch_dpsco.algorithms.heavy_tailed_numbers import PilotPlan
from torch_dpsco.algorithms.mechanisms import geometric_grid
from torch_dpsco.errors import AdjacencyError, MissingConstantError
from torch_dpsco.problem import Phase, Problem, Schedule
from torch_dpsco.prox import Ball, Box, Identity, Prox, Simplex
from torch_dpsco.rules import Accelerated, ScheduledSGD, UpdateRule
from torch_dpsco.step.oracle import Clipped, MeanOracle, Phased
from torch_dpsco.step.plan import CLIPPED, Ranges, StepPlan, expected, noise_on_mean


@dataclass(frozen=True)
class Pilot:
    """Lets a group of records choose the clip, as a private quantile of the gradient norms at the starting point.

    The group is disjoint from the records that train, so that its epsilon, that of the budget, adds nothing to theirs.

    Args:
        rule: "theory", the best quantile for the worst direction of the bias; "balanced", at most 0.9; "median".
        size: records of the group; default 5 %, at least 200.
        c_min: least threshold, public, > 0.
        c_max: largest threshold, public.

    Source: docs/proofs/heavy_tailed.md#pilot-group.
    """

    rule: str = "balanced"
    size: int | None = None
    c_min: float = C_MIN
    c_max: float = C_MAX

    def __post_init__(self) -> None:
        check_fields(self)
        check.choice(RULES, rule=self.rule)
        if self.size is not None:
            check.positive_count(size=self.size)
        geometric_grid(self.c_min, self.c_max)  # its checks

    @typed
    def plan(self, n: int, budget: Budget, exchange_rate: float) -> PilotPlan:
        """Returns the public numbers of a pilot.

        Args:
            n: public number of records.
            budget: of the run.
            exchange_rate: what a unit of clip costs in noise, see `algorithms.heavy_tailed_numbers`.

        Raises:
            InfeasibleError: too few records.
        """
        size = self.records(n)
        quantile = target_quantile(
            self.rule,
            exchange_rate,
            pilot_size=size,
            epsilon=budget.epsilon,
            grid_size=len(geometric_grid(self.c_min, self.c_max)),
        )
        return PilotPlan(size, budget.epsilon, quantile, self.c_min, self.c_max)

    @typed
    def records(self, n: int) -> int:
        """Returns the size of the group among n records."""
        return pilot_size(n) if self.size is None else self.size


def oracle_of(pilot: PilotPlan) -> QuantilePilot:
    """Returns a new oracle that chooses a clip."""
    return QuantilePilot(
        pilot.size, pilot.epsilon, quantile=pilot.quantile, c_min=pilot.c_min, c_max=pilot.c_max
    )


@dataclass(frozen=True, kw_only=True)
class ClippedPlan(StepPlan):
    """Public numbers of a run on clipped means.

    Args:
        clip: C; None if a pilot chooses it.
        noise_multiplier: noise std on the sum of rows over C.
        pilot: group of records that chooses the clip in a first step, which `steps` counts; None for none.
        factors: step sizes over `lr`, one per step; empty where all are `lr`.
        weights: one per factor, of the iterates after their steps in the answer.
        risk_bound: on the expected excess risk, if a theorem chose steps and clip; else None. What it
            assumes: docs/proofs/heavy_tailed.md#defaults-without-a-theorem.
    """

    clip: float | None
    noise_multiplier: float
    pilot: PilotPlan | None = None
    factors: tuple[float, ...] = ()
    weights: tuple[float, ...] = ()
    risk_bound: float | None = None

    values: ClassVar[tuple[type, ...]] = (PilotPlan,)
    ranges: ClassVar[Ranges] = {
        **StepPlan.ranges,
        "noise_multiplier": check.nonnegative,
        "clip": check.positive,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.clip is None) == (self.pilot is None):
            raise ValueError(
                f"clip or pilot must be given, and not both (got {self.clip} and {self.pilot})"
            )

    @property
    def training(self) -> Design:
        """How the batches are drawn that move the iterate."""
        return self.design.parts[-1][0] if isinstance(self.design, Parts) else self.design

    @property
    def batch_size(self) -> int:
        """Public divisor of the steps that move the iterate."""
        return self.training.batch_size

    @property
    def noise_std(self) -> float | None:
        """Std of the noise on the mean of a step; None if the clip is not known yet."""
        return None if self.clip is None else self.noise_multiplier * self.clip / self.batch_size

    def oracle(self, prox: Prox) -> MeanOracle:
        """Returns a new oracle with the plan's numbers."""
        if self.clip is not None:
            return Clipped(self.clip, self.noise_multiplier, self.batch_size)
        pilot, steps = self._piloted()
        first = oracle_of(pilot)
        return Phased(
            [(first, 1), (PilotClipped(first, self.noise_multiplier, self.batch_size), steps)]
        )

    def rule(self) -> UpdateRule:
        """Returns the update rule that is taken where none is given."""
        return ScheduledSGD(self.factors, self.weights) if self.factors else super().rule()

    def schedule(self) -> Schedule:
        """Returns the phases of the run: the pilot's step is one of its own."""
        return (
            super().schedule()
            if self.pilot is None
            else Schedule((Phase(1), Phase(self._piloted()[1])))
        )

    def _piloted(self) -> tuple[PilotPlan, int]:
        if self.pilot is None or self.steps is None:
            raise ValueError(
                f"steps must be given beside a pilot (got {self.steps} and {self.pilot})"
            )
        return self.pilot, self.steps - 1

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yields what is to be said beside the promise."""
        yield from super().lines()
        share = self.noise_multiplier / self.batch_size
        if self.clip is None:
            yield (
                "noise",
                (
                    f"std {share:.2g} of the clip per coordinate of a mean gradient, whose norm is"
                    " at most the clip"
                ),
            )
        else:
            yield noise_on_mean(share, self.clip)
        if self.pilot is not None:
            yield "pilot", str(self.pilot)
        yield CLIPPED
        yield from expected(self.risk_bound)


@dataclass(frozen=True, kw_only=True)
class AcceleratedPlan(ClippedPlan):
    """Public numbers of a run of AcceleratedSGD."""

    average: str = "weighted"

    ranges: ClassVar[Ranges] = {
        **ClippedPlan.ranges,
        "average": partial(check.choice, ("weighted",)),
    }

    def oracle(self, prox: Prox) -> MeanOracle:
        """Returns a new oracle with the plan's numbers; raises ValueError for penalties."""
        if not isinstance(prox, (Ball, Box, Identity, Simplex)):
            raise ValueError(
                f"prox must be a projection (Ball, Box, Simplex) (got {prox}); ProximalSGD has"
                " penalties"
            )
        return super().oracle(prox)

    def rule(self) -> UpdateRule:
        """Returns the rule of two iterates."""
        return Accelerated()


@dataclass(frozen=True, kw_only=True)
class ProximalPlan(ClippedPlan):
    """Public numbers of a run of ProximalSGD."""


def after_pilot(size: int, design: Design, steps: int, n: int, adjacency: Adjacency) -> Parts:
    """Returns the design of a pilot's step and the others, on records of their own."""
    if adjacency == ADD_REMOVE:
        # PRIVACY: cut by position, a record less would move all later ones
        # (test_passes_after_a_pilot_are_those_of_a_part)
        if not isinstance(design, (Assigned, Full, Poisson)):
            raise AdjacencyError(
                f"sampling must be 'assigned', 'poisson' or 'full' after a pilot (got {design})"
            )
        return AssignedParts(((Full(size), 1), (design, steps)), n)
    if not isinstance(design, (Assigned, Disjoint, Fixed, Full, Poisson)):
        raise ValueError(
            "sampling must be 'shuffled' for one pass only after a pilot, or another one (got"
            f" {design})"
        )
    return Parts(((Full(size), 1), (design, steps)), n)


def zcdp_of(noise_multiplier: float, adjacency: Adjacency) -> float:
    """Returns rho of one unsampled clipped mean."""
    ratio = CLIP_UNITS[adjacency] / noise_multiplier
    return ratio * ratio / 2.0


def scale_of(problem: Problem, distance: float | None, by: str) -> float:
    """Returns D, a bound on the distance of start and answer: `distance`, or the diameter of the feasible set."""
    if distance is not None:
        return check.positive(distance=distance)
    if math.isinf(problem.radius):
        raise MissingConstantError(
            f"{by} needs a scale to plan from moments: give distance= (a bound on |w_0 - w*|), or"
            " promise a radius"
        )
    return 2.0 * problem.radius
