"""What launchers start in `test_launchers.py`: a script of `dp.fit`, which leaves what each rank has in a folder.

    python -m tests.integrations.launched KIND FOLDER    # one process of a launcher

A process of its own: what it patches stays patched.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import torch_dpsco as dp
from torch_dpsco.accounting import journal
from torch_dpsco.errors import SequenceError
from torch_dpsco.step.oracle import ClippedMean

N, DIM, STEPS = 200, 4, 10
BUDGET = dp.Budget(2.0, 1e-5)
KILLED_AT = 4  # steps made when rank 1 dies


def records() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(N, DIM, generator=generator)
    return TensorDataset(x, (x.sum(1, keepdim=True) > DIM / 2).float())


def made(accountant: dp.Accountant | None = None) -> tuple[nn.Module, dp.HolderSGD]:
    torch.manual_seed(0)
    model = nn.Linear(DIM, 1)
    problem = dp.losses.Logistic().problem(bound_x=2.3)
    plan = dp.HolderSGD.plan(
        problem=problem, n=N, budget=BUDGET, batch_size=20, epochs=1, sampling="poisson"
    )
    return model, dp.HolderSGD(model.parameters(), plan, accountant=accountant)


def releases() -> list[int]:
    """Returns a list that grows by one with each draw of noise in this process."""
    drawn: list[int] = []
    noised = ClippedMean.noised

    def counted(self: ClippedMean, part: torch.Tensor, bits: Any) -> Any:
        drawn.append(1)
        return noised(self, part, bits)

    ClippedMean.noised = counted  # type: ignore[method-assign]
    return drawn


def leave(folder: str, facts: dict[str, Any]) -> None:
    (Path(folder) / f"rank-{dist.get_rank()}").write_text(json.dumps(facts), encoding="utf-8")


def facts_of(model: nn.Module, optimizer: dp.HolderSGD) -> dict[str, Any]:
    return {
        "processes": dist.get_world_size(),
        "answer": [
            number.hex()
            for p in model.parameters()
            for number in p.detach().double().flatten().tolist()
        ],
        "ledger": optimizer.accountant.ledger.digest(),
        "charged": len(optimizer.accountant),
        "epsilon": optimizer.report().figures.epsilon,
        "steps": optimizer.steps,
    }


def train(folder: str, data: Dataset[Any] | None = None, **options: Any) -> None:
    """In the process group that a launcher has made."""
    drawn = releases()
    model, optimizer = made()
    dp.fit(
        model,
        optimizer,
        records() if data is None else data,
        nn.BCEWithLogitsLoss(),
        progress=False,
        **options,
    )
    leave(folder, facts_of(model, optimizer) | {"drawn": len(drawn)})


def die_at(optimizer: dp.HolderSGD) -> None:
    """Lets rank 1 be killed within a step: charged everywhere, its sum awaited by rank 0."""
    write_sum = ClippedMean.write_sum

    def deadly(self: ClippedMean, message: torch.Tensor) -> int:
        if dist.get_rank() == 1 and optimizer.steps == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        return write_sum(self, message)

    ClippedMean.write_sum = deadly  # type: ignore[method-assign]


def killed(folder: str) -> None:
    dist.init_process_group("gloo")
    model, optimizer = made()
    die_at(optimizer)
    try:
        dp.fit(model, optimizer, records(), nn.BCEWithLogitsLoss(), progress=False)
    except SequenceError as error:
        leave(folder, {"error": str(error)})
        raise


def restarted(folder: str) -> None:
    """A loop with checkpoints after every second step; torchrun starts it again after the crash."""
    # no step is charged ahead, which the run that is taken up would have lost
    journal.steps_ahead = lambda line, step: 1
    dist.init_process_group("gloo")
    rank, path = dist.get_rank(), Path(folder) / "checkpoint"
    ledger = str(Path(folder) / "spent.jsonl") if rank == 0 else None
    model, optimizer = made(dp.Accountant(BUDGET, ledger_path=ledger))
    dp.attach(model)
    lost = 0
    if path.exists():
        state = torch.load(path)
        model.load_state_dict(state["model"])
        lost = optimizer.resume(state["optimizer"])
    else:
        die_at(optimizer)
    since = optimizer.steps
    for x, y in optimizer.loader(records(), steps=STEPS - since, resume=True):
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(x), y).backward()
        optimizer.step()
        if rank == 0 and optimizer.steps % 2 == 1:
            draft = path.with_suffix(".draft")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, draft)
            draft.replace(path)
    optimizer.finalize()
    leave(folder, facts_of(model, optimizer) | {"lost": lost, "since": since})


def torchrun(folder: str) -> None:
    dist.init_process_group("gloo")
    train(folder)


def fabric(folder: str) -> None:
    from lightning.fabric import Fabric  # each launcher has only its own package

    Fabric(accelerator="cpu", devices=2, strategy="ddp").launch()
    train(folder)


def accelerate(folder: str) -> None:
    from accelerate import Accelerator

    Accelerator(cpu=True)
    train(folder)


def ray(folder: str) -> None:
    import ray as engine
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    engine.init(
        num_cpus=2,
        include_dashboard=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}},
    )
    TorchTrainer(
        lambda config: train(config["folder"]),
        train_loop_config={"folder": folder},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=f"{folder}/ray"),
    ).fit()


def ray_data(folder: str) -> None:
    """Ray Data's own shards, made of whole blocks; each record is on one rank, and the run is by ids."""
    import pyarrow as pa
    import ray as engine
    from ray.train import DataConfig, RunConfig, ScalingConfig, get_dataset_shard
    from ray.train.torch import TorchConfig, TorchTrainer

    class Split(DataConfig):
        def configure(self, datasets: Any, world_size: int, *_: Any, **__: Any) -> Any:
            return [{"train": part.iterator()} for part in datasets["train"].split(world_size)]

    def work(config: dict[str, Any]) -> None:
        from torch_dpsco.integrations.parquet import ParquetRows

        shard = get_dataset_shard("train")
        ids: list[int] = []

        def tables() -> Iterator[Any]:
            for table in shard.iter_batches(batch_format="pyarrow", batch_size=30):
                ids.extend(table["id"].to_pylist())
                yield table

        data = ParquetRows(tables(), [f"x{j}" for j in range(DIM)], "y")
        assert 0 < len(data) < N
        train(config["folder"], data, shard=N, record_ids=ids)

    engine.init(
        num_cpus=2,
        include_dashboard=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}},
    )
    x, y = records().tensors
    columns = {f"x{j}": x[:, j].numpy() for j in range(DIM)} | {
        "y": y[:, 0].numpy(),
        "id": range(N),
    }
    whole = pa.table(columns)
    TorchTrainer(
        work,
        train_loop_config={"folder": folder},
        datasets={
            "train": engine.data.from_arrow(
                [whole.slice(start, N // 5) for start in range(0, N, N // 5)]
            )
        },
        dataset_config=Split(),
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=f"{folder}/ray"),
    ).fit()


def ray_splits(folder: str) -> None:
    """Leaves which of 20 records the ways of Ray to split them in three put on each."""
    import ray as engine

    engine.init(
        num_cpus=3,
        include_dashboard=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}},
    )
    engine.data.DataContext.get_current().execution_options.preserve_order = (
        True  # else the order of completion
    )
    data = engine.data.range(20, override_num_blocks=3)

    @engine.remote(num_cpus=0)
    def read(shard: Any) -> list[int]:
        return [k for batch in shard.iter_batches() for k in batch["id"].tolist()]

    ways = {
        "split": data.split(3),
        "equal": data.split(3, equal=True),
        "indices": data.split_at_indices([7, 14]),
        "streaming": data.streaming_split(3),
        "streaming equal": data.streaming_split(3, equal=True),
    }
    found = {
        name: engine.get([read.remote(shard) for shard in shards])
        for name, shards in ways.items()
    }
    (Path(folder) / "rank-0").write_text(json.dumps(found), encoding="utf-8")


def spark(folder: str) -> None:
    from pyspark.ml.torch.distributor import TorchDistributor
    from pyspark.sql import SparkSession

    from tests.integrations import (
        launched,
    )  # by its name: functions of __main__ would be pickled

    session = (
        SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    )
    TorchDistributor(num_processes=2, local_mode=True, use_gpu=False).run(
        launched.torchrun, folder
    )
    session.stop()


KINDS: dict[str, Callable[[str], None]] = {
    kind.__name__: kind
    for kind in (
        torchrun,
        fabric,
        accelerate,
        ray,
        ray_data,
        ray_splits,
        spark,
        killed,
        restarted,
    )
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    KINDS[sys.argv[1]](sys.argv[2])
