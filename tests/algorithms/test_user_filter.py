"""Plans of filtered phases: what they claim is what follows from their numbers; calibration and its refusals."""

from __future__ import annotations

import dataclasses
import math

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from tests.reference.papers.user_level import published_noise_std
from torch_dpsco.accounting.events import AboveThreshold, Failure, Gaussian, Repeat
from torch_dpsco.accounting.ledger import Ledger
from torch_dpsco.algorithms.user_filtered_numbers import (
    calibrate_filter,
    smallest_users,
)
from torch_dpsco.algorithms.user_numbers import (
    UserFilterPlan,
    break_even_clip,
    clipping_noise_std,
)
from torch_dpsco.errors import AdjacencyError, ConditionError, InfeasibleError, UtilityWarning

TASK = {"n_users": 2000, "steps": 100, "epsilon": 1.0, "delta": 1e-6, "pair_radius": 1.0}
PLAN = calibrate_filter(**TASK)

tasks = st.fixed_dictionaries(
    {
        "n_users": st.integers(50, 10**5),
        "steps": st.integers(1, 2000),
        "epsilon": st.floats(-0.7, 1.2).map(lambda x: 10**x),
        "delta": st.floats(-10, -3).map(lambda x: 10**x),
        "pair_radius": st.floats(1e-3, 1e3),
        "filter": st.sampled_from(["same", "two", "best"]),
    }
)


def mp_delta(plan: UserFilterPlan, epsilon: float) -> mp.mpf:
    """delta_pair + (1 + e^eps) beta + T zeta from the fields alone, beta by the union bound, at 40 digits."""
    n, T, tau = plan.n_users, plan.steps, mp.mpf(plan.pair_radius)
    H, b, a = mp.mpf(plan.score_floor), plan.ramp_end, mp.mpf(n + 1) / 2
    if plan.filter == "same":
        K_A, K_B, c = n * (n - H) / (n - a), n * (n - H) / (n - b), 1 / (b - a)
        sensitivity = 2 * tau * max((1 + K_A * c) / (n - K_A), (1 + K_B * c) / n)
    else:
        M = mp.ceil(H)
        sensitivity = 4 * tau * (1 + (n - M) / (b - a)) / M
    mu = mp.sqrt(T) * sensitivity / mp.mpf(plan.noise_std)
    b1, b2, score = mp.mpf(plan.threshold_scale), mp.mpf(plan.query_scale), 2 * mp.mpf(n - 1) / n
    e_A, e = score / b1 + 2 * score / b2, mp.mpf(epsilon)

    def hockey_stick(x):
        return mp.ncdf(mu / 2 - x / mu) - mp.exp(x) * mp.ncdf(-mu / 2 - x / mu)

    p = mp.exp(e_A) / (1 + mp.exp(e_A))
    m = mp.mpf(plan.threshold) - H
    tail = (b2**2 * mp.exp(-m / b2) - b1**2 * mp.exp(-m / b1)) / (2 * (b2**2 - b1**2))
    return (
        p * hockey_stick(e - e_A) + (1 - p) * hockey_stick(e + e_A) + (1 + mp.exp(e)) * T * tail
    )


def events(plan: UserFilterPlan) -> list:
    """What a filtered phase charges."""
    mean = Gaussian(plan.noise_std, {"replace_one": plan.sensitivity}, failure=plan.step_failure)
    test = AboveThreshold(
        plan.threshold_scale, plan.query_scale, {"replace_one": plan.score_sensitivity}
    )
    return [test, Repeat(mean, plan.steps), Failure(plan.failure, "transcript")]


@pytest.mark.parametrize("filter", ["same", "two"])
def test_half_the_noise_or_delta_of_a_plan_is_refused(filter):
    plan = calibrate_filter(**TASK, filter=filter)
    with pytest.raises(ConditionError, match="delta must be >= "):
        dataclasses.replace(plan, noise_std=plan.noise_std / 2)
    with pytest.raises(ConditionError, match="delta must be >= "):
        dataclasses.replace(plan, delta=plan.delta / 2)


