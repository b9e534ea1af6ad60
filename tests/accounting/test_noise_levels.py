"""Many noises at once: the bound between two levels, its rounding, and that decisions stay what they were."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from scipy.integrate import quad, trapezoid
from scipy.stats import binom, norm

from torch_dpsco.accounting import noise_levels
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.curves import cost_of, orders_at, spread_of
from torch_dpsco.accounting.events import (
    Gaussian,
    PoissonGaussian,
    Repeat,
    Sequential,
    WORGaussian,
)
from torch_dpsco.accounting.filters import make_filter
from torch_dpsco.accounting.ledger import Ledger
from torch_dpsco.errors import AdjacencyError, BudgetExceeded, PrivacyError

CASES = [
    (PoissonGaussian(1.1, 256 / 60000), "add_remove"),
    (PoissonGaussian(0.6, 0.05), "zero_out"),
    (PoissonGaussian(1.1, 256 / 60000), "replace_one"),
    (PoissonGaussian(3.0, 0.3), "replace_one"),
    (PoissonGaussian(2.0, 0.02, 4), "add_remove"),
    (PoissonGaussian(2.0, 0.97, 2), "add_remove"),
    (WORGaussian(1.5, 256, 60000), "replace_one"),
    (WORGaussian(1.5, 256, 60000), "zero_out"),
]


def noises(event, number=90, factor=3.0):
    return [
        replace(event, noise_multiplier=event.noise_multiplier * factor ** (k / number))
        for k in range(number)
    ]


def profiles(event, adjacency, noise):
    """The hockey sticks of a dominating pair of densities on the line, in both orders, t >= 1."""
    if isinstance(event, WORGaussian):
        rate, noise = event.batch_size / event.dataset_size, noise / 2
        pair = [(1 - rate, 0.0), (rate, 1.0)], [(1.0, 0.0)]
    elif adjacency == "replace_one":
        pair = [(1 - event.q, 0.0), (event.q, 1.0)], [(1 - event.q, 0.0), (event.q, -1.0)]
    else:
        pair = (
            [(float(binom.pmf(j, event.k, event.q)), float(j)) for j in range(event.k + 1)],
            [(1.0, 0.0)],
        )

    def density(x, terms):
        return sum(weight * norm.pdf(x, mean, noise) for weight, mean in terms)

    def stick(t, first, second):
        x = np.linspace(
            -1 - 12 * noise,
            event.k + 1 + 12 * noise if hasattr(event, "k") else 2 + 12 * noise,
            40001,
        )
        return trapezoid(np.maximum(density(x, first) - t * density(x, second), 0), x)

    return lambda t: (stick(t, *pair), stick(t, *pair[::-1]))


def share(spread, noise, lower, upper):
    def area(z):
        return quad(
            lambda x: math.exp(spread**2 / 2 * (upper**-2 - x * x)),
            1 / upper,
            1 / z,
            epsrel=1e-12,
        )[0]

    return area(noise) / area(lower)


@pytest.mark.cases(2, 2)
@pytest.mark.parametrize(("event", "adjacency"), CASES, ids=repr)
def test_between_two_noises_the_hockey_stick_is_below_that_of_a_coin(event, adjacency):
    spread, z = spread_of(event, adjacency), event.noise_multiplier
    for ratio, part in ((1.05, 0.5), (2.0, 0.3), (2.0, 0.7)):
        lower, at, upper = (
            profiles(event, adjacency, z * ratio**power) for power in (0, part, 1)
        )
        p = share(spread, z * ratio**part, z, z * ratio)
        for t in (0.3, 0.9, 0.99, 1.0, 1.003, 1.03, 1.3, 3.0, 20.0):
            for one, two, three in zip(lower(t), at(t), upper(t), strict=True):
                assert two <= p * one + (1 - p) * three + 1e-9


def test_the_spread_is_the_least_that_holds():
    event = PoissonGaussian(2.0, 0.5)
    lower, at, upper = (profiles(event, "add_remove", z) for z in (1.0, 2.0, 4.0))
    tight, too_small = (share(spread, 2.0, 1.0, 4.0) for spread in (0.5, 0.8))
    one, two, three = lower(1.0)[0], at(1.0)[0], upper(1.0)[0]
    assert two == pytest.approx(tight * one + (1 - tight) * three, rel=1e-6)
    assert too_small > tight  # a larger spread is a looser bound, a smaller one is none
    assert two > share(0.3, 2.0, 1.0, 4.0) * one + (1 - share(0.3, 2.0, 1.0, 4.0)) * three


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
            exact = Ledger(Repeat(each, count) for each in noises(CASES[0][0], number)).epsilon(
                1e-5, "add_remove", "rdp"
            )
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
    assert (
        found[0]
        == found[1]
        == found[2]
        == Ledger.from_json(asked.to_json()).epsilon(1e-5, "add_remove")
    )


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
    assert both.mu_squared is None
    assert both.pure == math.inf


@pytest.mark.parametrize(
    ("event", "adjacency"),
    [(WORGaussian(1.0, 2, 9), "add_remove"), (PoissonGaussian(1.0, 0.1, 2), "replace_one")],
)
def test_many_noises_have_no_guarantee_that_one_has_not(event, adjacency):
    with pytest.raises(AdjacencyError):
        Ledger(noises(event, 70)).cost(adjacency)


@pytest.mark.parametrize(
    "noise", [0.01, 0.3, 1.0, 2.0 ** (5 / 64), math.nextafter(2.0 ** (5 / 64), 0), 1e3, 1e10]
)
@pytest.mark.parametrize("spread", [0.5, 1.0, 3.0])
def test_shares_are_rounded_up(noise, spread):
    levels = noise_levels.Levels("add_remove", 0)
    key, _, _ = levels._place(PoissonGaussian(noise, 0.01))
    assert noise_levels._noise(key[-1]) <= noise <= noise_levels._noise(key[-1] + 1)
    found = noise_levels._share(noise, key[-1], spread) / 2**20
    if noise >= 0.3:
        exact = share(
            spread, noise, noise_levels._noise(key[-1]), noise_levels._noise(key[-1] + 1)
        )
        assert exact <= found + 1e-10
        assert found <= min(1.0, exact + 1e-5 + 1e-4 * (noise > 1e4))
    assert 0 < found <= 1


def plan(number=70):
    return noises(PoissonGaussian(2.0, 0.01), number)


def test_what_was_declared_is_admitted_as_often_and_no_more():
    events = plan()
    budget = Budget(
        2.0, 1e-5, adjacency="add_remove", schedule=tuple((event, 1) for event in events)
    )
    accountant, run = Accountant(budget), make_filter(budget)
    for event in events:
        assert run.admits_next(accountant.ledger, event, 1)
        assert run.admits(accountant.ledger, event, 1)
        assert not run.admits_next(accountant.ledger, event, 2)
        accountant.authorize(event)
    with pytest.raises(BudgetExceeded):
        accountant.authorize(events[3])
    beyond = Accountant(budget)
    beyond.authorize(events[0])
    beyond.record(events[0])  # truth wins over wishes
    with pytest.raises(BudgetExceeded):
        beyond.authorize(events[1])


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
    for wrong, error in ((events[0], BudgetExceeded), (PoissonGaussian(9.0, 0.01), PrivacyError)):
        with pytest.raises(error):
            accountant.authorize(wrong, 10**6)
    assert len(accountant) == 50
    accountant.record(events[60], 2)  # more than was planned
    assert accountant._limit._covered == -1
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

    def more(*given: object) -> None:
        charge(*given)
        accountant._journal.charge(PoissonGaussian(0.5, 0.5), 1)

    with monkeypatch.context() as patched:
        patched.setattr(accountant, "_charge", more)
        assert accountant._limit.within_fixed(events[1], 1)
        accountant.authorize(events[1])
    assert not accountant._limit.within_fixed(events[2], 1)
    with pytest.raises(BudgetExceeded):
        accountant.authorize(events[2])


def test_a_plan_that_does_not_fit_as_a_whole_admits_nothing():
    accountant = Accountant(Budget(0.05, 1e-5, adjacency="add_remove"))
    for event in plan():
        accountant.declare(event, 50)
    with pytest.raises(BudgetExceeded):
        accountant.authorize(plan()[0])
    assert len(accountant) == 0
