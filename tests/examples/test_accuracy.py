"""The main job: private logistic regression on 32,561 people is about as good as the anchor says (slow)."""

from __future__ import annotations

import importlib.util
import statistics
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "example_accuracy", EXAMPLES / "logistic_regression.py"
    )
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        spec.loader.exec_module(module)
        sys.modules.pop("adult", None)
    return module


@pytest.mark.weekly
def test_five_fresh_runs_at_epsilon_1_reach_the_accuracy_of_the_issue(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # for its card
    # Medians of five are 0.8437 and 0.8912 with a spread of 0.0005: these floors fail on a defect, not by chance.
    runs = [example.main([]) for _ in range(5)]
    assert statistics.median(run["auc"] for run in runs) >= 0.885
    assert statistics.median(run["accuracy"] for run in runs) >= 0.838
    assert all(run["epsilon"] <= 1.0 < run["epsilon_replace_one"] for run in runs)
    assert len({run["auc"] for run in runs}) > 1  # noise and batches are drawn afresh
    baseline = {(run["baseline_accuracy"], run["baseline_auc"]) for run in runs}
    assert baseline.pop() == pytest.approx((0.8468, 0.8990), abs=3e-4)
    assert not baseline
