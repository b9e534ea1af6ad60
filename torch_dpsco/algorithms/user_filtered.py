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
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import nn

from torch_dpsco import _validate as check
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.designs import Full, Parts
from torch_dpsco.accounting.events import REPLACE_ONE
from torch_dpsco.algorithms.heavy_plan import scale_of
from torch_dpsco.algorithms.user_clipped import UserPlan
from torch_dpsco.algorithms.user_numbers import (
    UserFilter,
    UserPhase,
    UserPhases,
    calibrate_filter,
    pair_radius_iid,
    schedule,
    suited,
)
from torch_dpsco.algorithms.user_oracles import UserFiltered
from torch_dpsco.errors import AdjacencyError, InfeasibleError, MissingConstantError, warn
from torch_dpsco.problem import Phase, Problem, Schedule
from torch_dpsco.prox import Prox
from torch_dpsco.step import checks
from torch_dpsco.step.chooser import agreed, dimension
from torch_dpsco.step.oracle import Phased, Release
from torch_dpsco.step.plan import PlannedOptimizer, expected

_HOPELESS = 0.5  # of a run to halt


@dataclass(frozen=True, kw_only=True)
class FilterPlan(UserPlan):
    """Public numbers of a run on filtered means of users.

    Args:
        risk_bound: on the expected excess risk of the answer; None where no theorem chose the step size.
    """

    values: ClassVar[tuple[type, ...]] = (UserFilter, UserPhase)
    risk_bound: float | None = None

    def filtered(self, filter: UserFilter) -> UserFiltered:
        """Returns the oracle of a filter."""
        return UserFiltered(filter, min_items=self.min_items, ids=self.n)

    def ending(self, stops: str, *filters: UserFilter) -> Iterator[tuple[str, str]]:
        """Yields the last lines of the table: what ends where users disagree in one of the filters, and the promise."""
        worst = max(filter.halt_probability() for filter in filters)
        yield (
            "tests",
            (
                f"{stops} ends early if users disagree, which has probability at most {worst:.2g} if"
                " they agree as guessed; each step compares all pairs of users"
            ),
        )
        yield "assumed", self.assumed
        yield from expected(self.risk_bound)


