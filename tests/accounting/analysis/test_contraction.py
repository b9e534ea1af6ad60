"""Noisy gradient descent: exact quadratic chains reach the bound, no non-quadratic chain passes it."""

from __future__ import annotations

import math

import mpmath as mp
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from torch_dpsco.accounting.analysis.gaussian import gaussian_delta, noisy_gd_mu

contractions = st.one_of(
    st.floats(0.0, 1.0), st.floats(1e-16, 1e-3).map(lambda gap: 1 - gap), st.floats(0.0, 1e-9)
)
scales = st.floats(-6.0, 6.0).map(lambda x: 10**x)


@given(st.integers(1, 10**6), contractions, scales, scales)
@example(1, 0.9, 1.0, 2.0)
@example(10**9, math.nextafter(1.0, 0.0), 1.0, 1.0)
@example(7, 5e-324, 1.0, 1.0)
@example(1, 1.0, 5 * 5e-324, 2.0)  # the quotient is 2.5 of the least number
def test_mu_is_the_exact_formula_rounded_up(steps, contraction, sensitivity, noise_std):
    with mp.workdps(60):
        c = mp.mpf(contraction)
        square = mp.mpf(steps) if c == 1 else (1 - c**steps) / (1 + c**steps) * (1 + c) / (1 - c)
        exact = sensitivity / mp.mpf(noise_std) * mp.sqrt(square)
        assert (
            exact
            <= noisy_gd_mu(steps, contraction, sensitivity, noise_std)
            <= exact * (1 + mp.mpf("2e-14")) + mp.mpf(5e-324)
        )


@given(
    st.integers(1, 60),
    st.floats(0.0, 1.0),
    st.floats(0.1, 3.0),
    st.floats(0.1, 3.0),
    st.floats(0.01, 2.0),
)
def test_quadratics_whose_gradients_differ_by_a_constant_attain_mu(
    steps, contraction, sensitivity, noise, rate
):
    """w <- c w + (0 or eta S) + eta s N: the last iterates are Gaussians with one variance."""
    gap = variance = 0.0
    for _ in range(steps):
        gap = contraction * gap + rate * sensitivity
        variance = contraction**2 * variance + (rate * noise) ** 2
    assert noisy_gd_mu(steps, contraction, sensitivity, noise) == pytest.approx(
        gap / math.sqrt(variance), rel=1e-12
    )


GRID = np.linspace(-14.0, 14.0, 701)
SPACING = GRID[1] - GRID[0]


def last_density(step_map, steps, start=0.0):
    """Density of the last iterate of w <- map(w) + N, by quadrature on the grid."""
    kernel = np.exp(-((GRID[:, None] - step_map(GRID)[None, :]) ** 2) / 2) / math.sqrt(
        2 * math.pi
    )
    density = np.exp(-((GRID - step_map(np.array(start))) ** 2) / 2) / math.sqrt(2 * math.pi)
    for _ in range(steps - 1):
        density = kernel @ density * SPACING
    return density


def hockey_stick(one, other, epsilon):
    return float(np.maximum(one - math.exp(epsilon) * other, 0.0).sum()) * SPACING


def piecewise(slopes, knots, offset):
    """A continuous piecewise linear map with these slopes; its Lipschitz constant is the largest of their sizes."""
    pieces = np.concatenate([[-200.0], np.sort(knots), [200.0]])
    values = np.concatenate([[0.0], np.cumsum(np.diff(pieces) * slopes)])
    return lambda w: np.interp(w, pieces, values) - np.interp(0.0, pieces, values) + offset


def test_the_quadrature_sees_a_linear_chain_at_the_bound():
    one, other = (last_density(lambda w, gap=gap: 0.8 * w + gap, 5) for gap in (0.0, 0.7))
    mu = noisy_gd_mu(5, 0.8, 0.7, 1.0)
    for epsilon in (0.0, 0.3, 1.0, 2.0):
        assert hockey_stick(other, one, epsilon) == pytest.approx(
            gaussian_delta(mu, epsilon), abs=2e-4
        )
        assert gaussian_delta(0.97 * mu, epsilon) < hockey_stick(other, one, epsilon) - 1e-3


