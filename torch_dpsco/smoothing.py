"""Randomized smoothing: gradients at w + y, y uniform in a ball and drawn anew in each step, for losses with kinks.

The joint vector of all parameters is shifted by y = r U^(1/d) g/|g|, g standard normal, U uniform: the uniform law on
the ball of radius r of R^d. y depends on nothing else, so that the gradient at w + y is just another query: the event
of a step is what it is without, and y may even be published. What the shift costs and buys: `theory.smoothing`.

Private optimizers do it in phases that have `Phase(smoothing=)`, as `UserFilteredSGD` with `smoothing=`; `shifted` does
it in a loop of your own. In a private run the parameters hold w + y between steps, not the iterate w, which is kept in
the optimizer's state, so that a checkpoint of model and optimizer continues exactly.

| parameters at `lift` | taken for the iterate |
|---|---|
| as `place` left them | what they were before |
| written to since (weights loaded) | what they hold now |

Differs from the paper in: 1. one y for all items of a step, which is unbiased for the smoothed loss at the same rate;
2. smoothing is off by default, since it does not improve the rate (docs/errata.md, paper 3, E10).

Source: docs/proofs/holder.md#randomized-smoothing; Asi and Liu 2023, Algorithm 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.noise import normal_, uniform
from torch_dpsco.rng import Source, noise_generator
from torch_dpsco.rules import State


def ball_shift(params: Sequence[Tensor], radius: float, generator: Source) -> list[Tensor]:
    """Returns a shift of each parameter; together they are uniform in the ball of the radius (up to rounding).

    Args:
        params: the parameters, one joint vector; only shapes, dtypes and devices are read.
        radius: r >= 0.
        generator: on the device of the parameters, not that of the noise, and no function of the data.

    Raises:
        ValueError: the radius is out of range, or there are no parameters.

    Source: docs/proofs/holder.md#randomized-smoothing.

    Example:
        >>> shift = ball_shift([torch.zeros(2, 3), torch.zeros(3)], 0.5, torch.Generator())
        >>> [part.shape for part in shift], sum(float(part.square().sum()) for part in shift) <= 0.25
        ([torch.Size([2, 3]), torch.Size([3])], True)
    """
    r, dim = check.nonnegative(radius=radius), sum(p.numel() for p in params)
    if not dim:
        raise ValueError("params must hold at least one number (got none)")
    device = params[0].device
    g = normal_(torch.empty(1, dim, dtype=torch.float64, device=device), 1.0, generator)
    length = r * uniform((1, 1), generator).to(device).pow(1 / dim)
    joint = (g * (length / g.norm(dim=1, keepdim=True)))[0]
    parts = joint.split([p.numel() for p in params])
    return [part.view(p.shape).to(p) for part, p in zip(parts, params, strict=True)]


@contextmanager
def shifted(params: Sequence[Tensor], radius: float, generator: Source) -> Iterator[None]:
    """Shifts the parameters within the block, by one draw of `ball_shift`, and puts them back exactly.

    Forward and backward pass go inside, the optimizer's step outside.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> before = model.weight.detach().clone()
        >>> with shifted(list(model.parameters()), 0.1, torch.Generator()):
        ...     model(torch.ones(4, 2)).abs().mean().backward()
        >>> torch.equal(model.weight, before)
        True
    """
    shift = ball_shift(params, radius, generator)
    kept = [p.detach().clone() for p in params]
    try:
        with torch.no_grad():
            for p, part in zip(params, shift, strict=True):
                p.add_(part)
        yield
    finally:
        with torch.no_grad():
            for p, before in zip(params, kept, strict=True):
                p.copy_(before)


class Shifts:
    """Moves parameters to random points around the iterate, and back.

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
