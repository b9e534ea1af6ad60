"""Newton and L-BFGS, with the step-size rule that they share.

One iterate of a descent method, and the step-size rule that Newton and L-BFGS share.

Near the minimum differences of values drown in rounding while gradients do not: a step is accepted on the value within
a slack of 1e-13 |F|, or on a smaller gradient norm.

Damped Newton: d up to some thousands, with few passes over the data.

Differs from textbook Newton in: a factor of the Hessian is kept while it still shrinks the gradient threefold per step,
since a Hessian costs d gradients. Undamped Newton diverges on residual-clipped losses.

Limited-memory BFGS: many coordinates, gradients only.

Differs from torch.optim.LBFGS in: the line search of `descent`, which does not stall where differences of values drown
in rounding, and no stopping rule besides the certificate.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_dpsco.linear.objectives.base import Objective

_SLACK = 1e-13
_SLOPE = 1e-4
_HALVINGS = 40


@dataclass(frozen=True)
class Iterate:
    """A point with its value, gradient and gradient norm."""

    point: Tensor
    value: float
    gradient: Tensor
    size: float

    @classmethod
    def at(cls, objective: Objective, point: Tensor) -> Iterate:
        """Evaluates the objective at a point."""
        value, gradient = objective.value_and_gradient(point)
        return cls(point, value, gradient, float(torch.linalg.vector_norm(gradient)))

    def finite(self) -> bool:
        """Whether value and gradient are."""
        return math.isfinite(self.value) and math.isfinite(self.size)


def certified(objective: Objective, iterate: Iterate, distance: float) -> bool:
    """Whether C1 will hold at the iterate, with a margin for the rounding of the certificate itself."""
    error = objective.gradient_error(iterate.point)
    return (iterate.size * (1 + 1e-9) + error) * (1 + 1e-9) <= objective.strong_convexity * distance


def backtrack(objective: Objective, start: Iterate, direction: Tensor) -> Iterate | None:
    """The first of the steps 1, 1/2, 1/4, ... that makes progress; None if none does."""
    slope, step = float(start.gradient @ direction), 1.0
    if not slope < 0:
        return None
    for _ in range(_HALVINGS):
        trial = Iterate.at(objective, start.point + step * direction)
        lower = trial.value <= start.value + _SLOPE * step * slope + _SLACK * abs(start.value)
        flatter = trial.size <= (1 - 0.1 * step) * start.size
        near = abs(trial.value - start.value) <= 1e3 * _SLACK * abs(start.value)
        if trial.finite() and (lower or (flatter and near)):
            return trial
        step /= 2
    return None


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
        >>> from torch_dpsco.linear.objectives import LinearObjective
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
        >>> from torch_dpsco.linear.objectives import LinearObjective
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
