"""The example of a private head: what it prints is what it returns, and private images move the head only."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

from torch_dpsco.estimators import SoftmaxRegression

PATH = Path(__file__).parents[2] / "examples" / "private_head.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_private_head", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PATH.parent))
        spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_example_prints_both_accuracies_and_what_it_spent(
    example: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "torch_dpsco.estimators.fits.noise_generator",
        lambda device, given: torch.Generator(device).manual_seed(0),
    )
    seen = []
    fit = SoftmaxRegression.fit
    monkeypatch.setattr(
        SoftmaxRegression, "fit", lambda model, X, y: seen.append(model) or fit(model, X, y)
    )
    figures = example.main(["--quick"])
    shown = capsys.readouterr().out
    for name in ("private", "not private"):
        assert f"{name:<12} accuracy {figures[name]:.4f}" in shown
    assert 0.9 < figures["epsilon"] <= example.EPSILON
    assert re.search(
        r"^spent: \(1, 1e-06\)-differential privacy, add_remove", shown, re.MULTILINE
    )
    [head] = seen  # one fit, one release
    assert head.mechanism_ == "preconditioned_gd"
    assert figures["private"] > 2 / example.CLASSES
    assert figures["private"] < figures["not private"] + 0.05


def test_public_numbers_of_the_head_come_from_public_images(example: ModuleType) -> None:
    """Center and length are made of `seen`, and `seen` of the public images; the network is trained before."""
    source = PATH.read_text(encoding="utf-8")
    assert len(source.splitlines()) < 100
    body = source[source.index("def main") :]
    assert body.index("train(*public") < body.index("private, test = draw(")
    assert (
        "seen, train_rows, test_rows = (body(images) for images, _ in (public, private, test))"
        in body
    )
    for line in (
        "center = seen.mean(0)",
        "length = float((seen - center).norm(dim=1).quantile(0.9))",
    ):
        assert line in body
    docstring = ast.get_docstring(ast.parse(source))
    assert docstring is not None
    assert "python examples/private_head.py --quick" in docstring


def test_classes_of_public_and_private_images_are_others(example: ModuleType) -> None:
    draws = torch.Generator().manual_seed(1)
    patterns = example.smooth_patterns(3, draws)
    images, labels = example.draw(patterns, 50, draws)
    assert images.shape == (50, 1, example.SIDE, example.SIDE)
    assert set(labels.tolist()) <= {0, 1, 2}
    torch.testing.assert_close(patterns.std((1, 2)), torch.ones(3))
