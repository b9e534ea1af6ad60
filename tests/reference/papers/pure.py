"""The K-norm mechanism, tight: its Renyi curve, and the profile of pure mechanisms.

The L2 K-norm mechanism has noise of density proportional to exp(-epsilon |z|_2 / sensitivity), in R^dim. Measure z in
units of the sensitivity. Between a data set and a neighbor the center moves by v, |v| <= 1; the moment E exp(c (|Z - v|
- |Z|)) is convex and even in v, so |v| = 1 is the worst. The privacy loss is epsilon eta with

    eta = |z - v| - |z|  in [-1, 1],

one of the two elliptic coordinates with foci 0 and v. The other, xi = |z - v| + |z|, has the density
(xi^2 - 1)^((dim-3)/2) (xi^2 - eta^2) e^(-epsilon xi / 2), and integrates to Bessel functions K: under either center,
eta has the density (for the neighbor with the opposite sign in the exponent)

    e^(epsilon eta / 2) (1 - eta^2)^((dim-3)/2) (kappa + 1 - eta^2) / constant,
    kappa = 2 (dim - 1) / epsilon * K_(nu+1)(epsilon / 2) / K_nu(epsilon / 2),     nu = dim / 2 - 1.

So the loss is symmetric, every quantity is one integral over eta = sin(theta) in (0, 1), and (a - 1) D_a has even a
closed form in Bessel functions, which the tests use (its functions overflow for large dim).

Source: docs/proofs/accounting.md#k-norm-noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.pure import rdp_laplace, rdp_pure, rho_pure
from torch_dpsco.accounting.analysis.rdp import (
    FloatArray,
    Orders,
    by_order,
    divergence,
)

_DEPTH = 50.0  # what lies e^-50 below the peak of an integrand is left out
_PANELS = 32
_POINTS, _WEIGHTS = np.polynomial.legendre.leggauss(16)
_NODES = ((np.arange(_PANELS)[:, None] + (1 + _POINTS) / 2) / _PANELS).ravel()
_LOG_WEIGHTS = np.log(np.tile(_WEIGHTS / 2 / _PANELS, _PANELS))
_LEAST_EPSILON = 1e-100  # below, the bound of randomized response serves: products underflow


def rdp_l2_knorm(epsilon: float, dim: int, order: Orders) -> Orders:
    """Returns the Renyi divergence of one K-norm release.

    For moderate a epsilon it is about a epsilon^2 / (2 dim), the price of a Gaussian of nearly equal energy, and far
    below that of other epsilon-DP mechanisms; it tends to epsilon as a grows.

    Args:
        epsilon: >= 0, the pure epsilon of the release: the noise has the scale sensitivity / epsilon.
        dim: >= 1, coordinates of the release.
        order: Renyi order(s) a > 1.

    Returns:
        D_a, rounded up, and never above `rdp_pure`.

    Raises:
        ValueError: an argument is out of range.

    Guarantee: one release of a vector with that L2 sensitivity, whatever the adjacency of the sensitivity.

    Source: docs/proofs/accounting.md#k-norm-noise.

    Example:
        >>> round(rdp_l2_knorm(epsilon=1.0, dim=100, order=2.0), 7)
        0.0099988
    """
    epsilon = check.nonnegative(epsilon=epsilon)
    dim = check.positive_count(dim=dim)

    def curve(block: FloatArray) -> FloatArray:
        worst = rdp_pure(epsilon, block)
        if epsilon < _LEAST_EPSILON:
            return worst
        if dim == 1:
            return np.minimum(rdp_laplace(1 / epsilon, block), worst)
        # PRIVACY: quadrature errors are below what is added (test_the_curve_is_not_below_its_closed_form)
        return np.minimum(divergence(block, _log_excess(epsilon, dim, block)), worst)

    return by_order(curve, order)


def two_sided(order: FloatArray, log_ratio: FloatArray) -> FloatArray:
    """Returns log(r^a + r^(1-a) - r - 1) for log r >= 0, from its product form."""
    power = order * log_ratio
    kernel: FloatArray = power + np.log(np.expm1(-power) * np.expm1(-(order - 1) * log_ratio))
    return kernel


def _log_excess(epsilon: float, dim: int, order: FloatArray) -> FloatArray:
    """Returns log E, E = E_Q[r^a] - 1, by the two-sided kernel: Q has the exponent -loss / 2 on loss > 0."""
    column = order[:, None]

    def kernel(loss: FloatArray) -> FloatArray:
        return two_sided(column, loss) - column * loss

    slopes = (order - 0.5) * epsilon
    return _log_integral(epsilon, dim, slopes, kernel) - _log_total(epsilon, dim)


def _log_total(epsilon: float, dim: int) -> float:
    """Returns the log of the constant of the density of eta."""

    def kernel(loss: FloatArray) -> FloatArray:
        return np.log1p(np.exp(-loss))

    return float(_log_integral(epsilon, dim, np.array([epsilon / 2]), kernel)[0])


def _log_integral(
    epsilon: float,
    dim: int,
    slopes: FloatArray,
    kernel: Callable[[FloatArray], FloatArray],
    start: float = 0.0,
) -> FloatArray:
    """Returns log of the integral over theta in (start, pi/2) of w(theta) exp(slope sin(theta) + kernel(loss)).

    loss = epsilon sin(theta) and w = cos^(dim-2)(theta) (1 + cos^2(theta) / kappa): the Jacobian cancels the pole that
    dim = 2 has in eta, and w is entire. Each slope has nodes of its own, 32 panels of 16 points on the interval where
    slope sin + (dim-2) log cos, which is concave in theta, is within e^-50 of its peak.

    Args:
        epsilon: > 0.
        dim: >= 2.
        slopes: (K,) each > 0.
        kernel: maps (K, nodes) losses to logarithms <= log 2, which grow at most as a power of theta.
        start: lower end, in [0, pi/2).
    """
    low, high = _window(slopes, dim, start)
    theta = low[:, None] + (high - low)[:, None] * _NODES
    sine = np.sin(theta)
    with np.errstate(divide="ignore", under="ignore"):
        log_cosine = np.log1p(-sine * sine) / 2
        weight = (
            (dim - 2) * np.where(sine < 1, log_cosine, -800.0)
            if dim > 2
            else np.zeros_like(theta)
        )
        weight = weight + np.log1p(np.cos(theta) ** 2 / _kappa(epsilon, dim))
        terms = weight + slopes[:, None] * sine + kernel(epsilon * sine) + _LOG_WEIGHTS
        top = terms.max(axis=1)
        total: FloatArray = (
            np.log(np.sum(np.exp(terms - top[:, None]), axis=1)) + top + np.log(high - low)
        )
    return total


def _window(slopes: FloatArray, dim: int, start: float) -> tuple[FloatArray, FloatArray]:
    """Returns the theta on both sides of the peak of slope sin + (dim-2) log cos where it has fallen by `_DEPTH`."""
    power = dim - 2
    sine = 2 * slopes / (power + np.hypot(power, 2 * slopes))
    peak = np.maximum(np.arcsin(np.minimum(sine, 1.0)), start)

    def fall(theta: FloatArray) -> FloatArray:
        # differences by product formulas: the values themselves may be 1e9 with a fall of 1
        half = (theta - peak) / 2
        drop: FloatArray = -2 * slopes * np.sin(half) * np.cos(peak + half)
        if power:
            ratio = np.maximum(np.cos(theta), 1e-320) / np.maximum(np.cos(peak), 1e-300)
            drop = drop - power * np.log(ratio)
        return drop

    inside_low = peak
    outside_low = np.full_like(peak, start)
    inside_high = peak
    outside_high = np.full_like(peak, math.pi / 2)
    for _ in range(60):  # the outer ends are kept: too wide is safe
        middle = (inside_low + outside_low) / 2
        deep = fall(middle) > _DEPTH
        outside_low = np.where(deep, middle, outside_low)
        inside_low = np.where(deep, inside_low, middle)
        middle = (inside_high + outside_high) / 2
        deep = fall(middle) > _DEPTH
        outside_high = np.where(deep, middle, outside_high)
        inside_high = np.where(deep, inside_high, middle)
    return outside_low, outside_high


def _kappa(epsilon: float, dim: int) -> float:
    """Returns 2 (dim-1) / epsilon * K_(nu+1)(x) / K_nu(x), nu = dim/2 - 1, x = epsilon/2.

    K_nu(x) = 1/2 integral over the real line of e^(nu t - x cosh t). The peak is at e^t = (nu + h) / x with
    h = hypot(nu, x). At a distance u from it the exponent has fallen by h (cosh u - 1) + nu (sinh u - u), which on the
    left is at least nu (|u| - 1), and 0.3 h u^2 for |u| < 1. The ratio is the mean of e^t; the trapezoid rule converges
    geometrically.
    """
    nu = dim / 2 - 1
    x = epsilon / 2
    h = math.hypot(nu, x)
    step = min(0.1, 0.4 / math.sqrt(h))
    right = math.acosh(1 + 2 * _DEPTH / h)
    left = math.sqrt(_DEPTH / 0.3 / h)
    if left > 1:
        left = math.log((nu + h) / x) + math.log(4 * _DEPTH / x) + 1
        left = min(left, _DEPTH / nu + 1) if nu > 0 else left
    u = np.arange(-math.ceil(left / step), math.ceil(right / step) + 1, dtype=np.float64) * step
    weight = np.exp(nu * u - (h + nu) / 2 * np.expm1(u) - x * x / (h + nu) / 2 * np.expm1(-u))
    mean = np.sum(weight * np.exp(u)) / np.sum(weight)
    return 2 * (dim - 1) / epsilon * (nu + h) / x * float(mean)


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


def rdp_pure_dp(epsilon: float, order: float) -> float:
    """Returns `rdp_pure`; at order 1 the Kullback-Leibler divergence epsilon tanh(epsilon / 2)."""
    return rho_pure(epsilon) if order == 1 else rdp_pure(epsilon, order)
