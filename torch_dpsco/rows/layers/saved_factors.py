"""What the backward of a recorded layer keeps of its rows, in the cheapest form.

The rows of a layer y_t = W a_t + c on sequences (T = 1 for vectors; a convolution is such a layer on patches) are

    dW_i = sum_t g_it a_it^T,    dc_i = sum_t g_it,    g_it = gradient of record i's loss in y_it

and are either formed in the backward, (B, out, in), or left as the two factors, (B, T, in) and (B, T, out), of which
`SequenceBlock` takes norms and sums. The rule: form them if out * in <= 4 T (out + in). Formed rows then take at most
4 times the memory of the factors, which the backward frees at once, and cost what the weight gradient costs: their
norms and weighted sums are one pass over them. Factors need float64, for their norms because sum_st (g_s.g_t)(a_s.a_t)
cancels, and for their sums because the terms may be larger than the row; so counting flops alone (2 T^2 < out * in)
would choose them too often. Vectors (T = 1 of Linear) have no cancellation and are never formed.

T, to which a batch is padded, is taken for public here as in every layer: the longest record decides it, and with it
the last bits of all rows and the choice of the form. So both forms enlarge norms by the same factor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_dpsco.errors import SequenceError
from torch_dpsco.rows.base import Block, work_dtype
from torch_dpsco.rows.dense import DenseBlock, piece_norms
from torch_dpsco.rows.factored import MAX_TIMES, FactoredBlock, SequenceBlock, outer_sums


class Kept(ABC):
    """Rows of the weight (and bias) of one layer."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of rows."""

    @abstractmethod
    def plus(self, others: Sequence[Kept]) -> Kept:
        """Returns the sums of these rows and others of the same records; all of this class."""

    @abstractmethod
    def then(self, others: Sequence[Kept]) -> Kept:
        """Returns these rows followed by those of other records; all of this class."""

    @abstractmethod
    def formed(self) -> Formed:
        """Returns the rows themselves."""

    @abstractmethod
    def blocks(self, *, weight: bool, bias: bool) -> list[Block]:
        """Returns the rows of weight and bias, or of one of them."""


def added(uses: Sequence[Kept]) -> Kept:
    """Returns the rows of a layer that was used several times in one forward."""
    if len({len(use) for use in uses}) > 1:
        # PRIVACY: a use without a batch dimension would be added to every row
        # (test_uses_of_a_layer_that_see_different_numbers_of_records_are_refused)
        raise SequenceError("a layer that is used several times in a forward must see all records each time")
    uses = _of_one_form(uses)
    return uses[0] if len(uses) == 1 else uses[0].plus(uses[1:])


def joined(passes: Sequence[Kept]) -> Kept:
    """Returns the rows of several passes one after another."""
    passes = _of_one_form(passes)
    return passes[0] if len(passes) == 1 else passes[0].then(passes[1:])


def _of_one_form(all_kept: Sequence[Kept]) -> Sequence[Kept]:
    return all_kept if len({type(kept) for kept in all_kept}) == 1 else [kept.formed() for kept in all_kept]


class Formed(Kept):
    """The rows themselves.

    Args:
        weight: (B, *shape), None if it is not trained.
        bias: (B, *shape) likewise; one of them is there.
        pieces: `piece_norms` of the weight's rows, where they are known.
    """

    def __init__(self, weight: Tensor | None, bias: Tensor | None, pieces: Tensor | None = None) -> None:
        self._parts, self._pieces = [weight, bias], pieces

    def __len__(self) -> int:
        return len(next(part for part in self._parts if part is not None))

    def plus(self, others: Sequence[Kept]) -> Kept:
        """Returns the sums."""
        return Formed(*(None if not parts else torch.stack(parts).sum(0) for parts in self._columns(others)))

    def then(self, others: Sequence[Kept]) -> Kept:
        """Returns the rows one after another."""
        return Formed(*(torch.cat(parts) if parts else None for parts in self._columns(others)))

    def _columns(self, others: Sequence[Kept]) -> list[list[Tensor]]:
        columns = zip(self._parts, *(other.formed()._parts for other in others), strict=True)
        found = [[part for part in column if part is not None] for column in columns]
        if any(len(column) not in (0, len(others) + 1) for column in found):
            raise SequenceError("requires_grad of a weight or bias must not change between the backwards of a step")
        return found

    def formed(self) -> Formed:
        """Returns itself."""
        return self

    def blocks(self, *, weight: bool, bias: bool) -> list[Block]:
        """Returns a dense block for each."""
        parts = zip(self._parts, (self._pieces, None), (weight, bias), strict=True)
        return [DenseBlock(part, pieces) for part, pieces, chosen in parts if chosen and part is not None]