@pytest.mark.weekly
@given(tasks)
@settings(max_examples=15)
def test_no_plan_claims_more_than_it_proves(task):
    """Recomputed at 40 digits; the union bound used here is above the plan's own failure."""
    try:
        plan = calibrate_filter(**task)
    except InfeasibleError:
        return
    with mp.workdps(40):
        assert mp_delta(plan, plan.epsilon) <= plan.delta
        assert mp_delta(plan, plan.epsilon) >= plan.delta_at(plan.epsilon) * mp.mpf("0.9999999")


@pytest.mark.weekly
@given(tasks)
@settings(max_examples=15)
def test_little_is_left_over(task):
    """The noise would not be private with 10 % less. (The search bounds bad passes by their union, the plan knows their
    integral: with a few hundred users several percent are left over.)"""
    try:
        plan = calibrate_filter(**task)
    except InfeasibleError:
        return
    assert plan.delta_at(plan.epsilon) > 0.5 * plan.delta
    with pytest.raises(ConditionError):
        dataclasses.replace(plan, noise_std=0.9 * plan.noise_std)


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("mode", ["tight", "paper_corrected"])
def test_the_ledger_charges_a_plan_no_more_than_it_claims(mode):
    plan = calibrate_filter(**{**TASK, "n_users": 20_000}, mode=mode)
    found = Ledger(events(plan)).epsilon(plan.delta, "replace_one")
    assert 0.8 * plan.epsilon < found <= plan.epsilon
    with pytest.raises(AdjacencyError):
        Ledger(events(plan)).epsilon(plan.delta, "add_remove")


def test_a_plan_names_unit_and_adjacency():
    assert (PLAN.unit, PLAN.adjacency, PLAN.ramp_start) == ("user", "replace_one", 1000.5)
    assert PLAN.mu == pytest.approx(10 * PLAN.sensitivity / PLAN.noise_std)
    assert PLAN.margin <= PLAN.threshold - PLAN.score_floor


@pytest.mark.slow
def test_bad_passes_are_not_more_frequent_than_the_plan_says():
    """Binomial tail 1e-6 on 200,000 runs whose scores all lie just below H; the failure is made likely for that."""
    plan = dataclasses.replace(
        PLAN, score_floor=PLAN.threshold - 8 * PLAN.query_scale, ramp_end=1500, delta=0.9
    )
    rng, runs = np.random.default_rng(3), 200_000
    nu = np.full(runs, -math.inf)
    for _ in range(plan.steps):
        nu = np.maximum(nu, rng.laplace(scale=plan.query_scale, size=runs))
    bad = int(
        (
            plan.score_floor + nu
            >= plan.threshold + rng.laplace(scale=plan.threshold_scale, size=runs)
        ).sum()
    )
    assert bad > 1000
    assert binom.ppf(1e-6, runs, plan.failure) <= bad <= binom.isf(1e-6, runs, plan.failure)


def test_honest_runs_halt_no_more_often_than_asked_for():
    rng, runs = np.random.default_rng(4), 100_000
    nu = np.full(runs, math.inf)
    for _ in range(PLAN.steps):
        nu = np.minimum(nu, rng.laplace(scale=PLAN.query_scale, size=runs))
    halts = int(
        (
            0.99 * 2000 + nu < PLAN.threshold + rng.laplace(scale=PLAN.threshold_scale, size=runs)
        ).sum()
    )
    assert PLAN.halt_probability() == pytest.approx(0.01, rel=1e-9)
    assert 300 < halts <= binom.isf(1e-6, runs, 0.01)
    assert PLAN.halt_probability(2000.0) < 0.01 < PLAN.halt_probability(1900.0)


