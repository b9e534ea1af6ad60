"""A point that is deep among m private points of which a record moves one: a check, and the exponential mechanism.

    D(y) = min over axes of min(#{i : z_ij <= y_j}, #{i : z_ij >= y_j}), (m + 1)/2     axis-aligned Tukey depth
    P(y) ~ b^D(y) on {D >= t}

S_i = {D >= i} is a box between the i-th smallest and i-th largest numbers of each axis, and V_i its number of points.
Before a point is drawn, the distance

    k = max {k <= t - 2 : V_(t-1-k) <= g b^h V_(t+k+h) for an h >= 0},   or -1

to sets whose deep boxes are small beside the next ones is compared with a threshold, with noise; it moves by at most 1.

All numbers are integers: points, volumes, odds, noise and draws are exact, and no law is rounded. Differs from the
paper (Amin et al. 2022) in: the lattice; the constants, which are derived in docs/proofs/tukey.md.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

from torch_dpsco.mechanisms.discrete import draw_laplace
from torch_dpsco.rng import Source, Stream, stream_of
from torch_dpsco.theory.linear.tukey import TukeyNumbers

BITS = 200  # the lattice is that of multiples of 2^-BITS, up to 2^BITS


def on_lattice(value: float) -> int:
    """Returns a number in units of 2^-200, cut at 2^200; 0 for NaN. NOT private."""
    if math.isnan(value):
        return 0
    return int(max(-(2.0**BITS), min(value, 2.0**BITS)) * 2.0**BITS)


def from_lattice(number: int) -> float:
    """Returns the nearest double."""
    return float(Fraction(number, 2**BITS))


class Boxes:
    """The boxes S_1, S_2, ... of a set of points. NOT private.

    Args:
        points: (m, d) integers.

    Example:
        >>> boxes = Boxes([[0, 0], [4, 1], [1, 9], [2, 2], [9, 3]])
        >>> boxes.volumes
        [0, 100, 12, 1]
    """

    def __init__(self, points: Sequence[Sequence[int]]) -> None:
        self.axes = [sorted(axis) for axis in zip(*points, strict=True)]
        # of S_0 nothing is asked; deeper boxes, of equal points, are not told apart
        levels = range(1, (len(points) + 1) // 2 + 1)
        self.volumes = [0] + [math.prod(high - low + 1 for low, high in self.box(i)) for i in levels]

    def box(self, depth: int) -> list[tuple[int, int]]:
        """Returns the ends of S_depth on each axis, depth >= 1."""
        return [(axis[depth - 1], axis[-depth]) for axis in self.axes]

    def distance(self, numbers: TukeyNumbers) -> int:
        """Returns k."""
        t, volumes, (up, down) = numbers.depth, self.volumes, Fraction(numbers.base).as_integer_ratio()
        rarity, room = Fraction(numbers.rarity), len(volumes) - t
        ups, downs = ([factor**h for h in range(room)] for factor in (up, down))

        def far(k: int) -> bool:
            wanted = volumes[t - 1 - k] * rarity.denominator
            inner = volumes[t + k :]
            return any(wanted * downs[h] <= rarity.numerator * ups[h] * inner[h] for h in range(len(inner) - 1, -1, -1))

        # monotone: boxes of larger k are larger without, and smaller within
        return bisect.bisect_left(range(t - 1), True, key=lambda k: not far(k)) - 1

    def law(self, numbers: TukeyNumbers) -> list[int]:
        """Returns the odds of the boxes S_t, S_(t+1), ..., of which one is chosen, and a point of it with equal odds.

        A point of depth D is in S_t, ..., S_D: with (b^i - b^(i-1)) V_i for i > t, and b^t V_t, it has the odds b^D.
        """
        t, (up, down) = numbers.depth, Fraction(numbers.base).as_integer_ratio()
        top = len(self.volumes) - 1
        odds = [up ** (i - t) * down ** (top - i) for i in range(t, top + 1)]
        shares = [odds[0]] + [one - before for before, one in pairwise(odds)]
        return [share * volume for share, volume in zip(shares, self.volumes[t:], strict=True)]


def draw_deep(points: Sequence[Sequence[int]], numbers: TukeyNumbers, source: Source) -> list[int] | None:
    """Returns a deep point, or None where the check has failed. Charges nothing.

    Args:
        points: (m, d) integers, m that of the numbers.
        numbers: public.
        source: of noise and draw; from `torch_dpsco.rng.noise_generator`.

    Guarantee:
        (numbers.epsilon, numbers.delta)-DP where neighbors differ in one point.

    Source: docs/proofs/tukey.md
    """
    if len(points) != numbers.parts or not 2 <= numbers.depth <= (numbers.parts + 1) // 2:
        raise ValueError(f"points must be {numbers.parts}, more than twice their depth (got {len(points)})")
    boxes = Boxes(points)
    noise = draw_laplace(numbers.scale, 1, source)
    # PRIVACY: else a changed point may empty the deep boxes (test_models_that_disagree_give_the_answer_none)
    if boxes.distance(numbers) + noise < numbers.threshold:
        return None
    ends, stream = list(accumulate(boxes.law(numbers))), stream_of(source)
    depth = numbers.depth + bisect.bisect_right(ends, _below(ends[-1], stream))
    return [low + _below(high - low + 1, stream) for low, high in boxes.box(depth)]


def _below(limit: int, stream: Stream) -> int:
    """Returns a uniform integer in 0..limit - 1."""
    width = (limit - 1).bit_length()
    while (number := stream.integer(width)) >= limit:
        pass
    return number
