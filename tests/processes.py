"""Launches gloo processes on this machine, and makes the runs that they share.

They are forked from a server that has imported the package; each launch makes many checks, whose results come back as
tensors and words. A launch that hangs fails.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing import start_processes
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from torch_dpsco.noise import SliceStream, Source, stream_of
from torch_dpsco.step.oracle import ClippedMean, Release

SECONDS = 240  # until ranks are said to hang, on a busy machine too
N, DIM = 64, 5


# -- launching --------------------------------------------------------------------------------------------------------


def run_rank(
    rank: int, work: Callable[..., Any], world: int, folder: str, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    dist.init_process_group(
        "gloo",
        f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=20),
    )
    # the group ends with the process: `destroy_process_group` of torch 2.6 hangs now and then
    torch.save(work(rank, *args), f"{folder}/{rank}")


def launch(work: Callable[..., Any], world: int, folder: Path, *args: Any) -> list[Any]:
    """Returns what `work(rank, *args)` returns on each rank."""
    set_forkserver_preload(["torch_dpsco", "pytest", "scipy.stats"])
    running = start_processes(
        run_rank,
        (work, world, str(folder), args),
        nprocs=world,
        join=False,
        start_method="forkserver",
    )
    end = time.monotonic() + SECONDS
    while not running.join(timeout=1.0):
        if time.monotonic() > end:
            for process in running.processes:
                process.kill()
            pytest.fail(f"{work.__name__} hangs")
    return [torch.load(folder / str(rank)) for rank in range(world)]


def message(
    kind: type[BaseException] | tuple[type[BaseException], ...], call: Callable[[], Any]
) -> str:
    """Returns what an error of that kind says; any other outcome fails the launch."""
    try:
        call()
    except kind as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"{kind} was not raised")


# -- a run ------------------------------------------------------------------------------------------------------------


def records(n: int = N) -> TensorDataset:
    """(features, target, position), in float64, so that sums in another order agree to 1e-12."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(n, DIM, dtype=torch.float64, generator=generator)
    y = (torch.rand(n, 1, generator=generator) < 0.5).double()
    return TensorDataset(x, y, torch.arange(n))


def layer(seed: int = 0, *, inputs: int = DIM, dtype: torch.dtype = torch.float64) -> nn.Linear:
    torch.manual_seed(seed)
    return dp.attach(nn.Linear(inputs, 1, dtype=dtype))


def holder(
    model: nn.Module, noise: float = 0.0, batch_size: int = 6, n: int = N, **options: Any
) -> dp.HolderSGD:
    problem = dp.losses.Squared().problem(
        bound_x=3.0, bound_y=2.0
    )  # its clip follows the iterate
    return dp.HolderSGD(
        model.parameters(),
        dp.HolderSGD.plan(
            lr=0.01,
            problem=problem,
            noise_multiplier=noise,
            batch_size=batch_size,
            n=n,
            **options,
        ),
    )


def full(model: nn.Module, n: int = N, noise: float = 0.0, **options: Any) -> dp.ClippedSGD:
    own = {
        name: options.pop(name)
        for name in ("rule", "accountant", "generator")
        if name in options
    }
    plan = dp.ClippedSGD.plan(
        lr=0.1, clip=0.5, noise_multiplier=noise, n=n, sampling="full", **options
    )
    return dp.ClippedSGD(model.parameters(), plan, **own)


def backward(model: nn.Module, optimizer: dp.PrivateOptimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    if len(x):
        nn.functional.mse_loss(model(x), y).backward()


def numbers(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def train(model: nn.Module, optimizer: dp.PrivateOptimizer, batches: Any) -> dict[str, Any]:
    """Returns the positions of each draw, and the parameters after each step."""
    drawn: list[list[int]] = [[]]
    path = []
    for x, y, position in batches:
        backward(model, optimizer, x, y)
        drawn[-1] += position[x.any(dim=1)].tolist()  # zeros fill the batch up
        before = optimizer.steps
        optimizer.step()
        if optimizer.steps > before:
            drawn.append([])
            path.append(numbers(model))
    return {"drawn": drawn[:-1], "path": torch.stack(path)}


def union(ranks: Sequence[dict[str, Any]]) -> list[list[int]]:
    return [
        sorted(i for part in drawn for i in part)
        for drawn in zip(*(rank["drawn"] for rank in ranks), strict=True)
    ]


def run_of(kind: str, model: nn.Module, **options: Any) -> dp.PrivateOptimizer:
    return (
        holder(model, average="uniform", **options)
        if kind == "poisson"
        else full(model, **options)
    )


def trajectory(kind: str, **options: Any) -> dict[str, Any]:
    """One run without noise; the numpy and torch seeds of the ranks are equal."""
    torch.manual_seed(1), np.random.seed(1)  # noqa: NPY002  (what naive samplers draw by)
    model = layer()
    optimizer = run_of(kind, model)
    result = train(model, optimizer, optimizer.loader(records(), steps=8, **options))
    optimizer.finalize()
    return result | {"answer": numbers(model), "ledger": optimizer.accountant.ledger.digest()}


def released_by_one(
    oracle: ClippedMean, total: Tensor, rows: int, noise: Source, processes: int
) -> Release:
    """What so many ranks release of a sum, by one process: the slices of all of them, under the key of rank 0."""
    oracle.require_rows(rows)
    key = bytearray(32)
    stream_of(noise).fill(memoryview(key))
    message = torch.cat([total.new_zeros(2), total])
    answer = torch.empty(0, dtype=oracle._dtype)
    for rank, part in enumerate(message.split(max(2**16, -(-len(message) // processes)))):
        bits = SliceStream(rank)
        bits.key.copy_(torch.tensor(list(key)))
        answer = torch.cat([answer, oracle.noised(part, bits).to(oracle._dtype)])
    oracle.discard()
    return Release(oracle.views(answer[2:]))


def empties() -> dict[str, Any]:
    """T13: 64 records in batches of 2, so that most ranks draw nothing in most steps."""
    model = layer()
    optimizer = holder(model, noise=1.0, batch_size=2)
    result = train(model, optimizer, optimizer.loader(records()))
    optimizer.finalize()
    return result | {
        "steps": optimizer.steps,
        "charged": len(optimizer.accountant),
        "answer": numbers(model),
    }
