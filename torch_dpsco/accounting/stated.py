"""Guarantees proved elsewhere, as events, with the adjacencies under which they were proved."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from typing import Any

from torch_dpsco import _validate as check
from torch_dpsco.accounting.adjacency import ADJACENCIES, Adjacency, below_one, check_adjacency
from torch_dpsco.accounting.analysis.convert import FAILURE_KINDS
from torch_dpsco.errors import AdjacencyError


@dataclasses.dataclass(frozen=True)
class Stated:
    """A guarantee that holds under the adjacencies for which it was proved."""

    def require(self, adjacency: Adjacency) -> None:
        """Raises AdjacencyError if the guarantee was not stated for that adjacency."""
        if adjacency not in self.adjacencies:  # type: ignore[attr-defined]
            raise AdjacencyError(f"{self} is not stated for {adjacency}")

    def __post_init__(self) -> None:
        check.fields(
            self, **{field.name: _CHECKS[field.name] for field in dataclasses.fields(self)}
        )


def _stated(adjacencies: Any) -> tuple[Adjacency, ...]:
    if isinstance(adjacencies, str) or not isinstance(adjacencies, Iterable):
        raise ValueError(f"adjacencies must be a tuple of names (got {adjacencies!r})")
    stated = tuple(sorted({check_adjacency(a) for a in adjacencies}))
    if not stated:
        raise ValueError("adjacencies must name at least one adjacency (got none)")
    return stated


def _each(one: Callable[..., float], **field: Any) -> tuple[float, ...]:
    ((name, numbers),) = field.items()
    if isinstance(numbers, str) or not isinstance(numbers, Iterable):
        raise ValueError(f"{name} must be numbers, one for each order (got {numbers!r})")
    return tuple(one(**{name: number}) for number in numbers)


_CHECKS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("eps", "rho", "xi", "mu"), check.nonnegative),
    **dict.fromkeys(("dim", "p"), check.positive_count),
    "delta": below_one,
    "orders": partial(_each, check.order),
    "values": partial(_each, partial(check.nonnegative, allow_inf=True)),
    "adjacencies": _stated,
}
_ALL = tuple(sorted(ADJACENCIES))
_SHOWN_ORDERS = 4


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
    """Any (xi, rho)-zero-concentrated release: D_a <= xi + rho a for every order a > 1."""

    rho: float
    xi: float = 0.0
    adjacencies: tuple[Adjacency, ...] = _ALL


@dataclasses.dataclass(frozen=True)
class ApproxZCDP(Stated):
    """Any delta-approximately rho-zero-concentrated release."""

    rho: float
    delta: float
    adjacencies: tuple[Adjacency, ...] = _ALL


@dataclasses.dataclass(frozen=True)
class GDP(Stated):
    """Any mu-Gaussian-differentially private release."""

    mu: float
    adjacencies: tuple[Adjacency, ...] = _ALL


@dataclasses.dataclass(frozen=True)
class KNorm(Stated):
    """The K-norm mechanism: noise of density proportional to exp(-eps |z|_p / sensitivity) in R^dim.

    Args:
        eps: >= 0.
        dim: >= 1.
        p: 2 (p = 1 is `Laplace`).
        adjacencies: for which its sensitivity was computed.
    """

    eps: float
    dim: int
    p: int = 2
    adjacencies: tuple[Adjacency, ...] = _ALL

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.p != 2:
            raise ValueError(f"p must be 2 (got {self.p}); Laplace is the one for p = 1")


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

    def __str__(self) -> str:
        """Without the numbers, which may be hundreds."""
        orders = f"{len(self.orders)} orders from {self.orders[0]:g} to {self.orders[-1]:g}"
        return f"RDPCurve({orders}, {', '.join(self.adjacencies)})"

    def __repr__(self) -> str:
        if len(self.orders) <= _SHOWN_ORDERS:
            curve = f"orders={self.orders}, values={self.values}"
        else:  # a report is for readers, a ledger has all of them
            curve = f"{len(self.orders)} orders from {self.orders[0]:g} to {self.orders[-1]:g}"
        return f"RDPCurve({curve}, adjacencies={self.adjacencies})"


@dataclasses.dataclass(frozen=True)
class Failure:
    """The probability that the premise of some other event does not hold.

    Args:
        probability: in [0, 1).
        kind: "coupling" (a coupling of the noiseless outputs of both data sets fails: delta' = (delta - p)/(1 - p)),
            "transcript" (a function of the pair and the transcript: adds p to delta), or "per_side" (an event on each
            side by itself: adds (1 + e^epsilon) p).
    """

    probability: float
    kind: str = "coupling"

    def __post_init__(self) -> None:
        check.fields(self, probability=below_one, kind=partial(check.choice, FAILURE_KINDS))
