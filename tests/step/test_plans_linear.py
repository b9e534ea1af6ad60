"""Plans of linear models that are released once: printed, saved, loaded and run, by optimizers and estimators alike."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from tests.edited_plans import edited
from torch_dpsco import estimators
from torch_dpsco.accounting.analysis.gaussian import noisy_gd_mu
from torch_dpsco.accounting.analysis.objective import (
    Change,
    amp_delta,
    log_det,
    softmax_log_det,
)
from torch_dpsco.accounting.curves import objective_curve
from torch_dpsco.accounting.events import Gaussian, KNorm, Pure, RDPCurve, in_words
from torch_dpsco.errors import AdjacencyError, CalibrationError, DpscoError, InfeasibleError
from torch_dpsco.estimators import gradient_descent, preparation
from torch_dpsco.estimators.base import plan_linear
from torch_dpsco.estimators.gradient_descent import NoisyGDPlan, UserGDPlan
from torch_dpsco.estimators.least_squares import AdaSSPPlan, BoostedPlan, PreconditionedGDPlan
from torch_dpsco.estimators.objective import ObjectivePlan
from torch_dpsco.estimators.output import OutputPlan, _sensitivity
from torch_dpsco.estimators.preparation import Preparation, PrivatePreparation
from torch_dpsco.estimators.solved import SolvedOptimizer
from torch_dpsco.estimators.task import LinearPlan, LinearTask, build_objective, make_records
from torch_dpsco.step import checks
from torch_dpsco.step.plan import Plan

N, DIM = 60, 3
BUDGET, ADDED, PURE = (
    dp.Budget(1.0, 1e-6),
    dp.Budget(1.0, 1e-6, "add_remove"),
    dp.Budget(1.0, 0.0),
)
ROWS = torch.randn(N, DIM, generator=torch.Generator().manual_seed(1))
SIGNS = torch.where(ROWS[:, 0] > 0, 1.0, -1.0)
SOFTMAX = dp.losses.SoftmaxCrossEntropy(3)


def made(
    cls: type[SolvedOptimizer], **kind: Any
) -> Callable[[], tuple[type[SolvedOptimizer], LinearPlan]]:
    given = {
        "model": nn.Linear(DIM, 1),
        "loss": dp.losses.Logistic(),
        "n": N,
        "bound_x": 1.0,
        "reg": 30.0,
        **kind,
    }
    return lambda: (cls, cls.plan(**given))


MADE: dict[str, Callable[[], tuple[type[SolvedOptimizer], LinearPlan]]] = {
    "output": made(dp.OutputPerturbation, budget=BUDGET),
    "output, reg chosen": made(dp.OutputPerturbation, budget=BUDGET, reg=None),
    "output, add_remove": made(dp.OutputPerturbation, budget=ADDED, n_max=100),
    "output, pure": made(dp.OutputPerturbation, budget=PURE, radius=0.5),
    "output, exact": made(dp.OutputPerturbation, budget=BUDGET, secure="exact"),
    "output, noise": made(dp.OutputPerturbation, noise_multiplier=4.0, adjacency="zero_out"),
    "output, attacked": made(
        dp.OutputPerturbation, budget=BUDGET, attack_radius=0.1, attack_norm=float("inf")
    ),
    "output, attacked in a feature": made(
        dp.OutputPerturbation,
        budget=BUDGET,
        attack_radius=0.1,
        attack_scale=tuple(float(j) for j in range(DIM)),
    ),
    "objective": made(dp.ObjectivePerturbation, budget=BUDGET, residual_clip=0.5),
    "objective, pure": made(dp.ObjectivePerturbation, budget=PURE),
    "objective, noise": made(dp.ObjectivePerturbation, noise_multiplier=4.0),
    "objective, curve": made(dp.ObjectivePerturbation, budget=ADDED, charge="curve"),
    "objective, classes": made(
        dp.ObjectivePerturbation, model=nn.Linear(DIM, 3), loss=SOFTMAX, budget=BUDGET
    ),
    "noisy": made(dp.NoisyGD, budget=BUDGET),
    "noisy, add_remove": made(dp.NoisyGD, budget=ADDED, steps=5, reg=None),
    "noisy, noise": made(dp.NoisyGD, noise_multiplier=4.0, steps=5),
}


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("name", MADE)
@pytest.mark.filterwarnings("ignore:noise buries")
def test_a_plan_that_was_saved_runs_and_spends_what_it_said(name: str) -> None:
    cls, plan = MADE[name]()
    loaded = Plan.from_dict(json.loads(json.dumps(plan.to_dict(), allow_nan=False)))
    assert loaded == plan
    classes = plan.task.num_scores
    model = nn.Linear(DIM, classes)
    optimizer = cls(model.parameters(), loaded)
    targets = SIGNS if classes == 1 else torch.arange(N) % classes
    (optimizer.certify if "loop" in name else optimizer.solve)(TensorDataset(ROWS, targets))
    optimizer.finalize()
    delta = 1e-6 if plan.budget is None else plan.budget.delta
    assert optimizer.report(delta).epsilon == plan.epsilon(delta)
    if plan.budget is not None:
        assert plan.epsilon() <= plan.budget.epsilon


@pytest.mark.cases(8, 4)
@pytest.mark.parametrize("name", MADE)
@pytest.mark.filterwarnings("ignore:noise buries")
def test_a_plan_prints_a_table_in_words(name: str) -> None:
    _, plan = MADE[name]()
    lines = str(plan).splitlines()
    assert (
        lines[0]
        == f"{type(plan).__name__}: privacy for one example ({in_words(plan.adjacency)})"
    )
    assert max(map(len, lines)) <= 110
    labels = [line.split()[0] for line in lines[1:] if not line.startswith("   ")]
    assert labels[:4] == ["promise", "epsilon", "model", "noise"]
    assert "assumed" in labels
    exact = name.startswith("output") and "pure" not in name
    assert (
        "exact" in labels
    ) is exact  # objective perturbation and noisy gradient descent have none
    assert ("steps" in labels) is name.startswith("noisy")


@pytest.mark.slow
def test_noise_of_your_own_is_what_a_budget_would_have_chosen() -> None:
    """Read back, the noise of a budget has its cost: the same events, whoever chose them."""
    chosen = MADE["output"]()[1]
    ((_, moved),) = chosen.event().sens
    own = made(dp.OutputPerturbation, noise_multiplier=chosen.noise_scale / moved)()[1]
    assert own.budget is None
    assert own.event().sigma == pytest.approx(chosen.event().sigma, rel=1e-15)
    assert own.epsilon(1e-6) == pytest.approx(chosen.epsilon(), rel=1e-12)
    chosen = made(dp.NoisyGD, budget=BUDGET, steps=5)()[1]
    own = made(dp.NoisyGD, noise_multiplier=chosen.noise_std / chosen.task.lipschitz, steps=5)()[
        1
    ]
    assert own.event().mu == pytest.approx(chosen.event().mu, rel=1e-12)
    chosen = made(dp.ObjectivePerturbation, budget=BUDGET, charge="curve")()[1]
    own = made(
        dp.ObjectivePerturbation, noise_multiplier=chosen.noise_scale / chosen.task.lipschitz
    )()[1]
    assert own.event().orders == chosen.event().orders
    assert own.event().values == pytest.approx(chosen.event().values, rel=1e-12)


@pytest.mark.parametrize(
    ("cls", "kind", "word"),
    [
        (dp.OutputPerturbation, {}, "budget or noise_multiplier"),
        (dp.NoisyGD, {"noise_multiplier": -1.0}, "noise_multiplier"),
        (dp.NoisyGD, {"noise_multiplier": 1.0, "reg": None}, "noise_multiplier and reg"),
        (
            dp.ObjectivePerturbation,
            {"noise_multiplier": 1.0, "reg": None},
            "noise_multiplier and reg",
        ),
        (
            dp.ObjectivePerturbation,
            {"noise_multiplier": 1.0, "model": nn.Linear(DIM, 3), "loss": SOFTMAX},
            "softmax",
        ),
        (dp.OutputPerturbation, {"budget": ADDED, "adjacency": "zero_out"}, "adjacency"),
    ],
)
def test_what_noise_of_your_own_does_not_go_with_is_named(
    cls: Any, kind: dict[str, Any], word: str
) -> None:
    with pytest.raises((ValueError, AdjacencyError, CalibrationError), match=word):
        made(cls, **kind)()


@pytest.mark.parametrize("cls", [dp.OutputPerturbation, dp.ObjectivePerturbation, dp.NoisyGD])
def test_numbers_of_a_plan_given_to_the_optimizer_are_sent_to_the_plan(cls: Any) -> None:
    layer = nn.Linear(DIM, 1)
    with pytest.raises(ValueError, match=rf"secure must be given to {cls.__name__}.plan\(...\)"):
        cls(layer.parameters(), plan=made(cls, budget=BUDGET)()[1], secure="exact")


def test_an_accountant_of_another_adjacency_or_budget_is_refused() -> None:
    plan = made(dp.NoisyGD, noise_multiplier=4.0, adjacency="zero_out", steps=5)()[1]
    accountant = dp.Accountant(adjacency="replace_one")
    with pytest.raises(AdjacencyError, match="replace_one"):
        dp.NoisyGD(nn.Linear(DIM, 1).parameters(), plan, accountant=accountant)
    limited = made(dp.NoisyGD, noise_multiplier=0.1, budget=BUDGET, steps=5)()[1]
    with pytest.raises(
        InfeasibleError, match="epsilon must be >="
    ):  # of noise of your own a budget is the limit
        dp.NoisyGD(nn.Linear(DIM, 1).parameters(), limited)


def test_a_curve_costs_more_than_the_budget_of_its_noise_and_asks_for_room() -> None:
    cls, plan = MADE["objective, curve"]()
    assert plan.budget is None
    assert plan.epsilon(1e-6) > ADDED.epsilon
    with pytest.raises(InfeasibleError):
        cls(nn.Linear(DIM, 1).parameters(), plan, accountant=dp.Accountant(ADDED))
    cls(
        nn.Linear(DIM, 1).parameters(),
        plan,
        accountant=dp.Accountant(dp.Budget(2.0, 1e-6, "add_remove")),
    )


@pytest.mark.parametrize("mechanism", ["output", "objective", "noisy_gd"])
def test_an_estimator_runs_the_plan_of_the_optimizer(mechanism: str) -> None:
    settings = {
        "adjacency": "add_remove",
        "n": N,
        "bound_x": 1.0,
        "reg": 30.0,
        "classes": (0, 1),
        "residual_clip": None,
    }
    model = estimators.LogisticRegression(mechanism=mechanism, **settings).fit(ROWS, SIGNS > 0)
    cls = {
        "output": dp.OutputPerturbation,
        "objective": dp.ObjectivePerturbation,
        "noisy_gd": dp.NoisyGD,
    }[mechanism]
    assert model.plan_ == made(cls, budget=ADDED)()[1]
    assert model.plan_ == plan_linear(model.plan_.task, mechanism) == model.plan(DIM)
    assert model.privacy_.epsilon == model.plan_.epsilon()


@pytest.mark.parametrize("secure", [None, "exact"])
def test_the_plan_of_a_ridge_is_saved_too(secure: str | None) -> None:
    model = estimators.Ridge(n=N, bound_x=1.0, bound_y=1.0, secure=secure).fit(ROWS, SIGNS)
    plan = model.plan_
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert isinstance(plan, OutputPlan if secure else BoostedPlan)
    if secure:
        assert "exact noise chosen" in str(plan)
        asked = of_task("adassp", REAL)()
        assert type(Plan.from_dict(asked.to_dict()).constants) is type(asked.constants)


REAL = {"loss": dp.losses.Squared(), "bound_y": 1.0}


def of_task(
    mechanism: str, kind: dict[str, Any], budget: dp.Budget = ADDED, **asked: Any
) -> Callable[[], LinearPlan]:
    given = {"preparation": Preparation(1.0), "dim": DIM, "n": N, "budget": budget, **kind}
    return lambda: plan_linear(LinearTask(**given), mechanism, **asked)


def prepared(mechanism: str, **kind: Any) -> Callable[[], LinearPlan]:
    """A plan of rows, and of targets if the loss has real ones, that are measured before."""
    given = {
        "loss": dp.losses.Logistic(),
        "preparation": Preparation(1.0, intercept=0.3, whole=True),
        **kind,
    }
    prepare = PrivatePreparation(given=Preparation(2.0), rows=0.03, counts=0.05)
    if given["loss"].target_kind == "real":
        prepare = replace(prepare, bound_y=2.0, quantile=None if mechanism == "adassp" else 0.5)
        given["bound_y"] = prepare.most
    return lambda: plan_linear(
        LinearTask(dim=DIM, n=N, budget=ADDED, prepare=prepare, **given), mechanism
    )


def of_users(adjacency: str = "add_remove", **kind: Any) -> Callable[[], LinearPlan]:
    given = {
        "loss": dp.losses.Logistic(),
        "preparation": Preparation(1.0, intercept=1.0),
        **kind,
    }
    budget = dp.Budget(
        20.0, 1e-6, adjacency=adjacency, unit="user"
    )  # so that labels get a scale and an intercept
    return lambda: plan_linear(LinearTask(dim=DIM, n=N, budget=budget, **given))


EDITED: dict[str, Callable[[], LinearPlan]] = {
    name: lambda made=made: made()[1] for name, made in MADE.items()
} | {
    "adassp": of_task("adassp", REAL),
    "adassp, intervals": of_task("adassp", {**REAL, "curvature": 0.05}),
    "objective, intervals": of_task(
        "objective", {"loss": dp.losses.Logistic(), "curvature": 0.05}
    ),
    "boosted": of_task("boosted_adassp", REAL),
    "boosted, replace_one": of_task("boosted_adassp", REAL, BUDGET),
    "adassp, classes": of_task("adassp", {"loss": SOFTMAX}, BUDGET),
    "preconditioned": of_task("auto", {"loss": SOFTMAX}),
    "preconditioned, replace_one": of_task("preconditioned_gd", {"loss": SOFTMAX}, BUDGET),
    "preconditioned, signs": of_task(
        "preconditioned_gd", {"loss": dp.losses.Logistic(), "residual_clip": 0.3}
    ),
    "noisy, all sums": of_task("noisy_gd", {"loss": dp.losses.Logistic()}),
    "objective, measured": prepared("objective"),
    "objective, targets measured": prepared("objective", loss=dp.losses.Huber(), reg=30.0),
    "noisy, measured": prepared("noisy_gd", loss=dp.losses.Huber()),
    "output, measured": prepared("output", reg=30.0),
    "adassp, measured": prepared("adassp", loss=dp.losses.Squared()),
    "users": of_users(),
    "users, replace_one": of_users("replace_one"),
    "users, targets": of_users(loss=dp.losses.Huber(), bound_y=2.0),
    "boosted, measured": prepared("boosted_adassp", loss=dp.losses.Squared()),
    "preconditioned, measured": prepared("preconditioned_gd", loss=SOFTMAX),
}


class Draws:
    """What a release draws its noise with, and what it asks solvers for; nothing is solved."""

    def __init__(self, plan: LinearPlan, monkeypatch: pytest.MonkeyPatch) -> None:
        self.scales: list[float] = []
        self.distance, self.reg = math.inf, math.nan
        module = sys.modules[type(plan).draw.__module__]
        for name in ("gaussian_vector", "knorm_vector"):
            for place in (module, gradient_descent):
                monkeypatch.setattr(place, name, self._vector, raising=False)
        monkeypatch.setattr(module, "symmetric_noise", self._symmetric, raising=False)
        monkeypatch.setattr(module, "exact_release", self._exact, raising=False)
        monkeypatch.setattr(module, "solve", self._solve, raising=False)
        monkeypatch.setattr(module, "build_objective", self._objective, raising=False)
        size = plan.task.n
        rows, targets = torch.zeros(size, plan.task.dim), torch.ones(size)
        if plan.task.num_scores > 1:
            targets = torch.zeros(size, dtype=torch.int64)
        start = torch.zeros(plan.task.parameters, dtype=torch.float64)
        self.accountant = dp.Accountant(adjacency=plan.adjacency)
        self.measured: list[tuple[int, float]] = []
        units = None
        if plan.task.prepare is not None:
            monkeypatch.setattr(preparation, "gaussian_vector", self._measure)
            records = make_records(plan.task, rows, targets)
            unit, most = plan.task.preparation, plan.task.most_records
            units = plan.task.prepare.measure(
                records, unit, most, plan.adjacency, torch.Generator()
            )
        records = make_records(plan.task, rows, targets, units=units)
        solved = (
            (records, torch.arange(size)) if plan.unit == "user" else plan.solve(records, start)
        )
        plan.release(solved, self.accountant, torch.Generator())

    def _vector(self, size: int, scale: float, _: Any) -> torch.Tensor:
        self.scales.append(scale)
        return torch.zeros(size, dtype=torch.float64)

    def _symmetric(self, size: int, diagonal: float, off: float, _: Any) -> torch.Tensor:
        self.scales += [off, diagonal]
        return torch.zeros(size, size, dtype=torch.float64)

    def _measure(self, size: int, scale: float, _: Any) -> torch.Tensor:
        self.measured.append((size, scale))
        return torch.zeros(size, dtype=torch.float64)

    def _exact(self, value: torch.Tensor, event: Gaussian, _: Any) -> torch.Tensor:
        self.scales.append(event.sigma)
        return value

    def _objective(self, task: LinearTask, reg: float, records: Any, linear: Any = None) -> Any:
        self.reg = reg or self.reg  # a Hessian is released without it
        return build_objective(task, reg, records, linear)

    def _solve(self, objective: Any, distance: float, **_: Any) -> Any:
        self.distance = distance
        return SimpleNamespace(w=torch.zeros(objective.dim, dtype=torch.float64))


def require_covered(plan: LinearPlan, draws: Draws) -> None:
    """The event costs no less than theory says of what was drawn."""
    event, task, scales, reg, hair = (
        plan.event(),
        plan.task,
        draws.scales,
        plan.task.reg,
        1 + 1e-9,
    )
    sides = 2 if plan.adjacency == "replace_one" else 1
    measured = math.hypot(
        *((sides if size == task.dim else 1) / scale for size, scale in draws.measured)
    )
    if measured and not isinstance(plan, ObjectivePlan):
        first, event = event.events
        assert first.mu * hair >= measured
    if isinstance(plan, OutputPlan):
        moved = _sensitivity(task, reg)[0] + 2 * draws.distance
        if isinstance(event, KNorm):
            assert event.eps * hair >= moved / scales[0]
        else:
            assert event.sensitivity(plan.adjacency) * hair >= moved
            assert event.sigma <= scales[0]
    elif isinstance(plan, NoisyGDPlan):
        beta = task.most_records * task.smoothness + draws.reg
        contraction = min(1.0, max(abs(1 - plan.lr * draws.reg), abs(1 - plan.lr * beta)))
        if plan.momentum is not None:
            contraction = 1.0  # all sums are released
        assert len(set(scales)) == 1
        assert event.mu * hair >= noisy_gd_mu(
            len(scales), contraction, sides * task.lipschitz, scales[0]
        )
    elif isinstance(plan, ObjectivePlan):
        noise, out, *hessian = scales
        if hessian:
            off, diagonal, *squares = hessian
            levels = [math.sqrt(sides) * task.smoothness / min(diagonal, off * math.sqrt(2))]
            measured = math.hypot(*levels, *(task.loss.threshold**2 / std for std in squares))
        spent = math.hypot(2 * draws.distance / out, measured)
        classes = task.num_scores
        determinant = log_det(draws.reg, task.smoothness)
        if classes > 1:
            determinant = softmax_log_det(task.preparation.bound, draws.reg, classes)
        change = Change(determinant, sides * task.lipschitz, sides * max(1, classes - 1))
        if task.monotone and classes == 1:
            change = Change(determinant, task.lipschitz, replaced=sides == 2)
        assert (
            isinstance(event, Pure) == task.pure
        )  # of K-norm noise, which no Gaussian law covers
        if isinstance(event, Pure):
            assert (
                event.eps * hair
                >= log_det(draws.reg, task.smoothness) + sides * task.lipschitz / noise + spent
            )
        elif isinstance(event, RDPCurve):
            curve = objective_curve(noise, change, spent * (1 - 1e-9), plan.adjacency)
            assert all(
                one * hair >= other
                for one, other in zip(event.values, curve.values, strict=True)
            )
        else:
            assert event.delta * (1 + 1e-6) >= amp_delta(event.eps, noise, change, spent)
    elif isinstance(plan, UserGDPlan):
        first, last = scales[: plan.steps], scales[plan.steps :]
        assert len(last) in (0, 32)
        levels = [sides * plan.clip / std for std in first] + [
            sides * math.sqrt(2) / std for std in last
        ]
        assert event.mu * hair >= math.hypot(*levels)
    elif isinstance(plan, PreconditionedGDPlan):
        gram, *steps = scales
        clip = plan.clip  # of the gradients in draws: see test_no_record_moves_a_preconditioned_step_by_more_than_...
        levels = (
            math.sqrt(sides) * task.preparation.bound**2 / gram,
            *(sides * clip / std for std in steps),
        )
        assert event.mu * hair >= math.hypot(*levels)
    else:
        assert isinstance(plan, AdaSSPPlan)
        bound_y = task.bound_y or math.sqrt(1 - 1 / task.num_scores)
        square, product = task.preparation.bound**2, task.preparation.bound * bound_y
        lmin, off, diagonal, xty, *total = scales
        levels = [
            square / lmin,
            math.sqrt(sides) * square / min(diagonal, off * math.sqrt(2)),
            sides * product / xty,
        ]
        levels += [bound_y**2 / std for std in total]
        assert len(total) == bool(task.curvature)
        assert event.mu * hair >= math.hypot(*levels)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("name", EDITED)
@pytest.mark.filterwarnings("ignore")
def test_an_edited_plan_is_refused_or_charges_what_it_draws(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever number of a saved plan is another one: what is charged is what the release draws, or more."""
    made, ran = EDITED[name](), 0
    require_covered(made, Draws(made, monkeypatch))
    for what, saved in edited(made):
        try:
            plan = Plan.from_dict(saved)
            draws = Draws(plan, monkeypatch)
            epsilon = None if plan.budget is None else plan.epsilon()
        except (ValueError, DpscoError):
            continue
        ran += 1
        try:
            require_covered(plan, draws)
        except AssertionError as error:
            raise AssertionError(what) from error
        if epsilon is not None and epsilon > plan.budget.epsilon:
            with pytest.raises(InfeasibleError):
                checks.require_one_step(plan.ledger(), plan.adjacency, plan.event())
    assert ran


