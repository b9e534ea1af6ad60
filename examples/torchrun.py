"""Private logistic regression on UCI Adult: one script, for one process and for as many as torchrun starts.

    python examples/torchrun.py                         # one process
    torchrun --nproc-per-node 2 examples/torchrun.py    # two, which make one run
    ... examples/torchrun.py --quick                    # a tenth of an epoch, for a smoke test

Each process draws its own part of every batch and clips its own rows; the sum gets noise once. What is new beside the
script of one process: it joins the process group, and starts from the same weights everywhere.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.distributed as dist
from adult import ROW_NORM_BOUND, accuracy, auc, fit_baseline, load_adult
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp

EPSILON, DELTA = 1.0, 1e-5
EPOCHS, QUICK_EPOCHS = 10.0, 0.1


def train(epochs: float) -> dict[str, float]:
    """Trains in the process group that is there, and returns the figures, which are the same on every rank."""
    data = load_adult()
    dataset = TensorDataset(data.train_features, data.train_labels[:, None])  # the whole data set, on every rank
    torch.manual_seed(0)  # ranks must start from the same weights; noise and batches do not come from this seed
    model = nn.Linear(data.train_features.shape[1], 1)
    optimizer = dp.HolderSGD(
        model.parameters(),
        dp.HolderSGD.plan(
            problem=dp.losses.Logistic().problem(bound_x=ROW_NORM_BOUND),
            n=len(dataset),
            budget=dp.Budget(EPSILON, DELTA, adjacency="add_remove"),
            epochs=epochs,
        ),
    )
    dp.fit(model, optimizer, dataset, nn.BCEWithLogitsLoss())
    figures = {"epsilon": optimizer.report().figures.epsilon, "steps": float(optimizer.steps)}
    baseline = fit_baseline(data.train_features, data.train_labels)
    for name, fitted in (("", model), ("baseline_", baseline)):
        with torch.no_grad():
            scores = fitted(data.test_features)
        figures[f"{name}accuracy"] = accuracy(scores, data.test_labels)
        figures[f"{name}auc"] = auc(scores, data.test_labels)
    return figures


def show(figures: dict[str, float], processes: int) -> None:
    """Prints what was learned and what was spent."""
    print(f"\n{processes} processes, {figures['steps']:.0f} steps")
    print(f"{'test set of 16,281 people':<28}{'accuracy':>10}{'AUC':>10}")
    print(f"{'private':<28}{figures['accuracy']:>10.4f}{figures['auc']:>10.4f}")
    print(f"{'not private':<28}{figures['baseline_accuracy']:>10.4f}{figures['baseline_auc']:>10.4f}")
    print(f"spent: epsilon {figures['epsilon']:.4f} at delta {DELTA:g}, add_remove")


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Joins the others, if torchrun has started this process, trains, and prints on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of an epoch")
    args = parser.parse_args(argv)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")  # before the optimizer is made; torchrun tells it who the others are
    figures = train(QUICK_EPOCHS if args.quick else EPOCHS)
    if not dist.is_initialized():
        show(figures, 1)
        return figures
    if dist.get_rank() == 0:
        show(figures, dist.get_world_size())
    dist.destroy_process_group()
    return figures


if __name__ == "__main__":
    main()
