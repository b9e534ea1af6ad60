"""Audits of passes of secret draws, by the likelihood ratio and against somebody who knows where all others are.

False alarms: each audit has confidence 1 - 1e-6, and seeds are fixed. What must exceed a figure shows that audits can.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
from scipy.special import logsumexp

import torch_dpsco as dp
from tests.reference.papers.allocation import allocation_epsilon
from torch_dpsco.sampling.one_pass import AssignedSampler, DisjointSampler

SURE, DELTA = 1 - 1e-6, 1e-5


def scores(values: np.ndarray, shift: float, rise: float, noise: float) -> np.ndarray:
    """Returns log of the mean over t of N(shift + rise at t) against that of N(shift at t), or N(0) if shift is 0."""

    def log_mixture(height: float) -> np.ndarray:
        logs = (height * values - height * height / 2) / noise**2
        return np.asarray(logsumexp(logs, axis=1)) - np.log(values.shape[1])

    return log_mixture(shift + rise) - (log_mixture(shift) if shift else 0.0)


def passes(
    trials: int, steps: int, seed: int
) -> Iterator[tuple[np.random.Generator, np.ndarray, int]]:
    """Yields (generator, rows, trials) in blocks."""
    rng, block = np.random.default_rng(seed), 10_000
    for _ in range(trials // block):
        yield rng, np.arange(block), block


def one_side(
    trials: int, steps: int, noise: float, *, shift: float, rise: float, there: bool, seed: int
) -> np.ndarray:
    """Returns scores of passes in which all others contribute -1 and the record 1, or 0 if it is not there.

    shift: 1 for batches of a cut, in which the record takes the place of one of the others, 0 where others are known.
    """
    found = []
    for rng, rows, block in passes(trials, steps, seed):
        values = noise * rng.standard_normal((block, steps))
        values[rows, rng.integers(steps, size=block)] += shift + (1.0 if there else 0.0)
        found.append(scores(values, shift, rise, noise))
    return np.concatenate(found)


def excess(
    trials: int, steps: int, noise: float, shift: float, epsilon: float
) -> tuple[float, float]:
    """Returns a two-sided bound on delta at epsilon, by Hoeffding's inequality for (1 - e^(epsilon - loss))_+."""
    loss = one_side(trials, steps, noise, shift=shift, rise=1.0, there=True, seed=3)
    mean = float(np.maximum(-np.expm1(np.minimum(epsilon - loss, 0.0)), 0.0).mean())
    room = math.sqrt(math.log(2e6) / (2 * trials))
    return mean - room, mean + room


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("noise", "epsilon", "truth"), [(0.5, 5.397, 0.0204), (1.0, 0.622, 0.0363)]
)
def test_a_cut_at_random_has_no_bound_of_random_allocation(
    noise: float, epsilon: float, truth: float
) -> None:
    """docs/proofs/allocation.md#not-covered: T = 100; epsilon is the figure of assigned batches at delta 1e-5.

    In a cut, the batches of the others show a place that is left; of assigned batches all others may be known.
    """
    assert allocation_epsilon(noise, 100, DELTA, "zero_out") <= epsilon + 1e-3
    low, high = excess(40_000, 100, noise, 1.0, epsilon)
    assert DELTA < low < truth < high
    low, high = excess(40_000, 100, noise, 0.0, epsilon)
    assert low <= DELTA <= high


@pytest.mark.weekly
def test_the_batches_of_real_loaders_are_those_of_the_audits() -> None:
    """The sums without noise: who is where in `Disjoint` moves the others, and in `Assigned` does not."""
    steps, noise, trials, rng = 20, 1.0, 6000, np.random.default_rng(4)
    sides: dict[str, list[list[float]]] = {"cut": [[], []], "assigned": [[], []]}
    for _ in range(trials):
        for name, sampler in (
            ("cut", DisjointSampler(dp.Disjoint(1, steps))),
            ("assigned", AssignedSampler(dp.Assigned(1, steps))),
        ):
            parts = np.zeros(steps, dtype=np.int64)
            for k, (_, indices) in enumerate(sampler.draws()):
                parts[indices] = k
            for there in (1, 0):
                values = noise * rng.standard_normal((1, steps))
                known = np.bincount(
                    parts[1:], minlength=steps
                )  # of the others: known in "assigned", where it tells nothing
                values[0] -= known
                values[0, parts[0]] += there
                values[0] += 1.0 if name == "cut" else known
                score = scores(values, 1.0 if name == "cut" else 0.0, 1.0, noise)[0]
                sides[name][1 - there].append(score)
    found = {
        name: dp.audit_outputs(
            np.array(first), np.array(second), delta=DELTA, confidence=SURE
        ).epsilon_lower
        for name, (first, second) in sides.items()
    }
    figure = allocation_epsilon(noise, steps, DELTA, "zero_out")
    assert found["cut"] > found["assigned"]
    assert found["assigned"] <= figure


@pytest.mark.weekly
def test_draws_that_serve_several_passes_tell_more_than_fresh_ones() -> None:
    """z = 1, T = 20, K = 10: equal draws are one pass with noise 1/sqrt(10), above the figure of fresh ones."""
    figure = allocation_epsilon(1.0, 20, DELTA, "add_remove", epochs=10)
    low, _ = excess(20_000, 20, 1.0 / math.sqrt(10), 0.0, figure)
    assert low > DELTA
