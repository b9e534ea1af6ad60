"""Calibration of a filtered phase: the least noise with a proved guarantee, or the reason why there is none.

All inputs are public, so that the search costs no privacy. It chooses epsilon_svt, its share for the threshold, the
failure beta and, with them, theta, H, the ramp and the noise:

    theta = s_typ - m(p_halt),  H = theta - m(beta),  m(p) the margin with T P[nu - rho > m] <= p,
    noise_std = sensitivity sqrt(T)/mu,  delta_pair(epsilon; epsilon_svt, mu) = delta - (1 + e^epsilon) beta.

Mode "tight" (default) has deterministic weights; "paper_corrected" is the paper's random membership, threshold 4n/5 and
Laplace scales, with the failure, sensitivity and noise that are proved for them. The published noise is not a mode: it
is refused (docs/errata.md, paper 3, E2 and E4; the tests have it, for comparison).

Source: docs/proofs/user_level.md#calibration-of-the-filter, docs/proofs/user_level.md#random-membership.

Steps and step sizes of the filtered method, with explicit constants.

With noise sigma = sigma_1 sqrt(T) per step, projected subgradient steps and average iterate, regret plus uniform
argument stability give for convex, G-Lipschitz losses, n users with m i.i.d. items each,

    E excess risk <= R^2/(2 eta T) + eta A,   A = (G^2 + d T sigma_1^2)/2 + 2 G^2 sqrt(T) + 4 G^2 T/(nm),

plus 2 G R times the probability of a halt or of a user without full weight. R bounds the distance of the start to a
minimizer (in the mean square).

Differs from the paper in: 1. constants; 2. no smoothing is needed (docs/errata.md, paper 3, E10); 3. steps end where
they stop helping.

Source: docs/proofs/user_level.md#bound-of-the-steps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import scipy
from scipy.special import log_ndtr

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.gaussian import gaussian_mu
from torch_dpsco.accounting.analysis.pure import (
    above_threshold_epsilon,
    above_threshold_scales,
    bad_pass_margin,
    concentration_score_sensitivity,
    svt_gaussian_mu,
)
from torch_dpsco.algorithms.user_numbers import (
    UserFilterPlan,
    bernoulli_sensitivity,
    best_ramp_end,
    filter_coefficient_two_radius,
    ramp_start,
)
from torch_dpsco.errors import AdjacencyError, ConditionError, InfeasibleError, warn

_SVT = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)  # epsilon_svt / epsilon
_SHARE = (0.2, 0.3, 0.4, 0.5)  # of epsilon_svt, for the threshold
_FAILURE = (0.02, 0.1, 0.3, 0.5, 0.9)  # (1 + e^epsilon) beta / delta
_FRACTIONS = tuple(
    itertools.product((0.02, 0.1, 0.3), (0.02, 0.1, 0.3))
)  # of delta: bad passes, mismatches
_PREFERENCE = 1.05
_LARGEST = 2**60
_MOST_EPSILON = 600.0  # beyond, e^epsilon beta is of no use
_UP = 1 + 1e-12


def calibrate_filter(
    *,
    n_users: int,
    steps: int,
    epsilon: float,
    delta: float,
    pair_radius: float,
    typical_score: float | None = None,
    halt_probability: float = 0.01,
    filter: str = "best",
    mode: str = "tight",
    adjacency: str = "replace_one",
    clip: float | None = None,
) -> UserFilterPlan:
    """Returns the plan with the least noise that is (epsilon, delta)-DP for a replaced user.

    Args:
        n_users: n >= 4, public.
        steps: T >= 1, all of which are charged.
        epsilon: > 0.
        delta: in (0, 1).
        pair_radius: tau, finite and > 0; affects halting and noise, never the proof. See `user_radius`.
        typical_score: s_typ, a PUBLIC guess of the score of honest users (lower it by twice a public bound on isolated
            ones); default 0.99 n.
        halt_probability: p_halt in (0, 1), bound on that of a halt at scores >= s_typ (mode "tight").
        filter: "same", "two" (radius 2 tau for the filter) or "best": "same", which needs one count for each user,
            unless "two" has 5 % less noise (mode "tight").
        mode: "tight" or "paper_corrected".
        adjacency: "replace_one"; nothing is proved for "add_remove".
        clip: C of clipping users' gradients instead; a warning says if that has no more noise.

    Raises:
        AdjacencyError: adjacency is "add_remove".
        InfeasibleError: nothing is proved; names n, T, epsilon and the smallest n that works.
        ValueError: an argument is out of range, or the mode is another one: the published noise is not proved private.

    Guarantee: that of the plan, which it recomputes; at most epsilon and delta.

    Source: docs/proofs/user_level.md#calibration-of-the-filter.

    Example:
        >>> plan = calibrate_filter(n_users=10**4, steps=1000, epsilon=1.0, delta=1e-6, pair_radius=1.0,
        ...                         typical_score=10**4)
        >>> plan.filter, plan.noise_std * 10**4 < 826, plan.delta_at(1.0) <= 1e-6
        ('same', True, True)
    """
    task = _Task(
        n_users, steps, epsilon, delta, pair_radius, typical_score, halt_probability, filter
    )
    check_user_adjacency(adjacency)
    paper = check.choice(("tight", "paper_corrected"), mode=mode) == "paper_corrected"
    plan = _paper_corrected(task) if paper else _tight(task)
    if clip is not None and plan.sensitivity >= 2 * check.positive(clip=clip) / plan.n_users:
        warn(
            f"the filter moves by {plan.sensitivity:g} where clipping users at {clip:g} moves by "
            f"{2 * clip / plan.n_users:g}: UserClippedSGD needs less noise"
        )
    return plan


def check_user_adjacency(adjacency: str) -> str:
    """Returns the adjacency; raises AdjacencyError unless the full-batch filter is proved for it."""
    if (
        check.choice(("replace_one", "zero_out", "add_remove"), adjacency=adjacency)
        == "add_remove"
    ):
        raise AdjacencyError(
            "the filter on all users is proved for replace_one with n_users public; for add_remove"
            " use UserClippedSGD"
        )
    return adjacency


class _Choice(NamedTuple):
    """One point of the search."""

    svt: float
    share: float
    failure: float


class _Tests(NamedTuple):
    """A point, and the margins of the test that it leads to, per unit of the score's sensitivity."""

    choice: _Choice
    halt: float
    bad: float


