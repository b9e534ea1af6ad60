"""Charges of nothing, of too much, and those that an exception interrupts: the ledger agrees with itself."""

from __future__ import annotations

import sys

import pytest

from tests.accounting.ledgers import DELTA, STEP, WHOLE, image, part
from torch_dpsco.accounting import ledger
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.events import (
    ADD_REMOVE,
    REPLACE_ONE,
    ZERO_OUT,
    Parallel,
    Repeat,
    Sequential,
    clipped_gaussian,
)
from torch_dpsco.accounting.ledger import LOCK, Book, Ledger

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


@pytest.mark.parametrize("event", [STEP, part("0"), Sequential([STEP, part("1"), part("2")])])
def test_an_interrupted_charge_leaves_no_stale_answer(event):
    """Ctrl-C at any line of a charge: what was counted is in the next answer."""
    left = 0

    def interrupt(frame, kind, _argument):
        nonlocal left
        if frame.f_code.co_filename != ledger.__file__:
            return None
        left -= kind == "line"
        if left < 0:
            raise KeyboardInterrupt
        return interrupt

    for lines in range(300):
        book = Ledger([part("0", 30.0), STEP])
        book.epsilon(DELTA, ZERO_OUT)
        before = book.to_json()
        left = lines
        sys.settrace(interrupt)
        try:
            book.add(event, 50)
        except KeyboardInterrupt:
            left = -1
        finally:
            sys.settrace(None)
            while LOCK._is_owned():
                # a trace raises where no signal does: between the last line of a block and the end of its `with`
                LOCK.release()
        counted = Ledger.from_json(book.to_json())
        assert book.epsilon(DELTA, ZERO_OUT) == counted.epsilon(DELTA, ZERO_OUT)
        assert (len(book), book.distinct) == (len(counted), counted.distinct)
        whole = Ledger([part("0", 30.0), STEP, Repeat(event, 50)])
        assert book.to_json() in (before, whole.to_json())
        if left >= 0:
            break
    assert lines > 5


@pytest.mark.parametrize("event", [STEP, Sequential([STEP, part("1")])])
def test_an_interrupted_charge_is_whole_or_none(event):
    """The event, the mark of its release, and that it was chosen on the way."""
    for lines in range(300):
        book = Book(Ledger([STEP]), releases={"run": 1})
        left = lines

        def interrupt(frame, kind, _argument):
            nonlocal left
            if frame.f_code.co_filename != ledger.__file__:
                return None
            left -= kind == "line"
            if left < 0:
                raise KeyboardInterrupt
            return interrupt

        sys.settrace(interrupt)
        try:
            book.add(event, 2, adaptive=True, releases={"run": 2, "place": 1})
        except KeyboardInterrupt:
            left = -1
        finally:
            sys.settrace(None)
            while LOCK._is_owned():
                LOCK.release()
        added = len(Ledger([Repeat(event, 2)]))
        found = (len(book.ledger), book.releases, book.config)
        done = (1 + added, {"run": 2, "place": 1}, {"adaptive": added})
        assert found in ((1, {"run": 1}, {}), done)
        if left >= 0:
            break
    assert lines > 5


def test_a_ledger_never_holds_more_events_than_can_be_counted():
    accountant = Accountant()
    accountant.authorize(STEP, 2**62)
    before = image(accountant)
    for count in (2**62, 2**63, 2**70, 10**400):
        with pytest.raises(ValueError, match=r"count must (be an integer <=|leave at most)"):
            accountant.authorize(STEP, count)
    assert image(accountant) == before
