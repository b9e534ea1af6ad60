"""Discrete Gaussian and Laplace noise without floating point: exact draws.

A Gaussian draw, of many at a time, is an integer x with P(x) proportional to exp(-x^2 / (2 m^2)), m = 2^p. All that
decides are integers.

The magnitude is |x| = k 2^b + j in one of 192 cells of width 2^b = m/16, or beyond them. A table of 2^16 equally likely
entries holds cell k c_k times, c_k >= N e^(-k^2/512), the tail once, and "again" for the rest; j has b uniform bits.
What was proposed is kept with probability

    a = N e^(-x^2 / (2 m^2)) / c_k <= 1,

decided by a number U, uniform in [0, 1), whose first 32 bits are drawn with the proposal: a has certified bounds, from
a table at the ends of 64 parts of each cell and the chord between them. Where U is too near to a for these (once in
about 10^7 draws), more bits of U are drawn and a is computed in long integers until it is decided. In the tail (12 m
and beyond) the cell is 192 + i with probability 2^-(i+1), and a = N 2^(i+1) e^(-x^2 / (2 m^2)).

Proof that the law is exact, if bytes are uniform and independent: x is proposed with probability c_k 2^-(16+b) (half of
it for each sign; 2^-(17+i+b) in the tail) and kept with probability a, hence drawn with one proportional to
e^(-x^2/(2 m^2)), x = 0 by one sign only. Proposals are independent, so that those left over may be thrown away.

Errors of the chord, in units of 2^-32 of a: e^(-s^2/2), s = (k + y)/16, has second derivative at most max(1, s^2)/256
of its value at y = 0, hence 2^-23 max(1, s^2) of error in 1/64 of a cell: 2 max(256, (k+1)^2) units. That y is cut to
24 bits moves a by (k + 1) units at most. Entries of the table are below a by less than 2, a shift is off by 1.

A Laplace draw is `step` times an integer k, with

    P(k) = (1 - e^(-1/t)) / (1 + e^(-1/t)) e^(-|k|/t),    t = scale / step.

Textbook samplers, the logarithm of a float uniform, leave out numbers and round the rest, so that which numbers can
occur at all depends on what the noise is added to. Here all arithmetic is on integers and fractions.

Proof that the law is exact, if the generator's bits are uniform and independent:

1. `_below(m)` keeps a uniform number of so many bits only if it is less than m: it is uniform, and coins are exact.
2. The first failure among coins of probability g/1, g/2, g/3, .. is at a place K with P(K > k) = g^k / k!, so that
   P(K odd) = sum_k (-g)^k / k! = e^-g.
3. With t = s/q, u uniform below s kept with probability e^(-u/s), and v the number of successes of probability e^-1
   before a failure, x = u + s v has P(x) proportional to e^(-x/s). So floor(x/q) = y has P(y) proportional to
   e^(-y q/s): the q terms of each y have the same sum up to this factor.
4. A fair sign, with everything drawn again at -0, gives the law above.

Consequences used elsewhere: a shift by a multiple of `step` costs exactly shift/scale in log probability, like that of
the continuous law; and the draw is at most `step` above a continuous Laplace number in stochastic order (see
`above_threshold`). Time and number of random bits depend on what is drawn: a side channel that is not closed. All
draws end with probability 1.

Source: docs/proofs/exact_gaussian.md, docs/proofs/accounting.md#discrete-laplace-noise; Canonne, Kamath and Steinke
2020 (the laws); Karney 2016 (sampling by cells).

Releases of one vector: Gaussian or K-norm noise, or exact noise on a public grid.

Exact releases are rounded to a public grid, and discrete noise is added in integers. What numbers can occur does not
depend on the data, and no law rests on the rounding of a sampler. See `analysis.rounding` for what is charged,
`step.exact_noise` for the draws.

Others are Gaussian, or of the K-norm mechanism, which is purely epsilon-private:

    density proportional to exp(-|z| / scale):  z = r g/|g|,  r ~ Gamma(d, scale),  g standard normal

Float64; floating-point attacks on the samplers are out of scope, as for all noise here.

Source: docs/proofs/output.md#k-norm-noise; Hardt and Talwar 2010.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.rounding import Grid, exact_grid
from torch_dpsco.accounting.events import Gaussian
from torch_dpsco.noise import Source, exponential_sum, gaussian_vector, random_bytes, stream_of

IntArray = NDArray[np.int64]
Read = Callable[[int], bytes]

LEAST_BITS = 4
MOST_BITS = 40
_CELLS = 192  # of the table
_N = 3180  # of the proof, the largest with sum c_k < 2^16
_TAIL = _CELLS
_AGAIN = _CELLS + 1
_FIXED = 160  # bits after the point of the table's exponentials
_BLOCK = 2**15  # proposals at a time, which stay in cache


def discrete_gaussian(size: int, bits: int, read: Read = random_bytes) -> IntArray:
    """Returns (size,) independent integers of law proportional to exp(-x^2 / (2 m^2)), m = 2^bits, exactly.

    Args:
        size: >= 0.
        bits: log2 of m, 4 to 40.
        read: returns that many uniform independent bytes, as `noise.Stream.read`.

    Raises:
        ValueError: an argument is out of range.

    Guarantee: added to an integer vector of L2 sensitivity D: (D^2 / (2 m^2))-zCDP; see `analysis.rounding`.

    Example:
        >>> x = discrete_gaussian(1000, 10)
        >>> x.dtype, bool(800 < np.sqrt(np.mean(x**2.0)) < 1250)
        (dtype('int64'), True)
    """
    size = check.count(size=size)
    if not LEAST_BITS <= check.count(bits=bits) <= MOST_BITS:
        raise ValueError(f"bits must be in {LEAST_BITS}..{MOST_BITS} (got {bits})")
    out = np.empty(size, dtype=np.int64)
    filled = 0
    while filled < size:
        proposals = min(_BLOCK, (size - filled) * 33 // 32 + 16)
        found = _accepted(proposals, bits, read)[: size - filled]
        out[filled : filled + len(found)] = found
        filled += len(found)
    return out


def _accepted(count: int, bits: int, read: Read) -> IntArray:
    """Returns the numbers that are left of so many proposals, in their order."""
    tables = _tables()
    b = bits - 4
    words = np.frombuffer(read(8 * count), dtype=np.uint64)
    uniform = np.frombuffer(read(4 * count), dtype=np.uint32)
    cell = tables.cell.take((words & np.uint64(0xFFFF)).view(np.int64))
    inside = (
        (words >> np.uint64(64 - b)).view(np.int64) if b else np.zeros(count, dtype=np.int64)
    )
    x = (cell.astype(np.int64) << b) | inside
    kept = uniform < tables.surely.take(cell)
    unsure = np.flatnonzero(~kept & (cell != _AGAIN))
    _decide(unsure, cell[unsure], inside[unsure], uniform[unsure], x, kept, bits, read)
    sign = -((words >> np.uint64(16)).view(np.int64) & 1)  # 0 or -1, for which x ^ -1 = -x - 1
    # PRIVACY: 0 must not be drawn by both signs (test_small_draws_have_exactly_the_law)
    kept &= (sign == 0) | (x != 0)
    return ((x ^ sign) - sign)[kept]


def _decide(
    places: NDArray[np.intp],
    cell: NDArray[np.uint8],
    inside: IntArray,
    uniform: NDArray[np.uint32],
    x: IntArray,
    kept: NDArray[np.bool_],
    bits: int,
    read: Read,
) -> None:
    """Decides the proposals at some places that are not surely kept: writes `kept`, and `x` of the tail."""
    tables = _tables()
    b = bits - 4
    y = inside << (24 - b) if b <= 24 else inside >> (b - 24)
    part = y >> 18
    rest = y & (2**18 - 1)
    low = tables.lower[cell, part]
    next_ = tables.lower[cell, part + 1]
    chord = low - ((low - next_) * rest >> 18)
    margin = tables.margin[cell]
    u = uniform.astype(np.int64)
    kept[places[u < chord - margin]] = True
    for i in np.flatnonzero((u >= chord - margin) & (u < chord + margin)).tolist():
        number = int(cell[i])
        place = int(places[i])
        if number == _TAIL:
            number, extra = _tail(read)
            x[place] = number << b | int(inside[i])
            kept[place] = _coin(int(u[i]), _N << extra, 1, int(x[place]), bits, read)
        else:
            kept[place] = _coin(
                int(u[i]), _N, int(tables.counts[number]), int(x[place]), bits, read
            )


def _tail(read: Read) -> tuple[int, int]:
    """Returns a cell 192 + i and i + 1, with probability 2^-(i+1)."""
    extra = 1
    while read(1)[0] & 1:
        extra += 1
    return _CELLS + extra - 1, extra


def _coin(u: int, numerator: int, denominator: int, x: int, bits: int, read: Read) -> bool:
    """Returns whether U < (numerator / denominator) exp(-x^2 / 2^(2 bits + 1)); U begins with the 32 bits of u."""
    width = 32
    while True:
        precision = width + 32
        low, high = exp_bounds(x * x, 2 * bits + 1, precision)
        # U is in [u, u + 1) / 2^width
        if (u + 1) * denominator << precision <= numerator * low << width:
            return True
        if u * denominator << precision >= numerator * high << width:
            return False
        u = u << 32 | int.from_bytes(read(4), "little")
        width = width + 32


def exp_bounds(numerator: int, shift: int, bits: int) -> tuple[int, int]:
    """Returns integers low <= 2^bits exp(-numerator / 2^shift) <= high, which are near to each other.

    Args:
        numerator: >= 0.
        shift: >= 0.
        bits: >= 0.

    Example:
        >>> exp_bounds(1, 0, 20)
        (385749, 385750)
    """
    halvings = max(
        0, numerator.bit_length() - shift + 1
    )  # of the exponent, which is below 1/2 then
    point = bits + halvings + 32
    t = (numerator << point) >> (shift + halvings)
    term = total = 1 << point
    k = 0
    while term:
        k += 1
        term = term * t // (k << point)
        total += -term if k % 2 else term
    # t and each of the k terms are cut by at most two units, and the rest of the alternating series is below one
    low = total - 2 * k - 4
    high = total + 2 * k + 4
    for _ in range(halvings):
        low = low * low >> point
        high = -(-high * high >> point)
    return max(0, low >> (point - bits)), -(-high >> (point - bits))


class _Tables(NamedTuple):
    cell: NDArray[np.uint8]  # of each of 2^16 entries
    counts: IntArray  # c_k of each cell
    lower: IntArray  # of 2^32 a at 65 points of each cell, and 0 for the tail
    surely: NDArray[
        np.uint32
    ]  # those at the far end of each cell; 0 for the tail and for "again"
    margin: IntArray  # on both sides of the chord


@cache
def _tables() -> _Tables:
    parts = 64
    shift = (
        2 * (4 + 6) + 1
    )  # point X of the grid is X/1024 standard deviations out: exp(-X^2 / 2^21)
    value = 1 << _FIXED
    ratio = exp_bounds(1, shift, _FIXED)[0]
    change = exp_bounds(2, shift, _FIXED)[0]
    grid = []  # below exp(-X^2 / 2^21) 2^160 by less than 2^32: X^2 < 2^28 roundings
    for _ in range(_CELLS * parts + 1):
        grid.append(value)
        value = value * ratio >> _FIXED
        ratio = ratio * change >> _FIXED
    counts = [
        (_N * (grid[parts * k] + 2**60) >> _FIXED) + 1 for k in range(_CELLS)
    ]  # at least N e^(-k^2/512)
    lower = [
        [(_N * grid[parts * k + i] << 32) // (counts[k] << _FIXED) for i in range(parts + 1)]
        for k in range(_CELLS)
    ]
    entries = [*np.repeat(np.arange(_CELLS), counts).tolist(), _TAIL]
    entries += [_AGAIN] * (2**16 - len(entries))
    ends = np.arange(1, _CELLS + 1)
    margin = 2 * np.maximum(256, ends**2) + ends + 4
    return _Tables(
        np.array(entries, dtype=np.uint8),
        np.array(counts),
        np.array([*lower, [0] * (parts + 1)]),
        np.array([row[-1] for row in lower] + [0, 0], dtype=np.uint32),
        np.append(margin, 1),  # a < 2^-32 in the tail
    )


_BITS_AT_ONCE = 1024  # bits that are drawn at once


class _Bits:
    """Uniform bits of a source; leftover bits are discarded with the object."""

    def __init__(self, source: Source) -> None:
        self._stream = stream_of(source)
        self._pool = 0
        self._left = 0

    def take(self, bits: int) -> int:
        while self._left < bits:
            self._pool = (self._pool << _BITS_AT_ONCE) | self._stream.integer(_BITS_AT_ONCE)
            self._left += _BITS_AT_ONCE
        self._left -= bits
        taken = self._pool >> self._left
        self._pool &= (1 << self._left) - 1
        return taken


def _below(limit: int, bits: _Bits) -> int:
    """Returns a uniform integer in 0..limit - 1."""
    width = (limit - 1).bit_length()
    while (number := bits.take(width)) >= limit:
        pass
    return number


def _exp_coin(numerator: int, denominator: int, bits: _Bits) -> bool:
    """Returns True with probability e^(-numerator/denominator), for numerator <= denominator."""
    place = 1
    while _below(denominator * place, bits) < numerator:  # a coin of probability g / place
        place += 1
    return place % 2 == 1


def draw_laplace(scale: float | Fraction, step: float | Fraction, generator: Source) -> Fraction:
    """Returns one draw of the discrete Laplace law, exactly.

    Args:
        scale: > 0; a float stands for the binary fraction that it is.
        step: > 0, distance of the numbers that can be drawn.
        generator: of the draw; from `torch_dpsco.noise.noise_generator`.

    Returns:
        A multiple of `step`.

    Raises:
        ValueError: an argument is out of range.

    Guarantee: P(draw = x + c) >= e^(-|c|/scale) P(draw = x) for all multiples x and c of `step`, with no rounding.

    Source: Canonne, Kamath and Steinke 2020, algorithm 2.

    Example:
        >>> import torch
        >>> x = draw_laplace(2.0, Fraction(1, 8), torch.Generator().manual_seed(0))
        >>> (8 * x).denominator
        1
    """
    check.positive(scale=scale)
    check.positive(step=step)
    t = Fraction(scale) / Fraction(step)
    bits = _Bits(generator)
    s = t.numerator
    q = t.denominator
    while True:
        u = _below(s, bits)
        if not _exp_coin(u, s, bits):
            continue
        v = 0
        while _exp_coin(1, 1, bits):
            v += 1
        k = (u + s * v) // q
        negative = bool(bits.take(1))
        # PRIVACY: 0 must not be drawn by both signs (test_draws_have_exactly_the_discrete_laplace_law)
        if not (negative and k == 0):
            return (-k if negative else k) * Fraction(step)


_LARGEST = (
    2.0**50
)  # of a coordinate, in units of the grid: quotients, or products with 1/g, are off by 1/4 up to here


def on_grid(value: Tensor, grid: Grid) -> Tensor:
    """Returns a vector in units of the grid, as int64 on the CPU: rounded, cut at 2^50, 0 for NaN. NOT private."""
    # PRIVACY: cut, and never refused: an error would tell of the data (test_no_value_raises_in_an_exact_release)
    scaled = torch.nan_to_num(value.detach().cpu().double() / grid.spacing, nan=0.0).clamp_(
        -_LARGEST, _LARGEST
    )
    return scaled.round_().long()


def release_on_grid(value: Tensor, grid: Grid, source: Source) -> Tensor:
    """Returns the vector, rounded to the grid, with exact noise: float64 of its shape on its device.

    Args:
        value: what is released, computed from data; only here it is rounded to the grid.
        grid: of what the caller has charged, see `exact_grid`.
        source: of the bits.
    """
    noise = torch.from_numpy(
        discrete_gaussian(value.numel(), grid.bits, stream_of(source).read)
    ).view(value.shape)
    total = on_grid(value, grid) + noise  # below 2^52: exact as a float64
    return total.double().mul_(grid.spacing).to(value.device)


def exact_release(value: Tensor, event: Gaussian, source: Source) -> Tensor:
    """Returns the vector with the exact noise of the event that the caller has charged for it; see `release_on_grid`.

    Args:
        value: what is released.
        event: with `exact=True` and the grid in its sensitivities (`analysis.rounding.with_grid`).
        source: of the bits.

    Guarantee: post-processing of the Gaussian release that the event says, up to a factor that no figure shows.
    """
    return release_on_grid(
        value, exact_grid(event.sigma, min(dict(event.sens).values()), value.numel()), source
    )


def symmetric_noise(dim: int, diagonal: float, off_diagonal: float, generator: Source) -> Tensor:
    """Returns a symmetric (dim, dim) matrix of Gaussian noise, with stds of their own on and off the diagonal.

    With off_diagonal = diagonal / sqrt(2) it is N(0, diagonal^2 I) in an orthonormal basis of the symmetric matrices.
    """
    noise = gaussian_vector(dim * dim, off_diagonal, generator).view(dim, dim).triu(1)
    return noise + noise.T + torch.diag(gaussian_vector(dim, diagonal, generator))


def knorm_vector(dim: int, scale: float, generator: Source) -> Tensor:
    """Returns (dim,) float64 numbers of density proportional to exp(-|z|_2 / scale), on the generator's device.

    Args:
        dim: d >= 1.
        scale: sensitivity / epsilon > 0.
        generator: from `noise.noise_generator`.

    Guarantee:
        Added to a vector of L2 sensitivity s: (s / scale)-DP, in any dimension, for real numbers.

    Source: docs/proofs/output.md#k-norm-noise

    Example:
        >>> knorm_vector(3, 1.0, torch.Generator().manual_seed(0)).shape
        torch.Size([3])
    """
    count = check.positive_count(dim=dim)
    scale = check.positive(scale=scale)
    radius = exponential_sum(count, generator)
    direction = gaussian_vector(count, 1.0, generator)
    length = torch.linalg.vector_norm(direction)
    while not float(length):  # of probability 0, but floats are discrete
        direction = gaussian_vector(count, 1.0, generator)
        length = torch.linalg.vector_norm(direction)
    noise: Tensor = direction * (scale * radius / length)
    return noise
