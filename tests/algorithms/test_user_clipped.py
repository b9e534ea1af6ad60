"""UserClippedSGD: what one whole person can move, what is charged for it, and its forms of clipping."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from tests.algorithms import user_runs as runs
from torch_dpsco.accounting.calibrate import noise_multiplier as calibrate_noise
from torch_dpsco.accounting.events import in_words
from torch_dpsco.accounting.ledger import Ledger
from torch_dpsco.algorithms.clips import AdaptiveClipped
from torch_dpsco.algorithms.oracles import UserClipped
from torch_dpsco.errors import (
    AdjacencyError,
    BudgetExceeded,
    MissingConstantError,
    PrivacyError,
    UnitError,
    UtilityWarning,
)
from torch_dpsco.step.oracle import Clipped
from torch_dpsco.step.plan import Plan

# Seeds warn in every test here.
ADJACENCIES = ("add_remove", "zero_out", "replace_one")
HUGE = [1e300, -1e300, 1e30, math.inf, math.nan, 0.0, 1.0, -1.0]


def clip(rows: np.ndarray, bound: float) -> np.ndarray:
    """Returns rows scaled to length at most bound."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows * np.minimum(1.0, bound / np.maximum(norms, 1e-300))


# -- the mechanism ----------------------------------------------------------------------------------------------------


def test_steps_are_those_of_the_clipped_mean_of_users_means() -> None:
    data, ids = runs.agreeing(20, rows=6, dim=3)
    run = runs.clipped(20, dim=3, clip=0.9, lr=0.5, steps=3).train(
        data, ids, physical_batch_size=11
    )
    mean = clip(runs.user_means(data, ids, 20), 0.9).sum(axis=0) / 20
    torch.testing.assert_close(run.weights, torch.tensor(3 * 0.5 * mean), rtol=0, atol=1e-6)


def test_gradients_are_taken_at_the_current_iterate() -> None:
    """Literal gradient descent on users' means for the squared loss, where gradients change from step to step."""
    data, ids = runs.agreeing(15, rows=4, dim=3)
    targets = np.random.default_rng(0).normal(size=(len(ids), 1))
    data = runs.dataset(data.tensors[0], targets)
    run = runs.clipped(
        15, dim=3, clip=0.6, lr=0.3, steps=5, loss=runs.squared_loss, average="uniform", reg=0.1
    )
    run.train(data, ids)
    x, w, iterates = data.tensors[0].numpy(), np.zeros(3), []
    for _ in range(5):
        iterates.append(w)
        rows = (x @ w[:, None] - targets) * x
        means = np.stack([rows[ids.numpy() == user].mean(axis=0) for user in range(15)])
        w = w - 0.3 * (clip(means, 0.6).sum(axis=0) / 15 + 0.1 * w)
    torch.testing.assert_close(
        run.weights, torch.tensor(np.mean(iterates, axis=0)), rtol=0, atol=1e-6
    )


def person(data: st.DataObject) -> np.ndarray:
    """Draws all rows of a user: none, a few, or many, some of them enormous or not numbers."""
    count = data.draw(st.sampled_from([0, 1, 2, 7]))
    values = data.draw(st.lists(st.sampled_from(HUGE), min_size=2 * count, max_size=2 * count))
    return np.array(values).reshape(count, 2)


@pytest.mark.weekly
@settings(max_examples=120, deadline=None)
@given(data=st.data(), chunk=st.sampled_from([None, 3]))
def test_replacing_all_rows_of_a_user_moves_the_mean_by_at_most_the_sensitivity(
    data: st.DataObject, chunk: int | None
) -> None:
    others = [np.ones((2, 2)), -3 * np.ones((1, 2)), np.zeros((0, 2)), np.array([[0.1, 0.0]])]
    ends = []
    for mine in (person(data), person(data)):
        people = [mine, *others]
        ids = np.repeat(np.arange(5), [len(rows) for rows in people])
        run = runs.clipped(5, clip=0.7)
        run.train(runs.dataset(np.concatenate(people)), ids, physical_batch_size=chunk)
        ends.append((run.weights, run.opt.oracle.sensitivity("replace_one")))
    (one, bound), (other, _) = ends
    assert bool(torch.isfinite(one).all())
    assert bound == pytest.approx(2 * 0.7 / 5, rel=1e-3)
    assert float((one - other).norm()) <= bound + 1e-12


