"""The check of an attached model's first step: do records reach each other, in the model or in the loss?

It runs on made-up records of the first batch's shape: no value of a record, of a target or of a weight of the loss has
a say. One record is made 1000 times as small, 10,000 times as large, NaN, and another target, and the median of small
and large records is moved by one; nothing of the other records may change by that. NaN marks whatever it is mixed into.

* The model is called without gradients, and put back as it was; outputs of the other records must stay.
* The loss is what a loop computes from the first training forward's outputs until `backward()`: its tensor operations
  are noted, and repeated on made-up outputs, targets and weights. Gradients of the other outputs must stay.

What it cannot see, it says: numbers that leave torch (`.item()`, numpy), hooks on tensors, functions of your own that
take no subclass or have a backward of their own. It does not see what is done to a batch before the model, statistics
of targets alone, nor what later steps compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_dpsco.compat import tree_flatten, tree_leaves, tree_map, tree_unflatten, without_subclasses
from torch_dpsco.errors import PrivacyError
from torch_dpsco.untouched import RandomStreams, Untouched, seed_torch

__all__ = ["Traced", "check_model", "trace_loss", "untraced"]

_SEED = 5_000_011
_ROWS = 8  # of a made-up batch for the model
_SMALL, _LARGE = 1e-3, 1e4
_CAUGHT = (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AssertionError, AttributeError)
# numbers that leave torch, and what is done to gradients: neither is repeated
_OUT_OF_SIGHT = {"item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__", "data_ptr"}
_OUT_OF_SIGHT |= {"register_hook"}
_MOST_CALLS = 10_000
FOUND = (
    "records must not reach each other before the last sum or mean over the batch ({part}: with {what} as one made-up "
    "record, those of {count} of {others} others changed): clipping one row at a time does not bound one record then; "
    "use functions of one record (loss = dp.per_record(...)), and see dp.doctor"
)


def _variants(rows: int) -> Iterator[tuple[str, list[float], list[float]]]:
    """Yields (what the other record 0 is, scales of the records, scales with the other record)."""
    for scale, what in ((_SMALL, "a small one"), (_LARGE, "a large one"), (math.nan, "NaN"), (-1.0, "another one")):
        yield what, [1.0] * rows, [scale] + [1.0] * (rows - 1)
    low = (rows - 1) // 2 + 1
    mixed = [_SMALL] * low + [_LARGE] * (rows - low)
    yield "a large one in place of the small one in the middle", mixed, [_LARGE, *mixed[1:]]


def _made_up(like: Tensor, rows: int, dim: int, scales: Sequence[float], generator: torch.Generator) -> Tensor:
    shape = list(like.shape)
    shape[dim] = rows
    place = [1] * len(shape)
    place[dim] = rows
    if not like.is_floating_point():
        values = torch.ones(shape, dtype=torch.float64)
        values.select(dim, 0).mul_(float(scales[0] == 1.0 or scales[0] == _SMALL))
        return values.to(like.device, like.dtype)
    values = 0.25 + 0.5 * torch.rand(shape, generator=generator, dtype=torch.float64)
    return (values * torch.tensor(scales, dtype=torch.float64).view(place)).to(like.device, like.dtype)


def _changed(before: Tensor, after: Tensor, dim: int) -> int:
    """Returns how many rows but the first differ, among those that were finite."""
    rows = [t.detach().movedim(dim, 0).reshape(t.shape[dim], -1).double()[1:] for t in (before, after)]
    known = rows[0].isfinite().all(1)
    first, second = rows[0][known], rows[1][known]
    if not first.numel():
        return 0
    norms = first.norm(dim=1)
    gaps = (second - first).norm(dim=1) / norms.clamp_min(float(norms.median()) + 1e-30)
    return int((~(gaps <= 1e-4)).sum())


def check_model(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dim: int) -> str:
    """Returns what was checked, in words; `dim` is the batch's dimension.

    Raises:
        PrivacyError: a made-up record moves the outputs of others.
    """
    leaves, structure = tree_flatten((args, kwargs))
    batch = max((t.shape[dim] for t in leaves if isinstance(t, Tensor) and t.dim() > dim), default=0)
    rows = min(batch, _ROWS)
    if rows < 3:
        return "not checked, with fewer than three records"

    def outputs(scales: Sequence[float]) -> list[Tensor]:
        generator = torch.Generator().manual_seed(_SEED)
        seed_torch(_SEED)
        made = [
            _made_up(t, rows, dim, scales, generator)
            if isinstance(t, Tensor) and t.dim() > dim and t.shape[dim] == batch
            else t
            for t in leaves
        ]
        again, options = tree_unflatten(made, structure)
        found = tree_leaves(model(*again, **options))
        return [t for t in found if isinstance(t, Tensor) and t.dim() > dim and t.shape[dim] == rows]

    state = Untouched(model)
    try:
        with torch.no_grad():
            return _compare("model", rows, outputs, dim)
    finally:
        state.restore()


def _compare(part: str, rows: int, made: Callable[[Sequence[float]], list[Tensor]], dim: int) -> str:
    checked = 0
    for what, scales, others in _variants(rows):
        try:
            pairs = list(zip(made(scales), made(others), strict=True))
        except _CAUGHT:
            continue
        checked += bool(pairs)
        count = max((_changed(before, after, dim) for before, after in pairs), default=0)
        if count:
            # PRIVACY: one record would be in many rows (test_records_that_reach_each_other_are_found_at_the_first_step)
            raise PrivacyError(FOUND.format(part=part, what=what, count=count, others=rows - 1))
    if not checked:
        return "not checked, it takes no made-up records"
    return "checked at the first step on made-up records, some of them far out: none reaches another"


# -- the loss ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Ref:
    place: int
    made_up: bool = False  # a tensor that is not computed from outputs

    def of(self, made: Sequence[Tensor], values: Mapping[int, Tensor]) -> Tensor:
        return made[self.place] if self.made_up else values[self.place]


class Traced(Tensor):
    """An output of the model whose operations are noted until `backward()`."""

    _trace: _Trace
    _place: int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Notes the operation; before `backward()` the check is made."""
        kwargs = kwargs or {}
        trace = next(t._trace for t in tree_leaves((args, kwargs)) if isinstance(t, Traced) and hasattr(t, "_trace"))
        if func is Tensor.backward:
            trace.check(args[0])
        spec = trace.spec(args, kwargs)
        result = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        trace.note(func, spec, result)
        return result


