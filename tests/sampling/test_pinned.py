"""Batches of tensors in memory are gathered into pinned memory where that is asked for; a device is not needed here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp

N = 200


@pytest.mark.parametrize("asked", [None, False, True])
@pytest.mark.parametrize("isolation", ["rounded", "slots", "none"])
def test_pinned_memory_is_asked_for_where_the_loader_is(
    isolation: str, asked: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_for = 0
    empty = Tensor.new_empty

    def pinned() -> None:
        nonlocal asked_for
        asked_for += 1

    def new_empty(like: Tensor, *size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        if pin_memory:
            pinned()
        return empty(like, *size, **options)

    def pin(tensor: Tensor) -> Tensor:
        pinned()
        return tensor

    monkeypatch.setattr(Tensor, "new_empty", new_empty)
    monkeypatch.setattr(Tensor, "pin_memory", pin)
    plan = dp.ClippedSGD.plan(
        lr=0.1, clip=1.0, noise_multiplier=1.0, batch_size=32, n=N, adjacency="add_remove"
    )
    model = dp.attach(nn.Linear(3, 1), loss_reduction="sum")
    optimizer = dp.ClippedSGD(model.parameters(), plan)
    rows = torch.arange(3.0 * N).view(N, 3)
    options: dict[str, Any] = {} if asked is None else {"pin_memory": asked}
    loader = optimizer.loader(
        TensorDataset(rows, torch.ones(N, 1)), steps=4, isolation=isolation, **options
    )
    for x, y in loader:
        used = y[:, 0] == 1.0
        assert torch.equal(x[used], rows[(x[used, 0] / 3).long()])  # whole records
        assert not x[~used].any()
        nn.functional.mse_loss(model(x), y, reduction="sum").backward()
        optimizer.step()
    assert asked_for == (8 if asked else 0)  # inputs and targets of each batch
