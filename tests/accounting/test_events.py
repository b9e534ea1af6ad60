from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_dpsco.accounting.curves import METHODS, cost_of
from torch_dpsco.accounting.events import (
    ADD_REMOVE,
    ADJACENCIES,
    CLIP_UNITS,
    REPLACE_ONE,
    ZERO_OUT,
    Event,
    Gaussian,
    NonPrivate,
    Parallel,
    PoissonGaussian,
    Repeat,
    Sequential,
    WORGaussian,
    check_adjacency,
    clipped_gaussian,
    event_from_json,
    event_to_json,
)
from torch_dpsco.accounting.ledger import Ledger
from torch_dpsco.errors import AdjacencyError

SENS = {REPLACE_ONE: 2.0}
numbers = st.floats(0, allow_infinity=False)
names = st.text(min_size=1, max_size=8)


def simple_events() -> st.SearchStrategy[Event]:
    sens = st.dictionaries(st.sampled_from(ADJACENCIES), numbers, min_size=1)
    sizes = st.tuples(st.integers(1, 10**9), st.integers(1, 10**9)).map(sorted)
    return st.one_of(
        st.builds(Gaussian, numbers, sens, st.floats(0, 1, exclude_max=True)),
        st.builds(PoissonGaussian, numbers, st.floats(0, 1)),
        st.builds(lambda noise, pair: WORGaussian(noise, *pair), numbers, sizes),
        st.just(NonPrivate()),
    )


def events() -> st.SearchStrategy[Event]:
    def nested(inner: st.SearchStrategy[Event]) -> st.SearchStrategy[Event]:
        return st.one_of(
            st.builds(Repeat, inner, st.integers(0, 10**12)),
            st.builds(Sequential, st.lists(inner, max_size=3)),
            st.builds(
                Parallel, st.dictionaries(names, st.lists(inner, max_size=2), max_size=3), names
            ),
        )

    return st.recursive(simple_events(), nested, max_leaves=6)


