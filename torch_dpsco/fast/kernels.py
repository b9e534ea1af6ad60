"""Kernels for CUDA, in Triton: the keystream of ChaCha20, Gaussians of it, and norms and sums of rows.

Triton comes with torch's wheels for CUDA. With TRITON_INTERPRET=1 in the environment, before triton is imported, the
kernels run on the CPU, slowly: so they are tested without a device.

* `keystream`: the block function of RFC 8439. A block is named by its counter and its nonce; its words are used once.
* `add_gaussians`: Box and Muller as in `noise`, in float32, by the formulas of `_kernel.c`. Block i of B = ceil(n/10)
  makes ten numbers: those at i, B + i, .., 9 B + i, five cosines before five sines. A pair takes 64 bits for the radius
  and 32 for the angle; one within 2^-20 of an edge takes 192 bits more, of the block whose nonce has the pair's number.

* `squares`, `gram`: norms of rows that are vectors, and of sums of outer products.
* `outer_sums`, `group_sums`: weighted sums of outer products, and of vectors by group.

Arithmetic is that of IEEE 754, rounded to nearest: sums and products, which may be fused, quotients and roots. Nothing
rests on the device's own logarithm, sine and cosine.

Source: docs/proofs/noise.md#on-a-gpu, docs/proofs/rounding.md#sums-and-norms-on-a-gpu; RFC 8439, section 2.3.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _turned(
    x: tl.tensor,
    bits: tl.constexpr,
) -> tl.tensor:
    high = x << bits
    low = x >> (32 - bits)
    return high | low


@triton.jit
def _quarter(
    a: tl.tensor,
    b: tl.tensor,
    c: tl.tensor,
    d: tl.tensor,
) -> tl.tensor:
    a = a + b
    d = _turned(d ^ a, 16)
    c = c + d
    b = _turned(b ^ c, 12)
    a = a + b
    d = _turned(d ^ a, 8)
    c = c + d
    b = _turned(b ^ c, 7)
    return a, b, c, d


@triton.jit
def _word(
    key: tl.tensor,
    place: tl.constexpr,
) -> tl.tensor:
    return tl.load(key + place).to(tl.uint32, bitcast=True)


@triton.jit
def _mixed(words: tl.tensor) -> tl.tensor:
    """Returns 16 words after the 20 rounds."""
    x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15 = words
    for _ in range(10):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    return (
        x0,
        x1,
        x2,
        x3,
        x4,
        x5,
        x6,
        x7,
        x8,
        x9,
        x10,
        x11,
        x12,
        x13,
        x14,
        x15,
    )


@triton.jit
def keystream(
    key: tl.tensor,
    counter: tl.tensor,
    n0: tl.tensor,
    n1: tl.tensor,
    n2: tl.tensor,
) -> tl.tensor:
    """Returns the 16 words of blocks of ChaCha20.

    Args:
        key: place of 8 words of int32.
        counter: (L,) uint32.
        n0: first word of the nonce, as the others of int32.
        n1: second one.
        n2: third one.
    """
    zero = counter ^ counter
    start = (
        zero + 0x61707865,
        zero + 0x3320646E,
        zero + 0x79622D32,
        zero + 0x6B206574,
        zero + _word(key, 0),
        zero + _word(key, 1),
        zero + _word(key, 2),
        zero + _word(key, 3),
        zero + _word(key, 4),
        zero + _word(key, 5),
        zero + _word(key, 6),
        zero + _word(key, 7),
        counter,
        zero + n0,
        zero + n1,
        zero + n2,
    )
    mixed = _mixed(start)
    return (
        mixed[0] + start[0],
        mixed[1] + start[1],
        mixed[2] + start[2],
        mixed[3] + start[3],
        mixed[4] + start[4],
        mixed[5] + start[5],
        mixed[6] + start[6],
        mixed[7] + start[7],
        mixed[8] + start[8],
        mixed[9] + start[9],
        mixed[10] + start[10],
        mixed[11] + start[11],
        mixed[12] + start[12],
        mixed[13] + start[13],
        mixed[14] + start[14],
        mixed[15] + start[15],
    )


@triton.jit
def _joined(
    low: tl.tensor,
    high: tl.tensor,
) -> tl.tensor:
    upper = high.to(tl.uint64) << 32
    return low.to(tl.uint64) | upper


@triton.jit
def _log(
    v: tl.tensor,
    rest: tl.tensor,
) -> tl.tensor:
    """Returns log v of v in (0, 1] and of 1 - v, rounded by itself: v = 2^e m, log m = 2 artanh((m - 1)/(m + 1))."""
    bits = v.to(tl.int32, bitcast=True)
    e = (bits - 0x3F3504F3) >> 23
    m = (bits - (e << 23)).to(tl.float32, bitcast=True)
    s = tl.div_rn(tl.where(e == 0, -rest, m - 1.0), m + 1.0)
    z = s * s
    series = z * (1.0 / 9.0) + 1.0 / 7.0
    series = series * z + 1.0 / 5.0
    series = series * z + 1.0 / 3.0
    s = s + s
    higher = s * (z * series)
    return e.to(tl.float32) * 0.6931471805599453 + (s + higher)


@triton.jit
def _turn(j: tl.tensor) -> tl.tensor:
    """Returns cosine and sine of 2 pi j / 2^32: to the nearest quarter of a turn, then by Taylor's polynomials."""
    quarter = (j + 0x20000000) >> 30
    rest = (j - (quarter << 30)).to(tl.int32, bitcast=True)
    t = rest.to(tl.float32) * 1.4629180792671596e-09  # 2 pi / 2^32
    z = t * t
    s = z * (1.0 / 362880.0) - 1.0 / 5040.0
    s = s * z + 1.0 / 120.0
    s = s * z - 1.0 / 6.0
    s = t + t * (z * s)
    c = z * (-1.0 / 3628800.0) + 1.0 / 40320.0
    c = c * z - 1.0 / 720.0
    c = c * z + 1.0 / 24.0
    c = c * z - 0.5
    c = 1.0 + z * c
    odd = (quarter & 1) != 0
    cosine = tl.where(odd, s, c)
    sine = tl.where(odd, c, s)
    left = ((quarter + 1) & 2) != 0
    below = (quarter & 2) != 0
    cosine = tl.where(left, -cosine, cosine)
    sine = tl.where(below, -sine, sine)
    return cosine, sine


