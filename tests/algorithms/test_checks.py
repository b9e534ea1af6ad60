"""What is checked when an optimizer or its loader is built, beyond the list of test_errors.py."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

import torch_dpsco as dp
from torch_dpsco.errors import AdjacencyError, UtilityWarning
from torch_dpsco.step.chooser import release_noise

PROBLEM = dp.losses.Logistic().problem(bound_x=2.0)


def test_a_stream_cannot_be_sampled_from():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(())

    params = torch.nn.Linear(2, 1).parameters()
    opt = dp.HolderSGD(
        params,
        dp.HolderSGD.plan(lr=0.1, problem=PROBLEM, noise_multiplier=1.0, batch_size=1, n=10),
    )
    with pytest.raises(
        ValueError, match=r"dataset must be map-style, to be sampled from \(got Stream"
    ):
        opt.loader(Stream())


def test_a_parameter_given_twice_is_refused():
    p = torch.nn.Parameter(torch.zeros(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns, we refuse
        with pytest.raises(ValueError, match="params must hold each parameter once"):
            dp.HolderSGD(
                [p, p],
                dp.HolderSGD.plan(
                    lr=0.1, problem=PROBLEM, noise_multiplier=1.0, batch_size=1, n=10
                ),
            )


def test_an_undefined_adjacency_names_the_way_out():
    params = torch.nn.Linear(2, 1).parameters()
    with pytest.raises(AdjacencyError, match=r"give n= \(Poisson batches, every adjacency\)"):
        dp.HolderSGD(
            params,
            dp.HolderSGD.plan(
                lr=0.1,
                problem=PROBLEM,
                noise_multiplier=1.0,
                batch_size=1,
                n=10,
                sampling="fixed",
                adjacency="add_remove",
            ),
        )


def test_an_oracle_that_looks_at_places_needs_a_design_that_keeps_them():
    """In a sampled or assigned batch one record more moves all rows after it to other groups."""
    for design in (dp.Poisson(6, 24), dp.Fixed(6, 24), dp.Assigned(6, 24)):
        oracle = dp.oracles.Coordinatewise(1.0, 1.0, 6, groups=2)
        with pytest.raises(
            AdjacencyError, match="design must keep the places of rows for Coordinatewise"
        ):
            own(oracle, design)
    for design in (dp.Disjoint(6, 24), dp.Shuffled(6, 24)):
        oracle = dp.oracles.Coordinatewise(1.0, 1.0, 6, groups=2)
        assert own(oracle, design).oracle is oracle


def own(oracle: dp.oracles.MeanOracle, design: dp.Design) -> dp.PrivateOptimizer:
    params = torch.nn.Linear(2, 1).parameters()
    return dp.PrivateOptimizer(
        params, 0.1, oracle=oracle, rule=dp.rules.Accelerated(), design=design
    )


# -- budgets that bury the signal -------------------------------------------------------------------------------------

SMALL, USERS = dp.Budget(0.05, 1e-5, "replace_one"), dp.Budget(1.0, 1e-5, unit="user")
PURE, ADDED = dp.Budget(0.05, 0.0, "replace_one"), dp.Budget(0.05, 1e-5, "add_remove")
DIM, UNIT = 20, dp.losses.Logistic().problem(bound_x=1.0)
BALL, SMOOTH = dp.losses.Logistic().problem(bound_x=1.0, radius=1.0), dp.Problem(smoothness=1.0)
FILTER = {"budget": USERS, "dim": 10**6, "pair_radius": 0.5}


def solved(cls: Any, budget: dp.Budget = SMALL) -> Callable[[int], Any]:
    logistic = {
        "model": torch.nn.Linear(DIM - 1, 1),
        "loss": dp.losses.Logistic(),
        "budget": budget,
        "bound_x": 1.0,
    }
    return lambda n: cls.plan(n=n, **logistic)


def users_clipped(n: int) -> Any:
    budget = dp.Budget(0.05, 1e-5, "replace_one", unit="user")
    return dp.UserClippedSGD.plan(n=n, budget=budget, clip=2.0, lr=0.1, dim=DIM)


def planner(cls: Any, budget: dp.Budget = SMALL, **settings: Any) -> Callable[[int], Any]:
    return lambda n: cls.plan(n=n, budget=budget, dim=DIM, **settings)


# and the number of records at which noise is as long as the largest signal
PLANNERS: dict[str, tuple[Callable[[int], Any], int]] = {
    "HolderSGD": (planner(dp.HolderSGD, problem=UNIT), 517),
    "HolderSGD fixed": (
        planner(dp.HolderSGD, problem=UNIT, sampling="fixed", batch_size=50, epochs=1),
        575,
    ),
    "ClippedSGD": (planner(dp.ClippedSGD, problem=SMOOTH, clip=3.0, steps=1), 517),
    "ClippedSGD add_remove": (
        planner(dp.ClippedSGD, ADDED, problem=SMOOTH, clip=3.0, steps=4),
        259,
    ),
    "ClippedSGD passes": (
        planner(dp.ClippedSGD, problem=SMOOTH, clip=3.0, sampling="full"),
        517,
    ),
    "AcceleratedSGD": (planner(dp.AcceleratedSGD, problem=SMOOTH, clip=0.1, steps=1), 517),
    "ProximalSGD": (
        planner(dp.ProximalSGD, problem=SMOOTH, clip=9.0, steps=4, sampling="shuffled"),
        1033,
    ),
    "LocalizedSGD": (planner(dp.LocalizedSGD, problem=dp.Problem(), clip=3.0, reg=0.1), 1033),
    "HolderOutputSGD": (planner(dp.HolderOutputSGD, problem=BALL, batch_size=5), 511),
    "BoltOnPSGD": (planner(dp.BoltOnPSGD, problem=UNIT, batch_size=5, reg=0.1), 144),
    "BoltOnPSGD pure": (planner(dp.BoltOnPSGD, PURE, problem=UNIT, batch_size=5, reg=0.1), 206),
    "UserClippedSGD": (users_clipped, 517),
    "UserFilteredSGD": (
        lambda n: dp.UserFilteredSGD.plan(
            n=n, problem=dp.Problem(lipschitz=1.0), steps=5, lr=0.1, **FILTER
        ),
        1280,
    ),
    "LocalizedUserSGD": (
        lambda n: dp.LocalizedUserSGD.plan(
            n=n,
            problem=dp.Problem(lipschitz=1.0, radius=1.0),
            reg=0.1,
            max_steps=5,
            **FILTER,
        ),
        2900,
    ),
    "OutputPerturbation": (solved(dp.OutputPerturbation), 258),
    "OutputPerturbation pure": (solved(dp.OutputPerturbation, PURE), 410),
    "ObjectivePerturbation": (solved(dp.ObjectivePerturbation), 840),
    "NoisyGD": (solved(dp.NoisyGD), 291),
}


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("name", PLANNERS)
def test_a_hopeless_budget_warns_when_it_is_planned_and_one_for_half_as_many_more_records_does_not(
    name: str,
) -> None:
    plan, edge = PLANNERS[name]
    with pytest.warns(UtilityWarning, match=r"noise buries") as told:
        plan(int(edge / 1.25))
    assert len(told) == 1
    plan(int(edge * 1.25))  # a warning would be an error


@pytest.mark.parametrize(
    "budget", [SMALL, ADDED, dp.Budget(3.0, 1e-6), dp.Budget(0.01, 1e-7, "zero_out")]
)
@pytest.mark.parametrize("dim", [1, 50])
def test_the_edge_is_where_the_noise_of_one_mean_is_as_long_as_its_clip(
    budget: dp.Budget, dim: int
) -> None:
    kind = {"problem": SMOOTH, "budget": budget, "dim": dim, "clip": 7.0, "steps": 1}
    noise = release_noise(budget)
    edge = (
        noise * math.sqrt(dim) if noise > math.sqrt(dim) else noise**2
    )  # fewer records than parameters
    with pytest.warns(UtilityWarning, match="noise buries"):
        dp.ClippedSGD.plan(n=math.floor(edge), **kind)
    dp.ClippedSGD.plan(n=math.ceil(edge * 1.001), **kind)


def test_the_warning_names_noise_signal_and_what_they_come_from() -> None:
    with pytest.warns(
        UtilityWarning, match=r"\(n=200, epsilon=0\.05, dim=20\): use more data"
    ) as told:
        plan = dp.HolderSGD.plan(problem=UNIT, n=200, budget=SMALL, dim=DIM)
    noise, signal = map(float, re.findall(r"(?:norm|at most) ([\d.]+)", str(told[0].message)))
    of_all = plan.noise_std / plan.grad_bound / math.sqrt(plan.steps)
    assert noise == pytest.approx(of_all * math.sqrt(DIM), rel=1e-2)
    assert signal == 1.0
    assert told[0].filename == __file__


def test_parameters_beyond_the_records_do_not_count() -> None:
    """Noise in directions that no gradient has moves no loss."""
    plans = [
        dp.HolderSGD.plan(problem=UNIT, n=600, budget=dp.Budget(0.5, 1e-5), dim=dim, lr=0.1)
        for dim in (600, 10**9)
    ]
    assert plans[0].noise_std == plans[1].noise_std


def test_nothing_is_said_where_no_scale_is_public() -> None:
    fixed = {"n": 100, "budget": dp.Budget(0.3, 1e-3, "replace_one")}
    hinge = dp.losses.Hinge(power=1.5)
    law = dp.Problem(
        smoothness=1.0, moment=1.0, moment_order=2.0, strong_convexity=0.5, radius=1.0
    )
    with pytest.warns(UtilityWarning, match="noise buries"):
        dp.ClippedSGD.plan(problem=law, dim=10**6, **fixed)
    output = {"dim": 30, "lr": 0.1, "n": 100, "budget": dp.Budget(0.3, 1e-3, "replace_one")}
    with pytest.warns(UtilityWarning, match="noise buries"):
        dp.HolderOutputSGD.plan(problem=hinge.problem(bound_x=1.0, radius=0.1), **output)
    dp.HolderOutputSGD.plan(
        problem=hinge.problem(bound_x=1.0), **output
    )  # gradients have no bound
    dp.UserFilteredSGD.plan(n=1000, steps=5, lr=0.1, **FILTER)  # none is promised
    dp.HolderSGD.plan(problem=UNIT, **fixed)  # no number of parameters
