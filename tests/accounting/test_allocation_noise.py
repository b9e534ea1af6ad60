"""Noise for passes of random allocation: meets its target whatever the search does; bad arguments, and no pass."""

from __future__ import annotations

import math

import pytest

from tests.reference.papers.allocation import allocation_delta, allocation_epsilon
from torch_dpsco.accounting.analysis import allocation
from torch_dpsco.accounting.analysis.allocation import allocation_noise


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(
    ("epsilon", "steps", "adjacency"),
    [
        (1.0, 50, "zero_out"),
        (1.0, 1, "add_remove"),
        pytest.param(4.0, 7, "replace_one", marks=pytest.mark.slow),
    ],
)
def test_calibrated_noise_meets_its_target(epsilon, steps, adjacency, monkeypatch):
    noise = allocation_noise(epsilon, 1e-5, steps, adjacency)
    assert allocation_epsilon(noise, steps, 1e-5, adjacency) <= epsilon
    assert allocation_epsilon(noise * 0.995, steps, 1e-5, adjacency) > epsilon
    for poor in (
        (1e-3, -1.0),
        (1e6, -1.0),
        (noise * 0.999, -1e-9),
        (noise * 1.001, -1e9),
    ):  # guess and slope
        allocation_noise.cache_clear()
        monkeypatch.setattr(allocation, "_guess", lambda *args, poor=poor: poor)
        found = allocation_noise(epsilon, 1e-5, steps, adjacency)
        assert allocation_epsilon(found, steps, 1e-5, adjacency) <= epsilon
        assert found <= noise * 1.001
    allocation_noise.cache_clear()


@pytest.mark.parametrize(
    ("mu", "steps", "way", "noise"),
    [(1.0, 1, "remove", 1.0), (0.01, 100, "remove", 10.0), (0.01, 400, "replace", 10.0)],
)
def test_the_guess_at_a_noise_is_that_of_gaussians(mu, steps, way, noise):
    found, slope = allocation._guess(mu, steps, way)
    assert found == pytest.approx(noise, rel=0.01)
    other = allocation._guess(mu * 1.01, steps, way)[0]
    assert math.log(1.01) / (other - found) == pytest.approx(slope, rel=0.02)


@pytest.mark.parametrize("epsilon", [12.0, 30.0])
def test_large_budgets_have_their_noise(epsilon):
    """From some epsilon on passes count without amplification; the search used to end in an error of scipy."""
    noise = allocation_noise(epsilon, 1e-5, 100, "add_remove")
    assert allocation_epsilon(noise, 100, 1e-5, "add_remove") <= epsilon
    assert allocation_epsilon(noise * 0.995, 100, 1e-5, "add_remove") > epsilon


def test_budgets_below_what_noise_counts_for_are_refused():
    """It used to return noise that does not keep the budget, after taking all memory."""
    with pytest.raises(ValueError, match=r"epsilon must be >= 0.000566 .* \(got 1e-06\)"):
        allocation_noise(1e-6, 1e-9, 2, "replace_one")


@pytest.mark.parametrize(
    "arguments",
    [
        {"noise": -1.0},
        {"steps": 0},
        {"delta": 0.0},
        {"delta": 1.0},
        {"adjacency": "other"},
        {"epochs": -1},
        {"direction": "replace"},
        {"direction": "add", "epochs": 2},
        {"direction": "add", "adjacency": "replace_one"},
    ],
)
def test_bad_arguments_are_refused(arguments):
    good = {"noise": 1.0, "steps": 10, "delta": 1e-5, "adjacency": "add_remove"}
    with pytest.raises(ValueError, match=next(iter(arguments))):
        allocation_epsilon(**(good | arguments))


def test_no_pass_costs_nothing_and_no_noise_everything():
    assert allocation_epsilon(1.0, 10, 1e-5, "add_remove", epochs=0) == 0
    assert allocation_delta(0.0, 10, 1.0, "add_remove") == 1
    assert allocation_epsilon(0.0, 10, 1e-5, "replace_one") == math.inf
