"""A pilot group that chooses the clip before the steps of a planned run.

Minibatches of the phases of a run: Poisson ones, of a fixed size, or whole passes of secret draws.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypeAlias

from torch_dpsco import _validate as check
from torch_dpsco._doors import check_fields, typed
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.designs import Assigned, Fixed, Poisson
from torch_dpsco.accounting.events import ADD_REMOVE
from torch_dpsco.algorithms.choose_clip import (
    C_MAX,
    C_MIN,
    LEAST_PILOT,
    RULES,
    pilot_size,
    target_quantile,
)
from torch_dpsco.algorithms.heavy_tailed_numbers import exchange_rate_phase
from torch_dpsco.algorithms.localized_numbers import LocalizedPhase, LocalizedSchedule
from torch_dpsco.algorithms.mechanisms import geometric_grid
from torch_dpsco.algorithms.pilot_oracle import QuantilePilot
from torch_dpsco.errors import AdjacencyError, InfeasibleError
from torch_dpsco.step.chooser import noise_for


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
            exchange_rate: what a unit of clip costs in noise, see `algorithms.clip_numbers`.

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

    def split(
        self, schedule: LocalizedSchedule, budget: Budget, dim: int, sampling: type[Minibatches]
    ) -> tuple[LocalizedSchedule, tuple[PilotPlan | None, ...]]:
        """Returns the schedule with a group taken out of each phase that is large enough, and their pilots.

        Args:
            schedule: of the run without pilots.
            budget: of the run.
            dim: number of parameters.
            sampling: of minibatches, whose noise depends on the records that are left.

        Raises:
            AdjacencyError: add_remove, where phases that are cut by position have no bound.
            InfeasibleError: not even the first phase is large enough.
        """
        if budget.adjacency == ADD_REMOVE:
            raise AdjacencyError(
                "adjacency must be replace_one or zero_out for pilots of phases, which are cut out"
                " by position (got add_remove): give clip= a number"
            )
        phases: list[LocalizedPhase] = []
        pilots: list[PilotPlan | None] = []
        for phase in schedule.phases:
            if pilots and phase.n < 2 * (
                self.size or LEAST_PILOT
            ):  # the choice of the phase before will do
                phases.append(phase)
                pilots.append(None)
                continue
            size = self.records(phase.n)
            left = phase.n - size
            if left < 1:
                raise InfeasibleError(
                    f"Pilot(size={size}) must leave records in phase {phase.index}, which has"
                    f" {phase.n}: give a smaller size, or a larger min_phase"
                )
            rate = (
                exchange_rate_phase(left, dim, schedule.rho, budget.adjacency)
                if schedule.rho
                else 0.0
            )
            pilots.append(self.plan(phase.n, budget, rate))
            batch = max(1, phase.batch_size * left // phase.n)
            steps = phase.steps
            noise = phase.noise_multiplier
            if phase.batch_size < phase.n:
                design, steps = minibatches(sampling, batch, left, steps)
                # PRIVACY: the sampling rate is another one (test_pilots_of_phases_keep_the_budget)
                batch = design.batch_size
                noise = noise_for(budget, design, steps)
            std = noise * phase.clip / batch
            phases.append(replace(phase, n=left, batch_size=batch, steps=steps, noise_std=std))
        return replace(schedule, phases=tuple(phases)), tuple(pilots)

    @typed
    def records(self, n: int) -> int:
        """Returns the size of the group among n records."""
        return pilot_size(n) if self.size is None else self.size


@dataclass(frozen=True)
class PilotPlan:
    """Public numbers of a pilot.

    Args:
        size: records of the group.
        epsilon: of its release.
        quantile: target of the clip among the norms.
        c_min: least threshold.
        c_max: largest threshold.
    """

    size: int
    epsilon: float
    quantile: float
    c_min: float
    c_max: float

    def __post_init__(self) -> None:
        check_fields(self)

    def oracle(self) -> QuantilePilot:
        """Returns a new oracle that chooses."""
        return QuantilePilot(
            self.size, self.epsilon, quantile=self.quantile, c_min=self.c_min, c_max=self.c_max
        )

    def __str__(self) -> str:
        return (
            f"the clip is a private {self.quantile:.3g}-quantile of the gradient norms of"
            f" {self.size} examples, within [{self.c_min:g}, {self.c_max:g}]"
        )


Minibatches: TypeAlias = Poisson | Fixed | Assigned


def minibatches(
    kind: type[Minibatches], batch_size: int, n: int, steps: int
) -> tuple[Minibatches, int]:
    """Returns how a phase of n records draws, and its steps: of `Assigned` batches whole passes, at least one.

    Example:
        >>> minibatches(Assigned, 5, 100, 50)
        (Assigned(batch_size=5, n=100, parts=None, amplification=True, passes=2), 40)
        >>> minibatches(Poisson, 5, 100, 50)
        (Poisson(batch_size=5, n=100), 50)
    """
    if kind is not Assigned:
        return kind(batch_size, n), steps
    design = Assigned(max(batch_size, math.ceil(n / steps)), n)
    passes = steps // design.batches
    return replace(design, passes=passes), passes * design.batches
