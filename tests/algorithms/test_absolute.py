"""Noise of a prescribed size: what the ledger is told, what is drawn, and where the run stops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from tests.reference.absolute import HolderAbsolute
from torch_dpsco.accounting.events import PoissonGaussian
from torch_dpsco.errors import PrivacyError

LOSS = dp.losses.Squared()
PROBLEM = LOSS.problem(bound_x=1.0, bound_y=3.0)
POISSON = dp.Poisson(10, 200)
PLAN = [(PoissonGaussian(1.5, 0.05), 20)]


def records(n: int = 200) -> TensorDataset:
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x / x.norm(dim=1, keepdim=True), x.sum(1, keepdim=True))


def made(
    budget: dp.Budget | None = None,
    noise_std: object = 0.5,
    design: Any = POISSON,
    steps: int | None = None,
):
    model = dp.attach(torch.nn.Linear(3, 1, bias=False))
    accountant = dp.Accountant(adjacency="zero_out") if budget is None else dp.Accountant(budget)
    return model, dp.PrivateOptimizer(
        model.parameters(),
        lr=0.2,
        oracle=HolderAbsolute(PROBLEM, noise_std, design.batch_size),
        rule=dp.rules.SGD(),
        design=design,
        schedule=dp.Schedule((dp.Phase(steps),)),
        accountant=accountant,
    )


@pytest.mark.slow
@settings(max_examples=200)
@given(st.floats(1e-8, 1e8), st.floats(0, 1e4), st.integers(1, 10**6))
def test_the_ledger_is_told_no_more_noise_than_is_drawn(noise_std, distance, batch_size):
    oracle = HolderAbsolute(PROBLEM, noise_std, batch_size)
    oracle.open([torch.tensor([distance], dtype=torch.float64)])
    told = oracle.event().sigma * oracle.sensitivity("zero_out")
    assert told <= oracle.noise_std * (1 + 2.0**-52)
    assert told >= noise_std * (1 - 2.0**-9)
    assert oracle.event().sens == (("add_remove", 1.0), ("replace_one", 2.0), ("zero_out", 1.0))


def test_the_noise_has_the_prescribed_size_wherever_the_iterate_is():
    oracle = HolderAbsolute(PROBLEM, 0.5, 10)
    for distance in (0.0, 100.0):
        point = torch.zeros(40_000, dtype=torch.float64)
        point[0] = distance
        oracle.open([point])
        noise = oracle.release(torch.Generator().manual_seed(3)).mean[0]
        # a chi-square variable of 40,000 degrees is within 5 % of its mean except with probability 1e-11
        assert abs(float(noise.square().mean()) / 0.25 - 1) < 0.05
        assert oracle.clip == pytest.approx(PROBLEM.grad_bound(distance), rel=1e-6)


def test_a_schedule_is_read_at_the_step_and_its_last_number_stays():
    oracle = HolderAbsolute(PROBLEM, [1.0, 2.0], 10)
    for step, std in ((0, 1.0), (1, 2.0), (2, 2.0), (0, 1.0)):
        oracle.open([torch.zeros(1)], step)
        assert oracle.noise_std == std


def loop(model: torch.nn.Module, optimizer: dp.PrivateOptimizer, steps: int) -> None:
    for x, y in optimizer.loader(records(), steps=steps):
        optimizer.zero_grad()
        if optimizer.outstanding_rows:
            LOSS(model(x), y).backward()
        optimizer.step()


def test_a_resumed_run_goes_on_at_its_place_in_the_schedule():
    stds = [1.0, 2.0, 4.0]
    model, first = made(noise_std=stds)
    loop(model, first, 2)
    assert first.oracle.noise_std == 2.0
    model, second = made(noise_std=stds)
    second.load_state_dict(first.state_dict())
    loop(model, second, 1)
    assert second.oracle.noise_std == 4.0
    with pytest.raises(ValueError, match="noise_std"):
        made(noise_std=[1.0])[1].load_state_dict(first.state_dict())


@pytest.mark.weekly
@pytest.mark.parametrize(
    "mode",
    [{"mode": "rdp"}],
)
def test_the_run_stops_where_the_filter_does_and_the_target_holds(mode):
    budget = dp.Budget(2.0, 1e-5, adjacency="add_remove", **mode)
    model, optimizer = made(budget, steps=400)
    dp.fit(model, optimizer, records(), LOSS, progress=False)
    assert optimizer.finalized
    assert 1 < optimizer.steps < 400
    assert optimizer.report().epsilon <= 2.0
    assert len(optimizer.accountant) == optimizer.steps
    assert (
        len({event.noise_multiplier for _, _, event, _ in optimizer.accountant.ledger.entries()})
        > 1
    )


def test_full_batches_are_filtered_by_their_mu():
    budget = dp.Budget(1.0, 1e-5, "replace_one", mode="gdp")
    model, optimizer = made(budget, noise_std=0.5, design=dp.Full(200), steps=500)
    dp.fit(model, optimizer, records(), LOSS, progress=False)
    assert 1 < optimizer.steps < 500
    assert optimizer.accountant.ledger.cost("replace_one").mu_squared ** 0.5 <= 0.2681


def test_sampled_batches_have_no_mu_to_filter_by():
    with pytest.raises(ValueError, match="mode must leave room for one step"):
        made(dp.Budget(1.0, 1e-5, mode="gdp"))


def test_adaptive_noise_needs_an_adaptive_budget():
    with pytest.raises(PrivacyError, match=r"budget must be adaptive .* mode 'planned'"):
        made(dp.Budget(1.0, 1e-5))
    accountant = dp.Accountant(dp.Budget(1.0, 1e-5))
    with pytest.raises(PrivacyError, match="budget must be adaptive"):
        accountant.authorize(PLAN[0][0], adaptive=True)
    assert len(accountant) == 0


def test_without_a_budget_the_odometer_is_quoted_and_nothing_else():
    model, optimizer = made(noise_std=2.0, steps=3)
    dp.fit(model, optimizer, records(), LOSS, progress=False)
    planned = optimizer.accountant.ledger.epsilon(1e-5, "zero_out")
    assert optimizer.report(1e-5).epsilon > planned
    assert "filter or odometer" in optimizer.report(1e-5).figures.method


@pytest.mark.parametrize("wrong", [0.0, [], [1.0, math.nan]])
def test_wrong_noise_is_named(wrong):
    with pytest.raises(ValueError, match="noise_std"):
        made(noise_std=wrong)
