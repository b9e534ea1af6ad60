"""Zero-concentrated differential privacy: to (epsilon, delta) and back.

rho-zCDP bounds the Renyi divergence of every order a by rho a. The conversion of `convert` at order a = 1 + b is

    epsilon(b) = (1 + b) rho + log(b / (1 + b)) - (log(delta) + log(1 + b)) / b,

and its derivative in b, rho + (log(delta) + log(1 + b)) / b^2, changes sign once, at the b with

    rho b^2 + log(1 + b) = log(1 / delta).

So both directions need one root, and any b gives a valid bound: an inexact root costs tightness, never privacy. For
unsampled Gaussian noise alone `gaussian` is exact and smaller.

Source: docs/proofs/accounting.md#concentrated-privacy; Bun and Steinke 2016.
"""

from __future__ import annotations

import math

from scipy.optimize import brentq

from torch_dpsco import _validate


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
