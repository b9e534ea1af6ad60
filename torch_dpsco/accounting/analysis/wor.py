"""Renyi curves of Gaussian noise on batches of fixed size, drawn uniformly without replacement.

gamma is the batch size over the data set size (both public), z the noise std over 2C, with C the clip: in any pair of
neighboring data sets two batches differ by one record for another, at a distance of at most 2C, under ZERO_OUT too
(when the differing record enters, another one leaves). With P = N(1, z^2), Q = N(0, z^2), r the likelihood ratio of
(1-gamma) Q + gamma P to Q, two bounds are offered:

    rdp_wor_gaussian              tight: the exact privacy profile, attained point by point
    rdp_wor_gaussian_closed_form  3.5 gamma^2 a / z^2, as in the Hoelder paper, under side conditions

Source: docs/proofs/accounting.md#batches-of-fixed-size,
docs/proofs/accounting.md#closed-forms-for-batches-of-fixed-size.
"""

from __future__ import annotations

import math

import numpy as np

from torch_dpsco import _validate
from torch_dpsco.accounting.analysis import quadrature as quad
from torch_dpsco.accounting.analysis.mixtures import PoissonMixture, sampled_divergence
from torch_dpsco.accounting.analysis.quadrature import FloatArray, Orders
from torch_dpsco.errors import ConditionError

__all__ = ["rdp_wor_gaussian", "rdp_wor_gaussian_closed_form"]


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


def _wor_log_excess(mixture: PoissonMixture, order: FloatArray) -> FloatArray:
    return mixture.log_excess_above(order, 0.5, two_sided=True)
