"""Choosing a clip: rules and sizes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.reference.papers.heavy_tailed import quantile_probabilities
from torch_dpsco.algorithms.clips import (
    C_MAX,
    C_MIN,
    adaptive_clip_update,
    pilot_size,
    target_quantile,
    warn_at_grid_end,
)
from torch_dpsco.algorithms.mechanisms import geometric_grid
from torch_dpsco.errors import InfeasibleError, UtilityWarning

PILOT = {"pilot_size": 2000, "epsilon": 1.0, "grid_size": 107}


def rank_error(epsilon, grid_size):
    """Returns how far off a private rank is, but for a probability of 5 %."""
    return 2.0 / epsilon * math.log(grid_size / 0.05)


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
    above = sum(
        p
        for p, tau in zip(law, geometric_grid(C_MIN, C_MAX), strict=True)
        if tau >= np.abs(norms).max()
    )
    assert above < 0.01


def test_a_pilot_that_resolves_nothing_is_refused_with_the_size_that_does():
    least = math.floor(rank_error(0.01, 107)) + 1
    with pytest.raises(InfeasibleError, match=f"pilot_size must be >= {least}"):
        target_quantile("median", 0.0, pilot_size=least - 1, epsilon=0.01, grid_size=107)
    with pytest.warns(UtilityWarning, match="resolves ranks"):
        assert (
            0
            < target_quantile("median", 0.0, pilot_size=least, epsilon=0.01, grid_size=107)
            < 0.01
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("best", 0.1), "rule must be one of theory, balanced, median"),
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


def test_a_threshold_at_an_end_of_the_grid_warns_by_the_output_alone():
    for threshold, name in ((100.0, "c_max"), (0.1, "c_min")):
        with pytest.warns(UtilityWarning, match=f"{name} is probably wrong"):
            warn_at_grid_end(threshold, [0.1, 1.0, 100.0])
    warn_at_grid_end(1.0, [0.1, 1.0, 100.0])
