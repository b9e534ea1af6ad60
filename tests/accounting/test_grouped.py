"""replace_one by one record removed and one added."""

from __future__ import annotations

import math

import pytest

from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.analysis.gaussian import gaussian_epsilon
from torch_dpsco.accounting.events import (
    ADD_REMOVE,
    REPLACE_ONE,
    Gaussian,
    Parallel,
    PoissonGaussian,
    Pure,
    Repeat,
)
from torch_dpsco.accounting.grouped import replace_one_epsilon
from torch_dpsco.accounting.ledger import Ledger
from torch_dpsco.errors import AdjacencyError

DELTA = 1e-5


def test_a_replaced_record_is_one_removed_and_one_added():
    """Measured: 0.884 by the group, 0.530 by the pair of the event itself."""
    epoch = Ledger([Repeat(PoissonGaussian(1.0, 256 / 60000), 235)])
    assert replace_one_epsilon(epoch, DELTA) == pytest.approx(0.884, abs=2e-3)
    assert epoch.epsilon(DELTA, REPLACE_ONE) == pytest.approx(0.530, abs=2e-3)
    single = replace_one_epsilon(epoch, DELTA) / 2
    assert epoch.delta(single, ADD_REMOVE) * (1 + math.exp(single)) <= DELTA
    whole = Ledger([Gaussian(4.0, {ADD_REMOVE: 1.0})] * 3)
    assert replace_one_epsilon(whole, DELTA) == pytest.approx(
        gaussian_epsilon(2 * math.sqrt(3) / 4, DELTA), rel=1e-12
    )
    assert replace_one_epsilon(whole, DELTA) >= gaussian_epsilon(2 * math.sqrt(3) / 4, DELTA)


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("event", [PoissonGaussian(2.0, 0.01, k=3), Pure(0.1, (ADD_REMOVE,))])
def test_a_group_covers_what_replace_one_alone_does_not(event):
    ledger = Ledger([event])
    with pytest.raises(AdjacencyError):
        ledger.epsilon(DELTA, REPLACE_ONE)
    found = replace_one_epsilon(ledger, DELTA)
    assert ledger.epsilon(DELTA, ADD_REMOVE) < found < 1.0
    keyed = Ledger([Parallel({"a": [event]}, "city", partition_kind="keyed")])
    assert replace_one_epsilon(keyed, DELTA) == found


def test_a_group_has_no_figure_where_failures_take_all_and_none_is_needed_for_nothing():
    assert replace_one_epsilon(Ledger(), DELTA) == 0.0
    assert (
        replace_one_epsilon(Ledger([Gaussian(9.0, {ADD_REMOVE: 1.0}, failure=0.1)]), DELTA)
        == math.inf
    )
    with pytest.raises(AdjacencyError):
        replace_one_epsilon(Ledger([Gaussian(9.0, {REPLACE_ONE: 1.0})]), DELTA)


@pytest.mark.slow
def test_the_accountant_takes_a_group_only_if_asked_and_only_where_it_must():
    accountant = Accountant(adjacency=ADD_REMOVE)
    accountant.record(PoissonGaussian(2.0, 0.01), 5)
    direct = accountant.get_epsilon(DELTA, adjacency=REPLACE_ONE)
    assert accountant.get_epsilon(DELTA, adjacency=REPLACE_ONE, allow_group=True) == direct
    accountant.record(PoissonGaussian(2.0, 0.01, k=2))
    for _ in range(2):  # an answer by the group is not kept for those who did not ask for it
        assert accountant.get_epsilon(DELTA, adjacency=REPLACE_ONE, allow_group=True) > direct
        with pytest.raises(AdjacencyError):
            accountant.get_epsilon(DELTA, adjacency=REPLACE_ONE)


def test_mu_of_sampled_events_is_quoted_with_the_delta_from_which_it_holds():
    accountant = Accountant(adjacency=ADD_REMOVE)
    accountant.record(PoissonGaussian(1.0, 256 / 60000), 235)
    with pytest.raises(ValueError, match="delta_min=1e-10"):
        accountant.get_mu()
    mu = accountant.get_mu(delta_min=1e-6)
    assert 0.0 < mu < accountant.get_mu(delta_min=1e-10)
    for delta in (1e-6, 1e-5, 1e-2, 0.1):
        assert accountant.get_epsilon(delta) <= gaussian_epsilon(mu, delta)
    accountant.record(Gaussian(9.0, {ADD_REMOVE: 1.0}, failure=1e-9))
    with pytest.raises(ValueError, match="mu must be exact"):
        accountant.get_mu(delta_min=1e-6)
