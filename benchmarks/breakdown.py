"""Where the microseconds of a step go: own CPU time of each file of the library, of torch and of the loop, by cProfile.

    python benchmarks/breakdown.py                    # fit, a loop, make_private and a small net: half a minute
    python benchmarks/breakdown.py --case loop --batch 1024
    python benchmarks/breakdown.py --functions        # the 25 dearest functions, too
    python benchmarks/breakdown.py --smoke

Poisson batches at default settings, under add_remove. The profiler notes every call, which takes 0.1 to 0.3 us each:
small functions look dearer than they are, so that these figures say where to look, and `step_time.py` says how long a
step takes.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpsco as dp

ROOT = Path(dp.__file__).parent
N, DIM, CLASSES = 32_000, 100, 10
WARM = 10  # steps that are not counted


def data(case: str) -> TensorDataset:
    """Returns made-up records of a case."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(N, DIM, generator=draw)
    if case == "net":
        return TensorDataset(x, torch.randint(0, CLASSES, (N,), generator=draw))
    return TensorDataset(x, (x[:, :1] > 0).float())


def model_of(case: str) -> tuple[nn.Module, nn.Module]:
    """Returns the model and the loss of a case."""
    if case == "net":
        net = nn.Sequential(nn.Linear(DIM, 64), nn.ReLU(), nn.Linear(64, CLASSES))
        return net, nn.CrossEntropyLoss()
    return nn.Linear(DIM, 1), nn.BCEWithLogitsLoss()


def plan_of(batch: int, steps: int) -> object:
    """Returns the plan of clipped steps."""
    return dp.ClippedSGD.plan(
        lr=0.05,
        clip=1.0,
        noise_multiplier=1.0,
        batch_size=batch,
        n=N,
        adjacency="add_remove",
        steps=steps,
        sampling="poisson",
    )


def loop_of(case: str, batch: int, steps: int) -> Iterator[None]:
    """Makes one step for each item that is asked for."""
    model, loss = model_of(case)
    if case == "make_private":
        model, optimizer, loader = dp.make_private(
            model,
            torch.optim.SGD(model.parameters(), lr=0.05),
            DataLoader(data(case), batch_size=batch),
            problem=dp.losses.Logistic().problem(bound_x=20.0),
            budget=dp.Budget(1.0, 1e-5, adjacency="add_remove"),
            n=N,
            epochs=1 + steps * batch / N,
        )
    else:
        dp.attach(model)
        optimizer = dp.ClippedSGD(model.parameters(), plan_of(batch, steps))
        loader = optimizer.loader(data(case), steps=steps)
    while True:
        for x, y in loader:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
            yield


def profiled(run: Callable[[], object]) -> pstats.Stats:
    """Returns the profile of a run, in CPU time of this thread."""
    profiler = cProfile.Profile(time.thread_time)
    profiler.runcall(run)
    return pstats.Stats(profiler)


def profile_of(case: str, batch: int, steps: int) -> pstats.Stats:
    """Returns the profile of the steps of a case after the first ones; of `fit`, of all of them and its start."""
    if case == "fit":
        model, loss = model_of(case)
        optimizer = dp.ClippedSGD(model.parameters(), plan_of(batch, steps))
        return profiled(lambda: dp.fit(model, optimizer, data(case), loss, progress=False))
    loop = loop_of(case, batch, steps + WARM)
    for _ in range(WARM):
        next(loop)
    return profiled(lambda: [next(loop) for _ in range(steps)])


def place(file: str) -> str:
    """Returns what a file is counted as."""
    path = Path(file)
    if path.is_relative_to(ROOT):
        return str(path.relative_to(ROOT))
    return "torch" if "torch" in path.parts or file == "~" else "the loop and others"


def show(case: str, stats: pstats.Stats, steps: int, functions: bool) -> None:
    """Prints the own time of each file, per step."""
    spent: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for (file, _, _), (_, count, own, _, _) in stats.stats.items():  # type: ignore[attr-defined]
        spent[place(file)] += own
        calls[place(file)] += count
    print(f"\n{case}: {sum(spent.values()) / steps * 1e6:.0f} us a step under the profiler")
    for name, seconds in spent.most_common():
        if seconds / steps > 1e-6:
            print(f"  {seconds / steps * 1e6:8.1f} us {calls[name] / steps:7.1f} calls  {name}")
    if functions:
        stats.sort_stats("tottime").print_stats(25)


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the arguments and prints a table for each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    cases = ("fit", "loop", "make_private", "net")
    parser.add_argument("--case", choices=cases, action="append")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--functions", action="store_true", help="the dearest functions, too")
    parser.add_argument("--smoke", action="store_true", help="tiny numbers, which mean nothing")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    steps = 5 if options.smoke else options.steps
    for case in options.case or cases:
        show(case, profile_of(case, options.batch, steps), steps, options.functions)


if __name__ == "__main__":
    main()
