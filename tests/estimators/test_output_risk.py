"""What a plan of output perturbation says of risk: the paper's regularizer, and a bound that draws stay within."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_dpsco as dp
from tests.reference.papers.output import reg_convex_erm, risk_convex_erm
from torch_dpsco.estimators import LinearSVC, LogisticRegression
from torch_dpsco.estimators.output import OutputPlan, plan_output
from torch_dpsco.estimators.preparation import Preparation
from torch_dpsco.estimators.task import LinearTask, build_objective, make_records
from torch_dpsco.noise import Keystream

N, DIM = 400, 3
LOSSES = {
    "logistic": dp.losses.Logistic(),
    "huber": dp.losses.Huber(threshold=0.5),
    "softmax": dp.losses.SoftmaxCrossEntropy(3),
    "squared": dp.losses.Squared(),
}


def task(name: str, **options: Any) -> LinearTask:
    loss = LOSSES[name]
    real = {"bound_y": 1.0} if loss.target_kind == "real" else {}
    given = {"budget": dp.Budget(1.0, 1e-5), "reg": 4.0, **real, **options}
    return LinearTask(loss=loss, preparation=Preparation(1.0), dim=DIM, n=N, **given)


def records(planned: LinearTask) -> Any:
    torch.manual_seed(4)
    features = torch.nn.functional.normalize(torch.randn(N, DIM, dtype=torch.float64))
    targets: Tensor = features[:, 0] * 0.7 + 0.3 * torch.randn(N, dtype=torch.float64)
    if planned.loss.target_kind == "class":
        targets = torch.bucketize(targets, torch.tensor([-0.3, 0.3], dtype=torch.float64))
    elif planned.loss.target_kind != "real":
        targets = (targets > 0).double()
    return make_records(
        planned, features, targets.clamp(-1, 1) if targets.is_floating_point() else targets
    )


def excess(plan: OutputPlan, draws: int = 400) -> tuple[float, float]:
    """Returns mean loss of answers less a + b |w|^2 of the plan's bound at the best w, and 5 standard errors."""
    planned = plan.task
    seen = records(planned)
    loss = build_objective(planned, 1e-9, seen)  # a mean of losses, but for that
    assert plan.risk_bound is not None
    fixed, squared = plan.risk_bound
    # the least of F(w) + b |w|^2, whose sum form has 2 b n for reg
    best = replace(plan, task=replace(planned, reg=2 * squared * N)).solve(seen)
    least = float(loss.value(best)) / N + squared * float(best @ best)
    solved = plan.solve(seen)
    found = torch.tensor(
        [float(loss.value(plan.draw(solved, Keystream()))) / N for _ in range(draws)]
    ).double()
    return float(found.mean()) - least - fixed, 5 * float(found.std()) / math.sqrt(draws)


@pytest.mark.parametrize("pure", [False, True])
@pytest.mark.parametrize("radius", [math.inf, 1.5])
@pytest.mark.parametrize("name", LOSSES)
def test_the_expected_risk_is_within_the_bound_of_the_plan(
    name: str, radius: float, pure: bool
) -> None:
    budget = dp.Budget(1.0, 0.0 if pure else 1e-5)
    plan = plan_output(task(name, radius=radius, budget=budget))
    above, error = excess(plan)
    assert above <= error


def test_a_bound_of_less_noise_is_passed() -> None:
    """The test above can fail: it compares with the noise that is drawn."""
    plan = plan_output(task("logistic", reg=1.0))
    quiet = replace(plan, noise_scale=plan.noise_scale / 30)
    assert quiet.risk_bound is not None
    fixed = quiet.risk_bound[0]
    assert plan.risk_bound is not None
    above, error = excess(plan)
    assert above + plan.risk_bound[0] - fixed > error


@pytest.mark.filterwarnings("ignore:delta must be far below:torch_dpsco.errors.UtilityWarning")
@pytest.mark.parametrize("delta", [0.0, 1e-12, 1e-5, 0.3])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0])
def test_theory_is_the_published_regularizer(epsilon: float, delta: float) -> None:
    model = torch.nn.Linear(DIM, 1, bias=False)
    plan = dp.OutputPerturbation.plan(
        model=model,
        loss=LOSSES["logistic"],
        n=5_000,
        epsilon=epsilon,
        delta=delta,
        adjacency="replace_one",
        bound_x=2.0,
        radius=1.5,
        reg="theory",
    )
    published = reg_convex_erm(2.0, 1.5, 5_000, DIM, epsilon, delta, mode="paper")
    assert plan.reg == pytest.approx(5_000 * published, rel=1e-9)
    fixed, squared = plan.risk_bound
    paper = risk_convex_erm(2.0, 1.5, 5_000, DIM, epsilon, delta, mode="paper")
    assert fixed + squared * 1.5**2 <= paper
    assert f"excess risk of the answer at most {fixed + squared * 1.5**2:.3g}" in str(plan)


def test_estimators_take_the_published_regularizer() -> None:
    given: dict[str, Any] = {"epsilon": 1.0, "n": N, "bound_x": 1.0, "radius": 2.0}
    model = LinearSVC(classes=(0, 1), reg="theory", mechanism="output", **given)
    plan = model.plan(DIM)
    assert isinstance(plan, OutputPlan)
    published = reg_convex_erm(
        plan.task.lipschitz, 2.0, N, plan.task.parameters, 1.0, 1e-6, mode="paper"
    )
    assert plan.reg == pytest.approx(N * published, rel=1e-9)
    with pytest.raises(
        ValueError, match="reg='theory' is of output perturbation, not of 'auto'"
    ):
        LogisticRegression(classes=(0, 1), reg="theory", **given).plan(DIM)


@pytest.mark.filterwarnings("ignore:delta must be far below:torch_dpsco.errors.UtilityWarning")
@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (dp.OutputPerturbation, {}, "radius must be given for reg='theory'"),
        (dp.OutputPerturbation, {"reg": "paper", "radius": 1.0}, "reg must be one of theory"),
        (dp.NoisyGD, {"radius": 1.0}, "reg='theory' is of output perturbation"),
        (dp.OutputPerturbation, {"radius": 1.0, "delta": 0.6}, "delta must be in"),
    ],
)
def test_theory_is_refused_where_it_says_nothing(cls: Any, options: Any, message: str) -> None:
    given = {"reg": "theory", "epsilon": 1.0, "delta": 1e-6, **options}
    with pytest.raises(ValueError, match=message):
        cls.plan(
            model=torch.nn.Linear(DIM, 1), loss=LOSSES["logistic"], n=N, bound_x=1.0, **given
        )


@pytest.mark.parametrize(
    "options",
    [
        {"tilt": 0.5},
        {"attack_radius": 0.1},
        {"residual_clip": 0.5},
        {"budget": dp.Budget(1.0, 1e-5, adjacency="add_remove")},
    ],
)
def test_nothing_is_said_where_nothing_is_proved(options: Any) -> None:
    plan = plan_output(task("logistic", n_min=N, **options))
    assert plan.risk_bound is None
    assert "expected" not in str(plan)
