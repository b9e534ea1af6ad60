"""Radii, schedules, phases, baselines and smoothing of user-level methods."""

from __future__ import annotations

import dataclasses
import math

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.stats import kstest

from tests.reference.papers.user_level import (
    ball_marginal_cdf,
    ball_marginal_variance,
    item_level_user_delta,
    sketch_failure,
    smoothing_bias,
    smoothing_smoothness,
)
from torch_dpsco.algorithms.user_filtered_numbers import best_steps, filtered_schedule, schedule
from torch_dpsco.algorithms.user_localized_numbers import UserPhases, plan_phases
from torch_dpsco.algorithms.user_numbers import (
    clipped_sensitivity,
    clipping_noise_std,
    pair_radius_iid,
    pair_radius_search,
    typical_score,
)
from torch_dpsco.errors import InfeasibleError

# -- schedules -----------------------------------------------------------------------------------------------------

SETTING = {
    "lipschitz": 2.0,
    "radius": 3.0,
    "n_items": 5000,
    "dim": 7,
    "noise_std_per_root_step": 0.02,
}


@pytest.mark.parametrize("steps", [1, 50, 3000])
def test_the_step_size_minimizes_the_bound(steps):
    made = schedule(**SETTING, steps=steps)
    noise = SETTING["dim"] * steps * SETTING["noise_std_per_root_step"] ** 2
    A = (4.0 + noise) / 2 + 8 * math.sqrt(steps) + 16 * steps / 5000
    found = minimize_scalar(
        lambda log_lr: 9 / (2 * math.exp(log_lr) * steps) + math.exp(log_lr) * A, (-9, 0)
    )
    assert made.bound == pytest.approx(found.fun, rel=1e-9)
    assert made.lr == pytest.approx(math.exp(found.x), rel=1e-5)


def test_more_steps_than_the_best_number_gain_little():
    best = best_steps(2.0, 5000, 7, 0.02, None)
    assert best == 5000**2 // 4
    noisy = best_steps(2.0, 5000, 7, 2.0, None)
    bound = schedule(**SETTING | {"noise_std_per_root_step": 2.0}, steps=noisy).bound
    assert bound < 2 * schedule(**SETTING | {"noise_std_per_root_step": 2.0}, steps=10**9).bound
    assert best_steps(2.0, 5000, 7, 1e6, 100) == 1


def test_a_calibrated_schedule_has_its_own_steps_and_bound():
    made = filtered_schedule(
        n_users=20_000,
        items_per_user=50,
        dim=1000,
        epsilon=1.0,
        delta=1e-6,
        lipschitz=1.0,
        radius=1.0,
        pair_radius=1.0,
    )
    sigma_1 = made.plan.noise_std / math.sqrt(made.plan.steps)
    again = schedule(1.0, 1.0, 10**6, made.plan.steps, 1000, sigma_1)
    assert (made.lr, made.bound) == again
    assert made.plan.steps == pytest.approx(best_steps(1.0, 10**6, 1000, sigma_1, 200), rel=0.3)
    assert made.plan.delta_at(1.0) <= 1e-6


# -- phases --------------------------------------------------------------------------------------------------------

PHASES = {
    "items_per_user": 50, "dim": 10, "epsilon": 2.0, "delta": 1e-6, "lipschitz": 1.0, "strong_convexity": 0.1
}  # fmt: skip


@pytest.mark.weekly
def test_the_most_phases_that_are_feasible_are_taken():
    plan = plan_phases(n_users=4000, **PHASES)
    assert [phase.users for phase in plan.phases] == [500, 1000, 2000]
    with pytest.raises(
        InfeasibleError,
        match=r"phase 1 of 4 \(250 of 4000 users\): .* smallest n_users that works is",
    ):
        plan_phases(n_users=4000, **PHASES, phases=4)
    assert plan_phases(n_users=4000, **PHASES, phases=2).phases_count == 2
    with pytest.raises(InfeasibleError, match=r"phase 1 of 1 \(200 of 400 users\)"):
        plan_phases(n_users=400, **PHASES)
    with pytest.raises(InfeasibleError, match="phase 1 of 5 has 3 users"):
        plan_phases(n_users=100, **PHASES, phases=5)


