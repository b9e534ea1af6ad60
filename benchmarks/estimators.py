"""CPU time of `LogisticRegression.fit` beside scikit-learn's, on made-up tables, after a first fit of each.

    python benchmarks/estimators.py            # 32,000 x 65 and 327,000 x 42, medians of 5 turns: half a minute
    python benchmarks/estimators.py --smoke    # tiny tables, which show that it runs and mean nothing

Ours spends epsilon = 1 at delta = 1e-6, with its defaults; scikit-learn's has C = 1. One thread each.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression as Plain
from timing import digits, machine, table

from torch_dpsco.estimators import LogisticRegression

SIZES = ((32_000, 65), (327_000, 42))


def made(n: int, d: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows of norm 1 and labels that follow a logistic model."""
    draw = np.random.default_rng(0)
    rows = draw.normal(size=(n, d))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    chance = 1.0 / (1.0 + np.exp(-rows @ (3.0 * draw.normal(size=d))))
    return rows, (draw.random(n) < chance).astype(float)


def seconds(fit: Callable[[], object]) -> float:
    """Returns the CPU seconds of a call."""
    start = time.process_time()
    fit()
    return time.process_time() - start


def main(arguments: list[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args(arguments)
    sizes, rounds = (((500, 3),), 1) if chosen.smoke else (SIZES, chosen.rounds)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    lines = []
    for n, d in sizes:
        rows, labels = made(n, d)

        def ours(rows: np.ndarray = rows, labels: np.ndarray = labels, n: int = n) -> object:
            return LogisticRegression(
                epsilon=1.0,
                delta=1e-6,
                adjacency="add_remove",
                n=n,
                bound_x=1.0,
                classes=(0.0, 1.0),
            ).fit(rows, labels)

        def plain(rows: np.ndarray = rows, labels: np.ndarray = labels) -> object:
            return Plain().fit(rows, labels)

        ours()
        plain()
        turns = [(seconds(ours), seconds(plain)) for _ in range(rounds)]
        own, other = (statistics.median(times) for times in zip(*turns, strict=True))
        ratio = statistics.median(a / b for a, b in turns)
        lines.append([f"{n:,} x {d}", f"{digits(own)} s", f"{digits(other)} s", digits(ratio)])
    print(machine(rounds))
    print(table(["table", "ours", "scikit-learn", "ratio"], lines))


if __name__ == "__main__":
    main()
