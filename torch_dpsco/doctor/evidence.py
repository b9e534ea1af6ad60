"""What probing a script shows, as values that the checks read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from torch_dpsco.attempt import Refused
from torch_dpsco.doctor.isolation import Isolation

_T = TypeVar("_T")


class NotScalarError(ValueError):
    """The loss did not return one number."""


@dataclass(frozen=True)
class Pass:
    """One forward and backward in training mode.

    Args:
        value: what the loss returned.
        totals: gradient of the loss by parameter, None for parameters that it does not reach; of a parameter with
            factored rows only what comes from outside of its layer.
        rows: per-sample gradients by parameter, of the parameters that have some.
        factored: parameters whose total is not that of their rows.
        norms: of the rows as ghost clipping sees them, None in other modes.
    """

    value: Any
    totals: Mapping[str, Tensor | None]
    rows: Mapping[str, Tensor]
    factored: frozenset[str] = frozenset()
    norms: Tensor | None = None


@dataclass(frozen=True)
class Line:
    """Gradients of made-up records, each by itself, at parameters on a line through 0.

    Args:
        places: (points,), increasing, where on the line.
        direction: (dim,), of the line, of length 1.
        grads: (records, points, dim).
    """

    places: Tensor
    direction: Tensor
    grads: Tensor


@dataclass
class Evidence:
    """What the passes show; None or empty where they were not made.

    Args:
        size: records of the made-up batch.
        base: the batch.
        changed: the same batch with another record 0.
        outliers: pairs of batches that differ in record 0, which is an outlier in one of them.
        outlier_kinds: what it is.
        again: the batch directly after itself.
        after_other: the batch directly after one of other records.
        buffers: names of buffers and frozen parameters that a training forward changed.
        losses: loss of the batch, of its double and of its triple, in evaluation mode.
        random_loss: whether other random numbers give another loss in evaluation mode.
        mixing: how far gradients of batches are from sums over records, relative, where rows could not be had.
        mean_rows: whether rows were scaled by the size of the batch.
        weight: what a batch multiplies the gradients of its records by (1/size for a mean, 1 for a sum).
        randomness: how far other random numbers move the gradient of the batch, relative.
        line: gradients of single records.
        refused: what could not be probed.
        isolation: what moves the bits of a row.
    """

    size: int = 0
    base: Pass | None = None
    changed: Pass | None = None
    outliers: list[tuple[Pass, Pass]] = field(default_factory=list)
    outlier_kinds: list[str] = field(default_factory=list)
    again: Pass | None = None
    after_other: Pass | None = None
    buffers: list[str] = field(default_factory=list)
    losses: tuple[float, float, float] | None = None
    random_loss: bool = False
    mixing: float | None = None
    mean_rows: bool = False
    weight: float | None = None
    randomness: float = 0.0
    line: Line | None = None
    refused: list[Refused] = field(default_factory=list)
    isolation: Isolation | None = None

    @property
    def shows_rows(self) -> bool:
        """Whether rows were compared, with another record 0, that are not all zero."""
        rows = {} if self.base is None or self.changed is None else self.base.rows
        return any(bool(made.any()) for made in rows.values())

    def keep(self, outcome: _T | Refused) -> _T | None:
        """Returns an outcome; notes it and returns None if it is a refusal."""
        if isinstance(outcome, Refused):
            self.refused.append(outcome)
            return None
        return outcome
