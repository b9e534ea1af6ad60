"""Tails of binomial laws, never below the exact value.

The first mass of a tail is computed in 50 digits and the others by the ratios of neighbors, so that nothing depends on
the accuracy of a library's special functions: scipy 1.15 is 1e-6 too low for 1e11 trials.

Proof: docs/proofs/accounting.md#binomial-tails.
"""

from __future__ import annotations

import math
import sys
from decimal import Context, Decimal, localcontext
from fractions import Fraction

import numpy as np

from torch_dpsco.errors import InfeasibleError

_MOST_TRIALS = 10**13
_CHUNK = 1 << 12
_UNIT = 2.0**-53
_HALF_LOG_TWO_PI = Decimal("0.91893853320467274178032973640561763986139747363778")


def lower_tail(k: int, trials: int, p: float) -> float:
    """Returns P[Bin(trials, p) <= k], rounded up by at most 3e-8 of itself (1e-11 for up to 1e6 trials).

    Args:
        k: any integer.
        trials: in 0..1e13.
        p: in [0, 1].

    Example:
        >>> 1 <= lower_tail(0, 10, 0.5) * 2**10 < 1 + 1e-11
        True
    """
    return _upper_tail(trials - k, trials, 1 - Fraction(p))


def upper_tail(k: int, trials: int, p: float) -> float:
    """Returns P[Bin(trials, p) >= k], rounded up by at most 3e-8 of itself (1e-11 for up to 1e6 trials).

    Args:
        k: any integer.
        trials: in 0..1e13.
        p: in [0, 1].
    """
    return _upper_tail(k, trials, Fraction(p))


def _upper_tail(k: int, n: int, p: Fraction) -> float:
    if n > _MOST_TRIALS:
        raise InfeasibleError(f"trials of a binomial law must be <= {_MOST_TRIALS:.0e} (got {n})")
    if k <= 0 or k > n or p in (0, 1):
        return float(k <= 0 or (k <= n and p == 1))
    if k <= n * p:
        low, error = _beyond_the_mean(n - k + 1, n, 1 - p)
        return min(1.0, (1 - low * (1 - error)) * (1 + 2 * _UNIT))
    tail, error = _beyond_the_mean(k, n, p)
    return min(1.0, tail * (1 + error))


def _beyond_the_mean(k: int, n: int, p: Fraction) -> tuple[float, float]:
    """Returns P[Bin(n, p) >= k] for n p < k <= n, and a bound of its relative error."""
    odds = float(
        min(p / (1 - p), Fraction(2) ** 1000)
    )  # larger ones have k = n, where no mass is left
    total, last, at = 1.0, 1.0, k  # in units of the mass at k
    while True:
        ratio = (n - at) / (at + 1) * odds
        # PRIVACY: ratios fall, so that this bounds all that is left (test_tails_are_exact_rounded_up)
        rest = last * ratio / (1 - ratio)
        if rest <= 1e-12 * total:
            break
        j = np.arange(at, min(at + _CHUNK, n), dtype=np.float64)
        masses = last * np.cumprod((n - j) / (j + 1) * odds)
        total = total + float(masses.sum())
        last = float(masses[-1])
        at = at + j.size
    with localcontext(Context(prec=50)):
        tail = float(_log_mass(k, n, p).exp() * Decimal(total + rest))
    # each ratio errs by 3 roundings and that of the odds; a tail below the smallest normal float is rounded up to it
    return max(tail, sys.float_info.min), 2e-12 + 8 * _UNIT * (at - k + 8)


def _log_mass(k: int, n: int, p: Fraction) -> Decimal:
    log_p, log_q = ((Decimal(x.numerator) / Decimal(x.denominator)).ln() for x in (p, 1 - p))
    return (
        _log_factorial(n) - _log_factorial(k) - _log_factorial(n - k) + k * log_p + (n - k) * log_q
    )


def _log_factorial(k: int) -> Decimal:
    if k < 64:
        return Decimal(math.factorial(k)).ln()
    x = Decimal(k)
    # Stirling's series, whose error is below the next term: 1 / (1188 x^9) < 5e-20
    series = 1 / (12 * x) - 1 / (360 * x**3) + 1 / (1260 * x**5) - 1 / (1680 * x**7)
    return (x + Decimal("0.5")) * x.ln() - x + _HALF_LOG_TWO_PI + series
