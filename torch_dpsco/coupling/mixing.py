"""Do records reach each other? In a function of a batch, and in the operations of a loss.

Values of records play no part: tensors of the shapes and dtypes of a batch are filled with numbers in (0.25, 0.75), or
with ones for integers. One record is then made 1000 times as small, 10,000 times as large, NaN, or another one, and the
median of small and large records is moved by one; what the function gives for the other records must stay.

The operations of a loss are repeated on synthetic outputs, targets and weights, on the CPU, where a wrong index is an
error and not the end of a process. What a loss has from elsewhere is a target or weight of the records if it has one
entry for each, and a constant if not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_dpsco.compat import tree_leaves, tree_map
from torch_dpsco.coupling.rollback import Refused, attempt, seed_torch
from torch_dpsco.errors import PrivacyError

CHECKED = "checked at the first step on made-up records, some of them far out: none reaches another"
SEED = 5_000_011  # of what is random in the functions, the same in each call
_SMALL = 1e-3
_LARGE = 1e4
_HALF = (torch.float16, torch.bfloat16)
_Scales = Mapping[int, Sequence[float]]
_Run = Callable[
    [list[Tensor]], list[Tensor]
]  # synthetic tensors -> what belongs to each record, records first


class Leaf(NamedTuple):
    """What a tensor of a synthetic batch looks like.

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
        batches: synthetic tensors without and with it.
    """

    what: str
    batches: tuple[list[Tensor], list[Tensor]]


class SyntheticBatches:
    """Synthetic batches.

    Args:
        leaves: their tensors.
        rows: records in each.
        fill: of integers, 0 or 1; another record has the other one.
    """

    def __init__(self, leaves: Sequence[Leaf], rows: int, fill: int) -> None:
        self.leaves = leaves
        self.rows = rows
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
                values = (
                    values * factors
                    if leaf.is_number
                    else torch.where(factors == 0.0, 1.0 - values, values)
                )
            made.append(values.to(leaf.device, leaf.dtype))
        return made

    def variants(self) -> Iterator[tuple[str, _Scales, _Scales]]:
        """Yields what the other record is, and the scales of the records without and with it."""
        rest = [1.0] * (self.rows - 1)
        of_records = [
            (k, leaf)
            for k, leaf in enumerate(self.leaves)
            if leaf.dim is not None and not leaf.counts
        ]
        numbers = [k for k, leaf in of_records if leaf.is_number and not leaf.target]
        targets = [k for k, leaf in of_records if leaf.is_number and leaf.target]
        if numbers:
            for scale, what in (
                (_SMALL, "a small one"),
                (_LARGE, "a large one"),
                (math.nan, "NaN"),
                (-1.0, "another"),
            ):
                yield what, {}, {k: [scale, *rest] for k in numbers}
            low = (self.rows - 1) // 2 + 1
            mixed = [_SMALL] * low + [_LARGE] * (self.rows - low)
            what = "a large one in place of the small one in the middle"
            yield what, dict.fromkeys(numbers, mixed), {k: [_LARGE, *mixed[1:]] for k in numbers}
        if targets:
            for scale, what in (
                (0.5, "one with another target"),
                (_LARGE, "one with a large target"),
            ):
                yield what, {}, {k: [scale, *rest] for k in targets}
        for k in (k for k, leaf in of_records if not leaf.is_number):
            yield "one with another integer", {}, {k: [0.0, *rest]}


def _filled(leaf: Leaf, fill: float, generator: torch.Generator) -> Tensor:
    if leaf.counts:
        return torch.arange(float(leaf.shape[0])).view(leaf.shape)
    return (
        0.25 + 0.5 * torch.rand(leaf.shape, generator=generator)
        if leaf.is_number
        else torch.full(leaf.shape, fill)
    )


def rows_first(t: Tensor, dim: int) -> Tensor:
    """Returns the numbers of each record, (rows, numbers)."""
    return t.detach().movedim(dim, 0).reshape(t.shape[dim], -1)


def changed_rows(before: Sequence[Tensor], after: Sequence[Tensor]) -> bool | None:
    """Returns whether anything changed for the records but the first; None if nothing of theirs was finite before."""
    found = None
    for first, second in zip(before, after, strict=True):
        tolerance = 3e-2 if first.dtype in _HALF else 1e-4
        a, b = (
            t[1:].to(torch.complex128 if t.is_complex() else torch.float64) for t in (first, second)
        )
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
        run: of the synthetic tensors; it may do anything to them.
    """

    def made(pool: SyntheticBatches, scales: _Scales) -> list[Tensor] | Refused:
        return attempt("made-up records", lambda: run(pool.batch(scales)))

    for fill in (
        1,
        0,
    ):  # the one may be no class, the other no length, and either may be a mask of everything
        pool = SyntheticBatches(leaves, rows, fill)
        base = made(pool, {})
        again = made(pool, {})
        if isinstance(base, Refused) or isinstance(again, Refused):
            # only the kind: messages may quote shapes, and the size of a batch is private
            refused = next(one for one in (base, again) if isinstance(one, Refused))
            verdict = f"not checked, made-up records raise {type(refused.error).__name__}"
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
        first = made(pool, before) if before else base
        second = made(pool, after)
        if isinstance(first, Refused) or isinstance(second, Refused):
            continue  # it takes no such records
        changed = changed_rows(first, second)
        if changed:
            return Mixed(what, (pool.batch(before), pool.batch(after)))
        seen += changed is not None
    return CHECKED if seen else "not checked, it takes one kind of made-up records only"


