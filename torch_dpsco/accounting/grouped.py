"""Replacing a record as removing one and adding another, where events have no guarantee for replaced records."""

from __future__ import annotations

import math

import scipy

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.gaussian import gaussian_epsilon
from torch_dpsco.accounting.analysis.rdp import group_approx_dp_delta, group_gdp_mu
from torch_dpsco.accounting.events import (
    ADD_REMOVE,
)
from torch_dpsco.accounting.ledger import Ledger

_LARGEST = 500.0  # epsilon of one record; twice that is no guarantee
_TOLERANCE = 1e-6  # of the epsilon of one record


def replace_one_epsilon(ledger: Ledger, delta: float) -> float:
    """Returns an epsilon under replace_one from the add_remove curve of a whole ledger.

    Exact for unsampled Gaussians (2 mu); at delta = 0 twice the sum of pure epsilons. Else the least 2 e with
    delta(e) (1 + exp(e)) <= delta, to 1e-6, rounded up. Where every event has a replace_one guarantee of its own, that
    one is smaller: use `Ledger.epsilon`.

    Args:
        ledger: what was charged.
        delta: in [0, 1).

    Returns:
        epsilon >= 0; inf if there is none up to 1000.

    Raises:
        AdjacencyError: some event has no guarantee under add_remove.
        InfeasibleError: delta is 0 and some event has no pure epsilon.

    Guarantee: (epsilon, delta)-DP under replace_one, if the ledger's parameters were fixed in advance.

    Source: docs/proofs/accounting.md#replacing-from-adding-and-removing.

    Example:
        >>> from torch_dpsco.accounting.events import PoissonGaussian, Repeat
        >>> ledger = Ledger([Repeat(PoissonGaussian(1.0, 256 / 60000), 235)])
        >>> round(replace_one_epsilon(ledger, 1e-5), 3), round(ledger.epsilon(1e-5, "replace_one"), 3)
        (0.884, 0.53)
    """
    delta = check.below_one(delta=delta)
    if delta == 0:
        return 2.0 * ledger.epsilon(delta, ADD_REMOVE)
    cost = ledger.cost(ADD_REMOVE)
    if cost.mu_squared is not None and not cost.fails:
        mu = group_gdp_mu(math.sqrt(cost.mu_squared), 2) * (
            1.0 + 2.0**-50
        )  # the square root rounds
        return gaussian_epsilon(mu, delta)

    def excess(epsilon: float) -> float:
        spent = group_approx_dp_delta(epsilon, ledger.delta(epsilon, ADD_REMOVE), 2)
        return max(-1e3, math.log(spent / delta)) if spent > 0 else -1e3

    low = 0.0
    high = min(_LARGEST, max(1e-3, ledger.epsilon(delta, ADD_REMOVE)))
    if excess(low) <= 0:
        return 0.0
    while excess(high) > 0:
        if high == _LARGEST:
            return math.inf
        low = high
        high = min(_LARGEST, 1.5 * high)
    single = (
        float(scipy.optimize.brentq(excess, low, high, xtol=_TOLERANCE * high))
        + _TOLERANCE * high
    )
    # PRIVACY: only what was seen to hold (test_a_replaced_record_is_one_removed_and_one_added)
    return 2.0 * (single if single < high and excess(single) <= 0 else high)
