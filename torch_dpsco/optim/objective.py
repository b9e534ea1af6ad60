"""ObjectivePerturbation: a secret random term in the objective, one release. See `erm.objective` for what is proved."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.filters import Budget
from torch_dpsco.erm.fit import build_objective, require_exact_form
from torch_dpsco.erm.objective import ObjectivePlan, plan_objective, release_objective
from torch_dpsco.erm.task import LinearTask, Preparation
from torch_dpsco.errors import SequenceError
from torch_dpsco.losses.base import TableLoss
from torch_dpsco.objectives.records import Records
from torch_dpsco.optim.checks import listed, require_budget, warn_if_buried
from torch_dpsco.optim.solved import SolvedOptimizer, linear_shape
from torch_dpsco.solvers import SOLVERS

__all__ = ["ObjectivePerturbation"]


class ObjectivePerturbation(SolvedOptimizer):
    """The mechanism of choice for smooth losses of linear scores: logistic, smoothed hinge, Huber, softmax.

    Args:
        params: of one `torch.nn.Linear`, of any dtype; the answer is cast to it.
        plan: from `erm.objective.plan_objective`: public numbers of loss, rows, regularizer and budget.
        solver: see `solvers.solve`; never trusted.
        accountant: ledger (and budget) to charge; default a new one with the plan's budget.
        generator: noise generator of your own (warns).

    Guarantee:
        Adjacency: that of the plan's budget. Unit: one row. Event: the (epsilon, delta), or epsilon, of the budget.
        Rows are clipped and unknown labels ignored by the code. Assumes: n under replace_one and zero_out is public;
        n_max records at most, for the rounding of sums.
        Source: docs/proofs/objective.md

    Example:
        >>> import torch_dpsco as dp
        >>> model = torch.nn.Linear(3, 1)
        >>> data = torch.utils.data.TensorDataset(torch.randn(500, 3), torch.sign(torch.randn(500)))
        >>> optimizer = dp.ObjectivePerturbation.calibrated(
        ...     model.parameters(), loss=dp.losses.Logistic(), n=500, budget=dp.Budget(1.0, 1e-6), bound_x=2.0,
        ...     residual_clip=0.5)
        >>> optimizer.solve(data)
        >>> optimizer.finalize()
        >>> round(optimizer.privacy_spent().epsilon, 3)
        1.0
    """

    def __init__(
        self,
        params: Any,
        *,
        plan: ObjectivePlan,
        solver: str = "auto",
        accountant: Accountant | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self._plan = plan
        self._solver = check.choice(SOLVERS, solver=solver)
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
        radius: float = math.inf,
        n_max: int | None = None,
        charge: str = "approx",
        secure: str | None = None,
        solver: str = "auto",
        accountant: Accountant | None = None,
        generator: torch.Generator | None = None,
    ) -> ObjectivePerturbation:
        """Returns an optimizer that spends the budget in its one release.

        Args:
            params: of one `torch.nn.Linear`.
            loss: smooth, of one score, with bounded gradients (or a residual_clip); or the softmax cross-entropy.
            n: public number of records; a reference under add_remove.
            budget: delta = 0 for a pure epsilon (one score only).
            bound_x: B > 0, public: rows are clipped to it (the one of a bias is added).
            bound_y: Y > 0, public, that real targets are clipped to.
            reg: in sum form; None for the smallest sensible one, at which a quarter of epsilon pays for it.
            residual_clip: kappa in (0, 1]: gradients are clipped at kappa times the bound of rows, which makes them
                those of another convex loss. 0.5 is a good choice for the logistic loss.
            radius: of a ball that the answer is projected on.
            n_max: public cap on the number of records; default 2 n.
            charge: "approx", or "curve" for a ledger that holds much else, see `erm.objective.plan_objective`. A curve
                alone costs more than epsilon: give an accountant with that much room.
            secure: None; "exact" is refused, see docs/proofs/exact_gaussian.md.
            solver: see the class.
            accountant: see the class.
            generator: see the class.
        """
        require_exact_form("objective", secure)
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
        if accountant is not None and charge == "approx":
            require_budget(accountant, budget)
        plan = plan_objective(task, charge)
        noise = plan.noise_scale * (1.0 if budget.delta else math.sqrt(task.parameters + 1))
        assert task.lipschitz is not None  # of plan_objective
        of = "the sum of all gradients"
        warn_if_buried(noise, n * task.lipschitz, n=n, dim=task.parameters, epsilon=budget.epsilon, of=of)
        return cls(given, plan=plan, solver=solver, accountant=accountant, generator=generator)

    def _keep(self, records: Records, start: Tensor | None) -> None:
        if start is not None:
            raise SequenceError("certify() has no meaning with a random term in the objective: use solve(dataset)")
        self._held = records

    def _answer(self) -> Tensor:
        if self._held is None:
            raise SequenceError("nothing was solved: call solve(dataset)")
        build = partial(build_objective, self.task, self._plan.reg, self._held)
        self._held = None
        return release_objective(
            build, self._plan, self.task.parameters, self.accountant, self._noise, solver=self._solver
        )
