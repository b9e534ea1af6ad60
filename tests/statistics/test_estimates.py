"""Scores from noisy counts: no bias that can be seen, and errors that are as large as they say."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from scipy import stats

import torch_dpsco as dp
from torch_dpsco.accounting.events import Gaussian, Pure
from torch_dpsco.statistics import estimates, scores
from torch_dpsco.statistics.estimates import Estimate, bins_of, of_area, of_share
from torch_dpsco.statistics.scores import quietest

APART = 1.07  # of the means of two classes of normal log odds: AUC 0.775
TRUE = float(stats.norm.cdf(APART / math.sqrt(2.0)))
STD = scores._Noise(dp.Budget(0.5, 1e-6, "replace_one")).deviation


def log_odds(rng: np.random.Generator, first: int, second: int) -> tuple[Any, Any]:
    middle = math.log(second / first)
    return rng.normal(-APART / 2, size=first) + middle, rng.normal(
        APART / 2, size=second
    ) + middle


def exact(first: Any, second: Any) -> float:
    """Returns the area of all pairs."""
    ranks = stats.rankdata(np.concatenate([first, second]))[len(first) :]
    return float((ranks.mean() - (len(second) + 1) / 2) / len(first))


def histograms(first: Any, second: Any, bins: int) -> Any:
    places = [scores._place(1 / (1 + np.exp(-t))) for t in (first, second)]
    return np.array([np.histogram(place, bins, (0.0, 1.0))[0] for place in places], dtype=float)


def areas(kind: str, sizes: tuple[int, int], std: float, draws: int) -> tuple[Any, Any]:
    """Returns values less the true ones, and noise errors, of draws of noise, 20 for each draw of records."""
    rng, bins, found = np.random.default_rng(3), bins_of(sum(sizes), std), []
    for _ in range(draws // 20):
        first, second = log_odds(rng, *sizes)
        counts, area = histograms(first, second, bins), exact(first, second)
        for _ in range(20):
            noise = (
                rng.normal(size=counts.shape)
                if kind == "normal"
                else rng.laplace(size=counts.shape) / 2**0.5
            )
            estimate = of_area(counts + std * noise, std**2)
            found.append((estimate.value - area, estimate.noise))
    off, errors = np.array(found).T
    return off, errors


CELLS = [
    ("normal", (1258, 142), STD, 0.2),
    ("laplace", (1258, 142), STD / 2, 0.2),
    ("normal", (700, 700), STD, 0.1),
    ("laplace", (300, 100), 5.7, 0.2),
    ("normal", (19_800, 200), 5.7, 0.2),
]


@pytest.mark.parametrize(("kind", "sizes", "std", "share"), CELLS)
def test_an_area_has_no_bias_beside_its_error_and_is_covered(
    kind: str, sizes: tuple[int, int], std: float, share: float
) -> None:
    """The bias is below a stated share of the noise error, +-1.96 of it covers 93 %; tails of 5 standard deviations."""
    draws = 1000
    off, noise = areas(kind, sizes, std, draws)
    usual = float(np.median(noise))
    tail = 5 / math.sqrt(draws)
    assert abs(off.mean()) < share * usual + tail * off.std()
    assert off.std() < (1 + tail) * usual
    covered = (np.abs(off) <= 1.96 * noise).sum()
    assert covered >= stats.binom.ppf(1e-7, draws, 0.93)


def test_the_spread_of_areas_between_samples_is_not_more_than_the_sampling_error() -> None:
    """400 samples: the standard deviation of their areas, within 5 of its own."""
    rng = np.random.default_rng(4)
    found = np.array([exact(*log_odds(rng, 450, 50)) for _ in range(400)])
    said = of_area(histograms(*log_odds(rng, 45_000, 5000), 64) / 100, 0.0).sampling
    assert found.std() * (1 - 5 / math.sqrt(800)) < said < 1.5 * found.std()


def test_without_noise_an_area_is_that_of_all_pairs() -> None:
    rng = np.random.default_rng(2)
    first, second = log_odds(rng, 90_000, 10_000)
    assert of_area(histograms(first, second, 32), 0.0).value == pytest.approx(
        exact(first, second), abs=2e-3
    )
    assert of_area(histograms(first, second, 12), 0.0).value == pytest.approx(TRUE, abs=0.02)
    low, high = np.array([3.0, 0.0, 1.0, 0.0]), np.array([0.0, 0.0, 4.0, 2.0])
    swapped = of_area(np.array([high, low]), 0.0).value
    assert of_area(np.array([low, high]), 0.0).value == pytest.approx(1 - swapped)
    far = np.array([[3.0, 0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 4.0, 0.0, 2.0]])
    assert of_area(far, 0.0).value == pytest.approx((3 * 6 + 2 + 4 / 2) / 24)


@pytest.mark.parametrize("share", [0.02, 0.3, 0.5, 0.98])
def test_a_share_has_no_bias_beside_its_error_and_is_covered(share: float) -> None:
    rng, draws, total, std = np.random.default_rng(1), 4000, 300, 11.4
    exact_counts = np.array([share, 1 - share]) * total
    found = [of_share(exact_counts + std * rng.normal(size=2), std**2) for _ in range(draws)]
    off, noise = np.array([(one.value - share, one.noise) for one in found]).T
    assert (np.abs(off) <= 1.96 * noise).mean() > 0.935
    if 0.1 < share < 0.9:  # else it is cut at 0 or 1
        assert abs(off.mean()) < 0.02 * noise.mean() + 5 * off.std() / math.sqrt(draws)
        assert found[0].sampling == pytest.approx(
            math.sqrt(share * (1 - share) / total), rel=0.2
        )


def test_what_noise_hides_is_in_the_middle_with_an_error_of_half_the_range() -> None:
    hidden = Estimate(0.5, 0.5, 0.0, (0.0, 1.0))
    assert of_share(np.array([3.0, 4.0]), 25.0) == hidden
    assert of_share(np.zeros(2), 0.0) == hidden
    assert of_area(np.array([[900.0, 100.0], [5.0, 8.0]]), 100.0) == hidden
    assert of_area(np.array([[0.0, 0.0], [5.0, 8.0]]), 0.0) == hidden


def test_bins_grow_with_records_and_fall_with_noise() -> None:
    assert [bins_of(n, STD) for n in (1, 1400, 20_000, 10**9)] == [8, 10, 24, 128]
    assert bins_of(1400, STD / 8) == 2 * bins_of(1400, STD)


# -- through dp.score ------------------------------------------------------------------------------------------------


class Logistic:
    """Its one feature is the log odds."""

    classes_ = (0, 1)

    def predict_proba(self, X: Any) -> Any:
        second = 1 / (1 + np.exp(-X[:, 0]))
        return np.stack([1 - second, second], axis=1)


def rare() -> tuple[Any, Any]:
    first, second = log_odds(np.random.default_rng(0), 1258, 142)
    return np.concatenate([first, second]).reshape(-1, 1), np.repeat([0, 1], [1258, 142])


def test_the_score_of_a_rare_class_is_not_pulled_by_empty_bins() -> None:
    """60 scores at epsilon 0.5: their mean within 5 of its standard deviations and a tenth of the error of one.

    With noise cut at 0 it was 0.04 above, and the errors were not said.
    """
    X, y = rare()
    truth = exact(X[:1258, 0], X[1258:, 0])
    found = [
        dp.score(Logistic(), X, y, "auc", budget=dp.Budget(0.5, 1e-6, "replace_one"))
        for _ in range(60)
    ]
    values, errors = np.array([(one.value, one.noise_error) for one in found]).T
    assert abs(values.mean() - truth) < 0.1 * np.median(errors) + 5 * values.std() / math.sqrt(
        60
    )
    assert values.std() < 1.6 * np.median(errors)
    assert np.median(errors) < 0.06
    assert 0.015 < found[0].sampling_error < 0.035


def test_a_score_is_shown_with_its_errors() -> None:
    X, y = rare()
    found = dp.score(
        Logistic(), X, y, "log_loss", bound=2.0, budget=dp.Budget(1.0, 1e-6, "replace_one")
    )
    assert found.error == math.hypot(found.noise_error, found.sampling_error)
    assert re.fullmatch(r"log_loss 0\.\d+ \+- 0\.\d+ \(95 %: 0\.\d+ to 0\.\d+\)", str(found))
    low, high = found.interval
    assert 0 < low < found.value - found.error < found.value + found.error < high < 2.0
    assert found.chance is found.base_rate is None  # the release does not tell them
    assert 2 * 0.5 / math.sqrt(1400) > found.sampling_error > 0


def test_a_score_of_its_own_ledger_has_the_smaller_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Errors that are shown are estimates; variances of the noise are not."""
    X, y = rare()
    variances: list[float] = []

    class Watched(scores._Noise):
        def release(self, *given: Any) -> Any:
            variances.append(self.variance)
            return super().release(*given)

    monkeypatch.setattr(scores, "_Noise", Watched)
    budget = dp.Budget(0.5, 1e-6, "replace_one")
    given = dp.Accountant(budget)
    assert isinstance(scores.score_event(budget), Gaussian)
    alone = dp.score(Logistic(), X, y, "auc", budget=budget)
    dp.score(Logistic(), X, y, "auc", budget=budget, accountant=given)
    assert len(variances) == 2
    assert variances[0] < 0.8**2 * variances[1]
    assert alone.privacy.epsilon <= 0.5
    assert given.spent.epsilon <= 0.5
    assert quietest(budget).delta == 0
    assert isinstance(scores.score_event(quietest(budget)), Pure)
    for kept in (
        dp.Budget(0.5, 0.1, "replace_one"),
        dp.Budget(0.5, 1e-6, "replace_one", mode="gdp"),
    ):
        assert quietest(kept) is kept


