"""docs/algorithms.md: the papers' loops and the lines beside them run as they stand; each test that is named exists."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize

import torch_dpsco as dp

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
N, DIM, USERS = 24, 2, 6  # of the papers' loops

Vector = np.ndarray


def blocks(kind: str) -> list[tuple[str, str]]:
    """Returns (heading above it, code) of each block of a kind."""
    found = re.findall(r"^#+ ([^\n]+)$|^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    heading, out = "", []
    for title, name, code in found:
        heading = title or heading
        if name == kind:
            out.append((heading, code))
    return out


SHARED = [
    code for _, code in blocks("python") if not re.search(r"^optimizer\b", code, re.MULTILINE)
]
OURS = [(heading, code) for heading, code in blocks("python") if code not in SHARED]


def words() -> dict[str, Any]:
    """Returns what the page says that the papers' loops share, for the logistic loss, and small numbers."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, DIM))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    data = [(row, float(np.sign(row[0]))) for row in x]

    def value(w: Vector, z: tuple[Vector, float], attack: float = 0.0) -> float:
        return float(np.logaddexp(0.0, attack * np.linalg.norm(w) - z[1] * (w @ z[0])))

    def g(w: Vector, z: tuple[Vector, float]) -> Vector:
        return -z[1] * z[0] / (1 + np.exp(z[1] * (w @ z[0])))

    def shrink(v: Vector, length: float) -> Vector:
        return v * min(1.0, length / max(float(np.linalg.norm(v)), 1e-300))

    return {
        "np": np,
        "rng": rng,
        "data": data,
        "value": value,
        "worst": lambda w, z: value(w, z, 0.2),
        "g": g,
        "q": lambda w, user: np.mean([g(w, z) for z in data[user::USERS]], axis=0),
        "clip": shrink,
        "project": lambda w: shrink(w, 2.0),
        "prox": lambda v, eta: np.sign(v) * np.maximum(np.abs(v) - 0.01 * eta, 0.0),
        "normal": lambda std: std * rng.normal(size=DIM),
        "laplace": lambda scale: scale * rng.laplace(),
        "mean": lambda vectors: np.mean(vectors, axis=0),
        "counts": lambda rows, r: (np.linalg.norm(rows[:, None] - rows, axis=2) <= r).sum(
            axis=1
        ),
        "argmin": lambda f: optimize.minimize(f, np.zeros(DIM)).x,
        "algorithm_3": lambda w, part, phase: w - 0.1 * np.mean([g(w, z) for z in part], axis=0),
        "start": np.zeros(DIM),
        "w": np.zeros(DIM),
        "batch": data[:12],
        "batches": [data[:12], data[12:]],
        "parts": [data[:8], data[8:]],
        "phases": [
            SimpleNamespace(
                steps=3, clip=1.0, sigma=0.0, reg=0.5, lr=lambda t: 1 / (0.5 * (t + 2))
            )
        ]
        * 2,
        "n": N,
        "n_users": USERS,
        "T": 10,
        "passes": 2,
        "c": (1.0, 0.5),
        "lr": 0.5,
        "weights": (1.0, 2.0),
        "groups": 3,
        "grid": 1000,
        "bits": 4,
        "p": 0.5,
        "eta": 0.5,
        "C": 1.0,
        "tau": 2.0,
        "lam": 0.1,
        "reg": 0.1,
        **dict.fromkeys(("sigma", "sigma_out", "b1", "b2"), 0.0),
    }


@pytest.mark.parametrize(
    ("heading", "code"), blocks("py"), ids=[heading for heading, _ in blocks("py")]
)
def test_a_loop_of_a_paper_learns(heading: str, code: str) -> None:
    scope = words()
    if "lr[t]" in code:
        scope["lr"] = (0.5, 0.5)
    exec(compile(code, "docs/algorithms.md", "exec"), scope)
    answer = scope["answer"] if "answer" in scope else -scope["G"]  # of an oracle: a step
    before, after = (
        np.mean([scope["value"](w, z) for z in scope["data"]]) for w in (scope["start"], answer)
    )
    assert after < before


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(("heading", "code"), OURS, ids=[heading for heading, _ in OURS])
@pytest.mark.filterwarnings("ignore::torch_dpsco.errors.UtilityWarning")  # few records
def test_the_lines_beside_it_train_within_the_budget(heading: str, code: str) -> None:
    scope: dict[str, Any] = {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for shared in SHARED:
            exec(shared, scope)
        before = scope["linear"]
        scope["linear"] = lambda: _zeroed(before())
        exec(compile(code, "docs/algorithms.md", "exec"), scope)
    optimizer, weight = scope["optimizer"], scope["model"].weight
    assert 0.0 < optimizer.report().epsilon <= optimizer.accountant.budget.epsilon
    assert bool(torch.isfinite(weight).all())
    assert bool(weight.any()) or optimizer.halted  # users are tested with noise


def _zeroed(model: torch.nn.Linear) -> torch.nn.Linear:
    torch.nn.init.zeros_(model.weight)
    return model


def test_every_optimizer_of_the_page_is_made_and_no_section_lacks_its_lines() -> None:
    headings = [heading for heading, _ in blocks("py")]
    assert [heading for heading, _ in OURS] == headings
    assert len(SHARED) == 2
    for heading, code in blocks("py") + OURS:
        assert len([line for line in code.splitlines() if line.strip()]) <= 10, heading
    text = "".join(code for _, code in OURS)
    for cls in (
        dp.HolderOutputSGD,
        dp.HolderSGD,
        dp.AcceleratedSGD,
        dp.ClippedSGD,
        dp.ProximalSGD,
        dp.LocalizedSGD,
        dp.UserFilteredSGD,
        dp.LocalizedUserSGD,
        dp.OutputPerturbation,
        dp.ObjectivePerturbation,
        dp.CorrelatedSGD,
    ):
        assert f"dp.{cls.__name__}.plan(" in text


def test_each_test_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    there = "\n".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")
    )
    assert len(named) > 20
    assert [name for name in sorted(named) if f"def {name}(" not in there] == []
