"""One step of DP-SGD on a batch in memory, as different libraries make it: same model, batch, loss, clip and noise.

These are not the default settings of a run (`defaults.py`): the batch has a public size, so that nothing is filled up.
A step is zero_grad, forward, loss, backward, clipping, noise and update, on a batch that is in memory: no loading and
no calibration. Ours charges its ledger and checks that the batch is one that its sampler drew; Opacus' optimizer alone
does neither (`PrivacyEngine` would add its accountant's step).

* plain: torch SGD, not private
* loop: HolderSGD in a training loop, rows as `attach` chooses them
* dense: HolderSGD on dense rows (what `attach` falls back to)
* hooks, functorch, ew, ghost: Opacus' DPOptimizer with that grad_sample_mode; ghost with losses of shape (B,), since
  with (B, 1) it multiplies (B,) by (B, 1) and loses its clipping
* fit: `dp.fit` on draws of all records (see `fit_slot`), which for a linear model is the fused path
* compiled: what `dp.fit(..., compile=True)` does in a step
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from cases import Case
from opacus import GradSampleModule
from opacus.grad_sample import (
    GradSampleModuleExpandedWeights,
    GradSampleModuleFastGradientClipping,
)
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from timing import Clock, Slot
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from torch_dpsco.accounting.designs import Draw
from torch_dpsco.sampling import Chunk, DesignSampler

__all__ = [
    *("CAN_COMPILE", "VARIANTS", "Ends", "PerRecord", "Setting"),
    *("compiled_step", "fit", "fit_slot"),
]

CAN_COMPILE = (
    importlib.util.find_spec("torch_dpsco.fast.compiled") is not None
)  # not in all versions

Step = Callable[[], None]


@dataclass(frozen=True)
class Setting:
    """Public numbers of a step."""

    clip: float = 1.0
    noise_multiplier: float = 1.0
    lr: float = 0.01


def plain_step(case: Case, model: nn.Module, setting: Setting) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=setting.lr)
    return _training_step(case, model, optimizer, case.loss)


def _training_step(
    case: Case,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> Step:
    inputs, targets = case.batch

    def step() -> None:
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()

    return step


def _optimizer(
    model: nn.Module, setting: Setting, size: int, design: dp.Fixed | dp.Full
) -> dp.HolderSGD:
    return dp.HolderSGD(
        model.parameters(),
        dp.HolderSGD.plan(
            lr=setting.lr,
            problem=dp.Problem(lipschitz=setting.clip),
            noise_multiplier=setting.noise_multiplier,
            batch_size=size,
            sampling=design,
            adjacency="replace_one",
        ),
    )


def _outstanding(
    model: nn.Module, setting: Setting, size: int
) -> tuple[dp.HolderSGD, Callable[[], None]]:
    """Returns an optimizer, and what makes a batch outstanding: what the loader does, without its gathering."""
    design = dp.Fixed(size, 100 * size)  # of a public size, so that nothing is filled up
    optimizer = _optimizer(model, setting, size, design)
    sampler: DesignSampler = optimizer.bind(dp.sampling.FixedSampler(design))
    chunk = Chunk(Draw(size), size, size, last=True)
    return optimizer, lambda: sampler.log.deliver(chunk)


def _own(rows: str) -> Callable[[Case, nn.Module, Setting], Step]:
    def build(case: Case, model: nn.Module, setting: Setting) -> Step:
        dp.attach(model, rows=rows)
        optimizer, deliver = _outstanding(model, setting, len(case.batch[0]))
        train = _training_step(case, model, optimizer, case.loss)

        def step() -> None:
            deliver()
            train()

        return step

    return build


def _opacus(
    wrap: Callable[[nn.Module], nn.Module],
) -> Callable[[Case, nn.Module, Setting], Step]:
    def build(case: Case, model: nn.Module, setting: Setting) -> Step:
        wrapped = wrap(model)
        optimizer = DPOptimizer(
            torch.optim.SGD(wrapped.parameters(), lr=setting.lr),
            noise_multiplier=setting.noise_multiplier,
            max_grad_norm=setting.clip,
            expected_batch_size=len(case.batch[0]),
        )
        return _training_step(case, wrapped, optimizer, case.loss)

    return build


class PerRecord(nn.Module):
    """A loss whose unreduced form has the shape (B,)."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss, self.reduction = loss, "mean"

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.loss.reduction = self.reduction
        losses: Tensor = self.loss(output, target)
        self.loss.reduction = "mean"
        return losses.flatten()


