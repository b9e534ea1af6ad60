"""What training forwards of an attached model have given, which those of later batches must not take.

    out, state = net(x, state)
    state = state.detach()

Records of one batch would be in the rows of the next one, which no charge covers. A batch ends by
a step, `accumulate()` or `discard()`, and by the delivery of the next one. An input of a training forward must not be

* in the memory of an output of an earlier batch, or of a forward of this one whose backward has left its rows. A mark
  on the storage tells, which lives as long as that memory and says nothing about a tensor that gets the same place
  later. The program alone decides this, no value of a record does;
* a copy of one in other memory. Numbers at 64 places are kept of the last few outputs. Floating-point numbers do not
  agree in all of them by chance, so that this too tells about the program. Where fewer than `_DISTINCT` of them differ
  (zeros, masks, classes) they may agree by chance, and a run must not end by that: these are not compared.

Inputs that a forward returns as they came are not its outputs. Parameters and buffers are released, and may be given to
any forward. Forwards in evaluation mode leave no marks: what they give for public data may be the input of all batches.
What is not seen (numbers that were changed, or went through numpy or Python) is in docs/before_you_start.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from torch_dpsco.compat import tree_map, without_subclasses
from torch_dpsco.errors import PrivacyError

_PLACES = 64  # whose numbers are compared
_DISTINCT = 4
_KEPT = 16  # outputs whose numbers are kept
_DEPTH = 6  # of plain objects in inputs and outputs; containers are followed to their end
_MARK = "dpsco_forward"
CLOCK = count(1)  # orders forwards and ends of batches
_FOUND = (
    "inputs of a training forward must not be outputs of an earlier batch (got {what}, of shape"
    " {shape}): records of that batch would be in the rows of this one, which its charge does not"
    " cover; begin each batch with a fresh state (None, or a new tensor of zeros), or give whole"
    " sequences to one forward; outputs for public data may be inputs where the forward that gave"
    " them was in eval mode (docs/mistakes.md, stateful model)"
)


class CarriedStateError(PrivacyError):
    """Outputs of an earlier batch are inputs of a training forward."""


@dataclass(eq=False)
class Forward:
    """A forward, as its outputs know it: the state of the model that ran, when, and whether its backward left rows."""

    owner: CarriedState
    time: int
    has_left_rows: bool = False


class CarriedState:
    """What the training forwards of an attached model have given, which those of later batches must not take.

    Args:
        model: it.

    Attributes:
        ended: when the last batch did: all forwards before are of earlier ones.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.ended = 0
        # of the running forward, with memory and versions, and the copies which it runs on
        self._inputs: list[Held] | None = None
        self._copies: list[Held] = []
        # the last outputs: forward, size and numbers
        self._kept: list[tuple[Forward, int, Tensor]] = []

    def __getstate__(self) -> dict[str, Any]:
        # PRIVACY: a file would hold numbers of records (test_a_file_of_a_model_holds_no_outputs)
        return self.__dict__ | {"_inputs": None, "_copies": [], "_kept": []}

    def begin(
        self, args: Any, kwargs: dict[str, Any], *, leaves_rows: bool
    ) -> tuple[list[Held], Any, dict[str, Any]]:
        """Begins a forward in training mode.

        Args:
            args: inputs, nested tensors.
            kwargs: and those by name.
            leaves_rows: whether its backward does.

        Returns:
            The inputs, each with its memory and its version; and what the forward runs on, copies if it leaves rows.

        Raises:
            CarriedStateError: one of them is an output of an earlier batch.
        """
        self._inputs = None
        self._copies = []
        with without_subclasses():
            found = _tensors((args, kwargs))
            sizes = {size for _, size, _ in self._kept}
            for t, storage, _ in found if leaves_rows else ():
                if hasattr(storage, _MARK) or t.numel() in sizes:
                    self._require_fresh(t, storage)
        if leaves_rows:
            # PRIVACY: rows are made of inputs until the step, when their memory may have the next batch
            # (test_a_batch_is_used_as_it_was_at_the_forward)
            if not kwargs and all(type(x) is Tensor for x in args):
                args = tuple(x.clone() if x.grad_fn is None else x for x in args)
            else:
                args, kwargs = tree_map(_copied, (args, kwargs))
            given = {id(t) for t, _, _ in found}
            with without_subclasses():
                copies = _tensors((args, kwargs))
            self._copies = [held for held in copies if id(held[0]) not in given]
        self._inputs = found
        return found, args, kwargs

    def end(self, output: Any, inputs: Any) -> Forward | None:
        """Ends the forward that was begun, if one was.

        Args:
            output: nested tensors.
            inputs: those that it ran on, and those by name; what was written to them, or put into them, is output too.
        """
        before = self._inputs
        copies = self._copies
        self._inputs = None
        self._copies = []
        if before is None:
            return None
        forward = Forward(self, next(CLOCK))
        with without_subclasses():
            given = (*before, *copies)
            moved = {id(t) for t, _, k in given if not t.is_inference() and t._version != k}
            same = [held for held in given if id(held[0]) not in moved]
            # a copy that was written to is the model's own: memory of an output
            known = {id(storage) for _, storage, _ in (*before, *same)}
            args, kwargs = inputs
            if not kwargs and [id(x) for x in args] == [id(t) for t, _, _ in copies]:
                inputs = None  # tensors alone, into which nothing can be put
            fresh = [held for held in _tensors((output, inputs)) if id(held[1]) not in known]
            for _, storage, _ in fresh:
                setattr(storage, _MARK, forward)
            written = [held for held in before if id(held[0]) in moved]
            for t, _, _ in fresh + written:
                if not t.is_floating_point() or t.numel() < _DISTINCT:
                    continue
                numbers = _numbers(t)
                alike = [
                    x for x, _, _ in same if x.numel() == t.numel() and x.is_floating_point()
                ]
                if not any(_agree(_numbers(x), numbers) for x in alike):
                    self._kept = [*self._kept[1 - _KEPT :], (forward, t.numel(), numbers)]
        return forward

    def _is_over(self, forward: Forward) -> bool:
        return forward.time < self.ended or (forward.owner is self and forward.has_left_rows)

    def _require_fresh(self, t: Tensor, storage: Any) -> None:
        forward = getattr(storage, _MARK, None)
        if forward is not None and self._is_over(forward) and not self._is_released(storage):
            # PRIVACY: (test_state_that_a_loop_carries_is_refused)
            raise CarriedStateError(
                _FOUND.format(what="one in the same memory", shape=(*t.shape,))
            )
        if not t.is_floating_point() or t.numel() not in {size for _, size, _ in self._kept}:
            return
        found = _numbers(t)
        kept = [n for f, size, n in self._kept if size == t.numel() and self._is_over(f)]
        if any(_agree(n, found) for n in kept) and len(found.unique()) >= _DISTINCT:
            # PRIVACY: (test_copies_of_state_that_a_loop_carries_are_refused)
            raise CarriedStateError(_FOUND.format(what="a copy of one", shape=(*t.shape,)))

    def _is_released(self, storage: Any) -> bool:
        released = (*self._model.parameters(), *self._model.buffers())
        return any(found is storage for _, found, _ in _tensors(released))


