"""The Trainer of Hugging Face's transformers with private steps: `PrivateTrainer`.

    PrivateTrainer(model, args, train_dataset=records, epsilon=3.0, delta=1e-5).train()

The Trainer's own torch optimizer and schedule move the parameters, by private means. What its loop
does besides is taken over where it would tell about training records: losses, gradient norms, numbers of tokens and
batch sizes are never computed for logs, and `prepare` of accelerate, which would shard batches and wrap model and
optimizer, is left out.
"""

from __future__ import annotations

import copy
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainingArguments
from transformers.loss.loss_utils import (
    ForCausalLMLoss,
    ForMaskedLMLoss,
    ForSequenceClassificationLoss,
    ForTokenClassification,
)
from transformers.trainer_utils import HubStrategy, SchedulerType
from transformers.utils.generic import ModelOutput

from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.budgets import Budget, one_budget
from torch_dpsco.accounting.calibrate import rounded_up
from torch_dpsco.algorithms.heavy_plan import ClippedPlan
from torch_dpsco.algorithms.heavy_tailed import ClippedSGD
from torch_dpsco.algorithms.nets import NetPlan, NetSGD
from torch_dpsco.compat import tree_leaves
from torch_dpsco.diagnosis.probe import settle_sizes
from torch_dpsco.errors import SequenceError, UnknownSamplerError, warn
from torch_dpsco.losses.per_record import per_record
from torch_dpsco.private_loop import PART, WEIGHTS, attach_sound, note_probed, size_of
from torch_dpsco.rows.attach import detach, is_attached
from torch_dpsco.rules import TorchRule
from torch_dpsco.show.loggers import public_numbers
from torch_dpsco.step.checks import world_size
from torch_dpsco.step.run import CommonOptimizer
from torch_dpsco.step.step import PrivateOptimizer
from torch_dpsco.train import Checkpoint

# files of a checkpoint
_STATE = "private.pt"
_SCHEDULER = "scheduler.pt"
_IGNORED = -100  # a label that does not count
# what the Trainer would log of training records
_TOLD = ("loss", "grad_norm", "train_loss", "total_flos", "train_samples_per_second")
_POSITIONS = re.compile(r"(^|\.)(position_embeddings?|wpe)$")
_CLIPPED = "rows are clipped one by one, at the clip of the plan"
_USUAL_NORM = 1.0  # max_grad_norm of who gave none
# all others are off where they are false
_OFF: dict[str, Any] = {
    "include_num_input_tokens_seen": "no",
    "train_sampling_strategy": "random",
}
_NOT_TAKEN = {
    "fp16": "gradients of records are not scaled; bf16 needs no scale",
    "deepspeed": "records are clipped before anything is added up",
    "fsdp": "records are clipped before anything is added up",
    "parallelism_config": "each process holds the whole model",
    "torch_compile": "rows are recorded in eager mode",
    "activation_checkpointing": "a layer that is run twice would record its rows twice",
    "gradient_checkpointing": "a layer that is run twice would record its rows twice",
    "auto_find_batch_size": (
        "a run that begins anew would be charged anew; lower per_device_train_batch_size"
    ),
    "neftune_noise_alpha": "it is noise without a guarantee",
    "use_liger_kernel": "its layers are not known to record rows",
    "load_best_model_at_end": "finalize() installs the answer of the plan",
    "include_num_input_tokens_seen": "the number of tokens of a draw is private",
    "train_sampling_strategy": "private batches are drawn at random, from records of one length",
}


_Outputs: Any = ModelOutput


