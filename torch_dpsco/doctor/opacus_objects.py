"""Recognizes Opacus' objects and reads what the doctor needs from them: the only contact with Opacus' classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from torch_dpsco.accounting.spending import Spending
from torch_dpsco.compat import of_opacus

_POISSON = (
    "utils.uniform_sampler.UniformWithReplacementSampler",
    "utils.uniform_sampler.DistributedUniformWithReplacementSampler",
)
_GHOST = (
    "grad_sample.GradSampleHooksFastGradientClipping",
    "optimizers.DPOptimizerFastGradientClipping",
)
_MAX_DEPTH = 4


def is_opacus_optimizer(optimizer: Any) -> bool:
    """Returns whether it is a DPOptimizer of any kind."""
    return isinstance(optimizer, of_opacus("optimizers.DPOptimizer"))


def grad_sample_hooks(model: nn.Module) -> Any:
    """Returns the object that hooks the model: a GradSampleModule, or the GradSampleHooks of `wrap_model=False`."""
    if isinstance(model, of_opacus("grad_sample.GradSampleHooks")):
        return model
    if hasattr(model, "autograd_grad_sample_hooks") and not hasattr(model, "_dpsco"):
        for module in model.modules():
            for hook in module._forward_hooks.values():
                owner = getattr(hook, "__self__", None)
                if isinstance(owner, of_opacus("grad_sample.GradSampleHooks")):
                    return owner
    return None


def is_ghost(part: Any) -> bool:
    """Returns whether hooks compute norms of rows and no rows, or an optimizer wants gradients clipped by the loss."""
    return isinstance(part, of_opacus(*_GHOST))


def inner_module(model: nn.Module) -> nn.Module:
    """Returns the model without a wrapper that has no hooks (expanded weights, no_op); else the model itself."""
    wrapped = isinstance(model, of_opacus("grad_sample.AbstractGradSampleModule"))
    if wrapped and not isinstance(model, of_opacus("grad_sample.GradSampleHooks")):
        inner: nn.Module = model._module  # type: ignore[assignment]
        return inner
    return model


def is_ghost_loss_value(value: Any) -> bool:
    """Returns whether it is what that criterion returns."""
    return isinstance(
        value, of_opacus("utils.fast_gradient_clipping_utils.DPTensorFastGradientClipping")
    )


def _held(function: Any) -> Iterator[tuple[str, Any]]:
    """Yields what a callable carries: its closure, its object, its arguments."""
    if isinstance(function, MethodType):
        yield "self", function.__self__
        yield from _held(function.__func__)
    elif isinstance(function, FunctionType):
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            try:
                yield name, cell.cell_contents
            except ValueError:  # a variable that is not assigned yet
                continue
    elif isinstance(function, partial):
        yield from [("", function.func), *function.keywords.items()]
        yield from ((f"{place}", value) for place, value in enumerate(function.args))
    elif not isinstance(function, nn.Module):
        yield from getattr(function, "__dict__", {}).items()


def accounted(hook: Any, depth: int = 0) -> tuple[Any, float | None]:
    """Returns (accountant, sampling rate) of a step hook, (None, None) if no accountant can be found in it.

    Opacus' own hook is a closure over the two; a user's hook that calls it carries it in its own closure.
    """
    if isinstance(hook, (Spending, *of_opacus("accountants.accountant.IAccountant"))):
        return hook, None
    if depth > _MAX_DEPTH or not callable(hook):
        return None, None
    held = dict(_held(hook))
    rate = held.get("sample_rate")
    for value in held.values():
        accountant, inner = accounted(value, depth + 1)
        if accountant is not None:
            return accountant, inner if rate is None else float(rate)
    return None, None


def underlying_loader(loader: Any) -> Any:
    """Returns the loader behind a BatchMemoryManager that was not entered."""
    return (
        loader.data_loader
        if isinstance(loader, of_opacus("utils.batch_memory_manager.BatchMemoryManager"))
        else loader
    )


def is_split(loader: Any) -> bool:
    """Returns whether the loader is one that BatchMemoryManager made, or such a manager."""
    splits = isinstance(
        getattr(loader, "batch_sampler", None),
        of_opacus("utils.batch_memory_manager.BatchSplittingSampler"),
    )
    return splits or isinstance(loader, of_opacus("utils.batch_memory_manager.BatchMemoryManager"))


def batch_sampler(loader: Any) -> Any:
    """Returns the batch sampler of a loader, without the splitting of BatchMemoryManager."""
    sampler = getattr(loader, "batch_sampler", None)
    while isinstance(sampler, of_opacus("utils.batch_memory_manager.BatchSplittingSampler")):
        sampler = sampler.sampler
    return sampler


def poisson_rate(sampler: Any) -> float | None:
    """Returns the rate of Opacus' Poisson samplers, None for other samplers."""
    return float(sampler.sample_rate) if isinstance(sampler, of_opacus(*_POISSON)) else None


def bare_collate(collate: Callable[[list[Any]], Any] | None) -> Callable[[list[Any]], Any] | None:
    """Returns the collate function without DPDataLoader's wrapper, which would remember a synthetic batch."""
    return (
        collate.wrapped_collator_fn
        if isinstance(collate, of_opacus("data_loader.CollateFnWithEmpty"))
        else collate
    )
