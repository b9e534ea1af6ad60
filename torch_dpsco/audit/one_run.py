"""Audit of one training run: secret coins put canaries into the data, and the released model is asked which ones.

Under (epsilon, delta)-DP hardly more guesses are right than coins of bias e^epsilon / (1 + e^epsilon) would be.

Source: Steinke, Nasr, Jagielski 2023 (privacy auditing with one training run). The correction for delta is our own,
docs/proofs/audit.md.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from scipy.stats import binom
from torch.utils.data import ConcatDataset, Dataset

from torch_dpsco import _validate as check
from torch_dpsco._doors import typed
from torch_dpsco.errors import SequenceError

_LARGEST = 64.0  # no audit shows more
_HALVINGS = 60


@dataclass(frozen=True)
class OneRunResult:
    """A lower bound on epsilon from the guesses of one run.

    Args:
        epsilon_lower: the training is not (epsilon, delta)-DP for any smaller epsilon, with the stated confidence.
        delta: at which epsilon is bounded.
        confidence: probability, before the run, that the bound would be true.
        canaries: coins tossed.
        guesses: canaries that were guessed about.
        correct: guesses that were right.
        reach: the bound that as many guesses would show if all were right.
    """

    epsilon_lower: float
    delta: float
    confidence: float
    canaries: int
    guesses: int
    correct: int
    reach: float

    def contradicts(self, epsilon: float) -> bool:
        """Returns whether the bound refutes (epsilon, delta)-DP under add_remove; epsilon >= 0."""
        return self.epsilon_lower > check.nonnegative(epsilon=epsilon, allow_inf=True)


def _chance(correct: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    """Returns a bound on the probability of so many right guesses under (epsilon, delta)-DP."""
    coin = 1.0 / (1.0 + math.exp(-epsilon))
    missing = np.arange(1, correct + 1)
    masses = binom.pmf(correct - missing, guesses, coin)
    # PRIVACY: delta pays for guesses that are right beyond the coins (test_delta_is_paid_for)
    left = canaries * delta - np.concatenate([[0.0], np.cumsum(missing * masses)[:-1]]) if correct else np.zeros(0)
    return float(binom.sf(correct - 1, guesses, coin) + np.clip(left / missing, 0.0, masses).sum())


@typed
def epsilon_of_guesses(correct: int, guesses: int, canaries: int, *, delta: float, confidence: float = 0.95) -> float:
    """Returns the lower bound on epsilon that `correct` right guesses about `canaries` fair coins show.

    Args:
        correct: in [0, guesses].
        guesses: in [1, canaries]; fixed before the run.
        canaries: >= 1, each in the data or not by a fair coin of its own.
        delta: in [0, 1).
        confidence: in (0, 1).

    Raises:
        ValueError: an argument is out of range.

    Guarantee:
        With probability >= confidence the bound is at most the true epsilon at `delta` under add_remove
        (docs/proofs/audit.md).
    """
    check.positive_count(canaries=canaries)
    if not 1 <= guesses <= canaries:
        raise ValueError(f"guesses must be in [1, canaries], here {canaries} (got {guesses})")
    if not 0 <= correct <= guesses:
        raise ValueError(f"correct must be in [0, guesses], here {guesses} (got {correct})")
    if check.nonnegative(delta=delta) >= 1:
        raise ValueError(f"delta must be in [0, 1) (got {delta})")
    check.open_interval(0.0, 1.0, confidence=confidence)
    low, high = 0.0, _LARGEST
    for _ in range(_HALVINGS):  # the chance grows with epsilon
        middle = (low + high) / 2
        if _chance(correct, guesses, canaries, middle, delta) <= 1.0 - confidence:
            low = middle
        else:
            high = middle
    return low


class OneRunAudit:
    """Canaries, each of which is in the training data or not by a secret fair coin.

    Train once, by any loop, on `dataset(base)`; score each canary by what was released alone, higher if it looks like
    one that was in; `result(scores)` opens the coins.

    Args:
        canaries: records like those of the data set.
        guess_in: how many of the highest scores are guessed to have been in; default a quarter of the canaries.
        guess_out: how many of the lowest are guessed to have been out; default as many. Both are fixed here, before
            the run, so that nothing is chosen by its outcome.

    Raises:
        ValueError: no canaries, or more guesses than canaries.

    Guarantee:
        `epsilon_of_guesses`, if the scores are a function of what training released, with no look at the coins.
        The result is not private with respect to the canaries, which must not be anybody's records.
    """

    def __init__(self, canaries: Sequence[Any], *, guess_in: int | None = None, guess_out: int | None = None) -> None:
        quarter = -(-len(canaries) // 4)
        self.guess_in = quarter if guess_in is None else check.count(guess_in=guess_in)
        self.guess_out = self.guess_in if guess_out is None else check.count(guess_out=guess_out)
        if not 1 <= self.guess_in + self.guess_out <= len(canaries):
            raise ValueError(
                f"guess_in + guess_out must be in [1, number of canaries], here {len(canaries)} (got {self.guess_in} + "
                f"{self.guess_out})"
            )
        self.canaries = list(canaries)
        self._coins = np.array([secrets.randbits(1) for _ in self.canaries], dtype=bool)
        self._opened = False

    def dataset(self, base: Dataset[Any]) -> Dataset[Any]:
        """Returns the base followed by the canaries whose coins say so; the same ones at every call."""
        included = [canary for canary, coin in zip(self.canaries, self._coins, strict=True) if coin]
        return ConcatDataset([base, cast("Dataset[Any]", included)]) if included else base

    def result(self, scores: Any, *, delta: float, confidence: float = 0.95) -> OneRunResult:
        """Returns the bound that the guesses show; once, because a second choice of scores would have to be paid.

        Args:
            scores: (number of canaries,) finite or infinite, not NaN.
            delta: in [0, 1).
            confidence: in (0, 1).

        Raises:
            ValueError: an argument is out of range, or there is not one score a canary.
            SequenceError: the coins have been opened already.
        """
        values = np.asarray(scores, dtype=np.float64)
        total, guesses = len(self.canaries), self.guess_in + self.guess_out
        if values.shape != (total,) or np.isnan(values).any():
            raise ValueError(f"scores must be {total} numbers, one a canary, none NaN (got shape {values.shape})")
        reach = epsilon_of_guesses(guesses, guesses, total, delta=delta, confidence=confidence)
        # PRIVACY: one look at the coins (test_coins_are_opened_once)
        if self._opened:
            raise SequenceError("result() opens the coins once; make a new OneRunAudit and train again")
        self._opened = True
        order = np.argsort(values, kind="stable")
        right_out = np.count_nonzero(~self._coins[order[: self.guess_out]])
        right_in = np.count_nonzero(self._coins[order[total - self.guess_in :]])
        correct = int(right_out + right_in)
        bound = epsilon_of_guesses(correct, guesses, total, delta=delta, confidence=confidence)
        return OneRunResult(bound, float(delta), float(confidence), total, guesses, correct, reach)
