"""Plans: printed, saved, loaded and run; what they say is what the ledger says afterwards."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from tests.algorithms import user_runs
from tests.edited_plans import edited
from tests.problems import slots_of
from torch_dpsco.accounting.events import in_words
from torch_dpsco.errors import AdjacencyError, ConditionError, DpscoError
from torch_dpsco.sampling.one_pass import make_sampler
from torch_dpsco.step.plan import Plan, StepPlan

pytestmark = pytest.mark.filterwarnings(
    "ignore:users disagree:torch_dpsco.errors.UtilityWarning"
)

N, DIM, BUDGET = 64, 3, dp.Budget(2.0, 1e-4)
PEOPLE = dp.Budget(2.0, 1e-4, unit="user")
LOSS = dp.losses.Logistic()
PROBLEM = LOSS.problem(bound_x=2.0, radius=3.0)
ADDED = dp.Budget(2.0, 1e-4, "add_remove")
CURVED = dp.Problem(smoothness=1.0, strong_convexity=0.5, radius=3.0)
MOMENTS = dp.Problem(
    smoothness=1.0, strong_convexity=0.5, radius=3.0, moment=1.0, moment_order=4.0
)
PILOT = dp.Pilot(rule="median", size=20)


def holder(**kind: Any) -> Callable[[], StepPlan]:
    return lambda: dp.HolderSGD.plan(**{"problem": PROBLEM, "n": N, "batch_size": 16, **kind})


def clipped_users(**kind: Any) -> Callable[[], StepPlan]:
    return lambda: dp.UserClippedSGD.plan(
        **{"n": N, "clip": 1.0, "lr": 0.1, "batch_size": 16, **kind}
    )


def filtered_users(**kind: Any) -> Callable[[], StepPlan]:
    own = {"n": 600, "budget": PEOPLE, "pair_radius": 1.0, "steps": 3, "lr": 0.1}
    return lambda: dp.UserFilteredSGD.plan(**{**own, **kind})


def localized_users(**kind: Any) -> Callable[[], StepPlan]:
    problem = dp.Problem(lipschitz=1.0, radius=2.0)
    own = {
        "n": 2400,
        "budget": PEOPLE,
        "problem": problem,
        "reg": 0.5,
        "pair_radius": 1.0,
        "max_steps": 2,
    }
    return lambda: dp.LocalizedUserSGD.plan(**{**own, "dim": DIM + 1, **kind})


def heavy(cls: Any, budget: dp.Budget | None = BUDGET, **kind: Any) -> Callable[[], StepPlan]:
    return lambda: cls.plan(
        **{"problem": CURVED, "n": N, "budget": budget, "dim": DIM + 1, "clip": 1.0, **kind}
    )


def localized(budget: dp.Budget | None = BUDGET, **kind: Any) -> Callable[[], StepPlan]:
    return heavy(dp.LocalizedSGD, budget, **{"reg": 0.1, "max_steps": 3, "min_phase": 9, **kind})


def correlated(**kind: Any) -> Callable[[], StepPlan]:
    return lambda: dp.CorrelatedSGD.plan(
        **{"n": N, "clip": 1.0, "lr": 0.1, "batch_size": 16, **kind}
    )


MADE: dict[str, tuple[type[dp.PrivateOptimizer], Callable[[], StepPlan]]] = {
    "HolderSGD": (dp.HolderSGD, holder(budget=BUDGET, epochs=1)),
    "HolderSGD, add_remove": (dp.HolderSGD, holder(budget=ADDED, steps=3)),
    "HolderSGD, exact": (dp.HolderSGD, holder(budget=BUDGET, steps=2, secure="exact")),
    "HolderSGD, fixed": (
        dp.HolderSGD,
        holder(budget=BUDGET, steps=2, sampling="fixed", noise="constant"),
    ),
    "HolderSGD, shuffled": (dp.HolderSGD, holder(budget=BUDGET, epochs=2, sampling="shuffled")),
    "HolderSGD, assigned": (dp.HolderSGD, holder(budget=ADDED, sampling="assigned")),
    "HolderSGD, full": (
        dp.HolderSGD,
        holder(budget=BUDGET, steps=2, sampling="full", batch_size=None),
    ),
    "HolderSGD, noise": (dp.HolderSGD, holder(noise_multiplier=3.0, steps=3, lr=0.1)),
    "HolderSGD, losses with kinks": (
        dp.HolderSGD,
        holder(
            problem=dp.losses.Hinge().problem(bound_x=2.0, radius=1.5),
            budget=BUDGET,
            epochs=1,
            dim=DIM + 1,
        ),
    ),
    "CorrelatedSGD": (dp.CorrelatedSGD, correlated(budget=BUDGET, epochs=2)),
    "CorrelatedSGD, zero_out": (
        dp.CorrelatedSGD,
        correlated(budget=dp.Budget(2.0, 1e-4, "zero_out"), steps=7),
    ),
    "CorrelatedSGD, noise": (
        dp.CorrelatedSGD,
        correlated(noise_multiplier=3.0, bands=2, radius=1.0),
    ),
    "NetSGD": (dp.NetSGD, lambda: dp.NetSGD.plan(n=N, budget=BUDGET, dim=DIM, steps=6)),
    "NetSGD, noise": (
        dp.NetSGD,
        lambda: dp.NetSGD.plan(
            n=N, noise_multiplier=3.0, clip=0.5, lr=0.1, epochs=2, batch_size=16
        ),
    ),
    "UserClippedSGD": (dp.UserClippedSGD, clipped_users(budget=PEOPLE, epochs=1)),
    "UserClippedSGD, add_remove": (
        dp.UserClippedSGD,
        clipped_users(budget=dp.Budget(2.0, 1e-4, "add_remove", unit="user"), steps=3),
    ),
    "UserClippedSGD, exact": (
        dp.UserClippedSGD,
        clipped_users(budget=PEOPLE, steps=2, secure="exact"),
    ),
    "UserClippedSGD, fixed": (
        dp.UserClippedSGD,
        clipped_users(budget=PEOPLE, steps=2, sampling="fixed"),
    ),
    "UserClippedSGD, shuffled": (
        dp.UserClippedSGD,
        clipped_users(budget=PEOPLE, epochs=2, sampling="shuffled"),
    ),
    "UserClippedSGD, all": (
        dp.UserClippedSGD,
        clipped_users(budget=PEOPLE, steps=2, batch_size=None, dim=DIM + 1),
    ),
    "UserClippedSGD, noise": (
        dp.UserClippedSGD,
        clipped_users(noise_multiplier=3.0, steps=3, adjacency="zero_out", min_items=2),
    ),
    "UserFilteredSGD": (dp.UserFilteredSGD, filtered_users()),
    "UserFilteredSGD, promises": (
        dp.UserFilteredSGD,
        filtered_users(
            problem=dp.Problem(lipschitz=1.0, radius=2.0),
            lr=None,
            steps=None,
            max_steps=5,
            dim=DIM + 1,
        ),
    ),
    "UserFilteredSGD, noise": (
        dp.UserFilteredSGD,
        lambda: user_runs.filtered_plan(filtered_users()().filter, 0.1, average="last"),
    ),
    "LocalizedUserSGD": (dp.LocalizedUserSGD, localized_users()),
    "LocalizedUserSGD, noise": (
        dp.LocalizedUserSGD,
        lambda: user_runs.localized_plan(user_runs.Phases(localized_users()().phases, 2500)),
    ),
    "ClippedSGD": (dp.ClippedSGD, heavy(dp.ClippedSGD, steps=4)),
    "ClippedSGD, theory": (dp.ClippedSGD, heavy(dp.ClippedSGD, problem=MOMENTS, clip=None)),
    "ClippedSGD, noise": (
        dp.ClippedSGD,
        lambda: dp.ClippedSGD.plan(
            n=N, clip=1.0, noise_multiplier=5.0, steps=3, lr=0.1, batch_size=16
        ),
    ),
    "ClippedSGD, add_remove": (dp.ClippedSGD, heavy(dp.ClippedSGD, ADDED, steps=4)),
    "ClippedSGD, assigned": (
        dp.ClippedSGD,
        heavy(dp.ClippedSGD, sampling="assigned", steps=4, average="uniform"),
    ),
    "ClippedSGD, pilot": (dp.ClippedSGD, heavy(dp.ClippedSGD, clip=PILOT, steps=4)),
    "ClippedSGD, exact": (
        dp.ClippedSGD,
        heavy(dp.ClippedSGD, clip=PILOT, steps=4, secure="exact"),
    ),
    "ClippedSGD, poisson": (
        dp.ClippedSGD,
        heavy(dp.ClippedSGD, ADDED, sampling="poisson", batch_size=16, epochs=1),
    ),
    "ClippedSGD, shuffled": (
        dp.ClippedSGD,
        heavy(dp.ClippedSGD, sampling="shuffled", batch_size=16, epochs=2),
    ),
    "ClippedSGD, fixed": (
        dp.ClippedSGD,
        heavy(dp.ClippedSGD, clip=PILOT, sampling="fixed", batch_size=8, epochs=1),
    ),
    "ClippedSGD, full": (dp.ClippedSGD, heavy(dp.ClippedSGD, sampling="full", steps=3)),
    "AcceleratedSGD": (dp.AcceleratedSGD, heavy(dp.AcceleratedSGD, steps=4)),
    "AcceleratedSGD, zero_out": (
        dp.AcceleratedSGD,
        heavy(dp.AcceleratedSGD, dp.Budget(2.0, 1e-4, "zero_out"), clip=PILOT, steps=3),
    ),
    "ProximalSGD": (dp.ProximalSGD, heavy(dp.ProximalSGD, steps=4, secure="exact")),
    "LocalizedSGD": (dp.LocalizedSGD, localized()),
    "LocalizedSGD, pilots": (dp.LocalizedSGD, localized(clip=PILOT)),
    "LocalizedSGD, exact": (dp.LocalizedSGD, localized(sampling="poisson", secure="exact")),
    "LocalizedSGD, phases": (
        dp.LocalizedSGD,
        lambda: dp.LocalizedSGD.plan(n=N, phases=localized()().localized),
    ),
}


def run(cls: type[dp.PrivateOptimizer], plan: StepPlan) -> dp.PrivateOptimizer:
    model = dp.attach(nn.Linear(DIM, 1), loss_reduction="sum")
    optimizer = cls(model.parameters(), plan)
    rows, users = torch.randn(plan.n, DIM), None
    if plan.unit == "user":
        rows, users = (
            1.0 + 0.02 * rows,
            torch.arange(plan.n),
        )  # who agree: a filter that halts shows nothing
    data = TensorDataset(rows, torch.ones(plan.n, 1))
    for x, y, *_ in optimizer.loader(data, users, steps=plan.steps):
        optimizer.zero_grad()
        LOSS(model(x), y, reduction="sum").backward()
        optimizer.step()
    optimizer.finalize()
    assert optimizer.steps == plan.steps
    return optimizer


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("name", MADE)
def test_a_plan_that_was_saved_runs_and_spends_what_it_said(name: str) -> None:
    cls, make = MADE[name]
    plan = make()
    loaded = Plan.from_dict(json.loads(json.dumps(plan.to_dict(), allow_nan=False)))
    assert loaded == plan
    assert type(loaded).from_dict(plan.to_dict()) == plan
    optimizer = run(cls, loaded)
    delta = 1e-4
    assert optimizer.report(delta).epsilon == plan.epsilon(delta)
    if plan.budget is not None:
        assert plan.epsilon() <= plan.budget.epsilon


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    "name",
    [
        *(
            "HolderSGD, fixed",
            "CorrelatedSGD",
            "NetSGD",
            "UserClippedSGD, noise",
            "UserFilteredSGD, noise",
        ),
        *("ClippedSGD, pilot", "AcceleratedSGD", "LocalizedSGD, pilots"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_an_edited_plan_is_refused_or_charges_what_it_draws(name: str) -> None:
    """A run is charged step by step for what its oracle draws; the plan has said no less, and the budget holds."""
    cls, make = MADE[name]
    ran = 0
    for what, saved in edited(make()):
        try:
            plan = Plan.from_dict(saved)
            said = plan.epsilon(1e-4)
            optimizer = run(cls, plan)
        except (ValueError, DpscoError):
            continue
        ran += 1
        assert optimizer.report(1e-4).epsilon <= said, what
        if plan.budget is not None:
            assert plan.epsilon() <= plan.budget.epsilon * (1 + 1e-12), what
    assert ran


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("name", MADE)
def test_a_plan_prints_a_table_in_words(name: str) -> None:
    _, make = MADE[name]
    plan = make()
    lines = str(plan).splitlines()
    assert (
        lines[0]
        == f"{type(plan).__name__}: privacy for one {plan.unit} ({in_words(plan.adjacency)})"
    )
    assert max(map(len, lines)) <= 110
    labels = [line.split()[0] for line in lines[1:] if not line.startswith("   ")]
    assert labels[:4] == ["promise", "epsilon", "batches", "steps"]
    for adjacency in ("add_remove", "zero_out", "replace_one"):
        assert adjacency in str(plan)


FILLED: dict[str, Callable[[nn.Module], tuple[Any, dp.PrivateOptimizer]]] = {
    "HolderSGD": lambda model: planned_and_made(
        model, dp.HolderSGD, holder(budget=ADDED, steps=3)()
    ),
    "HolderSGD, full": lambda model: planned_and_made(
        model, dp.HolderSGD, holder(budget=ADDED, steps=2, sampling="full", batch_size=None)()
    ),
    "one pass": lambda model: planned_and_made(
        model, dp.AcceleratedSGD, heavy(dp.AcceleratedSGD, ADDED, steps=4)()
    ),
    "many passes": lambda model: planned_and_made(
        model,
        dp.ClippedSGD,
        heavy(dp.ClippedSGD, ADDED, sampling="poisson", batch_size=16, steps=3)(),
    ),
}


def planned_and_made(
    model: nn.Module, cls: Any, plan: StepPlan
) -> tuple[Any, dp.PrivateOptimizer]:
    return plan, cls(model.parameters(), plan)


@pytest.mark.cases(10, 2)
@pytest.mark.parametrize("name", FILLED)
@pytest.mark.parametrize("records", [N - 1, N, N + 1])
def test_the_rows_of_a_batch_are_those_that_the_plan_prints(name: str, records: int) -> None:
    plan, optimizer = FILLED[name](dp.attach(nn.Linear(DIM, 1)))
    (rows,) = re.findall(r'steps\),\s+or\s+to\s+(\d+)\s+rows\s+\("slots"\)', str(plan))
    data = TensorDataset(torch.randn(records, DIM), torch.ones(records, 1))
    x, _ = next(iter(optimizer.loader(data)))
    assert len(x) == int(rows)


@pytest.mark.slow
def test_where_the_size_of_a_draw_is_public_nothing_is_filled_up() -> None:
    plan = holder(budget=BUDGET, steps=3, sampling="fixed")()
    assert "filled" not in str(plan)
    optimizer = dp.HolderSGD(dp.attach(nn.Linear(DIM, 1)).parameters(), plan)
    assert optimizer.loader(TensorDataset(torch.randn(N, DIM), torch.ones(N, 1))).slots is None


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("name", [name for name in MADE if "User" in name])
def test_draws_of_users_are_filled_up_under_every_adjacency(name: str) -> None:
    cls, make = MADE[name]
    plan = make()
    optimizer = cls(nn.Linear(DIM, 1).parameters(), plan)
    sampler = make_sampler(plan.design, size=plan.n, steps=plan.steps)
    places = slots_of(optimizer, sampler, isolation=None).capacity
    text = dict(plan.lines())["filled"]
    assert (
        text
        == 'draws are filled up, as their size is private: a little ("rounded"; the first step'
        f' tests sizes, for as long as some 100 steps), or to {places} places for users ("slots")'
    )


@pytest.mark.slow
def test_a_plan_says_what_exact_noise_costs_where_there_is_such() -> None:
    """The figures are those of the table for many parameters, whoever measures it."""
    page = (Path(__file__).parents[2] / "docs" / "performance.md").read_text(encoding="utf-8")
    more = re.findall(r"^\| [\d,]+0,000 \|(?:[^|]+ ns \|){4} ([\d.]+) \[", page, re.MULTILINE)
    assert len(more) == 3
    for text, chosen in (
        (str(holder(budget=BUDGET, steps=3)()), "on request"),
        (str(MADE["HolderSGD, exact"][1]()), "chosen"),
    ):
        (said,) = re.findall(
            rf"exact noise {chosen}, by secure='exact': up to (\d+) times the noise's time", text
        )
        assert int(said) == math.ceil(max(map(float, more)))
    silent = dp.HolderSGD.plan(
        problem=PROBLEM, n=40, noise_multiplier=0.0, batch_size=4, steps=3
    )
    assert "exact noise" not in str(silent)  # nothing to draw


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torch_dpsco.errors.UtilityWarning")
def test_a_plan_whose_gradients_start_at_0_prints() -> None:
    plan = dp.HolderSGD.plan(
        problem=replace(LOSS.problem(bound_x=1.0), grad_at_zero=0.0), n=1000, budget=BUDGET
    )
    assert plan.grad_bound == 0
    assert "assumed" in str(plan)
    assert "per coordinate of a mean gradient" not in str(plan)


def test_one_pass_is_no_more() -> None:
    assert holder(noise_multiplier=3.0, sampling="assigned")().steps == 4
    for more in ({"steps": 5}, {"epochs": 2}):
        with pytest.raises(
            ValueError, match=r"steps must be <= 4, one pass of Assigned.* \(got [58]\)"
        ):
            holder(budget=BUDGET, sampling="assigned", **more)()
    with pytest.raises(
        ValueError,
        match="sampling must be one of poisson, fixed, shuffled, assigned, allocated, full",
    ):
        holder(budget=BUDGET, sampling="one-pass")()


def test_a_plan_is_frozen_and_checked() -> None:
    plan = holder(budget=BUDGET)()
    with pytest.raises(FrozenInstanceError):
        plan.lr = 1.0
    with pytest.raises(
        ValueError, match=r"delta must be given: the plan has noise and steps of yours"
    ):
        holder(noise_multiplier=3.0, steps=3)().epsilon()
    with pytest.raises(ConditionError, match="no last step"):
        holder(noise_multiplier=3.0)().event()
    assert "not known beforehand" in str(holder(noise_multiplier=3.0)())


def test_only_what_a_plan_wrote_is_read() -> None:
    row = holder(budget=BUDGET)().to_dict()
    for change in ({"version": 2}, {"type": "Accountant"}, {"lr": -1.0}, {"other": 1}):
        with pytest.raises(ValueError, match="must be"):
            Plan.from_dict(row | change)
    with pytest.raises(ValueError, match="type must be one of"):
        Plan.from_dict(row | {"problem": {"type": "Popen"}})
    own = dp.Problem(exact_grad_bound=lambda radius: 1.0)
    with pytest.raises(
        ValueError, match="a plan is saved with values of the library, and losses"
    ):
        holder(problem=own, budget=BUDGET, lr=0.1)().to_dict()


@pytest.mark.parametrize("name", sorted({cls.__name__ for cls, _ in MADE.values()}))
def test_numbers_of_a_plan_given_to_the_optimizer_are_sent_to_the_plan(name: str) -> None:
    params, cls = nn.Linear(DIM, 1).parameters(), getattr(dp, name)
    with pytest.raises(ValueError, match=rf"lr, problem must be given to {name}.plan\(...\)"):
        cls(params, lr=0.1, problem=PROBLEM)
    with pytest.raises(
        ValueError, match=rf"plan must be made by {name}.plan\(...\): .* \(got 0.1\)"
    ):
        cls(params, 0.1)


def test_a_plan_is_run_by_its_own_class() -> None:
    plan = MADE["AcceleratedSGD"][1]()
    with pytest.raises(ValueError, match=r"plan must be made by ClippedSGD\.plan"):
        dp.ClippedSGD(nn.Linear(DIM, 1).parameters(), plan)


def test_an_accountant_of_another_budget_is_refused_by_the_plan() -> None:
    with pytest.raises(AdjacencyError, match="accountant must have the budget"):
        dp.HolderSGD(
            nn.Linear(DIM, 1).parameters(),
            holder(budget=BUDGET)(),
            accountant=dp.Accountant(dp.Budget(1.0, 1e-4)),
        )
