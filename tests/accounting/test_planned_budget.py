"""A planned budget is a promise that is kept: what was released never chooses what is released next."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

import torch_dpsco as dp
from tests.accounting.ledgers import DELTA, FIXED, STEP, image, part
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.events import (
    ADD_REMOVE,
    REPLACE_ONE,
    ApproxDP,
    Gaussian,
    Parallel,
    PoissonGaussian,
    Pure,
    Repeat,
    Sequential,
)
from torch_dpsco.accounting.ledger import Ledger
from torch_dpsco.accounting.planning import PlannedEvents
from torch_dpsco.errors import BudgetExceeded, PrivacyError, SequenceError

QUIET = PoissonGaussian(8.0, 0.01)
BUDGET = Budget(1.0, DELTA, "replace_one")


def gaussian(mu: float) -> Gaussian:
    return Gaussian(1.0, {REPLACE_ONE: mu})


# -- why --------------------------------------------------------------------------------------------------------------


def test_an_event_chosen_by_the_last_output_passes_the_target():
    """Each path composes to the target, the run that chooses between them has 1.9 times its delta: exact integrals.

    A Gaussian release of mean shift 0.2 under P has the loss l = 0.02 + 0.2 z. Next comes another Gaussian, or one
    that fails with probability d, whichever has the larger hockey stick at epsilon - l.
    """
    mu, d = 0.1784, 9.97e-6
    first, second, failing = gaussian(0.2), gaussian(mu), ApproxDP(0.0, d)
    for path in ([first, second], [first, failing]):
        assert Ledger(path).epsilon(DELTA, REPLACE_ONE) <= 1.0
    z = np.linspace(-9, 9, 200_001)
    left = 1.0 - (0.02 + 0.2 * z)
    of_gaussian = norm.cdf(mu / 2 - left / mu) - np.exp(left) * norm.cdf(-mu / 2 - left / mu)
    of_failing = d + (1 - d) * np.maximum(0.0, -np.expm1(left))
    chosen = float(np.sum(norm.pdf(z) * np.maximum(of_gaussian, of_failing)) * (z[1] - z[0]))
    assert chosen > 1.9 * DELTA

    accountant = Accountant(BUDGET)
    accountant.authorize(first)
    before = image(accountant)
    assert not accountant.admits(failing)
    assert accountant.max_steps(failing) == 0
    with pytest.raises(
        PrivacyError,
        match=r"planned before the first release: .* accountant\.declare\(event, steps\)",
    ):
        accountant.authorize(failing)
    assert image(accountant) == before
    accountant.authorize(
        second
    )  # unsampled Gaussian noise may be chosen: the filter of mode "gdp" costs nothing
    with pytest.raises(BudgetExceeded, match="that cannot fail only"):
        accountant.authorize(failing)


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other", [PoissonGaussian(2.0, 0.02), QUIET, FIXED, Pure(0.01), gaussian(0.01)]
)
def test_another_event_than_the_first_is_refused_and_changes_nothing(other):
    accountant = Accountant(BUDGET)
    accountant.authorize(STEP, 3)
    before = image(accountant)
    with pytest.raises(
        PrivacyError, match=r"3 events of a run of PoissonGaussian; epsilon .* planned before"
    ):
        accountant.authorize(other)
    assert not accountant.admits(other)
    assert image(accountant) == before
    accountant.authorize(STEP)


def test_without_a_planned_budget_nothing_need_be_planned():
    for budget in (
        None,
        Budget(1.0, DELTA, "replace_one", mode="rdp"),
    ):
        accountant = Accountant(budget)
        for event in (STEP, QUIET, gaussian(0.01)):
            accountant.authorize(event)
        assert "plan" not in accountant.state_dict()["config"]
    pure = Accountant(
        Budget(1.0, 0.0, "replace_one")
    )  # the sum of pure epsilons holds whatever chose them
    pure.authorize(Pure(0.25))
    pure.authorize(Pure(0.5))
    assert pure.get_epsilon(0.0) == 0.75


def test_an_optimizer_of_another_plan_cannot_be_built_on_a_charged_accountant():
    accountant = Accountant(Budget(1.0, DELTA, ADD_REMOVE))

    def build(noise: float) -> dp.ClippedSGD:
        plan = dp.ClippedSGD.plan(
            lr=0.1,
            clip=1.0,
            noise_multiplier=noise,
            sampling=dp.Poisson(8, 800),
            adjacency=ADD_REMOVE,
        )
        return dp.ClippedSGD(torch.nn.Linear(2, 1).parameters(), plan, accountant=accountant)

    build(2.0)
    accountant.authorize(STEP)
    with pytest.raises(PrivacyError, match="Build all optimizers of the accountant"):
        build(3.0)
    assert build(2.0).accountant is accountant  # more of the same


def test_the_noise_of_steps_cannot_change_on_the_way():
    accountant = Accountant(Budget(1.0, DELTA, ADD_REMOVE))
    accountant.authorize(STEP)
    accountant.authorize(STEP)
    with pytest.raises(PrivacyError, match="planned before the first release"):
        accountant.authorize(QUIET)
    assert len(accountant) == 2


# -- what may be planned ----------------------------------------------------------------------------------------------


def test_declared_plans_are_charged_in_any_order_each_as_often_as_declared():
    accountant = Accountant(BUDGET)
    accountant.declare(QUIET, 3)
    accountant.declare(FIXED, 2)
    for event in (QUIET, FIXED, QUIET, FIXED, QUIET):
        assert accountant.max_steps(event) >= 1
        accountant.authorize(event)
    for event in (QUIET, FIXED):
        assert accountant.max_steps(event) == 0
        with pytest.raises(
            BudgetExceeded, match=r"this ledger holds .* holds no more of what is asked for"
        ):
            accountant.authorize(event)


def test_the_room_of_a_plan_is_kept_while_another_runs():
    """One plan without a number of steps runs as long as the budget lasts with the whole of the others."""
    accountant = Accountant(BUDGET)
    accountant.declare(QUIET, 500)
    accountant.declare(STEP, None)
    accountant.authorize(STEP)
    left = accountant.max_steps(STEP)
    whole = Ledger([Repeat(QUIET, 500), Repeat(STEP, left + 1)])
    assert whole.epsilon(DELTA, REPLACE_ONE) <= 1.0
    whole.add(STEP)
    assert whole.epsilon(DELTA, REPLACE_ONE) > 1.0
    accountant.authorize(STEP, left)
    with pytest.raises(BudgetExceeded):
        accountant.authorize(STEP)
    accountant.authorize(QUIET, 500)
    assert accountant.get_epsilon(DELTA) <= 1.0


def test_plans_that_do_not_fit_together_are_refused_before_anything_is_spent():
    accountant = Accountant(BUDGET)
    accountant.declare(STEP, accountant.max_steps(STEP))
    accountant.declare(QUIET, 500)
    with pytest.raises(BudgetExceeded, match="the 2 plans declared on this accountant"):
        accountant.authorize(STEP)
    assert len(accountant) == 0
    assert "plan" not in accountant.state_dict()["config"]
    several = Accountant(BUDGET)
    several.declare(STEP, None)
    several.declare(QUIET, None)
    with pytest.raises(SequenceError, match="steps must be given for all but one"):
        several.authorize(STEP)
    assert len(several) == 0


def test_the_first_event_is_planned_beside_what_optimizers_declared():
    """A private quantile, and then the run that was built before it."""
    accountant = Accountant(BUDGET)
    accountant.declare(QUIET, 10)
    accountant.authorize(Pure(0.1))
    with pytest.raises(BudgetExceeded):
        accountant.authorize(Pure(0.1))
    accountant.authorize(QUIET, 10)


def test_plans_of_one_kind_of_event_are_one_plan():
    accountant = Accountant(BUDGET)
    accountant.declare(STEP, 10)
    accountant.declare(STEP, 5)
    most = accountant.max_steps(STEP)
    accountant.authorize(STEP)
    assert accountant.max_steps(STEP) == most - 1 > 15


def test_what_has_happened_is_recorded_and_joins_the_plan():
    accountant = Accountant(BUDGET)
    accountant.authorize(STEP)
    accountant.record(QUIET, 3)
    accountant.authorize(STEP)
    with pytest.raises(BudgetExceeded):
        accountant.authorize(QUIET)
    with pytest.raises(PrivacyError):
        accountant.authorize(FIXED)
    assert len(accountant) == 5


@pytest.mark.slow
def test_a_run_of_several_events_may_be_repeated_while_the_budget_lasts():
    accountant, run = (
        Accountant(Budget(1.0, DELTA, "replace_one")),
        Sequential((Repeat(QUIET, 5), FIXED)),
    )
    accountant.authorize(run)
    most = accountant.max_steps(run)
    accountant.authorize(run, most)
    assert most >= 1
    with pytest.raises(BudgetExceeded):
        accountant.authorize(run)
    assert Ledger([Repeat(run, most + 1)]).epsilon(DELTA, REPLACE_ONE) <= 1.0


# -- partitions -------------------------------------------------------------------------------------------------------


def parts(name: str, *events: Gaussian) -> Parallel:
    return Parallel({str(k): (event,) for k, event in enumerate(events)}, name)


def test_partitions_of_two_plans_are_not_taken_for_one():
    """A record may be in part 1 of one partition and in part 0 of the other: both largest parts are reserved."""
    loud, quiet = gaussian(0.2), gaussian(0.05)
    runs = parts("planned", loud, quiet), parts("planned", quiet, loud)
    plan = PlannedEvents.closing([(run, 1) for run in runs], runs[0], 1)
    reserved = plan.reserved(Ledger(), runs[0], 1)
    twice = Ledger([Repeat(loud, 2)]).epsilon(DELTA, REPLACE_ONE)
    assert Ledger([reserved]).epsilon(DELTA, REPLACE_ONE) == pytest.approx(twice)
    assert Ledger(runs).epsilon(DELTA, REPLACE_ONE) < 0.9 * twice


def test_phases_on_parts_of_their_own_are_one_plan_under_any_name():
    """What `ahead` names "planned" is charged under the name of the cut, part by part, batches within parts too."""
    loud, quiet = gaussian(0.2), gaussian(0.05)
    sampled = PoissonGaussian(4.0, 0.01)
    plan = PlannedEvents.closing([(parts("planned", loud, quiet), 1), (sampled, 7)], sampled, 1)
    ledger = Ledger()
    for name, event in (("0/0", loud), ("0/1", loud), ("1", quiet)):
        charge = Parallel({name: (event,)}, "positions/abc")
        assert plan.reserved(ledger, charge, 1) is not None
        ledger.add(charge)
    for refused in (
        Parallel({"0/0": (loud,)}, "positions/abc"),  # twice on one batch
        Parallel({"1": (loud,)}, "positions/abc"),  # in another part than planned
        Parallel({"0": (loud,)}, "positions/def"),  # a second partition
        loud,
    ):
        assert plan.reserved(ledger, refused, 1) is None
    assert plan.reserved(ledger, sampled, 7) is not None
    assert plan.reserved(ledger, sampled, 8) is None


@pytest.mark.parametrize("event", [STEP, part("0")])
def test_a_first_charge_of_more_than_was_declared_is_part_of_the_plan(event):
    accountant = Accountant(BUDGET)
    accountant.declare(event, 1)
    accountant.declare(QUIET, 1)
    accountant.authorize(event, 2)
    accountant.authorize(QUIET)  # planned as before
    with pytest.raises(PrivacyError, match="the plan that was declared"):
        accountant.authorize(QUIET)
    assert accountant.get_epsilon(DELTA) <= 1.0


def test_a_single_kind_of_event_may_be_charged_on_any_parts():
    accountant = Accountant(BUDGET)
    for name in ("0", "1", "2"):
        accountant.authorize(part(name))
    with pytest.raises(PrivacyError):
        accountant.authorize(STEP)


KINDS = [STEP, QUIET, FIXED, part("0"), part("1"), Sequential((QUIET, FIXED))]


@pytest.mark.slow
@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.sampled_from(KINDS), st.integers(1, 9)), max_size=4),
    st.lists(st.tuples(st.sampled_from(KINDS), st.integers(1, 4)), max_size=12),
)
def test_whatever_is_charged_is_within_one_set_of_events_that_fits(declared, requests):
    """The guarantee's premise, checked on what was charged: it never leaves what the first charge reserved."""
    accountant = Accountant(Budget(0.5, DELTA, "replace_one"))
    for event, steps in declared:
        accountant.declare(event, steps)
    for event, count in requests:
        try:
            accountant.authorize(event, count)
        except PrivacyError:
            continue
    if not len(accountant):
        return
    plan = accountant._limit.plan()
    base = {
        event: n
        for (name, _), events in accountant.ledger.counts().items()
        if not name
        for event, n in events.items()
    }
    room = Ledger(plan.fixed)
    for event, times in base.items():
        planned = sum(
            n
            for (name, _), events in room.counts().items()
            if not name
            for e, n in events.items()
            if e == event
        )
        assert times <= planned or (
            plan.open is not None and event in Ledger([plan.open]).distinct
        )
    reserved = plan.reserved(accountant.ledger, requests[0][0], 0)
    assert reserved is not None
    assert Ledger([reserved]).epsilon(DELTA, REPLACE_ONE) <= 0.5
    assert accountant.get_epsilon(DELTA) <= 0.5


