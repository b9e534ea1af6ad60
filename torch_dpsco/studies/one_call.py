"""A study in one call: its plan is shown, and then carried out."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch_dpsco._doors import typed
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.events import ADD_REMOVE
from torch_dpsco.schema import Schema
from torch_dpsco.studies.study import Study, plan_study, require_readable, units_of


@typed
def study(
    frame: Any,
    schema: Schema,
    budget: Budget,
    *,
    n: int | None = None,
    show: Callable[[str], Any] | None = print,
    ledger_path: str | os.PathLike[str] | None = None,
    check: bool = True,
    **settings: Any,
) -> Study:
    """Looks at the table, plans a study, shows the plan, and carries it out.

    Args:
        frame: the private table, as `Schema.read` takes it.
        schema: what is public about it.
        budget: of all of it together.
        n: public number of units; None for that of the table, where it is public (replace_one, zero_out).
        show: what is called with the plan in words before anything is spent; None for nothing.
        ledger_path: of the ledger file; None keeps the ledger in memory.
        check: whether the table is looked at first, without noise and on your machine: what does not fit its schema is
            written to standard error, and nothing is spent on a table that cannot be read (`require_readable`).
        settings: see `plan_study`.

    Guarantee:
        The budget, for all that the study holds together, predictions for public rows included. Running time is not
        covered, nor is the look: that a study was made tells that it did not stop. Source:
        docs/proofs/accounting.md#parts-of-a-partition.
    """
    if check:
        require_readable(schema, frame)
    if n is None:
        if budget.adjacency == ADD_REMOVE:
            raise ValueError(
                "n must be given under add_remove, where the number of units is private (got None)"
            )
        n = units_of(schema.read(frame))[0]
    plan = plan_study(schema, budget, n=n, **settings)
    if show is not None:
        show(str(plan))
    return plan.run(frame, ledger_path=ledger_path, check=False)
