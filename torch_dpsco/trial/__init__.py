"""ONE engine that tries made-up records: what a function gives for a record must not move with the records beside it.

A function is a model, the operations of a loss, a training pass; what it gives for each record is an `Answer`:
outputs, or rows. `compare` makes one record 1000 times as small, 10,000 times as large, NaN, or another one, and moves
the median of small and large records by one; the answers of the other records must stay, up to rounding. `isolation`
moves a record to other sizes and companies; its answer must stay to the last bit. Who asks: the first step of
an attached model, compiled rows, the trace of a loss, the doctor and by it `fit`.

Values of records play no part: tensors of the shapes and dtypes of a batch are filled with numbers in (0.25, 0.75), or
with ones for integers.

Users' code on synthetic records: every exception is an answer, and every change is undone.

A copy of the model would be safer still, but a loss that reaches the model by a closure (a regularizer, say) would go
on using the original and escape the probe. So the probes run on the objects themselves, and this module restores:

* the class and the attributes of every module and parameter, and of the helper objects of torch_dpsco and Opacus on
  them, with the contents of the lists and dictionaries among these attributes (hooks, buffers, rows, modes, counters);
* the values of parameters, buffers and tensor attributes, and `grad`;
* the global random streams of torch (CPU and CUDA), numpy and python, and torch's generators among the attributes.

Of large frozen parameters, most of a model of which little is trained, no copy is made: a change of them is refused.
What a forward changes elsewhere (a file, a list inside of a list) cannot be undone.
"""

from __future__ import annotations

import hashlib
import math
import random
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from torch_dpsco.errors import PrivacyError
from torch_dpsco.native import HALF

CHECKED = (
    "checked at the first step on made-up records, some of them far out: none reaches another"
)
SEED = 5_000_011  # of what is random in the functions, the same in each call
_LARGE = 2**18  # numbers of a frozen parameter
SMALL = 1e-3
LARGE = 1e4
_OUTLIERS = {
    SMALL: "a record 1000 times as small",
    LARGE: "a record 10,000 times as large",
    math.nan: "a record of NaN",
}


class Answer(NamedTuple):
    """What a function gives for each record of a batch.

    Args:
        numbers: (records, ...) float64, in memory of their own: the next batch may be written over the function's.
        tolerance: the relative difference that rounding explains.
    """

    numbers: Tensor
    tolerance: float

    def norms(self) -> Tensor:
        """Returns their length for each record, (records,)."""
        lengths: Tensor = torch.linalg.vector_norm(self.numbers, dim=1)
        return lengths

    def moved(self, after: Answer) -> int | None:
        """Returns how many others than the first have moved in another answer; None if none of them was finite here.

        Each is compared with its own length, or the usual one: those of outliers are longer than all others.
        """
        norms = self.norms()[1:]
        known = norms.isfinite()
        shape = self.numbers.shape
        if shape != after.numbers.shape or 0 in shape or not bool(known.any()):
            return None
        norms = norms[known]
        limits = self.tolerance * norms.clamp_min(float(norms.median()) + 1e-30)
        gaps = torch.linalg.vector_norm(after.numbers - self.numbers, dim=1)
        # PRIVACY: what is not finite any more has moved
        # (test_rows_that_are_not_finite_any_more_have_moved)
        return int((~(gaps[1:][known] <= limits)).sum())


def rows_first(t: Tensor, dim: int) -> Answer:
    """Returns the numbers of each record of a tensor that has the records in a dimension."""
    real = torch.view_as_real(t.detach().resolve_conj()) if t.is_complex() else t.detach()
    rows = real.movedim(dim, 0).reshape(t.shape[dim], -1)
    numbers = rows.to("cpu", torch.float64, copy=True)
    if t.dtype in HALF:
        return Answer(numbers, 3e-2)
    return Answer(numbers, 1e-4 if real.dtype is torch.float32 else 1e-8)


def joined(answers: Iterable[Answer], size: int) -> Answer:
    """Returns several answers as one, without those for another number of records."""
    numbers, tolerances = [torch.zeros(size, 0, dtype=torch.float64)], [0.0]
    for answer in answers:
        if len(answer.numbers) == size:
            numbers.append(answer.numbers)
            tolerances.append(answer.tolerance)
    return Answer(torch.cat(numbers, dim=1), max(tolerances))


@dataclass(frozen=True)
class Mixed:
    """Records that reach each other.

    Args:
        what: the other record.
        moved: how many of the others moved.
    """

    what: str
    moved: int


def changed(before: Sequence[Answer], after: Sequence[Answer]) -> int | None:
    """Returns how many answers moved for the records but the first, in the worst of several; None as above."""
    counts = [one.moved(other) for one, other in zip(before, after, strict=True)]
    return max((count for count in counts if count is not None), default=None)