@dataclass(frozen=True)
class _Task:
    """Checked inputs."""

    n_users: int
    steps: int
    epsilon: float
    delta: float
    pair_radius: float
    typical_score: float | None
    halt_probability: float
    filter: str

    def __post_init__(self) -> None:
        ramp_start(check.positive_count(n_users=self.n_users))
        check.positive_count(steps=self.steps)
        if check.positive(epsilon=self.epsilon) > _MOST_EPSILON:
            raise ValueError(f"epsilon must be <= {_MOST_EPSILON:g} (got {self.epsilon:g})")
        check.open_interval(0.0, 1.0, delta=self.delta)
        check.positive(pair_radius=self.pair_radius)
        if self.typical_score is not None:
            check.between(0.0, self.n_users, typical_score=self.typical_score)
        check.open_interval(0.0, 1.0, halt_probability=self.halt_probability)
        check.choice(("best", "same", "two"), filter=self.filter)

    @cached_property
    def most_mu(self) -> float:
        """The mu of a budget spent on Gaussians alone."""
        return gaussian_mu(self.epsilon, self.delta)

    @cached_property
    def grid(self) -> tuple[_Tests, ...]:
        """Where the search starts, and what decides whether anything is proved."""
        points = map(_Choice._make, itertools.product(_SVT, _SHARE, _FAILURE))
        return tuple(tests for choice in points if (tests := _tests(self, choice)) is not None)

    @property
    def score_share(self) -> float:
        """s_typ / n, kept when another n is tried."""
        return 0.99 if self.typical_score is None else self.typical_score / self.n_users

    def failure(self, fraction: float) -> float:
        """Returns beta that spends a fraction of delta."""
        # the plan rounds its failure up by 1e-9
        return fraction * self.delta / (1 + math.exp(self.epsilon)) / (1 + 1e-8)

    def refusal(self, smallest: int | None) -> InfeasibleError:
        """Returns the error that names n, T, epsilon and the smallest n that works."""
        way = (
            f"the smallest n_users that works is {smallest} (at typical_score ="
            f" {self.score_share:g} n_users)"
            if smallest is not None
            else f"no n_users works at typical_score = {self.score_share:g} n_users"
        )
        return InfeasibleError(
            f"no filter is proved private for n_users={self.n_users}, steps={self.steps},"
            f" epsilon={self.epsilon:g}, delta={self.delta:g}: {way}"
        )


class _Setting(NamedTuple):
    """What follows from a point: how the tests run and how far the mean moves, in units of 2 tau."""

    threshold: float
    scales: tuple[float, float]
    score_floor: float
    filter: str
    ramp_end: int
    coefficient: float


