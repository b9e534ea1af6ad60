"""A table that was read by a schema."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from torch_dpsco import _validate as check
from torch_dpsco._doors import typed
from torch_dpsco.errors import UnitError
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
        return {
            "X": self.X,
            "y": self.y,
            **({} if self.groups is None else {"groups": self.groups}),
        }

    @typed
    def dataset(self, loss: Loss, *, unit: str = "example") -> TensorDataset:
        """Returns rows and targets as a loss of `torch_dpsco.losses` takes them, for `optimizer.loader`.

        Labels are -1 and +1 (the second one), or 0..K-1; null records have inputs of NaN and the target 0, or 1.

        Args:
            loss: of targets like those of the schema.
            unit: "user" where the schema keeps several rows of a unit, for `optimizer.loader(dataset,
                users=table.groups)` of an optimizer that protects users.

        Raises:
            UnitError: the table is of users and unit is not, or the reverse.
            ValueError: the loss is of other targets.
        """
        check.choice(("example", "user"), unit=unit)
        if (unit == "user") != (self.groups is not None):
            # PRIVACY: rows without their ids would be protected one by one (test_rows_of_users_are_not_taken_for_units)
            raise UnitError(
                "unit must be 'user' where the schema keeps several rows of a unit, with"
                f" loader(dataset, users=table.groups), and only there (got {unit!r})"
            )
        self.schema.require_targets(loss)
        rows = self.X.copy()
        dtype = torch.get_default_dtype()
        if self.schema.labels is None:
            targets = self.y.astype(np.float64)
            null = ~np.isfinite(targets)
            targets = np.where(null, 0.0, targets)
        else:
            places = {key(label): place for place, label in enumerate(self.schema.labels)}
            codes = np.array(
                [places.get(key(label), -1) for label in self.y.tolist()], dtype=np.int64
            )
            null = codes < 0
            targets = (
                np.where(null, 0, codes)
                if loss.target_kind == "class"
                else np.where(codes == 0, -1.0, 1.0)
            )
        rows[null] = np.nan
        wanted = torch.int64 if loss.target_kind == "class" else dtype
        return TensorDataset(torch.from_numpy(rows).to(dtype), torch.from_numpy(targets).to(wanted))
