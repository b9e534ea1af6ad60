"""`secure="exact"` where one answer is released: what is charged, what comes out, what the report says, who refuses."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from torch_dpsco import estimators
from torch_dpsco.accounting.analysis.rounding import exact_grid
from torch_dpsco.accounting.designs import is_exact
from torch_dpsco.algorithms import row_free
from torch_dpsco.errors import BudgetExceeded, ConditionError
from torch_dpsco.estimators import output as output_module
from torch_dpsco.estimators.base import plan_linear
from torch_dpsco.estimators.output import plan_output
from torch_dpsco.estimators.preparation import Preparation
from torch_dpsco.estimators.task import LinearTask

N, DIM = 60, 3
BUDGET = dp.Budget(1.0, 1e-4, "replace_one")
IDEAL = "floating-point attacks on the noise are out of scope"
LOGISTIC = dp.losses.Logistic()
GRID = 1.0 + 2.0**-12


def data(seed: int = 0) -> TensorDataset:
    draw = torch.Generator().manual_seed(seed)
    features = torch.randn(N, DIM, generator=draw, dtype=torch.float64) / 2
    return TensorDataset(features, torch.randn(N, 1, generator=draw, dtype=torch.float64).sign())


def output(secure: str | None, **changes: object) -> dp.OutputPerturbation:
    given = {
        "loss": LOGISTIC,
        "n": N,
        "budget": BUDGET,
        "bound_x": 1.0,
        "reg": 5.0,
        "secure": secure,
    } | changes
    layer, ledger = nn.Linear(DIM, 1).double(), given.pop("accountant", None)
    plan = dp.OutputPerturbation.plan(model=layer, **given)
    return dp.OutputPerturbation(layer.parameters(), plan, accountant=ledger)


def bolt_on(secure: str | None, **changes: object) -> dp.BoltOnPSGD:
    given = {
        "problem": LOGISTIC.problem(bound_x=2.0),
        "n": N,
        "budget": BUDGET,
        "batch_size": 10,
        "reg": 0.1,
    }
    plan = dp.BoltOnPSGD.plan(dim=DIM + 1, **(given | {"secure": secure} | changes))
    return dp.BoltOnPSGD(nn.Linear(DIM, 1).double().parameters(), plan)


def holder(secure: str | None, **changes: object) -> dp.HolderOutputSGD:
    problem = dp.losses.Hinge(power=1.5).problem(bound_x=2.0, radius=1e6)
    given = {
        "problem": problem,
        "n": N,
        "budget": BUDGET,
        "batch_size": 10,
        "lr": 0.01,
        "secure": secure,
    }
    plan = dp.HolderOutputSGD.plan(dim=DIM + 1, **(given | changes))
    return dp.HolderOutputSGD(nn.Linear(DIM, 1).double().parameters(), plan)


def finished(optimizer: object, loss: object = LOGISTIC) -> torch.Tensor:
    if isinstance(optimizer, dp.OutputPerturbation):
        optimizer.solve(data())
        optimizer.finalize()
    else:
        layer = [p for group in optimizer.param_groups for p in group["params"]]
        with optimizer:
            for x, y in optimizer.loader(data()):
                loss(nn.functional.linear(x, *layer), y).backward()
                optimizer.step()
    return torch.cat(
        [p.detach().flatten() for group in optimizer.param_groups for p in group["params"]]
    )


MAKERS = [output, bolt_on, holder]


def said(report: object) -> str:
    return " ".join(str(report).split())


def noise_of(optimizer: object) -> tuple[float, float]:
    event = (
        optimizer._plan.event()
        if isinstance(optimizer, dp.OutputPerturbation)
        else optimizer.event
    )
    (_, sensitivity), *_ = event.sens
    return event.sigma, sensitivity


@pytest.mark.parametrize("make", MAKERS)
def test_the_grid_is_in_the_sensitivity_of_exact_plans(make):
    (std, moved), (exact_std, exact_moved) = noise_of(make(None)), noise_of(make("exact"))
    assert exact_moved == moved * GRID
    assert 1.0 <= exact_std / std / GRID < 1.0 + 1e-12


@pytest.mark.parametrize("make", MAKERS)
def test_every_number_of_an_exact_answer_is_on_the_public_grid(make):
    optimizer = make("exact")
    std, sensitivity = noise_of(optimizer)
    spacing = Fraction(exact_grid(std, sensitivity, DIM + 1).spacing)
    answers = [finished(optimizer), finished(make(None))]
    on = [
        [round(Fraction(x) / spacing) * float(spacing) == x for x in answer.tolist()]
        for answer in answers
    ]
    assert all(on[0])
    assert not any(on[1])  # of probability 2^-30 otherwise


@pytest.mark.parametrize("make", MAKERS)
def test_reports_of_exact_runs_lose_the_sentence_and_only_those(make):
    exact, plain = make("exact"), make(None)
    finished(exact)
    finished(plain)
    assert IDEAL not in said(exact.report())
    assert "xact discrete Gaussian noise on a public grid" in said(exact.report())
    assert IDEAL in said(plain.report())
    assert exact.report().epsilon <= 1.0


def test_a_shared_ledger_keeps_the_sentence_of_its_other_release():
    accountant = dp.Accountant(adjacency="replace_one")
    finished(output(None, accountant=accountant))
    exact = output("exact", accountant=accountant)
    finished(exact)
    assert IDEAL in said(exact.report(1e-4))


def test_exact_answers_are_the_noiseless_ones_but_for_integer_noise(monkeypatch):
    monkeypatch.setattr(
        "torch_dpsco.step.exact_noise.discrete_gaussian",
        lambda size, bits, read: np.zeros(size, np.int64),
    )
    monkeypatch.setattr(
        output_module, "gaussian_vector", lambda dim, *_: torch.zeros(dim, dtype=torch.float64)
    )
    optimizer = output("exact")
    exact, plain = finished(optimizer), finished(output(None))
    std, sensitivity = noise_of(optimizer)
    spacing, solved = exact_grid(std, sensitivity, DIM + 1).spacing, 2 * optimizer._plan.distance
    assert 0 < (exact - plain).abs().max() <= 0.75 * spacing + solved


def test_row_free_answers_pass_through_the_grid_as_one_vector(monkeypatch):
    seen = []

    def released(value, event, source):
        seen.append((value.clone(), event))
        return value + torch.arange(len(value), dtype=torch.float64)

    monkeypatch.setattr(row_free, "exact_release", released)
    optimizer = bolt_on("exact")
    answer = finished(optimizer)
    ((value, event),) = seen
    assert event is optimizer.event
    assert torch.equal(answer, value + torch.arange(DIM + 1, dtype=torch.float64))


# -- Ridge ------------------------------------------------------------------------------------------------------------


def task(**changes: object) -> LinearTask:
    given = {
        "loss": LOGISTIC,
        "preparation": Preparation(1.0),
        "dim": DIM,
        "n": 40,
        "budget": BUDGET,
    }
    return LinearTask(**(given | changes))


def squares(adjacency: str = "add_remove", **changes: object) -> LinearTask:
    budget = dp.Budget(1.0, 1e-4, adjacency=adjacency)
    return task(**({"loss": dp.losses.Squared(), "bound_y": 2.0, "budget": budget} | changes))


def test_a_ridge_in_exact_noise_finds_the_slope_and_says_so():
    X = np.linspace(-1, 1, 4000).reshape(-1, 1)
    given = {"epsilon": 4.0, "n": 4000, "bound_x": 1.0, "bound_y": 3.0}
    model = estimators.Ridge(**given, secure="exact").fit(X, 2 * X[:, 0])
    assert model.mechanism_ == "output"
    assert abs(model.coef_[0] - 2) < 0.6
    assert IDEAL not in said(model.report())
    assert model.privacy_.epsilon <= 4.0
    assert is_exact(model.privacy_.charges[0].event)
    plain = estimators.Ridge(**given).fit(X, 2 * X[:, 0])
    assert IDEAL in said(plain.report())


# -- estimators, moments ----------------------------------------------------------------------------------------------


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("estimator", ["LogisticRegression", "LinearSVC", "SoftmaxRegression"])
def test_auto_takes_a_mechanism_that_has_an_exact_form(estimator):
    X = np.linspace(-1, 1, 300).reshape(-1, 1)
    settings = {"epsilon": 4.0, "n": 300, "bound_x": 1.0, "classes": (0, 1)}
    model = getattr(estimators, estimator)(**settings, secure="exact").fit(X, X[:, 0] > 0)
    plain = ("objective", "noisy_gd", "preconditioned_gd")
    assert model.mechanism_ == "output"
    assert IDEAL not in said(model.report())
    assert getattr(estimators, estimator)(**settings).plan(1).mechanism in plain


# -- who refuses ------------------------------------------------------------------------------------------------------


def test_what_has_no_exact_form_refuses_by_name():
    refusals = [
        (lambda: plan_linear(task(), "objective", secure="exact"), "mechanism='output'"),
        (lambda: plan_linear(task(), "noisy_gd", secure="exact"), "mechanism='output'"),
        (lambda: plan_linear(squares(), "adassp", secure="exact"), "mechanism='output'"),
        (lambda: plan_linear(squares(curvature=0.1), secure="exact"), "mechanism='output'"),
        (lambda: output("exact", budget=dp.Budget(1.0, 0.0)), "K-norm"),
        (
            lambda: bolt_on("exact", budget=dp.Budget(1.0, 0.0, adjacency="replace_one")),
            "K-norm",
        ),
    ]
    for refused, words in refusals:
        with pytest.raises(ConditionError, match="secure must be None here") as error:
            refused()
        assert words in str(error.value)


@pytest.mark.slow
def test_releases_without_an_exact_form_name_the_assumption():
    linear = nn.Linear(DIM, 1).double()
    given = {"model": linear, "loss": LOGISTIC, "n": N, "budget": BUDGET, "bound_x": 1.0}
    for optimizer in (
        dp.ObjectivePerturbation(linear.parameters(), dp.ObjectivePerturbation.plan(**given)),
        dp.NoisyGD(linear.parameters(), dp.NoisyGD.plan(**given)),
        output(None, budget=dp.Budget(1.0, 0.0)),
    ):
        assert said(optimizer.report()).count(IDEAL) == 1
    assert IDEAL not in said(output("exact").report())  # nothing is released yet


def test_a_refused_exact_release_draws_nothing(monkeypatch):
    def drawn(*arguments):
        raise AssertionError("drawn")

    monkeypatch.setattr("torch_dpsco.step.exact_noise.discrete_gaussian", drawn)
    plan = plan_output(task(reg=2.0), secure="exact")
    with pytest.raises(BudgetExceeded):
        plan.release(
            torch.zeros(DIM, dtype=torch.float64),
            dp.Accountant(dp.Budget(0.1, 1e-6, "replace_one")),
            torch.Generator(),
        )
    ledger = dp.Accountant(plan.task.budget)
    with pytest.raises(AssertionError, match="drawn"):
        plan.release(torch.zeros(DIM, dtype=torch.float64), ledger, torch.Generator())
    assert len(ledger) == 1  # charged first


def test_a_word_that_is_not_exact_is_refused_everywhere():
    for refused in (
        lambda: output("yes"),
        lambda: bolt_on("yes"),
        lambda: holder("yes"),
    ):
        with pytest.raises(ValueError, match="secure must be one of None, exact"):
            refused()


def test_plans_print_what_noise_they_have():
    for plan in (
        plan_output(task(reg=2.0), secure="exact"),
        bolt_on("exact")._plan,
        holder("exact")._plan,
    ):
        assert "exact noise chosen" in " ".join(str(plan).split())
