"""Makes a model produce per-sample gradients, in place: `attach(model)` before training, `detach(model)` after.

Layers of the common kinds record their own rows (factored: see `rows.layers.recorded`); every other layer, and those
whose parameters are shared, get Opacus' grad-sampler hooks. The model keeps its class, its parameter names and its
state dict. After attach no non-private gradient survives a backward:

* `p.grad` is dropped as soon as it is accumulated;
* in factored layers a `p.grad` that still appears comes from a loss term on the weights, or from a use of the weight
  outside of its layer: it raises, naming `reg=`; in other layers the first batch is compared with the sum of its rows;
* a training forward that changes a buffer (batch normalization and similar layers couple the rows) raises;
* so does one whose inputs are outputs of an earlier batch, a state that the loop carries (see `rows.forwards`).
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from torch_dpsco import _validate as check
from torch_dpsco._doors import typed
from torch_dpsco.compat import LeftOut, require_torch, tree_leaves, tree_map
from torch_dpsco.errors import DpscoError, PrivacyError, SequenceError
from torch_dpsco.rows.batch import clear_rows, has_rows
from torch_dpsco.rows.first_step import FirstStep
from torch_dpsco.rows.forwards import (
    NO_FORWARD,
    ONE_MODULE,
    PASSES,
    WATCH,
    CarriedState,
    Forward,
    PassCounter,
    batch_sizes,
    forget_uses,
)
from torch_dpsco.rows.layers.kinds import (
    RECORDED,
    SHORTCUTS,
    can_record,
    is_recorded,
    start_recording,
    stop_recording,
)
from torch_dpsco.rows.supported import (
    HALF,
    forget_wrappers,
    inexact_mean,
    require_alone,
    require_supported,
    require_unwrapped,
    trainable_layers,
)
from torch_dpsco.trial.loss import plain

if TYPE_CHECKING:
    from torch_dpsco.rows.hooks import DenseHooks

_OWN = (
    *("grad_factors", "dpsco_first_backward", "dpsco_compared", "dpsco_passes"),
    *("dpsco_reset", "dpsco_retire", "dpsco_mean", "dpsco_checked", PASSES),
)
_Model = TypeVar("_Model", bound=nn.Module)


class _Attachment:
    """What `attach` added to a model, for the hooks to use and `detach` to undo."""

    def __init__(
        self,
        model: nn.Module,
        factored: list[nn.Module],
        loss_reduction: str,
        batch_first: bool,
        check_first_step: bool,
    ) -> None:
        self.mean = loss_reduction == "mean"
        self.passes = PassCounter()
        self.batch_dim = 0 if batch_first else 1
        self.carried = CarriedState(model)
        self.filled: int | None = None  # rows of the batch, if some of them may be filling
        self.factored = [p for layer in factored for p in layer.parameters() if p.requires_grad]
        done = {id(p) for p in self.factored}
        self.dense = [p for p in model.parameters() if p.requires_grad and id(p) not in done]
        self.layers = list(model.modules())
        self.hooks = self._dense_hooks(model, factored, loss_reduction) if self.dense else None
        for layer in factored:  # after all that may raise
            start_recording(layer, self.passes, scale_by_batch=self.mean)
        for start in SHORTCUTS:
            start(self.layers)
        self.handles: list[Any] = [
            model.register_forward_pre_hook(_before_forward, with_kwargs=True),
            model.register_forward_hook(_after_forward, with_kwargs=True, always_call=True),
        ]
        self.buffers: list[tuple[int, int]] = []
        self.values: list[tuple[str, str]] | None = None  # during the first forward
        self.first = FirstStep(check_first_step, loss_reduction, self.batch_dim)
        self.compared = False
        self.through_training = True  # whether the last backward came through a training forward
        forget_wrappers(self.factored + self.dense)
        self.hook_parameters()

    def _dense_hooks(
        self, model: nn.Module, factored: list[nn.Module], loss_reduction: str
    ) -> DenseHooks:
        from torch_dpsco.rows.hooks import DenseHooks  # which imports Opacus

        first = self.batch_dim == 0
        try:
            hooks = DenseHooks(
                model, factored, self.passes, batch_first=first, loss_reduction=loss_reduction
            )
        except NotImplementedError as error:
            raise ValueError(
                "model must have layers that Opacus can sample where they do not record their"
                f" own rows, and it says: {error}; move trained parameters into modules without"
                " buffers (docs/compatibility.md)"
            ) from error
        hooks.refuse = self.refuse
        return hooks

    def hook_parameters(self) -> None:
        """Puts the hooks on the parameters; a deepcopy of a model keeps its modules' hooks but not these."""
        self.hooked = True
        self.stop_watching = WATCH.start(self)
        for p in self.factored + self.dense:
            p.__dict__[PASSES] = self.passes
            p.dpsco_reset, p.dpsco_retire = self.reset, self.retire  # type: ignore[attr-defined]
            p.dpsco_mean, p.dpsco_checked = self.mean, self.first.verdicts  # type: ignore[attr-defined]
        for p in self.dense:
            p.grad_sample, p._forward_counter, p.dpsco_passes = None, 0, []  # type: ignore[attr-defined]
        self.handles += [_after_accumulation(p, self._drop_factored) for p in self.factored]
        self.handles += [_after_accumulation(p, self._drop_dense) for p in self.dense]

    def __getstate__(self) -> dict[str, Any]:
        waiting = any(getattr(layer, "activations", None) for layer in self.layers)
        if waiting or has_rows(self.factored + self.dense):
            # PRIVACY: a file or copy would hold records (test_a_model_is_neither_saved_nor_copied_with_rows_in_it)
            raise SequenceError(
                "a model must be saved or copied between steps: it holds rows of records now; call"
                " optimizer.step() or optimizer.discard() first"
            )
        # hooks of parameters are neither copied nor pickled
        return self.__dict__ | {"hooked": False, "stop_watching": None}

    def retire(self, filled: int | None = None) -> None:
        """Refuses backwards of all forwards so far, and their outputs as inputs: their batch was used, or given up.

        Args:
            filled: rows of the batch that comes next, if some of them may be filling.
        """
        self.filled = filled
        self.passes.used = self.passes.number
        self.carried.end_batch()

    def require_fresh(self, number: int | None, forward: Forward | None) -> None:
        """Raises SequenceError for a backward, through a forward of this number (None: in eval mode), out of order."""
        self.through_training = number is not None
        if forward is not None:
            forward.has_left_rows = True
        if self.mean:
            if problem := inexact_mean(self.layers, self.factored + self.dense):
                self.refuse(problem)
            self.passes.note_exact()
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

    def refuse(self, message: str) -> NoReturn:
        """Drops all rows that wait, since a part of the refused backward may be among them, and raises."""
        clear_rows(self.factored + self.dense)
        self.reset()
        raise SequenceError(message)

    def reset(self) -> None:
        """Forgets forwards that no backward followed."""
        self.retire()
        self.passes.close()
        forget_uses(self.dense, self.layers)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Lets gradients be plain ones in the block; raises SequenceError if rows or a forward are waiting."""
        params = self.factored + self.dense
        if not self.hooked:
            self.hook_parameters()
        if has_rows(params) or self.passes.number != self.passes.used:
            # PRIVACY: rows of records and gradients of public data would meet
            # (test_public_steps_within_a_private_batch_are_refused)
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
            for p in params:
                p.grad = None

    def _drop_factored(self, p: Tensor) -> None:
        if p.grad is None or self.passes.paused:
            return
        p.grad = None
        used_in = [m for m in self.layers if any(q is p for q in m._parameters.values())]
        trained = self.through_training and all(layer.training for layer in used_in)
        raise SequenceError(
            f"the gradient of a weight of {used_in[0]} {self.passes.why_not_of_rows(trained)}"
        )

    def _drop_dense(self, p: Tensor) -> None:
        if self.passes.paused:
            return
        p.dpsco_passes.append(self.passes.number)  # type: ignore[attr-defined]
        if p.grad is not None and not hasattr(p, "dpsco_compared"):
            p.dpsco_first_backward = (p.grad.detach(), self.mean)  # type: ignore[attr-defined]
        p.grad = None


class _Weakly:
    """A hook that does not keep its model alive: the garbage collector does not see through hooks of parameters."""

    def __init__(self, method: Callable[[Tensor], None] | None) -> None:
        self._held = None if method is None else weakref.WeakMethod(method)

    def __call__(self, p: Tensor) -> None:
        method = None if self._held is None else self._held()
        if method is not None:
            method(p)

    def __reduce__(self) -> tuple[type[_Weakly], tuple[None]]:
        return _Weakly, (None,)  # copies are hooked anew


def _after_accumulation(p: nn.Parameter, method: Callable[[Tensor], None]) -> Any:
    # torch registers on no other tensor; a copy of a model may have frozen parameters
    required = p.requires_grad
    handle = p.requires_grad_(True).register_post_accumulate_grad_hook(_Weakly(method))
    p.requires_grad_(required)
    return handle


def _everything(layers: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for m in layers:
        for tensors in (m._buffers, m._parameters):
            for name, t in tensors.items():
                if t is not None:
                    yield m, name, t


def _states(layers: Iterable[nn.Module]) -> list[tuple[int, int]]:
    """Returns what tells whether a forward has written to a buffer or to a parameter, trained ones included."""
    return [(id(t), t._version) for _, _, t in _everything(layers)]


def _values(layers: Iterable[nn.Module]) -> list[tuple[str, str]]:
    """Returns what no optimizer privatizes, buffers and frozen parameters: the name of each, and a fingerprint."""
    found = []
    for m, name, t in _everything(layers):
        if not t.requires_grad:
            sizes = t.detach().abs().double()
            # text, so that NaN equals NaN
            fingerprint = f"{float(sizes.sum())!r} {float(sizes.square().sum())!r}"
            found.append((f"{type(m).__name__}.{name}", fingerprint))
    return found


def _changed_values(attachment: _Attachment) -> set[str]:
    """Compares values once: a write through `.data` leaves no trace in the version."""
    before = attachment.values
    attachment.values = None
    if before is None:
        return set()
    pairs = zip(before, _values(attachment.layers), strict=False)
    return {name for (_, old), (name, new) in pairs if old != new}


def _before_forward(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    attachment: _Attachment = model._dpsco  # type: ignore[assignment]
    if not attachment.hooked:
        # in eval mode too: a backward there would leave a raw gradient on a copy
        attachment.hook_parameters()
    if attachment.passes.paused:
        return None
    if model.training:
        leaves_rows = torch.is_grad_enabled()
        _OUTSIDE.call(attachment.carried.begin, (args, kwargs), leaves_rows=leaves_rows)
        if leaves_rows:
            _OUTSIDE.call(attachment.first.begin, attachment.layers)
    if not (model.training and torch.is_grad_enabled()):
        return None
    require_unwrapped(attachment.dense + attachment.factored)
    require_alone(model)
    # Opacus sums two forwards into one row per position, which would clip two records as one.
    if any(p._forward_counter for p in attachment.dense):  # type: ignore[attr-defined]
        raise SequenceError(
            "a training forward is still waiting for its backward: run backward after each"
            " forward, compute metrics under torch.no_grad() or in eval mode, or call"
            f" optimizer.discard() to start over; {ONE_MODULE}"
        )
    for p in attachment.dense:
        p.grad = None  # a released mean that nobody cleared would be taken for a part of the next gradient
    attachment.passes.open(batch_sizes((*args, *kwargs.values()), attachment.batch_dim))
    if not attachment.compared:
        attachment.values = _values(attachment.layers)
        attachment.compared = True
    attachment.buffers = _states(attachment.layers)
    if attachment.first.waits:  # they may be outputs of another attached model
        args, kwargs = plain((args, kwargs))
    # PRIVACY: rows are made of inputs until the step, when their memory may have the next batch
    # (test_a_batch_is_used_as_it_was_at_the_forward)
    args, kwargs = tree_map(_copied, (args, kwargs))
    _OUTSIDE.call(attachment.carried.take, (args, kwargs))
    return args, kwargs


def _copied(leaf: Any) -> Any:
    """Returns an input in memory of its own; what another computation has made is nobody's buffer."""
    return leaf.clone() if isinstance(leaf, Tensor) and leaf.grad_fn is None else leaf


