"""Loggers write public numbers, and nothing else: whatever the records are, the lines are those of plan and ledger."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from tests.processes import launch
from torch_dpsco.accounting.calibrate import rounded_up
from torch_dpsco.errors import PrivacyError, SequenceError
from torch_dpsco.show import loggers
from torch_dpsco.show.loggers import Logger, public_numbers

N, BATCH, DIM, STEPS, DELTA = 60, 12, 3, 10, 1e-3
LOSS = dp.losses.Logistic()
PROBLEM = LOSS.problem(bound_x=2.0)
PAGE = (Path(__file__).parents[2] / "docs" / "logging.md").read_text(encoding="utf-8")
NAMES = {f"privacy/{name}" for name in re.findall(r"^\| `privacy/(\w+)` \|", PAGE, re.MULTILINE)}

Line = tuple[int, dict[str, float]]


def records(shift: float = 0.0) -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(N, DIM, generator=draw) + shift, torch.ones(N, 1))


def planned(model: nn.Module, accountant: dp.Accountant | None = None) -> dp.HolderSGD:
    """Returns an optimizer with a budget of ten steps on Poisson batches."""
    plan = dp.HolderSGD.plan(
        problem=PROBLEM, n=N, budget=dp.Budget(1.0, DELTA), batch_size=BATCH, epochs=2
    )
    return dp.HolderSGD(model.parameters(), plan, accountant=accountant)


def collecting(**options: Any) -> tuple[list[Line], Logger]:
    lines: list[Line] = []
    return lines, Logger(lambda numbers, step: lines.append((step, numbers)), **options)


def fitted(log: Logger, shift: float = 0.0, **options: Any) -> dp.HolderSGD:
    model = nn.Linear(DIM, 1)
    optimizer = planned(model)
    dp.fit(model, optimizer, records(shift), LOSS, progress=False, log=log, **options)
    return optimizer


# -- what is written --------------------------------------------------------------------------------------------------


def test_fit_writes_every_so_many_steps_and_the_last_what_plan_and_ledger_say() -> None:
    lines, log = collecting(every=4)
    optimizer = fitted(log)
    assert [step for step, _ in lines] == [4, 8, STEPS]
    event = optimizer.design.event(optimizer.oracle.event(), 1)
    for step, numbers in lines:
        other = dp.Accountant(dp.Budget(1.0, DELTA))
        other.record(event, step)
        assert numbers == {
            "privacy/epsilon": other.spent.epsilon,
            "privacy/epsilon_left": other.remaining,
            "privacy/delta": DELTA,
            "privacy/noise_multiplier": optimizer.oracle.noise_multiplier,
            "privacy/lr": optimizer.param_groups[0]["lr"],
            "privacy/batch_size": BATCH,
        }


def assert_lines_do_not_tell_of_records(runs: Callable[[float], list[Line]]) -> None:
    """Runs on records that have nothing in common, with batches drawn anew, must leave the same lines."""
    first, second = runs(0.0), runs(100.0)
    assert first
    assert first == second


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("physical", [None, 4])
def test_lines_do_not_depend_on_records_nor_on_what_is_drawn(physical: int | None) -> None:
    def run(shift: float) -> list[Line]:
        lines, log = collecting(every=1)
        fitted(log, shift, physical_batch_size=physical)
        return lines

    assert_lines_do_not_tell_of_records(run)


def loop(
    log: Logger, shift: float, physical: int | None = None, sizes: list[int] | None = None
) -> dp.HolderSGD:
    """The loop that a user would write, which calls the logger for each batch, or part of one."""
    model = dp.attach(nn.Linear(DIM, 1))
    optimizer = planned(model)
    for inputs, targets in optimizer.loader(
        records(shift), steps=STEPS, physical_batch_size=physical
    ):
        if sizes is not None:
            sizes.append(int(inputs.any(dim=1).sum()))  # the others fill the batch up
        optimizer.zero_grad()
        LOSS(model(inputs), targets).backward()
        optimizer.step()
        log(optimizer)
    optimizer.finalize()
    return optimizer


@pytest.mark.slow
def test_chunks_of_a_draw_leave_one_line() -> None:
    sizes: list[int] = []

    def run(shift: float) -> list[Line]:
        lines, log = collecting(every=1)
        loop(log, shift, physical=2, sizes=sizes)
        return lines

    assert_lines_do_not_tell_of_records(run)
    assert len(sizes) > 4 * STEPS


def test_a_field_that_tells_of_a_batch_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def telling(optimizer: Any, delta: float | None = None) -> dict[str, float]:
        return public_numbers(optimizer, delta) | {"batch_size": sizes[-1]}

    def run(shift: float) -> list[Line]:
        lines, log = collecting(every=1)
        loop(log, shift, sizes=sizes)
        return lines

    monkeypatch.setattr(loggers, "public_numbers", telling)
    with pytest.raises(AssertionError):
        assert_lines_do_not_tell_of_records(run)


@pytest.mark.weekly
def test_a_logger_that_sees_the_middle_of_a_draw_is_caught() -> None:
    def run(shift: float) -> list[Line]:
        lines: list[Line] = []
        loop(lambda optimizer: lines.append((optimizer.steps, {})), shift, physical=2)  # type: ignore[arg-type]
        return lines

    with pytest.raises(AssertionError):
        assert_lines_do_not_tell_of_records(run)


@pytest.mark.slow
def test_without_a_budget_epsilon_needs_a_delta() -> None:
    for options, names in (
        ({}, {"noise_multiplier", "lr", "batch_size"}),
        ({"delta": 0.01}, {"epsilon", "delta", "noise_multiplier", "lr", "batch_size"}),
    ):
        model = nn.Linear(DIM, 1)
        plan = dp.HolderSGD.plan(
            problem=PROBLEM, n=N, noise_multiplier=2.0, lr=0.1, batch_size=BATCH, steps=2
        )
        lines, log = collecting(every=1, **options)
        optimizer = dp.HolderSGD(model.parameters(), plan)
        dp.fit(model, optimizer, records(), LOSS, progress=False, log=log)
        assert {name.removeprefix("privacy/") for name in lines[-1][1]} == names
    assert lines[-1][1]["privacy/epsilon"] == optimizer.accountant.get_epsilon(0.01)


def test_another_delta_than_the_budgets_leaves_out_what_remains() -> None:
    lines, log = collecting(delta=0.01)
    optimizer = fitted(log)
    assert lines[-1][1]["privacy/epsilon"] == optimizer.accountant.get_epsilon(0.01)
    assert "privacy/epsilon_left" not in lines[-1][1]


def test_two_runs_on_one_logger_are_both_written() -> None:
    lines, log = collecting(every=100)
    fitted(log), fitted(log)
    assert [step for step, _ in lines] == [STEPS, STEPS]


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(
    "name", ["loss", "train_loss", "grad_norm", "gradient", "rows", "batch_size", "epsilon"]
)
def test_a_private_number_is_refused(name: str) -> None:
    lines, log = collecting(every=1)
    optimizer = fitted(collecting()[1])
    way_out = rf"^{name} must not be logged: .*private.*public=\{{'{name}': \.\.\.\}}$"
    with pytest.raises(PrivacyError, match=way_out):
        log(optimizer, **{name: 0.3})
    with pytest.raises(PrivacyError, match=way_out):
        log(optimizer, {"accuracy": 0.9}, **{name: 0.3})
    assert lines == []


def test_the_numbers_are_a_closed_set() -> None:
    written = public_numbers(planned(dp.attach(nn.Linear(DIM, 1))), DELTA)
    assert {f"privacy/{name}" for name in written} == NAMES


def test_the_loss_of_a_batch_does_not_pass_for_a_public_number() -> None:
    lines, log = collecting(every=1)
    model = dp.attach(nn.Linear(DIM, 1))
    optimizer = planned(model)
    for inputs, targets in optimizer.loader(records(), steps=1):
        loss = LOSS(model(inputs), targets)
        loss.backward()
        optimizer.step()
        with pytest.raises(
            ValueError, match=r"loss must be a plain number, as float\(...\) .* \(got Tensor\)"
        ):
            log(optimizer, public={"loss": loss})
        with pytest.raises(
            ValueError, match=r"public must be a mapping of names to numbers \(got T"
        ):
            log(optimizer, loss)
    assert lines == []


def test_public_numbers_are_written_at_once_under_a_name_of_their_own() -> None:
    lines, log = collecting(every=100)
    optimizer = fitted(log)
    log(optimizer, public={"accuracy": 0.75})
    log(optimizer, {"auc": 1})
    assert lines[1:] == [(STEPS, {"public/accuracy": 0.75}), (STEPS, {"public/auc": 1.0})]


@pytest.mark.parametrize(
    ("value", "got"), [("high", "'high'"), (float("nan"), "nan"), (None, "None")]
)
def test_a_public_number_is_a_number(value: Any, got: str) -> None:
    lines, log = collecting()
    with pytest.raises(ValueError, match=rf"accuracy must be .* \(got {got}\)"):
        log(planned(nn.Linear(DIM, 1)), public={"accuracy": value})
    assert lines == []


def test_public_numbers_wait_for_the_end_of_a_draw() -> None:
    lines, log = collecting()
    model = dp.attach(nn.Linear(DIM, 1))
    optimizer = planned(model)
    inputs, targets = next(iter(optimizer.loader(records(), steps=1, physical_batch_size=2)))
    LOSS(model(inputs), targets).backward()
    optimizer.step()
    assert (optimizer.steps, optimizer.in_draw) == (0, True)
    with pytest.raises(
        SequenceError, match="public must be given after the last chunk of a batch"
    ):
        log(optimizer, public={"accuracy": 0.5})
    optimizer.discard()
    assert not optimizer.in_draw
    log(optimizer, public={"accuracy": 0.5})
    assert lines == [(0, {"public/accuracy": 0.5})]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: loggers.tensorboard("runs"),
            r"writer must be a .*SummaryWriter \(got 'runs'\)",
        ),
        (
            lambda: loggers.wandb(None),
            r"run must be what wandb.init\(...\) returns \(got None\)",
        ),
        (lambda: loggers.mlflow(object()), r"module must be mlflow itself \(got object\)"),
        (lambda: Logger(print, every=0), r"every must be an integer >= 1 \(got 0\)"),
        (lambda: Logger(print, delta=1.0), r"delta must be in \(0, 1\) \(got 1.0\)"),
        (lambda: Logger("file"), r"write must be a function \(got 'file'\)"),
        (
            lambda: Logger(print)(torch.optim.SGD([torch.ones(1)])),
            r"optimizer must be a private one \(got SGD\)",
        ),
        (
            lambda: fitted(print),
            r"log must be a Logger, as loggers.tensorboard\(writer\) \(got ",
        ),
    ],
)
def test_wrong_objects_are_refused_with_the_way_out(
    make: Callable[[], Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# -- runs that release one answer -------------------------------------------------------------------------------------


def one_answer(log: Logger, check: Callable[[Any], None] = lambda optimizer: None) -> Any:
    """Fits by output perturbation, whose iterates are secret."""
    model = nn.Linear(DIM, 1, bias=False, dtype=torch.float64)
    plan = dp.BoltOnPSGD.plan(
        problem=LOSS.problem(bound_x=2.0, radius=1.0),
        n=N,
        dim=DIM,
        budget=dp.Budget(1.0, DELTA),
        batch_size=BATCH,
        epochs=2,
    )
    optimizer = dp.BoltOnPSGD(model.parameters(), plan)
    check(optimizer)
    data = TensorDataset(records().tensors[0].double(), torch.ones(N, 1, dtype=torch.float64))
    dp.fit(model, optimizer, data, LOSS, progress=False, log=log)
    return optimizer


@pytest.mark.filterwarnings("ignore:noise buries")
def test_a_run_of_one_answer_is_written_once_it_is_released() -> None:
    lines, log = collecting(every=1)
    optimizer = one_answer(log, log)
    ((step, numbers),) = lines
    assert step == 1
    assert numbers["privacy/epsilon"] == optimizer.accountant.spent.epsilon > 0
    assert set(numbers) == {"privacy/epsilon", "privacy/epsilon_left", "privacy/delta"}


@pytest.mark.filterwarnings("ignore:noise buries")
def test_scores_of_secret_iterates_are_refused() -> None:
    lines, log = collecting(every=1)

    def check(optimizer: Any) -> None:
        with pytest.raises(PrivacyError, match=r"public must wait for finalize\(\)"):
            log(optimizer, public={"accuracy": 0.9})

    optimizer = one_answer(log, check)
    log(optimizer, public={"accuracy": 0.9})
    assert lines[1:] == [(1, {"public/accuracy": 0.9})]


# -- failures and processes -------------------------------------------------------------------------------------------


def test_a_logger_that_fails_leaves_a_run_that_goes_on() -> None:
    def full(numbers: dict[str, float], step: int) -> None:
        raise OSError("no space left on device")

    model, data = nn.Linear(DIM, 1), records()
    optimizer = planned(model)
    with pytest.raises(OSError, match="no space left"):
        dp.fit(model, optimizer, data, LOSS, progress=False, log=Logger(full, every=4))
    assert (optimizer.steps, len(optimizer.accountant), optimizer.finalized) == (4, 4, False)
    lines, log = collecting(every=4)
    dp.fit(model, optimizer, data, LOSS, progress=False, log=log)
    assert (optimizer.steps, len(optimizer.accountant), optimizer.finalized) == (
        STEPS,
        STEPS,
        True,
    )
    assert [step for step, _ in lines] == [8, STEPS]


def rank_lines(rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    lines, log = collecting(every=4)
    optimizer = fitted(log)
    try:
        log(optimizer, loss=0.3)
        refused = False
    except PrivacyError:
        refused = True
    return {"steps": [step for step, _ in lines], "refused": refused}


@pytest.mark.slow
def test_of_several_processes_the_first_writes_and_all_refuse(tmp_path: Path) -> None:
    first, second = launch(rank_lines, 2, tmp_path)
    assert first == {"steps": [4, 8, STEPS], "refused": True}
    assert second == {"steps": [], "refused": True}


# -- trackers ---------------------------------------------------------------------------------------------------------


def written_to_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard"
    )
    reader = events.EventAccumulator(str(folder))
    reader.Reload()
    return {
        name: [(e.step, e.value) for e in reader.Scalars(name)]
        for name in reader.Tags()["scalars"]
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tensorboard's own
def test_tensorboard_keeps_what_is_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    lines, log = collecting(every=4)
    with SummaryWriter(str(tmp_path)) as writer:
        written = loggers.tensorboard(writer, every=4)
        written(fitted(written), public={"accuracy": 0.75})
    found = written_to_tensorboard(tmp_path)
    assert found.pop("public/accuracy") == [(STEPS, 0.75)]
    assert set(found) == NAMES
    fitted(log)
    for name, points in found.items():
        assert points == [
            (step, pytest.approx(numbers[name], rel=1e-6)) for step, numbers in lines
        ]


def test_no_written_epsilon_is_less_than_was_spent() -> None:
    kept: dict[str, list[float]] = {}

    class Writer:
        def add_scalar(self, name: str, value: float, step: int) -> None:
            kept.setdefault(name, []).append(
                struct.unpack("f", struct.pack("f", value))[0]
            )  # as event files do

    lines, log = collecting(every=1)
    single = loggers.tensorboard(Writer(), every=1)

    class Both(Logger):
        def __call__(self, *args: Any, **private: Any) -> None:
            log(*args), single(*args)

    fitted(Both(print))
    for (_, numbers), *figures in zip(lines, *(kept[name] for name in lines[0][1]), strict=True):
        for name, shown in zip(numbers, figures, strict=True):
            assert shown == pytest.approx(numbers[name], rel=2e-7)
            if name in ("privacy/epsilon", "privacy/delta"):
                assert shown >= numbers[name]
            else:
                assert shown <= numbers[name]


@pytest.mark.weekly
def test_wandb_keeps_what_is_written_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb", reason="needs wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(
        mode="offline",
        dir=str(tmp_path),
        settings=wandb.Settings(console="off", x_disable_stats=True, silent=True),
    )
    try:
        optimizer = fitted(log := loggers.wandb(run, every=4))
        log(optimizer, public={"accuracy": 0.75})
        summary = dict(run.summary)
    finally:
        run.finish()
    assert summary["privacy/step"] == STEPS
    assert summary["privacy/epsilon"] == optimizer.accountant.spent.epsilon
    assert summary["public/accuracy"] == 0.75
    assert {name for name in summary if not name.startswith("_")} == {
        "privacy/step",
        "public/accuracy",
        *NAMES,
    }
    assert list(tmp_path.rglob("*.wandb"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # mlflow's own
def test_mlflow_keeps_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv(
        "MLFLOW_ALLOW_FILE_STORE", "true"
    )  # mlflow-skinny has no other without a server
    mlflow = pytest.importorskip("mlflow", reason="needs mlflow-skinny")
    mlflow.set_tracking_uri(tmp_path.as_uri())
    mlflow.set_experiment("runs")
    with mlflow.start_run() as run:
        optimizer = fitted(log := loggers.mlflow(mlflow, every=4))
        log(optimizer, public={"accuracy": 0.75})
    client = mlflow.MlflowClient()
    found = client.get_metric_history(run.info.run_id, "privacy/epsilon")
    assert [point.step for point in found] == [4, 8, STEPS]
    assert found[-1].value == optimizer.accountant.spent.epsilon
    names = set(client.get_run(run.info.run_id).data.metrics)
    assert names == {"public/accuracy", *NAMES}


# -- the page ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tensorboard's own
def test_the_blocks_of_the_page_run_in_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        exec(compile(block, "docs/logging.md", "exec"), scope)
    assert scope["optimizer"].finalized
    scope["writer"].close()
    found = written_to_tensorboard(tmp_path / "runs")
    spent = scope["accountant"].spent.epsilon
    assert rounded_up(spent) in capsys.readouterr().out
    assert found["privacy/epsilon"][-1][1] == pytest.approx(spent, rel=1e-6)
    assert "public/accuracy" in found
