"""Finds edits of a row-free optimizer's gradients, iterates and averages, and gradients beyond their bounds.

Nothing is clipped there, so that the noise covers exactly the planned steps with the gradients of the promised loss. An
edit through `.data` leaves no trace in a tensor's version, so that values are compared with copies (of a linear model
in double precision: small). Not seen, and promised: what the loop computes between the batch and `backward()`.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.utils import get_total_norm
from torch.optim.optimizer import Optimizer

from torch_dpsco.algorithms.output_sgd_numbers import LossPromises
from torch_dpsco.errors import SequenceError

_SLACK = (
    1 + 1e-6
)  # of norms and their bound: rounding is below 1e-9 for any batch that fits into memory


class Backwards:
    """Makes sure that a step uses the gradient of one backward, unchanged and without hooks of others.

    Args:
        params: whose gradients are watched until `close`.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params = params
        self._counts = [0] * len(params)
        self._seen: list[Tensor | None] = [None] * len(params)
        self._hooked = ""  # a kind of module with backward hooks that was called
        this = weakref.ref(self)
        self._handles: list[Any] = [
            p.register_post_accumulate_grad_hook(lambda p, k=k: _tell(this, k, p))
            for k, p in enumerate(params)
        ]
        self._handles.append(register_module_forward_pre_hook(_Onlooker(this)))
        for handle in self._handles:
            weakref.finalize(self, handle.remove)

    def close(self) -> None:
        """Stops watching."""
        for handle in self._handles:
            handle.remove()

    def clear(self) -> None:
        """Forgets gradients and backwards."""
        for p in self._params:
            p.grad = None
        self._counts[:], self._hooked = [0] * len(self._params), ""

    def note(self, k: int, gradient: Tensor | None) -> None:
        """Notes what a backward has left on parameter k."""
        self._counts[k] += 1
        self._seen[k] = None if gradient is None else gradient.clone()

    def look_at(self, module: nn.Module) -> None:
        """Notes a module whose hooks could change gradients."""
        if torch.is_grad_enabled() and (module._backward_hooks or module._backward_pre_hooks):
            self._hooked = type(module).__name__

    def require_one(self) -> None:
        """Raises SequenceError, and clears the gradients, unless they are those of one backward as it left them."""
        params = self._params
        if any(p.grad is None for p in params):
            raise SequenceError(
                "p.grad must hold the gradient of the batch (got None): call backward() first, on a"
                " model that is not attached: this optimizer needs no per-sample gradients"
            )
        if self._counts != [1] * len(params):
            # PRIVACY: a second gradient doubles what a record moves (test_gradients_of_two_passes_are_refused)
            counts = sorted(set(self._counts))
            self._refuse(
                "a step must use the gradient of exactly one backward pass over its batch (got"
                f" {counts})"
            )
        if any(p._backward_hooks or len(_after_accumulation(p)) > 1 for p in params):
            # PRIVACY: 100 times the gradient moves the answer 100 times as far
            # (test_a_hook_that_could_change_gradients_is_refused)
            self._refuse(
                "parameters must have no hooks of others, which could change gradients: remove them"
            )
        if self._hooked:
            self._refuse(
                "modules must have no backward hooks, which could change gradients (got a"
                f" {self._hooked})"
            )
        if not all(_same(p.grad, seen) for p, seen in zip(params, self._seen, strict=True)):
            # PRIVACY: a clipped mean, or a term on the weights, is not what the sensitivity was computed for
            # (test_a_gradient_changed_after_its_backward_is_refused)
            self._refuse(
                "p.grad must be what backward() left there (got a changed one): do not clip, scale"
                " or decay it"
            )

    def _refuse(self, message: str) -> None:
        self.clear()
        raise SequenceError(f"{message}; gradients were cleared; compute it again")


def _tell(watch: weakref.ref[Backwards], k: int, p: Tensor) -> None:
    backwards = watch()
    if backwards is not None:
        backwards.note(k, p.grad)


class _Onlooker:
    """A hook that changes no forward: other models may be called while it is installed."""

    only_looks = True

    def __init__(self, watch: weakref.ref[Backwards]) -> None:
        self._watch = watch

    def __call__(self, module: nn.Module, _: Any) -> None:
        backwards = self._watch()
        if backwards is not None:
            backwards.look_at(module)


def _after_accumulation(p: nn.Parameter) -> Mapping[int, Any]:
    return getattr(p, "_post_accumulate_grad_hooks", None) or {}


class Kept:
    """Copies of iterates and averages, taken after each step.

    Args:
        params: hold the iterates.
        optimizer: its state holds the averages.
        backwards: of the parameters, which are forgotten if they were of an edited iterate.
    """

    def __init__(
        self, params: Sequence[nn.Parameter], optimizer: Optimizer, backwards: Backwards
    ) -> None:
        self._params = params
        self._optimizer = optimizer
        self._backwards = backwards
        self.note()

    @property
    def iterates(self) -> list[Tensor]:
        """The copies of the iterates."""
        return [value for value, _ in self._copies]

    def note(self, iterates: Sequence[Tensor] | None = None) -> None:
        """Takes copies of what is there now; `iterates`: of these, which the parameters should hold."""
        values = [p.detach() for p in self._params] if iterates is None else iterates
        averages = [self._average(p) for p in self._params]
        self._copies = [
            (value.to(p.device, copy=True), None if average is None else average.clone())
            for p, value, average in zip(self._params, values, averages, strict=True)
        ]

    def _average(self, p: Tensor) -> Tensor | None:
        average: Tensor | None = self._optimizer.state.get(p, {}).get("average")
        return average

    @torch.no_grad()
    def require_same(self) -> None:
        """Raises SequenceError if something was edited since `note`, after putting it back."""
        edited = False
        for p, (value, average) in zip(self._params, self._copies, strict=True):
            if not _same(p.detach(), value):
                edited = True
                p.copy_(value)
            if not _same(self._average(p), average):
                edited = True
                self._optimizer.state[p] = {} if average is None else {"average": average.clone()}
        if edited:
            self._backwards.clear()
            raise SequenceError(
                "parameters and averages must be what the last step left there, and parameters must"
                " be 0, the planned start, before the first one (got edited ones, which were put"
                " back; gradients were cleared): do not initialize or change them; after loading a"
                " checkpoint load the model's state of the same one too"
            )


def keeps_promises(params: Sequence[nn.Parameter], promises: LossPromises, rows: int) -> bool:
    """Returns whether the gradient that the parameters hold is one that the promises allow.

    Args:
        params: the iterate, with the gradient of a batch.
        promises: about the gradient of any record.
        rows: how many such gradients are added up in it, 1 for a mean.
    """
    reach = float(get_total_norm([p.detach() for p in params])) * _SLACK + 1e-9
    promised = promises.grad_bound(reach) + (promises.gradient_error or 0.0)
    found = float(get_total_norm([p.grad for p in params if p.grad is not None])) / max(1, rows)
    return found <= promised * _SLACK  # not for NaN


def _same(now: Tensor | None, then: Tensor | None) -> bool:
    if now is None or then is None:
        return now is then
    if now.dtype != torch.float64 or then.dtype != now.dtype:
        return False
    return torch.equal(
        now.view(torch.int64), then.to(now.device).view(torch.int64)
    )  # to the bit, for NaN too
