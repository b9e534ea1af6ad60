"""Whole aircraft protected, not single flights: user-level clipping, and the outlier filter.

    python examples/user_level.py                 # two losses x four methods, eps = 2 each, under a minute
    python examples/user_level.py --items all     # all flights of an aircraft, ragged numbers, in place of 50
    python examples/user_level.py --quick         # 10 flights each and few steps, for a smoke test
    python examples/user_level.py --plot x.png    # draws the noise against the flights per aircraft (needs matplotlib)

A user is an aircraft (tail number) with all its flights. The universe is declared: aircraft with at least 50 flights of
known delay; their number, 2,086, is public, and the guarantee is for one of them replaced by another, with all its
flights. Predicted are the flights of the aircraft outside of the universe, which are taken as public.

* clipped: each aircraft's mean gradient is clipped, and noise goes with the clip. The default recommendation.
* filtered: a noisy test whether aircraft agree, then the mean of those that do; noise goes with the pair radius.
* localized: the filter in phases on disjoint aircraft, of a strongly convex loss; at most half in each.

All constants below are public. Those of the filter are guesses: a flight's gradient is about 1 long (a slope times a
row of norm about 2) and varies as much, so that means of 50 flights are some 0.2 apart; aircraft differ, and the
farthest pairs are a few times farther: 1, and 1.5 where the slope is a delay in hours. A wrong pair radius costs
accuracy, never privacy: too small, and the test halts the run. Looked at, so that you know: clips, step sizes, steps
and both pair radii, in a few runs of each method (clipping: about ten) on these very flights. What such
a choice would cost is not charged.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from flights import COLUMNS, NUM_FEATURES, ROW_NORM_BOUND, _installed_file, encode
from pictures import bars
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from torch_dpsco.accounting.analysis.gaussian import gaussian_mu
from torch_dpsco.algorithms.user_numbers import calibrate_filter, pair_radius_iid

EPSILON, DELTA = 2.0, 1e-6
ADJACENCY = "replace_one"  # the only one that the filter on all users has
LEAST, QUICK_ITEMS, QUICK_STEPS = 50, 10, 3  # flights that make an aircraft part of the universe
WIDTH, LATE = NUM_FEATURES["predep"], 0.25  # hours: a flight counts as late from 15 minutes on
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "logistic": nn.BCEWithLogitsLoss(),
    "squared": dp.losses.Squared(),  # of the delay itself, however long: clipping and filter need no bound
}
SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "logistic": nn.BCEWithLogitsLoss(reduction="sum"),
    "squared": partial(dp.losses.Squared(), reduction="sum"),
}
STEPS, LR = 60, {"logistic": 4.0, "squared": 1.0}
CLIP = 0.2
PAIR_RADIUS = {"logistic": 1.0, "squared": 1.5}  # of means of LEAST flights
FILTER_STEPS, FILTER_LR = 20, {"logistic": 4.0, "squared": 0.4}  # the more steps, the more noise in each
REG, RADIUS = 0.01, 7.0  # of the strongly convex loss, and of the answer: a guess
LIPSCHITZ = {"logistic": ROW_NORM_BOUND["predep"], "squared": 3 * ROW_NORM_BOUND["predep"]}  # 3 hours; for steps only


class Fleet(NamedTuple):
    """Rows of the universe, with the aircraft that each belongs to, in [0, n_users), and public test rows."""

    features: Tensor
    hours: Tensor
    users: Tensor
    n_users: int
    test_features: Tensor
    test_hours: Tensor


def load_fleet(items: int | None = LEAST) -> Fleet:
    """Returns at most `items` flights of each aircraft of the universe, drawn at random; None for all of them."""
    records = pd.read_csv(_installed_file(), usecols=[*COLUMNS, "tailnum"])
    known = records[records["arr_delay"].notna()]
    counts = known["tailnum"].value_counts()
    names = sorted(counts.index[counts >= LEAST])  # the declared universe
    owners = pd.Index(names).get_indexer(known["tailnum"])
    features = torch.from_numpy(encode(known)[:, :WIDTH].astype(np.float32))
    hours = torch.from_numpy((known["arr_delay"].to_numpy() / 60).astype(np.float32))
    kept = torch.from_numpy(choose(owners, len(names), items))
    test = torch.from_numpy(owners < 0)
    return Fleet(features[kept], hours[kept], torch.from_numpy(owners)[kept], len(names), features[test], hours[test])


def choose(owners: np.ndarray, n_users: int, items: int | None) -> np.ndarray:
    """Returns positions of at most `items` rows of each user.

    Each user has draws of its own: drawn from one stream, the rows of a user would depend on how many others have.
    """
    order = np.argsort(owners, kind="stable")
    ends = np.searchsorted(owners[order], np.arange(n_users + 1))
    own = [order[start:end] for start, end in pairwise(ends)]
    if items is None:
        return np.concatenate(own)
    return np.concatenate([np.random.default_rng([0, k]).permutation(rows)[:items] for k, rows in enumerate(own)])


# -- three private methods ---------------------------------------------------------------------------------------------


class Setting(NamedTuple):
    """What a method is told; items is the public number of flights that an aircraft has at least."""

    loss: str
    n_users: int
    items: int
    budget: dp.Budget
    most_steps: int

    @property
    def pair_radius(self) -> float:
        """Means of fewer flights are farther apart."""
        return PAIR_RADIUS[self.loss] * math.sqrt(LEAST / self.items)


def clipped(model: nn.Module, setting: Setting) -> dp.PrivateOptimizer:
    """User-level DP-SGD on all aircraft."""
    plan = dp.UserClippedSGD.plan(
        n=setting.n_users,
        budget=setting.budget,
        clip=CLIP,
        lr=LR[setting.loss],
        steps=min(STEPS, setting.most_steps),
        average="weighted",
        dim=model,
    )
    return dp.UserClippedSGD(model.parameters(), plan)


def filtered(model: nn.Module, setting: Setting) -> dp.PrivateOptimizer:
    """The outlier filter on all aircraft; raises if nothing is proved for so few."""
    plan = dp.UserFilteredSGD.plan(
        n=setting.n_users,
        budget=setting.budget,
        pair_radius=setting.pair_radius,
        lr=FILTER_LR[setting.loss],
        steps=min(FILTER_STEPS, setting.most_steps),
        average="weighted",
    )
    return dp.UserFilteredSGD(model.parameters(), plan)


def localized(model: nn.Module, setting: Setting) -> dp.PrivateOptimizer:
    """As many phases as are proved private; raises if not even one is."""
    plan = dp.LocalizedUserSGD.plan(
        n=setting.n_users,
        budget=setting.budget,
        problem=dp.Problem(lipschitz=LIPSCHITZ[setting.loss], radius=RADIUS),
        reg=REG,  # makes the loss strongly convex
        min_items=setting.items,
        pair_radius=setting.pair_radius,
        max_steps=min(FILTER_STEPS, setting.most_steps),
        distance=RADIUS,  # the start is 0
        dim=model,
    )
    return dp.LocalizedUserSGD(model.parameters(), plan)


METHODS: dict[str, Callable[[nn.Module, Setting], dp.PrivateOptimizer]] = {
    "clipped": clipped,
    "filtered": filtered,
    "localized": localized,
}


def train(name: str, setting: Setting, fleet: Fleet) -> tuple[nn.Module, dp.PrivateOptimizer]:
    """Returns a private model, and the optimizer that knows what was spent."""
    model = nn.Linear(WIDTH, 1)
    for p in model.parameters():
        nn.init.zeros_(p)
    optimizer = METHODS[name](model, setting)
    dataset = TensorDataset(fleet.features, targets(setting.loss, fleet.hours)[:, None])
    loss = SUMS[setting.loss]  # the filter compares users to the last bit, and a mean rounds by the size of the batch
    fitted = dp.fit(model, optimizer, dataset, loss, users=fleet.users, loss_reduction="sum", progress=False)
    return fitted, optimizer


def describe(optimizer: dp.PrivateOptimizer) -> str:
    """Returns what is to be known of a run beside its steps; public."""
    words = []
    if isinstance(optimizer, dp.LocalizedUserSGD):
        sizes = [part.n for part, _ in optimizer.design.parts]
        words.append(f"{len(sizes)} phases of {', '.join(map(str, sizes))} aircraft")
    return "; ".join([*words, "halted" if optimizer.halted else ""]).strip("; ")


# -- what is not private ----------------------------------------------------------------------------------------------


def targets(loss: str, hours: Tensor) -> Tensor:
    return (hours > LATE).to(hours.dtype) if loss == "logistic" else hours


def fit_public(loss: str, fleet: Fleet) -> Tensor:
    """Returns NON-PRIVATE (weights, bias) of the same objective, in which aircraft count alike, by L-BFGS."""
    rows, wanted = _with_bias(fleet.features), targets(loss, fleet.hours).double()
    share = 1 / (fleet.n_users * torch.bincount(fleet.users, minlength=fleet.n_users).double())[fleet.users]
    w = torch.zeros(WIDTH + 1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([w], max_iter=100, tolerance_grad=1e-5, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        objective = share @ _losses(loss, rows @ w, wanted) + 0.5e-5 * w.square().sum()
        objective.backward()
        return objective.detach()

    optimizer.step(closure)
    return w.detach()


def _losses(loss: str, score: Tensor, wanted: Tensor) -> Tensor:
    if loss == "logistic":
        return nn.functional.binary_cross_entropy_with_logits(score, wanted, reduction="none")
    return 0.5 * (score - wanted).square()


def _with_bias(features: Tensor) -> Tensor:
    return nn.functional.pad(features.double(), (0, 1), value=1.0)


def scores(loss: str, score: Tensor, hours: Tensor) -> tuple[float, float]:
    """Returns (AUC of "late", mean loss) of predictions for test flights."""
    score, late = score.detach().reshape(-1).double(), hours > LATE
    ranks = torch.from_numpy(pd.Series(score.numpy()).rank().to_numpy(copy=True))
    hits, misses = int(late.sum()), int((~late).sum())
    auc = (float(ranks[late].sum()) - hits * (hits + 1) / 2) / (hits * misses)
    return auc, float(_losses(loss, score, targets(loss, hours).double()).mean())


def draw(path: str, n_users: int, epsilon: float) -> None:
    """Draws the noise of a step against the flights per aircraft; public numbers only."""
    import matplotlib  # optional: pip install '.[examples]'

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    unit = {"n_users": n_users, "steps": STEPS, "epsilon": epsilon, "delta": DELTA}
    items = [5, 10, 20, 50, 100, 200, 500, 1000]
    fixed = 2 * CLIP / n_users * math.sqrt(STEPS) / gaussian_mu(epsilon, DELTA)
    of_filter = calibrate_filter(**unit, pair_radius=1.0).noise_std  # in proportion to the radius
    far = [pair_radius_iid(LIPSCHITZ["logistic"], m, n_users, 0.01 / STEPS) for m in items]
    lines = {
        f"clipped at {CLIP}": [fixed for _ in items],
        "filtered, guessed pair radius": [of_filter * PAIR_RADIUS["logistic"] * math.sqrt(LEAST / m) for m in items],
        "filtered, pair radius from the Lipschitz bound": [of_filter * radius for radius in far],
    }
    figure, axes = plt.subplots(figsize=(7, 4))
    for label, noise in lines.items():
        axes.loglog(items, noise, "o-", label=label)
    axes.set(xlabel="flights per aircraft", ylabel="noise std per coordinate and step")
    axes.set_title(f"{n_users:,} aircraft, {STEPS} steps, epsilon {epsilon:g}")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Trains, prints scores beside those of the non-private fits, and returns the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilon", type=float, default=EPSILON, help="of each model")
    parser.add_argument("--items", choices=(str(LEAST), "all"), default=str(LEAST), help="flights per aircraft")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ITEMS} flights each and {QUICK_STEPS} steps")
    parser.add_argument("--plot", metavar="FILE", help="draw the noise against the flights per aircraft")
    args = parser.parse_args(argv)

    items, most_steps = (QUICK_ITEMS, QUICK_STEPS) if args.quick else (LEAST, STEPS)
    fleet = load_fleet(None if args.items == "all" else items)
    budget = dp.Budget(args.epsilon, DELTA, adjacency=ADJACENCY, unit="user")
    print(f"{fleet.n_users:,} aircraft with at least {LEAST} flights, {len(fleet.hours):,} of their flights")
    figures: dict[str, float] = {}
    for loss in LOSSES:
        setting = Setting(loss, fleet.n_users, items, budget, most_steps)
        print(f"\n{f'{loss}: {len(fleet.test_hours):,} flights to predict':<40}{'steps':>7}{'AUC':>9}{'loss':>9}")
        for name in METHODS:
            try:
                model, optimizer = train(name, setting, fleet)
            except dp.errors.InfeasibleError as error:  # public numbers decide
                print(f"{name:<40}infeasible: {error}")
                continue
            figures[f"{loss}_{name}_epsilon"] = optimizer.report().epsilon
            auc, mean = scores(loss, model(fleet.test_features), fleet.test_hours)
            figures[f"{loss}_{name}_auc"], figures[f"{loss}_{name}_loss"] = auc, mean
            print(f"{name:<40}{optimizer.steps:>7}{auc:>9.4f}{mean:>9.4f}  {describe(optimizer)}".rstrip(), flush=True)
            headline = optimizer.report().headline
        rate = float(targets(loss, fleet.hours).mean())
        constant = torch.full_like(fleet.test_hours, math.log(rate / (1 - rate)) if loss == "logistic" else rate)
        for name, score in {
            "constant": constant,
            "linear": _with_bias(fleet.test_features) @ fit_public(loss, fleet),
        }.items():
            auc, mean = scores(loss, score, fleet.test_hours)
            figures[f"{loss}_{name}_auc"], figures[f"{loss}_{name}_loss"] = auc, mean
            print(f"{f'{name}, not private':<47}{auc:>9.4f}{mean:>9.4f}")
    print(f"\nthe last private model: {headline}")
    print(f"universe: aircraft with at least {LEAST} flights, {fleet.n_users:,} of them, a public number.")
    print("Whoever publishes several of these models gives all of them one Accountant.")
    if args.plot:
        draw(args.plot, fleet.n_users, args.epsilon)
    bars("AUC of late flights, whole aircraft protected", figures, "_auc")
    return figures


if __name__ == "__main__":
    main()