class PrivateTrainer(Trainer):
    """A Trainer whose steps are private: sequence or token classification, language models, LoRA by peft.

    Give a budget: epochs (or max_steps), learning_rate and batch size (per_device_train_batch_size, times processes,
    times gradient_accumulation_steps) are those of the TrainingArguments; or a `plan`. It may come before a Trainer of
    yours: `class Mine(PrivateTrainer, MyTrainer)`. In TrainingArguments, per_device_train_batch_size is the most rows
    whose gradients are in memory at once, and bf16 works with any plan. Logged are epsilon (rounded up), delta,
    learning rate and steps. After the last step the private answer is installed and the model is as before `attach`.

    Losses are evaluated record by record (`per_record`): those of transformers for classes, several labels, numbers and
    tokens, with the mean over the tokens of each record, or `compute_loss_func`, which is shown one record at a time.

    Args:
        model: as of Trainer, like args and all that is not named here.
        args: max_grad_norm has no meaning here: its default is ignored, with a warning.
        others: as of Trainer.
        plan: of `ClippedSGD.plan` or `NetSGD.plan`, in place of what follows.
        epsilon: what the whole run may spend, with `delta`.
        delta: see `epsilon`.
        budget: in place of epsilon and delta.
        n: PUBLIC number of training records; asked for under add_remove alone, else that of the data set.
        clip: bound at which gradients of records are cut; default none: each is scaled to length 1, see `dp.NetSGD`.
        recipe: batch size, steps and a constant step size are those of `dp.NetSGD.plan`, and of the TrainingArguments'
            optimizer only the parameters are taken.
        accountant: ledger to charge; with a ledger file, runs can be resumed from checkpoints of the Trainer.
        kwargs: as of Trainer.

    Raises:
        ValueError: an argument of the Trainer has no private counterpart; says which, and why.

    Guarantee:
        That of `ClippedSGD` or `NetSGD`, unit: one record of train_dataset. Callbacks of yours see the model during
        steps, and with it gradients of records: what they let out is not covered. Nor are figures of evaluation sets.
    """

    model: Any
    label_names: Any
    optimizer: Any
    lr_scheduler: Any
    callback_handler: Any
    plan: ClippedPlan

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        *others: Any,
        plan: ClippedPlan | None = None,
        epsilon: float | None = None,
        delta: float | None = None,
        budget: Budget | None = None,
        n: int | None = None,
        clip: float | None = None,
        recipe: bool = False,
        accountant: Accountant | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs.get("model_init") is not None:
            raise ValueError("model must be given, in place of model_init: a run has one model")
        if args is None:
            raise ValueError("args must be given: TrainingArguments(...)")
        _require_private(args)  # before anything is made by them
        args = copy.copy(args)
        args.max_grad_norm = 0.0
        size = args.train_batch_size * args.world_size * args.gradient_accumulation_steps
        args.gradient_accumulation_steps = 1
        if type(self)._get_train_sampler is not Trainer._get_train_sampler:
            # PRIVACY: (test_a_trainer_with_a_sampler_of_its_own_is_refused)
            raise UnknownSamplerError(
                "_get_train_sampler must not be overridden, since private draws from all records"
                f" replace it: {PART}; {WEIGHTS}"
            )
        super().__init__(model, args, *others, **kwargs)
        if isinstance(self.optimizer, CommonOptimizer):
            raise ValueError(
                "plan must be given, in place of a private optimizer, which is made of it"
            )
        self._shifts = self.compute_loss_func is None and _shifts_labels(self.model)
        self.label_names = self.label_names or [
            "labels"
        ]  # else columns of models that take none are removed
        asked = {"epsilon": epsilon, "delta": delta, "budget": budget, "n": n, "clip": clip}
        self.plan = self._planned(plan, asked, None if recipe else size)
        self._recipe = recipe
        if recipe:
            self.args.lr_scheduler_type = SchedulerType.CONSTANT
        self._accountant: Accountant | None = accountant
        self._handles: list[Any] = []

    def _planned(
        self, plan: ClippedPlan | None, asked: dict[str, Any], size: int | None
    ) -> ClippedPlan:
        """Returns the plan that is given, or one for the arguments; without a size one with numbers of its own."""
        if plan is not None:
            beside = [name for name, value in asked.items() if value is not None]
            _require_agreed(self.args, plan, beside)
            return plan
        budget = one_budget(asked["budget"], asked["epsilon"], asked["delta"])
        if self.train_dataset is None:
            raise ValueError("train_dataset must be given (got None)")
        n = size_of(self.train_dataset, asked["n"], budget)
        public: dict[str, Any] = {"n": n, "budget": budget}
        public |= {"clip": asked["clip"], "dim": self.model.parameters()}
        if size is None:
            return NetSGD.plan(**public)
        length: dict[str, Any] = {"epochs": self.args.num_train_epochs}
        if self.args.max_steps > 0:
            length = {"steps": self.args.max_steps}
        lr = self.args.learning_rate
        return NetSGD.plan(batch_size=size, lr=lr, average="last", **length, **public)

    # -- optimizer and batches ----------------------------------------------------------------------------------------

    def create_optimizer(self, model: Any = None) -> Any:
        """Returns the private optimizer, which moves parameters by the Trainer's own."""
        if not isinstance(self.optimizer, PrivateOptimizer):
            own = super().create_optimizer(model)
            own.param_groups = [group for group in own.param_groups if group["params"]]
            groups = own.param_groups
            kind = NetSGD if isinstance(self.plan, NetPlan) else ClippedSGD
            given: dict[str, Any] = {"accountant": self._accountant}
            if self._recipe:
                groups = [{"params": group["params"]} for group in groups]
            else:
                given |= {"rule": TorchRule(own)}
            self.optimizer = kind(groups, self.plan, **given)
        return self.optimizer

    def get_train_dataloader(self) -> Any:
        """Returns a loader of secret draws, after model and loss were probed on made-up records."""
        if self.train_dataset is None:
            raise ValueError("train_dataset must be given (got None)")
        optimizer = self.create_optimizer()
        if optimizer.finalized:
            raise SequenceError(
                "the run is over and its answer installed: make a new PrivateTrainer to train again"
            )
        optimizer.discard()  # what an interrupted run has left comes again
        collate = self._get_collator_with_removed_columns(
            self.data_collator, description="Training"
        )
        loader = optimizer.loader(
            self.train_dataset,
            resume=True,
            physical_batch_size=self.args.per_device_train_batch_size,
            collate_fn=_OneLength(collate),
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and torch.cuda.is_available(),
        )
        if not is_attached(self.model):
            self._handles += _expand_positions(self.model)
            reduction = "sum" if self.args.bf16 else "mean"
            attach_sound(self.model, self._loss_of, loader, loss_reduction=reduction)
            note_probed(self.model, optimizer)
        settle_sizes(self.model, self._loss_of, loader)
        return loader

    def num_examples(self, dataloader: Any) -> int:
        """Returns the public number of records for training, and that of other data."""
        # PRIVACY: under add_remove the true number is private (test_nothing_private_is_logged)
        return (
            self.plan.n
            if getattr(dataloader, "design", None) is not None
            else super().num_examples(dataloader)
        )

    def set_initial_training_values(self, args: TrainingArguments, dataloader: Any) -> Any:
        """Returns what the Trainer counts by, for as many steps as are planned."""
        args = copy.copy(args)
        args.max_steps = self.plan.steps or 0
        return super().set_initial_training_values(args, dataloader)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        super()._init_training_state(*args, **kwargs)
        self.state.global_step = self.optimizer.steps  # with those that a crash has lost
        return self.optimizer.steps // self.plan.design.steps_per_epoch, 0

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any
    ) -> Any:
        lrs = [group["lr"] for group in self.optimizer.param_groups]
        if self._created_lr_scheduler and not self.optimizer.steps:
            self.lr_scheduler = None
            self._created_lr_scheduler = False
        scheduler: Any = self.create_scheduler(num_training_steps=max_steps)
        if resume_from_checkpoint is not None:
            scheduler.load_state_dict(
                torch.load(os.path.join(resume_from_checkpoint, _SCHEDULER), weights_only=True)
            )
            for group, lr in zip(self.optimizer.param_groups, lrs, strict=True):
                group["lr"] = lr
            while (
                isinstance(scheduler, LambdaLR) and scheduler.last_epoch < self.optimizer.steps
            ):
                scheduler.step()  # for a step that was lost
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return self.model, train_dataloader

    # -- a step -------------------------------------------------------------------------------------------------------

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: Any
    ) -> tuple[list[Any], None]:
        """Returns the parts of the next draw, which come one by one; never the number of its tokens."""
        first = next(epoch_iterator, None)
        return ([] if first is None else [chain([first], epoch_iterator)]), None

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """Adds the rows of all parts of a draw, up to the last part, which `optimizer.step()` then releases.

        Returns:
            0: the training loss is private.
        """
        model.train()
        for batch in inputs:
            self.optimizer.zero_grad()
            if self.optimizer.outstanding_rows:
                self._loss_of(model, batch).backward()
            if self.optimizer.ends_draw:
                break
            self.optimizer.step()
        return torch.zeros((), device=self.args.device)

    def _loss_of(self, model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = self.compute_loss(model, self._prepare_inputs(batch))
        return loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Returns the mean over records of their losses, each a function of its own record, and outputs if asked.

        With bf16, in training, it returns their sum: half precision would round one over the number of rows.
        """
        inputs = dict(inputs)
        labels = inputs.pop("labels", None)
        if not isinstance(labels, Tensor):
            raise ValueError(
                f"batches must hold 'labels', one tensor (got {sorted(inputs)}): numbers, since"
                " collators leave text out"
            )
        half = self.args.bf16
        with torch.autocast(self.args.device.type, torch.bfloat16, enabled=half):
            outputs = model(**inputs)
        logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
        logits = logits.float() if half else logits
        reduction = "sum" if half and not return_outputs else "mean"
        # PRIVACY: a mean over the tokens of a batch joins its records
        # (test_tokens_of_a_record_do_not_weigh_on_the_loss_of_others)
        loss = per_record(self._loss_of_record, reduction)(logits, labels)
        return (loss, outputs) if return_outputs else loss

    def _loss_of_record(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Returns the loss of a batch of one record."""
        if self.compute_loss_func is not None:
            own: Tensor = self.compute_loss_func(
                _Outputs(logits=logits), labels, num_items_in_batch=None
            )
            return own
        if self._shifts and logits.dim() == 3:
            logits = logits[:, :-1]
            labels = labels[:, 1:]
        kind = getattr(getattr(self.model, "config", None), "problem_type", None)
        classes = logits.shape[-1]
        if kind == "regression" or (kind is None and classes == 1):
            return functional.mse_loss(logits.flatten(), labels.flatten().to(logits.dtype))
        if labels.is_floating_point():
            return functional.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))
        targets = labels.flatten()
        smoothing = float(self.args.label_smoothing_factor)
        losses = functional.cross_entropy(
            logits.reshape(-1, classes),
            targets,
            reduction="none",
            ignore_index=_IGNORED,
            label_smoothing=smoothing,
        )
        return losses.sum() / (targets != _IGNORED).sum().clamp(min=1)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> None:
        """Returns nothing: before the step, gradients are private."""

    def floating_point_ops(self, inputs: Any) -> int:
        """Returns 0: the number of parts of a draw is private."""
        return 0

    # -- what is seen -------------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs public numbers: those of plan and ledger in place of the training loss."""
        for name in _TOLD:
            logs.pop(name, None)
        if isinstance(self.optimizer, PrivateOptimizer):
            numbers = public_numbers(self.optimizer)
            # PRIVACY: bars show four digits, rounded to nearest (test_no_logged_epsilon_is_less_than_was_spent)
            logs |= {
                name: float(rounded_up(numbers[name]))
                for name in ("epsilon", "delta")
                if name in numbers
            }
        super().log(logs, start_time)

    def _released(self) -> AbstractContextManager[None]:
        return (
            self.optimizer.released()
            if isinstance(self.optimizer, PrivateOptimizer)
            else nullcontext()
        )

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates the private answer so far."""
        with self._released():
            return super().evaluation_loop(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the private answer so far."""
        with self._released():
            super().save_model(output_dir, _internal_call)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Saves what a run goes on with, where a ledger file knows what it has spent since."""
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULER))
        if self.optimizer.accountant.ledger_path is not None and world_size() == 1:
            Checkpoint(os.path.join(output_dir, _STATE), 1, self.model, self.optimizer).save()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        path = os.path.join(resume_from_checkpoint, _STATE)
        if not os.path.exists(path):
            raise ValueError(
                f"resume_from_checkpoint must hold {_STATE} (got {resume_from_checkpoint!r}):"
                " checkpoints of a run whose accountant has a ledger file do,"
                " accountant=dp.Accountant(budget, ledger_path=...)"
            )
        Checkpoint(path, 1, self.model, self.create_optimizer())

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Raises: each trial spends a budget of its own, and the choice between them is a release."""
        raise SequenceError(
            "hyperparameter_search has no private counterpart: each trial is a run with its own"
            " budget"
        )

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: float) -> Any:
        """Installs the private answer, and takes the model off the hooks that make rows."""
        self.optimizer.finalize()
        detach(self.model)
        for handle in self._handles:
            handle.remove()
        end: Any = super()._finalize_training
        return end(trial, num_train_samples, start_time)._replace(training_loss=math.nan)


