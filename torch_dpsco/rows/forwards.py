"""Forwards of an attached model: numbered, looked at before and after, and their batches told apart.

What `attach` adds to a model is an `Attachment`. Its hooks number the training forwards, whose rows belong together,
and refuse backwards that are out of order, forwards that change buffers, and state that a loop carries from batch to
batch (`rows.carried`).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torch_dpsco.acts import act
from torch_dpsco.compat import (
    ConvNd,
    backward_number,
    is_replicated,
    is_sharded,
    tree_leaves,
)
from torch_dpsco.errors import DpscoError, PrivacyError, SequenceError
from torch_dpsco.native import inexact_mean
from torch_dpsco.rows.batch import (
    WATCH,
    batch_sizes,
    clear_rows,
    forget_wrappers,
    has_rows,
    require_unwrapped,
    retire_forwards,
)
from torch_dpsco.rows.carried import CarriedState, Forward, Held
from torch_dpsco.rows.first_step import COMPILED, FirstStep
from torch_dpsco.rows.layers.recorded import require_whole
from torch_dpsco.rows.means import NO_MEAN, Source, averaged
from torch_dpsco.sampling.loader import (
    ROWS,
    Sizes,
    is_compiled,
    is_delivered,
    torch_settings,
)
from torch_dpsco.trial import fingerprint
from torch_dpsco.trial.loss import Watched, plain
from torch_dpsco.trial.sizes import AUTOCAST, secret_state

_OTHER_INPUTS = (
    "inputs of the model must be the tensors of the loader, unchanged, as in the first step: where"
    " they are public or generated data, write `with dp.public(model):` around forward, backward"
    " and step; else do what the loop does to them in the model, or in the data set, or give"
    " isolation='slots' to optimizer.loader(...)"
)
_OTHER_KERNELS = (
    "model and torch must stay as they were in the first step, in a loop over batches of several sizes (threads,"
    " torch.compile and precision of products decide which kernels run): set them before the loop, or"
    " give isolation='slots' to optimizer.loader(...)"
)
ONE_MODULE = (
    "where a loss needs several forwards of one model (real and generated images, views of a"
    " record, pairs), make them in `with dp.same_records(model):`, or wrap them in one module that"
    " makes all of them inside of its forward, model(real, fake), and attach that"
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


class PassCounter:
    """Numbers the training forwards of an attached model.

    Args:
        mean: whether the loss is a mean over the batch, so that per-sample gradients are B times as large.

    Attributes:
        number: of the newest pass.
        tag: number of the running pass, None outside of one.
        used: number of the newest pass when rows were last used or dropped.
        paused: whether plain gradients are computed, of public data.
        exact: number of the last backward that was seen to run in full precision.
        differentiated: whether a backward of the running batch is to be differentiated itself (create_graph=True).
        sizes: that the batch of the running pass may have, if they are known.
        untested: in what way the newest forward is run as none was tested.
        exact_means: whether a mean over the batch is divided by a power of 2, see `rows.means`.
        averaged: number of the last backward that such a mean was in.
        secret_masks: whether forwards draw from a secret state of torch's generator, see `trial.sizes`.
        random_state: of that generator before the running forward.
        shared: number of the pass of all forwards in a block of `same_records`; 0 before the first, -1 after the batch,
            None outside.
    """

    def __init__(self, mean: bool = False) -> None:
        self.mean = mean
        self.number = 0
        self.tag: int | None = None
        self.used = 0
        self.paused = False
        self.exact = -1
        self.differentiated = False
        self.sizes: frozenset[int] | None = None
        self.untested = ""
        self.exact_means = False
        self.averaged = -1
        self.secret_masks = False
        self.random_state: Tensor | None = None
        self.shared: int | None = None
        self._shared_sizes: frozenset[int] | None = None

    def begin(self, sizes: frozenset[int] | None) -> None:
        """Numbers a forward; those of a block have one number, so that their rows are summed by record.

        Args:
            sizes: that its batch may have.
        """
        if not self.shared:
            self.number += 1
            if self.shared == 0:
                self.shared = self.number
                self._shared_sizes = sizes
        elif self.shared < 0:
            # PRIVACY: rows of two batches would be added (test_a_block_is_of_one_batch)
            raise SequenceError(
                "a block of dp.same_records must be of one batch, and end before its step: enter"
                " it anew for each batch that the loader delivers"
            )
        elif not sizes or sizes != self._shared_sizes:
            # PRIVACY: row i would be of another record (test_forwards_of_other_sizes_are_refused,
            # test_forwards_of_sizes_that_are_not_known_are_refused)
            raise SequenceError(
                "all forwards in dp.same_records must have one row for each record of the batch"
                " (got another number): make as many generated records as there are real ones"
            )
        self.tag = self.number
        self.sizes = sizes

    def require_called(self) -> None:
        """Raises SequenceError for rows of a layer that ran outside of a pass, where the batch has had none so far."""
        # PRIVACY: parts are run past the checks of a forward: buffers, records that reach each other, the batch
        # (test_parts_of_a_model_make_no_rows_without_the_model); a reentrant checkpoint runs after the model has
        if self.number == self.used:
            raise SequenceError(
                "the attached model itself must be called, in training mode (model.train()), not"
                " its parts: move what combines them into its forward, or attach the module that"
                " you call"
            )

    def spread(self, ids: Tensor) -> Tensor:
        """Returns positions (1, T), those of all records, once for each of them; other ids as they are."""
        if self.sizes is None or len(self.sizes) != 1 or ids.dim() != 2 or len(ids) != 1:
            return ids
        run = torch.arange(ids.shape[1], dtype=ids.dtype, device=ids.device)
        # PRIVACY: ids of several records in one row would move the row of one alone
        # (test_items_of_all_records_in_one_row_are_refused)
        return ids.expand(min(self.sizes), -1) if torch.equal(ids[0] - ids[0, :1], run) else ids

    def require_batch(self, layer: nn.Module, x: Tensor, dim: int) -> None:
        """Raises SequenceError if the input of a layer is sparse, or cannot have the batch in its dimension `dim`."""
        shape = x.shape
        if x.layout is not torch.strided:
            raise SequenceError(
                f"input of {layer} must be dense (got {x.layout}), since rows of sparse ones are"
                " not known: call x.to_dense() before the model, or give indices to an"
                " EmbeddingBag"
            )
        if self.sizes and (len(shape) <= dim or shape[dim] not in self.sizes):
            # PRIVACY: rows would be times or parts of a record, or one row for all of them
            # (test_a_layer_that_sees_no_batch_is_refused); no size in the message, that of the draw is private
            raise SequenceError(
                f"dimension {dim} of the input of {layer} must be the batch, as in the inputs of"
                " the model: expand constants to one per record (or freeze the layer), leave time out of"
                " it, do not cut the batch up, and say where it is by dp.attach(model, batch_first=...)"
            )


class Attachment:
    """What `attach` added to a model, for the hooks to use and `detach` to undo.

    Args:
        model: it.
        factored: layers that record their own rows.
        hooks: those of Opacus on the other trained layers, None where there are none.
        passes: counter of the forwards, which the layers know.
        asked: whether the first step is checked.
        batch_dim: where the batch is in the inputs.
    """

    cut: tuple[Tensor, ...] = ()  # weights that `integrations.fsdp` has cut, whole and in parts
    watched: tuple[str, ...] = ("_buffers", "_parameters")  # what else a forward must not change

    def __init__(
        self,
        model: nn.Module,
        factored: Sequence[nn.Module],
        hooks: Any,
        passes: PassCounter,
        asked: bool,
        batch_dim: int,
    ) -> None:
        self.mean = passes.mean
        self.passes = passes
        self.batch_dim = batch_dim
        self.asked = asked
        self.isolation: Any = None  # of the loader, see `sampling.loader.Isolation`
        self.filled: int | None = None  # rows of the batch, if some of them may be filling
        recorded = [p for layer in factored for p in layer.parameters() if p.requires_grad]
        done = {id(p) for p in recorded}
        self.dense = [p for p in model.parameters() if p.requires_grad and id(p) not in done]
        self.params = recorded + self.dense
        self.layers = list(model.modules())
        self.children = [child for m in self.layers for child in m._modules.values()]
        # whose products have switches of their own, see `native.inexact_mean`
        self.switched = [m for m in self.layers if isinstance(m, (*ConvNd, nn.RNNBase))]
        self.hooks = hooks
        self.handles: list[Any] = [
            model.register_forward_pre_hook(_before_forward, with_kwargs=True),
            model.register_forward_hook(_after_forward, with_kwargs=True, always_call=True),
        ]
        self.buffers: list[tuple[int, int]] = []
        self.values: list[tuple[str, str]] | None = None  # during the first forward
        self.compared = False
        self.looks = True  # whether the check of the first step may still look
        self.through_training = True  # whether the last backward came through a training forward
        forget_wrappers(self.params)
        self.hook_parameters()

    @cached_property
    def carried(self) -> CarriedState:
        """What a loop may carry from batch to batch."""
        return CarriedState(self.layers[0])

    @cached_property
    def first(self) -> FirstStep:
        """What is known about records that reach each other."""
        return FirstStep(self.asked, "mean" if self.mean else "sum", self.batch_dim)

    def hook_parameters(self) -> None:
        """Puts the hooks on the parameters; a deepcopy of a model keeps its modules' hooks but not these."""
        self.hooked = True
        WATCH.start(self)
        for p in self.params:
            p.dpsco = self  # type: ignore[attr-defined]
            # torch registers on no other tensor; a copy of a model may have frozen parameters
            required = p.requires_grad
            drop = _Drop(self)
            self.handles.append(p.requires_grad_(True).register_post_accumulate_grad_hook(drop))
            p.requires_grad_(required)
        for p in self.dense:
            p.grad_sample, p._forward_counter, p.dpsco_passes = None, 0, []  # type: ignore[attr-defined]

    def begin(self) -> None:
        """Makes stacks, and takes values to compare, in the first forward."""
        act("rows.stacks")(self.layers)
        self.values = _values(self)
        self.compared = True

    def __getstate__(self) -> dict[str, Any]:
        waiting = any(getattr(layer, "activations", None) for layer in self.layers)
        if waiting or has_rows(self.params) or self.passes.shared is not None:
            # PRIVACY: a file or copy would hold records (test_a_model_is_neither_saved_nor_copied_with_rows_in_it),
            # and a copy would never leave its block (test_a_model_is_not_copied_in_a_block)
            raise SequenceError(
                "a model must be saved or copied between steps: it holds rows of records now; call"
                " optimizer.step() or optimizer.discard() first"
            )
        # hooks of parameters are neither copied nor pickled
        # PRIVACY: places come from a secret stream (test_a_copy_of_a_model_has_no_places)
        return self.__dict__ | {"hooked": False, "isolation": None}

    def require_fresh(
        self, number: int | None, forward: Forward | None, untested: str, grad: Tensor
    ) -> None:
        """Raises SequenceError for a backward that is out of order, or of a forward that is run as none was tested.

        Args:
            number: of the forward; None in eval mode.
            forward: it.
            untested: in what way it is run as none was tested, "" for none.
            grad: in its output.
        """
        self.through_training = number is not None
        if untested:
            self.refuse(untested)
        if forward is not None:
            forward.has_left_rows = True
        if self.mean:
            # of float64 numbers frozen ones count too
            double = self.params[0].dtype is torch.float64
            if problem := inexact_mean(self.layers if double else self.switched, self.params):
                self.refuse(problem)
            self.passes.exact = backward_number()
            if self.passes.exact_means and self.passes.averaged != self.passes.exact:
                # PRIVACY: another mean divides all rows by their number, which rounds
                # (test_a_loss_that_is_no_exact_mean_any_more_is_refused)
                self.refuse(NO_MEAN)
        # PRIVACY: rows of an earlier batch could hold a record a second time, and Opacus would join gradients of one
        # forward with inputs of another (test_a_backward_of_an_earlier_batch_is_refused)
        if number is None:
            if self.dense:
                self.refuse(NO_FORWARD)
            return
        if number <= self.passes.used or (self.dense and number != self.passes.number):
            self.refuse(
                "a backward must follow its own forward, before a step, a discard() or (where"
                " layers are not factored) another forward: compute the loss anew for each batch,"
                " without retain_graph"
            )

    def sizes(self, *, known: bool) -> Sizes | str | None:
        """Returns in what sizes draws may be delivered, or why in one only, and is ready for them; None if not known.

        Args:
            known: whether no test is made.
        """
        first = self.first
        isolation: Any = self.isolation
        slots = isolation.slots
        asked = slots.usual, slots.most, torch_settings()
        found: Sizes | str | None = None
        if first.compiled or any(map(is_compiled, self.layers)):
            found = COMPILED
        elif first.autocast:
            found = "batches of several sizes are not tested under autocast"
        elif first.sizes is not None and first.sizes[0] == asked:
            found = first.sizes[1]
        elif not known and first.replay is None:
            found = "the first step was not looked at"
        elif not known and first.replay is not None:
            # PRIVACY: a later part may have the memory of the first (test_parts_of_a_draw_come_in_several_sizes)
            delivered = first.delivered or isolation.delivered
            found = first.replay.sizes(self.layers[0], slots, delivered)
            first.sizes = asked, found
        self.get_ready(found)
        return found

    def get_ready(self, found: Sizes | str | None) -> None:
        """Makes means over the batch exact and masks secret, if the sizes of batches need it."""
        self.passes.exact_means = isinstance(found, Sizes) and found.exact_means
        self.passes.secret_masks = isinstance(found, Sizes) and found.secret_masks

    def untested(self, memory: frozenset[tuple[int, int]]) -> str:
        """Returns in what way a forward is run as batches of several sizes were not tested, "" for none.

        Args:
            memory: of its inputs, see `sampling.loader.memory_of`.
        """
        isolation: Any = self.isolation
        if isolation is None or isolation.tested is None:
            return ""
        if self.passes.shared is not None:
            # PRIVACY: one forward was tested (test_several_forwards_after_a_test_of_one_are_refused)
            return _OTHER_INPUTS
        if torch.is_autocast_enabled("cpu"):
            # PRIVACY: other kernels than those of the test (test_a_forward_under_autocast_after_the_test_is_refused)
            return AUTOCAST
        if not isolation.tested.whole_step and not memory <= isolation.delivered:
            # PRIVACY: what a loop computes for all records at once (test_inputs_that_are_computed_later_are_refused)
            return _OTHER_INPUTS
        compiled = self.first.compiled or any(
            getattr(layer, "_compiled_call_impl", None) is not None for layer in self.layers
        )
        if compiled or isolation.tested.settings != torch_settings():
            # PRIVACY: other kernels, after the draw (test_a_model_compiled_after_the_test_is_refused,
            # test_threads_that_are_set_after_the_draw_are_refused)
            return _OTHER_KERNELS
        return ""

    def require_places(self, inputs: Sequence[Held]) -> None:
        """Raises SequenceError for an input of a block that may have a record in another row than the batch."""
        block = self.first.block
        newest = getattr(self.isolation, "newest", ())  # no loader, no batch
        for t, memory, _ in inputs:
            # in the block, at whose end it is repeated; or as in the first step
            made = block.takes(t) if block is not None else not hasattr(memory, ROWS)
            # PRIVACY: a record would be in two rows (test_views_of_other_records_are_refused_in_every_step,
            # test_inputs_from_before_the_block_are_refused)
            if not made and not is_delivered(t, newest):
                raise SequenceError(
                    "inputs in dp.same_records must be tensors of optimizer.loader, whole batches"
                    " as delivered (views of other dimensions are fine, x[:, 0]), or be computed"
                    " from them and from fresh noise inside of the block, record by record"
                )

    def refuse(self, message: str) -> NoReturn:
        """Drops all rows that wait, since a part of the refused backward may be among them, and raises."""
        clear_rows(self.params)
        self.reset()
        raise SequenceError(message)

    def reset(self) -> None:
        """Forgets forwards that no backward followed."""
        retire_forwards(self.params)
        self.passes.tag = self.passes.sizes = None
        forget_uses(self.dense, self.layers)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Lets gradients be plain ones in the block; raises SequenceError if rows or a forward are waiting."""
        if not self.hooked:
            self.hook_parameters()
        if has_rows(self.params) or self.passes.number != self.passes.used:
            # PRIVACY: rows of records and gradients of public data would meet
            # (test_public_steps_within_a_private_batch_are_refused,
            # test_public_steps_beside_rows_that_were_left_are_refused)
            raise SequenceError(
                "dp.public must not begin within a private batch, between its forward and its step:"
                " call optimizer.step() or optimizer.discard() first"
            )
        self.passes.paused = True
        if self.hooks is not None:
            self.hooks.disable_hooks()
        try:
            yield
        finally:
            self.passes.paused = False
            if self.hooks is not None:
                self.hooks.enable_hooks()
            for p in self.params:
                p.grad = None

    def refuse_gradient(self, p: Tensor) -> NoReturn:
        """Raises SequenceError for a weight of a factored layer that has a gradient, which is in no row."""
        used_in = [m for m in self.layers if any(q is p for q in m._parameters.values())]
        why = _TWICE if self.passes.differentiated else _OUTSIDE
        if not self.through_training or not all(layer.training for layer in used_in):
            why = (
                "came from a forward in eval mode, which records no rows: call model.train()"
                f" before it {_PARTS}"
            )
        raise SequenceError(f"the gradient of a weight of {used_in[0]} {why}")


class _Drop:
    """Drops `p.grad` as soon as it is accumulated; keeps no model alive: hooks of parameters are seen by no collector.

    Args:
        attachment: of the model; None in copies, which are hooked anew.
    """

    def __init__(self, attachment: Attachment | None) -> None:
        self._held = None if attachment is None else weakref.ref(attachment)

    def __call__(self, p: Tensor) -> None:
        grad = p.grad
        passes = p.__dict__.get("dpsco_passes")
        if grad is None and passes is None:  # a recorded layer gives none
            return
        attachment = None if self._held is None else self._held()
        if attachment is None or attachment.passes.paused:
            return
        p.grad = None
        if passes is not None:
            passes.append(attachment.passes.number)
            if grad is not None and not hasattr(p, "dpsco_compared"):
                mean = attachment.mean and not attachment.passes.exact_means
                p.dpsco_first_backward = grad.detach().to_dense(), mean  # type: ignore[attr-defined]
        elif grad is not None:
            attachment.refuse_gradient(p)

    def __reduce__(self) -> tuple[type[_Drop], tuple[None]]:
        return _Drop, (None,)


def _everything(attachment: Attachment) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for m in attachment.layers:
        for kind in attachment.watched:
            for name, t in getattr(m, kind).items():
                if t is not None:
                    yield m, name, t


def _states(attachment: Attachment) -> list[tuple[int, int]]:
    """Returns what tells whether a forward has written to a buffer or to a parameter, trained ones included."""
    kinds = attachment.watched
    tensors = [t for m in attachment.layers for kind in kinds for t in getattr(m, kind).values()]
    # PRIVACY: the whole weights of a layer are gone after its forward
    # (test_a_forward_that_writes_to_weights_in_shards_is_refused)
    return [(id(t), t._version) for t in (*tensors, *attachment.cut) if t is not None]


def _values(attachment: Attachment) -> list[tuple[str, str]]:
    """Returns what no optimizer privatizes, buffers and frozen parameters: the name of each, and a fingerprint."""
    found = []
    for m, name, t in _everything(attachment):
        if not t.requires_grad:
            found.append((f"{type(m).__name__}.{name}", fingerprint(t)))
    return found


def _require_unchanged(attachment: Attachment) -> None:
    """Raises PrivacyError if a forward has written to buffers or weights.

    Values are compared once, since `.data` leaves no trace in the version.
    """
    changed: set[str] = set()
    if attachment.values is not None:
        pairs = zip(attachment.values, _values(attachment), strict=False)
        changed = {name for (_, old), (name, new) in pairs if old != new}
        attachment.values = None
    if _states(attachment) != attachment.buffers:
        found = {
            f"{type(m).__name__}.{name}"
            for m, name, t in _everything(attachment)
            if (id(t), t._version) not in attachment.buffers
        }
        changed |= found or {"tensors removed or exchanged, or weights in shards"}
    if changed:
        # PRIVACY: running statistics are released un-noised with the model (test_changing_buffers_are_refused)
        raise PrivacyError(
            "a training forward must not change buffers or weights, they would carry private data"
            f" out of the model (changed: {sorted(changed)}); use layers without running"
            " statistics, e.g. GroupNorm"
        )


def _before_forward(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    if torch.compiler.is_compiling():  # out of the graph of a compiled model
        return torch.compiler.disable(_before_compiled_forward)(model, args, kwargs)
    Watched.hidden += 1
    attachment: Attachment = model._dpsco  # type: ignore[assignment]
    passes = attachment.passes
    if not attachment.hooked:
        # in eval mode too: a backward there would leave a raw gradient on a copy
        attachment.hook_parameters()
    passes.untested = ""
    if passes.paused or not model.training:
        return None
    layers = attachment.layers
    children = [child for m in layers for child in m._modules.values()]
    if model is not layers[0] or children != attachment.children:
        _refuse_modules(model)
    leaves_rows = torch.is_grad_enabled()
    held, args, kwargs = attachment.carried.begin(args, kwargs, leaves_rows=leaves_rows)
    if not leaves_rows:
        return None
    if not attachment.compared:
        attachment.begin()
    memory = frozenset((where.data_ptr(), k) for x, where, k in held if x.is_floating_point())
    passes.untested = attachment.untested(memory)
    if passes.shared is not None:
        attachment.require_places(held)
    if attachment.looks:
        attachment.first.begin(layers, memory, attachment.isolation)
        args, kwargs = plain((args, kwargs))  # they may be outputs of another attached model
    require_unwrapped(attachment.params)
    if dist.is_available() and dist.is_initialized():
        _require_alone(model)
    if attachment.dense:
        _make_ready(attachment.dense)
    passes.differentiated = passes.differentiated and passes.number > passes.used
    passes.begin(batch_sizes((*args, *kwargs.values()), attachment.batch_dim))
    attachment.buffers = _states(attachment)
    if passes.secret_masks:
        # PRIVACY: masks of others would depend on how many rows there are (test_masks_of_a_model_are_secret)
        passes.random_state = torch.get_rng_state()
        torch.set_rng_state(secret_state())
    return args, kwargs


def _before_compiled_forward(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    # PRIVACY: what a compiled model computes depends on the sizes that came before
    # (test_a_compiled_model_keeps_slots)
    model._dpsco.first.compiled = True  # type: ignore[union-attr]
    return _before_forward(model, args, kwargs)


def _make_ready(dense: Iterable[nn.Parameter]) -> None:
    """Drops the gradients of parameters with Opacus' rows; raises SequenceError if these still wait for a backward."""
    # Opacus sums two forwards into one row per position, which would clip two records as one.
    if any(p._forward_counter for p in dense):  # type: ignore[attr-defined]
        raise SequenceError(
            "a training forward is still waiting for its backward: run backward after each"
            " forward, compute metrics under torch.no_grad() or in eval mode, or call"
            f" optimizer.discard() to start over; {ONE_MODULE}"
        )
    for p in dense:
        p.grad = None  # a released mean that nobody cleared would be taken for a part of the next gradient


