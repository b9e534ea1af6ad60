"""Traps of per-sample gradients: T5, T6, T9, T12, T15. Each test shows plain Opacus 1.6 first, then ours."""

from __future__ import annotations

import math

import pytest
import torch
from opacus import GradSampleModule
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from tests.checks import scores, step
from tests.problems import column, make_optimizer
from tests.traps.naive import Scores, opacus_script, plain, sgd
from torch_dpsco.accounting.designs import Undeclared
from torch_dpsco.errors import PrivacyError, SequenceError, UtilityWarning

ROWS = pytest.mark.parametrize("rows", ["auto", "dense"])


# -- T5 ---------------------------------------------------------------------------------------------------------------


def squares(model: nn.Module, x: Tensor) -> Tensor:
    """A loss whose gradient, 2 (score - 1) x, overflows for large records: 2e40 is past float32."""
    return (model(x) - 1.0).square().sum()


def release_with(record: list[float], rows: str) -> tuple[Tensor, dp.PrivateOptimizer]:
    """Returns what a step on a good record and on this one releases, at w = (1, 1)."""
    model = dp.attach(plain(2, start=1.0), rows=rows, loss_reduction="sum")
    ours = make_optimizer(model, Undeclared(2))
    squares(model, torch.tensor([[0.5, 0.25], record])).backward()
    ours.step()
    return model.weight.grad.flatten(), ours


@pytest.mark.cases(4, 2)
@ROWS
@pytest.mark.parametrize(
    "bad", [math.nan, math.inf, 1e20, 1e38], ids=["nan", "inf", "overflow", "far overflow"]
)
def test_t05_a_record_that_is_not_finite_changes_its_own_row_only(rows: str, bad: float) -> None:
    """T5: one record holds a NaN or an infinity, or is so large that its gradient overflows.

    Opacus 1.6: the parameter becomes NaN in one step.

    Here: its row contributes 0 if it is not finite, and at most the clip if its norm overflows; the rest of the release
    is bit for bit as without it; metrics and ledger do not tell that it was there.
    """
    naive = opacus_script(torch.tensor([[0.5, 0.25], [bad, 1.0]]), start=1.0)
    naive.criterion = lambda outputs, _: (outputs - 1.0).square().sum()
    for (x,) in naive.loader:
        naive.step(x)
    assert naive.weight.flatten()[0].isnan()

    (there, ours), (without, twin) = (
        release_with([bad, 1.0], rows),
        release_with([0.0, 0.0], rows),
    )
    assert torch.linalg.vector_norm(there - without) <= ours.oracle.sensitivity("zero_out")
    if not math.isfinite(bad):
        assert torch.equal(there, without)
    assert there[1] == without[1] == pytest.approx(-0.0625)  # 2 (0.75 - 1) 0.25 / 2
    assert ours.metrics == twin.metrics
    assert ours.accountant.ledger.digest() == twin.accountant.ledger.digest()


# -- T6 ---------------------------------------------------------------------------------------------------------------


def naive_ghost_release(record: float) -> float:
    """Returns what a ghost-clipping run releases whose user keeps the original loss."""
    naive = opacus_script(
        torch.tensor([[record], [0.0], [0.0], [0.0]]), reduction="mean", mode="ghost"
    )
    naive.criterion = Scores("mean")
    return sum(move.item() for move in naive.epoch())


