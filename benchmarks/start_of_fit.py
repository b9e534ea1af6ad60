"""How long `fit` takes beside its steps: CPU milliseconds of short fits, in fresh processes.

    python benchmarks/start_of_fit.py            # about a minute
    python benchmarks/start_of_fit.py --smoke

"first": the first fit of one step of a process, which has imported torch and torch_dpsco. "again": the least of five
fits of one step of new models in the same process. "step": what each further step of a fit takes, by fits of five steps
(of filled batches, larger than those of "plain step"). "start" is "again" without its step. "plain, first": a first
step of torch SGD in a process of its own, which pays for what torch sets up. All batches are taken from 2,000 made-up
records.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence

import torch
from cases import Case, cases, mlp
from timing import machine, table
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp

RECORDS = 2000


def models(*, smoke: bool) -> list[Case]:
    """Returns small and large networks, and those of the other benchmarks."""
    more = (
        [mlp((20, 32, 2), 64)]
        if smoke
        else [mlp((20, 32, 2), 64), mlp((100, 1024, 1024, 10), 256)]
    )
    return [*more, *(case for case in cases(smoke=smoke) if not case.is_linear)]


def fit(case: Case, steps: int = 1) -> float:
    """Returns the milliseconds of a fit of some steps."""
    inputs, targets = (
        part.repeat(RECORDS // len(part) + 1, *[1] * (part.dim() - 1))[:RECORDS]
        for part in case.batch
    )
    model, size = case.model(), len(case.batch[0])
    begin = time.process_time()
    plan = dp.ClippedSGD.plan(
        n=RECORDS,
        batch_size=size,
        steps=steps,
        noise_multiplier=1.0,
        clip=1.0,
        lr=0.1,
        adjacency="replace_one",
    )
    dp.attach(model, loss_reduction="sum")
    optimizer = dp.ClippedSGD(model.parameters(), plan)
    dp.fit(
        model,
        optimizer,
        TensorDataset(inputs, targets),
        nn.CrossEntropyLoss(reduction="sum"),
        progress=False,
    )
    return 1e3 * (time.process_time() - begin)


def plain(case: Case) -> list[float]:
    """Returns the milliseconds of steps of torch SGD."""
    model, (inputs, targets) = case.model(), case.batch
    begin, found = time.process_time(), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        case.loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(1e3 * (time.process_time() - begin))
        begin = time.process_time()
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="small models")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    if args.child:
        torch.set_num_threads(1)
        name, way = args.child
        [case] = [case for case in models(smoke=args.smoke) if case.name == name]
        fits = [fit, lambda case: fit(case, steps=5)]
        print(
            json.dumps(
                plain(case)
                if way == "plain"
                else [[run(case) for _ in range(6)] for run in fits]
            )
        )
        return
    rows = []
    for case in models(smoke=args.smoke):
        found = {}
        for way in ("fit", "plain"):
            command = [
                sys.executable,
                __file__,
                "--child",
                case.name,
                way,
                *["--smoke"] * args.smoke,
            ]
            found[way] = json.loads(
                subprocess.run(command, capture_output=True, text=True, check=True).stdout
            )
        (first, *short), long = found["fit"]
        step = (min(long) - min(short)) / 4
        figures = (
            first,
            min(short),
            step,
            min(short) - step,
            found["plain"][0],
            min(found["plain"][1:]),
        )
        rows.append([case.name, *(f"{value:.1f}" for value in figures)])
    print(machine(1))
    print(
        table(["model", "first", "again", "step", "start", "plain, first", "plain step"], rows)
    )


if __name__ == "__main__":
    main()