@triton.jit
def _refined(
    key: tl.tensor,
    counter: tl.tensor,
    pair: tl.tensor,
    label: tl.tensor,
    n: tl.tensor,
) -> tl.tensor:
    """Returns the radii of pairs near an edge: V = (2 K + 1)/2^256, or 1 - V, with 192 bits more.

    Args:
        key: place of the key.
        counter: (L,) uint32.
        pair: its number in the block, >= 1.
        label: of the tensor.
        n: (L,) uint64, odd: 64 bits of V.
    """
    words = keystream(key, counter, pair, label, 0)
    upper = n >= 0x8000000000000000
    k = tl.where(upper, 0 - n, n) >> 1
    third = _joined(words[4], words[5])
    second = _joined(words[2], words[3])
    first = _joined(words[0], words[1])
    d = (third.to(tl.float64) + 0.5) * 2.0**-255  # from the edge
    d += second.to(tl.float64) * 2.0**-191
    d += first.to(tl.float64) * 2.0**-127
    d += k.to(tl.float64) * 2.0**-63
    bits = d.to(tl.int64, bitcast=True)
    e = (bits >> 52) - 1022
    m = (bits - (e << 52)).to(tl.float64, bitcast=True).to(tl.float32)
    logarithm = _log(m, 1.0 - m) + e.to(tl.float32) * 0.6931471805599453
    lower = tl.sqrt_rn(logarithm * -2.0)
    near = tl.sqrt(d * (d + 2.0))  # -log(1 - d) = d + d^2/2, d being below 2^-20
    return tl.where(upper, near.to(tl.float32), lower)


