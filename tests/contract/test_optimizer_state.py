"""The contract of every private optimizer, continued: checkpoints, copies, and the habits of PyTorch users."""

from __future__ import annotations

import copy
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.contract.registry import ROWS, having
from tests.contract.runs import DIM, STEPS, Row, Run, Settings, assert_no_batches, same, zeros
from tests.streams import seeded
from torch_dpsco.accounting import journal
from torch_dpsco.errors import PrivacyError, SequenceError
from torch_dpsco.noise import SecretState

# Seeds, momentum and Adam warn about utility in every test here.
pytestmark = pytest.mark.filterwarnings("ignore::torch_dpsco.errors.UtilityWarning")


@pytest.fixture(params=ROWS, ids=lambda row: row.name)
def row(request: pytest.FixtureRequest) -> Row:
    return request.param


def tensors(tree: Any) -> list[torch.Tensor]:
    """Returns the tensors of a nested state, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    children = (
        tree.values()
        if isinstance(tree, dict)
        else tree
        if isinstance(tree, (list, tuple))
        else []
    )
    return [leaf for child in children for leaf in tensors(child)]


def reloaded(run: Run, row: Row, file: Path, **changes: Any) -> Run:
    """Returns what a fresh process makes of a checkpoint."""
    torch.save({"model": run.model.state_dict(), "optimizer": run.opt.state_dict()}, file)
    state = torch.load(file, weights_only=True)
    ledger = run.opt.accountant.ledger_path
    if ledger is not None:  # as it would be found after a crash
        changes["accountant"] = row.accountant(
            ledger_path=shutil.copy(ledger, file.with_suffix(".ledger"))
        )
    fresh = row.make(**changes)
    fresh.model.load_state_dict(state["model"])
    (fresh.opt.load_state_dict if ledger is None else fresh.opt.resume)(state["optimizer"])
    return fresh


@pytest.fixture(autouse=True)
def one_step_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step is charged ahead, which a run that is taken up has lost."""
    monkeypatch.setattr(journal, "steps_ahead", lambda line, step: 1)


def lasting(row: Row, path: Path, **changes: Any) -> Run:
    """Returns a run that can go on from a checkpoint: with a ledger file, where it takes one."""
    if "shared" in row.lacks:
        changes["accountant"] = row.accountant(ledger_path=path / "ledger")
    return row.make(**changes)


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_saved_run_goes_on_as_if_it_had_not_been_interrupted(
    row: Row, dtype: torch.dtype, tmp_path: Path
) -> None:
    run = lasting(row, tmp_path, model=row.model(dtype)).train(2)
    other = reloaded(run, row, tmp_path / "run.pt", model=row.model(dtype))
    for each in (run, other):
        each.train(1, seed=7, noise_seed=9)
    assert same(run.parameters(), other.parameters())
    assert same(run.answer(), other.answer())
    saved, again = run.opt.state_dict(), other.opt.state_dict()
    assert same(tensors(saved), tensors(again))
    assert (run.opt.steps, run.ledger()) == (other.opt.steps, other.ledger())
    assert len(other.opt.accountant) == other.charged(3)
    other.train(1, seed=8)
    assert_no_batches(other)


@pytest.mark.cases(2, 1)
@having("shared")
def test_a_loader_made_before_loading_a_checkpoint_still_serves_unless_it_is_of_another_pass(
    row: Row,
) -> None:
    state = row.make().train(2).opt.state_dict()
    run = row.make()
    loader = run.loader(steps=2)
    run.opt.load_state_dict(state)
    if run.opt.design.one_pass:
        with pytest.raises(SequenceError, match="goes on with its own pass"):
            next(iter(loader))
        loader = run.opt.loader(loader.dataset, resume=True)
    for batch in loader:
        run.backward(batch)
        run.opt.step()
    assert run.opt.steps == STEPS


@pytest.mark.cases(5, 2)
@having("shared")
def test_loading_drops_the_batch_in_progress(row: Row) -> None:
    run = row.make().train(1)
    state = run.opt.state_dict()
    for batch in run.loader(steps=1, physical=2):
        run.backward(batch)
        run.opt.accumulate()
        run.opt.load_state_dict(state)
        break
    with pytest.raises(SequenceError):
        run.opt.step()
    assert (run.opt.steps, len(run.opt.accountant)) == (1, run.charged(1))


