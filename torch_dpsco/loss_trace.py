"""What a loop computes from the outputs of an attached model until `backward()`: noted, and repeated on made-up ones.

Outputs of the first training forward are tensors of a class whose operations are noted. Before `backward()` the
operations are repeated on made-up outputs, targets and weights (on the CPU, where a wrong index is an error and not the
end of a process); gradients of the other outputs must stay. What cannot be seen, is said: numbers that leave torch
(`.item()`, numpy), hooks on tensors, functions that take no subclass or have a backward of their own, statistics of
targets alone. A backward that is no `loss.backward()` is not seen at all; the next step is looked at then.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torch_dpsco.attempt import Refused, attempt
from torch_dpsco.compat import tree_flatten, tree_leaves, tree_map, tree_unflatten, without_subclasses
from torch_dpsco.errors import PrivacyError
from torch_dpsco.mixing import SEED, Leaf, Mixed, changed_rows, compare, rows_first
from torch_dpsco.untouched import RandomStreams, seed_torch

if TYPE_CHECKING:
    from torch_dpsco.first_step import FirstStep

__all__ = ["Traced", "apply_as_one", "plain", "trace_outputs"]

# numbers that leave torch, and what is done to gradients: neither is repeated
_OUT_OF_SIGHT = {"item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__", "data_ptr"}
_OUT_OF_SIGHT |= {"register_hook", "__set__"}
_MOST_CALLS, _MOST_NUMBERS = 10_000, 2**24
_CPU = torch.device("cpu")
_FOUND = (
    "records must not reach each other in the loss before its last sum or mean over the batch (at {op}: with {what} as "
    "one of several made-up records, gradients of the others changed): clipping one row at a time does not bound one "
    "record then; use loss = dp.per_record(...), which sees one record at a time, or replace statistics of the batch "
    "by constants (docs/pitfalls.md, coupled records)"
)


class Traced(Tensor):
    """An output of the model, or what was computed from it, until `backward()`."""

    _trace: _Trace
    _place: int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Notes the operation; before the backward the check is made. Afterwards results are plain tensors."""
        kwargs = kwargs or {}
        trace = _open_trace((args, kwargs))
        if trace is not None and func is trace.last:
            trace.check(tree_leaves(args[0])[0], weighted=kwargs.get("gradient") is not None)
        if trace is None or trace.done:
            with without_subclasses():
                return func(*args, **kwargs)
        spec = trace.spec(args, kwargs)
        result = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        trace.note(func, spec, result)
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)  # files and copies hold no traces

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return str(plain(self).__repr__(tensor_contents=tensor_contents))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(plain(self), memo)


def plain(tree: Any) -> Any:
    """Returns plain tensors for traced ones, in the same graph."""

    def untraced(t: Any) -> Any:
        if not isinstance(t, Traced):
            return t
        with without_subclasses():
            return t.as_subclass(Tensor)

    return tree_map(untraced, tree)


def apply_as_one(function: Callable[..., Tensor], args: tuple[Any, ...], reduction: str, verdict: str = "") -> Tensor:
    """Returns function(*args), which is one operation of a traced loss, so that its backward is repeated too.

    Args:
        function: of plain tensors.
        args: its arguments.
        reduction: how it reduces over the records: "mean", "sum" or "none".
        verdict: what is known of it without a look, if anything is.
    """
    trace = _open_trace(args)
    spec = None if trace is None else trace.spec(args, {})
    result = function(*plain(args))
    if trace is None:
        return result
    inputs = [t for t in tree_leaves(args) if isinstance(t, Traced)]
    result = result.as_subclass(Traced)
    trace.note(function, spec, result)
    trace.as_one[result._place] = reduction, verdict
    with without_subclasses():
        trace.through[result.grad_fn] = [t.grad_fn for t in inputs]
    return result


def _open_trace(tree: Any) -> _Trace | None:
    traces = [t._trace for t in tree_leaves(tree) if isinstance(t, Traced) and hasattr(t, "_trace")]
    return next((trace for trace in traces if not trace.done), None)


@dataclass(frozen=True)
class _Ref:
    place: int
    made_up: bool = False  # a tensor that is not computed from outputs


def _made_up(leaf: Any, externals: Sequence[Tensor], values: Mapping[int, Tensor]) -> Any:
    if isinstance(leaf, torch.Generator):
        return torch.Generator().manual_seed(SEED)  # not the loop's own, which would go on
    if isinstance(leaf, _Ref):
        return externals[leaf.place] if leaf.made_up else values[leaf.place]
    return leaf