class _Trace:
    """The operations of a loss on the outputs of a forward."""

    def __init__(self, outputs: Sequence[Tensor], checked: dict[str, str]) -> None:
        self.checked, self.done = checked, False
        self.shapes = [torch.empty_like(t, device="meta") for t in outputs]
        self.devices = [t.device for t in outputs]
        self.calls: list[tuple[Any, Any, list[int]]] = []
        self.externals: list[Tensor] = []
        self.places = len(outputs)
        self.lost: set[str] = set()
        self.ends: set[Any] = set()  # nodes of the outputs in the graph of gradients

    def spec(self, args: Any, kwargs: Any) -> Any:
        if self.done:
            return None
        return tree_map(lambda t: self._ref(t) if isinstance(t, Tensor) else t, (args, kwargs))

    def _ref(self, t: Tensor) -> _Ref:
        if isinstance(t, Traced) and hasattr(t, "_place"):
            return _Ref(t._place)
        if isinstance(t, Traced) or (t.requires_grad and not t.is_leaf):
            self.lost.add("an operation of your own")  # an autograd.Function, say, or rows of another forward
        known = [k for k, other in enumerate(self.externals) if other is t]
        if not known:
            self.externals.append(t)
        return _Ref(known[0] if known else len(self.externals) - 1, made_up=True)

    def note(self, func: Any, spec: Any, result: Any) -> None:
        if self.done or len(self.calls) > _MOST_CALLS:
            return
        name = getattr(func, "__name__", "")
        tensors = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        if not tensors and name != "__setitem__":
            self.lost |= {name} & _OUT_OF_SIGHT
            return
        places = []
        for t in tensors:
            if isinstance(t, Traced) and not hasattr(t, "_place"):
                t._trace, t._place = self, self.places
                self.places += 1
            places.append(getattr(t, "_place", -1))
        self.calls.append((func, spec, places))

    def end(self, verdict: str) -> None:
        self.checked["loss"], self.done = verdict, True
        self.calls, self.externals = [], []

    def check(self, loss: Traced) -> None:
        """Repeats the operations on made-up outputs; raises PrivacyError if records reach each other."""
        if self.done:
            return
        rows, streams = self.shapes[0].shape[0], RandomStreams()
        with without_subclasses():
            if _own_backward(loss.grad_fn, self.ends):
                self.lost.add("autograd.Function")
        verdict = "not checked, with fewer than three records"
        try:
            with torch.enable_grad(), without_subclasses():
                if rows >= 3:
                    verdict = _compare("loss", rows, lambda scales: self._gradients(loss._place, scales, rows), 0)
        finally:
            streams.restore()
            if any(not t.dim() or t.shape[0] != rows for t in self.externals):
                verdict += ", tensors without a row for each record taken for constants"
            left = sorted(self.lost)
            self.end(f"{verdict}, but not what was done out of sight ({left})" if left else verdict)

    def _gradients(self, root: int, scales: Sequence[float], rows: int) -> list[Tensor]:
        seed_torch(_SEED)
        generator = torch.Generator().manual_seed(_SEED)
        outputs = [
            _made_up(torch.empty(t.shape, dtype=t.dtype, device=d), rows, 0, scales, generator).requires_grad_(True)
            for t, d in zip(self.shapes, self.devices, strict=True)
        ]
        ones = [1.0] * rows
        kinds = [1.0 if s == 1.0 or s == _SMALL else 0.0 for s in scales]  # targets stay where losses take them
        made = []
        for t in self.externals:
            if t.dim() and t.shape[0] == rows:
                scaled = ones if t.is_floating_point() and kinds[0] else [1.0 - 0.5 * (1 - kinds[0]), *ones[1:]]
                made.append(_made_up(t, rows, 0, scaled if t.is_floating_point() else scales, generator))
            elif t.is_floating_point():
                made.append((0.5 + torch.rand(t.shape, generator=generator, dtype=torch.float64)).to(t.device, t.dtype))
            else:
                made.append(torch.ones_like(t))
        values: dict[int, Any] = dict(enumerate(outputs))
        for func, spec, places in self.calls:
            args, kwargs = tree_map(lambda r: r.of(made, values) if isinstance(r, _Ref) else r, spec)
            results = [t for t in tree_leaves(func(*args, **kwargs)) if isinstance(t, Tensor)]
            values.update({place: t for place, t in zip(places, results, strict=True) if place >= 0})
        found = torch.autograd.grad(values[root].sum(), outputs, allow_unused=True, materialize_grads=True)
        return list(found)