def test_the_deviation_of_pure_noise_is_what_is_drawn() -> None:
    """4000 numbers, whose squares have a standard deviation of sqrt(5) of their mean."""
    noise = scores._Noise(dp.Budget(1.0, 0.0, "replace_one"))
    drawn = noise.release(np.zeros(4000, dtype=np.int64), scores.noise_generator("cpu", None))
    assert (drawn**2).mean() == pytest.approx(noise.variance, rel=6 * math.sqrt(5 / 4000))


# -- intervals -------------------------------------------------------------------------------------------------------


def normal(rng: np.random.Generator, first: int, second: int) -> tuple[Any, Any, float]:
    return *log_odds(rng, first, second), TRUE


def bimodal(rng: np.random.Generator, first: int, second: int) -> tuple[Any, Any, float]:
    """Of the second class 60 % are above all of the first, and 40 % below."""
    side = np.where(rng.random(second) < 0.6, 3.0, -3.0)
    return rng.normal(0.0, 0.5, first), rng.normal(side, 0.5), 0.6


def few(rng: np.random.Generator, first: int, second: int) -> tuple[Any, Any, float]:
    """Three values, with ties."""
    values = [-2.0, 0.0, 2.0]
    drawn = (
        rng.choice(values, first, p=[0.5, 0.3, 0.2]),
        rng.choice(values, second, p=[0.2, 0.3, 0.5]),
    )
    return *drawn, 0.5 * 0.8 + 0.3 * 0.5 + 0.5 * (0.5 * 0.2 + 0.3 * 0.3 + 0.2 * 0.5)


