"""How often 95 % intervals of private logistic regression hold the truth, and naive ones: six cells; of others: three.

    python benchmarks/interval_coverage.py                        # all cells, 1,000 fits each; minutes
    python benchmarks/interval_coverage.py --cells made_1000 adult --fits 100
    python benchmarks/interval_coverage.py --cells limits         # around the limit where intervals are refused

Naive intervals are those of the released coefficients with the standard errors of a fit without privacy. The truth of a
made table is what made it; that of a real one (see tables.py, `pip install '.[benchmarks]'`) is the fit without
regularizer to the whole table, from which each fit gets n records drawn with replacement. Fits have the noise of the
plan and numpy's draws and solver, which is quicker; tests/statistics has the coverage of the estimator itself.
Ridge is the estimator itself.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from torch_dpsco.errors import ConditionError
from torch_dpsco.estimators import LogisticRegression, Ridge
from torch_dpsco.estimators.objective import ObjectivePlan
from torch_dpsco.statistics.debiased import debias
from torch_dpsco.statistics.summary import reach

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
    truth: tuple[float, ...] = ()  # of a made table, with the intercept; chosen if it is empty


CELLS = {
    "made_1000": Cell("made", 1_000, 2, 3.0),
    "made_10000": Cell("made", 10_000, 5, 0.5),
    "made_50000": Cell("made", 50_000, 10, 0.3),
    "abortion": Cell("abortion", 5_000, (0, 1, 2, 3), 3.0),
    "votes": Cell("votes", 10_000, (0, 1, 2, 3, 4), 1.0),
    "adult": Cell("adult", 50_000, (0, 1, 4), 0.5),
}

RIDGES = {
    "ridge_1000": Cell("made", 1_000, 2, 3.0),
    "ridge_5000": Cell("made", 5_000, 5, 1.0),
    "ridge_flights": Cell("flights_delay", 50_000, (38, 40), 1.0),
}


_STEEP, _USUAL, _FLAT, _RARE = (
    (6.0, -3.0, 0.0, 0.3),
    (2.0, -1.0, 0.0, 0.3),
    (0.5, 0.0, 0.3),
    (1.0, 1.0, -4.0),
)
LIMITS = {
    f"{name}_{n}_{epsilon:g}": Cell("made", n, len(truth) - 1, epsilon, truth)
    for name, truth, sizes in (
        (
            "steep",
            _STEEP,
            ((3000, 1.0), (5000, 1.0), (7000, 1.0), (10000, 1.0), (2000, 3.0), (5000, 3.0)),
        ),
        ("usual", _USUAL, ((1000, 1.0), (2000, 1.0), (5000, 1.0), (500, 3.0), (5000, 0.3))),
        ("flat", _FLAT, ((500, 1.0), (1000, 1.0), (300, 3.0))),
        ("none", (0.0,) * 7, ((2000, 1.0), (3000, 1.0), (1000, 3.0))),
        ("rare", _RARE, ((5000, 1.0), (10000, 1.0), (3000, 3.0))),
    )
    for n, epsilon in sizes
}
REAL_LIMITS = {
    f"{name}_{n}_{epsilon:g}": Cell("made", n, 2, epsilon)
    for name in ("ridge", "huber")
    for n, epsilon in ((300, 1.0), (500, 1.0), (1000, 1.0))
}


def fitted(
    rows: Array, labels: Array, start: Array, linear: Array | float = 0.0, reg: float = 0.0
) -> Array:
    """Returns the minimizer for rows with a constant, a linear term and a regularizer: Newton's method, not private."""
    weights = start.copy()
    for _ in range(50):
        hessian, gradient = _derivatives(rows, labels, weights)
        step = np.linalg.solve(
            hessian + reg * np.eye(len(weights)), gradient + linear + reg * weights
        )
        weights -= step
        if np.abs(step).max() < 1e-8:
            return weights
    raise ArithmeticError("no convergence")


def _derivatives(rows: Array, labels: Array, weights: Array) -> tuple[Array, Array]:
    chance = 1 / (1 + np.exp(-rows @ weights))
    return (rows * (chance * (1 - chance))[:, None]).T @ rows, rows.T @ (chance - labels)