@ROWS
def test_t06_no_loss_goes_past_the_clip(rows: str) -> None:
    """T6: ghost clipping with the user's own loss instead of the one that make_private returned.

    Opacus 1.6: nothing is clipped: with clip 1 and batch size 4 one record moves the release by 62.5 (declared: 0.25),
    and the accountant charges a normal step.

    Here: every row passes the clip, whatever the loss; a step without recorded rows, e.g. on Opacus' ghost module,
    raises SequenceError before parameters or ledger change.
    """
    assert naive_ghost_release(0.0) - naive_ghost_release(1000.0) == 62.5

    def release(record: float) -> Tensor:
        model = dp.attach(plain(), rows=rows)
        ours = make_optimizer(model, Undeclared(4))
        model(torch.tensor([[record], [0.0], [0.0], [0.0]])).mean().backward()
        ours.step()
        assert ours.oracle.sensitivity("zero_out") == pytest.approx(0.25, rel=1e-3)
        return model.weight.grad.clone()

    assert 0.249 < (release(1000.0) - release(0.0)).item() <= 0.25
    for ghost in (
        opacus_script(torch.ones(4, 1), reduction="mean", mode="ghost").model,
        plain(),
    ):
        ours = make_optimizer(ghost, Undeclared(4))
        ghost(torch.full((4, 1), 1000.0)).mean().backward()
        with pytest.raises(
            SequenceError, match=r"per-sample gradients are missing .*dp.attach\(model\)"
        ):
            ours.step()
        assert not next(ghost.parameters()).any()
        assert len(ours.accountant) == ours.steps == 0


@ROWS
@pytest.mark.parametrize("shape", [(16,), (16, 1)], ids=str)
def test_t06_the_clip_holds_for_losses_with_a_column(rows: str, shape: tuple[int, ...]) -> None:
    # Opacus 1.6 multiplies coefficients (B,) by losses (B, 1): of 16 records each coefficient then counts 16
    # times, and the sum is 16 times the bound B C
    x = torch.full((16, 1), 100.0)
    module = GradSampleModuleFastGradientClipping(
        plain(), loss_reduction="sum", max_grad_norm=1.0
    )
    optimizer = DPOptimizerFastGradientClipping(
        sgd(module.parameters()),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        expected_batch_size=16,
        loss_reduction="sum",
    )
    DPTensorFastGradientClipping(module, optimizer, module(x).reshape(shape), "sum").backward()
    naive = next(module.parameters()).grad.item()
    assert naive == pytest.approx(16.0 if shape == (16,) else 16.0 * 16.0, rel=1e-5)

    model = dp.attach(plain(), rows=rows, loss_reduction="sum")
    ours = make_optimizer(model, Undeclared(16))
    model(x).reshape(shape).sum().backward()
    ours.step()
    assert 15.99 < 16 * model.weight.grad.item() <= 16.0


# -- T9 ---------------------------------------------------------------------------------------------------------------


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs * targets).sum()


@pytest.mark.cases(1, 1)
@ROWS
def test_t09_a_loss_scaled_in_another_way_is_found_and_never_passes_the_clip(rows: str) -> None:
    """T9: the loss is a sum, the declaration says "mean"; or a GradScaler multiplies the loss.

    Opacus 1.6: rows are 8 times too long for a batch of 8, and 1024 times with a GradScaler of that scale, when they
    come to the clip.

    Here: `fit` raises and `doctor` finds it, by comparing a batch with its doubled copy; in a loop of one's
    own the clip still holds (a record moves the release by at most clip/batch size); a scaler's factor is taken out
    before the clip: the release is the same bit for bit.
    """
    naive, x = GradSampleModule(plain(), loss_reduction="mean"), torch.full((8, 1), 0.25)
    naive(x).sum().backward()
    assert naive._module.weight.grad_sample.flatten().tolist() == [8 * 0.25] * 8
    naive.zero_grad()
    torch.amp.GradScaler("cpu", init_scale=1024.0).scale(naive(x).mean()).backward()
    assert naive._module.weight.grad_sample.flatten().tolist() == [1024 * 0.25] * 8

    model, data = dp.attach(plain(), rows=rows), TensorDataset(x, torch.ones(8, 1))
    ours = make_optimizer(model, dp.Full(8))
    found = {
        finding.name for finding in dp.doctor(model, summed, ours.loader(data), ours).findings
    }
    assert "loss-reduction" in found
    with pytest.raises((ValueError, PrivacyError), match="'mean'"):
        dp.fit(model, ours, data, summed, steps=1, progress=False)
    assert not model.weight.any()
    assert len(ours.accountant) == ours.steps == 0
    next(iter(ours.loader(data)))
    model(torch.tensor([[100.0], *[[0.0]] * 7])).sum().backward()
    ours.step()
    assert 0.124 < model.weight.grad.item() <= ours.oracle.sensitivity("zero_out")
    assert torch.equal(*(scaled_release(x, rows, enabled) for enabled in (False, True)))


