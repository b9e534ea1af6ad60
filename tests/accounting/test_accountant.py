from __future__ import annotations

import copy
import dataclasses
import io
import json
import math
import pickle
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.events import (
    ADD_REMOVE,
    ADJACENCIES,
    REPLACE_ONE,
    ZERO_OUT,
    Event,
    Gaussian,
    NonPrivate,
    Parallel,
    PoissonGaussian,
    Repeat,
    WORGaussian,
    clipped_gaussian,
)
from torch_dpsco.accounting.filters import Budget
from torch_dpsco.errors import AdjacencyError, BudgetExceeded, PrivacyError, UnitError

STEP = PoissonGaussian(2.0, 0.01)
FIXED = WORGaussian(4.0, 1, 100)
WHOLE = clipped_gaussian(50.0)
DELTA = 1e-5


def part(name: str, noise: float = 30.0) -> Parallel:
    return Parallel({name: [Gaussian(noise, {ZERO_OUT: 1.0, REPLACE_ONE: 2.0})]}, "p")


def image(accountant: Accountant) -> str:
    """Everything that is stored, to the bit."""
    return json.dumps(accountant.state_dict()) + str(len(accountant))


def refusal(accountant: Accountant, event: Event, count: int = 1) -> str:
    with pytest.raises(BudgetExceeded) as caught:
        accountant.authorize(event, count)
    return str(caught.value)


# -- budget -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one_by_one", [True, False])
@pytest.mark.parametrize("event", [STEP, FIXED, WHOLE, part("0"), Repeat(STEP, 3)])
def test_a_budget_admits_exactly_max_steps(event, one_by_one):
    accountant = Accountant(Budget(1.2, DELTA))
    room = accountant.max_steps(event)
    assert room > 1
    for _ in range(room if one_by_one else 1):
        accountant.authorize(event, 1 if one_by_one else room)
    assert accountant.max_steps(event) == 0
    assert accountant.get_epsilon(DELTA) <= 1.2
    refusal(accountant, event)
    assert accountant.ledger.evaluate(DELTA, REPLACE_ONE, extra=event).epsilon > 1.2


@pytest.mark.parametrize("event", [STEP, FIXED, WHOLE, part("0")])
def test_a_budget_is_exact_to_the_last_bit(event):
    spent = Accountant()
    spent.authorize(event, 20)
    target = spent.get_epsilon(DELTA)
    assert Accountant(Budget(target, DELTA)).max_steps(event) == 20
    assert Accountant(Budget(math.nextafter(target, 0.0), DELTA)).max_steps(event) == 19


def test_a_refusal_leaves_every_bit_and_says_what_was_spent_asked_and_left():
    accountant = Accountant(Budget(1.0, DELTA))
    accountant.authorize(STEP, 40)
    room, before = accountant.max_steps(STEP), image(accountant)
    spent = accountant.get_epsilon(DELTA)
    message = refusal(accountant, STEP, room + 1)
    asked = accountant.ledger.evaluate(DELTA, REPLACE_ONE, extra=STEP, count=room + 1).epsilon
    assert image(accountant) == before
    assert accountant.get_epsilon(DELTA) == spent
    for figure in ("past the budget of 1 at", "replace_one", "in 40 events", f"room for {room} more", str(STEP)):
        assert figure in message
    for label, exact in ((r"spent (\S+)", spent), (r"epsilon to ([\d.]+)", asked), (r"admit it: (\S+)", asked)):
        shown = float(re.search(label, message).group(1))
        assert exact <= shown <= exact * (1 + 1e-5)
    accountant.authorize(STEP, room)  # what was said to fit does fit


@pytest.mark.parametrize("event", [STEP, FIXED, WHOLE])
def test_the_named_smallest_epsilon_admits_the_event(event):
    message = refusal(Accountant(Budget(1e-6, DELTA)), event, 7)
    smallest = float(re.search(r"admit it: (\S+)$", message).group(1))
    Accountant(Budget(smallest, DELTA)).authorize(event, 7)


