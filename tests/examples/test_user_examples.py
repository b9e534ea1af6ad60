"""examples/user_level.py on synthetic aircraft of the same shape, and its loader on the real ones."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import math
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torch_dpsco as dp
from tests.reference.papers.user_level import break_even_clip
from torch_dpsco.accounting.calibrate import rounded_up
from torch_dpsco.accounting.designs import Parts
from torch_dpsco.algorithms.user_numbers import calibrate_filter
from torch_dpsco.errors import InfeasibleError

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LOSSES, METHODS = ("logistic", "squared"), ("clipped", "filtered", "localized")
USERS, ITEMS, DELTA = 1500, 10, 1e-6


def load(folder: str, name: str) -> ModuleType:
    """Imports a script by its path; it finds its neighbors beside itself, as it does when it is run."""
    spec = importlib.util.spec_from_file_location(f"script_{name}", ROOT / folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        sys.modules.pop("flights", None)
    return module


def made_up(module: ModuleType, n_users: int = USERS, ragged: bool = False) -> Any:
    """Returns a fleet with rows like those of flights: one-hot blocks, a clock, and delays with a heavy tail."""
    generator = np.random.default_rng(1)
    counts = ITEMS + (
        generator.integers(0, 7, n_users) if ragged else np.zeros(n_users, dtype=int)
    )
    test = 3000

    def rows(count: int) -> tuple[Tensor, Tensor]:
        blocks = [np.eye(width)[generator.integers(0, width, count)] for width in (12, 7, 16, 3)]
        clock = generator.random(count)
        features = np.column_stack([*blocks, clock, clock**2, generator.random(count)])
        hours = 1.5 * (clock - 0.5) + 0.4 * generator.standard_t(3, count)
        return torch.from_numpy(features).float(), torch.from_numpy(hours).float()

    users = torch.from_numpy(np.repeat(np.arange(n_users), counts))
    features, hours = rows(len(users))
    return module.Fleet(features, hours, users, n_users, *rows(test))


class Run(NamedTuple):
    """What the script returned and printed, and the models and optimizers that it made, in order."""

    figures: dict[str, float]
    text: str
    made: list[tuple[nn.Module, dp.PrivateOptimizer]]
    fleet: Any


def run(module: ModuleType, fleet: Any, *options: str) -> Run:
    made, text, train = [], io.StringIO(), module.train

    def remembering(*args: Any) -> Any:
        made.append(train(*args))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(text):
        patch.setattr(module, "train", remembering)
        patch.setattr(module, "load_fleet", lambda items: fleet)
        figures = module.main(list(options))
    return Run(figures, text.getvalue(), made, fleet)


@pytest.fixture(scope="module")
def module() -> ModuleType:
    return load("examples", "user_level")


@pytest.fixture(scope="module")
def quick(module: ModuleType) -> Run:
    return run(module, made_up(module), "--quick")


def test_the_example_says_how_to_run_it_and_stays_short() -> None:
    source = (ROOT / "examples" / "user_level.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) < 345
    docstring = ast.get_docstring(ast.parse(source))
    for options in ("", "--items all", "--quick", "--plot"):
        assert f"python examples/user_level.py {options}" in docstring


@pytest.mark.weekly
def test_each_method_trains_each_loss_within_a_budget_for_users(quick: Run) -> None:
    assert len(quick.made) == len(LOSSES) * len(METHODS)
    for _, optimizer in quick.made:
        spent = optimizer.report().figures
        assert spent.unit == "user"
        assert optimizer.adjacency == "replace_one"
        assert optimizer.finalized
        # a reserve for failures is kept back by plans of the filter; clipping spends all
        least = 1.99 if isinstance(optimizer, dp.UserClippedSGD) else 1.8
        assert least < spent.epsilon <= 2.0
    kinds = [type(optimizer).__name__ for _, optimizer in quick.made[:3]]
    assert kinds == ["UserClippedSGD", "UserFilteredSGD", "LocalizedUserSGD"]


def test_the_printed_headline_names_the_user_and_the_universe(quick: Run) -> None:
    quoted = re.search(
        r"\((\S+), 1e-06\)-differential privacy for one user \(replace_one: replaced by any other\)",
        quick.text,
    )
    last = quick.made[-1][1].report().epsilon
    assert quoted[1] == rounded_up(last)
    assert f"universe: aircraft with at least 50 flights, {USERS:,} of them" in quick.text


def test_clipping_is_charged_for_its_gaussians_alone(quick: Run) -> None:
    for _, optimizer in (quick.made[0], quick.made[3]):
        mu = 2.0 * math.sqrt(optimizer.steps) / optimizer.oracle.event().sigma
        normal = torch.distributions.Normal(0.0, 1.0)
        low, high = (
            float(normal.cdf(torch.tensor(x, dtype=torch.float64)))
            for x in (-mu / 2 - 2 / mu, mu / 2 - 2 / mu)
        )
        assert high - math.exp(2.0) * low == pytest.approx(DELTA, rel=2e-2)


def test_no_aircraft_is_in_two_phases(quick: Run) -> None:
    for _, optimizer in (quick.made[2], quick.made[5]):
        assert isinstance(optimizer.design, Parts)
        sizes = [part.n for part, _ in optimizer.design.parts]
        assert sum(sizes) <= USERS
        assert f"{len(sizes)} phases of {', '.join(map(str, sizes))} aircraft" in quick.text


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("loss", LOSSES)
def test_printed_scores_are_those_of_the_models(
    quick: Run, module: ModuleType, loss: str
) -> None:
    fleet, late = quick.fleet, quick.fleet.test_hours > 0.25
    table = quick.text.split(f"{loss}: ")[1].split("\n\n")[0]
    for name, (model, _) in zip(METHODS, quick.made[3 * LOSSES.index(loss) :], strict=False):
        with torch.no_grad():
            score = model(fleet.test_features).squeeze(1).double()
        pairs = score[late][:, None] - score[~late][None, :]
        auc = float(((pairs > 0).double() + 0.5 * (pairs == 0).double()).mean())
        if loss == "logistic":
            mean = nn.functional.binary_cross_entropy_with_logits(score, late.double())
        else:
            mean = 0.5 * (score - fleet.test_hours.double()).square().mean()
        shown = re.search(rf"^{name} +\d+ +(\S+) +(\S+)", table, re.MULTILINE).groups()
        assert tuple(map(float, shown)) == pytest.approx((auc, float(mean)), abs=5.1e-5)
        assert quick.figures[f"{loss}_{name}_auc"] == pytest.approx(auc, abs=1e-6)
        assert quick.figures[f"{loss}_{name}_loss"] == pytest.approx(float(mean), rel=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_fit_that_is_not_private_minimizes_the_mean_over_users(
    module: ModuleType, loss: str
) -> None:
    fleet = made_up(module, 200, ragged=True)
    weights = module.fit_public(loss, fleet)
    rows = nn.functional.pad(fleet.features.double(), (0, 1), value=1.0)
    wanted = module.targets(loss, fleet.hours).double()
    slope = (torch.sigmoid(rows @ weights) if loss == "logistic" else rows @ weights) - wanted
    gradients = rows * slope[:, None]
    means = torch.stack([gradients[fleet.users == user].mean(0) for user in range(200)])
    assert float((means.mean(0) + 1e-5 * weights).norm()) < 1e-3
    assert (
        float((gradients.mean(0) + 1e-5 * weights).norm()) > 1e-3
    )  # rows do not count alike: users do


@pytest.mark.weekly
def test_too_few_aircraft_are_said_to_be_infeasible_with_the_number_that_works(
    module: ModuleType,
) -> None:
    found = run(module, made_up(module, 60), "--quick")
    for name in ("filtered", "localized"):
        lines = re.findall(rf"^{name} +infeasible: .*$", found.text, re.MULTILINE)
        assert len(lines) == len(LOSSES)
        needed = [int(re.search(r"smallest n that works is (\d+)", line)[1]) for line in lines]
        assert all(number > 60 for number in needed)
        assert f"logistic_{name}_auc" not in found.figures
    assert len(found.made) == 2  # clipping works for any number


@pytest.mark.weekly
def test_ragged_numbers_of_flights_are_trained_on_as_they_are(module: ModuleType) -> None:
    fleet = made_up(module, ragged=True)
    found = run(module, fleet, "--quick", "--items", "all")
    assert len(found.made) == 6
    assert f"{len(fleet.hours):,} of their flights" in found.text


def test_what_is_chosen_of_a_user_does_not_depend_on_other_users(module: ModuleType) -> None:
    owners = np.array([0] * 9 + [1] * 9 + [2] * 9 + [-1] * 3)
    chosen = module.choose(owners, 3, 4)
    assert sorted(owners[chosen]) == [0] * 4 + [1] * 4 + [2] * 4
    fewer = np.delete(owners, [1, 2, 3])  # user 0 has three rows less
    again = module.choose(fewer, 3, 4)
    assert np.array_equal(again[4:] + 3, chosen[4:])
    assert np.array_equal(np.sort(module.choose(owners, 3, None)), np.arange(27))


@pytest.mark.slow
def test_the_universe_is_that_of_the_aircraft_with_fifty_flights(module: ModuleType) -> None:
    fleet = module.load_fleet()
    assert fleet.n_users == 2086
    assert torch.equal(torch.bincount(fleet.users), torch.full((2086,), 50))
    assert len(fleet.test_hours) == 327_346 - 286_130
    assert float(nn.functional.pad(fleet.features, (0, 1), value=1.0).norm(dim=1).max()) <= 2.83


def test_the_plot_shows_the_noise_of_three_methods(module: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "noise.png"
    module.draw(str(path), 2086, 2.0)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.weekly
def test_on_real_aircraft_clipping_wins_over_the_filter(module: ModuleType) -> None:
    figures = run(module, module.load_fleet()).figures
    for loss in LOSSES:
        linear, constant = figures[f"{loss}_linear_loss"], figures[f"{loss}_constant_loss"]
        # seen: a seventh of the way from linear to constant
        assert linear < figures[f"{loss}_clipped_loss"] < linear + 0.4 * (constant - linear)
        assert figures[f"{loss}_clipped_auc"] > figures[f"{loss}_filtered_auc"] + 0.02


# -- the benchmark, and the document that quotes it -------------------------------------------------------------------

DOC = ROOT / "docs" / "user_level.md"


def cells(line: str) -> list[str]:
    return [cell.strip().replace(",", "") for cell in line.strip("| \n").split("|")]


@pytest.mark.slow
def test_the_noise_table_of_the_document_is_printed_and_below_that_of_the_specification() -> (
    None
):
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        load("benchmarks", "user_level_risk").main(["--noise"])
    printed = [
        [float(cell) for cell in line.split()] for line in text.getvalue().splitlines()[1:]
    ]
    section = DOC.read_text(encoding="utf-8").split("### Noise")[1].split("###")[0]
    quoted = [
        list(map(float, cells(line)))
        for line in section.splitlines()
        if re.match(r"\| [\d,]+ \|", line)
    ]
    assert len(printed) == len(quoted) == 6
    specified = (677, 2476, 826, 380, 273, 28)  # of a coarser search
    for line, found, most in zip(quoted, printed, specified, strict=True):
        assert line[:4] == found[:4]
        assert line[4:] == pytest.approx(found[4:7], rel=5e-3)
        assert 0.9 * most < found[5] <= most


@pytest.mark.weekly
def test_the_break_even_table_of_the_document_is_that_of_the_theory() -> None:
    section = (
        DOC.read_text(encoding="utf-8").split("## When the filter wins")[1].split("\n## ")[0]
    )
    lines = [cells(line) for line in section.splitlines() if line.startswith("| ")]
    sizes = [int(re.search(r"\d+$", cell)[0]) for cell in lines[0][1:8]]
    numbers = {"steps": 60, "delta": 1e-6, "pair_radius": 1.0}
    for epsilon, *factors, smallest in lines[1:]:
        for size, factor in list(zip(sizes, factors, strict=True))[::3]:
            if factor == "-":
                continue
            plan = calibrate_filter(n_users=size, epsilon=float(epsilon), **numbers)
            assert float(factor) == pytest.approx(
                break_even_clip(plan, float(epsilon), 1e-6), abs=0.051
            )
        for steps, least in zip((20, 100, 1000), map(int, smallest.split("/")), strict=True):
            works = {
                "epsilon": float(epsilon),
                "delta": 1e-6,
                "pair_radius": 1.0,
                "steps": steps,
            }
            calibrate_filter(n_users=least, **works)
            with pytest.raises(InfeasibleError, match=f"works is {least} "):
                calibrate_filter(n_users=least - 1, **works)


@pytest.mark.weekly
def test_the_code_of_the_document_runs() -> None:
    names: dict[str, Any] = {}  # a name that the page does not define fails
    with contextlib.redirect_stdout(io.StringIO()) as text:
        for block in re.findall(
            r"```python\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL
        ):
            exec(block, names)
    assert (
        "(2, 1e-06)-differential privacy for one user (replace_one: replaced by any other)"
        in text.getvalue()
    )
    assert isinstance(names["optimizer"], dp.LocalizedUserSGD)


def test_the_benchmark_measures_excess_risk_exactly() -> None:
    module = load("benchmarks", "user_level_risk")
    test = module.draw(20_000, torch.Generator().manual_seed(0))
    best = torch.zeros(10)
    best[0] = 6.0
    assert module.excess(best, test) == pytest.approx(0.0, abs=1e-9)
    assert module.excess(torch.zeros(10), test) == pytest.approx(
        0.229, abs=5e-3
    )  # 0.228 when it was planned
    assert module.slope((1, 2, 4), (1.0, 0.25, None)) == "-2.00"
    assert module.slope((1, 2), (1.0, None)) == "-"


@pytest.mark.slow
def test_far_from_the_start_the_filter_does_not_pay_for_the_distance() -> None:
    module = load("benchmarks", "user_level_risk")
    near, far = (module.far_fit("filtered", 2000, 50, away) for away in (0.0, 50.0))
    assert far < 3 * near  # two draws of noise of the same size in 50 dimensions
    assert far < module.far_fit("clipped", 2000, 50, 50.0) / 4  # seen: a twelfth
