"""Private interfaces of torch and Opacus, in one place: checked when the package is imported, with names in words.

Functions and modules whose name begins with an underscore are imported from here only. Attributes of modules,
parameters and optimizers are read where they are needed, and looked for here (`ATTRIBUTES`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torch_dpsco._loaded import need as _need

# Of every module, parameter, torch optimizer and Opacus optimizer.
ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "torch.nn.Module": (
        *(
            "_parameters",
            "_buffers",
            "_forward_hooks",
            "_forward_pre_hooks",
            "_backward_hooks",
            "_backward_pre_hooks",
        ),
        *("_modules", "_compiled_call_impl"),
    ),
    "torch.nn.Parameter": (
        "_version",
        "_is_view",
        "_backward_hooks",
        "_post_accumulate_grad_hooks",
    ),
    "torch.optim.Optimizer": ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
    "opacus.optimizers.DPOptimizer": ("_is_last_step_skipped",),
    "opacus.GradSampleModule": ("_module", "autograd_grad_sample_hooks"),
    "a parameter of opacus.GradSampleModule": ("_forward_counter", "grad_sample"),
}
_GLOBAL_HOOKS = (
    *(
        "_global_backward_pre_hooks",
        "_global_backward_hooks",
        "_global_forward_pre_hooks",
        "_global_forward_hooks",
    ),
    *("_global_forward_hooks_always_called", "_global_forward_hooks_with_kwargs"),
)
_GLOBAL_OPTIMIZER_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")


foreach_add_ = _need(torch, "_foreach_add_")
foreach_lerp_ = _need(torch, "_foreach_lerp_")
foreach_sub_ = _need(torch, "_foreach_sub_")
foreach_zero_ = _need(torch, "_foreach_zero_")
_unsafe_view = _need(torch.ops.aten, "_unsafe_view", "torch.ops.aten")
will_run = _need(torch._C, "_will_engine_execute_node")
_graph_task = _need(torch._C, "_current_graph_task_id")
without_subclasses = _need(torch._C, "DisableTorchFunctionSubclass")
_trees = _need(torch.utils, "_pytree")
tree_flatten = _need(_trees, "tree_flatten")
tree_leaves = _need(_trees, "tree_leaves")
tree_map = _need(_trees, "tree_map")
tree_unflatten = _need(_trees, "tree_unflatten")
_need(nn.modules.batchnorm, "_BatchNorm")
_need(nn.modules.conv, "_ConvNd")
_need(nn.modules.dropout, "_DropoutNd")
BatchNorm = nn.modules.batchnorm._BatchNorm
ConvNd = nn.modules.conv._ConvNd
DropoutNd = nn.modules.dropout._DropoutNd
DistributedDataParallel = nn.parallel.DistributedDataParallel
_need(DistributedDataParallel, "_active_ddp_module")
_module_hooks = [_need(nn.modules.module, name) for name in _GLOBAL_HOOKS]
_optimizer_module = import_module("torch.optim.optimizer")
_profiling = _need(torch.autograd, "_profiler_enabled")
_optimizer_hooks = [_need(_optimizer_module, name) for name in _GLOBAL_OPTIMIZER_HOOKS]


def backward_number() -> int:
    """Returns the number of the backward that runs in this thread, of which each has its own; -1 if none does."""
    return int(_graph_task())


def is_replicated(model: nn.Module) -> bool:
    """Returns whether `replicate` has taken a part of a model, or DistributedDataParallel runs a forward of it."""
    composed = sys.modules.get(
        "torch.distributed._composable.contract"
    )  # not there: nothing was replicated
    if composed is not None and any(
        "replicate" in (composed._get_registry(part) or ()) for part in model.modules()
    ):
        return True  # torch 2.6 does not say that its forwards are active (test_a_replica_is_known_before_it_is_called)
    active = DistributedDataParallel._active_ddp_module
    return active is not None and not {*map(id, active.parameters())}.isdisjoint(
        map(id, model.parameters())
    )


def is_sharded(thing: Tensor | nn.Module) -> bool:
    """Returns whether a parameter is a part of a sharded one, or a module has such parts: FSDP 1 and 2, DTensor."""
    if isinstance(thing, Tensor):
        return hasattr(thing, "placements") or hasattr(thing, "_fsdp_flattened")
    # by the mark that FSDP leaves on modules inside, and by name: nothing of torch.distributed need be there
    return "_is_fsdp_managed_module" in thing.__dict__ or any(
        kind.__name__ in ("FSDPModule", "FullyShardedDataParallel") for kind in type(thing).__mro__
    )


def some_global_hook() -> bool:
    """Returns whether there is a hook on the forwards or backwards of all modules."""
    return any(_module_hooks)


def is_plain(module: nn.Module) -> bool:
    """Returns whether calling a module calls the forward of its class and nothing else, hooks on all modules aside."""
    hooks = (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )
    return not hooks and module._compiled_call_impl is None and not has_own_forward(module)


def has_own_forward(module: nn.Module) -> bool:
    """Returns whether somebody gave a module another forward than that of its class, or of the same outputs."""
    forward = module.__dict__.get("forward")
    return forward is not None and not hasattr(forward, "of_class")


def whole(out: Tensor) -> Tensor:
    """Returns a tensor of a node's own making that the node may give out: in-place operations refuse its views."""
    found: Tensor = _unsafe_view(out, out.shape) if out._is_view() else out
    return found


def some_optimizer_hook() -> bool:
    """Returns whether there is a hook on the steps of all optimizers, except that which looks for plain ones."""
    return any(
        not hasattr(hook, "only_looks") for hooks in _optimizer_hooks for hook in hooks.values()
    )


def hooks_made() -> int:
    """Returns a number that grows with each hook that is registered on a tensor, node, module or optimizer."""
    return int(_need(RemovableHandle, "next_id"))


def is_profiling() -> bool:
    """Returns whether a profiler of torch is running."""
    return bool(_profiling())


def own_step(optimizer: type[torch.optim.Optimizer]) -> Any:
    """Returns the `step` of a class as it was written, without what torch puts around it when an object is made."""
    step: Any = optimizer.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


class LeftOut:
    """A function whose `call` a compiled model makes outside of its graph."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.call = self._in_any

    def _in_any(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # the compiler, which takes seconds to load, is there
            self.call = torch.compiler.disable(self._function)
            return self.call(*args, **kwargs)
        return self._function(*args, **kwargs)


def _require(samples: dict[str, Any]) -> None:
    for owner, sample in samples.items():
        for name in ATTRIBUTES[owner]:
            _need(sample, name, owner)


def require_opacus() -> None:
    """Raises ImportError in a sentence unless Opacus has the attributes that are read."""
    import opacus

    plain = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    private = opacus.optimizers.DPOptimizer(
        plain, noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=1
    )
    with torch.random.fork_rng(devices=[]):  # a seed set by hand means the same before and after
        wrapped = opacus.GradSampleModule(nn.Linear(1, 1))
    owners = [owner for owner in ATTRIBUTES if "opacus" in owner]
    _require(
        {
            "torch.optim.Optimizer": plain,
            **dict(zip(owners, (private, wrapped, wrapped._module.weight), strict=True)),
        }
    )


_require({"torch.nn.Module": nn.Linear(1, 1), "torch.nn.Parameter": nn.Parameter(torch.zeros(1))})