MOST_CALLS = 10_000
_MOST_NUMBERS = 2**24
_PICKS = {
    "gather",
    "take_along_dim",
    "index_select",
    "index_add",
    "index_copy",
    "index_fill",
    "scatter",
    "scatter_add",
}
_CPU = torch.device("cpu")
_CONSTANTS = "; what cannot be told to be a record's was taken for a constant"
_INDEX = ", an index of records for their own numbers"
_NOT_FOUND = "an operation that was not found"
_FOUND = (
    "records must not reach each other in the loss before its last sum or mean over the batch (at"
    " {op}: with {what} as one of several made-up records, gradients of the others changed):"
    " clipping one row at a time does not bound one record then; use loss = dp.per_record(...),"
    " which sees one record at a time, or replace statistics of the batch by constants"
    " (docs/mistakes.md, coupled records)"
)


@dataclass(frozen=True)
class Ref:
    """A placeholder for a tensor in the arguments of an operation: an earlier result, or a tensor from elsewhere."""

    place: int
    elsewhere: bool = False


class Call(NamedTuple):
    """An operation of a loss.

    Args:
        func: what was called.
        args: its arguments, with references for tensors.
        kwargs: the same.
        places: of its results.
    """

    func: Any
    args: Any
    kwargs: Any
    places: list[int]

    @property
    def taken(self) -> list[int]:
        """Places of the results that it takes."""
        leaves = tree_leaves((self.args, self.kwargs))
        return [leaf.place for leaf in leaves if isinstance(leaf, Ref) and not leaf.elsewhere]


def name_of(func: Any) -> str:
    """Returns the name of an operation, as in torch."""
    return getattr(func, "__name__", type(func).__name__).strip("_")


