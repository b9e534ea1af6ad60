"""Budgets whose target is a risk: they keep it, lose nothing for Gaussian noise, and are saved as they are."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

import torch_dpsco as dp
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.analysis.risk import Risk, line_of_advantage, line_of_rates
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.calibrate import noise_multiplier
from torch_dpsco.accounting.events import (
    ADD_REMOVE,
    REPLACE_ONE,
    ApproxDP,
    PoissonGaussian,
    Repeat,
    clipped_gaussian,
)
from torch_dpsco.accounting.ledger import Ledger
from torch_dpsco.errors import BudgetExceeded

SHARES = st.floats(1e-4, 1 - 1e-4)
PROBLEM = dp.losses.Logistic().problem(bound_x=2.0)


@given(SHARES)
def test_the_line_of_an_advantage_implies_it(advantage):
    epsilon, delta = line_of_advantage(advantage)
    assert epsilon > 0
    assert delta > 0
    assert (
        advantage - 1e-9
        <= Risk.of_point(epsilon, delta).advantage
        <= advantage * (1 + 1e-11) + 3e-15
    )


@given(SHARES, SHARES)
def test_the_line_of_two_rates_implies_them(one, other):
    fpr, tpr = sorted((one, other))
    if tpr - fpr < 1e-6:
        return
    epsilon, delta = line_of_rates(tpr, fpr)
    assert epsilon > 0
    assert 0 < delta < 1
    bend = [1 - delta - math.exp(epsilon) * fpr, math.exp(-epsilon) * (1 - delta - fpr)]
    assert 1 - max(bend) <= tpr + 1e-12


@pytest.mark.cases(3, 1)
@pytest.mark.parametrize(
    ("target", "mu"),
    [
        ({"advantage": 0.1}, 2 * norm.ppf(0.55)),
        ({"advantage": 0.001}, 2 * norm.ppf(0.5005)),
        ({"advantage": 0.9}, 2 * norm.ppf(0.95)),
        ({"tpr": 0.2, "fpr": 0.01}, norm.ppf(0.2) - norm.ppf(0.01)),
        ({"tpr": 1e-4, "fpr": 1e-6}, norm.ppf(1e-4) - norm.ppf(1e-6)),
        ({"tpr": 0.99, "fpr": 0.8}, norm.ppf(0.99) - norm.ppf(0.8)),
        ({"tpr": 0.6, "fpr": 0.4}, norm.ppf(0.6) - norm.ppf(0.4)),
    ],
)
def test_gaussian_noise_is_the_least_that_keeps_the_risk(target, mu):
    budget = Budget(**target, adjacency=ADD_REMOVE)
    noise = noise_multiplier(
        budget.epsilon, budget.delta, design=dp.Full(1), steps=1, adjacency=ADD_REMOVE
    )
    assert 1.0 <= noise * mu <= 1.0005


@pytest.mark.weekly
@pytest.mark.parametrize("target", [{"advantage": 0.1}, {"tpr": 0.05, "fpr": 0.01}])
def test_sampled_noise_keeps_the_risk_and_spends_it(target):
    budget = Budget(**target, adjacency=ADD_REMOVE)
    noise = noise_multiplier(
        budget.epsilon,
        budget.delta,
        design=dp.Poisson(256, 60000),
        steps=500,
        adjacency=ADD_REMOVE,
    )
    risk = Ledger([Repeat(PoissonGaussian(noise, 256 / 60000), 500)]).risk(ADD_REMOVE)
    spent = risk.advantage if budget.advantage else risk.true_positive(0.01)
    limit = budget.advantage or budget.tpr
    assert (
        0.95 * limit <= spent <= limit * (1 + 1e-3)
    )  # an upper bound of what is within the limit


def test_the_filter_stops_where_the_risk_is_spent():
    accountant = Accountant(Budget(advantage=0.1, adjacency=ADD_REMOVE))
    step = clipped_gaussian(20.0)
    most = accountant.max_steps(step)  # sqrt(k)/20 <= 2 norm.ppf(0.55) = 0.2513
    assert most == 25
    accountant.authorize(step, most)
    risk = accountant.report().risk()
    assert risk.advantage <= 0.1
    with pytest.raises(BudgetExceeded, match=r"advantage 0\.1"):
        accountant.authorize(step)


def test_what_may_fail_takes_the_whole_of_its_delta():
    accountant = Accountant(Budget(advantage=0.1, adjacency="replace_one"))
    assert not accountant.admits(ApproxDP(0.0, 0.11))
    assert accountant.admits(ApproxDP(0.0, 0.05))
    assert not accountant.admits(ApproxDP(0.05, 0.09))  # tanh(0.025) + 0.18/2.05 > 0.1
    rates = Accountant(Budget(tpr=0.02, fpr=0.01, adjacency="replace_one"))
    assert not rates.admits(ApproxDP(0.0, 0.011))  # found without a false alarm


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("target", [{"advantage": 0.1}, {"tpr": 0.2, "fpr": 0.01}])
def test_plans_and_reports_keep_the_risk(target):
    budget = Budget(**target)
    plan = dp.HolderSGD.plan(problem=PROBLEM, n=1000, budget=budget, batch_size=100, epochs=2)
    assert budget.risk in " ".join(str(plan).split())
    assert "at delta 1e-06" in str(plan)  # what a risk does not say stands beside it
    ledger = Ledger([plan.event()])
    risk = ledger.risk(plan.adjacency)
    assert (
        (risk.advantage <= 0.1001) if budget.advantage else (risk.true_positive(0.01) <= 0.2001)
    )
    saved = json.loads(json.dumps(plan.to_dict()))
    assert type(plan).from_dict(saved) == plan
    report = Accountant(budget).report()
    assert report.delta == 1e-6
    assert f"budget: {budget.target}" in str(report)


def test_clipped_and_user_plans_take_a_risk():
    budget = Budget(advantage=0.2, adjacency="replace_one")
    plan = dp.ClippedSGD.plan(n=1000, budget=budget, batch_size=100, epochs=1, clip=1.0, lr=0.1)
    users = dp.UserClippedSGD.plan(
        n=1000, budget=replace(budget, unit="user"), clip=1.0, lr=0.1, steps=5
    )
    for event in (plan.event(), users.event()):
        assert 0.15 < Ledger([event]).risk(REPLACE_ONE).advantage <= 0.2002


def test_half_a_target_is_none():
    for target, missing in (
        ({}, "epsilon and delta"),
        ({"epsilon": 1.0}, "delta"),
        ({"delta": 0.1}, "epsilon"),
    ):
        with pytest.raises(TypeError, match=f"^{missing} must be given, or advantage"):
            Budget(**target)


def test_an_adaptive_mode_keeps_the_risk():
    accountant = Accountant(Budget(advantage=0.1, adjacency=ADD_REMOVE, mode="gdp"))
    assert 24 <= accountant.max_steps(clipped_gaussian(20.0)) <= 25
    by_renyi = Accountant(Budget(advantage=0.1, adjacency=ADD_REMOVE, mode="rdp"))
    assert 0 < by_renyi.max_steps(clipped_gaussian(20.0)) <= 25


@pytest.mark.parametrize("mode", ["gdp", "rdp"])
@pytest.mark.parametrize("target", [{"advantage": 0.1}, {"tpr": 0.03, "fpr": 0.01}])
def test_an_adaptive_report_says_no_more_than_the_target(target, mode):
    """The odometer's epsilon at 1e-6 would allow an advantage of 0.28."""
    accountant = Accountant(Budget(**target, mode=mode))
    accountant.authorize(clipped_gaussian(40.0), 1)
    report = accountant.report()
    assert (report.epsilon, report.delta) == (accountant.budget.epsilon, accountant.budget.delta)
    if "tpr" in target:
        assert report.risk().true_positive(0.01) <= 0.03 * (1 + 1e-9)
    else:
        assert max(report.advantage, report.risk().advantage) <= 0.1 * (1 + 1e-9)


