"""Mean oracles: the only place where data become public.

A `MeanOracle` receives per-sample gradients of one logical batch, possibly in several physical ones, and releases a
noisy mean. It alone knows how far one record can move that mean, and builds its accounting event from that number and
nothing else, so that noise can never be scaled to another one.

Weights by which rows stay within a clip, and what else oracles need of norms and shapes.

Source: docs/proofs/rounding.md#clip-weights.

Means of clipped rows plus Gaussian noise, at a bound that subclasses choose.

    mean = ( sum_i g_i min(1, C / |g_i|) + N(0, (z C)^2 I) ) / batch_size

Edge cases, each tested in tests/algorithms:

| row or setting | contribution |
|---|---|
| norm <= C | unchanged |
| norm > C, up to overflow of its square | scaled to norm <= C |
| NaN, inf, or a norm that overflows | exactly 0 |
| zero or subnormal | unchanged (norms are upper bounds, so what underflows cannot pass the clip) |
| empty batch | noise only |
| z = 0 | exact clipped mean, event without privacy (epsilon = inf) |
| C = 0 | refused |

Differs from the usual DP-SGD in: 1. non-finite rows are dropped instead of spreading NaN; 2. norms carry their rounding
error; 3. the worst-case error of the sum is part of the declared sensitivity; 4. the divisor is a public constant.

Proofs: docs/proofs/heavy_tailed.md#clipped-sums, docs/proofs/heavy_tailed.md#rounded-clipped-sums.

Several oracles one after another: phases, or a pilot that chooses the clip.

A clip threshold from a pilot group: one step that reads norms, draws a quantile, and moves nothing.

The group is disjoint from the records that train, so that under the max rule it costs no budget as long as its epsilon
is at most that of each other group.

| row | counted |
|---|---|
| NaN, inf, or a norm that overflows | above every threshold |
| zero, subnormal | below every threshold |
| more or fewer rows than announced | the target rank is that of the announced number |

Proofs: docs/proofs/heavy_tailed.md#pilot-group, docs/proofs/heavy_tailed.md#private-quantile.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco import compat, native
from torch_dpsco._validate import type_members
from torch_dpsco.accounting.analysis.rounding import Grid, exact_grid, with_grid
from torch_dpsco.accounting.designs import BaseEvent, Design, Draw
from torch_dpsco.accounting.events import (
    CLIP_UNITS,
    Adjacency,
    Event,
    Gaussian,
    NonPrivate,
    clipped_gaussian,
)
from torch_dpsco.errors import (
    AdjacencyError,
    ConditionError,
    MissingConstantError,
    PrivacyError,
    SequenceError,
)
from torch_dpsco.noise import SecretState, Source, add_normals_, normal_
from torch_dpsco.problem import Problem, shared_bound
from torch_dpsco.rows import FLOAT64, GradBatch, Summation, is_queued, plan_summation, row_norm
from torch_dpsco.step.exact_noise import release_on_grid


class Charge(NamedTuple):
    """What a release is charged, before it is made.

    Args:
        event: sampling of the design included.
        covers: number of releases that the event pays for: this one and those that follow it, in one run. Where it is
            more than one, the releases share something secret, such as the noise of a threshold or past noise. The
            optimizer then refuses whatever would make one of them twice: copies, another cut of the records, a
            checkpoint that is loaded in place of `resume`.
        adaptive: whether the next charge depends on what is released.
    """

    event: Event
    covers: int = 1
    adaptive: bool = False


class Release(NamedTuple):
    """A private answer.

    Args:
        mean: one tensor (*p.shape) per parameter, float32 or float64; the oracle's next release may overwrite them.
        halted: whether the oracle answered for the last time.
        still: whether the release is no mean (a pilot chose a clip): nothing moves.
    """

    mean: list[Tensor]
    halted: bool = False
    still: bool = False


class MeanOracle(ABC):
    """Releases noisy means of per-sample gradients, one per logical batch: open, observe*, release.

    Args:
        batch_size: public divisor of the mean.
    """

    unit = "example"  # whose rows count as one
    assumptions: tuple[
        str, ...
    ] = ()  # what it takes for granted beside what all oracles do, in sentences
    jumps = False  # whether a release may jump if all rows change in their last bits
    _taken = False
    _sampled: tuple[BaseEvent, Design, Event] | None = None  # the last draw that was charged

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        type_members(cls, "__init__", "calibrated")

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size

    def __setattr__(self, name: str, value: Any) -> None:
        # PRIVACY: the ledger was told these numbers (test_what_the_ledger_relies_on_cannot_be_reassigned)
        if not name.startswith("_"):
            constant = not callable(
                getattr(type(self), name, len)
            )  # a property, or a flag of the class
            if name in self.__dict__ or constant:
                raise PrivacyError(
                    f"{name} is fixed at construction: make a new oracle and optimizer"
                )
        super().__setattr__(name, value)

    def take(self) -> None:
        """Makes the oracle that of one optimizer; raises SequenceError if it is another one's already."""
        if self._taken:
            # PRIVACY: rows of two optimizers would meet in one sum (test_an_oracle_serves_one_optimizer)
            raise SequenceError("oracle is another optimizer's: make one for each optimizer")
        self._taken = True

    @abstractmethod
    def open(self, query: Sequence[Tensor], step: int = 0) -> None:
        """Starts a logical batch; forgets an unfinished one.

        Args:
            query: the public point at which gradients are taken.
            step: number of steps made before, >= 0.
        """

    @abstractmethod
    def observe(self, rows: GradBatch, users: Tensor | None = None) -> None:
        """Takes the rows of one physical batch. `users` is for oracles whose unit is a user."""

    @abstractmethod
    def discard(self) -> None:
        """Forgets the logical batch."""

    @abstractmethod
    def sensitivity(self, adjacency: Adjacency) -> float:
        """Returns the L2 sensitivity of the released mean of the open batch, rounding included."""

    @abstractmethod
    def event(self) -> BaseEvent:
        """Returns the accounting event of a release of the open batch (before the first: of one at 0), unsampled."""

    @property
    def members(self) -> tuple[MeanOracle, ...]:
        """The oracles that answer, phase by phase: only itself, except for `Phased`."""
        return (self,)

    def charge(self, design: Design, draw: Draw) -> Charge:
        """Returns what the release of the open batch is charged: `event`, sampled as the design says.

        Overridden by oracles that pay for several releases at once, whose event has the sampling in it already, whose
        next event depends on what is released, or that admit some designs only.

        Args:
            design: how batches are drawn.
            draw: the open batch; before the first one some batch of the design.

        Raises:
            AdjacencyError: nothing is proved for this design.
        """
        base = self.event()
        known = self._sampled
        if known is not None and known[0] is base and known[1] is design and not draw.partition:
            return Charge(known[2])
        event = design.draw_event(base, draw)
        covers = design.covers(base, draw)
        if not draw.partition and covers == 1:  # else draws differ in their part
            self.__dict__["_sampled"] = (base, design, event)
        return Charge(event, covers)

    @abstractmethod
    def release(self, generator: Source) -> Release:
        """Adds noise to the mean, ends the logical batch, and returns the private answer."""

    def use_exact_noise(self) -> None:
        """Draws the noise of all releases in integers (`accounting.analysis.rounding`); call it before the first batch.

        Raises:
            ConditionError: the oracle's releases are no Gaussian sums, or have no noise.
        """
        raise ConditionError(
            f"secure must be None for {type(self).__name__}: exact noise is that of sums of clipped"
            " rows, as those of Clipped; use UserClippedSGD where users are protected"
        )

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Returns public constants that a checkpoint must agree with."""

    def _named(self, *names: str, **others: Any) -> dict[str, Any]:
        """Returns settings: the name of the class, attributes by their names, and other numbers."""
        return (
            {"oracle": type(self).__name__}
            | {name: getattr(self, name) for name in names}
            | others
        )

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint must keep, nothing for most oracles; a `SecretState` unless all of it is released.

        It holds tensors, primitives, and containers of them.
        """
        return {}

    def restore(self, state: dict[str, Any]) -> None:  # noqa: B027  (most oracles have nothing to restore)
        """Restores what `state` returned."""

    def prepare(self, generator: Source) -> None:  # noqa: B027
        """Draws what several releases of a run share, so that a checkpoint made before the first one holds it."""

    def lose(self, step: int, *, halted: bool) -> bool:
        """Notes that a release was charged, and maybe made, of which nothing is known but whether it was a halt.

        Args:
            step: number of steps before it.
            halted: whether it was the last answer.

        Returns:
            Whether the oracle has answered for the last time.

        Raises:
            SequenceError: without it the oracle cannot go on.
        """
        return halted

    def adding(self) -> ClippedMean | None:
        """Returns the oracle whose sums of rows several processes may add, None where releases are more than sums."""
        return None

    def summed(self) -> ClippedMean:
        """Returns `adding`, with the sum of the open batch in it."""
        oracle = self.adding()
        assert oracle is not None
        return oracle

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """Returns public numbers about the last release."""


