"""What a DataLoader of torch decides about its batches is never lost in silence where private draws replace them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import torch_dpsco as dp
from torch_dpsco.errors import UnitError, UnknownSamplerError, UtilityWarning
from torch_dpsco.integrations.accelerate import prepare
from torch_dpsco.integrations.lightning import _require_train_loader
from torch_dpsco.integrations.opacus import PrivacyEngine
from torch_dpsco.private_loop import require_replaceable

N, BATCH = 60, 12
BUDGET = dp.Budget(1.0, 1e-3)
PROBLEM = dp.losses.Logistic().problem(bound_x=2.0)
DATA = TensorDataset(torch.zeros(N, 3), torch.ones(N, 1))


class Curriculum(Sampler[int]):
    """Easy records first."""

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        return iter(range(N))


class Repeats(DataLoader[Any]):
    """Iterates in a way of its own."""

    def __iter__(self) -> Any:
        return iter([])


CHOSEN: dict[str, tuple[Callable[[], DataLoader[Any]], str]] = {
    "fold": (
        lambda: DataLoader(DATA, BATCH, sampler=SubsetRandomSampler(range(40))),
        r"Subset\(dataset, indices\)",
    ),
    "weights": (
        lambda: DataLoader(DATA, BATCH, sampler=WeightedRandomSampler([1.0] * N, N)),
        "pos_weight",
    ),
    "ranks": (
        lambda: DataLoader(DATA, BATCH, sampler=DistributedSampler(DATA, 2, 0)),
        "among processes",
    ),
    "own": (lambda: DataLoader(DATA, BATCH, sampler=Curriculum()), "Subset.*pos_weight"),
    "list": (lambda: DataLoader(DATA, BATCH, sampler=[0] * N), "Subset.*pos_weight"),
    "first records": (
        lambda: DataLoader(DATA, BATCH, sampler=SequentialSampler(range(40))),
        "Subset",
    ),
    "shuffled first records": (
        lambda: DataLoader(DATA, BATCH, sampler=RandomSampler(range(40))),
        "Subset",
    ),
    "replacement": (
        lambda: DataLoader(DATA, BATCH, sampler=RandomSampler(DATA, replacement=True)),
        "shuffle=True",
    ),
    "short passes": (
        lambda: DataLoader(DATA, BATCH, sampler=RandomSampler(DATA, num_samples=20)),
        "epochs=",
    ),
    "batches": (
        lambda: DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 4, True)),
        "Subset",
    ),
    "no batches": (lambda: DataLoader(DATA, batch_size=None), "Subset"),
    "own iteration": (lambda: Repeats(DATA, BATCH, shuffle=True), "Subset"),
}


def made_private(
    loader: DataLoader[Any], model: nn.Module | None = None, n: int = N, **options: Any
) -> Any:
    model = model or nn.Linear(3, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    return dp.make_private(model, sgd, loader, problem=PROBLEM, budget=BUDGET, n=n, **options)


def engine(loader: DataLoader[Any]) -> Any:
    model = nn.Linear(3, 1)
    given: dict[str, Any] = {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }
    return PrivacyEngine().make_private(
        **given, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0, n=N
    )


@cache
def trained() -> tuple[nn.Module, Any]:
    model = dp.attach(nn.Linear(3, 1))
    plan = dp.ClippedSGD.plan(
        n=N,
        clip=1.0,
        noise_multiplier=1.0,
        sampling="poisson",
        batch_size=BATCH,
        epochs=1,
        lr=0.1,
    )
    return model, dp.ClippedSGD(model.parameters(), plan)


def lightning(loader: DataLoader[Any]) -> None:
    _require_train_loader(loader)


def accelerated(loader: DataLoader[Any]) -> None:
    prepare(Accelerator(cpu=True), *trained(), loader)


@pytest.mark.parametrize("kind", CHOSEN)
def test_no_door_drops_a_sampler(kind: str) -> None:
    make, way_out = CHOSEN[kind]
    for door in (made_private, engine, lightning, accelerated):
        with pytest.raises(UnknownSamplerError, match=f"no sampler of its own .*{way_out}"):
            door(make())


def test_a_refused_loader_has_spent_nothing_and_left_the_model() -> None:
    model, ledger = nn.Linear(3, 1), dp.Accountant(BUDGET)
    with pytest.raises(UnknownSamplerError):
        made_private(CHOSEN["fold"][0](), model, accountant=ledger)
    assert len(ledger) == 0
    assert not hasattr(model, "_dpsco")


def test_a_part_of_the_data_is_all_that_is_drawn_from() -> None:
    labels = torch.arange(N)[:, None].float()
    fold = Subset(TensorDataset(torch.zeros(N, 3), labels), range(40))
    model = nn.Linear(3, 1)
    _, optimizer, loader = made_private(
        DataLoader(fold, BATCH, shuffle=True), model, n=40, epochs=2
    )
    for x, y in loader:
        optimizer.zero_grad()
        dp.losses.Squared()(model(x), y).backward()
        optimizer.step()
        assert float(y.max()) < 40


@pytest.mark.parametrize(
    ("loader", "lost"),
    [
        (DataLoader(DATA, BATCH), r"order \(shuffle=False\) of"),
        (DataLoader(DATA, BATCH, shuffle=True, generator=torch.Generator()), "generator of"),
        (
            DataLoader(DATA, BATCH, num_workers=1, worker_init_fn=print),
            "shuffle=False.*, worker_init_fn of",
        ),
    ],
    ids=["order", "generator", "workers"],
)
def test_what_cannot_be_kept_is_said(loader: DataLoader[Any], lost: str) -> None:
    with pytest.warns(
        UtilityWarning,
        match=f"{lost} data_loader cannot be kept.*leave generator .* say shuffle=True",
    ):
        require_replaceable(loader)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(DATA, BATCH, shuffle=True),
        DataLoader(DATA, 7, shuffle=True, drop_last=True),  # draws have no last batch
        DataLoader(DATA, N),  # one batch of all records has no order
        DataLoader(TensorDataset(torch.zeros(0, 3)), BATCH),
        DataLoader(
            DATA, BATCH, shuffle=True, num_workers=1, prefetch_factor=4, persistent_workers=True
        ),
    ],
    ids=["shuffled", "without the last", "whole", "empty", "workers"],
)
def test_a_plain_pass_is_replaced_in_silence(loader: DataLoader[Any]) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        require_replaceable(loader)
    assert not told


def test_copied_records_are_found_by_their_ids() -> None:
    copies = Subset(DATA, [*range(N), 0])
    loader = DataLoader(copies, BATCH, shuffle=True)
    ids = torch.tensor([*range(N), 0])
    with pytest.raises(UnitError, match="ids must be unique"):
        made_private(loader, n=N + 1, record_ids=ids, sampling="allocated")


def test_a_loader_in_place_of_its_data_set_is_told_what_would_be_lost() -> None:
    model, optimizer = trained()
    for door in (
        optimizer.loader,
        lambda given: dp.fit(model, optimizer, given, dp.losses.Logistic()),
    ):
        with pytest.raises(
            ValueError, match=r"got DataLoader\).*loader's data set.*Subset.*weights"
        ):
            door(CHOSEN["fold"][0]())
