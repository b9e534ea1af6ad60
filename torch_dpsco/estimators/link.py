"""From the scores of a clipped logistic loss to log-odds.

Of many records alike, a share p of which has the second label, the least clipped loss is not at the log-odds of p, but
at the score s with q = sigmoid(s) and

    p = min(q, k) / (min(q, k) + min(1 - q, k)),    k = clip / |x|,

since the slopes of the two labels, (1 - q) and q, are cut at k. Post-processing: no privacy rests on it.

Source: docs/proofs/output.md#probabilities-of-a-clipped-loss
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from torch_dpsco import _validate as check
from torch_dpsco._validate import check_fields
from torch_dpsco.accounting.analysis.rounding import FloatArray
from torch_dpsco.estimators.preparation import Preparation
from torch_dpsco.estimators.reading import dense_rows

_BLOCK_ROWS = 65_536


@dataclass(frozen=True)
class Link:
    """Makes log-odds of scores.

    Args:
        clip: C > 0, that gradients were clipped at.
        rows: map of raw rows, in whose units the model was fitted.
    """

    clip: float
    rows: Preparation

    def __post_init__(self) -> None:
        check_fields(self)
        check.positive(clip=self.clip)

    def __call__(self, scores: FloatArray, X: Any) -> FloatArray:
        """Returns log-odds (n, 1) of scores (n, 1) of public rows (n, d)."""
        norms = [
            torch.linalg.vector_norm(self.rows(rows), dim=1).cpu().numpy()
            for features in dense_rows(X)
            for rows in torch.split(features, _BLOCK_ROWS)
        ]
        return log_odds(scores, self.clip / np.concatenate(norms)[:, None])

    def to_dict(self) -> dict[str, Any]:
        """Returns the numbers, as JSON has them: None for no bound."""
        rows = asdict(self.rows)
        before = self.rows.before
        return {"clip": self.clip, **rows, "before": before if math.isfinite(before) else None}

    @staticmethod
    def from_dict(given: Mapping[str, Any]) -> Link:
        """Returns the link that `to_dict` made this of; raises TypeError or ValueError for what it did not make."""
        rows = dict(given)
        clip = rows.pop("clip")
        before = math.inf if rows["before"] is None else rows["before"]
        return Link(clip, Preparation.of({**rows, "before": before}))


def log_odds(scores: FloatArray, limits: FloatArray) -> FloatArray:
    """Returns log(p / (1 - p)) of scores, for slopes that were cut at these limits, of at least 1/2.

    A smaller limit would make 1/2 of many scores, and lose their order.

    Example:
        >>> log_odds(np.array([2.0, -2.0, 2.0]), np.array([0.5, 0.5, 1.0])).round(3).tolist()
        [1.434, -1.434, 2.0]
    """
    size = np.abs(scores)
    likelier = np.minimum(-np.logaddexp(0.0, -size), np.log(np.clip(limits, 0.5, 1.0)))
    return np.asarray(np.sign(scores) * (likelier + np.logaddexp(0.0, size)))
