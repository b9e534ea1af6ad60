"""Layers whose backward keeps their per-sample gradients and forms no gradient of the weights.

`attach` turns a layer into its recorded kind by its `__class__` (`table.RECORDED`), which survives deepcopy, pickle
and `state_dict`; parameters, names and eval behavior are unchanged. So one backward to the layers' outputs gives all
rows. Each use of a layer in a training forward of the attached model is kept on its tape with the number of that
forward (its *pass*): uses of the same pass belong to the same rows (a layer used twice) and are summed, those of
different passes are different rows and are concatenated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_dpsco import compat
from torch_dpsco.errors import SequenceError
from torch_dpsco.rows.base import Block
from torch_dpsco.rows.layers.saved_factors import Kept, added, joined
from torch_dpsco.rows.precision import require_full_precision


class Tape:
    """What one layer kept of its rows since they were last taken.

    Args:
        scale_by_batch: whether the loss is a mean over the batch, so that per-sample gradients are B times as large.
        trial: what the layer must pass with its first input, None for a layer of the library's own kinds.
    """

    def __init__(self, *, scale_by_batch: bool, trial: Callable[[Any, Tensor], None] | None = None) -> None:
        self.scale_by_batch, self.trial = scale_by_batch, trial
        self.weight: nn.Parameter | None = None  # the layer's trained parameters, set with each use
        self.bias: nn.Parameter | None = None
        self.uses: list[tuple[int | None, Kept]] = []

    def record(self, tag: int | None, use: Use) -> None:
        """Keeps the rows of one use; raises SequenceError where they could not be told apart."""
        if tag is None and self.uses:
            raise SequenceError(
                "a layer was used twice outside of a forward of the attached model, so that its rows cannot be told "
                "apart; call the attached model itself, or attach the module that you call"
            )
        layer = use.layer
        self.weight, self.bias = (_trained(layer, name) for name in ("weight", "bias"))
        if self.scale_by_batch:
            require_full_precision(use.grad)
        self.uses.append((tag, layer.kind.rows(use)))
        for p in (self.weight, self.bias):
            if p is not None:
                p.grad_factors = self  # type: ignore[attr-defined]

    def __getstate__(self) -> dict[str, Any]:
        if self.uses:
            # PRIVACY: a part of a model is copied without the model's own check
            # (test_a_part_of_a_model_is_neither_saved_nor_copied_with_rows_in_it)
            raise SequenceError(
                "a layer must be saved or copied between steps: it holds rows of records now; call optimizer.step() or "
                "optimizer.discard() first"
            )
        return self.__dict__

    @property
    def tags(self) -> set[int | None]:
        """Numbers of the passes."""
        return {tag for tag, _ in self.uses}

    def clear(self) -> None:
        """Forgets all rows."""
        self.uses = []

    def blocks(self, *, weight: bool, bias: bool) -> list[Block]:
        """Returns the rows of weight and bias, or of one of them, in the order of the passes."""
        passes: dict[int | None, list[Kept]] = {}
        for tag, kept in sorted(self.uses, key=lambda use: use[0] or 0):
            passes.setdefault(tag, []).append(kept)
        return joined([added(uses) for uses in passes.values()]).blocks(weight=weight, bias=bias)


def _trained(layer: nn.Module, name: str) -> nn.Parameter | None:
    p = layer._parameters.get(name)
    return p if p is not None and p.requires_grad else None


class Use(NamedTuple):
    """One use of a layer, as its backward sees it.

    Args:
        layer: recorded; has `tape`, `passes` and `kind`.
        x: its input.
        weight: its weight.
        saved: what its kind saved in the forward.
        grad: gradient in its output.
    """

    layer: Any
    x: Tensor
    weight: Tensor
    saved: tuple[Tensor, ...]
    grad: Tensor

    @property
    def trained(self) -> dict[str, bool]:
        """Whether weight and bias are trained."""
        return {name: _trained(self.layer, name) is not None for name in ("weight", "bias")}

    @property
    def scale(self) -> int:
        """What rows must be multiplied by: the batch size for mean losses."""
        return self.x.shape[0] if self.layer.tape.scale_by_batch else 1


class Kind(ABC):
    """How layers of one kind are run, and what their backward needs. Stateless.

    `rows` is enough for a layer of one tensor, batch first, whose trained parameters are named weight and bias and
    whose forward draws nothing at random; the other hooks save time, or admit other inputs.
    """

    def prepare(self, layer: Any, x: Tensor) -> Tensor:
        """Returns the input that is recorded, differentiable in x; raises SequenceError if it has no batch."""
        require_dims(layer, x, 2)
        return x

    def forward(self, layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
        """Returns the output, equal to that of the plain layer, and tensors to save."""
        return (plain_forward(layer)(x),)

    @abstractmethod
    def rows(self, use: Use) -> Kept:
        """Returns the rows of a use: of each record, times `use.scale`."""

    def input_gradient(self, use: Use) -> Tensor:
        """Returns the gradient in x, differentiable in x, weight and grad."""
        twice = torch.is_grad_enabled()  # the gradient of a gradient is wanted too: torch's backward may have none
        with torch.enable_grad():
            x = use.x if twice else use.x.detach().requires_grad_()
            out = self.forward(use.layer, x, use.weight, use.layer._parameters.get("bias"))[0]
        return torch.autograd.grad(out, x, use.grad.to(out.dtype), create_graph=twice)[0]


def plain_forward(layer: Any) -> Callable[[Tensor], Tensor]:
    """Returns the forward of a recorded layer as it was before."""
    before: Any = type(layer).__base__
    return partial(before.forward, layer)


def require_dims(layer: nn.Module, x: Tensor, least: int, most: int | None = None) -> None:
    """Raises SequenceError for an input without a batch dimension."""
    if not least <= x.dim() <= (x.dim() if most is None else most):
        raise SequenceError(f"input of {layer} must have a batch dimension (got {x.dim()} dimensions)")


def run(layer: Any, x: Tensor) -> Tensor:
    """Applies a recorded layer; in training with gradients enabled its backward keeps rows."""
    params = [p for p in layer._parameters.values() if p is not None]
    if not (layer.training and torch.is_grad_enabled() and any(p.requires_grad for p in params)):
        return plain_forward(layer)(x)
    return _recorded_eagerly(layer, x) if torch.compiler.is_compiling() else _recorded(layer, x)


def _recorded(layer: Any, x: Tensor) -> Tensor:
    layer.passes.require_batch(layer, x.shape, 0)
    if any(p is not None and p.requires_grad and not hasattr(p, "dpsco_reset") for p in layer._parameters.values()):
        # PRIVACY: rows at one point would be taken for rows at another
        # (test_weights_that_attach_has_not_seen_are_refused)
        raise SequenceError(
            f"{type(layer).__name__} has trained parameters that it did not have at dp.attach (functional_call, "
            f"load_state_dict(assign=True), a copy of a part): attach the model after such changes, or use one that is "
            f"detached"
        )
    for p in (p for p in layer._parameters.values() if p is not None):
        p.grad = None  # one that is there after the backward then comes from outside of the layer (see attach)
    if layer.tape.trial is not None:
        # PRIVACY: rows of a formula that is not the library's (test_a_wrong_kind_is_refused_before_it_sees_a_record)
        layer.tape.trial(layer, x)
        layer.tape.trial = None
    x, bias = layer.kind.prepare(layer, x), layer._parameters.get("bias")
    out: Tensor = _Recorded.apply(x, layer.weight, bias, layer)
    return out


# A compiled model breaks its graph here: the number of a pass must not become a constant of it.
_recorded_eagerly: Callable[[Any, Tensor], Tensor] = torch.compiler.disable(_recorded)


class _Recorded(torch.autograd.Function):
    """A layer whose backward keeps rows, and gives no gradient to its parameters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Any) -> Tensor:
        out: Tensor
        out, *saved = layer.kind.forward(layer, x, weight, bias)
        ctx.save_for_backward(x, weight, *saved)
        ctx.layer, ctx.tag = layer, layer.passes.tag
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        x, weight, *saved = ctx.saved_tensors
        layer, more = ctx.layer, tuple(saved)
        if _reaches_weights(ctx):
            with torch.no_grad():
                layer.tape.record(ctx.tag, Use(layer, x.detach(), weight.detach(), more, grad.detach()))
        wanted = ctx.needs_input_grad[0]
        return layer.kind.input_gradient(Use(layer, x, weight, more, grad)) if wanted else None, None, None, None


def _reaches_weights(node: Any) -> bool:
    """Returns whether the running backward wants gradients of weight or bias: attacks and saliency maps do not."""
    try:
        following = [after for after, _ in node.next_functions[1:3] if after is not None]
        return any(compat.will_run(after) for after in following)
    except RuntimeError:  # so torch says of torch.autograd.grad in the weights themselves
        return True
