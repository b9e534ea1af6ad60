"""Convolutions, recorded: a Linear layer on the patches of its input.

With one group, x (B, C, ...) is cut into T patches of C k numbers, so that the rows are those of `kept`; several groups
are formed, each from its own channels. Patches are a strided view of the padded input, copied for some records at once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_dpsco.gradbatch.base import work_dtype
from torch_dpsco.gradbatch.kept import Formed, Kept, pairs
from torch_dpsco.gradbatch.passes import PassCounter
from torch_dpsco.gradbatch.recorded import Kind, Tape, Use, require_dims, run

__all__ = ["RecordedConv1d", "RecordedConv2d", "RecordedConv3d"]

_CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_MODES = {"zeros": "constant", "reflect": "reflect", "replicate": "replicate", "circular": "circular"}


def _pads(layer: Any) -> list[tuple[int, int]]:
    """Returns the padding before and after each spatial dimension."""
    if layer.padding == "same":
        totals = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    if layer.padding == "valid":
        return [(0, 0) for _ in layer.kernel_size]
    return [(pad, pad) for pad in layer.padding]


def _inner(layer: Any) -> list[int]:
    """Returns the padding that the convolution does itself: all of it, if it is of zeros and symmetric, or none."""
    pads = _pads(layer)
    own = layer.padding_mode == "zeros" and all(before == after for before, after in pads)
    return [before if own else 0 for before, _ in pads]


def _flat(pads: list[tuple[int, int]]) -> list[int]:
    return [side for pair in reversed(pads) for side in pair]  # last dimension first, as F.pad wants it


def _patches(layer: Any, x: Tensor) -> Tensor:
    """Returns the patches of padded records: (B, groups, C/groups * k, T)."""
    x = x.contiguous()
    (records, channels, *step), spatial = x.stride(), list(zip(layer.stride, layer.dilation, strict=True))
    places = [
        (size - d * (k - 1) - 1) // s + 1
        for size, k, (s, d) in zip(x.shape[2:], layer.kernel_size, spatial, strict=True)
    ]
    strides = [d * own for own, (_, d) in zip(step, spatial, strict=True)]
    strides += [s * own for own, (s, _) in zip(step, spatial, strict=True)]
    shape = [*x.shape[:2], *layer.kernel_size, *places]
    view = x.as_strided(shape, [records, channels, *strides], x.storage_offset())
    inner = x.shape[1] // layer.groups * torch.Size(layer.kernel_size).numel()
    return view.reshape(len(x), layer.groups, inner, torch.Size(places).numel())


class _Convolution(Kind):
    """x is (B, C, *spatial)."""

    def prepare(self, layer: Any, x: Tensor) -> Tensor:
        """Returns x with the padding that convolutions cannot do themselves."""
        dims = len(layer.kernel_size)
        require_dims(layer, x, dims + 2, dims + 2)
        if any(_inner(layer)) or not any(map(any, _pads(layer))):
            return x
        return F.pad(x, _flat(_pads(layer)), mode=_MODES[layer.padding_mode])

    def forward(self, layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
        """Returns the output."""
        convolve = _CONVOLVE[len(layer.kernel_size)]
        return (convolve(x, weight, bias, layer.stride, _inner(layer), layer.dilation, layer.groups),)

    def rows(self, use: Use) -> Kept:
        """Returns the rows, or their factors."""
        layer, dtype = use.layer, work_dtype(use.grad.dtype)
        x = F.pad(use.x, _flat([(pad, pad) for pad in _inner(layer)])).to(dtype)
        patches, grad = _patches(layer, x), use.grad.to(dtype).flatten(2)
        if layer.groups == 1:
            acts, backprops = patches[:, 0].transpose(1, 2), grad.transpose(1, 2)
            return pairs(acts, backprops, use.weight.shape, scale=use.scale, **use.trained)
        weight = bias = None
        if use.trained["weight"]:
            rows = grad.unflatten(1, (layer.groups, -1)) @ patches.transpose(2, 3)
            weight = rows.reshape(len(x), *use.weight.shape) * use.scale
        if use.trained["bias"]:
            bias = grad.sum(2) * use.scale
        return Formed(weight, bias)

    def input_gradient(self, use: Use) -> Tensor:
        """Returns the gradient in x."""
        layer, dtype, none = use.layer, use.weight.dtype, [0] * len(use.layer.kernel_size)
        sizes = (layer.stride, _inner(layer), layer.dilation, False, none, layer.groups)
        grad, x = use.grad.to(dtype), use.x.to(dtype)
        backward = torch.ops.aten.convolution_backward
        found: Tensor = backward(grad, x, use.weight, None, *sizes, [True, False, False])[0]
        return found.to(use.x.dtype)


class RecordedConv1d(nn.Conv1d):
    """An attached `nn.Conv1d`. Made by `attach` only; `detach` turns it back."""

    kind: Kind = _Convolution()
    tape: Tape
    passes: PassCounter

    def forward(self, input: Tensor) -> Tensor:
        """Applies the layer; in training with gradients enabled its backward records rows."""
        return run(self, super().forward, input)


class RecordedConv2d(nn.Conv2d):
    """An attached `nn.Conv2d`. Made by `attach` only; `detach` turns it back."""

    kind: Kind = _Convolution()
    tape: Tape
    passes: PassCounter

    def forward(self, input: Tensor) -> Tensor:
        """Applies the layer; in training with gradients enabled its backward records rows."""
        return run(self, super().forward, input)


class RecordedConv3d(nn.Conv3d):
    """An attached `nn.Conv3d`. Made by `attach` only; `detach` turns it back."""

    kind: Kind = _Convolution()
    tape: Tape
    passes: PassCounter

    def forward(self, input: Tensor) -> Tensor:
        """Applies the layer; in training with gradients enabled its backward records rows."""
        return run(self, super().forward, input)
