"""Convolutions, recorded: a Linear layer on the patches of its input.

With one group, x (B, C, ...) is cut into T patches of C k numbers, so that the rows are those of `kept`; several groups
are formed, each from its own channels. Patches are a strided view of the padded input, copied for some records at once.
In patches and in formed rows the channels come last in memory. Rows that take more than input and gradient are made
after the backward, when the activations of the other layers are freed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_dpsco.rows.blocks import Block, work_dtype
from torch_dpsco.rows.layers.recorded import (
    Formed,
    Kept,
    Kind,
    Use,
    added,
    joined,
    leaves_factors,
    pairs,
    require_dims,
    require_unwritten,
)

_CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TILE_ELEMENTS = 2**17  # numbers of patches that are copied at once


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


def _padded(layer: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns (B, groups, *spatial, C / groups) with the padding that the convolution does itself.

    The channels of a group are next to each other in memory: patches then consist of long pieces, which are copied
    several times faster.
    """
    pads = _inner(layer)
    x = x.unflatten(1, (layer.groups, -1)).movedim(2, -1)
    records, groups, *sizes, channels = x.shape
    padded = [size + 2 * pad for size, pad in zip(sizes, pads, strict=True)]
    make = x.new_zeros if any(pads) else x.new_empty
    found: Tensor = make([records, groups, *padded, channels], dtype=dtype)
    inside = found
    for dim, (size, pad) in enumerate(zip(sizes, pads, strict=True), start=2):
        inside = inside.narrow(dim, pad, size)
    inside.copy_(x)
    return found


def _patches(layer: Any, x: Tensor) -> Tensor:
    """Returns the patches of `_padded` records as a view: (B, groups, *places, *kernel, C / groups)."""
    records, groups, *step, channels = x.stride()
    spatial = list(zip(layer.stride, layer.dilation, strict=True))
    places = []
    for size, k, (s, d) in zip(x.shape[2:-1], layer.kernel_size, spatial, strict=True):
        places.append((size - d * (k - 1) - 1) // s + 1)
    strides = [s * own for own, (s, _) in zip(step, spatial, strict=True)]
    strides += [d * own for own, (_, d) in zip(step, spatial, strict=True)]
    shape = [*x.shape[:2], *places, *layer.kernel_size, x.shape[-1]]
    return x.as_strided(shape, [records, groups, *strides, channels], x.storage_offset())


def _formed_weight(use: Use, patches: Tensor, grad: Tensor) -> Tensor:
    """Returns the rows of the weight, from the patches of some records at a time."""
    groups = use.layer.groups
    times = grad.shape[2]
    out, channels, *kernel = use.weight.shape
    n_records = len(grad)
    width = use.weight[0].numel()
    rows = grad.new_empty(n_records, out, *kernel, channels)  # as they are in memory
    step = min(max(1, _TILE_ELEMENTS // max(groups * width * times, 1)), max(1, n_records))
    # one for all tiles: fresh memory costs more than the arithmetic
    buffer = grad.new_empty(step, *patches.shape[1:])
    unused = grad.new_empty(1, 1, 1)
    shape = (n_records * groups, out // groups)
    tiles = patches.split(step), grad.reshape(*shape, times), rows.view(*shape, width)
    for acts, backprops, formed in zip(
        tiles[0], *(part.split(step * groups) for part in tiles[1:]), strict=True
    ):
        acts = buffer[: len(acts)].copy_(acts).view(-1, times, width)
        torch.baddbmm(unused, backprops, acts, beta=0, alpha=use.scale, out=formed)
    return rows.movedim(-1, 2)


def _kept(use: Use, trained: dict[str, bool]) -> Kept:
    """Returns the rows, or their factors."""
    layer = use.layer
    dtype = work_dtype(use.grad.dtype)
    patches = _patches(layer, _padded(layer, use.x, dtype))
    grad = use.grad.to(dtype).flatten(2)
    out = use.weight.shape[0]
    width = use.weight[0].numel()
    times = grad.shape[2]
    if layer.groups == 1 and leaves_factors(times, out, width):
        dims = len(layer.kernel_size)
        # in the order of the weight
        acts = patches.movedim(-1, 2 + dims).reshape(len(grad), times, width)
        return pairs(acts, grad.transpose(1, 2), use.weight.shape, scale=use.scale, **trained)
    bias = grad.sum(2).mul_(use.scale) if trained["bias"] else None
    return Formed(_formed_weight(use, patches, grad) if trained["weight"] else None, bias)


class _Waiting(Kept):
    """What rows are made from after the backward: input and gradient of a use."""

    def __init__(self, use: Use) -> None:
        self._use: Use | None = use
        self._trained = use.trained
        self._versions = (use.x._version, use.grad._version)
        self._records = len(use.x)

    def __len__(self) -> int:
        return self._records

    def _made(self) -> Kept:
        use = self._use
        self._use = None
        assert use is not None
        # PRIVACY: (test_an_overwritten_input_of_a_convolution_is_refused_or_its_rows_are_formed_already)
        require_unwritten((use.x, use.grad), self._versions)
        return _kept(use, self._trained)

    def _all(self, others: Sequence[Kept]) -> list[Kept]:
        return [part._made() for part in (self, *others) if isinstance(part, _Waiting)]

    def plus(self, others: Sequence[Kept]) -> Kept:
        """Returns the sums."""
        return added(self._all(others))

    def then(self, others: Sequence[Kept]) -> Kept:
        """Returns the rows one after another."""
        return joined(self._all(others))

    def formed(self) -> Formed:
        """Returns the rows."""
        return self._made().formed()

    def blocks(self, *, weight: bool, bias: bool) -> list[Block]:
        """Returns the rows of weight and bias, or of one of them."""
        return self._made().blocks(weight=weight, bias=bias)


class ConvolutionKind(Kind):
    """x is (B, C, *spatial)."""

    def prepare(self, layer: Any, x: Tensor) -> Tensor:
        """Returns x with the padding that convolutions cannot do themselves."""
        dims = len(layer.kernel_size)
        require_dims(layer, x, dims + 2, dims + 2)
        if any(_inner(layer)) or not any(map(any, _pads(layer))):
            return x
        flat = [side for pair in reversed(_pads(layer)) for side in pair]  # last dimension first
        zeros = layer.padding_mode == "zeros"
        return F.pad(x, flat, mode="constant" if zeros else layer.padding_mode)

    def forward(
        self, layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Returns the output."""
        convolve = _CONVOLVE[len(layer.kernel_size)]
        pads = _inner(layer)
        return (convolve(x, weight, bias, layer.stride, pads, layer.dilation, layer.groups),)

    def rows(self, use: Use) -> Kept:
        """Returns the rows, or what they are made from if that takes less."""
        fewer = use.x[:1].numel() + use.grad[:1].numel() < use.weight.numel()
        return _Waiting(use) if fewer and use.trained["weight"] else _kept(use, use.trained)

    def input_gradient(self, use: Use) -> Tensor:
        """Returns the gradient in x."""
        layer = use.layer
        dtype = use.weight.dtype
        none = [0] * len(use.layer.kernel_size)
        sizes = (layer.stride, _inner(layer), layer.dilation, False, none, layer.groups)
        grad = use.grad.to(dtype)
        x = use.x.to(dtype)
        backward = torch.ops.aten.convolution_backward
        found: Tensor = backward(grad, x, use.weight, None, *sizes, [True, False, False])[0]
        return found.to(use.x.dtype)
