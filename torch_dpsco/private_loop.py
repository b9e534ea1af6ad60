"""One call that makes a model, a torch optimizer and a loader private together.

`require_replaceable`: what is lost where private draws take the place of a torch DataLoader's own.

| the loader's | what happens | why |
|---|---|---|
| `shuffle=True`, `drop_last=` with it | nothing | a pass over all records in random order; draws have no last batch |
| sampler or batch sampler | raises | records that it leaves out would be drawn, and weights be lost |
| `shuffle=False`, `generator=`, `worker_init_fn=` | warns | nobody may know which records are drawn when |

Time outs, prefetching and how workers are started change no batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from torch_dpsco._validate import typed
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.budgets import Budget, one_budget
from torch_dpsco.accounting.designs import Design
from torch_dpsco.accounting.events import ADD_REMOVE
from torch_dpsco.algorithms.holder import HolderSGD
from torch_dpsco.algorithms.nets import NetSGD
from torch_dpsco.algorithms.row_free import BoundedLoader, RowFreeOptimizer
from torch_dpsco.compat import tree_leaves
from torch_dpsco.diagnosis import Diagnosis, doctor
from torch_dpsco.errors import DpscoError, SequenceError, UnknownSamplerError, warn
from torch_dpsco.losses.base import read_for
from torch_dpsco.losses.per_record import PerRecord
from torch_dpsco.problem import Problem
from torch_dpsco.prox import Prox
from torch_dpsco.rows.attach import attach, detach, first_step_of, is_attached
from torch_dpsco.rules import TorchRule
from torch_dpsco.sampling import PrivateLoader
from torch_dpsco.step.checks import is_first, number_of_records, require_same_parameters
from torch_dpsco.step.run import CommonOptimizer
from torch_dpsco.step.step import PrivateOptimizer

_Model = TypeVar("_Model", bound=nn.Module)


@typed
def make_private(
    model: _Model,
    optimizer: Optimizer,
    data_loader: DataLoader[Any],
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    budget: Budget | None = None,
    clip: float | None = None,
    epochs: float | None = None,
    recipe: bool = False,
    problem: Problem | None = None,
    n: int | None = None,
    loss: Callable[..., Any] | None = None,
    loss_reduction: str | None = None,
    rows: str = "auto",
    sampling: str | Design = "poisson",
    record_ids: Any = None,
    average: str | None = None,
    prox: Prox | None = None,
    reg: float = 0.0,
    accountant: Accountant | None = None,
    verbose: bool = True,
) -> tuple[_Model, PrivateOptimizer, PrivateLoader]:
    """Returns private counterparts of a model, its torch optimizer and its data loader.

    The model is attached in place; with a `loss`, both are probed by `doctor`, else they are looked at in the first
    step, and nothing is spent before. The torch optimizer goes on making the updates, with its own learning rates, but
    from private means. The loader's data set, batch size, workers and collate function are kept; batches are drawn
    secretly, because nothing else amplifies (the batch size becomes an expected one, so that drop_last has no meaning):
    Poisson sampling, or passes in which each record is in one batch. A sampler of the loader's would be lost, and is
    refused.

    Args:
        model: see `attach`.
        optimizer: any torch optimizer but LBFGS, on the model's parameters.
        data_loader: with a map-style data set, a fixed batch_size and shuffle=True.
        epsilon: what the whole run may spend, with `delta`.
        delta: see `epsilon`.
        budget: in place of epsilon and delta.
        clip: bound at which gradients of records are cut; default none: each is scaled to length 1, see `NetSGD`.
        epochs: passes over the data on average; default 10.
        recipe: take all numbers from `NetSGD.plan`: batch size, epochs (unless given), step size and averaged weights.
            Of the torch optimizer only the parameters are taken, and of the loader all but its batch size.
        problem: promised constants of the loss, if it has any: then `HolderSGD` cuts gradients at their bound.
        n: PUBLIC number of records; default that of the data set. Under add_remove, where that is private, it is
            asked for, and a reference.
        loss: the training loss, only to be probed by `doctor`, whose argument it is, before the loop begins. Without it
            model and loss are looked at in the first step; see `attach`.
        loss_reduction: see `attach`; default that of a `loss` that says it, as torch's criteria do, or "mean".
        rows: see `attach`.
        sampling: as in `HolderSGD.plan`: "poisson", or "allocated": an iteration of the loader is a pass, in which
            each record is in one batch, drawn anew and secretly (`dp.Assigned`), at the same price.
        record_ids: see `PrivateOptimizer.loader`: with sampling="allocated", a unique id of each record, in the order
            of the data set.
        average: see `rules.UpdateRule`; default "last", with recipe "ema".
        prox: constraint or penalty.
        reg: see `PrivateOptimizer`.
        accountant: ledger to charge; default a new one with this budget.
        verbose: whether to print the plan, which is `optimizer.plan` too.

    Returns:
        (model, private optimizer, private loader).

    Raises:
        PrivacyError: with `loss`, it or the model couples records, or leaks them in another way; see `doctor`.
        SequenceError: the optimizer is private already, or it is not on exactly the model's trainable parameters.
        UnknownSamplerError: the loader has a sampler of its own, or no fixed batch size; names the way out.
        ValueError: its data set is a stream; the budget is missing, or given twice; an argument is out of range.

    Example:
        >>> import torch, torch_dpsco as dp
        >>> data = torch.utils.data.TensorDataset(torch.randn(64, 3), torch.ones(64, 1))
        >>> model = torch.nn.Linear(3, 1)
        >>> model, optimizer, loader = dp.make_private(
        ...     model, torch.optim.SGD(model.parameters(), lr=0.1), torch.utils.data.DataLoader(data, 16, shuffle=True),
        ...     epsilon=1.0, delta=1e-3, epochs=1, verbose=False)
        >>> type(optimizer).__name__, len(loader), optimizer.plan.batch_size
        ('NetSGD', 4, 16)
    """
    if isinstance(optimizer, CommonOptimizer):
        raise SequenceError(
            "optimizer is private already: iterate over optimizer.loader(dataset), or call "
            "dp.fit(model, optimizer, dataset, loss)"
        )
    require_same_parameters(model, optimizer)
    number_of_records(data_loader.dataset)
    require_replaceable(data_loader)
    if problem is not None and (recipe or clip is not None):
        raise ValueError(
            f"recipe and clip must be left out beside problem, which has a bound (got {recipe} and"
            f" {clip})"
        )
    budget = one_budget(budget, epsilon, delta)
    n = size_of(data_loader.dataset, n, budget)
    public: dict[str, Any] = {"n": n, "budget": budget, "sampling": sampling}
    public |= {"epochs": 10 if epochs is None and not recipe else epochs}
    if not recipe:
        public |= {"batch_size": data_loader.batch_size}
    rest: dict[str, Any] = {"prox": prox, "reg": reg, "accountant": accountant}
    private = stepped_by(optimizer, public, rest, problem, clip, average, recipe=recipe)
    loader = private.loader(
        data_loader.dataset,
        record_ids=record_ids,
        collate_fn=data_loader.collate_fn,
        num_workers=data_loader.num_workers,
        pin_memory=data_loader.pin_memory,
    )
    reduction = reduction_of(loss, loss_reduction) or "mean"
    attach_sound(model, loss, loader, loss_reduction=reduction, rows=rows)
    loader._part(model)
    if verbose and is_first():
        print(private.plan)
    return model, private, loader


def stepped_by(
    optimizer: Optimizer,
    public: dict[str, Any],
    rest: dict[str, Any],
    problem: Problem | None = None,
    clip: float | None = None,
    average: str | None = None,
    *,
    recipe: bool = False,
) -> HolderSGD | NetSGD:
    """Returns a private optimizer that leaves the updates to a torch optimizer, or with `recipe` takes its parameters.

    `public` are keywords of the plan, `rest` those of the optimizer, all else as in `make_private`.
    """
    groups = optimizer.param_groups
    average = average or ("ema" if recipe else "last")
    if recipe:
        plan = NetSGD.plan(dim=groups, clip=clip, average=average, **public)
        return NetSGD([{"params": group["params"]} for group in groups], plan, **rest)
    public |= {"lr": float(groups[0]["lr"]), "average": average}
    rest |= {"rule": TorchRule(optimizer, average)}
    if problem is not None:
        return HolderSGD(groups, HolderSGD.plan(problem=problem, **public), **rest)
    return NetSGD(groups, NetSGD.plan(dim=groups, clip=clip, **public), **rest)


def size_of(dataset: Dataset[Any], n: int | None, budget: Budget) -> int:
    """Returns the public number of records: where none is given that of the data set, if it is public."""
    if n is None and budget.adjacency == ADD_REMOVE:
        # PRIVACY: the number of records is what add_remove hides (test_the_size_is_asked_for_where_it_is_private)
        raise ValueError(
            "n must be given under add_remove, where the data set's own size is private: a public"
            " number of about so many records"
        )
    return number_of_records(dataset) if n is None else n


def reduction_of(loss: Any, asked: str | None) -> str | None:
    """Returns how a loss reduces, which torch's criteria and `per_record` say; raises where another is asked for."""
    says = isinstance(loss, (PerRecord, nn.modules.loss._Loss))
    own = loss.reduction if says else None
    if own not in ("mean", "sum"):
        return asked
    if asked not in (None, own):
        raise ValueError(f"loss_reduction must be {own!r}, that of the loss (got {asked!r})")
    return str(own)


