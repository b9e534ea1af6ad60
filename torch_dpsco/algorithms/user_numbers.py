"""How far one user moves the filtered mean, the numbers of a filter, and how far apart honest users are.

n users hold rows x_1..x_n. f_j counts the users within the radius tau of x_j, itself included; s = (f_1 + ... + f_n)/n
is the score. With a = (n + 1)/2 and an integer a < b < n,

    w_j = clip((f_j - a)/(b - a), 0, 1),    g = sum w_j x_j / sum w_j     (0 if all weights are 0).

D and D' differ in user 1, and one of their scores is at least H. Two rows of positive weight, of either, have more than
half of the users as neighbors, hence a common one, and are at most 2 tau apart:

    |g - g'| <= 2 tau max{ (1 + K_A c)/(n - K_A), (1 + K_B c)/n },  c = 1/(b-a), K_A = n(n-H)/(n-a), K_B = n(n-H)/(n-b).

With W = sum w_j, g - g' = (1/W)[ sum_{j>1} (w_j - w'_j)(x_j - g') + w_1(x_1 - g') - w'_1(x'_1 - g') ], at most 2 tau
(1 + L)/W, L = sum_{j>1} |w_j - w'_j|. Let e_j = n - f_j, of sum n(n - s). A weight moves by at most c, and only where
n - b <= e_j < n - a + 1. So (1 + L)/W <= R if 1 + sum_j [c 1(moves) + R (1 - w_j)] <= R n, and the bracket over e_j is
at most c/(n-b) or (c+R)/(n-a), a ratio of linear functions between; solve for R.

It is tight: tests find pairs within 5 % of it. The mechanism, for at most T queries on all n users:

    pass iff s + nu_t >= theta + rho,   rho ~ Lap(b1) once, nu_t ~ Lap(b2) per query;
    on a pass release g + N(0, noise_std^2 I); else halt for ever.

A pass although both scores are below H is a bad one, of probability at most beta over the run; it is a function of the
pair of data sets and the transcript. Otherwise the run is an AboveThreshold run of epsilon_svt = D/b1 + 2 D/b2, D =
2(n - 1)/n, interleaved with T Gaussians of the sensitivity proved here. All this is about real numbers; what distances
and means in floating point add is in `algorithms.oracles`.

tau decides how often the filter halts and how much noise it needs, and has no part in the proof of privacy. It must be
public: a guess, or `pair_radius_iid` of a Lipschitz bound and the smallest admitted number of items of a user. tau
tuned on the data without noise is a violation of privacy.

Differs from the paper in: 1. its Lemma 3.3 is false (docs/errata.md, paper 3, E1); 2. weights are no probabilities, and
users are neighbors within tau, not 2 tau, which halves the noise; 3. tau is a radius of PAIRS; a ball of radius r
around a center has pairs 2 r apart (E5).

Source: docs/proofs/user_level.md#one-radius-filter, docs/proofs/user_level.md#guarantee-of-a-filtered-run,
docs/proofs/user_level.md#pair-radius-of-honest-users.

Calibration of the filter of users, steps and phases: the least noise with a proved guarantee, or why there is none.

All inputs are public, so that the search costs no privacy. It chooses epsilon_svt, its share for the threshold, the
failure beta and, with them, theta, H, the ramp and the noise:

    theta = s_typ - m(p_halt),  H = theta - m(beta),  m(p) the margin with T P[nu - rho > m] <= p,
    noise_std = sensitivity sqrt(T)/mu,  delta_pair(epsilon; epsilon_svt, mu) = delta - (1 + e^epsilon) beta.

The factor of beta is a reserve: the ledger, which knows failures of kind "transcript", charges beta alone. The
published noise is not private (docs/errata.md, paper 3, E2 and E4; the tests have it, for comparison).

Steps. With noise sigma = sigma_1 sqrt(T) per step, projected subgradient steps and average iterate, regret plus uniform
argument stability give for convex, G-Lipschitz losses, n users with m i.i.d. items each,

    E excess risk <= R^2/(2 eta T) + eta A,   A = (G^2 + d T sigma_1^2)/2 + 2 G^2 sqrt(T) + 4 G^2 T/(nm),

plus 2 G R times the probability of a halt or of a user without full weight. R bounds the distance of the start to a
minimizer (in the mean square).

Phases (Algorithm 4, strongly convex losses): j = 1..k runs the filtered method on its own floor(n/2^(k+1-j)) users, the
smallest first, from the answer of the one before. Users are in one phase each, by a permutation that does not depend on
the data, so that the run costs the maximum over phases. With E excess_j <= B_j at the distance Rhat_j, strong convexity
gives Rhat_{j+1} = min(Rhat_1, sqrt(2 B_j/mu)), Rhat_1 = min(R, 2G/mu).

Differs from the paper in: 1. constants; 2. no smoothing is needed (docs/errata.md, paper 3, E10); 3. steps end where
they stop helping, and are capped (the paper's are (m n_j)^2); 4. every phase has a calibration of its own, and their
number is what is feasible.

Source: docs/proofs/user_level.md#calibration-of-the-filter, docs/proofs/user_level.md#bound-of-the-steps,
docs/proofs/user_level.md#phases-on-disjoint-users, docs/proofs/user_level.md#distances-of-phases.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import scipy
from scipy.special import log_ndtr

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.gaussian import gaussian_mu
from torch_dpsco.accounting.analysis.pure import (
    above_threshold_scales,
    bad_pass_margin,
    concentration_score_sensitivity,
    laplace_difference_tail,
    svt_gaussian_mu,
)
from torch_dpsco.errors import ConditionError, InfeasibleError

# more than the roundings of the few operations of a coefficient, none of which cancels
_UP = 1 + 2e-15


class RampEnd(NamedTuple):
    """The ramp end b with the smallest coefficient, and that coefficient in units of 2 tau."""

    ramp_end: int
    coefficient: float


def ramp_start(n: int) -> float:
    """Returns a = (n + 1)/2: more neighbors than that, in two data sets that differ in one user, must overlap.

    Example:
        >>> ramp_start(10)
        5.5
    """
    n = check.positive_count(n=n)
    if n < 4:
        raise ValueError(
            f"n must be >= 4, so that an integer lies strictly between (n+1)/2 and n (got {n})"
        )
    return (n + 1) / 2


def filter_coefficient(n: int, score_floor: float, ramp_end: int) -> float:
    """Returns Rc with |g - g'| <= 2 tau Rc for the filter, rounded up.

    Args:
        n: users, >= 4; public.
        score_floor: H; at least one of the two scores is >= H. In [ramp_end, n].
        ramp_end: b, integer in (a, n - 1].

    Returns:
        Rc in [1/n, 1).

    Raises:
        ConditionError: a number is out of range, or Rc >= 1 (H too small), for which nothing is proved.

    Guarantee: sensitivity to the replacement of one user (n public), for any rows.

    Source: docs/proofs/user_level.md#one-radius-filter.

    Example:
        >>> round(filter_coefficient(1000, 950.0, 750), 6)
        0.001802
    """
    a = ramp_start(n)
    b = check.positive_count(ramp_end=ramp_end)
    H = check.finite(score_floor=score_floor)
    if (
        not a < b <= H <= n or b == n
    ):  # b = n: a user without missing neighbors could change its weight
        raise ConditionError(
            f"ramp_end must be in ((n+1)/2, n-1] = ({a:g}, {n - 1}] and <= score_floor <= n (got"
            f" {b} and score_floor={H:g})"
        )
    value = _larger(n, n * (n - H), n - a, n - b)
    if value >= 1:
        raise ConditionError(
            f"score_floor must be larger for n={n} and ramp_end={b}: no bound is proved (got {H:g})"
        )
    return value


def best_ramp_end(n: int, score_floor: float) -> RampEnd:
    """Returns the integer b in (a, min(H, n - 1)] with the smallest `filter_coefficient`, which is convex in b.

    Args:
        n: users, >= 4.
        score_floor: H in (a, n].

    Raises:
        ConditionError: no b has a coefficient below 1.

    Source: docs/proofs/user_level.md#one-radius-filter.

    Example:
        >>> best_ramp_end(1000, 950.0).ramp_end
        750
    """
    a = ramp_start(n)
    H = check.finite(score_floor=score_floor)
    low = math.floor(a) + 1
    high = min(math.floor(H), n - 1)
    if low > high or n < H:
        raise ConditionError(f"score_floor must be in [{low}, {n}] (got {H:g})")
    b = _argmin(lambda end: _larger(n, n * (n - H), n - a, n - end), low, high)
    return RampEnd(b, filter_coefficient(n, H, b))


def _larger(n: int, missing: float, none: float, full: float) -> float:
    """Returns max{ (1 + K_A c)/(n - K_A), (1 + K_B c)/n }, K_A = missing/none, K_B = missing/full, c = 1/(none - full).

    `missing` bounds the sum of all e_j; weights are 1 up to e_j = full and 0 from e_j = none on. inf if K_A >= n.
    """
    c = 1 / (none - full)
    missing = missing * _UP
    kept = n - missing / none * _UP
    return (
        max((1 + missing / none * c) / kept, (1 + missing / full * c) / n) * _UP
        if kept > 0
        else math.inf
    )


def _argmin(function: Callable[[int], float], low: int, high: int) -> int:
    """Returns where a convex function of an integer is smallest."""
    while low < high:
        middle = (low + high) // 2
        low, high = (
            (middle + 1, high) if function(middle + 1) < function(middle) else (low, middle)
        )
    return low


@dataclass(frozen=True, kw_only=True)
class UserFilter:
    """Public numbers of a filtered phase: how users are tested, who counts, and the noise.

    Args:
        n_users: n >= 4, public: replacing a user does not change it.
        steps: T >= 1, queries planned and charged; a halt earns no refund.
        pair_radius: tau in [1e-40, 1e40], in the units of the rows.
        threshold: theta > H, of the score s.
        threshold_scale: b1 > 0, Laplace scale of the threshold.
        query_scale: b2 > 0, Laplace scale of each test.
        score_floor: H, score from which on the sensitivity holds.
        ramp_end: b, integer in ((n+1)/2, n-1], number of neighbors from which on the weight is 1.
        noise_std: >= 0, std per coordinate of the noise on the mean; 0 gives no privacy.
        typical_score: public guess of s, for `halt_probability`; default n.

    Raises:
        ConditionError: nothing is proved for these numbers.
        ValueError: an argument is out of range.
    """

    n_users: int
    steps: int
    pair_radius: float
    threshold: float
    threshold_scale: float
    query_scale: float
    score_floor: float
    ramp_end: int
    noise_std: float
    typical_score: float | None = None

    def __post_init__(self) -> None:
        check.positive_count(steps=self.steps)
        check.between(1e-40, 1e40, pair_radius=self.pair_radius)
        check.positive(threshold_scale=self.threshold_scale)
        check.positive(query_scale=self.query_scale)
        check.nonnegative(noise_std=self.noise_std)
        if self.typical_score is not None:
            check.between(0.0, self.n_users, typical_score=self.typical_score)
        floor = check.finite(score_floor=self.score_floor)
        if not check.finite(threshold=self.threshold) > floor:
            raise ConditionError(
                f"threshold must be > score_floor={floor:g} (got {self.threshold:g})"
            )
        filter_coefficient(
            self.n_users, self.score_floor, self.ramp_end
        )  # raises if nothing is proved

    @cached_property
    def sensitivity(self) -> float:
        """L2 sensitivity of the mean at every step one of whose scores is at least H, rounded up."""
        coefficient = filter_coefficient(self.n_users, self.score_floor, self.ramp_end)
        return 2 * coefficient * self.pair_radius

    def halt_probability(self) -> float:
        """Returns a bound on the probability that one of T queries at the typical score halts."""
        typical = self.n_users if self.typical_score is None else self.typical_score
        margin = typical - self.threshold
        tail = laplace_difference_tail(margin, self.threshold_scale, self.query_scale)
        return min(1.0, self.steps * tail)


def pair_radius_iid(
    lipschitz: float, items_per_user: int, n_users: int, failure: float
) -> float:
    """Returns tau within which all pairs of mean gradients lie with probability 1 - failure, at one fixed point.

    tau = min{2G, (G/sqrt m)(sqrt 2 + 2 sqrt(log(n(n-1)/(2 gamma))))}: E|x_j - x_k| <= sqrt(2) G/sqrt(m), bounded
    differences 2G/m in 2m items, union over pairs. For points chosen from the data it is a heuristic.

    Args:
        lipschitz: G > 0, bound on the gradient of an item.
        items_per_user: m >= 1, the smallest admitted number.
        n_users: n >= 2.
        failure: gamma in (0, 1); p_halt/T for a run of T steps.

    Source: docs/proofs/user_level.md#pair-radius-of-honest-users; McDiarmid's inequality.

    Example:
        >>> round(pair_radius_iid(2.5, 400, 100, 0.01), 4)
        1.082
    """
    G = check.positive(lipschitz=lipschitz)
    m = check.positive_count(items_per_user=items_per_user)
    n = check.positive_count(n_users=n_users)
    gamma = check.open_interval(0.0, 1.0, failure=failure)
    if n < 2:
        raise ValueError(f"n_users must be >= 2 (got {n})")
    pairs = math.log(n) + math.log(n - 1)
    spread = math.sqrt(2) + 2 * math.sqrt(pairs - math.log(2 * gamma))
    return min(2 * G, G / math.sqrt(m) * spread)


_SVT = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)  # epsilon_svt / epsilon
_SHARE = (0.2, 0.3, 0.4, 0.5)  # of epsilon_svt, for the threshold
_FAILURE = (0.02, 0.1, 0.3, 0.5, 0.9)  # (1 + e^epsilon) beta / delta
_LARGEST = 2**60
_MOST_EPSILON = 600.0  # beyond, e^epsilon beta is of no use
_CALIBRATED_UP = 1 + 1e-12


def calibrate_filter(
    *,
    n_users: int,
    steps: int,
    epsilon: float,
    delta: float,
    pair_radius: float,
    score_share: float = 0.99,
    halt_probability: float = 0.01,
) -> UserFilter:
    """Returns the filter with the least noise whose run is (epsilon, delta)-DP for a replaced user.

    Args:
        n_users: n >= 4, public.
        steps: T >= 1, all of which are charged.
        epsilon: > 0.
        delta: in (0, 1).
        pair_radius: tau, finite and > 0; affects halting and noise, never the proof. See `pair_radius_iid`.
        score_share: a PUBLIC guess of s_typ/n, the score of honest users (lower it by twice a public bound on the share
            of isolated ones).
        halt_probability: p_halt in (0, 1), bound on that of a halt at scores >= s_typ.

    Raises:
        InfeasibleError: nothing is proved; names n, T, epsilon and the smallest n that works.
        ValueError: an argument is out of range.

    Source: docs/proofs/user_level.md#calibration-of-the-filter.

    Example:
        >>> made = calibrate_filter(n_users=10**4, steps=1000, epsilon=1.0, delta=1e-6, pair_radius=1.0,
        ...                         score_share=1.0)
        >>> made.noise_std * 10**4 < 826
        True
    """
    task = _Calibration(
        n_users,
        steps,
        epsilon,
        delta,
        pair_radius,
        score_share,
        halt_probability,
    )
    best = _search(task)
    if best is None:
        raise task.refusal()
    # PRIVACY: the search is rough, this is not (test_no_plan_claims_more_than_it_proves)
    mu = svt_gaussian_mu(
        epsilon, (1 - best.choice.failure) * delta / _CALIBRATED_UP, best.choice.svt * epsilon
    )
    own = best.setting
    return UserFilter(
        n_users=n_users,
        steps=steps,
        pair_radius=pair_radius,
        threshold=own.threshold,
        threshold_scale=own.scales[0],
        query_scale=own.scales[1],
        score_floor=own.score_floor,
        ramp_end=own.ramp_end,
        noise_std=math.sqrt(steps) * 2 * pair_radius * own.coefficient / mu * _CALIBRATED_UP,
        typical_score=score_share * n_users,
    )


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
class _Calibration:
    """Checked inputs."""

    n_users: int
    steps: int
    epsilon: float
    delta: float
    pair_radius: float
    score_share: float
    halt_probability: float

    def __post_init__(self) -> None:
        ramp_start(check.positive_count(n_users=self.n_users))
        check.positive_count(steps=self.steps)
        if check.positive(epsilon=self.epsilon) > _MOST_EPSILON:
            raise ValueError(f"epsilon must be <= {_MOST_EPSILON:g} (got {self.epsilon:g})")
        check.open_interval(0.0, 1.0, delta=self.delta)
        check.positive(pair_radius=self.pair_radius)
        check.between(0.0, 1.0, score_share=self.score_share)
        check.open_interval(0.0, 1.0, halt_probability=self.halt_probability)

    @cached_property
    def most_mu(self) -> float:
        """The mu of a budget spent on Gaussians alone."""
        return gaussian_mu(self.epsilon, self.delta)

    @cached_property
    def grid(self) -> tuple[_Tests, ...]:
        """Where the search starts, and what decides whether anything is proved."""
        points = map(_Choice._make, itertools.product(_SVT, _SHARE, _FAILURE))
        return tuple(tests for choice in points if (tests := _tests(self, choice)) is not None)

    def failure(self, fraction: float) -> float:
        """Returns beta that spends a fraction of delta."""
        # the plan rounds its failure up by 1e-9
        return fraction * self.delta / (1 + math.exp(self.epsilon)) / (1 + 1e-8)

    def refusal(self) -> InfeasibleError:
        """Returns the error that names n, T, epsilon and the smallest n that works."""

        def feasible(n: int) -> bool:
            return any(_setting(self, n, tests) is not None for tests in self.grid)

        smallest = smallest_users(feasible, self.n_users)
        way = "no n works" if smallest is None else f"the smallest n that works is {smallest}"
        return InfeasibleError(
            f"no filter is proved private for n={self.n_users}, steps={self.steps},"
            f" epsilon={self.epsilon:g}, delta={self.delta:g}: {way} (at typical_score ="
            f" {self.score_share:g} n)"
        )


class _Setting(NamedTuple):
    """What follows from a point: how the tests run and how far the mean moves, in units of 2 tau."""

    threshold: float
    scales: tuple[float, float]
    score_floor: float
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


def _search(task: _Calibration) -> _Found | None:
    """Returns the point of least noise: the best of a grid, then moved one coordinate at a time."""
    best: _Found | None = None
    for tests in task.grid:
        best = _better(task, tests, best)
    step = 0.5
    while best is not None and step > 0.02:
        before = best
        for choice in _around(before.choice, step):
            best = _better(task, _tests(task, choice), best)
        step = step if best is not before else step / 2
    return best


def _around(choice: _Choice, step: float) -> Iterator[_Choice]:
    """Yields neighbors of a point: one coordinate moved up or down, in the logarithm of its odds."""
    for field, factor in itertools.product(_Choice._fields, (math.exp(-step), math.exp(step))):
        odds = getattr(choice, field) / (1 - getattr(choice, field)) * factor
        yield choice._replace(**{field: odds / (1 + odds)})


def _better(task: _Calibration, tests: _Tests | None, best: _Found | None) -> _Found | None:
    """Returns the better of a point and the best so far, by the ratio of coefficient and mu."""
    setting = None if tests is None else _setting(task, task.n_users, tests)
    if tests is None or setting is None:
        return best
    if best is not None and setting.coefficient / task.most_mu >= best.noise:
        return best
    mu = _rough_mu(task, tests.choice)
    if mu > 0 and (best is None or setting.coefficient / mu < best.noise):
        return _Found(setting.coefficient / mu, tests.choice, setting)
    return best


def _rough_mu(task: _Calibration, choice: _Choice) -> float:
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


def _tests(task: _Calibration, choice: _Choice) -> _Tests | None:
    """Returns the margins of a point per unit of sensitivity; None if beta underflows."""
    beta = task.failure(choice.failure)
    if beta == 0:
        return None
    scales = above_threshold_scales(choice.svt * task.epsilon, 1.0, threshold_share=choice.share)
    margins = (
        bad_pass_margin(failure, task.steps, *scales)
        for failure in (task.halt_probability, beta)
    )
    return _Tests(choice, *margins)


def _setting(task: _Calibration, n: int, tests: _Tests) -> _Setting | None:
    """Returns what a point means for n users; None if nothing is proved there."""
    sensitivity = concentration_score_sensitivity(n)
    threshold = task.score_share * n - sensitivity * tests.halt
    floor = threshold - sensitivity * tests.bad
    if math.ceil(max(floor, 0.0)) - 1 <= ramp_start(n):
        return None
    choice = tests.choice
    scales = above_threshold_scales(
        choice.svt * task.epsilon, sensitivity, threshold_share=choice.share
    )
    try:
        return _Setting(threshold, scales, floor, *best_ramp_end(n, floor))
    except ConditionError:
        return None


class UserSchedule(NamedTuple):
    """Step size, and the bound on the expected excess risk."""

    lr: float
    bound: float


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
    G = lipschitz
    T = steps
    noise = dim * noise_std_per_root_step**2
    A = (G**2 + T * noise) / 2 + 2 * G**2 * math.sqrt(T) + 4 * G**2 * T / n_items
    return UserSchedule(radius / math.sqrt(2 * T * A), radius * math.sqrt(2 * A / T))


def best_steps(
    lipschitz: float,
    n_items: int,
    dim: int,
    noise_std_per_root_step: float,
    max_steps: int,
) -> int:
    """Returns T = min{(nm)^2/4, (4 G^2/(d sigma_1^2))^2, max_steps}, at least 1: beyond, nothing improves.

    Example:
        >>> best_steps(1.0, 10**6, 10, 0.1, max_steps=10**4), best_steps(1.0, 10**6, 10, 0.01, max_steps=200)
        (1600, 200)
    """
    noise = dim * noise_std_per_root_step**2
    enough = [n_items * n_items / 4, max_steps]
    if noise > 0:
        enough.append((4 * lipschitz**2 / noise) ** 2)
    return max(1, round(min(enough)))


def suited(
    calibrated: Callable[..., UserFilter],
    lipschitz: float,
    n_items: int,
    dim: int,
    max_steps: int,
) -> UserFilter:
    """Returns a filter with the steps that suit its noise: T depends on sigma_1, and sigma_1 on log T only.

    Args:
        calibrated: of steps=.
        lipschitz: G.
        n_items: n m.
        dim: d.
        max_steps: cap; a step costs n^2 d operations.
    """
    made = calibrated(steps=max_steps)
    for _ in range(2):
        sigma_1 = made.noise_std / math.sqrt(made.steps)
        steps = best_steps(lipschitz, n_items, dim, sigma_1, max_steps)
        if steps == made.steps:
            break
        made = calibrated(steps=steps)
    return made


def default_phases(n_items: int) -> int:
    """Returns max(1, ceil(log2 log2(mn))); base 2, so that (mn)^(1/2^k) <= 2.

    Example:
        >>> default_phases(4096 * 4), default_phases(2)
        (4, 1)
    """
    return max(1, math.ceil(math.log2(math.log2(max(2, n_items)))))


@dataclass(frozen=True, kw_only=True)
class UserPhase:
    """Public numbers of one phase.

    Args:
        filter: its n_users and steps are those of the phase; no other phase uses these users.
        lr: eta > 0.
        bound: on the expected excess risk after the phase.
    """

    filter: UserFilter
    lr: float
    bound: float


@dataclass(frozen=True, kw_only=True)
class UserPhases:
    """What phases are asked for.

    Args:
        n_users: n, public.
        items_per_user: m, the smallest admitted number.
        dim: d, number of parameters.
        epsilon: > 0, of each phase, hence of the run.
        delta: in (0, 1), as epsilon.
        lipschitz: G.
        strong_convexity: mu.
        radius: R, bound on the distance of the start to the minimizer; inf for 2G/mu.
        pair_radius: tau; None for `pair_radius_iid` of each phase at failure halt_probability/T.
        score_share: public guess of the score over the users of a phase.
        halt_probability: of each phase.
        max_steps: cap on the steps of a phase.
    """

    n_users: int
    items_per_user: int
    dim: int
    epsilon: float
    delta: float
    lipschitz: float
    strong_convexity: float
    radius: float = math.inf
    pair_radius: float | None = None
    score_share: float = 0.99
    halt_probability: float = 0.01
    max_steps: int = 200

    def planned(self, phases: int | None = None) -> tuple[UserPhase, ...]:
        """Returns calibrated phases: as many as asked for, or as many as are feasible up to ceil(log2 log2(mn)).

        Raises:
            InfeasibleError: names the phase, its users and steps, and the smallest number of users that works.
        """
        if phases is not None:
            return self._planned(check.positive_count(phases=phases))
        for k in range(default_phases(self.n_users * self.items_per_user), 1, -1):
            with suppress(InfeasibleError):
                return self._planned(k)
        return self._planned(1)

    def _planned(self, k: int) -> tuple[UserPhase, ...]:
        made: list[UserPhase] = []
        for j in range(1, k + 1):
            users = self.n_users // 2 ** (k + 1 - j)
            if users < 4:
                raise InfeasibleError(
                    f"phase {j} of {k} has {users} users: use fewer phases, or n >="
                    f" {2 ** (k + 3 - j)}"
                )
            try:
                made.append(self._phase(users, made[-1].bound if made else math.inf))
            except InfeasibleError as error:
                raise InfeasibleError(
                    f"phase {j} of {k} ({users} of {self.n_users} users): {error}"
                ) from error
        return tuple(made)

    def _phase(self, users: int, proved: float) -> UserPhase:
        """Returns a phase with the step size of the explicit bound, at the distance that the one before proves."""
        mu = self.strong_convexity
        start = min(self.radius, 2 * self.lipschitz / mu, math.sqrt(2 * proved / mu))
        items = users * self.items_per_user

        def calibrated(*, steps: int) -> UserFilter:
            tau = self.pair_radius
            if tau is None:
                failure = self.halt_probability / steps
                tau = pair_radius_iid(self.lipschitz, self.items_per_user, users, failure)
            return calibrate_filter(
                n_users=users,
                steps=steps,
                pair_radius=tau,
                epsilon=self.epsilon,
                delta=self.delta,
                score_share=self.score_share,
                halt_probability=self.halt_probability,
            )

        made = suited(calibrated, self.lipschitz, items, self.dim, self.max_steps)
        noise = made.noise_std / math.sqrt(made.steps)
        best = schedule(self.lipschitz, start, items, made.steps, self.dim, noise)
        return UserPhase(filter=made, lr=best.lr, bound=best.bound)
