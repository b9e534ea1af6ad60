"""The accelerator: sums, norms and noise in C (`_kernel.c`); where it is missing, torch computes the same.

It is built with the package where there is a compiler, and used on the CPU: for float32 rows, and for float64 ones that
estimators read. What it computes is as private as what torch computes: sums and norms are in float64, so that their
errors are smaller, and each row is read by itself. `TORCH_DPSCO_NATIVE=off` in the environment switches it off.

| here | torch |
|---|---|
| `norms` | `rows.blocks.row_norms` |
| `add_weighted` | `rows.blocks.weighted_rows` |
| `outer_sums` | `rows.blocks.FactoredBlock` |
| `Linear` | scores, slopes, clip and sum of a linear model: `rows.closed_form`, `ClippedMean` |
| `Table.images` | `estimators.preparation.Preparation` |
| `Table.gram` | `estimators.objectives.base.Records.gram` |
| `slopes` | those scores and slopes alone |
| `gaps` | `sampling.samplers.poisson_positions` |
| `Table.scored`, `Table.classes` | losses, gradients and curvatures of records: `estimators.objectives` |
| `logs`, `gaussians` | `noise` |
| `chacha` | SHAKE256, in `noise.SliceStream` |

How precise torch's own products are is told here as well: float32 sums and the 1/B of a mean loss rely on full
precision. A mean loss divides each record's gradient by the batch size before the backward, and rows are multiplied by
it again. Where a product on the way rounds to fewer bits than float32 has, the rounding of 1/B is in ALL rows: one
record more moves each of them by up to 2^-9 of its length, B of them by many clips. `inexact_mean` is the one check; a
loss that sums has no 1/B, and is never refused.

Proofs: docs/proofs/rounding.md#products-in-reduced-precision,
docs/proofs/rounding.md#sums-and-norms-in-c, docs/proofs/rounding.md#records-in-c,
docs/proofs/noise.md#gaussians.
"""

from __future__ import annotations

import copy
import ctypes
import math
import os
import zlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from torch_dpsco.acts import act
from torch_dpsco.compat import ConvNd
from torch_dpsco.errors import SequenceError

WIDEST = 2**26  # columns for which the errors of norms are proved
DEVICES = ("cuda",)  # types of those that have kernels of their own, see `torch_dpsco.fast`
# of _kernel.c
_BATCH = 32
_GROUP = 4
_KEPT_ROWS = 1024  # that are computed together
SLOPES = {"given": 0, "sign": 1, "logistic": 2, "square": 3}
LOSSES = {"curved": 0, "bent": 1, "fixed": 2}

_HERE = Path(__file__).parent
_NAME = "_kernel.bin"
_SWITCH = "TORCH_DPSCO_NATIVE"
_TYPES = {
    "p": ctypes.c_void_p,
    "i": ctypes.c_int64,
    "d": ctypes.c_double,
    "f": ctypes.c_float,
    "c": ctypes.c_char_p,
}
# of the arguments of each function; rows are "piii": first number, stride, rows, columns
_ARGUMENTS = {
    "norms": "piiip",
    "sum": "piiipp",
    "outer": "piipiiipippp",
    "outer_space": "ii",
    "linear": "piipiipfippddp",
    "slopes": "piiipfipp",
    "gaps": "ciddiip",
    "measure": "piiipiippp",  # first number, wide, stride, d, numbers, width, ..
    "images": "piiipipiiipp",
    "gram": "piiipipiiippipp",
    "scored": "piiipipipppidpiipppp",
    "below": "ppidip",
    "classes": "piiipipippppiiipp",
    "logs": "piddp",
    "chacha": "piiiip",
    "gaussians": "ciidddppp",
}
_Byte = ctypes.c_char * 1
_COUNTS = ("linear", "gaps", "logs", "gaussians", "outer_space")  # what returns a number


def switched_off() -> str:
    """Returns by what kernels of the library, in C and on devices, are switched off; nothing where they are not."""
    value = os.environ.get(_SWITCH, "on")
    return f"off ({_SWITCH}={value})" if value.lower() in ("off", "0", "false", "no") else ""


