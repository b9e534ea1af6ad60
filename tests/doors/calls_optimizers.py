"""Good calls of optimizers, their plans and their methods."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

import torch_dpsco as dp
from tests.algorithms import user_runs
from tests.doors.shared import (
    CALLS,
    DIM,
    LOSS,
    USERS,
    N,
    budget,
    double,
    made,
    model,
    moments,
    params,
    problem,
    records,
    simple,
)
from torch_dpsco.algorithms.localized_numbers import LocalizedPhase, LocalizedSchedule
from torch_dpsco.algorithms.user_numbers import UserFilter, calibrate_filter
from torch_dpsco.rows import GradBatch
from torch_dpsco.sampling import make_sampler

# -- optimizers ----------


_EXPLICIT = {"lr": 0.1, "clip": 1.0, "noise_multiplier": 2.0, "batch_size": 6, "n": 24}


def heavy() -> dict[str, Any]:
    return {"problem": moments(), "n": N, "budget": budget(), "dim": DIM}


@functools.cache
def filter_plan() -> UserFilter:
    return calibrate_filter(
        n_users=USERS, steps=4, epsilon=4.0, delta=1e-3, pair_radius=1.0, score_share=1.0
    )


def user_budget() -> dp.Budget:
    return dp.Budget(4.0, 1e-4, unit="user")


def filtered() -> dict[str, Any]:
    return {"n": 2000, "budget": user_budget(), "pair_radius": 3.0, "lr": 0.1, "steps": 3}


@functools.cache
def bolt_plan() -> Any:
    return dp.BoltOnPSGD.plan(problem=problem(), n=24, budget=budget(), dim=DIM, batch_size=6)


@functools.cache
def holder_output_plan() -> Any:
    return dp.HolderOutputSGD.plan(
        problem=dp.losses.Hinge().problem(bound_x=1.0, radius=1.0),
        n=24,
        budget=budget(),
        dim=DIM,
        batch_size=6,
        epochs=2,
    )


@functools.cache
def phases() -> LocalizedSchedule:
    phase = LocalizedPhase(
        index=1,
        n=24,
        batch_size=24,
        clip=1.0,
        steps=4,
        reg=10.0,
        noise_std=0.1,
        error=None,
    )
    return LocalizedSchedule(phases=(phase,), rho=None)


for _cls in (dp.ClippedSGD, dp.AcceleratedSGD, dp.ProximalSGD):
    _own = f"dp.{_cls.__name__}"
    CALLS[_own] = lambda cls=_cls: (cls, {"params": params(), "plan": cls.plan(**_EXPLICIT)})
    CALLS[f"{_own}.plan"] = lambda cls=_cls: (cls.plan, heavy())
    CALLS[f"{_own}.plan[noise]"] = lambda cls=_cls: (cls.plan, {**_EXPLICIT})
CALLS["dp.LocalizedSGD"] = lambda: (
    dp.LocalizedSGD,
    {"params": params(), "plan": dp.LocalizedSGD.plan(phases=phases(), n=24)},
)
CALLS["dp.LocalizedSGD.plan"] = lambda: (
    dp.LocalizedSGD.plan,
    heavy() | {"clip": 1.0, "reg": 0.1},
)
CALLS["dp.LocalizedSGD.plan[phases]"] = lambda: (
    dp.LocalizedSGD.plan,
    {"phases": phases(), "n": 24},
)
CALLS["dp.HolderSGD"] = lambda: (
    dp.HolderSGD,
    {
        "params": params(),
        "plan": dp.HolderSGD.plan(
            lr=0.1, problem=problem(), noise_multiplier=2.0, batch_size=6, n=24
        ),
    },
)
CALLS["dp.HolderSGD.plan[noise]"] = lambda: (
    dp.HolderSGD.plan,
    {"lr": 0.1, "problem": problem(), "noise_multiplier": 2.0, "batch_size": 6, "n": 24},
)
CALLS["dp.HolderSGD.plan"] = lambda: (
    dp.HolderSGD.plan,
    {"problem": problem(), "n": 24, "budget": budget(), "batch_size": 6, "epochs": 2},
)
CALLS["dp.standardize"] = lambda: (
    dp.standardize,
    {
        "optimizer": dp.HolderSGD(
            params(),
            dp.HolderSGD.plan(
                problem=dp.losses.Logistic().problem(bound_x=2.0),
                n=24,
                budget=dp.Budget(50.0, 1e-3),
                dim=3,
                prepare="auto",
            ),
        ),
        "dataset": records(24),
    },
)
CALLS["dp.PrivateOptimizer"] = lambda: (
    dp.PrivateOptimizer,
    {
        "params": params(),
        "lr": 0.1,
        "oracle": dp.oracles.Clipped(1.0, 2.0, 6),
        "rule": dp.rules.SGD(),
        "design": dp.Poisson(6, 24),
    },
)
_CORRELATED = {"n": 24, "clip": 1.0, "lr": 0.1, "batch_size": 6}
CALLS["dp.CorrelatedSGD"] = lambda: (
    dp.CorrelatedSGD,
    {"params": params(), "plan": dp.CorrelatedSGD.plan(**_CORRELATED, noise_multiplier=2.0)},
)
simple(
    "dp.CorrelatedSGD.plan",
    dp.CorrelatedSGD.plan,
    budget=lambda: budget(),
    epochs=2,
    **_CORRELATED,
)
simple(
    "dp.CorrelatedSGD.plan[noise]",
    dp.CorrelatedSGD.plan,
    noise_multiplier=2.0,
    steps=3,
    bands=2,
    **_CORRELATED,
)
_NET = {"n": 48, "batch_size": 8, "epochs": 2}
CALLS["dp.NetSGD"] = lambda: (
    dp.NetSGD,
    {"params": params(), "plan": dp.NetSGD.plan(**_NET, noise_multiplier=2.0, lr=0.1)},
)
simple("dp.NetSGD.plan", dp.NetSGD.plan, budget=lambda: budget(), dim=DIM, **_NET)
simple("dp.NetSGD.plan[noise]", dp.NetSGD.plan, noise_multiplier=2.0, clip=1.0, lr=0.1, **_NET)
CLIPPED_USERS = {"n": 24, "clip": 1.0, "lr": 0.1, "batch_size": 6}
CALLS["dp.UserClippedSGD"] = lambda: (
    dp.UserClippedSGD,
    {"params": params(), "plan": dp.UserClippedSGD.plan(**CLIPPED_USERS, noise_multiplier=2.0)},
)
simple(
    "dp.UserClippedSGD.plan",
    dp.UserClippedSGD.plan,
    budget=lambda: user_budget(),
    steps=2,
    **CLIPPED_USERS,
)
simple(
    "dp.UserClippedSGD.plan[searched]",
    dp.UserClippedSGD.plan,
    n=24,
    budget=lambda: user_budget(),
    dim=DIM,
)
simple(
    "dp.UserClippedSGD.plan[prepared]",
    dp.UserClippedSGD.plan,
    n=24,
    budget=lambda: user_budget(),
    dim=DIM,
    bound_x=2.0,
)
simple(
    "dp.UserClippedSGD.plan[noise]",
    dp.UserClippedSGD.plan,
    noise_multiplier=2.0,
    **CLIPPED_USERS,
)
CALLS["dp.UserFilteredSGD"] = lambda: (
    dp.UserFilteredSGD,
    {"params": params(), "plan": user_runs.filtered_plan(filter_plan(), 0.1)},
)
CALLS["dp.UserFilteredSGD.plan"] = lambda: (dp.UserFilteredSGD.plan, {"dim": DIM} | filtered())
CALLS["dp.LocalizedUserSGD"] = lambda: (
    dp.LocalizedUserSGD,
    {"params": params(), "plan": user_runs.localized_plan(user_runs.phased(filter_plan()))},
)
_LOCALIZED_USERS = {
    "n": 5000,
    "reg": 1.0,
    "problem": problem,
    "pair_radius": 0.1,
    "phases": 1,
    "max_steps": 4,
    "budget": lambda: dp.Budget(8.0, 1e-4, unit="user"),
}
simple("dp.LocalizedUserSGD.plan", dp.LocalizedUserSGD.plan, dim=DIM, **_LOCALIZED_USERS)
CALLS["dp.BoltOnPSGD"] = lambda: (dp.BoltOnPSGD, {"params": double(), "plan": bolt_plan()})
_BOLT = {"problem": problem, "n": 24, "budget": lambda: budget(), "batch_size": 6}
simple("dp.BoltOnPSGD.plan", dp.BoltOnPSGD.plan, dim=DIM, **_BOLT)
_OUT = {
    "problem": lambda: dp.losses.Hinge().problem(bound_x=1.0, radius=1.0),
    "n": 24,
    "budget": lambda: budget(),
    "batch_size": 6,
    "epochs": 2,
}
CALLS["dp.HolderOutputSGD"] = lambda: (
    dp.HolderOutputSGD,
    {"params": double(), "plan": holder_output_plan()},
)
simple("dp.HolderOutputSGD.plan", dp.HolderOutputSGD.plan, dim=DIM, **_OUT)
_LINEAR = {"model": lambda: model(), "loss": lambda: LOSS, "n": N, "bound_x": 2.0, "reg": 1.0}
for _cls in (dp.OutputPerturbation, dp.ObjectivePerturbation, dp.NoisyGD):
    simple(f"dp.{_cls.__name__}.plan", _cls.plan, budget=lambda: budget(), **_LINEAR)
    CALLS[f"dp.{_cls.__name__}"] = lambda cls=_cls: (
        cls,
        {"params": list(model().parameters()), "plan": made(f"dp.{cls.__name__}.plan")},
    )
simple(
    "dp.OutputPerturbation.plan[noise]",
    dp.OutputPerturbation.plan,
    noise_multiplier=2.0,
    **_LINEAR,
)


def solved() -> dp.OutputPerturbation:
    return made("dp.OutputPerturbation")


CALLS["dp.OutputPerturbation.solve"] = lambda: (solved().solve, {"dataset": records()})
CALLS["dp.OutputPerturbation.certify"] = lambda: (solved().certify, {"dataset": records()})


def delivered() -> dp.PrivateOptimizer:
    """Returns an optimizer that is ready for its step."""
    net = dp.attach(model())
    plan = dp.HolderSGD.plan(
        lr=0.1, problem=problem(), noise_multiplier=2.0, sampling=dp.Full(24)
    )
    optimizer = dp.HolderSGD(list(net.parameters()), plan)
    for x, y in optimizer.loader(records(24)):
        LOSS(net(x), y).backward()
        break
    return optimizer


for _name, _more in {
    "loader": {"dataset": lambda: records(24)},
    "bind": {
        "loader": lambda: dp.sampling.PrivateLoader(
            records(24), make_sampler(dp.Poisson(6, 24), size=24, steps=1)
        )
    },
    "ahead": {"steps": 2},
    "report": {"delta": 1e-4},
    "load_state_dict": {"state_dict": lambda: made("dp.HolderSGD").state_dict()},
}.items():
    CALLS[f"dp.HolderSGD.{_name}"] = lambda name=_name, more=_more: (
        getattr(made("dp.HolderSGD"), name),
        {k: v() if callable(v) else v for k, v in more.items()},
    )
CALLS["dp.HolderSGD.step"] = lambda: (delivered().step, {})
CALLS["dp.HolderSGD.accumulate"] = lambda: (delivered().accumulate, {})
CALLS["dp.HolderSGD.step_on"] = lambda: (_step_on(delivered()), {"rows": None})


def _step_on(optimizer: dp.PrivateOptimizer) -> Callable[..., Any]:
    """A good call needs rows of the delivered batch."""

    @functools.wraps(optimizer.step_on)
    def step(rows: Any) -> None:
        with torch.no_grad():
            optimizer.step_on(GradBatch.consume(optimizer._trained()) if rows is None else rows)

    return step


CALLS["dp.BoltOnPSGD.loader"] = lambda: (
    made("dp.BoltOnPSGD").loader,
    {"dataset": records(24, torch.float64)},
)
CALLS["dp.ClippedSGD.loader"] = lambda: (made("dp.ClippedSGD").loader, {"dataset": records(24)})
CALLS["dp.UserClippedSGD.loader"] = lambda: (
    made("dp.UserClippedSGD").loader,
    {"dataset": records(48), "users": torch.arange(48) % 24},
)
