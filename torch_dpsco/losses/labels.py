"""How labels are read: record by record, by a public rule, whatever coding a data set has.

| losses | a label y is read as | not a label |
|---|---|---|
| of a margin: `MarginLoss`, nn.SoftMarginLoss, nn.HingeEmbeddingLoss | 1 if y > 0, else -1 | not finite |
| of chances: nn.BCEWithLogitsLoss, nn.BCELoss, nn.MultiLabelSoftMarginLoss | y, clamped to [0, 1] | not finite |
| of class numbers: `SoftmaxCrossEntropy`, nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss | y | no class |
| of real numbers, and of chances of classes | y | not finite |

So 0/1, -1/1 and booleans say the same. A record with an entry that is not a label, or before nn.BCELoss with a chance
that is NaN, is a null record: its gradient is 0. It raises nothing, since which records have such entries is private.

Guarantee:
    A map of each record by itself, which sends adjacent data sets to adjacent ones: all sensitivities stay.

Source: docs/before_you_start.md#labels
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIGN = "sign"
CHANCE = "chance"
CLASS = "class"
REAL = "real"

_OF_TORCH: dict[Any, tuple[type[nn.Module], str]] = {
    F.soft_margin_loss: (nn.SoftMarginLoss, SIGN),
    F.hinge_embedding_loss: (nn.HingeEmbeddingLoss, SIGN),
    F.binary_cross_entropy_with_logits: (nn.BCEWithLogitsLoss, CHANCE),
    F.binary_cross_entropy: (nn.BCELoss, CHANCE),
    F.multilabel_soft_margin_loss: (nn.MultiLabelSoftMarginLoss, CHANCE),
    F.cross_entropy: (nn.CrossEntropyLoss, CLASS),
    F.nll_loss: (nn.NLLLoss, CLASS),
    F.multi_margin_loss: (nn.MultiMarginLoss, CLASS),
    F.multilabel_margin_loss: (nn.MultiLabelMarginLoss, CLASS),
    F.mse_loss: (nn.MSELoss, REAL),
    F.l1_loss: (nn.L1Loss, REAL),
    F.smooth_l1_loss: (nn.SmoothL1Loss, REAL),
    F.huber_loss: (nn.HuberLoss, REAL),
    F.poisson_nll_loss: (nn.PoissonNLLLoss, REAL),
    F.kl_div: (nn.KLDivLoss, REAL),
}
_KINDS = dict(_OF_TORCH.values())


def as_module(loss: Any) -> Any:
    """Returns a loss function of torch, or a partial of one, as the module that computes the same; others as they are.

    Example:
        >>> as_module(F.cross_entropy), as_module(functools.partial(F.huber_loss, delta=2.0)).delta, as_module(max)
        (CrossEntropyLoss(), 2.0, <built-in function max>)
    """
    function = loss
    options = {}
    if isinstance(loss, functools.partial) and not loss.args:
        function = loss.func
        options = loss.keywords
    for known, (module, _) in _OF_TORCH.items():
        if function is known:
            return module(**options)
    return loss


def read(kind: str, target: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns labels of a dtype, 0 for what is not a label, and which are labels.

    Args:
        kind: "sign", "chance" or "real".
        target: of any dtype but complex ones.
        dtype: floating.

    Raises:
        ValueError: a complex target.
    """
    _require_real(target)
    label = target.to(dtype)
    known = label.isfinite()
    if kind == SIGN:
        label = torch.where(label > 0, 1.0, -1.0).to(dtype)
    elif kind == CHANCE:
        label = label.clamp(0.0, 1.0)
    return torch.where(known, label, 0.0), known


def read_for(loss: Any, output: Any, target: Any) -> tuple[Any, Any]:
    """Returns the output and the target that a loss of torch is to see; those of other losses as they are.

    Args:
        loss: a module of torch.nn itself; a subclass may have labels of its own.
        output: of the model, (B, ...).
        target: (B, ...).

    Example:
        >>> output, labels = read_for(nn.BCEWithLogitsLoss(), torch.ones(3, 1), torch.tensor([-1.0, 7.0, torch.nan]))
        >>> output.tolist(), labels.tolist()
        ([[1.0], [1.0], [0.0]], [0.0, 1.0, 0.0])
    """
    kind = _KINDS.get(type(loss))
    if kind is not None and isinstance(target, Tensor):
        _require_real(target)
    if kind is None or not (_is_batch(output) and _is_batch(target)) or len(output) != len(target):
        return output, target
    if kind == CLASS and not target.is_floating_point():
        label, known = _classes(loss, target, output.shape[min(1, output.dim() - 1)])
    else:
        label, known = read(REAL if kind == CLASS else kind, target, output.dtype)
    whole = _all(known)
    if isinstance(loss, nn.BCELoss):
        # PRIVACY: torch raises for NaN, which tells of a record that has one
        # (test_a_chance_that_is_no_number_makes_a_null_record_and_raises_nothing)
        whole = whole & _all(~output.isnan())
    # PRIVACY: chosen, not multiplied by 0, which leaves NaN
    # (test_a_null_record_has_no_gradient_even_where_the_output_is_not_finite)
    return torch.where(whole.reshape(-1, *[1] * (output.dim() - 1)), output, 0.0), label


def _all(entries: Tensor) -> Tensor:
    """Returns for each record whether all of its entries are true."""
    return entries.flatten(1).all(1) if entries.dim() > 1 else entries


def _require_real(target: Tensor) -> None:
    if target.is_complex():
        raise ValueError(f"target must be real (got {target.dtype})")


def _is_batch(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.dim() > 0 and not tensor.is_complex()


def _classes(loss: Any, target: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns class numbers, and which are some; a number that the loss ignores is none of another class."""
    label = target.long()
    least = (
        -1 if isinstance(loss, nn.MultiLabelMarginLoss) else 0
    )  # which ends the list of a record's classes
    known = (label >= least) & (label < count)
    ignored = getattr(loss, "ignore_index", None)
    if ignored is None:
        return torch.where(known, label, 0), known
    # a class, so that a mean is over null records too
    return torch.where(known | (label == ignored), label, int(ignored == 0)), known | (
        label == ignored
    )
