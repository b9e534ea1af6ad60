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

from torch_dpsco.coupling.rollback import Refused
from torch_dpsco.doctor.script import Finding, Script
from torch_dpsco.rows.blocks import Block, FactoredBlock
from torch_dpsco.rows.supported import switches
from torch_dpsco.sampling import PrivateLoader

HALF = (torch.float16, torch.bfloat16)


class Rows:
    """Per-sample gradients of one parameter, (B, *shape), or (B, out) and (B, in) whose outer products they are.

    Args:
        left: the rows, or their left factors.
        right: their right factors.
    """

    def __init__(self, left: Tensor, right: Tensor | None = None) -> None:
        self.left = left
        self.right = right
        self.dtype = left.dtype

    @classmethod
    def of(cls, block: Block) -> Rows:
        """Returns the rows of the first parameter of a block."""
        if not isinstance(block, FactoredBlock):
            return cls(block.dense()[0].detach())
        # PRIVACY: copies: the next batch may be written over them
        # (test_records_that_meet_in_memory_that_is_used_again_are_found)
        left = block.backprops.detach() * block.scale
        return cls(left, block.acts.detach().to(left.dtype, copy=True) if block.weight else None)

    def __len__(self) -> int:
        return len(self.left)

    def at(self, place: int) -> Rows:
        """Returns one of them."""
        one = slice(place, place + 1)
        return Rows(self.left[one].clone(), None if self.right is None else self.right[one].clone())

    def formed(self) -> Tensor:
        """Returns the rows themselves."""
        return self.left if self.right is None else self.left[:, :, None] * self.right[:, None]

    def norms(self) -> Tensor:
        """Returns their lengths, (B,) float64."""
        return (
            _lengths(self.left)
            if self.right is None
            else _lengths(self.left) * _lengths(self.right)
        )

    def gaps(self, other: Rows) -> Tensor:
        """Returns how far others are from these, (B,) float64; inf or NaN where one is not finite."""
        if self.right is None or other.right is None:
            return _lengths(other.formed().double().sub_(self.formed()))
        # b a' - c d' = (b - c) a' + c (a - d)', whose square has no terms that cancel where the two are close
        b, a, c, d = (t.double() for t in (other.left, other.right, self.left, self.right))
        left = b - c
        right = a - d
        squares = (left.square().sum(1) * a.square().sum(1)).add_(
            c.square().sum(1) * right.square().sum(1)
        )
        return (
            squares.add_(2.0 * (left * c).sum(1) * (a * right).sum(1)).clamp_min_(0.0).sqrt_().cpu()
        )


