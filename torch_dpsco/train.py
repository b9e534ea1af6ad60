"""A ready-made training loop: `fit` draws private batches, shows progress, and installs the answer.

Checkpoints of `fit`: written whole or not at all, and continued by the next call with the same path.
"""

from __future__ import annotations

import math
import os
import pickle
import time
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils.data import Dataset, TensorDataset
from tqdm.auto import tqdm

import torch_dpsco
from torch_dpsco import _validate as check
from torch_dpsco._validate import typed
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.budgets import Budget, one_budget
from torch_dpsco.accounting.calibrate import rounded_up
from torch_dpsco.accounting.ledger_file import sync_folder
from torch_dpsco.acts import act
from torch_dpsco.algorithms.nets import NetSGD
from torch_dpsco.algorithms.prepared import (
    PreparedOptimizer,
    Standardized,
    require_undone,
    standardize,
)
from torch_dpsco.algorithms.row_free import RowFreeOptimizer
from torch_dpsco.compat import own_step
from torch_dpsco.diagnosis.probe import settle_sizes
from torch_dpsco.errors import (
    BudgetExceeded,
    InfeasibleError,
    PrivacyError,
    SequenceError,
    UtilityWarning,
    warn,
)
from torch_dpsco.estimators.solved import SolvedOptimizer
from torch_dpsco.losses.base import as_module
from torch_dpsco.private_loop import (
    attach_sound,
    loss_of,
    note_probed,
    reduction_of,
    require_sound,
    size_of,
)
from torch_dpsco.rows.attach import attach, detach, first_step_of, is_attached
from torch_dpsco.rows.closed_form import ClosedForm, closed_form
from torch_dpsco.sampling import PrivateLoader
from torch_dpsco.sampling.loader import to_device
from torch_dpsco.step import checks
from torch_dpsco.step.checks import is_first, require_same_parameters, world_size
from torch_dpsco.step.step import PrivateOptimizer

_Model = TypeVar("_Model", bound=nn.Module)
_LossFn = Callable[[Any, Any], Any]
_SHOW_EVERY = 0.5  # seconds between two looks
_SHARE = 0.02  # of the time, that looks may take


