"""Gradient scaling (`torch.amp.GradScaler`): rows are unscaled before they are clipped, and overflow is not reported.

    scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()

GradScaler lets an optimizer that says `_step_supports_amp_scaling` unscale by itself, and hands it the scale as an
attribute. Its check for infinities decides whether a step is skipped and how the scale moves: both would tell about
private rows outside of the ledger, so it is shown a gradient of zeros. Rows that overflow contribute 0, as always.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from torch_dpsco import _validate as check
from torch_dpsco.errors import SequenceError, UtilityWarning

_NAME = "grad_scale"  # the attribute by which GradScaler hands over its scale


def show_zero_gradient(params: Sequence[nn.Parameter]) -> None:
    """Puts zeros into the `grad` of the smallest parameter, for a check for infinities to look at."""
    # PRIVACY: never a gradient of records (test_a_record_that_overflows_does_not_move_the_scale)
    smallest = min(params, key=torch.numel)
    smallest.grad = torch.zeros_like(smallest)


def take_scale(optimizer: Any, known: float | None) -> float | None:
    """Returns the scale that a GradScaler has set for this step, None without one.

    Args:
        optimizer: whose step runs.
        known: the scale of the step before.

    Raises:
        SequenceError: `unscale_` was called before: it cannot reach rows, and the scaler now believes them unscaled.
        ValueError: a scale so far from 1 that rows would lose their accuracy.
    """
    if _NAME not in optimizer.__dict__:
        return None
    given = optimizer.__dict__[_NAME]
    if given is None:
        del optimizer.__dict__[_NAME]  # GradScaler would multiply by it
        raise SequenceError(
            "scaler.unscale_(optimizer) must not be called: step() unscales each row before it clips; call "
            "scaler.step(optimizer) right after backward"
        )
    scale = float(given)
    # GradScaler multiplies by what is left here when a step raises
    setattr(optimizer, _NAME, torch.ones_like(given))
    if not 2.0**-40 <= check.positive(grad_scale=scale) <= 2.0**40:
        raise ValueError(f"grad_scale must be between 2^-40 and 2^40 (got {scale:g}): give GradScaler init_scale=1024")
    if known is not None and scale != known:
        warnings.warn(
            f"the gradient scale has changed from {known:g} to {scale:g}; overflow is private and never reported to "
            f"the scaler, so that it only grows: keep it constant by GradScaler(init_scale=..., growth_interval=10**9)",
            UtilityWarning,
            stacklevel=4,
        )
    return scale
