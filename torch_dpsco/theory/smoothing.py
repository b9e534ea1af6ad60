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

from torch_dpsco import _validate as check


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
