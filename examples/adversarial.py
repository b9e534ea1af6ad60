"""Private logistic regression that withstands attacks on its inputs: robust and ordinary models beside each other.

    python examples/adversarial.py            # Adult, 32,561 people, epsilon = 3, half a minute
    python examples/adversarial.py --quick    # 16,000 people, for a smoke test

An attacker who sees the model moves each test row by up to rho, in the Euclidean norm (l2) or in each coordinate
(linf), and always to the worse side. Of a linear model the worst attack is known in closed form: it takes rho |w| off
the margin, |w| being the norm dual to the attack's (l2: the Euclidean one; linf: the sum of absolute values). Robust
training puts just that into the loss.

In privacy robustness costs little: the gradient of a record grows from B to B + rho (linf: to B + rho sqrt(d)), and so
does the noise. What it costs on rows that nobody attacks is printed. Two ordinary models are there for comparison: by
objective perturbation, the best on clean rows, and by output perturbation with the regularizer of the robust ones. That
alone makes a model less brittle, nearly as much as training against l2 attacks does; against linf it is not enough.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import torch
from adult import Adult, accuracy, auc, load_adult
from pictures import bars
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp

EPSILON, DELTA = 3.0, 1e-6
BUDGET = dp.Budget(EPSILON, DELTA, adjacency="add_remove")
ROW_NORM = 3.47  # of five numbers in [0, 1] and seven one-hot groups, the intercept not counted
REG = 0.005  # per record
ATTACKS = {"clean": (0.0, 2.0), "l2": (0.2, 2.0), "linf": (0.03, math.inf)}  # radius, norm
QUICK_ROWS = 16_000
LOSS = dp.losses.Logistic()
MODELS = ("ordinary, objective", "ordinary, output", "robust, l2", "robust, linf")


def fit_private(name: str, data: TensorDataset) -> tuple[nn.Linear, float]:
    """Returns a private model, and epsilon that it spent."""
    n, dim = data.tensors[0].shape
    model = nn.Linear(dim, 1)
    optimizer: dp.OutputPerturbation | dp.ObjectivePerturbation
    if name == "ordinary, objective":
        ordinary = dp.ObjectivePerturbation.plan(
            model=model, loss=LOSS, n=n, budget=BUDGET, bound_x=ROW_NORM, residual_clip=0.5
        )
        optimizer = dp.ObjectivePerturbation(model.parameters(), ordinary)
    else:
        radius, norm = ATTACKS[name.removeprefix("robust, ").replace("ordinary, output", "clean")]
        plan = dp.OutputPerturbation.plan(
            model=model,
            loss=LOSS,
            n=n,
            budget=BUDGET,
            bound_x=ROW_NORM,
            reg=REG * n,
            attack_radius=radius,
            attack_norm=norm,
        )
        optimizer = dp.OutputPerturbation(model.parameters(), plan)
    optimizer.solve(data)
    optimizer.finalize()
    return model, optimizer.report().epsilon


def attacked(model: nn.Linear, features: Tensor, labels: Tensor, radius: float, norm: float) -> Tensor:
    """Returns the scores of rows that an attacker has moved, each to its worse side, by the best attack there is."""
    weight = model.weight.detach()[0]
    direction = weight / weight.norm() if norm == 2 else weight.sign()
    moved = features - radius * torch.outer(2 * labels - 1, direction)
    with torch.no_grad():
        return model(moved).squeeze(1)


def evaluate(model: nn.Linear, people: Adult) -> dict[str, float]:
    """Returns accuracy, AUC and log-loss on the public test set, clean and under each attack."""
    figures = {}
    for name, (radius, norm) in ATTACKS.items():
        scores = attacked(model, people.test_features, people.test_labels, radius, norm)
        loss = nn.functional.binary_cross_entropy_with_logits(scores, people.test_labels)
        figures[f"{name} accuracy"] = accuracy(scores, people.test_labels)
        figures[f"{name} auc"] = auc(scores, people.test_labels)
        figures[f"{name} log_loss"] = float(loss)
    return figures


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Fits all models, prints how they fare, clean and attacked, and returns the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="16,000 people only")
    args = parser.parse_args(argv)

    people = load_adult()
    n = QUICK_ROWS if args.quick else len(people.train_features)
    data = TensorDataset(people.train_features[:n], 2 * people.train_labels[:n] - 1)
    figures: dict[str, float] = {}
    always = float(1 - people.test_labels.mean())
    print(f"accuracy, AUC and log-loss on {len(people.test_labels):,} test people (always 'no': accuracy {always:.4f})")
    titles = "".join(
        f"{name if name == 'clean' else f'{name}, {radius:g}':^27}" for name, (radius, _) in ATTACKS.items()
    )
    print(f"{'':<22}{titles}   spent".rstrip())
    for name in MODELS:
        model, epsilon = fit_private(name, data)
        found = evaluate(model, people)
        shown = "".join(f"{value:>9.4f}" for value in found.values())
        print(f"{name:<22}{shown}   ({epsilon:.4g}, {DELTA:g})")
        figures.update({f"{name}: {kind}": value for kind, value in (found | {"epsilon": epsilon}).items()})
    print("each line is (epsilon, delta)-differential privacy, add_remove, of that model alone")
    bars("accuracy under attack", figures, ": l2 accuracy")
    return figures


if __name__ == "__main__":
    main()
