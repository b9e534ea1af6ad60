"""The exact mean: a baseline that no budget admits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import torch_dpsco as dp
from tests.problems import REDUCTIONS
from tests.reference.exact import Exact
from torch_dpsco.accounting.designs import Undeclared
from torch_dpsco.accounting.events import ADJACENCIES, NonPrivate
from torch_dpsco.errors import BudgetExceeded, InfeasibleError
from torch_dpsco.rows import DenseBlock, GradBatch
from torch_dpsco.rules import SGD


def observed(oracle: Exact, *parts: torch.Tensor) -> torch.Tensor:
    oracle.open([torch.zeros(parts[0].shape[1])])
    for part in parts:
        oracle.observe(GradBatch([DenseBlock(part)]))
    return oracle.release(torch.Generator()).mean[0]


def test_the_mean_is_exact_and_not_clipped():
    rows = torch.tensor([[1e6, -3.0], [0.5, 1e-9], [2.0, 4.0]], dtype=torch.float64)
    oracle = Exact(3)
    torch.testing.assert_close(observed(oracle, rows), rows.mean(0), rtol=1e-15, atol=0)
    torch.testing.assert_close(
        observed(oracle, rows[:1], rows[1:]), rows.mean(0), rtol=1e-15, atol=0
    )


def test_the_divisor_is_the_public_batch_size():
    assert observed(Exact(4), torch.ones(2, 1)).item() == 0.5
    assert observed(Exact(4), torch.ones(0, 1)).item() == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_without_a_finite_norm_contributes_nothing(bad):
    rows = torch.tensor([[1.0, 2.0], [bad, 0.0]])
    assert observed(Exact(1), rows).tolist() == [1.0, 2.0]


def test_discarded_rows_are_in_no_release():
    oracle = Exact(1)
    oracle.open([torch.zeros(1)])
    oracle.observe(GradBatch([DenseBlock(torch.ones(1, 1))]))
    oracle.discard()
    assert observed(oracle, torch.zeros(1, 1)).item() == 0.0
    assert observed(oracle, torch.ones(1, 1)).item() == 1.0
    assert observed(oracle, torch.zeros(1, 1)).item() == 0.0


def test_it_claims_no_privacy_and_every_budget_refuses_it():
    oracle = Exact(2)
    assert oracle.event() == NonPrivate()
    assert all(oracle.sensitivity(adjacency) == math.inf for adjacency in ADJACENCIES)
    accountant = dp.Accountant(dp.Budget(1e6, 0.5))
    with pytest.raises(InfeasibleError):
        dp.PrivateOptimizer(
            dp.attach(nn.Linear(1, 1)).parameters(),
            0.1,
            oracle=oracle,
            rule=SGD(),
            design=Undeclared(2),
            accountant=accountant,
        )
    assert len(accountant) == 0
    with pytest.raises(BudgetExceeded):
        accountant.authorize(oracle.event())


def test_public_constants():
    assert Exact(3).settings() == {"oracle": "Exact"}
    assert Exact(3).metrics() == {}
    with pytest.raises(ValueError, match="batch_size must be"):
        Exact(0)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("rows", ["auto", "dense"])
def test_training_is_that_of_plain_gradient_descent(reduction, rows):
    torch.manual_seed(0)
    plain, x = nn.Linear(3, 1), torch.randn(4, 3)
    model = nn.Linear(3, 1)
    model.load_state_dict(plain.state_dict())
    dp.attach(model, rows=rows, loss_reduction=reduction)
    opt = dp.PrivateOptimizer(
        model.parameters(), 0.1, oracle=Exact(4), rule=SGD(), design=Undeclared(4)
    )
    sgd = torch.optim.SGD(plain.parameters(), 0.1)
    for _ in range(5):
        sgd.zero_grad()
        (plain(x) - 1.0).square().mean().backward()
        sgd.step()
        REDUCTIONS[reduction]((model(x) - 1.0).square()).backward()
        opt.step()
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)
    assert opt.accountant.get_epsilon(1e-5) == math.inf