def test_the_sensitivity_is_reached_by_a_user_who_turns_round() -> None:
    ends = []
    for sign, count in ((1.0, 1), (-1.0, 50)):
        rows = np.concatenate([sign * 1e6 * np.tile([[1.0, 0.0]], (count, 1)), np.zeros((4, 2))])
        ids = np.repeat(np.arange(5), [count, 1, 1, 1, 1])
        run = runs.clipped(5, clip=0.7).train(runs.dataset(rows), ids)
        ends.append(run.weights)
    bound = run.opt.oracle.sensitivity("replace_one")
    assert 0.999 * bound <= float((ends[0] - ends[1]).norm()) <= bound


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("kind", ["poisson", "fixed"])
def test_in_batches_too_a_user_moves_the_mean_by_at_most_the_sensitivity(kind: str) -> None:
    largest = 0.0
    for seed, rows in itertools.product(range(4), (0, 1, 9)):
        ends = []
        for sign, count in ((1.0, 3), (-1.0, rows)):
            mine = sign * 1e9 * np.tile([[0.6, 0.8]], (count, 1))
            ids = np.repeat(np.arange(8), [count, *[2] * 7])
            run = runs.clipped(8, clip=0.5, batch_size=4, sampling=kind, adjacency="replace_one")
            run.train(
                runs.dataset(np.concatenate([mine, np.ones((14, 2))])), ids, seed=seed, steps=1
            )
            ends.append(run.weights)
        moved = float((ends[0] - ends[1]).norm())
        largest = max(largest, moved)
        assert moved <= run.opt.oracle.sensitivity("replace_one") + 1e-12
    assert largest >= 0.99 * 2 * 0.5 / 4


def test_users_with_too_few_rows_contribute_nothing() -> None:
    rows = runs.dataset([[1.0, 0.0], [1.0, 0.0], [0.0, 5.0]])
    run = runs.clipped(2, clip=10.0, min_items=2).train(rows, [0, 0, 1])
    assert run.weights.tolist() == pytest.approx([0.5, 0.0], abs=1e-6)


def test_a_user_with_many_rows_counts_as_one_user() -> None:
    few = runs.clipped(2, clip=10.0).train(runs.dataset([[1.0, 0.0], [0.0, 1.0]]), [0, 1])
    many = runs.clipped(2, clip=10.0).train(
        runs.dataset([[1.0, 0.0]] * 99 + [[0.0, 1.0]]), [0] * 99 + [1]
    )
    torch.testing.assert_close(few.weights, many.weights, rtol=0, atol=1e-9)


# -- clipping ---------------------------------------------------------------------------------------------------------


def test_an_adaptive_clip_is_charged_and_follows_users() -> None:
    data, ids = runs.agreeing(40, rows=3)
    layer, clipping = runs.model(), AdaptiveClipped(0.01, 2.0, 40, count_noise=2.0)
    opt = dp.PrivateOptimizer(
        layer.parameters(), 1.0, oracle=UserClipped(clipping, 40), rule=dp.rules.SGD(), design=dp.Full(40),
        schedule=dp.Schedule((dp.Phase(8),)), accountant=dp.Accountant(runs.budget(epsilon=20.0)),
    )  # fmt: skip
    run = runs.Run(layer, opt).train(data, ids)
    assert run.opt.steps == len(run.opt.accountant) == 8
    assert run.opt.metrics["clip"] > 0.01 * 1.5
    plain = runs.clipped(40, clip=1.0, noise_multiplier=2.0, steps=8).train(data, ids)
    # one vote of +-1/2 per user beside the mean, at its own noise
    both = (2.0**-2 + (2 * 2.0) ** -2) ** -0.5
    assert run.epsilon() == pytest.approx(
        Ledger([dp.Full(40).event(Clipped(1.0, both, 40).event(), 8)]).epsilon(
            runs.DELTA, "replace_one"
        )
    )
    assert run.epsilon() > plain.epsilon()


