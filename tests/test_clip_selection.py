"""Choosing a clip: rules and sizes, and the two stand-alone releases, which charge before they draw."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

import torch_dpsco as dp
from tests.reference.papers.heavy_tailed import quantile_probabilities
from torch_dpsco import clip_selection
from torch_dpsco.accounting.adjacency import ADD_REMOVE, ADJACENCIES, REPLACE_ONE, ZERO_OUT
from torch_dpsco.accounting.stated import ZCDP, Pure
from torch_dpsco.clip_selection import (
    C_MAX,
    C_MIN,
    adaptive_clip_update,
    pilot_size,
    private_moment,
    private_quantile,
    rank_error,
    target_quantile,
)
from torch_dpsco.errors import AdjacencyError, BudgetExceeded, InfeasibleError, UtilityWarning
from torch_dpsco.mechanisms.exponential import geometric_grid

NORMS = np.random.default_rng(0).exponential(size=2000)


def quantile(norms=NORMS, **changes):
    arguments = {"quantile": 0.9, "epsilon": 1.0, "accountant": dp.Accountant()} | changes
    return private_quantile(norms, **arguments)


def moment(norms=NORMS, order=3.0, **changes):
    return private_moment(norms, order, **({"rho": 0.5, "accountant": dp.Accountant()} | changes))


# -- rules ------------------------------------------------------------------------------------------------------------

PILOT = {"pilot_size": 2000, "epsilon": 1.0, "grid_size": 107}


@pytest.mark.parametrize(
    ("rule", "rate", "expected"),
    [
        ("theory", 0.02, 0.98),
        ("balanced", 0.02, 0.9),
        ("balanced", 0.3, 0.7),
        ("median", None, 0.5),
        ("theory", 0.9, 0.1),
    ],
)
def test_each_rule_gives_its_quantile(rule, rate, expected):
    assert target_quantile(rule, rate, **PILOT) == pytest.approx(expected, rel=1e-12)


def test_where_noise_dominates_the_quantile_is_a_tenth_and_a_warning_says_so():
    for rule in ("theory", "balanced"):
        with pytest.warns(UtilityWarning, match="noise dominates"):
            assert target_quantile(rule, 0.91, **PILOT) == 0.1


def test_a_quantile_past_what_the_pilot_resolves_is_lowered_and_reported():
    error = rank_error(1.0, 107)
    assert error == pytest.approx(2 * math.log(107 / 0.05))
    just = 2 * error / 2000
    assert target_quantile("theory", just * 1.001, **PILOT) == pytest.approx(1 - just * 1.001)
    with pytest.warns(UtilityWarning, match=r"quantile 0.985 instead of 0.999"):
        lowered = target_quantile("theory", 0.001, **PILOT)
    assert lowered == pytest.approx(1 - just)


def test_quantiles_near_the_end_are_kept_away_from_thresholds_above_every_norm():
    """At 1 - rank_error / n itself, more than a quarter of the draws are above every norm."""
    norms = np.random.default_rng(1).standard_t(2.5, size=2000)
    with pytest.warns(UtilityWarning):
        quantile = target_quantile("theory", 1e-9, **PILOT)
    law = quantile_probabilities(np.abs(norms), geometric_grid(C_MIN, C_MAX), quantile, 1.0)
    above = sum(p for p, tau in zip(law, geometric_grid(C_MIN, C_MAX), strict=True) if tau >= np.abs(norms).max())
    assert above < 0.01


def test_a_pilot_that_resolves_nothing_is_refused_with_the_size_that_does():
    least = math.floor(rank_error(0.01, 107)) + 1
    with pytest.raises(InfeasibleError, match=f"pilot_size must be >= {least}"):
        target_quantile("median", pilot_size=least - 1, epsilon=0.01, grid_size=107)
    with pytest.warns(UtilityWarning, match="resolves ranks"):
        assert 0 < target_quantile("median", pilot_size=least, epsilon=0.01, grid_size=107) < 0.01


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("best", 0.1), "rule must be one of theory, balanced, median"),
        (("theory",), "exchange_rate must be given"),
        (("theory", -0.1), "exchange_rate must be >= 0"),
        (("theory", math.nan), "exchange_rate must be >= 0"),
    ],
)
def test_wrong_rules_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        target_quantile(*arguments, **PILOT)


def test_a_pilot_is_a_twentieth_and_at_least_200():
    assert [pilot_size(n) for n in (201, 4000, 4001, 100_000)] == [200, 200, 201, 5000]
    with pytest.raises(InfeasibleError, match="n must be > 200"):
        pilot_size(200)


def test_the_update_moves_towards_the_target_and_stays_at_it():
    assert adaptive_clip_update(2.0, 0.5, 0.5) == 2.0
    assert adaptive_clip_update(2.0, 1.0, 0.5, lr=0.2) == pytest.approx(2.0 * math.exp(-0.1))
    assert adaptive_clip_update(2.0, -3.0, 0.5, lr=0.2) == pytest.approx(2.0 * math.exp(0.7))
    assert adaptive_clip_update(2.0**39, -1e5, 0.5, lr=20.0) == math.inf
    assert adaptive_clip_update(2.0, 1e5, 0.5, lr=20.0) == 0.0
    for wrong in ({"clip": 0.0}, {"fraction": math.nan}, {"target": 1.5}, {"lr": 0.0}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
            adaptive_clip_update(**({"clip": 1.0, "fraction": 0.5, "target": 0.5, "lr": 0.2} | wrong))


# -- releases ---------------------------------------------------------------------------------------------------------


def test_the_released_quantile_is_near_the_true_one():
    norms = np.sort(NORMS)
    allowed = rank_error(1.0, 107, 1e-6) + 2000 * 0.06  # the grid's own steps are up to 6 % of the mass here
    for target in (0.5, 0.9):
        rank = np.searchsorted(norms, quantile(quantile=target), side="right")
        assert abs(rank - target * 2000) < allowed


def test_each_release_is_charged_as_what_it_is():
    positions = (REPLACE_ONE, ZERO_OUT)
    cases = [
        (quantile, {"epsilon": 0.7}, Pure(0.7, positions), 0.0),
        (quantile, {"epsilon": None, "rho": 0.02}, ZCDP(0.02, adjacencies=positions), 0.0),
        (quantile, {"epsilon": 0.7, "n": 2000}, Pure(0.7, ADJACENCIES), 0.0),
        (moment, {"rho": 0.3}, ZCDP(0.15, adjacencies=positions), 0.15),
        (moment, {"rho": 0.3, "secure": "exact"}, ZCDP(0.15, adjacencies=positions), 0.15),
        (moment, {"rho": 0.3, "n": 2000}, ZCDP(0.15, adjacencies=ADJACENCIES), 0.15),
    ]
    for release, changes, event, rest in cases:
        accountant = dp.Accountant()
        release(accountant=accountant, **changes)
        first, *others = [entry[2] for entry in accountant.ledger.entries()]
        assert first == event
        assert [g.sens for g in others] == [tuple((a, g.sens[0][1]) for a in event.adjacencies) for g in others]
        assert sum(g.sens[0][1] ** 2 / (2 * g.sigma**2) for g in others) == pytest.approx(rest, rel=1e-12)
        assert all(g.exact is ("secure" in changes) and g.sens[0][1] ** 2 / (2 * g.sigma**2) <= rest for g in others)


def test_the_epsilon_of_a_rho_is_that_of_bounded_range(monkeypatch):
    used = []

    def draw(values, grid, target, epsilon, n, generator):
        used.append(epsilon)
        return float(grid[len(grid) // 2])

    monkeypatch.setattr(clip_selection, "draw_quantile", draw)
    quantile(epsilon=None, rho=0.02)
    moment(rho=0.5)
    assert used == pytest.approx([0.4, math.sqrt(8 * 0.25)], rel=1e-12)
    assert used[0] ** 2 / 8 <= 0.02
    assert used[1] ** 2 / 8 <= 0.25


@pytest.mark.parametrize("release", [quantile, moment])
def test_nothing_is_drawn_that_was_not_charged(release, monkeypatch):
    def draw(*arguments):
        raise AssertionError("drawn")

    monkeypatch.setattr(clip_selection, "draw_quantile", draw)
    monkeypatch.setattr(clip_selection, "normal", draw)
    accountant = dp.Accountant(dp.Budget(0.1, 1e-6))
    with pytest.raises(BudgetExceeded):
        release(accountant=accountant)
    assert len(accountant) == 0
    accountant = dp.Accountant()
    with pytest.raises(AssertionError, match="drawn"):
        release(accountant=accountant)
    assert len(accountant) == (1 if release is quantile else 2)  # charged first


@pytest.mark.parametrize("release", [quantile, moment])
def test_without_a_public_size_add_remove_is_refused(release):
    budget = dp.Budget(100.0, 1e-6, adjacency=ADD_REMOVE)
    with pytest.raises(AdjacencyError, match="add_remove"):
        release(accountant=dp.Accountant(budget))
    release(accountant=dp.Accountant(budget), n=2000)


def test_a_threshold_at_an_end_of_the_grid_warns_by_the_output_alone():
    with pytest.warns(UtilityWarning, match="c_max is probably wrong"):
        quantile(np.geomspace(1.0, 1e6, 4000), epsilon=5.0, c_max=100.0)
    with pytest.warns(UtilityWarning, match="c_min is probably wrong"):
        quantile(np.geomspace(1e-6, 1.0, 4000), quantile=0.1, epsilon=5.0, c_min=0.1)


def test_the_moment_is_near_the_truncated_one_and_biased_low():
    norms = np.random.default_rng(1).exponential(size=20_000)
    for order in (2.0, 4.0):
        truth = math.gamma(order + 1) ** (1 / order)
        assert 0.8 * truth < moment(norms, order, rho=0.5) < 1.1 * truth


def noiseless_sums(monkeypatch, norms, order, n):
    """Returns sum min(norm, tau)^k in units of tau^k, with tau fixed at 2 and no noise."""
    with monkeypatch.context() as patch:
        patch.setattr(clip_selection, "draw_quantile", lambda *arguments: 2.0)
        patch.setattr(clip_selection, "normal", lambda std, source: 0.0)
        estimate = moment(norms, order, n=n)
    return (estimate / 2.0) ** order * n


def test_one_norm_moves_the_moment_by_at_most_1(monkeypatch):
    common, odd = [0.5, 1.0, 1.7] * 5, [0.0, 5e-324, 1.0, 2.0, 1e300, math.inf, math.nan]
    for order in (1.5, 2.0, 40.0):
        sums = [noiseless_sums(monkeypatch, [new, *common], order, 16) for new in odd]
        without = noiseless_sums(monkeypatch, common, order, 16)
        assert max(sums) - min(sums) == pytest.approx(1.0, rel=1e-12)
        assert max(abs(total - without) for total in sums) == pytest.approx(1.0, rel=1e-12)


def test_the_moment_has_its_noise(monkeypatch):
    monkeypatch.setattr(clip_selection, "draw_quantile", lambda *arguments: 2.0)
    rho, n, generator = 0.02, 400, torch.Generator().manual_seed(4)
    with pytest.warns(UtilityWarning, match="generator= makes"):
        draws = [moment(np.full(n, 1.5), 2.0, rho=rho, generator=generator) for _ in range(2000)]
    noise = (np.square(np.asarray(draws) / 2.0) - 0.5625) * n
    # (1/2) sensitivity^2 / std^2 is half of rho
    low, high = stats.chi2.ppf([5e-7, 1 - 5e-7], 2000)
    assert low <= float((noise**2).sum() * rho) <= high


def test_a_moment_that_drowns_in_noise_is_0_and_says_so(monkeypatch):
    monkeypatch.setattr(clip_selection, "normal", lambda std, source: -1e9)
    with pytest.warns(UtilityWarning, match="drowned"):
        assert moment() == 0.0


@pytest.mark.parametrize(
    ("release", "changes", "message"),
    [
        (quantile, {"rho": 1.0}, "epsilon or rho must be given, and not both"),
        (quantile, {"epsilon": None}, "epsilon or rho must be given"),
        (quantile, {"epsilon": 1e-7}, "epsilon must be > .* on a grid"),
        (quantile, {"epsilon": -1.0}, "epsilon must be > 0"),
        (quantile, {"epsilon": None, "rho": 0.0}, "rho must be > 0"),
        (quantile, {"quantile": 2.0}, "quantile must be in"),
        (quantile, {"norms": [[1.0]]}, "norms must hold one number per record"),
        (quantile, {"norms": []}, "n must be an integer >= 1"),
        (quantile, {"n": 0}, "n must be an integer >= 1"),
        (quantile, {"c_min": 2.0, "c_max": 1.0}, "c_max must be >"),
        (moment, {"order": 1.0}, "order must be finite and > 1"),
        (moment, {"rho": 1e-14}, "epsilon must be > .* on a grid"),
        (moment, {"rho": 0.0}, "rho must be > 0"),
    ],
)
def test_wrong_arguments_are_named_and_charge_nothing(release, changes, message):
    accountant = dp.Accountant()
    with pytest.raises(ValueError, match=message):
        release(accountant=accountant, **changes)
    assert len(accountant) == 0
