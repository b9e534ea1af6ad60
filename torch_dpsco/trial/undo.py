"""Users' code on synthetic records: every exception is an answer, and every change is undone.

A copy of the model would be safer still, but a loss that reaches the model by a closure (a regularizer, say) would go
on using the original and escape the probe. So the probes run on the objects themselves, and this module restores:

* the class and the attributes of every module and parameter, and of the helper objects of torch_dpsco and Opacus on
  them, with the contents of the lists and dictionaries among these attributes (hooks, buffers, rows, modes, counters);
* the values of parameters, buffers and tensor attributes, and `grad`;
* the global random streams of torch (CPU and CUDA), numpy and python, and torch's generators among the attributes.

What a forward changes elsewhere (a file, a list inside of a list) cannot be undone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

_T = TypeVar("_T")


@dataclass(frozen=True)
class Refused:
    """What could not be done, and the exception that was raised."""

    what: str
    error: Exception

    def __str__(self) -> str:
        lines = str(self.error).strip().splitlines() or [""]
        return f"{self.what} raised {type(self.error).__name__}: {lines[0][:300]}"


def attempt(what: str, call: Callable[[], _T]) -> _T | Refused:
    """Returns what the call returns, or how it failed.

    The one place of the package that catches every Exception: models, losses, data sets and collate functions of users
    raise what they like on a synthetic batch, and a diagnosis must say so instead of failing with them. What a decoder
    of users raises on a real record (`integrations.tar`) nobody may see.
    """
    try:
        return call()
    except Exception as error:
        return Refused(what, error)


_HELPERS = ("torch_dpsco.", "opacus.")


def same_values(first: Tensor, second: Tensor) -> bool:
    """Returns whether two tensors hold the same numbers, NaN being equal to NaN."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if first.is_meta or torch.equal(first, second):
        return True
    return bool(((first == second) | ((first != first) & (second != second))).all())


def seed_torch(seed: int) -> None:
    """Seeds the generators that are in use; `torch.manual_seed` would also queue a seed for a CUDA that is not."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        for generator in torch.cuda.default_generators:
            generator.manual_seed(seed)


class RandomStreams:
    """The states of the global random streams."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self._numpy, self._python = np.random.get_state(), random.getstate()  # noqa: NPY002

    def restore(self) -> None:
        """Puts them back."""
        torch.set_rng_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        np.random.set_state(self._numpy)  # noqa: NPY002
        random.setstate(self._python)


class Attributes:
    """The attributes of objects, with the contents of lists and dictionaries among them."""

    def __init__(self, things: Iterable[Any]) -> None:
        self._objects = [(x, type(x), dict(vars(x)), _contents(x)) for x in things]

    def rewind(self) -> None:
        """Puts them back, but no values of tensors."""
        for thing, kind, attributes, contents in self._objects:
            if type(thing) is not kind:
                object.__setattr__(thing, "__class__", kind)
            vars(thing).clear()
            vars(thing).update(attributes)
            for container, items in contents:
                container.clear()
                container.update(items) if isinstance(container, dict) else container.extend(
                    items
                )

    def new_tensors(self) -> list[str]:
        """Returns the names of the attributes that are other tensors now."""
        return sorted(
            f"{kind.__name__}.{name}"
            for thing, kind, attributes, _ in self._objects
            for name, value in vars(thing).items()
            if isinstance(value, Tensor) and value is not attributes.get(name)
        )


