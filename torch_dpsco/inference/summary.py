"""The table of a private fit: estimates, standard errors, p-values and intervals for raw features."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from torch_dpsco import plots
from torch_dpsco.inference.debiased import Debiased

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = NDArray[np.float64]


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
    """

    title: str
    names: tuple[str, ...]
    released: Array
    coefficients: Array
    standard_errors: Array
    privacy: Array
    level: float
    assumed: tuple[str, ...]

    @classmethod
    def of(
        cls,
        title: str,
        names: tuple[str, ...],
        found: Debiased,
        to_raw: Array,
        released: Array,
        level: float,
        *assumed: str,
    ) -> Summary:
        """Returns the summary of an estimate.

        Args:
            title: of the table.
            names: of coefficients, (k,).
            found: estimate and covariances in prepared units, (p,).
            to_raw: (k, p), linear map to coefficients for raw features.
            released: (k,), for raw features.
            level: in (0, 1).
            *assumed: in words.
        """
        sampling, noise = (np.diag(to_raw @ part.cpu().numpy() @ to_raw.T) for part in found[1:])
        total = sampling + noise
        estimate = to_raw @ found.estimate.cpu().numpy()
        return cls(title, names, released, estimate, np.sqrt(total), noise / total, level, assumed)

    @property
    def p_values(self) -> Array:
        """Two-sided, of the hypothesis that a coefficient is 0 (k,)."""
        ratios = np.abs(self.coefficients / self.standard_errors)
        return np.array([math.erfc(ratio / math.sqrt(2)) for ratio in ratios])

    @property
    def intervals(self) -> Array:
        """Ends (k, 2) of the intervals."""
        reach = NormalDist().inv_cdf((1 + self.level) / 2) * self.standard_errors
        return np.stack([self.coefficients - reach, self.coefficients + reach], axis=1)

    def __str__(self) -> str:
        wide = max(map(len, self.names))
        percent = f"{100 * self.level:g} %"
        out = [
            self.title,
            f"{'':{wide}} {'estimate':>10} {'std. error':>10} {'of noise':>9} {'p':>8}   {percent} interval",
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
                f"{name:{wide}} {value:10.4g} {error:10.3g} {100 * share:7.0f} % {p:8.2g}   [{low:.4g}, {high:.4g}]"
            )
        return "\n".join(
            [*out, "of noise: share of the variance that privacy adds. Assumed:", *(f"* {a}" for a in self.assumed)]
        )

    def __repr__(self) -> str:
        return str(self)

    def plot(self) -> Figure:
        """Returns a picture of estimates and intervals.

        Raises:
            ImportError: matplotlib is not installed.
        """
        label = f"estimate and {100 * self.level:g} % interval"
        panel = plots.ranges("", "coefficient", self.names, self.coefficients.tolist(), self.intervals.tolist(), label)
        return plots.figure(self.title, panel)
