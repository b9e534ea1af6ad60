"""Projections and proximal maps, applied in place to ALL parameters as one vector.

    prox_t(v) = argmin_u  ||u - v||^2 / 2 + t * penalty(u)          t = step size

A projection is the case of a penalty that is 0 on the feasible set and infinite elsewhere; it ignores t. The maps act
on noisy iterates, after the trust boundary: they are post-processing and never see a row. A penalty that depended on
the data would void that.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torch_dpsco._validate import check_fields, choice, fields, nonnegative, positive
from torch_dpsco.acts import public_names

__dir__ = public_names(__name__)


class Prox(ABC):
    """A proximal map of the joint vector of all parameters.

    Attributes:
        radius: least known radius of a ball around 0 that holds the feasible set; inf if there is none.
    """

    radius: float = math.inf

    def apply_(self, tensors: Sequence[Tensor], steps: Sequence[float]) -> None:
        """Replaces the joint vector of `tensors` by its proximal point, in place and outside of autograd.

        Args:
            tensors: the parameters, floating point, any shapes, dtypes and devices.
            steps: one step size t >= 0 per tensor; projections ignore them.

        Raises:
            ValueError: if the lengths differ, a step is negative or not finite, or a projection meets a non-finite
                parameter (nothing is changed then).
        """
        if len(tensors) != len(steps):
            raise ValueError(
                f"one step per tensor expected (got {len(steps)} for {len(tensors)} tensors)"
            )
        for step in steps:
            if not 0.0 <= step < math.inf:
                nonnegative(step=step)  # raises: its words are made only where there is an error
        if not torch.is_grad_enabled():
            self._apply(tensors, steps)
            return
        with torch.no_grad():
            self._apply(tensors, steps)

    @property
    def contains_zero(self) -> bool:
        """Whether 0 is feasible, as Hoelder algorithms that start at 0 demand."""
        origin = torch.zeros(1, dtype=torch.float64)
        self.apply_([origin], [0.0])
        return not origin.any()

    @abstractmethod
    def _apply(self, tensors: Sequence[Tensor], steps: Sequence[float]) -> None:
        """The map itself, in place."""


@dataclass(frozen=True)
class Identity(Prox):
    """No constraint and no penalty.

    Example:
        >>> Identity().radius
        inf
    """

    def _apply(self, tensors: Sequence[Tensor], steps: Sequence[float]) -> None:
        return


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

    def __post_init__(self) -> None:
        fields(self, strength=nonnegative)

    def _apply(self, tensors: Sequence[Tensor], steps: Sequence[float]) -> None:
        ElasticNet(self.strength, 0.0)._apply(tensors, steps)


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

    def __post_init__(self) -> None:
        fields(self, l1=nonnegative, l2=nonnegative)

    def _apply(self, tensors: Sequence[Tensor], steps: Sequence[float]) -> None:
        for tensor, step in zip(tensors, steps, strict=True):
            kept = (tensor.abs() - step * self.l1).clamp(min=0)
            tensor.copy_(tensor.sign() * kept).div_(1 + step * self.l2)


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

    def __post_init__(self) -> None:
        fields(self, strength=nonnegative)
        choice(_GROUPS, groups=self.groups)

    def _norms(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns, per tensor, the norms of the groups of its entries, to be multiplied with it."""
        squares = [t.double().square() for t in tensors]
        if self.groups == "global":
            return [torch.stack([t.sum() for t in squares]).sum().sqrt()] * len(squares)
        if self.groups == "per_tensor":
            return [t.sum().sqrt() for t in squares]
        rows = [t.flatten(1).sum(1) if t.dim() > 1 else t for t in squares]
        return [
            row.sqrt().view(-1, *[1] * (t.dim() - 1))
            for row, t in zip(rows, tensors, strict=True)
        ]

    def _apply(self, tensors: Sequence[Tensor], steps: Sequence[float]) -> None:
        if self.groups == "global" and len(set(steps)) > 1:
            raise ValueError(
                f"lr must be the same for all parameters of one group (got {sorted(set(steps))})"
            )
        for tensor, norm, step in zip(tensors, self._norms(tensors), steps, strict=True):
            shrink = (
                (1 - step * self.strength / norm).clamp(min=0).nan_to_num(nan=0.0, neginf=0.0)
            )
            tensor.copy_(tensor.double() * shrink)


