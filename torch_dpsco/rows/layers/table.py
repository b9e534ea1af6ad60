"""Which layers are recorded, and how a layer is turned into a recorded one and back.

Kinds that are not the library's are tried on synthetic records before they see real ones.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from torch_dpsco._doors import typed
from torch_dpsco.errors import PrivacyError
from torch_dpsco.rows.base import FLOAT64
from torch_dpsco.rows.layers.convolution import ConvolutionKind
from torch_dpsco.rows.layers.embedding import EmbeddingKind
from torch_dpsco.rows.layers.linear import LinearKind
from torch_dpsco.rows.layers.normalization import GroupNormKind, LayerNormKind
from torch_dpsco.rows.layers.recorded import Kind, Tape, Use, plain_forward, run
from torch_dpsco.rows.passes import PassCounter
from torch_dpsco.rows.precision import slack

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


RECORDED: dict[type[nn.Module], type[nn.Module]] = {}


def _record(layer: type[nn.Module], kind: Kind) -> None:
    """Makes the class of the attached instances of a class."""

    def forward(self: Any, input: Tensor) -> Tensor:
        return run(self, input)

    def reduce(self: Any, protocol: int) -> tuple[Any, ...]:
        return _new, (layer,), *layer.__reduce_ex__(self, protocol)[2:]

    members = {"kind": kind, "forward": forward, "__reduce_ex__": reduce, "__module__": __name__}
    RECORDED[layer] = type(f"Recorded{layer.__name__}", (layer,), members)


def _new(layer: type[nn.Module]) -> nn.Module:
    recorded = RECORDED[layer]
    return recorded.__new__(recorded)


for _layer, _kind in {
    nn.Linear: LinearKind(),
    nn.Conv1d: ConvolutionKind(),
    nn.Conv2d: ConvolutionKind(),
    nn.Conv3d: ConvolutionKind(),
    nn.LayerNorm: LayerNormKind(),
    nn.GroupNorm: GroupNormKind(),
    nn.Embedding: EmbeddingKind(),
}.items():
    _record(_layer, _kind)
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
    _record(layer, kind)


def can_record(layer: nn.Module) -> bool:
    """Returns whether a layer is of a kind that is recorded; subclasses and parametrized weights are not."""
    names = {name for name, _ in layer.named_parameters()}
    return type(layer) in RECORDED and names <= {"weight", "bias"} and "weight" in layer._parameters


def is_recorded(layer: nn.Module) -> bool:
    """Returns whether `start_recording` was called on a layer."""
    return type(layer) in RECORDED.values()


def start_recording(layer: nn.Module, passes: PassCounter, *, scale_by_batch: bool) -> None:
    """Makes a layer recorded, in place; see `Tape`."""
    tape = Tape(scale_by_batch=scale_by_batch, trial=None if type(layer) in _TESTED else try_rows)
    layer.__class__ = RECORDED[type(layer)]
    layer.tape, layer.passes = tape, passes  # type: ignore[assignment]


def stop_recording(layer: nn.Module) -> None:
    """Turns a recorded layer back."""
    del layer.tape, layer.passes
    object.__setattr__(layer, "__class__", type(layer).__base__)
