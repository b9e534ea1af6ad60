"""HolderOutputSGD: records, models, plans and what the report says."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from tests.algorithms.output_runs import DELTA, HINGE, PROBLEM, Order
from torch_dpsco.accounting.events import Gaussian
from torch_dpsco.algorithms.row_free import record_bounds
from torch_dpsco.errors import (
    AdjacencyError,
    ConditionError,
    InfeasibleError,
    MissingConstantError,
    NotCertifiedError,
    UtilityWarning,
)
from torch_dpsco.losses import Hinge, Logistic, PowerLoss
from torch_dpsco.prox import Ball

# -- records and models -----------------------------------------------------------------------------------------------


def delivered(
    problem: dp.Problem, data: TensorDataset, bias: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns all records as the loader delivers them, in the order of the data set."""
    model = nn.Linear(data.tensors[0].shape[1], 1, bias=bias).double()
    plan = dp.HolderOutputSGD.plan(
        problem=problem,
        n=len(data),
        dim=model,
        budget=dp.Budget(100.0, 1e-4),
        batch_size=len(data),
        epochs=2,
        lr=0.01,
    )
    opt = dp.HolderOutputSGD(model.parameters(), plan)
    loader = opt.loader(data)
    loader._loader.batch_sampler.rng = Order()
    x, y = next(iter(loader))
    return x, y


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_records_are_mapped_into_their_bounds(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(3)
    features = torch.randn(60, 7, generator=draw) * torch.logspace(-3, 3, 60)[:, None]
    features[5, 2], features[6, 1] = math.nan, math.inf
    targets = torch.randn(60, generator=draw) * 10
    targets[7] = math.nan
    data = TensorDataset(features.to(dtype), targets.to(dtype))
    x, y = delivered(PowerLoss(power=1.5).problem(bound_x=1.3, bound_y=0.7, radius=1.0), data)
    assert (x.dtype, y.dtype) == (torch.float64, torch.float64)
    for row in x.tolist():
        assert sum(Fraction(value) ** 2 for value in row) <= Fraction(1.3) ** 2
    assert float(y.abs().max()) == 0.7
    assert not x[5].any() | x[6].any() | y[7].any()
    raw = data.tensors[0].double()
    inside = raw.norm(dim=1) <= 1.3
    assert 10 < int(inside.sum()) < 50
    assert torch.equal(x[inside], raw[inside])
    torch.testing.assert_close(x[59], 1.3 * raw[59] / raw[59].norm(), rtol=1e-12, atol=0)
    swapped = [t.clone() for t in data.tensors]
    swapped[0][0], swapped[1][0] = 9.0, 9.0
    again = delivered(
        PowerLoss(power=1.5).problem(bound_x=1.3, bound_y=0.7, radius=1.0),
        TensorDataset(*swapped),
    )
    assert torch.equal(again[0][1:], x[1:])  # a map of each record by itself
    assert torch.equal(again[1][1:], y[1:])


def test_labels_of_margin_losses_are_bounded_too() -> None:
    data = TensorDataset(torch.ones(4, 2), torch.tensor([5.0, -1.0, 0.0, -7.0]))
    assert delivered(PROBLEM, data)[1].tolist() == [1.0, -1.0, 0.0, -1.0]


@pytest.mark.parametrize("bound", [1.0 + 1e-9, 1.0001, math.sqrt(2), 2.0, 1e6])
def test_the_ones_of_a_bias_are_part_of_the_bound(bound: float) -> None:
    data = TensorDataset(
        1e7 * torch.randn(50, 4, generator=torch.Generator().manual_seed(1)), torch.ones(50, 1)
    )
    x, _ = delivered(HINGE.problem(bound_x=bound, radius=1.0), data, bias=True)
    norms = [sum(Fraction(value) ** 2 for value in [*row, 1.0]) for row in x.tolist()]
    assert max(norms) <= Fraction(bound) ** 2
    assert float(min(norms) - 1) > 0.999 * (bound**2 - 1)
    x, _ = delivered(HINGE.problem(bound_x=bound, radius=1.0), data, bias=False)
    assert float(x.norm(dim=1).min()) == pytest.approx(bound)


@given(st.floats(1.0, 1e3, exclude_min=True))
def test_features_and_the_one_of_a_bias_are_within_the_bound(bound: float) -> None:
    features, _ = record_bounds(HINGE.problem(bound_x=bound, radius=1.0), bias=True)
    assert Fraction(features) ** 2 + 1 <= Fraction(bound) ** 2


def test_a_bound_that_leaves_no_room_for_the_ones_of_a_bias_is_refused() -> None:
    for bound in (0.5, 1.0):
        problem = HINGE.problem(bound_x=bound, radius=1.0)
        with pytest.raises(
            ValueError, match=rf"bound_x must be > 1 with a bias.*\(got {bound:g}\).*bias=False"
        ):
            made(nn.Linear(3, 1).double().parameters(), problem=problem)
        made(nn.Linear(3, 1, bias=False).double().parameters(), problem=problem)


OTHER_MODELS: list[Callable[[], nn.Module]] = [
    lambda: nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)),
    lambda: nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 1, bias=False)),
    lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)),
    lambda: nn.Conv1d(3, 1, 1),
    lambda: nn.LayerNorm(3),
    lambda: nn.Bilinear(3, 3, 1),
]


