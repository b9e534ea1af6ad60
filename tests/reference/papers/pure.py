"""Pure privacy at order 1, and its profile, for which the package does not ask."""

from __future__ import annotations

import math

from tests.reference.papers.orders import rdp_pure
from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.pure import rho_pure


def rdp_pure_dp(epsilon: float, order: float) -> float:
    """Returns `rdp_pure`; at order 1 the Kullback-Leibler divergence epsilon tanh(epsilon / 2)."""
    return rho_pure(epsilon) if order == 1 else rdp_pure(epsilon, order)


def pure_delta(epsilon: float, pure_epsilon: float) -> float:
    """Returns the largest delta at `epsilon` of a mechanism that is `pure_epsilon`-DP: that of randomized response.

    Args:
        epsilon: any finite number.
        pure_epsilon: >= 0 (inf allowed).

    Returns:
        (e^pure_epsilon - e^epsilon) / (1 + e^pure_epsilon), and max(0, 1 - e^epsilon) beyond +-pure_epsilon, rounded
        up.

    Raises:
        ValueError: an argument is out of range.

    Source: docs/proofs/accounting.md#pure-mechanisms; Kairouz, Oh and Viswanath 2015.

    Example:
        >>> round(pure_delta(epsilon=0.5, pure_epsilon=1.0), 6)
        0.287649
    """
    epsilon = check.finite(epsilon=epsilon)
    worst = check.nonnegative(pure_epsilon=pure_epsilon, allow_inf=True)
    if epsilon <= -worst:
        return _profile(epsilon)
    return _profile(epsilon - worst, 1 + math.exp(-worst))


def _profile(exponent: float, divisor: float = 1.0) -> float:
    """Returns (1 - e^exponent) / divisor, or 0 if that is negative, rounded up."""
    # PRIVACY: 1e-15 exceeds the rounding (test_profiles_are_not_below_their_high_precision_values)
    return min(1.0, max(0.0, -math.expm1(exponent)) / divisor * (1 + 1e-15))
