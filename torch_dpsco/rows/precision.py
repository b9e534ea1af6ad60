"""Whether products run in full precision, which float32 sums and the 1/B of a mean loss rely on.

A mean loss divides each record's gradient by the batch size before the backward, and rows are multiplied by it again.
Where a product on the way rounds to fewer bits than float32 has, the rounding of 1/B is in ALL rows: one record more
moves each of them by up to 2^-9 of its length, B of them by many clips. `inexact_mean` is the one check; a loss
that sums has no 1/B, and is never refused.

Source: docs/proofs/rounding.md#products-in-reduced-precision.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_dpsco.compat import ConvNd
from torch_dpsco.errors import SequenceError

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
    except (
        RuntimeError
    ):  # set through torch's newer per-backend switches: unknown, so assume the worst
        return False


def _fpmath_mode() -> str | None:
    """Returns the environment variable that lets oneDNN round products, None if there is none."""
    for name, key in _ONEDNN.items():
        if (value := _ENVIRONMENT.get(key)) is not None and os.fsdecode(value).upper() != "STRICT":
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
    default = (library, switch.fp32_precision, backend.fp32_precision) == ("cudnn", "tf32", "none")
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
