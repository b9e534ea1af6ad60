"""Lines of a ledger file that pay for several steps: it is never behind what was released, whoever is killed."""

from __future__ import annotations

import errno
import math
import os
import random
import resource
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.accounting.ledgers import DELTA, STEP, WHOLE, image
from torch_dpsco.accounting import journal, ledger_file
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.events import Event, Gaussian, Parallel, Sequential
from torch_dpsco.accounting.ledger import Book
from torch_dpsco.accounting.ledger_file import HighWater, LedgerCopy, LedgerFile
from torch_dpsco.errors import BudgetExceeded, PrivacyError, UtilityWarning

forks = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
PART = Parallel({"0": [Gaussian(30.0, {"zero_out": 1.0, "replace_one": 2.0})]}, "p")
NOTHING = Sequential(())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "spent.jsonl"


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how many steps a line pays for; 8 until then."""

    def fix(steps: int) -> None:
        monkeypatch.setattr(journal, "steps_ahead", lambda line, step: steps)

    fix(8)
    return fix


class Run:
    """What an optimizer does before a release: it charges, with the mark of its number."""

    def __init__(
        self,
        accountant: Accountant,
        event: Event = STEP,
        planned: int = 100,
        name: str = "run",
    ) -> None:
        self.accountant = accountant
        self.event = event
        self.planned = planned
        self.name = name
        self.made = 0

    def step(self) -> None:
        left = self.planned - self.made
        self.accountant.authorize(
            self.event,
            planned=lambda: left,
            releases={self.name: self.made + 1},
            ahead=lambda: left,
        )
        self.made += 1

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.step()


def on_disk(path: Path) -> Book:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UtilityWarning)
        return LedgerCopy(path).book


def lines(path: Path) -> int:
    return path.read_bytes()[512:].count(b"\n")  # behind the header


def reopened(path: Path) -> Accountant:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UtilityWarning)
        return Accountant(ledger_path=path)


def assert_covers(path: Path, used: Book) -> None:
    """Compares event by event and mark by mark."""
    written = on_disk(path)
    assert written.ledger.includes(used.ledger)
    assert all(written.releases.get(run, 0) >= made for run, made in used.releases.items())


# -- what is written --------------------------------------------------------------------------------------------------


def test_a_line_pays_for_several_steps_and_the_accountant_says_what_was_used(path, ahead):
    accountant = Accountant(ledger_path=path)
    alone = Accountant()
    run, other = Run(accountant), Run(alone)
    for made in range(1, 21):
        run.step()
        other.step()
        assert len(accountant) == made
        assert accountant.get_epsilon(DELTA) == alone.get_epsilon(DELTA)
        assert accountant.marked("run") == made
        assert len(on_disk(path).ledger) == 8 * math.ceil(made / 8)
        assert on_disk(path).releases == {"run": 8 * math.ceil(made / 8)}
    assert lines(path) == 1 + 3


def test_a_plan_is_never_passed_and_a_finished_run_leaves_nothing_over(path, ahead):
    accountant = Accountant(ledger_path=path)
    Run(accountant, planned=19).steps(19)
    assert len(on_disk(path).ledger) == 19
    assert not accountant._journal.leads


@pytest.mark.parametrize("event", [STEP, WHOLE, PART, NOTHING, Sequential([STEP, PART])])
def test_any_event_may_be_charged_ahead(path, ahead, event):
    accountant = Accountant(ledger_path=path)
    run = Run(accountant, event)
    for made in range(1, 18):
        run.step()
        assert_covers(path, accountant._journal.book)
        assert lines(path) == 1 + math.ceil(made / 8)
    accountant.close()
    assert image(reopened(path)) == image(accountant)


def test_charges_without_a_run_or_a_plan_have_a_line_each(path, ahead):
    accountant = Accountant(ledger_path=path)
    run = Run(accountant)
    run.step()
    before = lines(path)
    accountant.authorize(STEP)  # equal to what is there, but not of the run
    accountant.authorize(STEP, releases={"other": 1})
    accountant.authorize(STEP, releases={"run": 2}, adaptive=True)
    accountant.record(STEP)
    assert lines(path) == before + 4
    assert len(on_disk(path).ledger) == 8 + 4
    run.step()  # of its own
    assert lines(path) == before + 4


@pytest.mark.parametrize("seed", range(10))
def test_the_file_is_never_behind_whatever_is_charged(path, monkeypatch, seed):
    """Runs in turns, other charges, rolled back runs, new facts and events by hand; after each the file is read."""
    dice = random.Random(seed)
    monkeypatch.setattr(ledger_file.os, "fsync", lambda fd: None)  # for speed
    monkeypatch.setattr(journal, "steps_ahead", lambda line, step: dice.choice([1, 2, 7, 64]))
    accountant, alone = Accountant(ledger_path=path), Accountant()
    events = [STEP, WHOLE, PART, NOTHING, STEP]
    runs = [Run(accountant, event, 40, f"run {k}") for k, event in enumerate(events)]
    saved = accountant.state_dict()
    for _ in range(120):
        what = dice.random()
        if what < 0.75:
            run = dice.choice(runs)
            if run.made == run.planned:
                continue
            alone.authorize(run.event)
            run.step()
        elif what < 0.83:
            event = dice.choice([STEP, WHOLE, PART])
            alone.authorize(event, 2)
            accountant.authorize(event, 2)
        elif what < 0.88:
            alone.ledger.add(WHOLE)
            accountant.ledger.add(WHOLE)
        elif what < 0.93:
            run = dice.choice(runs)
            run.made = max(0, run.made - 5)
        elif what < 0.96:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UtilityWarning)
                accountant.load_state_dict(saved)
            saved = accountant.state_dict()
        else:
            accountant._journal.book.config["fact"] = dice.random()
        if what < 0.83:
            assert_covers(path, accountant._journal.book)
        assert accountant.ledger.to_json() == alone.ledger.to_json()
    accountant.authorize(STEP)
    accountant.close()
    assert reopened(path).state_dict()["digest"] == accountant.state_dict()["digest"]


# -- the budget -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [1, 2, 3, 7, 20])
@pytest.mark.parametrize("mode", ["planned", "rdp"])
def test_a_budget_with_room_for_some_of_the_steps_refuses_none_that_it_would_have_allowed(
    path, ahead, room, mode
):
    large = Budget(3.0, DELTA, mode=mode)
    at = Accountant(large)
    at.authorize(STEP, at.max_steps(STEP) - room)
    spent = len(at)
    accountant = Accountant(large, ledger_path=path)
    accountant.authorize(STEP, spent)
    run = Run(accountant)
    for _ in range(room):
        run.step()
        assert len(on_disk(path).ledger) <= spent + room
    with pytest.raises(BudgetExceeded):
        run.step()
    assert len(accountant) == len(on_disk(path).ledger) == spent + room


def test_runs_in_turns_make_all_steps_that_fit_the_budget_and_what_they_write_ahead_fits_too(
    path, ahead
):
    budget = Budget(1.0, DELTA, mode="rdp")
    fits = Accountant(budget).max_steps(WHOLE)
    ahead(max(2, 2 * fits // 3))
    accountant = Accountant(budget, ledger_path=path)
    runs = [Run(accountant, WHOLE, fits, name) for name in "ab"]
    written = 0
    for made in range(fits):
        runs[made % 2].step()
        before, written = written, len(accountant._journal._written.ledger)
        assert written <= fits or written <= before + 1
    assert_covers(path, accountant._journal.book)
    with pytest.raises(BudgetExceeded):
        runs[0].step()


# -- crashes ----------------------------------------------------------------------------------------------------------


def in_child(task: Callable[[], Any]) -> int:
    """Returns the exit code of a forked child that runs the task, or minus its signal."""
    child = os.fork()
    if child == 0:
        try:
            task()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(9)


STEPS, BLOCK = 6, 4


def release_all(path: Path, point: int, how: str) -> None:
    """Steps that publish each release; dies at a point of all those between charges, noise and releases."""
    passed = 0

    def at_a_point() -> None:
        nonlocal passed
        passed += 1
        if passed == point:
            die(how)

    real = os.fsync, os.write

    def sync(fd: int) -> None:
        at_a_point()
        real[0](fd)
        at_a_point()

    journal.steps_ahead = lambda line, step: BLOCK
    ledger_file.os = _Watched(sync, at_a_point)  # type: ignore[assignment]
    out = os.open(path.with_name("releases"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    accountant = Accountant(ledger_path=path)
    run = Run(accountant, planned=STEPS)
    while run.made < run.planned:
        run.step()
        at_a_point()  # charged, no noise
        noise = os.urandom(4)
        at_a_point()
        os.write(out, noise)
        at_a_point()
    accountant.close()


class _Watched:
    """`os`, whose syncs and writes are points of their own."""

    def __init__(self, sync: Callable[[int], None], point: Callable[[], None]) -> None:
        self.fsync = sync
        self._point = point

    def write(self, fd: int, data: bytes) -> int:
        self._point()
        half = len(data) // 2
        written = os.write(fd, data[:half]) if half and len(data) != 256 else 0
        self._point()
        return written or os.write(fd, data)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


@forks
@pytest.mark.parametrize("how", ["kill", "exit"])
def test_a_process_that_dies_anywhere_leaves_a_file_that_holds_what_it_released(tmp_path, how):
    """Between line, mark, noise, release and the next charge; the file opens again, and was ahead by a line at most."""
    point, ends = 0, set()
    while 0 not in ends:
        point += 1
        folder = tmp_path / str(point)
        folder.mkdir()
        path = folder / "ledger"
        ends.add(in_child(lambda path=path, point=point: release_all(path, point, how)))
        releases = folder / "releases"
        made = releases.stat().st_size // 4 if releases.exists() else 0
        accountant = reopened(path)
        assert made <= len(accountant) <= made + BLOCK
        assert made <= accountant.marked("run") == len(accountant)
        accountant.close()
    assert point > 40
    assert ends == {0, -9 if how == "kill" else 9}


def test_what_was_charged_ahead_serves_nobody_after_a_crash(path, ahead):
    accountant = Accountant(ledger_path=path)
    run = Run(accountant)
    run.steps(3)
    accountant._journal.file.close()  # as a crash does
    again = reopened(path)
    assert (len(again), again.marked("run")) == (8, 8)
    run = Run(again)
    run.made = 3
    run.step()  # charged anew, whoever forgets to resume
    assert len(again) == 9
    assert_covers(path, again._journal.book)


def test_a_cut_within_what_is_ahead_is_refused(path, ahead):
    accountant = Accountant(ledger_path=path)
    Run(accountant).step()
    accountant._journal.file.close()
    content = path.read_bytes()
    mark = path.with_name(f"{path.name}.mark").read_bytes()
    for cut in range(len(content)):
        path.write_bytes(content[:cut])
        path.with_name(f"{path.name}.mark").write_bytes(mark)
        with pytest.raises(PrivacyError):
            reopened(path)


@forks
def test_a_full_disk_refuses_a_line_before_its_noise_and_keeps_what_was_paid(path):
    def fill() -> None:
        journal.steps_ahead = lambda line, step: 8
        accountant = Accountant(ledger_path=path)
        run = Run(accountant, planned=10**6)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
        for number in range(1000):
            try:
                run.step()
            except PrivacyError as error:
                (path.parent / "told").write_text(f"{number} {len(accountant)} {error}")
                os._exit(5)

    assert in_child(fill) == 5
    number, charged, message = (path.parent / "told").read_text().split(" ", 2)
    assert charged == number
    assert int(number) % 8 == 0
    assert "could not be written" in message
    assert len(reopened(path)) == int(number)


@pytest.mark.parametrize("harm", ["unlink", "append", "move", "mark"])
def test_a_file_that_changes_while_it_is_ahead_is_noticed_at_the_next_step(path, ahead, harm):
    accountant = Accountant(ledger_path=path)
    run = Run(accountant)
    run.steps(3)
    if harm == "unlink":
        path.unlink()
    elif harm == "move":
        path.rename(path.with_suffix(".moved"))
    elif harm == "mark":
        path.with_name(f"{path.name}.mark").unlink()
    else:
        path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(PrivacyError, match="was changed, moved or deleted"):
        run.step()
    assert len(accountant) == 3


@pytest.mark.parametrize("where", ["covers", "add"])
def test_a_step_that_is_interrupted_within_its_charge_is_paid_once_more_or_not_at_all(
    path, ahead, where, monkeypatch
):
    accountant = Accountant(ledger_path=path)
    run = Run(accountant)
    run.steps(3)

    def interrupt(*_args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(type(accountant.ledger), where, interrupt)
        with pytest.raises(KeyboardInterrupt):
            run.step()
    for _ in range(12):
        run.step()
        assert_covers(path, accountant._journal.book)
    assert len(accountant) == 15
    accountant.close()
    assert image(reopened(path)) == image(accountant)


# -- giving back ------------------------------------------------------------------------------------------------------


def test_a_run_that_stops_within_a_line_gives_the_rest_back_when_it_is_closed(path, ahead):
    accountant = Accountant(ledger_path=path)
    run = Run(accountant)
    run.steps(11)
    assert len(on_disk(path).ledger) == 16
    accountant.close()
    again = reopened(path)
    assert (len(again), again.marked("run")) == (11, 11)
    assert image(again) == image(accountant)
    with pytest.raises(PrivacyError, match="is closed or failed"):
        run.step()


def test_without_closing_nothing_is_given_back(path, ahead):
    accountant = Accountant(ledger_path=path)
    Run(accountant).steps(11)
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    assert len(reopened(copy)) == 16


@forks
def test_a_forked_copy_gives_nothing_back(path, ahead):
    accountant = Accountant(ledger_path=path)
    run = Run(accountant)
    run.steps(3)
    before = path.read_bytes()

    def child() -> None:
        with pytest.raises(PrivacyError, match="in the process that made it"):
            run.step()
        accountant.close()

    assert in_child(child) == 0
    assert path.read_bytes() == before
    run.steps(8)
    assert_covers(path, accountant._journal.book)


@pytest.mark.parametrize("end", ["close", "facts", "load"])
def test_a_crash_while_something_is_given_back_refuses_nothing(path, ahead, end, monkeypatch):
    """Whatever of the mark and the new state is on the disk, the file opens, and holds what was used."""
    accountant = Accountant(ledger_path=path)
    run = Run(accountant)
    run.steps(3)
    later = Accountant()
    later.load_state_dict(accountant.state_dict())
    later.authorize(STEP, 2)
    images = [(*both(path), False)]
    append, write = LedgerFile.append, HighWater.write

    def appended(file: LedgerFile, row: Any) -> None:
        append(file, row)
        images.append((*both(path), True))

    def written(mark: HighWater, place: Any, safe: bool) -> None:
        write(mark, place, safe)
        images.append((*both(path), False))

    monkeypatch.setattr(LedgerFile, "append", appended)
    monkeypatch.setattr(HighWater, "write", written)
    if end == "close":
        accountant.close()
    elif end == "facts":
        accountant._journal.book.config["fact"] = 1
        run.step()
        accountant._journal.file.close()
    else:
        accountant.load_state_dict(later.state_dict())
        accountant._journal.file.close()
    monkeypatch.undo()
    assert len(images) >= 3
    for ledger, mark, before_mark in images:
        for torn in (
            ledger,
            ledger + b'{"at": 3, "con',
            *([ledger[:-9]] if before_mark else ()),
        ):
            path.write_bytes(torn)
            path.with_name(f"{path.name}.mark").write_bytes(mark)
            again = reopened(path)
            assert len(again) >= 3
            assert again.marked("run") >= 3
            again.close()


def both(path: Path) -> tuple[bytes, bytes]:
    return path.read_bytes(), path.with_name(f"{path.name}.mark").read_bytes()


def test_a_disk_that_fails_while_something_is_given_back_keeps_it_charged(
    path, ahead, monkeypatch
):
    accountant = Accountant(ledger_path=path)
    Run(accountant).steps(3)

    def fail(*_args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(ledger_file, "_write", fail)
        with pytest.raises(PrivacyError, match="could not be written"):
            accountant.close()
    assert len(reopened(path)) == 8


# -- how many ---------------------------------------------------------------------------------------------------------


@given(
    line=st.floats(0.0, 10.0, allow_nan=False),
    step=st.floats(-1.0, 1e4) | st.just(-math.inf),
)
@settings(max_examples=300, deadline=None)
def test_lines_take_two_percent_of_the_time_and_a_crash_a_second(line, step):
    steps = journal.steps_ahead(line, step)
    assert steps >= 1
    assert steps & (steps - 1) == 0
    if step > 0:
        assert steps == 1 or steps * step <= 1.0
        assert steps * step * 2 > min(100 * line, 1.0) or steps == 1
    else:
        assert steps == 1


def test_the_first_line_of_a_process_pays_for_one_step(path):
    accountant = Accountant(ledger_path=path)
    Run(accountant).step()
    assert len(on_disk(path).ledger) == 1
