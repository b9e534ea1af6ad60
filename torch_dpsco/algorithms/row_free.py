"""Optimizers that need no per-sample gradients, because only their final answer is ever released.

All iterates are secret: what is added to the average at the end is calibrated to how far one record can have moved it.
The bound rests on promises about the loss, on who was in which batch, and on what floating-point arithmetic computes.
What code can check of it is checked here: batches come from the optimizer's own loader, which maps records into their
bounds, in the order that was planned, each used by exactly one backward pass of the whole batch; step sizes and the
number of steps are those of the plan; arithmetic is double precision.

Nothing is saved before the release: an interrupted run starts again, at no cost.

Nothing is clipped, so that the noise covers exactly the planned steps with the gradients of the promised loss. An edit
through `.data` leaves no trace in a tensor's version, so that values are compared with copies (of a linear model in
double precision: small). Not seen, and promised: what the loop computes between the batch and `backward()`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.utils.data import Dataset, TensorDataset

from torch_dpsco import _validate as check
from torch_dpsco import compat
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.designs import Design, Shuffled, is_exact
from torch_dpsco.accounting.events import KNorm
from torch_dpsco.algorithms.output_sgd_numbers import LossPromises
from torch_dpsco.errors import NotCertifiedError, PrivacyError, SequenceError
from torch_dpsco.losses.table import enforce_bounds
from torch_dpsco.noise import gaussian_vector
from torch_dpsco.problem import Problem
from torch_dpsco.rows.batch import note_owner
from torch_dpsco.rules import absorb, averaged
from torch_dpsco.sampling import (
    Chunk,
    DrawLog,
    PrivateLoader,
    fingerprint,
    make_sampler,
)
from torch_dpsco.sampling.loader import source_of
from torch_dpsco.step import checks
from torch_dpsco.step.exact_noise import exact_release, knorm_vector
from torch_dpsco.step.run import AnswerOptimizer, in_turn

_GIVEN_UP = "the run has ended without an answer: its loss broke a promise; make a new optimizer"
_IN_MEMORY = 2**26  # numbers of a data set that is copied in double precision (0.5 GB)


def _require_plain(name: str, moved: Mapping[str, Any]) -> None:
    """Raises ValueError for keywords of other optimizers, which would change what the noise covers."""
    own = [word for word in ("rule", "prox", "reg") if word in moved]
    if own:
        raise ValueError(
            f"{', '.join(own)} must not be given to {name}, whose noise is calibrated for plain SGD"
            " on the ball of problem.radius; a regularizer is reg= of BoltOnPSGD.plan(...)"
        )


class RowFreeOptimizer(AnswerOptimizer):
    """Rests on promises: nothing is clipped. Base of optimizers that release an iterate, or an average, with noise.

    Until the last planned step, which releases the answer, parameters, losses and averages are secret, and so is
    everything computed from them.

    Args:
        params: weight (and bias) of one Linear layer in double precision; others need `certify_convex`. They are set to
            0, the planned start.
        plan: from the class's own `plan`.
        loss_reduction: "mean" or "sum": how the loss adds up its batch.
        certify_convex: the caller's word that the loss is convex in these parameters, with the constants of the problem
            (fixed features before the layer, for instance).
        accountant: ledger to charge; default a new one with the plan's budget.
        generator: noise generator of your own; repeatable, so for tests only (warns).

    Raises:
        NotCertifiedError: the parameters are not those of one Linear layer.
        InfeasibleError: the release does not fit the budget.
        AdjacencyError: the accountant has another budget or adjacency.
        ValueError: parameters that are not in double precision, frozen, or not as many as planned.
    """

    undisturbed = "its noise covers the planned steps and no others"
    # PRIVACY: the noise is calibrated for these (test_what_the_noise_was_calibrated_for_cannot_be_reassigned)
    _fixed = AnswerOptimizer._fixed | {"prox", "noise_std", "lrs", "bounds", "average"}

    def __init__(
        self,
        params: Any,
        plan: Any = None,
        *,
        loss_reduction: str = "mean",
        certify_convex: bool = False,
        accountant: Accountant | None = None,
        generator: torch.Generator | None = None,
        **moved: Any,
    ) -> None:
        _require_plain(type(self).__name__, moved)
        accountant = self._ledger(plan, moved, accountant)
        tensors = parameters_of(params, plan.lr)
        if (dim := sum(p.numel() for p in tensors)) != plan.dim:
            raise ValueError(
                f"dim must be {dim}, the number of parameters, in the plan (got {plan.dim})"
            )
        bias = require_linear(tensors, plan.problem.is_glm, certify_convex)
        self.lrs: tuple[float, ...] = plan.lr if isinstance(plan.lr, tuple) else (plan.lr,)
        self._mean = check.choice(("mean", "sum"), loss_reduction=loss_reduction) == "mean"
        lr = {"lr": self.lrs[0]}
        super().__init__(tensors, lr, plan, plan.design, plan.steps, accountant, generator)
        checks.require_double(self._params)
        self.average = plan.average
        self.noise_std = plan.noise_scale
        self.prox = plan.prox()
        self.bounds = record_bounds(plan.problem, bias)
        self._promises = plan.promises
        self._given_up = False
        self._epoch = ""
        self._log: DrawLog | None = None
        self._seen: list[Tensor] = []  # the records, where all are in memory
        for p in self._params:
            p.detach().zero_()
        self._backwards = Backwards(self._params)
        self._keep()
        self.accountant.declare(self.event, 1)
        note_owner(self._params, self)

    # -- batches ------------------------------------------------------------------------------------------------------

    def loader(
        self,
        dataset: Dataset[Any],
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> BoundedLoader:
        """Returns a loader of the steps that are still planned: records in double precision, mapped into their bounds.

        Args:
            dataset: map-style data set of (features, target) pairs.
            collate_fn: as in DataLoader.
            num_workers: as in DataLoader.
            pin_memory: as in DataLoader.

        Raises:
            UnitError: the data set does not have the planned number of records, which is public.
            SequenceError: nothing is left to do, or a batch is outstanding.
        """
        self._require_open()
        checks.require_universe(self.design, self.adjacency, checks.number_of_records(dataset))
        sampler = make_sampler(
            self.design, size=self.design.n, steps=self.planned_steps - self._steps
        )
        bounds = self.bounds
        sampler.log.dataset = source_of(dataset)
        small = (
            type(dataset) is TensorDataset
            and sum(t.numel() for t in dataset.tensors) <= _IN_MEMORY
        )
        if isinstance(dataset, TensorDataset) and small and collate_fn is None:
            self._seen = bounded(dataset.tensors, *bounds)
            dataset, bounds = TensorDataset(*self._seen), (None, None)  # once for all epochs
        loader = PrivateLoader(
            dataset,
            sampler,
            collate_fn=collate_fn,
            num_workers=num_workers,
            pin_memory=pin_memory,
        )
        if self._log is not None:
            sampler.log.succeed(self._log)
        self._log = sampler.log
        self._log.on_restart = self.zero_grad
        self._log.progress, self._log.planned = self, self.planned_steps
        self._log.on_delivery = lambda chunk: self._backwards.begin()
        return BoundedLoader(loader, *bounds)

    @property
    def outstanding_rows(self) -> int | None:
        """Rows of the batch that the next step must use; None if there is none."""
        return self._log.waiting[0].rows if self._log is not None and self._log.waiting else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients that no step has used yet."""
        self._backwards.clear()

    def overlook(self, hooks: int) -> None:
        """Counts so many hooks since the batch as none of the loop's: the doctor has made and removed them."""
        self._backwards.hooks += hooks

    def discard(self) -> None:
        """Gives the outstanding batch up; the next loop over a loader begins with it again."""
        self.zero_grad()
        if self._log is not None:
            self._log.give_up()

    # -- stepping -----------------------------------------------------------------------------------------------------

    @in_turn
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Makes one secret step from the batch that the loader has delivered.

        Args:
            closure: clears gradients, computes the loss, calls backward and returns the loss.

        Returns:
            The closure's loss. It is computed from the data and is NOT private.

        Raises:
            SequenceError: no batch is outstanding, it was used by no or by several backward passes, a permutation was
                broken off, the step size, parameters or averages were changed, or all planned steps are made.
            PrivacyError: the gradient breaks a promise; the run has ended and is charged.
        """
        checks.check_call(closure)
        self._require_open()
        loss: float | None = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        chunk = self._next_batch()
        self._require_planned_lr()
        # PRIVACY: an edit by the data moves the answer as far as it likes
        # (test_iterates_and_averages_that_were_edited_are_refused)
        self._require_unedited()
        self._backwards.require_one()
        self._require_promised_gradient(chunk.draw.size)
        with torch.no_grad():
            self._update(chunk.draw.size if self._mean else 1)
        assert self._log is not None
        self._log.use_up()
        self._epoch = chunk.draw.partition
        self._steps += 1
        self._keep()
        self.zero_grad()
        if self._steps == self.planned_steps:
            self.finalize()
        elif len(self.lrs) > 1:
            self.param_groups[0]["lr"] = self._lr()
        return loss

    @property
    def _held(self) -> list[Tensor]:
        """Iterates and averages."""
        averages = (self.state.get(p, {}).get("average") for p in self._params)
        iterates = [p.detach() for p in self._params]
        return [*iterates, *(average for average in averages if average is not None)]

    def _keep(self) -> None:
        """Takes copies of what a step has left."""
        self._kept = [tensor.clone() for tensor in self._held]

    def _require_unedited(self) -> None:
        if not _same(self._held, self._kept):
            self.zero_grad()
            raise SequenceError(
                "parameters and averages must be what the last step left there, and parameters must"
                " be 0, the planned start, before the first one (got edited ones): do not initialize"
                " or change them; this run can go on no more, make a new optimizer"
            )

    def _lr(self) -> float:
        return self.lrs[self._steps] if len(self.lrs) > 1 else self.lrs[0]

    def _update(self, rows: int) -> None:
        params = self._params
        lr = self._lr()
        absorb(params, self.state, self._steps, self.average)
        compat.foreach_add_(
            params, [p.grad for p in params], alpha=-lr * rows / self.design.batch_size
        )
        if self._plan.reg:
            for p in params:
                p.div_(1 + lr * self._plan.reg)
        self.prox.apply_(params, [lr] * len(params))

    def _require_open(self) -> None:
        if self._given_up:
            raise SequenceError(_GIVEN_UP)
        if self._finalized:
            raise SequenceError(
                f"all {self.planned_steps} planned steps are made: the answer is released; make a"
                " new optimizer to continue"
            )
        if self._steps == self.planned_steps:
            raise SequenceError(
                f"all {self.planned_steps} planned steps are made: call finalize(), for the answer"
            )

    def _next_batch(self) -> Chunk:
        if self._log is None or not self._log.waiting:
            raise SequenceError(
                "no batch is outstanding: each step needs one batch of this optimizer's own loader,"
                " optimizer.loader(dataset), and can use it once"
            )
        chunk = self._log.waiting[0]
        if isinstance(self.design, Shuffled):
            place = self._steps % self.design.steps_per_epoch
            if chunk.draw.part != str(place) or (place and chunk.draw.partition != self._epoch):
                # PRIVACY: each record is in one batch of each planned epoch (test_a_permutation_is_used_to_its_end)
                raise SequenceError(
                    f"step {self._steps} must use batch {place} of a permutation that is used to"
                    f" its end (got batch {chunk.draw.part}): do not break a loop off within an"
                    " epoch"
                )
        return chunk

    def _require_promised_gradient(self, rows: int) -> None:
        """Ends the run where the gradient of a batch is longer than the promises allow.

        That it ends tells something about the records, and no noise covers that. Where the promises hold it cannot
        happen, for any records; where they do not, nothing is guaranteed, and the release is charged all the same.
        """
        if keeps_promises(self._params, self._promises, 1 if self._mean else rows):
            return
        self.accountant.record(self.event)
        self._given_up = True
        self.state.clear()
        with torch.no_grad():
            for p in self._params:
                p.zero_()
        self.discard()
        # PRIVACY: (test_a_gradient_above_the_promised_bound_ends_the_run_and_charges_it)
        raise PrivacyError(
            "the gradient of a batch is longer than the problem promises for any record. Nothing is"
            " released, and parameters are 0 again; the release is charged all the same, since the"
            " records decided that the run ends here. Correct loss, model, bounds or problem, and"
            " make a new optimizer"
        )

    def _require_planned_lr(self) -> None:
        group = self.param_groups[0]
        if group["lr"] != self._lr() or any(p.dtype != torch.float64 for p in self._params):
            # PRIVACY: the sensitivity grows with the step size (test_another_step_size_is_refused)
            raise SequenceError(
                f"lr must be {self._lr()}, that of the plan, and parameters torch.float64 (got"
                f" {group['lr']}): the noise is calibrated for them; give the plan a schedule fixed"
                " in advance, lr=[...]"
            )

    # -- the answer ---------------------------------------------------------------------------------------------------

    @in_turn
    @torch.no_grad()
    def finalize(self) -> None:
        """Charges the release, and installs the noised answer, unless the last planned step has done so.

        Raises:
            SequenceError: planned steps are missing.
            BudgetExceeded: the release does not fit the budget any more; nothing is released.
        """
        if self._finalized:
            return
        if self._given_up:
            raise SequenceError(_GIVEN_UP)
        if missing := self.planned_steps - self._steps:
            raise SequenceError(
                f"{missing} of {self.planned_steps} planned steps are missing: nothing is"
                " released yet"
            )
        self._require_unedited()
        # PRIVACY: charged before the noise is drawn (test_the_release_is_charged_before_its_noise)
        answer = self.accountant.pay(
            self.event,
            self._plan.to_dict,
            partial(fingerprint, contents=self._seen),
            self._draw,
        )
        flat = self._params[0].new_tensor(answer)
        answers = list(
            map(Tensor.view_as, flat.split([p.numel() for p in self._params]), self._params)
        )
        self.prox.apply_(answers, [0.0] * len(answers))
        for p, answer in zip(self._params, answers, strict=True):
            p.copy_(answer)
        self._finalized = True
        self.state.clear()
        self.zero_grad()
        self._backwards.close()

    def _draw(self) -> list[float]:
        """Draws the noise, which is charged."""
        flat = torch.cat([averaged(p, self.state).flatten() for p in self._params])
        draw = knorm_vector if isinstance(self.event, KNorm) else gaussian_vector
        if is_exact(self.event):
            flat = exact_release(flat, self.event, self._noise)
        else:
            flat.add_(draw(len(flat), 1.0, self._noise), alpha=self.noise_std)
        released: list[float] = flat.tolist()
        return released

    @contextmanager
    def released(self) -> Iterator[None]:
        """Holds the private answer in the parameters; raises SequenceError before `finalize()`."""
        if not self._finalized:
            raise SequenceError("nothing is released before finalize(): all iterates are secret")
        yield

    # -- what is public -----------------------------------------------------------------------------------------------

    @property
    def metrics(self) -> dict[str, float]:
        """Public numbers: steps made, and std of the noise on each coordinate of the answer."""
        return {"step": self._steps, "noise_std": self._plan.noise_std}


class BoundedLoader:
    """Delivers the batches of a loader in double precision, every record mapped into its bounds.

    Args:
        loader: of (features, target) pairs.
        bound_x: largest norm of a record's features; None enforces none.
        bound_y: largest absolute value of a target; None enforces none. Only with bound_x.

    Guarantee: a map of each record by itself, see `losses.enforce_bounds`.
    """

    def __init__(
        self, loader: PrivateLoader, bound_x: float | None, bound_y: float | None
    ) -> None:
        self._loader = loader
        self._bound_x = bound_x
        self._bound_y = bound_y

    @property
    def dataset(self) -> Any:
        """The data set."""
        return self._loader.dataset

    @property
    def design(self) -> Design:
        """How batches are drawn."""
        return self._loader.design

    def __len__(self) -> int:
        """Draws per iteration."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield bounded(batch, self._bound_x, self._bound_y)


