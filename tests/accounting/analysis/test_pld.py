"""Epsilon and delta by privacy loss distributions: vectors, other tools, exact Gaussians, limits, and refusals."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from dp_accounting.pld import privacy_loss_distribution as other_tool
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference.papers.accounting import LaplaceLoss
from tests.reference.papers.mixtures import rdp_poisson_gaussian
from tests.reference.papers.orders import rdp_poisson_gaussian_replace_one, rdp_wor_gaussian
from torch_dpsco.accounting.analysis import pld
from torch_dpsco.accounting.analysis.gaussian import gaussian_delta, gaussian_epsilon
from torch_dpsco.accounting.analysis.pld import pld_delta, pld_epsilon
from torch_dpsco.accounting.analysis.pld_laws import (
    DeltaCurve,
    FixedSizeLoss,
    GaussianLoss,
    GridLaw,
    LossLaw,
    PoissonLoss,
    PureLoss,
    ReplaceOneLoss,
)
from torch_dpsco.accounting.analysis.rdp import default_orders, rdp_epsilon

VECTORS = Path(__file__).parents[2] / "vectors" / "accounting.json"
CASES = [
    case
    for case in json.loads(VECTORS.read_text())["cases"]
    if case["function"].startswith("epsilon_")
]
ORDERS = default_orders()
RATE, EPOCH = 256 / 60000, 235


def forget() -> None:
    pld._kept.cache_clear()
    pld._both_ways.cache_clear()


def epsilon(law: LossLaw, steps: int, delta: float = 1e-5, grid: float = 1e-4) -> float:
    return pld_epsilon([(law, steps)], delta, grid=grid).epsilon


def law_of(case: dict) -> LossLaw:
    inputs, noise = case["inputs"], case["inputs"]["noise_multiplier"]
    if case["function"] == "epsilon_wor_replace_one":
        return FixedSizeLoss(inputs["gamma"], noise / 2)
    if case["function"] == "epsilon_poisson_add_remove":
        return PoissonLoss(inputs["q"], noise)
    return ReplaceOneLoss(inputs["q"], noise) if inputs["q"] < 1 else GaussianLoss(2 / noise)


@pytest.mark.cases(3, 1)
@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case['function']}-{list(case['inputs'].values())}"
)
def test_vectors_are_met(case):
    result = pld_epsilon([(law_of(case), case["inputs"]["steps"])], case["inputs"]["delta"])
    expected = case["expected"]
    assert expected - 5e-4 <= result.epsilon <= expected * (1 + case["rtol"]) + case["atol"]
    # far closer than the vectors ask for
    assert result.epsilon == pytest.approx(expected, rel=2e-5)


TABLE = [
    (lambda s: PoissonLoss(RATE, s), [2.781, 0.3934, 0.1150, 4.953, 1.1013, 0.3871]),
    (lambda s: ReplaceOneLoss(RATE, s), [2.874, 0.5299, 0.2162, 5.769, 1.7665, 0.7567]),
    (lambda s: FixedSizeLoss(RATE, s / 2), [23.83, 5.143, 0.4369, 62.63, 10.445, 1.3653]),
]


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(("law", "row"), TABLE, ids=["add_remove", "replace_one", "fixed"])
def test_the_decision_table_is_reproduced(law, row):
    settings_ = [(s, n) for n in (EPOCH, 10 * EPOCH) for s in (0.6, 1.0, 2.0)]
    for (noise, steps), expected in zip(settings_, row, strict=True):
        assert epsilon(law(noise), steps, grid=1e-3) == pytest.approx(expected, rel=1e-2)
        assert epsilon(law(noise), steps) == pytest.approx(expected, rel=1e-3)


def random_settings() -> list:
    rng = np.random.default_rng(7)
    chosen = []
    for number in range(30):
        rate, noise = 10 ** rng.uniform(-3.5, -0.1), 10 ** rng.uniform(-0.25, 0.7)
        steps, delta = int(10 ** rng.uniform(0, 3)), 10 ** rng.uniform(-8, -2)
        setting = rate, noise, steps, delta, ("add_remove", "replace_one")[number % 2]
        chosen.append(pytest.param(*setting, marks=pytest.mark.slow if number >= 10 else ()))
    return chosen


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(("rate", "noise", "steps", "delta", "adjacency"), random_settings())
def test_random_settings_agree_with_dp_accounting(rate, noise, steps, delta, adjacency):
    replace = adjacency == "replace_one"
    relation = (
        NeighboringRelation.REPLACE_ONE if replace else NeighboringRelation.ADD_OR_REMOVE_ONE
    )
    law = ReplaceOneLoss(rate, noise) if replace else PoissonLoss(rate, noise)
    ours = pld_epsilon([(law, steps)], delta)
    grid = min(1e-4, ours.grid)  # theirs is not refined where losses are small
    theirs = other_tool.from_gaussian_mechanism(
        noise,
        sampling_prob=rate,
        neighboring_relation=relation,
        value_discretization_interval=grid,
    )
    expected = theirs.self_compose(steps).get_epsilon_for_delta(delta)
    assert ours.epsilon >= expected * (1 - 2e-3) - 1e-9
    assert ours.epsilon <= expected * (1 + 1e-3) + 1e-9


def test_laplace_agrees_with_dp_accounting():
    theirs = other_tool.from_laplace_mechanism(
        5.0, value_discretization_interval=1e-3
    ).self_compose(60)
    assert epsilon(LaplaceLoss(0.2), 60, 1e-6) == pytest.approx(
        theirs.get_epsilon_for_delta(1e-6), rel=1e-5
    )


def fourier_path(mu: float, steps: int, query: pld._Query, grid: float) -> pld.PLDResult | None:
    """The general path on Gaussians, which the public functions answer in closed form."""
    return pld._improved(((GaussianLoss(mu / math.sqrt(steps)), steps),), query, grid)


@pytest.mark.weekly
@given(
    steps=st.floats(0, 6).map(lambda e: int(10**e)),
    mu=st.floats(-2, 1).map(lambda e: 10**e),
    delta=st.one_of(st.floats(-40, -0.1), st.floats(-9, -2)).map(lambda e: 10**e),
    grid=st.floats(-4, -1).map(lambda e: 10**e),
)
@settings(max_examples=40)
def test_no_figure_is_below_the_exact_gaussian(steps, mu, delta, grid):
    found = fourier_path(mu, steps, pld._AtDelta(delta), grid)
    exact = gaussian_epsilon(mu, delta)
    assert exact * (1 - 1e-13) <= found.epsilon
    if found.rounding < 0.01:
        assert found.epsilon <= exact * (1 + 3e-3) + 1e-9
    at = fourier_path(mu, steps, pld._AtEpsilon(exact), grid)
    true = gaussian_delta(mu, exact)
    assert true * (1 - 1e-12) <= at.delta
    assert at.delta <= true * (1.02 + at.rounding / (1 - at.rounding))


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(("rate", "noise"), [(0.01, 1.0), (0.3, 0.7), (1e-4, 3.0)])
@pytest.mark.parametrize("at", [0.0, 0.01, 0.5])
def test_a_single_step_has_its_exact_delta(rate, noise, at):
    # remove: log r(x) > at, x solved in closed form
    cut = noise**2 * (math.log(math.expm1(at) / rate + 1)) + 0.5

    def above(mean: float) -> float:
        return math.erfc((cut - mean) / noise / math.sqrt(2)) / 2

    exact = (1 - rate) * above(0.0) + rate * above(1.0) - math.exp(at) * above(0.0)
    found = pld_delta([(PoissonLoss(rate, noise), 1)], at)
    assert exact - 1e-15 <= found.delta <= exact * 1.001 + 1e-15


@pytest.mark.slow
def test_epsilon_and_delta_are_inverse():
    ledger = [
        (ReplaceOneLoss(0.02, 1.1), 300),
        (FixedSizeLoss(0.01, 1.5), 20),
        (LaplaceLoss(0.1), 3),
    ]
    for delta in (1e-3, 1e-6, 1e-12):
        assert pld_delta(ledger, pld_epsilon(ledger, delta).epsilon).delta == pytest.approx(
            delta, rel=1e-2
        )


@pytest.mark.slow
def test_the_worse_direction_is_reported():
    for rate, noise, steps, at in (
        (0.3, 0.8, 5, 1.0),
        (0.9, 1.0, 3, 0.5),
        (0.01, 1.0, 500, 0.0),
    ):
        ledger = ((PoissonLoss(rate, noise), steps),)
        exchanged = ((PoissonLoss(rate, noise, reverse=True), steps),)
        query = pld._AtEpsilon(at)
        ways = [pld._improved(order, query, 1e-4).delta for order in (ledger, exchanged)]
        assert pld_delta(ledger, at).delta == pld_delta(exchanged, at).delta == max(ways)
    assert ways[0] == pytest.approx(
        ways[1], rel=1e-6
    )  # the total variation distance has no order
    ways = [
        pld._improved(order, pld._AtDelta(1e-5), 1e-4).epsilon for order in (ledger, exchanged)
    ]
    assert pld_epsilon(exchanged, 1e-5).epsilon == ways[0] > 1.05 * ways[1]


@pytest.mark.slow
def test_fixed_batches_accounted_by_one_ordering_are_under_reported():
    for noise, published in ((0.6, 23.37), (1.0, 5.030), (2.0, 0.3934)):
        right = epsilon(FixedSizeLoss(RATE, noise / 2), EPOCH)
        one_ordering = epsilon(
            PoissonLoss(RATE, noise / 2), EPOCH
        )  # (mix, Q), as if it dominated
        assert one_ordering == pytest.approx(published, rel=1e-3)
        assert right > 1.015 * one_ordering


@pytest.mark.slow
def test_gaussians_merge_into_one():
    parts = [
        (GaussianLoss(0.3), 4),
        (GaussianLoss(0.2), 9),
        (GaussianLoss(0.5), 1),
        (GaussianLoss(0.25), 3),
    ]
    mu = math.sqrt(4 * 0.09 + 9 * 0.04 + 0.25 + 3 / 16)
    found = pld_epsilon(parts, 1e-6)
    assert found.epsilon == pytest.approx(gaussian_epsilon(mu, 1e-6), rel=1e-12)
    assert found.epsilon >= gaussian_epsilon(mu * (1 - 1e-15), 1e-6)
    assert found.grid == 0
    assert pld_delta(parts, 2.0).delta == pytest.approx(gaussian_delta(mu, 2.0), rel=1e-9)
    mixed = [(PoissonLoss(0.01, 1.0), 50)]
    assert pld_epsilon([*parts, *mixed], 1e-6) == pld_epsilon(
        [(GaussianLoss(mu), 1), *mixed], 1e-6
    )._replace(
        epsilon=pytest.approx(pld_epsilon([*parts, *mixed], 1e-6).epsilon, rel=1e-12),
        rounding=pytest.approx(pld_epsilon([*parts, *mixed], 1e-6).rounding, rel=1e-1),
    )


@given(st.lists(st.tuples(st.floats(1e-3, 30.0), st.integers(1, 10**6)), min_size=1, max_size=6))
def test_merged_gaussians_are_not_below_their_exact_sum(parts):
    ((merged, _),) = pld._canonical([(GaussianLoss(mu), count) for mu, count in parts])
    assert Fraction(merged.mu) ** 2 >= sum(Fraction(mu) ** 2 * count for mu, count in parts)


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(
    "make",
    [
        lambda q: PoissonLoss(q, 3.0),
        lambda q: ReplaceOneLoss(q, 6.0),
        lambda q: FixedSizeLoss(q, 3.0),
    ],
)
def test_the_unsampled_limit_is_gaussian(make):
    assert epsilon(make(1 - 1e-9), 10) == pytest.approx(
        gaussian_epsilon(math.sqrt(10) / 3, 1e-5), rel=1e-6
    )


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    "make", [PoissonLoss, ReplaceOneLoss, FixedSizeLoss], ids=lambda make: make.__name__
)
@pytest.mark.parametrize("delta", [1e-3, 1e-7])
def test_more_steps_less_noise_and_higher_rates_cost_more(make, delta):
    rates, noises, steps = (1e-4, 1e-3, 0.05, 0.6, 0.99), (5.0, 1.5, 0.9, 0.5), (1, 2, 30, 400)
    for costs in (
        [epsilon(make(rate, 0.8), 20, delta) for rate in rates],
        [epsilon(make(0.01, noise), 20, delta) for noise in noises],
        [epsilon(make(0.01, 0.8), count, delta) for count in steps],
    ):
        assert costs == sorted(costs)
        assert costs[-1] > costs[0] + 0.01
    deltas = [epsilon(make(0.01, 0.8), 20, d) for d in (1e-1, 1e-2, 1e-5, 1e-9, 1e-14)]
    assert deltas == sorted(deltas)


@pytest.mark.slow
@given(
    rate=st.floats(-5, -0.05).map(lambda e: 10**e),
    noise=st.floats(-0.3, 1.3).map(lambda e: 10**e),
    steps=st.floats(0, 4).map(lambda e: int(10**e)),
    delta=st.floats(-12, -2).map(lambda e: 10**e),
    adjacency=st.sampled_from(["add_remove", "replace_one", "fixed"]),
)
@settings(max_examples=25)
def test_renyi_bounds_are_never_lower(rate, noise, steps, delta, adjacency):
    law, curve = {
        "add_remove": lambda: (
            PoissonLoss(rate, noise),
            rdp_poisson_gaussian(rate, noise, ORDERS),
        ),
        "replace_one": lambda: (
            ReplaceOneLoss(rate, noise),
            rdp_poisson_gaussian_replace_one(rate, noise, ORDERS),
        ),
        "fixed": lambda: (FixedSizeLoss(rate, noise), rdp_wor_gaussian(rate, noise, ORDERS)),
    }[adjacency]()
    found = pld_epsilon([(law, steps)], delta)
    assert (
        found.epsilon * (1 - 2e-3)
        <= rdp_epsilon(ORDERS, steps * curve, delta).epsilon * (1 + 1e-9) + 1e-9
    )


@pytest.mark.slow
def test_replace_one_costs_at_least_add_remove_and_at_most_twice_the_sensitivity():
    for rate, noise, steps in ((0.004, 0.6, 235), (0.1, 2.0, 100), (0.5, 1.0, 10)):
        replaced = epsilon(ReplaceOneLoss(rate, noise), steps)
        assert (
            epsilon(PoissonLoss(rate, noise), steps)
            < replaced
            < gaussian_epsilon(2 * math.sqrt(steps) / noise, 1e-5)
        )


@pytest.mark.slow
def test_the_grid_only_adds_and_not_much():
    law, steps = PoissonLoss(0.003, 0.9), 1000
    finest = epsilon(law, steps, grid=1e-5)
    for grid in (1e-4, 1e-3, 3e-3):
        found = pld_epsilon([(law, steps)], 1e-5, grid=grid)
        assert finest * (1 - 1e-6) <= found.epsilon <= finest * (1 + 2e-3)


@pytest.mark.slow
def test_the_grid_adapts_to_losses_below_it():
    # a grid of 1e-4 would give 0.029
    found = pld_epsilon([(FixedSizeLoss(1 / 60000, 2.347), 60000)], 60000.0**-2)
    assert 0.0100 < found.epsilon <= 0.0110
    assert found.grid < 1e-5
    tilted = epsilon(FixedSizeLoss(1 / 60000, 0.591), 60000, 60000.0**-2)
    assert tilted == pytest.approx(0.9793, rel=2e-3)
    assert epsilon(ReplaceOneLoss(1 / 60000, 0.591), 60000, 60000.0**-2) == pytest.approx(
        0.980, rel=2e-3
    )


@pytest.mark.slow
def test_bugs_of_other_accountants_do_not_recur():
    assert epsilon(PoissonLoss(0.01, 30.0), 1) <= 6.57e-4  # orders that end at 63 gave 0.103
    assert epsilon(PoissonLoss(0.01, 20.3925), 1000) <= 0.05  # "privacy budget is too low"
    assert epsilon(PoissonLoss(1e-4, 100.0), 1, 1e-2) == 0.0  # was negative
    assert (
        1.9605 <= epsilon(PoissonLoss(0.2, 3.0), 50, 1 / 48000) <= 1.971
    )  # a central limit gave 1.838
    assert epsilon(PoissonLoss(0.1, 0.3), 1000) == pytest.approx(
        506.19, rel=1e-3
    )  # hung, or overflowed
    assert epsilon(PoissonLoss(0.01, 1.0), 1000, 1e-18) == pytest.approx(
        5.766, rel=1e-3
    )  # raised
    assert epsilon(FixedSizeLoss(RATE, 0.3), EPOCH) < 24  # 300


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("law", "steps", "delta"),
    [
        (PoissonLoss(1e-6, 1.0), 1000, 1e-9),
        (PoissonLoss(1e-9, 1.0), 1, 1e-12),
        (PoissonLoss(0.01, 100.0), 10**6, 1e-5),
        (PoissonLoss(0.3, 1e6), 10, 1e-9),
        (PoissonLoss(0.001, 1.0), 10**6, 1e-12),
        (PoissonLoss(0.5, 1.0), 10**5, 1e-5),
        (ReplaceOneLoss(0.2, 0.2), 4, 1e-6),
        (FixedSizeLoss(1e-3, 0.25), 10**4, 1e-5),
        (PoissonLoss(0.01, 1.0), 1000, 1e-100),
    ],
    ids=repr,
)
def test_extreme_settings_get_a_figure_near_or_below_the_renyi_bound(law, steps, delta):
    found = pld_epsilon([(law, steps)], delta)
    curve = {
        PoissonLoss: lambda: rdp_poisson_gaussian(law.rate, law.noise, ORDERS),
        ReplaceOneLoss: lambda: rdp_poisson_gaussian_replace_one(law.rate, law.noise, ORDERS),
        FixedSizeLoss: lambda: rdp_wor_gaussian(law.rate, law.noise, ORDERS),
    }[type(law)]()
    bound = rdp_epsilon(ORDERS, steps * curve, delta).epsilon
    assert 0 < found.epsilon < bound
    assert found.rounding < 0.02


def test_what_rounding_took_from_the_losses_is_added():
    curve = DeltaCurve(-3, 0.5, np.log([0.9, 0.8, 0.7, 0.5, 0.2, 0.1, 0.05]), np.full(7, -40.0))
    for delta in (0.04, 0.06, 0.2, 0.3):
        exact = pld._AtDelta(delta).answer(curve, 0.0)
        shifted = pld._AtDelta(delta).answer(curve, 0.03)
        assert (
            exact is shifted is None
            if delta < 0.05
            else shifted.epsilon == pytest.approx(exact.epsilon + 0.03)
        )
    for epsilon in (0.2, 0.9):
        shifted = pld._AtEpsilon(epsilon).answer(curve, 0.03).delta
        assert shifted == pytest.approx(pld._AtEpsilon(epsilon - 0.03).answer(curve, 0.0).delta)
        assert shifted > pld._AtEpsilon(epsilon).answer(curve, 0.0).delta


@pytest.mark.slow
def test_large_deltas_cost_nothing_and_epsilon_zero_has_the_total_variation():
    ledger = [(PoissonLoss(0.01, 1.0), 1000)]
    total_variation = pld_delta(ledger, 0.0).delta
    assert 0.1 < total_variation < 0.3
    for delta in (total_variation * 1.001, 0.9, 0.999999, 1.0):
        assert pld_epsilon(ledger, delta).epsilon == 0.0
    assert pld_epsilon(ledger, total_variation * 0.99).epsilon > 0
    assert pld_delta(ledger, 1e4).delta < 1e-15


def test_nothing_costs_nothing():
    assert pld_epsilon([], 1e-5).epsilon == 0.0
    assert pld_epsilon([(PoissonLoss(0.01, 1.0), 0)], 1e-5).epsilon == 0.0
    assert pld_epsilon([(GaussianLoss(1.0), 0)], 1e-5).epsilon == 0.0
    assert pld_epsilon([(PureLoss(0.0), 5)], 1e-5).epsilon < 1e-12
    assert pld_delta([], 0.0).delta == 0.0


def test_pure_and_approximate_laws_compose_exactly():
    # k-fold randomized response: delta is a binomial sum
    e, k, at = 0.25, 12, 1.1
    exact = math.fsum(
        math.comb(k, j)
        * max(0.0, math.exp(e * j) - math.exp(at + e * (k - j)))
        / (1 + math.exp(e)) ** k
        for j in range(k + 1)
    )
    found = pld_delta([(PureLoss(e), k)], at).delta
    assert exact <= found <= exact * (1 + 1e-6)
    assert pld_epsilon([(PureLoss(e), 3)], 1e-12).epsilon == pytest.approx(0.75, rel=1e-3)


def test_order_and_grouping_do_not_matter():
    a, b, c = (
        (PoissonLoss(0.01, 1.0), 100),
        (LaplaceLoss(0.3), 2),
        (ReplaceOneLoss(0.02, 2.0), 30),
    )
    reference = pld_epsilon([a, b, c], 1e-5)
    assert pld_epsilon([c, a, b], 1e-5) == reference
    assert pld_epsilon([c, (a[0], 40), b, (a[0], 60)], 1e-5) == reference


@pytest.mark.slow
def test_composition_is_at_most_additive_and_at_least_its_largest_part():
    parts = [(PoissonLoss(0.05, 0.9), 20), (FixedSizeLoss(0.02, 0.7), 10)]
    alone = [pld_epsilon([part], 5e-6).epsilon for part in parts]
    both = pld_epsilon(parts, 1e-5).epsilon
    assert max(pld_epsilon([part], 1e-5).epsilon for part in parts) < both < sum(alone)


@pytest.mark.slow
def test_many_distinct_noises_get_a_figure_or_none():
    rng = np.random.default_rng(3)
    ledger = [(PoissonLoss(0.004, noise), 5) for noise in rng.uniform(0.8, 2.0, 60)]
    between = [epsilon(PoissonLoss(0.004, noise), 300) for noise in (2.0, 0.8)]
    assert between[0] < pld_epsilon(ledger, 1e-5, grid=1e-3).epsilon < between[1]
    assert pld_epsilon([(PoissonLoss(0.004, 1 + i / 1000), 1) for i in range(600)], 1e-5) is None


def test_a_less_accurate_transform_only_loosens_the_figure(monkeypatch):
    law, steps = PoissonLoss(0.01, 1.0), 1000
    accurate = pld_epsilon([(law, steps)], 1e-5)
    assert accurate.rounding < 1e-5
    forget()
    monkeypatch.setattr("torch_dpsco.accounting.analysis.pld._ETA", 1e-10)
    inaccurate = pld_epsilon([(law, steps)], 1e-5)
    forget()
    assert inaccurate.rounding > 1e-3
    assert inaccurate.epsilon > accurate.epsilon * (1 + 1e-5)
    assert inaccurate.epsilon <= accurate.epsilon * 1.01


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(("steps", "delta"), [(1, 1e-14), (2, 1e-11), (100, 1e-11)])
def test_rare_losses_get_figures_far_below_the_renyi_bound(steps, delta):
    # rounding makes up part of these deltas, and the grid is coarsened for it
    found = pld_epsilon([(PoissonLoss(1e-5, 0.6), steps)], delta)
    renyi = rdp_epsilon(ORDERS, steps * rdp_poisson_gaussian(1e-5, 0.6, ORDERS), delta).epsilon
    assert 0 < found.epsilon < 0.3 * renyi
    assert found.rounding < 0.05


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(
    ("law", "steps", "delta"),
    [
        (PoissonLoss(0.5, 1e-4), 10, 1e-5),
        (PoissonLoss(0.5, 1e-200), 1, 1e-5),
        (ReplaceOneLoss(0.5, 1e-3), 1, 1e-5),
        (LaplaceLoss(1e9), 2, 1e-5),
        (PoissonLoss(0.01, 1.0), 10, 1e-305),
        (PoissonLoss(0.5, 0.1), 10**9, 1e-5),
    ],
    ids=repr,
)
def test_hopeless_settings_are_refused(law, steps, delta):
    assert pld_epsilon([(law, steps)], delta) is None


def test_masses_that_are_not_finite_never_reach_a_figure(monkeypatch):
    def broken(self: LaplaceLoss, grid: float, reach: float) -> GridLaw:
        return GridLaw(0, np.array([math.nan, 0.5]), 0.0, grid, 0.0)

    monkeypatch.setattr(LaplaceLoss, "on_grid", broken)
    assert pld_epsilon([(LaplaceLoss(0.123), 2)], 1e-5) is None
