"""Zero-concentrated differential privacy: composition, and to (epsilon, delta) and back.

rho-zCDP bounds the Renyi divergence of every order a by rho a. The conversion of `convert` at order a = 1 + b is

    epsilon(b) = (1 + b) rho + log(b / (1 + b)) - (log(delta) + log(1 + b)) / b,

and its derivative in b, rho + (log(delta) + log(1 + b)) / b^2, changes sign once, at the b with

    rho b^2 + log(1 + b) = log(1 / delta).

So both directions need one root, and any b gives a valid bound: an inexact root costs tightness, never privacy. For
unsampled Gaussian noise alone `gaussian` is exact and smaller. The textbook bound of Bun and Steinke is that
of b = sqrt(log(1/delta) / rho) without its two negative terms: valid, larger, kept for the papers that calibrate by it.

Source: docs/proofs/accounting.md#concentrated-privacy; Bun and Steinke 2016.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from scipy.optimize import brentq

from torch_dpsco import _validate

__all__ = [
    "compose_parallel",
    "compose_sequential",
    "zcdp_epsilon",
    "zcdp_epsilon_bs16",
    "zcdp_rho",
    "zcdp_rho_bs16",
]

_ROUNDING = 1e-15  # relative: more than that of the few operations of a closed form


def zcdp_epsilon(rho: float, delta: float) -> float:
    """Returns the least epsilon for which rho-zCDP is known to imply (epsilon, delta)-DP, rounded up.

    Args:
        rho: >= 0.
        delta: in (0, 1).

    Returns:
        epsilon >= 0.

    Raises:
        ValueError: rho is negative or not finite, or delta is not in (0, 1).

    Guarantee: every rho-zCDP mechanism is (epsilon, delta)-DP, under the adjacency of its rho.

    Source: docs/proofs/accounting.md#concentrated-privacy.

    Example:
        >>> round(zcdp_epsilon(rho=0.1, delta=1e-5), 4)
        1.9142
    """
    rho = _validate.nonnegative(rho=rho)
    log_inverse = -math.log(_validate.open_interval(0.0, 1.0, delta=delta))
    if rho == 0:
        return 0.0

    def slope(log_b: float) -> float:
        b = math.exp(log_b)
        return rho * b * b + math.log1p(b) - log_inverse

    # At the root one of the two terms is at least half of the right-hand side, and neither exceeds it.
    log_gauss = (math.log(log_inverse) - math.log(rho)) / 2
    low = min(log_gauss - 0.5 * math.log(2), math.log(log_inverse / 2))
    high = min(log_gauss, log_inverse + math.log(-math.expm1(-log_inverse)))
    b = math.exp(brentq(slope, low - 1e-9, high + 1e-9, xtol=1e-12))
    gain, conversion = math.log1p(1 / b), (log_inverse - math.log1p(b)) / b
    # PRIVACY: the last term exceeds the rounding of the others (test_zcdp_conversions_are_on_the_safe_side)
    return max(0.0, (1 + b) * rho - gain + conversion + 1e-15 * ((1 + b) * rho + gain + abs(conversion)))


def zcdp_rho(epsilon: float, delta: float) -> float:
    """Returns the largest rho for which rho-zCDP is known to imply (epsilon, delta)-DP, rounded down.

    At the optimal b, rho = (log(1/delta) - log(1 + b)) / b^2 and epsilon = (1 + 2b) rho - log(1 + 1/b), which
    decreases in b: one root.

    Args:
        epsilon: >= 0.
        delta: in (0, 1).

    Returns:
        rho >= 0 (0 below 1e-300).

    Raises:
        ValueError: epsilon is negative or not finite, or delta is not in (0, 1).

    Guarantee: zcdp_epsilon(rho, delta) <= epsilon for the rho returned.

    Source: docs/proofs/accounting.md#concentrated-privacy.

    Example:
        >>> round(zcdp_rho(epsilon=1.0, delta=1e-5), 5)
        0.03056
    """
    epsilon = _validate.nonnegative(epsilon=epsilon)
    log_inverse = -math.log(_validate.open_interval(0.0, 1.0, delta=delta))

    def gap(log_b: float) -> float:
        b = math.exp(log_b)
        rho = (log_inverse - math.log1p(b)) / b / b
        return (1 + 2 * b) * rho - math.log1p(1 / b) - epsilon

    # At the largest b, 1/delta - 1, rho is 0 and the gap is negative; at small b it is about log(1/delta) / b^2.
    high = min(log_inverse + math.log(-math.expm1(-log_inverse)), 709.0)  # e^709 is the last power that is finite
    low = high - 1.0
    while gap(low) <= 0:
        low -= 1.0 + abs(low) / 8
    b = math.exp(high if gap(high) > 0 else brentq(gap, low, high, xtol=1e-12))
    rho = (epsilon + math.log1p(1 / b) - (log_inverse - math.log1p(b)) / b) / (1 + b)
    # PRIVACY: 1e-12 exceeds all rounding (test_zcdp_conversions_are_on_the_safe_side)
    return rho * (1 - 1e-12) if rho > 1e-300 else 0.0  # subnormal numbers round by more


def zcdp_epsilon_bs16(rho: float, delta: float) -> float:
    """Returns rho + 2 sqrt(rho log(1/delta)), the conversion that the papers use; `zcdp_epsilon` is smaller.

    Args:
        rho: >= 0.
        delta: in (0, 1).

    Returns:
        epsilon >= 0, rounded up.

    Raises:
        ValueError: rho is negative or not finite, or delta is not in (0, 1).

    Guarantee: every rho-zCDP mechanism is (epsilon, delta)-DP, under the adjacency of its rho.

    Source: docs/proofs/accounting.md#concentrated-privacy; Bun and Steinke 2016, Proposition 1.3.

    Example:
        >>> round(zcdp_epsilon_bs16(rho=0.1, delta=1e-5), 4)
        2.246
    """
    rho = _validate.nonnegative(rho=rho)
    log_inverse = -math.log(_validate.open_interval(0.0, 1.0, delta=delta))
    # PRIVACY: rounded up; two roots, since the product may underflow (test_textbook_bounds_are_rounded_safely)
    return (rho + 2 * math.sqrt(rho) * math.sqrt(log_inverse)) * (1 + _ROUNDING)


def zcdp_rho_bs16(epsilon: float, delta: float) -> float:
    """Returns (sqrt(epsilon + log(1/delta)) - sqrt(log(1/delta)))^2, the inverse of `zcdp_epsilon_bs16`.

    Args:
        epsilon: >= 0.
        delta: in (0, 1).

    Returns:
        rho >= 0, rounded down (0 below 1e-300); `zcdp_rho` is larger.

    Raises:
        ValueError: epsilon is negative or not finite, or delta is not in (0, 1).

    Guarantee: zcdp_epsilon_bs16(rho, delta) <= epsilon for the rho returned.

    Source: docs/proofs/accounting.md#concentrated-privacy; Bun and Steinke 2016.

    Example:
        >>> round(zcdp_rho_bs16(epsilon=1.0, delta=1e-5), 5)
        0.02082
    """
    epsilon = _validate.nonnegative(epsilon=epsilon)
    log_inverse = -math.log(_validate.open_interval(0.0, 1.0, delta=delta))
    root = epsilon / (math.sqrt(epsilon + log_inverse) + math.sqrt(log_inverse))  # the difference would cancel
    # PRIVACY: rounded down by more than the inverse adds (test_textbook_bounds_are_rounded_safely)
    rho = root * root * (1 - 8 * _ROUNDING)
    return rho if rho > 1e-300 else 0.0  # subnormal numbers round by more


def compose_sequential(rhos: Iterable[float]) -> float:
    """Returns the sum: what mechanisms on the same records cost together.

    Renyi divergences of adaptive compositions add up at every order, if every rho was fixed in advance.

    Args:
        rhos: each >= 0 (inf: no noise).

    Returns:
        rho >= 0, the least float that is at least the exact sum; 0 for no mechanism.

    Raises:
        ValueError: a rho is negative or not a number.

    Guarantee: rho-zCDP under every adjacency that all the rhos share.

    Source: docs/proofs/accounting.md#composition; Bun and Steinke 2016, Lemma 2.3.

    Example:
        >>> compose_sequential([0.25, 0.5])
        0.75
    """
    values = _rhos(rhos)
    if math.isinf(sum(values)):
        return math.inf
    total = math.fsum(values)
    # PRIVACY: the sum is rounded up (test_the_sequential_sum_is_the_exact_one_rounded_up)
    return math.nextafter(total, math.inf) if math.fsum([*values, -total]) > 0 else total


def compose_parallel(rhos: Iterable[float]) -> float:
    """Returns the maximum: what mechanisms on disjoint parts of the records cost together.

    The differing record lies in one part, i. Given the outputs before it, which have the same law for both data sets,
    the output on part i costs rho_i; what follows sees the record only through these outputs. So the cost is rho_i for
    an i that the partition alone decides.

    Args:
        rhos: cost of all that is done on each part, each >= 0 (inf: no noise).

    Returns:
        rho >= 0; 0 for no part.

    Raises:
        ValueError: a rho is negative or not a number.

    Guarantee: rho-zCDP, if the partition is public and does not depend on the data. Parts cut by position:
        replace-one or zero-out, not add/remove, where one removal shifts every later part. Parts by a key of the
        record: add/remove or zero-out, not replace-one, unless the replacement keeps the key.

    Source: docs/proofs/accounting.md#parts-of-a-partition.

    Example:
        >>> compose_parallel([0.25, 0.5])
        0.5
    """
    return max(_rhos(rhos), default=0.0)


def _rhos(rhos: Iterable[float]) -> list[float]:
    return [_validate.nonnegative(rhos=rho, allow_inf=True) for rho in rhos]
