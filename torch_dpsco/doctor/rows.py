"""Rows of synthetic records, compared without forming those of Linear layers."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_dpsco.rows.base import Block
from torch_dpsco.rows.factored import FactoredBlock


class Rows:
    """Per-sample gradients of one parameter, (B, *shape), or (B, out) and (B, in) whose outer products they are.

    Args:
        left: the rows, or their left factors.
        right: their right factors.
    """

    def __init__(self, left: Tensor, right: Tensor | None = None) -> None:
        self.left = left
        self.right = right
        self.dtype = left.dtype

    @classmethod
    def of(cls, block: Block) -> Rows:
        """Returns the rows of the first parameter of a block."""
        if not isinstance(block, FactoredBlock):
            return cls(block.dense()[0].detach())
        # PRIVACY: copies: the next batch may be written over them
        # (test_records_that_meet_in_memory_that_is_used_again_are_found)
        left = block.backprops.detach() * block.scale
        return cls(left, block.acts.detach().to(left.dtype, copy=True) if block.weight else None)

    def __len__(self) -> int:
        return len(self.left)

    def at(self, place: int) -> Rows:
        """Returns one of them."""
        one = slice(place, place + 1)
        return Rows(self.left[one].clone(), None if self.right is None else self.right[one].clone())

    def formed(self) -> Tensor:
        """Returns the rows themselves."""
        return self.left if self.right is None else self.left[:, :, None] * self.right[:, None]

    def norms(self) -> Tensor:
        """Returns their lengths, (B,) float64."""
        return (
            _lengths(self.left)
            if self.right is None
            else _lengths(self.left) * _lengths(self.right)
        )

    def gaps(self, other: Rows) -> Tensor:
        """Returns how far others are from these, (B,) float64; inf or NaN where one is not finite."""
        if self.right is None or other.right is None:
            return _lengths(other.formed().double().sub_(self.formed()))
        # b a' - c d' = (b - c) a' + c (a - d)', whose square has no terms that cancel where the two are close
        b, a, c, d = (t.double() for t in (other.left, other.right, self.left, self.right))
        left = b - c
        right = a - d
        squares = (left.square().sum(1) * a.square().sum(1)).add_(
            c.square().sum(1) * right.square().sum(1)
        )
        return (
            squares.add_(2.0 * (left * c).sum(1) * (a * right).sum(1)).clamp_min_(0.0).sqrt_().cpu()
        )


def _lengths(rows: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(
        rows.double().reshape(len(rows), rows.shape[1:].numel()), dim=1
    )
    return lengths.cpu()
