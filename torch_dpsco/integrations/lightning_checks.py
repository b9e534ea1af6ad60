"""What of a Lightning Trainer and module goes with private steps, and what is refused by name."""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    DeviceStatsMonitor,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
    ThroughputMonitor,
    WeightAveraging,
)
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from torch_dpsco import _validate as check
from torch_dpsco.algorithms.row_free import RowFreeOptimizer
from torch_dpsco.errors import SequenceError
from torch_dpsco.make_private import require_replaceable
from torch_dpsco.step.step import PrivateOptimizer

_PRECISIONS = ("32-true", "64-true", "bf16-mixed")
_CLIP = "the plan has the clip, of each record's gradient, and this one would do nothing: leave it away"
_RUNS = (
    "it spends the budget, or leaves draws out: leave it away, and try the script by dp.doctor"
)
_CALLBACKS = {
    GradientAccumulationScheduler: "give one accumulate_grad_batches to the Trainer",
    StochasticWeightAveraging: "give average= to the plan",
    WeightAveraging: "give average= to the plan",
    BatchSizeFinder: (
        "its trials are steps; the plan has the batch size, and accumulate_grad_batches the memory"
    ),
    LearningRateFinder: (
        "its trials are steps, decided by training losses; the plan has the step size"
    ),
    ModelPruning: "it changes parameters between steps; prune the released model",
}
_TELLING = {
    DeviceStatsMonitor: (
        "memory follows the sizes of draws; PrivateTraining(private_logs=True) if logs stay private"
    ),
    ThroughputMonitor: (
        "it logs the sizes of draws; PrivateTraining(private_logs=True) if logs stay private"
    ),
}


