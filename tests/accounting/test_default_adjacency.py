"""Where nobody says an adjacency it is zero_out, at every door; what is said wins, and headlines say it in words."""

from __future__ import annotations

import inspect
import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import torch_dpsco as dp
from torch_dpsco import estimators
from torch_dpsco.accounting.designs import Full, Undeclared
from torch_dpsco.accounting.events import (
    ADD_REMOVE,
    ADJACENCIES,
    REPLACE_ONE,
    ZERO_OUT,
    clipped_gaussian,
    in_words,
)
from torch_dpsco.accounting.statement import Run, make_statement
from torch_dpsco.errors import AdjacencyError, PrivacyError, UnitError
from torch_dpsco.estimators import Category, LogisticRegression, Number
from torch_dpsco.estimators.base import LinearModel
from torch_dpsco.show.cli import main
from torch_dpsco.statistics import prepare
from torch_dpsco.statistics.prepare import PrivateStandardScaler, PrivateTransformer
from torch_dpsco.statistics.search import PrivateSearch
from torch_dpsco.statistics.study import plan_study
from torch_dpsco.step.chooser import agreed

DELTA = 1e-5
STEP = clipped_gaussian(50.0)
WORDS = {
    ADD_REMOVE: "add_remove: added or removed",
    ZERO_OUT: "zero_out: emptied",
    REPLACE_ONE: "replace_one: replaced by any other",
}
LOGISTIC = dp.losses.Logistic().problem(bound_x=1.0, radius=2.0)
MOMENTS = dp.Problem(smoothness=1.0, moment=1.0, moment_order=2.0)


def unsaid(**more: Any) -> dp.Budget:
    return dp.Budget(1.0, DELTA, **more)


# -- plans ------------------------------------------------------------------------------------------------------------

USER = {"unit": "user"}
FILTERED = {"n": 1000, "pair_radius": 1.0, "reg": 0.1, "dim": 2, "max_steps": 5}
LINEAR = {"model": nn.Linear(2, 1), "loss": dp.losses.Logistic(), "n": 1000, "bound_x": 1.0}
STEPS = {"n": 1000, "clip": 1.0, "steps": 4}
PLANS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "HolderSGD": (
        dp.HolderSGD,
        {"problem": LOGISTIC, "n": 1000, "batch_size": 100, "epochs": 2},
        ZERO_OUT,
    ),
    "ClippedSGD": (dp.ClippedSGD, STEPS | {"lr": 0.1}, ZERO_OUT),
    "AcceleratedSGD": (dp.AcceleratedSGD, STEPS | {"lr": 0.1}, ZERO_OUT),
    "ProximalSGD": (dp.ProximalSGD, STEPS | {"lr": 0.1}, ZERO_OUT),
    "LocalizedSGD": (
        dp.LocalizedSGD,
        {"n": 1000, "clip": 1.0, "reg": 0.1, "dim": 2, "max_steps": 5, "distance": 1.0},
        ZERO_OUT,
    ),
    "CorrelatedSGD": (
        dp.CorrelatedSGD,
        {"n": 1000, "clip": 1.0, "lr": 0.1, "batch_size": 100, "epochs": 1},
        ZERO_OUT,
    ),
    "NetSGD": (dp.NetSGD, {"n": 1000, "dim": 3}, ZERO_OUT),
    "HolderOutputSGD": (
        dp.HolderOutputSGD,
        {"problem": LOGISTIC, "n": 1000, "dim": 2, "lr": 0.02},
        ZERO_OUT,
    ),
    "BoltOnPSGD": (
        dp.BoltOnPSGD,
        {"problem": LOGISTIC, "n": 1000, "dim": 2, "batch_size": 10},
        ZERO_OUT,
    ),
    "NoisyGD": (dp.NoisyGD, LINEAR, ZERO_OUT),
    "ObjectivePerturbation": (dp.ObjectivePerturbation, LINEAR, ZERO_OUT),
    "OutputPerturbation": (dp.OutputPerturbation, LINEAR, ZERO_OUT),
    "UserClippedSGD": (
        dp.UserClippedSGD,
        {"n": 1000, "clip": 1.0, "lr": 0.1, "steps": 5},
        ZERO_OUT,
    ),
    "UserFilteredSGD": (
        dp.UserFilteredSGD,
        {"n": 1000, "pair_radius": 1.0, "lr": 1.0, "steps": 3},
        REPLACE_ONE,
    ),
    "LocalizedUserSGD": (
        dp.LocalizedUserSGD,
        FILTERED | {"n": 10_000, "problem": dp.Problem(lipschitz=1.0, radius=1.0)},
        REPLACE_ONE,
    ),
}