# -- the ledger -------------------------------------------------------------------------------------------------------


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(
    ("sampling", "batch_size", "adjacency"),
    [
        (kind, size, adjacency)
        for kind, size, adjacency in itertools.product(
            ("poisson", "fixed"), (8, 40), ADJACENCIES
        )
        if not (kind == "fixed" and size == 8 and adjacency == "add_remove")
    ],
)
def test_each_step_costs_what_a_step_on_users_costs(
    sampling: str, batch_size: int, adjacency: str
) -> None:
    run = runs.clipped(
        40,
        noise_multiplier=2.0,
        batch_size=batch_size,
        sampling=sampling,
        adjacency=adjacency,
        steps=5,
    )
    data, ids = runs.agreeing(40, rows=4)
    design = (
        {"poisson": dp.Poisson, "fixed": dp.Fixed}[sampling](8, 40)
        if batch_size == 8
        else dp.Full(40)
    )
    for k, batch in enumerate(run.loader(data, ids), start=1):
        run.step(batch)
        expected = Ledger([design.event(Clipped(1.0, 2.0, batch_size).event(), k)])
        assert run.epsilon() == pytest.approx(expected.epsilon(runs.DELTA, adjacency))
    spent = run.opt.report(runs.DELTA).figures
    assert (spent.unit, spent.adjacency) == ("user", adjacency)


def test_fixed_batches_have_no_guarantee_under_add_remove() -> None:
    with pytest.raises(AdjacencyError, match="add_remove"):
        runs.clipped(
            40, noise_multiplier=2.0, batch_size=8, sampling="fixed", adjacency="add_remove"
        )


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_a_calibrated_run_spends_the_budget_of_users_and_no_more(adjacency: str) -> None:
    layer = runs.model()
    plan = dp.UserClippedSGD.plan(
        n=40, budget=runs.budget(adjacency), clip=1.0, lr=0.1, batch_size=8, steps=6
    )
    opt = dp.UserClippedSGD(layer.parameters(), plan)
    run = runs.Run(layer, opt).train(*runs.agreeing(40, rows=4))
    assert 0.97 * runs.EPSILON <= run.epsilon() <= runs.EPSILON
    assert opt.oracle.event().sigma == pytest.approx(
        calibrate_noise(
            runs.EPSILON, runs.DELTA, design=dp.Poisson(8, 40), steps=6, adjacency=adjacency
        )
    )
    with pytest.warns(UtilityWarning, match="all planned steps are made: this loop has no"):
        run.train(*runs.agreeing(40))


def test_the_budget_refuses_a_step_too_many() -> None:
    kind = {"noise_multiplier": 2.0, "adjacency": "replace_one"}
    one = runs.clipped(40, **kind).train(*runs.agreeing(40)).epsilon()
    accountant = dp.Accountant(runs.budget(epsilon=1.01 * one))
    run = runs.clipped(40, **kind, steps=None, accountant=accountant)
    data, ids = runs.agreeing(40)
    run.train(data, ids, steps=1)
    before = run.weights
    with pytest.raises(BudgetExceeded):
        run.train(data, ids, steps=1)
    assert run.weights.equal(before)
    assert (run.opt.steps, len(accountant)) == (1, 1)


