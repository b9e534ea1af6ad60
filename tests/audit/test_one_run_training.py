"""Audits of one run on training code as it is, and on eleven mutants of it, each of another kind.

1,000 canaries share one input and have a class of their own each, so that each has a row of the weights and an entry of
the bias to itself. Gradients are 14 times as long as the clip. Full batches: all loops claim mu = sqrt(STEPS) / NOISE.
A sound loop is refuted with probability 1e-6 at most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from opacus import PrivacyEngine
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

import torch_dpsco as dp
from torch_dpsco.accounting.analysis.gaussian import gaussian_epsilon
from torch_dpsco.audits import OneRunAudit, OneRunResult, loss_scores
from torch_dpsco.step import oracle as clipped

pytestmark = pytest.mark.slow
CLASSES, STEPS, NOISE, CLIP, RECORDS, GUESSES = 1000, 64, 32.0, 0.1, 508, 100
RATE = 0.3 * RECORDS / (NOISE * CLIP * STEPS**0.5)  # logits stay below 1 or so
DELTA, CONFIDENCE = 1e-12, 1 - 1e-6
CLAIM = gaussian_epsilon(STEPS**0.5 / NOISE, DELTA)
CANARIES = [(torch.ones(1), torch.tensor(label)) for label in range(CLASSES)]
BASE = TensorDataset(torch.ones(8, 1), torch.zeros(8, dtype=torch.int64))
LOSS = nn.CrossEntropyLoss()
Patch = pytest.MonkeyPatch


def new_model() -> nn.Linear:
    model = nn.Linear(1, CLASSES)
    for p in model.parameters():
        nn.init.zeros_(p)
    return model


def whole(dataset: Any) -> tuple[Tensor, Tensor]:
    return next(iter(DataLoader(dataset, batch_size=len(dataset))))


def audited(
    train: Callable[[Any], nn.Module], before: Callable[[], nn.Module] | None = None
) -> OneRunResult:
    audit = OneRunAudit(CANARIES, guess_in=GUESSES, guess_out=GUESSES)
    model = train(audit.dataset(BASE))
    scores = loss_scores(model, LOSS, CANARIES, before=before() if before else None)
    return audit.result(
        scores, delta=DELTA, confidence=CONFIDENCE, family="gaussian", claimed=CLAIM
    )


def opacus(
    dataset: Any, private: Callable[[nn.Linear], Any] = nn.Linear.parameters, **changes: Any
) -> nn.Module:
    """A loop of Opacus; parameters that are not private are those of a plain optimizer beside it."""
    model = new_model()
    wanted = list(private(model))
    others = [p for p in model.parameters() if all(p is not own for own in wanted)]
    beside = torch.optim.SGD(others or [torch.zeros(1)], lr=RATE / RECORDS)
    wrapped, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(wanted, lr=RATE / RECORDS),
        data_loader=DataLoader(dataset, batch_size=len(dataset)),
        loss_reduction="sum",  # the divisor is public
        **{"noise_multiplier": NOISE, "max_grad_norm": CLIP} | changes,
    )
    for _ in range(STEPS):
        for x, y in loader:
            optimizer.zero_grad()
            wrapped.zero_grad()
            nn.functional.cross_entropy(wrapped(x), y, reduction="sum").backward()
            optimizer.step()
            beside.step()
    return model


def ours(dataset: Any) -> nn.Module:
    """A loop of ClippedSGD."""
    model = dp.attach(new_model())
    plan = dp.ClippedSGD.plan(
        problem=dp.Problem(), n=RECORDS, noise_multiplier=NOISE, clip=CLIP, steps=STEPS, lr=RATE, sampling="full",
        adjacency="add_remove",
    )  # fmt: skip
    optimizer = dp.ClippedSGD(model.parameters(), plan)
    for x, y in optimizer.loader(dataset, steps=STEPS):
        optimizer.zero_grad()
        LOSS(model(x), y).backward()
        optimizer.step()
    assert optimizer.report(DELTA).epsilon == pytest.approx(CLAIM, rel=1e-6)
    return model


def by_hand(dataset: Any, micro: int) -> nn.Module:
    """DP-SGD as it is written without rows: means of micro-batches are clipped, not the gradients of records."""
    model = new_model()
    x, y = whole(dataset)
    for _ in range(STEPS):
        total = [torch.zeros_like(p) for p in model.parameters()]
        for inputs, targets in zip(x.split(micro), y.split(micro), strict=True):
            model.zero_grad()
            LOSS(model(inputs), targets).backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            for t, p in zip(total, model.parameters(), strict=True):
                t += p.grad * len(inputs)
        with torch.no_grad():
            for t, p in zip(total, model.parameters(), strict=True):
                p -= RATE / RECORDS * (t + NOISE * CLIP * torch.randn_like(p))
    return model


def noise_of(
    std: Callable[[DPOptimizer], float], steps: int = STEPS
) -> Callable[[DPOptimizer], None]:
    """The noise of Opacus at another standard deviation, in the first steps."""

    def add_noise(self: DPOptimizer) -> None:
        self.done = getattr(self, "done", 0) + 1
        for p in self.params:
            noise = std(self) * torch.randn_like(p) if self.done <= steps else 0.0
            p.grad = p.summed_grad.view_as(p) + noise
            p.summed_grad._processed = True

    return add_noise


def right(self: DPOptimizer) -> float:
    return float(self.noise_multiplier * self.max_grad_norm)


def unclipped(self: DPOptimizer, spared: Callable[[nn.Parameter], bool]) -> None:
    """The clip of Opacus, which spares some parameters."""
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in self.grad_samples], dim=1).norm(dim=1)
    factors = (self.max_grad_norm / (norms + 1e-6)).clamp(max=1.0)
    for p in self.params:
        rows = self._get_flat_grad_sample(p)
        p.summed_grad = rows.sum(0) if spared(p) else torch.einsum("i,i...", factors, rows)
        p.grad_sample._processed = True


def mutated(
    patch: Patch, owner: Any, name: str, value: Any, train: Callable[[Any], nn.Module]
) -> OneRunResult:
    """Trains with one part of the library replaced."""
    patch.setattr(owner, name, value)
    return audited(train)


def patched(patch: Patch, name: str, function: Any) -> OneRunResult:
    return mutated(patch, DPOptimizer, name, function, opacus)


def seeded(seed: int) -> dict[str, Any]:
    return {"noise_generator": torch.Generator().manual_seed(seed)}


MUTANTS: dict[str, Callable[[Patch], OneRunResult]] = {
    "noise forgotten": lambda patch: patched(patch, "add_noise", noise_of(lambda self: 0.0)),
    "noise scaled by the clip twice": lambda patch: patched(
        patch, "add_noise", noise_of(lambda s: right(s) * CLIP)
    ),
    "noise divided by the batch twice": lambda patch: mutated(
        patch,
        clipped.ClippedMean,
        "noise_std",
        property(lambda self: NOISE * CLIP / RECORDS**2),
        ours,
    ),
    "noise in the first step only": lambda patch: patched(
        patch, "add_noise", noise_of(right, steps=1)
    ),
    "noise of a known seed": lambda patch: audited(
        lambda data: opacus(data, **seeded(1)), before=lambda: opacus(BASE, **seeded(1))
    ),
    "bias spared by the clip": lambda patch: patched(
        patch, "clip_and_accumulate", lambda self: unclipped(self, lambda p: p.dim() == 1)
    ),
    "bias forgotten": lambda patch: audited(
        lambda data: opacus(data, lambda model: [model.weight])
    ),
    "no clip": lambda patch: mutated(
        patch, clipped, "clip_weights", lambda norms, clip: torch.ones_like(norms), ours
    ),
    "records processed ten times a step": lambda patch: audited(
        lambda data: opacus(ConcatDataset([data] * 10))
    ),
    "the mean of the batch clipped": lambda patch: audited(
        lambda data: by_hand(data, micro=2 * RECORDS)
    ),
    "micro-batches accumulated before the clip": lambda patch: audited(
        lambda data: by_hand(data, micro=50)
    ),
}
SOUND: dict[str, Callable[[], OneRunResult]] = {
    "Opacus": lambda: audited(opacus),
    "ClippedSGD": lambda: audited(ours),
    "records one by one": lambda: audited(lambda data: by_hand(data, micro=1)),
}


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_refuted_by_one_run(name: str, monkeypatch: Patch) -> None:
    assert MUTANTS[name](monkeypatch).contradicts()


@pytest.mark.weekly
@pytest.mark.parametrize("name", SOUND)
def test_sound_loop_is_not_refuted(name: str) -> None:
    found = SOUND[name]()
    assert found.reach > 2 * CLAIM
    assert not found.contradicts()
