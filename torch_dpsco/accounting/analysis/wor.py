"""Renyi curves of Gaussian noise on batches of fixed size, drawn uniformly without replacement.

gamma is the batch size over the data set size (both public), z the noise std over 2C, with C the clip: in any pair of
neighboring data sets two batches differ by one record for another, at a distance of at most 2C, under ZERO_OUT too
(when the differing record enters, another one leaves). With P = N(1, z^2), Q = N(0, z^2), r the likelihood ratio of
(1-gamma) Q + gamma P to Q, the curve is tight: that of the exact privacy profile, attained point by point.

Source: docs/proofs/accounting.md#batches-of-fixed-size.
"""

from __future__ import annotations

from torch_dpsco import _validate
from torch_dpsco.accounting.analysis.mixtures import PoissonMixture, sampled_divergence
from torch_dpsco.accounting.analysis.quadrature import FloatArray, Orders


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


def _wor_log_excess(mixture: PoissonMixture, order: FloatArray) -> FloatArray:
    return mixture.log_excess_above(order, 0.5, two_sided=True)
