"""Private interfaces of torch and Opacus, in one place: asked for where they are used, and done without if possible.

Functions and modules whose name begins with an underscore are imported from here only. Where one is missing, plain code
takes its place; where it tells that something must be looked at, that is assumed. Attributes of modules, parameters and
optimizers are read where they are needed, and listed in tests/test_layering.py. What cannot be done without is named in
a sentence.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

_RUN_WITH = "torch 2.6 and 2.14 with opacus 1.6"  # what .ci/weekly has run; see setup.cfg
_GLOBAL_HOOKS = (
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_forward_hooks_always_called",
    "_global_forward_hooks_with_kwargs",
)
_UNKNOWN = {-1: None}  # hooks, where those that there are cannot be read
_CLIPPED = "HolderSGD and ClippedSGD do without"


def _need(owner: Any, name: str, *, for_: str = "", instead: str = "") -> Any:
    """Returns an attribute of a module; raises ImportError, with what does without it, if it has none."""
    if hasattr(owner, name):
        return getattr(owner, name)
    raise ImportError(
        f"torch_dpsco needs {owner.__name__}.{name}{for_ and f' for {for_}'}, which torch"
        f" {version('torch')} with opacus {version('opacus')} does not have:"
        f" {instead and f'{instead}; '}it was run with {_RUN_WITH}; install one of these"
    )


without_subclasses = torch.DisableTorchFunctionSubclass
BatchNorm: tuple[type[nn.Module], ...] = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
)
ConvNd: tuple[type[nn.Module], ...] = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
DropoutNd = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)

foreach_add_ = _need(torch, "_foreach_add_")

_trees = _need(torch.utils, "_pytree")
tree_map = _trees.tree_map
tree_flatten = _trees.tree_flatten
tree_unflatten = _trees.tree_unflatten


def tree_leaves(tree: Any) -> list[Any]:
    """Returns the leaves of nested containers as torch finds them, at a tenth of its price for plain ones.

    Example:
        >>> tree_leaves(((1, [2.0]), {"x": None}))
        [1, 2.0, None]
    """
    kind = type(tree)
    if kind in (int, float, str, bool, type(None)) or isinstance(tree, Tensor):
        return [tree]
    if kind is dict:
        tree = list(tree.values())
    elif kind not in (tuple, list):
        found: list[Any] = _trees.tree_leaves(tree)
        return found
    return [leaf for part in tree for leaf in tree_leaves(part)]


# Whether the running backward comes to a node.
will_run: Callable[[Any], bool] = getattr(
    torch._C, "_will_engine_execute_node", lambda node: True
)
# The number of the backward that runs in this thread, each its own; -1 if none does or nobody knows.
backward_number: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)
# Whether a profiler of torch is running.
is_profiling: Callable[[], bool] = getattr(torch.autograd, "_profiler_enabled", lambda: True)
# Hooks on the steps of all optimizers, as they are at any time.
OPTIMIZER_HOOKS: list[dict[int, Any]] = [
    getattr(import_module("torch.optim.optimizer"), name, _UNKNOWN)
    for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
]


class _Unseeing:
    """Stands for a mode that sees each operation, where torch has none."""

    def __enter__(self) -> None:
        raise ImportError("torch has no mode that sees each operation")

    def __exit__(self, *error: object) -> None: ...


# Sees each operation of a block; without it batches come in one size.
DispatchMode: Any = getattr(
    getattr(torch.utils, "_python_dispatch", None), "TorchDispatchMode", _Unseeing
)
# (tensor, shape) -> a tensor of a node's own making that the node may give out: in-place operations refuse its views.
unsafe_view: Callable[..., Any] = getattr(
    torch.ops.aten, "_unsafe_view", lambda tensor, shape: tensor.clone()
)


def of_opacus(*names: str) -> tuple[Any, ...]:
    """Returns classes of Opacus by their dotted names, where their module was imported: else no object is of them.

    Example:
        >>> of_opacus("nowhere.Nothing")
        ()
    """
    places = [f"opacus.{name}".rpartition(".") for name in names]
    return tuple(
        _need(sys.modules[module], name) for module, _, name in places if module in sys.modules
    )


def is_replicated(model: nn.Module) -> bool:
    """Returns whether `replicate` has taken a part of a model, or DistributedDataParallel runs a forward of it."""
    composed = sys.modules.get("torch.distributed._composable.contract")
    if composed is not None:  # else nothing was replicated
        registry = getattr(composed, "_get_registry", lambda part: ("replicate",))
        # torch 2.6 does not say that its forwards are active (test_a_replica_is_known_before_it_is_called)
        if any("replicate" in (registry(part) or ()) for part in model.modules()):
            return True
    kind = nn.parallel.DistributedDataParallel
    if not hasattr(kind, "_active_ddp_module"):
        return torch.distributed.is_available() and torch.distributed.is_initialized()
    active = kind._active_ddp_module
    return active is not None and not {*map(id, active.parameters())}.isdisjoint(
        map(id, model.parameters())
    )


def is_sharded(thing: Tensor | nn.Module) -> bool:
    """Returns whether a parameter is a part of a sharded one, or a module has such parts: FSDP 1 and 2, DTensor."""
    if isinstance(thing, Tensor):
        return hasattr(thing, "placements") or hasattr(thing, "_fsdp_flattened")
    # by the mark that FSDP leaves on modules inside, and by name: nothing of torch.distributed need be there
    return "_is_fsdp_managed_module" in thing.__dict__ or any(
        kind.__name__ in ("FSDPModule", "FullyShardedDataParallel")
        for kind in type(thing).__mro__
    )


def some_global_hook() -> bool:
    """Returns whether there is a hook on the forwards or backwards of all modules."""
    return any(getattr(nn.modules.module, name, _UNKNOWN) for name in _GLOBAL_HOOKS)


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


def hooks_made() -> int:
    """Returns a number that grows with each hook that is registered on a tensor, node, module or optimizer."""
    return int(
        _need(RemovableHandle, "next_id", for_="optimizers of secret iterates", instead=_CLIPPED)
    )


def own_step(optimizer: type[torch.optim.Optimizer]) -> Any:
    """Returns the `step` of a class as it was written, without what torch puts around it when an object is made."""
    step: Any = optimizer.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step
