"""What accounting costs in time, and what schemes of sampling cost in epsilon.

    python benchmarks/accountant.py            # times, beside Opacus' RDP and PRV accountants in the same run
    python benchmarks/accountant.py --table    # epsilon per sampling scheme, adjacency and conversion
    python benchmarks/accountant.py --smoke    # short histories

Times are CPU time, medians of several rounds, one thread. The table is that of docs/accounting.md: n = 60000, batches
of 256, 235 steps an epoch, delta = 1e-5.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence

import timing
from opacus.accountants import PRVAccountant, RDPAccountant
from timing import digits

from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.analysis.pld import pld_epsilon
from torch_dpsco.accounting.analysis.pld_laws import PoissonLoss
from torch_dpsco.accounting.calibrate import noise_multiplier
from torch_dpsco.accounting.curves import cost_of
from torch_dpsco.accounting.designs import Poisson
from torch_dpsco.accounting.events import (
    CLIP_UNITS,
    Gaussian,
    PoissonGaussian,
    RandomAllocation,
    Repeat,
    WORGaussian,
)
from torch_dpsco.accounting.ledger import Ledger

N, BATCH, STEPS, DELTA = 60_000, 256, 235, 1e-5
RATE = BATCH / N
NOISES, EPOCHS = (0.6, 1.0, 2.0), (1, 10)


def median_ms(call: Callable[[], object], rounds: int) -> float:
    """Returns the median CPU time of a call in milliseconds."""
    times = []
    for _ in range(rounds):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return 1e3 * statistics.median(times)


def fresh(calls: Callable[[], object]) -> Callable[[], object]:
    """Returns the call without what was computed for an earlier one."""

    def run() -> object:
        cost_of.cache_clear()
        return calls()

    return run


def calls(noises: int) -> list[tuple[str, Callable[[], object], str, int]]:
    """Returns what is measured, in order: (what, call, goal in ms, least rounds)."""
    step = PoissonGaussian(1.0, RATE)
    short, alike, many = (Accountant(adjacency="add_remove") for _ in range(3))
    short.record(step, STEPS)
    alike.record(step, 1000)
    for k in range(noises):
        many.record(PoissonGaussian(1.0 + k / 1000, RATE), 1000)
    opacus = RDPAccountant()
    target = iter(
        1.0 + k / 100 for k in range(1, 100)
    )  # nothing of an earlier call can be used again

    def records() -> None:
        for _ in range(1000):
            short.record(step)

    def steps() -> None:
        for _ in range(1000):
            opacus.step(noise_multiplier=1.0, sample_rate=RATE)

    def one_more(one: Accountant) -> None:
        one.record(step)
        one.get_epsilon(DELTA)

    def full_batches() -> None:
        full = Accountant(adjacency="add_remove")
        for k in range(100):
            full.record(Gaussian(30.0 + k / 1000, CLIP_UNITS))
        full.get_epsilon(DELTA)

    def calibration() -> None:
        noise_multiplier(
            next(target),
            DELTA,
            design=Poisson(BATCH, N),
            steps=10 * STEPS,
            adjacency="add_remove",
        )

    def schedule() -> None:
        varied = Accountant(adjacency="add_remove")
        for k in range(20 * noises):
            varied.authorize(PoissonGaussian(1.1 + k / 10_000, RATE))
        varied.get_epsilon(DELTA)

    first = fresh(lambda: Ledger([step]).epsilon(DELTA, "add_remove", "rdp"))
    return [
        ("record(step), times 1000", records, "", 3),
        ("Opacus RDPAccountant.step(), times 1000", steps, "", 3),
        ("get_epsilon by Renyi divergences, of a new (noise, rate)", first, "<= 2", 7),
        ("get_epsilon, the same question again", lambda: short.get_epsilon(DELTA), "<= 1", 7),
        (
            "get_epsilon after one more step, 1 noise (loss distribution)",
            lambda: one_more(alike),
            "<= 2",
            7,
        ),
        (
            f"{20 * noises} different noises, charged one by one, with a query",
            fresh(schedule),
            "<= 1000",
            3,
        ),
        (
            f"get_epsilon of {noises} noises x 1000 steps, first time",
            lambda: many.get_epsilon(DELTA),
            "",
            1,
        ),
        (
            f"get_epsilon after one more step, {noises} noises (Renyi)",
            lambda: one_more(many),
            "<= 1",
            7,
        ),
        ("100 full batches of new noises, with a query", fresh(full_batches), "<= 2", 7),
        ("calibration of the noise", calibration, "", 3),
        *conversions(),
    ]


def conversions() -> list[tuple[str, Callable[[], object], str, int]]:
    """Returns the rows of loss distributions, and of Opacus' accountants."""
    rows = []
    for grid in (1e-3, 1e-4):
        noise = iter(
            1.0 + k / 100 for k in range(1, 100)
        )  # nothing of an earlier call can be used again

        def composed(noise: Iterator[float] = noise, grid: float = grid) -> float:
            return pld_epsilon([(PoissonLoss(RATE, next(noise)), STEPS)], DELTA, grid=grid)

        rows.append((f"privacy loss distribution, grid {grid:g}", composed, "", 7))
    for kind in (RDPAccountant, PRVAccountant):
        theirs = kind()
        theirs.history = [(1.0, RATE, STEPS)]
        rows.append(
            (
                f"Opacus {kind.__name__}.get_epsilon",
                lambda t=theirs: t.get_epsilon(delta=DELTA),
                "",
                7,
            )
        )
    return rows