def require_places(oracle: MeanOracle, design: Design) -> None:
    """Raises AdjacencyError unless a design suits an oracle that looks at the places of rows, see `Design.ordered`."""
    if not design.ordered:
        # PRIVACY: a record more or less in a batch would move all rows after it to other groups
        # (test_an_oracle_that_looks_at_places_needs_a_design_that_keeps_them)
        raise AdjacencyError(
            f"design must keep the places of rows for {type(oracle).__name__}: use Disjoint,"
            f" Shuffled, Cyclic or Parts (got {design})"
        )


# clips that are far from overflow and underflow of float32, which its error bounds leave out
_LEAST_CLIP = 2.0**-30
_MOST_CLIP = 2.0**40
_ROUNDED = 1.0 - 8 * 2.0**-52  # covers the roundings of a weight, and of its product with a row


def clip_weights(norms: Tensor, clip: float) -> Tensor:
    """Returns min(1, clip / norm), a little below it, and 0 for rows that must not count.

    Args:
        norms: (B,) float64 upper bounds of the rows' norms; NaN and inf mark rows to drop.
        clip: largest norm a row may contribute, > 0.

    Returns:
        (B,) float64 in [0, 1]; weight * norm <= clip also after rounding.
    """
    scaled = norms.reciprocal().mul_(clip * _ROUNDED)
    # PRIVACY: clip / inf = 0 and NaN becomes 0 (test_non_finite_rows_contribute_nothing)
    return scaled.clamp_(max=1.0).nan_to_num_(nan=0.0)


