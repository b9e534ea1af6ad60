"""Canaries, their scores, and the check of a training script: by an Opacus loop, and by the fixture of pytest."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torch_dpsco.accounting.analysis.gaussian import gaussian_epsilon
from torch_dpsco.audits import OneRunAudit, canaries, check_training, loss_scores
from torch_dpsco.errors import PrivacyError

pytest_plugins = ["pytester"]
DIM, DELTA, STEPS, NOISE = 300, 1e-12, 4, 20.0
CLAIM = gaussian_epsilon(STEPS**0.5 / NOISE, DELTA)
LIKE = torch.zeros(DIM), torch.zeros(1)
MADE = canaries(DIM, like=LIKE, bound_x=1.0, labels=(0, 1))
BASE = TensorDataset(torch.zeros(8, DIM), torch.ones(8, 1))
LOSS = nn.BCEWithLogitsLoss()


@pytest.fixture(autouse=True)
def no_seed_by_hand() -> None:
    """Other tests leave torch's generator seeded by hand, which the doctor finds."""
    torch.seed()


@pytest.mark.parametrize("shape", [(5,), (2, 3)])
@pytest.mark.parametrize("count", [1, 4, 13])
def test_canaries_are_on_the_bound_and_orthogonal_in_blocks(
    shape: tuple[int, ...], count: int
) -> None:
    made = canaries(
        count, like=(torch.zeros(shape), torch.tensor(0)), bound_x=3.0, labels=range(4)
    )
    inputs = torch.stack([x.flatten() for x, _ in made])
    assert len(made) == count
    assert all(x.shape == shape and y.dtype == torch.int64 and 0 <= y < 4 for x, y in made)
    assert bool((inputs.norm(dim=1) <= 3.0).all())
    assert bool((inputs.norm(dim=1) > 2.999).all())
    block = inputs[: inputs.shape[1]]
    torch.testing.assert_close(block @ block.T, 9.0 * torch.eye(len(block)), atol=1e-4, rtol=0.0)


def test_values_of_the_record_are_not_looked_at() -> None:
    private = torch.full((DIM,), 7.0), torch.full((1,), 9.0)
    for mine, other in zip(
        MADE[:20], canaries(20, like=private, bound_x=1.0, labels=(0, 1)), strict=True
    ):
        assert mine[1].shape == other[1].shape == (1,)
    first, second = (
        canaries(5, like=like, bound_x=1.0, labels=(0, 1)) for like in (LIKE, private)
    )
    assert all(
        torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
        for a, b in zip(first, second, strict=True)
    )


def test_scores_are_losses_and_leave_the_model_alone() -> None:
    model = nn.Sequential(nn.Linear(DIM, 4), nn.Dropout(0.5), nn.Linear(4, 1)).train()
    model[2].eval()
    scores = loss_scores(model, LOSS, MADE[:6])
    assert [m.training for m in model] == [True, True, False]
    model.eval()
    expected = [-LOSS(model(x[None]), y[None]).item() for x, y in MADE[:6]]
    np.testing.assert_allclose(scores, expected)
    assert (loss_scores(model, LOSS, MADE[:6], before=model) == 0.0).all()
    assert all(p.grad is None for p in model.parameters())


def test_wrong_arguments_are_named() -> None:
    for wrong, field in (
        ({"count": 0}, "count"),
        ({"bound_x": 0.0}, "bound_x"),
        ({"labels": ()}, "labels"),
        ({"like": (torch.zeros(3),)}, "like"),
        ({"like": (torch.zeros(3, dtype=torch.int64), 1)}, "like"),
        ({"seed": -1}, "seed"),
    ):
        with pytest.raises(ValueError, match=field):
            canaries(**{"count": 2, "like": LIKE, "bound_x": 1.0, "labels": (0, 1), **wrong})
    with pytest.raises(ValueError, match="one number"):
        loss_scores(nn.Linear(DIM, 2), lambda outputs, targets: outputs, MADE[:2])


def opacus_parts(dataset: Any) -> tuple[Any, ...]:
    engine = PrivacyEngine(accountant="gdp")
    model = nn.Linear(DIM, 1, bias=False)
    nn.init.zeros_(model.weight)
    return (
        *engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            data_loader=DataLoader(dataset, batch_size=len(dataset)),
            noise_multiplier=NOISE,
            max_grad_norm=0.1,
        ),
        engine,
    )


def train(
    model: Any, optimizer: Any, loader: Any, engine: PrivacyEngine, noisy: bool = True
) -> float:
    for _ in range(STEPS):
        for x, y in loader:
            optimizer.zero_grad()
            LOSS(model(x), y).backward()
            if not noisy:
                optimizer.noise_multiplier = 0.0
            optimizer.step()
    return CLAIM


@pytest.mark.parametrize("noisy", [True, False])
def test_a_loop_of_opacus_is_audited_in_five_lines(noisy: bool) -> None:
    audit = OneRunAudit(MADE)
    model, optimizer, loader, engine = opacus_parts(audit.dataset(BASE))
    train(model, optimizer, loader, engine, noisy)
    found = audit.result(loss_scores(model, LOSS, MADE), delta=DELTA, confidence=1 - 1e-6)
    assert found.contradicts(CLAIM) is not noisy
    assert found.guesses == 150


