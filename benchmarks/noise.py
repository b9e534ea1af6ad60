"""What a Gaussian number costs: torch's generator, the keystream's numbers, and exact ones in integers.

    python benchmarks/noise.py
    python benchmarks/noise.py --smoke    # tiny

CPU time of one call that draws d numbers, per number; medians over rounds in which all take turns, one thread.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import timing
import torch
from timing import digits

from torch_dpsco.accounting.analysis.rounding import exact_grid, with_grid
from torch_dpsco.noise import Keystream, normal_
from torch_dpsco.step.exact_noise import release_on_grid

SIZES = (1, 100, 10_000, 100_000, 1_000_000)
HEADS = (
    "numbers",
    "torch `normal_`, float32",
    "keystream, float32",
    "keystream, float64",
    "exact",
    "exact / keystream",
)


def draws(size: int) -> dict[str, Callable[[], object]]:
    """Returns what takes turns for that many numbers."""
    single, double, source = (
        torch.empty(size),
        torch.zeros(size, dtype=torch.float64),
        Keystream(),
    )
    grid = exact_grid(1.0, with_grid(0.1), size)
    return {
        "torch": single.normal_,
        "float32": lambda: normal_(single, 1.0, source),
        "float64": lambda: normal_(double, 1.0, source),
        "exact": lambda: release_on_grid(double, grid, source),
    }


def tables(*, smoke: bool = False, rounds: int = 7) -> dict[str, str]:
    """Returns the table of docs/performance.md."""
    rows = []
    for size in (1, 100) if smoke else SIZES:
        slots = {name: timing.in_process(draw) for name, draw in draws(size).items()}
        found = timing.figures(timing.interleaved(slots, rounds), "float64")
        each = [f"{digits(1e6 * milliseconds / size)} ns" for _, milliseconds in found.values()]
        rows.append((f"{size:,}", *each, timing.cell(found["exact"][0])))
    return {"noise": timing.table(HEADS, rows)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--smoke", action="store_true", help="tiny: shows that it runs, measures nothing"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(timing.machine(7))
    print(tables(smoke=args.smoke, rounds=2 if args.smoke else 7)["noise"])


if __name__ == "__main__":
    main()
