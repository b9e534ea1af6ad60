"""Records and the objective of a task, built from the data as a plan says. Nothing here is private."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_dpsco.accounting.adjacency import ADD_REMOVE
from torch_dpsco.errors import ConditionError, UnitError
from torch_dpsco.linear.objectives import Adversarial, LinearObjective, SoftmaxObjective, Tilted
from torch_dpsco.linear.objectives.base import Objective, Records
from torch_dpsco.linear.task import LinearTask
from torch_dpsco.losses.classification import SoftmaxCrossEntropy

_KINK = 1e-3  # public smoothing of the norm of an adversarial objective


def make_records(task: LinearTask, features: Tensor, targets: Tensor, weights: Tensor | None = None) -> Records:
    """Returns the records of a task, prepared when they are read; targets and weights are clipped to their bounds.

    Raises:
        ConditionError: weights for a tilted mean, whose constants have equal ones.
        UnitError: their number is not the public one under replace_one and zero_out, or is above n_max under
            add_remove, which tells that the promise was broken.
        ValueError: shapes or dtypes.
    """
    if features.dim() != 2 or features.shape[1] != task.dim:
        raise ValueError(f"features must be of shape (n, {task.dim}) (got {tuple(features.shape)})")
    if targets.shape != (len(features),) or targets.is_complex():
        raise ValueError(f"targets must be real, ({len(features)},) (got {targets.dtype}, {tuple(targets.shape)})")
    if task.adjacency != ADD_REMOVE and len(features) != task.n:
        # PRIVACY: n is public there, and the data must have it (test_another_number_of_records_is_refused)
        raise UnitError(f"features must have n={task.n} records under {task.adjacency} (got {len(features)})")
    if task.adjacency == ADD_REMOVE and len(features) > task.n_max:
        # PRIVACY: contraction and norms of minimizers rest on it (test_more_records_than_promised_are_refused)
        raise UnitError(f"n_max={task.n_max} must be a public cap on the number of records: there are more")
    if weights is not None:
        if task.tilt:
            raise ConditionError("weights must not be given for a tilted mean, whose constants have equal ones")
        # PRIVACY: all constants are those of weight 1 (test_weights_above_one_are_clipped); NaN makes a null record
        weights = weights.double().clamp(0.0, 1.0)
    classes = task.loss.num_classes if isinstance(task.loss, SoftmaxCrossEntropy) else None
    if task.bound_y is not None:
        targets = targets.double().clamp(-task.bound_y, task.bound_y)  # NaN stays: a null record
    elif classes is None:
        # PRIVACY: other labels would be longer gradients (test_a_label_that_is_no_sign_makes_a_null_record)
        signs = targets.double()
        targets = torch.where(signs.abs() == 1, signs, torch.nan)
    return Records(features, targets, weights, num_classes=classes, prepare=task.preparation)


def build_objective(task: LinearTask, reg: float, records: Records, linear_term: Tensor | None = None) -> Objective:
    """Returns the objective of a task: in sum form except for tilted ones, with a linear term or None."""
    if task.tilt:
        return Tilted(task.loss, records, tilt=task.tilt, reg=reg / task.n, bound_x=task.preparation.bound)
    if task.attack_radius:
        return Adversarial(
            task.loss,  # checked there
            records,
            attack_radius=task.attack_radius,
            reg=reg,
            normalizer=1.0,
            attack_norm=task.attack_norm,
            smoothing=_KINK,
        )
    if isinstance(task.loss, SoftmaxCrossEntropy):
        return SoftmaxObjective(
            records, num_classes=task.loss.num_classes, reg=reg, normalizer=1.0, linear_term=linear_term
        )
    loss = task.loss if task.clipped is None else task.clipped
    return LinearObjective(loss, records, reg=reg, normalizer=1.0, linear_term=linear_term)