# -- Gaussian noise ---------------------------------------------------------------------------------------------------


def test_gaussian_noise_may_be_chosen_on_the_way_and_the_target_is_then_the_guarantee():
    accountant, plain = (
        Accountant(BUDGET),
        Accountant(Budget(1.0, DELTA, "replace_one", mode="gdp")),
    )
    for mu in (0.1, 0.05, 0.12):
        accountant.authorize(gaussian(mu))
        plain.authorize(gaussian(mu))
    assert accountant.adaptive
    assert accountant.get_epsilon(DELTA) == plain.get_epsilon(DELTA) == 1.0
    assert accountant.max_steps(gaussian(0.07)) == plain.max_steps(gaussian(0.07))
    assert accountant.report().epsilon == 1.0
    before = image(accountant)
    with pytest.raises(BudgetExceeded):
        accountant.authorize(gaussian(0.3))
    assert image(accountant) == before
    with pytest.raises(ValueError, match="adaptive run"):
        accountant.get_mu()


def test_a_refused_event_does_not_change_the_mode():
    accountant = Accountant(BUDGET)
    accountant.authorize(gaussian(0.1))
    with pytest.raises(BudgetExceeded):
        accountant.authorize(gaussian(2.0))
    assert not accountant.adaptive
    assert accountant.get_epsilon(DELTA) < 1.0


