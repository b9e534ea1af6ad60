"""The Gaussian summary of a composition: never below its curve, and hardly above."""

from __future__ import annotations

import math

import mpmath as mp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.reference.papers.accounting import LaplaceLoss, poisson_group_delta
from torch_dpsco.accounting.analysis import convert as pld_gdp
from torch_dpsco.accounting.analysis.convert import gdp_upper
from torch_dpsco.accounting.analysis.gaussian import (
    gaussian_epsilon,
    gaussian_log_delta,
    gaussian_mu,
)
from torch_dpsco.accounting.analysis.pld import pld_delta, pld_epsilon
from torch_dpsco.accounting.analysis.pld_laws import (
    ApproxLoss,
    FixedSizeLoss,
    GaussianLoss,
    PoissonLoss,
    ReplaceOneLoss,
)
from torch_dpsco.accounting.analysis.pure import pure_delta

RATE = 256 / 60000
LEDGERS = {
    "epoch": [(PoissonLoss(RATE, 1.0), 235)],
    "ten epochs": [(PoissonLoss(RATE, 2.0), 2350)],
    "replace one": [(ReplaceOneLoss(RATE, 1.0), 235)],
    "fixed size": [(FixedSizeLoss(RATE, 1.0), 235)],
    "mixture": [(PoissonLoss(RATE, 1.0), 235), (GaussianLoss(0.3), 1), (LaplaceLoss(0.2), 3)],
    "pure": [(ApproxLoss(0.1), 10)],
    "group": [(PoissonLoss(0.01, 2.0, size=4), 100)],
}


@pytest.mark.weekly
@pytest.mark.parametrize("name", LEDGERS)
def test_no_point_of_a_fine_curve_is_above_the_summary(name):
    """Upper bounds of delta at 24 other points: the summary is above all of them, and within 2 % of what they need."""
    losses = LEDGERS[name]
    mu, end, needed = gdp_upper(losses), pld_epsilon(losses, 1e-10).epsilon, 0.0
    for epsilon in np.linspace(0.0, end, 24).tolist():
        delta = pld_delta(losses, epsilon).delta
        if delta >= 1e-10 * (1 + 1e-3):
            assert gaussian_log_delta(epsilon, mu) >= math.log(delta)
            needed = max(needed, gaussian_mu(epsilon, delta))
    needed = max(needed, gaussian_mu(end, 1e-10))
    assert needed <= mu <= 1.02 * needed
    for delta in (1e-8, 1e-5, 1e-2):
        assert gaussian_epsilon(mu, delta) >= pld_epsilon(losses, delta).epsilon


@given(
    st.lists(
        st.integers(0, 900).map(lambda place: place / 100), min_size=2, max_size=4, unique=True
    ),
    st.lists(st.floats(1e-9, 1.0), min_size=4),
)
@settings(max_examples=20)
def test_chords_are_never_below_their_exact_value(knots, deltas):
    places = np.array(sorted(knots))
    values = np.array(sorted(deltas, reverse=True)[: places.size])
    epsilons, found = pld_gdp._chords(places, values)
    (low, high), (first, second) = places[:2].tolist(), values[:2].tolist()
    with mp.workdps(50):
        for epsilon, chord in list(zip(epsilons, found, strict=True))[1:128]:
            share = (mp.exp(high) - mp.exp(epsilon)) / (mp.exp(high) - mp.exp(low))
            assert chord >= min(1, second + (mp.mpf(first) - second) * share)


