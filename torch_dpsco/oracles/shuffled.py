"""Shuffled mean oracles: the noise is random bits added by the users of a batch, not a Gaussian of the server.

`ShuffledClipped` (Algorithm 10) clips rows in L2 norm and sums them by Algorithm 11. `ShuffledMedian` (Algorithm 13)
clips coordinates, sums each of m groups by Algorithm 14 and takes medians over the groups; the bits are all its noise.

THIS IS A CENTRAL SIMULATION of the shuffle model: one process sees all rows and draws the number of ones that honest
users would have sent, which has the law of the bits (`mechanisms.shuffle`). The guarantee is that of the released mean;
that it would hold against the server too, behind a shuffler, takes honest users (`honest_fraction`) and real messages.

A batch must have exactly batch_size rows, each row being a user with noise of its own. Rounding is drawn at the
release, from its generator: until then the oracle keeps one float64 per row and coordinate.

Differs from the paper in: 1. sizes by the numeric accountant; 2. the budget of Algorithm 13 (`shuffle_sizing`).

Proof: docs/proofs/heavy_tailed.md#shuffled-sums. Source: Lowy and Razaviyayn, Algorithms 10, 11, 13, 14.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.shuffle import ShuffleCost
from torch_dpsco.accounting.events import Adjacency, ApproxZCDP, NonPrivate
from torch_dpsco.errors import SequenceError
from torch_dpsco.mechanisms.shuffle import (
    FAILURE,
    BinomialNoise,
    ShuffleParameters,
    centered_sum,
    coordinate_cost,
    coordinate_parameters,
    failure_of,
    grid_values,
    largest_count,
    round_randomly,
    shuffle_event,
    vector_cost,
    vector_parameters,
)
from torch_dpsco.oracles.base import Release, clip_weights, split_like
from torch_dpsco.oracles.coordinatewise import GroupedMean, clipped_rows, flat_rows, medians
from torch_dpsco.rng import Source
from torch_dpsco.rows import GradBatch


class _Shuffled(GroupedMean):
    """Medians over groups of means from counts of shuffled bits; subclasses clip, and say what a group costs."""

    _cost_of: Callable[..., ShuffleCost]  # of the shuffled sum of a group

    def __init__(
        self,
        clip: float,
        parameters: ShuffleParameters,
        batch_size: int,
        dim: int,
        groups: int,
        *,
        failure: float = FAILURE,
        honest_fraction: float = 1.0,
    ) -> None:
        super().__init__(clip, batch_size, groups)
        self.parameters = parameters
        self.dim = check.positive_count(dim=dim)
        self.failure = check.open_interval(0.0, 1.0, failure=failure)
        self.honest_fraction = check.between(0.0, 1.0, honest_fraction=honest_fraction)
        largest_count(self.group_size, parameters)
        bits = parameters.noise_bits
        self._event: ApproxZCDP | NonPrivate = shuffle_event(self.cost()) if bits else NonPrivate()
        self._noise: BinomialNoise | None = None
        self._places: list[Tensor] = []

    @property
    def assumptions(self) -> tuple[str, ...]:  # type: ignore[override]
        """Returns what the shuffle model assumes."""
        honest = (
            "All users"
            if self.honest_fraction == 1.0
            else f"At least {self.honest_fraction:g} of the users of a batch"
        )
        return (
            f"{honest} are honest: they add the noise bits that they should.",
            (
                "This was a central simulation of the shuffle model: one process has seen all rows."
                " The guarantee is that of the released means; against a collector of the messages"
                " it takes real users and a real shuffler."
            ),
        )

    def cost(self) -> ShuffleCost:
        """Returns what a release costs: rho of all orders, and a failure probability."""
        # PRIVACY: the noise of one group hides a record, not that of the batch
        # (test_a_record_is_hidden_by_the_noise_of_its_group_alone)
        share = {"failure": self.failure, "honest_fraction": self.honest_fraction}
        return type(self)._cost_of(self.parameters, self.group_size, self.dim, **share)

    @abstractmethod
    def _clipped(self, rows: GradBatch, dense: Sequence[Tensor]) -> Tensor:
        """Returns the rows clipped: (B, dim) float64."""

    @property
    def noise_std(self) -> float:
        """Standard deviation of the binomial noise on the mean of each group and coordinate, without rounding."""
        p = self.parameters.noise_probability
        bits = self.parameters.noise_bits
        ones = math.sqrt(self.group_size * bits * p * (1.0 - p))
        return 2.0 * self.clip / self.parameters.grid * ones / self.group_size

    def open(self, query: Sequence[Tensor], step: int = 0) -> None:
        """Starts a logical batch; raises ValueError if the query has another dimension than `dim`."""
        size = sum(p.numel() for p in query)
        if size != self.dim:
            # PRIVACY: the cost is that of dim coordinates (test_a_query_of_another_dimension_is_refused)
            raise ValueError(
                f"dim must be {size}, the number of trained parameters (got {self.dim})"
            )
        super().open(query, step)

    def observe(self, rows: GradBatch, users: Tensor | None = None) -> None:
        """Clips rows and puts them on the grid."""
        dense = self._dense(rows)
        if sum(map(len, self._places)) + len(rows) > self.batch_size:
            raise SequenceError(
                f"a logical batch must have exactly {self.batch_size} rows, its fixed size"
            )
        # PRIVACY: every row passes the clip (test_no_neighbor_moves_a_count_past_the_budget)
        values = self._clipped(rows, dense) + self.clip
        self._places.append(grid_values(values, 2.0 * self.clip, self.parameters.grid))

    def discard(self) -> None:
        """Forgets the rows observed since open."""
        self._places = []

    def event(self) -> ApproxZCDP | NonPrivate:
        """Returns the event of a release: `ApproxZCDP` for replace_one and zero_out, or `NonPrivate` without bits."""
        return self._event

    def counts(self, generator: Source) -> Tensor:
        """Returns the numbers of ones that a shuffler would deliver, (groups, dim) int64, and ends the batch."""
        places = self._places
        self._places = []
        n_rows = sum(map(len, places))
        if n_rows != self.batch_size:
            # PRIVACY: absent users add no noise (test_a_batch_of_another_size_is_refused)
            raise SequenceError(
                f"a logical batch must have exactly {self.batch_size} rows (got another number)"
            )
        if self._noise is None:
            trials = self.group_size * self.parameters.noise_bits
            self._noise = BinomialNoise(trials, self.parameters.noise_probability)
        ones = round_randomly(torch.cat(places)[: self.groups * self.group_size], generator)
        # PRIVACY: group_size * noise_bits coins in each group and coordinate (test_halved_noise_bits_are_caught)
        noise = self._noise.draw((self.groups, self.dim), generator)
        return ones.view(self.groups, self.group_size, self.dim).sum(dim=1) + noise

    def release(self, generator: Source) -> Release:
        """Draws the counts, and returns the median over groups of the means that they estimate."""
        counts = self.counts(generator)
        means = centered_sum(counts, self.group_size, self.clip, self.parameters) / self.group_size
        return Release(split_like(medians(means).to(self._dtype), self._shapes))

    def _moves(self, adjacency: Adjacency, spread: float) -> float:
        """Returns a bound of the L2 move of the released mean, for values that move by `spread` grids in L2 norm."""
        grid = self.parameters.grid
        root = math.sqrt(self.dim)
        steps = min(
            self._clips(adjacency) / 2.0 * grid * spread + root, grid * root
        )  # the grid is of 2 clips
        return steps * 2.0 * self.clip / (grid * self.group_size) * (1.0 + 2.0**-40)

    def settings(self) -> dict[str, Any]:
        """Returns the fixed numbers, and what is simulated."""
        simulated = {"model": "shuffle model, simulated centrally; honest users assumed"}
        return (
            self._named("clip", "dim", "groups", "failure", "honest_fraction")
            | asdict(self.parameters)
            | simulated
        )

    def metrics(self) -> dict[str, float]:
        """Returns clip and noise_std."""
        return {"clip": self.clip, "noise_std": self.noise_std}


class ShuffledClipped(_Shuffled):
    """Mean of rows clipped in L2 norm, by shuffled sums of their coordinates (Algorithm 10). A central simulation.

    Args:
        clip: C > 0.
        parameters: g, b, p, e.g. of `mechanisms.shuffle.vector_parameters`; noise_bits=0 gives no privacy.
        batch_size: s, the exact number of rows of a logical batch.
        dim: d, number of trained parameters.
        failure: probability, in (0, 1), that a release leaves the window of the accountant; taken from delta.
        honest_fraction: of the users whose noise is as the protocol says, in (0, 1].

    Guarantee:
        Replace-one and zero-out, unit: one row per record, batch size public. Event: ApproxZCDP(rho, failure) of
        `vector_cost`. Assumes that a record's row does not depend on other records and that at least
        floor(honest_fraction s) users of each batch, the protected one among them, add their noise honestly. Edge
        cases: a row with a norm that is not finite is 0; a batch of another size is refused, also an empty one.

    Source: docs/proofs/heavy_tailed.md#shuffled-sums (Algorithms 10 and 11).

    Example:
        >>> from torch_dpsco.rows import DenseBlock
        >>> oracle = ShuffledClipped(clip=1.0, parameters=ShuffleParameters(1024, 0), batch_size=2, dim=2)
        >>> oracle.open([torch.zeros(2)])
        >>> oracle.observe(GradBatch([DenseBlock(torch.tensor([[3.0, 4.0], [float("inf"), 0.0]]))]))
        >>> [round(v, 2) for v in oracle.release(torch.Generator().manual_seed(0)).mean[0].tolist()]
        [0.3, 0.4]
    """

    _cost_of = vector_cost

    def __init__(
        self,
        clip: float,
        parameters: ShuffleParameters,
        batch_size: int,
        dim: int,
        *,
        failure: float = FAILURE,
        honest_fraction: float = 1.0,
    ) -> None:
        super().__init__(
            clip, parameters, batch_size, dim, 1, failure=failure, honest_fraction=honest_fraction
        )

    @classmethod
    def calibrated(
        cls,
        clip: float,
        batch_size: int,
        dim: int,
        *,
        epsilon: float,
        delta: float,
        grid: int | None = None,
        honest_fraction: float = 1.0,
    ) -> ShuffledClipped:
        """Returns the oracle whose releases are (epsilon, delta)-DP each; see `vector_parameters`."""
        check.positive_count(batch_size=batch_size)
        sizes = vector_parameters(
            batch_size, dim, epsilon, delta, grid=grid, honest_fraction=honest_fraction
        )
        return cls(
            clip, sizes, batch_size, dim, failure=failure_of(delta), honest_fraction=honest_fraction
        )

    def _clipped(self, rows: GradBatch, dense: Sequence[Tensor]) -> Tensor:
        # room for the rounding of the product, the shift by C and the scaling to the grid: 6 u C per coordinate
        bound = self.clip * (1.0 - 2.0**-50 * (1.0 + math.sqrt(self.dim)))
        weights = clip_weights(rows.norms(), bound)[:, None]
        # PRIVACY: masked, since 0 * inf is NaN (test_a_row_that_is_not_finite_is_dropped_whole)
        return torch.where(weights > 0, flat_rows(dense) * weights, 0.0)

    def sensitivity(self, adjacency: Adjacency) -> float:
        """Returns the L2 sensitivity of the mean, rounding to the grid included."""
        return self._moves(adjacency, 1.0)


class ShuffledMedian(_Shuffled):
    """Median over groups of means of coordinate-wise clipped rows, by shuffled sums (Algorithm 13). A simulation.

    No Gaussian noise: the bits of the users come before the median.

    Args:
        clip: tau > 0, bound of every coordinate.
        parameters: g, b, p, e.g. of `mechanisms.shuffle.coordinate_parameters`; noise_bits=0 gives no privacy.
        batch_size: s, the exact number of rows of a logical batch.
        dim: d, number of trained parameters.
        groups: m in 1..s, of floor(s / m) consecutive rows each; a tail of rows is left out.
        failure: probability, in (0, 1), that a release leaves the window of the accountant; taken from delta.
        honest_fraction: of the users of EACH group whose noise is as the protocol says, in (0, 1].

    Guarantee:
        Replace-one and zero-out, unit: one row per record, batch size and places of records public: one record touches
        one group, and all its coordinates. Event: ApproxZCDP(rho, failure) of `coordinate_cost`. Assumes honest users
        as `ShuffledClipped` does, in each group. Edge cases: a row with NaN or inf is 0 as a whole; huge finite rows
        are clipped; a batch of another size is refused.

    Source: docs/proofs/heavy_tailed.md#shuffled-sums (Algorithms 13 and 14).

    Example:
        >>> from torch_dpsco.rows import DenseBlock
        >>> oracle = ShuffledMedian(clip=2.0, parameters=ShuffleParameters(4, 0), batch_size=3, dim=1, groups=3)
        >>> oracle.open([torch.zeros(1)])
        >>> oracle.observe(GradBatch([DenseBlock(torch.tensor([[1.0], [-1.0], [1e9]]))]))
        >>> oracle.release(torch.Generator()).mean[0].tolist()
        [1.0]
    """

    _cost_of = coordinate_cost

    @classmethod
    def calibrated(
        cls,
        clip: float,
        batch_size: int,
        dim: int,
        groups: int,
        *,
        epsilon: float,
        delta: float,
        grid: int | None = None,
        honest_fraction: float = 1.0,
    ) -> ShuffledMedian:
        """Returns the oracle whose releases are (epsilon, delta)-DP each; see `coordinate_parameters`."""
        check.positive_count(batch_size=batch_size)
        sizes = coordinate_parameters(
            batch_size, groups, dim, epsilon, delta, grid=grid, honest_fraction=honest_fraction
        )
        return cls(
            clip,
            sizes,
            batch_size,
            dim,
            groups,
            failure=failure_of(delta),
            honest_fraction=honest_fraction,
        )

    def _clipped(self, rows: GradBatch, dense: Sequence[Tensor]) -> Tensor:
        return clipped_rows(dense, self.clip)

    def sensitivity(self, adjacency: Adjacency) -> float:
        """Returns the L2 sensitivity of the vector of group means, and of its median, rounding to the grid included."""
        return self._moves(adjacency, math.sqrt(self.dim))
