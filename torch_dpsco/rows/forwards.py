"""Numbered forwards of an attached model, and what is known about their batches.

State that a loop carries from batch to batch: outputs of an earlier batch among the inputs of a later one.

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

Steps of plain optimizers on attached models, whose gradients are rows, are refused, since they would move nothing.
While a model is attached, torch's public hook on the steps of all optimizers looks at their parameters; it is the only
thing here that is global. Private optimizers, and those that an update rule steps on a private mean, go on.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from torch_dpsco.compat import backward_number, without_subclasses
from torch_dpsco.errors import PrivacyError, SequenceError

ONE_MODULE = (
    "where a loss needs several forwards of one model (real and generated images, views of a"
    " record, pairs), wrap them in one module that makes all of them inside of its forward,"
    " model(real, fake), and attach that"
)
NO_FORWARD = "a backward must follow a forward in training mode: call model.train() before it"

_PARTS = "(also of parts of the model), and take metrics under torch.no_grad()"
_TWICE = (
    "came from the double backward of a gradient (create_graph=True, as in a gradient penalty), of"
    " which no rows are known: leave the penalty out and bound the critic by weight clipping,"
    " p.clamp_(-c, c) after each optimizer.step()"
)
_OUTSIDE = (
    "came from outside of the layer: give a regularizer of the loss to the optimizer instead (reg=,"
    " prox=); where the forward uses the weight directly (layer.weight @ x), move weight and use"
    " into a module of their own, with the weight as its nn.Parameter, and call that module"
)


def batch_sizes(inputs: Any, dim: int) -> frozenset[int] | None:
    """Returns the sizes that a batch may have by the inputs of a model; None if something in them is not understood.

    Args:
        inputs: nested tuples, lists and dicts of tensors and plain values.
        dim: of the batch in each tensor.
    """
    if isinstance(inputs, Tensor):
        return frozenset([inputs.shape[dim]] if inputs.dim() > dim else [])
    if inputs is None or isinstance(inputs, (bool, int, float, str)):
        return frozenset()
    if not isinstance(inputs, (tuple, list, dict)):
        return None
    entries = inputs.values() if isinstance(inputs, dict) else inputs
    parts = [batch_sizes(part, dim) for part in entries]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    lengths = [frozenset([len(inputs)])] if isinstance(inputs, list) else []  # a record per entry
    return frozenset().union(*known, *lengths)


class PassCounter:
    """Numbers the training forwards of an attached model."""

    def __init__(self) -> None:
        self.number = 0
        self.tag: int | None = None  # number of the running pass, None outside of one
        self.used = 0  # number of the newest pass when rows were last used or dropped
        self.paused = False  # whether plain gradients are computed, of public data
        self._sizes: frozenset[int] | None = None
        self._exact = -1  # number of the last backward that was seen to run in full precision
        self._differentiated = (
            False  # whether a backward of the running batch is to be differentiated itself
        )

    def note_exact(self) -> None:
        """Notes that the running backward is in full precision."""
        self._exact = backward_number()

    def note_differentiated(self) -> None:
        """Notes that the running backward makes a graph of its own (create_graph=True)."""
        self._differentiated = True

    def why_not_of_rows(self, layer_is_trained: bool) -> str:
        """Returns why a weight of a factored layer has a gradient that is in no row.

        Args:
            layer_is_trained: whether its layer, and the model, are in training mode.
        """
        if not layer_is_trained:
            return (
                "came from a forward in eval mode, which records no rows: call model.train()"
                f" before it {_PARTS}"
            )
        return _TWICE if self._differentiated else _OUTSIDE

    def is_exact(self) -> bool:
        """Returns whether that was noted of the running backward."""
        return -1 != self._exact == backward_number()

    def open(self, sizes: frozenset[int] | None = None) -> None:
        """Starts the next pass, of a batch of one of these sizes, if they are known."""
        self.number += 1
        self.tag = self.number
        self._sizes = sizes
        self._differentiated = self._differentiated and self.number - 1 > self.used

    def close(self) -> None:
        """Ends the pass."""
        self.tag = self._sizes = None

    def require_one(self, tag: int | None) -> None:
        """Raises SequenceError for rows of a layer that ran outside of a pass, where the batch has had none so far."""
        # PRIVACY: parts are run past the checks of a forward: buffers, records that reach each other, the batch
        # (test_parts_of_a_model_make_no_rows_without_the_model); a reentrant checkpoint runs after the model has
        if tag is None and self.number == self.used:
            raise SequenceError(
                "the attached model itself must be called, in training mode (model.train()), not"
                " its parts: move what combines them into its forward, or attach the module that"
                " you call"
            )

    def require_batch(self, layer: nn.Module, x: Tensor, dim: int) -> None:
        """Raises SequenceError if the input of a layer is sparse, or cannot have the batch in its dimension `dim`."""
        shape = x.shape
        if x.layout is not torch.strided:
            raise SequenceError(
                f"input of {layer} must be dense (got {x.layout}), since rows of sparse ones are"
                " not known: call x.to_dense() before the model, or give indices to an"
                " EmbeddingBag"
            )
        if self._sizes and (len(shape) <= dim or shape[dim] not in self._sizes):
            # PRIVACY: rows would be times or parts of a record, or one row for all of them
            # (test_a_layer_that_sees_no_batch_is_refused); no size in the message, that of the draw is private
            raise SequenceError(
                f"dimension {dim} of the input of {layer} must be the batch, as in the inputs of"
                " the model: expand constants to one per record, leave time out of it, do not cut"
                " the batch up, and say where it is by dp.attach(model, batch_first=...)"
            )


def forget_uses(params: Iterable[nn.Parameter], layers: Iterable[nn.Module]) -> None:
    """Forgets what Opacus' hooks have noted of forwards that no backward followed."""
    for p in params:
        p._forward_counter = 0  # type: ignore[attr-defined]
        p.__dict__.pop("_current_grad_sample", None)
    for layer in layers:
        layer.__dict__.pop("activations", None)
        layer.__dict__.pop("max_batch_len", None)


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
        # the last outputs: forward, size and numbers
        self._kept: list[tuple[Forward, int, Tensor | bytes]] = []

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
        # which needs not wait for a GPU
        numbers = _numbers(t) if t.is_cuda else _bytes(_numbers(t))
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
            raise CarriedStateError(
                _FOUND.format(what="one in the same memory", shape=(*t.shape,))
            )
        alike = [kept for kept in self._kept if kept[1] == t.numel() and self._is_over(kept[0])]
        kept = [numbers for _, _, numbers in alike]
        if kept and t.is_floating_point() and _is_one_of(_numbers(t), kept):
            # PRIVACY: (test_copies_of_state_that_a_loop_carries_are_refused)
            raise CarriedStateError(_FOUND.format(what="a copy of one", shape=(*t.shape,)))

    def _is_released(self, storage: Any) -> bool:
        released = (*self._model.parameters(), *self._model.buffers())
        return any(_storage(t) is storage for t in released)


