"""The noise of the Hoelder paper (Wang, Lei, Ying and Zhang) as published: mode "paper", in both of its algorithms.

**Algorithm 1**, output perturbation, in log space; i.i.d. batches of 1, gamma = delta/2:

    x = 3 n log(n/gamma) / T,  c = max(sqrt x, x),  N = (T/n)(1 + c)           hits, but with probability gamma / n
    G = M + L R^alpha  or, unbounded,  M + L (C_alpha T eta)^{alpha/2}
    Delta^2 = e ( c_{alpha,2}^2 T eta^{2/(1-alpha)} + 4 G^2 eta^2 (1 + N) N )
    sigma^2 = 2 log(2.5/delta) Delta^2 / epsilon^2

Differs from the paper in: 1. the Gaussian lemma is proved for epsilon <= 1 only and fails above about 8: the exact
curve must confirm it, else ConditionError (erratum E3); 2. C_alpha in its simplified, equal form. `run_path` needs
10 to 200 times less noise.

**Algorithm 2**, gradient perturbation. Batches are drawn without replacement, replace-one adjacency. With G the
gradient bound, p = batch_size / n, T steps and a free split beta in (0, 1) of epsilon, the noise on the SUM of a batch
has, per coordinate,

    lambda = 1 + log(1/delta) / ((1 - beta) epsilon),      s = 3.5 T p^2 lambda / (beta epsilon),      variance 4 G^2 s,

which is (epsilon, delta)-DP if (a) s >= 0.67 and (b) lambda - 1 <= (2/3) s log(1 / (lambda p (1 + s))): the conditions
of the closed-form Renyi bound 3.5 p^2 lambda / s of order lambda. They, not privacy, dictate the noise: mode "tight"
needs 2 to 8 times less, and always exists.

Differs from the paper in 1. batches of any fixed size, 2. the split is searched (the paper's remark that the best one
is next to 1/2 is not exact, and its existence lemma is false for 18 <= n <= 43), 3. nothing is returned unless both
conditions were checked. Calibration rounds s up by 1e-12.

Source: docs/proofs/holder.md#noise-of-algorithm-1-as-published,
docs/proofs/holder.md#noise-of-algorithm-2-as-published,
docs/errata.md; Algorithms 1 and 2, Theorems 8 and 11, Lemmas 3 and 13 of the paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.gaussian import gaussian_log_delta
from torch_dpsco.errors import ConditionError, InfeasibleError
from torch_dpsco.theory.holder.stability import log_expansion
from torch_dpsco.theory.rounding import scaled_up

_LARGEST_LOG = 709.0
_DOMAINS = ("bounded", "unbounded")


def log_iterate_constant(
    holder_exponent: float, holder_constant: float, grad_at_zero: float, loss_at_zero: float
) -> float:
    """Returns log C_alpha, where |w_t|^2 <= C_alpha t eta; C_alpha itself overflows for alpha near 1 and L > 1.

    C_alpha = (1-alpha)/(1+alpha) L^{2/(1-alpha)} + 2 M0; C_0 = (M + L)^2 + 2 M0; C_1 = 2 M0. It does not tend to C_1,
    nor to C_0 (erratum E5), and it is a bound for eta < 1 only.

    Args:
        holder_exponent: alpha in [0, 1].
        holder_constant: L > 0.
        grad_at_zero: M >= 0, used at alpha = 0.
        loss_at_zero: M0 >= 0.

    Source: docs/proofs/holder.md#noise-of-algorithm-1-as-published.

    Example:
        >>> round(log_iterate_constant(0.99, 2.0, 1.5, 1.0), 3)
        133.336
    """
    alpha, constant = _holder(holder_exponent, holder_constant)
    second = _log(2 * check.nonnegative(loss_at_zero=loss_at_zero))
    if alpha == 1:
        return second
    if alpha == 0:
        first = 2 * math.log(check.nonnegative(grad_at_zero=grad_at_zero) + constant)
    else:
        first = math.log1p(-alpha) - math.log1p(alpha) + 2 * math.log(constant) / (1 - alpha)
    return float(np.logaddexp(first, second))


def chernoff_factor(n: int, steps: int, failure: float) -> float:
    """Returns c = max(sqrt x, x) with x = 3 n log(n/gamma) / T: a record is hit at most (T/n)(1 + c) times.

    Args:
        n: number of records, >= 1.
        steps: T >= 1.
        failure: gamma in (0, 1).

    Source: docs/proofs/holder.md#noise-of-algorithm-1-as-published; errata E1, E2.

    Example:
        >>> round(chernoff_factor(100, 100, 0.01), 3)
        27.631
    """
    n = check.positive_count(n=n)
    steps = check.positive_count(steps=steps)
    x = 3 * n * (math.log(n) - math.log(check.open_interval(0.0, 1.0, failure=failure))) / steps
    return scaled_up(max(math.sqrt(x), x), 16)


def output_sensitivity_paper(
    holder_exponent: float,
    holder_constant: float,
    grad_at_zero: float,
    loss_at_zero: float | None,
    radius: float | None,
    lr: float,
    steps: int,
    n: int,
    failure: float,
    domain: str = "bounded",
) -> float:
    """Returns the paper's Delta, which the movement of the average exceeds with probability at most `failure`.

    Args:
        holder_exponent: alpha in [0, 1].
        holder_constant: L > 0.
        grad_at_zero: M >= 0.
        loss_at_zero: M0 >= 0; needed on an unbounded domain.
        radius: R > 0; needed on a bounded domain.
        lr: eta in (0, min(1, 1/L)).
        steps: T >= 1.
        n: public number of records.
        failure: gamma in (0, 1).
        domain: "bounded" or "unbounded".

    Raises:
        ConditionError: eta >= min(1, 1/L), or Delta overflows: step size too large for this alpha.
        ValueError: an argument is out of range or missing.

    Source: docs/proofs/holder.md#noise-of-algorithm-1-as-published; Theorem 7 of the paper.

    Example:
        >>> round(output_sensitivity_paper(0.5, 1.0, 1.0, None, 1.5, 0.01, 1000, 1000, 5e-7), 4)
        4.8232
    """
    alpha, constant = _holder(holder_exponent, holder_constant)
    lr = check.positive(lr=lr)
    at_zero = check.nonnegative(grad_at_zero=grad_at_zero)
    if not lr < min(1.0, 1.0 / constant):
        raise ConditionError(
            f"lr must be < min(1, 1/holder_constant) = {min(1.0, 1.0 / constant):g} in mode='paper'"
            f" (got {lr:g})"
        )
    hits = (steps / n) * (1 + chernoff_factor(n, steps, failure))
    if check.choice(_DOMAINS, domain=domain) == "bounded":
        log_norm = math.log(check.positive(radius=radius))
    else:
        loss_at_zero = check.nonnegative(loss_at_zero=loss_at_zero)
        log_norm = (
            log_iterate_constant(alpha, constant, at_zero, loss_at_zero)
            + math.log(steps)
            + math.log(lr)
        ) / 2
    log_bound = np.logaddexp(
        _log(at_zero), math.log(constant) + (alpha * log_norm if alpha > 0 else 0.0)
    )
    log_drift = math.log(steps) + 2 * float(
        log_expansion(alpha, constant, np.log(np.array([lr])), glm=False)[0]
    )
    log_hits = 2 * (math.log(2) + log_bound + math.log(lr)) + math.log(hits) + math.log1p(hits)
    total = (1 + float(np.logaddexp(log_drift, log_hits))) / 2
    if total > _LARGEST_LOG:
        raise ConditionError(
            "lr: step size too large for this alpha: the paper's sensitivity overflows (got"
            f" {lr:g})"
        )
    return math.exp(total + 1e-13 * (1 + abs(total)))


def output_sigma_paper(
    holder_exponent: float,
    holder_constant: float,
    grad_at_zero: float,
    loss_at_zero: float | None,
    radius: float | None,
    lr: float,
    steps: int,
    n: int,
    epsilon: float,
    delta: float,
    domain: str = "bounded",
) -> float:
    """Returns the paper's noise std sqrt(2 log(2.5/delta)) Delta / epsilon, if it is valid.

    Args:
        holder_exponent: alpha in [0, 1].
        holder_constant: L > 0.
        grad_at_zero: M >= 0.
        loss_at_zero: M0 >= 0; needed on an unbounded domain.
        radius: R > 0; needed on a bounded domain.
        lr: eta in (0, min(1, 1/L)).
        steps: T >= 1.
        n: public number of records.
        epsilon: > 0.
        delta: in (0, 1); half of it pays for more hits than expected.
        domain: "bounded" or "unbounded".

    Raises:
        ConditionError: the exact Gaussian curve exceeds delta/2 (erratum E3), or see
            `output_sensitivity_paper`.

    Guarantee: (epsilon, delta)-DP, REPLACE_ONE, records, batches of one record drawn uniformly with replacement.

    Source: docs/proofs/holder.md#noise-of-algorithm-1-as-published; Theorem 8 of the paper.

    Example:
        >>> round(output_sigma_paper(0.5, 1.0, 1.0, None, 1.5, 0.01, 1000, 1000, 0.7, 1e-6), 4)
        37.4008
    """
    epsilon = check.positive(epsilon=epsilon)
    delta = check.open_interval(0.0, 1.0, delta=delta)
    sensitivity = output_sensitivity_paper(
        holder_exponent,
        holder_constant,
        grad_at_zero,
        loss_at_zero,
        radius,
        lr,
        steps,
        n,
        delta / 2,
        domain,
    )
    ratio = math.sqrt(2 * math.log(2.5 / delta)) / epsilon
    # PRIVACY: the lemma is false for large epsilon (test_the_noise_of_algorithm_1_is_refused_where_its_lemma_fails)
    if not gaussian_log_delta(epsilon, 1 / ratio) <= math.log(delta / 2) - 1e-11:
        raise ConditionError(
            f"epsilon must be lower: the paper's noise falls short of delta={delta:g} at"
            f' epsilon={epsilon:g}; mode="tight" has no such limit'
        )
    return scaled_up(sensitivity * ratio, 16)


def _holder(holder_exponent: float, holder_constant: float) -> tuple[float, float]:
    alpha = check.between(0.0, 1.0, holder_exponent=holder_exponent)
    return alpha, check.positive(holder_constant=holder_constant)


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


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


def search_split_paper(
    n: int, batch_size: int, steps: int, epsilon: float, delta: float
) -> SplitSearch:
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
        return (
            order,
            s,
            (s >= 0.67 * (1 + _MARGIN)) & (order - 1 <= limit - _MARGIN * np.abs(limit)),
        )

    beta = unconstrained_split(epsilon, delta)
    minimizer = np.array([math.log(beta) - math.log1p(-beta)])
    grid = np.union1d(np.linspace(-40, 40, _GRID), minimizer)
    satisfied = numbers(grid)[2]
    if not satisfied.any():
        raise InfeasibleError(
            f"no split satisfies the paper's conditions at n={n}, batch_size={batch_size},"
            f" steps={steps}, "
            f'epsilon={epsilon:g}, delta={delta:g}; mode="tight" has no such condition'
        )
    inner = _boundaries(lambda x: numbers(x)[2], grid, satisfied)
    candidates = np.concatenate([grid[satisfied], inner])
    order, s, _ = numbers(candidates)
    best = int(np.argmin(s))
    # PRIVACY: s is rounded up (test_the_searched_split_satisfies_both_conditions_when_evaluated_again)
    return SplitSearch(
        1 / (1 + math.exp(-candidates[best])), float(order[best]), float(s[best]) * (1 + _MARGIN)
    )


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
    epsilon = check.positive(epsilon=epsilon)
    k = -math.log(check.open_interval(0.0, 1.0, delta=delta)) / epsilon
    return math.sqrt(1 + k) / (math.sqrt(1 + k) + math.sqrt(k))


def _boundaries(
    good: Callable[[FloatArray], BoolArray], grid: FloatArray, satisfied: BoolArray
) -> FloatArray:
    """Returns, for neighboring grid points of which one is good, the boundary between them, on the good side."""
    edge = np.flatnonzero(satisfied[:-1] != satisfied[1:])
    inner = np.where(satisfied[edge], grid[edge], grid[edge + 1])
    outer = np.where(satisfied[edge], grid[edge + 1], grid[edge])
    for _ in range(60):
        middle = (inner + outer) / 2
        ok = good(middle)
        inner = np.where(ok, middle, inner)
        outer = np.where(ok, outer, middle)
    return inner


def _checked(
    n: int, batch_size: int, steps: int, epsilon: float, delta: float
) -> tuple[float, int, float, float]:
    """Returns the sampling rate, the steps, epsilon and log(1/delta), checked."""
    n = check.positive_count(n=n)
    batch_size = check.positive_count(batch_size=batch_size)
    if batch_size > n:
        raise ValueError(f"batch_size must be at most n = {n} (got {batch_size})")
    log_inverse = -math.log(check.open_interval(0.0, 1.0, delta=delta))
    return (
        batch_size / n,
        check.positive_count(steps=steps),
        check.positive(epsilon=epsilon),
        log_inverse,
    )
