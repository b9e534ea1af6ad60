"""A released model on private records that were held out: what scores and conformal sets read and ask alike.

A model of the user's sees several records at once. Each stands in a slot of its own draw, in blocks of one public size,
so that no record moves what is said of another (docs/proofs/record_isolation.md#held-out-records).

The settings of both are public; shapes and dtypes may raise, values of records must not.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.budgets import Budget, one_budget
from torch_dpsco.accounting.events import ADD_REMOVE, Adjacency
from torch_dpsco.errors import AdjacencyError, NotCertifiedError, UnitError, warn
from torch_dpsco.estimators.reading import as_codes, as_column, as_features, require_dtype
from torch_dpsco.estimators.schema import Table
from torch_dpsco.noise import Keystream, Stream, sampling_generator
from torch_dpsco.sampling.loader import user_ids
from torch_dpsco.sampling.slots import free_slots
from torch_dpsco.trial import RandomStreams, Refused, attempt

BLOCK = 1024  # rows that a model sees at a time, filled up with zeros
CPU = torch.device("cpu")
_KEPT = np.arange(BLOCK) % 2 == 0  # made-up rows that stay where others change

Method = Callable[[Any], Any]  # of a model, which takes a block of rows
Read = Callable[[Any], NDArray[Any]]  # makes numbers of what it says


@dataclass(frozen=True)
class HeldOut:
    """Private records.

    Args:
        rows: (n, d), finite; those of null records are 0.
        truth: (n,) float64 targets, or places of labels; those of null records are 0.
        valid: (n,) False for a null record, which must count for nothing.
        users: (n,) of each row's user; None where the unit is a record.
    """

    rows: NDArray[Any]
    truth: NDArray[np.float64]
    valid: NDArray[np.bool_]
    users: Tensor | None

    @property
    def units(self) -> int:
        """Number of records, or of users."""
        return len(self.rows) if self.users is None else len(np.unique(self.users))


def agreed_budget(
    budget: Budget | None,
    epsilon: float | None,
    delta: float | None,
    accountant: Accountant | None,
    groups: Any,
) -> Budget:
    """Returns the budget; where it does not say so, of the accountant's adjacency, and of users if there are groups."""
    adjacency = None if accountant is None else accountant.adjacency
    unit = "example" if groups is None else "user"
    return one_budget(budget, epsilon, delta).under(adjacency, unit)


def ledger_of(
    budget: Budget, accountant: Accountant | None, groups: Any = None
) -> tuple[Accountant, float | None]:
    """Returns the ledger that a release is charged to, and the delta of its report.

    Raises:
        AdjacencyError: the accountant is of another adjacency.
        UnitError: groups with a budget of unit "example", or the reverse, or an accountant of another unit.
    """
    if (budget.unit == "user") != (groups is not None):
        raise UnitError(
            "groups must be given with a budget of unit 'user', and only then (got unit"
            f" {budget.unit!r})"
        )
    ledger = Accountant(budget) if accountant is None else accountant
    if groups is not None and ledger.unit != "user":
        raise UnitError(
            f"groups must go with an accountant of unit 'user' (got unit {ledger.unit!r}): make it"
            " of Budget(..., unit='user')"
        )
    ledger.require_unit(budget.unit, budget.adjacency)
    if ledger.adjacency != budget.adjacency:
        # PRIVACY: the noise is for one adjacency (test_a_ledger_of_another_adjacency_is_refused_by_a_transformer)
        raise AdjacencyError(
            f"accountant must have the adjacency {budget.adjacency!r} (got {ledger.adjacency!r})"
        )
    delta = budget.delta if ledger.budget is None else None
    # raises, before anything is charged, if the ledger has no answer at this delta
    ledger.report(delta)
    return ledger, delta


def held_out(X: Any, y: Any, labels: list[Any], groups: Any) -> HeldOut:
    """Returns private records, whose targets are places of public labels if there are any, else numbers."""
    features = as_features(X)
    count = len(features)
    users = None if groups is None else user_ids(groups, count, "groups")
    targets = (
        as_codes(y, labels, count, CPU).double()
        if labels
        else as_column(y, "y", count, CPU).to(CPU, torch.float64)
    )
    require_dtype(y, labels or None)
    rows = features.cpu().numpy()
    valid = (features.isfinite().all(1).cpu() & targets.isfinite()).numpy()
    valid &= (targets >= 0).numpy() if labels else True
    # PRIVACY: a record that the model would refuse counts for nothing (test_a_null_record_counts_for_nothing)
    rows = np.where(valid[:, None], rows, 0.0).astype(rows.dtype)
    truth = np.where(valid, targets.numpy(), 0.0)
    return HeldOut(rows, truth, valid, users)


def public_labels(model: Any, classes: Any) -> list[Any]:
    """Returns the labels that were given, or else the model's."""
    given = getattr(model, "classes_", None) if classes is None else classes
    if given is None:
        raise ValueError(
            "classes must be given, as (0, 1), for a model without classes_, which a fitted"
            f" classifier has (got {check.shown(model)}): fit it first; a regressor takes"
            " metric='absolute_error', or the bound of intervals"
        )
    if isinstance(given, (str, bytes)) or not hasattr(given, "__iter__"):
        raise ValueError(
            "classes must be the public labels, as (0, 1), or the model's (got"
            f" {check.shown(given)})"
        )
    labels = list(given.tolist() if hasattr(given, "tolist") else given)
    if not all(isinstance(label, Hashable) for label in labels) or len(set(labels)) < max(
        2, len(labels)
    ):
        raise ValueError(
            f"classes must be two or more different labels (got {check.shown(given)})"
        )
    return labels


