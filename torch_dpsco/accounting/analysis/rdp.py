"""Renyi curves of Gaussian noise: unsampled, on Poisson batches, on batches of fixed size.

On batches of fixed size, drawn uniformly without replacement, gamma is the batch size over the data set size (both
public), z the noise std over 2C, with C the clip: in any pair of neighboring data sets two batches differ by one record
for another, at a distance of at most 2C, under ZERO_OUT too (when the differing record enters, another one leaves).
With P = N(1, z^2), Q = N(0, z^2), r the likelihood ratio of (1-gamma) Q + gamma P to Q, the curve is tight: that of the
exact privacy profile, attained point by point.

Unsampled and under Poisson sampling, z is the noise std over the clip C of one record's contribution to the released
sum, q the Poisson rate. Records enter the batch independently, so that neighboring data sets lead to these pairs of
one-dimensional mixtures (in clip units),

    ADD_REMOVE, ZERO_OUT   (1-q) N(0, z^2) + q N(1, z^2)   and   N(0, z^2),
    REPLACE_ONE            (1-q) N(0, z^2) + q N(1, z^2)   and   (1-q) N(0, z^2) + q N(-1, z^2),

which dominate whatever clipped contributions can produce, also under adaptive composition. Their divergences are
integrals. Every function takes ascending orders.

Integer orders go by quadrature too, not by the binomial sum: one path for all orders, which agrees with the sum to
1e-13 (test_integer_orders_agree_with_the_binomial_sum).

Source: docs/proofs/accounting.md#batches-of-fixed-size,
docs/proofs/accounting.md#renyi-integrals; Mironov, Talwar and Zhang 2019.

Renyi curve of the best of a random, secret number of releases.

K is drawn, then K releases with one Renyi curve (fresh randomness each); the one that a public total order puts first
leaves, and neither K nor the others. K has a geometric law, P(K = k) proportional to (1-gamma)^k, k >= 1.

Source: docs/proofs/search.md; Papernot and Steinke 2022, theorem 2.

From a curve to (epsilon, delta): if D_a(P||Q) <= D for both orderings of every neighboring pair, the mechanism is
(epsilon, delta)-DP with

    epsilon = D + log((a - 1) / a) - (log(delta) + log(a)) / (a - 1)

for any delta in (0, 1), and the best order may be chosen freely, as long as the curve was fixed in advance.

Source: docs/proofs/accounting.md#from-renyi-divergences-to-epsilon-and-delta; Balle, Barthe, Gaboardi, Hsu and
Sato 2020; Canonne, Kamath and Steinke 2020.

Renyi integrals on Gauss-Legendre panels: the numerical core of `rdp` and `wor`.

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

Failure probabilities, and what Gaussian and zero-concentrated differential privacy say of (epsilon, delta).

A mechanism may be as private as its analysis says only up to an event of probability beta. Two kinds are told apart:

* coupling: the noiseless outputs of the two data sets can be coupled so that they are close except with probability d.
  By joint convexity of the hockey stick its delta is at most d + (1 - d) delta, with no factor e^epsilon;
* transcript: the failure is a function of the pair of data sets and the transcript, and two mechanisms M and M* agree
  until it happens. Then P(E) <= P*(E and good) + beta <= e^epsilon Q*(E and good) + delta + beta and the good part is
  the same under M: it adds beta.

Several failures of one kind: couplings of successive releases hold together with probability prod(1 - d_i); transcript
failures add up.

Source: docs/proofs/accounting.md#failure-probabilities.

Zero-concentrated differential privacy: rho-zCDP bounds the Renyi divergence of every order a by rho a. The conversion
at order a = 1 + b is

    epsilon(b) = (1 + b) rho + log(b / (1 + b)) - (log(delta) + log(1 + b)) / b,

and its derivative in b, rho + (log(delta) + log(1 + b)) / b^2, changes sign once, at the b with

    rho b^2 + log(1 + b) = log(1 / delta).

So both directions need one root, and any b gives a valid bound: an inexact root costs tightness, never privacy. For
unsampled Gaussian noise alone `gaussian` is exact and smaller.

Source: docs/proofs/accounting.md#concentrated-privacy; Bun and Steinke 2016.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray
from scipy.special import log_ndtr

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.rounding import FloatArray as FloatArray
from torch_dpsco.accounting.analysis.rounding import up

# Below this noise, times size^1.5, the panels between the components become too many, and rounding of x / z too large.
_MIN_NOISE = 1e-4
# Above, the curve is that of this noise, an upper bound: the square stays finite.
MAX_NOISE = 1e150


@dataclass(frozen=True)
class PoissonMixture:
    """(1 - rate) N(0, noise^2) + rate N(1, noise^2).

    Args:
        rate: q in (0, 1).
        noise: z > 0, std in units of the shift of one record.
    """

    rate: float
    noise: float

    @cached_property
    def variance(self) -> float:
        """z^2."""
        return self.noise * self.noise

    def log_null(self, x: FloatArray) -> FloatArray:
        """Returns the log density of N(0, z^2)."""
        return -((x / self.noise) ** 2) / 2 - math.log(self.noise) - math.log(2 * math.pi) / 2

    def log_ratio(self, x: FloatArray) -> FloatArray:
        """Returns log r(x), accurate also where r is near 1."""
        return self._mean((2 * x - 1) / (2 * self.variance))

    @cached_property
    def branch(self) -> float:
        """Real part of the zeros of r, where the components meet."""
        return 0.5 + self.variance * self.log_odds

    def log_excess_above(
        self, order: FloatArray, low: float, two_sided: bool = False
    ) -> FloatArray:
        """Returns log of the integral over x > low of N(x; 0, z^2) times the kernel of `log_excess`.

        Panels reach 10 z beyond the mean of r^a N(0, z^2), which is at most a, or to the point beyond which the
        mixture is its last component. There the kernel is r^a - c r, up to e^-33, and the integral is closed.

        Args:
            order: ascending orders.
            low: lower end.
            two_sided: which kernel: c is 1 if two-sided, else a.
        """
        mean = order[-1] + REACH * self.noise
        # beyond it r^order is that of the shifted component alone, and r > order, to within e^-DECAY
        doubt = max(0.0, self.log_odds) + math.log(order[-1]) + DECAY
        end = 0.5 + self.variance * doubt
        edges = panels(low, min(mean, end), self.noise, self.noise, np.array([self.branch]))
        result = log_excess(
            order, edges, lambda x: (self.log_ratio(x), self.log_null(x)), two_sided
        )
        if end < mean:
            subtracted = np.zeros(1) if two_sided else np.log(order)
            tail = log_tail(order, end, self.noise, 1.0, math.log(self.rate), subtracted)
            result = np.logaddexp(result, tail)
        return result

    def convexity_bound(self, order: FloatArray, shift: float) -> FloatArray:
        """Returns an upper bound on D_a of two mixtures whose components are at most `shift` apart.

        exp((a-1) D_a) is jointly convex, so it is at most 1 - q + q exp(a (a-1) shift^2 / 2z^2).
        """
        with np.errstate(over="ignore"):
            gauss = (order - 1) * gaussian_divergence(order, self.noise, shift)
            return rounded_up(self._mean(gauss) / (order - 1))

    def _mean(self, exponent: FloatArray) -> FloatArray:
        """Returns log(1 - q + q e^y), accurate also near 0."""
        growth = self._drawn * np.expm1(np.minimum(exponent, 30.0))
        near = (growth > -0.5) & (exponent <= 30.0)
        far = np.logaddexp(math.log1p(-self.rate), math.log(self.rate) + exponent)
        return np.where(near, np.log1p(np.where(near, growth, 0.0)), far)

    @cached_property
    def _drawn(self) -> float:
        return float(np.exp(np.array([math.log(self.rate)]))[0])

    @cached_property
    def log_odds(self) -> float:
        """log((1 - q) / q)."""
        return math.log1p(-self.rate) - math.log(self.rate)


def gaussian_divergence(order: FloatArray, noise: float, shift: float) -> FloatArray:
    """Returns D_a = a (shift / noise)^2 / 2 of two Gaussians `shift` apart."""
    ratio = shift / noise
    with np.errstate(over="ignore"):
        return order * (ratio * ratio / 2)


def sampled_divergence(
    rate: float,
    noise: float,
    shift: float,
    order: FloatArray,
    log_excess: Callable[[PoissonMixture, FloatArray], FloatArray],
) -> FloatArray:
    """Returns a Renyi curve of sampled Gaussian noise, with its special cases.

    Noise 0 costs infinity. Noise below 1e-4 and orders above 2^20 get the convexity bound, an upper bound; noise above
    1e150 counts as 1e150.

    Args:
        rate: in (0, 1).
        noise: >= 0.
        shift: distance of the shifted components of the two distributions.
        order: ascending orders a > 1.
        log_excess: log E(a) of a proper mixture at an ascending block of orders.
    """
    if noise == 0:
        return np.full_like(order, np.inf)
    proper = PoissonMixture(rate, min(noise, MAX_NOISE))

    def curve(block: FloatArray) -> FloatArray:
        # PRIVACY: rounds up (test_the_bound_outside_the_numerical_range_exceeds_the_curve_inside,
        # test_any_order_of_any_grid_agrees_with_its_high_precision_value)
        if noise < _MIN_NOISE or block[-1] > MAX_ORDER:
            return proper.convexity_bound(block, shift)
        return divergence(block, log_excess(proper, block))

    return by_order(curve, order)


def log_tail(
    order: FloatArray,
    start: float,
    noise: float,
    shift: float,
    log_scale: float,
    log_subtracted: FloatArray,
) -> FloatArray:
    """Returns log of the integral over x > start of N(x; 0, z^2) (r^a - c r), r = scale e^(s (2x - s) / 2z^2)."""
    large = (order - 1) * gaussian_divergence(order, noise, shift) + order * log_scale
    large = large + log_ndtr((shift * order - start) / noise)
    small = log_scale + log_subtracted + log_ndtr((shift - start) / noise)
    return log_difference(large, np.broadcast_to(small, large.shape))


def rdp_wor_gaussian(sample_rate: float, noise_ratio: float, order: FloatArray) -> FloatArray:
    """Returns the tight Renyi curve of one Gaussian release on a uniform batch of fixed size.

    The privacy profile is H_t(mix, Q) for t >= 1 and H_t(Q, mix) for t < 1. It is that of a loss law symmetric about
    0, with E = integral over x > 1/2 of N(x; 0, z^2) (r^a + r^(1-a) - r - 1).

    Args:
        sample_rate: gamma = batch size / data set size, in (0, 1).
        noise_ratio: z = noise std / (2 clip), >= 0.
        order: ascending Renyi orders a > 1.

    Returns:
        D_a: inf for noise 0.

    Guarantee: REPLACE_ONE and ZERO_OUT (data set size public); unit: the record that is sampled; the clipped sum of a
    batch drawn uniformly and independently at every step (shuffled epochs are not).

    Source: docs/proofs/accounting.md#batches-of-fixed-size.

    Example:
        >>> rdp_wor_gaussian(sample_rate=0.01, noise_ratio=1.0, order=np.array([2.0])).round(9)
        array([0.00028064])
    """
    return sampled_divergence(
        sample_rate,
        noise_ratio,
        1.0,
        order,
        lambda mixture, block: mixture.log_excess_above(block, 0.5, two_sided=True),
    )


def default_orders() -> FloatArray:
    """Returns the default grid: 174 ascending orders from 1.001 to 2^14, integers from 11 on.

    Example:
        >>> orders = default_orders()
        >>> len(orders), float(orders[0]), float(orders[-1])
        (174, 1.001, 16384.0)
    """
    near_one = 1 + np.logspace(-3, 0, 25)
    large = np.round(np.geomspace(66, 2**14, 60))
    return np.unique(
        np.concatenate([near_one, np.arange(2, 11, 0.25), np.arange(11, 65), large])
    )


def rdp_poisson_gaussian(
    sample_rate: float, noise_multiplier: float, order: FloatArray
) -> FloatArray:
    """Returns the Renyi divergence of one Poisson-sampled Gaussian release, for one record added or removed.

    It is D_a(mixture || Gaussian), of a record removed: the larger of both at every order.

    Args:
        sample_rate: q in (0, 1).
        noise_multiplier: z = noise std / clip, >= 0.
        order: ascending Renyi orders a > 1.

    Returns:
        D_a: inf for noise 0.

    Guarantee: ADD_REMOVE (data set size not public, constant divisor) and ZERO_OUT; unit: the record that is sampled;
    the clipped sum of a batch drawn by Poisson sampling. Not REPLACE_ONE.

    Source: docs/proofs/accounting.md#poisson-batch-one-record-added-or-removed.

    Example:
        >>> rdp_poisson_gaussian(sample_rate=0.01, noise_multiplier=1.0, order=np.array([2.0])).round(9)
        array([0.00017181])
    """
    return sampled_divergence(
        sample_rate,
        noise_multiplier,
        1.0,
        order,
        # the kernel is bounded where r < 1, hence 10 z below 0 suffice
        lambda mixture, block: mixture.log_excess_above(block, -REACH * mixture.noise),
    )


def rdp_poisson_gaussian_replace_one(
    sample_rate: float, noise_multiplier: float, order: FloatArray
) -> FloatArray:
    """Returns the Renyi divergence of one Poisson-sampled Gaussian release, for one record replaced by another.

    The dominating pair has the two contributions opposite: D_a((1-q) N(0) + q N(1) || (1-q) N(0) + q N(-1)), with z
    the same as under ADD_REMOVE. It is symmetric, so that one direction is both.

    Args:
        sample_rate: q in (0, 1).
        noise_multiplier: z = noise std / clip, >= 0 (not over the sensitivity 2 clip).
        order: ascending Renyi orders a > 1.

    Returns:
        D_a: inf for noise 0.

    Guarantee: REPLACE_ONE (data set size public); unit: the record that is sampled; the clipped sum of a batch drawn
    by Poisson sampling, if a record's contribution does not depend on who else is in the batch.

    Source: docs/proofs/accounting.md#poisson-batch-one-record-replaced.

    Example:
        >>> rdp_poisson_gaussian_replace_one(sample_rate=0.01, noise_multiplier=0.6, order=np.array([1.5])).round(9)
        array([0.00177454])
    """
    return sampled_divergence(sample_rate, noise_multiplier, 2.0, order, _replace_log_excess)


def _replace_log_excess(mixture: PoissonMixture, order: FloatArray) -> FloatArray:
    """E = integral over x > 0 of w(-x) (R^a + R^(1-a) - R - 1), R = w(x) / w(-x).

    The mirror x -> -x swaps the two mixtures: it folds E[R^a] onto x > 0, and 1 is the integral of w(x) + w(-x) there.
    The mean of R^a w(-x) is at most 2a - 1. Beyond `end`, w(-x) is (1-q) N(0) and R is q / (1-q) e^((2x-1) / 2z^2).
    """
    noise = mixture.noise
    top = order[-1]
    log_odds = -mixture.log_odds
    end = 0.5 + mixture.variance * (abs(log_odds) + math.log(top) + DECAY)
    mean = 2 * top - 1 + REACH * noise
    branches = np.array([mixture.branch, -mixture.branch])

    def pair(x: FloatArray) -> tuple[FloatArray, FloatArray]:
        mirrored = mixture.log_ratio(-x)
        return mixture.log_ratio(x) - mirrored, mixture.log_null(x) + mirrored

    edges = panels(0.0, min(mean, end), noise, noise, branches)
    result = log_excess(order, edges, pair, two_sided=True)
    if end < mean:
        tail = log_tail(order, end, noise, 1.0, log_odds, np.zeros(1))
        result = np.logaddexp(result, tail + math.log1p(-mixture.rate))
    return result


_SELECTED = 1e-12  # added, relative: more than the rounding of a few sums


def selection_curve(orders: ArrayLike, values: ArrayLike, gamma: float) -> FloatArray:
    """Returns the curve of the selection at the same orders.

    Args:
        orders: each > 1, increasing.
        values: bound of one release per order, both directions, >= 0 (inf for none).
        gamma: in (0, 1).

    Raises:
        ValueError: a range or a shape.
    """
    order, value = curve_of(orders, values)
    log_gamma = math.log(check.open_interval(0.0, 1.0, gamma=gamma))
    # PRIVACY: what the others cost (test_no_pair_exceeds_the_curve, test_the_cost_of_the_winner_alone_is_refuted)
    others = min(-log_gamma, float(np.min((1 - 1 / order) * value - log_gamma / order)))
    trials = math.expm1(-log_gamma) / -math.expm1(log_gamma)  # expected
    found = value + 2.0 * others + math.log(trials) / (order - 1)
    # divergences are no larger than those at higher orders
    return np.asarray(np.minimum.accumulate(found[::-1])[::-1] * (1 + _SELECTED))


_LEAST_ORDER = 1.01  # closer to 1 the conversion multiplies errors of the curve by more than 100
_ROUNDING = 1e-14  # relative to the largest term of a sum: more than its rounding


class RDPEpsilon(NamedTuple):
    """An epsilon and the order at which it was obtained."""

    epsilon: float
    order: float


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
        ValueError: the arrays do not match or hold values out of range.

    Guarantee: (epsilon, delta)-DP under the adjacency of the curve, if the curve was fixed in advance.

    Source: docs/proofs/accounting.md#from-renyi-divergences-to-epsilon-and-delta.

    Example:
        >>> rdp_epsilon(orders=[2.0, 8.0], values=[0.5, 2.0], delta=1e-5).order
        8.0
    """
    order, value = curve_of(orders, values)
    log_delta = math.log(delta)
    total_variation = np.sqrt(-np.expm1(-value))
    if total_variation.min() <= delta * (1 - _ROUNDING):
        return RDPEpsilon(0.0, float(order[np.argmin(total_variation)]))
    shape = np.log1p(-1 / order)
    correction = shape - (log_delta + np.log(order)) / (order - 1)
    terms = (
        value - shape + (np.log(order) - log_delta) / (order - 1)
    )  # their sizes: the terms may cancel
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
        ValueError: the arrays do not match or hold values out of range.

    Guarantee: (epsilon, delta)-DP under the adjacency of the curve, if the curve was fixed in advance.

    Source: docs/proofs/accounting.md#from-renyi-divergences-to-epsilon-and-delta.

    Example:
        >>> round(rdp_delta(orders=[2.0, 8.0], values=[0.5, 2.0], epsilon=4.0), 9)
        4.1e-08
    """
    order, value = curve_of(orders, values)
    excess = order - 1
    shape = excess * np.log1p(-1 / order) - np.log(order)
    log_delta = excess * (value - epsilon) + shape
    # margin: rounded up, by less than what rdp_epsilon adds (docs/proofs/rounding.md#model-of-arithmetic)
    log_delta = log_delta + _ROUNDING / 8 * (excess * (value + epsilon) + np.abs(shape))
    log_delta[order <= _LEAST_ORDER] = math.inf
    # margin: of the root (docs/proofs/rounding.md#model-of-arithmetic)
    total_variation = up(math.sqrt(-math.expm1(-value.min())), _ROUNDING / 8)
    return min(1.0, total_variation, math.exp(min(0.0, log_delta.min())))


def curve_of(
    orders: ArrayLike, values: ArrayLike, name: str = "values"
) -> tuple[FloatArray, FloatArray]:
    """Returns orders and values of a Renyi curve as arrays; raises ValueError for what is none, by the values' name."""
    order = np.asarray(orders, dtype=np.float64)
    value = np.asarray(values, dtype=np.float64)
    if order.ndim != 1 or order.shape != value.shape or order.size == 0:
        raise ValueError(
            f"orders and {name} must be 1-d, of one length >= 1 (got {order.shape} and"
            f" {value.shape})"
        )
    for bad in order[~((order > 1) & (order < math.inf))]:
        check.order(orders=bad)
    for bad in value[~(value >= 0)]:
        check.nonnegative(**{name: bad}, allow_inf=True)
    return order, value


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


