"""The doctor finds the mistake of each broken script, says nothing about the sound ones, and leaves no trace."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torch_dpsco as dp
from tests.doctor import scripts
from tests.doctor.diagnoses import diagnose
from tests.doctor.scripts import BROKEN, DIM, SOUND, FirstOnly, Parts, mlp, private, with_opacus
from tests.streams import Counted, count_noise
from torch_dpsco.errors import UtilityWarning

EVERY = [*BROKEN, *SOUND]


@pytest.mark.cases(3, 1)
@pytest.mark.parametrize("script", BROKEN, ids=lambda script: script.__name__)
def test_the_mistake_of_a_broken_script_is_found(script):
    severity, name = BROKEN[script]
    found = [finding for finding in diagnose(script()).findings if finding.name == name]
    assert [finding.severity for finding in found] == [severity]
    assert found[0].evidence
    assert found[0].fix
    assert found[0].link == f"docs/mistakes.md#{name}"


def test_there_are_eleven_mistakes():
    assert len(BROKEN) == 11


@pytest.mark.cases(3, 1)
@pytest.mark.parametrize(
    "script", [s for s in BROKEN if s is not scripts.shared_batch_norm], ids=lambda s: s.__name__
)
def test_a_broken_script_is_not_called_critical_for_another_reason(script):
    assert {finding.name for finding in diagnose(script()).critical} <= {BROKEN[script][1]}


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("script", SOUND, ids=lambda script: script.__name__)
def test_nothing_is_found_in_a_sound_script(script):
    diagnosis = diagnose(script())
    assert diagnosis.healthy, str(diagnosis)


# -- nothing is changed ------------------------------------------------------------------------------------------------


def attributes(thing: Any) -> dict[str, Any]:
    """Returns identities, and what containers hold: an attribute that was replaced or refilled differs."""
    held = {}
    for name, value in vars(thing).items():
        held[name] = id(value)
        if isinstance(value, (dict, list)):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            held[f"{name} holds"] = [(str(key), id(item)) for key, item in items]
    return held


def bits(t: Tensor | None) -> Any:
    return None if t is None else (id(t), t.detach().clone().double().tolist())


def state(parts: Parts) -> dict[str, Any]:
    model, optimizer = parts.model, parts.optimizer
    if isinstance(optimizer, dp.PrivateOptimizer) and not isinstance(optimizer._noise, Counted):
        count_noise(optimizer)
    found: dict[str, Any] = {
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
    }
    found["numpy"] = [np.asarray(part).tolist() for part in np.random.get_state()]  # noqa: NPY002
    for name, module in model.named_modules():
        found[name, "module"] = (type(module), module.training, attributes(module))
        found[name, "buffers"] = [bits(buffer) for buffer in module._buffers.values()]
    for name, p in model.named_parameters():
        hooks = [list(held or ()) for held in (p._backward_hooks, p._post_accumulate_grad_hooks)]
        rows = getattr(p, "grad_sample", None)
        found[name] = (bits(p), bits(p.grad), bits(rows), p.requires_grad, attributes(p), hooks)
        tape = getattr(p, "grad_factors", None)
        found[name, "tape"] = None if tape is None else attributes(tape)
    found["optimizer"] = attributes(optimizer)
    if isinstance(optimizer, dp.PrivateOptimizer):
        found["ledger"], found["log"] = (
            len(optimizer.accountant),
            attributes(parts.loader.batch_sampler.log),
        )
        found["noise"] = optimizer._noise.drawn
    criterion = getattr(parts.loss, "criterion", None)
    found["loss"] = None if criterion is None else attributes(criterion)
    return found


def in_the_middle_of_training(parts: Parts) -> Parts:
    """Leaves gradients and rows as a loop has them between backward and step, and one layer in evaluation mode."""
    for p in parts.model.parameters():
        if p.requires_grad:
            p.grad = torch.randn_like(p)
            if hasattr(p, "grad_sample"):
                p.grad_sample = torch.randn(2, *p.shape)
    next(iter(parts.model.children()), parts.model).eval()
    return parts


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize("script", EVERY, ids=lambda script: script.__name__)
@pytest.mark.parametrize(
    "prepare", [lambda parts: parts, in_the_middle_of_training], ids=["fresh", "in training"]
)
def test_nothing_is_changed(script, prepare):
    parts = prepare(script())
    before = state(parts)
    diagnose(parts)
    after = state(parts)
    assert [key for key in before if before[key] != after[key]] == []
    assert before.keys() == after.keys()


@pytest.mark.cases(3, 1)
@pytest.mark.parametrize(
    "wrap", [lambda model: model, dp.attach, lambda model: dp.attach(model, rows="dense")]
)
@pytest.mark.parametrize("fails_at", [1, 2, 3, 4])
def test_nothing_is_changed_when_the_loss_raises(wrap, fails_at):
    calls = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        calls.append(outputs)
        if len(calls) >= fails_at:
            raise KeyError("no such column")
        return F.mse_loss(outputs, targets)

    model = mlp()
    optimizer, loader = private(model, scripts.regression_data())
    parts = Parts(wrap(model), loss, loader, optimizer)
    before = state(parts)
    diagnosis = diagnose(parts)
    assert state(parts) == before
    refused = [finding for finding in diagnosis.findings if finding.name == "not-probed"]
    assert refused
    assert refused[0].severity == "warning"
    assert "KeyError" in refused[0].evidence
    assert "no such column" in refused[0].evidence


def test_a_plain_model_can_be_trained_after_the_doctor_as_before():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 3))
    parts = Parts(model, F.cross_entropy, None, torch.optim.SGD(model.parameters(), lr=0.1))
    record = (torch.zeros(1, 8, 8), 1)
    names = {f.name for f in dp.doctor(*parts[:4], record=record).findings}
    assert names == {"not-private", "no-norm"}
    assert type(model[3]) is nn.Linear
    F.cross_entropy(model(torch.randn(2, 1, 8, 8)), torch.tensor([0, 1])).backward()
    assert all(p.grad is not None and not hasattr(p, "grad_sample") for p in model.parameters())


def test_the_next_step_is_the_one_without_the_doctor():
    def released(consult: bool) -> Tensor:
        torch.manual_seed(5)
        parts = scripts.ours_logistic()
        mechanism = {
            "problem": dp.losses.Logistic().problem(bound_x=2.0),
            "noise_multiplier": 1.0,
        }
        design, noise = dp.Full(scripts.N), torch.Generator().manual_seed(3)
        with pytest.warns(UtilityWarning):
            optimizer = dp.HolderSGD(
                parts.model.parameters(),
                dp.HolderSGD.plan(lr=0.5, **mechanism, batch_size=scripts.N, sampling=design),
                generator=noise,
            )
        loader = optimizer.loader(parts.loader.dataset)
        for x, y in loader:
            parts.loss(parts.model(x), y).backward()
            if consult:
                dp.doctor(parts.model, parts.loss, loader, optimizer)
            optimizer.step()
        return parts.model.weight.detach().clone()

    assert torch.equal(released(True), released(False))


# -- no value of the data set has a say --------------------------------------------------------------------------------


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("value", [0.0, 1e30, float("nan")])
def test_only_the_shape_of_the_first_record_is_read(value):
    record = (torch.full((DIM,), value), torch.full((1,), value))
    ours = mlp()
    optimizer, loader = private(ours, FirstOnly(*record))
    assert dp.doctor(dp.attach(ours), F.mse_loss, loader, optimizer).healthy
    model, optimizer, loader = with_opacus(mlp(), FirstOnly(*record))
    assert dp.doctor(model, F.mse_loss, loader, optimizer).healthy


def test_the_loader_is_not_iterated_and_nothing_is_charged():
    parts = scripts.ours_logistic()
    diagnose(parts)
    assert parts.optimizer.outstanding_rows is None
    assert len(parts.optimizer.accountant) == 0
    assert parts.optimizer.steps == 0
