"""Numbers of a stated law from streams of bits: Gaussian, exponential, uniform.

Gaussians come in pairs, by Box and Muller, from an exponential number E = -log V and an angle:

    R = sqrt(2 E),    X = R cos A,  Y = R sin A

V has 63 bits and, where it is within 2^-20 of 0 or 1, 192 bits more; the angle has 64 bits (32 for float32). So

* distance: except with probability 2^-200 per number, the number is an ideal Gaussian Z up to an error in arithmetic of

      |X - Z| <= (2^-42 + 2^-48 R) std    in float64,        2^-19 R std    in float32;

  2^64 numbers, more than anybody draws, differ from that with probability 2^-136: with epsilon up to 20, less than a
  thousandth of any delta above 1e-29, and less than the keystream itself promises, so that nothing is added to delta;
* support: +- 18.8 std, with no gap (64 bits alone would end at 9.4, 32 bits at 6.7).

Proof: docs/proofs/noise.md. The error in arithmetic is what remains of floating point: see docs/guarantees.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torch_dpsco import native
from torch_dpsco.rng import Source, Stream, stream_of

_PAIRS = 2**15  # of numbers at a time, that stay in cache
_SMALL = 2**8  # numbers for which a call of torch is dear
_EDGE = 2.0**-20  # V is refined that close to 0 or 1
_LOW, _HIGH = math.log(_EDGE), -_EDGE  # of log V, where it is not
_MORE = 192  # bits
_SCALES = 2.0**-100, 2.0**100  # of a standard deviation that float32 holds with all its bits

_Floats = npt.NDArray[np.float64]
_Any = npt.NDArray[Any]


def normal_(out: Tensor, std: float, source: Source, mean: Tensor | None = None) -> Tensor:
    """Fills a tensor with independent numbers N(mean, std^2), and returns it.

    Args:
        out: float32 or float64, on any device, each number at a place of its own.
        std: >= 0, finite; rounded up where the tensor's precision cannot hold it.
        source: of the bits.
        mean: (out.numel(),) float64, contiguous, on the same device; default 0. The sum is rounded after it is formed.

    Raises:
        ValueError: numbers of another kind, or that share places; std out of range.
    """
    _require(out, std)
    if out.device.type != "cpu" or not out.is_contiguous():
        out.copy_(add_normal_(torch.zeros_like(out), std, source))
        return out if mean is None else out.add_(mean.view(out.shape))
    pairs = _Pairs(out, std, source)
    if out.numel() <= 2 * _PAIRS:
        pairs.write(out, mean)
        return out
    for start in range(0, out.numel(), 2 * _PAIRS):
        part = slice(start, start + 2 * _PAIRS)
        pairs.write(out.detach().view(-1)[part], None if mean is None else mean[part])
    return out


def add_normal_(out: Tensor, std: float, source: Source) -> Tensor:
    """Adds independent numbers N(0, std^2) to a tensor, piece by piece, and returns it; arguments as in `normal_`."""
    _require(out, std)
    flat = out.detach().reshape(-1)  # a copy where the numbers do not lie side by side
    noise = torch.empty(min(len(flat), 2 * _PAIRS), dtype=out.dtype)
    pairs = _Pairs(noise, std, source)
    for part in flat.split(2 * _PAIRS):
        pairs.write(noise[: len(part)])
        part.add_(noise[: len(part)].to(out.device))
    return out if out.is_contiguous() else out.copy_(flat.view(out.shape))


def _require(out: Tensor, std: float) -> None:
    """Raises ValueError for tensors and standard deviations of which the law would be another one."""
    # PRIVACY: half precision would round the tail off, and NaN is no noise (test_what_has_no_law_is_refused_by_name)
    if out.dtype is not torch.float64 and out.dtype is not torch.float32:
        raise ValueError(
            f"out must be of torch.float32 or torch.float64 (got {out.dtype}): draw there, then"
            " convert"
        )
    if not 0.0 <= std < math.inf:
        raise ValueError(f"std must be >= 0 and finite (got {std})")
    if not out.is_contiguous():
        reach = 0
        for step, size in sorted(zip(out.stride(), out.shape, strict=True)):
            # PRIVACY: numbers at one place are one number (test_what_has_no_law_is_refused_by_name)
            if size > 1 and step <= reach:
                raise ValueError(
                    f"out must have each number at a place of its own (got shape {tuple(out.shape)}"
                    f" with strides {out.stride()}): use out.contiguous()"
                )
            reach += step * (size - 1)


def normal(std: float, source: Source) -> float:
    """Returns one number N(0, std^2)."""
    return float(normal_(torch.empty(1, dtype=torch.float64), std, source))


def exponential_sum(count: int, source: Source) -> float:
    """Returns the sum of `count` exponential numbers of mean 1: a Gamma(count, 1) number."""
    stream = stream_of(source)
    sizes = [min(_PAIRS, count - start) for start in range(0, count, _PAIRS)]
    return -math.fsum(
        float(_logarithms(stream.words(size), stream, np.empty(size)).sum()) for size in sizes
    )


def uniform(shape: Sequence[int], source: Source) -> Tensor:
    """Returns uniform multiples of 2^-53 in [0, 1): float64, on the source's device."""
    return words(shape, 53, source).double().mul_(2.0**-53)


