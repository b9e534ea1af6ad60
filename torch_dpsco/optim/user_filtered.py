"""UserFilteredSGD: steps along the filtered mean of users, each of them one person with all rows.

The loop hands over who each row belongs to:

    for x, y, users in optimizer.loader(dataset, users=ids):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step(users=users)

It tests whether users agree, and then averages those who do, with noise in proportion to how far apart they are (Asi
and Liu 2023, Algorithms 2 and 3). `UserClippedSGD`, which clips each user's mean gradient, is the one to start with.

Differs from the paper in: 1. every constant of the filter is proved (`algorithms.user_numbers`): the published noise is
not private; 2. gradients are not smoothed by random shifts, which the rate does not need (docs/errata.md, paper 3,
E10); 3. a test that fails ends the run for good, and the average of the iterates so far is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from torch_dpsco import _validate as check
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.designs import Full
from torch_dpsco.accounting.events import REPLACE_ONE
from torch_dpsco.algorithms.user_filtered_numbers import (
    calibrate_filter,
    filtered_schedule,
    schedule,
)
from torch_dpsco.algorithms.user_numbers import PairRadiusSearch, UserFilterPlan, pair_radius_iid
from torch_dpsco.errors import AdjacencyError, InfeasibleError, MissingConstantError, warn
from torch_dpsco.optim.heavy_plan import scale_of
from torch_dpsco.optim.planned import agreed_adjacency, dimension
from torch_dpsco.optim.user_plan import (
    FilterOptimizer,
    FilterPlan,
    disagreement,
    lipschitz_of,
    near,
    warn_if_users_are_buried,
)
from torch_dpsco.oracles.base import Release
from torch_dpsco.oracles.users.filtered import UserFiltered
from torch_dpsco.problem import Problem
from torch_dpsco.prox import Prox

_HOPELESS = 0.5  # of a run to halt


@dataclass(frozen=True, kw_only=True)
class UserFilteredPlan(FilterPlan):
    """Public numbers of a run of UserFilteredSGD.

    Args:
        filter: of all users in each step.
        search: of the pair radius, made by the first step, which moves nothing; the noise scales with what it finds.
            None: the filter has it.
        on_halt: "keep" the average so far once a test has failed, or go back to the "initial" parameters.
    """

    filter: UserFilterPlan
    search: PairRadiusSearch | None = None
    on_halt: str = "keep"

    def __post_init__(self) -> None:
        super().__post_init__()
        check.choice(("keep", "initial"), on_halt=self.on_halt)

    def oracle(self, prox: Prox, center: Sequence[Tensor] | None = None) -> UserFiltered:
        """Returns a new oracle with the plan's numbers."""
        return self.of_all_users(self.filter, center, self.search)

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yields what is to be said beside the promise."""
        yield from super().lines()
        own = self.filter
        if self.search is not None:
            yield (
                "search",
                (
                    f"the first step spends epsilon {self.search.epsilon:g} on choosing the pair"
                    " radius, and moves nothing"
                ),
            )
            ratio = own.noise_std / own.pair_radius
            yield (
                "noise",
                (
                    f"std {ratio:.3g} times that radius, per coordinate of the mean of users within"
                    " it of each other"
                ),
            )
        else:
            yield "noise", near(own)
        yield "tests", disagreement("the run", own.halt_probability())
        yield from self.ending()


class UserFilteredSGD(FilterOptimizer):
    """SGD on filtered means of users: noise is proportional to the distance between users, not to gradient length.

    Args:
        params: parameters or groups; all of them count as one vector.
        plan: from `UserFilteredSGD.plan`.
        center: public vector that users' mean gradients are measured from, a tensor per parameter; None for 0.
        rule: another update rule; it has averages of its own.
        prox: default the projection on the ball of problem.radius, if that is finite.
        reg: lambda of (lambda/2)|w|^2, see `PrivateOptimizer`.
        accountant: ledger to charge, of unit "user"; default a new one with the plan's budget.
        generator: noise generator of your own (warns).

    Guarantee:
        Unit: user. Adjacency: replace_one with n_users public. Event: one noisy test for the run, the Gaussians of all
        planned steps, the search if there is one, and a failure of kind "transcript", charged when the run opens, with
        no refund for a halt (a new process continues it by `resume`). A step that ends between its charge and its
        answer (Ctrl-C, an error) ends the run in this process: `resume` a new optimizer (with the ledger file), or
        `finalize()`. Assumes nothing about users' rows but that they do not depend on other users.
        Source: Asi and Liu 2023, Algorithms 2, 3; docs/proofs/user_level.md#guarantee-of-a-filtered-run.

    Example:
        >>> import torch, torch_dpsco as dp
        >>> model = dp.attach(torch.nn.Linear(3, 1), loss_reduction="sum")
        >>> data = torch.utils.data.TensorDataset(torch.randn(4000, 3), torch.ones(4000, 1))
        >>> plan = dp.UserFilteredSGD.plan(
        ...     n_users=2000, budget=dp.Budget(4.0, 1e-4, unit="user"), pair_radius=3.0, lr=0.1, steps=3)
        >>> optimizer = dp.UserFilteredSGD(model.parameters(), plan)
        >>> for x, y, users in optimizer.loader(data, users=torch.arange(4000) % 2000):
        ...     optimizer.zero_grad()
        ...     dp.losses.Logistic()(model(x), y, reduction="sum").backward()
        ...     optimizer.step(users=users)
        >>> optimizer.report().epsilon == plan.epsilon() <= 4.0
        True
    """

    plans = UserFilteredPlan
    undisturbed = "users are tested for agreement along its own iterates"

    @classmethod
    def plan(
        cls,
        *,
        n_users: int | None = None,
        budget: Budget | None = None,
        filter: str | UserFilterPlan = "best",
        problem: Problem | None = None,
        min_items: int = 1,
        pair_radius: float | PairRadiusSearch | None = None,
        lr: float | None = None,
        steps: int | None = None,
        max_steps: int = 200,
        distance: float | None = None,
        typical_score: float | None = None,
        halt_probability: float = 0.01,
        on_halt: str = "keep",
        reach: float = 1000.0,
        average: str = "uniform",
        dim: Any = None,
    ) -> UserFilteredPlan:
        """Returns the filter's public numbers and the step size, before anything is spent.

        Args:
            n_users: public number of users, all of whom are in each step.
            budget: of unit "user", replace_one.
            filter: see `calibrate.calibrate_filter`; or numbers of yours, from there, in place of n_users, pair_radius,
                steps and typical_score. The budget then only limits the run.
            problem: promises: lipschitz and radius choose what of pair_radius, lr and steps is not given.
            min_items: rows that a user must have, public: m of the theory; others are isolated.
            pair_radius: tau, public; a `radius.PairRadiusSearch`, whose epsilon is taken from the budget;
                or None for `pair_radius_iid`.
            lr: step size; None for that of the bound (pair radius known).
            steps: number of steps, beside that of a search; None for as many as help, up to max_steps (pair radius
                known).
            max_steps: see steps; a step costs n_users^2 dim operations.
            distance: bound on |w_0 - w*|; default the diameter of the problem's ball.
            typical_score: public guess, see `calibrate_filter`.
            halt_probability: see there.
            on_halt: "keep" the average of the iterates released so far, or go back to the "initial" parameters, once
                the test has failed.
            reach: users farther than reach * pair_radius from the center are isolated.
            average: "uniform" (as in the theorem), "last" or "weighted".
            dim: number of parameters, or the model; needed to choose lr or steps, and for a warning where noise buries
                the signal.

        Raises:
            InfeasibleError: nothing is proved; names n, T, epsilon and the smallest n_users that works.
            MissingConstantError: promises are missing; says which, and how to do without.
            UnitError: the budget is of another unit.
            AdjacencyError: the budget is not of replace_one.
        """
        adjacency = agreed_adjacency(None, budget, "user")
        if adjacency != REPLACE_ONE:
            raise AdjacencyError(
                f"budget must be of replace_one, or use UserClippedSGD (got {adjacency})"
            )
        dim = dimension(dim)
        items = check.positive_count(min_items=min_items)
        check.positive_count(max_steps=max_steps)
        check.open_interval(0.0, 1.0, halt_probability=halt_probability)
        if distance is not None:
            check.positive(distance=distance)
        search = pair_radius if isinstance(pair_radius, PairRadiusSearch) else None
        if not isinstance(filter, str):
            radius = None if search else pair_radius
            own = {
                "n_users": n_users,
                "pair_radius": radius,
                "steps": steps,
                "typical_score": typical_score,
            }
            for name, value in own.items():
                if value is not None:
                    raise ValueError(
                        f"{name} must be None beside numbers of the filter, which have it (got"
                        f" {value})"
                    )
        elif n_users is None or budget is None:
            check.required(
                ", or filter=, numbers of algorithms.user_numbers", n_users=n_users, budget=budget
            )
        else:
            if search is not None and (lr is None or steps is None):
                raise MissingConstantError(
                    "lr and steps must be given beside a search: its bound is not known before"
                )
            failure = halt_probability / check.positive_count(
                steps=max_steps if steps is None else steps
            )
            tau = _tau(pair_radius, problem, items, n_users, failure)
            epsilon = _left(budget, search)
            delta = budget.delta
            target: dict[str, Any] = {
                "n_users": n_users,
                "epsilon": epsilon,
                "delta": delta,
                "pair_radius": tau,
            }
            halting: dict[str, Any] = {
                "typical_score": typical_score,
                "halt_probability": halt_probability,
            }
            halting |= {"filter": filter}
            if steps is None:
                filter = filtered_schedule(
                    **target,
                    **halting,
                    items_per_user=items,
                    dim=_needed(dim, "steps"),
                    lipschitz=lipschitz_of(problem, "steps"),
                    radius=_distance(problem, distance),
                    max_steps=max_steps,
                ).plan
            else:
                filter = calibrate_filter(**target, **halting, steps=steps)
        if search is not None and search.overshoot > 0.05:
            warn(
                f"the search may end above all distances, with probability {search.overshoot:.2g}:"
                f" give it more epsilon (got {search.epsilon:g} for {search.n_users} users)"
            )
        if filter.halt_probability() > _HOPELESS:
            raise InfeasibleError(
                "filter must be such that a run goes on: with a typical score of"
                f" {filter.typical_score or n_users} it halts with probability"
                f" {filter.halt_probability():.2g}, below threshold={filter.threshold:.5g} of"
                f" {filter.n_users} users"
            )
        risk = None
        if lr is None:
            bound = lipschitz_of(problem, "lr")
            sigma_1 = filter.noise_std / math.sqrt(filter.steps)
            dim = _needed(dim, "lr")
            scale = _distance(problem, distance)
            best = schedule(bound, scale, filter.n_users * items, filter.steps, dim, sigma_1)
            lr = best.lr
            risk = best.bound
        if search is None:
            warn_if_users_are_buried([filter], problem, filter.n_users, dim, budget)
        return UserFilteredPlan(
            budget=budget,
            adjacency=adjacency,
            design=Full(filter.n_users),
            steps=filter.steps + (search is not None),
            lr=check.positive(lr=lr),
            radius=math.inf if problem is None else problem.radius,
            average=average,
            min_items=min_items,
            reach=reach,
            risk_bound=risk,
            filter=filter,
            search=search,
            on_halt=on_halt,
        )

    def _install_answer(self) -> None:
        if self.halted and self._plan.on_halt == "initial":
            for p in self._trained():
                p.copy_(self.state[p].get("initial", p))  # one unfrozen since has not moved
            return
        super()._install_answer()

    def _apply(self, params: list[nn.Parameter], release: Release) -> None:
        if not self._steps:
            for p in params:
                self.state[p].setdefault("initial", p.detach().clone())
        first = self._steps == (self._plan.search is not None)
        radius = self.oracle.metrics().get("pair_radius")
        if (
            first and radius is not None and release.still and release.mean
        ):  # an answer that is lost has none
            warn(  # of what is released: that a test has failed
                "users disagree: the first test has failed, since they are not within"
                f" pair_radius={radius:.3g} of each other; nothing is learned any more. Give a"
                " larger pair_radius, a pair_radius_search, or take UserClippedSGD, which tests"
                " nothing"
            )
        super()._apply(params, release)


def _tau(
    pair_radius: float | PairRadiusSearch | None,
    problem: Problem | None,
    items: int,
    n_users: int,
    failure: float,
) -> float:
    if isinstance(pair_radius, PairRadiusSearch):
        return 1.0  # the noise scales with what is found
    if pair_radius is None:
        return pair_radius_iid(lipschitz_of(problem, "pair_radius"), items, n_users, failure)
    return pair_radius


def _left(budget: Budget, search: PairRadiusSearch | None) -> float:
    """Returns the epsilon that a search leaves."""
    if search is None:
        return budget.epsilon
    if search.epsilon >= budget.epsilon:
        raise ValueError(
            f"pair_radius must be a search of less than the budget's epsilon={budget.epsilon:g}"
            f" (got {search.epsilon:g})"
        )
    return budget.epsilon - search.epsilon


def _needed(dim: int | None, wanted: str) -> int:
    if dim is None:
        raise MissingConstantError(
            f"dim (the number of parameters, or the model) is needed to choose {wanted}"
        )
    return dim


def _distance(problem: Problem | None, distance: float | None) -> float:
    return scale_of(Problem() if problem is None else problem, distance, "UserFilteredSGD")