@dataclass(frozen=True)
class Ball(Prox):
    """Projection on {||u|| <= radius}: v min(1, radius/||v||), with one norm over all tensors.

    The norm is evaluated in float64. Points inside come back bit for bit; others end with a float64 norm that is at
    most `radius` also after rounding to their dtypes, and less by a few roundings of the coarsest dtype at the most.
    So the map is exactly idempotent, and a gradient bound G(radius) holds at the result.

    Args:
        radius: > 0, finite.

    Raises:
        ValueError: from `apply_` if the norm is not finite: the iterate has diverged.

    Source:
        docs/proofs/heavy_tailed.md#proximal-maps.

    Example:
        >>> w = torch.tensor([3.0, 4.0])
        >>> Ball(1.0).apply_([w], [0.1])
        >>> [round(x, 4) for x in w.tolist()]
        [0.6, 0.8]
    """

    radius: float = field()  # no default: that of `Prox` is for other maps

    def __post_init__(self) -> None:
        fields(self, radius=positive)

    def _apply(self, tensors: Sequence[Tensor], steps: Sequence[float]) -> None:
        if (
            _rough_norm_bound(tensors) <= self.radius
        ):  # plainly inside; a NaN fails the comparison
            return
        norm = _finite_norm(tensors)
        if norm <= self.radius:
            return
        points = [tensor.to(torch.float64, copy=True) for tensor in tensors]
        shrink = self.radius / norm
        slack = 0.0
        least = max(torch.finfo(tensor.dtype).eps for tensor in tensors) / 8
        # Rounding may lift the norm over the radius: shrink a little more. The slack doubles, so that it ends at 0.
        while norm > self.radius:
            for tensor, point in zip(tensors, points, strict=True):
                tensor.copy_(point * (shrink * max(0.0, 1 - slack)))
            norm = _finite_norm(tensors)
            slack = max(2 * slack, least)


@dataclass(frozen=True)
class Box(Prox):
    """Projection on {low <= u_j <= high for every coordinate j}.

    The ball around the box has a radius that depends on the number of coordinates, so `radius` is inf. The bounds are
    rounded to the nearest numbers of each tensor's dtype.

    Args:
        low: lower bound, may be -inf.
        high: upper bound >= low, may be inf.

    Raises:
        ValueError: from `apply_` if a parameter is not finite: the iterate has diverged.

    Source:
        docs/proofs/heavy_tailed.md#proximal-maps.

    Example:
        >>> Box(0.0, 1.0).contains_zero, Box(0.5, 1.0).contains_zero
        (True, False)
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "low", float(self.low))
        object.__setattr__(self, "high", float(self.high))
        if not self.low <= self.high or self.low == math.inf or self.high == -math.inf:
            raise ValueError(
                f"low must be <= high, and the box must hold a number (got {self.low} and"
                f" {self.high})"
            )

    def _apply(self, tensors: Sequence[Tensor], steps: Sequence[float]) -> None:
        _finite_norm(tensors)
        for tensor in tensors:
            tensor.clamp_(self.low, self.high)


@dataclass(frozen=True)
class Simplex(Prox):
    """Projection of the joint vector on {u_j >= 0, sum of u_j = total}, by sorting, in float64.

    Args:
        total: > 0, finite.

    Raises:
        ValueError: from `apply_` if a parameter is not finite: the iterate has diverged.

    Source:
        docs/proofs/heavy_tailed.md#proximal-maps.

    Example:
        >>> w = torch.tensor([1.0, 0.8, -3.0])
        >>> Simplex(1.0).apply_([w], [0.1])
        >>> [round(x, 3) for x in w.tolist()]
        [0.6, 0.4, 0.0]
    """

    total: float = 1.0

    def __post_init__(self) -> None:
        fields(self, total=positive)

    @property
    def radius(self) -> float:  # type: ignore[override]
        """Norm of the corners, with a hair for the rounding of the coordinates."""
        return self.total * (1 + 2.0**-6)

    def _apply(self, tensors: Sequence[Tensor], steps: Sequence[float]) -> None:
        if not tensors:
            return
        _finite_norm(tensors)
        point = _joined(tensors)
        point -= point.max()  # moves no answer, and keeps large numbers from hiding small ones
        falling = point.sort(descending=True).values
        excess = (falling.cumsum(0) - self.total) / torch.arange(
            1, len(point) + 1, device=point.device
        )
        support = int((falling > excess).sum())  # the first of all always is in it
        point = (point - excess[support - 1]).clamp_(min=0.0)
        _write(point, tensors)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1).double() for tensor in tensors])


def _write(vector: Tensor, tensors: Sequence[Tensor]) -> None:
    for tensor, part in zip(tensors, vector.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))


def _finite_norm(tensors: Sequence[Tensor]) -> float:
    """Returns the joint norm in float64; raises ValueError for parameters that have diverged."""
    norm = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))
    if not math.isfinite(norm):
        raise ValueError(
            f"parameters must be finite (got norm {norm}): they diverged; lower the learning rate"
            " lr"
        )
    return norm


def _rough_norm_bound(tensors: Sequence[Tensor]) -> float:
    """Upper bound on the joint norm by sums in any order, which need no copies: (numel + 8) roundings at the most."""
    size = 8
    norms = []
    for tensor in tensors:
        norms.append(float(torch.linalg.vector_norm(tensor, dtype=torch.float64)))
        size += tensor.numel()
    return math.hypot(*norms) * (1 + size * 2.0**-52)
