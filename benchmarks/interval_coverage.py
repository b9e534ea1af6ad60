"""How often 95 % intervals of private logistic regression hold the truth, and naive ones: six cells.

    python benchmarks/interval_coverage.py                        # all cells, 1,000 fits each; half an hour
    python benchmarks/interval_coverage.py --cells made_1000 adult --fits 100

Naive intervals are those of the released coefficients with the standard errors of a fit without privacy. The truth of a
made table is what made it; that of a real one (see tables.py, `pip install '.[benchmarks]'`) is the fit without
regularizer to the whole table, from which each fit gets n records drawn with replacement.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torch_dpsco.errors import ConditionError
from torch_dpsco.estimators import LogisticRegression

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import table_rows

Array = NDArray[np.float64]
_Z = 1.959964


class Cell(NamedTuple):
    """A table, records per fit, features (how many, or which columns in [0, 1]), epsilon."""

    table: str
    n: int
    features: int | tuple[int, ...]
    epsilon: float


CELLS = {
    "made_1000": Cell("made", 1_000, 2, 3.0),
    "made_10000": Cell("made", 10_000, 5, 0.5),
    "made_50000": Cell("made", 50_000, 10, 0.3),
    "abortion": Cell("abortion", 5_000, (0, 1, 2, 3), 3.0),
    "votes": Cell("votes", 10_000, (0, 1, 2, 3, 4), 1.0),
    "adult": Cell("adult", 50_000, (0, 1, 4), 0.5),
}


def fitted(rows: Array, labels: Array) -> Array:
    """Returns the weights without privacy or regularizer, of rows with a constant: Newton's method."""
    weights = np.zeros(rows.shape[1])
    for _ in range(50):
        chance = 1 / (1 + np.exp(-rows @ weights))
        hessian = (rows * (chance * (1 - chance))[:, None]).T @ rows
        step = np.linalg.solve(hessian, rows.T @ (labels - chance))
        weights += step
        if np.abs(step).max() < 1e-12:
            return weights
    raise ArithmeticError("no convergence")


def coverage(cell: Cell, fits: int, seed: int = 0) -> tuple[Array, Array, int]:
    """Returns how often each coefficient was in its interval and in its naive one, and how many fits had none."""
    generator = np.random.default_rng(seed)
    if isinstance(cell.features, int):
        dim, truth = cell.features, np.append(np.linspace(-2, 2, cell.features), 0.3)
    else:
        table = getattr(table_rows, cell.table)()
        rows, labels = 2 * table.rows[:, cell.features] - 1, table.targets
        dim, truth = rows.shape[1], fitted(np.column_stack([rows, np.ones(len(rows))]), labels)
    held, naive, refused = np.zeros(dim + 1), np.zeros(dim + 1), 0
    model = LogisticRegression(epsilon=cell.epsilon, n=cell.n, bound_x=math.sqrt(dim), classes=(0, 1), intervals=0.3)
    for _ in range(fits):
        if isinstance(cell.features, int):
            part = generator.uniform(-1, 1, (cell.n, dim))
            y = generator.random(cell.n) < 1 / (1 + np.exp(-part @ truth[:dim] - truth[dim]))
        else:
            chosen = generator.integers(0, len(rows), cell.n)
            part, y = rows[chosen], labels[chosen]
        try:
            found = model.fit(part, y.astype(int)).summary()
        except ConditionError:
            refused += 1
            continue
        low, high = found.intervals.T
        held += (low <= truth) & (truth <= high)
        without = found.standard_errors * np.sqrt(1 - found.privacy)
        naive += np.abs(found.released - truth) <= _Z * without
    done = fits - refused
    return held / done, naive / done, refused


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one line per cell: mean coverage, the least of a coefficient, and the naive mean."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS))
    parser.add_argument("--fits", type=int, default=1000)
    given = parser.parse_args(arguments)
    print("| cell | n | features | epsilon | coverage | least of a coefficient | naive | refused |\n|---|" + "---|" * 7)
    for name in given.cells:
        cell = CELLS[name]
        held, naive, refused = coverage(cell, given.fits)
        print(
            f"| {name} | {cell.n} | {len(held) - 1} | {cell.epsilon:g} | {100 * held.mean():.1f} % | "
            f"{100 * held.min():.1f} % | {100 * naive.mean():.1f} % | {refused} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
