"""How far one user moves the filtered mean: coefficients with proofs, for the filters of user-level methods.

n users hold rows x_1..x_n. f_j counts the users within the filter's radius of x_j, itself included; s is the number of
ordered pairs within the radius tau, over n. With a = (n + 1)/2 and an integer a < b < n,

    w_j = clip((f_j - a)/(b - a), 0, 1),    g = sum w_j x_j / sum w_j     (0 if all weights are 0).

D and D' differ in user 1, and one of their scores is at least H. Two rows of positive weight, of either, have more than
half of the users as neighbors, hence a common one, and are at most two radii apart. Filter "same" (radius tau):

    |g - g'| <= 2 tau max{ (1 + K_A c)/(n - K_A), (1 + K_B c)/n },  c = 1/(b-a), K_A = n(n-H)/(n-a), K_B = n(n-H)/(n-b).

With W = sum w_j, g - g' = (1/W)[ sum_{j>1} (w_j - w'_j)(x_j - g') + w_1(x_1 - g') - w'_1(x'_1 - g') ], at most 2 tau
(1 + L)/W, L = sum_{j>1} |w_j - w'_j|. Let e_j = n - f_j, of sum n(n - s). A weight moves by at most c, and only where
n - b <= e_j < n - a + 1. So (1 + L)/W <= R if 1 + sum_j [c 1(moves) + R (1 - w_j)] <= R n, and the bracket over e_j is
at most c/(n-b) or (c+R)/(n-a), a ratio of linear functions between; solve for R. Filter "two" (radius 2 tau for the
filter): the M = ceil(H) users within tau of the best-connected one have f_j >= M, hence weight 1 before and after for
b <= M - 1, and the n - M others move by at most c: |g - g'| <= 4 tau (1 + (n - M) c)/M.

Both are tight: tests find pairs within 5 % of them. Differs from the paper in: its Lemma 3.3 is false (docs/errata.md,
paper 3, E1).

Source: docs/proofs/user_level.md#one-radius-filter, docs/proofs/user_level.md#two-radius-filter,
docs/proofs/user_level.md#random-membership.

The plan of a filtered phase, its guarantee, and the clip that it must beat.

A plan cannot claim more than it proves: sensitivity, failure and delta are computed from what the mechanism does, and
the constructor refuses a delta below them. Mechanism, for at most T queries on all n users:

    pass iff s + nu_t >= theta + rho,   rho ~ Lap(b1) once, nu_t ~ Lap(b2) per query;
    on a pass release g + N(0, noise_std^2 I); else halt for ever.

Let H = theta - margin. A pass although both scores are below H is a bad one, of probability at most beta over the run;
it is a function of the pair of data sets and the transcript. Otherwise the run is an AboveThreshold run of
epsilon_svt = D/b1 + 2 D/b2, D = 2(n - 1)/n, interleaved with T Gaussians of the sensitivity proved in
`sensitivity`. Hence delta(epsilon) = delta_pair + (1 + e^epsilon) beta (+ T zeta where membership is random). The
factor of beta is a reserve: a ledger that knows failures of kind "transcript" charges beta alone.

All this is about real numbers. Whoever computes distances and means in floating point enlarges radii and noise by its
rounding errors, in proportion, so that the plan's ratio of noise and sensitivity stays
(`algorithms.user_filter_oracles`).

A filter must beat clipping users' gradients: g = (1/n) sum_j x_j min(1, C/|x_j|) moves by 2C/n when a user is replaced
and by C/(qn) when one is added to Poisson samples with the fixed divisor qn. No test, no failure, no halt.

The filter has less noise than full-batch clipping at C if C > `break_even_clip`: a mean gradient several times the
largest distance of honest users. Near an optimum the mean gradient vanishes, and clipping wins.

Source: docs/proofs/user_level.md#guarantee-of-a-filtered-run, docs/proofs/user_level.md#clipped-means-of-users,
docs/proofs/user_level.md#when-the-filter-wins.

How far apart honest users are: rules for the pair radius tau, none of which affects the privacy proof.

tau decides how often the filter halts and how much noise it needs. It must be public: from a Lipschitz bound and the
number of items a user (`pair_radius_iid`), or from a private search on a grid (`pair_radius_search`). tau tuned
on the data without noise is a violation of privacy.

With unequal numbers of items take the smallest admitted one, a public choice and no quantile of the data; users with
fewer are isolated, and `typical_score` is lowered by a PUBLIC bound on their number.

Differs from the paper in: tau is a radius of PAIRS; a ball of radius rho around a center has pairs 2 rho apart
(docs/errata.md, paper 3, E5); the constant is explicit and free of the dimension.

Source: docs/proofs/user_level.md#pair-radius-of-honest-users, docs/proofs/user_level.md#search-for-the-pair-radius.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import scipy

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.gaussian import gaussian_mu
from torch_dpsco.accounting.analysis.pure import (
    above_threshold_epsilon,
    bad_pass_probability,
    concentration_score_sensitivity,
    laplace_difference_tail,
    svt_gaussian_delta,
)
from torch_dpsco.accounting.analysis.shuffle import upper_tail
from torch_dpsco.errors import ConditionError

_UP = (
    1 + 2e-15
)  # more than the roundings of the few operations of a coefficient, none of which cancels


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
    """Returns Rc with |g - g'| <= 2 tau Rc for filter "same", rounded up.

    Args:
        n: users, >= 4; public.
        score_floor: H; at least one of the two scores is >= H. In [ramp_end, n].
        ramp_end: b, integer in (a, n - 1].

    Returns:
        Rc in [1/n, 1).

    Raises:
        ConditionError: Rc >= 1 (H too small), for which nothing is proved.
        ValueError: an argument is out of range.

    Guarantee: sensitivity to the replacement of one user (n public), for any rows.

    Source: docs/proofs/user_level.md#one-radius-filter.

    Example:
        >>> round(filter_coefficient(1000, 950.0, 750), 6)
        0.001802
    """
    a, b, H = *_ramp(n, ramp_end), _score(n, score_floor)
    if b > H:
        raise ValueError(f"ramp_end must be <= score_floor={H:g} (got {b})")
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
    H = _score(n, score_floor)
    low = math.floor(a) + 1
    high = min(math.floor(H), n - 1)
    if low > high:
        raise ConditionError(f"score_floor must be >= {low} for n={n} (got {H:g})")
    b = _argmin(lambda end: _larger(n, n * (n - H), n - a, n - end), low, high)
    return RampEnd(b, filter_coefficient(n, H, b))


def filter_coefficient_two_radius(
    n: int, score_floor: float, ramp_end: int | None = None
) -> float:
    """Returns 2 (1 + (n - M)/(b - a))/M, M = ceil(H), in units of 2 tau, for filter "two"; rounded up.

    Args:
        n: users, >= 4; public.
        score_floor: H in (a, n]; at least one of the two scores is >= H.
        ramp_end: b, integer in (a, M - 1]; default M - 1, the best.

    Raises:
        ConditionError: no such b.
        ValueError: an argument is out of range.

    Guarantee: as `filter_coefficient`; a pair within tau of a third row must be within the filter's radius.

    Source: docs/proofs/user_level.md#two-radius-filter.

    Example:
        >>> round(filter_coefficient_two_radius(1000, 666.0), 6)
        0.0091
    """
    M = math.ceil(_score(n, score_floor))
    if ramp_start(n) >= M - 1:
        raise ConditionError(
            f"score_floor must be > {math.floor(ramp_start(n)) + 1} for n={n} (got {score_floor:g})"
        )
    a, b = _ramp(n, M - 1 if ramp_end is None else ramp_end)
    if b > M - 1:
        raise ValueError(f"ramp_end must be <= ceil(score_floor) - 1 = {M - 1} (got {b})")
    return 2 * (1 + (n - M) / (b - a)) / M * _UP


def bernoulli_mismatch(count: int, probability: float, failure: float) -> int:
    """Returns the smallest k with P[Bin(count, probability) > k] <= failure, never less.

    Args:
        count: N_0 >= 0, users whose membership may differ.
        probability: in [0, 1], that it does.
        failure: zeta in (0, 1).

    Source: docs/proofs/user_level.md#random-membership.

    Example:
        >>> bernoulli_mismatch(60, 0.02, 1e-9)
        12
    """
    count = check.count(count=count)
    p = check.between(0.0, 1.0, probability=probability)
    failure = check.open_interval(0.0, 1.0, failure=failure)
    k = max(0, min(count, int(scipy.stats.binom.isf(failure, count, p)))) if count and p else 0

    def exceeds(k: int) -> bool:
        # PRIVACY: an isf that is one too small would hide mismatches (test_mismatches_are_counted_exactly)
        return upper_tail(k + 1, count, p) > failure

    while k < count and exceeds(k):
        k += 1
    while k > 0 and not exceeds(k - 1):
        k -= 1
    return k


def bernoulli_sensitivity(
    n: int, score_floor: float, ramp_end: int, failure: float, pair_radius: float
) -> float:
    """Returns Delta_B = 4 tau (1 + k)/M of the paper's filter, whose weights are probabilities; rounded up.

    Users enter the mean independently with probability w_j (filter "two"). Among the n - M users whose probability may
    differ, more than k enter on one side only with probability at most zeta under the maximal coupling.

    Args:
        n: users; public.
        score_floor: H; ceil(H) >= ramp_end + 1.
        ramp_end: b.
        failure: zeta in (0, 1), of one step; the T steps of a run add T zeta to delta.
        pair_radius: tau > 0.

    Raises:
        ConditionError: ceil(H) < ramp_end + 1.

    Source: docs/proofs/user_level.md#random-membership.

    Example:
        >>> round(bernoulli_sensitivity(10**4, 8000.0, 6666, 1e-12, 1.0) * 10**4, 1)
        80.0
    """
    (a, b), M = _ramp(n, ramp_end), math.ceil(_score(n, score_floor))
    tau = check.positive(pair_radius=pair_radius)
    if b >= M:
        raise ConditionError(f"score_floor must be > ramp_end={b} (got {score_floor:g})")
    return 4 * tau * (1 + bernoulli_mismatch(n - M, min(1.0, _UP / (b - a)), failure)) / M * _UP


def _ramp(n: int, ramp_end: int) -> tuple[float, int]:
    """Returns a and the checked b; b = n would let a user without missing neighbors change its weight."""
    a = ramp_start(n)
    b = check.positive_count(ramp_end=ramp_end)
    if not a < b < n:
        raise ValueError(
            f"ramp_end must be an integer in ((n+1)/2, n-1] = ({a:g}, {n - 1}] (got {b})"
        )
    return a, b


def _score(n: int, score_floor: float) -> float:
    H = check.finite(score_floor=score_floor)
    if not ramp_start(n) < H <= n:
        raise ConditionError(
            f"score_floor must be in ((n+1)/2, n] = ({ramp_start(n):g}, {n}] (got {H:g})"
        )
    return H


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


FILTERS = ("same", "two", "paper_corrected")
_PLAN_UP = 1 + 1e-14


@dataclass(frozen=True, kw_only=True)
class UserFilterPlan:
    """What one filtered phase does, and the (epsilon, delta) that it therefore has.

    Args:
        n_users: n >= 4, public: replacing a user does not change it.
        steps: T >= 1, queries planned and charged; a halt earns no refund.
        pair_radius: tau > 0, in the units of the rows.
        filter: "same", "two" (radius 2 tau for the filter), or "paper_corrected": that of "two" with random membership.
        threshold: theta, in (0, n] as the score s is.
        threshold_scale: b1 > 0, Laplace scale of the threshold.
        query_scale: b2 > 0, Laplace scale of each test.
        score_floor: H < theta, below which a pass counts as failure.
        ramp_end: b, integer in ((n+1)/2, n-1].
        noise_std: > 0, std per coordinate of the noise on the mean.
        epsilon: > 0, claimed for the whole phase.
        delta: in (0, 1), claimed; refused if below `delta_at(epsilon)`.
        coupling_failure: zeta of a step, for random membership; 0 for the other filters.
        typical_score: public guess of s, for `halt_probability`; default n.

    Raises:
        ConditionError: nothing is proved for these numbers, or less than claimed.
        ValueError: an argument is out of range.

    Guarantee:
        (epsilon, delta)-DP for the replacement of one USER (all rows of one; n public), for any rows and adaptive
        queries. Charge AboveThreshold(threshold_scale, query_scale, score_sensitivity), T Gaussians of noise_std and
        `sensitivity`, Failure(`failure`, "transcript") and, per step, a coupling failure of `step_failure`, when the
        phase opens. Nothing is claimed for add_remove.

    Example:
        >>> plan = UserFilterPlan(n_users=10**4, steps=100, pair_radius=1.0, filter="same", threshold=9500.0,
        ...     threshold_scale=10.0, query_scale=20.0, score_floor=9000.0, ramp_end=7500, noise_std=0.05, epsilon=1.0,
        ...     delta=1e-6)
        >>> round(plan.epsilon_svt, 4), round(plan.sensitivity * 10**4, 2), plan.delta_at(1.0) < 1e-6
        (0.4, 5.2, True)
    """

    n_users: int
    steps: int
    pair_radius: float
    filter: str
    threshold: float
    threshold_scale: float
    query_scale: float
    score_floor: float
    ramp_end: int
    noise_std: float
    epsilon: float
    delta: float
    coupling_failure: float = 0.0
    typical_score: float | None = None

    def __post_init__(self) -> None:
        check.choice(FILTERS, filter=self.filter)
        ramp_start(check.positive_count(n_users=self.n_users))
        check.positive_count(steps=self.steps)
        check.positive(noise_std=self.noise_std)
        check.positive(threshold_scale=self.threshold_scale)
        check.positive(query_scale=self.query_scale)
        check.positive(epsilon=self.epsilon)
        check.open_interval(0.0, 1.0, delta=self.delta)
        if self.typical_score is not None:
            check.between(0.0, self.n_users, typical_score=self.typical_score)
        if not 0 < check.finite(threshold=self.threshold) <= self.n_users:
            raise ValueError(f"threshold must be in (0, {self.n_users}] (got {self.threshold})")
        random = self.filter == "paper_corrected"
        if (check.nonnegative(coupling_failure=self.coupling_failure) > 0) != random:
            wanted = "> 0" if random else "0"
            raise ValueError(
                f"coupling_failure must be {wanted} for {self.filter!r} (got"
                f" {self.coupling_failure})"
            )
        # PRIVACY: a plan cannot claim less than it proves (test_half_the_noise_or_delta_of_a_plan_is_refused)
        if not (proved := self.delta_at(self.epsilon)) <= self.delta:
            raise ConditionError(
                f"delta must be >= {proved:g}, what is proved at epsilon={self.epsilon:g} (got"
                f" {self.delta:g})"
            )

    @property
    def unit(self) -> str:
        """What is protected."""
        return "user"

    @property
    def adjacency(self) -> str:
        """The neighboring relation of epsilon and delta; n_users is public."""
        return "replace_one"

    @property
    def ramp_start(self) -> float:
        """The a = (n + 1)/2 where weights start."""
        return ramp_start(self.n_users)

    @property
    def margin(self) -> float:
        """The difference theta - H, rounded down."""
        return math.nextafter(self.threshold - self.score_floor, -math.inf)

    @property
    def score_sensitivity(self) -> float:
        """2(n - 1)/n, of the score."""
        return concentration_score_sensitivity(self.n_users)

    @property
    def coefficient(self) -> float:
        """The sensitivity in units of 2 tau."""
        n = self.n_users
        H = self.score_floor
        b = self.ramp_end
        if self.filter == "same":
            return filter_coefficient(n, H, b)
        if self.filter == "two":
            return filter_coefficient_two_radius(n, H, b)
        return bernoulli_sensitivity(n, H, b, self.coupling_failure, 0.5)

    @property
    def sensitivity(self) -> float:
        """L2 sensitivity of the mean at every step that is not a failure, 2 tau times the coefficient."""
        return 2 * self.pair_radius * self.coefficient * _PLAN_UP

    @property
    def epsilon_svt(self) -> float:
        """Pure epsilon of the tests."""
        return above_threshold_epsilon(
            self.threshold_scale, self.query_scale, self.score_sensitivity
        )

    @cached_property
    def failure(self) -> float:
        """beta, of kind "transcript": a pass although both scores are below H, in T steps."""
        return bad_pass_probability(
            self.margin, self.steps, self.threshold_scale, self.query_scale
        )

    @property
    def step_failure(self) -> float:
        """Zeta and the grid of n uniform numbers, of kind "coupling", of EACH step; 0 unless membership is random."""
        return self.coupling_failure + self.n_users * 2.0**-52 if self.coupling_failure else 0.0

    @property
    def mu(self) -> float:
        """sqrt(T) sensitivity / noise_std, of all releases together."""
        return math.sqrt(self.steps) * (self.sensitivity / self.noise_std) * _PLAN_UP

    def delta_at(self, epsilon: float) -> float:
        """Returns delta_pair + (1 + e^epsilon) beta + T zeta, at most 1."""
        pair = svt_gaussian_delta(epsilon, self.epsilon_svt, self.mu)
        factor = 1 + (math.exp(epsilon) if epsilon < 700 else math.inf)
        return min(
            1.0,
            (pair + factor * max(self.failure, 1e-300) + self.steps * self.step_failure)
            * _PLAN_UP,
        )

    def halt_probability(self, score: float | None = None) -> float:
        """Returns a bound on the probability that one of T queries with this score (default `typical_score`) halts."""
        typical = self.n_users if self.typical_score is None else self.typical_score
        margin = check.finite(score=typical if score is None else score) - self.threshold
        return min(
            1.0,
            self.steps * laplace_difference_tail(margin, self.threshold_scale, self.query_scale),
        )


def clipped_sensitivity(
    clip: float, n_users: int, adjacency: str, sample_rate: float = 1.0
) -> float:
    """Returns the L2 sensitivity of the mean of rows clipped at C.

    Args:
        clip: C > 0.
        n_users: n, the divisor over q; public.
        adjacency: "replace_one" (2C/n over q), "add_remove" or "zero_out" (C/n over q; the divisor does not move).
        sample_rate: q in (0, 1].

    Source: docs/proofs/user_level.md#clipped-means-of-users.

    Example:
        >>> clipped_sensitivity(1.0, 100, "replace_one"), clipped_sensitivity(1.0, 100, "add_remove", 0.5)
        (0.02, 0.02)
    """
    kind = check.choice(("replace_one", "add_remove", "zero_out"), adjacency=adjacency)
    users = check.positive_count(n_users=n_users) * check.positive(sample_rate=sample_rate)
    if sample_rate > 1:
        raise ValueError(f"sample_rate must be in (0, 1] (got {sample_rate})")
    return (2 if kind == "replace_one" else 1) * check.positive(clip=clip) / users


def clipping_noise_std(
    n_users: int,
    steps: int,
    epsilon: float,
    delta: float,
    clip: float,
    adjacency: str = "replace_one",
) -> float:
    """Returns the noise of T full-batch means of clipped users' gradients, all of (epsilon, delta) spent on them.

    Source: docs/proofs/user_level.md#when-the-filter-wins.

    Example:
        >>> round(clipping_noise_std(2000, 100, 1.0, 1e-6, 1.0) * 2000)
        84
    """
    sensitivity = clipped_sensitivity(clip, n_users, adjacency)
    return (
        sensitivity
        * math.sqrt(check.positive_count(steps=steps))
        / gaussian_mu(epsilon, delta)
        * (1 + 1e-14)
    )


def break_even_clip(plan: UserFilterPlan) -> float:
    """Returns the C at which full-batch clipping of users needs the noise of the plan, under replace_one.

    Source: docs/proofs/user_level.md#when-the-filter-wins.
    """
    return plan.noise_std / clipping_noise_std(
        plan.n_users, plan.steps, plan.epsilon, plan.delta, 1.0
    )


def pair_radius_iid(lipschitz: float, items_per_user: int, n_users: int, failure: float) -> float:
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
    spread = math.sqrt(2) + 2 * math.sqrt(math.log(n) + math.log(n - 1) - math.log(2 * gamma))
    return min(2 * G, G / math.sqrt(m) * spread)


def pair_radius_of_ball(ball_radius: float) -> float:
    """Returns 2 rho, the largest distance of two points in a ball of radius rho.

    Source: docs/errata.md, paper 3, E5.
    """
    return 2 * check.positive(ball_radius=ball_radius)


def typical_score(n_users: int, isolated: int = 0, share: float = 0.99) -> float:
    """Returns a score below that of honest users when up to `isolated` users have no neighbors.

    Each isolated user takes itself out of n - 1 counts of others and the others out of its own.

    Args:
        n_users: n, public.
        isolated: PUBLIC bound on the number of users without neighbors, never the observed number.
        share: of n that is left among the others.

    Source: docs/proofs/user_level.md#pair-radius-of-honest-users.

    Example:
        >>> typical_score(1000, isolated=20)
        950.0
    """
    n = check.positive_count(n_users=n_users)
    isolated = check.count(isolated=isolated)
    return max(0.0, check.between(0.0, 1.0, share=share) * n - 2 * isolated)


@dataclass(frozen=True, kw_only=True)
class PairRadiusSearch:
    """A private choice of tau: the exponential mechanism on a public grid.

    The utility of a candidate is minus the distance of the target from the scores between the candidate before and
    itself, of sensitivity 2(n-1)/n; a candidate is drawn with weight exp(exponent * utility), and the choice is widened
    by a ratio of the grid (`oracles.UserSearched`). With -|score - target| all candidates above the distances would be
    equally good.

    Args:
        candidates: public radii, increasing.
        target: score that the chosen radius should have.
        sensitivity: of the utility.
        epsilon: of the choice.
        widening: factor for the radius chosen.

    Guarantee:
        epsilon-DP and (epsilon^2/8)-zCDP (bounded range) for the replacement of one user.
    """

    candidates: tuple[float, ...]
    target: float
    sensitivity: float
    epsilon: float
    widening: float

    @property
    def exponent(self) -> float:
        """The factor epsilon / (2 sensitivity), rounded down."""
        return self.epsilon / (2 * self.sensitivity) * (1 - 1e-15)

    @property
    def n_users(self) -> int:
        """The number of users that the sensitivity is of."""
        return round(2 / (2 - self.sensitivity))

    @property
    def overshoot(self) -> float:
        """Bound of the probability that the choice is above all distances, where nothing holds it."""
        return min(
            1.0, len(self.candidates) * math.exp(-self.exponent * (self.n_users - self.target))
        )

    @property
    def rho(self) -> float:
        """The zCDP cost of the choice."""
        return self.epsilon**2 / 8 * (1 + 1e-15)


def pair_radius_search(
    n_users: int, epsilon: float, smallest: float, points: int = 64, ratio: float = 1.25
) -> PairRadiusSearch:
    """Returns the search on smallest * ratio^i, i < points.

    Candidates above all distances are equally good, so that the target t must be far enough below n: the probability
    that one of them is drawn is at most points exp(-epsilon n (n - t) / (4 (n - 1))). With

        t = max(0.9 n, min(0.99 n - 4 log(points)/epsilon, n - 4 log(100 points)/epsilon))

    it is at most 1 % if epsilon n >= 40 log(100 points); see `PairRadiusSearch.overshoot`.

    Args:
        n_users: n, public.
        epsilon: > 0, charged at each search; search once a phase at most.
        smallest: > 0, first candidate; public.
        points: of the grid, >= 2.
        ratio: of the grid, > 1.

    Source: docs/proofs/user_level.md#search-for-the-pair-radius.

    Example:
        >>> search = pair_radius_search(1000, 0.5, 0.01)
        >>> len(search.candidates), round(search.target, 2), round(search.rho, 5)
        (64, 929.89, 0.03125)
    """
    n = check.positive_count(n_users=n_users)
    eps = check.positive(epsilon=epsilon)
    start = check.positive(smallest=smallest)
    count = check.positive_count(points=points)
    ratio = check.positive(ratio=ratio)
    if count < 2 or ratio <= 1:
        raise ValueError(f"points must be >= 2 and ratio > 1 (got {count} and {ratio})")
    target = max(
        0.9 * n, min(0.99 * n - 4 * math.log(count) / eps, n - 4 * math.log(100 * count) / eps)
    )
    return PairRadiusSearch(
        candidates=tuple(start * ratio**i for i in range(count)),
        target=target,
        sensitivity=concentration_score_sensitivity(n),
        epsilon=eps,
        widening=ratio,
    )