@typed
def fit(
    model: _Model,
    optimizer: PrivateOptimizer | RowFreeOptimizer | SolvedOptimizer | None = None,
    dataset: Dataset[Any] | None = None,
    loss_fn: _LossFn | None = None,
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    budget: Budget | None = None,
    n: int | None = None,
    accountant: Accountant | None = None,
    users: Any = None,
    record_ids: Any = None,
    shard: int | None = None,
    steps: int | None = None,
    loss_reduction: str | None = None,
    physical_batch_size: int | None = None,
    num_workers: int = 0,
    progress: bool = True,
    compile: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
    every: int = 50,
    isolation: str | None = None,
    log: torch_dpsco.loggers.Logger | None = None,
) -> _Model:
    """Trains a model privately and returns it with the private answer installed, in evaluation mode.

    Everything is checked before anything is spent: steps against plan and budget, records, and by the probes of
    `doctor` model and loss (coupled records, a regularizer in the loss, another reduction than declared). The progress
    bar shows steps, epsilon (rounded up) and steps left, never the training loss, which is private. A run that is
    interrupted keeps its steps and its ledger; another `fit` makes the steps that are left. Units that a plan measures
    (`prepare="auto"`) are charged before the probes, and taken out of the weights at the end. With a checkpoint the
    same script, run again after a crash, goes on where the checkpoint is: steps after it are lost, and a warning counts
    them, but nothing is spent twice.

    Args:
        model: attached, or it is attached here; for `HolderOutputSGD` plain.
        optimizer: private optimizer on the model's parameters.
        dataset: of (input, target) pairs; tensors in them are moved to the model's device.
        loss_fn: loss_fn(model(input), target) -> scalar tensor. Labels of ours and of torch's are read by
            `losses.base`: 0/1, -1/1 and booleans say the same.
        epsilon: of the budget, without an optimizer, whose plan has one.
        delta: of the budget, beside epsilon.
        budget: in place of epsilon and delta.
        n: PUBLIC number of records; asked for under add_remove alone, else that of the data set.
        accountant: ledger to charge, without an optimizer; default a new one.
        users: for optimizers that protect users: the id of the user of each record.
        record_ids: see `PrivateOptimizer.loader`: a unique id of each record.
        shard: see `PrivateOptimizer.loader`: where each of several processes has records of its own.
        steps: number of steps; default all that are left of the plan.
        loss_reduction: "mean" or "sum": how loss_fn reduces; default what torch's criteria and `per_record` say
            themselves, as the model was attached, or "mean".
        physical_batch_size: see `PrivateOptimizer.loader`.
        num_workers: see `PrivateOptimizer.loader`.
        progress: whether to show the bar (that of rank 0, in several processes).
        compile: compute rows by `CompiledRows`: seconds to half a minute at first, then faster steps where layers are
            not Linear on 2-D input (linear models have a closed form, which is taken before). Without it, and with a
            UtilityWarning where it is not possible, as `attach` does.
        checkpoint: CONFIDENTIAL file that is written from time to time, and taken up if it exists (see `resume`);
            that of a finished run gives its model, with a warning. The accountant must have a ledger file.
        every: steps between two checkpoints.
        isolation: see `PrivateOptimizer.loader`.
        log: writes public numbers, as `loggers.tensorboard(writer)`; never the training loss.

    Raises:
        PrivacyError: the model or the loss couples records, or the model leaks them in another way; see `doctor`.
        ValueError: no number of steps is known, or more than are planned; records are no pairs; loss_fn reduces in
            another way than declared, or has a term on the weights.
        InfeasibleError: the budget admits fewer steps; says how many.
        SequenceError: the optimizer is finalized or its plan is made, or it is not on this model's parameters.

    Guarantee:
        That of the optimizer; nothing but the private answer leaves.

    Example:
        >>> import torch_dpsco as dp
        >>> data = torch.utils.data.TensorDataset(torch.randn(100, 3), torch.ones(100, 1))
        >>> model = nn.Linear(3, 1)
        >>> plan = dp.HolderSGD.plan(problem=dp.losses.Logistic().problem(bound_x=2.0), n=100,
        ...                          budget=dp.Budget(1.0, 1e-3), batch_size=20, epochs=2)
        >>> optimizer = dp.HolderSGD(model.parameters(), plan)
        >>> fit(model, optimizer, data, dp.losses.Logistic(), progress=False).training, optimizer.steps
        (False, 10)
    """
    if dataset is None or loss_fn is None:
        raise ValueError(
            "dataset and loss_fn must be given, beside an optimizer or beside epsilon and delta"
        )
    check.made(loss_fn=loss_fn)
    check.positive_count(every=every)
    asked: dict[str, Any] = {"epsilon": epsilon, "delta": delta, "budget": budget, "n": n}
    asked["accountant"] = accountant
    if optimizer is not None:
        _require_left_out(optimizer, asked)
    optimizer = optimizer or _untuned(model, dataset, asked, verbose=progress and is_first())
    loss_fn = as_module(loss_fn)
    tell: Callable[[Any], None] = log or (lambda optimizer: None)
    drawn = {"users": users, "record_ids": record_ids, "shard": shard, "isolation": isolation}
    drawn["physical_batch_size"] = physical_batch_size
    fixed = {"steps": steps, "checkpoint": checkpoint}
    if isinstance(optimizer, RowFreeOptimizer):
        fixed |= {"loss_reduction": loss_reduction, "compile": compile or None}
        _require_left_out(optimizer, drawn | fixed)
        return _fit_row_free(model, optimizer, dataset, loss_fn, num_workers, progress, tell)
    if isinstance(optimizer, SolvedOptimizer):
        raise ValueError(
            f"optimizer must make steps (got {type(optimizer).__name__}): call"
            " optimizer.solve(dataset) and finalize()"
        )
    require_same_parameters(model, optimizer)
    saved = Checkpoint(checkpoint, every, model, optimizer)
    if saved.is_over(dataset):
        return model.eval()
    left = steps_to_make(optimizer, steps)
    reduction = _agreed_reduction(model, loss_reduction, loss_fn)
    prepared = _prepared(model, optimizer, dataset, users, fixed)
    optimizer.discard()  # what a run before left in progress comes again
    drawn |= {"steps": left, "resume": True, "num_workers": num_workers}
    loader = optimizer.loader(prepared.dataset, **drawn)
    due, backward = _due(model, optimizer, loader, loss_fn, reduction, compile=compile)
    with torch.set_grad_enabled(backward):
        _make_steps(optimizer, due, saved, tell, left, progress=progress and is_first())
    prepared.undo(model)
    return model.eval()


