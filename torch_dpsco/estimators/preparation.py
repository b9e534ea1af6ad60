"""What is done to rows and targets before a model sees them: by public numbers, and by private ones that are measured.

    x = (clip((raw - center) / scale, B), c0)                        public
    x = (clip((x - m) / r, 1), c0),   y' = (y - location) / spread   measured: m, r, location and spread are released

A private preparation is one release of Gaussian noise, or several one after the other, in the same charge as the model
that is fitted to what it has prepared. It sets units only: the plan of the fit holds for whatever units come out.

Differs from the paper in: it is not there. Source: docs/proofs/preparation.md

What it costs to measure where rows and targets lie, and how much of a budget to take for it.

Rows with |x| <= B and weights c in [0, 1] give a noisy sum of c x / B, for their center. Records, distances from the
center and targets give noisy counts of those below a threshold, one after the other: private quantiles by bisection.
The levels mu of all Gaussian releases add in squares, with each other and with what follows.

Differs from the paper in: it is not there. Source: docs/proofs/preparation.md
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco._validate import check_fields
from torch_dpsco.accounting.analysis.gaussian import sensitivity_factor
from torch_dpsco.accounting.analysis.rounding import DOUBLE
from torch_dpsco.accounting.events import GDP, Adjacency
from torch_dpsco.estimators.records import Records, sum_terms
from torch_dpsco.losses import enforce_bounds
from torch_dpsco.noise import Source, gaussian_vector
from torch_dpsco.problem import round_up

_MOST_ROWS = 2**40  # of a sum; more would change what is counted for rounding
# norms whose squares neither overflow nor underflow
_LEAST = 1e-100
_MOST = 1e100


@dataclass(frozen=True)
class Preparation:
    """What is done to each row, by public numbers: centered, scaled, clipped, a constant appended.

    Args:
        bound_x: B > 0, norm that rows are clipped to.
        center: subtracted from each row, (d,); None for 0.
        scale: that each row is divided by, (d,), > 0; None for 1.
        intercept: c0 >= 0, the constant; 0 for no intercept.
        whole: whether the constant is shrunk with a row that is clipped. With its target shrunk too, such a record of
            a regression fits the same line, and weighs less.
        before: > 0, norm that rows are clipped to before anything else; inf for none.

    Guarantee:
        A row's image depends on that row alone, and its norm is at most `bound`, rounding included.
    """

    bound_x: float
    center: tuple[float, ...] | None = None
    scale: tuple[float, ...] | None = None
    intercept: float = 0.0
    whole: bool = False
    before: float = math.inf

    def __post_init__(self) -> None:
        check_fields(self)
        check.positive(bound_x=self.bound_x)
        check.nonnegative(intercept=self.intercept)
        check.positive(before=self.before, allow_inf=True)
        # PRIVACY: a share of less is subnormal, and leaves more of a row (test_bounds_below_all_lengths_are_refused)
        check.between(_LEAST, math.inf, bound_x=self.bound_x)
        check.between(_LEAST, math.inf, before=self.before)
        for value in self.center or ():
            check.finite(feature_center=value)
        for value in self.scale or ():
            check.positive(feature_scale=value)

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Preparation:
        """Returns what `dataclasses.asdict` has made primitives of, which JSON may have kept."""
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in row.items()
        }
        return cls(**fields)

    @property
    def bound(self) -> float:
        """Bound on the norm of a prepared row."""
        return (
            round_up(math.hypot(self.bound_x, self.intercept))
            if self.intercept
            else self.bound_x
        )

    def __call__(self, block: Tensor) -> Tensor:
        """Returns prepared rows, float64, of raw ones (B, d)."""
        rows = self._shifted(block)
        clipped = self._clip(rows, self.bound_x)
        if not self.intercept:
            return clipped
        constant = rows.new_full((len(rows), 1), self.intercept)
        return torch.cat(
            [clipped, constant * self._shares(rows).unsqueeze(1) if self.whole else constant],
            dim=1,
        )

    def numbers(self, dim: int) -> list[float] | None:
        """Returns those of `native.Table`, for rows of so many numbers, None for extreme scales."""
        center = self.center or (0.0,) * dim
        scale = self.scale or (1.0,) * dim
        if not all(2.0**-900 < value < 2.0**900 for value in scale):
            return None
        moved = self.center is not None or self.scale is not None
        given = (
            _most(self.before, dim),
            _most(self.bound_x, dim),
            self.intercept,
            float(self.whole),
            float(moved),
        )
        return [*given, *center, *(1 / value for value in scale)]

    def shares(self, block: Tensor) -> Tensor:
        """Returns what is left of each row's length (B,), in (0, 1], of rows with finite numbers."""
        return self._shares(self._shifted(block))

    def _shifted(self, block: Tensor) -> Tensor:
        # PRIVACY: torch sums strided rows in an order that depends on their number
        # (test_the_image_of_a_row_is_the_same_in_every_block)
        rows = block.double().contiguous()
        if self.before < math.inf:
            rows = self._clip(rows, self.before)
        if self.center is not None:
            rows = rows - rows.new_tensor(self.center)
        if self.scale is not None:
            rows = rows / rows.new_tensor(self.scale)
        return rows

    def _shares(self, rows: Tensor) -> Tensor:
        norms = torch.linalg.vector_norm(rows, dim=1)
        most = _most(self.bound_x, rows.shape[1])
        return torch.where(norms > most, most / norms, 1.0)

    def _clip(self, rows: Tensor, bound: float) -> Tensor:
        """Returns rows in the ball; what is done to one does not depend on the others, to the last bit."""
        norms = torch.linalg.vector_norm(rows, dim=1)
        most = _most(bound, rows.shape[1])
        # PRIVACY: the bound that all constants rest on is enforced (test_no_prepared_row_exceeds_its_bound)
        clipped = rows * torch.where(norms > most, most / norms, 1.0).unsqueeze(1)
        odd = ~((norms > _LEAST) & (norms < _MOST))  # NaN and 0 are, too
        if bool(odd.any()):
            clipped[odd] = enforce_bounds(rows[odd], bound_x=most)
        return clipped

    @property
    def shift_and_scale(self) -> tuple[Tensor, Tensor]:
        """What rows within the bound are shifted and divided by, 0-dimensional or (d,) each."""
        return _tensor(self.center, 0.0), _tensor(self.scale, 1.0)


