"""The privacy profile of one Poisson-sampled Gaussian release, for a unit of one or several records.

With w the mixture sum_j Bin(j; k, q) N(j, z^2) of `mixtures` and r = w / N(0, z^2), increasing, delta at epsilon is

    remove   integral of N(x; 0, z^2) (r(x) - e^epsilon) over the x where log r(x) > epsilon,
    add      integral of N(x; 0, z^2) (1 - e^epsilon r(x)) over the x where log r(x) < -epsilon.

Both are integrals of positive terms, so that no digits are lost in delta = 1e-150. `group` exports the function.

Source: docs/proofs/accounting.md#several-records-of-a-unit.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import brentq

from torch_dpsco import _validate
from torch_dpsco.accounting.analysis import quadrature as quad
from torch_dpsco.accounting.analysis.gaussian import gaussian_delta
from torch_dpsco.accounting.analysis.mixtures import MAX_NOISE, PoissonMixture
from torch_dpsco.accounting.analysis.quadrature import FloatArray

__all__ = ["poisson_group_delta"]

_LEAST_NOISE = 1e-4  # times size^1.5, as in `mixtures`: below, noise counts as none


_SPELLED_OUT = {"P=mixture,Q=N(0)": "remove", "P=N(0),Q=mixture": "add"}


def poisson_group_delta(
    group_size: int, sample_rate: float, noise_multiplier: float, epsilon: float, direction: str = "remove"
) -> float:
    """Returns the exact privacy profile of one release for a unit of several records, each Poisson-sampled on its own.

    Args:
        group_size: k >= 1.
        sample_rate: q in [0, 1] of each record.
        noise_multiplier: z = noise std / clip of one record, >= 0.
        epsilon: >= 0.
        direction: "remove" is the hockey stick of the mixture over the Gaussian, "add" the reverse.

    Returns:
        delta in [0, 1], rounded up: by 1e-9 of it, at an epsilon smaller by 1e-12 of it.

    Raises:
        ValueError: an argument is out of range.

    Guarantee: ADD_REMOVE and ZERO_OUT of the whole unit; the maximum over the directions.

    Source: docs/proofs/accounting.md#several-records-of-a-unit.

    Example:
        >>> round(poisson_group_delta(5, 0.1, 0.8, epsilon=1.0), 6)
        0.084877
    """
    size = _validate.positive_count(group_size=group_size)
    rate = _validate.between(0.0, 1.0, sample_rate=sample_rate)
    noise = _validate.nonnegative(noise_multiplier=noise_multiplier)
    epsilon = _validate.nonnegative(epsilon=epsilon)
    direction = _validate.choice(("remove", "add"), direction=_SPELLED_OUT.get(direction, direction))
    if rate == 0:
        return 0.0
    if noise < _LEAST_NOISE * size**1.5:
        untouched = size * math.log1p(-rate) if rate < 1 else -math.inf
        # PRIVACY: no noise is the worst case of little (test_little_noise_counts_as_none)
        return -math.expm1(untouched) if direction == "remove" else max(0.0, -math.expm1(epsilon + untouched))
    if rate == 1:
        return gaussian_delta(size / noise, epsilon)
    mixture = PoissonMixture(rate, min(noise, MAX_NOISE), size)
    log_delta = _log_remove(mixture, epsilon) if direction == "remove" else _log_add(mixture, epsilon)
    # PRIVACY: 1e-9 exceeds the quadrature error (test_poisson_group_delta_is_not_below_its_high_precision_value)
    return min(1.0, math.exp(min(0.0, log_delta)) * (1 + 1e-9))


def _log_remove(mixture: PoissonMixture, epsilon: float) -> float:
    """Returns log of the integral of N(x; 0, z^2) (r(x) - e^epsilon) over the x where log r > epsilon.

    log r increases, is at most 0 at x = 1/2 and at most k x / z^2 for x > 0, and at least that of the last component.
    """
    size, noise = mixture.size, mixture.noise
    threshold = epsilon * (1 - 1e-12)  # the rounding of log r must not lose mass
    if mixture.variance * threshold / size - size > 40 * noise:
        return -math.inf  # delta < e^-800
    high = size / 2 + mixture.variance * (threshold / size - math.log(mixture.rate))
    start = _root(mixture, threshold, 0.0, high * (1 + 1e-9) + 1e-9)
    end = size + math.hypot(max(start - size, 0.0), 11 * noise)

    def kernel(_: FloatArray, log_ratio: FloatArray) -> FloatArray:
        return (log_ratio + np.log(-np.expm1(np.minimum(threshold - log_ratio, 0.0))))[None]

    return _log_mass(mixture, start, end, kernel)


def _log_add(mixture: PoissonMixture, epsilon: float) -> float:
    """Returns log of the integral of N(x; 0, z^2) (1 - e^epsilon r(x)) over the x where log r < -epsilon."""
    noise = mixture.noise
    threshold = epsilon * (1 - 1e-12)
    low = -60 * noise
    if float(mixture.log_ratio(np.array([low]))[0]) >= -threshold:
        return -math.inf  # delta < e^-1800
    high = mixture.size / 2 - mixture.variance * math.log(mixture.rate)
    end = _root(mixture, -threshold, low, high * (1 + 1e-9) + 1e-9)
    start = -math.hypot(min(end, 0.0), 11 * noise)

    def kernel(_: FloatArray, log_ratio: FloatArray) -> FloatArray:
        return np.log(-np.expm1(np.minimum(threshold + log_ratio, 0.0)))[None]

    return _log_mass(mixture, start, min(end, 11 * noise), kernel)


def _log_mass(mixture: PoissonMixture, low: float, high: float, kernel: quad.Kernel) -> float:
    """Returns the log of the integral of N(x; 0, z^2) times kernel; panels are short where a Gaussian tail is steep.

    Where the integrand matters, the component that makes it up is at most `distance` away (beyond 11 z from the nearest
    one it is below e^-60 of a peak), so that it changes by less than e^10 on a panel.
    """
    tail = max(high - mixture.size, -low, 0.0)
    distance = tail + min(float(mixture.size), 11 * mixture.noise)
    scale = min(mixture.noise / 2, 5 * mixture.variance / distance)
    edges = quad.panels(low, high, scale, mixture.noise, mixture.branches)
    return float(quad.log_integral(np.ones(1), edges, mixture.log_ratio, mixture.log_null, kernel)[0])


def _root(mixture: PoissonMixture, level: float, low: float, high: float) -> float:
    """Returns the x where log r(x) = level, between two points on either side."""

    def gap(x: float) -> float:
        return float(mixture.log_ratio(np.array([x]))[0]) - level

    return float(brentq(gap, low, high, xtol=1e-13 * mixture.noise, rtol=1e-14, maxiter=500))
