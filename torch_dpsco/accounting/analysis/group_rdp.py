"""Renyi curves of groups: k hops between neighbors. `group` exports the functions.

Source: docs/proofs/accounting.md#groups; Mironov 2017; Bun and Steinke 2016.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from torch_dpsco import _validate
from torch_dpsco.accounting.analysis import quadrature as quad
from torch_dpsco.accounting.analysis.quadrature import FloatArray, Orders
from torch_dpsco.errors import ConditionError

__all__ = ["RDPPoint", "rdp_group", "rdp_group_point", "rdp_replace_one", "rounded_up_product"]


class RDPPoint(NamedTuple):
    """A Renyi order and a bound on the divergence at it."""

    order: float
    value: float


def rdp_group(curve: Callable[[FloatArray], FloatArray], group_size: int, order: Orders) -> Orders:
    """Returns the Renyi curve of a group of k records from the curve of one, by the chain of k hops.

        D^(k)_a = sum over i = 1..k of ka / (ka - k + i) D_(ka-k+i)

    Proof. By Hoelder, D_a(P||Q) <= (a - 1/p)/(a-1) D_(pa)(P||M) + D_b(M||Q), b = (pa - 1)/(p - 1), for any p > 1. With
    pa = ka - k + 1 the factor is ka / (ka - k + 1) and b = ka / (k-1), and (k-1) b = ka: the remaining k - 1 hops give
    the remaining terms. For D_a = rho a the sum is k^2 rho a, exact for Gaussians. It needs no condition on a and is,
    for nondecreasing D, below the doubling rule of `rdp_group_point`, and for k = 2 below the textbook choice p = 2,
    ((a - 1/2)/(a-1)) D_2a + D_(2a-1).

    Args:
        curve: maps orders, ascending and > 1, to divergences of one record, the larger of both directions.
        group_size: k >= 1.
        order: Renyi order(s) a > 1.

    Returns:
        D_a of the group, rounded up.

    Raises:
        ValueError: an argument is out of range.

    Guarantee: the adjacency of the curve, k times; the whole ledger at once (its curve is the sum over events).

    Source: docs/proofs/accounting.md#groups; Mironov 2017, proposition 11; Bun and Steinke 2016, proposition 27.

    Example:
        >>> round(rdp_group(lambda a: 0.5 * a, 3, 2.0), 9)
        9.0
    """
    size = _validate.positive_count(group_size=group_size)

    def chain(block: FloatArray) -> FloatArray:
        hops = np.arange(1.0, size + 1)[:, None]
        orders = size * (block - 1) + hops
        distinct, inverse = np.unique(orders, return_inverse=True)
        values = curve(distinct)[inverse.reshape(orders.shape)]
        return quad.rounded_up(np.sum(size * block / orders * values, axis=0))

    return quad.by_order(chain, order)


def rdp_replace_one(curve: Callable[[FloatArray], FloatArray], order: Orders) -> Orders:
    """Returns a Renyi curve under REPLACE_ONE from one under ADD_REMOVE: 2a / (2a - 1) D_(2a-1) + D_2a.

    Args:
        curve: maps orders, ascending and > 1, to divergences under ADD_REMOVE, the larger of both directions.
        order: Renyi order(s) a > 1.

    Returns:
        D_a, rounded up.

    Guarantee: REPLACE_ONE of the record that is added or removed; the whole ledger at once.

    Source: docs/proofs/accounting.md#replacing-from-adding-and-removing.

    Example:
        >>> round(rdp_replace_one(lambda a: 0.5 * a, 2.0), 9)
        4.0
    """
    return rdp_group(curve, 2, order)


def rdp_group_point(order: float, value: float, group_size: int) -> RDPPoint:
    """Returns the point (a / 2^c, 3^c D) of a group's curve from one point (a, D) of a record's, 2^c >= k.

    For events that are known at single orders; where a curve is known, `rdp_group` is below it.

    Args:
        order: a > 1.
        value: D >= 0.
        group_size: k >= 1; rounded up to a power of two.

    Returns:
        The point, its value rounded up.

    Raises:
        ValueError: an argument is out of range.
        ConditionError: a < 2^(c+1).

    Source: docs/proofs/accounting.md#groups; Mironov 2017, proposition 2.

    Example:
        >>> rdp_group_point(order=16.0, value=0.5, group_size=4)
        RDPPoint(order=4.0, value=4.5)
    """
    order = _validate.order(order=order)
    value = _validate.nonnegative(value=value, allow_inf=True)
    doublings = (_validate.positive_count(group_size=group_size) - 1).bit_length()
    if doublings and order < 2 ** (doublings + 1):
        raise ConditionError(f"order must be >= {2 ** (doublings + 1)} for a group of {group_size} (got {order:g})")
    return RDPPoint(order / 2**doublings, rounded_up_product(value, 3**doublings))


def rounded_up_product(value: float, factor: int) -> float:
    """Returns the product, rounded up."""
    product = value * factor
    if math.isinf(product):
        return product
    # PRIVACY: the product rounds to nearest (test_products_are_not_below_their_exact_values)
    return math.nextafter(product, math.inf) if Fraction(product) < Fraction(value) * factor else product