def _prepared(
    model: nn.Module,
    optimizer: PrivateOptimizer,
    dataset: Dataset[Any],
    users: Any,
    fixed: dict[str, Any],
) -> Standardized:
    """Returns the data set of pairs in private units, where the plan of the optimizer measures them; else as it is."""
    _require_pairs(dataset)
    if not isinstance(optimizer, PreparedOptimizer) or optimizer._plan.prepare is None:
        return Standardized(dataset, None)
    _require_left_out(optimizer, fixed)  # units are taken out of the weights after the last step
    require_undone(model)
    return standardize(optimizer, dataset, users)


def _untuned(
    model: nn.Module, dataset: Dataset[Any], asked: dict[str, Any], *, verbose: bool
) -> NetSGD:
    """Returns an optimizer whose numbers all follow from a budget, the number of records and the net."""
    budget = one_budget(asked["budget"], asked["epsilon"], asked["delta"])
    plan = NetSGD.plan(n=size_of(dataset, asked["n"], budget), budget=budget, dim=model)
    if verbose:
        print(plan)
    return NetSGD(model.parameters(), plan, accountant=asked["accountant"])


def _require_left_out(optimizer: Optimizer, fixed: dict[str, Any]) -> None:
    """Raises ValueError for an argument that the plan of the optimizer fixes."""
    for name, value in fixed.items():
        if value is not None:
            # PRIVACY: of ids the kind alone, they may be names (test_no_refusal_quotes_an_id)
            shown = (
                type(value).__name__ if name in ("users", "record_ids") else check.shown(value)
            )
            raise ValueError(
                f"{name} must not be given (got {shown}): the plan of"
                f" {type(optimizer).__name__} fixes it"
            )


def _due(
    model: nn.Module,
    optimizer: PrivateOptimizer,
    loader: PrivateLoader,
    loss_fn: _LossFn,
    reduction: str,
    *,
    compile: bool,
) -> tuple[Iterable[Callable[[], Any]], bool]:
    """Returns what makes each step, and whether by a backward; attaches the model, and probes it and the loss."""
    attached = is_attached(model)
    if attached:
        require_sound(model, loss_fn, loader)
    else:
        attach_sound(model, loss_fn, loader, loss_reduction=reduction)
    note_probed(model, optimizer)
    model.train()
    closed = _closed_form(model, optimizer, loss_fn, loader)
    if closed is not None:
        return (partial(optimizer.step_on, rows) for rows in closed.batches(loader)), False
    compiled = _compiled(model, loss_fn, loader, attached, reduction) if compile else None
    settle_sizes(model, loss_fn, loader)
    return _steps_on(model, optimizer, loader, loss_fn, compiled), True


def _closed_form(
    model: nn.Module, optimizer: PrivateOptimizer, loss_fn: _LossFn, loader: PrivateLoader
) -> ClosedForm | None:
    """Returns the rows of a linear model in closed form; None where there are none, or `step` is the caller's."""
    own = own_step(type(optimizer)) is own_step(PrivateOptimizer)  # others expect a backward
    if optimizer.oracle.unit == "user" or not own:
        return None
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    return closed_form(model, trained, loss_fn, loader.dataset, loader)