def test_changed_budgets_keep_their_risk():
    budget = Budget(tpr=0.2, fpr=0.01, adjacency="replace_one")
    assert replace(budget, unit="user").risk == budget.risk
    plain = replace(budget, advantage=None)
    assert (plain.epsilon, plain.delta) == (budget.epsilon, budget.delta)
    assert eval(repr(budget), {"Budget": Budget}) == budget
    assert Budget(budget.epsilon, budget.delta, "replace_one") != budget
    assert "advantage" not in repr(Budget(1.0, 1e-5, "replace_one"))


def test_a_risk_and_another_epsilon_are_refused():
    with pytest.raises(ValueError, match="epsilon and delta must be left out"):
        Budget(8.0, 1e-5, "replace_one", advantage=0.1)
    with pytest.raises(ValueError, match="epsilon and delta must be left out"):
        replace(Budget(advantage=0.1, adjacency="replace_one"), advantage=0.01)
    with pytest.raises(ValueError, match="epsilon and delta must be left out"):
        Budget(8.0, tpr=0.2, fpr=0.1, adjacency="replace_one")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"advantage": 0.0}, "advantage must be > 0"),
        ({"advantage": 1.0}, "advantage must be in"),
        ({"advantage": math.nan}, "advantage must be"),
        ({"advantage": "0.1"}, "advantage must be"),
        ({"tpr": 0.2}, "advantage must be given alone"),
        ({"fpr": 0.2}, "advantage must be given alone"),
        ({"tpr": 0.2, "fpr": 0.1, "advantage": 0.1}, "advantage must be given alone"),
        ({"tpr": 0.1, "fpr": 0.2}, "tpr must be > fpr"),
        ({"tpr": 0.2, "fpr": 0.0}, "fpr must be > 0"),
        ({"tpr": 1.0, "fpr": 0.1}, "tpr must be in"),
    ],
)
def test_wrong_targets_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Budget(**wrong)
