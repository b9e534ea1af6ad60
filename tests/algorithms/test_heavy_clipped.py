"""ClippedSGD: Algorithm 6 line by line, many passes, other rules; ledger, checkpoints and refusals."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import torch_dpsco as dp
from tests.algorithms.heavy_runs import (
    DELTA,
    DTYPES,
    PROBLEM,
    Run,
    check_chunks,
    check_interrupted_fit,
    check_ledger,
    check_other_plans,
    check_resumption,
    gradient_of,
    joint,
    made,
    model,
    records,
    reloaded,
)
from tests.reference import heavy_tailed_literal as literal
from torch_dpsco.algorithms.heavy_tailed_numbers import averaging_schedule
from torch_dpsco.errors import AdjacencyError, MissingConstantError

# Seeds warn in every test here.
N = 24
WEIGHTS = {
    "head": (0.0, 0.0, 1.0, 2.0),
    "uniform": (1.0,) * 4,
    "steep": (1e-300, 1.0, 1e12, 3e12),
}
FACTORS = (1.0, 0.5, 0.25, 0.125)


def build(
    *,
    lr: float = 0.1,
    noise: float = 0.0,
    n: int | None = N,
    batch: int | None = 6,
    clip: float = 1.5,
    dtype: torch.dtype = torch.float32,
    groups: bool = False,
    factors: tuple[float, ...] = FACTORS,
    weights: tuple[float, ...] | None = WEIGHTS["head"],
    **changes: Any,
) -> Run:
    layer = model(dtype)
    params = [{"params": [p]} for p in layer.parameters()] if groups else layer.parameters()
    if weights is not None:
        changes["rule"] = dp.rules.ScheduledSGD(factors, weights)
    kind = {
        "lr": lr,
        "clip": clip,
        "noise_multiplier": noise,
        "batch_size": batch,
        "n": n,
        **changes,
    }
    return Run(layer, made(dp.ClippedSGD, params, **kind))


def calibrated(adjacency: str = "replace_one", n: int = 120, **changes: Any) -> Run:
    layer = model()
    arguments: dict[str, Any] = {"problem": PROBLEM, "clip": 2.0, "dim": layer, **changes}
    budget = dp.Budget(1.0, DELTA, adjacency)
    return Run(layer, made(dp.ClippedSGD, layer.parameters(), n=n, budget=budget, **arguments))


# -- the paper, line by line ------------------------------------------------------------------------------------------


@pytest.mark.cases(6, 3)
@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("radius", [math.inf, 0.45])
def test_steps_and_average_are_those_of_algorithm_6(
    radius: float, weights: str, dtype: torch.dtype, groups: bool
) -> None:
    prox = dp.prox.Ball(radius) if radius < math.inf else None
    run = build(dtype=dtype, groups=groups, weights=WEIGHTS[weights], prox=prox, lr=0.4)
    start = joint(run.model)
    for batch in run.seeded():
        run.train([batch])
        k = run.opt.steps
        lrs, kept = [0.4 * f for f in FACTORS[:k]], WEIGHTS[weights][:k]
        average, last = literal.algorithm_6(
            gradient_of(records(N, dtype)),
            literal.ball(radius)(start),
            run.batches,
            1.5,
            lrs,
            kept
            if any(kept)
            else [0.0] * (k - 1)
            + [1.0],  # before the first weight the answer is the last iterate
            literal.ball(radius),
        )
        held = average if run.opt.finalized else last
        np.testing.assert_allclose(joint(run.model), held, rtol=0, atol=DTYPES[dtype])
        np.testing.assert_allclose(run.answer(), average, rtol=0, atol=DTYPES[dtype])
    assert (radius == math.inf) == (np.linalg.norm(last) > 0.46)


def test_the_calibrated_rule_has_the_steps_and_weights_of_the_theorem() -> None:
    for steps in (3, 20):  # without, and with the second half
        run = calibrated(steps=steps)
        expected = averaging_schedule(strong_convexity=0.5, smoothness=2.0, steps=steps)
        lr = run.opt.param_groups[0]["lr"]
        settings = run.opt.rule.settings()
        np.testing.assert_allclose(
            [lr * f for f in settings["factors"]], expected.lr, rtol=1e-12
        )
        assert settings["weights"] == list(expected.weights)
        assert max(expected.lr) <= 1 / 2.0
    assert expected.lr[-1] < expected.lr[0]


@pytest.mark.parametrize("average", ["last", "uniform", "weighted"])
def test_other_averages_are_of_the_iterates_before_their_steps(average: str) -> None:
    run = build(weights=None, average=average, dtype=torch.float64)
    iterates = []
    for batch in run.seeded():
        iterates.append(joint(run.model))
        run.train([batch])
    weights = {"last": None, "uniform": [1, 1, 1, 1], "weighted": [1, 2, 3, 4]}[average]
    expected = (
        joint(run.model) if weights is None else np.average(iterates, axis=0, weights=weights)
    )
    np.testing.assert_allclose(run.answer(), expected, atol=1e-14)


@pytest.mark.filterwarnings("ignore::torch_dpsco.errors.UtilityWarning")  # Adam
def test_adam_moves_by_private_means() -> None:
    layer, twin = model(torch.float64), torch.nn.Linear(3, 1, dtype=torch.float64)
    twin.load_state_dict(layer.state_dict())
    inner, plain = (torch.optim.Adam(m.parameters(), lr=0.1) for m in (layer, twin))
    plan = dp.ClippedSGD.plan(
        n=N, lr=0.1, clip=1.5, noise_multiplier=0.0, batch_size=6, sampling="shuffled"
    )
    run = Run(layer, dp.ClippedSGD(inner.param_groups, plan, rule=dp.rules.TorchRule(inner)))
    for batch in run.seeded():
        w = joint(layer)
        run.train([batch])
        mean = literal.algorithm_1(gradient_of(records(N)), w, run.batches[-1], 1.5)
        twin.weight.grad, twin.bias.grad = torch.tensor(mean[None, :3]), torch.tensor(mean[3:])
        plain.step()
        # the records are float64 with the values of float32 ones
        np.testing.assert_allclose(joint(layer), joint(twin), atol=1e-4)


# -- ledger -----------------------------------------------------------------------------------------------------------


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("adjacency", ["replace_one", "zero_out", "add_remove"])
@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 6},
        {"sampling": "poisson", "batch_size": 12, "epochs": 1},
        {"sampling": "fixed", "batch_size": 12, "epochs": 1},
        {"sampling": "full", "steps": 5},
        {"sampling": "assigned", "steps": 4},
    ],
)
def test_the_budget_is_spent_to_a_thousandth_and_known_all_along(
    changes: dict[str, Any], adjacency: str
) -> None:
    if (changes.get("sampling"), adjacency) == ("fixed", "add_remove"):
        with pytest.raises(AdjacencyError, match="add_remove"):
            calibrated(adjacency, **changes)
        return
    check_ledger(partial(calibrated, adjacency, **changes), dp.Budget(1.0, DELTA, adjacency))


# -- checkpoints ------------------------------------------------------------------------------------------------------

BUILDS = {
    "scheduled": build,
    "float64": partial(build, dtype=torch.float64, groups=True, prox=dp.prox.Ball(0.45)),
    "assigned": partial(build, adjacency="add_remove"),
    "uniform": partial(build, weights=None, average="uniform"),
}


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("name", BUILDS)
def test_a_saved_run_goes_on_with_the_unused_records_to_the_same_answer(name: str) -> None:
    check_resumption(BUILDS[name])


def test_averages_of_a_checkpoint_keep_their_precision() -> None:
    run = build()
    run.train(run.seeded(), 3)
    other = reloaded(run, build)
    for p, q in zip(run.model.parameters(), other.model.parameters(), strict=True):
        average = other.opt.state[q]["average"]
        assert average.dtype == torch.float64
        assert torch.equal(average, run.opt.state[p]["average"])


def test_chunks_make_the_steps_of_whole_draws() -> None:
    check_chunks(build)


def test_a_checkpoint_of_another_plan_is_refused() -> None:
    check_other_plans(
        build,
        {"weights": WEIGHTS["uniform"]},
        {"factors": (1.0, 0.5, 0.25, 0.12)},
        {"weights": None},
        {"noise": 1.0},
        {"batch": 5, "steps": 4},
        {"n": None, "batch": None, "sampling": dp.Shuffled(6, N), "steps": 4},
    )


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("sampling", ["shuffled", "poisson", "full"])
def test_an_interrupted_fit_goes_on(sampling: str) -> None:
    if sampling == "shuffled":
        check_interrupted_fit(partial(calibrated, steps=6), at=3)
        return
    changes = {"batch_size": 12, "epochs": 1} if sampling == "poisson" else {"steps": 4}
    check_interrupted_fit(partial(calibrated, sampling=sampling, **changes), at=2)


# -- schedulers -------------------------------------------------------------------------------------------------------


def test_a_torch_scheduler_multiplies_the_factors() -> None:
    run = build(factors=(1.0, 1.0, 1.0, 1.0), dtype=torch.float64)
    scheduler = torch.optim.lr_scheduler.LambdaLR(run.opt, lambda k: FACTORS[min(k, 3)])
    for batch in run.seeded():
        run.train([batch])
        scheduler.step()
    np.testing.assert_allclose(
        run.answer(), build(dtype=torch.float64).train().answer(), atol=1e-14
    )
    assert len(run.opt.accountant) == 4


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_a_rule_with_fewer_steps_than_are_planned_is_refused_before_anything_is_spent() -> None:
    accountant = dp.Accountant()
    with pytest.raises(ValueError, match="one per factor"):
        build(factors=FACTORS[:2], weights=(1.0, 1.0), accountant=accountant).train()
    assert len(accountant) == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weights": None, "average": "median"}, "average must be"),
        ({"clip": -1.0}, "clip must be > 0"),
        ({"sampling": dp.Poisson(5, N), "steps": 3}, "batch_size must be 5"),
        ({"noise": None}, "budget or noise_multiplier must be given"),
        ({"weights": None, "n": None, "batch": None}, "n must be given"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build(**changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sampling": "shuffle"}, "sampling must be"),
        ({"sampling": "assigned", "epochs": 2}, "epochs must be 1 for one pass"),
        ({"batch_size": 121}, "batch_size must be <= n=120"),
        (
            {"sampling": dp.Disjoint(20, 120), "clip": dp.Pilot(size=20)},
            "sampling must be a word",
        ),
        ({"clip": dp.Pilot(size=20), "dim": None}, "dim must be given for a pilot"),
        (
            {"problem": dp.Problem(smoothness=1.0, moment=1.0, moment_order=2.0), "dim": None},
            "dim must be given where",
        ),
        ({"sampling": "poisson", "clip": None}, r"clip=dp.Pilot\(\), or a number"),
        (
            {"sampling": "poisson", "steps": 3, "epochs": 1},
            "steps and epochs must not be given both",
        ),
        ({"sampling": "poisson", "batch_size": 121}, "batch_size must be <= n=120"),
        ({"sampling": "poisson", "epochs": 0}, "epochs must be > 0"),
        ({"sampling": "full", "steps": 0}, "steps must be"),
        ({"sampling": "full", "batch_size": 7, "steps": 2}, "batch_size"),
        ({"problem": dp.Problem()}, "smoothness"),
        ({"steps": 121}, "steps must be <="),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, MissingConstantError), match=words):
        calibrated(**changes)
