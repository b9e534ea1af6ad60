"""Optimizers that protect users: a whole person with all their rows.

The loop hands over who each row belongs to:

    for x, y, users in optimizer.loader(dataset, users=ids):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step(users=users)

`UserClippedSGD` clips each user's mean gradient and is the one to start with. `UserFilteredSGD` tests whether users
agree, and then averages those who do, with noise in proportion to how far apart they are (Asi and Liu 2023,
Algorithms 2 and 3); `LocalizedUserSGD` does so in phases on disjoint users (Algorithm 4).

Differs from the paper in: 1. every constant of the filter is proved (`theory.user_level`): the published noise is not
private; 2. smoothing is off by default, since it is not needed for the rate; 3. a test that fails ends the phase for
good, and the average of the iterates so far is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.designs import Design, Full, Poisson
from torch_dpsco.accounting.events import ADD_REMOVE, REPLACE_ONE
from torch_dpsco.accounting.parts import Parts
from torch_dpsco.optim.user_base import UserOptimizer
from torch_dpsco.optim.user_clipped import UserClippedSGD
from torch_dpsco.oracles.base import MeanOracle
from torch_dpsco.oracles.phased import Phased
from torch_dpsco.oracles.user_filtered import Filter, UserFiltered
from torch_dpsco.oracles.user_poisson import PoissonTest, UserPoissonFiltered
from torch_dpsco.prox import Prox
from torch_dpsco.rules import SGD
from torch_dpsco.schedule import Phase, Schedule
from torch_dpsco.theory.user_level import LocalizedUserPlan, PoissonFilterPlan, UserFilterPlan

__all__ = ["LocalizedUserSGD", "UserClippedSGD", "UserFilteredSGD"]


class UserFilteredSGD(UserOptimizer):
    """SGD on filtered means of users: noise in proportion to how far apart users are, not to how long gradients are.

    Args:
        params: parameters or groups; all of them count as one vector.
        lr: step size, > 0.
        plan: `theory.user_level` plan: all users in each step (replace_one), or a `PoissonFilterPlan` (add_remove).
        on_halt: "keep" the average of the iterates released so far, or go back to the "initial" parameters, once the
            test has failed.
        center: public vector, see `oracles.UserFiltered`.
        reach: users farther than reach * pair_radius from the center are isolated.
        min_items: rows that a user must have, public; others are isolated.
        average: "uniform" (default, as in the theorem), "last" or "weighted".
        prox: projection on the feasible set.
        accountant: ledger and budget, of unit "user".
        generator: noise generator of your own (warns).

    Guarantee:
        Unit: user. Adjacency: replace_one with n_users public, or add_remove with Poisson batches. Event: one noisy
        test for the run, the Gaussians of all planned steps and a failure of kind "transcript", charged when the run
        opens, with no refund for a halt (a run that a ledger file has charged cannot be continued in a new process:
        it would need room for a second one); Poisson: an event per step. Assumes nothing about users' rows but that
        they do not depend on other users. Source: Asi and Liu 2023, Algorithms 2, 3; spec userlevel.md 4, 5.1.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        *,
        plan: UserFilterPlan | PoissonFilterPlan,
        on_halt: str = "keep",
        center: Sequence[Tensor] | None = None,
        reach: float = 1000.0,
        min_items: int = 1,
        average: str = "uniform",
        prox: Prox | None = None,
        accountant: Accountant | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self._on_halt = check.choice(("keep", "initial"), on_halt=on_halt)
        oracle: MeanOracle
        if not isinstance(plan, (UserFilterPlan, PoissonFilterPlan)):
            raise ValueError(f"plan must be a UserFilterPlan or PoissonFilterPlan (got {type(plan).__name__})")
        if isinstance(plan, PoissonFilterPlan):
            oracle = _sampled(plan, center, reach, min_items)
            design: Design = Poisson(plan.batch_size, plan.n_users)
            adjacency = ADD_REMOVE
        else:
            oracle = _filtered(plan, center, reach, min_items, plan.n_users)
            design, adjacency = Full(plan.n_users), REPLACE_ONE
        super().__init__(
            params,
            lr,
            oracle=oracle,
            rule=SGD(average),
            design=design,
            schedule=Schedule((Phase(plan.steps),)),
            prox=prox,
            adjacency=adjacency,
            accountant=accountant,
            generator=generator,
        )
        for p in self._trained():
            self.state[p]["initial"] = p.detach().clone()

    def _install_answer(self) -> None:
        if self.halted and self._on_halt == "initial":
            for p in self._trained():
                p.copy_(self.state[p].get("initial", p))  # one unfrozen since has not moved
            return
        super()._install_answer()


class LocalizedUserSGD(UserOptimizer):
    """Phases of filtered means on disjoint users, for strongly convex losses: Algorithm 4.

    Args:
        params: parameters or groups; all of them count as one vector.
        schedule: from `theory.user_level.localized_user_plan`.
        center: see `UserFilteredSGD`.
        reach: see `UserFilteredSGD`.
        min_items: see `UserFilteredSGD`.
        prox: projection on the feasible set.
        accountant: ledger and budget, of unit "user".
        generator: noise generator of your own (warns).

    Guarantee:
        Unit: user; replace_one. Each user is in one phase at most; a phase is charged when it opens, and the largest
        counts. A phase that halts keeps its answer; later phases go on from it.
        Source: Asi and Liu 2023, Theorem 4.11; spec userlevel.md 2, 4.
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
        accountant: Accountant | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        if not isinstance(schedule, LocalizedUserPlan):
            raise ValueError(f"schedule must be a LocalizedUserPlan (got {type(schedule).__name__})")
        phases = schedule.phases
        if any(phase.smoothing_radius for phase in phases):
            raise ValueError("schedule must have smoothing_radius 0 in each phase: smoothing is not offered here")
        super().__init__(
            params,
            phases[0].lr,
            oracle=Phased(
                [(_filtered(phase.plan, center, reach, min_items, schedule.n_users), phase.steps) for phase in phases]
            ),
            rule=SGD("uniform"),
            design=Parts(tuple((Full(phase.users), phase.steps) for phase in phases), schedule.n_users),
            schedule=Schedule(tuple(Phase(phase.steps, phase.lr) for phase in phases)),
            prox=prox,
            adjacency=REPLACE_ONE,
            accountant=accountant,
            generator=generator,
        )


def _filtered(
    plan: UserFilterPlan, center: Sequence[Tensor] | None, reach: float, min_items: int, ids: int
) -> UserFiltered:
    return UserFiltered(
        Filter(plan.n_users, plan.score_floor, plan.ramp_end, plan.filter, plan.coupling_failure),
        plan.pair_radius,
        plan.noise_std,
        steps=plan.steps,
        threshold=plan.threshold,
        threshold_scale=plan.threshold_scale,
        query_scale=plan.query_scale,
        center=center,
        reach=reach,
        min_items=min_items,
        ids=ids,
    )


def _sampled(
    plan: PoissonFilterPlan, center: Sequence[Tensor] | None, reach: float, min_items: int
) -> UserPoissonFiltered:
    test = PoissonTest(
        plan.n_users,
        plan.batch_size,
        plan.n_min,
        plan.deficiency,
        plan.threshold,
        plan.score_noise_std,
        plan.ramp_end,
    )
    return UserPoissonFiltered(test, plan.pair_radius, plan.noise_std, center=center, reach=reach, min_items=min_items)
