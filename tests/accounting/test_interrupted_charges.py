"""Charges of nothing, of too much, and those that an exception interrupts: the ledger agrees with itself."""

from __future__ import annotations

import pytest

from tests.accounting.ledgers import DELTA, STEP, WHOLE, image, part
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.events import (
    ADD_REMOVE,
    REPLACE_ONE,
    ZERO_OUT,
    Parallel,
    Sequential,
    clipped_gaussian,
)
from torch_dpsco.accounting.ledger import Ledger, Sum

ONE = clipped_gaussian(1.0)


@pytest.mark.parametrize(
    ("event", "count", "adjacency"),
    [
        (Parallel({"0": [ONE]}, "p", "keyed"), 0, REPLACE_ONE),
        (Parallel({"0": [ONE]}, "p"), 0, ADD_REMOVE),
        (Parallel({"0": []}, "p"), 1, ADD_REMOVE),
    ],
)
def test_a_charge_of_nothing_changes_no_answer(event, count, adjacency):
    accountant = Accountant()
    accountant.authorize(WHOLE)
    before = accountant.ledger.epsilon(DELTA, adjacency)  # the accountant keeps its answers
    accountant.authorize(event, count)
    assert len(accountant) == 1
    assert accountant.ledger.epsilon(DELTA, adjacency) == before


@pytest.mark.parametrize("event", [part("0"), Sequential([part("1"), part("2")])])
def test_an_interrupted_charge_leaves_no_stale_answer(event, monkeypatch):
    """Ctrl-C between the events of a charge: what was counted must be in the next answer."""
    ledger = Ledger([part("0", 30.0), STEP])
    ledger.epsilon(DELTA, ZERO_OUT)

    def interrupt(*_args):
        raise KeyboardInterrupt

    event = Sequential([STEP, event])
    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "_put", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ledger.add(event, 50)
    assert ledger.epsilon(DELTA, ZERO_OUT) == Ledger.from_json(ledger.to_json()).epsilon(
        DELTA, ZERO_OUT
    )


@pytest.mark.parametrize("known", [True, False])
def test_an_interrupted_charge_of_an_ordinary_event_counts_it_or_not_but_agrees_with_itself(
    known, monkeypatch
):
    ledger = Ledger([STEP] * (2 if known else 0) + [part("0")])
    ledger.epsilon(DELTA, ZERO_OUT)

    def interrupt(*_args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Sum, "put", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ledger.add(STEP, 50)
    assert len(ledger) == len(Ledger.from_json(ledger.to_json()))
    assert ledger.epsilon(DELTA, ZERO_OUT) == Ledger.from_json(ledger.to_json()).epsilon(
        DELTA, ZERO_OUT
    )


def test_a_ledger_never_holds_more_events_than_can_be_counted():
    accountant = Accountant()
    accountant.authorize(STEP, 2**62)
    before = image(accountant)
    for count in (2**62, 2**63, 2**70, 10**400):
        with pytest.raises(ValueError, match=r"count must (be an integer <=|leave at most)"):
            accountant.authorize(STEP, count)
    assert image(accountant) == before
