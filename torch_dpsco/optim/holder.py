"""HolderSGD: Poisson or fixed batches x Hoelder-clipped oracle x SGD with averaging x ball projection.

    w_{t+1} = Proj_W( w_t - eta ( (1/b) sum_{i in B_t} clip(g_i(w_t), C_t) + (z C_t / b) N(0, I) ) )

C_t is the gradient bound that the loss promises (at the public iterate, over W, or the paper's M + L R^alpha), so that
with true constants the clip never acts, and with false ones privacy still holds.

Differs from the paper (Wang, Lei, Ying, Zhang, Algorithm 2) in: 1. batches of any size, Poisson or fixed, not one
record; 2. the noise is calibrated by exact Renyi curves instead of Lemma 3 (mode "tight"; "paper" keeps theirs and
checks its conditions); 3. the bound may follow the iterate, which also settles unbounded domains (their Remark 5);
4. averages weight the iterates before their update, as theirs, but the last iterate may be the answer.
"""

from __future__ import annotations

import math
import warnings
from bisect import bisect_left
from collections.abc import Sequence
from functools import cache
from typing import Any, TypeVar

import torch

from torch_dpsco import _validate as check
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.calibrate import design_epsilon, epoch_steps
from torch_dpsco.accounting.calibrate import noise_multiplier as calibrate_noise
from torch_dpsco.accounting.designs import Design, Fixed, Poisson
from torch_dpsco.accounting.events import REPLACE_ONE, Adjacency
from torch_dpsco.accounting.filters import Budget
from torch_dpsco.errors import AdjacencyError, MissingConstantError, UtilityWarning
from torch_dpsco.optim import checks
from torch_dpsco.optim.base import PrivateOptimizer
from torch_dpsco.optim.heavy_plan import dimension
from torch_dpsco.oracles.absolute import HolderAbsolute
from torch_dpsco.oracles.holder import NOISES, HolderClipped
from torch_dpsco.problem import Problem
from torch_dpsco.prox import Ball, Identity, Prox
from torch_dpsco.rules import SGD, UpdateRule
from torch_dpsco.rules.base import AVERAGES
from torch_dpsco.schedule import Phase, Schedule
from torch_dpsco.theory.holder import HolderPlan, average_risk_bound, balanced_lr
from torch_dpsco.theory.holder_paper import search_split_paper

__all__ = ["HolderSGD"]

_Self = TypeVar("_Self", bound="HolderSGD")
_DESIGNS: dict[str, type[Poisson] | type[Fixed]] = {"poisson": Poisson, "fixed": Fixed}
_DEFAULT_BATCH, _DEFAULT_EPOCHS = 512, 10