def _make_steps(
    optimizer: PrivateOptimizer,
    due: Iterable[Callable[[], Any]],
    saved: Checkpoint,
    tell: Callable[[Any], None],
    left: int,
    *,
    progress: bool,
) -> None:
    """Makes the steps that are due, until the budget is spent."""
    goal = optimizer.steps + left
    bar = tqdm(total=left, disable=not progress, unit="step", mininterval=0, miniters=1)
    with optimizer, bar:
        show = _progress(bar, optimizer)
        optimizer.zero_grad()
        saved.save()  # what the first step needs to be resumed: partition and thresholds
        made = optimizer.steps
        for make_step in due:
            try:
                make_step()
            except BudgetExceeded:
                if not optimizer.adaptive or not optimizer.steps:
                    raise
                break  # an adaptive budget has no room for it, which ends the run
            if optimizer.steps > made:  # else it was a part of a draw
                made = optimizer.steps
                saved.step_made()
                tell(optimizer)
            show(goal - optimizer.steps)
    saved.save()
    tell(optimizer)


def _steps_on(
    model: nn.Module,
    optimizer: PrivateOptimizer,
    loader: PrivateLoader,
    loss_fn: _LossFn,
    compiled: Any,
) -> Iterator[Callable[[], Any]]:
    """Yields the step that is due for each batch, after its forward and backward unless rows are compiled."""
    device = next(model.parameters()).device
    at_once = loader.gathers and isinstance(loader.dataset, TensorDataset)
    if at_once:
        _require_all_counted(loss_fn, loader.dataset.tensors[1])
    for batch in loader:
        optimizer.zero_grad()
        users = None
        if optimizer.oracle.unit == "user":
            *batch, users = batch
        users = to_device(users, device)
        if not optimizer.outstanding_rows or not len(
            batch
        ):  # an empty draw is a step of noise only; no data at all
            yield partial(optimizer.step, users=users)
            continue
        if not at_once and compiled is None:
            _require_all_counted(
                loss_fn, batch[1]
            )  # where they are, before a device has to be waited for
        inputs, targets = to_device(batch, device)
        if compiled is not None:
            yield partial(compiled.step, optimizer, inputs, targets, users=users)
            continue
        loss_of(model, loss_fn, inputs, targets).backward()
        yield partial(optimizer.step, users=users)


def _require_all_counted(loss_fn: _LossFn, targets: Any) -> None:
    """Raises PrivacyError where a mean would be over the targets of the batch that are not ignored."""
    if not isinstance(loss_fn, (nn.CrossEntropyLoss, nn.NLLLoss)) or loss_fn.reduction != "mean":
        return
    if isinstance(targets, Tensor) and bool((targets == loss_fn.ignore_index).any()):
        # PRIVACY: each ignored target of one record makes the rows of all others longer
        # (test_a_mean_over_the_targets_that_are_not_ignored_is_refused)
        raise PrivacyError(
            f"{type(loss_fn).__name__}(reduction='mean') must not ignore targets: it divides by the"
            " number of those that count, so that each record is in the rows of all others; use"
            " reduction='sum' and loss_reduction='sum'"
        )


def _fit_row_free(
    model: _Model,
    optimizer: RowFreeOptimizer,
    dataset: Dataset[Any],
    loss_fn: _LossFn,
    num_workers: int,
    progress: bool,
    tell: Callable[[Any], None],
) -> _Model:
    """Makes all planned steps, and releases the answer; the bar shows the steps left, for nothing is spent before."""
    require_same_parameters(model, optimizer)
    _require_pairs(dataset)
    if is_attached(model):
        raise SequenceError(
            f"fit {type(optimizer).__name__} with a model that is not attached (dp.detach(model)):"
            " it needs no per-sample gradients, and attached models have no plain ones"
        )
    optimizer.discard()
    loader = optimizer.loader(dataset, num_workers=num_workers)
    # PRIVACY: (test_fit_refuses_what_the_doctor_finds_before_the_first_step)
    require_sound(model, loss_fn, loader, optimizer)
    device = next(model.parameters()).device
    model.train()
    with optimizer, tqdm(total=len(loader), disable=not progress, unit="step") as bar:
        for batch in loader:
            optimizer.zero_grad()
            inputs, targets = to_device(batch, device)
            loss_of(model, loss_fn, inputs, targets).backward()
            optimizer.step()
            bar.update()
    tell(optimizer)
    return model.eval()


