"""What an accountant says was spent and is left, in figures and in one line."""

from __future__ import annotations

import copy
import re

import pytest
import torch

import torch_dpsco as dp
from torch_dpsco.accounting.events import Gaussian, Laplace, PoissonGaussian, clipped_gaussian
from torch_dpsco.errors import BudgetExceeded, InfeasibleError, PrivacyError

STEP = clipped_gaussian(30.0)
TARGET = dp.Budget(1.0, 1e-5, "replace_one")


def charged(steps: int, budget: dp.Budget | None = TARGET) -> dp.Accountant:
    accountant = dp.Accountant(budget)
    accountant.record(STEP, steps)
    return accountant


@pytest.mark.slow
def test_spent_is_epsilon_at_the_budgets_delta_and_adjacency() -> None:
    for adjacency in ("add_remove", "zero_out", "replace_one"):
        accountant = dp.Accountant(dp.Budget(3.0, 1e-6, adjacency=adjacency))
        accountant.authorize(PoissonGaussian(2.0, 0.1), 5)
        epsilon, delta = accountant.spent
        assert delta == 1e-6
        assert (
            epsilon
            == accountant.get_epsilon(1e-6, adjacency=adjacency)
            == accountant.report().epsilon
        )
        assert accountant.remaining == 3.0 - epsilon


def test_what_remains_is_no_currency_and_max_steps_is_the_answer() -> None:
    accountant = charged(6)
    per_step = accountant.spent.epsilon / 6
    naive, fits = int(accountant.remaining / per_step), accountant.max_steps(STEP)
    assert fits > 2 * naive
    accountant.authorize(STEP, fits)
    assert accountant.max_steps(STEP) == 0
    assert (
        0 < accountant.remaining < 0.1
    )  # not enough for another one, although it looks like a rest


def test_nothing_remains_where_more_was_recorded_than_the_budget_allows() -> None:
    accountant = charged(100)
    assert accountant.spent.epsilon > 1.0
    assert accountant.remaining == 0.0


def test_an_adaptive_budget_is_quoted_as_its_target_from_the_first_charge_on() -> None:
    accountant = dp.Accountant(dp.Budget(1.0, 1e-5, "replace_one", mode="gdp"))
    assert (accountant.spent.epsilon, accountant.remaining) == (0.0, 1.0)
    accountant.authorize(STEP)
    assert (accountant.spent.epsilon, accountant.remaining) == (1.0, 0.0)
    assert accountant.max_steps(STEP) > 1
    accountant.record(STEP, 100)
    assert accountant.spent.epsilon > 1.0


def test_without_a_budget_they_name_the_question_that_has_an_answer() -> None:
    for name, words in (("spent", "spent"), ("remaining", "remaining")):
        message = (
            rf"budget must be set to say what is {words} \(got None\): ask get_epsilon\(delta\)"
        )
        with pytest.raises(ValueError, match=message):
            getattr(charged(1, None), name)


# -- in one line ------------------------------------------------------------------------------------------------------


def test_the_repr_never_shows_less_than_was_spent() -> None:
    for steps in range(1, 12):
        accountant = charged(steps)
        shown = re.fullmatch(
            rf"Accountant\(epsilon (\S+) of 1 spent at delta 1e-05 under replace_one, events: {steps}, unit: example\)",
            repr(accountant),
        )
        assert accountant.spent.epsilon <= float(shown[1]) <= 1.001 * accountant.spent.epsilon


def test_the_repr_is_one_line_whatever_was_charged() -> None:
    assert repr(dp.Accountant()) == (
        "Accountant(epsilon 0 spent at delta 1e-06 under zero_out, events: 0, unit: example)"
    )
    users = dp.Accountant(dp.Budget(2.0, 1e-5, adjacency="add_remove", unit="user", mode="gdp"))
    assert (
        repr(users)
        == "Accountant(epsilon 0 of 2 spent at delta 1e-05 under add_remove, events: 0, unit: user)"
    )
    unproved = dp.Accountant(adjacency="add_remove")
    unproved.record(Gaussian(1.0, {"replace_one": 1.0}))
    assert repr(unproved).startswith(
        "Accountant(epsilon not proved spent at delta 1e-06 under add_remove, events: 1"
    )
    pure = dp.Accountant(dp.Budget(1.0, 0.0, "replace_one"))
    pure.record(Laplace(10.0, {"replace_one": 1.0}), 2)
    assert repr(pure).startswith(
        "Accountant(epsilon 0.2 of 1 spent at delta 0 under replace_one, events: 2"
    )
    pure.record(STEP)
    assert repr(pure).startswith("Accountant(epsilon not proved of 1 spent at delta 0")


def test_what_is_on_a_ledger_is_told_in_words() -> None:
    """By the names of optimizers where they are known; no event is quoted."""
    accountant = dp.Accountant(TARGET)
    plan = dp.HolderSGD.plan(
        problem=dp.Problem(lipschitz=1.0), lr=0.1, n=60, batch_size=20, steps=3, budget=TARGET
    )
    model = torch.nn.Linear(2, 1)
    optimizer = dp.HolderSGD(model.parameters(), plan, accountant=accountant)
    data = torch.utils.data.TensorDataset(torch.ones(60, 2), torch.ones(60, 1))
    dp.fit(model, optimizer, data, dp.losses.Logistic(), progress=False)
    known = (
        "this ledger holds 1 event of a run of HolderSGD; epsilon 1 of 1 spent at delta 1e-05"
    )
    assert known in accountant.holdings
    for again in (
        lambda: dp.HolderSGD(model.parameters(), plan, accountant=accountant),
        lambda: accountant.authorize(STEP),
        lambda: accountant.declare(STEP, 1),
        lambda: accountant.require_planned(STEP),
    ):
        with pytest.raises((PrivacyError, InfeasibleError)) as caught:
            again()
        told = str(caught.value)
        assert known in told
        assert "a run that was interrupted goes on by resume()" in told.lower()
        assert "in a loop optimizer.finalize() installs the answer" in told
        assert not re.search(r"raise epsilon|\binf\b|sens=|noise_multiplier=", told)
    single = charged(2)
    with pytest.raises(BudgetExceeded, match="2 events of a run of Gaussian; epsilon 0"):
        single.authorize(STEP, 10**6)
    empty = dp.Accountant(TARGET)
    with pytest.raises(BudgetExceeded, match=r"^what is asked for would bring epsilon"):
        empty.authorize(STEP, 10**6)


def test_a_copy_of_an_accountant_is_itself() -> None:
    accountant = charged(1)
    assert copy.copy(accountant) is accountant
    assert copy.deepcopy(accountant) is accountant