@dataclass(frozen=True, kw_only=True)
class UserFilteredPlan(FilterPlan):
    """Public numbers of a run of UserFilteredSGD.

    Args:
        filter: of all users in each step.
    """

    filter: UserFilter

    def oracle(self, prox: Prox) -> UserFiltered:
        """Returns a new oracle with the plan's numbers."""
        return self.filtered(self.filter)

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yields what is to be said beside the promise."""
        yield from super().lines()
        yield "noise", near(self.filter)
        yield from self.ending("the run", self.filter)


class UserFilteredSGD(PlannedOptimizer):
    """SGD on filtered means of users: noise is proportional to the distance between users, not to gradient length.

    Args:
        params: parameters or groups; all of them count as one vector.
        plan: from `UserFilteredSGD.plan`.
        rule: another update rule; it has averages of its own.
        prox: default the projection on the ball of problem.radius, if that is finite.
        reg: lambda of (lambda/2)|w|^2, see `PrivateOptimizer`.
        accountant: ledger to charge, of unit "user"; default a new one with the plan's budget.
        generator: noise generator of your own (warns).

    Guarantee:
        Unit: user. Adjacency: replace_one with n_users public. Event: one noisy test for the run, the Gaussians of all
        planned steps, and a failure of kind "transcript", charged when the run opens, with no refund for a halt: the
        average so far is the answer then (a new process continues it by `resume`). A step that ends between its charge
        and its answer (Ctrl-C, an error) ends the run in this process: `resume` a new optimizer (with the ledger file),
        or `finalize()`. Assumes nothing about users' rows but that they do not depend on other users.
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
        n_users: int,
        budget: Budget,
        problem: Problem | None = None,
        min_items: int = 1,
        pair_radius: float | None = None,
        lr: float | None = None,
        steps: int | None = None,
        max_steps: int = 200,
        distance: float | None = None,
        score_share: float = 0.99,
        halt_probability: float = 0.01,
        average: str = "uniform",
        dim: Any = None,
    ) -> UserFilteredPlan:
        """Returns the filter's public numbers and the step size, before anything is spent.

        Args:
            n_users: public number of users, all of whom are in each step.
            budget: of unit "user", replace_one.
            problem: promises: lipschitz and radius choose what of pair_radius, lr and steps is not given.
            min_items: rows that a user must have, public: m of the theory; others are isolated.
            pair_radius: tau, public; None for `pair_radius_iid`.
            lr: step size; None for that of the bound.
            steps: number of steps; None for as many as help, up to max_steps.
            max_steps: see steps; a step costs n_users^2 dim operations.
            distance: bound on |w_0 - w*|; default the diameter of the problem's ball.
            score_share: public guess of the score of honest users over n_users, see `calibrate_filter`.
            halt_probability: see there.
            average: "uniform" (as in the theorem), "last" or "weighted".
            dim: number of parameters, or the model; needed to choose lr or steps, and for a warning where noise buries
                the signal.

        Raises:
            InfeasibleError: nothing is proved; names n, T, epsilon and the smallest n_users that works.
            MissingConstantError: promises are missing; says which, and how to do without.
            UnitError: the budget is of another unit.
            AdjacencyError: the budget is not of replace_one.
        """
        budget = _replaced(budget, "or use UserClippedSGD")
        items = check.positive_count(min_items=min_items)
        most = max_steps if steps is None else check.positive_count(steps=steps)
        check.positive_count(max_steps=max_steps)
        dim = dimension(dim)
        tau = pair_radius
        if tau is None:
            failure = check.open_interval(0.0, 1.0, halt_probability=halt_probability) / most
            tau = pair_radius_iid(lipschitz_of(problem, "pair_radius"), items, n_users, failure)
        calibrated = partial(
            calibrate_filter,
            n_users=n_users,
            epsilon=budget.epsilon,
            delta=budget.delta,
            pair_radius=tau,
            score_share=score_share,
            halt_probability=halt_probability,
        )
        if steps is None:
            bound = lipschitz_of(problem, "steps")
            made = suited(calibrated, bound, n_users * items, _needed(dim, "steps"), most)
        else:
            made = calibrated(steps=steps)
        _require_hope(made)
        lr, risk_bound = _pace(lr, problem, distance, n_users * items, dim, made)
        warn_if_users_are_buried([made], problem, n_users, dim, budget)
        return UserFilteredPlan(
            budget=budget,
            adjacency=REPLACE_ONE,
            design=Full(n_users),
            steps=made.steps,
            lr=lr,
            radius=math.inf if problem is None else problem.radius,
            average=average,
            min_items=min_items,
            risk_bound=risk_bound,
            filter=made,
        )

    def _apply(self, params: list[nn.Parameter], release: Release) -> None:
        # of what is released: that the first test has failed; an answer that is lost has no mean
        if not self.steps and release.halted and release.mean:
            warn(
                "users disagree: the first test has failed, since they are not within"
                f" pair_radius={self._plan.filter.pair_radius:.3g} of each other; nothing is learned"
                " any more. Give a larger pair_radius, or take UserClippedSGD, which tests nothing"
            )
        super()._apply(params, release)


def _pace(
    lr: float | None,
    problem: Problem | None,
    distance: float | None,
    items: int,
    dim: int | None,
    made: UserFilter,
) -> tuple[float, float | None]:
    """Returns the step size, by default that of the bound on the risk, and that bound."""
    if distance is not None:
        check.positive(distance=distance)
    if lr is not None:
        return check.positive(lr=lr), None
    bound = lipschitz_of(problem, "lr")
    far = scale_of(problem or Problem(), distance, "UserFilteredSGD")
    noise = made.noise_std / math.sqrt(made.steps)
    return schedule(bound, far, items, made.steps, _needed(dim, "lr"), noise)


def _require_hope(made: UserFilter) -> None:
    """Raises InfeasibleError where a run would probably halt at once."""
    risk = made.halt_probability()
    if risk > _HOPELESS:
        raise InfeasibleError(
            "filter must be such that a run goes on: at the score"
            f" {made.typical_score:g} it halts with probability {risk:.2g}, below"
            f" threshold={made.threshold:.5g} of {made.n_users} users"
        )


def _replaced(budget: Budget, way: str) -> Budget:
    """Returns the budget; raises AdjacencyError unless it is of replace_one, which the filter is proved for."""
    made, adjacency = agreed(budget, None, "user", REPLACE_ONE)
    if made is None or adjacency != REPLACE_ONE:
        raise AdjacencyError(f"budget must be of replace_one, {way} (got {adjacency})")
    return made


def _needed(dim: int | None, wanted: str) -> int:
    if dim is None:
        raise MissingConstantError(
            f"dim must be the number of parameters, or the model, to choose {wanted} (got None)"
        )
    return dim


