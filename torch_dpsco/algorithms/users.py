"""UserClippedSGD: clips each user's mean gradient, whatever rows it is made of.

What plans that protect users have in common, those of filtered means included.

UserFilteredSGD: steps along the filtered mean of users, each of them one person with all rows.

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
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from torch import nn

from torch_dpsco import _validate as check
from torch_dpsco.accounting.budgets import Budget, one_budget
from torch_dpsco.accounting.designs import Design, Full, Parts
from torch_dpsco.accounting.events import ADD_REMOVE, REPLACE_ONE, Adjacency
from torch_dpsco.algorithms.clips import AdaptiveClipped
from torch_dpsco.algorithms.heavy_plan import scale_of
from torch_dpsco.algorithms.oracles import UserClipped, UserFiltered
from torch_dpsco.algorithms.prepared import (
    PreparedOptimizer,
    PreparedPlan,
    measurements,
    rest,
    with_measurements,
)
from torch_dpsco.algorithms.user_numbers import (
    UserFilter,
    UserPhase,
    UserPhases,
    calibrate_filter,
    pair_radius_iid,
    schedule,
    suited,
)
from torch_dpsco.errors import AdjacencyError, InfeasibleError, MissingConstantError, warn
from torch_dpsco.estimators.preparation import PrivatePreparation
from torch_dpsco.problem import Pace, Phase, Problem, Schedule
from torch_dpsco.prox import Prox
from torch_dpsco.step import checks
from torch_dpsco.step.chooser import (
    Draws,
    Given,
    UserScale,
    agreed,
    choose_design,
    choose_noise,
    choose_pace,
    dimension,
    warn_if_buried,
    with_batches,
)
from torch_dpsco.step.oracle import Clipped, ClippedMean, Phased, Release
from torch_dpsco.step.plan import PlannedOptimizer, StepPlan, expected, noise_on_mean

_FULL_STEPS = 30
_EPOCHS = 10
_START = 0.03  # of a search: first clip
_LONGER = 10.0  # the same times so much for rows in private units,
_CLEAR = 0.95  # where this quantile can be told
_NEARER = 3.0  # distance in these units
_QUANTILES = (0.9, 0.98)  # that the clip may follow, of the lengths of users' gradients
_VOTES = 0.02  # and share of the squared budget


@dataclass(frozen=True, kw_only=True)
class UserPlan(StepPlan):
    """Public numbers of a run that protects users.

    Args:
        min_items: rows that a user must have to count, public.
    """

    unit: ClassVar[str] = "user"
    min_items: int = 1

    @property
    def assumed(self) -> str:
        """What is assumed, in words."""
        known = "" if self.adjacency == ADD_REMOVE else "; their number is public"
        return f"ids are right; rows of a user do not depend on other users{known}"


@dataclass(frozen=True, kw_only=True)
class UserClippedPlan(PreparedPlan, UserPlan):
    """Public numbers of a run of UserClippedSGD.

    Args:
        clip: of a user's mean gradient; the first one of a search.
        quantile: of the lengths of users' gradients, which the clip follows (`oracles.AdaptiveClipped`); then means are
            divided by the clip: lr is in its units. None: the clip is fixed.
    """

    length: ClassVar[float] = 2.0

    clip: float
    quantile: float | None = None

    def oracle(self, prox: Prox) -> UserClipped:
        """Returns a new oracle with the plan's numbers."""
        clipping: ClippedMean = Clipped(self.clip, self.noise_multiplier, self.batch_size)
        if self.quantile is not None:
            vote = max(self.quantile, 1.0 - self.quantile)
            count_noise = vote * self.noise_multiplier / math.sqrt(_VOTES)
            spread = (
                count_noise / self.batch_size
            )  # of the noise on the share of users below the clip
            clipping = AdaptiveClipped(
                self.clip,
                None,
                self.batch_size,
                self.quantile,
                lr=0.1 / max(0.5, spread),
                first=1.0 / max(1.0, spread),
                count_noise=count_noise,
                total_noise_multiplier=self.noise_multiplier,
            )
        return UserClipped(clipping, self.n, min_items=self.min_items)

    def noise_shares(self) -> Iterator[tuple[str, float, int | None]]:
        """Yields the noise on the mean of users; see `Plan.noise_shares`."""
        yield "each step", self.noise_multiplier / self.batch_size, None

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yields what is to be said beside the promise."""
        yield from super().lines()
        share = self.noise_multiplier / self.batch_size
        if self.quantile is None:
            yield noise_on_mean(share, self.clip)
        else:
            yield (
                "noise",
                (
                    f"std {share:.3g} of the clip per coordinate of a mean of gradients, of norm at"
                    " most the clip"
                ),
            )
            yield (
                "clip",
                (
                    f"found in the run, for {_VOTES:.0%} of its squared budget: from {self.clip:g}"
                    f" on it follows the {self.quantile:.3g} quantile of the lengths of users' mean"
                    " gradients"
                ),
            )
        yield "assumed", self.assumed


class UserClippedSGD(PreparedOptimizer):
    """SGD on the mean of users' clipped mean gradients: user-level DP-SGD, the default recommendation.

    Args:
        params: parameters or groups; all of them count as one vector.
        plan: from `UserClippedSGD.plan`.
        rule: another update rule, e.g. `rules.TorchRule(torch.optim.Adam(...))`; it has averages of its own.
        prox: constraint or penalty.
        reg: lambda of (lambda/2)|w|^2, see `PrivateOptimizer`.
        accountant: ledger to charge, of unit "user"; default a new one with the plan's budget.
        generator: noise generator of your own (warns).

    Guarantee:
        Unit: user, all rows of one. Adjacency: add_remove, zero_out or replace_one with Poisson batches of users, the
        latter two with fixed ones. Event of a step: that of HolderSGD, with users for records. Assumes: batches of the
        optimizer's own loader, ids that are right, rows of a user that do not depend on other users.
        Source: docs/proofs/user_level.md#clipped-means-of-users.

    Example:
        >>> import torch, torch_dpsco as dp
        >>> model = dp.attach(torch.nn.Linear(3, 1))
        >>> data = torch.utils.data.TensorDataset(torch.randn(90, 3), torch.ones(90, 1))
        >>> plan = dp.UserClippedSGD.plan(
        ...     n=30, budget=dp.Budget(2.0, 1e-4, unit="user"), clip=1.0, lr=0.5, steps=4)
        >>> optimizer = dp.UserClippedSGD(model.parameters(), plan)
        >>> for x, y, users in optimizer.loader(data, users=torch.arange(90) % 30):
        ...     optimizer.zero_grad()
        ...     dp.losses.Logistic()(model(x), y).backward()
        ...     optimizer.step(users=users)
        >>> optimizer.report().epsilon == plan.epsilon() <= 2.0
        True
    """

    plans = UserClippedPlan
    _plan: UserClippedPlan

    @classmethod
    def plan(
        cls,
        *,
        n: int,
        clip: float | None = None,
        lr: float | None = None,
        epsilon: float | None = None,
        delta: float | None = None,
        budget: Budget | None = None,
        noise_multiplier: float | None = None,
        batch_size: int | None = None,
        steps: int | None = None,
        epochs: float | None = None,
        sampling: str | Design | None = None,
        min_items: int = 1,
        average: str | None = None,
        adjacency: Adjacency | None = None,
        dim: Any = None,
        distance: float | None = None,
        prepare: str | None = "auto",
        bound_x: float | None = None,
        secure: str | None = None,
    ) -> UserClippedPlan:
        """Returns noise, steps and epsilon of a run, before anything is spent.

        What is not given follows from the number of users and the budget alone (docs/proofs/steps.md#users).

        Args:
            n: public number of users (a reference under add_remove).
            clip: C > 0, of each user's mean gradient, public; default a search in the run, whose cost is in the noise.
            lr: step size, > 0, without momentum; default by the step rule. With a search in units of the clip.
            epsilon: of a budget, beside delta, in place of `budget`.
            delta: of a budget, beside epsilon.
            budget: target; the noise is chosen for it unless it is given, and then the budget only
                limits the run.
            noise_multiplier: z >= 0, noise std on the sum over users over C; 0 is not private.
            batch_size: expected number of users of a batch, the public divisor; default all of them, or at least 1024
                that make 20 passes in the steps of the rule.
            steps: number of steps, in place of epochs; default by the step rule, 64 to 256. Without both, and with a
                noise of yours, there is no limit but the budget.
            epochs: passes over users; where clip and lr are given default 30 (all users: 30 steps), 10 for smaller
                batches.
            sampling: "poisson" (default, but "assigned" for exactly one pass), "fixed" (either with a batch of all
                users: "full"), "shuffled", "allocated" (each user once per pass, secretly: `Assigned`, at the price of
                Poisson), "assigned" (one such pass) or "full"; or a design of users.
            min_items: rows that a user must have, public; others contribute 0.
            average: "last", "uniform" or "weighted"; default "last", or "weighted" where the rule chooses lr.
            adjacency: default the budget's, or "zero_out".
            dim: number of parameters, or the model: the step rule takes 64 without it. A warning tells where noise
                buries the signal.
            distance: guess of how far the parameters have to go, for the step rule; default 6.
            prepare: "auto" measures privately, within the budget and where that pays by public numbers, where rows of
                users lie, if bound_x is given, and counts on rows in these units (`dp.standardize`, which `dp.fit`
                calls by itself): for a linear model with a bias. None measures nothing.
            bound_x: public bound on the norm of raw rows, without the 1 of a bias, to which longer ones are clipped
                where they are measured.
            secure: "exact" for noise in integers on a public grid, see docs/performance.md for its cost.

        Raises:
            InfeasibleError: the target cannot be reached; names the way out.
            UnitError: the budget is of another unit.
            AdjacencyError: sampling and adjacency do not go together.
        """
        budget, adjacency = agreed(budget, adjacency, epsilon, delta, unit="user")
        given = Given(
            n=check.positive_count(n=n),
            adjacency=adjacency,
            sampling=sampling,
            batch_size=batch_size,
            steps=steps,
            epochs=epochs,
            noise_multiplier=noise_multiplier,
        )
        units = 1.0 if clip is None else check.positive(clip=clip)
        scale = UserScale(units, distance, dimension(dim))
        measured = _measured(prepare, bound_x, scale.dim, budget, given)
        if measured:
            scale = replace(scale, distance=distance or _NEARER)
        left = rest(budget, measured)
        draws = _design(scale if _is_by_rule(clip, lr, noise_multiplier) else None, left, given)
        noise = choose_noise(left, *draws, given)
        pace = choose_pace(scale, draws, noise) if lr is None else Pace(lr)
        target = budget if noise_multiplier is None else None
        warn_if_buried(target, draws, noise, n, scale.dim)
        quantile = _quantile(noise, draws) if clip is None else None
        made = UserClippedPlan(
            budget=budget,
            adjacency=adjacency,
            design=draws.design,
            steps=draws.steps,
            lr=check.positive(lr=pace.lr),
            momentum=pace.momentum,
            average=average or ("weighted" if lr is None else "last"),
            secure=secure,
            clip=units if quantile is None else _start(quantile, measured),
            noise_multiplier=noise,
            quantile=quantile,
            min_items=check.positive_count(min_items=min_items),
        )
        return with_measurements(made, budget, measured)

    def _move(self, params: list[nn.Parameter], release: Release, phase: Phase, k: int) -> None:
        if self._plan.quantile is not None:  # the clip is a release as well
            clip = self.oracle.metrics()["clip"]
            release = release._replace(mean=[mean.div_(clip) for mean in release.mean])
        super()._move(params, release, phase, k)


def _is_by_rule(clip: float | None, lr: float | None, noise_multiplier: float | None) -> bool:
    """Returns whether the step rule chooses clip or step size, which it cannot beside a noise that is given."""
    if noise_multiplier is not None and None in (clip, lr):
        raise MissingConstantError(
            f"clip and lr must be given beside noise_multiplier={noise_multiplier} (got {clip} and"
            f" {lr})"
        )
    return None in (clip, lr)


def _measured(
    prepare: str | None,
    bound_x: float | None,
    dim: int | None,
    budget: Budget | None,
    given: Given,
) -> PrivatePreparation | None:
    """Returns what is measured of rows with a bound, where that pays; raises ValueError if nothing is to be."""
    asked = check.choice(("auto", None), prepare=prepare)
    if bound_x is None:
        return None
    if asked is None:
        raise ValueError(
            f"bound_x must be left out beside prepare=None, which measures nothing (got {bound_x})"
        )
    return measurements(budget, given, bound_x=bound_x, dim=dim)


def _quantile(noise: float, draws: Draws) -> float:
    """Returns the quantile of lengths that the clip follows: within twice the noise on the mean of all votes of 1.

    Users of a rare class have longer gradients than all others, who outvote them without end where the clip is below
    (docs/proofs/steps.md#users).
    """
    assert draws.steps is not None  # under a rule there is a last step
    std = noise / math.sqrt(_VOTES * draws.steps) / draws.design.batch_size
    least, most = _QUANTILES
    return min(max(least, 1.0 - 2.0 * std), most)


def _start(quantile: float, measured: PrivatePreparation | None) -> float:
    """Returns the first clip of a search: in private units a longer one, as far as votes tell a high quantile."""
    if not measured:
        return _START
    least, _ = _QUANTILES
    return _START * math.pow(_LONGER, min(1.0, (quantile - least) / (_CLEAR - least)))


def _design(scale: UserScale | None, budget: Budget | None, given: Given) -> Draws:
    """Returns batches of users, by the step rule if there is a scale; all users where nothing says other."""
    if scale is not None and budget is not None:
        given = with_batches(scale, budget, given)
    if given.sampling in (None, "poisson", "fixed") and given.batch_size in (None, given.n):
        given = replace(given, sampling="full")
    passes: int | None = None
    if given.noise_multiplier is None:
        is_full = given.sampling == "full" or isinstance(given.sampling, Full)
        passes = _FULL_STEPS if is_full else _EPOCHS
    return choose_design(scale, budget, given, passes)


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
        ...     n=2000, budget=dp.Budget(4.0, 1e-4, unit="user"), pair_radius=3.0, lr=0.1, steps=3)
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
        n: int,
        epsilon: float | None = None,
        delta: float | None = None,
        budget: Budget | None = None,
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
            n: public number of users, all of whom are in each step.
            epsilon: of a budget, beside delta, in place of `budget`.
            delta: of a budget, beside epsilon.
            budget: target, replace_one.
            problem: promises: lipschitz and radius choose what of pair_radius, lr and steps is not given.
            min_items: rows that a user must have, public: m of the theory; others are isolated.
            pair_radius: tau, public; None for `pair_radius_iid`.
            lr: step size; None for that of the bound.
            steps: number of steps; None for as many as help, up to max_steps.
            max_steps: see steps; a step costs n^2 dim operations.
            distance: bound on |w_0 - w*|; default the diameter of the problem's ball.
            score_share: public guess of the score of honest users over n, see `calibrate_filter`.
            halt_probability: see there.
            average: "uniform" (as in the theorem), "last" or "weighted".
            dim: number of parameters, or the model; needed to choose lr or steps, and for a warning where noise buries
                the signal.

        Raises:
            InfeasibleError: nothing is proved; names n, T, epsilon and the smallest n that works.
            MissingConstantError: promises are missing; says which, and how to do without.
            UnitError: the budget is of another unit.
            AdjacencyError: the budget is not of replace_one.
        """
        budget = _replaced(budget, epsilon, delta, "or use UserClippedSGD")
        check.positive_count(n=n)
        items = check.positive_count(min_items=min_items)
        most = max_steps if steps is None else check.positive_count(steps=steps)
        check.positive_count(max_steps=max_steps)
        dim = dimension(dim)
        tau = pair_radius
        if tau is None:
            failure = check.open_interval(0.0, 1.0, halt_probability=halt_probability) / most
            tau = pair_radius_iid(lipschitz_of(problem, "pair_radius"), items, n, failure)
        calibrated = partial(
            calibrate_filter,
            n_users=n,
            epsilon=budget.epsilon,
            delta=budget.delta,
            pair_radius=tau,
            score_share=score_share,
            halt_probability=halt_probability,
        )
        if steps is None:
            bound = lipschitz_of(problem, "steps")
            made = suited(calibrated, bound, n * items, _needed(dim, "steps"), most)
        else:
            made = calibrated(steps=steps)
        _require_hope(made)
        lr, risk_bound = _pace(lr, problem, distance, n * items, dim, made)
        warn_if_users_are_buried([made], problem, n, dim, budget)
        return UserFilteredPlan(
            budget=budget,
            adjacency=REPLACE_ONE,
            design=Full(n),
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


def _replaced(
    budget: Budget | None, epsilon: float | None, delta: float | None, way: str
) -> Budget:
    """Returns the budget; raises AdjacencyError unless it is of replace_one, which the filter is proved for."""
    found = one_budget(budget, epsilon, delta)
    made, adjacency = agreed(found, None, unit="user", default=REPLACE_ONE)
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
        ...     n=4000, budget=dp.Budget(4.0, 1e-4, unit="user"), dim=4, reg=0.1,
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
        n: int,
        epsilon: float | None = None,
        delta: float | None = None,
        budget: Budget | None = None,
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
            n: public number of users.
            epsilon: of a budget, beside delta, in place of `budget`.
            delta: of a budget, beside epsilon.
            budget: target, replace_one.
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
        budget = _replaced(budget, epsilon, delta, "as the filter on all users is")
        dim = _needed(dimension(dim), "steps")
        check.nonnegative(reg=reg)
        lipschitz, convexity = _constants(problem, reg)
        made = UserPhases(
            n_users=check.positive_count(n=n),
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
        warn_if_users_are_buried(filters, problem, n, dim, budget)
        # PRIVACY: a user in two phases would pay for both (test_no_user_is_in_two_phases)
        parts = Parts(tuple((Full(own.n_users), own.steps) for own in filters), n)
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
    n: int,
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
            noise, bound, n=n, dim=dim, epsilon=budget.epsilon, of="the mean of all steps"
        )


def lipschitz_of(problem: Problem | None, wanted: str) -> float:
    """Returns the promised bound on gradients; raises MissingConstantError, which names what is wanted."""
    if problem is None:
        raise MissingConstantError(
            f"{wanted} must be given, or a problem=Problem(lipschitz=...) from which it follows"
        )
    return problem.grad_bound()
