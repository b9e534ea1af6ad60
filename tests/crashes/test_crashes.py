"""Crashes lose time, not budget: what a killed run has charged is never released again, and nothing is spent twice."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_dpsco as dp
from tests.algorithms import user_runs as runs
from tests.crashes.runs import CASES, EVERY, train
from torch_dpsco import train as checkpoint
from torch_dpsco.accounting import journal
from torch_dpsco.accounting.events import Sequential
from torch_dpsco.errors import (
    PrivacyError,
    SequenceError,
    UnitError,
    UtilityWarning,
)
from torch_dpsco.noise import SecretState
from torch_dpsco.step.run import Run


class Killed(BaseException):
    """Stands for a kill: nothing catches it, and nothing runs after it but what Python itself does."""


def killed(
    case: str,
    folder: Path,
    charges: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    released: bool = False,
) -> None:
    """Trains until so many steps are charged, before the noise of the last one, or after its release."""
    real, made = Run.pay, []

    def charge(run: Run, *args: Any) -> None:
        real(run, *args)
        made.append(run)
        if len(made) == charges and not released:
            raise Killed

    def step_made(saved: Any) -> None:
        if len(made) == charges:
            raise Killed
        saved_step(saved)

    saved_step = checkpoint.Checkpoint.step_made
    with monkeypatch.context() as patched, warnings.catch_warnings():
        patched.setattr(Run, "pay", charge)
        patched.setattr(checkpoint.Checkpoint, "step_made", step_made)
        # a kill says nothing, where an exception does
        warnings.filterwarnings("ignore", ".*was charged and did not end", UtilityWarning)
        with pytest.raises(Killed):
            train(CASES[case], folder)
    made[-1].accountant.close()


def state_in(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "checkpoint", weights_only=True)["optimizer"]


def counts(accountant: dp.Accountant) -> Counter[str]:
    """Returns how many events of each type are in each part."""
    return Counter(
        {
            f"{part} {type(event).__name__}": k
            for _, part, event, k in accountant.ledger.entries()
        }
    )


# -- killed at every step ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def forks() -> Iterator[subprocess.Popen[str]]:
    """A process that has imported everything, never runs a backward pass itself, and forks the runs that are killed."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.crashes.runs"]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as process:
        yield process
        process.communicate()  # the end of its input ends it


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("name", list(CASES))
def test_a_run_killed_at_any_step_goes_on_or_loses_the_steps_since_its_checkpoint(
    name: str, forks: Any
) -> None:
    """SIGKILL after each charge and after each release, under a budget of exactly the run."""
    for point in points_of(name, forks):
        check(point)


AHEAD = 4
# how often the cases are charged ahead: by equal events, within a pass or a part, or after one charge of the whole run
CHARGED_AHEAD = [
    "holder-poisson",
    "holder-fixed",
    "holder-allocated",
    "clipped",
    "localized",
    "user-clipped",
    "user-filtered",
    "user-halting",
    "localized-user",
]


@pytest.mark.cases(0, 2)
@pytest.mark.parametrize("name", CHARGED_AHEAD)
def test_a_run_that_is_charged_ahead_loses_at_most_so_many_steps_more(
    name: str, forks: Any
) -> None:
    points = points_of(f"{name}:{AHEAD}", forks)
    for point in points:
        check(point, AHEAD)
    told = [line for point in points for line in point["rows"][-1]["told"]]
    assert any("lost to a crash" in line for line in told)


def points_of(name: str, forks: Any) -> list[dict[str, Any]]:
    """Returns where a case was killed, and what was published."""
    print(name, file=forks.stdin, flush=True)
    points = [json.loads(line) for line in iter(forks.stdout.readline, "\n")]
    assert {point["point"][0] for point in points if point["ends"][0] == -9} == {
        "charge",
        "step",
    }
    return points


