"""NoisyGD: gradient descent on all records with noise in each step, whose last iterate alone is released."""

from __future__ import annotations

import math
from typing import Any

from torch_dpsco.accounting.adjacency import Adjacency
from torch_dpsco.accounting.filters import Budget
from torch_dpsco.erm.noisy_gd import NoisyGDPlan, plan_noisy_gd
from torch_dpsco.losses.base import TableLoss
from torch_dpsco.optim.solved import SolvedOptimizer, linear_task, warn_if_noise_buries


class NoisyGD(SolvedOptimizer):
    """Full-batch noisy gradient descent with the accounting that converges: more steps cost less and less.

    Args:
        params: of one `torch.nn.Linear`, of any dtype; the answer is cast to it.
        plan: from `NoisyGD.plan`.
        accountant: ledger to charge; default a new one with the plan's budget.
        generator: noise generator of your own (warns).

    Guarantee:
        Adjacency: that of the plan. Unit: one row. Event: GDP(mu) of the last iterate; no other one is shown.
        Rows are clipped and unknown labels ignored by the code. Assumes: n under replace_one and zero_out is public;
        under add_remove that there are at most n_max records, on which the contraction of a step rests.
        Source: docs/proofs/output.md#noisy-gradient-descent; Bok, Su and Altschuler 2024.

    Example:
        >>> import torch, torch_dpsco as dp
        >>> model = torch.nn.Linear(3, 1)
        >>> data = torch.utils.data.TensorDataset(torch.randn(500, 3), torch.sign(torch.randn(500)))
        >>> plan = dp.NoisyGD.plan(
        ...     model=model, loss=dp.losses.Logistic(), n=500, budget=dp.Budget(1.0, 1e-6), bound_x=2.0)
        >>> optimizer = dp.NoisyGD(model.parameters(), plan)
        >>> optimizer.solve(data)
        >>> optimizer.finalize()
        >>> round(optimizer.privacy_spent().epsilon, 3)
        1.0
    """

    plans = NoisyGDPlan

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
        steps: int | None = None,
        n_max: int | None = None,
        secure: str | None = None,
    ) -> NoisyGDPlan:
        """Returns regularizer, steps, noise and epsilon of a run, before anything is spent.

        Args:
            model: the `torch.nn.Linear`, or its parameters: their shapes are read.
            loss: smooth, with bounded gradients (or a residual_clip).
            n: public number of records; a reference under add_remove.
            bound_x: B > 0, public: rows are clipped to it (the one of a bias is added).
            budget: target; delta > 0.
            noise_multiplier: > 0 (a budget then only limits the run): std of a step's noise over the bound on a
                record's gradient; needs reg.
            adjacency: default the budget's, or "replace_one".
            bound_y: Y > 0, public, that real targets are clipped to.
            reg: in sum form, > 0; None for that of objective perturbation.
            radius: of a ball that iterates are projected on.
            residual_clip: see `ObjectivePerturbation.plan`.
            steps: None for those after which it has converged, at most 500.
            n_max: public cap on the number of records; default 2 n.
            secure: None; "exact" is refused, see docs/proofs/exact_gaussian.md.

        Raises:
            ConditionError: the loss is not smooth and Lipschitz, or delta is 0.
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
        plan = plan_noisy_gd(task, steps, secure)
        warn_if_noise_buries(plan)
        return plan
