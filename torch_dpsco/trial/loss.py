"""What a loop computes from the outputs of an attached model until `backward()`: recorded, then checked.

Outputs of the first training forward are tensors of a class whose operations are noted. Before `backward()` they are
repeated on synthetic outputs, targets and weights, on the CPU, where a wrong index is an error and not the end of a
process: the gradients must depend on one record each. What a loss has from elsewhere is a target or weight of the
records if it has one entry for each, and a constant if not. What cannot be seen, is
said: numbers that leave torch (`.item()`, numpy), hooks on tensors, functions that take no subclass or have a backward
of their own, statistics of targets alone. A backward that is no `loss.backward()` is not seen at all; the next step is
looked at then.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torch_dpsco.compat import (
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
    without_subclasses,
)
from torch_dpsco.errors import PrivacyError
from torch_dpsco.sampling.loader import is_delivered, memory_of
from torch_dpsco.trial import (
    CHECKED,
    SEED,
    Answer,
    Leaf,
    Mixed,
    RandomStreams,
    both_fills,
    compare,
    rows_first,
    seed_torch,
)

_MOVED = (
    "records must keep their places in dp.same_records (with {what} among made-up records, an"
    " input of the model changed in the rows of others): record i must be row i of each forward;"
    " x.flip(0), x[perm] and statistics of the batch put a record into several rows"
)
BLOCK = "inputs of dp.same_records"
_BEFORE = "; what was made before the block was taken for each record's own, or a constant"
# numbers that leave torch, and what is done to gradients: neither is repeated
_OUT_OF_SIGHT = {
    *("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__"),
    *("data_ptr", "register_hook", "__set__"),
}
_CPU = torch.device("cpu")
_MOST_CALLS = 10_000
_MOST_NUMBERS = 2**24
_PICKS = {
    *("gather", "take_along_dim", "index_select", "index_add", "index_copy", "index_fill"),
    *("scatter", "scatter_add"),
}
_CONSTANTS = "; what cannot be told to be a record's was taken for a constant"
_INDEX = ", an index of records for their own numbers"
_FOUND = (
    "records must not reach each other in the loss before its last sum or mean over the batch"
    " (with {what} as one of several made-up records, gradients of the others changed): clipping"
    " one row at a time does not bound one record then; use loss = dp.per_record(...), which sees"
    " one record at a time, or replace statistics of the batch by constants (docs/mistakes.md,"
    " coupled records)"
)


class Traced(Tensor):
    """An output of the model, or what was computed from it, until `backward()`."""

    _trace: Trace
    _place: int

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Notes the operation; before the backward the check is made. Afterwards results are plain tensors."""
        kwargs = kwargs or {}
        trace = _open_trace((args, kwargs))
        if trace is not None and func is Tensor.backward:
            trace.check(args[0], weighted=kwargs.get("gradient") is not None)
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


def apply_as_one(
    function: Callable[..., Tensor], args: tuple[Any, ...], reduction: str
) -> Tensor:
    """Returns function(*args), which is one operation of a traced loss, so that its backward is repeated too.

    Args:
        function: of plain tensors.
        args: its arguments.
        reduction: how it reduces over the records: "mean", "sum" or "none".
    """
    trace = _open_trace(args)
    spec = None if trace is None else trace.spec(args, {})
    result = function(*plain(args))
    if trace is None:
        return result
    inputs = [t for t in tree_leaves(args) if isinstance(t, Traced)]
    result = result.as_subclass(Traced)
    trace.note(function, spec, result)
    trace.reductions[result._place] = reduction
    with without_subclasses():
        trace.through[result.grad_fn] = [t.grad_fn for t in inputs]
    return result


