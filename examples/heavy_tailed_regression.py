"""Private regression of flight delays on a feature without any bound: the clip comes from a pilot, not from a guess.

    python examples/heavy_tailed_regression.py             # nine methods, five runs each, eps = 1, two minutes
    python examples/heavy_tailed_regression.py --quick     # 20,000 flights and one run each, for a smoke test

The delay at departure is known and, unlike in `flights.py`, NOT clipped: some flights left a day late. So no row has a
bounded norm and no loss a Lipschitz constant; what may be promised is a second moment. The ways:

* theorem: accelerated SGD, one pass. Steps, clip and step size from the promised moment. It is covered by a theorem,
  which prepares for the worst distribution with this moment: a large clip, hence much noise.
* one pass, accelerated; one pass: as many steps, the step size that the promised smoothness allows, and the clip from
  a private quantile of the gradient norms of a pilot group. No other choice.
* minibatches: Poisson batches and such a pilot; passes, steps and step size by default, from the noise.
* passes, one or ten, with the promised moment as clip: batches that are known ("shuffled"), so that a pass costs one
  release without amplification; or secret ("assigned", "allocated"): each flight draws its batch by itself, and the
  noise for the same epsilon is several times less.
* localized: the ABSOLUTE loss itself, with its kink, in phases of at most 50 steps on all records of the phase.

Chosen in public: the loss (a flight counts as late from 15 minutes on), the promises below, and REG, a value that did
well on SYNTHETIC data. The promises are round guesses from the list of columns; wrong ones cost accuracy, not privacy.
Looked at, so that you know: that the guesses hold on these flights (6.1 and 2.3).
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from flights import NUM_FEATURES, SPLIT_SEED, TEST_SHARE, Flights, encode, read_records
from linear_regression import THRESHOLD, errors, fit_huber
from pictures import bars
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp

EPSILON, DELTA = 1.0, 1e-6
ADJACENCY = "replace_one"  # one pass and phases are cut by position
WIDTH = NUM_FEATURES["atdep"]
RUNS, QUICK_ROWS = 5, 20_000
ROW_MEAN_SQUARE = 7.0  # E|x|^2 with the bias: five ones, and 2 for clock, distance and delay together
# of E x x^T, at most the sum over groups of columns: 1 (bias), a level's share per one-hot (as if all were equally
# frequent), and 1 for the numbers
SMOOTHNESS = 2.0 + 1 / 12 + 1 / 7 + 1 / 16 + 1 / 3
DISTANCE = 2.0  # of the answer from the start: 1 for "as late as it left", and as much again
LARGEST_CLIP = 10.0  # no gradient that matters is larger: 0.25 |x| of a flight that left 40 hours late
REG, MAX_STEPS, MIN_PHASE = 0.05, 50, 2000

PROBLEM = dp.Problem(smoothness=SMOOTHNESS, moment=THRESHOLD * math.sqrt(ROW_MEAN_SQUARE), moment_order=2.0)
HUBER, ABSOLUTE = dp.losses.Huber(threshold=THRESHOLD), dp.losses.Absolute()
Build = Callable[[nn.Module, dict], dp.PrivateOptimizer]


def load_unclipped() -> Flights:
    """Returns the rows of `load_flights`, its split too, with the delay at departure in hours as it is."""
    records = read_records()
    known = records[records["arr_delay"].notna()]
    features = encode(known)
    features[:, WIDTH - 1] = np.nan_to_num(known["dep_delay"].to_numpy(dtype=np.float64) / 60)
    rows = torch.from_numpy(features.astype(np.float32))
    hours = torch.from_numpy((known["arr_delay"].to_numpy() / 60).astype(np.float32))
    order = torch.from_numpy(np.random.default_rng(SPLIT_SEED).permutation(len(known)))
    test, train = order[: len(known) // TEST_SHARE], order[len(known) // TEST_SHARE :]
    return Flights(rows[train], hours[train], rows[test], hours[test])


def planned_steps(setting: dict) -> int:
    """Returns the number of batches of one pass that the theorem chooses for the promised moment."""
    return dp.AcceleratedSGD.plan(problem=PROBLEM, distance=DISTANCE, **setting).steps


def theorem(model: nn.Module, setting: dict) -> dp.PrivateOptimizer:
    """One pass, all numbers from the promises."""
    plan = dp.AcceleratedSGD.plan(problem=PROBLEM, distance=DISTANCE, **setting)
    return dp.AcceleratedSGD(model.parameters(), plan)


def accelerated(model: nn.Module, setting: dict) -> dp.PrivateOptimizer:
    """One accelerated pass, the clip by the theory's quantile."""
    clip = dp.Pilot(rule="theory", c_max=LARGEST_CLIP)
    plan = dp.AcceleratedSGD.plan(
        problem=PROBLEM, steps=planned_steps(setting), clip=clip, sampling="shuffled", **setting
    )
    return dp.AcceleratedSGD(model.parameters(), plan)


