"""The rows of the optimizer contract: one per optimizer class, oracle or configuration.

A new optimizer or oracle enters the suite by a line in `ROWS`, with the `FACTS` that it lacks; a test says by `having`
which of them it needs. Optimizers that release their answer alone are in `test_release_once.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch

import torch_dpsco as dp
from tests.algorithms import user_runs
from tests.contract.runs import DIM, FACTS, LOSS, STEPS, Build, N, Row, Settings, agreeing
from tests.reference.absolute import HolderAbsolute
from tests.reference.exact import Exact
from torch_dpsco import oracles
from torch_dpsco.accounting.designs import Design
from torch_dpsco.algorithms.localized_numbers import LocalizedPhase, LocalizedSchedule
from torch_dpsco.algorithms.user_numbers import UserFilter, calibrate_filter
from torch_dpsco.shuffle_model import ShuffledClipped, ShuffledMedian, ShuffleParameters
from torch_dpsco.step.oracle import MeanOracle

INF = float("inf")
ADD, REPLACE, ZERO = "add_remove", "replace_one", "zero_out"


def having(*facts: str) -> pytest.MarkDecorator:
    """Runs a test on the rows that have these facts."""
    assert set(facts) <= FACTS.keys()
    rows = [row for row in ROWS if not row.lacks & set(facts)]
    return pytest.mark.parametrize("row", rows, ids=[row.name for row in rows])


# -- builds -----------------------------------------------------------------------------------------------------------


def _problem(scale: float, radius: float) -> dp.Problem:
    return LOSS.problem(bound_x=2.0 * scale, radius=radius)


def _holder(
    design: type[dp.Poisson] | type[dp.Fixed] | type[dp.Assigned] = dp.Poisson,
    adjacency: str = REPLACE,
    *,
    radius: float = 3.0,
    noise: str = "adaptive",
    average: str = "last",
    inner: Callable[[Any], torch.optim.Optimizer] | None = None,
) -> Build:
    def build(params: Any, s: Settings) -> dp.PrivateOptimizer:
        torch_optimizer = inner(params) if inner else None
        for group in torch_optimizer.param_groups if torch_optimizer else ():
            group["lr"] = s.lr
        return dp.HolderSGD(
            torch_optimizer.param_groups if torch_optimizer else params,
            dp.HolderSGD.plan(
                lr=s.lr,
                problem=_problem(s.scale, radius),
                noise_multiplier=s.noise,
                batch_size=s.batch,
                noise=noise,
                sampling=design(s.batch, N),
                steps=s.steps,
                adjacency=adjacency if s.accountant is None else s.accountant.adjacency,
                average=average,
            ),
            rule=dp.rules.TorchRule(torch_optimizer) if torch_optimizer else None,
            accountant=s.accountant,
            generator=s.generator,
        )

    return build


def _own(
    oracle: Callable[[Settings, int], MeanOracle],
    design: Callable[[int], Design],
    adjacency: str = REPLACE,
    *,
    first_phase: bool = False,
) -> Build:
    """An oracle under `PrivateOptimizer`, made of settings and the batch size of the design."""

    def build(params: Any, s: Settings) -> dp.PrivateOptimizer:
        own = design(s.batch)
        phases = (
            (dp.Phase(3), dp.Phase(s.steps and s.steps - 3))
            if first_phase
            else (dp.Phase(s.steps),)
        )
        return dp.PrivateOptimizer(
            params,
            s.lr,
            oracle=oracle(s, own.batch_size),
            rule=dp.rules.SGD("uniform"),
            design=own,
            schedule=dp.Schedule(phases),
            adjacency=adjacency if s.accountant is None else None,
            accountant=s.accountant,
            generator=s.generator,
        )

    return build


def _clip(s: Settings, size: int) -> MeanOracle:
    return oracles.Clipped(1.5 * s.scale, s.noise, size)


def _adaptive(s: Settings, size: int) -> MeanOracle:
    return oracles.AdaptiveClipped(1.5 * s.scale, s.noise, size, count_noise=10.0)


def _auto(s: Settings, size: int) -> MeanOracle:
    return oracles.AutoClip(1.5 * s.scale, s.noise, size)


def _coordinatewise(s: Settings, size: int) -> MeanOracle:
    return oracles.Coordinatewise(1.5 * s.scale, s.noise, size, groups=3)


def _shuffled(cls: Any, **more: int) -> Callable[[Settings, int], MeanOracle]:
    def make(s: Settings, size: int) -> MeanOracle:
        return cls(
            1.5 * s.scale,
            ShuffleParameters(16, round(256 * s.noise), 0.5),
            size,
            DIM + 1,
            **more,
        )

    return make


def _absolute(s: Settings, size: int) -> MeanOracle:
    return HolderAbsolute(_problem(s.scale, 3.0), s.noise or 1e-20, size, radius=3.0)


def _phased(s: Settings, size: int) -> MeanOracle:
    return oracles.Phased(
        [
            (_clip(s, size), 3),
            (_clip(replace(s, scale=0.5 * s.scale, noise=2 * s.noise), size), 100),
        ]
    )


def _piloted(s: Settings, size: int) -> MeanOracle:
    pilot = oracles.QuantilePilot(s.batch, 1.0)
    return oracles.Phased(
        [(pilot, 1), (oracles.PilotClipped(pilot, s.noise, s.batch), (N - 1) // s.batch)]
    )


def _pilot_parts(batch: int) -> Design:
    return dp.Parts(((dp.Full(batch), 1), (dp.Disjoint(batch, N - batch), (N - 1) // batch)), N)


def _exact(s: Settings, size: int) -> MeanOracle:
    return Exact(size)


def _heavy(cls: Any, design: Callable[[int], Design], adjacency: str = REPLACE) -> Build:
    def build(params: Any, s: Settings) -> dp.PrivateOptimizer:
        plan = cls.plan(
            lr=s.lr,
            clip=1.5 * s.scale,
            noise_multiplier=s.noise,
            sampling=design(s.batch),
            steps=s.steps,
            adjacency=adjacency if s.accountant is None else s.accountant.adjacency,
        )
        return cls(
            params, replace(plan, steps=s.steps), accountant=s.accountant, generator=s.generator
        )

    return build


def _correlated(params: Any, s: Settings) -> dp.PrivateOptimizer:
    plan = dp.CorrelatedSGD.plan(
        n=N,
        clip=1.5 * s.scale,
        lr=s.lr,
        noise_multiplier=s.noise,
        batch_size=s.batch,
        steps=s.steps,
        adjacency=REPLACE if s.accountant is None else s.accountant.adjacency,
    )
    return dp.CorrelatedSGD(params, plan, accountant=s.accountant, generator=s.generator)


def _net(params: Any, s: Settings) -> dp.PrivateOptimizer:
    plan = dp.NetSGD.plan(
        clip=1.5 * s.scale,
        lr=s.lr,
        noise_multiplier=s.noise,
        sampling=dp.Poisson(s.batch, N),
        steps=s.steps,
        adjacency=ADD if s.accountant is None else s.accountant.adjacency,
    )
    return dp.NetSGD(params, plan, accountant=s.accountant, generator=s.generator)


def _localized(params: Any, s: Settings) -> dp.PrivateOptimizer:
    """Two phases of as many steps, on half of the records and on a quarter."""

    def phase(index: int, n: int, steps: int) -> LocalizedPhase:
        return LocalizedPhase(
            index=index, n=n, batch_size=n, clip=1.5 * s.scale, steps=steps, reg=index / s.lr,
            noise_std=s.noise * 1.5 * s.scale / n, error=None,
        )  # fmt: skip

    half = (STEPS if s.steps is None else s.steps) // 2
    plan = dp.LocalizedSGD.plan(
        phases=LocalizedSchedule(
            phases=(phase(1, N // 2, half), phase(2, N // 4, half)), rho=None
        ),
        n=N,
        adjacency=REPLACE if s.accountant is None else s.accountant.adjacency,
    )
    return dp.LocalizedSGD(params, plan, accountant=s.accountant, generator=s.generator)


def _user_clipped(params: Any, s: Settings) -> dp.PrivateOptimizer:
    plan = dp.UserClippedSGD.plan(
        lr=s.lr,
        clip=1.5 * s.scale,
        noise_multiplier=s.noise,
        batch_size=s.batch,
        n=N,
        steps=s.steps,
        sampling="poisson",
        adjacency=REPLACE if s.accountant is None else s.accountant.adjacency,
    )
    return dp.UserClippedSGD(params, plan, accountant=s.accountant, generator=s.generator)


@lru_cache
def _filter(steps: int) -> UserFilter:
    return calibrate_filter(
        n_users=200,
        steps=steps,
        epsilon=4.0,
        delta=1e-3,
        pair_radius=1.0,
        score_share=1.0,
        halt_probability=1e-9,
    )


def _filtered(params: Any, s: Settings) -> dp.PrivateOptimizer:
    plan = user_runs.filtered_plan(_filter(STEPS), s.lr)
    return dp.UserFilteredSGD(params, plan, accountant=s.accountant, generator=s.generator)


def _localized_user(params: Any, s: Settings) -> dp.PrivateOptimizer:
    plan = user_runs.localized_plan(user_runs.phased(_filter(STEPS), lr=s.lr))
    return dp.LocalizedUserSGD(params, plan, accountant=s.accountant, generator=s.generator)


def _momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def _grad_bound(radius: float, noise: str = "adaptive") -> Callable[[float, float], float]:
    def clip(norm: float, scale: float) -> float:
        problem = _problem(scale, radius)
        return problem.grad_bound(radius if noise == "constant" else min(norm, radius))

    return clip


def _fixed_clip(norm: float, scale: float) -> float:
    return 1.5 * scale


# -- rows -------------------------------------------------------------------------------------------------------------

BALL, FIXED = _grad_bound(3.0), _fixed_clip


def _row(
    name: str, build: Build, adjacency: str, clip: Any, lacks: str = "", **more: Any
) -> Row:
    return Row(name, build, adjacency, clip, frozenset(lacks.split()), **more)


def _user(
    name: str, build: Build, adjacency: str, clip: Any, lacks: str = "", **more: Any
) -> Row:
    return _row(name, build, adjacency, clip, lacks, unit="user", **more)


def _shuffle(b: int) -> Design:
    return dp.Shuffled(b, N)


def _disjoint(b: int) -> Design:
    return dp.Disjoint(b, N)


def _poisson(b: int) -> Design:
    return dp.Poisson(b, N)


FILTER = "clip quiet numbers batch endless empty"
ROWS = [
    _row("holder-poisson-add_remove", _holder(adjacency=ADD), ADD, BALL),
    _row("holder-poisson-replace_one", _holder(), REPLACE, BALL),
    _row("holder-poisson-zero_out", _holder(adjacency=ZERO), ZERO, BALL),
    _row("holder-fixed-replace_one", _holder(dp.Fixed), REPLACE, BALL, "empty"),
    _row("holder-fixed", _holder(dp.Fixed, noise="constant"), REPLACE, _grad_bound(3.0, "constant"), "empty"),
    _row("holder-constant", _holder(noise="constant"), REPLACE, _grad_bound(3.0, "constant")),
    _row("holder-unbounded", _holder(adjacency=ADD, radius=INF), ADD, _grad_bound(INF)),
    _row("holder-tiny-ball", _holder(radius=0.02, average="uniform"), REPLACE, _grad_bound(0.02), "plain"),
    _row("holder-uniform", _holder(average="uniform"), REPLACE, BALL),
    _row("holder-weighted", _holder(average="weighted"), REPLACE, BALL),
    _row("holder-allocated", _holder(dp.Assigned, adjacency=ADD), ADD, BALL,
         "shared anew alike endless"),
    _row("holder-momentum", _holder(adjacency=ADD, inner=_momentum), ADD, BALL, "plain"),
    _row("holder-adam", _holder(adjacency=ADD, inner=torch.optim.Adam), ADD, BALL, "plain"),
    _row("clipped-shuffled", _own(_clip, _shuffle), REPLACE, FIXED, "empty"),
    _row("clipped-disjoint", _own(_clip, _disjoint), REPLACE, FIXED, "empty"),
    _row("clipped-full", _own(_clip, lambda b: dp.Full(N), ADD), ADD, FIXED, "empty batch"),
    _row("clipped-two-phases", _own(_clip, _poisson, ADD, first_phase=True), ADD, FIXED),
    _row("adaptive", _own(_adaptive, _poisson, ADD), ADD, None, "clip"),
    _row("auto", _own(_auto, _poisson, ADD), ADD, FIXED),
    # noise of all coordinates in a group of a third of the batch; of 256 bits of each record on a grid of 16
    _row("coordinatewise", _own(_coordinatewise, _disjoint), REPLACE, FIXED, "empty", louder=lambda _: 3 * 4**0.5),
    _row("shuffled-clipped", _own(_shuffled(ShuffledClipped), _shuffle), REPLACE, FIXED, "empty quiet",
         louder=lambda _: 6**0.5),
    _row("shuffled-median", _own(_shuffled(ShuffledMedian, groups=3), _disjoint), REPLACE, FIXED,
         "empty quiet", louder=lambda _: 3 * 2**0.5),
    _row("absolute", _own(_absolute, _poisson, ADD), ADD, BALL, "alike", louder=lambda oracle: 6 / oracle.clip),
    _row("phased", _own(_phased, _poisson, ADD), ADD, None, "clip alike"),
    _row("piloted", _own(_piloted, _pilot_parts), REPLACE, None, "clip alike empty anew moving"),
    _row("exact", _own(_exact, _poisson), REPLACE, None, "clip private numbers"),
    _row("accelerated-disjoint", _heavy(dp.AcceleratedSGD, _disjoint), REPLACE, FIXED, "empty"),
    _row("accelerated-assigned", _heavy(dp.AcceleratedSGD, lambda b: dp.Assigned(b, N, amplification=False), ADD), ADD,
         FIXED),
    _row("accelerated-secret", _heavy(dp.AcceleratedSGD, lambda b: dp.Assigned(b, N), ADD), ADD, FIXED,
         "shared anew alike endless"),
    _row("proximal-disjoint", _heavy(dp.ProximalSGD, _disjoint), REPLACE, FIXED, "empty"),
    _row("correlated", _correlated, REPLACE, FIXED, "empty", louder=lambda oracle: oracle.strategy.norm),
    _row("clipped-sgd-poisson", _heavy(dp.ClippedSGD, _poisson, ADD), ADD, FIXED),
    _row("net-sgd", _net, ADD, FIXED),
    _row("localized", _localized, REPLACE, FIXED, "plain empty anew rates batch endless alike"),
    _user("user-clipped", _user_clipped, REPLACE, FIXED),
    _user("user-filtered", _filtered, REPLACE, None,
          f"{FILTER} alike shared", data=agreeing),
    _user("localized-user", _localized_user, REPLACE, None, f"{FILTER} alike shared anew rates", data=agreeing),
]  # fmt: skip
