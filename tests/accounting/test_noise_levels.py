"""Many noises at once: the next lower ones of a grid, and that decisions stay what they were."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.curves import cost_of, orders_at
from torch_dpsco.accounting.events import (
    Gaussian,
    PoissonGaussian,
    Repeat,
    Sequential,
    WORGaussian,
)
from torch_dpsco.accounting.ledger import Ledger
from torch_dpsco.accounting.ledger import _sum as ledger_sum
from torch_dpsco.errors import AdjacencyError, BudgetExceeded, PrivacyError

CASES = [
    (PoissonGaussian(1.1, 256 / 60000), "add_remove"),
    (PoissonGaussian(0.6, 0.05), "zero_out"),
    (PoissonGaussian(1.1, 256 / 60000), "replace_one"),
    (PoissonGaussian(3.0, 0.3), "replace_one"),
    (WORGaussian(1.5, 256, 60000), "replace_one"),
    (WORGaussian(1.5, 256, 60000), "zero_out"),
]


def noises(event, number=90, factor=3.0):
    return [
        replace(event, noise_multiplier=event.noise_multiplier * factor ** (k / number))
        for k in range(number)
    ]


@pytest.mark.cases(2, 2)
@pytest.mark.parametrize(("event", "adjacency"), CASES, ids=repr)
@pytest.mark.parametrize("count", [1, 300])
def test_many_noises_cost_no_less_than_each_by_itself(event, adjacency, count):
    events = noises(event)
    ledger = Ledger(Repeat(each, count) for each in events)
    rows = np.array([cost_of(each, adjacency, 1).rdp for each in events])
    ours, exact = ledger.cost(adjacency, 1).rdp, count * rows.sum(axis=0)
    assert np.all(ours >= exact * (1 - 1e-12))
    assert (
        ours[np.searchsorted(orders_at(1), 2.0)]
        <= exact[np.searchsorted(orders_at(1), 2.0)] * 1.005
    )
    assert len(ledger.cost(adjacency, 1).rdp) == rows.shape[1]


def test_many_noises_cost_half_a_percent_of_epsilon_at_most(monkeypatch):
    for number, count in ((80, 5), (200, 100)):
        ledger = Ledger(Repeat(each, count) for each in noises(CASES[0][0], number))
        with monkeypatch.context() as patched:
            patched.setattr("torch_dpsco.accounting.ledger.MANY", 10**6)
            ledger_sum.cache_clear()
            exact = Ledger(Repeat(each, count) for each in noises(CASES[0][0], number)).epsilon(
                1e-5, "add_remove", "rdp"
            )
        ledger_sum.cache_clear()
        assert exact < ledger.epsilon(1e-5, "add_remove", "rdp") < exact * 1.005


def test_neither_order_nor_questions_change_what_many_noises_cost():
    events = noises(CASES[0][0], 100)
    shuffled = random.Random(1).sample(events, len(events))
    asked = Ledger()
    for k, event in enumerate(shuffled):
        if k % 7 == 0:
            asked.cost("add_remove", 0, events[-1 - k % 50], 3)
        asked.add(event, 2)
    at_once = Ledger(Repeat(event, 2) for event in events)
    one_by_one = Ledger([*events, *events[::-1]])
    found = [ledger.epsilon(1e-5, "add_remove") for ledger in (asked, at_once, one_by_one)]
    assert found[0] == Ledger.from_json(asked.to_json()).epsilon(1e-5, "add_remove")
    assert found == pytest.approx([found[0]] * 3, rel=1e-12)


def test_a_question_about_one_noise_more_is_answered_as_if_it_were_charged():
    events = [*noises(CASES[2][0], 70), Gaussian(30.0, {"replace_one": 1.0})]
    ledger = Ledger()
    for event in events:
        asked = ledger.cost("replace_one", 0, event, 2)
        ledger.add(event, 2)
        assert np.array_equal(asked.rdp, ledger.cost("replace_one").rdp)
    both = ledger.cost("replace_one", 0, Sequential((events[0], events[1], events[-1])))
    for event in (events[0], events[1], events[-1]):
        ledger.add(event)
    assert np.array_equal(both.rdp, ledger.cost("replace_one").rdp)
    assert math.isnan(both.mu_squared)
    assert both.pure == math.inf


@pytest.mark.parametrize(
    ("event", "adjacency"),
    [(WORGaussian(1.0, 2, 9), "add_remove")],
)
def test_many_noises_have_no_guarantee_that_one_has_not(event, adjacency):
    with pytest.raises(AdjacencyError):
        Ledger(noises(event, 70)).cost(adjacency)


def plan(number=70):
    return noises(PoissonGaussian(2.0, 0.01), number)


def test_part_of_a_plan_that_fits_is_not_decided_again(monkeypatch):
    events = plan()
    accountant = Accountant(Budget(2.0, 1e-5, adjacency="add_remove"))
    for event in events:
        accountant.declare(event, 1)
    accountant.authorize(events[0])
    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "evaluate", lambda *_, **__: pytest.fail("decided again"))
        for event in events[1:50]:
            accountant.authorize(event)
    for wrong, error in (
        (events[0], BudgetExceeded),
        (PoissonGaussian(9.0, 0.01), PrivacyError),
    ):
        with pytest.raises(error):
            accountant.authorize(wrong, 10**6)
    assert len(accountant) == 50
    accountant.record(events[60], 2)  # more than was planned
    for event in events[50:60]:
        accountant.authorize(event)


def test_what_is_charged_besides_is_decided_anew(monkeypatch):
    """A charge inside of a pass of random allocation adds events of its own."""
    events = plan()
    accountant = Accountant(Budget(2.0, 1e-5, adjacency="add_remove"))
    for event in events:
        accountant.declare(event, 1)
    accountant.authorize(events[0])
    charge = accountant._charge

    def more(*given: object, **named: object) -> None:
        charge(*given, **named)
        accountant._journal.charge(PoissonGaussian(0.5, 0.5), 1)

    with monkeypatch.context() as patched:
        patched.setattr(accountant, "_charge", more)
        accountant.authorize(events[1])
    for event in events[1:3]:
        with pytest.raises((BudgetExceeded, PrivacyError)):
            accountant.authorize(event)


def test_a_plan_that_does_not_fit_as_a_whole_admits_nothing():
    accountant = Accountant(Budget(0.05, 1e-5, adjacency="add_remove"))
    for event in plan():
        accountant.declare(event, 50)
    with pytest.raises(BudgetExceeded):
        accountant.authorize(plan()[0])
    assert len(accountant) == 0
