"""Shards of a model: a private net on UCI Adult whose weights and moments are cut over processes, by FSDP 2.

    torchrun --nproc-per-node 2 examples/shards.py    # in the process group that torchrun starts
    python examples/shards.py                         # starts two processes itself
    ... examples/shards.py --quick                    # few steps, for a smoke test

Each process holds a part of each weight and of what the update rule keeps of it, draws its own part of every batch, and
clips whole rows; each part of the sum gets its noise on the process that has the part. What is new beside
`torchrun.py`: `fully_shard` gives the parameters, and batches come in slots, of one public size everywhere.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from adult import Adult, load_adult
from torch import nn
from torch.multiprocessing import start_processes
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from torch_dpsco.integrations.fsdp import fully_shard

EPSILON, DELTA = 1.0, 1e-5
STEPS, QUICK_STEPS = 200, 1
WIDTH = 512
PROCESSES = 2


def train(data: Adult, steps: int) -> None:
    """Trains in the process group that is there, and prints on the first rank."""
    labels = data.train_labels[:, None].float()
    dataset = TensorDataset(data.train_features.float(), labels)  # the whole data set, on every rank
    torch.manual_seed(0)  # ranks must start from the same weights; noise and batches do not come from this seed
    features = data.train_features.shape[1]
    model = nn.Sequential(
        nn.Sequential(nn.Linear(features, WIDTH), nn.Tanh()),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
        nn.Linear(WIDTH, 1),
    )
    weights = sum(p.numel() for p in model.parameters())
    dp.attach(model, check_first_step=False)
    budget = dp.Budget(EPSILON, DELTA, adjacency="add_remove")
    plan = dp.ClippedSGD.plan(
        n=len(dataset), budget=budget, clip=1.0, lr=0.003, sampling="poisson", batch_size=1024, steps=steps
    )
    parts = fully_shard(model)  # the layers of each child are put together for its forward and its backward
    optimizer = dp.ClippedSGD(parts, plan, rule=dp.rules.AdamBC(0.003))
    criterion = nn.BCEWithLogitsLoss()
    for x, y in optimizer.loader(dataset, steps=steps, isolation="slots"):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    with torch.no_grad():  # on all ranks: each forward puts weights together
        scores = model(data.test_features.float())[:, 0]
    right = ((scores > 0) == (data.test_labels > 0)).double().mean()
    held = sum(p.numel() for p in parts)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} processes, {optimizer.steps} of {steps} steps")
        print(f"weights: {weights:,}, of which this process holds {held:,}")
        print(f"accuracy on the test set of 16,281 people: {right:.4f}")
        print(f"spent: epsilon {optimizer.report().figures.epsilon:.4f} at delta {DELTA:g}, add_remove")


def join(rank: int, folder: str, data: Adult, steps: int) -> None:
    """Makes one of the processes that this script starts."""
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", store, rank=rank, world_size=PROCESSES, timeout=timedelta(minutes=2))
    train(data, steps)
    dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> None:
    """Joins the others, if torchrun has started this process; else starts them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps")
    steps = QUICK_STEPS if parser.parse_args(argv).quick else STEPS
    data = load_adult()
    if not dist.is_torchelastic_launched():
        with tempfile.TemporaryDirectory() as folder:
            start_processes(join, (folder, data, steps), nprocs=PROCESSES, start_method="fork")
        return
    dist.init_process_group("gloo")  # before the model is cut
    train(data, steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
