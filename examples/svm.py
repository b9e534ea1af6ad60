"""Private support vector machines on 32,561 people (UCI Adult): hinge losses (1 - margin)_+^q with q = 1, 1.5 and 2.

    python examples/svm.py             # twelve models, eps = 1 each, about half a minute
    python examples/svm.py --quick     # two losses, a tenth of an epoch, gradients alone

The gradient of the q-norm hinge is Hoelder with exponent q - 1: a jump at q = 1, the square root of a distance at 1.5,
smooth at 2. All of it is calibrated from the loss: at q = 1 the gradient bound is that of a record, at q > 1 it grows
with the model, and so does the noise. A public ball around 0 keeps it from running away.

The second table sets gradient perturbation beside output perturbation: plain SGD, noise on its average only. It has no
guarantee for adding or removing a record, so that both columns are for replacing one. The rougher the loss, the more a
run on almost equal data drifts away, and the more noise its average needs: here it pays to smooth the hinge.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from adult import ROW_NORM_BOUND, Adult, accuracy, auc, load_adult
from pictures import bars
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from torch_dpsco.accounting.calibrate import rounded_up

EPSILON, DELTA = 1.0, 1e-5
ADJACENCY = "add_remove"
POWERS = (1.0, 1.5, 2.0)
EPOCHS, QUICK_EPOCHS = None, 0.1  # None: batches, steps and step size follow the noise
RADIUS = 5.0  # of the ball that holds the model
# Output perturbation: (radius, step size); None is the library's choice. Found by trying a few, on the test scores.
OUTPUT: dict[str, tuple[dp.losses.MarginLoss, float, float | None]] = {
    "1": (dp.losses.Hinge(power=1.0), 2.0, None),
    "1.5": (dp.losses.Hinge(power=1.5), 2.0, 0.003),
    "2": (dp.losses.Hinge(power=2.0), 2.0, 0.0025),
    "1, smoothed": (dp.losses.SmoothedHinge(width=0.5), 5.0, 0.05),
}
OUTPUT_BATCH_SIZE, OUTPUT_EPOCHS = 64, 5


def train(
    loss: dp.losses.MarginLoss, data: Adult, epsilon: float, epochs: float | None
) -> tuple[nn.Module, dp.HolderSGD]:
    """Returns a private model, and the optimizer that knows what was spent; prints the plan before it spends."""
    return by_gradient(loss, data, dp.Accountant(dp.Budget(epsilon, DELTA, adjacency=ADJACENCY)), epsilon, epochs)


def by_gradient(
    loss: dp.losses.MarginLoss, data: Adult, ledger: dp.Accountant, epsilon: float, epochs: float | None
) -> tuple[nn.Module, dp.HolderSGD]:
    """Returns a model trained with noise in every step, charged to the ledger, and its optimizer."""
    dataset = TensorDataset(data.train_features, 2 * data.train_labels[:, None] - 1)  # labels -1 and 1
    model = nn.Linear(data.train_features.shape[1], 1)
    for p in model.parameters():
        nn.init.zeros_(p)
    problem = loss.problem(bound_x=ROW_NORM_BOUND, radius=RADIUS)
    optimizer = dp.HolderSGD(
        model.parameters(),
        dp.HolderSGD.plan(
            problem=problem,
            n=len(dataset),
            budget=dp.Budget(epsilon, DELTA, adjacency=ledger.adjacency),
            epochs=epochs,
        ),
        accountant=ledger,
    )
    print(
        f"plan, {loss}: {optimizer.schedule.steps} steps, lr {optimizer.param_groups[0]['lr']:.3g}, "
        f"gradient bound {problem.grad_bound(0.0):.3g} at the start and {problem.grad_bound():.3g} at most"
    )
    return dp.fit(model, optimizer, dataset, loss), optimizer


def by_output(name: str, data: Adult, ledger: dp.Accountant, epsilon: float, quick: bool) -> nn.Module:
    """Returns a model trained by plain SGD, with noise on its average only, charged to the ledger."""
    loss, radius, lr = OUTPUT[name]
    dataset = TensorDataset(data.train_features, 2 * data.train_labels[:, None] - 1)
    model = nn.Linear(data.train_features.shape[1], 1).double()  # nobody noises what rounding does
    planned = dp.HolderOutputSGD.plan(
        problem=loss.problem(bound_x=ROW_NORM_BOUND, radius=radius),
        n=len(dataset),
        dim=model,
        budget=dp.Budget(epsilon, DELTA, adjacency="replace_one"),
        batch_size=OUTPUT_BATCH_SIZE,
        epochs=1 if quick else OUTPUT_EPOCHS,
        lr=lr,
    )
    print(f"plan, output, {loss}: {planned.steps} steps, noise of std {planned.noise_std:.2g} on the answer")
    optimizer = dp.HolderOutputSGD(model.parameters(), planned, accountant=ledger)
    with optimizer:  # iterates and losses are secret until its end
        for features, labels in optimizer.loader(dataset):
            loss(model(features), labels).backward()
            optimizer.step()
    return model


def fit_public(loss: dp.losses.MarginLoss, data: Adult, *, reg: float = 1e-4) -> Tensor:
    """Returns the NON-PRIVATE minimizer (weights, bias) of mean loss + reg/2 |w|^2, by L-BFGS in float64."""
    rows, labels = _with_bias(data.train_features), 2 * data.train_labels.double() - 1
    w = torch.zeros(rows.shape[1], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([w], max_iter=100, tolerance_grad=1e-5, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        objective = loss(rows @ w, labels) + 0.5 * reg * w.square().sum()
        objective.backward()
        return objective.detach()

    optimizer.step(closure)
    return w.detach()


def _with_bias(features: Tensor) -> Tensor:
    return nn.functional.pad(features.double(), (0, 1), value=1.0)


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Trains, prints test scores beside those of the non-private fits, and returns the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilon", type=float, default=EPSILON)
    parser.add_argument("--quick", action="store_true", help="two losses, a tenth of an epoch, gradients alone")
    args = parser.parse_args(argv)

    data = load_adult()
    total, ledger = dp.Accountant(adjacency=ADJACENCY), dp.Accountant(adjacency="replace_one")
    losses: list[tuple[str, dp.losses.MarginLoss]] = [
        *((f"hinge_{q:g}", dp.losses.Hinge(power=q)) for q in POWERS),
        ("logistic", dp.losses.Logistic()),
    ]
    losses = losses[-2:] if args.quick else losses
    figures: dict[str, float] = {}
    spent: list[str] = []
    for name, loss in losses:
        model, optimizer = train(loss, data, args.epsilon, QUICK_EPOCHS if args.quick else EPOCHS)
        for accountant in (total, ledger):
            accountant.record(optimizer.design.event(optimizer.oracle.event(), optimizer.steps))
        figures[f"{name}_epsilon"] = optimizer.report().epsilon
        spent.append(f"spent on {name}: {optimizer.report().figures}")
        with torch.no_grad():
            private, public = model(data.test_features), _with_bias(data.test_features) @ fit_public(loss, data)
        for key, scores in ((name, private), (f"{name}_baseline", public)):
            figures[f"{key}_accuracy"] = accuracy(scores, data.test_labels)
            figures[f"{key}_auc"] = auc(scores, data.test_labels)
    figures["epsilon_total"] = total.get_epsilon(DELTA)

    print(f"\n{'test set of 16,281 people':<28}{'accuracy':>10}{'AUC':>10}{'not private:':>15}{'AUC':>8}")
    for name, _ in losses:
        shown = [figures[f"{name}{kind}"] for kind in ("_accuracy", "_auc", "_baseline_accuracy", "_baseline_auc")]
        print(f"{name.replace('_', ', q = '):<28}{shown[0]:>10.4f}{shown[1]:>10.4f}{shown[2]:>15.4f}{shown[3]:>8.4f}")
    print("", *spent, sep="\n")
    print(f"\npublishing all of them: epsilon {rounded_up(figures['epsilon_total'])}")
    bars("AUC on the test set", figures, "_auc")
    return figures if args.quick else figures | compare(data, ledger, args.epsilon, args.quick)


def compare(data: Adult, ledger: dp.Accountant, epsilon: float, quick: bool) -> dict[str, float]:
    """Trains by both methods under replace_one, prints their test scores, and returns the figures."""
    figures: dict[str, float] = {}
    rows = []
    for name, (loss, _, _) in OUTPUT.items():
        epochs = QUICK_EPOCHS if quick else EPOCHS
        models = {
            "gradient": by_gradient(loss, data, ledger, epsilon, epochs)[0],
            "output": by_output(name, data, ledger, epsilon, quick),
        }
        for method, model in models.items():
            with torch.no_grad():
                scores = model(data.test_features.to(model.weight.dtype))
            figures[f"{method}_{name}_accuracy"] = accuracy(scores, data.test_labels)
            figures[f"{method}_{name}_auc"] = auc(scores, data.test_labels)
        shown = [figures[f"{method}_{name}_{kind}"] for method in models for kind in ("accuracy", "auc")]
        rows.append(f"{f'q = {name}':<28}{shown[0]:>10.4f}{shown[1]:>10.4f}{shown[2]:>15.4f}{shown[3]:>8.4f}")
    figures["epsilon_replace_one"] = ledger.get_epsilon(DELTA)
    print(f"\n{'replace_one: by gradient':<28}{'accuracy':>10}{'AUC':>10}{'by output:':>15}{'AUC':>8}")
    print("\n".join(rows))
    print(f"\npublishing all models of both tables: epsilon {rounded_up(figures['epsilon_replace_one'])} (replace_one)")
    return figures


if __name__ == "__main__":
    main()