def words(shape: Sequence[int], bits: int, source: Source) -> Tensor:
    """Returns uniform integers of `bits` bits, at most 63: int64, on the source's device."""
    drawn = stream_of(source).words(math.prod(shape)).view(np.uint64) >> np.uint64(64 - bits)
    return torch.from_numpy(drawn.view(np.int64)).view(tuple(shape)).to(source.device)


class _Pairs:
    """Writes pairs of Gaussians into tensors of the CPU, contiguous and of one precision.

    Args:
        like: the first of them; none has more than 2 `_PAIRS` numbers, but the first may.
        std: their standard deviation.
        source: of the bits.
    """

    def __init__(self, like: Tensor, std: float, source: Source) -> None:
        self._stream = stream_of(source)
        # a scale that float32 does not hold is applied in float64, and the result rounded
        self._converts = like.dtype is torch.float32 and not _SCALES[0] < std < _SCALES[1]
        self._wide = self._converts or like.dtype is torch.float64
        # PRIVACY: float32 would round a standard deviation down (test_a_standard_deviation_is_never_rounded_down)
        self._scale = std if self._wide else std * (1.0 + 2.0**-22)
        self._size = 8 if self._wide else 4  # bytes of an angle
        self._memory: tuple[_Any, _Any] | None = None

    def write(self, part: Tensor, mean: Tensor | None = None) -> None:
        """Fills a tensor of at most 2 `_PAIRS` numbers with noise around a mean."""
        if self._converts:
            wide = torch.empty_like(part, dtype=torch.float64)
            self._fill(wide, mean)
            part.detach().copy_(wide)
        elif part.numel():
            self._fill(part, mean)

    def _fill(self, part: Tensor, mean: Tensor | None) -> None:
        count = (part.numel() + 1) // 2
        bits = self._stream.read(count * (8 + self._size))
        if not native.is_available():
            self._fill_in_torch(part, bits, count)
            if mean is not None:
                part.add_(mean.view(part.shape))
        elif native.gaussians(bits, part, self._scale, _LOW, _HIGH, mean):
            logs = _logarithms(
                np.frombuffer(bits, np.int64, count), self._stream, np.empty(count)
            )
            native.gaussians(bits, part, self._scale, _LOW, _HIGH, mean, logs)

    def _fill_in_torch(self, part: Tensor, bits: bytes, count: int) -> None:
        if self._memory is None:  # always the same: fresh memory costs as much as the arithmetic
            self._memory = (
                np.empty(count),
                np.empty((2, count), np.float64 if self._wide else np.float32),
            )
        values, (radius, angle) = self._memory[0][:count], self._memory[1][:, :count]
        radius[:] = _logarithms(np.frombuffer(bits, np.int64, count), self._stream, values)
        radius *= -2.0
        np.sqrt(radius, out=radius)
        radius *= self._scale
        angle[:] = np.frombuffer(bits, np.int64 if self._wide else np.int32, count, 8 * count)
        angle *= math.pi * 2.0 ** (1 - 8 * self._size)
        numbers = part.detach().numpy().reshape(-1)
        for name, half in (("cos", numbers[:count]), ("sin", numbers[count:])):
            _turned(name, angle[: len(half)], half)
            half *= radius[: len(half)]


def _turned(name: str, angle: _Any, out: _Any) -> None:
    if len(angle) < _SMALL:
        getattr(np, name)(angle, out=out)
    else:  # numpy's are ten times as slow in float64
        getattr(torch, name)(torch.from_numpy(angle), out=torch.from_numpy(out))


def _logarithms(drawn: npt.NDArray[np.int64], stream: Stream, values: _Floats) -> _Floats:
    """Returns log V, V uniform in (0, 1), for each word; within `_EDGE` of 0 or 1 V has further bits of the stream."""
    if native.is_available():
        inside = native.logs(drawn, _LOW, _HIGH, values)
    else:
        values[:] = drawn
        values += 0.5
        values *= 2.0**-63
        np.abs(values, out=values)
        np.log(values, out=values)
        inside = not len(values) or bool(
            np.minimum.reduce(values) > _LOW and np.maximum.reduce(values) < _HIGH
        )
    # PRIVACY: 63 bits alone would end at 9.4 std, in steps (test_the_tail_is_reached_in_small_steps)
    if not inside:
        for place in np.flatnonzero(~((values > _LOW) & (values < _HIGH))):
            values[place] = _refined(int(drawn[place]), stream.integer(_MORE))
    return values


def _refined(word: int, more: int) -> float:
    """Returns log V for V = (2 k + 1) / 2^256 with the integer k of 63 bits of the word and the further ones."""
    k = ((word if word >= 0 else ~word) << _MORE) + more
    whole = 1 << (64 + _MORE)
    if 2 * k < whole // 2:
        return math.log((2 * k + 1) / whole)  # integers, so that the quotient is rounded once
    return math.log1p(-(whole - 2 * k - 1) / whole)
