"""Kinds that are not the library's are tried on synthetic records before they see real ones."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torch_dpsco.errors import PrivacyError
from torch_dpsco.rows.base import FLOAT64
from torch_dpsco.rows.layers.recorded import Use, plain_forward
from torch_dpsco.rows.precision import slack

_RECORDS = 3


@torch.no_grad()
def try_rows(layer: Any, x: Tensor) -> None:
    """Raises PrivacyError unless a layer gives for each of some made-up records what autograd gives for it alone.

    Args:
        layer: recorded.
        x: its input, of which shape, dtype and device are taken, and no value.
    """
    kind, name = layer.kind, type(layer.kind).__name__
    if not x.is_floating_point():
        raise ValueError(f"input of a registered layer must be floating point, to try {name} on made-up numbers")
    numbers = torch.Generator()  # the same in every trial
    made = torch.randn(_RECORDS, *x.shape[1:], generator=numbers).to(x).requires_grad_()
    with torch.enable_grad():
        seen = kind.prepare(layer, made)
    out, *saved = kind.forward(layer, seen.detach(), layer.weight, layer._parameters.get("bias"))
    grad = torch.randn(out.shape, generator=numbers).to(out)
    use = Use(layer, seen.detach(), layer.weight.detach(), tuple(saved), grad)
    found = [out, *torch.autograd.grad(seen, made, kind.input_gradient(use)), *_rows(use, name)]
    params = [layer.get_parameter(part) for part, trained in use.trained.items() if trained]
    alone = [_alone(layer, made[i : i + 1], grad[i : i + 1], params) for i in range(_RECORDS)]
    expected = [torch.cat(parts) for parts in zip(*alone, strict=True)]
    expected[2:] = [part * use.scale for part in expected[2:]]
    sizes = [float(torch.linalg.vector_norm(part.double())) for part in expected]
    labels = ["outputs", "input gradients", *("rows" for _ in params)]
    if [part.shape for part in found] != [part.shape for part in expected]:
        raise PrivacyError(f"{name} must give one row per record, of the shapes of weight and bias (docs/your_own.md)")
    for label, ours, theirs, size in zip(labels, found, expected, sizes, strict=True):
        error = float(torch.linalg.vector_norm(ours.double() - theirs.double()))
        if not error <= slack(out.dtype) * (size + 1e-3 * math.hypot(*sizes)):
            raise PrivacyError(
                f"{label} of {name} must be those of autograd for each record alone (off by {error:.2g} on made-up "
                f"records, where {size:.2g} is their size): see docs/your_own.md"
            )


def _rows(use: Use, name: str) -> list[Tensor]:
    """Returns the rows, (B, *shape) for each trained parameter, as releases read them."""
    found, one = [], torch.ones(1, dtype=torch.float64, device=use.x.device)
    for block in use.layer.kind.rows(use).blocks(**use.trained):
        places = torch.arange(len(block), device=one.device).split(1)
        each = [block.select(place).weighted_sum(one, FLOAT64) for place in places]
        rows = [torch.stack(parts) for parts in zip(*each, strict=True)]
        lengths = torch.cat([part.flatten(1) for part in rows], dim=1).norm(dim=1)
        if not bool((lengths <= block.norms() * (1.0 + 2.0**-40)).all()):
            raise PrivacyError(f"norms of {name} must be upper bounds of those of its rows (docs/your_own.md)")
        found += rows
    return found


def _alone(layer: Any, x: Tensor, grad: Tensor, params: list[Tensor]) -> list[Tensor]:
    """Returns output, gradient in the input and in the parameters of one record, each with a dimension of 1 before."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        out = plain_forward(layer)(x)
    gradients = torch.autograd.grad(out, [x, *params], grad)
    return [out.detach(), gradients[0], *(part.unsqueeze(0) for part in gradients[1:])]