@pytest.mark.cases(3, 1)
@having("numbers")
@pytest.mark.parametrize(
    "changes", [{"noise": 0.5}, {"scale": 1.5}, {"steps": 8, "batch": 3}, {"batch": 4}], ids=str
)
def test_a_state_of_another_plan_is_refused(row: Row, changes: dict[str, float]) -> None:
    if row.make(**changes).opt.settings() == row.make().opt.settings():
        assert (
            "batch" if changes == {"batch": 4} else "clip"
        ) in row.lacks  # that of the data, or of a pilot
        return
    state = row.make().train(2).opt.state_dict()
    other = row.make(**changes)
    before = other.parameters()
    with pytest.raises(ValueError, match=r"same plan \(got another one: .* here, .* there"):
        other.opt.load_state_dict(state)
    assert (len(other.opt.accountant), other.opt.steps) == (0, 0)
    assert same(other.parameters(), before)


@pytest.mark.cases(1, 1)
def test_a_state_of_a_torch_optimizer_or_with_a_forged_ledger_is_refused(row: Row) -> None:
    run = row.make()
    with pytest.raises(ValueError, match="a private optimizer's, version 3"):
        run.opt.load_state_dict(torch.optim.SGD(zeros().parameters(), lr=0.1).state_dict())
    state = copy.deepcopy(row.make().train(2).opt.state_dict())
    state["dpsco"]["ledger"]["ledger"] = []
    with pytest.raises(ValueError, match="digest must match the ledger"):
        run.opt.load_state_dict(state)
    assert run.opt.steps == 0


@pytest.mark.cases(4, 2)
@having("shared")
def test_going_back_to_a_checkpoint_does_not_undo_charges(row: Row) -> None:
    run = row.make().train(1)
    state = run.opt.state_dict()
    run.train(1, seed=2)
    before = run.ledger()
    run.opt.load_state_dict(state)
    assert (run.ledger(), run.opt.steps, len(run.opt.accountant)) == (before, 1, run.charged(2))


@pytest.mark.cases(2, 1)
@having("shared")
def test_a_checkpoint_of_another_history_is_not_taken_for_charges_made_here(row: Row) -> None:
    state = row.make().train(2).opt.state_dict()  # two releases of an earlier process
    shared = row.accountant()
    row.make(accountant=shared).train(2)  # two more of the same kind, on one accountant for all
    before = shared.ledger.digest()
    resumed = row.make(accountant=shared)
    with pytest.raises(PrivacyError, match="histor"):
        resumed.opt.load_state_dict(state)
    assert (shared.ledger.digest(), len(shared), resumed.opt.steps) == (
        before,
        resumed.charged(2),
        0,
    )


@pytest.mark.cases(2, 1)
@having("shared")
def test_two_continuations_of_one_checkpoint_are_two_histories(row: Row, tmp_path: Path) -> None:
    run = row.make().train(1)
    first, second = (reloaded(run, row, tmp_path / "run.pt") for _ in range(2))
    for each in (first, second):
        each.train(1, seed=2)
    with pytest.raises(PrivacyError, match="histor"):  # three releases, of which each knows two
        first.opt.load_state_dict(second.opt.state_dict())
    assert len(first.opt.accountant) == first.charged(2)


@pytest.mark.cases(1, 1)
def test_a_finalized_run_is_finalized_after_loading(row: Row, tmp_path: Path) -> None:
    run = row.make().train(2)
    run.opt.finalize()
    other = reloaded(run, row, tmp_path / "run.pt")
    assert other.opt.finalized
    assert same(run.parameters(), other.parameters())
    with pytest.raises(SequenceError, match="finalized"):
        other.train(1)


@pytest.mark.cases(3, 1)
def test_a_checkpoint_holds_no_noise_stream(row: Row) -> None:
    state = row.make().train(2).opt.state_dict()
    state["dpsco"].pop("partition", None)  # who is in which part of a one-pass design
    assert not [leaf for leaf in tensors(state) if leaf.dtype == torch.uint8]
    assert max(leaf.numel() for leaf in [torch.zeros(1), *tensors(state)]) <= DIM


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize(
    "row", [row for row in ROWS if "shared" in row.lacks], ids=lambda row: row.name
)
def test_a_run_with_a_secret_in_its_releases_goes_on_in_one_place(row: Row) -> None:
    run = row.make().train(2)
    state, before = run.opt.state_dict(), (run.parameters(), run.ledger())
    other = row.make()
    for act in (
        lambda: other.opt.load_state_dict(state),
        lambda: run.opt.load_state_dict(state),
        run.copy,
    ):
        with pytest.raises(SequenceError, match="charged as a whole must"):
            act()
    assert isinstance(state, SecretState)
    assert (len(other.opt.accountant), other.opt.steps) == (0, 0)
    assert same(run.parameters(), before[0])
    assert run.ledger() == before[1]
    run.train(2, seed=2)


