"""Random generators keyed by the operating system's entropy, one per purpose.

Noise and sampling never share a stream and never use torch's global one. `torch.manual_seed` keeps 32 bits of a seed on
the CPU, so that noise could be enumerated; here all 624 words of the CPU generator's state come from the operating
system. No stream is ever saved: who replays noise can subtract it.
"""

from __future__ import annotations

import os
import warnings

import numpy as np
import torch

from torch_dpsco.errors import UtilityWarning

try:  # OpenSSL's AES-CTR generator, seeded by the operating system, is ten times as fast as the system calls
    from ssl import RAND_bytes as _random_bytes
except ImportError:  # a Python without OpenSSL
    _random_bytes = os.urandom

__all__ = ["noise_generator", "random_bytes", "rank_generator", "sampling_generator", "sampling_key"]

# Layout of the CPU generator's state: seed (8 bytes), left (4), seeded (4), next (8), then 624 words of 8 bytes each
# that hold 32 bits. `test_cpu_noise_generator_uses_every_state_word` fails if torch changes it.
_WORDS, _WORDS_OFFSET, _LEFT_OFFSET = 624, 24, 8


def random_bytes(size: int) -> bytes:
    """Returns that many bytes of a cryptographic generator that the operating system seeds; forks draw their own."""
    return _random_bytes(size)


def _fill_cpu_state(generator: torch.Generator) -> None:
    state = generator.get_state().numpy().copy()
    words = np.frombuffer(random_bytes(4 * _WORDS), dtype=np.uint32).astype(np.uint64)
    state[_WORDS_OFFSET : _WORDS_OFFSET + 8 * _WORDS] = words.view(np.uint8)
    state[_LEFT_OFFSET : _LEFT_OFFSET + 4] = np.array([1], dtype=np.int32).view(np.uint8)  # twist before the next draw
    generator.set_state(torch.from_numpy(state))


def noise_generator(device: torch.device | str = "cpu", generator: torch.Generator | None = None) -> torch.Generator:
    """Returns a generator for noise on a device.

    Args:
        device: where the noise is drawn. On the CPU 19,968 bits of entropy, elsewhere the 64 bits that a seed takes.
        generator: a generator of the caller's; it makes runs repeatable and warns.

    Raises:
        ValueError: the caller's generator is on another device.
    """
    device = torch.device(device)
    if generator is not None:
        if generator.device.type != device.type:
            raise ValueError(f"generator must be on {device.type}, where the parameters are (got {generator.device})")
        warnings.warn(
            "generator= makes the noise repeatable: whoever knows its seed can subtract the noise; for tests only",
            UtilityWarning,
            stacklevel=3,
        )
        return generator
    fresh = torch.Generator(device=device)
    # the sign bit is dropped: manual_seed takes a signed 64-bit integer
    fresh.manual_seed(int.from_bytes(random_bytes(8), "little") >> 1)
    if device.type == "cpu":
        _fill_cpu_state(fresh)
    return fresh


def sampling_generator(seed: int | None = None) -> np.random.Generator:
    """Returns a generator for drawing batches, from 256 bits of operating-system entropy unless a seed is given."""
    if seed is None:
        return np.random.Generator(np.random.PCG64DXSM(int.from_bytes(random_bytes(32), "little")))
    warnings.warn(
        "seed= makes the batches repeatable: amplification by sampling holds only while they are secret; tests only",
        UtilityWarning,
        stacklevel=3,
    )
    return np.random.Generator(np.random.PCG64DXSM(seed))


def sampling_key() -> bytes:
    """Returns 256 bits of operating-system entropy, from which processes derive the streams of their batches."""
    return random_bytes(32)


def rank_generator(key: bytes, rank: int) -> np.random.Generator:
    """Returns the generator for the batches of one of several processes that share a key.

    Args:
        key: 32 bytes of `sampling_key`, used for one sampler only.
        rank: of the process, >= 0; different ranks have distinct and independent streams.
    """
    if len(key) != 32:
        raise ValueError(f"key must have 32 bytes (got {len(key)})")
    # a pool of 8 words of 32 bits keeps the whole key; the default pool has 4
    seeds = np.random.SeedSequence(int.from_bytes(key, "little"), spawn_key=(rank,), pool_size=8)
    return np.random.Generator(np.random.PCG64DXSM(seeds))
