"""Marks that an Opacus DPOptimizer leaves: it must not share parameters with a private optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from torch_dpsco.errors import SequenceError

_ON_PARAMETERS, _ON_ROWS = "summed_grad", "_processed"
_WRAPPED = (
    "the parameters belong to an Opacus DPOptimizer: it must not wrap a private optimizer (by "
    "PrivacyEngine.make_private, say), nor train a model of dp.attach; leave Opacus' engine out and use "
    "optimizer.loader(dataset)"
)


def forget_wrappers(params: Iterable[nn.Parameter]) -> None:
    """Removes what an Opacus optimizer of earlier left on the parameters, so that a later one can be told."""
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


def require_unprocessed(rows: Sequence[Tensor]) -> None:
    """Raises SequenceError if an Opacus optimizer has clipped and noised these rows already."""
    if any(hasattr(chunk, _ON_ROWS) for chunk in rows):
        raise SequenceError(_WRAPPED)
