"""LocalizedUserSGD: phases of filtered means on disjoint users, for strongly convex losses.

Each phase is a run of `UserFilteredSGD` on users of its own, started at the answer of the one before; the last one has
half of the users, the first one few, which decides whether anything is proved.

Differs from the paper in: see `optim.user_filtered` and `algorithms.user_localized_numbers`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.designs import Full, Parts
from torch_dpsco.accounting.events import REPLACE_ONE
from torch_dpsco.algorithms.user_localized_numbers import (
    LocalizedUserPlan,
    UserPhase,
    localized_user_plan,
)
from torch_dpsco.errors import AdjacencyError, MissingConstantError
from torch_dpsco.optim.planned import agreed_adjacency, dimension
from torch_dpsco.optim.user_plan import (
    FilterOptimizer,
    FilterPlan,
    disagreement,
    lipschitz_of,
    near,
    warn_if_users_are_buried,
)
from torch_dpsco.oracles.phased import Phased
from torch_dpsco.problem import Problem
from torch_dpsco.prox import Prox
from torch_dpsco.schedule import Phase, Schedule


@dataclass(frozen=True, kw_only=True)
class UserLocalizedPlan(FilterPlan):
    """Public numbers of a run of LocalizedUserSGD.

    Args:
        phases: filter, steps and step size of each, on users of its own.
    """

    phases: tuple[UserPhase, ...]

    def oracle(self, prox: Prox, center: Sequence[Tensor] | None = None) -> Phased:
        """Returns a new oracle with the plan's numbers."""
        return Phased(
            [(self.of_all_users(phase.plan, center), phase.steps) for phase in self.phases]
        )

    def schedule(self) -> Schedule:
        """Returns the phases."""
        return Schedule(tuple(Phase(phase.steps, phase.lr) for phase in self.phases))

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yields what is to be said beside the promise."""
        yield from super().lines()
        for phase in self.phases:
            yield (
                f"phase {phase.index}",
                f"{phase.steps} steps of size {phase.lr:.3g}, noise of {near(phase.plan)}",
            )
        worst = max(phase.plan.halt_probability() for phase in self.phases)
        yield "tests", disagreement("a phase", worst)
        yield from self.ending()


class LocalizedUserSGD(FilterOptimizer):
    """Phases of filtered means on disjoint users, for strongly convex losses: Algorithm 4.

    Args:
        params: parameters or groups; all of them count as one vector.
        plan: from `LocalizedUserSGD.plan`.
        center: public vector that users' mean gradients are measured from, a tensor per parameter; None for 0.
        rule: another update rule; it has averages of its own.
        prox: default the projection on the ball of problem.radius, if that is finite.
        reg: default the plan's.
        accountant: ledger to charge, of unit "user"; default a new one with the plan's budget.
        generator: noise generator of your own (warns).

    Guarantee:
        Unit: user; replace_one. Each user is in one phase at most; a phase is charged when it opens, and the largest
        counts. A phase that halts keeps its answer; later phases start from it. A step that ends between its charge and
        its answer ends the run in this process, as for `UserFilteredSGD`.
        Source: Asi and Liu 2023, Theorem 4.11; docs/proofs/user_level.md#phases-on-disjoint-users.

    Example:
        >>> import torch_dpsco as dp
        >>> plan = dp.LocalizedUserSGD.plan(
        ...     n_users=4000, budget=dp.Budget(4.0, 1e-4, unit="user"), dim=4, reg=0.1,
        ...     problem=dp.Problem(lipschitz=2.0, radius=1.0), pair_radius=1.0, max_steps=20)
        >>> [phase.users for phase in plan.phases]
        [250, 500, 1000, 2000]
    """

    plans = UserLocalizedPlan
    undisturbed = "each of its phases is a ball around the private answer before it"

    @classmethod
    def plan(
        cls,
        *,
        n_users: int | None = None,
        budget: Budget | None = None,
        phases: int | LocalizedUserPlan | None = None,
        problem: Problem | None = None,
        reg: float = 0.0,
        min_items: int = 1,
        pair_radius: float | None = None,
        max_steps: int = 200,
        distance: float | None = None,
        filter: str = "best",
        score_share: float = 0.99,
        halt_probability: float = 0.01,
        schedule: str = "explicit",
        reach: float = 1000.0,
        dim: Any = None,
    ) -> UserLocalizedPlan:
        """Returns the phases, as many as are provably private, before anything is spent.

        Args:
            n_users: public number of users.
            budget: of unit "user", replace_one.
            phases: their number; None for the largest that is feasible; or phases of yours, from
                `localized.localized_user_plan`, in place of n_users and all that chooses them. The budget then
                only limits the run.
            problem: promises: lipschitz; strong_convexity unless there is `reg`; radius with `reg`.
            reg: lambda of the term (lambda/2) |w|^2, which adds to the strong convexity; the optimizer has it too.
            min_items: rows that a user must have, public: m of the theory.
            pair_radius: tau, public; None for `pair_radius_iid` in each phase.
            max_steps: cap on the steps of a phase.
            distance: bound on |w_0 - w*|; default the diameter of the problem's ball (2 lipschitz / convexity caps it).
            filter: see `calibrate.calibrate_filter`.
            score_share: public guess of the score over the users of a phase.
            halt_probability: of each phase.
            schedule: "explicit", or "theorem_4_1" with the paper's step sizes.
            reach: users farther than reach * pair_radius from the center are isolated.
            dim: number of parameters, or the model; needed unless phases are given.

        Raises:
            InfeasibleError: names the phase, its users and steps, and the smallest number of users that works.
            MissingConstantError: promises are missing.
        """
        adjacency = agreed_adjacency(None, budget, "user")
        dim = dimension(dim)
        if adjacency != REPLACE_ONE:
            raise AdjacencyError(
                f"budget must be of replace_one, as the filter on all users is (got {adjacency})"
            )
        check.nonnegative(reg=reg)
        check.positive_count(max_steps=max_steps)
        check.between(0.0, 1.0, score_share=score_share)
        check.open_interval(0.0, 1.0, halt_probability=halt_probability)
        check.choice(("explicit", "theorem_4_1"), schedule=schedule)
        check.choice(("best", "same", "two"), filter=filter)
        if pair_radius is not None:
            check.positive(pair_radius=pair_radius)
        if distance is not None:
            check.positive(distance=distance)
        if isinstance(phases, LocalizedUserPlan):
            if n_users is not None:
                raise ValueError(
                    f"n_users must be None beside phases, which have it (got {n_users})"
                )
            made = phases
        elif n_users is None or budget is None or problem is None or dim is None:
            way = ", or phases=, a algorithms.user_numbers.LocalizedUserPlan"
            check.required(way, n_users=n_users, budget=budget, problem=problem, dim=dim)
        else:
            lipschitz, convexity = _constants(problem, reg)
            made = localized_user_plan(
                n_users=n_users,
                items_per_user=check.positive_count(min_items=min_items),
                dim=dim,
                epsilon=budget.epsilon,
                delta=budget.delta,
                lipschitz=lipschitz,
                strong_convexity=convexity,
                radius=2 * problem.radius if distance is None else distance,
                pair_radius=pair_radius,
                score_share=score_share,
                halt_probability=halt_probability,
                filter=filter,
                phases=phases,
                max_steps=max_steps,
                schedule=schedule,
            )
        warn_if_users_are_buried(
            [phase.plan for phase in made.phases], problem, made.n_users, dim, budget
        )
        return UserLocalizedPlan(
            budget=budget,
            adjacency=adjacency,
            design=Parts(
                tuple((Full(phase.users), phase.steps) for phase in made.phases), made.n_users
            ),
            steps=sum(phase.steps for phase in made.phases),
            lr=made.phases[0].lr,
            radius=math.inf if problem is None else problem.radius,
            average="uniform",
            reg=reg,
            min_items=min_items,
            reach=reach,
            risk_bound=made.bound,
            phases=made.phases,
        )


def _constants(problem: Problem, reg: float) -> tuple[float, float]:
    """Returns Lipschitz constant and strong convexity of the loss and its regularizer."""
    convexity = (problem.strong_convexity or 0.0) + reg
    if not convexity:
        raise MissingConstantError(
            "LocalizedUserSGD needs strong convexity: give reg=, the lambda of (lambda/2)|w|^2, or"
            " promise Problem(strong_convexity=...)"
        )
    if reg and math.isinf(problem.radius):
        raise MissingConstantError(
            "LocalizedUserSGD needs Problem(radius=...) with reg=: it bounds the gradient reg w"
        )
    return lipschitz_of(problem, "steps") + (reg * problem.radius if reg else 0.0), convexity
