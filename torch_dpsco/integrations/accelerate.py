"""Private training in a loop of Hugging Face's accelerate: `prepare`, in place of `Accelerator.prepare`.

accelerator = Accelerator()                     # joins the processes that torchrun or accelerate has launched
model.to(accelerator.device)                    # before the optimizer is made
model, optimizer, loader = prepare(accelerator, model, optimizer, data_loader, epsilon=3.0, delta=1e-5)
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import wraps
from typing import Any, NoReturn, TypeVar

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, convert_to_fp32
from torch import nn
from torch.utils.data import DataLoader

from torch_dpsco import _validate as check
from torch_dpsco._validate import typed
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.errors import PrivacyError, SequenceError, UnknownSamplerError
from torch_dpsco.private_loop import make_private, require_replaceable
from torch_dpsco.rows.attach import is_attached
from torch_dpsco.sampling import PrivateLoader
from torch_dpsco.sampling.loader import to_device
from torch_dpsco.step.checks import require_same_parameters
from torch_dpsco.step.run import CommonOptimizer

_Model = TypeVar("_Model", bound=nn.Module)
_USUAL = {"recipe": False, "loss_reduction": "mean"}
_PLAIN = (
    "NO",
    "MULTI_CPU",
    "MULTI_GPU",
)  # distributed types in which each process holds the whole model


@typed
def prepare(
    accelerator: Accelerator,
    model: _Model,
    optimizer: Any,
    loader: Any,
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    budget: Budget | None = None,
    epochs: float | None = None,
    recipe: bool = False,
    loss_reduction: str = "mean",
) -> tuple[_Model, Any, Any]:
    """Returns model, optimizer and loader for a loop with `accelerator.backward(loss)` and `optimizer.step()`.

    `Accelerator.prepare` would cut batches up, average gradients over processes and skip steps; here the optimizer,
    which knows the processes itself, stays what it is, and the loader too, but that its batches come on the
    accelerator's device. Prepare nothing but loaders for evaluation by the accelerator; step schedulers plainly, on all
    processes.

    With a budget, optimizer and loader are torch's, and `dp.make_private` makes them private with its defaults. What
    these lack is said to it, or to a plan: `prepare(accelerator, *dp.make_private(...))`.

    Args:
        accelerator: made before the optimizer; its `clip_grad_norm_` and `clip_grad_value_` raise from now on. With
            mixed_precision="bf16" the model's forward runs in bfloat16, and the loss must sum over the batch.
        model: plain or attached, on the accelerator's device since before the optimizer was made.
        optimizer: a private one on the model's parameters; with a budget, any torch optimizer.
        loader: `optimizer.loader(dataset)`; with a budget, the DataLoader.
        epsilon: see `dp.make_private`, like all that follows.
        delta: see `epsilon`.
        budget: see `epsilon`.
        epochs: how long the loop is; default 10.
        recipe: see `epsilon`.
        loss_reduction: see `epsilon`.

    Raises:
        ValueError: mixed precision or gradient accumulation by the accelerator, another device, a wrapped model.
        SequenceError: the optimizer was wrapped, or is not on this model's parameters.
        UnknownSamplerError: the loader is none of the optimizer's.

    Guarantee:
        That of the optimizer. What `accelerator.log` is given is yours to choose: training losses are private.

    Example:
        >>> import torch_dpsco as dp
        >>> accelerator, model = Accelerator(cpu=True), nn.Linear(3, 1)
        >>> data = torch.utils.data.TensorDataset(torch.randn(100, 3), torch.ones(100, 1))
        >>> model, optimizer, loader = prepare(
        ...     accelerator, model, torch.optim.AdamW(model.parameters()), DataLoader(data, 20, shuffle=True),
        ...     epsilon=1.0, delta=1e-3, epochs=1)  # doctest: +ELLIPSIS
        NetPlan: ...
        >>> for x, y in loader:
        ...     optimizer.zero_grad()
        ...     accelerator.backward(dp.losses.Logistic()(model(x), y))
        ...     optimizer.step()
        >>> optimizer.steps, optimizer.finalized
        (5, True)
    """
    _require_plain(accelerator, model)
    settings: dict[str, Any] = {
        "epsilon": epsilon,
        "delta": delta,
        "budget": budget,
        "epochs": epochs,
        "recipe": recipe,
        "loss_reduction": loss_reduction,
    }
    if isinstance(optimizer, CommonOptimizer):
        _require_usual(settings)
    elif (epsilon, delta, budget) != (None, None, None):
        model, optimizer, loader = make_private(model, optimizer, loader, **settings)
    _require_private(optimizer)
    if isinstance(loader, DataLoader):
        require_replaceable(loader, "loader")
    if not isinstance(loader, PrivateLoader):
        # PRIVACY: a loader of accelerate delivers other batches than were drawn
        # (test_objects_that_the_accelerator_has_prepared_are_refused)
        raise UnknownSamplerError(
            f"loader must be optimizer.loader(dataset) (got {type(loader).__name__})"
        )
    require_same_parameters(model, optimizer)
    elsewhere = {p.device.type for p in model.parameters()} - {accelerator.device.type}
    if elsewhere:
        raise ValueError(
            f"model must be on {accelerator.device}, the accelerator's device (got"
            f" {', '.join(sorted(elsewhere))}): call model.to(accelerator.device) before the"
            " optimizer is made"
        )
    if accelerator.mixed_precision == "bf16":
        _cast(accelerator, model)
    accelerator.clip_grad_norm_ = accelerator.clip_grad_value_ = _refuse_to_clip
    return (
        model,
        optimizer,
        loader if accelerator.device.type == "cpu" else _Placed(loader, accelerator.device),
    )


def _require_plain(accelerator: Accelerator, model: nn.Module) -> None:
    kind = DistributedType(accelerator.distributed_type).value
    steps = accelerator.gradient_accumulation_steps
    if kind not in _PLAIN:
        raise ValueError(
            f"distributed_type must be one of {', '.join(_PLAIN)} (got {kind}): {_WHOLE}"
        )
    if accelerator.mixed_precision not in ("no", "bf16") or accelerator.scaler is not None:
        raise ValueError(
            f"mixed_precision must be 'no' or 'bf16' (got {accelerator.mixed_precision!r}): a scale"
            " that falls where a gradient overflows tells about records"
        )
    if steps != 1:
        raise ValueError(
            f"gradient_accumulation_steps must be 1 (got {steps}): a step takes one whole draw;"
            " optimizer.loader(dataset, physical_batch_size=...) delivers it in parts that fit"
            " into memory"
        )
    for module in model.modules():
        name = type(module).__name__
        replicated = isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel))
        if replicated or name.startswith(("FullySharded", "FSDP", "DeepSpeedEngine")):
            raise ValueError(f"model must not be wrapped (got {name}): {_WHOLE}")


def _require_usual(settings: dict[str, Any]) -> None:
    """Raises ValueError for a setting of `dp.make_private` beside an optimizer that is private already."""
    for name, value in settings.items():
        if value != _USUAL.get(name):
            raise ValueError(
                f"{name} must be left out for an optimizer that is private already, whose plan has"
                f" it (got {check.shown(value)})"
            )


def _require_private(optimizer: Any) -> None:
    if isinstance(optimizer, AcceleratedOptimizer):
        # PRIVACY: it steps only when it likes (test_objects_that_the_accelerator_has_prepared_are_refused)
        raise SequenceError(
            "optimizer must not go through accelerator.prepare, which makes it leave steps out"
        )
    if not isinstance(optimizer, CommonOptimizer):
        raise ValueError(
            f"optimizer must be a private one, or epsilon and delta be given (got"
            f" {check.shown(optimizer)})"
        )


def _cast(accelerator: Accelerator, model: nn.Module) -> None:
    """Makes the forward run in bfloat16, with outputs in float32, as `Accelerator.prepare` does."""
    if is_attached(model) and model._dpsco.mean:
        raise ValueError(
            "loss_reduction must be 'sum' with mixed_precision='bf16' (got 'mean'): bfloat16 would"
            " round one over the number of rows, which may be private, in each of them;"
            " criterion(..., reduction='sum'), and the optimizer divides"
        )
    forward = model.forward

    @wraps(forward)
    def cast(*args: Any, **kwargs: Any) -> Any:
        with accelerator.autocast():
            output = forward(*args, **kwargs)
        return convert_to_fp32(output)

    model.forward = cast


_WHOLE = (
    "records are clipped one by one, by processes that hold the whole model each, before anything"
    " is added up; make Accelerator() without a plugin, and pass the module itself"
)


def _refuse_to_clip(*args: Any, **kwargs: Any) -> NoReturn:
    # PRIVACY: a norm of private rows, or of a noisy mean, bounds no record
    # (test_the_accelerator_clips_no_gradients_any_more)
    raise PrivacyError(
        "accelerator.clip_grad_norm_ must not be called: rows are clipped one by one in"
        " optimizer.step(), at the clip of the plan; leave the call out"
    )


class _Placed:
    """The batches of a loader, on a device.

    Args:
        loader: `optimizer.loader(dataset)`.
        device: of the accelerator.
    """

    def __init__(self, loader: PrivateLoader, device: torch.device) -> None:
        self._loader = loader
        self._device = device

    @property
    def dataset(self) -> Any:
        """The data set."""
        return self._loader.dataset

    def __len__(self) -> int:
        """Draws per iteration."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield to_device(batch, self._device)
