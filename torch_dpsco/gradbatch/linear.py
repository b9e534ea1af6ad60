"""A Linear layer whose backward keeps the two factors of its per-sample gradients instead of forming a weight gradient.

`attach` turns an `nn.Linear` into a `FactoredLinear` by its `__class__`, which survives deepcopy, pickle and
`state_dict`; parameters, names and eval behavior are unchanged. Each use of the layer in a training forward of the
attached model is recorded with the number of that forward (its *pass*): pairs of the same pass belong to the same rows
(a layer used twice) and are summed, pairs of different passes are different rows and are concatenated.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_dpsco.errors import SequenceError
from torch_dpsco.gradbatch.base import Block
from torch_dpsco.gradbatch.dense import DenseBlock
from torch_dpsco.gradbatch.factored import FactoredBlock

__all__ = ["HALF", "FactoredLinear", "PassCounter", "Tape", "batch_sizes", "require_full_precision"]

HALF = (torch.bfloat16, torch.float16)


def require_full_precision(backprops: Tensor) -> None:
    """Raises SequenceError for half-precision gradients of a mean loss: one record more would move all of them."""
    if backprops.dtype in HALF:
        raise SequenceError(
            "a backward in half precision needs a loss that sums over the batch: dp.attach(model, "
            "loss_reduction='sum') and criterion(..., reduction='sum'); the optimizer divides by the batch size"
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
    parts = [batch_sizes(part, dim) for part in (inputs.values() if isinstance(inputs, dict) else inputs)]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    lengths = [frozenset([len(inputs)])] if isinstance(inputs, list) else []  # a record per entry
    return frozenset().union(*known, *lengths)


class PassCounter:
    """Numbers the training forwards of an attached model."""

    def __init__(self) -> None:
        self.number = 0
        self.active = False
        self._sizes: frozenset[int] | None = None

    def open(self, sizes: frozenset[int] | None = None) -> None:
        """Starts the next pass, of a batch of one of these sizes, if they are known."""
        self.number += 1
        self.active, self._sizes = True, sizes

    def close(self) -> None:
        """Ends the pass."""
        self.active, self._sizes = False, None

    def require_batch(self, layer: nn.Module, shape: torch.Size, dim: int) -> None:
        """Raises SequenceError if the input of a layer cannot have the batch in its dimension `dim`."""
        if self._sizes and (len(shape) <= dim or shape[dim] not in self._sizes):
            # PRIVACY: rows would be times or parts of a record, or one row for all of them
            # (test_a_layer_that_sees_no_batch_is_refused); no size in the message, that of the draw is private
            raise SequenceError(
                f"dimension {dim} of the input of {layer} must be the batch, as in the inputs of the model: expand "
                f"constants to one per record, leave time out of it, do not cut the batch up, and say where it is by "
                f"dp.attach(model, batch_first=...)"
            )

    @property
    def tag(self) -> int | None:
        """Number of the running pass, None outside of one."""
        return self.number if self.active else None


class Tape:
    """The pairs (input, gradient in the output) that one layer recorded since they were last taken.

    Args:
        scale_by_batch: whether the loss is a mean over the batch, so that per-sample gradients are B times as large.
    """

    def __init__(self, *, scale_by_batch: bool) -> None:
        self.scale_by_batch = scale_by_batch
        self.weight: nn.Parameter | None = None  # the layer's trained parameters, set with each pair
        self.bias: nn.Parameter | None = None
        self.pairs: list[tuple[int | None, Tensor, Tensor]] = []

    def record(self, tag: int | None, acts: Tensor, backprops: Tensor) -> None:
        """Keeps one pair; raises SequenceError where rows could not be told apart."""
        if acts.dim() < 2:
            raise SequenceError(f"input of a Linear layer must have a batch dimension (got shape {tuple(acts.shape)})")
        if tag is None and self.pairs:
            raise SequenceError(
                "a layer was used twice outside of a forward of the attached model, so that its rows cannot be told "
                "apart; call the attached model itself, or attach the module that you call"
            )
        if self.scale_by_batch:
            require_full_precision(backprops)
            backprops = backprops * acts.shape[0]
        self.pairs.append((tag, acts, backprops))

    def clear(self) -> None:
        """Forgets all pairs."""
        self.pairs = []

    def blocks(self, *, weight: bool, bias: bool) -> list[Block]:
        """Returns the rows of the trained ones of weight and bias: factored if possible, else dense."""
        passes: dict[int | None, list[tuple[Tensor, Tensor]]] = {}
        for tag, acts, backprops in sorted(self.pairs, key=lambda pair: pair[0] or 0):
            passes.setdefault(tag, []).append((acts, backprops))
        if all(len(uses) == 1 and uses[0][0].dim() == 2 for uses in passes.values()):
            pairs = [uses[0] for uses in passes.values()]
            acts, backprops = pairs[0] if len(pairs) == 1 else (torch.cat(side) for side in zip(*pairs, strict=True))
            return [FactoredBlock(acts, backprops, weight=weight, bias=bias)]
        # a layer used twice in a pass, or on sequences: its factors do not give the norm, so the rows are formed
        blocks: list[Block] = []
        if weight:
            rows = [sum(torch.einsum("b...o,b...i->boi", g, a.to(g.dtype)) for a, g in u) for u in passes.values()]
            blocks.append(DenseBlock(torch.cat(rows)))  # type: ignore[arg-type]
        if bias:
            rows = [sum(g.flatten(1, -2).sum(1) if g.dim() > 2 else g for _, g in u) for u in passes.values()]
            blocks.append(DenseBlock(torch.cat(rows)))  # type: ignore[arg-type]
        return blocks


class _RecordedLinear(torch.autograd.Function):
    """y = x W^T + c, with a backward that records (x, dy) and gives no gradient to W and c."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: FactoredLinear) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.tag = layer, layer.passes.tag
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        if _reaches_weights(ctx):
            ctx.layer.keep(ctx.tag, x.detach(), grad.detach())
        grad_x = (grad.to(weight.dtype) @ weight).to(x.dtype) if ctx.needs_input_grad[0] else None
        return grad_x, None, None, None


