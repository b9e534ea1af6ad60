"""Rows of the records in a block that was filled up to a public size, measured in their places."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_dpsco.rows.base import Block, Summation
from torch_dpsco.rows.factored import FactoredBlock, LinearBlock


class OccupiedBlock(Block):
    """Some rows of a block whose norms are computed with all of them, so that a norm never depends on how many count.

    The other rows are the filling: they are left out, not multiplied by 0, so that nothing in them reaches a sum.

    Args:
        block: all rows, those of the filling included.
        index: (k,) int64, which of them count.
    """

    def __init__(self, block: Block, index: Tensor) -> None:
        self._block, self._index = block, index
        self._dense: list[list[Tensor]] = []  # of all rows, once they were asked for; parts share it

    @property
    def shapes(self) -> list[torch.Size]:
        """Shapes of the parameters."""
        return self._block.shapes

    def __len__(self) -> int:
        return len(self._index)

    def norms(self) -> Tensor:
        """Returns the norms of the rows that count: (k,) float64."""
        # PRIVACY: of the whole block first (test_norms_do_not_depend_on_how_many_rows_count)
        return self._block.norms()[self._index]

    def weighted_sum(self, weights: Tensor, precision: Summation) -> list[Tensor]:
        """Returns the weighted sum of the rows that count."""
        return self._block.select(self._index).weighted_sum(weights, precision)

    def select(self, index: Tensor) -> OccupiedBlock:
        """Returns the block of some of the rows that count."""
        part = OccupiedBlock(self._block, self._index[index])
        part._dense = self._dense
        return part

    def dense(self) -> list[Tensor]:
        """Returns the rows that count per parameter."""
        if not self._dense:  # formed from factors with all of them, as norms are
            self._dense.append(self._block.dense())
        return [rows[self._index] for rows in self._dense[0]]

    def linear(self) -> LinearBlock | None:
        """Returns the rows that count as those of one output, see `FactoredBlock.linear`."""
        rows = self._block.linear() if isinstance(self._block, (FactoredBlock, LinearBlock)) else None
        return None if rows is None else rows.select(self._index)