@lru_cache(maxsize=1)
def _found() -> tuple[Any, str]:
    """Returns the library, or None, and what is to be said about it."""
    if off := switched_off():
        return None, off
    path = _HERE / _NAME
    if not path.exists():
        return None, "not built: install torch_dpsco again where there is a C compiler"
    try:
        library = ctypes.CDLL(str(path))
        library.dpsco_version.restype = library.dpsco_kind.restype = ctypes.c_int64
        version = library.dpsco_version()
    except (OSError, AttributeError) as error:
        return None, f"not usable: {error}"
    # PRIVACY: an older build may be of another arithmetic (test_a_library_of_another_text_is_not_used)
    if version != zlib.crc32((_HERE / "_kernel.c").read_text(encoding="utf-8").encode()):
        return None, "built from another version of _kernel.c: install torch_dpsco again"
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, f"dpsco_{name}")
        function.argtypes = [_TYPES[letter] for letter in arguments]
        function.restype = ctypes.c_int64 if name in _COUNTS else None
    return library, "in use"


def is_available() -> bool:
    """Returns whether the accelerator was built, and is not switched off."""
    return _found()[0] is not None


def status() -> str:
    """Returns "in use", or why the accelerator is not."""
    return _found()[1]


def arithmetic() -> str:
    """Returns what tells whether two machines read a row alike, to the last bit: the library and its code, or none.

    Example:
        >>> arithmetic() == arithmetic()
        True
    """
    library = _found()[0]
    return (
        "torch"
        if library is None
        else f"C {zlib.crc32((_HERE / _NAME).read_bytes()):08x}/{library.dpsco_kind()}"
    )


def suits(rows: Tensor, *, double: bool = False) -> bool:
    """Returns whether the accelerator can read rows: (B, k) of float32 in plain memory of the CPU, side by side.

    Args:
        rows: (B, k).
        double: whether float64 will do as well, as for records of a linear model.
    """
    return (
        type(rows) is Tensor  # subclasses may have no memory, or another meaning
        and (rows.dtype is torch.float32 or (double and rows.dtype is torch.float64))
        and rows.is_cpu
        and rows.dim() == 2
        and rows.layout is torch.strided
        and not rows.is_neg()  # a view whose sign is in its flag
        and (rows.stride(1) == 1 or rows.shape[1] == 1)
        and 0 < rows.shape[1] <= WIDEST
        and _found()[0] is not None
    )


def have_kernels(devices: set[torch.device]) -> bool:
    """Returns whether rows are all on one device, which sums them by kernels of its own: `fast.rows_on_device`."""
    return len(devices) == 1 and all(
        device.type in DEVICES and act("rows.on_device")(device) for device in devices
    )


_TENSORS = {Tensor, nn.Parameter}


def _call(name: str, *arguments: Any) -> Any:
    """Calls a function of the library; tensors, which are held meanwhile, stand for their first number."""
    function = getattr(_found()[0], f"dpsco_{name}")
    return function(*[part.data_ptr() if type(part) in _TENSORS else part for part in arguments])


def _require(part: Tensor | None, size: int, dtype: torch.dtype) -> None:
    """Raises ValueError for memory of another kind: C would take other numbers for these, or read beyond them."""
    # PRIVACY: the target of a record would be read from another one's (test_memory_of_another_kind_is_refused)
    if part is None:
        return
    if (
        part.numel() != size
        or part.dtype is not dtype
        or not part.is_contiguous()
        or part.is_neg()
    ):
        raise ValueError(
            f"memory for C must be {size} numbers of {dtype}, side by side "
            f"(got {tuple(part.shape)} of {part.dtype}, strides {part.stride()})"
        )


def norms(rows: Tensor) -> Tensor:
    """Returns upper bounds of the norms of rows that suit: (B,) float64; inf from 2^64 on, NaN for a row with one."""
    found = rows.new_empty(len(rows), dtype=torch.float64)
    _call("norms", rows, rows.stride(0), *rows.shape, found)
    return found


