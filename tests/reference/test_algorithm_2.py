"""Algorithm 2 of Wang, Lei, Ying and Zhang, written literally in numpy, step by step beside `HolderSGD` in float64.

    w_1 = 0;  for t = 1..T:  w_{t+1} = Proj_W( w_t - eta ( (1/b) sum_{i in B_t} g(w_t, z_i) + b_t ) );  (1/T) sum w_t

with b_t ~ N(0, (z C / b)^2 I), C = G(|w_t|) (adaptive), G(R) (constant) or M + L R^alpha (the paper). Gradients and
constants are those of docs/proofs/holder.md#constants-of-the-losses, by hand.

The noise is replayed from a copy of the generator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from tests.reference.papers.holder import paper_grad_bound
from tests.streams import gaussians, seeded, seeded_sampler
from torch_dpsco.rules import AVERAGES as AVERAGE_POWERS
from torch_dpsco.sampling import PrivateLoader
from torch_dpsco.step.oracle import ClippedMean

pytestmark = pytest.mark.filterwarnings("ignore::torch_dpsco.errors.UtilityWarning")  # seeds
Vector = np.ndarray
N, DIM, STEPS, RADIUS, RATE, KAPPA, BOUND_Y = 30, 4, 12, 0.9, 0.4, 0.5, 1.5
BOUND_X = 1.3  # of the features; the column of ones makes it sqrt(1.3^2 + 1)
B = math.hypot(BOUND_X, 1.0)


@dataclass(frozen=True)
class Case:
    """A loss: ours, its gradient by hand, and its constants by hand."""

    loss: dp.losses.TableLoss
    gradient: Callable[[Vector, Vector, float], Vector]
    grad_bound: Callable[[float], float]
    paper_bound: float


def logistic(w: Vector, x: Vector, y: float) -> Vector:
    return -y * x / (1 + math.exp(y * float(w @ x)))


def hinge(w: Vector, x: Vector, y: float) -> Vector:
    return -y * x * (y * float(w @ x) < 1)


def absolute(w: Vector, x: Vector, y: float) -> Vector:
    return -np.sign(y - w @ x) * x


def huber(w: Vector, x: Vector, y: float) -> Vector:
    residual = y - float(w @ x)
    return -max(-KAPPA, min(KAPPA, residual)) * x


CASES = {
    "logistic": Case(
        dp.losses.Logistic(),
        logistic,
        lambda r: B / (1 + math.exp(-B * r)),
        B / 2 + B**2 / 4 * RADIUS,
    ),
    "hinge": Case(dp.losses.Hinge(), hinge, lambda r: B, 2 * B),
    "absolute": Case(dp.losses.Absolute(), absolute, lambda r: B, 3 * B),
    "huber": Case(
        dp.losses.Huber(KAPPA),
        huber,
        lambda r: B * min(KAPPA, BOUND_Y + B * r),
        B * KAPPA + B**2 * RADIUS,
    ),
}
AVERAGES = {
    "uniform": lambda iterates: np.mean(iterates[:-1], axis=0),
    "weighted": lambda iterates: np.average(
        iterates[:-1], axis=0, weights=np.arange(1, len(iterates))
    ),
    "last": lambda iterates: iterates[-1],
}


def problem(name: str, radius: float = RADIUS) -> dp.Problem:
    return CASES[name].loss.problem(bound_x=B, bound_y=BOUND_Y, radius=radius)


def records(name: str) -> TensorDataset:
    """Returns (features, targets, positions): rows well inside the bounds, so that nothing is clipped."""
    rng = np.random.default_rng(3)
    features = rng.standard_normal((N, DIM))
    features *= (
        0.95
        * BOUND_X
        * rng.uniform(0.3, 1, (N, 1))
        / np.linalg.norm(features, axis=1, keepdims=True)
    )
    signs = rng.choice([-1.0, 1.0], (N, 1))
    targets = (
        signs
        if CASES[name].loss.target_kind == "sign"
        else signs * rng.uniform(0, BOUND_Y, (N, 1))
    )
    return TensorDataset(torch.tensor(features), torch.tensor(targets), torch.arange(N))


def make(
    name: str,
    *,
    noise: str,
    z: float,
    batch: int,
    design: type,
    average: str,
    radius: float = RADIUS,
):
    """Returns (model, optimizer, loader of repeatable draws)."""
    model = dp.attach(nn.Linear(DIM, 1, dtype=torch.float64))
    for p in model.parameters():
        nn.init.zeros_(p)
    opt = dp.HolderSGD(
        model.parameters(),
        dp.HolderSGD.plan(
            lr=RATE,
            problem=problem(name, radius),
            noise_multiplier=z,
            batch_size=batch,
            noise=noise,
            sampling=design(batch, N),
            average=average,
        ),
        generator=torch.Generator().manual_seed(17),
    )
    sampler = seeded_sampler(opt.design, steps=STEPS, seed=4)
    return model, opt, opt.bind(PrivateLoader(records(name), sampler))


def ours(name: str, **kind) -> Iterator[tuple[list[int], Vector, float, Vector, Vector]]:
    """Trains, and yields per step: positions of the batch, standard normal draw, noise std, iterate, answer so far."""
    model, opt, loader = make(name, **kind)

    def flat() -> Vector:
        return nn.utils.parameters_to_vector(model.parameters()).detach().numpy().copy()

    for k, (features, targets, positions) in enumerate(loader):
        normal = gaussians(DIM + 1, seeded(k)).numpy()
        opt._noise = seeded(k)
        opt.zero_grad()
        CASES[name].loss(model(features), targets).backward()
        opt.step()
        with opt.released():
            answer = flat()
        yield positions.tolist(), normal, opt.oracle.noise_std, flat(), answer


def clip_of(name: str, noise: str, w: Vector, radius: float) -> float:
    return CASES[name].grad_bound(
        radius if noise == "constant" else min(float(np.linalg.norm(w)), radius)
    )


def follow(
    name: str,
    *,
    noise: str,
    z: float,
    batch: int,
    design: type,
    average: str,
    radius: float = RADIUS,
) -> int:
    """Runs the paper beside ours; returns how many of the steps were projected."""
    features, targets, _ = (t.numpy() for t in records(name).tensors)
    features = np.hstack([features, np.ones((N, 1))])
    iterates, projected = [np.zeros(DIM + 1)], 0
    kind = {
        "noise": noise,
        "z": z,
        "batch": batch,
        "design": design,
        "average": average,
        "radius": radius,
    }
    for positions, normal, noise_std, iterate, answer in ours(name, **kind):
        w = iterates[-1]
        literal_std = z * clip_of(name, noise, w, radius) / batch
        # rounding of sums is part of the sensitivity, so that ours may be a little larger, never smaller
        assert literal_std <= noise_std * (1 + 1e-14)
        assert noise_std <= literal_std * (1 + 2**-7)
        total = sum(
            (CASES[name].gradient(w, features[i], float(targets[i, 0])) for i in positions),
            np.zeros(DIM + 1),
        )
        w = w - RATE * (total / batch + noise_std * normal)
        norm = float(np.linalg.norm(w))
        if norm > radius:
            w, projected = w * (radius / norm), projected + 1
        iterates.append(w)
        np.testing.assert_allclose(iterate, w, rtol=0, atol=1e-10)
        np.testing.assert_allclose(answer, AVERAGES[average](iterates), rtol=0, atol=1e-10)
    assert len(iterates) == STEPS + 1
    return projected


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("average", AVERAGES)
def test_without_noise_every_iterate_is_that_of_the_paper(name: str, average: str) -> None:
    follow(name, noise="constant", z=0.0, batch=1, design=dp.Fixed, average=average)


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("noise", ["constant", "adaptive"])
def test_with_the_same_noise_every_iterate_is_that_of_the_paper(name: str, noise: str) -> None:
    projected = follow(name, noise=noise, z=1.0, batch=1, design=dp.Fixed, average="uniform")
    assert projected >= 3


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("design", [dp.Fixed, dp.Poisson])
@pytest.mark.parametrize("noise", ["constant", "adaptive"])
def test_batches_are_divided_by_their_public_size(name: str, design: type, noise: str) -> None:
    for average in ("uniform", "weighted"):
        follow(name, noise=noise, z=0.7, batch=5, design=design, average=average)


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("name", CASES)
def test_the_adaptive_variant_needs_no_ball(name: str) -> None:
    projected = follow(
        name,
        noise="adaptive",
        z=0.7,
        batch=5,
        design=dp.Poisson,
        average="uniform",
        radius=math.inf,
    )
    assert projected == 0


@pytest.mark.parametrize("name", CASES)
def test_the_table_gives_the_constants_written_here(name: str) -> None:
    for radius in (0.0, 0.3, RADIUS):
        assert problem(name).grad_bound(radius) == pytest.approx(
            CASES[name].grad_bound(radius), rel=1e-12
        )
    assert paper_grad_bound(problem(name)) == pytest.approx(CASES[name].paper_bound, rel=1e-12)


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize("name", CASES)
def test_the_gradients_by_hand_are_those_of_central_differences(name: str) -> None:
    features, targets, _ = records(name).tensors
    w = np.linspace(-0.4, 0.5, DIM)
    for x, y in zip(features, targets, strict=True):
        values = []
        for shift in (1e-6, -1e-6):
            points = torch.tensor(w) + shift * torch.eye(DIM, dtype=torch.float64)
            values.append(CASES[name].loss(points @ x, y.expand(DIM), reduction="none").numpy())
        slope = (values[0] - values[1]) / 2e-6
        np.testing.assert_allclose(
            CASES[name].gradient(w, x.numpy(), float(y)), slope, rtol=0, atol=1e-7
        )


def test_the_last_update_is_not_in_the_average() -> None:
    final = [
        step[4]
        for step in ours(
            "hinge", noise="constant", z=1.0, batch=1, design=dp.Fixed, average="uniform"
        )
    ][-1]
    before = [
        step[3]
        for step in ours(
            "hinge", noise="constant", z=1.0, batch=1, design=dp.Fixed, average="last"
        )
    ][:-1]
    np.testing.assert_allclose(
        final, np.sum(before, axis=0) / STEPS, rtol=0, atol=1e-12
    )  # w_1 = 0


MUTATIONS = {
    "half the noise": (
        ClippedMean,
        "noise_std",
        property(lambda o: 0.5 * o.noise_multiplier * o.sensitivity("zero_out")),
    ),
    "no projection": (dp.rules.UpdateRule, "constrain", lambda *args: None),
    "other weights": (AVERAGE_POWERS, "uniform", 1.0),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_deviation_from_the_paper_is_caught(
    mutation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, name, value = MUTATIONS[mutation]
    if isinstance(target, dict):
        monkeypatch.setitem(target, name, value)
    else:
        monkeypatch.setattr(target, name, value)
    with pytest.raises(AssertionError):
        follow("huber", noise="constant", z=1.0, batch=1, design=dp.Fixed, average="uniform")
