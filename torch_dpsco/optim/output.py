"""OutputPerturbation: any solver, a certificate, one release. See `erm.output` for what is proved."""

from __future__ import annotations

import math
from typing import Any

from torch_dpsco import _validate as check
from torch_dpsco.accounting.adjacency import Adjacency
from torch_dpsco.accounting.filters import Budget
from torch_dpsco.erm.output import OutputPlan, markov_plan, plan_output
from torch_dpsco.losses.base import TableLoss
from torch_dpsco.optim.solved import SolvedOptimizer, linear_task, warn_if_noise_buries


class OutputPerturbation(SolvedOptimizer):
    """Solves a strongly convex linear model with certainty, adds noise once (Lowy and Razaviyayn, Algorithms 1, 5-7).

    Args:
        params: of one `torch.nn.Linear`, of any dtype; the answer is cast to it.
        plan: from `OutputPerturbation.plan`.
        inner: makes a torch optimizer of the parameters for a loop of your own; None to call `solve` only.
        accountant: ledger to charge; default a new one with the plan's budget.
        generator: noise generator of your own (warns).

    Guarantee:
        Adjacency: that of the plan. Unit: one row. Event: one Gaussian, or the K-norm mechanism where delta is
        0, at the sensitivity of the exact minimizer and what the certificate leaves. Rows are clipped and unknown
        labels ignored by the code. Assumes: n under replace_one and zero_out is public; with guarantee "markov" the
        promised expected accuracy of the loop, on every data set.
        Source: docs/proofs/output.md; Lowy, Razaviyayn 2021, Propositions 2.2, 3.1 and 5.1 in their mended forms.

    Example:
        >>> import torch, torch_dpsco as dp
        >>> model = torch.nn.Linear(3, 1)
        >>> data = torch.utils.data.TensorDataset(torch.randn(500, 3), torch.sign(torch.randn(500)))
        >>> plan = dp.OutputPerturbation.plan(
        ...     model=model, loss=dp.losses.Logistic(), n=500, budget=dp.Budget(1.0, 1e-6), bound_x=2.0)
        >>> optimizer = dp.OutputPerturbation(model.parameters(), plan)
        >>> optimizer.solve(data)
        >>> optimizer.finalize()
        >>> round(optimizer.privacy_spent().epsilon, 3)
        1.0
    """

    plans = OutputPlan
    _loops = True

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
        solver: str = "auto",
    ) -> OutputPlan:
        """Returns regularizer, noise and epsilon of a release, before anything is spent.

        Args:
            model: the `torch.nn.Linear`, or its parameters: their shapes are read.
            loss: of `torch_dpsco.losses`; hinge and pinball included.
            n: public number of records; a reference under add_remove.
            bound_x: B > 0, public: rows are clipped to it (the one of a bias is added).
            budget: target; delta = 0 for a pure epsilon.
            noise_multiplier: > 0 (a budget then only limits the run): std of Gaussian noise over how far one record
                moves the answer.
            adjacency: default the budget's, or "replace_one".
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
            solver: of `solve` and `certify`, see `solvers.solve`; never trusted.

        Raises:
            ConditionError: nothing is proved for these settings.
            MissingConstantError: the loss needs a radius.
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
            tilt=tilt,
            attack_radius=attack_radius,
            attack_norm=attack_norm,
            n_max=n_max,
            n_min=n_min,
        )
        markov = check.choice(("certified", "markov"), guarantee=guarantee) == "markov"
        if markov != (expected_accuracy is not None) or markov != (failure is not None):
            raise ValueError(
                f"expected_accuracy and failure must be given for guarantee='markov', and for it only (got "
                f"{expected_accuracy} and {failure})"
            )
        if expected_accuracy is not None and failure is not None:
            plan = markov_plan(task, expected_accuracy, failure, mode, secure)
        else:
            plan = plan_output(task, mode, secure, solver)
        if mode != "paper":
            warn_if_noise_buries(plan)
        return plan
