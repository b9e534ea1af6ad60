"""Optimizers of secret iterates: what they charge, release and save."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import pytest
import torch

import torch_dpsco as dp
from tests.algorithms.row_free_runs import (
    BUDGET,
    EPOCH,
    LOSS,
    N,
    Run,
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
    PrivacyError,
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
        with refused(run, SequenceError, r"all 3 planned steps are made: the answer is released"):
            call()
    run = make()
    loader = run.opt.loader(records())
    run.train(loader)
    with refused(run, SequenceError, "all 3 planned steps are made"):
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
    for sampling in ("shuffled", "fixed"):
        run = make(sampling=sampling)
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


# -- checkpoints ------------------------------------------------------------------------------------------------------


def saved(run: Run) -> Any:
    """Returns what a file gives back, read without trusting it."""
    file = io.BytesIO()
    torch.save((run.opt.state_dict(), run.model.state_dict()), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumed(run: Run, **changes: Any) -> Run:
    again = make(epochs=3, **changes)
    opt_state, model_state = saved(run)
    again.opt.load_state_dict(opt_state)
    again.model.load_state_dict(model_state)
    return again


@pytest.mark.parametrize("lrs", [0.1, [0.2 / (1 + k) for k in range(3 * EPOCH)]])
def test_a_run_resumed_between_epochs_ends_like_one_that_was_never_interrupted(lrs: Any) -> None:
    orders = [np.random.default_rng(k).permutation(N) for k in range(3)]
    whole = hold(make(epochs=3, lr=lrs))
    whole.train(ordered(whole, orders))
    parted = make(epochs=3, lr=lrs)
    parted.train(ordered(parted, orders), steps=EPOCH)
    for done in (1, 2):
        parted = hold(resumed(parted, lr=lrs))
        parted.train(ordered(parted, orders[done:]), steps=EPOCH)
    assert parted.opt.steps == whole.opt.steps == 3 * EPOCH
    assert torch.equal(parted.model.weight, whole.model.weight)
    assert torch.equal(parted.averages()[0], whole.averages()[0])
    release(parted)
    assert len(parted.opt.accountant) == 1


def test_a_checkpoint_has_one_answer_for_all_accountants_of_a_process() -> None:
    started = make(epochs=3).train(steps=EPOCH)
    first, second = resumed(started).train(), resumed(started)
    with pytest.raises(
        SequenceError, match="released by another optimizer from the same checkpoint"
    ):
        second.train()
    with refused(second, SequenceError, "released by another optimizer from the same checkpoint"):
        second.opt.finalize()
    assert (len(first.opt.accountant), len(second.opt.accountant)) == (1, 0)
    with pytest.raises(SequenceError, match="released by another optimizer"):
        started.train()
    accountant = dp.Accountant(
        dp.Budget(4.0, 1e-3, "replace_one")
    )  # of all that have to do with one run: each answer is charged
    started = make(epochs=3, accountant=accountant).train(steps=EPOCH)
    for again in [resumed(started, accountant=accountant) for _ in range(2)]:
        again.train()
    assert len(accountant) == 2
    new = make(epochs=3)
    for again in (resumed(new), resumed(new)):  # nothing was drawn that they could share
        again.train()


def test_a_run_with_independent_batches_cannot_be_resumed() -> None:
    for steps in (1, EPOCH, 3 * EPOCH):
        state, _ = saved(hold(make(epochs=3, sampling="fixed")).train(steps=steps))
        again = make(epochs=3, sampling="fixed")
        with refused(
            again,
            SequenceError,
            "independent batches must be made in one go.*use sampling='shuffled'",
        ):
            again.opt.load_state_dict(state)
    resumed(make(epochs=3, sampling="fixed"), sampling="fixed").train()  # nothing was drawn yet
    run = make(epochs=3, sampling="fixed").train()
    assert resumed(run, sampling="fixed").opt.finalized


def test_a_checkpoint_within_an_epoch_cannot_be_resumed() -> None:
    run = resumed(make(epochs=3).train(steps=EPOCH + 1))
    with refused(
        run, SequenceError, "must use batch 1 of a permutation .*save checkpoints between epochs"
    ):
        run.train()


def test_a_checkpoint_is_marked_confidential_until_the_release() -> None:
    run = make()
    assert run.opt.state_dict()["dpsco"]["confidential"] is True
    hold(run).train()
    assert run.opt.state_dict()["dpsco"]["confidential"] is True
    release(run)
    state = run.opt.state_dict()
    assert state["dpsco"]["confidential"] is False
    assert not state["state"]  # no average without noise


def test_a_checkpoint_holds_no_noise() -> None:
    run = make()
    text = repr(run.opt.state_dict())
    assert "generator" not in text
    assert "Keystream" not in text


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"lr": 0.2}, "lrs"),
        ({"epochs": 2}, "steps"),
        ({"batch_size": 4}, "design"),
        ({"budget": dp.Budget(2.0, 1e-3, "replace_one")}, "noise_std"),
        ({"sampling": "fixed"}, "event"),
        ({"problem": LOSS.problem(bound_x=1.0, radius=0.5)}, "prox"),
        ({"problem": LOSS.problem(bound_x=0.5, radius=1.0)}, "bounds"),
        ({"budget": dp.Budget(1.0, 1e-3, "zero_out")}, "adjacency"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_checkpoint_of_another_plan_is_refused_by_name(
    changes: dict[str, Any], named: str
) -> None:
    state = make().opt.state_dict()
    other = make(**changes)
    with refused(other, ValueError, rf"of the same plan.*\b{named}: "):
        other.opt.load_state_dict(state)


def test_a_foreign_state_is_refused() -> None:
    run = make()
    with refused(run, ValueError, "must be a private optimizer's"):
        run.opt.load_state_dict(torch.optim.SGD(run.model.parameters(), 0.1).state_dict())


def test_a_finalized_checkpoint_stays_finalized() -> None:
    run = make(epochs=3).train()
    again = resumed(run)
    assert torch.equal(again.model.weight, run.model.weight)
    assert (again.opt.finalized, len(again.opt.accountant)) == (True, 1)
    again.opt.finalize()
    assert torch.equal(again.model.weight, run.model.weight)


def test_a_checkpoint_never_forgets_what_was_charged_since() -> None:
    accountant = dp.Accountant(dp.Budget(4.0, 1e-3, "replace_one"))
    run = make(epochs=3, accountant=accountant).train(steps=EPOCH)
    accountant.authorize(run.opt.event)
    state, _ = saved(run)
    make(accountant=accountant).train().opt.finalize()
    assert len(accountant) == 2
    again = make(epochs=3, accountant=accountant)
    again.opt.load_state_dict(state)
    assert len(accountant) == 2  # the later state of one history wins
    stranger = make(epochs=3, accountant=dp.Accountant(dp.Budget(4.0, 1e-3, "replace_one")))
    stranger.opt.accountant.authorize(run.opt.event)
    with refused(stranger, PrivacyError, "histor"):
        stranger.opt.load_state_dict(state)