def test_a_smaller_event_is_still_admitted_after_a_refusal():
    accountant = Accountant(Budget(1.0, DELTA))
    accountant.authorize(STEP, accountant.max_steps(STEP))
    refusal(accountant, STEP)
    accountant.authorize(PoissonGaussian(50.0, 1e-4), 1)
    assert accountant.get_epsilon(DELTA) <= 1.0


@pytest.mark.parametrize("event", [NonPrivate(), clipped_gaussian(0.0), PoissonGaussian(0.0, 1e-6)])
def test_no_budget_admits_a_release_without_noise(event):
    accountant = Accountant(Budget(1e9, 0.999))
    assert accountant.max_steps(event) == 0
    assert "epsilon to inf" in refusal(accountant, event)


@settings(max_examples=60)
@given(
    st.floats(0.05, 8),
    st.sampled_from([1e-3, DELTA, 1e-9]),
    st.lists(
        st.tuples(
            st.sampled_from([STEP, FIXED, WHOLE, part("0"), part("1", 40.0), Gaussian(9, {REPLACE_ONE: 1}, 1e-10)]),
            st.integers(0, 400),
        ),
        max_size=25,
    ),
)
def test_no_sequence_of_requests_ever_passes_the_budget(epsilon, delta, requests):
    accountant = Accountant(Budget(epsilon, delta))
    admitted = 0
    for event, count in requests:
        before = image(accountant)
        try:
            accountant.authorize(event, count)
            admitted += count
        except BudgetExceeded:
            assert image(accountant) == before
            assert accountant.ledger.evaluate(delta, REPLACE_ONE, extra=event, count=count).epsilon > epsilon
        assert accountant.get_epsilon(delta) <= epsilon
    assert len(accountant) == admitted


def test_interleaved_events_are_decided_on_all_that_was_charged():
    accountant = Accountant(Budget(1.0, DELTA))
    events = [STEP, WHOLE, STEP, FIXED, part("0"), part("1")] * 1000
    admitted = 0
    while accountant.admits(events[admitted]):
        accountant.authorize(events[admitted])
        admitted += 1
    refusal(accountant, events[admitted])
    assert admitted > 50
    assert accountant.get_epsilon(DELTA) <= 1.0


def test_room_found_before_is_forgotten_when_anything_else_is_charged():
    accountant = Accountant(Budget(1.0, DELTA))
    accountant.authorize(STEP)
    accountant.authorize(STEP)  # from now on steps are known to fit without a new evaluation
    accountant.record(WHOLE, 100)
    assert accountant.get_epsilon(DELTA) > 1.0  # what has happened is recorded, budget or not
    refusal(accountant, STEP)
    other = Accountant(Budget(1.0, DELTA))
    other.authorize(STEP)
    other.authorize(STEP)
    other.ledger.add(WHOLE, 100)
    refusal(other, STEP)


def test_a_budget_lowered_on_the_way_counts_at_once():
    accountant = Accountant(Budget(1.0, DELTA))
    accountant.authorize(STEP)
    accountant.authorize(STEP)
    accountant.budget = Budget(0.01, DELTA)
    refusal(accountant, STEP)


def test_a_million_equal_steps_are_one_entry():
    accountant = Accountant(Budget(4.0, DELTA))
    tiny = PoissonGaussian(4.0, 1e-4)
    for _ in range(10**4):
        accountant.authorize(tiny, 100)
    assert len(accountant) == 10**6
    assert len(accountant.state_dict()["ledger"]) == 1


