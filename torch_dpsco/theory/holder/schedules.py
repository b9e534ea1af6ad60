"""Step numbers and step sizes of the utility theorems of the Hoelder paper (constants taken as 1).

| theorem | algorithm | domain | T = ceil(n^x) with x at least 1 and |
|---|---|---|---|
| 9 | 1, output | unbounded | (6 - 3a - a^2) / ((1 + a)(3 + a)), above 1 for a < (sqrt 73 - 7)/4 |
| 10 | 1, output | ball | (2 - a)/(1 + a), above 1 for a < 1/2 |
| 12 | 2, gradient | ball | as 10 |

Differs from the paper in: Theorem 12's step size is printed as (1/T) max{..}; its own proof needs 1 / (T max{..}),
which is what is returned (erratum E7). The balanced plans of `holder_plan` and `holder` are better defaults.

Source: docs/proofs/holder.md#published-step-sizes; Wang, Lei, Ying and Zhang, Theorems 9, 10, 12.
"""

from __future__ import annotations

import math

from torch_dpsco import _validate

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
    a = _validate.between(0.0, 1.0, holder_exponent=holder_exponent)
    if _validate.choice(_THEOREMS, theorem=theorem) == 9:
        return max(1.0, (6 - 3 * a - a * a) / ((1 + a) * (3 + a)))
    return max(1.0, (2 - a) / (1 + a))


def steps_theorem(n: int, holder_exponent: float, theorem: int) -> int:
    """Returns T = ceil(n^x), x = `steps_exponent`.

    Example:
        >>> steps_theorem(100, 0.0, theorem=10)
        10000
    """
    exponent = steps_exponent(holder_exponent, theorem)
    n = _validate.positive_count(n=n)
    return n if exponent == 1 else math.ceil(math.pow(n, exponent) * (1 - 1e-12))


def lr_theorem(
    theorem: int, n: int, dim: int, epsilon: float, delta: float, failure: float, steps: int, holder_exponent: float
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
    theorem = _validate.choice(_THEOREMS, theorem=theorem)
    n, dim, steps = (
        _validate.positive_count(n=n),
        _validate.positive_count(dim=dim),
        _validate.positive_count(steps=steps),
    )
    if n < 2:
        raise ValueError(f"n must be an integer >= 2 (got {n})")
    epsilon = _validate.positive(epsilon=epsilon)
    log_delta = -math.log(_validate.open_interval(0.0, 1.0, delta=delta))
    gamma = _validate.open_interval(0.0, 1.0, failure=failure)
    log_gamma = -math.log(gamma)
    if theorem == 9:
        power = 1 / (3 + _validate.between(0.0, 1.0, holder_exponent=holder_exponent))
        return math.pow(n, power) / (steps * math.pow(log_gamma, power))
    if theorem == 10:
        log_n_delta = math.log(n) + log_delta
        sampling = math.sqrt(log_n_delta * math.log(n) * log_gamma / n)
        noise = (
            math.pow(dim * log_delta, 0.25)
            * math.sqrt(log_n_delta)
            * math.pow(log_gamma, 0.125)
            / math.sqrt(n * epsilon)
        )
    else:
        sampling = math.sqrt(math.log(n) * (math.log(n) + log_gamma) * log_gamma / n)
        noise = math.sqrt(dim * log_delta) * math.pow(log_gamma, 0.25) / (n * epsilon)
    return 1 / (steps * max(sampling, noise))