def joint_norm(tensors: Sequence[Tensor]) -> float:
    """Returns an upper bound of the L2 norm of the concatenated tensors; inf if it is not finite."""
    # one row of all tensors, unless a weight and a bias are read faster by themselves
    flat = tensors
    if len(tensors) > 2:
        flat = [torch.cat([t.detach().reshape(-1) for t in tensors])]
    norm = math.hypot(*[row_norm(t.detach()) for t in flat]) * (1.0 + 2.0**-50)
    return norm if math.isfinite(norm) else math.inf


def split_like(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Returns (D,) as one tensor per shape."""
    parts = flat.split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


_LARGE = 2**15  # numbers; larger sums take the noise in place


class ClippedMean(MeanOracle):
    """Noisy mean of rows clipped at the bound of the open batch; subclasses say what the bound is.

    Args:
        noise_multiplier: z, noise std on the sum over the clip norm, >= 0; 0 gives no privacy.
        batch_size: public divisor, the expected batch size.

    Guarantee:
        Unit: one row per record. The sum moves by at most C (record added, removed or zeroed) or 2 C (replaced), C
        being fixed by public history before the rows are read. Event: Gaussian in clip units,
        (z, {add_remove: 1, zero_out: 1, replace_one: 2}). Assumes that a record's row does not depend on other records.
    """

    _processes, _max_processes = 1, 1020  # over which logical batches are spread, see `share`
    _exact = False  # whether noise is drawn in integers

    def __init__(self, noise_multiplier: float, batch_size: int) -> None:
        super().__init__(check.positive_count(batch_size=batch_size))
        self._multiplier = check.nonnegative(noise_multiplier=noise_multiplier)
        self._event = clipped_gaussian(self._multiplier)
        self._summation = FLOAT64
        self._grid = Grid(1.0, 12)  # of exact releases; fixed by `open`
        self._clip: float | None = None
        self._form: list[Any] = []  # of the parameters
        self._shapes: list[torch.Size] = []
        self._cuts: list[Any] = []  # shape, strides and place of each in one vector
        self._dim = 0
        self._means: list[Tensor] | None = None
        self._total: Tensor | None = None  # of linear rows: one vector, instead of means
        self._n_rows = 0
        self._dtype = torch.float32  # of releases
        self._flat: Tensor | None = None  # memory of small ones

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_flat": None}

    @abstractmethod
    def bound(self, query: Sequence[Tensor]) -> float:
        """Returns the clip for gradients at a public point."""

    def weights(self, norms: Tensor, clip: float) -> Tensor:
        """Returns the factor of each row of a physical batch: (B,) with weight * norm <= clip after rounding, >= 0."""
        return clip_weights(norms, clip)

    @property
    def clip(self) -> float:
        """Clip of the open, or else the last, logical batch."""
        if self._clip is None:
            raise SequenceError(
                "no logical batch was opened: call open(query) first, which fixes the clip"
            )
        return self._clip

    @property
    def noise_multiplier(self) -> float:
        """Noise std on the sum over the clip."""
        return self._multiplier

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on the released mean."""
        # PRIVACY: scaled to the sensitivity of the sum as computed, rounding included (test_halved_noise_is_caught)
        return self._multiplier * self.sensitivity("zero_out")

    def open(self, query: Sequence[Tensor], step: int = 0) -> None:
        """Fixes the clip by the public point and forgets an unfinished batch."""
        self.discard()
        self.__dict__["_clip"] = self.bound(query)  # __setattr__ is slow
        form = [(p.shape, p.dtype, p.device) for p in query]
        if form != self._form:
            self._shapes = [p.shape for p in query]
            self._dim = sum(map(math.prod, self._shapes))
            parts = self.views(torch.empty(self._dim, device="meta"))
            self._cuts = [(part.shape, part.stride(), part.storage_offset()) for part in parts]
            self._summation = self._planned(form)
            wide = any(dtype == torch.float64 for _, dtype, _ in form)
            self._dtype = torch.float64 if wide else torch.float32
            self._flat = None
            self._require_within_clip(form)
            self._form = form  # last: who interrupts finds nothing half planned
        if self._exact:
            self._plan_grid()

    def _planned(self, form: list[Any]) -> Summation:
        """Returns the precision of sums for the parameters of the query."""
        on_cpu = all(device.type == "cpu" for _, _, device in form)
        # PRIVACY: other processes may be without the accelerator, and err by more
        # (test_several_processes_declare_the_error_of_float32), as a device does
        # (test_parameters_elsewhere_declare_the_error_of_float32)
        in_c = native.is_available() and on_cpu and self._processes == 1
        matrices = any(len(shape) > 1 and shape[0] > 1 for shape in self._shapes)
        return plan_summation(
            self.batch_size,
            self._dim,
            vectors=not in_c,
            matrices=matrices or not in_c,
            in_c=in_c or (self._processes == 1 and native.have_kernels({d for _, _, d in form})),
        )

    def _require_within_clip(self, form: list[Any]) -> None:
        """Raises PrivacyError if a subclass's weights let any of a range of norms past the clip."""
        if getattr(self.weights, "__func__", None) is ClippedMean.weights:
            return
        powers = [10.0**k for k in range(-300, 301)]
        norms = torch.tensor(
            [*powers, self.clip, 0.0, math.inf, math.nan],
            dtype=torch.float64,
            device=form[0][2] if form else None,
        )
        weights = self.weights(norms.clone(), self.clip)
        passes = weights * norms.nan_to_num(math.inf, math.inf) > self.clip  # 0 * inf does not
        # PRIVACY: (test_weights_of_ones_own_that_pass_the_clip_are_refused)
        if not bool((weights >= 0).all()) or bool(passes.any()):
            raise PrivacyError(
                f"weights of {type(self).__name__} must be >= 0, keep weight * norm <= clip, and be"
                " 0 where a norm is infinite or NaN: see oracles.clip_weights"
            )

    def use_exact_noise(self) -> None:
        """Draws the noise of all releases in integers; see `MeanOracle.use_exact_noise`."""
        if self._clip is not None or not self._event.sigma > 0:
            raise ConditionError(
                "secure='exact' needs noise, and to be said before the first batch (got"
                f" {self._event})"
            )
        self._exact, self._event = True, replace(self._event, exact=True)

    def _plan_grid(self) -> None:
        # raises before anything is charged
        self.__dict__["_grid"] = exact_grid(
            self.noise_std, self.sensitivity("zero_out"), max(1, self._dim)
        )

    def _memory(self, size: int) -> Tensor:
        # for all releases: fresh memory costs as much as the arithmetic
        if self._flat is None or self._flat.numel() != size or self._flat.dtype != self._dtype:
            self._flat = torch.empty(size, dtype=self._dtype, device=self._form[0][2])
        return self._flat

    def observe(self, rows: GradBatch, users: Tensor | None = None) -> None:
        """Clips rows and adds them to the mean."""
        clip = self.clip if self._clip is None else self._clip  # raises before open
        n_rows = self._n_rows + len(rows)
        if n_rows > self._summation.max_rows:
            self.require_rows(n_rows)  # which raises
        self.__dict__["_n_rows"] = n_rows
        own = type(self)  # rows that fit have weight 1, and nobody else is to see them
        plain = own.weights is ClippedMean.weights and own.observe is ClippedMean.observe
        plain = plain and "weights" not in self.__dict__
        # PRIVACY: elsewhere weights that underflow are rounded up (test_rows_of_one_huge_feature_are_clipped)
        total = None
        if plain and _LEAST_CLIP < clip < _MOST_CLIP:
            # PRIVACY: row i is w_i (x_i, 1) with the slope w_i cut to |w_i| |(x_i, 1)| <= C
            # (test_removed_clip_of_linear_rows_is_caught)
            total = rows.clipped_sum(clip * _ROUNDED, 1.0 / self.batch_size)
        if total is not None:
            if rows.blocks[0].shapes != self._shapes:
                self._refuse_shapes(rows.blocks[0].shapes)
            if self._means is not None:
                self._add(self.views(total))
            elif self._total is not None:
                self._total.add_(total)
            else:
                self.__dict__["_total"] = total
            return
        # PRIVACY: every row passes the clip, whatever was promised (test_removed_clip_is_caught)
        norms = rows.norms()
        weights = self.weights(norms, clip)
        precision = self._precision(clip, weights * norms)
        self._add(rows.weighted_sum(weights.div_(self.batch_size), precision))

    def _add(self, means: list[Tensor]) -> None:
        shapes = [m.shape for m in means]
        if shapes != self._shapes:
            self._refuse_shapes(shapes)
        known = self._means if self._total is None else self.views(self._total)
        if known is not None:
            before = [m.double() for m in known]
            compat.foreach_add_(before, means)
            means = before
        self.__dict__.update(_means=means, _total=None)

    def _refuse_shapes(self, shapes: list[torch.Size]) -> NoReturn:
        raise ValueError(
            f"rows must be of shapes {self._shapes}, those of the query (got {shapes})"
        )

    def _precision(self, clip: float, norms: Tensor) -> Summation:
        """Returns that of the sum of rows of these norms, after the clip: (B,), whatever their signs."""
        plan = self._summation
        if not plan.uses_float32 or not norms.shape[0] or not _LEAST_CLIP < clip < _MOST_CLIP:
            return FLOAT64
        mean = 1.0  # tiles that are large already need no reading of norms
        if plan.has_small_tiles and not is_queued(norms):
            # the root of the mean square is no less than the mean; some room for its rounding
            n = norms.shape[0]
            mean = math.sqrt(float(torch.dot(norms, norms)) / n) * (1.0 + n * 2.0**-23) / clip
        return plan.for_rows(self._n_rows * self._processes, mean)

    def discard(self) -> None:
        """Forgets the rows observed since open."""
        self.__dict__.update(_means=None, _total=None, _n_rows=0)  # __setattr__ is slow

    def share(self, processes: int) -> None:
        """Declares that logical batches are spread over W processes, each of which observes its own rows.

        The declared error of the sum stays that of one process. Float32 is used by a process with m_r rows where
        W m_r <= rows, so that all such rows together are at most `rows`, and in no process the product of the chain of
        roundings and the mean of the weighted norms is larger than the planned chain times C: the errors add up to at
        most chain u sum_r m_r C. The sums of the processes are added in float64, by W - 1 roundings more. The planned
        float64 chain, at least 1024 + max_rows, has room for them: that of a process is at most m_r + 4 (tiles of its
        chunks, then tiles, then chunks), sum_r m_r <= max_rows is enforced by `require_rows`, and W <= 1020. The last
        bits of a mean loss depend on the rows of one process, and are bounded by the rows of all, as before. Means of
        users, each of whom is on one process, are such rows (docs/proofs/rounding.md#sums-over-processes).
        """
        # PRIVACY: else each process could spend the whole room for float32
        # (test_the_rounding_of_a_sum_over_processes_stays_within_the_declared_error)
        if check.positive_count(processes=processes) > self._max_processes:
            raise ValueError(
                f"processes must be <= {self._max_processes}, for which rounding is bounded (got"
                f" {processes})"
            )
        self._processes = processes
        if self._form:
            self._summation = self._planned(self._form)

    @property
    def processes(self) -> int:
        """Over how many processes logical batches are spread."""
        return self._processes

    @property
    def assumptions(self) -> tuple[str, ...]:  # type: ignore[override]
        """What several processes assume."""
        if self._processes == 1:
            return ()
        read = (
            "read the same records in the same order, or a shard each: a record on one, whatever"
            " its values"
        )
        return (f"{self._processes} processes that trust each other {read}",)

    def adding(self) -> ClippedMean | None:
        """Returns itself, unless a subclass does more than to clip and add rows."""
        kind = type(self)
        own = (kind.observe, kind.release, kind.charge)
        adds = own == (ClippedMean.observe, ClippedMean.release, ClippedMean.charge)
        return self if adds else None

    def write_sum(self, out: Tensor) -> int:
        """Copies the clipped sum of own rows over batch_size into (d,) float64 zeros, and returns their number.

        NOT private: for the process that adds the sums up.
        """
        if self._total is not None:
            out.add_(self._total)
        for part, mean in zip(self.views(out), self._means or (), strict=False):
            part.add_(mean)
        return self._n_rows

    def require_rows(self, n_rows: int) -> None:
        """Raises SequenceError for more rows, of all processes, than the error of their sum is declared for."""
        most = self._summation.max_rows
        if n_rows > most:
            raise SequenceError(f"a logical batch must have at most {most} rows")

    def noised(self, part: Tensor, source: Source) -> Tensor:
        """Returns a part of the mean with its noise, N(0, noise_std^2 I).

        Args:
            part: (k,) float64, summed over all processes.
            source: of the bits; each part has its own.
        """
        if self._exact:
            return release_on_grid(part, self._grid, source)
        return normal_(torch.empty_like(part, dtype=self._dtype), self.noise_std, source, part)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Returns a (d,) vector cut into the shapes of the parameters."""
        return split_like(flat, self._shapes)

    def sensitivity(self, adjacency: Adjacency) -> float:
        """Returns the L2 sensitivity of the mean, with the worst-case error of its sum, and of its grid if exact."""
        clip = self.clip if self._clip is None else self._clip  # raises before open
        computed = CLIP_UNITS[adjacency] * clip * (1.0 + self._summation.error) / self.batch_size
        # PRIVACY: rounding to the grid moves the mean too (test_exact_means_of_neighbors_stay_within_the_sensitivity,
        # test_the_grid_is_in_the_sensitivity_and_the_noise_of_exact_means)
        return with_grid(computed) if self._exact else computed

    def event(self) -> Gaussian | NonPrivate:
        """Returns the Gaussian event in clip units."""
        return self._event

    def release(self, generator: Source) -> Release:
        """Adds N(0, noise_std^2 I) and ends the batch."""
        noise_std = self.noise_std  # raises before open
        if self._exact:
            vector = torch.zeros(self._dim, dtype=torch.float64, device=self._form[0][2])
            self.write_sum(vector)
            self.discard()
            # on its grid; cast to the precision of releases after that
            found = self.noised(vector, generator)
            return Release(self.views(self._memory(self._dim).copy_(found)))
        means = self._means or []  # none of linear rows
        # the memory of large sums, which are fresh, is that of the release: their noise stays in cache
        large = [
            self._dim > _LARGE < m.numel() and m.dtype == self._dtype and m.is_contiguous()
            for m in means
        ]
        some = any(large)
        shapes = self._shapes
        size = self._dim
        if some:
            shapes = [
                torch.Size([0]) if own else s for own, s in zip(large, shapes, strict=True)
            ]
            size = sum(map(math.prod, shapes))
        # mean + noise is rounded once, so after the noise: post-processing
        flat = normal_(self._memory(size), noise_std, generator, self._total)
        # PRIVACY: views of this release only: who holds an old one (p.grad) may have pointed it to other memory
        # (test_a_gradient_that_is_pointed_elsewhere_leaves_the_noise_in_the_next_release)
        answer = (
            split_like(flat, shapes) if some else [flat.as_strided(*cut) for cut in self._cuts]
        )
        if some:
            add_normals_([means[i] for i, own in enumerate(large) if own], noise_std, generator)
        for i, mean in enumerate(means):
            answer[i] = mean if large[i] else answer[i].add_(mean)
        self.discard()
        return Release(answer)

    def metrics(self) -> dict[str, float]:
        """Returns clip and noise_std of the last batch."""
        return {} if self._clip is None else {"clip": self.clip, "noise_std": self.noise_std}


class Clipped(ClippedMean):
    """Clips at a fixed public bound.

    Args:
        clip: C, > 0.
        noise_multiplier: z >= 0, noise std on the sum over C.
        batch_size: public divisor.

    Example:
        >>> from torch_dpsco.rows import DenseBlock
        >>> oracle = Clipped(clip=1.0, noise_multiplier=0.0, batch_size=2)
        >>> oracle.open([torch.zeros(2)])
        >>> oracle.observe(GradBatch([DenseBlock(torch.tensor([[3.0, 4.0], [float("nan"), 0.0]]))]))
        >>> [round(v, 3) for v in oracle.release(torch.Generator()).mean[0].tolist()]
        [0.3, 0.4]
    """

    def __init__(self, clip: float, noise_multiplier: float, batch_size: int) -> None:
        super().__init__(noise_multiplier, batch_size)
        self.fixed_clip = check.positive(clip=clip)

    def bound(self, query: Sequence[Tensor]) -> float:
        """Returns the fixed clip."""
        return self.fixed_clip

    def settings(self) -> dict[str, Any]:
        """Returns the fixed numbers."""
        return self._named("noise_multiplier", clip=self.fixed_clip)


NOISES = ("adaptive", "constant")


class HolderClipped(ClippedMean):
    """Clips at the gradient bound that the loss promises, so that with true constants nothing is ever clipped.

    `noise="adaptive"`: C_t = G(|w_t|), a function of the public iterate; the ratio z is constant, so that each step is
    the same event whatever the iterates do, also on an unbounded domain. `noise="constant"`: C = G(radius).

    Args:
        problem: promised constants; see `Problem.grad_bound`.
        noise_multiplier: z >= 0.
        batch_size: public divisor.
        noise: "adaptive" or "constant".
        radius: bound of the feasible set; inf for the whole space.
        clip_share: in (0, 1], of the bound over the feasible set (of that at the iterate, where it has none), past
            which rows are clipped; 1 clips none.

    Raises:
        MissingConstantError: constants are missing, or a constant bound does not exist on an unbounded domain.

    Source: docs/proofs/holder.md#bound-at-the-iterate; Wang, Lei, Ying, Zhang, Algorithm 2 (constant).
    """

    def __init__(
        self,
        problem: Problem,
        noise_multiplier: float,
        batch_size: int,
        *,
        noise: str = "adaptive",
        radius: float = math.inf,
        clip_share: float = 1.0,
    ) -> None:
        super().__init__(noise_multiplier, batch_size)
        self.noise = check.choice(NOISES, noise=noise)
        self.clip_share = check.between(
            0.0, 1.0, clip_share=check.positive(clip_share=clip_share)
        )
        self.problem = problem
        self.radius = check.positive(radius=radius, allow_inf=True)
        # past problem.radius some constants are not promised; rows are clipped all the same
        self._reach = min(self.radius, problem.radius)
        at_zero = problem.grad_bound(0.0)  # raises if constants are missing
        try:
            self._constant = problem.grad_bound(self._reach)
        except MissingConstantError:
            if noise == "constant":
                raise
            self._constant = math.inf
        # a bound that is the same everywhere need not follow the iterate
        self._follows = noise == "adaptive" and self._constant * self.clip_share > at_zero

    def bound(self, query: Sequence[Tensor]) -> float:
        """Returns C for gradients at `query`; raises ValueError if the iterate is not finite."""
        if not self._follows:
            return self._constant * self.clip_share
        norm = joint_norm(query)
        if math.isinf(norm):
            raise ValueError(
                "the iterate must be finite: training diverged, lower lr or bound the domain"
                " (radius=)"
            )
        here = self.problem.grad_bound(min(norm, self._reach))
        return shared_bound(here, self._constant, self.clip_share)

    def settings(self) -> dict[str, Any]:
        """Returns the fixed numbers."""
        at_one = self.problem.grad_bound(
            min(1.0, self._reach)
        )  # repr leaves exact_grad_bound out
        own = {"problem": repr(self.problem), "grad_bound": at_one}
        return self._named("noise", "noise_multiplier", "radius", "clip_share", **own)


class Phased(MeanOracle):
    """Answers each step by the oracle of its phase.

    Args:
        phases: (oracle, steps) pairs, in order; an oracle may serve several phases.

    Guarantee:
        That of the oracle of the open batch, whose event it reports. Which oracle that is depends on the step alone.

    Example:
        >>> import torch
        >>> from torch_dpsco.step.oracle import Clipped
        >>> oracle = Phased([(Clipped(1.0, 2.0, 10), 3), (Clipped(0.5, 4.0, 5), 2)])
        >>> oracle.open([torch.zeros(2)], step=3)
        >>> oracle.batch_size, oracle.event().sigma
        (5, 4.0)
    """

    def __init__(self, phases: Sequence[tuple[MeanOracle, int]]) -> None:
        self.phases = tuple(
            (oracle, check.positive_count(steps=steps)) for oracle, steps in phases
        )
        if not self.phases:
            raise ValueError("phases must hold an oracle (got none)")
        if len({oracle.unit for oracle in self.members}) > 1:
            # PRIVACY: figures of different units do not add (test_phases_of_different_units_are_refused)
            raise ValueError("oracle must protect the same unit in each phase: example or user")
        self._active = self.members[0]

    @property
    def batch_size(self) -> int:  # type: ignore[override]
        """Divisor of the phase of the open, or else the last, logical batch."""
        return self._active.batch_size

    @property
    def unit(self) -> str:  # type: ignore[override]
        """Whose rows count as one, the same in all phases."""
        return self.members[0].unit

    @property
    def assumptions(self) -> tuple[str, ...]:  # type: ignore[override]
        """What the oracles assume."""
        return tuple(
            dict.fromkeys(line for oracle in self.members for line in oracle.assumptions)
        )

    @property
    def members(self) -> tuple[MeanOracle, ...]:
        """The oracle of each phase."""
        return tuple(oracle for oracle, _ in self.phases)

    def take(self) -> None:
        """Makes the oracles those of one optimizer."""
        super().take()
        for oracle in dict.fromkeys(self.members):
            oracle.take()

    def use_exact_noise(self) -> None:
        """Draws the noise of all phases in integers."""
        for oracle in self.members:
            oracle.use_exact_noise()

    def open(self, query: Sequence[Tensor], step: int = 0) -> None:
        """Starts a logical batch of the phase of this step."""
        self._active.discard()
        self._active, first = self._locate(step)
        self._active.open(query, step - first)

    def _locate(self, step: int) -> tuple[MeanOracle, int]:
        """Returns the oracle of a step, and the first step of its phase."""
        first = 0
        for oracle, steps in self.phases:
            if step < first + steps:
                return oracle, first
            first += steps
        raise SequenceError(f"all {first} steps of the phases are made (got step {step})")

    def prepare(self, generator: Source) -> None:
        """Draws what the releases of each phase share."""
        for oracle in self.members:
            oracle.prepare(generator)

    def lose(self, step: int, *, halted: bool) -> bool:
        """Notes a release of the phase of this step that is not known."""
        self._active, first = self._locate(step)
        return self._active.lose(step - first, halted=halted)

    def observe(self, rows: GradBatch, users: Tensor | None = None) -> None:
        """Takes rows."""
        self._active.observe(rows, users)

    def discard(self) -> None:
        """Forgets the logical batch."""
        self._active.discard()

    def sensitivity(self, adjacency: Adjacency) -> float:
        """Returns the sensitivity of the open batch."""
        return self._active.sensitivity(adjacency)

    def event(self) -> BaseEvent:
        """Returns the event of the open, or else the last, logical batch."""
        return self._active.event()

    def charge(self, design: Design, draw: Draw) -> Charge:
        """Returns what the oracle of the open batch charges."""
        return self._active.charge(design, draw)

    def release(self, generator: Source) -> Release:
        """Returns the answer of the oracle of this phase."""
        return self._active.release(generator)

    def settings(self) -> dict[str, Any]:
        """Returns the fixed numbers of all phases."""
        return self._named(phases=[[steps, oracle.settings()] for oracle, steps in self.phases])

    def metrics(self) -> dict[str, float]:
        """Returns public numbers about the last release."""
        return self._active.metrics()

    def state(self) -> dict[str, Any]:
        """Returns the states of the oracles, secret if one of them is."""
        states = {str(k): oracle.state() for k, oracle in enumerate(self.members)}
        return (
            SecretState(states)
            if any(isinstance(state, SecretState) for state in states.values())
            else states
        )

    def restore(self, state: dict[str, Any]) -> None:
        """Restores them."""
        for k, oracle in enumerate(self.members):
            oracle.restore(state[str(k)])