def by_order(curve: Callable[[FloatArray], FloatArray], order: FloatArray) -> FloatArray:
    """Applies `curve` to blocks of ascending orders of similar size.

    A block lies in (16^(i-1), 16^i], so that its orders can share one grid; 2^20 ends a block.
    """
    block = np.ceil(np.log2(order) / 4)
    parts = np.split(order, np.flatnonzero(np.diff(block)) + 1)
    return np.concatenate([curve(part) for part in parts])


def panels(
    low: float, high: float, scale: float, noise: float, branches: FloatArray
) -> FloatArray:
    """Returns the edges of panels 2 `scale` wide, narrower near the complex branch points of the log ratio.

    The branch points have the real parts `branches` and lie pi noise^2 away from the real axis. Around each of them
    panels start at 4 noise^2 and double, so that every panel of half width h has its branch points at a distance of
    at least pi h / 2: outside the Bernstein ellipse of parameter 3.4, where 16 points leave a relative error 1e-17.
    """
    panels = int(np.ceil((high - low) / (2 * scale)))
    edges = np.linspace(low, high, 1 + max(1, panels))
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


FAILURE_KINDS = ("coupling", "transcript")


def delta_before_failure(delta: float, failure: float, kind: str) -> float:
    """Returns the delta that is left for the mechanism itself.

    Args:
        delta: in [0, 1], of the whole statement.
        failure: total failure probability of this kind, in [0, 1].
        kind: "coupling" (delta - d) / (1 - d), or "transcript" delta - beta.

    Returns:
        delta in [0, 1], rounded down; 0 if the failure takes all of it.

    Source: docs/proofs/accounting.md#failure-probabilities.

    Example:
        >>> round(delta_before_failure(delta=1e-6, failure=1e-7, kind="transcript"), 12)
        9e-07
    """
    if failure == 0:
        return delta
    # PRIVACY: rounded down (test_the_inverse_never_exceeds_the_delta_of_the_statement); margin of what is
    # taken away (docs/proofs/accounting.md#failure-probabilities)
    left = delta * (1 - _ROUNDING) - up(failure, 4 * _ROUNDING)
    if left <= 0:
        return 0.0
    return left / (1 - failure) * (1 - _ROUNDING) if kind == "coupling" else left


