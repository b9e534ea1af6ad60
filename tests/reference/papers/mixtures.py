"""Renyi curves of units of several records and of both directions, and other rules of groups, to compare with.

A unit of k records, each sampled at rate q, shifts the released sum by j clips with probability Bin(j; k, q). In clip
units the release is distributed as w(x) = sum_j Bin(j; k, q) N(x; j, z^2). log r, r = w / N(0, z^2), is convex and
increasing. Its branch points, the zeros of r, lie on the lines Im x = +-pi z^2 (and their odd multiples): as a
polynomial in e^(x/z^2), r has only real negative roots, since a binomial polynomial has, and e^(-j^2 t) is a multiplier
sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from scipy.special import betaln

from tests.reference.papers import orders
from tests.reference.papers.orders import Orders, by_order
from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.rdp import (
    CHUNK,
    DECAY,
    MAX_NOISE,
    MAX_ORDER,
    REACH,
    FloatArray,
    divergence,
    gaussian_divergence,
    log_excess,
    log_tail,
    panels,
    rounded_up,
)
from torch_dpsco.accounting.analysis.rounding import upper

Direction = Literal["remove", "add"]
_MIN_NOISE = 1e-4  # times size^1.5


def rdp_poisson_gaussian(
    sample_rate: float, noise_multiplier: float, order: Orders, direction: Direction = "remove"
) -> Orders:
    """Returns the divergence of a single record: of the package where it is removed, else of a group of one."""
    if direction == "remove":
        return orders.rdp_poisson_gaussian(sample_rate, noise_multiplier, order)
    return rdp_poisson_gaussian_group(sample_rate, noise_multiplier, 1, order, direction)


@dataclass(frozen=True)
class PoissonMixture:
    """sum_j Bin(j; size, rate) N(j, noise^2).

    Args:
        rate: q in (0, 1).
        noise: z > 0, std in units of the shift of one record.
        size: k >= 1, records of the unit.
    """

    rate: float
    noise: float
    size: int = 1

    @cached_property
    def variance(self) -> float:
        """z^2."""
        return self.noise * self.noise

    def log_null(self, x: FloatArray) -> FloatArray:
        """Returns the log density of N(0, z^2)."""
        return -((x / self.noise) ** 2) / 2 - math.log(self.noise) - math.log(2 * math.pi) / 2

    def log_density(self, x: FloatArray) -> FloatArray:
        """Returns log w(x)."""
        return self._in_parts(
            lambda part: np.logaddexp.reduce(
                self._log_weights + self.log_null(part - self._counts)
            ),
            x,
        )

    def log_ratio(self, x: FloatArray) -> FloatArray:
        """Returns log r(x), accurate also where r is near 1."""

        def ratio(part: FloatArray) -> FloatArray:
            return _log_mean_exp(
                self._log_weights, self._counts * (2 * part - self._counts) / (2 * self.variance)
            )

        return self._in_parts(ratio, x)

    @cached_property
    def branches(self) -> FloatArray:
        """Real parts of the zeros of r, where neighboring components meet (exact for k = 1, and for small noise)."""
        j = np.arange(1, self.size + 1.0)
        return j - 0.5 + self.variance * (self._log_odds + np.log(j / (self.size - j + 1)))

    def last_alone(self, order: float) -> float:
        """Returns an x beyond which r^order is that of the component j = k alone, and r > order, to within e^-DECAY."""
        doubt = max(0.0, self._log_odds + math.log(self.size)) + math.log(order) + DECAY
        return self.size - 0.5 + self.variance * doubt

    def first_alone(self, order: float) -> float:
        """Returns an x below which r^order is that of the component j = 0 alone, to within e^-DECAY."""
        return 0.5 + self.variance * (
            self._log_odds - math.log(self.size) - math.log(order) - DECAY
        )

    def log_excess_above(
        self, order: FloatArray, low: float, two_sided: bool = False
    ) -> FloatArray:
        """Returns log of the integral over x > low of N(x; 0, z^2) times the kernel of `quadrature.log_excess`.

        Panels reach 10 z beyond the mean of r^a N(0, z^2), which is at most k a, or to the point beyond which the
        mixture is its last component. There the kernel is r^a - c r, up to e^-33, and the integral is closed.

        Args:
            order: ascending orders.
            low: lower end.
            two_sided: which kernel: c is 1 if two-sided, else a.
        """
        mean = self.size * order[-1] + REACH * self.noise
        end = self.last_alone(order[-1])
        edges = panels(low, min(mean, end), self.noise, self.noise, self.branches)
        result = log_excess(
            order, edges, lambda x: (self.log_ratio(x), self.log_null(x)), two_sided
        )
        if end < mean:
            scale = self.size * math.log(self.rate)
            subtracted = np.zeros(1) if two_sided else np.log(order)
            tail = log_tail(order, end, self.noise, self.size, scale, subtracted)
            result = np.logaddexp(result, tail)
        return result

    def convexity_bound(self, order: FloatArray, shift: float) -> FloatArray:
        """Returns an upper bound on D_a of two mixtures whose components j are at most j `shift` apart.

        exp((a-1) D_a) is jointly convex, so it is at most sum_j Bin(j; k, q) exp(a (a-1) (j shift)^2 / 2z^2).
        """
        with np.errstate(over="ignore"):
            gauss = (order - 1) * gaussian_divergence(order, self.noise, shift)
            exponent = np.zeros((self.size + 1, order.size))
            exponent[1:] = self._counts[1:] ** 2 * gauss
            return rounded_up(_log_mean_exp(self._log_weights, exponent) / (order - 1))

    def _in_parts(self, curve: Callable[[FloatArray], FloatArray], x: FloatArray) -> FloatArray:
        """Applies a function that needs memory for every pair of a component and a node."""
        parts = np.array_split(x, 1 + x.size * (self.size + 1) // CHUNK)
        return np.concatenate([curve(part) for part in parts])

    @cached_property
    def _counts(self) -> FloatArray:
        return np.arange(self.size + 1.0)[:, None]

    @cached_property
    def _log_weights(self) -> FloatArray:
        j = self._counts
        choices = -math.log(self.size + 1) - betaln(self.size - j + 1, j + 1)
        weights: FloatArray = (
            choices + j * math.log(self.rate) + (self.size - j) * math.log1p(-self.rate)
        )
        return weights

    @cached_property
    def _log_odds(self) -> float:
        return math.log1p(-self.rate) - math.log(self.rate)


def sampled_divergence(
    mixture: tuple[float, float, int],
    shift: float,
    order: Orders,
    log_excess: Callable[[PoissonMixture, FloatArray], FloatArray],
) -> Orders:
    """Returns a Renyi curve of sampled Gaussian noise, with its special cases.

    Rate 0 costs 0, rate 1 is the unsampled Gaussian, and noise 0 costs infinity. Noise below 1e-4 size^1.5 and
    orders above 2^20 get the convexity bound, an upper bound; noise above 1e150 counts as 1e150.

    Args:
        mixture: checked rate, noise and size, in the range of `PoissonMixture` with its ends.
        shift: distance of the component j of the two distributions, divided by j.
        order: scalar or array.
        log_excess: log E(a) of a proper mixture at an ascending block of orders.
    """
    rate, noise, size = mixture
    proper = PoissonMixture(rate, min(noise, MAX_NOISE), size)

    def curve(block: FloatArray) -> FloatArray:
        if rate == 0:
            return np.zeros_like(block)
        if noise == 0:
            return np.full_like(block, np.inf)
        if rate == 1:
            return gaussian_divergence(block, noise, size * shift)
        # PRIVACY: rounds up (test_the_bound_outside_the_numerical_range_exceeds_the_curve_inside,
        # test_any_order_of_any_grid_agrees_with_its_high_precision_value)
        if noise < _MIN_NOISE * size**1.5 or block[-1] > MAX_ORDER:
            return proper.convexity_bound(block, shift)
        return divergence(block, log_excess(proper, block))

    return by_order(curve, order)


def rdp_poisson_gaussian_group(
    sample_rate: float,
    noise_multiplier: float,
    group_size: int,
    order: Orders,
    direction: Direction = "remove",
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
    rate = check.between(0.0, 1.0, sample_rate=sample_rate)
    noise = check.nonnegative(noise_multiplier=noise_multiplier)
    size = check.positive_count(group_size=group_size)
    direction = check.choice(("remove", "add"), direction=direction)
    log_excess = _remove_log_excess if direction == "remove" else _add_log_excess
    return sampled_divergence((rate, noise, size), 1.0, order, log_excess)


def _remove_log_excess(mixture: PoissonMixture, order: FloatArray) -> FloatArray:
    """E = E_N0[phi_a(r)]; phi_a is bounded where r < 1, hence 10 z below 0 suffice."""
    return mixture.log_excess_above(order, -REACH * mixture.noise)


def _add_log_excess(mixture: PoissonMixture, order: FloatArray) -> FloatArray:
    """E = E_w[phi_a(1/r)].

    Above, w has mean at most k. Below, r^(1-a) N(0, z^2) has its mean at no less than -k (a - 1), and no mass below
    the point where r is constant. Its peak can be as narrow as z / sqrt(1 + log(a / q)): hence the finer panels.
    """
    noise = mixture.noise
    top = order[-1]
    reach = REACH * noise
    low = min(0.0, max(-mixture.size * (top - 1), mixture.first_alone(top))) - reach
    scale = noise / min(3.0, 1 + 10 * noise)
    edges = panels(low, mixture.size + reach, scale, noise, mixture.branches)
    return log_excess(order, edges, lambda x: (-mixture.log_ratio(x), mixture.log_density(x)))


def group_approx_dp_delta(epsilon: float, delta: float, group_size: int) -> float:
    """Returns the delta of a group at k epsilon: delta (e^(k epsilon) - 1) / (e^epsilon - 1).

    Args:
        epsilon: >= 0, of one record.
        delta: in [0, 1], of one record.
        group_size: k >= 1.

    Returns:
        delta of (k epsilon, delta)-DP for k records, at most 1, rounded up.

    Raises:
        ValueError: an argument is out of range.

    Guarantee: the adjacency of the argument, k times.

    Source: docs/proofs/accounting.md#groups.

    Example:
        >>> round(group_approx_dp_delta(epsilon=0.2, delta=1e-6, group_size=2), 12)
        2.221403e-06
    """
    epsilon = check.nonnegative(epsilon=epsilon)
    delta = check.between(0.0, 1.0, delta=delta)
    size = check.positive_count(group_size=group_size)
    if delta == 0 or size == 1:
        return delta
    # e^((k-1) epsilon) times a factor in [1, k]; the logarithm keeps it finite
    factor = math.expm1(-size * epsilon) / math.expm1(-epsilon) if epsilon > 0 else float(size)
    growth = (size - 1) * epsilon
    log_delta = math.log(delta)
    if growth + log_delta > 0:
        return 1.0
    # PRIVACY: covers the rounding of the exponent (test_group_delta_is_not_below_its_exact_value)
    return min(
        1.0, math.exp(growth + log_delta) * factor * (1 + 1e-15 * (8 + growth - log_delta))
    )


def group_gdp_mu(mu: float, group_size: int) -> float:
    """Returns k mu, rounded up: the GDP parameter of a group.

    Args:
        mu: >= 0, of one record.
        group_size: k >= 1.

    Source: docs/proofs/accounting.md#groups; Dong, Roth and Su 2022.

    Example:
        >>> group_gdp_mu(mu=0.5, group_size=4)
        2.0
    """
    # PRIVACY: a product of floats rounds to nearest (test_products_are_not_below_their_exact_values)
    return upper(
        check.nonnegative(mu=mu, allow_inf=True), check.positive_count(group_size=group_size)
    )


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
    value = check.nonnegative(value=value, allow_inf=True)
    order = check.order(order=order)
    log_delta = math.log(check.open_interval(0.0, 1.0, delta=delta))
    return value + math.log1p(-1 / order) - (log_delta + math.log(order)) / (order - 1)


def _log_mean_exp(log_weights: FloatArray, exponents: FloatArray) -> FloatArray:
    """Returns log(sum_j w_j e^(y_j)) over the first axis, for weights that sum to 1, accurate also near 0."""
    growth = np.sum(np.exp(log_weights) * np.expm1(np.minimum(exponents, 30.0)), axis=0)
    near = (growth > -0.5) & (exponents.max(axis=0) <= 30.0)
    return np.where(
        near,
        np.log1p(np.where(near, growth, 0.0)),
        np.logaddexp.reduce(log_weights + exponents, axis=0),
    )
