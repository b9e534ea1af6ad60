"""Which layers are recorded, and how a layer is turned into a recorded one and back.

Normalization within a
record is y = n(x) w + c, so its rows are n(x) grad and grad, summed over places.

Kinds that are not the library's are tried on synthetic records before they see real ones.

The forms of rows, and what is registered from outside: shortcuts through recorded layers, and engines of `fit`.

| form | where | who chooses it |
|---|---|---|
| recorded: a layer's backward keeps its rows | `layers.table`, more by `layers.register` | `attach` |
| dense: Opacus' hooks, or `torch.func` where it has none | `hooks` | `attach`, for all other layers |
| closed: of a linear model, from its data | `closed_form` | `fit`, where nobody could see the difference |
| shortcuts: several recorded layers as one, with the same bits | `SHORTCUTS` | `attach` |
| engines: in place of forward and backward | `ENGINES` | `fit`, or a loop |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_dpsco._doors import typed
from torch_dpsco.errors import PrivacyError
from torch_dpsco.rows.blocks import FLOAT64, work_dtype
from torch_dpsco.rows.forwards import PassCounter
from torch_dpsco.rows.layers.convolution import ConvolutionKind
from torch_dpsco.rows.layers.embedding import EmbeddingKind
from torch_dpsco.rows.layers.recorded import (
    Formed,
    Kept,
    Kind,
    LinearKind,
    RecordedForward,
    Tape,
    Use,
    plain_forward,
    require_dims,
)
from torch_dpsco.rows.supported import slack

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
    found = [out, *torch.autograd.grad(seen, made, kind.input_gradient(use)), *_rows(use, name)]
    params = [layer.get_parameter(part) for part, trained in use.trained.items() if trained]
    alone = [_alone(layer, made[i : i + 1], grad[i : i + 1], params) for i in range(_RECORDS)]
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
    """Returns the rows, (B, *shape) for each trained parameter, as releases read them."""
    found = []
    one = torch.ones(1, dtype=torch.float64, device=use.x.device)
    for block in use.layer.kind.rows(use).blocks(**use.trained):
        places = torch.arange(len(block), device=one.device).split(1)
        each = [block.select(place).weighted_sum(one, FLOAT64) for place in places]
        rows = [torch.stack(parts) for parts in zip(*each, strict=True)]
        lengths = torch.cat([part.flatten(1) for part in rows], dim=1).norm(dim=1)
        if not bool((lengths <= block.norms() * (1.0 + 2.0**-40)).all()):
            raise PrivacyError(
                f"norms of {name} must be upper bounds of those of its rows (docs/your_own.md)"
            )
        found += rows
    return found


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
        n_records = len(use.x)
        size = math.prod(use.layer.normalized_shape)
        times = use.x[:1].numel() // size if n_records else 1
        x, grad = (part.to(dtype).reshape(n_records, times, size) for part in (use.x, use.grad))
        weight = bias = None
        if use.trained["weight"]:
            # normalized x times grad, summed: the deviations are weights of that sum
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


RECORDED: dict[type[nn.Module], Kind] = {
    nn.Linear: LinearKind(),
    nn.Conv1d: ConvolutionKind(),
    nn.Conv2d: ConvolutionKind(),
    nn.Conv3d: ConvolutionKind(),
    nn.LayerNorm: LayerNormKind(),
    nn.GroupNorm: GroupNormKind(),
    nn.Embedding: EmbeddingKind(),
}
_TESTED = frozenset(RECORDED)


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
        raise ValueError(f"layer must be a class that is not recorded yet (got {layer.__name__})")
    RECORDED[layer] = kind


def can_record(layer: nn.Module) -> bool:
    """Returns whether a layer is of a kind that is recorded; subclasses and parametrized weights are not."""
    names = {name for name, _ in layer.named_parameters()}
    return (
        type(layer) in RECORDED and names <= {"weight", "bias"} and "weight" in layer._parameters
    )


def is_recorded(layer: nn.Module) -> bool:
    """Returns whether `start_recording` was called on a layer."""
    return isinstance(layer.__dict__.get("tape"), Tape)


def start_recording(layer: Any, passes: PassCounter, *, scale_by_batch: bool) -> None:
    """Makes a layer recorded, in place; see `Tape`."""
    trial = None if type(layer) in _TESTED else try_rows
    layer.kind = RECORDED[type(layer)]
    layer.tape = Tape(scale_by_batch=scale_by_batch, trial=trial)
    layer.passes = passes
    layer.__dict__.setdefault(
        "forward", RecordedForward(layer)
    )  # not over one of somebody else's


def stop_recording(layer: Any) -> None:
    """Turns a module back, whether it is recorded or has the forward of a shortcut."""
    if is_recorded(layer):
        del layer.kind, layer.tape, layer.passes
    if hasattr(layer.__dict__.get("forward"), "of_class"):
        del layer.forward


class Engine(Protocol):
    """Leaves rows on the parameters of a model that is not attached, and makes the steps."""

    def step(
        self, optimizer: Any, inputs: Any, targets: Any, *, users: Tensor | None = None
    ) -> None:
        """Makes one private step from a batch."""


# faster ways through recorded layers: each gives some modules of a model a `forward` that says `of_class`
SHORTCUTS: list[Callable[[Sequence[nn.Module]], None]] = []
# by name: (model, loss_fn, loader) -> engine, or why there is none
ENGINES: dict[str, Callable[[nn.Module, Any, Any], Engine | str]] = {}
