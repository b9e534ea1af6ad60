"""LocalizedUserSGD: phases on disjoint users, the largest of whose costs is that of the run."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torch_dpsco as dp
from tests.algorithms import user_runs as runs
from tests.reference import user_level_literal as literal
from torch_dpsco.accounting.events import AboveThreshold, Failure, Gaussian
from torch_dpsco.accounting.ledger import Ledger
from torch_dpsco.algorithms.user_numbers import UserPhases
from torch_dpsco.errors import AdjacencyError, InfeasibleError, SequenceError, UnitError
from torch_dpsco.step.batch import LogicalBatch

# Seeds warn in every test here.
TWO = (200, 4), (300, 3)  # users and steps of the phases of most tests
N = 520  # with users whom no phase takes


def schedule(*sizes: tuple[int, int]) -> runs.Phases:
    """Returns calibrated phases."""
    return runs.phased(*(runs.plan(users, steps) for users, steps in sizes or TWO), n_users=N)


def private(*sizes: tuple[int, int], **more: Any) -> runs.Run:
    """A run whose budget is exactly that of its plan."""
    return runs.localized(
        schedule(*sizes), **{"accountant": dp.Accountant(runs.budget())} | more
    )


def made(run: runs.Run, count: int, data: Any = None) -> runs.Run:
    """Makes the next steps, and leaves the loader."""
    loader = run.opt.loader(
        *(data or runs.agreeing(N, rows=2)), resume=run.opt.steps > 0, isolation="none"
    )
    for batch in itertools.islice(loader, count):
        run.step(batch)
    return run


def parts(run: runs.Run) -> dict[str, dict[type, int]]:
    """Returns how often each type of event is in each part of the ledger."""
    found: dict[str, dict[type, int]] = {}
    for _, part, event, count in run.opt.accountant.ledger.entries():
        kinds = found.setdefault(part, {})
        kinds[type(event)] = kinds.get(type(event), 0) + count
    return found


# -- the mechanism ----------------------------------------------------------------------------------------------------


def test_without_noise_the_run_is_algorithm_4_of_the_paper() -> None:
    sizes = [(20, 4), (40, 3), (60, 5)]
    n, lr, tau = 130, 0.4, 5.0
    data, ids = runs.agreeing(n, rows=3, dim=3)
    targets = np.random.default_rng(1).normal(size=(len(ids), 1))
    x, users, start = data.tensors[0].numpy(), ids.numpy(), [0.1, -0.1, 0.2]
    own = runs.phased(
        *(runs.quiet(size, steps=steps, tau=tau) for size, steps in sizes),
        n_users=n,
        lr=lr,
    )
    ball = dp.prox.Ball(0.3)
    run = runs.localized(own, dim=3, loss=runs.squared_loss, start=start, prox=ball)
    order: list[list[int]] = [[], [], []]
    for batch in run.loader(runs.dataset(x, targets), ids):
        index = np.searchsorted([4, 7, 12], run.opt.steps, side="right")
        order[index] = batch[2].unique().tolist()
        run.step(batch)
    run.opt.finalize()

    def query(theta: np.ndarray, user: int) -> np.ndarray:
        mine = x[users == user]
        return ((mine @ theta[:, None] - targets[users == user]) * mine).mean(axis=0)

    paper = [
        literal.LiteralPhase(size, steps, 0.0, lr / 2**k, tau, 1.0)
        for k, (size, steps) in enumerate(sizes)
    ]
    users_in_order = list(itertools.chain(*order))
    expected = literal.algorithm_4(query, users_in_order, paper, np.array(start), 0.3, 100)
    assert [len(part) for part in order] == [20, 40, 60]
    assert len(set(users_in_order)) == 120
    torch.testing.assert_close(run.weights, torch.tensor(expected), rtol=0, atol=1e-7)


def test_a_phase_starts_from_the_average_of_the_one_before() -> None:
    run = runs.localized(
        runs.phased(runs.quiet(20, steps=3), runs.quiet(20, steps=2), n_users=40, lr=1.0)
    )
    data, ids = runs.agreeing(40)
    means, iterates, drawn = torch.tensor(runs.user_means(data, ids, 40)), [], []
    for batch in run.loader(data, ids):
        iterates.append(run.weights)
        drawn.append(batch[2])
        run.step(batch)
    first, second = means[drawn[0]].mean(dim=0), means[drawn[3]].mean(dim=0)
    torch.testing.assert_close(iterates[3], (0 + 1 + 2) / 3 * first, rtol=0, atol=1e-9)
    torch.testing.assert_close(iterates[4] - iterates[3], 0.5 * second, rtol=0, atol=1e-9)
    run.opt.finalize()
    torch.testing.assert_close(run.weights, (iterates[3] + iterates[4]) / 2, rtol=0, atol=1e-9)


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("phase", [0, 1], ids=["first", "second"])
def test_a_replaced_user_moves_the_means_of_one_phase_and_by_at_most_its_sensitivity(
    phase: int,
) -> None:
    own = runs.phased(
        runs.quiet(20, steps=2, floor=18), runs.quiet(40, steps=2, floor=37), n_users=60, lr=1.0
    )
    sampler = runs.localized(own).loader(*runs.agreeing(60), seed=5)
    drawn = [batch_ids for _, batch_ids in sampler.batch_sampler.draws()]
    user = int(drawn[2 * phase][3])
    assert not set(drawn[0]) & set(drawn[2])
    data, ids = runs.agreeing(60)
    rows = data.tensors[0]
    paths, bounds = [], []
    for place, count in ((1.4, 1), (-30.0, 0), (0.6, 30), (float("nan"), 2)):
        kept = ids != user
        mine = torch.full((count, 2), place, dtype=torch.float64)
        people = torch.cat([ids[kept], torch.full((count,), user)])
        run = runs.localized(own)
        steps, before = [], run.weights
        for batch in run.loader(runs.dataset(torch.cat([rows[kept], mine])), people, seed=5):
            run.step(batch)
            p = run.model.layer.weight.grad
            steps.append(p.clone() if p is not None else before)
            bounds.append(run.opt.oracle.sensitivity("replace_one"))
        assert not run.opt.halted
        paths.append(torch.stack(steps)[:, 0])
    for one, other in itertools.combinations(paths, 2):
        moved = (one - other).norm(dim=1)
        other_phase = moved[2:] if phase == 0 else moved[:2]
        assert float(other_phase.max()) <= 1e-12
        assert all(float(m) <= bound for m, bound in zip(moved, bounds, strict=False))
    assert (
        max(float((a - b).norm(dim=1).max()) for a, b in itertools.combinations(paths, 2)) > 1e-3
    )


# -- the ledger -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_phase_is_charged_once_when_it_opens() -> None:
    run, digests = private(), []
    for batch in run.loader(*runs.agreeing(N, rows=2)):
        run.step(batch)
        digests.append(run.ledger())
    assert len(digests) == 7
    assert [len(set(digests[:4])), len(set(digests[4:]))] == [1, 1]
    assert digests[3] != digests[4]
    found = parts(run)
    assert list(found.values()) == [
        {AboveThreshold: 1, Gaussian: 4, Failure: 1},
        {AboveThreshold: 1, Gaussian: 3, Failure: 1},
    ]


@pytest.mark.slow
def test_the_run_costs_the_largest_of_its_phases() -> None:
    alone = [private(size).train(*runs.agreeing(N)).epsilon() for size in TWO]
    run = private()
    made(run, 4)
    assert run.epsilon() == pytest.approx(alone[0], rel=1e-3)
    made(run, 3)
    assert run.epsilon() == pytest.approx(max(alone), rel=1e-3)
    assert run.epsilon() < 0.7 * sum(alone)


@pytest.mark.slow
def test_the_spent_epsilon_is_within_the_plans_at_each_point() -> None:
    run = private((200, 2), (300, 2))
    assert run.opt.report(runs.DELTA).epsilon == 0
    for batch in run.loader(*runs.agreeing(N)):
        run.step(batch)
        assert 0.9 * runs.EPSILON <= run.epsilon() <= runs.EPSILON
        spent = run.opt.report().figures
        assert (spent.unit, spent.adjacency, spent.budget) == (
            "user",
            "replace_one",
            runs.budget(),
        )
    run.opt.finalize()
    assert run.epsilon() <= runs.EPSILON


@pytest.mark.slow
def test_calibrated_phases_fit_the_budget_that_they_were_made_for() -> None:
    phases = UserPhases(
        n_users=900, items_per_user=2, dim=2, epsilon=4.0, delta=1e-3, lipschitz=1.0, strong_convexity=0.5,
        pair_radius=1.0, max_steps=3, score_share=1.0, halt_probability=1e-9,
    ).planned()  # fmt: skip
    own = runs.Phases(phases, 900)
    run = runs.localized(
        own, accountant=dp.Accountant(runs.budget(epsilon=4.0)), prox=dp.prox.Ball(5.0)
    )
    run.train(*runs.agreeing(900, rows=2))
    assert run.opt.steps == sum(phase.filter.steps for phase in phases)
    assert 0 < run.epsilon() <= 4.0
    run.opt.finalize()


@pytest.mark.slow
def test_fit_refuses_a_later_phase_that_passes_the_budget_before_anything_is_spent() -> None:
    own = runs.phased(runs.plan(300, 3, 3.0), runs.plan(200, 3, 4.0), n_users=N)
    accountant = dp.Accountant(runs.budget(epsilon=3.5))
    data, ids = runs.agreeing(N)

    def train() -> None:
        run = runs.localized(own, accountant=accountant)
        dp.fit(
            run.model,
            run.opt,
            data,
            runs.squared_loss,
            users=ids,
            loss_reduction="sum",
            progress=False,
        )

    with pytest.raises(InfeasibleError, match="must be"):
        train()
    assert len(accountant) == 0


def test_accountants_of_examples_are_refused() -> None:
    for accountant in (dp.Accountant(), dp.Accountant(dp.Budget(9.0, 1e-3))):
        with pytest.raises(UnitError, match="unit"):
            runs.localized(schedule(), accountant=accountant)
        assert len(accountant) == 0


def test_nothing_is_known_under_add_remove() -> None:
    run = made(private(), 1)
    with pytest.raises(AdjacencyError, match="add_remove"):
        run.opt.accountant.get_epsilon(runs.DELTA, adjacency="add_remove")
    with pytest.raises(AdjacencyError):
        runs.localized(schedule(), accountant=dp.Accountant(runs.budget("add_remove")))


# -- halting ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def other_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Users may change their minds within a run, which a fingerprint would notice."""
    monkeypatch.setattr(
        LogicalBatch, "_require_same_records", staticmethod(lambda partition, loader: None)
    )


