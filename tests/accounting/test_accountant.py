from __future__ import annotations

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.accounting.ledgers import DELTA, FIXED, STEP, WHOLE, image, part, refusal
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.events import (
    ADD_REMOVE,
    ADJACENCIES,
    REPLACE_ONE,
    ZCDP,
    ZERO_OUT,
    Gaussian,
    NonPrivate,
    PoissonGaussian,
    Repeat,
    clipped_gaussian,
)
from torch_dpsco.accounting.ledger import Ledger
from torch_dpsco.errors import AdjacencyError, PrivacyError, UnitError

# -- budget -----------------------------------------------------------------------------------------------------------


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("one_by_one", [True, False])
@pytest.mark.parametrize("event", [STEP, FIXED, WHOLE, part("0"), Repeat(STEP, 3)])
def test_a_budget_admits_exactly_max_steps(event, one_by_one):
    accountant = Accountant(Budget(1.2, DELTA, "replace_one"))
    room = accountant.max_steps(event)
    assert room > 1
    for _ in range(room if one_by_one else 1):
        accountant.authorize(event, 1 if one_by_one else room)
    assert accountant.max_steps(event) == 0
    assert accountant.get_epsilon(DELTA) <= 1.2
    refusal(accountant, event)
    assert accountant.ledger.evaluate(DELTA, REPLACE_ONE, extra=event).epsilon > 1.2


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("event", [STEP, FIXED, WHOLE, part("0")])
def test_a_budget_is_exact_to_the_last_bit(event):
    spent = Accountant(adjacency=REPLACE_ONE)
    spent.authorize(event, 20)
    target = spent.get_epsilon(DELTA)
    assert Accountant(Budget(target, DELTA, "replace_one")).max_steps(event) == 20
    assert (
        Accountant(Budget(math.nextafter(target, 0.0), DELTA, "replace_one")).max_steps(event)
        == 19
    )


def test_a_refusal_leaves_every_bit_and_says_what_was_spent_asked_and_left():
    accountant = Accountant(Budget(1.0, DELTA, "replace_one"))
    accountant.authorize(STEP, 40)
    room, before = accountant.max_steps(STEP), image(accountant)
    spent = accountant.get_epsilon(DELTA)
    message = refusal(accountant, STEP, room + 1)
    asked = accountant.ledger.evaluate(DELTA, REPLACE_ONE, extra=STEP, count=room + 1).epsilon
    assert image(accountant) == before
    assert accountant.get_epsilon(DELTA) == spent
    for figure in (
        "past the budget of 1 (epsilon 1 at delta 1e-05",
        "replace_one",
        "in 40 events",
        f"room for {room} more",
        "40 events of a run of PoissonGaussian",
    ):
        assert figure in message
    for label, exact in (
        (r"; spent (\S+) in", spent),
        (r"epsilon to ([\d.]+)", asked),
    ):
        shown = float(re.search(label, message).group(1))
        assert exact <= shown <= exact * (1 + 1e-5)
    accountant.authorize(STEP, room)  # what was said to fit does fit


@pytest.mark.parametrize("event", [STEP, FIXED, WHOLE])
def test_the_named_smallest_epsilon_admits_the_event(event):
    message = refusal(Accountant(Budget(1e-6, DELTA, "replace_one")), event, 7)
    smallest = float(re.search(r"epsilon to (\S+), past", message).group(1))
    accountant = Accountant(Budget(smallest, DELTA, "replace_one"))
    accountant.authorize(event, 7)
    assert len(accountant) == 7


@pytest.mark.slow
def test_a_smaller_event_is_still_admitted_after_a_refusal():
    accountant, small = (
        Accountant(Budget(1.0, DELTA, "replace_one")),
        PoissonGaussian(50.0, 1e-4),
    )
    accountant.declare(small, 1)
    accountant.declare(STEP, None)
    accountant.authorize(small, 0)
    accountant.authorize(STEP)
    accountant.authorize(STEP, accountant.max_steps(STEP))
    refusal(accountant, STEP)
    accountant.authorize(small)  # its room was kept
    assert accountant.get_epsilon(DELTA) <= 1.0


