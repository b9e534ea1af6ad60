"""Private heads: accuracy of mechanisms for many classes on frozen features, beside HolderSGD and no privacy.

    python benchmarks/heads.py            # 16 tasks, 4 epsilons, medians of 5 fits: an hour on one core
    python benchmarks/heads.py --smoke    # a small task and digits, one epsilon, one fit

Synthetic embeddings of norm 1: class means in a subspace, spread within it, isotropic noise around it; in some tasks
all are shifted, or passed through a ReLU, or classes are rarer from one to the next. delta = 1e-6, add_remove. The
constants of preconditioned gradient descent were chosen while looking at the development tasks; the others were drawn
afterwards and changed nothing. `digits` are scikit-learn's, pixels over 16. Nothing is tuned per task; "not private" is
scikit-learn's logistic regression with C = 10. The default is preconditioned gradient descent.
"""

from __future__ import annotations

import argparse
import math
import statistics
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from torch_dpsco.estimators import SoftmaxRegression

EPSILONS, DELTA, SEEDS, TEST_ROWS = (0.1, 0.5, 1.0, 3.0), 1e-6, 5, 10_000
MODELS: dict[str, dict[str, str | None]] = {
    "default": {},
    "prepare=None": {"prepare": None},
    "objective": {"mechanism": "objective"},
    "adassp": {"mechanism": "adassp"},
}
COLUMNS = (*MODELS, "HolderSGD", "not private")
WIDEST = 4_000  # parameters, for objective perturbation: a Hessian has the square of that
Array = NDArray[np.float64]


class Task(NamedTuple):
    """n rows in d dimensions of K classes, and how they are drawn."""

    n: int
    d: int
    classes: int
    rank: int = 20
    spread: float = 1.0
    noise: float = 0.3
    decay: float = 0.5
    rarer: float = 0.0
    shift: float = 0.0
    relu: bool = False


DEVELOPMENT = (
    Task(20_000, 128, 20),
    Task(5_000, 64, 10, rank=16),
    Task(2_000, 32, 5, rank=8, noise=0.4),
    Task(20_000, 256, 10, rank=30, spread=0.6, noise=0.25, relu=True),
    Task(20_000, 128, 20, spread=1.5, shift=1.0),
    Task(20_000, 128, 20, rarer=0.3),
    Task(20_000, 128, 20, rank=60, noise=0.1, decay=1.2),
    Task(10_000, 64, 10, rank=64, noise=0.1, decay=0.0, spread=0.5),
    Task(3_000, 256, 2, rank=10, spread=0.8, relu=True),
)
SMOKE = (Task(500, 8, 3, rank=4),)
HELD_OUT = (
    Task(1_500, 100, 10, rank=30, spread=0.7, decay=0.7),
    Task(4_000, 20, 15, rank=15, noise=0.2, shift=0.7),
    Task(6_000, 384, 4, rank=60, spread=0.7, noise=0.2, rarer=0.1),
    Task(8_000, 64, 30, rank=30, noise=0.2, decay=1.2),
    Task(12_000, 200, 3, rank=40, spread=0.4, noise=0.1, relu=True),
    Task(30_000, 100, 20, rank=33, spread=0.7, noise=0.2, rarer=0.1, shift=0.7),
)


def draw(task: Task, seed: int) -> tuple[Array, NDArray[np.int64]]:
    """Returns rows of norm 1 and their classes, the last `TEST_ROWS` for the score."""
    rng, count = np.random.default_rng(seed), task.n + TEST_ROWS
    chances = np.exp(-task.rarer * np.arange(task.classes))
    labels = rng.choice(task.classes, size=count, p=chances / chances.sum())
    sizes = np.arange(1, task.rank + 1) ** -task.decay
    means = task.spread * rng.normal(size=(task.classes, task.rank))
    inner = (means[labels] + rng.normal(size=(count, task.rank))) * sizes
    basis = np.linalg.qr(rng.normal(size=(task.d, task.rank)))[0]
    rows = (
        inner @ basis.T
        + task.noise * rng.normal(size=(count, task.d))
        + task.shift * rng.normal(size=task.d)
    )
    rows = np.maximum(rows, 0.0) if task.relu else rows
    return rows / np.linalg.norm(rows, axis=1, keepdims=True), labels