@pytest.mark.usefixtures("other_records")
def test_a_phase_that_halts_keeps_its_answer_and_later_phases_go_on() -> None:
    run = runs.localized(
        runs.phased(runs.quiet(20, steps=4), runs.quiet(20, steps=2), n_users=40, lr=1.0),
        start=[0.5, 0.5],
    )
    near, far = runs.agreeing(40), runs.scattered(40)
    made(run, 2, near)
    average = run.answer()
    made(run, 1, far)
    assert run.opt.halted
    charged = run.ledger()
    made(run, 1, near)
    assert run.ledger() == charged
    assert run.weights.equal(average)
    made(run, 1, near)
    assert not run.opt.halted
    assert not run.weights.equal(average)
    made(run, 1, near)
    assert run.opt.steps == 6


@pytest.mark.usefixtures("other_records")
def test_a_phase_that_halts_at_its_first_step_leaves_the_start_and_is_charged() -> None:
    run = private(start=[0.5, 0.5])
    made(run, 1, runs.scattered(N))
    assert run.opt.halted
    assert [kinds[Gaussian] for kinds in parts(run).values()] == [4]
    first = run.epsilon()
    made(run, 3, runs.scattered(N))
    assert run.weights.tolist() == [0.5, 0.5]
    assert run.epsilon() == first
    made(run, 3)
    assert not run.opt.halted
    assert run.weights.tolist() != [0.5, 0.5]
    assert len(parts(run)) == 2


