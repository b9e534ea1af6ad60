"""Epsilon and delta of passes of random allocation in all that a vector may ask for; a ledger asks by its events."""

from __future__ import annotations

import math

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.allocation import (
    AllocationLoss,
    allocation_law,
    epsilon_at,
    log_delta,
)
from torch_dpsco.accounting.analysis.pld import pld_delta, pld_epsilon
from torch_dpsco.accounting.analysis.pld_laws import LossLaw


def allocation_epsilon(
    noise: float,
    steps: int,
    delta: float,
    adjacency: str,
    *,
    epochs: int = 1,
    direction: str | None = None,
) -> float:
    """Returns epsilon at delta of passes with fresh picks, rounded up.

    Args:
        noise: z >= 0, noise std over the clip.
        steps: T >= 1, steps of a pass.
        delta: in (0, 1).
        adjacency: "add_remove", "zero_out" or "replace_one".
        epochs: number of passes, >= 0.
        direction: "remove" or "add" for one of the two orders of a single pass, not for replace_one.
    """
    delta = check.open_interval(0.0, 1.0, delta=delta)
    losses = _losses(noise, steps, adjacency, epochs, direction)
    if losses is None:
        return math.inf
    if direction is not None and isinstance(losses[0][0], AllocationLoss):
        return epsilon_at(AllocationLoss(noise, steps, direction), delta)
    found = pld_epsilon(losses, delta)
    assert found is not None
    return found.epsilon


def allocation_delta(
    noise: float,
    steps: int,
    epsilon: float,
    adjacency: str,
    *,
    epochs: int = 1,
    direction: str | None = None,
) -> float:
    """Returns delta at epsilon >= 0 of passes with fresh picks, rounded up (see `allocation_epsilon`)."""
    epsilon = check.nonnegative(epsilon=epsilon)
    losses = _losses(noise, steps, adjacency, epochs, direction)
    if losses is None:
        return 1.0
    if direction is not None and isinstance(losses[0][0], AllocationLoss):
        return math.exp(log_delta(AllocationLoss(noise, steps, direction), epsilon))
    found = pld_delta(losses, epsilon)
    assert found is not None
    return found.delta


def _losses(
    noise: float, steps: int, adjacency: str, epochs: int, direction: str | None
) -> tuple[tuple[LossLaw, int], ...] | None:
    """Returns the law of the passes, None without noise, after the checks of all arguments."""
    noise = check.nonnegative(noise=noise)
    epochs = check.count(epochs=epochs)
    check.positive_count(steps=steps)
    check.choice(("add_remove", "zero_out", "replace_one"), adjacency=adjacency)
    law = allocation_law(noise or 1.0, steps, adjacency)
    if direction is not None:
        check.choice(("remove", "add"), direction=direction)
        if adjacency == "replace_one" or epochs != 1:
            raise ValueError(
                f"direction must be None for {adjacency} and {epochs} epochs (got {direction!r})"
            )
    return None if noise == 0 and epochs else ((law, epochs),)
