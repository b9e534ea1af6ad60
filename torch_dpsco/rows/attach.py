"""Makes a model produce per-sample gradients, in place: `attach(model)` before training, `detach(model)` after.

Layers of the common kinds record their own rows (factored: see `rows.layers.recorded`); every other layer, and those
whose parameters are shared, get Opacus' grad-sampler hooks. The model keeps its class, its parameter names and its
state dict. After attach no non-private gradient survives a backward:

* `p.grad` is dropped as soon as it is accumulated;
* in factored layers a `p.grad` that still appears comes from a loss term on the weights, or from a use of the weight
  outside of its layer: it raises, naming `reg=`; in other layers the first batch is compared with the sum of its rows;
* a training forward that changes a buffer (batch normalization and similar layers couple the rows) raises;
* so does one whose inputs are outputs of an earlier batch, a state that the loop carries (see `rows.forwards`).

Models of which rows are not known are refused here, by layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from torch_dpsco import _validate as check
from torch_dpsco._validate import typed
from torch_dpsco.compat import BatchNorm, DropoutNd, of_opacus
from torch_dpsco.errors import SequenceError
from torch_dpsco.native import HALF
from torch_dpsco.rows.batch import WATCH, clear_rows
from torch_dpsco.rows.first_step import FirstStep
from torch_dpsco.rows.forwards import Attachment, PassCounter
from torch_dpsco.rows.layers.recorded import (
    can_record,
    is_recorded,
    require_whole,
    start_recording,
    stop_recording,
)
from torch_dpsco.trial.loss import Watched

_OWN = ("grad_factors", "dpsco_first_backward", "dpsco_compared", "dpsco_passes", "dpsco")
_Model = TypeVar("_Model", bound=nn.Module)


def _factorable(model: nn.Module) -> list[nn.Module]:
    layers = list({id(m): m for _, m in trainable_layers(model)}.values())
    owners = Counter(id(p) for m in layers for p in m.parameters())
    return [
        m for m in layers if can_record(m) and all(owners[id(p)] == 1 for p in m.parameters())
    ]


def _inside(model: nn.Module, factored: list[nn.Module], batch_first: bool) -> list[nn.Module]:
    """Returns the factored layers inside of those of `dp.private_layers`, whose inputs always have the batch first."""
    inside = [m for m in factored if hasattr(m, "batch_comes_first")]
    others = {m for _, m in trainable_layers(model) if hasattr(m, "batch_comes_first")}
    if not batch_first and others - {*inside}:
        # PRIVACY: their dense rows would be of times or of features
        # (test_private_layers_that_share_weights_are_refused_on_time_first)
        raise ValueError(
            "layers of dp.private_layers must have weights of their own, without parametrizations,"
            " where batch_first is False"
        )
    return inside


def paused(model: nn.Module) -> AbstractContextManager[None]:
    """Returns a context in which an attached model has plain gradients."""
    attachment: Attachment = model._dpsco  # type: ignore[assignment]
    return attachment.paused()


@contextmanager
def together(model: nn.Module) -> Iterator[None]:
    """Lets the forwards of an attached model in the block be of the same records."""
    if not is_attached(model):
        raise SequenceError("model must be attached: call dp.attach(model) first")
    attachment: Attachment = model._dpsco  # type: ignore[assignment]
    passes = attachment.passes
    if passes.shared is not None:
        raise SequenceError("a block of dp.same_records must not be in another one")
    if attachment.hooks is not None:
        others = sorted({type(m).__name__ for m in attachment.hooks.iterate_submodules(model)})
        # PRIVACY: Opacus' hooks know forwards by their order (test_layers_that_record_no_rows_are_refused_by_name)
        raise SequenceError(
            f"dp.same_records needs layers that record their own rows (got others: {others}): wrap the"
            " forwards in one module that makes all of them inside of its own, model(real, fake),"
            " and attach that"
        )
    # PRIVACY: forwards that wait may be of other records (test_forwards_before_the_block_are_refused)
    passes.shared = 0 if passes.number == passes.used else -1
    block = attachment.first.open_block()
    attachment.looks = attachment.looks or block is not None
    try:
        with ExitStack() as stack:
            if block is not None:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
                stack.enter_context(Watched(block))
            yield
    except BaseException:
        # PRIVACY: what was refused is in rows that wait (test_a_block_that_raises_leaves_no_rows)
        clear_rows(attachment.params)
        attachment.reset()
        raise
    finally:
        passes.shared = attachment.first.block = None


def is_attached(model: nn.Module) -> bool:
    """Returns whether `attach` was called on the model."""
    return hasattr(model, "_dpsco")


def first_step_of(model: nn.Module) -> FirstStep:
    """Returns what is known about records that reach each other in an attached model."""
    attachment: Attachment = model._dpsco  # type: ignore[assignment]
    return attachment.first


def _is_part_of_attached(model: nn.Module) -> bool:
    # PRIVACY: a part would keep the loss_reduction of the whole (test_a_part_of_an_attached_model_is_refused,
    # test_a_copy_of_an_attached_model_is_no_part_of_another)
    traces = any(is_recorded(m) or is_attached(m) for m in model.modules())
    return traces or any("dpsco" in p.__dict__ for p in model.parameters())


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
        rows: "auto" lets layers that own their parameters and are of a kind in `rows.layers.recorded.RECORDED` record
            their rows, and takes Opacus' rows elsewhere; "dense" takes Opacus' rows everywhere but in the layers of
            `dp.private_layers`.
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
    check.choice(("auto", "dense"), rows=rows)
    check.choice(("mean", "sum"), loss_reduction=loss_reduction)
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
    factored = _factorable(model)
    if rows == "dense" or not batch_first:
        factored = _inside(model, factored, batch_first)
    passes = PassCounter(mean=loss_reduction == "mean")
    hooks = _dense_hooks(model, factored, passes, loss_reduction, batch_first)
    for layer in factored:  # after all that may raise
        start_recording(layer, passes)
    dim = 0 if batch_first else 1
    attachment = Attachment(model, factored, hooks, passes, check_first_step, dim)
    if hooks is not None:
        hooks.refuse = attachment.refuse
    model._dpsco = attachment  # type: ignore[assignment]
    return model


def _dense_hooks(
    model: nn.Module,
    factored: list[nn.Module],
    passes: PassCounter,
    loss_reduction: str,
    batch_first: bool,
) -> Any:
    """Returns Opacus' hooks on the trained layers that record no rows, None if there are none."""
    done = {id(p) for layer in factored for p in layer.parameters()}
    if all(id(p) in done for p in model.parameters() if p.requires_grad):
        return None
    from torch_dpsco.rows.hooks import DenseHooks  # which imports Opacus

    try:
        return DenseHooks(
            model,
            factored,
            passes,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
        )
    except NotImplementedError as error:
        raise ValueError(
            "model must have layers that Opacus can sample where they do not record their"
            f" own rows, and it says: {error}; move trained parameters into modules without"
            " buffers (docs/compatibility.md)"
        ) from error


