"""Randomized smoothing: the uniform law on a ball, and what the shift costs.

y is uniform in the ball of radius r of R^d; the smoothed loss is E l(theta + y). For a convex, G-Lipschitz loss

    l <= smoothed l <= l + G E|y|,   E|y| = r d/(d+1),

and its gradient is G sqrt(d)/r-Lipschitz. y is independent of the data, so that the gradient at theta + y is another
query: privacy does not change, and one y for all users and items (per step) is the default.

Differs from the paper in: its Lemma 2.5 prints l >= smoothed l (docs/errata.md, paper 3, E6); r = 0 by default, since
smoothing does not improve the rate (E10 there).

Source: docs/proofs/holder.md#randomized-smoothing.
"""

from __future__ import annotations

import math

from scipy.special import betainc

from torch_dpsco import _validate as check

__all__ = ["ball_marginal_cdf", "ball_marginal_variance", "ball_mean_norm", "smoothing_bias", "smoothing_smoothness"]


def ball_marginal_cdf(dim: int, radius: float, value: float) -> float:
    """Returns P[y_1 <= value] = 1/2 + sign(t) I_{(t/r)^2}(1/2, (d+1)/2)/2 for y uniform in the ball.

    Args:
        dim: d >= 1.
        radius: r > 0.
        value: t, any finite number.

    Source: docs/proofs/holder.md#randomized-smoothing.

    Example:
        >>> ball_marginal_cdf(1, 2.0, 1.0)
        0.75
    """
    d, r, t = check.positive_count(dim=dim), check.positive(radius=radius), check.finite(value=value)
    share = min(1.0, abs(t) / r)
    middle = float(betainc(0.5, (d + 1) / 2, share * share)) / 2
    if middle < 0.25:  # (1 - share)(1 + share) would round a small share away
        return 0.5 + math.copysign(middle, t)
    tail = float(betainc((d + 1) / 2, 0.5, (1 - share) * (1 + share))) / 2  # keeps its digits where it is tiny
    return tail if t < 0 else 1 - tail


def ball_marginal_variance(dim: int, radius: float) -> float:
    """Returns r^2/(d + 2), the variance of a coordinate.

    Example:
        >>> ball_marginal_variance(2, 2.0)
        1.0
    """
    return check.positive(radius=radius) ** 2 / (check.positive_count(dim=dim) + 2)


def ball_mean_norm(dim: int, radius: float) -> float:
    """Returns E|y| = r d/(d + 1).

    Example:
        >>> ball_mean_norm(3, 2.0)
        1.5
    """
    d = check.positive_count(dim=dim)
    return check.positive(radius=radius) * d / (d + 1)


def smoothing_bias(lipschitz: float, dim: int, radius: float) -> float:
    """Returns G E|y|, by which the smoothed loss may exceed the loss; r = 0 stands for no smoothing.

    Example:
        >>> smoothing_bias(2.0, 3, 2.0), smoothing_bias(2.0, 3, 0.0)
        (3.0, 0.0)
    """
    G, r = check.positive(lipschitz=lipschitz), check.nonnegative(radius=radius)
    return G * ball_mean_norm(dim, r) if r > 0 else 0.0


def smoothing_smoothness(lipschitz: float, dim: int, radius: float) -> float:
    """Returns G sqrt(d)/r, a Lipschitz constant of the gradient of the smoothed loss.

    Example:
        >>> smoothing_smoothness(1.0, 4, 0.5)
        4.0
    """
    return (
        check.positive(lipschitz=lipschitz) * math.sqrt(check.positive_count(dim=dim)) / check.positive(radius=radius)
    )