def add_weighted(rows: Tensor, weights: Tensor, total: Tensor) -> Tensor:
    """Adds sum_i weights[i] * rows[i] to a total, and returns it; a row of weight 0 counts for nothing, even NaN.

    Args:
        rows: (B, k) that suit.
        weights: (B,) float64, finite.
        total: (k,) float64, contiguous.
    """
    weights = weights.contiguous()
    _require(weights, rows.shape[0], torch.float64)
    _require(total, rows.shape[1], torch.float64)
    _call("sum", rows, rows.stride(0), *rows.shape, weights, total)
    return total


def outer_sums(
    backprops: Tensor, rows: Tensor, weights: Tensor, tile: int
) -> tuple[Tensor, Tensor]:
    """Returns sum_i weights[i] * backprops[i] rows[i]^T and sum_i weights[i] * backprops[i].

    Rows of weight 0 count for nothing, even NaN.

    Args:
        backprops: (B, out) that suit.
        rows: (B, k) that suit.
        weights: (B,) float64, finite.
        tile: >= 1, products that are added in float32; their sums are added in float64.

    Returns:
        (out, k) float32 and (out,) float64.
    """
    weights = weights.contiguous()
    n, out = backprops.shape
    width = rows.shape[1]
    _require(weights, n, torch.float64)
    if len(rows) != n or tile < 1:
        raise ValueError(
            f"rows must be as many as backprops, and tile >= 1 (got {len(rows)}, {n}, {tile})"
        )
    space = rows.new_empty(_call("outer_space", n, out))
    total = rows.new_empty(out, width)
    bias = rows.new_empty(out, dtype=torch.float64)
    left = backprops, backprops.stride(0), out
    right = rows, rows.stride(0), n, width
    _call("outer", *left, *right, weights, tile, space, total, bias)
    return total, bias


class Linear:
    """Records of a linear model, whose clipped rows are scored and added in one reading.

    Row i is w_i (x_i, 1): w_i is the slope of record i, cut so that |w_i| factors[i] <= limit, times scale; 0 where
    slope times factor is not finite, or the factor not below 2^64.

    Args:
        rows: (n, d) features that suit.
        targets: (n,) float32, contiguous; for "given" the slopes themselves.
        factors: (n,) float64, contiguous: bounds of |(x, 1)|; None computes them.
        slope: derivative of the loss in the score x.weight + bias, a name in `SLOPES`.
    """

    def __init__(
        self, rows: Tensor, targets: Tensor, factors: Tensor | None, slope: str = "given"
    ) -> None:
        self._n, self._d = rows.shape
        _require(targets, self._n, torch.float32)
        _require(factors, self._n, torch.float64)
        # detached: what others do to the shapes of theirs is not seen here
        self._rows = rows.detach()
        self._kept = targets.detach(), None if factors is None else factors.detach()
        self._stride = rows.stride(0)
        self._slope = SLOPES[slope]

    def sum(
        self,
        limit: float,
        scale: float,
        weight: Tensor | None = None,
        bias: float = 0.0,
        index: Tensor | None = None,
    ) -> Tensor:
        """Returns the sum of rows, in new memory: (d + 1,) float64.

        Args:
            limit: largest length of a row.
            scale: of all rows.
            weight: (d,) or (1, d) float32, contiguous; not needed for "given".
            bias: of the score.
            index: (m,) int64 contiguous, the records that count, each in [0, n); default all.
        """
        n = self._n
        taken = n
        if index is not None:
            taken = index.numel()
            _require(index, taken, torch.int64)
        _require(weight, self._d, torch.float32)
        total = torch.empty(self._d + 1, dtype=torch.float64)
        targets, factors = self._kept
        # each microsecond of this call is one of a step of `fit`
        outside = _found()[0].dpsco_linear(
            self._rows.data_ptr(),
            self._stride,
            n,
            None if index is None else index.data_ptr(),
            taken,
            self._d,
            None if weight is None else weight.data_ptr(),
            bias,
            self._slope,
            targets.data_ptr(),
            None if factors is None else factors.data_ptr(),
            limit,
            scale,
            total.data_ptr(),
        )
        if outside:
            raise IndexError(f"index must be in [0, {n}), the records of the data set")
        return total


