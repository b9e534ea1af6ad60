"""Models that other strategies of torch.distributed have wrapped or cut, before and after `attach`."""

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
    backward,
    full,
    launch,
    message,
    records,
)
from torch_dpsco import compat
from torch_dpsco.errors import SequenceError

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
                "give every process the whole model, without FSDP or parallelize_module, or cut it by"
                " torch_dpsco.integrations.fsdp.fully_shard" in words
            )


def test_the_kinds_that_are_known_by_name_are_those_of_torch() -> None:
    names = {FullyShardedDataParallel.__name__, torch.distributed.fsdp.FSDPModule.__name__}
    assert names == {"FullyShardedDataParallel", "FSDPModule"}