@pytest.mark.slow
def test_a_run_that_halts_in_all_phases_answers_with_its_start() -> None:
    run = made(private(start=[0.5, 0.5]), 7, runs.scattered(N))
    run.opt.finalize()
    assert run.weights.tolist() == [0.5, 0.5]
    assert run.epsilon() == pytest.approx(private().train(*runs.agreeing(N)).epsilon())


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("agree", [True, False], ids=["agree", "part"])
def test_fit_runs_to_its_end_whether_users_agree_or_not(agree: bool) -> None:
    data, ids = runs.agreeing(N, rows=3) if agree else runs.scattered(N)
    layer = runs.Shifts(2)
    plan = runs.localized_plan(schedule())
    opt = dp.LocalizedUserSGD(layer.parameters(), plan, accountant=dp.Accountant(runs.budget()))
    dp.fit(
        layer,
        opt,
        data,
        runs.squared_loss,
        users=ids,
        loss_reduction="sum",
        progress=False,
        physical_batch_size=50,
    )
    assert (opt.steps, opt.finalized, opt.halted) == (7, True, not agree)
    assert opt.accountant.get_epsilon(runs.DELTA) <= runs.EPSILON


# -- copies and checkpoints -------------------------------------------------------------------------------------------


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize("before", [1, 3, 4, 5, 7])
def test_a_checkpoint_goes_on_with_its_thresholds_and_its_users(
    before: int, tmp_path: Path
) -> None:
    run = made(private(accountant=runs.ledger(tmp_path)), before)
    assert run.saved()[1]["dpsco"]["confidential"] is True
    other = run.resumed(private)
    assert other.opt.oracle.state() == run.opt.oracle.state()
    started = [
        state["threshold_noise"] is not None for state in other.opt.oracle.state().values()
    ]
    assert started == [
        True,
        True,
    ]  # a run that is resumed from any checkpoint has all its thresholds
    if before < 7:
        made(other, 7 - before)
    assert other.opt.steps == 7
    assert len(parts(other)) == 2
    assert [kinds[Gaussian] for kinds in parts(other).values()] == [4, 3]
    assert other.epsilon() <= runs.EPSILON