def _own_backward(root: Any, ends: set[Any]) -> bool:
    """Returns whether a backward that torch does not know lies between a loss and the outputs."""
    seen, waiting = set(ends), [root]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return True
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
    return False


def trace_loss(output: Any, checked: dict[str, str]) -> Any:
    """Returns the output of a training forward with its tensors traced, if they have a row for each record.

    Args:
        output: a tensor, or tuples, lists and dicts of such, the batch first.
        checked: takes what was checked, at "loss".
    """
    leaves, structure = tree_flatten(output)
    picked = [k for k, t in enumerate(leaves) if type(t) is Tensor and t.requires_grad and t.dim()]
    if not picked or len({leaves[k].shape[0] for k in picked}) > 1:
        checked["loss"] = "not checked, the model gives no outputs with a row for each record"
        return output
    checked["loss"] = "not checked, its backward was not seen"
    trace = _Trace([leaves[k] for k in picked], checked)
    for place, k in enumerate(picked):
        traced = leaves[k].as_subclass(Traced)
        traced._trace, traced._place = trace, place
        with without_subclasses():
            trace.ends.add(traced.grad_fn)
        leaves[k] = traced
    return tree_unflatten(leaves, structure)


def untraced(output: Any, verdict: str) -> Any:
    """Returns plain tensors for traced ones, whose loss is known: the check is not made."""

    def plain(t: Any) -> Any:
        if not isinstance(t, Traced):
            return t
        if hasattr(t, "_trace"):
            t._trace.end(verdict)
        with without_subclasses():
            return t.as_subclass(Tensor)

    return tree_map(plain, output)
