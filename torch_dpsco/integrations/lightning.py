"""Lightning's Trainer with private steps: one callback, and nothing else.

    private = PrivateTraining(epsilon=3.0, delta=1e-5)
    Trainer(max_epochs=10, callbacks=[private]).fit(module, DataLoader(dataset, 64, shuffle=True), public_validation)

The torch optimizer that `configure_optimizers` returns goes on making the updates, from private means; or it returns a
private optimizer, made from a plan, and the callback gets no budget.

The Trainer iterates over draws of `optimizer.loader`, one batch of Lightning's for each draw, so that its counters
tell nothing of their sizes; all parts of a draw but the last are used up before Lightning sees that one. What training
records gave reaches no logger and no bar (`log_training`). Validation and checkpoints have the private answer so far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch import callbacks as kinds
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from torch_dpsco import _validate as check
from torch_dpsco import private_loop
from torch_dpsco._validate import typed
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.budgets import Budget, one_budget
from torch_dpsco.accounting.calibrate import rounded_up
from torch_dpsco.algorithms.row_free import RowFreeOptimizer
from torch_dpsco.compat import tree_leaves
from torch_dpsco.diagnosis.probe import settle_sizes
from torch_dpsco.diagnosis.script import OfBatch
from torch_dpsco.errors import PrivacyError, SequenceError, warn
from torch_dpsco.noise import SecretState
from torch_dpsco.rows.attach import detach, is_attached
from torch_dpsco.sampling import PrivateLoader
from torch_dpsco.show.loggers import Logger, in_single, public_numbers
from torch_dpsco.step.checks import require_same_parameters
from torch_dpsco.step.run import CommonOptimizer
from torch_dpsco.step.step import PrivateOptimizer
from torch_dpsco.train import steps_to_make

_HALF = "bf16-mixed"
_PRECISIONS = ("32-true", "64-true", _HALF)
_UNSET = (-1, 1000)  # max_epochs of a Trainer that was given none
_CLIP = "the plan has the clip, of each record's gradient, and this one would do nothing: leave it out"
_RUNS = "it spends budget, or leaves draws out: leave it out, and try the script by dp.doctor"
_USUAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "gradient_clip_val": ((None, 0), _CLIP),
    "gradient_clip_algorithm": ((None,), _CLIP),
    "fast_dev_run": ((False, 0), _RUNS),
    "overfit_batches": ((0,), _RUNS),
    "limit_train_batches": ((1.0,), f"{_RUNS}; max_steps is the plan's"),
    "reload_dataloaders_every_n_epochs": ((0,), _RUNS),
    "precision": (_PRECISIONS, f"take one of {', '.join(_PRECISIONS)}"),
    "automatic_optimization": ((True,), "return the loss from training_step"),
}
_AVERAGE = "give average= to the plan"
_TRIALS = "its trials are steps, and the plan has what it looks for"
_CALLBACKS = {
    kinds.GradientAccumulationScheduler: "give one accumulate_grad_batches to the Trainer",
    kinds.StochasticWeightAveraging: _AVERAGE,
    kinds.WeightAveraging: _AVERAGE,
    kinds.BatchSizeFinder: f"{_TRIALS}; accumulate_grad_batches has the memory",
    kinds.LearningRateFinder: _TRIALS,
    kinds.ModelPruning: "it changes parameters between steps; prune the released model",
}
_TELLING = dict.fromkeys(
    (kinds.DeviceStatsMonitor, kinds.ThroughputMonitor),
    "it logs what follows the sizes of draws; private_logs=True if logs stay private",
)
_QUERY = "torch_dpsco_query"  # in checkpoints, beside the answer: the point of the next step


class PrivateTraining(Callback):
    """Makes `Trainer.fit` private.

    The train DataLoader gives its data set, collate function and workers; batches are drawn by the optimizer's design.
    The module is attached, and probed by the doctor (with its own `training_step`, on made-up records), before anything
    is spent. Training ends with the plan's last step, or earlier by a callback or `max_time`; the answer is then
    installed.

    With a budget, `configure_optimizers` returns any torch optimizer, as for `dp.make_private`: steps or epochs are the
    Trainer's, and the batch size is that of the loader, times `accumulate_grad_batches`. Without one it returns an
    optimizer made from a plan, and `accumulate_grad_batches=k` means parts of a draw of a k-th of a batch each.

    Args:
        epsilon: what the whole run may spend, with `delta`.
        delta: see `epsilon`.
        budget: in place of epsilon and delta.
        n: PUBLIC number of records; asked for under add_remove alone, else that of the data set.
        clip: see `dp.make_private`.
        recipe: see `dp.make_private`; steps are the plan's, unless max_steps or max_epochs are given.
        accountant: ledger to charge; default a new one.
        loss_reduction: "mean" or "sum", how the loss of `training_step` reduces over the batch.
        users: for optimizers that protect users: the id of the user of each record.
        private_logs: YOU keep bars and loggers as confidential as the records: `self.log` in training hooks then works.
            Else such values are left out, with a warning. Callbacks never see them.
        private_checkpoints: YOU keep checkpoints as confidential as the records, which is asked for where they hold
            what must stay secret (see `PrivateOptimizer.state_dict`).

    Raises:
        PrivacyError: the model or the loss couples records; a callback monitors what training records gave; a
            checkpoint would hold secrets.
        SequenceError: a setting of Trainer or module that would void the guarantee, or do nothing; says what to give.
        ValueError: steps or epochs that are not the plan's; says which are.

    Guarantee:
        That of the optimizer. What hooks and callbacks of yours do with training batches by themselves is yours.
    """

    @typed
    def __init__(
        self,
        *,
        epsilon: float | None = None,
        delta: float | None = None,
        budget: Budget | None = None,
        n: int | None = None,
        clip: float | None = None,
        recipe: bool = False,
        accountant: Accountant | None = None,
        loss_reduction: str = "mean",
        users: Any = None,
        private_logs: bool = False,
        private_checkpoints: bool = False,
    ) -> None:
        self.loss_reduction = check.choice(("mean", "sum"), loss_reduction=loss_reduction)
        self.private_logs = private_logs
        self.private_checkpoints = private_checkpoints
        if n is not None:
            check.positive_count(n=n)
        if clip is not None:
            check.positive(clip=clip)
        asked = (epsilon, delta, budget, n, clip, accountant) != (None,) * 6 or recipe
        self._budget = one_budget(budget, epsilon, delta) if asked else None
        self._n = n
        self._accountant = accountant
        self._numbers: dict[str, Any] = {"clip": clip, "recipe": recipe}
        self._users = users
        self._undo: list[Callable[[], None]] = []
        self._shown: AbstractContextManager[None] | None = None
        self._attached: nn.Module | None = None
        self._begin(None, None)

    def _begin(self, trainer: Any, module: Any) -> None:
        """Forgets the fit before, if there was one."""
        self._trainer = trainer
        self._module = module
        # optimizer's state in the checkpoint that fit goes on with
        self._saved: dict[str, Any] | None = None
        self._query: dict[str, Tensor] = {}
        self._probing = self._told = self._drawn = self._configured = False
        self.optimizer: PrivateOptimizer | None = None

    # -- before the first step ----------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses what does not go with private steps, and takes the places of `log` and of the train loader."""
        self._close()
        if stage != "fit":
            return
        _require_settings(trainer, pl_module, self.private_logs)
        self._begin(trainer, pl_module)
        self._log = pl_module.log
        self._on_save = pl_module.on_save_checkpoint
        self._every = max(1, self._trainer.log_every_n_steps)
        self._accumulate = trainer.accumulate_grad_batches
        self._process = trainer.strategy.process_dataloader
        trainer.accumulate_grad_batches = 1
        self._undo.append(lambda: setattr(trainer, "accumulate_grad_batches", self._accumulate))
        self._replace(pl_module, "log", self.log_training)
        self._replace(pl_module, "on_save_checkpoint", self._add_answer)
        self._replace(trainer.strategy, "process_dataloader", self._private_loader)
        self._reduction = self.loss_reduction
        if trainer.precision == _HALF and self._reduction == "mean":
            self._reduction = "sum"
            self._replace(pl_module, "training_step", _summing(pl_module.training_step))
        for callback in self._trainer.callbacks:  # theirs is bound already
            callback.log = self.log_training

    def _replace(self, thing: Any, name: str, value: Any) -> None:
        setattr(thing, name, value)
        self._undo.append(lambda: delattr(thing, name))

    def _close(self) -> None:
        self._end_release()
        while self._undo:
            self._undo.pop()()
        self._detach()

    def _detach(self) -> None:
        model = self._attached
        self._attached = None
        if model is not None and is_attached(model):
            detach(model)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Takes the optimizer's state, to resume the run with its ledger in place of loading another one's."""
        states = checkpoint.get("optimizer_states")
        if trainer.state.fn == "fit" and states:
            # PRIVACY: steps that were charged after the checkpoint are not made again
            # (test_a_killed_run_goes_on_and_its_lost_steps_stay_charged)
            self._saved, checkpoint["optimizer_states"] = states[0], []
            self._query = checkpoint.get(_QUERY, {})

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """From now on loaders are private; those by which `configure_optimizers` has counted steps were not."""
        self._configured = True
        if self._budget is None:
            _private_optimizer(trainer)
        trainer.fit_loop._combined_loader = None

    def _take_up(self, optimizer: PrivateOptimizer) -> None:
        """Takes the optimizer up where the checkpoint is, and compares the Trainer's limits with the plan."""
        trainer = self._trainer
        self.optimizer = optimizer
        require_same_parameters(self._module, optimizer)
        # steps that a crash may have ended with
        lost = self._saved is not None and not self._saved["dpsco"]["finalized"]
        if self._saved is not None:
            named = dict(self._module.named_parameters())
            with torch.no_grad():
                for name, value in self._query.items():
                    named[name].copy_(value)
            if optimizer.accountant.ledger_path is None:
                optimizer.load_state_dict(self._saved)
            else:
                optimizer.resume(self._saved)
            self._saved = None
        planned = optimizer.schedule.steps if self._budget is not None else None
        self._goal = planned or _last_step(trainer, optimizer)
        self._logger = Logger(self._write, every=self._every)
        if optimizer.finalized:
            if not lost:
                warn(
                    "nothing was trained: the checkpoint is of a finished run; to train anew, give none"
                )
            trainer.should_stop = True
        elif (plan := getattr(optimizer, "_plan", None)) is not None:
            rank_zero_info(str(plan))

    def _made(self, loader: DataLoader[Any]) -> PrivateOptimizer:
        """Returns the optimizer that `configure_optimizers` has returned, or a private one that steps by it."""
        trainer = self._trainer
        if self._budget is None:
            optimizer = _private_optimizer(trainer)
            planned = optimizer.design.batch_size
            if loader.batch_size != planned:
                raise SequenceError(
                    f"batch_size of the training loader must be {planned}, the plan's (got"
                    f" {loader.batch_size}): DataLoader(dataset, batch_size={planned}, ...)"
                )
            return optimizer
        found = trainer.optimizers
        if len(found) != 1 or isinstance(found[0], CommonOptimizer):
            raise SequenceError(
                "configure_optimizers must return one torch optimizer beside a budget (got"
                f" {_names(found)})"
            )
        recipe = self._numbers["recipe"]
        if recipe and trainer.lr_scheduler_configs:
            raise SequenceError(
                "configure_optimizers must return no scheduler with recipe=True, which has the rate"
            )
        n = private_loop.size_of(loader.dataset, self._n, self._budget)
        public: dict[str, Any] = {"n": n, "budget": self._budget} | _length(trainer, recipe)
        if not recipe:
            public |= {"batch_size": (loader.batch_size or 1) * self._accumulate}
        rest = {"accountant": self._accountant}
        private = private_loop.stepped_by(found[0], public, rest, **self._numbers)
        trainer.optimizers = [private]
        return private

    def _require_secrets_kept(self, optimizer: PrivateOptimizer) -> None:
        """Raises at the start, and not at the first checkpoint, when steps are spent."""
        savers = self._trainer.checkpoint_callbacks
        if not all(getattr(saver, "save_weights_only", False) for saver in savers):
            self._require_public(optimizer.state_dict())

    def _require_public(self, state: Any) -> None:
        if isinstance(state, SecretState) and not self.private_checkpoints:
            # PRIVACY: loggers upload checkpoints (test_checkpoints_with_secrets_are_refused_until_they_stay_private)
            raise PrivacyError(
                "checkpoints of this run must be kept as confidential as its records, since they"
                " say who is in which batch, or hold noise still to be used: private_checkpoints=True"
                " if you do, ModelCheckpoint(save_weights_only=True), or enable_checkpointing=False"
            )

    def _private_loader(self, loader: Any) -> Any:
        """Returns what the Trainer iterates over in place of a loader: draws, if it is the training loader."""
        trainer = self._trainer
        if not trainer.training or not self._configured:
            return self._process(loader)
        if self._drawn:
            raise SequenceError(
                "Trainer.fit must be given one training loader: join the data sets of several"
            )
        self._drawn = True
        _require_train_loader(loader)
        optimizer = self._made(loader)
        self._take_up(optimizer)
        epoch = min(self._goal, optimizer.design.batches)
        if trainer.should_stop:  # all steps are made
            return _Draws(self, iter(()), epoch)
        optimizer.discard()  # what a run before left in progress comes again
        parts = self._accumulate
        private = optimizer.loader(
            loader.dataset,
            self._users,
            steps=steps_to_make(optimizer, self._goal - optimizer.steps),
            resume=True,
            physical_batch_size=(
                None if parts == 1 else math.ceil(optimizer.design.batch_size / parts)
            ),
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
        )
        self._probe(private, optimizer)
        self._require_secrets_kept(optimizer)
        return _Draws(self, self._batches(private), epoch)

    def _probe(self, loader: PrivateLoader, optimizer: PrivateOptimizer) -> None:
        """Attaches the model, and tries it and the training step on made-up records."""
        model = _model_of(self._module)
        loss = OfBatch(lambda model, batch: _loss_of(self._training_step(batch, 0)))
        self._probing = True
        try:
            # PRIVACY: (test_coupled_records_are_found_before_anything_is_spent)
            if is_attached(model):
                private_loop.require_sound(model, loss, loader)
            else:
                private_loop.attach_sound(model, loss, loader, loss_reduction=self._reduction)
                self._attached = model
            private_loop.note_probed(model, optimizer)
            settle_sizes(model, loss, loader)
        finally:
            self._probing = False

    def _training_step(self, batch: Any, index: int) -> Any:
        return self._trainer.strategy.training_step(
            *_arguments_of_step(self._module, batch, index)
        )

    # -- steps --------------------------------------------------------------------------------------------------------

    def _batches(self, loader: PrivateLoader) -> Iterator[Any]:
        """Yields the last part of each draw, after the steps on the parts before it."""
        log = loader.batch_sampler.log
        users = self._users is not None
        for batch in loader:
            if users:  # the optimizer knows whose rows these are
                batch = batch[:-1]
            if log.waiting[-1].last:
                yield batch
            else:
                # PRIVACY: the number of parts tells the size of a draw (test_counters_count_draws_and_not_their_parts)
                self._use_part(batch)

    def _use_part(self, batch: Any) -> None:
        trainer = self._trainer
        module = self._module
        batch = module._on_before_batch_transfer(
            trainer.precision_plugin.convert_input(batch), dataloader_idx=0
        )
        batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
        self._probing = True  # values of a part are not logged
        try:
            loss = _loss_of(self._training_step(batch, trainer.fit_loop.batch_idx + 1))
        finally:
            self._probing = False
        assert self.optimizer is not None
        trainer.strategy.backward(loss, self.optimizer)
        self.optimizer.step()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any
    ) -> None:
        """Shows public numbers, and stops after the last step of the plan."""
        optimizer = self.optimizer
        assert optimizer is not None
        self._logger(optimizer)
        done = optimizer.steps >= self._goal
        due = done or optimizer.steps % self._every == 0
        if due and (spent := public_numbers(optimizer).get("epsilon")) is not None:
            self._log("epsilon", _shown(spent), prog_bar=True, logger=False, batch_size=1)
        if done:
            trainer.should_stop = True

    def _write(self, numbers: dict[str, float], step: int) -> None:
        for logger in self._trainer.loggers:
            logger.log_metrics(in_single(numbers), step=step)

    def log_training(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Stands for `log` of module and callbacks: leaves out what was computed in training."""
        if self._module._trainer is not self._trainer or not self._trainer.training:
            self._log(name, value, *args, **options)
            return
        if self._probing:
            return
        if name in _watched(self._trainer):
            # PRIVACY: when a run stops, or which iterate is kept, would tell of the records
            # (test_nobody_decides_by_a_training_loss)
            raise PrivacyError(
                f"{name} must not be monitored: it is computed from training records, and what is"
                " decided by it tells of them; log it in validation_step, on public data"
            )
        if self.private_logs:
            self._log(name, value, *args, **options)
        elif not self._told:
            # PRIVACY: (test_what_training_logs_reaches_no_logger_and_no_bar)
            self._told = True
            warn(
                f"{name} was not logged: what training records gave is private. Log on public data"
                " in validation_step; or PrivateTraining(private_logs=True), if you keep bars and"
                " loggers as confidential as the records",
                stacklevel=3,
            )

    # -- the answer ---------------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Puts the private answer so far into the module."""
        if self.optimizer is not None and trainer.state.fn == "fit":
            self._shown = self.optimizer.released()
            self._shown.__enter__()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Puts the point of the next step back."""
        self._end_release()

    def _end_release(self) -> None:
        shown = self._shown
        self._shown = None
        if shown is not None:
            shown.__exit__(None, None, None)

    def _add_answer(self, checkpoint: dict[str, Any]) -> None:
        """Saves the private answer as the module's weights, and beside it the point where the run goes on."""
        self._end_release()  # an exception during validation
        optimizer = self.optimizer
        module = self._module
        if optimizer is not None:
            for state in checkpoint.get("optimizer_states", []):
                self._require_public(state)
            with optimizer.released():
                answer = {k: p.detach().clone() for k, p in module.named_parameters()}
            kept = {k: p.detach() for k, p in module.named_parameters()}
            queries = {k: p for k, p in kept.items() if not p.equal(answer[k])}
            checkpoint["state_dict"] |= {k: answer[k] for k in queries}
            if queries and checkpoint.get("optimizer_states"):
                checkpoint[_QUERY] = queries
        self._on_save(checkpoint)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Installs the answer."""
        self._end_release()
        if self.optimizer is not None and not self.optimizer.finalized:
            self.optimizer.finalize()
            self._logger(self.optimizer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leaves module and optimizer at the last step that was made."""
        self._end_release()
        if self.optimizer is not None and not self.optimizer.finalized:
            self.optimizer.discard()
        self._detach()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Puts everything back."""
        self._close()


class _Draws:
    """The draws of a run, so many for each of Lightning's epochs.

    Args:
        owner: for its name in messages.
        batches: all that are left of the run.
        epoch: draws of an epoch, public.
    """

    def __init__(self, owner: PrivateTraining, batches: Iterator[Any], epoch: int) -> None:
        self._owner = owner
        self._batches = batches
        self._epoch = epoch

    def __len__(self) -> int:
        return self._epoch

    def __iter__(self) -> Iterator[Any]:
        # in an order that Lightning fixes by counters of draws: a new iteration goes on with the same run
        for _, batch in zip(range(self._epoch), self._batches):  # noqa: B905
            yield batch


def _loss_of(output: Any) -> Tensor:
    """Returns the loss that a training step has returned."""
    loss = output["loss"] if isinstance(output, dict) else output
    if not isinstance(loss, Tensor):
        raise SequenceError(
            f"training_step must return the loss of every batch (got {type(loss).__name__})"
        )
    return loss


def _summing(step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a training step whose loss, a mean, is multiplied by the number of rows."""

    @wraps(step)
    def summed(batch: Any, *args: Any, **kwargs: Any) -> Any:
        output = step(batch, *args, **kwargs)
        rows = next((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)), 1)
        # PRIVACY: half precision rounds 1/rows, which may depend on public numbers alone: draws are filled up to one
        # (test_a_mean_in_bfloat16_is_over_a_public_number_of_rows)
        loss = _loss_of(output) * rows
        return output | {"loss": loss} if isinstance(output, dict) else loss

    return summed