def _refuse_modules(model: nn.Module) -> NoReturn:
    """Raises for a model that has other modules than at `attach`."""
    for name, module in model.named_modules():
        require_whole(module, name)
    raise SequenceError(
        "modules of an attached model must be those that it had at dp.attach (a shallow copy of"
        " a layer runs the layer that it was copied from): attach the model after such changes,"
        " and copy by copy.deepcopy"
    )


def _require_alone(model: nn.Module) -> None:
    """Raises an error in a forward of an attached model that FSDP has taken, or that DistributedDataParallel makes."""
    # FSDP 1 takes the parameters away, so that no layer would look at them
    if is_sharded(model) and not model._dpsco.cut:  # type: ignore[union-attr]
        require_whole(model)
    if is_replicated(model):
        raise SequenceError(
            "model must not be replicated (got a forward of DistributedDataParallel): its backward"
            " waits for all ranks, of which some may have no rows; call the module inside, whose"
            " optimizer joins the ranks by itself"
        )


def _after_forward(model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    if torch.compiler.is_compiling():
        return torch.compiler.disable(_after_forward)(model, args, kwargs, output)
    try:
        return _looked(model, args, kwargs, output)
    finally:
        Watched.hidden -= 1


def _looked(model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    attachment: Attachment = model._dpsco  # type: ignore[assignment]
    passes = attachment.passes
    if passes.random_state is not None:
        torch.set_rng_state(passes.random_state)
        passes.random_state = None
    if passes.paused:
        return None
    if output is None and attachment.filled is not None:
        _tell_of_filling(sys.exc_info()[1], attachment.filled)
    number = passes.tag
    forward = attachment.carried.end(output, (args, kwargs))
    for out in [output] if isinstance(output, Tensor) else tree_leaves(output):
        if isinstance(out, Tensor) and out.requires_grad:
            watch = partial(attachment.require_fresh, number, forward, passes.untested)
            # a recorded layer, and no hook, which is dear
            if getattr(out.grad_fn, "dpsco_watch", watch) is None:
                out.grad_fn.dpsco_watch = watch  # type: ignore[union-attr]
            else:
                out.register_hook(watch)
    if number is None:
        return None
    sizes = passes.sizes
    passes.tag = passes.sizes = None
    if attachment.values is not None or _states(attachment) != attachment.buffers:
        _require_unchanged(attachment)
    attachment.looks = attachment.looks and attachment.first.waits
    if output is None:  # it was called after an error
        return None
    if passes.exact_means and sizes is not None and len(sizes) == 1:
        return averaged(output, Source(min(sizes), passes))
    if not attachment.looks:
        return None
    try:
        return attachment.first.look(model, args, kwargs, output)
    except PrivacyError:
        attachment.reset()
        raise


def _tell_of_filling(error: BaseException | None, rows: int) -> None:
    """Says in an exception of a forward that some rows may be no records; not how many, which is private."""
    if error is None or isinstance(error, DpscoError):
        return
    note = (
        f"torch_dpsco: of the {rows} rows of this batch some may be filling, which hides how many"
        " records were drawn: zeros in all tensors (a length of 0, class 0), at any place. Make"
        " the forward take such rows, e.g. by lengths.clamp(min=1), and by enforce_sorted=False with"
        " dp.private_layers where sequences are packed; or give isolation='none' to optimizer.loader(...), whose risk"
        " docs/guarantees.md describes"
    )
    if len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{note}",)  # loggers print this alone
    else:
        error.add_note(note)


def forget_uses(params: Iterable[nn.Parameter], layers: Iterable[nn.Module]) -> None:
    """Forgets what Opacus' hooks have noted of forwards that no backward followed."""
    for p in params:
        p._forward_counter = 0  # type: ignore[attr-defined]
        p.__dict__.pop("_current_grad_sample", None)
    for layer in layers:
        layer.__dict__.pop("activations", None)
        layer.__dict__.pop("max_batch_len", None)
