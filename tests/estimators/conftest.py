"""Plans are computed once, and noise that is the same in every fit can be asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

from torch_dpsco.estimators.output import plan_output

_PLAN = functools.cache(plan_output)


@pytest.fixture(autouse=True)
def cached_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are functions of public numbers; making one takes longer than a fit of a hundred rows."""
    monkeypatch.setattr("torch_dpsco.estimators.base.plan_output", _PLAN)


@pytest.fixture
def same_noise(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes every fit draw the same noise, of a seed, so that fits can be compared."""

    def choose(seed: int) -> None:
        monkeypatch.setattr(
            "torch_dpsco.estimators.fits.noise_generator",
            lambda device, given: torch.Generator(device).manual_seed(seed),
        )

    choose(0)
    return choose
