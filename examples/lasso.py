"""Private lasso with heavy-tailed noise: which few of 100 features matter?

    python examples/lasso.py            # 40,000 synthetic records, four methods, eps = 1 each, a few seconds
    python examples/lasso.py --quick    # 4,000 records, for a smoke test

y = x.w + noise with 5 weights that are not zero and Student-t noise of 2.5 degrees of freedom, which has no third
moment. The squared loss has no Lipschitz constant there, and a private pilot group chooses the clip: the median of the
gradient norms, since the noise is symmetric. The L1 penalty is no part of the loss, where it would be clipped and get
noise, but of the optimizer: its prox is post-processing, and what noise moves by less than the threshold stays zero.

* proximal, one pass: each record is used in one of five batches. Covered by a theorem (proximal-PL).
* proximal, full batch: all records in each of 30 steps. No theorem; at this number of records it does better.
* the same two without the penalty: the noise lands on all 100 weights. What the penalty costs is its own bias: weights
  that matter shrink by the strength.

Strength and step size follow from public facts about this made-up design (isotropic features: smoothness 1); the
strength is twice the noise of a mean gradient at a guessed clip of 20, for rows of norm 10. Nothing was tuned.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

import torch
from pictures import bars
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp

EPSILON, DELTA = 1.0, 1e-6
ADJACENCY = "replace_one"
DIM, FREEDOM = 100, 2.5
WEIGHTS = (1.0, -0.8, 0.6, -0.5, 0.4)
RECORDS, QUICK_RECORDS = 40_000, 4_000
STEPS, FULL_STEPS = 5, 30  # the defaults of plans without a theorem's promise
GUESSED_CLIP = 20.0  # for the strength only; the clip itself is private
LOSS = dp.losses.Squared()
PROBLEM = dp.Problem(smoothness=1.0)


class Task(NamedTuple):
    """Made-up records, and the weights behind them."""

    records: TensorDataset
    truth: Tensor


def make_task(n: int, seed: int = 0) -> Task:
    """Returns n records: standard normal features, sparse weights, Student-t noise."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.zeros(DIM)
    truth[: len(WEIGHTS)] = torch.tensor(WEIGHTS)
    x = torch.randn(n, DIM, generator=generator)
    chi = torch.distributions.Chi2(FREEDOM)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        noise = torch.randn(n) / (chi.sample((n,)) / FREEDOM).sqrt()
    return Task(TensorDataset(x, (x @ truth + noise)[:, None]), truth)


def make_optimizer(name: str, model: nn.Module, n: int, epsilon: float, strength: float) -> dp.PrivateOptimizer:
    """Returns the optimizer of a method."""
    setting = {
        "problem": PROBLEM,
        "n": n,  # public
        "budget": dp.Budget(epsilon, DELTA, adjacency=ADJACENCY),
        "clip": dp.Pilot(rule="median"),
        "dim": model,
    }
    prox = dp.prox.L1(strength) if name.startswith("proximal") else None
    if name.endswith("one pass"):
        plan = dp.ProximalSGD.plan(steps=STEPS, sampling="shuffled", **setting)
        return dp.ProximalSGD(model.parameters(), plan, prox=prox)
    plan = dp.ClippedSGD.plan(sampling="full", steps=FULL_STEPS, lr=0.5 / PROBLEM.smoothness, **setting)
    return dp.ClippedSGD(model.parameters(), plan, prox=prox)


def strength_for(n: int, epsilon: float) -> float:
    """Returns two standard deviations of the noise on the mean of one batch of the pass, at the guessed clip."""
    budget = dp.Budget(epsilon, DELTA, adjacency=ADJACENCY)
    plan = dp.ProximalSGD.plan(
        problem=PROBLEM, n=n, budget=budget, dim=DIM, steps=STEPS, clip=GUESSED_CLIP, sampling="shuffled"
    )
    return 2.0 * plan.noise_std


def train(name: str, records: TensorDataset, epsilon: float, strength: float) -> tuple[nn.Module, dp.PrivateOptimizer]:
    """Returns a private model, and the optimizer that knows what was spent."""
    model = nn.Linear(DIM, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = make_optimizer(name, model, len(records), epsilon, strength)
    return dp.fit(model, optimizer, records, LOSS, progress=False), optimizer


METHODS = ("proximal, one pass", "proximal, full batch", "no penalty, one pass", "no penalty, full batch")


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Trains, prints how near the answers are, and returns the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilon", type=float, default=EPSILON)
    parser.add_argument("--quick", action="store_true", help="4,000 records")
    args = parser.parse_args(argv)

    task = make_task(QUICK_RECORDS if args.quick else RECORDS)
    n = len(task.records)
    strength = strength_for(n, args.epsilon)
    print(f"{n:,} records, {DIM} features, {len(WEIGHTS)} that matter; L1 strength {strength:.3g}\n")
    print(f"{'':<24}{'excess risk':>12}{'found':>7}{'false':>7}{'clip':>8}")
    figures: dict[str, float] = {"strength": strength}
    for name in METHODS:
        model, optimizer = train(name, task.records, args.epsilon, strength)
        w = model.weight.detach()[0]
        excess = float((w - task.truth).square().sum()) / 2.0  # E x x^T is the identity
        found, false = int((w[task.truth != 0] != 0).sum()), int((w[task.truth == 0] != 0).sum())
        clip = optimizer.metrics["clip"]  # a private release: public
        figures |= {f"{name}_excess": excess, f"{name}_found": found, f"{name}_false": false}
        figures[f"{name}_epsilon"] = optimizer.report().epsilon
        print(f"{name:<24}{excess:>12.4f}{found:>7}{false:>7}{clip:>8.2f}")
    x, y = task.records.tensors
    public = torch.linalg.lstsq(x, y).solution[:, 0]
    figures["public_excess"] = float((public - task.truth).square().sum()) / 2.0
    print(f"{'not private':<24}{figures['public_excess']:>12.4f}")
    print(f"\nof each model: {optimizer.report().headline}")
    bars("excess risk", figures, "_excess")
    return figures


if __name__ == "__main__":
    main()
