"""The contract of every private optimizer, continued: what an interrupt leaves behind, before and after the charge."""

from __future__ import annotations

import pytest

import torch_dpsco as dp
from tests.contract.registry import ROWS
from tests.contract.runs import STEPS, Row, assert_unchanged, same, snapshot
from torch_dpsco.errors import SequenceError

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
def test_an_interrupt_after_the_charge_has_spent_it_and_moves_nothing(
    row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = row.make()
    loader = run.loader(steps=2)
    for batch in loader:
        before = run.parameters()
        run.backward(batch)
        with monkeypatch.context() as patch:
            patch.setattr(type(run.opt.oracle), "release", interrupt)
            with pytest.raises(KeyboardInterrupt):
                run.opt.step()
        break
    assert (len(run.opt.accountant), run.opt.steps) == (run.charged(1), 0)
    assert_unchanged(run, (before, run.ledger(), 0))
    for batch in run.going_on(2) if run.opt.design.one_pass else loader:
        run.backward(batch)
        if "shared" in row.lacks:  # the answer that was lost had a secret in common with later ones
            with pytest.raises(SequenceError, match="resume the run from its last checkpoint"):
                run.opt.step()
            assert same(run.parameters(), before)
            break
        run.opt.step()
    else:
        assert (len(run.opt.accountant), run.opt.steps) == (run.charged(3), 2)