def planned(name: str, budget: dp.Budget | None = None) -> tuple[Any, str]:
    kind, settings, default = PLANS[name]
    return kind.plan(budget=budget or dp.Budget(2.0, DELTA), **settings), default


def test_every_optimizer_with_a_plan_is_here() -> None:
    named = {
        kind
        for kind in (getattr(dp, name) for name in dp.__all__)
        if inspect.isclass(kind) and hasattr(kind, "plan") and hasattr(kind, "plans")
    }
    assert named == {kind for kind, *_ in PLANS.values()}


@pytest.mark.parametrize("name", PLANS)
def test_epsilon_and_delta_are_a_budget(name: str) -> None:
    kind, settings, _ = PLANS[name]
    plan, _ = planned(name)
    assert kind.plan(epsilon=2.0, delta=DELTA, **settings) == plan
    for given in ({"epsilon": 2.0}, {"delta": DELTA}):
        with pytest.raises(ValueError, match="epsilon and delta must be given"):
            kind.plan(**given, **settings)
        with pytest.raises(ValueError, match="epsilon and delta must be given"):
            kind.plan(**given, budget=dp.Budget(2.0, DELTA), **settings)


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_says_who_is_protected_where_its_budget_does_not(name: str) -> None:
    kind, settings, _ = PLANS[name]
    plan, _ = planned(name)
    assert plan.budget.unit == plan.unit
    other = "user" if plan.unit == "example" else "example"
    with pytest.raises(UnitError, match=f"unit {plan.unit!r}"):
        kind.plan(budget=dp.Budget(2.0, DELTA, unit=other), **settings)


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_has_its_default_and_so_has_its_budget_that_said_none(name: str) -> None:
    plan, default = planned(name)
    assert plan.adjacency == plan.budget.adjacency == default
    assert plan.budget.says_adjacency
    assert str(plan).startswith(f"{type(plan).__name__}: privacy for one {plan.unit} (")
    assert f"({WORDS[default]})" in str(plan).splitlines()[0]
    assert plan.ledger().adjacency == default


@pytest.mark.parametrize("name", ["HolderSGD", "ClippedSGD", "UserClippedSGD"])
@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_what_a_plan_or_its_budget_says_wins(name: str, adjacency: Any) -> None:
    kind, settings, _ = PLANS[name]
    more: Any = USER if "User" in name else {}
    by_plan = kind.plan(budget=dp.Budget(2.0, DELTA, **more), adjacency=adjacency, **settings)
    by_budget = kind.plan(budget=dp.Budget(2.0, DELTA, adjacency, **more), **settings)
    assert by_plan.adjacency == by_plan.budget.adjacency == adjacency
    assert by_plan == by_budget
    for other in set(ADJACENCIES) - {adjacency}:
        with pytest.raises(AdjacencyError, match="the budget's"):
            kind.plan(
                budget=dp.Budget(2.0, DELTA, adjacency, **more), adjacency=other, **settings
            )


def test_where_one_record_may_be_anything_nothing_else_is_proved() -> None:
    """Undeclared batches have no plan; filtered users: a budget that says none is of replace_one."""
    for sampling in (None, Undeclared(10)):
        with pytest.raises(ValueError, match="n "):
            dp.ClippedSGD.plan(clip=1.0, sampling=sampling, noise_multiplier=1.0, lr=0.1)
    kind, settings, _ = PLANS["UserFilteredSGD"]
    for adjacency in (ADD_REMOVE, ZERO_OUT):
        with pytest.raises(AdjacencyError, match="budget must be of replace_one"):
            kind.plan(budget=dp.Budget(2.0, DELTA, adjacency, unit="user"), **settings)


