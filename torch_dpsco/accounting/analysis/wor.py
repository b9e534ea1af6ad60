"""Renyi curves of Gaussian noise on batches of fixed size, drawn uniformly without replacement.

gamma is the batch size over the data set size (both public), z the noise std over 2C, with C the clip: in any pair of
neighboring data sets two batches differ by one record for another, at a distance of at most 2C, under ZERO_OUT too
(when the differing record enters, another one leaves). With P = N(1, z^2), Q = N(0, z^2), r the likelihood ratio of
(1-gamma) Q + gamma P to Q, three bounds are offered:

    rdp_wor_gaussian              tight: the exact privacy profile, attained point by point
    rdp_wor_gaussian_wbk          Wang, Balle and Kasiviswanathan 2018, as in other libraries
    rdp_wor_gaussian_closed_form  3.5 gamma^2 a / z^2, as in the Hoelder paper, under side conditions

and a reference bound for Poisson sampling under REPLACE_ONE, from the same kind of profile.

Source: docs/proofs/accounting.md#batches-of-fixed-size,
docs/proofs/accounting.md#closed-forms-for-batches-of-fixed-size.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import log_ndtr

from torch_dpsco import _validate
from torch_dpsco.accounting.analysis import quadrature as quad
from torch_dpsco.accounting.analysis.gaussian import log_delta_curve
from torch_dpsco.accounting.analysis.mixtures import (
    MAX_NOISE,
    PoissonMixture,
    gaussian_divergence,
    sampled_divergence,
)
from torch_dpsco.accounting.analysis.quadrature import FloatArray, Orders
from torch_dpsco.errors import ConditionError

__all__ = [
    "rdp_poisson_replace_one_profile",
    "rdp_wor_gaussian",
    "rdp_wor_gaussian_closed_form",
    "rdp_wor_gaussian_wbk",
]


def rdp_wor_gaussian(sample_rate: float, noise_ratio: float, order: Orders) -> Orders:
    """Returns the tight Renyi curve of one Gaussian release on a uniform batch of fixed size.

    The privacy profile is H_t(mix, Q) for t >= 1 and H_t(Q, mix) for t < 1. It is that of a loss law symmetric about
    0, with E = integral over x > 1/2 of N(x; 0, z^2) (r^a + r^(1-a) - r - 1).

    Args:
        sample_rate: gamma = batch size / data set size, in [0, 1].
        noise_ratio: z = noise std / (2 clip), >= 0.
        order: Renyi order(s) a > 1.

    Returns:
        D_a: 0 at rate 0, that of the unsampled Gaussian at rate 1, inf for noise 0 at a positive rate.

    Raises:
        ValueError: an argument is out of range.

    Guarantee: REPLACE_ONE and ZERO_OUT (data set size public); unit: the record that is sampled; the clipped sum of a
    batch drawn uniformly and independently at every step (shuffled epochs are not).

    Source: docs/proofs/accounting.md#batches-of-fixed-size.

    Example:
        >>> round(rdp_wor_gaussian(sample_rate=0.01, noise_ratio=1.0, order=2.0), 9)
        0.000280639
    """
    rate = _validate.between(0.0, 1.0, sample_rate=sample_rate)
    noise = _validate.nonnegative(noise_ratio=noise_ratio)
    return sampled_divergence((rate, noise, 1), 1.0, order, _wor_log_excess)


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
        rest = np.multiply(share, above, where=share > 0, out=np.zeros_like(block))  # 0 * inf is 0 here
        return quad.rounded_up(((1 - share) * moments[np.searchsorted(integers, below)] + rest) / (block - 1))

    return quad.by_order(curve, order)


def rdp_wor_gaussian_closed_form(sample_rate: float, noise_ratio: float, order: Orders) -> Orders:
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
            raise ConditionError(f"noise_ratio^2 must be >= 0.67 for the closed form (got {square:g})")
        # PRIVACY: never extrapolated (test_the_closed_form_is_refused_outside_its_conditions)
        usable = block - 1 <= -2 * square / 3 * (np.log(block) + math.log(rate) + math.log1p(square))
        if not usable.all():
            worst = block[~usable][0]
            raise ConditionError(
                f"order - 1 must be <= (2 z^2 / 3) log(1 / (order sample_rate (1 + z^2))) for the closed form "
                f"(got order {worst:g}, noise_ratio {noise:g}, sample_rate {rate:g})"
            )
        return 3.5 * rate * (rate * block / square)

    return quad.by_order(curve, order)


def rdp_poisson_replace_one_profile(order: Orders, noise_ratio: float, sample_rate: float) -> Orders:
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


def _wor_log_excess(mixture: PoissonMixture, order: FloatArray) -> FloatArray:
    return mixture.log_excess_above(order, 0.5, two_sided=True)


def _wbk_log_moment(rate: float, noise: float, order: int) -> float:
    """Returns the bound on log(1 + E) at an integer order (0 at order 1)."""
    if order == 1:
        return 0.0
    j = np.arange(2, order + 1.0)
    # Running sums, not gamma functions: the terms with small j dominate, and their logarithms stay exact.
    log_choices = math.log(order) + np.cumsum(np.log((order + 1 - j) / j))
    with np.errstate(over="ignore"):
        inverse_square = np.float64(1 / min(noise, MAX_NOISE)) ** 2
        log_term = log_choices + j * math.log(rate) + math.log(2) + j * (j - 1) / 2 * inverse_square
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
            profile = np.logaddexp(np.log1p(-np.minimum(share, 1.0)) + log_near, np.log(share) + log_far)
        return profile + t + 2 * math.log(rate) - 2 * math.log(noise)

    edges = quad.panels(0.5, min(mean, end), noise / 2, noise, mixture.branches)
    result = quad.log_integral(order, edges, mixture.log_ratio, log_weight, _profile_kernel)
    if end < mean:
        start = (2 * end - 1) / (2 * mixture.variance)
        near, far = _log_profile_tail(order, start, 0.5 / noise), _log_profile_tail(order, start, 1 / noise)
        tail = np.logaddexp(math.log1p(-rate) + near, math.log(rate) + far) + order * math.log(rate)
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
    whole = (order - 1) * gaussian_divergence(order, 1 / mu, 1.0) + log_ndtr(mu * (order - 0.5) - depth)
    line = np.log(order) + (order - 1) * start + log_ndtr(mu / 2 - depth)
    constant = np.log(order - 1) + order * start + log_ndtr(-mu / 2 - depth)
    return quad.log_difference(np.logaddexp(whole, constant), line)
