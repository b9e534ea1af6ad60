"""The published noise of private SGD with gradient perturbation (Algorithm 2 of the Hoelder paper), mode "paper".

Batches are drawn without replacement, replace-one adjacency. With G the gradient bound, p = batch_size / n, T steps
and a free split beta in (0, 1) of epsilon, the noise on the SUM of a batch has, per coordinate,

    lambda = 1 + log(1/delta) / ((1 - beta) epsilon),      s = 3.5 T p^2 lambda / (beta epsilon),      variance 4 G^2 s,

which is (epsilon, delta)-DP if (a) s >= 0.67 and (b) lambda - 1 <= (2/3) s log(1 / (lambda p (1 + s))): the conditions
of the closed-form Renyi bound 3.5 p^2 lambda / s of order lambda. They, not
privacy, dictate the noise: mode "tight" needs 2 to 8 times less, and always exists.

Differs from the paper in 1. batches of any fixed size, 2. the split is searched (the paper's remark that the best one
is next to 1/2 is not exact, and its existence lemma is false for 18 <= n <= 43), 3. nothing is returned unless both
conditions were checked. Calibration rounds s up by 1e-12.

Source: docs/proofs/holder.md#noise-of-algorithm-2-as-published;
Wang, Lei, Ying and Zhang, Algorithm 2, Theorem 11, Lemmas 3, 13.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torch_dpsco import _validate
from torch_dpsco.errors import InfeasibleError

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

_GRID = 20001  # points of x = log(beta / (1 - beta)) on [-40, 40]
_MARGIN = 1e-12  # relative: a split that the search accepts still passes when its conditions are evaluated again


@dataclass(frozen=True)
class SplitSearch:
    """The split with the least noise among those that satisfy both conditions.

    Args:
        split: beta.
        order: lambda at that split.
        ratio_squared: s at that split.
    """

    split: float
    order: float
    ratio_squared: float


def search_split_paper(n: int, batch_size: int, steps: int, epsilon: float, delta: float) -> SplitSearch:
    """Returns the split with the least noise under the paper's conditions.

    Splits are scanned in x = log(beta / (1 - beta)). Between a grid point that satisfies the conditions and a neighbor
    that does not, bisection finds the boundary from the satisfied side; the unconstrained minimizer is tried as well.
    s decreases up to that minimizer and increases after it, so that no other split can do better.

    Args:
        n: public number of records, >= 1.
        batch_size: records per batch, in [1, n].
        steps: T >= 1.
        epsilon: > 0.
        delta: in (0, 1).

    Raises:
        InfeasibleError: no split satisfies both conditions.
        ValueError: an argument is out of range.

    Guarantee: (epsilon, delta)-DP, REPLACE_ONE, records, batches without replacement, noise std 2 G sqrt(s) on the sum.

    Source: docs/proofs/holder.md#noise-of-algorithm-2-as-published.
    """
    rate, steps, epsilon, log_inverse = _checked(n, batch_size, steps, epsilon, delta)

    def numbers(x: FloatArray) -> tuple[FloatArray, FloatArray, BoolArray]:
        """Returns the order, s, and whether both conditions hold (with a margin); 1 - beta is never a difference."""
        order = 1 + log_inverse / epsilon * (1 + np.exp(x))
        s = 3.5 * steps * rate**2 / epsilon * order * (1 + np.exp(-x))
        limit = -2 / 3 * s * np.log(order * rate * (1 + s))
        return order, s, (s >= 0.67 * (1 + _MARGIN)) & (order - 1 <= limit - _MARGIN * np.abs(limit))

    beta = unconstrained_split(epsilon, delta)
    minimizer = np.array([math.log(beta) - math.log1p(-beta)])
    grid = np.union1d(np.linspace(-40, 40, _GRID), minimizer)
    satisfied = numbers(grid)[2]
    if not satisfied.any():
        raise InfeasibleError(
            f"no split satisfies the paper's conditions at n={n}, batch_size={batch_size}, steps={steps}, "
            f'epsilon={epsilon:g}, delta={delta:g}; mode="tight" has no such condition'
        )
    inner = _boundaries(lambda x: numbers(x)[2], grid, satisfied)
    candidates = np.concatenate([grid[satisfied], inner])
    order, s, _ = numbers(candidates)
    best = int(np.argmin(s))
    # PRIVACY: s is rounded up (test_the_searched_split_satisfies_both_conditions_when_evaluated_again)
    return SplitSearch(1 / (1 + math.exp(-candidates[best])), float(order[best]), float(s[best]) * (1 + _MARGIN))


def unconstrained_split(epsilon: float, delta: float) -> float:
    """Returns the split that minimizes s when both conditions are ignored; slightly above 1/2.

    (1 + k) - sqrt(k (1 + k)) with k = log(1/delta) / epsilon, written without the difference.

    Args:
        epsilon: > 0.
        delta: in (0, 1).

    Raises:
        ValueError: an argument is out of range.

    Source: docs/proofs/holder.md#noise-of-algorithm-2-as-published; erratum E8.

    Example:
        >>> round(unconstrained_split(epsilon=1.0, delta=1e-6), 6)
        0.508734
    """
    epsilon = _validate.positive(epsilon=epsilon)
    k = -math.log(_validate.open_interval(0.0, 1.0, delta=delta)) / epsilon
    return math.sqrt(1 + k) / (math.sqrt(1 + k) + math.sqrt(k))


def _boundaries(good: Callable[[FloatArray], BoolArray], grid: FloatArray, satisfied: BoolArray) -> FloatArray:
    """Returns, for neighboring grid points of which one is good, the boundary between them, on the good side."""
    edge = np.flatnonzero(satisfied[:-1] != satisfied[1:])
    inner = np.where(satisfied[edge], grid[edge], grid[edge + 1])
    outer = np.where(satisfied[edge], grid[edge + 1], grid[edge])
    for _ in range(60):
        middle = (inner + outer) / 2
        ok = good(middle)
        inner, outer = np.where(ok, middle, inner), np.where(ok, outer, middle)
    return inner


def _checked(n: int, batch_size: int, steps: int, epsilon: float, delta: float) -> tuple[float, int, float, float]:
    """Returns the sampling rate, the steps, epsilon and log(1/delta), checked."""
    n, batch_size = _validate.positive_count(n=n), _validate.positive_count(batch_size=batch_size)
    if batch_size > n:
        raise ValueError(f"batch_size must be at most n = {n} (got {batch_size})")
    log_inverse = -math.log(_validate.open_interval(0.0, 1.0, delta=delta))
    return batch_size / n, _validate.positive_count(steps=steps), _validate.positive(epsilon=epsilon), log_inverse
