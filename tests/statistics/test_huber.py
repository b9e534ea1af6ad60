"""Intervals of private Huber regression: summaries, what is refused, and how often they hold."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from torch_dpsco.errors import ConditionError
from torch_dpsco.estimators import HuberRegressor

TRUTH = np.array([0.5, -0.5, 0.1])
SETTINGS: dict[str, Any] = {
    "adjacency": "add_remove",
    "bound_x": math.sqrt(2),
    "bound_y": 3.0,
    "threshold": 0.3,
    "intervals": 0.3,
}


def table(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Errors have three degrees of freedom: a variance, and no fourth moment."""
    generator = np.random.default_rng(seed)
    X = generator.uniform(-1, 1, (n, 2))
    return X, X @ TRUTH[:2] + TRUTH[2] + 0.3 * generator.standard_t(3, size=n)


def model(n: int = 4000, **settings: Any) -> HuberRegressor:
    return HuberRegressor(**(SETTINGS | {"n": n, "epsilon": 4.0} | settings))


@pytest.mark.weekly
def test_a_summary_of_raw_features() -> None:
    X, y = table(4000)
    raw = X * [10.0, 0.5] + [30.0, -4.0]
    fit = model(feature_center=(30.0, -4.0), feature_scale=(10.0, 0.5)).fit(raw, y)
    found = fit.summary()
    slopes = TRUTH[:2] / [10.0, 0.5]
    truth = np.array([*slopes, TRUTH[2] - slopes @ [30.0, -4.0]])
    assert np.all(
        np.abs(found.coefficients - truth) < 6 * found.standard_errors
    )  # false alarm: 1e-8
    assert (fit.mechanism_, fit.moments_.shape) == ("objective", (1,))
    assert fit.privacy_.epsilon <= 4.0
    assert "errors of one law" in str(found)
    fit.set_params(intervals=None).fit(raw, y)
    with pytest.raises(
        ConditionError, match="HuberRegressor has no summary: intervals must be paid for"
    ):
        fit.summary()


@pytest.mark.slow
def test_almost_without_noise_errors_are_those_of_the_textbook() -> None:
    """Squares of slopes over the share of errors inside, by hand, at the answer of a large epsilon."""
    n = 20_000
    X, y = table(n)
    rows = np.column_stack([X, np.ones(n)])
    fit = model(n, epsilon=60.0, delta=1e-6).fit(X, y)
    found = fit.summary()
    errors = y - rows @ found.coefficients
    inside = np.abs(errors) <= 0.3
    slopes = np.clip(errors, -0.3, 0.3)
    wanted = np.sqrt(
        (slopes @ slopes) * n / inside.sum() ** 2 * np.diag(np.linalg.inv(rows.T @ rows))
    )
    assert np.allclose(found.standard_errors * np.sqrt(1 - found.privacy), wanted, rtol=0.03)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"intervals": 1.0}, "intervals"),
        ({"fit_intercept": False}, "fit_intercept must be True"),
        ({"mechanism": "noisy_gd"}, "mechanism must be 'objective'"),
        ({"delta": 0.0}, "delta must be > 0"),
        ({"radius": 3.0}, "radius must be inf"),
        ({"secure": "exact"}, "secure must be None"),
    ],
)
def test_settings_that_tell_no_intervals_are_refused_before_a_charge(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        model(**settings).plan(2)


@pytest.mark.slow
def test_few_records_are_refused() -> None:
    with pytest.raises(
        ConditionError, match="intervals must be of more records"
    ):  # by public numbers
        model(60, epsilon=0.1).plan(2)
    fit = model(60).fit(*table(60))
    with pytest.raises(ConditionError, match="stand out of its noise"):
        fit.summary()


@pytest.mark.weekly
def test_intervals_hold_the_truth_as_often_as_they_say_and_naive_ones_do_not() -> None:
    """400 fits: binomial bounds around 93.5 to 96.5 %, false alarms: 1e-6 per coefficient."""
    fits, fit = 400, model(epsilon=0.5)
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
