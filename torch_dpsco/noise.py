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

Streams of secret bits for noise and batches; earlier draws reveal nothing about later ones.

`Keystream` is the default everywhere: a cryptographic generator that the operating system seeds (AES-256 in counter
mode, by OpenSSL). It holds no state here, so that nothing can be saved, copied or pickled; a fork draws bytes of its
own. Statistical generators (torch's Mersenne Twister, numpy's PCG) are no substitute: their outputs are linear in, or
easily inverted to, a state of a few thousand bits, and the noise of one release reveals that of all others.

| stream | bits | for |
|---|---|---|
| `Keystream` | fresh for every call | noise, batches |
| `KeyedStream` | a function of 256 secret bits (SHAKE256; 256-bit security) | what is drawn twice alike: ranks, cuts |
| `SliceStream` | a function of 256 secret bits and the place (ChaCha20; 256-bit security) | noise in slices, on ranks |
| `Repeatable` | of a generator of the caller's | tests: its seed reveals all |

A type for states that must stay secret: it shows no value, and a checkpoint that holds one says so.
"""

from __future__ import annotations

import math
import os
import warnings
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from copy import deepcopy
from hashlib import shake_256
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco import native
from torch_dpsco.acts import act
from torch_dpsco.errors import PrivacyError, UtilityWarning

_PAIRS = 2**15  # of numbers at a time, that stay in cache
_EDGE = 2.0**-20  # V is refined that close to 0 or 1
# of log V, where it is not
_LOW = math.log(_EDGE)
_HIGH = -_EDGE
_MORE = 192  # bits
# by which a standard deviation is none the smaller for being rounded to float32
_UP = 1.0 + 2.0**-22
_SCALES = 2.0**-100, 2.0**100  # of a standard deviation that float32 holds with all its bits

_Floats = npt.NDArray[np.float64]


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
    if not std:
        return out.zero_() if mean is None else out.copy_(mean.view(out.shape))
    if not (out.is_cpu and out.is_contiguous()):
        add_normal_(out.zero_(), std, source)
        return out if mean is None else out.add_(mean.view(out.shape))
    # an abstract class is slow to ask
    stream = source if type(source) is Keystream else stream_of(source)
    size = out.numel()
    if size <= 2 * _PAIRS:  # views cost as much as small noise
        _write(out, std, stream, mean)
        return out
    numbers = out.detach().view(-1)
    for start in range(0, size, 2 * _PAIRS):
        part = slice(start, start + 2 * _PAIRS)
        _write(numbers[part], std, stream, None if mean is None else mean[part])
    return out


def add_normal_(out: Tensor, std: float, source: Source) -> Tensor:
    """Adds independent numbers N(0, std^2) to a tensor, piece by piece, and returns it; arguments as in `normal_`."""
    add_normals_([out], std, source)
    return out


def add_normals_(outs: Sequence[Tensor], std: float, source: Source) -> None:
    """Adds noise to each of some tensors, as `add_normal_`; a device draws for all of them by one key."""
    for out in outs:
        _require(out, std)
    if not std:
        return
    stream = stream_of(source)
    flat = [out.detach().contiguous().view(-1) for out in outs]  # copies, if not side by side
    if not _drawn_there(flat, std, stream):
        for part in flat:
            _add_from_host(part, std, stream)
    for out, part in zip(outs, flat, strict=True):
        if not out.is_contiguous():
            out.copy_(part.view(out.shape))
            part.zero_()  # memory that is given back holds no noise


def _drawn_there(parts: Sequence[Tensor], std: float, stream: Stream) -> bool:
    """Returns whether noise was added by the device where all of the tensors are, in float32."""
    return (
        # others are the same bits, and the same noise, on every device
        type(stream) in (Keystream, SliceStream)
        and len({part.device for part in parts}) == 1
        and parts[0].device.type in native.DEVICES
        and all(part.dtype is torch.float32 for part in parts)
        and _SCALES[0] < std < _SCALES[1]
        and bool(act("noise.on_device")(parts, std, stream))
    )


def _add_from_host(flat: Tensor, std: float, stream: Stream) -> None:
    """Adds noise of the host, piece by piece; pieces are overwritten where they were added."""
    noise = torch.empty(min(len(flat), 2 * _PAIRS), dtype=flat.dtype)
    for part in flat.split(2 * _PAIRS):
        piece = noise[: len(part)]
        _write(piece, std, stream)
        piece = piece.to(flat.device)
        part.add_(piece)
        piece.zero_()


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


def gaussian_vector(dim: int, std: float, generator: Source) -> Tensor:
    """Returns (dim,) float64 numbers N(0, std^2), on the generator's device.

    Args:
        dim: d >= 1.
        std: >= 0.
        generator: of the bits.
    """
    empty = torch.empty(dim, dtype=torch.float64, device=generator.device)
    return normal_(empty, 1.0, generator).mul_(check.nonnegative(std=std))


def exponential_sum(count: int, source: Source) -> float:
    """Returns the sum of `count` exponential numbers of mean 1: a Gamma(count, 1) number."""
    stream = stream_of(source)
    sizes = [min(_PAIRS, count - start) for start in range(0, count, _PAIRS)]
    return -math.fsum(
        float(_logarithms(stream.words(size), stream, np.empty(size)).sum()) for size in sizes
    )


MOST_CHOICES = 2**17
_TOP = 2.0**44  # weight of the best score
_FLOOR = 2**17  # added to all weights: rounding is small beside it
_ROUNDED = 2.0**-14  # of epsilon, for it


def choice_law(
    scores: npt.ArrayLike, sensitivity: float, epsilon: float
) -> npt.NDArray[np.int64]:
    """Returns the law of a choice by the exponential mechanism: integers that chances are proportional to.

    Args:
        scores: (K,) private numbers, the lower the better, finite and below 2^53; K <= 2^17.
        sensitivity: D > 0: how far one record moves each score, as given here.
        epsilon: > 0; all are equally likely up to 2^-14.

    Returns:
        (K,) positive integers.

    Raises:
        ValueError: a number is out of range; for scores, it tells of them.

    Guarantee:
        epsilon-DP and of epsilon-bounded range, hence (epsilon^2 / 8)-zCDP, for this very law.

    Source: docs/proofs/sparse.md#a-choice-among-many

    Example:
        >>> law = choice_law([0, 2, 20], sensitivity=2, epsilon=2.0)
        >>> (law / law.sum()).round(3).tolist()
        [0.731, 0.269, 0.0]
    """
    bad = np.asarray(scores, dtype=np.float64)
    if len(bad) > MOST_CHOICES or not (np.abs(bad) < 2.0**53).all():
        raise ValueError(f"scores must be 1 to {MOST_CHOICES} numbers below 2^53")
    # PRIVACY: less than epsilon, for the rounding, which is proved up to 2^16
    # (test_the_law_of_a_choice_keeps_its_range_exactly, test_a_choice_has_a_largest_epsilon)
    own = max(min(epsilon, 2.0**16) - _ROUNDED, 0.0)
    rate = own / check.positive(sensitivity=sensitivity)
    weights = np.exp(-(rate / 2) * (bad - bad.min()))
    # PRIVACY: no weight is so small that rounding matters (test_the_law_of_a_choice_keeps_its_range_exactly)
    return np.asarray(weights * _TOP + _FLOOR, dtype=np.int64)


def choose(law: npt.NDArray[np.int64], generator: Source) -> int:
    """Returns an index drawn by a law of `choice_law`. Charges nothing.

    Args:
        law: (K,) integers >= 0, of a sum up to 2^63.
        generator: of the draw; from `torch_dpsco.noise.noise_generator`.
    """
    ends = np.cumsum(law)
    drawn = stream_of(generator).integers(int(ends[-1]), 1)
    return int(np.searchsorted(ends, drawn[0], side="right"))


def _write(part: Tensor, std: float, stream: Stream, mean: Tensor | None = None) -> None:
    """Fills a tensor of the CPU, of at most 2 `_PAIRS` numbers, with noise around a mean.

    Args:
        part: float32 or float64, contiguous.
        std: standard deviation.
        stream: of the bits.
        mean: as many numbers, float64; default zeros.
    """
    if part.dtype is torch.float32 and not _SCALES[0] < std < _SCALES[1]:
        # a scale that float32 does not hold is applied in float64, and the result rounded
        wide = torch.empty_like(part, dtype=torch.float64)
        _write(wide, std, stream, mean)
        part.copy_(wide)
        return
    size = 8 if part.dtype is torch.float64 else 4  # bytes of an angle
    # PRIVACY: float32 would round a standard deviation down (test_a_standard_deviation_is_never_rounded_down)
    scale = std if size == 8 else std * (1.0 + 2.0**-22)
    count = (part.numel() + 1) // 2
    bits = stream.read(count * (8 + size))
    outside = native.gaussians(bits, part, scale, _LOW, _HIGH, mean)
    if outside is None:
        _write_in_torch(part.detach().view(-1), scale, stream, bits)
        if mean is not None:
            part.add_(mean.view(part.shape))
    elif outside:
        logs = _logarithms(np.frombuffer(bits, np.int64, count), stream, np.empty(count))
        native.gaussians(bits, part, scale, _LOW, _HIGH, mean, logs)


def _write_in_torch(part: Tensor, scale: float, stream: Stream, bits: bytes) -> None:
    count = (part.numel() + 1) // 2
    size = part.element_size()
    logs = _logarithms(np.frombuffer(bits, np.int64, count), stream, np.empty(count))
    radius = torch.from_numpy(logs).to(part.dtype).mul_(-2.0).sqrt_().mul_(scale)
    words = np.frombuffer(bits, f"i{size}", count, 8 * count).astype(f"f{size}")
    angle = torch.from_numpy(words).mul_(math.pi * 2.0 ** (1 - 8 * size))
    for turned, half in zip((angle.cos(), angle.sin_()), part.split(count), strict=False):
        half.copy_(turned[: len(half)]).mul_(radius[: len(half)])


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

    def fill(self, memory: memoryview) -> None:
        """Writes the next bytes into memory, of bytes."""
        memory[:] = self.read(memory.nbytes)

    def words(self, count: int) -> npt.NDArray[np.int64]:
        """Returns `count` uniform words of 64 bits, signed; read-only."""
        return np.frombuffer(self.read(8 * count), dtype=np.int64)

    def integer(self, bits: int) -> int:
        """Returns a uniform integer of that many bits, >= 0."""
        size = (bits + 7) // 8
        return int.from_bytes(self.read(size), "little") >> (8 * size - bits)

    def integers(self, limit: int, count: int) -> npt.NDArray[np.int64]:
        """Returns integers that are exactly uniform in 0..limit - 1, limit <= 2^63."""
        assert limit <= 2**63  # else no word may be kept, and drawing would not end
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
        device: where the tensors that are filled belong.
    """

    label = 0  # of the first tensor that a device draws by a key

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def read(self, size: int) -> bytes:
        """Returns fresh bytes."""
        return _random_bytes(size)

    def fill(self, memory: memoryview) -> None:
        """Writes fresh bytes of the operating system into memory; no copy of them is left anywhere else."""
        with open("/dev/urandom", "rb", buffering=0) as source:
            # PRIVACY: a key that is short has zeros (test_a_key_that_is_not_whole_is_refused)
            if source.readinto(memory) != memory.nbytes:
                raise OSError("/dev/urandom gave too few bytes: no noise was drawn")


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


