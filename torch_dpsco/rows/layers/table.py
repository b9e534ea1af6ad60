"""Which layers are recorded, and how a layer is turned into a recorded one and back."""

from __future__ import annotations

from torch import nn

from torch_dpsco.rows.layers.convolution import RecordedConv1d, RecordedConv2d, RecordedConv3d
from torch_dpsco.rows.layers.embedding import RecordedEmbedding
from torch_dpsco.rows.layers.linear import FactoredLinear
from torch_dpsco.rows.layers.normalization import RecordedGroupNorm, RecordedLayerNorm
from torch_dpsco.rows.layers.recorded import Tape
from torch_dpsco.rows.passes import PassCounter

RECORDED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: FactoredLinear,
    nn.Conv1d: RecordedConv1d,
    nn.Conv2d: RecordedConv2d,
    nn.Conv3d: RecordedConv3d,
    nn.LayerNorm: RecordedLayerNorm,
    nn.GroupNorm: RecordedGroupNorm,
    nn.Embedding: RecordedEmbedding,
}
_PLAIN = {recorded: plain for plain, recorded in RECORDED.items()}


def can_record(layer: nn.Module) -> bool:
    """Returns whether a layer is of a kind that is recorded; subclasses and parametrized weights are not."""
    return type(layer) in RECORDED and layer._parameters.keys() <= {"weight", "bias"} and "weight" in layer._parameters


def is_recorded(layer: nn.Module) -> bool:
    """Returns whether `start_recording` was called on a layer."""
    return type(layer) in _PLAIN


def start_recording(layer: nn.Module, tape: Tape, passes: PassCounter) -> None:
    """Makes a layer recorded, in place."""
    layer.__class__ = RECORDED[type(layer)]
    layer.tape, layer.passes = tape, passes  # type: ignore[assignment]


def stop_recording(layer: nn.Module) -> None:
    """Turns a recorded layer back."""
    del layer.tape, layer.passes
    object.__setattr__(layer, "__class__", _PLAIN[type(layer)])
