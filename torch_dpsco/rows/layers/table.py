"""Which layers are recorded, and how a layer is turned into a recorded one and back."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from torch_dpsco._doors import typed
from torch_dpsco.rows.layers.convolution import ConvolutionKind
from torch_dpsco.rows.layers.embedding import EmbeddingKind
from torch_dpsco.rows.layers.linear import LinearKind
from torch_dpsco.rows.layers.normalization import GroupNormKind, LayerNormKind
from torch_dpsco.rows.layers.recorded import Kind, Tape, run
from torch_dpsco.rows.layers.trial import try_rows
from torch_dpsco.rows.passes import PassCounter

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