# -- validation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Gaussian(-1, SENS), r"sigma must be >= 0 \(got -1\.0\)"),
        (lambda: Gaussian(math.nan, SENS), r"sigma must be >= 0 \(got nan\)"),
        (lambda: Gaussian(math.inf, SENS), r"sigma must be finite \(got inf\)"),
        (lambda: Gaussian("1", SENS), r"sigma must be a number \(got '1'\)"),
        (lambda: Gaussian(True, SENS), r"sigma must be a number \(got True\)"),
        (lambda: Gaussian(None, SENS), r"sigma must be a number \(got None\)"),
        (lambda: Gaussian(torch.ones(2), SENS), r"sigma must be a number \(got Tensor"),
        (lambda: Gaussian(1, {REPLACE_ONE: -2}), r"sens must be >= 0 \(got -2\.0\)"),
        (lambda: Gaussian(1, {REPLACE_ONE: math.inf}), r"sens must be finite \(got inf\)"),
        (lambda: Gaussian(1, {}), r"sens must name at least one adjacency \(got none\)"),
        (
            lambda: Gaussian(1, {"swap": 1}),
            r"adjacency must be one of add_remove, zero_out, replace_one \(got 'swap'\)",
        ),
        (lambda: Gaussian(1, SENS, -0.1), r"failure must be >= 0 \(got -0\.1\)"),
        (lambda: Gaussian(1, SENS, 1), r"failure must be in \[0, 1\) \(got 1\.0\)"),
        (lambda: Gaussian(1, SENS, math.nan), r"failure must be >= 0 \(got nan\)"),
        (lambda: PoissonGaussian(-1, 0.1), r"noise_multiplier must be >= 0 \(got -1\.0\)"),
        (lambda: PoissonGaussian(1, 1.5), r"q must be in \[0, 1\] \(got 1\.5\)"),
        (lambda: PoissonGaussian(1, -0.1), r"q must be in \[0, 1\] \(got -0\.1\)"),
        (lambda: PoissonGaussian(1, math.nan), r"q must be in \[0, 1\] \(got nan\)"),
        (lambda: WORGaussian(-1, 1, 2), r"noise_multiplier must be >= 0 \(got -1\.0\)"),
        (lambda: WORGaussian(1, 0, 2), r"batch_size must be an integer >= 1 \(got 0\)"),
        (lambda: WORGaussian(1, 1.0, 2), r"batch_size must be an integer \(got 1\.0\)"),
        (lambda: WORGaussian(1, 1, 0), r"dataset_size must be an integer >= 1 \(got 0\)"),
        (lambda: WORGaussian(1, 3, 2), r"batch_size must be <= dataset_size=2 \(got 3\)"),
        (lambda: WORGaussian(1, True, 2), r"batch_size must be an integer >= 0 \(got True\)"),
        (lambda: Repeat(NonPrivate(), -1), r"n must be an integer >= 0 \(got -1\)"),
        (lambda: Repeat(NonPrivate(), 1.5), r"n must be an integer \(got 1\.5\)"),
        (lambda: Parallel({"0": ()}, ""), r"partition must be a non-empty name \(got ''\)"),
        (lambda: check_adjacency("both"), r"adjacency must be one of .* \(got 'both'\)"),
    ],
)
def test_a_bad_field_is_named_with_its_value_and_range(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("scalar", [np.float64, np.float32, np.array, torch.tensor])
def test_scalars_of_numpy_and_torch_become_plain_floats(scalar):
    sampled = PoissonGaussian(scalar(1.5), scalar(0.25))
    whole = Gaussian(scalar(1.5), {REPLACE_ONE: scalar(0.5)}, scalar(0.125))
    for value in (
        sampled.noise_multiplier,
        sampled.q,
        whole.sigma,
        whole.failure,
        *dict(whole.sens).values(),
    ):
        assert type(value) is float
    assert sampled == PoissonGaussian(1.5, 0.25)
    assert whole == Gaussian(1.5, {REPLACE_ONE: 0.5}, 0.125)


@pytest.mark.parametrize("scalar", [np.int64, np.int32, torch.tensor])
def test_integers_of_numpy_and_torch_become_plain_ints(scalar):
    event = Repeat(WORGaussian(1, scalar(2), scalar(10)), scalar(3))
    assert [type(v) for v in (event.n, event.event.batch_size, event.event.dataset_size)] == [
        int
    ] * 3
    assert event == Repeat(WORGaussian(1, 2, 10), 3)


# -- values -----------------------------------------------------------------------------------------------------------


def test_equal_events_are_one_key_however_they_were_written():
    first = Gaussian(1, {REPLACE_ONE: 2, ADD_REMOVE: 1})
    second = Gaussian(1.0, ((ADD_REMOVE, 1.0), (REPLACE_ONE, 2.0)))
    assert first == second
    assert len({first, second, Gaussian(1, {REPLACE_ONE: 2})}) == 2
    assert Parallel({"a": [first], "b": []}, "p") == Parallel({"b": (), "a": (second,)}, "p")


@pytest.mark.slow
@given(events(), events())
def test_events_are_equal_and_hash_equal_exactly_if_their_json_is(first, second):
    assert (first == second) == (event_to_json(first) == event_to_json(second))
    assert hash(first) == hash(event_from_json(event_to_json(first)))


@pytest.mark.parametrize(
    "event",
    [Gaussian(1, SENS), PoissonGaussian(1, 0.1), WORGaussian(1, 1, 2), Repeat(NonPrivate(), 1)],
)
def test_events_cannot_be_changed(event):
    for field in dataclasses.fields(event):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(event, field.name, 0.0)


def test_an_event_does_not_follow_the_mapping_it_was_made_from():
    sens, parts = {REPLACE_ONE: 1.0}, {"0": [Gaussian(1, SENS)]}
    event, block = Gaussian(1, sens), Parallel(parts, "p")
    sens[REPLACE_ONE], parts["0"] = 0.0, []
    assert event.sensitivity(REPLACE_ONE) == 1.0
    assert block.items() == (("0", (Gaussian(1, SENS),)),)


def test_a_sensitivity_that_was_not_given_is_refused_naming_event_and_adjacency():
    event = Gaussian(3.0, {ZERO_OUT: 1.0, REPLACE_ONE: 2.0})
    assert (event.sensitivity(ZERO_OUT), event.sensitivity(REPLACE_ONE)) == (1.0, 2.0)
    with pytest.raises(AdjacencyError, match=r"Gaussian\(sigma=3\.0.*add_remove"):
        event.sensitivity(ADD_REMOVE)
    assert event.only(REPLACE_ONE) == Gaussian(3.0, {REPLACE_ONE: 2.0})
    with pytest.raises(AdjacencyError):
        event.only(ADD_REMOVE)
    with pytest.raises(AdjacencyError):
        event.only(REPLACE_ONE).sensitivity(ZERO_OUT)


def test_a_clipped_sum_moves_by_one_clip_and_by_two_if_a_row_is_replaced():
    assert (
        dict(clipped_gaussian(0.7).sens)
        == dict(CLIP_UNITS)
        == {ADD_REMOVE: 1.0, ZERO_OUT: 1.0, REPLACE_ONE: 2.0}
    )
    assert clipped_gaussian(0.7).sigma == 0.7


def test_a_restricted_event_keeps_its_noise_and_failure():
    assert Gaussian(3.0, CLIP_UNITS, 0.25).only(ZERO_OUT) == Gaussian(3.0, {ZERO_OUT: 1.0}, 0.25)


# -- JSON -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(events())
def test_the_json_round_trip_is_bit_exact(event):
    text = json.dumps(event_to_json(event), allow_nan=False)
    back = event_from_json(json.loads(text))
    assert back == event
    assert json.dumps(event_to_json(back)) == text


@pytest.mark.slow
@given(events())
def test_readable_json_means_the_same_event(event):
    assert event_from_json(json.loads(json.dumps(event_to_json(event, exact=False)))) == event


@pytest.mark.parametrize(
    "event", [PoissonGaussian(1, 0.1), Parallel({"0": [NonPrivate()]}, "p")]
)
def test_a_count_in_json_repeats_the_event(event):
    assert event_from_json(event_to_json(event) | {"count": 3}) == Repeat(event, 3)
    assert event_from_json(event_to_json(event) | {"count": 1}) == event
    assert len(Ledger.from_json([event_to_json(event) | {"count": 0}])) == 0


def test_a_count_inside_a_part_repeats_the_event_there():
    row = event_to_json(PoissonGaussian(1, 0.1)) | {"count": 5}
    data = {"type": "Parallel", "partition": "p", "parts": {"0": [row]}}
    assert event_from_json(data) == Parallel({"0": [Repeat(PoissonGaussian(1, 0.1), 5)]}, "p")


def test_an_unknown_field_is_refused():
    """It may say that the event costs more than what it says without the field."""
    with pytest.raises(
        ValueError, match=r"PoissonGaussian must have no field but its own \(got items\)"
    ):
        event_from_json(
            {"type": "PoissonGaussian", "noise_multiplier": 1.0, "q": 0.1, "items": 2}
        )
    with pytest.raises(
        ValueError, match=r"Parallel must have no field but its own \(got overlap\)"
    ):
        event_from_json({"type": "Parallel", "partition": "p", "parts": {}, "overlap": 2})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, r"event type must be one of Gaussian, .* \(got None\)"),
        ({"type": "Cauchy", "scale": 1}, r"event type must be one of .* \(got 'Cauchy'\)"),
        (
            {"type": "PoissonGaussian", "q": 0.1},
            r"missing 1 required positional argument: 'noise_multiplier'",
        ),
        ({"type": "PoissonGaussian", "q": 2, "noise_multiplier": 1}, r"q must be in \[0, 1\]"),
        (
            {"type": "PoissonGaussian", "q": "nan", "noise_multiplier": 1},
            r"q must be in \[0, 1\]",
        ),
        ({"type": "Gaussian", "sigma": 1, "sens": {"swap": 1}}, r"adjacency must be one of"),
        (
            {"type": "Gaussian", "sigma": "inf", "sens": {REPLACE_ONE: 1}},
            r"sigma must be finite",
        ),
        ({"type": "NonPrivate", "count": -1}, r"n must be an integer >= 0 \(got -1\)"),
        ({"type": "NonPrivate", "count": 0.5}, r"n must be an integer \(got 0\.5\)"),
    ],
)
def test_damaged_json_is_refused_with_the_field(data, message):
    with pytest.raises(ValueError, match=message):
        event_from_json(data)


