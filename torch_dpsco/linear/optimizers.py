"""Linear models as torch optimizers, of one release each; `output`, `objective` and `noisy_gd` say what is proved.

* OutputPerturbation: any solver, a certificate, noise on the answer;
* ObjectivePerturbation: a secret random term in the objective;
* NoisyGD: gradient descent on all records with noise in each step, which releases only its last iterate.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch_dpsco import _validate as check
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.events import Adjacency
from torch_dpsco.linear.noisy_gd import NoisyGDPlan, plan_noisy_gd
from torch_dpsco.linear.objective import ObjectivePlan, plan_objective
from torch_dpsco.linear.output import OutputPlan, markov_plan, plan_output
from torch_dpsco.linear.solved import SolvedOptimizer, linear_task, warned_of_noise
from torch_dpsco.losses.base import TableLoss


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
        >>> round(optimizer.report().epsilon, 3)
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
            loss,
            n,
            bound_x,
            budget,
            noise_multiplier,
            adjacency,
            bound_y,
            reg,
            radius,
            n_max,
            residual_clip,
        )
        return warned_of_noise(plan_noisy_gd(task, steps, secure))


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
        >>> round(optimizer.report().epsilon, 3)
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
            charge: "approx", or "curve" for a ledger that holds much else, see `linear.objective.plan_objective`. A
                curve alone costs more than epsilon, so that such a plan has no budget: give an accountant with room.
            secure: None; "exact" is refused, see docs/proofs/exact_gaussian.md.
            solver: see `linear.solvers.solve`; never trusted.

        Raises:
            ConditionError: the loss is not smooth and Lipschitz, or pure and softmax.
            InfeasibleError: reg is too small for epsilon; the message names the smallest one.
        """
        task = linear_task(
            model,
            loss,
            n,
            bound_x,
            budget,
            noise_multiplier,
            adjacency,
            bound_y,
            reg,
            radius,
            n_max,
            residual_clip,
        )
        return warned_of_noise(plan_objective(task, charge, secure, solver))


class OutputPerturbation(SolvedOptimizer):
    """Solves a strongly convex model to certified accuracy, adds noise once (Lowy and Razaviyayn, Algorithms 1, 5-7).

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
        Source: docs/proofs/output.md; Lowy, Razaviyayn 2021, Propositions 2.2, 3.1 and 5.1 in their corrected forms.

    Example:
        >>> import torch, torch_dpsco as dp
        >>> model = torch.nn.Linear(3, 1)
        >>> data = torch.utils.data.TensorDataset(torch.randn(500, 3), torch.sign(torch.randn(500)))
        >>> plan = dp.OutputPerturbation.plan(
        ...     model=model, loss=dp.losses.Logistic(), n=500, budget=dp.Budget(1.0, 1e-6), bound_x=2.0)
        >>> optimizer = dp.OutputPerturbation(model.parameters(), plan)
        >>> optimizer.solve(data)
        >>> optimizer.finalize()
        >>> round(optimizer.report().epsilon, 3)
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
            solver: of `solve` and `certify`, see `linear.solvers.solve`; never trusted.

        Raises:
            ConditionError: nothing is proved for these settings.
            MissingConstantError: the loss needs a radius.
        """
        task = linear_task(
            model,
            loss,
            n,
            bound_x,
            budget,
            noise_multiplier,
            adjacency,
            bound_y,
            reg,
            radius,
            n_max,
        )
        task = replace(
            task, tilt=tilt, attack_radius=attack_radius, attack_norm=attack_norm, n_min=n_min
        )
        markov = check.choice(("certified", "markov"), guarantee=guarantee) == "markov"
        if markov != (expected_accuracy is not None) or markov != (failure is not None):
            raise ValueError(
                "expected_accuracy and failure must be given for guarantee='markov', and for it"
                f" only (got {expected_accuracy} and {failure})"
            )
        if expected_accuracy is not None and failure is not None:
            plan = markov_plan(task, expected_accuracy, failure, mode, secure)
        else:
            plan = plan_output(task, mode, secure, solver)
        return plan if mode == "paper" else warned_of_noise(plan)