@pytest.mark.parametrize(
    "event", [NonPrivate(), clipped_gaussian(0.0), PoissonGaussian(0.0, 1e-6)]
)
def test_no_budget_admits_a_release_without_noise(event):
    accountant = Accountant(Budget(1e9, 0.999, "replace_one"))
    assert accountant.max_steps(event) == 0
    assert "epsilon to inf" in refusal(accountant, event)


@pytest.mark.weekly
@settings(max_examples=6)
@given(
    st.floats(0.05, 8),
    st.sampled_from([1e-3, DELTA, 1e-9]),
    st.lists(
        st.tuples(
            st.sampled_from(
                [
                    STEP,
                    FIXED,
                    WHOLE,
                    part("0"),
                    part("1", 40.0),
                    Gaussian(9, {REPLACE_ONE: 1}, 1e-10),
                ]
            ),
            st.integers(0, 400),
        ),
        max_size=25,
    ),
)
def test_no_sequence_of_requests_ever_passes_the_budget(epsilon, delta, requests):
    accountant, planned = (
        Accountant(Budget(epsilon, delta, "replace_one")),
        requests[: len(requests) // 2],
    )
    for event, count in planned:
        accountant.declare(event, count)
    together = Ledger(Repeat(event, count) for event, count in planned).epsilon(
        delta, REPLACE_ONE
    )
    admitted = 0
    for event, count in requests:
        before = image(accountant)
        try:
            accountant.authorize(event, count)
            admitted += count
        except PrivacyError:  # past the budget, or not planned before the first release
            assert image(accountant) == before
            assert together > epsilon or (event, count) not in planned or admitted
        assert accountant.get_epsilon(delta) <= epsilon
    assert len(accountant) == admitted


def test_interleaved_events_are_decided_on_all_that_was_charged():
    accountant = Accountant(Budget(1.0, DELTA, "replace_one"))
    events = [STEP, WHOLE, STEP, FIXED, part("0"), part("1")] * 1000
    for event, steps in ((WHOLE, 9), (FIXED, 9), (part("0"), 9), (STEP, None)):
        accountant.declare(event, steps)
    admitted = 0
    while accountant.admits(events[admitted]):
        accountant.authorize(events[admitted])
        admitted += 1
    refusal(accountant, events[admitted])
    assert admitted > 50
    assert accountant.get_epsilon(DELTA) <= 1.0


def test_room_found_before_is_forgotten_when_anything_else_is_charged():
    accountant = Accountant(Budget(1.0, DELTA, "replace_one"))
    accountant.authorize(STEP)
    accountant.authorize(STEP)  # from now on steps are known to fit without a new evaluation
    accountant.record(WHOLE, 100)
    assert accountant.get_epsilon(DELTA) > 1.0  # what has happened is recorded, budget or not
    refusal(accountant, STEP)
    other = Accountant(Budget(1.0, DELTA, "replace_one"))
    other.authorize(STEP)
    other.authorize(STEP)
    other.ledger.add(WHOLE, 100)
    refusal(other, STEP)


def test_a_budget_lowered_on_the_way_counts_at_once():
    accountant = Accountant(Budget(1.0, DELTA, "replace_one"))
    accountant.authorize(STEP)
    accountant.authorize(STEP)
    accountant.budget = Budget(0.01, DELTA, "replace_one")
    assert "0.01" in refusal(accountant, STEP)


@pytest.mark.weekly
def test_a_million_equal_steps_are_one_entry():
    accountant = Accountant(Budget(4.0, DELTA, "replace_one"))
    tiny = PoissonGaussian(4.0, 1e-4)
    for _ in range(10**4):
        accountant.authorize(tiny, 100)
    assert len(accountant) == 10**6
    assert len(accountant.state_dict()["ledger"]) == 1


def test_a_request_for_nothing_or_for_no_event_leaves_every_bit():
    accountant = Accountant(Budget(1e-3, DELTA, "replace_one"))
    before = image(accountant)
    accountant.authorize(NonPrivate(), 0)
    accountant.authorize(Repeat(NonPrivate(), 0))
    assert (image(accountant), accountant.get_epsilon(DELTA)) == (before, 0.0)
    unlimited = Accountant()
    before = image(unlimited)
    with pytest.raises(ValueError, match="event must be a value of torch_dpsco"):
        unlimited.authorize("step")
    assert image(unlimited) == before
    for count in (-1, 0.5, True):
        with pytest.raises(ValueError, match="count must be an integer"):
            accountant.authorize(STEP, count)
    with pytest.raises(ValueError, match=r"budget must be set .* \(got None\)"):
        Accountant().max_steps(STEP)


# -- adjacency and unit -----------------------------------------------------------------------------------------------


def test_a_budget_answers_in_its_own_adjacency_unless_asked():
    for adjacency in ADJACENCIES:
        accountant = Accountant(Budget(8.0, DELTA, adjacency=adjacency))
        accountant.authorize(STEP, 100)
        assert accountant.adjacency == accountant.report().adjacency == adjacency
        assert accountant.get_epsilon(DELTA) == accountant.ledger.epsilon(DELTA, adjacency)
        assert accountant.get_delta(1.0) == accountant.ledger.delta(1.0, adjacency)
        for other in ADJACENCIES:
            assert accountant.get_epsilon(DELTA, adjacency=other) == accountant.ledger.epsilon(
                DELTA, other
            )
    with pytest.raises(ValueError, match=r"adjacency must be one of .* \(got 'swap'\)"):
        accountant.get_epsilon(DELTA, adjacency="swap")


def test_a_budget_is_measured_in_its_own_adjacency():
    """Equal steps: replace_one costs more, so that its budget admits fewer of them."""
    room = {a: Accountant(Budget(1.0, DELTA, adjacency=a)).max_steps(WHOLE) for a in ADJACENCIES}
    assert room[ADD_REMOVE] == room[ZERO_OUT] >= 4 * room[REPLACE_ONE] - 3 > 0
    for adjacency in (ADD_REMOVE, REPLACE_ONE):
        sampled = Accountant(Budget(1.0, DELTA, adjacency=adjacency))
        sampled.authorize(STEP, sampled.max_steps(STEP))
        assert (sampled.get_epsilon(DELTA, adjacency=REPLACE_ONE) > 1.0) == (
            adjacency == ADD_REMOVE
        )


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("event", [FIXED, part("0"), Gaussian(9.0, {REPLACE_ONE: 2.0})])
def test_an_event_without_a_guarantee_there_is_refused_before_it_is_charged(event):
    accountant = Accountant(Budget(8.0, DELTA, adjacency=ADD_REMOVE))
    accountant.authorize(STEP)
    before = image(accountant)
    with pytest.raises(AdjacencyError):
        accountant.authorize(event)
    assert image(accountant) == before
    accountant.authorize(STEP)


def test_units_never_mix():
    users = Accountant(Budget(1.0, DELTA, "replace_one", unit="user"))
    users.require_unit("user")
    with pytest.raises(
        UnitError, match=r"unit must be 'user', the accountant's \(got 'example'\)"
    ):
        users.require_unit("example")
    with pytest.raises(
        ValueError, match=r"unit must be one of example, user \(got 'household'\)"
    ):
        Accountant(unit="household")


def test_mu_is_given_only_where_it_holds():
    accountant = Accountant(adjacency=REPLACE_ONE)
    accountant.authorize(Gaussian(2.0, {REPLACE_ONE: 1.0, ZERO_OUT: 0.5}), 4)
    assert accountant.get_mu() == pytest.approx(1.0)
    assert accountant.get_mu(adjacency=ZERO_OUT) == pytest.approx(0.5)
    for spoiler in (STEP, Gaussian(2.0, {REPLACE_ONE: 1.0}, failure=1e-6)):
        spoiled = Accountant(adjacency=REPLACE_ONE)
        spoiled.authorize(spoiler)
        with pytest.raises(ValueError, match="mu must be exact"):
            spoiled.get_mu()


def test_rho_is_given_only_where_it_holds():
    accountant = Accountant(adjacency=REPLACE_ONE)
    accountant.authorize(Gaussian(2.0, {REPLACE_ONE: 1.0}), 4)
    accountant.authorize(ZCDP(0.25))
    assert accountant.ledger.cost(REPLACE_ONE).rho == pytest.approx(0.75)
    for spoiler in (STEP, Gaussian(2.0, {REPLACE_ONE: 1.0}, failure=1e-6), ZCDP(0.25, 1e-9)):
        spoiled = Accountant(adjacency=REPLACE_ONE)
        spoiled.authorize(spoiler)
        cost = spoiled.ledger.cost(REPLACE_ONE)
        assert math.isnan(cost.rho) or cost.fails
