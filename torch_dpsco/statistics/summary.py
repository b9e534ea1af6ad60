"""The table of a private fit: estimates, standard errors, p-values and intervals for raw features."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from torch import Tensor

from torch_dpsco.accounting.events import in_words
from torch_dpsco.show import plots
from torch_dpsco.statistics.debiased import Debiased, debias, least_squares

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = NDArray[np.float64]
_ASSUMED = (
    "all settings, and which features are in the model, were chosen without a look at these"
    " records",
    "enough records for a normal law: see docs/inference.md for where the coverage was measured",
)


@dataclass(frozen=True, eq=False, repr=False)
class Summary:
    """What a private fit says about the coefficients of a model: `print(summary)`.

    Args:
        title: of the table.
        names: of coefficients, (k,).
        released: (k,), those of the model, pulled towards 0 by the regularizer.
        coefficients: (k,), without this bias.
        standard_errors: (k,), of sampling and of noise for privacy together.
        privacy: (k,) in [0, 1], share of the variance that is noise for privacy.
        level: in (0, 1), of the intervals, each for itself.
        assumed: what the level rests on, in words.
        limit: least eigenvalue of the released Hessian, what it had to exceed, and its standard error.
    """

    title: str
    names: tuple[str, ...]
    released: Array
    coefficients: Array
    standard_errors: Array
    privacy: Array
    level: float
    assumed: tuple[str, ...]
    limit: tuple[float, float, float] = (math.inf, 0.0, 0.0)

    @property
    def distance(self) -> float:
        """Of the Hessian from where intervals are refused, in standard errors; see `Debiased.distance`."""
        least, needed, spread = self.limit
        return (least - needed) / spread if spread else math.inf

    @property
    def p_values(self) -> Array:
        """Two-sided, of the hypothesis that a coefficient is 0 (k,)."""
        ratios = np.abs(self.coefficients / self.standard_errors)
        return np.array([p_value(ratio, self.distance) for ratio in ratios])

    @property
    def intervals(self) -> Array:
        """Ends (k, 2) of the intervals."""
        sides = reach(self.level, self.distance) * self.standard_errors
        return np.stack([self.coefficients - sides, self.coefficients + sides], axis=1)

    def __str__(self) -> str:
        wide = max(map(len, self.names))
        percent = f"{100 * self.level:g} %"
        out = [
            self.title,
            (
                f"{'':{wide}} {'estimate':>10} {'std. error':>10} {'of noise':>9} {'p':>8}  "
                f" {percent} interval"
            ),
        ]
        rows = zip(
            self.names,
            self.coefficients,
            self.standard_errors,
            self.privacy,
            self.p_values,
            self.intervals,
            strict=True,
        )
        for name, value, error, share, p, (low, high) in rows:
            out.append(
                f"{name:{wide}} {value:10.4g} {error:10.3g} {100 * share:7.0f} % {p:8.2g}  "
                f" [{low:.4g}, {high:.4g}]"
            )
        return "\n".join([*out, *self.notes()])

    def notes(self) -> list[str]:
        """Returns what is said below the table: how far the limit is, and what is assumed."""
        share = "of noise: share of the variance that privacy adds. Assumed:"
        return [self._of_limit(), share, *(f"* {a}" for a in self.assumed)]

    def _of_limit(self) -> str:
        least, needed, spread = self.limit
        wider = reach(self.level, self.distance) / reach(self.level, math.inf)
        said = (
            ""
            if wider < 1.005
            else f", so that intervals are {wider:.3g} times as wide as far from it"
        )
        return (
            f"least eigenvalue of the Hessian: {least:.3g} +- {spread:.2g}, where {needed:.3g} is"
            f" the limit: {self.distance:.3g} standard errors above{said}"
        )

    def __repr__(self) -> str:
        return str(self)

    def plot(self) -> Figure:
        """Returns a picture of estimates and intervals.

        Raises:
            ImportError: matplotlib is not installed.
        """
        label = f"estimate and {100 * self.level:g} % interval"
        panel = plots.ranges(
            "",
            "coefficient",
            self.names,
            self.coefficients,
            self.intervals,
            label,
        )
        return plots.figure(self.title, panel)


def p_value(ratio: float, distance: float) -> float:
    """Returns the two-sided p-value of an estimate over its standard error, given that intervals are shown.

    Args:
        ratio: >= 0.
        distance: > 0, from where they are not, in standard errors: what decides may go along with the estimate.

    Source:
        docs/proofs/inference.md#the-limit

    Example:
        >>> round(p_value(1.96, math.inf), 4), round(p_value(1.96, 1.0), 2)
        (0.05, 0.3)
    """
    shown = math.erfc((ratio - distance) / math.sqrt(2))
    return min(1.0, 2 * math.erfc(ratio / math.sqrt(2)) / shown) if shown else 0.0


def reach(level: float, distance: float) -> float:
    """Returns how many standard errors intervals reach to each side: where the p-value is 1 - level.

    Example:
        >>> round(reach(0.95, math.inf), 2), round(reach(0.95, 1.0), 1)
        (1.96, 3.9)
    """
    return float(
        scipy.optimize.brentq(
            lambda ratio: p_value(ratio, distance) - (1 - level), 0.0, 64.0, xtol=1e-13
        )
    )


def summarize(model: Any, level: float, units: Array | None = None) -> Summary:
    """Returns the summary of a fitted model that paid for intervals; see `LinearModel.summary`.

    Args:
        model: fitted.
        level: of intervals.
        units: linear map of coefficients for raw features, and the intercept, to others (k, d + 1); None for none.
    """
    task = model.plan_.task
    dim = task.dim
    budget = model.plan_.budget
    given = task.preparation
    center, scale = (np.broadcast_to(part.numpy(), dim) for part in given.shift_and_scale)
    # coefficients for raw features, as a linear map of prepared ones, and back
    to_raw = np.diag([*(1 / scale), *[given.intercept] * (task.width - dim)])
    to_raw[dim:, :dim] = -center / scale
    released = np.concatenate([np.ravel(model.coef_), np.ravel(model.intercept_)])[: task.width]
    prepared = torch.from_numpy(np.linalg.solve(to_raw, released))
    found, assumed = _DEBIASED[task.loss.intervals](
        model.plan_, prepared, torch.from_numpy(model.hessian_), vars(model).get("moments_")
    )
    if task.bound_y is not None:
        size = f"bound_y={task.bound_y:g} in size"
        assumed = (*assumed, f"no target is larger than {size}; a larger one is clipped")
    names = getattr(model, "feature_names_in_", [f"x{k}" for k in range(dim)])
    name = type(model).__name__
    to_own = to_raw if units is None else units[:, : task.width] @ to_raw
    sampling, noise = (
        np.diag(to_own @ part.cpu().numpy() @ to_own.T) for part in (found.sampling, found.noise)
    )
    return Summary(
        title=(
            f"{name}, (epsilon={budget.epsilon:g}, delta={budget.delta:g}),"
            f" {in_words(task.adjacency)}"
        ),
        names=(*map(str, names), "intercept")[: task.width],
        released=to_own @ prepared.numpy(),
        coefficients=to_own @ found.estimate.cpu().numpy(),
        standard_errors=np.sqrt(sampling + noise),
        privacy=noise / (sampling + noise),
        level=level,
        assumed=(
            *assumed,
            f"no row is longer than bound_x={given.bound_x:g}; a longer one is clipped, as in the model",
            *_ASSUMED,
        ),
        limit=(found.least, found.needed, found.spread),
    )


def _of_logistic(
    plan: Any, prepared: Tensor, hessian: Tensor, moments: Array | None
) -> tuple[Debiased, tuple[str, ...]]:
    assumed = (
        "the log-odds are linear in the features, and records are independent: else standard"
        " errors may be small"
    )
    found = debias(
        prepared,
        hessian,
        reg=plan.reg,
        noise_std=plan.noise_scale,
        output_std=plan.output_scale,
        hessian_std=plan.hessian_scale,
        rate=plan.task.preparation.bound,
    )
    return found, (assumed,)


def _of_squared(
    plan: Any, prepared: Tensor, hessian: Tensor, moments: Array | None
) -> tuple[Debiased, tuple[str, ...]]:
    assert moments is not None
    constant = plan.task.preparation.intercept
    found = least_squares(
        hessian,
        torch.from_numpy(moments),
        float(hessian[-1, -1]) / constant**2 if constant else plan.task.n,
        gram_std=plan.constants.std_xtx_diag,
        moment_std=plan.constants.std_xty,
        total_std=plan.total_scale,
    )
    assumed = (
        "the mean of targets is linear in the features, their variance is one, and records are"
        " independent"
    )
    return found, (assumed,)


_DEBIASED = {"hessian": _of_logistic, "moments": _of_squared}
