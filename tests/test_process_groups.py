"""Process groups of the user's own: some ranks make one run, another makes its own, and neither waits for the other."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from tests.processes import (
    DIM,
    N,
    backward,
    full,
    launch,
    layer,
    message,
    numbers,
    records,
    train,
)
from torch_dpsco import compat, distributed
from torch_dpsco.errors import SequenceError
from torch_dpsco.step.oracle import ClippedMean

BUDGET = dp.Budget(1.0, 1e-3)
KINDS = (
    "fsdp2",
    "a layer of fsdp2",
    "fsdp1",
    "a layer of fsdp1",
    "flat fsdp1",
    "tensor parallel",
)
WAYS = 9  # in which a model is cut into shards
loss = nn.functional.mse_loss

# -- what the ranks do ------------------------------------------------------------------------------------------------


def parted(rank: int) -> dict[str, Any]:
    """Of three ranks 1 and 2 make a run, 0 makes its own, and then all make one."""
    pair = dist.new_group([1, 2])
    found: dict[str, Any] = {
        "stranger": "" if rank else message(ValueError, lambda: entered(pair))
    }
    with distributed.use(pair if rank else "alone"):
        found |= {
            "own": trained(noise=1.0),
            "silent": trained(noise=0.0),
            "first": distributed.is_first(),
        }
        found["size"] = distributed.world_size()
        model = layer()
        optimizer = full(model, noise=1.0)
        (x, y, _), *_ = optimizer.loader(records(), steps=1)
        backward(model, optimizer, x, y)
        found["row free"] = row_free() if rank == 0 else message(SequenceError, row_free)
    found["outside"] = message(SequenceError, optimizer.step)
    found["unspent"] = len(optimizer.accountant)
    found["all"] = trained(noise=1.0) | {"size": distributed.world_size()}
    default = full(layer(), noise=1.0)
    with distributed.use("alone"):
        found["inside"] = message(SequenceError, lambda: default.loader(records()))
    return found


def entered(group: Any) -> None:
    with distributed.use(group):
        pass


def trained(noise: float) -> dict[str, Any]:
    drawn: list[int] = []
    release = ClippedMean.release
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            ClippedMean,
            "release",
            lambda self, source: (drawn.append(1), release(self, source))[1],
        )
        model = layer()
        optimizer = full(model, noise=noise)
        found = train(model, optimizer, optimizer.loader(records(), steps=3))
        optimizer.finalize()
    return found | {
        "answer": numbers(model),
        "charged": len(optimizer.accountant),
        "releases": len(drawn),
    }


def row_free() -> str:
    problem = dp.losses.Logistic().problem(bound_x=2.0, radius=2.0)
    plan = dp.BoltOnPSGD.plan(problem=problem, n=N, dim=DIM + 1, budget=BUDGET)
    return type(dp.BoltOnPSGD(nn.Linear(DIM, 1).double().parameters(), plan)).__name__


def wrapped(rank: int) -> dict[str, Any]:
    """Models that other strategies have wrapped or cut, before and after `attach`."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    cpu = torch.device("cpu")

    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(DIM, 2), nn.Linear(2, 1))

    def shards(model: nn.Module, use_orig_params: bool = True) -> nn.Module:
        return FullyShardedDataParallel(model, use_orig_params=use_orig_params, device_id=cpu)

    def layer_of(cut: Any, model: nn.Module) -> nn.Module:
        model[0] = cut(model[0])
        return model

    def step_of(outer: Any, inner: nn.Module) -> None:
        optimizer = full(inner, noise=1.0)
        model = outer(inner)
        (x, y, _), *_ = optimizer.loader(records(), steps=1)
        backward(model, optimizer, x.float(), y.float())

    def model_of(cut: Any) -> dict[str, Any]:
        """All ways in: before and after `attach`, and before and after the optimizer."""

        def attached(rows: str = "auto") -> nn.Module:
            return dp.attach(net(), rows=rows)

        def fitted(model: nn.Module) -> None:
            optimizer = full(model, noise=1.0)
            dp.fit(
                cut(model),
                optimizer,
                TensorDataset(*(t.float() for t in records().tensors[:2])),
                loss,
                steps=1,
            )

        def between() -> None:
            model = net()
            step_of(lambda inner: dp.attach(cut(inner)), model)

        def later() -> None:
            model = attached()
            step_of(lambda inner: inner, model)
            step_of(cut, model)

        return {
            "attach": lambda: dp.attach(cut(net())),
            "optimizer": lambda: full(cut(net())),
            "attached, optimizer": lambda: full(cut(attached())),
            "attached, forward": lambda: step_of(cut, attached()),
            "attached dense, forward": lambda: step_of(cut, attached("dense")),
            "after a step": later,
            "optimizer, attach": between,
            "fit": lambda: fitted(net()),
            "fit of an attached one": lambda: fitted(attached()),
        }

    replicated = nn.parallel.DistributedDataParallel
    cuts = {
        "fsdp2": lambda model: fully_shard(model, mesh=mesh),
        "a layer of fsdp2": lambda model: layer_of(
            lambda inner: fully_shard(inner, mesh=mesh), model
        ),
        "fsdp1": shards,
        "a layer of fsdp1": partial(layer_of, shards),
        "flat fsdp1": partial(shards, use_orig_params=False),
        "tensor parallel": lambda model: parallelize_module(
            model, mesh, {"1": ColwiseParallel()}
        ),
    }
    calls = {
        "ddp": lambda: dp.attach(replicated(net())),
        "ddp in a model": lambda: dp.attach(nn.Sequential(nn.Linear(2, DIM), replicated(net()))),
        "ddp of an attached model": lambda: step_of(replicated, dp.attach(net())),
        "replicate": lambda: step_of(lambda inner: inner, dp.attach(replicate(net()))),
    }
    calls |= {
        f"{kind}: {way}": call
        for kind, cut in cuts.items()
        for way, call in model_of(cut).items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {
            name: message((ValueError, SequenceError, AttributeError), call)
            for name, call in calls.items()
        }
        return found | {
            "replicas": [compat.is_replicated(model) for model in (replicate(net()), net())]
        }


# -- groups -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch(parted, 3, tmp_path_factory.mktemp("groups"))


@pytest.mark.slow
def test_ranks_of_a_group_make_one_run_and_the_others_their_own(
    apart: list[dict[str, Any]],
) -> None:
    alone, first, second = apart
    assert [rank["size"] for rank in apart] == [1, 2, 2]
    assert [rank["first"] for rank in apart] == [True, True, False]
    assert torch.equal(first["own"]["answer"], second["own"]["answer"])
    assert not torch.equal(first["own"]["answer"], alone["own"]["answer"])  # noise of its own
    assert [rank["own"]["charged"] for rank in apart] == [3, 3, 3]
    assert [rank["own"]["releases"] for rank in apart] == [
        3,
        3,
        0,
    ]  # rank 1 is the first of its group


def test_each_group_draws_all_records(apart: list[dict[str, Any]]) -> None:
    alone, first, second = (rank["own"]["drawn"] for rank in apart)
    for draws in zip(alone, first, second, strict=True):
        whole, *parts = map(sorted, draws)
        assert whole == sorted([*parts[0], *parts[1]]) == list(range(N))


def test_a_group_computes_what_one_process_does(apart: list[dict[str, Any]]) -> None:
    alone, first, second = (rank["silent"]["answer"] for rank in apart)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, alone, rtol=0, atol=1e-12)