def scaled_release(x: Tensor, rows: str, enabled: bool) -> Tensor:
    model = dp.attach(plain(), rows=rows)
    ours = make_optimizer(model, Undeclared(8))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=enabled)
    scaler.scale(model(x).mean()).backward()
    scaler.step(ours)
    scaler.update()
    return model.weight.grad


# -- T12 --------------------------------------------------------------------------------------------------------------


@ROWS
def test_t12_seeding_torch_repeats_neither_noise_nor_batches(rows: str) -> None:
    """T12: `torch.manual_seed(0)` at the start of each epoch, or run, to make results repeatable.

    Opacus 1.6: noise comes from torch's global generator: both epochs get the same noise bit for bit, and the
    difference of their releases is free of it.

    Here: noise and batches come from separate generators, seeded by the operating system: they differ; passing a
    generator or seed gives a warning.
    """
    naive, noises = opacus_script(torch.zeros(2, 1000), noise=1.0), []
    for _ in range(2):
        torch.manual_seed(0)
        noises += naive.epoch()
        naive.weight.data.zero_()
    assert noises[0].any()
    assert torch.equal(*noises)

    model, records = scores(1000, rows), torch.eye(20, 1000)
    ours = make_optimizer(model, dp.Poisson(10, 20), noise=1.0)
    loader, epochs, batches = ours.loader(TensorDataset(records), steps=1), [], []
    for _ in range(2):
        torch.manual_seed(0)
        for (x,) in loader:
            batches.append(x.sum(0))
            epochs.append(step(model, ours, x) - x.sum(0) / 10)
    assert abs(torch.corrcoef(torch.stack(epochs))[0, 1]) < 5 / 1000**0.5
    assert not torch.equal(*batches)
    kind = {
        "problem": dp.Problem(lipschitz=1.0),
        "noise_multiplier": 1.0,
        "batch_size": 10,
        "n": 20,
    }
    with pytest.warns(UtilityWarning, match="generator= makes the noise repeatable"):
        dp.HolderSGD(
            model.parameters(), dp.HolderSGD.plan(lr=1.0, **kind), generator=torch.Generator()
        )


# -- T15 --------------------------------------------------------------------------------------------------------------


@ROWS
def test_t15_zero_grad_forgets_the_rows(rows: str) -> None:
    """T15: `optimizer.zero_grad()` of an optimizer that is not Opacus' own, between two backward passes.

    Opacus 1.6: torch's zero_grad() clears `p.grad` only: the next backward makes a list of both batches' rows.

    Here: `zero_grad()` clears rows; where `model.zero_grad()` is called instead, the step finds more rows than were
    drawn and raises SequenceError before parameters or ledger change.
    """
    naive = GradSampleModule(plain(), loss_reduction="sum")
    optimizer = torch.optim.SGD(naive.parameters(), lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        naive(torch.ones(2, 1)).sum().backward()
    assert [len(chunk) for chunk in naive._module.weight.grad_sample] == [2, 2]

    model = scores(1, rows)
    ours = make_optimizer(model, dp.Full(2))
    for (x,) in ours.loader(column(0.5, 0.25), steps=1):
        for _ in range(2):
            ours.zero_grad()
            model(x).sum().backward()
        ours.step()
    assert model.weight.grad.item() == pytest.approx((0.5 + 0.25) / 2)
    weight, ledger = model.weight.detach().clone(), ours.accountant.ledger.digest()
    for (x,) in ours.loader(column(0.5, 0.25), steps=1):
        for _ in range(2):
            model.zero_grad()
            model(x).sum().backward()
        with pytest.raises(SequenceError, match="at most the rows of one draw, and got more"):
            ours.step()
    assert torch.equal(model.weight, weight)
    assert ours.accountant.ledger.digest() == ledger
