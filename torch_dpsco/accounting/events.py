"""Events, what a mechanism did: frozen, hashable values, and their JSON.

A mechanism emits an event; a ledger stores it; `torch_dpsco.accounting.curves` interprets it. An event knows the
sensitivity of its query under each adjacency for which it is defined and refuses the others, so that a figure computed
under one neighboring relation can never be quoted under another.

Mechanisms of this library carry a sensitivity per adjacency. Guarantees that somebody else proved (`Pure`, `ApproxDP`,
`ZCDP`, `GDP`, `RDPCurve`, `KNorm`) carry the adjacencies under which they were proved; default all three.

On the wire they are JSON objects with the type, the fields, and an optional count. Floats are hexadecimal strings in
ledgers, so that a round trip is exact to the bit. Fields that have their default are left out where they were added to
an event later, so that old digests stay true.

Source: docs/proofs/accounting.md#adjacencies-and-units, docs/proofs/accounting.md#composition.

Neighboring relations, and sensitivities per relation.

* `add_remove`: the neighbor has one record more or less; the data set size is not public;
* `zero_out`: one record is replaced by a null record that contributes 0; sizes and positions stay;
* `replace_one`: one record is replaced by an arbitrary other one; the data set size is public.

Source: docs/proofs/accounting.md#adjacencies-and-units.

Guarantees proved elsewhere, as events, with the adjacencies under which they were proved.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, Literal, TypeAlias, cast, get_args

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.rdp import FAILURE_KINDS
from torch_dpsco.errors import AdjacencyError

Adjacency: TypeAlias = Literal["add_remove", "zero_out", "replace_one"]
ADD_REMOVE: Adjacency = "add_remove"
ZERO_OUT: Adjacency = "zero_out"
REPLACE_ONE: Adjacency = "replace_one"
ADJACENCIES: tuple[Adjacency, ...] = (ADD_REMOVE, ZERO_OUT, REPLACE_ONE)
_CHANGES = {
    ADD_REMOVE: "added or removed",
    ZERO_OUT: "emptied",
    REPLACE_ONE: "replaced by any other",
}

# L2 sensitivity of a sum of rows clipped at 1: a replaced row takes one vector of norm <= 1 away and adds another.
CLIP_UNITS: Mapping[Adjacency, float] = {ADD_REMOVE: 1.0, ZERO_OUT: 1.0, REPLACE_ONE: 2.0}


def in_words(adjacency: str) -> str:
    """Returns an adjacency with what happens to the one record in which neighbors differ.

    Example:
        >>> in_words("zero_out")
        'zero_out: emptied'
    """
    return f"{adjacency}: {_CHANGES[check_adjacency(adjacency)]}"


def check_adjacency(adjacency: str) -> Adjacency:
    """Returns the adjacency; raises ValueError for an unknown name."""
    return check.choice(ADJACENCIES, adjacency=adjacency)


Sens: TypeAlias = "Mapping[Adjacency, float] | tuple[tuple[Adjacency, float], ...]"


def sorted_sens(sens: Sens) -> tuple[tuple[Adjacency, float], ...]:
    """Returns sensitivities in one order, so that events are hashable and equal ones compare equal."""
    pairs: Any = tuple(sens.items()) if isinstance(sens, Mapping) else sens
    if not isinstance(pairs, tuple) or not all(
        isinstance(pair, tuple) and len(pair) == 2 for pair in pairs
    ):
        raise ValueError(
            f"sens must map adjacencies to sensitivities, as {{'replace_one': 2.0}} (got {sens!r})"
        )
    if not pairs:
        raise ValueError("sens must name at least one adjacency (got none)")
    found = {check_adjacency(a): check.nonnegative(sens=s) for a, s in pairs}
    if len(found) < len(pairs):
        raise ValueError(f"sens must name each adjacency once (got {sens!r})")
    return tuple(sorted(found.items()))


def _listed(of: str, one: Callable[..., Any], **field: Any) -> tuple[Any, ...]:
    """Returns a field's items as `one` returns them; raises ValueError if it is no list."""
    ((name, items),) = field.items()
    if isinstance(items, str) or not isinstance(items, Iterable):
        raise ValueError(f"{name} must be {of} (got {check.shown(items)})")
    return tuple(one(item) for item in items)


