"""The noise of each release: its law, its scale, when it is drawn, what is charged before. False alarms: 1e-6 each."""

from __future__ import annotations

import importlib
import math
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

import torch_dpsco as dp
from torch_dpsco.accounting.analysis.gaussian import gaussian_delta
from torch_dpsco.accounting.analysis.objective import (
    AMP_MU_OUT,
    AMP_PURE_SHARE,
    Change,
    amp_sigma,
    log_det,
    softmax_log_det,
)
from torch_dpsco.errors import ConditionError, InfeasibleError, PrivacyError, UtilityWarning
from torch_dpsco.estimators import Lasso, LogisticRegression, output
from torch_dpsco.estimators.base import plan_linear
from torch_dpsco.estimators.fits import fit_linear
from torch_dpsco.estimators.objective import plan_objective
from torch_dpsco.estimators.output import plan_output
from torch_dpsco.estimators.preparation import Preparation
from torch_dpsco.estimators.solvers import Solution, solve
from torch_dpsco.estimators.task import LinearTask, build_objective, make_records
from torch_dpsco.noise import gaussian_vector
from torch_dpsco.step.exact_noise import knorm_vector

FALSE_ALARM = 1e-6
WIDE = 20_000


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def task(delta: float = 1e-6, **settings: object) -> LinearTask:
    given = {
        "loss": dp.losses.Logistic(),
        "preparation": Preparation(1.0),
        "dim": 2,
        "n": 4,
        "reg": 2.0,
    }
    return LinearTask(**(given | {"budget": dp.Budget(1.0, delta, "replace_one")} | settings))


def assert_std(values: Tensor, std: float) -> None:
    low, high = stats.chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], values.numel())
    assert low <= float((values / std).square().sum()) <= high


def assert_gamma(length: float, dim: int, scale: float) -> None:
    low, high = stats.gamma.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], dim)
    assert low <= length / scale <= high


# -- the samplers -----------------------------------------------------------------------------------------------------


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("dim", [1, 2, 5])
def test_the_radius_of_the_k_norm_mechanism_is_gamma_and_its_direction_uniform(dim: int) -> None:
    draws = generator(dim)
    noise = torch.stack([knorm_vector(dim, 2.5, draws) for _ in range(3000)])
    radii = noise.norm(dim=1)
    assert stats.kstest(radii.numpy(), stats.gamma(dim, scale=2.5).cdf).pvalue > FALSE_ALARM
    for coordinate in (noise / radii[:, None]).T:
        if dim == 1:
            assert stats.binomtest(int((coordinate > 0).sum()), 3000).pvalue > FALSE_ALARM
        else:
            law = stats.beta((dim - 1) / 2, (dim - 1) / 2)
            assert stats.kstest(((1 + coordinate) / 2).numpy(), law.cdf).pvalue > FALSE_ALARM
    assert abs(float(stats.spearmanr(radii, noise[:, 0] / radii).statistic)) < 0.1


def test_gaussian_noise_has_its_std_and_its_law() -> None:
    noise = gaussian_vector(WIDE, 0.3, generator(1))
    assert noise.dtype == torch.float64
    assert_std(noise, 0.3)
    assert stats.kstest(noise.numpy(), stats.norm(scale=0.3).cdf).pvalue > FALSE_ALARM


@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf])
def test_a_scale_out_of_range_is_named(wrong: float) -> None:
    with pytest.raises(ValueError, match="std"):
        gaussian_vector(2, wrong, generator())
    with pytest.raises(ValueError, match="scale"):
        knorm_vector(2, wrong, generator())
    with pytest.raises(ValueError, match="scale"):
        knorm_vector(2, 0.0, generator())


# -- output perturbation ----------------------------------------------------------------------------------------------


def test_the_noise_on_a_minimizer_is_the_planned_one() -> None:
    wide = task(dim=WIDE)
    plan, point = plan_output(wide), torch.full((WIDE,), 0.25, dtype=torch.float64)
    noise = plan.release(point, dp.Accountant(wide.budget), generator(2)) - point
    assert_std(noise, plan.noise_scale)
    pure = task(dim=WIDE, delta=0.0)
    planned = plan_output(pure)
    drawn = planned.release(point, dp.Accountant(pure.budget), generator(3)) - point
    assert_gamma(float(drawn.norm()), WIDE, planned.noise_scale)


def test_the_noise_covers_what_the_solver_left() -> None:
    for given in (task(), task(loss=dp.losses.Hinge()), task(tilt=0.5, n_min=2)):
        plan = plan_output(given)
        moved = dict(plan.event().sens)["replace_one"]
        assert moved >= plan.sensitivity + 2 * plan.distance
        assert gaussian_delta(moved / plan.noise_scale, 1.0) <= 1e-6 * (1 + 1e-9)
        pure = plan_output(replace(given, budget=dp.Budget(1.0, 0.0, "replace_one")))
        assert pure.noise_scale >= moved / 1.0
        assert pure.event().eps == 1.0