def noise_of(rng: np.random.Generator, kind: str, shape: Any) -> Any:
    return rng.normal(size=shape) if kind == "normal" else rng.laplace(size=shape) / 2**0.5


def covered(law: Any, kind: str, sizes: tuple[int, int], std: float, draws: int) -> int:
    """Returns how often the interval holds the area of the population: classes, records and noise are drawn anew."""
    rng, n, often = np.random.default_rng(), sum(sizes), 0
    for _ in range(draws):
        second = rng.binomial(n, sizes[1] / n)
        *records, truth = law(rng, n - second, second)
        counts = histograms(*records, bins_of(n, std))
        low, high = of_area(counts + std * noise_of(rng, kind, counts.shape), std**2).interval
        often += low <= truth <= high
    return often


@pytest.mark.cases(2, 4)
@pytest.mark.parametrize(
    ("law", "kind", "sizes", "std"),
    [
        (normal, "laplace", (400, 400), 2.8),
        (bimodal, "laplace", (700, 100), 0.5),
        (few, "normal", (5000, 5000), 11.0),
        (normal, "normal", (1258, 142), 11.4),
        (bimodal, "normal", (1258, 142), 11.4),
        (few, "laplace", (60, 40), 1.4),
    ],
)
def test_the_interval_of_an_area_covers_records_and_noise(
    law: Any, kind: str, sizes: tuple[int, int], std: float
) -> None:
    """Of 300 fresh draws at least as many as 94 % leave with a false alarm of 1e-7."""
    draws = 300
    assert covered(law, kind, sizes, std, draws) >= stats.binom.ppf(1e-7, draws, 0.94)