def _stated(adjacencies: Any) -> tuple[Adjacency, ...]:
    named = _listed("a tuple of names", check_adjacency, adjacencies=adjacencies)
    if not named:
        raise ValueError("adjacencies must name at least one adjacency (got none)")
    return tuple(sorted(set(named)))


def _checked(event: object) -> Event:
    """Returns an event, which checks its own numbers; raises ValueError for all else. The ledger checks subclasses."""
    if not isinstance(event, _EVENTS):
        raise ValueError(
            f"event must be a value of torch_dpsco.accounting.events (got {check.shown(event)})"
        )
    return cast(Event, event)


_ORDERED = "numbers, one for each order"
_members = partial(_listed, "lists of events", _checked)
_NUMBERS = (
    "eps",
    "rho",
    "xi",
    "mu",
    "sigma",
    "noise_multiplier",
    "scale",
    "b_threshold",
    "b_query",
)
_COUNTS = ("dim", "batch_size", "dataset_size", "steps", "releases", "num_positives")
_CHECKS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(_NUMBERS, check.nonnegative),
    **dict.fromkeys(_COUNTS, check.positive_count),
    **dict.fromkeys(("delta", "failure", "probability"), check.below_one),
    "q": partial(check.between, 0.0, 1.0),
    "sens": sorted_sens,
    "orders": partial(_listed, _ORDERED, lambda order: check.order(orders=order)),
    "values": partial(
        _listed, _ORDERED, lambda value: check.nonnegative(values=value, allow_inf=True)
    ),
    "adjacencies": _stated,
    "kind": partial(check.choice, FAILURE_KINDS),
    # PRIVACY: "no" is true (test_exact_is_never_granted_by_a_word)
    "exact": check.flag,
    "event": _checked,
    "events": _members,
    "n": check.count,
}
_ALL = tuple(sorted(ADJACENCIES))


class _Checked:
    """A value whose fields are checked by their names, when it is made."""

    def __post_init__(self) -> None:
        check.fields(self, **_CHECKS)


@dataclasses.dataclass(frozen=True)
class Stated(_Checked):
    """A guarantee that holds under the adjacencies for which it was proved."""

    def require(self, adjacency: Adjacency) -> None:
        """Raises AdjacencyError if the guarantee was not stated for that adjacency."""
        if adjacency not in self.adjacencies:  # type: ignore[attr-defined]
            raise AdjacencyError(f"{self} is not stated for {adjacency}")


@dataclasses.dataclass(frozen=True)
class Pure(Stated):
    """Any eps-differentially private release."""

    eps: float
    adjacencies: tuple[Adjacency, ...] = _ALL


@dataclasses.dataclass(frozen=True)
class ApproxDP(Stated):
    """Any (eps, delta)-differentially private release."""

    eps: float
    delta: float
    adjacencies: tuple[Adjacency, ...] = _ALL


@dataclasses.dataclass(frozen=True)
class ZCDP(Stated):
    """Any delta-approximately rho-zero-concentrated release: but for delta, D_a <= rho a for every order a > 1."""

    rho: float
    delta: float = 0.0
    adjacencies: tuple[Adjacency, ...] = _ALL


@dataclasses.dataclass(frozen=True)
class GDP(Stated):
    """Any mu-Gaussian-differentially private release."""

    mu: float
    adjacencies: tuple[Adjacency, ...] = _ALL


@dataclasses.dataclass(frozen=True)
class KNorm(Stated):
    """The K-norm mechanism: noise of density proportional to exp(-eps |z|_2 / sensitivity) in R^dim.

    Args:
        eps: >= 0.
        dim: >= 1.
        adjacencies: for which its sensitivity was computed.
    """

    eps: float
    dim: int
    adjacencies: tuple[Adjacency, ...] = _ALL


