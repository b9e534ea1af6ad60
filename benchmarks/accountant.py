"""What accounting costs in time, and what schemes of sampling cost in epsilon.

    python benchmarks/accountant.py            # times, beside Opacus' RDP and PRV accountants in the same run
    python benchmarks/accountant.py --table    # epsilon per sampling scheme, adjacency and conversion

Times are medians of several rounds, one thread. The table is that of docs/accounting.md: n = 60000, batches of 256,
235 steps an epoch, delta = 1e-5.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Sequence

from opacus.accountants import IAccountant, PRVAccountant, RDPAccountant

from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.analysis.pld import pld_epsilon
from torch_dpsco.accounting.analysis.pld_loss import PoissonLoss
from torch_dpsco.accounting.calibrate import noise_multiplier
from torch_dpsco.accounting.curves import cost_of
from torch_dpsco.accounting.designs import Poisson
from torch_dpsco.accounting.events import CLIP_UNITS, Gaussian, PoissonGaussian, WORGaussian
from torch_dpsco.accounting.ledger import Ledger

N, BATCH, STEPS, DELTA = 60_000, 256, 235, 1e-5
RATE = BATCH / N
NOISES, EPOCHS = (0.6, 1.0, 2.0), (1, 10)


def median_ms(call: Callable[[], object], rounds: int = 7) -> float:
    """Returns the median time of a call in milliseconds."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def fresh(calls: Callable[[], object]) -> Callable[[], object]:
    """Returns the call without what was computed for an earlier one."""

    def run() -> object:
        cost_of.cache_clear()
        return calls()

    return run


def times() -> list[tuple[str, float]]:
    """Returns (what, milliseconds) per row."""
    step = PoissonGaussian(1.0, RATE)
    accountant = Accountant(adjacency="add_remove")
    accountant.record(step, STEPS)
    many = Accountant(adjacency="add_remove")
    for k in range(1000):
        many.record(PoissonGaussian(1.0 + k / 1000, RATE), 1000)
    opacus = RDPAccountant()

    def one_step(one: IAccountant) -> None:
        one.step(noise_multiplier=1.0, sample_rate=RATE)

    target = iter(1.0 + k / 100 for k in range(1, 100))  # nothing of an earlier call can be used again
    rows = [
        ("step(), times 1000", median_ms(lambda: [one_step(accountant) for _ in range(1000)])),
        ("Opacus RDPAccountant.step(), times 1000", median_ms(lambda: [one_step(opacus) for _ in range(1000)])),
        (
            "get_epsilon, first query (Renyi)",
            median_ms(fresh(lambda: Ledger([step]).epsilon(DELTA, "add_remove", "rdp"))),
        ),
        ("get_epsilon, cached", median_ms(lambda: accountant.get_epsilon(DELTA))),
        ("10^6 steps of 1000 noises, first query", median_ms(lambda: many.get_epsilon(DELTA), 1)),
        ("the same after one more step", median_ms(lambda: (many.record(step), many.get_epsilon(DELTA)))),
        (
            "calibration of the noise",
            median_ms(
                lambda: noise_multiplier(
                    next(target), DELTA, design=Poisson(BATCH, N), steps=10 * STEPS, adjacency="add_remove"
                ),
                3,
            ),
        ),
    ]
    for grid in (1e-3, 1e-4):
        noise = iter(1.0 + k / 100 for k in range(1, 100))  # nothing of an earlier call can be used again
        rows.append(
            (
                f"privacy loss distribution, grid {grid:g}",
                median_ms(lambda n=noise, g=grid: pld_epsilon([(PoissonLoss(RATE, next(n)), STEPS)], DELTA, grid=g)),
            )
        )
    for kind in (RDPAccountant, PRVAccountant):
        theirs = kind()
        theirs.history = [(1.0, RATE, STEPS)]
        rows.append((f"Opacus {kind.__name__}.get_epsilon", median_ms(lambda t=theirs: t.get_epsilon(delta=DELTA))))
    return rows


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

    def fixed(noise: float) -> WORGaussian:
        return WORGaussian(noise, BATCH, N)

    def passes(adjacency: str) -> list[float]:
        return [Ledger([Gaussian(noise, CLIP_UNITS)] * epochs).epsilon(DELTA, adjacency) for epochs, noise in cells]

    return [
        ("Poisson, add/remove, loss distribution", row(poisson, "add_remove", "pld")),
        ("Poisson, add/remove, Renyi", row(poisson, "add_remove", "rdp")),
        ("Poisson, replace-one, loss distribution", row(poisson, "replace_one", "pld")),
        ("Poisson, replace-one, Renyi", row(poisson, "replace_one", "rdp")),
        ("fixed batches, replace-one, loss distribution", row(fixed, "replace_one", "pld")),
        ("fixed batches, replace-one, Renyi", row(fixed, "replace_one", "rdp")),
        ("shuffled passes, zero-out, exact", passes("zero_out")),
        ("shuffled passes, replace-one, exact", passes("replace_one")),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the times, or the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--table", action="store_true", help="epsilon per sampling scheme instead of times")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")  # Opacus on its range of orders
    if args.table:
        heads = [f"{epochs} ep, {noise:g}" for epochs in EPOCHS for noise in NOISES]
        print("| scheme, adjacency, method | " + " | ".join(heads) + " |")
        print("|---" * (len(heads) + 1) + "|")
        for name, figures in table():
            print(f"| {name} | " + " | ".join(f"{figure:.4g}" for figure in figures) + " |")
        return
    for name, milliseconds in times():
        print(f"{name:<45} {milliseconds:10.3f} ms")


if __name__ == "__main__":
    main()
