"""Tilted logistic regression, private: what it does for the worst records, and for wrong labels. It is not much.

    python examples/tilted.py            # Adult, 32,561 people, epsilon = 3, ten seconds
    python examples/tilted.py --quick    # 4,000 people, for a smoke test

The tilted mean of losses, log(mean(exp(tau l))) / tau, stresses the records with large losses if tau > 0 (fairness to
the worst off) and plays them down if tau < 0 (wrong labels). Privacy makes both dear:

* tau > 0: a record's weight in the mean can be e^(tau r) times its share, r being the range of the losses, and the
  noise grows by as much. Without noise ("exact": not private) the worst percent gains and the mean hardly loses; with
  it that holds as long as tau r is small, and then the gain is.
* tau < 0: one minimum, on which the proof rests, needs |tau| L^2 < reg, and then |tau| r is small: no record's weight
  falls far. For wrong labels there is a better tool, clipped residuals (the last three lines of the table); they help
  on average, and not those whom the model gets most wrong.

Rows are divided by their public bound, so that L = 1. replace_one: n is public.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import torch
from adult import ROW_NORM_BOUND, Adult, auc, load_adult
from pictures import bars
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from torch_dpsco.estimators.output import tilted_max_weight
from torch_dpsco.estimators.records import Records
from torch_dpsco.estimators.robust import Tilted
from torch_dpsco.estimators.solvers import solve

EPSILON, DELTA = 3.0, 1e-6
LAM = 0.005  # regularizer per record
TILTS, NEGATIVE_TILTS = (0.0, 0.05, 0.1, 0.2, 0.4), (0.0, -0.5 * LAM, -0.8 * LAM)
CLIP, WRONG = 0.3, 0.3  # of the largest residual; share of labels that are flipped, at random
QUICK_ROWS = 4_000
LOSS = dp.losses.Logistic()
Solved = dp.OutputPerturbation | dp.ObjectivePerturbation
# the loss of a record at any minimizer: log(1 + e^t) with |t| <= r, the least bound on its norm
RANGE = min(1 / LAM, math.sqrt(2 * math.log(2) / LAM))


def scaled(features: Tensor) -> Tensor:
    """Returns rows of norm at most 1, with a constant for the intercept."""
    return torch.cat([features, torch.ones(len(features), 1)], dim=1) / ROW_NORM_BOUND


def exact(data: TensorDataset, tilt: float) -> Tensor:
    """Returns the weights (d,) without noise: NOT private."""
    objective = Tilted(LOSS, Records(*data.tensors), tilt=tilt, reg=LAM, bound_x=1.0)
    return solve(objective, 1e-6).w


def private(data: TensorDataset, tilt: float) -> tuple[Tensor, dp.OutputPerturbation]:
    """Returns the weights (d,) of output perturbation, and the optimizer that released them."""
    n, dim = data.tensors[0].shape
    model = nn.Linear(dim, 1, bias=False)
    budget = dp.Budget(EPSILON, DELTA, adjacency="replace_one")
    plan = dp.OutputPerturbation.plan(model=model, loss=LOSS, n=n, budget=budget, bound_x=1.0, reg=LAM * n, tilt=tilt)
    optimizer = dp.OutputPerturbation(model.parameters(), plan)
    optimizer.solve(data)
    optimizer.finalize()
    return model.weight.detach()[0].double(), optimizer


def untilted(data: TensorDataset, clip: float | None) -> tuple[Tensor, dp.ObjectivePerturbation]:
    """Returns the weights (d,) of objective perturbation, its residuals clipped or not, and its optimizer."""
    n, dim = data.tensors[0].shape
    model = nn.Linear(dim, 1, bias=False)
    budget = dp.Budget(EPSILON, DELTA, adjacency="replace_one")
    plan = dp.ObjectivePerturbation.plan(model=model, loss=LOSS, n=n, budget=budget, bound_x=1.0, residual_clip=clip)
    optimizer = dp.ObjectivePerturbation(model.parameters(), plan)
    optimizer.solve(data)
    optimizer.finalize()
    return model.weight.detach()[0].double(), optimizer


def evaluate(w: Tensor, people: Adult) -> dict[str, float]:
    """Returns AUC, the mean loss and that of the worst percent of a public test set."""
    scores = scaled(people.test_features).double() @ w
    losses = LOSS.value(scores, 2 * people.test_labels.double() - 1).sort().values
    worst = losses[-(len(losses) // 100) :]
    return {"auc": auc(scores, people.test_labels), "mean": float(losses.mean()), "worst": float(worst.mean())}


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Fits all models, prints what tilting did and cost, and returns the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4,000 people only")
    people = load_adult()
    n = QUICK_ROWS if parser.parse_args(argv).quick else len(people.train_features)
    rows, signs = scaled(people.train_features[:n]), 2 * people.train_labels[:n] - 1
    wrong = torch.rand(n, generator=torch.Generator().manual_seed(0)) < WRONG
    figures: dict[str, float] = {}

    def keep(name: str, label: str, w: Tensor, optimizer: Solved | None) -> None:
        found, noise, spent = evaluate(w, people), "-", ""
        if optimizer is not None:
            found["epsilon"] = optimizer.report().epsilon
            spent = f"({found['epsilon']:.4g}, {DELTA:g})"
        if isinstance(optimizer, dp.OutputPerturbation):
            found["noise"] = optimizer.report().figures.charges[0].event.sigma
            noise = f"{found['noise']:.3f}"
        shown = "".join(f"{found[kind]:>9.4f}" for kind in ("auc", "mean", "worst"))
        print(f"{label:<34}{noise:>8}{shown}   {spent}".rstrip())
        figures.update({f"{name}: {kind}": value for kind, value in found.items()})

    head = f"{'':<34}{'noise':>8}{'AUC':>9}{'mean':>9}{'worst 1%':>9}   spent"
    print(f"the worst records: log-loss on {len(people.test_labels):,} test people\n{head}")
    data = TensorDataset(rows, signs)
    for tilt in TILTS:
        weight = n * tilted_max_weight(tilt, RANGE, n)
        keep(f"exact {tilt:g}", f"tau = {tilt:g}, exact", exact(data, tilt), None)
        keep(f"{tilt:g}", f"tau = {tilt:g}, weights <= {weight:.3g}/n", *private(data, tilt))
    print(f"\nwrong labels: {WRONG:.0%} of the training labels are flipped\n{head}")
    flipped = TensorDataset(rows, torch.where(wrong, -signs, signs))
    for tilt in NEGATIVE_TILTS:
        keep(f"flipped, exact {tilt:g}", f"tau = {tilt:g}, exact", exact(flipped, tilt), None)
        keep(f"flipped, {tilt:g}", f"tau = {tilt:g}", *private(flipped, tilt))
    keep("flipped, objective", "objective perturbation", *untilted(flipped, None))
    keep("flipped, clipped", "the same, residuals clipped", *untilted(flipped, CLIP))
    keep("right, clipped", "the same, no label flipped", *untilted(data, CLIP))
    bars("AUC on the test set", figures, ": auc")
    return figures


if __name__ == "__main__":
    main()
