"""Traps of the loss: T7, T8. Each test shows plain Opacus 1.6 first, then ours."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from opacus import GradSampleModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpsco as dp
from tests.checks import scores
from tests.problems import make_optimizer
from tests.traps.naive import opacus_script, plain
from torch_dpsco.accounting.designs import Undeclared
from torch_dpsco.errors import PrivacyError, SequenceError

ROWS = pytest.mark.parametrize("rows", ["auto", "dense"])


# -- T7 ---------------------------------------------------------------------------------------------------------------


def tilted(outputs: Tensor, targets: Tensor) -> Tensor:
    """Tilted empirical risk: its softmax weights couple all records."""
    return torch.logsumexp((outputs * targets).flatten(), 0)


class Centered(nn.Module):
    """Subtracts the batch mean from its features."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = plain(start=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x - x.mean(0))


def total(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs * targets).sum()


def naive_clipped_sum(
    model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], first: float
) -> float:
    """Returns the sum of the clipped rows (clip 1) of nine records, the first of which is replaced."""
    naive = GradSampleModule(model, loss_reduction="sum")
    x = torch.tensor([[first], *[[10.0]] * 8])
    loss(naive(x), torch.ones(9, 1)).backward()
    (weight,) = naive.parameters()
    moved = weight.grad_sample.flatten().clamp(-1.0, 1.0).sum().item()
    naive.to_standard_module()
    weight.grad_sample = None
    return moved


# model, loss, and how far the sum of the clipped rows of an Opacus user moves
COUPLED = {
    "tilted loss": (lambda: plain(start=1.0), tilted, 8.0),
    "batch mean in the model": (Centered, total, 7.0),
}


@pytest.mark.cases(1, 1)
@ROWS
@pytest.mark.parametrize("coupled", list(COUPLED))
def test_t07_records_that_the_loss_couples_are_found_before_anything_is_spent(
    rows: str, coupled: str
) -> None:
    """T7: a loss or model in which one record changes the gradients of the others (tilted, contrastive, batch mean).

    Opacus 1.6: no error; replacing one of nine records moves the sum of the clipped rows by 8.0 (tilted loss) or 7.0
    (batch mean in the model) with clip 1, where 2 is declared.

    Here: `doctor` finds coupled records, and `fit` raises PrivacyError before parameters or ledger change; so do
    `make_private`, if it is given the loss, and the first step in your own loop.
    """
    build, loss, moved = COUPLED[coupled]
    sums = [naive_clipped_sum(build(), loss, first) for first in (10.0 - 1e-3, 40.0)]
    assert abs(sums[1] - sums[0]) == pytest.approx(moved, abs=1e-4)

    model, data = (
        dp.attach(build(), rows=rows, loss_reduction="sum"),
        TensorDataset(torch.rand(9, 1), torch.ones(9, 1)),
    )
    ours = make_optimizer(model, dp.Full(9), noise=1.0)
    critical = dp.doctor(model, loss, ours.loader(data), ours).critical
    assert [finding.name for finding in critical] == ["coupled-records"]
    assert critical[0].evidence
    assert critical[0].fix
    with pytest.raises(PrivacyError, match="record"):
        dp.fit(model, ours, data, loss, steps=1, progress=False)
    x, y = next(iter(ours.loader(data, steps=1)))
    with pytest.raises(PrivacyError, match="records must not reach each other"):
        loss(model(x), y).backward()
    assert all(p.item() == 1.0 for p in model.parameters())
    assert len(ours.accountant) == ours.steps == 0


@pytest.mark.cases(1, 1)
@ROWS
@pytest.mark.parametrize("coupled", list(COUPLED))
def test_t07_make_private_finds_records_that_are_coupled(rows: str, coupled: str) -> None:
    build, loss, _ = COUPLED[coupled]
    model, accountant = build(), dp.Accountant(budget := dp.Budget(1.0, 1e-3))
    data = TensorDataset(torch.rand(9, 1), torch.ones(9, 1))
    make = partial(
        dp.make_private,
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        DataLoader(data, batch_size=3, shuffle=True),
        problem=dp.losses.Logistic().problem(bound_x=1.0),
        budget=budget,
        n=9,
        loss_reduction="sum",
        rows="dense" if rows == "dense" else "auto",
        accountant=accountant,
    )
    with pytest.raises(PrivacyError, match="record"):
        make(loss=loss)
    model, _, loader = make()
    x, y = next(iter(loader))
    with pytest.raises(PrivacyError, match="records must not reach each other"):
        loss(model(x), y).backward()
    assert len(accountant) == 0