def test_an_interval_that_supposes_exponential_scores_is_refuted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def supposed(noisy: Any, variance: float, area: float) -> float:
        return estimates._hanley(area, float(noisy[0].sum()), float(noisy[1].sum()))

    monkeypatch.setattr(estimates, "_sampling_of_pairs", supposed)
    often = covered(bimodal, "laplace", (700, 100), 0.5, 600)
    assert often < stats.binom.ppf(
        1e-4, 600, 0.94
    )  # 83 %, and not 94: by chance with less than 1e-8


@pytest.mark.parametrize(
    ("share", "n", "std"), [(0.0, 20, 0.0), (0.05, 60, 5.7), (0.5, 800, 11.4)]
)
@pytest.mark.parametrize("kind", ["normal", "laplace"])
def test_the_interval_of_a_share_covers_records_and_noise(
    kind: str, share: float, n: int, std: float
) -> None:
    """Of 2000 fresh draws at least as many as 94.5 % leave with a false alarm of 1e-7."""
    rng, draws, often = np.random.default_rng(), 2000, 0
    for first in rng.binomial(n, share, draws):
        noisy = np.array([first, n - first]) + std * noise_of(rng, kind, 2)
        low, high = of_share(noisy, std**2).interval
        often += low <= share <= high
    assert often >= stats.binom.ppf(1e-7, draws, 0.945)


@pytest.mark.parametrize("counts", [[0.0, 900.0], [-40.0, 900.0], [900.0, 0.0], [930.0, -20.0]])
def test_an_interval_of_a_share_lies_in_its_range_and_has_its_value(counts: list[float]) -> None:
    for variance in (0.0, 30.0**2):
        found = of_share(np.array(counts), variance)
        low, high = found.interval
        assert 0 <= low <= found.value <= high <= 1
        assert high - low < 0.3


def test_an_interval_of_a_perfect_area_is_not_a_point() -> None:
    """As sure as 50 of each class are, and no surer."""
    apart = np.zeros((2, 8))
    apart[0, 0] = apart[1, 7] = 50.0
    low, high = of_area(apart, 0.0).interval
    assert 0.9 < low < 0.98
    assert high == 1.0
    flipped, _ = of_area(apart[::-1], 0.0).interval
    assert flipped == 0.0


def test_the_calibration_says_how_often_it_came_true() -> None:
    """Log odds of the truth are a third of those of the model; all records are in some group."""
    rng = np.random.default_rng(5)
    said = rng.normal(0, 3, 40_000)
    truth = rng.random(40_000) < 1 / (1 + np.exp(-said / 3))
    counts = histograms(said[~truth], said[truth], 64)
    groups = estimates.calibration(counts + rng.normal(size=counts.shape), 1.0)
    assert 2 <= len(groups) <= 5
    assert groups[0].low == 0
    assert groups[-1].high == pytest.approx(1)
    assert [one.high for one in groups[:-1]] == [one.low for one in groups[1:]]
    assert sum(one.records for one in groups) == pytest.approx(40_000, abs=100)
    for one in groups:
        inside = (1 / (1 + np.exp(-said)) >= one.low) & (1 / (1 + np.exp(-said)) < one.high)
        low, high = one.share.interval
        assert low <= truth[inside].mean() <= high
    assert groups[0].share.interval[0] > groups[0].high  # which this model is too sure of
    hidden = estimates.calibration(np.ones((2, 8)), 100.0)
    assert hidden == ()


def test_a_score_tells_its_base_rate_and_calibration_for_auc_only() -> None:
    X, y = rare()
    found = dp.score(Logistic(), X, y, "auc", budget=dp.Budget(2.0, 1e-6, "replace_one"))
    low, high = found.base_rate.interval
    assert low < 142 / 1400 < high < 0.2
    assert found.chance == 0.5
    assert str(found).endswith("; by chance 0.5)")
    assert found.counts.shape[0] == 2
    assert sum(one.records for one in found.calibration()) == pytest.approx(found.counts.sum())
    plain = dp.score(Logistic(), X, y, "log_loss", bound=2.0, budget=dp.Budget(2.0, 1e-6))
    with pytest.raises(dp.errors.ConditionError, match=r"metric must be 'auc' .*got 'log_loss'"):
        plain.calibration()


@pytest.mark.parametrize(
    ("error", "text"),
    [(0.0312, "0.67"), (0.018, "0.671"), (0.2, "0.7"), (12.0, "1"), (0.0, "0.6712")],
)
def test_a_value_is_as_long_as_its_error(error: float, text: str) -> None:
    assert estimates.rounded(error, 0.6712) == [text]
