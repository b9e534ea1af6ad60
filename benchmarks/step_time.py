"""Time of one private step, as a multiple of plain torch SGD in the same process.

    python benchmarks/step_time.py                  # about two minutes
    python benchmarks/step_time.py --rounds 5 --cases "logistic d=1000 b=256"

All variants of a case live in one process with one thread and take turns in random order, a few steps each; a figure is
the median over rounds of CPU time divided by that of plain SGD in the same round. A step is zero_grad, forward, loss,
backward and update on one batch that is in memory: no data loading, no calibration; the ledger is charged. Variants:

* factored: HolderSGD on factored Linear rows (the default of attach)
* dense: HolderSGD on Opacus' dense rows
* opacus: Opacus' DPOptimizer on the same dense rows (hooks)
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn

import torch_dpsco as dp
from torch_dpsco.accounting.designs import Draw
from torch_dpsco.sampling import Chunk, DesignSampler

LR, NOISE = 0.01, 1.0
SLOT_SECONDS = 0.02


@dataclass(frozen=True)
class Case:
    """A model, a batch and a loss."""

    name: str
    build: Callable[[], nn.Module]
    batch: tuple[Tensor, Tensor]
    loss: nn.Module
    problem: dp.Problem


def cases() -> list[Case]:
    torch.manual_seed(0)

    def logistic(dim: int, size: int) -> Case:
        batch = (torch.randn(size, dim), (torch.rand(size, 1) > 0.5).float())
        problem = dp.losses.Logistic().problem(bound_x=40.0)
        return Case(f"logistic d={dim} b={size}", lambda: nn.Linear(dim, 1), batch, nn.BCEWithLogitsLoss(), problem)

    def mlp() -> nn.Module:
        return nn.Sequential(
            nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10)
        )  # fmt: skip

    batch = (torch.randn(256, 784), torch.randint(10, (256,)))
    network = Case("MLP 784-512-256-10 b=256", mlp, batch, nn.CrossEntropyLoss(), dp.Problem(lipschitz=1.0))
    return [logistic(1000, 256), logistic(1000, 4096), network]


def plain_step(case: Case) -> Callable[[], None]:
    model = case.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    inputs, targets = case.batch

    def step() -> None:
        optimizer.zero_grad()
        case.loss(model(inputs), targets).backward()
        optimizer.step()

    return step


def private_step(case: Case, rows: str) -> Callable[[], None]:
    model = dp.attach(case.build(), rows=rows)
    inputs, targets = case.batch
    size = len(inputs)
    design = dp.Poisson(size, 100 * size)
    optimizer = dp.HolderSGD(
        model.parameters(),
        LR,
        problem=case.problem,
        noise_multiplier=NOISE,
        batch_size=size,
        design=design,
        adjacency="add_remove",
    )
    sampler: DesignSampler = optimizer.bind(dp.PoissonSampler(design))
    chunk = Chunk(Draw(size), size, last=True)

    def step() -> None:
        sampler.log.deliver(chunk)  # what the loader does, without its gathering
        optimizer.zero_grad()
        case.loss(model(inputs), targets).backward()
        optimizer.step()

    return step


def opacus_step(case: Case) -> Callable[[], None]:
    model = GradSampleModule(case.build())
    inner = torch.optim.SGD(model.parameters(), lr=LR)
    inputs, targets = case.batch
    optimizer = DPOptimizer(inner, noise_multiplier=NOISE, max_grad_norm=1.0, expected_batch_size=len(inputs))

    def step() -> None:
        optimizer.zero_grad()
        case.loss(model(inputs), targets).backward()
        optimizer.step()

    return step


def cpu_seconds(step: Callable[[], None], repeats: int) -> float:
    step()  # warms caches after another variant's turn
    start = time.process_time()
    for _ in range(repeats):
        step()
    return (time.process_time() - start) / repeats


def measure(case: Case, rounds: int) -> dict[str, tuple[float, float]]:
    """Returns per variant (median ratio to plain SGD, median milliseconds)."""
    steps = {
        "plain": plain_step(case),
        "factored": private_step(case, "factored"),
        "dense": private_step(case, "dense"),
        "opacus": opacus_step(case),
    }
    repeats = {name: max(1, min(50, int(SLOT_SECONDS / cpu_seconds(step, 2)))) for name, step in steps.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name in random.sample(list(steps), len(steps)):
            seconds[name].append(cpu_seconds(steps[name], repeats[name]))
    return {
        name: (
            statistics.median(own / plain for own, plain in zip(times, seconds["plain"], strict=True)),
            1e3 * statistics.median(times),
        )
        for name, times in seconds.items()
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cases", default="", help="run only the cases whose name contains this")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {platform.machine()}, one thread, {args.rounds} rounds")
    for case in cases():
        if args.cases in case.name:
            for name, (ratio, milliseconds) in measure(case, args.rounds).items():
                print(f"{case.name:<26}{name:<10}{ratio:8.2f} x {milliseconds:10.3f} ms")


if __name__ == "__main__":
    main()