def test_the_adjacency_of_a_plan_is_agreed_upon() -> None:
    assert agreed(None, None) == (None, ZERO_OUT)
    assert agreed(None, None, default=REPLACE_ONE) == (None, REPLACE_ONE)
    assert agreed(unsaid(), ADD_REMOVE) == (dp.Budget(1.0, DELTA, ADD_REMOVE), ADD_REMOVE)
    assert agreed(unsaid(), None, default=REPLACE_ONE)[1] == REPLACE_ONE
    assert agreed(dp.Budget(1.0, DELTA, ADD_REMOVE), None, default=REPLACE_ONE)[1] == ADD_REMOVE
    with pytest.raises(UnitError):
        agreed(dp.Budget(1.0, DELTA, unit="example"), None, unit="user")


def optimizer(design: Any = None, **more: Any) -> dp.PrivateOptimizer:
    return dp.PrivateOptimizer(
        dp.attach(nn.Linear(2, 1)).parameters(),
        0.1,
        oracle=dp.oracles.Clipped(1.0, 1.0, 4),
        rule=dp.rules.SGD(),
        design=design or dp.Disjoint(4, 8),
        **more,
    )


def test_an_optimizer_without_a_plan_has_the_default_too() -> None:
    assert optimizer().adjacency == ZERO_OUT
    assert optimizer(Undeclared(4)).adjacency == REPLACE_ONE
    for adjacency in (ADD_REMOVE, ZERO_OUT, REPLACE_ONE):
        made = optimizer(dp.Poisson(4, 8), adjacency=adjacency)
        assert made.adjacency == made.accountant.adjacency == adjacency


# -- budgets ----------------------------------------------------------------------------------------------------------


def test_a_budget_that_says_none_is_of_zero_out_until_someone_says_another() -> None:
    assert unsaid().adjacency == dp.Budget(1.0, DELTA, ZERO_OUT).adjacency == ZERO_OUT
    assert unsaid() == dp.Budget(1.0, DELTA, ZERO_OUT)
    assert not unsaid().says_adjacency
    assert unsaid().under(None) == unsaid()
    assert not unsaid().under(None).says_adjacency
    for adjacency in ADJACENCIES:
        said = dp.Budget(1.0, DELTA, adjacency)
        assert said.says_adjacency
        assert unsaid().under(adjacency) == said
        assert unsaid().under(adjacency).says_adjacency
        for other in (None, *ADJACENCIES):
            assert said.under(other) is said


@pytest.mark.parametrize(
    "more",
    [
        {"unit": "user"},
        {"mode": "gdp"},
    ],
    ids=["unit", "mode"],
)
def test_all_else_of_a_budget_stays_under_an_adjacency(more: dict[str, Any]) -> None:
    assert unsaid(**more).under(REPLACE_ONE) == dp.Budget(1.0, DELTA, REPLACE_ONE, **more)


@pytest.mark.parametrize("risk", [{"advantage": 0.1}, {"tpr": 0.02, "fpr": 0.01}])
def test_a_risk_stays_under_an_adjacency(risk: dict[str, float]) -> None:
    moved = dp.Budget(**risk).under(ADD_REMOVE)
    assert moved == dp.Budget(**risk, adjacency=ADD_REMOVE)
    assert moved.risk == dp.Budget(**risk).risk


# -- accountants ------------------------------------------------------------------------------------------------------


def test_an_accountant_that_says_none_is_of_zero_out() -> None:
    assert dp.Accountant().adjacency == dp.Accountant(unsaid()).adjacency == ZERO_OUT
    assert dp.Accountant(unsaid(), adjacency=ADD_REMOVE).budget.adjacency == ADD_REMOVE
    assert dp.Accountant(adjacency=REPLACE_ONE).adjacency == REPLACE_ONE


