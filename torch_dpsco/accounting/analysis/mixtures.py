"""Gaussian mixtures of Poisson-sampled units, and the part of the Renyi integral that all their pairs share.

A unit of k records, each sampled at rate q, shifts the released sum by j clips with probability Bin(j; k, q). In clip
units the release is distributed as

    w(x) = sum_j Bin(j; k, q) N(x; j, z^2),    r(x) = w(x) / N(x; 0, z^2) = sum_j Bin(j; k, q) e^(j (2x - j) / 2z^2).

log r is convex and increasing. Its branch points, the zeros of r, lie on the lines Im x = +-pi z^2 (and their odd
multiples): as a polynomial in e^(x/z^2), r has only real negative roots, since a binomial polynomial has, and since
e^(-j^2 t) is a multiplier sequence.

Source: docs/proofs/accounting.md#several-records-of-a-unit, docs/proofs/accounting.md#renyi-integrals.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import betaln, log_ndtr

from torch_dpsco.accounting.analysis import quadrature as quad
from torch_dpsco.accounting.analysis.quadrature import FloatArray, Orders

# Below this noise, times size^1.5, the panels between the components become too many, and rounding of x / z too large.
_MIN_NOISE = 1e-4
# Above, the curve is that of this noise, an upper bound: the square stays finite.
MAX_NOISE = 1e150


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
            lambda part: np.logaddexp.reduce(self._log_weights + self.log_null(part - self._counts)), x
        )

    def log_ratio(self, x: FloatArray) -> FloatArray:
        """Returns log r(x), accurate also where r is near 1."""

        def ratio(part: FloatArray) -> FloatArray:
            return _log_mean_exp(self._log_weights, self._counts * (2 * part - self._counts) / (2 * self.variance))

        return self._in_parts(ratio, x)

    @cached_property
    def branches(self) -> FloatArray:
        """Real parts of the zeros of r, where neighboring components meet (exact for k = 1, and for small noise)."""
        j = np.arange(1, self.size + 1.0)
        return j - 0.5 + self.variance * (self._log_odds + np.log(j / (self.size - j + 1)))

    def last_alone(self, order: float) -> float:
        """Returns an x beyond which r^order is that of the component j = k alone, and r > order, to within e^-DECAY."""
        doubt = max(0.0, self._log_odds + math.log(self.size)) + math.log(order) + quad.DECAY
        return self.size - 0.5 + self.variance * doubt

    def first_alone(self, order: float) -> float:
        """Returns an x below which r^order is that of the component j = 0 alone, to within e^-DECAY."""
        return 0.5 + self.variance * (self._log_odds - math.log(self.size) - math.log(order) - quad.DECAY)

    def log_excess_above(self, order: FloatArray, low: float, two_sided: bool = False) -> FloatArray:
        """Returns log of the integral over x > low of N(x; 0, z^2) times the kernel of `quadrature.log_excess`.

        Panels reach 10 z beyond the mean of r^a N(0, z^2), which is at most k a, or to the point beyond which the
        mixture is its last component. There the kernel is r^a - c r, up to e^-33, and the integral is closed.

        Args:
            order: ascending orders.
            low: lower end.
            two_sided: which kernel: c is 1 if two-sided, else a.
        """
        mean = self.size * order[-1] + quad.REACH * self.noise
        end = self.last_alone(order[-1])
        edges = quad.panels(low, min(mean, end), self.noise, self.noise, self.branches)
        result = quad.log_excess(order, edges, lambda x: (self.log_ratio(x), self.log_null(x)), two_sided)
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
            return quad.rounded_up(_log_mean_exp(self._log_weights, exponent) / (order - 1))

    def _in_parts(self, curve: Callable[[FloatArray], FloatArray], x: FloatArray) -> FloatArray:
        """Applies a function that needs memory for every pair of a component and a node."""
        parts = np.array_split(x, 1 + x.size * (self.size + 1) // quad.CHUNK)
        return np.concatenate([curve(part) for part in parts])

    @cached_property
    def _counts(self) -> FloatArray:
        return np.arange(self.size + 1.0)[:, None]

    @cached_property
    def _log_weights(self) -> FloatArray:
        j = self._counts
        choices = -math.log(self.size + 1) - betaln(self.size - j + 1, j + 1)
        weights: FloatArray = choices + j * math.log(self.rate) + (self.size - j) * math.log1p(-self.rate)
        return weights

    @cached_property
    def _log_odds(self) -> float:
        return math.log1p(-self.rate) - math.log(self.rate)


def gaussian_divergence(order: Orders, noise: float, shift: float) -> Orders:
    """Returns D_a = a (shift / noise)^2 / 2 of two Gaussians `shift` apart."""
    ratio = shift / noise
    with np.errstate(over="ignore"):
        return order * (ratio * ratio / 2)


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
        # PRIVACY: rounds up (test_the_bound_outside_the_numerical_range_exceeds_the_curve_inside)
        if noise < _MIN_NOISE * size**1.5 or block[-1] > quad.MAX_ORDER:
            return proper.convexity_bound(block, shift)
        return quad.divergence(block, log_excess(proper, block))

    return quad.by_order(curve, order)


def log_tail(
    order: FloatArray, start: float, noise: float, shift: float, log_scale: float, log_subtracted: FloatArray
) -> FloatArray:
    """Returns log of the integral over x > start of N(x; 0, z^2) (r^a - c r), r = scale e^(s (2x - s) / 2z^2)."""
    large = (order - 1) * gaussian_divergence(order, noise, shift) + order * log_scale
    large = large + log_ndtr((shift * order - start) / noise)
    small = log_scale + log_subtracted + log_ndtr((shift - start) / noise)
    return quad.log_difference(large, np.broadcast_to(small, large.shape))


def _log_mean_exp(log_weights: FloatArray, exponents: FloatArray) -> FloatArray:
    """Returns log(sum_j w_j e^(y_j)) over the first axis, for weights that sum to 1, accurate also near 0."""
    growth = np.sum(np.exp(log_weights) * np.expm1(np.minimum(exponents, 30.0)), axis=0)
    near = (growth > -0.5) & (exponents.max(axis=0) <= 30.0)
    return np.where(near, np.log1p(np.where(near, growth, 0.0)), np.logaddexp.reduce(log_weights + exponents, axis=0))
