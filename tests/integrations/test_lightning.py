"""Lightning's Trainer with private steps: the same run as a plain loop, and nothing private beside it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, WeightedRandomSampler

import torch_dpsco as dp
from tests.test_mutations import assert_caught
from torch_dpsco.errors import InfeasibleError, PrivacyError, SequenceError, UnknownSamplerError

pytest.importorskip("lightning")
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch import callbacks as kinds

from tests.integrations.lightning_runs import (
    BATCH,
    DELTA,
    DIM,
    LOSS,
    QUIET,
    N,
    Net,
    Silent,
    assert_refused,
    charged,
    looped,
    planned,
    private,
    records,
    repeatable,
    same,
    train_loader,
    trained,
    trainer,
)
from torch_dpsco.integrations.lightning import PrivateTraining

pytestmark = QUIET

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


@pytest.mark.cases(0, 1)
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


@pytest.mark.slow
def test_a_fit_is_dp_fit_to_the_last_bit() -> None:
    plan = planned()
    with repeatable():
        ours = trained(plan, private(plan, deep=True), val=True)
    with repeatable():
        theirs = private(plan, deep=True)
        optimizer = theirs.configure_optimizers()
        dp.fit(theirs, optimizer, records(), LOSS, progress=False)
    assert same(ours, theirs)
    assert ours.optimizer.accountant.get_epsilon(DELTA) == optimizer.accountant.get_epsilon(
        DELTA
    )


class Summed(Silent):
    """Has a loss that sums, as losses of half-precision outputs must."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.soft_margin_loss(self(batch[0]), batch[1], reduction="sum")


class Prepared(Silent):
    """Does something to its inputs before the model."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return LOSS(self(batch[0] * 0.5), batch[1])


class Drawing(Silent):
    """Moves its inputs by random numbers."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return LOSS(self(batch[0] + torch.randn_like(batch[0])), batch[1])


@pytest.mark.parametrize(
    ("kind", "level"), [(Silent, "rounded"), (Prepared, "rounded"), (Drawing, "slots")]
)
def test_the_whole_training_step_is_tested_for_batches_of_several_sizes(
    kind: type[Net], level: str
) -> None:
    plan = planned(adjacency="add_remove")
    module = trained(plan, private(plan, kind, deep=True))
    assert module.optimizer.steps == plan.steps
    assert module.optimizer._isolation.level == level


