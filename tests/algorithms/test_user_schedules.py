"""Radii, schedules, phases, baselines and smoothing of user-level methods."""

from __future__ import annotations

import math
from itertools import pairwise

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.stats import kstest

from tests.doors.calls import CALLS
from tests.reference.papers.user_level import (
    ball_marginal_cdf,
    ball_marginal_variance,
    item_level_user_delta,
    sketch_failure,
    smoothing_bias,
    smoothing_smoothness,
)
from torch_dpsco.accounting.designs import Full, Parts
from torch_dpsco.algorithms.user_numbers import (
    UserPhases,
    best_steps,
    calibrate_filter,
    pair_radius_iid,
    schedule,
    suited,
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
    best = best_steps(2.0, 5000, 7, 0.02, 10**9)
    assert best == 5000**2 // 4
    noisy = best_steps(2.0, 5000, 7, 2.0, 10**9)
    bound = schedule(**SETTING | {"noise_std_per_root_step": 2.0}, steps=noisy).bound
    assert bound < 2 * schedule(**SETTING | {"noise_std_per_root_step": 2.0}, steps=10**9).bound
    assert best_steps(2.0, 5000, 7, 1e6, 100) == 1


@pytest.mark.slow
def test_a_calibrated_schedule_has_its_own_steps():
    task = {"n_users": 20_000, "epsilon": 1.0, "delta": 1e-6, "pair_radius": 1.0}
    made = suited(lambda steps: calibrate_filter(steps=steps, **task), 1.0, 10**6, 1000, 200)
    sigma_1 = made.noise_std / math.sqrt(made.steps)
    assert made == calibrate_filter(steps=made.steps, **task)
    assert made.steps == pytest.approx(best_steps(1.0, 10**6, 1000, sigma_1, 200), rel=0.3)


# -- phases --------------------------------------------------------------------------------------------------------

PHASES = {
    "items_per_user": 50, "dim": 10, "epsilon": 2.0, "delta": 1e-6, "lipschitz": 1.0, "strong_convexity": 0.1
}  # fmt: skip


def planned(phases=None, **numbers):
    return UserPhases(**PHASES | numbers).planned(phases)


@pytest.mark.weekly
def test_the_most_phases_that_are_feasible_are_taken():
    most = planned(n_users=4000)
    assert all(
        a.filter.n_users == b for a, b in zip(most[::-1], (2000, 1000, 500, 250), strict=False)
    )
    with pytest.raises(
        InfeasibleError, match=rf"phase 1 of {len(most) + 1} .* smallest n that works is"
    ):
        planned(len(most) + 1, n_users=4000)
    assert len(planned(2, n_users=4000)) == 2
    with pytest.raises(InfeasibleError, match=r"phase 1 of 1 \(200 of 400 users\)"):
        planned(n_users=400)
    with pytest.raises(InfeasibleError, match="phase 1 of 5 has 3 users"):
        planned(5, n_users=100)


@pytest.mark.slow
def test_no_user_is_in_two_phases():
    filters = [phase.filter for phase in planned(n_users=4000)]
    assert sum(own.n_users for own in filters) <= 4000
    with pytest.raises(ValueError, match="at most n=3000"):
        Parts(tuple((Full(own.n_users), own.steps) for own in filters), 3000)
    function, arguments = CALLS["dp.LocalizedUserSGD.plan"]()
    design = function(**arguments).design
    assert sum(part.n for part, _ in design.parts) <= design.n == arguments["n"]


@pytest.mark.weekly
def test_each_phase_starts_from_the_distance_that_the_one_before_proves():
    made = planned(n_users=10**6, items_per_user=10**4, max_steps=2000)
    start = 20.0
    for phase in made:
        own = phase.filter
        noise = own.noise_std / math.sqrt(own.steps)
        assert (phase.lr, phase.bound) == schedule(
            1.0, start, own.n_users * 10**4, own.steps, 10, noise
        )
        start = min(20.0, math.sqrt(2 * phase.bound / 0.1))
    assert all(after.bound < before.bound for before, after in pairwise(made))


# -- radii, baselines, sketches ------------------------------------------------------------------------------------


def test_sketches_fail_as_rarely_as_the_chi_square_says():
    with mp.workdps(40):
        k, eta, n, T = 128, mp.mpf("0.3"), 300, 40
        tail = mp.gammainc(mp.mpf(k) / 2, 0, k * (1 - eta) ** 2 / 2, regularized=True)
        exact = T * n * (n + 1) / mp.mpf(2) * tail
        found = sketch_failure(k, 0.3, n, T)
        assert exact * (1 - mp.mpf("1e-12")) <= found <= exact * (1 + mp.mpf("1e-7"))
    assert sketch_failure(1, 0.5, 10, 10) == 1.0


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
        (lambda: sketch_failure(0, 0.5, 10, 10), "sketch_dim must be an integer >= 1"),
        (lambda: sketch_failure(5, 1.0, 10, 10), "distortion must be in"),
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
            mp.betainc(
                mp.mpf(dim + 1) / 2, mp.mpf(1) / 2, 0, (1 - x) * (1 + x), regularized=True
            )
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