def method_of(model: Any, name: str) -> Callable[[Any], Any]:
    """Returns a method that the model must have."""
    found = getattr(model, name, None)
    if not callable(found):
        raise ValueError(f"model must have a method {name} for this (got {check.shown(model)})")
    return found  # type: ignore[no-any-return]


def numbers(values: Any, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Returns what a model said as float64 of that shape."""
    # PRIVACY: a model may give the numbers of each block in one array (test_a_model_that_fills_one_array_again_is_read)
    said = values.detach().cpu().double().numpy() if isinstance(values, Tensor) else values
    array = np.array(said, dtype=np.float64)
    if array.shape != shape:
        raise ValueError(
            f"model must give numbers of shape {shape} for {shape[0]} rows (got shape"
            f" {array.shape})"
        )
    return array


def asked(method: Method, read: Read, rows: NDArray[Any]) -> NDArray[Any]:
    """Returns what a method says of rows, each of which stands where no other row moves it, among rows of zeros.

    Args:
        method: of a model.
        read: returns numbers (BLOCK, ...) of what the method says of a block.
        rows: (n, d).
    """
    found: NDArray[Any] | None = None
    # PRIVACY: a row at another place, or among more rows, is rounded in another way
    # (test_a_record_that_leaves_moves_no_other, test_the_model_sees_blocks_of_one_size)
    for mine, slots in free_slots(len(rows), BLOCK, sampling_generator()):
        block = np.zeros((BLOCK, rows.shape[1]), dtype=rows.dtype)
        block[slots] = rows[mine]
        said = read(method(block))
        if found is None:
            found = np.empty((len(rows), *said.shape[1:]), dtype=said.dtype)
        found[mine] = said[slots]  # a copy: a model may fill what it returned once more
    assert found is not None  # there is always a block
    return found


def require_apart(method: Method, read: Read, width: int, dtype: Any) -> None:
    """Asks about made-up rows: what is said of a row must not depend on others in its block, nor on blocks before.

    Args:
        method: of a model; global random numbers are the same in each call, and then what they were.
        read: as of `asked`.
        width: d, numbers in a row.
        dtype: of the rows.

    Raises:
        NotCertifiedError: it does, by a bit or more.
    """
    found = _of_made_up_rows(method, read, width, dtype)
    if isinstance(found, Refused):
        warn(
            "it could not be tried that the model says of a row what depends on that row alone:"
            f" {found}"
        )
        return
    alone, beside, after, again = found
    repeats = np.array_equal(after, again, equal_nan=True)
    agree = partial(np.array_equal if repeats else np.allclose, equal_nan=True)
    # PRIVACY: one record would move what is said of all others (test_a_model_that_couples_rows_is_refused)
    if not (agree(alone[_KEPT], beside[_KEPT]) and agree(alone, after) and agree(after, again)):
        raise NotCertifiedError(
            "model must say of a row what depends on that row alone (made-up rows got other answers"
            " beside or after other rows): call model.eval(), and normalize by public constants,"
            " not by the batch"
        )
    if not repeats:
        warn(
            "what the model says of a row differs from call to call in its last bits, which may"
            " depend on other rows"
        )


def _of_made_up_rows(
    method: Method, read: Read, width: int, dtype: Any
) -> list[NDArray[Any]] | Refused:
    """Returns what is said of a block, of one with half of its rows, and of the first one twice, or how that failed."""
    made_up = np.random.default_rng(0)
    size = (BLOCK, width)
    kinds = [
        (made_up.normal(size=size), 10.0 + 30.0 * made_up.normal(size=size)),
        (made_up.integers(2, size=size), np.ones(size)),  # for models that take no other numbers
    ]
    found: list[NDArray[Any]] | Refused = []
    for first, others in kinds:
        blocks = (first, np.where(_KEPT[:, None], first, others), first, first)
        found = _answers(method, read, [block.astype(dtype) for block in blocks])
        if not isinstance(found, Refused):
            break
    return found


def _answers(
    method: Method, read: Read, blocks: list[NDArray[Any]]
) -> list[NDArray[Any]] | Refused:
    """Returns what a method says of each block, with the same random numbers, or how it failed."""
    streams = RandomStreams()
    said = []
    for block in blocks:
        answer = attempt("on made-up rows it", partial(method, block))
        streams.restore()
        if isinstance(answer, Refused):
            return answer
        said.append(np.array(read(answer)))
    return said


def split(
    units: int, share: float, adjacency: Adjacency, source: Stream | None = None
) -> NDArray[np.bool_]:
    """Returns which units are held out: as many as the share says, or under add_remove by one coin each.

    Args:
        units: their number.
        share: in (0, 1).
        adjacency: of the guarantee.
        source: of the draw; None for a fresh one.
    """
    source = Keystream() if source is None else source
    held = np.zeros(units, dtype=bool)
    if adjacency == ADD_REMOVE:
        # PRIVACY: another unit must not move this one (test_under_add_remove_each_unit_has_a_coin_of_its_own)
        return np.asarray(source.integers(2**53, units) < round(share * 2**53))
    held[source.subset(units, round(share * units))] = True
    return held


def units_of(table: Table) -> tuple[int, NDArray[Any]]:
    """Returns the number of units, and the place of each row's unit among them."""
    if table.groups is None:
        return len(table.X), np.arange(len(table.X))
    names, places = np.unique(table.groups, return_inverse=True)
    return len(names), places