def test_a_released_point_is_certified_within_the_planned_distance() -> None:
    rows, signs = (
        torch.randn(4, 2, generator=generator(4)).double(),
        torch.tensor([1.0, -1.0, 1.0, 1.0]),
    )
    for given in (
        task(),
        task(loss=dp.losses.Hinge()),
        task(tilt=0.5),
        task(radius=0.2),
        task(attack_radius=0.3),
    ):
        plan = plan_output(given)
        records = make_records(given, rows, signs)
        objective = build_objective(plan.task, plan.reg, records)
        exact = solve(objective, plan.distance * 1e-2, radius=plan.task.radius).w
        assert float((plan.solve(records) - exact).norm()) <= plan.distance * 1.01


def test_a_plan_of_a_weaker_objective_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    given = task()
    records = make_records(given, torch.ones(4, 2), torch.ones(4))
    monkeypatch.setattr(
        output,
        "build_objective",
        lambda task, reg, rows: build_objective(task, 0.99 * reg, rows),
    )
    with pytest.raises(ConditionError, match="plan"):
        plan_output(given).solve(records)


@pytest.mark.slow
def test_the_answer_is_projected_onto_the_ball() -> None:
    for mechanism in ("output", "objective", "noisy_gd"):
        given = task(radius=1e-3)
        answer = fit_linear(
            plan_linear(given, mechanism), torch.ones(4, 2), torch.ones(4)
        ).weights
        assert float(answer.norm()) <= 1e-3 * (1 + 1e-12)


# -- objective perturbation -------------------------------------------------------------------------------------------


@pytest.mark.weekly
@pytest.mark.parametrize("replaced", [False, True])
def test_the_noise_in_an_objective_is_that_of_the_theorem_for_its_loss(replaced: bool) -> None:
    adjacency, times = ("replace_one", 2) if replaced else ("add_remove", 1)
    budget, reg, mu = dp.Budget(1.0, 1e-6, adjacency=adjacency), 2.0, AMP_MU_OUT
    spent = 1e-6 * (1 - 1e-9)  # a ledger needs some left to round with

    def planned(**settings: object) -> float:
        return plan_objective(task(budget=budget, reg=reg, **settings)).noise_scale

    signed = amp_sigma(1.0, spent, Change(log_det(reg, 0.25), 1.0, replaced=replaced), mu)
    assert planned() >= signed * (1 - 1e-12)
    assert planned() == pytest.approx(signed, rel=1e-9)
    both_ways = amp_sigma(1.0, spent, Change(log_det(reg, 1.0), times * 0.5, times), mu)
    assert planned(loss=dp.losses.Huber(0.5), bound_y=3.0) == pytest.approx(both_ways, rel=1e-9)
    determinant = softmax_log_det(1.0, reg, 3)
    classes = amp_sigma(1.0, spent, Change(determinant, times * math.sqrt(2), times * 2), mu)
    assert planned(loss=dp.losses.SoftmaxCrossEntropy(3)) == pytest.approx(classes, rel=1e-9)


@pytest.mark.parametrize("epsilon", [0.1, 3.0])
def test_pure_noise_covers_both_approximate_minimizers(epsilon: float) -> None:
    """Each may be off by the distance, which K-norm noise pays for with its share of epsilon."""
    plan = plan_objective(task(budget=dp.Budget(epsilon, 0.0, "replace_one"), reg=50.0))
    paid = 2 * plan.distance / plan.output_scale
    assert AMP_PURE_SHARE * epsilon * (1 - 1e-12) <= paid <= AMP_PURE_SHARE * epsilon