def _shown(epsilon: float) -> float:
    """Returns an epsilon that no bar shows to be less: float32 of three digits, none past the third decimal."""
    # PRIVACY: shown figures are quoted (test_the_bar_never_shows_less_than_was_spent)
    short = math.ceil(epsilon * 1000.0) / 1000.0 if math.isfinite(epsilon) else epsilon
    short = float(rounded_up(short, 3))
    return in_single({"privacy/epsilon": short})["privacy/epsilon"]


# -- what goes with private steps ------------------------------------------------------------------------------------


def _require_settings(trainer: Any, module: LightningModule, private_logs: bool) -> None:
    """Raises SequenceError for a setting that would void the guarantee, or would do nothing in silence."""
    for name, (fine, way_out) in _USUAL.items():
        value = getattr(module if name == "automatic_optimization" else trainer, name)
        if value not in fine or (name == "limit_train_batches" and not isinstance(value, float)):
            # PRIVACY: (test_settings_that_do_not_go_with_private_steps_are_refused_by_name,
            # test_one_batch_of_an_epoch_is_not_taken_for_all_of_them)
            raise SequenceError(
                f"{name} must be {fine[0]!r} for private training (got {value!r}): {way_out}"
            )
    if type(trainer.strategy) is not SingleDeviceStrategy:
        # PRIVACY: gradients of all processes would be joined before they are clipped
        # (test_settings_that_do_not_go_with_private_steps_are_refused_by_name)
        raise SequenceError(
            "strategy must be that of one device for private training (got"
            f" {type(trainer.strategy).__name__}): give devices=1; for several processes write the"
            " loop with dp.fit under torchrun (docs/distributed.md)"
        )
    _require_own_calls(trainer, module, private_logs)


