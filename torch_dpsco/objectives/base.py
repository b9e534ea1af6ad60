"""What a solver and a certificate need to know of a strongly convex function of one vector."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from torch_dpsco.errors import ConditionError


def require_double(point: Tensor, dim: int) -> None:
    """Raises ValueError unless the point is a float64 vector and autocast is off: rounding bounds need float64."""
    if point.dtype != torch.float64 or point.shape != (dim,):
        raise ValueError(f"the point must be float64 of shape ({dim},) (got {point.dtype}, {tuple(point.shape)})")
    if torch.is_autocast_enabled(point.device.type):
        raise ValueError("certificates must not run under autocast, which lowers the precision")


class Objective(ABC):
    """F(w) for w in R^dim, mu-strongly convex, evaluated in float64 with proved bounds on the rounding.

    Values, gradients and errors depend on private data: nothing of them may be shown.

    Attributes:
        dim: dimension of w.
        device: of w.
        strong_convexity: mu of the whole function, on all of R^dim; >= 0.
        smoothness: beta, the Lipschitz constant of the gradient on all of R^dim; None if it jumps. It may be read off
            the data (no promise is needed then), and is as private as they are.
    """

    dim: int
    device: torch.device
    strong_convexity: float
    smoothness: float | None

    @abstractmethod
    def value_and_gradient(self, point: Tensor) -> tuple[float, Tensor]:
        """F(w) and a subgradient, which is the gradient where there is one; w float64 of shape (dim,)."""

    @abstractmethod
    def gradient_error(self, point: Tensor) -> float:
        """Bound on the norm of the rounding error of the computed gradient at w; inf if the gradient jumps."""

    def value(self, point: Tensor) -> float:
        """F(w)."""
        return self.value_and_gradient(point)[0]

    def hessian(self, point: Tensor) -> Tensor:
        """Second derivative, shape (dim, dim), one-sided at kinks of the gradient.

        Raises:
            ConditionError: if there is none.
        """
        raise ConditionError(f"{type(self).__name__} has no Hessian")

    def least_subgradient(self, point: Tensor) -> Tensor:
        """The subgradient at w to certify with: that of least norm where it is known."""
        return self.value_and_gradient(point)[1]

    def smoothed(self, gap: float) -> tuple[Objective, float]:
        """A smooth objective with the same mu and a number v <= gap: max - min of the difference is at most v.

        The minimizers are then within sqrt(v/mu) of each other: add the two inequalities of strong convexity,
        mu ||w - w'||^2 <= F(w') - F(w) + G(w) - G(w').

        Raises:
            ConditionError: if the objective knows of none.
        """
        if self.smoothness is None or not math.isfinite(self.smoothness):
            raise ConditionError(f"{type(self).__name__} has no smooth neighbor")
        return self, 0.0