@pytest.mark.parametrize("pure", [False, True])
def test_the_linear_term_and_the_last_noise_have_their_planned_scales(
    pure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = task(dim=WIDE, delta=0.0 if pure else 1e-6)
    plan, seen = plan_objective(wide), []

    def secret_solver(objective, distance: float, **options: object) -> Solution:
        seen.append((objective.linear_term, distance, objective.strong_convexity))
        return Solution(torch.zeros(WIDE, dtype=torch.float64), 0.0)

    monkeypatch.setattr("torch_dpsco.estimators.objective.solve", secret_solver)
    records = make_records(wide, torch.zeros(4, WIDE), torch.ones(4))
    answer = plan.release(records, dp.Accountant(wide.budget), generator(5))
    [(term, distance, mu)] = seen
    assert (distance, mu) == (plan.distance, plan.reg)
    if pure:
        assert_gamma(float(term.norm()), WIDE, plan.noise_scale)
        assert_gamma(float(answer.norm()), WIDE, plan.output_scale)
    else:
        assert_std(term, plan.noise_scale)
        assert_std(answer, plan.output_scale)
    cosine = float(term @ answer / term.norm() / answer.norm())
    assert abs(cosine) * math.sqrt(WIDE) < stats.norm.isf(
        FALSE_ALARM / 2
    )  # two draws, not one twice


@pytest.mark.slow
def test_the_perturbed_point_has_a_gradient_below_its_certified_norm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = task(residual_clip=0.5)
    plan, points = plan_objective(given), []
    rows = torch.tensor([[3.0, 1.0], [0.2, 0.1], [-1.0, 0.5], [0.0, 0.9]])
    records = make_records(given, rows, torch.tensor([1.0, -1.0, 1.0, 1.0]))
    original = importlib.import_module("torch_dpsco.estimators.objective").solve

    def watched(objective, distance: float, **options: object) -> Solution:
        found = original(objective, distance, **options)
        points.append(float(objective.value_and_gradient(found.w)[1].norm()))
        return found

    monkeypatch.setattr("torch_dpsco.estimators.objective.solve", watched)
    for seed in range(20):
        plan.release(records, dp.Accountant(given.budget), generator(seed))
    assert len(points) == 20
    assert max(points) <= plan.distance * plan.reg


# -- order ------------------------------------------------------------------------------------------------------------

MECHANISMS = [
    ("output", {}),
    ("output", {"budget": dp.Budget(1.0, 0.0, "replace_one")}),
    ("objective", {}),
    ("objective", {"budget": dp.Budget(1.0, 0.0, "replace_one")}),
    ("noisy_gd", {}),
    ("adassp", {"loss": dp.losses.Squared(), "bound_y": 1.0}),
    ("boosted_adassp", {"loss": dp.losses.Squared(), "bound_y": 1.0}),
    ("preconditioned_gd", {"reg": None}),
]
MODULES = {
    "noisy_gd": "gradient_descent",
    "preconditioned_gd": "gradient_descent",
    "boosted_adassp": "gradient_descent",
    "adassp": "least_squares",
}
DRAWERS = {
    "output": ("gaussian_vector", "knorm_vector"),
    "objective": ("gaussian_vector", "knorm_vector"),
    "noisy_gd": ("gaussian_vector",),
    "adassp": ("gaussian_vector",),
    "boosted_adassp": ("gaussian_vector",),
    "preconditioned_gd": ("gaussian_vector",),
}


@pytest.mark.parametrize(("mechanism", "settings"), MECHANISMS)
def test_a_refused_release_draws_nothing(
    mechanism: str, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawn(*arguments: object) -> Tensor:
        raise AssertionError("noise was drawn")

    for name in DRAWERS[mechanism]:
        monkeypatch.setattr(
            f"torch_dpsco.estimators.{MODULES.get(mechanism, mechanism)}.{name}", drawn
        )
    given = task(**settings)
    spent = dp.Accountant(given.budget)
    spent.authorize(dp.accounting.events.Pure(1.0))
    draws, before = generator(), len(spent)
    state = draws.get_state()
    with (
        pytest.warns(UtilityWarning),
        pytest.raises(PrivacyError),
    ):  # the budget is spent, or planned for another
        fit_linear(
            plan_linear(given, mechanism),
            torch.ones(4, 2),
            torch.ones(4),
            accountant=spent,
            generator=draws,
        )
    with pytest.raises(PrivacyError):  # past all earlier checks
        plan_linear(given, mechanism).release(None, spent, draws)
    assert torch.equal(draws.get_state(), state)
    assert len(spent) == before


@pytest.mark.cases(6, 2)
@pytest.mark.parametrize(("mechanism", "settings"), MECHANISMS)
def test_a_release_is_charged_before_its_first_draw_and_fits_its_budget(
    mechanism: str, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(
        f"torch_dpsco.estimators.{MODULES.get(mechanism, mechanism)}"
    )
    given = task(**settings)
    ledger, charges = dp.Accountant(given.budget), []
    for name in DRAWERS[mechanism]:
        original = getattr(module, name)

        def watched(*arguments: object, original=original) -> Tensor:
            charges.append(len(ledger))
            return original(*arguments)

        monkeypatch.setattr(module, name, watched)
    first = fit_linear(
        plan_linear(given, mechanism), torch.ones(4, 2), torch.ones(4), accountant=ledger
    ).weights
    assert set(charges) == {len(ledger)}
    assert len(ledger) >= 1
    assert 0.9 < ledger.get_epsilon(given.budget.delta) <= given.budget.epsilon
    fresh = dp.Accountant(given.budget)
    assert not torch.equal(
        first,
        fit_linear(
            plan_linear(given, mechanism), torch.ones(4, 2), torch.ones(4), accountant=fresh
        ).weights,
    )


@pytest.mark.parametrize("mechanism", ["output", "objective"])
def test_noise_is_drawn_once(mechanism: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(f"torch_dpsco.estimators.{mechanism}")
    scales: list[float] = []

    def counted(dim: int, scale: float, draws: torch.Generator) -> Tensor:
        scales.append(scale)
        return gaussian_vector(dim, scale, draws)

    monkeypatch.setattr(module, "gaussian_vector", counted)
    given = task()
    fit_linear(plan_linear(given, mechanism), torch.ones(4, 2), torch.ones(4))
    if mechanism == "output":
        assert scales == [plan_output(given).noise_scale]
    else:
        plan = plan_objective(given)
        assert scales == [plan.noise_scale, plan.output_scale]


@pytest.mark.parametrize(
    ("mechanism", "settings"),
    [
        ("objective", {"loss": dp.losses.Hinge()}),
        ("objective", {"loss": dp.losses.Squared(), "bound_y": 1.0}),
        ("objective", {"tilt": 1.0}),
        ("objective", {"attack_radius": 1.0}),
        (
            "objective",
            {
                "loss": dp.losses.SoftmaxCrossEntropy(3),
                "budget": dp.Budget(1.0, 0.0, "replace_one"),
            },
        ),
        ("noisy_gd", {"loss": dp.losses.Hinge()}),
        ("noisy_gd", {"loss": dp.losses.Squared(), "bound_y": 1.0}),
        ("noisy_gd", {"tilt": 1.0}),
        ("noisy_gd", {"attack_radius": 1.0}),
        ("noisy_gd", {"budget": dp.Budget(1.0, 0.0, "replace_one")}),
        ("adassp", {}),
        ("adassp", {"loss": dp.losses.Squared(), "bound_y": 1.0, "residual_clip": 0.5}),
        ("adassp", {"loss": dp.losses.Squared(), "bound_y": 1.0, "tilt": 0.5}),
        ("adassp", {"loss": dp.losses.Squared(), "bound_y": 1.0, "attack_radius": 0.5}),
        (
            "adassp",
            {
                "loss": dp.losses.Squared(),
                "bound_y": 1.0,
                "budget": dp.Budget(1.0, 0.0, "replace_one"),
            },
        ),
        ("output", {"tilt": 1.0, "budget": dp.Budget(1.0, 1e-6, adjacency="add_remove")}),
        ("output", {"tilt": -10.0}),
        ("output", {"loss": dp.losses.Squared(), "bound_y": 1.0, "tilt": 1.0}),
    ],
)
def test_a_mechanism_refuses_what_it_does_not_cover(
    mechanism: str, settings: dict[str, object]
) -> None:
    targets = (
        torch.zeros(4, dtype=torch.int64)
        if "Softmax" in repr(settings.get("loss"))
        else torch.ones(4)
    )
    with pytest.raises(ConditionError):
        fit_linear(plan_linear(task(**settings), mechanism), torch.ones(4, 2), targets)


def test_a_regularizer_too_small_for_epsilon_is_refused_with_the_least_one() -> None:
    with pytest.raises(InfeasibleError, match="reg"):
        plan_objective(task(reg=0.01))
    with pytest.raises(InfeasibleError, match="reg"):
        plan_objective(task(reg=0.01, delta=0.0))


@pytest.mark.parametrize("groups", [None, np.arange(50)])
def test_a_fit_that_noise_buries_says_so_before_it_is_charged(groups: Any) -> None:
    """By public numbers alone; the same settings with more records, or features that are chosen, say nothing."""
    draws = np.random.default_rng(0)
    X = draws.uniform(-1, 1, (50, 9))
    y = (X[:, 0] > 0).astype(int)
    ledger = dp.Accountant(dp.Budget(0.01, 1e-6, unit="example" if groups is None else "user"))
    model = LogisticRegression(
        epsilon=0.01, bound_x=3.0, classes=(0, 1), n=50, accountant=ledger
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UtilityWarning, match=r"noise buries the signal: .* \(n=50, epsilon"):
            model.fit(X, y, groups=groups)
    assert not len(ledger)
    many = np.tile(X, (100, 1))
    enough = {"epsilon": 1.0, "n": 5000, "bound_x": 3.0}
    LogisticRegression(**enough, classes=(0, 1)).fit(many, np.tile(y, 100))
    wide = draws.uniform(-1, 1, (400, 3000))
    Lasso(epsilon=3.0, n=400, bound_x=1.0, bound_y=1.0).fit(wide, wide[:, 0])