# -- costs at the edges -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("adjacency", ADJACENCIES)
@pytest.mark.parametrize(
    "event", [NonPrivate(), Gaussian(0, CLIP_UNITS), clipped_gaussian(1e-300)]
)
def test_no_noise_costs_infinity_and_never_nan(event, adjacency, method):
    for ledger in (Ledger([event]), Ledger([Repeat(event, 10**6), clipped_gaussian(1.0)])):
        assert ledger.epsilon(1e-5, adjacency, method) == math.inf
        assert ledger.delta(1.0, adjacency) == 1.0
    assert Ledger([Repeat(event, 0)]).epsilon(1e-5, adjacency, method) == 0.0


@pytest.mark.parametrize("adjacency", [ZERO_OUT, REPLACE_ONE])
@pytest.mark.parametrize(
    "event", [PoissonGaussian(0, 1e-9), PoissonGaussian(0, 1), WORGaussian(0, 1, 10)]
)
def test_sampling_does_not_hide_a_release_without_noise(event, adjacency):
    assert Ledger([event]).epsilon(0.999, adjacency) == math.inf
    assert Ledger([event]).delta(50.0, adjacency) == 1.0


@pytest.mark.parametrize("noise", [0.0, 1e-300, 1e-3, 1.0, 1e8, 1e300])
def test_rate_zero_costs_nothing_and_rate_one_is_the_unsampled_gaussian(noise):
    for adjacency in ADJACENCIES:
        assert Ledger([PoissonGaussian(noise, 0.0)]).epsilon(1e-5, adjacency) == 0.0
        sampled, whole = (
            cost_of(e, adjacency) for e in (PoissonGaussian(noise, 1.0), clipped_gaussian(noise))
        )
        assert sampled.mu_squared == whole.mu_squared
        assert (sampled.rdp == whole.rdp).all()


