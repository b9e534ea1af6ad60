"""Which models can be attached, which parameters an Opacus optimizer has taken, and how precise products are.

Float32 sums and the 1/B of a mean loss rely on products in full precision. A mean loss divides each record's gradient
by the batch size before the backward, and rows are multiplied by it again. Where a product on the way rounds to fewer
bits than float32 has, the rounding of 1/B is in ALL rows: one record more moves each of them by up to 2^-9 of its
length, B of them by many clips. `inexact_mean` is the one check; a loss that sums has no 1/B, and is never refused.

Source: docs/proofs/rounding.md#products-in-reduced-precision.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_dpsco._loaded import of_opacus
from torch_dpsco.compat import BatchNorm, ConvNd, DropoutNd, is_replicated, is_sharded
from torch_dpsco.errors import SequenceError

_FIX = "opacus.validators.ModuleValidator.fix(model)"


# layers with a grad sampler of Opacus', which takes seconds to import
_KNOWN = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LayerNorm, nn.GroupNorm, nn.Embedding)


def _has_sampler(module: nn.Module) -> bool:
    if type(module) in _KNOWN:
        return True
    from opacus.grad_sample.grad_sample_module import GradSampleHooks

    return type(module) in GradSampleHooks.GRAD_SAMPLERS


def trainable_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the layers as Opacus cuts them: one with parameters of its own and no grad sampler is handled whole."""

    def walk(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if any(p.requires_grad for p in module.parameters(recurse=False)):
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
        (
            "call prune.remove(layer, 'weight') before attach, and multiply the weight by its mask"
            " after each optimizer.step() to keep its zeros"
        ),
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
    _require_whole(module, name)
    if isinstance(module, BatchNorm) or getattr(module, "track_running_stats", False):
        raise ValueError(
            f"model must not have layers that mix the rows of a batch (got {kind} {name!r}); {_FIX}"
            " replaces them by GroupNorm"
        )
    if (
        isinstance(module, of_opacus("layers.dp_multihead_attention.DPMultiheadAttention"))
        and module.batch_first != batch_first
    ):
        # PRIVACY: its rows would be times, not records (test_attention_over_the_batch_dimension_is_refused)
        raise ValueError(
            f"batch_first must be {module.batch_first}, that of the attention layer {name!r} (got"
            f" {batch_first}); make the layer with batch_first=True, or attach with"
            " batch_first=False"
        )


def _require_whole(module: nn.Module, name: str = "") -> None:
    # PRIVACY: a layer cut by tensor parallelism sees a part of each row, whose norm is too small
    # (test_layers_without_right_rows_are_refused_by_name_and_nothing_is_left,
    # test_a_wrapped_or_sharded_model_is_refused_by_name)
    if is_sharded(module) or any(
        is_sharded(p) for p in module._parameters.values() if p is not None
    ):
        raise ValueError(
            f"model must not be sharded (got {type(module).__name__} {name!r}): rows are clipped"
            " and noised for whole parameters; leave fully_shard, FSDP or parallelize_module out"
            " and give every process the whole model, see docs/distributed.md"
        )


def require_whole(model: nn.Module) -> None:
    """Raises ValueError for a model, or a part of one, under `fully_shard`, FSDP 1 or `parallelize_module`."""
    for name, module in model.named_modules():
        _require_whole(module, name)


def _require_plain_embedding(name: str, module: nn.Embedding | nn.EmbeddingBag) -> None:
    wrong = [
        option
        for option, value in (
            ("max_norm=None", module.max_norm),
            ("scale_grad_by_freq=False", module.scale_grad_by_freq),
            ("sparse=False", module.sparse),
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
    if isinstance(module, (nn.MultiheadAttention, nn.LSTM, nn.GRU)):
        raise ValueError(
            f"{layer} has no per-sample gradients: {_FIX} replaces it by a layer that has"
        )
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        raise ValueError(
            f"{layer} has no per-sample gradients: use DPRNN, DPGRU or DPLSTM of opacus.layers"
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


def require_known(layer: nn.Module, params: Iterable[Tensor]) -> None:
    """Raises SequenceError if a layer runs with trained parameters that `attach` has not seen."""
    if any(p.requires_grad and not hasattr(p, "dpsco_reset") for p in params):
        _require_whole(layer)
        # PRIVACY: rows at one point would be taken for rows at another
        # (test_weights_that_attach_has_not_seen_are_refused)
        raise SequenceError(
            f"layer {type(layer).__name__} has trained parameters that it did not have at dp.attach"
            " (functional_call, load_state_dict(assign=True), requires_grad_, a copy of a part):"
            " attach the model after such changes, or use a copy of it that is detached"
        )


def require_alone(model: nn.Module) -> None:
    """Raises an error in a forward of an attached model that FSDP has taken, or that DistributedDataParallel makes."""
    if is_sharded(model):  # FSDP 1 takes the parameters away, so that no layer would look at them
        _require_whole(model)
    if is_replicated(model):
        raise SequenceError(
            "model must not be replicated (got a forward of DistributedDataParallel): its backward"
            " waits for all ranks, of which some may have no rows; call the module inside, whose"
            " optimizer joins the ranks by itself"
        )


_ON_PARAMETERS = "summed_grad"
_ON_ROWS = "_processed"
_WRAPPED = (
    "the parameters belong to an Opacus DPOptimizer: it must not wrap a private optimizer (by"
    " PrivacyEngine.make_private, say), nor train a model of dp.attach; leave Opacus' engine out"
    " and use optimizer.loader(dataset)"
)


def forget_wrappers(params: Iterable[nn.Parameter]) -> None:
    """Removes what an earlier Opacus optimizer left on the parameters, so that a later one can be recognized."""
    for p in params:
        p.__dict__.pop(_ON_PARAMETERS, None)


def require_unwrapped(params: Sequence[nn.Parameter]) -> None:
    """Raises SequenceError if an Opacus optimizer took the parameters since a private optimizer was made."""
    # PRIVACY: it would count ordinary steps while ours runs on what it left of the rows
    # (test_an_opacus_optimizer_around_ours_cannot_step)
    marked = [p for p in params if _ON_PARAMETERS in p.__dict__]
    if marked:
        for p in params:  # sums of rows, which no ledger of ours knows; the mark stays
            p.grad = None
        for p in marked:
            p.__dict__[_ON_PARAMETERS] = None
        raise SequenceError(_WRAPPED)


def require_unprocessed(rows: Sequence[Tensor]) -> None:
    """Raises SequenceError if an Opacus optimizer has clipped and noised these rows already."""
    if any(hasattr(chunk, _ON_ROWS) for chunk in rows):
        raise SequenceError(_WRAPPED)


HALF = (torch.bfloat16, torch.float16)
_EXACT = ("none", "ieee")
# Environment variables of torch's CPU kernels; read in each step, and as bytes faster than as text.
_ENVIRONMENT: Any = getattr(os, "environb", os.environ)
_ONEDNN = {
    name: name.encode() if hasattr(os, "environb") else name
    for name in ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE")
}


def require_full_precision(backprops: Tensor) -> None:
    """Raises SequenceError for half-precision gradients of a mean loss: one record more would move all of them."""
    if backprops.dtype in HALF:
        raise SequenceError(
            "a backward in half precision needs a loss that sums over the batch: dp.attach(model,"
            " loss_reduction='sum') and criterion(..., reduction='sum'); the optimizer divides by"
            " the batch size"
        )


def products_are_exact() -> bool:
    """Returns whether float32 products run in float32: TensorFloat-32 and bfloat16 shortcuts are off."""
    return _fpmath_mode() is None and _matmul_is_exact()


def _matmul_is_exact() -> bool:
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:
        # set through torch's newer per-backend switches: unknown, so assume the worst
        return False


def _fpmath_mode() -> str | None:
    """Returns the environment variable that lets oneDNN round products, None if there is none."""
    for name, key in _ONEDNN.items():
        if (value := _ENVIRONMENT.get(key)) is not None and os.fsdecode(
            value
        ).upper() != "STRICT":
            return name
    return None


def slack(dtype: torch.dtype) -> float:
    """Returns how far two ways to compute a gradient may be apart, relative to its size, without one being wrong."""
    return 3e-2 if dtype in HALF or not products_are_exact() else 1e-3


class Coarse(NamedTuple):
    """A setting that makes products round to fewer bits than float32 has, and how to switch it off."""

    setting: str
    cure: str


def coarse_setting(layers: Iterable[nn.Module], params: Sequence[Tensor]) -> Coarse | None:
    """Returns the setting by which a backward rounds to fewer bits than float32 has; None if there is none.

    Args:
        layers: of the model; convolutions and recurrent layers have switches of their own.
        params: its trained parameters. Products of float64 numbers have no shortcut.
    """
    layers = list(layers)
    if not params:
        return None
    if params[0].dtype == torch.float64:
        known = (*params, *(p for layer in layers for p in layer.parameters(recurse=False)))
        # PRIVACY: frozen ones too lie between the loss and the rows
        # (test_frozen_single_precision_counts_for_a_mean_loss)
        if all(p.dtype == torch.float64 for p in known):
            return None
    device = params[0].device.type
    if torch.is_autocast_enabled(device):
        return Coarse(f"torch.autocast({device!r})", "leave it before loss and backward")
    if variable := _fpmath_mode():
        return Coarse(
            f"the environment variable {variable}={os.environ[variable]}",
            f"unset {variable} and start anew",
        )
    if not _matmul_is_exact():
        setting = (
            "torch.set_float32_matmul_precision, or another switch of products in reduced"
            " precision,"
        )
        return Coarse(setting, "torch.set_float32_matmul_precision('highest')")
    library = "cudnn" if device == "cuda" else "mkldnn"
    kinds = [("conv", ConvNd), ("rnn", nn.RNNBase)]
    used = [name for name, kind in kinds if any(isinstance(layer, kind) for layer in layers)]
    return next((found for name in used if (found := _coarse_kernels(library, name))), None)


def _coarse_kernels(library: str, kernels: str) -> Coarse | None:
    """Returns the switch by which convolutions or recurrent layers are rounded; torch < 2.9 has one for CUDA only."""
    backend = getattr(torch.backends, library)
    switch = getattr(backend, kernels, None)
    for_all = f"torch.backends.{library}.allow_tf32"
    if switch is None:
        return (
            Coarse(f"{for_all}=True", f"{for_all} = False")
            if getattr(backend, "allow_tf32", False)
            else None
        )
    if switch.fp32_precision in _EXACT:
        return None
    own = f"torch.backends.{library}.{kernels}.fp32_precision"
    # on by default on CUDA, where nothing was asked for
    default = (library, switch.fp32_precision, backend.fp32_precision) == (
        "cudnn",
        "tf32",
        "none",
    )
    return Coarse(
        f"{own}={switch.fp32_precision!r}", f"{for_all} = False" if default else f"{own} = 'ieee'"
    )


def switches() -> tuple[object, ...]:
    """Returns everything that says how products are rounded on any device, to tell whether it was changed."""
    try:
        for_all = torch.get_float32_matmul_precision()
    except RuntimeError:  # as in `products_are_exact`
        for_all = "mixed"
    products = [
        getattr(getattr(torch.backends, name), "matmul", None) for name in ("cuda", "mkldnn")
    ]
    kernels = [
        _coarse_kernels(library, name)
        for library in ("cudnn", "mkldnn")
        for name in ("conv", "rnn")
    ]
    return (
        for_all,
        _fpmath_mode(),
        *(getattr(product, "fp32_precision", None) for product in products),
        *kernels,
    )


def inexact_mean(layers: Iterable[nn.Module], params: Sequence[Tensor]) -> str | None:
    """Returns why a mean loss must be refused, None where it is divided by B in all the bits of its numbers.

    Args:
        layers: of the model, as far as they are known.
        params: its trained parameters.
    """
    found = coarse_setting(layers, params)
    if found is None:
        return None
    # PRIVACY: one record more moves all rows of a mean (test_a_mean_loss_in_reduced_matmul_precision_is_refused)
    return (
        f"a mean loss needs products in full precision, and {found.setting} rounds its 1/B to fewer"
        " bits, in the rows of all records: use a loss that sums, dp.attach(model,"
        " loss_reduction='sum') and criterion(..., reduction='sum') (the optimizer divides by the"
        f" batch size), or switch it off: {found.cure}"
    )