class _Found(NamedTuple):
    """The best point so far."""

    noise: float
    choice: _Choice
    setting: _Setting


def smallest_users(feasible: Callable[[int], bool], start: int) -> int | None:
    """Returns the smallest n > start with feasible(n), by doubling and bisection; None if there is none up to 2^60.

    Example:
        >>> smallest_users(lambda n: n >= 1000, 7)
        1000
    """
    low = start
    high = 2 * start
    while not feasible(high):
        low = high
        high = 2 * high
        if high > _LARGEST:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if feasible(middle) else (middle, high)
    return high


def _tight(task: _Task) -> UserFilterPlan:
    """Returns the plan of filter "same", which counts once, unless "two" is alone or saves 5 % of the noise."""
    wanted = ("same", "two") if task.filter == "best" else (task.filter,)
    found = {filter: best for filter in wanted if (best := _search(task, filter)) is not None}
    if not found:
        raise task.refusal(
            smallest_users(
                lambda n: any(_feasible(task, n, filter) for filter in wanted), task.n_users
            )
        )
    noise = {
        filter: best.noise * (_PREFERENCE if filter == "two" else 1.0)
        for filter, best in found.items()
    }
    best = found[min(noise, key=noise.__getitem__)]
    # PRIVACY: the search is rough, this is not (test_no_plan_claims_more_than_it_proves)
    mu = svt_gaussian_mu(
        task.epsilon, (1 - best.choice.failure) * task.delta / _UP, best.choice.svt * task.epsilon
    )
    return _plan(task, best.setting, mu)


def _search(task: _Task, filter: str) -> _Found | None:
    """Returns the point of least noise: the best of a grid, then moved one coordinate at a time."""
    best: _Found | None = None
    for tests in task.grid:
        best = _better(task, filter, tests, best)
    step = 0.5
    while best is not None and step > 0.02:
        before = best
        for choice in _around(before.choice, step):
            best = _better(task, filter, _tests(task, choice), best)
        step = step if best is not before else step / 2
    return best


def _around(choice: _Choice, step: float) -> Iterator[_Choice]:
    """Yields neighbors of a point: one coordinate moved up or down, in the logarithm of its odds."""
    for field, factor in itertools.product(_Choice._fields, (math.exp(-step), math.exp(step))):
        odds = getattr(choice, field) / (1 - getattr(choice, field)) * factor
        yield choice._replace(**{field: odds / (1 + odds)})


def _better(task: _Task, filter: str, tests: _Tests | None, best: _Found | None) -> _Found | None:
    """Returns the better of a point and the best so far, by the ratio of coefficient and mu."""
    setting = _setting(task, task.n_users, filter, tests) if tests is not None else None
    if (
        tests is None
        or setting is None
        or (best and setting.coefficient / task.most_mu >= best.noise)
    ):
        return best
    mu = _rough_mu(task, tests.choice)
    better = mu > 0 and (best is None or setting.coefficient / mu < best.noise)
    return _Found(setting.coefficient / mu, tests.choice, setting) if better else best


def _rough_mu(task: _Task, choice: _Choice) -> float:
    """Returns about what `svt_gaussian_mu` returns: enough to search by, not to calibrate by; 0 if none is left."""
    svt = choice.svt * task.epsilon
    budget = math.log1p(-choice.failure) + math.log(task.delta)

    def excess(log_mu: float) -> float:
        mu = math.exp(log_mu)
        terms = (
            _log_hockey_stick(task.epsilon - svt, mu) + svt,
            _log_hockey_stick(task.epsilon + svt, mu),
        )
        return float(np.logaddexp(*terms)) - math.log1p(math.exp(svt)) - budget

    high = math.log(task.most_mu)
    low = high - 12
    if excess(low) >= 0 or excess(high) <= 0:
        return 0.0 if excess(low) >= 0 else task.most_mu
    return math.exp(scipy.optimize.brentq(excess, low, high, xtol=1e-5))


def _log_hockey_stick(epsilon: float, mu: float) -> float:
    """Returns log H_(e^epsilon)(N(mu, 1) || N(0, 1)) for epsilon > 0."""
    above = float(log_ndtr(mu / 2 - epsilon / mu))
    below = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    return above + math.log(-math.expm1(below - above)) if below < above else -math.inf