def test_figures_of_examples_and_of_users_never_mix() -> None:
    examples = dp.Accountant(dp.Budget(1.0, 1e-3))
    with pytest.raises(UnitError, match="unit"):
        runs.clipped(10, noise_multiplier=9.0, accountant=examples)
    with pytest.raises(UnitError, match="unit"):
        runs.clipped(10, noise_multiplier=9.0, accountant=dp.Accountant())
    layer = runs.model()
    with pytest.raises(UnitError, match="budget must be of unit 'user'"):
        dp.UserClippedSGD.plan(
            n=10, budget=dp.Budget(1.0, 1e-3, unit="example"), clip=1.0, lr=1.0
        )
    people = dp.Accountant(unit="user")
    plan = dp.ClippedSGD.plan(
        lr=1.0, clip=1.0, noise_multiplier=9.0, sampling=dp.Disjoint(5, 10)
    )
    with pytest.raises(UnitError, match="unit"):
        dp.ClippedSGD(layer.parameters(), plan, accountant=people)
    assert runs.clipped(10, noise_multiplier=9.0, accountant=people).opt.accountant is people
    assert len(examples) == len(people) == 0


# -- copies, checkpoints, reports -------------------------------------------------------------------------------------


def test_a_checkpoint_goes_on_where_it_was() -> None:
    data, ids = runs.agreeing(20, rows=3)

    def make() -> runs.Run:
        return runs.clipped(20, clip=0.5, steps=4)

    whole, first = make().train(data, ids), make()
    for batch in itertools.islice(first.loader(data, ids), 2):
        first.step(batch)
    second = make().load(first.saved())
    assert second.opt.steps == 2
    second.train(data, ids)
    # users stand in random slots, and sums round in the order of slots
    torch.testing.assert_close(second.weights, whole.weights, rtol=0, atol=1e-12)
    assert second.ledger() == whole.ledger()


def test_a_checkpoint_of_other_users_or_clips_is_refused() -> None:
    saved = runs.clipped(20).saved()
    with pytest.raises(ValueError, match="design"):
        runs.clipped(21, batch_size=21).load(saved)
    with pytest.raises(ValueError, match="clip"):
        runs.clipped(20, clip=2.0).load(saved)
    with pytest.raises(ValueError, match="min_items"):
        runs.clipped(20, min_items=2).load(saved)


def test_a_copy_shares_the_ledger_and_draws_noise_of_its_own() -> None:
    data, ids = runs.agreeing(20, rows=3)
    run = runs.clipped(20, noise_multiplier=1.0, steps=4)
    other = run.copy()
    run.train(data, ids, steps=2)
    other.train(data, ids, steps=2)
    assert other.opt.accountant is run.opt.accountant
    assert len(run.opt.accountant) == 4
    assert not run.weights.equal(other.weights)


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_reports_name_unit_universe_and_adjacency_at_each_point(adjacency: str) -> None:
    run = runs.clipped(40, noise_multiplier=2.0, batch_size=8, adjacency=adjacency, steps=2)
    texts = [str(run.opt.report(1e-3))]
    for batch in run.loader(*runs.agreeing(40, rows=2)):
        run.step(batch)
        texts.append(str(run.opt.report(1e-3)))
    run.opt.finalize()
    texts.append(str(run.opt.report(1e-3)))
    for text in texts:
        assert f"for one user ({in_words(adjacency)})" in text
        assert "each batch takes each user with probability 0.2 (8/40)" in text
        assert "All rows of a user carry its id" in text
        assert ("The number of users is taken to be public" in " ".join(text.split())) == (
            adjacency != "add_remove"
        )
    assert "2 steps made of 2 planned; finalized" in texts[-1]


# -- fit --------------------------------------------------------------------------------------------------------------


def test_fit_makes_the_planned_steps_on_users() -> None:
    layer = runs.Shifts(2)
    plan = dp.UserClippedSGD.plan(
        n=40, budget=runs.budget(), clip=1.0, lr=0.1, batch_size=8, steps=6
    )
    opt = dp.UserClippedSGD(layer.parameters(), plan)
    data, ids = runs.agreeing(40, rows=4)
    dp.fit(
        layer,
        opt,
        data,
        runs.squared_loss,
        users=ids,
        steps=2,
        loss_reduction="sum",
        physical_batch_size=3,
        progress=False,
    )
    assert opt.finalized
    assert opt.steps == 2
    assert not layer.training


