"""One-pass plans: 40-digit formulas, limits, privacy cost and refusals."""

from __future__ import annotations

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from tests.reference.papers.heavy_tailed import (
    accelerated_clip_paper,
    accelerated_steps_paper,
    averaged_clip_paper,
    averaged_steps_paper,
    flat,
    proximal_clip_paper,
    proximal_pl_clip,
    strongly_convex_clip,
)
from torch_dpsco.accounting.analysis.gaussian import sensitivity_factor
from torch_dpsco.algorithms.heavy_tailed_numbers import (
    OnePass,
    averaging_schedule,
    least_steps,
    strongly_convex_coefficients,
)
from torch_dpsco.algorithms.heavy_tailed_numbers import accelerated_plan as accelerated
from torch_dpsco.algorithms.heavy_tailed_numbers import proximal_pl_plan as proximal
from torch_dpsco.algorithms.heavy_tailed_numbers import strongly_convex_plan as strongly_convex
from torch_dpsco.errors import ConditionError, UtilityWarning

accelerated_plan = flat(accelerated)
proximal_pl_plan = flat(proximal)
strongly_convex_plan = flat(strongly_convex)
TASK = {"n": 10**4, "dim": 20, "rho": 0.5, "moment": 1.0, "moment_order": 2.0}
CONVEX = TASK | {"smoothness": 1.0, "diameter": 2.0}
STRONG = TASK | {"smoothness": 1.0, "strong_convexity": 0.1, "diameter": 2.0}
PROXIMAL = TASK | {"smoothness": 1.0, "pl_constant": 0.1, "initial_gap": 2.0}
PLANS = [
    (accelerated_plan, CONVEX),
    (strongly_convex_plan, STRONG),
    (proximal_pl_plan, PROXIMAL),
]
ALL_PLANS = pytest.mark.parametrize(
    ("planner", "task"), PLANS, ids=["accelerated", "strongly convex", "proximal"]
)


# Formulas.


