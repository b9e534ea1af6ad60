"""The integral over many orders at once, against exact sums over the same nodes."""

from __future__ import annotations

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference.papers.orders import by_order
from torch_dpsco.accounting.analysis import rdp as quad

EDGES = np.array([0.0, 0.25, 1.0])  # 32 nodes
starts = st.one_of(
    st.floats(-9.0, 0.0).map(lambda x: 1 + 10**x), st.floats(0.1, 16.0).map(lambda x: 2**x)
)
scales = st.floats(-12.0, 3.5).map(lambda x: 10**x)


def exact(order: float, ratio: np.ndarray, weight: np.ndarray, two_sided: bool) -> mp.mpf:
    """Returns the log of the sum of e^weight times the kernel, from its definition in 80 digits."""
    with mp.workdps(80):
        a, total = mp.mpf(order), mp.mpf(0)
        for log_r, w in zip(map(mp.mpf, ratio), map(mp.mpf, weight), strict=True):
            r, power = mp.exp(log_r), mp.exp(a * log_r)
            kernel = power + r / power - r - 1 if two_sided else power - 1 - a * (r - 1)
            total += mp.exp(w) * kernel
        return mp.log(total)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("two_sided", [False, True])
@given(starts, scales, st.floats(0.0, 1.0), st.floats(-50.0, 50.0), st.floats(0.01, 100.0))
@settings(max_examples=100)
def test_the_fast_integral_is_the_sum_of_its_kernel_over_the_nodes(
    two_sided, start, scale, zero, slope, noise
):
    """log r = scale (x - zero)^3 takes both signs and all sizes; the base density varies by up to e^50 and more."""
    order = start * np.array([1.0, 1.7, 6.0, 16.0])
    taken = {}

    def pair(x):
        ratio = scale * (np.abs(x - zero) if two_sided else x - zero) ** 3
        taken["ratio"], taken["base"] = ratio, slope * x - (x / noise) ** 2 / 2
        return taken["ratio"], taken["base"]

    found = quad.log_excess(order, EDGES, pair, two_sided)
    weight = taken["base"] + np.log(quad.nodes(EDGES)[1])
    for a, value in zip(order, found, strict=True):
        truth = exact(float(a), taken["ratio"], weight, two_sided)
        # logarithms of this size are rounded to within `rounding`; 1e-13 is what the sums may add
        rounding = 4e-16 * (float(a) * np.max(np.abs(taken["ratio"])) + np.max(np.abs(weight)))
        assert abs(value - float(truth)) <= 1e-13 + rounding


def test_the_weights_of_the_nodes_sum_to_the_length():
    x, width = quad.nodes(EDGES)
    assert x.size == 32
    assert width @ x**2 == pytest.approx(1 / 3, rel=1e-14)


def test_a_ratio_of_one_everywhere_leaves_nothing():
    order = np.array([1.5, 2.0])
    flat = quad.log_excess(order, EDGES, lambda x: (np.zeros_like(x), np.zeros_like(x)))
    assert np.all(flat == -np.inf)


@given(starts, scales, st.floats(-1e3, 1e3))
@settings(max_examples=100)
def test_no_node_that_matters_at_some_order_is_dropped(start, scale, slope):
    x = np.linspace(0.0, 1.0, 50)
    ratio, weight = scale * x, slope * x**2
    order = start * np.linspace(1.0, 16.0, 9)
    terms = order[:, None] * ratio + weight
    matters = np.any(terms > np.max(terms, axis=1, keepdims=True) - 59, axis=0)
    assert np.all(quad._matters(order, ratio, weight)[matters])


def test_nodes_that_matter_at_no_order_are_dropped():
    x = np.linspace(0.0, 100.0, 101)
    kept = quad._matters(np.array([20.0, 25.0]), x, -(x**2) / 2)  # peaks of width 1 at 20 to 25
    assert kept[20:26].all()
    assert kept.sum() < 40


def test_blocks_of_orders_span_a_factor_sixteen_at_most():
    grid = np.concatenate(
        [1 + np.logspace(-9, 0, 50), 2.0 ** np.arange(1, 21), [16.5, 256.5, 65537.0]]
    )
    blocks = []
    values = by_order(lambda block: blocks.append(block) or 2 * block, grid)
    assert np.array_equal(values, 2 * grid)
    assert all(np.all(np.diff(block) > 0) and block[-1] <= 16 * block[0] for block in blocks)
    assert any(block[-1] == quad.MAX_ORDER for block in blocks)