def test_a_resumed_run_draws_the_users_of_its_phases(tmp_path: Path) -> None:
    run = private(accountant=runs.ledger(tmp_path))
    data, ids = runs.agreeing(N)
    seen = []
    for batch in itertools.islice(run.opt.loader(data, ids, isolation="none"), 2):
        seen.append(set(batch[2].tolist()))
        run.step(batch)
    other = run.resumed(private)
    for batch in other.opt.loader(data, ids, resume=True, isolation="none"):
        seen.append(set(batch[2].tolist()))
        other.step(batch)
    assert [len(users) for users in seen] == [200] * 4 + [300] * 3
    assert all(users == seen[0] for users in seen[:4])
    assert not seen[0] & seen[4]


def test_a_run_is_not_rolled_back_or_continued_twice() -> None:
    run = runs.localized(
        schedule(), accountant=dp.Accountant(adjacency="replace_one", unit="user")
    )
    saved = made(run, 3).saved()
    made(run, 1)
    with pytest.raises(SequenceError, match="must be continued once"):
        run.load(saved)
    other = runs.localized(schedule(), accountant=run.opt.accountant)
    with pytest.raises(SequenceError, match="must be continued once"):
        other.load(saved)


def test_a_checkpoint_of_other_phases_is_refused() -> None:
    saved = private().saved()
    with pytest.raises(ValueError, match="design"):
        private((200, 4), (200, 3)).load(saved)
    with pytest.raises(ValueError, match=r"schedule|phases"):
        runs.localized(
            runs.phased(runs.plan(200, 4), runs.plan(300, 3), n_users=N, lr=0.1)
        ).load(saved)


# -- reports and refusals ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_reports_name_unit_universe_and_adjacency_at_each_point() -> None:
    run = private()
    reports = [run.opt.report()]
    for batch in run.loader(*runs.agreeing(N)):
        run.step(batch)
        reports.append(run.opt.report())
    run.opt.finalize()
    reports.append(run.opt.report())
    for text in (" ".join(str(report).split()) for report in reports):
        assert "for one user (replace_one: replaced by any other)" in text
        assert "The number of users is taken to be public" in text
        assert "Phases on disjoint parts: 520 users in a random order, cut into 2 parts" in text
        assert (
            "each user is used in one phase at most, and what counts is the phase that costs most"
            in text
        )
        assert "All rows of a user carry its id, and no other does" in text
    assert "7 steps made of 7 planned; finalized" in str(reports[-1])


def test_the_report_says_what_the_whole_run_will_cost_at_each_point() -> None:
    run = private()
    planned = [run.opt.accountant.report(ahead=run.opt.ahead()).planned_epsilon]
    data = runs.agreeing(N)
    for batch in itertools.islice(run.loader(*data), 6):
        run.step(batch)
        planned.append(run.opt.accountant.report(ahead=run.opt.ahead()).planned_epsilon)
    made(run, 1, data)
    assert planned == [pytest.approx(run.epsilon(), rel=1e-6)] * 7


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "min-items": ({"min_items": 0}, "min_items must be"),
    "prox": ({"prox": 1.0}, "prox must be"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_every_bad_input_is_refused_by_name(name: str) -> None:
    changes, message = BAD[name]
    own = {"own": schedule(), **changes}
    with pytest.raises(ValueError, match=message):
        runs.localized(own.pop("own"), **own)


def test_a_data_set_of_another_universe_is_refused() -> None:
    run = private()
    with pytest.raises(UnitError, match="users must be < n=520"):
        run.opt.loader(*runs.agreeing(N + 1))


def test_the_event_of_the_plan_is_that_of_the_run() -> None:
    run = private()
    before = Ledger([run.opt.ahead()]).epsilon(runs.DELTA, "replace_one")
    run.train(*runs.agreeing(N))
    assert before == pytest.approx(run.epsilon(), rel=1e-9)
