"""Renyi divergences of one pass of random allocation: a second route, for filters and as a check.

With M the average of T independent L_i = e^((2 x_i - 1) / 2z^2), E L^k = e^(k (k - 1) / 2z^2): for integers a

    E M^a = a! [u^a] ( sum_k e^(k (k-1) / 2z^2) (u / T)^k / k! )^T,        (a - 1) D_a = log E M^a:

a power of a series with positive coefficients, by squaring, in logarithms. (a - 1) D_a is convex in a and 0 at 1: so
chords bound it between integers; and D_a is at most a / 2z^2, that of one unsampled release, which is used beyond.

Source: docs/proofs/allocation.md#renyi-divergences.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from scipy.special import gammaln

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.quadrature import FloatArray

_ORDERS = 256  # integer orders computed
_SLACK = 1e-11  # of the logarithms that are summed, per order


def rdp_allocation_removed(noise: float, steps: int, orders: FloatArray) -> FloatArray:
    """Returns D_a of "with" against "without" a record.

    Args:
        noise: z > 0, noise std over the clip.
        steps: T >= 1.
        orders: each > 1.

    Raises:
        ValueError: an argument is out of range.

    Guarantee: the remove direction only; nothing is claimed about the add direction.

    Source: docs/proofs/allocation.md#renyi-divergences.

    Example:
        >>> print(rdp_allocation_removed(1.0, 100, np.array([2.0])).round(6))
        [0.017037]
    """
    noise, steps = check.positive(noise=noise), check.positive_count(steps=steps)
    wanted = np.asarray(orders, dtype=np.float64)
    if not np.all(wanted > 1):
        raise ValueError("orders must be > 1")
    plain: FloatArray = wanted * (1 + 1e-15) / (2 * noise * noise)
    known = np.arange(1.0, _ORDERS + 1)
    # PRIVACY: rounded up (test_renyi_divergences_are_not_below_exact_moments)
    heights = _log_moments(noise, steps)[1:] * (1 + 1e-12) + _SLACK * known * (known > 1)
    chord = np.interp(wanted, known, heights, right=math.inf) / (wanted - 1)
    return np.minimum(chord, plain)


@lru_cache(maxsize=64)
def _log_moments(noise: float, steps: int) -> FloatArray:
    """Returns log E M^a for a = 0 .. 256."""
    k = np.arange(_ORDERS + 1.0)
    factorial = gammaln(k + 1)
    power = k * (k - 1) / (2 * noise * noise) - k * math.log(steps) - factorial
    total, left = None, steps
    while True:
        if left % 2:
            total = power if total is None else _product(total, power)
        left //= 2
        if not left:
            break
        power = _product(power, power)
    moments: FloatArray = total + factorial
    moments.setflags(write=False)
    return moments


def _product(one: FloatArray, two: FloatArray) -> FloatArray:
    """Returns the logarithms of the coefficients of a product of two series."""
    size = one.size
    terms = np.full((size, size), -math.inf)
    for i in range(size):
        terms[i, i:] = one[i] + two[: size - i]
    top = terms.max(axis=0)
    return np.asarray(top + np.log(np.exp(terms - top).sum(axis=0)), dtype=np.float64)