def leaves_factors(times: int, out: int, width: int) -> bool:
    """Returns whether rows of T pairs take less as factors; see the rule above."""
    return times <= MAX_TIMES and out * width > 4 * times * (out + width)


def pairs(acts: Tensor, backprops: Tensor, shape: torch.Size, *, weight: bool, bias: bool, scale: int) -> Kept:
    """Returns the rows of a layer y_t = W a_t + c in the form that costs least.

    Args:
        acts: (B, T, in) inputs.
        backprops: (B, T, out) gradients in the outputs.
        shape: of W, of out * in numbers.
        weight: whether W is trained.
        bias: whether c is.
        scale: all rows are multiplied by it.
    """
    vectors = acts.shape[1] == 1 and len(shape) == 2
    # float64 has no wider precision in which the norms of factors could be certified
    double = torch.float64 in (acts.dtype, backprops.dtype)
    if vectors or (weight and not double and leaves_factors(acts.shape[1], backprops.shape[2], acts.shape[2])):
        if scale != 1 and (not vectors or shape[0] == 1):  # later, for several outputs: that saves a pass over memory
            backprops, scale = backprops * scale, 1
        return _Pairs(acts, backprops, shape, weight=weight, bias=bias, scale=scale)
    return _formed(acts, backprops, shape, weight=weight, bias=bias, scale=scale)


def require_unwritten(tensors: Sequence[Tensor], versions: Sequence[int]) -> None:
    """Raises SequenceError if a tensor was written to since it had its version."""
    if [tensor._version for tensor in tensors] != list(versions):
        # PRIVACY: a buffer that has the next batch by now would put its records into this step
        # (test_an_input_that_is_overwritten_before_the_step_is_refused)
        raise SequenceError(
            "the input of a layer was overwritten between backward and step: fill a buffer with the next batch after "
            "optimizer.step(), or give the model a copy of it"
        )


def _formed(acts: Tensor, backprops: Tensor, shape: torch.Size, *, weight: bool, bias: bool, scale: int = 1) -> Formed:
    sums = backprops.sum(1, dtype=work_dtype(backprops.dtype)).mul_(scale) if bias else None
    if not weight:
        return Formed(None, sums)
    rows = outer_sums(acts, backprops, scale)
    return Formed(rows.view(len(acts), *shape), sums, piece_norms(rows.flatten(1)))  # while they are in cache


class _Pairs(Kept):
    """The factors; arguments of `pairs`."""

    def __init__(
        self, acts: Tensor, backprops: Tensor, shape: torch.Size, *, weight: bool, bias: bool, scale: int = 1
    ) -> None:
        self.acts, self.backprops, self.shape, self.scale = acts, backprops, shape, scale
        self.trained = {"weight": weight, "bias": bias}
        self._versions = acts._version, backprops._version

    def _require_unwritten(self) -> None:
        require_unwritten((self.acts, self.backprops), self._versions)

    def __len__(self) -> int:
        return self.acts.shape[0]

    def _sides(self, others: Sequence[Kept]) -> list[tuple[Tensor, ...]]:
        all_pairs = [p for p in (self, *others) if isinstance(p, _Pairs)]
        for p in all_pairs:
            p._require_unwritten()
        return list(zip(*[(p.acts, p.backprops * p.scale) for p in all_pairs], strict=True))

    def plus(self, others: Sequence[Kept]) -> Kept:
        """Returns one longer sequence per record."""
        acts, backprops = (torch.cat(side, dim=1) for side in self._sides(others))
        return pairs(acts, backprops, self.shape, scale=1, **self.trained)

    def then(self, others: Sequence[Kept]) -> Kept:
        """Returns sequences of one length: pairs of zeros add nothing."""
        sides = self._sides(others)
        times = max(part.shape[1] for part in sides[0])
        acts, backprops = (
            torch.cat([F.pad(part, (0, 0, 0, times - part.shape[1])) for part in side]) for side in sides
        )
        return _Pairs(acts, backprops, self.shape, **self.trained)

    def formed(self) -> Formed:
        """Returns the rows."""
        self._require_unwritten()
        return _formed(self.acts, self.backprops, self.shape, **self.trained, scale=self.scale)

    def blocks(self, *, weight: bool, bias: bool) -> list[Block]:
        """Returns a factored block of vectors, or one of sequences and the rows of the bias."""
        self._require_unwritten()
        if self.acts.shape[1] == 1 and len(self.shape) == 2:
            acts, backprops = self.acts[:, 0], self.backprops[:, 0]
            return [FactoredBlock(acts, backprops, weight=weight, bias=bias, scale=self.scale)]
        found: list[Block] = [SequenceBlock(self.acts, self.backprops, self.shape)] if weight else []
        return found + _formed(self.acts, self.backprops, self.shape, weight=False, bias=bias).blocks(
            weight=False, bias=bias
        )
