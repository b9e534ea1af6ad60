"""Renyi divergences of one pass of random allocation: a second route, for filters and as a check.

With M the average of T independent L_i = e^((2 x_i - 1) / 2z^2), x_i ~ N(0, z^2), under "without" a record,

    remove: (a - 1) D_a = log E M^a,        add: (a - 1) D_a = log E M^(1-a).

Removing, integers a: E M^a = a! [u^a] ( sum_k e^(k (k-1) / 2z^2) (u / T)^k / k! )^T, a power of a series with positive
coefficients, by squaring, in logarithms. (a - 1) D_a is convex in a and 0 at 1: chords bound it between integers.

Adding, b = a - 1 > 0: E M^-b = (1 / Gamma(b)) int u^(b-1) E e^(-uM) du, by the trapezoidal rule in log u, and
E e^(-uM) = phi(u/T)^T, phi(v) = E e^(-vL), by that in x, both off by less than rounding. Also
E M^-b <= e^(b (b/T + 1) / 2z^2), since M is at least the geometric mean of the L_i.

Replacing: by Hoelder's inequality, D_a <= (2a / (2a-1)) D_(2a-1)[remove] + D_(2a)[add].

D_a is at most that of one unsampled release, which is used where nothing better is known.

Source: docs/proofs/allocation.md#renyi-divergences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from scipy.special import gammaln

from torch_dpsco import _validate as check
from torch_dpsco._margin import up
from torch_dpsco.accounting.analysis.pld_laws import (
    UNIT,
)
from torch_dpsco.accounting.analysis.quadrature import FloatArray, Orders, by_order
from torch_dpsco.accounting.analysis.rdp import gaussian_divergence

ADJACENCIES = ("add_remove", "zero_out", "replace_one")
LEAST_NOISE = 0.25  # from which on sums of losses are computed
MOST_NOISE, MOST_STEPS = 1e4, 1 << 20  # more counts as that much
_WHOLE_ORDERS = 256  # integer orders computed for removing
_MOST_POWER = 512.0  # b up to which the integral for adding is computed
_STEP = 1 / 80  # of log u
_LOWEST, _HIGHEST = -20.0, 45.0  # log u
_EVERY = 400  # values of log u, where the integral may end
_NODE, _REACH = 0.05, 12.0  # of x, in standard deviations
_SMALL = 0.25  # v up to which 1 - phi is computed
_ROWS = 256  # of a matrix held at once
_SERIES = [
    1 / math.factorial(k) for k in range(17, 1, -1)
]  # of e^-w - 1 + w, largest power first


def allocation_renyi(noise: float, steps: int, order: Orders, adjacency: str) -> Orders:
    """Returns a bound on the Renyi divergence of one pass, in both orders of the two data sets.

    Args:
        noise: z >= 0, noise std over the clip.
        steps: T >= 1.
        order: Renyi order(s) a > 1.
        adjacency: "add_remove", "zero_out" or "replace_one".

    Returns:
        D_a: at most that of one unsampled Gaussian release, and equal to it for one step and for z < 1/4.

    Raises:
        ValueError: an argument is out of range.

    Guarantee: as `allocation.allocation_law`.

    Source: docs/proofs/allocation.md#renyi-divergences.

    Example:
        >>> round(allocation_renyi(1.0, 100, 2.0, "add_remove"), 6)
        0.017037
    """
    noise = min(check.nonnegative(noise=noise), MOST_NOISE)
    steps = min(check.positive_count(steps=steps), MOST_STEPS)
    replaced = check.choice(ADJACENCIES, adjacency=adjacency) == "replace_one"

    def curve(orders: FloatArray) -> FloatArray:
        if noise == 0:
            return np.full_like(orders, math.inf)
        plain = gaussian_divergence(orders, noise, 2.0 if replaced else 1.0) * (1 + 1e-15)
        if steps == 1 or noise < LEAST_NOISE:
            return plain
        if not replaced:
            # PRIVACY: both directions (test_renyi_divergences_cover_both_directions)
            return np.minimum(
                plain, np.maximum(removed(noise, steps, orders), added(noise, steps, orders))
            )
        first = removed(noise, steps, 2 * orders - 1) * (2 * orders / (2 * orders - 1))
        # margin: of the sum (docs/proofs/rounding.md#model-of-arithmetic)
        return np.minimum(plain, up(first + added(noise, steps, 2 * orders), 1e-15))

    return by_order(curve, order)


def removed(noise: float, steps: int, orders: FloatArray) -> FloatArray:
    """Returns a bound on D_a of "with" against "without" a record, inf above order 256."""
    known = np.arange(1.0, _WHOLE_ORDERS + 1)
    # margin: rounded up (docs/proofs/allocation.md#renyi-divergences)
    slack = 8 * UNIT * steps.bit_length() * (20 + 2 * math.log(steps))
    heights = _log_moments(noise, steps)[1:] * (1 + 1e-12) + slack * known
    heights[0] = 0.0
    chords: FloatArray = np.interp(orders, known, heights, right=math.inf) / (orders - 1)
    return chords


def added(noise: float, steps: int, orders: FloatArray) -> FloatArray:
    """Returns a bound on D_a of "without" against "with" a record."""
    b = orders - 1
    smooth = (1 + b / steps) * (1 + 1e-15) / (2 * noise * noise)
    return np.where(
        b <= _MOST_POWER,
        np.minimum(_integral(noise, steps, np.minimum(b, _MOST_POWER)) / b, smooth),
        smooth,
    )


@lru_cache(maxsize=64)
def _log_moments(noise: float, steps: int) -> FloatArray:
    """Returns log E M^a for a = 0 .. 256."""
    k = np.arange(_WHOLE_ORDERS + 1.0)
    factorial = gammaln(k + 1)
    power = k * (k - 1) / (2 * noise * noise) - k * math.log(steps) - factorial
    total = None
    left = steps
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


def _integral(noise: float, steps: int, powers: FloatArray) -> FloatArray:
    """Returns bounds on log E M^-b: E M^-b - 1 is the integral of u^(b-1) (E e^(-uM) - e^-u) / Gamma(b)."""
    log_u, log_rise = _transform(noise, steps)
    b = powers[:, None]
    logs = b * log_u + log_rise
    top = logs.max(axis=1)[:, None]
    ends = np.arange(_EVERY, log_u.size, _EVERY)
    sums = np.cumsum(np.exp(logs - top), axis=1)[:, ends] + 1e-300  # more than what underflows
    inside = top + np.log(sums) - gammaln(b) + math.log(_STEP)
    # beyond an end U: u^(b-1) <= u^(b+c-1) U^-c, whose integral is Gamma(b + c) E M^-(b+c)
    b = b[:, :, None]
    c = 2.0 ** np.arange(-2, 11)
    most = (b + c) * ((b + c) / steps + 1) / (2 * noise * noise) + (b + 1) * _STEP
    beyond = (most - c * log_u[ends, None] + gammaln(b + c) - gammaln(b)).min(axis=2)
    # margin: of sums, integral and logarithm (docs/proofs/allocation.md#renyi-divergences)
    found = np.logaddexp(0.0, np.logaddexp(inside + 1e-11, beyond).min(axis=1))
    return np.asarray(found * (1 + 4 * UNIT) + 1e-20, dtype=np.float64)


@lru_cache(maxsize=64)
def _transform(noise: float, steps: int) -> tuple[FloatArray, FloatArray]:
    """Returns log u, and a bound on log (E e^(-uM) - e^-u) there."""
    x = np.arange(-_REACH * noise, 2 + _REACH * noise, _NODE * noise)
    weights = np.exp(-((x / noise) ** 2) / 2) * (_NODE / math.sqrt(2 * math.pi))
    ratios = np.exp((2 * x - 1) / (2 * noise * noise))
    log_u = np.asarray(
        np.arange(round(_LOWEST / _STEP), round(_HIGHEST / _STEP)) * _STEP, dtype=np.float64
    )
    u = np.exp(log_u)
    v = u / steps
    few = int(np.searchsorted(v, _SMALL))
    rest = _expected(v[:few], ratios, weights, _beyond_linear)
    phi = _expected(v[few:], ratios, weights, _decay)
    # margin: rounded up, with what is beyond the nodes (docs/proofs/allocation.md#renyi-divergences)
    rest = rest * (1 + 1e-13) + 1e-20 * v[:few] ** 2 * math.exp(1 / (noise * noise))
    phi = phi * (1 + 1e-13) + 1e-20
    log_all = np.concatenate([np.log1p(rest - v[:few]), np.log(phi)]) * steps
    log_all += 2e-15 * (steps * np.minimum(v, _SMALL) + np.abs(log_all))
    log_rise: FloatArray = log_all + np.log(-np.expm1(-(u + log_all + 2e-15 * u)))
    log_u.setflags(write=False)
    log_rise.setflags(write=False)
    return log_u, log_rise


def _expected(
    v: FloatArray,
    ratios: FloatArray,
    weights: FloatArray,
    function: Callable[[FloatArray], FloatArray],
) -> FloatArray:
    """Returns E f(v L) for each v."""
    starts = range(0, v.size, _ROWS)
    return np.concatenate(
        [np.empty(0), *(function(v[i : i + _ROWS, None] * ratios) @ weights for i in starts)]
    )


def _decay(w: FloatArray) -> FloatArray:
    return np.asarray(np.exp(-w), dtype=np.float64)


def _beyond_linear(w: FloatArray) -> FloatArray:
    """Returns e^-w - 1 + w."""
    small = np.minimum(w, 0.5)
    series = np.polyval(_SERIES, -small) * small * small
    return np.asarray(np.where(w > 0.5, np.expm1(-w) + w, series), dtype=np.float64)
