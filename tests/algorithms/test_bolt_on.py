"""BoltOnPSGD: how far one record moves the answer, its steps, its noise, and what is refused."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from tests.reference.papers.output import psgd_sensitivity, psgd_sensitivity_strongly_convex
from torch_dpsco.accounting.analysis.gaussian import gaussian_sigma
from torch_dpsco.accounting.events import Gaussian, KNorm
from torch_dpsco.algorithms import output_sgd_numbers as bolt_on
from torch_dpsco.algorithms import output_sgd_numbers as bolt_on_plan
from torch_dpsco.algorithms import row_free
from torch_dpsco.algorithms.output_sgd_numbers import HIT_CONSTANTS
from torch_dpsco.audits import Audit
from torch_dpsco.errors import (
    AdjacencyError,
    ConditionError,
    InfeasibleError,
    MissingConstantError,
    NotCertifiedError,
    PrivacyError,
    SequenceError,
    UtilityWarning,
)
from torch_dpsco.losses import Hinge, Huber, Logistic, SmoothedHinge, Squared

Vector = np.ndarray
DELTA = 1e-4
HINGE = SmoothedHinge(width=0.5)  # of slope -1 below margin 1/2
PROBLEM = HINGE.problem(bound_x=1.0)
GENEROUS = dp.Budget(100.0, DELTA, "replace_one")  # of runs on a few records whose noise is off
LOSSES: dict[str, dp.losses.TableLoss] = {
    "logistic": Logistic(),
    "smoothed hinge": HINGE,
    "huber": Huber(threshold=0.3),
    "squared": Squared(),
    "squared hinge": Hinge(power=2.0),
}


class Order:
    """A source of permutations, all of them the order of the data set."""

    def permutation(self, size: int) -> Vector:
        return np.arange(size)


def trained(
    opt: dp.BoltOnPSGD,
    model: nn.Module,
    loss: dp.losses.Loss,
    data: tuple[Vector, Vector],
    source: Any,
) -> None:
    loader = opt.loader(TensorDataset(*map(torch.from_numpy, data)))
    loader._loader.batch_sampler.rng = source
    for x, y in loader:
        loss(model(x), y).backward()
        opt.step()


def noiseless(model: nn.Module, plan: Any) -> dp.BoltOnPSGD:
    accountant = dp.Accountant(adjacency=plan.adjacency)
    return dp.BoltOnPSGD(
        model.parameters(), replace(plan, noise_scale=0.0), accountant=accountant
    )


def answer(loss: dp.losses.Loss, plan: Any, data: tuple[Vector, Vector], source: Any) -> Vector:
    """Returns what the optimizer releases with its noise off."""
    model = nn.Linear(data[0].shape[1], 1, bias=False).double()
    with noiseless(model, plan) as opt:
        trained(opt, model, loss, data, source)
    return model.weight.detach().numpy()[0]


def planned(**changes: Any) -> Any:
    arguments = {
        "problem": PROBLEM,
        "n": 20,
        "budget": dp.Budget(1.0, DELTA, "replace_one"),
        "dim": 3,
        "lr": 0.1,
        **changes,
    }
    return dp.BoltOnPSGD.plan(**arguments)


# -- sensitivity ------------------------------------------------------------------------------------------------------


def neighbors(
    rng: np.random.Generator, n: int, dim: int, adjacency: str, place: int | None
) -> Any:
    """Returns two data sets that differ in one record; with a place given, the record there, all others being null."""
    x = rng.normal(size=(n, dim)) * rng.choice([0.3, 1.0, 1e3], (n, 1))
    y = np.where(rng.random(n) < 0.5, rng.choice([-9.0, 9.0], n), rng.uniform(-1, 1, n))
    k = 0 if place is None else place
    if place is not None:
        x[np.arange(n) != k] = 0.0
        x[k], y[k] = 5.0 * x[k] / np.linalg.norm(x[k]), 9.0
    other = x.copy(), y.copy()
    if adjacency == "zero_out":
        other[0][k] = 0.0
    else:
        other[1][k] = -y[k]
        if place is None and rng.random() < 0.5:
            other[0][k] = rng.normal(size=dim)
    return (x, y), other


def attack(
    rng: np.random.Generator, name: str, adjacency: str, average: str, ridge: bool, harsh: bool
) -> float:
    """Returns the distance of two answers over the sensitivity of the plan, for one pair and shuffled batches."""
    n, dim, epochs = int(rng.integers(3, 9)), int(rng.integers(1, 4)), int(rng.integers(1, 4))
    batch = int(rng.integers(1, min(n - 1, 4) + 1))  # the last batch is often short
    loss = LOSSES[name]
    bounded = name.startswith("squared") or rng.random() < 0.5
    problem = loss.problem(
        bound_x=1.0, bound_y=0.7, radius=float(rng.choice([0.1, 1.0])) if bounded else math.inf
    )
    reg = float(rng.choice([0.1, 1.0, 4.0])) if ridge else 0.0
    largest = 2 / problem.holder_constant
    lr = None if ridge and rng.random() < 0.7 else float(largest * rng.choice([1e-3, 0.1, 1.0]))
    budget = replace(GENEROUS, adjacency=adjacency)
    plan = dp.BoltOnPSGD.plan(
        problem=problem,
        n=n,
        budget=budget,
        dim=dim,
        batch_size=batch,
        epochs=epochs,
        lr=1e-4 * largest if harsh and not ridge else lr,
        reg=reg,
        average=average,
    )
    seed, place = int(rng.integers(2**32)), int(rng.integers(n)) if harsh and ridge else 0
    sources = [Order() if harsh else np.random.default_rng(seed) for _ in range(2)]
    pair = neighbors(rng, n, dim, adjacency, place if harsh else None)
    one, other = (answer(loss, plan, *run) for run in zip(pair, sources, strict=True))
    return float(np.linalg.norm(one - other)) / plan.sensitivity


def check_that_no_pair_exceeds_the_sensitivity(pairs: int = 4) -> dict[tuple[str, bool], float]:
    """Returns the largest share of the sensitivity that some pair reaches, per answer, without and with regularizer."""
    worst = dict.fromkeys(
        [(average, ridge) for average in ("last", "uniform", "weighted") for ridge in (0, 1)],
        0.0,
    )
    rng = np.random.default_rng(3)
    for name in LOSSES:
        for average, ridge in worst:
            for adjacency in ("replace_one", "zero_out"):
                for k in range(pairs):
                    share = attack(rng, name, adjacency, average, bool(ridge), harsh=k % 2 == 0)
                    assert share <= 1.0, (name, adjacency, average, ridge, k, share)
                    worst[average, ridge] = max(worst[average, ridge], share)
    return worst


@pytest.mark.weekly
def test_no_pair_of_neighbors_moves_the_answer_further() -> None:
    worst = check_that_no_pair_exceeds_the_sensitivity()
    assert min(worst.values()) > 0.999


def test_a_hit_constant_of_zero_out_for_replaced_records_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(HIT_CONSTANTS, "replace_one", 1.0)
    with pytest.raises(AssertionError, match="replace_one"):
        check_that_no_pair_exceeds_the_sensitivity(pairs=2)


@pytest.mark.slow
def test_a_shrinkage_that_is_counted_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    tails = bolt_on._tails
    monkeypatch.setattr(bolt_on, "_tails", lambda weights, shrink: tails(weights, shrink**2))
    with pytest.raises(AssertionError, match=r"'(last|uniform|weighted)', 1"):
        check_that_no_pair_exceeds_the_sensitivity(pairs=2)


def sensitivity(
    average: str, reg: float, *, steps: int, epochs: int, lr: Any = None, batch: int = 1
) -> float:
    """Returns the sensitivity in real numbers of a loss with gradients up to 1 and smoothness 1/4."""
    return bolt_on.bolt_on_sensitivity(
        bolt_on_plan.LossPromises(1.0, 0.25, lambda radius: 1.0, glm=True),
        bolt_on.decreasing_lr(0.25, reg, steps * epochs)
        if lr is None
        else [lr] * (steps * epochs),
        reg=reg,
        average=average,
        batch_size=batch,
        steps_per_epoch=steps,
        hit_constant=2.0,
        dim=1,
        unit_roundoff=None,
    )


@pytest.mark.parametrize(
    ("steps", "epochs", "batch"), [(1, 1, 1), (7, 1, 3), (100, 1, 1), (100, 5, 20), (999, 3, 10)]
)
def test_sensitivities_are_those_of_the_closed_forms(
    steps: int, epochs: int, batch: int
) -> None:
    shape = {"steps": steps, "epochs": epochs, "batch": batch}
    last = sensitivity("last", 0.0, lr=0.3, **shape)
    assert last == pytest.approx(psgd_sensitivity(1.0, 0.3, epochs, batch), rel=1e-9)
    if steps > 1:
        share = ((epochs + 1) / 2 - 1 / steps) / epochs
        assert sensitivity("uniform", 0.0, lr=0.3, **shape) == pytest.approx(
            share * last, rel=1e-9
        )
    for reg in (0.01, 0.3, 10.0):
        bound = psgd_sensitivity_strongly_convex(1.0, reg, steps * batch)
        found = sensitivity("last", reg, **shape)
        assert found <= bound * (1 + 1e-9)
        if (
            steps > 0.25 / reg + 1
        ):  # a record of the first epoch may come after the constant steps
            assert found == pytest.approx(bound, rel=1e-9)


def test_with_a_regularizer_more_epochs_need_no_more_noise() -> None:
    runs = {
        "problem": Logistic().problem(bound_x=1.0),
        "n": 400,
        "batch_size": 10,
        "reg": 0.1,
        "lr": None,
    }
    for delta in (0.0, DELTA):
        noise = [
            planned(
                **runs, budget=dp.Budget(1.0, delta, "replace_one"), epochs=epochs
            ).noise_scale
            for epochs in (1, 2, 10, 50)
        ]
        assert max(noise) < min(noise) * (1 + 1e-6)
    plain = [planned(lr=0.1, epochs=epochs, average="last").noise_scale for epochs in (1, 2, 10)]
    assert plain == pytest.approx([plain[0], 2 * plain[0], 10 * plain[0]], rel=1e-6)


@pytest.mark.slow
def test_the_bound_of_the_last_iterate_does_not_hold_for_an_average_with_a_regularizer() -> None:
    n, reg = 300, 4.0  # scores stay below 1/4, where the loss is linear
    x, y = np.ones((n, 1)), np.ones(n)
    y[1] = -1.0
    plan = planned(n=n, dim=1, reg=reg, lr=None, average="uniform")
    one, other = (answer(HINGE, plan, (x, labels), Order()) for labels in (y, np.ones(n)))
    moved = float(np.linalg.norm(one - other))
    assert moved > 4 * psgd_sensitivity_strongly_convex(
        1.0, reg, n
    )  # the spec has it as a convex combination
    assert 0.8 * plan.sensitivity < moved <= plan.sensitivity
    last = planned(n=n, dim=1, reg=reg, lr=None).sensitivity
    assert plan.sensitivity < (1 + math.log(n)) * last
    assert planned(n=n, dim=1, reg=reg, lr=None, average="weighted").sensitivity < 2.02 * last


# -- rounding ---------------------------------------------------------------------------------------------------------


def rounding_of(plan: Any) -> float:
    """Returns what rounding adds to how far a record moves the answer."""
    return plan.sensitivity - bolt_on.bolt_on_sensitivity(
        plan.promises,
        plan.sizes,
        reg=plan.reg,
        average=plan.average,
        batch_size=plan.batch_size,
        steps_per_epoch=plan.design.steps_per_epoch,
        hit_constant=2.0 if plan.adjacency == "replace_one" else 1.0,
        dim=plan.dim,
        unit_roundoff=None,
    )


def test_rounding_is_a_small_share() -> None:
    for reg in (0.0, 0.01):
        small, large = (
            planned(n=n, reg=reg, dim=dim, lr=None if reg else 0.1)
            for n, dim in ((50, 3), (5000, 3000))
        )
        share = rounding_of(large) / large.sensitivity
        assert 0 < rounding_of(small) / small.sensitivity < share < 1e-4


def test_the_computed_run_is_as_near_to_the_exact_one_as_the_sensitivity_says() -> None:
    n, dim, epochs, rng = 40, 30, 4, np.random.default_rng(0)
    if np.finfo(np.longdouble).eps > 1e-18:
        pytest.skip("no arithmetic that is more exact than double precision")
    x, y = rng.normal(size=(n, dim)), rng.choice([-1.0, 1.0], n)
    x /= 1.001 * np.linalg.norm(x, axis=1, keepdims=True)
    loss, worst = Squared(), 0.0
    problem = loss.problem(bound_x=1.0, radius=5.0)
    for reg, average in ((0.0, "last"), (0.0, "uniform"), (0.2, "last")):
        run = {
            "problem": problem,
            "n": n,
            "dim": dim,
            "batch_size": 8,
            "epochs": epochs,
            "budget": GENEROUS,
        }
        plan = planned(**run, reg=reg, average=average, lr=0.5)
        w = total = np.zeros(dim, dtype=np.longdouble)
        for t in range(plan.steps):
            total = total + w
            rows = slice(8 * (t % 5), 8 * (t % 5) + 8)
            gradient = (x[rows].astype(np.longdouble).T @ (x[rows] @ w - y[rows])) / 8
            w = (w - np.longdouble(0.5) * gradient) / (
                1 + np.longdouble(0.5) * np.longdouble(reg)
            )
        exact = w if average == "last" else total / plan.steps
        computed = answer(loss, plan, (x, y), Order())
        error = float(np.linalg.norm(computed - exact))
        allowed = rounding_of(plan) / 2  # each of two runs may be off
        assert 0 < error < allowed
        worst = max(worst, error / allowed)
    assert worst > 1e-4  # the bound is about sums in the worst order


def test_arithmetic_that_moves_the_iterates_of_so_many_steps_is_refused() -> None:
    promises = bolt_on_plan.LossPromises(
        1.0, 0.25, lambda radius: 1.0, glm=True, score_offset=1.0
    )
    run = {
        "reg": 0.0,
        "average": "last",
        "batch_size": 1,
        "steps_per_epoch": 5000,
        "hit_constant": 2.0,
        "dim": 5,
    }
    double, single = (
        bolt_on.bolt_on_sensitivity(promises, [1.0] * 200, unit_roundoff=u, **run)
        for u in (2**-53, 2**-24)
    )
    assert 2.0 < double < 2.0 + 1e-9 < single
    with pytest.raises(ConditionError, match=r"steps must be fewer: .* 5000 steps"):
        bolt_on.bolt_on_sensitivity(promises, [1.0] * 5000, unit_roundoff=2**-24, **run)


# -- steps ------------------------------------------------------------------------------------------------------------


@pytest.mark.cases(10, 2)
@pytest.mark.parametrize("average", ["last", "uniform", "weighted"])
@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("reg", [0.0, 0.1])
def test_every_step_and_the_answer_are_those_of_the_paper(
    reg: float, bounded: bool, average: str
) -> None:
    n, dim, batch, epochs = 11, 3, 4, 3
    problem = Logistic().problem(bound_x=2.0, radius=0.4 if bounded else math.inf)
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(n, dim)), rng.choice([-1.0, 1.0], n)
    x *= 1.5 / np.linalg.norm(
        x, axis=1, keepdims=True
    )  # inside of the bounds, with the ones of the bias
    plan = planned(
        problem=problem,
        n=n,
        budget=GENEROUS,
        dim=dim + 1,
        batch_size=batch,
        epochs=epochs,
        reg=reg,
        average=average,
        lr=None if reg else 0.7,
    )
    model = nn.Linear(dim, 1).double()
    opt = noiseless(model, plan)
    trained(opt, model, Logistic(), (x, y), np.random.default_rng(5))
    opt.finalize()
    order, rows = np.random.default_rng(5), np.hstack([x, np.ones((n, 1))])
    w, iterates, outside, t = np.zeros(dim + 1), [], 0, 0
    for _ in range(epochs):
        permutation = order.permutation(n)
        for start in range(0, n, batch):
            part, t = permutation[start : start + batch], t + 1
            iterates.append(w)
            gradient = (
                sum(-y[i] / (1 + math.exp(y[i] * (w @ rows[i]))) * rows[i] for i in part) / batch
            )
            eta = min(1 / (1.0 + reg), 1 / (reg * t)) if reg else 0.7  # smoothness 2^2/4
            w = w - eta * (gradient + reg * w)
            if bounded and np.linalg.norm(w) > 0.4:
                w, outside = w * (0.4 / np.linalg.norm(w)), outside + 1
    expected = {
        "last": w,
        "uniform": np.mean(iterates, axis=0),
        "weighted": np.average(iterates, axis=0, weights=np.arange(1, t + 1)),
    }[average]
    released = np.append(model.weight.detach(), model.bias.detach())
    assert bool(outside) == bounded
    assert opt.steps == plan.steps == t == 9
    np.testing.assert_allclose(released, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("reg", [0.0, 0.5])
def test_a_step_above_two_over_beta_is_refused(reg: float) -> None:
    assert planned(lr=0.5, reg=0.0).lr == 0.5  # smoothness 1/(1/2) = 2, the largest step is 1
    planned(lr=1.0, reg=reg)
    for lr in (1.001, [0.1] * 19 + [1.001]):
        with pytest.raises(
            ConditionError, match=r"lr must be at most 2/L = 1 for a smooth loss \(got 1.001\)"
        ):
            planned(lr=lr, reg=reg)


def test_a_larger_step_would_move_runs_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    loss, epochs, n = Squared(), 5, 20
    problem = loss.problem(bound_x=1.0, radius=100.0)
    monkeypatch.setattr(bolt_on, "expansions", lambda *_: None)
    plan = planned(
        problem=problem, n=n, budget=GENEROUS, dim=1, epochs=epochs, lr=2.2, average="last"
    )
    x, y = np.ones((n, 1)), np.zeros(n)
    y[0] = 1.0
    one, other = (answer(loss, plan, (x, labels), Order()) for labels in (y, -y))
    # of 2 eta L / b per epoch a record with |y| <= 1 takes 2 eta at the start; the factor |1 - 2.2| does the rest
    assert np.linalg.norm(one - other) > 2 * epochs * 2.2 * 2


def test_the_default_step_size_minimizes_the_risk_bound() -> None:
    problem = Logistic().problem(bound_x=1.0, radius=2.0)
    for budget in (dp.Budget(1.0, DELTA, "replace_one"), dp.Budget(1.0, 0.0, "replace_one")):
        for epochs in (1, 4):
            run = {
                "problem": problem,
                "n": 1000,
                "batch_size": 10,
                "epochs": epochs,
                "budget": budget,
                "dim": 5,
            }
            best = planned(**run, lr=None)
            for factor in (0.5, 0.9, 1.1, 2.0):
                assert planned(**run, lr=factor * best.lr).risk_bound > best.risk_bound
    for other in (
        {"n": 1003},
        {"reg": 0.1},
        {"average": "last"},
        {"lr": np.linspace(0.1, 0.2, 100 * epochs)},
    ):
        assert planned(**run | {"lr": 0.1} | other).risk_bound is None


@pytest.mark.parametrize("radius", [0.3, 1.0, 1e3])
@pytest.mark.parametrize(
    "given",
    [
        {"budget": dp.Budget(1.0, DELTA, "replace_one")},
        {"budget": None, "noise_multiplier": 3.0},
    ],
)
def test_the_risk_bound_is_never_below_its_terms_however_small_the_ball(
    radius: float, given: Any
) -> None:
    epochs, dim, batch = 10, 5, 2
    problem = Logistic().problem(bound_x=1.0, radius=radius)
    run = {
        "problem": problem,
        "n": 1000,
        "dim": dim,
        "epochs": epochs,
        "batch_size": batch,
        **given,
    }
    best, bound = planned(**run, lr=None), problem.grad_bound(radius)
    for factor in (1.0, 0.1, 3.0):
        plan = planned(**run, lr=factor * best.lr)
        terms = radius**2 / (2 * plan.lr * plan.steps) + plan.lr * bound**2 * (
            0.5 + (epochs - 1) / batch
        )
        assert plan.risk_bound >= (terms + bound * math.sqrt(dim) * plan.noise_scale) * (
            1 - 1e-6
        )
        assert plan.risk_bound >= best.risk_bound * (1 - 1e-12)
    if radius < 1e3:
        assert (
            best.sensitivity < 2 * radius
        )  # which caps it at larger steps, where it is no measure of its slope


@pytest.mark.slow
def test_the_risk_bound_holds() -> None:
    n, dim, runs, rng = 200, 2, 20, np.random.default_rng(1)
    problem = Logistic().problem(bound_x=1.0, radius=3.0)
    plan = planned(
        problem=problem,
        n=n,
        dim=dim,
        batch_size=5,
        epochs=2,
        lr=None,
        budget=dp.Budget(5.0, DELTA, "replace_one"),
    )

    def drawn(count: int) -> tuple[Vector, Vector]:
        x = rng.normal(size=(count, dim))
        x /= np.maximum(1.0, np.linalg.norm(x, axis=1, keepdims=True))
        return x, np.where(rng.random(count) < 1 / (1 + np.exp(-x @ [2.0, -1.5])), 1.0, -1.0)

    def risk(w: Vector) -> float:
        return float(np.logaddexp(0, -test[1] * (test[0] @ w)).mean())

    test, excess = drawn(5000), []
    for _ in range(runs):
        model = nn.Linear(dim, 1, bias=False).double()
        opt = dp.BoltOnPSGD(model.parameters(), plan)
        with opt:
            trained(opt, model, Logistic(), drawn(n), rng)
        excess.append(risk(model.weight.detach().numpy()[0]) - risk(np.array([2.0, -1.5])))
    assert (
        0 < np.mean(excess) < plan.risk_bound < 1.5
    )  # a bound of expectations; 0.693 - 0.5 is lost by doing nothing


# -- noise ------------------------------------------------------------------------------------------------------------


def released(plan: Any, label: float, trials: int, seed: int) -> Vector:
    """Returns answers (trials, d) of runs on one record with this label, whose features are the first basis vector."""
    x, found = torch.eye(plan.dim, dtype=torch.float64)[:1], []
    noise = torch.Generator().manual_seed(seed)
    for _ in range(trials):
        model = nn.Linear(plan.dim, 1, bias=False).double()
        with pytest.warns(UtilityWarning, match="repeatable"):
            opt = dp.BoltOnPSGD(model.parameters(), plan, generator=noise)
        loader = opt.loader(TensorDataset(x, torch.tensor([label])))
        with opt:
            for features, labels in loader:
                HINGE(model(features), labels).backward()
                opt.step()
        found.append(model.weight.detach().numpy()[0])
    return np.array(found)


def law(delta: float, dim: int, trials: int, seed: int) -> tuple[float, float]:
    """Returns p-values: of the length of the noise, and of its direction (first coordinate of a unit vector)."""
    with pytest.warns(
        UtilityWarning,
        match=r"the answer has noise of .* beside a signal of at most 0\.1 \(n=1, ",
    ):
        plan = planned(n=1, dim=dim, budget=dp.Budget(0.5, delta, "replace_one"), average="last")
    noise = released(plan, 1.0, trials, seed) - 0.1 * np.eye(dim)[0]  # the only step is lr = 0.1
    radius = np.linalg.norm(noise, axis=1)
    cosine = (noise[:, 0] / radius + 1) / 2
    if delta == 0:
        assert plan.sensitivity == pytest.approx(0.2, rel=1e-9)
        length = stats.gamma(dim, scale=0.2 / 0.5)
    else:
        length = stats.chi(dim, scale=gaussian_sigma(0.5, DELTA, 0.2))
    direction = stats.beta((dim - 1) / 2, (dim - 1) / 2)
    return stats.kstest(radius, length.cdf).pvalue, stats.kstest(cosine, direction.cdf).pvalue


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("delta", [0.0, DELTA])
def test_the_noise_of_the_answer_has_its_law(delta: float) -> None:
    assert (
        min(law(delta, 4, 600, seed=1)) > 1e-6
    )  # false alarms of 2e-6 each, were the seed not fixed


def test_weight_and_bias_share_one_vector_of_noise() -> None:
    problem, answers = HINGE.problem(bound_x=2.0), []
    plan = planned(problem=problem, dim=4, budget=dp.Budget(0.5, 0.0, "replace_one"))
    data = np.random.default_rng(0).normal(size=(20, 3)), np.ones(20)
    for noise in (None, torch.Generator().manual_seed(4)):
        model = nn.Linear(3, 1).double()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UtilityWarning)
            opt = dp.BoltOnPSGD(model.parameters(), plan, generator=noise)
        if noise is None:
            opt.finalize = lambda: None  # the average is looked at
        trained(opt, model, HINGE, data, Order())
        if noise is None:
            answers.append(
                torch.cat([opt.state[p]["average"].flatten() for p in model.parameters()])
            )
        else:
            answers.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    expected = plan.noise_scale * row_free.knorm_vector(4, 1.0, torch.Generator().manual_seed(4))
    torch.testing.assert_close(answers[1] - answers[0], expected, rtol=1e-12, atol=1e-15)


@pytest.mark.slow
def test_k_norm_noise_of_another_size_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = row_free.knorm_vector
    monkeypatch.setattr(
        row_free, "knorm_vector", lambda dim, scale, noise: draw(dim, 0.7 * scale, noise)
    )
    assert min(law(0.0, 4, 600, seed=1)) < 1e-6


@pytest.mark.parametrize(
    "budget",
    [dp.Budget(1.0, 0.0, "replace_one"), dp.Budget(1.0, DELTA, "replace_one")],
    ids=["pure", "gaussian"],
)
def test_a_plan_with_half_the_noise_is_refused(budget: dp.Budget) -> None:
    plan = planned(budget=budget)
    for share in (0.5, 0.999):
        model = nn.Linear(3, 1, bias=False).double()
        accountant = dp.Accountant(budget)
        less = replace(plan, noise_scale=share * plan.noise_scale)
        with pytest.raises(InfeasibleError, match=r"epsilon must be >= [12]"):
            dp.BoltOnPSGD(model.parameters(), less, accountant=accountant)
        assert not len(accountant)
        opt = dp.BoltOnPSGD(model.parameters(), less, accountant=dp.Accountant())
        assert (
            opt.accountant.ledger.evaluate(budget.delta, "replace_one", extra=opt.event).epsilon
            > 1.0
        )


@pytest.mark.weekly
def test_an_audit_finds_half_the_noise_and_nothing_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.warns(UtilityWarning, match="noise buries the signal"):
        plan = planned(n=1, dim=1, budget=dp.Budget(1.0, 0.0, "replace_one"), average="last")

    def found(trials: int) -> Audit:
        sides = (
            released(plan, label, trials, 7 + k)[:, 0] for k, label in enumerate((1.0, -1.0))
        )
        return dp.audit_outputs(*sides, delta=0.0, confidence=1 - 1e-6)

    assert not found(300).contradicts(1.0)
    draw = row_free.knorm_vector
    monkeypatch.setattr(
        row_free, "knorm_vector", lambda dim, scale, noise: draw(dim, scale / 2, noise)
    )
    assert found(1100).contradicts(1.0)


# -- the ledger -------------------------------------------------------------------------------------------------------


def records(n: int = 60) -> TensorDataset:
    x = torch.randn(
        n, 3, generator=torch.Generator().manual_seed(0)
    )  # single precision, norms above the bound
    return TensorDataset(x, torch.sign(x[:, :1]))


def made(**changes: Any) -> tuple[nn.Linear, dp.BoltOnPSGD]:
    model = nn.Linear(3, 1, bias=False).double()
    arguments = {
        "problem": PROBLEM,
        "n": 60,
        "budget": dp.Budget(1.0, 0.0, "replace_one"),
        "batch_size": 10,
        "epochs": 2,
        "lr": 0.1,
    }
    return model, dp.BoltOnPSGD(
        model.parameters(), dp.BoltOnPSGD.plan(dim=model, **arguments | changes)
    )


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("adjacency", ["replace_one", "zero_out"])
@pytest.mark.parametrize("delta", [0.0, DELTA])
@pytest.mark.parametrize(
    "settings",
    [{}, {"reg": 0.1, "lr": None}, {"average": "last"}],
    ids=["plain", "ridge", "last"],
)
def test_fit_makes_the_plan_and_its_only_release_is_within_the_budget(
    settings: Any, delta: float, adjacency: Any
) -> None:
    model, opt = made(budget=dp.Budget(1.0, delta, adjacency), **settings)
    assert "nothing was released yet" in " ".join(str(opt.report()).split())
    assert len(opt.accountant) == 0
    assert dp.fit(model, opt, records(), HINGE, progress=False) is model
    assert (opt.steps, opt.finalized, len(opt.accountant)) == (12, True, 1)
    assert 1 - 1e-6 < opt.report().epsilon <= 1.0
    assert isinstance(opt.event, Gaussian if delta else KNorm)
    text = " ".join(str(opt.report()).split())
    assert "The final model, and nothing else of the run." in text
    assert "none is clipped" in text
    opt.finalize()
    with pytest.raises(SequenceError, match="the answer is released"):
        opt.loader(records())
    assert len(opt.accountant) == 1
    assert not opt.state


@pytest.mark.slow
def test_runs_that_share_a_pure_budget_add_up() -> None:
    accountant = dp.Accountant(dp.Budget(1.0, 0.0, "replace_one"))
    pure = {"n": 60, "adjacency": "replace_one"}
    for epsilon in (0.25, 0.75):
        model = nn.Linear(3, 1, bias=False).double()
        plan = replace(
            planned(**pure, budget=dp.Budget(epsilon, 0.0, "replace_one")), budget=None
        )
        opt = dp.BoltOnPSGD(model.parameters(), plan, accountant=accountant)
        dp.fit(model, opt, records(), HINGE, progress=False)
    assert accountant.get_epsilon(0.0) == pytest.approx(1.0)
    with pytest.raises(
        InfeasibleError,
        match=r"this ledger holds 2 events of a run of .*; epsilon 1 of 1 spent at delta 0",
    ):
        dp.BoltOnPSGD(
            model.parameters(),
            replace(planned(**pure, budget=dp.Budget(0.25, 0.0, "replace_one")), budget=None),
            accountant=accountant,
        )


def test_metrics_give_the_standard_deviation_of_either_noise() -> None:
    _, pure = made()
    assert pure.metrics["noise_std"] == pytest.approx(
        2 * pure.noise_std
    )  # sqrt(d + 1) times the scale
    _, gaussian = made(budget=dp.Budget(1.0, DELTA, "replace_one"))
    assert gaussian.metrics["noise_std"] == gaussian.noise_std


def test_which_iterate_is_released_cannot_be_reassigned() -> None:
    _, opt = made(average="uniform")
    with pytest.raises(PrivacyError, match="average is fixed at construction"):
        opt.average = "last"


def test_a_step_size_that_is_not_the_plans_is_refused() -> None:
    model, opt = made(reg=0.5, lr=None)
    assert opt.lrs == pytest.approx([0.5] * 5 + [1 / (0.5 * t) for t in range(5, 12)])
    opt.param_groups[0]["lr"] = 0.4
    x, y = next(iter(opt.loader(records())))
    HINGE(model(x), y).backward()
    with pytest.raises(SequenceError, match=r"lr must be 0.5, that of the plan"):
        opt.step()


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_fit_refuses_a_loss_that_breaks_the_promises() -> None:
    model, opt = made()
    with pytest.raises(PrivacyError, match="broken-promise"):
        dp.fit(
            model,
            opt,
            records(),
            lambda output, target: HINGE(3 * output, target),
            progress=False,
        )
    assert opt.steps == 0


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"n": 0}, ValueError, r"n must be an integer >= 1 \(got 0\)"),
        ({"dim": 0}, ValueError, "dim must be an integer >= 1"),
        ({"batch_size": 21}, ValueError, r"batch_size must be <= n=20 \(got 21\)"),
        ({"batch_size": 0}, ValueError, "batch_size must be an integer >= 1"),
        ({"epochs": 0}, ValueError, "epochs must be an integer >= 1"),
        ({"epochs": 1.5}, ValueError, r"epochs must be an integer \(got 1.5\)"),
        ({"lr": 0.0}, ValueError, "lr must be a nonempty list of finite numbers > 0"),
        ({"lr": [0.1] * 7}, ValueError, "lr must be a number or 20 numbers, one per step"),
        ({"budget": None}, ValueError, "budget or noise_multiplier must be given"),
        ({"noise_multiplier": -1.0}, ValueError, "noise_multiplier must be >= 0"),
        ({"reg": -1.0}, ValueError, r"reg must be >= 0 \(got -1.0\)"),
        ({"reg": math.inf}, ValueError, "reg must be finite"),
        ({"average": "best"}, ValueError, "average must be one of last, uniform, weighted"),
        (
            {"average": "uniform", "batch_size": 20},
            ConditionError,
            "average must be 'last' for one step",
        ),
        ({"distance": -1.0, "lr": None}, ValueError, "distance must be > 0"),
        ({"lr": None}, MissingConstantError, r"distance, a guess of \|w\*\|"),
        (
            {"budget": dp.Budget(1.0, DELTA, "add_remove")},
            AdjacencyError,
            r"replace_one, zero_out \(got add_remove",
        ),
        (
            {"problem": Hinge(1.5).problem(bound_x=1.0)},
            ConditionError,
            r"holder_exponent must be 1.*\(got 0.5\)",
        ),
        (
            {"problem": Squared().problem(bound_x=1.0)},
            MissingConstantError,
            "bounds the gradient",
        ),
        (
            {"problem": dp.Problem(lipschitz=1.0)},
            MissingConstantError,
            "BoltOnPSGD needs holder_exponent",
        ),
        (
            {
                "problem": dp.Problem(
                    holder_exponent=1, holder_constant=1, lipschitz=1.0, is_glm=True
                )
            },
            MissingConstantError,
            "BoltOnPSGD needs score_offset",
        ),
        (
            {"problem": dp.Problem(holder_exponent=1, holder_constant=1, lipschitz=1.0)},
            MissingConstantError,
            "gradient_error must be certified",
        ),
    ],
)
def test_plans_that_nothing_is_proved_for_are_refused_by_name(
    changes: Any, error: Any, match: str
) -> None:
    with pytest.raises(error, match=match):
        planned(**changes)


def test_parameters_and_ledgers_that_the_plan_is_not_about_are_refused() -> None:
    plan = planned()
    with pytest.raises(ValueError, match=r"dim must be 5, .*\(got 3\)"):
        dp.BoltOnPSGD(nn.Linear(5, 1, bias=False).double().parameters(), plan)
    layers = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(2, 1, bias=False)).double()
    with pytest.raises(NotCertifiedError, match="weight and bias of one Linear layer"):
        dp.BoltOnPSGD(layers.parameters(), plan)
    with pytest.raises(ValueError, match="bound_x must be > 1 with a bias"):
        dp.BoltOnPSGD(nn.Linear(2, 1).double().parameters(), plan)
    with pytest.raises(ValueError, match=r"params must be torch\.float64"):
        dp.BoltOnPSGD(nn.Linear(3, 1, bias=False).parameters(), plan)
    with pytest.raises(AdjacencyError, match="accountant must have the budget"):
        dp.BoltOnPSGD(
            nn.Linear(3, 1, bias=False).double().parameters(),
            plan,
            accountant=dp.Accountant(dp.Budget(2.0, 0.0, "replace_one")),
        )


def test_softmax_with_a_certified_gradient_error_is_trained() -> None:
    loss = dp.losses.SoftmaxCrossEntropy(3)
    model = nn.Linear(2, 3, bias=False).double()
    plan = dp.BoltOnPSGD.plan(
        problem=loss.problem(bound_x=1.0),
        n=30,
        dim=model,
        budget=dp.Budget(1.0, 0.0, "replace_one"),
        reg=0.1,
        gradient_error=1e-12,
    )
    opt = dp.BoltOnPSGD(model.parameters(), plan)
    data = TensorDataset(torch.randn(30, 2), torch.arange(30) % 3)
    with opt:
        for x, y in opt.loader(data):
            loss(model(x), y).backward()
            opt.step()
    assert opt.report().epsilon <= 1.0
    assert model.weight.detach().any()
