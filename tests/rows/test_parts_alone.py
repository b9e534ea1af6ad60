"""Parts of an attached model that are called in its place: refused, since the checks of its forward have not run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from torch_dpsco.errors import SequenceError
from torch_dpsco.rows.forwards import PassCounter

N, DIM = 8, 3
DATA = TensorDataset(torch.ones(N, DIM), torch.ones(N, 1))


class Net(nn.Module):
    """A head on a body, which a loop may call itself; or which checkpoints its body."""

    def __init__(self, again: bool | None = None) -> None:
        super().__init__()
        self.first, self.body, self.head = (
            nn.Linear(DIM, DIM),
            nn.Linear(DIM, DIM),
            nn.Linear(DIM, 1),
        )
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.head(
            self.body(x)
            if self.again is None
            else checkpoint(self.body, x, use_reentrant=self.again)
        )


def parts(model: Net, x: Tensor) -> Tensor:
    return model.head(model.body(model.first(x)))


def made(rows: str, again: bool | None = None) -> tuple[Net, dp.HolderSGD]:
    model = dp.attach(Net(again), rows=rows)
    plan = dp.HolderSGD.plan(
        problem=dp.losses.Logistic().problem(bound_x=2.0),
        n=N,
        noise_multiplier=1.0,
        batch_size=4,
        steps=6,
    )
    return model, dp.HolderSGD(model.parameters(), plan)


def train(
    rows: str, call: Callable[[Net, Tensor], Tensor], again: bool | None = None
) -> dp.HolderSGD:
    model, optimizer = made(rows, again)
    for x, y in optimizer.loader(DATA, steps=3):
        optimizer.zero_grad()
        nn.functional.softplus(-call(model, x) * y).mean().backward()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("rows", ["auto", "dense"])
def test_parts_of_a_model_make_no_rows_without_the_model(
    rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(rows, Net.__call__).steps == 3
    with pytest.raises(SequenceError, match="attached model itself must be called"):
        train(rows, parts)
    monkeypatch.setattr(PassCounter, "require_called", lambda self: None)
    assert train(rows, parts).steps == 3  # else nothing has refused them


@pytest.mark.parametrize("rows", ["auto", "dense"])
def test_parts_are_refused_in_a_later_batch_too_and_leave_no_rows(rows: str) -> None:
    model, optimizer = made(rows)
    x, y = DATA.tensors
    for batch in (0, 1):
        loader = iter(optimizer.loader(DATA, steps=1))
        (inputs, _) = next(loader)
        nn.functional.softplus(-model(inputs)).mean().backward()
        optimizer.step()
        with pytest.raises(SequenceError, match="attached model itself must be called"):
            nn.functional.softplus(-parts(model, x) * y).mean().backward()
        assert all(getattr(p, "grad_sample", None) is None for p in model.parameters())
        assert not any(layer.tape.uses for layer in model.modules() if hasattr(layer, "tape"))
        assert optimizer.steps == batch + 1


@pytest.mark.parametrize("again", [False, True], ids=["not reentrant", "reentrant"])
def test_a_checkpoint_runs_parts_again_after_the_model(again: bool) -> None:
    assert train("auto", Net.__call__, again).steps == 3


def test_parts_may_be_looked_at_without_gradients() -> None:
    def looked(model: Net, x: Tensor) -> Tensor:
        with torch.no_grad():
            model.body(model.first(x))
        return model(x)

    assert train("auto", looked).steps == 3
