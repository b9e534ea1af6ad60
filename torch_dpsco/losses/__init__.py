"""Convex losses of a linear score whose constants are known, and the tools that make the constants true.

    loss = Logistic()
    X = enforce_bounds(X, bound_x=1.0)                 # the constants hold for bounded records only
    problem = loss.problem(bound_x=1.0, radius=10.0)   # what HolderSGD and others calibrate to
    loss(model(X), y).backward()                       # an ordinary torch criterion

| class | loss | exponent |
|---|---|---|
| `Hinge(power=q)` | (1 - m)_+^q | q - 1 |
| `Logistic()` | log(1 + e^{-m}) | 1, or any in [0, 1] |
| `SmoothedHinge(width=h)` | hinge with a parabola of width h at the corner | 1, or any |
| `PowerLoss(power=q)` | |r|^q | q - 1 |
| `Absolute()` | |r| | 0 |
| `Squared()` | r^2/2 | 1 |
| `Huber(threshold=k)` | r^2/2 up to |r| = k, then linear | 1, or any |
| `Pinball(quantile=t)` | max(t r, (t - 1) r) | 0 |
| `SmoothedPinball(quantile=t, width=w)` | the same, with a parabola of width w at the kink | 1, or any |
| `EpsilonInsensitive(width=w)` | (|r| - w)_+ | 0 |
| `SoftmaxCrossEntropy(num_classes=C)` | log sum exp(s) - s_y | 1 |

with margin m = y s, residual r = y - s and score s = w.x. A bias is a column of ones, which changes the bound B on the
features to sqrt(B^2 + 1). Bounds are public numbers chosen in advance: never derive them from the data.

Your own loss: see docs/your_own.md; `check_holder` tries to refute the constants that it promises.
"""

from __future__ import annotations

from torch_dpsco.acts import public_names
from torch_dpsco.losses.base import Loss, TableLoss
from torch_dpsco.losses.check import check_holder
from torch_dpsco.losses.table import (
    Absolute,
    EpsilonInsensitive,
    Hinge,
    Huber,
    Logistic,
    MarginLoss,
    Pinball,
    PowerLoss,
    ResidualClipped,
    ResidualLoss,
    SmoothedHinge,
    SmoothedPinball,
    SoftmaxCrossEntropy,
    Squared,
    enforce_bounds,
)

__all__ = [
    "Loss",
    "TableLoss",
    "MarginLoss",
    "ResidualLoss",
    "Hinge",
    "Logistic",
    "SmoothedHinge",
    "SmoothedPinball",
    "PowerLoss",
    "Absolute",
    "Squared",
    "Huber",
    "Pinball",
    "EpsilonInsensitive",
    "SoftmaxCrossEntropy",
    "ResidualClipped",
    "check_holder",
    "enforce_bounds",
]

__dir__ = public_names(__name__)