def check(point: dict[str, Any], ahead: int = 1) -> None:
    """Compares what was published by a killed run and the one that went on with it.

    Args:
        point: where it was killed, and what was published.
        ahead: steps that a line of the ledger file pays for, at most.
    """
    rows, (_kind, number) = point["rows"], point["point"]
    last = rows[-1]
    released = [row["released"] for row in rows if "released" in row]
    assert point["ends"] in ([0], [-9, 0]), point
    assert last["finished"]
    assert last["finalized"]
    assert last["epsilon"] <= last["budget"]
    told = [line for line in last["told"] if "lost to a crash" in line]
    counted = [int(line.split()[0]) for line in told if "steps after" in line]
    killed = len(point["ends"]) == 2
    saved = EVERY * ((number - 1) // EVERY)
    assert len(counted) == killed, point
    if killed:
        lost = number - saved
        assert lost <= counted[0] <= min(lost + ahead - 1, last["steps"] - saved), point
    charged = [row["charged"] for row in rows if "charged" in row]
    first = list(range(number)) if killed else []
    start = saved + counted[0] if killed else 0
    # each step is charged once, by one of the two, or charged ahead and lost
    assert charged == first + list(range(start, last["steps"])), point
    assert len(set(released)) == len(released), "a step was released twice under one charge"
    values = [row["values"] for row in rows if "released" in row and not row["halted"]]
    assert len(set(values)) == len(values)
    assert set(released) <= set(charged)
    places = [tuple(row["place"]) for row in rows if row.get("place")]
    assert len(set(places)) == len(places), "a part was released twice"


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("name", ["accelerated", "localized-user"])
def test_a_killed_run_goes_on_or_loses(
    name: str, released: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    killed(name, tmp_path, EVERY + 2, monkeypatch, released=released)
    with pytest.warns(UtilityWarning, match=f"^2 steps after step {EVERY} were lost to a crash"):
        optimizer, accountant = train(CASES[name], tmp_path)
    assert optimizer.finalized
    assert optimizer.steps == 7
    assert accountant.get_epsilon(accountant.budget.delta) <= accountant.budget.epsilon
    found = counts(accountant)
    if name == "accelerated":
        assert found == {f"{part} Gaussian": 1 for part in range(7)}
    else:
        assert [found[f"{part} Gaussian"] for part in range(2)] == [4, 3]
        assert [found[f"{part} AboveThreshold"] for part in range(2)] == [1, 1]
    accountant.close()
    with pytest.warns(UtilityWarning, match="nothing was trained"):  # the script, run once more
        again, ledger = train(CASES[name], tmp_path)
    assert again.finalized
    assert counts(ledger) == found


@pytest.mark.slow
def test_a_second_crash_before_the_next_checkpoint_loses_more(
    tmp_path: Path, monkeypatch: Any
) -> None:
    killed("holder-poisson", tmp_path, 2, monkeypatch)
    with pytest.warns(UtilityWarning, match="^2 steps after step 0"):
        killed("holder-poisson", tmp_path, 1, monkeypatch)
    with pytest.warns(
        UtilityWarning, match="^1 steps after step 2"
    ):  # a resumed run is saved at once
        optimizer, accountant = train(CASES["holder-poisson"], tmp_path)
    assert (optimizer.steps, len(accountant)) == (8, 8)


def test_a_line_torn_by_the_crash_costs_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    killed("accelerated", tmp_path, EVERY + 1, monkeypatch)
    with (tmp_path / "ledger").open("ab") as file:
        file.write(b'{"at": 4, "cou')
    with pytest.warns(UtilityWarning) as told:
        optimizer, accountant = train(CASES["accelerated"], tmp_path)
    assert "it is dropped" in str(told[0].message)
    assert str(told[1].message).startswith(f"1 steps after step {EVERY}")
    assert counts(accountant) == {f"{part} Gaussian": 1 for part in range(7)}
    assert optimizer.finalized


def test_a_run_that_lost_its_last_steps_finishes(tmp_path: Path, monkeypatch: Any) -> None:
    killed("holder-poisson", tmp_path, 8, monkeypatch)
    with pytest.warns(UtilityWarning, match="^2 steps after step 6"):
        optimizer, accountant = train(CASES["holder-poisson"], tmp_path)
    assert (optimizer.finalized, len(accountant)) == (True, 8)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:users disagree:torch_dpsco.errors.UtilityWarning")
def test_a_halt_that_the_checkpoint_missed_is_kept(tmp_path: Path, monkeypatch: Any) -> None:
    killed("user-halting", tmp_path, 1, monkeypatch, released=True)
    assert not state_in(tmp_path)["dpsco"]["halted"]
    with pytest.warns(UtilityWarning, match="^1 steps after step 0"):
        optimizer, accountant = train(CASES["user-halting"], tmp_path)
    assert optimizer.halted
    assert optimizer.oracle._test.asked == 1  # no query was answered after the halt
    assert counts(accountant)[" AboveThreshold"] == 1


@pytest.mark.slow
def test_a_halt_that_nobody_saw_is_none(tmp_path: Path, monkeypatch: Any) -> None:
    """Killed between the answer and its note in the ledger: the answer was not shown."""

    def kill(run: Run, progress: object) -> None:
        run.accountant.close()
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(Run, "note_halt", kill)
        with pytest.raises(Killed):
            train(CASES["user-halting"], tmp_path)
    with pytest.warns(UtilityWarning, match="^1 steps after step 0"):
        optimizer, _ = train(CASES["user-halting"], tmp_path)
    assert optimizer.halted
    assert optimizer.oracle._test.asked == 2


# -- what a run is resumed with ---------------------------------------------------------------------------------------


def begun(folder: Path, steps: int = 2) -> tuple[dp.HolderSGD, dict[str, Any]]:
    """Returns an optimizer with a ledger file after some steps, and its state."""
    case = CASES["holder-poisson"]
    optimizer = case.build(
        dp.attach(case.model()).parameters(), dp.Accountant(case.budget, ledger_path=folder)
    )
    if steps:
        make(optimizer, steps)
    return optimizer, optimizer.state_dict()


def make(optimizer: Any, steps: int) -> None:
    data, _ = CASES["holder-poisson"].data()
    for x, _ in optimizer.loader(data, steps=steps):
        optimizer.zero_grad()
        for p in optimizer.param_groups[0]["params"]:
            p.grad_sample = x.sum(1).reshape(-1, *[1] * p.dim()).expand(-1, *p.shape).clone()
        optimizer.step()


def test_a_run_is_resumed_with_its_own_ledger_file_only(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(journal, "steps_ahead", lambda line, step: 1)  # so that a copy is older
    optimizer, state = begun(tmp_path / "ledger")
    older = (tmp_path / "ledger").read_bytes()
    make(optimizer, 1)
    newer = optimizer.state_dict()
    optimizer.accountant.close()
    begun(tmp_path / "other")[0].accountant.close()
    (tmp_path / "older").write_bytes(older)
    case = CASES["holder-poisson"]
    with pytest.warns(UtilityWarning, match="has no mark"):
        behind = dp.Accountant(case.budget, ledger_path=tmp_path / "older")
    for accountant in (
        dp.Accountant(case.budget),
        dp.Accountant(case.budget, ledger_path=tmp_path / "new"),
        dp.Accountant(case.budget, ledger_path=tmp_path / "other"),
        behind,
    ):
        fresh = case.build(dp.attach(case.model()).parameters(), accountant)
        with pytest.raises(
            PrivacyError, match="ledger file of the run, as new as its checkpoint"
        ):
            fresh.resume(newer)
        assert fresh.steps == 0
    own = case.build(
        dp.attach(case.model()).parameters(),
        dp.Accountant(case.budget, ledger_path=tmp_path / "ledger"),
    )
    with pytest.warns(UtilityWarning, match="^1 steps after step 2"):
        assert own.resume(state) == 1
    assert (own.steps, own.run, len(own.accountant)) == (3, optimizer.run, 3)
    with pytest.raises(SequenceError, match="must be called on a new optimizer"):
        own.resume(state)


def test_a_checkpoint_of_the_start_names_its_ledger(tmp_path: Path) -> None:
    optimizer, state = begun(tmp_path / "ledger", 0)
    optimizer.accountant.close()
    case = CASES["holder-poisson"]
    for name, right in (("new", False), ("ledger", True)):
        accountant = dp.Accountant(case.budget, ledger_path=tmp_path / name)
        fresh = case.build(dp.attach(case.model()).parameters(), accountant)
        if right:
            assert fresh.resume(state) == 0
            assert fresh.run == optimizer.run
        else:
            with pytest.raises(PrivacyError, match="ledger file of the run"):
                fresh.resume(state)


def test_steps_without_their_charges_are_refused(tmp_path: Path) -> None:
    _, state = begun(tmp_path / "ledger", 4)
    case = CASES["holder-poisson"]
    emptied = dp.Accountant(case.budget)
    fewer, foreign = (begun(tmp_path / str(k), k)[0].accountant for k in (3, 5))
    marks = dp.Accountant(case.budget)  # and no charge
    marks.authorize(Sequential(()), 0, releases={state["dpsco"]["run"]: 4})
    for accountant in (emptied, fewer, foreign, marks):
        forged = copy.deepcopy(state)
        forged["dpsco"]["ledger"] = accountant.state_dict()
        fresh = case.build(dp.attach(case.model()).parameters(), dp.Accountant(case.budget))
        with pytest.raises(PrivacyError, match="must hold the charges of its 4 steps"):
            fresh.load_state_dict(forged)
        assert fresh.steps == 0
    for name in ("run", "since"):
        part = copy.deepcopy(state)
        del part["dpsco"][name]
        with pytest.raises(ValueError, match=rf"as it was written \(got one without {name}\)"):
            fresh.load_state_dict(part)


def test_a_copy_is_another_run_in_the_ledger(tmp_path: Path) -> None:
    optimizer, _ = begun(tmp_path / "ledger")
    other = copy.deepcopy(optimizer)
    assert other.run != optimizer.run
    other.load_state_dict(other.state_dict())  # before it has charged anything by itself
    make(other, 1)
    releases = optimizer.accountant.state_dict()["releases"]
    assert releases == {optimizer.run: 2, other.run: 3}


# -- secrets ----------------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_the_start_gives_its_threshold_to_a_resumed_run_only(
    tmp_path: Path,
) -> None:
    case = CASES["user-filtered"]

    def built(path: Path | None) -> Any:
        return case.build(
            case.model().parameters(), dp.Accountant(case.budget, ledger_path=path)
        )

    first = built(tmp_path / "ledger")
    state = first.state_dict()
    secret = state["dpsco"]["oracle"]["threshold_noise"]
    assert secret is not None
    first.accountant.close()
    loaded, resumed = built(None), built(tmp_path / "ledger")
    loaded.load_state_dict(state)
    resumed.resume(state)
    assert resumed.state_dict()["dpsco"]["oracle"]["threshold_noise"] == secret
    assert loaded.state_dict()["dpsco"]["oracle"]["threshold_noise"] != secret
    assert loaded.run != resumed.run == first.run


def test_a_run_of_noisy_tests_goes_on_in_one_place(tmp_path: Path) -> None:
    case = CASES["user-filtered"]
    accountant = dp.Accountant(case.budget, ledger_path=tmp_path / "ledger")
    model = case.model()
    state = case.build(model.parameters(), accountant).state_dict()
    data, ids = runs.agreeing(200)
    both = [
        runs.Run(dp.attach(case.model(), loss_reduction="sum"), None, runs.linear_loss)
        for _ in range(2)
    ]
    for run in both:
        run.opt = case.build(run.model.parameters(), accountant)
        run.opt.resume(state)
    first, second = both
    first.step(next(iter(first.opt.loader(data, ids, isolation="none"))))
    charged = len(accountant)
    with pytest.raises(SequenceError, match="goes on with the same run"):
        second.step(next(iter(second.opt.loader(data, ids, isolation="none"))))
    assert (second.opt.steps, len(accountant)) == (0, charged)
    first.step(next(iter(first.opt.loader(data, ids, isolation="none"))))


@pytest.mark.parametrize("name", ["user-filtered", "localized-user"])
def test_ctrl_c_between_charge_and_answer_loses_a_step_of_noisy_tests(
    name: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """In this process, and from the checkpoint of the start."""
    case = CASES[name]
    run = runs.Run(dp.attach(case.model(), loss_reduction="sum"), None, runs.linear_loss)
    run.opt = case.build(
        run.model.parameters(), dp.Accountant(case.budget, ledger_path=tmp_path / "ledger")
    )
    (data, ids), oracle = case.data(), type(run.opt.oracle)
    loader = run.opt.loader(data, ids)
    state = run.opt.state_dict()

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(oracle, "release", interrupted)
        with pytest.warns(UtilityWarning, match="did not end"), pytest.raises(KeyboardInterrupt):
            run.step(next(iter(loader)))
    charged = len(run.opt.accountant)
    assert charged
    assert run.opt.steps == 1
    run.step(next(iter(run.opt.loader(data, ids, resume=True))))
    assert (run.opt.steps, len(run.opt.accountant)) == (2, charged)
    run.opt.accountant.close()
    run.opt = case.build(
        run.model.parameters(), dp.Accountant(case.budget, ledger_path=tmp_path / "ledger")
    )
    with pytest.warns(UtilityWarning, match="^2 steps after step 0 were lost"):
        assert run.opt.resume(state) == 2
    run.step(next(iter(run.opt.loader(data, ids, resume=True))))
    assert run.opt.steps == 3


def test_a_halt_of_a_lost_step_is_noted_before_it_is_seen(
    tmp_path: Path, monkeypatch: Any
) -> None:
    case = CASES["user-filtered"]
    run = runs.Run(dp.attach(case.model(), loss_reduction="sum"), None, runs.linear_loss)
    accountant = dp.Accountant(case.budget, ledger_path=tmp_path / "ledger")
    run.opt = case.build(run.model.parameters(), accountant)
    data, ids = case.data()
    loader = run.opt.loader(data, ids)
    run.opt.state_dict()  # the threshold is known

    def interrupted(oracle: Any, *_: Any) -> Any:
        oracle._test.halted = True  # below the threshold, and nobody was told
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(type(run.opt.oracle), "release", interrupted)
        with pytest.warns(UtilityWarning, match="did not end"), pytest.raises(KeyboardInterrupt):
            run.step(next(iter(loader)))
    assert run.opt.halted
    assert accountant.marked(f"{run.opt.run}/halted/0") == 1


@pytest.mark.slow
def test_a_threshold_that_a_pilot_has_lost_is_replaced_by_a_public_one(
    tmp_path: Path, monkeypatch: Any
) -> None:
    killed("localized-pilot", tmp_path, 1, monkeypatch, released=True)
    with pytest.warns(UtilityWarning) as told:
        optimizer, _ = train(CASES["localized-pilot"], tmp_path)
    assert "the pilot's threshold was lost to a crash" in str(told[0].message)
    pilot = optimizer.oracle.phases[0][0]
    assert pilot.chosen == float(pilot._grid[len(pilot._grid) // 2])
    assert optimizer.finalized


def test_a_state_with_secrets_says_so_by_its_type_and_shows_none(tmp_path: Path) -> None:
    for name, secret in (("user-filtered", True), ("holder-poisson", False)):
        case = CASES[name]
        state = case.build(case.model().parameters(), dp.Accountant(case.budget)).state_dict()
        assert isinstance(state, SecretState) is secret
        assert state["dpsco"]["confidential"] is secret
        assert not secret or ("CONFIDENTIAL" in repr(state) and "tensor" not in repr(state))
        torch.save(state, tmp_path / "state")
        assert dict(torch.load(tmp_path / "state", weights_only=True))["dpsco"]["steps"] == 0


# -- records ----------------------------------------------------------------------------------------------------------


def permuted(data: torch.utils.data.TensorDataset) -> torch.utils.data.TensorDataset:
    return torch.utils.data.TensorDataset(*(t.roll(1, 0) for t in data.tensors))


def changed(data: torch.utils.data.TensorDataset) -> torch.utils.data.TensorDataset:
    first, second = (t.clone() for t in data.tensors)
    first[17, 0] += 1e-6
    return torch.utils.data.TensorDataset(first, second)


class Read(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """The same records, read one by one."""

    def __init__(self, data: torch.utils.data.TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


@pytest.mark.parametrize("wrapped", [lambda data: data, Read], ids=["tensors", "records"])
@pytest.mark.parametrize("saved", [False, True], ids=["same process", "checkpoint"])
def test_a_partition_goes_on_with_its_own_records_only(wrapped: Any, saved: bool) -> None:
    case = CASES["accelerated"]
    data, _ = case.data()
    optimizer = case.build(dp.attach(case.model()).parameters(), dp.Accountant(case.budget))
    loader = iter(optimizer.loader(wrapped(data)))
    x, _ = next(loader)
    for p in optimizer.param_groups[0]["params"]:
        p.grad_sample = torch.zeros(len(x), *p.shape)
    optimizer.step()
    if saved:
        state = optimizer.state_dict()
        optimizer = case.build(dp.attach(case.model()).parameters(), dp.Accountant(case.budget))
        optimizer.load_state_dict(state)
    for other in (permuted(data), changed(data)):
        with pytest.raises(PrivacyError, match="must hold the records of the run") as caught:
            optimizer.loader(wrapped(other), resume=True)
        assert "17" not in str(caught.value)
    assert len(optimizer.loader(wrapped(data), resume=True)) == 6


@pytest.mark.slow
def test_ids_of_users_are_records_too() -> None:
    run = runs.localized(runs.phased(runs.plan(200, 1), runs.plan(300, 1), n_users=500))
    data, ids = runs.agreeing(500)
    run.step(next(iter(run.opt.loader(data, ids, isolation="none"))))
    with pytest.raises(PrivacyError, match="must hold the records of the run"):
        run.opt.loader(data, ids.roll(1), resume=True)
    run.opt.loader(data, ids, resume=True)


def test_tags_are_keyed_and_in_the_private_state_only() -> None:
    case = CASES["accelerated"]
    tags = set()
    for _ in range(2):
        optimizer = case.build(dp.attach(case.model()).parameters(), dp.Accountant(case.budget))
        optimizer.loader(case.data()[0])
        state = optimizer.state_dict()
        assert state["dpsco"]["confidential"]
        tags.add(state["dpsco"]["partition"]["tag"])
        assert state["dpsco"]["partition"]["tag"] not in str(optimizer.report(1e-4)) + repr(
            optimizer
        )
    assert len(tags) == 2  # of the same records


# -- the file ---------------------------------------------------------------------------------------------------------


def test_a_checkpoint_needs_a_ledger_file(tmp_path: Path) -> None:
    case = CASES["holder-poisson"]
    model = case.model()
    optimizer = case.build(model.parameters(), dp.Accountant(case.budget))
    with pytest.raises(PrivacyError, match="must have a ledger file for a run with checkpoints"):
        dp.fit(
            model,
            optimizer,
            case.data()[0],
            case.loss,
            checkpoint=tmp_path / "checkpoint",
            progress=False,
        )
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("name", ["holder-poisson", "accelerated", "user-clipped"])
def test_a_finished_run_says_that_it_trains_nothing(name: str, tmp_path: Path) -> None:
    """Also with other records, of which it keeps no fingerprint, for it is not confidential."""
    case = CASES[name]
    _, accountant = train(case, tmp_path)
    accountant.close()
    text = "nothing was trained: checkpoint='.*checkpoint' is of a finished run"
    with pytest.warns(UtilityWarning, match=text):
        optimizer, ledger = train(
            replace(case, data=lambda: (changed(case.data()[0]), case.data()[1])), tmp_path
        )
    ledger.close()
    assert optimizer.finalized
    fewer = torch.utils.data.TensorDataset(*(t[1:] for t in case.data()[0].tensors))
    if optimizer.accountant.unit == "user":
        return  # who are not all in the data
    with pytest.raises(UnitError, match="n must be the number of records under zero_out"):
        train(replace(case, data=lambda: (fewer, None)), tmp_path)


def test_a_checkpoint_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: Any) -> None:
    killed("holder-poisson", tmp_path, 4, monkeypatch)
    before = (tmp_path / "checkpoint").read_bytes()
    assert (tmp_path / "checkpoint").stat().st_mode & 0o077 == 0

    def torn(state: Any, file: Any) -> None:
        file.write(b"half")
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint.torch, "save", torn)
        with pytest.warns(UtilityWarning, match="lost to a crash"), pytest.raises(Killed):
            train(CASES["holder-poisson"], tmp_path)
    assert (tmp_path / "checkpoint").read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"half", b"PK"])
def test_what_is_no_checkpoint_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "checkpoint").write_bytes(content)
    with pytest.raises(ValueError, match="checkpoint must be a file that fit has written"):
        train(CASES["holder-poisson"], tmp_path)


@pytest.mark.slow
def test_a_checkpoint_of_another_plan_or_run_is_refused(tmp_path: Path) -> None:
    _, accountant = train(CASES["holder-poisson"], tmp_path)
    accountant.close()
    before = (tmp_path / "checkpoint").read_bytes()
    with pytest.raises(ValueError, match="of the same plan"):
        train(CASES["holder-fixed"], tmp_path)
    optimizer, _ = begun(tmp_path / "other", 1)
    case = CASES["holder-poisson"]
    model = case.model()
    other = case.build(model.parameters(), optimizer.accountant)
    other._progress.steps = 1
    with pytest.raises(PrivacyError, match="must be a file of this run"):
        dp.fit(
            model,
            other,
            case.data()[0],
            case.loss,
            checkpoint=tmp_path / "checkpoint",
            progress=False,
        )
    assert (tmp_path / "checkpoint").read_bytes() == before
