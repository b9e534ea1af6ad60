"""An ordinary PyTorch loop, before and after: four lines change, the loop itself does not.

python examples/existing_loop.py            # trains both, eps = 1 on 32,561 people
python examples/existing_loop.py --quick
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence

import torch
from adult import ROW_NORM_BOUND, accuracy, auc, load_adult
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpsco as dp

EPSILON, DELTA = 1.0, 1e-5
BATCH_SIZE, EPOCHS, LR = 512, 10, 0.3


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Iterable[Sequence[torch.Tensor]],
    criterion: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    epochs: int,
) -> None:
    """The loop that everybody has; it serves both runs as it is."""
    for _ in range(epochs):
        for features, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(features), labels)
            loss.backward()
            optimizer.step()


def before(dataset: TensorDataset, dim: int, epochs: int) -> nn.Module:
    """Returns a model trained without privacy."""
    model = nn.Linear(dim, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True)
    train(model, optimizer, loader, nn.BCEWithLogitsLoss(), epochs)
    return model


def after(dataset: TensorDataset, dim: int, epochs: int) -> tuple[nn.Module, dp.PrivateOptimizer]:
    """Returns a privately trained model, and the optimizer that knows what was spent."""
    budget = dp.Budget(EPSILON, DELTA, adjacency="add_remove")
    problem = dp.losses.Logistic().problem(bound_x=ROW_NORM_BOUND)
    model = dp.attach(nn.Linear(dim, 1))
    plan = dp.HolderSGD.plan(
        problem=problem, n=len(dataset), budget=budget, lr=LR, batch_size=BATCH_SIZE, epochs=epochs
    )
    optimizer = dp.HolderSGD(model.parameters(), plan)
    loader = optimizer.loader(dataset)
    train(model, optimizer, loader, dp.per_record(nn.BCEWithLogitsLoss), epochs)
    return model, optimizer


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Trains both, prints their test scores and what the private one spent, and returns the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two epochs")
    args = parser.parse_args(argv)
    epochs = 2 if args.quick else EPOCHS  # Poisson batches both times: one pass alone has another default

    data = load_adult()
    dataset = TensorDataset(data.train_features, data.train_labels[:, None])
    dim = data.train_features.shape[1]
    public = before(dataset, dim, epochs)
    private, optimizer = after(dataset, dim, epochs)

    figures = {}
    for name, model in (("not private", public), ("private", private)):
        with torch.no_grad():
            scores = model(data.test_features)
        figures[name] = auc(scores, data.test_labels)
        print(f"{name:<12} accuracy {accuracy(scores, data.test_labels):.4f}  AUC {figures[name]:.4f}")
    report = optimizer.report().figures
    print(f"spent: {report}")
    return {"baseline_auc": figures["not private"], "auc": figures["private"], "epsilon": report.epsilon}


if __name__ == "__main__":
    main()
