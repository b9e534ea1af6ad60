"""Optimizers that solve a linear model to a certified accuracy, in secret, and release one answer.

    optimizer = dp.ObjectivePerturbation(model.parameters(), dp.ObjectivePerturbation.plan(model=model, ...))
    optimizer.solve(dataset)     # or a training loop of your own with step(), and certify(dataset) after it
    optimizer.finalize()         # charges, draws the noise, writes the answer into the parameters

Nothing but the answer may be shown: until `finalize()` what `step` leaves in the parameters, losses and scores are
secret. The point that was certified is held aside and never enters the parameters, a state or a message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from torch_dpsco import _validate as check
from torch_dpsco._validate import shown
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.budgets import Budget, warn_of_delta
from torch_dpsco.accounting.designs import Full
from torch_dpsco.accounting.events import Adjacency
from torch_dpsco.accounting.report.figures import OneRelease
from torch_dpsco.accounting.report.statement import Statement
from torch_dpsco.errors import SequenceError
from torch_dpsco.linear.objectives.base import Records
from torch_dpsco.linear.preparation import Preparation
from torch_dpsco.linear.task import LinearPlan, LinearTask, make_records
from torch_dpsco.losses.base import TableLoss
from torch_dpsco.optim.planned import FromPlan, agreed_adjacency
from torch_dpsco.rng import noise_generator
from torch_dpsco.sampling.one_by_one import one_by_one
from torch_dpsco.step import checks
from torch_dpsco.step.common import (
    CommonOptimizer,
    Uncopied,
    check_call,
    require_one_process,
)
from torch_dpsco.step.turn import in_turn

Inner = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
_Planned = TypeVar("_Planned", bound=LinearPlan)


def linear_shape(params: Any) -> tuple[int, int, bool]:
    """Returns (scores, features, bias) of one `torch.nn.Linear`, or of its parameters.

    Raises:
        ValueError: they are not a weight (K, d), and maybe a bias (K,).
    """
    items = checks.listed(params.parameters() if isinstance(params, nn.Module) else params)
    given = [p[1] if isinstance(p, tuple) else p for p in items]
    shapes = [tuple(p.shape) for p in given if isinstance(p, Tensor)]
    tensors = len(shapes) == len(given) and 1 <= len(shapes) <= 2
    if not tensors or len(shapes[0]) != 2 or shapes[1:] not in ([], [shapes[0][:1]]):
        raise ValueError(
            "params must be those of one torch.nn.Linear: weight (K, d), bias (K,) (got shapes"
            f" {shapes})"
        )
    return shapes[0][0], shapes[0][1], len(shapes) == 2


def linear_task(
    model: Any,
    loss: TableLoss,
    n: int,
    bound_x: float,
    budget: Budget | None,
    noise_multiplier: float | None,
    adjacency: Adjacency | None,
    bound_y: float | None,
    reg: float | None,
    radius: float,
    n_max: int | None,
    residual_clip: float | None = None,
) -> LinearTask:
    """Returns the task of a layer; numbers as in `LinearTask`.

    Args:
        model: the `torch.nn.Linear`, or its parameters.
        loss: of the records.
        n: public number of records.
        bound_x: that rows are clipped to, without the one of a bias.
        budget: target, or None.
        noise_multiplier: in place of a budget's noise.
        adjacency: default the budget's, or "replace_one".
        bound_y: that targets are clipped to.
        reg: in sum form.
        radius: of the ball of answers.
        n_max: default 2 n.
        residual_clip: share of the bound that gradients are clipped at.
    """
    scores, dim, bias = linear_shape(model)
    task = LinearTask(
        loss=loss,
        preparation=Preparation(bound_x, intercept=float(bias)),
        dim=dim,
        n=n,
        budget=budget,
        noise_multiplier=noise_multiplier,
        adjacency=agreed_adjacency(adjacency, budget),
        bound_y=bound_y,
        reg=reg,
        radius=radius,
        residual_clip=residual_clip,
        n_max=0 if n_max is None else check.positive_count(n_max=n_max),
    )
    if scores != task.num_scores:
        raise ValueError(
            f"params must have {task.num_scores} scores, those of {task.loss} (got {scores})"
        )
    warn_of_delta(budget, n, stacklevel=4)
    return task


def warned_of_noise(plan: _Planned) -> _Planned:
    """Returns the plan; warns where the noise of a budget is longer than anything that it is added to."""
    if plan.budget is not None:
        noise, signal, of = plan.noise_and_signal
        size = plan.task.parameters
        epsilon = plan.budget.epsilon
        checks.warn_if_buried(noise, signal, n=plan.task.n, dim=size, epsilon=epsilon, of=of)
    return plan


class SolvedOptimizer(FromPlan, Uncopied, CommonOptimizer):
    """Base: a linear layer, a plan, one release.

    Args:
        params: of one `torch.nn.Linear`, of any dtype; the answer is cast to it.
        plan: from the class's own `plan`.
        inner: makes the torch optimizer that `step` delegates to; None if there is no loop.
        accountant: ledger (and budget) to charge; default a new one with the plan's budget.
        generator: noise generator of your own; repeatable, so for tests only (warns).

    Raises:
        InfeasibleError: the release does not fit the budget.
        ValueError: params are not those of the plan.
    """

    # PRIVACY: the noise is calibrated for these (test_what_the_noise_was_calibrated_for_cannot_be_reassigned)
    _fixed = frozenset({"_plan", "plan", "accountant"})
    plans: ClassVar[type[LinearPlan]]
    _loops: ClassVar[bool] = False  # whether the point of a loop can be certified

    def __init__(
        self,
        params: Any,
        plan: Any = None,
        *,
        inner: Inner | None = None,
        accountant: Accountant | None = None,
        generator: torch.Generator | None = None,
        **moved: Any,
    ) -> None:
        ledger = self._ledger(plan, moved, accountant)
        task: LinearTask = plan.task
        given = checks.listed(params)
        scores, features, bias = linear_shape(given)
        wanted = (task.num_scores, task.dim, task.preparation.intercept > 0)
        if (scores, features, bias) != wanted:
            raise ValueError(
                f"params must have (scores, features, bias) = {wanted} (got"
                f" {(scores, features, bias)})"
            )
        if inner is not None and not self._loops:
            raise ValueError(
                f"inner must not be given: {type(self).__name__} solves by itself (got"
                f" {shown(inner)})"
            )
        super().__init__(given, {})
        require_one_process()
        self._plan: LinearPlan = plan
        self.__dict__["plan"] = plan  # over the class method: optimizer.plan is what it has made
        self._params: tuple[nn.Parameter, ...] = tuple(self.param_groups[0]["params"])
        self._inner = None if inner is None else inner(self._params)
        if not isinstance(self._inner, (torch.optim.Optimizer, type(None))):
            raise ValueError(
                f"inner must return a torch optimizer (got {type(self._inner).__name__})"
            )
        device = checks.one_device(self._params)
        self._noise = noise_generator(device, generator)
        self._seeded = generator is not None
        self._steps = 0
        self._finalized = False
        self._solved: Any = None
        ledger.require_unit("example")
        checks.agreed_adjacency(task.adjacency, ledger)
        checks.require_one_step(ledger, task.adjacency, plan.event())
        ledger.expect(plan.event(), 1)
        self.accountant = ledger

    # -- solving ------------------------------------------------------------------------------------------------------

    @in_turn
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Makes a step of the inner optimizer: not private, and nothing of it may be shown.

        Raises:
            SequenceError: there is no inner optimizer, or the answer is released.
        """
        check_call(closure)
        self._require_open()
        if self._inner is None:
            raise SequenceError(
                "step() needs inner=, which makes the optimizer of a loop; or call solve(dataset)"
            )
        self._steps += 1
        return self._inner.step(closure)

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
        if (
            type(dataset) is TensorDataset and len(dataset.tensors) == 2
        ):  # a subclass may override __getitem__
            # PRIVACY: what is read at the release is what was bounded here
            # (test_a_data_set_that_changes_after_solve_changes_nothing)
            features, targets = (column.clone() for column in dataset.tensors)
        else:
            # PRIVACY: the record that is read last would be all of them
            # (test_a_data_set_that_fills_one_tensor_is_solved_record_by_record)
            records = one_by_one(dataset)
            pairs = [records[i] for i in range(checks.number_of_records(dataset))]
            if not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in pairs):
                raise ValueError(
                    f"dataset must give (features, target) pairs (got {type(pairs[0]).__name__})"
                )
            # PRIVACY: no record is a neighbor of one record (test_an_empty_data_set_is_solved_too)
            features = torch.zeros(0, self._plan.task.dim)
            targets = torch.zeros(0, dtype=torch.int64)
            if pairs:
                features, targets = (
                    torch.stack([*map(torch.as_tensor, column)])
                    for column in zip(*pairs, strict=True)
                )
        if features.dim() < 2:
            raise ValueError(
                f"features must be of shape (n, {self._plan.task.dim}) (got"
                f" {tuple(features.shape)})"
            )
        device = self._params[0].device
        columns = targets.squeeze(1) if targets.dim() == 2 else targets
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
        answer = self._plan.release(self._solved, self.accountant, self._noise)[: task.parameters]
        answer = answer.reshape(task.num_scores, task.width)
        self._solved = None
        self._params[0].copy_(answer[:, : task.dim])
        if len(self._params) == 2:
            self._params[1].copy_(answer[:, -1] * task.preparation.intercept)
        # PRIVACY: its momenta are sums of raw gradients
        # (test_the_state_and_the_gradients_of_a_loop_are_dropped_at_the_release)
        self._inner = None
        self._finalized = True
        self.zero_grad()

    # -- what is public -----------------------------------------------------------------------------------------------

    def report(self, delta: float | None = None) -> Statement:
        """Returns what is guaranteed, in plain words; delta defaults to the budget's."""
        run = OneRelease(
            type(self).__name__, Full(self._plan.task.n), self._plan.event(), 0, 0, self._finalized
        )
        return self._statement(run, delta, run.ahead())

    def state_dict(self) -> dict[str, Any]:
        """Returns torch's state once the answer is released; raises SequenceError before, when it is secret."""
        if not self._finalized:
            # PRIVACY: the state of the inner optimizer tells the noiseless point (test_no_state_before_the_release)
            raise SequenceError("nothing may be saved before finalize(): what was solved is secret")
        return super().state_dict()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._plan.event()}, finalized={self._finalized})"
