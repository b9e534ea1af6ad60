"""Noise and excess risk of user-level methods, through the public interface: the figures of docs/user_level.md.

    python benchmarks/user_level_risk.py --noise     # the filter's proved noise beside clipping's, seconds
    python benchmarks/user_level_risk.py --risk      # excess risk against m and n with slopes, some minutes
    python benchmarks/user_level_risk.py --far       # a mean far from the start: where the filter wins, seconds
    python benchmarks/user_level_risk.py --smoke     # --risk without the filter, few users: shows that it runs

The task of --risk: features uniform on the unit sphere of R^10, logistic labels of weights of norm 6, i.i.d. users;
population excess risk on 200,000 fresh rows, epsilon = 2, delta = 1e-6, replace_one, all users in each step. EVERY
method is tuned by looking: the best of a few (clip or pair radius, step size) by the score itself, whose cost is not
charged; medians of a few data sets. Pair radii are multiples of 1/sqrt(m), where means of m items are.

The task of --far: squared distance to the users' values, which are within 1 of each other, 0 to 50 away from the start;
the error of the answer, by budget of the same size. "clipped" knows the distance, and clips at it plus 1, once;
"filtered" has one step, and pair radius 1.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

sys.path.insert(
    0, str(Path(__file__).parents[1])
)  # for published formulas, which the tests have
import torch_dpsco as dp
from tests.reference.papers.user_level import (
    break_even_clip,
    clipping_noise_std,
    published_noise_std,
)
from torch_dpsco.algorithms.user_numbers import calibrate_filter
from torch_dpsco.errors import InfeasibleError, UtilityWarning

NOISE = (
    (2000, 100, 1.0, 1e-6),
    (2000, 1000, 1.0, 1e-6),
    (10**4, 1000, 1.0, 1e-6),
    (10**5, 1000, 1.0, 1e-6),
    (2000, 1000, 4.0, 1e-6),
    (1000, 50, 8.0, 1e-5),
)
DIM, NORM, TEST_ROWS = 10, 6.0, 200_000
EPSILON, DELTA = 2.0, 1e-6
BUDGET = dp.Budget(EPSILON, DELTA, adjacency="replace_one", unit="user")
STEPS, LRS, FILTER_LRS = 30, (16.0, 48.0), (4.0, 16.0)
CLIPS, RADII = (0.5, 1.0), (1.2, 1.6)  # both over sqrt(m)
Grids = tuple[int, int, tuple[int, ...], tuple[int, ...]]
GRIDS: Grids = (
    1000,
    20,
    (5, 20, 80),
    (500, 1000, 2000, 4000),
)  # n where m varies, m where n varies, all m, all n
SMALL_GRIDS: Grids = (300, 2, (2,), (300,))
LOSS, SUM = nn.BCEWithLogitsLoss(), nn.BCEWithLogitsLoss(reduction="sum")

Fit = Callable[[TensorDataset, Tensor, int, int], Iterator[Tensor]]


def print_noise() -> None:
    """Prints sigma n/tau of the published formula, of the proved one, and of the Gaussian alone at 2 tau/n."""
    print(
        f"{'n':>8}{'T':>6}{'epsilon':>9}{'delta':>8}{'published':>11}{'proved':>9}{'no test':>9}{'clip = ... tau':>16}"
    )
    for n, steps, epsilon, delta in NOISE:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UtilityWarning)  # that it is no proved calibration
            published = published_noise_std(n, steps, epsilon, delta, 1.0)
        budget = {"n_users": n, "steps": steps, "epsilon": epsilon, "delta": delta}
        plan = calibrate_filter(**budget, pair_radius=1.0, score_share=1.0)
        least = clipping_noise_std(**budget, clip=1.0)
        even = break_even_clip(plan, epsilon, delta)
        row = f"{n:>8}{steps:>6}{epsilon:>9g}{delta:>8g}"
        print(
            f"{row}{published * n:>11.0f}{plan.noise_std * n:>9.4g}{least * n:>9.4g}{even:>16.2f}"
        )


def draw(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns features on the sphere and the logits behind their labels."""
    x = nn.functional.normalize(torch.randn(rows, DIM, generator=generator), dim=1)
    return x, NORM * x[:, 0]