@given(
    st.integers(1000, 10**6),
    st.integers(1, 20),
    st.integers(1, 200),
    st.floats(1e-2, 1e4),
    st.floats(2.0, 20.0),
    st.sampled_from(["replace_one", "zero_out", "add_remove"]),
)
def test_the_accelerated_plan_agrees_with_40_digits(n, d, T, rho, k, adjacency):
    beta, D, r, r2 = 1.3, 0.7, 2.5, 1.9
    # from 1 on noise dominates, which is warned of, and the bias is r - C, below the formula for large clips
    assume(2 * sensitivity_factor(adjacency) * math.sqrt(d * T / (3 * rho)) / (n // T * T) < 1)
    found = accelerated_plan(
        n=n,
        dim=d,
        steps=T,
        rho=rho,
        smoothness=beta,
        diameter=D,
        moment=r,
        moment_order=k,
        second_moment=r2,
        adjacency=adjacency,
        clip=None,
    )
    with mpmath.workdps(40):
        x, s, S = mpmath.mpf(k), n // T, mpmath.mpf(sensitivity_factor(adjacency))
        a = S / 2 * 4 * mpmath.sqrt(mpmath.mpf(d) * T / (3 * mpmath.mpf(rho))) / (s * T)
        C = r * (((x - 1) / x) ** x / a) ** (1 / x)
        B = ((x - 1) ** (x - 1) / x**x) * r**x / C ** (x - 1)
        sigma = S * C / s / mpmath.sqrt(2 * mpmath.mpf(rho))
        V = mpmath.mpf(r2) ** 2 / s + d * sigma**2
        eta = max(
            2 * mpmath.mpf(beta), mpmath.sqrt((V + B**2) * T * (T + 1) * (2 * T + 1) / 12) / D
        )
        bound = 2 * eta * D**2 / (T * (T + 1))
        root = mpmath.sqrt((V + B**2) * (2 * T + 1) / (3 * T * (T + 1)))
        shown = 4 * beta * mpmath.mpf(D) ** 2 / (T * (T + 1)) + 2 * D * root + B * D
    wanted = {
        "clip": C,
        "bias": B,
        "noise_std": sigma,
        "variance": V,
        "lr": 1 / (2 * eta),
        "bound": shown,
    }
    for name, value in wanted.items():
        assert getattr(found, name) == pytest.approx(float(value), rel=1e-11), name
    assert bound + (2 * T + 1) * (V + B**2) / (6 * eta) + B * D <= shown * (1 + 1e-12)


@pytest.mark.slow
@given(
    st.floats(1.0, 1e8) | st.sampled_from([1.0, 1.0 + 1e-15, 1.0 + 1e-9, 2.0, 1e8]),
    st.integers(1, 400),
)
@example(1.0, 1)
@example(1.0 + 2**-52, 1)
@example(1e8, 1)
@example(100.0, 100)
@example(99.999, 100)
def test_coefficients_of_the_strongly_convex_bound_agree_with_40_digits(kappa, T):
    mu = 0.37
    beta = max(mu, mu * kappa)
    u = strongly_convex_coefficients(strong_convexity=mu, smoothness=beta, steps=T)
    plan = averaging_schedule(strong_convexity=mu, smoothness=beta, steps=T)
    assert len(plan.lr) == len(plan.weights) == T
    assert max(plan.lr) <= 1 / beta * (1 + 1e-15)
    with mpmath.workdps(60):
        m, b = mpmath.mpf(mu), mpmath.mpf(beta)
        if beta / mu >= T:
            weights = [(1 - m / b) ** (-(t + 1)) if m < b else mpmath.mpf(1) for t in range(T)]
            wanted = b / mpmath.fsum(weights), 2 / m, 2 / b
        else:
            t0, ks = -(-T // 2), 2 * b / m
            weights = [mpmath.mpf(0)] * t0 + [ks + j for j in range(T - t0)]
            W, K, M = mpmath.fsum(weights), ks * (ks - 2), T - t0
            noise = (K / b + 4 * M / m) / W
            wanted = m / 2 * K / W * (1 - m / b) ** t0, 2 / m * (1 + K / (2 * W)), noise
        for found, value in zip((u.initial, u.bias, u.noise), wanted, strict=True):
            assert found == pytest.approx(float(value), rel=1e-9, abs=1e-14 * beta)
        np.testing.assert_allclose(plan.weights, [float(w) for w in weights], rtol=1e-9)


def test_the_search_finds_an_integer_near_the_minimum_within_the_allowed_steps():
    assert (
        abs(least_steps(lambda T: abs(T - 777), most=1000) - 777) <= 8
    )  # the grid of 400 is 1.7 % apart here
    assert least_steps(lambda T: abs(T - 77), most=1000) == 77
    assert least_steps(lambda T: -T, most=30) == 30
    assert least_steps(lambda T: -T, most=10**7) == 100_000
    assert least_steps(lambda T: T, most=1) == 1


@ALL_PLANS
def test_the_chosen_steps_have_nearly_the_least_bound(planner, task):
    best = planner(**task)
    bounds = [planner(**task, steps=T).bound for T in range(1, 301)]
    assert best.bound <= min(bounds) * 1.005
    assert best.steps == planner(**task, steps=best.steps).steps
    for other in (0.7, 1.4):  # and the chosen clip is at least near the best one
        assert (
            planner(**task, steps=best.steps, clip=other * best.clip).bound >= best.bound * 0.99
        )


def test_the_bounds_of_the_specification_are_reproduced():
    task = {
        "dim": 50,
        "rho": 0.5,
        "smoothness": 1.0,
        "diameter": 2.0,
        "moment": 1.0,
        "moment_order": 2.0,
    }
    plans = [accelerated_plan(n=n, **task) for n in (10**3, 10**4, 10**5, 10**6)]
    # floor(n/T) records a batch make 14 steps better than 15 at n = 1000, which n/T records would
    assert [plan.steps for plan in plans] == [14, 25, 41, 69]
    wanted = (0.701, 0.249, 0.0885, 0.0316)
    assert all(
        plan.bound == pytest.approx(bound, rel=1e-2)
        for plan, bound in zip(plans, wanted, strict=True)
    )


def test_linear_losses_take_one_step():
    plan = accelerated_plan(**CONVEX | {"smoothness": 0.0})
    assert plan.steps == 1
    assert plan.bound <= min(
        accelerated_plan(**CONVEX | {"smoothness": 0.0}, steps=T).bound for T in (2, 3, 10, 100)
    )


@pytest.mark.cases(6, 3)
@pytest.mark.parametrize("k", [2.0, 3.0, 10.0])
@ALL_PLANS
def test_bounds_fall_at_the_proved_rates(planner, task, k):
    rate = {accelerated_plan: max(-0.5, -4 * (k - 1) / (5 * k - 1))}.get(
        planner, -min(1.0, 2 * (k - 1) / k)
    )
    small, large = (planner(**task | {"n": n, "moment_order": k}).bound for n in (10**8, 10**10))
    assert math.log(large / small) / math.log(100) == pytest.approx(rate, abs=0.1)


# Limits.


@ALL_PLANS
def test_many_moments_reduce_to_clipping_at_the_lipschitz_constant(planner, task):
    plan = planner(**task | {"moment_order": 1e6, "moment": 3.0})
    assert plan.clip == pytest.approx(3.0, rel=1e-3)
    assert plan.bias < 1e-3


@ALL_PLANS
def test_infinite_variance_is_refused(planner, task):
    with pytest.raises(ConditionError, match="moment_order must be >= 2"):
        planner(**task | {"moment_order": 1.5})


@ALL_PLANS
def test_tiny_and_huge_budgets_give_finite_plans(planner, task):
    huge = planner(**task | {"rho": 1e12})
    assert 0 < task["dim"] * huge.noise_std**2 < 1e-3 * huge.variance
    if planner is accelerated_plan:
        with pytest.warns(UtilityWarning, match="noise dominates"):
            tiny = planner(**task | {"rho": 1e-12})
    else:
        tiny = planner(**task | {"rho": 1e-12})
    assert huge.bound < tiny.bound < math.inf


def test_badly_conditioned_problems_have_finite_plans():
    plan = strongly_convex_plan(**STRONG | {"strong_convexity": 1e-8}, steps=50)
    curves = {"strong_convexity": 1e-8, "steps": 50}
    assert strongly_convex_coefficients(**curves, smoothness=1.0).noise == 2.0
    assert 0 < plan.bound < math.inf
    weights = averaging_schedule(**curves, smoothness=1.0).weights
    assert max(weights) / min(weights) == pytest.approx(1.0, abs=1e-6)


@ALL_PLANS
def test_a_tiny_threshold_of_ones_own_has_the_bias_of_the_whole_gradient(planner, task):
    plan = planner(**task | {"moment_order": 50.0}, clip=1e-12, steps=5)
    assert plan.bias == pytest.approx(1.0)
    assert math.isfinite(plan.bound)


# Privacy.


@pytest.mark.cases(30, 6)
@pytest.mark.parametrize("adjacency", ["replace_one", "zero_out", "add_remove"])
@pytest.mark.parametrize("steps", [None, 1, 7, 333])
@ALL_PLANS
def test_each_batch_costs_rho_and_batches_are_disjoint(planner, task, steps, adjacency):
    plan = planner(**task, steps=steps, adjacency=adjacency)
    batch_size = task["n"] // plan.steps
    assert batch_size >= 1
    sensitivity = Fraction(sensitivity_factor(adjacency)) * Fraction(plan.clip) / batch_size
    cost = sensitivity**2 / (2 * Fraction(plan.noise_std) ** 2)
    assert Fraction(task["rho"]) * (1 - Fraction(1, 2**46)) <= cost <= Fraction(task["rho"])


@ALL_PLANS
def test_half_the_sensitivity_is_worth_four_budgets(planner, task):
    half = planner(**task, steps=20, adjacency="zero_out")
    four = planner(**task | {"rho": 4 * task["rho"]}, steps=20)
    for name in ("clip", "noise_std", "bias", "variance", "bound"):
        assert getattr(half, name) == pytest.approx(getattr(four, name), rel=1e-12)


# The published numbers.


def test_the_published_numbers_are_never_better():
    data = OnePass(**TASK)
    task = {name: TASK[name] for name in ("n", "dim", "moment", "moment_order")}
    task |= {"paper_epsilon": 1.0}
    steps = math.ceil(accelerated_steps_paper(**task, smoothness=1.0, diameter=2.0))
    assert steps == 8
    clip = accelerated_clip_paper(**task, steps=steps)
    published = accelerated_plan(**CONVEX, steps=steps, clip=clip)
    assert published.bound >= accelerated_plan(**CONVEX).bound
    steps = averaged_steps_paper(data, 0.1, 1.0, 2.0)
    clip = averaged_clip_paper(data, steps)
    published = strongly_convex_plan(**STRONG, steps=steps, clip=clip)
    assert published.bound >= strongly_convex_plan(**STRONG).bound
    best = proximal_pl_plan(**PROXIMAL)
    clip = proximal_clip_paper(data, best.steps)
    assert proximal_pl_plan(**PROXIMAL, steps=best.steps, clip=clip).bound >= best.bound


def test_the_published_numbers_are_those_of_the_theorems():
    data = OnePass(**TASK)
    assert averaged_clip_paper(data, 5) == pytest.approx(
        (1e8 / 100) ** 0.25, rel=1e-12
    )  # (eps^2 n^2/(d T))^(1/(2k))
    assert proximal_clip_paper(data, 5) == pytest.approx(
        (1e4 / (math.sqrt(20) * 5)) ** 0.5, rel=1e-12
    )
    task = {name: TASK[name] for name in ("n", "dim", "moment", "moment_order")}
    none = accelerated_steps_paper(**task, paper_epsilon=1.0, smoothness=0.0, diameter=2.0)
    assert none == 0


# Refusals.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": 0}, "n must be an integer >= 1"),
        ({"dim": 0}, "dim must be an integer >= 1"),
        ({"rho": 0.0}, "rho must be > 0"),
        ({"rho": math.inf}, "rho must be finite"),
        ({"moment": -1.0}, "moment must be > 0"),
        ({"moment_order": 1.0}, "moment_order must be finite and > 1"),
        ({"second_moment": 0.0}, "second_moment must be > 0"),
        ({"steps": 0}, "steps must be an integer >= 1"),
        ({"steps": 10**4 + 1}, "steps must be <= n=10000"),
        ({"clip": 0.0}, "clip must be > 0"),
        ({"clip": math.inf}, "clip must be finite"),
        ({"adjacency": "swap"}, "adjacency must be one of"),
    ],
)
@ALL_PLANS
def test_bad_values_are_named(planner, task, change, message):
    with pytest.raises(ValueError, match=message):
        planner(**task | change)


@pytest.mark.parametrize(
    ("planner", "task", "change", "message"),
    [
        (
            strongly_convex_plan,
            STRONG,
            {"strong_convexity": 2.0},
            "strong_convexity must be <= smoothness=1",
        ),
        (
            proximal_pl_plan,
            PROXIMAL,
            {"pl_constant": 2.0},
            "pl_constant must be <= smoothness=1",
        ),
    ],
)
def test_bad_constants_are_named(planner, task, change, message):
    with pytest.raises(ValueError, match=message):
        planner(**task | change)


def test_a_distance_follows_from_strong_convexity():
    bounds = [
        strongly_convex_plan(**STRONG | {"diameter": diameter}, steps=5).bound
        for diameter in (math.inf, 11.0, 10.0, 2.0)
    ]
    assert bounds[0] == bounds[1] == bounds[2] > bounds[3]  # r_2/mu is 10


def test_thresholds_alone_are_those_of_the_plans():
    names = ("n", "dim", "rho", "moment", "moment_order")
    common = {name: TASK[name] for name in names} | {"steps": 6}
    strong = strongly_convex_clip(**common, strong_convexity=0.1, smoothness=1.0)
    assert strong == strongly_convex_plan(**STRONG, steps=6).clip
    assert proximal_pl_clip(**common) == proximal_pl_plan(**PROXIMAL, steps=6).clip
