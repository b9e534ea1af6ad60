"""Audits of whole training runs, by a canary: one record with a gradient like no other's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, Subset, default_collate

from torch_dpsco import _validate as check
from torch_dpsco._doors import typed
from torch_dpsco.accounting.adjacency import ADD_REMOVE, ZERO_OUT, Adjacency
from torch_dpsco.audit.bound import Audit, require_arguments
from torch_dpsco.audit.mechanism import audit, flat
from torch_dpsco.errors import AdjacencyError, SequenceError
from torch_dpsco.optim.checks import require_same_parameters
from torch_dpsco.optim.step import PrivateOptimizer
from torch_dpsco.rows import GradBatch
from torch_dpsco.rows.attach import attach, first_step_of, is_attached
from torch_dpsco.sampling.loader import to_device


@typed
def audit_training(
    make: Callable[[], tuple[nn.Module, PrivateOptimizer]],
    dataset: Dataset[Any],
    canary: tuple[Any, Any],
    *,
    loss: Callable[[Any, Any], Any],
    delta: float,
    trials: int,
    other: tuple[Any, Any] | None = None,
    steps: int | None = None,
    confidence: float = 0.95,
    seed: int | None = None,
) -> Audit:
    """Bounds from below the epsilon of whole training runs, and compares it with what the optimizer reports.

    Trains many times on two data sets that differ in one record and scores each run by how far the parameters moved
    along the canary's gradient. Under add_remove the canary is added to the data set; otherwise it takes the place of
    record 0, and `other` does so in the other data set.

    Args:
        make: make() -> (model, private optimizer with an accountant of its own); called for every run. A model that is
            not attached is attached here.
        dataset: of (input, target) pairs; a few made-up records that move the parameters little are enough.
        canary: (input, target), not batched, with a gradient that is large and like no other record's: one that the
            clip scales down shows most.
        loss: loss(model(input), target) -> scalar tensor, as in `fit`.
        delta: in (0, 1).
        trials: runs a side; bounds above log(trials) are out of reach.
        other: default record 0 itself; under replace_one a canary of the opposite gradient shows most, under zero_out
            it must be a record without gradient. Not for add_remove.
        steps: of each run; default all that the optimizer plans.
        confidence: see `audit`.
        seed: see `audit`.

    Returns:
        The audit, with the optimizer's `adjacency` and the epsilon it reports after a run as `claimed`.

    Raises:
        AdjacencyError: `other` does not go with the optimizer's adjacency.
        SequenceError: make() gives an accountant that has been charged already, or a model and an optimizer that do not
            belong together.
        ValueError: see `audit`; or the canary has no gradient at the starting point.

    Guarantee:
        That of `audit`, for the pair of data sets and the released parameters. The runs are charged to accountants that
        are thrown away: what they release about a real data set is covered by nothing.

    Example:
        >>> import torch, torch_dpsco as dp
        >>> data = torch.utils.data.TensorDataset(torch.zeros(4, 2), torch.ones(4, 1))
        >>> def make():
        ...     model = dp.attach(nn.Linear(2, 1, bias=False))
        ...     plan = dp.HolderSGD.plan(problem=dp.losses.Logistic().problem(bound_x=1.0), noise_multiplier=1.0,
        ...                              lr=0.1, sampling=dp.Full(4), steps=1)
        ...     return model, dp.HolderSGD(model.parameters(), plan)
        >>> canary, other = (torch.tensor([9.0, 0.0]), torch.ones(1)), (torch.tensor([-9.0, 0.0]), torch.ones(1))
        >>> found = audit_training(make, data, canary, other=other, loss=dp.losses.Logistic(), delta=1e-2, trials=40,
        ...                        confidence=1 - 1e-6)
        >>> found.contradicts()
        False
    """
    check.open_interval(0.0, 1.0, delta=delta)
    require_arguments(delta, trials, confidence)
    model, optimizer = _fresh(make)
    pair = _neighbors(dataset, canary, other, optimizer.adjacency)
    direction = _gradient(model, loss, canary)
    if optimizer.adjacency != ADD_REMOVE:
        direction -= _gradient(model, loss, pair[0][0])  # the record that the canary replaces
    if not direction.any():
        raise ValueError("canary must have a gradient of its own at the starting point (got none)")
    direction /= torch.linalg.vector_norm(direction)
    _train(model, optimizer, pair[1], loss, steps)
    claimed = optimizer.accountant.get_epsilon(delta, adjacency=optimizer.adjacency)

    def run(data: Dataset[Any]) -> float:
        model, optimizer = _fresh(make)
        start = flat(_trained(model))
        _train(model, optimizer, data, loss, steps)
        return float((flat(_trained(model)) - start) @ direction)

    found = audit(run, pair, delta=delta, trials=trials, confidence=confidence, score=float, seed=seed)
    return replace(found, adjacency=optimizer.adjacency, claimed=claimed)


def _fresh(make: Callable[[], tuple[nn.Module, PrivateOptimizer]]) -> tuple[nn.Module, PrivateOptimizer]:
    model, optimizer = make()
    if not is_attached(model):
        attach(model)
    first_step_of(model).asked = False  # what is audited may do what it likes
    require_same_parameters(model.train(), optimizer)
    if optimizer.steps or len(optimizer.accountant):
        raise SequenceError(
            f"make() must return an optimizer that has made no step, with an accountant of its own (got "
            f"{optimizer.steps} steps, {len(optimizer.accountant)} events)"
        )
    return model, optimizer


def _neighbors(
    dataset: Dataset[Any], canary: tuple[Any, Any], other: tuple[Any, Any] | None, adjacency: Adjacency
) -> tuple[Dataset[Any], Dataset[Any]]:
    size = len(dataset)  # type: ignore[arg-type]
    if adjacency == ADD_REMOVE:
        if other is not None:
            raise AdjacencyError("other must be None under add_remove, where one data set has no canary at all")
        return dataset, _joined(canary, dataset)
    if adjacency == ZERO_OUT and other is None:
        raise AdjacencyError("other must be given under zero_out: a record without gradient")
    if not size:
        raise ValueError(f"dataset must hold a record for the canary to take the place of under {adjacency}")
    rest = Subset(dataset, range(1, size))
    return _joined(dataset[0] if other is None else other, rest), _joined(canary, rest)


def _joined(record: tuple[Any, Any], dataset: Dataset[Any]) -> Dataset[Any]:
    return ConcatDataset([cast("Dataset[Any]", [record]), dataset])


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _gradient(model: nn.Module, loss: Callable[[Any, Any], Any], record: tuple[Any, Any]) -> Tensor:
    device = _trained(model)[0].device
    inputs, targets = to_device(default_collate([record]), device)
    loss(model(inputs), targets).backward()
    return flat(GradBatch.consume(_trained(model)).weighted_sum(torch.ones(1, device=device)))


def _train(
    model: nn.Module,
    optimizer: PrivateOptimizer,
    dataset: Dataset[Any],
    loss: Callable[[Any, Any], Any],
    steps: int | None,
) -> None:
    """Makes the steps and installs the answer: `fit` without its checks, which cost ten times a short run."""
    device = next(model.parameters()).device
    with optimizer:
        for batch in optimizer.loader(dataset, steps=optimizer.schedule.steps if steps is None else steps):
            optimizer.zero_grad()
            if optimizer.outstanding_rows:
                inputs, targets = to_device(batch, device)
                loss(model(inputs), targets).backward()
            optimizer.step()