def _require_private(args: TrainingArguments) -> None:
    """Raises ValueError for what has no private counterpart."""
    for name, why in _NOT_TAKEN.items():
        value = getattr(args, name, None)
        off = _OFF.get(name)
        if value and value != off:
            raise ValueError(
                f"{name} must be {'off' if off is None else repr(off)} (got {value!r}): {why}"
            )
    if args.max_grad_norm == _USUAL_NORM:
        warn(f"max_grad_norm has no meaning here: {_CLIPPED}; max_grad_norm=0 says so", 3)
    elif args.max_grad_norm:
        raise ValueError(f"max_grad_norm must be 0 (got {args.max_grad_norm!r}): {_CLIPPED}")
    if args.n_gpu > 1:
        raise ValueError(
            f"n_gpu must be at most 1 (got {args.n_gpu}): show one device, or start one process for"
            " each"
        )
    if args.push_to_hub and HubStrategy(args.hub_strategy).value in (
        "checkpoint",
        "all_checkpoints",
    ):
        # PRIVACY: their optimizer state is confidential (test_arguments_without_a_private_counterpart_are_refused)
        raise ValueError(
            "hub_strategy must be 'end' or 'every_save' (got one that uploads the state of the"
            " optimizer)"
        )


def _require_agreed(args: TrainingArguments, plan: ClippedPlan, beside: list[str]) -> None:
    """Raises ValueError for a plan that does not agree with the arguments."""
    if beside or type(plan) not in (ClippedPlan, NetPlan):
        raise ValueError(
            "plan must be made by ClippedSGD.plan or NetSGD.plan, with nothing beside it (got"
            f" {type(plan).__name__} beside {', '.join(beside) or 'nothing'})"
        )
    if plan.steps is None:
        raise ValueError("plan must have steps, as many as are to be made (got None)")
    if args.learning_rate != plan.lr:
        raise ValueError(
            f"learning_rate must be {plan.lr:g}, that of the plan (got {args.learning_rate:g})"
        )
    asked = (
        args.max_steps
        if args.max_steps > 0
        else args.num_train_epochs * plan.n / plan.batch_size
    )
    if abs(asked - plan.steps) >= (1 if args.max_steps <= 0 else 0.5):
        raise ValueError(
            f"max_steps must be {plan.steps}, those of the plan (got {asked:g} by the"
            " TrainingArguments)"
        )


