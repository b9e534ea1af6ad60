"""Optimizers of secret iterates: what they charge, release and save."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import torch_dpsco as dp
from tests.algorithms.row_free_runs import (
    BUDGET,
    EPOCH,
    N,
    hold,
    make,
    ordered,
    records,
    refused,
    release,
)
from tests.streams import count_noise
from torch_dpsco.accounting.events import Gaussian
from torch_dpsco.errors import (
    AdjacencyError,
    BudgetExceeded,
    ConditionError,
    SequenceError,
    UnitError,
    UtilityWarning,
)

# -- the release ------------------------------------------------------------------------------------------------------


def test_nothing_is_released_before_all_planned_steps_are_made() -> None:
    run = make()
    for done in range(EPOCH):
        with refused(
            run,
            SequenceError,
            rf"{EPOCH - done} of {EPOCH} planned steps are missing: nothing is",
        ):
            run.opt.finalize()
        with (
            refused(run, SequenceError, r"nothing is released before finalize\(\)"),
            run.opt.released(),
        ):
            raise AssertionError("released() showed secret iterates")
        if not done:
            batches = iter(run.opt.loader(records()))
        run.backward(next(batches))
        run.opt.step()
    assert run.opt.finalized
    with pytest.raises(SequenceError, match="planned steps are missing"), make().opt:
        pass
    assert run.opt.metrics == {"step": EPOCH, "noise_std": run.opt.noise_std}


def test_more_steps_than_planned_are_refused() -> None:
    run = make().train()
    for call in (run.opt.step, lambda: run.opt.loader(records())):
        with refused(
            run, SequenceError, r"all 3 planned steps are made: the answer is released"
        ):
            call()
    run = make()
    loader = run.opt.loader(records())
    run.train(loader)
    with pytest.warns(UtilityWarning, match="all planned steps are made: this loop has no"):
        run.train(loader)


def test_nothing_follows_the_release() -> None:
    run = make().train()
    answer = run.model.weight.detach().clone()
    before = run.snapshot()
    run.opt.finalize()
    assert run.snapshot() == before
    for call in (run.opt.step, lambda: run.opt.loader(records())):
        with refused(run, SequenceError, "the answer is released; make a new optimizer"):
            call()
    with run.opt.released():
        assert torch.equal(run.model.weight, answer)
    assert not run.opt.state
    assert not run.model.weight._post_accumulate_grad_hooks
    with run.opt:
        pass  # leaving again releases nothing
    assert len(run.opt.accountant) == 1


def test_leaving_the_block_releases_the_answer_unless_it_is_left_by_an_exception() -> None:
    run = make()
    with run.opt as opt:
        hold(run).train()
        assert not opt.finalized
        del opt.finalize
    assert opt.finalized
    assert len(opt.accountant) == 1
    run = make()
    with refused(run, KeyError, "mine"), run.opt:
        raise KeyError("mine")
    run.train(steps=2)
    with refused(run, KeyError, "mine"), run.opt:
        raise KeyError("mine")
    assert not run.opt.finalized


def test_the_release_is_charged_before_its_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    run = hold(make()).train()
    noise, secret = count_noise(run.opt), run.model.weight.detach().clone()
    authorize, seen = run.opt.accountant.authorize, []

    def watched(event: Any, **details: Any) -> None:
        assert not noise.drawn
        assert torch.equal(run.model.weight, secret)
        seen.append(event)
        authorize(event, **details)

    monkeypatch.setattr(run.opt.accountant, "authorize", watched)
    release(run)
    assert noise.drawn
    assert (
        seen
        == [run.opt.event]
        == [event for _, _, event, _ in run.opt.accountant.ledger.entries()]
    )
    crashed = hold(make()).train()
    monkeypatch.setattr(type(crashed.opt.prox), "apply_", lambda *_: math.log(-1.0))
    secret = crashed.model.weight.detach().clone()
    with pytest.raises(ValueError, match=r"math domain error|expected a"):
        release(crashed)
    assert len(crashed.opt.accountant) == 1  # a crash over-counts
    assert torch.equal(crashed.model.weight, secret)


def test_a_release_that_the_budget_does_not_admit_any_more_is_refused() -> None:
    accountant = dp.Accountant(BUDGET)
    first, second = (hold(make(accountant=accountant)).train() for _ in range(2))
    release(first)
    noise = count_noise(second.opt)
    for _ in range(2):
        with refused(second, BudgetExceeded, "epsilon"):
            release(second)
    assert not noise.drawn
    with pytest.raises(BudgetExceeded, match="epsilon"), second.opt:
        pass
    accountant.budget = dp.Budget(2.0, 1e-3, "replace_one")
    second.opt.finalize()
    assert second.opt.finalized
    assert len(accountant) == 2


def test_runs_that_share_an_accountant_add_up_as_one_gaussian() -> None:
    accountant = dp.Accountant(dp.Budget(3.0, 1e-3, "replace_one"))
    runs = [hold(make(accountant=accountant, epochs=epochs)).train() for epochs in (1, 2)]
    assert len(accountant) == 0  # nothing is charged before a release
    for run in runs:
        release(run)
    assert len(accountant) == 2
    for run in runs:
        assert isinstance(run.opt.event, Gaussian)
    mu = math.sqrt(
        sum((dict(run.opt.event.sens)["replace_one"] / run.opt.noise_std) ** 2 for run in runs)
    )
    assert accountant.get_mu() == pytest.approx(mu, rel=1e-9)
    assert 1.0 < runs[0].opt.report().epsilon == runs[1].opt.report().epsilon < 2.0


def test_the_release_spends_the_whole_budget_and_no_more() -> None:
    run = make()
    with run.opt:
        run.train()
    assert 0.999 < run.opt.report().epsilon <= 1.0
    assert len(run.opt.accountant) == 1


@pytest.mark.parametrize(
    ("accountant", "error"),
    [
        (dp.Accountant(dp.Budget(1.0, 1e-3, "add_remove")), AdjacencyError),
        (dp.Accountant(dp.Budget(1.0, 1e-3, "zero_out")), AdjacencyError),
        (dp.Accountant(adjacency="add_remove"), AdjacencyError),
        (dp.Accountant(dp.Budget(1.0, 1e-3, "replace_one", unit="user")), UnitError),
    ],
    ids=["add_remove", "zero_out", "no budget", "user"],
)
def test_an_accountant_of_another_adjacency_or_unit_is_refused(
    accountant: dp.Accountant, error: Any
) -> None:
    with pytest.raises(error, match=r"adjacency|unit"):
        make(accountant=accountant)
    assert not len(accountant)


def test_the_noise_is_fresh_unless_a_generator_is_given_which_warns() -> None:
    answers = []
    for _ in range(2):
        run = make()
        run.train(ordered(run, [np.arange(N)]))
        run.opt.finalize()
        answers.append(run.model.weight.detach())
        assert not run.opt.seeded
    assert not torch.equal(*answers)
    with pytest.warns(UtilityWarning, match="repeatable"):
        assert make(generator=torch.Generator().manual_seed(1)).opt.seeded


def test_one_planned_step_is_refused_for_it_would_release_the_start() -> None:
    with pytest.raises(ConditionError, match="steps must be >= 2"):
        make(batch_size=N)


def test_a_distributed_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("is_available", True), ("is_initialized", True), ("get_world_size", 2)):
        monkeypatch.setattr(torch.distributed, name, lambda *_, value=value: value)
    with pytest.raises(SequenceError, match="world_size must be 1"):
        make()
