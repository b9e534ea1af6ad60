"""What accounting costs in time, and what schemes of sampling cost in epsilon.

    python benchmarks/accountant.py            # times, beside Opacus' RDP and PRV accountants in the same run
    python benchmarks/accountant.py --table    # epsilon per sampling scheme, adjacency and conversion
    python benchmarks/accountant.py --smoke    # short histories

Times are medians of several rounds, one thread. The table is that of docs/accounting.md: n = 60000, batches of 256,
235 steps an epoch, delta = 1e-5.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Sequence

import timing
from opacus.accountants import IAccountant, PRVAccountant, RDPAccountant
from timing import digits

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


def times(*, smoke: bool = False) -> list[tuple[str, float, str]]:
    """Returns (what, milliseconds, goal) per row."""
    step, noises = PoissonGaussian(1.0, RATE), 3 if smoke else 1000
    accountant = Accountant(adjacency="add_remove")
    accountant.record(step, STEPS)
    many = Accountant(adjacency="add_remove")
    for k in range(noises):
        many.record(PoissonGaussian(1.0 + k / 1000, RATE), 1000)
    opacus = RDPAccountant()

    def one_step(one: IAccountant) -> None:
        one.step(noise_multiplier=1.0, sample_rate=RATE)

    def one_more(one: Accountant) -> object:
        one.record(step)
        return one.get_epsilon(DELTA)

    def full_batches() -> None:
        full = Accountant(adjacency="add_remove")
        for k in range(noises):
            full.record(Gaussian(30.0 + k / 1000, CLIP_UNITS))
        full.get_epsilon(DELTA)

    target = iter(1.0 + k / 100 for k in range(1, 100))  # nothing of an earlier call can be used again
    return [
        ("step(), times 1000", median_ms(lambda: [one_step(accountant) for _ in range(1000)]), ""),
        ("Opacus RDPAccountant.step(), times 1000", median_ms(lambda: [one_step(opacus) for _ in range(1000)]), ""),
        (
            "get_epsilon by Renyi divergences, of a new (noise, rate)",
            median_ms(fresh(lambda: Ledger([step]).epsilon(DELTA, "add_remove", "rdp"))),
            "<= 2",
        ),
        ("get_epsilon, the same question again", median_ms(lambda: accountant.get_epsilon(DELTA)), "<= 1"),
        (
            "get_epsilon after one more step, one noise (loss distribution)",
            median_ms(lambda: one_more(accountant)),
            "<= 1",
        ),
        (f"get_epsilon, {noises} noises x 1000 steps, first query", median_ms(lambda: many.get_epsilon(DELTA), 1), ""),
        (f"get_epsilon after one more step, {noises} noises", median_ms(lambda: one_more(many)), "<= 1"),
        ("full batches, new noises, with a query: a step", median_ms(fresh(full_batches), 3) / noises, "<= 0.02"),
        (
            "calibration of the noise",
            median_ms(
                lambda: noise_multiplier(
                    next(target), DELTA, design=Poisson(BATCH, N), steps=10 * STEPS, adjacency="add_remove"
                ),
                3,
            ),
            "",
        ),
        *conversions(),
    ]


def conversions() -> list[tuple[str, float, str]]:
    """Returns the rows of loss distributions, and of Opacus' accountants."""
    rows = []
    for grid in (1e-3, 1e-4):
        noise = iter(1.0 + k / 100 for k in range(1, 100))  # nothing of an earlier call can be used again
        call = median_ms(lambda n=noise, g=grid: pld_epsilon([(PoissonLoss(RATE, next(n)), STEPS)], DELTA, grid=g))
        rows.append((f"privacy loss distribution, grid {grid:g}", call, ""))
    for kind in (RDPAccountant, PRVAccountant):
        theirs = kind()
        theirs.history = [(1.0, RATE, STEPS)]
        call = median_ms(lambda t=theirs: t.get_epsilon(delta=DELTA))
        rows.append((f"Opacus {kind.__name__}.get_epsilon", call, ""))
    return rows


def tables(*, smoke: bool) -> dict[str, str]:
    """Returns the table "accountant"."""
    rows = [(what, digits(milliseconds), goal) for what, milliseconds, goal in times(smoke=smoke)]
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
    parser.add_argument("--smoke", action="store_true", help="short histories")
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
    for name, milliseconds, _ in times(smoke=args.smoke):
        print(f"{name:<64} {milliseconds:10.3f} ms")


if __name__ == "__main__":
    main()