def attach_sound(
    model: nn.Module,
    loss: Callable[..., Any] | None,
    loader: PrivateLoader,
    *,
    loss_reduction: str,
    rows: str = "auto",
    batch_first: bool = True,
) -> None:
    """Attaches a model if `require_sound` finds it so, with its loss; otherwise raises and leaves it as it was.

    Without a loss nothing is probed: the first step asks the same questions before anything is spent.
    """
    attach(model, rows=rows, loss_reduction=loss_reduction, batch_first=batch_first)
    if loss is None:
        return
    try:
        require_sound(model, loss, loader)
    except BaseException:
        detach(model)
        raise


def require_sound(
    model: nn.Module,
    loss: Callable[..., Any],
    loader: PrivateLoader | BoundedLoader,
    optimizer: RowFreeOptimizer | None = None,
) -> None:
    """Raises if the doctor finds a mistake in a model or in its loss; see `Diagnosis.raise_if`.

    The model is attached, or it is trained by an optimizer that needs no per-sample gradients.
    """
    if len(loader.dataset):  # none is legal under add_remove, and shows no record
        # PRIVACY: (test_t07_records_that_the_loss_couples_are_found_before_anything_is_spent)
        found = doctor(model, loss, loader, optimizer).findings
        Diagnosis.of(
            finding for finding in found if finding.name != "fixed-seed"
        ).raise_if()  # that warned already
        if is_attached(model):
            first_step_of(model).settle_probed("model")