@triton.jit
def _add(out: tl.tensor, place: tl.tensor, kept: tl.tensor, noise: tl.tensor) -> None:
    total = tl.load(out + place, mask=kept)
    tl.store(out + place, total + noise, mask=kept)


# one form only, which is the one that was tried: see `on_device.status`
@triton.jit(do_not_specialize=["n", "label"], do_not_specialize_on_alignment=["out"])
def add_gaussians(
    out: tl.tensor,
    n: tl.tensor,
    scale: tl.tensor,
    key: tl.tensor,
    label: tl.tensor,
    LANES: tl.constexpr,
) -> None:
    """Adds scale times Gaussians to n <= 2^30 float32 numbers.

    Args:
        out: place of the numbers.
        n: how many.
        scale: standard deviation, float32.
        key: place of 8 words of int32.
        label: int32, another one for each tensor of a key.
        LANES: blocks of a program, a power of 2; ceil(n/10) of them in all.
    """
    blocks = (n + 9) // 10
    i = tl.program_id(0) * LANES + tl.arange(0, LANES)
    counter = i.to(tl.uint32)
    words = keystream(key, counter, 0, label, 0)
    for pair in tl.static_range(5):
        v = _joined(words[3 * pair], words[3 * pair + 1])
        v = v | 1  # of 2^64, an odd number
        rest = 0 - v
        below = v.to(tl.float32) * 2.0**-64
        above = rest.to(tl.float32) * 2.0**-64
        radius = tl.sqrt_rn(_log(below, above) * -2.0)
        nearest = tl.minimum(v, rest)
        edge = nearest < 0x100000000000
        if tl.max(edge.to(tl.int32), 0) > 0:
            # PRIVACY: 63 bits alone would end at 9.4 std, in steps (test_what_is_drawn_beyond_64_bits_counts,
            # test_pairs_at_edges_have_further_bits_of_their_own)
            refined = _refined(key, counter, pair + 1, label, v)
            radius = tl.where(edge, refined, radius)
        radius = radius * scale
        cosine, sine = _turn(words[3 * pair + 2])
        # PRIVACY: lanes past the last block would add to another's numbers (test_every_number_gets_its_noise_once)
        own = i < blocks
        first = pair * blocks + i
        second = first + 5 * blocks
        _add(out, first, own & (first < n), cosine * radius)
        _add(out, second, own & (second < n), sine * radius)


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["rows"])
def squares(
    rows: tl.tensor,
    step: tl.tensor,
    width: tl.tensor,
    found: tl.tensor,
    PIECE: tl.constexpr,
) -> None:
    """Writes the sum of the squares of a row, a row a program: pieces in float32, and their sums in float64.

    Args:
        rows: place of float32 numbers.
        step: from a row to the next.
        width: numbers of a row.
        found: place of float64 numbers.
        PIECE: numbers of a piece, a power of 2.
    """
    row = tl.program_id(0)
    start = rows + row.to(tl.int64) * step
    total = tl.full((1,), 0.0, tl.float64)
    for first in range(0, width, PIECE):
        place = first + tl.arange(0, PIECE)
        x = tl.load(start + place, mask=place < width, other=0.0)
        total += tl.sum(x * x, 0).to(tl.float64)
    tl.store(found + row + tl.arange(0, 1), total)


