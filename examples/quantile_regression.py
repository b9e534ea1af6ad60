"""Private quantile regression: how late is a flight on a good day, on the median day, and on a bad one?

    python examples/quantile_regression.py                # nine models, eps = 1 each, about a minute
    python examples/quantile_regression.py --quick        # 20,000 flights only, for a smoke test
    python examples/quantile_regression.py --plot x.png   # draws the three private quantiles (needs matplotlib)

The pinball loss has slopes between tau - 1 and tau whatever the target, so that a flight a day late does no harm. It
has a kink, though, and there the two ways to make SGD private part:

* gradient: noise in every step (`HolderSGD`). It does not mind the kink.
* output: plain SGD, and noise on its average (`HolderOutputSGD`). At a kink two runs on almost equal data drift apart
  in every step, even where they see the same records, and the noise must cover that.
* output, smoothed: the kink rounded off over a tenth of an hour. Smooth runs do not drift, and the noise is about 70
  times smaller. The loss is one of your own, with declared constants.

All guarantees are for replacing one flight: output perturbation divides by a public number of records, and has none for
adding or removing one. The records are those of `flights.py`; it says which constants are public.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from flights import NUM_FEATURES, ROW_NORM_BOUND, Flights, load_flights
from pictures import bars
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from torch_dpsco.accounting.calibrate import rounded_up

EPSILON, DELTA = 1.0, 1e-6
ADJACENCY = "replace_one"  # the only one that both methods have with a meaning for records
QUANTILES = (0.1, 0.5, 0.9)
METHODS = ("gradient", "output", "output, smoothed")
WIDTH = NUM_FEATURES["predep"]
HOUR = 38  # the feature that holds the scheduled hour of departure, over 24
TARGET_BOUND = 24.0  # hours; output perturbation clips targets to it, gradient perturbation does not need it
RADIUS = 2.0  # of the ball that holds the model
SMOOTHING = 0.1  # hours over which the slope of the smoothed loss goes from tau - 1 to tau
BATCH_SIZE, EPOCHS = {"gradient": 512, "output": 512, "output, smoothed": 256}, {"gradient": 10.0, "output": 5}
QUICK_ROWS = 20_000


def make_loss(method: str, quantile: float) -> dp.losses.Pinball | dp.losses.SmoothedPinball:
    """Returns the loss that a method minimizes."""
    smoothed = "smoothed" in method
    return dp.losses.SmoothedPinball(quantile, SMOOTHING) if smoothed else dp.losses.Pinball(quantile=quantile)


def train(method: str, quantile: float, dataset: TensorDataset, epsilon: float, ledger: dp.Accountant):
    """Returns a private model, charged to the ledger, and epsilon of this model alone."""
    loss = make_loss(method, quantile)
    settings = {
        "problem": loss.problem(bound_x=ROW_NORM_BOUND["predep"], bound_y=TARGET_BOUND, radius=RADIUS),
        "n": len(dataset),  # public under replace_one
        "budget": dp.Budget(epsilon, DELTA, adjacency=ADJACENCY),
        "batch_size": BATCH_SIZE[method],
    }
    if method == "gradient":
        model = nn.Linear(WIDTH, 1)
        for p in model.parameters():
            nn.init.zeros_(p)
        settings |= {"epochs": EPOCHS["gradient"], "average": "weighted"}
        planned = dp.HolderSGD.plan(dim=model, **settings)
        noisy = dp.HolderSGD(model.parameters(), planned, accountant=ledger)
        print_plan(method, quantile, planned.steps, planned.lr, f"{planned.noise_std:.2g} on each mean gradient")
        return dp.fit(model, noisy, dataset, loss), planned.epsilon()
    model = nn.Linear(WIDTH, 1).double()
    planned = dp.HolderOutputSGD.plan(dim=model, epochs=EPOCHS["output"], **settings)
    print_plan(method, quantile, planned.steps, planned.lr, f"{planned.noise_scale:.2g} on the answer")
    optimizer = dp.HolderOutputSGD(model.parameters(), planned, accountant=ledger)
    with optimizer:  # nothing may be looked at before its end: iterates and losses are secret
        for features, hours in optimizer.loader(dataset):
            loss(model(features), hours).backward()
            optimizer.step()
    return model, planned.epsilon()


def print_plan(method: str, quantile: float, steps: int, lr: float, noise: str) -> None:
    """Says what is about to happen; public constants only."""
    print(f"plan, {method}, {quantile:g} quantile: {steps} steps, lr {lr:.3g}, noise of std {noise}")


def fit_public(quantile: float, features: Tensor, hours: Tensor, *, reg: float = 1e-6) -> Tensor:
    """Returns NON-PRIVATE (weights, bias), by L-BFGS in float64 on the loss smoothed less and less."""
    rows, targets = _with_bias(features), hours.double()
    w = torch.zeros(rows.shape[1], dtype=torch.float64, requires_grad=True)
    for width in (1.0, 0.1, 0.01):
        loss = dp.losses.SmoothedPinball(quantile, width)
        optimizer = torch.optim.LBFGS([w], max_iter=50, tolerance_grad=1e-6, line_search_fn="strong_wolfe")

        def closure(optimizer=optimizer, loss=loss) -> Tensor:
            optimizer.zero_grad()
            objective = loss(rows @ w, targets) + 0.5 * reg * w.square().sum()
            objective.backward()
            return objective.detach()

        optimizer.step(closure)
    return w.detach()


def scores(quantile: float, predicted: Tensor, hours: Tensor) -> tuple[float, float]:
    """Returns the mean pinball loss, and the coverage: the share of flights not later than predicted."""
    predicted, hours = predicted.detach().reshape(-1).double(), hours.double()
    loss = dp.losses.Pinball(quantile=quantile)(predicted, hours)
    return float(loss), float((hours <= predicted).double().mean())


def _with_bias(features: Tensor) -> Tensor:
    return nn.functional.pad(features.double(), (0, 1), value=1.0)


def draw(path: str, models: dict[float, nn.Module], data: Flights) -> None:
    """Draws, per scheduled hour, mean private quantiles of the test flights beside the quantiles that they had."""
    import matplotlib  # optional: pip install '.[examples]'

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    features, hours = data.test_features[:, :WIDTH], data.test_hours  # public
    clock = (features[:, HOUR] * 24 + 1e-3).floor().int()
    times = [hour for hour in range(24) if int((clock == hour).sum()) >= 50]
    figure, axes = plt.subplots(figsize=(7, 4))
    for (quantile, model), color in zip(models.items(), ("tab:green", "tab:blue", "tab:red"), strict=True):
        with torch.no_grad():
            predicted = model(features).squeeze(1)
        line = [float(predicted[clock == hour].mean()) for hour in times]
        seen = [float(hours[clock == hour].quantile(quantile)) for hour in times]
        axes.plot(times, line, color=color, label=f"{quantile:g} quantile, private")
        axes.plot(times, seen, "o", color=color, alpha=0.4)
    axes.plot([], [], "o", color="gray", alpha=0.4, label="quantile of the test flights")
    axes.set(xlabel="scheduled hour of departure", ylabel="delay at arrival (hours)")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Trains, prints scores beside those of the non-private fits, and returns the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilon", type=float, default=EPSILON, help="of each model")
    parser.add_argument("--quick", action="store_true", help="20,000 flights only")
    parser.add_argument("--plot", metavar="FILE", help="draw the private quantiles of gradient perturbation")
    args = parser.parse_args(argv)

    data = load_flights()
    if args.quick:
        data = data._replace(train_features=data.train_features[:QUICK_ROWS], train_hours=data.train_hours[:QUICK_ROWS])
    train_x, test_x = data.train_features[:, :WIDTH], data.test_features[:, :WIDTH]
    dataset = TensorDataset(train_x, data.train_hours[:, None])
    ledger = dp.Accountant(adjacency=ADJACENCY)  # one for all models: they are about the same flights
    figures: dict[str, float] = {}
    drawn: dict[float, nn.Module] = {}
    lines: list[str] = []
    for quantile in QUANTILES:
        constant = data.train_hours.sort().values[int(quantile * len(train_x))].expand(len(test_x))
        rows = {"constant, not private": constant}
        for method in METHODS:
            model, figures[f"{method}_{quantile:g}_epsilon"] = train(method, quantile, dataset, args.epsilon, ledger)
            rows[method] = model(test_x.to(model.weight.dtype))
            if method == "gradient":
                drawn[quantile] = model
        rows["linear, not private"] = _with_bias(test_x) @ fit_public(quantile, train_x, data.train_hours)
        for name, predicted in rows.items():
            loss, coverage = scores(quantile, predicted, data.test_hours)
            figures[f"{name}_{quantile:g}_pinball"], figures[f"{name}_{quantile:g}_coverage"] = loss, coverage
            lines.append(f"{f'{quantile:g}, {name}':<32}{loss:>14.4f}{coverage:>10.3f}")
    figures["epsilon_total"] = ledger.get_epsilon(DELTA)

    print(f"\n{f'{len(test_x):,} flights to predict':<32}{'pinball (h)':>14}{'coverage':>10}")
    print("\n".join(lines))
    print(f"\nspent on all models together: {ledger.report(DELTA)}")
    print(f"\npublishing all of them: epsilon {rounded_up(figures['epsilon_total'])}")
    if args.plot:
        draw(args.plot, drawn, data)
    bars("pinball loss (hours)", figures, "_pinball")
    return figures


if __name__ == "__main__":
    main()
