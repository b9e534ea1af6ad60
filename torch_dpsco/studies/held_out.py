"""A released model on private records that were held out: what scores and conformal sets read and ask alike.

The settings of both are public; shapes and dtypes may raise, values of records must not.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.adjacency import ADD_REMOVE, Adjacency
from torch_dpsco.accounting.budgets.budget import Budget
from torch_dpsco.errors import AdjacencyError, UnitError
from torch_dpsco.estimators.data import as_codes, as_column, as_features
from torch_dpsco.rng import Keystream, Stream
from torch_dpsco.sampling.users import user_ids

BLOCK = 1024  # rows that a model sees at a time, filled up with zeros
CPU = torch.device("cpu")


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


def ledger_of(budget: Budget, accountant: Accountant | None, groups: Any) -> tuple[Accountant, float | None]:
    """Returns the ledger that a release is charged to, and the delta of its report.

    Raises:
        AdjacencyError: the accountant is of another adjacency.
        UnitError: groups without a budget of unit "user", or the reverse, or an accountant of another unit.
    """
    if (budget.unit == "user") != (groups is not None):
        raise UnitError(f"groups must be given with a budget of unit 'user', and only then (got unit {budget.unit!r})")
    ledger = Accountant(budget) if accountant is None else accountant
    ledger.require_unit(budget.unit)
    if ledger.adjacency != budget.adjacency:
        raise AdjacencyError(
            f"budget must have the adjacency of the accountant, {ledger.adjacency} (got {budget.adjacency})"
        )
    delta = budget.delta if ledger.budget is None else None
    ledger.report(delta)  # raises, before anything is charged, if the ledger has no answer at this delta
    return ledger, delta


def held_out(X: Any, y: Any, labels: list[Any], groups: Any) -> HeldOut:
    """Returns private records, whose targets are places of public labels if there are any, else numbers."""
    features = as_features(X)
    count = len(features)
    users = None if groups is None else user_ids(groups, count, "groups")
    targets = (
        as_codes(y, labels, count, CPU).double() if labels else as_column(y, "y", count, CPU).to(CPU, torch.float64)
    )
    rows, valid = features.cpu().numpy(), (features.isfinite().all(1).cpu() & targets.isfinite()).numpy()
    valid &= (targets >= 0).numpy() if labels else True
    # PRIVACY: a record that the model would refuse counts for nothing (test_a_null_record_counts_for_nothing)
    rows, truth = np.where(valid[:, None], rows, 0.0).astype(rows.dtype), np.where(valid, targets.numpy(), 0.0)
    return HeldOut(rows, truth, valid, users)


def public_labels(model: Any, classes: Any) -> list[Any]:
    """Returns the labels that were given, or else the model's."""
    given = getattr(model, "classes_", None) if classes is None else classes
    if given is None or isinstance(given, (str, bytes)) or not hasattr(given, "__iter__"):
        raise ValueError(f"classes must be the public labels, as (0, 1), or the model's (got {check.shown(given)})")
    labels = list(given.tolist() if hasattr(given, "tolist") else given)
    if not all(isinstance(label, Hashable) for label in labels) or len(set(labels)) < max(2, len(labels)):
        raise ValueError(f"classes must be two or more different labels (got {check.shown(given)})")
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
    array = np.array(values.detach().cpu() if isinstance(values, Tensor) else values, dtype=np.float64)
    if array.shape != shape:
        raise ValueError(f"model must give numbers of shape {shape} for {shape[0]} rows (got shape {array.shape})")
    return array


def asked(method: Callable[[Any], Any], rows: NDArray[Any], read: Callable[[Any], NDArray[Any]]) -> NDArray[Any]:
    """Returns what a method says of rows, in blocks of one public size, so that products round alike in all of them."""
    found = []
    # PRIVACY: a product of another size rounds all rows in another way (test_the_model_sees_blocks_of_one_size)
    for start in range(0, max(len(rows), 1), BLOCK):
        block = rows[start : start + BLOCK]
        padded = np.zeros((BLOCK, rows.shape[1]), dtype=rows.dtype)
        padded[: len(block)] = block
        found.append(read(method(padded))[: len(block)])
    return np.concatenate(found)


def split(units: int, share: float, adjacency: Adjacency, source: Stream | None = None) -> NDArray[np.bool_]:
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