@pytest.mark.parametrize("budget", [None, unsaid()], ids=["no budget", "budget"])
@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_it_settles_once_and_its_budget_with_it(
    budget: dp.Budget | None, adjacency: Any
) -> None:
    accountant = dp.Accountant(budget)
    accountant.settle(adjacency)
    for other in ADJACENCIES:
        accountant.settle(other)
        assert accountant.adjacency == adjacency
        assert budget is None or accountant.budget == dp.Budget(1.0, DELTA, adjacency)


@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_what_was_said_is_not_settled_anew(adjacency: Any) -> None:
    for accountant in (
        dp.Accountant(adjacency=adjacency),
        dp.Accountant(dp.Budget(1.0, DELTA, adjacency)),
        dp.Accountant(unsaid(), adjacency=adjacency),
    ):
        for other in ADJACENCIES:
            accountant.settle(other)
        assert accountant.adjacency == adjacency
        assert accountant.budget is None or accountant.budget.adjacency == adjacency


def test_a_charge_settles_on_zero_out() -> None:
    charged, limited = dp.Accountant(), dp.Accountant(unsaid())
    for accountant in (charged, limited):
        accountant.authorize(STEP)
        accountant.settle(REPLACE_ONE)
    assert [a.adjacency for a in (charged, limited)] == [ZERO_OUT, ZERO_OUT]
    assert limited.budget == dp.Budget(1.0, DELTA, ZERO_OUT)
    said = dp.Accountant(dp.Budget(1.0, DELTA, REPLACE_ONE))
    said.authorize(STEP)
    assert said.adjacency == REPLACE_ONE


@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_the_first_optimizer_decides_and_the_next_one_must_agree(adjacency: Any) -> None:
    for accountant in (dp.Accountant(), dp.Accountant(dp.Budget(100.0, DELTA))):
        made = optimizer(dp.Poisson(4, 8), accountant=accountant, adjacency=adjacency)
        assert made.adjacency == accountant.adjacency == adjacency
        assert accountant.budget is None or accountant.budget.adjacency == adjacency
        for other in set(ADJACENCIES) - {adjacency}:
            with pytest.raises(AdjacencyError, match=f"must be '{adjacency}', the accountant's"):
                optimizer(dp.Poisson(4, 8), accountant=accountant, adjacency=other)


@pytest.mark.parametrize("name", ["HolderSGD", "UserFilteredSGD"])
def test_a_plan_and_an_accountant_may_share_a_budget_that_says_none(name: str) -> None:
    budget = dp.Budget(2.0, DELTA, **(USER if "User" in name else {}))
    accountant = dp.Accountant(budget)
    plan, default = planned(name, budget)
    layer = dp.attach(nn.Linear(2, 1, bias=False), loss_reduction="sum")
    made = PLANS[name][0](layer.parameters(), plan, accountant=accountant)
    assert made.adjacency == accountant.adjacency == accountant.budget.adjacency == default


def test_a_refused_plan_settles_nothing() -> None:
    kind, settings, _ = PLANS["HolderSGD"]
    plan = kind.plan(budget=dp.Budget(2.0, DELTA), adjacency=REPLACE_ONE, **settings)
    accountant = dp.Accountant(dp.Budget(3.0, DELTA))
    with pytest.raises(AdjacencyError, match="accountant must have the budget"):
        dp.HolderSGD(nn.Linear(2, 1).parameters(), plan, accountant=accountant)
    accountant.settle(ADD_REMOVE)
    assert accountant.adjacency == ADD_REMOVE
    with pytest.raises(UnitError):
        accountant.require_unit("user", REPLACE_ONE)
    fresh = dp.Accountant()
    with pytest.raises(UnitError):
        fresh.require_unit("user", REPLACE_ONE)
    fresh.settle(ADD_REMOVE)
    assert fresh.adjacency == ADD_REMOVE