def steps_to_make(optimizer: PrivateOptimizer, steps: int | None) -> int:
    """Returns the number of steps, after making sure that plan and budget admit them all."""
    planned = optimizer.schedule.steps
    left = steps if planned is None else planned - optimizer.steps
    if optimizer.finalized:
        raise SequenceError("the optimizer is finalized: make a new one to train again")
    if left is None:
        raise ValueError(
            "steps must be given: the optimizer has no planned number of steps (got None)"
        )
    if left == 0 and planned:
        raise SequenceError(
            f"all {planned} planned steps are made: call optimizer.finalize(), or make a new"
            " optimizer"
        )
    wanted = check.positive_count(steps=left if steps is None else steps)
    if wanted > left:
        raise ValueError(
            f"steps must be <= {left}, what is left of the {planned} planned ones (got {wanted})"
        )
    if optimizer.adaptive:
        return wanted  # each step is decided when it comes

    def refuses(count: int) -> bool:
        return not optimizer.accountant.admits(optimizer.ahead(count))

    if refuses(wanted):
        admitted = bisect_left(range(1, wanted), True, key=refuses)
        raise InfeasibleError(
            f"steps must be <= {admitted}, as many as the rest of the budget admits (got {wanted}):"
            f" {checks.holdings(optimizer.accountant)}; give steps=, or plan more noise before the run"
        )
    return wanted


def _agreed_reduction(model: nn.Module, asked: str | None, loss_fn: _LossFn) -> str:
    """Returns the loss reduction by which rows are scaled: that of `attach`, if it was called."""
    asked = reduction_of(loss_fn, asked)
    if not is_attached(model):
        return check.choice(("mean", "sum"), loss_reduction=asked or "mean")
    attached = "mean" if model._dpsco.mean else "sum"
    if asked not in (None, attached):
        raise ValueError(
            f"loss_reduction must be {attached!r}, as the model was attached (got {asked!r}); "
            "dp.detach(model) first to attach it in another way"
        )
    return attached


def _require_pairs(dataset: Dataset[Any]) -> None:
    if not checks.number_of_records(dataset):
        return  # legal under add_remove; nothing shows what a record is like
    record = dataset[0]
    if not isinstance(record, (tuple, list)) or len(record) != 2:
        size = f" of {len(record)}" if isinstance(record, (tuple, list)) else ""
        raise ValueError(
            f"dataset must give (input, target) pairs (got {type(record).__name__}{size}): give one"
            " that does, as torch.utils.data.TensorDataset(X, y), or write the loop yourself with"
            " optimizer.loader(dataset)"
        )


def _compiled(
    model: nn.Module, loss_fn: _LossFn, loader: PrivateLoader, attached: bool, reduction: str
) -> Any:
    """Returns compiled rows for a model that `fit` has attached, or None, with a warning, and an attached model."""
    if attached:
        reason = "the model was attached before; dp.detach(model) first"
    elif not len(loader.dataset):
        reason = "the data set is empty"
    else:
        known = first_step_of(model)
        detach(model)
        rows: Any = act("rows.compiled")(model, loss_fn, loader)
        if not isinstance(rows, str):
            loader.isolation.settle("rows are compiled for batches of one size")
            return rows
        attach(model, loss_reduction=reduction)
        first_step_of(model).take(known)
        reason = rows
    warn(f"compile=True is not possible, so that fit goes on without: {reason}", stacklevel=3)
    return None


def _progress(bar: Any, optimizer: PrivateOptimizer) -> Callable[[int], None]:
    """Returns what shows steps made, epsilon and steps left, twice a second, or as often as takes 2 % of the time."""
    accountant = optimizer.accountant
    next_at = -math.inf

    def show(left: int) -> None:
        nonlocal next_at
        now = time.monotonic()
        if bar.disable or (left and now < next_at):
            return
        figures: dict[str, Any] = {}
        if accountant.budget is not None:
            # PRIVACY: shown figures are quoted (test_the_bar_never_shows_less_epsilon_than_was_spent)
            epsilon = accountant.get_epsilon(accountant.budget.quoted_delta)
            figures["epsilon"] = rounded_up(epsilon)
        bar.set_postfix(figures | {"left": left}, refresh=False)
        bar.update(bar.total - left - bar.n)
        done = time.monotonic()
        next_at = done + max(_SHOW_EVERY, (done - now) / _SHARE)

    return show