@pytest.mark.cases(11, 5)
@pytest.mark.parametrize("build", OTHER_MODELS)
@pytest.mark.parametrize("certificate", [False, 1, "yes", None])
def test_other_models_need_a_certificate(
    build: Callable[[], nn.Module], certificate: Any
) -> None:
    model = build().double()
    kept = [p.detach().clone() for p in model.parameters()]
    plan = planned(n=20, dim=model)
    accountant = dp.Accountant(plan.budget)
    kinds = (
        NotCertifiedError,
        r"weight and bias of one Linear layer \(got shapes .*certify_convex",
    )
    if certificate is not False:
        kinds = (ValueError, "certify_convex must be True or False")
    with pytest.raises(kinds[0], match=kinds[1]):
        dp.HolderOutputSGD(
            model.parameters(), plan, accountant=accountant, certify_convex=certificate
        )
    assert all(map(torch.equal, model.parameters(), kept))
    assert not len(accountant)
    dp.HolderOutputSGD(model.parameters(), plan, certify_convex=True)


def test_a_scalar_score_needs_a_layer_with_one_output() -> None:
    with pytest.raises(NotCertifiedError, match=r"one output"):
        made(nn.Linear(3, 2, bias=False).double().parameters())


def test_a_model_of_another_size_than_planned_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dim must be 5, .*\(got 3\)"):
        made(nn.Linear(5, 1, bias=False).double().parameters(), dim=3)


def test_several_parameter_groups_are_refused_and_one_group_or_named_parameters_are_not() -> (
    None
):
    model = nn.Linear(3, 1).double()
    problem = HINGE.problem(bound_x=2.0, radius=1.0)
    for second in ({"params": [model.bias], "lr": 0.5}, {"params": [model.bias]}):
        with pytest.raises(ValueError, match="params must be one group"):
            made([{"params": [model.weight]}, second], dim=4, problem=problem)
    with pytest.raises(ValueError, match="step size of the plan"):
        made([{"params": model.parameters(), "lr": 0.5}], dim=4, problem=problem)
    plain = made(model.parameters(), problem=problem)
    for params in ([{"params": list(model.parameters())}], list(model.named_parameters())):
        opt = made(params, problem=problem)
        assert opt.param_groups[0]["params"] == list(model.parameters())
        assert (opt.lrs, opt.noise_std) == (plain.lrs, plain.noise_std)


# -- plans ------------------------------------------------------------------------------------------------------------


BUDGET = dp.Budget(1.0, DELTA, "replace_one")


def planned(**changes: Any) -> Any:
    arguments = {"problem": PROBLEM, "n": 100, "budget": BUDGET, "dim": 3, **changes}
    return dp.HolderOutputSGD.plan(**arguments)


