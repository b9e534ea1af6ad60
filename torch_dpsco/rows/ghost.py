"""Ghost rows: per-sample norms from one backward, their weighted sum from a second one; no row is kept in between.

    ghost_backward(model, losses)     backward 1: the hooks of each layer see the rows of that layer, keep their norms
    optimizer.step()                  weights from the joint norms; backward 2: the hooks add weighted rows up

This is the scheme of ghost clipping (Opacus' grad_sample_mode="ghost") on Opacus' hooks. Memory: what the graph holds,
and the rows of ONE layer at a time; a Linear layer on 2-D input that is used once never forms its rows at all.

Differs from Opacus' ghost mode in:

1. norms are certified upper bounds (`row_norms`) of rows, formed layer by layer, or of the two factors of a Linear
   layer; Opacus' samplers for sequences take the root of a float32 sum that can cancel, and prove no error;
2. backward 2 is the same as backward 1, not one of re-weighted losses: its rows are weighted where they are formed, so
   that losses of shape (B, 1) cannot meet coefficients of shape (B,) in a (B, B) product;
3. rows of the second pass are measured again. Where one is longer than in the first pass (kernels that are not
   deterministic), it is shortened, so that no contribution passes the clip whatever the kernels do;
4. a backward that is not `ghost_backward`, for which no norm pass runs, raises.

Source: docs/proofs/rounding.md#ghost-rows; Li, Tramer, Liang, Hashimoto (ghost clipping).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from torch_dpsco._doors import typed
from torch_dpsco.errors import SequenceError
from torch_dpsco.rows.base import FLOAT64, Block, Summation, joint_norms
from torch_dpsco.rows.passes import NO_FORWARD, forget_uses
from torch_dpsco.rows.precision import HALF, Gap, require_sums

if TYPE_CHECKING:
    from torch_dpsco.rows.hooks import GhostHooks

MARK = "dpsco_ghost"  # the attribute of parameters that holds the block until a step takes it
_LEAST_NORMAL = 2.0**-126  # of float32, in which sums may run

_NO_ROWS = (
    "rows are not available with rows='ghost': only their norms and weighted sums are, which clipped means need "
    "(ClippedSGD, HolderSGD and their kin); attach the model with rows='auto' for this optimizer"
)


def flat_losses(losses: Tensor) -> Tensor:
    """Returns per-sample losses as (B,); raises ValueError for other shapes than (B,) and (B, 1)."""
    if losses.dim() == 2 and losses.shape[1] == 1:
        return losses.squeeze(1)
    if losses.dim() != 1:
        # PRIVACY: a scalar has no records, (B, k) has several losses each (test_losses_of_other_shapes_are_refused)
        raise ValueError(
            f"losses must be one per record, of shape (B,) or (B, 1) (got {losses.dim()} dimensions): use "
            f"reduction='none', and sum what a record has, losses.flatten(1).sum(1)"
        )
    return losses


class GhostBlock(Block):
    """Norms of the rows of all parameters, and the graph from which a second backward makes their weighted sums.

    Args:
        hooks: of the attached model.
        params: trained parameters, in the order of the optimizer.
        losses: (B,) per-sample losses, whose graph is kept.

    Raises:
        SequenceError: a parameter has no rows, or not one per loss, or a gradient that is not the sum of its rows.

    Guarantee:
        norms() are certified as those of `DenseBlock` and `FactoredBlock`, of rows as the first pass computed them; a
        weighted sum adds no row that is longer than its norm says, with the error of `Summation`. Nothing is assumed of
        determinism. Assumes, as all blocks do, that a record's row does not depend on other records.
    """

    wrong = "with rows='ghost' the optimizer must train exactly the model's trainable parameters"

    def __init__(self, hooks: GhostHooks, params: Sequence[nn.Parameter], losses: Tensor) -> None:
        self._hooks, self.params, self._losses = hooks, list(params), losses
        self.shapes = [p.shape for p in self.params]
        self._layers = {m: list(m.activations) for m in hooks._module.modules() if hasattr(m, "activations")}
        self._uses = [p._forward_counter for p in self.params]  # type: ignore[attr-defined]
        self._norms: dict[tuple[int, ...], Tensor] = {}  # by the places of the parameters of a layer
        self._index: Tensor | None = None
        sums: list[Tensor | None] = [None] * len(self.params)

        def keep(key: tuple[int, ...], block: Block) -> None:
            self._norms[key] = block.norms()
            if not hooks.compared:
                ones = torch.ones(len(block), dtype=torch.float64, device=losses.device)
                for place, total in zip(key, block.weighted_sum(ones, FLOAT64), strict=True):
                    sums[place] = total

        totals = self._backward(keep, second=False)
        self._require_rows()
        if not hooks.compared and len(self):
            hooks.compared = True
            self._compare(totals, sums)

    def __len__(self) -> int:
        return len(self._losses) if self._index is None else len(self._index)

    def norms(self) -> Tensor:
        """Returns certified upper bounds of the joint norms of the rows: (B,) float64."""
        joint = joint_norms(self._norms.values())
        return joint if self._index is None else joint[self._index]

    def weighted_sum(self, weights: Tensor, precision: Summation) -> list[Tensor]:
        """Returns sum_i weights[i] * row_i per parameter, by the second backward: once, for it frees the graph."""
        sums: dict[int, Tensor] = {}

        def add(key: tuple[int, ...], block: Block) -> None:
            promised = self._norms[key]
            if self._index is not None:
                promised, block = promised[self._index], block.select(self._index)
            scaled = weights * _shortening(promised, block.norms())
            kept = (scaled >= _LEAST_NORMAL).nonzero().squeeze(1)
            if len(kept) < len(scaled):
                scaled, block = scaled[kept], block.select(kept)
            sums.update(zip(key, block.weighted_sum(scaled, precision), strict=True))

        self._backward(add, second=True)
        if len(sums) < len(self.params):
            raise SequenceError("the second backward must reach the layers of the first one: the graph was changed")
        return [sums[place] for place in range(len(self.params))]

    def select(self, index: Tensor) -> GhostBlock:
        """Returns the block of some rows, of the same graph."""
        part = copy.copy(self)
        part._index = index if self._index is None else self._index[index]
        return part

    def dense(self) -> list[Tensor]:
        """Raises SequenceError: rows are not kept."""
        raise SequenceError(_NO_ROWS)

    def _backward(self, take: Callable[[tuple[int, ...], Block], None], *, second: bool) -> Sequence[Tensor | None]:
        """Runs a pass; returns the gradients of the sum of the losses, which belong to no one."""
        place = {id(p): i for i, p in enumerate(self.params)}
        for layer, activations in self._layers.items():
            layer.activations = list(activations)
        for p, uses in zip(self.params, self._uses, strict=True):
            p._forward_counter = uses  # type: ignore[attr-defined]
        try:
            with self._hooks.running(
                lambda owned, block: take(tuple(place[id(p)] for p in owned), block), second=second
            ):
                return torch.autograd.grad(
                    self._losses,
                    self.params,
                    torch.ones_like(self._losses),
                    retain_graph=not second,  # nothing needs the graph after it
                    allow_unused=True,
                )
        finally:
            forget_uses(self.params, self._layers)

    def _require_rows(self) -> None:
        found = {place for key in self._norms for place in key}
        for place, p in enumerate(self.params):
            if place not in found:
                raise SequenceError(
                    f"per-sample gradients are missing for parameter {place} of shape {tuple(p.shape)}: freeze "
                    f"parameters that the losses do not use with requires_grad_(False), give inputs that need no "
                    f"gradient, and use parameters only in the forward of their own module"
                )
        if any(len(norms) != len(self._losses) for norms in self._norms.values()):
            # PRIVACY: a row of several records, or of a part (test_losses_that_are_not_one_per_record_are_refused)
            raise SequenceError("losses must be one per record of the batch, in its order, and rows of layers too")

    def _compare(self, totals: Sequence[Tensor | None], sums: Sequence[Tensor | None]) -> None:
        """Raises SequenceError if a gradient is not the sum of its rows: the rest would be lost; see `GradBatch`."""
        sizes = {place: float(norms.sum()) for key, norms in self._norms.items() for place in key}
        gaps: dict[int, Gap] = {}
        for place, (total, rows) in enumerate(zip(totals, sums, strict=True)):
            if total is not None and rows is not None:
                error = float(torch.linalg.vector_norm(total.double() - rows.double()))
                gaps[place] = Gap(error, sizes[place], 3e-2 if total.dtype in HALF else 1e-3)
        require_sums(gaps)


def _shortening(promised: Tensor, again: Tensor) -> Tensor:
    """Returns the factors in [0, 1] that make rows as short as was promised; 0 for rows that are not finite now."""
    # PRIVACY: for the roundings of quotient and products (test_what_is_shortened_is_not_longer_than_was_promised)
    shorter = promised / again * (1.0 - 2.0**-49)
    return torch.where(again <= promised, torch.ones_like(promised), shorter).nan_to_num_(nan=0.0)


def waiting_block(params: Sequence[nn.Parameter]) -> GhostBlock | None:
    """Returns the block that `ghost_backward` left on the parameters, None if there is none."""
    blocks = [p.__dict__[MARK] for p in params if MARK in p.__dict__]
    return blocks[0] if blocks else None


def is_ghost(model: nn.Module) -> bool:
    """Returns whether a model was attached with rows="ghost"."""
    return bool(getattr(getattr(getattr(model, "_dpsco", None), "hooks", None), "ghost", False))


@typed
def ghost_backward(model: nn.Module, losses: Tensor) -> None:
    """Runs the norm pass of a model that was attached with rows="ghost"; `optimizer.step()` runs the second one.

    It takes the place of `loss.backward()`, once before each `optimizer.step()` or `optimizer.accumulate()`.

    Args:
        model: attached with rows="ghost".
        losses: one loss per record, (B,) or (B, 1), in the order of the batch: reduction="none".

    Raises:
        ValueError: losses of another shape; a record with several losses needs their sum.
        SequenceError: another attachment, no training forward, rows of an earlier call that no step has taken, or
            losses from which rows cannot be made (a term on the weights, parameters that are not used).

    Guarantee:
        That of the optimizer, see `GhostBlock`.

    Example:
        >>> import torch_dpsco as dp
        >>> data = torch.utils.data.TensorDataset(torch.randn(100, 3), torch.ones(100, 1))
        >>> model = dp.attach(nn.Linear(3, 1), rows="ghost")
        >>> plan = dp.HolderSGD.plan(problem=dp.losses.Logistic().problem(bound_x=2.0), n=100,
        ...                          budget=dp.Budget(1.0, 1e-3), batch_size=20, epochs=1)
        >>> optimizer = dp.HolderSGD(model.parameters(), plan)
        >>> for x, y in optimizer.loader(data):
        ...     dp.ghost_backward(model, dp.losses.Logistic()(model(x), y, reduction="none"))
        ...     optimizer.step()
        >>> optimizer.steps
        5
    """
    if not is_ghost(model):
        raise SequenceError("ghost_backward needs dp.attach(model, rows='ghost')")
    hooks: GhostHooks = model._dpsco.hooks  # type: ignore[assignment, union-attr]
    losses = flat_losses(losses)
    if not losses.requires_grad:
        raise SequenceError(NO_FORWARD)
    params = [p for p in model.parameters() if p.requires_grad]
    if waiting_block(params) is not None:
        hooks.refuse(
            "norms of an earlier ghost_backward wait: call optimizer.step() or optimizer.accumulate() after each"
        )
    block = GhostBlock(hooks, params, losses)
    for p in params:
        p.__dict__[MARK] = block
