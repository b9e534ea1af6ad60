"""Norms and sums of float32 rows on CUDA, by kernels of Triton: one launch for what takes torch ten.

What `native` is on the CPU: tiles of outer products are added in float32 and their sums in float64, which leaves room
for larger tiles. None of it waits for the device, and a norm is computed by programs that read its row only, so that
it has the same bits beside any other rows. Whatever does not suit is left to torch.

* vectors: `norms`; their outer products: `outer_sums`;
* sequences, and patches of convolutions, left as factors: `Sequences`, of which each record is a tile;
* embeddings: `grouped`, of vectors by record and item, by record, and by item, in an order that is sorted first.

Source: docs/proofs/rounding.md#sums-and-norms-on-a-gpu.
"""

from __future__ import annotations

from functools import lru_cache, reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_dpsco import native
from torch_dpsco.rows.blocks import (
    NORM_ERROR,
    PIECE,
    UNDERFLOW,
    Block,
    SequenceBlock,
    Summation,
)
from torch_dpsco.rows.layers.kinds import ItemBlock
from torch_dpsco.trial import attempt

_ROWS = 16  # of a product, the least that Triton takes
_HIGH = 32
_BROAD = 64
_PROGRAMS = 256  # rows are divided among programs up to that many
_LEAST = 64  # rows of one
_WIDEST = 2**14  # numbers of a row, which one program reads
_TIMES = 32  # of a record, in a program
_CHAIN = 32  # products that are added in float32
_AT_ONCE = 32  # rows of a group


def suits(*rows: Tensor) -> bool:
    """Returns whether kernels can read rows: float32 on a device, (B, k > 1), each side by side, or (B, T, k > 1)."""
    return all(
        _can_read(part)
        and part.dtype is torch.float32
        and part.shape[-1] > 1
        and (part.dim() == 3 or (part.dim() == 2 and part.stride(1) == 1))
        for part in rows
    )


def _can_read(rows: Tensor) -> bool:
    return (
        type(rows) is Tensor  # subclasses may have no memory, or another meaning
        and rows.device.type in native.DEVICES
        and rows.layout is torch.strided
        and not rows.is_neg()  # a view whose sign is in its flag
        and usable(rows.device)
    )


@lru_cache
def usable(device: torch.device) -> bool:
    """Returns whether the kernels run on a device and give the numbers of torch; they are not used elsewhere."""
    if device.type not in native.DEVICES or native.switched_off():
        return False
    # PRIVACY: what another compiler makes of a kernel may err by more (test_kernels_of_other_sums_are_not_used)
    return attempt("the kernels", lambda: _tried(device)) is True


def _tried(device: torch.device) -> bool:
    """Returns whether sums and norms of rows that are made up are right."""
    left = torch.arange(36.0 * 3, dtype=torch.float64, device=device).sin().view(36, 3)
    right = torch.arange(36.0 * 70, dtype=torch.float64, device=device).cos().view(36, 70)
    weights = torch.arange(36.0, dtype=torch.float64, device=device)
    groups = torch.arange(36, device=device) % 5
    lefts = left.view(2, 18, 3)  # two records
    rights = right.view(2, 18, 70)
    rows = lefts.transpose(1, 2) @ rights
    matrix, vector = _summed(left.float(), right.float(), weights, 4)
    own = (groups == groups[:5, None]) * weights
    off = [
        matrix - (left * weights[:, None]).t() @ right,
        vector - weights @ left,
        _pair_sums(lefts.float(), rights.float(), weights[1:3]) - rows[0] - 2.0 * rows[1],
        _grouped(right.float(), groups, 5, weights, torch.float64) - own @ right,
    ]
    wrong = torch.stack([part.abs().max() for part in off])
    share = _norms(right.float()) / torch.linalg.vector_norm(right, dim=1)
    # rows that cancel: their terms are 54 times as large
    far = _gram_norms(lefts.float(), rights.float()) / torch.linalg.vector_norm(rows, dim=(1, 2))
    close = (share < 1.0 + 2.0**-13).all() & (far < 1.0 + 2.0**-6).all()
    above = (share > 1.0).all() & (far > 1.0).all()
    right_sums = (wrong < 1e-3).all()
    return bool(right_sums & above & close)


def norms(rows: Tensor) -> Tensor | None:
    """Returns upper bounds of norms as `rows.blocks.row_norms`, (B,) float64; None for rows that do not suit."""
    return _norms(rows) if suits(rows) and rows.shape[1] <= _WIDEST else None


def _norms(rows: Tensor) -> Tensor:
    from torch_dpsco.fast.kernels import squares

    n, width = rows.shape
    found = rows.new_empty(n, dtype=torch.float64)
    piece = min(PIECE, 1 << (width - 1).bit_length())
    with torch.cuda.device_of(rows):
        if n:
            squares[(n,)](rows, rows.stride(0), width, found, piece)
    # PRIVACY: (test_norms_of_the_kernel_are_never_below_the_exact_norm)
    return (
        found.sqrt_()
        .mul_(1.0 + NORM_ERROR[torch.float32])
        .add_(UNDERFLOW[torch.float32] * width**0.5)
    )