class RepeatedLoss:
    """A loss that can be computed again.

    Args:
        outputs: of the model, with the places 0, 1, ...
        elsewhere: tensors that are not computed from them.
        calls: the operations.
        root: place of the loss.
    """

    def __init__(
        self, outputs: Sequence[Leaf], elsewhere: Sequence[Tensor], calls: Sequence[Call], root: int
    ) -> None:
        self._outputs = outputs
        self._elsewhere = elsewhere
        self._calls = calls
        self._root = root
        self._dim = outputs[0].dim or 0
        self._rows = outputs[0].shape[self._dim]

    def verdict(self) -> str:
        """Returns what was checked, in words; raises PrivacyError if records reach each other."""
        picks = self._indices_of_records()
        if any(self._elsewhere[k].numel() != self._rows for k in picks):
            return "not checked, records may be picked by an index"
        # as many classes as records, say: then nothing tells weights of classes from targets of records
        unclear = any(
            n == self._rows
            for leaf in self._outputs
            for d, n in enumerate(leaf.shape)
            if d != leaf.dim
        )
        others = [self._leaf(t, unclear, k in picks) for k, t in enumerate(self._elsewhere)]
        leaves = [*self._outputs, *others]
        if sum(torch.Size(leaf.shape).numel() for leaf in leaves) > _MOST_NUMBERS:
            return "not checked, it is of too many numbers"
        if len(self._calls) >= MOST_CALLS:
            return "not checked, it is of too many operations"
        found = compare(leaves, self._rows, self._gradients)
        if isinstance(found, Mixed):
            # PRIVACY: one record would be in many rows (test_records_that_reach_each_other_are_found_at_the_first_step)
            raise PrivacyError(_FOUND.format(op=self._culprit(found), what=found.what))
        if (
            others and found == CHECKED
        ):  # what can be told depends on the size of the batch, which may be private
            found += _CONSTANTS
        return found + _INDEX if picks and found.startswith(CHECKED) else found

    def _leaf(self, t: Tensor, unclear: bool, counts: bool) -> Leaf:
        dims = [d for d in (self._dim, 0) if d < t.dim() and t.shape[d] == self._rows]
        constant = not dims or unclear or isinstance(t, nn.Parameter)
        return Leaf(
            tuple(t.shape), t.dtype, _CPU, None if constant else dims[0], target=True, counts=counts
        )

    def _indices_of_records(self) -> set[int]:
        """Returns the places of tensors by which records are picked, as in scores[torch.arange(len(scores)), y]."""
        found: set[int] = set()
        for call in self._calls:
            name = name_of(call.func)
            used = [*call.args[1:], *call.kwargs.values()]
            if name in ("getitem", "setitem"):
                parts = used[0] if isinstance(used[0], tuple) else (used[0],)
                used = list(parts[self._dim : self._dim + 1])
            elif name not in _PICKS or not any(
                type(leaf) is int and leaf == self._dim for leaf in used
            ):
                continue
            found |= {leaf.place for leaf in used if isinstance(leaf, Ref) and leaf.elsewhere}
        kinds = {k: self._elsewhere[k].dtype for k in found}
        return {k for k, kind in kinds.items() if not kind.is_floating_point and kind != torch.bool}

    def _repeat(self, made: Sequence[Tensor]) -> dict[int, Any]:
        """Returns all results of the operations, by place."""
        seed_torch(SEED)
        outputs = made[: len(self._outputs)]
        elsewhere = made[len(self._outputs) :]
        # they may be written to
        values: dict[int, Any] = {k: t.requires_grad_(True).clone() for k, t in enumerate(outputs)}
        for call in self._calls:
            args, kwargs = tree_map(
                lambda leaf: _given(leaf, values, elsewhere), (call.args, call.kwargs)
            )
            results = [t for t in tree_leaves(call.func(*args, **kwargs)) if isinstance(t, Tensor)]
            values.update(zip(call.places, results, strict=True))
        return values

    def _gradients(self, made: Sequence[Tensor]) -> list[Tensor]:
        loss = self._repeat(made)[self._root].sum()
        outputs = list(made[: len(self._outputs)])
        found = torch.autograd.grad(loss, outputs, allow_unused=True, materialize_grads=True)
        return [rows_first(t, leaf.dim or 0) for t, leaf in zip(found, self._outputs, strict=True)]

    def _culprit(self, mixed: Mixed) -> str:
        """Returns the name of the operation in which records meet: in its values, or in its gradient."""
        named = attempt("looking for the operation", lambda: self._named(mixed))
        return _NOT_FOUND if isinstance(named, Refused) else named

    def _named(self, mixed: Mixed) -> str:
        first, second = (self._repeat(made) for made in mixed.batches)
        for call in self._calls:
            if any(self._moved(first[place], second[place]) for place in call.places):
                return name_of(call.func)
        kept = [k for k, t in first.items() if t.requires_grad]
        grads = []
        for values in (first, second):
            found = torch.autograd.grad(
                values[self._root].sum(), [values[k] for k in kept], allow_unused=True
            )
            grads.append(dict(zip(kept, found, strict=True)))
        for call in reversed(self._calls):
            if any(self._moved(grads[0].get(k), grads[1].get(k)) for k in call.taken):
                return name_of(call.func)
        return _NOT_FOUND

    def _moved(self, first: Tensor | None, second: Tensor | None) -> bool:
        if (
            first is None
            or second is None
            or first.dim() <= self._dim
            or first.shape[self._dim] != self._rows
        ):
            return False
        return bool(changed_rows([rows_first(first, self._dim)], [rows_first(second, self._dim)]))


def _given(leaf: Any, values: Mapping[int, Any], elsewhere: Sequence[Tensor]) -> Any:
    if isinstance(leaf, torch.Generator):
        return torch.Generator().manual_seed(SEED)  # not the loop's own, which would go on
    if isinstance(leaf, Ref):
        return elsewhere[leaf.place] if leaf.elsewhere else values[leaf.place]
    return leaf
