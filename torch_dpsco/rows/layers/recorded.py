"""Layers whose backward keeps their per-sample gradients and forms no gradient of the weights.

`attach` gives a layer a forward of its own (`RecordedForward`), which survives deepcopy and pickle; its class, its
parameters, names and eval behavior are unchanged. So one backward to the layers' outputs gives all rows. Each use of a
layer in a training forward of the attached model is kept on its tape with the number of that forward (its *pass*): uses
of the same pass belong to the same rows (a layer used twice) and are summed, those of different passes are different
rows and are concatenated.

The backward keeps rows in the cheapest form. The rows of a layer y_t = W a_t + c on sequences (T = 1 for vectors; a
convolution is such a layer on patches) are

    dW_i = sum_t g_it a_it^T,    dc_i = sum_t g_it,    g_it = gradient of record i's loss in y_it

and are either formed in the backward, (B, out, in), or left as the two factors, (B, T, in) and (B, T, out), of which
`SequenceBlock` takes norms and sums. The rule: form them if out * in <= 4 T (out + in). Formed rows then take at most
4 times the memory of the factors, which the backward frees at once, and cost what the weight gradient costs: their
norms and weighted sums are one pass over them. Factors need float64, for their norms because sum_st (g_s.g_t)(a_s.a_t)
cancels, and for their sums because the terms may be larger than the row; so counting flops alone (2 T^2 < out * in)
would choose them too often. Vectors (T = 1 of Linear) have no cancellation and are never formed.

T, to which a batch is padded, is taken for public here as in every layer: the longest record decides it, and with it
the last bits of all rows and the choice of the form. So both forms enlarge norms by the same factor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_dpsco import compat
from torch_dpsco.compat import is_sharded
from torch_dpsco.errors import SequenceError
from torch_dpsco.native import HALF, inexact_mean, require_full_precision
from torch_dpsco.rows.blocks import (
    MAX_TIMES,
    Block,
    DenseBlock,
    FactoredBlock,
    SequenceBlock,
    from_kernel,
    outer_sums,
    work_dtype,
)

_NAMES = ("weight", "bias")


class Kept(ABC):
    """Rows of the weight (and bias) of one layer."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of rows."""

    @staticmethod
    @abstractmethod
    def joined(parts: Sequence[Any], *, same: bool) -> Kept:
        """Returns the sums of rows of this class, which are of the `same` records, or all, one after another."""

    @abstractmethod
    def formed(self) -> Formed:
        """Returns the rows themselves."""

    @abstractmethod
    def blocks(self, *, weight: bool, bias: bool) -> list[Block]:
        """Returns the rows of weight and bias, or of one of them."""


def joined(parts: Sequence[Kept], *, same: bool) -> Kept:
    """Returns the rows of several uses, see `Kept.joined`."""
    if same and len({len(part) for part in parts}) > 1:
        # PRIVACY: a use without a batch dimension would be added to every row
        # (test_uses_of_a_layer_that_see_different_numbers_of_records_are_refused)
        raise SequenceError(
            "a layer that is used several times in a forward must see all records each time"
        )
    if len({type(part) for part in parts}) > 1:
        parts = [part.formed() for part in parts]
    return parts[0] if len(parts) == 1 else parts[0].joined(parts, same=same)


class Formed(Kept):
    """The rows themselves.

    Args:
        weight: (B, *shape), None if it is not trained.
        bias: (B, *shape) likewise; one of them is there.
    """

    def __init__(self, weight: Tensor | None, bias: Tensor | None) -> None:
        self.parts = [weight, bias]

    def __len__(self) -> int:
        return len(next(part for part in self.parts if part is not None))

    @staticmethod
    def joined(parts: Sequence[Any], *, same: bool) -> Kept:
        """Returns the sums, or the rows one after another."""
        found: list[Tensor | None] = []
        for column in zip(*(part.parts for part in parts), strict=True):
            there = [part for part in column if part is not None]
            if len(there) not in (0, len(parts)):
                raise SequenceError(
                    "requires_grad of a weight or bias must not change between the backwards of a step"
                )
            join = _sum if same else torch.cat
            found.append(join(there) if there else None)
        return Formed(*found)

    def formed(self) -> Formed:
        """Returns itself."""
        return self

    def blocks(self, *, weight: bool, bias: bool) -> list[Block]:
        """Returns a dense block, if there are rows of what is chosen."""
        parts = zip(self.parts, (weight, bias), strict=True)
        rows = [part for part, chosen in parts if chosen and part is not None]
        return [DenseBlock(*rows)] if rows else []


