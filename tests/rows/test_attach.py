"""Attaching: per-sample gradients in place, and nothing non-private left behind."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import torch_dpsco as dp
from tests.problems import gradients, make_optimizer
from torch_dpsco.accounting.designs import Undeclared
from torch_dpsco.errors import PrivacyError, SequenceError


class Leak(nn.Module):
    """Stores the mean of its input in a buffer (or a frozen parameter), in a way of the caller's choice."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer = how, nn.Linear(1, 1)
        if how == "frozen":
            self.kept = nn.Parameter(torch.zeros(()), requires_grad=False)
        else:
            self.register_buffer("kept", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean()
        if self.how == "assigned":
            self.kept = self.kept + mean
        elif self.how == "data":
            self.kept.data.add_(mean)
        else:
            with torch.no_grad():
                self.kept.add_(mean)
        return self.layer(x)


@pytest.mark.parametrize("how", ["in place", "assigned", "frozen", "data"])
def test_changing_buffers_are_refused(how):
    model = dp.attach(Leak(how))
    with pytest.raises(PrivacyError, match="kept"):
        model(torch.ones(2, 1))


@pytest.mark.parametrize("rows", ["auto", "dense"])
@pytest.mark.parametrize("give_up", ["zero_grad", "discard"])
def test_a_batch_that_was_given_up_leaves_nothing_for_the_next_one(rows, give_up):
    model = dp.attach(nn.Linear(2, 1), rows=rows)
    opt = make_optimizer(model, Undeclared(3))
    model(torch.full((3, 2), 7.0)).mean().backward()
    getattr(opt, give_up)()
    model(torch.ones(3, 2)).mean().backward()
    opt.step()
    assert opt.steps == 1


def test_a_model_with_an_attached_part_is_refused():
    model = nn.Sequential(dp.attach(nn.Linear(2, 2)), nn.Linear(2, 1))
    with pytest.raises(SequenceError, match="attached already"):
        dp.attach(model)


@pytest.mark.cases(3, 1)
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
@pytest.mark.parametrize("rows", ["auto", "dense"])
def test_a_copy_of_an_attached_model_gives_the_same_rows(copied, rows):
    model = dp.attach(nn.Sequential(nn.LayerNorm(2), nn.Linear(2, 1)), rows=rows)
    twin, x = copied(model), torch.tensor([[1.0, -2.0], [0.5, 4.0], [3.0, 0.0]])
    for ours, theirs in zip(
        gradients(model, x, "mean").dense(), gradients(twin, x, "mean").dense(), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
    twin(x).mean().backward()
    assert all(p.grad is None for p in twin.parameters())
