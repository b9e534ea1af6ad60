"""Lightning's Trainer with private steps: the same run as a plain loop, and nothing private beside it."""

from __future__ import annotations

import contextlib
import copy
import csv
import math
import re
import runpy
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import torch_dpsco as dp
from tests.test_mutations import assert_caught
from torch_dpsco import rng
from torch_dpsco.errors import InfeasibleError, PrivacyError, SequenceError, UtilityWarning

pytest.importorskip("lightning")
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch import callbacks as kinds
from lightning.pytorch.loggers import CSVLogger

from torch_dpsco.integrations.lightning import PrivateTraining, _shown

pytestmark = [
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
        self.net = nn.Sequential(nn.Linear(DIM, 4), nn.Tanh(), nn.Linear(4, 1)) if deep else nn.Linear(DIM, 1)
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


def private(plan: Any, kind: type[Net] = Silent, cls: Any = dp.HolderSGD, deep: bool = False, **options: Any) -> Net:
    return kind(lambda module: cls(module.parameters(), plan, **options), deep=deep)


def trainer(steps: int, *callbacks: Any, **options: Any) -> Trainer:
    usual = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False, "accelerator": "cpu"}
    return Trainer(**usual | {"enable_progress_bar": False, "max_steps": steps, "callbacks": list(callbacks)} | options)


def train_loader(plan: Any, data: Any = None) -> DataLoader:
    return DataLoader(data or records(), batch_size=plan.design.batch_size)


def trained(plan: Any, module: Net | None = None, *callbacks: Any, val: bool = False, **options: Any) -> Net:
    module = module or private(plan)
    data = [train_loader(plan)] + ([DataLoader(records(), batch_size=N)] if val else [])
    callbacks = callbacks if any(isinstance(c, PrivateTraining) for c in callbacks) else (PrivateTraining(), *callbacks)
    trainer(plan.steps, *callbacks, **options).fit(module, *data)
    return module


@contextlib.contextmanager
def repeatable() -> Iterator[None]:
    """Noise and batches are those of all other such blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rng, "_random_bytes", np.random.default_rng(5).bytes)
        yield


def charged(optimizer: Any) -> list[Any]:
    return [(event, times) for *_, event, times in optimizer.accountant.ledger.entries()]


def same(first: nn.Module, second: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


# -- the same run -----------------------------------------------------------------------------------------------------

DESIGNS = {
    "poisson": {},
    "filled": {"adjacency": "add_remove"},
    "empty_draws": {"batch_size": 2, "epochs": None, "steps": 9},
    "uneven_epochs": {"epochs": None, "steps": 8},
    "allocated": {"sampling": "allocated"},
    "shuffled": {"sampling": "shuffled", "epochs": 1},
    "full": {"sampling": "full", "batch_size": N, "epochs": None, "steps": 3},
}


@pytest.mark.representatives(3)
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("name", DESIGNS)
def test_a_fit_is_a_plain_loop_to_the_last_bit(name: str, parts: int) -> None:
    plan = planned(**DESIGNS[name])
    with repeatable():
        ours = trained(plan, private(plan), accumulate_grad_batches=parts)
    with repeatable():
        theirs = private(plan)
        physical = math.ceil(plan.design.batch_size / parts)
        optimizer = looped(plan, theirs, None if parts == 1 else physical)
    assert same(ours, theirs)
    assert charged(ours.optimizer) == charged(optimizer)
    assert ours.optimizer.steps == plan.steps
    assert ours.optimizer.finalized


def looped(plan: Any, module: Net, physical: int | None = None, decay: float = 1.0) -> Any:
    """The loop that a user would write."""
    optimizer = module.configure_optimizers()
    if decay < 1.0:
        (optimizer,), (schedule,) = optimizer
    dp.attach(module)
    loader = optimizer.loader(records(), steps=plan.steps, resume=True, physical_batch_size=physical)
    for x, y in loader:
        made = optimizer.steps
        optimizer.zero_grad()
        LOSS(module(x), y).backward()
        optimizer.step()
        if decay < 1.0 and optimizer.steps > made and optimizer.steps % optimizer.design.batches == 0:
            schedule.step()
    optimizer.finalize()
    return optimizer


def test_a_fit_is_dp_fit_to_the_last_bit() -> None:
    plan = planned()
    with repeatable():
        ours = trained(plan, private(plan, deep=True), val=True)
    with repeatable():
        theirs = private(plan, deep=True)
        optimizer = theirs.configure_optimizers()
        dp.fit(theirs, optimizer, records(), LOSS, progress=False)
    assert same(ours, theirs)
    assert ours.optimizer.accountant.get_epsilon(DELTA) == optimizer.accountant.get_epsilon(DELTA)


class Summed(Silent):
    """Has a loss that sums, as losses of half-precision outputs must."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.soft_margin_loss(self(batch[0]), batch[1], reduction="sum")


