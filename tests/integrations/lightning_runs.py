"""Runs of Lightning's Trainer on a small private problem, for tests."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpsco as dp
from torch_dpsco import noise as rng
from torch_dpsco.errors import SequenceError
from torch_dpsco.trial import sizes

pytest.importorskip("lightning")
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch import callbacks as kinds

from torch_dpsco.integrations.lightning import PrivateTraining

QUIET = [
    # Lightning says so of torch's pytrees, whoever calls it
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.:FutureWarning"),
    # advice about loaders and log intervals, which is the same without private steps
    pytest.mark.filterwarnings("ignore:The .* does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]

ROOT = Path(__file__).parents[2]
N, DIM, DELTA, BATCH = 60, 3, 1e-3, 12
LOSS = dp.losses.Logistic()


def records(shift: float = 0.0) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, DIM, generator=generator) + shift
    return TensorDataset(x, (x[:, :1] > shift).float() * 2 - 1)


def planned(adjacency: str = "replace_one", **options: Any) -> Any:
    fixed = {"batch_size": BATCH, "epochs": 2} | options
    problem, budget = LOSS.problem(bound_x=2.0), dp.Budget(1.0, DELTA, adjacency=adjacency)
    return dp.HolderSGD.plan(problem=problem, n=N, budget=budget, **fixed)


class Net(LightningModule):
    """What a user has, with one line changed."""

    def __init__(self, make: Callable[[Any], Any] | None = None, deep: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = (
            nn.Sequential(nn.Linear(DIM, 4), nn.Tanh(), nn.Linear(4, 1))
            if deep
            else nn.Linear(DIM, 1)
        )
        self.make, self.seen = make, []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = LOSS(self(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        self.log_dict({"train_size": float(len(batch[0]))}, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(copy.deepcopy(self.state_dict()))
        self.log("val_loss", LOSS(self(batch[0]), batch[1]), prog_bar=True)

    def configure_optimizers(self) -> Any:
        self.optimizer = self.make(self)
        return self.optimizer


class Silent(Net):
    """Logs nothing in training."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return LOSS(self(batch[0]), batch[1])


def private(
    plan: Any,
    kind: type[Net] = Silent,
    cls: Any = dp.HolderSGD,
    deep: bool = False,
    **options: Any,
) -> Net:
    return kind(lambda module: cls(module.parameters(), plan, **options), deep=deep)


def trainer(steps: int, *callbacks: Any, **options: Any) -> Trainer:
    usual = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
    }
    return Trainer(
        **usual
        | {"enable_progress_bar": False, "max_steps": steps, "callbacks": list(callbacks)}
        | options
    )


def train_loader(plan: Any, data: Any = None) -> DataLoader:
    return DataLoader(data or records(), batch_size=plan.design.batch_size, shuffle=True)


def trained(
    plan: Any, module: Net | None = None, *callbacks: Any, val: bool = False, **options: Any
) -> Net:
    module = module or private(plan)
    data = [train_loader(plan)] + ([DataLoader(records(), batch_size=N)] if val else [])
    callbacks = (
        callbacks
        if any(isinstance(c, PrivateTraining) for c in callbacks)
        else (PrivateTraining(), *callbacks)
    )
    trainer(plan.steps, *callbacks, **options).fit(module, *data)
    return module


@contextlib.contextmanager
def repeatable() -> Iterator[None]:
    """Noise and batches are those of all other such blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rng, "_random_bytes", np.random.default_rng(5).bytes)
        # batches of one size: who draws ahead would draw places that others do not
        patch.setattr(sizes.Trial, "sizes", lambda trial: "not tested here")
        yield


def charged(optimizer: Any) -> list[Any]:
    return [(event, times) for *_, event, times in optimizer.accountant.ledger.entries()]


def same(first: nn.Module, second: nn.Module) -> bool:
    return all(
        torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )


def looped(plan: Any, module: Net, physical: int | None = None, decay: float = 1.0) -> Any:
    """The loop that a user would write."""
    optimizer = module.configure_optimizers()
    if decay < 1.0:
        (optimizer,), (schedule,) = optimizer
    dp.attach(module)
    loader = optimizer.loader(
        records(), steps=plan.steps, resume=True, physical_batch_size=physical
    )
    for x, y in loader:
        made = optimizer.steps
        optimizer.zero_grad()
        LOSS(module(x), y).backward()
        optimizer.step()
        if (
            decay < 1.0
            and optimizer.steps > made
            and optimizer.steps % optimizer.design.batches == 0
        ):
            schedule.step()
    optimizer.finalize()
    return optimizer


def assert_refused(match: str, run: Callable[[], Any], error: Any = SequenceError) -> None:
    with pytest.raises(error, match=match):
        run()


class Killed(Callback):
    """Raises after so many steps."""

    def __init__(self, step: int, error: type[BaseException] = RuntimeError) -> None:
        self.step, self.error = step, error

    def on_train_batch_end(self, run: Any, module: Any, *args: Any) -> None:
        if run.global_step == self.step:
            raise self.error("killed")


def saving(folder: Path, every: int = 3, **options: Any) -> kinds.ModelCheckpoint:
    return kinds.ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=every, save_top_k=-1, **options
    )


def on_disk(plan: Any, folder: Path, kind: type[Net] = Silent) -> Net:
    def make(module: Any) -> Any:
        ledger = dp.Accountant(plan.budget, ledger_path=folder / "ledger")
        return dp.HolderSGD(module.parameters(), plan, accountant=ledger)

    return kind(make)


def checkpointed(
    plan: Any,
    module: Net,
    folder: Path,
    *callbacks: Any,
    ckpt: str | None = None,
    **options: Any,
) -> Net:
    usual = [
        PrivateTraining(private_checkpoints=options.pop("private_checkpoints", False)),
        *callbacks,
        saving(folder),
    ]
    run = trainer(plan.steps, *usual, enable_checkpointing=True, **options)
    run.fit(module, train_loader(plan), ckpt_path=None if ckpt is None else folder / ckpt)
    return module
