"""The rows of the optimizer contract: one per optimizer class or configuration, and what every test needs to run it.

A new optimizer enters the suite by one line in `ROWS`. All rows share one tiny task: 24 records, batches of 6 (of 24
under `Full`), 4 planned steps, so that a one-pass design uses each record once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from tests.streams import seeded
from torch_dpsco.accounting.designs import Design
from torch_dpsco.sampling import PrivateLoader, make_sampler
from torch_dpsco.theory.heavy_tailed import LocalizedPhase, LocalizedSchedule
from torch_dpsco.theory.user_level import LocalizedUserPlan, UserFilterPlan, UserPhase, calibrate_filter

N, BATCH, STEPS, DIM = 24, 6, 4, 3
LOSS = dp.losses.Logistic()


@dataclass(frozen=True)
class Settings:
    """What a test may vary; `scale` multiplies the clip, or the record bound that the clip follows from."""

    noise: float = 1.0
    scale: float = 1.0
    batch: int = BATCH
    steps: int | None = STEPS
    lr: float = 0.1
    accountant: dp.Accountant | None = None
    generator: torch.Generator | None = None


Build = Callable[[Any, Settings], dp.PrivateOptimizer]


@dataclass(frozen=True)
class Row:
    """An optimizer under contract.

    `exact`: the update is the plain w - lr * mean. `poisson`: draws may be empty. `clip(norm, scale)`: the bound that
    the row must clip at when the parameters have that norm.
    """

    name: str
    build: Build
    adjacency: str
    clip: Callable[[float, float], float]
    exact: bool = True
    poisson: bool = True

    def make(self, settings: Settings | None = None, model: nn.Module | None = None, **changes: Any) -> Run:
        """Returns a fresh (attached, zero) model with its optimizer."""
        settings = replace(settings or Settings(), **changes)
        model = dp.attach(zeros()) if model is None else model
        return Run(model, self.build(model.parameters(), settings))


def zeros(dtype: torch.dtype = torch.float32) -> nn.Linear:
    model = nn.Linear(DIM, 1, dtype=dtype)
    for p in model.parameters():
        nn.init.zeros_(p)
    return model


def attached(dtype: torch.dtype) -> nn.Linear:
    """Returns an attached model; a half-precision one needs a sum loss."""
    return dp.attach(zeros(dtype), loss_reduction="sum" if dtype == torch.bfloat16 else "mean")


def records(n: int = N, dtype: torch.dtype = torch.float32) -> TensorDataset:
    """Returns n records with |x| <= 3 and labels +-1."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(n, DIM, generator=generator)
    features = features * (3 * torch.rand(n, 1, generator=generator) / features.norm(dim=1, keepdim=True))
    labels = torch.sign(torch.randn(n, 1, generator=generator))
    return TensorDataset(features.to(dtype), labels.to(dtype))


@dataclass
class Run:
    """A model, its optimizer, and a training loop over batches that a seed repeats."""

    model: nn.Module
    opt: dp.PrivateOptimizer

    def loader(
        self, seed: int = 1, steps: int = STEPS, *, size: int = N, physical: int | None = None, dtype: Any = None
    ) -> PrivateLoader:
        """Returns a bound loader of repeatable draws."""
        dataset = records(size, dtype or next(self.model.parameters()).dtype)
        sampler = make_sampler(self.opt.design, size=size, steps=steps, seed=seed)
        return self.opt.bind(PrivateLoader(dataset, sampler, physical_batch_size=physical))

    def backward(self, batch: Iterable[Tensor]) -> Tensor:
        """Leaves per-sample gradients on the parameters and returns the loss."""
        features, labels = batch
        loss = LOSS(self.model(features), labels, reduction="mean" if self.model._dpsco.mean else "sum")
        loss.backward()
        return loss

    def train(self, steps: int = STEPS, seed: int = 1, noise_seed: int | None = 5, **loader: Any) -> Run:
        """Makes steps on repeatable batches with repeatable noise (with noise of its own if `noise_seed` is None)."""
        if noise_seed is not None:
            self.opt._noise = seeded(noise_seed)
        for batch in self.loader(seed, steps, **loader):
            self.opt.zero_grad()
            self.backward(batch)
            self.opt.step()
        return self

    def parameters(self) -> list[Tensor]:
        """Returns a copy of the parameters."""
        return [p.detach().clone() for p in self.model.parameters()]

    def answer(self) -> list[Tensor]:
        """Returns the private answer so far."""
        with self.opt.released():
            return self.parameters()

    def ledger(self) -> str:
        return self.opt.accountant.ledger.digest()

    def copy(self) -> Run:
        return Run(*copy.deepcopy((self.model, self.opt)))


