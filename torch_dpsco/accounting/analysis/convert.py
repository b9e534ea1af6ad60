"""Renyi curves to (epsilon, delta).

If D_a(P||Q) <= D for both orderings of every neighboring pair, the mechanism is (epsilon, delta)-DP with

    epsilon = D + log((a - 1) / a) - (log(delta) + log(a)) / (a - 1)

for any delta in (0, 1), and the best order may be chosen freely, as long as the curve was fixed in advance.

Source: docs/proofs/accounting.md#from-renyi-divergences-to-epsilon-and-delta; Balle, Barthe, Gaboardi, Hsu and
Sato 2020; Canonne, Kamath and Steinke 2020.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from torch_dpsco import _validate
from torch_dpsco.accounting.analysis.convert_failures import delta_with_failure

__all__ = ["RDPEpsilon", "delta_with_failure", "rdp_delta", "rdp_epsilon", "rdp_epsilon_at_order"]

FloatArray = NDArray[np.float64]

_LEAST_ORDER = 1.01  # closer to 1 the conversion multiplies errors of the curve by more than 100
_ROUNDING = 1e-14  # relative to the largest term of a sum: more than its rounding


class RDPEpsilon(NamedTuple):
    """An epsilon and the order at which it was obtained."""

    epsilon: float
    order: float


def rdp_epsilon_at_order(value: float, order: float, delta: float) -> float:
    """Returns the epsilon of one order, as the formula gives it: it may be negative, where 0 is the valid statement.

    Args:
        value: Renyi divergence D at the order, >= 0.
        order: a > 1.
        delta: in (0, 1).

    Returns:
        D + log((a - 1) / a) - (log(delta) + log(a)) / (a - 1).

    Raises:
        ValueError: an argument is out of range.

    Source: docs/proofs/accounting.md#from-renyi-divergences-to-epsilon-and-delta.

    Example:
        >>> round(rdp_epsilon_at_order(value=0.1, order=10, delta=1e-5), 4)
        1.018
    """
    value, order, log_delta = _checked(value, order, delta)
    return value + math.log1p(-1 / order) - (log_delta + math.log(order)) / (order - 1)


def rdp_epsilon(orders: ArrayLike, values: ArrayLike, delta: float) -> RDPEpsilon:
    """Returns the least epsilon over the orders of a Renyi curve, rounded up, and never negative.

    Orders up to 1.01 are not converted. They still count in a second rule: a Renyi divergence of any order bounds the
    Kullback-Leibler divergence, and total variation <= sqrt(1 - exp(-KL)), so that epsilon is 0 once
    delta^2 >= 1 - exp(-D) at some order.

    Args:
        orders: (K,) orders, each > 1.
        values: (K,) Renyi divergences, each >= 0 (inf allowed).
        delta: in (0, 1).

    Returns:
        The epsilon and its order; epsilon is inf if no order is usable.

    Raises:
        ValueError: delta is not in (0, 1), or the arrays do not match or hold values out of range.

    Guarantee: (epsilon, delta)-DP under the adjacency of the curve, if the curve was fixed in advance.

    Source: docs/proofs/accounting.md#from-renyi-divergences-to-epsilon-and-delta.

    Example:
        >>> rdp_epsilon(orders=[2.0, 8.0], values=[0.5, 2.0], delta=1e-5).order
        8.0
    """
    order, value = _curve(orders, values)
    log_delta = math.log(_validate.open_interval(0.0, 1.0, delta=delta))
    total_variation = np.sqrt(-np.expm1(-value))
    if total_variation.min() <= delta * (1 - _ROUNDING):
        return RDPEpsilon(0.0, float(order[np.argmin(total_variation)]))
    shape = np.log1p(-1 / order)
    correction = shape - (log_delta + np.log(order)) / (order - 1)
    terms = value - shape + (np.log(order) - log_delta) / (order - 1)  # their sizes: the terms may cancel
    # PRIVACY: rounded up by more than the error of the sum (test_delta_at_the_converted_epsilon_is_at_most_delta)
    epsilon = value + correction + _ROUNDING * terms
    epsilon[order <= _LEAST_ORDER] = math.inf
    best = int(np.argmin(epsilon))
    return RDPEpsilon(max(0.0, float(epsilon[best])), float(order[best]))


def rdp_delta(orders: ArrayLike, values: ArrayLike, epsilon: float) -> float:
    """Returns the least delta over the orders of a Renyi curve, rounded up: the inverse of `rdp_epsilon`.

    delta = min_a exp((a - 1) (D_a - epsilon)) (1 - 1/a)^(a - 1) / a, and at most min_a sqrt(1 - exp(-D_a)), which
    bounds the total variation distance, hence delta at every epsilon.

    Args:
        orders: (K,) orders, each > 1.
        values: (K,) Renyi divergences, each >= 0 (inf allowed).
        epsilon: >= 0.

    Returns:
        delta in [0, 1].

    Raises:
        ValueError: epsilon is negative or not finite, or the arrays do not match or hold values out of range.

    Guarantee: (epsilon, delta)-DP under the adjacency of the curve, if the curve was fixed in advance.

    Source: docs/proofs/accounting.md#from-renyi-divergences-to-epsilon-and-delta.

    Example:
        >>> round(rdp_delta(orders=[2.0, 8.0], values=[0.5, 2.0], epsilon=4.0), 9)
        4.1e-08
    """
    order, value = _curve(orders, values)
    epsilon = _validate.nonnegative(epsilon=epsilon)
    excess = order - 1
    shape = excess * np.log1p(-1 / order) - np.log(order)
    log_delta = excess * (value - epsilon) + shape
    # PRIVACY: rounded up, by less than what rdp_epsilon adds (test_delta_at_the_converted_epsilon_is_at_most_delta)
    log_delta = log_delta + _ROUNDING / 8 * (excess * (value + epsilon) + np.abs(shape))
    log_delta[order <= _LEAST_ORDER] = math.inf
    total_variation = math.sqrt(-math.expm1(-value.min())) * (1 + _ROUNDING / 8)
    return min(1.0, total_variation, math.exp(min(0.0, log_delta.min())))


def _checked(value: float, order: float, delta: float) -> tuple[float, float, float]:
    log_delta = math.log(_validate.open_interval(0.0, 1.0, delta=delta))
    return _validate.nonnegative(value=value, allow_inf=True), _validate.order(order=order), log_delta


def _curve(orders: ArrayLike, values: ArrayLike) -> tuple[FloatArray, FloatArray]:
    order, value = np.asarray(orders, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if order.ndim != 1 or order.shape != value.shape or order.size == 0:
        raise ValueError(f"orders and values must be 1-d, of one length >= 1 (got {order.shape} and {value.shape})")
    for bad in order[~((order > 1) & (order < math.inf))]:
        _validate.order(orders=bad)
    for bad in value[~(value >= 0)]:
        _validate.nonnegative(values=bad, allow_inf=True)
    return order, value
