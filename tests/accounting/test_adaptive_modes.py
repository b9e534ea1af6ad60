"""Every kind of event in every adaptive mode: charged exactly as often as the accountant says, or refused."""

from __future__ import annotations

import pytest

from tests.accounting.ledgers import DELTA, FIXED, STEP, WHOLE, image, part
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.events import (
    GDP,
    REPLACE_ONE,
    ZCDP,
    AboveThreshold,
    ApproxDP,
    Failure,
    KNorm,
    Laplace,
    NonPrivate,
    Parallel,
    PoissonGaussian,
    Pure,
    RDPCurve,
    Repeat,
    Sequential,
)
from torch_dpsco.errors import (
    BudgetExceeded,
)

SENS = {REPLACE_ONE: 1.0}
EVENTS = [
    *(
        WHOLE,
        STEP,
        FIXED,
        Pure(0.1),
        Laplace(30.0, SENS),
        NonPrivate(),
        ApproxDP(0.1, 1e-7),
        ZCDP(0.001),
    ),
    *(
        KNorm(0.1, 10),
        GDP(0.05),
        AboveThreshold(20.0, 40.0, SENS),
        ZCDP(0.001, 1e-7),
        Pure(0.0),
    ),
    *(
        RDPCurve((2.0, 10.0, 200.0), (0.01, 0.05, 1.0)),
        PoissonGaussian(0.0, 0.01),
        PoissonGaussian(0.0, 0.0),
    ),
    *(
        Failure(1e-7),
        Failure(1e-7, "transcript"),
    ),
    *(
        Repeat(WHOLE, 0),
        Sequential([WHOLE, Repeat(Pure(0.1), 2)]),
        Parallel({"a": [WHOLE], "b": [Pure(0.1)]}, "p"),
    ),
    Repeat(Sequential([part("0"), Repeat(part("1"), 2), WHOLE]), 3),
]


@pytest.mark.cases(4, 2)
@pytest.mark.parametrize("event", EVENTS, ids=str)
@pytest.mark.parametrize("mode", ["gdp", "rdp"])
def test_every_event_in_every_adaptive_mode_fits_exactly_as_often_as_said(mode, event):
    accountant = Accountant(Budget(3.0, DELTA, adjacency=REPLACE_ONE, mode=mode))
    most = accountant.max_steps(event)
    if most == 2**40:  # costs nothing
        accountant.authorize(event, 10**6)
        accountant.authorize(WHOLE)
        return
    if most:
        accountant.authorize(event, most)
    full = image(accountant)
    with pytest.raises(BudgetExceeded, match="room for 0 more of this event"):
        accountant.authorize(event)
    assert image(accountant) == full
    assert accountant.get_epsilon(DELTA) in (0.0, 3.0)
