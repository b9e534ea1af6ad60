"""One iterate of a descent method, and the step-size rule that Newton and L-BFGS share.

Near the minimum differences of values drown in rounding while gradients do not: a step is accepted on the value within
a slack of 1e-13 |F|, or on a smaller gradient norm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_dpsco.objectives.base import Objective

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