def test_autocast_is_that_of_a_plain_loop() -> None:
    plan = planned()
    with repeatable():
        ours = trained(
            plan, private(plan, Summed, deep=True), PrivateTraining(loss_reduction="sum"), precision="bf16-mixed"
        )
    with repeatable():
        theirs = private(plan, deep=True)
        optimizer = theirs.configure_optimizers()
        dp.attach(theirs, loss_reduction="sum")
        for batch in optimizer.loader(records(), steps=plan.steps):
            with torch.autocast("cpu", torch.bfloat16):
                loss = Summed.training_step(theirs, batch, 0)
            loss.backward()
            optimizer.step()
        optimizer.finalize()
    assert same(ours, theirs)


@pytest.mark.parametrize("parts", [1, 3])
def test_rates_follow_a_schedule_of_epochs(parts: int) -> None:
    plan = planned()

    def make(module: Any) -> Any:
        module.private = dp.HolderSGD(module.parameters(), plan)
        return [module.private], [torch.optim.lr_scheduler.ExponentialLR(module.private, 0.5)]

    with repeatable():
        trained(plan, ours := Silent(make), accumulate_grad_batches=parts)
    with repeatable():
        looped(plan, theirs := Silent(make), None if parts == 1 else BATCH // parts, decay=0.5)
    assert same(ours, theirs)
    assert ours.private.param_groups[0]["lr"] == theirs.private.param_groups[0]["lr"] == plan.lr / 4


def test_users_are_drawn_and_steps_never_see_their_ids() -> None:
    users = [f"user {k % 20}" for k in range(N)]
    plan = dp.UserClippedSGD.plan(
        n_users=20, budget=dp.Budget(4.0, DELTA, unit="user"), batch_size=10, steps=4, clip=1.0, lr=0.1
    )
    module = private(plan, cls=dp.UserClippedSGD)
    loader = DataLoader(records(), batch_size=10)
    trainer(4, PrivateTraining(users=users)).fit(module, loader)
    assert module.optimizer.steps == 4
    assert module.optimizer.accountant.unit == "user"


# -- what is refused --------------------------------------------------------------------------------------------------

REFUSED = {
    "gradient_clip_val": {"gradient_clip_val": 1.0},
    "gradient_clip_algorithm": {"gradient_clip_algorithm": "norm"},
    "fast_dev_run": {"fast_dev_run": 2},
    "overfit_batches": {"overfit_batches": 2},
    "limit_train_batches": {"limit_train_batches": 2},
    "reload_dataloaders_every_n_epochs": {"reload_dataloaders_every_n_epochs": 1},
    "precision": {"precision": "bf16-true"},
    "strategy": {"strategy": "ddp"},
    "GradientAccumulationScheduler": kinds.GradientAccumulationScheduler({0: 2}),
    "StochasticWeightAveraging": kinds.StochasticWeightAveraging(0.1),
    "ThroughputMonitor": kinds.ThroughputMonitor(len),
    "LearningRateFinder": kinds.LearningRateFinder(),
}


def assert_refused(match: str, run: Callable[[], Any], error: Any = SequenceError) -> None:
    with pytest.raises(error, match=match):
        run()


@pytest.mark.filterwarnings("ignore:You passed `precision=.*` but AMP")
@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_do_not_go_with_private_steps_are_refused_by_name(name: str) -> None:
    plan, made = planned(), REFUSED[name]
    module = private(plan)
    options = made if isinstance(made, dict) else {}
    callbacks = [] if isinstance(made, dict) else [made]
    try:
        assert_refused(name, lambda: trained(plan, module, *callbacks, **options))
    finally:
        if torch.distributed.is_initialized():  # Lightning has made the group before
            torch.distributed.destroy_process_group()
    assert not hasattr(module, "optimizer")  # before anything is made


class Manual(Silent):
    automatic_optimization = False


class Clipping(Silent):
    def configure_gradient_clipping(self, *args: Any, **options: Any) -> None:
        """Clips nothing."""


class NoLoss(Silent):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Returns nothing."""


class OtherForward(Silent):
    """Calls a part of itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return LOSS(self.net(batch[0]), batch[1])


class Parts(Silent):
    """Calls its parts in place of itself."""

    forward = LightningModule.forward

    def __init__(self, make: Any, deep: bool = False) -> None:
        super().__init__(make)
        self.other = nn.Linear(DIM, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return LOSS(self.net(batch[0]) + self.other(batch[0]), batch[1])


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (Manual, "automatic_optimization must be True"),
        (Clipping, "configure_gradient_clipping"),
        (NoLoss, "training_step must return"),
        (OtherForward, r"must call self\(inputs\)"),
        (Parts, "must have a forward"),
    ],
)
def test_modules_that_do_not_go_with_private_steps_are_refused(kind: type[Net], match: str) -> None:
    plan = planned()
    module = private(plan, kind)
    module.automatic_optimization = kind is not Manual
    assert_refused(match, lambda: trained(plan, module), (SequenceError, ValueError))
    assert not hasattr(module, "optimizer") or not module.optimizer.accountant.ledger