def test_a_request_for_nothing_or_for_no_event_leaves_every_bit():
    accountant = Accountant(Budget(1e-3, DELTA))
    before = image(accountant)
    accountant.authorize(NonPrivate(), 0)
    accountant.authorize(Repeat(NonPrivate(), 0))
    assert (image(accountant), accountant.get_epsilon(DELTA)) == (before, 0.0)
    unlimited = Accountant()
    with pytest.raises(ValueError, match="event must be a value of torch_dpsco"):
        unlimited.authorize("step")
    assert image(unlimited) == image(Accountant())
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
            assert accountant.get_epsilon(DELTA, adjacency=other) == accountant.ledger.epsilon(DELTA, other)
    with pytest.raises(ValueError, match=r"adjacency must be one of .* \(got 'swap'\)"):
        accountant.get_epsilon(DELTA, adjacency="swap")


def test_a_budget_is_measured_in_its_own_adjacency():
    """Equal steps: replace_one costs more, so that its budget admits fewer of them."""
    room = {a: Accountant(Budget(1.0, DELTA, adjacency=a)).max_steps(WHOLE) for a in ADJACENCIES}
    assert room[ADD_REMOVE] == room[ZERO_OUT] >= 4 * room[REPLACE_ONE] - 3 > 0
    for adjacency in (ADD_REMOVE, REPLACE_ONE):
        sampled = Accountant(Budget(1.0, DELTA, adjacency=adjacency))
        sampled.authorize(STEP, sampled.max_steps(STEP))
        assert (sampled.get_epsilon(DELTA, adjacency=REPLACE_ONE) > 1.0) == (adjacency == ADD_REMOVE)


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
    users = Accountant(Budget(1.0, DELTA, unit="user"))
    users.require_unit("user")
    with pytest.raises(UnitError, match=r"unit must be 'user', the accountant's \(got 'example'\)"):
        users.require_unit("example")
    with pytest.raises(ValueError, match=r"unit must be one of example, user \(got 'household'\)"):
        Accountant(unit="household")


def test_mu_and_rho_are_given_only_where_they_hold():
    accountant = Accountant()
    accountant.authorize(Gaussian(2.0, {REPLACE_ONE: 1.0, ZERO_OUT: 0.5}), 4)
    assert (accountant.get_mu(), accountant.get_rho()) == pytest.approx((1.0, 0.5))
    assert accountant.get_mu(adjacency=ZERO_OUT) == pytest.approx(0.5)
    for spoiler in (STEP, Gaussian(2.0, {REPLACE_ONE: 1.0}, failure=1e-6)):
        spoiled = Accountant()
        spoiled.authorize(spoiler)
        for query in (spoiled.get_mu, spoiled.get_rho):
            with pytest.raises(ValueError, match="mu must be exact"):
                query()


# -- copies and checkpoints -------------------------------------------------------------------------------------------


def test_copies_share_the_ledger_and_pickling_raises():
    accountant = Accountant()
    assert copy.deepcopy(accountant) is accountant
    assert copy.deepcopy({"a": [accountant]})["a"][0] is accountant
    for spread in (pickle.dumps, copy.copy):
        with pytest.raises(PrivacyError, match="a copy would spend unseen"):
            spread(accountant)


def test_the_state_survives_torch_save_with_weights_only_and_json():
    accountant = Accountant(Budget(8.0, DELTA))
    for event in (STEP, FIXED, WHOLE, part("0"), part("1"), Gaussian(math.pi, {REPLACE_ONE: 0.1}, 1e-9)):
        accountant.authorize(event, 3)
    buffer = io.BytesIO()
    torch.save(accountant.state_dict(), buffer)
    buffer.seek(0)
    for state in (torch.load(buffer, weights_only=True), json.loads(json.dumps(accountant.state_dict()))):
        resumed = Accountant(Budget(8.0, DELTA))
        resumed.load_state_dict(state)
        assert image(resumed) == image(accountant)
        assert resumed.get_epsilon(DELTA) == accountant.get_epsilon(DELTA)
        state["ledger"].clear()  # the accountant holds a copy
        assert image(resumed) == image(accountant)


