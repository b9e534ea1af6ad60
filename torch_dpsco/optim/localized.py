"""LocalizedSGD: phases of regularized subgradient steps, each on records of its own, around the answer before.

    phase i, center c, n_i records:   w <- Proj( w - f_k ( mean / lambda_i + (w - c) ) ),   c <- last w

Multi-pass within a phase (all its records, or a minibatch of them, in each step), one pass over phases: a record is in
one phase only, so that the run costs what the costliest phase costs. No smoothness is needed.

Differs from the paper (Lowy and Razaviyayn 2023, Algorithms 3 and 4) in: 1. schedules with proved constants, without
balls around the centers by default; 2. the number of steps is not tied to lambda; 3. several copies of a phase, of
which the most central answer is taken (beyond the paper); 4. minibatches are accounted numerically, not by the hidden
constants of the moments accountant; 5. the strongly convex reduction in its proved form.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import torch

from torch_dpsco import _validate as check
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.designs import Fixed, Full, Poisson
from torch_dpsco.accounting.events import Adjacency
from torch_dpsco.accounting.filters import Budget
from torch_dpsco.accounting.parts import Parts
from torch_dpsco.optim import checks
from torch_dpsco.optim.base import PrivateOptimizer
from torch_dpsco.optim.heavy_plan import dimension
from torch_dpsco.optim.localized_plan import plan_localized
from torch_dpsco.optim.pilot import Pilot
from torch_dpsco.oracles.base import MeanOracle
from torch_dpsco.oracles.clipped import Clipped
from torch_dpsco.oracles.phased import Phased
from torch_dpsco.oracles.pilot import PilotClipped, QuantilePilot
from torch_dpsco.problem import Problem
from torch_dpsco.prox import Ball, Identity, Prox
from torch_dpsco.rules import Anchored
from torch_dpsco.schedule import Phase, Schedule
from torch_dpsco.theory.heavy_tailed import LocalizedPhase, LocalizedSchedule

__all__ = ["LocalizedSGD"]

_Self = TypeVar("_Self", bound="LocalizedSGD")
_SAMPLING: dict[str, type[Poisson] | type[Fixed]] = {"poisson": Poisson, "fixed": Fixed}


class LocalizedSGD(PrivateOptimizer):
    """Localized regularized subgradient steps for non-smooth convex (or strongly convex) losses.

    The loop is the usual one, over `loader(dataset)`, which delivers all batches of all phases in order.

    Args:
        params: parameters or groups; all of them count as one vector.
        schedule: phases, from `LocalizedSGD.plan` or `theory.heavy_tailed`.
        n: public number of records; at least those of all phases, which take them from one random permutation.
        sampling: within phases of minibatches: "poisson" or "fixed".
        pilots: group of each phase that chooses its clip, from `plan`; None for the clips of the schedule.
        adjacency: "replace_one" or "zero_out"; default that of the accountant, or "replace_one".
        prox: projection on the feasible set; with balls around the centers Identity or Ball.
        accountant: ledger and budget.
        generator: noise generator of your own (warns).
        secure: "exact" for noise in integers on a public grid, see docs/performance.md for its cost.

    Guarantee:
        Adjacency: replace_one or zero_out. Unit: one row per record. Event: in each phase, its steps of unsampled (or
        sampled) Gaussians; phases are parts of one partition. Assumes: batches of the optimizer's own loader, rows that
        do not couple records. The regularizer is added after clip and noise. Neither moments nor lambda are assumed.
        Source: Lowy, Razaviyayn 2023, Theorem 12; docs/proofs/heavy_tailed.md#disjoint-parts.

    Example:
        >>> import torch_dpsco as dp
        >>> model = dp.attach(torch.nn.Linear(3, 1))
        >>> data = torch.utils.data.TensorDataset(torch.randn(400, 3), torch.randn(400, 1))
        >>> optimizer = dp.LocalizedSGD.calibrated(
        ...     model.parameters(), problem=dp.Problem(), n=400, budget=dp.Budget(1.0, 1e-4), clip=2.0, reg=0.1,
        ...     max_steps=10, min_phase=50)
        >>> for x, y in optimizer.loader(data):
        ...     optimizer.zero_grad()
        ...     dp.losses.Absolute()(model(x), y).backward()
        ...     optimizer.step()
        >>> optimizer.finalize()
        >>> [design.n for design, _ in optimizer.design.parts], optimizer.steps
        ([200, 100, 97], 30)
    """

    def __init__(
        self,
        params: Any,
        *,
        schedule: LocalizedSchedule,
        n: int,
        sampling: str = "poisson",
        pilots: tuple[QuantilePilot | None, ...] | None = None,
        adjacency: Adjacency | None = None,
        prox: Prox | None = None,
        accountant: Accountant | None = None,
        generator: torch.Generator | None = None,
        secure: str | None = None,
    ) -> None:
        if not isinstance(schedule, LocalizedSchedule):
            raise ValueError(f"schedule must be a LocalizedSchedule, from LocalizedSGD.plan (got {schedule!r})")
        if pilots is not None and len(pilots) != len(schedule.phases):
            raise ValueError(f"pilots must be one per phase, {len(schedule.phases)} (got {len(pilots)})")
        balls = any(math.isfinite(phase.radius) for phase in schedule.phases)
        if balls and prox is not None and not isinstance(prox, (Ball, Identity)):
            raise ValueError(f"prox must be Ball or Identity for phases with balls of their own (got {prox})")
        kind = _SAMPLING[check.choice(_SAMPLING, sampling=sampling)]
        oracles: list[tuple[MeanOracle, int]] = []
        parts: list[tuple[Full | Poisson | Fixed, int]] = []
        phases: list[Phase] = []
        newest: QuantilePilot | None = None
        for planned, pilot in zip(schedule.phases, pilots or (None,) * len(schedule.phases), strict=True):
            if pilot is not None:
                newest = pilot
                oracles.append((pilot, 1))
                parts.append((Full(pilot.batch_size), 1))
                phases.append(Phase(1))
            for copy in range(planned.copies):
                oracles.append((_clipped(planned, newest), planned.steps))
                full = planned.batch_size == planned.n
                parts.append((Full(planned.n) if full else kind(planned.batch_size, planned.n), planned.steps))
                phases.append(
                    Phase(planned.steps, planned.lr, planned.reg, planned.radius, copy=copy, copies=planned.copies)
                )
        super().__init__(
            params,
            1.0,
            oracle=Phased(oracles),
            rule=Anchored(),
            design=Parts(tuple(parts), n),
            schedule=Schedule(tuple(phases)),
            prox=prox,
            accountant=accountant,
            adjacency=adjacency,
            generator=generator,
            secure=secure,
        )

    @classmethod
    def plan(
        cls,
        *,
        problem: Problem,
        n: int,
        budget: Budget,
        dim: int,
        method: str | None = None,
        clip: float | None = None,
        reg: float | None = None,
        copies: int = 1,
        max_steps: int | None = 2000,
        min_phase: int = 1,
        sampling: str = "full",
        distance: float | None = None,
        allow_infinite_variance: bool = False,
    ) -> LocalizedSchedule:
        """Returns the phases of a run, before anything is spent.

        Args:
            problem: promises about the supremum over w of the gradient norm: moment of moment_order, second_moment.
                Not needed where both clip and reg are given.
            n: public number of records.
            budget: what the run may spend; replace_one or zero_out.
            dim: number of parameters.
            method: "localized" (default if moment_order >= 4, or none is promised), "ball" (with balls around the
                centers), "boosted" (default below 4; `copies` groups per phase), "reduction" (strongly convex losses:
                localized runs around each other).
            clip: clip of all phases, chosen without looking at the data; default by theory.
            reg: lambda of the first phase, chosen without looking at the data; default by theory, which is sized for
                the worst case and moves little at moderate n. Without the default there is no risk bound.
            copies: groups per phase, method "boosted".
            max_steps: cap on the steps of a phase; the theorem wants up to n^2 rho / (2 dim). None for no cap.
            min_phase: phases of fewer records join the one before.
            sampling: "full" (all records of the phase in each step), "poisson" or "fixed" (minibatches, methods
                "localized" only).
            distance: bound on |w_0 - w*|; default the diameter of the problem's ball.
            allow_infinite_variance: admits moment orders below 2.

        Raises:
            MissingConstantError: promises are missing; says which, and how to do without.
            AdjacencyError: add_remove, where parts that are cut by position have no bound.
        """
        schedule = plan_localized(
            problem,
            n=n,
            budget=budget,
            dim=dim,
            method=method,
            clip=clip,
            reg=reg,
            copies=copies,
            max_steps=max_steps,
            min_phase=min_phase,
            sampling=sampling,
            distance=distance,
            allow_infinite_variance=allow_infinite_variance,
        )
        noise = min(p.noise_multiplier / p.batch_size / math.sqrt(p.steps) for p in schedule.phases)
        checks.warn_if_buried(noise, n=n, dim=dim, epsilon=budget.epsilon, of="its best phase, in units of the clip,")
        return schedule

    @classmethod
    def calibrated(
        cls: type[_Self],
        params: Any,
        *,
        problem: Problem,
        n: int,
        budget: Budget,
        method: str | None = None,
        clip: float | Pilot | None = None,
        reg: float | None = None,
        copies: int = 1,
        max_steps: int | None = 2000,
        min_phase: int = 1,
        sampling: str = "full",
        distance: float | None = None,
        allow_infinite_variance: bool = False,
        prox: Prox | None = None,
        accountant: Accountant | None = None,
        generator: torch.Generator | None = None,
        secure: str | None = None,
    ) -> _Self:
        """Returns an optimizer that spends the budget in its phases; see `plan`.

        With clip=Pilot(...) each phase that is large enough gives a group of its records to choose the clip at its
        center; smaller ones keep the last choice.
        """
        params, dim = dimension(params)
        pilot = clip if isinstance(clip, Pilot) else None
        schedule = cls.plan(
            problem=problem,
            n=n,
            budget=budget,
            dim=dim,
            method=method,
            clip=1.0 if isinstance(clip, Pilot) else clip,
            reg=reg,
            copies=copies,
            max_steps=max_steps,
            min_phase=min_phase,
            sampling=sampling,
            distance=distance,
            allow_infinite_variance=allow_infinite_variance,
        )
        pilots = None
        if pilot is not None:
            schedule, pilots = pilot.split(schedule, budget, dim, _SAMPLING.get(sampling, Poisson))
        if accountant is not None:
            checks.require_budget(accountant, budget)
        if prox is None and math.isfinite(problem.radius):
            prox = Ball(problem.radius)
        return cls(
            params,
            schedule=schedule,
            n=n,
            sampling="poisson" if sampling == "full" else sampling,
            pilots=pilots,
            prox=prox,
            accountant=Accountant(budget) if accountant is None else accountant,
            generator=generator,
            secure=secure,
        )


def _clipped(phase: LocalizedPhase, pilot: QuantilePilot | None) -> Clipped | PilotClipped:
    if pilot is not None:
        return PilotClipped(pilot, phase.noise_multiplier, phase.batch_size)
    return Clipped(phase.clip, phase.noise_multiplier, phase.batch_size)
