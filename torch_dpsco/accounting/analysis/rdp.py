"""Renyi curves of Gaussian noise, unsampled and under Poisson sampling; those of fixed-size batches come from `wor`.

z is the noise std over the clip C of one record's contribution to the released sum, q the Poisson rate. Records enter
the batch independently, so that neighboring data sets lead to these pairs of one-dimensional mixtures (in clip units),

    ADD_REMOVE, ZERO_OUT   (1-q) N(0, z^2) + q N(1, z^2)   and   N(0, z^2),
    the same, k records    sum_j Bin(j; k, q) N(j, z^2)    and   N(0, z^2),
    REPLACE_ONE            (1-q) N(0, z^2) + q N(1, z^2)   and   (1-q) N(0, z^2) + q N(-1, z^2),

which dominate whatever clipped contributions can produce, also under adaptive composition. Their divergences are
integrals (`quadrature`). Every function takes one order or an array of orders.

Integer orders go by quadrature too, not by the binomial sum: one path for all orders, which agrees with the sum to
1e-13 (test_integer_orders_agree_with_the_binomial_sum).

Source: docs/proofs/accounting.md#renyi-integrals; Mironov, Talwar and Zhang 2019.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from torch_dpsco import _validate
from torch_dpsco.accounting.analysis import quadrature as quad
from torch_dpsco.accounting.analysis.mixtures import PoissonMixture, log_tail, sampled_divergence
from torch_dpsco.accounting.analysis.quadrature import FloatArray, Orders
from torch_dpsco.accounting.analysis.wor import rdp_wor_gaussian

__all__ = [
    "Direction",
    "default_orders",
    "extended_orders",
    "rdp_poisson_gaussian",
    "rdp_poisson_gaussian_group",
    "rdp_poisson_gaussian_replace_one",
    "rdp_wor_gaussian",
]

Direction = Literal["remove", "add"]


def default_orders() -> FloatArray:
    """Returns the default grid: 174 ascending orders from 1.001 to 2^14, integers from 11 on.

    Example:
        >>> orders = default_orders()
        >>> len(orders), float(orders[0]), float(orders[-1])
        (174, 1.001, 16384.0)
    """
    near_one = 1 + np.logspace(-3, 0, 25)
    large = np.round(np.geomspace(66, 2**14, 60))
    return np.unique(np.concatenate([near_one, np.arange(2, 11, 0.25), np.arange(11, 65), large]))


def extended_orders(orders: FloatArray, best: float) -> FloatArray:
    """Returns the orders to add when the best one lies at an edge of the grid; empty when nothing is to be gained.

    At the upper edge the maximum doubles, in eight steps, up to 2^20. At the lower edge, the first order that the
    conversion uses (above 1.01), eight orders between 1.01 and that one are added once.

    Args:
        orders: ascending grid.
        best: the order at which the conversion found its minimum.

    Returns:
        New orders, ascending, none of them in the grid.

    Example:
        >>> extended_orders(np.array([2.0, 64.0]), best=64.0)
        array([ 70.,  76.,  83.,  91.,  99., 108., 117., 128.])
    """
    usable = orders[orders > 1.01]
    new = np.empty(0)
    if best >= orders[-1]:
        new = np.round(best * 2 ** (np.arange(1, 9) / 8))
    elif best <= usable[0] and usable[0] > 1.011:
        new = np.linspace(1.0101, usable[0], 9)[:-1]
    new = new[new <= quad.MAX_ORDER]
    return np.setdiff1d(new, orders)


def rdp_poisson_gaussian(
    sample_rate: float, noise_multiplier: float, order: Orders, direction: Direction = "remove"
) -> Orders:
    """Returns the Renyi divergence of one Poisson-sampled Gaussian release, for one record added or removed.

    Args:
        sample_rate: q in [0, 1].
        noise_multiplier: z = noise std / clip, >= 0.
        order: Renyi order(s) a > 1.
        direction: "remove" is D_a(mixture || Gaussian), the larger one at every order; "add" the reverse.

    Returns:
        D_a: 0 at rate 0, that of the unsampled Gaussian at rate 1, inf for noise 0 at a positive rate.

    Raises:
        ValueError: an argument is out of range.

    Guarantee: ADD_REMOVE (data set size not public, constant divisor) and ZERO_OUT; unit: the record that is sampled;
    the clipped sum of a batch drawn by Poisson sampling. Not REPLACE_ONE.

    Source: docs/proofs/accounting.md#poisson-batch-one-record-added-or-removed.

    Example:
        >>> round(rdp_poisson_gaussian(sample_rate=0.01, noise_multiplier=1.0, order=2.0), 9)
        0.000171813
    """
    return rdp_poisson_gaussian_group(sample_rate, noise_multiplier, 1, order, direction)


def rdp_poisson_gaussian_group(
    sample_rate: float, noise_multiplier: float, group_size: int, order: Orders, direction: Direction = "remove"
) -> Orders:
    """Returns the Renyi divergence of one release for a unit of several records, each Poisson-sampled on its own.

    Also the cost of `group_size` accumulated Poisson batches released as one sum. Under REPLACE_ONE a unit of more
    than one record has no proven mixture: use two hops of this curve.

    Args:
        sample_rate: q in [0, 1], of each record (or batch).
        noise_multiplier: z = noise std / clip of one record, >= 0.
        group_size: k >= 1.
        order: Renyi order(s) a > 1.
        direction: "remove" is D_a(mixture || Gaussian), "add" the reverse; a bound is their maximum.

    Returns:
        D_a: 0 at rate 0, that of a Gaussian with sensitivity k at rate 1, inf for noise 0 at a positive rate.

    Raises:
        ValueError: an argument is out of range.

    Guarantee: ADD_REMOVE and ZERO_OUT of the whole unit; the maximum over the directions.

    Source: docs/proofs/accounting.md#several-records-of-a-unit.

    Example:
        >>> round(rdp_poisson_gaussian_group(0.01, 1.0, 2, 2.0, "remove"), 9)
        0.000699227
    """
    rate = _validate.between(0.0, 1.0, sample_rate=sample_rate)
    noise = _validate.nonnegative(noise_multiplier=noise_multiplier)
    size = _validate.positive_count(group_size=group_size)
    direction = _validate.choice(("remove", "add"), direction=direction)
    log_excess = _remove_log_excess if direction == "remove" else _add_log_excess
    return sampled_divergence((rate, noise, size), 1.0, order, log_excess)


def rdp_poisson_gaussian_replace_one(sample_rate: float, noise_multiplier: float, order: Orders) -> Orders:
    """Returns the Renyi divergence of one Poisson-sampled Gaussian release, for one record replaced by another.

    The dominating pair has the two contributions opposite: D_a((1-q) N(0) + q N(1) || (1-q) N(0) + q N(-1)), with z
    the same as under ADD_REMOVE. It is symmetric, so that one direction is both.

    Args:
        sample_rate: q in [0, 1].
        noise_multiplier: z = noise std / clip, >= 0 (not over the sensitivity 2 clip).
        order: Renyi order(s) a > 1.

    Returns:
        D_a: 0 at rate 0, that of a Gaussian with sensitivity 2 at rate 1, inf for noise 0 at a positive rate.

    Raises:
        ValueError: an argument is out of range.

    Guarantee: REPLACE_ONE (data set size public); unit: the record that is sampled; the clipped sum of a batch drawn
    by Poisson sampling, if a record's contribution does not depend on who else is in the batch.

    Source: docs/proofs/accounting.md#poisson-batch-one-record-replaced.

    Example:
        >>> round(rdp_poisson_gaussian_replace_one(sample_rate=0.01, noise_multiplier=0.6, order=1.5), 9)
        0.001774543
    """
    rate = _validate.between(0.0, 1.0, sample_rate=sample_rate)
    noise = _validate.nonnegative(noise_multiplier=noise_multiplier)
    return sampled_divergence((rate, noise, 1), 2.0, order, _replace_log_excess)


def _remove_log_excess(mixture: PoissonMixture, order: FloatArray) -> FloatArray:
    """E = E_N0[phi_a(r)]; phi_a is bounded where r < 1, hence 10 z below 0 suffice."""
    return mixture.log_excess_above(order, -quad.REACH * mixture.noise)


def _add_log_excess(mixture: PoissonMixture, order: FloatArray) -> FloatArray:
    """E = E_w[phi_a(1/r)].

    Above, w has mean at most k. Below, r^(1-a) N(0, z^2) has its mean at no less than -k (a - 1), and no mass below
    the point where r is constant. Its peak can be as narrow as z / sqrt(1 + log(a / q)): hence the finer panels.
    """
    noise, top = mixture.noise, order[-1]
    reach = quad.REACH * noise
    low = min(0.0, max(-mixture.size * (top - 1), mixture.first_alone(top))) - reach
    scale = noise / min(3.0, 1 + 10 * noise)
    edges = quad.panels(low, mixture.size + reach, scale, noise, mixture.branches)
    return quad.log_excess(order, edges, lambda x: (-mixture.log_ratio(x), mixture.log_density(x)))


def _replace_log_excess(mixture: PoissonMixture, order: FloatArray) -> FloatArray:
    """E = integral over x > 0 of w(-x) (R^a + R^(1-a) - R - 1), R = w(x) / w(-x).

    The mirror x -> -x swaps the two mixtures: it folds E[R^a] onto x > 0, and 1 is the integral of w(x) + w(-x) there.
    The mean of R^a w(-x) is at most 2a - 1. Beyond `end`, w(-x) is (1-q) N(0) and R is q / (1-q) e^((2x-1) / 2z^2).
    """
    noise, top = mixture.noise, order[-1]
    log_odds = math.log(mixture.rate) - math.log1p(-mixture.rate)
    end = 0.5 + mixture.variance * (abs(log_odds) + math.log(top) + quad.DECAY)
    mean = 2 * top - 1 + quad.REACH * noise
    branches = np.concatenate([mixture.branches, -mixture.branches])

    def pair(x: FloatArray) -> tuple[FloatArray, FloatArray]:
        mirrored = mixture.log_ratio(-x)
        return mixture.log_ratio(x) - mirrored, mixture.log_null(x) + mirrored

    edges = quad.panels(0.0, min(mean, end), noise, noise, branches)
    result = quad.log_excess(order, edges, pair, two_sided=True)
    if end < mean:
        tail = log_tail(order, end, noise, 1.0, log_odds, np.zeros(1))
        result = np.logaddexp(result, tail + math.log1p(-mixture.rate))
    return result
