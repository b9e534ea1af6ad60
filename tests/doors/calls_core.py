"""Good calls of accounting, problems, losses, proximal operators, rules, schedules and oracles."""

from __future__ import annotations

import torch

import torch_dpsco as dp
from tests.doors.shared import (
    CALLS,
    LOSS,
    USERS,
    accountant,
    budget,
    model,
    problem,
    simple,
    step_event,
)
from torch_dpsco.accounting import calibrate, events
from torch_dpsco.algorithms.correlated_numbers import square_root
from torch_dpsco.shuffle_model import VECTORS, shuffle_parameters

# -- accounting ----------


simple("dp.Budget", dp.Budget, epsilon=1.0, delta=1e-5)
simple("dp.Budget[rdp]", dp.Budget, epsilon=1.0, delta=1e-5, mode="rdp")
CALLS["dp.Budget.under"] = lambda: (budget().under, {"adjacency": "zero_out"})
simple("dp.Accountant", dp.Accountant, budget=budget)
for _name, _more in {
    "admits": {"event": step_event, "count": 1},
    "authorize": {"event": step_event, "count": 1},
    "record": {"event": step_event, "count": 1},
    "max_steps": {"event": step_event},
    "get_delta": {"epsilon": 1.0},
    "get_epsilon": {"delta": 1e-4},
    "get_mu": {},
    "report": {},
    "require_unit": {"unit": "example", "adjacency": "zero_out"},
    "settle": {"adjacency": "zero_out"},
    "state_dict": {},
}.items():
    CALLS[f"dp.Accountant.{_name}"] = lambda name=_name, more=_more: (
        getattr(accountant(), name),
        {k: v() if callable(v) else v for k, v in more.items()},
    )
CALLS["dp.Accountant.declare"] = lambda: (
    dp.Accountant(budget()).declare,
    {"event": step_event(), "steps": 2},
)
CALLS["dp.Accountant.load_state_dict"] = lambda: (
    dp.Accountant().load_state_dict,
    {"state_dict": dp.Accountant().state_dict()},
)
CALLS["dp.Accountant.pay"] = lambda: (
    dp.Accountant(budget()).pay,
    {"event": events.Pure(0.1), "plan": dict, "records": str, "draw": int},
)
CALLS["dp.Accountant.part"] = lambda: (
    accountant().part,
    {"part": "a", "partition": "p"},
)
simple("dp.Poisson", dp.Poisson, batch_size=6, n=24)
simple("dp.Fixed", dp.Fixed, batch_size=6, n=24)
simple("dp.Cyclic", dp.Cyclic, batch_size=6, n=24, passes=2)
simple("dp.Disjoint", dp.Disjoint, batch_size=6, n=24)
simple("dp.Shuffled", dp.Shuffled, batch_size=6, n=24)
simple("dp.Full", dp.Full, n=24)
simple("dp.Assigned", dp.Assigned, batch_size=6, n=24, amplification=True, passes=2)
simple("dp.Parts", dp.Parts, parts=lambda: ((dp.Full(8), 1), (dp.Poisson(4, 16), 2)), n=24)
for _kind in (dp.Poisson, dp.Fixed, dp.Disjoint, dp.Shuffled):
    CALLS[f"dp.sampling.{_kind.__name__}Sampler"] = lambda kind=_kind: (
        getattr(dp.sampling, f"{kind.__name__}Sampler"),
        {"design": kind(6, 24)},
    )
