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

from torch_dpsco._validate import nonnegative


class Prox(ABC):
    """A proximal map of the joint vector of all parameters.

    Attributes:
        radius: least known radius of a ball around 0 that holds the feasible set; inf if there is none.
    """

    radius: float

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
            raise ValueError(f"one step per tensor expected (got {len(steps)} for {len(tensors)} tensors)")
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

    radius: float = field(init=False, repr=False, default=math.inf)

    def _apply(self, tensors: Sequence[Tensor], steps: Sequence[float]) -> None:
        return