def test_a_new_budget_takes_the_adjacency_of_the_ledger() -> None:
    accountant = dp.Accountant(adjacency=REPLACE_ONE)
    accountant.budget = unsaid()
    assert accountant.budget == dp.Budget(1.0, DELTA, REPLACE_ONE)
    with pytest.raises(PrivacyError, match="budget must be for 'replace_one' and 'example'"):
        accountant.budget = dp.Budget(1.0, DELTA, ZERO_OUT)
    fresh = dp.Accountant()
    fresh.budget = unsaid()
    fresh.settle(REPLACE_ONE)
    assert fresh.budget == dp.Budget(1.0, DELTA, REPLACE_ONE)


@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_a_budget_follows_a_ledger_file_that_is_opened_again(
    adjacency: Any, tmp_path: Path
) -> None:
    path = tmp_path / "spent.ledger"
    first = dp.Accountant(adjacency=adjacency, ledger_path=path)
    first.authorize(STEP)
    first.close()
    again = dp.Accountant(unsaid(), ledger_path=path)
    assert again.adjacency == again.budget.adjacency == adjacency
    again.settle(ZERO_OUT)
    assert again.adjacency == adjacency
    again.close()
    for other in set(ADJACENCIES) - {adjacency}:
        with pytest.raises(ValueError, match="ledger file must be for"):
            dp.Accountant(dp.Budget(1.0, DELTA, other), ledger_path=path)


@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_a_budget_follows_a_restored_ledger(adjacency: Any) -> None:
    """Else what is restored would be held to the cheaper adjacency."""
    source = dp.Accountant(adjacency=adjacency)
    source.authorize(STEP)
    target = dp.Accountant(unsaid())
    target.load_state_dict(source.state_dict())
    assert target.adjacency == target.budget.adjacency == adjacency
    room = dp.Accountant(dp.Budget(1.0, DELTA, adjacency))
    room.load_state_dict(source.state_dict())
    assert target.max_steps(STEP) == room.max_steps(STEP)


def test_a_file_that_was_never_charged_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "spent.ledger"
    dp.Accountant(unsaid(), ledger_path=path).close()
    again = dp.Accountant(unsaid(), ledger_path=path)
    again.settle(REPLACE_ONE)
    assert again.adjacency == again.budget.adjacency == REPLACE_ONE
    again.close()


# -- estimators, preparation, search, studies, command line -----------------------------------------------------------

ROWS = np.random.default_rng(0).uniform(size=(600, 2))
LABELS = ROWS[:, 0] > 0.5
KINDS = [getattr(estimators, name) for name in estimators.__all__]


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if inspect.isclass(kind) and issubclass(kind, LinearModel)]
)
def test_an_estimator_is_of_zero_out(kind: Any) -> None:
    assert inspect.signature(kind).parameters["adjacency"].default == ZERO_OUT
    assert kind().adjacency == ZERO_OUT


def test_every_transformer_and_the_search_are_of_zero_out() -> None:
    kinds = [
        kind
        for kind in vars(prepare).values()
        if inspect.isclass(kind) and issubclass(kind, PrivateTransformer)
    ]
    assert len(kinds) > 3
    for kind in (*kinds, PrivateSearch):
        assert kind.__dataclass_fields__["adjacency"].default == ZERO_OUT


@pytest.mark.parametrize("adjacency", [None, *ADJACENCIES])
def test_a_fit_reads_n_from_the_table_where_it_is_public(adjacency: Any) -> None:
    said = {} if adjacency is None else {"adjacency": adjacency}
    model = LogisticRegression(epsilon=8.0, bound_x=1.5, classes=(False, True), **said)
    if adjacency == ADD_REMOVE:
        with pytest.raises(ValueError, match="n must be given"):
            model.fit(ROWS, LABELS)
        model.set_params(n=1000)
    model.fit(ROWS, LABELS)
    used = adjacency or ZERO_OUT
    assert model.privacy_.adjacency == used
    assert model.plan_.task.n == (1000 if used == ADD_REMOVE else len(ROWS))
    assert model.n == (1000 if used == ADD_REMOVE else None)  # the setting stays
    assert f"({WORDS[used]})" in model.report().headline


def test_a_plan_without_a_table_needs_n() -> None:
    with pytest.raises(ValueError, match="n must be given"):
        LogisticRegression(bound_x=1.5, classes=(False, True)).plan(2)


