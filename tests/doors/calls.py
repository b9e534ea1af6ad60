"""One good call of each public callable: `CALLS[name]()` returns the callable and its arguments, all of them fresh.

The table of bad input replaces one argument at a time, or adds one that the good call leaves to its default.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pyarrow as pa
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpsco as dp
from torch_dpsco import clip_selection, estimators
from torch_dpsco.accounting import calibrate, events
from torch_dpsco.doctor import Diagnosis, Finding
from torch_dpsco.integrations import opacus
from torch_dpsco.integrations.parquet import ParquetRows
from torch_dpsco.integrations.tar import TarRows
from torch_dpsco.linear import objectives, solvers
from torch_dpsco.mechanisms.shuffle import vector_parameters
from torch_dpsco.rows import GradBatch
from torch_dpsco.sampling import make_sampler
from torch_dpsco.schema import Category, Number
from torch_dpsco.theory.correlated import square_root
from torch_dpsco.theory.heavy_tailed.localized import LocalizedPhase, LocalizedSchedule
from torch_dpsco.theory.user_level.calibrate import calibrate_filter
from torch_dpsco.theory.user_level.filter import UserFilterPlan
from torch_dpsco.theory.user_level.localized import LocalizedUserPlan, UserPhase

__all__ = ["CALLS", "DIM", "N", "records"]

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
    CALLS[prefix] = lambda: (function, {k: v() if isinstance(v, FunctionType) else v for k, v in arguments.items()})


def records(n: int = N, dtype: torch.dtype = torch.float32) -> TensorDataset:
    """Returns n records with labels +-1."""
    return TensorDataset(torch.linspace(-1, 1, n * DIM, dtype=dtype).view(n, DIM), torch.ones(n, 1, dtype=dtype))


def budget(**more: Any) -> dp.Budget:
    return dp.Budget(2.0, 1e-4, **more)


def problem(**more: Any) -> dp.Problem:
    return LOSS.problem(**{"bound_x": 2.0, "radius": 3.0} | more)


def moments() -> dp.Problem:
    return dp.Problem(
        moment_order=2.0, moment=1.0, smoothness=1.0, strong_convexity=0.1, pl_constant=0.1, radius=3.0, lipschitz=1.0
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


# -- accounting ----------


def step_event() -> events.PoissonGaussian:
    return events.PoissonGaussian(2.0, 0.01)


def accountant(**more: Any) -> dp.Accountant:
    return dp.Accountant(dp.Budget(50.0, 1e-4, **more))


simple("dp.Budget", dp.Budget, epsilon=1.0, delta=1e-5)
simple(
    "dp.Budget[rdp-mixture]",
    dp.Budget,
    epsilon=1.0,
    delta=1e-5,
    mode="rdp-mixture",
    orders=(4.0, 20.0),
    weights=(0.5, 0.5),
)
simple(
    "dp.Budget[rdp]", dp.Budget, epsilon=1.0, delta=1e-5, mode="rdp", schedule=((events.PoissonGaussian(2.0, 0.01), 2),)
)
CALLS["dp.Budget.declaring"] = lambda: (budget(schedule=()).declaring, {"event": step_event(), "steps": 2})
simple("dp.Accountant", dp.Accountant, budget=budget)
for _name, _more in {
    "admits": {"event": step_event, "count": 1},
    "authorize": {"event": step_event, "count": 1},
    "record": {"event": step_event, "count": 1},
    "max_steps": {"event": step_event},
    "get_delta": {"epsilon": 1.0},
    "get_epsilon": {"delta": 1e-4},
    "get_mu": {},
    "get_rho": {},
    "report": {},
    "bind": {"loader": lambda: DataLoader(records(), batch_size=10)},
    "require_unit": {"unit": "example"},
    "step": {"noise_multiplier": 2.0, "sample_rate": 0.01},
    "get_optimizer_hook_fn": {"sample_rate": 0.01},
    "state_dict": {},
}.items():
    CALLS[f"dp.Accountant.{_name}"] = lambda name=_name, more=_more: (
        getattr(accountant(), name),
        {k: v() if callable(v) else v for k, v in more.items()},
    )
CALLS["dp.Accountant.declare"] = lambda: (
    dp.Accountant(budget(schedule=())).declare,
    {"event": step_event(), "steps": 2},
)
CALLS["dp.Accountant.load_state_dict"] = lambda: (
    dp.Accountant().load_state_dict,
    {"state_dict": dp.Accountant().state_dict()},
)
CALLS["dp.Accountant.phase"] = lambda: (_entered(accountant().phase), {"part": "a", "partition": "p"})


def _entered(context: Callable[..., Any]) -> Callable[..., None]:
    @functools.wraps(context)
    def enter(*args: Any, **kwargs: Any) -> None:
        with context(*args, **kwargs):
            pass

    return enter


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
simple("events.WORGaussian", events.WORGaussian, noise_multiplier=1.0, batch_size=2, dataset_size=10)
simple("events.RandomAllocation", events.RandomAllocation, noise_multiplier=1.0, steps=10, used=5, releases=2)
simple("events.Laplace", events.Laplace, scale=1.0, sens=lambda: {"replace_one": 1.0})
simple("events.AboveThreshold", events.AboveThreshold, b_threshold=1.0, b_query=1.0, sens=lambda: {"replace_one": 1.0})
simple("events.Repeat", events.Repeat, event=step_event(), n=2)
simple("events.Sequential", events.Sequential, events=lambda: (step_event(),))
simple("events.Parallel", events.Parallel, parts=lambda: {"a": (step_event(),)}, partition="p")
simple("events.Pure", events.Pure, eps=1.0)
simple("events.ApproxDP", events.ApproxDP, eps=1.0, delta=1e-5)
simple("events.ZCDP", events.ZCDP, rho=1.0)
simple("events.ApproxZCDP", events.ApproxZCDP, rho=1.0, delta=1e-5)
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
CALLS["dp.Problem.paper_grad_bound"] = lambda: (problem().paper_grad_bound, {})
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
CALLS["dp.losses.Squared.problem"] = lambda: (dp.losses.Squared().problem, {"bound_x": 2.0, "bound_y": 1.0})
CALLS["dp.losses.Logistic.__call__"] = lambda: (LOSS.__call__, {"output": torch.zeros(4), "target": torch.ones(4)})
CALLS["dp.losses.SoftmaxCrossEntropy.__call__"] = lambda: (
    dp.losses.SoftmaxCrossEntropy(3).__call__,
    {"output": torch.zeros(4, 3), "target": torch.ones(4, dtype=torch.int64)},
)
simple("dp.losses.ResidualClipped", dp.losses.ResidualClipped, loss=lambda: LOSS, clip=0.5)
simple("dp.losses.check_holder", dp.losses.check_holder, loss=lambda: LOSS, problem=problem, bound_x=2.0, trials=3)
simple("dp.losses.clip_rows", dp.losses.clip_rows, features=lambda: torch.ones(4, 3), bound_x=1.0)
simple("dp.losses.enforce_bounds", dp.losses.enforce_bounds, features=lambda: torch.ones(4, 3), bound_x=1.0)
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
simple("dp.rules.ScheduledSGD", dp.rules.ScheduledSGD, factors=(1.0, 0.5), weights=(1.0, 1.0))
simple("dp.rules.TorchRule", dp.rules.TorchRule, optimizer=lambda: torch.optim.SGD(model().parameters(), lr=0.1))
simple("dp.Phase", dp.Phase, steps=2, lr=0.1)
simple("dp.Schedule", dp.Schedule, phases=lambda: (dp.Phase(2),))
CALLS["dp.Schedule.locate"] = lambda: (dp.Schedule((dp.Phase(2),)).locate, {"step": 1})
CALLS["dp.Schedule.position"] = lambda: (dp.Schedule((dp.Phase(2),)).position, {"steps": 1})
simple("dp.Pilot", dp.Pilot, rule="balanced", size=50)

# -- oracles ----------

FILTER = {
    "filter": lambda: dp.oracles.Filter(USERS, 150.0, 120),
    "steps": 4,
    "threshold": 1.0,
    "threshold_scale": 1.0,
    "query_scale": 1.0,
}
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
simple("dp.oracles.AdaptiveClipped", dp.oracles.AdaptiveClipped, clip0=1.0, noise_multiplier=2.0, batch_size=6)
simple("dp.oracles.AutoClip", dp.oracles.AutoClip, bound=1.0, noise_multiplier=1.0, batch_size=6)
simple("dp.oracles.Centered", dp.oracles.Centered, clipping=lambda: dp.oracles.Clipped(1.0, 1.0, 6), n_users=24)
simple("dp.oracles.Coordinatewise", dp.oracles.Coordinatewise, clip=1.0, noise_multiplier=1.0, batch_size=6, groups=3)
simple("dp.oracles.Exact", dp.oracles.Exact, batch_size=6)
simple("dp.oracles.Filter", dp.oracles.Filter, n_users=USERS, score_floor=300.0, ramp_end=280)
simple("dp.oracles.HolderAbsolute", dp.oracles.HolderAbsolute, problem=problem, noise_std=1.0, batch_size=6)
simple("dp.oracles.HolderClipped", dp.oracles.HolderClipped, problem=problem, noise_multiplier=1.0, batch_size=6)
simple("dp.oracles.Phased", dp.oracles.Phased, phases=lambda: [(dp.oracles.Clipped(1.0, 1.0, 6), 2)])
simple(
    "dp.oracles.PilotClipped",
    dp.oracles.PilotClipped,
    pilot=lambda: dp.oracles.QuantilePilot(6, 1.0),
    noise_multiplier=1.0,
    batch_size=6,
)
simple("dp.oracles.QuantilePilot", dp.oracles.QuantilePilot, batch_size=6, epsilon=1.0)
simple("dp.oracles.AdaptiveRadius", dp.oracles.AdaptiveRadius, target=0.5, low=0.1, high=1.0)
for _name in ("ShuffledClipped", "ShuffledMedian"):
    _more = {"clip": 1.0, "batch_size": 200, "dim": 3} | ({"groups": 5} if _name == "ShuffledMedian" else {})
    simple(f"dp.oracles.{_name}.calibrated", getattr(dp.oracles, _name).calibrated, **_more, epsilon=1.0, delta=1e-4)
simple(
    "dp.oracles.ShuffledClipped",
    dp.oracles.ShuffledClipped,
    clip=1.0,
    parameters=lambda: vector_parameters(200, 3, 1.0, 1e-4),
    batch_size=200,
    dim=3,
)

# -- optimizers ----------


_EXPLICIT = {"lr": 0.1, "clip": 1.0, "noise_multiplier": 2.0, "batch_size": 6, "n": 24}


def heavy() -> dict[str, Any]:
    return {"problem": moments(), "n": N, "budget": budget(), "dim": DIM}


@functools.cache
def filter_plan() -> UserFilterPlan:
    return calibrate_filter(n_users=USERS, steps=4, epsilon=4.0, delta=1e-3, pair_radius=1.0, typical_score=USERS)


def user_budget() -> dp.Budget:
    return dp.Budget(4.0, 1e-4, unit="user")


def filtered() -> dict[str, Any]:
    return {"n_users": 2000, "budget": user_budget(), "pair_radius": 3.0, "lr": 0.1, "steps": 3}


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
        radius=float("inf"),
        noise_std=0.1,
        error=None,
        uncapped_steps=4,
    )
    return LocalizedSchedule(phases=(phase,), rho=None)


def user_phases() -> LocalizedUserPlan:
    phase = UserPhase(
        index=1, plan=filter_plan(), lr=0.1, start_radius=1.0, smoothing_radius=0.0, uncapped_steps=4, bound=None
    )
    return LocalizedUserPlan(phases=(phase,), n_users=USERS)


for _cls in (dp.ClippedSGD, dp.AcceleratedSGD, dp.ProximalSGD):
    _own = f"dp.{_cls.__name__}"
    CALLS[_own] = lambda cls=_cls: (cls, {"params": params(), "plan": cls.plan(**_EXPLICIT)})
    CALLS[f"{_own}.plan"] = lambda cls=_cls: (cls.plan, heavy())
    CALLS[f"{_own}.plan[noise]"] = lambda cls=_cls: (cls.plan, {**_EXPLICIT})
CALLS["dp.LocalizedSGD"] = lambda: (
    dp.LocalizedSGD,
    {"params": params(), "plan": dp.LocalizedSGD.plan(phases=phases(), n=24)},
)
CALLS["dp.LocalizedSGD.plan"] = lambda: (dp.LocalizedSGD.plan, heavy())
CALLS["dp.LocalizedSGD.plan[phases]"] = lambda: (dp.LocalizedSGD.plan, {"phases": phases(), "n": 24})
CALLS["dp.HolderSGD"] = lambda: (
    dp.HolderSGD,
    {
        "params": params(),
        "plan": dp.HolderSGD.plan(lr=0.1, problem=problem(), noise_multiplier=2.0, batch_size=6, n=24),
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
simple("dp.CorrelatedSGD.plan", dp.CorrelatedSGD.plan, budget=lambda: budget(), epochs=2, **_CORRELATED)
simple("dp.CorrelatedSGD.plan[noise]", dp.CorrelatedSGD.plan, noise_multiplier=2.0, steps=3, bands=2, **_CORRELATED)
_CLIPPED_USERS = {"n_users": 24, "clip": 1.0, "lr": 0.1, "batch_size": 6}
CALLS["dp.UserClippedSGD"] = lambda: (
    dp.UserClippedSGD,
    {"params": params(), "plan": dp.UserClippedSGD.plan(**_CLIPPED_USERS, noise_multiplier=2.0)},
)
simple("dp.UserClippedSGD.plan", dp.UserClippedSGD.plan, budget=lambda: user_budget(), steps=2, **_CLIPPED_USERS)
simple("dp.UserClippedSGD.plan[searched]", dp.UserClippedSGD.plan, n_users=24, budget=lambda: user_budget(), dim=DIM)
simple("dp.UserClippedSGD.plan[noise]", dp.UserClippedSGD.plan, noise_multiplier=2.0, **_CLIPPED_USERS)
CALLS["dp.UserFilteredSGD"] = lambda: (
    dp.UserFilteredSGD,
    {"params": params(), "plan": dp.UserFilteredSGD.plan(filter=filter_plan(), lr=0.1)},
)
CALLS["dp.UserFilteredSGD.plan[noise]"] = lambda: (dp.UserFilteredSGD.plan, {"filter": filter_plan(), "lr": 0.1})
CALLS["dp.UserFilteredSGD.plan"] = lambda: (dp.UserFilteredSGD.plan, {"dim": DIM} | filtered())
CALLS["dp.LocalizedUserSGD"] = lambda: (
    dp.LocalizedUserSGD,
    {"params": params(), "plan": dp.LocalizedUserSGD.plan(phases=user_phases())},
)
CALLS["dp.LocalizedUserSGD.plan[noise]"] = lambda: (dp.LocalizedUserSGD.plan, {"phases": user_phases()})
_LOCALIZED_USERS = {
    "n_users": 5000,
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
simple("dp.OutputPerturbation.plan[noise]", dp.OutputPerturbation.plan, noise_multiplier=2.0, **_LINEAR)


def solved() -> dp.OutputPerturbation:
    return made("dp.OutputPerturbation")


CALLS["dp.OutputPerturbation.solve"] = lambda: (solved().solve, {"dataset": records()})
CALLS["dp.OutputPerturbation.certify"] = lambda: (solved().certify, {"dataset": records()})


def made(name: str) -> Any:
    function, arguments = CALLS[name]()
    return function(**arguments)


def delivered() -> dp.PrivateOptimizer:
    """Returns an optimizer that is ready for its step."""
    net = dp.attach(model())
    plan = dp.HolderSGD.plan(lr=0.1, problem=problem(), noise_multiplier=2.0, sampling=dp.Full(24))
    optimizer = dp.HolderSGD(list(net.parameters()), plan)
    for x, y in optimizer.loader(records(24)):
        LOSS(net(x), y).backward()
        break
    return optimizer


for _name, _more in {
    "loader": {"dataset": lambda: records(24)},
    "bind": {
        "loader": lambda: dp.sampling.PrivateLoader(records(24), make_sampler(dp.Poisson(6, 24), size=24, steps=1))
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


CALLS["dp.BoltOnPSGD.loader"] = lambda: (made("dp.BoltOnPSGD").loader, {"dataset": records(24, torch.float64)})
CALLS["dp.BoltOnPSGD.load_state_dict"] = lambda: (
    made("dp.BoltOnPSGD").load_state_dict,
    {"state_dict": made("dp.BoltOnPSGD").state_dict()},
)
CALLS["dp.UserClippedSGD.loader"] = lambda: (
    made("dp.UserClippedSGD").loader,
    {"dataset": records(48), "users": torch.arange(48) % 24},
)

# -- loaders, training, checks ----------


def loader() -> dp.sampling.PrivateLoader:
    return dp.sampling.PrivateLoader(records(24), make_sampler(dp.Poisson(6, 24), size=24, steps=1))


CALLS["dp.sampling.PrivateLoader"] = lambda: (
    dp.sampling.PrivateLoader,
    {"dataset": records(24), "sampler": make_sampler(dp.Poisson(6, 24), size=24, steps=1)},
)
simple("dp.sampling.RecordIds", dp.sampling.RecordIds, ids=["a", "b"], records=2)
simple("dp.sampling.Streamed", dp.sampling.Streamed, stream=[("a", 1.0), ("b", 2.0)], id_of=min, held=5)
simple("dp.sampling.PhysicalBatches", dp.sampling.PhysicalBatches, loader=lambda: loader(), physical_batch_size=4)

simple("dp.loggers.Logger", dp.loggers.Logger, write=print, every=5, delta=1e-3)


@call("dp.fit")
def _fit() -> Good:
    net = model()
    optimizer = dp.HolderSGD(
        net.parameters(),
        dp.HolderSGD.plan(lr=0.1, problem=problem(), noise_multiplier=2.0, batch_size=6, n=24, steps=2),
    )
    return dp.fit, {"model": net, "optimizer": optimizer, "dataset": records(24), "loss_fn": LOSS, "progress": False}


@call("dp.fit[user]")
def _fit_users() -> Good:
    net = model()
    optimizer = dp.UserClippedSGD(
        net.parameters(), dp.UserClippedSGD.plan(**_CLIPPED_USERS, noise_multiplier=2.0, steps=2)
    )
    good = {"model": net, "optimizer": optimizer, "dataset": records(48), "loss_fn": LOSS, "progress": False}
    return dp.fit, good | {"users": torch.arange(48) % 24}


@call("dp.fit[row-free]")
def _fit_row_free() -> Good:
    net = model(torch.float64, bias=False)
    optimizer = dp.BoltOnPSGD(net.parameters(), bolt_plan())
    return dp.fit, {
        "model": net,
        "optimizer": optimizer,
        "dataset": records(24, torch.float64),
        "loss_fn": LOSS,
        "progress": False,
    }


@call("dp.make_private")
def _make_private() -> Good:
    net = model()
    return dp.make_private, {
        "model": net,
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
        "data_loader": DataLoader(records(24), batch_size=6),
        "problem": problem(),
        "budget": budget(),
        "n": 24,
        "epochs": 1,
        "loss": LOSS,
    }


@call("parquet.ParquetRows")
def _parquet() -> Good:
    table = pa.table({"a": [1.0], "y": [1]})
    return ParquetRows, {"source": table, "inputs": ["a"], "target": "y"}


@call("tar.TarRows")
def _tar() -> Good:
    return TarRows, {"paths": [], "decode": lambda files: (0.0, 0), "shape": [2]}


@call("opacus.PrivacyEngine")
def _engine() -> Good:
    return opacus.PrivacyEngine, {"accountant": "prv", "secure_mode": False}


def parts_of_opacus() -> dict[str, Any]:
    net = model()
    sgd, loader = torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(records(24), batch_size=6)
    return {"module": net, "optimizer": sgd, "data_loader": loader, "max_grad_norm": 1.0, "n": 24}


@call("opacus.PrivacyEngine.make_private")
def _engine_make_private() -> Good:
    return opacus.PrivacyEngine().make_private, {**parts_of_opacus(), "noise_multiplier": 1.0}


@call("opacus.PrivacyEngine.make_private_with_epsilon")
def _engine_make_private_with_epsilon() -> Good:
    spend = {"target_epsilon": 2.0, "target_delta": 1e-4, "epochs": 2}
    return opacus.PrivacyEngine().make_private_with_epsilon, {**parts_of_opacus(), **spend}


@call("opacus.BatchMemoryManager")
def _batch_memory_manager() -> Good:
    _, optimizer, loader = opacus.PrivacyEngine().make_private(**parts_of_opacus(), noise_multiplier=1.0)
    return opacus.BatchMemoryManager, {"data_loader": loader, "max_physical_batch_size": 2, "optimizer": optimizer}


@call("opacus.DPOptimizer")
def _dp_optimizer() -> Good:
    plan = opacus.DPOptimizer.plan(
        sampling=dp.Poisson(6, 24), clip=1.0, noise_multiplier=1.0, lr=0.1, adjacency="add_remove"
    )
    return opacus.DPOptimizer, {"optimizer": torch.optim.SGD(params(), lr=0.1), "plan": plan}


simple("dp.attach", dp.attach, model=lambda: model())
simple("dp.detach", dp.detach, model=lambda: dp.attach(model()))


@call("dp.doctor")
def _doctor() -> Good:
    net = dp.attach(model())
    optimizer = dp.HolderSGD(
        net.parameters(), dp.HolderSGD.plan(lr=0.1, problem=problem(), noise_multiplier=2.0, batch_size=6, n=24)
    )
    return dp.doctor, {"model": net, "loss": LOSS, "loader": optimizer.loader(records(24)), "optimizer": optimizer}


@call("dp.ghost_backward")
def _ghost() -> Good:
    net = dp.attach(model(), rows="ghost")
    optimizer = dp.HolderSGD(
        net.parameters(),
        dp.HolderSGD.plan(lr=0.1, problem=problem(), noise_multiplier=2.0, batch_size=24, sampling=dp.Full(24)),
    )
    ((x, y),) = optimizer.loader(records(24))
    net._watch = optimizer
    return dp.ghost_backward, {"model": net, "losses": LOSS(net(x), y, reduction="none").view(-1)}


simple(
    "dp.CompiledRows", dp.CompiledRows, model=lambda: model(), loss_fn=lambda: nn.functional.mse_loss, backend="eager"
)


class Signs:
    """A model of two classes."""

    classes_ = (0, 1)

    def predict(self, X: Any) -> Any:
        return (X[:, 0] > 0).astype(int)

    def predict_proba(self, X: Any) -> Any:
        return torch.stack([1 - (p := torch.sigmoid(torch.from_numpy(X[:, 0]))), p], dim=1)


simple(
    "dp.score",
    dp.score,
    model=lambda: Signs(),
    X=lambda: records().tensors[0].numpy(),
    y=lambda: torch.ones(N, dtype=torch.int64),
    metric="log_loss",
    bound=2.0,
    budget=lambda: budget(),
    accountant=lambda: accountant(),
)
simple(
    "dp.Schema",
    dp.Schema,
    columns=lambda: {"age": Number(17, 90), "sex": Category(["f", "m"])},
    target="died",
    labels=lambda: ["no", "yes"],
    ids="patient",
    rows_per_unit=1,
)
simple("dp.audit", dp.audit, mechanism=lambda: lambda x: x + torch.randn(()), pair=(0.0, 1.0), delta=1e-2, trials=200)
simple(
    "dp.audit_outputs",
    dp.audit_outputs,
    first=lambda: torch.arange(100.0).numpy(),
    second=lambda: torch.arange(100.0).numpy() + 3,
    delta=1e-2,
)


def _run() -> tuple[nn.Module, dp.PrivateOptimizer]:
    net = dp.attach(model())
    return net, dp.HolderSGD(
        net.parameters(),
        dp.HolderSGD.plan(lr=0.1, problem=problem(), noise_multiplier=2.0, batch_size=3, sampling=dp.Full(3)),
    )


simple(
    "dp.audit_training",
    dp.audit_training,
    make=lambda: _run,
    dataset=lambda: records(3),
    canary=lambda: (torch.ones(3), torch.ones(1)),
    other=lambda: (-torch.ones(3), torch.ones(1)),
    loss=lambda: LOSS,
    delta=1e-2,
    trials=40,
    steps=1,
)
simple("Diagnosis.of", Diagnosis.of, findings=lambda: [Finding("warning", "a", "b", "c")])
CALLS["Diagnosis.raise_if"] = lambda: (Diagnosis.of([]).raise_if, {})
CALLS["Audit.contradicts"] = lambda: (
    dp.audit_outputs([0.0] * 50, [1.0] * 50, delta=0.0).contradicts,
    {"epsilon": 1.0},
)
CALLS["Statement.json"] = lambda: (made("dp.HolderSGD").report(1e-4).json, {})
NORMS = lambda: torch.linspace(0.1, 3.0, 500).numpy()  # noqa: E731
simple("clip_selection.adaptive_clip_update", clip_selection.adaptive_clip_update, clip=1.0, fraction=0.5, target=0.5)
simple("clip_selection.pilot_size", clip_selection.pilot_size, n=1000)
simple("clip_selection.rank_error", clip_selection.rank_error, epsilon=1.0, grid_size=50)
simple(
    "clip_selection.target_quantile",
    clip_selection.target_quantile,
    rule="theory",
    exchange_rate=0.1,
    pilot_size=200,
    epsilon=1.0,
    grid_size=50,
)
simple(
    "clip_selection.private_quantile",
    clip_selection.private_quantile,
    norms=lambda: NORMS(),
    quantile=0.5,
    epsilon=1.0,
    accountant=lambda: accountant(),
)
simple(
    "clip_selection.private_moment",
    clip_selection.private_moment,
    norms=lambda: NORMS(),
    order=2.0,
    rho=0.1,
    accountant=lambda: accountant(),
)

# -- estimators, objectives, solvers ----------

LABELS = lambda: (torch.arange(N) % 2).numpy()  # noqa: E731
FEATURES = lambda: records().tensors[0].numpy()  # noqa: E731
TARGETS = lambda: torch.linspace(-1, 1, N).numpy()  # noqa: E731
ESTIMATORS: dict[str, dict[str, Any]] = {
    "LogisticRegression": {"classes": (0, 1)},
    "LinearSVC": {"classes": (0, 1)},
    "SoftmaxRegression": {"classes": (0, 1)},
    "HuberRegressor": {"bound_y": 1.0},
    "QuantileRegressor": {"bound_y": 1.0, "radius": 5.0},
    "Ridge": {"bound_y": 1.0},
    "TiltedClassifier": {"classes": (0, 1), "tilt": 0.1, "n_min": 300},
    "AdversarialClassifier": {"classes": (0, 1)},
}


def fitted(name: str, **settings: Any) -> Any:
    """Fits by settings, which are checked by `fit` (scikit-learn's rule)."""
    estimator = getattr(estimators, name)(**settings)
    return estimator.fit(FEATURES(), LABELS() if "classes" in ESTIMATORS[name] else TARGETS())


for _name, _more in ESTIMATORS.items():
    _function = functools.partial(fitted, _name)
    _function.__signature__ = __import__("inspect").signature(getattr(estimators, _name))  # type: ignore[attr-defined]
    CALLS[f"estimators.{_name}"] = lambda f=_function, more=_more: (f, {"epsilon": 1.0, "n": N, "bound_x": 2.0} | more)


def fresh() -> estimators.LogisticRegression:
    return estimators.LogisticRegression(
        n=N, bound_x=2.0, classes=(0, 1), accountant=dp.Accountant(adjacency="add_remove")
    )


CALLS["estimators.LogisticRegression.fit"] = lambda: (fresh().fit, {"X": FEATURES(), "y": LABELS()})
CALLS["estimators.LogisticRegression.predict"] = lambda: (fresh().fit(FEATURES(), LABELS()).predict, {"X": FEATURES()})
CALLS["estimators.LogisticRegression.preview"] = lambda: (
    fresh().preview,
    {"X_like": FEATURES(), "y_like": LABELS(), "epsilons": (1.0,), "runs": 3},
)
CALLS["estimators.LogisticRegression.summary"] = lambda: (
    estimators.LogisticRegression(epsilon=50.0, n=N, bound_x=2.0, classes=(0, 1), intervals=0.3)
    .fit(torch.rand(N, DIM, generator=torch.Generator().manual_seed(0)), LABELS())
    .summary,
    {"level": 0.9},
)
CALLS["estimators.Ridge.fit"] = lambda: (
    estimators.Ridge(n=N, bound_x=2.0, bound_y=1.0).fit,
    {"X": FEATURES(), "y": TARGETS()},
)


def rows() -> dict[str, Any]:
    return {
        "features": records(20, torch.float64).tensors[0],
        "targets": torch.ones(20, dtype=torch.float64),
        "reg": 1.0,
    }


def objective() -> objectives.LinearObjective:
    return objectives.LinearObjective(LOSS, **rows(), normalizer=1.0)


CALLS["objectives.LinearObjective"] = lambda: (objectives.LinearObjective, {"loss": LOSS, "normalizer": 1.0} | rows())
CALLS["objectives.SoftmaxObjective"] = lambda: (
    objectives.SoftmaxObjective,
    rows() | {"targets": torch.ones(20, dtype=torch.int64), "num_classes": 3, "normalizer": 1.0},
)
CALLS["objectives.Tilted"] = lambda: (objectives.Tilted, {"loss": LOSS, "tilt": 0.1} | rows())
CALLS["objectives.Adversarial"] = lambda: (
    objectives.Adversarial,
    {"loss": LOSS, "attack_radius": 0.1, "normalizer": 1.0} | rows(),
)
CALLS["solvers.solve"] = lambda: (solvers.solve, {"objective": objective(), "tolerance": 1e-3})
CALLS["solvers.gradient_certificate"] = lambda: (
    solvers.gradient_certificate,
    {"objective": objective(), "point": torch.zeros(DIM, dtype=torch.float64)},
)
simple("dp.per_record", dp.per_record, loss=lambda: nn.BCEWithLogitsLoss())