def test_autocast_is_that_of_a_plain_loop() -> None:
    plan = planned()
    with repeatable():
        ours = trained(
            plan,
            private(plan, Summed, deep=True),
            PrivateTraining(loss_reduction="sum"),
            precision="bf16-mixed",
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


@pytest.mark.cases(1, 1)
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
    assert (
        ours.private.param_groups[0]["lr"] == theirs.private.param_groups[0]["lr"] == plan.lr / 4
    )


@pytest.mark.slow
def test_users_are_drawn_and_steps_never_see_their_ids() -> None:
    users = [f"user {k % 20}" for k in range(N)]
    plan = dp.UserClippedSGD.plan(
        n=20,
        budget=dp.Budget(4.0, DELTA, unit="user"),
        batch_size=10,
        steps=4,
        clip=1.0,
        lr=0.1,
    )
    module = private(plan, cls=dp.UserClippedSGD)
    loader = DataLoader(records(), batch_size=10, shuffle=True)
    trainer(4, PrivateTraining(users=users)).fit(module, loader)
    assert module.optimizer.steps == 4
    assert module.optimizer.accountant.unit == "user"


# -- a budget and nothing else ----------------------------------------------------------------------------------------


class Usual(LightningModule):
    """What a user has."""

    def __init__(self, scheduled: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(DIM, 4), nn.Tanh(), nn.Linear(4, 1))
        self.scheduled, self.rates, self.sizes = scheduled, [], []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.sizes.append(len(batch[0]))
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        return nn.functional.soft_margin_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        if not self.scheduled:
            return optimizer
        steps = (
            self.trainer.estimated_stepping_batches
        )  # makes the loader before the private one
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def shuffled(size: int = BATCH) -> DataLoader:
    return DataLoader(records(), size, shuffle=True)


def budgeted(module: Any, size: int = BATCH, limits: Any = None, **given: Any) -> Any:
    callback = PrivateTraining(epsilon=3.0, delta=DELTA, **given)
    trainer(-1, callback, **(limits or {"max_epochs": 3})).fit(module, shuffled(size))
    return callback.optimizer


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_budget_is_enough_around_any_torch_optimizer(precision: str) -> None:
    module = Usual()
    optimizer = budgeted(module, limits={"max_epochs": 3, "precision": precision})
    assert type(optimizer) is dp.NetSGD
    assert (optimizer.steps, optimizer.finalized) == (15, True)
    assert (optimizer.plan.batch_size, optimizer.plan.n) == (BATCH, N)
    assert optimizer.accountant.get_epsilon(DELTA) == optimizer.plan.epsilon() <= 3.0
    assert optimizer.rule.settings()["optimizer"] == "AdamW"
    pairs = zip(module.parameters(), Usual().parameters(), strict=True)
    moved = max(float((p - q).detach().abs().max()) for p, q in pairs)
    assert 0.01 < moved < 0.2  # by 15 steps of Adam


def _epochs(loader: Any, epochs: int) -> Any:
    for _ in range(epochs):
        yield from loader


@pytest.mark.parametrize("parts", [1, 3])
def test_it_makes_the_steps_of_make_private(parts: int) -> None:
    with repeatable():
        limits = {"max_epochs": 2, "accumulate_grad_batches": parts}
        ours = Usual()
        charges = charged(budgeted(ours, BATCH // parts, limits, clip=0.5))
    with repeatable():
        theirs = Usual()
        adam = torch.optim.AdamW(theirs.parameters(), lr=0.01)
        given = {"epsilon": 3.0, "delta": DELTA, "clip": 0.5, "epochs": 2, "verbose": False}
        net, optimizer, loader = dp.make_private(theirs.net, adam, shuffled(), **given)
        loader = loader if parts == 1 else loader.in_parts(BATCH // parts)
        for x, y in _epochs(loader, 2):
            optimizer.zero_grad()
            nn.functional.soft_margin_loss(net(x), y).backward()
            optimizer.step()
    assert same(ours, theirs)
    assert charges == charged(optimizer)


def test_schedules_that_count_steps_move_the_torch_optimizer() -> None:
    module = Usual(scheduled=True)
    optimizer = budgeted(module)
    assert module.rates[0] == 0.01
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.005)


def test_a_recipe_has_all_numbers() -> None:
    optimizer = budgeted(Usual(), 7, {"max_epochs": -1}, recipe=True)
    plan = dp.NetSGD.plan(n=N, budget=dp.Budget(3.0, DELTA), dim=Usual())
    assert (optimizer.steps, optimizer.plan) == (plan.steps, plan)
    assert_refused("no scheduler", lambda: budgeted(Usual(scheduled=True), recipe=True))


def test_what_a_budget_does_not_say_is_asked_for() -> None:
    def fit(module: Any, **given: Any) -> None:
        budget = dp.Budget(3.0, DELTA, adjacency="add_remove")
        trainer(3, PrivateTraining(budget=budget, **given)).fit(module, shuffled())

    unset = {"max_epochs": -1}
    assert_refused("max_steps", lambda: budgeted(Usual(), limits=unset), ValueError)
    assert_refused("must be given", lambda: PrivateTraining(clip=1.0), ValueError)
    assert_refused("n must be given", lambda: fit(Usual()), ValueError)
    assert_refused("one torch optimizer.*HolderSGD", lambda: fit(private(planned()), n=N))


def test_a_mean_in_bfloat16_is_over_a_public_number_of_rows() -> None:
    module = Usual()
    optimizer = budgeted(module, limits={"max_epochs": 3, "precision": "bf16-mixed"})
    assert optimizer.sizes_are_private
    assert optimizer._isolation.level == "slots"
    assert len(module.sizes) > 15  # probes first
    assert len(set(module.sizes[-15:])) == 1


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


@pytest.mark.cases(5, 2)
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


def test_one_batch_of_an_epoch_is_not_taken_for_all_of_them() -> None:
    """For Lightning 1 is a number of batches, and 1.0 all of them; for Python they are equal."""
    plan = planned()
    assert_refused(
        "limit_train_batches", lambda: trained(plan, private(plan), limit_train_batches=1)
    )


class Manual(Silent):
    automatic_optimization = False


class Clipping(Silent):
    def configure_gradient_clipping(self, *args: Any, **options: Any) -> None:
        """Clips nothing."""


class NoLoss(Silent):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Returns nothing."""


class Parts(Silent):
    """Calls its parts in place of itself."""

    forward = LightningModule.forward

    def __init__(self, make: Any, deep: bool = False) -> None:
        super().__init__(make)
        self.other = nn.Linear(DIM, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return LOSS(self.net(batch[0]) + self.other(batch[0]), batch[1])


@pytest.mark.cases(3, 1)
@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (Manual, "automatic_optimization must be True"),
        (Clipping, "configure_gradient_clipping"),
        (NoLoss, "training_step must return"),
        (Parts, "must have a forward"),
    ],
)
def test_modules_that_do_not_go_with_private_steps_are_refused(
    kind: type[Net], match: str
) -> None:
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


class OtherForward(Silent):
    """Calls a part of itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return LOSS(self.net(batch[0]), batch[1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Child, OtherForward])
def test_a_module_that_calls_its_only_model_is_trained(kind: type[Net]) -> None:
    plan = planned()
    with repeatable():
        ours = trained(plan, private(plan, kind))
    with repeatable():
        theirs = trained(plan)
    assert same(ours, theirs)


def test_optimizers_that_are_not_private_are_refused() -> None:
    plan = planned()
    plain = Silent(lambda module: torch.optim.SGD(module.parameters(), 0.1))
    assert_refused("one private optimizer.*got SGD", lambda: trained(plan, plain))


def test_optimizers_of_secret_iterates_are_refused() -> None:
    plan = dp.HolderOutputSGD.plan(
        problem=LOSS.problem(bound_x=2.0, radius=1.0),
        n=N,
        budget=dp.Budget(1.0, DELTA),
        dim=DIM + 1,
    )
    module = private(plan, cls=dp.HolderOutputSGD)
    module.double()
    assert_refused(
        "secret until finalize",
        lambda: trainer(-1, PrivateTraining(), max_epochs=1).fit(module, DataLoader(records())),
    )


LIMITS = [
    ({"max_steps": 7}, "max_steps must be 10"),
    ({"max_steps": -1, "max_epochs": 3}, "max_epochs must be 2"),
    ({"max_steps": -1, "max_epochs": 1000}, r"Trainer\(max_steps=10\), or max_epochs=2"),
    ({"max_steps": -1, "max_epochs": 2}, None),
    ({"max_steps": -1, "max_epochs": -1}, None),
    ({"max_epochs": 2}, None),
    ({"min_steps": 11}, "min_steps <= 10"),
]


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(("limits", "match"), LIMITS)
def test_steps_that_are_not_the_plans_are_refused_with_those_to_give(
    limits: dict[str, int], match: str | None
) -> None:
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


@pytest.mark.slow
def test_a_plan_without_a_last_step_takes_the_trainers() -> None:
    budget = dp.Budget(1.0, DELTA)
    problem = LOSS.problem(bound_x=2.0)
    plan = dp.HolderSGD.plan(
        problem=problem,
        n=N,
        budget=budget,
        noise_multiplier=4.0,
        batch_size=BATCH,
        average="last",
    )
    assert plan.steps is None
    module = private(plan)
    trainer(4, PrivateTraining()).fit(module, train_loader(plan))
    assert module.optimizer.steps == 4
    run = trainer(-1, PrivateTraining(), max_epochs=-1)
    assert_refused(
        "max_steps or max_epochs must be given",
        lambda: run.fit(module, train_loader(plan)),
        ValueError,
    )
    run = trainer(100_000, PrivateTraining())
    assert_refused(
        "steps must be <= ", lambda: run.fit(module, train_loader(plan)), InfeasibleError
    )
    assert not module.optimizer.accountant.ledger


@pytest.mark.slow
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
            trainer(10, PrivateTraining(), accumulate_grad_batches=parts).fit(
                ours, datamodule=Data()
            )
        with repeatable():
            theirs = trained(plan, private(plan, Doubling), accumulate_grad_batches=parts)
        assert same(ours, theirs)


def test_loaders_whose_batches_would_be_exchanged_in_silence_are_refused() -> None:
    plan = planned()
    weighted = DataLoader(records(), BATCH, sampler=WeightedRandomSampler([1.0] * N, N))
    module = private(plan)
    assert_refused(
        "no sampler of its own",
        lambda: trainer(10, PrivateTraining()).fit(module, weighted),
        UnknownSamplerError,
    )
    for match, loader in {
        "batch_size of the training loader must be 12": DataLoader(
            records(), batch_size=5, shuffle=True
        ),
        "must be a torch DataLoader": records(),
        "one training loader": [train_loader(plan), train_loader(plan)],
    }.items():
        module = private(plan)
        assert_refused(
            match, lambda m=module, data=loader: trainer(10, PrivateTraining()).fit(m, data)
        )
        assert not module.optimizer.accountant.ledger


@pytest.mark.parametrize(
    "wrong",
    [
        {"loss_reduction": "none"},
        {"private_logs": "yes"},
        {"private_checkpoints": 2},
    ],
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


@pytest.mark.slow
def test_coupled_records_are_found_before_anything_is_spent() -> None:
    check_that_coupled_records_are_found()
    module = private(planned())
    trained(planned(), module)
    assert "in the loss: checked by the probes" in str(module.optimizer.report()).replace(
        "\n    ", " "
    )


@pytest.mark.slow
def test_a_training_step_that_is_not_probed_is_caught() -> None:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(
            PrivateTraining,
            "_probe",
            lambda self, loader, optimizer: dp.attach(self._module, check_first_step=False),
        )

    assert_caught(check_that_coupled_records_are_found, mutate)
