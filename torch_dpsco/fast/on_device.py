"""Noise that is drawn where the sum lies: on CUDA, by a kernel of Triton, in place of copies from the host.

Each call has a key of its own, 256 bits of the operating system's, which goes to the device and is overwritten there
and on the host when the kernel has run; the keystream itself never leaves the device's registers. Nothing waits for
the device. Where Triton is missing, does not run, or does not give the numbers that it must, noise comes from the host.

The law, and its distance from the Gaussian, are those of the host: docs/proofs/noise.md#on-a-gpu.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from torch_dpsco import native
from torch_dpsco.errors import PrivacyError
from torch_dpsco.trial import Refused, attempt

LANES = 128  # blocks of the keystream in a program
NUMBERS = 10  # of a block
_MOST = 2**30  # numbers of a label
# the first word of a key, of which the third pair of the first block is at an edge, and the numbers of that block
_KNOWN = 621285
_ANSWERS = (
    -0.0632944,
    0.6706279,
    2.0363450,
    -1.0730655,
    0.9602539,
    -1.0167040,
    0.4983535,
    5.6200524,
    -1.4430724,
    0.0494702,
)
_OFF = 2.0**-18  # how far from these a kernel may be


class Keys(Protocol):
    """Where keys come from."""

    label: int  # of the first tensor

    def fill(self, memory: memoryview) -> None:
        """Writes fresh bytes into memory."""


def add_normal_(outs: Sequence[Tensor], std: float, keys: Keys) -> bool:
    """Adds independent numbers N(0, std^2) where the device of tensors can draw them; returns whether it has.

    Args:
        outs: at least one, on one device; float32, side by side.
        std: in (2^-100, 2^100); rounded up to float32.
        keys: where its key comes from.

    Raises:
        PrivacyError: a CUDA graph is being captured.
    """
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        # PRIVACY: a replay would draw the same noise again (test_noise_is_not_captured_in_a_graph)
        raise PrivacyError(
            "noise must not be captured in a CUDA graph, which would repeat it: capture forward and"
            " backward only, and call step() outside"
        )
    device = outs[0].device
    if status(device) != IN_USE:
        return False
    # PRIVACY: float32 would round it down (test_a_standard_deviation_is_not_rounded_down_on_its_way_to_the_kernel)
    scale = std * (1.0 + 2.0**-22)
    with _fresh_key(device, keys) as key:
        parts = (part for out in outs for part in out.split(_MOST))
        for label, part in enumerate(parts, keys.label):
            draw(part, scale, key, label)
    return True


IN_USE = "in use"


@lru_cache
def status(device: torch.device) -> str:
    """Returns "in use", or why the noise of a device comes from the host."""
    if off := native.switched_off():
        return off
    found = attempt("the kernel", lambda: _tried(device))
    # PRIVACY: what another compiler makes of the kernel may be no noise (test_a_kernel_of_other_numbers_is_not_used)
    if isinstance(found, Refused) or not found <= _OFF:
        return f"not used: {found if isinstance(found, Refused) else 'its numbers are wrong'}"
    return IN_USE


def _tried(device: torch.device) -> float:
    """Returns how far the numbers of a device are from those of a key that is known."""
    key = torch.zeros(8, dtype=torch.int32, device=device)
    key[0] = _KNOWN
    out = torch.zeros(NUMBERS, device=device)
    draw(out, 1.0, key)
    return float((out.cpu() - torch.tensor(_ANSWERS)).abs().max())


@contextmanager
def _fresh_key(device: torch.device, keys: Keys) -> Iterator[Tensor]:
    """Gives a key on a device, which is overwritten at the end, there and on the host, when what was begun is done."""
    host = torch.zeros(8, dtype=torch.int32, pin_memory=device.type == "cuda")
    keys.fill(host.numpy().data)
    key = host.to(device, non_blocking=True, copy=True)
    try:
        yield key
    finally:
        # PRIVACY: who finds the key can subtract the noise (test_keys_are_overwritten)
        key.zero_()
        host.copy_(key, non_blocking=True)


def draw(out: Tensor, scale: float, key: Tensor, label: int = 0) -> None:
    """Adds the numbers of a key and a label to at most 2^30 numbers; see `kernels.add_gaussians`."""
    from torch_dpsco.fast.kernels import add_gaussians

    size = out.numel()
    with torch.cuda.device_of(out):
        if size:
            programs = -(-size // (NUMBERS * LANES))
            add_gaussians[(programs,)](out, size, scale, key, label, LANES)
