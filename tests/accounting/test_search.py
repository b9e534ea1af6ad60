"""The largest count that fits."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_dpsco.accounting.calibrate import largest

LIMIT = 2**40


@given(st.integers(0, LIMIT), st.integers(1, LIMIT), st.floats(0.3, 3.0), st.integers(1, LIMIT))
def test_the_largest_count_is_found_from_any_guess(root, limit, power, guess):
    seen = []

    def excess(count: int) -> float:
        assert 1 <= count <= limit
        assert count not in seen
        seen.append(count)
        return (count / (root + 0.5)) ** power - 1.0

    assert largest(excess, limit, guess) == min(root, limit)
    assert len(seen) <= 150


@pytest.mark.parametrize("root", [1, 2, 963, 10**6, 10**9])
def test_a_smooth_excess_takes_a_handful_of_evaluations(root):
    seen = []

    def excess(count: int) -> float:
        seen.append(count)
        return math.log(count / (root + 0.5)) * 0.6 + 0.01 * math.sin(count / root)

    found = largest(excess, LIMIT, guess=max(1, round(0.85 * root)))
    assert excess(found) <= 0 < excess(found + 1) if found else excess(1) > 0
    assert len(seen) <= 14


@given(
    st.integers(0, 10**6), st.sampled_from([-1.0, -math.inf]), st.sampled_from([1.0, math.inf])
)
def test_a_yes_or_no_is_enough(root, yes, no):
    assert largest(lambda count: yes if count <= root else no, LIMIT) == root


def test_nothing_fits_within_a_limit_of_nothing():
    assert largest(lambda count: -1.0, limit=0) == 0
    assert largest(lambda count: -1.0, limit=1) == 1
    assert largest(lambda count: 1.0, limit=LIMIT, guess=LIMIT) == 0