def made(params: Any, **changes: Any) -> dp.HolderOutputSGD:
    params = list(params)
    return dp.HolderOutputSGD(params, planned(**{"n": 20, "dim": params, **changes}))


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"n": 0}, ValueError, r"n must be an integer >= 1 \(got 0\)"),
        ({"dim": 0}, ValueError, "dim must be an integer >= 1"),
        ({"batch_size": 101}, ValueError, r"batch_size must be <= n=100 \(got 101\)"),
        ({"batch_size": 0}, ValueError, "batch_size must be an integer >= 1"),
        ({"epochs": 0}, ValueError, "epochs must be an integer >= 1"),
        ({"lr": 0.0}, ValueError, "lr must be a nonempty list of finite numbers > 0"),
        ({"lr": [0.1] * 7}, ValueError, "lr must be a number or 100 numbers, one per step"),
        ({"budget": None}, ValueError, "budget or noise_multiplier must be given"),
        ({"noise_multiplier": -1.0}, ValueError, "noise_multiplier must be >= 0"),
        ({"distance": -1.0, "lr": None}, ValueError, "distance must be > 0"),
        (
            {"budget": dp.Budget(1.0, DELTA, "add_remove")},
            AdjacencyError,
            r"replace_one, zero_out \(got add_remove",
        ),
        (
            {"problem": Logistic().problem(bound_x=2.0, radius=1.0), "lr": 2.01},
            ConditionError,
            r"lr must be at most 2/L = 2 for a smooth loss \(got 2.01\)",
        ),
        ({"problem": Logistic().problem(bound_x=2.0), "lr": 1.01}, ConditionError, "1/L"),
        (
            {"problem": Hinge(1.99).problem(bound_x=1.0, radius=1.0), "lr": 60.0},
            ConditionError,
            "step size too larg",
        ),
        ({"problem": HINGE.problem(bound_x=1.0)}, MissingConstantError, "distance, a guess of"),
        (
            {"problem": dp.Problem(lipschitz=1.0)},
            MissingConstantError,
            "holder_exponent, holder_constant",
        ),
        (
            {
                "problem": dp.Problem(
                    holder_exponent=0.5,
                    holder_constant=1.0,
                    lipschitz=1.0,
                    radius=1.0,
                    is_glm=True,
                )
            },
            MissingConstantError,
            r"score_offset.*0 if it adds none",
        ),
        (
            {
                "problem": dp.Problem(
                    holder_exponent=0.5, holder_constant=1.0, grad_at_zero=1.0, radius=1.0
                )
            },
            MissingConstantError,
            "gradient_error must be certified",
        ),
        (
            {
                "problem": dp.Problem(
                    holder_exponent=0.5,
                    holder_constant=1.0,
                    lipschitz=1.0,
                    is_glm=True,
                    score_offset=0.0,
                ),
                "lr": 0.1,
            },
            MissingConstantError,
            "loss_at_zero is needed on an unbounded domain",
        ),
    ],
)
def test_a_plan_that_is_not_covered_is_refused_by_name(
    changes: dict[str, Any], error: Any, match: str
) -> None:
    with pytest.raises(error, match=match):
        planned(**{"lr": 0.1, **changes} if "problem" not in changes else changes)


