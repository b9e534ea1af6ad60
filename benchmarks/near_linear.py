"""User level in near-linear time: whose risk bound is lower, at which numbers of users and rows?

The table of docs/research.md.

    python benchmarks/near_linear.py            # two minutes
    python benchmarks/near_linear.py --smoke    # one size: shows that it runs

Bounds on the expected excess risk, in units of G R, for convex losses with gradients of rows of norm at most G, that
are G/R-smooth, users with m i.i.d. rows, a start at distance R; a replaced user, epsilon = 2, delta = 1e-6. All
constants are proved in this project; docs/research.md#user-level-in-near-linear-time derives the formulas.

* clipped: gradient descent on all users, whose means need no clip below G (`UserClippedSGD`);
* one pass: a pass over batches of users in secret (`UserClippedSGD`, sampling="assigned"), no test;
* filtered: clipped with filtered means (`UserFilteredSGD`), as many steps as the bound wants, up to 10,000;
* iterates: phases; groups of users run SGD once over their rows, and the mean of their answers is filtered and
  released: one release for each phase (the linear-time idea of Lowy, Liu, Asi 2024);
* loop: phases of SGD on batches of users whose means are filtered, with one release at the end of each (the idea of
  Ghazi, Kumar, Liu, Manurangsi 2026), as if a user could move the step of its own batch only: nothing is charged for
  what later tests see of it. A proof can only make this larger.

"rows" is the bound without privacy, sqrt(2/(nm)). The last two columns say how many groups the best bound of iterates
has, and how many steps that of loop.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from torch_dpsco.accounting.analysis.allocation import allocation_noise
from torch_dpsco.accounting.analysis.gaussian import gaussian_mu
from torch_dpsco.algorithms.user_numbers import calibrate_filter, pair_radius_iid
from torch_dpsco.errors import InfeasibleError

EPSILON, DELTA, HALT, MOST_STEPS = 2.0, 1e-6, 1e-4, 10_000
SIZES = tuple((n, m) for n in (1000, 10_000, 100_000) for m in (10, 100, 1000, 10_000, 100_000))
DIMS = (10, 100)
HALTED = 2.0 * HALT  # G times the diameter, times the probability of a halt


class Bound(NamedTuple):
    """A bound on the excess risk, and the number of groups of users, or of steps, that it has."""

    risk: float
    parts: int = 0


@functools.cache
def filter_noise(users: int, steps: int) -> float:
    """Returns the noise std of each filtered mean over the pair radius; inf where no test is accepted."""
    try:
        plan = calibrate_filter(
            n_users=users,
            steps=steps,
            epsilon=EPSILON,
            delta=DELTA,
            pair_radius=1.0,
            score_share=1.0,
            halt_probability=HALT,
        )
    except InfeasibleError:
        return math.inf
    return plan.noise_std


def horizon(noise: float, rows: float) -> float:
    """Returns h = eta T that minimizes 1/(2h) + h (noise^2/2 + 1/rows)."""
    return 1.0 / math.sqrt(noise**2 + 2.0 / rows)


def clipped(n: int, m: int, dim: int) -> Bound:
    """Returns the bound of descent on means of users without a test."""
    noise = math.sqrt(dim) * 2.0 / (n * gaussian_mu(EPSILON, DELTA))
    return Bound(1.0 / horizon(noise, n * m))


@functools.cache
def pass_noise(steps: int) -> float:
    """Returns the noise multiplier of a pass over so many batches."""
    return allocation_noise(EPSILON, DELTA, steps, "replace_one")


def one_pass(n: int, m: int, dim: int) -> Bound:
    """Returns the least bound over numbers of batches and step sizes of one pass of SGD."""
    best = Bound(math.inf)
    for steps in (4**k for k in range(7) if 4**k <= n):
        batch = n / steps
        variance = 1.0 / (batch * m) + dim * (pass_noise(steps) / batch) ** 2
        own = phased([0.0], [steps], variance, 1.0, dim)
        best = min(best, Bound(own, steps))
    return best


def filtered(n: int, m: int, dim: int) -> Bound:
    """Returns the bound of descent on filtered means, with the number of steps that it wants."""
    steps = MOST_STEPS
    for _ in range(4):
        radius = pair_radius_iid(1.0, m, n, HALT / steps)
        noise = math.sqrt(dim / steps) * radius * filter_noise(n, steps)
        if noise == math.inf:
            return Bound(math.inf)
        steps = max(1, min(MOST_STEPS, math.ceil(horizon(noise, n * m))))
    h = min(float(steps), horizon(noise, n * m))
    return Bound(1.0 / (2.0 * h) + h * (noise**2 / 2.0 + 1.0 / (n * m)) + HALTED)


def phased(
    noise: Sequence[float], steps: Sequence[float], variance: float, most: float, dim: int
) -> float:
    """Returns the least bound of phases of SGD with steps eta, eta/c, eta/c^2 .., noise added after each.

    Args:
        noise: std of each phase over its step size.
        steps: of each phase.
        variance: of a stochastic gradient.
        most: largest eta: 1 where the variance is that of a mean, 2 where it bounds the whole gradient.
        dim: d.
    """
    eta, shrink = (a.ravel() for a in np.meshgrid(most * 0.7 ** np.arange(60), (2.0, 4.0, 8.0)))
    risk, square = (
        np.zeros(len(eta)),
        np.ones(len(eta)),
    )  # squared distance to what a phase is compared with
    for i, (std, count) in enumerate(zip(noise, steps, strict=True)):
        size = eta / shrink**i
        risk += square / (2.0 * size * count) + size * variance / 2.0
        square = dim * (size * std) ** 2
    return float((risk + np.minimum(np.sqrt(square), square / 2.0)).min())


def grid(least: float, most: float) -> Iterator[int]:
    """Yields whole numbers, 1.3 times as large each."""
    value = least
    while value <= most:
        yield math.floor(value)
        value *= 1.3


@functools.cache
def least_users() -> int:
    """Returns the least number whose one test is accepted."""
    low, high = 4, 10**6
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if filter_noise(middle, 1) < math.inf else (middle, high)
    return high


def iterates(n: int, m: int, dim: int) -> Bound:
    """Returns the least bound over groups, phases and step sizes; answers of groups are filtered."""
    best = Bound(math.inf)
    for groups in grid(least_users(), n / 2):
        most = int(math.log2(n / groups))
        for phases in range(1, max(1, min(8, most)) + 1):
            users = [n // 2 ** (i + 1) if phases > 1 else n for i in range(phases)]
            steps = [u // groups * m for u in users]
            if min(steps) < 1:
                continue
            pairs = groups * (groups - 1) / 2
            spread = math.sqrt(4 / 3) * (1 + math.sqrt(math.log(pairs / HALT)))
            noise = [spread * math.sqrt(count) * filter_noise(groups, 1) for count in steps]
            risk = phased(noise, steps, 1.0, 2.0, dim)
            best = min(best, Bound(risk + phases * HALTED, groups))
    return best


def loop(n: int, m: int, dim: int) -> Bound:
    """Returns the least bound over batches, phases and step sizes; means of users are filtered in each step."""
    best = Bound(math.inf)
    for batch in grid(least_users(), n / 2):
        for phases in range(1, max(1, min(8, int(math.log2(n / batch)))) + 1):
            users = [n // 2 ** (i + 1) if phases > 1 else n for i in range(phases)]
            steps = [u // batch for u in users]
            if min(steps) < 1:
                continue
            radius = pair_radius_iid(1.0, m, batch, HALT / sum(steps))
            noise = [radius * filter_noise(batch, 1)] * phases
            risk = phased(noise, steps, 1.0 / (batch * m), 1.0, dim)
            best = min(best, Bound(risk + phases * HALTED, sum(steps)))
    return best


def shown(value: float) -> str:
    """Returns a bound; what is not below that of the start, 1, says nothing."""
    return "-" if value == math.inf else f"{value:.2g}" if value < 1 else "> 1"


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="one size: shows that it runs")
    smoke = parser.parse_args(argv).smoke
    print(f"least number of users, groups or batches that one test accepts: {least_users()}\n")
    print(
        "| d | n | m | rows | clipped | one pass | filtered | iterates | loop | groups | steps |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for dim in DIMS[: 1 if smoke else None]:
        for n, m in SIZES[1 : 2 if smoke else None] if smoke else SIZES:
            found = [
                method(n, m, dim) for method in (clipped, one_pass, filtered, iterates, loop)
            ]
            risks = [math.sqrt(2.0 / (n * m)), *(bound.risk for bound in found)]
            parts = [str(bound.parts or "-") for bound in found[3:]]
            cells = [str(dim), str(n), str(m), *map(shown, risks), *parts]
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
