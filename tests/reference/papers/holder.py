"""Formulas of the Hoelder paper that the package does not use, for vectors and comparisons.

Step sizes and steps of the theorems (constants taken as 1):

| theorem | algorithm | domain | T = ceil(n^x) with x at least 1 and |
|---|---|---|---|
| 9 | 1, output | unbounded | (6 - 3a - a^2) / ((1 + a)(3 + a)), above 1 for a < (sqrt 73 - 7)/4 |
| 10 | 1, output | ball | (2 - a)/(1 + a), above 1 for a < 1/2 |
| 12 | 2, gradient | ball | as 10 |

Differs from the paper in: Theorem 12's step size is printed as (1/T) max{..}; its own proof needs 1 / (T max{..}),
which is what is returned (erratum E7).

The noise of the Hoelder paper (Wang, Lei, Ying and Zhang) as published, in both of its algorithms.

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
of the closed-form Renyi bound 3.5 p^2 lambda / s of order lambda. They, not privacy, dictate the noise: exact curves
need 2 to 8 times less, and always exist.

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

from tests.reference.papers.holder_mixture import (
    _TAIL,
    SensitivityLaw,
    _binomial,
    _law,
    _log_binomial,
    _sigma,
    weighted_law,
)
from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.gaussian import gaussian_log_delta
from torch_dpsco.accounting.analysis.rounding import scaled_up
from torch_dpsco.algorithms.holder_numbers import (
    FloatArray,
    RunPath,
    _growth,
    expansions,
    iterate_bounds,
    log_expansion,
    path_sensitivity,
    run_path,
)
from torch_dpsco.errors import ConditionError, InfeasibleError, MissingConstantError
from torch_dpsco.problem import Problem, round_up

BoolArray = NDArray[np.bool_]


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
    sigma, epsilon = check.positive(sigma=sigma), check.nonnegative(epsilon=epsilon)
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
    order, sigma = check.order(order=order), check.positive(sigma=sigma)
    rate, steps = sample_rate, path.hits.size
    sums = scaled_up(path.drift + np.cumsum(np.sort(path.hits)[::-1]), steps)
    moved = np.concatenate([[0.0], np.minimum(sums, path.cap)])
    with np.errstate(over="ignore"):
        cost = order * (order - 1) / 2 * (moved / sigma) ** 2
    logs = _log_binomial(np.arange(steps + 1.0), steps, rate) + cost
    return (
        scaled_up(float(np.logaddexp.reduce(logs)) / (order - 1), steps + 16) if steps else 0.0
    )


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
    return _sigma(count_law(path, batch_size / check.positive_count(n=n)), epsilon, delta)


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
    return _sigma(weighted_law(path, batch_size / check.positive_count(n=n)), epsilon, delta)


def count_law(path: RunPath, sample_rate: float) -> SensitivityLaw:
    """Returns the law of drift + k times the largest hit, k ~ Bin(T - 1, p)."""
    start, masses, lost = _binomial(path.hits.size, sample_rate, _TAIL)
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
        np.full(check.positive_count(steps=steps), check.positive(lr=lr)),
        check.positive(grad_bound=bound),
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
    split = check.open_interval(0.0, 1.0, split=split)
    grad_bound = check.positive(grad_bound=grad_bound)
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
        return scaled_up(check.nonnegative(grad_at_zero=grad_at_zero) + constant, 4)
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
    bound = check.nonnegative(grad_bound=grad_bound) if holder_exponent == 0 else 0.0
    step = np.array([check.positive(lr=lr)])
    loss_at_zero = check.nonnegative(loss_at_zero=loss_at_zero)
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
    at_zero = check.nonnegative(grad_at_zero=grad_at_zero)

    def grad_bound(radius: float) -> float:
        bound = (
            holder_constant
            if holder_exponent == 0
            else at_zero + holder_constant * math.pow(radius, holder_exponent)
        )
        return scaled_up(bound, 8)

    sizes = np.full(check.positive_count(steps=steps), check.positive(lr=lr))
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
        expansions(holder_exponent, holder_constant, np.array([check.positive(lr=lr)]), glm)[0]
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
    per_epoch = -(-check.positive_count(n=n) // check.positive_count(batch_size=batch_size))
    if batch_size > n:
        raise ValueError(f"batch_size must be at most n = {n} (got {batch_size})")
    path = run_path(
        np.full(per_epoch * check.positive_count(epochs=epochs), check.positive(lr=lr)),
        check.nonnegative(grad_bound=grad_bound),
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
    n = check.count(n=n)
    if n < 2:
        raise ValueError(f"n must be an integer >= 2 (got {n})")
    root = math.pow(n, 1 / 3) - 1
    return (7 * root + 4 * n * math.log(n) + 7) / (2 * n * root)


_THEOREMS = (9, 10, 12)


def steps_exponent(holder_exponent: float, theorem: int) -> float:
    """Returns x such that the theorem makes ceil(n^x) steps.

    Args:
        holder_exponent: alpha in [0, 1].
        theorem: 9, 10 or 12.

    Example:
        >>> steps_exponent(0.25, theorem=10)
        1.4
    """
    a = check.between(0.0, 1.0, holder_exponent=holder_exponent)
    if check.choice(_THEOREMS, theorem=theorem) == 9:
        return max(1.0, (6 - 3 * a - a * a) / ((1 + a) * (3 + a)))
    return max(1.0, (2 - a) / (1 + a))


def steps_theorem(n: int, holder_exponent: float, theorem: int) -> int:
    """Returns T = ceil(n^x), x = `steps_exponent`.

    Example:
        >>> steps_theorem(100, 0.0, theorem=10)
        10000
    """
    exponent = steps_exponent(holder_exponent, theorem)
    n = check.positive_count(n=n)
    return n if exponent == 1 else math.ceil(math.pow(n, exponent) * (1 - 1e-12))


def lr_theorem(
    theorem: int,
    n: int,
    dim: int,
    epsilon: float,
    delta: float,
    failure: float,
    steps: int,
    holder_exponent: float,
) -> float:
    """Returns the step size of a utility theorem; its noise needs it below min(1, 1/L) besides.

    Args:
        theorem: 9, 10 or 12.
        n: public number of records, >= 2.
        dim: d >= 1.
        epsilon: > 0.
        delta: in (0, 1).
        failure: gamma in (0, 1), failure probability of the utility bound (not of privacy).
        steps: T >= 1.
        holder_exponent: alpha in [0, 1]; used by Theorem 9 only.

    Raises:
        ValueError: an argument is out of range.

    Source: docs/proofs/holder.md#published-step-sizes; erratum E7.

    Example:
        >>> round(lr_theorem(12, 1000, 10, epsilon=1.0, delta=1e-6, failure=0.1, steps=1000, holder_exponent=0.5), 8)
        0.00261268
    """
    theorem = check.choice(_THEOREMS, theorem=theorem)
    n = check.positive_count(n=n)
    dim = check.positive_count(dim=dim)
    steps = check.positive_count(steps=steps)
    if n < 2:
        raise ValueError(f"n must be an integer >= 2 (got {n})")
    epsilon = check.positive(epsilon=epsilon)
    log_delta = -math.log(check.open_interval(0.0, 1.0, delta=delta))
    log_gamma = -math.log(check.open_interval(0.0, 1.0, failure=failure))
    if theorem == 9:
        power = 1 / (3 + check.between(0.0, 1.0, holder_exponent=holder_exponent))
        return math.pow(n, power) / (steps * math.pow(log_gamma, power))
    if theorem == 10:
        log_n_delta = math.log(n) + log_delta
        sampling = math.sqrt(log_n_delta * math.log(n) * log_gamma / n)
        roots = (
            math.pow(dim * log_delta, 0.25) * math.sqrt(log_n_delta) * math.pow(log_gamma, 0.125)
        )
        noise = roots / math.sqrt(n * epsilon)
    else:
        sampling = math.sqrt(math.log(n) * (math.log(n) + log_gamma) * log_gamma / n)
        noise = math.sqrt(dim * log_delta) * math.pow(log_gamma, 0.25) / (n * epsilon)
    return 1 / (steps * max(sampling, noise))


_LARGEST_EXPONENT = 709.0


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
            f"lr must be < min(1, 1/holder_constant) = {min(1.0, 1.0 / constant):g} (got {lr:g})"
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
    if total > _LARGEST_EXPONENT:
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
            f" epsilon={epsilon:g}; exact curves have no such limit"
        )
    return scaled_up(sensitivity * ratio, 16)


def _holder(holder_exponent: float, holder_constant: float) -> tuple[float, float]:
    alpha = check.between(0.0, 1.0, holder_exponent=holder_exponent)
    return alpha, check.positive(holder_constant=holder_constant)


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


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
            f"epsilon={epsilon:g}, delta={delta:g}; exact curves have no such condition"
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


def paper_grad_bound(problem: Problem, radius: float | None = None) -> float:
    """The paper's bound M + L radius^a (with 0^0 = 1), rounded up: never less than G.

    Args:
        radius: r in [0, inf]; None means `problem.radius`.

    Raises:
        MissingConstantError: if M, L or a is missing, or the bound is infinite.

    Source:
        docs/proofs/holder.md#gradient-bound.

    Example:
        >>> round(paper_grad_bound(Problem(holder_exponent=0, holder_constant=2, grad_at_zero=1)), 9)
        3.0
    """
    reach = (
        problem.radius if radius is None else check.nonnegative(allow_inf=True, radius=radius)
    )
    exponent, constant, at_zero = problem.require(
        "holder_exponent", "holder_constant", "grad_at_zero", by="the paper's gradient bound"
    )
    bound = round_up(at_zero + constant * math.pow(reach, exponent))
    if math.isinf(bound):
        raise MissingConstantError(
            f"the paper's gradient bound needs a finite radius (got {reach:g})"
        )
    return bound
