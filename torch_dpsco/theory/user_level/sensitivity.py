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
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import scipy

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.binomial import upper_tail
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


def filter_coefficient_two_radius(n: int, score_floor: float, ramp_end: int | None = None) -> float:
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
        low, high = (middle + 1, high) if function(middle + 1) < function(middle) else (low, middle)
    return low
