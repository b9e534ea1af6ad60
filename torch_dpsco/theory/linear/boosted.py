"""Least squares by rounds on clipped residuals, with one noisy X'X: its level, its noise, its clip.

Rows with |x| <= B, weights c in [0, 1] and gradients clipped at C give X'X once, and T sums of clipped gradients one
after the other. A record moves X'X by at most B^2 in the Frobenius norm (sqrt(2) B^2 if it is replaced) and each sum by
C (2 C). The levels mu = moved / std of the T + 1 releases add in squares.

Differs from the paper in: see `linear.boosted`. Source: docs/proofs/boosting.md; Tang et al. 2023, Improved
differentially private regression via gradient boosting.
"""

from __future__ import annotations

import math

from torch_dpsco import _validate as check
from torch_dpsco.theory.clipping import sensitivity_factor
from torch_dpsco.theory.rounding import scaled_up

_MATRIX = 0.2  # of mu^2, for X'X


def boosted_mu(
    std_gram: float,
    std_sum: float,
    rounds: int,
    *,
    bound_x: float,
    clip: float,
    adjacency: str = "add_remove",
    rounding: float = 0.0,
) -> float:
    """Returns mu of X'X and all sums together, rounded up.

    Args:
        std_gram: > 0, of the noise on the diagonal of X'X; off it, the std is 1/sqrt(2) of that.
        std_sum: > 0, of the noise on each coordinate of a sum.
        rounds: T >= 1.
        bound_x: B > 0.
        clip: C > 0.
        adjacency: "add_remove", "zero_out" or "replace_one".
        rounding: >= 0, how far rounding moves a computed sum on either side.

    Guarantee: mu-GDP of the T + 1 releases together, each sum at a point that was computed from those before.

    Source: docs/proofs/boosting.md#what-a-record-moves

    Example:
        >>> round(boosted_mu(10.0, 20.0, 4, bound_x=1.0, clip=1.0), 6)
        0.141421
    """
    sides = sensitivity_factor(adjacency)
    square = math.sqrt(sides) * check.positive(bound_x=bound_x) ** 2
    moved = sides * check.positive(clip=clip) + 2 * check.nonnegative(rounding=rounding)
    # PRIVACY: every sum is released (test_no_record_moves_the_rounds_by_more_than_the_level)
    steps = math.sqrt(check.positive_count(rounds=rounds)) * moved / check.positive(std_sum=std_sum)
    return scaled_up(math.hypot(square / check.positive(std_gram=std_gram), steps), 12)


def boosted_noise(
    mu: float, rounds: int, *, bound_x: float, clip: float, adjacency: str = "add_remove", rounding: float = 0.0
) -> tuple[float, float]:
    """Returns the stds of the noise on X'X and on each sum that use a level mu up: a fifth of mu^2 is for X'X.

    Arguments and source as for `boosted_mu`.

    Example:
        >>> noise = boosted_noise(0.2, 40, bound_x=1.0, clip=2.0)
        >>> 0.2 * (1 - 1e-12) < boosted_mu(*noise, 40, bound_x=1.0, clip=2.0) <= 0.2
        True
    """
    sides = sensitivity_factor(adjacency)
    gram = math.sqrt(sides) * check.positive(bound_x=bound_x) ** 2 / (check.positive(mu=mu) * math.sqrt(_MATRIX))
    moved = sides * check.positive(clip=clip) + 2 * check.nonnegative(rounding=rounding)
    steps = math.sqrt(check.positive_count(rounds=rounds)) * moved / (mu * math.sqrt(1.0 - _MATRIX))
    # PRIVACY: rounded up, so that the level comes out below mu (test_the_rounds_have_the_level_of_the_budget)
    return scaled_up(gram, 32), scaled_up(steps, 32)


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
