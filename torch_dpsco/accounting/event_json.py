"""The wire format of events: JSON objects with the type, the fields, and an optional count.

Floats are hexadecimal strings in ledgers, so that a round trip is exact to the bit. Fields that have their default are
left out where they were added to an event later, so that old digests stay true.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from torch_dpsco.accounting import events as kinds
from torch_dpsco.accounting.events import Event, Parallel, Repeat, Sequential

_SIMPLE = (
    *(kinds.Gaussian, kinds.PoissonGaussian, kinds.WORGaussian, kinds.Laplace, kinds.AboveThreshold, kinds.NonPrivate),
    *(kinds.Pure, kinds.ApproxDP, kinds.ZCDP, kinds.ApproxZCDP, kinds.GDP, kinds.KNorm, kinds.RDPCurve, kinds.Failure),
)
_CLASSES = {cls.__name__: cls for cls in (*_SIMPLE, Repeat, Sequential, Parallel)}
_SHAPES: dict[str, type[Any]] = {
    "events": list,
    "parts": dict,
    "sens": dict,
    "orders": list,
    "values": list,
    "adjacencies": list,
}
_WORDS = ("partition", "partition_kind", "kind", "key_public", "exact")  # strings that are no numbers
_OMITTED = ("k", "adjacencies", "partition_kind", "key_public", "exact")  # where they have their default


def event_to_json(event: Event, *, exact: bool = True) -> dict[str, Any]:
    """Returns the event as a JSON object; floats as hexadecimal strings if `exact` (bit-exact round trip)."""
    out: dict[str, Any] = {"type": type(event).__name__}
    if isinstance(event, Repeat):
        return out | {"event": event_to_json(event.event, exact=exact), "n": event.n}
    if isinstance(event, Sequential):
        return out | {"events": [event_to_json(e, exact=exact) for e in event.events]}
    for field in dataclasses.fields(event):
        value = getattr(event, field.name)
        if field.name in _OMITTED and value == field.default:
            continue
        if isinstance(event, Parallel) and field.name == "parts":
            value = {name: [event_to_json(e, exact=exact) for e in events] for name, events in event.items()}
        else:
            value = _encoded(value, exact)
        out[field.name] = dict(value) if field.name == "sens" else value
    return out


def _encoded(value: Any, exact: bool) -> Any:
    if isinstance(value, float):
        return value.hex() if exact or math.isinf(value) else value
    if isinstance(value, tuple):
        return [_encoded(item, exact) for item in value]
    return value


def event_from_json(data: dict[str, Any]) -> Event:
    """Returns the event of a JSON object made by `event_to_json` (a "count" key becomes a `Repeat`).

    Raises:
        ValueError: unknown type, or a bad, missing or unknown field.
    """
    if data.get("count", 1) != 1:
        return Repeat(event_from_json({key: value for key, value in data.items() if key != "count"}), data["count"])
    cls = next((cls for name, cls in _CLASSES.items() if name == data.get("type")), None)
    if cls is None:
        raise ValueError(f"event type must be one of {', '.join(_CLASSES)} (got {data.get('type')!r})")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    # PRIVACY: a field from elsewhere may raise the cost or restrict the event (test_an_unknown_field_is_refused)
    unknown = data.keys() - fields.keys() - {"type", "count"}
    if unknown:
        raise ValueError(f"event {cls.__name__} must have no field but its own (got {', '.join(sorted(unknown))})")
    for name, field in fields.items():
        if name not in data and field.default is dataclasses.MISSING:
            raise ValueError(f"event {cls.__name__} must have the field {name!r} (got {sorted(data)})")
    given = {name: _decoded(cls, name, data[name]) for name in fields if name in data}
    event: Event = cls(**given)
    return event


def _decoded(cls: type, name: str, value: Any) -> Any:
    if name in _SHAPES and not isinstance(value, _SHAPES[name]):
        word = "object" if _SHAPES[name] is dict else "list"
        raise ValueError(f"{name} of {cls.__name__} must be a JSON {word} (got {value!r})")
    if name == "event":
        return event_from_json(value)
    if name == "events":
        return tuple(event_from_json(item) for item in value)
    if name == "parts":
        return {part: [event_from_json(item) for item in items] for part, items in value.items()}
    if name == "sens":
        return {adjacency: _number(name, item) for adjacency, item in value.items()}
    if name in ("orders", "values"):
        return tuple(_number(name, item) for item in value)
    if name == "adjacencies":
        return tuple(value)
    return _number(name, value) if isinstance(value, str) and name not in _WORDS else value


def _number(name: str, value: float | str) -> float:
    try:
        return float.fromhex(value) if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} must be a number (got {value!r})") from error
