"""Limited-memory BFGS: many coordinates, gradients only.

Differs from torch.optim.LBFGS in: the line search of `descent`, which does not stall where differences of values drown
in rounding, and no stopping rule besides the certificate.
"""

from __future__ import annotations

from collections import deque

from torch import Tensor

from torch_dpsco.objectives.base import Objective
from torch_dpsco.solvers.descent import Iterate, backtrack, certified

_HISTORY = 20


def lbfgs(objective: Objective, start: Tensor, distance: float, steps: int = 2000) -> Tensor:
    """L-BFGS steps until C1 proves the distance, or no step helps even along the gradient.

    Args:
        objective: strong_convexity > 0; no Hessian needed.
        start: w_0, float64.
        distance: target of the certificate, > 0.
        steps: at most.

    Returns:
        The iterate of least gradient norm. It promises nothing: certify it.

    Source:
        Nocedal and Wright, Numerical Optimization, section 7.2.

    Example:
        >>> import torch
        >>> from torch_dpsco.losses import Logistic
        >>> from torch_dpsco.objectives import LinearObjective
        >>> F = LinearObjective(Logistic(), torch.eye(3), torch.ones(3), reg=0.1, normalizer=3)
        >>> point = lbfgs(F, torch.zeros(3, dtype=torch.float64), 1e-9)
        >>> bool(F.value_and_gradient(point)[1].norm() < 1e-10)
        True
    """
    iterate = best = Iterate.at(objective, start)
    pairs: deque[tuple[Tensor, Tensor]] = deque(maxlen=_HISTORY)
    for _ in range(steps):
        if not iterate.finite() or certified(objective, iterate, distance):
            break
        following = backtrack(objective, iterate, -_inverse_times(pairs, iterate, objective))
        if following is None:
            if not pairs:
                break
            pairs.clear()
            continue
        move, turn = following.point - iterate.point, following.gradient - iterate.gradient
        if float(move @ turn) > 1e-16 * float(move.norm() * turn.norm()):
            pairs.append((move, turn))
        iterate = following
        best = iterate if iterate.size < best.size else best
    return best.point


def _inverse_times(pairs: deque[tuple[Tensor, Tensor]], iterate: Iterate, objective: Objective) -> Tensor:
    """The two-loop product of the approximate inverse Hessian with the gradient."""
    vector, shares = iterate.gradient.clone(), []
    for move, turn in reversed(pairs):
        share = (move @ vector) / (move @ turn)
        vector -= share * turn
        shares.append(share)
    if pairs:
        move, turn = pairs[-1]
        vector *= (move @ turn) / (turn @ turn)
    else:
        vector /= objective.smoothness or max(iterate.size, 1.0)
    for (move, turn), share in zip(pairs, reversed(shares), strict=True):
        vector += (share - (turn @ vector) / (move @ turn)) * move
    return vector
