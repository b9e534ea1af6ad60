"""The contract of every private optimizer, continued: Ctrl-C at every line of a step, then the same script goes on."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import torch_dpsco
from tests.contract.registry import ROWS
from tests.contract.runs import STEPS, Row, Run
from torch_dpsco.accounting.ledger import LOCK
from torch_dpsco.errors import SequenceError, UtilityWarning

PACKAGE = str(Path(torch_dpsco.__file__).parent)
LOST = "was charged and did not end: it is lost"


class Interrupts:
    """Raises at one line of the package, the `at`-th that is traced; counts lines where there are fewer."""

    def __init__(self, at: int) -> None:
        self.left = at
        self.lines = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            self.lines += 1
            if self.lines > self.left:
                raise KeyboardInterrupt  # which ends the trace
        return self

    def around(self, call: Any) -> bool:
        """Calls; returns whether it was interrupted."""
        sys.settrace(self)
        try:
            call()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
            # a trace raises where no signal does: between the last line of a block and the end of its `with`
            torch.set_grad_enabled(True)
            while LOCK._is_owned():
                LOCK.release()
        return False


def released(run: Run) -> list[int]:
    """Returns a list of the steps whose release has begun, which is kept."""
    made: list[int] = []
    real = run.opt.oracle.release

    def release(*args: Any) -> Any:
        made.append(run.opt.steps)
        return real(*args)

    run.opt.oracle.__dict__["release"] = release
    return made


class Script:
    """The loop of a user, which begins again in the same process with the same data."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.loader: Any = None

    def __iter__(self) -> Iterator[Any]:
        """Yields what is left of the run."""
        opt = self.run.opt
        opt.discard()
        while opt.steps < STEPS:
            if opt.design.one_pass:
                self.loader = self.run.going_on()
            self.loader = self.loader or self.run.loader()
            yield from self.loader


def interrupted(row: Row, at: int, step: int, path: Path | None = None) -> int:
    """Makes a run that is interrupted at a line of a step; returns the lines of the step if it has no such line."""
    run = row.make(accountant=row.accountant(ledger_path=path) if path else None)
    made = released(run)
    interrupt = Interrupts(at)
    done = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UtilityWarning)
        script = Script(run)
        for batch in script:
            run.opt.zero_grad()
            run.backward(batch)
            if run.opt.steps != step or done:
                run.opt.step()
                continue
            done.append(interrupt.around(run.opt.step))
            check_ledger(run, made)
            break
        for batch in script:
            run.opt.zero_grad()
            run.backward(batch)
            run.opt.step()
        run.opt.finalize()
    check_ledger(run, made)
    lost = sum(LOST in str(warning.message) for warning in told)
    assert run.opt.finalized
    assert run.opt.steps == STEPS
    # a budget of exactly the run suffices: nothing was charged twice
    assert run.opt.accountant.marked(run.opt.run) == STEPS
    assert len(run.opt.accountant) == run.charged(STEPS), (at, step)
    # a release that has begun and was not counted is lost in words
    assert len(made) + lost >= STEPS, (at, step)
    assert lost <= 1
    if path is not None:
        run.opt.accountant.close()
        again = row.accountant(ledger_path=path, must_exist=True)
        assert again.marked(run.opt.run) == STEPS
        assert again.ledger.digest() == run.ledger()
        again.close()
    return 0 if done[0] else interrupt.lines


def check_ledger(run: Run, made: list[int]) -> None:
    """The ledger is never below the truth, and nothing is released twice."""
    marked = run.opt.accountant.marked(run.opt.run)
    assert len(set(made)) == len(made)
    assert not made or marked > max(made)
    assert len(run.opt.accountant) >= (run.charged(marked) if made else 0)


# Adam warns about utility
@pytest.mark.cases(5, 10)
@pytest.mark.filterwarnings("ignore::torch_dpsco.errors.UtilityWarning")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_ctrl_c_at_some_lines_of_a_step(row: Row) -> None:
    """Each 17th line, from one that differs between optimizers."""
    for at in range(ROWS.index(row) % 17, 10_000, 17):
        if interrupted(row, at, step=1):
            break
    assert at > 100


@pytest.mark.cases(1, 2)
@pytest.mark.filterwarnings("ignore::torch_dpsco.errors.UtilityWarning")
@pytest.mark.parametrize("stride", [29, 13, 5, 1])
@pytest.mark.parametrize("name", ["clipped-sgd-poisson", "holder-allocated", "user-filtered"])
def test_ctrl_c_at_lines_of_a_step_with_a_ledger_file(
    name: str, stride: int, tmp_path: Path
) -> None:
    """Also while a line or the mark is written: afterwards the file is opened again, and holds the run."""
    row = next(row for row in ROWS if row.name == name)
    for at in range(stride // 2, 10_000, stride):
        if interrupted(row, at, 1, tmp_path / str(at)):
            break
    assert at > 200


@pytest.mark.weekly
@pytest.mark.filterwarnings("ignore::torch_dpsco.errors.UtilityWarning")
@pytest.mark.parametrize("step", [0, 1, STEPS - 1])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_ctrl_c_at_every_line_of_a_step(row: Row, step: int) -> None:
    for at in range(10_000):
        if interrupted(row, at, step):
            break
    assert at > 100


class Half:
    """A query that is interrupted while its precision is read."""

    shape = torch.Size([2])
    device = torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """Raises KeyboardInterrupt."""
        raise KeyboardInterrupt


@pytest.mark.filterwarnings("ignore::torch_dpsco.errors.UtilityWarning")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_an_oracle_whose_first_batch_was_interrupted_as_it_was_opened_forgets_it(
    row: Row,
) -> None:
    run = row.make()
    with suppress(AttributeError, TypeError, KeyboardInterrupt):  # a half query lacks much
        run.opt.oracle.open([Half()])
    run.opt.oracle.discard()
    for batch in run.loader():
        run.opt.zero_grad()
        run.backward(batch)
        run.opt.step()
        break
    assert run.opt.steps == 1


def test_a_step_that_is_not_counted_as_lost_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the rule a step that was charged is charged again."""
    row = next(row for row in ROWS if row.name == "clipped-sgd-poisson")

    def abort(optimizer: Any, *, halted: bool = False) -> None:
        optimizer._clear()
        optimizer._batch.drop()

    monkeypatch.setattr(torch_dpsco.PrivateOptimizer, "_give_up", abort)
    found = []
    for at in range(0, 10_000, 5):
        try:
            if interrupted(row, at, step=1):
                break
        except (AssertionError, SequenceError) as error:
            found.append(error)
    assert found
