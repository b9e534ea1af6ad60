"""ObjectivePerturbation: a secret random term in the objective, one release. See `erm.objective` for what is proved."""

from __future__ import annotations

import math
from typing import Any

from torch_dpsco.accounting.adjacency import Adjacency
from torch_dpsco.accounting.filters import Budget
from torch_dpsco.erm.objective import ObjectivePlan, plan_objective
from torch_dpsco.losses.base import TableLoss
from torch_dpsco.optim.solved import SolvedOptimizer, linear_task, warn_if_noise_buries


class ObjectivePerturbation(SolvedOptimizer):
    """The mechanism of choice for smooth losses of linear scores: logistic, smoothed hinge, Huber, softmax.

    Args:
        params: of one `torch.nn.Linear`, of any dtype; the answer is cast to it.
        plan: from `ObjectivePerturbation.plan`.
        accountant: ledger to charge; default a new one with the plan's budget.
        generator: noise generator of your own (warns).

    Guarantee:
        Adjacency: that of the plan. Unit: one row. Event: the (epsilon, delta), or epsilon, of the budget; or a curve.
        Rows are clipped and unknown labels ignored by the code. Assumes: n under replace_one and zero_out is public;
        n_max records at most, for the rounding of sums.
        Source: docs/proofs/objective.md

    Example:
        >>> import torch, torch_dpsco as dp
        >>> model = torch.nn.Linear(3, 1)
        >>> data = torch.utils.data.TensorDataset(torch.randn(500, 3), torch.sign(torch.randn(500)))
        >>> plan = dp.ObjectivePerturbation.plan(
        ...     model=model, loss=dp.losses.Logistic(), n=500, budget=dp.Budget(1.0, 1e-6), bound_x=2.0,
        ...     residual_clip=0.5)
        >>> optimizer = dp.ObjectivePerturbation(model.parameters(), plan)
        >>> optimizer.solve(data)
        >>> optimizer.finalize()
        >>> round(optimizer.privacy_spent().epsilon, 3)
        1.0
    """

    plans = ObjectivePlan

    @classmethod
    def plan(
        cls,
        *,
        model: Any,
        loss: TableLoss,
        n: int,
        bound_x: float,
        budget: Budget | None = None,
        noise_multiplier: float | None = None,
        adjacency: Adjacency | None = None,
        bound_y: float | None = None,
        reg: float | None = None,
        radius: float = math.inf,
        residual_clip: float | None = None,
        n_max: int | None = None,
        charge: str = "approx",
        secure: str | None = None,
        solver: str = "auto",
    ) -> ObjectivePlan:
        """Returns regularizer, noise and epsilon of a release, before anything is spent.

        Args:
            model: the `torch.nn.Linear`, or its parameters: their shapes are read.
            loss: smooth, of one score, with bounded gradients (or a residual_clip); or the softmax cross-entropy.
            n: public number of records; a reference under add_remove.
            bound_x: B > 0, public: rows are clipped to it (the one of a bias is added).
            budget: target; delta = 0 for a pure epsilon (one score only).
            noise_multiplier: > 0 (a budget then only limits the run): std of the random term over the bound on a
                record's gradient, charged as a curve; needs reg.
            adjacency: default the budget's, or "replace_one".
            bound_y: Y > 0, public, that real targets are clipped to.
            reg: in sum form, > 0; None for the smallest sensible one, at which a quarter of epsilon pays for it.
            radius: of a ball that the answer is projected on.
            residual_clip: kappa in (0, 1]: gradients are clipped at kappa times the bound of rows, which makes them
                those of another convex loss. 0.5 is a good choice for the logistic loss.
            n_max: public cap on the number of records; default 2 n.
            charge: "approx", or "curve" for a ledger that holds much else, see `erm.objective.plan_objective`. A curve
                alone costs more than epsilon, so that such a plan has no budget: give an accountant with room.
            secure: None; "exact" is refused, see docs/proofs/exact_gaussian.md.
            solver: see `solvers.solve`; never trusted.

        Raises:
            ConditionError: the loss is not smooth and Lipschitz, or pure and softmax.
            InfeasibleError: reg is too small for epsilon; the message names the smallest one.
        """
        task = linear_task(
            model,
            loss=loss,
            n=n,
            bound_x=bound_x,
            budget=budget,
            noise_multiplier=noise_multiplier,
            adjacency=adjacency,
            bound_y=bound_y,
            reg=reg,
            radius=radius,
            residual_clip=residual_clip,
            n_max=n_max,
        )
        plan = plan_objective(task, charge, secure, solver)
        warn_if_noise_buries(plan)
        return plan
