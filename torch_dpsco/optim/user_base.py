"""What optimizers that protect users have in common."""

from __future__ import annotations

from torch_dpsco.accounting.filters import Budget
from torch_dpsco.errors import UnitError

__all__ = ["require_user"]


def require_user(budget: Budget) -> None:
    """Raises UnitError unless the budget protects users."""
    if budget.unit != "user":
        raise UnitError(f"budget must be of unit 'user': Budget(..., unit='user') (got {budget.unit!r})")
