"""What good calls are made of: the table itself, records, models, budgets, problems.

`CALLS[name]()` returns a callable and its arguments, all of them fresh; `calls.py` gathers all families.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from torch_dpsco.accounting import events

N, DIM, USERS = 600, 3, 400
LOSS = dp.losses.Logistic()
Good = tuple[Callable[..., Any], dict[str, Any]]
CALLS: dict[str, Callable[[], Good]] = {}


def call(name: str) -> Callable[[Callable[[], Good]], Callable[[], Good]]:
    def register(make: Callable[[], Good]) -> Callable[[], Good]:
        assert name not in CALLS
        CALLS[name] = make
        return make

    return register


def simple(prefix: str, function: Callable[..., Any], **arguments: Any) -> None:
    """Registers a call whose arguments are values, or lambdas that make them."""
    CALLS[prefix] = lambda: (
        function,
        {k: v() if isinstance(v, FunctionType) else v for k, v in arguments.items()},
    )


def records(n: int = N, dtype: torch.dtype = torch.float32) -> TensorDataset:
    """Returns n records with labels +-1."""
    return TensorDataset(
        torch.linspace(-1, 1, n * DIM, dtype=dtype).view(n, DIM), torch.ones(n, 1, dtype=dtype)
    )


def budget(**more: Any) -> dp.Budget:
    return dp.Budget(2.0, 1e-4, **more)


def problem(**more: Any) -> dp.Problem:
    return LOSS.problem(**{"bound_x": 2.0, "radius": 3.0} | more)


def moments() -> dp.Problem:
    return dp.Problem(
        moment_order=2.0,
        moment=1.0,
        smoothness=1.0,
        strong_convexity=0.1,
        pl_constant=0.1,
        radius=3.0,
        lipschitz=1.0,
    )


def model(dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Linear:
    made = nn.Linear(DIM, 1, bias=bias, dtype=dtype)
    for p in made.parameters():
        nn.init.zeros_(p)
    return made


def params() -> list[nn.Parameter]:
    return list(dp.attach(model()).parameters())


def double() -> list[nn.Parameter]:
    return list(model(torch.float64, bias=False).parameters())


def step_event() -> events.PoissonGaussian:
    return events.PoissonGaussian(2.0, 0.01)


def accountant(**more: Any) -> dp.Accountant:
    return dp.Accountant(dp.Budget(50.0, 1e-4, **more))


def made(name: str) -> Any:
    function, arguments = CALLS[name]()
    return function(**arguments)
