"""Rows that were computed without a backward, left on the parameters for the optimizer's next step to take.

They wait where the rows of `ghost_backward` do: one block of all parameters, in an attribute of one of them. A step
takes it by `GradBatch.consume`, and everything that clears rows clears it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from torch_dpsco.errors import SequenceError
from torch_dpsco.rows.dense import DenseBlock, DenseBlocks
from torch_dpsco.rows.ghost import MARK


class LeftRows(DenseBlocks):
    """Dense rows that know their parameters.

    Args:
        params: at least one.
        rows: (B, *p.shape) for each of them.
    """

    def __init__(self, params: Sequence[nn.Parameter], rows: Sequence[Tensor]) -> None:
        super().__init__([DenseBlock(part) for part in rows])
        self._params = list(params)

    def order(self, params: Sequence[nn.Parameter]) -> list[int]:
        """Returns the places of the block's parameters among others; raises SequenceError unless they are the same."""
        place = {id(p): i for i, p in enumerate(params)}
        if place.keys() != {id(p) for p in self._params}:
            # PRIVACY: else a parameter would move by rows that are not its own, or by none
            # (test_left_rows_are_taken_in_the_order_of_the_optimizer)
            raise SequenceError("the optimizer must train exactly the parameters whose rows were left")
        return [place[id(p)] for p in self._params]


def leave_rows(params: Sequence[nn.Parameter], rows: Sequence[Tensor]) -> None:
    """Leaves rows for the next step of the optimizer of these parameters.

    Args:
        params: all that the optimizer trains, at least one.
        rows: (B, *p.shape) for each of them, not divided by a batch size (see `GradBatch.averaged`).

    Raises:
        SequenceError: rows are waiting already.
    """
    if any(MARK in p.__dict__ or getattr(p, "grad_sample", None) is not None for p in params):
        # PRIVACY: rows of another batch would be dropped in silence, or be joined with these
        # (test_rows_are_not_left_beside_others)
        raise SequenceError("rows are waiting for a step already: make it, or call optimizer.discard()")
    params[0].__dict__[MARK] = LeftRows(params, rows)


def forget_rows(params: Sequence[nn.Parameter]) -> None:
    """Drops what `leave_rows` has left and no step has taken."""
    for p in params:
        if isinstance(p.__dict__.get(MARK), LeftRows):
            del p.__dict__[MARK]