class Child(Silent):
    """Has no forward, and calls its only model."""

    forward = LightningModule.forward

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        return {"loss": LOSS(self.net(batch[0]), batch[1])}


def test_a_module_without_a_forward_is_its_only_model() -> None:
    plan = planned()
    with repeatable():
        ours = trained(plan, private(plan, Child))
    with repeatable():
        theirs = trained(plan)
    assert same(ours, theirs)


def test_optimizers_that_are_not_private_are_refused() -> None:
    plan = planned()
    plain = Silent(lambda module: torch.optim.SGD(module.parameters(), 0.1))
    assert_refused("one private optimizer.*got SGD", lambda: trained(plan, plain))


def test_optimizers_of_secret_iterates_are_refused() -> None:
    plan = dp.HolderOutputSGD.plan(
        problem=LOSS.problem(bound_x=2.0, radius=1.0), n=N, budget=dp.Budget(1.0, DELTA), dim=DIM + 1
    )
    module = private(plan, cls=dp.HolderOutputSGD)
    module.double()
    assert_refused(
        "secret until finalize", lambda: trainer(-1, PrivateTraining(), max_epochs=1).fit(module, DataLoader(records()))
    )


LIMITS = [
    ({"max_steps": 7}, "max_steps must be 10"),
    ({"max_steps": -1, "max_epochs": 3}, "max_epochs must be 2"),
    ({"max_steps": -1, "max_epochs": 1000}, r"Trainer\(max_steps=10\), or max_epochs=2"),
    ({"max_steps": -1, "max_epochs": 2}, None),
    ({"max_steps": -1, "max_epochs": -1}, None),
    ({"max_epochs": 2}, None),
    ({"min_steps": 11}, "min_steps must be <= 10"),
]


