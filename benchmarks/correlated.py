"""Correlated noise beside Poisson DP-SGD at equal epsilon: the table of docs/choosing.md.

    python benchmarks/correlated.py            # a few minutes
    python benchmarks/correlated.py --smoke    # tiny numbers: shows that it runs

Two tasks: that of benchmarks/holder.py (q-hinge in R^20, unit rows, excess risk on unseen records) with 8,000 records
in batches of 50, and flights before departure (Huber's loss of the delay, mean absolute error in hours on test rows) in
batches of 4,096. Both methods clip at 1, make the same number of steps of the same expected batch, and answer with the
last iterate; replace_one, delta = 1e-6; medians of runs. The step size of each cell is the best of a grid by the score
in the table, for both methods alike, which is not private and not charged.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from holder import LOSS, RADIUS, Task
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from torch_dpsco.accounting.calibrate import noise_multiplier

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from flights import NUM_FEATURES, load_flights

DELTA, EPSILONS, EPOCHS = 1e-6, (1.0, 4.0, 8.0), (1, 5)
LRS = {"synthetic": (0.003, 0.01, 0.03, 0.1, 0.3), "flights": (0.3, 1.0, 3.0, 10.0)}
Loss = Callable[..., Tensor]


def poisson(
    params: Sequence[nn.Parameter], n: int, batch: int, epochs: int, lr: float, budget: dp.Budget
) -> object:
    """Returns DP-SGD on Poisson batches."""
    design, steps = dp.Poisson(batch, n), epochs * -(-n // batch)
    noise = noise_multiplier(
        budget.epsilon, budget.delta, design=design, steps=steps, adjacency=budget.adjacency
    )
    return dp.PrivateOptimizer(
        params,
        lr,
        oracle=dp.oracles.Clipped(1.0, noise, batch),
        rule=dp.rules.SGD(),
        design=design,
        schedule=dp.Schedule((dp.Phase(steps),)),
        prox=dp.prox.Ball(RADIUS),
        accountant=dp.Accountant(budget),
    )


def correlated(
    params: Sequence[nn.Parameter], n: int, batch: int, epochs: int, lr: float, budget: dp.Budget
) -> object:
    """Returns SGD with correlated noise."""
    plan = dp.CorrelatedSGD.plan(
        n=n, budget=budget, clip=1.0, lr=lr, batch_size=batch, epochs=epochs, radius=RADIUS
    )
    return dp.CorrelatedSGD(params, plan)


METHODS = {"Poisson": poisson, "correlated": correlated}


def cell(
    method: str,
    data: TensorDataset,
    loss: Loss,
    score: Callable[[nn.Linear], float],
    lrs: Sequence[float],
    *run: float,
) -> float:
    """Returns the median score at the best step size."""
    epsilon, epochs, batch, runs = run
    found = []
    for lr in lrs:
        scores = []
        for _ in range(int(runs)):
            model = nn.Linear(
                data.tensors[0].shape[1], 1, bias=False, dtype=data.tensors[0].dtype
            )
            nn.init.zeros_(model.weight)
            budget = dp.Budget(epsilon, DELTA, "replace_one")
            optimizer = METHODS[method](
                list(model.parameters()), len(data), int(batch), int(epochs), lr, budget
            )
            dp.fit(model, optimizer, data, loss, progress=False)
            scores.append(score(model))
        found.append(statistics.median(scores))
    return min(found)


def tasks(
    smoke: bool,
) -> dict[str, tuple[TensorDataset, Loss, Callable[[nn.Linear], float], int]]:
    """Returns data, loss, score and batch size by name."""
    task = Task(0, unseen=1000 if smoke else 100_000)
    made = {
        "synthetic": (
            task.draw(400 if smoke else 8_000),
            LOSS,
            lambda m: task.excess(m.weight[0].detach()),
            50,
        )
    }
    rows = load_flights()
    width, size = NUM_FEATURES["predep"], 4096 if smoke else len(rows.train_hours)
    train = TensorDataset(rows.train_features[:size, :width], rows.train_hours[:size, None])

    def error(model: nn.Linear) -> float:
        with torch.no_grad():
            return float(
                (model(rows.test_features[:, :width])[:, 0] - rows.test_hours).abs().mean()
            )

    return made | {
        "flights": (train, dp.losses.Huber(threshold=0.25), error, 512 if smoke else 4096)
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="tiny numbers: shows that it runs")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args(argv)
    smoke = options.smoke
    print(
        "| task, passes | "
        + " | ".join(f"epsilon {e:g}, {m}" for e in EPSILONS for m in METHODS)
        + " |"
    )
    print("| --- |" + " --- |" * len(EPSILONS) * len(METHODS))
    for name, (data, loss, score, batch) in tasks(smoke).items():
        for epochs in EPOCHS[: 1 if smoke else None]:
            lrs, runs = LRS[name][: 1 if smoke else None], 1 if smoke else options.runs
            cells = [
                cell(m, data, loss, score, lrs, e, epochs, batch, runs)
                for e in EPSILONS
                for m in METHODS
            ]
            print(
                f"| {name}, {epochs} | " + " | ".join(f"{value:.4f}" for value in cells) + " |",
                flush=True,
            )


if __name__ == "__main__":
    main()