def test_fit_needs_ids_exactly_where_users_are_protected() -> None:
    data, ids = runs.agreeing(40)
    run = runs.clipped(40, noise_multiplier=1.0)
    with pytest.raises(UnitError, match="users must be given for UserClippedSGD"):
        dp.fit(run.model, run.opt, data, runs.squared_loss, progress=False)
    layer = runs.model()
    plan = dp.ClippedSGD.plan(
        lr=1.0, clip=1.0, noise_multiplier=9.0, sampling="full", n=40, steps=1
    )
    opt = dp.ClippedSGD(layer.parameters(), plan)
    with pytest.raises(UnitError, match="users must not be given for ClippedSGD"):
        dp.fit(
            layer, opt, data, runs.squared_loss, users=ids, loss_reduction="sum", progress=False
        )
    with pytest.raises(UnitError, match="one id per record"):
        dp.fit(run.model, run.opt, data, runs.squared_loss, users=ids[:3], progress=False)
    with pytest.raises(
        UnitError, match=r"integer ids, or strings .*where one is missing pandas"
    ):
        dp.fit(run.model, run.opt, data, runs.squared_loss, users=ids.double(), progress=False)
    assert len(run.opt.accountant) == len(opt.accountant) == 0


# -- refusals ---------------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "lr": ({"lr": 0.0}, "lr must be"),
    "clip-zero": ({"clip": 0.0}, "clip must be"),
    "clip-nan": ({"clip": math.nan}, "clip must be"),
    "noise": ({"noise_multiplier": -1.0}, "noise_multiplier must be"),
    "batch-size": ({"batch_size": 11}, "batch_size must be"),
    "batch-size-zero": ({"batch_size": 0}, "batch_size must be"),
    "sampling": ({"sampling": "disjoint", "batch_size": 5}, "sampling must be"),
    "sampling-of-all": ({"sampling": "disjoint"}, "sampling must be"),
    "full": ({"sampling": "full", "batch_size": 5}, "batch_size must be n=10 for full batches"),
    "design": ({"sampling": dp.Poisson(5, 11)}, "n must be 11"),
    "steps": ({"steps": 0}, "steps must be"),
    "no-noise": ({"noise_multiplier": None}, "budget or noise_multiplier must be given"),
    "min-items": ({"min_items": 0}, "min_items must be"),
    "adjacency": ({"adjacency": "neighbors"}, "adjacency must be"),
    "average": ({"average": "median"}, "average must be"),
    "reg": ({"reg": -1.0}, "reg must be"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_every_bad_input_is_refused_by_name(name: str) -> None:
    changes, message = BAD[name]
    with pytest.raises((ValueError, PrivacyError), match=message):
        runs.clipped(10, **changes)


@pytest.mark.parametrize(
    "n", [0, -3, 2.5, "10", None], ids=["zero", "negative", "half", "text", "none"]
)
def test_a_number_of_users_that_cannot_be_is_refused_by_name(n: Any) -> None:
    with pytest.raises(ValueError, match="n must be"):
        dp.UserClippedSGD.plan(lr=1.0, clip=1.0, noise_multiplier=1.0, batch_size=5, n=n)


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 3, "epochs": 2.0}, "must not be given both"),
        ({"epochs": 0}, "epochs must be"),
        ({"clip": -1.0}, "clip"),
    ],
    ids=["steps-and-epochs", "epochs", "clip"],
)
def test_a_bad_calibration_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    arguments = {
        "n": 40,
        "budget": runs.budget(),
        "clip": 1.0,
        "lr": 0.1,
        "batch_size": 8,
        **changes,
    }
    with pytest.raises(ValueError, match=message):
        dp.UserClippedSGD.plan(**arguments)


