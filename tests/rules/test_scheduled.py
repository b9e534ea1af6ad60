"""The rule with fixed steps and weights."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torch_dpsco as dp
from torch_dpsco.algorithms.heavy_tailed_numbers import averaging_schedule
from torch_dpsco.rules import ScheduledSGD


def run(
    rule: ScheduledSGD, means: np.ndarray, lr: float = 0.1, phase: dp.Phase | None = None
) -> Any:
    """Returns (iterates after their steps, answers) of a start at 0."""
    p = torch.nn.Parameter(torch.zeros(means.shape[1], dtype=torch.float64))
    groups, state, iterates, answers = [{"params": [p], "lr": lr}], defaultdict(dict), [], []
    for k, mean in enumerate(means):
        p.grad = torch.from_numpy(mean.copy())
        with torch.no_grad():
            rule.update(groups, state, k, phase or dp.Phase(None))
            rule.settle(groups, state, k)
        iterates.append(p.detach().numpy().copy())
        answers.append(rule.answer(p, state).numpy().copy())
    return np.array(iterates), np.array(answers)


@settings(derandomize=True, max_examples=60)
@given(
    # no weight below 1e-6 but 0: relative to the largest one the reference would lose its digits
    st.lists(
        st.tuples(st.floats(0.01, 10), st.just(0.0) | st.floats(1e-6, 1e6)),
        min_size=1,
        max_size=8,
    ).filter(lambda pairs: sum(weight for _, weight in pairs) > 1e-3)
)
def test_the_answer_is_the_weighted_average_of_iterates_after_their_steps(
    pairs: list[tuple[float, float]],
) -> None:
    factors, weights = zip(*pairs, strict=True)
    means = np.random.default_rng(len(pairs)).standard_normal((len(pairs), 3))
    iterates, answers = run(ScheduledSGD(factors, weights), means)
    np.testing.assert_allclose(
        iterates, -0.1 * np.cumsum(np.array(factors)[:, None] * means, axis=0), atol=1e-12
    )
    for k in range(len(pairs)):
        if sum(weights[: k + 1]) > 0:
            expected = np.average(
                iterates[: k + 1], axis=0, weights=np.array(weights[: k + 1]) / max(weights)
            )
            np.testing.assert_allclose(answers[k], expected, atol=1e-9)
        else:
            np.testing.assert_array_equal(answers[k], iterates[k])


def test_weights_that_span_the_range_of_floats_do_not_overflow() -> None:
    weights = [10.0 ** (100 * k - 300) for k in range(7)]
    means = np.random.default_rng(1).standard_normal((7, 2))
    iterates, answers = run(ScheduledSGD([1.0] * 7, weights), means)
    np.testing.assert_allclose(answers[-1], iterates[-1], rtol=1e-12)
    assert np.isfinite(answers).all()


@pytest.mark.cases(11, 5)
@pytest.mark.parametrize("steps", [1, 2, 4, 5, 30, 1000])
@pytest.mark.parametrize(
    ("curvature", "smoothness"), [(0.5, 2.0), (1.0, 1.0), (1e-6, 1.0), (0.1, 1.0)]
)
def test_the_schedules_of_the_theory_are_accepted(
    curvature: float, smoothness: float, steps: int
) -> None:
    made = averaging_schedule(strong_convexity=curvature, smoothness=smoothness, steps=steps)
    rule = ScheduledSGD(made.lr, made.weights)
    iterates, answers = run(rule, np.ones((steps, 1)), lr=1.0)
    expected = np.average(iterates, axis=0, weights=made.weights)
    np.testing.assert_allclose(answers[-1], expected, rtol=1e-9)


def test_the_rate_of_a_phase_replaces_that_of_the_group() -> None:
    rule = ScheduledSGD([1.0, 0.5], [1.0, 1.0])
    iterates, _ = run(rule, np.ones((2, 1)), lr=0.1, phase=dp.Phase(2, lr=2.0))
    assert iterates[:, 0].tolist() == [-2.0, -3.0]


@pytest.mark.parametrize(
    ("factors", "weights", "words"),
    [
        ([], [], "weights must be one per factor"),
        ([1.0], [1.0, 1.0], r"weights must be one per factor.*\(got 2 for 1\)"),
        ([1.0, 0.0], [1.0, 1.0], "factors must be > 0"),
        ([1.0, math.nan], [1.0, 1.0], "factors must be > 0"),
        ([1.0, math.inf], [1.0, 1.0], "factors must be"),
        ([1.0, 1.0], [1.0, -1.0], "weights must be >= 0"),
        ([1.0, 1.0], [0.0, 0.0], "sum > 0"),
        ([1.0, 1.0], [0.0, math.inf], "weights must be"),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused_by_name(factors: Any, weights: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ScheduledSGD(factors, weights)


def test_settings_are_plain_numbers_that_tell_rules_apart() -> None:
    rule = ScheduledSGD(torch.tensor([1.0, 0.5]).tolist(), (1, 2))
    assert rule.settings() == {
        "rule": "ScheduledSGD",
        "average": "last",
        "factors": [1.0, 0.5],
        "weights": [1.0, 2.0],
    }
    assert all(type(value) is float for value in rule.settings()["weights"])
