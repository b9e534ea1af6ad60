"""How many records to compute at once if a batch is cut into parts of one size and the last one is filled up.

A part of s records takes a time of about s + c records: c stands for what a part costs whatever its size (calls, and
kernels that are slow on few records). A batch of n records has ceil(n / s) parts: the expected time of a step is

    E[ceil(n / s)] (s + c)

with n of fixed size, or of the law of Poisson where sampling is; the sum of it over the draws of a plan. Large s means
few calls, and much filling for batches that are a little larger than a multiple of s: the minimum is a divisor for
fixed batches, and some standard deviations above the mean for small Poisson batches. All of this is public: design and
number of parameters.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from torch_dpsco.accounting.designs import Design, Poisson
from torch_dpsco.accounting.parts import Assigned, Parts

_CALL = 8  # c, in records: measured 1 for a transformer block and 15 for a small network of convolutions
_LEAST, _MOST = 8, 512  # records at once
_NUMBERS = 2**22  # in the rows of a part, 16 MiB of float32: past it they only cost memory
_UNKNOWN = 16  # records at once if nothing is known of batches


def micro_batch_size(
    model: nn.Module, design: Design | None, physical_batch_size: int | None = None
) -> int:
    """Returns the number of records to compute at once.

    Args:
        model: of whose trainable parameters each record has a row.
        design: how batches of records are drawn; None if that is not known.
        physical_batch_size: most records that come at once, see `PrivateOptimizer.loader`.

    Example:
        >>> from torch_dpsco.accounting.designs import Full
        >>> model = nn.Linear(100, 10)
        >>> micro_batch_size(model, Full(64)), micro_batch_size(model, Poisson(64, 60_000))
        (64, 77)
    """
    dim = sum(p.numel() for p in model.parameters() if p.requires_grad)
    most = min(_MOST, max(_LEAST, _NUMBERS // max(dim, 1)))
    if design is None:
        return min(_UNKNOWN, most)
    plan = design.parts if isinstance(design, Parts) else ((design, 1),)

    def cost(size: int) -> float:
        parts = math.fsum(
            draws * _expected_parts(drawn, size, physical_batch_size) for drawn, draws in plan
        )
        return parts * (size + _CALL)

    return min(range(1, most + 1), key=cost)


def _expected_parts(design: Design, size: int, physical_batch_size: int | None) -> float:
    mean = design.batch_size
    if physical_batch_size is not None and physical_batch_size <= mean:  # most come in full ones
        return mean / physical_batch_size * math.ceil(physical_batch_size / size)
    return (
        _poisson_parts(mean, size)
        if isinstance(design, (Poisson, Assigned))
        else math.ceil(mean / size)
    )


def _poisson_parts(mean: int, size: int) -> float:
    """Returns E[ceil(n / size)] = sum over j >= 0 of P(n > j size)."""
    if mean > 32 * size:  # n mod size is nearly uniform
        return mean / size + 0.5
    last = mean + 10 * math.isqrt(mean) + 20  # past it P(n > last) does not count
    fewer = torch.arange(0, last, size, dtype=torch.float64)
    return float(torch.special.gammainc(fewer + 1.0, torch.full_like(fewer, mean)).sum())
