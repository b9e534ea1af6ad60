"""Proximal maps of penalties."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torch_dpsco._validate import choice, nonnegative
from torch_dpsco.prox.base import Prox


@dataclass(frozen=True)
class L1(Prox):
    """Soft threshold, the map of the penalty strength * ||u||_1: sign(v) max(|v| - t strength, 0).

    Args:
        strength: >= 0.

    Source:
        docs/proofs/heavy_tailed.md#proximal-maps.

    Example:
        >>> w = torch.tensor([2.0, 0.25])
        >>> L1(1.0).apply_([w], [0.5])
        >>> w.tolist()
        [1.5, 0.0]
    """

    strength: float = 1.0
    radius: float = field(init=False, repr=False, default=math.inf)

    def __post_init__(self) -> None:
        object.__setattr__(self, "strength", nonnegative(strength=self.strength))

    def _apply(self, tensors: Sequence[Tensor], steps: Sequence[float]) -> None:
        for tensor, step in zip(tensors, steps, strict=True):
            _soft_threshold_(tensor, step * self.strength)


@dataclass(frozen=True)
class ElasticNet(Prox):
    """Soft threshold and shrinkage, the map of l1 ||u||_1 + (l2/2) ||u||^2: soft(v, t l1)/(1 + t l2).

    Args:
        l1: >= 0.
        l2: >= 0; the penalty is l2-strongly convex.

    Source:
        docs/proofs/heavy_tailed.md#proximal-maps.

    Example:
        >>> w = torch.tensor([2.0, 0.25])
        >>> ElasticNet(l1=1.0, l2=1.0).apply_([w], [0.5])
        >>> w.tolist()
        [1.0, 0.0]
    """

    l1: float
    l2: float
    radius: float = field(init=False, repr=False, default=math.inf)

    def __post_init__(self) -> None:
        object.__setattr__(self, "l1", nonnegative(l1=self.l1))
        object.__setattr__(self, "l2", nonnegative(l2=self.l2))

    def _apply(self, tensors: Sequence[Tensor], steps: Sequence[float]) -> None:
        for tensor, step in zip(tensors, steps, strict=True):
            _soft_threshold_(tensor, step * self.l1)
            tensor.div_(1 + step * self.l2)


_GROUPS = ("global", "per_tensor", "per_row")


@dataclass(frozen=True)
class L2(Prox):
    """Block soft threshold, the map of strength * (sum over groups of ||u_g||): v_g max(0, 1 - t strength/||v_g||).

    Args:
        strength: >= 0.
        groups: "global", all parameters in one group; "per_tensor"; or "per_row" (first dimension: an output, or a
            feature of an embedding).

    Source:
        docs/proofs/heavy_tailed.md#proximal-maps.

    Example:
        >>> w = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
        >>> L2(1.0, groups="per_row").apply_([w], [1.0])
        >>> [[round(x, 3) for x in row] for row in w.tolist()]
        [[2.4, 3.2], [0.0, 0.0]]
    """

    strength: float = 1.0
    groups: str = "global"
    radius: float = field(init=False, repr=False, default=math.inf)

    def __post_init__(self) -> None:
        object.__setattr__(self, "strength", nonnegative(strength=self.strength))
        choice(_GROUPS, groups=self.groups)

    def _norms(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns, per tensor, the norms of the groups of its entries, to be multiplied with it."""
        wide = [t.double() for t in tensors]
        if self.groups == "global":
            norm = torch.stack([t.square().sum() for t in wide]).sum().sqrt()
            return [norm] * len(wide)
        if self.groups == "per_tensor":
            return [t.square().sum().sqrt() for t in wide]
        return [
            t.flatten(1).square().sum(1).sqrt().view(-1, *[1] * (t.dim() - 1)) if t.dim() > 1 else t.abs() for t in wide
        ]

    def _apply(self, tensors: Sequence[Tensor], steps: Sequence[float]) -> None:
        if self.groups == "global" and len(set(steps)) > 1:
            raise ValueError(f"lr must be the same for all parameters of one group (got {sorted(set(steps))})")
        for tensor, norm, step in zip(tensors, self._norms(tensors), steps, strict=True):
            shrink = (1 - step * self.strength / norm).clamp(min=0).nan_to_num(nan=0.0, neginf=0.0)
            tensor.copy_(tensor.double() * shrink)


def _soft_threshold_(tensor: Tensor, threshold: float) -> None:
    tensor.copy_(tensor.sign() * (tensor.abs() - threshold).clamp(min=0))
