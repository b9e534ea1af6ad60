"""The exponential mechanism: the law that is drawn from keeps epsilon exactly, whatever the numbers are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference.papers.heavy_tailed import quantile_probabilities
from torch_dpsco.algorithms import mechanisms as exponential
from torch_dpsco.algorithms.mechanisms import (
    draw,
    draw_quantile,
    geometric_grid,
    quantile_law,
    score_law,
)
from torch_dpsco.noise import Repeatable

GRID = geometric_grid(1e-4, 1e4)
ODD = [math.nan, math.inf, -math.inf, 0.0, 5e-324, 1e308, 1.0]


def ratios(first: Sequence[int], second: Sequence[int]) -> list[Fraction]:
    return [Fraction(int(a), int(b)) for a, b in zip(first, second, strict=True)]


def assert_keeps_epsilon(first: np.ndarray, second: np.ndarray, epsilon: float) -> None:
    """Checks P(j) <= e^epsilon Q(j), Q(j) <= e^epsilon P(j) and the bounded range, in exact arithmetic."""
    with mpmath.workdps(60):
        limit = Fraction(int(mpmath.floor(mpmath.exp(mpmath.mpf(epsilon)) * 10**40)), 10**40)
    assert min(first.min(), second.min()) > 0
    found = ratios(first, second)
    assert max(found) <= limit, float(max(found) / limit)
    assert min(found) * limit >= 1
    assert max(found) <= limit * min(found)


def worst_pairs(n: int) -> list[tuple[list[float], list[float]]]:
    """Data sets of n numbers that differ in one, which crosses all, one or no grid points."""
    piles = [
        [GRID[0]] * n,
        [GRID[-1] * 2] * n,
        [1.0] * (n // 2) + [100.0] * (n - n // 2),
        list(np.geomspace(1e-3, 1e3, n)),
    ]
    return [
        ([old, *pile[1:]], [new, *pile[1:]])
        for pile in piles
        for old, new in itertools.combinations(ODD, 2)
    ]


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("epsilon", [1e-4, 0.3, 1.0, 8.0, 200.0, 1e5])
@pytest.mark.parametrize("quantile", [0.0, 0.5, 0.9, 1.0])
def test_the_drawn_law_keeps_epsilon_exactly(epsilon, quantile):
    for n in (1, 7, 300):
        for first, second in worst_pairs(n):
            laws = [
                quantile_law(values, GRID, quantile, epsilon, n) for values in (first, second)
            ]
            assert_keeps_epsilon(*laws, epsilon)


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("epsilon", [0.3, 8.0])
def test_adding_or_removing_one_number_keeps_epsilon_at_a_public_size(epsilon):
    for n in (2, 300):
        for values, _ in worst_pairs(n):
            laws = [quantile_law(values[start:], GRID, 0.9, epsilon, n) for start in (0, 1)]
            assert_keeps_epsilon(*laws, epsilon)


@pytest.mark.slow
@settings(max_examples=60)
@given(
    st.lists(st.floats(1e-5, 1e5), min_size=1, max_size=40),
    st.floats(allow_nan=True, allow_infinity=True),
    st.floats(0, 1),
    st.floats(1e-3, 50),
    st.integers(1, 60),
)
def test_no_replacement_breaks_epsilon(values, new, quantile, epsilon, size):
    grid = GRID[:size]
    laws = [
        quantile_law(data, grid, quantile, epsilon, len(values))
        for data in (values, [new, *values[1:]])
    ]
    assert_keeps_epsilon(*laws, epsilon)


def tight_pair(epsilon: float) -> tuple[np.ndarray, np.ndarray]:
    """Laws of 100 numbers of which one moves up: the score of most points falls by 1, that of a rare one rises."""
    common = (
        [0.5] * 44 + [1.1] * 8 + [9.0] * 47
    )  # rank 50.9 - 0.5: counts 45, 53, 53, ... with 0.5, or else 44, 52, 52, ...
    grid = [1.0, 1.25, *np.linspace(2.0, 3.0, 4000)]
    first, second = (
        quantile_law([new, *common], grid, 0.509, epsilon, 100) for new in (0.5, math.inf)
    )
    return first, second


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 1.5])
def test_a_worst_pair_spends_all_of_epsilon(epsilon):
    first, second = tight_pair(epsilon)
    found = [math.log(ratio) for ratio in ratios(first, second)]
    assert 0.98 * epsilon < max(found) - min(found) <= epsilon
    assert max(map(abs, found)) > 0.85 * epsilon


@pytest.mark.parametrize("factor", [2.0, 1.01])
def test_a_law_at_more_than_epsilon_is_caught(monkeypatch, factor):
    law = exponential._law
    assert_keeps_epsilon(*tight_pair(1.0), 1.0)
    monkeypatch.setattr(
        exponential, "_law", lambda scores, epsilon: law(scores, factor * epsilon)
    )
    with pytest.raises(AssertionError):
        assert_keeps_epsilon(*tight_pair(1.0), 1.0)


def test_without_the_uniform_share_epsilon_is_broken(monkeypatch):
    pair = [[1.0] * 300, [100.0, *[1.0] * 299]]
    assert_keeps_epsilon(*(quantile_law(values, GRID, 0.9, 2.0, 300) for values in pair), 2.0)
    monkeypatch.setattr(exponential, "_UNIFORM", 0.0)
    with pytest.raises(AssertionError):
        assert_keeps_epsilon(
            *(quantile_law(values, GRID, 0.9, 2.0, 300) for values in pair), 2.0
        )


def test_what_is_not_a_number_counts_as_above():
    plain = quantile_law([1.0, 2.0, math.inf], GRID, 0.5, 1.0, 3)
    for odd in (math.nan, -math.nan, 1e300):
        assert np.array_equal(quantile_law([1.0, odd, 2.0], GRID, 0.5, 1.0, 3), plain)


def test_the_rank_is_that_of_the_public_size():
    few = quantile_law([1.0], GRID, 0.5, 1.0, n=1000)
    assert few.argmax() >= np.searchsorted(
        GRID, 1.0
    )  # every count is far below 500: the larger ones are best
    own = quantile_law([1.0], GRID, 0.5, 1.0, n=1)
    assert not np.array_equal(few, own)


def law_of_cells(values: np.ndarray, quantile: float, epsilon: float) -> np.ndarray:
    """The exponential mechanism written out: a point is as bad as its cell is far from the rank."""
    scores = []
    for j, point in enumerate(GRID):
        below = sum(value <= GRID[j - 1] for value in values) if j else 0
        upto = sum(value <= point for value in values)
        rank = quantile * len(values) - 0.5
        scores.append(0.0 if below <= rank <= upto else min(abs(below - rank), abs(upto - rank)))
    weights = np.exp(-epsilon / 2 * np.array(scores))
    return weights / weights.sum()


@pytest.mark.parametrize("pile", [0, 400])
def test_the_drawn_law_is_the_formula_up_to_the_uniform_share(pile):
    values = np.append(np.random.default_rng(0).exponential(size=500 - pile), [2.0] * pile)
    drawn = quantile_law(values, GRID, 0.8, 1.0, 500) / 2**53
    assert drawn.sum() == 1.0
    assert np.abs(drawn - law_of_cells(values, 0.8, 1.0)).max() < 2e-5
    assert (quantile_law(values, GRID, 0.8, 1.0, 500) > 0).all()


def test_many_equal_values_are_found():
    """Under the score |count - rank| all points above the pile are equally good, and together nearly certain."""
    values = [0.5] * 80 + [1.4] * 120
    law = quantile_law(values, GRID, 0.9, 1.0, 200) / 2**53
    formula = quantile_probabilities(values, GRID, 0.9, 1.0)
    found = int(np.searchsorted(GRID, 1.4))
    assert law[found] > 0.997
    assert formula[found] < 0.02
    assert formula[found:].sum() > 0.99


def test_probabilities_do_not_underflow_in_their_logarithms():
    with mpmath.workdps(40):
        scores = [abs(0 - 450), abs(500 - 450)]
        weights = [mpmath.exp(-mpmath.mpf(score) / 2) for score in scores]
        expected = float(weights[0] / sum(weights))
    assert quantile_probabilities([2.0] * 500, [1.0, 3.0], 0.9, 1.0)[0] == pytest.approx(
        expected, rel=1e-12
    )


@pytest.mark.slow
def test_draws_follow_the_law():
    generator = torch.Generator().manual_seed(1)
    values, grid = np.arange(40) / 10, [0.95, 1.95, 2.95]
    law = quantile_law(values, grid, 0.5, 0.5, 40) / 2**53
    draws = [draw_quantile(values, grid, 0.5, 0.5, 40, generator) for _ in range(4000)]
    for point, probability in zip(grid, law, strict=True):
        # 5 standard deviations; the seed is fixed
        assert abs(draws.count(point) / 4000 - probability) < 5 * math.sqrt(
            probability * (1 - probability) / 4000
        )


def test_each_point_has_as_many_draws_as_its_law_says(monkeypatch):
    law = score_law([0, 1, 5], 1, 1.0)
    first, second, _ = map(int, law)
    for number, index in (
        (0, 0),
        (first - 1, 0),
        (first, 1),
        (first + second - 1, 1),
        (first + second, 2),
    ):
        monkeypatch.setattr(Repeatable, "integer", lambda self, bits, number=number: number)
        assert draw(law, torch.Generator()) == index


def test_the_first_and_the_last_draw_choose_the_ends(monkeypatch):
    for number, point in ((0, 1.0), (2**53 - 1, 3.0)):
        monkeypatch.setattr(Repeatable, "integer", lambda self, bits, number=number: number)
        assert draw_quantile([2.0], [1.0, 2.0, 3.0], 0.5, 1.0, 1, torch.Generator()) == point


def test_the_rank_error_holds_with_its_probability():
    values = np.sort(np.random.default_rng(2).pareto(2.0, size=2000))
    law = quantile_law(values, GRID, 0.9, 1.0, 2000) / 2**53
    upper = np.searchsorted(values, GRID, side="right")
    errors = np.maximum(np.maximum(np.append(0, upper[:-1]) - 1799.5, 1799.5 - upper), 0)
    bound = 2 * math.log(len(GRID) / 0.01)
    assert errors.min() == 0
    assert law[errors > bound].sum() < 0.01 + 2e-5


def test_the_grid_is_geometric_and_public():
    assert len(GRID) == 107
    assert np.allclose(GRID[1:] / GRID[:-1], 2**0.25, rtol=1e-14)
    assert GRID[0] == 1e-4
    assert GRID[-1] <= 1e4 < GRID[-1] * 2**0.25
    assert geometric_grid(0.125, 32.0).tolist()[::4] == [2.0**k for k in range(-3, 6)]


# -- any scores -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=200)
@given(
    st.data(),
    st.integers(1, 30),
    st.one_of(st.integers(1, 10**6), st.sampled_from([3, 2**40, 2**51 - 1])),
    st.floats(1e-3, 100),
)
def test_scores_that_move_by_the_sensitivity_keep_epsilon(data, size, sensitivity, epsilon):
    span = st.integers(-(2**52), 2**52)
    base = [data.draw(span) for _ in range(size)]
    if data.draw(st.booleans()):  # of the same size as the sensitivity, so that many are likely
        base = [score % (3 * sensitivity) for score in base]
    step = st.sampled_from([-sensitivity, 0, sensitivity, sensitivity // 2])
    moved = [score + data.draw(step) for score in base]
    assert_keeps_epsilon(
        *(score_law(scores, sensitivity, epsilon) for scores in (base, moved)), epsilon
    )


@pytest.mark.parametrize("sensitivity", [2.0**-40, 1 / 3, 1.0, 398.0, 1e15])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 30.0])
def test_scores_at_the_bound_spend_all_of_epsilon_and_no_more(sensitivity, epsilon):
    first = np.array([0.0] + [sensitivity] * 200)
    second = np.array([sensitivity] + [0.0] * 200)
    laws = [score_law(scores, sensitivity, epsilon) for scores in (first, second)]
    assert_keeps_epsilon(*laws, epsilon)
    found = [math.log(ratio) for ratio in ratios(*laws)]
    assert (
        max(found) - min(found) > (0.99 if epsilon < 2 else 0.4) * epsilon
    )  # the uniform share hides more


@pytest.mark.parametrize("sensitivity", [0.3, 1.0, 77.0, 1e12])
def test_the_law_of_scores_is_the_formula_up_to_the_uniform_share(sensitivity):
    scores = np.array([0.0, 0.1, 1.0, 2.5, 60.0]) * sensitivity
    with mpmath.workdps(40):
        weights = [
            mpmath.exp(-mpmath.mpf(2) * float(score) / (2 * sensitivity)) for score in scores
        ]
        formula = np.array([float(weight / sum(weights)) for weight in weights])
    law = score_law(scores, sensitivity, 2.0) / 2**53
    assert np.abs(law - formula).max() < 2e-5


def test_the_law_of_scores_depends_on_differences_alone():
    scores = np.random.default_rng(0).integers(0, 1000, 50)
    law = score_law(scores, 100, 1.0)
    assert np.array_equal(score_law(scores + 2**52, 100, 1.0), law)
    assert np.array_equal(score_law(scores - 2**52, 100, 1.0), law)
    assert np.array_equal(score_law(scores * 2.0**-30, 100 * 2.0**-30, 1.0), law)
    assert np.array_equal(score_law([int(score) for score in scores], 100, 1.0), law)
    assert score_law([7], 1, 1.0).tolist() == [2**53]


def test_a_draw_is_an_index_of_its_law():
    law = score_law([0, 1, 5], 1, 1.0)
    generator = torch.Generator().manual_seed(3)
    draws = [draw(law, generator) for _ in range(4000)]
    for index, probability in enumerate(law / 2**53):
        # 5 standard deviations; the seed is fixed
        assert abs(draws.count(index) / 4000 - probability) < 5 * math.sqrt(
            probability * (1 - probability) / 4000
        )
    for only in range(3):
        assert draw(np.eye(3, dtype=np.int64)[only] * 2**53, generator) == only


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": []}, "scores must hold 1 to 4096"),
        ({"scores": [[1.0]]}, "scores must hold 1 to 4096"),
        ({"scores": np.zeros(4097)}, "scores must hold 1 to 4096"),
        ({"scores": [0.0, math.nan]}, "scores must be finite"),
        ({"scores": [0.0, -math.inf]}, "scores must be finite"),
        ({"scores": [0, 2**53 + 1]}, "scores must be finite and below 2\\^53"),
        ({"sensitivity": 0.0}, "sensitivity must be in"),
        ({"sensitivity": math.inf}, "sensitivity must be in"),
        ({"sensitivity": math.nan}, "sensitivity must be in"),
        ({"epsilon": -1.0}, "epsilon must be > 0"),
        ({"epsilon": 1e-10}, "epsilon must be > .* on a grid of 3 points"),
    ],
)
def test_wrong_scores_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        score_law(**({"scores": [0.0, 1.0, 2.0], "sensitivity": 1.0, "epsilon": 1.0} | change))


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": 0.0}, "epsilon must be > 0"),
        ({"epsilon": math.nan}, "epsilon must be > 0"),
        ({"epsilon": 1e-7}, "epsilon must be > .* on a grid of 107 points"),
        ({"quantile": 1.1}, "quantile must be in"),
        ({"n": 0}, "n must be an integer >= 1"),
        ({"n": 2**32}, "n must be < 2\\^32"),
        ({"grid": []}, "grid must hold 1 to 4096"),
        ({"grid": [[1.0]]}, "grid must hold 1 to 4096"),
        ({"grid": [2.0, 1.0]}, "increasing"),
        ({"grid": [1.0, 1.0]}, "increasing"),
        ({"grid": [1.0, math.inf]}, "finite"),
    ],
)
def test_wrong_public_numbers_are_named(change, message):
    arguments = {"values": [1.0], "grid": GRID, "quantile": 0.5, "epsilon": 1.0, "n": 1} | change
    with pytest.raises(ValueError, match=message):
        quantile_law(**arguments)


@pytest.mark.parametrize(
    ("c_min", "c_max"), [(0.0, 1.0), (1.0, 1.0), (2.0, 1.0), (1.0, math.inf), (math.nan, 1.0)]
)
def test_wrong_ends_of_the_grid_are_named(c_min, c_max):
    with pytest.raises(ValueError, match=r"c_(min|max) must be"):
        geometric_grid(c_min, c_max)