def same(first: Iterable[Tensor], second: Iterable[Tensor]) -> bool:
    """Returns whether two lists of tensors agree bit for bit, dtypes included."""
    pairs = list(zip(first, second, strict=True))
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def _problem(scale: float, radius: float) -> dp.Problem:
    return LOSS.problem(bound_x=2.0 * scale, radius=radius)


def _holder(
    design: type[dp.Poisson] | type[dp.Fixed] = dp.Poisson,
    adjacency: str = "replace_one",
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


def _clipped(design: Callable[[int], Design], adjacency: str = "replace_one", *, first_phase: bool = False) -> Build:
    def build(params: Any, s: Settings) -> dp.PrivateOptimizer:
        own = design(s.batch)
        phases = (dp.Phase(3), dp.Phase(s.steps and s.steps - 3)) if first_phase else (dp.Phase(s.steps),)
        return dp.PrivateOptimizer(
            params,
            s.lr,
            oracle=dp.oracles.Clipped(clip=1.5 * s.scale, noise_multiplier=s.noise, batch_size=own.batch_size),
            rule=dp.rules.SGD("uniform"),
            design=own,
            schedule=dp.Schedule(phases),
            adjacency=adjacency if s.accountant is None else None,
            accountant=s.accountant,
            generator=s.generator,
        )

    return build


def _heavy(cls: Any, design: Callable[[int], Design], adjacency: str = "replace_one") -> Build:
    def build(params: Any, s: Settings) -> dp.PrivateOptimizer:
        plan = cls.plan(
            lr=s.lr,
            clip=1.5 * s.scale,
            noise_multiplier=s.noise,
            sampling=design(s.batch),
            steps=s.steps,
            adjacency=adjacency if s.accountant is None else s.accountant.adjacency,
        )
        return cls(params, replace(plan, steps=s.steps), accountant=s.accountant, generator=s.generator)

    return build


def _correlated(params: Any, s: Settings) -> dp.PrivateOptimizer:
    plan = dp.CorrelatedSGD.plan(
        n=N, clip=1.5 * s.scale, lr=s.lr, noise_multiplier=s.noise, batch_size=s.batch, steps=s.steps
    )
    return dp.CorrelatedSGD(params, plan, accountant=s.accountant, generator=s.generator)


def _localized(params: Any, s: Settings) -> dp.PrivateOptimizer:
    """One phase on all records, whose first step is that of size lr: lambda = 1/lr."""
    steps = STEPS if s.steps is None else s.steps
    phase = LocalizedPhase(
        index=1, n=N, batch_size=N, clip=1.5 * s.scale, steps=steps, reg=1 / s.lr, radius=INF,
        noise_std=s.noise * 1.5 * s.scale / N, error=None, uncapped_steps=steps,
    )  # fmt: skip
    plan = dp.LocalizedSGD.plan(
        phases=LocalizedSchedule(phases=(phase,), rho=None),
        n=N,
        adjacency=REPLACE if s.accountant is None else s.accountant.adjacency,
    )
    return dp.LocalizedSGD(params, plan, accountant=s.accountant, generator=s.generator)


def _user_clipped(params: Any, s: Settings) -> dp.PrivateOptimizer:
    plan = dp.UserClippedSGD.plan(
        lr=s.lr, clip=1.5 * s.scale, noise_multiplier=s.noise, batch_size=s.batch, n_users=N, steps=s.steps
    )
    return dp.UserClippedSGD(params, plan, accountant=s.accountant, generator=s.generator)


@lru_cache
def _filter_plan() -> UserFilterPlan:
    return calibrate_filter(n_users=200, steps=STEPS, epsilon=4.0, delta=1e-3, pair_radius=1.0, typical_score=200)


def _user_filtered(params: Any, s: Settings) -> dp.PrivateOptimizer:
    plan = dp.UserFilteredSGD.plan(filter=_filter_plan(), lr=s.lr)
    return dp.UserFilteredSGD(params, plan, accountant=s.accountant, generator=s.generator)


def _localized_user(params: Any, s: Settings) -> dp.PrivateOptimizer:
    phase = UserPhase(
        index=1, plan=_filter_plan(), lr=s.lr, start_radius=1.0, smoothing_radius=0.0, uncapped_steps=STEPS, bound=None
    )
    plan = dp.LocalizedUserSGD.plan(phases=LocalizedUserPlan(phases=(phase,), n_users=200))
    return dp.LocalizedUserSGD(params, plan, accountant=s.accountant, generator=s.generator)


def _momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def _grad_bound(radius: float, noise: str = "adaptive") -> Callable[[float, float], float]:
    def clip(norm: float, scale: float) -> float:
        problem = _problem(scale, radius)
        if noise == "paper":
            return problem.paper_grad_bound()
        return problem.grad_bound(radius if noise == "constant" else min(norm, radius))

    return clip


def _fixed_clip(norm: float, scale: float) -> float:
    return 1.5 * scale


INF = float("inf")
ADD, REPLACE = "add_remove", "replace_one"
BALL = _grad_bound(3.0)
ROWS = [
    Row("holder-poisson-add_remove", _holder(adjacency=ADD), ADD, BALL),
    Row("holder-poisson-replace_one", _holder(), REPLACE, BALL),
    Row("holder-fixed-replace_one", _holder(dp.Fixed), REPLACE, BALL, poisson=False),
    Row("holder-paper", _holder(dp.Fixed, noise="paper"), REPLACE, _grad_bound(3.0, "paper"), poisson=False),
    Row("holder-constant", _holder(noise="constant"), REPLACE, _grad_bound(3.0, "constant")),
    Row("holder-unbounded", _holder(adjacency=ADD, radius=INF), ADD, _grad_bound(INF)),
    Row("holder-tiny-ball", _holder(radius=0.02, average="uniform"), REPLACE, _grad_bound(0.02), exact=False),
    Row("holder-uniform", _holder(average="uniform"), REPLACE, BALL),
    Row("holder-weighted", _holder(average="weighted"), REPLACE, BALL),
    Row("holder-momentum", _holder(adjacency=ADD, inner=_momentum), ADD, BALL, exact=False),
    Row("holder-adam", _holder(adjacency=ADD, inner=torch.optim.Adam), ADD, BALL, exact=False),
    Row("clipped-shuffled", _clipped(lambda b: dp.Shuffled(b, N)), REPLACE, _fixed_clip, poisson=False),
    Row("clipped-disjoint", _clipped(lambda b: dp.Disjoint(b, N)), REPLACE, _fixed_clip, poisson=False),
    Row("clipped-full", _clipped(lambda b: dp.Full(N), ADD), ADD, _fixed_clip, poisson=False),
    Row(
        "accelerated-disjoint",
        _heavy(dp.AcceleratedSGD, lambda b: dp.Disjoint(b, N)),
        REPLACE,
        _fixed_clip,
        poisson=False,
    ),
    Row("accelerated-assigned", _heavy(dp.AcceleratedSGD, lambda b: dp.Assigned(b, N), ADD), ADD, _fixed_clip),
    Row("proximal-disjoint", _heavy(dp.ProximalSGD, lambda b: dp.Disjoint(b, N)), REPLACE, _fixed_clip, poisson=False),
    Row("correlated", _correlated, REPLACE, _fixed_clip, poisson=False),
    Row("clipped-sgd-poisson", _heavy(dp.ClippedSGD, lambda b: dp.Poisson(b, N), ADD), ADD, _fixed_clip),
    Row("clipped-two-phases", _clipped(lambda b: dp.Poisson(b, N), ADD, first_phase=True), ADD, _fixed_clip),
]
# Phases know the batch of each step: the contract's loaders, which start anew, are refused. What the contract says is
# tested in tests/optim/test_localized.py.
PHASED = [Row("localized", _localized, REPLACE, _fixed_clip, exact=False, poisson=False)]
# Steps need the users of rows: what the contract says is tested in tests/optim/test_user_*.py, test_localized_user.py.
USERS = [
    Row("user-clipped", _user_clipped, REPLACE, _fixed_clip),
    Row("user-filtered", _user_filtered, REPLACE, _fixed_clip, exact=False, poisson=False),
    Row("localized-user", _localized_user, REPLACE, _fixed_clip, exact=False, poisson=False),
]