# -- copies -----------------------------------------------------------------------------------------------------------


@pytest.mark.cases(2, 1)
@having("shared", "private")
@pytest.mark.parametrize("scheduled", [False, True])
def test_copies_draw_fresh_noise_and_share_the_ledger(row: Row, scheduled: bool) -> None:
    run = row.make().train(1)
    if scheduled:  # a scheduler replaces the optimizer's step by a wrapper
        torch.optim.lr_scheduler.StepLR(run.opt, step_size=10)
        run.train(1, seed=2)
    clone = run.copy()
    assert clone.opt.accountant is run.opt.accountant
    assert same(run.parameters() + run.answer(), clone.parameters() + clone.answer())
    made = run.opt.steps
    for each in (run, clone):
        each.train(1, seed=3, noise_seed=None)
    assert run.opt.steps == clone.opt.steps == made + 1
    assert len(run.opt.accountant) == run.charged(made + 2)
    # the private means: at the end of a phase the parameters do not show the last noise
    assert not same(*([p.grad for p in each.model.parameters()] for each in (run, clone)))


@pytest.mark.cases(2, 1)
@having("shared", "moving", "private")
def test_a_copy_of_a_seeded_optimizer_does_not_repeat_its_noise(row: Row) -> None:
    run = row.make(generator=torch.Generator().manual_seed(3))
    clone = run.copy()
    for each in (run, clone):
        each.train(1, noise_seed=None)
    assert not same(run.parameters(), clone.parameters())


@pytest.mark.cases(2, 1)
def test_a_seeded_generator_repeats_the_noise(row: Row) -> None:
    first, second = (
        row.make(generator=torch.Generator().manual_seed(3)).train(noise_seed=None)
        for _ in range(2)
    )
    assert same(first.parameters(), second.parameters())


@pytest.mark.cases(18, 9)
def test_pickling_is_refused_because_a_copy_elsewhere_would_spend_unseen(row: Row) -> None:
    with pytest.raises(PrivacyError, match=r"must not be (pickled|copied)"):
        pickle.dumps(row.make().opt)


# -- ordinary PyTorch -------------------------------------------------------------------------------------------------


@pytest.mark.cases(7, 3)
@having("rates", "moving")
def test_groups_move_by_their_own_rates(row: Row) -> None:
    model = row.model()
    groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 1e-6}]
    opt = row.build(groups, Settings())
    if "plain" in row.lacks:
        opt.param_groups[0]["lr"], opt.param_groups[1]["lr"] = 0.1, 1e-6
    run = Run(model, opt, row).train(1)
    for p, lr in ((model.weight, 0.1), (model.bias, 1e-6)):
        # momentum and Adam start with steps of lr |mean| and lr; a projection shortens both groups
        assert (
            0 < float(p.detach().abs().max()) <= lr * max(1.0, float(p.grad.abs().max())) * 1.001
        )
        if "plain" not in row.lacks:
            torch.testing.assert_close(p.detach(), -lr * p.grad)
    assert run.opt.steps == 1


@pytest.mark.cases(5, 2)
@having("rates", "moving")
@pytest.mark.parametrize("resumed", [False, True])
def test_a_torch_scheduler_sets_the_rate_of_the_steps(row: Row, resumed: bool) -> None:
    run = row.make()
    if resumed:
        run.opt.load_state_dict(row.make().opt.state_dict())
    scheduler = torch.optim.lr_scheduler.StepLR(run.opt, step_size=1, gamma=0.0)
    moved = []
    for batch in run.loader(steps=2):
        before = run.parameters()
        run.backward(batch)
        run.opt.step()
        scheduler.step()
        moved.append(not same(before, run.parameters()))
    assert moved == [True, False]
    assert run.opt.steps == 2


