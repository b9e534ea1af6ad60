"""AdamBC: Adam whose second moments are freed of the noise."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp


def moved(rule: dp.rules.UpdateRule, means: torch.Tensor, lr: float = 0.1) -> torch.Tensor:
    """Returns the iterate after a step by each of the means, from 1."""
    p = nn.Parameter(torch.ones(means.shape[1]))
    state: Any = defaultdict(dict)
    with torch.no_grad():
        for k, mean in enumerate(means):
            p.grad = mean.clone()
            rule.update([{"params": [p], "lr": lr}], state, k, dp.Phase())
    return p.detach()


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_without_noise_it_is_adam(weight_decay: float) -> None:
    means = torch.randn(20, 5)
    p = nn.Parameter(torch.ones(5))
    plain = torch.optim.AdamW([p], 0.1, eps=0.0, weight_decay=weight_decay)
    for mean in means:
        p.grad = mean.clone()
        plain.step()
    rule = dp.rules.AdamBC(1e-9, weight_decay=weight_decay)
    torch.testing.assert_close(moved(rule, means), p.detach(), rtol=1e-5, atol=1e-6)


def test_noise_makes_no_step_shorter() -> None:
    """Coordinates with gradients .5 and 5 under noise of std 1: after 3,000 steps both moved by about lr a step."""
    steps, gradient = 3000, torch.tensor([0.5, 5.0])
    means = gradient + torch.randn(steps, 2)
    ours = 1.0 - moved(dp.rules.AdamBC(1.0), means, lr=1e-3)
    blind = 1.0 - moved(dp.rules.AdamBC(1e-9), means, lr=1e-3)
    assert 2.4 < float(ours[0]) < 3.9  # Adam moves it by .45 of that: .5/sqrt(.25 + 1)
    assert 1.0 < float(blind[0]) < 1.7
    assert 2.7 < float(ours[1]) < 3.3


def test_where_there_is_noise_alone_the_floor_holds() -> None:
    means = torch.randn(2000, 50)
    final = moved(dp.rules.AdamBC(1.0, floor=0.2), means, lr=1e-3) - 1.0
    # a step is at most lr |m| / .2, and m has std sqrt(.1/1.9) = .23; sums of them are of size sqrt(2000) 5 lr
    assert float(final.abs().max()) < 7 * math.sqrt(2000) * 5e-3


def test_a_run_with_it_goes_on_from_a_checkpoint_bit_by_bit() -> None:
    data = TensorDataset(torch.randn(24, 3), torch.ones(24, 1))

    def made() -> tuple[nn.Module, dp.PrivateOptimizer]:
        model = dp.attach(nn.Linear(3, 1), loss_reduction="sum")
        plan = dp.NetSGD.plan(n=24, noise_multiplier=0.0, lr=0.1, sampling="full", steps=6)
        rule = dp.rules.AdamBC(0.05, average="ema")
        return model, dp.NetSGD(model.parameters(), plan, rule=rule)

    def train(model: nn.Module, optimizer: dp.PrivateOptimizer, steps: int) -> None:
        for x, y in optimizer.loader(data, steps=steps):
            optimizer.zero_grad()
            (model(x) - y).square().sum().backward()
            optimizer.step()

    whole, first = made()
    copy, second = made()
    copy.load_state_dict(whole.state_dict())
    train(whole, first, 3)
    train(copy, second, 3)
    resumed, third = made()
    resumed.load_state_dict(copy.state_dict())
    third.load_state_dict(second.state_dict())
    train(whole, first, 3)
    train(resumed, third, 3)
    assert torch.equal(whole.weight, resumed.weight)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"noise_std": 0.0}, "noise_std must be"),
        ({"noise_std": 1.0, "betas": (1.0, 0.9)}, "betas must be"),
        ({"noise_std": 1.0, "betas": (0.9, -0.1)}, "betas must be"),
        ({"noise_std": 1.0, "floor": 0.0}, "floor must be"),
        ({"noise_std": 1.0, "weight_decay": -1.0}, "weight_decay must be"),
    ],
)
def test_a_wrong_number_is_named(given: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        dp.rules.AdamBC(**given)
