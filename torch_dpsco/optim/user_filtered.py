"""UserFilteredSGD: steps along the filtered mean of users, whole persons with all their rows.

The loop hands over who each row belongs to:

    for x, y, users in optimizer.loader(dataset, users=ids):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step(users=users)

It tests whether users agree, and then averages those who do, with noise in proportion to how far apart they are (Asi
and Liu 2023, Algorithms 2 and 3). `UserClippedSGD`, which clips each user's mean gradient, is the one to start with.

Differs from the paper in: 1. every constant of the filter is proved (`theory.user_level`): the published noise is not
private; 2. smoothing is off by default, since it is not needed for the rate; 3. a test that fails ends the run for
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
from torch_dpsco.accounting.filters import Budget
from torch_dpsco.optim import checks
from torch_dpsco.optim.base import PrivateOptimizer
from torch_dpsco.optim.heavy_plan import dimension
from torch_dpsco.optim.user_plan import filtered_oracle, plan_filtered, poisson_oracle, warn_if_users_are_buried
from torch_dpsco.oracles.base import MeanOracle
from torch_dpsco.oracles.user_poisson import AdaptiveRadius
from torch_dpsco.problem import Problem
from torch_dpsco.prox import Ball, Prox
from torch_dpsco.rules import SGD
from torch_dpsco.schedule import Phase, Schedule
from torch_dpsco.theory.user_level import FilteredSchedule, PairRadiusSearch, PoissonFilterPlan, UserFilterPlan

__all__ = ["UserFilteredSGD"]


class UserFilteredSGD(PrivateOptimizer):
    """SGD on filtered means of users: noise in proportion to how far apart users are, not to how long gradients are.

    Args:
        params: parameters or groups; all of them count as one vector.
        lr: step size, > 0.
        plan: public numbers of the filter, from `UserFilteredSGD.plan` or `theory.user_level`: all users in each step
            (replace_one), or a `PoissonFilterPlan` (add_remove).
        search: a private search for the pair radius, which the first step makes in place of a move; the noise of the
            plan scales with what it finds. All users only.
        adapt: how the pair radius follows the noisy tests, free of charge; Poisson samples only.
        smoothing: radius >= 0 of the ball around each iterate from which its gradients are taken (one point for all
            users of a step), for losses with kinks; 0 for none.
        on_halt: "keep" the average of the iterates released so far, or go back to the "initial" parameters, once the
            test has failed.
        center: public vector, see `oracles.UserFiltered`.
        reach: users farther than reach * pair_radius from the center are isolated.
        min_items: rows that a user must have, public; others are isolated.
        average: "uniform" (default, as in the theorem), "last" or "weighted".
        prox: projection on the feasible set.
        reg: see `PrivateOptimizer`.
        accountant: ledger and budget, of unit "user".
        generator: noise generator of your own (warns).
        secure: None; "exact" is refused: use UserClippedSGD.

    Guarantee:
        Unit: user. Adjacency: replace_one with n_users public, or add_remove with Poisson batches. Event: one noisy
        test for the run, the Gaussians of all planned steps, the search if there is one, and a failure of kind
        "transcript", charged when the run opens, with no refund for a halt (a new process goes on with it by `resume`);
        Poisson: an event per step. A step that ends between its charge and its answer (Ctrl-C, an error) ends the run
        in this process: `resume` a new optimizer (with the ledger file), or `finalize()`. Assumes nothing about users'
        rows but that they do not depend on other users.
        Source: Asi and Liu 2023, Algorithms 2, 3; docs/proofs/user_level.md#guarantee-of-a-filtered-run,
        docs/proofs/user_level.md#poisson-samples-of-users.

    Example:
        >>> import torch_dpsco as dp
        >>> model = dp.attach(torch.nn.Linear(3, 1), loss_reduction="sum")
        >>> data = torch.utils.data.TensorDataset(torch.randn(4000, 3), torch.ones(4000, 1))
        >>> optimizer = dp.UserFilteredSGD.calibrated(
        ...     model.parameters(), n_users=2000, budget=dp.Budget(4.0, 1e-4, unit="user"), pair_radius=3.0, lr=0.1,
        ...     steps=3)
        >>> for x, y, users in optimizer.loader(data, users=torch.arange(4000) % 2000):
        ...     optimizer.zero_grad()
        ...     dp.losses.Logistic()(model(x), y, reduction="sum").backward()
        ...     optimizer.step(users=users)
        >>> optimizer.finalize()
        >>> optimizer.steps, optimizer.privacy_spent().unit
        (3, 'user')
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        *,
        plan: UserFilterPlan | PoissonFilterPlan,
        search: PairRadiusSearch | None = None,
        adapt: AdaptiveRadius | None = None,
        smoothing: float = 0.0,
        on_halt: str = "keep",
        center: Sequence[Tensor] | None = None,
        reach: float = 1000.0,
        min_items: int = 1,
        average: str = "uniform",
        prox: Prox | None = None,
        reg: float = 0.0,
        accountant: Accountant | None = None,
        generator: torch.Generator | None = None,
        secure: str | None = None,
    ) -> None:
        self._on_halt = check.choice(("keep", "initial"), on_halt=on_halt)
        oracle: MeanOracle
        if isinstance(plan, PoissonFilterPlan):
            if search is not None:
                raise ValueError("search must be None for a PoissonFilterPlan: use adapt=, which is free")
            oracle = poisson_oracle(plan, adapt, center, reach, min_items)
            design: Design = Poisson(plan.batch_size, plan.n_users)
            adjacency, steps = ADD_REMOVE, plan.steps
        elif isinstance(plan, UserFilterPlan):
            if adapt is not None:
                raise ValueError("adapt must be None for a UserFilterPlan: its radius is fixed, or found by search=")
            oracle = filtered_oracle(plan, search, center, reach, min_items, plan.n_users)
            design, adjacency = Full(plan.n_users), REPLACE_ONE
            steps = plan.steps + (search is not None)
        else:
            raise ValueError(f"plan must be a UserFilterPlan or PoissonFilterPlan (got {type(plan).__name__})")
        super().__init__(
            params,
            lr,
            oracle=oracle,
            rule=SGD(average),
            design=design,
            schedule=Schedule((Phase(steps, smoothing=smoothing),)),
            prox=prox,
            reg=reg,
            adjacency=adjacency,
            accountant=accountant,
            generator=generator,
            secure=secure,
        )
        for p in self._trained():
            self.state[p]["initial"] = self.state[p].get("iterate", p).detach().clone()

    @classmethod
    def plan(
        cls,
        *,
        n_users: int,
        budget: Budget,
        dim: int,
        problem: Problem | None = None,
        min_items: int = 1,
        pair_radius: float | PairRadiusSearch | None = None,
        lr: float | None = None,
        steps: int | None = None,
        max_steps: int = 200,
        distance: float | None = None,
        batch_size: int | None = None,
        filter: str = "best",
        typical_score: float | None = None,
        halt_probability: float = 0.01,
        smoothing: float = 0.0,
    ) -> FilteredSchedule:
        """Returns the filter's public numbers and the step size, before anything is spent.

        Args:
            n_users: public number of users (a lower bound under add_remove).
            budget: of unit "user". replace_one: all users in each step; add_remove: Poisson samples of `batch_size`.
            dim: number of parameters.
            problem: promises: lipschitz and radius choose what of pair_radius, lr and steps is not given.
            min_items: rows that a user must have, public: m of the theory.
            pair_radius: tau, public; a `theory.user_level.PairRadiusSearch`, whose epsilon is taken from the budget;
                or None for `pair_radius_iid`.
            lr: step size; None for that of the bound (all users, pair radius known).
            steps: number of steps; None for as many as help, up to max_steps (all users, pair radius known).
            max_steps: see steps; a step costs n_users^2 dim operations.
            distance: bound on |w_0 - w*|; default the diameter of the problem's ball.
            batch_size: expected users of a batch, under add_remove.
            filter: see `theory.user_level.calibrate_filter`.
            typical_score: public guess, see there.
            halt_probability: see there; under add_remove of a skipped step.
            smoothing: see the class; it enters the bound.

        Raises:
            InfeasibleError: nothing is proved; names n, T, epsilon and the smallest n_users that works.
            MissingConstantError: promises are missing; says which, and how to do without.
            UnitError: the budget is of another unit.
        """
        made = plan_filtered(
            n_users=n_users,
            budget=budget,
            dim=dim,
            problem=problem,
            min_items=min_items,
            pair_radius=pair_radius,
            lr=lr,
            steps=steps,
            max_steps=max_steps,
            distance=distance,
            batch_size=batch_size,
            filter=filter,
            typical_score=typical_score,
            halt_probability=halt_probability,
            smoothing=smoothing,
        )
        if not isinstance(pair_radius, PairRadiusSearch):
            warn_if_users_are_buried([made.plan], problem, n_users, dim, budget)
        return made

    @classmethod
    def calibrated(
        cls,
        params: Any,
        *,
        n_users: int,
        budget: Budget,
        problem: Problem | None = None,
        min_items: int = 1,
        pair_radius: float | PairRadiusSearch | None = None,
        lr: float | None = None,
        steps: int | None = None,
        max_steps: int = 200,
        distance: float | None = None,
        batch_size: int | None = None,
        filter: str = "best",
        typical_score: float | None = None,
        halt_probability: float = 0.01,
        adapt: AdaptiveRadius | None = None,
        smoothing: float = 0.0,
        on_halt: str = "keep",
        center: Sequence[Tensor] | None = None,
        reach: float = 1000.0,
        average: str = "uniform",
        prox: Prox | None = None,
        reg: float = 0.0,
        accountant: Accountant | None = None,
        generator: torch.Generator | None = None,
        secure: str | None = None,
    ) -> UserFilteredSGD:
        """Returns an optimizer that spends the budget in the planned steps; see `plan` and the class.

        With a finite radius of the problem the iterates stay in its ball, unless there is another `prox`.
        """
        params, dim = dimension(params)
        made = cls.plan(
            n_users=n_users,
            budget=budget,
            dim=dim,
            problem=problem,
            min_items=min_items,
            pair_radius=pair_radius,
            lr=lr,
            steps=steps,
            max_steps=max_steps,
            distance=distance,
            batch_size=batch_size,
            filter=filter,
            typical_score=typical_score,
            halt_probability=halt_probability,
            smoothing=smoothing,
        )
        if accountant is not None:
            checks.require_budget(accountant, budget)
        if prox is None and problem is not None and problem.radius < float("inf"):
            prox = Ball(problem.radius)
        return cls(
            params,
            made.lr,
            plan=made.plan,
            search=pair_radius if isinstance(pair_radius, PairRadiusSearch) else None,
            adapt=adapt,
            smoothing=smoothing,
            on_halt=on_halt,
            center=center,
            reach=reach,
            min_items=min_items,
            average=average,
            prox=prox,
            reg=reg,
            accountant=Accountant(budget) if accountant is None else accountant,
            generator=generator,
            secure=secure,
        )

    def _install_answer(self) -> None:
        if self.halted and self._on_halt == "initial":
            for p in self._trained():
                p.copy_(self.state[p].get("initial", p))  # one unfrozen since has not moved
            return
        super()._install_answer()
