"""How a test vector is read and called: the map `tests/vectors/api_map.json`, and adapters where it is not enough.

An adapter builds the objects a user would build, calls them, and returns the value that the vectors list. A part of the
package that does not exist yet raises `NotBuiltError`, which the runner counts; any other error is a failure.
"""

from __future__ import annotations

import importlib
import itertools
import json
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torch_dpsco.errors import UtilityWarning

FOLDER = Path(__file__).parent / "vectors"
API_MAP = json.loads((FOLDER / "api_map.json").read_text())
FAMILIES = sorted({key.split(":")[0] for key in API_MAP})


class NotBuiltError(Exception):
    """The package has no such module, or the module no such attribute."""


def resolve(module: str, name: str) -> Any:
    """Returns `module.name`; raises NotBuiltError if either does not exist.

    A module that exists but fails to import something else is an error, not "not built".
    """
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            raise NotBuiltError(f"{module}.{name}") from error
        raise
    if not hasattr(found, name):
        raise NotBuiltError(f"{module}.{name}")
    return getattr(found, name)


@dataclass(frozen=True)
class Vector:
    """One test vector; `number` counts the vectors of its function."""

    family: str
    function: str
    inputs: dict[str, Any]
    expected: Any
    tolerance: Any
    number: int = 0

    @property
    def key(self) -> str:
        return f"{self.family}:{self.function}"

    def __str__(self) -> str:
        scalars = [
            f"{name}={value}"
            for name, value in self.inputs.items()
            if not isinstance(value, (list, dict))
        ]
        return f"{self.key}#{self.number}({','.join(scalars)[:60]})"


@cache
def load(folder: Path) -> list[Vector]:
    """Returns the vectors of all family files of a folder; a file of no known family is an error, not skipped."""
    vectors: list[Vector] = []
    for path in sorted(folder.glob("*.json")):
        if path.name == "api_map.json":
            continue
        if path.stem not in FAMILIES:
            raise pytest.UsageError(f"{path}: no such family; known are {', '.join(FAMILIES)}")
        content = json.loads(path.read_text())
        numbers: dict[str, int] = {}
        for case in content["cases"] if isinstance(content, dict) else content:
            numbers[case["function"]] = number = numbers.get(case["function"], 0) + 1
            vectors.append(parse(path.stem, case, number))
    if not vectors:
        raise pytest.UsageError(f"{folder}: no vectors")
    return vectors


def parse(family: str, case: dict[str, Any], number: int = 1) -> Vector:
    """Returns a vector; the tolerance stands in one field, or as `rtol` and `atol` beside the case."""
    sides = {name: case[name] for name in ("rtol", "atol") if name in case}
    inputs, expected = infinite(case["inputs"]), infinite(case["expected"])
    return Vector(
        family, case["function"], inputs, expected, case.get("tolerance", sides or None), number
    )


