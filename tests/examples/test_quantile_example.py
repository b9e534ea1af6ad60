"""Quantile regression and output perturbation in the examples, docs/choosing.md, and benchmarks/holder.py."""

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

import pytest
import torch
from torch import nn

import torch_dpsco as dp
from torch_dpsco.accounting.calibrate import rounded_up
from torch_dpsco.accounting.events import Gaussian
from torch_dpsco.errors import AdjacencyError, NotCertifiedError, UtilityWarning

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
QUANTILES, METHODS = ("0.1", "0.5", "0.9"), ("gradient", "output", "output, smoothed")
DELTA = 1e-6
SLOW, WEEKLY = pytest.mark.slow, pytest.mark.weekly


def load(folder: str, name: str) -> ModuleType:
    """Imports a script by its path; it finds the data loaders beside itself, as it does when it is run."""
    spec = importlib.util.spec_from_file_location(f"script_{name}", ROOT / folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        patch.setitem(sys.modules, spec.name, module)  # its dataclasses look themselves up
        spec.loader.exec_module(module)
        for loader in ("adult", "flights"):
            sys.modules.pop(loader, None)
    return module


class Run(NamedTuple):
    """What a run returned and printed, the models that it trained, in order, and the data."""

    figures: dict[str, float]
    text: str
    models: list[nn.Module]
    data: Any


def run(module: ModuleType, *options: str) -> Run:
    """Runs the script with its training function spied on."""
    models: list[nn.Module] = []
    train, data = module.train, module.load_flights()

    def remembered(*args: Any) -> Any:
        result = train(*args)
        models.append(result[0])
        return result

    text = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(text):
        patch.setattr(module, "train", remembered)
        patch.setattr(module, "load_flights", lambda: data)
        figures = module.main(list(options))
    return Run(figures, text.getvalue(), models, data)


@pytest.fixture(scope="module")
def module() -> ModuleType:
    return load("examples", "quantile_regression")


@pytest.fixture(scope="module")
def quick(module: ModuleType) -> Run:
    with pytest.warns(UtilityWarning, match="noise buries the signal: the answer") as told:
        found = run(module, "--quick")
    assert len(told) == len(QUANTILES)  # the kink: these come out far worse than a constant
    return found


# -- quantile regression ----------------------------------------------------------------------------------------------


def test_the_example_says_how_to_run_it_and_stays_short() -> None:
    source = (ROOT / "examples" / "quantile_regression.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) < 220
    docstring = ast.get_docstring(ast.parse(source))
    for options in ("", "--quick", "--plot"):
        assert f"python examples/quantile_regression.py {options}" in docstring


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("quantile", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("width", [0.01, 0.1, 3.0])
def test_the_smoothed_loss_keeps_its_declared_constants(
    module: ModuleType, quantile: float, width: float
) -> None:
    loss = dp.losses.SmoothedPinball(quantile, width)
    bounds = {"bound_x": 2.83, "bound_y": 24.0}
    problem = loss.problem(**bounds, radius=2.0)
    dp.losses.check_holder(loss, problem, **bounds, trials=300)
    assert problem.smoothness >= 2.83**2 / width
    sharper = dp.losses.SmoothedPinball(quantile, width * 0.99)  # the constant is the least one
    with pytest.raises(NotCertifiedError, match="is refuted"):
        dp.losses.check_holder(sharper, problem, **bounds, trials=300)


def test_the_smoothed_loss_lies_just_below_the_pinball_loss(module: ModuleType) -> None:
    residual = torch.linspace(-3, 3, 1001, dtype=torch.float64)
    for quantile in module.QUANTILES:
        kinked = dp.losses.Pinball(quantile=quantile).value(torch.zeros_like(residual), residual)
        smooth = dp.losses.SmoothedPinball(quantile, 0.1).value(
            torch.zeros_like(residual), residual
        )
        gap = kinked - smooth
        assert float(gap.min()) > -1e-15
        assert float(gap.max()) == pytest.approx(
            0.05 * max(quantile, 1 - quantile) ** 2, rel=1e-9
        )
        assert 0.0 <= float(smooth.min()) < 1e-15


@pytest.mark.weekly
def test_every_printed_score_is_that_of_its_model(module: ModuleType, quick: Run) -> None:
    figures, text, models, data = quick
    assert len(models) == 9
    cells = [(quantile, method) for quantile in QUANTILES for method in METHODS]
    for (quantile, method), model in zip(cells, models, strict=True):
        tau = float(quantile)
        with torch.no_grad():
            features = data.test_features[:, :41].to(model.weight.dtype)
            residual = data.test_hours.double() - model(features).squeeze(1).double()
        found = (
            float((tau * residual - residual.clamp(max=0)).mean()),
            float((residual <= 0).double().mean()),
        )
        shown = re.search(rf"^{quantile}, {method} +(\S+) +(\S+)$", text, re.MULTILINE).groups()
        assert float(shown[0]) == pytest.approx(found[0], abs=6e-5)
        assert float(shown[1]) == pytest.approx(found[1], abs=6e-4)
        assert figures[f"{method}_{quantile}_pinball"] == pytest.approx(found[0], rel=1e-6)
        assert figures[f"{method}_{quantile}_coverage"] == pytest.approx(found[1], abs=1e-4)


def test_the_fits_that_are_not_private_cover_what_they_should(quick: Run) -> None:
    figures = quick.figures
    published = {"0.1": 0.0651, "0.5": 0.2064, "0.9": 0.1570}  # of the fit on all rows
    for quantile in QUANTILES:
        for name in ("constant", "linear"):
            assert figures[f"{name}, not private_{quantile}_coverage"] == pytest.approx(
                float(quantile), abs=0.02
            )
        linear = figures[f"linear, not private_{quantile}_pinball"]
        assert published[quantile] - 1e-3 < linear < published[quantile] * 1.02
        assert linear < figures[f"constant, not private_{quantile}_pinball"]


def test_private_fits_come_near_where_the_loss_is_smooth_or_the_noise_is_on_gradients(
    quick: Run,
) -> None:
    # 20,000 flights; seen: at most 1.07 times (gradient) and 1.15 times (output, smoothed) the linear fit
    for quantile in QUANTILES:
        linear = quick.figures[f"linear, not private_{quantile}_pinball"]
        assert linear - 1e-3 < quick.figures[f"gradient_{quantile}_pinball"] < 1.25 * linear
        assert (
            linear - 1e-3 < quick.figures[f"output, smoothed_{quantile}_pinball"] < 1.4 * linear
        )
        assert quick.figures[f"gradient_{quantile}_coverage"] == pytest.approx(
            float(quantile), abs=0.1
        )


def charged(text: str) -> dp.Accountant:
    """Returns a ledger of the printed events."""
    ledger = dp.Accountant(adjacency="replace_one")
    found = re.findall(r"^  event: (\d+) x (\w+)\((.*)\)$", text, re.MULTILINE)
    assert {kind for _, kind, _ in found} == {"PoissonGaussian", "Gaussian"}
    for count, kind, fields in found:
        if kind == "PoissonGaussian":
            noise, rate = (
                float(x) for x in re.match(r"noise_multiplier=(\S+), q=(\S+)", fields).groups()
            )
            base = dp.oracles.Clipped(clip=1.0, noise_multiplier=noise, batch_size=512).event()
            ledger.record(dp.Poisson(512, round(512 / rate)).event(base, int(count)))
        else:
            sigma, shift = (
                float(x)
                for x in re.match(r"sigma=(\S+), .*'replace_one', ([^)]+)\)", fields).groups()
            )
            ledger.record(Gaussian(sigma, {"replace_one": shift}), int(count))
    return ledger


def test_all_models_together_cost_what_one_ledger_of_their_events_says(quick: Run) -> None:
    figures, text, *_ = quick
    total = figures["epsilon_total"]
    assert f"publishing all of them: epsilon {rounded_up(total)}\n" in text
    assert (
        f"spent on all models together: ({rounded_up(total)}, 1e-06)-differential privacy, replace_one"
        in text
    )
    assert charged(text).get_epsilon(DELTA) == pytest.approx(total, rel=1e-6)
    single = [value for key, value in figures.items() if key.endswith("_epsilon")]
    assert len(single) == 9
    assert all(0.99 < value <= 1.0 for value in single)
    assert (
        max(single) < total < sum(single) / 2
    )  # nine models of one ledger cost far less than nine times one


def test_output_perturbation_of_a_kink_needs_far_more_noise(quick: Run) -> None:
    noise = {
        (method, quantile): float(std)
        for method, quantile, std in re.findall(
            r"^plan, (output|output, smoothed), (\S+) quantile: .* noise of std (\S+) on the answer$",
            quick.text,
            re.MULTILINE,
        )
    }
    assert len(noise) == 6
    for quantile in QUANTILES:
        assert noise["output", quantile] > 20 * noise["output, smoothed", quantile]


def test_output_perturbation_has_no_guarantee_for_adding_a_record(module: ModuleType) -> None:
    problem = module.make_loss("output", 0.5).problem(bound_x=2.83, bound_y=24.0, radius=2.0)
    budget = dp.Budget(1.0, DELTA, adjacency="add_remove")
    with pytest.raises(AdjacencyError, match="add_remove"):
        dp.HolderOutputSGD.plan(problem=problem, n=1000, budget=budget, dim=42)


def test_the_plot_shows_three_private_quantiles(
    module: ModuleType, quick: Run, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "quantiles.png"
    module.draw(
        str(path), dict(zip(module.QUANTILES, quick.models[::3], strict=True)), quick.data
    )
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 5_000


def test_the_hour_of_the_plot_is_the_scheduled_hour(module: ModuleType, quick: Run) -> None:
    clock = quick.data.test_features[:, module.HOUR] * 24
    squared = quick.data.test_features[:, module.HOUR + 1] * 24**2
    torch.testing.assert_close(clock**2, squared, rtol=1e-4, atol=1e-3)
    assert 4.5 < float(clock.min()) < float(clock.max()) < 24.0


@pytest.mark.weekly
@pytest.mark.parametrize(
    "quantile", [pytest.param(q, marks=SLOW if q == "0.5" else WEEKLY) for q in QUANTILES]
)
def test_private_quantiles_of_all_flights_beat_the_constant_ones(
    quantile: str, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "QUANTILES", (float(quantile),))
    figures = run(module).figures
    constant = figures[f"constant, not private_{quantile}_pinball"]
    linear = figures[f"linear, not private_{quantile}_pinball"]
    for method in ("gradient", "output, smoothed"):
        assert linear - 1e-3 < figures[f"{method}_{quantile}_pinball"] < constant
        assert figures[f"{method}_{quantile}_coverage"] == pytest.approx(
            float(quantile), abs=0.06
        )
    assert figures[f"output_{quantile}_pinball"] > linear  # the kink costs


# -- support vector machines by output perturbation -------------------------------------------------------------------


@pytest.mark.weekly
def test_output_perturbed_machines_are_charged_to_one_ledger_with_the_others() -> None:
    svm = load("examples", "svm")
    data = svm.load_adult()
    ledger = dp.Accountant(adjacency="replace_one")
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        figures = svm.compare(data, ledger, 1.0, True)
    names = list(svm.OUTPUT)
    assert names == ["1", "1.5", "2", "1, smoothed"]
    for name in names:
        for method in ("gradient", "output"):
            # at the kink (q = 1) the noise of output perturbation drowns the answer: it may be anything
            least = 0.0 if (method, name) == ("output", "1") else 0.5
            assert least < figures[f"{method}_{name}_accuracy"] < 0.87
            assert 0.0 < figures[f"{method}_{name}_auc"] < 0.905
        shown = re.search(
            rf"^q = {name} +(\S+) +(\S+) +(\S+) +(\S+)$", text.getvalue(), re.MULTILINE
        ).groups()
        kept = [
            figures[f"{m}_{name}_{kind}"]
            for m in ("gradient", "output")
            for kind in ("accuracy", "auc")
        ]
        assert tuple(map(float, shown)) == pytest.approx(kept, abs=5.1e-5)
    assert figures["output_1, smoothed_auc"] > 0.8  # seen: 0.86 to 0.88
    assert figures["epsilon_replace_one"] == ledger.get_epsilon(1e-5)
    assert 1.0 < figures["epsilon_replace_one"] < 8.0
    total = rounded_up(figures["epsilon_replace_one"])
    assert (
        f"publishing all models of both tables: epsilon {total} (replace_one)\n"
        in text.getvalue()
    )


# -- the benchmark, and the document that quotes it -------------------------------------------------------------------

DOC = ROOT / "docs" / "choosing.md"


@pytest.fixture(scope="module")
def noise_tables() -> str:
    text = io.StringIO()
    with (
        contextlib.redirect_stdout(text),
        pytest.warns(UtilityWarning, match="noise buries the signal"),
    ):
        load("benchmarks", "holder").print_noise()
    return text.getvalue()


@pytest.mark.weekly
def test_the_benchmark_reprints_the_published_comparison(noise_tables: str) -> None:
    expected = {  # (q, n): paper, shuffle, of the specification's section 5, E4
        ("1.5", "1000"): (55.8, 0.293),
        ("1.5", "10000"): (19.5, 0.0927),
        ("1", "1000"): (6.67, 0.274),
        ("2", "1000"): (74.4, 0.534),
    }
    rows = re.findall(r"^ +(\S+) +(\d+) +\S+ +(\S+) +(\S+)$", noise_tables, re.MULTILINE)
    found = {(q, n): tuple(map(float, sigmas)) for q, n, *sigmas in rows}
    assert found.keys() == expected.keys()
    for case, sigmas in expected.items():
        assert found[case] == pytest.approx(sigmas, rel=0.01)


def test_the_benchmark_reprints_the_published_noise_on_gradients(noise_tables: str) -> None:
    expected = {
        ("1000", "2"): (1.74, 0.753),
        ("10000", "1"): (2.56, 0.936),
        ("10000", "4"): (1.01, 0.549),
    }
    expected["100000", "1"] = (2.31, 1.018)
    table = noise_tables.split("gradient perturbation")[1].split("dimension")[0]
    rows = re.findall(r"^ +(\d+) +(\S+) +(\S+) +(\S+)$", table, re.MULTILINE)
    found = {(n, epsilon): tuple(map(float, ratios)) for n, epsilon, *ratios in rows}
    assert found.keys() == expected.keys()
    for case, (paper, renyi) in expected.items():
        assert found[case][0] == pytest.approx(paper, rel=0.01)
        assert (
            0.5 * renyi < found[case][1] <= renyi * 1.001
        )  # loss distributions are tighter than Renyi orders


@pytest.mark.weekly
def test_the_task_of_the_benchmark_has_bounded_records_and_a_minimizer_in_the_ball() -> None:
    holder = load("benchmarks", "holder")
    task = holder.Task(seed=3)
    x, y = task.draw(2_000).tensors
    assert float(x.norm(dim=1).max()) <= 1 + 1e-12
    assert set(y.unique().tolist()) == {-1.0, 1.0}
    w = holder.fit_public(x, y)
    assert float(w.norm()) <= holder.RADIUS * (1 + 1e-12)
    slope = x.T @ holder.LOSS.derivative(x @ w, y.squeeze(1)) / len(x)
    outward = (
        float(slope @ w) / float(w.norm()) if float(w.norm()) > holder.RADIUS * 0.999 else 0.0
    )
    assert float((slope - min(outward, 0.0) * w / w.norm()).norm()) < 1e-3
    assert 0 <= task.excess(w) < task.excess(torch.zeros(20, dtype=torch.float64))
    assert task.excess(torch.zeros(20, dtype=torch.float64)) == pytest.approx(
        1 - task.least, abs=1e-12
    )


def test_the_document_names_only_what_exists_and_the_command_that_measured_it() -> None:
    text = DOC.read_text(encoding="utf-8")
    for name in re.findall(r"\bdp((?:\.[A-Za-z_]+)+)", text):
        thing: Any = dp
        for part in name.split(".")[1:]:
            assert hasattr(thing, part), f"dp{name} does not exist"
            thing = getattr(thing, part)
    for options in ("", " --risk", " --speed"):
        assert f"`python benchmarks/holder.py{options}`" in text
    for link in re.findall(r"\]\(([\w./]+)\)", text):
        assert (ROOT / "docs" / link).exists(), link
    for fact in (
        "2-core Intel Xeon virtual machine",
        "torch 2.14.1",
        "2026-11-22",
        "replace_one",
        "finalize",
    ):
        assert fact in text


def test_the_noise_figures_of_the_document_are_those_of_the_benchmark(noise_tables: str) -> None:
    text = DOC.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\S+) \| ([\d,]+) \| (\S+) \| (\S+) \|$", text, re.MULTILINE)
    shown = {(q, n.replace(",", "")): tuple(map(float, sigmas)) for q, n, *sigmas in rows}
    printed = re.findall(r"^ +(\S+) +(\d+) +\S+ +(\S+) +(\S+)$", noise_tables, re.MULTILINE)
    assert len(shown) == len(printed) == 4
    for q, n, *sigmas in printed:
        assert shown[q, n] == pytest.approx(tuple(map(float, sigmas)), rel=0.01)


@pytest.mark.slow
def test_the_code_of_the_document_runs() -> None:
    scope: dict[str, Any] = {}  # a name that the page does not define fails
    blocks = re.findall(
        r"^```python\n(.*?)^```$", DOC.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    assert blocks
    for block in blocks:
        exec(compile(block, "choosing.md", "exec"), scope)
    assert scope["optimizer"].finalized
    assert math.isclose(scope["optimizer"].report().epsilon, 1.0, rel_tol=1e-3)