def plain(model: nn.Module, setting: dict) -> dp.PrivateOptimizer:
    """One pass of plain SGD."""
    clip = dp.Pilot(c_max=LARGEST_CLIP)
    plan = dp.ClippedSGD.plan(problem=PROBLEM, steps=planned_steps(setting), clip=clip, sampling="shuffled", **setting)
    return dp.ClippedSGD(model.parameters(), plan)


def minibatches(model: nn.Module, setting: dict) -> dp.PrivateOptimizer:
    """Many passes over random batches."""
    clip = dp.Pilot(c_max=LARGEST_CLIP)
    plan = dp.ClippedSGD.plan(problem=PROBLEM, sampling="poisson", clip=clip, **setting)
    return dp.ClippedSGD(model.parameters(), plan)


def passes(model: nn.Module, setting: dict, **sampling: object) -> dp.PrivateOptimizer:
    """One pass, or several, with a clip that is promised."""
    plan = dp.ClippedSGD.plan(problem=PROBLEM, clip=PROBLEM.moment, **sampling, **setting)
    return dp.ClippedSGD(model.parameters(), plan)


def localized(model: nn.Module, setting: dict) -> dp.PrivateOptimizer:
    """Phases of subgradient steps; a pilot in each phase."""
    plan = dp.LocalizedSGD.plan(
        clip=dp.Pilot(c_max=4 * LARGEST_CLIP),  # slopes of the absolute loss are 1, not 0.25
        reg=REG,
        max_steps=MAX_STEPS,
        min_phase=MIN_PHASE,
        **setting,
    )
    return dp.LocalizedSGD(model.parameters(), plan)


METHODS: dict[str, tuple[Build, nn.Module]] = {
    "theorem": (theorem, HUBER),
    "one pass, accelerated": (accelerated, HUBER),
    "one pass": (plain, HUBER),
    "minibatches": (minibatches, HUBER),
    "one pass, known batches": (partial(passes, sampling="shuffled"), HUBER),
    "one pass, secret batches": (partial(passes, sampling="assigned"), HUBER),
    "ten passes, known batches": (partial(passes, sampling="shuffled", epochs=10), HUBER),
    "ten passes, secret batches": (partial(passes, sampling="allocated", epochs=10), HUBER),
    "localized, absolute loss": (localized, ABSOLUTE),
}


def train(name: str, dataset: TensorDataset, epsilon: float) -> tuple[nn.Module, dp.PrivateOptimizer]:
    """Returns a private model, and the optimizer that knows what was spent."""
    build, loss = METHODS[name]
    model = nn.Linear(WIDTH, 1)
    for p in model.parameters():
        nn.init.zeros_(p)
    # n is public under replace_one
    budget = dp.Budget(epsilon, DELTA, adjacency=ADJACENCY)
    optimizer = build(model, {"n": len(dataset), "budget": budget, "dim": model})
    return dp.fit(model, optimizer, dataset, loss, progress=False), optimizer


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Trains, prints test errors beside those of the non-private fit, and returns the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=(*METHODS, "all"), default="all")
    parser.add_argument("--epsilon", type=float, default=EPSILON)
    parser.add_argument("--runs", type=int, default=RUNS, help="of each method; their median is shown")
    parser.add_argument("--quick", action="store_true", help="20,000 flights and one run each")
    args = parser.parse_args(argv)

    data, runs = load_unclipped(), args.runs
    if args.quick:
        data = data._replace(train_features=data.train_features[:QUICK_ROWS], train_hours=data.train_hours[:QUICK_ROWS])
        runs = 1
    dataset = TensorDataset(data.train_features, data.train_hours[:, None])

    def mae(predicted: Tensor) -> float:
        return errors(predicted.detach(), data.test_hours)[0]

    print(f"{f'{len(data.test_hours):,} flights to predict':<34}{'steps':>7}{'MAE (h)':>10}{'of all runs':>20}")
    figures: dict[str, float] = {}
    for name in METHODS if args.method == "all" else (args.method,):
        found: list[float] = []
        for _ in range(runs):
            model, optimizer = train(name, dataset, args.epsilon)
            found.append(mae(model(data.test_features)))
        figures[f"{name}_epsilon"] = optimizer.report().epsilon
        figures[f"{name}_mae"] = statistics.median(found)
        spread = f"{min(found):.4f} to {max(found):.4f}"
        print(f"{name:<34}{optimizer.steps:>7}{figures[f'{name}_mae']:>10.4f}{spread:>20}", flush=True)
    public = {
        "as late as it left, nothing learned": data.test_features[:, WIDTH - 1],
        "Huber's loss, not private": nn.functional.pad(data.test_features.double(), (0, 1), value=1.0)
        @ fit_huber(data.train_features, data.train_hours),
    }
    for name, predicted in public.items():
        figures[f"{name}_mae"] = mae(predicted)
        print(f"{name:<41}{figures[f'{name}_mae']:>10.4f}")
    print(f"\nof each model: {optimizer.report().headline}")
    print("Runs were repeated to show their spread; whoever publishes several gives all of them one Accountant.")
    bars("mean absolute error (hours)", figures, "_mae")
    return figures


if __name__ == "__main__":
    main()