def test_a_plan_serves_several_optimizers_with_an_oracle_each() -> None:
    plan = dp.UserClippedSGD.plan(n=10, clip=1.0, lr=1.0, noise_multiplier=1.0)
    one, other = (dp.UserClippedSGD(runs.model().parameters(), plan) for _ in range(2))
    assert one.oracle is not other.oracle


# -- a clip that is searched ------------------------------------------------------------------------------------------

PEOPLE = dp.Budget(3.0, 1e-5, adjacency="add_remove", unit="user")


def searched(n: int = 400, **changes: Any) -> Any:
    return dp.UserClippedSGD.plan(**{"n": n, "budget": PEOPLE, "dim": 3, **changes})


@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_a_searched_clip_is_charged_with_the_mean(adjacency: str) -> None:
    budget = dp.Budget(3.0, 1e-5, adjacency=adjacency, unit="user")
    plan = searched(budget=budget)
    oracle = plan.oracle(plan.prox())
    mean, votes = oracle.clipping.noise_multiplier, oracle.clipping.count_noise
    assert (
        oracle.event().sigma
        <= 1 / math.hypot(1 / mean, plan.quantile / votes)
        <= oracle.event().sigma * (1 + 1e-9)
    )
    assert mean == pytest.approx(plan.noise_multiplier / math.sqrt(0.98))
    assert 0.999 * 3.0 < plan.epsilon() <= 3.0
    assert (plan.clip, oracle.clipping.target, plan.average) == (0.03, plan.quantile, "weighted")
    assert 64 <= plan.steps <= 256


@pytest.mark.cases(0, 1)
@pytest.mark.filterwarnings("ignore::torch_dpsco.errors.UtilityWarning")
@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e2])
def test_a_searched_clip_ends_among_the_longest_users(scale: float) -> None:
    """Lengths are uniform in [1, 2] times the scale; the search starts at 0.03, and has its noise."""
    draw = np.random.default_rng(0)
    rows = draw.normal(size=(400, 3))
    rows *= scale * draw.uniform(1, 2, (400, 1)) / np.linalg.norm(rows, axis=1, keepdims=True)
    plan, layer = (
        searched(budget=dp.Budget(30.0, 1e-5, adjacency="add_remove", unit="user")),
        runs.model(3, None),
    )
    assert plan.quantile == 0.98
    run = runs.Run(layer, dp.UserClippedSGD(layer.parameters(), plan), runs.linear_loss)
    run.train(runs.dataset(rows), torch.arange(400))
    found = run.opt.oracle.metrics()["clip"]
    assert 1.5 * scale < found < 4.0 * scale
    assert run.opt.report().epsilon == plan.epsilon()


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_the_quantile_is_within_twice_the_noise_on_all_votes_of_1(adjacency: str) -> None:
    found = []
    for n in (100, 1_000, 2_000, 4_000, 100_000):
        budget = dp.Budget(1.0, 1e-6, adjacency=adjacency, unit="user")
        plan = searched(n, budget=budget, sampling="full")
        clipping = plan.oracle(plan.prox()).clipping
        std = clipping.count_noise / plan.quantile / clipping.batch_size / math.sqrt(plan.steps)
        wanted = min(max(0.9, 1 - 2 * std), 0.98)
        assert plan.quantile == clipping.target == pytest.approx(wanted, abs=1e-12)
        found.append(plan.quantile)
    assert found == sorted(found)
    assert (found[0], found[-1]) == (0.9, 0.98)
    assert any(0.9 < quantile < 0.98 for quantile in found)


@pytest.mark.cases(0, 1)
def test_users_of_a_rare_class_are_not_outvoted() -> None:
    """One user of 25 has a gradient of length 1, all others have 0.04, at which a quantile of 0.9 would stay."""
    budget = dp.Budget(10.0, 1e-5, adjacency="add_remove", unit="user")
    plan, layer = searched(4_000, budget=budget), runs.model(3, None)
    rows = np.zeros((4_000, 3))
    rows[:, 0] = np.where(np.arange(4_000) % 25 == 0, 1.0, -0.04)
    run = runs.Run(layer, dp.UserClippedSGD(layer.parameters(), plan), runs.linear_loss)
    run.train(runs.dataset(rows), torch.arange(4_000))
    assert run.opt.oracle.metrics()["clip"] > 0.15