@dataclasses.dataclass(frozen=True, repr=False)
class RDPCurve(Stated):
    """Any release with these bounds of its Renyi divergence (of both directions).

    Args:
        orders: each > 1, increasing.
        values: bound per order, each >= 0 (inf for none).
        adjacencies: for which they were proved.
    """

    orders: tuple[float, ...]
    values: tuple[float, ...]
    adjacencies: tuple[Adjacency, ...] = _ALL

    def __post_init__(self) -> None:
        super().__post_init__()
        orders = len(self.orders)
        values = len(self.values)
        if not orders or orders != values:
            raise ValueError(
                f"orders and values must be equally many, >= 1 (got {orders} and {values})"
            )
        if any(later <= earlier for earlier, later in pairwise(self.orders)):
            raise ValueError(f"orders must increase (got {check.shown(self.orders)})")

    def __repr__(self) -> str:
        # a report is for readers, a ledger has all of them
        curve = f"{len(self.orders)} orders from {self.orders[0]:g} to {self.orders[-1]:g}"
        return f"RDPCurve({curve}, adjacencies={self.adjacencies})"


@dataclasses.dataclass(frozen=True)
class Failure(_Checked):
    """The probability that the premise of some other event does not hold.

    Args:
        probability: in [0, 1).
        kind: "coupling" (a coupling of the noiseless outputs of both data sets fails: delta' = (delta - p)/(1 - p)) or
            "transcript" (a function of the pair and the transcript: adds p to delta).
    """

    probability: float
    kind: str = "coupling"


# where they have their default
_OMITTED = ("adjacencies", "partition_kind", "key_public", "exact", "releases")


class _Query(_Checked):
    """A release of a query, with its sensitivity per adjacency."""

    sens: Sens

    def sensitivity(self, adjacency: Adjacency) -> float:
        """Returns the sensitivity of the query; raises AdjacencyError if it is not defined for that adjacency."""
        for name, value in dict(self.sens).items():
            if name == adjacency:
                return value
        raise AdjacencyError(f"{self} is not defined under {adjacency}")