def _ghost(case: Case, model: nn.Module, setting: Setting) -> Step:
    wrapped = GradSampleModuleFastGradientClipping(
        model, max_grad_norm=setting.clip, use_ghost_clipping=True, loss_reduction="mean"
    )
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(wrapped.parameters(), lr=setting.lr),
        noise_multiplier=setting.noise_multiplier,
        max_grad_norm=setting.clip,
        expected_batch_size=len(case.batch[0]),
    )
    return _training_step(
        case,
        wrapped,
        optimizer,
        DPLossFastGradientClipping(wrapped, optimizer, PerRecord(case.loss)),
    )


VARIANTS: dict[str, Callable[[Case, nn.Module, Setting], Step]] = {
    "plain": plain_step,
    "loop": _own("auto"),
    "dense": _own("dense"),
    "hooks": _opacus(GradSampleModule),
    "functorch": _opacus(lambda model: GradSampleModule(model, force_functorch=True)),
    "ew": _opacus(GradSampleModuleExpandedWeights),
    "ghost": _ghost,
}


def compiled_step(
    case: Case, model: nn.Module, setting: Setting, *, backend: str | None = "inductor"
) -> Step:
    """Returns a step by rows that are compiled (backend None: vectorized only), which takes a while.

    Micro-batches are those of `dp.fit` for batches of a fixed size, as all variants have them here: none is filled up.
    """
    inputs, targets = case.batch
    size = importlib.import_module("torch_dpsco.fast.compiled").micro_batch_size(
        model, dp.Full(len(inputs))
    )
    optimizer, deliver = _outstanding(model, setting, len(inputs))
    rows = importlib.import_module("torch_dpsco.fast.compiled").CompiledRows(
        model, case.loss, micro_batch_size=size, backend=backend
    )

    def step() -> None:
        deliver()
        optimizer.zero_grad()
        rows.step(optimizer, inputs, targets)

    return step


class Ends(dp.loggers.Logger):
    """Notes the time at the end of each step."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(lambda numbers, step: None)
        self.clock, self.seconds = clock, list[float]()

    def __call__(self, *_: object, **__: object) -> None:
        self.seconds.append(self.clock())


def fit(
    case: Case, model: nn.Module, setting: Setting, steps: int, clock: Clock | None = None
) -> float:
    """Trains by `dp.fit` on draws of all records and returns the CPU seconds of a step, after the first one.

    The loss of a linear model is the library's own, with the targets that it takes: of known derivative, it needs no
    autograd.
    """
    inputs, targets = case.batch
    loss: Callable[[Tensor, Tensor], Tensor] = case.loss
    if case.is_linear and isinstance(case.loss, nn.BCEWithLogitsLoss):
        loss, targets = dp.losses.Logistic(), 2 * targets - 1
    elif case.is_linear:
        loss = dp.losses.SoftmaxCrossEntropy(num_classes=model.out_features)
    size = len(inputs)
    optimizer = _optimizer(model, setting, size, dp.Full(size))
    ends = Ends(clock or Clock())
    dp.fit(
        model,
        optimizer,
        TensorDataset(inputs, targets),
        loss,
        steps=steps,
        progress=False,
        log=ends,
    )
    return (ends.seconds[steps - 1] - ends.seconds[0]) / max(
        1, steps - 1
    )  # once more at the end of the run


def fit_slot(
    case: Case, setting: Setting, clock: Clock | None = None, *, seconds: float = 0.1
) -> Slot:
    """Returns turns of `dp.fit`, without its setup and its first step."""

    def run(repeats: int) -> float:
        return fit(case, dp.attach(case.model()), setting, 1 + repeats, clock)

    return Slot(run, seconds, most=2000)