def slopes(rows: Tensor, targets: Tensor, weight: Tensor, bias: float, slope: str) -> Tensor:
    """Returns the slopes of `Linear`, each by code that sees no other record: (n,) float32."""
    n, d = rows.shape
    found = torch.empty_like(targets)
    for part, size in (targets, n), (weight, d):
        _require(part, size, torch.float32)
    given = weight, bias, SLOPES[slope], targets, found
    _call("slopes", rows, rows.stride(0), n, d, *given)
    return found


class Table:
    """Rows of records, and their images, which a linear model sees: ((row * before - center) * factor) * after.

    Before and after are the shares of its length that a row keeps where it is cut. A constant may be appended. The rows
    must not change: shares are those of the first reading.

    Args:
        rows: (n, d) that suit as records.
        numbers: norms before and after (or inf), the constant at the end (0 for none), whether it is cut with the row,
            whether rows are moved, d centers, d factors.

    Attributes:
        width: numbers of an image: d, or d + 1 with a constant.
        norms: (n,) float64 of images, each within gamma(width + 4); inf for a row that is not finite, before or after
            it was moved, or is longer than 2^1021 times what it is cut to: its image is 0.
    """

    _kept: Tensor | None = None  # images of all rows

    def __init__(self, rows: Tensor, numbers: list[float]) -> None:
        if not suits(rows, double=True):
            raise ValueError(
                "rows must be float32 or float64 of the CPU, side by side (got strides"
                f" {rows.stride()})"
            )
        self._rows = rows
        self._numbers = torch.tensor(numbers, dtype=torch.float64)
        _require(self._numbers, 5 + 2 * rows.shape[1], torch.float64)
        self.width = rows.shape[1] + (numbers[2] != 0)
        self._shares = self._numbers.new_empty(2, len(rows))
        self.norms = self._shares.new_empty(len(rows))
        scratch = self._shares.new_empty(4, self.width)
        _call("measure", *self._place[:-1], len(rows), scratch, self._shares, self.norms)

    def distances(self, center: Tensor) -> Tensor:
        """Returns distances of images from a point, (n,), where rows are cut and not moved; inf for bad rows."""
        plain = [math.inf, 0.0, 0.0, 1.0, *center.tolist(), *[1.0] * len(center)]
        moved = self._numbers[0] < math.inf or self._numbers[4]
        if moved or self.width != self._rows.shape[1]:
            raise ValueError("rows must be cut only: no constant, no center and no scale")
        return Table(self._rows, [float(self._numbers[1]), *plain]).norms

    @property
    def shares(self) -> Tensor:
        """What is left of each row's length where it is cut at last, (n,): 0 for a row that is not finite."""
        return self._shares[1]

    @property
    def _place(self) -> tuple[Any, ...]:
        rows = self._rows  # not kept: a copy of this has its own memory
        wide = rows.dtype is torch.float64
        return rows, wide, rows.stride(0), rows.shape[1], self._numbers, self.width, self.norms

    def __len__(self) -> int:
        return self.norms.numel()

    def __getitem__(self, index: Tensor | slice) -> Table:
        """Returns that of some rows."""
        part = copy.copy(self)
        part._kept = None
        part._rows = self._rows[index]
        part.norms = self.norms[index].contiguous()
        part._shares = self._shares[:, index].contiguous()
        return part

    def images(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Returns images of rows from start up to stop: (m, width) float64; 0 for a row that is not finite."""
        start, stop, _ = slice(start, stop).indices(len(self))
        found = self._shares.new_empty(max(0, stop - start), self.width)
        _call("images", *self._place, start, len(found), len(self), self._shares, found)
        return found

    def gram(self, weights: Tensor, start: int, stop: int) -> Tensor:
        """Returns the sum of weights[i] x_i x_i' over the images x_i of rows from start up to stop: (width, width).

        Args:
            weights: (n,) float64, contiguous; of all rows. A row of weight 0 counts for nothing.
            start: in [0, n].
            stop: in [start, n]; each term passes through at most as many additions as there are rows.
        """
        _require(weights, len(self), torch.float64)
        start, stop, _ = slice(start, stop).indices(len(self))
        padded = -(-self.width // 8) * 8
        scratch = weights.new_zeros(2 * _BATCH, padded)
        found = weights.new_zeros(padded, padded)
        place = *self._place, start, max(0, stop - start), len(self)
        _call("gram", *place, self._shares, weights, padded, scratch, found)
        return found[: self.width, : self.width]

    def keep(self, used: Tensor) -> None:
        """Computes the images of all rows once, of which later readings are; 0 for those that are not used, (n,)."""
        padded = -(-self.width // 4) * 4
        kept = self._shares.new_zeros(len(self) + _GROUP, padded)
        for start in range(0, len(self), _KEPT_ROWS):
            part = kept[start : min(start + _KEPT_ROWS, len(self)), : self.width]
            part.copy_(self.images(start, start + len(part)))
        kept[: len(self)][~used] = 0.0
        self._kept = kept

    def scored(
        self,
        columns: Tensor,
        point: Tensor,
        block: int,
        bends: Tensor | None = None,
        *,
        kind: str = "curved",
        gain: float = 1.0,
        scores: Tensor | None = None,
    ) -> Tensor:
        """Returns sums of weighted losses and of their gradients in the point, of blocks of records, added in pairs.

        Args:
            columns: (5, n) float64: weights >= 0 (a record of weight 0 counts for nothing) and targets; of a loss that
                is "curved", the logistic one, the largest slopes (or inf), the margins where they are reached (or
                -inf), and the losses there; of one that is "bent", whose slope is a line in target * score between two
                bounds, where the line is 0, and its bounds. (1, n) slopes, where they are "fixed".
            point: (width,) float64, contiguous.
            block: > 0, number of records of a block.
            bends: (n,) float64, contiguous, for weighted second derivatives; None for none.
            kind: of the loss, a name in `LOSSES`.
            gain: > 0, of the line.
            scores: (n,) float64, contiguous, for the scores; None for none.

        Returns:
            (at least width + 1,) float64: gradients first, and losses last; each term of a block passes through at most
            as many additions as it has records, and each sum of a block through one for each doubling of their number.
        """
        n = len(self)
        _require(columns, n if kind == "fixed" else 5 * n, torch.float64)
        for part, size in (point, self.width), (bends, n), (scores, n):
            _require(part, size, torch.float64)
        padded, weight, sums = self._padded(point.view(1, -1), block)
        scratch = weight.new_zeros(_BATCH, padded)
        given = *self._all(columns), LOSSES[kind], gain
        _call("scored", *given, weight, padded, block, scratch, sums, bends, scores)
        return sums[0]

    def classes(self, columns: Tensor, points: Tensor, block: int) -> tuple[Tensor, Tensor]:
        """Returns sums of weighted losses and of their gradients in the points, as `scored`.

        Args:
            columns: (3, n) float64: weights >= 0, classes in [0, K), and the largest norms of slopes (or inf).
            points: (K, width) float64, of the softmax cross-entropy.
            block: > 0, number of records of a block.

        Returns:
            Losses () and gradients (K, width) float64.
        """
        count = len(points)
        _require(columns, 3 * len(self), torch.float64)
        _require(points, count * self.width, torch.float64)
        padded, weight, sums = self._padded(points, block)
        scratch = weight.new_zeros(_GROUP, padded + count)
        _call("classes", *self._all(columns), weight, count, padded, block, scratch, sums)
        return sums[0, -1], sums[0, :-1].view(count, padded)[:, : self.width]

    def _padded(self, points: Tensor, block: int) -> tuple[int, Tensor, Tensor]:
        """Returns the width for C, points of that width, and zeros for sums of blocks."""
        padded = -(-self.width // 4) * 4
        weight = points.new_zeros(len(points), padded)
        weight[:, : self.width] = points
        return padded, weight, points.new_zeros(len(self) // block + 1, weight.numel() + 1)

    def _all(self, columns: Tensor) -> tuple[Any, ...]:
        """Returns rows, shares, images and columns, as C wants them."""
        return *self._place, len(self), self._shares, self._kept, columns


def below(values: Tensor, weights: Tensor, most: float, block: int) -> Tensor:
    """Returns the sum of the weights of numbers up to this, of blocks of them, which are added in pairs.

    Args:
        values: (n,) float64, contiguous; NaN is not counted.
        weights: (n,) float64, contiguous.
        most: number.
        block: > 0.
    """
    for part in values, weights:
        _require(part, weights.numel(), torch.float64)
    sums = weights.new_zeros(weights.numel() // block + 1)
    _call("below", values, weights, weights.numel(), most, block, sums)
    return sums[0]


def gaps(
    bits: bytes, log_miss: float, room: float, size: int, last: int
) -> npt.NDArray[np.int64] | None:
    """Returns the next positions of a Poisson sample, up to one from `size` on or the end of the words.

    Args:
        bits: words of 8 bytes, a gap each.
        log_miss: log(1 - rate).
        room: within which of an integer the quotient by it decides no gap.
        size: of the sample's universe.
        last: position before.

    Returns:
        None without the accelerator, or where a word does not decide its gap, see `samplers.poisson_positions`.
    """
    library = _found()[0]
    if library is None:
        return None
    n = len(bits) // 8
    places = bytearray(8 * n)  # whose address costs less than that of an array
    out = _Byte.from_buffer(places)
    found = library.dpsco_gaps(bits, n, log_miss, room, size, last, out)
    return None if found < 0 else np.frombuffer(places, np.int64, found)


def logs(words: npt.NDArray[Any], low: float, high: float, out: npt.NDArray[Any]) -> bool:
    """Writes log V of words of 64 bits into float64 numbers; returns whether all are in (low, high)."""
    return bool(_call("logs", words.ctypes.data, len(words), low, high, out.ctypes.data) == 0)


def chacha(
    key: Tensor,
    label: int,
    place: int,
    blocks: int,
) -> bytes | None:
    """Returns blocks of the keystream of ChaCha20 (RFC 8439), of 64 bytes each; None without the accelerator.

    Args:
        key: (32,) uint8.
        label: first 64 bits of the nonce.
        place: of the first block: its counter, whose bits above 32 are in the rest of the nonce.
        blocks: how many.
    """
    if not is_available():
        return None
    _require(key, 32, torch.uint8)
    out = np.empty(64 * blocks, dtype=np.uint8)
    # PRIVACY: not 0, as on a device (test_no_block_of_a_slice_is_drawn_twice)
    _call(
        "chacha",
        key,
        label,
        1,  # of the host
        place,
        blocks,
        out.ctypes.data,
    )
    return out.tobytes()


def gaussians(
    bits: bytes,
    out: Tensor,
    scale: float,
    low: float,
    high: float,
    mean: Tensor | None = None,
    logarithms: npt.NDArray[Any] | None = None,
) -> int | None:
    """Writes mean + scale times Gaussians of bits, all cosines before the sines; see docs/proofs/noise.md#gaussians.

    Args:
        bits: for each of (n + 1) // 2 pairs a word of 8 bytes, then for each an angle of as many bytes as a number has.
        out: n numbers, float32 or float64, contiguous, changed in place.
        scale: standard deviation.
        low: least logarithm that needs no further bits.
        high: largest one.
        mean: n numbers, float64, contiguous; default zeros.
        logarithms: (pairs,) float64, of the words; default computed.

    Returns:
        How many of the logarithms that were not given are outside of (low, high); None without the accelerator.
    """
    library = _found()[0]
    if library is None:
        return None
    n = out.numel()
    wide = out.dtype is torch.float64
    _require(mean, n, torch.float64)
    if len(bits) < (n + 1) // 2 * (16 if wide else 12):
        # PRIVACY: what is read beyond them is not random (test_too_few_bits_are_refused)
        raise ValueError(f"bits must be enough for {n} numbers (got {len(bits)} bytes)")
    given = None if logarithms is None else logarithms.ctypes.data
    start = None if mean is None else mean.data_ptr()
    outside: int = library.dpsco_gaussians(
        bits,
        n,
        wide,
        scale,
        low,
        high,
        given,
        start,
        out.data_ptr(),
    )
    return outside


HALF = (torch.bfloat16, torch.float16)
_VARIABLES = ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE")  # of torch's CPU kernels
_EXACT = ("none", "ieee")
_KERNELS: dict[str, Any] = {"conv": ConvNd, "rnn": nn.RNNBase}  # with switches of their own


def require_full_precision(backprops: Tensor) -> None:
    """Raises SequenceError for half-precision gradients of a mean loss: one record more would move all of them."""
    if backprops.dtype in HALF:
        raise SequenceError(
            "a backward in half precision needs a loss that sums over the batch: say"
            " loss_reduction='sum' to dp.attach or dp.make_private, and reduction='sum' to the loss;"
            " the optimizer divides by the batch size"
        )


class Coarse(NamedTuple):
    """A setting that makes products round to fewer bits than float32 has, and how to switch it off."""

    setting: str
    cure: str


def _coarse_products() -> Coarse | None:
    """Returns the setting by which all float32 products are rounded to fewer bits; None if there is none."""
    for name in _VARIABLES:
        if os.environ.get(name, "strict").upper() != "STRICT":
            setting = f"the environment variable {name}={os.environ[name]}"
            return Coarse(setting, f"unset {name} and start anew")
    try:
        if torch.get_float32_matmul_precision() == "highest":
            return None
    except RuntimeError:
        pass  # set through torch's newer per-backend switches: unknown, so assume the worst
    return Coarse(
        "torch.set_float32_matmul_precision, or another switch of products in reduced precision,",
        "torch.set_float32_matmul_precision('highest')",
    )


def products_are_exact() -> bool:
    """Returns whether float32 products run in float32: TensorFloat-32 and bfloat16 shortcuts are off."""
    return _coarse_products() is None


def slack(dtype: torch.dtype) -> float:
    """Returns how far two ways to compute a gradient may be apart, relative to its size, without one being wrong."""
    return 3e-2 if dtype in HALF or not products_are_exact() else 1e-3


def _coarse_kernels(library: str, kernels: str) -> Coarse | None:
    """Returns the switch by which convolutions or recurrent layers are rounded; torch < 2.9 has one for CUDA only."""
    backend = getattr(torch.backends, library)
    switch = getattr(backend, kernels, None)
    for_all = f"torch.backends.{library}.allow_tf32"
    if switch is None:
        coarse = getattr(backend, "allow_tf32", False)
        return Coarse(f"{for_all}=True", f"{for_all} = False") if coarse else None
    if switch.fp32_precision in _EXACT:
        return None
    own = f"torch.backends.{library}.{kernels}.fp32_precision"
    # on by default on CUDA, where nothing was asked for
    default = (library, switch.fp32_precision, backend.fp32_precision) == (
        "cudnn",
        "tf32",
        "none",
    )
    cure = f"{for_all} = False" if default else f"{own} = 'ieee'"
    return Coarse(f"{own}={switch.fp32_precision!r}", cure)


def inexact_mean(layers: Iterable[nn.Module], params: Sequence[Tensor]) -> str | None:
    """Returns why a mean loss must be refused, None where it is divided by B in all the bits of its numbers.

    Args:
        layers: of the model, as far as they are known.
        params: its trained parameters.
    """
    if not params:
        return None
    layers = list(layers)
    device = params[0].device.type
    found = _coarse_products()
    if torch.is_autocast_enabled(device):
        found = Coarse(f"torch.autocast({device!r})", "leave it before loss and backward")
    library = "cudnn" if device == "cuda" else "mkldnn"
    for name, kind in _KERNELS.items():
        if found is None and any(isinstance(layer, kind) for layer in layers):
            found = _coarse_kernels(library, name)
    if found is None:
        return None
    known = (*params, *(p for layer in layers for p in layer.parameters(recurse=False)))
    # PRIVACY: frozen ones too lie between the loss and the rows
    # (test_frozen_single_precision_counts_for_a_mean_loss)
    if all(p.dtype == torch.float64 for p in known):  # products of these have no shortcut
        return None
    # PRIVACY: one record more moves all rows of a mean (test_a_mean_loss_in_reduced_matmul_precision_is_refused)
    return (
        f"a mean loss needs products in full precision, and {found.setting} rounds its 1/B to fewer"
        " bits, in the rows of all records: use a loss that sums, dp.attach(model,"
        " loss_reduction='sum') and criterion(..., reduction='sum') (the optimizer divides by the"
        f" batch size), or switch it off: {found.cure}"
    )
