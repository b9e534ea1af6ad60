"""Intervals of private least squares: what is released for them, its charge, and how often they hold."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from torch_dpsco.accounting.analysis.gaussian import gaussian_mu
from torch_dpsco.accounting.events import ADD_REMOVE, ADJACENCIES, REPLACE_ONE
from torch_dpsco.accounting.ledger import Ledger
from torch_dpsco.errors import ConditionError
from torch_dpsco.estimators import Ridge
from torch_dpsco.estimators import least_squares as adassp
from torch_dpsco.statistics.debiased import least_squares
from torch_dpsco.step import exact_noise as vector_noise

TRUTH = np.array([0.5, -0.5, 0.1])
SETTINGS: dict[str, Any] = {
    "epsilon": 4.0,
    "adjacency": "add_remove",
    "bound_x": math.sqrt(2),
    "bound_y": 2.0,
    "intervals": 0.05,
}


def table(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    X = generator.uniform(-1, 1, (n, 2))
    return X, X @ TRUTH[:2] + TRUTH[2] + 0.3 * generator.normal(size=n)


def model(n: int = 4000, **settings: Any) -> Ridge:
    return Ridge(**(SETTINGS | {"n": n} | settings))


def without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (adassp, vector_noise):
        monkeypatch.setattr(
            module,
            "gaussian_vector",
            lambda size, std, source: torch.zeros(size, dtype=torch.float64),
        )


# -- privacy ----------------------------------------------------------------------------------------------------------


@pytest.mark.cases(5, 1)
@pytest.mark.parametrize("adjacency", ADJACENCIES)
@pytest.mark.parametrize("share", [0.01, 0.5])
def test_the_sum_of_squares_is_charged_with_the_statistics(adjacency, share):
    plan = model(adjacency=adjacency, intervals=share).plan(2)
    level = gaussian_mu(4.0, 1e-6)
    assert 2.0**2 / plan.total_scale <= math.sqrt(share) * level
    assert plan.event().mu >= math.hypot(plan.mu, 2.0**2 / plan.total_scale)
    assert 0.999 * 4.0 < Ledger([plan.event()]).epsilon(1e-6, adjacency) <= 4.0
    moved = plan.total_scale * plan.task.curvature
    assert 2.0**2 <= moved <= 2.0**2 * (1 + 1e-6)
    without = model(adjacency=adjacency, intervals=None, mechanism="adassp", prepare=None).plan(
        2
    )
    assert plan.constants.std_xty > without.constants.std_xty


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_no_record_moves_the_sum_of_squares_by_more(monkeypatch, adjacency):
    """Exact, noise off: targets and weights of one record as large as they get, some attain it."""
    without_noise(monkeypatch)
    X, y = table(50)
    X, y = np.vstack([X, [[1.0, -1.0]]]), np.append(y, 0.0)
    fit = model(51, adjacency=adjacency)
    moved = []
    for target, weight in ((2.0, 1.0), (-1e9, 1.0), (1.5, 7.0), (2.0, 0.5), (math.nan, 1.0)):
        sums = [
            fit.fit(X, np.append(y[:-1], one), np.append(np.ones(50), size)).moments_[-1]
            for one, size in ((target, weight), (0.0, 1.0))
        ]
        moved.append(abs(sums[0] - sums[1]))
    assert max(moved) <= 4.0 * (1 + 1e-12)
    assert moved[:2] == pytest.approx([4.0, 4.0])


def test_what_is_released_is_what_was_summed(monkeypatch):
    without_noise(monkeypatch)
    X, y = table(3000)
    fit = model(3000).fit(X, y)
    rows = np.column_stack([X, np.ones(3000)])
    assert np.allclose(fit.hessian_, rows.T @ rows)
    assert np.allclose(fit.moments_, [*(rows.T @ y), y @ y])
    assert np.allclose(fit.summary().coefficients, np.linalg.lstsq(rows, y, rcond=None)[0])
    blocks = model(3000).fit(lambda: iter([(X[:1000], y[:1000]), (X[1000:], y[1000:])]))
    assert np.allclose(blocks.moments_, fit.moments_)


@pytest.mark.weekly
def test_the_noise_of_the_sum_has_the_level_that_is_charged():
    """A chi-square test of 400 draws; false alarm: 1e-6."""
    X, y = table(500)
    fit = model(500)
    errors = (
        np.array([fit.fit(X, y).moments_[-1] - y @ y for _ in range(400)])
        / fit.plan(2).total_scale
    )
    low, high = stats.chi2.ppf([5e-7, 1 - 5e-7], 400)
    assert low <= errors @ errors <= high


# -- statistics -------------------------------------------------------------------------------------------------------


@pytest.mark.weekly
def test_the_covariance_is_that_of_all_noise_in_the_solution():
    """Variances of 40,000 draws: chi-square, false alarms: 1e-6 each, and 3 % for the terms of second order."""
    gram = torch.tensor([[4000.0, 500.0], [500.0, 3000.0]], dtype=torch.float64)
    theta, draws, stds = torch.tensor([1.0, -2.0], dtype=torch.float64), 40_000, (20.0, 30.0)
    normal = torch.randn(
        draws, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    solutions = []
    for z in normal:
        off = z[0] / math.sqrt(2)
        noisy = gram + stds[0] * torch.stack(
            [torch.stack([z[1], off]), torch.stack([off, z[2]])]
        )
        solutions.append(torch.linalg.solve(noisy, gram @ theta + stds[1] * z[3:]))
    moments = torch.cat([gram @ theta, (theta @ gram @ theta + 1000.0)[None]])
    wanted = least_squares(
        gram, moments, 1002.0, gram_std=stds[0], moment_std=stds[1], total_std=0.0
    )
    found = torch.stack(solutions).T.cov()
    low, high = stats.chi2.ppf([5e-7, 1 - 5e-7], draws - 1) / (draws - 1)
    for k in range(2):
        assert 0.97 * low <= float(found[k, k] / wanted.noise[k, k]) <= 1.03 * high
    exact = least_squares(gram, moments, 1002.0, gram_std=0.0, moment_std=0.0, total_std=0.0)
    assert torch.allclose(exact.sampling, torch.linalg.inv(gram))  # 1000 / (1002 - 2)


def test_a_variance_in_its_noise_is_at_least_that_noise():
    gram, theta = 1e4 * torch.eye(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    moments = torch.cat(
        [gram @ theta, (theta @ gram @ theta - 50.0)[None]]
    )  # less than what is explained
    found = least_squares(gram, moments, 102.0, gram_std=0.0, moment_std=0.0, total_std=70.0)
    assert torch.allclose(found.sampling, 0.7 * torch.linalg.inv(gram))


@pytest.mark.parametrize("adjacency", [ADD_REMOVE, REPLACE_ONE])
def test_a_summary_of_raw_features(adjacency):
    X, y = table(4000)
    raw = X * [10.0, 0.5] + [30.0, -4.0]
    fit = model(adjacency=adjacency, feature_center=(30.0, -4.0), feature_scale=(10.0, 0.5)).fit(
        raw, y
    )
    found = fit.summary()
    slopes = TRUTH[:2] / [10.0, 0.5]
    truth = np.array([*slopes, TRUTH[2] - slopes @ [30.0, -4.0]])
    assert np.all(
        np.abs(found.coefficients - truth) < 6 * found.standard_errors
    )  # false alarm: 1e-8
    assert (fit.mechanism_, found.names[-1]) == ("adassp", "intercept")
    assert "bound_y=2" in str(found)
    fit.set_params(intervals=None).fit(raw, y)
    assert not hasattr(fit, "moments_")
    with pytest.raises(ConditionError, match="Ridge has no summary: intervals must be paid for"):
        fit.summary()


def test_without_an_intercept_the_number_of_records_must_be_public():
    X, y = table(4000)
    found = model(adjacency=REPLACE_ONE, fit_intercept=False).fit(X, y).summary()
    assert found.names == ("x0", "x1")
    with pytest.raises(ConditionError, match="fit_intercept must be True"):
        model(fit_intercept=False).plan(2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"intervals": 0.0}, "intervals"),
        ({"intervals": 1.0}, "intervals"),
        ({"mechanism": "boosted_adassp"}, "mechanism must be 'adassp'"),
        ({"mechanism": "output"}, "mechanism must be 'adassp'"),
        ({"secure": "exact"}, "secure must be None"),
        ({"delta": 0.0}, "delta must be > 0"),
        ({"radius": 3.0}, "radius must be inf"),
    ],
)
def test_settings_that_tell_no_intervals_are_refused_before_a_charge(settings, words):
    with pytest.raises(ValueError, match=words):
        model(**settings).plan(2)


def test_few_records_are_refused():
    with pytest.raises(ConditionError, match="intervals must be of more records"):
        model(30, epsilon=0.1).fit(*table(30))
    with pytest.raises(ConditionError, match="stand out of its noise"):
        model(450, epsilon=0.1).fit(*table(450)).summary()


@pytest.mark.weekly
def test_intervals_hold_the_truth_as_often_as_they_say_and_naive_ones_do_not():
    """400 fits: binomial bounds around 93.5 to 96.5 %, false alarms: 1e-6 per coefficient."""
    fits, fit = 400, model(epsilon=1.0)
    held, naive = np.zeros(3), np.zeros(3)
    for seed in range(fits):
        found = fit.fit(*table(4000, seed)).summary()
        held += (found.intervals[:, 0] <= TRUTH) & (found.intervals[:, 1] >= TRUTH)
        naive += np.abs(found.released - TRUTH) < 1.96 * found.standard_errors * np.sqrt(
            1 - found.privacy
        )
    assert np.all(held >= stats.binom.ppf(5e-7, fits, 0.935))
    assert np.all(held <= stats.binom.ppf(1 - 5e-7, fits, 0.965))
    assert np.any(naive < stats.binom.ppf(5e-7, fits, 0.93))