def bounded(batch: Any, bound_x: float | None, bound_y: float | None) -> list[Any]:
    """Returns (features, targets) in double precision, every record mapped into its bounds (see `BoundedLoader`)."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ValueError(
            f"dataset must give (features, target) pairs (got {type(batch).__name__})"
        )
    features, targets = batch
    if isinstance(features, Tensor) and features.is_floating_point():
        features = features.double()
    if bound_x is None:
        return [features, targets]
    # PRIVACY: nothing is clipped later (test_records_are_mapped_into_their_bounds)
    if bound_y is None:
        return [enforce_bounds(features, bound_x=bound_x), targets]
    return list(enforce_bounds(features, targets.double(), bound_x=bound_x, bound_y=bound_y))


def parameters_of(params: Any, lr: float | Sequence[float] | None) -> list[nn.Parameter]:
    """Returns parameters, given as such, as (name, parameter), or as one group without a step size of its own."""
    items = checks.listed(params)
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


def record_bounds(problem: Problem, bias: bool) -> tuple[float | None, float | None]:
    """Returns the bounds that the loader enforces: the ones of a bias take their share of bound_x."""
    if problem.bound_x is None:
        return None, None
    if not bias:
        return problem.bound_x, problem.bound_y
    if problem.bound_x <= 1:
        raise ValueError(
            "bound_x must be > 1 with a bias, whose column of ones has norm 1 by itself (got"
            f" {problem.bound_x:g}): use Linear(bias=False), or problem(bound_x=B,"
            " intercept=True) for features of norm B"
        )
    # PRIVACY: rounded down (test_features_and_the_one_of_a_bias_are_within_the_bound)
    return math.sqrt(problem.bound_x**2 - 1) * (1 - 1e-15), problem.bound_y


def require_linear(params: Sequence[nn.Parameter], is_glm: bool, certified: bool) -> bool:
    """Returns whether there is a bias; raises NotCertifiedError for parameters that are not of one Linear layer."""
    shapes = [tuple(p.shape) for p in params]
    weight = shapes[0] if shapes else ()
    linear = len(weight) == 2 and shapes[1:] in ([], [weight[:1]])
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


# norms and their bound: rounding is below 1e-9 for any batch that fits into memory
_SLACK = 1 + 1e-6


class Backwards:
    """Makes sure that a step uses the gradient of one backward, unchanged and without hooks of others.

    Args:
        params: whose gradients are watched until `close`.

    Attributes:
        hooks: how many were ever made when the batch was delivered.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params = params
        self._counts = [0] * len(params)  # of backwards that have reached each of them
        self._left: list[Tensor | None] = [None] * len(
            params
        )  # what the newest one has left there
        self.begin()
        this = weakref.proxy(self)
        handles = [
            p.register_post_accumulate_grad_hook(lambda p, k=k: this.note(k, p.grad))
            for k, p in enumerate(params)
        ]
        self._ends = [weakref.finalize(self, handle.remove) for handle in handles]

    def close(self) -> None:
        """Stops watching."""
        for end in self._ends:
            end()

    def clear(self) -> None:
        """Forgets gradients and backwards."""
        for k, p in enumerate(self._params):
            p.grad = None
            self._left[k] = None
            self._counts[k] = 0

    def begin(self) -> None:
        """Counts hooks from here on: a batch was delivered."""
        self.hooks = compat.hooks_made()
        self._hooked = False

    def note(self, k: int, gradient: Tensor | None) -> None:
        """Notes what a backward has left on parameter k."""
        self._left[k] = None if gradient is None else gradient.clone()
        self._counts[k] += 1
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
        counts = sorted(set(self._counts))
        if counts != [1]:
            # PRIVACY: a second gradient doubles what a record moves (test_gradients_of_two_passes_are_refused)
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
        if not _same([p.grad for p in params], self._left):
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


def _after_accumulation(p: nn.Parameter) -> Mapping[int, Any]:
    return getattr(p, "_post_accumulate_grad_hooks", None) or {}


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


def _same(now: Sequence[Tensor | None], then: Sequence[Tensor | None]) -> bool:
    """Returns whether tensors in double precision have the bits that they had; to the bit, for NaN too."""
    if len(now) != len(then):
        return False
    for one, other in zip(now, then, strict=True):
        if one is None or other is None or one.dtype != torch.float64:
            return False
        bits = one.view(torch.int64)
        if other.dtype != one.dtype or not torch.equal(
            bits, other.to(one.device).view(torch.int64)
        ):
            return False
    return True
