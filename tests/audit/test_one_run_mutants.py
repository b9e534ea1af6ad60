"""One run of subsampled DP-SGD, its steps released: the sound loop is never refuted in 1,000 draws, mutants are.

Each canary has a gradient along its own axis, so that a step releases one noisy number for each. The mutants are of the
sampling, and of single steps; those of clip and noise are in test_one_run_training.py, on real training.
"""

from __future__ import annotations

import numpy as np
import pytest
from opacus.accountants import RDPAccountant

from torch_dpsco.audits import epsilon_of_guesses

CANARIES, GUESSES, STEPS, RATE, NOISE = 12000, 200, 32, 0.05, 2.0
DELTA, CONFIDENCE = 1e-14, 1 - 1e-9  # a false alarm in 1,000 draws has probability <= 1e-6


def steps(rng: np.random.Generator, mutant: str, included: np.ndarray) -> np.ndarray:
    """(steps, canaries) noisy sums of clipped gradients of norm 1."""
    rate = 1.0 if mutant == "every record in every step" else RATE
    batch = (rng.random((STEPS, CANARIES)) < rate) & included
    if mutant == "one batch for all steps":
        batch[:] = rng.random(CANARIES) < 0.5
        batch &= included
    noise = NOISE * rng.standard_normal((STEPS, CANARIES))
    if mutant == "noise forgotten in one step":
        noise[0] = 0.0
    elif mutant == "noise of one step reused with the other sign":
        noise[1] = -noise[0]
    return batch + noise


def bound(released: np.ndarray, included: np.ndarray, mutant: str) -> float:
    if mutant == "noise forgotten in one step":
        scores = released[0]
    elif mutant == "noise of one step reused with the other sign":
        scores = released[0] + released[1]
    else:
        scores = np.log1p(RATE * np.expm1(np.minimum((released - 0.5) / NOISE**2, 50.0))).sum(
            axis=0
        )
    top = np.argpartition(scores, -GUESSES)[-GUESSES:]
    correct = int(included[top].sum())
    return epsilon_of_guesses(correct, GUESSES, CANARIES, delta=DELTA, confidence=CONFIDENCE)


def claim() -> float:
    accountant = RDPAccountant()
    accountant.history = [(NOISE, RATE, STEPS)]
    return float(accountant.get_epsilon(DELTA))


MUTANTS = [
    "noise forgotten in one step",
    "noise of one step reused with the other sign",
    "every record in every step",
    "one batch for all steps",
]


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_is_refuted_by_one_run(mutant: str) -> None:
    rng = np.random.default_rng(1)
    included = rng.random(CANARIES) < 0.5
    found = bound(steps(rng, mutant, included), included, mutant)
    assert found > claim()


@pytest.mark.weekly
def test_sound_loop_is_never_refuted() -> None:
    rng, limit = np.random.default_rng(2), claim()
    for _ in range(1000):
        included = rng.random(CANARIES) < 0.5
        assert bound(steps(rng, "", included), included, "") <= limit
