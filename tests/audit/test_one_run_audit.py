"""Audits of one run: the bound is exact for coins, true for exact mechanisms, and finds noise that is missing."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import brentq, linprog
from scipy.stats import binom, norm
from torch.utils.data import TensorDataset

from torch_dpsco.accounting.analysis.gaussian import gaussian_delta
from torch_dpsco.audits import OneRunAudit, epsilon_of_guesses, mu_of_guesses, one_run
from torch_dpsco.errors import SequenceError

CANARIES, AUDITS = 200, 1000


def bounds(flips: np.ndarray, delta: float, confidence: float) -> np.ndarray:
    """Bounds from right guesses of many audits, each about all canaries."""
    counts = flips.sum(axis=1)
    table = {
        c: epsilon_of_guesses(int(c), CANARIES, CANARIES, delta=delta, confidence=confidence)
        for c in np.unique(counts)
    }
    return np.array([table[c] for c in counts])


def test_bound_inverts_the_binomial_tail_without_delta() -> None:
    bound = epsilon_of_guesses(90, 100, 100, delta=0.0, confidence=0.95)
    assert binom.sf(89, 100, 1 / (1 + math.exp(-bound))) == pytest.approx(0.05, abs=1e-9)


@pytest.mark.slow
def test_delta_is_paid_for() -> None:
    # The worst (0, delta)-DP mechanism shows a coin with probability delta, and otherwise nothing.
    delta, confidence = 0.02, 0.9
    rng = np.random.default_rng(3)
    flips = rng.random((AUDITS, CANARIES)) < delta + (1 - delta) / 2
    refuted = np.count_nonzero(bounds(flips, delta, confidence) > 0.0)
    assert binom.sf(refuted - 1, AUDITS, 1 - confidence) > 1e-6
    shares = [epsilon_of_guesses(150, 200, 200, delta=d) for d in (0.0, 1e-5, 1e-4, 1e-3)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > shares[-1]


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0])
def test_true_epsilon_is_refuted_no_more_often_than_stated(epsilon: float) -> None:
    # Randomized response attains the bound; false-alarm rate of this test <= 1e-6.
    rng = np.random.default_rng(5)
    flips = rng.random((AUDITS, CANARIES)) < 1 / (1 + math.exp(-epsilon))
    found = bounds(flips, 0.0, 0.95)
    assert binom.sf(np.count_nonzero(found > epsilon) - 1, AUDITS, 0.05) > 1e-6
    assert np.median(found) > epsilon / 3 - 0.1


def run(scale: float) -> float:
    """Noisy sum of canaries that are unit vectors: what is released is the scores."""
    audit = OneRunAudit(list(torch.eye(CANARIES)), guess_in=60, guess_out=60)
    data = audit.dataset(TensorDataset(torch.zeros(1, CANARIES)))
    total = sum(
        (row if isinstance(row, torch.Tensor) else row[0] for row in data), torch.zeros(CANARIES)
    )
    noisy = total + scale * torch.randn(CANARIES)
    return audit.result(noisy.numpy(), delta=1e-9, confidence=1 - 1e-6).epsilon_lower


def test_gaussian_sum_is_not_refuted_and_one_with_little_noise_is() -> None:
    claim = brentq(
        lambda e: norm.cdf(0.5 - e) - math.exp(e) * norm.cdf(-0.5 - e) - 1e-9, 0.0, 20.0
    )
    assert run(1.0) <= claim
    assert run(0.0) > 1.0
    assert run(0.0) > run(1.0)


def gaussian_audits(mu: float, guesses: int, each: float) -> np.ndarray:
    """Bounds on mu of many audits of unit vectors with noise of standard deviation 1/mu."""
    rng = np.random.default_rng(11)
    included = rng.random((AUDITS, CANARIES)) < 0.5
    order = np.argsort(included + rng.standard_normal(included.shape) / mu, axis=1)
    low, high = order[:, : guesses // 2], order[:, CANARIES - guesses // 2 :]
    right = (~np.take_along_axis(included, low, 1)).sum(1) + np.take_along_axis(
        included, high, 1
    ).sum(1)
    table = {
        c: mu_of_guesses(int(c), guesses, CANARIES, confidence=each) for c in np.unique(right)
    }
    return np.array([table[c] for c in right])


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize("guesses", [CANARIES, CANARIES // 5])
@pytest.mark.parametrize("mu", [0.1, 1.0, 3.0])
def test_true_mu_is_refuted_no_more_often_than_stated(mu: float, guesses: int) -> None:
    # Gaussian noise is exactly mu-GDP; false-alarm rate of this test <= 1e-6.
    found = gaussian_audits(mu, guesses, 0.95)
    assert binom.sf(np.count_nonzero(found > mu) - 1, AUDITS, 0.05) > 1e-6
    assert np.median(found) > mu / 3 - 0.2


@pytest.mark.weekly
@pytest.mark.parametrize("mu", [0.5, 2.0])
def test_a_recursion_that_demands_more_is_caught(
    mu: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_run, "ndtri", lambda right: norm.ppf(min(6.0 * right, 1.0)))
    found = gaussian_audits(mu, CANARIES // 5, 0.95)
    assert binom.sf(np.count_nonzero(found > mu) - 1, AUDITS, 0.05) < 1e-6


def least_total(correct: int, guesses: int, canaries: int, mu: float, tail: float) -> float:
    """The least mass of a law of right guesses within the inequalities of the proof, by a linear program.

    Tangents from below stand for the convex function, so that the program's value is at most the true one.
    """
    at = np.concatenate([[1e-12], np.linspace(1e-4, 0.9999, 400)])
    value, slope = (
        norm.cdf(norm.ppf(at) - mu),
        norm.pdf(norm.ppf(at) - mu) / norm.pdf(norm.ppf(at)),
    )
    counts, rows, limits = np.arange(guesses + 1), [], []
    for least in range(1, guesses + 1):
        right = np.where(counts >= least, counts, 0) / canaries
        wrong = np.where(counts >= least - 1, guesses - counts, 0) / canaries
        rows += [slope_ * right - wrong for slope_ in slope]
        limits += list(slope * at - value)
    rows.append(-(counts >= correct).astype(float))
    limits.append(-tail)
    return float(linprog(np.ones(guesses + 1), A_ub=np.array(rows), b_ub=np.array(limits)).fun)


@pytest.mark.cases(3, 1)
@pytest.mark.parametrize(("correct", "mu"), [(6, 0.1), (7, 0.3), (9, 1.0), (10, 2.0)])
def test_recursion_is_the_least_mass_of_the_program(correct: int, mu: float) -> None:
    exact = one_run._least_total(correct, 10, 12, mu, 0.1)
    assert exact == pytest.approx(least_total(correct, 10, 12, mu, 0.1), rel=2e-3)


def test_family_gaussian_shows_mu_and_its_epsilon() -> None:
    audit = OneRunAudit(list(range(1000)), guess_in=100, guess_out=100)
    noise = 0.2 * np.random.default_rng(2).standard_normal(1000)
    found = audit.result(audit._coins + noise, delta=1e-6, family="gaussian", claimed=0.5)
    assert found.mu_lower == mu_of_guesses(found.correct, 200, 1000)
    assert gaussian_delta(found.mu_lower, found.epsilon_lower) >= 1e-6
    assert found.epsilon_lower > epsilon_of_guesses(found.correct, 200, 1000, delta=1e-6)
    assert found.contradicts()
    assert not found.contradicts(50.0)
    assert "mu is at least" in str(found)
    assert str(found).endswith("The claim of epsilon 0.5 is REFUTED.")


def test_coins_are_opened_once() -> None:
    audit = OneRunAudit(range(8))
    audit.result(np.arange(8.0), delta=0.0)
    with pytest.raises(SequenceError, match="once"):
        audit.result(np.arange(8.0), delta=0.0)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, pickle.dumps, lambda audit: copy.deepcopy([audit])]
)
def test_an_audit_is_opened_by_no_copy(again: Callable[[Any], Any]) -> None:
    audit = OneRunAudit(range(8))
    pickle.loads(pickle.dumps(audit.dataset([1.0])))  # the data go to workers
    with pytest.raises(SequenceError, match="must not be copied or pickled"):
        again(audit)
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            try:
                audit.result(np.arange(8.0), delta=0.0)
            except SequenceError:
                code = 0
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    audit.result(np.arange(8.0), delta=0.0)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="guess_in"):
        OneRunAudit([])
    with pytest.raises(ValueError, match="guess_in"):
        OneRunAudit(range(8), guess_in=5, guess_out=4)
    with pytest.raises(ValueError, match="scores"):
        OneRunAudit(range(8)).result([1.0] * 7, delta=0.0)
    with pytest.raises(ValueError, match="scores"):
        OneRunAudit(range(8)).result([math.nan] * 8, delta=0.0)
    for arguments in ((9, 8, 8), (1, 9, 8), (-1, 8, 8), (0, 0, 8)):
        with pytest.raises(ValueError, match="must be in"):
            epsilon_of_guesses(*arguments, delta=0.0)
    with pytest.raises(ValueError, match="delta"):
        epsilon_of_guesses(1, 8, 8, delta=1.0)
    with pytest.raises(ValueError, match="correct"):
        mu_of_guesses(9, 8, 8)
    audit = OneRunAudit(range(8))
    for wrong in (
        {"family": "laplace"},
        {"family": "gaussian", "delta": 0.0},
        {"claimed": -1.0},
    ):
        with pytest.raises(
            ValueError, match=next(iter({"delta": 0} if "delta" in wrong else wrong))
        ):
            audit.result(np.arange(8.0), **{"delta": 1e-3, **wrong})
    with pytest.raises(ValueError, match="epsilon"):  # no claim; and the coins were still closed
        audit.result(np.arange(8.0), delta=1e-3).contradicts()
