"""Damped Newton: d up to some thousands, with few passes over the data.

Differs from textbook Newton in: a factor of the Hessian is kept while it still shrinks the gradient threefold per step,
since a Hessian costs d gradients. Undamped Newton diverges on residual-clipped losses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_dpsco.objectives.base import Objective
from torch_dpsco.solvers.descent import Iterate, backtrack, certified

_KEEP = 0.3


def newton(objective: Objective, start: Tensor, distance: float, steps: int = 100) -> Tensor:
    """Newton steps with Armijo backtracking until C1 proves the distance, or no step helps.

    Args:
        objective: with a Hessian and strong_convexity > 0.
        start: w_0, float64.
        distance: target of the certificate, > 0.
        steps: at most.

    Returns:
        The iterate of least gradient norm. It promises nothing: certify it.

    Source:
        Boyd and Vandenberghe, Convex Optimization, section 9.5.

    Example:
        >>> from torch_dpsco.losses import Squared
        >>> from torch_dpsco.objectives import LinearObjective
        >>> F = LinearObjective(Squared(), torch.ones(1, 1), torch.ones(1), reg=1.0, normalizer=1)
        >>> round(newton(F, torch.zeros(1, dtype=torch.float64), 1e-9).item(), 9)
        0.5
    """
    iterate = best = Iterate.at(objective, start)
    factor: Tensor | None = None
    for _ in range(steps):
        if not iterate.finite() or certified(objective, iterate, distance):
            break
        fresh = factor is None
        if factor is None:
            factor, failed = torch.linalg.cholesky_ex(objective.hessian(iterate.point))
            if bool(failed):
                break
        direction = -torch.cholesky_solve(iterate.gradient.unsqueeze(1), factor).squeeze(1)
        following = backtrack(objective, iterate, direction)
        if following is None or (following.size >= best.size and following.value >= iterate.value):
            if fresh:
                break  # rounding allows no better
            factor = None
            continue
        if following.size > _KEEP * iterate.size:
            factor = None
        iterate = following
        best = iterate if iterate.size < best.size else best
    return best.point
