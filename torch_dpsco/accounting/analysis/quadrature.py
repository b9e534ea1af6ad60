"""Renyi integrals on Gauss-Legendre panels: the numerical core of `rdp` and `wor`.

For a pair with likelihood ratio r = P/Q, E_Q[r] = 1, the module evaluates the excess moment

    E(a) = E_Q[r^a] - 1,        D_a(P||Q) = log(1 + E(a)) / (a - 1),

never E_Q[r^a] itself: E may be 1e-20, and 1 + E would lose it. Two kernels, free of cancellation where r is near 1,
give E:

* one-sided  phi_a(r) = r^a - 1 - a (r - 1) >= 0, since E_Q[r - 1] = 0;
* two-sided  phi_a(r) + phi_(1-a)(r) = r^a + r^(1-a) - r - 1 = r^a (1 - r^-a) (1 - r^-(a-1)), for loss laws symmetric
  about 0, of which only the half r > 1 is integrated.

Results are logarithms, so that orders up to 2^20 neither overflow nor underflow. `log_excess`
integrates these kernels for many orders at once.

Source: docs/proofs/accounting.md#renyi-integrals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from torch_dpsco import _validate as check

FloatArray = NDArray[np.float64]
Orders = TypeVar("Orders", float, NDArray[np.float64])
Pair = Callable[[FloatArray], tuple[FloatArray, FloatArray]]

REACH = 10.0  # standard deviations kept beyond the outermost mean: the rest has mass below 1e-23
DECAY = 33.0  # e^-33 < 5e-15: what may be dropped where one term of a sum outgrows the others
MAX_ORDER = 2.0**20  # callers use a closed upper bound beyond
_INFLATION = 1e-12  # relative; the error of a curve is below 1e-13 (test_rdp.py, against 50-digit quadrature)
CHUNK = 64_000  # elements of a matrix held at once: it stays in the cache
_POINTS, _WEIGHTS = np.polynomial.legendre.leggauss(16)
_LOWEST = (
    -700.0
)  # smaller logarithms are raised to it: exp is ten times slower where it underflows
_TERMS = 18  # of the series of phi, from l^2 / 2! to l^19 / 19!
_FACTORIALS = np.cumprod(np.arange(1.0, _TERMS + 2))[1:]
_GAPS = np.maximum(
    np.arange(_TERMS) - np.arange(_TERMS)[:, None], 0
)  # k - 2 - j: what s^j leaves of s^(k-2)


@overload
def by_order(curve: Callable[[FloatArray], FloatArray], order: float) -> float: ...


@overload
def by_order(curve: Callable[[FloatArray], FloatArray], order: FloatArray) -> FloatArray: ...


def by_order(
    curve: Callable[[FloatArray], FloatArray], order: float | FloatArray
) -> float | FloatArray:
    """Applies `curve` to blocks of orders of similar size, and returns a float for a scalar order.

    A block lies in (16^(i-1), 16^i], so that its orders can share one grid; 2^20 ends a block.

    Args:
        curve: maps an ascending 1-d array of orders to values of the same shape.
        order: scalar or 1-d array of Renyi orders, each finite and > 1.

    Returns:
        Value at each order, with the type and the shape of `order`.

    Raises:
        ValueError: an order is not finite or not > 1.
    """
    if np.ndim(order) == 0:
        return float(curve(np.array([check.order(order=order)]))[0])
    values = np.asarray(order, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"order must be a number or a 1-d array (got shape {values.shape})")
    for bad in values[~((values > 1) & (values < np.inf))]:
        check.order(order=bad)
    distinct, inverse = np.unique(values, return_inverse=True)
    block = np.ceil(np.log2(distinct) / 4)
    parts = np.split(distinct, np.flatnonzero(np.diff(block)) + 1)
    curves = [curve(part) for part in parts if part.size]
    return np.concatenate([*curves, np.empty(0)])[inverse]


def panels(
    low: float, high: float, scale: float, noise: float, branches: FloatArray
) -> FloatArray:
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


def log_excess(
    order: FloatArray, edges: FloatArray, pair: Pair, two_sided: bool = False
) -> FloatArray:
    """Returns the log of the integral of a base density times the one-sided or the two-sided kernel, for every order.

    The nodes, the same for all orders, are split by l = log r: near 0 the kernel is a series in l, which needs only
    moments of l; the others take one or two exponentials per order and node. The kernel is nonnegative, hence the sum
    over the parts is as accurate as they are.

    Args:
        order: (K,) ascending orders, a block of `by_order`: the last one is at most 16 times the first.
        edges: (m + 1,) ascending panel edges.
        pair: maps nodes to l and to the log of the base density.
        two_sided: which kernel; l >= 0, up to rounding, if it is the two-sided one.

    Returns:
        (K,) logarithms; -inf where the integral underflows to 0.
    """
    x, width = nodes(edges)
    log_ratio, log_base = pair(x)
    weight = np.log(width) + log_base
    near = np.abs(log_ratio) * order[-1] <= 1
    rising = ~near & (log_ratio > 0)
    falling = ~near & (log_ratio < 0)
    step = max(1, CHUNK // x.size)
    parts = [order[i : i + step] for i in range(0, order.size, step)]
    with np.errstate(divide="ignore", under="ignore"):
        result = _log_near(order, log_ratio[near], weight[near], two_sided)
        if rising.any():
            above = [
                _log_rising(part, log_ratio[rising], weight[rising], two_sided) for part in parts
            ]
            result = np.logaddexp(result, np.concatenate(above))
        if falling.any():
            below = [_log_falling(part, log_ratio[falling], weight[falling]) for part in parts]
            result = np.logaddexp(result, np.concatenate(below))
    return result


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
        gap = np.subtract(
            log_small, log_large, where=np.isfinite(log_large), out=np.zeros_like(log_large)
        )
        difference: FloatArray = log_large + np.log(-np.expm1(np.minimum(gap, 0.0)))
    return difference


def nodes(edges: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Returns the Gauss-Legendre nodes of the panels, and their weights."""
    half = np.diff(edges)[:, None] / 2
    return (edges[:-1, None] + half * (1 + _POINTS)).ravel(), (half * _WEIGHTS).ravel()


