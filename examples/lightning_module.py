"""Handwritten digits by Lightning's Trainer: the same module, private by a plan, one callback and its steps.

    python examples/lightning_module.py            # eps = 4, about ten seconds
    python examples/lightning_module.py --quick    # two epochs, for a smoke test

1,437 pictures of scikit-learn's digits train, 360 test. They stand for public ones here, as those by which training is
watched must be. The plan has the noise, the steps and the price; the callback draws the batches, keeps training losses
out of bar and loggers, and ends with the private answer in the module.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from pictures import bars
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpsco as dp
from torch_dpsco.integrations.lightning import PrivateTraining

EPSILON, DELTA = 4.0, 1e-5
TRAIN = 1_437
EPOCHS, BATCH, LR = 30, 64, 2.0  # without privacy; the plan has its own
LOSS = dp.losses.SoftmaxCrossEntropy(10)


class Digits(LightningModule):
    """A linear model of 64 pixels, as one would write it without privacy, but for the optimizer."""

    def __init__(self, plan: Any = None) -> None:
        super().__init__()
        self.model, self.plan = nn.Linear(64, 10), plan

    def forward(self, pixels: Tensor) -> Tensor:
        """Returns scores."""
        return self.model(pixels)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Returns the loss."""
        return LOSS(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Measures on pictures that did not train."""
        self.log("accuracy", (self(batch[0]).argmax(1) == batch[1]).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns a private optimizer if there is a plan."""
        if self.plan is None:
            return torch.optim.SGD(self.parameters(), LR)
        return dp.HolderSGD(self.parameters(), self.plan)  # 1


def load() -> tuple[TensorDataset, TensorDataset]:
    """Returns training and test pictures, in rows of norm at most 1."""
    pixels, labels = load_digits(return_X_y=True)
    rows = torch.nn.functional.normalize(torch.from_numpy(pixels).float())
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    parts = order[:TRAIN], order[TRAIN:]
    train, test = (TensorDataset(rows[part], torch.from_numpy(labels)[part].long()) for part in parts)
    return train, test


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Trains without and with privacy, prints both accuracies, and returns the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilon", type=float, default=EPSILON)
    parser.add_argument("--quick", action="store_true", help="two epochs")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore", ".*(does not have many workers|LeafSpec|number of training batches)")

    train, test = load()
    usual: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    figures, budget = dict[str, float](), dp.Budget(args.epsilon, DELTA, adjacency="add_remove")
    problem = LOSS.problem(bound_x=1.0)
    plan = dp.HolderSGD.plan(problem=problem, n=len(train), budget=budget, epochs=2 if args.quick else None)
    batch_sizes = {"not_private": BATCH, "private": plan.batch_size}
    runs = {
        "not_private": (Digits(), Trainer(max_epochs=2 if args.quick else EPOCHS, **usual)),
        "private": (Digits(plan), Trainer(max_steps=plan.steps, callbacks=[PrivateTraining()], **usual)),  # 2, 3
    }
    for name, (module, trainer) in runs.items():
        trainer.fit(module, DataLoader(train, batch_sizes[name], shuffle=True), DataLoader(test, batch_size=len(test)))
        figures[f"{name}_accuracy"] = float(trainer.callback_metrics["accuracy"])
    figures["epsilon"] = module.optimizers().optimizer.accountant.get_epsilon(DELTA)
    print(f"\naccuracy: private {figures['private_accuracy']:.4f}, not private {figures['not_private_accuracy']:.4f}")
    print(f"spent: epsilon {dp.accounting.calibrate.rounded_up(figures['epsilon'])} at delta {DELTA:g}")
    bars("accuracy", figures, "_accuracy")
    return figures


if __name__ == "__main__":
    main()