@pytest.mark.weekly
@settings(max_examples=5)
@given(st.floats(0.01, 0.9), st.floats(0.4, 3.0), st.floats(-12.0, -2.0).map(lambda x: 10**x))
@example(0.1, 0.5, 1e-10)
def test_one_sampled_release_is_summarized_above_its_exact_curve(rate, noise, delta_min):
    """Against the closed form of one step, in both directions and between any two points that were computed."""
    mu = gdp_upper([(PoissonLoss(rate, noise), 1)], delta_min)
    reach = 0
    for epsilon in np.linspace(0.0, 12.0, 97).tolist():
        delta = max(
            poisson_group_delta(1, rate, noise, epsilon, direction)
            for direction in ("remove", "add")
        )
        if delta >= delta_min:
            reach += 1
            assert gaussian_log_delta(epsilon, mu) >= math.log(delta) * (1 + 1e-12)
    assert reach > 0 or mu == 0.0


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
def test_a_pure_release_is_summarized_by_the_tangent_from_above(epsilon):
    mu = gdp_upper([(ApproxLoss(epsilon), 1)])
    grid = np.linspace(0.0, epsilon, 2001)[:-1]
    needed = max(gaussian_mu(float(e), pure_delta(float(e), epsilon)) for e in grid[::20])
    assert needed <= mu <= 1.02 * needed
    for point in grid:
        assert gaussian_log_delta(float(point), mu) >= math.log(pure_delta(float(point), epsilon))


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("mu", [1e-3, 0.3, 1.0, 4.0])
def test_merged_gaussians_are_summarized_by_their_own_mu(mu):
    found = gdp_upper([(GaussianLoss(0.6 * mu), 1), (GaussianLoss(0.8 * mu), 1)])
    assert mu <= found <= 1.01 * mu


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("noise", "steps", "claimed", "truth"),
    [
        (1.0, 235, 0.288, 0.393),
        (0.6, 235, 0.943, 2.781),
        (1.0, 2350, 1.013, 1.101),
        (2.0, 2350, 0.379, 0.387),
    ],
)
def test_the_central_limit_claims_less_than_the_truth_and_the_summary_does_not(
    noise, steps, claimed, truth
):
    limit = RATE * math.sqrt(steps * math.expm1(noise**-2))
    assert gaussian_epsilon(limit, 1e-5) == pytest.approx(claimed, abs=6e-4)
    losses = [(PoissonLoss(RATE, noise), steps)]
    assert pld_epsilon(losses, 1e-5).epsilon == pytest.approx(truth, abs=6e-4)
    mu = gdp_upper(losses)
    assert mu > limit
    assert gaussian_epsilon(mu, 1e-5) >= pld_epsilon(losses, 1e-5).epsilon > claimed


@pytest.mark.slow
def test_a_smaller_delta_min_and_more_releases_give_no_smaller_mu():
    losses = LEDGERS["epoch"]
    values = [gdp_upper(losses, delta_min) for delta_min in (1e-3, 1e-6, 1e-10)]
    assert values[0] <= values[1] * 1.01
    assert values[1] <= values[2] * 1.01
    assert values[2] <= gdp_upper([*losses, (PoissonLoss(RATE, 1.0), 100)]) * 1.01


def test_the_ends_of_the_range():
    assert gdp_upper([]) == 0.0
    assert (
        gdp_upper([(PoissonLoss(1e-6, 10.0), 1)], 0.5) == 0.0
    )  # delta is below delta_min everywhere
    assert gdp_upper([(ApproxLoss(1.0, 1e-5), 1)], 1e-10) == math.inf
    assert gdp_upper([(ApproxLoss(1.0, 1e-12), 1)], 1e-10) < 3.0
    assert (
        gdp_upper([(GaussianLoss(30.0), 1)]) == math.inf
    )  # the total variation distance is 1 in floating point
    assert gdp_upper([(PoissonLoss(0.5, 0.01, size=600), 1)]) is None


def test_a_point_without_a_figure_leaves_no_summary(monkeypatch):
    monkeypatch.setattr(pld_gdp, "pld_delta", lambda losses, epsilon: None)
    assert gdp_upper(LEDGERS["epoch"]) is None


@pytest.mark.slow
def test_few_compositions_are_enough(monkeypatch):
    asked = []
    monkeypatch.setattr(
        pld_gdp, "pld_delta", lambda *arguments: asked.append(1) or pld_delta(*arguments)
    )
    for name in ("ten epochs", "pure"):
        asked.clear()
        gdp_upper(LEDGERS[name])
        assert len(asked) <= 33


@pytest.mark.parametrize("delta_min", [0.0, 1.0, -1e-5, math.nan])
def test_a_delta_min_out_of_range_is_named(delta_min):
    with pytest.raises(ValueError, match="delta_min must be in"):
        gdp_upper(LEDGERS["epoch"], delta_min)


def test_a_negative_number_of_releases_is_refused():
    with pytest.raises(ValueError, match="count must be an integer >= 0"):
        gdp_upper([(GaussianLoss(1.0), -1)])