def _reaches_weights(node: Any) -> bool:
    """Returns whether the running backward wants gradients of weight or bias: attacks and saliency maps do not."""
    try:
        following = [after for after, _ in node.next_functions[1:3] if after is not None]
        return any(torch._C._will_engine_execute_node(after) for after in following)
    except RuntimeError:  # so torch says of torch.autograd.grad in the weights themselves
        return True


class FactoredLinear(nn.Linear):
    """An attached `nn.Linear`. Made by `attach` only; `detach` turns it back."""

    tape: Tape
    passes: PassCounter

    def keep(self, tag: int | None, acts: Tensor, backprops: Tensor) -> None:
        """Records a pair and marks the layer's trained parameters as having rows on this tape."""
        tape = self.tape
        tape.record(tag, acts, backprops)
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        tape.weight = weight if weight is not None and weight.requires_grad else None
        tape.bias = bias if bias is not None and bias.requires_grad else None
        for p in (tape.weight, tape.bias):
            if p is not None:
                p.grad_factors = tape  # type: ignore[attr-defined]

    def forward(self, input: Tensor) -> Tensor:
        """Applies the layer; in training with gradients enabled its backward records rows."""
        params = [p for p in self._parameters.values() if p is not None]
        if not (self.training and torch.is_grad_enabled() and any(p.requires_grad for p in params)):
            return super().forward(input)
        self.passes.require_batch(self, input.shape, 0)
        for p in params:
            p.grad = None  # one that is there after the backward then comes from outside of the layer (see attach)
        out: Tensor = _RecordedLinear.apply(input, self.weight, self.bias, self)
        return out
