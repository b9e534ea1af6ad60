"""Streams of secret bits for noise and batches; earlier draws reveal nothing about later ones.

`Keystream` is the default everywhere: a cryptographic generator that the operating system seeds (AES-256 in counter
mode, by OpenSSL). It holds no state here, so that nothing can be saved, copied or pickled; a fork draws bytes of its
own. Statistical generators (torch's Mersenne Twister, numpy's PCG) are no substitute: their outputs are linear in, or
easily inverted to, a state of a few thousand bits, and the noise of one release reveals that of all others.

| stream | bits | for |
|---|---|---|
| `Keystream` | fresh for every call | noise, batches |
| `KeyedStream` | a function of 256 secret bits (SHAKE256; 256-bit security) | what is drawn twice alike: ranks, cuts |
| `Repeatable` | of a generator of the caller's, torch's or numpy's | tests: its seed reveals all |
"""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from hashlib import shake_256
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from torch_dpsco.errors import PrivacyError, UtilityWarning

try:  # ten times as fast as the system calls
    from ssl import RAND_bytes as _random_bytes
except ImportError:  # a Python without OpenSSL
    _random_bytes = os.urandom


def random_bytes(size: int) -> bytes:
    """Returns that many bytes of a cryptographic generator that the operating system seeds; forks draw their own."""
    return _random_bytes(size)


