"""Plans of optimizers that release their answer alone: printed, saved, loaded and run."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from tests.edited_plans import edited
from torch_dpsco.accounting.events import Gaussian, KNorm, in_words
from torch_dpsco.algorithms import row_free
from torch_dpsco.algorithms.holder_numbers import path_sensitivity
from torch_dpsco.algorithms.output_sgd import RowFreePlan
from torch_dpsco.algorithms.output_sgd_numbers import (
    HIT_CONSTANTS,
    bolt_on_sensitivity,
    output_path,
)
from torch_dpsco.algorithms.row_free import RowFreeOptimizer
from torch_dpsco.errors import DpscoError
from torch_dpsco.step.plan import Plan

N, DIM, BUDGET = 64, 3, dp.Budget(2.0, 1e-4)
HINGE, LOGISTIC = dp.losses.Hinge(power=1.5), dp.losses.Logistic()
ZEROED, PURE = dp.Budget(2.0, 1e-4, "zero_out"), dp.Budget(2.0, 0.0)


def holder(**kind: Any) -> Callable[[], RowFreePlan]:
    problem = HINGE.problem(bound_x=2.0, radius=50.0)
    return lambda: dp.HolderOutputSGD.plan(
        **{"problem": problem, "n": N, "dim": DIM + 1, "batch_size": 16, "lr": 0.01, "epochs": 1}
        | kind
    )


def bolt_on(**kind: Any) -> Callable[[], RowFreePlan]:
    problem = LOGISTIC.problem(bound_x=2.0)
    return lambda: dp.BoltOnPSGD.plan(
        **{"problem": problem, "n": N, "dim": DIM + 1, "batch_size": 16, "lr": 0.1} | kind
    )


MADE: dict[str, Callable[[], RowFreePlan]] = {
    "HolderOutputSGD": holder(budget=BUDGET),
    "HolderOutputSGD, zero_out": holder(budget=ZEROED, epochs=2),
    "HolderOutputSGD, exact": holder(budget=BUDGET, secure="exact"),
    "HolderOutputSGD, noise": holder(
        noise_multiplier=3.0, adjacency="zero_out", lr=[0.1, 0.1, 0.05, 0.05]
    ),
    "HolderOutputSGD, noise within a budget": holder(budget=BUDGET, noise_multiplier=3.0),
    "BoltOnPSGD": bolt_on(budget=BUDGET),
    "BoltOnPSGD, zero_out": bolt_on(budget=ZEROED, epochs=2, average="weighted"),
    "BoltOnPSGD, exact": bolt_on(budget=BUDGET, secure="exact", reg=0.1),
    "BoltOnPSGD, pure": bolt_on(budget=PURE, reg=0.1, lr=None, epochs=3),
    "BoltOnPSGD, noise": bolt_on(noise_multiplier=3.0, average="last"),
}
pytestmark = pytest.mark.filterwarnings("ignore:noise buries the signal")


def run(plan: RowFreePlan) -> RowFreeOptimizer:
    cls, loss = (
        (dp.BoltOnPSGD, LOGISTIC)
        if type(plan) is dp.BoltOnPSGD.plans
        else (dp.HolderOutputSGD, HINGE)
    )
    model = nn.Linear(DIM, 1).double()
    with cls(model.parameters(), plan) as optimizer:
        for x, y in optimizer.loader(TensorDataset(torch.randn(N, DIM), torch.ones(N, 1))):
            loss(model(x), y).backward()
            optimizer.step()
    assert optimizer.steps == plan.steps
    return optimizer


@pytest.mark.cases(3, 1)
@pytest.mark.parametrize("name", MADE)
def test_a_plan_that_was_saved_runs_and_spends_what_it_said(name: str) -> None:
    plan = MADE[name]()
    loaded = Plan.from_dict(json.loads(json.dumps(plan.to_dict(), allow_nan=False)))
    assert loaded == plan
    optimizer = run(loaded)
    assert optimizer.event == plan.event()
    for delta in (1e-4, 0.1):
        assert optimizer.report(delta).figures.epsilon == plan.epsilon(delta)
    if plan.budget is not None:
        assert plan.epsilon() <= plan.budget.epsilon


@pytest.mark.parametrize("name", MADE)
def test_a_plan_prints_a_table_in_words(name: str) -> None:
    plan = MADE[name]()
    lines = str(plan).splitlines()
    assert (
        lines[0]
        == f"{type(plan).__name__}: privacy for one example ({in_words(plan.adjacency)})"
    )
    assert max(map(len, lines)) <= 110
    labels = [line.split()[0] for line in lines[1:] if not line.startswith("   ")]
    assert labels[:6] == ["promise", "epsilon", "batches", "steps", "labels", "noise"]
    assert "assumed" in labels
    assert ("expected" in labels) == (plan.risk_bound is not None)
    gaussian = isinstance(plan.event(), dp.accounting.events.Gaussian)
    assert ("exact noise" in str(plan)) == gaussian
    assert "secret steps" in str(plan)
    assert "add_remove not proved" in str(plan)


@pytest.mark.parametrize("cls", [dp.HolderOutputSGD, dp.BoltOnPSGD])
def test_numbers_of_a_plan_given_to_the_optimizer_are_sent_to_the_plan(cls: Any) -> None:
    params, name = list(nn.Linear(DIM, 1).double().parameters()), cls.__name__
    plan = holder(budget=BUDGET)() if cls is dp.HolderOutputSGD else bolt_on(budget=BUDGET)()
    with pytest.raises(ValueError, match=rf"problem must be given to {name}.plan\(...\)"):
        cls(params, plan=plan, problem=LOGISTIC.problem(bound_x=2.0))
    other = bolt_on(budget=BUDGET)() if cls is dp.HolderOutputSGD else holder(budget=BUDGET)()
    with pytest.raises(ValueError, match=rf"plan must be made by {name}.plan\(...\)"):
        cls(params, other)


def test_a_saved_plan_that_was_edited_is_checked() -> None:
    row = bolt_on(budget=BUDGET)().to_dict()
    for change in (
        {"noise": "none"},
        {"average": "best"},
        {"adjacency": "add_remove"},
        {"noise_scale": -1.0},
    ):
        with pytest.raises(ValueError, match="must be"):
            Plan.from_dict(row | change)
    fixed = {"type": "Fixed", "batch_size": 16, "n": N}
    for change in (
        {"sensitivity": 0.0},
        {"design": fixed},
        {"lr": [0.1, 0.1]},
        {"adjacency": "replace_one"},
    ):
        with pytest.raises(ValueError, match="must be"):
            Plan.from_dict(row | change)
    row = holder(budget=BUDGET)().to_dict()
    with pytest.raises(ValueError, match="must be"):
        Plan.from_dict(row | {"average": "last"})


def answered(
    cls: Any, plan: RowFreePlan, monkeypatch: pytest.MonkeyPatch
) -> tuple[RowFreeOptimizer, float]:
    """Returns an optimizer that has run on rows of 0, and what noise of 1 makes of the first weight: its scale."""
    for draw in ("gaussian_vector", "knorm_vector"):
        monkeypatch.setattr(
            row_free,
            draw,
            lambda size, scale, _: torch.full((size,), scale, dtype=torch.float64),
        )
    monkeypatch.setattr(row_free, "exact_release", lambda value, event, _: value + event.sigma)
    model, loss = nn.Linear(DIM, 1).double(), LOGISTIC if cls is dp.BoltOnPSGD else HINGE
    accountant = None if plan.budget else dp.Accountant(adjacency=plan.adjacency)
    with cls(model.parameters(), plan, accountant=accountant) as optimizer:
        for x, y in optimizer.loader(
            TensorDataset(torch.zeros(plan.n, DIM), torch.ones(plan.n, 1))
        ):
            loss(model(x), y).backward()
            optimizer.step()
    return optimizer, float(model.weight[0, 0])


def moved(cls: Any, optimizer: RowFreeOptimizer, plan: RowFreePlan) -> Any:
    """Returns how far theory says that one record moves what was run."""
    design, hits = optimizer.design, HIT_CONSTANTS[optimizer.adjacency]
    sizes = np.array(np.broadcast_to(optimizer.lrs, optimizer.steps))
    run = {"batch_size": design.batch_size, "hit_constant": hits, "dim": DIM + 1}
    epoch = -(-design.n // design.batch_size)
    if cls is dp.BoltOnPSGD:
        more = {"reg": plan.reg, "average": optimizer.average, "steps_per_epoch": epoch}
        return bolt_on_sensitivity(plan.promises, sizes, **run, **more)
    return path_sensitivity(output_path(plan.promises, sizes, **run), epoch)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("name", MADE)
@pytest.mark.filterwarnings("ignore")
def test_an_edited_plan_is_refused_or_charges_what_it_draws(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls, ran = (dp.BoltOnPSGD if "Bolt" in name else dp.HolderOutputSGD), 0
    for what, saved in edited(MADE[name]()):
        try:
            plan = Plan.from_dict(saved)
            optimizer, drawn = answered(cls, plan, monkeypatch)
        except (ValueError, DpscoError):
            continue
        ran += 1
        event, drawn = optimizer.event, drawn * (1 + 1e-9)
        if plan.budget is not None:
            assert plan.epsilon() <= plan.budget.epsilon * (1 + 1e-12), what
        if isinstance(event, Gaussian):
            assert event.sigma <= drawn, what
            assert event.sensitivity(plan.adjacency) >= moved(cls, optimizer, plan), what
        else:
            assert isinstance(event, KNorm)
            assert event.eps >= moved(cls, optimizer, plan) / drawn, what
    assert ran