CALLS["dp.sampling.FullSampler"] = lambda: (dp.sampling.FullSampler, {"design": dp.Full(24)})
simple("events.Gaussian", events.Gaussian, sigma=1.0, sens=lambda: {"replace_one": 1.0})
simple("events.PoissonGaussian", events.PoissonGaussian, noise_multiplier=1.0, q=0.1)
simple(
    "events.WORGaussian", events.WORGaussian, noise_multiplier=1.0, batch_size=2, dataset_size=10
)
simple(
    "events.RandomAllocation",
    events.RandomAllocation,
    noise_multiplier=1.0,
    steps=10,
    releases=2,
)
simple("events.Laplace", events.Laplace, scale=1.0, sens=lambda: {"replace_one": 1.0})
simple(
    "events.AboveThreshold",
    events.AboveThreshold,
    b_threshold=1.0,
    b_query=1.0,
    sens=lambda: {"replace_one": 1.0},
)
simple("events.Repeat", events.Repeat, event=step_event(), n=2)
simple("events.Sequential", events.Sequential, events=lambda: (step_event(),))
simple("events.Parallel", events.Parallel, parts=lambda: {"a": (step_event(),)}, partition="p")
simple("events.Pure", events.Pure, eps=1.0)
simple("events.ApproxDP", events.ApproxDP, eps=1.0, delta=1e-5)
simple("events.ZCDP", events.ZCDP, rho=1.0)
simple("events.GDP", events.GDP, mu=1.0)
simple("events.KNorm", events.KNorm, dim=3, eps=1.0)
simple("events.clipped_gaussian", events.clipped_gaussian, noise_multiplier=1.0)
simple(
    "calibrate.noise_multiplier",
    calibrate.noise_multiplier,
    epsilon=1.0,
    delta=1e-4,
    design=lambda: dp.Poisson(6, 24),
    steps=2,
    adjacency="replace_one",
)

# -- problem, losses, prox, rules, schedule ----------

simple(
    "dp.Problem",
    dp.Problem,
    lipschitz=1.0,
    smoothness=1.0,
    holder_exponent=0.5,
    holder_constant=1.0,
    grad_at_zero=1.0,
    moment_order=2.0,
    moment=1.0,
)
CALLS["dp.Problem.grad_bound"] = lambda: (problem().grad_bound, {})
for _name, _more in {
    "Hinge": {},
    "Logistic": {},
    "SmoothedHinge": {},
    "PowerLoss": {},
    "Absolute": {},
    "Squared": {},
    "Huber": {},
    "Pinball": {},
    "SmoothedPinball": {},
    "EpsilonInsensitive": {},
    "SoftmaxCrossEntropy": {"num_classes": 3},
}.items():
    simple(f"dp.losses.{_name}", getattr(dp.losses, _name), **_more)
CALLS["dp.losses.Logistic.problem"] = lambda: (LOSS.problem, {"bound_x": 2.0})
CALLS["dp.losses.Squared.problem"] = lambda: (
    dp.losses.Squared().problem,
    {"bound_x": 2.0, "bound_y": 1.0},
)
CALLS["dp.losses.Logistic.__call__"] = lambda: (
    LOSS.__call__,
    {"output": torch.zeros(4), "target": torch.ones(4)},
)
CALLS["dp.losses.SoftmaxCrossEntropy.__call__"] = lambda: (
    dp.losses.SoftmaxCrossEntropy(3).__call__,
    {"output": torch.zeros(4, 3), "target": torch.ones(4, dtype=torch.int64)},
)
simple("dp.losses.ResidualClipped", dp.losses.ResidualClipped, loss=lambda: LOSS, clip=0.5)
simple(
    "dp.losses.check_holder",
    dp.losses.check_holder,
    loss=lambda: LOSS,
    problem=problem,
    bound_x=2.0,
    trials=3,
)
simple(
    "dp.losses.enforce_bounds",
    dp.losses.enforce_bounds,
    features=lambda: torch.ones(4, 3),
    bound_x=1.0,
)
for _name, _more in {
    "Ball": {"radius": 1.0},
    "Box": {"low": -1.0, "high": 1.0},
    "ElasticNet": {"l1": 1.0, "l2": 1.0},
    "L2": {},
    "L1": {},
    "Simplex": {},
    "Identity": {},
}.items():
    simple(f"dp.prox.{_name}", getattr(dp.prox, _name), **_more)
