"""Linear layers, recorded: the two factors of their rows on vectors, the cheaper form on sequences."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from torch_dpsco.rows.layers.recorded import Kept, Kind, Use, Vectors, pairs


class LinearKind(Kind):
    """y = x W^T + c for x (B, ..., in); see `kept` for its rows."""

    def forward(
        self, layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Returns the output."""
        return (F.linear(x, weight, bias),)

    def rows(self, use: Use) -> Kept:
        """Returns the factors, or the rows formed from them."""
        if use.x.dim() == 2:
            return Vectors(use.x, use.grad, scale=use.scale, **use.trained)
        x, grad = (t.flatten(1, -2) for t in (use.x, use.grad))
        return pairs(x, grad, use.weight.shape, scale=use.scale, **use.trained)

    def input_gradient(self, use: Use) -> Tensor:
        """Returns grad W."""
        return (use.grad.to(use.weight.dtype) @ use.weight).to(use.x.dtype)
