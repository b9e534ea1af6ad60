"""The convex loss whose gradient is the clipped gradient of a linear model: phi_c' = clip(phi', -+ C/||x||).

Clipping the gradient phi'(w.x) x of one record to norm C clips the slope phi', since ||x|| does not depend on w. A
monotone slope stays monotone, so that the clipped gradients are those of a convex loss: phi up to the corner where
|phi'| = C/||x||, and a straight line beyond it. For models that are not linear no such loss exists.

Differs from the paper in: it is not there. Source: docs/proofs/output.md#clipped-residuals
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torch_dpsco._validate import positive
from torch_dpsco.errors import ConditionError
from torch_dpsco.losses.base import TableLoss
from torch_dpsco.losses.margin import Logistic, MarginLoss
from torch_dpsco.losses.residual import ResidualLoss

_GUARD = 1e-9  # relative; more than the rounding of a norm of up to 10^6 coordinates, of C/||x|| and of the product


@dataclass(frozen=True)
class ClippedRows:
    """The clipped loss of a block of records, one limit on |phi'| each.

    Attributes:
        loss: phi.
        limits: (B,) largest |phi'|, > 0, possibly inf.
    """

    loss: MarginLoss | ResidualLoss
    limits: Tensor

    def value(self, score: Tensor, target: Tensor) -> Tensor:
        """Loss phi before the corner, its tangent beyond; shapes (B,)."""
        corner = self.loss._corner(self.limits)
        if isinstance(self.loss, MarginLoss):
            margin = target * score
            kept = torch.maximum(margin, corner)
        else:
            margin = target - score
            kept = torch.clamp(margin, -corner, corner)
        # 0 where nothing is clipped: inf * 0 would be NaN
        beyond = torch.where(kept == margin, 0.0, self.limits * (kept - margin).abs())
        return self.loss._curve(kept) + beyond

    def derivative(self, score: Tensor, target: Tensor) -> Tensor:
        """Slope phi' clipped, shape (B,); at most the limit for targets |y| <= 1 of a margin loss."""
        return torch.clamp(self.loss.derivative(score, target), -self.limits, self.limits)

    def second_derivative(self, score: Tensor, target: Tensor) -> Tensor:
        """Curvature phi'' before the corner, 0 beyond; shape (B,)."""
        inside = self.loss.derivative(score, target).abs() < self.limits
        return torch.where(inside, self.loss.second_derivative(score, target), 0.0)


@dataclass(frozen=True)
class ResidualClipped:
    """A loss of one score with the gradients of its records clipped to norm C: still convex, and C-Lipschitz.

    For the logistic loss phi_c'(m) = max(-sigmoid(-m), -C/||x||): the pull of badly misclassified records is capped.

    Args:
        loss: Logistic, SmoothedHinge, Hinge(power=2), Squared or Huber.
        clip: C > 0, bound on the gradient norm of a record; public.

    Raises:
        ConditionError: if the slope of the loss cannot be clipped to a C^1 loss (it has jumps, or K scores).

    Source:
        docs/proofs/output.md#clipped-residuals

    Example:
        >>> loss = ResidualClipped(Logistic(), clip=0.25)
        >>> loss.smoothness(bound_x=1.0), Logistic().problem(bound_x=1.0).smoothness
        (0.1875, 0.25)
        >>> loss.of_norms(torch.ones(1)).derivative(torch.tensor([-9.0]), torch.ones(1)).tolist()
        [-0.25]
    """

    loss: MarginLoss | ResidualLoss
    clip: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "clip", positive(clip=self.clip))
        if not isinstance(self.loss, (MarginLoss, ResidualLoss)):
            raise ConditionError(f"loss must have one score (got {self.loss!r})")
        self.loss._corner(torch.ones(1))  # refuses losses without a corner

    @property
    def target_kind(self) -> str:
        """As of the loss: "sign" or "real"."""
        return self.loss.target_kind

    def of_norms(self, norms: Tensor) -> ClippedRows:
        """The loss of records with these feature norms, shape (B,); a record of norm 0 is not clipped."""
        # PRIVACY: rounded down, so that limit * ||x|| never exceeds C (test_clipped_gradients_never_exceed_the_clip)
        return ClippedRows(self.loss, self.clip * (1 - _GUARD) / norms)

    def lipschitz(self) -> float:
        """C."""
        return self.clip

    def smoothness(self, bound_x: float) -> float:
        """Bound on phi_c'' ||x||^2 for ||x|| <= bound_x: C(B - C) of a clipped logistic, else that of phi.

        C(B - C) grows with B up to C < B/2, and sigma(1 - sigma) B^2 <= B^2/4 always.
        """
        bound_x = positive(bound_x=bound_x)
        if isinstance(self.loss, Logistic) and self.clip < bound_x / 2:
            return self.clip * (bound_x - self.clip)
        smoothness = self.loss.problem(bound_x=bound_x).smoothness
        assert smoothness is not None  # losses with a corner are C^1
        return smoothness


def scalar_loss(loss: object) -> TableLoss | ResidualClipped:
    """The loss itself; raises ConditionError unless it is one of a single score."""
    if isinstance(loss, (MarginLoss, ResidualLoss, ResidualClipped)):
        return loss
    raise ConditionError(f"loss must be one of torch_dpsco.losses of a single score (got {loss!r})")