# one form for all memory: what it makes of the pairs of a record is then a function of the record alone
@triton.jit(
    do_not_specialize=["n", "out", "width", "share", "tile"],
    do_not_specialize_on_alignment=["left", "right"],
)
def outer_sums(
    left: tl.tensor,
    left_step: tl.tensor,
    right: tl.tensor,
    right_step: tl.tensor,
    weights: tl.tensor,
    n: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    share: tl.tensor,
    tile: tl.tensor,
    matrix: tl.tensor,
    vector: tl.tensor,
    ROWS: tl.constexpr,
    HIGH: tl.constexpr,
    BROAD: tl.constexpr,
) -> None:
    """Writes (HIGH, BROAD) numbers of the sum of w_i l_i r_i^T over some of the rows, and those of w_i l_i.

    The rows of a tile are added in float32, and tiles in float64. Rows of weight 0 are not read.

    Args:
        left: place of l, (n, out) float32.
        left_step: from a row to the next.
        right: place of r, (n, width) float32.
        right_step: from a row to the next.
        weights: place of w, (n,) float64.
        n: number of rows.
        out: numbers of l.
        width: numbers of r.
        share: rows of a program, whole tiles.
        tile: rows of a tile.
        matrix: place of (parts, out, width) float32 or float64.
        vector: place of (parts, out) float64.
        ROWS: of a product, which has zeros in place of rows of the next tile.
        HIGH: of l, in a program.
        BROAD: of r, in a program.
    """
    high = tl.program_id(0) * HIGH + tl.arange(0, HIGH)
    broad = tl.program_id(1) * BROAD + tl.arange(0, BROAD)
    total = tl.zeros((HIGH, BROAD), tl.float64)
    ends = tl.zeros((HIGH,), tl.float64)
    which = tl.program_id(2)
    last = tl.minimum(n, (which + 1) * share)
    for start in range(which * share, last, tile):
        part = tl.zeros((HIGH, BROAD), tl.float32)
        for first in range(start, start + tile, ROWS):
            i = first + tl.arange(0, ROWS)
            inside = (i < last) & (i < start + tile)
            w = tl.load(weights + i, mask=inside, other=0.0)
            # PRIVACY: 0 times what is not finite would be NaN (test_rows_of_weight_0_are_not_read)
            used = (w != 0.0)[:, None]
            place = i.to(tl.int64)[:, None]
            own = used & (high < out)
            b = tl.load(left + place * left_step + high, mask=own, other=0.0)
            own = used & (broad < width)
            x = tl.load(right + place * right_step + broad, mask=own, other=0.0)
            scaled = w[:, None] * b.to(tl.float64)
            ends += tl.sum(scaled, 0)
            turned = tl.trans(scaled.to(tl.float32))
            part = tl.dot(turned, x, part, input_precision="ieee")
        total += part.to(tl.float64)
    inside = high < out
    row = which * out + high
    place = row.to(tl.int64)[:, None] * width + broad
    kept = inside[:, None] & (broad < width)
    tl.store(matrix + place, total, mask=kept)
    tl.store(vector + row, ends, mask=inside & (tl.program_id(1) == 0))


@triton.jit
def _products(
    side: tl.tensor,
    s: tl.tensor,
    t: tl.tensor,
    times: tl.tensor,
    width: tl.tensor,
    TIMES: tl.constexpr,
    PIECE: tl.constexpr,
) -> tl.tensor:
    """Returns the inner products of vectors s with vectors t of a record: pieces in float32, their sums in float64."""
    place = side + tl.program_id(0).to(tl.int64) * times * width
    total = tl.zeros((TIMES, TIMES), tl.float64)
    for first in range(0, width, PIECE):
        k = first + tl.arange(0, PIECE)
        own = (s < times)[:, None] & (k < width)
        x = tl.load(place + s[:, None] * width + k, mask=own, other=0.0)
        own = (t < times)[:, None] & (k < width)
        y = tl.load(place + t[:, None] * width + k, mask=own, other=0.0)
        total += tl.dot(x, tl.trans(y), input_precision="ieee").to(tl.float64)
    return total


