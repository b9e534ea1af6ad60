"""Records within the bounds that constants assume, and the loss whose gradient is the clipped one.

The convex loss whose gradient is the clipped gradient of a linear model: phi_c' = clip(phi', -+ C/||x||).

Clipping the gradient phi'(w.x) x of one record to norm C clips the slope phi', since ||x|| does not depend on w. A
monotone slope stays monotone, so that the clipped gradients are those of a convex loss: phi up to the corner where
|phi'| = C/||x||, and a straight line beyond it. For models that are not linear no such loss exists.

Differs from the paper in: it is not there. Source: docs/proofs/output.md#clipped-residuals
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, overload

import torch
from torch import Tensor

from torch_dpsco._doors import typed
from torch_dpsco._validate import positive
from torch_dpsco.errors import ConditionError
from torch_dpsco.losses.base import ScalarLoss, TableLoss, record_bounds
from torch_dpsco.losses.table import Logistic as Logistic  # of the example

_BLOCK_ROWS = 4096


@overload
def enforce_bounds(
    features: Tensor, targets: None = None, *, bound_x: float, bound_y: None = None
) -> Tensor: ...


@overload
def enforce_bounds(
    features: Tensor, targets: Tensor, *, bound_x: float, bound_y: float
) -> tuple[Tensor, Tensor]: ...


@typed
def enforce_bounds(
    features: Tensor,
    targets: Tensor | None = None,
    *,
    bound_x: float,
    bound_y: float | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Maps every record into the bounds: x <- x min(1, B/||x||) and y <- clip(y, -Y, Y).

    Rows within the bound come back bit for bit; longer rows are scaled to a norm just below B, so that rounding to
    the dtype of `features` cannot lift them above it. A row with a non-finite feature becomes 0, a NaN target 0.
    Norms are evaluated in float64, with an error of (d + 3) 2^-53, relative.

    Args:
        features: shape (n, ...), floating point; a record is a row, flattened. Append the bias column before.
        targets: real targets, any shape, floating point, or None. Class numbers need no bound: do not pass them.
        bound_x: B > 0, finite.
        bound_y: Y > 0, finite; given if and only if `targets` are.

    Returns:
        New features, of the same shape and dtype; with targets, the pair (features, targets).

    Raises:
        ValueError: if a bound is not finite and positive, the features are not a floating point batch, or targets and
            bound_y do not come together. Never because of the value of a record.

    Guarantee:
        A map of each record by itself: it sends adjacent data sets to adjacent data sets (any adjacency, example or
        user), so that a mechanism private after it is private before it. Needs B and Y that are public.

    Source:
        docs/proofs/holder.md#promises.

    Example:
        >>> enforce_bounds(torch.tensor([[3.0, 4.0], [0.5, 0.0]]), bound_x=10.0).tolist()
        [[3.0, 4.0], [0.5, 0.0]]
    """
    limit_x, limit_y = record_bounds(bound_x, 1.0 if bound_y is None else bound_y)
    if features.dim() < 2 or not features.is_floating_point():
        raise ValueError(
            f"features must be floating point of shape (n, ...) (got {features.dtype},"
            f" {tuple(features.shape)})"
        )
    if (targets is None) != (bound_y is None):
        raise ValueError(f"targets and bound_y must be given together (got bound_y={bound_y})")
    # In blocks, so that the float64 copy stays small.
    bounded = torch.cat(
        [_into_ball(block, limit_x) for block in torch.split(features, _BLOCK_ROWS)]
    )
    return bounded if targets is None else (bounded, _into_interval(targets, limit_y))


def _into_ball(block: Tensor, bound: float) -> Tensor:
    if not block.numel():
        return block
    rows = block.flatten(1).double()
    guard = torch.finfo(block.dtype).eps + (rows.shape[1] + 4) * torch.finfo(torch.float64).eps
    # Nothing to do where all norms are plainly within the bound; a NaN fails the comparison. Norms whose squares
    # underflow are too small, by less than sqrt(d) 2^-510.
    if bound > 2.0**-400 and bool(
        (torch.linalg.vector_norm(rows, dim=1) <= bound * (1 - guard)).all()
    ):
        return block.clone()
    # PRIVACY: masked, since 0 * inf is NaN (test_a_row_with_a_non_finite_feature_becomes_zero)
    rows = torch.where(rows.isfinite().all(1, keepdim=True), rows, 0)
    # Dividing by a power of two is exact, and keeps the squares of huge and tiny rows inside the range of float64.
    exponent = torch.frexp(rows.abs().amax(1, keepdim=True)).exponent.clamp(-1000, 1000)
    scale = torch.exp2(exponent.double())
    unit = rows / scale
    length = torch.linalg.vector_norm(unit, dim=1, keepdim=True)
    # PRIVACY: the guard covers the norm and the final cast (test_enforced_norms_never_exceed_the_bound)
    clipped = unit * (bound / length * (1 - guard))
    return torch.where(length * scale > bound, clipped, rows).to(block.dtype).reshape(block.shape)