class Watched(TorchFunctionMode):
    """Notes what is computed in a block of several forwards before outputs of the model are in it.

    Args:
        trace: which notes it.

    Attributes:
        hidden: forwards of attached models that run, in which nothing is noted.
    """

    hidden = 0

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace = trace
        Watched.hidden = 0

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if error[0] is None:
            self._trace.leave()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs an operation; its results are traced."""
        kwargs = kwargs or {}
        trace = self._trace
        if self.hidden or trace.done or _open_trace((args, kwargs)) is not None:
            return func(*args, **kwargs)
        spec = trace.spec(args, kwargs)
        given = {id(t) for t in tree_leaves((args, kwargs))}

        def fresh(t: Any) -> Any:
            known = type(t) is not Tensor or id(t) in given or (t.requires_grad and t.is_leaf)
            return t if known else t.as_subclass(Traced)

        result = tree_map(fresh, func(*args, **kwargs))
        trace.note(func, spec, result)
        return result


def _open_trace(tree: Any) -> Trace | None:
    traces = [
        t._trace for t in tree_leaves(tree) if isinstance(t, Traced) and hasattr(t, "_trace")
    ]
    return next((trace for trace in traces if not trace.done), None)


class Trace:
    """The operations of a loss on the outputs of a forward.

    Args:
        step: the `rows.first_step.FirstStep`, which takes what was checked.
    """

    def __init__(self, step: Any) -> None:
        self._step = step
        self._number = step.forwards
        self._loss = RepeatedLoss()
        self._device = "cpu"
        self.reductions: dict[int, Any] = {}  # of what was computed with one, by place
        # their nodes in the graph of gradients, and those of what they took
        self.through: dict[Any, list[Any]] = {}
        self.ends: set[Any] = set()  # nodes of the outputs in the graph of gradients
        # by id, which stays theirs as long as they are here
        self._elsewhere: dict[int, tuple[int, Tensor]] = {}
        self._places = 0
        self._lost: set[str] = set()
        self._ended = self._checked = False

    def add(self, output: Tensor, dim: int) -> Tensor:
        """Returns an output of the model, whose records are in a dimension, traced."""
        self._device = output.device.type
        loss = self._loss
        loss.outputs[self._places] = Leaf(tuple(output.shape), output.dtype, _CPU, dim)
        loss.dim = dim
        loss.rows = output.shape[dim]
        traced = self._placed(output)
        with without_subclasses():
            self.ends |= {output.grad_fn, traced.grad_fn}
        return traced

    def _placed(self, t: Tensor) -> Traced:
        traced = t if isinstance(t, Traced) else t.as_subclass(Traced)
        traced._trace = self
        traced._place = self._places
        self._places += 1
        return traced

    def takes(self, t: Tensor) -> bool:
        """Returns whether an input of a forward was computed in the block, and notes it to look at its records."""
        if _open_trace(t) is not self:
            return False
        # a copy, which is noted: what is written to it later does not count
        self._loss.inputs.append(t.clone()._place)  # type: ignore[attr-defined]
        return True

    def leave(self) -> None:
        """Ends a block of forwards; raises PrivacyError if records change places in it."""
        loss = self._loss
        if loss.rows >= 2:
            loss.close(-1, [t for _, t in self._elsewhere.values()])
            self._settle(BLOCK, self._repeated(loss.places))
        if self._checked:
            self.end()

    def _settle(self, part: str, verdict: str) -> None:
        left = sorted(self._lost)
        self._step.settle(
            part, f"{verdict}, but not what was done out of sight ({left})" if left else verdict
        )

    def end(self) -> None:
        """Notes nothing any more."""
        self._ended = True
        self._elsewhere = {}
        self.ends = set()
        self.through = {}

    @property
    def done(self) -> bool:
        """Whether nothing is noted any more: a backward or another forward has followed."""
        return self._ended or self._number != self._step.forwards

    def spec(self, args: Any, kwargs: Any) -> Any:
        """Returns the arguments with references in place of tensors."""
        return tree_map(self._specified, (args, kwargs))

    def _specified(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self._ref(leaf)
        if isinstance(leaf, torch.device) or (
            isinstance(leaf, str) and leaf.split(":")[0] == self._device
        ):
            return _CPU
        return leaf

    def _ref(self, t: Tensor) -> Ref:
        if isinstance(t, Traced) and getattr(t, "_trace", None) is self:
            return Ref(t._place)
        with without_subclasses():
            if isinstance(t, Traced) or (t.requires_grad and not t.is_leaf):
                # an autograd.Function, say, or rows of another forward
                self._lost.add("an operation of your own")
        return Ref(
            self._elsewhere.setdefault(id(t), (len(self._elsewhere), t))[0], elsewhere=True
        )

    def note(self, func: Any, spec: Any, result: Any) -> None:
        """Notes an operation and its results."""
        name = getattr(func, "__name__", "")
        # not `.grad` and its like
        tensors = [t for t in tree_leaves(result) if isinstance(t, Traced)]
        if not tensors and name != "__setitem__":
            self._lost |= {name} & _OUT_OF_SIGHT
            return
        places = []
        for t in tensors:
            if not hasattr(t, "_trace"):
                self._placed(t)
            if t._trace is not self:
                self._lost.add("another block")
            places.append(t._place)
        if len(self._loss.calls) < _MOST_CALLS:
            args, kwargs = spec
            self._loss.calls.append(Call(func, args, kwargs, places))
            self.reductions |= dict.fromkeys(places, kwargs.get("reduction"))

    def check(self, loss: Traced, *, weighted: bool) -> None:
        """Repeats the operations on synthetic outputs.

        Args:
            loss: whose backward follows.
            weighted: whether a gradient was given to it.

        Raises:
            PrivacyError: records reach each other.
            ValueError: the loss reduces in another way than the model was attached for.
        """
        self._require_reduction(loss)
        repeated = self._loss
        self._checked = True
        if repeated.rows >= 2:  # else a later batch may have more
            with without_subclasses():
                if self._has_own_backward(loss.grad_fn):
                    self._lost.add("autograd.Function")
            if weighted:
                self._lost.add("a gradient given to backward()")
            repeated.close(loss._place, [t for _, t in self._elsewhere.values()])
            verdict = self._repeated(repeated.verdict)
            if verdict.startswith(CHECKED) and not self._lost:
                self._step.keep(repeated)
            self._settle("loss", verdict)
        if self._step.block is None:
            self.end()

    def _repeated(self, verdict: Callable[[], str]) -> str:
        streams = RandomStreams()
        try:
            with torch.enable_grad(), without_subclasses(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the loop itself has warned
                return verdict()
        except PrivacyError:
            self._step.verdicts["loss"] = "records REACH each other"
            raise
        finally:
            streams.restore()

    def _has_own_backward(self, root: Any) -> bool:
        """Whether a backward that torch does not know, and that is not repeated, lies between loss and outputs."""
        seen = set(self.ends)
        waiting = [root]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node in self.through:
                waiting += self.through[node]
                continue
            ours = (
                type(node).__name__ == "BackwardHookFunctionBackward" and not self._step.hooked
            )
            if isinstance(node, torch.autograd.function.BackwardCFunction) and not ours:
                return True
            waiting += [following for following, _ in node.next_functions]
        return False

    def _require_reduction(self, loss: Traced) -> None:
        reduction = self.reductions.get(loss._place)
        attached = self._step.reduction
        if {reduction, attached} == {"mean", "sum"}:
            # PRIVACY: in a mean one record more makes the rows of all others shorter, which only attach(mean) undoes
            # (test_a_loss_by_record_must_reduce_as_the_model_was_attached)
            raise ValueError(
                f"reduction of the loss must be {attached!r}, as the model was attached (got"
                f" {reduction!r}): give both the same, or dp.attach(model,"
                f" loss_reduction={reduction!r}), which make_private takes too"
            )


def trace_outputs(step: Any, output: Any, dims: Sequence[int | None]) -> Any:
    """Returns the output of a training forward with those of its tensors traced that have a row for each record.

    Args:
        step: takes what was checked.
        output: a tensor, or tuples, lists and dicts of such.
        dims: where the records of each of its leaves are, None for what is no tensor of records.
    """
    leaves, structure = tree_flatten(output)
    picked: dict[int, int] = {}
    for k, (t, d) in enumerate(zip(leaves, dims, strict=True)):
        if d is not None and type(t) is Tensor and t.requires_grad:
            picked[k] = d
    if not picked:
        step.verdicts["loss"] = (
            "not checked, no output of the model is known to have a row for each record"
        )
        return output
    trace = step.block or Trace(step)
    for k, d in picked.items():
        leaves[k] = trace.add(leaves[k], d)
    return tree_unflatten(leaves, structure)


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


class RepeatedLoss:
    """A loss that can be computed again. It holds no data.

    Attributes:
        outputs: of the model, by place.
        calls: the operations.
        inputs: places of what was computed for forwards of a block.
        dim: of the records in them.
        rows: of the batch.
    """

    def __init__(self) -> None:
        self.outputs: dict[int, Leaf] = {}
        self.calls: list[Call] = []
        self.inputs: list[int] = []
        self.dim = self.rows = 0

    def close(self, root: int, elsewhere: Sequence[Tensor]) -> None:
        """Takes the place of the loss, and what tensors that are not computed from outputs look like."""
        self._root = root
        self._outputs = list(self.outputs.values())
        self._picks = self._indices_of_records([t.dtype for t in elsewhere])
        # of the outputs, beside their number of records
        self._sizes = {
            n for leaf in self._outputs for d, n in enumerate(leaf.shape) if d != leaf.dim
        }
        self.leaves = [self._leaf(t, k in self._picks) for k, t in enumerate(elsewhere)]
        self.memory = [memory_of([t]) for t in elsewhere]  # where it was

    def made_before(
        self, delivered: frozenset[tuple[int, int]]
    ) -> list[tuple[int, torch.dtype]]:
        """Returns numbers by record, and types, of the tensors from elsewhere that are in no memory of the batch.

        Args:
            delivered: where the memory of the batch was.
        """
        found = []
        for leaf, memory in zip(self.leaves_of_any_size, self.memory, strict=True):
            if leaf.dim is not None and leaf.dtype.is_floating_point and not memory <= delivered:
                rows = leaf.shape[leaf.dim] // leaf.places
                found.append((torch.Size(leaf.shape).numel() // rows, leaf.dtype))
        return found

    def names_rows(self) -> bool:
        """Returns whether a number among the arguments is that of the rows, or 1 over it."""
        leaves = [v for call in self.calls for v in tree_leaves((call.args, call.kwargs))]
        numbers = [v for v in leaves if type(v) in (int, float)]
        return any(v in (self.rows, 1.0 / self.rows) for v in numbers)

    def of(self, outputs: Sequence[Tensor], elsewhere: Sequence[Tensor]) -> Tensor:
        """Returns the loss of outputs of the model, with made-up tensors in place of those that came from elsewhere."""
        values = dict(zip(self.outputs, outputs, strict=True))
        total: Tensor = self._repeat(values, elsewhere)[self._root].sum()
        return total

    def verdict(self) -> str:
        """Returns what was checked, in words; raises PrivacyError if records reach each other."""
        if any(torch.Size(self.leaves[k].shape).numel() != self.rows for k in self._picks):
            return "not checked, records may be picked by an index"
        leaves = [*self._outputs, *self.leaves]
        if sum(torch.Size(leaf.shape).numel() for leaf in leaves) > _MOST_NUMBERS:
            return "not checked, it is of too many numbers"
        if len(self.calls) >= _MOST_CALLS:
            return "not checked, it is of too many operations"
        found = compare(self._gradients, both_fills(leaves, self.rows))
        if isinstance(found, Mixed):
            # PRIVACY: one record would be in many rows (test_records_that_reach_each_other_are_found_at_the_first_step)
            raise PrivacyError(_FOUND.format(what=found.what))
        if self.leaves and found == CHECKED:
            # what can be told depends on the size of the batch, which may be private
            found += _CONSTANTS
        return found + _INDEX if self._picks and found.startswith(CHECKED) else found

    def places(self) -> str:
        """Returns what was checked of inputs that a block computed; raises PrivacyError if records change places."""

        def inputs(made: Sequence[Tensor]) -> list[Answer]:
            outputs = dict(zip(self.outputs, made, strict=False))
            values = self._repeat(outputs, made[len(outputs) :])
            found = [values[k] for k in self.inputs]
            return [
                # others are in every row
                rows_first(
                    t if t.shape[:1] == (self.rows,) else t.expand(self.rows, *t.shape), 0
                )
                for t in found
            ]

        if self._picks:
            # PRIVACY: it is not repeated (test_an_index_from_before_the_block_is_refused)
            raise PrivacyError(_MOVED.format(what="an index from before the block"))
        if not self.inputs:
            return "they are the loader's own tensors"
        found = compare(inputs, both_fills([*self._outputs, *self.leaves], self.rows))
        if isinstance(found, Mixed):
            # PRIVACY: one record would be in two rows (test_records_that_change_places_are_refused)
            raise PrivacyError(_MOVED.format(what=found.what))
        return found + _BEFORE

    def _leaf(self, t: Tensor, counts: bool) -> Leaf:
        dims = [d for d in (self.dim, 0) if d < t.dim() and t.shape[d] == self.rows]
        # as many classes as records, say: then nothing tells weights of classes from targets of records
        constant = self.rows in self._sizes or isinstance(t, nn.Parameter)
        constant = not dims or (constant and not is_delivered(t))
        return Leaf(
            tuple(t.shape),
            t.dtype,
            _CPU,
            None if constant else dims[0],
            target=True,
            counts=counts,
        )

    @property
    def leaves_of_any_size(self) -> list[Leaf]:
        """What tensors from elsewhere look like in batches of other sizes: words of texts may be flattened.

        A guess that is wrong ends in answers that depend on the size.
        """
        found = []
        for leaf in self.leaves:
            length = leaf.shape[0] if leaf.dim is None and leaf.shape else 1
            if length not in self._sizes and not length % self.rows:
                leaf = leaf._replace(dim=0, places=length // self.rows)
            found.append(leaf)
        return found

    def _indices_of_records(self, kinds: Sequence[torch.dtype]) -> set[int]:
        """Returns the places of tensors by which records are picked, as in scores[torch.arange(len(scores)), y].

        Args:
            kinds: types of the tensors from elsewhere.
        """
        found: set[int] = set()
        for call in self.calls:
            name = getattr(call.func, "__name__", "").strip("_")
            used = [*call.args[1:], *call.kwargs.values()]
            if name in ("getitem", "setitem"):
                parts = used[0] if isinstance(used[0], tuple) else (used[0],)
                used = list(parts[self.dim : self.dim + 1])
            elif name not in _PICKS or not any(
                type(leaf) is int and leaf == self.dim for leaf in used
            ):
                continue
            found |= {leaf.place for leaf in used if isinstance(leaf, Ref) and leaf.elsewhere}
        return {k for k in found if not kinds[k].is_floating_point and kinds[k] != torch.bool}

    def _repeat(self, values: dict[int, Any], elsewhere: Sequence[Tensor]) -> dict[int, Any]:
        """Returns all results of the operations, by place, after those of the outputs."""
        seed_torch(SEED)
        for call in self.calls:
            args, kwargs = tree_map(
                lambda leaf: _given(leaf, values, elsewhere), (call.args, call.kwargs)
            )
            results = [
                t for t in tree_leaves(call.func(*args, **kwargs)) if isinstance(t, Tensor)
            ]
            values.update(zip(call.places, results, strict=True))
        return values

    def _gradients(self, made: Sequence[Tensor]) -> list[Answer]:
        outputs = list(made[: len(self._outputs)])
        # copies: they may be written to
        copies = [t.requires_grad_(True).clone() for t in outputs]
        loss = self.of(copies, made[len(self._outputs) :])
        found = torch.autograd.grad(loss, outputs, allow_unused=True, materialize_grads=True)
        return [
            rows_first(t, leaf.dim or 0) for t, leaf in zip(found, self._outputs, strict=True)
        ]


def _given(leaf: Any, values: Mapping[int, Any], elsewhere: Sequence[Tensor]) -> Any:
    if isinstance(leaf, torch.Generator):
        return torch.Generator().manual_seed(SEED)  # not the loop's own, which would go on
    if isinstance(leaf, Ref):
        return elsewhere[leaf.place] if leaf.elsewhere else values[leaf.place]
    return leaf
