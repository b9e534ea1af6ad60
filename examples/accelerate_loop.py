"""A loop of Hugging Face's accelerate, before and after: who earns more, on UCI Adult.

    python examples/accelerate_loop.py                                             # one process, 6 seconds
    torchrun --nproc-per-node 2 examples/accelerate_loop.py                        # or: accelerate launch
    python examples/accelerate_loop.py --quick                                     # a tenth of an epoch

`accelerator.prepare` becomes `prepare(accelerator, ...)`; the loop itself is the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from accelerate import Accelerator
from adult import ROW_NORM_BOUND, Adult, accuracy, auc, load_adult
from pictures import bars
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpsco as dp
from torch_dpsco.integrations.accelerate import prepare

EPSILON, DELTA = 1.0, 1e-5
EPOCHS, QUICK_EPOCHS, BATCH = 10.0, 0.1, 1024


def zeros(data: Adult, accelerator: Accelerator) -> nn.Linear:
    """Returns the model at its start, equal in all processes."""
    model = nn.Linear(data.train_features.shape[1], 1)
    for p in model.parameters():
        nn.init.zeros_(p)
    return model.to(accelerator.device)


def before(accelerator: Accelerator, data: Adult, dataset: TensorDataset, epochs: float) -> nn.Module:
    """The loop without privacy."""
    model = zeros(data, accelerator)
    optimizer = torch.optim.SGD(model.parameters(), lr=4.0)
    loader = DataLoader(dataset, batch_size=BATCH // accelerator.num_processes, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(max(1, int(epochs))):
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.binary_cross_entropy_with_logits(model(x), y))
            optimizer.step()
    return accelerator.unwrap_model(model)


def after(
    accelerator: Accelerator, data: Adult, dataset: TensorDataset, epochs: float
) -> tuple[nn.Module, dp.HolderSGD]:
    """The private loop."""
    model = dp.attach(zeros(data, accelerator))
    problem = dp.losses.Logistic().problem(bound_x=ROW_NORM_BOUND)
    budget = dp.Budget(EPSILON, DELTA, adjacency="add_remove")
    plan = dp.HolderSGD.plan(problem=problem, n=len(dataset), budget=budget, batch_size=BATCH, epochs=epochs)
    optimizer = dp.HolderSGD(model.parameters(), plan)
    loader = optimizer.loader(dataset, steps=plan.steps)
    model, optimizer, loader = prepare(accelerator, model, optimizer, loader)
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.binary_cross_entropy_with_logits(model(x), y))
        optimizer.step()
    return dp.detach(model), optimizer


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Trains both, prints test scores and what was spent, and returns them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of an epoch")
    args = parser.parse_args(argv)
    epochs = QUICK_EPOCHS if args.quick else EPOCHS

    accelerator, data = Accelerator(cpu=True), load_adult()
    dataset = TensorDataset(data.train_features, data.train_labels[:, None])
    public = before(accelerator, data, dataset, epochs)
    private, optimizer = after(accelerator, data, dataset, epochs)
    figures: dict[str, float] = {}
    for name, model in (("baseline", public), ("private", private)):
        with torch.no_grad():
            scores = model(data.test_features)
        figures[name], figures[f"{name}_auc"] = accuracy(scores, data.test_labels), auc(scores, data.test_labels)
        accelerator.print(f"{name:<10} accuracy {figures[name]:.4f}  AUC {figures[f'{name}_auc']:.4f}")
    bars("AUC on the test set", figures, "_auc")
    report = optimizer.report().figures
    accelerator.print(f"{accelerator.num_processes} processes, {optimizer.steps} steps; spent: {report}")
    return figures | {"epsilon": report.epsilon, "steps": float(optimizer.steps)}


if __name__ == "__main__":
    main()
