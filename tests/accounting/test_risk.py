from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.analysis.gaussian import gaussian_delta
from torch_dpsco.accounting.analysis.risk import Risk, strength
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.events import (
    ADD_REMOVE,
    REPLACE_ONE,
    ApproxDP,
    Gaussian,
    NonPrivate,
    PoissonGaussian,
    Pure,
    Repeat,
    clipped_gaussian,
)
from torch_dpsco.accounting.ledger import Ledger
from torch_dpsco.errors import AdjacencyError
from torch_dpsco.show.card import trade_off

RATES = st.floats(0.0, 1.0) | st.sampled_from([1e-9, 1e-4, 0.01, 1 - 1e-6])
PARTS = st.floats(1e-6, 1 - 1e-6)


@pytest.mark.parametrize(
    ("epsilon", "word"),
    [
        (0.0, "strong"),
        (1.0, "strong"),
        (1.0 + 1e-12, "moderate"),
        (10.0, "moderate"),
        (10.0 + 1e-12, "weak"),
        (math.inf, "weak"),
    ],
)
def test_an_epsilon_has_one_word(epsilon, word):
    assert strength(epsilon) == word


@pytest.mark.parametrize("epsilon", [-1e-12, math.nan, "1", None])
def test_what_is_no_epsilon_has_no_word(epsilon):
    with pytest.raises((TypeError, ValueError), match="epsilon"):
        strength(epsilon)


def gaussian(mu: float) -> Risk:
    return Risk(lambda epsilon: gaussian_delta(mu, epsilon))


def exact_miss(mu: float, f: float) -> mpmath.mpf:
    """Phi(Phi^-1(1 - f) - mu), by the law of the best test between N(0, 1) and N(mu, 1)."""
    with mpmath.workdps(40):
        z = -mpmath.sqrt(2) * mpmath.erfinv(2 * mpmath.mpf(f) - 1)
        return mpmath.ncdf(z - mpmath.mpf(mu))


@pytest.mark.slow
@given(st.floats(1e-3, 12.0), PARTS)
def test_a_gaussian_curve_is_matched_from_below(mu, f):
    truth, risk = exact_miss(mu, f), gaussian(mu)
    assert truth - mpmath.mpf("1e-6") <= risk.false_negative(f) <= truth
    assert 1 - truth <= risk.true_positive(f)


@pytest.mark.parametrize("f", [1e-12, 1e-6, 1e-3])
def test_small_rates_are_matched_relatively(f):
    hit = float(1 - exact_miss(1.0, f))
    assert hit <= gaussian(1.0).true_positive(f) <= hit * (1 + 1e-3)


@pytest.mark.slow
@given(st.floats(0.0, 40.0), st.just(0.0) | st.floats(1e-12, 1.0), RATES)
def test_one_point_is_its_own_trade_off(epsilon, delta, f):
    risk = Risk.of_point(epsilon, delta)
    exact = trade_off([(epsilon, delta)], f)
    assert exact - 1e-8 <= risk.false_negative(f) <= exact + 1e-15
    formula = math.tanh(epsilon / 2) + 2 * delta / (math.exp(epsilon) + 1)
    assert formula - 1e-12 <= risk.advantage <= min(1.0, formula) * (1 + 1e-11) + 3e-15


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(("epsilon", "prior"), [(0.01, 0.9), (1.0, 0.1), (8.0, 0.001)])
def test_odds_rise_by_the_pure_epsilon_at_most(epsilon, prior):
    risk, odds = (
        Ledger([Pure(epsilon)]).risk(REPLACE_ONE),
        math.exp(epsilon) * prior / (1 - prior),
    )
    assert risk.posterior(prior) == pytest.approx(odds / (1 + odds), rel=1e-12)
    assert risk.posterior(prior, 0.5) <= risk.posterior(prior)
    assert gaussian(0.5).posterior(prior) == 1.0  # a rare answer may give a record away
    assert (risk.posterior(0.0), risk.posterior(1.0)) == (0.0, 1.0)


@pytest.mark.weekly
@given(st.floats(0.05, 3.0), st.floats(0.01, 0.99))
def test_an_alarm_of_a_rarer_test_proves_more(mu, prior):
    risk = gaussian(mu)
    after = [risk.posterior(prior, f) for f in (1.0, 0.3, 0.1, 0.01, 1e-3)]
    assert after == sorted(after)
    assert after[0] == pytest.approx(prior)
    hit = float(1 - exact_miss(mu, 0.01))
    assert after[3] == pytest.approx(prior * hit / (prior * hit + 0.01 * (1 - prior)), rel=1e-4)
    assert after[3] >= prior * hit / (prior * hit + 0.01 * (1 - prior))


# riskcal 1.5.1: get_advantage_for_dpsgd(z, q, k), get_beta_for_dpsgd(z, q, k, alpha) at alpha 0.01, 0.1 and 0.5
RISKCAL = [
    (
        1.0,
        256 / 60000,
        2350,
        0.10686372874629414,
        (0.9796446671464832, 0.8429877702727894, 0.39385772663082846),
    ),
    (
        0.8,
        0.01,
        100,
        0.07164866579760666,
        (0.9809890010715521, 0.8580273495018075, 0.42835265616629226),
    ),
    (
        2.0,
        0.2,
        50,
        0.28358321153008736,
        (0.9404127949768327, 0.7040230400872923, 0.2314881320751415),
    ),
    (
        1.0,
        0.05,
        1,
        0.019146246127402917,
        (0.9858819087890766, 0.8855428298476169, 0.48085376569865),
    ),
]


