"""How many rows lie within a radius of each row: exact counts, tiled, without an n x n matrix.

Two rows are neighbors if the sum of the squares of their differences, in float64 and in one fixed order, is at most the
square of the radius. That is a function of these two rows alone: not of their places, of the other rows, of tiles,
threads or BLAS. So replacing one row changes each other count by at most 1, and adding a row likewise. With D columns
and u = 2^-53, neighbors are at distance <= r (1 + (D + 7) u), and rows at distance <= r (1 - (D + 7) u) are neighbors.

Almost all pairs are decided without that sum, by one matrix product per tile: with h = |y|^2 / 2 the entry

    (-y_j, h_j, 1) . (y_k, 1, h_k - r^2 / 2) = (|y_j - y_k|^2 - r^2) / 2

has an absolute error below m = 4 (D + 8) u (h_j + h_k + r^2), in any order of summation, and where it exceeds m its
sign also agrees with the sum above. Entries are clamped to [-M, M], M >= 2 m a power of 2. If their squares add up to
M^2 times their number as computed, no square misses more than 2^-12 M^2, so that all entries are certain, and row sums
count the neighbors. Else entries inside of +-M are decided by the sum itself.

Source: docs/proofs/rounding.md#neighbor-counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

_TILE = 1024  # rows of a tile
_WIDTH = 1024  # and its columns
_PAIRS = 256  # that are decided at once by the sum of squares
_ROW_ELEMENTS = 2**20  # numbers in a tile of whole rows
_UNIT = 2.0**-53
_REACH = 1e70  # longer rows count as not finite: fourth powers must not overflow


def read(rows: Tensor, index: Tensor | slice, columns: slice = slice(None)) -> Tensor:
    """Returns a fresh float64 tile of some rows and columns."""
    return rows[index, columns].to(torch.float64, copy=True)


def tiles(rows: Tensor, index: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields (index, whole rows) for parts of an index."""
    for part in index.split(max(1, min(_TILE, _ROW_ELEMENTS // max(rows.shape[1], 1)))):
        yield part, read(rows, part)


def _columns(rows: Tensor) -> list[slice]:
    """Returns the ranges of columns that are read at once."""
    dim = rows.shape[1]
    return [slice(start, min(start + _WIDTH, dim)) for start in range(0, dim, _WIDTH)]


def square_norms(rows: Tensor) -> Tensor:
    """Returns squared norms: (n,) float64, each a function of its own row to the last bit."""
    return _added(rows, torch.arange(len(rows), device=rows.device), None)


def squares(rows: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Returns squared distances of pairs of rows: (P,) float64, each a function of its two rows to the last bit."""
    return _added(rows, first, second)


def _added(rows: Tensor, first: Tensor, second: Tensor | None) -> Tensor:
    out = rows.new_zeros(len(first), dtype=torch.float64)
    for start in range(0, len(first), _PAIRS):
        span = slice(start, start + _PAIRS)
        for columns in _columns(rows):
            tile = read(rows, first[span], columns)
            if second is not None:
                tile.sub_(read(rows, second[span], columns))
            out[span] += _fold(tile.square_())
    return out


def within(rows: Tensor, reach: float) -> Tensor:
    """Returns which rows are finite and at most about `reach` long: (n,) bool, each by its own row."""
    # PRIVACY: NaN compares as False (test_rows_that_are_not_finite_are_their_own_only_neighbor)
    return square_norms(rows) <= reach * reach


def _fold(tile: Tensor) -> Tensor:
    """Returns the sums of the rows of a tile, which is overwritten, by additions in an order that D alone fixes."""
    width = tile.shape[1]
    while width > 1:
        # PRIVACY: elementwise additions round the same wherever a row stands; a reduction need not
        # (test_counts_do_not_depend_on_the_places_of_rows)
        half = (width + 1) // 2
        tile[:, : width - half] += tile[:, half:width]
        width = half
    return tile[:, 0] if tile.shape[1] else tile.new_zeros(len(tile))


def neighbor_counts(rows: Tensor, radius: float, among: Tensor | None = None) -> Tensor:
    """Returns how many rows, itself included, lie within the radius of each row: (n,) int64.

    Args:
        rows: (n, D) floating.
        radius: in [1e-60, 1e60], where fourth powers neither overflow nor underflow.
        among: (n,) bool, rows that can have neighbors; others count themselves only. Default: the finite ones.

    Guarantee:
        Exact in the sense of the module: the indicator of a pair is a function of its two rows. Memory: tiles of 1024 x
        1024 float64, whatever n and D.

    Source: docs/proofs/rounding.md#neighbor-counts.

    Example:
        >>> neighbor_counts(torch.tensor([[0.0], [1.0], [2.0], [float("nan")]]), 1.0).tolist()
        [2, 3, 2, 1]
    """
    half = square_norms(rows) / 2
    finite = half <= _REACH * _REACH / 2
    index = (finite if among is None else among & finite).nonzero().squeeze(1)
    # PRIVACY: those left out count themselves, not 0 (test_one_user_moves_the_score_by_at_most_its_sensitivity)
    counts = torch.ones(len(rows), dtype=torch.int64, device=rows.device)
    counts[index] = 0
    parts = index.split(_TILE) if len(index) else ()
    most = min(_TILE, len(index))
    # for all tiles: fresh memory costs as much as the arithmetic on a small one
    room = half.new_empty(most * most)
    for i, first in enumerate(parts):
        for second in parts[i:]:
            entries = room[: len(first) * len(second)].view(len(first), len(second))
            unit = _fill(entries, rows, half, radius * radius, (first, second))
            counts[first] += _negative(entries, unit)
            if first is not second:
                counts[second] += _negative(entries.t(), unit)
    return counts


def _fill(
    entries: Tensor, rows: Tensor, half: Tensor, square: float, pair: tuple[Tensor, Tensor]
) -> float:
    """Sets the entry of each pair of rows of two tiles to -unit if they are neighbors, else to unit; returns that."""
    first, second = pair
    columns = _columns(rows) or [slice(0, 0)]
    left = _wider(rows[first, columns[0]], -half[first], -1.0)
    right = _wider(rows[second, columns[0]], 1.0, half[second] - square / 2)
    entries.addmm_(left, right.t(), beta=0, alpha=-1)
    for more in columns[1:]:
        entries.addmm_(read(rows, first, more), read(rows, second, more).t(), alpha=-1)
    largest = float(half[first].max() + half[second].max()) + square
    # a power of 2: sums of entries +-unit are exact
    unit = 2.0 ** math.ceil(math.log2(8 * (rows.shape[1] + 8) * _UNIT * largest))
    flat = entries.clamp_(-unit, unit).view(-1)
    if float(torch.dot(flat, flat)) != flat.numel() * unit * unit:
        _decide(entries, rows, square, pair, unit)
    return unit


def _wider(tile: Tensor, *columns: Tensor | float) -> Tensor:
    """Returns a tile with two columns more, in float64."""
    wide = tile.new_empty(len(tile), tile.shape[1] + 2, dtype=torch.float64)
    wide[:, :-2] = tile
    wide[:, -2], wide[:, -1] = columns
    return wide


def _decide(
    entries: Tensor, rows: Tensor, square: float, pair: tuple[Tensor, Tensor], unit: float
) -> None:
    """Replaces entries that are not certain by the verdict of the sum of squares."""
    step = max(1, _PAIRS * _PAIRS // entries.shape[1])
    for part, first in zip(entries.split(step), pair[0].split(step), strict=True):
        j, k = (part.abs() < unit).nonzero(as_tuple=True)
        # PRIVACY: by the two rows alone (test_ties_are_decided_by_the_two_rows_alone)
        near = squares(rows, first[j], pair[1][k]) <= square
        part[j, k] = (1.0 - 2.0 * near.double()).mul_(unit)


def _negative(entries: Tensor, unit: float) -> Tensor:
    """Returns how many entries of each row are -unit; all are +-unit."""
    ones = entries.new_ones(entries.shape[1])
    return ((len(ones) - torch.mv(entries, ones) / unit) / 2).round_().long()


def mean_rounding(users: int, diameter: float, reach: float) -> float:
    """Returns a bound of what rounding adds to the distance of two weighted means.

    A chain of at most all users (BLAS may add row by row), and a few roundings of weights, products and the quotient,
    in each of sum and divisor: relative errors of means of differences of at most `diameter`; then one rounding of a
    point that is at most `reach` long; twice.

    Args:
        users: most rows.
        diameter: of the rows of positive weight.
        reach: of all rows.
    """
    return 2.0 * _UNIT * ((2 * users + 24) * diameter + 2.0 * reach)
