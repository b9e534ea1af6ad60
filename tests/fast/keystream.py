"""ChaCha20 (RFC 8439) in numpy, and what the kernel for noise must make of its words, in arithmetic of 400 bits."""

from __future__ import annotations

from typing import Any

import mpmath
import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]
CONSTANTS = np.frombuffer(b"expand 32-byte k", np.uint32)
QUARTERS = (
    *((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)),
    *((0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14)),
)


def keystream(key: bytes, counters: Words, nonce: tuple[int, int, int] = (0, 0, 0)) -> Words:
    """Returns the words of blocks, (16, L)."""
    fixed = np.concatenate([CONSTANTS, np.frombuffer(key, np.uint32)])[:, None]
    last = np.array(nonce, np.uint32)[:, None]
    parts = [fixed + 0 * counters, counters[None], last + 0 * counters]
    start = np.concatenate(parts).astype(np.uint32)
    x = start.copy()
    for _ in range(10):
        for a, b, c, d in QUARTERS:
            for place, other, turned, bits in (
                *((a, b, d, 16), (c, d, b, 12)),
                *((a, b, d, 8), (c, d, b, 7)),
            ):
                x[place] += x[other]
                mixed = x[turned] ^ x[place]
                x[turned] = mixed << np.uint32(bits) | mixed >> np.uint32(32 - bits)
    return x + start


def ideal(words: list[int], more: Any) -> tuple[list[float], list[float]]:
    """Returns the ten numbers of a block, cosines first, and the radius of each.

    Args:
        words: 16 of them.
        more: a function from the number of a pair, 1 to 5, to the 16 words of its own block.
    """
    cosines, sines, radii = [], [], []
    for pair in range(5):
        low, high, turn = words[3 * pair : 3 * pair + 3]
        v = (low | high << 32) | 1
        near = min(v, 2**64 - v)
        logarithm = mpmath.log(mpmath.mpf(v) / 2**64)
        if near < 2**44:
            further = sum(
                word << 32 * place for place, word in enumerate(_order(more(pair + 1)))
            )
            d = mpmath.mpf(2 * ((near >> 1 << 192) + further) + 1) / mpmath.mpf(2) ** 256
            logarithm = mpmath.log(d) if v < 2**63 else mpmath.log1p(-d)
        radius = mpmath.sqrt(-2 * logarithm)
        angle = 2 * mpmath.pi * turn / 2**32
        cosines.append(float(radius * mpmath.cos(angle)))
        sines.append(float(radius * mpmath.sin(angle)))
        radii.append(float(radius))
    return cosines + sines, radii + radii


def _order(words: list[int]) -> list[int]:
    """Returns the words of 192 bits, the least first: the kernel's first two are the highest."""
    return [words[4], words[5], words[2], words[3], words[0], words[1]]
