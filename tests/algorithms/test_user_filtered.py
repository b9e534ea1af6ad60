"""UserFilteredSGD: the filter in real runs, its one charge, its halt, and what a copy or a checkpoint may do."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torch_dpsco as dp
from tests.algorithms import user_runs as runs
from tests.reference import user_level_literal as literal
from tests.reference.papers.user_level import filtered_mean
from torch_dpsco.accounting.events import AboveThreshold, Failure, Gaussian
from torch_dpsco.errors import (
    AdjacencyError,
    InfeasibleError,
    SequenceError,
    UnitError,
    UtilityWarning,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:users disagree:torch_dpsco.errors.UtilityWarning"
)


def kinds(run: runs.Run) -> dict[type, int]:
    """Returns how often each type of event is in the ledger."""
    found: dict[type, int] = {}
    for _, _, event, count in run.opt.accountant.ledger.entries():
        found[type(event)] = found.get(type(event), 0) + count
    return found


def private(plan: Any = None, adjacency: str = "replace_one", **more: Any) -> runs.Run:
    """A run with noise, whose budget is exactly that of its plan."""
    plan = runs.plan() if plan is None else plan
    return runs.filtered(plan, **{"accountant": dp.Accountant(runs.budget(adjacency))} | more)


# -- the mechanism ----------------------------------------------------------------------------------------------------


def test_steps_are_those_of_the_filtered_mean_of_users_means() -> None:
    data, ids = runs.agreeing(40, rows=5, dim=3)
    means = runs.user_means(data, ids, 40)
    rows = data.tensors[0].clone()
    rows[ids == 7] = 100.0  # far from all others
    plan = runs.quiet(40, floor=36)
    run = runs.filtered(plan, dim=3, lr=0.5, average="last").train(
        runs.dataset(rows), ids, physical_batch_size=13
    )
    kept = np.delete(means, 7, axis=0)
    torch.testing.assert_close(
        run.weights, torch.tensor(1.5 * kept.mean(axis=0)), rtol=0, atol=1e-9
    )
    assert not run.opt.halted


def test_without_outliers_the_run_is_algorithm_3_of_the_paper() -> None:
    """With all users near each other all weights are 1 in both filters; uniform average, projection on a ball."""
    data, ids = runs.agreeing(30, rows=4, dim=3)
    targets = np.random.default_rng(1).normal(1.0, size=(len(ids), 1))
    data = runs.dataset(data.tensors[0], targets)
    x, start, users = data.tensors[0].numpy(), np.array([0.05, -0.05, 0.02]), ids.numpy()

    def query(theta: np.ndarray, user: int) -> np.ndarray:
        mine = x[users == user]
        return ((mine @ theta[:, None] - targets[users == user]) * mine).mean(axis=0)

    expected = literal.algorithm_3(
        query, range(30), start, 6, 0.4, literal.OutlierRemoval(30, 5.0), literal.ball(0.3)
    )
    ball = dp.prox.Ball(0.3)
    plan = runs.quiet(30, steps=6, tau=5.0, floor=29)
    run = runs.filtered(
        plan, dim=3, lr=0.4, loss=runs.squared_loss, start=start.tolist(), prox=ball
    )
    run.train(data, ids)
    torch.testing.assert_close(run.answer(), torch.tensor(expected), rtol=0, atol=1e-7)
    free = literal.algorithm_3(
        query, range(30), start, 6, 0.4, literal.OutlierRemoval(30, 5.0), literal.ball(math.inf)
    )
    assert np.linalg.norm(free - expected) > 0.01  # the projection was needed


def test_the_first_query_below_the_threshold_halts_as_in_the_paper() -> None:
    """Users part once w moves: the score falls, and the literal run halts at the same step."""
    n, lr, tau = 60, 0.5, 1.0
    x = np.where(np.arange(n)[:, None] % 2 == 0, [[1.0, 0.0]], [[1.0, 0.3]])
    targets = np.where(np.arange(n)[:, None] % 2 == 0, [[1.0]], [[1.1]])

    def query(theta: np.ndarray, user: int) -> np.ndarray:
        return (x[user] @ theta - targets[user]) * x[user] * (1 + 10 * abs(theta[0]))

    oracle = literal.OutlierRemoval(n, tau)
    theta, answered = np.zeros(2), 0
    while (
        answered < 10
        and (g := oracle.answer(np.stack([query(theta, j) for j in range(n)]))) is not None
    ):
        theta, answered = theta - lr * g, answered + 1

    def loss(outputs: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        scale = 1 + 10 * run.weights[0].abs()  # a public number
        return scale * 0.5 * (outputs - wanted).square().sum()

    plan = runs.quiet(n, steps=10, floor=0.8 * n, end=45, tau=tau)
    run = runs.filtered(plan, lr=lr, loss=loss, average="last")
    halts = []
    for batch in run.loader(runs.dataset(x, targets), torch.arange(n)):
        run.step(batch)
        halts.append(run.opt.halted)
    assert 0 < answered < 10
    assert halts.index(True) == answered
    torch.testing.assert_close(run.weights, torch.tensor(theta), rtol=0, atol=1e-9)


# -- sensitivity ------------------------------------------------------------------------------------------------------


@pytest.mark.weekly
@settings(max_examples=150, deadline=None)
@given(data=st.data(), n=st.sampled_from([12, 16, 20]))
def test_replacing_all_rows_of_a_user_moves_the_mean_by_at_most_the_sensitivity(
    data: st.DataObject, n: int
) -> None:
    """Both runs pass, and one of the two scores is at least H: then the bound must hold, whatever the rows."""
    places = st.sampled_from([0.0, 0.5, 1.0, 1.0 + 1e-9, -0.5, -1.0, 2.0, 3.0, math.nan, 1e200])
    spread = data.draw(
        st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.9, 3.0]), min_size=n - 1, max_size=n - 1)
    )
    others = [np.array([[0.0, x]] * (1 + k % 3)) for k, x in enumerate(spread)]
    floor = n - data.draw(st.sampled_from([1.0, 2.0]))
    plan = runs.quiet(n, steps=1, floor=floor)
    ends, scores = [], []
    for _ in range(2):
        count = data.draw(st.sampled_from([0, 1, 4]))
        mine = np.array([[0.0, data.draw(places)] for _ in range(count)]).reshape(count, 2)
        people = [mine, *others]
        ids = np.repeat(np.arange(n), [len(rows) for rows in people])
        run = runs.filtered(plan, average="last").train(
            runs.dataset(np.concatenate(people)), ids
        )
        ends.append(run)
        scores.append(run.opt.halted)
    if any(scores):
        return  # the test protects this pair, not the filter
    moved = float((ends[0].weights - ends[1].weights).norm())
    assert math.isfinite(moved)
    assert moved <= ends[0].opt.oracle.sensitivity("replace_one")


def test_isolated_users_count_themselves_in_a_run() -> None:
    """No rows, too few, not a number, too far: each leaves the mean of the others as it is."""
    data, ids = runs.agreeing(40)
    rows, users = data.tensors[0], ids
    rows = torch.cat([rows, rows]).clone()
    users = torch.cat([users, users])
    bad = torch.stack([users == 1, users == 2]).any(0)
    rows[users == 1], rows[users == 2] = math.nan, 1e9
    kept = (users != 0) & ~((users == 3) & (torch.arange(80) >= 40))
    plan = runs.quiet(40, steps=1, floor=32)
    run = runs.filtered(plan, average="last", min_items=2).train(
        runs.dataset(rows[kept]), users[kept]
    )
    good = ~bad & (users != 0) & (users != 3)
    torch.testing.assert_close(run.weights, rows[good].mean(dim=0), rtol=0, atol=1e-9)
    assert not run.opt.halted


# -- the ledger -------------------------------------------------------------------------------------------------------


def test_the_run_is_charged_once_when_it_opens() -> None:
    run = private()
    assert len(run.opt.accountant) == 0
    digests = []
    for batch in run.loader(*runs.agreeing(200)):
        run.step(batch)
        digests.append(run.ledger())
    assert len(digests) == 4
    assert len(set(digests)) == 1
    assert kinds(run) == {AboveThreshold: 1, Gaussian: 4, Failure: 1}


def test_the_spent_epsilon_is_within_the_budget_at_each_point() -> None:
    run = private(runs.plan(300, 5))
    for batch in run.loader(*runs.agreeing(300)):
        run.step(batch)
        assert 0.9 * runs.EPSILON <= run.epsilon() <= runs.EPSILON
        spent = run.opt.report().figures
        assert (spent.unit, spent.adjacency) == ("user", "replace_one")
    assert run.opt.steps == 5
    run.opt.finalize()
    assert run.epsilon() <= runs.EPSILON


def test_the_charge_is_that_of_the_plans_numbers() -> None:
    plan = runs.plan()
    run = private(plan)
    run.train(*runs.agreeing(200))
    events = {type(event): event for _, _, event, _ in run.opt.accountant.ledger.entries()}
    test, mean, failure = events[AboveThreshold], events[Gaussian], events[Failure]
    assert (test.b_threshold, test.b_query) == (plan.threshold_scale, plan.query_scale)
    assert dict(test.sens)["replace_one"] >= 2 * 199 / 200 * (1 - 1e-15)
    assert mean.sigma / dict(mean.sens)["replace_one"] == pytest.approx(
        plan.noise_std / plan.sensitivity, rel=1e-9
    )
    assert (failure.kind, failure.probability) == (
        "transcript",
        pytest.approx(run.opt.oracle.bad_pass, rel=1e-6),
    )
    assert run.opt.metrics["noise_std"] >= plan.noise_std


def test_nothing_is_known_under_add_remove() -> None:
    run = private()
    run.train(*runs.agreeing(200))
    with pytest.raises(AdjacencyError, match="add_remove"):
        run.opt.accountant.get_epsilon(runs.DELTA, adjacency="add_remove")
    with pytest.raises(AdjacencyError, match="replace_one"):
        private(adjacency="add_remove")


def test_a_budget_below_the_plan_is_refused_before_anything_is_spent() -> None:
    plan = runs.plan()
    accountant = dp.Accountant(runs.budget(epsilon=0.9 * runs.EPSILON))
    with pytest.raises(InfeasibleError, match="epsilon must be >="):
        runs.filtered(plan, accountant=accountant)
    assert len(accountant) == 0


def test_a_second_run_on_the_same_budget_is_refused() -> None:
    run = private()
    run.train(*runs.agreeing(200))
    with pytest.raises(
        InfeasibleError,
        match=r"this ledger holds \d+ events of a run of UserFilteredSGD; epsilon .* of 4 spent",
    ):
        runs.filtered(runs.plan(), accountant=run.opt.accountant)


@pytest.mark.parametrize(
    "given", [dp.Accountant(), dp.Accountant(dp.Budget(99.0, 1e-3))], ids=["free", "budget"]
)
def test_accountants_of_examples_are_refused(given: dp.Accountant) -> None:
    with pytest.raises(UnitError, match="unit"):
        runs.filtered(runs.plan(), accountant=given)
    assert len(given) == 0


def test_users_of_one_ledger_add_up_over_optimizers_of_any_kind() -> None:
    accountant = dp.Accountant(unit="user")
    runs.filtered(runs.plan(), accountant=accountant).train(*runs.agreeing(200))
    alone = accountant.get_epsilon(runs.DELTA)
    replaced = {"accountant": accountant, "adjacency": "replace_one"}
    runs.clipped(200, noise_multiplier=3.0, **replaced).train(*runs.agreeing(200))
    both = accountant.get_epsilon(runs.DELTA)
    assert both > alone
    with pytest.raises(AdjacencyError):
        accountant.get_epsilon(runs.DELTA, adjacency="add_remove")


# -- halting ----------------------------------------------------------------------------------------------------------


def halting(steps: int = 6, **more: Any) -> tuple[runs.Run, Any, torch.Tensor]:
    """Returns a run that makes two steps on users who agree and then sees them part, with its second data set."""
    run = runs.filtered(runs.quiet(30, steps=steps, floor=29), lr=0.5, start=[0.1, 0.2], **more)
    data, ids = runs.agreeing(30)
    for batch in itertools.islice(run.loader(data, ids), 2):
        run.step(batch)
    return run, *runs.scattered(30)


def test_after_a_halt_the_answer_is_the_average_so_far() -> None:
    run, far, ids = halting()
    before, query = run.answer(), run.weights
    assert not before.equal(torch.tensor([0.1, 0.2], dtype=torch.float64))
    run.train(far, ids)
    assert (run.opt.halted, run.opt.steps) == (True, 6)
    run.opt.finalize()
    torch.testing.assert_close(run.weights, before, rtol=0, atol=0)
    assert not query.equal(before)


def test_after_a_halt_steps_read_nothing_and_charge_nothing() -> None:
    run, far, ids = halting()
    charged, agreed = run.ledger(), runs.agreeing(30)
    batches = iter(run.loader(far, ids))
    run.step(next(batches))
    assert run.opt.halted
    still = (run.weights, run.answer())
    for data, users in ((far, ids), agreed):
        for batch in itertools.islice(run.loader(data, users), 1):
            run.opt.zero_grad()
            runs.linear_loss(run.model(batch[0]), batch[1]).backward()
            run.opt.step(users=batch[2])
    assert run.opt.steps == 5
    assert run.weights.equal(still[0])
    assert run.answer().equal(still[1])
    assert run.ledger() == charged


def test_a_run_that_halts_at_its_first_step_costs_as_much_as_a_whole_one() -> None:
    whole, short = private(), private()
    whole.train(*runs.agreeing(200))
    short.train(*runs.scattered(200))
    assert (short.opt.halted, whole.opt.halted) == (True, False)
    assert short.epsilon() == whole.epsilon()
    short.opt.finalize()
    assert short.weights.tolist() == [0.0, 0.0]


def test_a_run_without_any_rows_halts_and_is_charged() -> None:
    run = private()
    run.train(runs.dataset(np.ones((0, 2))), torch.arange(0))
    assert (run.opt.halted, run.opt.steps) == (True, 4)
    assert kinds(run)[Gaussian] == 4


@pytest.mark.filterwarnings("default:users disagree")
def test_a_first_test_that_fails_is_said_at_once_and_one_that_passes_is_not() -> None:
    for make, (data, ids), warns in (
        (private, runs.scattered(200), True),
        (private, runs.agreeing(200, rows=3), False),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UtilityWarning)
            run = make()
            for made, batch in enumerate(run.loader(data, ids, isolation=None)):
                run.step(batch)
                said = [
                    str(one.message) for one in caught if "users disagree" in str(one.message)
                ]
                assert len(said) == warns, made
        assert not said or re.search(
            r"pair_radius=1 of each other; nothing is learned any more", said[0]
        )


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("agree", [True, False], ids=["agree", "part"])
def test_fit_runs_to_its_end_whether_users_agree_or_not(agree: bool) -> None:
    data, ids = runs.agreeing(200, rows=3) if agree else runs.scattered(200)
    layer = runs.Shifts(2)
    plan = runs.filtered_plan(runs.plan(), 0.5)
    opt = dp.UserFilteredSGD(layer.parameters(), plan, accountant=dp.Accountant(runs.budget()))
    dp.fit(layer, opt, data, runs.squared_loss, users=ids, loss_reduction="sum", progress=False)
    assert (opt.steps, opt.finalized, opt.halted) == (4, True, not agree)
    assert opt.accountant.get_epsilon(runs.DELTA) <= runs.EPSILON


def test_more_steps_than_planned_are_refused_after_a_halt_too() -> None:
    run, far, ids = halting(steps=3)
    run.train(far, ids)
    with pytest.warns(UtilityWarning, match="all planned steps are made: this loop has no"):
        run.train(far, ids, steps=1)


# -- copies and checkpoints -------------------------------------------------------------------------------------------


def midway(**more: Any) -> runs.Run:
    """A run with noise after two of its four steps."""
    run = private(**more)
    for batch in itertools.islice(run.loader(*runs.agreeing(200)), 2):
        run.step(batch)
    return run


def test_a_checkpoint_keeps_the_noisy_threshold_and_is_not_charged_again(tmp_path: Path) -> None:
    run = midway(accountant=runs.ledger(tmp_path))
    assert run.saved()[1]["dpsco"]["confidential"] is True
    other = run.resumed(private)
    assert other.opt.oracle.state() == run.opt.oracle.state()
    assert other.opt.oracle.state()["threshold_noise"] is not None
    other.train(*runs.agreeing(200))
    assert other.opt.steps == 4
    assert other.ledger() == run.ledger()
    assert other.epsilon() <= runs.EPSILON


def test_a_halted_checkpoint_stays_halted(tmp_path: Path) -> None:
    run = private(accountant=runs.ledger(tmp_path))
    for batch in itertools.islice(run.loader(*runs.scattered(200)), 1):
        run.step(batch)
    other = run.resumed(private)
    assert other.opt.halted
    other.train(*runs.agreeing(200))
    assert (other.opt.halted, other.opt.steps) == (True, 4)
    assert other.weights.tolist() == [0.0, 0.0]
    assert other.ledger() == run.ledger()


def test_a_run_is_not_rolled_back_to_an_earlier_state() -> None:
    run = midway()
    saved = run.saved()
    for batch in itertools.islice(run.loader(*runs.agreeing(200)), 1):
        run.step(batch)
    with pytest.raises(SequenceError, match="must be continued once"):
        run.load(saved)


def test_a_second_optimizer_on_the_same_ledger_is_charged_again_or_refused() -> None:
    """Two runs with one noisy threshold may halt twice, and release more Gaussians than were charged."""
    run = runs.filtered(
        runs.plan(), accountant=dp.Accountant(adjacency="replace_one", unit="user")
    )
    for batch in itertools.islice(run.loader(*runs.agreeing(200)), 2):
        run.step(batch)
    before = run.epsilon()
    other = runs.filtered(runs.plan(), accountant=run.opt.accountant)
    try:
        other.load(run.saved())
        other.train(*runs.agreeing(200))
    except SequenceError:
        assert other.opt.steps == 0
    else:
        assert run.epsilon() > before


def test_a_resumed_run_that_halts_gives_the_answer_of_the_first_process(tmp_path: Path) -> None:
    run, far, ids = halting()
    plan = runs.quiet(30, steps=6, floor=29)
    broken, *_ = halting(accountant=runs.ledger(tmp_path))
    # another random start
    other = broken.resumed(partial(runs.filtered, plan, lr=0.5, start=[7.0, -7.0]))
    for each in (run, other):
        each.train(far, ids)
        each.opt.finalize()
    torch.testing.assert_close(other.weights, run.weights, rtol=0, atol=0)


def test_a_run_that_is_charged_as_a_whole_is_not_copied() -> None:
    run = midway()
    for copied in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(
            SequenceError, match=r"must not be copied|must have parts of their own"
        ):
            copied(run.opt)
    run.opt.finalize()
    assert copy.deepcopy(run.opt).finalized


@pytest.mark.slow
def test_a_checkpoint_of_another_plan_is_refused() -> None:
    saved = private().saved()
    with pytest.raises(ValueError, match="design"):
        private(runs.plan(300)).load(saved)
    with pytest.raises(ValueError, match=r"noise_multiplier|schedule"):
        private(runs.plan(200, 5)).load(saved)
    with pytest.raises(ValueError, match="min_items"):
        private(min_items=2).load(saved)


# -- reports and refusals ---------------------------------------------------------------------------------------------


def test_reports_name_unit_universe_and_adjacency_at_each_point() -> None:
    run = private()
    reports = [run.opt.report()]
    for batch in run.loader(*runs.agreeing(200)):
        run.step(batch)
        reports.append(run.opt.report())
    run.opt.finalize()
    reports.append(run.opt.report())
    for text in (" ".join(str(report).split()) for report in reports):
        assert "for one user (replace_one: replaced by any other)" in text
        assert "All rows of a user carry its id, and no other does" in text
        assert "One user is everything that one person contributed" in text
        assert "each step uses all users, and divides by the public constant 200" in text
        assert "The number of users is taken to be public" in text
    assert "4 steps made of 4 planned; finalized" in str(reports[-1])
    assert "Final epsilon: at most" in " ".join(str(reports[0]).split())
    assert '"unit": "user"' in run.opt.report().json()


def test_the_report_says_what_the_whole_run_will_cost_before_it_starts() -> None:
    run = private()
    planned = run.opt.accountant.report(ahead=run.opt.ahead()).planned_epsilon
    run.train(*runs.agreeing(200))
    assert planned == pytest.approx(run.epsilon(), rel=1e-9)
    after = run.opt.accountant.report(ahead=run.opt.ahead())
    assert after.planned_epsilon in (None, pytest.approx(run.epsilon(), rel=1e-9))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "lr": ({"lr": -1.0}, "lr must be"),
    "min-items": ({"min_items": 0}, "min_items must be"),
    "average": ({"average": "median"}, "average must be"),
    "prox": ({"prox": "ball"}, "prox must be"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_every_bad_input_is_refused_by_name(name: str) -> None:
    changes, message = BAD[name]
    own = {"own": runs.plan(), **changes}
    with pytest.raises(ValueError, match=message):
        runs.filtered(own.pop("own"), **own)


def test_the_pure_mean_and_the_run_agree_on_any_users() -> None:
    draw = np.random.default_rng(5)
    rows = draw.normal(size=(20, 2)) * draw.choice([0.2, 3.0], size=(20, 1), p=[0.95, 0.05])
    plan = runs.quiet(20, steps=1, floor=14)
    run = runs.filtered(plan, average="last").train(runs.dataset(rows), torch.arange(20))
    expected = filtered_mean(torch.tensor(rows), 1.0, 10.5, plan.ramp_end)
    assert run.opt.halted == (expected["score"] < plan.threshold)
    torch.testing.assert_close(
        run.weights, expected["mean"] * (not run.opt.halted), rtol=0, atol=1e-9
    )


def test_the_proved_delta_covers_the_ledger_at_the_plans_epsilon() -> None:
    plan = runs.plan()
    run = private(plan)
    run.train(*runs.agreeing(200))
    assert run.opt.accountant.get_delta(runs.EPSILON) <= runs.DELTA


def test_a_mean_loss_is_refused() -> None:
    """It rounds 1/B: a user with other numbers of rows would move the means of all users, and pairs across tau."""
    plan = runs.plan()
    model = dp.attach(runs.Shifts(2))
    opt = dp.UserFilteredSGD(model.parameters(), runs.filtered_plan(plan, 0.5))
    data, ids = runs.agreeing(plan.n_users, rows=2)
    x, y, users = next(iter(opt.loader(data, ids)))
    (model(x) - y).square().mean().backward()
    with pytest.raises(SequenceError, match="rows must be of a sum loss"):
        opt.step(users=users)
    assert len(opt.accountant) == 0
