"""A training loop for those who have none: `fit` draws private batches, shows progress, and installs the answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate
from tqdm.auto import tqdm

from torch_dpsco import _validate as check
from torch_dpsco.attach import attach, is_attached
from torch_dpsco.errors import SequenceError
from torch_dpsco.optim.base import PrivateOptimizer

__all__ = ["fit"]

_Model = TypeVar("_Model", bound=nn.Module)
_REFRESH = 20  # steps between two updates of epsilon in the bar


def fit(
    model: _Model,
    optimizer: PrivateOptimizer,
    dataset: Dataset[Any],
    loss_fn: Callable[[Any, Tensor], Tensor],
    *,
    steps: int | None = None,
    delta: float | None = None,
    loss_reduction: str = "mean",
    physical_batch_size: int | None = None,
    num_workers: int = 0,
    progress: bool = True,
) -> _Model:
    """Trains a model privately and returns it with the private answer installed.

    The progress bar shows steps and epsilon, never the training loss, which is private.

    Args:
        model: attached, or it is attached here.
        optimizer: private optimizer on the model's parameters.
        dataset: of (input, target) records; the model's device is used.
        loss_fn: loss_fn(model(input), target) -> scalar tensor.
        steps: number of steps; default all that are planned.
        delta: at which epsilon is shown; default that of the budget. Without either no epsilon is shown.
        loss_reduction: "mean" or "sum": how loss_fn reduces; checked on two records before anything is spent.
        physical_batch_size: see `PrivateOptimizer.loader`.
        num_workers: see `PrivateOptimizer.loader`.
        progress: whether to show the bar.

    Raises:
        ValueError: no number of steps is known, or loss_fn reduces in another way.
        SequenceError: the optimizer is finalized, or not on this model's parameters.
    """
    if optimizer.finalized:
        raise SequenceError("the optimizer is finalized: make a new one to train again")
    check.choice(("mean", "sum"), loss_reduction=loss_reduction)
    planned = optimizer.schedule.steps
    if steps is None and planned is None:
        raise ValueError("steps must be given: the optimizer has no planned number of steps (got None)")
    left = check.positive_count(steps=steps if steps is not None else (planned or 0) - optimizer.steps)
    _require_same_parameters(model, optimizer)
    _check_reduction(model, dataset, loss_fn, loss_reduction)
    if not is_attached(model):
        attach(model, loss_reduction=loss_reduction)
    if delta is None and optimizer.accountant.budget is not None:
        delta = optimizer.accountant.budget.delta
    device = next(model.parameters()).device
    loader = optimizer.loader(dataset, steps=left, physical_batch_size=physical_batch_size, num_workers=num_workers)
    goal = optimizer.steps + left
    model.train()
    with optimizer, tqdm(total=left, disable=not progress, unit="step") as bar:
        for inputs, targets in loader:
            optimizer.zero_grad()
            if optimizer.outstanding_rows:  # an empty draw is a step of noise only
                loss_fn(model(_to(inputs, device)), _to(targets, device)).backward()
            before = optimizer.steps
            optimizer.step()
            bar.update(optimizer.steps - before)
            if delta is not None and (optimizer.steps % _REFRESH == 0 or optimizer.steps == goal):
                bar.set_postfix(epsilon=f"{optimizer.accountant.get_epsilon(delta):.3f}", left=goal - optimizer.steps)
    return model


def _to(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, (list, tuple)):
        return type(batch)(_to(item, device) for item in batch)
    if isinstance(batch, dict):
        return {key: _to(item, device) for key, item in batch.items()}
    return batch


def _require_same_parameters(model: nn.Module, optimizer: PrivateOptimizer) -> None:
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    owned = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    if trained != owned:
        raise SequenceError(
            f"the optimizer must train exactly the model's trainable parameters (model {len(trained)}, optimizer "
            f"{len(owned)}, in common {len(trained & owned)}); freeze the others with requires_grad_(False)"
        )


def _check_reduction(
    model: nn.Module, dataset: Dataset[Any], loss_fn: Callable[[Any, Tensor], Tensor], reduction: str
) -> None:
    """Compares the loss of two records with that of the two records doubled; only the verdict leaves."""
    device = next(model.parameters()).device
    records = [dataset[i] for i in range(min(2, len(dataset)))]  # type: ignore[arg-type]
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            single, double = (
                loss_fn(model(_to(inputs, device)), _to(targets, device))
                for inputs, targets in (default_collate(records), default_collate(records * 2))
            )
    finally:
        model.train(training)
    if single.dim() or double.dim():
        raise ValueError(f"loss_fn must return a scalar (got shape {tuple(single.shape)}); reduce by mean or sum")
    factor = {"mean": 1.0, "sum": 2.0}[reduction]
    if math.isfinite(float(single)) and not math.isclose(
        float(double), factor * float(single), rel_tol=1e-2, abs_tol=1e-6
    ):
        raise ValueError(
            f"loss_reduction must be how loss_fn reduces over the batch (got {reduction!r}, but doubling the batch "
            f"does not {'keep' if factor == 1 else 'double'} the loss)"
        )
