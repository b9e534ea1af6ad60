"""Lightning's Trainer with private steps: one callback, and an optimizer that is made from a plan.

    class Classifier(LightningModule):                               # forward, training_step, ... as they were
        def configure_optimizers(self):
            return dp.HolderSGD(self.parameters(), plan)             # 1

    private = PrivateTraining()                                      # 2
    trainer = Trainer(max_steps=plan.steps, callbacks=[private])     # 3
    trainer.fit(Classifier(), DataLoader(dataset, plan.batch_size, shuffle=True), public_validation)

The Trainer iterates over draws of `optimizer.loader`, one batch of Lightning's for each draw, so that its counters
tell nothing of their sizes; all parts of a draw but the last are used up before Lightning sees that one. What training
records gave reaches no logger and no bar (`log_training`). Validation and checkpoints have the private answer so far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn

from torch_dpsco import _validate as check
from torch_dpsco._doors import typed
from torch_dpsco.accounting.report.figures import rounded_up
from torch_dpsco.doctor.script import OfBatch
from torch_dpsco.errors import PrivacyError, SequenceError, warn
from torch_dpsco.integrations import lightning_checks as checks
from torch_dpsco.make_private import attach_sound, note_probed, require_sound
from torch_dpsco.noise import SecretState
from torch_dpsco.rows.attach import detach, is_attached
from torch_dpsco.sampling import PrivateLoader
from torch_dpsco.show.loggers import Logger, in_single, public_numbers
from torch_dpsco.step.checks import require_same_parameters
from torch_dpsco.step.step import PrivateOptimizer
from torch_dpsco.train import steps_to_make

_QUERY = "torch_dpsco_query"  # in checkpoints, beside the answer: the point of the next step


class PrivateTraining(Callback):
    """Makes `Trainer.fit` private, for a module whose `configure_optimizers` returns an optimizer made from a plan.

    The train DataLoader gives its data set, collate function and workers; batches are drawn by the optimizer's design.
    The module is attached, and probed by the doctor (with its own `training_step`, on made-up records), before anything
    is spent. `accumulate_grad_batches=k` means parts of a draw of a k-th of a batch each, for less memory. Training
    ends with the plan's last step, or earlier by a callback or `max_time`; the answer is then installed.

    Args:
        loss_reduction: "mean" or "sum", how the loss of `training_step` reduces over the batch.
        users: for optimizers that protect users: the id of the user of each record.
        padding: see `PrivateOptimizer.loader`.
        delta: at which epsilon is shown; default the budget's.
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
        loss_reduction: str = "mean",
        users: Any = None,
        padding: bool | None = None,
        delta: float | None = None,
        private_logs: bool = False,
        private_checkpoints: bool = False,
    ) -> None:
        self.loss_reduction = check.choice(("mean", "sum"), loss_reduction=loss_reduction)
        self.private_logs = private_logs
        self.private_checkpoints = private_checkpoints
        self._users = users
        self._padding = padding
        self._delta = None if delta is None else check.open_interval(0.0, 1.0, delta=delta)
        self._undo: list[Callable[[], None]] = []
        self._saved: dict[str, Any] | None = (
            None  # optimizer's state in the checkpoint that fit goes on with
        )
        self._query: dict[str, Tensor] = {}
        self._shown: AbstractContextManager[None] | None = None
        self._attached: nn.Module | None = None
        self._probing = self._told = self._drawn = False
        self._trainer: Any = None  # of the fit that runs, as is the module
        self._module: Any = None
        self.optimizer: PrivateOptimizer | None = None

    # -- before the first step ----------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses what does not go with private steps, and takes the places of `log` and of the train loader."""
        self._close()
        if stage != "fit":
            return
        checks.require_settings(trainer, pl_module, self.private_logs)
        self._told = False
        self._drawn = False
        self.optimizer = None
        self._saved = None
        self._query = {}
        self._trainer = trainer
        self._module = pl_module
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
        """Takes the optimizer up where the checkpoint is, and compares the Trainer's limits with the plan."""
        self.optimizer = optimizer = checks.private_optimizer(trainer)
        require_same_parameters(pl_module, optimizer)
        lost = (
            self._saved is not None and not self._saved["dpsco"]["finalized"]
        )  # steps that a crash may have ended with
        if self._saved is not None:
            named = dict(pl_module.named_parameters())
            with torch.no_grad():
                for name, value in self._query.items():
                    named[name].copy_(value)
            if optimizer.accountant.ledger_path is None:
                optimizer.load_state_dict(self._saved)
            else:
                optimizer.resume(self._saved)
            self._saved = None
        self._goal = checks.last_step(trainer, optimizer)
        self._logger = Logger(self._write, every=self._every, delta=self._delta)
        if (
            not self._is_over(trainer, optimizer, lost)
            and (plan := getattr(optimizer, "_plan", None)) is not None
        ):
            rank_zero_info(str(plan))

    def _is_over(self, trainer: Trainer, optimizer: PrivateOptimizer, lost: bool) -> bool:
        if not optimizer.finalized:
            return False
        if not lost:
            warn(
                "nothing was trained: the checkpoint is of a finished run; to train anew, give"
                " none",
                stacklevel=4,
            )
        trainer.should_stop = True
        return True

    def _require_secrets_kept(self, optimizer: PrivateOptimizer) -> None:
        """Raises at the start, and not at the first checkpoint, when steps are spent."""
        if not all(
            getattr(saver, "save_weights_only", False)
            for saver in self._trainer.checkpoint_callbacks
        ):
            self._require_public(optimizer.state_dict())

    def _require_public(self, state: Any) -> None:
        if isinstance(state, SecretState) and not self.private_checkpoints:
            # PRIVACY: loggers upload checkpoints (test_checkpoints_with_secrets_are_refused_until_they_stay_private)
            raise PrivacyError(
                "checkpoints of this run must be kept as confidential as its records, since they"
                " say who is in which batch, or hold noise that is still to be used:"
                " PrivateTraining(private_checkpoints=True) if you keep them so,"
                " ModelCheckpoint(save_weights_only=True), or Trainer(enable_checkpointing=False)"
            )

    def _private_loader(self, loader: Any) -> Any:
        """Returns what the Trainer iterates over in place of a loader: draws, if it is the training loader."""
        optimizer = self.optimizer
        trainer = self._trainer
        if not trainer.training or optimizer is None:
            return self._process(loader)
        epoch = min(self._goal, optimizer.design.batches)
        if trainer.should_stop:  # all steps are made
            return _Draws(self, iter(()), epoch)
        if self._drawn:
            raise SequenceError(
                "Trainer.fit must be given one training loader: join the data sets of several"
            )
        self._drawn = True
        checks.require_train_loader(loader, optimizer)
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
            padding=self._padding,
        )
        self._probe(private, optimizer)
        self._require_secrets_kept(optimizer)
        return _Draws(self, self._batches(private), epoch)

    def _probe(self, loader: PrivateLoader, optimizer: PrivateOptimizer) -> None:
        """Attaches the model, and tries it and the training step on made-up records."""
        model = checks.model_of(self._module)
        loss = OfBatch(lambda model, batch: _loss_of(self._training_step(batch, 0)))
        self._probing = True
        try:
            # PRIVACY: (test_coupled_records_are_found_before_anything_is_spent)
            if is_attached(model):
                require_sound(model, loss, loader)
            else:
                attach_sound(model, loss, loader, loss_reduction=self.loss_reduction)
                self._attached = model
        finally:
            self._probing = False
        note_probed(model, optimizer)

    def _training_step(self, batch: Any, index: int) -> Any:
        return self._trainer.strategy.training_step(
            *checks.arguments_of_step(self._module, batch, index)
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
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Shows public numbers, and stops after the last step of the plan."""
        optimizer = self.optimizer
        assert optimizer is not None
        self._logger(optimizer)
        if (done := optimizer.steps >= self._goal) or optimizer.steps % self._every == 0:
            spent = public_numbers(optimizer, self._delta).epsilon
            if spent is not None:
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
        if any(
            name == watched.removesuffix("_step").removesuffix("_epoch")
            for watched in checks.watched(self._trainer)
        ):
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
                answer = {
                    name: value.detach().clone() for name, value in module.named_parameters()
                }
            queries = {
                name: p.detach()
                for name, p in module.named_parameters()
                if not p.equal(answer[name])
            }
            checkpoint["state_dict"] |= {
                name: value for name, value in answer.items() if name in queries
            }
            if queries and checkpoint.get("optimizer_states"):
                checkpoint[_QUERY] = queries
        self._on_save(checkpoint)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Installs the answer."""
        self._end_release()
        if self.optimizer is not None and not self.optimizer.finalized:
            self.optimizer.finalize()
            self._logger(self.optimizer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
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


def _shown(epsilon: float) -> float:
    """Returns an epsilon that no bar shows to be less: float32 of three digits, none past the third decimal."""
    # PRIVACY: shown figures are quoted (test_the_bar_never_shows_less_than_was_spent)
    short = float(
        rounded_up(math.ceil(epsilon * 1000.0) / 1000.0 if math.isfinite(epsilon) else epsilon, 3)
    )
    return in_single({"privacy/epsilon": short})["privacy/epsilon"]
