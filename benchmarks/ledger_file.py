"""What a ledger file costs: wall milliseconds of a step of training without one, and with it.

    python benchmarks/ledger_file.py            # some minutes, on a busy machine more
    python benchmarks/ledger_file.py --folder DISK
    python benchmarks/ledger_file.py --smoke

Loops of ClippedSGD on made-up records take turns: without a file, with one as it is by default, and with one that has
a line for each step, as before lines paid for several. "charge" are the milliseconds within `Run.pay` alone, per
step: they do not depend on how busy the machine is with other things than the disk. Medians over rounds.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from timing import machine, table
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from torch_dpsco.accounting import journal
from torch_dpsco.step.run import Run

RECORDS = 20_000
MODELS = {
    "linear 20-1, b = 64": (20, 1),
    "MLP 40-64-64-1, b = 64": (40, 64, 64, 1),
    "MLP 784-512-256-1, b = 64": (784, 512, 256, 1),
}
BLOCKS = journal.steps_ahead


def model_of(sizes: Sequence[int]) -> nn.Module:
    """Returns layers with ReLU between them."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def run(sizes: Sequence[int], steps: int, path: Path | None) -> tuple[float, float, int]:
    """Returns milliseconds of a step, and of its charge, and the number of lines of the file."""
    model = dp.attach(model_of(sizes))
    budget = dp.Budget(2.0, 1e-6)
    accountant = dp.Accountant(budget, ledger_path=path)
    plan = dp.ClippedSGD.plan(
        n=RECORDS, batch_size=64, steps=steps, clip=1.0, lr=0.1, budget=budget
    )
    optimizer = dp.ClippedSGD(model.parameters(), plan, accountant=accountant)
    data = TensorDataset(torch.randn(RECORDS, sizes[0]), torch.randn(RECORDS, 1))
    charged = 0.0
    pay = Run.pay

    def timed(*args: object) -> None:
        nonlocal charged
        begin = time.perf_counter()
        pay(*args)  # type: ignore[arg-type]
        charged += time.perf_counter() - begin

    Run.pay = timed  # type: ignore[method-assign]
    begin = time.perf_counter()
    try:
        for x, y in optimizer.loader(data, steps=steps):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    finally:
        Run.pay = pay  # type: ignore[method-assign]
    whole = time.perf_counter() - begin
    accountant.close()
    lines = 0 if path is None else path.read_bytes().count(b"\n")
    return 1e3 * whole / steps, 1e3 * charged / steps, lines


def line_of(folder: Path) -> float:
    """Returns the milliseconds of a line of a ledger file, forced to the disk."""
    file = journal.LedgerFile(folder / "line")
    times = []
    for number in range(20):
        begin = time.perf_counter()
        file.append({"at": number, "note": "x" * 200})
        times.append(time.perf_counter() - begin)
    file.close()
    return 1e3 * statistics.median(times)


def measured(name: str, steps: int, rounds: int, folder: Path) -> list[str]:
    """Returns a row of the table."""
    kinds = {"none": None, "file": BLOCKS, "lines": lambda line, step: 1}
    found: dict[str, list[tuple[float, float, int]]] = {kind: [] for kind in kinds}
    for turn in range(rounds + 1):
        for kind, ahead in kinds.items():
            journal.steps_ahead = ahead or BLOCKS
            few = min(steps, 100) if kind == "lines" else steps
            path = folder / f"{name[:6]}{turn}{kind}".replace(" ", "") if ahead else None
            figures = run(MODELS[name], few, path)
            found[kind] += [figures] if turn else []  # the first of each warms up
    journal.steps_ahead = BLOCKS
    step = {kind: statistics.median(f[0] for f in figures) for kind, figures in found.items()}
    charge = {kind: statistics.median(f[1] for f in figures) for kind, figures in found.items()}
    lines = statistics.median(f[2] for f in found["file"])
    return [
        name,
        *(f"{step[kind]:.3g}" for kind in kinds),
        *(f"{charge[kind]:.3f}" for kind in kinds),
        f"{lines:.0f} for {steps}",
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the arguments and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, help="where the files lie: the disk decides")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    names = list(MODELS)[:1] if options.smoke else list(MODELS)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        place = Path(folder)
        steps, rounds = (30, 1) if options.smoke else (1000, 3)
        print(f"{machine(rounds)}; a line takes {line_of(place):.2g} ms")
        rows = [measured(name, steps, rounds, place) for name in names]
    kinds = ("without", "file", "a line a step")
    heads = [
        "ms of wall a step",
        *kinds,
        *(f"charge: {kind}" for kind in kinds),
        "lines of the file",
    ]
    print(table(heads, rows))


if __name__ == "__main__":
    main()
