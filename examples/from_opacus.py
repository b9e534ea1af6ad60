"""A script that uses Opacus, and the same script moved to torch_dpsco: the loop stays, seven lines go, six come.

    python examples/from_opacus.py             # trains both, eps = 1 on 32,561 people, a quarter of a minute
    python examples/from_opacus.py --quick     # one epoch, for a smoke test

The clip of 1 that the first script guesses shortens nearly every gradient at first. With the 3.61 that the second
derives from the loss both score alike; but to find that by trying would cost budget. The whole difference of `before`
and `after`, which docs/from_opacus.md goes through:

         model = nn.Linear(dim, 1)
         optimizer = torch.optim.SGD(model.parameters(), lr=LR)
         loader = DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True)
    -    engine = PrivacyEngine()
    -    model, optimizer, loader = engine.make_private_with_epsilon(
    -        module=model,
    +    model, optimizer, loader = dp.make_private(
    +        model=model,
             optimizer=optimizer,
             data_loader=loader,
             epochs=epochs,
    -        target_epsilon=EPSILON,
    -        target_delta=DELTA,
    -        max_grad_norm=MAX_GRAD_NORM,
    +        budget=dp.Budget(EPSILON, DELTA, adjacency="add_remove"),
    +        problem=dp.losses.Logistic().problem(bound_x=ROW_NORM_BOUND),
    +        n=PEOPLE,
         )
         train(model, optimizer, loader, nn.BCEWithLogitsLoss(), epochs)
    -    return model, engine.get_epsilon(DELTA)
    +    return model, optimizer.report().figures
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterable, Sequence

import torch
from adult import ROW_NORM_BOUND, accuracy, auc, load_adult
from opacus import PrivacyEngine
from pictures import bars
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpsco as dp
from torch_dpsco.accounting.calibrate import rounded_up
from torch_dpsco.accounting.report import PrivacyReport

EPSILON, DELTA = 1.0, 1e-5
BATCH_SIZE, EPOCHS, LR = 512, 10, 0.3
MAX_GRAD_NORM = 1.0  # what Opacus clips at; torch_dpsco derives its bound from the loss
PEOPLE = 32_561  # published: neither rate nor number of steps may depend on who is in the data set
# Opacus and torch say these to everybody who runs the first half of this script; they are no news to its author.
EXPECTED_WARNINGS = ("Secure RNG turned off", "Optimal order is the largest alpha", "Full backward hook is firing")

ADDED = """
what the second script says, and refuses, beyond a number:
  - epsilon is that of a named relation, add_remove; under replace_one the same run spends {other}
  - rate, steps and divisor follow from the published n = {people}, not from the records at hand
  - each step is charged before its noise is drawn; one that would pass epsilon = {spent:g} is refused
  - the clip is the gradient bound of the loss, so that no row is shortened and no threshold is to be found
  - no raw gradient outlives a backward, and a batch from another loader raises
"""

Batches = Iterable[Sequence[torch.Tensor]]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Batches, loss_fn: Loss, epochs: int) -> None:
    """The loop that everybody has; it serves both runs as it is."""
    for _ in range(epochs):
        for features, labels in loader:
            optimizer.zero_grad()
            loss_fn(model(features), labels).backward()
            optimizer.step()


def before(dataset: TensorDataset, dim: int, epochs: int) -> tuple[nn.Module, float]:
    """Returns a model trained with Opacus, and its epsilon."""
    model = nn.Linear(dim, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True)
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        epochs=epochs,
        target_epsilon=EPSILON,
        target_delta=DELTA,
        max_grad_norm=MAX_GRAD_NORM,
    )
    train(model, optimizer, loader, nn.BCEWithLogitsLoss(), epochs)
    return model, engine.get_epsilon(DELTA)


def after(dataset: TensorDataset, dim: int, epochs: int) -> tuple[nn.Module, PrivacyReport]:
    """Returns a model trained with torch_dpsco, and the report of what was spent."""
    model = nn.Linear(dim, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True)
    model, optimizer, loader = dp.make_private(
        model=model,
        optimizer=optimizer,
        data_loader=loader,
        epochs=epochs,
        budget=dp.Budget(EPSILON, DELTA, adjacency="add_remove"),
        problem=dp.losses.Logistic().problem(bound_x=ROW_NORM_BOUND),
        n=PEOPLE,
    )
    train(model, optimizer, loader, nn.BCEWithLogitsLoss(), epochs)
    return model, optimizer.report().figures


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Trains both, prints their test scores and what each of them says about privacy, and returns the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one epoch")
    args = parser.parse_args(argv)
    epochs = 1 if args.quick else EPOCHS

    data = load_adult()
    dataset = TensorDataset(data.train_features, data.train_labels[:, None])
    dim = data.train_features.shape[1]
    with warnings.catch_warnings():
        for message in EXPECTED_WARNINGS:
            warnings.filterwarnings("ignore", message=message, category=UserWarning)
        opacus_model, opacus_epsilon = before(dataset, dim, epochs)
    model, report = after(dataset, dim, epochs)

    figures: dict[str, float] = {}
    print(f"{'test set of 16,281 people':<28}{'accuracy':>10}{'AUC':>10}{'epsilon':>10}")
    for name, trained, epsilon in (("opacus", opacus_model, opacus_epsilon), ("torch_dpsco", model, report.epsilon)):
        with torch.no_grad():
            scores = trained(data.test_features)
        found = {"accuracy": accuracy(scores, data.test_labels), "auc": auc(scores, data.test_labels)}
        figures |= {f"{name}_{key}": value for key, value in found.items()} | {f"{name}_epsilon": float(epsilon)}
        print(f"{name:<28}{found['accuracy']:>10.4f}{found['auc']:>10.4f}{rounded_up(epsilon):>10}")
    print(ADDED.format(spent=report.budget.epsilon, other=rounded_up(report.epsilons["replace_one"]), people=PEOPLE))
    print(f"spent: {report}")
    bars("AUC on the test set", figures, "_auc")
    return figures


if __name__ == "__main__":
    main()