def coverage(cell: Cell, fits: int, seed: int = 0) -> tuple[Array, Array, int]:
    """Returns how often each coefficient was in its interval and in its naive one, and how many fits had none."""
    generator = np.random.default_rng(seed)
    if isinstance(cell.features, int):
        dim, truth = (
            cell.features,
            np.array(cell.truth or (*np.linspace(-2, 2, cell.features), 0.3)),
        )
    else:
        table = getattr(table_rows, cell.table)()
        rows, labels = 2 * table.rows[:, cell.features] - 1, table.targets
        rows = np.column_stack([rows, np.ones(len(rows))])
        dim, truth = rows.shape[1] - 1, fitted(rows, labels, np.zeros(rows.shape[1]))
    held, naive, refused = np.zeros(dim + 1), np.zeros(dim + 1), 0
    plan = cast(
        ObjectivePlan,
        LogisticRegression(
            epsilon=cell.epsilon,
            adjacency="add_remove",
            n=cell.n,
            bound_x=math.sqrt(dim),
            classes=(0, 1),
            intervals=0.3,
        ).plan(dim),
    )
    std, size = plan.hessian_scale, dim + 1
    for _ in range(fits):
        if isinstance(cell.features, int):
            part = np.column_stack([generator.uniform(-1, 1, (cell.n, dim)), np.ones(cell.n)])
            y = generator.random(cell.n) < 1 / (1 + np.exp(-part @ truth))
        else:
            chosen = generator.integers(0, len(rows), cell.n)
            part, y = rows[chosen], labels[chosen]
        weights = fitted(part, y, truth, generator.normal(0, plan.noise_scale, size), plan.reg)
        weights += generator.normal(0, plan.output_scale, size)
        noise = np.triu(generator.normal(0, std / math.sqrt(2), (size, size)), 1)
        noise += noise.T + np.diag(generator.normal(0, std, size))
        hessian = _derivatives(part, y, weights)[0] + noise
        try:
            found = debias(
                torch.from_numpy(weights),
                torch.from_numpy(hessian),
                reg=plan.reg,
                noise_std=plan.noise_scale,
                output_std=plan.output_scale,
                hessian_std=std,
                rate=plan.task.preparation.bound,
            )
        except ConditionError:
            refused += 1
            continue
        without = found.sampling.diagonal().numpy()
        error = np.sqrt(without + found.noise.diagonal().numpy())
        held += np.abs(found.estimate.numpy() - truth) <= reach(0.95, found.distance) * error
        naive += np.abs(weights - truth) <= _Z * np.sqrt(without)
    done = max(fits - refused, 1)
    return held / done, naive / done, refused


def real_coverage(
    cell: Cell, model: Ridge, fits: int, seed: int = 0
) -> tuple[Array, Array, int]:
    """Returns the same of a regression.

    A made table has errors of 0.3 times a normal law.
    """
    generator = np.random.default_rng(seed)
    if isinstance(cell.features, int):
        dim, truth = cell.features, np.append(np.linspace(-0.5, 0.5, cell.features), 0.1)
    else:
        table = getattr(table_rows, cell.table)()
        rows, targets = 2 * table.rows[:, cell.features] - 1, np.clip(table.targets, -2.0, 2.0)
        rows = np.column_stack([rows, np.ones(len(rows))])
        dim, truth = rows.shape[1] - 1, np.linalg.lstsq(rows, targets, rcond=None)[0]
    model.set_params(epsilon=cell.epsilon, n=cell.n, bound_x=math.sqrt(dim))
    held, naive, refused = np.zeros(dim + 1), np.zeros(dim + 1), 0
    for _ in range(fits):
        if isinstance(cell.features, int):
            part = np.column_stack([generator.uniform(-1, 1, (cell.n, dim)), np.ones(cell.n)])
            y = part @ truth + 0.3 * generator.normal(size=cell.n)
        else:
            chosen = generator.integers(0, len(rows), cell.n)
            part, y = rows[chosen], targets[chosen]
        try:
            found = model.fit(part[:, :-1], y).summary()
        except ConditionError:
            refused += 1
            continue
        held += (found.intervals[:, 0] <= truth) & (truth <= found.intervals[:, 1])
        naive += np.abs(found.released - truth) <= _Z * found.standard_errors * np.sqrt(
            1 - found.privacy
        )
    done = max(fits - refused, 1)
    return held / done, naive / done, refused


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one line per cell: mean coverage, the least of a coefficient, and the naive mean."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cells = CELLS | RIDGES
    every = cells | LIMITS | REAL_LIMITS
    parser.add_argument("--cells", nargs="+", choices=[*every, "limits"], default=[*cells])
    parser.add_argument("--fits", type=int, default=1000)
    parser.add_argument("--smoke", action="store_true", help="one cell, a few fits")
    given = parser.parse_args(arguments)
    if given.smoke:
        given.cells, given.fits = ["made_1000", "ridge_1000"], 5
    if "limits" in given.cells:
        given.cells = [*LIMITS, *REAL_LIMITS]
    print(
        "| cell | n | features | epsilon | coverage | least of a coefficient | naive | refused |\n|---|"
        + "---|" * 7
    )
    for name in given.cells:
        cell = every[name]
        if name in CELLS | LIMITS:
            held, naive, refused = coverage(cell, given.fits)
        else:
            ridge = Ridge(adjacency="add_remove", bound_y=2.0, intervals=0.05)
            held, naive, refused = real_coverage(cell, ridge, given.fits)
        print(
            f"| {name} | {cell.n} | {len(held) - 1} | {cell.epsilon:g} | {100 * held.mean():.1f} % | "
            f"{100 * held.min():.1f} % | {100 * naive.mean():.1f} % | {refused} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
