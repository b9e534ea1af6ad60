"""LocalizedUserSGD: phases of filtered means on disjoint users, for strongly convex losses.

Each phase is a run of `UserFilteredSGD` on users of its own, started at the answer of the one before; the last one has
half of the users, the first one few, which decides whether anything is proved.

Differs from the paper in: see `optim.user_filtered` and `theory.user_localized`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.designs import Full
from torch_dpsco.accounting.events import REPLACE_ONE
from torch_dpsco.accounting.filters import Budget
from torch_dpsco.accounting.parts import Parts
from torch_dpsco.optim import checks
from torch_dpsco.optim.base import PrivateOptimizer
from torch_dpsco.optim.heavy_plan import dimension
from torch_dpsco.optim.user_plan import filtered_oracle, plan_localized_users, warn_if_users_are_buried
from torch_dpsco.oracles.phased import Phased
from torch_dpsco.problem import Problem
from torch_dpsco.prox import Ball, Prox
from torch_dpsco.rules import SGD
from torch_dpsco.schedule import Phase, Schedule
from torch_dpsco.theory.user_level import LocalizedUserPlan

__all__ = ["LocalizedUserSGD"]


class LocalizedUserSGD(PrivateOptimizer):
    """Phases of filtered means on disjoint users, for strongly convex losses: Algorithm 4.

    Args:
        params: parameters or groups; all of them count as one vector.
        schedule: from `LocalizedUserSGD.plan` or `theory.user_level.localized_user_plan`.
        center: see `UserFilteredSGD`.
        reach: see `UserFilteredSGD`.
        min_items: see `UserFilteredSGD`.
        prox: projection on the feasible set.
        reg: see `PrivateOptimizer`: what makes most losses strongly convex.
        accountant: ledger and budget, of unit "user".
        generator: noise generator of your own (warns).
        secure: None; "exact" is refused: use UserClippedSGD.

    Guarantee:
        Unit: user; replace_one. Each user is in one phase at most; a phase is charged when it opens, and the largest
        counts. A phase that halts keeps its answer; later phases go on from it. A step that ends between its charge and
        its answer ends the run in this process, as for `UserFilteredSGD`.
        Source: Asi and Liu 2023, Theorem 4.11; docs/proofs/user_level.md#phases-on-disjoint-users.

    Example:
        >>> import torch_dpsco as dp
        >>> plan = dp.LocalizedUserSGD.plan(
        ...     n_users=4000, budget=dp.Budget(4.0, 1e-4, unit="user"), dim=4, reg=0.1,
        ...     problem=dp.Problem(lipschitz=2.0, radius=1.0), pair_radius=1.0, max_steps=20)
        >>> plan.phase_users
        (250, 500, 1000, 2000)
    """

    def __init__(
        self,
        params: Any,
        *,
        schedule: LocalizedUserPlan,
        center: Sequence[Tensor] | None = None,
        reach: float = 1000.0,
        min_items: int = 1,
        prox: Prox | None = None,
        reg: float = 0.0,
        accountant: Accountant | None = None,
        generator: torch.Generator | None = None,
        secure: str | None = None,
    ) -> None:
        if not isinstance(schedule, LocalizedUserPlan):
            raise ValueError(f"schedule must be a LocalizedUserPlan (got {type(schedule).__name__})")
        phases = schedule.phases
        super().__init__(
            params,
            phases[0].lr,
            oracle=Phased(
                [
                    (filtered_oracle(phase.plan, None, center, reach, min_items, schedule.n_users), phase.steps)
                    for phase in phases
                ]
            ),
            rule=SGD("uniform"),
            design=Parts(tuple((Full(phase.users), phase.steps) for phase in phases), schedule.n_users),
            schedule=Schedule(
                tuple(Phase(phase.steps, phase.lr, smoothing=phase.smoothing_radius) for phase in phases)
            ),
            prox=prox,
            reg=reg,
            adjacency=REPLACE_ONE,
            accountant=accountant,
            generator=generator,
            secure=secure,
        )

    @classmethod
    def plan(
        cls,
        *,
        n_users: int,
        budget: Budget,
        dim: int,
        problem: Problem,
        reg: float = 0.0,
        min_items: int = 1,
        pair_radius: float | None = None,
        phases: int | None = None,
        max_steps: int = 200,
        distance: float | None = None,
        filter: str = "best",
        score_share: float = 0.99,
        halt_probability: float = 0.01,
        schedule: str = "explicit",
    ) -> LocalizedUserPlan:
        """Returns the phases, as many as are provably private, before anything is spent.

        Args:
            n_users: public number of users.
            budget: of unit "user", replace_one.
            dim: number of parameters.
            problem: promises: lipschitz; strong_convexity unless there is `reg`; radius with `reg`.
            reg: lambda of the term (lambda/2) |w|^2, which adds to the strong convexity; give the optimizer the same.
            min_items: rows that a user must have, public: m of the theory.
            pair_radius: tau, public; None for `pair_radius_iid` in each phase.
            phases: their number; None for the largest that is feasible.
            max_steps: cap on the steps of a phase.
            distance: bound on |w_0 - w*|; default the diameter of the problem's ball (2 lipschitz / convexity caps it).
            filter: see `theory.user_level.calibrate_filter`.
            score_share: public guess of the score over the users of a phase.
            halt_probability: of each phase.
            schedule: "explicit", or "theorem_4_1" with the paper's step sizes and smoothing.

        Raises:
            InfeasibleError: names the phase, its users and steps, and the smallest number of users that works.
            MissingConstantError: promises are missing.
        """
        made = plan_localized_users(
            n_users=n_users,
            budget=budget,
            dim=dim,
            problem=problem,
            reg=reg,
            min_items=min_items,
            pair_radius=pair_radius,
            phases=phases,
            max_steps=max_steps,
            distance=distance,
            filter=filter,
            score_share=score_share,
            halt_probability=halt_probability,
            schedule=schedule,
        )
        warn_if_users_are_buried([phase.plan for phase in made.phases], problem, n_users, dim, budget)
        return made

    @classmethod
    def calibrated(
        cls,
        params: Any,
        *,
        n_users: int,
        budget: Budget,
        problem: Problem,
        reg: float = 0.0,
        min_items: int = 1,
        pair_radius: float | None = None,
        phases: int | None = None,
        max_steps: int = 200,
        distance: float | None = None,
        filter: str = "best",
        score_share: float = 0.99,
        halt_probability: float = 0.01,
        schedule: str = "explicit",
        center: Sequence[Tensor] | None = None,
        reach: float = 1000.0,
        prox: Prox | None = None,
        accountant: Accountant | None = None,
        generator: torch.Generator | None = None,
        secure: str | None = None,
    ) -> LocalizedUserSGD:
        """Returns an optimizer that spends the budget in its phases; see `plan` and the class.

        With a finite radius of the problem the iterates stay in its ball, unless there is another `prox`.
        """
        params, dim = dimension(params)
        made = cls.plan(
            n_users=n_users,
            budget=budget,
            dim=dim,
            problem=problem,
            reg=reg,
            min_items=min_items,
            pair_radius=pair_radius,
            phases=phases,
            max_steps=max_steps,
            distance=distance,
            filter=filter,
            score_share=score_share,
            halt_probability=halt_probability,
            schedule=schedule,
        )
        if accountant is not None:
            checks.require_budget(accountant, budget)
        if prox is None and math.isfinite(problem.radius):
            prox = Ball(problem.radius)
        return cls(
            params,
            schedule=made,
            center=center,
            reach=reach,
            min_items=min_items,
            prox=prox,
            reg=reg,
            accountant=Accountant(budget) if accountant is None else accountant,
            generator=generator,
            secure=secure,
        )
