"""Events: what a mechanism did, as frozen, hashable, JSON-codable values.

A mechanism emits an event; a ledger stores it; `torch_dpsco.accounting.curves` interprets it. An event knows the
sensitivity of its query under each adjacency for which it is defined and refuses the others, so that a figure computed
under one neighboring relation can never be quoted under another:

* `add_remove`: the neighbor has one record more or less; the data set size is not public;
* `zero_out`: one record is replaced by a null record that contributes 0; sizes and positions stay;
* `replace_one`: one record is replaced by an arbitrary other one; the data set size is public.

Source: spec accounting.md sections 1 and 2.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeAlias, cast

from torch_dpsco import _validate as check
from torch_dpsco.errors import AdjacencyError

__all__ = [
    "ADD_REMOVE",
    "ADJACENCIES",
    "CLIP_UNITS",
    "REPLACE_ONE",
    "ZERO_OUT",
    "Adjacency",
    "Event",
    "Gaussian",
    "NonPrivate",
    "Parallel",
    "PoissonGaussian",
    "Repeat",
    "Sequential",
    "WORGaussian",
    "check_adjacency",
    "clipped_gaussian",
    "event_from_json",
    "event_to_json",
]

Adjacency: TypeAlias = Literal["add_remove", "zero_out", "replace_one"]
ADD_REMOVE: Adjacency = "add_remove"
ZERO_OUT: Adjacency = "zero_out"
REPLACE_ONE: Adjacency = "replace_one"
ADJACENCIES: tuple[Adjacency, ...] = (ADD_REMOVE, ZERO_OUT, REPLACE_ONE)

# L2 sensitivity of a sum of rows clipped at 1: a replaced row takes one vector of norm <= 1 away and adds another.
CLIP_UNITS: Mapping[Adjacency, float] = {ADD_REMOVE: 1.0, ZERO_OUT: 1.0, REPLACE_ONE: 2.0}


def check_adjacency(adjacency: str) -> Adjacency:
    """Returns the adjacency; raises ValueError for an unknown name."""
    return check.choice(ADJACENCIES, adjacency=adjacency)


@dataclasses.dataclass(frozen=True)
class Gaussian:
    """One release of a query plus N(0, sigma^2 I), without sampling.

    Args:
        sigma: absolute noise standard deviation, >= 0, in the units of `sens`; 0 means no privacy.
        sens: L2 sensitivity of the query per adjacency, each >= 0; an adjacency that is missing is refused.
        failure: probability (coupling kind) with which the sensitivity may be exceeded, in [0, 1).
    """

    sigma: float
    sens: Mapping[Adjacency, float] | tuple[tuple[Adjacency, float], ...]
    failure: float = 0.0

    def __post_init__(self) -> None:
        pairs = self.sens.items() if isinstance(self.sens, Mapping) else self.sens
        if not pairs:
            raise ValueError("sens must name at least one adjacency (got none)")
        items = {check_adjacency(a): check.nonnegative(sens=s) for a, s in pairs}
        # a sorted tuple, so that the event is hashable and equal events compare equal
        object.__setattr__(self, "sens", tuple(sorted(items.items())))
        object.__setattr__(self, "sigma", check.nonnegative(sigma=self.sigma))
        failure = check.nonnegative(failure=self.failure)
        if failure >= 1:
            raise ValueError(f"failure must be in [0, 1) (got {failure})")
        object.__setattr__(self, "failure", failure)

    def sensitivity(self, adjacency: Adjacency) -> float:
        """Returns the L2 sensitivity; raises AdjacencyError if it is not defined for that adjacency."""
        for name, value in cast("tuple[tuple[Adjacency, float], ...]", self.sens):
            if name == adjacency:
                return value
        raise AdjacencyError(f"{self} is not defined under {adjacency}")

    def only(self, *adjacencies: Adjacency) -> Gaussian:
        """Returns the event restricted to some adjacencies (a sampling design may support fewer than the query)."""
        return Gaussian(self.sigma, {a: self.sensitivity(a) for a in adjacencies}, self.failure)


@dataclasses.dataclass(frozen=True)
class PoissonGaussian:
    """Noisy sum of clipped rows over a Poisson sample: each record is in the batch independently with rate q.

    Args:
        noise_multiplier: noise std on the sum over the clip norm, >= 0; 0 means no privacy.
        q: sampling rate in [0, 1].
    """

    noise_multiplier: float
    q: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "noise_multiplier", check.nonnegative(noise_multiplier=self.noise_multiplier))
        object.__setattr__(self, "q", check.between(0.0, 1.0, q=self.q))


@dataclasses.dataclass(frozen=True)
class WORGaussian:
    """Noisy sum of clipped rows over a uniformly random subset of fixed size (without replacement).

    Not defined under add_remove, where the size of the data set is private. Under zero_out the sensitivity is that of
    replace_one: when the differing record enters the batch, another one leaves.

    Args:
        noise_multiplier: noise std on the sum over the clip norm, >= 0; 0 means no privacy.
        batch_size: rows in each batch, 1 <= batch_size <= dataset_size.
        dataset_size: public number of records.
    """

    noise_multiplier: float
    batch_size: int
    dataset_size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "noise_multiplier", check.nonnegative(noise_multiplier=self.noise_multiplier))
        object.__setattr__(self, "batch_size", check.positive_count(batch_size=self.batch_size))
        object.__setattr__(self, "dataset_size", check.positive_count(dataset_size=self.dataset_size))
        if self.batch_size > self.dataset_size:
            raise ValueError(f"batch_size must be <= dataset_size={self.dataset_size} (got {self.batch_size})")


@dataclasses.dataclass(frozen=True)
class NonPrivate:
    """A release without noise: epsilon is infinite from here on."""


@dataclasses.dataclass(frozen=True)
class Repeat:
    """The same event `n` times, n >= 0 (adaptive composition with parameters fixed in advance)."""

    event: Event
    n: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", check.count(n=self.n))


@dataclasses.dataclass(frozen=True)
class Sequential:
    """Several events one after another."""

    events: tuple[Event, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "events", tuple(self.events))


@dataclasses.dataclass(frozen=True)
class Parallel:
    """Events on the parts of one public, data-independent partition of the positions 0..n-1.

    A differing record lies in one part only, so that the cost is the largest over parts; several `Parallel` events over
    the same partition name are summed per part first. Undefined under add_remove: removing a record shifts all later
    positions. The name must identify the partition, e.g. by a digest of its permutation.

    Args:
        parts: events per part name.
        partition: name of the partition.
    """

    parts: Mapping[str, Iterable[Event]] | tuple[tuple[str, tuple[Event, ...]], ...]
    partition: str

    def __post_init__(self) -> None:
        pairs = self.parts.items() if isinstance(self.parts, Mapping) else self.parts
        object.__setattr__(self, "parts", tuple(sorted((str(name), tuple(events)) for name, events in pairs)))
        if not self.partition:
            raise ValueError("partition must be a non-empty name (got '')")

    def items(self) -> tuple[tuple[str, tuple[Event, ...]], ...]:
        """Returns (part, events) pairs in the order of the part names."""
        return cast("tuple[tuple[str, tuple[Event, ...]], ...]", self.parts)


Event: TypeAlias = Gaussian | PoissonGaussian | WORGaussian | NonPrivate | Repeat | Sequential | Parallel


def clipped_gaussian(noise_multiplier: float) -> Gaussian:
    """Returns the event, in clip units, of a sum of clipped rows with noise std noise_multiplier * clip.

    In clip units an adaptive clip does not split ledger keys: the guarantee depends on the ratio alone.
    """
    return Gaussian(noise_multiplier, CLIP_UNITS)


def _float_to_json(value: float, exact: bool) -> float | str:
    return value.hex() if exact else value


def _float_from_json(value: float | str) -> float:
    if not isinstance(value, str):
        return float(value)
    return math.inf if value == "inf" else float.fromhex(value)


def event_to_json(event: Event, *, exact: bool = True) -> dict[str, Any]:
    """Returns the event as a JSON object; floats as hexadecimal strings if `exact` (bit-exact round trip)."""
    out: dict[str, Any] = {"type": type(event).__name__}
    if isinstance(event, Repeat):
        return out | {"event": event_to_json(event.event, exact=exact), "n": event.n}
    if isinstance(event, Sequential):
        return out | {"events": [event_to_json(e, exact=exact) for e in event.events]}
    if isinstance(event, Parallel):
        parts = {name: [event_to_json(e, exact=exact) for e in events] for name, events in event.items()}
        return out | {"partition": event.partition, "parts": parts}
    for field in dataclasses.fields(event):
        value = getattr(event, field.name)
        if field.name == "sens":
            value = {a: _float_to_json(s, exact) for a, s in value}
        out[field.name] = _float_to_json(value, exact) if isinstance(value, float) else value
    return out


def _simple_gaussian(data: dict[str, Any]) -> Gaussian:
    sens = {check_adjacency(a): _float_from_json(s) for a, s in data["sens"].items()}
    return Gaussian(_float_from_json(data["sigma"]), sens, _float_from_json(data.get("failure", 0.0)))


def _counted(data: dict[str, Any]) -> Event:
    count = data.get("count", 1)
    event = event_from_json({key: value for key, value in data.items() if key != "count"})
    return event if count == 1 else Repeat(event, count)


_DECODERS: dict[str, Callable[[dict[str, Any]], Event]] = {
    "Gaussian": _simple_gaussian,
    "PoissonGaussian": lambda d: PoissonGaussian(_float_from_json(d["noise_multiplier"]), _float_from_json(d["q"])),
    "WORGaussian": lambda d: WORGaussian(_float_from_json(d["noise_multiplier"]), d["batch_size"], d["dataset_size"]),
    "NonPrivate": lambda d: NonPrivate(),
    "Repeat": lambda d: Repeat(event_from_json(d["event"]), d["n"]),
    "Sequential": lambda d: Sequential(tuple(event_from_json(e) for e in d["events"])),
    "Parallel": lambda d: Parallel({k: [_counted(e) for e in v] for k, v in d["parts"].items()}, d["partition"]),
}


_CLASSES = (Gaussian, PoissonGaussian, WORGaussian, NonPrivate, Repeat, Sequential, Parallel)
_FIELDS = {cls.__name__: {field.name for field in dataclasses.fields(cls)} for cls in _CLASSES}


def event_from_json(data: dict[str, Any]) -> Event:
    """Returns the event of a JSON object made by `event_to_json` (a "count" key becomes a `Repeat`).

    Raises:
        ValueError: unknown type, or a bad, missing or unknown field.
    """
    if data.get("count", 1) != 1:
        return _counted(data)
    decoder = _DECODERS.get(data.get("type", ""))
    if decoder is None:
        raise ValueError(f"event type must be one of {', '.join(_DECODERS)} (got {data.get('type')!r})")
    # PRIVACY: a field from elsewhere may raise the cost or restrict the event (test_an_unknown_field_is_refused)
    unknown = data.keys() - _FIELDS[data["type"]] - {"type", "count"}
    if unknown:
        raise ValueError(f"event {data['type']} must have no field but its own (got {', '.join(sorted(unknown))})")
    try:
        return decoder(data)
    except KeyError as error:
        raise ValueError(f"event {data['type']} must have the field {error} (got {sorted(data)})") from error