def _most(bound: float, dim: int) -> float:
    """Returns a bound, less by the rounding of norm and product."""
    return bound * (1 - 2.0**-50 * (dim + 8))


def _tensor(values: tuple[float, ...] | None, default: float) -> Tensor:
    return torch.tensor(default if values is None else values, dtype=torch.float64)


@dataclass(frozen=True)
class Units:
    """Units that a model is fitted in: public, or released.

    Args:
        rows: map of raw rows.
        location: subtracted from targets.
        spread: > 0, that they are divided by then.
    """

    rows: Preparation
    location: float = 0.0
    spread: float = 1.0

    def line(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Returns weights (K, d) for raw rows, and (K,) constants, of weights (K, width) for these units."""
        center, scale = (numbers.to(weights.device) for numbers in self.rows.shift_and_scale)
        dim = weights.shape[1] - (self.rows.intercept > 0)
        answer = weights * self.spread
        slopes = answer[:, :dim] / scale
        constant = answer[:, dim:].sum(1) * self.rows.intercept
        return slopes, constant - (slopes * center).sum(1) + self.location

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Units:
        """Returns what `dataclasses.asdict` has made primitives of, which JSON may have kept."""
        return cls(Preparation.of(row["rows"]), row["location"], row["spread"])


# bound over the least one that is told apart
_LEAST_RADIUS = 50
_LEAST_SPREAD = 10**6


@dataclass(frozen=True, kw_only=True)
class PrivatePreparation:
    """Public numbers of a private preparation: what is measured, at which levels mu of Gaussian noise.

    Args:
        given: public preparation of raw rows, without an intercept, for the bound of what is measured.
        rows: level of the noisy sum of rows, for their center; 0 leaves rows as they are.
        counts: level of all noisy counts together: of records, of rows near the center, of targets.
        within: share of rows whose distance from the center is within the radius that they are clipped to.
        bound_y: Y > 0, that raw targets are clipped to; None for labels.
        quantile: in (0, 1): the location of targets is their quantile, and their spread the median distance from it;
            None leaves targets as they are.
        spreads: whether the spread is measured too, and targets are in units of it.
        widest: > 0, the largest unit of targets: a larger spread counts as that; inf for none.

    Guarantee:
        GDP of `level`, for the units. Prepared neighbors are neighbors, whatever the units are, with rows of norm at
        most 1 and targets of at most `most`.
    """

    given: Preparation
    rows: float = 0.0
    counts: float
    within: float = 0.98
    bound_y: float | None = None
    quantile: float | None = None
    spreads: bool = True
    widest: float = math.inf

    def __post_init__(self) -> None:
        check_fields(self)
        check.nonnegative(rows=self.rows)
        check.positive(counts=self.counts)
        check.open_interval(0.0, 1.0, within=self.within)
        check.positive(widest=self.widest, allow_inf=True)
        if self.given.intercept or (self.rows and self.given != Preparation(self.given.bound_x)):
            raise ValueError(
                "given must have no intercept, and rows that are measured neither center nor scale"
                f" (got {self.given})"
            )
        if self.bound_y is not None:
            check.positive(bound_y=self.bound_y)
        if self.quantile is not None:
            check.open_interval(0.0, 1.0, quantile=self.quantile)
            if self.bound_y is None:
                raise ValueError("bound_y must be given for targets to be measured")
        elif not self.rows:
            raise ValueError("rows or quantile must be given: nothing is measured")

    @property
    def level(self) -> float:
        """Mu of all that is measured, together."""
        return math.hypot(self.rows, self.counts) * (1 + 2.0**-50)

    @property
    def counted(self) -> int:
        """Number of noisy counts."""
        return number_of_counts(
            rows=self.rows > 0, targets=self.quantile is not None, spreads=self.spreads
        )

    @property
    def most(self) -> float | None:
        """Bound on targets in private units; None for labels."""
        if self.quantile is None or self.bound_y is None:
            return self.bound_y
        return 2.0 * (_LEAST_SPREAD if self.spreads else self.bound_y)

    def event(self, adjacency: Adjacency) -> GDP:
        """Returns what the measurements charge."""
        return GDP(self.level, (adjacency,))

    def __str__(self) -> str:
        parts = []
        if self.rows:
            parts.append(
                f"the center of rows, and the distance from it that {self.within:.2g} of them keep"
            )
        if self.quantile is not None:
            beside = ", and the median distance from it" if self.spreads else ""
            if self.widest < math.inf:
                beside += f", {self.widest:.4g} at most as a unit"
            parts.append(f"the {self.quantile:g}-quantile of targets{beside}")
        return (
            f"measured within the budget, with noise of level mu={self.level:.3g}:"
            f" {'; '.join(parts)}"
        )

    # -- measuring ----------------------------------------------------------------------------------------------------

    def measure(
        self,
        records: Records,
        unit: Preparation,
        most: int,
        adjacency: Adjacency,
        source: Source,
    ) -> Units:
        """Draws the noise, which the caller has charged, and returns private units.

        Args:
            records: prepared by `given`, with raw targets within bound_y.
            unit: of rows in private units, with its intercept; what rows are mapped by if they are not measured.
            most: public cap on their number.
            adjacency: of the charge.
            source: of the noise.
        """
        # PRIVACY: sums are rounded, in both data sets (test_rounding_is_in_the_noise_of_a_preparation)
        room = 1 + 4 * most * (sum_terms(_MOST_ROWS) + 16) * DOUBLE
        # PRIVACY: a record moves each count by at most 1 (test_no_record_moves_a_count_by_more_than_1,
        # test_rounding_is_in_the_noise_of_a_preparation)
        counter = _Counter(records, math.sqrt(self.counted) * room / self.counts, source)
        total = max(counter.count(lambda part: part.total(part.weights)), 1.0)
        rows = unit
        if self.rows:
            center = self._center(
                records, sensitivity_factor(adjacency) * room / self.rows, total, source
            )
            ends = self.given.bound_x / _LEAST_RADIUS, 2 * self.given.bound_x
            radius = counter.quantile(
                partial(_distances, center), self.within * total, ends, RADIUS_COUNTS
            )
            scale = (radius,) * records.dim
            rows = replace(
                unit, center=tuple(center.tolist()), scale=scale, before=self.given.bound_x
            )
        if self.quantile is None or self.bound_y is None:
            return Units(rows)
        bound = self.bound_y
        # a shift makes the interval positive, and short beside its ends: steps are even then
        shift = 1e6 * bound
        ends = shift - bound, shift + bound
        shifted = counter.quantile(
            partial(_shifted_targets, shift), self.quantile * total, ends, LOCATION_COUNTS
        )
        location = shifted - shift
        if not self.spreads:
            return Units(rows, location)
        ends = bound / _LEAST_SPREAD, 2 * bound
        spread = counter.quantile(partial(_gaps, location), total / 2, ends, SPREAD_COUNTS)
        return Units(rows, location, min(spread, self.widest))

    def _center(self, records: Records, std: float, total: float, source: Source) -> Tensor:
        """Returns the private center of rows, in the ball of their bound; `total` is their private number."""
        bound = self.given.bound_x
        (center,) = records.sum(lambda part: (part.combine(part.weights / bound),))
        center = center + gaussian_vector(records.dim, std, source)
        center = center * (bound / total)  # from here on post-processing
        return center * min(1.0, bound / max(float(torch.linalg.vector_norm(center)), 1e-300))


class Facts(NamedTuple):
    """What loss and task of a fit may depend on, besides the settings: all of it public.

    Args:
        prepare: what is measured before; None for nothing.
        signal: n mu / sqrt(d), see `signal_to_noise`.
        unit: "example", or "user" for a fit with groups.
    """

    prepare: PrivatePreparation | None
    signal: float
    unit: str


class Wanted(NamedTuple):
    """What a model wants to know of its targets, see `PrivatePreparation`."""

    quantile: float | None = None
    spreads: bool = False
    widest: float = math.inf


_Columns = Callable[[Records], Tensor]  # of records in memory: a number for each, or a sum


@dataclass(frozen=True)
class _Counter:
    """Noisy sums of weights."""

    records: Records
    std: float
    source: Source

    def count(self, of: _Columns) -> float:
        """Returns a noisy sum of weights times numbers in [0, 1], of each record."""
        (total,) = self.records.sum(lambda part: (of(part),))
        return float(total + gaussian_vector(1, self.std, self.source)[0])

    def quantile(
        self, values: _Columns, rank: float, ends: tuple[float, float], steps: int
    ) -> float:
        """Returns a number with about so many values up to it, within positive ends, by bisection of its logarithm."""
        low, high = ends
        for _ in range(steps):
            middle = math.sqrt(low * high)
            if self.count(partial(_below, values, middle)) < rank:
                low = middle
            else:
                high = middle
        return high


def _below(values: _Columns, most: float, part: Records) -> Tensor:
    return part.below(values(part), most)


def _distances(center: Tensor, part: Records) -> Tensor:
    """Returns the distance of each row from the center, each of its own row alone, to the last bit."""
    return part.once(("distances", tuple(center.tolist())), lambda: part.distances(center))


def _shifted_targets(shift: float, part: Records) -> Tensor:
    return part.once(("shifted", shift), lambda: part.targets + shift)


def _gaps(location: float, part: Records) -> Tensor:
    return part.once(("gaps", location), lambda: (part.targets - location).abs())


_SHARE, _MOST_SHARE = (
    0.05,
    0.4,
)  # of mu^2, for sums, and for counts; for counts where less is not worth it
_SUM_ERROR, _SUM_USELESS = (
    0.05,
    0.4,
)  # norm of the noise on the center over B: wanted, and not worth it
_COUNT_ERROR, _COUNT_USELESS = (
    0.003,
    0.15,
)  # std of the noise on a count over n: wanted, and not worth it
RADIUS_COUNTS = 7
LOCATION_COUNTS = 18
SPREAD_COUNTS = 9
NARROW = 0.3  # threshold of Huber's loss in spreads of the targets, for steps with momentum, which bear the curvature
NARROW_OF_USERS = 0.5  # the same for users, who are fewer


def number_of_counts(*, rows: bool, targets: bool, spreads: bool) -> int:
    """Returns how many noisy counts are taken: of all records; for a radius; for a location; for a spread.

    Example:
        >>> number_of_counts(rows=True, targets=True, spreads=True)
        35
    """
    return (
        1 + RADIUS_COUNTS * rows + (LOCATION_COUNTS + SPREAD_COUNTS * spreads if targets else 0)
    )


def sum_level(mu: float, n: int, dim: int, adjacency: str) -> float:
    """Returns the level at which to take the sum of rows, 0 where it does not pay.

    The noise on the center has the norm sqrt(d) moved / (n level) in units of the bound. A twentieth of it is enough;
    a share of mu^2 is the most that is paid; and nothing is where that leaves more than 0.4, since the center of rows
    with features in [0, 1] lies at about 0.8.

    Args:
        mu: level of the whole budget, > 0.
        n: public number of records.
        dim: of rows.
        adjacency: "add_remove", "zero_out" or "replace_one".

    Source: docs/proofs/preparation.md#when-it-pays

    Example:
        >>> round(sum_level(0.2, 10_000, 50, "add_remove"), 4), sum_level(0.2, 100, 50, "add_remove")
        (0.0141, 0.0)
    """
    error = math.sqrt(dim) * sensitivity_factor(adjacency) / n
    return _level(mu, error, _SUM_ERROR, _SUM_USELESS)


def counts_level(mu: float, n: int, counts: int) -> float:
    """Returns the level of so many noisy counts together, 0 where they do not pay.

    Without units steps are blind, so that more than the usual share is paid where that makes counts just good enough.

    Args:
        mu: level of the whole budget, > 0.
        n: public number of records.
        counts: their number.

    Source: docs/proofs/preparation.md#when-it-pays

    Example:
        >>> round(counts_level(0.2, 100_000, 25), 4), round(counts_level(0.2, 500, 25), 4), counts_level(0.2, 200, 25)
        (0.0167, 0.0667, 0.0)
    """
    error = math.sqrt(counts) / n
    level = _level(mu, error, _COUNT_ERROR, _COUNT_USELESS)
    least = error / _COUNT_USELESS
    return level or (least if least <= math.sqrt(_MOST_SHARE) * mu else 0.0)


def share_within(wanted: float, level: float, n: int, counts: int) -> float:
    """Returns the share of rows to keep within the radius: the wanted one, or four stds of a count below all of them.

    It is compared with a noisy number of all: with less room, a radius beyond all rows would be too small. At least a
    half.

    Example:
        >>> share_within(0.9, 0.2, 1000, 25), share_within(0.9, 0.1, 1000, 25), share_within(0.9, 0.01, 1000, 25)
        (0.9, 0.8, 0.5)
    """
    return max(0.5, min(wanted, 1.0 - 4 * math.sqrt(counts) / (level * n)))


def signal_to_noise(mu: float, n: int, dim: int) -> float:
    """Returns n mu / sqrt(d): the sum of n unit gradients over the norm of the noise on it.

    Example:
        >>> signal_to_noise(0.2, 10_000, 100)
        200.0
    """
    return n * mu / math.sqrt(dim)


def residual_clip(signal: float) -> float:
    """Returns where to clip gradients, as a share of the bound on rows: below it, the noise is less.

    Example:
        >>> residual_clip(100.0), residual_clip(5000.0)
        (0.5, 0.7)
    """
    return 0.5 if signal < 700 else 0.7


def robust_width(signal: float) -> float:
    """Returns the threshold of Huber's loss in spreads of the targets: the more noise, the more records count in full.

    For objective perturbation. A slope is worth its noise only with curvature beside it, which a narrow
    parabola has in few records.

    Example:
        >>> robust_width(100.0), robust_width(1000.0), robust_width(10_000.0)
        (1.5, 1.0, 0.5)
    """
    return max(0.5, min(math.sqrt(1000 / signal), 1.5))


def _level(mu: float, error: float, wanted: float, useless: float) -> float:
    level = min(error / wanted, math.sqrt(_SHARE) * mu)
    return level if error / level <= useless else 0.0


def level_left(mu: float, spent: float) -> float:
    """Returns the level that a budget of level mu leaves beside Gaussian releases of level `spent`, rounded down."""
    if not 0 <= spent < mu:
        raise ValueError(f"spent must be below mu={mu:g} (got {spent:g})")
    # PRIVACY: squares of levels add up (test_what_is_left_and_what_is_spent_are_within_the_level)
    return math.sqrt((mu - spent) * (mu + spent)) * (1 - 1e-15) if spent else mu
