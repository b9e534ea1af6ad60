"""Output perturbation of SGD for Hoelder-smooth convex losses (Wang, Lei, Ying, Zhang, Algorithm 1).

    w_1 = 0,   w_{t+1} = Proj_W( w_t - (eta/b) sum over the batch of g(w_t, z) )
    answer = Proj_W( mean of w_1..w_T + noise )

The iterates are plain SGD with plain gradients: no per-sample gradients, no clipping. The noise is added once, to the
average, in proportion to how far one record can have moved it.

Differs from the paper in: 1. mode "tight" has no factor e, counts hits exactly and calibrates the exact Gaussian curve
(shuffled batches: a deterministic sensitivity; independent ones: the mixture over hit patterns): 20 to 200 times less
noise; 2. minibatches; 3. the noised answer is projected; 4. the effect of rounding is in the noise (`theory`); 5. mode
"paper" checks the Gaussian lemma exactly and raises where it fails.

Source: docs/proofs/holder.md#distance-of-two-runs, docs/errata.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from torch_dpsco import _validate as check
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.adjacency import REPLACE_ONE, ZERO_OUT, Adjacency
from torch_dpsco.accounting.designs import Design, Fixed, Shuffled
from torch_dpsco.accounting.events import ApproxDP, Gaussian, SimpleEvent
from torch_dpsco.accounting.filters import Budget
from torch_dpsco.errors import NotCertifiedError
from torch_dpsco.optim import checks
from torch_dpsco.optim.linear_layer import loss_promises, parameters_of, reach, record_bounds, require_linear
from torch_dpsco.optim.row_free import RowFreeOptimizer
from torch_dpsco.problem import Problem
from torch_dpsco.prox import Ball, Identity
from torch_dpsco.theory.exact_noise import asks_exact
from torch_dpsco.theory.holder_plan import HolderOutputPlan, plan_output
from torch_dpsco.theory.holder_promises import LossPromises

__all__ = ["HolderOutputSGD"]

_SELF = TypeVar("_SELF", bound="HolderOutputSGD")
_DESIGNS: dict[str, type[Shuffled] | type[Fixed]] = {"shuffle": Shuffled, "uniform": Fixed}
_HAIR = 1.0 - 1e-9  # of delta: what a statement at exactly the budget's delta needs to be met


class HolderOutputSGD(RowFreeOptimizer):
    """Rests on promises: SGD with plain gradients, whose noised average is private if the promises about the loss hold.

    Nothing is clipped, so that the loss must be the one of the problem, convex, on a linear model, computed from the
    delivered batch alone, without terms on the weights, dropout or batch statistics. Records are mapped into the
    problem's bounds by `loader`. Nothing may be published before `finalize()`: no loss, no iterate, no checkpoint; no
    early stopping, no momentum, no schedule that looks at data. Parameters are set to 0, the start of the plan.

    Args:
        params: weight (and bias) of one Linear layer in double precision; others need `certify_convex`.
        plan: what `HolderOutputSGD.plan` returned.
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
        example. Shuffled batches: one Gaussian release, which composes exactly; independent batches: ApproxDP at that
        pair. Source: docs/proofs/holder.md#shuffled-epochs, docs/proofs/holder.md#independent-batches.

    Example:
        >>> import torch_dpsco as dp
        >>> model = torch.nn.Linear(3, 1, bias=False).double()
        >>> data = torch.utils.data.TensorDataset(torch.randn(100, 3), torch.sign(torch.randn(100, 1)))
        >>> loss = dp.losses.Hinge(power=1.5)
        >>> optimizer = HolderOutputSGD.calibrated(
        ...     model.parameters(), problem=loss.problem(bound_x=1.0, radius=1.0), n=100, budget=dp.Budget(1.0, 1e-3),
        ...     batch_size=10)
        >>> with optimizer:
        ...     for x, y in optimizer.loader(data):
        ...         loss(model(x), y).backward()
        ...         optimizer.step()
        >>> optimizer.steps, optimizer.finalized
        (10, True)
    """

    def __init__(
        self,
        params: Any,
        *,
        plan: HolderOutputPlan,
        problem: Problem,
        loss_reduction: str = "mean",
        certify_convex: bool = False,
        accountant: Accountant | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        tensors = parameters_of(params, plan.lr)
        if _promises(problem, plan.mode, plan.promises.gradient_error) != plan.promises:
            # PRIVACY: records would be mapped into bounds that the noise does not cover
            # (test_a_problem_that_the_plan_was_not_made_from_is_refused)
            raise NotCertifiedError(f"problem must be the plan's: {plan.promises} (got {problem})")
        dim = sum(p.numel() for p in tensors)
        if dim != plan.dim:
            raise ValueError(f"dim must be {dim}, the number of parameters, in the plan (got {plan.dim})")
        bias = require_linear(tensors, problem.is_glm, certify_convex)
        self._plan = plan
        super().__init__(
            tensors,
            plan.lr,
            design=_design(plan),
            steps=plan.steps,
            event=_event(plan),
            noise_std=plan.sigma,
            prox=Ball(plan.radius) if math.isfinite(plan.radius) else Identity(),
            bounds=record_bounds(problem, bias),
            promises=plan.promises,
            loss_reduction=loss_reduction,
            accountant=accountant,
            adjacency=_adjacency(plan),
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
        epochs: int | None = None,
        lr: float | Sequence[float] | None = None,
        sampling: str | None = None,
        mode: str = "tight",
        distance: float | None = None,
        gradient_error: float | None = None,
        secure: str | None = None,
    ) -> HolderOutputPlan:
        """Returns the public numbers of a run, before anything is spent.

        Args:
            problem: needs holder_exponent, holder_constant and a gradient bound; loss_at_zero without a radius.
            n: public number of records.
            budget: target; adjacency "replace_one" or "zero_out".
            dim: number of parameters.
            batch_size: nominal batch size, and divisor.
            epochs: passes over the data; default 1 for exponents >= 1/2, else more (see `theory.plan_output`).
            lr: step size, or one per step, fixed in advance; default the balanced one.
            sampling: "shuffle" (default) or "uniform" (that of mode "paper").
            mode: "tight" or "paper".
            distance: guess of |w*|; default the radius of the problem.
            gradient_error: for losses that are no function of one scalar score: certified bound on the error of the
                computed mean gradient.
            secure: "exact" for noise drawn in integers on a public grid (sampling "shuffle"): 0.03 % more of it.

        Raises:
            AdjacencyError: add_remove: batches of a public n are assumed.
            MissingConstantError: a promise is missing.
            ConditionError: a side condition of the theory fails.

        Example:
            >>> import torch_dpsco as dp
            >>> problem = dp.losses.Hinge(power=1.5).problem(bound_x=1.0, radius=1.0)
            >>> round(HolderOutputSGD.plan(problem=problem, n=10_000, budget=dp.Budget(1.0, 1e-6), dim=20,
            ...                            lr=0.005).sigma, 3)
            0.093
        """
        check.choice(("shuffle", "uniform", None), sampling=sampling)
        plan = plan_output(
            _promises(problem, mode, gradient_error),
            n=n,
            batch_size=batch_size,
            dim=dim,
            epsilon=budget.epsilon,
            delta=budget.delta * _HAIR,
            adjacency=budget.adjacency,
            sampler=sampling,
            mode=mode,
            epochs=epochs,
            lr=lr,
            distance=distance,
            secure=secure,
        )
        if mode != "paper":
            far = reach(plan.promises, plan.lr, plan.steps)
            checks.warn_if_buried(plan.sigma, far, n=n, dim=dim, epsilon=budget.epsilon, of="the answer")
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
        epochs: int | None = None,
        lr: float | Sequence[float] | None = None,
        sampling: str | None = None,
        mode: str = "tight",
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
            sampling=sampling,
            mode=mode,
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


def _promises(problem: Problem, mode: str, gradient_error: float | None) -> LossPromises:
    return loss_promises(problem, by="HolderOutputSGD", gradient_error=gradient_error, paper=mode == "paper")


def _adjacency(plan: HolderOutputPlan) -> Adjacency:
    return REPLACE_ONE if plan.adjacency == REPLACE_ONE else ZERO_OUT


def _design(plan: HolderOutputPlan) -> Design:
    return _DESIGNS[plan.sampler](plan.batch_size, plan.n)


def _event(plan: HolderOutputPlan) -> SimpleEvent:
    if plan.sensitivity is None or plan.mode == "paper":
        # the number of hits is random: the calibrated pair is what is proved
        return ApproxDP(plan.epsilon, plan.delta, (_adjacency(plan),))
    return Gaussian(plan.sigma, {_adjacency(plan): plan.sensitivity}, exact=asks_exact(plan.secure))