# -- T8 ---------------------------------------------------------------------------------------------------------------


def naive_weight_of_a_regularizer(mode: str, batch: int) -> float:
    """Returns by how many of its gradients (10 = 10 clips) an L2 term in the loss moves the release of a batch."""
    naive = opacus_script(torch.zeros(4, 1), start=1.0, reduction="mean", mode=mode)
    criterion = naive.criterion
    naive.criterion = lambda *outputs: criterion(*outputs) + 5.0 * naive.weight.square().sum()
    return -naive.step(torch.zeros(batch, 1)).item() / 10.0


def step_with_a_regularizer_in_the_loss(model: nn.Linear, ours: dp.PrivateOptimizer) -> None:
    (model(torch.zeros(4, 1)).sum() + 5.0 * model.weight.square().sum()).backward()
    ours.step()


def regularized(batch: int, rows: str, reg: float, prox: dp.prox.Prox | None = None) -> float:
    """Returns where a step from w = 1 ends: lr 1, `batch` records x = 0.4, expected batch size 4."""
    model = scores(1, rows)
    nn.init.ones_(model.weight)
    oracle = dp.oracles.Clipped(clip=1.0, noise_multiplier=0.0, batch_size=4)
    ours = dp.PrivateOptimizer(
        model.parameters(),
        1.0,
        oracle=oracle,
        rule=dp.rules.SGD(),
        design=dp.Full(4),
        prox=prox,
        reg=reg,
        adjacency="add_remove",
    )
    for (x,) in ours.loader(TensorDataset(torch.full((batch, 1), 0.4)), steps=1):
        model(x).sum().backward()
        ours.step()
    return model.weight.item()


@pytest.mark.cases(1, 1)
@ROWS
def test_t08_a_regularizer_has_its_full_weight_whatever_the_batch(rows: str) -> None:
    """T8: an L2 term is added to the loss.

    Opacus 1.6: it has no effect at all by hooks (weight 0); in ghost mode it enters without clip and with a weight that
    tells the secret size of the Poisson batch: 0.50, 0.75, 1.00, 1.75 for 2, 3, 4, 7 records where 4 are expected.

    Here: such a loss raises SequenceError before parameters or ledger change; `reg=` and `prox=` act after the noise: w
    moves as the closed form says, with the same weight for every batch.
    """
    assert [naive_weight_of_a_regularizer("hooks", size) for size in (2, 7)] == [0.0, 0.0]
    weights = [naive_weight_of_a_regularizer("ghost", size) for size in (2, 3, 4, 7)]
    assert weights == pytest.approx([0.5, 0.75, 1.0, 1.75], rel=1e-5)

    model = scores(1, rows)
    nn.init.ones_(model.weight)
    ours = make_optimizer(model, Undeclared(4), noise=1.0)
    words = {
        "auto": r"give a regularizer .* to the optimizer instead \(reg=, prox=\)",
        "dense": r"the loss has a term on the weights \(give reg= or prox= to the optimizer instead\)",
    }
    with pytest.raises(SequenceError, match=words[rows]):
        step_with_a_regularizer_in_the_loss(model, ours)
    assert (model.weight.item(), ours.steps, len(ours.accountant)) == (1.0, 0, 0)

    for size in (2, 3, 4, 7):
        data = -0.4 * size / 4
        assert regularized(size, rows, reg=0.1) == pytest.approx(
            1.0 + data - 0.1 * 1.0, abs=1e-6
        )
        assert regularized(size, rows, reg=0.0, prox=dp.prox.Ball(0.1)) == pytest.approx(
            -0.1, abs=1e-6
        )
        expected = max(1.0 + data - 0.1, 0.0)  # soft threshold lr * 0.1
        assert regularized(size, rows, reg=0.0, prox=dp.prox.L1(0.1)) == pytest.approx(
            expected, abs=1e-6
        )