class Checkpoint:
    """The checkpoint file of one run; without a path there is none, and nothing is saved.

    CONFIDENTIAL: it may hold secret iterates, who was in which batch, and noise that is still to be used. It is written
    with rights for its owner only.

    Args:
        path: of the file; a file of this run is taken up at once, which may lose steps (see `PrivateOptimizer.resume`).
        every: steps between two checkpoints.
        model: with the optimizer's parameters.
        optimizer: whose accountant has a ledger file.

    Raises:
        PrivacyError: no ledger file, another one than that of the run, or a checkpoint of another run.
        ValueError: a checkpoint of another plan, or no checkpoint.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        every: int,
        model: nn.Module,
        optimizer: PrivateOptimizer,
    ) -> None:
        self.path = "" if path is None else os.fspath(path)
        self.every = check.positive_count(every=every)
        self._model = model
        self._optimizer = optimizer
        self._finished = False  # whether the file is of a run that was over
        if path is None:
            return
        if world_size() > 1:
            raise SequenceError(
                f"checkpoint must be None in a run of several processes (got {world_size()})"
            )
        if optimizer.accountant.ledger_path is None:
            # PRIVACY: a checkpoint alone does not know what was released after it
            # (test_a_checkpoint_needs_a_ledger_file)
            raise PrivacyError(
                "accountant must have a ledger file for a run with checkpoints, which knows what"
                " was released after the last one: accountant=dp.Accountant(budget,"
                " ledger_path=...)"
            )
        if os.path.exists(self.path):
            self._take_up()

    def _take_up(self) -> None:
        try:
            state = torch.load(self.path, weights_only=True)
            model = state["model"]
            optimizer = state["optimizer"]
            run = state["optimizer"]["dpsco"]["run"]
        except (RuntimeError, EOFError, KeyError, TypeError, pickle.UnpicklingError) as error:
            raise ValueError(
                f"checkpoint must be a file that fit has written (got {self.path!r},"
                f" {type(error).__name__}): name another file"
            ) from error
        self._finished = bool(state["optimizer"]["dpsco"]["finalized"])
        if not self._optimizer.steps and not self._optimizer.finalized:
            self._model.load_state_dict(model)
            self._optimizer.resume(optimizer)
        elif run != self._optimizer.run:
            raise PrivacyError(
                f"checkpoint must be a file of this run (got {self.path!r}, of another one): name"
                " another file"
            )

    def is_over(self, dataset: Dataset[Any]) -> bool:
        """Returns whether the run that was taken up has no steps to make, after installing its answer.

        Warns if that was installed before: nothing is left of the records by which a finished run could know them.

        Raises:
            UnitError: the data set is another one, as its public number of records shows.
        """
        optimizer = self._optimizer
        planned = optimizer.schedule.steps
        made = planned is not None and optimizer.steps >= planned
        if not self.path and made and not optimizer.finalized:
            optimizer.finalize()  # the last step was lost
            return True
        if not self.path or not (made or optimizer.finalized):
            return False
        if optimizer.accountant.unit == "example":
            checks.require_universe(
                optimizer.design, optimizer.adjacency, checks.number_of_records(dataset)
            )
        if self._finished:
            warnings.warn(
                f"nothing was trained: checkpoint={self.path!r} is of a finished run, whose model"
                " is returned, whatever dataset holds; to train another one, name another file",
                UtilityWarning,
                stacklevel=4,
            )
        else:
            optimizer.finalize()
            self.save()
        return True

    def step_made(self) -> None:
        """Saves if it is time to."""
        if self._optimizer.steps % self.every == 0:
            self.save()

    def save(self) -> None:
        """Replaces the file by the current state, which is on the disk before it gets the name."""
        if not self.path:
            return
        state: dict[str, Any] = {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }
        draft = f"{self.path}.draft"
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, self.path)
        sync_folder(self.path)
