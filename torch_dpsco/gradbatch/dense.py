"""Dense rows: one tensor of per-sample gradients per parameter, as Opacus' grad samplers make them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_dpsco.gradbatch.base import (
    NORM_ERROR,
    PIECE,
    UNDERFLOW,
    Block,
    Summation,
    row_norms,
    weighted_rows,
    work_dtype,
)

__all__ = ["DenseBlock", "DenseBlocks", "joined"]


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

    def flat(self) -> Tensor:
        """Returns the rows as vectors: (B, k)."""
        return self.rows.reshape(len(self), self.shapes[0].numel())

    def norms(self) -> Tensor:
        """Returns certified upper bounds of the rows' norms: (B,) float64."""
        return row_norms(self.flat())

    def weighted_sum(self, weights: Tensor, precision: Summation) -> list[Tensor]:
        """Returns [sum_i weights[i] * rows[i]]."""
        return [weighted_rows(self.flat(), weights, precision).view(self.shapes[0])]

    def select(self, index: Tensor) -> DenseBlock:
        """Returns the block of some rows."""
        return DenseBlock(self.rows[index])

    def dense(self) -> list[Tensor]:
        """Returns [rows]."""
        return [self.rows]


class DenseBlocks(Block):
    """Rows of several parameters, with as few passes over memory, and calls, as one long row would take.

    Args:
        blocks: at least one, of the same rows.
    """

    def __init__(self, blocks: Sequence[DenseBlock]) -> None:
        self.blocks = list(blocks)

    @property
    def shapes(self) -> list[torch.Size]:
        """Shapes of the parameters."""
        return [shape for block in self.blocks for shape in block.shapes]

    def __len__(self) -> int:
        return len(self.blocks[0])

    def norms(self) -> Tensor:
        """Returns certified upper bounds of the joint norms of the rows: (B,) float64."""
        # pieces of at most PIECE coordinates, joined in float64: the bound of `row_norms`
        flat = [block.flat() for block in self.blocks]
        flat = [rows.to(work_dtype(rows.dtype)) for rows in flat]
        pieces = torch.cat([piece for rows in flat for piece in _piece_norms(rows)], dim=1)
        norms: Tensor = torch.linalg.vector_norm(pieces.double(), dim=1)
        error = max(NORM_ERROR[rows.dtype] for rows in flat)
        hidden = max(UNDERFLOW[rows.dtype] for rows in flat) * sum(rows.shape[1] for rows in flat) ** 0.5
        # PRIVACY: (test_joined_norms_are_never_below_the_exact_norm)
        return norms.mul_(1.0 + error).add_(hidden)

    def weighted_sum(self, weights: Tensor, precision: Summation) -> list[Tensor]:
        """Returns [sum_i weights[i] * rows[i]], a tensor per parameter."""
        tile = precision.vector_tile
        flat = [block.flat() for block in self.blocks]
        if not 0 < len(self) <= tile or any(rows.dtype == torch.float64 for rows in flat):
            return [total for block in self.blocks for total in block.weighted_sum(weights, precision)]
        small = weights.float()[None]  # one tile, which the bound of `plan_summation` covers
        return [(small @ rows.float()).view(shape) for rows, shape in zip(flat, self.shapes, strict=True)]

    def select(self, index: Tensor) -> DenseBlocks:
        """Returns the block of some rows."""
        return DenseBlocks([block.select(index) for block in self.blocks])

    def dense(self) -> list[Tensor]:
        """Returns the rows per parameter."""
        return [rows for block in self.blocks for rows in block.dense()]


def _piece_norms(rows: Tensor) -> list[Tensor]:
    """Returns norms of consecutive pieces of rows: (B, n) each."""
    width = rows.shape[1]
    whole = width - width % PIECE
    if not whole:
        return [torch.linalg.vector_norm(rows, dim=1, keepdim=True)]
    first = rows if whole == width else rows[:, :whole]
    pieces = [torch.linalg.vector_norm(first.reshape(len(rows), whole // PIECE, PIECE), dim=2)]
    return pieces if whole == width else [*pieces, torch.linalg.vector_norm(rows[:, whole:], dim=1, keepdim=True)]


def joined(blocks: list[Block]) -> list[Block]:
    """Returns blocks with the same rows, as one if all are dense."""
    dense = [block for block in blocks if isinstance(block, DenseBlock)]
    return [DenseBlocks(dense)] if len(dense) == len(blocks) > 1 else blocks
