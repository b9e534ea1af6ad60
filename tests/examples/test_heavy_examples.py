"""The examples on heavy tails, lasso and the shuffle model, and the planned bounds: figures and claims are checked."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import nn

import torch_dpsco as dp
from torch_dpsco.accounting.designs import Parts
from torch_dpsco.algorithms.clips import QuantilePilot
from torch_dpsco.shuffle_model import ShuffledClipped

# of a few thousand flights a pilot of 5 % may draw an end of its grid, now and then
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:the private threshold:torch_dpsco.errors.UtilityWarning"),
]

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NAMES = ("heavy_tailed_regression", "lasso", "shuffle_model")
DELTAS = {"heavy_tailed_regression": 1e-6, "lasso": 1e-6, "shuffle_model": 1e-5}
MODELS = {"heavy_tailed_regression": 9, "lasso": 4, "shuffle_model": 2}


def load(path: Path) -> ModuleType:
    """Imports a script by its path; it finds its neighbors beside itself, as it does when it is run."""
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(path.parent))
        spec.loader.exec_module(module)
        for neighbor in ("flights", "linear_regression"):
            sys.modules.pop(neighbor, None)
    return module


class Run(NamedTuple):
    """What a script returned and printed, and the models and optimizers that it made, in order."""

    module: ModuleType
    figures: dict[str, float]
    text: str
    made: list[tuple[nn.Module, dp.PrivateOptimizer]]


def run(module: ModuleType, *options: str) -> Run:
    made, text, train = [], io.StringIO(), module.train

    def remembering(*args: Any) -> Any:
        made.append(train(*args))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(text):
        patch.setattr(module, "train", remembering)
        figures = module.main(list(options))
    return Run(module, figures, text.getvalue(), made)


@pytest.fixture(scope="module")
def modules() -> dict[str, ModuleType]:
    found = {name: load(EXAMPLES / f"{name}.py") for name in NAMES}
    flights = found["heavy_tailed_regression"]
    data = flights.load_unclipped()
    flights.load_unclipped = lambda: data
    return found


@pytest.fixture(scope="module")
def quick(modules: dict[str, ModuleType]) -> dict[str, Run]:
    torch.manual_seed(0)
    return {name: run(module, "--quick") for name, module in modules.items()}


# -- all scripts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_short_and_says_how_to_run_it(name: str) -> None:
    source = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) < 200
    docstring = ast.get_docstring(ast.parse(source))
    for command in (f"python examples/{name}.py ", f"python examples/{name}.py --quick"):
        assert command in docstring


@pytest.mark.weekly
@pytest.mark.parametrize("name", NAMES)
def test_the_printed_headline_is_that_of_every_model_and_within_the_budget(
    name: str, quick: dict[str, Run]
) -> None:
    _, figures, text, made = quick[name]
    assert len(made) == MODELS[name]
    quoted = re.search(
        r": \((\S+), (\S+)\)-differential privacy for one example \(replace_one: replaced by any other\)",
        text,
    )
    assert float(quoted[2]) == DELTAS[name]
    own = [optimizer.report().epsilon for _, optimizer in made]
    assert own[-1] <= float(quoted[1]) <= 1.0
    assert all(0.9 < epsilon <= 1.0 for epsilon in own)
    assert sorted(value for key, value in figures.items() if key.endswith("_epsilon")) == sorted(
        own
    )


def gaussian_parts(optimizer: dp.PrivateOptimizer) -> Iterator[tuple[float, int]]:
    """Yields (noise multiplier, releases on the same records) of each part of unsampled steps."""
    design = optimizer.design
    if not isinstance(design, Parts):
        yield optimizer.oracle.event().sigma, 1
        return
    for (part, draws), (oracle, _) in zip(design.parts, optimizer.oracle.phases, strict=True):
        if not isinstance(oracle, QuantilePilot):
            yield oracle.event().sigma, 1 if isinstance(part, dp.Disjoint) else draws


def delta_of_gaussians(epsilon: float, z: float, releases: int) -> float:
    mu = 2.0 * math.sqrt(releases) / z
    return norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)


@pytest.mark.parametrize("name", ["heavy_tailed_regression", "lasso"])
def test_each_part_of_unsampled_steps_and_each_pilot_keeps_the_budget_by_itself(
    name: str, quick: dict[str, Run]
) -> None:
    checked = 0
    for _, optimizer in quick[name].made:
        design = optimizer.design
        if isinstance(design, Parts) and any(
            isinstance(part, dp.Poisson) for part, _ in design.parts
        ):
            continue
        if isinstance(
            design, (dp.Assigned, dp.Shuffled)
        ):  # one event of many steps; several passes
            continue
        for z, releases in gaussian_parts(optimizer):
            assert delta_of_gaussians(1.0, z, releases) <= DELTAS[name]
            checked += 1
        if isinstance(design, Parts):
            pilots = [
                oracle
                for oracle, _ in optimizer.oracle.phases
                if isinstance(oracle, QuantilePilot)
            ]
            assert pilots
            assert all(pilot.epsilon <= 1.0 for pilot in pilots)
            assert sum(part.n for part, _ in design.parts) <= design.n
    assert checked >= 4


# -- flights ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_unclipped_rows_differ_from_the_clipped_ones_in_late_departures_only(
    modules: dict[str, ModuleType],
) -> None:
    data, clipped = (
        modules["heavy_tailed_regression"].load_unclipped(),
        load(EXAMPLES / "flights.py").load_flights(),
    )
    for ours, theirs in (
        (data.train_features, clipped.train_features),
        (data.test_features, clipped.test_features),
    ):
        assert torch.equal(ours[:, :-1], theirs[:, :-1])
        assert torch.equal(ours[:, -1].clamp(-1.0, 5.0), theirs[:, -1])
        assert float(ours[:, -1].max()) > 10.0
    assert torch.equal(data.test_hours, clipped.test_hours)


def test_the_printed_errors_are_those_of_the_trained_models(
    quick: dict[str, Run], modules: dict[str, ModuleType]
) -> None:
    module, figures, text, made = quick["heavy_tailed_regression"]
    data = modules["heavy_tailed_regression"].load_unclipped()
    for name, (model, optimizer) in zip(module.METHODS, made, strict=True):
        with torch.no_grad():
            found = float((model(data.test_features).squeeze(1) - data.test_hours).abs().mean())
        shown = re.search(rf"^{name} +(\d+) +(\S+)", text, re.MULTILINE).groups()
        assert (int(shown[0]), float(shown[1])) == (
            optimizer.steps,
            pytest.approx(found, abs=6e-5),
        )
        assert figures[f"{name}_mae"] == pytest.approx(found, abs=1e-6)
    assert figures["Huber's loss, not private_mae"] < 0.211
    assert figures["as late as it left, nothing learned_mae"] == pytest.approx(0.2411, abs=1e-4)


def test_promises_hold_on_these_flights(modules: dict[str, ModuleType]) -> None:
    module = modules["heavy_tailed_regression"]
    rows = nn.functional.pad(module.load_unclipped().train_features.double(), (0, 1), value=1.0)
    assert float(rows.square().sum(dim=1).mean()) <= module.ROW_MEAN_SQUARE
    assert float(torch.linalg.eigvalsh(rows.T @ rows / len(rows))[-1]) <= module.SMOOTHNESS


def test_phases_have_at_most_fifty_steps_and_no_record_is_in_two(quick: dict[str, Run]) -> None:
    localized = quick["heavy_tailed_regression"].made[-1][1]
    assert isinstance(localized, dp.LocalizedSGD)
    assert max(draws for _, draws in localized.design.parts) == 50
    assert localized.oracle.phases[1][1] == 50


@pytest.mark.weekly
def test_the_goals_on_flights_are_met(modules: dict[str, ModuleType]) -> None:
    figures = run(modules["heavy_tailed_regression"], "--runs", "1").figures
    assert figures["one pass, accelerated_mae"] <= 0.215
    assert figures["one pass_mae"] <= 0.215
    assert figures["minibatches_mae"] <= 0.212
    assert figures["localized, absolute loss_mae"] <= 0.214
    assert figures["one pass, secret batches_mae"] <= min(
        0.2105, figures["one pass, known batches_mae"] - 0.001
    )
    assert figures["ten passes, secret batches_mae"] <= min(
        0.21, figures["ten passes, known batches_mae"]
    )
    assert figures["theorem_mae"] <= 0.241  # better than nothing learned


# -- lasso ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_penalty_leaves_zeros_and_its_absence_does_not(
    modules: dict[str, ModuleType],
) -> None:
    torch.manual_seed(1)
    figures = run(modules["lasso"]).figures
    for kind in ("one pass", "full batch"):
        assert figures[f"proximal, {kind}_found"] >= 4
        assert figures[f"proximal, {kind}_false"] <= 25
        assert figures[f"no penalty, {kind}_false"] == 95
        assert figures[f"proximal, {kind}_excess"] < 0.3  # zero has 1.2
    assert figures["public_excess"] < 0.02


def test_the_strength_is_public_and_follows_the_noise(quick: dict[str, Run]) -> None:
    module, figures, text, _ = quick["lasso"]
    budget = dp.Budget(1.0, 1e-6, adjacency="replace_one")
    numbers = {"n": 4_000, "dim": 100, "steps": 5, "clip": 20.0, "sampling": "shuffled"}
    plan = dp.ProximalSGD.plan(problem=dp.Problem(smoothness=1.0), budget=budget, **numbers)
    assert figures["strength"] == pytest.approx(2.0 * plan.noise_std)
    assert f"L1 strength {figures['strength']:.3g}" in text
    assert module.strength_for(40_000, 1.0) == pytest.approx(figures["strength"] / 10.0)


# -- shuffle model ----------------------------------------------------------------------------------------------------


def test_the_shuffled_run_says_what_it_is(quick: dict[str, Run]) -> None:
    text = quick["shuffle_model"].text
    assert "A central simulation; it holds for the protocol, with honest users" in text
    docstring = ast.get_docstring(
        ast.parse((EXAMPLES / "shuffle_model.py").read_text(encoding="utf-8"))
    )
    assert "THIS IS A SIMULATION" in docstring
    assert "HONEST USERS" in docstring


def test_the_printed_bits_are_those_of_the_oracle_and_dishonest_users_cost_more(
    quick: dict[str, Run], modules: dict[str, ModuleType]
) -> None:
    oracle = quick["shuffle_model"].made[1][1].oracle
    assert isinstance(oracle, ShuffledClipped)
    sizes = oracle.parameters
    assert (
        f"send 10 x ({sizes.grid} + {sizes.noise_bits}) bits each" in quick["shuffle_model"].text
    )
    assert quick["shuffle_model"].figures["bits"] == 10 * (sizes.grid + sizes.noise_bits)
    doubted = modules["shuffle_model"].make_oracle(4_000, 1.0, 0.5).parameters
    assert doubted.noise_bits > 1.5 * sizes.noise_bits


@pytest.mark.slow
def test_both_models_of_the_shuffle_example_learn(modules: dict[str, ModuleType]) -> None:
    torch.manual_seed(2)
    figures = run(modules["shuffle_model"]).figures
    assert figures["central_excess"] < 0.05  # zero has 0.5
    assert figures["shuffled_excess"] < 0.05


# -- bounds -----------------------------------------------------------------------------------------------------------


def test_planned_bounds_fall_with_the_exponents_of_the_theorems() -> None:
    benchmark = load(ROOT / "benchmarks" / "heavy_tailed.py")
    for name, exponent in benchmark.EXPONENTS.items():
        for k in (2.0, 3.0):
            bounds = [benchmark.planned(name, k, n) for n in (10**6, 10**9)]
            assert np.log(bounds[1] / bounds[0]) / np.log(1e3) == pytest.approx(
                exponent(k), abs=0.15
            ), (name, k)
