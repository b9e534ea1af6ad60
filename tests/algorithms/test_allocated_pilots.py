"""Passes of secret draws after a pilot: planned as without one, and charged to their part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from tests.algorithms.test_allocated import one_step, stored
from tests.algorithms.test_allocated_parts import DELTA, parts
from torch_dpsco.accounting.designs import Assigned, AssignedParts, Parts
from torch_dpsco.accounting.events import ADJACENCIES, Pure, RandomAllocation
from torch_dpsco.algorithms.heavy_plan import after_pilot
from torch_dpsco.errors import AdjacencyError
from torch_dpsco.step.chooser import noise_for, release_noise

PILOT, PROBLEM = dp.Pilot(size=30), dp.losses.Logistic().problem(bound_x=2.0)
ONE_PASS = [dp.AcceleratedSGD, dp.ClippedSGD, dp.ProximalSGD]
MANY = 150


def piloted(cls: Any, **given: Any) -> Any:
    budget = dp.Budget(1.0, DELTA, adjacency="add_remove")
    return cls.plan(
        **{"problem": PROBLEM, "n": MANY, "budget": budget, "clip": PILOT, "dim": 3, **given}
    )


@pytest.mark.cases(1, 1)
@pytest.mark.filterwarnings("ignore::torch_dpsco.errors.UtilityWarning")
@pytest.mark.parametrize("cls", ONE_PASS)
@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_a_pass_after_a_pilot_is_amplified(cls: Any, adjacency: Any) -> None:
    plan = piloted(
        cls, steps=12, sampling="assigned", budget=dp.Budget(1.0, DELTA, adjacency=adjacency)
    )
    kind, records = (AssignedParts, MANY + 3) if adjacency == "add_remove" else (Parts, MANY)
    assert plan.design == kind(((dp.Full(30), 1), (Assigned(10, 120, 12), 12)), MANY)
    alone = cls.plan(
        problem=PROBLEM,
        n=120,
        budget=plan.budget,
        clip=1.0,
        dim=3,
        steps=12,
        sampling="assigned",
    )
    assert (alone.design, alone.noise_multiplier) == (
        plan.design.parts[1][0],
        plan.noise_multiplier,
    )
    assert plan.noise_multiplier < 0.6 * release_noise(plan.budget)
    assert 0.98 < plan.epsilon() <= 1.0
    assert type(plan).from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    model = dp.attach(nn.Linear(2, 1), loss_reduction="sum")
    optimizer = cls(model.parameters(), plan)
    for x, y in optimizer.loader(
        TensorDataset(torch.ones(records, 2), torch.ones(records, 1)), isolation="none"
    ):
        one_step(model, optimizer, x, y)
    optimizer.finalize()
    (pilot, first, _), (training, passes, count) = parts(optimizer)
    assert (pilot, training, count) == ("0", "1", 1)
    assert isinstance(first, Pure)
    assert passes == RandomAllocation(plan.noise_multiplier, 12)
    assert optimizer.accountant.get_epsilon(DELTA) == plan.epsilon()


@pytest.mark.cases(1, 1)
@pytest.mark.filterwarnings("ignore::torch_dpsco.errors.UtilityWarning")
@pytest.mark.parametrize("cls", ONE_PASS)
def test_a_pass_after_a_pilot_plans_its_steps_as_without_one(cls: Any) -> None:
    """By the step rule more of them than where batches are cut by position."""
    plan = piloted(cls)
    if cls is dp.ProximalSGD:
        assert plan.steps == 65
    else:
        cut = piloted(
            cls, budget=dp.Budget(1.0, DELTA, adjacency="zero_out"), sampling="shuffled"
        )
        assert plan.steps > cut.steps
    assert plan.training.batches == plan.steps - 1
    assert plan.noise_multiplier == noise_for(plan.budget, plan.training, plan.steps - 1)


PASSES = Assigned(30, 120, passes=2)


def test_passes_after_a_pilot_are_those_of_a_part() -> None:
    expected = AssignedParts(((dp.Full(30), 1), (PASSES, 8)), MANY)
    assert after_pilot(30, PASSES, 8, MANY, "add_remove") == expected
    for cut in (dp.Shuffled(30, 120), dp.Disjoint(30, 120), dp.Fixed(30, 120)):
        with pytest.raises(
            AdjacencyError,
            match="sampling must be 'assigned', 'poisson' or 'full' after a pilot",
        ):
            after_pilot(30, cut, 4, MANY, "add_remove")
    for adjacency in ("replace_one", "zero_out"):
        assert after_pilot(30, PASSES, 8, MANY, adjacency) == Parts(expected.parts, MANY)
        with pytest.raises(
            ValueError, match="sampling must be 'shuffled' for one pass only after a pilot"
        ):
            after_pilot(30, dp.Shuffled(30, 120), 8, MANY, adjacency)


@pytest.mark.weekly
@pytest.mark.filterwarnings("ignore::torch_dpsco.errors.UtilityWarning")
def test_passes_after_a_pilot_are_amplified() -> None:
    plan = piloted(dp.ClippedSGD, sampling="allocated", batch_size=30, epochs=2, lr=0.1)
    assert plan.design == AssignedParts(((dp.Full(30), 1), (PASSES, 8)), MANY)
    assert 0.98 < plan.epsilon() <= 1.0


@pytest.mark.filterwarnings("ignore::torch_dpsco.errors.UtilityWarning")
def test_a_run_with_a_pilot_that_is_killed_inside_of_its_pass_goes_on_with_it(
    tmp_path: Path,
) -> None:
    plan, data = (
        piloted(dp.ClippedSGD, steps=6),
        TensorDataset(torch.ones(MANY, 2), torch.ones(MANY, 1)),
    )

    def run() -> tuple[nn.Module, Any]:
        model = dp.attach(nn.Linear(2, 1), loss_reduction="sum")
        return model, dp.ClippedSGD(
            model.parameters(),
            plan,
            accountant=dp.Accountant(plan.budget, ledger_path=tmp_path / "ledger"),
        )

    model, optimizer = run()
    for x, y in optimizer.loader(data, steps=3, isolation="none"):
        one_step(model, optimizer, x, y)
    state = stored(optimizer)
    for x, y in optimizer.loader(data, steps=1, isolation="none", resume=True):
        one_step(model, optimizer, x, y)
    optimizer.accountant.close()
    model, again = run()
    with pytest.warns(UserWarning, match="1 steps after step 3 were lost"):
        again.resume(state)
    for x, y in again.loader(data, isolation="none", resume=True):
        one_step(model, again, x, y)
    again.finalize()
    assert (again.steps, [row[2] for row in parts(again)]) == (7, [1, 1])
    assert again.accountant.get_epsilon(DELTA) == plan.epsilon()
