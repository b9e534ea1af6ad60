"""Randomized smoothing: gradients at theta + y, y uniform in a ball, in a loop of your own or in a private run.

Randomized smoothing: gradients at theta + y, y uniform in a ball, so that a loss with kinks is smooth on average.

The joint vector of all parameters is shifted by y = r U^(1/d) g/|g|, g standard normal, U uniform: the uniform law on
the ball of radius r of R^d. Three ways, in the order in which they should be tried:

* one y for all items of a step, by the usual backward pass, unbiased for the smoothed loss: `UserFilteredSGD` does it
  with `smoothing=`, as any private optimizer whose `Phase` has it; `shifted` does it in a loop of your own.
* `perturbed_logits`: a fresh y for each item of a linear model, at the price of a few numbers each. With Y the shift of
  the (K, p) weights, D = K p, the exact joint law of the K logits of an item x is

      Y x = r |x| U^(1/D) g_K / sqrt(|g_K|^2 + chi^2_(D-K)),   g_K ~ N(0, I_K).

* `perturbed_gradients`: a fresh y for each item of any model, in memory items x parameters, in chunks;
  `perturbed_backward` leaves them where private optimizers look.

y does not depend on the data, so that the gradient at theta + y is just another query: privacy does not change, and y
may even be published. What the shift costs and buys: `theory.smoothing`.

Differs from the paper in: 1. one y per step is the default, for it has the same rate; 2. smoothing is off by default,
since it does not improve the rate (docs/errata.md, paper 3, E10); 3. Y x is drawn itself, not Y.

Source: docs/proofs/holder.md#randomized-smoothing; Asi and Liu 2023, Algorithm 3.

Randomized smoothing of a private run: between steps the parameters hold w + y, y drawn anew, not the iterate w.

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

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from torch_dpsco import _validate as check
from torch_dpsco import compat
from torch_dpsco.noise import normal_, uniform
from torch_dpsco.rng import Source, noise_generator
from torch_dpsco.rows import has_rows
from torch_dpsco.rules.base import State


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
    return [part[0] for part in _shifts(params, radius, 1, generator)]


@contextmanager
def shifted(params: Sequence[Tensor], radius: float, generator: Source) -> Iterator[None]:
    """Shifts the parameters within the block, by one draw of `ball_shift`, and puts them back exactly.

    Forward and backward pass go inside, the optimizer's step outside.

    Example:
        >>> model = nn.Linear(2, 1)
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


def perturbed_logits(
    logits: Tensor, features: Tensor, radius: float, generator: torch.Generator, *, bias: bool = True
) -> Tensor:
    """Returns the logits of a linear model whose weights are shifted anew for each item.

    Backpropagated, a loss of them has the per-item gradient (dl/dlogits at theta x + Y x) x^T.

    Args:
        logits: (B, K), from one `nn.Linear` on the features.
        features: (B, p).
        radius: r >= 0.
        generator: on the device of the logits; see `ball_shift`.
        bias: whether the layer has a bias, which is shifted as the weight of a feature 1.

    Raises:
        ValueError: shapes do not agree, or the radius is out of range.

    Source: docs/proofs/holder.md#randomized-smoothing.

    Example:
        >>> layer, x = nn.Linear(3, 2), torch.ones(5, 3)
        >>> moved = perturbed_logits(layer(x), x, 0.5, torch.Generator()) - layer(x)
        >>> moved.shape, bool((moved.norm(dim=1) <= 0.5 * 2 + 1e-6).all())
        (torch.Size([5, 2]), True)
    """
    r = check.nonnegative(radius=radius)
    if logits.ndim != 2 or features.ndim != 2 or len(logits) != len(features):
        raise ValueError(
            f"logits must be (B, K) and features (B, p) (got {tuple(logits.shape)} and {tuple(features.shape)})"
        )
    count, k = logits.shape
    others = k * (features.shape[1] + bias) - k  # coordinates of Y beside those that the item sees
    g = torch.randn(count, k, generator=generator, dtype=torch.float64, device=logits.device)
    squares = g.square().sum(1)
    if others > 0:
        halves = torch.full_like(squares, others / 2)
        squares = squares + 2 * compat.standard_gamma(halves, generator=generator)  # chi^2: sums of squares
    share = torch.rand(count, generator=generator, dtype=torch.float64, device=logits.device).pow(1 / (k + others))
    lengths = (features.detach().double().square().sum(1) + bias).sqrt()
    return logits + (g * (r * lengths * share / squares.sqrt())[:, None]).to(logits.dtype)