@pytest.mark.slow
def test_no_user_is_in_two_phases():
    plan = plan_phases(n_users=4000, **PHASES)
    assert sum(phase.users for phase in plan.phases) <= plan.n_users
    with pytest.raises(ValueError, match="at most n_users=3000 users together"):
        dataclasses.replace(plan, n_users=3000)
    with pytest.raises(ValueError, match="at least one phase"):
        UserPhases(phases=(), n_users=10)
    assert (plan.epsilon, plan.delta) == (2.0, 1e-6)  # the maximum, not the sum


@pytest.mark.weekly
def test_each_phase_starts_from_the_distance_that_the_one_before_proves():
    plan = plan_phases(n_users=10**6, **PHASES | {"items_per_user": 10**4}, max_steps=2000)
    assert plan.phases[0].start_radius == 20.0
    for before, after in zip(plan.phases, plan.phases[1:], strict=False):
        assert after.start_radius == min(20.0, math.sqrt(2 * before.bound / 0.1))
        assert after.bound < before.bound
    assert all(phase.steps == 2000 < phase.uncapped_steps for phase in plan.phases)
    assert plan_phases(n_users=4000, **PHASES, radius=0.5).phases[0].start_radius == 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"items_per_user": 0}, "items_per_user must be an integer >= 1"),
        ({"strong_convexity": 0.0}, "strong_convexity must be > 0"),
        ({"phases": 0}, "phases must be an integer >= 1"),
        ({"max_steps": 0}, "max_steps must be an integer >= 1"),
        ({"score_share": 1.5}, "score_share must be in"),
        ({"radius": 0.0}, "radius must be > 0"),
        ({"epsilon": -1.0}, "epsilon must be > 0"),
    ],
)
def test_bad_values_of_phases_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        plan_phases(**{"n_users": 4000, **PHASES, **change})


# -- radii, baselines, sketches ------------------------------------------------------------------------------------


def test_the_score_of_honest_users_falls_by_two_for_each_isolated_one():
    x = np.zeros(100)
    x[:7] = np.arange(7) * 10.0 + 50
    score = (np.abs(x[:, None] - x[None]) <= 1).sum() / 100
    assert (
        typical_score(100, isolated=7, share=1.0)
        <= score
        <= typical_score(100, isolated=7, share=1.0) + 0.6
    )


def test_the_private_search_is_epsilon_private():
    search = pair_radius_search(50, 0.7, 0.1)
    assert search.candidates[1] / search.candidates[0] == pytest.approx(1.25)
    assert search.target == max(45.0, 49.5 - 4 * math.log(64) / 0.7)
    larger = pair_radius_search(
        2000, 0.5, 0.1
    )  # above all distances with 1 % at most: so far below n it must be
    assert larger.target == 2000 - 4 * math.log(6400) / 0.5 > 0.9 * 2000
    assert pair_radius_search(10**6, 2.0, 0.1).target == 0.99 * 10**6 - 4 * math.log(64) / 2
    rng = np.random.default_rng(2)

    def law(x):
        scores = [(np.abs(x[:, None] - x[None]) <= tau).sum() / 50 for tau in search.candidates]
        weights = np.exp(-search.exponent * np.abs(np.array(scores) - search.target))
        return weights / weights.sum()

    for _ in range(50):
        x = rng.normal(size=50)
        y = x.copy()
        y[0] = rng.choice([0.0, 1e3])
        assert np.abs(np.log(law(x) / law(y))).max() <= 0.7


def test_sketches_fail_as_rarely_as_the_chi_square_says():
    with mp.workdps(40):
        k, eta, n, T = 128, mp.mpf("0.3"), 300, 40
        tail = mp.gammainc(mp.mpf(k) / 2, 0, k * (1 - eta) ** 2 / 2, regularized=True)
        exact = T * n * (n + 1) / mp.mpf(2) * tail
        found = sketch_failure(k, 0.3, n, T)
        assert exact * (1 - mp.mpf("1e-12")) <= found <= exact * (1 + mp.mpf("1e-7"))
    assert sketch_failure(1, 0.5, 10, 10) == 1.0


def test_clipping_costs_twice_as_much_for_a_replaced_user():
    assert clipped_sensitivity(2.0, 50, "replace_one") == 2 * clipped_sensitivity(
        2.0, 50, "add_remove"
    )
    one, two = (
        clipping_noise_std(100, 10, 1.0, 1e-6, 1.0, kind) for kind in ("zero_out", "replace_one")
    )
    assert two == pytest.approx(2 * one)
    with pytest.raises(ValueError, match="sample_rate must be"):
        clipped_sensitivity(1.0, 10, "add_remove", 1.5)


