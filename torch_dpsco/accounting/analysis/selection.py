"""Renyi curve of the best of a random, secret number of releases.

K is drawn, then K releases with one Renyi curve (fresh randomness each); the one that a public total order puts first
leaves, and neither K nor the others. K has a truncated negative binomial law, P(K = k) proportional to
(1-gamma)^k binom(k + eta - 1, k), k >= 1 (eta = 1: geometric, 0: logarithmic), or a Poisson law, where K = 0 leaves a
public default.

Source: docs/proofs/search.md; Papernot and Steinke 2022, theorems 2 and 6.
Here K = 0 of the Poisson law is counted as an outcome of its own.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.convert import curve_of, rdp_delta
from torch_dpsco.accounting.analysis.quadrature import FloatArray

_ROUNDING = 1e-12  # added, relative: more than the rounding of a few sums


def expected_trials(eta: float, gamma: float) -> float:
    """Returns E K of the truncated negative binomial law.

    Args:
        eta: > -1.
        gamma: in (0, 1).

    Example:
        >>> expected_trials(1.0, 0.25)
        4.0
    """
    eta, log_gamma = _law(eta, gamma)
    odds = math.expm1(-log_gamma)  # (1 - gamma) / gamma
    return odds / -log_gamma if eta == 0 else eta * odds / -math.expm1(eta * log_gamma)


def negative_binomial_selection(
    orders: ArrayLike, values: ArrayLike, eta: float, gamma: float
) -> FloatArray:
    """Returns the curve of the selection at the same orders.

    Args:
        orders: each > 1, increasing.
        values: bound of one release per order, both directions, >= 0 (inf for none).
        eta: > -1.
        gamma: in (0, 1).

    Raises:
        ValueError: a range or a shape.
    """
    order, value = curve_of(orders, values)
    eta, log_gamma = _law(eta, gamma)
    # PRIVACY: what the others cost (test_no_pair_exceeds_the_curve, test_the_cost_of_the_winner_alone_is_refuted)
    others = min(-log_gamma, float(np.min((1 - 1 / order) * value - log_gamma / order)))
    found = value + (1 + eta) * others + math.log(expected_trials(eta, gamma)) / (order - 1)
    return _increasing(found)


def poisson_selection(orders: ArrayLike, values: ArrayLike, mean: float) -> FloatArray:
    """Returns the curve of the selection at the same orders, K = 0 included.

    Args:
        orders: each > 1, increasing.
        values: bound of one release per order, both directions, >= 0 (inf for none).
        mean: of K, >= 1.

    Raises:
        ValueError: a range or a shape.
    """
    order, value = curve_of(orders, values)
    if check.positive(mean=mean) < 1:
        raise ValueError(f"mean must be >= 1 (got {mean})")
    deltas = np.array([rdp_delta(order, value, -math.log1p(-1 / one)) for one in order])
    exponent = (order - 1) * (value + mean * deltas) + math.log(mean)
    return _increasing(np.logaddexp(-mean, exponent) / (order - 1))


def _increasing(bounds: FloatArray) -> FloatArray:
    """Returns bounds no larger than those at higher orders, as divergences are."""
    return np.asarray(np.minimum.accumulate(bounds[::-1])[::-1] * (1 + _ROUNDING))


def _law(eta: float, gamma: float) -> tuple[float, float]:
    """Returns eta and log gamma."""
    if check.finite(eta=eta) <= -1:
        raise ValueError(f"eta must be > -1 (got {eta})")
    if not 0 < check.finite(gamma=gamma) < 1:
        raise ValueError(f"gamma must be in (0, 1) (got {gamma})")
    return float(eta), math.log(gamma)
