"""The part of one process in the batches of a run of several: positions rank, rank + W, rank + 2W, ... of W processes.

A Poisson draw takes each position independently with probability q. So each process can draw its own positions by
itself, from a stream of its own, and the union over the processes IS a draw of the design:

    P(batch = S) = prod_r P(S_r drawn by r),    S_r = the positions of S that r owns

Every position has exactly one owner, so that no record is in a batch twice. A process that draws nothing delivers an
empty batch, so that all make the same number of steps. "Full" batches are split in the same way. Designs whose
positions depend on each other (fixed sizes, permutations) are refused.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from torch_dpsco import _validate as check
from torch_dpsco.accounting.designs import Design, Draw, Full, Poisson
from torch_dpsco.errors import UnknownSamplerError
from torch_dpsco.rng import rank_generator
from torch_dpsco.sampling.samplers import DesignSampler, kind_of

_Indices = npt.NDArray[np.int64]


def require_divisible(design: Design) -> None:
    """Raises UnknownSamplerError unless processes can draw their own positions without knowing what others draw."""
    if not isinstance(design, (Poisson, Full)):
        # PRIVACY: parts that are drawn independently are no batch of another design
        # (test_designs_whose_positions_depend_on_each_other_are_refused)
        raise UnknownSamplerError(
            f"design must be Poisson or Full in a run of several processes, which draw without knowing of each other "
            f"(got {design}): give n= to HolderSGD, or sampling='poisson' or 'full' to ClippedSGD.plan"
        )


class RankSampler(DesignSampler):
    """Draws the positions that one of several processes owns.

    Args:
        design: Poisson or Full; of all processes together.
        rank: of this process, 0..processes-1.
        processes: how many there are.
        key: 32 secret bytes, the same on all processes, for this sampler only.
        size: number of records there are, those of the others included; default design.n.
        steps: draws per iteration, equal on all processes; default one epoch.

    Raises:
        UnknownSamplerError: another design.
        UnitError: the size is not n where the design needs it to be.

    Guarantee:
        The union over the ranks of the k-th draws has the law of one draw of the design: streams of different ranks are
        distinct and independent whatever seeds the processes have set. Assumes that all ranks read the same records in
        the same order.

    Example:
        >>> parts = [RankSampler(Full(5), rank=r, processes=2, key=bytes(32), steps=1) for r in (0, 1)]
        >>> [indices.tolist() for part in parts for _, indices in part.draws()]
        [[0, 2, 4], [1, 3]]
    """

    kind = Design

    def __init__(
        self,
        design: Design,
        *,
        rank: int,
        processes: int,
        key: bytes,
        size: int | None = None,
        steps: int | None = None,
    ) -> None:
        require_divisible(design)
        super().__init__(design, size=size, steps=steps)
        self.processes = check.positive_count(processes=processes)
        self.rank = check.count(rank=rank)
        if self.rank >= self.processes:
            raise ValueError(f"rank must be < processes={self.processes} (got {self.rank})")
        owned = len(range(self.rank, self.size, self.processes))
        self._own = kind_of(design)(design, size=owned, steps=self.steps)
        # PRIVACY: streams that are equal draw equal places, and a batch is no Poisson draw any more
        # (test_equal_streams_of_ranks_are_caught)
        self._own.rng = rank_generator(key, self.rank)
        self._iterations = 0

    def draws(self) -> Iterator[tuple[Draw, _Indices]]:
        """Yields the draws of one iteration, numbered across iterations, with this rank's positions."""
        first = self._iterations * self.steps
        self._iterations += 1
        for index, (draw, indices) in enumerate(self._own.draws(), start=first):
            yield Draw(draw.size, index=index), self.rank + self.processes * indices
