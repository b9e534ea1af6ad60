"""What loading costs: drawing a Poisson batch, and gathering its rows; whole runs are in `default_time.py`.

    python benchmarks/loaders.py            # about half a minute
    python benchmarks/loaders.py --smoke

* draws: milliseconds of CPU time to draw one Poisson batch of 256 positions on average: our sampler, and Opacus'
  UniformWithReplacementSampler, each as an iteration of many draws (medians, in turns)
* gathering: a batch of 256 of 100,000 records by our loader (draw included), by DataLoader(TensorDataset) with
  shuffling, and by the fastest plain way: index_select at sorted positions of a permutation
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from timing import Slot, cell, digits, figures, interleaved, machine, summary, table
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import torch_dpsco as dp
from torch_dpsco.sampling import PoissonSampler, PrivateLoader

BATCH, RECORDS, WIDTH = 256, 100_000, 100  # of draws and of gathering
DRAW_GOALS = {10**6: 0.03, 10**7: 0.15}  # milliseconds


def slot_of(batches: Callable[[int], Iterator[object]]) -> Slot:
    """Returns turns of an iterator that yields that many batches; its setup is a part of the turn."""

    def run(repeats: int) -> float:
        start = time.process_time()
        for _ in batches(repeats):
            pass
        return (time.process_time() - start) / repeats

    return Slot(run, most=2000)


def draw_slots(n: int) -> dict[str, Slot]:
    def ours(repeats: int) -> Iterator[object]:
        return iter(PoissonSampler(dp.Poisson(BATCH, n), steps=repeats).draws())

    def opacus(repeats: int) -> Iterator[object]:
        return iter(
            UniformWithReplacementSampler(num_samples=n, sample_rate=BATCH / n, steps=repeats)
        )

    return {"ours": slot_of(ours), "Opacus": slot_of(opacus)}


def draw_table(sizes: Sequence[int], rounds: int) -> str:
    rows = []
    for n in sizes:
        seconds = interleaved(draw_slots(n), rounds)
        ours, opacus = (summary([1e3 * s for s in seconds[name]]) for name in ("ours", "Opacus"))
        goal = f"<= {DRAW_GOALS[n]}" if n in DRAW_GOALS else ""
        rows.append(
            [f"{n:,}", cell(ours), goal, cell(opacus), digits(opacus.median / ours.median)]
        )
    return table(
        ["records", "ours, ms a draw", "goal", "Opacus, ms a draw", "Opacus / ours"], rows
    )


def gather_slots(data: TensorDataset, size: int) -> dict[str, Slot]:
    def ours(repeats: int) -> Iterator[object]:
        loader = PrivateLoader(data, PoissonSampler(dp.Poisson(size, len(data)), steps=repeats))
        for batch in loader:
            loader.batch_sampler.log.take()  # as the optimizer does
            loader.batch_sampler.log.use_up()
            yield batch

    def plain(repeats: int) -> Iterator[object]:
        loader = DataLoader(data, batch_size=size, shuffle=True)
        return (batch for _, batch in zip(range(repeats), loader, strict=False))

    def select(repeats: int) -> Iterator[object]:
        return (batch for _, batch in zip(range(repeats), permuted(data, size), strict=False))

    most = len(data) // size  # one epoch
    slots = {"ours": ours, "DataLoader": plain, "index_select": select}
    return {name: Slot(slot_of(batches).run, 1.0, most) for name, batches in slots.items()}


def permuted(data: TensorDataset, size: int) -> Iterator[list[Tensor]]:
    """Yields the batches of one epoch as fast as plain torch can: sorted positions of a permutation, index_select."""
    for index in torch.randperm(len(data)).split(size):
        positions = index.sort().values
        yield [t.index_select(0, positions) for t in data.tensors]


def gather_table(records: int, rounds: int) -> str:
    data = TensorDataset(torch.randn(records, WIDTH), torch.randn(records, 1))
    found = figures(interleaved(gather_slots(data, min(BATCH, records)), rounds), "DataLoader")
    rows = [
        [name, f"{digits(milliseconds)} ms", cell(ratio)]
        for name, (ratio, milliseconds) in found.items()
    ]
    return table(
        [f"batch of {BATCH} of {records:,} x {WIDTH}", "a batch", "ratio to DataLoader"], rows
    )


def tables(*, smoke: bool, rounds: int) -> dict[str, str]:
    """Returns the tables "draws" and "gathering"."""
    sizes = (1000,) if smoke else (10**5, *DRAW_GOALS)
    gathered = gather_table(1000 if smoke else RECORDS, rounds)
    return {"draws": draw_table(sizes, rounds), "gathering": gathered}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--smoke", action="store_true", help="few records")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    print(machine(args.rounds))
    for name, text in tables(smoke=args.smoke, rounds=args.rounds).items():
        print(f"\n{name}\n\n{text}")


if __name__ == "__main__":
    main()
