"""Norms and sums of float32 rows on CUDA, by kernels of Triton: one launch for what takes torch ten.

What `native` is on the CPU: tiles of outer products are added in float32 and their sums in float64, which leaves room
for larger tiles. None of it waits for the device, and a norm is computed by a program that reads its row only, so that
it has the same bits beside any other rows. Whatever does not suit is left to torch.

Source: docs/proofs/rounding.md#sums-and-norms-on-a-gpu.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from torch_dpsco import native
from torch_dpsco.rows.blocks import NORM_ERROR, PIECE, UNDERFLOW
from torch_dpsco.trial import attempt

_ROWS = 16  # of a product, the least that Triton takes
_HIGH = 32
_BROAD = 64
_PROGRAMS = 256  # rows are divided among programs up to that many
_LEAST = 64  # rows of one
_WIDEST = 2**14  # numbers of a row, which one program reads


def suits(rows: Tensor) -> bool:
    """Returns whether a kernel can read rows: (B, k > 1) float32 on a device, each side by side."""
    return (
        type(rows) is Tensor  # subclasses may have no memory, or another meaning
        and rows.device.type in native.DEVICES
        and rows.dtype is torch.float32
        and rows.dim() == 2
        and rows.layout is torch.strided
        and not rows.is_neg()  # a view whose sign is in its flag
        and rows.shape[1] > 1
        and rows.stride(1) == 1
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
    left = torch.arange(37.0 * 3, dtype=torch.float64, device=device).sin().view(37, 3)
    right = torch.arange(37.0 * 70, dtype=torch.float64, device=device).cos().view(37, 70)
    weights = torch.arange(37.0, dtype=torch.float64, device=device)
    single = left.float(), right.float()
    matrix, vector = _summed(*single, weights, 4)
    off = (matrix.double() - (left * weights[:, None]).t() @ right).abs().max()
    off = off + (vector - weights @ left).abs().max()
    norms = _norms(single[1])
    share = norms / torch.linalg.vector_norm(single[1].double(), dim=1) - 1.0
    return bool((off < 1e-3) & (share > 0.0).all() & (share < 2.0**-13).all())


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


def outer_sums(
    backprops: Tensor,
    rows: Tensor,
    weights: Tensor,
    tile: int,
) -> tuple[Tensor, Tensor]:
    """Returns sums as `native.outer_sums`, of rows on a device that suit."""
    if not (suits(rows) and suits(backprops)):
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
    real = torch.float32 if parts == 1 else torch.float64
    matrix = rows.new_empty(parts, out, width, dtype=real)
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
            matrix,
            vector,
            tile,
            _ROWS,
            _HIGH,
            _BROAD,
        )
    if parts == 1:
        return matrix[0], vector[0]
    return matrix.sum(0).float(), vector.sum(0)
