"""Integrals of log-concave functions and of Gaussian profiles, for the privacy of objective perturbation.

The integrands are densities times hockey-stick profiles. Both are log-concave, so that the logarithm has one peak and
falls on both sides: one window around the peak holds the integral, and 16-point Gauss-Legendre panels in it, refined
geometrically at a given corner, leave an error far below the 1e-9 by which results are enlarged.

Source: docs/proofs/objective.md#integrals
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.gaussian import gaussian_log_delta, log_delta_curve
from torch_dpsco.errors import InfeasibleError

FloatArray = NDArray[np.float64]

_POINTS, _WEIGHTS = np.polynomial.legendre.leggauss(16)
_PANELS = 48
_DEPTH = 50.0  # nats below the peak where the window ends: what lies outside is below 1e-18 of the integral
_KERNEL = 1e-12  # relative error of log(delta)
_ENLARGED = 1e-9  # more than the quadrature error (test_quadratures_are_never_below_the_integral)
_DOUBLINGS = 40


def profile(epsilon: float, mu: float) -> float:
    """Returns delta(epsilon, mu) of a Gaussian release for any real epsilon, rounded up.

    For epsilon < 0 it is 1 - e^epsilon + e^epsilon delta(-epsilon, mu), by the symmetry of the Gaussian pair.

    Example:
        >>> round(profile(1.0, 1.0), 6), round(profile(-1.0, 1.0), 6)
        (0.126937, 0.678818)
    """
    if epsilon < 0:
        return min(
            1.0, (-math.expm1(epsilon) + math.exp(epsilon) * profile(-epsilon, mu)) * (1 + 2e-15)
        )
    # PRIVACY: a tail of 1e-300 keeps its sign and size (test_profiles_are_never_below_their_high_precision_values)
    return min(1.0, math.exp(gaussian_log_delta(epsilon, mu) * (1 - _KERNEL)) * (1 + 1e-15))


def log_profile(epsilon: FloatArray, mu: float) -> FloatArray:
    """Returns log(delta(epsilon, mu)) at an array of real epsilons."""
    log_delta = log_delta_curve(np.abs(epsilon), mu)
    with np.errstate(divide="ignore", over="ignore", under="ignore"):
        below = np.logaddexp(
            np.log(-np.expm1(np.minimum(epsilon, 0.0))), np.minimum(epsilon, 0.0) + log_delta
        )
    return np.where(epsilon < 0, np.minimum(below, 0.0), log_delta)


def log_chi_density(radius: FloatArray, dim: int) -> FloatArray:
    """Returns the log density of the length of a standard normal vector of R^dim."""
    constant = (dim / 2 - 1) * math.log(2) + math.lgamma(dim / 2)
    with np.errstate(divide="ignore"):
        power = (dim - 1) * np.log(radius) if dim > 1 else np.zeros_like(radius)
    density: FloatArray = power - radius**2 / 2 - constant
    return density


def log_concave_integral(
    log_f: Callable[[FloatArray], FloatArray],
    low: float,
    high: float,
    corner: float = math.inf,
    width: float = 1.0,
) -> float:
    """Returns the log of the integral of f over (low, high), enlarged; f log-concave.

    Args:
        log_f: log f at an array of points.
        low: finite.
        high: finite, beyond the peak and all that matters.
        corner: where f bends on the scale `width`; inf for nowhere.
        width: > 0.
    """
    left, right = _window(log_f, low, high)
    edges = np.linspace(left, right, _PANELS + 1)
    steps = width / 4 * 2.0 ** np.arange(60)
    if left - steps[-1] < corner < right + steps[-1]:
        near = corner + np.concatenate([-steps, [0.0], steps])
        edges = np.union1d(edges, near[(near > left) & (near < right)])
    half = np.diff(edges)[:, None] / 2
    terms = (
        log_f((edges[:-1, None] + half * (1 + _POINTS)).ravel()) + np.log(half * _WEIGHTS).ravel()
    )
    top = float(np.max(terms))
    if top == -math.inf:
        return -math.inf
    log_total = top + math.log(float(np.sum(np.exp(terms - top))))
    # PRIVACY: quadrature errors only on the safe side (test_quadratures_are_never_below_the_integral)
    return log_total + abs(log_total) * _KERNEL + _ENLARGED


def _window(
    log_f: Callable[[FloatArray], FloatArray], low: float, high: float
) -> tuple[float, float]:
    """Returns an interval around the peak outside of which f is more than `_DEPTH` nats below it."""
    left = low
    right = high
    for _ in range(12):
        grid = np.linspace(left, right, 129)
        best = int(np.argmax(log_f(grid)))
        left = float(grid[max(best - 1, 0)])
        right = float(grid[min(best + 1, 128)])
    peak = (left + right) / 2
    floor = float(np.max(log_f(np.array([left, peak, right])))) - _DEPTH

    def end(outside: float) -> float:
        inside = peak
        if float(log_f(np.array([outside]))[0]) >= floor:
            return outside
        for _ in range(20):  # the outer end is kept: too wide is safe
            middle = (inside + outside) / 2
            inside, outside = (
                (middle, outside)
                if float(log_f(np.array([middle]))[0]) >= floor
                else (inside, middle)
            )
        return outside

    return end(low), end(high)


def shifted_profile(epsilon: float, shift: float, dim: int, mu: float, low: float = 0.0) -> float:
    """Returns the integral over t > low of p(t) delta(epsilon - s t, mu), enlarged.

    p is the density of the length of a standard normal vector of R^dim, or, for dim = 0, of a normal variable; mu = 0
    means the limit (1 - e^(epsilon - s t))_+.

    Args:
        epsilon: real.
        shift: s > 0.
        dim: >= 0.
        mu: >= 0.
        low: lower end.
    """
    corner = epsilon / shift
    reach = (
        math.sqrt(max(dim, 1)) + 39.0
    )  # the length is beyond it with probability < e^(-39^2/2) < 1e-320
    if mu == 0:
        low = max(low, corner)
        if low >= reach:
            return sys.float_info.min

    def log_f(t: FloatArray) -> FloatArray:
        with np.errstate(divide="ignore"):
            tail = np.log(-np.expm1(np.minimum(epsilon - shift * t, 0.0))) if mu == 0 else None
        kernel = log_profile(epsilon - shift * t, mu) if tail is None else tail
        if dim == 0:
            return kernel - t**2 / 2 - math.log(2 * math.pi) / 2
        return kernel + log_chi_density(t, dim)

    log_total = log_concave_integral(
        log_f, low, reach, corner if mu else math.inf, mu / shift if mu else 1.0
    )
    return min(1.0, math.exp(min(0.0, log_total)) + sys.float_info.min)


def least_noise(
    delta_of: Callable[[float], float], delta: float, start: float, why_not: str
) -> float:
    """Returns the least sigma with delta_of(sigma) <= delta, for a decreasing function, to 1e-10 and rounded up.

    Args:
        delta_of: delta as a function of sigma > 0.
        delta: in (0, 1).
        start: > 0, where the search begins.
        why_not: message if no sigma works.

    Raises:
        ValueError: delta is not in (0, 1).
        InfeasibleError: no sigma up to 2^40 times the start works.
    """
    delta = check.open_interval(0.0, 1.0, delta=delta)
    high = start
    for _ in range(_DOUBLINGS):
        if delta_of(high) <= delta:
            break
        high *= 2
    else:
        raise InfeasibleError(why_not)
    low = high / 2
    while delta_of(low) <= delta and low > start * 2.0**-_DOUBLINGS:
        high = low
        low = low / 2
    while high > low * (1 + 1e-10):
        middle = math.sqrt(low) * math.sqrt(high)
        if not low < middle < high:
            break
        low, high = (low, middle) if delta_of(middle) <= delta else (middle, high)
    # PRIVACY: the end of the bracket that was checked (test_the_noise_meets_its_delta_and_hardly_less_does_not)
    return high


def log_normal_cdf(x: float) -> float:
    """Returns log Phi(x)."""
    return float(log_ndtr(x))