def tables(*, smoke: bool) -> dict[str, str]:
    """Returns the table "accountant"."""
    rows = []
    for what, call, goal, rounds in calls(noises=100 if smoke else 1000):
        rows.append((what, digits(median_ms(call, 1 if smoke else rounds)), goal))
    return {"accountant": timing.table(["what", "ms", "goal, ms"], rows)}


def table() -> list[tuple[str, list[float]]]:
    """Returns epsilon per scheme, in the order of (epochs, noise)."""
    cells = [(epochs, noise) for epochs in EPOCHS for noise in NOISES]

    def row(event: Callable[[float], object], adjacency: str, method: str) -> list[float]:
        figures = []
        for epochs, noise in cells:
            ledger = Ledger()
            ledger.add(event(noise), epochs * STEPS)
            figures.append(ledger.epsilon(DELTA, adjacency, method))
        return figures

    def poisson(noise: float) -> PoissonGaussian:
        return PoissonGaussian(noise, RATE)

    def allocated(adjacency: str) -> list[float]:
        events = [Repeat(RandomAllocation(noise, STEPS), epochs) for epochs, noise in cells]
        return [Ledger([event]).epsilon(DELTA, adjacency, "pld") for event in events]

    def fixed(noise: float) -> WORGaussian:
        return WORGaussian(noise, BATCH, N)

    def passes(adjacency: str) -> list[float]:
        return [
            Ledger([Gaussian(noise, CLIP_UNITS)] * epochs).epsilon(DELTA, adjacency)
            for epochs, noise in cells
        ]

    return [
        ("Poisson, add/remove, loss distribution", row(poisson, "add_remove", "pld")),
        ("Poisson, add/remove, Renyi", row(poisson, "add_remove", "rdp")),
        ("Poisson, replace-one, loss distribution", row(poisson, "replace_one", "pld")),
        ("Poisson, replace-one, Renyi", row(poisson, "replace_one", "rdp")),
        (
            "random allocation, add/remove or zero-out, loss distribution",
            allocated("add_remove"),
        ),
        ("random allocation, replace-one, loss distribution", allocated("replace_one")),
        ("fixed batches, replace-one, loss distribution", row(fixed, "replace_one", "pld")),
        ("fixed batches, replace-one, Renyi", row(fixed, "replace_one", "rdp")),
        ("shuffled passes, zero-out, exact", passes("zero_out")),
        ("shuffled passes, replace-one, exact", passes("replace_one")),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the times, or the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="short histories")
    parser.add_argument(
        "--table", action="store_true", help="epsilon per sampling scheme instead of times"
    )
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")  # Opacus on its range of orders
    if args.table:
        heads = [f"{epochs} ep, {noise:g}" for epochs in EPOCHS for noise in NOISES]
        print("| scheme, adjacency, method | " + " | ".join(heads) + " |")
        print("|---" * (len(heads) + 1) + "|")
        for name, figures in table():
            print(f"| {name} | " + " | ".join(f"{figure:.4g}" for figure in figures) + " |")
        return
    print(tables(smoke=args.smoke)["accountant"])


if __name__ == "__main__":
    main()
