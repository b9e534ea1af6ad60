"""Exact releases: what is charged covers the grid, the support is public, nothing raises."""

from __future__ import annotations

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch

from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.analysis.gaussian import gaussian_delta
from torch_dpsco.accounting.analysis.rounding import Grid, asks_exact, exact_grid, with_grid
from torch_dpsco.accounting.designs import Disjoint, Fixed, Full, Poisson, Shuffled
from torch_dpsco.accounting.events import (
    REPLACE_ONE,
    Gaussian,
    PoissonGaussian,
    WORGaussian,
    clipped_gaussian,
    event_from_json,
    event_to_json,
)
from torch_dpsco.errors import ConditionError
from torch_dpsco.noise import Keystream, Stream
from torch_dpsco.step.exact_noise import exact_release, on_grid, release_on_grid

IDEAL = "ideal Gaussian noise (floating-point attacks on the noise are out of scope)"
SETTINGS = [
    (1.0, 1.0, 1),
    (3.7, 0.3, 10),
    (1e-9, 1e-7, 1000),
    (250.0, 2.0, 10**6),
    (1e40, 1e38, 33),
]


class Zeros(Stream):
    """Bytes that are all 0, for which every draw is 0."""

    def read(self, size):
        return bytes(size)


def exact_event(std, sensitivity):
    return Gaussian(std, {REPLACE_ONE: with_grid(sensitivity)}, exact=True)


@pytest.mark.parametrize(("std", "sensitivity", "dim"), SETTINGS)
def test_neighbors_differ_by_at_most_the_charged_sensitivity_on_the_grid(std, sensitivity, dim):
    # adversarial rounding: every coordinate is just below a half step on one side and just above it on the other
    charged = with_grid(sensitivity)
    grid = exact_grid(std, charged, dim)
    size = min(dim, 5000)  # coordinates that are tried; the others are as bad
    for offset in (0, 1, 12345, 2**30, -(2**40)):
        base = torch.arange(size, dtype=torch.float64) % 7 + offset
        step = sensitivity / math.sqrt(dim)
        one = (base + 0.5 - 1e-9) * grid.spacing
        other = one + step + 1e-8 * grid.spacing
        moved = (on_grid(one, grid) - on_grid(other, grid)).abs().max().item()
        assert (
            step <= moved * grid.spacing <= step + 1.5 * grid.spacing
        )  # rounding does add to the step
    # the bound of the proof, in rational numbers: D + 1.5 g sqrt(d) <= charged
    root = Fraction(math.isqrt(dim * 10**12) + 1, 10**6)
    if grid.bits > 12:  # half of what is charged for it
        assert (
            Fraction(3, 2) * Fraction(grid.spacing) * root
            <= Fraction(charged) * Fraction(1.00001) / 2**13
        )
    assert Fraction(sensitivity) + Fraction(3, 2) * Fraction(grid.spacing) * root <= Fraction(
        charged
    )


@pytest.mark.parametrize(("std", "sensitivity", "dim"), SETTINGS)
def test_the_noise_left_after_randomized_rounding_is_no_less_than_the_one_charged(
    std, sensitivity, dim
):
    grid = exact_grid(std, with_grid(sensitivity), dim)
    assert grid.bits >= 12
    left = Fraction(grid.spacing) ** 2 * (
        4**grid.bits - 64
    )  # variance of the Gaussian that is post-processed
    assert left >= Fraction(std) ** 2
    assert left <= Fraction(std) ** 2 * (1 + Fraction(1, 2**15))  # and not much more