@dataclass(frozen=True, kw_only=True)
class UserLocalizedPlan(FilterPlan):
    """Public numbers of a run of LocalizedUserSGD.

    Args:
        phases: filter, steps and step size of each, on users of its own.
    """

    phases: tuple[UserPhase, ...]

    def oracle(self, prox: Prox) -> Phased:
        """Returns a new oracle with the plan's numbers."""
        own = [phase.filter for phase in self.phases]
        return Phased([(self.filtered(filter), filter.steps) for filter in own])

    def schedule(self) -> Schedule:
        """Returns the phases."""
        return Schedule(tuple(Phase(phase.filter.steps, phase.lr) for phase in self.phases))

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yields what is to be said beside the promise."""
        yield from super().lines()
        for k, phase in enumerate(self.phases, 1):
            steps = f"{phase.filter.steps} steps of size {phase.lr:.3g}"
            yield f"phase {k}", f"{steps}, noise of {near(phase.filter)}"
        yield from self.ending("a phase", *(phase.filter for phase in self.phases))


class LocalizedUserSGD(PlannedOptimizer):
    """Phases of filtered means on disjoint users, for strongly convex losses: Algorithm 4.

    Args:
        params: parameters or groups; all of them count as one vector.
        plan: from `LocalizedUserSGD.plan`.
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
        >>> [phase.filter.n_users for phase in plan.phases]
        [250, 500, 1000, 2000]
    """

    plans = UserLocalizedPlan
    undisturbed = "each of its phases is a ball around the private answer before it"

    @classmethod
    def plan(
        cls,
        *,
        n_users: int,
        budget: Budget,
        problem: Problem,
        phases: int | None = None,
        reg: float = 0.0,
        min_items: int = 1,
        pair_radius: float | None = None,
        max_steps: int = 200,
        distance: float | None = None,
        score_share: float = 0.99,
        halt_probability: float = 0.01,
        dim: Any = None,
    ) -> UserLocalizedPlan:
        """Returns the phases, as many as are provably private, before anything is spent.

        Args:
            n_users: public number of users.
            budget: of unit "user", replace_one.
            phases: their number; None for the largest that is feasible.
            problem: promises: lipschitz; strong_convexity unless there is `reg`; radius with `reg`.
            reg: lambda of the term (lambda/2) |w|^2, which adds to the strong convexity; the optimizer has it too.
            min_items: rows that a user must have, public: m of the theory.
            pair_radius: tau, public; None for `pair_radius_iid` in each phase.
            max_steps: cap on the steps of a phase.
            distance: bound on |w_0 - w*|; default the diameter of the problem's ball (2 lipschitz / convexity caps it).
            score_share: public guess of the score over the users of a phase.
            halt_probability: of each phase.
            dim: number of parameters, or the model.

        Raises:
            InfeasibleError: names the phase, its users and steps, and the smallest number of users that works.
            MissingConstantError: promises are missing.
        """
        budget = _replaced(budget, "as the filter on all users is")
        dim = _needed(dimension(dim), "steps")
        check.nonnegative(reg=reg)
        lipschitz, convexity = _constants(problem, reg)
        made = UserPhases(
            n_users=check.positive_count(n_users=n_users),
            items_per_user=check.positive_count(min_items=min_items),
            dim=dim,
            epsilon=budget.epsilon,
            delta=budget.delta,
            lipschitz=lipschitz,
            strong_convexity=convexity,
            radius=2 * problem.radius if distance is None else check.positive(distance=distance),
            pair_radius=pair_radius,
            score_share=score_share,
            halt_probability=check.open_interval(0.0, 1.0, halt_probability=halt_probability),
            max_steps=check.positive_count(max_steps=max_steps),
        ).planned(phases)
        filters = [phase.filter for phase in made]
        warn_if_users_are_buried(filters, problem, n_users, dim, budget)
        # PRIVACY: a user in two phases would pay for both (test_no_user_is_in_two_phases)
        parts = Parts(tuple((Full(own.n_users), own.steps) for own in filters), n_users)
        return UserLocalizedPlan(
            budget=budget,
            adjacency=REPLACE_ONE,
            design=parts,
            steps=sum(own.steps for own in filters),
            lr=made[0].lr,
            radius=problem.radius,
            average="uniform",
            reg=reg,
            min_items=min_items,
            risk_bound=made[-1].bound,
            phases=made,
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


def near(plan: UserFilter) -> str:
    """Returns in words the noise of a filter, beside the distance of users that it allows."""
    return (
        f"std {plan.noise_std:.3g} per coordinate of the mean of users within"
        f" {plan.pair_radius:.3g} of each other"
    )


def warn_if_users_are_buried(
    plans: Sequence[UserFilter],
    problem: Problem | None,
    n_users: int,
    dim: int | None,
    budget: Budget,
) -> None:
    """Warns where a bound on gradients is promised and the noise exceeds it in each of the phases."""
    if dim is None:
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
