from __future__ import annotations

import pytest

from tests.accounting.ledgers import DELTA, STEP, WHOLE, image, part, refusal
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.events import (
    ADD_REMOVE,
    REPLACE_ONE,
    ZERO_OUT,
    Gaussian,
    PoissonGaussian,
)
from torch_dpsco.errors import PrivacyError, SequenceError

# -- adjacency by the first event -------------------------------------------------------------------------------------


def test_who_comes_first_decides():
    ours, none = Accountant(), Accountant()
    ours.authorize(STEP)
    ours.settle(ADD_REMOVE)
    assert (ours.adjacency, none.adjacency) == (ZERO_OUT, ZERO_OUT)
    signed = Accountant()
    signed.require_unit("example")  # an optimizer was built, and promised zero_out
    signed.settle(ADD_REMOVE)
    assert signed.adjacency == ZERO_OUT
    fixed = Accountant(Budget(8.0, DELTA, adjacency=REPLACE_ONE))
    fixed.record(PoissonGaussian(1.0, 0.01))
    assert fixed.adjacency == REPLACE_ONE


def test_a_request_that_charges_nothing_decides_nothing():
    accountant = Accountant()
    accountant.authorize(STEP, 0)
    with pytest.raises(ValueError, match="event must be a value"):
        accountant.record("step")
    accountant.settle(ADD_REMOVE)
    accountant.record(PoissonGaussian(1.0, 0.5))
    assert accountant.adjacency == ADD_REMOVE


# -- parts ------------------------------------------------------------------------------------------------------------


def test_what_a_part_charges_is_charged_to_it_and_nothing_else():
    parted, plain = Accountant(), Accountant()
    for name in ("0", "1", "2"):
        of = parted.part(name, partition="p")
        of.authorize(Gaussian(30.0, {ZERO_OUT: 1.0, REPLACE_ONE: 2.0}))
        plain.authorize(part(name))
        parted.authorize(WHOLE)  # while the part is at hand
        plain.authorize(WHOLE)
    assert parted.ledger.to_json() == of.ledger.to_json() == plain.ledger.to_json()
    assert parted.get_epsilon(DELTA) == of.get_epsilon(DELTA) == plain.get_epsilon(DELTA)


def test_a_part_has_the_ledger_the_file_and_the_budget_of_all(tmp_path):
    accountant = Accountant(ledger_path=tmp_path / "ledger")
    of = accountant.part("a", partition="p")
    accountant.budget = Budget(1.0, DELTA, "replace_one")
    assert of.budget == accountant.budget
    assert of.ledger is accountant.ledger
    of.close()
    with pytest.raises(PrivacyError, match="closed"):
        accountant.authorize(WHOLE)


def test_a_part_counts_in_questions_too():
    accountant = Accountant(Budget(1.0, DELTA, "replace_one"))
    of = accountant.part(0, partition="p")
    room = of.max_steps(WHOLE.only(ZERO_OUT, REPLACE_ONE))
    of.authorize(WHOLE.only(ZERO_OUT, REPLACE_ONE), room)
    refusal(of, WHOLE.only(ZERO_OUT, REPLACE_ONE))
    assert accountant.max_steps(WHOLE) == 0
    other = accountant.part(1, partition="p")  # other records
    assert other.max_steps(WHOLE.only(ZERO_OUT, REPLACE_ONE)) == room
    assert other.admits(WHOLE.only(ZERO_OUT, REPLACE_ONE), room)


def test_parts_are_not_cut_further_and_have_names():
    accountant = Accountant()
    of = accountant.part("0", partition="p")
    with pytest.raises(SequenceError, match="parts must not be cut further"):
        of.part("1", partition="q")
    with pytest.raises(ValueError, match="must not contain another"):
        of.authorize(part("0"))
    with pytest.raises(ValueError, match="partition must be a non-empty name"):
        accountant.part("0", partition="")
    with pytest.raises(ValueError, match="kind must be one of"):
        accountant.part("0", partition="p", kind="random")
    assert len(accountant) == 0
    accountant.authorize(WHOLE)
    assert [row["type"] for row in accountant.state_dict()["ledger"]] == ["Gaussian"]


# -- budgets of other modes -------------------------------------------------------------------------------------------


