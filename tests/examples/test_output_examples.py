"""Examples of output perturbation, tilted and robust models: figures recomputed, budgets kept; their benchmark."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib.util
import io
import math
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, log_loss, roc_auc_score
from torch import Tensor, nn

from torch_dpsco.accounting.analysis.gaussian import gaussian_sigma

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
NAMES = ("output_perturbation", "tilted", "adversarial")
FITS = {
    "output_perturbation": ("fit_private",),
    "tilted": ("exact", "private", "untilted"),
    "adversarial": ("fit_private",),
}


def load(folder: str, name: str) -> ModuleType:
    """Imports a script by its path; it finds `adult` beside itself, as it does when it is run."""
    spec = importlib.util.spec_from_file_location(
        f"{folder}_{name}", ROOT / folder / f"{name}.py"
    )
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        sys.modules.pop("adult", None)
    return module


class Run(NamedTuple):
    """What a script returned and printed, and the results of its fits, in order."""

    figures: dict[str, float]
    text: str
    made: list[Any]


@pytest.fixture(scope="module")
def people() -> Any:
    return load("examples", "adult").load_adult()


@pytest.fixture(scope="module")
def quick(people: Any) -> dict[str, Run]:
    return {name: run(name, people) for name in NAMES}


def run(name: str, people: Any) -> Run:
    module, made, text = load("examples", name), [], io.StringIO()

    def remembering(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            made.append(function(*args))
            return made[-1]

        return call

    module.load_adult = lambda: people
    for fit in FITS[name]:
        setattr(module, fit, remembering(getattr(module, fit)))
    with contextlib.redirect_stdout(text):
        figures = module.main(["--quick"])
    return Run(figures, text.getvalue(), made)


def scores_of(model: nn.Module, rows: Tensor) -> Any:
    with torch.no_grad():
        return model(rows).squeeze(1).double().numpy()


def judged(labels: Any, scores: Any) -> tuple[float, float, float]:
    """Returns accuracy, AUC and log-loss by scikit-learn."""
    chance = 1 / (1 + torch.from_numpy(-scores).exp().numpy())
    return (
        accuracy_score(labels, scores > 0),
        roc_auc_score(labels, scores),
        log_loss(labels, chance),
    )


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_short_and_says_how_to_run_it(name: str) -> None:
    source = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) < 150
    docstring = ast.get_docstring(ast.parse(source))
    for command in (f"python examples/{name}.py ", f"python examples/{name}.py --quick"):
        assert command in docstring


# -- output perturbation ----------------------------------------------------------------------------------------------


@pytest.mark.weekly
def test_each_solved_model_scores_and_spends_what_is_printed(
    quick: dict[str, Run], people: Any
) -> None:
    figures, text, made = quick["output_perturbation"]
    names = re.findall(r"^(\S.*\S) {2,}0\.\d{4} +0\.\d{4} +\d\.\d{4}   \(", text, re.MULTILINE)
    assert len(names) == len(made) == 7
    for name, (model, optimizer) in zip(names, made, strict=True):
        line = re.search(
            rf"^{name} +(\S+) +(\S+) +(\S+)   \((\S+), (\S+)\)$", text, re.MULTILINE
        ).groups()
        found = judged(people.test_labels.numpy(), scores_of(model, people.test_features))
        assert tuple(map(float, line[:3])) == pytest.approx(found, abs=6e-5)
        kept = [figures[f"{name}: {kind}"] for kind in ("accuracy", "auc", "log_loss")]
        assert kept == pytest.approx(found, abs=1e-5)
        spent = optimizer.report().figures
        assert figures[f"{name}: epsilon"] == spent.epsilon
        assert 0.99 < spent.epsilon <= 1.0
        assert spent.adjacency == "add_remove"
        delta = 0.0 if "pure" in name else 1e-6
        assert float(line[4]) == optimizer.accountant.budget.delta == delta


def test_the_statement_of_the_last_model_is_its_own(quick: dict[str, Run]) -> None:
    _, text, made = quick["output_perturbation"]
    headline = str(made[-1][1].report()).splitlines()[0]
    assert f"the last one alone: {headline}\n" in text
    assert headline.startswith("(1, 1e-06)-differential privacy")


def test_an_own_loop_has_the_noise_of_the_library_s_solver(quick: dict[str, Run]) -> None:
    # the same promise, whoever solved: the regularizer and the certified distance decide
    optimizers = [optimizer for _, optimizer in quick["output_perturbation"].made]
    own, default = optimizers[4], optimizers[3]
    assert [charge.event for charge in own.report().figures.charges] == [
        charge.event for charge in default.report().figures.charges
    ]


def test_all_solved_models_have_learned(quick: dict[str, Run]) -> None:
    # 20 runs: pure 0.82 to 0.87 (spread 0.014), objective 0.87 to 0.88 (0.004), output 0.84 to 0.86 (0.006)
    figures = quick["output_perturbation"].figures
    for name in ("objective, pure", "objective"):
        assert 0.75 < figures[f"{name}: auc"] < figures["not private: auc"] + 0.01
    assert 0.75 < figures["output: auc"] < figures["not private: auc"]


# -- tilted -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_tilted_model_scores_what_is_printed(quick: dict[str, Run], people: Any) -> None:
    figures, text, made = quick["tilted"]
    lines = re.findall(
        r"^\S.* {2,}(\S+) +(0\.\d{4}) +(\d+\.\d{4}) +(\d+\.\d{4})(?:   \((\S+), 1e-06\))?$",
        text,
        re.M,
    )
    assert len(lines) == len(made) == 2 * 5 + 2 * 3 + 3
    rows = (
        torch.cat(
            [people.test_features, torch.ones(len(people.test_features), 1)], dim=1
        ).double()
        / 3.61
    )
    signs = 2 * people.test_labels.double() - 1
    values = iter(
        [value for key, value in figures.items() if key.endswith((": auc", ": mean", ": worst"))]
    )
    for (noise, *shown, epsilon), result in zip(lines, made, strict=True):
        w, optimizer = (result, None) if isinstance(result, Tensor) else result
        losses = nn.functional.softplus(-signs * (rows @ w)).sort(descending=True).values
        found = (
            roc_auc_score(signs.numpy(), (rows @ w).numpy()),
            float(losses.mean()),
            float(losses[:162].mean()),
        )
        assert tuple(map(float, shown)) == pytest.approx(found, rel=1e-6, abs=6e-5)
        assert [next(values) for _ in range(3)] == pytest.approx(found, rel=1e-5)
        if optimizer is None:
            assert (noise, epsilon) == ("-", "")
        else:
            assert 2.99 < optimizer.report().epsilon <= 3.0 == float(epsilon)
            assert optimizer.accountant.adjacency == "replace_one"


def test_a_tilt_raises_the_noise_by_the_largest_weight(quick: dict[str, Run]) -> None:
    figures, text, _ = quick["tilted"]
    span = math.sqrt(2 * math.log(2) / 0.005)
    for tilt in (0.05, 0.1, 0.2, 0.4):
        weight = 4_000 / (1 + 3_999 * math.exp(-tilt * span))
        shown = re.search(rf"^tau = {tilt:g}, weights <= (\S+)/n", text, re.MULTILINE)[1]
        assert float(shown) == pytest.approx(weight, rel=6e-3)
        # without a tilt the least distance of logistic gradients is a little below 2 L, hence "at least"
        assert figures[f"{tilt:g}: noise"] / figures["0: noise"] >= weight * (1 - 1e-9)
        assert figures[f"{tilt:g}: noise"] / figures["0: noise"] == pytest.approx(
            weight, rel=0.01
        )


def test_without_noise_the_worst_gain_and_with_it_only_as_long_as_the_tilt_is_small(
    quick: dict[str, Run],
) -> None:
    figures = quick["tilted"].figures
    exact = [figures[f"exact {tilt:g}: worst"] for tilt in (0, 0.05, 0.1, 0.2, 0.4)]
    assert exact == sorted(exact, reverse=True)
    assert (
        figures["0.4: mean"] > 1.0 > figures["exact 0.4: mean"]
    )  # noise of 100 times the norm that is allowed
    # ... and against wrong labels a tilt does nothing even without noise
    least = figures["flipped, exact -0.004: mean"]
    assert least == pytest.approx(figures["flipped, exact 0: mean"], abs=2e-3)
    assert figures["flipped, clipped: mean"] < least


# -- adversarial ------------------------------------------------------------------------------------------------------


def test_each_attack_is_the_worst_and_its_scores_are_those_printed(
    quick: dict[str, Run], people: Any
) -> None:
    figures, text, made = quick["adversarial"]
    labels = people.test_labels.numpy()
    signs = 2 * people.test_labels.double().numpy() - 1
    names = ("ordinary, objective", "ordinary, output", "robust, l2", "robust, linf")
    for name, (model, epsilon) in zip(names, made, strict=True):
        clean, weight = scores_of(model, people.test_features), model.weight.detach().double()
        shown = re.search(rf"^{name} +(.*?)   \((\S+), 1e-06\)$", text, re.MULTILINE).groups()
        columns = iter(map(float, shown[0].split()))
        for attack, loss in {
            "clean": 0.0,
            "l2": 0.2 * weight.norm(),
            "linf": 0.03 * weight.abs().sum(),
        }.items():
            found = judged(
                labels, clean - float(loss) * signs
            )  # what an attack takes off each margin at most
            assert [next(columns) for _ in range(3)] == pytest.approx(found, abs=2e-4)
            kept = [
                figures[f"{name}: {attack} {kind}"] for kind in ("accuracy", "auc", "log_loss")
            ]
            assert kept == pytest.approx(found, abs=2e-4)
        assert 2.99 < epsilon == figures[f"{name}: epsilon"] <= 3.0 == float(shown[1])


def test_robust_models_are_less_brittle_than_the_ordinary_one(quick: dict[str, Run]) -> None:
    # log-loss under attack, 20 runs: ordinary 0.73 to 0.96, robust 0.47 to 0.52; clean AUC 0.897 and at most 0.87
    figures = quick["adversarial"].figures
    for attack in ("l2", "linf"):
        assert (
            figures[f"robust, {attack}: {attack} log_loss"]
            < figures[f"ordinary, objective: {attack} log_loss"]
        )
        assert (
            figures["ordinary, objective: clean auc"] > figures[f"robust, {attack}: clean auc"]
        )


# -- the benchmark ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return load("benchmarks", "linear_models")


def printed(module: ModuleType, *options: str) -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        module.main(list(options))
    return text.getvalue()


@pytest.mark.slow
def test_the_quick_benchmark_prints_each_method_with_scores_of_its_kind(
    benchmark: ModuleType,
) -> None:
    text = printed(benchmark, "--quick", "--sets", "breast cancer")
    assert "breast cancer: n = 456, d = 31, delta = 1e-06, 1 seeds" in text
    task = benchmark.breast_cancer(0)
    accuracy, auc, loss = benchmark.score(task, benchmark.public(task))
    for title, public, trivial in (
        ("accuracy", accuracy, 0.55),
        ("AUC", auc, 0.5),
        ("log-loss", -loss, 1.5),
    ):
        block = text.split(f"{title} at epsilon =")[1].split(" at epsilon =")[0]
        lines = dict(re.findall(r"^(\S.*?) {2,}(\d\.\d{4})$", block, re.MULTILINE))
        methods = {*benchmark.ours(task), "Opacus, tuned by looking"}
        assert {*lines} == {*methods, "not private"}
        assert float(lines["not private"]) == pytest.approx(public, abs=6e-5)
        default = float(
            lines["objective (default)"]
        )  # 40 runs: 0.88 to 0.97, 0.97 to 1.00, 0.09 to 0.22
        assert default < trivial if title == "log-loss" else default > trivial
    assert "diffprivlib is left out" in text


def test_scores_of_the_benchmark_are_those_of_scikit_learn_s_definitions(
    benchmark: ModuleType,
) -> None:
    task = benchmark.digits(1)
    weights = benchmark.public(task)
    found = judged(task.test_targets, task.test_rows @ weights)
    assert benchmark.score(task, weights) == pytest.approx(
        (found[0], found[1], -found[2]), abs=1e-9
    )
    real = dataclasses.replace(task, test_targets=task.test_rows @ weights, bound_y=1.0)
    assert benchmark.score(real, weights) == pytest.approx((1.0,))


@pytest.mark.weekly
def test_rows_of_the_benchmark_stay_within_their_public_bounds(benchmark: ModuleType) -> None:
    found = [benchmark.adult(), benchmark.breast_cancer(3), benchmark.digits(3)]
    for task, width in zip(found, (66, 31, 65), strict=True):
        assert task.rows.shape[1] == task.test_rows.shape[1] == width
        for rows in (task.rows, task.test_rows):
            assert np.linalg.norm(rows, axis=1).max() <= task.bound_x * (1 + 1e-12)
        assert set(task.targets) == {0.0, 1.0}
    worst = {
        "carat": "9",
        "depth": "99",
        "table": "1",
        "cut": "Ideal",
        "color": "J",
        "clarity": "IF",
    }
    row = benchmark.diamond(worst)
    assert len(row) == 22
    assert row[:4] == pytest.approx([1.0, 1.0, 1.0, -2 / 3])
    assert sum(row[4:]) == 4.0  # one of each group and the constant
    least = benchmark.diamond(
        worst | {"carat": "0", "cut": "Fair", "color": "D", "clarity": "I1"}
    )
    assert least[:2] == [-0.5, 0.25]
    assert sum(least[4:]) == 1.0  # the levels that are dropped


def test_a_peer_that_cannot_be_installed_is_left_out_with_a_reason(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(folder: Path, with_pip: bool) -> None:
        raise OSError("no network")

    monkeypatch.setattr(benchmark.venv, "create", no_network)
    python, reason = benchmark.peer_python(tmp_path / "environment")
    assert python is None
    assert reason == "no environment with diffprivlib==0.6.6: OSError"


@pytest.mark.slow
def test_the_large_fit_runs_and_learns(benchmark: ModuleType) -> None:
    text = printed(benchmark, "--large", "--quick")
    shown = re.search(
        r"^a logistic fit: (\S+) s, (\S+) MiB above the input, accuracy (\S+)$",
        text,
        re.MULTILINE,
    )
    assert (
        0.6 < float(shown[3]) <= 1.0
    )  # seen: 0.69; the half of the labels that are guessed right is 0.5


@pytest.mark.slow
def test_the_measured_excess_is_that_of_the_noise(benchmark: ModuleType) -> None:
    n, dim = 256, benchmark.SLOPE_DIM
    # (lam + 1/d) |z|^2 / 2 on average, lam = 1, |z|^2 of mean d sigma^2; 50 draws of 5 coordinates: spread of 9 %
    sigma = gaussian_sigma(8.0, 1e-5, 2.0 / n)
    expected = (1 + 1 / dim) / 2 * dim * sigma**2
    assert statistics.fmean(benchmark.excess("smooth, strongly convex", n)) == pytest.approx(
        expected, rel=0.5
    )
    benchmark.SLOPE_SEEDS = 4
    text = printed(benchmark, "--slopes", "--quick")
    for kind in ("strongly convex", "smooth, strongly convex", "convex", "smooth, convex"):
        least, most = map(
            float, re.search(rf"^{kind} +(\S+) +(\S+) +\S+ +\S+$", text, re.MULTILINE).groups()
        )
        assert 0 < least < 1
        assert 0 < most < 1


# -- the documents ----------------------------------------------------------------------------------------------------


def test_each_test_that_the_errata_name_exists() -> None:
    text = (ROOT / "docs" / "errata.md").read_text(encoding="utf-8").split("## Paper 4")[1]
    named = set(re.findall(r"`(test_\w+)`", text))
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    existing = {
        name
        for source in sources
        for name in re.findall(r"^def (test_\w+)\(", source, re.MULTILINE)
    }
    assert len(named) > 20
    assert named <= existing, named - existing
    assert re.findall(r"^\| (E\d+) \|", text, re.MULTILINE) == [f"E{k}" for k in range(1, 13)]


@pytest.mark.slow
def test_the_document_says_how_its_figures_were_measured_and_quotes_them_right(
    benchmark: ModuleType,
) -> None:
    text = (
        (ROOT / "docs" / "choosing.md")
        .read_text(encoding="utf-8")
        .split("## Figures of linear models")[1]
    )
    for fact in (
        "2-core Intel Xeon virtual machine (shared)",
        "2026-11-22",
        "delta = 1e-6",
        "add_remove",
    ):
        assert fact in " ".join(text.split())
    for options in ("", " --large", " --slopes"):
        assert f"`python benchmarks/linear_models.py{options}`" in text
    # what has no noise can be recomputed
    adult = benchmark.adult()
    _, auc, loss = benchmark.score(adult, benchmark.public(adult))
    assert f"not private {-loss:.3f}" in text
    assert re.search(rf"^\| objective \(default\) \|.*\| {auc:.3f} \|$", text, re.MULTILINE)
