"""Audit of one run of any training loop: canaries, the score that every loss gives, and the check of a whole script."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

from torch_dpsco import _validate as check
from torch_dpsco._doors import typed
from torch_dpsco.accounting.report.figures import rounded_up
from torch_dpsco.audit.one_run import Family, OneRunAudit, OneRunResult
from torch_dpsco.audit.repeated import rounded_down
from torch_dpsco.doctor import doctor
from torch_dpsco.sampling.loader import to_device

_BELOW = 1.0 - 1e-6  # of the bound: rounding must not carry an input over it

Canary = tuple[Tensor, Tensor]


@typed
def canaries(
    count: int, *, like: Sequence[Any], bound_x: float, labels: Sequence[Any], seed: int = 0
) -> list[Canary]:
    """Returns records for an audit: inputs on the bound, orthogonal as far as there are dimensions, random labels.

    Args:
        count: >= 1.
        like: a record (input, target), of which shapes and dtypes alone are taken; the input is a floating tensor.
        bound_x: public bound on the norm of an input as one vector, > 0; it is reached.
        labels: public values to draw targets from, e.g. (-1, 1), (0, 1), range(10).
        seed: of the directions and labels, which are no secrets: the coins are.

    Returns:
        `count` pairs (input, target) of the shapes and dtypes of `like`.

    Raises:
        ValueError: an argument is out of range, or `like` is not such a record.

    Example:
        >>> made = canaries(3, like=(torch.zeros(4), torch.tensor(1.0)), bound_x=2.0, labels=(-1, 1))
        >>> [round(float(x.norm()), 4) for x, _ in made]
        [2.0, 2.0, 2.0]
    """
    check.positive_count(count=count)
    check.positive(bound_x=bound_x)
    if (
        len(like) != 2
        or not isinstance(like[0], Tensor)
        or not like[0].is_floating_point()
        or not like[0].numel()
    ):
        raise ValueError(
            "like must be a record (input, target) whose input is a floating tensor (got"
            f" {type(like).__name__} of {', '.join(type(part).__name__ for part in like)})"
        )
    if not len(labels):
        raise ValueError("labels must have a value (got none)")
    template = like[0]
    target = torch.as_tensor(like[1])
    generator = torch.Generator().manual_seed(check.count(seed=seed))
    dim = template.numel()
    made: list[Tensor] = []
    while len(made) < count:
        raw = torch.randn(
            dim, min(dim, count - len(made)), generator=generator, dtype=torch.float64
        )
        made += list(torch.linalg.qr(raw).Q.T)
    chosen = torch.randint(len(labels), (count,), generator=generator).tolist()
    return [
        (
            (bound_x * _BELOW * row).to(template.dtype).view(template.shape),
            torch.full(target.shape, labels[i]).to(target),
        )
        for row, i in zip(made, chosen, strict=True)
    ]


@typed
def loss_scores(
    model: nn.Module,
    loss: Callable[..., Any],
    canaries: Sequence[Any],
    *,
    before: nn.Module | None = None,
) -> NDArray[np.float64]:
    """Returns minus the loss of each canary, or by how much training has lowered it: what `result` takes as scores.

    Args:
        model: as trained; in eval mode while it is read, and unchanged.
        loss: loss(outputs, targets) of a batch of one record, a number.
        canaries: all of them, pairs (input, target).
        before: the model as it started, if that is public.

    Returns:
        (number of canaries,) scores, higher where the canary looks like one that was in.

    Raises:
        ValueError: a loss is not one number, or is NaN.
    """
    scores = -_losses(model, loss, canaries)
    return scores if before is None else scores + _losses(before, loss, canaries)


def _losses(
    model: nn.Module, loss: Callable[..., Any], canaries: Sequence[Any]
) -> NDArray[np.float64]:
    for canary in canaries:
        if (
            not isinstance(canary, (tuple, list))
            or len(canary) != 2
            or not isinstance(canary[0], Tensor)
        ):
            raise ValueError(
                f"canaries must be pairs (input tensor, target) (got {type(canary).__name__})"
            )
    modes = {module: module.training for module in model.modules()}
    first = next(model.parameters(), None)
    device = torch.device("cpu") if first is None else first.device
    model.eval()
    try:
        with torch.no_grad():
            pairs = (to_device((x[None], torch.as_tensor(y)[None]), device) for x, y in canaries)
            values = [torch.as_tensor(loss(model(x), y)) for x, y in pairs]
    finally:
        for module, mode in modes.items():
            module.training = mode
    if any(value.numel() != 1 or math.isnan(value.item()) for value in values):
        raise ValueError(
            "loss(outputs, targets) must be one number for a batch of one canary, not NaN"
        )
    return np.array([value.item() for value in values])


@typed
def check_training(
    setup: Callable[..., Any],
    train: Callable[..., Any],
    dataset: Dataset[Any],
    *,
    loss: Callable[..., Any],
    canaries: Sequence[Any],
    delta: float,
    confidence: float = 1.0 - 1e-6,
    family: Family = "any",
    guess_in: int | None = None,
    guess_out: int | None = None,
) -> OneRunResult:
    """Examines a training script by the doctor, runs it once with canaries, and returns what the run gave away.

    Args:
        setup: setup(dataset) returns (model, optimizer, loader, ...), fresh, before the first step.
        train: train(model, optimizer, loader, ...) trains what setup returned, and returns the epsilon that it claims
            at `delta` under add_remove.
        dataset: public or synthetic records; the canaries that are in follow them.
        loss: loss(outputs, targets), the doctor's and that of the scores.
        canaries: records, e.g. from `canaries`.
        delta: in [0, 1), well below (1 - confidence) / len(canaries).
        confidence: in (0, 1); a sound script is refuted with probability 1 - confidence at most.
        family: as `OneRunAudit.result` takes it.
        guess_in: as OneRunAudit takes it.
        guess_out: as OneRunAudit takes it.

    Raises:
        PrivacyError: the doctor found something critical (`Diagnosis.raise_if`).
        ValueError: the doctor found a mistake, an argument is not what it must be, or so few canaries could not refute
            the claim.
    """
    audit = OneRunAudit(canaries, guess_in=guess_in, guess_out=guess_out)
    parts = tuple(setup(audit.dataset(dataset)))
    if len(parts) < 3:
        raise ValueError(
            f"setup must return (model, optimizer, loader, ...) (got {len(parts)} values)"
        )
    model, optimizer, loader = parts[:3]
    doctor(model, loss, loader, optimizer).raise_if()
    claimed = train(*parts)
    if claimed is None:
        raise ValueError("train must return the epsilon that it claims at delta (got None)")
    scores = loss_scores(model, loss, canaries)
    found = audit.result(scores, delta=delta, confidence=confidence, family=family, claimed=claimed)
    # PRIVACY: a check that cannot fail is none (test_a_claim_that_no_guesses_refute_is_refused)
    if not found.reach > claimed:
        raise ValueError(
            "canaries must be more, or delta or confidence lower, to refute anything: right"
            f" guesses alone show epsilon {rounded_down(found.reach)}, and {rounded_up(claimed)} is"
            f" claimed (got {len(canaries)} canaries)"
        )
    return found