def note_probed(model: nn.Module, optimizer: PrivateOptimizer) -> None:
    """Notes that the loss of all steps is the one that `require_sound` was given, for the optimizer's reports."""
    first_step = first_step_of(model)
    first_step.settle_probed("loss")
    optimizer.note_checks(first_step.verdicts)


def loss_of(model: nn.Module, loss_fn: Callable[..., Any], inputs: Any, targets: Any) -> Any:
    """Returns loss_fn(model(inputs), targets); where they do not go together says what shapes and dtypes met."""
    try:
        loss = loss_fn(*read_for(loss_fn, model(inputs), targets))
    except (DpscoError, torch.OutOfMemoryError):
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
        # PRIVACY: shapes of a record: the size of a batch is private (test_records_that_do_not_fit_are_described)
        raise ValueError(
            f"dataset, model and loss_fn must go together (got inputs {_kinds_of(inputs)} and"
            f" targets {_kinds_of(targets)}, where parameters are"
            f" {_kinds_of(next(model.parameters()).detach()[None])}): match dtypes by x.to(dtype)"
            " in the data set, or model.to(dtype), and shapes with what model and loss take"
        ) from error
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ValueError(f"loss_fn must return a scalar tensor (got {type(loss).__name__})")
    return loss


def _kinds_of(batch: Any) -> str:
    """Returns shapes and dtypes of a batch's records."""
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    shown = [
        f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape[1:])}" for leaf in leaves
    ]
    return ", ".join(shown) or type(batch).__name__


PART = "torch.utils.data.Subset(dataset, indices) is a part of the data"
WEIGHTS = (
    "weights of classes belong into the loss, as nn.BCEWithLogitsLoss(pos_weight=...) or "
    "dp.per_record(nn.CrossEntropyLoss(weight=...))"
)
_WAYS_OUT = {
    SubsetRandomSampler: PART,
    WeightedRandomSampler: WEIGHTS,
    DistributedSampler: "leave it out, optimizers divide their draws among processes",
    RandomSampler: f"shuffle=True, and say by epochs= or steps= how long a run is; {PART}",
}


def require_replaceable(loader: DataLoader[Any], name: str = "data_loader") -> None:
    """Raises UnknownSamplerError where what a loader chooses would be lost; warns where an order is.

    Args:
        loader: of a map-style data set.
        name: by which the caller knows it.
    """
    found = _chooses(loader)
    if found is not None:
        way_out = _WAYS_OUT.get(type(found), f"{PART}; {WEIGHTS}")
        # PRIVACY: records that it leaves out would be drawn (test_no_door_drops_a_sampler)
        raise UnknownSamplerError(
            f"{name} must have a fixed batch_size and no sampler of its own (got"
            f" {type(found).__name__}), which private draws from all records would replace:"
            f" {way_out}"
        )
    lost = list(_not_kept(loader))
    if lost:
        warn(
            f"{', '.join(lost)} of {name} cannot be kept, since private batches are drawn at"
            " random, anew in each run: leave generator and worker_init_fn out, and say shuffle=True"
            " if the order does not matter; if it does, a record must hold all that belongs together",
            stacklevel=4,
        )


def _chooses(loader: DataLoader[Any]) -> Any:
    """Returns what of a loader decides which records come how often, None where each comes once in a pass."""
    if type(loader).__iter__ is not DataLoader.__iter__:
        return loader
    if loader.batch_size is None:
        return loader if loader.batch_sampler is None else loader.batch_sampler
    sampler = loader.sampler
    if type(sampler) not in (RandomSampler, SequentialSampler):
        return sampler
    records = len(loader.dataset)  # type: ignore[arg-type]
    # one over other indices, as SequentialSampler(range(80)), is a choice too
    whole = len(sampler) == len(sampler.data_source) == records  # type: ignore[attr-defined, arg-type]
    return None if whole and not getattr(sampler, "replacement", False) else sampler


def _not_kept(loader: DataLoader[Any]) -> list[str]:
    found = []
    several = (loader.batch_size or 1) < len(loader.dataset)  # type: ignore[arg-type]
    if several and type(loader.sampler) is SequentialSampler:
        found.append("the order (shuffle=False)")
    if loader.generator is not None or getattr(loader.sampler, "generator", None) is not None:
        found.append("generator")
    if loader.num_workers and loader.worker_init_fn is not None:
        found.append("worker_init_fn")
    return found