def made(n: int, m: int, seed: int) -> tuple[TensorDataset, Tensor]:
    """Returns the rows of n users with m items each, and whose they are."""
    generator = torch.Generator().manual_seed(seed)
    x, logit = draw(n * m, generator)
    y = (torch.rand(n * m, generator=generator) < torch.sigmoid(logit)).float()
    return TensorDataset(x, y[:, None]), torch.arange(n).repeat_interleave(m)


def excess(weight: Tensor, test: tuple[Tensor, Tensor]) -> float:
    """Returns the risk above the least one, labels integrated out."""
    x, logit = test
    score, chance = (
        x.double() @ weight.detach().double().reshape(-1),
        torch.sigmoid(logit.double()),
    )
    return float((_cross_entropy(score, chance) - _cross_entropy(logit.double(), chance)).mean())


def _cross_entropy(score: Tensor, chance: Tensor) -> Tensor:
    return nn.functional.softplus(score) - chance * score


# -- methods: each yields the answers of its grid ---------------------------------------------------------------------


def clipped(data: TensorDataset, users: Tensor, n: int, m: int) -> Iterator[Tensor]:
    for clip, lr in itertools.product(CLIPS, LRS):
        model = _model()
        numbers = {"clip": clip / math.sqrt(m), "lr": lr, "steps": STEPS, "average": "weighted"}
        plan = dp.UserClippedSGD.plan(n=n, budget=BUDGET, **numbers)
        optimizer = dp.UserClippedSGD(model.parameters(), plan)
        yield dp.fit(
            model, optimizer, data, SUM, users=users, loss_reduction="sum", progress=False
        ).weight


def filtered(data: TensorDataset, users: Tensor, n: int, m: int) -> Iterator[Tensor]:
    for radius, lr in itertools.product(RADII, FILTER_LRS):
        model = _model()
        tau = radius / math.sqrt(m)
        plan = dp.UserFilteredSGD.plan(
            n=n, budget=BUDGET, steps=STEPS, pair_radius=tau, lr=lr, average="weighted"
        )
        optimizer = dp.UserFilteredSGD(model.parameters(), plan)
        yield dp.fit(
            model, optimizer, data, SUM, users=users, loss_reduction="sum", progress=False
        ).weight