def _tests(task: _Task, choice: _Choice) -> _Tests | None:
    """Returns the margins of a point per unit of sensitivity; None if beta underflows."""
    beta = task.failure(choice.failure)
    if beta == 0:
        return None
    scales = above_threshold_scales(choice.svt * task.epsilon, 1.0, threshold_share=choice.share)
    margins = (
        bad_pass_margin(failure, task.steps, *scales) for failure in (task.halt_probability, beta)
    )
    return _Tests(choice, *margins)


def _setting(task: _Task, n: int, filter: str, tests: _Tests) -> _Setting | None:
    """Returns what a point means for n users; None if nothing is proved there."""
    sensitivity = concentration_score_sensitivity(n)
    threshold = task.score_share * n - sensitivity * tests.halt
    floor = threshold - sensitivity * tests.bad
    b = math.ceil(max(floor, 0.0)) - 1
    if b <= ramp_start(n):
        return None
    choice = tests.choice
    scales = above_threshold_scales(
        choice.svt * task.epsilon, sensitivity, threshold_share=choice.share
    )
    if filter == "two":
        return _Setting(
            threshold, scales, floor, filter, b, filter_coefficient_two_radius(n, floor)
        )
    try:
        return _Setting(threshold, scales, floor, filter, *best_ramp_end(n, floor))
    except ConditionError:
        return None


def _feasible(task: _Task, n: int, filter: str) -> bool:
    return any(_setting(task, n, filter, tests) is not None for tests in task.grid)


def _plan(task: _Task, setting: _Setting, mu: float, coupling: float = 0.0) -> UserFilterPlan:
    """Returns the plan whose releases together have this mu."""
    return UserFilterPlan(
        n_users=task.n_users,
        steps=task.steps,
        pair_radius=task.pair_radius,
        filter=setting.filter,
        threshold=setting.threshold,
        threshold_scale=setting.scales[0],
        query_scale=setting.scales[1],
        score_floor=setting.score_floor,
        ramp_end=setting.ramp_end,
        noise_std=math.sqrt(task.steps) * 2 * task.pair_radius * setting.coefficient / mu * _UP,
        epsilon=task.epsilon,
        delta=task.delta,
        coupling_failure=coupling,
        typical_score=task.score_share * task.n_users,
    )


def _paper_corrected(task: _Task) -> UserFilterPlan:
    """Returns the least noise over fractions of delta for bad passes and for mismatches."""
    found = [
        (setting.coefficient / mu, setting, mu, zeta)
        for setting, mu, zeta in (_corrected(task, task.n_users, *parts) for parts in _FRACTIONS)
        if setting is not None
    ]
    if not found:
        raise task.refusal(
            smallest_users(
                lambda n: any(_corrected(task, n, *parts)[0] for parts in _FRACTIONS),
                task.n_users,
            )
        )
    _, setting, mu, zeta = min(found, key=lambda option: option[0])
    return _plan(task, setting, mu, zeta)


def _corrected(
    task: _Task, n: int, bad: float, mixed: float
) -> tuple[_Setting | None, float, float]:
    """Returns the paper's numbers with proved constants, mu and zeta; None in place of what is not proved."""
    scales = (8 / task.epsilon, 16 / task.epsilon)
    threshold = 4 * n / 5
    beta, zeta = (
        task.failure(bad),
        mixed * task.delta / task.steps / _UP - n * 2.0**-52,
    )  # a grid of uniform numbers
    ramp_end = 2 * n // 3
    floor = (
        threshold - bad_pass_margin(beta, task.steps, *scales)
        if beta > 0 and zeta > 0
        else -math.inf
    )
    if not ramp_start(n) < ramp_end < math.ceil(max(floor, 0.0)):
        return None, 0.0, zeta
    coefficient = bernoulli_sensitivity(n, floor, ramp_end, zeta, 0.5)
    svt = above_threshold_epsilon(*scales, concentration_score_sensitivity(n))
    mu = svt_gaussian_mu(task.epsilon, (1 - bad - mixed) * task.delta / _UP, svt)
    return _Setting(threshold, scales, floor, "paper_corrected", ramp_end, coefficient), mu, zeta


class UserSchedule(NamedTuple):
    """Step size, and the bound on the expected excess risk."""

    lr: float
    bound: float


class FilteredSchedule(NamedTuple):
    """A plan, the step size, and the bound on the expected excess risk; None if it did not choose the step size."""

    plan: UserFilterPlan
    lr: float
    bound: float | None