class _Trace:
    """The operations of a loss on the outputs of a forward.

    Args:
        step: takes what was checked.
        outputs: of the forward, with a row for each record.
        dims: where their records are.
    """

    def __init__(self, step: FirstStep, outputs: Sequence[Tensor], dims: Sequence[int]) -> None:
        self._step, self._number = step, step.forwards
        self.last = torch.autograd.grad if step.ghost else Tensor.backward
        self._dim, self.rows = dims[0], outputs[0].shape[dims[0]]
        self.outputs = [Leaf(tuple(t.shape), t.dtype, _CPU, d) for t, d in zip(outputs, dims, strict=True)]
        # as many classes as records, say: then nothing tells weights of classes from targets of records
        self.unclear = any(n == self.rows for leaf in self.outputs for d, n in enumerate(leaf.shape) if d != leaf.dim)
        self._device = outputs[0].device.type
        self.calls: list[tuple[Any, Any, list[int]]] = []
        self.as_one: dict[int, tuple[str, str]] = {}  # places of what `apply_as_one` made: reduction and verdict
        self.through: dict[Any, list[Any]] = {}  # their nodes in the graph of gradients, and those of what they took
        self.externals: list[Tensor] = []
        self.places = len(outputs)
        self.lost: set[str] = set()
        self.ends: set[Any] = set()  # nodes of the outputs in the graph of gradients
        self.ended = False

    @property
    def done(self) -> bool:
        """Whether nothing is noted any more: a backward or another forward has followed."""
        return self.ended or self._number != self._step.forwards

    def spec(self, args: Any, kwargs: Any) -> Any:
        """Returns the arguments with references in place of tensors."""
        return tree_map(self._specified, (args, kwargs))

    def _specified(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self._ref(leaf)
        if isinstance(leaf, torch.device) or (isinstance(leaf, str) and leaf.split(":")[0] == self._device):
            return _CPU
        return leaf

    def _ref(self, t: Tensor) -> _Ref:
        if isinstance(t, Traced) and getattr(t, "_trace", None) is self:
            return _Ref(t._place)
        with without_subclasses():
            if isinstance(t, Traced) or (t.requires_grad and not t.is_leaf):
                self.lost.add("an operation of your own")  # an autograd.Function, say, or rows of another forward
        known = [k for k, other in enumerate(self.externals) if other is t]
        if not known:
            self.externals.append(t)
        return _Ref(known[0] if known else len(self.externals) - 1, made_up=True)

    def note(self, func: Any, spec: Any, result: Any) -> None:
        """Notes an operation and its results."""
        name = getattr(func, "__name__", "")
        tensors = [t for t in tree_leaves(result) if isinstance(t, Traced)]  # not `.grad` and its like
        if not tensors and name != "__setitem__":
            self.lost |= {name} & _OUT_OF_SIGHT
            return
        places = []
        for t in tensors:
            if not hasattr(t, "_trace"):
                t._trace, t._place = self, self.places
                self.places += 1
            places.append(t._place)
        if len(self.calls) < _MOST_CALLS:
            self.calls.append((func, spec, places))

    def check(self, loss: Traced, *, weighted: bool) -> None:
        """Repeats the operations on made-up outputs.

        Raises:
            PrivacyError: records reach each other.
            ValueError: the loss reduces in another way than the model was attached for.
        """
        self._require_reduction(loss)
        if self.rows < 2:
            self.ended = True  # a later batch may have more
            return
        with without_subclasses():
            if self._has_own_backward(loss.grad_fn):
                self.lost.add("autograd.Function")
        if weighted:
            self.lost.add("a gradient given to backward()")
        streams = RandomStreams()
        try:
            with torch.enable_grad(), without_subclasses(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the loop itself has warned
                verdict = self._verdict(loss._place)
        finally:
            streams.restore()
        self.ended = True
        left = sorted(self.lost)
        self._step.settle("loss", f"{verdict}, but not what was done out of sight ({left})" if left else verdict)
        self.calls, self.externals, self.ends, self.through = [], [], set(), {}

    def _has_own_backward(self, root: Any) -> bool:
        """Whether a backward that torch does not know, and that is not repeated, lies between loss and outputs."""
        seen, waiting = set(self.ends), [root]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node in self.through:
                waiting += self.through[node]
                continue
            ours = type(node).__name__ == "BackwardHookFunctionBackward" and not self._step.hooked
            if isinstance(node, torch.autograd.function.BackwardCFunction) and not ours:
                return True
            waiting += [following for following, _ in node.next_functions]
        return False

    def _require_reduction(self, loss: Traced) -> None:
        (reduction, _), attached = self.as_one.get(loss._place, ("none", "")), self._step.reduction
        if reduction not in ("none", attached) and not self._step.ghost:
            # PRIVACY: in a mean one record more makes the rows of all others shorter, which only attach(mean) undoes
            # (test_a_loss_by_record_must_reduce_as_the_model_was_attached)
            raise ValueError(
                f"reduction of the loss must be {attached!r}, as the model was attached (got {reduction!r}): give both "
                f"the same, or dp.attach(model, loss_reduction={reduction!r})"
            )

    def _verdict(self, root: int) -> str:
        if known := self._known(root):
            return known
        leaves = [*self.outputs, *map(self._leaf, self.externals)]
        if sum(torch.Size(leaf.shape).numel() for leaf in leaves) > _MOST_NUMBERS:
            return "not checked, it is of too many numbers"
        if len(self.calls) >= _MOST_CALLS:
            return "not checked, it is of too many operations"
        found = compare(leaves, self.rows, lambda made: self._gradients(made, root))
        if isinstance(found, Mixed):
            self._step.verdicts["loss"] = "records REACH each other"
            # PRIVACY: one record would be in many rows (test_records_that_reach_each_other_are_found_at_the_first_step)
            raise PrivacyError(_FOUND.format(op=self._culprit(found, root), what=found.what))
        if self.unclear or any(leaf.dim is None for leaf in leaves):
            found += ", tensors that may be no records' taken for constants"
        return found

    def _known(self, root: int) -> str:
        """Returns what is known of a loss that was made as one of outputs as they came."""
        spec = next((spec for _, spec, places in self.calls if root in places), None)
        places = [ref.place for ref in tree_leaves(spec) if isinstance(ref, _Ref) and not ref.made_up]
        bare = all(place < len(self.outputs) for place in places)
        return self.as_one[root][1] if bare and root in self.as_one else ""

    def _leaf(self, t: Tensor) -> Leaf:
        """Returns what stands for a tensor that the loss has from elsewhere."""
        dims = [d for d in (self._dim, 0) if d < t.dim() and t.shape[d] == self.rows]
        known = dims and not self.unclear and not isinstance(t, nn.Parameter)
        return Leaf(tuple(t.shape), t.dtype, _CPU, dims[0] if known else None, target=True)

    def _repeat(self, made: Sequence[Tensor]) -> dict[int, Any]:
        """Returns all results of the operations, by place."""
        seed_torch(SEED)
        outputs = [t.requires_grad_(True) for t in made[: len(self.outputs)]]
        externals = made[len(self.outputs) :]
        values: dict[int, Any] = dict(enumerate(t.clone() for t in outputs))  # they may be written to
        for func, spec, places in self.calls:
            args, kwargs = tree_map(lambda leaf: _made_up(leaf, externals, values), spec)
            results = [t for t in tree_leaves(func(*args, **kwargs)) if isinstance(t, Tensor)]
            values.update(zip(places, results, strict=True))
        return values

    def _gradients(self, made: Sequence[Tensor], root: int) -> list[Tensor]:
        values = self._repeat(made)
        outputs = list(made[: len(self.outputs)])
        found = torch.autograd.grad(values[root].sum(), outputs, allow_unused=True, materialize_grads=True)
        return [rows_first(t, leaf.dim or 0) for t, leaf in zip(found, self.outputs, strict=True)]

    def _culprit(self, mixed: Mixed, root: int) -> str:
        """Returns the name of the operation in which records meet: of its values, or of its gradient."""

        def name() -> str:
            first, second = (self._repeat(made) for made in mixed.batches)
            for func, _, places in self.calls:
                if any(self._moved(first.get(place), second.get(place)) for place in places):
                    return _name(func)
            kept = [k for k, t in first.items() if t.requires_grad]
            grads = []
            for values in (first, second):
                found = torch.autograd.grad(values[root].sum(), [values[k] for k in kept], allow_unused=True)
                grads.append(dict(zip(kept, found, strict=True)))
            for func, spec, _ in reversed(self.calls):
                places = [ref.place for ref in tree_leaves(spec) if isinstance(ref, _Ref) and not ref.made_up]
                if any(self._moved(grads[0].get(k), grads[1].get(k)) for k in places):
                    return _name(func)
            return "an operation that was not found"

        named = attempt("looking for the operation", name)
        return "an operation that was not found" if isinstance(named, Refused) else named

    def _moved(self, first: Any, second: Any) -> bool:
        if first is None or second is None or first.dim() <= self._dim or first.shape[self._dim] != self.rows:
            return False
        return bool(changed_rows([rows_first(first, self._dim)], [rows_first(second, self._dim)]))


def _name(func: Any) -> str:
    return getattr(func, "__name__", type(func).__name__).strip("_")


def trace_outputs(step: FirstStep, output: Any, dims: Sequence[int | None]) -> Any:
    """Returns the output of a training forward with those of its tensors traced that have a row for each record.

    Args:
        step: takes what was checked.
        output: a tensor, or tuples, lists and dicts of such.
        dims: where the records of each of its leaves are, None for what is no tensor of records.
    """
    leaves, structure = tree_flatten(output)
    picked = {
        k: d
        for k, (t, d) in enumerate(zip(leaves, dims, strict=True))
        if d is not None and type(t) is Tensor and t.requires_grad
    }
    if not picked:
        step.verdicts["loss"] = "not checked, no output of the model is known to have a row for each record"
        return output
    trace = _Trace(step, [leaves[k] for k in picked], list(picked.values()))
    for place, k in enumerate(picked):
        traced = leaves[k].as_subclass(Traced)
        traced._trace, traced._place = trace, place
        with without_subclasses():
            trace.ends |= {leaves[k].grad_fn, traced.grad_fn}
        leaves[k] = traced
    return tree_unflatten(leaves, structure)
