"""Values of another shape than events, accountants and states take: the error names the field."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.accounting.ledgers import STEP
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.events import (
    REPLACE_ONE,
    Gaussian,
    Parallel,
    PoissonGaussian,
    Pure,
    RDPCurve,
    Sequential,
    clipped_gaussian,
    event_from_json,
)

ONE = clipped_gaussian(1.0)

# -- events -----------------------------------------------------------------------------------------------------------


def test_two_parts_of_one_name_are_refused():
    """In a ledger file 1 and "1" were one part, whose events were charged once."""
    with pytest.raises(ValueError, match="names that differ as text"):
        Parallel({1: [ONE], "1": [ONE]}, "p")


@pytest.mark.parametrize("word", ["no", "false", 1, 0, None, np.True_])
def test_a_public_key_is_never_granted_by_a_word(word):
    with pytest.raises(ValueError, match="key_public must be True or False"):
        Parallel({"0": [ONE]}, "p", "keyed", word)
    accountant = Accountant()
    with pytest.raises(ValueError, match="key_public"):
        accountant.part("0", partition="p", kind="keyed", key_public=word)


def test_two_sensitivities_of_one_adjacency_are_refused():
    with pytest.raises(ValueError, match="sens must name each adjacency once"):
        Gaussian(1.0, ((REPLACE_ONE, 5.0), (REPLACE_ONE, 1.0)))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: Gaussian(1.0, 2.0),
            r"sens must map adjacencies to sensitivities, .*\(got 2\.0\)",
        ),
        (lambda: Gaussian(1.0, REPLACE_ONE), "sens must map adjacencies"),
        (lambda: Gaussian(1.0, {REPLACE_ONE}), "sens must map adjacencies"),
        (lambda: Sequential(5), "events must be lists of events"),
        (lambda: Sequential(ONE), "events must be lists of events"),
        (lambda: Parallel(5, "p"), "parts must map names to their events"),
        (lambda: Parallel({"0": ONE}, "p"), "parts must be lists of events"),
        (lambda: Parallel({"0": []}, 5), r"partition must be a non-empty name \(got 5\)"),
        (
            lambda: Pure(1.0, REPLACE_ONE),
            r"adjacencies must be a tuple of names \(got 'replace_one'\)",
        ),
        (lambda: Pure(1.0, None), "adjacencies must be a tuple of names"),
        (lambda: RDPCurve(2.0, 1.0), "orders must be numbers"),
        (lambda: RDPCurve((1.0,), (1.0,)), "orders must be finite and > 1"),
        (lambda: PoissonGaussian(10**400, 0.1), "noise_multiplier must be a number"),
        (lambda: event_from_json({"type": "Pure", "eps": "0x1p99999"}), "eps must be a number"),
        (lambda: event_from_json({"type": "Pure", "eps": "zz"}), "eps must be a number"),
        (lambda: event_from_json({"type": []}), "event type must be one of"),
        (
            lambda: event_from_json({"type": "Gaussian", "sigma": 1.0, "sens": 5}),
            "sens must map adjacencies",
        ),
        (
            lambda: event_from_json({"type": "Parallel", "parts": 5, "partition": "p"}),
            "parts must map names",
        ),
    ],
)
def test_a_field_of_another_shape_is_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()


# -- accountant -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda d: torch.tensor(d, dtype=torch.float64), np.array])
def test_a_tensor_as_delta_is_read_each_time(make):
    accountant = Accountant()
    accountant.authorize(clipped_gaussian(5.0))
    delta = make(1e-5)
    large = accountant.get_epsilon(delta)
    delta.fill_(1e-9) if isinstance(delta, torch.Tensor) else delta.fill(1e-9)
    assert accountant.get_epsilon(delta) == accountant.get_epsilon(1e-9) > large


@pytest.mark.parametrize("delta", [[1e-5], np.array([1e-5, 1e-6])])
def test_a_delta_that_is_no_number_is_named(delta):
    with pytest.raises(ValueError, match="delta must be a number"):
        Accountant().get_epsilon(delta)


def test_a_number_is_no_budget():
    with pytest.raises(ValueError, match=r"budget must be a Budget, .*\(got 1\.0\)"):
        Accountant(1.0)


# -- states -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("config", "x"),
        ("config", [[]]),
        ("runs", [[]]),
        ("runs", "x"),
    ],
)
def test_a_part_of_a_state_of_another_shape_is_named(key, value):
    source, target = Accountant(), Accountant()
    source.authorize(STEP)
    with pytest.raises(ValueError, match=rf"(state|history) must .*|{key} must"):
        target.load_state_dict(source.state_dict() | {key: value})
    assert len(target) == 0


@pytest.mark.parametrize("state", [5, "x", [1]])
def test_a_state_that_is_none_is_refused(state):
    with pytest.raises(ValueError, match="state_dict must be a mapping"):
        Accountant().load_state_dict(state)