def digits(seed: int) -> tuple[Array, NDArray[np.int64]]:
    """Returns the 1,797 digits, shuffled."""
    rows, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(rows))
    return rows[order] / 16, labels[order]


def holder(
    rows: Array,
    labels: NDArray[np.int64],
    test: Array,
    classes: int,
    bound: float,
    epsilon: float,
) -> Array:
    """Returns the classes that HolderSGD predicts, by default settings."""
    problem, model = dp.losses.SoftmaxCrossEntropy(classes), nn.Linear(rows.shape[1], classes)
    budget = dp.Budget(epsilon, DELTA, adjacency="add_remove")
    constants = problem.problem(bound_x=math.hypot(bound, 1.0))
    plan = dp.HolderSGD.plan(problem=constants, n=len(rows), budget=budget, dim=model)
    data = TensorDataset(torch.tensor(rows, dtype=torch.float32), torch.from_numpy(labels))
    dp.fit(model, dp.HolderSGD(model.parameters(), plan), data, problem, progress=False)
    with torch.no_grad():
        found: Array = model(torch.tensor(test, dtype=torch.float32)).argmax(1).numpy()
    return found


def show(
    name: str,
    n: int,
    bound: float,
    drawn: list[tuple[Array, NDArray[np.int64]]],
    epsilons: Sequence[float],
) -> None:
    """Prints a row of the table for each epsilon: medians over what was drawn."""
    classes, width = int(drawn[0][1].max()) + 1, drawn[0][0].shape[1]
    split = [(X[:n], y[:n], X[n:], y[n:]) for X, y in drawn]
    public = [
        LogisticRegression(C=10.0, max_iter=300).fit(X, y).score(*test) for X, y, *test in split
    ]
    for epsilon in epsilons:
        found: dict[str, list[float]] = {}
        for X, y, *test in split:
            for kind, settings in MODELS.items():
                if kind == "objective" and classes * width > WIDEST:
                    continue
                public_numbers = {
                    "adjacency": "add_remove",
                    "n": n,
                    "bound_x": bound,
                    "classes": tuple(range(classes)),
                }
                model = SoftmaxRegression(
                    epsilon=epsilon, delta=DELTA, **public_numbers, **settings
                )
                found.setdefault(kind, []).append(model.fit(X, y).score(*test))
            right = holder(X, y, test[0], classes, bound, epsilon) == test[1]
            found.setdefault("HolderSGD", []).append(float(right.mean()))
        found["not private"] = public
        cells = [
            f"{statistics.median(found[key]):.3f}" if key in found else "-" for key in COLUMNS
        ]
        print(f"| {name} | {epsilon:g} | {' | '.join(cells)} |", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--smoke", action="store_true", help="one small task and digits, one epsilon, one fit"
    )
    smoke = parser.parse_args(argv).smoke
    warnings.filterwarnings("ignore")
    epsilons, seeds = (EPSILONS[-1:], 1) if smoke else (EPSILONS, SEEDS)
    print(
        f"| n, d, classes | epsilon | {' | '.join(COLUMNS)} |\n|---|---|{'---|' * len(COLUMNS)}"
    )
    chosen = {"smoke: ": SMOKE} if smoke else {"": DEVELOPMENT, "held out: ": HELD_OUT}
    for kind, tasks in chosen.items():
        for task in tasks:
            drawn = [draw(task, seed) for seed in range(seeds)]
            show(f"{kind}{task.n:,}, {task.d}, {task.classes}", task.n, 1.0, drawn, epsilons)
    show("digits: 1,400, 64, 10", 1_400, 4.0, [digits(seed) for seed in range(seeds)], epsilons)


if __name__ == "__main__":
    main()
