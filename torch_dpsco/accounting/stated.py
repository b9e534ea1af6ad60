"""Guarantees proved elsewhere, as events, with the adjacencies under which they were proved."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from torch_dpsco import _validate as check
from torch_dpsco.accounting.adjacency import ADJACENCIES, Adjacency, assign, below_one, check_adjacency
from torch_dpsco.errors import AdjacencyError


@dataclasses.dataclass(frozen=True)
class Stated:
    """A guarantee that holds under the adjacencies for which it was proved."""

    def require(self, adjacency: Adjacency) -> None:
        """Raises AdjacencyError if the guarantee was not stated for that adjacency."""
        if adjacency not in self.adjacencies:  # type: ignore[attr-defined]
            raise AdjacencyError(f"{self} is not stated for {adjacency}")

    def __post_init__(self) -> None:
        given = self.adjacencies  # type: ignore[attr-defined]
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise ValueError(f"adjacencies must be a tuple of names (got {given!r})")
        stated = tuple(sorted({check_adjacency(a) for a in given}))
        if not stated:
            raise ValueError("adjacencies must name at least one adjacency (got none)")
        assign(self, adjacencies=stated)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("eps", "rho", "xi", "mu"):
                assign(self, **{field.name: check.nonnegative(**{field.name: value})})
            elif field.name == "delta":
                assign(self, delta=below_one(delta=value))


_ALL = tuple(sorted(ADJACENCIES))


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
        assign(self, dim=check.positive_count(dim=self.dim))
        if check.positive_count(p=self.p) != 2:
            raise ValueError(f"p must be 2 (got {self.p}); Laplace is the one for p = 1")
        assign(self, p=2)  # plain: it enters JSON


@dataclasses.dataclass(frozen=True)
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
        given: tuple[tuple[str, Any], ...] = (("orders", self.orders), ("values", self.values))
        for name, numbers in given:
            if isinstance(numbers, str) or not isinstance(numbers, Iterable):
                raise ValueError(f"{name} must be numbers, one for each order (got {numbers!r})")
        orders = tuple(check.order(orders=order) for order in self.orders)
        values = tuple(check.nonnegative(values=value, allow_inf=True) for value in self.values)
        if not orders or len(orders) != len(values):
            raise ValueError(f"orders and values must be equally many, >= 1 (got {len(orders)} and {len(values)})")
        if any(later <= earlier for earlier, later in pairwise(orders)):
            raise ValueError(f"orders must increase (got {orders})")
        assign(self, orders=orders, values=values)


FAILURE_KINDS = ("coupling", "transcript", "per_side")


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
        probability = below_one(probability=self.probability)
        assign(self, probability=probability, kind=check.choice(FAILURE_KINDS, kind=self.kind))