def compare(
    function: Callable[[Any], Sequence[Answer]], batches: Iterable[SyntheticBatches]
) -> Mixed | str:
    """Returns how records reach each other, or in words what was checked; never raises for what the function does.

    Args:
        function: of a made-up batch; it may do anything to it.
        batches: sources to try until the function takes one.
    """

    def answered(source: SyntheticBatches, change: Any) -> Sequence[Answer] | Refused:
        return attempt("made-up records", lambda: function(source.batch(change)))

    verdict = ""
    for source in batches:
        base = answered(source, None)
        again = answered(source, None)
        if isinstance(base, Refused) or isinstance(again, Refused):
            # only the kind: messages may quote shapes, and the size of a batch is private
            refused = next(one for one in (base, again) if isinstance(one, Refused))
            verdict = f"not checked, made-up records raise {type(refused.error).__name__}"
            continue
        differs = changed(base, again)
        if differs is not None:
            break
        verdict = "not checked, made-up records give nothing that belongs to one of them"
    else:
        return verdict
    if differs:
        return "not checked, the same made-up records give two answers"
    seen = 0
    for what, before, after in source.variants():
        first = base if before is None else answered(source, before)
        second = answered(source, after)
        if isinstance(first, Refused) or isinstance(second, Refused):
            continue  # it takes no such records
        count = changed(first, second)
        if count:
            return Mixed(what, count)
        seen += count is not None
    return CHECKED if seen else "not checked, it takes one kind of made-up records only"