@pytest.mark.parametrize(
    ("promise", "match"),
    [
        (
            {"holder_exponent": 1.5, "holder_constant": 1.0},
            r"holder_exponent must be in \[0, 1\] \(got 1.5\)",
        ),
        ({"holder_exponent": -0.1, "holder_constant": 1.0}, "holder_exponent must be in"),
        ({"holder_exponent": 0.5, "holder_constant": 0.0}, "holder_constant must be > 0"),
        ({"holder_exponent": 0.5}, "must be given together"),
        ({"grad_at_zero": math.inf}, "grad_at_zero must be finite"),
        ({"loss_at_zero": math.nan}, "loss_at_zero must be"),
        ({"bound_x": math.inf}, "bound_x must be finite"),
        ({"bound_y": -1.0}, "bound_y must be > 0"),
        ({"score_offset": math.inf}, "score_offset must be finite"),
    ],
)
def test_promises_out_of_range_are_refused_by_name(
    promise: dict[str, float], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        dp.Problem(**promise)


def test_unbounded_records_are_refused() -> None:
    with pytest.raises(ValueError, match="bound_x must be"):
        HINGE.problem(bound_x=math.inf)
    with pytest.raises(ValueError, match="bound_y must be"):
        PowerLoss(power=1.5).problem(bound_x=1.0, bound_y=math.inf)


@pytest.mark.parametrize(
    ("epsilon", "delta"), [(0.0, 1e-3), (-1.0, 1e-3), (1.0, 0.0), (1.0, 1.0), (math.nan, 1e-3)]
)
def test_a_budget_without_meaning_is_refused(epsilon: float, delta: float) -> None:
    with pytest.raises(ValueError, match=r"epsilon|delta"):
        planned(budget=dp.Budget(epsilon, delta))


def test_a_delta_that_allows_to_publish_a_record_warns() -> None:
    with pytest.warns(UtilityWarning, match=r"delta must be far below 1/n=0.01 \(got 0.011\)"):
        planned(budget=dp.Budget(1.0, 0.011), lr=0.02)


def test_events_are_exact_gaussians() -> None:
    model = nn.Linear(3, 1, bias=False).double()
    for adjacency in ("replace_one", "zero_out"):
        plan = planned(budget=dp.Budget(1.0, DELTA, adjacency), lr=0.02)
        opt = dp.HolderOutputSGD(model.parameters(), plan)
        assert opt.noise_std == plan.noise_scale > 0
        assert opt.event == Gaussian(plan.noise_scale, {adjacency: plan.sensitivity})
        assert opt.accountant.adjacency == adjacency


def test_zero_out_needs_half_of_the_hits_and_noise_between_half_and_all() -> None:
    replaced = planned(lr=0.02)
    zeroed = planned(lr=0.02, budget=dp.Budget(1.0, DELTA, "zero_out"))
    assert 0.5 < zeroed.sensitivity / replaced.sensitivity < 1.0
    assert zeroed.noise_scale / zeroed.sensitivity == pytest.approx(
        replaced.noise_scale / replaced.sensitivity
    )


def test_the_optimizer_does_what_the_plan_says() -> None:
    model = nn.Linear(3, 1, bias=False).double()
    plan = planned(batch_size=7, epochs=2)
    opt = dp.HolderOutputSGD(model.parameters(), plan)
    assert (opt.lrs, opt.noise_std, opt.planned_steps) == ((plan.lr,), plan.noise_scale, 30)
    assert (opt.event, opt.accountant.budget) == (plan.event(), plan.budget)
    assert (opt.prox, opt.design) == (Ball(1.0), dp.Shuffled(7, 100))


def test_noise_that_is_given_is_drawn_and_charged() -> None:
    kind = {"batch_size": 10, "epochs": 2, "lr": 0.02}
    chosen = planned(**kind)
    own = {"budget": None, "adjacency": "replace_one"}
    given = planned(**kind, **own, noise_multiplier=3.0)
    assert (given.sensitivity, given.noise_scale) == (
        chosen.sensitivity,
        3.0 * chosen.sensitivity,
    )
    assert given.event() == Gaussian(given.noise_scale, {"replace_one": given.sensitivity})
    assert (
        planned(budget=None, noise_multiplier=3.0, adjacency="zero_out").event().sens[0][0]
        == "zero_out"
    )
    ratio = chosen.noise_scale / chosen.sensitivity
    same = planned(batch_size=10, epochs=2, **own, noise_multiplier=ratio)
    assert same.lr == planned(batch_size=10, epochs=2).lr  # the balanced step knows the noise
    with pytest.raises(InfeasibleError, match="epsilon must be >= "):
        dp.HolderOutputSGD(
            nn.Linear(3, 1, bias=False).double().parameters(),
            planned(noise_multiplier=ratio / 2),
        )  # the budget limits the run


def test_what_plain_sgd_does_not_admit_is_refused() -> None:
    params = nn.Linear(3, 1, bias=False).double().parameters()
    for word, value in (("rule", dp.rules.SGD()), ("prox", Ball(1.0)), ("reg", 0.1)):
        with pytest.raises(
            ValueError,
            match=f"{word} must not be given to HolderOutputSGD, whose noise is calibrated",
        ):
            dp.HolderOutputSGD(params, planned(), **{word: value})


def test_an_optimizer_takes_an_accountant_of_its_budget_or_of_none() -> None:
    model, plan = nn.Linear(3, 1, bias=False).double(), planned(lr=0.02)
    for accountant in (dp.Accountant(), dp.Accountant(plan.budget)):
        assert (
            dp.HolderOutputSGD(model.parameters(), plan, accountant=accountant).accountant
            is accountant
        )
    for other in (
        dp.Budget(2.0, DELTA),
        dp.Budget(1.0, DELTA, "add_remove"),
        dp.Budget(1.0, DELTA, unit="user"),
    ):
        accountant = dp.Accountant(other)
        with pytest.raises(AdjacencyError, match="accountant must have the budget"):
            dp.HolderOutputSGD(model.parameters(), plan, accountant=accountant)
        assert not len(accountant)


# -- what the report says ---------------------------------------------------------------------------------------------


def test_the_statement_of_output_perturbation_covers_the_final_model_only() -> None:
    model = nn.Linear(3, 1, bias=False).double()
    opt = made(model.parameters(), n=12, batch_size=5)
    texts = [" ".join(str(opt.report()).split())]
    assert opt.report().figures.planned_epsilon == pytest.approx(1.0, rel=1e-6)
    opt.finalize = lambda: None  # of the last step
    with opt:
        for x, y in opt.loader(TensorDataset(torch.ones(12, 3), torch.ones(12, 1))):
            HINGE(model(x), y).backward()
            opt.step()
        del opt.finalize
        texts.append(" ".join(str(opt.report()).split()))
        assert opt.report().figures.planned_epsilon == pytest.approx(1.0, rel=1e-6)
        assert opt.report().figures.epsilon == 0.0
    assert opt.report().figures.planned_epsilon is None
    assert opt.report().figures.epsilon == pytest.approx(1.0, rel=1e-6)
    texts.append(" ".join(str(opt.report()).split()))
    for text in texts:
        assert "The final model, and nothing else of the run." in text
        assert (
            "Everything before finalize(): parameters, averages, gradients, losses, checkpoints"
            in text
        )
        assert "every iterate" not in text
        assert "none is clipped" in text
        assert "All 12 examples, batches of 5" in text
        assert "without any privacy" not in text
    assert all(
        "nothing was released yet" in text and "Not finalized" in text for text in texts[:2]
    )
    assert "nothing was released yet" not in texts[2]
    plain = dp.HolderSGD(
        dp.attach(nn.Linear(3, 1)).parameters(),
        dp.HolderSGD.plan(lr=0.1, problem=PROBLEM, noise_multiplier=1.0, batch_size=5, n=12),
    )
    assert "every iterate" in str(plain.report(DELTA))
    assert "nothing else of the run" not in str(plain.report(DELTA))
