"""`fit` with an optimizer that needs no per-sample gradients, and what a run leaves behind."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from torch_dpsco.errors import SequenceError

LOSS = dp.losses.Hinge(power=1.5)
PROBLEM = LOSS.problem(bound_x=1.0, radius=2.0)
N = 60


def records() -> TensorDataset:
    x = torch.randn(
        N, 3, generator=torch.Generator().manual_seed(0)
    )  # single precision, norms above the bound
    return TensorDataset(x, torch.sign(x[:, :1]))


def made(**settings: object):
    model = torch.nn.Linear(3, 1, bias=False).double()
    arguments = {
        "problem": PROBLEM,
        "n": N,
        "budget": dp.Budget(1.0, 1e-3),
        "batch_size": 10,
        "epochs": 2,
        "lr": 0.1,
    }
    return model, dp.HolderOutputSGD(
        model.parameters(), dp.HolderOutputSGD.plan(dim=3, **arguments | settings)
    )


@pytest.mark.cases(1, 1)
def test_fit_makes_the_plan_and_releases_the_answer_once():
    model, optimizer = made()
    assert dp.fit(model, optimizer, records(), LOSS, progress=False) is model
    assert (optimizer.steps, optimizer.finalized, len(optimizer.accountant)) == (12, True, 1)
    assert optimizer.report().epsilon <= 1.0
    assert not model.training
    assert float(model.weight.detach().norm()) <= 2.0


@pytest.mark.parametrize(
    "given", [{"steps": 3}, {"loss_reduction": "sum"}, {"physical_batch_size": 5}]
)
def test_what_the_plan_has_fixed_is_not_for_fit_to_say(given):
    model, optimizer = made()
    with pytest.raises(ValueError, match=f"{next(iter(given))} must not be given"):
        dp.fit(model, optimizer, records(), LOSS, progress=False, **given)
    assert optimizer.steps == 0


def test_an_attached_model_has_no_plain_gradient():
    model, optimizer = made()
    dp.attach(model)
    with pytest.raises(SequenceError, match="not attached"):
        dp.fit(model, optimizer, records(), LOSS, progress=False)
    assert not optimizer.finalized


def test_another_model_is_refused():
    _, optimizer = made()
    with pytest.raises(SequenceError, match="exactly the model's trainable parameters"):
        dp.fit(torch.nn.Linear(3, 1).double(), optimizer, records(), LOSS, progress=False)


def test_a_finished_run_leaves_nothing_on_the_parameters():
    model, optimizer = made()
    dp.fit(model, optimizer, records(), LOSS, progress=False)
    assert not optimizer.state
    assert not model.weight._post_accumulate_grad_hooks
    assert model.weight.grad is None