@pytest.mark.slow
@settings(max_examples=25)
@given(st.data())
def test_no_chain_of_contractions_passes_mu(data):
    """Two maps with slopes in [-c, c] that differ by at most S: the second is the first, moved by S on part of it."""
    contraction = data.draw(st.floats(0.2, 1.0))
    sensitivity = data.draw(st.floats(0.2, 1.5))
    steps = data.draw(st.integers(1, 8))
    slopes = data.draw(st.lists(st.floats(-contraction, contraction), min_size=3, max_size=3))
    knots = data.draw(st.lists(st.floats(-3.0, 3.0), min_size=2, max_size=2))
    first = piecewise(slopes, knots, 0.0)
    turn, way = data.draw(st.floats(-3.0, 3.0)), data.draw(st.sampled_from([-1.0, 1.0]))

    def second(w):
        # the first map where it stays within S of the line of slope +-c through a point S away: slopes stay in [-c, c]
        line = first(np.array(turn)) + sensitivity + way * contraction * (w - turn)
        return np.clip(line, first(w) - sensitivity, first(w) + sensitivity)

    one, other = last_density(first, steps), last_density(second, steps)
    assert one.sum() * SPACING == pytest.approx(1.0, abs=1e-6)
    assume(other.sum() * SPACING > 1 - 1e-6)  # a map that drifts may leave the grid
    mu = noisy_gd_mu(steps, contraction, sensitivity, 1.0)
    for epsilon in (0.0, 0.3, 1.0, 2.0):
        bound = gaussian_delta(mu, epsilon)
        # the grid rounds the corner of the positive part: SPACING^2 times a slope below 1
        for pair in ((one, other), (other, one)):
            assert hockey_stick(*pair, epsilon) <= bound + 2e-4


@given(st.integers(1, 1000), contractions, scales, scales)
def test_mu_grows_with_steps_and_contraction_and_is_below_releasing_every_iterate(
    steps, c, sensitivity, noise
):
    mu = noisy_gd_mu(steps, c, sensitivity, noise)
    slack = 1 + 4e-14
    assert mu <= noisy_gd_mu(steps + 1, c, sensitivity, noise) * slack
    assert mu <= noisy_gd_mu(math.inf, c, sensitivity, noise) * slack
    assert mu <= noisy_gd_mu(steps, (1 + c) / 2, sensitivity, noise) * slack
    assert mu <= sensitivity / noise * math.sqrt(steps) * slack


def test_the_ends_of_the_ranges():
    assert noisy_gd_mu(0, 0.9, 1.0, 1.0) == 0.0
    assert noisy_gd_mu(5, 0.9, 0.0, 1.0) == noisy_gd_mu(math.inf, 1.0, 0.0, 1.0) == 0.0
    assert noisy_gd_mu(math.inf, 1.0, 1.0, 1.0) == math.inf
    assert noisy_gd_mu(math.inf, 0.0, 1.0, 2.0) == pytest.approx(0.5, rel=1e-13)
    assert noisy_gd_mu(math.inf, 0.9, 1.0, 1.0) == pytest.approx(math.sqrt(19), rel=1e-13)
    assert noisy_gd_mu(100, 1.0, 1.0, 5.0) == pytest.approx(2.0, rel=1e-13)
    assert (
        noisy_gd_mu(3, 0.5, 5e-324, 1e300) > 0.0
    )  # PRIVACY: a quotient that underflows is not free


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 0.9, 1.0, 1.0), "steps must be an integer >= 0"),
        ((1.5, 0.9, 1.0, 1.0), "steps must be an integer"),
        ((math.nan, 0.9, 1.0, 1.0), "steps must be an integer"),
        ((-math.inf, 0.9, 1.0, 1.0), "steps must be an integer"),
        ((1, 1.0001, 1.0, 1.0), "contraction must be in"),
        ((1, -0.1, 1.0, 1.0), "contraction must be in"),
        ((1, math.nan, 1.0, 1.0), "contraction must be in"),
        ((1, 0.9, -1.0, 1.0), "sensitivity must be >= 0"),
        ((1, 0.9, math.inf, 1.0), "sensitivity must be finite"),
        ((1, 0.9, 1.0, 0.0), "noise_std must be > 0"),
    ],
)
def test_arguments_out_of_range_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        noisy_gd_mu(*arguments)