def _log_near(
    order: FloatArray, log_ratio: FloatArray, weight: FloatArray, two_sided: bool
) -> FloatArray:
    """Returns the part of `log_excess` from the nodes with a |l| <= 1, by a series.

    phi_a(e^l) = a (a-1) sum_k (1 + a + .. + a^(k-2)) l^k / k!. With l in units of its maximum s, the sum over the nodes
    is a (a-1) s^2 times a polynomial in a s, whose coefficients are the same for all orders. The terms left out are
    below 1e-16 of the first.
    """
    scale = np.max(np.abs(log_ratio), initial=0.0)
    if scale == 0:
        return np.full_like(order, -np.inf)
    top = np.max(weight)
    powers = np.vander(log_ratio / scale, _TERMS + 2, increasing=True)[:, 2:]
    moments = np.einsum("i,ik->k", np.exp(weight - top), powers) / _FACTORIALS
    coefficients = np.einsum("jk,k->j", np.triu(scale**_GAPS), moments)
    series = _polynomial(coefficients, order * scale)
    if two_sided:
        series = series + _polynomial(coefficients, (1 - order) * scale)
    near: FloatArray = np.log(order * (order - 1)) + 2 * np.log(scale) + np.log(series) + top
    return near


def _polynomial(coefficients: FloatArray, x: FloatArray) -> FloatArray:
    """Returns sum_j coefficients_j x^j at each x."""
    value: FloatArray = np.einsum(
        "kj,j->k", np.vander(x, coefficients.size, increasing=True), coefficients
    )
    return value


def _log_rising(
    order: FloatArray, log_ratio: FloatArray, weight: FloatArray, two_sided: bool
) -> FloatArray:
    """Returns the part of `log_excess` from the nodes with l > 0.

    With b = a - 1, the kernel is r^a (1 - r^-b) - b (r - 1), or r^a (1 - r^-b) - (1 - r^-b) if two-sided. Here a l is
    at least 1/16, and the difference at least 1/33 of its first term: no more than 6 bits are lost.
    """
    kept = _matters(order, log_ratio, weight)
    log_ratio = log_ratio[kept]
    weight = weight[kept]
    terms = (order[:, None] - 1) * -log_ratio
    share = -np.expm1(terms)
    np.subtract(log_ratio + weight, terms, out=terms)
    top = np.max(terms, axis=1)
    terms -= top[:, None]
    np.maximum(terms, _LOWEST, out=terms)
    total = np.einsum("ki,ki->k", np.exp(terms, out=terms), share)
    if two_sided:
        shift = np.max(weight)
        rest = np.einsum("ki,i->k", share, np.exp(weight - shift))
    else:
        shift = np.max(log_ratio + weight)
        rest = (order - 1) * np.sum(np.exp(log_ratio + weight - shift) * -np.expm1(-log_ratio))
    rising: FloatArray = top + np.log(total - np.exp(shift - top) * rest)
    return rising


def _matters(order: FloatArray, log_ratio: FloatArray, weight: FloatArray) -> NDArray[np.bool_]:
    """Returns which nodes may have a l + weight within 60 of the greatest one, for some order a.

    The excess over a given node is linear in a: a node is ruled out where it is too low at the first and last order.
    """
    kept = np.ones(log_ratio.size, dtype=np.bool_)
    for end in (order[0], order[-1]):
        best = np.argmax(end * log_ratio + weight)
        rise = log_ratio - log_ratio[best]
        kept &= np.maximum(order[0] * rise, order[-1] * rise) + weight - weight[best] > -60
    return kept


def _log_falling(order: FloatArray, log_ratio: FloatArray, weight: FloatArray) -> FloatArray:
    """Returns the part of `log_excess` from nodes with l < 0: r (r^b - 1) + b (1 - r), b = a - 1."""
    top = np.max(weight)
    base = np.exp(weight - top)
    growth = np.expm1((order[:, None] - 1) * log_ratio)
    total = np.einsum("ki,i->k", growth, base * np.exp(log_ratio)) - (order - 1) * np.sum(
        base * np.expm1(log_ratio)
    )
    falling: FloatArray = top + np.log(total)
    return falling
