"""The event of a pass of secret draws: its JSON, its costs under every method, and what it is no cheaper than."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import special

import torch_dpsco as dp
from tests.reference.papers.allocation import allocation_epsilon
from torch_dpsco.accounting import calibrate
from torch_dpsco.accounting.analysis.allocation import allocation_law, allocation_noise
from torch_dpsco.accounting.analysis.gaussian import gaussian_epsilon
from torch_dpsco.accounting.curves import cost_of, laws_of
from torch_dpsco.accounting.events import (
    ADD_REMOVE,
    ADJACENCIES,
    REPLACE_ONE,
    ZERO_OUT,
    Gaussian,
    Parallel,
    RandomAllocation,
    Repeat,
    clipped_gaussian,
    event_from_json,
    event_to_json,
)
from torch_dpsco.accounting.ledger import Ledger

DELTA = 1e-5
PASS = RandomAllocation(1.0, 100)


def test_what_a_pass_is_on_the_wire() -> None:
    assert set(event_to_json(PASS)) == {"type", "noise_multiplier", "steps"}
    full = RandomAllocation(1.5, 100, releases=2, exact=True)
    for event in (PASS, full):
        for exact in (True, False):
            assert event_from_json(event_to_json(event, exact=exact)) == event
    assert str(PASS) == "RandomAllocation(noise_multiplier=1.0, steps=100)"


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"noise_multiplier": -1.0}, "noise_multiplier must be"),
        ({"steps": 0}, "steps must be"),
        ({"steps": 2.5}, "steps must be"),
        ({"releases": 0}, "releases must be"),
        ({"exact": "yes"}, "exact must be"),
    ],
)
def test_a_bad_pass_is_refused(fields: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        RandomAllocation(**({"noise_multiplier": 1.0, "steps": 100} | fields))


@pytest.mark.parametrize(
    ("adjacency", "epsilon"), [(ADD_REMOVE, 0.621), (ZERO_OUT, 0.621), (REPLACE_ONE, 0.826)]
)
def test_a_ledger_quotes_the_law_of_the_pass(adjacency: Any, epsilon: float) -> None:
    assert laws_of(PASS, adjacency) == (allocation_law(1.0, 100, adjacency),)
    ledger = Ledger([PASS])
    found = ledger.epsilon(DELTA, adjacency)
    assert found == pytest.approx(epsilon, abs=1e-3)
    assert (
        found
        == allocation_epsilon(1.0, 100, DELTA, adjacency)
        == ledger.epsilon(DELTA, adjacency, "pld")
    )


@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_a_pass_has_no_exact_gaussian_figure(adjacency: Any) -> None:
    """Its mu is that of one release, a bound; if it were held to be exact, no tighter figure would be looked for."""
    cost, one = cost_of(PASS, adjacency), cost_of(clipped_gaussian(1.0), adjacency)
    assert math.isnan(cost.mu_squared)
    assert cost.rho == one.rho
    assert (cost.rdp <= one.rdp * (1 + 1e-12)).all()
    assert math.isinf(cost.pure)


def test_a_pass_of_one_step_is_a_release() -> None:
    for adjacency in ADJACENCIES:
        one = Ledger([clipped_gaussian(2.0)]).epsilon(DELTA, adjacency)
        assert Ledger([RandomAllocation(2.0, 1)]).epsilon(DELTA, adjacency) == pytest.approx(
            one, rel=1e-12
        )
        assert math.isinf(Ledger([RandomAllocation(0.0, 10)]).epsilon(DELTA, adjacency))


def test_releases_of_one_batch_lower_the_noise_of_its_pass() -> None:
    """Four releases tell as much as one with half the noise, rounded to the safe side; not as four passes do."""
    four = RandomAllocation(2.0, 50, releases=4)
    assert 0 < 1.0 - four.noise < 1e-14
    assert Ledger([four]).epsilon(DELTA, ADD_REMOVE) == pytest.approx(
        Ledger([RandomAllocation(1.0, 50)]).epsilon(DELTA, ADD_REMOVE), rel=1e-9
    )


def test_a_pass_inside_a_part_is_an_event_of_the_part() -> None:
    """Two parts that hold a pass each cost what one does."""
    parts = Parallel({"a": (PASS,), "b": (PASS,)}, "p", "keyed", key_public=True)
    assert Ledger([parts]).epsilon(DELTA, ADD_REMOVE) == Ledger([PASS]).epsilon(
        DELTA, ADD_REMOVE
    )


def test_noise_is_calibrated_for_the_passes_of_a_design() -> None:
    design = dp.Assigned(1, 100)
    noise = calibrate.noise_multiplier(
        1.0, DELTA, design=design, steps=100, adjacency=ADD_REMOVE
    )
    assert (
        noise == allocation_noise(1.0, DELTA, 100, ADD_REMOVE) == pytest.approx(0.8731, abs=2e-4)
    )
    assert (
        calibrate.design_epsilon(noise, DELTA, design=design, steps=1, adjacency=ADD_REMOVE)
        <= 1.0
    )
    plain = dp.Assigned(1, 100, amplification=False)
    assert calibrate.noise_multiplier(
        1.0, DELTA, design=plain, steps=100, adjacency=ADD_REMOVE
    ) == pytest.approx(3.7306, abs=1e-3)
    assert calibrate.epoch_steps(dp.Assigned(1, 100, passes=3), 2) == 200


def test_other_questions_have_an_answer_or_say_that_they_have_none() -> None:
    accountant = dp.Accountant(adjacency=ADD_REMOVE)
    accountant.authorize(PASS)
    assert accountant.get_delta(0.621) == pytest.approx(DELTA, rel=0.01)
    with pytest.raises(ValueError, match="mu must be exact"):
        accountant.get_mu()
    assert "who is where, and sizes of batches, kept secret" in str(accountant.report(DELTA))


def test_old_ledgers_are_read_as_they_were() -> None:
    """A pass of before is a part of a partition, which stays one release."""
    base = clipped_gaussian(2.0)
    row = {
        "type": "Parallel",
        "partition": "assigned/x/5",
        "partition_kind": "keyed",
        "key_public": True,
    }
    old = event_from_json(
        row | {"parts": {"0": [event_to_json(base)], "1": [event_to_json(base)]}}
    )
    assert Ledger([old]).epsilon(DELTA, REPLACE_ONE) == Ledger([base]).epsilon(
        DELTA, REPLACE_ONE
    )
    assert (
        repr(dp.Assigned(6, 26, amplification=False))
        == "Assigned(batch_size=6, n=26, parts=None, amplification=False, passes=1)"
    )


def test_the_gaussian_of_a_pass_is_that_of_its_adjacency() -> None:
    """Replacing a record moves a sum by two clips, which the law has in it: no factor on the noise."""
    for adjacency, clips in ((ADD_REMOVE, 1.0), (REPLACE_ONE, 2.0)):
        expected = Ledger([Gaussian(1.0, {adjacency: clips})]).cost(adjacency).rdp
        assert np.allclose(cost_of(RandomAllocation(1.0, 1), adjacency).rdp, expected)


@pytest.mark.parametrize("delta", [1e-200, 1e-300, 5e-324])
@pytest.mark.parametrize("passes", [1, 3])
def test_a_delta_that_no_profile_reaches_has_a_figure_above_the_truth(
    passes: int, delta: float
) -> None:
    """It asked for 109 GiB. The record is in the first step of each pass with probability T^-passes.

    Then each loss of that step is at least (2x - 1) / 2z^2 - log T with x ~ N(1, z^2), and delta(epsilon) at least
    T^-passes (1 - e^-1) P(losses > epsilon + 1).
    """
    noise, steps = 0.5, 10
    ledger = Ledger([Repeat(RandomAllocation(noise, steps), passes)])
    found = ledger.epsilon(delta, ADD_REMOVE)
    log_tail = math.log(delta) + passes * math.log(steps) - math.log(-math.expm1(-1.0))
    mean, std = passes * (0.5 / noise**2 - math.log(steps)), math.sqrt(passes) / noise
    least = mean - std * float(special.ndtri_exp(log_tail)) - 1
    most = gaussian_epsilon(std, delta)
    assert least <= found <= most * (1.005 if passes > 1 else 1 + 1e-9)  # by Renyi divergences
    assert found <= 1.05 * least or delta < 1e-280 or passes > 1
