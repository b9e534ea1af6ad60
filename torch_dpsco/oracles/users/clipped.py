"""User-level clipping: each user's mean is clipped.

    mean = (1/n) ( sum_j clip(x_j, C) + N(0, (z C)^2 I) ),    clip(v, C) = v min(1, C / |v|)

with x_j the mean of the rows of user j. Whatever the rows of a user hold, they move the sum by a vector of norm at most
C, so that all that is known about means of clipped rows holds with users for records: it is the same code, fed with one
row per user.

| user | contribution to the sum |
|---|---|
| |x_j| <= C | x_j |
| longer | scaled to length C |
| a row with NaN or inf, or sums that overflow | exactly 0 |
| fewer than min_items rows, or none | exactly 0 |

Differs from the usual federated averaging in: the mean of a user's rows, not the sum.

Source: docs/proofs/user_level.md#clipped-means-of-users.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torch_dpsco.accounting.designs import BaseEvent, Design, Draw
from torch_dpsco.accounting.events import Adjacency
from torch_dpsco.oracles.base import Charge, Release
from torch_dpsco.oracles.clipped import ClippedMean
from torch_dpsco.oracles.users.rows import UserMean
from torch_dpsco.rng import Source
from torch_dpsco.rows import DenseBlock, GradBatch


class UserClipped(UserMean):
    """Noisy mean of users' clipped means.

    Args:
        clipping: how users' means are clipped, with its noise and divisor, in users: `Clipped`, `HolderClipped`, or
            `AdaptiveClipped` (one vote per user, charged). It is this oracle's own from here on.
        n_users: ids are in [0, n_users).
        min_items: rows that a user must have, public.

    Guarantee:
        Unit: user, all rows of one. Event: that of `clipping`, with users for rows: add_remove, zero_out and
        replace_one (n_users public). The sampling of a design must be one of users. Assumes that a user's rows do not
        depend on other users, except for the rounding of a mean loss.

    Example:
        >>> import torch
        >>> from torch_dpsco.oracles.clipped import Clipped
        >>> oracle = UserClipped(Clipped(1.0, 0.0, batch_size=2), n_users=2)
        >>> oracle.open([torch.zeros(1)])
        >>> rows = GradBatch([DenseBlock(torch.tensor([[0.5], [0.25], [9.0]]))])
        >>> oracle.observe(rows, users=torch.tensor([0, 0, 1]))
        >>> round(oracle.release(torch.Generator()).mean[0].item(), 2)
        0.69
    """

    def __init__(self, clipping: ClippedMean, n_users: int, *, min_items: int = 1) -> None:
        super().__init__(clipping.batch_size, n_users, min_items)
        clipping.take()
        self._clipping = clipping

    def charge(self, design: Design, draw: Draw) -> Charge:
        """Returns what the clipped mean is charged."""
        return self._clipping.charge(design, draw)

    @property
    def clipping(self) -> ClippedMean:
        """How users' means are clipped."""
        return self._clipping

    @property
    def assumptions(self) -> tuple[str, ...]:  # type: ignore[override]
        """What several processes assume."""
        if self._clipping.processes == 1:
            return ()
        have = "have a shard each: all records of a user on one, whatever their values"
        return (f"{self._clipping.processes} processes that trust each other {have}",)

    def use_exact_noise(self) -> None:
        """Draws the noise of the clipped mean in integers."""
        self._clipping.use_exact_noise()

    def open(self, query: Sequence[Tensor], step: int = 0) -> None:
        """Starts a logical batch; forgets an unfinished one."""
        super().open(query, step)
        self._clipping.open(query, step)

    def discard(self) -> None:
        """Forgets the logical batch."""
        super().discard()
        self._clipping.discard()

    def sensitivity(self, adjacency: Adjacency) -> float:
        """Returns how far one user moves the mean, rounding included."""
        return self._clipping.sensitivity(adjacency)

    def event(self) -> BaseEvent:
        """Returns the event of the clipped mean."""
        return self._clipping.event()

    def release(self, generator: Source) -> Release:
        """Clips the users' means and adds noise."""
        return self.clip_users().release(generator)

    def clip_users(self) -> ClippedMean:
        """Returns the oracle of the clipped mean, which has added the users of this process."""
        means, items = self._users.take()
        # PRIVACY: before the clip, which then bounds every user (test_no_user_moves_the_mean_past_the_sensitivity)
        kept = GradBatch(
            [DenseBlock(part) for part in self._by_parameter(means[items >= self.min_items])]
        )
        self._clipping.observe(kept)
        return self._clipping

    def _by_parameter(self, means: Tensor) -> list[Tensor]:
        parts = means.split([shape.numel() for shape in self._users.shapes], dim=1)
        return [
            part.reshape(-1, *shape) for part, shape in zip(parts, self._users.shapes, strict=True)
        ]

    def settings(self) -> dict[str, Any]:
        """Returns the fixed numbers."""
        return {
            **self._clipping.settings(),
            "averaged": "users",
            "n_users": self._users.n_users,
            "min_items": self.min_items,
        }

    def state(self) -> dict[str, Any]:
        """Returns the state of the clipping: public."""
        return self._clipping.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from a saved state; drops an open batch."""
        self.discard()
        self._clipping.restore(state)

    def metrics(self) -> dict[str, float]:
        """Returns clip and noise_std of the last batch."""
        return self._clipping.metrics()
