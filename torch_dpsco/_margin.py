"""Margins of rounding: what a bound is enlarged by, so that its own roundings cannot make it too small.

A comment that says "margin" names the lemma that says how large it must be. Removing one is seen by no test where the
numbers that it is for are too rare to be found.

Source: docs/proofs/rounding.md#model-of-arithmetic
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Numbers = TypeVar("Numbers", float, NDArray[np.float64])


def up(value: Numbers, share: float) -> Numbers:
    """Returns a value >= 0 enlarged by a share of itself; a value < 0 moves down."""
    return value * (1 + share)


def down(value: Numbers, share: float) -> Numbers:
    """Returns a value >= 0 less a share of itself; a value < 0 moves up."""
    return value * (1 - share)