def _require_own_calls(trainer: Any, module: LightningModule, private_logs: bool) -> None:
    """Raises SequenceError for callbacks and overridden methods that touch or show gradients."""
    for callback in trainer.callbacks:
        for kind, way_out in (_CALLBACKS if private_logs else _CALLBACKS | _TELLING).items():
            if isinstance(callback, kind):
                raise SequenceError(
                    f"callbacks must not hold a {kind.__name__} for private training: {way_out}"
                )
    if is_overridden("configure_gradient_clipping", module, parent=LightningModule):
        raise SequenceError(
            f"configure_gradient_clipping must not be overridden for private training: {_CLIP}"
        )


def _private_optimizer(trainer: Any) -> PrivateOptimizer:
    """Returns the module's optimizer, the only one and private."""
    optimizers = trainer.optimizers
    found = optimizers[0] if len(optimizers) == 1 else None
    if isinstance(found, PrivateOptimizer):
        return found
    got = _names(optimizers)
    if isinstance(found, RowFreeOptimizer):
        # PRIVACY: Lightning shows iterates to validation, checkpoints and callbacks
        # (test_optimizers_of_secret_iterates_are_refused)
        raise SequenceError(
            f"configure_optimizers must not return {got}, whose iterates are secret until"
            " finalize(): use dp.fit"
        )
    raise SequenceError(
        f"configure_optimizers must return one private optimizer (got {got}): give"
        " PrivateTraining(epsilon=..., delta=...), or return dp.HolderSGD(self.parameters(), plan)"
    )


