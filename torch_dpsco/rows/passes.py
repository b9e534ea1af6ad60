"""Numbered forwards of an attached model, and what is known about their batches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from torch_dpsco.compat import backward_number
from torch_dpsco.errors import SequenceError

ONE_MODULE = (
    "where a loss needs several forwards of one model (real and generated images, views of a"
    " record, pairs), wrap them in one module that makes all of them inside of its forward,"
    " model(real, fake), and attach that"
)
NO_FORWARD = "a backward must follow a forward in training mode: call model.train() before it"

_PARTS = "(also of parts of the model), and take metrics under torch.no_grad()"
_TWICE = (
    "came from the double backward of a gradient (create_graph=True, as in a gradient penalty), of"
    " which no rows are known: leave the penalty out and bound the critic by weight clipping,"
    " p.clamp_(-c, c) after each optimizer.step()"
)
_OUTSIDE = (
    "came from outside of the layer: give a regularizer of the loss to the optimizer instead (reg=,"
    " prox=); where the forward uses the weight directly (layer.weight @ x), move weight and use"
    " into a module of their own, with the weight as its nn.Parameter, and call that module"
)


def batch_sizes(inputs: Any, dim: int) -> frozenset[int] | None:
    """Returns the sizes that a batch may have by the inputs of a model; None if something in them is not understood.

    Args:
        inputs: nested tuples, lists and dicts of tensors and plain values.
        dim: of the batch in each tensor.
    """
    if isinstance(inputs, Tensor):
        return frozenset([inputs.shape[dim]] if inputs.dim() > dim else [])
    if inputs is None or isinstance(inputs, (bool, int, float, str)):
        return frozenset()
    if not isinstance(inputs, (tuple, list, dict)):
        return None
    parts = [
        batch_sizes(part, dim) for part in (inputs.values() if isinstance(inputs, dict) else inputs)
    ]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    lengths = [frozenset([len(inputs)])] if isinstance(inputs, list) else []  # a record per entry
    return frozenset().union(*known, *lengths)


class PassCounter:
    """Numbers the training forwards of an attached model."""

    def __init__(self) -> None:
        self.number = 0
        self.tag: int | None = None  # number of the running pass, None outside of one
        self.used = 0  # number of the newest pass when rows were last used or dropped
        self.paused = False  # whether plain gradients are computed, of public data
        self._sizes: frozenset[int] | None = None
        self._exact = -1  # number of the last backward that was seen to run in full precision
        self._differentiated = (
            False  # whether a backward of the running batch is to be differentiated itself
        )

    def note_exact(self) -> None:
        """Notes that the running backward is in full precision."""
        self._exact = backward_number()

    def note_differentiated(self) -> None:
        """Notes that the running backward makes a graph of its own (create_graph=True)."""
        self._differentiated = True

    def why_not_of_rows(self, layer_is_trained: bool) -> str:
        """Returns why a weight of a factored layer has a gradient that is in no row.

        Args:
            layer_is_trained: whether its layer, and the model, are in training mode.
        """
        if not layer_is_trained:
            return (
                "came from a forward in eval mode, which records no rows: call model.train()"
                f" before it {_PARTS}"
            )
        return _TWICE if self._differentiated else _OUTSIDE

    def is_exact(self) -> bool:
        """Returns whether that was noted of the running backward."""
        return -1 != self._exact == backward_number()

    def open(self, sizes: frozenset[int] | None = None) -> None:
        """Starts the next pass, of a batch of one of these sizes, if they are known."""
        self.number += 1
        self.tag = self.number
        self._sizes = sizes
        self._differentiated = self._differentiated and self.number - 1 > self.used

    def close(self) -> None:
        """Ends the pass."""
        self.tag = self._sizes = None

    def require_one(self, tag: int | None) -> None:
        """Raises SequenceError for rows of a layer that ran outside of a pass, where the batch has had none so far."""
        # PRIVACY: parts are run past the checks of a forward: buffers, records that reach each other, the batch
        # (test_parts_of_a_model_make_no_rows_without_the_model); a reentrant checkpoint runs after the model has
        if tag is None and self.number == self.used:
            raise SequenceError(
                "the attached model itself must be called, in training mode (model.train()), not"
                " its parts: move what combines them into its forward, or attach the module that"
                " you call"
            )

    def require_batch(self, layer: nn.Module, x: Tensor, dim: int) -> None:
        """Raises SequenceError if the input of a layer is sparse, or cannot have the batch in its dimension `dim`."""
        shape = x.shape
        if x.layout is not torch.strided:
            raise SequenceError(
                f"input of {layer} must be dense (got {x.layout}), since rows of sparse ones are"
                " not known: call x.to_dense() before the model, or give indices to an"
                " EmbeddingBag"
            )
        if self._sizes and (len(shape) <= dim or shape[dim] not in self._sizes):
            # PRIVACY: rows would be times or parts of a record, or one row for all of them
            # (test_a_layer_that_sees_no_batch_is_refused); no size in the message, that of the draw is private
            raise SequenceError(
                f"dimension {dim} of the input of {layer} must be the batch, as in the inputs of"
                " the model: expand constants to one per record, leave time out of it, do not cut"
                " the batch up, and say where it is by dp.attach(model, batch_first=...)"
            )


def forget_uses(params: Iterable[nn.Parameter], layers: Iterable[nn.Module]) -> None:
    """Forgets what Opacus' hooks have noted of forwards that no backward followed."""
    for p in params:
        p._forward_counter = 0  # type: ignore[attr-defined]
        p.__dict__.pop("_current_grad_sample", None)
    for layer in layers:
        layer.__dict__.pop("activations", None)
        layer.__dict__.pop("max_batch_len", None)
