"""Sums of gradients near a point where all records were read: for losses whose slope is a line between two bounds.

Where no record passes a bound on the way from one point to another, the sum of gradients changes by a matrix times the
way. Records that may pass one are read by themselves, and all of them where these are many.

What is computed is the sum over all records, but for rounding, however far a point was read before: no privacy rests on
the choice.

Source: docs/proofs/rounding.md#sums-near-a-point
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_dpsco.estimators.records import Records, RowLosses, pairwise
from torch_dpsco.estimators.solvers import BLOCK_ROWS

ROUNDINGS = 6.0  # times those of a sum over all records, where the way is within the reach
_FEW = 16  # one record in so many may be close to a bound
_CALM = 0.5  # of the reach: a step that short may be near the next ones
_AHEAD = 8.0  # times the last step: how far the next points may be
NEAR_ROWS = 4096  # below, a reading of all is as fast


@dataclass(frozen=True)
class _Place:
    """A point that was read.

    Attributes:
        point: w0.
        reach: how far from it the sums below hold.
        gradient: sum of all gradients there.
        matrix: derivative of the sum of the gradients of records between their bounds.
        within: (k,) how far a point may be before each of the records below may pass a bound; in order.
        rows: (k, d) their rows.
        columns: (4, k) their lines at w0, weights times targets, bounds.
        steep: (k,) targets times gain.
    """

    point: Tensor
    reach: float
    gradient: Tensor
    matrix: Tensor
    within: Tensor
    rows: Tensor
    columns: Tensor
    steep: Tensor

    def sum_at(self, move: Tensor, length: float) -> Tensor:
        """Returns the sum of all gradients at w0 + move."""
        total = self.gradient + self.matrix @ move
        count = int(torch.searchsorted(self.within, length, right=True))
        if count:
            rows = self.rows[:count]
            line, weight, low, high = self.columns[:, :count]
            change = self.steep[:count] * (rows @ move)
            inside = (line > low) & (line < high)
            less = torch.where(inside, change, 0.0)
            cut = (line + change).clamp(low, high) - line.clamp(low, high)
            total = total + _added(rows, weight * (cut - less))
        return total


def _added(rows: Tensor, by: Tensor) -> Tensor:
    """Returns `by` (.., n) times rows (n, d), each term of which passes as many additions as in a sum over records."""
    parts = zip(by.split(BLOCK_ROWS, dim=-1), rows.split(BLOCK_ROWS), strict=True)
    return pairwise(torch.stack([some @ part for some, part in parts]))


class NearSums:
    """Sums of gradients at points of a run, each read anew or found from one that was read: NOT private.

    Args:
        records: in memory, read in C.
        losses: "bent".
        reach: > 0, public: how far from a point that was read its matrix is used.
        whole: sum of weights times x x', over all records.
    """

    def __init__(self, records: Records, losses: RowLosses, reach: float, whole: Tensor) -> None:
        self._records = records
        self._losses = losses
        self._reach = reach
        self._whole = whole
        self._place: _Place | None = None
        self._last: Tensor | None = None
        self._uses = math.inf  # of the last place, and readings since
        self._price = 3.0  # of a place, in readings

    def __call__(self, point: Tensor) -> Tensor:
        """Returns the sum at a point, (d,)."""
        place = self._place
        self._uses += 1
        if place is not None:
            move = point - place.point
            length = float(torch.linalg.vector_norm(move)) * (1 + 1e-9)
            if length < place.reach:
                return place.sum_at(move, length)
            self._place = None
        last = self._last
        self._last = point.clone()
        step = math.inf if last is None else float((point - last).norm())
        if step <= _CALM * self._reach and self._uses >= self._price:
            self._uses = 0
            return self._read(point, step)
        return self._records.scored(point, self._losses)[1]

    def _read(self, point: Tensor, step: float) -> Tensor:
        """Reads all records; returns the sum, and keeps the place where few are close to a bound."""
        records = self._records
        weights, sign, zero, low, high = self._losses.columns
        gain = self._losses.gain
        scores = torch.empty_like(weights)
        gradient = records.scored(point, self._losses, scores=scores)[1]
        line = (sign * scores - zero) * gain
        inside = (line > low) & (line < high)
        margin = torch.minimum((line - low).abs(), (line - high).abs())
        steep = sign * gain
        within = torch.where(weights > 0, margin / (steep.abs() * records.norms), math.inf)
        most = records.count // _FEW
        reach = min(_AHEAD * step, self._reach)
        close = within <= reach
        while reach > step and int(close.sum()) > most:
            reach /= 2
            close = within <= reach
        if reach <= step:
            self._price *= 2  # points of a loud run are never near
            return gradient
        near = torch.nonzero(close).squeeze(1)
        near = near[within[near].argsort()]
        few = torch.nonzero((weights > 0) & ~inside).squeeze(1)
        if len(few) <= most:
            rows = records.select(few)
            share = (sign[few] * sign[few] * weights[few]).unsqueeze(1)
            outside = _added(rows, (share * rows).T) if len(few) else 0.0
            matrix = gain * (self._whole - outside)
        else:
            matrix = records.gram(torch.where(inside, weights * sign * steep, 0.0))
            self._price = 4 + records.dim / 8
        columns = torch.stack([column[near] for column in (line, weights * sign, low, high)])
        rows = records.select(near)
        self._place = _Place(
            point.clone(), reach, gradient, matrix, within[near], rows, columns, steep[near]
        )
        return gradient
