"""What optimizers that release only their answer derive from a problem and a layer, and what their plans share.

Finds edits of a row-free optimizer's gradients, iterates and averages, and gradients beyond their bounds.

Nothing is clipped there, so that the noise covers exactly the planned steps with the gradients of the promised loss. An
edit through `.data` leaves no trace in a tensor's version, so that values are compared with copies (of a linear model
in double precision: small). Not seen, and promised: what the loop computes between the batch and `backward()`.
"""

from __future__ import annotations

import math
import weakref
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim.optimizer import Optimizer

from torch_dpsco import _validate as check
from torch_dpsco import compat
from torch_dpsco.accounting.analysis.rounding import asks_exact
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.events import REPLACE_ONE, ZERO_OUT, Gaussian, SimpleEvent
from torch_dpsco.algorithms.output_sgd_numbers import AnswerTask, LossPromises
from torch_dpsco.errors import MissingConstantError, NotCertifiedError, SequenceError
from torch_dpsco.problem import Problem
from torch_dpsco.prox import Ball, Identity, Prox
from torch_dpsco.step import checks
from torch_dpsco.step.checks import listed
from torch_dpsco.step.plan import ANSWERS, LABELS, BatchPlan, drawing, exact_cost, passes


def loss_promises(
    problem: Problem, *, by: str, gradient_error: float | None = None
) -> LossPromises:
    """Returns the promises of a problem as theory takes them.

    Args:
        problem: needs holder_exponent, holder_constant, and score_offset if its score is a scalar.
        by: name of the optimizer that asks, for messages.
        gradient_error: certified bound on the error of the computed mean gradient, for losses of several scores.

    Raises:
        MissingConstantError: a promise is missing.
    """
    exponent, constant = problem.require("holder_exponent", "holder_constant", by=by)
    if problem.is_glm and problem.score_offset is None:
        raise MissingConstantError(
            f"{by} needs score_offset, the largest number that the loss adds to the score over"
            " bound_x: promise Problem(score_offset=...) (0 if it adds none), or use"
            " losses.<Loss>().problem(bound_x=...)"
        )
    return LossPromises(
        holder_exponent=exponent,
        holder_constant=constant,
        grad_bound=problem.grad_bound,
        loss_at_zero=problem.loss_at_zero,
        radius=problem.radius,
        glm=problem.is_glm,
        score_offset=problem.score_offset or 0.0,
        gradient_error=gradient_error,
    )


def parameters_of(params: Any, lr: float | Sequence[float] | None) -> list[nn.Parameter]:
    """Returns parameters, given as such, as (name, parameter), or as one group without a step size of its own."""
    items = listed(params)
    if items and isinstance(items[0], dict):
        if len(items) > 1:
            raise ValueError(
                f"params must be one group: the plan has one step size (got {len(items)} groups)"
            )
        if items[0].get("lr", lr) != lr:
            raise ValueError(
                "lr must be given to the plan, and be the step size of the plan (got"
                f" {items[0]['lr']})"
            )
        items = list(items[0]["params"])
    return [item[1] if isinstance(item, tuple) else item for item in items]


def reach(promises: LossPromises, lr: float | Sequence[float], steps: int) -> float:
    """Returns how far from their start plain steps can end; inf where gradients have no bound."""
    total = lr * steps if isinstance(lr, float) else math.fsum(lr)
    try:
        return min(promises.radius, total * promises.grad_bound(promises.radius))
    except MissingConstantError:
        return math.inf


def record_bounds(problem: Problem, bias: bool) -> tuple[float | None, float | None]:
    """Returns the bounds that the loader enforces: the ones of a bias take their share of bound_x."""
    if problem.bound_x is None:
        return None, None
    if not bias:
        return problem.bound_x, problem.bound_y
    if problem.bound_x <= 1:
        raise ValueError(
            "bound_x must be > 1 with a bias, whose column of ones has norm 1 by itself (got"
            f" {problem.bound_x:g}): use Linear(bias=False), or bound_x = sqrt(B^2 + 1) for"
            " features of norm B"
        )
    # PRIVACY: rounded down (test_features_and_the_one_of_a_bias_are_within_the_bound)
    return math.sqrt(problem.bound_x**2 - 1) * (1 - 1e-15), problem.bound_y


