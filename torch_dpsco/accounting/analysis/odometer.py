"""Privacy loss of runs whose parameters, and whose end, are chosen from earlier outputs.

Let L be the privacy loss of the releases so far and S_a the sum of their Renyi costs at order a, each cost chosen by
the past. For fixed weights w_a that sum to 1,

    M = sum over a of w_a e^((a - 1) (L - S_a))

is a nonnegative supermartingale of mean at most 1. Three statements follow; the orders and weights must be fixed before
the first release, and the costs hold in both directions.

* Odometer. By Ville's inequality M < 1/delta for ever, except with probability delta: L <= epsilon_t at all times t,
  where epsilon_t solves sum_a w_a e^((a-1) (epsilon_t - S_a)) = 1/delta.
* Filter over a mixture of orders. If, where the run stops, delta sum_a w_a e^((a-1) (l - S_a)) >= 1 - e^(epsilon - l)
  for every l > epsilon, then (1 - e^(epsilon - L))_+ <= delta M, and optional stopping bounds its mean, the hockey
  stick, by delta: the run is (epsilon, delta)-DP. The costs only grow, so that the condition is checked before each
  event with the event included.
* Filters of one order, of zCDP and of unsampled Gaussians compare a sum with a fixed budget: no overhead.

Source: docs/proofs/accounting.md#odometer-and-mixture-filter; Feldman and Zrnic 2021; Whitehouse, Ramdas, Rogers and
Wu 2023; Smith and Thakurta 2022.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.convert import curve_of, zcdp_rho
from torch_dpsco.accounting.analysis.gaussian import gaussian_mu
from torch_dpsco.accounting.analysis.quadrature import FloatArray

ODOMETER_ORDERS = (
    1.25,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
    8.0,
    12.0,
    16.0,
    24.0,
    32.0,
    48.0,
    64.0,
    128.0,
    256.0,
)

_ROUNDING = 1e-14  # relative to the largest exponent of a sum: more than its rounding
_GAP = 1e-10  # how far below the minimum of the filter's function its lower bound may lie


def odometer_epsilon(
    orders: ArrayLike, spent: ArrayLike, delta: float, weights: ArrayLike | None = None
) -> float:
    """Returns the privacy loss that is exceeded at no time of an adaptive run, except with probability delta.

    Args:
        orders: (K,) orders, each > 1, fixed before the run.
        spent: (K,) sum of the Renyi costs so far at each order, each >= 0 (inf: the order no longer counts).
        delta: in (0, 1).
        weights: (K,) positive weights that sum to 1, fixed before the run; None: uniform.

    Returns:
        epsilon_t > 0, rounded up; inf if every order is spent.

    Raises:
        ValueError: an argument is out of range or the lengths differ.

    Guarantee: at all times at once, for parameters and stopping rules chosen from earlier outputs.

    Source: docs/proofs/accounting.md#odometer-and-mixture-filter.

    Example:
        >>> orders = np.array(ODOMETER_ORDERS)
        >>> round(odometer_epsilon(orders, 0.1 * orders, delta=1e-5), 4)
        2.4562
    """
    excess, cost, log_weight = _state(orders, spent, weights)
    target = -math.log(check.open_interval(0.0, 1.0, delta=delta))
    # at this epsilon one order alone suffices
    high = float(np.min(cost + (target - log_weight) / excess, initial=math.inf))
    if math.isinf(high):
        return math.inf
    low = 0.0
    for _ in range(200):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        value, _ = _log_sum(log_weight + excess * (middle - cost), excess, np.maximum(cost, middle))
        # margin: a middle that rounding could have helped stays below the root
        # (docs/proofs/accounting.md#odometer-and-mixture-filter)
        if value >= target * (1 + _ROUNDING):
            high = middle
        else:
            low = middle
    # PRIVACY: rounded up (test_the_odometer_is_rounded_up)
    return high * (1 + _ROUNDING)


def mixture_filter_admits(
    epsilon: float,
    delta: float,
    orders: ArrayLike,
    spent: ArrayLike,
    weights: ArrayLike | None = None,
) -> bool:
    """Returns whether a run with these costs, the event asked for included, is within (epsilon, delta).

    Args:
        epsilon: >= 0, the budget.
        delta: in (0, 1), the budget.
        orders: (K,) orders, each > 1, fixed before the run.
        spent: (K,) sum of the Renyi costs at each order, the event asked for included.
        weights: (K,) positive weights that sum to 1, fixed before the run; None: uniform.

    Returns:
        True only if the condition of the module's docstring holds; False also within rounding of its boundary.

    Raises:
        ValueError: an argument is out of range or the lengths differ.

    Guarantee: a run is (epsilon, delta)-DP if every event was admitted before its noise was drawn.

    Source: docs/proofs/accounting.md#odometer-and-mixture-filter.

    Example:
        >>> orders = np.array(ODOMETER_ORDERS)
        >>> [mixture_filter_admits(2.2, 1e-5, orders, rho * orders) for rho in (0.1, 0.11)]
        [True, False]
    """
    target = -math.log(check.open_interval(0.0, 1.0, delta=delta))
    return mixture_filter_log_margin(epsilon, orders, spent, weights) >= target * (1 + _ROUNDING)


def mixture_filter_log_margin(
    epsilon: float, orders: ArrayLike, spent: ArrayLike, weights: ArrayLike | None = None
) -> float:
    """Returns a lower bound on h = min over x > 0 of log(sum_a W_a e^((a-1) x)) - log(1 - e^-x).

    W_a = w_a e^((a-1) (epsilon - S_a)); e^-h is the smallest delta that the filter can grant at epsilon. Both terms are
    convex in x, so that between a point with a negative slope and one with a positive slope the function lies above
    both tangents: where these cross is the bound. Bisection on the slope ends when the bound is within 1e-10 of a value
    of the function; values are lowered and slopes padded by their rounding. So the minimum is never overestimated.

    Args:
        epsilon: >= 0.
        orders: (K,) orders, each > 1.
        spent: (K,) sum of the Renyi costs at each order, each >= 0.
        weights: (K,) positive weights that sum to 1; None: uniform.

    Returns:
        h, rounded down, by less than 1e-9 and a relative 1e-12 of its exponents; -inf if every order is spent.

    Raises:
        ValueError: an argument is out of range or the lengths differ.

    Source: docs/proofs/accounting.md#odometer-and-mixture-filter.

    Example:
        >>> h = mixture_filter_log_margin(1.0, [4.0], [0.1])  # one order: the conversion of `convert`
        >>> from torch_dpsco.accounting.analysis.convert import rdp_delta
        >>> round(math.exp(-h) / rdp_delta([4.0], [0.1], 1.0), 8)
        1.0
    """
    epsilon = check.nonnegative(epsilon=epsilon)
    excess, cost, log_weight = _state(orders, spent, weights)
    if excess.size == 0:
        return -math.inf
    exponents = log_weight + excess * (epsilon - cost)

    def tangent(x: float) -> tuple[float, float]:
        value, slope = _log_sum(exponents + excess * x, excess, np.maximum(cost, epsilon + x))
        return value - math.log(-math.expm1(-x)), slope - 1 / math.expm1(x)

    # With s the slope of the first term, the minimum is where 1 / (e^x - 1) = s, and s is a mean of the a - 1.
    low = math.log1p(1 / float(excess.max()))
    high = math.log1p(1 / float(excess.min()))
    for _ in range(200):
        left = tangent(low)
        right = tangent(high)
        middle = (low + high) / 2
        # PRIVACY: never overestimated (test_the_margin_is_never_above_the_true_minimum); a slope may be off by rounding
        bound = _crossing(high - low, left, right) - _ROUNDING * float(excess.max()) * (high - low)
        if min(left[0], right[0]) - bound <= _GAP or not low < middle < high:
            break
        low, high = (middle, high) if tangent(middle)[1] < 0 else (low, middle)
    return bound


def zcdp_filter_budget(epsilon: float, delta: float, failure_budget: float = 0.0) -> float:
    """Returns the rho that adaptive releases may spend in total, beside failures of at most `failure_budget` in total.

    Args:
        epsilon: >= 0.
        delta: in (0, 1).
        failure_budget: d in [0, delta), fixed in advance.

    Returns:
        rho >= 0, rounded down: the run is (epsilon, delta)-DP while the sum of rho_t is at most it and the sum of the
        failures of approximate zCDP at most d.

    Raises:
        ValueError: an argument is out of range.

    Guarantee: full adaptivity, for the adjacency of the rho_t.

    Source: docs/proofs/accounting.md#filters; Whitehouse, Ramdas, Rogers and Wu 2023.

    Example:
        >>> round(zcdp_filter_budget(1.0, 1e-5), 5), round(zcdp_filter_budget(1.0, 1e-5, failure_budget=9e-6), 5)
        (0.03056, 0.02436)
    """
    delta = check.open_interval(0.0, 1.0, delta=delta)
    failure = check.nonnegative(failure_budget=failure_budget)
    if failure >= delta:
        raise ValueError(f"failure_budget must be < delta = {delta:g} (got {failure:g})")
    # margin: the difference rounds to nearest (docs/proofs/rounding.md#model-of-arithmetic)
    return zcdp_rho(epsilon, (delta - failure) * (1 - 3e-16))


def gdp_filter_budget(epsilon: float, delta: float) -> float:
    """Returns the sum of mu_t^2 that adaptive unsampled Gaussian releases may reach: mu(epsilon, delta)^2.

    Args:
        epsilon: >= 0.
        delta: in (0, 1).

    Returns:
        mu^2 > 0, rounded down. Exact and free of overhead.

    Raises:
        ValueError: an argument is out of range.

    Guarantee: full adaptivity, for the adjacency of the mu_t.

    Source: docs/proofs/accounting.md#filters; Smith and Thakurta 2022.

    Example:
        >>> round(gdp_filter_budget(1.0, 1e-5), 5)
        0.07185
    """
    # PRIVACY: the square rounds to nearest (test_the_gdp_budget_is_not_above_the_square_of_mu)
    return gaussian_mu(epsilon, delta) ** 2 * (1 - 3e-16)


def _state(
    orders: ArrayLike, spent: ArrayLike, weights: ArrayLike | None
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Returns a - 1, S_a and log w_a of the orders with a finite cost, all checked."""
    order, cost = curve_of(orders, spent, "spent")
    weight = (
        np.full(order.size, 1 / order.size)
        if weights is None
        else np.asarray(weights, dtype=np.float64)
    )
    if weight.shape != order.shape:
        raise ValueError(
            f"weights must have the length of orders (got {weight.shape} and {order.shape})"
        )
    for bad in weight[~((weight > 0) & (weight <= 1))]:
        raise ValueError(f"weights must be in (0, 1] (got {bad})")
    if abs(float(weight.sum()) - 1) > 1e-12:
        raise ValueError(f"weights must sum to 1 (got {weight.sum()})")
    kept = np.isfinite(cost)
    return order[kept] - 1, cost[kept], np.log(weight[kept])


def _log_sum(exponents: FloatArray, excess: FloatArray, size: FloatArray) -> tuple[float, float]:
    """Returns log(sum_a e^exponent_a), lowered by more than its rounding, and its derivative in epsilon.

    The exponents are differences of terms of at most (a - 1) `size`; those far below the largest do not matter.
    """
    top = float(exponents.max())
    parts = np.exp(exponents - top)
    total = float(parts.sum())
    rounding = float(np.max((np.abs(exponents) + excess * size)[exponents > top - 60]))
    return top + math.log(total) - _ROUNDING * (1 + rounding), float(parts @ excess) / total


def _crossing(width: float, left: tuple[float, float], right: tuple[float, float]) -> float:
    """Returns the height at which two tangents cross, a lower bound of a convex function between them.

    A tangent is a value and a slope. If rounding has turned a sign, the function is at its minimum there: its second
    derivative is at least the square of 1 / (e^x - 1), so that a slope off by a relative e moves the minimum by e^2.
    """
    if left[1] >= 0:
        return left[0]
    if right[1] <= 0:
        return right[0]
    step = ((right[0] - left[0]) - right[1] * width) / (left[1] - right[1])
    return left[0] + left[1] * min(max(step, 0.0), width)
