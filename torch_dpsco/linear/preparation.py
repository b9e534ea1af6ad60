"""What is done to rows and targets before a model sees them: by public numbers, and by private ones that are measured.

    x = (clip((raw - center) / scale, B), c0)                        public
    x = (clip((x - m) / r, 1), c0),   y' = (y - location) / spread   measured: m, r, location and spread are released

A private preparation is one release of Gaussian noise, or several one after the other, in the same charge as the model
that is fitted to what it has prepared. It sets units only: the plan of the fit holds for whatever units come out.

Differs from the paper in: it is not there. Source: docs/proofs/preparation.md
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco._doors import check_fields
from torch_dpsco.accounting.adjacency import Adjacency
from torch_dpsco.accounting.stated import GDP
from torch_dpsco.linear.objectives.base import Records
from torch_dpsco.losses import clip_rows
from torch_dpsco.mechanisms.vector_noise import gaussian_vector
from torch_dpsco.problem import round_up
from torch_dpsco.rng import Source
from torch_dpsco.theory.linear.preparation import COUNTS, rows_moved
from torch_dpsco.theory.linear.solvers import sum_terms
from torch_dpsco.theory.rounding import DOUBLE

_LEAST, _MOST = 1e-100, 1e100  # norms whose squares neither overflow nor underflow


@dataclass(frozen=True)
class Preparation:
    """What is done to each row, by public numbers: centered, scaled, clipped, a constant appended.

    Args:
        bound_x: B > 0, norm that rows are clipped to.
        center: subtracted from each row, (d,); None for 0.
        scale: that each row is divided by, (d,), > 0; None for 1.
        intercept: c0 >= 0, the constant; 0 for no intercept.

    Guarantee:
        A row's image depends on that row alone, and its norm is at most `bound`, rounding included.
    """

    bound_x: float
    center: tuple[float, ...] | None = None
    scale: tuple[float, ...] | None = None
    intercept: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        check.positive(bound_x=self.bound_x), check.nonnegative(intercept=self.intercept)
        for value in self.center or ():
            check.finite(feature_center=value)
        for value in self.scale or ():
            check.positive(feature_scale=value)

    @property
    def bound(self) -> float:
        """Bound on the norm of a prepared row."""
        return round_up(math.hypot(self.bound_x, self.intercept)) if self.intercept else self.bound_x

    def __call__(self, block: Tensor) -> Tensor:
        """Returns prepared rows, float64, of raw ones (B, d)."""
        # PRIVACY: torch sums strided rows in an order that depends on their number
        # (test_the_image_of_a_row_is_the_same_in_every_block)
        rows = block.double().contiguous()
        if self.center is not None:
            rows = rows - torch.tensor(self.center, dtype=torch.float64, device=rows.device)
        if self.scale is not None:
            rows = rows / torch.tensor(self.scale, dtype=torch.float64, device=rows.device)
        rows = self._clip(rows)
        if not self.intercept:
            return rows
        return torch.cat([rows, rows.new_full((len(rows), 1), self.intercept)], dim=1)

    def _clip(self, rows: Tensor) -> Tensor:
        """Returns rows in the ball; what is done to one does not depend on the others, to the last bit."""
        norms = torch.linalg.vector_norm(rows, dim=1)
        most = self.bound_x * (1 - 2.0**-50 * (rows.shape[1] + 8))  # less by the rounding of norm and product
        # PRIVACY: the bound that all constants rest on is enforced (test_no_prepared_row_exceeds_its_bound)
        clipped = rows * torch.where(norms > most, most / norms, 1.0).unsqueeze(1)
        odd = ~((norms > _LEAST) & (norms < _MOST))  # NaN and 0 are, too
        if bool(odd.any()):
            clipped[odd] = clip_rows(rows[odd], most)
        return clipped

    @property
    def shift_and_scale(self) -> tuple[Tensor, Tensor]:
        """What rows within the bound are shifted and divided by, 0-dimensional or (d,) each."""
        return _tensor(self.center, 0.0), _tensor(self.scale, 1.0)


def _tensor(values: tuple[float, ...] | None, default: float) -> Tensor:
    return torch.tensor(default if values is None else values, dtype=torch.float64)


class RowMap(Protocol):
    """A map of raw rows (B, d) to prepared ones (B, width), each by itself, with these public or released numbers."""

    @property
    def intercept(self) -> float:
        """c0, the constant that is appended; 0 for none."""

    @property
    def shift_and_scale(self) -> tuple[Tensor, Tensor]:
        """What rows within the bounds are shifted and divided by."""

    def __call__(self, block: Tensor) -> Tensor:
        """Returns prepared rows, float64."""


@dataclass(frozen=True)
class Chain:
    """Two maps of rows, one after the other; the first has no intercept."""

    first: Preparation
    then: Preparation

    @property
    def intercept(self) -> float:
        """c0, the constant that is appended; 0 for none."""
        return self.then.intercept

    @property
    def shift_and_scale(self) -> tuple[Tensor, Tensor]:
        """What rows within the bounds are shifted and divided by."""
        (center, scale), (shift, unit) = self.first.shift_and_scale, self.then.shift_and_scale
        return center + scale * shift, scale * unit

    def __call__(self, block: Tensor) -> Tensor:
        """Returns prepared rows, float64."""
        return self.then(self.first(block))


@dataclass(frozen=True)
class Units:
    """Units that a model is fitted in: public, or released.

    Args:
        rows: map of raw rows.
        location: subtracted from targets.
        spread: > 0, that they are divided by then.
    """

    rows: RowMap
    location: float = 0.0
    spread: float = 1.0


_LOCATION_STEPS, _SCALE_STEPS = 16, 8
_LEAST_SPREAD = 500  # Y over the least spread of targets


@dataclass(frozen=True, kw_only=True)
class PrivatePreparation:
    """Public numbers of a private preparation: what is measured, at which levels mu of Gaussian noise.

    Args:
        given: public preparation of raw rows, without an intercept, for the bound of what is measured.
        rows: level of center, number and spread of rows; 0 leaves them as they are.
        targets: level of location and spread of targets; 0 leaves them as they are.
        bound_y: Y > 0, that raw targets are clipped to; None for labels.
        quantile: in (0, 1): the location is this quantile of targets, the spread their median distance from it.
        spreads: whether the spread is measured, and targets are in units of it.
        reach: length that rows are clipped to, over their spread.

    Guarantee:
        GDP of `level`, for the units. Prepared neighbors are neighbors, whatever the units are, with rows of norm at
        most 1 and targets of at most `most`.
    """

    given: Preparation
    rows: float = 0.0
    targets: float = 0.0
    bound_y: float | None = None
    quantile: float = 0.5
    spreads: bool = True
    reach: float = 1.2

    def __post_init__(self) -> None:
        check_fields(self)
        check.nonnegative(rows=self.rows), check.nonnegative(targets=self.targets)
        check.open_interval(0.0, 1.0, quantile=self.quantile), check.positive(reach=self.reach)
        if self.rows == self.targets == 0:
            raise ValueError("rows or targets must be > 0: nothing is measured")
        if self.given.intercept:
            raise ValueError(f"given must have no intercept (got {self.given.intercept:g})")
        if self.targets and self.bound_y is None:
            raise ValueError("bound_y must be given for targets to be measured")

    @property
    def level(self) -> float:
        """Mu of all that is measured, together."""
        return math.hypot(self.rows, self.targets) * (1 + 2.0**-50)

    @property
    def most(self) -> float | None:
        """Bound on targets in private units; None for labels."""
        if not self.targets or self.bound_y is None:
            return self.bound_y
        return 2.0 * (_LEAST_SPREAD if self.spreads else self.bound_y)

    def event(self, adjacency: Adjacency) -> GDP:
        """Returns what the measurements charge."""
        return GDP(self.level, (adjacency,))

    def __str__(self) -> str:
        parts = []
        if self.rows:
            parts.append(f"center and spread of rows (mu={self.rows:.3g}), which are clipped to {self.reach:g} spreads")
        if self.targets:
            middle = "median" if self.quantile == 0.5 else f"{self.quantile:g}-quantile"
            beside = " and the median distance from it" if self.spreads else ""
            parts.append(f"{middle} of targets{beside} (mu={self.targets:.3g})")
        return f"measured with noise, within the budget: {'; '.join(parts)}"

    # -- measuring ----------------------------------------------------------------------------------------------------

    def measure(self, records: Records, unit: Preparation, most: int, adjacency: Adjacency, source: Source) -> Units:
        """Draws the noise, which the caller has charged, and returns private units.

        Args:
            records: prepared by `given`, with raw targets within bound_y.
            unit: of rows in private units, with its intercept; what rows are mapped by if they are not measured.
            most: public cap on their number.
            adjacency: of the charge.
            source: of the noise.
        """
        # PRIVACY: sums are rounded, in both data sets (test_rounding_is_in_the_noise_of_a_preparation)
        room = 1 + 4 * most * (sum_terms(most) + 16) * DOUBLE
        rows: RowMap = unit
        if self.rows:
            std = rows_moved(adjacency) * room / self.rows
            rows = Chain(self.given, self._rows(records, unit, std, most, source))
        if not self.targets:
            return Units(rows)
        # PRIVACY: of COUNTS counts, each of which a record moves by at most 1
        # (test_no_record_moves_a_count_further_than_its_noise_is_for)
        return Units(rows, *self._targets(records, math.sqrt(COUNTS) * room / self.targets, source))

    def _rows(self, records: Records, unit: Preparation, std: float, most: int, source: Source) -> Preparation:
        bound, weights, dim = self.given.bound_x, records.weights, records.dim
        squares = records.total(weights * (records.norms / bound).clamp(max=1.0).square())
        sums = torch.cat([records.combine(weights / bound), torch.stack([records.total(weights), squares]) / 2])
        sums = sums + gaussian_vector(dim + 2, std, source)
        # from here on post-processing
        count = min(max(2 * float(sums[dim]), 1.0), float(most))
        center = sums[:dim] * (bound / count)
        center = center * min(1.0, bound / max(float(torch.linalg.vector_norm(center)), 1e-300))
        # the noise on the center is subtracted with it, and adds to the distances of rows from it
        noise = dim * (std * bound / count) ** 2
        square = 2 * float(sums[dim + 1]) * bound**2 / count - float(center @ center) + 2 * noise
        spread = math.sqrt(min(max(square, (bound / 50) ** 2), (2 * bound) ** 2))
        return Preparation(1.0, tuple(center.tolist()), (self.reach * spread,) * dim, unit.intercept)

    def _targets(self, records: Records, std: float, source: Source) -> tuple[float, float]:
        targets, weights, bound = records.targets, records.weights, self.bound_y or 1.0

        def count(within: Tensor) -> float:
            return float(records.total(weights * within) + gaussian_vector(1, std, source)[0])

        everything = max(count(torch.ones_like(weights)), 1.0)
        low, high = -bound, bound
        for _ in range(_LOCATION_STEPS):
            middle = (low + high) / 2
            if count(targets <= middle) < self.quantile * everything:
                low = middle
            else:
                high = middle
        location, distances = high, (targets - high).abs()
        if not self.spreads:
            return location, 1.0
        low, high = math.log(bound / _LEAST_SPREAD), math.log(2 * bound)
        for _ in range(_SCALE_STEPS):
            middle = (low + high) / 2
            if count(distances <= math.exp(middle)) < everything / 2:
                low = middle
            else:
                high = middle
        return location, max(math.exp(high), bound / _LEAST_SPREAD)
