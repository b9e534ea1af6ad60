"""Shuffled mean oracles: the noise is random bits added by the users of a batch, not a Gaussian of the server.

`ShuffledClipped` (Algorithm 10) clips rows in L2 norm and sums them by Algorithm 11. `ShuffledMedian` (Algorithm 13)
clips coordinates, sums each of m groups by Algorithm 14 and takes medians over the groups; the bits are all its noise.

THIS IS A CENTRAL SIMULATION of the shuffle model: one process sees all rows and draws the number of ones that honest
users would have sent, which has the law of the bits (`binomial_noise`). The guarantee is that of the released
mean; that it would hold against the server too, behind a shuffler, takes honest users (`honest_fraction`) and real
messages.

A batch must have exactly batch_size rows, each row being a user with noise of its own. Rounding is drawn at the
release, from its generator: until then the oracle keeps one float64 per row and coordinate.

Differs from the paper in: 1. sizes by the numeric accountant; 2. the budget of Algorithm 13 (`shuffle_parameters`).

Proof: docs/proofs/heavy_tailed.md#shuffled-sums. Source: Lowy and Razaviyayn, Algorithms 10, 11, 13, 14.

Sums in the shuffle model: users send bits, a shuffler mixes them, an analyzer counts them.

Binomial noise is made of uniform bits, by integers alone. The bits that users add to a shuffled sum are many, and only
their number counts. It is drawn by inversion: a table holds the binomial distribution function in units of 2^-124,
computed in integers, and a uniform integer of 124 bits is looked up in it. So the law drawn differs from Bin(N, p) by
at most 2^-110 at any point, and by less than 2^-100 in total variation.

Floating-point samplers (`torch.binomial`) evaluate N log(...) and err by about N 2^-53 in the logarithm of the law, so
that the noise would depend on how a platform rounds.

The protocol. Algorithm 14 for one number x in [0, L], with integers g (grid) and b (noise bits) and a coin of
probability p:

    user:      k = floor(x g / L) + Ber(x g / L - floor(x g / L)) ones,  Bin(b, p) more ones,  zeros up to g + b bits
    analyzer:  (L / g) (number of ones - p b n)

It is unbiased. Bits have no sender after the shuffle, so that their number is all an analyzer learns: a count path that
draws sum(k) + Bin(n b, p) at once has the law of the bits. Algorithm 11 sums vectors by one such protocol per
coordinate, with messages labelled by the coordinate and values moved from [-D, D] to [0, 2 D].

THE SHUFFLE MODEL HERE IS SIMULATED IN ONE PROCESS, which sees all data. The guarantee is that of the counts, and holds
against an analyzer behind a real shuffler only if the users whose noise it counts are honest (`honest_fraction`).

Differs from the paper in: 1. the sizing of g and b (`shuffle_parameters`); 2. values are moved to [0, 2 D] before
they are rounded and clamped to the grid, so that no rounding of the machine makes a message longer.

Proofs: docs/proofs/heavy_tailed.md#binomial-table, docs/proofs/heavy_tailed.md#shuffled-sums,
docs/proofs/heavy_tailed.md#sizes-of-shuffled-sums. Source: Lowy and Razaviyayn, Algorithms 11 and 14; Cheu, Joseph, Mao
and Peng 2021.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.events import REPLACE_ONE, ZCDP, ZERO_OUT, Adjacency, NonPrivate
from torch_dpsco.algorithms.oracles import (
    GroupedMean,
    clipped_rows,
    flat_rows,
    group_size,
    medians,
)
from torch_dpsco.errors import ConditionError, InfeasibleError, SequenceError
from torch_dpsco.noise import Source, stream_of
from torch_dpsco.rows import GradBatch
from torch_dpsco.shuffle_model.numbers import (
    COORDINATES,
    FAILURE,
    VECTORS,
    Reach,
    ShuffleCost,
    ShuffleParameters,
    failure_of,
    shuffle_cost,
    shuffle_parameters,
)
from torch_dpsco.step.oracle import Release, clip_weights


def uniform(shape: Sequence[int], source: Source) -> Tensor:
    """Returns uniform multiples of 2^-53 in [0, 1): float64, on the source's device."""
    return words(shape, 53, source).double().mul_(2.0**-53)


def words(shape: Sequence[int], bits: int, source: Source) -> Tensor:
    """Returns uniform integers of `bits` bits, at most 63: int64, on the source's device."""
    drawn = stream_of(source).words(math.prod(shape)).view(np.uint64) >> np.uint64(64 - bits)
    return torch.from_numpy(drawn.view(np.int64)).view(tuple(shape)).to(source.device)


_WORD = 62  # bits of a half: what an int64 holds with room to compare
_ONE = 1 << (2 * _WORD)
_GUARD = 128  # more bits, for the recurrence
_LARGEST = 2 * 10**10  # trials: a table of two million points


