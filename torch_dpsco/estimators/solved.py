"""Optimizers that solve a linear model to a certified accuracy, in secret, and release one answer.

    optimizer = dp.ObjectivePerturbation(model.parameters(), dp.ObjectivePerturbation.plan(model=model, ...))
    optimizer.solve(dataset)     # or a loop of yours over the parameters, and certify(dataset) after it
    optimizer.finalize()         # charges, draws the noise, writes the answer into the parameters

Nothing but the answer may be shown: until `finalize()` what a loop leaves in the parameters, its losses and its state
are secret. The point that was certified is held aside and never enters the parameters, a state or a message.

Linear models as torch optimizers, of one release each; `output`, `objective` and `gradient_descent` say what is proved.

* OutputPerturbation: any solver, a certificate, noise on the answer;
* ObjectivePerturbation: a secret random term in the objective;
* NoisyGD: gradient descent on all records with noise in each step, which releases only its last iterate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from torch_dpsco import _validate as check
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.budgets import Budget, warn_of_delta
from torch_dpsco.accounting.designs import Full
from torch_dpsco.accounting.events import Adjacency
from torch_dpsco.errors import SequenceError
from torch_dpsco.estimators.gradient_descent import NoisyGDPlan, plan_noisy_gd
from torch_dpsco.estimators.objective import ObjectivePlan, plan_objective
from torch_dpsco.estimators.output import OutputPlan, plan_output, with_named_reg
from torch_dpsco.estimators.preparation import Preparation
from torch_dpsco.estimators.records import Records
from torch_dpsco.estimators.task import LinearPlan, LinearTask, make_records
from torch_dpsco.losses.base import TableLoss
from torch_dpsco.sampling.loader import one_by_one
from torch_dpsco.step import checks
from torch_dpsco.step.chooser import agreed
from torch_dpsco.step.run import AnswerOptimizer, in_turn


def linear_shape(params: Any) -> tuple[int, int, bool]:
    """Returns (scores, features, bias) of one `torch.nn.Linear`, or of its parameters.

    Raises:
        ValueError: they are not a weight (K, d), and maybe a bias (K,).
    """
    items = checks.listed(params.parameters() if isinstance(params, nn.Module) else params)
    given = [p[1] if isinstance(p, tuple) else p for p in items]
    shapes = [tuple(p.shape) for p in given if isinstance(p, Tensor)]
    tensors = len(shapes) == len(given) and 1 <= len(shapes) <= 2
    fits = tensors and len(shapes[0]) == 2
    if not fits or shapes[1:] not in ([], [shapes[0][:1]]):
        raise ValueError(
            "params must be those of one torch.nn.Linear: weight (K, d), bias (K,) (got shapes"
            f" {shapes})"
        )
    return shapes[0][0], shapes[0][1], len(shapes) == 2


class SolvedOptimizer(AnswerOptimizer):
    """Base: a linear layer, a plan, one release.

    Args:
        params: of one `torch.nn.Linear`, of any dtype; the answer is cast to it.
        plan: from the class's own `plan`.
        accountant: ledger (and budget) to charge; default a new one with the plan's budget.
        generator: noise generator of your own; repeatable, so for tests only (warns).

    Raises:
        InfeasibleError: the release does not fit the budget.
        ValueError: params are not those of the plan.
    """

    plans: ClassVar[type[LinearPlan]]
    _planner: ClassVar[Callable[..., LinearPlan]]
    _own: ClassVar[str]  # keyword of `plan` for this class alone
    _loops: ClassVar[bool] = False  # whether the point of a loop can be certified

    def __init__(
        self,
        params: Any,
        plan: Any = None,
        *,
        accountant: Accountant | None = None,
        generator: torch.Generator | None = None,
        **moved: Any,
    ) -> None:
        ledger = self._ledger(plan, moved, accountant)
        task: LinearTask = plan.task
        given = checks.listed(params)
        shape = linear_shape(given)
        wanted = (task.num_scores, task.dim, task.preparation.intercept > 0)
        if shape != wanted:
            raise ValueError(
                f"params must have (scores, features, bias) = {wanted} (got {shape})"
            )
        super().__init__(given, {}, plan, Full(task.n), 0, ledger, generator)
        self._solved: Any = None
        self._seen: tuple[Tensor, ...] = ()  # the records that it was solved for
        ledger.declare(self.event, 1)

    @classmethod
    def plan(
        cls,
        *,
        model: Any,
        loss: TableLoss,
        n: int,
        bound_x: float,
        epsilon: float | None = None,
        delta: float | None = None,
        budget: Budget | None = None,
        noise_multiplier: float | None = None,
        adjacency: Adjacency | None = None,
        bound_y: float | None = None,
        reg: float | str | None = None,
        radius: float = math.inf,
        residual_clip: float | None = None,
        tilt: float = 0.0,
        attack_radius: float = 0.0,
        attack_norm: float = 2.0,
        attack_scale: tuple[float, ...] | None = None,
        n_max: int | None = None,
        n_min: int | None = None,
        steps: int | None = None,
        charge: str | None = None,
        secure: str | None = None,
    ) -> Any:
        """Returns regularizer, noise and epsilon of a release, before anything is spent.

        Args:
            model: the `torch.nn.Linear`, or its parameters: their shapes are read.
            loss: of `torch_dpsco.losses`: smooth, with bounded gradients (or a residual_clip), or the softmax
                cross-entropy; of `OutputPerturbation` any of them, hinge and pinball included.
            n: public number of records; a reference under add_remove.
            bound_x: B > 0, public: rows are clipped to it (the one of a bias is added).
            epsilon: of a budget, beside delta, in place of `budget`.
            delta: of a budget, beside epsilon.
            budget: target; delta = 0 for a pure epsilon, not of `NoisyGD`, nor of a softmax by `ObjectivePerturbation`.
            noise_multiplier: > 0 (a budget then only limits the run): std of the noise over the bound on a record's
                gradient, of a step or of the random term, which is charged as a curve; both need reg. Of
                `OutputPerturbation` over how far one record moves the answer.
            adjacency: default the budget's, or "zero_out".
            bound_y: Y > 0, public, that real targets are clipped to.
            reg: in sum form, > 0; None for the smallest sensible one, at which a quarter of epsilon pays for it; of
                `OutputPerturbation` for the least bound on the risk of a model of norm 5/B, or "theory" for that of the
                paper, which needs a radius.
            radius: of a ball that the answer is in; `OutputPerturbation` needs it for the squared loss under
                add_remove, or n_max.
            residual_clip: kappa in (0, 1]: gradients are clipped at kappa times the bound of rows, which makes them
                those of another convex loss. 0.5 is a good choice for the logistic loss.
            tilt: tau of tilted risk, either sign, of `OutputPerturbation`.
            attack_radius: rho of adversarial rows, likewise.
            attack_norm: 2 or inf.
            attack_scale: (d,), >= 0, how far each feature is moved, times attack_radius; None for 1, the bias included.
            n_max: public cap on the number of records; default 2 n.
            n_min: public lower bound on it, for tilts under add_remove.
            steps: of `NoisyGD`; None for those after which it has converged, at most 500.
            charge: of `ObjectivePerturbation`: "approx", or "curve" for a ledger that holds much else, see
                `estimators.objective.plan_objective`. A curve alone costs more than epsilon, so that such a plan has no
                budget: give an accountant with room.
            secure: of `OutputPerturbation`: "exact" for noise drawn in integers on a public grid (delta > 0), 0.03 %
                more of it.

        Raises:
            ConditionError: nothing is proved for these settings.
            InfeasibleError: reg is too small for epsilon; the message names the smallest one.
            MissingConstantError: the loss needs a radius.
        """
        scores, dim, bias = linear_shape(model)
        budget, adjacency = agreed(budget, adjacency, epsilon, delta)
        own = {"steps": steps, "charge": charge, "secure": secure}
        own = {name: value for name, value in own.items() if value is not None}
        for name in own.keys() - {cls._own}:
            raise ValueError(f"{name} must be left out for {cls.__name__} (got {own[name]!r})")
        task = LinearTask(
            loss=loss,
            preparation=Preparation(bound_x, intercept=float(bias)),
            dim=dim,
            n=n,
            budget=budget,
            noise_multiplier=noise_multiplier,
            adjacency=adjacency,
            bound_y=bound_y,
            reg=None if isinstance(reg, str) else reg,
            radius=radius,
            residual_clip=residual_clip,
            tilt=tilt,
            attack_radius=attack_radius,
            attack_norm=attack_norm,
            attack_scale=attack_scale,
            n_max=0 if n_max is None else check.positive_count(n_max=n_max),
            n_min=n_min,
        )
        if isinstance(reg, str):
            task = with_named_reg(task, reg, cls.plans.mechanism)
        if scores != task.num_scores:
            raise ValueError(
                f"params must have {task.num_scores} scores, those of {task.loss} (got {scores})"
            )
        warn_of_delta(budget, n)
        plan = cls._planner(task, **own)
        plan.warn_if_buried()
        return plan

    # -- solving ------------------------------------------------------------------------------------------------------

    def step(self, closure: Any = None) -> NoReturn:
        """Raises SequenceError: there are no private steps."""
        self._require_open()
        raise SequenceError(
            f"{type(self).__name__} makes no steps: call solve(dataset), then finalize()"
        )

    @in_turn
    def solve(self, dataset: Dataset[Any]) -> None:
        """Finds the point to release, from a public start; shows nothing of it.

        Args:
            dataset: (features, target) pairs; what changes in it later changes nothing.

        Raises:
            UnitError: another number of records than n, where that is public.
            SequenceError: the answer is released.
        """
        self._require_open()
        self._solved = self._plan.solve(self._records(dataset))

    @in_turn
    def certify(self, dataset: Dataset[Any]) -> None:
        """Starts from what the loop left in the parameters, and solves on until the certificate holds.

        Raises:
            UnitError: another number of records than n, where that is public.
            SequenceError: the answer is released, or no loop of your own has a part in it.
        """
        self._require_open()
        task = self._plan.task
        if not self._loops:
            raise SequenceError(
                f"certify() has no meaning for {type(self).__name__}: use solve(dataset)"
            )
        columns = [p.detach().double().reshape(task.num_scores, -1) for p in self._params]
        if len(columns) == 2:
            columns[1] = columns[1] / task.preparation.intercept
        self._solved = self._plan.solve(
            self._records(dataset), torch.cat(columns, dim=1).reshape(-1)
        )

    def _records(self, dataset: Dataset[Any]) -> Records:
        features, targets = _columns(dataset, self._plan.task.dim)
        if features.dim() < 2:
            raise ValueError(
                f"features must be of shape (n, {self._plan.task.dim}) (got"
                f" {tuple(features.shape)})"
            )
        device = self._params[0].device
        columns = targets.squeeze(1) if targets.dim() == 2 else targets
        self._seen = features, columns
        return make_records(self._plan.task, features.to(device).flatten(1), columns.to(device))

    def _require_open(self) -> None:
        if self._finalized:
            raise SequenceError(
                "the answer is released: make a new optimizer, with the same accountant"
            )

    # -- the answer ---------------------------------------------------------------------------------------------------

    @in_turn
    @torch.no_grad()
    def finalize(self) -> None:
        """Charges the release, and installs the private answer into the parameters, unless that was done.

        Raises:
            SequenceError: nothing was solved.
            BudgetExceeded: the release does not fit the budget any more; nothing is released.
        """
        if self._finalized:
            # PRIVACY: noise is drawn once (test_a_second_release_is_the_first_one)
            return
        if self._solved is None:
            raise SequenceError(
                "nothing was solved: call solve(dataset), or certify(dataset) after a loop of"
                " your own"
            )
        task = self._plan.task
        answer = self._plan.release(self._solved, self.accountant, self._noise, self._seen)
        answer = answer[: task.parameters]
        answer = answer.reshape(task.num_scores, task.width)
        self._solved, self._seen = None, ()
        self._params[0].copy_(answer[:, : task.dim])
        if len(self._params) == 2:
            self._params[1].copy_(answer[:, -1] * task.preparation.intercept)
        self._finalized = True
        # PRIVACY: a loop has left raw gradients (test_the_gradients_of_a_loop_are_dropped_at_the_release)
        self.zero_grad()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.event}, finalized={self._finalized})"


def _columns(dataset: Dataset[Any], dim: int) -> tuple[Tensor, Tensor]:
    """Returns copies of the features and targets of a data set."""
    if type(dataset) is TensorDataset and len(dataset.tensors) == 2:  # others have a __getitem__
        # PRIVACY: what is read at the release is what was bounded here
        # (test_a_data_set_that_changes_after_solve_changes_nothing)
        features, targets = (column.clone() for column in dataset.tensors)
        return features, targets
    # PRIVACY: the record that is read last would be all of them
    # (test_a_data_set_that_fills_one_tensor_is_solved_record_by_record)
    records = one_by_one(dataset)
    pairs = [records[i] for i in range(checks.number_of_records(dataset))]
    if not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in pairs):
        raise ValueError(
            f"dataset must give (features, target) pairs (got {type(pairs[0]).__name__})"
        )
    if not pairs:
        # PRIVACY: no record is a neighbor of one record (test_an_empty_data_set_is_solved_too)
        return torch.zeros(0, dim), torch.zeros(0, dtype=torch.int64)
    features, targets = (
        torch.stack([*map(torch.as_tensor, column)]) for column in zip(*pairs, strict=True)
    )
    return features, targets


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
    _planner = staticmethod(plan_noisy_gd)
    _own = "steps"


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
    _planner = staticmethod(plan_objective)
    _own = "charge"


class OutputPerturbation(SolvedOptimizer):
    """Solves a strongly convex model to certified accuracy, adds noise once (Lowy and Razaviyayn, Algorithms 1, 5-7).

    Args:
        params: of one `torch.nn.Linear`, of any dtype; the answer is cast to it.
        plan: from `OutputPerturbation.plan`.
        accountant: ledger to charge; default a new one with the plan's budget.
        generator: noise generator of your own (warns).

    Guarantee:
        Adjacency: that of the plan. Unit: one row. Event: one Gaussian, or the K-norm mechanism where delta is
        0, at the sensitivity of the exact minimizer and what the certificate leaves. Rows are clipped and unknown
        labels ignored by the code. Assumes: n under replace_one and zero_out is public.
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
    _planner = staticmethod(plan_output)
    _own = "secure"
    _loops = True
