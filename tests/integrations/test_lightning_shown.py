"""What Lightning shows, saves and takes up of a private run: public numbers, the answer, and no step twice."""

from __future__ import annotations

import copy
import csv
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch.utils.data import DataLoader

import torch_dpsco as dp
from tests.test_mutations import assert_caught
from torch_dpsco.errors import PrivacyError, UtilityWarning

pytest.importorskip("lightning")
from lightning.pytorch import Callback
from lightning.pytorch import callbacks as kinds
from lightning.pytorch.loggers import CSVLogger

from tests.integrations.lightning_runs import (
    BATCH,
    DELTA,
    LOSS,
    QUIET,
    ROOT,
    Killed,
    N,
    Net,
    Silent,
    assert_refused,
    checkpointed,
    on_disk,
    planned,
    private,
    records,
    repeatable,
    same,
    saving,
    train_loader,
    trained,
    trainer,
)
from torch_dpsco.integrations.lightning import PrivateTraining, _shown

pytestmark = QUIET

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
    run = trainer(
        plan.steps, *callbacks, logger=logger, log_every_n_steps=4, enable_progress_bar=True
    )
    run.fit(module, train_loader(plan, records(shift)), DataLoader(records(), batch_size=N))
    with open(Path(logger.log_dir) / "metrics.csv", encoding="utf-8") as file:
        return list(csv.DictReader(file)), shown | run.callback_metrics


@pytest.mark.filterwarnings("ignore:train_loss was not logged")
def check_that_nothing_of_training_is_written(folder: Path) -> None:
    lines, shown = written(folder)
    names = {
        "epoch",
        "step",
        "val_loss",
        *("privacy/epsilon", "privacy/epsilon_left", "privacy/delta", "privacy/lr"),
        *("privacy/noise_multiplier", "privacy/batch_size"),
    }
    assert set(lines[0]) == names
    assert set(shown) - {"v_num"} == {"epsilon", "val_loss"}
    spent = [float(line["privacy/epsilon"]) for line in lines if line["privacy/epsilon"]]
    assert len(spent) == 3
    assert 0.98 < spent[-1] <= 1.0 <= float(shown["epsilon"])


@pytest.mark.slow
def test_what_training_logs_reaches_no_logger_and_no_bar(tmp_path: Path) -> None:
    with pytest.warns(UtilityWarning, match="train_loss was not logged"):
        check_that_nothing_of_training_is_written(tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:train_loss was not logged")
def test_logs_do_not_depend_on_records_nor_on_what_is_drawn(tmp_path: Path) -> None:
    def public(shift: float) -> list[dict[str, str]]:
        return [{**line, "val_loss": ""} for line in written(tmp_path, shift=shift)[0]]

    assert public(0.0) == public(50.0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:train_loss was not logged")
def test_a_filter_that_lets_training_losses_through_is_caught(tmp_path: Path) -> None:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(
            PrivateTraining,
            "log_training",
            lambda self, *args, **options: self._log(*args, **options),
        )

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
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": "train_loss"},
        }


@pytest.mark.cases(1, 1)
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
    run = trainer(
        10,
        PrivateTraining(private_logs=private_logs),
        *chosen,
        enable_checkpointing=how == "keep",
    )
    assert_refused(
        "train_loss must not be monitored",
        lambda: run.fit(module, train_loader(plan)),
        PrivacyError,
    )
    assert len(module.optimizer.accountant.ledger) <= 1


def check_that_counters_count_draws() -> None:
    plan, counts, totals = planned(adjacency="add_remove"), [], []

    class Counts(Callback):
        def on_train_batch_end(
            self, run: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            counts.append((run.global_step, batch_idx, len(batch[0])))
            totals.append(run.num_training_batches)

    module = trained(plan, None, PrivateTraining(), Counts(), accumulate_grad_batches=4)
    assert module.optimizer.steps == plan.steps
    (block,) = {rows for _, _, rows in counts}
    assert counts == [(k + 1, k % 5, block) for k in range(10)]
    assert set(totals) == {5}


@pytest.mark.slow
def test_counters_count_draws_and_not_their_parts() -> None:
    check_that_counters_count_draws()


@pytest.mark.slow
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


@pytest.mark.slow
def test_an_answer_that_validation_does_not_see_is_caught() -> None:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(PrivateTraining, "on_validation_start", lambda *args: None)

    assert_caught(test_validation_sees_the_private_answer_so_far, mutate)


@pytest.mark.cases(0, 1)
@pytest.mark.filterwarnings(
    "ignore:You're resuming from a checkpoint that ended before the epoch ended"
)
@pytest.mark.parametrize(
    "sampling", ["poisson", pytest.param("allocated", marks=pytest.mark.slow)]
)
def test_a_killed_run_goes_on_and_its_lost_steps_stay_charged(
    sampling: str, tmp_path: Path
) -> None:
    plan = planned(sampling=sampling, average="uniform")
    secret = {"private_checkpoints": sampling == "allocated"}
    with pytest.raises(RuntimeError, match="killed"):
        checkpointed(plan, first := on_disk(plan, tmp_path), tmp_path, Killed(8), **secret)
    assert first.optimizer.steps == 8
    first.optimizer.accountant.close()
    with pytest.warns(UtilityWarning, match="2 steps after step 6 were lost"):
        second = checkpointed(
            plan, on_disk(plan, tmp_path), tmp_path, ckpt="step=6.ckpt", **secret
        )
    assert second.optimizer.steps == 10
    assert second.optimizer.finalized
    assert 0.9 < second.optimizer.accountant.get_epsilon(DELTA) <= 1.0
    if sampling == "poisson":
        assert len(second.optimizer.accountant.ledger) == 10


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:You're resuming from a checkpoint that ended before the epoch ended"
)
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


@pytest.mark.slow
def test_checkpoints_with_secrets_are_refused_until_they_stay_private(tmp_path: Path) -> None:
    plan = planned(sampling=dp.Disjoint(BATCH, N), epochs=1)
    module = private(plan)
    assert_refused(
        "private_checkpoints=True", lambda: checkpointed(plan, module, tmp_path), PrivacyError
    )
    assert not module.optimizer.accountant.ledger
    run = trainer(
        5, PrivateTraining(), saving(tmp_path, save_weights_only=True), enable_checkpointing=True
    )
    run.fit(module := private(plan), train_loader(plan))
    assert "optimizer_states" not in torch.load(tmp_path / "step=3.ckpt", weights_only=True)
    assert_refused("private_checkpoints=True", lambda: late(plan, tmp_path), PrivacyError)


def late(plan: Any, folder: Path) -> None:
    class Saves(Callback):
        def on_train_batch_end(self, run: Any, *args: Any) -> None:
            run.save_checkpoint(folder / "late.ckpt")

    trained(plan, None, PrivateTraining(), Saves())


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:You're resuming from a checkpoint that ended before the epoch ended"
)
def test_a_checkpoint_without_a_ledger_file_brings_its_ledger(tmp_path: Path) -> None:
    plan = planned()
    checkpointed(plan, private(plan), tmp_path)
    again = checkpointed(plan, private(plan), tmp_path, ckpt="step=6.ckpt")
    assert len(again.optimizer.accountant.ledger) == again.optimizer.steps == 10
    ledger = plan.ledger()
    with pytest.raises(RuntimeError, match="killed"):
        checkpointed(plan, private(plan, accountant=ledger), tmp_path, Killed(8))
    shared = private(
        plan, accountant=ledger
    )  # which would forget what was made after the checkpoint
    assert_refused(
        "forget", lambda: checkpointed(plan, shared, tmp_path, ckpt="step=6.ckpt"), PrivacyError
    )