def _lengths(rows: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(
        rows.double().reshape(len(rows), rows.shape[1:].numel()), dim=1
    )
    return lengths.cpu()


def movement(first: Pass, second: Pass, size: int) -> Tensor:
    """Returns how far each record's rows moved, relative to the largest joint row; (size,) float64."""
    gaps, norms = _apart(first.rows, second.rows, size)
    return gaps / max(float(norms.nan_to_num(0.0, 0.0, 0.0).max()), 1e-30)


def _apart(
    first: Mapping[str, Rows], second: Mapping[str, Rows], size: int
) -> tuple[Tensor, Tensor]:
    """Returns how far the rows of each record are from those in a second pass, and their norms; (size,) float64."""
    gaps, squares = torch.zeros(2, size, dtype=torch.float64)
    for name, rows in first.items():
        if len(rows) == size:
            norms = rows.norms()
            others = second.get(name)
            squares += norms.square()
            if others is not None and len(others) == size:
                # PRIVACY: what was finite and is not any more has moved, however it compares
                # (test_rows_that_are_not_finite_any_more_have_moved)
                gaps += rows.gaps(others).nan_to_num(math.inf).where(norms.isfinite(), 0.0).square()
    return gaps.sqrt(), squares.sqrt()


def joint_norms(rows: Mapping[str, Rows]) -> Tensor:
    """Returns the norms of rows over all parameters, (size,) float64."""
    return torch.stack([made.norms().square() for made in rows.values()]).sum(0).sqrt()


def tolerance(rows: Mapping[str, Rows]) -> float:
    """Returns the relative difference of rows that rounding explains."""
    dtypes = {made.dtype for made in rows.values()}
    if dtypes & set(HALF):
        return 3e-2
    return 1e-5 if torch.float32 in dtypes else 1e-9


def jumps(first: Pass, second: Pass, size: int) -> int:
    """Returns how many rows of records 1, 2, ... differ, or are not finite any more, after another record 0.

    Each is compared with its own length, or the usual one: the rows of outliers are longer than all others.
    """
    gaps, norms = (figures[1:] for figures in _apart(first.rows, second.rows, size))
    known = norms.isfinite()
    if not bool(known.any()):
        return 0
    norms = norms[known]
    return int(
        (
            ~(
                gaps[known]
                <= 10 * tolerance(first.rows) * norms.clamp_min(float(norms.median()) + 1e-30)
            )
        ).sum()
    )


_MOST = 256  # rows of a probed batch: more would make the start of `fit` slow
_SIZES = (15, 16)  # beside 2: where libraries change kernels

Row = Mapping[str, Rows]  # of one record
_Key = tuple[int, str, int, tuple[object, ...]]
_known: WeakKeyDictionary[nn.Module, dict[_Key, Isolation]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Isolation:
    """What moves the bits of a row of a model; None where it could not be seen.

    Args:
        rows: of the batch of fixed size that was looked at.
        size: another number of rows does.
        place: another place in the batch does.
        company: how far other records beside it do, in a batch of the same size, relative; 0.0 for no bit.
    """

    rows: int
    size: bool | None = None
    place: bool | None = None
    company: float | None = None

    def __str__(self) -> str:
        if self.company is None:
            return "it could not be checked on made-up records, since the model is random"
        verdict = "does NOT hold" if self.company else "holds"
        others = [
            text
            for seen, text in ((self.size, "the number of rows"), (self.place, "their place"))
            if seen
        ]
        moved = f"; bits depend on {' and '.join(others)}" if others else ""
        return f"it {verdict} for made-up records in batches of {self.rows} rows{moved}"


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


def look(row: Callable[[list[int], list[int], bool], list[Row]], pool: int, rows: int) -> Isolation:
    """Compares bits of the row of one record.

    Args:
        row: row(records, places, other_randomness) -> the rows at these places of a batch of records of the pool.
        pool: records there are, >= 4; the first is the one that is looked at.
        rows: of the batches.
    """

    def seen(size: int, places: list[int], first: int = 1, other: bool = False) -> list[Row]:
        own = range(first, first + (pool - 1) // 2)
        batch = [0 if k in places else own[k % len(own)] for k in range(size)]
        return row(batch, places, other)

    (pair,), (again,) = seen(2, [0]), seen(2, [0], other=True)
    if _gap(pair, again) != 0.0:  # or NaN
        return Isolation(rows)
    (base,) = seen(rows, [0])
    sizes = [pair, *(made for size in _SIZES if size != rows for made in seen(size, [0]))]
    places = sorted({1, rows // 2, rows - 1} - {0})
    others = 1 + (pool - 1) // 2
    differ = [
        made for made in seen(rows, places, others) if _gap(base, made) != 0.0
    ]  # by place, or by company
    return Isolation(
        rows,
        size=any(_gap(base, made) != 0.0 for made in sizes),
        place=bool(differ) and any(_gap(base, made) != 0.0 for made in seen(rows, places)),
        company=_gap(base, *seen(rows, [0], others)) if differ else 0.0,
    )


def _gap(first: Row, second: Row) -> float:
    (gap,), (norm,) = (figures.tolist() for figures in _apart(first, second, 1))
    return float(gap) / max(float(norm), 1e-30) if math.isfinite(norm) else math.nan


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
        outliers: what record 0 was made, and how many rows of others that moved.
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
    outliers: list[tuple[str, int]] = field(default_factory=list)
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