def schedule(
    lipschitz: float,
    radius: float,
    n_items: int,
    steps: int,
    dim: int,
    noise_std_per_root_step: float,
) -> UserSchedule:
    """Returns eta = R/sqrt(2 T A) and the bound R sqrt(2A/T) of the module's docstring.

    Args:
        lipschitz: G > 0.
        radius: R > 0.
        n_items: n m >= 1.
        steps: T >= 1.
        dim: d >= 1.
        noise_std_per_root_step: sigma_1 >= 0, noise std per step over sqrt(T).

    Source: docs/proofs/user_level.md#bound-of-the-steps.

    Example:
        >>> round(schedule(1.0, 1.0, 10**6, 100, 10, 0.0).bound, 6)
        0.640319
    """
    G = check.positive(lipschitz=lipschitz)
    R = check.positive(radius=radius)
    items = check.positive_count(n_items=n_items)
    T = check.positive_count(steps=steps)
    noise = (
        check.positive_count(dim=dim)
        * check.nonnegative(noise_std_per_root_step=noise_std_per_root_step) ** 2
    )
    A = (G**2 + T * noise) / 2 + 2 * G**2 * math.sqrt(T) + 4 * G**2 * T / items
    return UserSchedule(R / math.sqrt(2 * T * A), R * math.sqrt(2 * A / T))


def best_steps(
    lipschitz: float,
    n_items: int,
    dim: int,
    noise_std_per_root_step: float,
    max_steps: int | None = 200,
) -> int:
    """Returns T = min{(nm)^2/4, (4 G^2/(d sigma_1^2))^2, max_steps}, at least 1: beyond, nothing improves.

    Example:
        >>> best_steps(1.0, 10**6, 10, 0.1, max_steps=None), best_steps(1.0, 10**6, 10, 0.01)
        (1600, 200)
    """
    G = check.positive(lipschitz=lipschitz)
    items = check.positive_count(n_items=n_items)
    noise = (
        check.positive_count(dim=dim)
        * check.nonnegative(noise_std_per_root_step=noise_std_per_root_step) ** 2
    )
    enough = [items * items / 4]
    if noise > 0:
        enough.append((4 * G**2 / noise) ** 2)
    if max_steps is not None:
        enough.append(check.positive_count(max_steps=max_steps))
    return max(1, round(min(enough)))


def filtered_schedule(
    *,
    n_users: int,
    items_per_user: int,
    dim: int,
    epsilon: float,
    delta: float,
    lipschitz: float,
    radius: float,
    pair_radius: float,
    typical_score: float | None = None,
    halt_probability: float = 0.01,
    filter: str = "best",
    max_steps: int = 200,
) -> FilteredSchedule:
    """Returns a calibrated plan with the steps that suit its noise: T depends on sigma_1, and sigma_1 on log T only.

    Args:
        n_users: n, public.
        items_per_user: m, the smallest admitted number.
        dim: d, number of parameters.
        epsilon: > 0, of the run.
        delta: in (0, 1).
        lipschitz: G.
        radius: R.
        pair_radius: tau.
        typical_score: as in `calibrate_filter`, and so are the others.
        halt_probability: as there.
        filter: as there.
        max_steps: cap; a step costs n^2 d operations.

    Raises:
        InfeasibleError: as `calibrate_filter`.

    Guarantee: that of the plan.

    Source: docs/proofs/user_level.md#bound-of-the-steps.
    """
    items = check.positive_count(n_users=n_users) * check.positive_count(
        items_per_user=items_per_user
    )
    steps = check.positive_count(max_steps=max_steps)
    for _ in range(3):
        plan = calibrate_filter(
            n_users=n_users,
            steps=steps,
            epsilon=epsilon,
            delta=delta,
            pair_radius=pair_radius,
            typical_score=typical_score,
            halt_probability=halt_probability,
            filter=filter,
        )
        sigma_1 = plan.noise_std / math.sqrt(steps)
        better = best_steps(lipschitz, items, dim, sigma_1, max_steps)
        if better == steps:
            break
        steps = better
    made = schedule(
        lipschitz, radius, items, plan.steps, dim, plan.noise_std / math.sqrt(plan.steps)
    )
    return FilteredSchedule(plan, made.lr, made.bound)


def default_phases(n_items: int) -> int:
    """Returns max(1, ceil(log2 log2(mn))); base 2, so that (mn)^(1/2^k) <= 2.

    Example:
        >>> default_phases(4096 * 4), default_phases(2)
        (4, 1)
    """
    return max(1, math.ceil(math.log2(math.log2(max(2, check.positive_count(n_items=n_items))))))
