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
and means in floating point add is in `algorithms.user_oracles`.

tau decides how often the filter halts and how much noise it needs, and has no part in the proof of privacy. It must be
public: a guess, or `pair_radius_iid` of a Lipschitz bound and the smallest admitted number of items of a user. tau
tuned on the data without noise is a violation of privacy.

Differs from the paper in: 1. its Lemma 3.3 is false (docs/errata.md, paper 3, E1); 2. weights are no probabilities, and
users are neighbors within tau, not 2 tau, which halves the noise; 3. tau is a radius of PAIRS; a ball of radius r
around a center has pairs 2 r apart (E5).

Source: docs/proofs/user_level.md#one-radius-filter, docs/proofs/user_level.md#guarantee-of-a-filtered-run,
docs/proofs/user_level.md#pair-radius-of-honest-users.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.svt import laplace_difference_tail
from torch_dpsco.errors import ConditionError

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
        if not check.finite(threshold=self.threshold) > self.score_floor:
            raise ConditionError(
                f"threshold must be > score_floor={self.score_floor:g} (got {self.threshold:g})"
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
