"""Renyi curves to (epsilon, delta): safe in both directions, never negative, and equal to dp-accounting."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon
from hypothesis import example, given
from hypothesis import strategies as st

from tests.reference.papers.accounting import rdp_epsilon_classic
from tests.reference.papers.mixtures import rdp_epsilon_at_order
from torch_dpsco.accounting.analysis.gaussian import gaussian_delta, gaussian_epsilon
from torch_dpsco.accounting.analysis.rdp import rdp_delta, rdp_epsilon

deltas = st.one_of(st.floats(1e-300, 1e-3), st.floats(1e-3, 0.999))
order_lists = st.lists(st.floats(1.0001, 1e6), min_size=1, max_size=8, unique=True)


@st.composite
def curves(draw):
    orders = draw(order_lists)
    values = draw(st.lists(st.floats(0.0, 1e4), min_size=len(orders), max_size=len(orders)))
    return orders, values


@given(curves(), deltas)
@example(([2.0, 64.0], [1e-9, 1e-8]), 1e-5)
@example(([1.5], [0.0]), 0.5)
@example(([1640.0, 2.0], [2.0**-14, 1.0]), 2.0**-14)  # log(delta) and log(order) cancel
def test_delta_at_the_converted_epsilon_is_at_most_delta(curve, delta):
    orders, values = curve
    found = rdp_epsilon(orders, values, delta)
    assert found.epsilon >= 0
    if math.isfinite(found.epsilon):
        assert rdp_delta(orders, values, found.epsilon) <= delta
    else:
        assert max(orders) <= 1.01


@given(curves(), st.floats(1e-3, 1e3))
def test_epsilon_at_the_converted_delta_is_nearly_the_epsilon(curve, epsilon):
    orders, values = curve
    delta = rdp_delta(orders, values, epsilon)
    if 1e-300 < delta < 0.99 and max(orders) > 1.01:
        assert rdp_epsilon(orders, values, delta * (1 + 1e-6)).epsilon <= epsilon * (
            1 + 1e-9
        ) + 1e-9 * max(values)


@given(curves(), deltas, deltas)
def test_epsilon_is_monotone_in_delta(curve, delta, other):
    delta, other = sorted((delta, other))
    assert rdp_epsilon(*curve, delta).epsilon >= rdp_epsilon(*curve, other).epsilon


@given(curves(), st.floats(0.0, 100.0), st.floats(0.0, 100.0))
def test_delta_is_monotone_in_epsilon(curve, epsilon, other):
    epsilon, other = sorted((epsilon, other))
    assert rdp_delta(*curve, epsilon) >= rdp_delta(*curve, other) * (1 - 1e-9)


@given(curves(), deltas)
def test_more_orders_never_hurt(curve, delta):
    orders, values = curve
    assert (
        rdp_epsilon(orders, values, delta).epsilon
        <= rdp_epsilon(orders[:1], values[:1], delta).epsilon
    )


@given(curves(), deltas)
def test_epsilon_agrees_with_dp_accounting(curve, delta):
    orders, values = curve
    values = [
        value + 1e-9 for value in values
    ]  # at 0 their test for small divergences underflows
    theirs, _ = compute_epsilon(orders, values, delta)
    scale = max(values) + 1 + abs(math.log(delta)) / (min(orders) - 1)
    assert rdp_epsilon(orders, values, delta).epsilon == pytest.approx(
        theirs, rel=1e-12, abs=1e-13 * scale
    )


@given(st.floats(1.02, 1e4), st.floats(0.0, 1e3), deltas)
def test_the_improved_conversion_is_below_the_classic_one(order, value, delta):
    improved = rdp_epsilon_at_order(value, order, delta)
    assert improved < rdp_epsilon_classic(value, order, delta)
    floored = rdp_epsilon([order], [value], delta).epsilon
    assert floored == 0.0 or floored == pytest.approx(improved, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("mu", [0.01, 0.3, 1.0, 4.0])
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 0.1])
def test_the_gaussian_curve_converts_to_no_less_than_the_exact_epsilon(mu, delta):
    orders = np.concatenate([np.arange(1.1, 11, 0.1), np.geomspace(11, 1e5, 100)])
    found = rdp_epsilon(orders, mu**2 * orders / 2, delta)
    exact = gaussian_epsilon(mu, delta)
    assert exact <= found.epsilon
    assert delta == 0.1 or found.epsilon <= 1.25 * exact
    assert rdp_delta(orders, mu**2 * orders / 2, exact) >= gaussian_delta(mu, exact)


def test_epsilon_is_never_negative_where_other_accountants_return_less_than_zero():
    # sigma = 100, q = 1e-4, delta = 1e-2 and 0.5: -0.0085 and -0.69 elsewhere
    orders = np.array([1.5, 2.0, 8.0, 64.0])
    values = 1e-4**2 * orders / 2 / 100**2
    for delta in (1e-2, 0.5):
        assert (
            min(rdp_epsilon_at_order(v, a, delta) for a, v in zip(orders, values, strict=True))
            < 0
        )
        assert rdp_epsilon(orders, values, delta).epsilon == 0.0


def test_a_small_divergence_is_free_once_delta_exceeds_the_total_variation():
    value = 1e-8  # total variation <= 1e-4, while the conversion at order 2 needs delta = 1/4
    assert rdp_epsilon_at_order(value, 2.0, 1.1e-4) > 7
    assert rdp_epsilon([2.0], [value], 1.1e-4) == (0.0, 2.0)
    assert rdp_epsilon([2.0], [value], 0.9e-4).epsilon > 7
    assert rdp_delta([2.0], [value], 0.0) == pytest.approx(1e-4, rel=1e-6)


def test_orders_up_to_a_hundredth_above_one_are_not_converted():
    assert rdp_epsilon([1.005, 2.0], [1e-3, 1.0], 0.01).order == 2.0
    assert rdp_epsilon([1.01], [5.0], 0.01).epsilon == math.inf
    assert rdp_delta([1.01], [math.inf], 1.0) == 1.0


def test_infinite_values_are_skipped_and_reported_when_nothing_else_is_left():
    assert rdp_epsilon([2.0, 3.0], [1.0, math.inf], 1e-5).order == 2.0
    assert rdp_epsilon([2.0, 3.0], [math.inf, math.inf], 1e-5).epsilon == math.inf
    assert rdp_delta([2.0, 3.0], [math.inf, math.inf], 5.0) == 1.0


def test_zero_divergence_is_free_at_every_delta():
    assert rdp_epsilon([1.5, 2.0], [0.0, 0.0], 1e-300).epsilon == 0.0
    assert rdp_delta([1.5, 2.0], [0.0, 0.0], 0.0) == 0.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rdp_epsilon([1.0, 2.0], [0.1, 0.1], 1e-5), "orders must be finite and > 1"),
        (
            lambda: rdp_epsilon([2.0, math.inf], [0.1, 0.1], 1e-5),
            "orders must be finite and > 1",
        ),
        (lambda: rdp_epsilon([2.0], [-0.1], 1e-5), "values must be >= 0"),
        (lambda: rdp_epsilon([2.0], [math.nan], 1e-5), "values must be >= 0"),
        (lambda: rdp_epsilon([2.0], [0.1, 0.2], 1e-5), "of one length"),
        (lambda: rdp_epsilon([], [], 1e-5), "of one length"),
        (lambda: rdp_epsilon_at_order(0.1, 1.0, 1e-5), "order must be finite and > 1"),
        (lambda: rdp_epsilon_classic(-0.1, 2.0, 1e-5), "value must be >= 0"),
    ],
)
def test_arguments_out_of_range_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