class Leaf(NamedTuple):
    """What a tensor of a synthetic batch looks like.

    Args:
        shape: of it; the number of records in it does not matter.
        dtype: of it.
        device: of it.
        dim: where the records are, None for a constant.
        target: whether it is a number that losses may want in [0, 1].
        counts: whether it holds the numbers 0, 1, ... of the records, and nothing else.
        label: whether it is a target that losses may want to be 0 or 1, whatever its dtype.
        ignored: a target that the loss leaves out.
        places: of a record, one after the other in its dimension.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    dim: int | None
    target: bool = False
    counts: bool = False
    label: bool = False
    ignored: int | None = None
    places: int = 1

    @property
    def is_number(self) -> bool:
        """Whether it can be large or small."""
        return not self.label and (self.dtype.is_floating_point or self.dtype.is_complex)


class SyntheticBatches:
    """Synthetic batches.

    Args:
        leaves: their tensors.
        rows: records in each.
        fill: of integers and labels, 0 or 1; another record has the other one. None: at random.
        any_size: whether there may be batches of other sizes, in which the records come again.
        kinds: how many integers there are by place, 2 elsewhere, if they are random.
        seed: of the records; constants are the same for all.
    """

    def __init__(
        self,
        leaves: Sequence[Leaf],
        rows: int,
        fill: int | None,
        *,
        any_size: bool = False,
        kinds: Mapping[int, int] = MappingProxyType({}),
        seed: int = SEED,
    ) -> None:
        self.leaves = leaves
        self.rows = rows
        self._any_size = any_size
        own, shared = (torch.Generator().manual_seed(k) for k in (seed, SEED))
        self._base = [
            _filled(leaf, rows, fill, shared if leaf.dim is None else own, kinds.get(k, 2))
            for k, leaf in enumerate(leaves)
        ]

    def batch(
        self,
        change: Mapping[int, Sequence[float]] | None = None,
        records: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """Returns fresh tensors, some of them with records times factors, by place: 0 exchanges an integer.

        Args:
            change: the factors; NaN for an ignored target.
            records: which ones; default all, or as many as there are factors.
        """
        scales = {} if change is None else change
        if records is None:
            size = max(map(len, scales.values()), default=self.rows)
            records = [k % self.rows for k in range(size)]
        first = torch.tensor(records)[:, None]
        made = []
        for k, (leaf, base) in enumerate(zip(self.leaves, self._base, strict=True)):
            index = (first * leaf.places + torch.arange(leaf.places)).flatten()
            values = base.clone() if leaf.dim is None else base.index_select(leaf.dim, index)
            if k in scales and leaf.dim is not None:
                place = [-1 if d == leaf.dim else 1 for d in range(len(leaf.shape))]
                factors = torch.tensor(scales[k]).repeat_interleave(leaf.places)
                values = _changed(leaf, values, factors.view(place))
            made.append(values.to(leaf.device, leaf.dtype))
        return made

    def variants(self) -> Iterator[tuple[str, Any, Any]]:
        """Yields what the other record is, and what `batch` takes without and with it; None for the batch itself."""
        places = enumerate(self.leaves)
        own = {k: leaf for k, leaf in places if leaf.dim is not None and not leaf.counts}
        numbers = [k for k, leaf in own.items() if leaf.is_number and not leaf.target]
        targets = [k for k, leaf in own.items() if leaf.is_number and leaf.target]

        def times(factor: float, changed: Sequence[int]) -> dict[int, list[float]]:
            return {k: [factor, *[1.0] * (self.rows - 1)] for k in changed}

        if numbers:
            for scale, what in _OUTLIERS.items():
                yield what, None, times(scale, numbers)
            # PRIVACY: NaN need not reach others through a quantile; these move the median and the 0.9 quantile
            # (test_records_that_share_a_statistic_only_where_one_is_an_outlier_are_found)
            quantiles = [((self.rows + 1) // 2, self.rows // 2), (10, 1)]
            for few, many in quantiles if self._any_size else quantiles[:1]:
                mixed = [SMALL] * few + [LARGE] * many
                before, after = (
                    dict.fromkeys(numbers, one) for one in (mixed, [LARGE, *mixed[1:]])
                )
                yield "a large record in place of a small one", before, after
            yield "another record", None, times(-1.0, numbers)
        if targets:
            yield "a record with another target", None, times(0.5, targets)
            yield "a record with a large target", None, times(LARGE, targets)
        for k, leaf in own.items():
            if leaf.is_number:
                continue
            yield "a record with another integer", None, times(0.0, [k])
            if leaf.ignored is not None and self._base[k].numel() > self.rows:
                yield "a record without targets", None, times(math.nan, [k])


def both_fills(
    leaves: Sequence[Leaf], rows: int, *, any_size: bool = False
) -> Iterator[SyntheticBatches]:
    """Yields batches of ones and of zeros: one may be no class, the other no length, either a mask of everything."""
    for fill in (1, 0):
        yield SyntheticBatches(leaves, rows, fill, any_size=any_size)


def _filled(
    leaf: Leaf, rows: int, fill: int | None, generator: torch.Generator, kinds: int
) -> Tensor:
    if leaf.counts:
        return torch.arange(float(leaf.shape[0])).view(leaf.shape)
    shape = [rows * leaf.places if d == leaf.dim else n for d, n in enumerate(leaf.shape)]
    if leaf.is_number:
        return torch.rand(shape, generator=generator).mul_(0.5).add_(0.25)
    if fill is None:
        return torch.randint(0, kinds, shape, generator=generator).float()
    return torch.full(shape, float(fill))


def _changed(leaf: Leaf, values: Tensor, factors: Tensor) -> Tensor:
    if leaf.is_number:
        return values * factors
    values = torch.where(factors == 0.0, 1.0 - values, values)
    return torch.where(factors.isnan(), float(leaf.ignored or 0), values)


_SIZES = (2, 15, 16)  # where libraries change kernels
LOOKED_AT = 8  # places, of which even ones are


@dataclass(frozen=True)
class Isolation:
    """What moves the bits of a row of a model; None where it could not be seen.

    Args:
        rows: of the batch of fixed size that was looked at.
        size: another number of rows does.
        company: how far other records beside it do, in a batch of the same size, relative; 0.0 for no bit.
    """

    rows: int
    size: bool | None = None
    company: float | None = None

    def __str__(self) -> str:
        if self.company is None:
            return "it could not be checked on made-up records, since the model is random"
        verdict = "does NOT hold" if self.company else "holds"
        moved = "; bits depend on the number of rows" if self.size else ""
        return f"it {verdict} for made-up records in batches of {self.rows} rows{moved}"


def isolation(answer: Callable[[list[int], bool], Tensor], rows: int) -> Isolation:
    """Compares bits of what belongs to records at even places.

    Args:
        answer: answer(records, other_randomness) -> numbers of those at even places below `LOOKED_AT`, of a batch of
            some of ten records.
        rows: of the batches.
    """

    def seen(size: int, company: int = 4, other: bool = False) -> Tensor:
        batch = [company + k % 3 if k % 2 else k // 2 % 4 for k in range(size)]
        return answer(batch, other)

    base = seen(rows)
    if not torch.equal(base, seen(rows, other=True)):  # or NaN
        return Isolation(rows)
    gaps = torch.linalg.vector_norm(seen(rows, company=7) - base, dim=1)
    gaps /= torch.linalg.vector_norm(base, dim=1).clamp_min(1e-30)
    of_sizes = [seen(size) for size in _SIZES]
    equal = all(torch.equal(base[: len(t)], t[: len(base)]) for t in of_sizes)
    return Isolation(
        rows,
        size=not equal,
        company=float(gaps.max()),
    )


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
        traceback.clear_frames(error.__traceback__)  # which hold the graphs of forwards
        return Refused(what, error)


_HELPERS = ("torch_dpsco.", "opacus.")


def same_values(first: Tensor, second: Tensor) -> bool:
    """Returns whether two tensors hold the same numbers, NaN being equal to NaN."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if first.is_sparse:
        same_places = same_values(first._indices(), second._indices())
        return same_places and same_values(first._values(), second._values())
    if first.is_meta or torch.equal(first, second):
        return True
    return bool(((first == second) | ((first != first) & (second != second))).all())


