"""What probing a script shows: records in the gradients of others, bits that depend on other rows.

The guarantee assumes that for batches of ONE size a row is computed from its own record alone (docs/guarantees.md).
Here that is looked at: synthetic records, the model's own weights, threads and device as they are. It is no proof.
Rows are compared without forming those of Linear layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from torch_dpsco.doctor.script import Finding, Script
from torch_dpsco.rows.blocks import Block, FactoredBlock
from torch_dpsco.rows.supported import switches
from torch_dpsco.sampling import PrivateLoader
from torch_dpsco.trial import HALF, Isolation, Mixed, Rows
from torch_dpsco.trial.undo import Refused


class JointRows:
    """The rows of records over all parameters, as one answer.

    Args:
        rows: by parameter; those of another number of records do not count.
        size: number of records.
    """

    def __init__(self, rows: Mapping[str, Rows], size: int) -> None:
        self._rows = {name: made for name, made in rows.items() if len(made) == size}
        self.shape = (size,)
        self.tolerance = 10 * tolerance(rows)

    def norms(self) -> Tensor:
        """Returns the joint length for each record, (size,) float64."""
        squares = [made.norms().square() for made in self._rows.values()]
        return sum(squares, torch.zeros(self.shape, dtype=torch.float64)).sqrt()

    def gaps(self, other: JointRows) -> Tensor:
        """Returns how far other rows are for each record, (size,) float64."""
        gaps = torch.zeros(self.shape, dtype=torch.float64)
        for name, made in self._rows.items():
            others = other._rows.get(name)
            if others is not None:
                # PRIVACY: what was finite and is not any more has moved, however it compares
                # (test_rows_that_are_not_finite_any_more_have_moved)
                gap = made.gaps(others).nan_to_num(math.inf).where(made.norms().isfinite(), 0.0)
                gaps += gap.square()
        return gaps.sqrt()


def rows_of(block: Block) -> Rows:
    """Returns the rows of the first parameter of a block."""
    if not isinstance(block, FactoredBlock):
        return Rows(block.dense()[0].detach())
    # PRIVACY: copies: the next batch may be written over them
    # (test_records_that_meet_in_memory_that_is_used_again_are_found)
    left = block.backprops.detach() * block.scale
    return Rows(left, block.acts.detach().to(left.dtype, copy=True) if block.weight else None)


def movement(first: Pass, second: Pass, size: int) -> Tensor:
    """Returns how far each record's rows moved, relative to the largest joint row; (size,) float64."""
    before = JointRows(first.rows, size)
    largest = float(before.norms().nan_to_num(0.0, 0.0, 0.0).max())
    return before.gaps(JointRows(second.rows, size)) / max(largest, 1e-30)


def joint_norms(rows: Mapping[str, Rows]) -> Tensor:
    """Returns the norms of rows over all parameters, (size,) float64."""
    return torch.stack([made.norms().square() for made in rows.values()]).sum(0).sqrt()


def tolerance(rows: Mapping[str, Rows]) -> float:
    """Returns the relative difference of rows that rounding explains."""
    dtypes = {made.dtype for made in rows.values()}
    if dtypes & set(HALF):
        return 3e-2
    return 1e-5 if torch.float32 in dtypes else 1e-9


_MOST = 256  # rows of a probed batch: more would make the start of `fit` slow

_Key = tuple[int, str, int, tuple[object, ...]]
_known: WeakKeyDictionary[nn.Module, dict[_Key, Isolation]] = WeakKeyDictionary()


def rows_to_probe(script: Script) -> int | None:
    """Returns the number of rows of the batches of a script, as far as they are probed; None if it has no fixed one."""
    if not script.attached or not isinstance(script.source, PrivateLoader):
        return None
    slots = script.source.slots
    design = script.source.design
    most = script.source.physical_batch_size or design.batch_size
    return max(2, min(_MOST, most if slots is None else slots.block))


def remembered(
    model: nn.Module, device: torch.device, rows: int, probe: Callable[[], Isolation]
) -> Isolation:
    """Returns what is known of a model with these threads, device, rows and kernels; probes it once."""
    findings = _known.setdefault(model, {})
    # PRIVACY: other kernels, another finding (test_a_finding_is_of_the_kernels_that_were_looked_at)
    kernels = torch.are_deterministic_algorithms_enabled(), *switches()
    key = torch.get_num_threads(), str(device), rows, kernels
    if key not in findings:
        findings[key] = probe()
    return findings[key]


def note(script: Script, evidence: Evidence) -> None:
    """Lets the reports of the loader's optimizer quote what was found."""
    if evidence.isolation is not None and isinstance(script.source, PrivateLoader):
        script.source.isolation.checked = str(evidence.isolation)


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
    rows: Mapping[str, Rows]
    factored: frozenset[str] = frozenset()
    norms: Tensor | None = None


@dataclass(frozen=True)
class Line:
    """Gradients of single synthetic records at parameters on a line through 0.

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
        size: records of the synthetic batch.
        base: the batch.
        moved: how far the rows of the others moved, relative, with another record 0; empty where that is not known.
        mixed: with which other record 0 the rows of others moved.
        drift: how far rows moved, relative, after another batch in place of the same one, and after that one.
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
    moved: Tensor = field(default_factory=lambda: torch.empty(0))
    mixed: Mixed | None = None
    drift: tuple[float, float] | None = None
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
    def rows(self) -> Mapping[str, Rows]:
        """The per-sample gradients of the batch by parameter, if there are any."""
        return {} if self.base is None else self.base.rows

    @property
    def shows_rows(self) -> bool:
        """Whether rows were compared, with another record 0, that are not all zero."""
        return bool(self.moved.numel()) and any(
            bool(made.norms().any()) for made in self.rows.values()
        )

    def keep(self, outcome: _T | Refused) -> _T | None:
        """Returns an outcome; notes it and returns None if it is a refusal."""
        if isinstance(outcome, Refused):
            self.refused.append(outcome)
            return None
        return outcome


Check = Callable[[Script, Evidence], Iterator[Finding]]