class Memory:
    """What modules, and plain objects among their attributes, keep from forward to forward.

    Args:
        modules: whose parameters and buffers are left out.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        attributes = [value for m in modules for value in vars(m).values()]
        keepers = [*modules, *filter(_is_keeper, attributes)]
        self.attributes = Attributes(keepers)
        released: set[int] = set()
        for m in modules:
            released.update(map(id, (*m._parameters.values(), *m._buffers.values())))
        held = [value for keeper in keepers for value in vars(keeper).values()]
        for container in [value for value in held if isinstance(value, (list, dict))]:
            held += container.values() if isinstance(container, dict) else container
        kept = [
            value for value in held if isinstance(value, Tensor) and id(value) not in released
        ]
        self._values = [(t, t.detach().clone()) for t in kept]

    def rewind(self) -> None:
        """Puts it back."""
        self.attributes.rewind()
        for t, saved in self._values:
            if not same_values(t.detach(), saved):
                t.data.copy_(saved)


class Untouched:
    """The state of a model and of what trains it, at the time of construction.

    Args:
        model: its modules and parameters are taken with all their attributes.
        others: more objects whose attributes are to be restored (optimizer, loss, hooks).
    """

    def __init__(self, model: nn.Module, others: Iterable[Any] = ()) -> None:
        self.streams = RandomStreams()
        self.modules = list(model.modules())
        self.params = list(model.parameters())
        objects = list(_with_helpers([*self.modules, *self.params, *others]))
        self._attributes = Attributes(objects)
        attributes = [value for thing in objects for value in vars(thing).values()]
        generators = [value for value in attributes if isinstance(value, torch.Generator)]
        self._generators = [(g, g.get_state()) for g in generators]
        self._hooks = [(hooks, dict(hooks)) for p in self.params for hooks in _tensor_hooks(p)]
        self._grads = [(p, p.grad, p.requires_grad) for p in self.params]
        self._values = [(place, t, t.detach().clone()) for place, t in _tensors(self.modules)]

    def rewind(self) -> None:
        """Puts attributes and random streams back, but no values of tensors and nothing that is on parameters."""
        self._attributes.rewind()
        for generator, saved in self._generators:
            generator.set_state(saved)
        self.streams.restore()

    def restore(self, moved: Mapping[int, Tensor] = MappingProxyType({})) -> None:
        """Puts everything back.

        Args:
            moved: other values, by the id of their tensor, instead of those that were saved.
        """
        self.rewind()
        for p, grad, requires_grad in self._grads:
            p.grad = grad
            p.requires_grad_(requires_grad)
        # hooks that were added to a parameter that had none live in a dictionary that was not there
        known = {id(hooks) for hooks, _ in self._hooks}
        for p in self.params:
            for hooks in _tensor_hooks(p):
                if id(hooks) not in known:
                    hooks.clear()
        for hooks, items in self._hooks:
            hooks.clear()
            hooks.update(items)
        for _, t, saved in self._values:
            if t.requires_grad or not same_values(t.detach(), saved):
                # what is frozen may be memory that others read
                t.data.copy_(moved.get(id(t), saved))

    def changed(self) -> list[str]:
        """Returns the names of the tensors that no optimizer privatizes (buffers, frozen) and whose values changed."""
        names = set()
        for (module, holder, name), t, saved in self._values:
            now = holder.get(name)
            if not t.requires_grad and (now is None or not same_values(now.detach(), saved)):
                names.add(f"{type(module).__name__}.{name}")
        return sorted(names)


def _contents(thing: Any) -> list[tuple[Any, Any]]:
    """Returns the lists and dictionaries among the attributes, with copies of what they hold."""
    containers = (value for value in vars(thing).values() if isinstance(value, (dict, list)))
    return [(container, container.copy()) for container in containers]


def _is_keeper(thing: Any) -> bool:
    ours = type(thing).__module__.startswith(_HELPERS)
    plain = hasattr(thing, "__dict__") and not isinstance(thing, Tensor)
    return plain and not ours and not callable(thing)


def _with_helpers(things: list[Any]) -> Iterator[Any]:
    """Yields the things and, on them, the objects of torch_dpsco and Opacus that hold state."""
    seen: set[int] = set()
    queue = list(things)
    while queue:
        thing = queue.pop()
        if id(thing) in seen or isinstance(thing, type) or not hasattr(thing, "__dict__"):
            continue
        seen.add(id(thing))
        yield thing
        for value in list(vars(thing).values()):
            if type(value).__module__.startswith(_HELPERS) and not isinstance(value, nn.Module):
                queue.append(value)


def _tensor_hooks(p: Tensor) -> Iterator[Any]:
    for hooks in (p._backward_hooks, getattr(p, "_post_accumulate_grad_hooks", None)):
        if hooks is not None:
            yield hooks


def _tensors(
    modules: list[nn.Module],
) -> Iterator[tuple[tuple[nn.Module, dict[str, Any], str], Tensor]]:
    """Yields each tensor once, with the module, the dictionary and the name under which it is held."""
    seen: set[int] = set()
    for module in modules:
        for holder in (module._parameters, module._buffers, vars(module)):
            for name, value in holder.items():
                if isinstance(value, Tensor) and id(value) not in seen:
                    seen.add(id(value))
                    yield (module, holder, name), value
