"""What a few public records are worth to a private net: digits, of which 100 are declared public.

    python benchmarks/public_data.py            # epsilon 0.5, 1 and 3, five runs of each: half a minute
    python benchmarks/public_data.py --smoke    # tiny numbers: shows that it runs

Medians of runs, which are fresh weights, noise and batches; 1,337 private records, 360 to test; delta is 1e-5,
zero_out. A perceptron 64-64-10.

* public alone: Adam, 100 steps on the 100 public records.
* private alone: `dp.fit(net, dataset=..., loss_fn=..., epsilon=..., delta=...)`.
* pretrained: public alone first, then private steps over half of their usual way (distance 12: less is left to go).
* between, too: as pretrained, and after every second private step one plain step on the public records.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import warnings

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp

PUBLIC, TEST, DELTA = 100, 360, 1e-5
DISTANCE, EVERY, LR = 12.0, 2, 0.05
LOSS = nn.CrossEntropyLoss()
Part = tuple[Tensor, Tensor]


def load() -> tuple[Part, Part, Part]:
    """Returns public, private and test records, the same in every run."""
    rows, targets = load_digits(return_X_y=True)
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(targets)))
    x, y = torch.tensor(rows / 16).float()[order], torch.tensor(targets)[order]
    cuts = [PUBLIC, len(y) - PUBLIC - TEST, TEST]
    public, private, test = zip(x.split(cuts), y.split(cuts), strict=True)
    return public, private, test


def perceptron() -> nn.Module:
    """Returns a net with one hidden layer."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def pretrain(net: nn.Module, public: Part, steps: int = 100) -> nn.Module:
    """Trains on public records, and returns the net."""
    adam = torch.optim.Adam(net.parameters(), 0.01)
    for _ in range(steps):
        adam.zero_grad()
        LOSS(net(public[0]), public[1]).backward()
        adam.step()
    return net


def privately(
    net: nn.Module, private: Part, budget: dp.Budget, public: Part | None
) -> nn.Module:
    """Adapts a net that knows something already, with public steps between if public records are given."""
    model = dp.attach(net)
    plan = dp.NetSGD.plan(n=len(private[1]), budget=budget, dim=model, distance=DISTANCE)
    optimizer = dp.NetSGD(model.parameters(), plan)
    plain = torch.optim.SGD(model.parameters(), LR)
    for x, y in optimizer.loader(TensorDataset(*private), steps=plan.steps):
        optimizer.zero_grad()
        LOSS(model(x), y).backward()
        optimizer.step()
        if public is not None and optimizer.steps % EVERY == 0 and not optimizer.finalized:
            with dp.public(model):
                plain.zero_grad()
                LOSS(model(public[0]), public[1]).backward()
                plain.step()
                plain.zero_grad()
    return dp.detach(model)


def run(way: str, parts: tuple[Part, Part, Part], epsilon: float) -> float:
    """Returns the test accuracy of one run."""
    public, private, test = parts
    net, budget = perceptron(), dp.Budget(epsilon, DELTA)
    if way == "private alone":
        data = TensorDataset(*private)
        dp.fit(net, dataset=data, loss_fn=LOSS, budget=budget, progress=False)
    else:
        pretrain(net, public)
    if way in ("pretrained", "between, too"):
        privately(net, private, budget, public if way == "between, too" else None)
    with torch.no_grad():
        return float((net.eval()(test[0]).argmax(1) == test[1]).float().mean())


WAYS = ("public alone", "private alone", "pretrained", "between, too")


def main(arguments: list[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epsilons", nargs="+", type=float, default=[0.5, 1.0, 3.0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args(arguments)
    if given.smoke:
        given.epsilons, given.seeds = [3.0], 1
    warnings.simplefilter("ignore")
    parts = load()
    print(f"{platform.machine()}, torch {torch.__version__}, {datetime.date.today()}\n")
    print("| epsilon |", " | ".join(WAYS), "|")
    print("|---|" + "---|" * len(WAYS))
    for epsilon in given.epsilons:
        scores = []
        for way in WAYS:
            runs = []
            for seed in range(given.seeds):
                torch.manual_seed(seed)
                runs.append(run(way, parts, epsilon))
            scores.append(f"{statistics.median(runs):.3f} ({min(runs):.3f} to {max(runs):.3f})")
        print(f"| {epsilon:g} |", " | ".join(scores), "|", flush=True)


if __name__ == "__main__":
    main()