def _sum(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(parts)).sum(0)


def leaves_factors(times: int, out: int, width: int) -> bool:
    """Returns whether rows of T pairs take less as factors; see the rule above."""
    return times <= MAX_TIMES and out * width > 4 * times * (out + width)


def pairs(
    acts: Tensor, backprops: Tensor, shape: torch.Size, *, weight: bool, bias: bool, scale: int
) -> Kept:
    """Returns the rows of a layer y_t = W a_t + c in the form that costs least.

    Args:
        acts: (B, T, in) inputs.
        backprops: (B, T, out) gradients in the outputs.
        shape: of W, of out * in numbers.
        weight: whether W is trained.
        bias: whether c is.
        scale: all rows are multiplied by it.
    """
    trained = {"weight": weight, "bias": bias}
    times, width = acts.shape[1:]
    out = backprops.shape[2]
    # float64 has no wider precision in which the norms of factors could be certified
    double = torch.float64 in (acts.dtype, backprops.dtype)
    if times == 1 and len(shape) == 2:
        return Factors(acts[:, 0], backprops[:, 0], shape, trained, scale)
    if weight and not double and leaves_factors(times, out, width):
        return Factors(acts, backprops, shape, trained, scale)
    return _formed(acts, backprops, shape, trained, scale)


def _formed(
    acts: Tensor,
    backprops: Tensor,
    shape: torch.Size,
    trained: Mapping[str, bool],
    scale: int = 1,
) -> Formed:
    weight = bias = None
    if trained["weight"]:
        weight = outer_sums(acts, backprops, scale).view(len(acts), *shape)
    if trained["bias"]:
        bias = backprops.sum(1, dtype=work_dtype(backprops.dtype)).mul_(scale)
    return Formed(weight, bias)


class Factors(Kept):
    """Rows that are left as factors, which nobody may write to.

    Args:
        acts: inputs of the layer, (B, in) or sequences (B, T, in).
        backprops: gradients in the outputs, likewise.
        shape: of the weight, of out * in numbers.
        trained: whether the weight is, as it is where they are sequences, and whether there is a bias that is.
        scale: vectors are multiplied by it.
    """

    def __init__(
        self,
        acts: Tensor,
        backprops: Tensor,
        shape: torch.Size,
        trained: Mapping[str, bool],
        scale: int = 1,
    ) -> None:
        if scale != 1 and (acts.dim() > 2 or backprops.shape[1] == 1):
            backprops = backprops * scale
            scale = 1  # else later: that saves a pass over memory
        self._acts = acts
        self._backprops = backprops
        self._shape = shape
        self._trained = trained
        self._scale = scale
        self._versions = acts._version, backprops._version

    def __len__(self) -> int:
        return self._acts.shape[0]

    def _pairs(self) -> tuple[Tensor, Tensor]:
        """Returns inputs and gradients, after checking that they are as they were."""
        if (self._acts._version, self._backprops._version) != self._versions:
            # PRIVACY: a buffer that has the next batch by now would put its records into this step
            # (test_an_input_that_is_overwritten_before_the_step_is_refused)
            raise SequenceError(
                "the input of a layer was overwritten between backward and step: write to what a"
                " forward has made after optimizer.step(), or to a copy of it"
            )
        return self._acts, self._backprops

    def _sequences(self) -> tuple[Tensor, Tensor]:
        """Returns inputs and gradients, (B, T, in) and (B, T, out)."""
        acts, backprops = self._pairs()
        if acts.dim() > 2:
            return acts, backprops
        return acts.unsqueeze(1), (backprops * self._scale).unsqueeze(1)

    @staticmethod
    def joined(parts: Sequence[Any], *, same: bool) -> Kept:
        """Returns one longer sequence per record, or sequences of one length: pairs of zeros add nothing."""
        sides = list(zip(*(part._sequences() for part in parts), strict=True))
        shape = parts[0]._shape
        trained = parts[0]._trained
        if same:
            acts, backprops = (torch.cat(side, dim=1) for side in sides)
            return pairs(acts, backprops, shape, **trained, scale=1)
        times = max(part.shape[1] for part in sides[0])
        acts, backprops = (
            torch.cat([F.pad(part, (0, 0, 0, times - part.shape[1])) for part in side])
            for side in sides
        )
        if times == 1:
            acts = acts[:, 0]
            backprops = backprops[:, 0]
        return Factors(acts, backprops, shape, trained)

    def formed(self) -> Formed:
        """Returns the rows."""
        return _formed(*self._sequences(), self._shape, self._trained)

    def blocks(self, *, weight: bool, bias: bool) -> list[Block]:
        """Returns a factored block; or one of sequences, and the rows of the bias."""
        acts, backprops = self._pairs()
        if acts.dim() == 2:
            return [FactoredBlock(acts, backprops, weight=weight, bias=bias, scale=self._scale)]
        given = acts, backprops, self._shape
        found: list[Block] = []
        if weight:
            found.append(from_kernel("rows.sequences", *given) or SequenceBlock(*given))
        sums = _formed(acts, backprops, self._shape, {"weight": False, "bias": bias})
        return found + sums.blocks(weight=False, bias=bias)