class _Gaussian(_Checked):
    """A release with Gaussian noise; its repr leaves fields out as its JSON does."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in _shown(self))})"


@dataclasses.dataclass(frozen=True, repr=False)
class Gaussian(_Query, _Gaussian):
    """One release of a query plus N(0, sigma^2 I), without sampling.

    Args:
        sigma: absolute noise standard deviation, >= 0, in the units of `sens`; 0 means no privacy.
        sens: L2 sensitivity of the query per adjacency, each >= 0; an adjacency that is missing is refused.
        failure: probability (coupling kind) with which the sensitivity may be exceeded, in [0, 1).
        exact: whether the noise was drawn in integers on a public grid (see `analysis.rounding`); the cost stays.
    """

    sigma: float
    sens: Sens
    failure: float = 0.0
    exact: bool = False

    def only(self, *adjacencies: Adjacency) -> Gaussian:
        """Returns the event restricted to some adjacencies (a sampling design may support fewer than the query)."""
        return Gaussian(
            self.sigma, {a: self.sensitivity(a) for a in adjacencies}, self.failure, self.exact
        )


@dataclasses.dataclass(frozen=True, repr=False)
class PoissonGaussian(_Gaussian):
    """Noisy sum of clipped rows over a Poisson sample: each record is in the batch independently with rate q.

    Args:
        noise_multiplier: noise std on the sum over the clip norm, >= 0; 0 means no privacy.
        q: sampling rate in [0, 1].
        exact: as in `Gaussian`.
    """

    noise_multiplier: float
    q: float
    exact: bool = False


@dataclasses.dataclass(frozen=True, repr=False)
class WORGaussian(_Gaussian):
    """Noisy sum of clipped rows over a uniformly random subset of fixed size (without replacement).

    Not defined under add_remove, where the size of the data set is private. Under zero_out the sensitivity is that of
    replace_one: when the differing record enters the batch, another one leaves.

    Args:
        noise_multiplier: noise std on the sum over the clip norm, >= 0; 0 means no privacy.
        batch_size: rows in each batch, 1 <= batch_size <= dataset_size.
        dataset_size: public number of records.
        exact: as in `Gaussian`.
    """

    noise_multiplier: float
    batch_size: int
    dataset_size: int
    exact: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size > self.dataset_size:
            raise ValueError(
                f"batch_size must be <= dataset_size={self.dataset_size} (got {self.batch_size})"
            )


@dataclasses.dataclass(frozen=True, repr=False)
class RandomAllocation(_Gaussian):
    """A pass of noisy sums of clipped rows, where each record is in the batch of one step, drawn uniformly and secret.

    One event is the WHOLE pass: to stop at a step that was chosen on the way costs as much. All three adjacencies; a
    unit of several rows counts as one record if it has one draw and one clip.

    Args:
        noise_multiplier: z >= 0, noise std on each sum over the clip norm; 0 means no privacy.
        steps: T >= 1, over which draws are uniform.
        releases: noisy sums that are made of each batch, one after another, >= 1.
        exact: as in `Gaussian`.

    Source: docs/proofs/allocation.md.
    """

    noise_multiplier: float
    steps: int
    releases: int = 1
    exact: bool = False

    @property
    def noise(self) -> float:
        """Noise multiplier of one sum that tells as much as all that are made of a batch, rounded down."""
        if self.releases == 1:
            return self.noise_multiplier
        # PRIVACY: each sum tells about the same step (test_releases_of_one_batch_lower_the_noise_of_its_pass)
        return self.noise_multiplier / math.sqrt(self.releases) * (1.0 - 2.0**-50)


@dataclasses.dataclass(frozen=True)
class Laplace(_Query):
    """One release of a query plus Laplace noise of that scale on each coordinate.

    Args:
        scale: of the noise, >= 0, in the units of `sens`; 0 means no privacy.
        sens: L1 sensitivity of the query per adjacency, each >= 0.
    """

    scale: float
    sens: Sens


@dataclasses.dataclass(frozen=True)
class AboveThreshold(_Query):
    """A run of the sparse vector technique that halts after `num_positives` answers above its threshold.

    Args:
        b_threshold: Laplace scale of the noise on the threshold, drawn once, >= 0.
        b_query: Laplace scale of the fresh noise on each query, >= 0.
        sens: sensitivity of every query per adjacency, each >= 0.
        num_positives: positive answers before it halts, >= 1.
    """

    b_threshold: float
    b_query: float
    sens: Sens
    num_positives: int = 1


@dataclasses.dataclass(frozen=True)
class NonPrivate:
    """A release without noise: epsilon is infinite from here on."""


@dataclasses.dataclass(frozen=True)
class Repeat(_Checked):
    """The same event `n` times, n >= 0 (adaptive composition with parameters fixed in advance)."""

    event: Event
    n: int


@dataclasses.dataclass(frozen=True)
class Sequential(_Checked):
    """Several events one after another."""

    events: tuple[Event, ...]


@dataclasses.dataclass(frozen=True)
class Parallel:
    """Events on the parts of one public, data-independent partition of the records.

    A differing record lies in one part only, so that the cost is the largest over parts; several `Parallel` events over
    the same partition name are summed per part first.

    Args:
        parts: events per part name.
        partition: name of the partition; it must identify the partition, e.g. by a digest of its permutation.
        partition_kind: "positional" (parts of the positions 0..n-1: no guarantee under add_remove, where removing a
            record shifts all later positions) or "keyed" (by a key of each record: none under replace_one, where the
            new record may carry another key, so that two parts change).
        key_public: whether the key is public and kept by a replacement; then "keyed" holds under replace_one too.
    """

    parts: Mapping[str, Iterable[Event]] | tuple[tuple[str, tuple[Event, ...]], ...]
    partition: str
    partition_kind: str = "positional"
    key_public: bool = False

    def __post_init__(self) -> None:
        pairs: Any = tuple(self.parts.items()) if isinstance(self.parts, Mapping) else self.parts
        if not isinstance(pairs, tuple) or any(
            type(pair) is not tuple or len(pair) != 2 for pair in pairs
        ):
            raise ValueError(
                f"parts must map names to their events (got {check.shown(self.parts)})"
            )
        parts = {str(name): _members(parts=events) for name, events in pairs}
        if len(parts) < len(pairs):
            # PRIVACY: 1 and "1" are one name in a ledger file (test_two_parts_of_one_name_are_refused)
            raise ValueError(
                f"parts must have names that differ as text (got {[name for name, _ in pairs]})"
            )
        object.__setattr__(self, "parts", tuple(sorted(parts.items(), key=lambda part: part[0])))
        partition: object = self.partition
        if not isinstance(partition, str) or not partition:
            raise ValueError(f"partition must be a non-empty name (got {partition!r})")
        check.choice(("positional", "keyed"), partition_kind=self.partition_kind)
        # PRIVACY: "no" is true (test_a_public_key_is_never_granted_by_a_word)
        if check.flag(key_public=self.key_public) and self.partition_kind != "keyed":
            raise ValueError(
                f"key_public must be False for a {self.partition_kind} partition (got"
                f" {self.key_public})"
            )

    def items(self) -> tuple[tuple[str, tuple[Event, ...]], ...]:
        """Returns (part, events) pairs in the order of the part names."""
        return cast("tuple[tuple[str, tuple[Event, ...]], ...]", self.parts)


SimpleEvent: TypeAlias = (
    Gaussian
    | PoissonGaussian
    | WORGaussian
    | RandomAllocation
    | Laplace
    | AboveThreshold
    | Pure
    | ApproxDP
    | ZCDP
    | GDP
    | KNorm
    | RDPCurve
    | Failure
    | NonPrivate
)
Event: TypeAlias = SimpleEvent | Repeat | Sequential | Parallel
_EVENTS = (*get_args(SimpleEvent), Repeat, Sequential, Parallel)


def _shown(event: Any) -> Iterator[tuple[str, Any]]:
    """Yields the fields, except those that were added later and have their default."""
    for field in dataclasses.fields(event):
        value = getattr(event, field.name)
        if field.name not in _OMITTED or value != field.default:
            yield field.name, value


def clipped_gaussian(noise_multiplier: float, exact: bool = False) -> Gaussian:
    """Returns the event, in clip units, of a sum of clipped rows with noise std noise_multiplier * clip.

    In clip units an adaptive clip does not split ledger keys: the guarantee depends on the ratio alone.
    """
    return Gaussian(
        check.nonnegative(noise_multiplier=noise_multiplier), CLIP_UNITS, exact=exact
    )


_CLASSES: dict[str, type[Any]] = {cls.__name__: cls for cls in _EVENTS}
# strings that are no numbers
_WORDS = ("partition", "partition_kind", "kind", "key_public", "exact", "adjacencies")


def event_to_json(event: Event, *, exact: bool = True) -> dict[str, Any]:
    """Returns the event as a JSON object; floats as hexadecimal strings if `exact` (bit-exact round trip)."""
    out: dict[str, Any] = {"type": type(event).__name__}
    for name, value in _shown(event):
        plain = _encoded(value, exact)
        out[name] = dict(plain) if name in ("sens", "parts") else plain
    return out


def _encoded(value: Any, exact: bool) -> Any:
    if isinstance(value, _EVENTS):
        return event_to_json(value, exact=exact)
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
        return Repeat(
            event_from_json({key: value for key, value in data.items() if key != "count"}),
            data["count"],
        )
    cls = _CLASSES.get(str(data.get("type")))
    if cls is None:
        raise ValueError(
            f"event type must be one of {', '.join(_CLASSES)} (got {data.get('type')!r})"
        )
    given = {name: value for name, value in data.items() if name not in ("type", "count")}
    # PRIVACY: a field from elsewhere may raise the cost or restrict the event (test_an_unknown_field_is_refused)
    unknown = given.keys() - {field.name for field in dataclasses.fields(cls)}
    if unknown:
        raise ValueError(
            f"event {cls.__name__} must have no field but its own (got"
            f" {', '.join(sorted(unknown))})"
        )
    try:
        event: Event = cls(**{name: _decoded(name, value) for name, value in given.items()})
    except (TypeError, AttributeError) as error:
        raise ValueError(
            f"event {cls.__name__} must have its fields as they were written ({error})"
        ) from error
    return event


def _decoded(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        if "type" in value:
            return event_from_json(value)
        return {key: _decoded(name, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(_decoded(name, item) for item in value)
    if not isinstance(value, str) or name in _WORDS:
        return value
    try:
        return float.fromhex(value)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{name} must be a number (got {value!r})") from error