def fingerprint(t: Tensor) -> str:
    """Returns a digest of the bits of a tensor."""
    found = hashlib.sha256()
    t = t.detach()
    for part in (t._indices(), t._values()) if t.is_sparse else (t,):
        flat = part.cpu().resolve_conj().reshape(-1).contiguous()
        found.update(flat.view(torch.uint8).numpy().data)
    return found.hexdigest()


def seed_torch(seed: int) -> None:
    """Seeds the generators that are in use; `torch.manual_seed` would also queue a seed for a CUDA that is not."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        for generator in torch.cuda.default_generators:
            generator.manual_seed(seed)


def random_like(p: Tensor, generator: torch.Generator) -> Tensor:
    """Returns a random parameter of the shape of another one, such that outputs are about as large as inputs."""
    inputs = max(1, p.shape[1:].numel())
    return torch.randn(p.shape, generator=generator).mul_(inputs**-0.5)


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
                if not container and not items:  # as most of a module
                    continue
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
        keepers = [*modules, *filter(_is_keeper, _held(modules))]
        self.attributes = Attributes(keepers)
        released: set[int] = set()
        for m in modules:
            released.update(map(id, (*m._parameters.values(), *m._buffers.values())))
        held = _held(keepers)
        for container in [value for value in held if isinstance(value, (list, dict))]:
            held += container.values() if isinstance(container, dict) else container
        kept = [value for value in held if id(value) not in released]
        self._values = [(t, t.detach().clone()) for t in kept if isinstance(t, Tensor)]

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
        generators = [value for value in _held(objects) if type(value) is torch.Generator]
        self._generators = [(g, g.get_state()) for g in generators]
        self._hooks = [(hooks, dict(hooks)) for p in self.params for hooks in _tensor_hooks(p)]
        self._grads = [(p, p.grad, p.requires_grad) for p in self.params]
        # most of a model of which little is trained: no copy
        self._large = {
            p: fingerprint(p) for p in self.params if not p.requires_grad and p.numel() > _LARGE
        }
        found = list(_tensors(self.modules))
        self._values = [(p, t, t.detach().clone()) for p, t in found if t not in self._large]
        self._places = [(place, t) for place, t in found if t in self._large]

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

        Raises:
            PrivacyError: a large frozen parameter has changed, of which there is no copy.
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
        if any(fingerprint(t) != saved for t, saved in self._large.items()):
            # PRIVACY: as in a training forward (test_large_frozen_weights_that_made_up_records_change_are_refused)
            raise PrivacyError(
                "a forward must not change frozen weights, also by .data (on made-up records it has changed large"
                " ones, of which no copy is kept): load the model again, and write its forward without that"
            )

    def changed(self) -> list[str]:
        """Returns the names of the tensors that no optimizer privatizes (buffers, frozen) and whose values changed."""
        names = set()
        for (module, holder, name), t, saved in self._values:
            now = holder.get(name)
            if not t.requires_grad and (now is None or not same_values(now.detach(), saved)):
                names.add(f"{type(module).__name__}.{name}")
        for (module, holder, name), t in self._places:
            if holder.get(name) is not t or fingerprint(t) != self._large[t]:
                names.add(f"{type(module).__name__}.{name}")
        return sorted(names)


def _contents(thing: Any) -> list[tuple[Any, Any]]:
    """Returns the lists and dictionaries among the attributes, with copies of what they hold."""
    containers = (value for value in vars(thing).values() if isinstance(value, (dict, list)))
    return [(container, container.copy()) for container in containers]


def _held(things: Iterable[Any]) -> list[Any]:
    """Returns the values of the attributes."""
    return [value for thing in things for value in vars(thing).values()]


def _is_keeper(thing: Any) -> bool:
    # a module has ten dictionaries of hooks, whose contents count as its own
    if type(thing) is OrderedDict or callable(thing) or isinstance(thing, Tensor):
        return False
    return hasattr(thing, "__dict__") and not type(thing).__module__.startswith(_HELPERS)


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
        for value in _held([thing]):
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