def sequences(
    acts: Tensor,
    backprops: Tensor,
    shape: torch.Size,
) -> Block | None:
    """Returns rows as `rows.blocks.SequenceBlock`; None for rows that do not suit."""
    rows = SequenceBlock(acts, backprops, shape)
    return Sequences(rows) if suits(acts, backprops) else None


class Sequences(Block):
    """Rows sum_t g_t a_t^T whose norms bound what a kernel makes of them in float32.

    Args:
        rows: they, for torch.
    """

    def __init__(self, rows: SequenceBlock) -> None:
        self._rows = rows
        self.acts = rows.acts  # which the test of the sizes of batches looks for
        self.backprops = rows.backprops
        self.shapes = rows.shapes

    def __len__(self) -> int:
        return len(self._rows)

    def norms(self) -> Tensor:
        """Returns certified upper bounds as `SequenceBlock`, of the rows as they are summed: (B,) float64."""
        return _gram_norms(self.backprops, self.acts)

    def leaves_out(self, precision: Summation) -> bool:
        """Returns whether a kernel sums the rows, which does not read those of weight 0."""
        return precision.in_c and precision.matrix_tile > 0

    def weighted_sum(self, weights: Tensor, precision: Summation) -> list[Tensor]:
        """Returns [sum_i weights[i] * row_i], in float64; each row is rounded by itself."""
        if not self.leaves_out(precision):
            return self._rows.weighted_sum(weights, precision)
        total = _pair_sums(
            self.backprops,
            self.acts,
            weights,
        )
        return [total.view(self.shapes[0])]

    def select(self, index: Tensor | slice) -> Sequences:
        """Returns the block of some rows."""
        return Sequences(self._rows.select(index))

    def masked(self, kept: Tensor) -> Sequences:
        """Returns the block with zeros for the rows that are not kept."""
        return Sequences(self._rows.masked(kept))

    def dense(self) -> list[Tensor]:
        """Returns [rows]."""
        return self._rows.dense()


def items(
    vectors: Tensor,
    rows: ItemBlock,
) -> Block | None:
    """Returns rows by item, added in one order; None for vectors that do not suit."""
    return Vectors(rows) if suits(vectors) else None


class Vectors(Block):
    """Rows of an embedding, by record and item, which kernels add in one order, without atomic additions.

    Args:
        rows: they, for torch.
    """

    def __init__(self, rows: ItemBlock) -> None:
        self._rows = rows
        self.shapes = rows.shapes

    def __len__(self) -> int:
        return len(self._rows)

    def norms(self) -> Tensor:
        """Returns certified upper bounds as `ItemBlock`: (B,) float64."""
        return self._rows.norms()

    def leaves_out(self, precision: Summation) -> bool:
        """Returns that the kernel does not read rows of weight 0."""
        return True

    def weighted_sum(self, weights: Tensor, precision: Summation) -> list[Tensor]:
        """Returns [sum_i weights[i] * row_i]: added in float64, and kept in float32 where the precision allows it."""
        rows = self._rows
        dtype = torch.float32 if precision.matrix_tile else torch.float64
        own = F.pad(weights.double(), [0, 1])[rows.records]
        total = _grouped(
            rows.vectors,
            rows.items,
            rows.n_items,
            own,
            dtype,
        )
        return [total]

    def select(self, index: Tensor | slice) -> Vectors:
        """Returns the block of some rows, each once."""
        return Vectors(self._rows.select(index))

    def masked(self, kept: Tensor) -> Vectors:
        """Returns the block with zeros for the rows that are not kept, and for what is of no record."""
        return Vectors(self._rows.masked(kept))

    def dense(self) -> list[Tensor]:
        """Returns [rows]."""
        return self._rows.dense()