class SliceStream(Stream):
    """The bits for a slice of ONE release, by a key that several processes share: ChaCha20 (RFC 8439), counter = place.

    Slices are told apart by the nonce: see docs/proofs/noise.md#several-processes. Without the accelerator the bits are
    SHAKE256's. SECRET: it shows no value; `erase` overwrites the key.

    Args:
        rank: of the process whose slice it is, >= 0.
    """

    def __init__(self, rank: int) -> None:
        self.key = torch.zeros(32, dtype=torch.uint8)
        self.label = rank << 20  # of what a device draws, in tensors of 2^30 numbers
        self._block = 0

    def read(self, size: int) -> bytes:
        """Returns the next bytes, of blocks that are used once."""
        blocks = -(-size // 64)
        bits = native.chacha(self.key, self.label, self._block, blocks)
        if bits is None:
            secret = self.key.numpy().tobytes()
            bits = KeyedStream(secret, f"noise {self.label} {self._block}").read(size)
        # PRIVACY: (test_no_block_of_a_slice_is_drawn_twice)
        self._block += blocks
        return bits[:size]

    def fill(self, memory: memoryview) -> None:
        """Moves the key to memory, for the device that draws the slice."""
        np.frombuffer(memory, np.uint8)[:] = self.key.numpy()
        self.erase()

    def erase(self) -> None:
        """Overwrites the key; from then on nothing can be drawn."""
        # PRIVACY: who finds the key can subtract the noise (test_the_key_of_a_release_is_overwritten)
        self.key.zero_()
        self.key = self.key[:0]

    __reduce__ = KeyedStream.__reduce__  # it is not copied or saved


class Repeatable(Stream):
    """Bytes of the caller's own generator: not secret, for tests only.

    Args:
        generator: its seed, or enough of what it drew, reveals all of it.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self.device = generator.device

    def read(self, size: int) -> bytes:
        """Returns the next bytes."""
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
        device: of the tensors.
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


def sampling_generator() -> Stream:
    """Returns the stream for drawing batches: the operating system's."""
    return Keystream()


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


class SecretState(dict[str, Any]):
    """A state dict with what must stay secret: iterates without noise, noise of a threshold, or who is in which batch.

    It shows no value; torch.save stores it as a plain mapping, which torch.load reads with weights_only=True.
    """

    def __repr__(self) -> str:
        return f"SecretState(CONFIDENTIAL, {sorted(self)})"

    def __copy__(self) -> SecretState:
        return SecretState(self)

    copy = __copy__

    def __deepcopy__(self, memo: dict[int, Any]) -> SecretState:
        return SecretState({key: deepcopy(value, memo) for key, value in self.items()})

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter(self.items())
