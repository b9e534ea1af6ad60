"""The contract of every private optimizer, continued: what an interrupt leaves behind, before and after the charge."""

from __future__ import annotations

import pytest

import torch_dpsco as dp
from tests.contract.registry import ROWS
from tests.contract.runs import STEPS, Row, assert_unchanged, snapshot
from torch_dpsco.errors import SequenceError, UtilityWarning

# Adam warns about utility.
pytestmark = pytest.mark.filterwarnings("ignore::torch_dpsco.errors.UtilityWarning")


@pytest.fixture(params=ROWS, ids=lambda row: row.name)
def row(request: pytest.FixtureRequest) -> Row:
    return request.param


def interrupt(*args: object, **kwargs: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.cases(1, 1)
def test_an_interrupt_before_the_charge_spends_nothing(
    row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = row.make()
    loader = run.loader()
    for batch in loader:
        before = snapshot(run)
        run.backward(batch)
        with monkeypatch.context() as patch:
            patch.setattr(dp.Accountant, "authorize", interrupt)
            with pytest.raises(KeyboardInterrupt):
                run.opt.step()
        break
    assert_unchanged(run, before)
    for batch in run.going_on() if run.opt.design.one_pass else loader:
        run.backward(batch)
        run.opt.step()
    assert run.opt.steps == STEPS


@pytest.mark.cases(5, 2)
def test_a_step_that_fails_after_its_charge_is_lost_and_the_run_goes_on(
    row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = row.make()
    loader = run.loader(steps=2)
    for batch in loader:
        before = run.parameters()
        run.backward(batch)
        with monkeypatch.context() as patch:
            patch.setattr(type(run.opt.oracle), "release", interrupt)
            lost = pytest.warns(UtilityWarning, match="^step 1 was charged and did not end")
            with lost, pytest.raises(KeyboardInterrupt):
                run.opt.step()
        break
    assert_unchanged(run, (before, run.ledger(), 1))
    assert len(run.opt.accountant) == run.charged(1)
    assert run.opt.outstanding_rows is None  # the draw is used up: no step makes it again
    for batch in run.going_on(1) if run.opt.design.one_pass else loader:
        run.backward(batch)
        run.opt.step()
        break
    assert (len(run.opt.accountant), run.opt.steps) == (run.charged(2), 2)
    assert run.opt.accountant.marked(run.opt.run) == 2


def test_a_lost_last_step_leaves_a_run_to_finalize(monkeypatch: pytest.MonkeyPatch) -> None:
    row = next(row for row in ROWS if row.name == "clipped-full")
    run = row.make()
    for batch in run.loader(steps=STEPS):
        run.backward(batch)
        if run.opt.steps < STEPS - 1:
            run.opt.step()
            continue
        with monkeypatch.context() as patch:
            patch.setattr(type(run.opt.oracle), "release", interrupt)
            with (
                pytest.warns(UtilityWarning, match="did not end"),
                pytest.raises(KeyboardInterrupt),
            ):
                run.opt.step()
    assert (run.opt.steps, run.opt.finalized) == (STEPS, False)
    with pytest.raises(SequenceError, match="call finalize"):
        run.opt.step()
    run.opt.finalize()
    assert len(run.opt.accountant) == run.charged(STEPS)
