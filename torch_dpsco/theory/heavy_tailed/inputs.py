"""What the one-pass plans for heavy-tailed gradients share: checked inputs, errors of a mean, the search for T.

n records are cut into T batches of s = floor(n/T), each used once, so that T does not enter the privacy cost. A step
has the sampling variance r_2^2/s and the noise variance d sigma^2, sigma = `mean_noise_std(C, s, rho)`.

Proof: docs/proofs/heavy_tailed.md#one-pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch_dpsco import _validate as check
from torch_dpsco.errors import AdjacencyError, ConditionError
from torch_dpsco.theory.clipping import clip_bias_worst, mean_noise_std, sensitivity_factor

MAX_STEPS = 100_000  # end of the search for the number of steps
_GRID = 400


def check_order(moment_order: float, allow_infinite_variance: bool = False) -> float:
    """Returns k; raises ConditionError for k < 2 (infinite variance) unless that is allowed.

    Example:
        >>> check_order(3), check_order(1.5, allow_infinite_variance=True)
        (3.0, 1.5)
    """
    k = check.order(moment_order=moment_order)
    if k < 2 and not allow_infinite_variance:
        raise ConditionError(
            f"moment_order must be >= 2 (got {k:g}): gradients may have infinite variance; pass "
            "allow_infinite_variance=True for bounds by the variance of the CLIPPED mean"
        )
    return k


def check_mode(mode: str, adjacency: str) -> str:
    """Returns the mode; raises AdjacencyError for "paper" outside of replace_one, where the paper proves nothing."""
    sensitivity_factor(adjacency)
    if check.choice(("tight", "paper"), mode=mode) == "paper" and adjacency != "replace_one":
        raise AdjacencyError(
            f"mode='paper' is proved for replace_one only (got {adjacency!r}); use mode='tight'"
        )
    return mode


@dataclass(frozen=True, kw_only=True)
class OnePassPlan:
    """Public numbers of a run in one pass, of every method.

    Args:
        n: public number of records.
        dim: d.
        steps: T, one batch each.
        batch_size: s = floor(n/T), the divisor.
        rho: zCDP of the run.
        adjacency: of rho.
        clip: C.
        noise_std: sigma, std per coordinate of the noise on a mean.
        bias: largest norm of the bias of a clipped mean, B(C) unless C is below (k-1) r_k/k.
        variance: r_2^2/s + d sigma^2, WITHOUT the square of the bias.
        lr: step size as the optimizer takes it: of the first step, or the factor of t in that of step t.
        bound: on the expected excess risk; not proved under add_remove, see docs/proofs/heavy_tailed.md#one-pass.
        smoothness: beta.
        mode: "tight" or "paper".
    """

    n: int
    dim: int
    steps: int
    batch_size: int
    rho: float
    adjacency: str
    clip: float
    noise_std: float
    bias: float
    variance: float
    lr: float
    bound: float
    smoothness: float
    mode: str = "tight"

    @property
    def noise_multiplier(self) -> float:
        """Std of the noise on the sum of rows, over the clip."""
        return self.noise_std * self.batch_size / self.clip


@dataclass(frozen=True)
class OnePass:
    """Checked public inputs of a one-pass plan.

    Args:
        n: records, public.
        dim: d, number of parameters.
        rho: > 0, zCDP of the whole run.
        moment: r_k > 0 with sup_w E||grad f(w,x)||^k <= r_k^k.
        moment_order: k > 1.
        second_moment: r_2; default r_k for k >= 2 (r_2 <= r_k), unknown below.
        adjacency: "replace_one", "zero_out" or "add_remove".
        allow_infinite_variance: admits k < 2.

    Example:
        >>> data = OnePass(n=100, dim=1, rho=0.5, moment=1.0, moment_order=2.0)
        >>> data.batch_size(3), round(data.noise_variance(10, 1.0), 12), round(data.sampling_variance(10, 1.0), 12)
        (33, 0.04, 0.1)
    """

    n: int
    dim: int
    rho: float
    moment: float
    moment_order: float
    second_moment: float | None = None
    adjacency: str = "replace_one"
    allow_infinite_variance: bool = False

    def __post_init__(self) -> None:
        check.positive_count(n=self.n)
        check.positive_count(dim=self.dim)
        check.positive(rho=self.rho)
        check.positive(moment=self.moment)
        check_order(self.moment_order, self.allow_infinite_variance)
        if self.second_moment is not None:
            check.positive(second_moment=self.second_moment)
        sensitivity_factor(self.adjacency)

    def batch_size(self, steps: int) -> int:
        """Returns s = floor(n/T); raises ValueError for T > n."""
        if check.positive_count(steps=steps) > self.n:
            raise ValueError(
                f"steps must be <= n={self.n}, for batches that use each record once (got {steps})"
            )
        return self.n // steps

    def noise_std(self, batch_size: int, clip: float) -> float:
        """Returns sigma of the noise on a mean."""
        # PRIVACY: one mean per record, so that rho buys each (test_each_batch_costs_rho_and_batches_are_disjoint).
        return mean_noise_std(clip, batch_size, self.rho, adjacency=self.adjacency)

    def noise_variance(self, batch_size: int, clip: float) -> float:
        """Returns d sigma^2, the expected square of the noise on a mean."""
        return self.dim * self.noise_std(batch_size, clip) ** 2

    def sampling_variance(self, batch_size: int, clip: float) -> float:
        """Returns a bound on the variance of a clipped mean without noise.

        r_2^2/s, where r_2 is finite; for k < 2 also r_k^k C^(2-k)/s, since clipped rows have norm^2 <= C^(2-k) norm^k.
        """
        k = self.moment_order
        bounds = []
        if self.second_moment is not None or k >= 2:
            bounds.append((self.second_moment or self.moment) ** 2)
        if k < 2:
            bounds.append(math.exp(k * math.log(self.moment) + (2 - k) * math.log(clip)))
        return min(bounds) / batch_size

    def run(self, steps: int, clip: float) -> dict[str, Any]:
        """Returns the fields of a `OnePassPlan` that follow from steps and clip."""
        s = self.batch_size(steps)
        return {
            "n": self.n,
            "dim": self.dim,
            "steps": steps,
            "batch_size": s,
            "rho": self.rho,
            "adjacency": self.adjacency,
            "clip": clip,
            "noise_std": self.noise_std(s, clip),
            "bias": clip_bias_worst(self.moment, self.moment_order, clip),
            "variance": self.sampling_variance(s, clip) + self.noise_variance(s, clip),
        }


def least_steps(bound: Callable[[int], float], most: int) -> int:
    """Returns an integer T in 1..min(most, 1e5) with a small bound(T): a geometric grid of 400, then +-2 around it.

    Source:
        docs/proofs/heavy_tailed.md#one-pass.

    Example:
        >>> least_steps(lambda T: T + 100 / T, most=1000)
        10
    """
    last = min(check.positive_count(most=most), MAX_STEPS)
    grid = {round(math.exp(math.log(last) * i / (_GRID - 1))) for i in range(_GRID)}
    start = min(sorted(grid), key=bound)
    return min(range(max(1, start - 2), min(last, start + 2) + 1), key=bound)
