"""Embeddings, recorded: rows are kept by record and item, without a tensor of batch times items."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_dpsco.gradbatch.items import Items, coalesced
from torch_dpsco.gradbatch.kept import Kept
from torch_dpsco.gradbatch.passes import PassCounter
from torch_dpsco.gradbatch.recorded import Kind, Tape, Use, require_dims, run


class _Embedding(Kind):
    """Vectors of ids (B, ...); each use of an item adds its gradient, the padding item has none."""

    def prepare(self, layer: Any, x: Tensor) -> Tensor:
        """Returns the ids."""
        require_dims(layer, x, 1)
        return x

    def forward(self, layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
        """Returns the output."""
        return (F.embedding(x, weight, layer.padding_idx),)

    def rows(self, use: Use) -> Kept:
        """Returns the rows by record and item."""
        n_records, (n_items, width) = len(use.x), use.weight.shape
        items, uses = use.x.flatten().long(), use.grad.reshape(-1, width)
        records = torch.arange(n_records, device=items.device).repeat_interleave(use.x[:1].numel())
        if use.layer.padding_idx is not None:
            kept = (items != use.layer.padding_idx).nonzero().squeeze(1)
            records, items, uses = records[kept], items[kept], uses[kept]
        rows = coalesced(records, items, uses, n_records, n_items)
        if use.scale != 1:
            rows.vectors.mul_(use.scale)
        return Items(rows)

    def input_gradient(self, use: Use) -> Tensor:
        """Never called: ids have no gradient."""
        raise NotImplementedError


class RecordedEmbedding(nn.Embedding):
    """An attached `nn.Embedding`. Made by `attach` only; `detach` turns it back."""

    kind: Kind = _Embedding()
    tape: Tape
    passes: PassCounter

    def forward(self, input: Tensor) -> Tensor:
        """Applies the layer; in training with gradients enabled its backward records rows."""
        return run(self, super().forward, input)
