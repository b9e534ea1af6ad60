"""Losses of one score as C reads them, and the sums of their gradients that are cut to a length."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_dpsco.estimators.records import Records, RowLosses
from torch_dpsco.losses.base import ScalarLoss, TableLoss
from torch_dpsco.losses.table import Logistic, ResidualClipped


def clipped_sum(loss: TableLoss, clip: float, point: Tensor, part: Records) -> tuple[Tensor]:
    """Returns the sum of gradients of a loss of one score, (d,), each cut to this length."""
    losses = row_losses(loss, part, clip)
    if losses is not None:
        return (part.scored(point, losses)[1],)
    limits = part.once(("limits", clip), lambda: clip / part.norms)

    def terms(scores: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        slopes = loss.derivative(scores, part.targets[rows])
        weights = part.weights[rows]
        return weights, weights * slopes.clamp(-limits[rows], limits[rows])

    return (part.fold(point, terms)[1],)


def row_losses(
    loss: TableLoss | ResidualClipped, part: Records, clip: float = math.inf
) -> RowLosses | None:
    """Returns the losses of records for C; None where it does not know them, or cannot read the records.

    Args:
        loss: of one score.
        part: records in memory.
        clip: largest length of a gradient.
    """
    table = loss.unclipped
    line = _line(table)
    if not part.in_c or (line is None and type(table) is not Logistic):
        return None

    def made() -> RowLosses:
        weights = part.weights
        limits = torch.minimum(loss.limits(part.norms), clip / part.norms)
        if isinstance(table, Logistic):
            corners = table.corner(limits)
            columns = [weights, part.targets, limits, corners, table.curve(corners)]
            return RowLosses(torch.stack(columns), "curved", 1.0)
        assert line is not None
        gain, low, high = line
        ones = torch.ones_like(weights)
        sign, zero = (
            (part.targets, ones) if table.target_kind == "sign" else (ones, part.targets)
        )
        limits = limits / sign.abs()
        columns = [weights, sign, zero, (-limits).clamp(min=low), limits.clamp(max=high)]
        return RowLosses(torch.stack(columns), "bent", gain)

    return part.once(("losses", loss, clip), made)


def _line(loss: TableLoss) -> tuple[float, float, float] | None:
    """Returns gain and bounds of a slope that is a line between two bounds, in score - y or in y score - 1."""
    own = (
        type(loss).__module__ == Logistic.__module__
    )  # a class that is derived may be another loss
    if not (own and isinstance(loss, ScalarLoss) and type(loss).slope is ScalarLoss.slope):
        return None
    low, high, width = loss.line
    if not width:
        return None
    if loss.zero:
        return 1.0 / width, float(low), float(high)
    return 1.0 / width, -float(high), -float(low)
