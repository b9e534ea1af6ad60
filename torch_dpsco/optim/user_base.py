"""What optimizers that protect users have in common: their loader draws users."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset

from torch_dpsco.accounting.events import ADD_REMOVE
from torch_dpsco.accounting.filters import Budget
from torch_dpsco.errors import UnitError
from torch_dpsco.optim import checks
from torch_dpsco.optim.base import PrivateOptimizer
from torch_dpsco.sampling import UserLoader, user_ids

__all__ = ["UserOptimizer", "require_user"]


def require_user(budget: Budget) -> None:
    """Raises UnitError unless the budget protects users."""
    if budget.unit != "user":
        raise UnitError(f"budget must be of unit 'user': Budget(..., unit='user') (got {budget.unit!r})")


class UserOptimizer(PrivateOptimizer):
    """Base of the optimizers that protect users: their loader draws users, and tells `step` whose rows it delivered."""

    def loader(  # type: ignore[override]
        self,
        dataset: Dataset[Any],
        users: Any,
        *,
        steps: int | None = None,
        resume: bool = False,
        physical_batch_size: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        padding: bool | None = None,
    ) -> UserLoader:
        """Returns a loader that draws users by this optimizer's design, and delivers all their rows with their ids.

        Args:
            dataset: map-style data set of records.
            users: the id of the user of each record: integers in [0, n_users), or strings (and other things that hash),
                which are numbered in order of appearance. Under replace_one and zero_out n_users is the public
                universe, and users without a record are legal; under add_remove users are numbered without gaps.
            steps: draws per iteration; default all that are planned and left.
            resume: see `PrivateOptimizer.loader`.
            physical_batch_size: most rows of a chunk; `step()` adds them up.
            collate_fn: as in DataLoader.
            num_workers: as in DataLoader.
            pin_memory: as in DataLoader.
            padding: see `PrivateOptimizer.loader`; default True, for the number of a user's rows is private.

        Raises:
            UnitError: ids that are no integers, are missing, or are out of range.
        """
        ids = user_ids(users, checks.number_of_records(dataset))
        n_users = self.design.n
        if self.adjacency == ADD_REMOVE and len(ids):
            n_users = int(ids.max()) + 1
            if n_users > self.design.n:
                raise UnitError(
                    f"users must be numbered below n_users={self.design.n}, the reference (got a larger id, or more "
                    f"users): number them without gaps, and give an n_users that is large enough"
                )
        if steps is None and self.schedule.steps is not None and not self.design.one_pass:
            steps = max(1, self.schedule.steps - self._steps)
        sampler = self._new_sampler(n_users, steps, resume)
        loader = UserLoader(
            dataset,
            sampler,
            ids,
            physical_batch_size=physical_batch_size,
            collate_fn=collate_fn,
            num_workers=num_workers,
            pin_memory=pin_memory,
            slots=self._slots(padding, physical_batch_size, sampler),
        )
        self.bind(loader)
        return loader
