"""Whether delta is small beside the number of records that it is to protect."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch_dpsco.accounting.budgets.budget import Budget
from torch_dpsco.errors import warn

_IN_PARTS: ContextVar[bool] = ContextVar("in_parts", default=False)


@contextmanager
def parts() -> Iterator[None]:
    """Inside, nothing is said of delta: whoever parted the budget has judged the whole."""
    token = _IN_PARTS.set(True)
    try:
        yield
    finally:
        _IN_PARTS.reset(token)


def warn_of_delta(budget: Budget | None, n: int, stacklevel: int = 2) -> None:
    """Warns where delta is 1/n or more; called wherever a budget meets a public number of records or users.

    Publishing k of n records that are picked at random is (0, k/n)-differentially private, since one record is among
    them with probability k/n.

    Args:
        budget: None says nothing; nor does one that is stated as a risk, whose delta is no probability.
        n: public number of what the budget protects.
        stacklevel: as in `errors.warn`.
    """
    if budget is None or budget.risk or _IN_PARTS.get() or budget.delta < 1.0 / max(n, 1):
        return
    open_records = max(1, math.floor(budget.delta * n * (1.0 + 1e-12)))
    warn(
        f"delta must be far below 1/n={1 / n:.2g} (got {budget.delta:g}): publishing {open_records}"
        f" of the {n} {budget.unit}s in the open, picked at random, satisfies such a budget; give a"
        f" delta of {0.1 / n:.2g} or less",
        stacklevel + 1,
    )
