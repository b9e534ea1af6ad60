"""Streams of noise and batches for tests: repeatable ones, and such that count what is drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from torch_dpsco.accounting.designs import Design
from torch_dpsco.noise import Repeatable, Source, Stream, normal_
from torch_dpsco.sampling import make_sampler, samplers


class Counted(Stream):
    """Notes how many bytes are drawn from another stream."""

    def __init__(self, inner: Stream) -> None:
        self.inner, self.device, self.drawn = inner, inner.device, 0

    def read(self, size: int) -> bytes:
        self.drawn += size
        return self.inner.read(size)


class Bytes(Stream):
    """Gives the same byte for ever."""

    def __init__(self, value: int) -> None:
        self.value = value

    def read(self, size: int) -> bytes:
        return bytes([self.value]) * size


class Picked(Stream):
    """Gives bytes of a generator of numpy's."""

    def __init__(self, generator: np.random.Generator) -> None:
        self._generator = generator

    def read(self, size: int) -> bytes:
        return self._generator.bytes(size)


def seeded(seed: int) -> Repeatable:
    """Returns a repeatable stream of noise."""
    return Repeatable(torch.Generator().manual_seed(seed))


def picks(seed: int) -> Picked:
    """Returns a repeatable stream of batches."""
    return Picked(np.random.default_rng(seed))


def seeded_sampler(design: Design, *, seed: int, **more: Any) -> Any:
    """Returns a sampler of a design that draws the same each time."""
    stream = Picked(np.random.Generator(np.random.PCG64DXSM(seed)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samplers, "sampling_generator", lambda: stream)
        return make_sampler(design, **more)


def count_noise(opt: Any) -> Counted:
    """Counts what the optimizer's noise is made of, from now on."""
    opt._noise = Counted(opt._noise)
    return opt._noise


def gaussians(
    size: int, source: Source, std: float = 1.0, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Returns (size,) Gaussians."""
    return normal_(torch.empty(size, dtype=dtype), std, source)