def test_outside_of_its_block_an_optimizer_of_a_group_is_refused(
    apart: list[dict[str, Any]],
) -> None:
    for rank in apart:
        assert "distributed.use(" in rank["outside"]
        assert rank["unspent"] == 0
    for rank in apart:
        assert "the process group must be that of the optimizer, of 3 ranks" in rank["inside"]


def test_after_the_block_all_ranks_make_one_run(apart: list[dict[str, Any]]) -> None:
    answers = [rank["all"]["answer"] for rank in apart]
    assert all(torch.equal(answer, answers[0]) for answer in answers)
    assert [rank["all"]["size"] for rank in apart] == [3, 3, 3]
    assert [rank["all"]["releases"] for rank in apart] == [3, 0, 0]


def test_runs_of_one_process_are_made_alone_only(apart: list[dict[str, Any]]) -> None:
    alone, first, _ = apart
    assert alone["row free"] == "BoltOnPSGD"
    assert "world_size must be 1 for this optimizer (got 2)" in first["row free"]


def test_a_process_that_is_not_in_the_group_is_refused(apart: list[dict[str, Any]]) -> None:
    assert (
        "group must be a process group that this process is in, or 'alone'"
        in apart[0]["stranger"]
    )


@pytest.mark.parametrize("group", [None, "all", 2, [0, 1]])
def test_what_is_no_group_is_refused(group: Any) -> None:
    with pytest.raises(
        ValueError, match="group must be a process group that this process is in, or 'alone'"
    ):
        entered(group)