@triton.jit
def _lengths(
    products: tl.tensor,
    diagonal: tl.tensor,
    width: tl.tensor,
) -> tl.tensor:
    squares = tl.sum(tl.where(diagonal, products, 0.0), 1)
    # what underflows in any product is below a rounding of two such lengths
    return tl.sqrt(squares + width * 2.0**-101)


@triton.jit(
    do_not_specialize=["times", "out", "width"],
    do_not_specialize_on_alignment=["left", "right"],
)
def gram(
    left: tl.tensor,
    out: tl.tensor,
    right: tl.tensor,
    width: tl.tensor,
    times: tl.tensor,
    found: tl.tensor,
    TIMES: tl.constexpr,
    PIECE: tl.constexpr,
) -> None:
    """Writes what the norm of sum_t l_t r_t^T is made of, for some times s of a record.

    That is sum_st (l_s.l_t)(r_s.r_t) over t >= s, those of t > s twice, and the sum of |l_s| |r_s|, lengths being
    enlarged by what may underflow.

    Args:
        left: place of l, (records, times, out) float32.
        out: numbers of l.
        right: place of r, (records, times, width) float32.
        width: numbers of r.
        times: vectors of a record.
        found: place of (parts, 2, records) float64.
        TIMES: vectors of a program, a power of 2.
        PIECE: numbers of a piece, a power of 2.
    """
    start = tl.program_id(1) * TIMES
    s = start + tl.arange(0, TIMES)
    total = tl.zeros((TIMES,), tl.float64)
    of_left = total
    of_right = total
    for first in range(start, times, TIMES):
        t = first + tl.arange(0, TIMES)
        outer = _products(left, s, t, times, out, TIMES, PIECE)
        inner = _products(right, s, t, times, width, TIMES, PIECE)
        diagonal = s[:, None] == t
        both = outer * inner
        both = tl.where(s[:, None] < t, both + both, tl.where(diagonal, both, 0.0))
        total += tl.sum(both, 1)
        if first == start:
            of_left = _lengths(outer, diagonal, out)
            of_right = _lengths(inner, diagonal, width)
    terms = tl.where(s < times, of_left * of_right, 0.0)
    records = tl.num_programs(0)
    place = found + tl.program_id(1) * 2 * records + tl.program_id(0)
    tl.store(place, tl.sum(total, 0))
    tl.store(place + records, tl.sum(terms, 0))


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["rows"])
def group_sums(
    rows: tl.tensor,
    width: tl.tensor,
    order: tl.tensor,
    starts: tl.tensor,
    weights: tl.tensor,
    found: tl.tensor,
    ROWS: tl.constexpr,
    BROAD: tl.constexpr,
) -> None:
    """Writes BROAD numbers of the weighted sum of the rows of a group, which is added in float64, in one order.

    Args:
        rows: place of (n, width) float32 or float64.
        width: numbers of a row.
        order: place of the numbers of the rows, int64, those of a group after each other.
        starts: place of the first of each group in `order`, int64, and of the end of the last group.
        weights: place of (n,) float64; rows of weight 0 are not read.
        found: place of (groups, width) float32 or float64.
        ROWS: that are read at once, a power of 2.
        BROAD: numbers of a row in a program, a power of 2.
    """
    group = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BROAD + tl.arange(0, BROAD)
    total = tl.zeros((BROAD,), tl.float64)
    last = tl.load(starts + group + 1)
    for first in range(tl.load(starts + group), last, ROWS):
        k = first + tl.arange(0, ROWS)
        i = tl.load(order + k, mask=k < last, other=0)
        w = tl.load(weights + i, mask=k < last, other=0.0)
        # PRIVACY: 0 times what is not finite, as another group's, would be NaN (test_vectors_of_weight_0_are_not_read)
        own = (w != 0.0)[:, None] & (place < width)
        x = tl.load(rows + i[:, None] * width + place, mask=own, other=0.0)
        total += tl.sum(w[:, None] * x.to(tl.float64), 0)
    tl.store(found + group * width + place, total, mask=place < width)
