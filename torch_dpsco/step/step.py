"""The private optimizer: sampling x oracle x rule x schedule, under an accountant.

One step, in the order that the guarantee needs:

    1 take the rows from the parameters      4 the oracle releases a noisy mean   <- trust boundary
    2 the oracle clips and adds them         5 p.grad = mean; reg; rule; prox
    3 the accountant charges the event       6 at the end of a phase, restart from its answer; of the plan, install it

Whatever raises in 1-4 discards the logical batch and leaves parameters and ledger at the last authorized state. Between
steps the parameters hold the point where the next gradient is taken (the query), and `released()` shows the private
answer. The last planned step installs it; `finalize()` does so where a run ends earlier.

Steps of a plain optimizer on public data, between private steps.

A private run keeps other points than the parameters: averages, inner and outer iterates, anchors. What a public block
moves the parameters by is added to each of them, so that the run goes on as if it had come to where it was left:

    w_after = Proj(w_before + what the plain steps added up to),    kept <- Proj(kept + w_after - w_before)

Gradients and momenta of private steps stay. That is post-processing: later queries depend on released means and on
public data, which adaptive composition covers. Runs whose noise, tests or phases are made for the run as a whole
refuse.

Source: docs/proofs/accounting.md#composition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torch_dpsco._validate import typed
from torch_dpsco.accounting.designs import Draw
from torch_dpsco.accounting.events import Sequential
from torch_dpsco.accounting.ledger import OVER
from torch_dpsco.errors import SequenceError
from torch_dpsco.problem import Phase
from torch_dpsco.prox import Identity
from torch_dpsco.rows import (
    GradBatch,
    has_rows,
    require_unwrapped,
    retire_forwards,
)
from torch_dpsco.rows.attach import is_attached, paused, together
from torch_dpsco.rows.batch import clear_rows, owners
from torch_dpsco.rules import trained
from torch_dpsco.step import checks
from torch_dpsco.step.batch import GRAD_SCALE, show_zero_gradient, take_scale, tell_of_scale
from torch_dpsco.step.optimizer import RunOptimizer
from torch_dpsco.step.oracle import Release
from torch_dpsco.step.run import in_turn, is_watched, seldom_watched

_IN_PUBLIC = (
    "dp.public is running, where nothing is recorded: make private steps after the block"
)
_IN_BLOCK = "dp.same_records is running: make the step after the block"
_PRIVATE_MEAN = (
    "loss must be a sum where the number of rows is private and batches are not filled up, since a"
    " mean divides all rows by it: take batches from optimizer.loader(dataset,"
    " physical_batch_size=...) itself, which fills them up (Opacus' BatchMemoryManager and other"
    " loaders do not), or dp.attach(model, loss_reduction='sum') and loss(output, target,"
    " reduction='sum')"
)


class PrivateOptimizer(RunOptimizer):
    """Base of all private optimizers; use a subclass, or build your own combination from this one.

    Args:
        params: parameters or groups of them, each group with its own `lr` if wanted.
        lr: step size, >= 0; a step of size 0, as a warm-up begins with, is charged like any other, and moves nothing.
        oracle: how a logical batch becomes a private mean.
        rule: how a private mean moves the iterate.
        design: how batches are drawn; `Undeclared` claims no amplification.
        schedule: phases, with the planned number of steps; a step past it raises.
        prox: constraint or penalty, applied to the joint vector of all parameters after each update.
        reg: lambda >= 0 of a term (lambda/2) |w|^2 added to the mean loss; never put it into the loss itself.
        accountant: ledger (and budget) to charge; default a new one without budget.
        adjacency: neighboring relation of the guarantee; default that of the accountant, or "zero_out" (`Undeclared`:
            "replace_one").
        generator: noise generator of your own; repeatable, so for tests only (warns).
        secure: "exact" for noise in integers on a public grid (docs/proofs/exact_gaussian.md): 0.03 % more of it, in
            up to 9 times its time from 10,000 numbers on; for oracles that are clipped means.

    Raises:
        AdjacencyError: design and adjacency do not go together, or contradict the accountant's.
        InfeasibleError: the budget is too small for a single step; names the smallest epsilon that works.
    """

    # -- stepping -----------------------------------------------------------------------------------------------------

    @seldom_watched
    def step(  # type: ignore[override]  # torch has overloads for the two kinds of closure
        self, closure: Callable[[], float] | None = None, *, users: Tensor | None = None
    ) -> float | None:
        """Makes one private step from the outstanding batch, or adds a physical batch that is not the last of its draw.

        Args:
            closure: clears gradients, computes the loss, calls backward and returns the loss.
            users: for oracles whose unit is a user: the ids that the loader delivered with the batch, which it knows
                itself; others are refused.

        Returns:
            The closure's loss. It is computed from the data and is NOT private.

        Raises:
            SequenceError: rows are missing or doubled, no batch is outstanding, the schedule is over, or finalized.
            BudgetExceeded: the step would pass the budget; parameters and ledger are unchanged.
        """
        if closure is not None or users is not None:
            checks.check_call(closure, users)
        with self.turn:
            scale = take_scale(self) if GRAD_SCALE in self.__dict__ else None
            self._require_open()
            loss: float | None = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            with torch.no_grad():
                self._make(users, scale)
            return loss

    @in_turn
    def step_on(self, rows: GradBatch) -> None:
        """Makes a step like `step()`, from rows that were computed without a backward; `fit` does it, in no_grad mode.

        Args:
            rows: of the outstanding batch, at the query that the parameters hold, in the order of the parameters.
        """
        self._given = rows
        try:
            if is_watched(self):
                self.step()
            else:  # what torch and autograd put around `step` costs a fifth of a small one
                self._require_open()
                self._make(None, None)
        finally:
            self._given = None

    def _make(self, users: Tensor | None, scale: float | None) -> None:
        """Makes the step, or adds a part of a draw."""
        run = self._run
        progress = self._progress
        ranks = self._world
        halted = False
        try:
            params = [p for p in self._params if p.requires_grad]
            draw = self._observe(params, users, scale)
            if draw is None:
                return
            if not ranks.alone or (dist.is_available() and dist.is_initialized()):
                ranks.agree(self, draw)
            # PRIVACY: charged before the noise is drawn (test_skipped_charge_is_caught)
            run.pay(progress, draw)
            release = (
                run.oracle.release(self._noise)
                if ranks.alone
                else ranks.release(run.oracle, self._noise)
            )
            halted = release.halted
            if halted and not progress.halted:
                run.note_halt(progress)
            self._batch.finish(used=True)
            self._apply(params, release)
        except BaseException:
            ranks.failed(self, in_progress=self.outstanding_rows is not None)
            self._give_up(halted=halted)
            raise
        if self._isolation.open:
            self._settle_isolation()
        if progress.steps == run.planned:
            self._end()

    def _count_lost(self, *, halted: bool) -> None:
        """Counts the next step, which was charged, as one whose release is lost."""
        run = self._run
        progress = self._progress
        halted = self.oracle.lose(self.steps, halted=halted)
        run.note_lost(
            progress, self._batch.partition_name, cut=self._batch.partition is not None
        )
        if halted and not self.halted and not self.accountant.marked(progress.halt_mark):
            # PRIVACY: a resumed run must know of a halt that is seen
            # (test_a_halt_of_a_lost_step_is_noted_before_it_is_seen)
            run.note_halt(progress)
        self._apply(self._trained(), Release([], halted=halted, still=True))

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Asked by torch's GradScaler, right before its check for infinities: whether step() unscales by itself."""
        show_zero_gradient(self._trained())
        return True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients and per-sample gradients that no step has taken yet."""
        clear_rows(self._params)
        if not set_to_none:
            super().zero_grad(set_to_none)

    def _require_open(self) -> None:
        require_unwrapped(self._params)
        if self._progress.begun is not None:
            self._give_up()
        if self._barred:
            self._require_private()
        if self._shown:
            raise SequenceError(
                "released() is running: the parameters hold the answer, not the point of the next"
                " step"
            )
        if self._run.planned is not None and self._progress.steps >= self._run.planned:
            self.discard()
            answer = (
                "the answer is installed"
                if self._progress.finalized
                else "call finalize(), which installs the answer"
            )
            raise SequenceError(
                f"all {self._run.planned} planned steps are made: {answer}; make a new optimizer to"
                " continue"
            )
        if self._progress.finalized:
            raise SequenceError(
                "the optimizer is finalized: its answer is released; make a new optimizer to"
                " continue"
            )

    def _observe(
        self,
        params: list[nn.Parameter],
        users: Tensor | None,
        scale: float | None = None,
        *,
        partial: bool = False,
    ) -> Draw | None:
        """Lets the oracle clip and add the rows of the chunk that is due; returns its draw if that is complete."""
        run = self._run
        batch = self._batch
        chunk = batch.current()
        if run.in_order and chunk.draw.index != self._progress.steps:
            raise SequenceError(
                f"step {self._progress.steps} needs batch {self._progress.steps} of the run (got batch"
                f" {chunk.draw.index}): after discard(), or to continue a run, use"
                " optimizer.loader(dataset, resume=True)"
            )
        # none is missing of an empty draw, or after accumulate()
        due = (chunk.rows and not batch.seen) or not batch.declared
        rows = self._taken(params, scale) if due or has_rows(params) else self._given
        retire_forwards(params)
        device = params[0].device
        kept, users = batch.admit(rows, users, partial=partial)
        if rows is not None and kept is not None:
            # PRIVACY: the filling is no record (test_rows_of_the_filling_contribute_exactly_nothing)
            rows = rows.among(
                kept if isinstance(kept, slice) else kept.to(device, non_blocking=True)
            )
        elif (
            rows is not None
            and rows.averaged
            and run.sizes_are_private
            and not (run.takes_means_of_one_output and rows.has_one_output)
        ):
            # PRIVACY: 1/B is rounded, and another B moves ALL rows (test_a_mean_of_a_private_number_is_refused)
            raise SequenceError(_PRIVATE_MEAN)
        if not batch.opened:
            run.oracle.open(self._world.query or params, self._progress.steps)
            batch.opened = True
        if rows is not None and len(rows):
            run.oracle.observe(
                rows, None if users is None else users.to(device, non_blocking=True)
            )
        if scale != self._grad_scale:
            if scale is not None and self._grad_scale is not None:
                tell_of_scale(self, self._grad_scale, scale)
            self._grad_scale = scale
        return batch.close(chunk) if not partial else None

    def _taken(self, params: list[nn.Parameter], scale: float | None) -> GradBatch:
        """Returns the rows that are given, or that a backward has left on the parameters."""
        if self._given is not None:
            if has_rows(params):
                # PRIVACY: rows that a backward has left would wait for a later step, another draw
                # (test_given_rows_are_refused_beside_those_of_a_backward)
                raise SequenceError(
                    "rows of a backward are waiting: make the step of that batch by step() or"
                    " discard()"
                )
            return self._given
        attachment = params[0].__dict__.get("dpsco")
        if attachment is not None and self._checks is not attachment.first.verdicts:
            self._checks = attachment.first.verdicts  # reports quote them after dp.detach too
        rows = GradBatch.consume(params)
        return rows if scale is None else rows.unscaled(scale)

    def _apply(self, params: list[nn.Parameter], release: Release) -> None:
        """Moves by what was released, which is public, and counts the step."""
        run = self._run
        progress = self._progress
        phases = run.schedule.phases
        phase = phases[0]
        k = progress.steps
        if len(phases) > 1:
            index, k = run.schedule.locate(k)
            phase = phases[index]
        stills = (progress.stills if k else 0) + release.still
        if not release.still:
            # rules count the moves of a phase
            self._move(params, release, phase, k - stills)
        if k + 1 == phase.steps and len(phases) > 1:
            self._install_answer()
            run.rule.end_phase(self.param_groups, self.state, phase)
        made = {"stills": stills, "steps": progress.steps + 1, "halted": release.halted}
        vars(progress).update(made, begun=None)  # at once, or an interrupt loses the step

    def _move(self, params: list[nn.Parameter], release: Release, phase: Phase, k: int) -> None:
        run = self._run
        groups = self.param_groups
        for p, mean in zip(params, release.mean, strict=True):
            p.grad = mean if mean.dtype == p.dtype else mean.to(p.dtype)
        for group in groups if run.reg else ():
            reg = -run.reg if group.get("maximize") else run.reg  # uphill, it is subtracted
            for weight in trained(group):
                weight.grad.add_(weight, alpha=reg)  # type: ignore[union-attr]
        if self._lrs is not None and [float(group["lr"]) for group in groups] != self._lrs:
            self._lrs = None
            checks.warn_of_void_theorem("lr is not that of the plan any more", 4)
        run.rule.update(groups, self.state, k, phase)
        if not isinstance(run.prox, Identity):
            steps = [
                run.rule.step_size(float(g["lr"]), k, phase) for g in groups for _ in trained(g)
            ]
            run.rule.constrain(run.prox, params, steps, self.state)
        run.rule.settle(groups, self.state, k)

    @in_turn
    def accumulate(self, *, users: Tensor | None = None) -> None:
        """Adds the rows of a part of the current draw; `step()` then adds the last part and releases.

        Raises:
            SequenceError: no sampling was declared, no draw is outstanding, or no rows are there.
        """
        self._require_open()
        try:
            with torch.no_grad():
                self._observe(self._trained(), users, partial=True)
        except BaseException:
            self._world.failed(self, in_progress=self.outstanding_rows is not None)
            self._give_up()
            raise

    # -- the answer ---------------------------------------------------------------------------------------------------

    def _install_answer(self) -> None:
        for p in self._trained():
            p.copy_(self.rule.answer(p, self.state))

    @contextmanager
    def released(self) -> Iterator[None]:
        """Puts the private answer so far into the parameters while the block runs."""
        self._require_private()
        params = self._trained()
        with self.turn, torch.no_grad():
            queries = [p.detach().clone() for p in params]
            if not self._progress.finalized:
                self._install_answer()
            shown, self._shown = self._shown, True  # it may run inside of another one
        try:
            yield
        finally:
            self._shown = shown
            with torch.no_grad():
                for p, query in zip(params, queries, strict=True):
                    p.copy_(query)

    @in_turn
    def finalize(self) -> None:
        """Installs the private answer where a run ends before its last planned step, which does so by itself.

        Later steps raise. After the last planned step there is nothing left to do.
        """
        self._require_private()
        if self._shown:
            raise SequenceError("finalize() must not be called inside of released()")
        if not self._progress.finalized:
            self.discard()
            self._end()

    def _end(self) -> None:
        """Installs the answer, and closes the run."""
        self._world.end(self)
        with torch.no_grad():
            self._install_answer()
        if self._run.in_passes and self.steps:  # no release of its passes follows
            self.accountant.authorize(Sequential(()), releases={self.run + OVER: 1})
        self._progress.finalized = True
        self.accountant.end(self.run)

    # -- public data --------------------------------------------------------------------------------------------------

    @contextmanager
    def moved_in_public(self) -> Iterator[None]:
        """Adds what plain steps in the block move to all that is kept of the iterates; see `public`."""
        self._require_private()
        self._world.require_whole("dp.public")
        if self._shown or self.in_draw:
            raise SequenceError(
                "dp.public must not begin inside of released(), or between the parts of a private"
                " batch"
            )
        params = self._trained()
        before = [p.detach().clone() for p in params]
        self._barred = _IN_PUBLIC
        try:
            yield
        finally:
            self._barred = ""
            with torch.no_grad():
                self._carry(params, before)
        self._world.end(self)  # the same moves on all ranks

    def _carry(self, params: list[nn.Parameter], before: list[Tensor]) -> None:
        if all(map(torch.equal, params, before)):
            return
        self.prox.apply_(params, [0.0] * len(params))
        for name in self.rule.kept:
            points = []
            for p, old in zip(params, before, strict=True):
                if name in self.state.get(p, {}):
                    points.append(self.state[p][name].add_(p.detach() - old))
            if len(points) == len(params):
                self.prox.apply_(points, [0.0] * len(points))
        self._progress.public += 1
        if self._lrs is not None:
            self._lrs = None
            checks.warn_of_void_theorem("plain steps on public data moved the iterates", 6)


@typed
@contextmanager
def public(model: nn.Module) -> Iterator[None]:
    """Lets plain optimizers step on an attached model, with plain gradients of PUBLIC data, between private steps.

    What they move is kept by the next private steps, see `step.step`, and the private optimizer's report says that
    there were public steps. In the block nothing is recorded and no private step is made.

    Args:
        model: attached.

    Raises:
        SequenceError: the model is not attached, a private batch is in progress, or the run must be undisturbed, as
            that of `HolderOutputSGD`, `BoltOnPSGD`, `LocalizedSGD`, `LocalizedUserSGD` and `UserFilteredSGD`.

    Guarantee:
        None for the data of the block, which are public by your word. That of the private steps is unchanged.

    Example:
        >>> import torch, torch_dpsco as dp
        >>> model = dp.attach(nn.Linear(2, 1))
        >>> plain = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with public(model):
        ...     torch.nn.functional.mse_loss(model(torch.ones(4, 2)), torch.ones(4, 1)).backward()
        ...     plain.step()
    """
    runs = [run for run in owners(model.parameters()) if not run.finalized]
    for run in runs:
        if run.undisturbed:
            raise SequenceError(
                f"{type(run).__name__} takes no public steps between its own: {run.undisturbed}"
            )
    if not is_attached(model):
        raise SequenceError(
            "model must be attached: on any other plain optimizers can step as they are"
        )
    with ExitStack() as stack:
        stack.enter_context(paused(model))
        for run in runs:
            if isinstance(run, PrivateOptimizer):
                stack.enter_context(run.moved_in_public())
        yield


@typed
@contextmanager
def same_records(model: nn.Module) -> Iterator[None]:
    """Lets all forwards in the block be of the same batch: row i of each is record i, whose gradients are added.

    For losses of several calls, D(real) + D(fake), siamese and triplet inputs, views of a record: all that a record
    gives is one row, clipped once. Make what the forwards take in the block, of the batch and of fresh noise, one
    backward or several in it, and the step after it. In the first step the block is repeated on made-up records.

    Args:
        model: attached, of layers that record their own rows.

    Raises:
        SequenceError: in the block a forward has another number of rows, inputs that are neither the loader's nor made
            there, or another batch; or the step is made.
        PrivacyError: in the first step, a record of the batch reaches another row.

    Guarantee:
        That of the optimizer, see docs/proofs/heavy_tailed.md#rows-of-several-forwards. What is enforced, and what is
        declared by the block, is in docs/several_calls.md.

    Example:
        >>> import torch, torch_dpsco as dp
        >>> model = dp.attach(nn.Linear(2, 1), check_first_step=False)
        >>> with same_records(model):
        ...     (model(torch.ones(4, 2)) + model(torch.zeros(4, 2))).mean().backward()
    """
    runs = [run for run in owners(model.parameters()) if isinstance(run, PrivateOptimizer)]
    for run in runs:
        run._require_private()
    with together(model):
        for run in runs:
            run._barred = _IN_BLOCK
        try:
            yield
        finally:
            for run in runs:
                run._barred = ""