def _gram_norms(
    left: Tensor,
    right: Tensor,
) -> Tensor:
    from torch_dpsco.fast.kernels import gram

    n, times, out = left.shape
    width = right.shape[2]
    parts = -(-times // _TIMES)
    found = left.new_zeros(max(1, parts), 2, n, dtype=torch.float64)
    with torch.cuda.device_of(left):
        if n and parts:
            left = left.contiguous()
            right = right.contiguous()
            gram[n, parts](
                left,
                out,
                right,
                width,
                times,
                found,
                _TIMES,
                _CHAIN,
            )
    # one after another: a sum of torch may choose another order beside other records
    squares, terms = reduce(torch.add, found.unbind())
    # PRIVACY: (test_norms_of_sequences_by_the_kernel_are_never_below_the_exact_norm,
    # test_products_that_are_lost_in_float32_are_in_the_norm)
    slack = 2.0 * (_CHAIN + 3) * 2.0**-24  # whose root is more than 1 / CANCELLATION
    bounds: Tensor = squares.clamp_(min=0.0).addcmul_(terms, terms, value=slack).sqrt_()
    # PRIVACY: a row that is summed is rounded (test_a_row_as_it_is_summed_is_not_above_its_norm)
    bounds.add_(terms, alpha=(times + 4) * 2.0**-24)
    return bounds.mul_(1.0 + NORM_ERROR[torch.float32])


def outer_sums(
    backprops: Tensor,
    rows: Tensor,
    weights: Tensor,
    tile: int,
) -> tuple[Tensor, Tensor]:
    """Returns sums as `native.outer_sums`, of rows on a device that suit."""
    if not suits(rows, backprops):
        raise ValueError(
            f"rows and backprops must be float32 on {native.DEVICES}, side by side (got {rows.dtype} on"
            f" {rows.device}, {backprops.dtype} on {backprops.device})"
        )
    return _summed(backprops, rows, weights.double().contiguous(), tile)


def _summed(
    backprops: Tensor,
    rows: Tensor,
    weights: Tensor,
    tile: int,
    real: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    from torch_dpsco.fast.kernels import outer_sums as kernel

    n, out = backprops.shape
    width = rows.shape[1]
    if len(rows) != n or weights.shape != (n,) or tile < 1:
        # PRIVACY: what is read beyond them is another record's (test_sums_of_unequal_numbers_are_refused)
        raise ValueError(
            f"rows and weights must be as many as backprops, and tile >= 1 (got {len(rows)},"
            f" {tuple(weights.shape)}, {n}, {tile})"
        )
    grid = -(-out // _HIGH), -(-width // _BROAD)
    most = max(1, _PROGRAMS // (grid[0] * grid[1]))
    share = tile * -(-max(_LEAST, -(-n // most)) // tile)
    parts = max(1, -(-n // share))
    # sums of tiles are rounded once, after all of them are added
    matrix = rows.new_empty(parts, out, width, dtype=real if parts == 1 else torch.float64)
    vector = weights.new_empty(parts, out)
    with torch.cuda.device_of(rows):
        kernel[*grid, parts](
            backprops,
            backprops.stride(0),
            rows,
            rows.stride(0),
            weights,
            n,
            out,
            width,
            share,
            tile,
            matrix,
            vector,
            _ROWS,
            _HIGH,
            _BROAD,
        )
    if parts == 1:
        return matrix[0], vector[0]
    return matrix.sum(0).to(real), vector.sum(0)


def _pair_sums(
    left: Tensor,
    right: Tensor,
    weights: Tensor,
) -> Tensor:
    times = left.shape[1]
    spread = weights.double().repeat_interleave(times)
    backprops = left.flatten(0, 1).contiguous()
    rows = right.flatten(0, 1).contiguous()
    matrix, _ = _summed(
        backprops,
        rows,
        spread,
        max(1, times),
        torch.float64,
    )
    return matrix


def grouped(
    rows: Tensor,
    groups: Tensor,
    count: int,
    weights: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor | None:
    """Returns the sums of the rows of each group, added in float64 in their order; None for rows that do not suit.

    Args:
        rows: (n, ...) float32 or float64.
        groups: (n,) int64 in [0, count]; what is of `count` is left out.
        count: of groups.
        weights: (n,) float64, of rows; those of weight 0 are not read. None for ones.
        dtype: of the sums; None for that of rows.
    """
    if not _can_read(rows) or rows.dtype not in NORM_ERROR:
        return None
    if weights is None:
        weights = rows.new_ones(len(rows), dtype=torch.float64)
    flat = rows.reshape(len(rows), rows.shape[1:].numel()).contiguous()
    sums = _grouped(
        flat,
        groups,
        count,
        weights,
        dtype or rows.dtype,
    )
    return sums.view(count, *rows.shape[1:])


def _grouped(
    rows: Tensor,
    groups: Tensor,
    count: int,
    weights: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    from torch_dpsco.fast.kernels import group_sums

    n, width = rows.shape
    if groups.shape != (n,) or weights.shape != (n,):
        # PRIVACY: what is read beyond them is another record's (test_groups_of_unequal_numbers_are_refused)
        raise ValueError(
            f"groups and weights must be as many as rows (got {tuple(groups.shape)},"
            f" {tuple(weights.shape)}, {n})"
        )
    # rows of weight 0 would make one long group of what is of no record
    ordered, order = groups.masked_fill(weights == 0.0, count).sort(stable=True)
    starts = torch.searchsorted(ordered, torch.arange(count + 1, device=rows.device))
    found = rows.new_empty(count, width, dtype=dtype)
    broad = min(_BROAD, 1 << (width - 1).bit_length())
    with torch.cuda.device_of(rows):
        if found.numel():
            grid = count, -(-width // broad)
            group_sums[grid](
                rows,
                width,
                order,
                starts,
                weights,
                found,
                _AT_ONCE,
                broad,
            )
    return found