# -- wrapped models ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch(wrapped, 2, tmp_path_factory.mktemp("wrapped"))


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ddp", "model must not be replicated (got DistributedDataParallel"),
        ("ddp in a model", "model must not be replicated (got DistributedDataParallel '1'"),
        (
            "ddp of an attached model",
            "model must not be replicated (got a forward of DistributedDataParallel)",
        ),
        ("replicate", "model must not be replicated (got a forward of DistributedDataParallel)"),
        (
            "a layer of fsdp2: attach",
            "ValueError: model must not be sharded (got FSDPLinear '0')",
        ),
        ("fsdp2: attach", "ValueError: model must not be sharded (got FSDPSequential ''"),
        (
            "fsdp1: attach",
            "ValueError: model must not be sharded (got FullyShardedDataParallel ''",
        ),
        ("tensor parallel: attach", "ValueError: model must not be sharded (got Linear '1'"),
        ("fsdp2: optimizer", "ValueError: params must be whole (got a shard, DTensor)"),
        ("fsdp1: optimizer", "ValueError: params must be whole (got a shard, Parameter)"),
    ],
)
def test_a_wrapped_or_sharded_model_is_refused_by_name(
    name: str, words: str, refused: list[dict[str, Any]]
) -> None:
    for rank in refused:
        assert words in rank[name]


def test_a_replica_is_known_before_it_is_called(refused: list[dict[str, Any]]) -> None:
    assert [rank["replicas"] for rank in refused] == [[True, False]] * 2


NO_CPU = "AttributeError: 'Stream' object has no attribute 'record_event'"  # torch 2.6's, of fsdp2 on a CPU


@pytest.mark.parametrize("kind", KINDS)
def test_a_shard_is_refused_by_name_whenever_it_comes(
    kind: str, refused: list[dict[str, Any]]
) -> None:
    for rank in refused:
        said = {way: words for way, words in rank.items() if way.startswith(f"{kind}: ")}
        assert len(said) == WAYS
        for way, words in said.items():
            if words == NO_CPU and torch.__version__.startswith("2.6."):
                continue
            place = (
                "params must be whole"
                if way.endswith("optimizer")
                else "model must not be sharded"
            )
            assert words.startswith(f"ValueError: {place} (got "), way
            assert (
                "leave fully_shard, FSDP or parallelize_module out and give every process the whole model"
                in words
            )


def test_the_kinds_that_are_known_by_name_are_those_of_torch() -> None:
    names = {FullyShardedDataParallel.__name__, torch.distributed.fsdp.FSDPModule.__name__}
    assert names == {"FullyShardedDataParallel", "FSDPModule"}
