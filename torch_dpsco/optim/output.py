"""OutputPerturbation: any solver, a certificate, one release. See `erm.output` for what is proved."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.filters import Budget
from torch_dpsco.erm.fit import build_objective
from torch_dpsco.erm.output import OutputPlan, draw_output, markov_plan, plan_output, solve_output
from torch_dpsco.erm.task import LinearTask, Preparation
from torch_dpsco.errors import SequenceError
from torch_dpsco.losses.base import TableLoss
from torch_dpsco.objectives.records import Records
from torch_dpsco.optim.checks import listed, require_budget, warn_if_buried
from torch_dpsco.optim.solved import Inner, SolvedOptimizer, linear_shape
from torch_dpsco.solvers import SOLVERS

__all__ = ["OutputPerturbation"]


class OutputPerturbation(SolvedOptimizer):
    """Solves a strongly convex linear model with certainty, adds noise once (Lowy and Razaviyayn, Algorithms 1, 5-7).

    Args:
        params: of one `torch.nn.Linear`, of any dtype; the answer is cast to it.
        plan: from `erm.output.plan_output`: public numbers of loss, rows, regularizer and budget.
        inner: makes a torch optimizer of the parameters for a loop of your own; None to call `solve` only.
        solver: of `solve` and `certify`, see `solvers.solve`; never trusted.
        accountant: ledger (and budget) to charge; default a new one with the plan's budget.
        generator: noise generator of your own (warns).

    Guarantee:
        Adjacency: that of the plan's budget. Unit: one row. Event: one Gaussian, or the K-norm mechanism where delta is
        0, at the sensitivity of the exact minimizer and what the certificate leaves. Rows are clipped and unknown
        labels ignored by the code. Assumes: n under replace_one and zero_out is public; with guarantee "markov" the
        promised expected accuracy of the loop, on every data set.
        Source: docs/proofs/output.md; Lowy, Razaviyayn 2021, Propositions 2.2, 3.1 and 5.1 in their mended forms.

    Example:
        >>> import torch_dpsco as dp
        >>> model = torch.nn.Linear(3, 1)
        >>> data = torch.utils.data.TensorDataset(torch.randn(500, 3), torch.sign(torch.randn(500)))
        >>> optimizer = dp.OutputPerturbation.calibrated(
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
        plan: OutputPlan,
        inner: Inner | None = None,
        solver: str = "auto",
        accountant: Accountant | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self._plan, self._solver = plan, check.choice(SOLVERS, solver=solver)
        self._point: Tensor | None = None
        super().__init__(
            params, task=plan.task, event=plan.event, inner=inner, accountant=accountant, generator=generator
        )

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
        radius: float = math.inf,
        tilt: float = 0.0,
        attack_radius: float = 0.0,
        attack_norm: float = 2.0,
        n_max: int | None = None,
        n_min: int | None = None,
        mode: str = "tight",
        secure: str | None = None,
        guarantee: str = "certified",
        expected_accuracy: float | None = None,
        failure: float | None = None,
        inner: Inner | None = None,
        solver: str = "auto",
        accountant: Accountant | None = None,
        generator: torch.Generator | None = None,
    ) -> OutputPerturbation:
        """Returns an optimizer that spends the budget in its one release.

        Args:
            params: of one `torch.nn.Linear`.
            loss: of `torch_dpsco.losses`; hinge and pinball included.
            n: public number of records; a reference under add_remove.
            budget: delta = 0 for a pure epsilon.
            bound_x: B > 0, public: rows are clipped to it (the one of a bias is added).
            bound_y: Y > 0, public, that real targets are clipped to.
            reg: in sum form, > 0; None for the least bound on the risk of a model of norm 5/B.
            radius: of a ball that the answer is in; needed for the squared loss under add_remove, or n_max.
            tilt: tau of tilted risk, either sign.
            attack_radius: rho of adversarial rows.
            attack_norm: 2 or inf.
            n_max: public cap on the number of records; default 2 n.
            n_min: public lower bound on it, for tilts under add_remove.
            mode: "tight" or "paper" (closed-form Gaussian noise).
            secure: "exact" for noise drawn in integers on a public grid (delta > 0): 0.03 % more of it.
            guarantee: "certified", or "markov": what the loop left is released as it is, and the noise covers a
                promised accuracy but for a failure, which delta pays for. (By stability: `BoltOnPSGD`.)
            expected_accuracy: of the loop, in expectation, on every data set; in sum form; "markov" only.
            failure: probability in (0, 1) that delta pays for; "markov" only.
            inner: see the class.
            solver: see the class.
            accountant: see the class.
            generator: see the class.
        """
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
            tilt=tilt,
            attack_radius=attack_radius,
            attack_norm=attack_norm,
            n_max=0 if n_max is None else check.positive_count(n_max=n_max),
            n_min=n_min,
        )
        if accountant is not None:
            require_budget(accountant, budget)
        markov = check.choice(("certified", "markov"), guarantee=guarantee) == "markov"
        if markov != (expected_accuracy is not None) or markov != (failure is not None):
            raise ValueError(
                f"expected_accuracy and failure must be given for guarantee='markov', and for it only (got "
                f"{expected_accuracy} and {failure})"
            )
        if expected_accuracy is not None and failure is not None:
            plan = markov_plan(task, expected_accuracy, failure, mode, secure)
        else:
            plan = plan_output(task, mode, secure)
        if mode != "paper":
            noise = plan.noise_scale * (1.0 if budget.delta else math.sqrt(task.parameters + 1))
            far = min(plan.radius, n * plan.sensitivity)  # from 0, the answer without records
            warn_if_buried(noise, far, n=n, dim=task.parameters, epsilon=budget.epsilon, of="the answer")
        return cls(given, plan=plan, inner=inner, solver=solver, accountant=accountant, generator=generator)

    @property
    def noise_scale(self) -> float:
        """Std of the Gaussian noise, or scale of the K-norm's: public."""
        return self._plan.noise_scale

    def _keep(self, records: Records, start: Tensor | None) -> None:
        if self._plan.trusted and start is None:
            raise SequenceError("guarantee='markov' releases what your loop left: call certify(dataset) after it")
        objective = build_objective(self.task, self._plan.reg, records)
        self._point = start if self._plan.trusted else solve_output(objective, self._plan, self._solver, start)

    def _answer(self) -> Tensor:
        if self._point is None:
            raise SequenceError("nothing was solved: call solve(dataset), or certify(dataset) after your loop")
        answer = draw_output(self._point, self._plan, self.accountant, self._noise)
        self._point = None
        return answer
