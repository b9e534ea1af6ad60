"""Rows in private units, for loops: what is charged, what a record or user moves, and what the model gets back.

Why it matters for privacy: units are released beside the steps. They must be charged before they are drawn, and all
rows of a user must weigh as much as one record.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import torch_dpsco as dp
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.events import GDP
from torch_dpsco.algorithms.prepared import PreparedPlan, standardize, with_measurements
from torch_dpsco.errors import (
    BudgetExceeded,
    ConditionError,
    MissingConstantError,
    SequenceError,
    UnitError,
)
from torch_dpsco.estimators import preparation
from torch_dpsco.estimators.preparation import PrivatePreparation
from torch_dpsco.estimators.records import Records

DIM, BOUND = 3, 2.0
LOSS = dp.losses.Logistic()


def table(n: int = 3000, seed: int = 0) -> TensorDataset:
    """Rows far from 0 and close to each other."""
    drawn = torch.randn(n, DIM, generator=torch.Generator().manual_seed(seed))
    rows = torch.tensor([1.0, 0.8, 0.6]) + 0.1 * drawn
    return TensorDataset(rows, torch.where(drawn[:, :1] > 0, 1.0, -1.0))


def plan_of(
    n: int = 3000, adjacency: str = "add_remove", unit: str = "example", **given: Any
) -> PreparedPlan:
    budget = dp.Budget(given.pop("epsilon", 1.0), 1e-6, adjacency=adjacency, unit=unit)
    given = {"n": n, "budget": budget, "dim": DIM + 1} | given
    if unit == "user":
        return dp.UserClippedSGD.plan(**{"bound_x": BOUND} | given)
    given = {"prepare": "auto"} | given
    return dp.HolderSGD.plan(problem=LOSS.problem(bound_x=BOUND, intercept=True), **given)


def made(plan: PreparedPlan, accountant: Accountant | None = None) -> tuple[nn.Linear, Any]:
    torch.manual_seed(0)
    model = nn.Linear(DIM, 1)
    kind = dp.UserClippedSGD if plan.unit == "user" else dp.HolderSGD
    return model, kind(model.parameters(), plan, accountant=accountant)


# -- what is charged --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0.3, 3.0])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"sampling": "full"},
        {"sampling": "assigned"},
        {"sampling": "fixed", "adjacency": "replace_one"},
        {"unit": "user"},
        {"unit": "user", "adjacency": "replace_one", "sampling": "fixed", "batch_size": 1500},
    ],
)
def test_a_plan_that_measures_is_within_its_budget(
    given: dict[str, Any], epsilon: float
) -> None:
    plan = plan_of(epsilon=epsilon, **given)
    assert plan.prepare is not None
    assert 0.97 * epsilon < plan.epsilon() <= epsilon


def test_noise_is_raised_until_both_fit_the_budget() -> None:
    plan = plan_of()
    assert plan.prepare is not None
    quiet = replace(plan, noise_multiplier=plan.noise_multiplier / 1.05, prepare=None)
    found = with_measurements(quiet, plan.budget, plan.prepare)
    less = replace(found, noise_multiplier=found.noise_multiplier / 1.01)
    assert found.epsilon() <= 1.0 < less.epsilon()


@pytest.mark.parametrize("unit", ["example", "user"])
def test_a_plan_charges_what_it_measures(unit: str) -> None:
    plan = plan_of(unit=unit, sampling="full", steps=40)
    model, optimizer = made(plan)
    users = {"users": torch.arange(3000)} if unit == "user" else {}
    dp.fit(model, optimizer, table(), LOSS, progress=False, **users)
    assert plan.prepare is not None
    assert GDP(plan.prepare.level, ("add_remove",)) in optimizer.accountant.ledger.distinct
    assert len(optimizer.accountant) == 41
    assert optimizer.accountant.get_epsilon(1e-6) == pytest.approx(plan.epsilon(), rel=1e-9)
    assert plan.epsilon() > replace(plan, prepare=None).epsilon()


def test_units_are_charged_before_they_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer = made(plan_of())
    seen = []

    def measure(self: PrivatePreparation, *args: Any) -> Any:
        seen.append(len(optimizer.accountant))
        return known(self, *args)

    known = PrivatePreparation.measure
    monkeypatch.setattr(PrivatePreparation, "measure", measure)
    standardize(optimizer, table())
    assert seen == [1]
    standardize(optimizer, table())  # what is known costs nothing
    assert seen == [1]
    assert len(optimizer.accountant) == 1


def test_a_ledger_without_room_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrivatePreparation, "measure", lambda *args: pytest.fail("drawn"))
    plan = plan_of()
    ledger = Accountant(dp.Budget(1.0, 1e-6, adjacency="add_remove"))
    _, first = made(plan, ledger)
    _, second = made(plan, ledger)  # two runs do not fit
    for optimizer in (first, second):
        with pytest.raises(BudgetExceeded):
            standardize(optimizer, table())
    assert len(ledger) == 0


# -- what a record or a user moves ------------------------------------------------------------------------------------


def released_sums(
    monkeypatch: pytest.MonkeyPatch,
    plan: PreparedPlan,
    rows: Tensor,
    users: Tensor | None,
) -> list[Tensor]:
    """Returns every sum before its noise, where what is released is the same whatever the rows are."""
    sums: list[Tensor] = []
    known = Records.sum

    def noted(self: Records, of: Any) -> tuple[Tensor, ...]:
        found = known(self, of)
        sums.append(found[0].clone())
        return found

    def noise(size: int, std: float, source: Any) -> Tensor:
        wanted = torch.full((size,), 20.0 + 15 * (-1) ** len(sums), dtype=torch.float64)
        assert plan.prepare is not None
        assert std > 0.9 / plan.prepare.level  # each draw has noise
        return wanted - sums[-1]

    with monkeypatch.context() as patch:
        patch.setattr(Records, "sum", noted)
        patch.setattr(preparation, "gaussian_vector", noise)
        _, optimizer = made(plan)
        targets = torch.ones(len(rows), 1)
        standardize(optimizer, TensorDataset(rows, targets), users)
    return sums


FAR = [1e9, -1e9, 1e-30, 1.0, math.inf, math.nan]


@pytest.mark.parametrize("value", FAR)
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_a_user_moves_units_as_much_as_one_record(
    adjacency: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(unit="user", adjacency=adjacency)
    base = table(60).tensors[0]
    ids = torch.arange(60) // 3
    many = torch.full((200, DIM), value)
    theirs = torch.cat([ids, torch.full((200,), 20)])
    first = released_sums(monkeypatch, plan, torch.cat([base, many]), theirs)
    if adjacency == "add_remove":
        second = released_sums(monkeypatch, plan, base, ids)
    else:
        second = released_sums(monkeypatch, plan, torch.cat([base, -many]), theirs)
    moved = [float((one - other).norm()) for one, other in zip(first, second, strict=True)]
    most = 2.0 if adjacency == "replace_one" else 1.0
    assert len(moved) == 9  # number, center, seven counts
    assert moved.pop(1) <= most + 1e-9
    assert max(moved) <= 1.0 + 1e-9


def test_users_are_named_where_they_are_protected() -> None:
    data = table()
    for unit, users in (("user", None), ("example", torch.arange(3000))):
        _, optimizer = made(plan_of(unit=unit))
        with pytest.raises(UnitError, match="users must be given"):
            standardize(optimizer, data, users)
        assert len(optimizer.accountant) == 0


@pytest.mark.parametrize("value", FAR)
def test_a_record_moves_units_by_at_most_one(
    value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = table(60).tensors[0]
    plan = plan_of()
    first = released_sums(
        monkeypatch, plan, torch.cat([base, torch.full((1, DIM), value)]), None
    )
    second = released_sums(monkeypatch, plan, base, None)
    assert all(float((a - b).norm()) <= 1 + 1e-9 for a, b in zip(first, second, strict=True))


def test_prepared_rows_are_within_their_length_whatever_was_released() -> None:
    plan = plan_of()
    _, optimizer = made(plan)
    rows = torch.tensor(FAR[:4]).unsqueeze(1).repeat(1, DIM)
    odd = preparation.Preparation(
        plan.length, center=(9.0, -9.0, 0.0), scale=(1e-6,) * DIM, before=BOUND
    )
    found = standardize(optimizer, TensorDataset(rows, torch.ones(4, 1)), units=odd)
    images = found.dataset[:][0]
    assert images.norm(dim=1).max() <= plan.length * (1 + 1e-6)
    assert len(optimizer.accountant) == 0  # units of a run before cost nothing again


# -- what the model gets back -----------------------------------------------------------------------------------------


def test_a_fitted_model_takes_raw_rows() -> None:
    data = table()
    model, optimizer = made(plan_of())
    dp.fit(model, optimizer, data, LOSS, progress=False)
    rows, targets = data.tensors
    right = ((model(rows) > 0) == (targets > 0)).double().mean()
    assert right > 0.9  # raw, they are hidden by the distance of all rows from 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_units_are_undone_in_the_weights(dtype: torch.dtype) -> None:
    data = TensorDataset(*(values.to(dtype) for values in table().tensors))
    _, optimizer = made(plan_of())
    found = standardize(optimizer, data)
    layer = nn.Linear(DIM, 2).to(dtype)
    inside = found.dataset[:][0].norm(dim=1) < dp.HolderSGD.plans.length * 0.999
    before = layer(found.dataset[:][0])[inside]
    found.undo(layer)
    assert inside.double().mean() > 0.5
    assert torch.allclose(layer(data.tensors[0])[inside], before, atol=1e-4)


def test_nothing_is_measured_where_it_does_not_pay() -> None:
    data = table(40)
    plan = plan_of(40)
    assert plan.prepare is None
    model, optimizer = made(plan)
    assert standardize(optimizer, data).dataset is data
    assert len(optimizer.accountant) == 0
    dp.fit(model, optimizer, data, LOSS, progress=False)


def test_a_loop_on_raw_rows_is_refused() -> None:
    model, optimizer = made(plan_of())
    with pytest.raises(SequenceError, match="standardize"):
        optimizer.loader(table())
    found = standardize(optimizer, table())
    dp.attach(model)
    for x, y in optimizer.loader(found.dataset, steps=1):
        optimizer.zero_grad()
        LOSS(model(x), y).backward()
        optimizer.step()
    assert optimizer.steps == 1


class _Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 3000

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return torch.ones(DIM), torch.ones(1)


def test_what_cannot_be_prepared_is_refused_before_anything_is_spent() -> None:
    model, optimizer = made(plan_of())
    with pytest.raises(ValueError, match="steps"):
        dp.fit(model, optimizer, table(), LOSS, progress=False, steps=2)
    with pytest.raises(ConditionError, match="TensorDataset"):
        dp.fit(model, optimizer, _Rows(), LOSS, progress=False)
    net = nn.Sequential(model)
    with pytest.raises(ConditionError, match=r"nn\.Linear with a bias"):
        dp.fit(net, optimizer, table(), LOSS, progress=False)
    assert len(optimizer.accountant) == 0


@pytest.mark.parametrize(
    "given",
    [
        {"dim": None},
        {"noise_multiplier": 3.0},
        {"unit": "user", "dim": None},
        {"unit": "user", "noise_multiplier": 3.0, "clip": 1.0, "lr": 0.1, "steps": 5},
    ],
)
def test_a_plan_that_measures_needs_public_numbers(given: dict[str, Any]) -> None:
    with pytest.raises(MissingConstantError, match="prepare='auto'"):
        plan_of(**given)


def test_users_with_a_bound_on_rows_are_measured_and_others_are_not() -> None:
    plan, raw = plan_of(unit="user"), plan_of(unit="user", bound_x=None)
    assert plan.prepare is not None
    assert plan == plan_of(unit="user", prepare="auto")
    assert (raw.prepare, plan.clip, raw.clip) == (None, pytest.approx(0.3), 0.03)
    assert plan_of(unit="user", bound_x=None, prepare=None) == raw
    assert plan_of(unit="user", clip=0.7).clip == 0.7
    with pytest.raises(ValueError, match="bound_x must be left out beside prepare=None"):
        plan_of(unit="user", prepare=None)
    with pytest.raises(ValueError, match="prepare must be one of auto, None"):
        plan_of(unit="user", prepare="always")


def test_the_search_starts_longer_where_votes_tell_a_high_quantile() -> None:
    plans = [plan_of(n=n, unit="user") for n in (500, 700, 900, 1_200, 3_000)]
    assert all(plan.prepare for plan in plans)
    starts = [plan.clip for plan in plans]
    assert starts == sorted(starts)
    assert (starts[0], starts[-1]) == (pytest.approx(0.03), pytest.approx(0.3))
    assert 0.04 < starts[2] < 0.29


def test_few_users_are_not_measured_and_keep_the_start_of_raw_rows() -> None:
    plan = plan_of(n=100, epsilon=0.3, unit="user")
    assert (plan.prepare, plan.clip) == (None, 0.03)
    assert plan == plan_of(n=100, epsilon=0.3, unit="user", bound_x=None)


def test_a_ball_in_raw_units_is_refused() -> None:
    problem = LOSS.problem(bound_x=BOUND, radius=3.0)
    with pytest.raises(ConditionError, match="radius"):
        dp.HolderSGD.plan(
            problem=problem, n=3000, epsilon=1.0, delta=1e-6, dim=4, prepare="auto"
        )


@pytest.mark.parametrize("unit", ["example", "user"])
def test_exact_noise_of_units_is_refused(unit: str) -> None:
    with pytest.raises(ConditionError, match="secure must be None"):
        plan_of(unit=unit, secure="exact")
    assert replace(plan_of(unit=unit), prepare=None, secure="exact").secure == "exact"


def test_a_plan_that_measures_is_saved_and_says_so() -> None:
    for unit in ("example", "user"):
        plan = plan_of(unit=unit)
        assert type(plan).from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
        assert "the center of rows" in str(plan)


def test_several_classes_are_measured_as_one_score_is_and_units_are_undone_in_all_of_them() -> (
    None
):
    """The center is that of rows: its share of the budget is of the parameters of one class."""
    loss = dp.losses.SoftmaxCrossEntropy(num_classes=3)
    net = nn.Linear(DIM, 3)
    plan = dp.HolderSGD.plan(
        problem=loss.problem(bound_x=BOUND, intercept=True),
        n=3000,
        budget=dp.Budget(1.0, 1e-6, adjacency="add_remove"),
        dim=net,
        prepare="auto",
    )
    assert plan.prepare == plan_of(dim=DIM + 1).prepare
    assert plan.epsilon(1e-6) <= 1.0
    draws = torch.Generator().manual_seed(2)
    rows = torch.rand(3000, DIM, generator=draws) * 0.3 + 0.4
    data = TensorDataset(rows, torch.randint(3, (3000,), generator=draws))
    optimizer = dp.HolderSGD(net.parameters(), plan)
    prepared = dp.standardize(optimizer, data)
    assert len(optimizer.accountant) == 1
    whole = prepared.dataset.tensors[0]
    before = net(whole)
    kept = whole.norm(dim=1) < plan.length * (1 - 1e-6)
    prepared.undo(net)
    assert int(kept.sum()) > 2000
    torch.testing.assert_close(net(rows)[kept], before[kept], rtol=1e-4, atol=1e-4)


def test_several_classes_learn_more_from_prepared_rows() -> None:
    """3 classes far from 0, raw rows in, accuracy of 3 fits: 0.98 (0.005 each) with, and 0.86 (0.15) without."""
    loss, right = dp.losses.SoftmaxCrossEntropy(num_classes=3), []
    for seed in range(3):
        draws = torch.Generator().manual_seed(seed)
        labels = torch.randint(3, (3000,), generator=draws)
        rows = 0.5 + 0.04 * torch.eye(3)[labels] + 0.01 * torch.randn(3000, 3, generator=draws)
        net = nn.Linear(3, 3)
        plan = dp.HolderSGD.plan(
            problem=loss.problem(bound_x=1.5, intercept=True),
            n=3000,
            epsilon=0.5,
            delta=1e-6,
            dim=net,
            prepare="auto",
        )
        optimizer = dp.HolderSGD(net.parameters(), plan)
        dp.fit(net, optimizer, TensorDataset(rows, labels), loss, progress=False)
        right.append(float((net(rows).argmax(1) == labels).double().mean()))
    assert sum(right) / 3 > 0.95
