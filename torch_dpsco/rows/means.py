"""Means over a batch whose gradients have the same bits in batches of every size.

A mean over s records divides each gradient by s, which rounds, so that a record more would move all others in their
last bits. Outputs of a model in training are `Averaged` where batches come in several sizes: the last mean over the
batch, by a criterion of torch or by `mean()`, is computed as a sum, and not divided by s in the backward, so that rows
need not be multiplied by s again.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_dpsco.compat import backward_number, tree_leaves, tree_map, without_subclasses
from torch_dpsco.errors import SequenceError
from torch_dpsco.rows.blocks import is_queued

_CRITERIA = {  # what they take, in order, with the defaults
    function: {name: p.default for name, p in inspect.signature(function).parameters.items()}
    for function in (
        F.cross_entropy,
        F.nll_loss,
        F.binary_cross_entropy_with_logits,
        F.binary_cross_entropy,
        F.mse_loss,
        F.l1_loss,
        F.smooth_l1_loss,
        F.huber_loss,
    )
}
_MEANS = (torch.mean, Tensor.mean)
_OF_CLASSES = (F.cross_entropy, F.nll_loss)


class Averaged(Tensor):
    """An output of a model in training, or what is computed from it before its mean over the batch.

    Attributes:
        source: the batch that it is of.
    """

    source: Source

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs an operation; a mean over the batch gives a plain tensor."""
        kwargs = kwargs or {}
        known = [t.source for t in args if isinstance(t, Averaged)]
        if not known:
            known = [t.source for t in tree_leaves((args, kwargs)) if isinstance(t, Averaged)]
        # torch's `autograd.backward` asked for ones like a loss before it told subclasses of itself
        asked = func is torch.ones_like and "memory_format" in kwargs
        if known and (asked or func in (Tensor.backward, torch.autograd.backward)):
            # PRIVACY: a part of the loss is no exact mean, whose rows would be multiplied in another way
            # (test_a_term_that_is_no_exact_mean_is_refused)
            raise SequenceError(NO_MEAN)
        with without_subclasses():
            found = _mean_of(func, args, kwargs, known[0]) if known else None
            if found is not None:
                return found
            return averaged(func(*args, **kwargs), known[0])

    def __reduce_ex__(self, protocol: Any) -> Any:
        with without_subclasses():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with without_subclasses():
            return str(self.as_subclass(Tensor).__repr__())


class Source(NamedTuple):
    """A batch.

    Args:
        rows: of it.
        passes: of the model; `averaged` is the number of the last backward that an exact mean was in.
    """

    rows: int
    passes: Any


NO_MEAN = (
    "loss must be the mean over the batch that it was in the first steps, of a criterion of torch or by"
    " mean(), since batches come in several sizes now: keep the loss as it is, or give"
    " isolation='slots' to optimizer.loader(...)"
)


def averaged(output: Any, source: Source) -> Any:
    """Returns outputs, nested, with those that are differentiable ready for an exact mean over the batch."""

    def marked(result: Any) -> Any:
        if type(result) is not Tensor or not result.requires_grad:
            return result
        found: Averaged = result.as_subclass(Averaged)
        found.source = source
        return found

    return marked(output) if isinstance(output, Tensor) else tree_map(marked, output)


def _mean_of(func: Any, args: Any, kwargs: dict[str, Any], source: Source) -> Tensor | None:
    """Returns the mean that an operation is, None if it is another one."""
    if func in _MEANS:
        whole = len(args) == 1 and not kwargs
        t = args[0]
        return _mean(t.sum(), t.numel(), source) if whole and t.numel() else None
    defaults = _CRITERIA.get(func)
    if defaults is None:
        return None
    options = defaults | dict(zip(defaults, args, strict=False)) | kwargs
    weighted = func in _OF_CLASSES and options["weight"] is not None
    if options["reduction"] != "mean" or weighted:
        return None
    target = options["target"]
    options["reduction"] = "sum"
    total = func(**options)
    number = options["input"].numel()
    if func in _OF_CLASSES:
        # one of each record, or of each of its places; probabilities of classes have a row of them
        classes = options["input"].shape[1 if options["input"].dim() > 1 else 0]
        number //= classes
        if not target.is_floating_point() and _some_ignored(
            target, options["ignore_index"], source
        ):
            return None
    return _mean(total, number, source)


def _some_ignored(target: Tensor, ignored: int, source: Source) -> bool:
    """Returns whether targets are known to be ignored; they move no row of another record, but torch's mean is another.

    A device is waited for in few passes alone: the first, second, fourth, and so on.
    """
    number = source.passes.number
    if is_queued(target) and number & (number - 1):
        return False
    return bool((target == ignored).any())


def _mean(total: Tensor, number: int, source: Source) -> Tensor | None:
    if number % source.rows:
        return None
    result: Tensor = _ExactMean.apply(total, number, source)
    return result


class _ExactMean(torch.autograd.Function):
    """total / number, whose gradient is that of total / (number / rows)."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, number: int, source: Source) -> Tensor:
        ctx.source = source
        ctx.divisor = number // source.rows
        return total / number

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.source.passes.averaged = backward_number()
        return grad / ctx.divisor, None, None