@pytest.mark.slow
def test_plans_for_one_target_are_charged_alike() -> None:
    """So that a planned budget, which knows its events beforehand, admits a search over settings."""
    for budget in (ADDED, PURE):
        events = {
            made(dp.ObjectivePerturbation, budget=budget, residual_clip=clip)()[1].event()
            for clip in (0.5, 1.0, None)
        }
        assert len(events) == 1
    assert (
        len(
            {
                made(dp.OutputPerturbation, budget=PURE, reg=reg)()[1].event()
                for reg in (3.0, 30.0)
            }
        )
        == 1
    )


def test_a_plan_with_half_the_noise_costs_more() -> None:
    for name, field in (
        ("output", "noise_scale"),
        ("output, pure", "noise_scale"),
        ("objective", "noise_scale"),
        ("objective, pure", "noise_scale"),
        ("noisy", "noise_std"),
    ):
        cls, plan = MADE[name]()
        less = Plan.from_dict(plan.to_dict() | {field: getattr(plan, field) / 2})
        with pytest.raises(InfeasibleError):
            cls(nn.Linear(DIM, 1).parameters(), less)
    for field in ("charged", "sensitivity", "distance", "lr", "reg"):
        with pytest.raises(ValueError, match="must be its own"):
            Plan.from_dict(plan.to_dict() | {field: 1.0})