@pytest.mark.slow
def test_a_smoothed_gaussian_is_the_discrete_one_up_to_what_the_proof_says():
    # r = 1 here, where the error e^(-2 pi^2) can be seen; the library has r = 8
    with mpmath.workdps(25):
        tau, r = mpmath.mpf(3), mpmath.mpf(1)
        sigma = mpmath.sqrt(tau**2 + r**2)
        bound = 2 * sum(mpmath.exp(-2 * mpmath.pi**2 * r**2 * k**2) for k in range(1, 9))

        def rounded(z):
            def density(y):
                cells = range(int(mpmath.floor(y)) - 9, int(mpmath.floor(y)) + 11)
                total = mpmath.fsum(mpmath.exp(-((k - y) ** 2) / 2 / r**2) for k in cells)
                return (
                    mpmath.exp(-(y**2) / 2 / tau**2)
                    / tau
                    * mpmath.exp(-((z - y) ** 2) / 2 / r**2)
                    / total
                )

            return mpmath.quad(density, mpmath.linspace(z - 8, z + 8, 9)) / mpmath.sqrt(
                2 * mpmath.pi
            )

        total = mpmath.jtheta(3, 0, mpmath.exp(-1 / (2 * sigma**2)))
        for z in (0, 3):
            ratio = mpmath.exp(-(mpmath.mpf(z) ** 2) / 2 / sigma**2) / total / rounded(z)
            assert abs(mpmath.log(ratio)) <= 2.1 * bound
            assert (
                abs(mpmath.log(ratio)) > 1e-20
            )  # it is no identity: there is an error to be bounded


def discrete_delta(m: int, shift: int, epsilon: float) -> float:
    """Returns delta of the discrete Gaussian of parameter m whose center moves by that many steps, term by term."""
    x = np.arange(-14 * m, 14 * m + 1, dtype=np.float64)
    near, far = (
        np.exp(-((x - c) ** 2) / (2.0 * m * m)) / (math.sqrt(2 * math.pi) * m)
        for c in (shift, 0)
    )
    excess = near - math.exp(epsilon) * far
    return math.fsum(excess[excess > 0])


@pytest.mark.cases(3, 1)
@pytest.mark.parametrize("m", [16, 64, 1024])
@pytest.mark.parametrize("share", [0.2, 0.5, 1.0, 3.0])
def test_the_true_curve_is_within_the_one_charged_and_not_within_that_of_its_own_std(m, share):
    shift, over = round(share * m), []
    for epsilon in np.concatenate(
        [np.linspace(0.01, 4.0, 40), 1.0 + np.linspace(0.0, 2.0, 9) / m]
    ):
        delta = discrete_delta(m, shift, float(epsilon))
        # of the continuous Gaussian that is post-processed: std sqrt(m^2 - 64) in steps of the grid
        assert delta <= gaussian_delta(shift / math.sqrt(m * m - 64), float(epsilon)) * (
            1 + 1e-12
        )
        over.append(delta > gaussian_delta(shift / m, float(epsilon)) * (1 + 1e-12))
    assert any(over)  # what would be charged without the proof's 2^-17


def test_the_support_of_an_exact_release_does_not_depend_on_the_data():
    event = exact_event(1.0, 0.5)
    grid = exact_grid(1.0, with_grid(0.5), 400)
    for value in (
        0.1,
        0.30000000000000004,
        1e-30,
        123.456,
    ):  # floats whose noisy sums have other last bits
        released = exact_release(
            torch.full((400,), value, dtype=torch.float64), event, Keystream()
        )
        assert all(
            (Fraction(x) / Fraction(grid.spacing)).denominator == 1 for x in released.tolist()
        )
    # and the float path: sums with 0 have numbers that sums with 2^-40 never give
    noise = torch.randn(400, dtype=torch.float64)
    steps = [
        [Fraction(x) / Fraction(grid.spacing) for x in (noise + v).tolist()] for v in (0.0, 0.1)
    ]
    assert any(step.denominator > 1 for side in steps for step in side)


def test_no_value_raises_in_an_exact_release():
    event = exact_event(1.0, 0.5)
    grid = exact_grid(1.0, with_grid(0.5), 5)
    value = torch.tensor([math.nan, math.inf, -math.inf, 1e308, 5e-324], dtype=torch.float64)
    assert on_grid(value, grid).tolist() == [0, 2**50, -(2**50), 2**50, 0]
    assert torch.isfinite(exact_release(value, event, Keystream())).all()