class HolderSGD(PrivateOptimizer):
    """Private SGD whose noise is calibrated from the loss, with no clipping threshold to guess.

    Args:
        params: parameters or groups; all of them count as one vector for norms and projection.
        lr: step size, > 0.
        problem: promised constants (`losses.<Loss>().problem(...)`); needs what `Problem.grad_bound` needs.
        noise_multiplier: z >= 0, noise std on the sum of rows over the bound; 0 is not private. Not with "absolute".
        batch_size: expected batch size, the public divisor.
        noise: "adaptive" (bound at the iterate), "constant" (bound over the feasible set), "paper", or "absolute":
            bound at the iterate, noise of the std `noise_std`. A step then costs what the iterate makes it cost: the
            budget must be of an adaptive mode ("rdp", "rdp-mixture"; "gdp" and "zcdp" for full batches), and the run
            stops where a step is refused; without a budget `get_epsilon` is an odometer.
        noise_std: with noise="absolute" only: std of the noise on the mean, or one per step, fixed in advance.
        design: how batches are drawn; get them from `loader(dataset)`.
        n: public number of records (a reference under add_remove): shorthand for design=Poisson(batch_size, n).
            Without design and n no sampling is claimed, under replace_one only.
        steps: planned number of steps; a step past it raises. None for no limit but the budget.
        adjacency: default that of the accountant, or "replace_one".
        average: "last", "uniform" or "weighted"; not with `rule`.
        rule: another update rule, e.g. `TorchRule(torch.optim.Adam(...))`.
        prox: default the projection on the ball of problem.radius, if that is finite.
        reg: lambda of (lambda/2)|w|^2, see `PrivateOptimizer`.
        accountant: ledger and budget.
        generator: noise generator of your own (warns).
        secure: "exact" for noise in integers on a public grid, see docs/performance.md for its cost.

    Guarantee:
        Adjacency: add_remove, zero_out or replace_one under Poisson sampling, the latter two under fixed batches. Unit:
        one row per record. Event of a step: PoissonGaussian(z, b/n) or WORGaussian(z, b, n), the same whatever the
        iterates do, because C_t is fixed by public history. Assumes: batches of the optimizer's own loader, rows that
        do not couple records. The promised constants are NOT assumed: every row is clipped.
        Source: docs/proofs/holder.md#bound-at-the-iterate; Wang, Lei, Ying, Zhang, Theorem 11.

    Example:
        >>> import torch_dpsco as dp
        >>> model = dp.attach(torch.nn.Linear(3, 1))
        >>> data = torch.utils.data.TensorDataset(torch.randn(100, 3), torch.ones(100, 1))
        >>> problem = dp.losses.Logistic().problem(bound_x=2.0)
        >>> optimizer = dp.HolderSGD.calibrated(
        ...     model.parameters(), problem=problem, n=100, budget=dp.Budget(1.0, 1e-3), batch_size=20, epochs=2)
        >>> for x, y in optimizer.loader(data, steps=10):
        ...     optimizer.zero_grad()
        ...     dp.losses.Logistic()(model(x), y).backward()
        ...     optimizer.step()
        >>> optimizer.finalize()
        >>> optimizer.privacy_spent().epsilon <= 1.0
        True
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        *,
        problem: Problem,
        noise_multiplier: float | None = None,
        batch_size: int,
        noise: str = "adaptive",
        noise_std: float | Sequence[float] | None = None,
        design: Design | None = None,
        n: int | None = None,
        steps: int | None = None,
        adjacency: Adjacency | None = None,
        average: str = "last",
        rule: UpdateRule | None = None,
        prox: Prox | None = None,
        reg: float = 0.0,
        accountant: Accountant | None = None,
        generator: torch.Generator | None = None,
        secure: str | None = None,
    ) -> None:
        if prox is None:
            prox = Ball(problem.radius) if math.isfinite(problem.radius) else Identity()
        if not prox.contains_zero:
            raise ValueError(f"prox must have a feasible set that contains 0 (got {prox})")
        if rule is not None and average != "last":
            raise ValueError(f"average must be given to the rule when there is one (got {average!r})")
        if problem.smoothness and check.positive(lr=lr) > 2.0 / problem.smoothness:
            warnings.warn(
                f"lr={lr:g} is above 2/smoothness={2.0 / problem.smoothness:g}: steps may diverge",
                UtilityWarning,
                stacklevel=2,
            )
        super().__init__(
            params,
            lr,
            oracle=_oracle(problem, noise, noise_multiplier, noise_std, batch_size, prox.radius),
            rule=rule or SGD(average),
            design=checks.declared(design, n, batch_size),
            schedule=Schedule((Phase(steps),)),
            prox=prox,
            reg=reg,
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
        dim: int | None = None,
        mode: str = "tight",
        batch_size: int | None = None,
        epochs: float = _DEFAULT_EPOCHS,
        lr: float | None = None,
        sampling: str | None = None,
        noise: str | None = None,
        average: str | None = None,
        distance: float | None = None,
    ) -> HolderPlan:
        """Returns noise, steps, epsilon and risk bound of a run, before anything is spent.

        Args:
            problem: promised constants.
            n: public number of records (a reference under add_remove).
            budget: target.
            dim: number of parameters; needed to choose lr for a loss that is not smooth, and for the risk bound.
            mode: "tight" (exact Renyi curves) or "paper" (Theorem 11: replace_one, fixed batches, bounded domain).
            batch_size: default 512 (at most n) for smooth losses, else a power of 2 that makes the noise per record
                pair, noise_multiplier/2, closest to 2.
            epochs: passes over the data on average.
            lr: default 1/smoothness, or `theory.holder.balanced_lr`.
            sampling: "poisson" (default; "fixed" in mode "paper") or "fixed".
            noise: default "adaptive" ("paper" in mode "paper").
            average: default "last" for smooth losses, else "uniform".
            distance: guess of |w_1 - w*|; default the radius.

        Raises:
            InfeasibleError: the target cannot be reached; names the way out.
            MissingConstantError: lr cannot be chosen without `distance` or `dim`.
            AdjacencyError: sampling, mode and adjacency do not go together.
        """
        check.choice(("tight", "paper"), mode=mode)
        check.choice((*AVERAGES, None), average=average), check.choice((*NOISES, None), noise=noise)
        if dim is not None:
            dim = check.positive_count(dim=dim)
        paper = mode == "paper"
        sampling = check.choice(_DESIGNS, sampling=sampling or ("fixed" if paper else "poisson"))
        noise = noise or ("paper" if paper else "adaptive")
        if paper and (budget.adjacency != REPLACE_ONE or sampling != "fixed" or noise != "paper"):
            raise AdjacencyError(
                "mode='paper' is proved for replace_one, sampling='fixed' and noise='paper' only "
                f"(got {budget.adjacency}, {sampling!r}, {noise!r}); mode='tight' covers the others"
            )
        check.positive_count(n=n)
        if budget.delta >= 1.0 / n:
            warnings.warn(
                f"delta={budget.delta:g} is not below 1/n={1 / n:g}: it allows to publish a record", UtilityWarning, 2
            )
        smooth = problem.smoothness is not None
        if batch_size is None:
            batch_size = min(_DEFAULT_BATCH, n) if smooth or paper else _balanced_batch(n, budget, sampling, epochs)
        design = _DESIGNS[sampling](batch_size, n)
        steps = epoch_steps(design, epochs)
        multiplier, split = _noise(design, steps, budget, paper)
        radius = problem.radius if distance is None else min(problem.radius, check.positive(distance=distance))
        start = noise == "adaptive" and math.isinf(radius)
        bound = problem.paper_grad_bound() if noise == "paper" else problem.grad_bound(0.0 if start else radius)
        noise_std = multiplier * bound / batch_size
        if lr is None:
            lr = (
                1.0 / problem.smoothness if smooth and problem.smoothness else _lr(radius, steps, bound, dim, noise_std)
            )
        average = average or ("last" if smooth and not paper else "uniform")
        if dim is not None and not paper:
            checks.warn_if_buried(multiplier / batch_size / math.sqrt(steps), n=n, dim=dim, epsilon=budget.epsilon)
        bounded = dim is not None and math.isfinite(problem.radius) and average == "uniform"
        return HolderPlan(
            n=n,
            batch_size=batch_size,
            steps=steps,
            lr=check.positive(lr=lr),
            noise_multiplier=multiplier,
            noise=noise,
            average=average,
            sampling=sampling,
            adjacency=budget.adjacency,
            epsilon=design_epsilon(multiplier, budget.delta, design=design, steps=steps, adjacency=budget.adjacency),
            delta=budget.delta,
            mode=mode,
            radius=problem.radius,
            grad_bound=bound,
            noise_std=noise_std,
            risk_bound=_risk(problem, noise, steps, lr, dim, multiplier, batch_size) if bounded and dim else None,
            split=split,
        )

    @classmethod
    def calibrated(
        cls: type[_Self],
        params: Any,
        *,
        problem: Problem,
        n: int,
        budget: Budget,
        mode: str = "tight",
        batch_size: int | None = None,
        epochs: float = _DEFAULT_EPOCHS,
        lr: float | None = None,
        sampling: str | None = None,
        noise: str | None = None,
        average: str | None = None,
        distance: float | None = None,
        rule: UpdateRule | None = None,
        prox: Prox | None = None,
        reg: float = 0.0,
        accountant: Accountant | None = None,
        generator: torch.Generator | None = None,
        secure: str | None = None,
    ) -> _Self:
        """Returns an optimizer that spends the budget in exactly the planned steps; arguments as in `plan`.

        Raises:
            AdjacencyError: the given accountant has another budget, or another adjacency, than `budget`.
            ValueError: both `rule` and `average` are given.
        """
        params, dim = dimension(params)
        plan = cls.plan(
            problem=problem,
            n=n,
            budget=budget,
            dim=dim,
            mode=mode,
            batch_size=batch_size,
            epochs=epochs,
            lr=lr,
            sampling=sampling,
            noise=noise,
            average=average,
            distance=distance,
        )
        if accountant is not None:
            checks.require_budget(accountant, budget)
        return cls(
            params,
            plan.lr,
            problem=problem,
            noise_multiplier=plan.noise_multiplier,
            batch_size=plan.batch_size,
            noise=plan.noise,
            design=_DESIGNS[plan.sampling](plan.batch_size, n),
            steps=plan.steps,
            average=plan.average if rule is None else average or "last",
            rule=rule,
            prox=prox,
            reg=reg,
            accountant=Accountant(budget) if accountant is None else accountant,
            generator=generator,
            secure=secure,
        )


def _oracle(
    problem: Problem,
    noise: str,
    multiplier: float | None,
    noise_std: float | Sequence[float] | None,
    batch_size: int,
    radius: float,
) -> HolderClipped | HolderAbsolute:
    given, other = ("noise_std", "noise_multiplier") if noise == "absolute" else ("noise_multiplier", "noise_std")
    values = {"noise_std": noise_std, "noise_multiplier": multiplier}
    if values[given] is None or values[other] is not None:
        raise ValueError(f"{given} must be given for noise={noise!r}, and {other} must not (got {values})")
    if noise_std is not None:
        return HolderAbsolute(problem, noise_std, batch_size, radius=radius)
    assert multiplier is not None
    return HolderClipped(problem, multiplier, batch_size, noise=noise, radius=radius)


def _noise(design: Poisson | Fixed, steps: int, budget: Budget, paper: bool) -> tuple[float, float | None]:
    epsilon, delta = budget.epsilon, budget.delta
    if not paper:
        return calibrate_noise(epsilon, delta, design=design, steps=steps, adjacency=budget.adjacency), None
    found = search_split_paper(design.n, design.batch_size, steps, epsilon, delta)
    return 2.0 * math.sqrt(found.ratio_squared), found.split  # s is relative to the sensitivity 2 G


def _balanced_batch(n: int, budget: Budget, sampling: str, epochs: float) -> int:
    """Returns the power of two whose noise per pair of records is nearest to 2, in the middle of [1, 3]."""

    @cache
    def log_noise(power: int) -> float:
        design = _DESIGNS[sampling](2**power, n)
        noise = calibrate_noise(
            budget.epsilon, budget.delta, design=design, epochs=epochs, adjacency=budget.adjacency, rtol=1e-3
        )
        return math.log(noise / 4.0)

    powers = range(n.bit_length())
    last = min(bisect_left(powers, 0.0, key=log_noise), powers[-1])  # larger batches need more noise
    best: int = min(range(max(0, last - 1), last + 1), key=lambda power: abs(log_noise(power)))
    return 1 << best


def _lr(distance: float, steps: int, bound: float, dim: int | None, noise_std: float) -> float:
    if math.isinf(distance):
        raise MissingConstantError(
            "lr cannot be chosen for this loss without a scale: give distance= (a guess of |w*|), a problem with a "
            "finite radius, or lr="
        )
    if dim is None:
        raise MissingConstantError("dim (the number of parameters) is needed to choose lr for this loss; or give lr=")
    return balanced_lr(distance, steps, bound, dim, noise_std)


def _risk(problem: Problem, noise: str, steps: int, lr: float, dim: int, multiplier: float, batch_size: int) -> float:
    # |w_1 - w*| <= radius for a start at 0; the noise never exceeds that at the bound over the whole feasible set
    bound = problem.paper_grad_bound() if noise == "paper" else problem.grad_bound()
    return average_risk_bound(problem.radius, steps, lr, bound, dim, multiplier * bound / batch_size, batch_size)
