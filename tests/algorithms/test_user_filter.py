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
from torch_dpsco.accounting.analysis.gaussian import gaussian_mu
from torch_dpsco.accounting.ledger import Ledger
from torch_dpsco.algorithms.oracles import UserFiltered
from torch_dpsco.algorithms.user_numbers import (
    UserFilter,
    calibrate_filter,
    smallest_users,
)
from torch_dpsco.errors import AdjacencyError, InfeasibleError, UtilityWarning

TASK = {"n_users": 2000, "steps": 100, "epsilon": 1.0, "delta": 1e-6, "pair_radius": 1.0}
PLAN = calibrate_filter(**TASK)


def unfiltered(n: int, T: int, epsilon: float, delta: float) -> float:
    """Noise of T means of users clipped at 1."""
    return 2 / n * math.sqrt(T) / gaussian_mu(epsilon, delta)


tasks = st.fixed_dictionaries(
    {
        "n_users": st.integers(50, 10**5),
        "steps": st.integers(1, 2000),
        "epsilon": st.floats(-0.7, 1.2).map(lambda x: 10**x),
        "delta": st.floats(-10, -3).map(lambda x: 10**x),
        "pair_radius": st.floats(1e-3, 1e3),
    }
)


def mp_delta(plan: UserFilter, epsilon: float) -> mp.mpf:
    """delta_pair + (1 + e^eps) beta from the fields alone, beta by the union bound, at 40 digits."""
    n, T, tau = plan.n_users, plan.steps, mp.mpf(plan.pair_radius)
    H, b, a = mp.mpf(plan.score_floor), plan.ramp_end, mp.mpf(n + 1) / 2
    K_A, K_B, c = n * (n - H) / (n - a), n * (n - H) / (n - b), 1 / (b - a)
    sensitivity = 2 * tau * max((1 + K_A * c) / (n - K_A), (1 + K_B * c) / n)
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


def ledger(plan: UserFilter) -> Ledger:
    """What a filtered phase charges."""
    return Ledger([UserFiltered(plan).event()])


@pytest.mark.weekly
@given(tasks)
@settings(max_examples=15)
def test_no_plan_claims_more_than_it_proves(task):
    """Recomputed at 40 digits, with the union bound of bad passes."""
    try:
        plan = calibrate_filter(**task)
    except InfeasibleError:
        return
    with mp.workdps(40):
        assert mp_delta(plan, task["epsilon"]) <= task["delta"]


@pytest.mark.weekly
@given(tasks)
@settings(max_examples=15)
def test_little_is_left_over(task):
    """The noise would not be private with 10 % less."""
    try:
        plan = calibrate_filter(**task)
    except InfeasibleError:
        return
    with mp.workdps(40):
        assert mp_delta(plan, task["epsilon"]) > 0.5 * task["delta"]
        less = dataclasses.replace(plan, noise_std=0.9 * plan.noise_std)
        assert mp_delta(less, task["epsilon"]) > task["delta"]


def test_the_ledger_charges_a_plan_no_more_than_it_claims():
    plan = calibrate_filter(**{**TASK, "n_users": 20_000})
    assert (
        0.8 * TASK["epsilon"]
        < ledger(plan).epsilon(TASK["delta"], "replace_one")
        <= TASK["epsilon"]
    )
    with pytest.raises(AdjacencyError):
        ledger(plan).epsilon(TASK["delta"], "add_remove")
    less = dataclasses.replace(plan, noise_std=plan.noise_std / 2)
    assert ledger(less).epsilon(TASK["delta"], "replace_one") > TASK["epsilon"]


