"""`plan` of the filtered optimizers: numbers of the theory, budgets kept, wrong inputs named."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from torch_dpsco.algorithms.user_numbers import (
    UserPhases,
    calibrate_filter,
    pair_radius_iid,
    schedule,
    suited,
)
from torch_dpsco.errors import (
    AdjacencyError,
    InfeasibleError,
    MissingConstantError,
    UnitError,
)
from torch_dpsco.prox import Ball, Identity

USERS, ITEMS, DIM = 600, 2, 3
EPSILON, DELTA = 4.0, 1e-4
BUDGET = dp.Budget(EPSILON, DELTA, unit="user")
ADDED = dp.Budget(EPSILON, DELTA, adjacency="add_remove", unit="user")
PROBLEM = dp.Problem(lipschitz=2.0, radius=1.5)
FIXED = {
    "dim": DIM,
    "n": USERS,
    "budget": BUDGET,
    "pair_radius": 0.5,
    "steps": 4,
    "lr": 0.1,
}


class Linear(nn.Linear):
    def __init__(self) -> None:
        super().__init__(DIM, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(self.weight)


def data(spread: float = 0.1) -> tuple[TensorDataset, Tensor]:
    """Records whose gradients are near (1, 0, 0) and users who agree."""
    torch.manual_seed(0)
    x = torch.randn(USERS * ITEMS, DIM, dtype=torch.float64) * spread / math.sqrt(DIM)
    x[:, 0] -= 1.0
    return TensorDataset(x, x), torch.arange(USERS * ITEMS) % USERS


def train(optimizer: Any, model: nn.Module) -> None:
    dataset, users = data()
    for x, _, ids in optimizer.loader(dataset, users=users):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step(users=ids)
    optimizer.finalize()


def model() -> nn.Module:
    return dp.attach(Linear(), loss_reduction="sum")


def planned(**changes: Any) -> tuple[nn.Module, Any]:
    made = model()
    own = {name: changes.pop(name) for name in {"prox", "reg", "accountant"} & changes.keys()}
    return made, dp.UserFilteredSGD(
        made.parameters(), dp.UserFilteredSGD.plan(**{**FIXED, **changes}), **own
    )


# -- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_plan_with_given_steps_is_that_of_the_theory() -> None:
    made = dp.UserFilteredSGD.plan(**FIXED)
    expected = calibrate_filter(
        n_users=USERS,
        steps=4,
        epsilon=EPSILON,
        delta=DELTA,
        pair_radius=0.5,
        halt_probability=0.01,
    )
    assert (made.filter, made.lr, made.risk_bound) == (expected, 0.1, None)


@pytest.mark.slow
def test_promises_choose_radius_steps_and_step_size() -> None:
    made = dp.UserFilteredSGD.plan(
        n=USERS, budget=BUDGET, dim=DIM, problem=PROBLEM, min_items=ITEMS, max_steps=30
    )
    radius = pair_radius_iid(2.0, ITEMS, USERS, 0.01 / 30)
    task = {"n_users": USERS, "epsilon": EPSILON, "delta": DELTA, "pair_radius": radius}
    expected = suited(
        lambda steps: calibrate_filter(steps=steps, **task), 2.0, USERS * ITEMS, DIM, 30
    )
    noise = expected.noise_std / math.sqrt(expected.steps)
    best = schedule(2.0, 3.0, USERS * ITEMS, expected.steps, DIM, noise)
    assert (made.filter, made.lr, made.risk_bound) == (expected, best.lr, best.bound)


def test_a_step_size_alone_is_chosen_too() -> None:
    made = dp.UserFilteredSGD.plan(
        problem=dp.Problem(lipschitz=2.0), distance=3.0, **{**FIXED, "lr": None}, min_items=ITEMS
    )
    noise = made.filter.noise_std / 2
    assert (made.lr, made.risk_bound) == schedule(2.0, 3.0, USERS * ITEMS, 4, DIM, noise)


@pytest.mark.slow
def test_more_promised_rows_per_user_need_less_noise() -> None:
    noises = [
        dp.UserFilteredSGD.plan(
            n=USERS,
            budget=BUDGET,
            dim=DIM,
            problem=PROBLEM,
            min_items=items,
            steps=4,
            lr=0.1,
        ).filter.noise_std
        for items in (200, 800)
    ]
    assert noises[1] == pytest.approx(noises[0] / 2, rel=1e-9)


@pytest.mark.weekly
def test_a_localized_plan_has_the_convexity_of_loss_and_regularizer() -> None:
    numbers: dict[str, Any] = {
        "n": 4000,
        "budget": BUDGET,
        "dim": DIM,
        "pair_radius": 0.5,
        "max_steps": 5,
    }
    made = dp.LocalizedUserSGD.plan(
        problem=dp.Problem(lipschitz=2.0, radius=1.5, strong_convexity=0.2), reg=0.3, **numbers
    )
    expected = UserPhases(
        n_users=4000, items_per_user=1, dim=DIM, epsilon=EPSILON, delta=DELTA, lipschitz=2.0 + 0.3 * 1.5,
        strong_convexity=0.5, radius=3.0, pair_radius=0.5, max_steps=5,
    ).planned()  # fmt: skip
    assert (made.phases, made.n, made.risk_bound) == (expected, 4000, expected[-1].bound)
    assert (len(made.phases) > 1, made.reg) == (True, 0.3)
    nearer = dp.LocalizedUserSGD.plan(problem=PROBLEM, reg=0.3, distance=0.5, **numbers)
    assert nearer.phases[0].lr == pytest.approx(made.phases[0].lr / 6)


# -- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_calibrated_run_ends_within_its_budget_and_moves() -> None:
    made, optimizer = planned(average="last")
    train(optimizer, made)
    spent = optimizer.report().figures
    assert 0.8 * EPSILON < spent.epsilon <= EPSILON
    assert (spent.unit, optimizer.halted) == ("user", False)
    weight = made.weight.detach()[0]
    assert float(weight[0]) == pytest.approx(
        0.4, abs=0.2
    )  # 4 steps of 0.1 along a mean of length 1


@pytest.mark.slow
def test_a_regularizer_is_added_after_the_noise() -> None:
    made, optimizer = planned(reg=50.0, average="last", lr=0.01)
    train(optimizer, made)
    assert (
        float(made.weight[0, 0].detach()) < 1.2 / 50 * 3
    )  # without it 0.04; with it the fixed point is 1/50
    assert optimizer.reg == 50.0


@pytest.mark.slow
def test_a_localized_run_ends_within_its_budget() -> None:
    made = model()
    plan = dp.LocalizedUserSGD.plan(
        n=USERS,
        budget=BUDGET,
        problem=PROBLEM,
        reg=0.5,
        pair_radius=0.5,
        max_steps=3,
        phases=1,
        dim=made,
    )
    optimizer = dp.LocalizedUserSGD(made.parameters(), plan)
    train(optimizer, made)
    assert optimizer.report().epsilon <= EPSILON
    assert (optimizer.reg, optimizer.prox) == (0.5, Ball(1.5))


@pytest.mark.slow
def test_iterates_stay_in_the_promised_ball_unless_another_set_is_given() -> None:
    assert planned(problem=PROBLEM)[1].prox == Ball(1.5)
    assert planned(problem=PROBLEM, prox=Identity())[1].prox == Identity()
    assert isinstance(planned()[1].prox, Identity)


# -- wrong inputs -----------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "unit": ({"budget": dp.Budget(4.0, 1e-4, unit="example")}, UnitError, "unit 'user'"),
    "zero-out": (
        {"budget": dp.Budget(4.0, 1e-4, adjacency="zero_out", unit="user")},
        AdjacencyError,
        "replace_one",
    ),
    "add-remove": (
        {"budget": ADDED},
        AdjacencyError,
        "budget must be of replace_one, or use UserClippedSGD",
    ),
    "no-radius": ({"pair_radius": None}, MissingConstantError, "pair_radius must be given"),
    "no-lr": ({"lr": None}, MissingConstantError, "lr must be given"),
    "no-scale": (
        {"lr": None, "problem": dp.Problem(lipschitz=1.0)},
        MissingConstantError,
        "distance=",
    ),
    "few-users": (
        {"n": 20},
        InfeasibleError,
        "n=20.*smallest n that works is",
    ),
    "accountant": (
        {"accountant": dp.Accountant(dp.Budget(1.0, 1e-4, unit="user"))},
        AdjacencyError,
        "the budget",
    ),
}


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize("name", list(REFUSED))
def test_wrong_inputs_are_named(name: str) -> None:
    changes, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        planned(**changes)


@pytest.mark.cases(5, 2)
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"budget": ADDED}, AdjacencyError, "replace_one"),
        ({"budget": dp.Budget(1.0, 1e-4, unit="example")}, UnitError, "unit 'user'"),
        ({"reg": 0.0}, MissingConstantError, "give reg="),
        ({"problem": dp.Problem(lipschitz=1.0)}, MissingConstantError, "radius"),
        ({"problem": dp.Problem(radius=1.0)}, MissingConstantError, "lipschitz"),
        ({"reg": -1.0}, ValueError, "reg must be >= 0"),
        ({"n": 60, "phases": 3}, InfeasibleError, "phase 1 of 3"),
    ],
)
def test_wrong_inputs_of_phases_are_named(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    numbers = {
        "n": USERS,
        "budget": BUDGET,
        "problem": PROBLEM,
        "reg": 0.5,
        "pair_radius": 0.5,
        "dim": DIM,
    }
    with pytest.raises(error, match=message):
        dp.LocalizedUserSGD.plan(**{**numbers, **changes})


@pytest.mark.parametrize(
    ("cls", "old"),
    [
        (
            dp.UserClippedSGD,
            {"lr": 0.1, "clip": 1.0, "noise_multiplier": 1.0, "batch_size": 5, "n": 10},
        ),
        (dp.UserFilteredSGD, {"lr": 0.1}),
    ],
)
def test_numbers_of_a_plan_given_to_the_optimizer_are_sent_to_the_plan(
    cls: Any, old: dict[str, Any]
) -> None:
    params, name = model().parameters(), cls.__name__
    with pytest.raises(
        ValueError, match=rf"{', '.join(old)} must be given to {name}.plan\(...\)"
    ):
        cls(params, **old)


def test_the_step_size_or_steps_are_chosen_for_a_number_of_parameters() -> None:
    for free in ("lr", "steps"):
        with pytest.raises(MissingConstantError, match=f"dim must be .* to choose {free}"):
            dp.UserFilteredSGD.plan(**{**FIXED, "dim": None, "problem": PROBLEM, free: None})