def zcdp_epsilon(rho: float, delta: float) -> float:
    """Returns the least epsilon for which rho-zCDP is known to imply (epsilon, delta)-DP, rounded up.

    Args:
        rho: >= 0.
        delta: in (0, 1).

    Returns:
        epsilon >= 0.

    Guarantee: every rho-zCDP mechanism is (epsilon, delta)-DP, under the adjacency of its rho.

    Source: docs/proofs/accounting.md#concentrated-privacy.

    Example:
        >>> round(zcdp_epsilon(rho=0.1, delta=1e-5), 4)
        1.9142
    """
    log_inverse = -math.log(delta)
    if rho == 0:
        return 0.0

    def slope(log_b: float) -> float:
        b = math.exp(log_b)
        return rho * b * b + math.log1p(b) - log_inverse

    # At the root one of the two terms is at least half of the right-hand side, and neither exceeds it.
    log_gauss = (math.log(log_inverse) - math.log(rho)) / 2
    low = min(log_gauss - 0.5 * math.log(2), math.log(log_inverse / 2))
    high = min(log_gauss, log_inverse + math.log(-math.expm1(-log_inverse)))
    b = math.exp(scipy.optimize.brentq(slope, low - 1e-9, high + 1e-9, xtol=1e-12))
    gain = math.log1p(1 / b)
    conversion = (log_inverse - math.log1p(b)) / b
    # PRIVACY: the last term exceeds the rounding of the others (test_zcdp_conversions_are_on_the_safe_side)
    return max(
        0.0, (1 + b) * rho - gain + conversion + 1e-15 * ((1 + b) * rho + gain + abs(conversion))
    )
