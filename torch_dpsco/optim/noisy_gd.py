"""NoisyGD: gradient descent on all records with noise in each step, whose last iterate alone is released."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.filters import Budget
from torch_dpsco.erm.fit import build_objective, require_exact_form
from torch_dpsco.erm.noisy_gd import NoisyGDPlan, plan_noisy_gd, release_noisy_gd
from torch_dpsco.erm.task import LinearTask, Preparation
from torch_dpsco.errors import SequenceError
from torch_dpsco.losses.base import TableLoss
from torch_dpsco.objectives.records import Records
from torch_dpsco.optim.checks import listed, require_budget, warn_if_buried
from torch_dpsco.optim.solved import SolvedOptimizer, linear_shape

__all__ = ["NoisyGD"]


class NoisyGD(SolvedOptimizer):
    """Full-batch noisy gradient descent with the accounting that converges: more steps cost less and less.

    Args:
        params: of one `torch.nn.Linear`, of any dtype; the answer is cast to it.
        plan: from `erm.noisy_gd.plan_noisy_gd`: public numbers of loss, rows, regularizer and budget.
        accountant: ledger (and budget) to charge; default a new one with the plan's budget.
        generator: noise generator of your own (warns).

    Guarantee:
        Adjacency: that of the plan's budget. Unit: one row. Event: GDP(mu) of the last iterate; no other one is shown.
        Rows are clipped and unknown labels ignored by the code. Assumes: n under replace_one and zero_out is public;
        under add_remove that there are at most n_max records, on which the contraction of a step rests.
        Source: docs/proofs/output.md#noisy-gradient-descent; Bok, Su and Altschuler 2024.

    Example:
        >>> import torch_dpsco as dp
        >>> model = torch.nn.Linear(3, 1)
        >>> data = torch.utils.data.TensorDataset(torch.randn(500, 3), torch.sign(torch.randn(500)))
        >>> optimizer = dp.NoisyGD.calibrated(
        ...     model.parameters(), loss=dp.losses.Logistic(), n=500, budget=dp.Budget(1.0, 1e-6), bound_x=2.0)
        >>> optimizer.solve(data)
        >>> optimizer.finalize()
        >>> round(optimizer.privacy_spent().epsilon, 3)
        1.0
    """

    def __init__(
        self,
        params: Any,
        *,
        plan: NoisyGDPlan,
        accountant: Accountant | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self._plan = plan
        self._held: Records | None = None
        super().__init__(params, task=plan.task, event=plan.event, accountant=accountant, generator=generator)

    @classmethod
    def calibrated(
        cls,
        params: Any,
        *,
        loss: TableLoss,
        n: int,
        budget: Budget,
        bound_x: float,
        bound_y: float | None = None,
        reg: float | None = None,
        residual_clip: float | None = None,
        steps: int | None = None,
        radius: float = math.inf,
        n_max: int | None = None,
        secure: str | None = None,
        accountant: Accountant | None = None,
        generator: torch.Generator | None = None,
    ) -> NoisyGD:
        """Returns an optimizer that spends the budget in its steps.

        Args:
            params: of one `torch.nn.Linear`.
            loss: smooth, with bounded gradients (or a residual_clip).
            n: public number of records; a reference under add_remove.
            budget: delta > 0.
            bound_x: B > 0, public: rows are clipped to it (the one of a bias is added).
            bound_y: Y > 0, public, that real targets are clipped to.
            reg: in sum form; None for that of objective perturbation.
            residual_clip: see `ObjectivePerturbation`.
            steps: None for those after which it has converged, at most 500.
            radius: of a ball that iterates are projected on.
            n_max: public cap on the number of records; default 2 n.
            secure: None; "exact" is refused, see docs/proofs/exact_gaussian.md.
            accountant: see the class.
            generator: see the class.
        """
        require_exact_form("noisy_gd", secure)
        given = listed(params)
        _, features, bias = linear_shape(given)
        task = LinearTask(
            loss=loss,
            preparation=Preparation(bound_x, intercept=float(bias)),
            dim=features,
            n=n,
            budget=budget,
            bound_y=bound_y,
            reg=reg,
            radius=radius,
            residual_clip=residual_clip,
            n_max=0 if n_max is None else check.positive_count(n_max=n_max),
        )
        if accountant is not None:
            require_budget(accountant, budget)
        plan = plan_noisy_gd(task, steps)
        assert task.lipschitz is not None  # of plan_noisy_gd
        noise, of = plan.noise_std / math.sqrt(plan.steps), "the mean of all steps"
        warn_if_buried(noise, n * task.lipschitz, n=n, dim=task.parameters, epsilon=budget.epsilon, of=of)
        return cls(given, plan=plan, accountant=accountant, generator=generator)

    def _keep(self, records: Records, start: Tensor | None) -> None:
        if start is not None:
            raise SequenceError("certify() has no meaning here: the steps start at 0; use solve(dataset)")
        self._held = records

    def _answer(self) -> Tensor:
        if self._held is None:
            raise SequenceError("no data were given: call solve(dataset)")
        objective = build_objective(self.task, self._plan.reg, self._held)
        self._held = None
        return release_noisy_gd(objective, self._plan, self.accountant, self._noise)