def public(data: TensorDataset, users: Tensor, n: int, m: int) -> Iterator[Tensor]:
    """Not private: the minimizer on the data."""
    x, y = data.tensors
    w = torch.zeros(DIM, 1, requires_grad=True)
    optimizer = torch.optim.LBFGS([w], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = LOSS(x @ w, y)
        loss.backward()
        return loss.detach()

    optimizer.step(closure)
    yield w


def _model() -> nn.Linear:
    model = nn.Linear(DIM, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


METHODS: dict[str, Fit] = {"clipped": clipped, "filtered": filtered, "not private": public}


def risk(name: str, n: int, m: int, runs: int, test: tuple[Tensor, Tensor]) -> float | None:
    """Returns the best median over the grid; None if nothing is proved for so few users."""
    try:
        rows = [
            [excess(w, test) for w in METHODS[name](*made(n, m, seed), n, m)]
            for seed in range(runs)
        ]
    except InfeasibleError:
        return None
    return min(statistics.median(column) for column in zip(*rows, strict=True))


def slope(sizes: Sequence[int], found: Sequence[float | None]) -> str:
    """Returns the least-squares slope on log-log of what there is, if it is two points or more."""
    points = [
        (math.log(size), math.log(value))
        for size, value in zip(sizes, found, strict=True)
        if value
    ]
    if len(points) < 2:
        return "-"
    return f"{statistics.linear_regression(*zip(*points, strict=True)).slope:.2f}"


def print_risk(names: Sequence[str], runs: int, grids: Grids = GRIDS) -> None:
    test = draw(TEST_ROWS, torch.Generator().manual_seed(10**6))
    print(
        f"excess risk, epsilon = {EPSILON:g}, {STEPS} steps; zero has {excess(torch.zeros(DIM), test):.3f}"
    )
    users, items, grid_m, grid_n = grids
    for title, sizes, cell in (
        (f"m, at n = {users}", grid_m, lambda size: (users, size)),
        (f"n, at m = {items}", grid_n, lambda size: (size, items)),
    ):
        print(f"\n{title:<16}" + "".join(f"{size:>12}" for size in sizes) + f"{'slope':>8}")
        for name in names:
            found = [risk(name, *cell(size), runs, test) for size in sizes]
            shown = "".join(
                f"{'infeasible' if value is None else f'{value:.2g}':>12}" for value in found
            )
            print(f"{name:<16}{shown}{slope(sizes, found):>8}", flush=True)


# -- far from the start -----------------------------------------------------------------------------------------------


def far_fit(name: str, n: int, dim: int, away: float) -> float:
    """Returns the distance of a private answer from the mean of the users' values."""
    generator = torch.Generator().manual_seed(0)
    values = nn.functional.normalize(torch.randn(n, dim, generator=generator), dim=1) / 2
    values[:, 0] += away
    model = nn.Linear(1, dim, bias=False)
    nn.init.zeros_(model.weight)
    shared = {"n": n, "budget": BUDGET, "lr": 1.0}
    optimizer: dp.PrivateOptimizer
    if name == "filtered":
        plan = dp.UserFilteredSGD.plan(
            n=n, budget=BUDGET, steps=1, pair_radius=1.0, lr=1.0, average="last"
        )
        optimizer = dp.UserFilteredSGD(model.parameters(), plan)
    else:
        optimizer = dp.UserClippedSGD(
            model.parameters(), dp.UserClippedSGD.plan(clip=away + 1, steps=1, **shared)
        )
    data = TensorDataset(torch.ones(n, 1), values)
    dp.fit(
        model,
        optimizer,
        data,
        _half_square,
        users=torch.arange(n),
        loss_reduction="sum",
        progress=False,
    )
    return float((model.weight.detach().squeeze(1) - values.mean(0)).norm())


def _half_square(answer: Tensor, values: Tensor) -> Tensor:
    return 0.5 * (answer - values).square().sum()


def print_far(runs: int) -> None:
    names = ("clipped", "filtered")
    print(f"{'n':>7}{'d':>6}{'away':>6}" + "".join(f"{name:>11}" for name in names))
    for n, dim, away in itertools.product((2000, 10_000), (10, 200), (0.0, 5.0, 50.0)):
        found = [
            statistics.median(far_fit(name, n, dim, away) for _ in range(runs)) for name in names
        ]
        print(
            f"{n:>7}{dim:>6}{away:>6g}" + "".join(f"{error:>11.3g}" for error in found),
            flush=True,
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--noise", action="store_true", help="proved noise beside the published one"
    )
    parser.add_argument("--risk", action="store_true", help="excess risk against m and n")
    parser.add_argument("--far", action="store_true", help="a mean far from the start")
    parser.add_argument("--method", choices=(*METHODS, "all"), default="all", help="of --risk")
    parser.add_argument("--runs", type=int, default=2, help="data sets of each size")
    parser.add_argument("--smoke", action="store_true", help="--risk with few users")
    args = parser.parse_args(argv)
    if args.smoke:
        print_risk(["clipped", "not private"], 1, SMALL_GRIDS)
        return
    if not (args.noise or args.risk or args.far):
        parser.error("give --noise, --risk or --far")
    if args.noise:
        print_noise()
    if args.risk:
        print_risk(list(METHODS) if args.method == "all" else [args.method], args.runs)
    if args.far:
        print_far(args.runs)


if __name__ == "__main__":
    main()