@pytest.mark.parametrize(("limits", "match"), LIMITS)
def test_steps_that_are_not_the_plans_are_refused_with_those_to_give(limits: dict[str, int], match: str | None) -> None:
    plan = planned()
    assert plan.steps == 10
    module = private(plan)
    run = trainer(10, PrivateTraining(), **limits)
    if match is None:
        run.fit(module, train_loader(plan))
        assert module.optimizer.steps == 10
    else:
        assert_refused(match, lambda: run.fit(module, train_loader(plan)), ValueError)
        assert not module.optimizer.accountant.ledger


def test_a_plan_without_a_last_step_takes_the_trainers() -> None:
    budget = dp.Budget(1.0, DELTA)
    problem = LOSS.problem(bound_x=2.0)
    plan = dp.HolderSGD.plan(
        problem=problem, n=N, budget=budget, noise_multiplier=4.0, batch_size=BATCH, average="last"
    )
    assert plan.steps is None
    module = private(plan)
    trainer(4, PrivateTraining()).fit(module, train_loader(plan))
    assert module.optimizer.steps == 4
    run = trainer(-1, PrivateTraining(), max_epochs=-1)
    assert_refused("max_steps or max_epochs must be given", lambda: run.fit(module, train_loader(plan)), ValueError)
    run = trainer(100_000, PrivateTraining())
    assert_refused("steps must be <= ", lambda: run.fit(module, train_loader(plan)), InfeasibleError)
    assert not module.optimizer.accountant.ledger


def test_data_modules_give_their_loaders() -> None:
    plan = planned()

    class Data(LightningDataModule):
        def train_dataloader(self) -> DataLoader:
            return train_loader(plan)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [batch[0] * 2.0, batch[1]]

    class Doubling(Silent):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return LOSS(self(batch[0] * 2.0), batch[1])

    for parts in (1, 3):
        with repeatable():
            ours = private(plan)
            trainer(10, PrivateTraining(), accumulate_grad_batches=parts).fit(ours, datamodule=Data())
        with repeatable():
            theirs = trained(plan, private(plan, Doubling), accumulate_grad_batches=parts)
        assert same(ours, theirs)


def test_loaders_whose_batches_would_be_exchanged_in_silence_are_refused() -> None:
    plan = planned()
    weighted = DataLoader(records(), BATCH, sampler=WeightedRandomSampler([1.0] * N, N))
    for match, loader in {
        "batch_size of the training loader must be 12": DataLoader(records(), batch_size=5),
        "no sampler of its own": weighted,
        "must be a torch DataLoader": records(),
        "one training loader": [train_loader(plan), train_loader(plan)],
    }.items():
        module = private(plan)
        assert_refused(match, lambda m=module, data=loader: trainer(10, PrivateTraining()).fit(m, data))
        assert not module.optimizer.accountant.ledger