def test_an_adaptive_budget_is_fixed_once_charged():
    accountant = Accountant(Budget(1.0, DELTA, "replace_one", mode="gdp"))
    accountant.authorize(Gaussian(30.0, {REPLACE_ONE: 1.0}))
    assert accountant.adaptive
    assert accountant.get_epsilon(DELTA) == 1.0 > accountant.ledger.epsilon(DELTA, REPLACE_ONE)
    assert accountant.report().epsilon == 1.0
    assert not any("fixed before the run" in line for line in accountant.report().assumptions)
    with pytest.raises(ValueError, match="delta must be given for an adaptive run"):
        accountant.get_delta(1.0)
    before = image(accountant)
    assert "unsampled Gaussian noise" in refusal(accountant, STEP)
    assert "the sum of mu" in refusal(accountant, Gaussian(0.5, {REPLACE_ONE: 1.0}))
    for other in (
        Budget(2.0, DELTA, "replace_one", mode="gdp"),
        Budget(2.0, DELTA, "replace_one"),
        None,
    ):
        with pytest.raises(PrivacyError, match="budget must be fixed before the first event"):
            accountant.budget = other
    assert image(accountant) == before


def test_an_event_recorded_as_adaptive_turns_to_the_odometer_for_good():
    plain, accountant = Accountant(), Accountant()
    for each in (plain, accountant):
        each.record(STEP, 100)
    before = accountant.get_epsilon(DELTA)
    accountant.record(STEP, 1, adaptive=True)
    plain.record(STEP)
    assert accountant.adaptive
    assert accountant.get_epsilon(DELTA) > plain.get_epsilon(DELTA) > before
    resumed = Accountant()
    resumed.load_state_dict(accountant.state_dict())
    assert resumed.get_epsilon(DELTA) == accountant.get_epsilon(DELTA)


def test_a_budget_of_another_adjacency_or_unit_is_refused():
    accountant = Accountant(Budget(1.0, DELTA, "replace_one"))
    for other in (
        Budget(1.0, DELTA, adjacency=ADD_REMOVE),
        Budget(1.0, DELTA, "replace_one", unit="user"),
    ):
        with pytest.raises(PrivacyError, match="budget must be for 'replace_one' and 'example'"):
            accountant.budget = other
    assert accountant.budget == Budget(1.0, DELTA, "replace_one")


# -- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_answer_is_never_that_of_another_question_or_ledger():
    accountant, seen = Accountant(), set()
    for _ in range(3):
        accountant.record(PoissonGaussian(1.0, 0.01))
        for _ in range(2):
            answers = [
                accountant.get_epsilon(delta, adjacency=adjacency, method=method)
                for delta in (1e-5, 1e-6)
                for adjacency in (ADD_REMOVE, REPLACE_ONE)
                for method in ("best", "rdp")
            ]
            fresh = [
                accountant.ledger.epsilon(delta, adjacency, method)
                for delta in (1e-5, 1e-6)
                for adjacency in (ADD_REMOVE, REPLACE_ONE)
                for method in ("best", "rdp")
            ]
            assert answers == fresh
        seen.add(tuple(answers))
    assert len(seen) == 3
    rich, poor = (
        Budget(2.0, 1e-5, ADD_REMOVE, mode="gdp"),
        Budget(1.0, 1e-5, ADD_REMOVE, mode="gdp"),
    )
    empty = Accountant(rich)
    assert empty.get_epsilon(1e-5) == 2.0
    empty.budget = poor
    assert empty.get_epsilon(1e-5) == 1.0
    accountant.ledger.add(STEP)
    assert accountant.get_epsilon(1e-5) == accountant.ledger.epsilon(1e-5, ZERO_OUT)


def test_an_adaptive_run_has_no_delta_or_mu():
    """The sums of what was chosen on the way are random, and bound nothing without a limit fixed before."""
    adapted, filtered = Accountant(), Accountant(Budget(1.0, DELTA, "replace_one", mode="gdp"))
    adapted.record(WHOLE, 1, adaptive=True)
    filtered.authorize(WHOLE)
    for accountant in (adapted, filtered):
        for question in (
            accountant.get_mu,
            lambda a=accountant: a.get_delta(0.5),
        ):
            with pytest.raises(ValueError, match=r"adaptive run: ask get_epsilon"):
                question()


def test_a_planned_budget_ends_where_parameters_were_adapted():
    accountant = Accountant(Budget(1.0, DELTA, "replace_one"))
    accountant.authorize(WHOLE)
    accountant.record(WHOLE, 1, adaptive=True)
    before = image(accountant)
    with pytest.raises(PrivacyError, match="budget must be adaptive"):
        accountant.authorize(WHOLE)
    assert image(accountant) == before
    assert (accountant.admits(WHOLE), accountant.max_steps(WHOLE)) == (False, 0)
    late = Accountant(adjacency=REPLACE_ONE)
    late.record(WHOLE, 1, adaptive=True)
    late.budget = Budget(1.0, DELTA, "replace_one")
    with pytest.raises(PrivacyError, match="budget must be adaptive"):
        late.authorize(WHOLE)