def _names(optimizers: list[Any]) -> str:
    return ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "none"


def _length(trainer: Any, recipe: bool) -> dict[str, Any]:
    """Returns how long a run is by the Trainer; nothing where a recipe says it."""
    epochs: int = trainer.fit_loop.max_epochs
    if trainer.max_steps != -1:
        return {"steps": trainer.max_steps}
    if epochs in _UNSET and not recipe:
        raise ValueError(
            f"max_epochs or max_steps must be given (got {epochs}), or recipe=True, which has steps"
        )
    return {} if epochs in _UNSET else {"epochs": epochs}


def _last_step(trainer: Any, optimizer: PrivateOptimizer) -> int:
    """Returns after how many steps training ends; raises ValueError if the Trainer's limits are not the plan's."""
    planned = optimizer.schedule.steps
    epoch = optimizer.design.batches
    steps: int = trainer.max_steps
    epochs: int = trainer.fit_loop.max_epochs
    if planned is None:
        limits = [steps] * (steps != -1) + [epochs * epoch] * (epochs not in (None, -1))
        if not limits:
            raise ValueError(
                "max_steps or max_epochs must be given: the plan has no last step (got -1)"
            )
        return min(limits)
    needed = math.ceil(planned / epoch)
    for name, given, fits in (("steps", steps, planned), ("epochs", epochs, needed)):
        least = getattr(trainer, f"min_{name}") or 0
        if given not in (None, -1, fits) or least > fits:
            raise ValueError(
                f"max_{name} must be {fits}, in which the plan's {planned} steps are made, and"
                f" min_{name} <= {fits} (got {given} and {least}): Trainer(max_steps={planned}), or"
                f" max_epochs={needed}"
            )
    return planned


