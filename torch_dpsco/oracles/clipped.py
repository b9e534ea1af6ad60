"""Means of clipped rows plus Gaussian noise, with a fixed bound or one that follows the public iterate.

    mean = ( sum_i g_i min(1, C / |g_i|) + N(0, (z C)^2 I) ) / batch_size

Edge cases, each tested in tests/oracles:

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
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.events import CLIP_UNITS, Adjacency, Gaussian, NonPrivate, clipped_gaussian
from torch_dpsco.errors import MissingConstantError, SequenceError
from torch_dpsco.gradbatch import FLOAT64, GradBatch, LinearRows, Summation, plan_summation, row_norm, weighted_rows
from torch_dpsco.oracles.base import MeanOracle, Release
from torch_dpsco.problem import Problem

__all__ = ["Clipped", "ClippedMean", "HolderClipped", "clip_weights", "joint_norm"]

_LARGE = 2**15  # numbers; larger sums take the noise in place ...
_PIECE = 2**16  # ... that many numbers at a time
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
    flat = tensors if len(tensors) <= 2 else [torch.cat([t.detach().reshape(-1) for t in tensors])]
    norm = math.hypot(*[row_norm(t.detach()) for t in flat]) * (1.0 + 2.0**-50)
    return norm if math.isfinite(norm) else math.inf


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

    def __init__(self, noise_multiplier: float, batch_size: int) -> None:
        super().__init__(check.positive_count(batch_size=batch_size))
        self._multiplier = check.nonnegative(noise_multiplier=noise_multiplier)
        self._event = clipped_gaussian(self._multiplier)
        self._clips_only = type(self).weights is ClippedMean.weights  # short rows have weight 1
        self._summation = FLOAT64
        self._clip: float | None = None
        self._form: list[Any] = []  # of the parameters
        self._shapes: list[torch.Size] = []
        self._means: list[Tensor] | None = None
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
            raise SequenceError("no logical batch was opened: call open(query) first, which fixes the clip")
        return self._clip

    @property
    def noise_multiplier(self) -> float:
        """Noise std on the sum over the clip."""
        return self._multiplier

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on the released mean."""
        # PRIVACY: scaled to the sensitivity of the sum as computed, rounding included (test_halved_noise_is_caught)
        return self.noise_multiplier * self.sensitivity("zero_out")

    def open(self, query: Sequence[Tensor], step: int = 0) -> None:
        """Fixes the clip by the public point and forgets an unfinished batch."""
        self.discard()
        self._clip = self.bound(query)
        form = [(p.shape, p.dtype, p.device) for p in query]
        if form != self._form:
            self._form, self._shapes = form, [p.shape for p in query]
            self._summation = plan_summation(self.batch_size, sum(shape.numel() for shape in self._shapes))
            self._dtype = torch.float64 if any(dtype == torch.float64 for _, dtype, _ in form) else torch.float32
            self._flat = None

    def _memory(self, size: int) -> Tensor:
        # for all releases: fresh memory costs as much as the arithmetic
        if self._flat is None or len(self._flat) != size or self._flat.dtype != self._dtype:
            self._flat = torch.empty(size, dtype=self._dtype, device=self._form[0][2])
        return self._flat

    def _draw(self, out: Tensor, noise_std: float, generator: torch.Generator) -> Tensor:
        return out.normal_(std=noise_std, generator=generator) if self._multiplier > 0 else out.zero_()

    def observe(self, rows: GradBatch, users: Tensor | None = None) -> None:
        """Clips rows and adds them to the mean."""
        clip = self.clip  # raises before open
        self._n_rows += len(rows)
        if self._n_rows > self._summation.max_rows:
            raise SequenceError(f"a logical batch must have at most {self._summation.max_rows} rows")
        linear = rows.linear()
        means = self._clipped_means(rows, clip) if linear is None else self._linear_means(linear, clip)
        if [m.shape for m in means] != self._shapes:
            raise ValueError(
                f"rows must be of shapes {self._shapes}, those of the query (got {[m.shape for m in means]})"
            )
        if self._means is None:
            self._means = means
        else:
            self._means = [m.double() for m in self._means]
            torch._foreach_add_(self._means, means)

    def _clipped_means(self, rows: GradBatch, clip: float) -> list[Tensor]:
        # PRIVACY: every row passes the clip, whatever was promised (test_removed_clip_is_caught)
        norms = rows.norms()
        weights = self.weights(norms, clip)
        precision = self._precision(clip, weights * norms)
        return rows.weighted_sum(weights.div_(self.batch_size), precision)

    def _linear_means(self, rows: LinearRows, clip: float) -> list[Tensor]:
        """Returns what `_clipped_means` does, in fewer calls."""
        slopes, features = rows.slopes, rows.features
        norms = slopes.abs() * rows.factors  # in float64; the factors have room for its rounding
        # PRIVACY: (test_linear_rows_are_clipped_dropped_and_summed_as_all_others)
        if self._clips_only and float(norms.max()) <= clip * _ROUNDED:  # not so if one is NaN
            coefficients = slopes.to(torch.float64, copy=True)
        else:
            weights = self.weights(norms, clip)
            if not bool((weights > 0).all()):
                index = (weights > 0).nonzero().squeeze(1)  # dropped, not multiplied by 0
                slopes, features, weights, norms = slopes[index], features[index], weights[index], norms[index]
            coefficients, norms = weights * slopes, weights * norms
        precision = self._precision(clip, norms)
        total = weighted_rows(features, coefficients.div_(self.batch_size), precision)
        return [total[None], coefficients.sum(0, keepdim=True)]

    def _precision(self, clip: float, norms: Tensor) -> Summation:
        """Returns that of the sum of rows of these norms, after the clip: (B,)."""
        if not self._summation.uses_float32 or not 2.0**-40 < clip < 2.0**40 or not len(norms):
            return FLOAT64  # the error bound of float32 leaves out overflow and underflow
        return self._summation.for_rows(self._n_rows * self._processes, float(norms.mean()) / clip)

    def discard(self) -> None:
        """Forgets the rows observed since open."""
        self.__dict__.update(_means=None, _n_rows=0)  # __setattr__ is slow

    def share(self, processes: int) -> None:
        """Declares that logical batches are spread over W processes, each of which observes its own rows.

        The declared error of the sum stays that of one process. Float32 is used by a process with m_r rows where
        W m_r <= rows, so that all such rows together are at most `rows`, and in no process the product of the chain of
        roundings and the mean of the weighted norms is larger than the planned chain times C: the errors add up to at
        most chain u sum_r m_r C. The sums of the processes are added in float64, by W - 1 roundings more. The planned
        float64 chain, at least 1024 + max_rows, has room for them: that of a process is at most m_r + 4 (tiles of its
        chunks, then tiles, then chunks), sum_r m_r <= max_rows is enforced by `replace_sum`, and W <= 1020. The last
        bits of a mean loss depend on the rows of one process, and are bounded by the rows of all, as before.
        """
        # PRIVACY: else each process could spend the whole room for float32
        # (test_the_rounding_of_a_sum_over_processes_stays_within_the_declared_error)
        if check.positive_count(processes=processes) > self._max_processes:
            raise ValueError(
                f"processes must be <= {self._max_processes}, for which rounding is bounded (got {processes})"
            )
        self._processes = processes

    @property
    def processes(self) -> int:
        """Over how many processes logical batches are spread."""
        return self._processes

    @property
    def assumptions(self) -> tuple[str, ...]:  # type: ignore[override]
        """What several processes take for granted."""
        if self._processes == 1:
            return ()
        return (f"{self._processes} processes that trust each other read the same records in the same order",)

    def write_sum(self, out: Tensor) -> int:
        """Copies the clipped sum of own rows over batch_size into (d,) float64 zeros, and returns their number.

        NOT private: for the process that adds the sums up.
        """
        for part, mean in zip(self.views(out), self._means or [], strict=self._means is not None):
            part.copy_(mean)
        return self._n_rows

    def replace_sum(self, total: Tensor, n_rows: int) -> None:
        """Takes the sum over all processes in place of its own: (d,) float64, of that many rows."""
        if n_rows > self._summation.max_rows:
            raise SequenceError(f"a logical batch must have at most {self._summation.max_rows} rows")
        self._means = self.views(total)

    @property
    def dim(self) -> int:
        """Coordinates of the means of the open batch."""
        return sum(shape.numel() for shape in self._shapes)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Returns a (d,) vector cut into the shapes of the parameters."""
        parts = flat.split([shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def sensitivity(self, adjacency: Adjacency) -> float:
        """Returns the L2 sensitivity of the mean, with the worst-case error of its sum."""
        return CLIP_UNITS[adjacency] * self.clip * (1.0 + self._summation.error) / self.batch_size

    def event(self) -> Gaussian | NonPrivate:
        """Returns the Gaussian event in clip units."""
        return self._event

    def release(self, generator: torch.Generator) -> Release:
        """Adds N(0, noise_std^2 I) and ends the batch."""
        noise_std = self.noise_std  # raises before open
        means = dict(enumerate(self._means or []))
        large = [i for i, m in means.items() if m.numel() > _LARGE and m.dtype == self._dtype and m.is_contiguous()]
        shapes = [torch.Size([0]) if i in large else shape for i, shape in enumerate(self._shapes)]
        flat = self._memory(sum(shape.numel() for shape in shapes))
        # PRIVACY: views of this release only: who holds an old one (p.grad) may have pointed it to other memory, where
        # there is no noise (test_a_gradient_that_is_pointed_elsewhere_leaves_the_noise_in_the_next_release)
        parts = self._draw(flat, noise_std, generator).split([shape.numel() for shape in shapes])
        answer = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        for i, mean in means.items():
            if i not in large:
                answer[i].add_(mean)  # rounds mean + noise, so after the noise: post-processing
                continue
            # a large sum becomes the release itself, with noise that stays in cache
            answer[i] = mean
            for piece in mean.view(-1).split(_PIECE if mean.device.type == "cpu" else mean.numel()):
                piece.add_(self._draw(torch.empty_like(piece), noise_std, generator))
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
        >>> from torch_dpsco.gradbatch import DenseBlock
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
        return {"oracle": "Clipped", "clip": self.fixed_clip, "noise_multiplier": self.noise_multiplier}


class HolderClipped(ClippedMean):
    """Clips at the gradient bound that the loss promises, so that with true constants nothing is ever clipped.

    `noise="adaptive"`: C_t = G(|w_t|), a function of the public iterate; the ratio z is constant, so that each step is
    the same event whatever the iterates do, also on an unbounded domain. `noise="constant"`: C = G(radius).
    `noise="paper"`: C = M + L radius^alpha, the bound of the paper.

    Args:
        problem: promised constants; see `Problem.grad_bound`.
        noise_multiplier: z >= 0.
        batch_size: public divisor.
        noise: "adaptive", "constant" or "paper".
        radius: bound of the feasible set; inf for the whole space.

    Raises:
        MissingConstantError: constants are missing, or a constant bound does not exist on an unbounded domain.

    Source: Wang, Lei, Ying, Zhang, Algorithm 2 (constant); spec holder.md 3.5, accounting A (adaptive).
    """

    def __init__(
        self,
        problem: Problem,
        noise_multiplier: float,
        batch_size: int,
        *,
        noise: str = "adaptive",
        radius: float = math.inf,
    ) -> None:
        super().__init__(noise_multiplier, batch_size)
        self.noise = check.choice(("adaptive", "constant", "paper"), noise=noise)
        self.problem, self.radius = problem, check.positive(radius=radius, allow_inf=True)
        if noise == "paper" and math.isinf(self.radius):
            raise MissingConstantError("radius must be finite for noise='paper': the paper projects onto a ball")
        # past problem.radius some constants are not promised; rows are clipped all the same
        self._reach = min(self.radius, problem.radius)
        if noise == "paper":
            self._constant, self._follows = problem.paper_grad_bound(self._reach), False
            return
        at_zero = problem.grad_bound(0.0)  # raises if constants are missing
        try:
            self._constant = problem.grad_bound(self._reach)
        except MissingConstantError:
            if noise == "constant":
                raise
            self._constant = math.inf
        # a bound that is the same everywhere need not follow the iterate
        self._follows = noise == "adaptive" and self._constant > at_zero

    def bound(self, query: Sequence[Tensor]) -> float:
        """Returns C for gradients at `query`; raises ValueError if the iterate is not finite."""
        if not self._follows:
            return self._constant
        norm = joint_norm(query)
        if math.isinf(norm):
            raise ValueError("the iterate must be finite: training diverged, lower lr or bound the domain (radius=)")
        return min(self.problem.grad_bound(min(norm, self._reach)), self._constant)

    def settings(self) -> dict[str, Any]:
        """Returns the fixed numbers."""
        return {
            "oracle": "HolderClipped",
            "noise": self.noise,
            "noise_multiplier": self.noise_multiplier,
            "radius": self.radius,
            "problem": repr(self.problem),
            "grad_bound": self.problem.grad_bound(min(1.0, self._reach)),  # repr leaves exact_grad_bound out
        }