@pytest.mark.cases(5, 2)
def test_a_closure_is_evaluated_once_and_its_loss_returned(row: Row) -> None:
    run, losses = row.make(), []
    for batch in run.loader():

        def closure(batch: list[torch.Tensor] = batch) -> torch.Tensor:
            run.opt.zero_grad()
            losses.append(run.backward(batch))
            return losses[-1]

        assert run.opt.step(closure) is losses[-1]
    assert len(losses) == run.opt.steps == STEPS
    assert all(loss.requires_grad for loss in losses)


@pytest.mark.cases(6, 3)
def test_a_closure_that_fails_spends_nothing(row: Row) -> None:
    run = row.make()

    def closure() -> float:
        raise KeyError("closure")

    for batch in run.loader(steps=1):
        with pytest.raises(KeyError):
            run.opt.step(closure)
        assert len(run.opt.accountant) == 0
        run.backward(batch)
        run.opt.step()
    assert run.opt.steps == 1


@pytest.mark.cases(2, 1)
def test_a_forgotten_zero_grad_changes_nothing(row: Row) -> None:
    careful, forgetful = row.make().train(), row.make()
    forgetful.opt._noise = seeded(5)
    for batch in forgetful.loader():
        forgetful.backward(batch)
        forgetful.opt.step()
    assert same(careful.parameters(), forgetful.parameters())


@pytest.mark.cases(4, 2)
@pytest.mark.parametrize("grouped", [False, True])
def test_frozen_parameters_stay_as_they_are(row: Row, grouped: bool) -> None:
    model = nn.Sequential(nn.Linear(DIM, DIM), zeros())
    model[0].requires_grad_(False)
    frozen = [p.clone() for p in model[0].parameters()]
    row.attach(model)
    params = (
        [{"params": list(layer.parameters()), "lr": 0.1} for layer in model]
        if grouped
        else model.parameters()
    )
    run = Run(model, row.build(params, Settings()), row).train()
    with run.opt:
        assert same(model[0].parameters(), frozen)
    assert same(model[0].parameters(), frozen)
    assert run.opt.steps == STEPS
    assert all(bool((p != 0).any()) for p in model[1].parameters())
    assert all(p.grad is None for p in model[0].parameters())


@pytest.mark.cases(5, 2)
@having("shared")
def test_the_hooks_of_torch_optimizers_are_called(row: Row) -> None:
    run, calls = row.make(), []
    handles = [
        run.opt.register_step_pre_hook(
            lambda opt, args, kwargs: calls.append(("pre", opt.steps))
        ),
        run.opt.register_step_post_hook(
            lambda opt, args, kwargs: calls.append(("post", opt.steps))
        ),
        run.opt.register_state_dict_pre_hook(lambda opt: calls.append(("save", opt.steps))),
        run.opt.register_state_dict_post_hook(
            lambda opt, state: calls.append(("saved", len(state["state"]) > -1))
        ),
        run.opt.register_load_state_dict_pre_hook(
            lambda opt, state: calls.append(("load", opt.steps))
        ),
        run.opt.register_load_state_dict_post_hook(
            lambda opt: calls.append(("loaded", opt.steps))
        ),
    ]
    run.train(2)
    run.opt.load_state_dict(run.opt.state_dict())
    assert calls[:4] == [("pre", 0), ("post", 1), ("pre", 1), ("post", 2)]
    assert calls[4:] == [("save", 2), ("saved", True), ("load", 2), ("loaded", 2)]
    for handle in handles:
        handle.remove()
    run.train(1, seed=2)
    assert len(calls) == 8


@pytest.mark.cases(4, 2)
def test_a_state_says_in_plain_values_what_run_it_is_of(row: Row) -> None:
    run = row.make().train(2)
    state = run.opt.state_dict()["dpsco"]
    assert state["settings"].get("noise_multiplier", 1.0) == 1.0 or "numbers" in row.lacks
    assert state["settings"]["design"] == repr(run.opt.design)
    assert (state["steps"], state["halted"], state["finalized"]) == (2, False, False)
    # who is in which part, and the key of the records' fingerprint, until the run is finalized
    assert state["confidential"] == (run.opt.design.one_pass or "shared" in row.lacks)
    run.train(2, seed=2)
    assert run.opt.state_dict()["dpsco"]["steps"] == 4
