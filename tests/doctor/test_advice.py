"""Advice: nothing is wrong, and more accuracy is to be had."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from tests.doctor.diagnoses import find, names, ours
from torch_dpsco.diagnosis import Diagnosis

N = 64


def images(norm: nn.Module) -> Diagnosis:
    data = TensorDataset(torch.randn(N, 1, 4, 4), torch.randn(N, 3))
    net = [nn.Conv2d(1, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)]
    return ours(nn.Sequential(*net), data=data)


def test_convolutions_without_a_norm_get_the_advice_to_have_one() -> None:
    found = images(nn.Identity())
    assert find(found, "no-norm").severity == "advice"
    assert "dp.private_layers(model)" in find(found, "no-norm").fix
    assert found.healthy


@pytest.mark.parametrize("norm", [nn.GroupNorm(2, 4), nn.LayerNorm([4, 2, 2])], ids=str)
def test_convolutions_with_a_norm_do_not(norm: nn.Module) -> None:
    assert "no-norm" not in names(images(norm))


def planned(epsilon: float, size: int, width: int = 3, n: int = 500) -> Diagnosis:
    model = dp.attach(nn.Linear(width, 1))
    budget = dp.Budget(epsilon, 1e-5)
    numbers: dict[str, Any] = {"n": n, "clip": 1.0, "lr": 0.1, "epochs": 5, "batch_size": size}
    optimizer = dp.ClippedSGD(
        model.parameters(), dp.ClippedSGD.plan(budget=budget, sampling="poisson", **numbers)
    )
    return dp.doctor(model, None, None, optimizer)


def test_noise_that_buries_the_signal_is_told_with_what_helps() -> None:
    found = find(planned(0.02, 50, 200), "loud-noise")
    assert found.severity == "advice"
    assert "201 parameters" in found.evidence
    assert found.fix.startswith("fewer parameters")


def test_small_batches_that_have_much_more_noise_are_told() -> None:
    found = find(planned(8.0, 2, 499), "loud-noise")
    assert found.fix.startswith("a larger batch_size")
    assert "fewer parameters" not in found.fix


def test_noise_that_leaves_a_signal_is_no_matter() -> None:
    assert names(planned(3.0, 100)) == []