def _copied(leaf: Any) -> Any:
    """Returns an input in memory of its own; what another computation has made is nobody's buffer."""
    return leaf.clone() if isinstance(leaf, Tensor) and leaf.grad_fn is None else leaf


Held = tuple[Tensor, Any, int]  # a tensor, its memory and its version


def _tensors(tree: Any) -> list[Held]:
    """Returns the tensors with memory of their own kind in nested containers and plain objects (caches, outputs)."""
    found: list[Held] = []
    seen: set[int] = set()  # containers may hold themselves
    depth = 0
    level: Sequence[Any] = (tree,)
    while level:
        below: list[Any] = []
        for part in level:
            if isinstance(part, Tensor):
                try:  # always the same object as long as there is its memory
                    storage = part.untyped_storage()
                except (NotImplementedError, RuntimeError):  # sparse, or inside of torch.func
                    continue
                found.append((part, storage, 0 if part.is_inference() else part._version))
            elif isinstance(part, (tuple, list, Mapping)) and id(part) not in seen:
                seen.add(id(part))
                below += part.values() if isinstance(part, Mapping) else part
            elif depth <= _DEPTH and not isinstance(part, (str, type, nn.Module)):
                below += getattr(part, "__dict__", {}).values()
        depth += 1
        level = below
    return found


def _numbers(t: Tensor) -> Tensor:
    """Returns numbers of a tensor at places that its size alone decides: the bits of float64 ones."""
    flat = t.detach()
    step = -(-t.numel() // _PLACES) or 1
    if flat.is_contiguous():
        places = flat.as_strided((-(-t.numel() // step),), (step,), flat.storage_offset())
        numbers = places.to(torch.float64, copy=True)
    else:
        places = torch.arange(0, t.numel(), step, device=t.device)
        numbers = flat[torch.unravel_index(places, flat.shape)].double()
    return numbers.view(torch.int64)


def _agree(first: Tensor, second: Tensor) -> bool:
    return torch.equal(first.cpu(), second.cpu())