class Stream(ABC):
    """A source of random bits. SECRET: anybody who knows them can subtract the noise, or knows who was in a batch."""

    device = torch.device("cpu")  # where tensors of what is drawn belong

    @abstractmethod
    def read(self, size: int) -> bytes:
        """Returns the next `size` bytes, uniform and independent of all others."""

    def words(self, count: int) -> npt.NDArray[np.int64]:
        """Returns `count` uniform words of 64 bits, signed; read-only."""
        return np.frombuffer(self.read(8 * count), dtype=np.int64)

    def integer(self, bits: int) -> int:
        """Returns a uniform integer of that many bits, >= 0."""
        size = (bits + 7) // 8
        return int.from_bytes(self.read(size), "little") >> (8 * size - bits)

    def integers(self, limit: int, count: int) -> npt.NDArray[np.int64]:
        """Returns integers that are exactly uniform in 0..limit - 1, limit <= 2^63."""
        most = 2**64 // limit * limit - 1
        words = self.words(count).view(np.uint64)
        kept = [words[words <= most]]
        while (missing := count - sum(map(len, kept))) > 0:
            # PRIVACY: drawn again, not folded (test_integers_are_exactly_uniform)
            words = self.words(missing).view(np.uint64)
            kept.append(words[words <= most])
        return (np.concatenate(kept) % np.uint64(limit)).astype(np.int64)

    def permutation(self, size: int) -> npt.NDArray[np.int64]:
        """Returns 0..size - 1 in an order that is exactly uniform: by keys of 64 bits, all drawn again if two agree."""
        while True:
            keys = self.words(size)
            order = np.argsort(keys)
            ranked = keys[order]
            # PRIVACY: equal keys would be put in order of their places (test_permutations_are_exactly_uniform)
            if not (ranked[1:] == ranked[:-1]).any():
                return order

    def subset(self, size: int, count: int) -> npt.NDArray[np.int64]:
        """Returns `count` of 0..size - 1, sorted: a subset that is exactly uniform."""
        if 8 * count >= size:
            return np.sort(self.permutation(size)[:count])
        drawn = np.empty(0, dtype=np.int64)
        while True:
            # the first `count` different ones of independent draws
            drawn = np.concatenate([drawn, self.integers(size, count + count // 8 + 8)])
            found, places = np.unique(drawn, return_index=True)
            if len(found) >= count:
                return np.sort(drawn[np.sort(places)[:count]])


class Keystream(Stream):
    """Fresh bytes of the operating system's generator. No state: copies and forks draw bytes of their own.

    Args:
        device: where the tensors that are filled belong; bits are drawn on the host.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def read(self, size: int) -> bytes:
        """Returns fresh bytes."""
        return random_bytes(size)


class KeyedStream(Stream):
    """Bytes that every holder of the key draws alike: SHAKE256 of key, label and the number of the call.

    Args:
        key: 32 secret bytes.
        label: public; streams of different labels are distinct and independent.
    """

    def __init__(self, key: bytes, label: str) -> None:
        if len(key) != 32:
            raise ValueError(f"key must have 32 bytes (got {len(key)})")
        self._start = shake_256(key + label.encode())
        self._calls = 0

    def read(self, size: int) -> bytes:
        """Returns the next bytes."""
        block = self._start.copy()
        # PRIVACY: a fixed length, so that no call of one label is that of another
        # (test_no_call_of_a_keyed_stream_repeats_another)
        block.update(b"\0" + self._calls.to_bytes(8, "little"))
        self._calls += 1
        return block.digest(size)

    def __reduce__(self) -> NoReturn:
        # PRIVACY: a copy would draw the same bits (test_a_keyed_stream_is_not_copied)
        raise PrivacyError(
            "a keyed stream must not be copied or saved: its key is as confidential as the data"
        )


class Repeatable(Stream):
    """Bytes of the caller's own generator: not secret, for tests only.

    Args:
        generator: its seed, or enough of what it drew, reveals all of it.
    """

    def __init__(self, generator: torch.Generator | np.random.Generator) -> None:
        self._generator: Any = generator
        if isinstance(generator, torch.Generator):
            self.device = generator.device

    def read(self, size: int) -> bytes:
        """Returns the next bytes."""
        if isinstance(self._generator, np.random.Generator):
            return self._generator.bytes(size)
        words = torch.empty(-(-size // 8), dtype=torch.int64, device=self.device)
        words.random_(-(2**63), None, generator=self._generator)  # all 64 bits
        return words.cpu().numpy().tobytes()[:size]


Source = Stream | torch.Generator  # a generator as it is stands for `Repeatable`


def stream_of(source: Source) -> Stream:
    """Returns the stream of a source."""
    return source if isinstance(source, Stream) else Repeatable(source)


def noise_generator(
    device: torch.device | str = "cpu", generator: torch.Generator | None = None
) -> Stream:
    """Returns the stream of noise for tensors on a device.

    Args:
        device: of the tensors; on every device the bits come from the host.
        generator: a generator of the caller's; it makes runs repeatable and warns.

    Raises:
        ValueError: the caller's generator is on another device.
    """
    device = torch.device(device)
    if generator is None:
        return Keystream(device)
    if generator.device.type != device.type:
        raise ValueError(
            f"generator must be on {device.type}, where the parameters are (got {generator.device})"
        )
    warnings.warn(
        "generator= makes the noise repeatable: anybody who knows its seed can subtract the noise;"
        " for tests only",
        UtilityWarning,
        stacklevel=3,
    )
    return Repeatable(generator)


def sampling_generator(seed: int | None = None) -> Stream:
    """Returns the stream for drawing batches: the operating system's, unless a seed is given."""
    if seed is None:
        return Keystream()
    warnings.warn(
        "seed= makes the batches repeatable: amplification by sampling holds only while they are"
        " secret; tests only",
        UtilityWarning,
        stacklevel=3,
    )
    return Repeatable(np.random.Generator(np.random.PCG64DXSM(seed)))


def sampling_key() -> bytes:
    """Returns 256 fresh bits, from which processes derive the streams of their batches."""
    return random_bytes(32)


def rank_generator(key: bytes, rank: int) -> KeyedStream:
    """Returns the stream for the batches of one of several processes that share a key.

    Args:
        key: 32 bytes of `sampling_key`, used for one sampler only.
        rank: of the process, >= 0; different ranks have distinct and independent streams.
    """
    return KeyedStream(key, f"rank {rank}")