# -- calibration ---------------------------------------------------------------------------------------------------


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(
    ("n", "T", "epsilon", "delta", "published", "ours", "unfiltered"),
    [
        (2000, 100, 1.0, 1e-6, 472, 677, 85),
        (2000, 1000, 1.0, 1e-6, 1577, 2476, 267),
        (10**4, 1000, 1.0, 1e-6, 1577, 826, 267),
        (10**5, 1000, 1.0, 1e-6, 1577, 380, 267),
        (2000, 1000, 4.0, 1e-6, 442, 273, 76),
        (1000, 50, 8.0, 1e-5, 48, 28, 8.5),
    ],
)
def test_the_table_of_noises(n, T, epsilon, delta, published, ours, unfiltered):
    """Section 4.5, in units of tau/n at typical score n: never more noise, never below that without a filter."""
    plan = calibrate_filter(
        n_users=n,
        steps=T,
        epsilon=epsilon,
        delta=delta,
        pair_radius=1.0,
        typical_score=n,
        halt_probability=0.01,
    )
    least = clipping_noise_std(n, T, epsilon, delta, 1.0)
    assert least < plan.noise_std
    assert 0.94 * ours < plan.noise_std * n < 1.015 * ours
    assert least * n == pytest.approx(unfiltered, rel=0.02)
    with pytest.warns(UtilityWarning, match="not a proved calibration"):
        assert published_noise_std(n, T, epsilon, delta, 1.0) * n == pytest.approx(
            published, rel=0.01
        )


@pytest.mark.slow
def test_the_filter_needs_gradients_several_times_the_spread_to_win():
    """The table of docs/user_level.md, rounded: T = 60, epsilon = 2."""
    for n, ratio in ((3000, 3.7), (10**4, 2.1), (3 * 10**4, 1.5), (10**5, 1.25)):
        plan = calibrate_filter(
            n_users=n,
            steps=60,
            epsilon=2.0,
            delta=1e-6,
            pair_radius=1.0,
            typical_score=n,
            halt_probability=0.01,
        )
        assert break_even_clip(plan) == pytest.approx(ratio, rel=0.1)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(("n", "T", "epsilon", "mode"), [
    (60, 100, 1.0, "tight"), (200, 1000, 0.5, "tight"), (30, 5, 8.0, "tight"), (200, 100, 1.0, "paper_corrected")
])  # fmt: skip
def test_the_smallest_number_of_users_named_works_and_one_fewer_does_not(n, T, epsilon, mode):
    task = {"steps": T, "epsilon": epsilon, "delta": 1e-6, "pair_radius": 1.0, "mode": mode}
    with pytest.raises(
        InfeasibleError,
        match=rf"n_users={n}, steps={T}, epsilon={epsilon:g}, .* smallest n_users",
    ) as e:
        calibrate_filter(n_users=n, **task)
    smallest = int(str(e.value).split("works is ")[1].split()[0])
    assert smallest > n
    assert calibrate_filter(n_users=smallest, **task).noise_std > 0
    with pytest.raises(InfeasibleError, match=f"works is {smallest} "):
        calibrate_filter(n_users=smallest - 1, **task)


@pytest.mark.slow
def test_no_number_of_users_helps_where_half_of_them_are_far_away():
    with pytest.raises(InfeasibleError, match="no n_users works at typical_score"):
        calibrate_filter(**TASK, typical_score=900.0)
    assert smallest_users(lambda n: False, 5) is None


@pytest.mark.slow
def test_noise_falls_with_users_and_budget_and_grows_with_steps_and_radius():
    def noise(**change):
        return calibrate_filter(**TASK | change).noise_std

    base = noise()
    assert noise(n_users=4000) < base / 2
    assert noise(epsilon=2.0) < base
    assert noise(delta=1e-4) < base
    assert noise(steps=200) > base
    assert noise(pair_radius=3.0) == pytest.approx(3 * base, rel=1e-9)
    assert noise(filter="two") != noise(filter="same")


@pytest.mark.slow
def test_many_users_pay_for_the_gaussian_alone():
    plan = calibrate_filter(
        n_users=10**9, steps=100, epsilon=1.0, delta=1e-6, pair_radius=1.0, typical_score=10**9
    )
    assert plan.noise_std == pytest.approx(
        clipping_noise_std(10**9, 100, 1.0, 1e-6, 1.0), rel=0.03
    )


@pytest.mark.slow
def test_the_best_filter_is_the_simple_one_unless_the_other_saves_noise():
    assert calibrate_filter(**TASK).filter == "same"
    assert calibrate_filter(**{**TASK, "n_users": 600, "steps": 50}).filter == "two"