def test_gaussian_noise_beside_sampled_steps_must_be_planned():
    """Paths with and without the sampled steps are within different numbers, between which no output may choose."""
    accountant = Accountant(BUDGET)
    accountant.declare(QUIET, 3)
    accountant.authorize(gaussian(0.05))
    with pytest.raises(PrivacyError, match="planned before the first release"):
        accountant.authorize(gaussian(0.06))


# -- saved and loaded -------------------------------------------------------------------------------------------------


def declared_pair(**settings: object) -> Accountant:
    accountant = Accountant(BUDGET, **settings)
    accountant.declare(QUIET, 3)
    accountant.declare(STEP, None)
    accountant.authorize(STEP)
    return accountant


def charges_after_going_on(accountant: Accountant) -> int:
    with pytest.raises(PrivacyError):
        accountant.authorize(FIXED)
    with pytest.raises(BudgetExceeded):
        accountant.authorize(QUIET, 4)
    accountant.authorize(QUIET, 3)
    accountant.authorize(STEP, 2)
    return len(accountant)


def test_a_loaded_ledger_keeps_its_plan():
    saved = declared_pair()
    loaded = Accountant(BUDGET)
    loaded.load_state_dict(saved.state_dict())
    assert charges_after_going_on(loaded) == charges_after_going_on(saved) == 6