@pytest.mark.slow
def test_bad_passes_are_not_more_frequent_than_the_plan_says():
    """Binomial tail 1e-6 on 200,000 runs whose scores all lie just below H; the failure is made likely for that."""
    plan = dataclasses.replace(
        PLAN, score_floor=PLAN.threshold - 8 * PLAN.query_scale, ramp_end=1500
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
    failure = UserFiltered(plan).bad_pass
    assert bad <= binom.isf(1e-6, runs, failure)
    assert failure <= 2 * bad / runs  # a union bound


def test_honest_runs_halt_no_more_often_than_asked_for():
    rng, runs = np.random.default_rng(4), 100_000
    nu = np.full(runs, math.inf)
    for _ in range(PLAN.steps):
        nu = np.minimum(nu, rng.laplace(scale=PLAN.query_scale, size=runs))
    halts = int(
        (
            0.99 * 2000 + nu
            < PLAN.threshold + rng.laplace(scale=PLAN.threshold_scale, size=runs)
        ).sum()
    )
    assert PLAN.halt_probability() == pytest.approx(0.01, rel=1e-9)
    assert 300 < halts <= binom.isf(1e-6, runs, 0.01)


# -- calibration ---------------------------------------------------------------------------------------------------


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(
    ("n", "T", "epsilon", "delta", "published", "ours", "least_of_all"),
    [
        (2000, 100, 1.0, 1e-6, 472, 677, 85),
        (2000, 1000, 1.0, 1e-6, 1577, 2476, 267),
        (10**4, 1000, 1.0, 1e-6, 1577, 826, 267),
        (10**5, 1000, 1.0, 1e-6, 1577, 380, 267),
        (2000, 1000, 4.0, 1e-6, 442, 273, 76),
        (1000, 50, 8.0, 1e-5, 48, 28, 8.5),
    ],
)
def test_the_table_of_noises(n, T, epsilon, delta, published, ours, least_of_all):
    """Section 4.5, in units of tau/n at typical score n: never more noise, never below that without a filter."""
    plan = calibrate_filter(
        n_users=n,
        steps=T,
        epsilon=epsilon,
        delta=delta,
        pair_radius=1.0,
        score_share=1.0,
        halt_probability=0.01,
    )
    least = unfiltered(n, T, epsilon, delta)
    assert least < plan.noise_std
    assert 0.94 * ours < plan.noise_std * n < 1.015 * ours
    assert least * n == pytest.approx(least_of_all, rel=0.02)
    with pytest.warns(UtilityWarning, match="not a proved calibration"):
        assert published_noise_std(n, T, epsilon, delta, 1.0) * n == pytest.approx(
            published, rel=0.01
        )


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(("n", "T", "epsilon"), [(60, 100, 1.0), (200, 1000, 0.5), (30, 5, 8.0)])
def test_the_smallest_number_of_users_named_works_and_one_fewer_does_not(n, T, epsilon):
    task = {"steps": T, "epsilon": epsilon, "delta": 1e-6, "pair_radius": 1.0}
    with pytest.raises(
        InfeasibleError,
        match=rf"for n={n}, steps={T}, epsilon={epsilon:g}, .* smallest n that",
    ) as e:
        calibrate_filter(n_users=n, **task)
    smallest = int(str(e.value).split("works is ")[1].split()[0])
    assert smallest > n
    assert calibrate_filter(n_users=smallest, **task).noise_std > 0
    with pytest.raises(InfeasibleError, match=f"works is {smallest} "):
        calibrate_filter(n_users=smallest - 1, **task)


@pytest.mark.slow
def test_no_number_of_users_helps_where_half_of_them_are_far_away():
    with pytest.raises(InfeasibleError, match=r"no n works \(at typical_score"):
        calibrate_filter(**TASK, score_share=0.45)
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


@pytest.mark.slow
def test_many_users_pay_for_the_gaussian_alone():
    plan = calibrate_filter(
        n_users=10**9, steps=100, epsilon=1.0, delta=1e-6, pair_radius=1.0, score_share=1.0
    )
    assert plan.noise_std == pytest.approx(unfiltered(10**9, 100, 1.0, 1e-6), rel=0.03)


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
        ({"score_share": 1.1}, "score_share must be in"),
        ({"epsilon": 1e4}, "epsilon must be <= 600"),
        ({"halt_probability": 0.0}, "halt_probability must be in"),
    ],
)
def test_bad_values_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        calibrate_filter(**TASK | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"noise_std": -1.0}, "noise_std must be >= 0"),
        ({"threshold_scale": 0.0}, "threshold_scale must be > 0"),
        ({"ramp_end": 2000}, "ramp_end must be in"),
        ({"ramp_end": 1000}, "ramp_end must be in"),
        ({"ramp_end": 1990}, "ramp_end must be in"),
        ({"score_floor": 1000.0}, "ramp_end must be in"),
        ({"score_floor": 1003.0, "ramp_end": 1003}, "score_floor must be larger"),
        ({"typical_score": -1.0}, "typical_score must be in"),
    ],
)
def test_plans_of_bad_numbers_cannot_be_built(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(PLAN, **change)
