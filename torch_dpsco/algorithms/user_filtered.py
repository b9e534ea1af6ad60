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

LocalizedUserSGD: phases of filtered means on disjoint users, for strongly convex losses.

Each phase is a run of `UserFilteredSGD` on users of its own, started at the answer of the one before; the last one has
half of the users, the first one few, which decides whether anything is proved.

Differs from the paper in: see `algorithms.user_filtered` and `algorithms.user_localized_numbers`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torch_dpsco import _validate as check
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.designs import Full, Parts
from torch_dpsco.accounting.events import REPLACE_ONE, Adjacency
from torch_dpsco.algorithms.heavy_plan import scale_of
from torch_dpsco.algorithms.user_clipped import UserPlan
from torch_dpsco.algorithms.user_filter_oracles import UserFilter, UserFiltered, UserSearched
from torch_dpsco.algorithms.user_filtered_numbers import (
    UserSchedule,
    calibrate_filter,
    filtered_schedule,
    schedule,
)
from torch_dpsco.algorithms.user_localized_numbers import (
    UserPhase,
    UserPhases,
    plan_phases,
)
from torch_dpsco.algorithms.user_numbers import PairRadiusSearch, UserFilterPlan, pair_radius_iid
from torch_dpsco.errors import AdjacencyError, InfeasibleError, MissingConstantError, warn
from torch_dpsco.problem import Phase, Problem, Schedule
from torch_dpsco.prox import Prox
from torch_dpsco.rules import UpdateRule
from torch_dpsco.step import checks
from torch_dpsco.step.chooser import agreed, dimension
from torch_dpsco.step.oracle import MeanOracle, Release
from torch_dpsco.step.phased import Phased
from torch_dpsco.step.planned import PlannedOptimizer, StepPlan

_HOPELESS = 0.5  # of a run to halt


@dataclass(frozen=True, kw_only=True)
class FilterPlan(UserPlan):
    """Public numbers of a run on filtered means of users.

    Args:
        reach: users farther than reach * pair_radius from the center are isolated.
        risk_bound: on the expected excess risk of the answer; None where no theorem chose the step size.
    """

    values: ClassVar[tuple[type, ...]] = (UserFilterPlan, UserPhase, PairRadiusSearch)
    reach: float = 1000.0
    risk_bound: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check.between(1.0, 1e6, reach=self.reach)

    @abstractmethod
    def oracle(self, prox: Prox, center: Sequence[Tensor] | None = None) -> MeanOracle:
        """Returns a new oracle with the plan's numbers, that measures users from a center."""

    def of_all_users(
        self,
        plan: UserFilterPlan,
        center: Sequence[Tensor] | None,
        search: PairRadiusSearch | None = None,
    ) -> UserFiltered:
        """Returns the oracle of a filter, with a search in its first release if there is one."""
        kept = UserFilter(
            plan.n_users, plan.score_floor, plan.ramp_end, plan.filter, plan.coupling_failure
        )
        test = ("steps", "threshold", "threshold_scale", "query_scale")
        numbers: dict[str, Any] = {name: getattr(plan, name) for name in test}
        numbers |= {
            "center": center,
            "reach": self.reach,
            "min_items": self.min_items,
            "ids": self.n,
        }
        if search is not None:
            return UserSearched(search, kept, plan.noise_std / plan.pair_radius, **numbers)
        return UserFiltered(kept, plan.pair_radius, plan.noise_std, **numbers)

    def ending(self) -> Iterator[tuple[str, str]]:
        """Yields the last lines of the table."""
        yield "assumed", self.assumed
        if self.risk_bound is not None:
            yield (
                "expected",
                f"excess risk of the answer at most {self.risk_bound:.3g}, if the promises hold",
            )


