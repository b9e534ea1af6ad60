"""Convolutions, recorded: a Linear layer on the patches of its input.

With one group, x (B, C, ...) is cut into T patches of C k numbers, so that the rows are those of `kept`; several groups
are formed, each from its own channels. Patches are a strided view of the padded input, copied for some records at once.
In patches and in formed rows the channels come last in memory.

Embeddings, recorded: rows by record and item, without a tensor of batch times items.

Rows of an Embedding: a record moves the vectors of its own items only, so rows are kept per (record, item).

A row of the weight (V, D) is zero but for the items that the record holds; what is kept is U <= B T vectors, each with
its record and its item, sorted by both, and never a tensor of B V D numbers. Norms: of vectors, squared and added by
record. Weighted sums: vectors added by item.

Normalization within a
record is y = n(x) w + c, so its rows are n(x) grad and grad, summed over places.

Kinds that are not the library's are tried on synthetic records before they see real ones.

The forms of rows; the last two are registered in `acts`, from outside.

| form | where | who chooses it |
|---|---|---|
| recorded: a layer's backward keeps its rows | here, more by `layers.register` | `attach` |
| dense: Opacus' hooks, or `torch.func` where it has none | `hooks` | `attach`, for all other layers |
| closed: of a linear model, from its data | `closed_form` | `fit`, where nobody could see the difference |
| stacks: several recorded layers as one, with the same bits | `rows.stacks` | the first forward |
| engines: in place of forward and backward | `rows.compiled` | `fit`, or a loop |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_dpsco._validate import typed
from torch_dpsco.errors import PrivacyError
from torch_dpsco.native import slack
from torch_dpsco.rows.blocks import (
    NORM_ERROR,
    Block,
    Summation,
    from_kernel,
    is_queued,
    row_norms,
    work_dtype,
)
from torch_dpsco.rows.layers.recorded import (
    RECORDED,
    Factors,
    Formed,
    Kept,
    Kind,
    Use,
    leaves_factors,
    pairs,
    plain_forward,
    require_dims,
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
    x = x.unflatten(1, (layer.groups, -1)).movedim(2, -1)
    pads = [side for pad in reversed(_inner(layer)) for side in (pad, pad)]
    if any(pads):
        x = F.pad(x, [0, 0, *pads])
    return x.to(dtype).contiguous()


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
            backprops = grad.transpose(1, 2)
            return pairs(acts, backprops, use.weight.shape, scale=use.scale, **use.trained)
        bias = grad.sum(2).mul_(use.scale) if use.trained["bias"] else None
        weight = _formed_weight(use, patches, grad) if use.trained["weight"] else None
        return Formed(weight, bias)

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


_TILE_ELEMENTS = 2**17  # numbers in a float64 tile


class ItemBlock(Block):
    """Rows of one weight (V, D), by record and item.

    Args:
        records: (U,) int64 in [0, n_records]; what is of n_records is of no record.
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
        squares = _grouped(norms.square_(), self.records, self.n_records)
        # PRIVACY: at most V squares of certified norms, each addition rounded; what underflows is less than the number
        # added (test_norms_of_items_are_never_below_the_exact_norm, test_many_small_items_beside_a_large_one_count)
        error = NORM_ERROR[torch.float64] + self.n_items * 2.0**-53
        return squares.sqrt_().mul_(1.0 + error).add_(2.0**-500)

    def weighted_sum(self, weights: Tensor, precision: Summation) -> list[Tensor]:
        """Returns [sum_i weights[i] * row_i]: added in float64, and kept in float32 where the precision allows it."""
        items, place = _distinct(self.items, self.n_items)
        weights = F.pad(weights, [0, 1])  # of no record
        width = self.vectors.shape[1]
        sums = self.vectors.new_zeros(len(items), width, dtype=torch.float64)
        step = max(1, _TILE_ELEMENTS // max(width, 1))
        for start in range(0, len(place), step):
            part = slice(start, start + step)
            scaled = self.vectors[part].double() * weights[self.records[part], None]
            sums.index_add_(0, place[part], scaled)
        small = bool(precision.matrix_tile) and self.vectors.dtype != torch.float64
        total = sums.new_zeros(
            self.n_items + 1, width, dtype=torch.float32 if small else torch.float64
        )
        total[items] = sums.to(total.dtype)  # one rounding of a float32 sum, which has more
        return [total[: self.n_items]]

    def select(self, index: Tensor | slice) -> ItemBlock:
        """Returns the block of some rows, each once."""
        if isinstance(index, slice):
            index = torch.arange(self.n_records, device=self.records.device)[index]
        places = self.records.new_full((self.n_records + 1,), len(index))
        places[index] = torch.arange(len(index), device=index.device)
        return _of_records(
            places[self.records], self.items, self.vectors, len(index), self.n_items
        )

    def masked(self, kept: Tensor) -> ItemBlock:
        """Returns the block with zeros for the rows that are not kept, and for what is of no record."""
        left = ~F.pad(kept, [0, 1])[self.records]
        vectors = self.vectors.masked_fill(left[:, None], 0.0)
        return ItemBlock(self.records, self.items, vectors, self.n_records, self.n_items)

    def dense(self) -> list[Tensor]:
        """Returns [rows]: (B, V, D)."""
        rows = self.vectors.new_zeros(self.n_records + 1, *self.shapes[0])
        return [rows.index_put_((self.records, self.items), self.vectors)[: self.n_records]]


def _of_records(
    records: Tensor, items: Tensor, vectors: Tensor, n_records: int, n_items: int
) -> ItemBlock:
    """Returns the block without what is of no record, unless to know how much that is would wait for a device."""
    if not is_queued(records):
        kept = (records < n_records).nonzero().squeeze(1)
        records, items, vectors = records[kept], items[kept], vectors[kept]
    return ItemBlock(records, items, vectors, n_records, n_items)


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
    keys, place = _distinct(records * n_items + items, n_records * n_items)
    uses = uses.to(work_dtype(uses.dtype))
    # PRIVACY: each sum is of one record, so that NaN stays in its row (test_a_record_that_is_not_finite_moves_no_other)
    vectors = _grouped(uses, place, len(keys))
    return ItemBlock(keys // n_items, keys % n_items, vectors, n_records, n_items)


def _grouped(rows: Tensor, groups: Tensor, count: int) -> Tensor:
    """Returns the sums of the rows of each group, of which `count` is left out."""
    found: Tensor | None = from_kernel("rows.grouped", rows, groups, count)
    if found is not None:
        return found
    return rows.new_zeros(count + 1, *rows.shape[1:]).index_add_(0, groups, rows)[:count]


def _distinct(keys: Tensor, none: int) -> tuple[Tensor, Tensor]:
    """Returns the distinct keys, and the place of each key among them.

    Where a device is not waited for there are as many places as keys, of which those left over are of the key `none`.
    """
    if not is_queued(keys) or not len(keys):
        distinct, place = torch.unique(keys, return_inverse=True)
        return distinct, place
    ordered, order = keys.sort()
    new = F.pad(ordered[1:] != ordered[:-1], [1, 0])
    ranks = new.long().cumsum(0)
    distinct = torch.full_like(keys, none).scatter_(0, ranks, ordered)
    return distinct, torch.empty_like(ranks).scatter_(0, order, ranks)


class Items(Kept):
    """Rows of an Embedding, by record and item."""

    def __init__(self, rows: ItemBlock) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @staticmethod
    def joined(parts: Sequence[Any], *, same: bool) -> Kept:
        """Returns the sums by record and item, or the rows one after another."""
        blocks = [part._rows for part in parts]
        n_items = blocks[0].n_items
        starts = list(accumulate((0 if same else len(block) for block in blocks), initial=0))
        last = len(blocks[0]) if same else starts[-1]
        records = torch.cat(
            [
                (b.records + start).masked_fill(b.records == len(b), last)
                for b, start in zip(blocks, starts, strict=False)
            ]
        )
        items = torch.cat([block.items for block in blocks])
        vectors = torch.cat([block.vectors for block in blocks])
        if same:
            return Items(coalesced(records, items, vectors, len(blocks[0]), n_items))
        return Items(ItemBlock(records, items, vectors, starts[-1], n_items))

    def formed(self) -> Formed:
        """Returns the rows themselves, (B, V, D)."""
        return Formed(self._rows.dense()[0], None)

    def blocks(self, *, weight: bool, bias: bool) -> list[Block]:
        """Returns the block of the weight."""
        rows = self._rows
        return [from_kernel("rows.items", rows.vectors, rows) or rows] if weight else []


class EmbeddingKind(Kind):
    """Vectors of ids (B, ...); each use of an item adds its gradient, the padding item has none."""

    def prepare(self, layer: Any, x: Tensor) -> Tensor:
        """Returns the ids."""
        require_dims(layer, x, 1)
        return x

    def rows(self, use: Use) -> Kept:
        """Returns the rows by record and item."""
        n_records = len(use.x)
        n_items, width = use.weight.shape
        items = use.x.flatten().long()
        uses = use.grad.reshape(-1, width)
        records = torch.arange(n_records, device=items.device).repeat_interleave(
            use.x[:1].numel()
        )
        if use.layer.padding_idx is not None:
            records = records.masked_fill(items == use.layer.padding_idx, n_records)
            found = _of_records(records, items, uses, n_records, n_items)
            records, items, uses = found.records, found.items, found.vectors
        rows = coalesced(records, items, uses, n_records, n_items)
        if use.scale != 1:
            rows.vectors.mul_(use.scale)
        return Items(rows)


_RECORDS = 3


@torch.no_grad()
def try_rows(layer: Any, x: Tensor) -> None:
    """Raises PrivacyError unless a layer gives for each of some made-up records what autograd gives for it alone.

    Args:
        layer: recorded.
        x: its input, of which shape, dtype and device are taken, and no value.
    """
    kind = layer.kind
    name = type(layer.kind).__name__
    if not x.is_floating_point():
        raise ValueError(
            f"input of a registered layer must be floating point, to try {name} on made-up numbers"
        )
    numbers = torch.Generator()  # the same in every trial
    made = torch.randn(_RECORDS, *x.shape[1:], generator=numbers).to(x).requires_grad_()
    with torch.enable_grad():
        seen = kind.prepare(layer, made)
    out, *saved = kind.forward(layer, seen.detach(), layer.weight, layer._parameters.get("bias"))
    grad = torch.randn(out.shape, generator=numbers).to(out)
    use = Use(layer, seen.detach(), layer.weight.detach(), tuple(saved), grad)
    (gradient,) = torch.autograd.grad(seen, made, kind.input_gradient(use))
    found = [out, gradient, *_rows(use, name)]
    params = [layer.get_parameter(part) for part, trained in use.trained.items() if trained]
    pairs = zip(made.split(1), grad.split(1), strict=True)
    alone = [_alone(layer, x, g, params) for x, g in pairs]
    expected = [torch.cat(parts) for parts in zip(*alone, strict=True)]
    expected[2:] = [part * use.scale for part in expected[2:]]
    sizes = [float(torch.linalg.vector_norm(part.double())) for part in expected]
    labels = ["outputs", "input gradients", *("rows" for _ in params)]
    if [part.shape for part in found] != [part.shape for part in expected]:
        raise PrivacyError(
            f"{name} must give one row per record, of the shapes of weight and bias"
            " (docs/your_own.md)"
        )
    for label, ours, theirs, size in zip(labels, found, expected, sizes, strict=True):
        error = float(torch.linalg.vector_norm(ours.double() - theirs.double()))
        if not error <= slack(out.dtype) * (size + 1e-3 * math.hypot(*sizes)):
            raise PrivacyError(
                f"{label} of {name} must be those of autograd for each record alone (off by"
                f" {error:.2g} on made-up records, where {size:.2g} is their size): see"
                " docs/your_own.md"
            )


def _rows(use: Use, name: str) -> list[Tensor]:
    """Returns the rows, (B, *shape) for each trained parameter."""
    kept = use.layer.kind.rows(use)
    if type(kept) not in (Formed, Factors):
        # PRIVACY: norms of a form that is not the library's may be too small
        # (test_a_wrong_kind_is_refused_before_it_sees_a_record)
        raise PrivacyError(
            f"rows of {name} must be Formed(...), or what pairs(...) returns (docs/your_own.md)"
        )
    parts = zip(kept.formed().parts, use.trained.values(), strict=True)
    return [part for part, trained in parts if trained and part is not None]


def _alone(layer: Any, x: Tensor, grad: Tensor, params: list[Tensor]) -> list[Tensor]:
    """Returns output, gradient in the input and in the parameters of one record, each with a dimension of 1 before."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        out = plain_forward(layer)(x)
    gradients = torch.autograd.grad(out, [x, *params], grad)
    return [out.detach(), gradients[0], *(part.unsqueeze(0) for part in gradients[1:])]


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
        n_records = use.x.shape[0]
        trained = use.trained
        if use.x.dim() == 2 and use.x.dtype is use.grad.dtype is dtype:
            # of vectors nothing is summed: the same numbers, in fewer calls
            means, inverse = use.saved
            normalized = (use.x - means).mul_(use.grad).mul_(inverse * use.scale)
            summed = use.grad * use.scale
            return Formed(
                normalized if trained["weight"] else None, summed if trained["bias"] else None
            )
        size = math.prod(use.layer.normalized_shape)
        times = use.x[:1].numel() // size if n_records else 1
        x, grad = (part.to(dtype).reshape(n_records, times, size) for part in (use.x, use.grad))
        weight = bias = None
        if trained["weight"]:
            # normalized x times grad, summed: the deviations are weights of that sum
            means, inverse = (part.to(dtype).reshape(n_records, times, 1) for part in use.saved)
            factors = (inverse * use.scale).transpose(1, 2)
            weight = torch.bmm(factors, x.sub(means).mul_(grad))
            weight = weight.view(n_records, *use.layer.normalized_shape)
        if trained["bias"]:
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


RECORDED.update(
    {
        nn.Conv1d: ConvolutionKind(),
        nn.Conv2d: ConvolutionKind(),
        nn.Conv3d: ConvolutionKind(),
        nn.LayerNorm: LayerNormKind(),
        nn.GroupNorm: GroupNormKind(),
        nn.Embedding: EmbeddingKind(),
    }
)


@typed
def register(layer: type[nn.Module], kind: Kind) -> None:
    """Makes `attach` record the rows of a layer of yours, which are otherwise formed by torch.func, slower.

    The kind is tried on synthetic records of the shape of the layer's first input after each `attach`: output, rows and
    input gradient must be those of autograd for each record alone, and rows must lie within their norms.

    Args:
        layer: a class of modules with one tensor in and out, whose parameters are `weight` and maybe `bias`; its
            subclasses are not meant.
        kind: gives its rows.

    Raises:
        ValueError: the class is recorded already.

    Guarantee:
        None beyond the trial: that the rows of a record are a function of it alone, for all values, is promised.
    """
    if layer in RECORDED:
        raise ValueError(
            f"layer must be a class that is not recorded yet (got {layer.__name__})"
        )
    kind.trial = try_rows
    RECORDED[layer] = kind
