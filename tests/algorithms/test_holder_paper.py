"""The published noise of gradient perturbation: its conditions, the search for its split, and the measured errata."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.reference.papers.accounting import rdp_epsilon_classic, rdp_wor_gaussian_closed_form
from tests.reference.papers.holder import (
    feasibility_threshold_paper,
    gradient_noise_paper,
    search_gradient_noise_paper,
    search_split_paper,
    unconstrained_split,
)
from tests.reference.papers.orders import rdp_wor_gaussian
from torch_dpsco.accounting.analysis.rdp import default_orders, rdp_epsilon
from torch_dpsco.errors import ConditionError, InfeasibleError

sizes = st.integers(2, 10**6)
epsilons = st.floats(0.05, 20.0)
deltas = st.floats(-12.0, -1.0).map(lambda x: 10**x)


@given(sizes, st.integers(1, 10**6), epsilons, deltas, st.floats(1e-6, 1 - 1e-6))
def test_the_conditions_are_those_of_the_closed_form_and_its_conversion_returns_epsilon(
    n, steps, epsilon, delta, split
):
    noise = gradient_noise_paper(n, 1, steps, epsilon, delta, split, grad_bound=3.0)
    assert noise.variance == pytest.approx(36 * noise.ratio_squared, rel=1e-14)
    try:
        step = rdp_wor_gaussian_closed_form(1 / n, math.sqrt(noise.ratio_squared), noise.order)
    except ConditionError:
        assert not (noise.condition_a and noise.condition_b)
        return
    assert noise.condition_a
    assert noise.condition_b
    assert rdp_epsilon_classic(steps * step, noise.order, delta) == pytest.approx(
        epsilon, rel=1e-9
    )


@given(sizes, st.integers(1, 4), st.integers(1, 10**7), epsilons, deltas)
@example(10000, 1, 10000, 1.0, 1e-8)
@settings(max_examples=60)
def test_the_searched_split_satisfies_both_conditions_when_evaluated_again(
    n, batch_size, steps, epsilon, delta
):
    batch_size = min(batch_size, n)
    try:
        found = search_split_paper(n, batch_size, steps, epsilon, delta)
    except InfeasibleError:
        return
    again = gradient_noise_paper(
        n, batch_size, steps, epsilon, delta, found.split, grad_bound=1.0
    )
    assert again.condition_a
    assert again.condition_b
    assert again.ratio_squared <= found.ratio_squared <= again.ratio_squared * (1 + 1e-9)
    assert again.order == pytest.approx(found.order, rel=1e-9)


@pytest.mark.cases(3, 1)
@pytest.mark.parametrize(
    ("n", "batch_size", "steps", "epsilon", "delta"),
    [
        (1000, 1, 1000, 2.0, 1e-6),
        (10000, 1, 10000, 4.0, 1e-8),
        (50000, 1, 10**8, 0.5, 1e-9),
        (100, 1, 100, 2.6, 1e-4),
    ],
)
def test_no_other_split_has_less_noise(n, batch_size, steps, epsilon, delta):
    least = search_gradient_noise_paper(n, batch_size, steps, epsilon, delta)
    draws = np.random.default_rng(0).uniform(-15, 15, 4000)
    rivals = [
        gradient_noise_paper(
            n, batch_size, steps, epsilon, delta, 1 / (1 + math.exp(-x)), grad_bound=1.0
        )
        for x in draws
    ]
    feasible = [
        noise.ratio_squared for noise in rivals if noise.condition_a and noise.condition_b
    ]
    assert feasible
    assert least <= min(feasible) <= least * 1.05


@pytest.mark.parametrize(
    ("n", "epsilon", "paper", "tight"),
    [
        (1000, 2.0, 1.74, 0.753),
        (10000, 1.0, 2.56, 0.936),
        (10000, 4.0, 1.01, 0.549),
        (100000, 1.0, 2.31, 1.018),
    ],
)
def test_measured_noise_of_the_paper_is_twice_that_of_the_tight_accounting(
    n, epsilon, paper, tight
):
    ratio = math.sqrt(search_gradient_noise_paper(n, 1, n, epsilon, n**-2.0))
    assert ratio == pytest.approx(paper, abs=0.005)
    grid = default_orders()
    assert (
        rdp_epsilon(grid, n * rdp_wor_gaussian(1 / n, 1.002 * tight, grid), n**-2.0).epsilon
        <= epsilon
    )


def test_measured_split_for_sixty_thousand_records():
    found = search_split_paper(60000, 1, 60000, 1.0, 60000**-2.0)
    assert found.split == pytest.approx(2.4e-4, rel=0.02)
    assert math.sqrt(found.ratio_squared) == pytest.approx(2.347, abs=1e-3)


def test_the_feasible_split_is_nowhere_near_one_half_when_every_record_is_used_once():
    assert search_split_paper(1000, 1, 1000, 1.0, 1e-6).split < 0.01
    assert search_split_paper(100000, 1, 100000, 1.0, 1e-10).split < 2e-4


@given(epsilons, deltas)
def test_the_unconstrained_split_minimizes_the_noise(epsilon, delta):
    best = unconstrained_split(epsilon, delta)
    assert 0.5 < best < 1

    def noise(split: float) -> float:
        return gradient_noise_paper(
            1000, 1, 1000, epsilon, delta, split, grad_bound=1.0
        ).ratio_squared

    assert noise(best) <= min(noise(best * 0.99), noise(best + 0.01 * (1 - best))) * (1 + 1e-14)
    k = math.log(1 / delta) / epsilon
    assert best == pytest.approx((1 + k) - math.sqrt(k * (1 + k)), rel=1e-9)


def test_the_search_returns_the_unconstrained_minimum_where_the_conditions_allow_it():
    n, steps, epsilon, delta = 10**6, 10**12, 1.0, 0.5
    found = search_split_paper(n, 1, steps, epsilon, delta)
    assert found.split == pytest.approx(unconstrained_split(epsilon, delta), rel=1e-12)


@pytest.mark.parametrize("n", [18, 27, 35, 43])
def test_the_existence_lemma_of_the_paper_is_false_for_small_data_sets(n):
    with pytest.raises(InfeasibleError, match="exact curves"):
        search_gradient_noise_paper(n, 1, n, feasibility_threshold_paper(n), n**-2.0)


@pytest.mark.parametrize("n", [44, 100, 1000])
def test_the_existence_lemma_holds_for_larger_ones(n):
    assert search_gradient_noise_paper(n, 1, n, feasibility_threshold_paper(n), n**-2.0) >= 0.67


def test_the_threshold_of_the_lemma_is_far_from_necessary():
    assert feasibility_threshold_paper(10000) == pytest.approx(0.897, abs=5e-4)
    assert search_gradient_noise_paper(10000, 1, 10000, 0.38, 1e-8) > 0
    with pytest.raises(InfeasibleError):
        search_gradient_noise_paper(10000, 1, 10000, 0.378, 1e-8)


def test_infeasible_targets_name_the_way_out():
    with pytest.raises(
        InfeasibleError, match=r"n=500, batch_size=1, steps=50000, epsilon=1, .*exact curves"
    ):
        search_gradient_noise_paper(500, 1, 50000, 1.0, 1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": 0}, "n must be an integer >= 1"),
        ({"batch_size": 0}, "batch_size must be an integer >= 1"),
        ({"batch_size": 101}, "batch_size must be at most n = 100"),
        ({"steps": 0}, "steps must be an integer >= 1"),
        ({"epsilon": 0.0}, "epsilon must be > 0"),
        ({"delta": 1.0}, "delta must be in"),
        ({"split": 1.0}, "split must be in"),
        ({"grad_bound": -1.0}, "grad_bound must be > 0"),
    ],
)
def test_arguments_out_of_range_are_named(change, message):
    good = {
        "n": 100,
        "batch_size": 1,
        "steps": 10,
        "epsilon": 1.0,
        "delta": 1e-5,
        "split": 0.5,
        "grad_bound": 1.0,
    }
    with pytest.raises(ValueError, match=message):
        gradient_noise_paper(**{**good, **change})


def test_the_threshold_needs_two_records():
    with pytest.raises(ValueError, match="n must be an integer >= 2"):
        feasibility_threshold_paper(1)
