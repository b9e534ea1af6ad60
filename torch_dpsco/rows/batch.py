"""The batch of per-sample gradients that an optimizer takes from its parameters.

Rows that were computed without a backward (`leave_rows`) wait on the parameters for the next step, as those of Opacus'
hooks do.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from torch_dpsco.errors import SequenceError
from torch_dpsco.native import inexact_mean, slack
from torch_dpsco.rows.blocks import (
    FLOAT64,
    Block,
    DenseBlock,
    FactoredBlock,
    Summation,
    is_queued,
    joined,
    joint_norms,
)
from torch_dpsco.rows.carried import CLOCK

_T = TypeVar("_T")
_LEFT = "dpsco_left"  # marks a parameter whose rows were left, and not divided by a batch size
_LEAST_NORMAL = 2.0**-126  # of float32
_TILE_ELEMENTS = 2**20  # numbers of rows that are added to the sums of users at once


def _tape(p: Tensor) -> Any:
    """Returns the tape of a recorded layer whose parameter this is, None where it holds no rows."""
    tape = p.__dict__.get("grad_factors")
    return tape if tape is not None and tape.uses else None


def has_rows(params: Sequence[nn.Parameter]) -> bool:
    """Returns whether any parameter holds per-sample gradients."""
    return any(p.__dict__.get("grad_sample") is not None or _tape(p) for p in params)


def clear_rows(params: Sequence[nn.Parameter]) -> None:
    """Forgets all per-sample gradients of the parameters, and their non-private `grad`."""
    for p in params:
        held = p.__dict__
        tape = held.get("grad_factors")
        if tape is not None:
            tape.uses = []
        if "grad_sample" in held:
            held["grad_sample"] = None
            held.pop(_LEFT, None)
        if "dpsco_passes" in held:
            held["dpsco_passes"] = []
            held.pop("dpsco_first_backward", None)
        p.grad = None


def attachments(params: Iterable[nn.Parameter]) -> list[Any]:
    """Returns the attachments of the models of some parameters."""
    return list(dict.fromkeys(p.__dict__["dpsco"] for p in params if "dpsco" in p.__dict__))


def retire_forwards(params: Sequence[nn.Parameter], filled: int | None = None) -> None:
    """Makes the attached models of the parameters refuse backwards of all their forwards so far, and their outputs.

    The batch of these forwards was used, or given up: their outputs must not be inputs any more.

    Args:
        params: of the optimizer.
        filled: rows of the batch that comes next, if some of them may be filling.
    """
    done = None
    for p in params:
        attachment = p.__dict__.get("dpsco")
        if attachment is not None and attachment is not done:
            attachment.filled = filled
            attachment.passes.used = attachment.passes.number
            if attachment.passes.shared is not None:
                attachment.passes.shared = -1
            attachment.carried.ended = next(CLOCK)
            done = attachment


def _check_backwards(params: Sequence[nn.Parameter]) -> None:
    # PRIVACY: a loss term on the weights is in p.grad but in no row; it would be dropped, or worse, applied without
    # noise (test_regularizer_in_the_loss_is_refused). `attach` keeps the first backward's p.grad for this comparison.
    # by place: error, size of the rows, and the share of it that rounding takes
    gaps: dict[int, tuple[float, float, float]] = {}
    for place, p in enumerate(params):
        grad, mean = p.__dict__.pop("dpsco_first_backward", (None, True))
        rows = getattr(p, "grad_sample", None)
        if grad is None or not isinstance(rows, Tensor) or len(rows) == 0:
            continue  # means over chunks of different sizes do not compare
        p.dpsco_compared = True  # type: ignore[attr-defined]
        scale = len(rows) if mean else 1
        error = float(torch.linalg.vector_norm(grad.double() - rows.double().sum(0) / scale))
        lengths = torch.linalg.vector_norm(rows.double().reshape(len(rows), -1), dim=1)
        gaps[place] = error, float(lengths.sum()) / scale, slack(rows.dtype)
    # rows that cancel to zero up to rounding (the keys' bias of attention) are no scale for their own error
    joint = math.hypot(*(size for _, size, _ in gaps.values()))
    for place, (error, size, share) in gaps.items():
        if math.isfinite(error) and error > share * (size + 1e-3 * joint) + 1e-12:
            raise SequenceError(
                f"the gradient of parameter {place} is not the sum of its per-sample gradients: the"
                " loss has a term on the weights (give reg= or prox= to the optimizer instead), or"
                " uses a weight outside of its layer"
            )


def _dense_rows(p: nn.Parameter, place: int) -> Tensor:
    rows = getattr(p, "grad_sample", None)
    if rows is None:
        raise SequenceError(
            f"per-sample gradients are missing for parameter {place} of shape {tuple(p.shape)}:"
            " call dp.attach(model) before the forward, run forward and backward in training mode"
            " before each step, with no zero_grad() in between, freeze parameters that the loss does not use with"
            " requires_grad_(False), and use parameters only in the forward of their own module"
        )
    chunks: list[Tensor] = rows if isinstance(rows, list) else [rows]
    if any(
        hasattr(chunk, "_processed") for chunk in chunks
    ):  # an Opacus optimizer has clipped and noised them
        raise SequenceError(_WRAPPED)
    if len(chunks) != len(getattr(p, "dpsco_passes", chunks)):
        # PRIVACY: else a record could be in two rows (test_rows_left_by_autograd_grad_are_refused)
        raise SequenceError(
            "torch.autograd.grad in training mode has left rows: call optimizer.zero_grad()"
            " after it"
        )
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks)


def _passes(tapes: Sequence[Any], loose: Sequence[nn.Parameter]) -> int:
    """Returns the number of backward passes; raises SequenceError if a parameter was not in all of them.

    Args:
        tapes: of recorded layers.
        loose: parameters with rows of Opacus' hooks.
    """
    # parts of the model that were called on their own have no number, and one pass
    attached = {tuple(sorted({tag or 0 for tag, _ in tape.uses})) for tape in tapes} - {(0,)}
    sizes: set[tuple[int, ...]] = set()  # for rows that Opacus' own modules made
    for p in loose:
        rows = getattr(p, "grad_sample", None)
        if hasattr(p, "dpsco_passes"):
            attached.add(tuple(p.dpsco_passes))
        else:
            chunks = rows if isinstance(rows, list) else [rows]
            sizes.add(tuple(len(chunk) for chunk in chunks if chunk is not None))
    if len(attached) > 1 or len(sizes) > 1:
        # PRIVACY: else row i of one layer and row i of another could be of different records, and one record in two
        # rows (test_rows_of_different_passes_are_never_joined)
        raise SequenceError(
            "every backward pass of a step must reach all parameters, so that their rows belong"
            " together"
        )
    return max(map(len, attached | sizes), default=1)


class GradBatch:
    """Per-sample gradients of all parameters for the same rows, joined from blocks.

    Args:
        blocks: at least one; all of the same length.
        order: for each tensor of the concatenated blocks, its place in the optimizer's list of parameters.
        passes: number of backward passes that the rows come from.
        averaged: whether a mean loss was divided by the batch size, and the rows multiplied by it again: then they
            depend on that size in their last bits.

    Raises:
        ValueError: blocks of different lengths.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        order: Sequence[int] | None = None,
        passes: int = 1,
        averaged: bool = False,
    ) -> None:
        if not blocks:
            raise ValueError("blocks must hold at least one block (got none)")
        if len(blocks) > 1 and len({len(block) for block in blocks}) > 1:
            raise ValueError(
                f"blocks must have the same number of rows (got {[len(block) for block in blocks]})"
            )
        self.blocks = list(blocks)
        self.passes = passes
        self.averaged = averaged
        self._scale = 1.0
        self._index: Tensor | slice | None = None  # of the rows that count, None for all
        if order is None:
            order = range(sum(len(block.shapes) for block in blocks))
        self.order = list(order)

    @classmethod
    def consume(cls, params: Sequence[nn.Parameter]) -> GradBatch:
        """Takes the per-sample gradients from the parameters and clears them, also when it raises.

        Args:
            params: the optimizer's trained parameters, in order.

        Raises:
            SequenceError: rows are missing, were used before, or differ in number between parameters.
        """
        places = {id(p): i for i, p in enumerate(params)}
        try:
            blocks: list[Block] = []
            order: list[int] = []
            loose: list[nn.Parameter] = []
            tapes: list[Any] = []
            for i, p in enumerate(params):
                tape = p.__dict__.get("grad_factors")
                if tape is None or not tape.uses:
                    loose.append(p)
                    blocks.append(DenseBlock(_dense_rows(p, i)))
                    order.append(i)
                elif p is tape.weight or places.get(id(tape.weight)) is None:  # once for both
                    tapes.append(tape)
                    weight = places.get(id(tape.weight))
                    bias = places.get(id(tape.bias))
                    kept = tape.uses[0][1] if len(tape.uses) == 1 else tape.joined()
                    blocks += kept.blocks(weight=weight is not None, bias=bias is not None)
                    order += [index for index in (weight, bias) if index is not None]
            if len(blocks) > 1 and len(sizes := {len(block) for block in blocks}) > 1:
                raise SequenceError(
                    "all parameters must have the same rows, but layers saw different numbers of"
                    f" them (got {len(sizes)} different numbers): run the whole model on every"
                    " batch"
                )
            # unknown of rows of Opacus' own modules
            averaged = any(
                _LEFT not in p.__dict__ and getattr(p.__dict__.get("dpsco"), "mean", True)
                for p in params
            )
            if loose:
                _check_backwards(params)
                # recorded layers have looked in their backward
                if averaged and (problem := inexact_mean((), loose)):
                    raise SequenceError(problem)
            if len(blocks) > 1:
                blocks = joined(blocks)
            return cls(blocks, order, _passes(tapes, loose), averaged)
        finally:
            clear_rows(params)

    def __len__(self) -> int:
        index = self._index
        if isinstance(index, slice):
            return int(index.stop)
        return len(self.blocks[0] if index is None else index)

    def unscaled(self, scale: float) -> GradBatch:
        """Returns these rows divided by a public number > 0, that of gradient scaling; the tensors are shared."""
        rows = copy.copy(self)
        rows._scale = self._scale / scale
        return rows

    def among(self, index: Tensor | slice) -> GradBatch:
        """Returns the batch of some rows of a block of fixed size, whose norms are computed with all of them.

        So a norm never depends on how many rows count. The others are the filling: they are left out, not multiplied by
        0, so that nothing in them reaches a sum.

        Args:
            index: (k,) int64, which of the rows count; or a slice of the first ones.
        """
        rows = object.__new__(GradBatch)  # copy.copy costs three times as much
        # a slice is of the first rows
        kept = self._index[index] if isinstance(self._index, Tensor) else index
        rows.__dict__.update(self.__dict__, _index=kept)
        return rows

    def clipped_sum(self, limit: float, scale: float) -> Tensor | None:
        """Returns the sum of clipped rows of a linear model, None if they are others; see `Block.clipped_sum`."""
        if self._scale != 1.0 or len(self.blocks) > 1 or self.order != [0, 1]:
            return None
        return self.blocks[0].clipped_sum(limit, scale, self._index)

    @property
    def has_one_output(self) -> bool:
        """Whether rows are those of one Linear layer with one output: one slope each, times inputs."""
        factored = len(self.blocks) == 1 and isinstance(self.blocks[0], FactoredBlock)
        return factored and self.blocks[0].shapes[-1][0] == 1

    def norms(self) -> Tensor:
        """Returns certified upper bounds of the joint L2 norm of each row: (B,) float64."""
        parts = [block.norms() for block in self.blocks]
        norms = parts[0] if len(parts) == 1 else joint_norms(parts)
        if self._index is not None:
            # PRIVACY: of the whole block first (test_norms_do_not_depend_on_how_many_rows_count)
            norms = norms[self._index]
        # the factor's own rounding cancels in weight * norm (weighted_sum has the same), and the clip has room for that
        # of the products (8 eps, see `clip_weights`)
        return norms if self._scale == 1.0 else norms.mul_(self._scale)

    def weighted_sum(self, weights: Tensor, precision: Summation = FLOAT64) -> list[Tensor]:
        """Returns sum_i weights[i] * row_i per parameter, in the order of the parameters.

        A row of weight 0 contributes exactly 0, whatever it holds (0 * inf would be NaN).

        Args:
            weights: (B,) float64, nonnegative and finite. Below 2^-126, where float32 loses accuracy, they count as 0.
            precision: of the sum; see `plan_summation` for its error.

        Returns:
            float64 or float32 tensors of the parameters' shapes.
        """
        blocks: Iterable[Block] = self.blocks
        index = self._index
        if self._scale != 1.0:
            weights = weights * self._scale
        queued = is_queued(weights)
        if not queued and weights.shape[0] and float(weights.min()) < _LEAST_NORMAL:
            # PRIVACY: dropped, not multiplied by 0 (test_non_finite_rows_contribute_nothing)
            kept = (weights >= _LEAST_NORMAL).nonzero().squeeze(1)
            weights = weights[kept]
            index = index[kept] if isinstance(index, Tensor) else kept
        if index is not None:
            blocks = [block.select(index) for block in blocks]
        if queued:
            counts = weights >= _LEAST_NORMAL
            weights = weights.masked_fill(~counts, 0.0)
            # PRIVACY: zeros, in place of what 0 times would be NaN (test_rows_that_do_not_count_are_zeros_on_a_device)
            blocks = (  # one copy at a time
                block if block.leaves_out(precision) else block.masked(counts)
                for block in blocks
            )
        sums = [total for block in blocks for total in block.weighted_sum(weights, precision)]
        return self._in_order(sums)

    @property
    def shapes(self) -> list[torch.Size]:
        """Shapes of the parameters, in their order."""
        return self._in_order([shape for block in self.blocks for shape in block.shapes])

    def add_by(self, users: Tensor, sums: Tensor) -> None:
        """Adds each row to the sum of its user, one row after the other, so that no user's sum depends on others.

        Args:
            users: (B,) int64 in [0, n_users), the user of each row.
            sums: (n_users, D) float32 or float64, changed in place; D numbers of all parameters in their order.

        Raises:
            ValueError: ids of another shape, type or range.
        """
        if users.shape != (len(self),) or users.dtype != torch.int64:
            raise ValueError(
                f"users must be ({len(self)},) int64, the user of each row (got {users.shape})"
            )
        if len(self) and not 0 <= int(users.min()) <= int(users.max()) < len(sums):
            # PRIVACY: a negative id would count from the end (test_ids_out_of_range_are_refused)
            raise ValueError(f"users must be in [0, {len(sums)})")
        step = max(1, _TILE_ELEMENTS // max(1, sums.shape[1]))
        # those of a block of fixed size are formed with all of them, as norms are
        formed = [] if self._index is None else self._formed()
        for index in torch.arange(len(self), device=users.device).split(step):
            rows = [part[index] for part in formed] or self._in_order(
                [part for block in self.blocks for part in block.select(index).dense()]
            )
            flat = torch.cat(
                [
                    part.reshape(len(index), part.shape[1:].numel()).to(sums.dtype)
                    for part in rows
                ],
                dim=1,
            )
            _add_in_order(
                sums, users[index], flat if self._scale == 1.0 else flat.mul_(self._scale)
            )

    def dense(self) -> list[Tensor]:
        """Returns the rows per parameter, (B, *shape), in the order of the parameters."""
        rows = self._formed()
        return rows if self._scale == 1.0 else [r * self._scale for r in rows]

    def _formed(self) -> list[Tensor]:
        rows = [rows for block in self.blocks for rows in block.dense()]
        return self._in_order(
            rows if self._index is None else [part[self._index] for part in rows]
        )

    def _in_order(self, parts: list[_T]) -> list[_T]:
        out = list(parts)
        for place, part in zip(self.order, parts, strict=True):
            out[place] = part
        return out


def _add_in_order(sums: Tensor, users: Tensor, rows: Tensor) -> None:
    """Adds rows (B, D) to the sums of their users (n, D), those of one user in their order."""
    if rows.device.type == "cpu":
        sums.index_add_(0, users, rows)
        return
    # PRIVACY: elsewhere index_add_ adds in any order (test_rows_of_a_user_are_added_in_their_order)
    for turn in _turns(users):
        sums[users[turn]] += rows[turn]


def _turns(users: Tensor) -> Iterator[Tensor]:
    """Yields the places of the first rows of all users, of their second ones, and so on."""
    order = users.argsort(stable=True)
    runs = users[order].unique_consecutive(return_counts=True)[1]
    nth = torch.arange(len(users), device=users.device) - (
        runs.cumsum(0) - runs
    ).repeat_interleave(runs)
    for k in range(int(runs.max()) if len(runs) else 0):
        yield order[nth == k]


def leave_rows(params: Sequence[nn.Parameter], rows: Sequence[Tensor]) -> None:
    """Leaves rows for the next step of the optimizer of these parameters.

    Args:
        params: all that the optimizer trains, at least one.
        rows: (B, *p.shape) for each of them, not divided by a batch size (see `GradBatch.averaged`).

    Raises:
        SequenceError: rows are waiting already.
    """
    if has_rows(params):
        # PRIVACY: rows of another batch would be dropped in silence, or be joined with these
        # (test_rows_are_not_left_beside_others)
        raise SequenceError(
            "rows are waiting for a step already: make it, or call optimizer.discard()"
        )
    for p, part in zip(params, rows, strict=True):
        p.__dict__.update({"grad_sample": part, _LEFT: True})


def forget_rows(params: Sequence[nn.Parameter]) -> None:
    """Drops what `leave_rows` has left and no step has taken."""
    clear_rows([p for p in params if _LEFT in p.__dict__])


_ON_PARAMETERS = "summed_grad"
_WRAPPED = (
    "the parameters belong to an Opacus DPOptimizer: it must not wrap a private optimizer (by"
    " PrivacyEngine.make_private, say), nor train a model of dp.attach; leave Opacus' engine out"
    " and use optimizer.loader(dataset)"
)


def forget_wrappers(params: Iterable[nn.Parameter]) -> None:
    """Removes what an earlier Opacus optimizer left on the parameters, so that a later one can be recognized."""
    for p in params:
        p.__dict__.pop(_ON_PARAMETERS, None)


def require_unwrapped(params: Sequence[nn.Parameter]) -> None:
    """Raises SequenceError if an Opacus optimizer took the parameters since a private optimizer was made."""
    # PRIVACY: it would count ordinary steps while ours runs on what it left of the rows
    # (test_an_opacus_optimizer_around_ours_cannot_step)
    marked = [p for p in params if _ON_PARAMETERS in p.__dict__]
    if marked:
        for p in params:  # sums of rows, which no ledger of ours knows; the mark stays
            p.grad = None
        for p in marked:
            p.__dict__[_ON_PARAMETERS] = None
        raise SequenceError(_WRAPPED)


def batch_sizes(inputs: Any, dim: int) -> frozenset[int] | None:
    """Returns the sizes that a batch may have by the inputs of a model; None if something in them is not understood.

    Args:
        inputs: nested tuples, lists and dicts of tensors and plain values.
        dim: of the batch in each tensor.
    """
    if isinstance(inputs, Tensor):
        return frozenset([inputs.shape[dim]] if inputs.dim() > dim else [])
    if inputs is None or isinstance(inputs, (int, float, str)):
        return frozenset()
    if not isinstance(inputs, (tuple, list, dict)):
        return None
    entries = inputs.values() if isinstance(inputs, dict) else inputs
    found = set[int]([len(inputs)] if isinstance(inputs, list) else ())  # a record per entry
    for part in entries:
        sizes = batch_sizes(part, dim)
        if sizes is None:
            return None
        found |= sizes
    return frozenset(found)


OWNERS = "dpsco_optimizers"  # attribute of parameters


class Owners:
    """The private optimizers of a parameter; none in copies, which have optimizers of their own."""

    def __init__(self) -> None:
        self.alive: weakref.WeakSet[Any] = weakref.WeakSet()

    def __reduce__(self) -> tuple[type[Owners], tuple[()]]:
        return Owners, ()


def note_owner(params: Iterable[nn.Parameter], optimizer: Any) -> None:
    """Notes on parameters that a private optimizer trains them."""
    for p in params:
        p.__dict__.setdefault(OWNERS, Owners()).alive.add(optimizer)


def owners(params: Iterable[nn.Parameter]) -> list[Any]:
    """Returns the private optimizers that train some of the parameters."""
    found: dict[int, Any] = {}
    for p in params:
        if OWNERS in p.__dict__:
            found.update((id(owner), owner) for owner in p.__dict__[OWNERS].alive)
    return list(found.values())


class Watch:
    """The hook on the steps of all optimizers, while a model is attached.

    A model that is gone takes no hook away: torch may be going through all hooks then.
    """

    def __init__(self) -> None:
        self._attached = weakref.WeakSet[Any]()
        self._handle: Any = None

    def start(self, attachment: Any) -> None:
        """Watches until `stop`."""
        self._attached.add(attachment)
        if self._handle is None:
            self._handle = register_optimizer_step_pre_hook(refuse_plain)

    def stop(self, attachment: Any) -> None:
        """Ends the watch for one that is detached."""
        self._attached.discard(attachment)
        if self._handle is not None and not self._attached:
            self._handle.remove()
            self._handle = None


WATCH = Watch()


def refuse_plain(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raises SequenceError for a step on parameters whose gradients are rows now; see `Watch`."""
    for p in [p for group in optimizer.param_groups for p in group["params"]]:
        attachment = getattr(p, "__dict__", {}).get("dpsco")
        if attachment is None or attachment.passes.paused:
            continue
        mine = owners([p])
        if optimizer in mine or any(owner.in_step for owner in mine):
            return
        raise SequenceError(
            "a plain optimizer must not step on an attached model (got"
            f" {type(optimizer).__name__}): its gradients are recorded row by row, so that"
            " nothing would move. For private records call step() of a private optimizer, that"
            " of dp.make_private or dp.ClippedSGD(model.parameters(), plan); for public data"
            " write `with dp.public(model):` around zero_grad, backward and step; after"
            " private training dp.detach(model)"
        )


refuse_plain.only_looks = True  # type: ignore[attr-defined]  # private steps need not go through torch's wrapper for it