def _after_forward(model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    attachment: _Attachment = model._dpsco  # type: ignore[assignment]
    if attachment.passes.paused:
        return None
    error = sys.exc_info()[1] if output is None else None
    if attachment.filled is not None and error is not None and not isinstance(error, DpscoError):
        _tell_of_filling(error, attachment.filled)
    number = attachment.passes.tag
    forward = _OUTSIDE.call(attachment.carried.end, output, (args, kwargs))
    for out in [output] if isinstance(output, Tensor) else tree_leaves(output):
        if isinstance(out, Tensor) and out.requires_grad:
            out.register_hook(lambda _: attachment.require_fresh(number, forward))
    if number is None:
        return None
    attachment.passes.close()
    changed = _changed_values(attachment)
    if _states(attachment.layers) != attachment.buffers:
        new = set()
        for m, name, t in _everything(attachment.layers):
            if (id(t), t._version) not in attachment.buffers:
                new.add(f"{type(m).__name__}.{name}")
        changed |= new or {"tensors removed or exchanged"}
    if changed:
        # PRIVACY: running statistics are released un-noised with the model (test_changing_buffers_are_refused)
        raise PrivacyError(
            "a training forward must not change buffers or weights, they would carry private data"
            f" out of the model (changed: {sorted(changed)}); use layers without running"
            " statistics, e.g. GroupNorm"
        )
    failed = output is None  # this hook is called then too
    if not attachment.first.waits or failed:
        return None
    return _OUTSIDE.call(_look, attachment, model, args, kwargs, output)


def _tell_of_filling(error: BaseException, rows: int) -> None:
    """Says in an exception of a forward that some rows may be no records; not how many, which is private."""
    note = (
        f"torch_dpsco: of the {rows} rows of this batch some may be filling, which hides how many"
        " records were drawn: zeros in all tensors (a length of 0, class 0), at any place. Make"
        " the forward take such rows, e.g. by lengths.clamp(min=1), and by a mask in place of"
        " packed sequences; or give padding=False to optimizer.loader(...), whose risk"
        " docs/guarantees.md describes"
    )
    if len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{note}",)  # loggers print this alone
    else:
        error.add_note(note)


def _look(
    attachment: _Attachment, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any
) -> Any:
    try:
        return attachment.first.look(model, args, kwargs, output)
    except PrivacyError:
        attachment.reset()
        raise


def _called(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return function(*args, **options)


_OUTSIDE = LeftOut(_called)  # of the graph of a compiled model


def _factorable(model: nn.Module) -> list[nn.Module]:
    layers = list({id(m): m for _, m in trainable_layers(model)}.values())
    owners = Counter(id(p) for m in layers for p in m.parameters())
    return [
        m for m in layers if can_record(m) and all(owners[id(p)] == 1 for p in m.parameters())
    ]


def paused(model: nn.Module) -> AbstractContextManager[None]:
    """Returns a context in which an attached model has plain gradients."""
    attachment: _Attachment = model._dpsco  # type: ignore[assignment]
    return attachment.paused()


def is_attached(model: nn.Module) -> bool:
    """Returns whether `attach` was called on the model."""
    return hasattr(model, "_dpsco")


def first_step_of(model: nn.Module) -> FirstStep:
    """Returns what is known about records that reach each other in an attached model."""
    attachment: _Attachment = model._dpsco  # type: ignore[assignment]
    return attachment.first


def _is_part_of_attached(model: nn.Module) -> bool:
    # PRIVACY: a part would keep the loss_reduction of the whole (test_a_part_of_an_attached_model_is_refused)
    traces = any(is_recorded(m) or is_attached(m) for m in model.modules())
    return traces or any(hasattr(p, "dpsco_reset") for p in model.parameters())


@typed
def attach(
    model: _Model,
    *,
    rows: str = "auto",
    loss_reduction: str = "mean",
    batch_first: bool = True,
    check_first_step: bool = True,
) -> _Model:
    """Makes the model record per-sample gradients in every training backward, and returns the model itself.

    Args:
        model: any module whose layers Opacus can sample, without batch normalization; call the model itself, not its
            parts, so that rows of different forwards can be told apart.
        rows: "auto" lets layers that own their parameters and are of a kind in `rows.layers.kinds.RECORDED` record
            their rows, and takes Opacus' rows elsewhere; "dense" takes Opacus' rows everywhere; "factored" raises
            where layers cannot record.
        loss_reduction: "mean" or "sum", how the training loss reduces over the batch.
        batch_first: whether the batch is the first dimension of the inputs.
        check_first_step: whether to look in the first training step, on synthetic records, for records that reach each
            other in the model, also from batch to batch, or in what the loop computes from its outputs until
            `backward()` (see `first_step`). The model is called sixteen times more then, its hooks included. What
            could not be looked at, is said by `optimizer.report()`, and does not stop a run. `fit` has probes of its
            own.

    Raises:
        ValueError: unknown option, no trainable parameter, layers that couple rows.
        SequenceError: the model is attached already.
        PrivacyError: in the first step, records reach each other; in any step, inputs are outputs of an earlier batch.

    Example:
        >>> model = attach(nn.Linear(3, 1))
        >>> type(model).__name__, is_attached(model), list(model.state_dict())
        ('Linear', True, ['weight', 'bias'])
    """
    check.choice(("auto", "dense", "factored"), rows=rows)
    check.choice(("mean", "sum"), loss_reduction=loss_reduction)
    require_torch()
    if _is_part_of_attached(model):
        raise SequenceError(
            "model is attached already: call dp.detach(model) first to attach it in another way; a"
            " part of an attached model must be detached with the whole"
        )
    require_supported(model, batch_first=batch_first)
    if loss_reduction == "mean" and any(p.dtype in HALF for p in model.parameters()):
        # PRIVACY: 1/B rounds to 8 bits there, so that one record more moves ALL rows of a mean
        # (test_a_mean_in_half_precision_is_refused)
        raise ValueError(
            "loss_reduction must be 'sum' for half-precision parameters (got 'mean'): use a loss"
            " that sums over the batch"
        )
    factored = _factorable(model) if rows in ("auto", "factored") and batch_first else []
    if rows == "factored":
        for name, m in trainable_layers(model):
            if m not in factored:
                raise ValueError(
                    "rows='factored' needs layers that own their parameters, of the kinds "
                    f"{', '.join(kind.__name__ for kind in RECORDED)} (got {type(m).__name__}"
                    f" {name!r})"
                )
    attachment = _Attachment(model, factored, loss_reduction, batch_first, check_first_step)
    model._dpsco = attachment  # type: ignore[assignment]
    return model


@typed
def detach(model: _Model) -> _Model:
    """Undoes `attach` and drops all recorded rows; returns the model."""
    if not is_attached(model):
        raise SequenceError("model is not attached: nothing to detach")
    attachment: _Attachment = model._dpsco  # type: ignore[assignment]
    # PRIVACY: inputs that a forward left would be saved with the model (test_a_detached_model_holds_no_data)
    attachment.reset()
    clear_rows(list(model.parameters()))
    for handle in attachment.handles:
        handle.remove()
    if attachment.stop_watching is not None:
        attachment.stop_watching()
    if attachment.hooks is not None:
        attachment.hooks.cleanup()
    for module in model.modules():
        stop_recording(module)
    for p in model.parameters():
        for name in _OWN:
            p.__dict__.pop(name, None)
    del model._dpsco
    return model
