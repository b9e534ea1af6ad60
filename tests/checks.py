"""Checks of the privacy core, as functions that raise AssertionError; test_mutations.py makes sure that they can.

Every model here has the loss sum_i w . x_i, so that the per-sample gradients are the records themselves.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from tests.problems import make_optimizer
from tests.streams import count_noise, seeded
from torch_dpsco.accounting.designs import Design, Full, Undeclared
from torch_dpsco.errors import BudgetExceeded
from torch_dpsco.rows import has_rows

FALSE_ALARM = 1e-6
DIM = 20_000
ROUNDING = 1 + 2.0**-6  # what a declared sensitivity may add for the rounding of sums


def scores(dim: int, rows: str = "auto") -> nn.Linear:
    model = nn.Linear(dim, 1, bias=False)
    nn.init.zeros_(model.weight)
    return dp.attach(model, rows=rows, loss_reduction="sum")


def step(model: nn.Linear, opt: dp.PrivateOptimizer, x: Tensor) -> Tensor:
    """Makes a step on the records x and returns the released mean."""
    model(x).sum().backward()
    opt.step()
    assert model.weight.grad is not None, "nothing was released"
    return model.weight.grad.flatten().clone()


def released_mean(x: Tensor, design: Design, rows: str = "auto", clip: float = 1.0) -> Tensor:
    """Returns the noiseless mean that a first step releases."""
    model = scores(x.shape[1], rows)
    return step(model, make_optimizer(model, design, clip=clip), x)


def assert_std(values: Tensor, std: float) -> None:
    """Exact chi-square bounds of centered Gaussians; false-alarm rate 1e-6 where the seed is not fixed."""
    statistic = float((values.double() / std).square().sum())
    low, high = stats.chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], values.numel())
    assert low <= statistic <= high, f"{statistic} is not in [{low}, {high}]"


def check_that_no_row_passes_the_clip() -> None:
    x = torch.tensor([[30.0, 40.0], [0.3, 0.4]])
    for rows in ("auto", "dense"):
        moved = released_mean(x, Undeclared(2), rows) - released_mean(
            x * torch.tensor([[0.0], [1.0]]), Undeclared(2), rows
        )
        assert torch.linalg.vector_norm(moved) <= 1.0 / 2 * ROUNDING


def check_that_no_row_of_a_fused_fit_passes_the_clip() -> None:
    """Exact sensitivity through `fit` in closed form: two data sets that differ in one record."""
    x, clip = torch.tensor([[30.0, 40.0], [0.3, 0.4]]), 0.5

    def trained(inputs: Tensor) -> Tensor:
        model = nn.Linear(2, 1)
        for p in model.parameters():
            nn.init.zeros_(p)
        opt = make_optimizer(model, Full(2), clip=clip)  # lr 1, no noise
        targets = torch.ones(2)
        dp.fit(
            model,
            opt,
            TensorDataset(inputs, targets),
            dp.losses.Logistic(),
            steps=1,
            progress=False,
        )
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    moved = torch.linalg.vector_norm(trained(x) - trained(x * torch.tensor([[-1.0], [1.0]])))
    assert 0.9 * clip <= moved <= 2 * clip / 2 * ROUNDING


def check_that_the_noise_is_what_the_ledger_says() -> None:
    model, clip, steps = scores(DIM), 0.7, 4
    opt = make_optimizer(model, Undeclared(5), clip=clip, noise=1.3)
    opt._noise = seeded(1)
    noise = torch.cat([step(model, opt, torch.zeros(5, DIM)) for _ in range(steps)])
    z = (
        2.0 * math.sqrt(steps) / opt.accountant.get_mu()
    )  # mu^2 = steps (2/z)^2 under replace_one
    assert_std(noise, z * clip / 5)


def check_that_every_release_is_charged() -> None:
    model, releases = scores(1), []
    opt = make_optimizer(model, dp.Poisson(4, 12), noise=1.0)
    release = opt.oracle.release
    opt.oracle.release = lambda generator: releases.append(1) or release(generator)
    for (x,) in opt.loader(TensorDataset(torch.ones(12, 1)), steps=6, physical_batch_size=2):
        model(x).sum().backward()
        opt.step()
    assert len(releases) == 6
    assert len(opt.accountant) == len(releases)


def check_that_a_refused_batch_is_forgotten() -> None:
    model = scores(1)
    opt = make_optimizer(model, Undeclared(1), noise=0.01)
    event = opt.oracle.event().only("replace_one")
    opt.accountant.budget = dp.Budget(
        opt.accountant.ledger.evaluate(1e-5, "replace_one", extra=event).epsilon, 1e-5
    )
    opt.accountant.record(event)
    model(torch.ones(1, 1)).sum().backward()
    with pytest.raises(BudgetExceeded):
        opt.step()
    opt.accountant.budget = dp.Budget(1e6, 1e-5)
    opt._noise = seeded(2)
    assert (
        step(model, opt, torch.zeros(1, 1)).abs() < 0.5
    )  # 1 if the refused record is in it, up to noise of 0.01


def check_that_copies_draw_noise_of_their_own() -> None:
    model = scores(DIM)
    opt = make_optimizer(model, Undeclared(1), noise=1.0)
    step(model, opt, torch.zeros(1, DIM))
    noises = [
        step(*run, torch.zeros(1, DIM)) for run in ((model, opt), copy.deepcopy((model, opt)))
    ]
    noises += [step(*copy.deepcopy((model, opt)), torch.zeros(1, DIM))]
    for k, first in enumerate(noises):
        for second in noises[:k]:
            z = float(first @ second) / math.sqrt(
                float(first @ first) * float(second @ second) / DIM
            )
            assert abs(z) < stats.norm.isf(FALSE_ALARM / 2)


def check_that_the_charge_precedes_the_noise() -> None:
    model, charges = scores(1), []
    opt = make_optimizer(model, Undeclared(1), noise=1.0)
    release = opt.oracle.release
    opt.oracle.release = lambda generator: (
        charges.append(len(opt.accountant)) or release(generator)
    )
    step(model, opt, torch.ones(1, 1))
    step(model, opt, torch.ones(1, 1))
    assert charges == [1, 2]

    authorize = opt.accountant.authorize
    noise = count_noise(opt)

    def undrawn(event: object, **details: int) -> None:
        assert not noise.drawn
        authorize(event, **details)

    opt.accountant.authorize = undrawn
    step(model, opt, torch.ones(1, 1))
    assert noise.drawn


def check_that_dropped_rows_are_masked() -> None:
    x = torch.tensor([[0.5, 0.0], [math.inf, 1.0], [math.nan, 1.0], [1e30, 1e30], [0.0, 0.25]])
    for rows in ("auto", "dense"):
        mean = released_mean(x, Undeclared(5), rows)
        bare = released_mean(torch.tensor([[0.5, 0.0], [0.0, 0.25]]), Undeclared(5), rows)
        assert torch.equal(mean, bare)


def check_that_the_divisor_is_public() -> None:
    x = torch.tensor([[0.5, 0.25], [-0.25, 1e3]])
    for size in (2, 4, 16):
        mean, alone = (released_mean(part, Undeclared(size), clip=2.0) for part in (x, x[:1]))
        torch.testing.assert_close(alone, x[0] / size)
        assert torch.linalg.vector_norm(mean - alone) <= 2.0 / size * ROUNDING


def check_that_an_empty_batch_is_like_any_other() -> None:
    model, steps = scores(DIM), 3
    opt = make_optimizer(model, dp.Poisson(2, 10), noise=1.0, adjacency="add_remove")
    opt._noise = seeded(3)
    noises = []
    for (x,) in opt.loader(TensorDataset(torch.zeros(0, DIM)), steps=steps):
        noises.append(step(model, opt, x))
    assert (len(noises), opt.steps, len(opt.accountant)) == (steps, steps, steps)
    assert opt.accountant.ledger.digest() == _ledger_of(
        opt.design.event(opt.oracle.event(), steps)
    )
    for noise in noises:
        assert_std(noise, 1.0 / 2)


def _ledger_of(event: object) -> str:
    accountant = dp.Accountant(adjacency="add_remove")
    accountant.record(event)
    return accountant.ledger.digest()


def check_that_zero_grad_forgets_rows() -> None:
    for rows in ("auto", "dense"):
        model = scores(1, rows)
        opt = make_optimizer(model, dp.Full(2))
        for (x,) in opt.loader(TensorDataset(torch.tensor([[0.5], [0.25]])), steps=2):
            model(7 * x).sum().backward()
            opt.zero_grad()
            assert not has_rows(list(model.parameters()))
            torch.testing.assert_close(step(model, opt, x), torch.tensor([0.375]))


def check_that_a_step_uses_up_its_rows() -> None:
    for rows in ("auto", "dense"):
        model = scores(1, rows)
        opt = make_optimizer(model, dp.Full(2))
        for (x,) in opt.loader(TensorDataset(torch.tensor([[0.5], [0.25]])), steps=2):
            torch.testing.assert_close(
                step(model, opt, x), torch.tensor([0.375])
            )  # and no zero_grad
            assert not has_rows(list(model.parameters()))
