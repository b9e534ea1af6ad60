"""Binomial noise from uniform bits, by integers alone.

The bits that users add to a shuffled sum are many, and only their number counts. It is drawn by inversion: a table
holds the binomial distribution function in units of 2^-124, computed in integers, and a uniform integer of 124 bits is
looked up in it. So the law drawn differs from Bin(N, p) by at most 2^-110 at any point, and by less than 2^-100 in
total variation.

Floating-point samplers (`torch.binomial`) evaluate N log(...) and err by about N 2^-53 in the logarithm of the law, so
that the noise would depend on how a platform rounds.

Proof: docs/proofs/heavy_tailed.md#binomial-table.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.errors import InfeasibleError
from torch_dpsco.noise import words
from torch_dpsco.rng import Source

_WORD = 62  # bits of a half: what an int64 holds with room to compare
_ONE = 1 << (2 * _WORD)
_GUARD = 128  # more bits, for the recurrence
_LARGEST = 2 * 10**10  # trials: a table of two million points


class BinomialNoise:
    """Draws from Bin(N, p).

    Args:
        trials: N >= 0, at most 2 10^10.
        noise_probability: p in (0, 1).

    Example:
        >>> noise = BinomialNoise(1000, 0.5)
        >>> counts = noise.draw((20000,), torch.Generator().manual_seed(0))
        >>> counts.dtype, abs(counts.double().mean().item() - 500) < 0.6
        (torch.int64, True)
    """

    def __init__(self, trials: int, noise_probability: float) -> None:
        self.trials = check.count(trials=trials)
        self.noise_probability = check.open_interval(0.0, 1.0, noise_probability=noise_probability)
        if self.trials > _LARGEST:
            raise InfeasibleError(f"trials must be at most {_LARGEST} to be drawn (got {trials})")
        self._first, self._high, self._low = _table(self.trials, self.noise_probability)

    def draw(self, shape: tuple[int, ...], generator: Source) -> Tensor:
        """Returns independent draws: int64, on the generator's device."""
        if not self.trials:
            return torch.zeros(shape, dtype=torch.int64, device=generator.device)
        high = self._high.to(generator.device)
        top = words(shape, _WORD, generator)
        # the number drawn is that of entries <= the uniform integer; most are decided by its upper half
        index = torch.searchsorted(high, top)
        undecided = (index < len(high)) & (high[index.clamp(max=len(high) - 1)] == top)
        for place in undecided.nonzero():
            where = tuple(place.tolist())
            # PRIVACY: the lower half decides ties (test_the_noise_is_binomial_to_all_its_bits)
            bottom = words((), _WORD, generator)
            tied = self._low[self._high.numpy() == int(top[where])]
            index[where] += int(np.searchsorted(tied, int(bottom), side="right"))
        return index + self._first

    def probabilities(self) -> dict[int, float]:
        """Returns the law that is drawn, by its 124-bit table."""
        ends = [(int(h) << _WORD) + int(low) for h, low in zip(self._high.tolist(), self._low.tolist(), strict=True)]
        edges = [0, *ends, _ONE]
        return {self._first + k: (edges[k + 1] - edges[k]) / _ONE for k in range(len(edges) - 1)}


def _table(trials: int, p: float) -> tuple[int, Tensor, np.ndarray[tuple[int, ...], np.dtype[np.int64]]]:
    """Returns the least number drawn and, split in two halves, P(Y <= y) in units of 2^-124 for all y but the last."""
    won, whole = p.as_integer_ratio()
    lost = whole - won
    mode = min(trials, (trials + 1) * won // whole)
    start = 1 << (2 * _WORD + _GUARD)
    above, y, weight = [], mode, start
    while y < trials and weight:  # w(y + 1) / w(y) = (N - y) p / ((y + 1) (1 - p))
        weight = weight * (trials - y) * won // ((y + 1) * lost)
        y += 1
        above.append(weight)
        if weight >> (_GUARD - 16) == 0:
            break
    below, y, weight = [], mode, start
    while y > 0 and weight:
        weight = weight * y * lost // ((trials - y + 1) * won)
        y -= 1
        below.append(weight)
        if weight >> (_GUARD - 16) == 0:
            break
    weights = [*reversed(below), start, *above]
    total, running = sum(weights), 0
    high, low = np.empty(len(weights) - 1, dtype=np.int64), np.empty(len(weights) - 1, dtype=np.int64)
    for k, weight in enumerate(weights[:-1]):
        running += weight
        high[k], low[k] = divmod(running * _ONE // total, 1 << _WORD)
    return mode - len(below), torch.from_numpy(high), low
