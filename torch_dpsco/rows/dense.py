"""Dense rows: one tensor of per-sample gradients per parameter."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from torch_dpsco import native
from torch_dpsco.rows.base import (
    NORM_ERROR,
    UNDERFLOW,
    Block,
    Summation,
    joint_norms,
    piece_norms,
    row_norms,
    weighted_rows,
    work_dtype,
)


class DenseBlock(Block):
    """Rows of one parameter.

    Args:
        rows: (B, *shape) floating.
        pieces: `piece_norms` of the rows, where they are known.
    """

    def __init__(self, rows: Tensor, pieces: Tensor | None = None) -> None:
        if rows.dim() < 1 or not rows.is_floating_point():
            raise ValueError(
                f"rows must be a floating tensor of shape (B, *shape) (got {rows.dtype},"
                f" {rows.shape})"
            )
        self.rows = rows
        self.pieces = pieces
        self.shapes = [rows.shape[1:]]

    def __len__(self) -> int:
        return self.rows.shape[0]

    def _order(self) -> list[int]:
        """Returns the dimensions of a row as they are in memory, outermost first."""
        strides = self.rows.stride()
        return sorted(range(1, self.rows.dim()), key=lambda dim: -strides[dim])

    def flat(self) -> Tensor:
        """Returns the rows as vectors, (B, k), with the coordinates in the order of memory, so that none are copied."""
        rows = self.rows if self.rows.is_contiguous() else self.rows.permute(0, *self._order())
        return rows.reshape(len(self), self.rows.shape[1:].numel())

    def shaped(self, vector: Tensor) -> Tensor:
        """Returns a vector whose coordinates are in the order of `flat` in the shape of the parameter."""
        shape = self.rows.shape[1:]
        if self.rows.is_contiguous():
            return vector.view(shape)
        order = self._order()
        places = [order.index(dim) for dim in range(1, self.rows.dim())]
        return vector.view([shape[dim - 1] for dim in order]).permute(places).contiguous()

    def norms(self) -> Tensor:
        """Returns certified upper bounds of the rows' norms: (B,) float64."""
        return row_norms(self.flat()) if self.pieces is None else DenseBlocks([self]).norms()

    def weighted_sum(self, weights: Tensor, precision: Summation) -> list[Tensor]:
        """Returns [sum_i weights[i] * rows[i]]."""
        return [self.shaped(weighted_rows(self.flat(), weights, precision))]

    def select(self, index: Tensor) -> DenseBlock:
        """Returns the block of some rows."""
        return DenseBlock(self.rows[index], None if self.pieces is None else self.pieces[index])

    def dense(self) -> list[Tensor]:
        """Returns [rows]."""
        return [self.rows]


class DenseBlocks(Block):
    """Rows of several parameters, with as few calls and passes over memory as one long row would take.

    Args:
        blocks: at least one, of the same rows.
    """

    def __init__(self, blocks: Sequence[DenseBlock]) -> None:
        self.blocks = list(blocks)
        self.shapes = [shape for block in blocks for shape in block.shapes]

    def __len__(self) -> int:
        return len(self.blocks[0])

    def norms(self) -> Tensor:
        """Returns certified upper bounds of the joint norms of the rows: (B,) float64."""
        flat = [block.flat() for block in self.blocks]
        if all(block.pieces is None for block in self.blocks) and all(map(native.suits, flat)):
            return joint_norms([row_norms(rows) for rows in flat])
        # pieces of at most PIECE coordinates, joined in float64: the bound of `row_norms`
        known = [block.pieces for block in self.blocks]
        parts = [
            piece_norms(rows) if own is None else own for rows, own in zip(flat, known, strict=True)
        ]
        norms: Tensor = torch.linalg.vector_norm(torch.cat(parts, dim=1).double(), dim=1)
        dtypes = [work_dtype(block.rows.dtype) for block in self.blocks]
        error = max(NORM_ERROR[dtype] for dtype in dtypes)
        hidden = (
            max(UNDERFLOW[dtype] for dtype in dtypes)
            * sum(shape.numel() for shape in self.shapes) ** 0.5
        )
        # PRIVACY: (test_joined_norms_are_never_below_the_exact_norm)
        return norms.mul_(1.0 + error).add_(hidden)

    def weighted_sum(self, weights: Tensor, precision: Summation) -> list[Tensor]:
        """Returns [sum_i weights[i] * rows[i]], a tensor per parameter."""
        tile = precision.vector_tile
        if not 0 < len(self) <= tile or any(
            block.rows.dtype == torch.float64 for block in self.blocks
        ):
            return [
                total for block in self.blocks for total in block.weighted_sum(weights, precision)
            ]
        small = weights.float()[None]  # one tile, which the bound of `plan_summation` covers
        return [block.shaped(torch.mm(small, block.flat().float())[0]) for block in self.blocks]

    def select(self, index: Tensor) -> DenseBlocks:
        """Returns the block of some rows."""
        return DenseBlocks([block.select(index) for block in self.blocks])

    def dense(self) -> list[Tensor]:
        """Returns the rows per parameter."""
        return [rows for block in self.blocks for rows in block.dense()]


def joined(blocks: list[Block]) -> list[Block]:
    """Returns blocks with the same rows, in their order, those dense ones as one that follow each other."""
    found: list[Block] = []
    for _, run in groupby(blocks, key=lambda block: isinstance(block, DenseBlock)):
        others = list(run)
        dense = [block for block in others if isinstance(block, DenseBlock)]
        found += [DenseBlocks(dense)] if len(dense) > 1 else others
    return found