def test_a_ledger_file_keeps_its_plan(tmp_path):
    declared_pair(ledger_path=tmp_path / "ledger").close()
    opened = Accountant(BUDGET, ledger_path=tmp_path / "ledger")
    assert charges_after_going_on(opened) == 6
    opened.close()


def test_a_ledger_file_keeps_the_mode_it_came_to(tmp_path):
    accountant = Accountant(BUDGET, ledger_path=tmp_path / "ledger")
    accountant.authorize(gaussian(0.1))
    accountant.authorize(gaussian(0.2))
    accountant.close()
    opened = Accountant(BUDGET, ledger_path=tmp_path / "ledger")
    assert opened.adaptive
    assert opened.get_epsilon(DELTA) == 1.0
    with pytest.raises(BudgetExceeded, match="unsampled Gaussian noise"):
        opened.authorize(STEP)
    opened.close()


def test_a_ledger_without_a_plan_goes_on_with_its_only_event_or_not_at_all():
    one, two = (Accountant(adjacency="replace_one") for _ in range(2))
    one.authorize(STEP, 4)
    two.authorize(STEP, 4)
    two.authorize(QUIET)
    for source, room in ((one, True), (two, False)):
        loaded = Accountant(BUDGET)
        loaded.load_state_dict(source.state_dict())
        assert loaded.admits(STEP) == room
        assert not loaded.admits(FIXED)


def test_a_plan_is_the_same_after_a_round_trip():
    plan = PlannedEvents.closing(
        [(parts("planned", gaussian(0.1), gaussian(math.pi / 9)), 2), (STEP, None)], STEP, 1
    )
    assert PlannedEvents.from_row(plan.to_row()) == plan