class FilterOptimizer(PlannedOptimizer):
    """Base of the named optimizers on filtered means of users.

    Args:
        params: parameters or groups; all of them count as one vector.
        plan: from the class's own `plan`.
        center: public vector that users' mean gradients are measured from, a tensor per parameter; None for 0.
        rule: as in `PlannedOptimizer`, and so are the others.
        prox: as there.
        reg: as there.
        accountant: as there.
        generator: as there.
    """

    def __init__(
        self,
        params: Any,
        plan: Any = None,
        *,
        center: Sequence[Tensor] | None = None,
        rule: UpdateRule | None = None,
        prox: Prox | None = None,
        reg: float | None = None,
        accountant: Accountant | None = None,
        generator: torch.Generator | None = None,
        **moved: Any,
    ) -> None:
        self._center = center
        super().__init__(
            params,
            plan,
            rule=rule,
            prox=prox,
            reg=reg,
            accountant=accountant,
            generator=generator,
            **moved,
        )

    def _oracle(self, plan: StepPlan, prox: Prox) -> MeanOracle:
        assert isinstance(plan, FilterPlan)
        return plan.oracle(prox, self._center)


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
        budget, adjacency = _replaced(budget, "or use UserClippedSGD")
        task = _Task(
            n_users=n_users,
            budget=budget,
            problem=problem,
            items=check.positive_count(min_items=min_items),
            pair_radius=pair_radius,
            lr=lr,
            steps=steps,
            max_steps=check.positive_count(max_steps=max_steps),
            distance=distance,
            typical_score=typical_score,
            halt_probability=halt_probability,
            dim=dimension(dim),
        )
        task.check()
        search = task.search
        made = task.calibrated(filter) if isinstance(filter, str) else task.of_caller(filter)
        _require_hope(made, search)
        best = task.best_step(made) if lr is None else None
        if search is None:
            warn_if_users_are_buried([made], problem, made.n_users, task.dim, budget)
        return UserFilteredPlan(
            budget=budget,
            adjacency=adjacency,
            design=Full(made.n_users),
            steps=made.steps + (search is not None),
            lr=check.positive(lr=lr if best is None else best.lr),
            radius=math.inf if problem is None else problem.radius,
            average=average,
            min_items=min_items,
            reach=reach,
            risk_bound=None if best is None else best.bound,
            filter=made,
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
        if not self.steps:
            for p in params:
                self.state[p].setdefault("initial", p.detach().clone())
        first = self.steps == (self._plan.search is not None)
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


@dataclass(frozen=True, kw_only=True)
class _Task:
    """What a plan is asked for; the fields are arguments of `UserFilteredSGD.plan`."""

    n_users: int | None
    budget: Budget | None
    problem: Problem | None
    items: int
    pair_radius: float | PairRadiusSearch | None
    lr: float | None
    steps: int | None
    max_steps: int
    distance: float | None
    typical_score: float | None
    halt_probability: float
    dim: int | None

    @property
    def search(self) -> PairRadiusSearch | None:
        """The search for the pair radius, if there is one."""
        return self.pair_radius if isinstance(self.pair_radius, PairRadiusSearch) else None

    def check(self) -> None:
        """Raises for numbers out of range."""
        check.open_interval(0.0, 1.0, halt_probability=self.halt_probability)
        if self.distance is not None:
            check.positive(distance=self.distance)

    def of_caller(self, filter: UserFilterPlan) -> UserFilterPlan:
        """Returns numbers of the caller's; raises ValueError for what these have themselves."""
        own = {
            "n_users": self.n_users,
            "pair_radius": None if self.search else self.pair_radius,
            "steps": self.steps,
            "typical_score": self.typical_score,
        }
        for name, value in own.items():
            if value is not None:
                raise ValueError(
                    f"{name} must be None beside numbers of the filter, which have it (got {value})"
                )
        return filter

    def calibrated(self, filter: str) -> UserFilterPlan:
        """Returns a filter for the budget, of as many steps as help where none are given."""
        n_users = self.n_users
        budget = self.budget
        steps = self.steps
        if n_users is None or budget is None:
            check.required(
                ", or filter=, numbers of algorithms.user_numbers", n_users=n_users, budget=budget
            )
        if self.search is not None and (self.lr is None or steps is None):
            raise MissingConstantError(
                "lr and steps must be given beside a search: its bound is not known before"
            )
        most = self.max_steps if steps is None else steps
        target: dict[str, Any] = {
            "n_users": n_users,
            "pair_radius": self._tau(n_users, most),
            "epsilon": _left(budget, self.search),
            "delta": budget.delta,
            "typical_score": self.typical_score,
            "halt_probability": self.halt_probability,
            "filter": filter,
        }
        if steps is not None:
            return calibrate_filter(**target, steps=steps)
        return filtered_schedule(
            **target,
            items_per_user=self.items,
            dim=_needed(self.dim, "steps"),
            lipschitz=lipschitz_of(self.problem, "steps"),
            radius=self._distance(),
            max_steps=self.max_steps,
        ).plan

    def best_step(self, filter: UserFilterPlan) -> UserSchedule:
        """Returns the step size of the bound, and the bound."""
        bound = lipschitz_of(self.problem, "lr")
        noise = filter.noise_std / math.sqrt(filter.steps)
        dim = _needed(self.dim, "lr")
        items = filter.n_users * self.items
        return schedule(bound, self._distance(), items, filter.steps, dim, noise)

    def _tau(self, n_users: int, steps: int) -> float:
        failure = self.halt_probability / check.positive_count(steps=steps)
        if isinstance(self.pair_radius, PairRadiusSearch):
            return 1.0  # the noise scales with what is found
        if self.pair_radius is not None:
            return self.pair_radius
        lipschitz = lipschitz_of(self.problem, "pair_radius")
        return pair_radius_iid(lipschitz, self.items, n_users, failure)

    def _distance(self) -> float:
        problem = Problem() if self.problem is None else self.problem
        return scale_of(problem, self.distance, "UserFilteredSGD")


def _replaced(budget: Budget | None, way: str) -> tuple[Budget | None, Adjacency]:
    """Returns budget and replace_one, which filters of all users are proved for; raises AdjacencyError for others."""
    budget, adjacency = agreed(budget, None, "user", REPLACE_ONE)
    if adjacency != REPLACE_ONE:
        raise AdjacencyError(f"budget must be of replace_one, {way} (got {adjacency})")
    return budget, adjacency


def _require_hope(filter: UserFilterPlan, search: PairRadiusSearch | None) -> None:
    """Raises InfeasibleError for a run that is likely to halt; warns of a search that may end too high."""
    if search is not None and search.overshoot > 0.05:
        warn(
            f"the search may end above all distances, with probability {search.overshoot:.2g}:"
            f" give it more epsilon (got {search.epsilon:g} for {search.n_users} users)"
        )
    if filter.halt_probability() > _HOPELESS:
        raise InfeasibleError(
            "filter must be such that a run goes on: with a typical score of"
            f" {filter.typical_score or filter.n_users} it halts with probability"
            f" {filter.halt_probability():.2g}, below threshold={filter.threshold:.5g} of"
            f" {filter.n_users} users"
        )


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
        phases: int | UserPhases | None = None,
        problem: Problem | None = None,
        reg: float = 0.0,
        min_items: int = 1,
        pair_radius: float | None = None,
        max_steps: int = 200,
        distance: float | None = None,
        filter: str = "best",
        score_share: float = 0.99,
        halt_probability: float = 0.01,
        reach: float = 1000.0,
        dim: Any = None,
    ) -> UserLocalizedPlan:
        """Returns the phases, as many as are provably private, before anything is spent.

        Args:
            n_users: public number of users.
            budget: of unit "user", replace_one.
            phases: their number; None for the largest that is feasible; or phases of yours, from
                `algorithms.user_localized_numbers.plan_phases`, in place of n_users and all that chooses them. The
                budget then only limits the run.
            problem: promises: lipschitz; strong_convexity unless there is `reg`; radius with `reg`.
            reg: lambda of the term (lambda/2) |w|^2, which adds to the strong convexity; the optimizer has it too.
            min_items: rows that a user must have, public: m of the theory.
            pair_radius: tau, public; None for `pair_radius_iid` in each phase.
            max_steps: cap on the steps of a phase.
            distance: bound on |w_0 - w*|; default the diameter of the problem's ball (2 lipschitz / convexity caps it).
            filter: see `calibrate.calibrate_filter`.
            score_share: public guess of the score over the users of a phase.
            halt_probability: of each phase.
            reach: users farther than reach * pair_radius from the center are isolated.
            dim: number of parameters, or the model; needed unless phases are given.

        Raises:
            InfeasibleError: names the phase, its users and steps, and the smallest number of users that works.
            MissingConstantError: promises are missing.
        """
        budget, adjacency = _replaced(budget, "as the filter on all users is")
        dim = dimension(dim)
        asked: dict[str, Any] = {
            "pair_radius": pair_radius,
            "score_share": score_share,
            "halt_probability": halt_probability,
            "filter": filter,
            "max_steps": max_steps,
        }
        _check_ranges(asked, reg, distance)
        if isinstance(phases, UserPhases):
            made = _of_caller(phases, n_users)
        else:
            asked |= {"items_per_user": min_items, "radius": distance, "phases": phases}
            made = _chosen_phases(n_users, budget, problem, dim, reg, asked)
        filters = [phase.plan for phase in made.phases]
        warn_if_users_are_buried(filters, problem, made.n_users, dim, budget)
        parts = tuple((Full(phase.users), phase.steps) for phase in made.phases)
        return UserLocalizedPlan(
            budget=budget,
            adjacency=adjacency,
            design=Parts(parts, made.n_users),
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


def _check_ranges(asked: dict[str, Any], reg: float, distance: float | None) -> None:
    """Raises for numbers out of range, given phases or not."""
    check.nonnegative(reg=reg)
    check.positive_count(max_steps=asked["max_steps"])
    check.between(0.0, 1.0, score_share=asked["score_share"])
    check.open_interval(0.0, 1.0, halt_probability=asked["halt_probability"])
    check.choice(("best", "same", "two"), filter=asked["filter"])
    for name, value in {"pair_radius": asked["pair_radius"], "distance": distance}.items():
        if value is not None:
            check.positive(**{name: value})


def _of_caller(phases: UserPhases, n_users: int | None) -> UserPhases:
    if n_users is not None:
        raise ValueError(f"n_users must be None beside phases, which have it (got {n_users})")
    return phases


def _chosen_phases(
    n_users: int | None,
    budget: Budget | None,
    problem: Problem | None,
    dim: int | None,
    reg: float,
    asked: dict[str, Any],
) -> UserPhases:
    """Returns phases for the budget; `asked` is what `plan_phases` takes beside it and the promises."""
    if n_users is None or budget is None or problem is None or dim is None:
        way = ", or phases=, a algorithms.user_localized_numbers.UserPhases"
        check.required(way, n_users=n_users, budget=budget, problem=problem, dim=dim)
    lipschitz, convexity = _constants(problem, reg)
    check.positive_count(min_items=asked["items_per_user"])
    if asked["radius"] is None:
        asked = asked | {"radius": 2 * problem.radius}
    return plan_phases(
        n_users=n_users,
        dim=dim,
        epsilon=budget.epsilon,
        delta=budget.delta,
        lipschitz=lipschitz,
        strong_convexity=convexity,
        **asked,
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


def near(plan: UserFilterPlan) -> str:
    """Returns in words the noise of a filter, beside the distance of users that it allows."""
    return (
        f"std {plan.noise_std:.3g} per coordinate of the mean of users within"
        f" {plan.pair_radius:.3g} of each other"
    )


def disagreement(stops: str, risk: float) -> str:
    """Returns in words what happens where the users of a step disagree.

    Args:
        stops: what ends then.
        risk: bound on the probability of that among users who agree as guessed.
    """
    return (
        f"{stops} ends early if users disagree, which has probability at most {risk:.2g} if they"
        " agree as guessed; each step compares all pairs of users"
    )


def warn_if_users_are_buried(
    plans: Sequence[UserFilterPlan],
    problem: Problem | None,
    n_users: int,
    dim: int | None,
    budget: Budget | None,
) -> None:
    """Warns where a bound on gradients is promised and the noise exceeds it in each of the phases."""
    if dim is None or budget is None:
        return
    with suppress(MissingConstantError):
        bound = lipschitz_of(problem, "a warning")
        noise = min(plan.noise_std / math.sqrt(plan.steps) for plan in plans)
        checks.warn_if_buried(
            noise, bound, n=n_users, dim=dim, epsilon=budget.epsilon, of="the mean of all steps"
        )


def lipschitz_of(problem: Problem | None, wanted: str) -> float:
    """Returns the promised bound on gradients; raises MissingConstantError, which names what is wanted."""
    if problem is None:
        raise MissingConstantError(
            f"{wanted} must be given, or a problem=Problem(lipschitz=...) from which it follows"
        )
    return problem.grad_bound()
