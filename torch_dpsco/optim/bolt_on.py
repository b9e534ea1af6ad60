"""Bolt-on private SGD: permutation SGD on a smooth convex loss, one release (Wu et al. 2017).

    w_1 = 0,   w_{t+1} = Proj( (w_t - (eta_t/b) sum over the batch of g(w_t, z)) / (1 + eta_t gamma) )
    answer = Proj( w_{T+1}, or an average of w_1..w_T, + noise )

The iterates are plain SGD with plain gradients: no per-sample gradients, no clipping, no solver to certify. Gaussian
noise, or at delta = 0 that of the K-norm mechanism, is added once, in proportion to how far one record can have moved
the answer. HolderOutputSGD is its relative for losses that are not smooth, without regularizer and pure budgets.

Differs from the paper in: see `theory.bolt_on`.

Source: docs/proofs/output.md#bolt-on-runs
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.adjacency import REPLACE_ONE, ZERO_OUT, Adjacency
from torch_dpsco.accounting.designs import Shuffled
from torch_dpsco.accounting.events import Gaussian, KNorm
from torch_dpsco.accounting.filters import Budget
from torch_dpsco.errors import NotCertifiedError
from torch_dpsco.optim import checks
from torch_dpsco.optim.linear_layer import loss_promises, parameters_of, reach, record_bounds, require_linear
from torch_dpsco.optim.row_free import RowFreeOptimizer
from torch_dpsco.problem import Problem
from torch_dpsco.prox import Ball, Identity, Prox
from torch_dpsco.theory.bolt_on_plan import BoltOnPlan, plan_bolt_on
from torch_dpsco.theory.exact_noise import asks_exact
from torch_dpsco.theory.holder_rounding import scaled_up

__all__ = ["BoltOnPSGD"]

_SELF = TypeVar("_SELF", bound="BoltOnPSGD")
_HAIR = 1.0 - 1e-9  # of delta: what a statement at exactly the budget's delta needs to be met


class BoltOnPSGD(RowFreeOptimizer):
    """Rests on promises: SGD with plain gradients, whose noised answer is private if the promises about the loss hold.

    Nothing is clipped, so that the loss must be the one of the problem, smooth and convex, on a linear model, computed
    from the delivered batch alone, without terms on the weights (give `reg` to the plan), dropout or batch statistics.
    Records are mapped into the problem's bounds by `loader`. Nothing may be published before `finalize()`: no loss, no
    iterate, no checkpoint; no early stopping, no momentum, no schedule that looks at data. Parameters are set to 0.

    Args:
        params: weight (and bias) of one Linear layer in double precision; others need `certify_convex`.
        plan: what `BoltOnPSGD.plan` returned.
        problem: the promises that the plan was made from.
        loss_reduction: "mean" or "sum": how the loss adds up its batch.
        certify_convex: the caller's word that the loss is convex in these parameters, with the constants of the problem
            (fixed features before the layer, for instance).
        accountant: ledger (and budget) to charge; default a new one.
        generator: noise generator of your own; repeatable, so for tests only (warns).

    Raises:
        NotCertifiedError: the parameters are not those of one Linear layer, or the problem is not the plan's.
        InfeasibleError: the release does not fit the accountant's budget.

    Guarantee:
        (plan.epsilon, plan.delta)-DP of the final parameters under plan.adjacency ("replace_one", or "zero_out"), unit
        example, n public; at delta = 0 pure. Event: one Gaussian, or KNorm(plan.epsilon). Rounding of the run in double
        precision is covered; that of the noise samplers is not. Under zero_out the null record has no gradient (with a
        bias and a residual loss a record of zeros is not that one). Source:
        docs/proofs/output.md#bolt-on-runs

    Example:
        >>> import torch_dpsco as dp
        >>> from torch_dpsco.optim.bolt_on import BoltOnPSGD
        >>> model = torch.nn.Linear(3, 1, bias=False).double()
        >>> data = torch.utils.data.TensorDataset(torch.randn(100, 3), torch.sign(torch.randn(100, 1)))
        >>> loss = dp.losses.Logistic()
        >>> optimizer = BoltOnPSGD.calibrated(
        ...     model.parameters(), problem=loss.problem(bound_x=1.0), n=100, budget=dp.Budget(1.0, 0.0),
        ...     batch_size=10, epochs=2, reg=0.1)
        >>> with optimizer:
        ...     for x, y in optimizer.loader(data):
        ...         loss(model(x), y).backward()
        ...         optimizer.step()
        >>> optimizer.steps, optimizer.finalized, round(optimizer.privacy_spent().epsilon, 9)
        (20, True, 1.0)
    """

    def __init__(
        self,
        params: Any,
        *,
        plan: BoltOnPlan,
        problem: Problem,
        loss_reduction: str = "mean",
        certify_convex: bool = False,
        accountant: Accountant | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        tensors = parameters_of(params, plan.lr)
        if loss_promises(problem, by="BoltOnPSGD", gradient_error=plan.promises.gradient_error) != plan.promises:
            # PRIVACY: records would be mapped into bounds that the noise does not cover
            # (test_a_problem_that_the_plan_was_not_made_from_is_refused)
            raise NotCertifiedError(f"problem must be the plan's: {plan.promises} (got {problem})")
        dim = sum(p.numel() for p in tensors)
        if dim != plan.dim:
            raise ValueError(f"dim must be {dim}, the number of parameters, in the plan (got {plan.dim})")
        bias = require_linear(tensors, problem.is_glm, certify_convex)
        adjacency = REPLACE_ONE if plan.adjacency == REPLACE_ONE else ZERO_OUT
        self._plan = plan
        super().__init__(
            tensors,
            plan.lr,
            design=Shuffled(plan.batch_size, plan.n),
            steps=plan.steps,
            event=_event(plan, adjacency),
            noise_std=plan.noise_scale,
            prox=_prox(plan),
            bounds=record_bounds(problem, bias),
            promises=plan.promises,
            loss_reduction=loss_reduction,
            average=plan.average,
            accountant=accountant,
            adjacency=adjacency,
            generator=generator,
        )

    @classmethod
    def plan(
        cls,
        *,
        problem: Problem,
        n: int,
        budget: Budget,
        dim: int,
        batch_size: int = 1,
        epochs: int = 1,
        lr: float | Sequence[float] | None = None,
        reg: float = 0.0,
        average: str | None = None,
        distance: float | None = None,
        gradient_error: float | None = None,
        secure: str | None = None,
    ) -> BoltOnPlan:
        """Returns the public numbers of a run, before anything is spent.

        Args:
            problem: of a smooth loss (holder_exponent 1), with a gradient bound within its radius.
            n: public number of records.
            budget: target; adjacency "replace_one" or "zero_out"; delta = 0 for a pure one.
            dim: number of parameters.
            batch_size: of all batches but a shorter last one, and divisor.
            epochs: passes over the data; with reg > 0 and the default steps they cost nothing.
            lr: (proximal) step size, at most 2/smoothness, or one per step, fixed in advance; default the schedule
                min(1/smoothness, 1/(reg (t - 1))) if reg > 0, else the constant one of the least risk bound.
            reg: gamma >= 0 of the regularizer (gamma/2)|w|^2, all parameters included.
            average: "last" (default if reg > 0), "uniform" (default else) or "weighted" (by t).
            distance: guess of |w*|, for the default step size at reg = 0; default the radius of the problem.
            gradient_error: for losses that are no function of one scalar score: certified bound on the error of the
                computed mean gradient.
            secure: "exact" for noise drawn in integers on a public grid (delta > 0): 0.03 % more of it.

        Raises:
            AdjacencyError: add_remove: batches of a public n are assumed.
            MissingConstantError: a promise is missing.
            ConditionError: the loss is not smooth, or a step is too large.

        Example:
            >>> import torch_dpsco as dp
            >>> from torch_dpsco.optim.bolt_on import BoltOnPSGD
            >>> problem = dp.losses.Logistic().problem(bound_x=1.0)
            >>> plan = BoltOnPSGD.plan(problem=problem, n=10_000, budget=dp.Budget(1.0, 0.0), dim=20, batch_size=50,
            ...                        epochs=5, reg=0.01)
            >>> round(plan.sensitivity, 6), round(plan.noise_scale, 6)
            (0.02, 0.02)
        """
        plan = plan_bolt_on(
            loss_promises(problem, by="BoltOnPSGD", gradient_error=gradient_error),
            n=n,
            batch_size=batch_size,
            dim=dim,
            epsilon=budget.epsilon,
            delta=budget.delta * _HAIR,
            adjacency=budget.adjacency,
            epochs=epochs,
            lr=lr,
            reg=reg,
            average=average,
            distance=distance,
            secure=secure,
        )
        noise = plan.noise_scale * (1.0 if budget.delta else math.sqrt(dim + 1))  # the K-norm's norm is of Gamma(dim)
        far = reach(plan.promises, plan.lr, plan.steps)
        checks.warn_if_buried(noise, far, n=n, dim=dim, epsilon=budget.epsilon, of="the answer")
        return plan

    @classmethod
    def calibrated(
        cls: type[_SELF],
        params: Any,
        *,
        problem: Problem,
        n: int,
        budget: Budget,
        batch_size: int = 1,
        epochs: int = 1,
        lr: float | Sequence[float] | None = None,
        reg: float = 0.0,
        average: str | None = None,
        distance: float | None = None,
        gradient_error: float | None = None,
        secure: str | None = None,
        loss_reduction: str = "mean",
        certify_convex: bool = False,
        accountant: Accountant | None = None,
        generator: torch.Generator | None = None,
    ) -> _SELF:
        """Returns an optimizer whose answer meets the budget; see `plan` and the class for the arguments."""
        tensors = parameters_of(params, lr)
        plan = cls.plan(
            problem=problem,
            n=n,
            budget=budget,
            dim=max(1, sum(p.numel() for p in tensors)),
            batch_size=batch_size,
            epochs=epochs,
            lr=lr,
            reg=reg,
            average=average,
            distance=distance,
            gradient_error=gradient_error,
            secure=secure,
        )
        if accountant is not None:
            checks.require_budget(accountant, budget)
        return cls(
            tensors,
            plan=plan,
            problem=problem,
            loss_reduction=loss_reduction,
            certify_convex=certify_convex,
            accountant=Accountant(budget) if accountant is None else accountant,
            generator=generator,
        )


def _event(plan: BoltOnPlan, adjacency: Adjacency) -> Gaussian | KNorm:
    if plan.delta > 0:
        return Gaussian(plan.noise_scale, {adjacency: plan.sensitivity}, exact=asks_exact(plan.secure))
    scale = check.positive(noise_scale=plan.noise_scale)
    # PRIVACY: the epsilon of the noise that is drawn (test_a_plan_with_half_the_noise_is_refused)
    return KNorm(scaled_up(plan.sensitivity / scale, 2), plan.dim, adjacencies=(adjacency,))


def _prox(plan: BoltOnPlan) -> Prox:
    ball = Ball(plan.radius) if math.isfinite(plan.radius) else Identity()
    return _Ridge(plan.reg, ball) if plan.reg > 0 else ball


@dataclass(frozen=True)
class _Ridge(Prox):
    """Shrinkage, then projection on a ball: the map of (strength/2) ||u||^2 on that ball.

    Args:
        strength: > 0.
        inner: `Ball`, or `Identity` for none.

    Example:
        >>> w = torch.tensor([3.0, 4.0])
        >>> _Ridge(1.0).apply_([w], [0.25])
        >>> [round(x, 4) for x in w.tolist()]
        [2.4, 3.2]
    """

    strength: float
    inner: Prox = field(default_factory=Identity)
    radius: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "strength", check.positive(strength=self.strength))
        object.__setattr__(self, "radius", self.inner.radius)

    def _apply(self, tensors: Sequence[Tensor], steps: Sequence[float]) -> None:
        for tensor, step in zip(tensors, steps, strict=True):
            tensor.div_(1 + step * self.strength)
        self.inner.apply_(tensors, steps)

    def _penalty(self, tensor: Tensor) -> float:
        return self.strength / 2 * float(tensor.square().sum())
