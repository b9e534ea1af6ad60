"""Audits of one run: the bound is exact for coins, true for exact mechanisms, and finds noise that is missing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import binom, norm
from torch.utils.data import TensorDataset

from torch_dpsco.audit import OneRunAudit, epsilon_of_guesses
from torch_dpsco.errors import SequenceError

CANARIES, AUDITS = 200, 1000


def bounds(flips: np.ndarray, delta: float, confidence: float) -> np.ndarray:
    """Bounds from right guesses of many audits, each about all canaries."""
    counts = flips.sum(axis=1)
    table = {
        c: epsilon_of_guesses(int(c), CANARIES, CANARIES, delta=delta, confidence=confidence) for c in np.unique(counts)
    }
    return np.array([table[c] for c in counts])


def test_bound_inverts_the_binomial_tail_without_delta() -> None:
    bound = epsilon_of_guesses(90, 100, 100, delta=0.0, confidence=0.95)
    assert binom.sf(89, 100, 1 / (1 + math.exp(-bound))) == pytest.approx(0.05, abs=1e-9)


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
    total = sum((row if isinstance(row, torch.Tensor) else row[0] for row in data), torch.zeros(CANARIES))
    noisy = total + scale * torch.randn(CANARIES)
    return audit.result(noisy.numpy(), delta=1e-9, confidence=1 - 1e-6).epsilon_lower


def test_gaussian_sum_is_not_refuted_and_one_with_little_noise_is() -> None:
    claim = brentq(lambda e: norm.cdf(0.5 - e) - math.exp(e) * norm.cdf(-0.5 - e) - 1e-9, 0.0, 20.0)
    assert run(1.0) <= claim
    assert run(0.0) > 1.0
    assert run(0.0) > run(1.0)


def test_coins_are_opened_once() -> None:
    audit = OneRunAudit(range(8))
    audit.result(np.arange(8.0), delta=0.0)
    with pytest.raises(SequenceError, match="once"):
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