class Tape:
    """What one layer kept of its rows since they were last taken.

    Args:
        trial: what the layer must pass with its first input, None for a layer of the library's own kinds.
    """

    def __init__(self, trial: Callable[[Any, Tensor], None] | None = None) -> None:
        self.trial = trial
        self.weight: nn.Parameter | None = (
            None  # the layer's trained parameters, set with each use
        )
        self.bias: nn.Parameter | None = None
        self.uses: list[tuple[int | None, Kept]] = []

    def record(self, tag: int | None, use: Use) -> None:
        """Keeps the rows of one use; raises SequenceError where they could not be told apart."""
        if tag is None and self.uses:
            raise SequenceError(
                "a layer was used twice outside of a forward of the attached model, so that its"
                " rows cannot be told apart; call the attached model itself, or attach the module"
                " that you call"
            )
        layer = use.layer
        if tag is None:
            layer.passes.require_called()
        if layer.passes.mean:
            if use.grad.dtype in HALF:
                require_full_precision(use.grad)
            # a backward through the model's output has been looked at; one from its parts has not
            seen = layer.passes.exact == compat.backward_number() != -1
            if not seen and (problem := inexact_mean((layer,), [use.weight])):
                # PRIVACY: (test_a_mean_of_a_part_in_reduced_precision_is_refused)
                raise SequenceError(problem)
        parts = layer._parameters
        self.weight, self.bias = (
            # where weights are put together of shards, the optimizer has the shard
            getattr(parts[name], "dpsco_shard", parts[name]) if has else None
            for name, has in use.trained.items()
        )
        self.uses.append((tag, layer.kind.rows(use)))
        for p in (self.weight, self.bias):
            if p is not None:
                p.grad_factors = self

    def __getstate__(self) -> dict[str, Any]:
        if self.uses:
            # PRIVACY: a part of a model is copied without the model's own check
            # (test_a_part_of_a_model_is_neither_saved_nor_copied_with_rows_in_it)
            raise SequenceError(
                "a layer must be saved or copied between steps: it holds rows of records now; call"
                " optimizer.step() or optimizer.discard() first"
            )
        return self.__dict__

    def joined(self) -> Kept:
        """Returns the rows of all uses, in the order of the passes."""
        passes: dict[int | None, list[Kept]] = {}
        for tag, kept in sorted(self.uses, key=lambda use: use[0] or 0):
            passes.setdefault(tag, []).append(kept)
        found = [joined(uses, same=True) for uses in passes.values()]
        return joined(found, same=False)


class Use:
    """One use of a layer, as its backward sees it.

    Args:
        layer: recorded; has `tape`, `passes` and `kind`.
        x: its input.
        weight: its weight.
        saved: what its kind saved in the forward.
        grad: gradient in its output.

    Attributes:
        trained: whether weight and bias are.
        scale: what rows must be multiplied by: the batch size for mean losses.
    """

    def __init__(
        self, layer: Any, x: Tensor, weight: Tensor, saved: tuple[Tensor, ...], grad: Tensor
    ) -> None:
        self.layer = layer
        self.x = x
        self.weight = weight
        self.saved = saved
        self.grad = grad
        held = layer._parameters
        self.trained = {n: (p := held.get(n)) is not None and p.requires_grad for n in _NAMES}
        passes = layer.passes
        self.scale = x.shape[0] if passes.mean and not passes.exact_means else 1