def _shifts_labels(model: nn.Module) -> bool:
    """Returns whether tokens are the labels of those before them; raises ValueError for losses that are not known."""
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    loss = getattr(base, "loss_function", None)
    known = (
        None,
        ForCausalLMLoss,
        ForMaskedLMLoss,
        ForSequenceClassificationLoss,
        ForTokenClassification,
    )
    if loss not in known or getattr(getattr(base, "config", None), "is_encoder_decoder", False):
        raise ValueError(
            "model must be for classes, numbers or tokens, without a decoder of its own (got"
            f" {type(base).__name__}): give a compute_loss_func, or write the loop yourself with"
            " optimizer.loader(dataset)"
        )
    return loss is ForCausalLMLoss


class _OneLength:
    """Collates records of one public length, as mappings of tensors.

    Args:
        collate: the Trainer's.
    """

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate
        self._shapes: dict[str, torch.Size] | None = None

    def __call__(self, records: list[Any]) -> dict[str, Any]:
        batch = dict(self._collate(records))
        shapes = {
            name: value.shape[1:] for name, value in batch.items() if isinstance(value, Tensor)
        }
        self._shapes = self._shapes or shapes
        if shapes != self._shapes:
            # PRIVACY: the longest record of a batch would be in the shape, and so in the last bits, of all others
            # (test_batches_that_are_padded_to_their_longest_record_are_refused)
            raise ValueError(
                "records must be of one public length: tokenize with padding='max_length',"
                " truncation=True and max_length=..., or give such a data_collator"
            )
        return batch


def _expand_positions(model: nn.Module) -> list[Any]:
    """Makes tables of positions, which models look up once for a batch, look them up once per record: the same values.

    Returns the handles of the hooks.
    """
    size = [1]

    def note(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        size[0] = next(
            (len(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.dim()), 1
        )

    def expand(_: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
        positions = args[0]
        return (
            (positions.expand(size[0], -1),)
            if positions.dim() == 2 and len(positions) == 1
            else args
        )

    tables = [
        m
        for name, m in model.named_modules()
        if _POSITIONS.search(name) and type(m) is nn.Embedding
    ]
    trained = [table for table in tables if table.weight.requires_grad]
    handles: list[Any] = (
        [model.register_forward_pre_hook(note, with_kwargs=True)] if trained else []
    )
    return handles + [table.register_forward_pre_hook(expand) for table in trained]
