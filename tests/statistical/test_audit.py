"""End-to-end audits: what an optimizer releases on two neighboring data sets is as hard to tell apart as it reports.

Each step of a run on a linear loss is an independent draw of the one-step mechanism (the gradient does not depend on
the iterate), so that thousands of steps give a lower bound on epsilon by Clopper-Pearson intervals. Both intervals hold
with probability 1 - 1e-6, so that a correct optimizer fails a test with probability at most 2e-6 (the seed is fixed).
"""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from tests.streams import picks
from torch_dpsco.accounting.designs import Design
from torch_dpsco.errors import UtilityWarning
from torch_dpsco.rules import SGD
from torch_dpsco.step.oracle import Clipped

FALSE_ALARM = 1e-6
STEPS = 2500


@lru_cache
def releases(
    features: tuple[float, ...],
    design: Design,
    adjacency: str,
    noise_multiplier: float,
    seed: int,
) -> torch.Tensor:
    """Returns the private means of many one-step releases of gradient -x, clipped at 1."""
    model = dp.attach(torch.nn.Linear(1, 1, bias=False))
    with pytest.warns(UtilityWarning, match="repeatable"):
        optimizer = dp.PrivateOptimizer(
            model.parameters(),
            1e-9,
            oracle=Clipped(1.0, noise_multiplier, design.batch_size),
            rule=SGD(),
            design=design,
            adjacency=adjacency,  # type: ignore[arg-type]
            generator=torch.Generator().manual_seed(seed),
        )
    data = TensorDataset(torch.tensor(features).view(-1, 1))
    found = []
    loader = optimizer.loader(data, steps=STEPS)
    loader.batch_sampler.rng = picks(seed)  # the test must not depend on luck
    for (x,) in loader:
        model(x).neg().sum().div(max(len(x), 1)).backward()
        optimizer.step()
        assert model.weight.grad is not None
        found.append(float(model.weight.grad))
    assert len(optimizer.accountant) == STEPS
    return torch.tensor(found)


# Data, neighbor, design, adjacency, noise multiplier, delta, and the share of the claim that the attack must reach:
# Renyi accounting of ONE sampled step at a large delta is loose, exact accounting of an unsampled one is not.
CASES = [
    pytest.param((1.0,), (), dp.Full(1), "add_remove", 0.5, 0.05, 0.4, id="full-add_remove"),
    pytest.param(
        (1.0, 0.0), (-1.0, 0.0), dp.Full(2), "replace_one", 1.0, 0.05, 0.4, id="full-replace_one"
    ),
    pytest.param(
        (1.0,), (), dp.Poisson(1, 2), "add_remove", 0.7, 0.02, 0.1, id="poisson-add_remove"
    ),
    pytest.param(
        (1.0, 0.0),
        (-1.0, 0.0),
        dp.Poisson(1, 2),
        "replace_one",
        0.7,
        0.02,
        0.1,
        id="poisson-replace_one",
    ),
    pytest.param(
        (1.0, 0.0),
        (-1.0, 0.0),
        dp.Fixed(1, 2),
        "replace_one",
        1.0,
        0.02,
        0.05,
        id="fixed-replace_one",
    ),
]
ARGUMENTS = ("data", "neighbor", "design", "adjacency", "noise", "delta", "power")


def claimed(design: Design, adjacency: str, noise: float, delta: float) -> float:
    """Returns the epsilon that the accountant reports for one step."""
    accountant = dp.Accountant(adjacency=adjacency)  # type: ignore[arg-type]
    accountant.authorize(design.event(Clipped(1.0, noise, design.batch_size).event()))
    return accountant.get_epsilon(delta)


@pytest.mark.weekly
@pytest.mark.parametrize(ARGUMENTS, CASES)
def test_no_attack_beats_the_reported_epsilon_and_one_with_less_noise_would(
    data: tuple[float, ...],
    neighbor: tuple[float, ...],
    design: Design,
    adjacency: str,
    noise: float,
    delta: float,
    power: float,
) -> None:
    first = releases(data, design, adjacency, noise, seed=1)
    second = releases(neighbor, design, adjacency, noise, seed=2)
    found = dp.audit_outputs(
        first, second, delta=delta, confidence=1 - 2 * FALSE_ALARM
    ).epsilon_lower
    epsilon = claimed(design, adjacency, noise, delta)
    assert power * epsilon <= found <= epsilon
    # the mutation: an optimizer that claimed six times the noise that it draws
    assert found > claimed(design, adjacency, 6 * noise, delta)