def _into_interval(targets: Tensor, bound: float) -> Tensor:
    if not targets.is_floating_point():
        raise ValueError(
            f"targets must be floating point (got {targets.dtype}); class numbers need no bound"
        )
    info = torch.finfo(targets.dtype)
    limit = float(torch.tensor(bound, dtype=torch.float64).to(targets.dtype))
    if limit > bound:  # the nearest number of the dtype lies outside the interval
        limit = float(torch.tensor(bound * (1 - info.eps), dtype=torch.float64).to(targets.dtype))
    limit = min(limit, info.max)
    return torch.where(targets.isnan(), 0, targets).clamp(-limit, limit)


_GUARD = 1e-9  # relative; more than the rounding of a norm of up to 10^6 coordinates, of C/||x|| and of the product


@dataclass(frozen=True)
class ClippedRows:
    """The clipped loss of a block of records, one limit on |phi'| each.

    Attributes:
        loss: phi.
        limits: (B,) largest |phi'|, > 0, possibly inf.
    """

    loss: ScalarLoss
    limits: Tensor

    @cached_property
    def corners(self) -> Tensor:
        """(B,) margins or residuals at which the slope reaches the limit."""
        return self.loss.corner(self.limits)

    def part(self, rows: slice) -> ClippedRows:
        """Returns the loss of some of the records."""
        part = ClippedRows(self.loss, self.limits[rows])
        part.__dict__["corners"] = self.corners[rows]
        return part

    def value(self, score: Tensor, target: Tensor) -> Tensor:
        """Loss phi before the corner, its tangent beyond; shapes (B,)."""
        place = self.loss.place(score, target)
        kept = self.loss.up_to(place, self.corners)
        # 0 where nothing is clipped: inf * 0 would be NaN
        beyond = torch.where(kept == place, 0.0, self.limits * (kept - place).abs())
        return self.loss.curve(kept) + beyond

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

    loss: ScalarLoss
    clip: float

    num_scores: ClassVar[int] = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "clip", positive(clip=self.clip))
        if not isinstance(self.loss, ScalarLoss):
            raise ConditionError(f"loss must have one score (got {self.loss!r})")
        self.loss.corner(torch.ones(1))  # refuses losses without a corner

    @property
    def target_kind(self) -> str:
        """As of the loss: "sign" or "real"."""
        return self.loss.target_kind

    @property
    def unclipped(self) -> ScalarLoss:
        """The loss whose gradients are clipped."""
        return self.loss

    def limits(self, norms: Tensor) -> Tensor:
        """The largest |phi'| of records with these feature norms, shape (B,); inf at norm 0, which is not clipped."""
        # PRIVACY: rounded down, so that limit * ||x|| never exceeds C (test_clipped_gradients_never_exceed_the_clip)
        return self.clip * (1 - _GUARD) / norms

    def of_norms(self, norms: Tensor) -> ClippedRows:
        """The loss of records with these feature norms, shape (B,)."""
        return ClippedRows(self.loss, self.limits(norms))

    def lipschitz(self) -> float:
        """C."""
        return self.clip

    def smoothness(self, bound_x: float) -> float:
        """Bound on phi_c'' ||x||^2 for ||x|| <= bound_x: C(B - C) of a clipped logistic, else that of phi.

        C(B - C) grows with B up to C < B/2, and sigma(1 - sigma) B^2 <= B^2/4 always.
        """
        bound_x = positive(bound_x=bound_x)
        if self.clip < bound_x / 2:
            clipped = self.loss.clipped_bend(self.clip, bound_x)
            if clipped is not None:
                return clipped
        smoothness = self.loss.problem(bound_x=bound_x).smoothness
        assert smoothness is not None  # losses with a corner are C^1
        return smoothness


def scalar_loss(loss: object) -> TableLoss | ResidualClipped:
    """The loss itself; raises ConditionError unless it is one of a single score."""
    if isinstance(loss, (TableLoss, ResidualClipped)) and loss.num_scores == 1:
        return loss
    raise ConditionError(
        f"loss must be one of torch_dpsco.losses of a single score (got {loss!r})"
    )