@pytest.mark.slow
def test_users_of_one_row_get_probabilities_that_are_better_than_a_constant() -> None:
    """3 of 4 labels are 0: at a low quantile their users outvote the others without end."""
    draw = np.random.default_rng(0)
    x = draw.uniform(-1, 1, (6_000, 3))
    chance = 1 / (1 + np.exp(2.2 - x @ [2.0, -1.0, 0.0]))
    y = draw.uniform(size=6_000) < chance
    data = TensorDataset(torch.tensor(x).float(), torch.tensor(2.0 * y - 1).float()[:, None])
    layer = nn.Linear(3, 1)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    plan = searched(6_000, dim=layer)
    optimizer = dp.UserClippedSGD(layer.parameters(), plan)
    dp.fit(
        layer,
        optimizer,
        data,
        dp.losses.Logistic(),
        users=torch.arange(6_000),
        progress=False,
    )
    with torch.no_grad():
        found = torch.sigmoid(layer(data.tensors[0])).numpy()[:, 0]
    losses = [-np.log(np.where(y, p, 1 - p)).mean() for p in (found, y.mean(), chance)]
    assert losses[0] - losses[2] < 0.5 * (losses[1] - losses[2])


def test_steps_are_in_units_of_the_clip_of_their_release() -> None:
    data, ids = runs.agreeing(20, rows=6, dim=3)
    own = {"lr": 0.5, "momentum": 0.0, "average": "last"}
    quiet = replace(searched(20), noise_multiplier=0.0, budget=None, steps=4, **own)
    layer = runs.model(3, None)
    run = runs.Run(layer, dp.UserClippedSGD(layer.parameters(), quiet), runs.linear_loss).train(
        data, ids
    )
    means, found, bound = runs.user_means(data, ids, 20), np.zeros(3), 0.03
    target = quiet.quantile
    for t in range(4):
        found = found + 0.5 * clip(means, bound).sum(axis=0) / 20 / bound
        below = np.clip((1.125 - np.linalg.norm(means, axis=1) / bound) / 0.25, 0, 1) - target
        bound *= math.exp(-max(0.2, 1.0 / (t + 1)) * below.sum() / 20)
    torch.testing.assert_close(run.weights, torch.tensor(found), rtol=0, atol=1e-6)
    assert run.opt.oracle.clipping.state()["clip"] == pytest.approx(bound)


@pytest.mark.slow
def test_what_is_given_of_users_wins_one_by_one() -> None:
    assert (searched(clip=0.2).clip, searched(clip=0.2).quantile) == (0.2, None)
    assert searched(clip=0.2).lr == pytest.approx(searched(clip=0.4).lr * 2)
    assert (searched(lr=0.3).lr, searched(lr=0.3).momentum, searched(lr=0.3).average) == (
        0.3,
        0,
        "last",
    )
    assert searched(steps=40).steps == 40
    assert searched(5_000, batch_size=100).batch_size == 100
    assert searched(50_000).batch_size >= 1024
    explicit = searched(clip=0.2, lr=1.0)
    assert (explicit.steps, explicit.momentum, explicit.average) == (30, 0, "last")
    with pytest.raises(
        MissingConstantError, match="clip and lr must be given beside noise_multiplier"
    ):
        dp.UserClippedSGD.plan(n=20, noise_multiplier=1.0, steps=3)


def test_a_searched_clip_is_printed_and_saved() -> None:
    plan = searched()
    text = " ".join(str(plan).split())
    assert (
        "found in the run, for 2% of its squared budget: from 0.03 on it follows the"
        f" {plan.quantile:.3g} quantile of the lengths" in text
    )
    assert Plan.from_dict(plan.to_dict()) == plan
