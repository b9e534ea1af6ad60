"""Formulas of the Hoelder paper that the package does not use, for vectors and comparisons."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from torch_dpsco import _validate
from torch_dpsco.accounting.analysis.rounding import scaled_up
from torch_dpsco.algorithms.holder_numbers import (
    FloatArray,
    RunPath,
    _checked,
    _growth,
    _holder,
    expansions,
    iterate_bounds,
    log_expansion,
    path_sensitivity,
    run_path,
    search_split_paper,
)
from torch_dpsco.algorithms.mixture_numbers import (
    _TAIL,
    SensitivityLaw,
    _binomial,
    _law,
    _log_binomial,
    _rate,
    _sigma,
    weighted_law,
)


def uniform_delta(sigma: float, path: RunPath, sample_rate: float, epsilon: float) -> float:
    """Returns the delta that noise sigma guarantees at epsilon, by the same law as `uniform_sigma`, rounded up.

    Args:
        sigma: noise std per coordinate, > 0.
        path: see `run_path`.
        sample_rate: p = batch_size / n in (0, 1].
        epsilon: >= 0.

    Guarantee: as `uniform_sigma`.

    Source: docs/proofs/holder.md#independent-batches.

    Example:
        >>> path = run_path([0.1] * 50, 1.0, holder_exponent=1.0, holder_constant=1.0, batch_size=1, hit_constant=2)
        >>> 0.0009 < uniform_delta(0.498, path, sample_rate=0.01, epsilon=1.0) < 0.00101
        True
    """
    sigma, epsilon = _validate.positive(sigma=sigma), _validate.nonnegative(epsilon=epsilon)
    return weighted_law(path, sample_rate).delta(sigma, epsilon) if path.hits.size else 0.0


def uniform_rdp(order: float, sigma: float, path: RunPath, sample_rate: float) -> float:
    """Returns a Renyi bound at one order, to compose with other releases; it may be inf at large orders.

    exp((a - 1) D_a) <= sum_k Pr[N = k] exp(a (a - 1) Delta_k^2 / (2 sigma^2)), N ~ Bin(T - 1, p), by joint convexity,
    with Delta_k the drift plus the k largest hits; all k, in log space.

    Args:
        order: a > 1.
        sigma: noise std per coordinate, > 0.
        path: see `run_path`.
        sample_rate: p = batch_size / n in (0, 1].

    Guarantee: as `uniform_sigma`.

    Source: docs/proofs/holder.md#renyi-bound-of-independent-batches.

    Example:
        >>> path = run_path([0.1] * 50, 1.0, holder_exponent=1.0, holder_constant=1.0, batch_size=1, hit_constant=2)
        >>> round(uniform_rdp(2.0, 0.498, path, sample_rate=0.01), 3)
        0.151
    """
    order, sigma = _validate.order(order=order), _validate.positive(sigma=sigma)
    rate, steps = _rate(sample_rate), path.hits.size
    sums = scaled_up(path.drift + np.cumsum(np.sort(path.hits)[::-1]), steps)
    moved = np.concatenate([[0.0], np.minimum(sums, path.cap)])
    with np.errstate(over="ignore"):
        cost = order * (order - 1) / 2 * (moved / sigma) ** 2
    logs = _log_binomial(np.arange(steps + 1.0), steps, rate) + cost
    return scaled_up(float(np.logaddexp.reduce(logs)) / (order - 1), steps + 16) if steps else 0.0


def output_sigma_count(
    epsilon: float,
    delta: float,
    holder_exponent: float,
    holder_constant: float,
    grad_bound: float,
    lr: float,
    steps: int,
    n: int,
    batch_size: int,
    glm: bool = False,
    hit_constant: float = 2.0,
) -> float:
    """Returns the noise std by the count law: constant step size and gradient bound, uniform average, real numbers.

    About 1.6 times `output_sigma_weighted`; a check of it.

    Args:
        epsilon: >= 0.
        delta: in (0, 1).
        holder_exponent: alpha in [0, 1].
        holder_constant: L > 0.
        grad_bound: G > 0 over the feasible set.
        lr: eta > 0.
        steps: T >= 1.
        n: public number of records.
        batch_size: b in [1, n].
        glm: whether the loss is phi(w.x; y) with a scalar score.
        hit_constant: 2 for replace-one, 1 for zero-out.

    Source: docs/proofs/holder.md#independent-batches.

    Example:
        >>> round(output_sigma_count(1.0, 1e-6, 1.0, 2.0, 4.0, 0.01, 300, 3000, 10, glm=True), 4)
        0.1267
    """
    path = _constant_path(
        holder_exponent, holder_constant, grad_bound, lr, steps, batch_size, glm, hit_constant
    )
    return _sigma(count_law(path, batch_size / _validate.positive_count(n=n)), epsilon, delta)


def output_sigma_weighted(
    epsilon: float,
    delta: float,
    holder_exponent: float,
    holder_constant: float,
    grad_bound: float,
    lr: float,
    steps: int,
    n: int,
    batch_size: int,
    glm: bool = False,
    hit_constant: float = 2.0,
) -> float:
    """Returns the noise std by the weighted law (`uniform_sigma`); arguments as in `output_sigma_count`.

    Source: docs/proofs/holder.md#independent-batches.

    Example:
        >>> round(output_sigma_weighted(1.0, 1e-6, 1.0, 2.0, 4.0, 0.01, 300, 3000, 10, glm=True), 3)
        0.077
    """
    path = _constant_path(
        holder_exponent, holder_constant, grad_bound, lr, steps, batch_size, glm, hit_constant
    )
    return _sigma(weighted_law(path, batch_size / _validate.positive_count(n=n)), epsilon, delta)


def count_law(path: RunPath, sample_rate: float) -> SensitivityLaw:
    """Returns the law of drift + k times the largest hit, k ~ Bin(T - 1, p)."""
    start, masses, lost = _binomial(path.hits.size, _rate(sample_rate), _TAIL)
    return _law(path, start, masses, lost, float(path.hits.max(initial=0.0)))


def _constant_path(
    exponent: float,
    constant: float,
    bound: float,
    lr: float,
    steps: int,
    batch_size: int,
    glm: bool,
    hit: float,
) -> RunPath:
    return run_path(
        np.full(_validate.positive_count(steps=steps), _validate.positive(lr=lr)),
        _validate.positive(grad_bound=bound),
        holder_exponent=exponent,
        holder_constant=constant,
        batch_size=batch_size,
        hit_constant=hit,
        glm=glm,
    )


@dataclass(frozen=True)
class GradientNoisePaper:
    """Noise of the paper at one split; it is private only if both conditions hold.

    Args:
        order: lambda, the Renyi order of the proof.
        ratio_squared: s = (noise std on the sum / (2 grad_bound))^2.
        variance: 4 grad_bound^2 s, of the noise on the sum, per coordinate.
        condition_a: s >= 0.67.
        condition_b: lambda - 1 <= (2/3) s log(1 / (lambda p (1 + s))).
    """

    order: float
    ratio_squared: float
    variance: float
    condition_a: bool
    condition_b: bool


def gradient_noise_paper(
    n: int,
    batch_size: int,
    steps: int,
    epsilon: float,
    delta: float,
    split: float,
    grad_bound: float,
) -> GradientNoisePaper:
    """Returns the paper's noise at a given split, and whether its theorem covers it.

    Args:
        n: public number of records, >= 1.
        batch_size: records per batch, in [1, n].
        steps: T >= 1.
        epsilon: > 0.
        delta: in (0, 1).
        split: beta in (0, 1).
        grad_bound: G > 0, bound on per-sample gradient norms over the feasible set.

    Returns:
        Order, s, variance and the two conditions; values are returned even where a condition fails.

    Raises:
        ValueError: an argument is out of range.

    Guarantee: (epsilon, delta)-DP, REPLACE_ONE, records, batches without replacement - if both conditions are true.

    Source: docs/proofs/holder.md#noise-of-algorithm-2-as-published; Theorem 11 of the paper.

    Example:
        >>> noise = gradient_noise_paper(10000, 1, 10000, 1.0, 1e-8, split=0.001, grad_bound=2.0)
        >>> round(noise.variance, 4), noise.condition_a and noise.condition_b
        (108.8591, True)
    """
    rate, steps, epsilon, log_inverse = _checked(n, batch_size, steps, epsilon, delta)
    split = _validate.open_interval(0.0, 1.0, split=split)
    grad_bound = _validate.positive(grad_bound=grad_bound)
    order = 1 + log_inverse / ((1 - split) * epsilon)
    ratio_squared = 3.5 * steps * rate**2 * order / (split * epsilon)
    return GradientNoisePaper(
        order=order,
        ratio_squared=ratio_squared,
        variance=4 * grad_bound**2 * ratio_squared,
        condition_a=ratio_squared >= 0.67,
        condition_b=order - 1
        <= -2 / 3 * ratio_squared * math.log(order * rate * (1 + ratio_squared)),
    )


def search_gradient_noise_paper(
    n: int, batch_size: int, steps: int, epsilon: float, delta: float
) -> float:
    """Returns the least s = (noise std on the sum / 2G)^2 for which the paper's theorem gives (epsilon, delta)-DP.

    The arguments are those of `search_split_paper`, which also returns the split.

    Source: docs/proofs/holder.md#noise-of-algorithm-2-as-published.

    Example:
        >>> round(search_gradient_noise_paper(n=1000, batch_size=1, steps=1000, epsilon=2.0, delta=1e-6), 3)
        3.023
    """
    return search_split_paper(n, batch_size, steps, epsilon, delta).ratio_squared


def self_bounding_constant(
    holder_exponent: float, holder_constant: float, grad_at_zero: float
) -> float:
    """Returns c_{alpha,1} = (1 + 1/alpha)^{alpha/(1+alpha)} L^{1/(1+alpha)}, or M + L at alpha = 0.

    |g(w)| <= c_{alpha,1} l(w)^{alpha/(1+alpha)} for nonnegative losses.

    Args:
        holder_exponent: alpha in [0, 1].
        holder_constant: L > 0.
        grad_at_zero: M >= 0, used at alpha = 0.

    Source: docs/proofs/holder.md#co-coercivity.

    Example:
        >>> round(self_bounding_constant(0.5, 3.0, 1.5), 9)
        3.0
    """
    alpha, constant = _holder(holder_exponent, holder_constant)
    if alpha == 0:
        return scaled_up(_validate.nonnegative(grad_at_zero=grad_at_zero) + constant, 4)
    log = (alpha * (math.log1p(alpha) - math.log(alpha)) + math.log(constant)) / (1 + alpha)
    return math.exp(log) * (1 + 1e-13)


def log_expansion_constant(holder_exponent: float, holder_constant: float) -> float:
    """Returns log c_{alpha,2}, c_{alpha,2} = sqrt((1-alpha)/(1+alpha)) (2^{-alpha} L)^{1/(1-alpha)}; -inf at alpha = 1.

    Args:
        holder_exponent: alpha in [0, 1].
        holder_constant: L > 0.

    Source: docs/proofs/holder.md#noise-of-algorithm-1-as-published.

    Example:
        >>> round(log_expansion_constant(0.5, 3.0), 6)
        0.954771
    """
    alpha, constant = _holder(holder_exponent, holder_constant)
    return float(log_expansion(alpha, constant, np.zeros(1), glm=False)[0])


def radius_growth(
    holder_exponent: float,
    holder_constant: float,
    loss_at_zero: float,
    lr: float,
    grad_bound: float | None = None,
) -> float:
    """Returns A(eta) with |w_{s+1}|^2 <= |w_s|^2 + A(eta) for a nonnegative convex loss, rounded up.

    Formula and proof: `algorithms.holder_numbers`.

    Args:
        holder_exponent: alpha in [0, 1].
        holder_constant: L > 0.
        loss_at_zero: M0 >= 0, bound on the loss at 0.
        lr: eta > 0.
        grad_bound: G0, bound on gradient norms everywhere; needed at alpha = 0 only.

    Raises:
        ConditionError: alpha = 1 and eta > 1/L, or A overflows.
        ValueError: an argument is out of range, or grad_bound is missing at alpha = 0.

    Source: docs/proofs/holder.md#radius-of-the-iterates.

    Example:
        >>> round(radius_growth(0.5, 3.0, 1.0, 0.05), 8)
        0.10016875
    """
    bound = _validate.nonnegative(grad_bound=grad_bound) if holder_exponent == 0 else 0.0
    step = np.array([_validate.positive(lr=lr)])
    loss_at_zero = _validate.nonnegative(loss_at_zero=loss_at_zero)
    fixed = _growth(holder_exponent, holder_constant, loss_at_zero, step)
    return scaled_up(float(fixed[0]) + (lr * bound) ** 2, 16)


def radius_schedule(
    holder_exponent: float,
    holder_constant: float,
    grad_at_zero: float,
    loss_at_zero: float,
    lr: float,
    steps: int,
) -> FloatArray:
    """Returns bounds R_1..R_T on the norms of the iterates, with G(r) = M + L r^alpha (at alpha = 0 min(M + L, L)).

    `iterate_bounds` for a constant step size and the paper's gradient bound.

    Args:
        holder_exponent: alpha in [0, 1].
        holder_constant: L > 0.
        grad_at_zero: M >= 0.
        loss_at_zero: M0 >= 0.
        lr: eta > 0.
        steps: T >= 1.

    Raises:
        ConditionError: see `radius_growth`.

    Source: docs/proofs/holder.md#radius-of-the-iterates.

    Example:
        >>> [round(float(r), 3) for r in radius_schedule(1.0, 3.0, 1.5, 1.0, 0.05, 4)]
        [0.0, 0.075, 0.161, 0.26]
    """
    at_zero = _validate.nonnegative(grad_at_zero=grad_at_zero)

    def grad_bound(radius: float) -> float:
        bound = (
            holder_constant
            if holder_exponent == 0
            else at_zero + holder_constant * math.pow(radius, holder_exponent)
        )
        return scaled_up(bound, 8)

    sizes = np.full(_validate.positive_count(steps=steps), _validate.positive(lr=lr))
    return iterate_bounds(
        sizes,
        grad_bound,
        holder_exponent=holder_exponent,
        holder_constant=holder_constant,
        loss_at_zero=loss_at_zero,
    )[0]


def expansion(
    holder_exponent: float, holder_constant: float, lr: float, glm: bool = False
) -> float:
    """Returns `expansions` of one step size.

    Example:
        >>> round(expansion(0.5, 3.0, 0.05), 9), round(expansion(0.5, 3.0, 0.05, glm=True), 9)
        (0.006495191, 0.004330127)
    """
    return float(
        expansions(holder_exponent, holder_constant, np.array([_validate.positive(lr=lr)]), glm)[0]
    )


def shuffled_sensitivity(
    holder_exponent: float,
    holder_constant: float,
    grad_bound: float,
    lr: float,
    n: int,
    batch_size: int,
    epochs: int,
    glm: bool = False,
    hit_constant: float = 2.0,
) -> float:
    """Returns `path_sensitivity` for constant step size and gradient bound, uniform average, no cap, real numbers.

    Args:
        holder_exponent: alpha in [0, 1].
        holder_constant: L > 0.
        grad_bound: G >= 0 over the feasible set.
        lr: eta > 0.
        n: public number of records.
        batch_size: b in [1, n].
        epochs: K >= 1.
        glm: whether the loss is phi(w.x; y) with a scalar score.
        hit_constant: 2 for replace-one, 1 for zero-out.

    Source: docs/proofs/holder.md#shuffled-epochs.

    Example:
        >>> round(shuffled_sensitivity(1.0, 2.0, 4.0, 0.01, n=1000, batch_size=10, epochs=5), 5)
        0.02392
    """
    per_epoch = -(-_validate.positive_count(n=n) // _validate.positive_count(batch_size=batch_size))
    if batch_size > n:
        raise ValueError(f"batch_size must be at most n = {n} (got {batch_size})")
    path = run_path(
        np.full(per_epoch * _validate.positive_count(epochs=epochs), _validate.positive(lr=lr)),
        _validate.nonnegative(grad_bound=grad_bound),
        holder_exponent=holder_exponent,
        holder_constant=holder_constant,
        batch_size=batch_size,
        hit_constant=hit_constant,
        glm=glm,
    )
    return path_sensitivity(path, per_epoch)


def feasibility_threshold_paper(n: int) -> float:
    """Returns the epsilon above which Lemma 13 of the paper claims a feasible split (T = n, batches of one record).

    For reference only: the claim is false for 18 <= n <= 43, and the threshold is far from necessary elsewhere. Test
    the conditions instead (`search_split_paper`).

    Args:
        n: number of records, >= 2.

    Raises:
        ValueError: n is not an integer >= 2.

    Source: docs/proofs/holder.md#noise-of-algorithm-2-as-published; erratum E9.

    Example:
        >>> round(feasibility_threshold_paper(10000), 3)
        0.897
    """
    n = _validate.count(n=n)
    if n < 2:
        raise ValueError(f"n must be an integer >= 2 (got {n})")
    root = math.pow(n, 1 / 3) - 1
    return (7 * root + 4 * n * math.log(n) + 7) / (2 * n * root)
