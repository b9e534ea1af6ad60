"""The example and the benchmark of fits to tables that no memory holds run, and say what is true."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.weekly
def test_the_example_scores_like_a_fit_that_is_not_private(monkeypatch, capsys):
    monkeypatch.setattr(
        "torch_dpsco.estimators.fits.noise_generator",
        lambda device, given: torch.Generator().manual_seed(0),
    )
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    figures = importlib.import_module("out_of_core").main(["--batch", "1000"])
    sys.modules.pop("adult", None)
    shown = capsys.readouterr().out
    # the same noise, and the same rows: the same model
    assert figures["parquet"] == pytest.approx(figures["sparse"], abs=1e-9)
    # 0.8985 +- 0.0005 over the noise
    assert 0.89 < figures["parquet"] < figures["baseline"] + 0.001
    assert f"{figures['parquet']:.4f}" in shown
    assert figures["epsilon"] < 2.01


@pytest.mark.weekly
def test_the_benchmark_prints_seconds_and_memory():
    command = [sys.executable, str(ROOT / "benchmarks" / "out_of_core_fit.py"), "--smoke"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    printed = subprocess.run(
        command, check=True, capture_output=True, text=True, env=environment
    ).stdout
    assert re.search(r"GiB  LogisticRegression.fit, \d+ readings, accuracy 0\.8", printed)
    assert "peak of the fit: within 1.5 GiB" in printed