simple("dp.rules.SGD", dp.rules.SGD)
simple("dp.rules.Accelerated", dp.rules.Accelerated)
simple("dp.rules.Anchored", dp.rules.Anchored)
simple("dp.rules.Momentum", dp.rules.Momentum, average="weighted", momentum=0.5)
simple(
    "dp.rules.AdamBC",
    dp.rules.AdamBC,
    noise_std=0.5,
    betas=(0.9, 0.99),
    floor=0.1,
    weight_decay=0.1,
    average="ema",
)
simple("dp.rules.ScheduledSGD", dp.rules.ScheduledSGD, factors=(1.0, 0.5), weights=(1.0, 1.0))
simple(
    "dp.rules.TorchRule",
    dp.rules.TorchRule,
    optimizer=lambda: torch.optim.SGD(model().parameters(), lr=0.1),
)
simple("dp.Phase", dp.Phase, steps=2, lr=0.1)
simple("dp.Schedule", dp.Schedule, phases=lambda: (dp.Phase(2),))
CALLS["dp.Schedule.locate"] = lambda: (dp.Schedule((dp.Phase(2),)).locate, {"step": 1})
simple("dp.Pilot", dp.Pilot, rule="balanced", size=50)

# -- oracles ----------

simple("dp.oracles.Clipped", dp.oracles.Clipped, clip=1.0, noise_multiplier=1.0, batch_size=6)
simple(
    "dp.oracles.CorrelatedClipped",
    dp.oracles.CorrelatedClipped,
    clip=1.0,
    noise_multiplier=1.0,
    batch_size=6,
    strategy=lambda: square_root(2),
    steps=4,
)
simple(
    "dp.oracles.AdaptiveClipped",
    dp.oracles.AdaptiveClipped,
    clip0=1.0,
    noise_multiplier=2.0,
    batch_size=6,
)
simple("dp.oracles.AutoClip", dp.oracles.AutoClip, clip=1.0, noise_multiplier=1.0, batch_size=6)
simple(
    "dp.oracles.UserClipped",
    dp.oracles.UserClipped,
    clipping=lambda: dp.oracles.Clipped(1.0, 1.0, 6),
    n_users=24,
)
simple(
    "dp.oracles.Coordinatewise",
    dp.oracles.Coordinatewise,
    clip=1.0,
    noise_multiplier=1.0,
    batch_size=6,
    groups=3,
)
simple(
    "dp.oracles.UserFilter",
    dp.oracles.UserFilter,
    n_users=USERS,
    steps=4,
    pair_radius=1.0,
    threshold=350.0,
    threshold_scale=1.0,
    query_scale=1.0,
    score_floor=300.0,
    ramp_end=280,
    noise_std=1.0,
)
simple(
    "dp.oracles.HolderClipped",
    dp.oracles.HolderClipped,
    problem=problem,
    noise_multiplier=1.0,
    batch_size=6,
)
simple(
    "dp.oracles.Phased", dp.oracles.Phased, phases=lambda: [(dp.oracles.Clipped(1.0, 1.0, 6), 2)]
)
simple(
    "dp.oracles.PilotClipped",
    dp.oracles.PilotClipped,
    pilot=lambda: dp.oracles.QuantilePilot(6, 1.0),
    noise_multiplier=1.0,
    batch_size=6,
)
simple("dp.oracles.QuantilePilot", dp.oracles.QuantilePilot, batch_size=6, epsilon=1.0)
for _name in ("ShuffledClipped", "ShuffledMedian"):
    _more = {"clip": 1.0, "batch_size": 200, "dim": 3} | (
        {"groups": 5} if _name == "ShuffledMedian" else {}
    )
    simple(
        f"dp.shuffle_model.{_name}.calibrated",
        getattr(dp.shuffle_model, _name).calibrated,
        **_more,
        epsilon=1.0,
        delta=1e-4,
    )
simple(
    "dp.shuffle_model.ShuffledClipped",
    dp.shuffle_model.ShuffledClipped,
    clip=1.0,
    parameters=lambda: shuffle_parameters(VECTORS, 200, 3, 1.0, 1e-4),
    batch_size=200,
    dim=3,
)
