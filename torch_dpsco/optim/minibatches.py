"""Minibatches of the phases of a run: Poisson ones, of a fixed size, or whole passes of secret draws."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TypeAlias

from torch_dpsco.accounting.designs import Assigned, Fixed, Poisson

Minibatches: TypeAlias = Poisson | Fixed | Assigned


def minibatches(
    kind: type[Minibatches], batch_size: int, n: int, steps: int
) -> tuple[Minibatches, int]:
    """Returns how a phase of n records draws, and its steps: of `Assigned` batches whole passes, at least one.

    Example:
        >>> minibatches(Assigned, 5, 100, 50)
        (Assigned(batch_size=5, n=100, parts=None, amplification=True, passes=2), 40)
        >>> minibatches(Poisson, 5, 100, 50)
        (Poisson(batch_size=5, n=100), 50)
    """
    if kind is not Assigned:
        return kind(batch_size, n), steps
    design = Assigned(max(batch_size, math.ceil(n / steps)), n)
    passes = steps // design.batches
    return replace(design, passes=passes), passes * design.batches
