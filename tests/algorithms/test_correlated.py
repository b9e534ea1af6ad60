"""CorrelatedSGD: its plan, its run, what sums of its answers keep of the noise, and going on after a crash."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from torch_dpsco.algorithms.correlated_numbers import Banded, least_error
from torch_dpsco.errors import AdjacencyError

N, B, DIM = 40, 4, 2000
ROOM = {"n": N, "clip": 1.0, "lr": 1.0, "batch_size": B}
NOTHING = TensorDataset(torch.zeros(N, DIM), torch.zeros(N, 1))


def built(plan: dp.Plan, ledger: Path | None = None) -> tuple[nn.Module, dp.CorrelatedSGD]:
    model = dp.attach(nn.Linear(DIM, 1, bias=False))
    nn.init.zeros_(model.weight)
    accountant = dp.Accountant(adjacency=plan.adjacency, ledger_path=ledger)
    return model, dp.CorrelatedSGD(model.parameters(), plan, accountant=accountant)


def train(
    model: nn.Module, optimizer: dp.CorrelatedSGD, steps: int, *, resume: bool = False
) -> None:
    for x, y in optimizer.loader(NOTHING, steps=steps, resume=resume):
        optimizer.zero_grad()
        (model(x) * y).mean().backward()
        optimizer.step()


def spread(values: torch.Tensor) -> float:
    return float(values.detach().double().square().mean().sqrt())


def test_the_sum_of_all_noise_is_what_the_plan_expects() -> None:
    """chi-square of 2,000 coordinates: within 6.5 stds, 11 %, but with probability 1e-10."""
    plan = dp.CorrelatedSGD.plan(**ROOM, noise_multiplier=1.0, epochs=2)
    model, optimizer = built(plan)
    train(model, optimizer, 20)
    strategy = Banded(plan.coefficients)
    expected = float(strategy.prefix_std(20)[-1]) * strategy.norm / B
    assert spread(model.weight) == pytest.approx(expected, rel=0.11)
    assert expected < 0.6 * math.sqrt(20) / B  # of independent noise
    share = f"{expected * B / math.sqrt(20):.2f} of what independent noise"
    assert share in str(plan)


def test_the_strategy_is_that_of_least_error_for_the_planned_steps() -> None:
    plan = dp.CorrelatedSGD.plan(**ROOM, noise_multiplier=1.0, epochs=2)
    assert plan.coefficients == least_error(20, 10).coefficients  # ten batches of a pass
    assert (
        dp.CorrelatedSGD.plan(**ROOM, noise_multiplier=1.0, steps=3).coefficients
        == least_error(3, 3).coefficients
    )
    assert (
        len(dp.CorrelatedSGD.plan(**ROOM | {"n": 4000}, noise_multiplier=1.0).coefficients) == 32
    )
    assert dp.CorrelatedSGD.plan(**ROOM, noise_multiplier=1.0, bands=1).coefficients == (1.0,)


def test_noise_of_a_budget_is_that_of_unsampled_passes() -> None:
    budget = dp.Budget(3.0, 1e-5)
    plan = dp.CorrelatedSGD.plan(**ROOM, budget=budget, epochs=3)
    assert 0.98 * 3.0 <= plan.epsilon() <= 3.0
    assert plan.steps == 30


def test_a_run_goes_on_after_a_crash_with_fresh_noise(tmp_path: Path) -> None:
    plan = dp.CorrelatedSGD.plan(**ROOM, noise_multiplier=1.0, epochs=2)
    model, optimizer = built(plan, tmp_path / "ledger")
    train(model, optimizer, 7)
    state, weights = optimizer.state_dict(), model.state_dict()
    assert "past" not in str(state["dpsco"]["oracle"])
    before = optimizer.accountant.get_epsilon(1e-5)
    optimizer.accountant.close()
    again, other = built(plan, tmp_path / "ledger")
    again.load_state_dict(weights)
    assert other.resume(state) == 0
    start = again.weight.detach().clone()
    train(again, other, 1, resume=True)
    fresh = spread(again.weight - start)
    assert fresh == pytest.approx(Banded(plan.coefficients).norm / B, rel=0.11)
    train(again, other, 12, resume=True)
    assert before < other.accountant.get_epsilon(1e-5) == plan.epsilon(1e-5)


def test_a_copy_takes_no_noise_of_the_original_back() -> None:
    plan = dp.CorrelatedSGD.plan(**ROOM, noise_multiplier=1.0, epochs=2)
    model, optimizer = built(plan)
    train(model, optimizer, 3)
    once = optimizer.accountant.get_epsilon(1e-5)
    other, twin = copy.deepcopy((model, optimizer))
    start = other.weight.detach().clone()
    train(other, twin, 1, resume=True)
    assert spread(other.weight - start) == pytest.approx(
        Banded(plan.coefficients).norm / B, rel=0.11
    )
    train(model, optimizer, 1, resume=True)  # the same batch, a second time
    assert optimizer.accountant.get_epsilon(1e-5) > once


def test_wrong_numbers_are_refused() -> None:
    for wrong, match in (
        ({"bands": 11}, "bands must be <= 10"),
        ({"batch_size": 41}, "batch_size must be <= n=40"),
        ({"steps": 3, "epochs": 1}, "steps and epochs must not be given both"),
        ({"adjacency": "add_remove"}, "adjacency must be zero_out or replace_one"),
        (
            {"budget": dp.Budget(1.0, 1e-5, "add_remove")},
            "adjacency must be zero_out or replace_one",
        ),
        ({"noise_multiplier": None}, "budget or noise_multiplier must be given"),
        ({"clip": 0.0}, "clip must be"),
    ):
        with pytest.raises((ValueError, AdjacencyError), match=match):
            dp.CorrelatedSGD.plan(**ROOM | {"noise_multiplier": 1.0} | wrong)
