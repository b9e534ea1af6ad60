"""Gradient descent preconditioned by a noisy covariance: its level, and a step size that knows the noise.

A plan releases X'X once and T sums of clipped gradients, each with Gaussian noise: with stds s_G and s, and a record
that moves them by at most D_G and D, all of them together are GDP of the level

    mu^2 = (D_G / s_G)^2 + T (D / s)^2.

Everything else is post-processing, the step size too. A sum of step sizes tau puts noise of std tau s0 / (v_j + ridge),
s0 = s / sqrt(T), on the weights along the eigenvector j of X'X, with the eigenvalue v_j: noise of the variance

    (tau s0)^2 S,      S = (1/n) sum_j v_j / (v_j + ridge)^2,

on the score of a row, on average. tau is chosen so that its std is 0.7, where scores of a softmax begin to decide at 1:
less learns too little, more drowns what was learned. No privacy rests on that.

Source: docs/proofs/heads.md#what-is-released, docs/proofs/heads.md#steps-that-know-their-noise.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.rounding import FloatArray, scaled_up

_SCORE_NOISE = 0.7  # std of the noise on a score that decides how long to go on
_DAMPING = 2.0  # ridge, over the norm of the noise on X'X
_SHARES = (0.02, 0.2)  # of mu^2, for X'X
_STEPS = (32, 128)
_CLIPS = (0.5, 1.0)  # over the bound on rows
_LOUD = 250.0  # signal over noise from which no clip helps
_REACH = 2.0  # bound on rows over what is left of them beside the few large eigenvalues


class PreconditionedNumbers(NamedTuple):
    """Number of steps, share of mu^2 for X'X, and the clip over the bound on rows."""

    steps: int
    share: float
    clip: float


def preconditioned_numbers(
    mu: float, n: int, dim: int, num_scores: int, curvature: float, clip: float | None = None
) -> PreconditionedNumbers:
    """Returns the numbers of a run, by public numbers alone.

    The longest horizon is tau = _REACH ridge / (B s0), in T steps of at most 1 / curvature: T is the least number, from
    32 to 128, for which a fifth of mu^2 makes the ridge small enough, and the share is what that many steps need.

    Args:
        mu: > 0, to be spent.
        n: public number of records.
        dim: d >= 1, of prepared rows.
        num_scores: K.
        curvature: of the loss in a score at 0, > 0; its mean over classes.
        clip: over the bound on rows; None to choose it, from 1/2 where noise is loud to 1.

    Source: docs/proofs/heads.md#steps-that-know-their-noise

    Example:
        >>> preconditioned_numbers(mu=0.21, n=20_000, dim=129, num_scores=20, curvature=0.05).steps
        32
    """
    signal = check.positive(mu=mu) * check.positive_count(n=n) / math.sqrt(num_scores * dim)
    if clip is None:
        clip = min(max(signal / _LOUD, _CLIPS[0]), _CLIPS[1])
    needed = _DAMPING * _REACH * math.sqrt(2 * check.positive_count(dim=dim)) * curvature / clip
    least, most = _SHARES
    steps = min(max(math.ceil(needed * math.sqrt((1 - most) / most)), _STEPS[0]), _STEPS[1])
    odds = (needed / steps) ** 2
    return PreconditionedNumbers(steps, min(max(odds / (1 + odds), least), most), clip)


def ridge_of(gram_std: float, dim: int) -> float:
    """Returns the ridge, twice the bound sqrt(2 d) s_G on the mean norm of the noise on X'X.

    Example:
        >>> ridge_of(1.0, 50)
        20.0
    """
    return (
        _DAMPING * check.positive(gram_std=gram_std) * math.sqrt(2 * check.positive_count(dim=dim))
    )


def stable_step(curvature: float, ridge: float, largest: float) -> float:
    """Returns the step size that ends in one step along the largest eigenvalue of X'X, where the curvature is this.

    Example:
        >>> stable_step(0.25, ridge=1.0, largest=1.0)
        8.0
    """
    return 1 / check.positive(curvature=curvature) * (1 + ridge / max(largest, ridge * 1e-6))


def preconditioned_mu(
    gram_moved: float, gram_std: float, gradient_moved: float, gradient_std: float, steps: int
) -> float:
    """Returns mu of X'X and all sums together, rounded up.

    Args:
        gram_moved: D_G > 0, in the Frobenius norm.
        gram_std: s_G > 0, in an orthonormal basis of the symmetric matrices.
        gradient_moved: D > 0.
        gradient_std: s > 0, of each coordinate of each sum.
        steps: T >= 1.

    Guarantee: mu-GDP of all releases together, each of which may depend on those before.

    Source: docs/proofs/heads.md#what-is-released

    Example:
        >>> round(preconditioned_mu(1.0, 2.0, 1.0, 4.0, steps=12), 9)
        1.0
    """
    covariance = check.positive(gram_moved=gram_moved) / check.positive(gram_std=gram_std)
    sums = check.positive(gradient_moved=gradient_moved) / check.positive(gradient_std=gradient_std)
    # PRIVACY: every step counts (test_the_level_of_a_run_is_that_of_all_its_releases); margin of the root
    # (docs/proofs/rounding.md#model-of-arithmetic)
    return scaled_up(math.hypot(covariance, math.sqrt(check.positive_count(steps=steps)) * sums), 8)


def horizon(eigenvalues: FloatArray, ridge: float, gram_std: float, noise: float, n: int) -> float:
    """Returns tau, the sum of the step sizes at which the noise on a score has the std 0.7.

    Args:
        eigenvalues: of the noisy X'X, (d,). Those within its noise are replaced by their mean.
        ridge: > 0.
        gram_std: of the noise on X'X.
        noise: s0 > 0.
        n: public number of records.

    Source: docs/proofs/heads.md#steps-that-know-their-noise

    Example:
        >>> round(horizon(np.array([100.0, 100.0]), ridge=100.0, gram_std=1.0, noise=2.0, n=50), 6)
        35.0
    """
    values = np.asarray(eigenvalues, dtype=np.float64)
    edge = gram_std * math.sqrt(2 * len(eigenvalues))
    hidden = values < edge
    if hidden.any():
        # the mean of what noise hides has noise of std gram_std / sqrt(number of them)
        values = np.where(
            hidden, max(values[hidden].mean(), gram_std / math.sqrt(hidden.sum())), values
        )
    return _SCORE_NOISE * math.sqrt(n / float((values / (values + ridge) ** 2).sum())) / noise


def boosted_clip(signal: float) -> float:
    """Returns where to clip residuals, in spreads of the targets: the mean of a skewed target needs a wide clip.

    Args:
        signal: n mu / sqrt(d), see `theory.linear.preparation.signal_to_noise`.

    Source: docs/proofs/boosting.md#how-wide-and-how-long

    Example:
        >>> boosted_clip(50.0), boosted_clip(400.0), boosted_clip(10_000.0)
        (1.0, 2.0, 10.0)
    """
    return max(1.0, math.sqrt(check.positive(signal=signal)) / 10)