def require_settings(trainer: Any, module: LightningModule, private_logs: bool) -> None:
    """Raises SequenceError for a setting that would void the guarantee, or would do nothing in silence."""
    usual: dict[str, tuple[Any, Any, str]] = {
        "gradient_clip_val": (trainer.gradient_clip_val, (None, 0), _CLIP),
        "gradient_clip_algorithm": (trainer.gradient_clip_algorithm, (None,), _CLIP),
        "fast_dev_run": (trainer.fast_dev_run, (False, 0), _RUNS),
        "overfit_batches": (trainer.overfit_batches, (0,), _RUNS),
        "limit_train_batches": (
            trainer.limit_train_batches,
            (1.0,),
            f"{_RUNS}; max_steps is the plan's",
        ),
        "reload_dataloaders_every_n_epochs": (
            trainer.reload_dataloaders_every_n_epochs,
            (0,),
            _RUNS,
        ),
        "precision": (trainer.precision, _PRECISIONS, f"take one of {', '.join(_PRECISIONS)}"),
        "automatic_optimization": (
            module.automatic_optimization,
            (True,),
            "return the loss from training_step",
        ),
    }
    for name, (value, fine, way_out) in usual.items():
        if value not in fine or (name == "limit_train_batches" and not isinstance(value, float)):
            # PRIVACY: (test_settings_that_do_not_go_with_private_steps_are_refused_by_name)
            raise SequenceError(
                f"{name} must be {fine[0]!r} for private training (got {value!r}): {way_out}"
            )
    if type(trainer.strategy) is not SingleDeviceStrategy:
        # PRIVACY: gradients of all processes would be joined before they are clipped
        # (test_settings_that_do_not_go_with_private_steps_are_refused_by_name)
        raise SequenceError(
            "strategy must be that of one device for private training (got"
            f" {type(trainer.strategy).__name__}): give devices=1; for several processes write the"
            " loop with dp.fit, a plain model in each, under torchrun (docs/distributed.md)"
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


def private_optimizer(trainer: Any) -> PrivateOptimizer:
    """Returns the module's optimizer, the only one and private."""
    optimizers = trainer.optimizers
    found = optimizers[0] if len(optimizers) == 1 else None
    if isinstance(found, PrivateOptimizer):
        return found
    got = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "none"
    if isinstance(found, RowFreeOptimizer):
        # PRIVACY: Lightning shows iterates to validation, checkpoints and callbacks
        # (test_optimizers_of_secret_iterates_are_refused)
        raise SequenceError(
            f"configure_optimizers must not return {got}, whose iterates are secret until"
            " finalize(): use dp.fit"
        )
    raise SequenceError(
        "configure_optimizers must return one private optimizer, as"
        f" dp.HolderSGD(self.parameters(), plan) (got {got})"
    )


def last_step(trainer: Any, optimizer: PrivateOptimizer) -> int:
    """Returns after how many steps training ends; raises ValueError if the Trainer's limits are not the plan's."""
    planned = optimizer.schedule.steps
    epoch = optimizer.design.batches
    steps = trainer.max_steps
    epochs = trainer.fit_loop.max_epochs
    if planned is None:
        limits = [steps] * (steps != -1) + [epochs * epoch] * (epochs not in (None, -1))
        if not limits:
            raise ValueError(
                "max_steps or max_epochs must be given: the plan has no last step (got -1)"
            )
        planned = min(limits)
    needed = math.ceil(planned / epoch)
    if steps not in (-1, planned) and optimizer.schedule.steps is not None:
        raise ValueError(
            f"max_steps must be {planned}, the steps of the plan (got {steps}):"
            f" Trainer(max_steps={planned})"
        )
    if epochs not in (None, -1, needed) and optimizer.schedule.steps is not None:
        raise ValueError(
            f"max_epochs must be {needed}, in which the plan's {planned} steps are made (got"
            f" {epochs}): Trainer(max_steps={planned}), or max_epochs={needed}"
        )
    if (trainer.min_steps or 0) > planned or (trainer.min_epochs or 0) > needed:
        raise ValueError(
            f"min_steps must be <= {planned} and min_epochs <= {needed}, the plan's (got"
            f" {trainer.min_steps} and {trainer.min_epochs})"
        )
    return planned


def require_train_loader(loader: Any, optimizer: PrivateOptimizer) -> None:
    """Raises SequenceError unless the training loader is one whose batches may be replaced by private ones."""
    way_out = (
        f"DataLoader(dataset, batch_size={optimizer.design.batch_size}, shuffle=True), whose"
        " batches are drawn anew"
    )
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise SequenceError(
            "the training loader must be a torch DataLoader of a map-style data set (got"
            f" {check.shown(loader)}): give {way_out}"
        )
    require_replaceable(loader, "the training loader")
    if loader.batch_size != optimizer.design.batch_size:
        raise SequenceError(
            f"batch_size of the training loader must be {optimizer.design.batch_size}, the plan's"
            f" (got {loader.batch_size}): give {way_out}"
        )


def model_of(module: LightningModule) -> nn.Module:
    """Returns what training steps call: the module itself, or its only child if it has no forward."""
    if is_overridden("forward", module, parent=LightningModule):
        return module
    children = [
        child for child in module.children() if any(p.requires_grad for p in child.parameters())
    ]
    own = any(p.requires_grad for p in module.parameters(recurse=False))
    if len(children) != 1 or own:
        raise SequenceError(
            "the module must have a forward that training_step calls as self(inputs), so that rows"
            " of different forwards can be told apart; or hold all its parameters in one model,"
            " which it calls"
        )
    return children[0]


def arguments_of_step(module: LightningModule, batch: Any, index: int) -> tuple[Any, ...]:
    """Returns what Lightning would call `training_step` with."""
    return (
        (batch, index)
        if is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        else (batch,)
    )


def watched(trainer: Any) -> set[str]:
    """Returns the names of the metrics by which callbacks and schedulers decide."""
    found = {getattr(callback, "monitor", None) for callback in trainer.callbacks}
    found |= {
        config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau
    }
    return {name for name in found if isinstance(name, str)}