def binomial_noise(
    trials: int, noise_probability: float, shape: tuple[int, ...], generator: Source
) -> Tensor:
    """Returns independent draws from Bin(N, p): int64, on the generator's device.

    Args:
        trials: N >= 0, at most 2 10^10.
        noise_probability: p in (0, 1).
        shape: of the draws.
        generator: of the bits.

    Example:
        >>> counts = binomial_noise(1000, 0.5, (20000,), torch.Generator().manual_seed(0))
        >>> counts.dtype, abs(counts.double().mean().item() - 500) < 0.6
        (torch.int64, True)
    """
    if not trials:
        return torch.zeros(shape, dtype=torch.int64, device=generator.device)
    first, high, low = binomial_table(trials, noise_probability)
    top = words(shape, _WORD, generator)
    # the number drawn is that of entries <= the uniform integer; most are decided by its upper half
    index = torch.searchsorted(high.to(top.device), top)
    undecided = (index < len(high)) & (
        high.to(top.device)[index.clamp(max=len(high) - 1)] == top
    )
    for place in undecided.nonzero():
        where = tuple(place.tolist())
        # PRIVACY: the lower half decides ties (test_the_noise_is_binomial_to_all_its_bits)
        bottom = words((), _WORD, generator)
        tied = low[high.numpy() == int(top[where])]
        index[where] += int(np.searchsorted(tied, int(bottom), side="right"))
    return index + first


