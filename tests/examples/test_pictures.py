"""examples/pictures.py draws the figures that it is given, and draws nothing where nobody looks."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FIGURES = {"hinge_1_auc": 0.85, "hinge_1_baseline_auc": 0.9, "hinge_1_epsilon": 1.0}


@pytest.fixture
def pictures() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "pictures.py"
    spec = importlib.util.spec_from_file_location("pictures", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_bars_are_the_figures_of_this_ending(pictures: ModuleType) -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    for _ in range(2):  # the second picture takes the place of the first
        pictures.bars("AUC", FIGURES, "_auc")
    axes = plt.figure("bars").axes
    assert len(axes) == 1
    assert [bar.get_width() for bar in axes[0].patches] == [0.85, 0.9]
    names = [label.get_text() for label in axes[0].get_yticklabels()]
    assert names == ["hinge 1", "hinge 1 not private"]
    assert axes[0].patches[0].get_facecolor() != axes[0].patches[1].get_facecolor()
    plt.close("bars")


def test_a_script_draws_nothing(pictures: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    asked: list[str] = []
    monkeypatch.setattr("builtins.__import__", lambda name, *_: asked.append(name))
    pictures.bars("AUC", FIGURES, "_auc")
    monkeypatch.undo()
    assert not asked  # it loads nothing to draw with
