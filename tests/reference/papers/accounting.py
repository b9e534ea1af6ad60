"""Bounds and laws of the accounting papers that the package does not use: for vectors, and to hold others against."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import scipy
from scipy.optimize import brentq
from scipy.special import gammaincinv, log_ndtr

from tests.reference.papers.mixtures import (
    PoissonMixture,
    rdp_epsilon_at_order,
    sampled_divergence,
)
from tests.reference.papers.orders import Orders, by_order
from tests.reference.papers.pure import _profile, pure_delta
from torch_dpsco import _validate
from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis import rdp as quad
from torch_dpsco.accounting.analysis.gaussian import gaussian_delta, log_delta_curve
from torch_dpsco.accounting.analysis.pld_laws import (
    UNIT,
    GridLaw,
    LossLaw,
    connected,
    cuts,
)
from torch_dpsco.accounting.analysis.pure import (
    _LEAST,
    _LEAST_EPSILON,
    _log_integral,
    _log_total,
)
from torch_dpsco.accounting.analysis.rdp import (
    CHUNK,
    MAX_NOISE,
    FloatArray,
    gaussian_divergence,
    nodes,
)
from torch_dpsco.errors import ConditionError
from torch_dpsco.shuffle_model.numbers import _composed, _shifts, _shuffle_window, _Window

_LEAST_NOISE = 1e-4  # times size^1.5, as in `mixtures`: below, noise counts as none
_SPELLED_OUT = {"P=mixture,Q=N(0)": "remove", "P=N(0),Q=mixture": "add"}
Kernel = Callable[[FloatArray, FloatArray], FloatArray]
_ROUNDING = 1e-15  # relative: more than that of the few operations of a closed form


def rdp_epsilon_classic(value: float, order: float, delta: float) -> float:
    """Returns D + log(1/delta) / (a - 1), the conversion that the papers use; `rdp_epsilon_at_order` is smaller.

    Args:
        value: Renyi divergence D at the order, >= 0.
        order: a > 1.
        delta: in (0, 1).

    Returns:
        epsilon >= 0.

    Raises:
        ValueError: an argument is out of range.

    Source: Mironov 2017 (Lemma 5 of the Hoelder paper).

    Example:
        >>> round(rdp_epsilon_classic(value=0.1, order=10, delta=1e-5), 4)
        1.3792
    """
    value, order = check.nonnegative(value=value, allow_inf=True), check.order(order=order)
    return value - math.log(check.open_interval(0.0, 1.0, delta=delta)) / (order - 1)


def poisson_group_delta(
    group_size: int,
    sample_rate: float,
    noise_multiplier: float,
    epsilon: float,
    direction: str = "remove",
) -> float:
    """Returns the exact privacy profile of one release for a unit of several records, each Poisson-sampled on its own.

    Args:
        group_size: k >= 1.
        sample_rate: q in [0, 1] of each record.
        noise_multiplier: z = noise std / clip of one record, >= 0.
        epsilon: >= 0.
        direction: "remove" is the hockey stick of the mixture over the Gaussian, "add" the reverse.

    Returns:
        delta in [0, 1], rounded up: by 1e-9 of it, at an epsilon smaller by 1e-12 of it.

    Raises:
        ValueError: an argument is out of range.

    Guarantee: ADD_REMOVE and ZERO_OUT of the whole unit; the maximum over the directions.

    Source: docs/proofs/accounting.md#several-records-of-a-unit.

    Example:
        >>> round(poisson_group_delta(5, 0.1, 0.8, epsilon=1.0), 6)
        0.084877
    """
    size = _validate.positive_count(group_size=group_size)
    rate = _validate.between(0.0, 1.0, sample_rate=sample_rate)
    noise = _validate.nonnegative(noise_multiplier=noise_multiplier)
    epsilon = _validate.nonnegative(epsilon=epsilon)
    direction = _validate.choice(
        ("remove", "add"), direction=_SPELLED_OUT.get(direction, direction)
    )
    if rate == 0:
        return 0.0
    if noise < _LEAST_NOISE * size**1.5:
        untouched = size * math.log1p(-rate) if rate < 1 else -math.inf
        # PRIVACY: no noise is the worst case of little (test_little_noise_counts_as_none)
        return (
            -math.expm1(untouched)
            if direction == "remove"
            else max(0.0, -math.expm1(epsilon + untouched))
        )
    if rate == 1:
        return gaussian_delta(size / noise, epsilon)
    mixture = PoissonMixture(rate, min(noise, MAX_NOISE), size)
    log_delta = (
        _log_remove(mixture, epsilon) if direction == "remove" else _log_add(mixture, epsilon)
    )
    # PRIVACY: 1e-9 exceeds the quadrature error (test_poisson_group_delta_is_not_below_its_high_precision_value)
    return min(1.0, math.exp(min(0.0, log_delta)) * (1 + 1e-9))


def _log_remove(mixture: PoissonMixture, epsilon: float) -> float:
    """Returns log of the integral of N(x; 0, z^2) (r(x) - e^epsilon) over the x where log r > epsilon.

    log r increases, is at most 0 at x = 1/2 and at most k x / z^2 for x > 0, and at least that of the last component.
    """
    size, noise = mixture.size, mixture.noise
    threshold = epsilon * (1 - 1e-12)  # the rounding of log r must not lose mass
    if mixture.variance * threshold / size - size > 40 * noise:
        return -math.inf  # delta < e^-800
    high = size / 2 + mixture.variance * (threshold / size - math.log(mixture.rate))
    start = _root(mixture, threshold, 0.0, high * (1 + 1e-9) + 1e-9)
    end = size + math.hypot(max(start - size, 0.0), 11 * noise)

    def kernel(_: FloatArray, log_ratio: FloatArray) -> FloatArray:
        return (log_ratio + np.log(-np.expm1(np.minimum(threshold - log_ratio, 0.0))))[None]

    return _log_mass(mixture, start, end, kernel)


def _log_add(mixture: PoissonMixture, epsilon: float) -> float:
    """Returns log of the integral of N(x; 0, z^2) (1 - e^epsilon r(x)) over the x where log r < -epsilon."""
    noise = mixture.noise
    threshold = epsilon * (1 - 1e-12)
    low = -60 * noise
    if float(mixture.log_ratio(np.array([low]))[0]) >= -threshold:
        return -math.inf  # delta < e^-1800
    high = mixture.size / 2 - mixture.variance * math.log(mixture.rate)
    end = _root(mixture, -threshold, low, high * (1 + 1e-9) + 1e-9)
    start = -math.hypot(min(end, 0.0), 11 * noise)

    def kernel(_: FloatArray, log_ratio: FloatArray) -> FloatArray:
        return np.log(-np.expm1(np.minimum(threshold + log_ratio, 0.0)))[None]

    return _log_mass(mixture, start, min(end, 11 * noise), kernel)


def _log_mass(mixture: PoissonMixture, low: float, high: float, kernel: quad.Kernel) -> float:
    """Returns the log of the integral of N(x; 0, z^2) times kernel; panels are short where a Gaussian tail is steep.

    Where the integrand matters, the component that makes it up is at most `distance` away (beyond 11 z from the nearest
    one it is below e^-60 of a peak), so that it changes by less than e^10 on a panel.
    """
    tail = max(high - mixture.size, -low, 0.0)
    distance = tail + min(float(mixture.size), 11 * mixture.noise)
    scale = min(mixture.noise / 2, 5 * mixture.variance / distance)
    edges = quad.panels(low, high, scale, mixture.noise, mixture.branches)
    return float(log_integral(np.ones(1), edges, mixture.log_ratio, mixture.log_null, kernel)[0])


def _root(mixture: PoissonMixture, level: float, low: float, high: float) -> float:
    """Returns the x where log r(x) = level, between two points on either side."""

    def gap(x: float) -> float:
        return float(mixture.log_ratio(np.array([x]))[0]) - level

    return float(brentq(gap, low, high, xtol=1e-13 * mixture.noise, rtol=1e-14, maxiter=500))


def log_integral(
    order: FloatArray,
    edges: FloatArray,
    log_ratio: Callable[[FloatArray], FloatArray],
    log_base: Callable[[FloatArray], FloatArray],
    kernel: Kernel,
) -> FloatArray:
    """Returns the log of the integral of exp(log_base(x)) kernel(order, r(x)) dx, for every order on one grid.

    Args:
        order: (K,) orders.
        edges: (m + 1,) ascending panel edges.
        log_ratio: log r at each node.
        log_base: log density of the base measure at each node.
        kernel: log of the integrand, of (K, 1) orders and (nodes,) log ratios.

    Returns:
        (K,) logarithms; -inf where the integral underflows to 0.
    """
    with np.errstate(divide="ignore", under="ignore"):
        x, width = nodes(edges)
        weight = np.log(width) + log_base(x)
        ratio = log_ratio(x)
        step = max(1, CHUNK // x.size)
        parts = [order[i : i + step, None] for i in range(0, order.size, step)]
        return np.concatenate([_log_sum(kernel(part, ratio) + weight) for part in parts])


def _log_sum(terms: FloatArray) -> FloatArray:
    """Returns log(sum(exp(terms))) along the last axis."""
    top = np.max(terms, axis=-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0.0)
    total: FloatArray = top[..., 0] + np.log(np.sum(np.exp(terms - top), axis=-1))
    return total


def laplace_delta(epsilon: float, scale: float) -> float:
    """Returns the exact privacy profile of Laplace noise on a number of sensitivity 1, the hockey stick at e^epsilon.

    With t = 1/scale the loss is t on one side of both means, -t on the other and linear between, so that
    P(loss > epsilon) - e^epsilon Q(loss > epsilon) = 1 - e^((epsilon - t) / 2) for |epsilon| < t.

    Args:
        epsilon: any finite number; a negative one is a threshold e^epsilon < 1, where the profile is >= 1 - e^epsilon.
        scale: b >= 0.

    Returns:
        delta in [0, 1], rounded up.

    Raises:
        ValueError: an argument is out of range.

    Source: docs/proofs/accounting.md#laplace-noise.

    Example:
        >>> round(laplace_delta(epsilon=0.5, scale=1.0), 6)
        0.221199
    """
    epsilon = _validate.finite(epsilon=epsilon)
    scale = _validate.nonnegative(scale=scale)
    if scale < _LEAST:
        return 1.0
    # exact, since epsilon - 1/scale in floats would lose all digits where delta is small
    gap = float(Fraction(epsilon) - 1 / Fraction(scale))
    return _profile(gap / 2 if epsilon > -1 / scale else epsilon)


def rdp_gaussian(order: Orders, noise_ratio: float) -> Orders:
    """Returns the Renyi divergence order / (2 noise_ratio^2) of an unsampled Gaussian release.

    Args:
        order: Renyi order(s) a > 1.
        noise_ratio: noise std over the sensitivity under the adjacency asked for, >= 0.

    Returns:
        D_a; inf for noise_ratio = 0.

    Raises:
        ValueError: an argument is out of range.

    Guarantee: one release of a vector with that L2 sensitivity, whatever the adjacency of the sensitivity.

    Source: docs/proofs/accounting.md#gaussian-mechanism.

    Example:
        >>> rdp_gaussian(order=2.0, noise_ratio=1.0)
        1.0
    """
    noise = _validate.nonnegative(noise_ratio=noise_ratio)

    def curve(block: FloatArray) -> FloatArray:
        return (
            gaussian_divergence(block, noise, 1.0) if noise > 0 else np.full_like(block, np.inf)
        )

    return by_order(curve, order)


class BinomialShift(NamedTuple):
    """A Renyi divergence that holds except for a probability.

    Args:
        rdp: of one coordinate, >= 0; coordinates add up.
        lost_mass: to be added to delta once per coordinate.
    """

    rdp: float
    lost_mass: float


def rdp_binomial_shift(
    trials: int, noise_probability: float, shift: int, order: float, delta_window: float
) -> BinomialShift:
    """Returns the divergence of order a between Bin(N, p) on a window and Bin(N, p) +- s, and the mass off the window.

    The window is central, with at most delta_window / 2 cut off at each end, less what only one of the laws can reach.
    For a s much below sqrt(N p (1 - p)) the divergence is about a s^2 / (2 N p (1 - p)).

    Args:
        trials: N >= 1, noise bits of a coordinate, from all honest users together.
        noise_probability: p in (0, 1).
        shift: s >= 1, the most that one record moves the count.
        order: a > 1.
        delta_window: in (0, 1).

    Returns:
        rdp and lost_mass, both rounded up.

    Raises:
        ValueError: an argument is out of range.
        ConditionError: the window is empty, since the shift is too large for N.
        InfeasibleError: the window has more than 2^22 points.

    Guarantee: replace-one, for a record that moves the count by s in either direction: (epsilon, delta)-DP from the
        Renyi divergences of all coordinates, with their lost masses added to delta. Smaller shifts have their own
        divergence, which is not proved to be smaller.

    Source: docs/proofs/heavy_tailed.md#shuffle-accountant.

    Example:
        >>> bound = rdp_binomial_shift(trials=3000, noise_probability=0.5, shift=6, order=10, delta_window=1e-8)
        >>> round(bound.rdp, 6), round(bound.lost_mass, 12)
        (0.240165, 8.601e-09)
    """
    trials, shift = (
        _validate.positive_count(trials=trials),
        _validate.positive_count(shift=shift),
    )
    p = _validate.open_interval(0.0, 1.0, noise_probability=noise_probability)
    order = _validate.order(order=order)
    window = _Window(
        trials, p, shift, _validate.open_interval(0.0, 1.0, delta_window=delta_window)
    )
    return BinomialShift(window.pair(shift).divergence(order), window.lost)


def rdp_shuffle(
    trials: int,
    noise_probability: float,
    orders: Iterable[float],
    *,
    dim: int,
    max_shift: int,
    shift_norm: float,
    delta_window: float,
) -> tuple[list[float], float]:
    """Returns a Renyi curve of d shuffled sums that one record moves by integers s_1..s_d, and its failure probability.

    With kappa_a the largest D_a(s) / s^2 over 1 <= s <= max_shift, D_a <= min(kappa_a |s|^2, d max_s D_a(s)).

    Args, Raises and Guarantee: those of `zcdp_shuffle`; the orders are > 1.

    Returns:
        D_a per order and the failure probability (at most dim * delta_window unless max_shift cuts the window).

    Source: docs/proofs/heavy_tailed.md#shuffle-accountant.

    Example:
        >>> [value], lost = rdp_shuffle(
        ...     314_000, 0.5, [16.0], dim=10, max_shift=65, shift_norm=64 + 10**0.5, delta_window=1e-8
        ... )
        >>> round(value, 4), lost < 1e-7
        (0.4619, True)
    """
    window, norm = _shuffle_window(
        trials, noise_probability, dim, max_shift, shift_norm, delta_window
    )
    wanted = [_validate.order(orders=order) for order in orders]
    bounds = []
    for shift in _shifts(max_shift):
        pair = window.pair(shift)
        bounds.append((shift, [pair.divergence(order) for order in wanted]))
    curve = [
        _composed([(shift, values[k]) for shift, values in bounds], dim, norm)
        for k in range(len(wanted))
    ]
    return curve, window.failure(dim)


def sequence_probability(
    gap_first: float, gap_last: float, passes: int, threshold_scale: float, query_scale: float
) -> float:
    """Returns the probability that `passes` queries pass and the next one does not.

    A query passes if gap + nu >= rho, gap = score - threshold. Tests of lower bounds on epsilon compare it between two
    neighboring data sets.

    Args:
        gap_first: gap of each of the first queries.
        gap_last: gap of the last one.
        passes: k >= 0.
        threshold_scale: b1 > 0.
        query_scale: b2 > 0.

    Returns:
        The probability, to a relative 1e-9.

    Raises:
        ValueError: an argument is out of range.

    Source: docs/errata.md, paper 3, E2.

    Example:
        >>> round(sequence_probability(4.67, -15.47, passes=1, threshold_scale=4.0, query_scale=8.0), 6)
        0.606678
    """
    first, last = _validate.finite(gap_first=gap_first), _validate.finite(gap_last=gap_last)
    passes = _validate.count(passes=passes)
    threshold, query = (
        _validate.positive(threshold_scale=threshold_scale),
        _validate.positive(query_scale=query_scale),
    )

    def sequence(r: FloatArray) -> FloatArray:
        all_pass = np.exp(passes * _log_cdf((first - r) / query))
        return all_pass * np.exp(_log_cdf((r - last) / query))

    low = first - query * math.log(max(1, passes))  # about the minimum of gap + noise
    peak = first - query * math.log(
        max(1.0, passes * threshold / (2 * query))
    )  # of the density times all_pass
    return min(
        1.0, _mean_over_laplace(threshold, query, [0.0, first, low, peak, last], sequence)
    )


def rdp_wor_gaussian_wbk(sample_rate: float, noise_ratio: float, order: Orders) -> Orders:
    """Returns the bound of Wang, Balle and Kasiviswanathan on the curve of `rdp_wor_gaussian`.

    At integer a, with e_j = j / (2 z^2),

        E(a) <= gamma^2 C(a, 2) min(4 expm1(e_2), 2 exp(e_2)) + sum_{j=3..a} gamma^j C(a, j) 2 exp((j - 1) e_j);

    between integers log(1 + E) is convex, and is interpolated linearly from 0 at a = 1.

    Args:
        sample_rate: gamma in [0, 1].
        noise_ratio: z = noise std / (2 clip), >= 0.
        order: Renyi order(s) a > 1.

    Returns:
        D_a: 0 at rate 0, that of the unsampled Gaussian at rate 1 and above order 2^20, inf for noise 0.

    Raises:
        ValueError: an argument is out of range.

    Guarantee: as `rdp_wor_gaussian`, which is smaller.

    Source: docs/proofs/accounting.md#closed-forms-for-batches-of-fixed-size; Wang, Balle and Kasiviswanathan
    2018.

    Example:
        >>> round(rdp_wor_gaussian_wbk(sample_rate=0.01, noise_ratio=1.0, order=2.0), 9)
        0.000543509
    """
    rate = _validate.between(0.0, 1.0, sample_rate=sample_rate)
    noise = _validate.nonnegative(noise_ratio=noise_ratio)

    def curve(block: FloatArray) -> FloatArray:
        if rate == 0:
            return np.zeros_like(block)
        if noise == 0:
            return np.full_like(block, np.inf)
        if rate == 1 or block[-1] > quad.MAX_ORDER:
            return gaussian_divergence(block, noise, 1.0)
        below = np.floor(block)
        share = block - below
        integers = np.union1d(below, np.ceil(block))
        moments = np.array([_wbk_log_moment(rate, noise, int(a)) for a in integers])
        above = moments[np.searchsorted(integers, np.ceil(block))]
        rest = np.multiply(
            share, above, where=share > 0, out=np.zeros_like(block)
        )  # 0 * inf is 0 here
        return quad.rounded_up(
            ((1 - share) * moments[np.searchsorted(integers, below)] + rest) / (block - 1)
        )

    return by_order(curve, order)


def rdp_poisson_replace_one_profile(
    order: Orders, noise_ratio: float, sample_rate: float
) -> Orders:
    """Returns a looser bound on `rdp_poisson_gaussian_replace_one`: a reference for checks, never used to report.

    With delta_G(t, mu) the profile of the Gaussian mechanism, A = e^t, u = 1 + q (A - 1), B = u / A,

        E(a) <= a (a - 1) integral over t > 0 of (u^(a-2) + u^(-a-1)) h q e^t dt,
        h = q ((1 - B) delta_G(t, 1 / 2z) + B delta_G(t, 1 / z)).

    Args:
        order: Renyi order(s) a > 1.
        noise_ratio: z = noise std / (2 clip), >= 0: half of the noise multiplier.
        sample_rate: Poisson rate q in [0, 1].

    Returns:
        The bound: 0 at rate 0, that of the unsampled Gaussian at rate 1, inf for noise 0 at a positive rate.

    Raises:
        ValueError: an argument is out of range.

    Guarantee: REPLACE_ONE, as `rdp_poisson_gaussian_replace_one`, which is smaller.

    Source: docs/proofs/accounting.md#closed-forms-for-batches-of-fixed-size.

    Example:
        >>> round(rdp_poisson_replace_one_profile(order=2.0, noise_ratio=1.0, sample_rate=0.01), 9)
        0.000136038
    """
    rate = _validate.between(0.0, 1.0, sample_rate=sample_rate)
    noise = _validate.nonnegative(noise_ratio=noise_ratio)
    return sampled_divergence((rate, noise, 1), 1.0, order, _profile_log_excess)


def _wbk_log_moment(rate: float, noise: float, order: int) -> float:
    """Returns the bound on log(1 + E) at an integer order (0 at order 1)."""
    if order == 1:
        return 0.0
    j = np.arange(2, order + 1.0)
    # Running sums, not gamma functions: the terms with small j dominate, and their logarithms stay exact.
    log_choices = math.log(order) + np.cumsum(np.log((order + 1 - j) / j))
    with np.errstate(over="ignore"):
        inverse_square = np.float64(1 / min(noise, MAX_NOISE)) ** 2
        log_term = (
            log_choices + j * math.log(rate) + math.log(2) + j * (j - 1) / 2 * inverse_square
        )
    if inverse_square < math.log(2):  # 4 expm1(e_2) < 2 exp(e_2), e_2 = 1 / z^2
        log_term[0] += math.log(2) + math.log(-math.expm1(-inverse_square))
    return float(np.logaddexp(0.0, np.logaddexp.reduce(log_term)))


def _profile_log_excess(mixture: PoissonMixture, order: FloatArray) -> FloatArray:
    """In the variable x = z^2 t + 1/2, where the mean of the integrand is at most a, and beyond `end` u is q e^t."""
    rate, noise = mixture.rate, mixture.noise
    end, mean = mixture.last_alone(order[-1]), order[-1] + quad.REACH * noise

    def log_weight(x: FloatArray) -> FloatArray:
        t = (2 * x - 1) / (2 * mixture.variance)
        log_near, log_far = log_delta_curve(t, 0.5 / noise), log_delta_curve(t, 1 / noise)
        share = np.exp(mixture.log_ratio(x) - t)
        with np.errstate(divide="ignore"):
            profile = np.logaddexp(
                np.log1p(-np.minimum(share, 1.0)) + log_near, np.log(share) + log_far
            )
        return profile + t + 2 * math.log(rate) - 2 * math.log(noise)

    edges = quad.panels(0.5, min(mean, end), noise / 2, noise, mixture.branches)
    result = log_integral(order, edges, mixture.log_ratio, log_weight, _profile_kernel)
    if end < mean:
        start = (2 * end - 1) / (2 * mixture.variance)
        near, far = (
            _log_profile_tail(order, start, 0.5 / noise),
            _log_profile_tail(order, start, 1 / noise),
        )
        tail = np.logaddexp(math.log1p(-rate) + near, math.log(rate) + far) + order * math.log(
            rate
        )
        result = np.logaddexp(result, tail)
    return result


def _profile_kernel(order: FloatArray, log_u: FloatArray) -> FloatArray:
    """Returns log(a (a - 1) (u^(a-2) + u^(-a-1)))."""
    powers = np.logaddexp((order - 2) * log_u, -(order + 1) * log_u)
    return powers + np.log(order) + np.log(order - 1)


def _log_profile_tail(order: FloatArray, start: float, mu: float) -> FloatArray:
    """Returns the log of a (a - 1) times the integral over t > start of e^((a-1) t) delta_G(t, mu).

    With L the privacy loss, it is E_Q[1(L > s) (e^(a L) - a e^(L + (a-1) s) + (a-1) e^(a s))], s = start.
    """
    depth = start / mu
    whole = (order - 1) * gaussian_divergence(order, 1 / mu, 1.0) + log_ndtr(
        mu * (order - 0.5) - depth
    )
    line = np.log(order) + (order - 1) * start + log_ndtr(mu / 2 - depth)
    constant = np.log(order - 1) + order * start + log_ndtr(-mu / 2 - depth)
    return quad.log_difference(np.logaddexp(whole, constant), line)


def zcdp_epsilon_bs16(rho: float, delta: float) -> float:
    """Returns rho + 2 sqrt(rho log(1/delta)), the conversion that the papers use; `zcdp_epsilon` is smaller.

    Args:
        rho: >= 0.
        delta: in (0, 1).

    Returns:
        epsilon >= 0, rounded up.

    Raises:
        ValueError: rho is negative or not finite, or delta is not in (0, 1).

    Guarantee: every rho-zCDP mechanism is (epsilon, delta)-DP, under the adjacency of its rho.

    Source: docs/proofs/accounting.md#concentrated-privacy; Bun and Steinke 2016, Proposition 1.3.

    Example:
        >>> round(zcdp_epsilon_bs16(rho=0.1, delta=1e-5), 4)
        2.246
    """
    rho = _validate.nonnegative(rho=rho)
    log_inverse = -math.log(_validate.open_interval(0.0, 1.0, delta=delta))
    # PRIVACY: rounded up; two roots, since the product may underflow (test_textbook_bounds_are_rounded_safely)
    return (rho + 2 * math.sqrt(rho) * math.sqrt(log_inverse)) * (1 + _ROUNDING)


def zcdp_rho(epsilon: float, delta: float) -> float:
    """Returns the largest rho for which rho-zCDP is known to imply (epsilon, delta)-DP, rounded down.

    At the optimal b, rho = (log(1/delta) - log(1 + b)) / b^2 and epsilon = (1 + 2b) rho - log(1 + 1/b), which
    decreases in b: one root.

    Args:
        epsilon: >= 0.
        delta: in (0, 1).

    Returns:
        rho >= 0 (0 below 1e-300).

    Raises:
        ValueError: epsilon is negative or not finite, or delta is not in (0, 1).

    Guarantee: zcdp_epsilon(rho, delta) <= epsilon for the rho returned.

    Source: docs/proofs/accounting.md#concentrated-privacy.

    Example:
        >>> round(zcdp_rho(epsilon=1.0, delta=1e-5), 5)
        0.03056
    """
    epsilon = check.nonnegative(epsilon=epsilon)
    log_inverse = -math.log(check.open_interval(0.0, 1.0, delta=delta))

    def gap(log_b: float) -> float:
        b = math.exp(log_b)
        rho = (log_inverse - math.log1p(b)) / b / b
        return (1 + 2 * b) * rho - math.log1p(1 / b) - epsilon

    # At the largest b, 1/delta - 1, rho is 0 and the gap is negative; at small b it is about log(1/delta) / b^2.
    high = min(
        log_inverse + math.log(-math.expm1(-log_inverse)), 709.0
    )  # e^709 is the last power that is finite
    low = high - 1.0
    while gap(low) <= 0:
        low -= 1.0 + abs(low) / 8
    b = math.exp(high if gap(high) > 0 else scipy.optimize.brentq(gap, low, high, xtol=1e-12))
    rho = (epsilon + math.log1p(1 / b) - (log_inverse - math.log1p(b)) / b) / (1 + b)
    # PRIVACY: 1e-12 exceeds all rounding (test_zcdp_conversions_are_on_the_safe_side)
    return rho * (1 - 1e-12) if rho > 1e-300 else 0.0  # subnormal numbers round by more


def zcdp_rho_bs16(epsilon: float, delta: float) -> float:
    """Returns (sqrt(epsilon + log(1/delta)) - sqrt(log(1/delta)))^2, the inverse of `zcdp_epsilon_bs16`.

    Args:
        epsilon: >= 0.
        delta: in (0, 1).

    Returns:
        rho >= 0, rounded down (0 below 1e-300); `zcdp_rho` is larger.

    Raises:
        ValueError: epsilon is negative or not finite, or delta is not in (0, 1).

    Guarantee: zcdp_epsilon_bs16(rho, delta) <= epsilon for the rho returned.

    Source: docs/proofs/accounting.md#concentrated-privacy; Bun and Steinke 2016.

    Example:
        >>> round(zcdp_rho_bs16(epsilon=1.0, delta=1e-5), 5)
        0.02082
    """
    epsilon = _validate.nonnegative(epsilon=epsilon)
    log_inverse = -math.log(_validate.open_interval(0.0, 1.0, delta=delta))
    root = epsilon / (
        math.sqrt(epsilon + log_inverse) + math.sqrt(log_inverse)
    )  # the difference would cancel
    # PRIVACY: rounded down by more than the inverse adds (test_textbook_bounds_are_rounded_safely)
    rho = root * root * (1 - 8 * _ROUNDING)
    return rho if rho > 1e-300 else 0.0  # subnormal numbers round by more


def compose_sequential(rhos: Iterable[float]) -> float:
    """Returns the sum: what mechanisms on the same records cost together.

    Renyi divergences of adaptive compositions add up at every order, if every rho was fixed in advance.

    Args:
        rhos: each >= 0 (inf: no noise).

    Returns:
        rho >= 0, the least float that is at least the exact sum; 0 for no mechanism.

    Raises:
        ValueError: a rho is negative or not a number.

    Guarantee: rho-zCDP under every adjacency that all the rhos share.

    Source: docs/proofs/accounting.md#composition; Bun and Steinke 2016, Lemma 2.3.

    Example:
        >>> compose_sequential([0.25, 0.5])
        0.75
    """
    values = _rhos(rhos)
    if math.isinf(sum(values)):
        return math.inf
    total = math.fsum(values)
    # PRIVACY: the sum is rounded up (test_the_sequential_sum_is_the_exact_one_rounded_up)
    return math.nextafter(total, math.inf) if math.fsum([*values, -total]) > 0 else total


def compose_parallel(rhos: Iterable[float]) -> float:
    """Returns the maximum: what mechanisms on disjoint parts of the records cost together.

    The differing record lies in one part, i. Given the outputs before it, which have the same law for both data sets,
    the output on part i costs rho_i; what follows sees the record only through these outputs. So the cost is rho_i for
    an i that the partition alone decides.

    Args:
        rhos: cost of all that is done on each part, each >= 0 (inf: no noise).

    Returns:
        rho >= 0; 0 for no part.

    Raises:
        ValueError: a rho is negative or not a number.

    Guarantee: rho-zCDP, if the partition is public and does not depend on the data. Parts cut by position:
        replace-one or zero-out, not add/remove, where one removal shifts every later part. Parts by a key of the
        record: add/remove or zero-out, not replace-one, unless the replacement keeps the key.

    Source: docs/proofs/accounting.md#parts-of-a-partition.

    Example:
        >>> compose_parallel([0.25, 0.5])
        0.5
    """
    return max(_rhos(rhos), default=0.0)


def _rhos(rhos: Iterable[float]) -> list[float]:
    return [_validate.nonnegative(rhos=rho, allow_inf=True) for rho in rhos]


def knorm_delta(epsilon: float, pure_epsilon: float, dim: int) -> float:
    """Returns the exact privacy profile of one K-norm release, the hockey stick at e^epsilon, rounded up.

    delta = integral over loss > epsilon of (1 - e^(epsilon - loss)) under the release: both directions are equal.

    Args:
        epsilon: >= 0.
        pure_epsilon: >= 0, the epsilon of the mechanism.
        dim: >= 1.

    Returns:
        delta in [0, 1], at most `pure_delta`; 0 for epsilon >= pure_epsilon.

    Raises:
        ValueError: an argument is out of range.

    Guarantee: one release is (epsilon, delta)-DP under the adjacency of its sensitivity.

    Source: docs/proofs/accounting.md#k-norm-noise.

    Example:
        >>> knorm_delta(epsilon=1.61, pure_epsilon=4.0, dim=100) < 1e-5
        True
    """
    epsilon = _validate.nonnegative(epsilon=epsilon)
    pure = _validate.nonnegative(pure_epsilon=pure_epsilon)
    dim = _validate.positive_count(dim=dim)
    worst = pure_delta(epsilon, pure)
    if epsilon >= pure or pure < _LEAST_EPSILON:
        return worst
    if dim == 1:
        return min(worst, -math.expm1((epsilon - pure) / 2) * (1 + 1e-15))
    epsilon = min(
        epsilon, pure * (1 - 1e-6)
    )  # closer to pure, delta is that of this smaller epsilon: an upper bound

    def kernel(loss: FloatArray) -> FloatArray:
        return np.log(-np.expm1(np.minimum(epsilon - loss, 0.0)))

    # E_P[1 - e^(epsilon - loss)] with P of exponent + loss/2
    log_mass = _log_integral(
        pure, dim, np.array([pure / 2]), kernel, start=math.asin(epsilon / pure)
    )[0]
    log_delta = float(log_mass) - _log_total(pure, dim)
    # PRIVACY: 1e-9 exceeds the quadrature error (test_the_profile_is_not_below_its_integral_in_high_precision)
    return min(worst, math.exp(min(0.0, log_delta)) * (1 + 1e-9))


def knorm_scale(epsilon: float, sensitivity: float) -> float:
    """Returns the scale s of the noise density exp(-|z| / s) that makes a release epsilon-DP, rounded up.

    Args:
        epsilon: > 0.
        sensitivity: L2 sensitivity under the adjacency asked for, > 0.

    Returns:
        sensitivity / epsilon. The radius of the noise is Gamma(dim, s), its direction uniform.

    Raises:
        ValueError: an argument is not positive and finite, or the scale overflows.

    Guarantee: epsilon-DP (delta = 0) of one release, by the triangle inequality: |log p(z - w) / p(z - w')| <=
    |w - w'| / s.

    Source: docs/proofs/output.md#k-norm-noise.

    Example:
        >>> knorm_scale(epsilon=0.5, sensitivity=0.25)
        0.5
    """
    epsilon = _validate.positive(epsilon=epsilon)
    sensitivity = _validate.positive(sensitivity=sensitivity)
    scale = _validate.finite(scale=sensitivity / epsilon)
    # PRIVACY: the division rounds (test_the_scale_never_falls_short_of_the_exact_ratio)
    short = Fraction(scale) * Fraction(epsilon) < Fraction(sensitivity)
    return math.nextafter(scale, math.inf) if short else scale


def knorm_mean_norm(dim: int, sensitivity: float, epsilon: float) -> float:
    """Returns the mean norm of the noise, dim sensitivity / epsilon.

    Args:
        dim: >= 1.
        sensitivity: > 0.
        epsilon: > 0.

    Source: docs/proofs/output.md#k-norm-noise

    Example:
        >>> knorm_mean_norm(dim=50, sensitivity=0.02, epsilon=0.5)
        2.0
    """
    dim = _validate.positive_count(dim=dim)
    return dim * knorm_scale(epsilon, sensitivity)


def knorm_second_moment(dim: int, sensitivity: float, epsilon: float) -> float:
    """Returns the mean squared norm of the noise, dim (dim + 1) (sensitivity / epsilon)^2.

    Args:
        dim: >= 1.
        sensitivity: > 0.
        epsilon: > 0.

    Source: docs/proofs/output.md#k-norm-noise

    Example:
        >>> round(knorm_second_moment(dim=50, sensitivity=0.02, epsilon=0.5), 6)
        4.08
    """
    dim = _validate.positive_count(dim=dim)
    return dim * (dim + 1) * knorm_scale(epsilon, sensitivity) ** 2


def knorm_radius_quantile(
    dim: int, sensitivity: float, epsilon: float, quantile: float
) -> float:
    """Returns the quantile of the norm of the noise, a Gamma variable of shape dim and scale sensitivity / epsilon.

    Args:
        dim: >= 1.
        sensitivity: > 0.
        epsilon: > 0.
        quantile: in (0, 1).

    Source: docs/proofs/output.md#k-norm-noise

    Example:
        >>> round(knorm_radius_quantile(dim=1, sensitivity=0.02, epsilon=0.5, quantile=0.5), 6)
        0.027726
    """
    dim = _validate.positive_count(dim=dim)
    quantile = _validate.open_interval(0.0, 1.0, quantile=quantile)
    return float(gammaincinv(dim, quantile)) * knorm_scale(epsilon, sensitivity)


def knorm_logpdf(
    value: Sequence[float] | FloatArray, sensitivity: float, epsilon: float
) -> float:
    """Returns the log density of the noise at one point.

    log p(z) = -|z| / s - log(2 pi^(dim/2) Gamma(dim) / Gamma(dim/2)) - dim log(s), s = sensitivity / epsilon.

    Args:
        value: (dim,) point.
        sensitivity: > 0.
        epsilon: > 0.

    Source: docs/proofs/output.md#k-norm-noise

    Example:
        >>> round(knorm_logpdf([0.0], sensitivity=0.02, epsilon=0.1), 6)
        0.916291
    """
    point = np.asarray(value, dtype=np.float64)
    if point.ndim != 1 or point.size == 0:
        raise ValueError(
            f"value must be a 1-d array of at least one number (got shape {point.shape})"
        )
    dim, scale = point.size, knorm_scale(epsilon, sensitivity)
    log_sphere = math.log(2) + dim / 2 * math.log(math.pi) - math.lgamma(dim / 2)
    return (
        float(-np.linalg.norm(point) / scale)
        - log_sphere
        - math.lgamma(dim)
        - dim * math.log(scale)
    )


@dataclass(frozen=True)
class LaplaceLoss(LossLaw):
    """Laplace noise: loss 1/b with mass 1/2, -1/b with mass e^(-1/b) / 2, density e^((l - 1/b) / 2) / 4 between.

    Args:
        epsilon: 1/b = sensitivity / scale, > 0.
    """

    epsilon: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", _validate.positive(epsilon=self.epsilon))

    def span(self, reach: float) -> tuple[float, float]:
        """The support."""
        return -self.epsilon, self.epsilon

    def on_grid(self, grid: float, reach: float) -> GridLaw:
        """See the base class."""
        epsilon = self.epsilon
        first, ends = cuts(-epsilon, epsilon, grid)
        width = np.diff(ends)
        density = np.exp((ends[:-1] - epsilon) / 2)
        mass = density * np.expm1(width / 2) / 2
        excess = 2 * density * np.sinh(width / 4) ** 2
        excess[0] -= (mass[0] - excess[0]) * math.expm1(-max(ends[0] - first * grid, 0.0))
        for index, loss, weight in (
            (0, -epsilon, math.exp(-epsilon) / 2),
            (-1, epsilon, 0.5),
        ):
            above = max(loss - (first + index % mass.size) * grid, 0.0)
            mass[index] += weight
            excess[index] -= weight * math.expm1(-above)
        accuracy = 16 * UNIT * (4 + epsilon)
        return GridLaw(first, connected(mass, excess, grid, accuracy), 0.0, grid, accuracy)


_SLACK = 1.0 + 1e-12  # rounding of a sum of spends


class RDPFilter:
    """Renyi filter at one order fixed in advance: valid for parameters chosen from earlier outputs.

    An event of Renyi cost D is admitted while the sum of costs at that order stays within the budget; then the whole
    run is (order, budget)-RDP whatever the rule that chose the events (Feldman and Zrnic 2021). A refused event costs
    nothing, and a cheaper one may still be admitted.

    Args:
        order: the Renyi order, > 1, chosen before the run.
        budget: RDP budget at that order, >= 0.

    Example:
        >>> run = RDPFilter(order=8.0, budget=0.5)
        >>> run.charge(0.3), run.admits(0.3), run.admits(0.2)
        (None, False, True)
    """

    def __init__(self, order: float, budget: float) -> None:
        self.order = check.order(order=order)
        self.budget = check.nonnegative(budget=budget)
        self.spent = 0.0

    @classmethod
    def for_budget(cls, order: float, epsilon: float, delta: float) -> RDPFilter:
        """Returns the filter whose exhausted budget converts to (epsilon, delta) at that order.

        Raises:
            ValueError: the order is too small for the target (no budget is left).
        """
        check.positive(epsilon=epsilon)
        overhead = rdp_epsilon_at_order(0.0, check.order(order=order), delta)
        if overhead >= epsilon:
            raise ValueError(
                f"order must leave a budget: at order {order} the conversion alone costs {overhead:.4g}"
            )
        return cls(order, epsilon - max(overhead, 0.0))

    def admits(self, value: float) -> bool:
        """Returns whether an event of this Renyi cost fits; False for an infinite or undefined cost."""
        return math.isfinite(value) and value >= 0 and self.spent + value <= self.budget * _SLACK

    def charge(self, value: float) -> None:
        """Adds a Renyi cost; raises ValueError if it does not fit."""
        if not self.admits(value):
            raise ValueError(
                f"value must fit the budget: spent {self.spent}, asked {value}, budget {self.budget}"
            )
        self.spent += value


def rdp_wor_gaussian_closed_form(
    sample_rate: float, noise_ratio: float, order: Orders
) -> Orders:
    """Returns 3.5 gamma^2 a / z^2, the paper's bound on the curve of `rdp_wor_gaussian`, where it is proved.

    Args:
        sample_rate: gamma in [0, 1].
        noise_ratio: z = noise std / (2 clip), >= 0.
        order: Renyi order(s) a > 1.

    Returns:
        The bound; 0 at rate 0.

    Raises:
        ConditionError: z^2 < 0.67, or a - 1 > (2 z^2 / 3) log(1 / (a gamma (1 + z^2))) at some order.
        ValueError: an argument is out of range.

    Guarantee: as `rdp_wor_gaussian`, which is smaller.

    Source: docs/proofs/accounting.md#closed-forms-for-batches-of-fixed-size (Lemma 3 of the paper).

    Example:
        >>> round(rdp_wor_gaussian_closed_form(sample_rate=0.001, noise_ratio=2.0, order=1.5), 12)
        1.3125e-06
    """
    rate = _validate.between(0.0, 1.0, sample_rate=sample_rate)
    noise = _validate.nonnegative(noise_ratio=noise_ratio)

    def curve(block: FloatArray) -> FloatArray:
        if rate == 0:
            return np.zeros_like(block)
        square = noise * noise
        if square < 0.67:
            raise ConditionError(
                f"noise_ratio^2 must be >= 0.67 for the closed form (got {square:g})"
            )
        # PRIVACY: never extrapolated (test_the_closed_form_is_refused_outside_its_conditions)
        usable = block - 1 <= -2 * square / 3 * (
            np.log(block) + math.log(rate) + math.log1p(square)
        )
        if not usable.all():
            worst = block[~usable][0]
            raise ConditionError(
                f"order - 1 must be <= (2 z^2 / 3) log(1 / (order sample_rate (1 + z^2))) for the closed form "
                f"(got order {worst:g}, noise_ratio {noise:g}, sample_rate {rate:g})"
            )
        return 3.5 * rate * (rate * block / square)

    return by_order(curve, order)


def bad_pass_integral(
    margin: float, steps: int, threshold_scale: float, query_scale: float
) -> float:
    """Returns P[max_t nu_t - rho > margin], which `bad_pass_probability` bounds, to a relative 1e-9."""

    def some_pass(r: FloatArray) -> FloatArray:
        return -np.expm1(steps * _log_cdf((margin + r) / query_scale))

    top = query_scale * math.log(steps)  # about the maximum of the noises
    breaks = [0.0, -margin, top - margin]
    return min(1.0, _mean_over_laplace(threshold_scale, query_scale, breaks, some_pass))


_REACH = 60.0  # Laplace scales kept beyond the outermost breakpoint: the rest is below e^-60 of the result


def _log_cdf(y: FloatArray) -> FloatArray:
    """Returns log F(y) of the standard Laplace distribution, to relative accuracy on both sides."""
    tail = np.exp(-np.abs(y)) / 2
    return np.where(y >= 0, np.log1p(-tail), -np.abs(y) - math.log(2))


def _mean_over_laplace(
    scale: float,
    query_scale: float,
    breaks: list[float],
    function: Callable[[FloatArray], FloatArray],
) -> float:
    """Returns E[function(rho)], rho ~ Lap(scale), by panels that start small at every break and double.

    Between breaks the integrand is a product of exponentials e^(c r): a panel of a quarter of its distance to the break
    is short enough wherever e^(c distance) still matters.
    """
    finest = min(scale, query_scale) / 2
    low = min(breaks) - _REACH * scale
    high = max(breaks) + _REACH * scale
    doublings = max(1, math.ceil(4 * math.log2((high - low) / finest)))
    offsets = finest * 2.0 ** (np.arange(doublings + 1) / 4)
    around = np.concatenate([-offsets, [0.0], offsets])
    edges = np.concatenate([[low, high], *(at + around for at in breaks)])
    edges = np.unique(edges[(edges >= low) & (edges <= high)])
    r, weight = nodes(edges)
    with np.errstate(under="ignore"):
        density = np.exp(-np.abs(r) / scale) / (2 * scale)
        return float(np.sum(weight * density * function(r)))