class Kind(ABC):
    """How layers of one kind are run, and what their backward needs. Stateless.

    `rows` is enough for a layer of one tensor, batch first, whose trained parameters are named weight and bias and
    whose forward draws nothing at random; the other hooks save time, or admit other inputs.

    Attributes:
        trial: what a layer must pass with its first input; None for kinds of the library.
    """

    trial: Callable[[Any, Tensor], None] | None = None

    def prepare(self, layer: Any, x: Tensor) -> Tensor:
        """Returns the input that is recorded, differentiable in x; raises SequenceError if it has no batch."""
        if x.dim() < 2:
            require_dims(layer, x, 2)
        return x

    def forward(
        self, layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Returns the output, equal to that of the plain layer, and tensors to save."""
        return (plain_forward(layer)(x),)

    @abstractmethod
    def rows(self, use: Use) -> Kept:
        """Returns the rows of a use: of each record, times `use.scale`."""

    def input_gradient(self, use: Use) -> Tensor:
        """Returns the gradient in x, differentiable in x, weight and grad."""
        # the gradient of a gradient is wanted too: torch's backward may have none
        twice = torch.is_grad_enabled()
        with torch.enable_grad():
            x = use.x if twice else use.x.detach().requires_grad_()
            out = self.forward(use.layer, x, use.weight, use.layer._parameters.get("bias"))[0]
        return torch.autograd.grad(out, x, use.grad.to(out.dtype), create_graph=twice)[0]


class LinearKind(Kind):
    """y = x W^T + c for x (B, ..., in): keeps factors on vectors, the cheaper form on sequences (`pairs`)."""

    def forward(
        self, layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Returns the output."""
        return (F.linear(x, weight, bias),)

    def rows(self, use: Use) -> Kept:
        """Returns the factors, or the rows formed from them."""
        if use.x.dim() == 2:
            return Factors(use.x, use.grad, use.weight.shape, use.trained, use.scale)
        x, grad = (t.flatten(1, -2) for t in (use.x, use.grad))
        return pairs(x, grad, use.weight.shape, scale=use.scale, **use.trained)

    def input_gradient(self, use: Use) -> Tensor:
        """Returns grad W."""
        return (use.grad.to(use.weight.dtype) @ use.weight).to(use.x.dtype)


def plain_forward(layer: Any) -> Callable[[Tensor], Tensor]:
    """Returns the forward of a recorded layer as it was before."""
    return partial(type(layer).forward, layer)


def require_dims(layer: nn.Module, x: Tensor, least: int, most: int | None = None) -> None:
    """Raises SequenceError for an input without a batch dimension."""
    if not least <= x.dim() <= (x.dim() if most is None else most):
        raise SequenceError(
            f"input of {layer} must have a batch dimension (got {x.dim()} dimensions)"
        )


def records(layer: Any) -> bool:
    """Returns whether a recorded layer keeps rows of what it is called with now."""
    if not layer.training or layer.passes.paused or not torch.is_grad_enabled():
        return False
    return any(p is not None and p.requires_grad for p in layer._parameters.values())


class RecordedForward:
    """The forward of a recorded layer, kept on the layer itself; in training its backward keeps rows.

    Args:
        layer: it.
    """

    of_class = True  # its outputs are those of the forward of the layer's class

    def __init__(self, layer: nn.Module) -> None:
        self._layer: Any = layer

    def __call__(self, input: Tensor) -> Tensor:
        """Applies the layer."""
        layer = self._layer
        if not records(layer):
            plain: Tensor = type(layer).forward(layer, input)
            return plain
        if torch.compiler.is_compiling():
            # a compiled model breaks its graph here: the number of a pass must not become a constant of it
            broken: Tensor = torch.compiler.disable(RecordedForward.__call__)(self, input)
            return broken
        if not input.is_floating_point():
            input = layer.passes.spread(input)
        layer.passes.require_batch(layer, input, 0)
        make_ready(layer)
        if layer.tape.trial is not None:
            # PRIVACY: rows of a formula that is not the library's
            # (test_a_wrong_kind_is_refused_before_it_sees_a_record)
            layer.tape.trial(layer, input)
            layer.tape.trial = None
        x = layer.kind.prepare(layer, input)
        out: Tensor = _Recorded.apply(x, layer.weight, layer._parameters.get("bias"), layer)
        return out


def make_ready(layer: Any) -> None:
    """Drops the gradients of a recorded layer that is about to run; raises SequenceError if its weights are others."""
    for p in layer._parameters.values():
        if p is None:
            continue
        if p.requires_grad and "dpsco" not in p.__dict__:
            refuse_unknown(layer)
        p.grad = None  # one that is there after the backward then comes from outside of the layer (see attach)


class _Recorded(torch.autograd.Function):
    """A layer whose backward keeps rows, and gives no gradient to its parameters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Any) -> Tensor:
        out: Tensor
        out, *saved = layer.kind.forward(layer, x, weight, bias)
        ctx.save_for_backward(x, weight, *saved)
        ctx.layer = layer
        ctx.tag = layer.passes.tag
        ctx.dpsco_watch = None  # what the attachment does where this is the output of the model
        return compat.unsafe_view(out, out.shape) if out._is_view() else out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        if ctx.dpsco_watch is not None:
            # PRIVACY: as a hook on the output would, before torch refuses what a step has moved
            # (test_the_last_layer_or_stack_looks_at_each_backward)
            ctx.dpsco_watch(grad)
        x, weight, *saved = ctx.saved_tensors
        layer = ctx.layer
        use = Use(layer, x.detach(), weight.detach(), tuple(saved), grad.detach())
        if reaches(ctx.next_functions[1:3]):
            with torch.no_grad():
                layer.tape.record(ctx.tag, use)
        if torch.is_grad_enabled():  # the gradient of a gradient is wanted too
            layer.passes.differentiated = True
            use = Use(layer, x, weight, tuple(saved), grad)
        g = layer.kind.input_gradient(use) if ctx.needs_input_grad[0] else None
        return g, None, None, None


def reaches(weights: Iterable[tuple[Any, int]]) -> bool:
    """Returns whether the running backward wants gradients of some weights: attacks and saliency maps do not.

    Args:
        weights: their places in the graph, of the `next_functions` of a node.
    """
    try:
        return any(compat.will_run(after) for after, _ in weights if after is not None)
    except RuntimeError:  # so torch says of torch.autograd.grad in the weights themselves
        return True


def refuse_unknown(layer: nn.Module) -> NoReturn:
    """Raises SequenceError for a layer that runs with trained parameters that `attach` has not seen."""
    require_whole(layer)
    # PRIVACY: rows at one point would be taken for rows at another
    # (test_weights_that_attach_has_not_seen_are_refused)
    raise SequenceError(
        f"layer {type(layer).__name__} has trained parameters that it did not have at dp.attach"
        " (functional_call, load_state_dict(assign=True), requires_grad_, a copy of a part):"
        " attach the model after such changes, or use a copy of it that is detached"
    )


def require_whole(module: nn.Module, name: str = "") -> None:
    """Raises ValueError for a layer under `fully_shard`, FSDP 1 or `parallelize_module`."""
    # PRIVACY: a layer cut by tensor parallelism sees a part of each row, whose norm is too small
    # (test_layers_without_right_rows_are_refused_by_name_and_nothing_is_left,
    # test_a_wrapped_or_sharded_model_is_refused_by_name)
    if is_sharded(module) or any(
        is_sharded(p) for p in module._parameters.values() if p is not None
    ):
        raise ValueError(
            f"model must not be sharded (got {type(module).__name__} {name!r}): rows are clipped"
            " and noised for whole parameters; give every process the whole model, without FSDP or"
            " parallelize_module, or cut it by torch_dpsco.integrations.fsdp.fully_shard, see docs/distributed.md"
        )


RECORDED: dict[type[nn.Module], Kind] = {nn.Linear: LinearKind()}  # and those of `kinds`


def can_record(layer: nn.Module) -> bool:
    """Returns whether a layer is of a kind that is recorded; subclasses and parametrized weights are not."""
    names = {name for name, _ in layer.named_parameters()}
    return (
        type(layer) in RECORDED and names <= {"weight", "bias"} and "weight" in layer._parameters
    )


def is_recorded(layer: nn.Module) -> bool:
    """Returns whether `start_recording` was called on a layer."""
    return isinstance(layer.__dict__.get("tape"), Tape)


def start_recording(layer: Any, passes: Any) -> None:
    """Makes a layer recorded, in place; see `Tape`."""
    layer.kind = RECORDED[type(layer)]
    layer.tape = Tape(layer.kind.trial)
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