def test_a_subset_of_everything_is_the_unsampled_gaussian():
    for adjacency in (ZERO_OUT, REPLACE_ONE):
        whole = Ledger([Gaussian(1.5, {adjacency: 2.0})])
        assert Ledger([WORGaussian(1.5, 7, 7)]).epsilon(1e-5, adjacency) == whole.epsilon(
            1e-5, adjacency
        )


def test_a_sensitivity_of_zero_costs_nothing_even_without_noise():
    for sigma in (0.0, 1.0):
        assert Ledger([Gaussian(sigma, {REPLACE_ONE: 0.0})]).epsilon(1e-5, REPLACE_ONE) == 0.0


@pytest.mark.weekly
@given(simple_events(), st.sampled_from(ADJACENCIES), st.floats(1e-12, 0.9))
def test_no_event_of_any_size_gives_nan_or_a_warning(event, adjacency, delta):
    try:
        epsilon = Ledger([event]).epsilon(delta, adjacency)
    except AdjacencyError:
        return
    assert 0.0 <= epsilon <= math.inf
    assert 0.0 <= Ledger([event]).delta(min(epsilon, 1e300), adjacency) <= 1.0


def test_fixed_size_batches_have_no_add_remove_guarantee():
    with pytest.raises(AdjacencyError, match=r"WORGaussian.*add_remove"):
        cost_of(WORGaussian(1, 2, 10), ADD_REMOVE)
    with pytest.raises(AdjacencyError):  # not even when the subset is everything
        cost_of(WORGaussian(1, 10, 10), ADD_REMOVE)
