"""Step sizes and steps for Hoelder-smooth losses: those that balance the bound on the risk, and those of the theorems.

The balanced ones are better defaults. The published ones (constants taken as 1) are:

| theorem | algorithm | domain | T = ceil(n^x) with x at least 1 and |
|---|---|---|---|
| 9 | 1, output | unbounded | (6 - 3a - a^2) / ((1 + a)(3 + a)), above 1 for a < (sqrt 73 - 7)/4 |
| 10 | 1, output | ball | (2 - a)/(1 + a), above 1 for a < 1/2 |
| 12 | 2, gradient | ball | as 10 |

Differs from the paper in: Theorem 12's step size is printed as (1/T) max{..}; its own proof needs 1 / (T max{..}),
which is what is returned (erratum E7).

Source: docs/proofs/holder.md#risk-of-gradient-perturbation, docs/proofs/holder.md#published-step-sizes;
Wang, Lei, Ying and Zhang, Algorithm 2, Theorems 9, 10, 12.
"""

from __future__ import annotations

import math

from torch_dpsco import _validate as check


def balanced_lr(
    distance: float, steps: int, grad_bound: float, dim: int, noise_std: float
) -> float:
    """Returns the step size D / sqrt(T (G^2 + d s^2)) that balances the two terms of `average_risk_bound`.

    Args:
        distance: D > 0, guess of |w_1 - w*|; the radius of the feasible set is one.
        steps: T >= 1.
        grad_bound: G >= 0, bound on per-sample gradient norms.
        dim: d >= 1, number of parameters.
        noise_std: s >= 0, std of the noise on the mean gradient.

    Example:
        >>> balanced_lr(distance=1.0, steps=100, grad_bound=1.0, dim=1, noise_std=0.0)
        0.1
    """
    second_moment = (
        check.nonnegative(grad_bound=grad_bound) ** 2
        + check.positive_count(dim=dim) * check.nonnegative(noise_std=noise_std) ** 2
    )
    if second_moment == 0:
        raise ValueError("grad_bound must be > 0 when there is no noise (got 0)")
    return check.positive(distance=distance) / math.sqrt(
        check.positive_count(steps=steps) * second_moment
    )


def average_risk_bound(
    distance: float,
    steps: int,
    lr: float,
    grad_bound: float,
    dim: int,
    noise_std: float,
    batch_size: int,
) -> float:
    """Returns a bound on the expected excess empirical risk of the uniform average of w_1..w_T.

    D^2/(2 eta T) + (eta/2) (G^2 (1 + 1/b) + d s^2), for convex losses, projected steps and no clipping bias. Proof: the
    expected square of the noisy mean is at most the bracket (the variance of a Poisson batch of expected size b with
    divisor b is at most G^2/b); sum the usual inequality for projected stochastic gradient steps.

    Args:
        distance: D, bound on |w_1 - w*|.
        steps: T.
        lr: eta.
        grad_bound: G, bound on per-sample gradient norms over the feasible set.
        dim: d.
        noise_std: s, std of the noise on the mean gradient.
        batch_size: b.
    """
    second_moment = grad_bound**2 * (1.0 + 1.0 / batch_size) + dim * noise_std**2
    return distance**2 / (2.0 * lr * steps) + 0.5 * lr * second_moment


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
    """Returns the step size of a utility theorem; mode "paper" needs it below min(1, 1/L) besides.

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
