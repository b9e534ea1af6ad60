"""Dense rows: one tensor of per-sample gradients per parameter, as Opacus' grad samplers make them."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_dpsco.gradbatch.base import Block, Summation, row_norms, weighted_rows

__all__ = ["DenseBlock"]


class DenseBlock(Block):
    """Rows of one parameter.

    Args:
        rows: (B, *shape) floating.
    """

    def __init__(self, rows: Tensor) -> None:
        if rows.dim() < 1 or not rows.is_floating_point():
            raise ValueError(f"rows must be a floating tensor of shape (B, *shape) (got {rows.dtype}, {rows.shape})")
        self.rows = rows

    @property
    def shapes(self) -> list[torch.Size]:
        """Shape of the parameter."""
        return [self.rows.shape[1:]]

    def __len__(self) -> int:
        return self.rows.shape[0]

    def _flat(self) -> Tensor:
        return self.rows.reshape(len(self), self.shapes[0].numel())

    def norms(self) -> Tensor:
        """Returns certified upper bounds of the rows' norms: (B,) float64."""
        return row_norms(self._flat())

    def weighted_sum(self, weights: Tensor, precision: Summation) -> list[Tensor]:
        """Returns [sum_i weights[i] * rows[i]]."""
        return [weighted_rows(self._flat(), weights, precision).view(self.shapes[0])]

    def select(self, index: Tensor) -> DenseBlock:
        """Returns the block of some rows."""
        return DenseBlock(self.rows[index])

    def dense(self) -> list[Tensor]:
        """Returns [rows]."""
        return [self.rows]
