"""Randomized smoothing of a private run: between steps the parameters hold w + y, y drawn anew, not the iterate w.

y is uniform in a ball and depends on nothing else, so that the gradient at w + y is just another query: the event of a
step is what it is without. The iterate is kept in the optimizer's state, so that a checkpoint of model and optimizer
goes on exactly; y is no secret.

| parameters at `lift` | taken for the iterate |
|---|---|
| as `place` left them | what they were before |
| written to since (weights loaded) | what they hold now |

Differs from the paper in: one y for all items of a step, which is unbiased for the smoothed loss at the same rate.

Source: docs/proofs/holder.md#randomized-smoothing; Asi and Liu 2023, Algorithm 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_dpsco.rng import noise_generator
from torch_dpsco.rules.base import State
from torch_dpsco.smoothing import ball_shift


class Shifts:
    """Places parameters at random points around the iterate, and back.

    Args:
        device: of the parameters.
    """

    def __init__(self, device: torch.device) -> None:
        # PRIVACY: not the stream of the noise: shifts may be published (test_shifts_do_not_touch_the_noise)
        self._stream = noise_generator(device)

    def place(self, params: Sequence[Tensor], state: State, radius: float) -> None:
        """Moves the parameters, which hold the iterate, to a random point at most `radius` away, joint L2 norm."""
        if not params:
            return
        for p, shift in zip(params, ball_shift(params, radius, self._stream), strict=True):
            state[p]["iterate"], state[p]["shift"] = p.detach().clone(), shift
            p.add_(shift)

    def lift(self, params: Sequence[Tensor], state: State) -> None:
        """Puts the iterate back, exactly; nothing happens if that has been done already."""
        for p in params:
            kept = state.get(p, {})
            if "iterate" in kept and torch.equal(p, kept["iterate"] + kept["shift"]):
                p.copy_(kept["iterate"])
