"""CPU time of estimators' `fit` beside scikit-learn's, on made-up tables, after a first fit of each.

    python benchmarks/estimators.py                     # five estimators, six sizes or fewer: some minutes
    python benchmarks/estimators.py --kinds ridge huber --sizes 100000x50 1000000x20 --rounds 9
    python benchmarks/estimators.py --grid              # n = 1e3 to 1e6, d = 5 to 500, tables of up to 5e7 numbers
    python benchmarks/estimators.py --smoke             # tiny tables, which show that it runs and mean nothing

Ours spends epsilon = 1 at delta = 1e-7, with its defaults; scikit-learn's has its own. One thread each; rows are
float32, in which scikit-learn's Ridge computes, and ours in float64. Quantile regression of scikit-learn takes minutes
beyond 10,000 rows, and is left out there.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable

import numpy as np
import torch
from sklearn import linear_model
from timing import digits, machine, table

from torch_dpsco import estimators

SIZES = ("1000x20", "10000x20", "100000x5", "100000x50", "20000x500", "1000000x20")
GRID = tuple(f"{n}x{d}" for n in (10**3, 10**4, 10**5, 10**6) for d in (5, 20, 50, 500))
MOST, MOST_OF_SLOW = (
    5 * 10**7,
    5 * 10**6,
)  # numbers of a table; of those that scikit-learn is slow for
KINDS = ("logistic", "ridge", "huber", "quantile", "softmax")
SLOW = ("quantile", "softmax")
Fit = Callable[[], object]


def made(kind: str, n: int, d: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows of norm at most 1, and targets that follow a linear model."""
    draw = np.random.default_rng(0)
    rows = draw.standard_normal((n, d)).astype(np.float32)
    rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1)
    scores = rows @ draw.standard_normal(d) * 2
    if kind == "logistic":
        return rows, (scores + draw.logistic(size=n) > 0).astype(int)
    if kind == "softmax":
        scores = rows @ draw.standard_normal((d, 5)) * 3
        return rows, np.argmax(scores + draw.gumbel(size=(n, 5)), axis=1)
    return rows, np.clip(scores + 0.3 * draw.standard_normal(n), -3, 3)


def fits(kind: str, n: int, d: int) -> tuple[Fit, Fit | None]:
    """Returns a fit of ours, and scikit-learn's, or None where that is too slow."""
    rows, targets = made(kind, n, d)
    ours = {"epsilon": 1.0, "delta": 1e-7, "n": n, "bound_x": 1.0}
    real = ours | {"bound_y": 3.0}
    own, other = {
        "logistic": (
            lambda: estimators.LogisticRegression(**ours, classes=(0, 1)),
            lambda: linear_model.LogisticRegression(max_iter=300),
        ),
        "softmax": (
            lambda: estimators.SoftmaxRegression(**ours, classes=tuple(range(5))),
            lambda: linear_model.LogisticRegression(max_iter=300),
        ),
        "ridge": (lambda: estimators.Ridge(**real), linear_model.Ridge),
        "huber": (lambda: estimators.HuberRegressor(**real), linear_model.HuberRegressor),
        "quantile": (
            lambda: estimators.QuantileRegressor(**real),
            linear_model.QuantileRegressor,
        ),
    }[kind]
    slow = (kind == "quantile" and n > 10_000) or (kind in SLOW and n * d > MOST_OF_SLOW)
    return (
        lambda: own().fit(rows, targets),
        None if slow else lambda: other().fit(rows, targets),
    )


def seconds(fit: Fit | None) -> float:
    """Returns the CPU seconds of a call; NaN for none."""
    if fit is None:
        return float("nan")
    start = time.process_time()
    fit()
    return time.process_time() - start


def line(kind: str, size: str, rounds: int) -> list[str]:
    """Returns a line of the table."""
    n, d = (int(number) for number in size.split("x"))
    own, other = fits(kind, n, d)
    own()
    turns = [(seconds(own), seconds(other)) for _ in range(rounds)]
    ours, theirs = (statistics.median(times) for times in zip(*turns, strict=True))
    ratio = "-" if other is None else digits(statistics.median(a / b for a, b in turns))
    beside = "-" if other is None else f"{digits(1e3 * theirs)} ms"
    return [kind, f"{n:,} x {d}", f"{digits(1e3 * ours)} ms", beside, ratio]


def main(arguments: list[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--grid", action="store_true")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--sizes", nargs="+", default=SIZES)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args(arguments)
    sizes = GRID if chosen.grid else chosen.sizes
    if chosen.smoke:
        sizes = ("500x3",)
        chosen.rounds = 1
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    lines = []
    for kind in chosen.kinds:
        for size in sizes:
            n, d = (int(number) for number in size.split("x"))
            if n * d <= (MOST_OF_SLOW if kind in SLOW else MOST):
                lines.append(line(kind, size, chosen.rounds))
    print(machine(chosen.rounds))
    print(table(["estimator", "table", "ours", "scikit-learn", "ratio"], lines))


if __name__ == "__main__":
    main()
