"""Softmax cross-entropy of K class scores."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from torch_dpsco._validate import positive_count
from torch_dpsco.losses.base import TableLoss, upper


@dataclass(frozen=True)
class SoftmaxCrossEntropy(TableLoss):
    """log sum_c exp(s_c) - s_y for scores s = W x of C classes; norms of W are Frobenius norms.

    alpha = 1, L = B^2/2 (the Hessian of log-sum-exp is at most 1/2), M = B sqrt(1 - 1/C), M0 = log C,
    G(R) <= min(sqrt(2) B, M + L R), Lipschitz constant sqrt(2) B. Not a scalar-score loss: is_glm is False.

    A label outside 0..C-1 makes a null record, loss and gradient 0: which records have one is private, so that it
    must not raise.

    Args:
        num_classes: C >= 2, public.

    Source:
        docs/proofs/holder.md#constants-of-the-losses.

    Example:
        >>> loss = SoftmaxCrossEntropy(num_classes=3)
        >>> round(loss(torch.zeros(1, 3), torch.tensor([2])).item(), 4)
        1.0986
    """

    target_kind: ClassVar[Literal["sign", "real", "class"]] = "class"

    num_classes: int
    num_scores: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if positive_count(num_classes=self.num_classes) < 2:
            raise ValueError(f"num_classes must be an integer >= 2 (got {self.num_classes})")
        object.__setattr__(self, "num_classes", int(self.num_classes))
        object.__setattr__(self, "num_scores", self.num_classes)

    def value(self, score: Tensor, target: Tensor) -> Tensor:
        """Losses (B,) of scores (B, C) and integer targets (B,)."""
        known, label = self._known(target)
        picked = score.gather(1, label.unsqueeze(1)).squeeze(1)
        return torch.where(known, score.logsumexp(1) - picked, 0)

    def derivative(self, score: Tensor, target: Tensor) -> Tensor:
        """softmax(s) - onehot(y), shape (B, C)."""
        known, label = self._known(target)
        classes = torch.arange(self.num_classes, device=label.device)
        onehot = (label.unsqueeze(1) == classes).to(score.dtype)
        return torch.where(known.unsqueeze(1), score.softmax(1) - onehot, 0)

    def _known(self, target: Tensor) -> tuple[Tensor, Tensor]:
        known = (target >= 0) & (target < self.num_classes)
        return known, torch.where(known, target, 0)

    def _exponent(self) -> float:
        return 1.0

    def _holder_constant(self, exponent: float, bound_x: float) -> float:
        return upper(bound_x, bound_x, 0.5)

    def _loss_at_zero(self, bound_y: float) -> float:
        return math.nextafter(math.log(self.num_classes), math.inf)

    def _grad_bound(self, radius: float, bound_x: float, bound_y: float) -> float:
        # The float sqrt(2.0) lies above the root; nextafter covers the two roundings of the other one.
        root = math.nextafter(math.sqrt((self.num_classes - 1) / self.num_classes), 1.0)
        at_zero = upper(bound_x, root)
        return min(upper(bound_x, math.sqrt(2.0)), at_zero + self._holder_constant(1.0, bound_x) * radius)
