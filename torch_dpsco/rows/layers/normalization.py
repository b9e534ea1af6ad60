"""Normalization within a record, recorded: y = n(x) w + c, so the rows are n(x) grad and grad, summed over places."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_dpsco.rows.base import work_dtype
from torch_dpsco.rows.layers.recorded import Formed, Kept, Kind, Use, require_dims


class LayerNormKind(Kind):
    """x is (B, ..., *normalized_shape)."""

    def prepare(self, layer: Any, x: Tensor) -> Tensor:
        """Returns x."""
        require_dims(layer, x, len(layer.normalized_shape) + 1)
        return x

    def forward(
        self, layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Returns output, means and inverse deviations."""
        return torch.native_layer_norm(x, layer.normalized_shape, weight, bias, layer.eps)

    def rows(self, use: Use) -> Kept:
        """Returns the rows."""
        dtype = work_dtype(use.x.dtype)
        n_records = len(use.x)
        size = math.prod(use.layer.normalized_shape)
        times = use.x[:1].numel() // size if n_records else 1
        x, grad = (part.to(dtype).reshape(n_records, times, size) for part in (use.x, use.grad))
        weight = bias = None
        if use.trained[
            "weight"
        ]:  # normalized x times grad, summed: the deviations are weights of that sum
            means, inverse = (part.to(dtype).reshape(n_records, times, 1) for part in use.saved)
            weight = torch.bmm((inverse * use.scale).transpose(1, 2), x.sub(means).mul_(grad))
            weight = weight.view(n_records, *use.layer.normalized_shape)
        if use.trained["bias"]:
            bias = grad.sum(1).mul_(use.scale).view(n_records, *use.layer.normalized_shape)
        return Formed(weight, bias)

    def input_gradient(self, use: Use) -> Tensor:
        """Returns the gradient in x."""
        shape = use.layer.normalized_shape
        wanted = [True, False, False]
        backward = torch.ops.aten.native_layer_norm_backward
        found: Tensor = backward(use.grad, use.x, shape, *use.saved, use.weight, None, wanted)[0]
        return found


class GroupNormKind(Kind):
    """x is (B, C, ...)."""

    def rows(self, use: Use) -> Kept:
        """Returns the rows, summed over places; vectors have one."""
        x = use.x.to(work_dtype(use.x.dtype))
        grad = use.grad.to(x.dtype)
        places = list(range(2, x.dim() + 1))
        weight = bias = None
        if use.trained["weight"]:
            normalized = F.group_norm(x, use.layer.num_groups, eps=use.layer.eps).mul_(grad)
            weight = normalized[..., None].sum(places).mul_(use.scale)
        if use.trained["bias"]:
            bias = grad[..., None].sum(places).mul_(use.scale)
        return Formed(weight, bias)
