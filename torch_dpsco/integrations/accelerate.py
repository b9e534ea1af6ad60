"""Private training in a loop of Hugging Face's accelerate: `prepare`, in place of `Accelerator.prepare`.

accelerator = Accelerator()                     # joins the processes that torchrun or accelerate has launched
model.to(accelerator.device)                    # before the optimizer is made
optimizer = dp.ClippedSGD(dp.attach(model).parameters(), plan)
model, optimizer, loader = prepare(accelerator, model, optimizer, optimizer.loader(dataset))
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn, TypeVar

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import nn
from torch.utils.data import DataLoader

from torch_dpsco import _validate as check
from torch_dpsco.errors import PrivacyError, SequenceError, UnknownSamplerError
from torch_dpsco.private_loop import require_replaceable
from torch_dpsco.sampling import PrivateLoader
from torch_dpsco.sampling.loader import to_device
from torch_dpsco.step.checks import require_same_parameters
from torch_dpsco.step.run import CommonOptimizer

_Model = TypeVar("_Model", bound=nn.Module)
_Optimizer = TypeVar("_Optimizer", bound=CommonOptimizer)
_PLAIN = (
    "NO",
    "MULTI_CPU",
    "MULTI_GPU",
)  # distributed types in which each process holds the whole model


def prepare(
    accelerator: Accelerator, model: _Model, optimizer: _Optimizer, loader: PrivateLoader
) -> tuple[_Model, _Optimizer, Any]:
    """Returns model, optimizer and loader for a loop with `accelerator.backward(loss)` and `optimizer.step()`.

    `Accelerator.prepare` would cut batches up, average gradients over processes and skip steps; here the optimizer,
    which knows the processes itself, stays what it is, and the loader too, but that its batches come on the
    accelerator's device. Prepare nothing but loaders for evaluation by the accelerator; step schedulers plainly, on all
    processes.

    Args:
        accelerator: made before the optimizer; its `clip_grad_norm_` and `clip_grad_value_` raise from now on.
        model: plain or attached, on the accelerator's device since before the optimizer was made.
        optimizer: a private one on the model's parameters.
        loader: `optimizer.loader(dataset)`.

    Raises:
        ValueError: mixed precision or gradient accumulation by the accelerator, another device, a wrapped model.
        SequenceError: the optimizer was wrapped, or is not on this model's parameters.
        UnknownSamplerError: the loader is none of the optimizer's.

    Guarantee:
        That of the optimizer. What `accelerator.log` is given is yours to choose: training losses are private.

    Example:
        >>> import torch_dpsco as dp
        >>> accelerator, model = Accelerator(cpu=True), dp.attach(nn.Linear(3, 1))
        >>> plan = dp.HolderSGD.plan(problem=dp.losses.Logistic().problem(bound_x=2.0), n=100,
        ...                          budget=dp.Budget(1.0, 1e-3), batch_size=20, epochs=1)
        >>> optimizer = dp.HolderSGD(model.parameters(), plan)
        >>> data = torch.utils.data.TensorDataset(torch.randn(100, 3), torch.ones(100, 1))
        >>> model, optimizer, loader = prepare(accelerator, model, optimizer, optimizer.loader(data))
        >>> for x, y in loader:
        ...     optimizer.zero_grad()
        ...     accelerator.backward(dp.losses.Logistic()(model(x), y))
        ...     optimizer.step()
        >>> optimizer.steps, optimizer.finalized
        (5, True)
    """
    _require_plain(accelerator, model, optimizer)
    given: Any = loader
    if isinstance(given, DataLoader):
        require_replaceable(given, "loader")
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
    accelerator.clip_grad_norm_ = accelerator.clip_grad_value_ = _refuse_to_clip
    return (
        model,
        optimizer,
        loader if accelerator.device.type == "cpu" else _Placed(loader, accelerator.device),
    )


def _require_plain(
    accelerator: Accelerator, model: nn.Module, optimizer: CommonOptimizer
) -> None:
    if not isinstance(accelerator, Accelerator):
        raise ValueError(
            f"accelerator must be an Accelerator of accelerate (got {check.shown(accelerator)})"
        )
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model must be a Module of torch.nn, the model itself (got {check.shown(model)})"
        )
    kind = DistributedType(accelerator.distributed_type).value
    steps = accelerator.gradient_accumulation_steps
    if kind not in _PLAIN:
        raise ValueError(
            f"distributed_type must be one of {', '.join(_PLAIN)} (got {kind}): {_WHOLE}"
        )
    if accelerator.mixed_precision != "no" or accelerator.scaler is not None:
        raise ValueError(
            f"mixed_precision must be 'no' (got {accelerator.mixed_precision!r}): a scale that"
            " falls where a gradient overflows tells about records; put the forward under"
            " torch.autocast with bfloat16 yourself, and attach with loss_reduction='sum'"
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
    if isinstance(optimizer, AcceleratedOptimizer):
        # PRIVACY: it steps only when it likes (test_objects_that_the_accelerator_has_prepared_are_refused)
        raise SequenceError(
            "optimizer must not go through accelerator.prepare, which makes it leave steps out"
        )
    if not isinstance(optimizer, CommonOptimizer):
        raise ValueError(f"optimizer must be a private one (got {check.shown(optimizer)})")


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
