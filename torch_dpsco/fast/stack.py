"""Linear layers of a Sequential and the activations between them, recorded as one.

Narrow layers spend most of a step in calls: each recorded layer is a node of the graph, with checks of its own. So an
`nn.Sequential` of an attached model gets a forward of its own that runs each stack, Linear layers with nothing between
them but activations of `_ACTIVATIONS`, as one node with one check. Outputs, rows and gradients have the same bits as
those of the layers one by one (gradients of gradients are sums in another order). Layers run one by one where somebody
could see the difference: hooks, layers in eval mode, autocast, compilers, tensors of other classes. What is proved of a
layer's rows holds for these, since the bits are equal (test_a_stack_has_the_bits_of_its_layers_one_by_one).

Source: docs/proofs/rounding.md#closed-forms-and-other-rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_dpsco import compat
from torch_dpsco.rows.layers.recorded import Use, is_recorded, make_ready, reaches, records

_ops: Any = torch.ops.aten


class _Activation(NamedTuple):
    """How an activation is run and differentiated, as autograd does it.

    Args:
        run: (module, input) -> output, never in place.
        gradient: (module, gradient in its output, output or input) -> gradient in its input.
        by_output: whether from the output.
    """

    run: Callable[[Any, Tensor], Tensor]
    gradient: Callable[[Any, Tensor, Tensor], Tensor]
    by_output: bool


_ACTIVATIONS: dict[type[nn.Module], _Activation] = {
    nn.ReLU: _Activation(
        lambda _, x: torch.relu(x), lambda _, g, y: _ops.threshold_backward(g, y, 0), True
    ),
    nn.Tanh: _Activation(
        lambda _, x: torch.tanh(x), lambda _, g, y: _ops.tanh_backward(g, y), True
    ),
    nn.Sigmoid: _Activation(
        lambda _, x: torch.sigmoid(x), lambda _, g, y: _ops.sigmoid_backward(g, y), True
    ),
    nn.SiLU: _Activation(
        lambda _, x: F.silu(x), lambda _, g, x: _ops.silu_backward(g, x), False
    ),
    nn.GELU: _Activation(
        lambda m, x: F.gelu(x, approximate=m.approximate),
        lambda m, g, x: _ops.gelu_backward(g, x, approximate=m.approximate),
        False,
    ),
}


class StackedForward:
    """The forward of a Sequential with recorded Linear layers, kept on the Sequential itself.

    Args:
        module: it.
    """

    of_class = True  # its outputs are those of the forward of the module's class

    def __init__(self, module: nn.Sequential) -> None:
        self._module = module

    def __call__(self, input: Any) -> Any:
        """Applies the modules one after another."""
        plain = torch.compiler.is_compiling() or not torch.is_grad_enabled()
        if plain or compat.some_global_hook():
            return nn.Sequential.forward(self._module, input)  # type: ignore[no-untyped-call]
        modules = list(self._module._modules.values())
        start = 0
        while start < len(modules):
            after = type(modules[start + 1]) if start + 1 < len(modules) else None
            may_stack = after is nn.Linear or after in _ACTIVATIONS
            stack = modules[start : _end(modules, start) if may_stack else start + 1]
            several = len(stack) > 1 and type(input) is Tensor
            if several and not torch.is_autocast_enabled(input.device.type):
                input = _run(stack, input)
                start += len(stack)
            else:
                input = stack[0](input)
                start += 1
        return input


def _end(modules: Sequence[Any], start: int) -> int:
    """Returns where the stack that starts with a module ends, after its last Linear layer; at least start + 1."""
    end = start + 1
    for place in range(start, len(modules)):
        module = modules[place]
        linear = is_recorded(module) and type(module) is nn.Linear
        if not compat.is_plain(module) or not (
            linear or (place > start and type(module) in _ACTIVATIONS)
        ):
            break
        if linear:
            if not records(module) or module.passes is not modules[start].passes:
                break
            end = place + 1
    return end


class _Step(NamedTuple):
    """A Linear layer with the number of its parameters, or an activation with none."""

    module: Any
    weights: int


def _run(modules: Sequence[Any], x: Tensor) -> Tensor:
    first = modules[0]
    first.passes.require_batch(first, x, 0)
    steps = []
    params = []
    for module in modules:
        weights = []
        if type(module) is nn.Linear:
            make_ready(module)
            weights = [
                p for p in map(module._parameters.get, ("weight", "bias")) if p is not None
            ]
        steps.append(_Step(module, len(weights)))
        params += weights
    out: Tensor = _Stack.apply(first.kind.prepare(first, x), steps, *params)
    return out


def _values(steps: Sequence[_Step], x: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """Returns the input, and the outputs of all steps."""
    found = [x]
    at = 0
    for module, weights in steps:
        kind = _ACTIVATIONS.get(type(module))
        x = F.linear(x, *params[at : at + weights]) if kind is None else kind.run(module, x)
        at += weights
        found.append(x)
    return found


class _Stack(torch.autograd.Function):
    """A stack whose backward keeps the rows of its layers, and gives no gradient to their parameters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, steps: Sequence[_Step], *params: Tensor) -> Tensor:
        values = _values(steps, x, params)
        kept = [
            after if not weights and _ACTIVATIONS[type(module)].by_output else before
            for (module, weights), (before, after) in zip(steps, pairwise(values), strict=True)
        ]
        ctx.save_for_backward(*kept, *params)
        ctx.steps = steps
        ctx.tag = steps[0].module.passes.tag
        ctx.dpsco_watch = None  # as of a recorded layer
        out = values[-1]
        return compat.unsafe_view(out, out.shape) if out._is_view() else out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.dpsco_watch is not None:
            # PRIVACY: as a hook on the output would (test_the_last_layer_or_stack_looks_at_each_backward)
            ctx.dpsco_watch(grad)
        steps = ctx.steps
        saved = ctx.saved_tensors
        wanted = ctx.needs_input_grad[0]
        kept = saved[: len(steps)]
        params = saved[len(steps) :]
        places = ctx.next_functions[1:]
        g = grad.detach()
        end = len(params)
        with torch.no_grad():
            for (module, weights), value in zip(reversed(steps), reversed(kept), strict=True):
                if not weights:
                    g = _ACTIVATIONS[type(module)].gradient(module, g, value)
                    continue
                start = end - weights
                use = Use(module, value.detach(), params[start].detach(), (), g)
                if reaches(places[start:end]):
                    module.tape.record(ctx.tag, use)
                if start or wanted:
                    g = module.kind.input_gradient(use)
                end = start
        if torch.is_grad_enabled():  # the gradient of a gradient is wanted too
            steps[0].module.passes.differentiated = True
        if wanted and torch.is_grad_enabled():
            (g,) = torch.autograd.grad(
                _values(steps, kept[0], params)[-1], kept[0], grad, create_graph=True
            )
        return g if wanted else None, *[None] * (len(params) + 1)


def _has_stack(module: nn.Module) -> bool:
    if type(module) is not nn.Sequential or "forward" in module.__dict__:
        return False
    layers = [child for child in module._modules.values() if type(child) not in _ACTIVATIONS]
    linear = [type(layer) is nn.Linear and is_recorded(layer) for layer in layers]
    return (True, True) in pairwise(linear)


def run_as_one(modules: Sequence[nn.Module]) -> None:
    """Gives the Sequentials whose layers are recorded a forward of their own."""
    for module in modules:
        if isinstance(module, nn.Sequential) and _has_stack(module):
            module.forward = StackedForward(module)  # type: ignore[method-assign]