@pytest.mark.weekly
@pytest.mark.parametrize(("noise", "rate", "steps", "advantage", "misses"), RISKCAL)
def test_sampled_runs_agree_with_another_implementation(noise, rate, steps, advantage, misses):
    risk = Ledger([Repeat(PoissonGaussian(noise, rate), steps)]).risk(ADD_REMOVE)
    assert risk.advantage == pytest.approx(advantage, abs=1e-8)
    for f, miss in zip((0.01, 0.1, 0.5), misses, strict=True):
        assert miss - 1e-4 <= risk.false_negative(f) <= miss + 1e-6


RUNS, SURE = (
    200_000,
    math.sqrt(math.log(2 / 1e-8) / (2 * 200_000)),
)  # Hoeffding; 18 tests: false alarms below 1e-6


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("rate", "noise", "steps"),
    [
        (1.0, 2.0, 3),
        pytest.param(0.2, 1.0, 5, marks=pytest.mark.slow),
        pytest.param(0.05, 0.7, 1, marks=pytest.mark.slow),
    ],
)
def test_the_best_attacker_stays_below(rate, noise, steps):
    """Likelihood-ratio tests on simulated runs, in both directions."""
    draw = np.random.default_rng(1)

    def ratio(used: bool) -> np.ndarray:
        shift = draw.random((RUNS, steps)) < rate if used else 0.0
        x = draw.normal(0.0, noise, (RUNS, steps)) + shift
        return np.log1p(rate * np.expm1((2 * x - 1) / (2 * noise**2))).sum(axis=1)

    risk = Ledger([Repeat(PoissonGaussian(noise, rate), steps)]).risk(ADD_REMOVE)
    without, used = ratio(False), ratio(True)
    gaps = []
    for alarm in (0.01, 0.1, 0.4):
        for sign in (1, -1):
            null, other = (without, used) if sign == 1 else (-used, -without)
            threshold = np.quantile(
                null[: RUNS // 2], 1 - alarm
            )  # from other runs than those that are counted
            f, t = (
                np.mean(null[RUNS // 2 :] > threshold),
                np.mean(other[RUNS // 2 :] > threshold),
            )
            slack = SURE * math.sqrt(2)
            assert t - slack <= risk.true_positive(min(1.0, f + slack))
            gaps.append(risk.true_positive(float(f)) - t)
    assert min(gaps) < 0.02  # not far below either


def test_failures_count_whole():
    risk = Ledger([clipped_gaussian(20.0), ApproxDP(0.0, 0.03)]).risk(REPLACE_ONE)
    alone = Ledger([clipped_gaussian(20.0)]).risk(REPLACE_ONE)
    assert risk.advantage >= max(0.03, alone.advantage + 0.01)
    assert (
        risk.true_positive(0.0) >= 0.03
    )  # what fails gives the record away, without a false alarm
    assert alone.true_positive(0.0) < 1e-9


def test_without_noise_all_is_known_and_without_release_nothing():
    naked, nothing = Ledger([NonPrivate()]).risk(REPLACE_ONE), Ledger().risk(REPLACE_ONE)
    assert naked.advantage == naked.true_positive(0.0) == naked.posterior(0.5) == 1.0
    assert nothing.advantage == 0.0
    assert nothing.true_positive(0.2) == pytest.approx(0.2, abs=1e-12)
    assert nothing.posterior(0.3) == pytest.approx(0.3)


def test_the_risk_of_a_ledger_is_that_of_its_events_when_asked():
    ledger = Ledger([clipped_gaussian(5.0)])
    before = ledger.risk(REPLACE_ONE)
    ledger.add(clipped_gaussian(5.0), 10)
    assert before.advantage < ledger.risk(REPLACE_ONE).advantage
    with pytest.raises(AdjacencyError):
        Ledger([Gaussian(1.0, {ADD_REMOVE: 1.0})]).risk(REPLACE_ONE)


def test_a_report_tells_its_risk():
    accountant = Accountant(Budget(2.0, 1e-5, "replace_one"))
    accountant.authorize(clipped_gaussian(8.0), 2)
    report = accountant.report()
    assert report.risk().advantage == report.advantage
    assert float(1 - exact_miss(math.sqrt(2) / 4, 0.01)) == pytest.approx(
        report.risk().true_positive(0.01), abs=1e-6
    )


def test_an_adaptive_report_knows_its_point_only():
    accountant = Accountant(Budget(2.0, 1e-5, "replace_one", mode="gdp"))
    accountant.authorize(clipped_gaussian(8.0), 2)
    report = accountant.report()
    assert report.risk().advantage == pytest.approx(math.tanh(1.0), rel=1e-4)
    assert report.risk().false_negative(0.01) == pytest.approx(
        trade_off([(report.epsilon, 1e-5)], 0.01)
    )


def test_words_round_against_the_promise():
    risk = gaussian(0.5)  # finds 0.033899, and 0.27360 afterwards
    text = risk.words("patient")
    for part in (
        "one patient",
        "at most 59.88 %",
        "finds at most 3.39 %",
        "may, after such an alarm, think 27.37 %",
    ):
        assert part in text


@pytest.mark.parametrize("rate", [-0.1, 1.1, math.nan, "0.1"])
def test_rates_and_priors_are_shares(rate):
    risk = gaussian(1.0)
    for call in (
        risk.false_negative,
        risk.true_positive,
        risk.posterior,
        lambda r: risk.posterior(0.5, r),
    ):
        with pytest.raises((ValueError, TypeError)):
            call(rate)
    with pytest.raises(ValueError, match="pure"):
        Risk(lambda epsilon: 0.0, -1.0)
