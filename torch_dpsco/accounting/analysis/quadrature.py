"""Renyi integrals on Gauss-Legendre panels: the numerical core of `rdp` and `wor`.

For a pair with likelihood ratio r = P/Q, E_Q[r] = 1, the module evaluates the excess moment

    E(a) = E_Q[r^a] - 1,        D_a(P||Q) = log(1 + E(a)) / (a - 1),

never E_Q[r^a] itself: E may be 1e-20, and 1 + E would lose it. Two kernels, both free of cancellation, give E:

* `one_sided`  E_Q[phi_a(r)],  phi_a(r) = r^a - 1 - a (r - 1) >= 0, since E_Q[r - 1] = 0;
* `two_sided`  r^a + r^(1-a) - r - 1 = r^a (1 - r^-a) (1 - r^-(a-1)), for loss laws symmetric about 0, of which only
  the half r > 1 is integrated.

Everything is kept in logarithms, so that orders up to 2^20 neither overflow nor underflow.

Source: accounting spec, sections 4 (common device) and 13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from torch_dpsco import _validate

__all__ = [
    "CHUNK",
    "DECAY",
    "MAX_ORDER",
    "REACH",
    "FloatArray",
    "Kernel",
    "Orders",
    "by_order",
    "divergence",
    "log_difference",
    "log_integral",
    "one_sided",
    "panels",
    "rounded_up",
    "two_sided",
]

FloatArray = NDArray[np.float64]
Orders = TypeVar("Orders", float, NDArray[np.float64])
Kernel = Callable[[FloatArray, FloatArray], FloatArray]

REACH = 10.0  # standard deviations kept beyond the outermost mean: the rest has mass below 1e-23
DECAY = 33.0  # e^-33 < 5e-15: what may be dropped where one term of a sum outgrows the others
MAX_ORDER = 2.0**20  # callers use a closed upper bound beyond
_INFLATION = 1e-12  # relative; the error of a curve is below 1e-13 (test_rdp.py, against 50-digit quadrature)
CHUNK = 2_000_000  # elements of a matrix held at once
_POINTS, _WEIGHTS = np.polynomial.legendre.leggauss(16)


@overload
def by_order(curve: Callable[[FloatArray], FloatArray], order: float) -> float: ...


@overload
def by_order(curve: Callable[[FloatArray], FloatArray], order: FloatArray) -> FloatArray: ...


def by_order(curve: Callable[[FloatArray], FloatArray], order: float | FloatArray) -> float | FloatArray:
    """Applies `curve` to blocks of orders of similar size, and returns a float for a scalar order.

    A block lies in (4^(i-1), 4^i], so that its orders can share one grid; 2^20 ends a block.

    Args:
        curve: maps an ascending 1-d array of orders to values of the same shape.
        order: scalar or 1-d array of Renyi orders, each finite and > 1.

    Returns:
        Value at each order, with the type and the shape of `order`.

    Raises:
        ValueError: an order is not finite or not > 1.
    """
    if np.ndim(order) == 0:
        return float(curve(np.array([_validate.order(order=order)]))[0])
    values = np.asarray(order, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"order must be a number or a 1-d array (got shape {values.shape})")
    for bad in values[~((values > 1) & (values < np.inf))]:
        _validate.order(order=bad)
    distinct, inverse = np.unique(values, return_inverse=True)
    block = np.ceil(np.log2(distinct) / 2)
    parts = np.split(distinct, np.flatnonzero(np.diff(block)) + 1)
    curves = [curve(part) for part in parts if part.size]
    return np.concatenate([*curves, np.empty(0)])[inverse]


def panels(low: float, high: float, scale: float, noise: float, branches: FloatArray) -> FloatArray:
    """Returns the edges of panels 2 `scale` wide, narrower near the complex branch points of the log ratio.

    The branch points have the real parts `branches` and lie pi noise^2 away from the real axis. Around each of them
    panels start at 4 noise^2 and double, so that every panel of half width h has its branch points at a distance of
    at least pi h / 2: outside the Bernstein ellipse of parameter 3.4, where 16 points leave a relative error 1e-17.
    """
    edges = np.linspace(low, high, 1 + max(1, int(np.ceil((high - low) / (2 * scale)))))
    finest = 4 * noise * noise
    if finest < 2 * scale:
        offsets = finest * 2.0 ** np.arange(int(np.ceil(np.log2(2 * scale / finest))))
        around = branches[:, None] + np.concatenate([-offsets, [0.0], offsets])
        edges = np.union1d(edges, around[(around > low) & (around < high)])
    return edges


def log_integral(
    order: FloatArray,
    edges: FloatArray,
    log_ratio: Callable[[FloatArray], FloatArray],
    log_base: Callable[[FloatArray], FloatArray],
    kernel: Kernel,
) -> FloatArray:
    """Returns the log of the integral of exp(log_base(x)) kernel(order, r(x)) dx, for every order on one grid.

    Args:
        order: (K,) orders.
        edges: (m + 1,) ascending panel edges.
        log_ratio: log r at each node.
        log_base: log density of the base measure at each node.
        kernel: log of the integrand, of (K, 1) orders and (nodes,) log ratios.

    Returns:
        (K,) logarithms; -inf where the integral underflows to 0.
    """
    half = np.diff(edges)[:, None] / 2
    x = (edges[:-1, None] + half * (1 + _POINTS)).ravel()
    with np.errstate(divide="ignore", under="ignore"):
        weight = np.log(half * _WEIGHTS).ravel() + log_base(x)
        ratio = log_ratio(x)
        step = max(1, CHUNK // x.size)
        parts = [order[i : i + step, None] for i in range(0, order.size, step)]
        return np.concatenate([_log_sum(kernel(part, ratio) + weight) for part in parts])


def one_sided(order: FloatArray, log_ratio: FloatArray) -> FloatArray:
    """Returns log phi_a(r) = log(r^a - 1 - a (r - 1)).

    With b = a - 1 and l = log r, phi e^-max(l, 0) is u expm1(b l) - b v, where u = e^min(l, 0) and v is 1 - e^-l or
    e^l - 1: stable unless a |l| is small, where the series a b sum_k (1 + .. + a^(k-2)) l^k / k! takes over.
    """
    excess = order - 1
    u = np.exp(np.minimum(log_ratio, 0.0))
    v = np.copysign(np.expm1(-np.abs(log_ratio)), log_ratio)
    power = excess * log_ratio
    value = u * np.expm1(np.minimum(power, 600.0)) - excess * v
    small = np.abs(order * log_ratio) < 1e-2
    if small.any():
        value = np.where(small, _phi_series(order, np.where(small, log_ratio, 0.0)), value)
    return np.maximum(log_ratio, 0.0) + np.log(value) + np.maximum(power - 600.0, 0.0)


def two_sided(order: FloatArray, log_ratio: FloatArray) -> FloatArray:
    """Returns log(r^a + r^(1-a) - r - 1) for log r >= 0, from its product form."""
    power = order * log_ratio
    kernel: FloatArray = power + np.log(np.expm1(-power) * np.expm1(-(order - 1) * log_ratio))
    return kernel


def divergence(order: FloatArray, log_excess: FloatArray) -> FloatArray:
    """Returns D_a = log(1 + E) / (a - 1) from log E, rounded up by more than the quadrature error."""
    return rounded_up(np.logaddexp(0.0, log_excess) / (order - 1))


def rounded_up(value: FloatArray) -> FloatArray:
    """Returns the values enlarged by a relative 1e-12, ten times the error of any curve."""
    # PRIVACY: covers quadrature and rounding errors (test_no_curve_is_below_its_high_precision_value)
    enlarged: FloatArray = value * (1 + _INFLATION)
    return enlarged


def log_difference(log_large: FloatArray, log_small: FloatArray) -> FloatArray:
    """Returns log(exp(log_large) - exp(log_small)), and -inf where the difference is not positive."""
    with np.errstate(divide="ignore"):
        gap = np.subtract(log_small, log_large, where=np.isfinite(log_large), out=np.zeros_like(log_large))
        difference: FloatArray = log_large + np.log(-np.expm1(np.minimum(gap, 0.0)))
    return difference


def _phi_series(order: FloatArray, log_ratio: FloatArray) -> FloatArray:
    """Returns phi_a(r) e^-max(l, 0) for a |l| < 1e-2; the terms left out are below 1e-18 of the first."""
    geometric, factorial, power = np.ones_like(order), 2.0, np.ones_like(log_ratio)
    total = np.full(np.broadcast_shapes(order.shape, log_ratio.shape), 0.5)
    for k in range(3, 10):
        geometric = 1 + order * geometric
        factorial *= k
        power = power * log_ratio
        total = total + geometric * power / factorial
    phi: FloatArray = order * (order - 1) * log_ratio**2 * total * np.exp(-np.maximum(log_ratio, 0.0))
    return phi


def _log_sum(terms: FloatArray) -> FloatArray:
    """Returns log(sum(exp(terms))) along the last axis."""
    top = np.max(terms, axis=-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0.0)
    total: FloatArray = top[..., 0] + np.log(np.sum(np.exp(terms - top), axis=-1))
    return total