def test_large_epsilon_is_allowed_and_absurd_epsilon_is_not():
    assert calibrate_filter(**{**TASK, "n_users": 200, "epsilon": 50.0}).delta_at(50.0) <= 1e-6
    with pytest.raises(ValueError, match="epsilon must be <= 600"):
        calibrate_filter(**TASK | {"epsilon": 1e4})


@pytest.mark.slow
def test_random_membership_costs_far_more_than_weights():
    corrected = calibrate_filter(**TASK | {"n_users": 20_000}, mode="paper_corrected")
    assert corrected.filter == "paper_corrected"
    assert corrected.threshold == 16_000.0
    assert (corrected.threshold_scale, corrected.query_scale) == (8.0, 16.0)
    assert corrected.epsilon_svt <= 0.5
    assert corrected.delta_at(1.0) <= 1e-6
    assert corrected.noise_std > 10 * calibrate_filter(**TASK | {"n_users": 20_000}).noise_std


@pytest.mark.slow
def test_a_warning_says_when_clipping_users_needs_less_noise():
    with pytest.warns(UtilityWarning, match="UserClippedSGD needs less noise"):
        calibrate_filter(**TASK, clip=1.0)
    assert calibrate_filter(**TASK, clip=100.0) == PLAN


@pytest.mark.parametrize("mode", ["paper", "published"])
def test_the_published_noise_is_refused_as_a_mode(mode):
    with pytest.raises(ValueError, match="mode must be one of"):
        calibrate_filter(**TASK, mode=mode)


def test_adding_and_removing_users_is_refused():
    with pytest.raises(AdjacencyError, match="replace_one with n_users public"):
        calibrate_filter(**TASK, adjacency="add_remove")


@pytest.mark.cases(10, 5)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": 0.0}, "epsilon must be > 0"),
        ({"epsilon": math.nan}, "epsilon must be > 0"),
        ({"delta": 0.0}, "delta must be in"),
        ({"delta": 1.0}, "delta must be in"),
        ({"steps": 0}, "steps must be an integer >= 1"),
        ({"n_users": 3}, "n must be >= 4"),
        ({"n_users": 0}, "n_users must be an integer >= 1"),
        ({"pair_radius": 0.0}, "pair_radius must be > 0"),
        ({"pair_radius": math.inf}, "pair_radius must be finite"),
        ({"typical_score": 2001.0}, "typical_score must be in"),
        ({"halt_probability": 0.0}, "halt_probability must be in"),
        ({"filter": "three"}, "filter must be one of"),
        ({"mode": "loose"}, "mode must be one of"),
        ({"adjacency": "edit"}, "adjacency must be one of"),
        ({"clip": 0.0}, "clip must be > 0"),
    ],
)
def test_bad_values_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        calibrate_filter(**TASK | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"filter": "paper"}, "filter must be one of"),
        ({"noise_std": 0.0}, "noise_std must be > 0"),
        ({"threshold": 2001.0}, "threshold must be in"),
        ({"threshold_scale": 0.0}, "threshold_scale must be > 0"),
        ({"ramp_end": 2000}, "ramp_end must be an integer in"),
        ({"ramp_end": 1000}, "ramp_end must be an integer in"),
        ({"ramp_end": 1990}, "ramp_end must be <= score_floor"),
        ({"score_floor": 1000.0}, "score_floor must be in"),
        ({"score_floor": 1003.0, "ramp_end": 1003}, "score_floor must be larger"),
        ({"coupling_failure": 1e-9}, "coupling_failure must be 0 for 'same'"),
        ({"filter": "paper_corrected"}, "coupling_failure must be > 0"),
        ({"typical_score": -1.0}, "typical_score must be in"),
        ({"epsilon": 0.5}, "delta must be >= "),
        ({"steps": 200}, "delta must be >= "),
        ({"threshold_scale": 1.0}, "delta must be >= "),
    ],
)
def test_plans_of_bad_numbers_cannot_be_built(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(PLAN, **change)