def test_a_script_is_examined_and_audited() -> None:
    def lies(*parts: Any) -> float:
        return train(*parts, noisy=False)

    found = check_training(opacus_parts, train, BASE, loss=LOSS, canaries=MADE, delta=DELTA)
    assert not found.contradicts()
    assert check_training(
        opacus_parts, lies, BASE, loss=LOSS, canaries=MADE, delta=DELTA
    ).contradicts()

    def halves(dataset: Any) -> Any:  # the loader's model is another one
        return nn.Linear(DIM, 1), *opacus_parts(dataset)[1:]

    with pytest.raises((PrivacyError, ValueError), match="mistake"):
        check_training(halves, train, BASE, loss=LOSS, canaries=MADE, delta=DELTA)
    with pytest.raises(ValueError, match="setup must return"):
        check_training(
            lambda dataset: (1, 2), train, BASE, loss=LOSS, canaries=MADE, delta=DELTA
        )
    with pytest.raises(ValueError, match="train must return"):
        check_training(
            opacus_parts, lambda *parts: None, BASE, loss=LOSS, canaries=MADE, delta=DELTA
        )


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(
    "change", [{"delta": 1e-6}, {"guess_in": 5, "guess_out": 5}, {"canaries": MADE[:20]}]
)
def test_a_claim_that_no_guesses_refute_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"canaries must be more.* 0\.6[0-9]* is claimed"):
        check_training(
            opacus_parts,
            train,
            BASE,
            **{"loss": LOSS, "canaries": MADE, "delta": DELTA} | change,
        )


SCRIPT = """
import torch
import torch_dpsco as dp
from torch import nn
from torch.utils.data import TensorDataset
from torch_dpsco.audits import canaries

LOSS = dp.losses.Logistic()
MADE = canaries(200, like=(torch.zeros(200), torch.ones(1)), bound_x=1.0, labels=(-1, 1))
BASE = TensorDataset(torch.zeros(8, 200), torch.ones(8, 1))

def setup(dataset):
    model = dp.attach(nn.Linear(200, 1, bias=False))
    problem = LOSS.problem(bound_x=1.0)
    sound = {"noise_multiplier": 20.0, "sampling": dp.Full(108), "adjacency": "add_remove"}
    plan = dp.HolderSGD.plan(problem=problem, lr=0.1, steps=2, **sound)
    optimizer = dp.HolderSGD(model.parameters(), plan)
    return model, optimizer, optimizer.loader(dataset)

def train(model, optimizer, loader):
    for x, y in loader:
        optimizer.zero_grad()
        LOSS(model(x), y).backward()
        optimizer.step()
    return optimizer.report(1e-9).epsilon

def test_sound(dp_check):
    dp_check(setup, train, BASE, loss=LOSS, canaries=MADE, delta=1e-9)

def test_false_claim(dp_check):
    def leaks(model, optimizer, loader):
        model.weight.data = sum(y * x for x, y in loader.dataset)[None]
        return 0.5
    dp_check(setup, leaks, BASE, loss=LOSS, canaries=MADE, delta=1e-9)
"""


@pytest.mark.slow
def test_the_fixture_passes_a_sound_script_and_fails_a_false_claim(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(SCRIPT)
    result = pytester.runpytest_inprocess(
        "-p", "torch_dpsco_pytest", "-p", "no:cacheprovider", "-p", "no:xdist"
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*The claim of epsilon 0.5 is REFUTED.*"])


@pytest.mark.slow
def test_the_tutorial_does_what_it_says(pytester: pytest.Pytester) -> None:
    page = (Path(__file__).parents[2] / "docs" / "tutorials" / "audit.md").read_text(
        encoding="utf-8"
    )
    cells = re.findall(
        r"^```\{code-cell\} python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL
    )
    (test,) = re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    (own,) = (i for i, cell in enumerate(cells) if "def setup(dataset)" in cell)
    one_run = "from torch_dpsco.audits import OneRunAudit\n"
    pytester.makepyfile(
        "\n".join([cells[0], one_run, *cells[own:], "assert found.contradicts(claimed)", test])
    )
    result = pytester.runpytest_inprocess(
        "-p", "torch_dpsco_pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-s"
    )
    result.assert_outcomes(passed=1)
    said = [line.split("The claim of")[1] for line in result.outlines if "The claim of" in line]
    assert len(said) == 2
    assert said[0].endswith(" is not refuted.")
    assert said[1].endswith(" is REFUTED.")
    result.stdout.fnmatch_lines(["mu = 0.25 refuted: True"])


def test_the_plugin_imports_nothing_but_pytest() -> None:
    code = "import sys, torch_dpsco_pytest; print(sorted({'torch', 'numpy', 'scipy', 'torch_dpsco'} & {*sys.modules}))"
    root = Path(__file__).parents[2]
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    ).stdout
    assert said.strip() == "[]"


def test_the_plugin_is_installed_under_its_own_name() -> None:
    # pytest refuses a plugin that comes under two names, by `-p` and as installed
    config = configparser.ConfigParser()
    config.read(Path(__file__).parents[2] / "setup.cfg", encoding="utf-8")
    assert config["options"]["py_modules"] == "torch_dpsco_pytest"
    assert (
        config["options.entry_points"]["pytest11"].strip()
        == "torch_dpsco_pytest = torch_dpsco_pytest"
    )
