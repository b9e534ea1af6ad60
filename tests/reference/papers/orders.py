"""Renyi curves of the package at one order, or at orders in any order: it asks for ascending ones only."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis import pure, rdp
from torch_dpsco.accounting.analysis.rounding import FloatArray

Orders = TypeVar("Orders", float, NDArray[np.float64])


def by_order(curve: Callable[[FloatArray], FloatArray], order: Orders) -> Orders:
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
    values: FloatArray = np.asarray(order, dtype=np.float64)
    if values.ndim == 0:
        return cast(Orders, curve(np.array([check.order(order=order)]))[0].item())
    if values.ndim != 1:
        raise ValueError(f"order must be a number or a 1-d array (got shape {values.shape})")
    for bad in values[~((values > 1) & (values < np.inf))]:
        check.order(order=bad)
    distinct, inverse = np.unique(values, return_inverse=True)
    block = np.ceil(np.log2(distinct) / 4)
    parts = np.split(distinct, np.flatnonzero(np.diff(block)) + 1)
    curves: list[FloatArray] = [curve(part) for part in parts if part.size]
    return cast(Orders, np.concatenate([*curves, np.empty(0)])[inverse])


def rdp_pure(epsilon: float, order: Orders) -> Orders:
    """See the package."""
    return by_order(lambda block: pure.rdp_pure(epsilon, block), order)


def rdp_laplace(scale: float, order: Orders) -> Orders:
    """See the package."""
    return by_order(lambda block: pure.rdp_laplace(scale, block), order)


def rdp_l2_knorm(epsilon: float, dim: int, order: Orders) -> Orders:
    """See the package."""
    return by_order(lambda block: pure.rdp_l2_knorm(epsilon, dim, block), order)


def rdp_wor_gaussian(sample_rate: float, noise_ratio: float, order: Orders) -> Orders:
    """See the package; rate 0 costs 0, rate 1 is the unsampled Gaussian."""
    return _sampled(rdp.rdp_wor_gaussian, sample_rate, noise_ratio, 1.0, order)


def rdp_poisson_gaussian(sample_rate: float, noise_multiplier: float, order: Orders) -> Orders:
    """See the package; rate 0 costs 0, rate 1 is the unsampled Gaussian."""
    return _sampled(rdp.rdp_poisson_gaussian, sample_rate, noise_multiplier, 1.0, order)


def rdp_poisson_gaussian_replace_one(
    sample_rate: float, noise_multiplier: float, order: Orders
) -> Orders:
    """See the package; rate 0 costs 0, rate 1 is a Gaussian of sensitivity 2."""
    curve = rdp.rdp_poisson_gaussian_replace_one
    return _sampled(curve, sample_rate, noise_multiplier, 2.0, order)


def _sampled(
    curve: Callable[[float, float, FloatArray], FloatArray],
    rate: float,
    noise: float,
    shift: float,
    order: Orders,
) -> Orders:
    def values(block: FloatArray) -> FloatArray:
        if rate == 0:
            return np.zeros_like(block)
        if rate == 1 and noise > 0:
            return rdp.gaussian_divergence(block, noise, shift)
        return curve(rate, noise, block)

    return by_order(values, order)
