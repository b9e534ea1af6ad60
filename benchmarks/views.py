"""What views of a record and gradients of one length cost: a private step as a multiple of plain torch SGD.

    python benchmarks/views.py             # a minute or two
    python benchmarks/views.py --smoke     # seconds

A CNN on images of 28 x 28, batches of 64 of 4,096 on average, at default settings: `ClippedSGD` (clipped), `NetSGD`
(AutoClip: gradients are scaled to one length), and `NetSGD` with K views of each record in `dp.same_records`; plain SGD
takes the mean loss of as many views. All take turns; a ratio is that of CPU times in the same round.
"""

from __future__ import annotations

import argparse
import itertools
import warnings
from collections.abc import Callable, Iterator

import torch
from cases import everyday
from timing import cell, digits, figures, in_process, interleaved, machine, table
from torch import Tensor, nn

import torch_dpsco as dp

VIEWS = (1, 2, 4)
MANY = 20_000  # steps, more than are made
LOSS = nn.CrossEntropyLoss()


def steps_of(way: str, views: int, smoke: bool) -> Callable[[], object]:
    """Returns what makes a step."""
    case = next(case for case in everyday(smoke=smoke) if case.name.startswith("CNN"))
    model = case.model()
    x, y = case.data
    data = torch.utils.data.TensorDataset(x, y)

    def loss(rows: Tensor, labels: Tensor) -> Tensor:
        return sum((LOSS(model(rows), labels) for _ in range(views)), torch.zeros(())) / views

    def plain() -> None:
        chosen = torch.randint(len(x), (case.size,))
        optimizer.zero_grad()
        loss(x[chosen], y[chosen]).backward()
        optimizer.step()

    optimizer: torch.optim.Optimizer
    if way == "plain":
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        return plain
    model = dp.attach(model)
    shared = {"n": len(x), "noise_multiplier": 1.0, "steps": MANY, "lr": 0.1}
    if way == "clipped":
        problem = dp.Problem(smoothness=1.0)
        plan = dp.ClippedSGD.plan(
            problem=problem, sampling="poisson", batch_size=case.size, clip=1.0, **shared
        )
        private: dp.PrivateOptimizer = dp.ClippedSGD(model.parameters(), plan)
    else:
        plan = dp.NetSGD.plan(batch_size=case.size, dim=model, **shared)
        private = dp.NetSGD(model.parameters(), plan)
    batches: Iterator[tuple[Tensor, Tensor]] = iter(private.loader(data, steps=MANY))

    def step() -> None:
        rows, labels = next(batches)
        private.zero_grad()
        if views == 1:
            loss(rows, labels).backward()
        else:
            with dp.same_records(model):
                loss(rows, labels).backward()
        private.step()

    step()  # the first one looks at the model
    return step


def main(arguments: list[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args(arguments)
    rounds = 2 if given.smoke else given.rounds
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    for views, way in itertools.product(VIEWS, ("clipped", "AutoClip")):
        if way == "clipped" and views > 1:
            continue
        slots = {name: in_process(steps_of(name, views, given.smoke)) for name in ("plain", way)}
        ratio, _ = (found := figures(interleaved(slots, rounds), "plain"))[way]
        rows.append([way, views, digits(found["plain"][1]), cell(ratio)])
    print(machine(rounds), "\n")
    print(table(["clip", "views", "plain, ms", "ratio"], rows))


if __name__ == "__main__":
    main()
