"""Do records reach each other in a function of a batch? Made-up records are changed one at a time to find out.

No value of a record has a say: tensors of the shapes and dtypes of a batch are filled with numbers in (0.25, 0.75), or
with ones for integers. One record is then made 1000 times as small, 10,000 times as large, NaN, or another one, and the
median of small and large records is moved by one; what the function gives for the other records must stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dpsco.attempt import Refused, attempt

CHECKED = "checked at the first step on made-up records, some of them far out: none reaches another"
SEED = 5_000_011  # of what is random in the functions, the same in each call
_SMALL, _LARGE = 1e-3, 1e4
_HALF = (torch.float16, torch.bfloat16)
_Scales = Mapping[int, Sequence[float]]
_Run = Callable[[list[Tensor]], list[Tensor]]  # made-up tensors -> what belongs to each record, records first


class Leaf(NamedTuple):
    """What a tensor of a made-up batch looks like.

    Args:
        shape: of it.
        dtype: of it.
        device: of it.
        dim: where the records are, None for a constant.
        target: whether it is a number that losses may want in [0, 1].
        counts: whether it holds the numbers 0, 1, ... of the records, and nothing else.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    dim: int | None
    target: bool = False
    counts: bool = False

    @property
    def is_number(self) -> bool:
        """Whether it can be large or small."""
        return self.dtype.is_floating_point or self.dtype.is_complex


@dataclass(frozen=True)
class Mixed:
    """Records that reach each other.

    Args:
        what: the other record.
        batches: made-up tensors without and with it.
    """

    what: str
    batches: tuple[list[Tensor], list[Tensor]]


class MadeUp:
    """Made-up batches.

    Args:
        leaves: their tensors.
        rows: records in each.
        fill: of integers, 0 or 1; another record has the other one.
    """

    def __init__(self, leaves: Sequence[Leaf], rows: int, fill: int) -> None:
        self.leaves, self.rows = leaves, rows
        generator = torch.Generator().manual_seed(SEED)
        self._base = [_filled(leaf, float(fill), generator) for leaf in leaves]

    def batch(self, scales: _Scales) -> list[Tensor]:
        """Returns fresh tensors, some of them with records times numbers: 0 exchanges an integer."""
        made = []
        for k, (leaf, base) in enumerate(zip(self.leaves, self._base, strict=True)):
            values = base.clone()
            if k in scales and leaf.dim is not None:
                place = [self.rows if d == leaf.dim else 1 for d in range(len(leaf.shape))]
                factors = torch.tensor(scales[k]).view(place)
                values = values * factors if leaf.is_number else torch.where(factors == 0.0, 1.0 - values, values)
            made.append(values.to(leaf.device, leaf.dtype))
        return made

    def variants(self) -> Iterator[tuple[str, _Scales, _Scales]]:
        """Yields what the other record is, and the scales of the records without and with it."""
        rest = [1.0] * (self.rows - 1)
        of_records = [(k, leaf) for k, leaf in enumerate(self.leaves) if leaf.dim is not None and not leaf.counts]
        numbers = [k for k, leaf in of_records if leaf.is_number and not leaf.target]
        targets = [k for k, leaf in of_records if leaf.is_number and leaf.target]
        if numbers:
            for scale, what in ((_SMALL, "a small one"), (_LARGE, "a large one"), (math.nan, "NaN"), (-1.0, "another")):
                yield what, {}, {k: [scale, *rest] for k in numbers}
            low = (self.rows - 1) // 2 + 1
            mixed = [_SMALL] * low + [_LARGE] * (self.rows - low)
            what = "a large one in place of the small one in the middle"
            yield what, dict.fromkeys(numbers, mixed), {k: [_LARGE, *mixed[1:]] for k in numbers}
        if targets:
            for scale, what in ((0.5, "one with another target"), (_LARGE, "one with a large target")):
                yield what, {}, {k: [scale, *rest] for k in targets}
        for k in (k for k, leaf in of_records if not leaf.is_number):
            yield "one with another integer", {}, {k: [0.0, *rest]}


def _filled(leaf: Leaf, fill: float, generator: torch.Generator) -> Tensor:
    if leaf.counts:
        return torch.arange(float(leaf.shape[0])).view(leaf.shape)
    return 0.25 + 0.5 * torch.rand(leaf.shape, generator=generator) if leaf.is_number else torch.full(leaf.shape, fill)


def rows_first(t: Tensor, dim: int) -> Tensor:
    """Returns the numbers of each record, (rows, numbers)."""
    return t.detach().movedim(dim, 0).reshape(t.shape[dim], -1)


def changed_rows(before: Sequence[Tensor], after: Sequence[Tensor]) -> bool | None:
    """Returns whether anything changed for the records but the first; None if nothing of theirs was finite before."""
    found = None
    for first, second in zip(before, after, strict=True):
        tolerance = 3e-2 if first.dtype in _HALF else 1e-4
        a, b = (t[1:].to(torch.complex128 if t.is_complex() else torch.float64) for t in (first, second))
        known = a.isfinite().all(1)
        if a.shape != b.shape or not a[known].numel():
            continue
        norms = a[known].norm(dim=1)
        gaps = (b[known] - a[known]).norm(dim=1) / norms.clamp(min=float(norms.median()) + 1e-30)
        found = bool(found) or not bool((gaps <= tolerance).all())
    return found


def compare(leaves: Sequence[Leaf], rows: int, run: _Run) -> Mixed | str:
    """Returns how records reach each other, or in words what was checked; never raises for what `run` does.

    Args:
        leaves: of the batch.
        rows: records of it, >= 2.
        run: of the made-up tensors; it may do anything to them.
    """

    def made(pool: MadeUp, scales: _Scales) -> list[Tensor] | Refused:
        return attempt("made-up records", lambda: run(pool.batch(scales)))

    for fill in (1, 0):  # the one may be no class, the other no length, and either may be a mask of everything
        pool = MadeUp(leaves, rows, fill)
        base, again = made(pool, {}), made(pool, {})
        if isinstance(base, Refused) or isinstance(again, Refused):
            # only the kind: messages may quote shapes, and the size of a batch is private
            verdict = f"not checked, made-up records raise {type(_error(base, again)).__name__}"
            continue
        differs = changed_rows(base, again)
        if differs is not None:
            break
        verdict = "not checked, made-up records give nothing that belongs to one of them"
    else:
        return verdict
    if differs:
        return "not checked, the same made-up records give two answers"
    seen = 0
    for what, before, after in pool.variants():
        first, second = made(pool, before) if before else base, made(pool, after)
        if isinstance(first, Refused) or isinstance(second, Refused):
            continue  # it takes no such records
        changed = changed_rows(first, second)
        if changed:
            return Mixed(what, (pool.batch(before), pool.batch(after)))
        seen += changed is not None
    return CHECKED if seen else "not checked, it takes one kind of made-up records only"


def _error(*made: list[Tensor] | Refused) -> Exception:
    return next(one.error for one in made if isinstance(one, Refused))
