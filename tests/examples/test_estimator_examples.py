"""The example and the document about estimators: both run, and say what is true."""

from __future__ import annotations

import ast
import csv
import importlib.util
import math
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from torch_dpsco import estimators
from torch_dpsco.estimators.base import choose_mechanism

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def same_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise of a seed: scores that pass once pass again."""
    monkeypatch.setattr(
        "torch_dpsco.estimators.fits.noise_generator",
        lambda device, given: torch.Generator(device).manual_seed(0),
    )


@pytest.fixture(scope="module")
def example() -> ModuleType:
    path = ROOT / "examples" / "estimators.py"
    spec = importlib.util.spec_from_file_location("example_estimators", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(path.parent))
        spec.loader.exec_module(module)
        sys.modules.pop("adult", None)
    return module


@pytest.mark.weekly
def test_the_example_compares_all_methods_with_a_model_that_is_not_private(
    example, capsys, monkeypatch
):
    monkeypatch.setattr(example, "load_diamonds", lambda: None)
    results = example.main(["--quick"])
    table, baseline = results["Adult"]
    shown = capsys.readouterr().out
    assert set(table) == set(example.CLASSIFIERS)
    assert 0.88 < baseline < 0.9
    assert f"not private {baseline:.4f}" in shown
    for name, (value,) in table.items():
        assert f"{name:34}{value:9.4f}" in shown
        assert value < baseline + 0.005
    # 0.879 +- 0.004 over fits of 4000 rows at epsilon 1: below 0.85 in fewer than 1e-9 of them
    assert table["logistic (objective perturbation)"][0] > 0.85
    assert "plotnine is not installed" in shown


def made_up_diamonds(count: int) -> list[dict[str, str]]:
    rng = np.random.default_rng(0)
    records = []
    for _ in range(count):
        carat = rng.uniform(0.2, 2.5)
        clarity = rng.integers(8)
        records.append(
            {
                "carat": f"{carat:.2f}",
                "depth": f"{rng.uniform(56, 68):.1f}",
                "table": f"{rng.uniform(52, 66):.1f}",
                "cut": str(rng.choice(["Fair", "Ideal", "Good"])),
                "color": str(rng.choice(list("DEFGHIJ"))),
                "clarity": ("I1", "SI2", "SI1", "VS2", "VS1", "VVS2", "VVS1", "IF")[clarity],
                "price": str(round(5000 * carat + 300 * clarity)),
            }
        )
    return records


@pytest.mark.slow
def test_diamonds_are_read_and_fitted_by_every_regressor(example, tmp_path, monkeypatch, capsys):
    (tmp_path / "data").mkdir()
    records = made_up_diamonds(3000)
    with (tmp_path / "data" / "diamonds.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(records[0]))
        writer.writeheader()
        writer.writerows(records)
    found = importlib.util.spec_from_file_location("plotnine", tmp_path / "__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    X, y = example.load_diamonds()
    assert X.shape == (3000, 21)
    assert y[0] == pytest.approx(float(records[0]["price"]) / 1000 - 5)
    table, baseline = example.on_diamonds(X, y, (8.0,), 2400)
    assert set(table) == set(example.REGRESSORS)
    assert baseline > 0.95
    assert all(math.isnan(value) or value < baseline + 0.01 for (value,) in table.values())
    assert table["Huber (objective perturbation)"][0] > 0.7
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert example.load_diamonds() is None


def test_no_diamond_is_longer_than_the_stated_maximum_or_changes_another_one(example):
    for record in made_up_diamonds(50):
        assert np.linalg.norm(example.encode(record)) <= math.sqrt(7)
    wild = {
        **made_up_diamonds(1)[0],
        "carat": "1e9",
        "depth": "-5",
        "table": "0",
        "cut": "?",
        "color": "?",
    }
    assert np.linalg.norm(example.encode(wild)) <= math.sqrt(7)


@pytest.mark.slow
def test_the_plot_has_a_panel_for_each_data_set(example, tmp_path):
    pytest.importorskip("matplotlib")
    table = {"a": [0.7, 0.8], "b": [math.nan, 0.6]}
    example.draw(
        {"One": (table, 0.9), "Two": (table, 0.95)}, (1.0, 3.0), str(tmp_path / "plot.png")
    )
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_example_says_how_to_run_it(example):
    source = (ROOT / "examples" / "estimators.py").read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(source))
    assert len(source.splitlines()) < 200
    for command in (
        "python examples/estimators.py ",
        "python examples/estimators.py --quick",
        "--plot curve.png",
    ):
        assert command in docstring


# -- the document ----------------------------------------------------------------------------------


@pytest.mark.weekly
def test_the_code_of_the_document_runs_as_it_stands(capsys):
    text = (ROOT / "docs" / "estimators.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 8
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/estimators.md", "exec"), names)
    shown = capsys.readouterr().out
    assert "(1, 1e-06)-differential privacy for one example (zero_out: emptied)." in shown
    assert re.search(r"past the budget of \S+ \(epsilon 1.5 at delta 1e-05", shown)
    assert "pure (delta = 0)" in shown


def test_the_document_names_every_class_and_its_mechanism():
    text = (ROOT / "docs" / "estimators.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| [^|]* \| ([^|]*) \| ([^|]*) \|", text, flags=re.MULTILINE)
    assert {name for name, _, _ in rows} == set(estimators.__all__)
    kinds = {
        "objective perturbation": "objective",
        "output perturbation": "output",
        "boosted AdaSSP": "boosted_adassp",
    }
    kinds |= {
        "noisy gradient descent": "noisy_gd",
        "preconditioned gradient descent": "preconditioned_gd",
    }
    both = {"the same, else output perturbation", "objective, else output perturbation"}
    for name, said, pure in rows:
        model = getattr(estimators, name)(n=100_000, bound_x=1.0)
        further = {"bound_y": 1.0} if hasattr(model, "bound_y") else {"classes": (0, 1)}
        model.set_params(**further, **({"n_min": 50_000} if name == "TiltedClassifier" else {}))
        if name == "Lasso":
            assert said == "choices of features, then boosted AdaSSP"
            assert pure == "refused"
            assert model.plan(2).mechanism == "selection"
            assert model.plan(2).fit.mechanism == "boosted_adassp"
            with pytest.raises(ValueError, match="delta must be > 0"):
                model.set_params(delta=0.0).plan(2)
            continue
        assert choose_mechanism(model._task(1)) == kinds[said]
        pure_kind = choose_mechanism(model.set_params(delta=0.0)._task(1))
        assert pure_kind == ("objective" if pure in both else kinds[pure])
