"""A table that was read by a schema."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Table:
    """A table that was read: X (n, d) float64, y (n,), and groups (n,), the ids for `fit`, or None."""

    X: NDArray[np.float64]
    y: NDArray[Any]
    groups: NDArray[Any] | None

    def arguments(self) -> dict[str, Any]:
        """Returns all of it, for `model.fit(**table.arguments())`."""
        return {"X": self.X, "y": self.y, **({} if self.groups is None else {"groups": self.groups})}
