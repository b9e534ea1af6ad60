"""Clipping of records to the bounds that the table of constants assumes."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from torch_dpsco._doors import typed
from torch_dpsco.losses.base import record_bounds

_BLOCK_ROWS = 4096


@overload
def enforce_bounds(features: Tensor, targets: None = None, *, bound_x: float, bound_y: None = None) -> Tensor: ...


@overload
def enforce_bounds(features: Tensor, targets: Tensor, *, bound_x: float, bound_y: float) -> tuple[Tensor, Tensor]: ...


@typed
def enforce_bounds(
    features: Tensor, targets: Tensor | None = None, *, bound_x: float, bound_y: float | None = None
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
            f"features must be floating point of shape (n, ...) (got {features.dtype}, {tuple(features.shape)})"
        )
    if (targets is None) != (bound_y is None):
        raise ValueError(f"targets and bound_y must be given together (got bound_y={bound_y})")
    # In blocks, so that the float64 copy stays small.
    bounded = torch.cat([_into_ball(block, limit_x) for block in torch.split(features, _BLOCK_ROWS)])
    return bounded if targets is None else (bounded, _into_interval(targets, limit_y))


def _into_ball(block: Tensor, bound: float) -> Tensor:
    if not block.numel():
        return block
    rows = block.flatten(1).double()
    guard = torch.finfo(block.dtype).eps + (rows.shape[1] + 4) * torch.finfo(torch.float64).eps
    # Nothing to do where all norms are plainly within the bound; a NaN fails the comparison. Norms whose squares
    # underflow are too small, by less than sqrt(d) 2^-510.
    if bound > 2.0**-400 and bool((torch.linalg.vector_norm(rows, dim=1) <= bound * (1 - guard)).all()):
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
        raise ValueError(f"targets must be floating point (got {targets.dtype}); class numbers need no bound")
    info = torch.finfo(targets.dtype)
    limit = float(torch.tensor(bound, dtype=torch.float64).to(targets.dtype))
    if limit > bound:  # the nearest number of the dtype lies outside the interval
        limit = float(torch.tensor(bound * (1 - info.eps), dtype=torch.float64).to(targets.dtype))
    limit = min(limit, info.max)
    return torch.where(targets.isnan(), 0, targets).clamp(-limit, limit)


@typed
def clip_rows(features: Tensor, bound_x: float) -> Tensor:
    """Maps the features of every record into the ball of radius bound_x: `enforce_bounds` without targets.

    Example:
        >>> clip_rows(torch.tensor([[3.0, 4.0]]), 1.0).norm() <= 1
        tensor(True)
    """
    return enforce_bounds(features, bound_x=bound_x)
