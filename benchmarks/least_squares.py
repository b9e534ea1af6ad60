"""Ridge by its mechanisms on the regression tables for development, R2 on held-out rows: a table of docs/choosing.md.

    python benchmarks/least_squares.py               # about two minutes on one core
    python benchmarks/least_squares.py --smoke       # rows that are made up, one run: shows that it runs

add_remove, delta = 1e-6, the unit is a row; medians of runs with fresh noise. AdaSSP and its boosted form get the
bounds of tables.py. The numbers of `estimators.least_squares` were chosen on these tables; accuracy.py has others.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Sequence

import numpy as np
from sklearn.linear_model import LinearRegression
from table_parts import Table
from tables import TABLES

from torch_dpsco.errors import UtilityWarning
from torch_dpsco.estimators import Ridge

NAMES = ("diamonds", "flights_delay", "food", "earnings", "batters")
MECHANISMS = ("boosted_adassp", "adassp")
EPSILONS, RUNS = (0.1, 0.3, 1.0, 3.0), 5


def score(table: Table, epsilon: float, mechanism: str, runs: int) -> str:
    """Returns the median R2 of a mechanism."""
    rows, targets = table.rows[~table.test], table.targets[~table.test]
    public = {"adjacency": "add_remove", "bound_x": table.bound_x, "bound_y": table.bound_y}
    model = Ridge(epsilon=epsilon, n=len(rows), mechanism=mechanism, **public)
    fits = (
        model.fit(rows, targets).score(table.rows[table.test], table.targets[table.test])
        for _ in range(runs)
    )
    return f"{statistics.median(fits):.3f}"


def made_up() -> Table:
    """Returns 4,000 rows on a plane, with noise."""
    rng = np.random.default_rng(0)
    rows = rng.uniform(0, 1, size=(4000, 3))
    targets = rows @ [1.0, -1.0, 2.0] + 0.1 * rng.standard_normal(4000)
    return Table(
        "made up", "develop", rows, targets, np.arange(4000) % 5 == 0, bound_x=1.8, bound_y=10.0
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true")
    smoke = parser.parse_args(argv).smoke
    warnings.simplefilter("ignore", UtilityWarning)
    cells = " | ".join(f"{epsilon:g}" for epsilon in EPSILONS)
    print(
        f"| {' / '.join(MECHANISMS)}, epsilon = | {cells} | not private |\n|{'---|' * (len(EPSILONS) + 2)}"
    )
    for table in [made_up()] if smoke else [TABLES[name]() for name in NAMES]:
        train, test = ~table.test, table.test
        plain = LinearRegression().fit(table.rows[train], table.targets[train])
        found = [
            " / ".join(
                score(table, epsilon, mechanism, 1 if smoke else RUNS)
                for mechanism in MECHANISMS
            )
            for epsilon in EPSILONS
        ]
        reached = plain.score(table.rows[test], table.targets[test])
        print(
            f"| {table.name} (n = {np.sum(train):,}, d = {table.rows.shape[1]}) | {' | '.join(found)} | {reached:.3f} |"
        )


if __name__ == "__main__":
    main()
