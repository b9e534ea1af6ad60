"""Selection of the most central candidate."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference import heavy_tailed_literal as literal
from tests.reference.papers.localized import Selected, select_central

points = st.integers(1, 7).flatmap(
    lambda count: st.lists(
        st.lists(st.floats(-9, 9), min_size=2, max_size=2), min_size=count, max_size=count
    )
)


def chosen(candidates: list[list[float]]) -> Selected:
    return select_central(torch.tensor(candidates, dtype=torch.float64))


@settings(derandomize=True, max_examples=100)
@given(points)
def test_the_choice_is_that_of_the_definition(candidates: list[list[float]]) -> None:
    found = chosen(candidates)
    rows = np.array(candidates)
    radii = [sorted(np.linalg.norm(rows - row, axis=1))[len(rows) // 2] for row in rows]
    np.testing.assert_allclose(found.radii, radii, atol=1e-12)
    assert found.radii[found.index] == min(found.radii)
    assert radii[literal.select_central(list(rows))] == pytest.approx(
        radii[found.index], abs=1e-12
    )


@settings(derandomize=True, max_examples=100)
@given(points, st.lists(st.floats(-9, 9), min_size=2, max_size=2))
def test_the_choice_is_within_three_radii_of_what_most_candidates_are_near(
    candidates: list[list[float]], target: list[float]
) -> None:
    rows, u = np.array(candidates), np.array(target)
    near = sorted(np.linalg.norm(rows - u, axis=1))[
        len(rows) // 2
    ]  # more than half are within it
    assert np.linalg.norm(rows[chosen(candidates).index] - u) <= 3 * near + 1e-9


def test_the_first_of_equals_is_chosen() -> None:
    assert chosen([[1.0], [1.0], [1.0]]).index == 0
    assert chosen([[0.0], [1.0]]).index == 0
    assert chosen([[3.0]]).index == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e308])
def test_diverged_candidates_are_not_chosen_while_most_are_finite(bad: float) -> None:
    for place in range(3):
        candidates = [[0.0, 0.0], [0.1, 0.0], [0.0, 0.2]]
        candidates[place] = [bad, bad]
        assert chosen(candidates).index != place


def test_close_candidates_far_from_zero_are_told_apart() -> None:
    base = torch.full((3, 4), 1e8, dtype=torch.float64)
    base[0, 0] += 1.0
    base[2, 0] += 0.4
    assert select_central(base).radii == pytest.approx([0.6, 0.4, 0.4])
    assert select_central(base).index == 1
