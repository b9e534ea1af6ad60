"""A table that was read by a schema."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from torch_dpsco.losses.base import Loss
from torch_dpsco.schema.columns import key

if TYPE_CHECKING:
    from torch_dpsco.schema.schema import Schema


@dataclass(frozen=True)
class Table:
    """A table that was read: X (n, d) float64, y (n,), and groups (n,), the ids for `fit`, or None."""

    schema: Schema = field(repr=False)
    X: NDArray[np.float64]
    y: NDArray[Any]
    groups: NDArray[Any] | None

    def arguments(self) -> dict[str, Any]:
        """Returns all of it, for `model.fit(**table.arguments())`."""
        return {"X": self.X, "y": self.y, **({} if self.groups is None else {"groups": self.groups})}

    def dataset(self, loss: Loss) -> TensorDataset:
        """Returns rows and targets as a loss of `torch_dpsco.losses` takes them, for `optimizer.loader`.

        Labels are -1 and +1 (the second one), or 0..K-1; null records have inputs of NaN and the target 0, or 1.

        Args:
            loss: of targets like those of the schema.

        Raises:
            ValueError: the loss is of other targets.
        """
        self.schema.require_targets(loss)
        rows, dtype = self.X.copy(), torch.get_default_dtype()
        if self.schema.labels is None:
            targets = self.y.astype(np.float64)
            null = ~np.isfinite(targets)
            targets = np.where(null, 0.0, targets)
        else:
            places = {key(label): place for place, label in enumerate(self.schema.labels)}
            codes = np.array([places.get(key(label), -1) for label in self.y.tolist()], dtype=np.int64)
            null = codes < 0
            targets = np.where(null, 0, codes) if loss.target_kind == "class" else np.where(codes == 0, -1.0, 1.0)
        rows[null] = np.nan
        wanted = torch.int64 if loss.target_kind == "class" else dtype
        return TensorDataset(torch.from_numpy(rows).to(dtype), torch.from_numpy(targets).to(wanted))