def _require_train_loader(loader: Any) -> None:
    """Raises SequenceError unless the training loader is one whose batches may be replaced by private ones."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise SequenceError(
            "the training loader must be a torch DataLoader of a map-style data set, with"
            f" shuffle=True (got {check.shown(loader)}): its batches are drawn anew"
        )
    private_loop.require_replaceable(loader, "the training loader")


def _model_of(module: LightningModule) -> nn.Module:
    """Returns what training steps call: the only model that the module holds, or the module itself by its forward."""
    children = [
        child for child in module.children() if any(p.requires_grad for p in child.parameters())
    ]
    own = any(p.requires_grad for p in module.parameters(recurse=False))
    if len(children) == 1 and not own:
        return children[0]
    if is_overridden("forward", module, parent=LightningModule):
        return module
    raise SequenceError(
        "the module must have a forward that training_step calls as self(inputs), so that rows of"
        " different forwards can be told apart; or hold one model, with all parameters"
    )


def _arguments_of_step(module: LightningModule, batch: Any, index: int) -> tuple[Any, ...]:
    """Returns what Lightning would call `training_step` with."""
    named = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    return (batch, index) if named else (batch,)


def _watched(trainer: Any) -> set[str]:
    """Returns the names of the metrics by which callbacks and schedulers decide, as `log` is given them."""
    found = [getattr(callback, "monitor", None) for callback in trainer.callbacks]
    found += [
        config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau
    ]
    return {str(name).removesuffix("_step").removesuffix("_epoch") for name in found}
