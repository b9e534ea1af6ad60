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
from torch_dpsco.gradbatch.gram import outer_sums
from torch_dpsco.gradbatch.kept import Formed, Kept, leaves_factors, pairs
from torch_dpsco.gradbatch.passes import PassCounter
from torch_dpsco.gradbatch.recorded import Kind, Tape, Use, require_dims, run

__all__ = ["RecordedConv1d", "RecordedConv2d", "RecordedConv3d"]

_CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TILE_ELEMENTS = 2**18  # numbers of patches that are copied at once
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
    """Returns the patches of padded records as a view: (B, C, *kernel, *places)."""
    (records, channels, *step), spatial = x.stride(), list(zip(layer.stride, layer.dilation, strict=True))
    places = [
        (size - d * (k - 1) - 1) // s + 1
        for size, k, (s, d) in zip(x.shape[2:], layer.kernel_size, spatial, strict=True)
    ]
    strides = [d * own for own, (_, d) in zip(step, spatial, strict=True)]
    strides += [s * own for own, (s, _) in zip(step, spatial, strict=True)]
    shape = [*x.shape[:2], *layer.kernel_size, *places]
    return x.as_strided(shape, [records, channels, *strides], x.storage_offset())


def _formed_weight(use: Use, patches: Tensor, grad: Tensor) -> Tensor:
    """Returns the rows of the weight, from the patches of some records at a time."""
    groups, times, n_records = use.layer.groups, grad.shape[2], len(grad)
    out, width = use.weight.shape[0] // groups, use.weight[0].numel()
    rows = grad.new_empty(n_records, groups, out, width)
    step = min(max(1, _TILE_ELEMENTS // max(groups * width * times, 1)), max(1, n_records))
    buffer = grad.new_empty(step, *patches.shape[1:])  # one for all tiles: fresh memory costs more than the arithmetic
    for start in range(0, n_records, step):
        part = slice(start, min(start + step, n_records))
        acts = buffer[: part.stop - start].copy_(patches[part]).view(-1, width, times).transpose(1, 2)
        backprops = grad[part].reshape(-1, out, times).transpose(1, 2)
        outer_sums(acts, backprops, use.scale, out=rows[part].flatten(0, 1))
    return rows.view(n_records, *use.weight.shape)


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
        out, width, times = use.weight.shape[0], use.weight[0].numel(), grad.shape[2]
        if layer.groups == 1 and leaves_factors(times, out, width):
            acts = patches.reshape(len(x), width, times).transpose(1, 2)
            return pairs(acts, grad.transpose(1, 2), use.weight.shape, scale=use.scale, **use.trained)
        weight = _formed_weight(use, patches, grad) if use.trained["weight"] else None
        return Formed(weight, grad.sum(2).mul_(use.scale) if use.trained["bias"] else None)

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
