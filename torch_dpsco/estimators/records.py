"""What a solver needs to know about an objective, and the records that objectives are built from.

Records are in memory, or in parts of which one is (`objectives.parts`), and read in blocks: float64 arithmetic without
a float64 copy of the data. Every sum is taken in blocks of at most 1024 rows, and the block sums are added pairwise. A
term then passes through at most `Records.depth` additions whatever order the kernels use inside a block, and the error
of a sum is at most gamma(depth) times the sum of the absolute terms (`accounting.analysis.rounding.gamma`).
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from torch_dpsco import native
from torch_dpsco.accounting.analysis.rounding import DOUBLE, scaled_up

_T = TypeVar("_T")


def require_double(point: Tensor, dim: int) -> None:
    """Raises ValueError unless the point is a float64 vector and autocast is off: rounding bounds need float64."""
    if point.dtype != torch.float64 or point.shape != (dim,):
        raise ValueError(
            f"the point must be float64 of shape ({dim},) (got {point.dtype}, {tuple(point.shape)})"
        )
    if torch.is_autocast_enabled(point.device.type):
        raise ValueError("certificates must not run under autocast, which lowers the precision")


class Objective(ABC):
    """F(w) for w in R^dim, mu-strongly convex, evaluated in float64 with proved bounds on the rounding.

    Values, gradients and errors depend on private data: nothing of them may be shown.

    Attributes:
        dim: dimension of w.
        device: of w.
        strong_convexity: mu of the whole function, on all of R^dim; >= 0.
        smoothness: beta, the Lipschitz constant of the gradient on all of R^dim; None if it jumps. It may be read off
            the data (no promise is needed then), and is as private as they are.
    """

    dim: int
    device: torch.device
    strong_convexity: float
    smoothness: float | None

    @abstractmethod
    def value_and_gradient(self, point: Tensor) -> tuple[float, Tensor]:
        """F(w) and a subgradient, which is the gradient where there is one; w float64 of shape (dim,)."""

    @abstractmethod
    def gradient_error(self, point: Tensor) -> float:
        """Bound on the norm of the rounding error of the computed gradient at w; inf if the gradient jumps."""

    def value(self, point: Tensor) -> float:
        """F(w)."""
        return self.value_and_gradient(point)[0]

    def gradient(self, point: Tensor) -> Tensor:
        """The gradient alone."""
        return self.value_and_gradient(point)[1]

    def thinned(self) -> tuple[Objective, Objective] | None:
        """What is near enough for a first guess, and for a first Hessian, and costs less; None where nothing is."""
        return None

    @abstractmethod
    def hessian(self, point: Tensor) -> Tensor:
        """Second derivative, shape (dim, dim), one-sided at kinks of the gradient."""


RawPart = tuple[Tensor, Tensor, Tensor]  # features, targets, weights
BLOCK_ROWS = 1024
_TILED_ROWS = 16 * 1024  # each passes 32 additions in a tile, and those of 512 tiles
_SHORT = 32  # columns up to which reading what was computed is faster than computing it
_WIDE = 128  # from which a product in BLAS is faster
_BLOCK_ENTRIES = 2**22  # 32 MiB of float64: wide rows come in shorter blocks
_KEPT_ENTRIES = (
    2**24
)  # 128 MiB of float64: fewer prepared numbers are kept, more are prepared at each reading


class RowLosses(NamedTuple):
    """Losses of records for C, see `native.Table.scored`."""

    columns: Tensor
    kind: str
    gain: float


class PairwiseSum:
    """Sum of a stream of tensors: the sums of 2^k terms are merged like the digits of a binary counter.

    Of m terms each passes through at most 2 ceil(log2(m + 1)) additions, and only log2(m) tensors are kept.

    Example:
        >>> total = PairwiseSum(torch.zeros(1))
        >>> for term in (1.0, 2.0, 3.0):
        ...     total.add(torch.tensor([term]))
        >>> total.result().tolist()
        [6.0]
    """

    def __init__(self, zero: Tensor) -> None:
        self._zero = zero
        self._sums: list[tuple[int, Tensor]] = []

    def add(self, term: Tensor) -> None:
        """Adds one term, which must not change afterwards."""
        rank = 0
        while self._sums and self._sums[-1][0] == rank:
            term = self._sums.pop()[1] + term
            rank += 1
        self._sums.append((rank, term))

    def result(self) -> Tensor:
        """The sum so far; zero if there were no terms."""
        total = self._zero
        for _, part in reversed(self._sums):
            total = total + part
        return total


def pairwise(terms: Tensor) -> Tensor:
    """Returns the sum of terms (m, ...) by the additions of `PairwiseSum`, in its order: those of 0 are exact."""
    while len(terms) > 1:
        if len(terms) % 2:
            terms = torch.cat([terms, torch.zeros_like(terms[:1])])
        terms = terms[::2] + terms[1::2]
    return terms[0] if len(terms) else terms.sum(0)


class Records:
    """Features, targets and weights of n records; a record that cannot be used is a null record and contributes 0.

    Null are: a weight of 0 (or a weight that is not finite and positive), a non-finite feature or target, features
    whose squares overflow. Their features read as 0 and their weight is 0, so that 0 * NaN never occurs.

    Args:
        features: shape (n, d), floating point, any device; neither copied nor changed.
        targets: shape (n,), on the same device; real, +-1, or class numbers of an integer dtype.
        weights: shape (n,) or None for ones.
        num_classes: K if the targets are class numbers; others than 0..K-1 make null records.
        prepare: public map of float64 rows (B, d) to rows (B, d'), each a function of its own row alone; applied to a
            block whenever it is read, in C where it has `numbers` for that. None leaves rows as they are.
        block_rows: rows of a block, at most; None for 1024.
        shrunk: whether targets are shrunk with the rows that `prepare`, a `Preparation`, cuts.

    Raises:
        ValueError: if shapes, dtypes or devices do not fit; never because of a value.

    Attributes:
        norms: (n,) float64 norms ||x||, each within gamma(d + 4), 0 for null records.
        targets: (n,) float64, or int64 class numbers; 0 for null records.
        weights: (n,) float64, 0 exactly for null records.
    """

    _table: native.Table | None = None  # of records in memory that C reads

    def __init__(
        self,
        features: Tensor,
        targets: Tensor,
        weights: Tensor | None = None,
        *,
        num_classes: int | None = None,
        prepare: Callable[[Tensor], Tensor] | None = None,
        block_rows: int | None = None,
        shrunk: bool = False,
    ) -> None:
        if features.dim() != 2 or not features.is_floating_point():
            raise ValueError(
                f"features must be floating point, (n, d) (got {features.dtype},"
                f" {tuple(features.shape)})"
            )
        self._features = features.detach()
        self._prepare = prepare
        self.num_classes = num_classes
        self._table = _table(self._features, prepare)
        self.count = len(features)
        self.dim = self._read(features.new_zeros(1, features.shape[1])).shape[1]
        self.device = features.device
        if num_classes is not None:
            _require_integers(targets)
        self._rows = max(1, min(block_rows or BLOCK_ROWS, _BLOCK_ENTRIES // max(self.dim, 1)))
        targets = self._column("targets", targets)
        if shrunk:
            targets = targets * self._shares()
        if weights is None:
            weights = torch.ones(self.count, device=self.device)
        weights = self._column("weights", weights)
        norms = self._measure()
        used = norms.isfinite() & targets.isfinite() & weights.isfinite() & (weights > 0)
        if num_classes is not None:
            used &= (targets >= 0) & (targets < num_classes)
        # PRIVACY: masked, since 0 * NaN is NaN (test_a_nan_label_and_an_unknown_class_make_null_records)
        targets = torch.where(used, targets, 0)
        self.targets = targets.double() if num_classes is None else targets.long()
        self.weights = torch.where(used, weights.double(), 0.0)
        self.norms = torch.where(used, norms, 0.0)
        self._used = used
        self._known = dict[Any, Any]()
        self._clean = _clean(used, self._rows)

    @property
    def depth(self) -> int:
        """Number of additions that a term of a sum over the records passes through, at most."""
        blocks = max(1, math.ceil(self.count / self._rows))
        return min(self._rows, self.count) + 2 * math.ceil(math.log2(blocks + 1))

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yields (rows, their features in float64, null records as 0)."""
        for index, start in enumerate(range(0, self.count, self._rows)):
            rows = slice(start, min(start + self._rows, self.count))
            block = (
                self._read(self._features[rows])
                if self._table is None
                else self._table.images(start, rows.stop)
            )
            yield (
                rows,
                (
                    block
                    if self._clean[index]
                    else torch.where(self._used[rows].unsqueeze(1), block, 0.0)
                ),
            )

    def sum(self, of: Callable[[Records], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Sums over all records, of a function that returns those over records in memory."""
        return of(self)

    def once(self, key: Any, make: Callable[[], _T]) -> _T:
        """Returns what is made of the records, which is kept by its key."""
        if key not in self._known:
            self._known[key] = make()
        made: _T = self._known[key]
        return made

    def thinning(self, step: int) -> int:
        """A step of `thinned` that leaves no more records than memory is for: a multiple of `step`."""
        return step

    def thinned(self, step: int) -> Records:
        """Every step-th record, a view: for a first guess of a solver, never for a certificate."""
        fewer = copy.copy(self)
        fewer._known = {}
        for name in ("_features", "_used", "targets", "weights", "norms"):
            setattr(fewer, name, getattr(self, name)[::step])
        fewer._table = None if self._table is None else self._table[::step]
        fewer.count = len(fewer.targets)
        fewer._clean = _clean(fewer._used, self._rows)
        return fewer

    def select(self, chosen: Tensor) -> Tensor:
        """Features of some records in float64, shape (k, d), for row numbers (k,); 0 for null records."""
        rows = (
            self._read(self._features[chosen])
            if self._table is None
            else self._table[chosen].images()
        )
        return torch.where(self._used[chosen].unsqueeze(1), rows, 0.0)

    @property
    def in_c(self) -> bool:
        """Whether the records are read in C, see `native.Table`."""
        return self._table is not None

    def scored(
        self,
        point: Tensor,
        losses: RowLosses,
        bends: Tensor | None = None,
        scores: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Sums of losses and of their gradients in w, shape (d,), in C; see `native.Table.scored`."""
        assert self._table is not None
        columns, kind, gain = losses
        total = self._table.scored(
            columns,
            point,
            self._rows,
            bends,
            kind=kind,
            gain=gain,
            scores=scores,
        )
        return total[-1], total[: self.dim]

    def classes(self, points: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Sums of softmax cross-entropies and of their gradients, shape (K, d), in C; see `native.Table.classes`."""
        assert self._table is not None
        return self._table.classes(columns, points.contiguous(), self._rows)

    def keep(self) -> None:
        """Computes short prepared rows once where they take little memory, since they will be read many times."""
        few = self.count * (self.dim + 3) <= _KEPT_ENTRIES
        if self._table is not None and self.dim <= _SHORT and few:
            self._table.keep(self._used)

    def _read(self, block: Tensor) -> Tensor:
        return block.double() if self._prepare is None else self._prepare(block.double())

    def scores(self, weight: Tensor) -> Tensor:
        """X w, shape (n,), for w of shape (d,); each within gamma(d) ||x|| ||w||."""
        scores = self.zeros(self.count)
        for rows, block in self.blocks():
            scores[rows] = block @ weight
        return scores

    def combine(self, slopes: Tensor) -> Tensor:
        """X^T r, shape (d,), for r of shape (n,)."""
        if self._table is not None:
            # PRIVACY: the image of a record with a bad target is not 0
            # (test_a_null_record_adds_nothing_to_a_combination)
            slopes = torch.where(self._used, slopes, 0.0)
            fixed = RowLosses(slopes.view(1, -1), "fixed", 1.0)
            return self.scored(self.zeros(self.dim), fixed)[1]
        total = PairwiseSum(self.zeros(self.dim))
        for rows, block in self.blocks():
            total.add(slopes[rows] @ block)
        return total.result()

    def fold(
        self, weight: Tensor, terms: Callable[[Tensor, slice], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """One pass over the data: the sums of the losses and of the gradients.

        Args:
            weight: w, shape (d,) or (K, d).
            terms: maps the scores of a block, (B,) or (B, K), and its rows to its losses (B,) and slopes like scores.

        Returns:
            (sum of losses, sum of slope x); a scalar and a tensor of the shape of `weight`.
        """
        value = PairwiseSum(self.zeros())
        gradient = PairwiseSum(self.zeros(*weight.shape))
        for rows, block in self.blocks():
            losses, slopes = terms(
                block @ weight.T if weight.dim() == 2 else block @ weight, rows
            )
            value.add(losses.sum())
            gradient.add(slopes.T @ block if weight.dim() == 2 else slopes @ block)
        return value.result(), gradient.result()

    def gram(self, curvatures: Tensor) -> Tensor:
        """X^T diag(c) X, shape (d, d), for c of shape (n,)."""
        total = PairwiseSum(self.zeros(self.dim, self.dim))
        if self._table is not None and self.dim < _WIDE:
            step = self._rows if self._rows < BLOCK_ROWS else _TILED_ROWS
            for start in range(0, self.count, step):
                total.add(self._table.gram(curvatures, start, start + step))
            return total.result()
        if bool((curvatures >= 0).all()):
            roots = curvatures.sqrt()
            plain = bool((roots == 1).all())
            for rows, block in self.blocks():
                total.add(_squares(block if plain else block * roots[rows].unsqueeze(1)))
            return total.result()
        for rows, block in self.blocks():
            total.add((block * curvatures[rows].unsqueeze(1)).T @ block)
        return total.result()

    def below(self, values: Tensor, most: float) -> Tensor:
        """Sum of the weights of records whose value, of (n,), is at most this."""
        if self.in_c:
            return native.below(values.contiguous(), self.weights, most, self._rows)
        return self.total(self.weights * (values <= most))

    def total(self, terms: Tensor) -> Tensor:
        """Sum of n numbers, shape ()."""
        whole = self.count - self.count % self._rows
        sums = terms[:whole].view(-1, self._rows).sum(1)
        return pairwise(
            torch.cat([sums, terms[whole:].sum(0, keepdim=True)]) if whole < self.count else sums
        )

    def zeros(self, *shape: int) -> Tensor:
        """Float64 on the device of the records."""
        return torch.zeros(shape, dtype=torch.float64, device=self.device)

    def _column(self, name: str, column: Tensor) -> Tensor:
        if column.shape != (self.count,) or column.device != self.device or column.is_complex():
            raise ValueError(
                f"{name} must be real of shape ({self.count},) on {self.device} "
                f"(got {column.dtype}, {tuple(column.shape)} on {column.device})"
            )
        return column.detach()

    def _shares(self) -> Tensor:
        """What is left of each row's length, (n,)."""
        if self._table is not None:
            return self._table.shares
        shares: Callable[[Tensor], Tensor] = self._prepare.shares  # type: ignore[union-attr]
        parts = torch.split(self._features, BLOCK_ROWS)
        return torch.cat([shares(part) for part in parts])

    def distances(self, center: Tensor) -> Tensor:
        """Distances of rows that are cut, and not moved, from a point, each of its row alone: those in use."""
        if self._table is not None:
            return self._table.distances(center)
        distances = torch.empty_like(self.weights)
        for rows, block in self.blocks():
            distances[rows] = torch.linalg.vector_norm((block - center).contiguous(), dim=1)
        return distances

    def _measure(self) -> Tensor:
        """Norms of the rows, inf for those with a non-finite entry; what torch prepares is kept where it is little."""
        if self._table is not None:
            return self._table.norms
        few = self._prepare is not None and self.count * self.dim <= _KEPT_ENTRIES
        kept = self.zeros(self.count, self.dim) if few else None
        norms = self.zeros(self.count)
        for start in range(0, self.count, self._rows):
            rows = slice(start, start + self._rows)
            raw = self._features[rows]
            image = self._read(raw)
            # PRIVACY: the raw row decides, whatever its image is (test_a_row_that_a_map_makes_finite_stays_null)
            norms[rows] = torch.where(
                raw.isfinite().all(1), torch.linalg.vector_norm(image, dim=1), math.inf
            )
            if kept is not None:
                kept[rows] = image
        if kept is not None:
            self._features = kept
            self._prepare = None
        return norms


def _clean(used: Tensor, rows: int) -> list[bool]:
    """Returns whether all records of each block are used."""
    blocks = -(-len(used) // rows)
    if bool(used.all()):
        return [True] * blocks
    return [bool(part.all()) for part in torch.split(used, rows)]


def _squares(half: Tensor) -> Tensor:
    """Returns A' A, which numpy knows to be symmetric."""
    if half.device.type != "cpu":
        return half.T @ half
    array = half.numpy()
    return torch.from_numpy(array.T @ array)


def _table(features: Tensor, prepare: Callable[[Tensor], Tensor] | None) -> native.Table | None:
    """Returns the rows for C, by public facts; None where torch reads them."""
    dim = features.shape[1]
    numbers = getattr(prepare, "numbers", None)
    if (prepare is not None and numbers is None) or not native.suits(
        features[:, :1], double=True
    ):
        return None
    # columns of a table lie side by side: they are copied where prepared rows would be
    rows = (
        features.contiguous()
        if features.stride(1) != 1 and features.numel() <= _KEPT_ENTRIES
        else features
    )
    given = (
        [math.inf, math.inf, 0.0, 0.0, 0.0, *[0.0] * dim, *[1.0] * dim]
        if numbers is None
        else numbers(dim)
    )
    return (
        native.Table(rows, given)
        if given is not None and native.suits(rows, double=True)
        else None
    )


def _require_integers(targets: Tensor) -> None:
    kind = targets.dtype
    if kind.is_floating_point or kind.is_complex or kind == torch.bool:
        raise ValueError(f"targets must be class numbers of an integer dtype (got {kind})")


def sum_terms(n: int) -> int:
    """Returns m: the error of a sum of n terms is at most m u times the sum of their sizes, up to O(u^2).

    Example:
        >>> sum_terms(10**6)
        1034
    """
    return min(n, BLOCK_ROWS) + (-(-n // BLOCK_ROWS) - 1).bit_length()


def gradient_rounding(
    n: int,
    dim: int,
    *,
    lipschitz: float,
    smoothness: float,
    reg: float,
    norm: float,
    weight: float = 1.0,
    linear: float = 0.0,
    score_offset: float = 0.0,
) -> float:
    """Returns e_grad, which bounds how far a computed gradient (and its norm) is from the exact one.

    Args:
        n: records, >= 1; the public n or n_max for a check before the run.
        dim: d >= 1.
        lipschitz: L > 0, bound on the gradient of a loss.
        smoothness: beta >= 0 of a loss.
        reg: lam >= 0, in the same form as the objective.
        norm: |w| >= 0, or a bound on it.
        weight: sum of the weights of the losses: 1 for a mean, n_max / n for a sum over a constant n, n_max for a sum.
        linear: |b| >= 0 of a linear term.
        score_offset: >= 0, what the loss adds to a score, over the bound on |x| (`Problem.score_offset`).

    Source: docs/proofs/output.md#rounding-of-a-gradient

    Example:
        >>> gradient_rounding(10**5, 20, lipschitz=1.0, smoothness=0.25, reg=1e-4, norm=5.0) < 2e-13
        True
    """
    terms = weight * lipschitz + reg * norm + linear
    scores = (dim + 8) * weight * smoothness * (norm + score_offset)
    return scaled_up(DOUBLE * ((sum_terms(n) + dim + 16) * terms + scores), 16)


def project(point: Tensor, radius: float) -> Tensor:
    """Pi onto B(0, R), within gamma(d + 8) R."""
    if math.isinf(radius):
        return point
    length = float(torch.linalg.vector_norm(point))
    return point * (radius / length) if length > radius else point


class Stored(ABC):
    """Raw records that are not in memory as rows, of which a fit reads sums; `streams` has blocks and partitions.

    Attributes:
        noted: what tells the records of a first reading from others, as private as they are; None before it.
    """

    noted: Any = None

    @abstractmethod
    def empty(self) -> RawPart:
        """Returns a part (features, targets, weights) without rows, of the dtypes and widths of all of them."""

    @abstractmethod
    def count(self, most: int) -> int:
        """Returns the number of records; one that exceeds `most` where there are more."""

    @abstractmethod
    def records(self, prepared: Callable[..., Records], most: int) -> Records:
        """Returns records of which sums are all that is known.

        Args:
            prepared: makes records in memory of a raw part, in blocks of so many rows; it may travel.
            most: public cap on their number, beyond which they are not counted on.
        """