def require_linear(params: Sequence[nn.Parameter], is_glm: bool, certified: bool) -> bool:
    """Returns whether there is a bias; raises NotCertifiedError for parameters that are not of one Linear layer."""
    shapes = [tuple(p.shape) for p in params]
    linear = (
        1 <= len(shapes) <= 2 and len(shapes[0]) == 2 and shapes[1:] in ([], [(shapes[0][0],)])
    )
    if not linear and certified is not True:
        # PRIVACY: the sensitivity is that of convex losses (test_other_models_need_a_certificate)
        raise NotCertifiedError(
            f"params must be weight and bias of one Linear layer (got shapes {shapes}): output"
            " perturbation needs a loss that is convex in all of them. If it is, with the"
            " constants of the problem, give certify_convex=True"
        )
    if linear and is_glm and shapes[0][0] != 1:
        raise NotCertifiedError(
            "params must be those of a layer with one output, the scalar score of this loss (got"
            f" {shapes[0][0]})"
        )
    return linear and len(shapes) == 2


_HAIR = 1.0 - 1e-9  # of delta: what a statement at exactly the budget's delta needs to be met


@dataclass(frozen=True, kw_only=True)
class RowFreePlan(BatchPlan):
    """Public numbers of a run of secret steps that releases its answer only: w_{T+1}, or an average of w_1..w_T.

    Args:
        problem: what is promised about the loss; the loader enforces its bounds on records.
        dim: number of parameters.
        steps: number of steps T.
        lr: step size, or one per step.
        noise_scale: std of Gaussian noise on each coordinate of the answer, or scale of K-norm noise.
        risk_bound: on the expected excess risk over models within `distance`; None where it is not proved.
        distance: guess of |w*|; None for the radius of the problem.
        gradient_error: certified error of the computed mean gradient, for losses of several scores.
    """

    problem: Problem
    dim: int
    steps: int
    lr: float | tuple[float, ...]
    noise_scale: float
    risk_bound: float | None
    distance: float | None = None
    gradient_error: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check.choice((REPLACE_ONE, ZERO_OUT), adjacency=self.adjacency)
        check.positive_count(dim=self.dim)
        check.positive_count(steps=self.steps)
        check.nonnegative(noise_scale=self.noise_scale)
        if isinstance(self.lr, tuple) and len(self.lr) != self.steps:
            raise ValueError(
                f"lr must be a number or {self.steps} numbers, one per step (got {len(self.lr)})"
            )

    @property
    @abstractmethod
    def sensitivity(self) -> float | None:
        """How far one record moves the answer, rounding included; None where that is random."""

    @property
    def sizes(self) -> NDArray[np.float64]:
        """Step sizes (T,)."""
        return np.array(np.broadcast_to(self.lr, (self.steps,)))

    @property
    def promises(self) -> LossPromises:
        """What the sensitivity rests on."""
        return loss_promises(
            self.problem, by=type(self).__name__, gradient_error=self.gradient_error
        )

    @property
    def reach(self) -> float:
        """Bound on the norm of the answer; inf where there is none."""
        return reach(self.promises, self.lr, self.steps)

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on each coordinate of the answer."""
        return self.noise_scale

    def prox(self) -> Prox:
        """Returns the map after each step, and onto the feasible set."""
        return Ball(self.problem.radius) if math.isfinite(self.problem.radius) else Identity()

    def event(self) -> SimpleEvent:
        """Returns the only release."""
        # PRIVACY: of the noise that is drawn (test_an_edited_plan_is_refused_or_charges_what_it_draws)
        moved = check.nonnegative(sensitivity=self.sensitivity)
        return Gaussian(self.noise_scale, {self.adjacency: moved}, exact=asks_exact(self.secure))

    def noise_shares(self) -> Iterator[tuple[str, float, int | None]]:
        """Yields that of the answer, where its norm is bounded; see `Plan.noise_shares`."""
        if math.isfinite(self.reach):
            yield "the answer", self.noise_std / self.reach, self.dim

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yields what all such plans say; see `Plan.lines`."""
        yield "batches", drawing(self.design, self.unit)
        over = passes(self.steps / -(-self.n // self.batch_size))
        lr = self.lr
        sizes = f" {lr:g}" if isinstance(lr, float) else f"s of {min(lr):g} to {max(lr):g}"
        answer = f"answer: {ANSWERS[self.average]}"
        yield "steps", f"{self.steps} secret steps, {over}, step size{sizes}, {answer}"
        yield LABELS
        yield "noise", self._noise_in_words()
        yield (
            "assumed",
            (
                "the promises of the problem: nothing is clipped, so that with a loss that breaks"
                " them nothing is private; the loss is convex in a linear layer, and nothing is"
                " published before finalize()"
            ),
        )
        if self.risk_bound is not None:
            distance = min(self.distance or math.inf, self.problem.radius)
            yield (
                "expected",
                (
                    f"excess risk of the answer at most {self.risk_bound:.3g} over models of norm"
                    f" up to {distance:.3g}"
                ),
            )
        if isinstance(self.event(), Gaussian) and self.noise_scale > 0:
            yield exact_cost(self.secure)

    def _noise_in_words(self) -> str:
        norm = self.noise_std * math.sqrt(self.dim)
        far = f"at most {self.reach:.3g}" if math.isfinite(self.reach) else "without a bound"
        noise = f"std {self.noise_std:.3g} per parameter, norm {norm:.3g}, on an answer of norm {far}"
        if self.sensitivity is None:
            return noise
        return f"{noise}; one {self.unit} moves it by at most {self.sensitivity:.3g}"


def numbers_of(task: AnswerTask) -> dict[str, Any]:
    """Returns what a plan takes over of what theory chose: all but the sensitivity, which it computes itself."""
    run = task.plan()
    own = {name: value for name, value in vars(run).items() if name != "sensitivity"}
    given = {name: getattr(task, name) for name in ("dim", "adjacency", "distance", "secure")}
    return own | given | {"gradient_error": task.promises.gradient_error}


_Made = TypeVar("_Made", bound=RowFreePlan)


def warned_of_noise(plan: _Made) -> _Made:
    """Returns the plan; warns where the noise of a budget is longer than the answer."""
    if plan.budget is not None:
        epsilon = plan.budget.epsilon
        checks.warn_if_buried(
            plan.noise_std, plan.reach, n=plan.n, dim=plan.dim, epsilon=epsilon, of="the answer"
        )
    return plan


def target_of(budget: Budget | None, noise_multiplier: float | None) -> dict[str, float]:
    """Returns epsilon and delta to calibrate for; none without a budget, which then takes noise of the caller's."""
    if budget is not None:
        return {"epsilon": budget.epsilon, "delta": budget.delta * _HAIR}
    if noise_multiplier is None:
        raise ValueError(
            "budget or noise_multiplier must be given: the target, or noise of your own"
        )
    return {}


_SLACK = (
    1 + 1e-6
)  # of norms and their bound: rounding is below 1e-9 for any batch that fits into memory


class Backwards:
    """Makes sure that a step uses the gradient of one backward, unchanged and without hooks of others.

    Args:
        params: whose gradients are watched until `close`.

    Attributes:
        hooks: how many were ever made when the batch was delivered.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params = params
        self._counts = [0] * len(params)
        self._seen: list[Tensor | None] = [None] * len(params)
        self.begin()
        this = weakref.ref(self)
        self._handles: list[Any] = [
            p.register_post_accumulate_grad_hook(lambda p, k=k: _tell(this, k, p))
            for k, p in enumerate(params)
        ]
        for handle in self._handles:
            weakref.finalize(self, handle.remove)

    def close(self) -> None:
        """Stops watching."""
        for handle in self._handles:
            handle.remove()

    def clear(self) -> None:
        """Forgets gradients and backwards."""
        for p in self._params:
            p.grad = None
        self._counts[:] = [0] * len(self._params)

    def begin(self) -> None:
        """Counts hooks from here on: a batch was delivered."""
        self.hooks = compat.hooks_made()
        self._hooked = False

    def note(self, k: int, gradient: Tensor | None) -> None:
        """Notes what a backward has left on parameter k."""
        self._counts[k] += 1
        self._seen[k] = None if gradient is None else gradient.clone()
        # a call of a module with backward hooks makes one on its output
        self._hooked |= compat.hooks_made() != self.hooks

    def require_one(self) -> None:
        """Raises SequenceError, and clears the gradients, unless they are those of one backward as it left them."""
        params = self._params
        if any(p.grad is None for p in params):
            raise SequenceError(
                "p.grad must hold the gradient of the batch (got None): call backward() first, on a"
                " model that is not attached: this optimizer needs no per-sample gradients"
            )
        if self._counts != [1] * len(params):
            # PRIVACY: a second gradient doubles what a record moves (test_gradients_of_two_passes_are_refused)
            counts = sorted(set(self._counts))
            self._refuse(
                "a step must use the gradient of exactly one backward pass over its batch (got"
                f" {counts})"
            )
        if any(p._backward_hooks or len(_after_accumulation(p)) > 1 for p in params):
            # PRIVACY: 100 times the gradient moves the answer 100 times as far
            # (test_a_hook_that_could_change_gradients_is_refused)
            self._refuse(
                "parameters must have no hooks of others, which could change gradients: remove them"
            )
        if self._hooked:
            self._refuse(
                "a batch and its backward pass must have no backward hooks of modules between them,"
                " nor other new hooks, which could change gradients: remove them; train and compile"
                " other models before or after it"
            )
        if not all(_same(p.grad, seen) for p, seen in zip(params, self._seen, strict=True)):
            # PRIVACY: a clipped mean, or a term on the weights, is not what the sensitivity was computed for
            # (test_a_gradient_changed_after_its_backward_is_refused)
            self._refuse(
                "p.grad must be what backward() left there (got a changed one): do not clip, scale"
                " or decay it"
            )

    def _refuse(self, message: str) -> None:
        self.clear()
        self.begin()
        raise SequenceError(f"{message}; gradients were cleared; compute it again")


def _tell(watch: weakref.ref[Backwards], k: int, p: Tensor) -> None:
    backwards = watch()
    if backwards is not None:
        backwards.note(k, p.grad)


def _after_accumulation(p: nn.Parameter) -> Mapping[int, Any]:
    return getattr(p, "_post_accumulate_grad_hooks", None) or {}


class Kept:
    """Copies of iterates and averages, taken after each step.

    Args:
        params: hold the iterates.
        optimizer: its state holds the averages.
        backwards: of the parameters, which are forgotten if they were of an edited iterate.
    """

    def __init__(
        self, params: Sequence[nn.Parameter], optimizer: Optimizer, backwards: Backwards
    ) -> None:
        self._params = params
        self._optimizer = optimizer
        self._backwards = backwards
        self.note()

    def note(self) -> None:
        """Takes copies of what is there now."""
        averages = [self._average(p) for p in self._params]
        self._copies = [
            (p.detach().clone(), None if average is None else average.clone())
            for p, average in zip(self._params, averages, strict=True)
        ]

    def _average(self, p: Tensor) -> Tensor | None:
        average: Tensor | None = self._optimizer.state.get(p, {}).get("average")
        return average

    @torch.no_grad()
    def require_same(self) -> None:
        """Raises SequenceError if something was edited since `note`, after putting it back."""
        edited = False
        for p, (value, average) in zip(self._params, self._copies, strict=True):
            if not _same(p.detach(), value):
                edited = True
                p.copy_(value)
            if not _same(self._average(p), average):
                edited = True
                self._optimizer.state[p] = (
                    {} if average is None else {"average": average.clone()}
                )
        if edited:
            self._backwards.clear()
            raise SequenceError(
                "parameters and averages must be what the last step left there, and parameters must"
                " be 0, the planned start, before the first one (got edited ones, which were put"
                " back; gradients were cleared): do not initialize or change them"
            )


def keeps_promises(params: Sequence[nn.Parameter], promises: LossPromises, rows: int) -> bool:
    """Returns whether the gradient that the parameters hold is one that the promises allow.

    Args:
        params: the iterate, with the gradient of a batch.
        promises: about the gradient of any record.
        rows: how many such gradients are added up in it, 1 for a mean.
    """
    reach = float(get_total_norm([p.detach() for p in params])) * _SLACK + 1e-9
    promised = promises.grad_bound(reach) + (promises.gradient_error or 0.0)
    found = float(get_total_norm([p.grad for p in params if p.grad is not None])) / max(1, rows)
    return found <= promised * _SLACK  # not for NaN


def _same(now: Tensor | None, then: Tensor | None) -> bool:
    if now is None or then is None:
        return now is then
    if now.dtype != torch.float64 or then.dtype != now.dtype:
        return False
    return torch.equal(
        now.view(torch.int64), then.to(now.device).view(torch.int64)
    )  # to the bit, for NaN too
