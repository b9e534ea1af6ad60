"""Losses evaluated record by record: a function of tensor operations cannot let a record enter the loss of another.

    loss = per_record(nn.BCEWithLogitsLoss)
    loss(model(x), y).backward()

The function sees one record at a time, as a batch of one (`torch.func.vmap`), and the reduction over records is ours.
So a softmax over the batch, a (B, 1) output against (B,) targets or outliers dropped by a median of the batch cannot
happen in the loss. What can is a `torch.autograd.Function` with a `vmap` rule of its own, as fused operations have: it
is shown the whole batch. The first step and `fit` look for it, as in any loss. It says nothing about the model, or
about what is done to a batch before it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from torch_dpsco import _validate as check
from torch_dpsco.compat import tree_leaves, tree_map
from torch_dpsco.losses.base import REDUCTIONS, as_module, read_for, reduced
from torch_dpsco.trial.loss import apply_as_one

# by weights of classes, and over targets that are not ignored
_AVERAGING = (nn.CrossEntropyLoss, nn.NLLLoss)


class PerRecord:
    """A criterion that evaluates each loss on one record; see `per_record`.

    Args:
        loss: loss(output, target) of a batch, which is shown batches of one record.
        reduction: "mean" or "sum" over records.
    """

    def __init__(self, loss: Callable[[Any, Any], Any], reduction: str = "mean") -> None:
        self.loss = loss
        self.reduction = check.choice(("mean", "sum"), reduction=reduction)
        self._of_one = loss
        if isinstance(loss, _AVERAGING) and loss.reduction == "mean":
            # in a batch of one the weight of a class would cancel, and an ignored target be 0/0
            self._of_one = copy.copy(loss)
            self._of_one.reduction = "none"

    def __repr__(self) -> str:
        return f"per_record({self.loss!r}, reduction={self.reduction!r})"

    def __call__(self, output: Any, target: Any, reduction: str | None = None) -> Tensor:
        """Returns the loss of a batch.

        Args:
            output: tensor (B, ...), or tuples, lists and dicts of such.
            target: the same.
            reduction: another one for this call: "mean", "sum", or "none" for the (B,) losses.

        Raises:
            ValueError: the tensors have not one entry per record; the function returns several numbers for a record, or
                cannot be vectorized.
        """
        reduction = self.reduction if reduction is None else reduction
        check.choice(REDUCTIONS, reduction=reduction)
        _require_batch(output, target)
        return apply_as_one(self._reduced, (output, target, reduction), reduction)

    def _reduced(self, output: Any, target: Any, reduction: str) -> Tensor:
        output, target = read_for(self.loss, output, target)
        try:
            losses: Tensor = vmap(self._one, randomness="different")(output, target)
        except RuntimeError as error:
            if "vmap" not in str(error):
                raise
            raise ValueError(
                "loss must be a function of one record that torch.func.vmap can take: tensor"
                " operations, no .item(), no branches on values, no writing to what is not the"
                f" record's (got {self.loss!r})"
            ) from error
        return reduced(losses, reduction)

    def _one(self, output: Any, target: Any) -> Tensor:
        if isinstance(output, Tensor) and isinstance(target, Tensor) and not _is_class(target):
            # PRIVACY: (1,) against () would be broadcast (test_a_column_never_meets_a_row)
            target = target.reshape(output.shape) if target.numel() == output.numel() else target
        value = self._of_one(*tree_map(lambda leaf: leaf.unsqueeze(0), (output, target)))
        if isinstance(value, Tensor) and self._of_one is not self.loss:
            value = value.mean()  # over the targets of the record
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = (
                f"shape {tuple(value.shape)}"
                if isinstance(value, Tensor)
                else type(value).__name__
            )
            raise ValueError(
                f"loss must return one number for a record (got {got}): reduce it, by .mean() or"
                " .sum()"
            )
        return value.reshape(())


def per_record(loss: Any, reduction: str = "mean") -> PerRecord:
    """Returns the loss evaluated record by record, reduced over the records of a batch.

    Args:
        loss: a class of losses that needs no arguments, an instance, or any function of (output, target).
        reduction: "mean" or "sum"; as `attach(loss_reduction=)` says.

    Raises:
        ValueError: it cannot be called, or has parameters that would be trained.

    Guarantee:
        The loss of a record is a function of its own output and target, if operations with a `vmap` rule of their own
        (`torch.autograd.Function`, `torch.library`) keep records apart; the first step looks for those that do not.
        Class weights and ignored targets of
        CrossEntropyLoss and NLLLoss stay within the record: an ignored target counts 0, and a mean is over all records.
        Labels of torch's losses are read by `losses.base`: 0/1, -1/1 and booleans say the same, and a record with a
        label that is not finite, or no class, has no gradient.

    Example:
        >>> loss = per_record(nn.BCEWithLogitsLoss)
        >>> loss(torch.zeros(4, 1), torch.ones(4)).item() == loss(torch.zeros(4), torch.ones(4)).item()
        True
        >>> per_record(nn.CrossEntropyLoss(), reduction="sum")(torch.zeros(2, 3), torch.tensor([0, 2])).shape
        torch.Size([])
    """
    if isinstance(loss, PerRecord):
        return PerRecord(loss.loss, reduction)
    if isinstance(loss, type):
        try:
            loss = loss()
        except TypeError as error:
            raise ValueError(
                f"loss must be an instance where its class needs arguments (got {loss!r})"
            ) from error
    loss = as_module(loss)
    if not callable(loss):
        raise ValueError(
            f"loss must be a function of (output, target), or a class of such (got {loss!r})"
        )
    if isinstance(loss, nn.Module) and any(p.requires_grad for p in loss.parameters()):
        raise ValueError("loss must have no parameters to train: put them into the model")
    return PerRecord(loss, reduction)


def _is_class(target: Tensor) -> bool:
    return not (target.is_floating_point() or target.is_complex() or target.dtype == torch.bool)


def _require_batch(output: Any, target: Any) -> None:
    leaves = tree_leaves((output, target))
    others = [leaf for leaf in leaves if not isinstance(leaf, Tensor) or not leaf.dim()]
    if others or not leaves:
        got = check.shown(others[0]) if others else "none"
        raise ValueError(
            "output and target must hold tensors with one entry per record, and nothing else (got"
            f" {got})"
        )
    sizes = sorted({len(leaf) for leaf in leaves})
    if len(sizes) > 1:
        raise ValueError(
            f"output and target must have one length (got {sizes[0]} and {sizes[-1]})"
        )