@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_the_first_release_decides_for_a_ledger_that_says_none(adjacency: Any) -> None:
    scaled = dp.Accountant()
    PrivateStandardScaler(lower=0, upper=1, adjacency=adjacency, accountant=scaled).fit(ROWS)
    fitted = dp.Accountant()
    settings = {"n": len(ROWS), "bound_x": 1.5, "classes": (False, True)}
    model = LogisticRegression(epsilon=8.0, adjacency=adjacency, accountant=fitted, **settings)
    model.fit(ROWS, LABELS)
    scored = dp.Accountant()
    dp.score(model, ROWS, LABELS, budget=dp.Budget(1.0, 1e-6, adjacency), accountant=scored)
    assert [a.adjacency for a in (scaled, fitted, scored)] == [adjacency] * 3
    # a score whose budget says none is of the ledger's
    dp.score(model, ROWS, LABELS, budget=dp.Budget(1.0, 1e-6), accountant=fitted)
    assert fitted.report(1e-5).adjacency == adjacency
    for other in set(ADJACENCIES) - {adjacency}:
        with pytest.raises(AdjacencyError):
            dp.score(model, ROWS, LABELS, budget=dp.Budget(1.0, 1e-6, other), accountant=fitted)


def schema() -> dp.Schema:
    kinds = {"age": Number(17, 90), "sex": Category(["f", "m"])}
    return dp.Schema(kinds, target="died", labels=["no", "yes"])


def test_a_study_is_of_zero_out_and_says_so() -> None:
    plan = plan_study(schema(), dp.Budget(2.0, 1e-6), n=4000)
    assert plan.budget.adjacency == plan.model.adjacency == ZERO_OUT
    assert f"({WORDS[ZERO_OUT]})" in str(plan).splitlines()[0]
    for adjacency in ADJACENCIES:
        plan = plan_study(schema(), dp.Budget(2.0, 1e-6, adjacency), n=4000)
        assert plan.model.adjacency == adjacency
        assert f"({WORDS[adjacency]})" in str(plan).splitlines()[0]


@pytest.mark.parametrize("adjacency", [None, *ADJACENCIES])
def test_a_plan_of_the_command_line_is_of_zero_out(adjacency: str | None) -> None:
    words = "plan HolderSGD --loss logistic --bound-x 1 --n 10000 --epsilon 1 --delta 1e-6"
    text = io.StringIO()
    with redirect_stdout(text):
        assert (
            main([*words.split(), *(("--adjacency", adjacency) if adjacency else ()), "--json"])
            == 0
        )
    row = json.loads(text.getvalue())
    assert row["adjacency"] == row["budget"]["adjacency"] == (adjacency or ZERO_OUT)


def test_a_plan_of_the_command_line_for_filtered_users_is_of_replace_one() -> None:
    words = "plan UserFilteredSGD --n 1000 --pair-radius 1 --lr 1 --steps 3 --epsilon 2"
    text = io.StringIO()
    with redirect_stdout(text):
        assert main([*words.split(), "--delta", "1e-5", "--json"]) == 0
    assert json.loads(text.getvalue())["adjacency"] == REPLACE_ONE


# -- words ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_headlines_say_what_happens_to_the_one_record(adjacency: Any) -> None:
    assert in_words(adjacency) == WORDS[adjacency]
    accountant = dp.Accountant(adjacency=adjacency)
    accountant.authorize(STEP, 10)
    report = accountant.report(DELTA)
    assert report.in_words == WORDS[adjacency]
    run = Run("NoisyGD", Full(50), STEP, steps=10, planned=10, finalized=True)
    statement = make_statement(report, run)
    assert statement.headline.endswith(f"for one example ({WORDS[adjacency]}).")
    assert f"({WORDS[adjacency]})" in statement.plot().get_suptitle()


def test_an_unknown_adjacency_has_no_words() -> None:
    with pytest.raises(ValueError, match="adjacency must be one of"):
        in_words("bounded")