@lru_cache(maxsize=4)
def binomial_table(
    trials: int, p: float
) -> tuple[int, Tensor, np.ndarray[tuple[int, ...], np.dtype[np.int64]]]:
    """Returns the least number drawn and, split in two halves, P(Y <= y) in units of 2^-124 for all y but the last."""
    if trials > _LARGEST:
        raise InfeasibleError(f"trials must be at most {_LARGEST} to be drawn (got {trials})")
    won, whole = p.as_integer_ratio()
    lost = whole - won
    mode = min(trials, (trials + 1) * won // whole)

    def rising(y: int, won: int, lost: int) -> list[int]:
        weights = [1 << (2 * _WORD + _GUARD)]
        while y < trials and weights[-1] >> (
            _GUARD - 16
        ):  # w(y + 1) / w(y) = (N - y) p / ((y + 1) (1 - p))
            weights.append(weights[-1] * (trials - y) * won // ((y + 1) * lost))
            y += 1
        return weights

    below = rising(trials - mode, lost, won)  # N - Y is Bin(N, 1 - p)
    weights = [*reversed(below), *rising(mode, won, lost)[1:]]
    total = sum(weights)
    running = 0
    high = np.empty(len(weights) - 1, dtype=np.int64)
    low = np.empty(len(weights) - 1, dtype=np.int64)
    for k, weight in enumerate(weights[:-1]):
        running += weight
        high[k], low[k] = divmod(running * _ONE // total, 1 << _WORD)
    return mode - len(below) + 1, torch.from_numpy(high), low


def grid_values(values: Tensor, upper: float, grid: int) -> Tensor:
    """Returns x g / L in [0, g], float64, for values that are clamped to [0, L]; NaN counts as 0."""
    # PRIVACY: a place past g would be a message too long (test_no_value_leaves_the_grid)
    return (values.double() / upper).nan_to_num_(nan=0.0).clamp_(0.0, 1.0) * float(grid)


def round_randomly(places: Tensor, generator: Source) -> Tensor:
    """Returns floor(v) + Ber(v - floor(v)) for places v on the grid: int64, unbiased.

    With one uniform u for two values it is ceil(v - u): they come out less than |v - v'| + 1 apart.
    """
    whole = places.floor()
    # v - floor(v) is exact; the uniform number has 53 bits
    drawn = uniform(places.shape, generator).to(places.device)
    return whole.to(torch.int64) + (drawn < places - whole).to(torch.int64)


def centered_sum(count: Tensor, n: int, bound: float, parameters: ShuffleParameters) -> Tensor:
    """Returns (2 D / g) (count - p b n) - n D, the estimate of a sum of n numbers in [-D, D] from counts of ones."""
    expected = parameters.noise_probability * (parameters.noise_bits * n)
    # in this order a count at its mean gives an exact zero
    return (count.double() - (expected + n * parameters.grid / 2.0)) * (
        2.0 * bound / parameters.grid
    )


def honest_users(n: int, fraction: float) -> int:
    """Returns how many of n users add their noise for sure; raises ConditionError for none."""
    # PRIVACY: the noise of dishonest users hides nothing (test_only_honest_noise_counts)
    honest = math.floor(n * check.between(0.0, 1.0, honest_fraction=fraction))
    if honest < 1:
        raise ConditionError(
            f"honest_fraction must leave an honest user among {n} (got {fraction})"
        )
    return honest


class _Shuffled(GroupedMean):
    """Medians over groups of means from counts of shuffled bits; subclasses clip, and say what a group costs."""

    _reach: ClassVar[Reach]

    def __init__(
        self,
        clip: float,
        parameters: ShuffleParameters,
        batch_size: int,
        dim: int,
        groups: int = 1,
        *,
        failure: float = FAILURE,
        honest_fraction: float = 1.0,
    ) -> None:
        super().__init__(clip, batch_size, groups)
        self.parameters = parameters
        self.dim = check.positive_count(dim=dim)
        self.failure = check.open_interval(0.0, 1.0, failure=failure)
        self.honest_fraction = honest_fraction
        self._honest = honest_users(self.group_size, honest_fraction)
        most = self.group_size * (parameters.grid + parameters.noise_bits)
        if most >= 2**53:
            raise ValueError(
                f"parameters must give counts below 2^53, exact in float64 (got {parameters})"
            )
        self._event: ZCDP | NonPrivate = NonPrivate()
        if parameters.noise_bits:
            cost = self.cost()
            self._event = ZCDP(cost.rho, cost.failure, (REPLACE_ONE, ZERO_OUT))
        self._places: list[Tensor] = []

    @classmethod
    def calibrated(
        cls,
        clip: float,
        batch_size: int,
        dim: int,
        groups: int = 1,
        *,
        epsilon: float,
        delta: float,
        grid: int | None = None,
        honest_fraction: float = 1.0,
    ) -> Self:
        """Returns the oracle whose releases are (epsilon, delta)-DP each, of a grid if one is given."""
        users = honest_users(group_size(batch_size, groups), honest_fraction)
        return cls(
            clip,
            shuffle_parameters(cls._reach, users, dim, epsilon, delta, grid=grid),
            batch_size,
            dim,
            groups,
            failure=failure_of(delta),
            honest_fraction=honest_fraction,
        )

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
        return shuffle_cost(self._reach, self.parameters, self._honest, self.dim, self.failure)

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

    def event(self) -> ZCDP | NonPrivate:
        """Returns the event of a release: `ZCDP` for replace_one and zero_out, or `NonPrivate` without bits."""
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
        ones = round_randomly(torch.cat(places)[: self.groups * self.group_size], generator)
        # PRIVACY: group_size * noise_bits coins in each group and coordinate (test_halved_noise_bits_are_caught)
        noise = binomial_noise(
            self.group_size * self.parameters.noise_bits,
            self.parameters.noise_probability,
            (self.groups, self.dim),
            generator,
        )
        return ones.view(self.groups, self.group_size, self.dim).sum(dim=1) + noise

    def release(self, generator: Source) -> Release:
        """Draws the counts, and returns the median over groups of the means that they estimate."""
        counts = self.counts(generator)
        means = (
            centered_sum(counts, self.group_size, self.clip, self.parameters) / self.group_size
        )
        return self._released(medians(means))

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

    With several groups it is the median of their means.

    Args:
        clip: C > 0.
        parameters: g, b, p, e.g. of `shuffle_parameters`; noise_bits=0 gives no privacy.
        batch_size: s, the exact number of rows of a logical batch.
        dim: d, number of trained parameters.
        failure: probability, in (0, 1), that a release leaves the window of the accountant; taken from delta.
        honest_fraction: of the users whose noise is as the protocol says, in (0, 1].

    Guarantee:
        Replace-one and zero-out, unit: one row per record, batch size public. Event: ZCDP(rho, failure) of
        `shuffle_cost`. Assumes that a record's row does not depend on other records and that at least
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

    _reach = VECTORS

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
        parameters: g, b, p, e.g. of `shuffle_parameters`; noise_bits=0 gives no privacy.
        batch_size: s, the exact number of rows of a logical batch.
        dim: d, number of trained parameters.
        groups: m in 1..s, of floor(s / m) consecutive rows each; a tail of rows is left out.
        failure: probability, in (0, 1), that a release leaves the window of the accountant; taken from delta.
        honest_fraction: of the users of EACH group whose noise is as the protocol says, in (0, 1].

    Guarantee:
        Replace-one and zero-out, unit: one row per record, batch size and places of records public: one record touches
        one group, and all its coordinates. Event: ZCDP(rho, failure) of `shuffle_cost`. Assumes honest users
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

    _reach = COORDINATES

    def _clipped(self, rows: GradBatch, dense: Sequence[Tensor]) -> Tensor:
        return clipped_rows(dense, self.clip)

    def sensitivity(self, adjacency: Adjacency) -> float:
        """Returns the L2 sensitivity of the vector of group means, and of its median, rounding to the grid included."""
        return self._moves(adjacency, math.sqrt(self.dim))
