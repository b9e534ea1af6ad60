"""User-level clipping around a public center: each user's mean is clipped at a distance from it.

    mean = c + (1/n) ( sum_j clip(x_j - c, C) + N(0, (z C)^2 I) ),    clip(v, C) = v min(1, C / |v|)

with x_j the mean of the rows of user j. Whatever the rows of a user hold, they move the sum by a vector of norm at most
C, so that all that is known about means of clipped rows holds with users for records: it is the same code, fed with one
row per user. c = 0 is user-level DP-SGD.

| user | contribution to the sum |
|---|---|
| |x_j - c| <= C | x_j - c |
| farther | scaled to length C |
| a row with NaN or inf, or sums that overflow | exactly 0 |
| fewer than min_items rows, or none | exactly 0 |

The center is fixed before the rows are read: a constant, or an exponential average of released means,

    c_{t+1} = decay c_t + (1 - decay) mean_t.

A center of the batch itself (its mean or median) has no bounded sensitivity, and cannot be given.

Differs from the usual federated averaging in: 1. the mean of a user's rows, not the sum; 2. the center.

Source: docs/proofs/user_level.md#clipped-means-of-users.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.adjacency import Adjacency
from torch_dpsco.accounting.designs import BaseEvent, Design, Draw
from torch_dpsco.oracles.base import Charge, Release, split_like
from torch_dpsco.oracles.clipped import ClippedMean
from torch_dpsco.oracles.users.rows import UserMean
from torch_dpsco.rng import Source
from torch_dpsco.rows import DenseBlock, GradBatch


class Centered(UserMean):
    """Noisy mean of users' means, clipped around a public center.

    Args:
        clipping: how users' means are clipped, with its noise and divisor, in users: `Clipped`, `HolderClipped`, or
            `AdaptiveClipped` (one vote per user, charged). It is this oracle's own from here on.
        n_users: ids are in [0, n_users).
        center: public start of c, a tensor per parameter; None for 0.
        decay: in [0, 1), of the average of releases that c follows; None keeps c.
        min_items: rows that a user must have, public.

    Guarantee:
        Unit: user, all rows of one. Event: that of `clipping`, with users for rows: add_remove, zero_out and
        replace_one (n_users public). The sampling of a design must be one of users. Assumes that a user's rows do not
        depend on other users, except for the rounding of a mean loss.

    Example:
        >>> from torch_dpsco.oracles.clipped import Clipped
        >>> oracle = Centered(Clipped(1.0, 0.0, batch_size=2), n_users=2)
        >>> oracle.open([torch.zeros(1)])
        >>> rows = GradBatch([DenseBlock(torch.tensor([[0.5], [0.25], [9.0]]))])
        >>> oracle.observe(rows, users=torch.tensor([0, 0, 1]))
        >>> round(oracle.release(torch.Generator()).mean[0].item(), 2)
        0.69
    """

    def __init__(
        self,
        clipping: ClippedMean,
        n_users: int,
        *,
        center: Sequence[Tensor] | None = None,
        decay: float | None = None,
        min_items: int = 1,
    ) -> None:
        super().__init__(clipping.batch_size, n_users, center, min_items)
        clipping.take()
        self._clipping = clipping
        self.decay = None if decay is None else check.nonnegative(decay=decay)
        if self.decay is not None and self.decay >= 1:
            raise ValueError(f"decay must be in [0, 1) (got {decay})")
        self._start = self._center

    def charge(self, design: Design, draw: Draw) -> Charge:
        """Returns what the clipped mean is charged."""
        return self._clipping.charge(design, draw)

    @property
    def center(self) -> Tensor | None:
        """The center of the next release: (D,) float64, public; None for 0."""
        return None if self._center is None else self._center.clone()

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
        """Clips the users' means, adds noise and the center."""
        return self.around_center(self.clip_users().release(generator))

    def clip_users(self) -> ClippedMean:
        """Returns the oracle of the clipped mean, which has added the users of this process."""
        means, items = self._users.take()
        if self._center is not None:
            means.sub_(self._center)
        # PRIVACY: before the clip, which then bounds every user (test_no_user_moves_the_mean_past_the_sensitivity)
        kept = GradBatch([DenseBlock(part) for part in self._by_parameter(means[items >= self.min_items])])
        self._clipping.observe(kept)
        return self._clipping

    def around_center(self, answer: Release) -> Release:
        """Adds the center to a release of the clipped mean, which it follows."""
        if self._center is not None:
            for part, shift in zip(answer.mean, split_like(self._center, self._users.shapes), strict=True):
                part.add_(shift)
        if self.decay is not None:
            released = torch.cat([part.reshape(-1).double() for part in answer.mean])
            before = torch.zeros_like(released) if self._center is None else self._center
            # PRIVACY: of releases only (test_the_center_follows_releases_and_nothing_else)
            self._center = self.decay * before + (1.0 - self.decay) * released
        return answer

    def _by_parameter(self, means: Tensor) -> list[Tensor]:
        parts = means.split([shape.numel() for shape in self._users.shapes], dim=1)
        return [part.reshape(-1, *shape) for part, shape in zip(parts, self._users.shapes, strict=True)]

    def settings(self) -> dict[str, Any]:
        """Returns the fixed numbers."""
        return {
            **self._clipping.settings(),
            "averaged": "users",
            "n_users": self._users.n_users,
            "min_items": self.min_items,
            "decay": self.decay,
            "center": None if self._start is None else self._start.tolist(),
        }

    def state(self) -> dict[str, Any]:
        """Returns the center and the state of the clipping: public."""
        center = None if self._center is None else self._center.clone()
        return {"center": center, "clipping": self._clipping.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from a saved center; drops an open batch."""
        self.discard()
        self._center = None if state["center"] is None else state["center"].clone()
        self._clipping.restore(state["clipping"])

    def metrics(self) -> dict[str, float]:
        """Returns clip and noise_std of the last batch."""
        return self._clipping.metrics()
