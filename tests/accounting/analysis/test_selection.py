"""Curves of the best of K releases: exact laws of outcomes stay below, and dp-accounting agrees."""

import math

import numpy as np
import pytest
from scipy.special import logsumexp

from torch_dpsco.accounting.analysis.rdp import selection_curve

ORDERS = np.array([1.1, 1.25, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0, 64.0])


def divergence(p, q, order):
    return float(logsumexp(order * np.log(p) + (1 - order) * np.log(q))) / (order - 1)


def base(p, q):
    """Curve of one release with these laws on neighbouring data, outcomes from worst to best."""
    return np.array([max(divergence(p, q, order), divergence(q, p, order)) for order in ORDERS])


def geometric(x, gamma):
    """Generating function, summed term by term, k <= 4000."""
    k = np.arange(1, 4001)
    logs = k * math.log1p(-gamma)
    weights = np.exp(logs - logs.max())
    return float(weights @ x**k / weights.sum())


def best_of(p, generating):
    ends = np.concatenate([[0.0], np.minimum(np.cumsum(p), 1.0)])
    found = np.array([generating(x) for x in ends])
    return np.diff(found), found[0]


PAIRS = [
    (np.array([0.6, 0.4]), np.array([0.5, 0.5])),
    (np.array([0.98, 0.02]), np.array([0.95, 0.05])),  # a record that decides who wins
    (np.array([0.3, 0.5, 0.2]), np.array([0.35, 0.35, 0.3])),
]


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("gamma", [0.05, 0.2, 0.5])
def test_no_pair_exceeds_the_curve(pair, gamma):
    claim = selection_curve(ORDERS, base(*pair), gamma)
    (p, _), (q, _) = (best_of(side, lambda x: geometric(x, gamma)) for side in pair)
    for order, bound in zip(ORDERS, claim, strict=True):
        assert max(divergence(p, q, order), divergence(q, p, order)) <= bound


def test_the_cost_of_the_winner_alone_is_refuted():
    pair = PAIRS[1]
    (p, _), (q, _) = (best_of(side, lambda x: geometric(x, 0.05)) for side in pair)
    exact = np.array([divergence(p, q, order) for order in ORDERS])
    assert (exact > base(*pair)).any()


def test_dp_accounting_agrees():
    dp_event = pytest.importorskip("dp_accounting.dp_event")
    accountant = pytest.importorskip("dp_accounting.rdp").RdpAccountant(ORDERS)

    values = ORDERS / (2 * 8.0**2)
    mean = 10.0
    event = dp_event.RepeatAndSelectDpEvent(dp_event.GaussianDpEvent(8.0), mean, 1.0)
    theirs = np.minimum.accumulate(accountant.compose(event)._rdp[::-1])[::-1]
    ours = selection_curve(ORDERS, values, 1 / mean)
    finite = np.isfinite(theirs)
    assert finite.sum() >= 4
    np.testing.assert_allclose(ours[finite], theirs[finite], rtol=1e-3)


@pytest.mark.parametrize("gamma", [math.nan, 0.0, 1.0])
def test_laws_out_of_range_are_refused(gamma):
    with pytest.raises(ValueError, match="gamma must be"):
        selection_curve(ORDERS, ORDERS, gamma)