def test_item_level_noise_protects_a_user_less_the_more_items_they_have():
    deltas = [item_level_user_delta(k, 0.1, 1.0, 1.0) for k in (1, 2, 5, 20)]
    assert deltas == sorted(deltas)
    assert deltas[-1] > 10 * deltas[0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pair_radius_iid(1.0, 0, 10, 0.1), "items_per_user must be an integer >= 1"),
        (lambda: pair_radius_iid(1.0, 5, 1, 0.1), "n_users must be >= 2"),
        (lambda: pair_radius_iid(0.0, 5, 10, 0.1), "lipschitz must be > 0"),
        (lambda: pair_radius_iid(1.0, 5, 10, 0.0), "failure must be in"),
        (lambda: pair_radius_search(10, 1.0, 0.0), "smallest must be > 0"),
        (lambda: pair_radius_search(10, 1.0, 1.0, ratio=1.0), "ratio > 1"),
        (lambda: typical_score(10, isolated=-1), "isolated must be an integer >= 0"),
        (lambda: sketch_failure(0, 0.5, 10, 10), "sketch_dim must be an integer >= 1"),
        (lambda: sketch_failure(5, 1.0, 10, 10), "distortion must be in"),
        (lambda: schedule(1.0, 1.0, 10, 0, 1, 0.0), "steps must be an integer >= 1"),
        (lambda: ball_marginal_cdf(0, 1.0, 0.0), "dim must be an integer >= 1"),
        (lambda: ball_marginal_cdf(1, 0.0, 0.0), "radius must be > 0"),
    ],
)
def test_arguments_out_of_range_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# -- smoothing -----------------------------------------------------------------------------------------------------


@given(st.integers(1, 3000), st.floats(0.01, 100), st.floats(-1, 1))
def test_the_marginal_of_the_ball_has_all_digits(dim, radius, share):
    with mp.workdps(40):
        r, t = mp.mpf(radius), mp.mpf(radius * share)
        x = min(mp.mpf(1), abs(t) / r)
        tail = (
            mp.betainc(mp.mpf(dim + 1) / 2, mp.mpf(1) / 2, 0, (1 - x) * (1 + x), regularized=True)
            / 2
        )
        exact = tail if t < 0 else 1 - tail
        # near the surface the rounding of t/r alone, 2^-53, moves the tail by up to (d + 1) 2^-53/(1 - x) of it
        rounding = mp.mpf(8 * (dim + 1)) * mp.mpf(2) ** -53 / max(1 - x, mp.mpf(2) ** -53)
        error = abs(ball_marginal_cdf(dim, radius, radius * share) - exact)
        assert error <= exact * (mp.mpf("1e-8") + rounding) + mp.mpf("1e-280")


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("dim", [1, 2, 7])
def test_points_of_the_ball_follow_the_marginal(dim):
    rng = np.random.default_rng(dim)
    y = rng.normal(size=(20_000, dim))
    y *= 1.5 * rng.random((20_000, 1)) ** (1 / dim) / np.linalg.norm(y, axis=1, keepdims=True)
    cdf = np.vectorize(lambda t: ball_marginal_cdf(dim, 1.5, t))
    assert kstest(y[:, 0], cdf).pvalue > 1e-6
    assert y[:, 0].var() == pytest.approx(ball_marginal_variance(dim, 1.5), rel=0.06)
    assert np.linalg.norm(y, axis=1).mean() == pytest.approx(
        smoothing_bias(1.0, dim, 1.5), rel=0.02
    )


def test_the_marginal_ends_at_the_radius():
    assert ball_marginal_cdf(5, 1.0, -1.0) == ball_marginal_cdf(5, 1.0, -7.0) == 0.0
    assert ball_marginal_cdf(5, 1.0, 1.0) == 1.0
    assert ball_marginal_cdf(5, 1.0, 0.0) == 0.5


def test_smoothing_raises_a_loss_by_at_most_its_bias_and_its_gradient_is_smooth():
    """|x| on the line: smoothed on [-r, r] it is (x^2 + r^2)/(2r), slope x/r."""
    r = 0.7
    assert r / 2 == pytest.approx(smoothing_bias(1.0, 1, r))
    assert 1 / r == pytest.approx(smoothing_smoothness(1.0, 1, r))
