"""Events and questions that the tests of the accountant share."""

from __future__ import annotations

import json

import pytest

from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.events import (
    REPLACE_ONE,
    ZERO_OUT,
    Event,
    Gaussian,
    Parallel,
    PoissonGaussian,
    WORGaussian,
    clipped_gaussian,
)
from torch_dpsco.errors import BudgetExceeded

STEP = PoissonGaussian(2.0, 0.01)
FIXED = WORGaussian(4.0, 1, 100)
WHOLE = clipped_gaussian(50.0)
DELTA = 1e-5


def part(name: str, noise: float = 30.0) -> Parallel:
    return Parallel({name: [Gaussian(noise, {ZERO_OUT: 1.0, REPLACE_ONE: 2.0})]}, "p")


def image(accountant: Accountant) -> str:
    """Everything that is stored, to the bit."""
    return json.dumps(accountant.state_dict()) + str(len(accountant))


def refusal(accountant: Accountant, event: Event, count: int = 1) -> str:
    with pytest.raises(BudgetExceeded) as caught:
        accountant.authorize(event, count)
    return str(caught.value)
