"""Process groups of the user's own: some ranks make one run, another makes its own, and neither waits for the other."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import torch_dpsco as dp
from tests.processes import DIM, N, backward, full, launch, layer, message, numbers, records, train
from torch_dpsco import distributed
from torch_dpsco.errors import SequenceError
from torch_dpsco.oracles.clipped import ClippedMean

BUDGET = dp.Budget(1.0, 1e-3)

# -- what the ranks do ------------------------------------------------------------------------------------------------


def parted(rank: int) -> dict[str, Any]:
    """Of three ranks 1 and 2 make a run, 0 makes its own, and then all make one."""
    pair = dist.new_group([1, 2])
    found: dict[str, Any] = {"stranger": "" if rank else message(ValueError, lambda: entered(pair))}
    with distributed.use(pair if rank else "alone"):
        found |= {"own": trained(noise=1.0), "silent": trained(noise=0.0), "first": distributed.is_first()}
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
        patch.setattr(ClippedMean, "release", lambda self, source: (drawn.append(1), release(self, source))[1])
        model = layer()
        optimizer = full(model, noise=noise)
        found = train(model, optimizer, optimizer.loader(records(), steps=3))
        optimizer.finalize()
    return found | {"answer": numbers(model), "charged": len(optimizer.accountant), "releases": len(drawn)}


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

    def shards(use_orig_params: bool = True) -> nn.Module:
        return FullyShardedDataParallel(net(), use_orig_params=use_orig_params, device_id=cpu)

    def step_of(outer: Any, inner: nn.Module) -> None:
        optimizer = full(inner, noise=1.0)
        model = outer(inner)
        (x, y, _), *_ = optimizer.loader(records(), steps=1)
        backward(model, optimizer, x.float(), y.float())

    replicated = nn.parallel.DistributedDataParallel
    calls = {
        "ddp": lambda: dp.attach(replicated(net())),
        "ddp in a model": lambda: dp.attach(nn.Sequential(nn.Linear(2, DIM), replicated(net()))),
        "ddp of an attached model": lambda: step_of(replicated, dp.attach(net())),
        "fsdp2": lambda: dp.attach(fully_shard(net(), mesh=mesh)),
        "fsdp2 of a layer": lambda: dp.attach(nn.Sequential(fully_shard(nn.Linear(2, DIM), mesh=mesh))),
        "fsdp1": lambda: dp.attach(shards()),
        "shards of fsdp2": lambda: full(fully_shard(net(), mesh=mesh)),
        "shards of fsdp1": lambda: full(shards()),
        "a flat shard of fsdp1": lambda: full(shards(use_orig_params=False)),
        "fsdp2 of an attached model": lambda: step_of(lambda inner: fully_shard(inner, mesh=mesh), dp.attach(net())),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: message((ValueError, SequenceError), call) for name, call in calls.items()}


# -- groups -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch(parted, 3, tmp_path_factory.mktemp("groups"))


def test_ranks_of_a_group_make_one_run_and_the_others_their_own(apart: list[dict[str, Any]]) -> None:
    alone, first, second = apart
    assert [rank["size"] for rank in apart] == [1, 2, 2]
    assert [rank["first"] for rank in apart] == [True, True, False]
    assert torch.equal(first["own"]["answer"], second["own"]["answer"])
    assert not torch.equal(first["own"]["answer"], alone["own"]["answer"])  # noise of its own
    assert [rank["own"]["charged"] for rank in apart] == [3, 3, 3]
    assert [rank["own"]["releases"] for rank in apart] == [3, 3, 0]  # rank 1 is the first of its group


def test_each_group_draws_all_records(apart: list[dict[str, Any]]) -> None:
    alone, first, second = (rank["own"]["drawn"] for rank in apart)
    for draws in zip(alone, first, second, strict=True):
        whole, *parts = map(sorted, draws)
        assert whole == sorted([*parts[0], *parts[1]]) == list(range(N))


def test_a_group_computes_what_one_process_does(apart: list[dict[str, Any]]) -> None:
    alone, first, second = (rank["silent"]["answer"] for rank in apart)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, alone, rtol=0, atol=1e-12)


def test_outside_of_its_block_an_optimizer_of_a_group_is_refused(apart: list[dict[str, Any]]) -> None:
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
    assert "group must be a process group that this process is in, or 'alone'" in apart[0]["stranger"]


@pytest.mark.parametrize("group", [None, "all", 2, [0, 1]])
def test_what_is_no_group_is_refused(group: Any) -> None:
    with pytest.raises(ValueError, match="group must be a process group that this process is in, or 'alone'"):
        entered(group)


# -- wrapped models ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch(wrapped, 2, tmp_path_factory.mktemp("wrapped"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ddp", "model must not be replicated (got DistributedDataParallel"),
        ("ddp in a model", "model must not be replicated (got DistributedDataParallel '1'"),
        ("ddp of an attached model", "model must not be replicated (got a forward of DistributedDataParallel)"),
        ("fsdp2", "model must not be sharded (got FSDPSequential"),
        ("fsdp2 of a layer", "model must not be sharded (got FSDPLinear '0')"),
        ("fsdp1", "model must not be sharded (got FullyShardedDataParallel"),
        ("shards of fsdp2", "params must be whole (got a shard, DTensor)"),
        ("shards of fsdp1", "params must be whole (got a shard"),
        ("a flat shard of fsdp1", "params must be whole (got a shard"),
        ("fsdp2 of an attached model", "fully_shard"),
    ],
)
def test_a_wrapped_or_sharded_model_is_refused_by_name(name: str, words: str, refused: list[dict[str, Any]]) -> None:
    for rank in refused:
        assert words in rank[name]


def test_the_kinds_that_are_known_by_name_are_those_of_torch() -> None:
    names = {FullyShardedDataParallel.__name__, torch.distributed.fsdp.FSDPModule.__name__}
    assert names == {"FullyShardedDataParallel", "FSDPModule"}