@typed
def detach(model: _Model) -> _Model:
    """Undoes `attach` and drops all recorded rows; returns the model."""
    if not is_attached(model):
        raise SequenceError("model is not attached: nothing to detach")
    attachment: Attachment = model._dpsco  # type: ignore[assignment]
    if attachment.cut:
        # PRIVACY: rows wait on the shards (test_a_model_in_shards_stays_attached)
        raise SequenceError(
            "a model in shards must stay attached, as FSDP adds no gradients of it up: load its weights,"
            " p.full_tensor(), into a model of its own"
        )
    # PRIVACY: inputs that a forward left would be saved with the model (test_a_detached_model_holds_no_data)
    attachment.reset()
    clear_rows(list(model.parameters()))
    for handle in attachment.handles:
        handle.remove()
    WATCH.stop(attachment)
    if attachment.hooks is not None:
        attachment.hooks.cleanup()
    for module in model.modules():
        stop_recording(module)
    for p in model.parameters():
        for name in _OWN:
            p.__dict__.pop(name, None)
    del model._dpsco
    return model


_FIX = "model = dp.private_layers(model), before its optimizer is made,"


# layers with a grad sampler of Opacus', which takes seconds to import
_KNOWN = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LayerNorm, nn.GroupNorm, nn.Embedding)


def _has_sampler(module: nn.Module) -> bool:
    if type(module) in _KNOWN:
        return True
    from opacus.grad_sample.grad_sample_module import GradSampleHooks

    return type(module) in GradSampleHooks.GRAD_SAMPLERS


