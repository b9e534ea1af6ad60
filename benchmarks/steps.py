"""The step rule of HolderSGD beside other distances, clips and numbers of passes, on synthetic tasks.

    python benchmarks/steps.py            # 4 tasks x 2 epsilons, means of 5 runs: a minute
    python benchmarks/steps.py --smoke    # tiny numbers, which show that it runs and mean nothing

add_remove, delta = 1e-6. Logistic regression, and Huber's loss (threshold 1) with Student-t noise of 3 degrees of
freedom; features of norm at most 1 with a spread of scales (`condition`) and a mean that is not 0. The score is the
loss on the training records over the least one. The default is in the first column; in the others one number is given
by hand: `distance=` as a multiple of the default one, `clip=`, or `epochs=`. The tasks were looked at when the rule's
constants were chosen.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from torch_dpsco.step.chooser import usual_distance

DELTA, BOUND = 1e-6, math.sqrt(2.0)  # of rows of norm 1 with the 1 of the bias


@dataclass(frozen=True)
class Task:
    """A synthetic data set: kind of loss, records, features, and the ratio of their largest and smallest scale."""

    kind: str
    n: int
    dim: int
    condition: float


TASKS = (
    Task("logistic", 10_000, 20, 30.0),
    Task("logistic", 40_000, 60, 3.0),
    Task("huber", 10_000, 20, 30.0),
    Task("huber", 40_000, 60, 3.0),
)
EPSILONS = (0.1, 1.0)


def data_of(task: Task) -> tuple[Tensor, Tensor]:
    """Returns features (n, dim) and targets (n, 1) of a task, the same in every run."""
    draw = torch.Generator().manual_seed(task.n + task.dim)
    scales = torch.logspace(0.0, -math.log10(task.condition), task.dim)
    x = scales * (
        torch.randn(task.n, task.dim, generator=draw)
        + 0.5 * torch.randn(task.dim, generator=draw)
    )
    lengths = x.norm(dim=1, keepdim=True)
    x = x / lengths.quantile(0.95) * (lengths.quantile(0.95) / lengths).clamp(max=1.0)
    score = x @ torch.randn(task.dim, 1, generator=draw)
    score = 2.0 * (score - score.mean()) / score.std()
    if task.kind == "logistic":
        return x, torch.sign(torch.sigmoid(score - 0.7) - torch.rand(task.n, 1, generator=draw))
    tails = torch.randn(3, task.n, 1, generator=draw).square().sum(0).div(3.0).sqrt()
    return x, score + 2.0 + 0.5 * torch.randn(task.n, 1, generator=draw) / tails


def loss_of(task: Task) -> Any:
    """Returns the loss of a task."""
    return dp.losses.Logistic() if task.kind == "logistic" else dp.losses.Huber(threshold=1.0)


def started(task: Task) -> nn.Linear:
    """Returns a model at 0."""
    model = nn.Linear(task.dim, 1)
    for p in model.parameters():
        nn.init.zeros_(p)
    return model


def least(task: Task, x: Tensor, y: Tensor) -> float:
    """Returns the least loss without privacy."""
    model, loss = started(task), loss_of(task)
    solver = torch.optim.LBFGS(model.parameters(), max_iter=500, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        solver.zero_grad()
        value: Tensor = loss(model(x), y)
        value.backward()
        return value

    solver.step(closure)
    return float(closure().detach())


def columns(task: Task) -> Iterator[tuple[str, dict[str, float]]]:
    """Yields the name of a column and what is given by hand in it."""
    problem = loss_of(task).problem(bound_x=BOUND, bound_y=20.0)
    usual = usual_distance(
        problem.grad_at_zero, BOUND, 20.0 if task.kind == "huber" else None, smooth=True
    )
    yield "default", {}
    yield from (
        (f"D x {factor:g}", {"distance": factor * usual}) for factor in (0.25, 0.5, 2.0, 4.0)
    )
    yield from ((f"clip {share:g}", {"clip": share}) for share in (0.25, 0.5, 1.0))
    yield from ((f"{passes:g} passes", {"epochs": passes}) for passes in (5.0, 80.0))


def excess(task: Task, epsilon: float, given: dict[str, float], runs: int) -> float:
    """Returns the mean of the loss of `runs` runs."""
    (x, y), loss, found = data_of(task), loss_of(task), []
    budget = dp.Budget(epsilon, DELTA, adjacency="add_remove")
    for _ in range(runs):
        model = started(task)
        plan = dp.HolderSGD.plan(
            problem=loss.problem(bound_x=BOUND, bound_y=20.0),
            n=task.n,
            budget=budget,
            dim=model,
            **given,
        )
        dp.fit(
            model,
            dp.HolderSGD(model.parameters(), plan),
            TensorDataset(x, y),
            loss,
            progress=False,
        )
        found.append(float(loss(model(x), y).detach()))
    return sum(found) / runs


def main(arguments: list[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--runs", type=int, default=5)
    chosen = parser.parse_args(arguments)
    warnings.simplefilter("ignore", dp.errors.UtilityWarning)
    tasks, runs = ((Task("logistic", 300, 3, 3.0),), 1) if chosen.smoke else (TASKS, chosen.runs)
    names = [name for name, _ in columns(tasks[0])]
    print(f"| loss, n, d, condition, epsilon | {' | '.join(names)} |")
    print(f"|{'---|' * (len(names) + 1)}")
    for task in tasks:
        floor = least(task, *data_of(task))
        for epsilon in EPSILONS:
            cells = [
                f"{excess(task, epsilon, given, runs) - floor:.4f}" for _, given in columns(task)
            ]
            what = f"{task.kind}, {task.n}, {task.dim}, {task.condition:g}, {epsilon:g}"
            print(f"| {what} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
