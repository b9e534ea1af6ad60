"""Embeddings, recorded: rows by record and item, without a tensor of batch times items.

Rows of an Embedding: a record moves the vectors of its own items only, so rows are kept per (record, item).

A row of the weight (V, D) is zero but for the items that the record holds; what is kept is U <= B T vectors, each with
its record and its item, sorted by both, and never a tensor of B V D numbers. Norms: of vectors, squared and added by
record. Weighted sums: vectors added by item.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_dpsco.rows.blocks import NORM_ERROR, Block, Summation, row_norms, work_dtype
from torch_dpsco.rows.layers.recorded import Formed, Kept, Kind, Use, require_dims

_TILE_ELEMENTS = 2**17  # numbers in a float64 tile


class ItemBlock(Block):
    """Rows of one weight (V, D), by record and item.

    Args:
        records: (U,) int64 in [0, n_records), sorted.
        items: (U,) int64 in [0, n_items), no pair (record, item) twice.
        vectors: (U, D) floating, the part of the record's row that belongs to the item.
        n_records: B.
        n_items: V.
    """

    def __init__(
        self, records: Tensor, items: Tensor, vectors: Tensor, n_records: int, n_items: int
    ) -> None:
        self.records = records
        self.items = items
        self.vectors = vectors
        self.n_records = n_records
        self.n_items = n_items
        self.shapes = [torch.Size([n_items, vectors.shape[1]])]

    def __len__(self) -> int:
        return self.n_records

    def norms(self) -> Tensor:
        """Returns certified upper bounds of the rows' norms: (B,) float64."""
        norms = row_norms(self.vectors)
        squares = norms.new_zeros(self.n_records).index_add_(0, self.records, norms.square_())
        # PRIVACY: at most V squares of certified norms, each addition rounded; what underflows is less than the number
        # added (test_norms_of_items_are_never_below_the_exact_norm, test_many_small_items_beside_a_large_one_count)
        error = NORM_ERROR[torch.float64] + self.n_items * 2.0**-53
        return squares.sqrt_().mul_(1.0 + error).add_(2.0**-500)

    def weighted_sum(self, weights: Tensor, precision: Summation) -> list[Tensor]:
        """Returns [sum_i weights[i] * row_i]: added in float64, and kept in float32 where the precision allows it."""
        items, place = torch.unique(self.items, return_inverse=True)
        width = self.vectors.shape[1]
        sums = self.vectors.new_zeros(len(items), width, dtype=torch.float64)
        step = max(1, _TILE_ELEMENTS // max(width, 1))
        for start in range(0, len(place), step):
            part = slice(start, start + step)
            scaled = self.vectors[part].double() * weights[self.records[part], None]
            sums.index_add_(0, place[part], scaled)
        small = bool(precision.matrix_tile) and self.vectors.dtype != torch.float64
        total = sums.new_zeros(
            self.n_items, width, dtype=torch.float32 if small else torch.float64
        )
        total[items] = sums.to(total.dtype)  # one rounding of a float32 sum, which has more
        return [total]

    def select(self, index: Tensor) -> ItemBlock:
        """Returns the block of some rows."""
        counts = torch.bincount(self.records, minlength=self.n_records)
        starts = counts.cumsum(0) - counts
        chosen = counts[index]
        records = torch.arange(len(index), device=index.device).repeat_interleave(chosen)
        within = (
            torch.arange(len(records), device=index.device) - (chosen.cumsum(0) - chosen)[records]
        )
        place = starts[index][records] + within
        return ItemBlock(
            records, self.items[place], self.vectors[place], len(index), self.n_items
        )

    def dense(self) -> list[Tensor]:
        """Returns [rows]: (B, V, D)."""
        rows = self.vectors.new_zeros(self.n_records, *self.shapes[0])
        return [rows.index_put_((self.records, self.items), self.vectors)]


def coalesced(
    records: Tensor, items: Tensor, uses: Tensor, n_records: int, n_items: int
) -> ItemBlock:
    """Returns the rows of uses of items: those of an item in a record are added.

    Args:
        records: (N,) int64 in [0, n_records).
        items: (N,) int64 in [0, n_items).
        uses: (N, D) gradients in the outputs.
        n_records: B.
        n_items: V.
    """
    keys, place = torch.unique(records * n_items + items, return_inverse=True)
    uses = uses.to(work_dtype(uses.dtype))
    # PRIVACY: each sum is of one record, so that NaN stays in its row (test_a_record_that_is_not_finite_moves_no_other)
    vectors = uses.new_zeros(len(keys), uses.shape[1]).index_add_(0, place, uses)
    return ItemBlock(keys // n_items, keys % n_items, vectors, n_records, n_items)


class Items(Kept):
    """Rows of an Embedding, by record and item."""

    def __init__(self, rows: ItemBlock) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def plus(self, others: Sequence[Kept]) -> Kept:
        """Returns the sums by record and item."""
        records, items, vectors = self._joined(others, offsets=False)
        return Items(coalesced(records, items, vectors, len(self), self._rows.n_items))

    def then(self, others: Sequence[Kept]) -> Kept:
        """Returns the rows one after another."""
        records, items, vectors = self._joined(others, offsets=True)
        n_records = len(self) + sum(len(other) for other in others)
        return Items(ItemBlock(records, items, vectors, n_records, self._rows.n_items))

    def _joined(self, others: Sequence[Kept], *, offsets: bool) -> tuple[Tensor, Tensor, Tensor]:
        parts = [self._rows, *(other._rows for other in others if isinstance(other, Items))]
        before = 0
        records = []
        for part in parts:
            records.append(part.records + before)
            before += len(part) if offsets else 0
        items = torch.cat([part.items for part in parts])
        return torch.cat(records), items, torch.cat([part.vectors for part in parts])

    def formed(self) -> Formed:
        """Returns the rows themselves, (B, V, D)."""
        return Formed(self._rows.dense()[0], None)

    def blocks(self, *, weight: bool, bias: bool) -> list[Block]:
        """Returns the block of the weight."""
        return [self._rows] if weight else []


class EmbeddingKind(Kind):
    """Vectors of ids (B, ...); each use of an item adds its gradient, the padding item has none."""

    def prepare(self, layer: Any, x: Tensor) -> Tensor:
        """Returns the ids."""
        require_dims(layer, x, 1)
        return x

    def rows(self, use: Use) -> Kept:
        """Returns the rows by record and item."""
        n_records, (n_items, width) = len(use.x), use.weight.shape
        items = use.x.flatten().long()
        uses = use.grad.reshape(-1, width)
        records = torch.arange(n_records, device=items.device).repeat_interleave(
            use.x[:1].numel()
        )
        if use.layer.padding_idx is not None:
            kept = (items != use.layer.padding_idx).nonzero().squeeze(1)
            records = records[kept]
            items = items[kept]
            uses = uses[kept]
        rows = coalesced(records, items, uses, n_records, n_items)
        if use.scale != 1:
            rows.vectors.mul_(use.scale)
        return Items(rows)
