"""Tilted Fourier composition against exact convolution: the error bound, the window, the curve."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.fft
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_dpsco.accounting.analysis import pld as pld_compose
from torch_dpsco.accounting.analysis.pld import compose, transform_size
from torch_dpsco.accounting.analysis.pld_laws import (
    Cumulant,
    FixedSizeLoss,
    GridLaw,
    PoissonLoss,
    PureLoss,
    ReplaceOneLoss,
    Window,
    coarsening,
    conversion,
    least,
    narrowed,
    tilted,
    window,
)

LONG = np.longdouble


def random_law(rng: np.random.Generator, size: int, atom: float) -> GridLaw:
    """A law with one large atom and a wild rest."""
    mass = rng.random(size) ** 8 * np.exp(rng.uniform(-30, 0, size))
    mass *= (1 - atom) / mass.sum()
    mass[rng.integers(size)] += atom
    return GridLaw(int(rng.integers(-size, size)), mass, 1e-30, 0.01, 0.0)


def convolved(masses: list[np.ndarray], counts: list[int]) -> np.ndarray:
    """The exact linear convolution, up to 64-bit mantissas and positive terms."""
    result = np.ones(1, dtype=LONG)
    for mass, count in zip(masses, counts, strict=True):
        for _ in range(count):
            result = np.convolve(result, mass.astype(LONG))
    return result


def exact_delta(laws: list[tuple[GridLaw, int]], epsilon: float) -> LONG:
    """Delta of a composition of grid laws, by long convolution."""
    mass = convolved([law.mass for law, _ in laws], [count for _, count in laws])
    first = sum(law.first * count for law, count in laws)
    losses = (first + np.arange(mass.size)).astype(LONG) * LONG(laws[0][0].grid)
    infinite = -np.expm1(sum(count * np.log1p(-LONG(law.infinite)) for law, count in laws))
    return infinite + np.sum(mass * np.maximum(-np.expm1(LONG(epsilon) - losses), 0))


@pytest.mark.cases(42, 21)
@pytest.mark.parametrize("size", [128, 160, 192, 1024, 6144])
@pytest.mark.parametrize("atom", [0.0, 0.5, 0.999, 1 - 1e-9])
@pytest.mark.parametrize("counts", [[2], [2, 1], [7], [3, 2, 4]])
def test_the_error_bound_covers_the_difference_to_an_exact_convolution(size, atom, counts):
    rng = np.random.default_rng([size, len(counts), counts[0], int(atom * 1000)])
    parts = [(tilted(random_law(rng, 150, atom), 0.0), count) for count in counts]
    first = int(rng.integers(-500, 500))
    mass, bound = pld_compose.convolved(parts, first, size)
    exact = convolved([part.mass for part, _ in parts], counts)
    start = sum(part.law.first * count for part, count in parts)
    wrapped = np.zeros(size, dtype=LONG)
    np.add.at(wrapped, (start + np.arange(exact.size) - first) % size, exact)
    error = float(np.abs(mass - wrapped).max())
    assert error <= bound
    assert bound <= 1e4 * max(error, 1e-17)


@given(
    atom=st.floats(0, 1),
    size=st.integers(2, 300),
    points=st.integers(8, 400),
    count=st.integers(2, 12),
    seed=st.integers(0, 99),
)
@settings(max_examples=50)
def test_any_error_is_within_the_bound(atom, size, points, count, seed):
    part = tilted(random_law(np.random.default_rng(seed), size, atom), 0.0)
    number = transform_size(points)
    mass, bound = pld_compose.convolved([(part, count)], 0, number)
    exact = convolved([part.mass], [count])
    wrapped = np.zeros(number, dtype=LONG)
    np.add.at(wrapped, (part.law.first * count + np.arange(exact.size)) % number, exact)
    assert float(np.abs(mass - wrapped).max()) <= bound


@pytest.mark.parametrize("size", [128, 160, 192, 4096, 6144, 5 << 14])
def test_transforms_are_as_accurate_as_stated(size):
    rng = np.random.default_rng(size)
    largest = 0.0
    for spread in (1, 3, size):
        vector = np.zeros(size)
        vector[rng.integers(0, size, spread)] = rng.random(spread)
        error = np.abs(scipy.fft.rfft(vector) - scipy.fft.rfft(vector.astype(LONG)))
        largest = max(largest, float(error.max()) / math.fsum(vector))
    assert 2.0**-56 < largest <= pld_compose._ETA * math.log2(2 * size)


@pytest.mark.parametrize("size", [8, 40, 160, 512])
def test_a_single_release_is_folded_without_a_transform(size):
    part = tilted(random_law(np.random.default_rng(size), 300, 0.3), 0.0)
    mass, bound = pld_compose.convolved([(part, 1)], -70, size)
    wrapped = np.zeros(size, dtype=LONG)
    np.add.at(wrapped, (part.law.first + np.arange(300) + 70) % size, part.mass.astype(LONG))
    assert bound == 0.0
    assert np.all(mass >= wrapped)
    assert np.all(mass <= wrapped * (1 + 1e-13))


LAWS = [
    PoissonLoss(0.05, 0.9),
    PoissonLoss(0.05, 0.9, reverse=True),
    ReplaceOneLoss(0.1, 1.2),
    FixedSizeLoss(0.02, 0.8),
]


@pytest.mark.cases(10, 5)
@pytest.mark.parametrize("counts", [[1], [6], [2, 3]])
@pytest.mark.parametrize("law", LAWS, ids=repr)
@pytest.mark.parametrize("epsilon", [0.0, 0.3, 2.0, 7.5])
def test_the_curve_is_that_of_the_exact_convolution_rounded_up(law, counts, epsilon):
    laws = [
        (each.on_grid(0.02, 9.0), count)
        for each, count in zip([law, PureLoss(0.11)], counts, strict=False)
    ]
    cumulant = Cumulant(laws)
    aim = min(epsilon, cumulant.top)
    tilt = least(lambda t: cumulant(t) - t * aim + conversion(t), cumulant.limit)
    curve = compose(laws, window(cumulant, tilt, cumulant.limit), aim)
    for near in (epsilon, epsilon + 0.013):
        exact = exact_delta(laws, near)
        found = LONG(np.exp(LONG(curve.log_delta_at(near))))
        assert found >= exact
        assert found <= exact * (1 + 1e-9)
        assert curve.rounding_at(near) < 1e-9


def test_tiny_deltas_keep_their_digits():
    # far below the rounding of an untilted transform
    laws = [(PoissonLoss(0.05, 3.0).on_grid(0.01, 37.0), 9)]
    cumulant = Cumulant(laws)
    for log_delta in (-70.0, -200.0, -450.0):
        tilt = least(
            lambda t, aim=log_delta: (cumulant(t) - aim + conversion(t)) / t, cumulant.limit
        )
        aim = (cumulant(tilt) - log_delta + conversion(tilt)) / tilt
        curve = compose(laws, window(cumulant, tilt, cumulant.limit), aim)
        epsilon = curve.epsilon(log_delta)
        exact = float(
            np.log(
                exact_delta(
                    [(GridLaw(law.first, law.mass, 0.0, law.grid, 0.0), n) for law, n in laws],
                    epsilon,
                )
            )
        )
        assert exact <= log_delta
        assert exact == pytest.approx(log_delta, abs=1e-6)
        assert curve.rounding_at(epsilon) < 1e-6


@pytest.mark.slow
def test_a_window_that_is_too_narrow_gives_a_looser_bound_but_a_bound():
    laws = [(PoissonLoss(0.2, 0.8).on_grid(0.02, 9.0), 8)]
    cumulant = Cumulant(laws)
    good = window(cumulant, 3.0, cumulant.limit)
    for low, high in ((good.low + 1.0, good.high), (good.low, good.high * 0.3), (1.0, 4.0)):
        curve = compose(laws, Window(3.0, low, high, good.rise), 3.0)
        ends = curve.first * curve.grid, (curve.first + curve.log_delta.size - 1) * curve.grid
        for epsilon in np.linspace(max(ends[0], 0.0), ends[1], 7):
            assert np.exp(LONG(curve.log_delta_at(epsilon))) >= exact_delta(laws, epsilon)
    assert high < good.high
    assert curve.rounding_at(3.0) > 0.01


def test_what_lies_above_the_window_is_counted():
    laws = [(PoissonLoss(0.2, 0.5).on_grid(0.02, 9.0), 3)]
    curve = compose(laws, Window(0.5, -3.0, 5.0, 1.5), 2.0)
    top = (curve.first + curve.log_delta.size - 1) * curve.grid
    # at the last point no mass inside the window exceeds epsilon
    assert math.exp(curve.log_delta[-1]) >= exact_delta(laws, top) > 1e-6


def test_epsilon_and_delta_are_inverse_on_the_curve():
    laws = [(ReplaceOneLoss(0.1, 1.2).on_grid(0.05, 9.0), 5)]
    cumulant = Cumulant(laws)
    curve = compose(laws, window(cumulant, 6.0, cumulant.limit), 2.0)
    for delta in (1e-3, 1e-5, 1e-6):
        epsilon = curve.epsilon(math.log(delta))
        assert math.exp(curve.log_delta_at(epsilon)) == pytest.approx(delta, rel=1e-9)
        assert exact_delta(laws, epsilon) <= delta
    assert curve.epsilon(-1e4) is None
    assert curve.epsilon(0.0) == curve.first * curve.grid
    assert curve.log_delta_at(curve.first * curve.grid - 1.0) == 0.0
    assert curve.log_delta_at(1e6) == curve.log_delta[-1]


@pytest.mark.parametrize("law", LAWS, ids=repr)
def test_coarsening_is_what_a_doubled_grid_adds(law):
    for grid in (0.001, 0.2):
        fine, coarse = law.on_grid(grid, 9.0), law.on_grid(2 * grid, 9.0)
        for tilt in (0.3, 4.0):
            gap = math.log(tilt_sum(coarse, tilt) / tilt_sum(fine, tilt))
            assert coarsening(fine, tilt) == pytest.approx(gap, rel=1e-5, abs=1e-11)


def tilt_sum(law: GridLaw, tilt: float) -> float:
    return math.fsum(law.mass * np.exp(tilt * law.losses()))


def test_the_summary_has_nearly_the_cumulant():
    laws = [
        (law.on_grid(1e-3, 9.0), count) for law, count in zip(LAWS, (1, 30, 7, 4), strict=True)
    ]
    cumulant = Cumulant(laws)
    for t in (-2.0, 0.01, 1.0, 8.0, 30.0):
        exact = math.fsum(count * math.log(tilt_sum(law, t)) for law, count in laws)
        assert cumulant(t) == pytest.approx(exact, rel=2e-2, abs=1e-6)


def test_least_finds_the_best_power_and_respects_its_limit():
    assert least(lambda t: (t * t + 9) / t, 1e9) == pytest.approx(3.0, rel=0.05)
    assert least(lambda t: t, 1e9) == 2.0**-24
    assert least(lambda t: -t, 100.0) == pytest.approx(2 ** (53 / 8))


def test_a_smaller_tilt_narrows_the_window_of_rare_losses_within_its_price():
    laws = [(PoissonLoss(0.004, 1.0).on_grid(1e-3, 9.0), 3000)]
    cumulant = Cumulant(laws)
    tilt = least(lambda t: cumulant(t) - 1.16 * t + conversion(t), cumulant.limit)
    wide, narrow, same = (
        window(cumulant, tilt, cumulant.limit),
        narrowed(cumulant, tilt, 1.16, 8.0),
        narrowed(cumulant, tilt, 1.16, 0.0),
    )
    assert narrow.width < wide.width / 3
    assert same == wide
    price = cumulant(narrow.tilt) - cumulant(tilt) - 1.16 * (narrow.tilt - tilt)
    assert price + conversion(narrow.tilt) - conversion(tilt) <= 8.0


def test_transforms_have_few_sizes():
    for points in (3.0, 8.0, 8.5, 100.0, 161.0, 1025.0):
        size = transform_size(points)
        assert size >= points
        assert size <= max(1.4 * points, 8)
        assert size >> (size & -size).bit_length() - 1 in (1, 3, 5)
