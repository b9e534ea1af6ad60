"""Laplace noise without floating point: exact draws of the discrete Laplace law.

A draw is `step` times an integer k, with

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
`above_threshold`). Time and number of random bits depend on what is drawn: a side channel that is not closed.

Source: docs/proofs/accounting.md#discrete-laplace-noise; Canonne, Kamath and Steinke 2020, section 5.
"""

from __future__ import annotations

from fractions import Fraction

from torch_dpsco import _validate as check
from torch_dpsco.rng import Source, stream_of

_BLOCK = 1024  # bits that are drawn at once


class _Bits:
    """Uniform bits of a source; those that are left over are thrown away with the object."""

    def __init__(self, source: Source) -> None:
        self._stream, self._pool, self._left = stream_of(source), 0, 0

    def take(self, bits: int) -> int:
        while self._left < bits:
            self._pool = (self._pool << _BLOCK) | self._stream.integer(_BLOCK)
            self._left += _BLOCK
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


def _coin(numerator: int, denominator: int, bits: _Bits) -> bool:
    """Returns True with probability numerator/denominator."""
    return _below(denominator, bits) < numerator


def _exp_coin(numerator: int, denominator: int, bits: _Bits) -> bool:
    """Returns True with probability e^(-numerator/denominator), for numerator <= denominator."""
    place = 1
    while _coin(numerator, denominator * place, bits):
        place += 1
    return place % 2 == 1


def draw_laplace(scale: float | Fraction, step: float | Fraction, generator: Source) -> Fraction:
    """Returns one draw of the discrete Laplace law, exactly.

    Args:
        scale: > 0; a float stands for the binary fraction that it is.
        step: > 0, distance of the numbers that can be drawn.
        generator: of the draw; from `torch_dpsco.rng.noise_generator`.

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
    t, bits = Fraction(scale) / Fraction(step), _Bits(generator)
    s, q = t.numerator, t.denominator
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