@pytest.mark.cases(1, 1)
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
    assert any("nothing was trained" in str(warning.message) for warning in told)
    assert len(again.optimizer.accountant.ledger) == 10


@pytest.mark.slow
def test_stopping_early_on_public_data_spends_what_was_made() -> None:
    plan = planned(epochs=6)
    module = trained(
        plan,
        None,
        PrivateTraining(),
        kinds.EarlyStopping("val_loss", patience=1, min_delta=10.0),
        val=True,
    )
    assert module.optimizer.steps == len(module.optimizer.accountant.ledger) == 10 < plan.steps
    assert module.optimizer.finalized


@pytest.mark.cases(1, 1)
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
from tests.integrations.lightning_runs import *
folder, plan = Path(sys.argv[1]), planned(average="uniform")

class Dies(Callback):
    def on_before_zero_grad(self, run, module, optimizer):
        if run.global_step == 7:
            module.optimizer._apply = lambda *args: os._exit(9)  # charged, and its noise is drawn

checkpointed(plan, on_disk(plan, folder), folder, Dies())
"""


@pytest.mark.weekly
@pytest.mark.filterwarnings(
    "ignore:You're resuming from a checkpoint that ended before the epoch ended"
)
def test_a_process_that_died_in_a_step_goes_on_without_it(tmp_path: Path) -> None:
    died = subprocess.run([sys.executable, "-c", CRASH, str(tmp_path)], cwd=ROOT, check=False)
    assert died.returncode == 9
    plan = planned(average="uniform")
    # two were made, up to four of them charged ahead: how many, the clock says
    with pytest.warns(UtilityWarning, match="[2-4] steps after step 6 were lost"):
        module = checkpointed(plan, on_disk(plan, tmp_path), tmp_path, ckpt="step=6.ckpt")
    assert len(module.optimizer.accountant.ledger) == module.optimizer.steps == 10
    assert module.optimizer.finalized


@pytest.mark.slow
def test_the_example_prints_both_scores_and_spends_its_budget(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = ROOT / "examples" / "lightning_module.py"
    monkeypatch.syspath_prepend(str(path.parent))
    with warnings.catch_warnings():  # it adds filters
        figures = runpy.run_path(str(path))["main"](["--quick"])
    assert 0.9 * 4.0 < figures["epsilon"] <= 4.0
    assert f"private {figures['private_accuracy']:.4f}, not private" in capsys.readouterr().out
    assert len(path.read_text(encoding="utf-8").splitlines()) < 100


@pytest.mark.weekly
def test_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "integrations" / "lightning.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(code, {})
    assert "finalized" in capsys.readouterr().out


@pytest.mark.weekly
def test_the_package_itself_does_not_import_lightning() -> None:
    code = "import sys, torch_dpsco, torch_dpsco.integrations; assert 'lightning' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
