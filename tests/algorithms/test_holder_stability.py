"""The path of a run and its sensitivity against naive sums in high precision, and the radii of the iterates."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.reference.papers.holder import (
    expansion,
    radius_growth,
    radius_schedule,
    shuffled_sensitivity,
)
from torch_dpsco.algorithms.holder_numbers import iterate_bounds, path_sensitivity, run_path
from torch_dpsco.errors import ConditionError

exponents = st.one_of(st.sampled_from([0.0, 1e-9, 0.5, 1 - 1e-9, 1.0]), st.floats(0.0, 1.0))
constants = st.floats(1e-3, 1e3)


def high_precision_expansion(alpha: float, constant: float, lr: float, glm: bool) -> mpmath.mpf:
    if alpha == 1:
        return mpmath.mpf(0)
    a, product = mpmath.mpf(alpha), mpmath.mpf(constant) * mpmath.mpf(lr)
    factor = (
        mpmath.mpf(1)
        if alpha == 0
        else (a / (1 + a) if glm else mpmath.mpf("0.5")) ** (a / (1 - a))
    )
    return mpmath.sqrt((1 - a) / (1 + a)) * factor * product ** (1 / (1 - a))


@given(exponents, constants, st.floats(1e-12, 1.0), st.booleans())
@example(1 - 2**-53, 1.0, 1.0, True)
@example(0.999999, 3.0, 0.5, False)
def test_the_expansion_is_never_below_its_value_in_high_precision(alpha, constant, share, glm):
    lr = share / constant
    with mpmath.workdps(40):
        exact = high_precision_expansion(alpha, constant, lr, glm)
        ours = expansion(alpha, constant, lr, glm)
        assert ours >= exact * (1 - mpmath.mpf(10) ** -30) or exact < mpmath.mpf(10) ** -307
        if alpha < 1 - 1e-6:
            assert ours <= exact * (1 + mpmath.mpf("1e-7")) + mpmath.mpf(10) ** -307


@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("glm", [False, True])
def test_the_expansion_is_the_maximum_over_the_difference_of_the_gradients(alpha, glm):
    constant, lr, slope = 1.7, 0.2, np.geomspace(1e-12, 100, 400_001)
    share = 2.0 if glm else 4 * alpha / (1 + alpha)
    gain = lr**2 * slope**2 - share * lr * constant ** (-1 / alpha) * slope ** (1 + 1 / alpha)
    assert expansion(alpha, constant, lr, glm) == pytest.approx(math.sqrt(gain.max()), rel=1e-6)


def test_smooth_losses_do_not_expand_up_to_two_over_the_smoothness():
    assert expansion(1.0, 4.0, 0.5) == 0.0
    with pytest.raises(ConditionError, match="at most 2/L"):
        expansion(1.0, 4.0, 0.5001)


@pytest.mark.parametrize(
    "function", [lambda: expansion(0.999, 4.0, 1.0), lambda: radius_growth(0.999, 4.0, 1.0, 1.0)]
)
def test_an_overflow_says_that_the_step_size_is_too_large_for_this_alpha(function):
    with pytest.raises(ConditionError, match="step size too large for this alpha"):
        function()


def double_sum(lr, bounds, weights, alpha, constant, glm, scale, steps_per_epoch):
    """The bound of the spec, (*) and section 7, as it stands: O(T^2) in high precision; steps count from 1."""
    steps = len(lr)
    squares = [high_precision_expansion(alpha, constant, x, glm) ** 2 for x in lr]
    drift = mpmath.fsum(
        weights[t - 1] * mpmath.sqrt(mpmath.fsum(squares[1 : t - 1]))
        for t in range(1, steps + 1)
    )
    hits = [
        mpmath.mpf(scale)
        * lr[s - 1]
        * bounds[s - 1]
        * mpmath.fsum(weights[t - 1] for t in range(s + 1, steps + 1))
        for s in range(1, steps)
    ]
    epochs = [hits[k : k + steps_per_epoch] for k in range(0, len(hits), steps_per_epoch)]
    return drift, hits, drift + mpmath.fsum(max(epoch) for epoch in epochs)


@given(
    st.integers(1, 40),
    st.integers(1, 15),
    st.integers(0, 2**32 - 1),
    exponents,
    st.booleans(),
    st.integers(1, 5),
)
@settings(max_examples=60, deadline=None)
def test_the_path_agrees_with_the_double_sum_and_is_never_below_it(
    steps, per_epoch, seed, alpha, glm, batch_size
):
    rng = np.random.default_rng(seed)
    constant = float(rng.uniform(0.1, 3.0))
    lr, bounds = rng.uniform(0.01, 0.3, steps), rng.uniform(0.1, 5.0, steps)
    weights = rng.dirichlet(np.ones(steps))
    path = run_path(
        lr,
        bounds,
        holder_exponent=alpha,
        holder_constant=constant,
        batch_size=batch_size,
        hit_constant=2,
        weights=weights,
        glm=glm,
    )
    with mpmath.workdps(30):
        drift, hits, total = double_sum(
            lr, bounds, weights, alpha, constant, glm, 2 / batch_size, per_epoch
        )
        tiny = mpmath.mpf(10) ** -150  # squares below 1e-308 vanish
        assert drift - tiny <= path.drift <= drift * (1 + mpmath.mpf("1e-6")) + tiny
        for ours, exact in zip(path.hits, hits, strict=True):
            assert exact <= ours <= exact * (1 + mpmath.mpf("1e-12"))
        sensitivity = path_sensitivity(path, per_epoch)
        assert (
            (total - tiny if steps > 1 else 0)
            <= sensitivity
            <= total * (1 + mpmath.mpf("1e-6")) + tiny
        )


@given(st.integers(2, 60), st.integers(1, 6), st.integers(1, 8))
def test_a_constant_step_gives_the_closed_form(n, epochs, batch_size):
    batch_size = min(batch_size, n)
    per_epoch = -(-n // batch_size)
    steps = per_epoch * epochs
    closed = 0.1 * 2 * math.fsum(math.sqrt(j) for j in range(1, steps - 1)) / steps
    closed += 2 * 0.1 * 3 / batch_size * ((epochs + 1) / 2 - 1 / per_epoch)
    ours = shuffled_sensitivity(0.0, 2.0, 3.0, 0.1, n, batch_size, epochs)
    assert closed <= ours * (1 + 1e-15)
    assert ours == pytest.approx(closed, rel=1e-12, abs=1e-300)


def test_one_step_returns_zero_without_any_sensitivity():
    assert shuffled_sensitivity(0.0, 2.0, 3.0, 0.1, n=5, batch_size=5, epochs=1) == 0.0


def test_the_diameter_of_the_feasible_set_caps_the_sensitivity():
    constants = {
        "holder_exponent": 0.0,
        "holder_constant": 1.0,
        "batch_size": 1,
        "hit_constant": 2,
    }
    free, capped = (
        run_path(np.full(50, 1.0), 1.0, **constants, radius=radius) for radius in (math.inf, 0.5)
    )
    assert path_sensitivity(free, 50) > 1.0
    assert 1.0 <= path_sensitivity(capped, 50) <= 1.0 + 1e-14


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": []}, "lr must be"),
        ({"lr": [0.1, 0.0]}, "lr must be"),
        ({"lr": [0.1, math.nan]}, "lr must be"),
        ({"grad_bounds": [1.0, 1.0, 1.0]}, "grad_bounds must hold"),
        ({"grad_bounds": -1.0}, "grad_bounds must hold"),
        ({"weights": [0.5, 0.6]}, "weights must be"),
        ({"weights": [1.5, -0.5]}, "weights must hold"),
        ({"holder_exponent": 1.1}, "holder_exponent must be"),
        ({"holder_constant": 0.0}, "holder_constant must be"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(changes, message):
    arguments = {
        "lr": [0.1, 0.1],
        "grad_bounds": 1.0,
        "holder_exponent": 0.5,
        "holder_constant": 1.0,
        "batch_size": 1,
        "hit_constant": 2,
    }
    with pytest.raises(ValueError, match=message):
        run_path(**(arguments | changes))


# Radii.


def naive_radii(lr, grad_bound, growth):
    radii = [0.0]
    for step, added in zip(lr[:-1], growth[:-1], strict=True):
        radius = radii[-1]
        radii.append(min(math.sqrt(radius**2 + added), radius + step * grad_bound(radius)))
    return np.array(radii)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("alpha", [0.3, 0.5, 1.0])
@pytest.mark.parametrize("rate", [1e-4, 0.02])
def test_radii_are_those_of_the_recursion_and_in_blocks_at_most_two_percent_above(alpha, rate):
    steps = 20_000
    lr = rate * (1 + np.arange(steps)) ** -0.25

    def grad_bound(radius):
        return 1.2 + 2.0 * radius**alpha

    growth = [radius_growth(alpha, 2.0, 1.0, x) for x in lr]
    exact = naive_radii(lr, grad_bound, growth)
    promised = {"holder_exponent": alpha, "holder_constant": 2.0, "loss_at_zero": 1.0}
    radii, bounds = iterate_bounds(lr, grad_bound, **promised)
    assert np.all(radii >= exact * (1 - 1e-14))
    assert radii[:512] == pytest.approx(exact[:512], rel=1e-11)
    assert np.all(radii <= exact * 1.02)
    assert np.all(bounds >= [grad_bound(r) * (1 - 1e-14) for r in radii])


def test_the_schedule_at_exponent_zero_uses_the_jump_as_gradient_bound():
    radii = radius_schedule(0.0, 1.0, 1.5, 1.0, 0.05, 400)
    assert radii[1:21] == pytest.approx(0.05 * np.arange(1, 21), rel=1e-12)
    assert radii[-1] == pytest.approx(
        naive_radii([0.05] * 400, lambda r: 1.0, [0.1025] * 400)[-1], rel=1e-11
    )


def test_a_smooth_loss_on_an_unbounded_domain_needs_smaller_steps():
    with pytest.raises(ConditionError, match="at most 1/L"):
        radius_schedule(1.0, 4.0, 1.0, 1.0, 0.3, 5)


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("q", [1.0, 1.3, 1.7, 2.0])
def test_no_run_on_an_unbounded_domain_leaves_its_radii(q):
    rng = np.random.default_rng(1)
    reached = 0.0
    for _ in range(40):
        lr = np.full(60, rng.uniform(0.02, 1 / q))
        x = rng.normal(size=3)
        x /= np.linalg.norm(x)
        radii, _ = iterate_bounds(
            lr,
            lambda r: q * (1 + r) ** (q - 1),
            holder_exponent=q - 1,
            holder_constant=q,
            loss_at_zero=1.0,
        )
        w = np.zeros(3)
        for t, step in enumerate(lr):
            assert np.linalg.norm(w) <= radii[t]
            reached = max(reached, np.linalg.norm(w) / radii[t] if t else 0.0)
            towards = x if rng.random() < 0.8 else -x
            w = (
                w
                + step
                * q
                * max(0.0, 1 - float(towards @ w)) ** (q - 1)
                * (float(towards @ w) < 1)
                * towards
            )
    assert reached > 0.99
