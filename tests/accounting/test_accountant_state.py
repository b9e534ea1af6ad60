from __future__ import annotations

import copy
import dataclasses
import io
import json
import math
import multiprocessing
import pickle

import joblib
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.accounting.ledgers import DELTA, FIXED, STEP, WHOLE, image, part, refusal
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.events import (
    ADD_REMOVE,
    ADJACENCIES,
    REPLACE_ONE,
    ZERO_OUT,
    Gaussian,
)
from torch_dpsco.errors import PrivacyError

# -- copies and checkpoints -------------------------------------------------------------------------------------------


def test_copies_share_the_ledger_and_pickling_raises():
    accountant = Accountant()
    assert copy.deepcopy(accountant) is accountant
    assert copy.deepcopy({"a": [accountant]})["a"][0] is accountant
    assert copy.copy(accountant) is accountant
    with pytest.raises(PrivacyError, match="a copy would spend unseen"):
        pickle.dumps(accountant)


def _spawned(accountant):
    multiprocessing.get_context("spawn").Process(target=len, args=(accountant,)).start()


def _sent_by_joblib(accountant):
    joblib.Parallel(n_jobs=2)(joblib.delayed(len)(accountant) for _ in range(2))


@pytest.mark.parametrize("send", [_spawned, _sent_by_joblib])
def test_who_sends_an_accountant_to_another_process_reads_why_not_and_what_to_do(send):
    with pytest.raises((PrivacyError, pickle.PicklingError)) as caught:
        send(Accountant())
    told = (
        f"{caught.value} {caught.value.__cause__}"  # joblib shows the cause above its own words
    )
    assert "would spend unseen" in told
    assert "in the worker" in told


def test_the_state_survives_torch_save_with_weights_only_and_json():
    accountant = Accountant(Budget(8.0, DELTA, "replace_one"))
    events = (
        STEP,
        FIXED,
        WHOLE,
        part("0"),
        part("1"),
        Gaussian(math.pi, {REPLACE_ONE: 0.1}, 1e-9),
    )
    for event in events:
        accountant.declare(event, 3)
    for event in events:
        accountant.authorize(event, 3)
    buffer = io.BytesIO()
    torch.save(accountant.state_dict(), buffer)
    buffer.seek(0)
    for state in (
        torch.load(buffer, weights_only=True),
        json.loads(json.dumps(accountant.state_dict())),
    ):
        resumed = Accountant(Budget(8.0, DELTA, "replace_one"))
        resumed.load_state_dict(state)
        assert image(resumed) == image(accountant)
        assert resumed.get_epsilon(DELTA) == accountant.get_epsilon(DELTA)
        state["ledger"].clear()  # the accountant holds a copy
        assert image(resumed) == image(accountant)


@pytest.mark.weekly
@given(
    st.lists(
        st.tuples(st.sampled_from([STEP, FIXED, WHOLE, part("0"), part("1")]), st.integers(1, 9))
    ),
    st.data(),
)
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
        late.load_state_dict(
            early.state_dict()
        )  # a run that was rolled back keeps what it charged since
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
        ({"version": 2}, r"version must be 3, .* \(got 2\)"),
        ({"version": None}, r"version must be 3, .* \(got None\)"),
        (
            {"config": {"adjacency": ADD_REMOVE, "unit": "example"}},
            "digest must match the ledger",
        ),
        ({"runs": []}, "digest must match the ledger"),
        ({"runs": 5}, "state must hold ledger, runs and config"),
        ({"ledger": [3]}, "state must hold ledger, runs and config"),
        ({"digest": "0" * 64}, "digest must match the ledger"),
        ({"digest": None}, "digest must match the ledger"),
        ({"ledger": []}, "digest must match the ledger"),
        ({"ledger": [{"type": "NonPrivate", "count": 1}]}, "digest must match the ledger"),
        ({"ledger": [{"type": "Unknown"}]}, "event type must be one of"),
        (
            {"ledger": [{"type": "PoissonGaussian", "noise_multiplier": 1.0, "q": 2.0}]},
            r"q must be in \[0, 1\]",
        ),
    ],
)
def test_a_state_of_something_else_is_refused(change, message):
    source, target = Accountant(), Accountant()
    source.authorize(STEP, 5)
    before = image(target)
    altered = {
        key: value for key, value in (source.state_dict() | change).items() if value is not None
    }
    with pytest.raises(ValueError, match=message):
        target.load_state_dict(altered)
    for nothing in ({}, None):
        with pytest.raises(ValueError, match="state_dict must be a mapping, not an empty one"):
            target.load_state_dict(nothing)
    assert image(target) == before


def test_a_state_of_another_adjacency_or_unit_is_refused():
    source = Accountant(adjacency=REPLACE_ONE)
    source.authorize(STEP, 5)
    for target, message in (
        (
            Accountant(adjacency=ADD_REMOVE),
            r"adjacency must be 'add_remove', this accountant's \(got 'replace_one'\)",
        ),
        (Accountant(unit="user"), r"unit must be 'user', this accountant's \(got 'example'\)"),
        (Accountant(Budget(1.0, DELTA, adjacency=ZERO_OUT)), r"adjacency must be 'zero_out'"),
    ):
        before = image(target)
        with pytest.raises(ValueError, match=message):
            target.load_state_dict(source.state_dict())
        assert image(target) == before


@pytest.mark.slow
def test_a_state_nested_without_end_is_refused():
    state, event = Accountant().state_dict(), {"type": "NonPrivate"}
    for _ in range(100_000):
        event = {"type": "Sequential", "events": [event]}
    with pytest.raises(ValueError, match="state must hold"):
        Accountant().load_state_dict(state | {"ledger": [event]})


def test_the_name_of_a_ledger_is_in_its_states_and_reports_and_stays():
    source, target = Accountant(), Accountant()
    source.authorize(STEP)
    assert source.ledger_id != target.ledger_id
    target.load_state_dict(source.state_dict())
    assert (
        target.ledger_id
        == source.ledger_id
        == target.state_dict()["id"]
        == target.report(DELTA).ledger_id
    )
    assert source.ledger_id in str(source.report(DELTA))


def test_one_altered_count_or_bit_of_a_float_is_noticed():
    source = Accountant()
    source.authorize(STEP, 5)
    row = source.state_dict()["ledger"][0]
    for change in ({"count": 4}, {"noise_multiplier": math.nextafter(1.0, 2.0).hex()}):
        with pytest.raises(ValueError, match="digest must match"):
            Accountant().load_state_dict(source.state_dict() | {"ledger": [row | change]})


def test_a_loaded_state_counts_against_the_budget():
    source = Accountant(adjacency=REPLACE_ONE)
    source.authorize(STEP, 10**4)
    tight = Accountant(Budget(1.0, DELTA, "replace_one"))
    assert tight.max_steps(STEP) > 0
    tight.load_state_dict(source.state_dict())
    assert tight.max_steps(STEP) == 0
    refusal(tight, STEP)


def test_an_empty_ledger_has_spent_nothing():
    accountant = Accountant()
    assert (
        accountant.get_epsilon(DELTA),
        accountant.get_delta(0.0),
        accountant.get_mu(),
        len(accountant),
    ) == (
        0,
        0,
        0,
        0,
    )
    assert dataclasses.asdict(accountant.report(DELTA))["epsilons"] == dict.fromkeys(
        ADJACENCIES, 0.0
    )
