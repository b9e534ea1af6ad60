"""Private linear regression of flight delays: what heavy tails cost the squared loss, and Huber's loss does not pay.

    python examples/linear_regression.py             # two feature sets x two losses, eps = 1 each, about half a minute
    python examples/linear_regression.py --quick     # one variant, a hundred steps

A flight may be a day late, so that the gradient of the squared loss has no bound: a public bound on the TARGET must be
invented, and noise goes with the worst residual that it allows. The slope of Huber's loss is at most its threshold,
whatever the target. Noise, step size and number of steps follow from public constants like these; nothing is tuned.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
import torch
from flights import NUM_FEATURES, ROW_NORM_BOUND, Flights, load_flights
from pictures import bars
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from torch_dpsco.accounting.calibrate import rounded_up

EPSILON, DELTA = 1.0, 1e-6
ADJACENCY = "add_remove"
QUICK_STEPS, QUICK_BATCH = 100, 512
THRESHOLD = 0.25  # hours: a flight counts as late from 15 minutes on
TARGET_BOUND = 3.0  # hours; the squared loss needs one, and clips the training targets to it
LOSSES: dict[str, dp.losses.ResidualLoss] = {
    "huber": dp.losses.Huber(threshold=THRESHOLD),
    "squared": dp.losses.Squared(),
}


def train(
    loss_name: str, variant: str, data: Flights, epsilon: float, steps: int | None
) -> tuple[nn.Module, dp.HolderSGD]:
    """Returns a private model, and the optimizer that knows what was spent; prints the plan before it spends."""
    loss, width, hours = LOSSES[loss_name], NUM_FEATURES[variant], data.train_hours
    if loss_name == "squared":
        hours = hours.clamp(-TARGET_BOUND, TARGET_BOUND)
    dataset = TensorDataset(data.train_features[:, :width], hours[:, None])
    model = nn.Linear(width, 1)
    for p in model.parameters():
        nn.init.zeros_(p)
    plan = {
        "problem": loss.problem(bound_x=ROW_NORM_BOUND[variant], bound_y=TARGET_BOUND),
        "n": len(dataset),  # public: under add_remove a reference, which sets the rate and the number of steps
        "budget": dp.Budget(epsilon, DELTA, adjacency=ADJACENCY),
        "steps": steps,
        "batch_size": QUICK_BATCH if steps else None,
        "dim": model,
    }
    planned = dp.HolderSGD.plan(**plan)
    print(
        f"plan, {variant} {loss_name}: {planned.steps} steps of about {planned.batch_size} rows, lr {planned.lr:.3g},"
        f" gradient bound {planned.grad_bound:.3g} and noise {planned.noise_std:.2g} per coordinate at the start"
    )
    optimizer = dp.HolderSGD(model.parameters(), planned)
    return dp.fit(model, optimizer, dataset, loss), optimizer


def fit_huber(features: Tensor, hours: Tensor, *, reg: float = 1e-5) -> Tensor:
    """Returns the NON-PRIVATE minimizer (weights, bias) of mean Huber loss + reg/2 |w|^2, by L-BFGS in float64."""
    rows, targets = _with_bias(features), hours.double()
    w = torch.zeros(rows.shape[1], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([w], max_iter=200, tolerance_grad=1e-5, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.huber_loss(rows @ w, targets, delta=THRESHOLD) + 0.5 * reg * w.square().sum()
        loss.backward()
        return loss.detach()

    optimizer.step(closure)
    return w.detach()


def fit_least_squares(features: Tensor, hours: Tensor) -> Tensor:
    """Returns the NON-PRIVATE least-squares (weights, bias), the shortest of them, by their normal equations."""
    rows = _with_bias(features).numpy()
    return torch.from_numpy(np.linalg.lstsq(rows.T @ rows, rows.T @ hours.double().numpy(), rcond=1e-12)[0])


def errors(predicted: Tensor, hours: Tensor) -> tuple[float, float]:
    """Returns (mean absolute error, root mean squared error), in hours."""
    residual = predicted.reshape(-1).double() - hours.double()
    return float(residual.abs().mean()), float(residual.square().mean().sqrt())


def _with_bias(features: Tensor) -> Tensor:
    return nn.functional.pad(features.double(), (0, 1), value=1.0)


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Trains, prints test errors beside those of the non-private fits, and returns the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=(*NUM_FEATURES, "both"), default="both")
    parser.add_argument("--loss", choices=(*LOSSES, "both"), default="both")
    parser.add_argument("--epsilon", type=float, default=EPSILON)
    parser.add_argument("--quick", action="store_true", help="one variant, a hundred steps")
    args = parser.parse_args(argv)
    steps = QUICK_STEPS if args.quick else None  # as the plan chooses

    data = load_flights()
    total = dp.Accountant(adjacency=ADJACENCY)
    figures: dict[str, float] = {}
    variants = tuple(NUM_FEATURES) if args.variant == "both" else (args.variant,)
    for variant in variants[:1] if args.quick else variants:
        train_x, test_x = (x[:, : NUM_FEATURES[variant]] for x in (data.train_features, data.test_features))
        scores = {"constant: the median": (data.train_hours.median().expand(len(test_x)), f"{variant}_median")}
        for name in LOSSES if args.loss == "both" else (args.loss,):
            model, optimizer = train(name, variant, data, args.epsilon, steps)
            total.record(optimizer.design.event(optimizer.oracle.event(), optimizer.steps))
            figures[f"{variant}_{name}_epsilon"] = optimizer.report().epsilon
            print(f"spent on {variant}, {name}: {optimizer.report().figures}\n")
            fit = fit_huber if name == "huber" else fit_least_squares
            with torch.no_grad():
                scores[f"{name}, private"] = (model(test_x), f"{variant}_{name}")
            public = _with_bias(test_x) @ fit(train_x, data.train_hours)
            scores[f"{name}, not private"] = (public, f"{variant}_{name}_baseline")
        print(f"\n{f'{variant}: {len(test_x):,} flights to predict':<40}{'MAE (h)':>10}{'RMSE (h)':>10}")
        for label, (predicted, key) in scores.items():
            figures[f"{key}_mae"], figures[f"{key}_rmse"] = errors(predicted, data.test_hours)
            print(f"{label:<40}{figures[f'{key}_mae']:>10.4f}{figures[f'{key}_rmse']:>10.4f}")
    figures["epsilon_total"] = total.get_epsilon(DELTA)
    print(f"publishing all of them: epsilon {rounded_up(figures['epsilon_total'])}")
    bars("mean absolute error (hours)", figures, "_mae")
    return figures


if __name__ == "__main__":
    main()
