"""HolderSGD and its plans: defaults, budgets, modes, bounds, shared accountants, and what the report says."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from tests.reference.papers.holder import search_gradient_noise_paper
from tests.streams import seeded_sampler
from torch_dpsco.accounting.events import PoissonGaussian, WORGaussian
from torch_dpsco.errors import (
    AdjacencyError,
    BudgetExceeded,
    InfeasibleError,
    MissingConstantError,
    UtilityWarning,
)
from torch_dpsco.sampling import PrivateLoader

DIM = 3
BUDGET = dp.Budget(1.0, 1e-4)
SMOOTH = dp.losses.Logistic().problem(bound_x=2.0)
KINK = dp.losses.Hinge().problem(bound_x=2.0, radius=1.5)
BOTH = ["add_remove", "replace_one"]


def records(n: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(n, DIM, generator=generator)
    features = features / features.norm(dim=1, keepdim=True)
    noise = torch.randn(n, generator=generator)
    return TensorDataset(features, torch.sign(features[:, :1] + 0.3 * noise[:, None]))


def linear(**kind: Any) -> nn.Linear:
    model = dp.attach(nn.Linear(DIM, 1, **kind))
    for p in model.parameters():
        nn.init.zeros_(p)
    return model


def train(model: nn.Module, opt: dp.PrivateOptimizer, loader: Any, loss: dp.losses.Loss) -> None:
    for features, targets in loader:
        opt.zero_grad()
        loss(model(features), targets).backward()
        opt.step()


# -- defaults ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "batch", "steps"), [(5000, 512, 100), (512, 512, 10), (100, 100, 10)]
)
def test_without_the_step_rule_smooth_losses_take_ten_epochs_of_512(
    n: int, batch: int, steps: int
) -> None:
    plan = dp.HolderSGD.plan(problem=SMOOTH, n=n, budget=BUDGET, lr=0.3)
    assert (plan.batch_size, plan.steps, plan.average, plan.noise) == (
        batch,
        steps,
        "last",
        "adaptive",
    )
    assert (plan.lr, plan.momentum, plan.clip) == (0.3, 0, 1)
    hand_made = dp.Problem(
        lipschitz=1.0, smoothness=2.0
    )  # of which nobody knows how far the answer is
    plan = dp.HolderSGD.plan(problem=hand_made, n=n, budget=BUDGET)
    assert (plan.batch_size, plan.steps, plan.average, plan.lr, plan.momentum) == (
        batch,
        steps,
        "last",
        0.5,
        0,
    )
    assert plan.risk_bound is None
    assert type(plan.design) is (dp.Poisson if batch < n else dp.Full)


@pytest.mark.weekly
@pytest.mark.parametrize("adjacency", BOTH)
@pytest.mark.parametrize("n", [300, 4000])
def test_for_a_bound_on_the_risk_batches_are_512_too_and_the_rate_is_that_of_the_theorem(
    n: int, adjacency: str
) -> None:
    budget = dp.Budget(1.0, 1e-4, adjacency=adjacency)
    plan = dp.HolderSGD.plan(problem=KINK, n=n, budget=budget, dim=4, average="uniform")
    assert plan.batch_size == min(n, 512)
    bound = KINK.grad_bound()
    std = plan.noise_multiplier * bound / plan.batch_size
    assert (plan.grad_bound, plan.noise_std) == (bound, std)
    assert plan.lr == pytest.approx(1.5 / math.sqrt(plan.steps * (bound**2 + 4 * std**2)))
    assert (plan.steps, plan.average) == (10 * math.ceil(n / plan.batch_size), "uniform")


def test_a_guess_of_the_distance_scales_the_rate_and_is_capped_by_the_radius() -> None:
    kind = {
        "problem": KINK,
        "n": 300,
        "budget": BUDGET,
        "dim": 4,
        "batch_size": 64,
        "average": "uniform",
    }
    rates = [dp.HolderSGD.plan(**kind, distance=distance).lr for distance in (0.5, 1.5, 99.0)]
    assert rates[1:] == pytest.approx([3 * rates[0]] * 2)
    assert rates[1] == dp.HolderSGD.plan(**kind).lr


def test_what_is_given_overrides_the_defaults() -> None:
    chosen = {
        "batch_size": 50,
        "lr": 0.05,
        "sampling": "fixed",
        "noise": "constant",
        "average": "weighted",
    }
    plan = dp.HolderSGD.plan(problem=KINK, n=300, budget=BUDGET, epochs=0.5, **chosen)
    assert plan.steps == 3
    assert (plan.lr, plan.noise, plan.average) == (0.05, "constant", "weighted")
    opt = dp.HolderSGD(linear().parameters(), plan)
    assert (opt.design, opt.schedule.steps, opt.rule.average) == (
        dp.Fixed(50, 300),
        3,
        "weighted",
    )
    assert opt.param_groups[0]["lr"] == 0.05
    assert opt.oracle.noise_multiplier == plan.noise_multiplier


# -- the budget -------------------------------------------------------------------------------------------------------


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("adjacency", "sampling"), [*((a, "poisson") for a in BOTH), ("replace_one", "fixed")]
)
def test_twenty_epochs_of_an_ordinary_loop_spend_the_budget_in_exactly_the_planned_steps(
    adjacency: str, sampling: str
) -> None:
    data, budget = records(300), dp.Budget(1.0, 1e-4, adjacency=adjacency)
    model = linear()
    opt = dp.HolderSGD(
        model.parameters(),
        dp.HolderSGD.plan(
            problem=SMOOTH, n=300, budget=budget, batch_size=64, sampling=sampling
        ),
    )
    planned = dp.HolderSGD.plan(
        problem=SMOOTH, n=300, budget=budget, batch_size=64, sampling=sampling
    )
    loader = opt.loader(data)
    for _ in range(20):
        train(model, opt, loader, dp.losses.Logistic())
    spent = opt.report().epsilon
    assert opt.steps == planned.steps == opt.schedule.steps == 100
    assert 0.999 < spent <= 1.0
    assert spent == pytest.approx(planned.epsilon(), rel=1e-12)
    assert opt.accountant.get_epsilon(1e-4) == spent
    with pytest.warns(UtilityWarning, match="all planned steps are made: this loop has no"):
        train(model, opt, loader, dp.losses.Logistic())


@pytest.mark.parametrize("adjacency", BOTH)
@pytest.mark.parametrize("epsilon", [0.1, 8.0])
def test_calibration_uses_nearly_all_of_small_and_large_budgets(
    adjacency: str, epsilon: float
) -> None:
    plan = dp.HolderSGD.plan(
        problem=SMOOTH, n=2000, budget=dp.Budget(epsilon, 1e-6, adjacency=adjacency)
    )
    assert 0.999 * epsilon < plan.epsilon() <= epsilon
    assert plan.adjacency == adjacency


@pytest.mark.slow
def test_one_more_step_than_planned_is_past_the_budget() -> None:
    model, budget = linear(), dp.Budget(1.0, 1e-4, "replace_one")
    plan = dp.HolderSGD.plan(
        problem=SMOOTH, n=300, budget=budget, batch_size=64, epochs=1, sampling="poisson"
    )
    accountant = dp.Accountant(budget)
    opt = dp.HolderSGD(
        model.parameters(),
        dp.HolderSGD.plan(
            problem=SMOOTH,
            noise_multiplier=plan.noise_multiplier,
            batch_size=64,
            n=300,
            adjacency="replace_one",
        ),
        accountant=accountant,
    )
    with pytest.raises(BudgetExceeded):
        train(model, opt, opt.loader(records(300), steps=50), dp.losses.Logistic())
    assert opt.steps == plan.steps == 5


# -- what the paper has -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_published_theorem_has_more_noise() -> None:
    budget = dp.Budget(2.0, 1e-6, "replace_one")
    s = search_gradient_noise_paper(1000, 1, 1000, 2.0, 1e-6)
    tight = dp.HolderSGD.plan(
        problem=KINK,
        n=1000,
        budget=budget,
        dim=4,
        batch_size=1,
        epochs=1,
        sampling="fixed",
    )
    assert tight.noise_multiplier < 2 * math.sqrt(s)


# -- the risk bound ---------------------------------------------------------------------------------------------------


def test_a_risk_bound_is_given_only_where_it_is_proved() -> None:
    kind = {"n": 300, "budget": BUDGET, "batch_size": 64, "lr": 0.1}
    ball = dp.losses.Logistic().problem(bound_x=2.0, radius=1.5)
    assert (
        dp.HolderSGD.plan(problem=ball, dim=4, average="uniform", **kind).risk_bound is not None
    )
    assert dp.HolderSGD.plan(problem=ball, dim=4, average="last", **kind).risk_bound is None
    assert dp.HolderSGD.plan(problem=ball, dim=4, average="weighted", **kind).risk_bound is None
    assert dp.HolderSGD.plan(problem=SMOOTH, dim=4, average="uniform", **kind).risk_bound is None
    assert dp.HolderSGD.plan(problem=ball, average="uniform", **kind).risk_bound is None


@pytest.mark.cases(0, 1)
@pytest.mark.filterwarnings("ignore::torch_dpsco.errors.UtilityWarning")  # seeds
@pytest.mark.parametrize("adjacency", BOTH)
def test_the_risk_bound_is_above_the_measured_excess_risk(adjacency: str) -> None:
    n, radius, budget = 400, 1.5, dp.Budget(2.0, 1e-4, adjacency=adjacency)
    data, loss = records(n), dp.losses.Hinge()
    features = torch.cat([data.tensors[0], torch.ones(n, 1)], 1).double().numpy()
    targets = data.tensors[1][:, 0].double().numpy()

    def risk(w: np.ndarray) -> float:
        return float(np.mean(np.maximum(0, 1 - targets * (features @ w))))

    ball = {"type": "ineq", "fun": lambda w: radius**2 - w @ w}
    best = min(
        risk(minimize(risk, start, method="SLSQP", constraints=ball).x * 0.9999)
        for start in np.eye(DIM + 1) * 0.7
    )
    plan = dp.HolderSGD.plan(problem=KINK, n=n, budget=budget, dim=DIM + 1, average="uniform")
    excess = []
    for seed in range(5):
        model = linear()
        opt = dp.HolderSGD(
            model.parameters(),
            plan,
            generator=torch.Generator().manual_seed(seed),
        )
        assert opt.param_groups[0]["lr"] == plan.lr
        sampler = seeded_sampler(opt.design, steps=plan.steps, seed=seed)
        train(model, opt, opt.bind(PrivateLoader(data, sampler)), loss)
        opt.finalize()
        excess.append(
            risk(nn.utils.parameters_to_vector(model.parameters()).detach().double().numpy())
            - best
        )
    assert risk(np.zeros(DIM + 1)) - best > np.mean(excess) > 0  # it learned something
    assert np.mean(excess) < plan.risk_bound < 1.5 * 2 * radius * KINK.grad_bound()


# -- bounds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", ["adaptive", "constant"])
def test_adaptive_noise_follows_the_iterate_and_constant_noise_the_ball(noise: str) -> None:
    problem = dp.losses.Squared().problem(bound_x=math.sqrt(2), bound_y=1.0, radius=0.7)
    model = linear(dtype=torch.float64)
    opt = dp.HolderSGD(
        model.parameters(),
        dp.HolderSGD.plan(
            lr=0.2, problem=problem, noise_multiplier=2.0, batch_size=16, n=64, noise=noise
        ),
    )
    expected, seen = [], []
    data = TensorDataset(*(t.double() for t in records(64).tensors))
    for features, targets in opt.loader(data, steps=8):
        reach = (
            0.7
            if noise == "constant"
            else float(nn.utils.parameters_to_vector(model.parameters()).detach().norm())
        )
        expected.append(math.sqrt(2) * (1 + math.sqrt(2) * reach))
        dp.losses.Squared()(model(features), targets).backward()
        opt.step()
        seen.append(opt.oracle.clip)
        assert opt.metrics["noise_std"] == pytest.approx(2.0 * seen[-1] / 16, rel=1e-3)
    assert seen == pytest.approx(expected, rel=1e-6)
    assert (len(set(seen)) == 1) == (noise == "constant")
    assert (
        len({event for _, _, event, _ in opt.accountant.ledger.entries()}) == 1
    )  # one event whatever the clip


def test_a_constant_bound_on_an_unbounded_domain_is_refused() -> None:
    problem = dp.losses.Squared().problem(bound_x=1.0, bound_y=1.0)
    for noise in ("constant",):
        with pytest.raises(MissingConstantError, match="radius"):
            dp.HolderSGD(
                linear().parameters(),
                dp.HolderSGD.plan(
                    lr=0.1,
                    problem=problem,
                    noise_multiplier=1.0,
                    batch_size=8,
                    n=64,
                    noise=noise,
                ),
            )


# -- accountants ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_optimizers_charge_one_accountant_also_if_it_is_empty() -> None:
    accountant = dp.Accountant(dp.Budget(3.0, 1e-4))
    assert not accountant  # an empty ledger is false
    made = []
    for sampling in ("poisson", "fixed"):  # both are planned before either has released anything
        model = linear()
        opt = dp.HolderSGD(
            model.parameters(),
            dp.HolderSGD.plan(
                lr=0.1,
                problem=SMOOTH,
                noise_multiplier=3.0,
                batch_size=16,
                n=64,
                sampling=sampling,
                steps=3,
            ),
            accountant=accountant,
        )
        assert opt.accountant is accountant
        made.append((model, opt))
    for model, opt in made:
        train(model, opt, opt.loader(records(64), steps=3), dp.losses.Logistic())
    assert len(accountant) == 6
    events = {event: times for _, _, event, times in accountant.ledger.entries()}
    assert events == {PoissonGaussian(3.0, 0.25): 3, WORGaussian(3.0, 16, 64): 3}
    assert made[0][1].report().epsilon == made[1][1].report().epsilon
    calibrated = dp.HolderSGD(
        linear().parameters(),
        dp.HolderSGD.plan(problem=SMOOTH, n=64, budget=BUDGET),
        accountant=(empty := dp.Accountant(BUDGET)),
    )
    assert calibrated.accountant is empty


def test_a_spent_budget_admits_no_second_optimizer() -> None:
    accountant, model = dp.Accountant(BUDGET), linear()
    kind = {"problem": SMOOTH, "n": 64, "budget": BUDGET, "batch_size": 16, "epochs": 2}
    plan = dp.HolderSGD.plan(**kind)
    opt = dp.HolderSGD(model.parameters(), plan, accountant=accountant)
    train(model, opt, opt.loader(records(64), steps=8), dp.losses.Logistic())
    with pytest.raises(
        InfeasibleError, match=r"for one step.*this ledger holds 8 events of a run of HolderSGD"
    ):
        dp.HolderSGD(linear().parameters(), plan, accountant=accountant)
    assert len(accountant) == 8


@pytest.mark.parametrize(
    "accountant",
    [
        dp.Accountant(dp.Budget(2.0, 1e-4)),
        dp.Accountant(dp.Budget(1.0, 1e-4, "add_remove")),
        dp.Accountant(adjacency="add_remove"),
    ],
    ids=["other epsilon", "other adjacency", "no budget, other adjacency"],
)
def test_an_accountant_of_another_budget_or_adjacency_is_refused(
    accountant: dp.Accountant,
) -> None:
    with pytest.raises(AdjacencyError, match=r"accountant must have the budget.*\(got"):
        dp.HolderSGD(
            linear().parameters(),
            dp.HolderSGD.plan(problem=SMOOTH, n=64, budget=BUDGET),
            accountant=accountant,
        )
    assert len(accountant) == 0


def test_an_adjacency_that_contradicts_the_accountant_is_refused() -> None:
    kind = {"problem": SMOOTH, "noise_multiplier": 5.0, "batch_size": 8, "n": 64, "lr": 0.1}
    accountant = dp.Accountant(dp.Budget(1.0, 1e-4, "replace_one"))
    with pytest.raises(
        AdjacencyError,
        match=r"adjacency must be 'replace_one', the accountant's \(got 'add_remove'",
    ):
        dp.HolderSGD(
            linear().parameters(),
            dp.HolderSGD.plan(adjacency="add_remove", **kind),
            accountant=accountant,
        )
    plan = dp.HolderSGD.plan(adjacency="replace_one", **kind)
    assert (
        dp.HolderSGD(linear().parameters(), plan, accountant=accountant).adjacency
        == "replace_one"
    )


# -- rules ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", ["more parameters", "own groups of the same parameters"])
def test_a_torch_rule_on_other_parameters_is_refused(groups: str) -> None:
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, 1))
    part = model if groups == "own groups of the same parameters" else dp.attach(model[1])
    inner = torch.optim.SGD(
        model.parameters(), lr=0.1
    )  # would step on raw gradients of the first layer
    with pytest.raises(ValueError, match=r"optimizer.param_groups"):
        dp.HolderSGD(
            part.parameters(),
            dp.HolderSGD.plan(lr=0.1, problem=SMOOTH, noise_multiplier=1.0, batch_size=8, n=64),
            rule=dp.rules.TorchRule(inner),
        )


def test_a_rule_brings_its_own_average() -> None:
    plan = dp.HolderSGD.plan(problem=SMOOTH, n=64, budget=BUDGET, average="uniform")
    assert dp.HolderSGD(linear().parameters(), plan).rule.average == "uniform"
    assert (
        dp.HolderSGD(linear().parameters(), plan, rule=dp.rules.SGD("weighted")).rule.average
        == "weighted"
    )


# -- words ------------------------------------------------------------------------------------------------------------


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("adjacency", BOTH)
def test_the_report_names_adjacency_unit_budget_and_assumptions(adjacency: str) -> None:
    model, budget = linear(), dp.Budget(1.0, 1e-4, adjacency=adjacency)
    opt = dp.HolderSGD(
        model.parameters(),
        dp.HolderSGD.plan(
            problem=SMOOTH, n=64, budget=budget, batch_size=16, epochs=1, sampling="poisson"
        ),
    )
    train(model, opt, opt.loader(records(64)), dp.losses.Logistic())
    report = opt.report().figures
    text = str(report)
    meaning = {
        "add_remove": "one example more or less",
        "replace_one": "one example is replaced by any other",
    }
    assert f"{adjacency}: " in text.splitlines()[0]
    assert meaning[adjacency] in text.splitlines()[0]
    assert (report.adjacency, report.unit, report.delta, report.budget) == (
        adjacency,
        "example",
        1e-4,
        budget,
    )
    assert set(report.epsilons) == {"add_remove", "zero_out", "replace_one"}
    assert (
        report.epsilons["add_remove"]
        == report.epsilons["zero_out"]
        < report.epsilons["replace_one"]
    )
    for line in (
        "budget: epsilon 1 at delta 0.0001",
        "4 x PoissonGaussian",
        "assumes: one record per example",
    ):
        assert line in text
    assert "assumes: batches drawn by the optimizer's own Poisson loader, kept secret" in text


@pytest.mark.slow
def test_fixed_batches_are_never_quoted_under_add_remove() -> None:
    model = linear()
    opt = dp.HolderSGD(
        model.parameters(),
        dp.HolderSGD.plan(
            problem=SMOOTH, n=64, budget=BUDGET, batch_size=16, epochs=1, sampling="fixed"
        ),
    )
    train(model, opt, opt.loader(records(64)), dp.losses.Logistic())
    assert set(opt.report().figures.epsilons) == {"zero_out", "replace_one"}
    assert "add_remove" not in str(opt.report().figures)
    assert "public data set size" in str(opt.report().figures)