def trainable_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the layers that rows are taken of: one with parameters of its own and no grad sampler is handled whole."""

    def walk(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        # what a layer inside holds too (the bias of a head of Hugging Face's) is in the rows of that layer, and a use
        # of it elsewhere has a gradient that is refused, as of any other weight
        inside = {p for child in module.children() for p in child.parameters()}
        if any(p.requires_grad and p not in inside for p in module.parameters(recurse=False)):
            yield name, module
            if not _has_sampler(module):
                return
        for child_name, child in module.named_children():
            yield from walk(f"{name}.{child_name}".lstrip("."), child)

    yield from walk("", model)


def require_supported(model: nn.Module, *, batch_first: bool) -> None:
    """Raises ValueError, naming the layer and the way out, for a model that cannot be attached."""
    for name, module in model.named_modules():
        _require_plain(name, module)
        _require_uncoupled(name, module, batch_first)
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.weight.requires_grad:
            _require_plain_embedding(name, module)
    layers = list(trainable_layers(model))
    if not layers:
        raise ValueError("model must have a trainable parameter (got none with requires_grad)")
    for name, module in layers:
        _require_samplable(name, module)


_RECOMPUTED = {  # hooks that make the weight anew in each forward, by the name of their class
    "BasePruningMethod": (
        "pruned by torch.nn.utils.prune",
        f"{_FIX} keeps the mask as a parametrization",
    ),
    "WeightNorm": (
        "under torch.nn.utils.weight_norm",
        "use torch.nn.utils.parametrizations.weight_norm",
    ),
    "SpectralNorm": (
        "under torch.nn.utils.spectral_norm",
        "leave it out, and bound the weights by clamping them after each optimizer.step()",
    ),
}


def _require_plain(name: str, module: nn.Module) -> None:
    layer = f"{type(module).__name__} {name!r}"
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            f"model must not be scripted or traced (got {layer}), since layers inside cannot be"
            " recorded: attach the module as it was before torch.jit, and use torch.compile for"
            " speed"
        )
    if any(p is not None and p.is_complex() for p in module._parameters.values()):
        raise ValueError(
            f"{layer} must have real weights: make one of the real and one of the imaginary parts,"
            " as torch.view_as_real gives them, and multiply by torch.complex(real, imaginary)"
        )
    if any(isinstance(p, nn.UninitializedParameter) for p in module._parameters.values()):
        raise ValueError(
            f"model must have all its parameters (got {layer}, which is lazy): run it once on a"
            " made-up batch of the data's shape, model(torch.zeros(2, ...)), before dp.attach and"
            " before its optimizer is made"
        )
    for hook in module._forward_pre_hooks.values():
        for kind in type(hook).__mro__:
            if kind.__name__ in _RECOMPUTED:
                what, cure = _RECOMPUTED[kind.__name__]
                raise ValueError(
                    f"{layer} must not be {what}: its weight is computed anew in each forward, so"
                    f" that rows of its parameters are not known; {cure}"
                )


def _require_uncoupled(name: str, module: nn.Module, batch_first: bool) -> None:
    kind = type(module).__name__
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise ValueError(
            f"model must not be replicated (got {kind} {name!r}): attach the module inside, on one"
            " device"
        )
    require_whole(module, name)
    if isinstance(module, BatchNorm) or getattr(module, "track_running_stats", False):
        raise ValueError(
            f"model must not have layers that mix the rows of a batch (got {kind} {name!r}); {_FIX}"
            " replaces BatchNorm by GroupNorm, and leaves running statistics out"
        )
    attends = getattr(module, "attends_batch_first", batch_first)
    if isinstance(module, of_opacus("layers.dp_multihead_attention.DPMultiheadAttention")):
        attends = module.batch_first
    if attends != batch_first:
        # PRIVACY: its rows would be times, not records (test_attention_over_the_batch_dimension_is_refused)
        raise ValueError(
            f"batch_first must be {attends}, that of the attention layer {name!r} (got"
            f" {batch_first}); make the layer with batch_first=True, or attach with"
            " batch_first=False"
        )


def _require_plain_embedding(name: str, module: nn.Embedding | nn.EmbeddingBag) -> None:
    wrong = [
        option
        for option, value in (
            ("max_norm=None", module.max_norm),
            ("scale_grad_by_freq=False", module.scale_grad_by_freq),
            ("sparse=False", module.sparse and isinstance(module, nn.EmbeddingBag)),
            ("mode='sum' or 'mean'", getattr(module, "mode", "") == "max"),
            ("include_last_offset=False", getattr(module, "include_last_offset", False)),
            (
                "padding_idx=None",
                isinstance(module, nn.EmbeddingBag) and module.padding_idx is not None,
            ),
        )
        if value
    ]
    # PRIVACY: max_norm overwrites the weights of the items that occur, without noise
    # (test_layers_without_right_rows_are_refused_by_name_and_nothing_is_left)
    if wrong:
        raise ValueError(
            f"{type(module).__name__} {name!r} must have {' and '.join(wrong)} for per-sample"
            " gradients"
        )


def _require_samplable(name: str, module: nn.Module) -> None:
    layer = f"{type(module).__name__} {name!r}"
    if isinstance(module, (nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)):
        raise ValueError(
            f"{layer} has no per-sample gradients: {_FIX} puts a layer with the same weights that"
            " has them in its place"
        )
    if isinstance(module, (nn.ParameterList, nn.ParameterDict)):
        raise ValueError(
            f"{layer} is never called itself, so that its rows cannot be recorded: make its"
            " parameters attributes of the module that uses them"
        )
    if _has_sampler(module):
        return
    if any(True for _ in module.buffers()):
        raise ValueError(
            f"{layer} has parameters of its own and buffers (spectral_norm and its kin, or a"
            " constant): such a layer has no per-sample gradients; move the parameters into a"
            " module without buffers"
        )
    if any(isinstance(child, DropoutNd) and child.p > 0 for child in module.modules()):
        raise ValueError(
            f"{layer} has parameters of its own, so that it is run again for its rows, with other"
            " dropout masks: move these parameters into a module of their own"
        )