@pytest.mark.parametrize(
    "wrong", [{"loss_reduction": "none"}, {"delta": 1.0}, {"private_logs": "yes"}, {"private_checkpoints": 2}]
)
def test_arguments_are_checked_at_the_door(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    assert_refused(name, lambda: PrivateTraining(**wrong), ValueError)


class Coupled(Silent):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs = self(batch[0])
        return LOSS(outputs - outputs.mean(), batch[1])


def check_that_coupled_records_are_found() -> None:
    plan = planned()
    module = private(plan, Coupled)
    found = False
    try:
        trained(plan, module)
    except PrivacyError:
        found = True
    assert found
    assert not module.optimizer.accountant.ledger


def test_coupled_records_are_found_before_anything_is_spent() -> None:
    check_that_coupled_records_are_found()
    module = private(planned())
    trained(planned(), module)
    assert "in the loss: checked by the probes" in str(module.optimizer.report()).replace("\n    ", " ")


def test_a_training_step_that_is_not_probed_is_caught() -> None:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(
            PrivateTraining, "_probe", lambda self, loader, optimizer: dp.attach(self._module, check_first_step=False)
        )

    assert_caught(check_that_coupled_records_are_found, mutate)


# -- what is shown ----------------------------------------------------------------------------------------------------


def written(
    folder: Path, private_logs: bool = False, shift: float = 0.0
) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """Returns the lines of a run's log, and what its bar would show."""
    plan, shown = planned(adjacency="add_remove"), {}

    class Bar(kinds.ProgressBar):
        def on_train_batch_end(self, run: Any, module: Any, outputs: Any, *args: Any) -> None:
            self.log("callback_loss", outputs["loss"], prog_bar=True)
            shown.update(self.get_metrics(run, run.lightning_module))

    logger = CSVLogger(folder, flush_logs_every_n_steps=1)
    module = private(plan, Net)
    callbacks = [PrivateTraining(private_logs=private_logs), Bar()]
    run = trainer(plan.steps, *callbacks, logger=logger, log_every_n_steps=4, enable_progress_bar=True)
    run.fit(module, train_loader(plan, records(shift)), DataLoader(records(), batch_size=N))
    with open(Path(logger.log_dir) / "metrics.csv", encoding="utf-8") as file:
        return list(csv.DictReader(file)), shown | run.callback_metrics


@pytest.mark.filterwarnings("ignore:train_loss was not logged")
def check_that_nothing_of_training_is_written(folder: Path) -> None:
    lines, shown = written(folder)
    names = {"epoch", "step", "val_loss", *(f"privacy/{name}" for name in dp.loggers.Numbers.__dataclass_fields__)}
    assert set(lines[0]) == names
    assert set(shown) - {"v_num"} == {"epsilon", "val_loss"}
    spent = [float(line["privacy/epsilon"]) for line in lines if line["privacy/epsilon"]]
    assert len(spent) == 3
    assert 0.98 < spent[-1] <= 1.0 <= float(shown["epsilon"])


def test_what_training_logs_reaches_no_logger_and_no_bar(tmp_path: Path) -> None:
    with pytest.warns(UtilityWarning, match="train_loss was not logged"):
        check_that_nothing_of_training_is_written(tmp_path)


@pytest.mark.filterwarnings("ignore:train_loss was not logged")
def test_logs_do_not_depend_on_records_nor_on_what_is_drawn(tmp_path: Path) -> None:
    def public(shift: float) -> list[dict[str, str]]:
        return [{**line, "val_loss": ""} for line in written(tmp_path, shift=shift)[0]]

    assert public(0.0) == public(50.0)


@pytest.mark.filterwarnings("ignore:train_loss was not logged")
def test_a_filter_that_lets_training_losses_through_is_caught(tmp_path: Path) -> None:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(PrivateTraining, "log_training", lambda self, *args, **options: self._log(*args, **options))

    assert_caught(lambda: check_that_nothing_of_training_is_written(tmp_path), mutate)


def test_training_losses_are_logged_where_logs_stay_private(tmp_path: Path) -> None:
    lines, shown = written(tmp_path, private_logs=True)
    assert {"train_loss", "train_size", "callback_loss"} <= set(lines[0])
    assert {"train_loss", "train_size", "callback_loss"} <= set(shown)


class Deciding(Net):
    """Has a rate that follows a training loss."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "train_loss"}}


@pytest.mark.parametrize("private_logs", [False, True])
@pytest.mark.parametrize("how", ["stop", "keep", "rate"])
def test_nobody_decides_by_a_training_loss(how: str, private_logs: bool, tmp_path: Path) -> None:
    plan = planned()
    module = private(plan, Deciding if how == "rate" else Net)
    callbacks = {
        "stop": [kinds.EarlyStopping("train_loss")],
        "keep": [kinds.ModelCheckpoint(tmp_path, monitor="train_loss_epoch")],
    }
    chosen = callbacks.get(how, [])
    run = trainer(10, PrivateTraining(private_logs=private_logs), *chosen, enable_checkpointing=how == "keep")
    assert_refused("train_loss must not be monitored", lambda: run.fit(module, train_loader(plan)), PrivacyError)
    assert len(module.optimizer.accountant.ledger) <= 1


def check_that_counters_count_draws() -> None:
    plan, counts, totals = planned(adjacency="add_remove"), [], []

    class Counts(Callback):
        def on_train_batch_end(self, run: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            counts.append((run.global_step, batch_idx, len(batch[0])))
            totals.append(run.num_training_batches)

    module = trained(plan, None, PrivateTraining(), Counts(), accumulate_grad_batches=4)
    assert module.optimizer.steps == plan.steps
    (block,) = {rows for _, _, rows in counts}
    assert counts == [(k + 1, k % 5, block) for k in range(10)]
    assert set(totals) == {5}


def test_counters_count_draws_and_not_their_parts() -> None:
    check_that_counters_count_draws()


def test_counters_of_parts_are_caught() -> None:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(PrivateTraining, "_batches", lambda self, loader: iter(loader))

    assert_caught(check_that_counters_count_draws, mutate)


@given(st.floats(1e-6, 1e4))
def test_the_bar_never_shows_less_than_was_spent(epsilon: float) -> None:
    shown = torch.tensor(_shown(epsilon))
    assert float(f"{float(shown):.3g}") >= epsilon * (1 - 1e-15)
    assert epsilon >= 10.0 or round(float(shown), 3) >= epsilon * (1 - 1e-15)


# -- the answer, checkpoints, and runs that end early ----------------------------------------------------------------


def test_validation_sees_the_private_answer_so_far() -> None:
    plan = planned(average="uniform")
    with repeatable():
        ours = trained(plan, private(plan), val=True)
    with repeatable():
        theirs = private(plan)
        optimizer = theirs.configure_optimizers()
        dp.attach(theirs)
        answers = [copy.deepcopy(theirs.state_dict())]  # the sanity check
        for x, y in optimizer.loader(records(), steps=10, resume=True):
            LOSS(theirs(x), y).backward()
            optimizer.step()
            if optimizer.steps % 5 == 0:
                with optimizer.released():
                    answers.append(copy.deepcopy(theirs.state_dict()))
        optimizer.finalize()
    assert same(ours, theirs)
    assert len(ours.seen) == 3
    for seen, answer in zip(ours.seen, answers, strict=True):
        assert all(torch.equal(seen[name], answer[name]) for name in answer)


def test_an_answer_that_validation_does_not_see_is_caught() -> None:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(PrivateTraining, "on_validation_start", lambda *args: None)

    assert_caught(test_validation_sees_the_private_answer_so_far, mutate)


class Killed(Callback):
    """Raises after so many steps."""

    def __init__(self, step: int, error: type[BaseException] = RuntimeError) -> None:
        self.step, self.error = step, error

    def on_train_batch_end(self, run: Any, module: Any, *args: Any) -> None:
        if run.global_step == self.step:
            raise self.error("killed")


def saving(folder: Path, every: int = 3, **options: Any) -> kinds.ModelCheckpoint:
    return kinds.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=every, save_top_k=-1, **options)


def on_disk(plan: Any, folder: Path, kind: type[Net] = Silent) -> Net:
    def make(module: Any) -> Any:
        ledger = dp.Accountant(plan.budget, ledger_path=folder / "ledger")
        return dp.HolderSGD(module.parameters(), plan, accountant=ledger)

    return kind(make)


def checkpointed(plan: Any, module: Net, folder: Path, *callbacks: Any, ckpt: str | None = None, **options: Any) -> Net:
    usual = [PrivateTraining(private_checkpoints=options.pop("private_checkpoints", False)), *callbacks, saving(folder)]
    run = trainer(plan.steps, *usual, enable_checkpointing=True, **options)
    run.fit(module, train_loader(plan), ckpt_path=None if ckpt is None else folder / ckpt)
    return module


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("sampling", ["poisson", pytest.param("allocated", marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_and_its_lost_steps_stay_charged(sampling: str, tmp_path: Path) -> None:
    plan = planned(sampling=sampling, average="uniform")
    secret = {"private_checkpoints": sampling == "allocated"}
    with pytest.raises(RuntimeError, match="killed"):
        checkpointed(plan, first := on_disk(plan, tmp_path), tmp_path, Killed(8), **secret)
    assert first.optimizer.steps == 8
    first.optimizer.accountant.close()
    with pytest.warns(UtilityWarning, match="2 steps after step 6 were lost"):
        second = checkpointed(plan, on_disk(plan, tmp_path), tmp_path, ckpt="step=6.ckpt", **secret)
    assert second.optimizer.steps == 10
    assert second.optimizer.finalized
    assert 0.9 < second.optimizer.accountant.get_epsilon(DELTA) <= 1.0
    if sampling == "poisson":
        assert len(second.optimizer.accountant.ledger) == 10


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_a_run_goes_on_from_the_point_where_its_checkpoint_is(tmp_path: Path) -> None:
    plan = planned(average="uniform")
    whole = checkpointed(plan, private(plan), tmp_path)
    state = torch.load(tmp_path / "step=6.ckpt", weights_only=True)
    loaded = Silent.load_from_checkpoint(tmp_path / "step=6.ckpt")
    query = state["torch_dpsco_query"]
    assert query
    assert not torch.equal(loaded.net.weight, query["net.weight"])
    fresh = private(plan)
    optimizer = fresh.configure_optimizers()
    fresh.load_state_dict(query, strict=False)
    optimizer.load_state_dict(state["optimizer_states"][0])
    with optimizer.released():
        assert same(loaded, fresh)  # the answer after six steps
    assert not same(loaded, whole)


def test_checkpoints_with_secrets_are_refused_until_they_stay_private(tmp_path: Path) -> None:
    plan = planned(sampling=dp.Disjoint(BATCH, N), epochs=1)
    module = private(plan)
    assert_refused("private_checkpoints=True", lambda: checkpointed(plan, module, tmp_path), PrivacyError)
    assert not module.optimizer.accountant.ledger
    run = trainer(5, PrivateTraining(), saving(tmp_path, save_weights_only=True), enable_checkpointing=True)
    run.fit(module := private(plan), train_loader(plan))
    assert "optimizer_states" not in torch.load(tmp_path / "step=3.ckpt", weights_only=True)
    assert_refused("private_checkpoints=True", lambda: late(plan, tmp_path), PrivacyError)


def late(plan: Any, folder: Path) -> None:
    class Saves(Callback):
        def on_train_batch_end(self, run: Any, *args: Any) -> None:
            run.save_checkpoint(folder / "late.ckpt")

    trained(plan, None, PrivateTraining(), Saves())


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_a_checkpoint_without_a_ledger_file_brings_its_ledger(tmp_path: Path) -> None:
    plan = planned()
    checkpointed(plan, private(plan), tmp_path)
    again = checkpointed(plan, private(plan), tmp_path, ckpt="step=6.ckpt")
    assert len(again.optimizer.accountant.ledger) == again.optimizer.steps == 10
    ledger = plan.ledger()
    with pytest.raises(RuntimeError, match="killed"):
        checkpointed(plan, private(plan, accountant=ledger), tmp_path, Killed(8))
    shared = private(plan, accountant=ledger)  # which would forget what was made after the checkpoint
    assert_refused("forget", lambda: checkpointed(plan, shared, tmp_path, ckpt="step=6.ckpt"), PrivacyError)


@pytest.mark.parametrize("finished", [False, True])
def test_a_run_whose_steps_are_made_gives_its_answer(finished: bool, tmp_path: Path) -> None:
    plan = planned(average="uniform")

    class Saves(Callback):
        def on_train_batch_end(self, run: Any, *args: Any) -> None:
            if run.global_step == 10 and not finished:
                run.save_checkpoint(tmp_path / "all.ckpt")

        def on_train_end(self, run: Any, *args: Any) -> None:
            if finished:
                run.save_checkpoint(tmp_path / "all.ckpt")

    whole = checkpointed(plan, on_disk(plan, tmp_path), tmp_path, Saves())
    whole.optimizer.accountant.close()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UtilityWarning)
        again = checkpointed(plan, on_disk(plan, tmp_path), tmp_path, ckpt="all.ckpt")
    assert same(whole, again)
    assert again.optimizer.finalized
    assert any("nothing was trained" in str(warning.message) for warning in told) == finished
    assert len(again.optimizer.accountant.ledger) == 10


def test_stopping_early_on_public_data_spends_what_was_made() -> None:
    plan = planned(epochs=6)
    module = trained(
        plan, None, PrivateTraining(), kinds.EarlyStopping("val_loss", patience=1, min_delta=10.0), val=True
    )
    assert module.optimizer.steps == len(module.optimizer.accountant.ledger) == 10 < plan.steps
    assert module.optimizer.finalized


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_run_keeps_its_steps_and_goes_on(error: type[BaseException]) -> None:
    plan = planned()
    made: list[Any] = []

    def make(module: Any) -> Any:
        made.append(made[0] if made else dp.HolderSGD(module.parameters(), plan))
        return made[0]

    module = Silent(make)
    with pytest.raises(RuntimeError if error is RuntimeError else SystemExit):
        trained(plan, module, PrivateTraining(), Killed(4, error))
    assert made[0].steps == len(made[0].accountant.ledger) == 4
    assert not made[0].finalized
    trained(plan, module)
    assert made[0].steps == len(made[0].accountant.ledger) == 10
    assert made[0].finalized


def test_afterwards_trainer_and_module_are_as_before() -> None:
    plan = planned()
    module, training = private(plan), PrivateTraining()
    run = trainer(10, training, accumulate_grad_batches=2)
    run.fit(module, train_loader(plan))
    assert "log" not in vars(module)
    assert "on_save_checkpoint" not in vars(module)
    assert "process_dataloader" not in vars(run.strategy)
    assert run.accumulate_grad_batches == 2
    assert not hasattr(module, "_dpsco")
    run.validate(module, DataLoader(records(), batch_size=N), verbose=False)
    assert "val_loss" in run.callback_metrics


CRASH = """
import os, sys
from tests.integrations.test_lightning import *
folder, plan = Path(sys.argv[1]), planned(average="uniform")

class Dies(Callback):
    def on_before_zero_grad(self, run, module, optimizer):
        if run.global_step == 7:
            module.optimizer._apply = lambda *args: os._exit(9)  # charged, and its noise is drawn

checkpointed(plan, on_disk(plan, folder), folder, Dies())
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_a_process_that_died_in_a_step_goes_on_without_it(tmp_path: Path) -> None:
    died = subprocess.run([sys.executable, "-c", CRASH, str(tmp_path)], cwd=ROOT, check=False)
    assert died.returncode == 9
    plan = planned(average="uniform")
    with pytest.warns(UtilityWarning, match="2 steps after step 6 were lost"):
        module = checkpointed(plan, on_disk(plan, tmp_path), tmp_path, ckpt="step=6.ckpt")
    assert len(module.optimizer.accountant.ledger) == module.optimizer.steps == 10
    assert module.optimizer.finalized


@pytest.mark.slow
def test_the_example_prints_both_scores_and_spends_its_budget(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():  # it adds filters
        path = ROOT / "examples" / "lightning_module.py"
        figures = runpy.run_path(str(path))["main"](["--quick"])
    assert 0.9 * 4.0 < figures["epsilon"] <= 4.0
    assert f"private {figures['private_accuracy']:.4f}, not private" in capsys.readouterr().out
    assert len(path.read_text(encoding="utf-8").splitlines()) < 100


@pytest.mark.slow
def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "integrations" / "lightning.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(code, {})
    assert "finalized" in capsys.readouterr().out


@pytest.mark.slow
def test_the_package_itself_does_not_import_lightning() -> None:
    code = "import sys, torch_dpsco, torch_dpsco.integrations; assert 'lightning' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