def perturbed_gradients(
    model: nn.Module,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    inputs: Tensor,
    targets: Tensor,
    *,
    radius: float,
    generator: Source,
    chunk_size: int = 64,
) -> list[Tensor]:
    """Returns the gradient of each item's loss, each at parameters shifted anew.

    Args:
        model: any that `torch.func.vmap` takes; not attached.
        loss_fn: loss_fn(model(inputs), targets) of a batch of one.
        inputs: (B, ...).
        targets: (B, ...).
        radius: r >= 0.
        generator: see `ball_shift`.
        chunk_size: items at a time; a chunk holds the shifts, parameters and gradients of its items.

    Returns:
        One (B, *p.shape) tensor for each parameter that requires a gradient, in order.

    Raises:
        ValueError: an argument is out of range, or numbers of inputs and targets differ.

    Source: docs/proofs/holder.md#randomized-smoothing.

    Example:
        >>> rows = perturbed_gradients(nn.Linear(3, 1), nn.functional.mse_loss, torch.ones(5, 3), torch.zeros(5, 1),
        ...                            radius=0.1, generator=torch.Generator())
        >>> [tuple(part.shape) for part in rows]
        [(5, 1, 3), (5, 1)]
    """
    size = check.positive_count(chunk_size=chunk_size)
    if len(inputs) != len(targets):
        raise ValueError(f"inputs and targets must be as many (got {len(inputs)} and {len(targets)})")
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    params = tuple(trained.values())

    def item_loss(values: tuple[Tensor, ...], x: Tensor, y: Tensor) -> Tensor:
        return loss_fn(functional_call(model, dict(zip(trained, values, strict=True)), (x[None],)), y[None])

    item_gradients = vmap(grad(item_loss))
    chunks: list[tuple[Tensor, ...]] = [tuple(p.new_zeros(0, *p.shape) for p in params)]
    for x, y in zip(inputs.split(size), targets.split(size), strict=True):
        shifts = _shifts(params, radius, len(x), generator)
        if len(x):
            chunks.append(item_gradients(tuple(p + shift for p, shift in zip(params, shifts, strict=True)), x, y))
    return [torch.cat(parts) for parts in zip(*chunks, strict=True)]


def perturbed_backward(
    model: nn.Module,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    inputs: Tensor,
    targets: Tensor,
    *,
    radius: float,
    generator: Source,
    chunk_size: int = 64,
) -> None:
    """Does what a backward pass of the sum of losses does, each item at parameters shifted anew.

    The rows are left in `p.grad_sample`, where a private optimizer takes them in place of those of an attached model.

    Args:
        model: see `perturbed_gradients`; not attached.
        loss_fn: see there.
        inputs: (B, ...).
        targets: (B, ...).
        radius: r >= 0.
        generator: see `ball_shift`.
        chunk_size: items at a time.

    Raises:
        ValueError: as `perturbed_gradients`; or rows are there that no step has used.

    Example:
        >>> model = nn.Linear(3, 1)
        >>> perturbed_backward(model, nn.functional.mse_loss, torch.ones(5, 3), torch.zeros(5, 1), radius=0.1,
        ...                    generator=torch.Generator())
        >>> tuple(model.weight.grad_sample.shape)
        (5, 1, 3)
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if has_rows(trained):
        # PRIVACY: they may be those of other items (test_rows_that_no_step_has_used_are_not_overwritten)
        raise ValueError("model must have no rows that no step has used: call optimizer.step() or zero_grad() first")
    rows = perturbed_gradients(
        model, loss_fn, inputs, targets, radius=radius, generator=generator, chunk_size=chunk_size
    )
    for p, part in zip(trained, rows, strict=True):
        p.grad_sample, p.dpsco_mean = part, False  # type: ignore[attr-defined]


def _shifts(params: Sequence[Tensor], radius: float, count: int, generator: Source) -> list[Tensor]:
    """Returns `count` independent shifts of the joint vector: (count, *p.shape) for each parameter."""
    r, dim = check.nonnegative(radius=radius), sum(p.numel() for p in params)
    if not dim:
        raise ValueError("params must hold at least one number (got none)")
    device = params[0].device
    g = normal_(torch.empty(count, dim, dtype=torch.float64, device=device), 1.0, generator)
    lengths = r * uniform((count, 1), generator).to(device).pow(1 / dim)
    joint = g * (lengths / g.norm(dim=1, keepdim=True))
    parts = joint.split([p.numel() for p in params], dim=1)
    return [part.reshape(count, *p.shape).to(p) for part, p in zip(parts, params, strict=True)]


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