def _tensors(tree: Any, depth: int = _DEPTH) -> Iterator[Tensor]:
    """Yields the tensors with memory of their own kind in nested containers and plain objects (caches, outputs)."""
    if isinstance(tree, Tensor):
        if _storage(tree) is not None:
            yield tree
    elif depth and not isinstance(tree, (str, type, nn.Module)):
        parts: Any = tree
        if not isinstance(tree, (tuple, list)):
            parts = (
                tree if isinstance(tree, Mapping) else getattr(tree, "__dict__", {})
            ).values()
        for part in parts:
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


_OWNERS, PASSES = "dpsco_optimizers", "dpsco_passes_of_model"  # attributes of parameters


class Owners:
    """The private optimizers of a parameter; none in copies, which have optimizers of their own."""

    def __init__(self) -> None:
        self.alive: weakref.WeakSet[Any] = weakref.WeakSet()

    def __reduce__(self) -> tuple[type[Owners], tuple[()]]:
        return Owners, ()


def note_owner(params: Iterable[nn.Parameter], optimizer: Any) -> None:
    """Notes on parameters that a private optimizer trains them."""
    for p in params:
        p.__dict__.setdefault(_OWNERS, Owners()).alive.add(optimizer)


def owners(params: Iterable[nn.Parameter]) -> list[Any]:
    """Returns the private optimizers that train some of the parameters."""
    found: dict[int, Any] = {}
    for p in params:
        if _OWNERS in p.__dict__:
            found.update((id(owner), owner) for owner in p.__dict__[_OWNERS].alive)
    return list(found.values())


class _Watch:
    """The hook, installed while something is attached."""

    only_looks = True  # private steps need not go through torch's wrapper for it

    def __init__(self) -> None:
        self._attached = 0
        self._handle: Any = None

    def start(self, attachment: Any) -> weakref.finalize[Any, Any]:
        """Watches until the attachment is undone, by calling what is returned, or gone."""
        self._attached += 1
        if self._handle is None:
            self._handle = register_optimizer_step_pre_hook(self)
        stop = weakref.finalize(attachment, self._stop)
        stop.atexit = False
        return stop

    def _stop(self) -> None:
        self._attached -= 1
        if not self._attached:
            self._handle.remove()
            self._handle = None

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for p in _recorded(optimizer):
            mine = owners([p])
            if optimizer in mine or any(owner.in_step for owner in mine):
                return
            raise SequenceError(
                "a plain optimizer must not step on an attached model (got"
                f" {type(optimizer).__name__}): its gradients are recorded row by row, so that"
                " nothing would move. For private records call step() of a private optimizer, that"
                " of dp.make_private or dp.ClippedSGD(model.parameters(), plan); for public data"
                " write `with dp.public(model):` around zero_grad, backward and step; after"
                " private training dp.detach(model)"
            )


def _recorded(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """Yields the parameters of an optimizer whose gradients are rows now."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            passes: PassCounter | None = getattr(p, "__dict__", {}).get(PASSES)
            if passes is not None and not passes.paused:
                yield p


WATCH = _Watch()
