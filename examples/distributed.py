"""Private logistic regression on several processes: one script, started on each of them.

    python examples/distributed.py            # eps = 1 on 32,561 people, by two processes of this machine
    python examples/distributed.py --quick    # a tenth of an epoch, for a smoke test

Each process draws its own part of every batch and clips its own rows; the sum gets noise once. Nothing else is new:
without the process group, `train` is the script of one process. On several machines start it by torchrun.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from adult import ROW_NORM_BOUND, accuracy, auc, load_adult
from torch import nn
from torch.multiprocessing import start_processes
from torch.utils.data import TensorDataset

import torch_dpsco as dp

EPSILON, DELTA = 1.0, 1e-5
PROCESSES = 2
EPOCHS, QUICK_EPOCHS = 10.0, 0.1
START_METHOD = "spawn"


def train(epochs: float) -> dict[str, float]:
    """Trains and returns the figures, which are the same on every rank."""
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
    with torch.no_grad():
        scores = model(data.test_features)
    figures = {"accuracy": accuracy(scores, data.test_labels), "auc": auc(scores, data.test_labels)}
    report = optimizer.report().figures
    if dist.get_rank() == 0:
        print(f"\n{dist.get_world_size()} processes, {optimizer.steps} steps")
        print(f"test set of 16,281 people: accuracy {figures['accuracy']:.4f}  AUC {figures['auc']:.4f}")
        print(f"spent: {report}")
    return figures | {"epsilon": report.epsilon, "steps": float(optimizer.steps)}


def run(rank: int, processes: int, folder: str, epochs: float) -> None:
    """What each process does: joins the group, trains, leaves its figures in a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=processes)
    torch.save(train(epochs), Path(folder) / f"figures-{rank}")
    dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Starts the processes, and returns the figures of rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument("--quick", action="store_true", help="a tenth of an epoch")
    args = parser.parse_args(argv)
    epochs = QUICK_EPOCHS if args.quick else EPOCHS
    with tempfile.TemporaryDirectory() as folder:
        start_processes(run, (args.processes, folder, epochs), nprocs=args.processes, start_method=START_METHOD)
        ranks: list[dict[str, float]] = [torch.load(Path(folder) / f"figures-{r}") for r in range(args.processes)]
    if any(figures != ranks[0] for figures in ranks):
        raise RuntimeError("the models of the ranks are not equal")
    return ranks[0]


if __name__ == "__main__":
    main()