@given(st.lists(st.tuples(st.sampled_from([STEP, FIXED, WHOLE, part("0"), part("1")]), st.integers(1, 9))), st.data())
def test_a_resumed_run_spends_what_an_uninterrupted_one_does(run, data):
    cut = data.draw(st.integers(0, len(run)))
    whole, first, second = Accountant(), Accountant(), Accountant()
    for event, count in run:
        whole.authorize(event, count)
    for event, count in run[:cut]:
        first.authorize(event, count)
    second.load_state_dict(first.state_dict())
    for event, count in run[cut:]:
        second.authorize(event, count)
    assert second.ledger.to_json() == whole.ledger.to_json()
    assert second.ledger.digest() == whole.ledger.digest()
    assert second.get_epsilon(DELTA) == whole.get_epsilon(DELTA)


def test_loading_never_forgets_what_was_charged_here():
    early = Accountant()
    early.authorize(STEP, 5)
    early.authorize(part("0"))
    for event in (STEP, WHOLE, part("0"), part("1")):
        late, ahead, elsewhere = Accountant(), Accountant(), Accountant()
        late.load_state_dict(early.state_dict())
        late.authorize(event)
        before = image(late)
        late.load_state_dict(early.state_dict())  # a run that was rolled back keeps what it charged since
        assert image(late) == before
        ahead.load_state_dict(late.state_dict())
        assert image(ahead) == before
        elsewhere.load_state_dict(early.state_dict())
        elsewhere.authorize(event)  # equal counts, but other releases
        with pytest.raises(PrivacyError, match="loading would forget events charged here"):
            late.load_state_dict(elsewhere.state_dict())
        assert image(late) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, r"version must be 1 \(got 2\)"),
        ({"version": None}, r"version must be 1 \(got None\)"),
        ({"adjacency": ADD_REMOVE}, r"adjacency must be 'replace_one', this accountant's \(got 'add_remove'\)"),
        ({"unit": "user"}, r"unit must be 'example', this accountant's \(got 'user'\)"),
        ({"digest": "0" * 64}, "digest must match the ledger"),
        ({"digest": None}, "digest must match the ledger"),
        ({"ledger": []}, "digest must match the ledger"),
        ({"ledger": [{"type": "NonPrivate", "count": 1}]}, "digest must match the ledger"),
        ({"ledger": [{"type": "Laplace"}]}, "event type must be one of"),
    ],
)
def test_a_state_of_something_else_is_refused(change, message):
    source, target = Accountant(), Accountant()
    source.authorize(STEP, 5)
    before = image(target)
    altered = {key: value for key, value in (source.state_dict() | change).items() if value is not None}
    for state in (altered, {}):
        with pytest.raises(ValueError, match=message if state else "version must be 1"):
            target.load_state_dict(state)
        assert image(target) == before


def test_one_altered_count_or_bit_of_a_float_is_noticed():
    source = Accountant()
    source.authorize(STEP, 5)
    row = source.state_dict()["ledger"][0]
    for change in ({"count": 4}, {"noise_multiplier": math.nextafter(1.0, 2.0).hex()}):
        with pytest.raises(ValueError, match="digest must match"):
            Accountant().load_state_dict(source.state_dict() | {"ledger": [row | change]})


def test_a_loaded_state_counts_against_the_budget():
    source = Accountant()
    source.authorize(STEP, 10**4)
    tight = Accountant(Budget(1.0, DELTA))
    assert tight.max_steps(STEP) > 0
    tight.load_state_dict(source.state_dict())
    assert tight.max_steps(STEP) == 0
    refusal(tight, STEP)


def test_an_empty_ledger_has_spent_nothing():
    accountant = Accountant()
    assert (accountant.get_epsilon(DELTA), accountant.get_delta(0.0), accountant.get_mu(), len(accountant)) == (
        0,
        0,
        0,
        0,
    )
    assert dataclasses.asdict(accountant.report(DELTA))["epsilons"] == dict.fromkeys(ADJACENCIES, 0.0)
