"""Logistic regression on a memory-mapped array: an epoch of `fit` beside one of plain torch SGD, and what each holds.

    python benchmarks/mapped_sgd.py                 # 10,000,000 x 100 float32 in a file of 4 GB; some minutes
    python benchmarks/mapped_sgd.py --smoke         # a try

Each line is a process of its own that makes the same number of steps. "plain": batches of random records, of a fixed
size, gathered by their numbers. "fit": `dp.fit` on Poisson batches of the same mean size. "own memory" is what a
process holds besides pages of the file, which the system may drop at any time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from timing import machine, table
from torch import Tensor, nn
from torch.utils.data import TensorDataset

COLUMNS, PIECE, BATCH = 100, 250_000, 4096


def generate(folder: Path, rows: int) -> None:
    """Writes records in the unit ball and labels -1 and 1 of a logistic model."""
    rng = np.random.default_rng(0)
    true = rng.standard_normal(COLUMNS)
    x = np.lib.format.open_memmap(folder / "x.npy", "w+", np.float32, (rows, COLUMNS))
    y = np.lib.format.open_memmap(folder / "y.npy", "w+", np.float32, (rows, 1))
    for start in range(0, rows, PIECE):
        part = rng.standard_normal((min(PIECE, rows - start), COLUMNS), dtype=np.float32)
        part /= np.linalg.norm(part, axis=1, keepdims=True)
        x[start : start + PIECE] = part
        score = 2.0 * part @ true
        y[start : start + PIECE, 0] = np.where(
            rng.random(len(part)) < 1.0 / (1.0 + np.exp(-score)), 1.0, -1.0
        )


def mapped(folder: Path) -> tuple[Tensor, Tensor]:
    """Returns the arrays as tensors, of which nothing is read yet."""
    x, y = (
        torch.from_numpy(np.load(folder / name, mmap_mode="c")) for name in ("x.npy", "y.npy")
    )
    return x, y


def plain(folder: Path, steps: int) -> nn.Module:
    """An epoch of SGD."""
    (x, y), model = mapped(folder), nn.Linear(COLUMNS, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(steps):
        index = torch.randint(len(x), (BATCH,))
        optimizer.zero_grad()
        nn.functional.softplus(-y[index] * model(x[index])).mean().backward()
        optimizer.step()
    return model


def fit(folder: Path, steps: int) -> nn.Module:
    """An epoch of `fit`."""
    import torch_dpsco as dp

    (x, y), model, loss = mapped(folder), nn.Linear(COLUMNS, 1), dp.losses.Logistic()
    budget = dp.Budget(1.0, min(1e-8, 0.1 / len(x)), "replace_one")
    plan = dp.HolderSGD.plan(
        problem=loss.problem(bound_x=1.0),
        n=len(x),
        budget=budget,
        batch_size=BATCH,
        steps=steps,
        lr=1.0,
    )
    with dp.HolderSGD(model.parameters(), plan) as optimizer:
        dp.fit(model, optimizer, TensorDataset(x, y), loss, progress=False)
    return model


WAYS: dict[str, Callable[[Path, int], nn.Module]] = {"plain": plain, "fit": fit}


def child(way: str, folder: Path, steps: int) -> None:
    """Trains, and prints what it took."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    start = time.perf_counter(), time.process_time()
    model = WAYS[way](folder, steps)
    took = time.perf_counter() - start[0], time.process_time() - start[1]
    status = Path("/proc/self/status").read_text()
    own = int(status.split("RssAnon:")[1].split()[0]) / 2**10
    x, y = (part[:100_000] for part in mapped(folder))
    accuracy = float((model(x).sign() == y).float().mean())
    print(json.dumps([*took, own, accuracy]))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=lambda text: int(float(text)), default=10_000_000)
    parser.add_argument("--smoke", action="store_true", help="20,000 rows")
    parser.add_argument("--child", choices=[*WAYS])
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args(argv)
    args.rows = 20_000 if args.smoke else args.rows
    steps = max(1, args.rows // BATCH)
    if args.child:
        child(args.child, args.folder, steps)
        return
    with tempfile.TemporaryDirectory() as name:
        generate(Path(name), args.rows)
        lines = []
        for way in WAYS:
            command = [
                sys.executable,
                __file__,
                "--rows",
                str(args.rows),
                "--child",
                way,
                "--folder",
                name,
            ]
            found = json.loads(
                subprocess.run(command, capture_output=True, text=True, check=True).stdout
            )
            lines.append([way, *(f"{value:.4g}" for value in found)])
    print(machine(1), f"{args.rows} x {COLUMNS}, {steps} steps of {BATCH}", sep="\n")
    print(table(["", "seconds", "of the CPU", "own memory, MiB", "accuracy"], lines))


if __name__ == "__main__":
    main()
