"""An oracle of a stranger, whose noise is prescribed: what a step costs depends on the iterates before it.

It is known before the step is made, from public history, but not before the run: it needs a filter or an odometer.

Source: docs/proofs/holder.md#prescribed-noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.designs import Design, Draw
from torch_dpsco.accounting.events import clipped_gaussian
from torch_dpsco.problem import Problem
from torch_dpsco.step.oracle import Charge, HolderClipped

_BITS = 10  # of the ratio that the ledger sees


class HolderAbsolute(HolderClipped):
    """Clips at G(|w_t|) and adds noise whose std on the mean is given.

    The ledger is told the ratio of noise to clip rounded down to 10 bits, which costs at most 0.2 % of it and lets a
    run have few distinct events.

    Args:
        problem: promised constants; see `Problem.grad_bound`.
        noise_std: std of the noise on the released mean, > 0; or one per step, the last one for all steps after.
        batch_size: public divisor.
        radius: bound of the feasible set; inf for the whole space.

    Raises:
        MissingConstantError: constants are missing.

    Example:
        >>> import torch
        >>> from torch_dpsco.losses import Squared
        >>> oracle = HolderAbsolute(Squared().problem(bound_x=1.0), noise_std=0.5, batch_size=10)
        >>> for point in (0.0, 3.0):
        ...     oracle.open([torch.full((1,), point)])
        ...     print(round(oracle.clip, 2), oracle.event().sigma)
        1.0 4.9921875
        4.0 1.248046875
    """

    def __init__(
        self,
        problem: Problem,
        noise_std: float | Sequence[float],
        batch_size: int,
        *,
        radius: float = math.inf,
    ) -> None:
        super().__init__(problem, 0.0, batch_size, radius=radius)
        given = (noise_std,) if isinstance(noise_std, (int, float)) else tuple(noise_std)
        if not given:
            raise ValueError(
                "noise_std must hold a number for each step, at least one (got none)"
            )
        self._stds = tuple(check.positive(noise_std=std) for std in given)
        self._step = 0
        self._set(
            problem.grad_bound(0.0) / self.batch_size
        )  # the first event is one at the origin

    def _set(self, sensitivity: float) -> None:
        exact = self._stds[min(self._step, len(self._stds) - 1)] / sensitivity
        mantissa, exponent = math.frexp(exact * (1.0 - 2.0**-50))
        # PRIVACY: rounded down (test_the_ledger_is_told_no_more_noise_than_is_drawn)
        self._multiplier = math.ldexp(math.floor(mantissa * 2**_BITS), exponent - _BITS)
        self._event = clipped_gaussian(self._multiplier, self._exact)

    def open(self, query: Sequence[Tensor], step: int = 0) -> None:
        """Fixes clip, noise and event by the public point."""
        super().open(query, step)
        self._step = check.count(step=step)
        self._set(self.sensitivity("zero_out"))
        if self._exact:
            self._plan_grid()  # of this step's noise

    def charge(self, design: Design, draw: Draw) -> Charge:
        """Returns what the release of the open batch is charged; the next one depends on the iterate."""
        return super().charge(design, draw)._replace(adaptive=True)

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on the released mean."""
        return self._stds[min(self._step, len(self._stds) - 1)]

    def settings(self) -> dict[str, Any]:
        """Returns the fixed numbers."""
        follow = super().settings()
        del follow["noise_multiplier"], follow["noise"]
        return follow | {"noise_std": list(self._stds)}