def test_an_exact_release_is_the_rounded_value_and_integer_noise():
    grid = Grid(0.25, 12)
    value = torch.tensor([[1.0, -0.37], [0.5, 2.0]], dtype=torch.float32)
    released = release_on_grid(value, grid, Zeros())  # bytes of zeros: noise 0
    assert released.tolist() == [[1.0, -0.25], [0.5, 2.0]]
    assert released.dtype == torch.float64


def test_the_std_of_an_exact_release_is_the_one_charged():
    released = exact_release(torch.full((200_000,), 3.0), exact_event(0.7, 0.5), Keystream())
    # 5 standard errors: 6e-7
    assert abs(released.mean().item() - 3.0) < 5 * 0.7 / math.sqrt(200_000)
    assert abs(released.std().item() / 0.7 - 1) < 5 / math.sqrt(400_000)


def test_grids_that_need_more_than_64_bits_are_refused_by_name():
    with pytest.raises(ConditionError, match="secure='exact'"):
        exact_grid(1e6, with_grid(1e-3), 10**8)
    with pytest.raises(ConditionError, match="noise std"):
        exact_grid(1e-300, with_grid(1.0), 1)
    for wrong in (0.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=r"std|sensitivity"):
            exact_grid(wrong, with_grid(1.0), 1)
        with pytest.raises(ValueError, match="sensitivity"):
            exact_grid(1.0, wrong, 1)


def test_a_word_that_is_not_exact_is_refused():
    assert asks_exact("exact")
    assert not asks_exact(None)
    for word in ("Exact", "yes", True, 1):
        with pytest.raises(ValueError, match="secure must be one of"):
            asks_exact(word)


@pytest.mark.parametrize("value", ["no", 1, None])
def test_exact_is_never_granted_by_a_word(value):
    for make in (
        lambda: Gaussian(1.0, {REPLACE_ONE: 1.0}, exact=value),
        lambda: PoissonGaussian(1.0, 0.1, exact=value),
        lambda: WORGaussian(1.0, 1, 10, exact=value),
    ):
        with pytest.raises(ValueError, match="exact must be True or False"):
            make()


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("exact", [False, True])
def test_sampling_keeps_what_noise_was_drawn(exact):
    base = clipped_gaussian(1.0, exact)
    for design in (
        Poisson(5, 100),
        Fixed(5, 100),
        Full(100),
        Shuffled(5, 100),
        Disjoint(5, 100),
    ):
        accountant = Accountant(adjacency=REPLACE_ONE)
        accountant.authorize(design.event(base, 3))
        assert (IDEAL in accountant.report(1e-5).assumptions) is not exact
        # exactness costs nothing by itself
        plain = Accountant(adjacency=REPLACE_ONE)
        plain.authorize(design.event(clipped_gaussian(1.0), 3))
        assert accountant.get_epsilon(1e-5) == plain.get_epsilon(1e-5)


def test_mixed_ledgers_keep_the_sentence():
    accountant = Accountant(adjacency=REPLACE_ONE)
    accountant.authorize(exact_event(5.0, 1.0))
    lines = accountant.report(1e-5).assumptions
    assert IDEAL not in lines
    assert "exact discrete Gaussian noise on a public grid" in lines
    accountant.authorize(Gaussian(5.0, {REPLACE_ONE: 1.0}))
    (line,) = (line for line in accountant.report(1e-5).assumptions if "Gaussian noise" in line)
    assert line.startswith(
        "exact discrete Gaussian noise in events marked exact=True, ideal Gaussian noise in the"
    )
    assert line.endswith("(floating-point attacks on the noise are out of scope)")


def test_events_of_exact_noise_survive_a_ledger_file():
    for event in (
        exact_event(2.0, 1.0),
        PoissonGaussian(1.0, 0.1, exact=True),
        WORGaussian(1.0, 2, 10, exact=True),
    ):
        assert event_from_json(event_to_json(event)) == event
        assert "exact=True" in repr(event)
        plain = {key: value for key, value in event_to_json(event).items() if key != "exact"}
        assert not event_from_json(plain).exact  # files written before there was such noise
        with pytest.raises(ValueError, match="exact"):
            event_from_json(event_to_json(event) | {"exact": "yes"})
