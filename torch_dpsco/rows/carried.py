"""State that a loop carries from batch to batch: outputs of an earlier batch among the inputs of a later one.

    out, state = net(x, state)
    state = state.detach()

Records of one batch would be in the rows of the next one, which no charge covers; `attach` refuses it. A batch ends by
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

from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from torch_dpsco.compat import without_subclasses
from torch_dpsco.errors import PrivacyError

_PLACES = 64  # whose numbers are compared
_DISTINCT = 4
_KEPT = 16  # outputs whose numbers are kept
_DEPTH = 6  # of what is nested in inputs and outputs
_MARK = "dpsco_forward"
_CLOCK = count(1)  # orders forwards and ends of batches
_FOUND = (
    "inputs of a training forward must not be outputs of an earlier batch (got {what}, of shape"
    " {shape}): records of that batch would be in the rows of this one, which its charge does not"
    " cover; begin each batch with a fresh state (None, or a new tensor of zeros), or give whole"
    " sequences to one forward; outputs for public data may be inputs where the forward that gave"
    " them was in eval mode (docs/mistakes.md, stateful model)"
)


class CarriedStateError(PrivacyError):
    """Outputs of an earlier batch are inputs of a training forward."""


class Forward:
    """A forward, as its outputs know it.

    Args:
        owner: the model that ran.
    """

    def __init__(self, owner: CarriedState) -> None:
        self.owner = owner
        self.time = next(_CLOCK)
        self.has_left_rows = False


class CarriedState:
    """What the training forwards of an attached model have given, which those of later batches must not take.

    Args:
        model: it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._ended = 0  # when the last batch did
        self._inputs: list[tuple[Tensor, int]] | None = (
            None  # of the running forward, with their versions
        )
        self._copies: list[tuple[Tensor, int]] = []  # which it runs on
        self._kept: list[
            tuple[Forward, int, Tensor | bytes]
        ] = []  # the last outputs: forward, size and numbers

    def __getstate__(self) -> dict[str, Any]:
        # PRIVACY: a file would hold numbers of records (test_a_file_of_a_model_holds_no_outputs)
        return self.__dict__ | {"_inputs": None, "_copies": [], "_kept": []}

    def end_batch(self) -> None:
        """Notes that all forwards so far are of earlier batches."""
        self._ended = next(_CLOCK)

    def begin(self, inputs: Any, *, leaves_rows: bool) -> None:
        """Begins a forward in training mode.

        Args:
            inputs: nested tensors.
            leaves_rows: whether its backward does.

        Raises:
            CarriedStateError: one of them is an output of an earlier batch.
        """
        self._inputs = None
        self._copies = []
        with without_subclasses():
            found = list(_tensors(inputs))
            for t in found if leaves_rows else ():
                self._require_fresh(t)
            self._inputs = [(t, _version(t)) for t in found]

    def take(self, copies: Any) -> None:
        """Notes copies of the inputs, nested likewise, which the forward runs on."""
        with without_subclasses():
            given = {id(t) for t, _ in self._inputs or ()}
            self._copies = [(t, _version(t)) for t in _tensors(copies) if id(t) not in given]

    def end(self, output: Any, inputs: Any) -> Forward | None:
        """Ends the forward that was begun, if one was.

        Args:
            output: nested tensors.
            inputs: those that it ran on; what was written to them, or put into them, is output too.
        """
        before = self._inputs
        self._inputs = None
        copies = self._copies
        self._copies = []
        if before is None:
            return None
        forward = Forward(self)
        with without_subclasses():
            same = [t for t, version in (*before, *copies) if _version(t) == version]
            # a copy that was written to is the model's own: memory of an output
            known = {id(_storage(t)) for t in (*(t for t, _ in before), *same)}
            fresh = [t for t in _tensors((output, inputs)) if id(_storage(t)) not in known]
            for t in fresh:
                setattr(_storage(t), _MARK, forward)
            for t in (*fresh, *(t for t, version in before if _version(t) != version)):
                self._keep(forward, t, same)
        return forward

    def _keep(self, forward: Forward, t: Tensor, inputs: list[Tensor]) -> None:
        if not t.is_floating_point() or t.numel() < _DISTINCT:
            return
        numbers = (
            _numbers(t) if t.is_cuda else _bytes(_numbers(t))
        )  # which needs not wait for a GPU
        alike = [x for x in inputs if x.numel() == t.numel() and x.is_floating_point()]
        if not any(_bytes(_numbers(x)) == _bytes(numbers) for x in alike):
            self._kept = [*self._kept[1 - _KEPT :], (forward, t.numel(), numbers)]

    def _is_over(self, forward: Forward) -> bool:
        return forward.time < self._ended or (forward.owner is self and forward.has_left_rows)

    def _require_fresh(self, t: Tensor) -> None:
        storage = _storage(t)
        forward = getattr(storage, _MARK, None)
        if forward is not None and self._is_over(forward) and not self._is_released(storage):
            # PRIVACY: (test_state_that_a_loop_carries_is_refused)
            raise CarriedStateError(_FOUND.format(what="one in the same memory", shape=(*t.shape,)))
        kept = [
            numbers
            for forward, size, numbers in self._kept
            if size == t.numel() and self._is_over(forward)
        ]
        if kept and t.is_floating_point() and _is_one_of(_numbers(t), kept):
            # PRIVACY: (test_copies_of_state_that_a_loop_carries_are_refused)
            raise CarriedStateError(_FOUND.format(what="a copy of one", shape=(*t.shape,)))

    def _is_released(self, storage: Any) -> bool:
        return any(
            _storage(t) is storage for t in (*self._model.parameters(), *self._model.buffers())
        )


def _tensors(tree: Any, depth: int = _DEPTH) -> Iterator[Tensor]:
    """Yields the tensors with memory of their own kind in nested containers and plain objects (caches, outputs)."""
    if isinstance(tree, Tensor):
        if _storage(tree) is not None:
            yield tree
    elif depth and not isinstance(tree, (str, type, nn.Module)):
        parts = (
            tree.values() if isinstance(tree, Mapping) else getattr(tree, "__dict__", {}).values()
        )
        for part in tree if isinstance(tree, (tuple, list)) else parts:
            yield from _tensors(part, depth - 1)


def _storage(t: Tensor) -> Any:
    """Returns the storage of a tensor, always the same object as long as there is its memory; None without one."""
    try:
        return t.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse, or inside of torch.func
        return None


def _version(t: Tensor) -> int:
    return 0 if t.is_inference() else t._version


def _numbers(t: Tensor) -> Tensor:
    """Returns numbers of a tensor at places that its size alone decides, as float64."""
    flat = t.detach()
    step = -(-t.numel() // _PLACES) or 1
    if flat.is_contiguous():
        return flat.view(-1)[::step].to(torch.float64, copy=True)
    places = torch.arange(0, t.numel(), step, device=t.device)
    return flat[torch.unravel_index(places, flat.shape)].double()


def _bytes(numbers: Tensor | bytes) -> bytes:
    return numbers if isinstance(numbers, bytes) else bytes(numbers.cpu().numpy().tobytes())


def _is_one_of(numbers: Tensor, kept: list[Tensor | bytes]) -> bool:
    found = _bytes(numbers)
    return found in map(_bytes, kept) and len(set(numbers.tolist())) >= _DISTINCT