def infinite(value: Any) -> Any:
    """Returns the JSON value with the strings "inf" and "-inf" read as floats."""
    if isinstance(value, dict):
        return {name: infinite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [infinite(item) for item in value]
    return (
        {"inf": math.inf, "-inf": -math.inf}.get(value, value)
        if isinstance(value, str)
        else value
    )


def call(vector: Vector) -> Any:
    """Returns what the package computes for a vector: a value, or the ValueError it raises."""
    entry = API_MAP[vector.key]
    function = resolve(entry["module"], entry["name"])
    arguments = {entry["args"][name]: value for name, value in vector.inputs.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UtilityWarning)  # the vectors are about values
        try:
            return function(**arguments, **entry.get("fixed", {}))
        except ValueError as error:
            return error


# The adapters, by the names of the map.


def loss_constants(
    loss: str, bound_x: float, bound_y: float, radius: float, **choices: float
) -> dict[str, float]:
    """Returns the promised constants of a loss of the table and its bound at the radius.

    See docs/proofs/holder.md#constants-of-the-losses.

    `choices` holds the shape of the loss (power, threshold, quantile, width, num_classes) and, for the rows "other
    alpha", holder_exponent.
    """
    name, shape = {
        "hinge_q": ("Hinge", "power"),
        "power_q": ("PowerLoss", "power"),
        "absolute": ("Absolute", None),
        "squared": ("Squared", None),
        "logistic": ("Logistic", None),
        "huber": ("Huber", "threshold"),
        "pinball": ("Pinball", "quantile"),
        "smoothed_hinge": ("SmoothedHinge", "width"),
        "eps_insensitive": ("EpsilonInsensitive", "width"),
        "softmax_ce": ("SoftmaxCrossEntropy", "num_classes"),
    }[loss]
    loss_class = resolve("torch_dpsco.losses", name)
    built = loss_class() if shape is None else loss_class(choices.pop(shape))
    problem = built.problem(bound_x=bound_x, bound_y=bound_y, radius=radius, **choices)
    return {
        "holder_exponent": problem.holder_exponent,
        "holder_constant": problem.holder_constant,
        "grad_at_zero": problem.grad_at_zero,
        "loss_at_zero": problem.loss_at_zero,
        "grad_bound": problem.grad_bound(radius),
    }


def apply_prox(v: Sequence[float], step: float, kind: str, **strengths: float) -> list[float]:
    """Returns prox_{step * psi}(v) for the penalty or set named `kind`."""
    name, parameters = {
        "l1": ("L1", (strengths.get("l1", 1.0),)),
        "l2": ("L2", (strengths.get("l2", 1.0),)),
        "sq_l2": ("ElasticNet", (0.0, strengths.get("l2", 1.0))),
        "elastic": ("ElasticNet", (strengths.get("l1"), strengths.get("l2"))),
        "box": ("Box", (strengths.get("lo"), strengths.get("hi"))),
        "l2_ball": ("Ball", (strengths.get("radius"),)),
    }[kind]
    point = torch.tensor(v, dtype=torch.float64)
    resolve("torch_dpsco.prox", name)(*parameters).apply_([point], [step])
    return point.tolist()


def _run(
    optimizer: Any, w0: Sequence[float], x: torch.Tensor, y: torch.Tensor
) -> Iterator[list[float]]:
    """Makes all steps of an optimizer on (w.x - y)^2/2 over consecutive slices; yields the answer after each one."""
    weight = optimizer.param_groups[0]["params"][0]
    # some vectors start outside of W; the optimizer has projected its start
    weight.data.copy_(torch.tensor([w0], dtype=torch.float64))
    partition = resolve("torch_dpsco.sampling", "Partition")(np.arange(len(x)), len(x))
    sampler = resolve("torch_dpsco.sampling", "make_sampler")(optimizer.design, resume=partition)
    loader = resolve("torch_dpsco.sampling", "PrivateLoader")(
        torch.utils.data.TensorDataset(x, y), sampler
    )
    model = torch.nn.Linear(len(w0), 1, bias=False).double()
    model.weight = weight
    resolve("torch_dpsco", "attach")(model, rows="dense")
    for features, target in optimizer.bind(loader):
        ((model(features).squeeze(1) - target).square() / 2).mean().backward()
        optimizer.step()
        with optimizer.released():
            yield model.weight.detach().flatten().tolist()


def _start(
    X: Sequence[Any], y: Sequence[float], w0: Sequence[float], steps: int, clip: float
) -> tuple[torch.nn.Parameter, torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Returns the parameter, the data, and the numbers of a run without noise in one pass of `steps` slices."""
    weight = torch.nn.Parameter(torch.tensor([w0], dtype=torch.float64))
    n = len(X)
    run = {
        "noise_multiplier": 0.0,
        "batch_size": n // steps,
        "n": n,
        "steps": steps,
        "clip": clip,
    }
    run["sampling"] = "shuffled"  # whose partition may be given
    return (
        weight,
        torch.tensor(X, dtype=torch.float64),
        torch.tensor(y, dtype=torch.float64),
        run,
    )


def accelerated_trajectory(
    X: Sequence[Any],
    y: Sequence[float],
    w0: Sequence[float],
    steps: int,
    clip: float,
    inverse_lr: float,
    radius: float,
) -> list[list[float]]:
    """Returns the answers of AcceleratedSGD after each step, noise off."""
    weight, x, target, run = _start(X, y, w0, steps, clip)
    ball = resolve("torch_dpsco.prox", "Ball")(radius)
    kind = resolve("torch_dpsco", "AcceleratedSGD")
    optimizer = kind([weight], kind.plan(lr=0.5 / inverse_lr, **run), prox=ball)
    return list(itertools.islice(_run(optimizer, w0, x, target), steps))


def strongly_convex_trajectory(
    X: Sequence[Any],
    y: Sequence[float],
    w0: Sequence[float],
    steps: int,
    clip: float,
    strong_convexity: float,
    smoothness: float,
    radius: float,
) -> dict[str, list[float]]:
    """Returns average and last iterate of ClippedSGD with the schedule of Algorithm 6, noise off."""
    made = resolve("torch_dpsco.algorithms.heavy_tailed_numbers", "averaging_schedule")(
        strong_convexity=strong_convexity, smoothness=smoothness, steps=steps
    )
    kind, answers = resolve("torch_dpsco", "ClippedSGD"), {}
    for name, weights in {"average": made.weights, "last": [0.0] * (steps - 1) + [1.0]}.items():
        weight, x, target, run = _start(X, y, w0, steps, clip)
        rule = resolve("torch_dpsco.rules", "ScheduledSGD")(
            [lr / made.lr[0] for lr in made.lr], weights
        )
        ball = resolve("torch_dpsco.prox", "Ball")(radius)
        optimizer = kind([weight], kind.plan(lr=made.lr[0], **run), rule=rule, prox=ball)
        *_, answers[name] = itertools.islice(_run(optimizer, w0, x, target), steps)
    return answers


def proximal_trajectory(
    X: Sequence[Any],
    y: Sequence[float],
    w0: Sequence[float],
    steps: int,
    clip: float,
    smoothness: float,
    l1: float,
) -> list[float]:
    """Returns the last iterate of ProximalSGD, noise off."""
    weight, x, target, run = _start(X, y, w0, steps, clip)
    prox = resolve("torch_dpsco.prox", "L1")(l1)
    kind = resolve("torch_dpsco", "ProximalSGD")
    optimizer = kind([weight], kind.plan(lr=0.5 / smoothness, **run), prox=prox)
    *_, last = itertools.islice(_run(optimizer, w0, x, target), steps)
    return last


def regularized_phase_trajectory(
    X: Sequence[Any],
    y: Sequence[float],
    w0: Sequence[float],
    steps: int,
    clip: float,
    reg: float,
    radius: float,
) -> list[float]:
    """Returns the last iterate of one phase with a ball around its start, noise off; the package has no such balls."""
    literal = importlib.import_module("tests.reference.heavy_tailed_literal")
    x, target = np.array(X, dtype=float), np.array(y, dtype=float)
    phase = literal.Phase(clip, steps, reg, radius, "ball")

    def gradient(w: np.ndarray, i: int) -> np.ndarray:
        return (x[i] @ w - target[i]) * x[i]

    last = literal.algorithm_3(gradient, np.array(w0), list(range(len(x))), phase)
    return [float(part) for part in last]


def clip_rows(rows: Sequence[Sequence[float]], clip: float) -> list[list[float]]:
    """Returns the rows times the weights that the clipped oracle gives them."""
    dense_block = resolve("torch_dpsco.rows", "DenseBlock")
    grad_batch = resolve("torch_dpsco.rows", "GradBatch")
    clip_weights = resolve("torch_dpsco.step.oracle", "clip_weights")
    tensor = torch.tensor(rows, dtype=torch.float64)
    weights = clip_weights(grad_batch([dense_block(tensor)]).norms(), clip)
    return (weights.double().unsqueeze(1) * tensor).tolist()


def rdp_filter_steps(budget: float, spends: Sequence[float]) -> int:
    """Returns how many events a Renyi filter executes before its first refusal."""
    run = resolve("tests.reference.papers.accounting", "RDPFilter")(2.0, budget)
    steps = 0
    for value in spends:
        if not run.admits(value):
            break
        run.charge(value)
        steps += 1
    return steps


def ledger_epsilon(
    events: Sequence[dict[str, Any]], adjacency: str, delta: float, method: str
) -> float:
    """Returns epsilon of a ledger read from its wire format."""
    ledger = resolve("torch_dpsco.accounting.ledger", "Ledger").from_json(events)
    return ledger.epsilon(delta, adjacency, method)


def sampled_gaussian_epsilon(
    sample_rate: float,
    noise_multiplier: float,
    steps: int,
    delta: float,
    *,
    sampling: str,
    adjacency: str,
) -> float:
    """Returns epsilon of equal sampled steps by privacy loss distributions, through the accountant."""
    events = "torch_dpsco.accounting.events"
    if sampling == "poisson":
        event = resolve(events, "PoissonGaussian")(noise_multiplier, sample_rate)
    else:
        rate = Fraction(sample_rate).limit_denominator(10**7)
        event = resolve(events, "WORGaussian")(
            noise_multiplier, rate.numerator, rate.denominator
        )
    accountant = resolve("torch_dpsco.accounting.accountant", "Accountant")()
    accountant.record(event, steps)
    return accountant.get_epsilon(delta, adjacency=adjacency, method="pld")


def calibrated_filter(*, n_users: int, typical_score: float, **numbers: Any) -> Any:
    """Returns the calibrated filter for a typical score."""
    calibrate = resolve("torch_dpsco.algorithms.user_numbers", "calibrate_filter")
    return calibrate(n_users=n_users, score_share=typical_score / n_users, **numbers)


def recomputed_filter_delta(
    plan: Any, *, n_users: int, steps: int, epsilon: float, pair_radius: float
) -> float:
    """Returns the delta that a user-level filter plan really has, from its public numbers alone.

    delta_pair + (1 + e^epsilon) beta with beta = P[bad pass] and mu = sqrt(T) 2 tau coefficient / noise_std
    (docs/proofs/user_level.md#guarantee-of-a-filtered-run): it must not exceed the target whatever the optimizer of the
    plan believed.
    """
    svt = "torch_dpsco.accounting.analysis.pure"
    coefficient = resolve("torch_dpsco.algorithms.user_numbers", "filter_coefficient")(
        n_users, plan.score_floor, plan.ramp_end
    )
    mu = math.sqrt(steps) * 2.0 * pair_radius * coefficient / plan.noise_std
    beta = resolve(svt, "bad_pass_probability")(
        plan.threshold - plan.score_floor, steps, plan.threshold_scale, plan.query_scale
    )
    score = resolve(svt, "concentration_score_sensitivity")(n_users)
    tests = resolve(svt, "above_threshold_epsilon")(
        plan.threshold_scale, plan.query_scale, score
    )
    pair = resolve(svt, "svt_gaussian_delta")(epsilon, tests, mu)
    return float(pair + (1.0 + math.exp(epsilon)) * beta)


def auto_clip_rows(
    rows: Sequence[Sequence[float]], bound: float, offset: float
) -> list[list[float]]:
    """Returns the rows times the weights that the normalizing oracle gives them."""
    dense_block = resolve("torch_dpsco.rows", "DenseBlock")
    grad_batch = resolve("torch_dpsco.rows", "GradBatch")
    auto_weights = resolve("torch_dpsco.algorithms.clips", "auto_weights")
    tensor = torch.tensor(rows, dtype=torch.float64)
    weights = auto_weights(grad_batch([dense_block(tensor)]).norms(), bound, offset)
    return (weights.unsqueeze(1) * tensor).tolist()


def central_candidate(candidates: Sequence[Sequence[float]]) -> Any:
    """Returns the most central of the candidates."""
    select_central = resolve("tests.reference.papers.localized", "select_central")
    return select_central(torch.tensor(candidates, dtype=torch.float64))


def _records(features: torch.Tensor, targets: torch.Tensor) -> Any:
    return resolve("torch_dpsco.estimators.records", "Records")(features, targets)


def tilted_logistic(
    X: Sequence[Sequence[float]], y: Sequence[float], w: Sequence[float], tilt: float, reg: float
) -> dict[str, Any]:
    """Returns the tilted logistic objective, its gradient and its weights."""
    loss = resolve("torch_dpsco.losses", "Logistic")()
    features, targets, point = (
        torch.tensor(values, dtype=torch.float64) for values in (X, y, w)
    )
    # strong convexity is not asked for here: the vectors hold reg = 0 and tilts of both signs
    objective = resolve("torch_dpsco.estimators.robust", "Tilted")(
        loss, _records(features, targets), tilt=abs(tilt), reg=reg
    )
    objective.tilt = tilt
    value, gradient = objective.value_and_gradient(point)
    return {
        "value": value,
        "grad": gradient.tolist(),
        "weights": objective.weights(point).tolist(),
    }


def adversarial_logistic(
    X: Sequence[Sequence[float]],
    y: Sequence[float],
    w: Sequence[float],
    attack_radius: float,
    reg: float,
) -> dict[str, Any]:
    """Returns the logistic objective under attacks of bounded l2 norm, and its gradient."""
    loss = resolve("torch_dpsco.losses", "Logistic")()
    features, targets, point = (
        torch.tensor(values, dtype=torch.float64) for values in (X, y, w)
    )
    adversarial = resolve("torch_dpsco.estimators.robust", "Adversarial")
    records = _records(features, targets)
    objective = adversarial(
        loss, records, attack_radius=attack_radius, reg=reg, normalizer=len(features)
    )
    value, gradient = objective.value_and_gradient(point)
    return {"value": value, "grad": gradient.tolist()}


def logistic_certificate(
    X: Sequence[Sequence[float]], y: Sequence[float], w: Sequence[float], reg: float
) -> dict[str, Any]:
    """Returns the certificate of a point for a mean logistic objective, beside the true minimizer and distance."""
    loss = resolve("torch_dpsco.losses", "Logistic")()
    features, targets, point = (
        torch.tensor(values, dtype=torch.float64) for values in (X, y, w)
    )
    linear = resolve("torch_dpsco.estimators.objectives", "LinearObjective")
    objective = linear(loss, _records(features, targets), reg=reg, normalizer=len(features))
    bound = resolve("torch_dpsco.estimators.solvers", "gradient_certificate")(
        objective, point
    ).distance
    minimizer = resolve("torch_dpsco.estimators.solvers", "solve")(objective, 2e-12).w
    return {
        "grad": objective.value_and_gradient(point)[1].tolist(),
        "distance_bound": bound,
        "suboptimality_bound": reg * bound * bound / 2,
        "true_distance": float(torch.linalg.vector_norm(point - minimizer)),
        "minimiser": minimizer.tolist(),
    }
