"""Loops of accelerate with a private optimizer: the same steps in one process and in two, and what is refused."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpsco as dp
from tests.processes import launch
from torch_dpsco.errors import PrivacyError, SequenceError, UnknownSamplerError
from torch_dpsco.integrations.accelerate import _Placed, prepare

N, DIM, CLIP, LR = 12, 4, 0.3, 0.5


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def records(n: int = N) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(n, DIM, dtype=torch.float64, generator=generator)
    return TensorDataset(x, (torch.rand(n, 1, generator=generator) < 0.5).double())


def plan(noise: float = 0.0, **options: Any) -> Any:
    given = {
        "sampling": "full",
        "steps": 3,
        "lr": LR,
        "clip": CLIP,
        "noise_multiplier": noise,
        "n": N,
    }
    return dp.ClippedSGD.plan(**{**given, **options})


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(DIM, 1, dtype=torch.float64)


def numbers(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def loop(
    accelerator: Accelerator, made: Any, rows: int | None = None, epochs: int = 3
) -> tuple[Tensor, Any]:
    """A loop as users of accelerate write it."""
    model = dp.attach(linear().to(accelerator.device))
    optimizer = dp.ClippedSGD(model.parameters(), made)
    loader = optimizer.loader(records(), physical_batch_size=rows)
    model, optimizer, loader = prepare(accelerator, model, optimizer, loader)
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                accelerator.backward(nn.functional.binary_cross_entropy_with_logits(model(x), y))
                optimizer.step()
    optimizer.finalize()
    return numbers(model), optimizer


def descent() -> Tensor:
    """The same by hand: rows of one record each, clipped, added and divided by n."""
    model, (xs, ys) = linear(), records().tensors
    for _ in range(3):
        total = torch.zeros(DIM + 1, dtype=torch.float64)
        for x, y in zip(xs, ys, strict=True):
            model.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(model(x), y).backward()
            row = torch.cat([p.grad.flatten() for p in model.parameters()])
            total += row * min(1.0, CLIP / float(row.norm()))
        with torch.no_grad():
            model.weight -= LR * total[:DIM] / N
            model.bias -= LR * total[DIM:] / N
    return numbers(model)


@pytest.mark.parametrize("rows", [None, 5])
def test_a_loop_of_accelerate_makes_the_steps_of_a_plain_loop(rows: int | None) -> None:
    answer, optimizer = loop(Accelerator(cpu=True), plan(), rows)
    torch.testing.assert_close(answer, descent(), rtol=0, atol=1e-9)
    assert optimizer.steps == 3
    assert (answer - numbers(linear())).norm() > 0.01


@pytest.mark.slow
def test_the_ledger_is_that_of_the_plan() -> None:
    made = plan(
        noise=None, budget=dp.Budget(2.0, 1e-3), sampling="poisson", batch_size=4, steps=6
    )
    _, optimizer = loop(Accelerator(cpu=True), made, epochs=2)
    assert len(optimizer.accountant) == optimizer.steps == 6
    assert optimizer.accountant.get_epsilon(1e-3) == made.epsilon() <= 2.0


def test_objects_that_the_accelerator_has_prepared_are_refused() -> None:
    accelerator, model = Accelerator(cpu=True), dp.attach(linear())
    optimizer = dp.ClippedSGD(model.parameters(), plan())
    loader = optimizer.loader(records())
    with pytest.raises(SequenceError, match="leave steps out"):
        prepare(accelerator, model, accelerator.prepare(optimizer), loader)
    with pytest.raises(UnknownSamplerError, match="DataLoaderShard"):
        prepare(accelerator, model, optimizer, accelerator.prepare(DataLoader(records())))
    with pytest.raises(
        UnknownSamplerError,
        match=r"loader must be optimizer.loader\(dataset\) \(got DataLoader\)",
    ):
        prepare(accelerator, model, optimizer, DataLoader(records(), shuffle=True))
    with pytest.raises(ValueError, match="must be a private one, or epsilon"):
        prepare(accelerator, model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    with pytest.raises(SequenceError, match="exactly the model's trainable parameters"):
        prepare(accelerator, linear(), optimizer, loader)
    with pytest.raises(ValueError, match="must not be wrapped"):
        prepare(accelerator, nn.DataParallel(model), optimizer, loader)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"mixed_precision": "bf16"}, "mixed_precision"),
        ({"gradient_accumulation_steps": 2}, "physical_batch_size"),
    ],
)
def test_what_the_accelerator_would_do_to_gradients_is_refused(
    options: dict[str, Any], name: str
) -> None:
    model = dp.attach(linear())
    optimizer = dp.ClippedSGD(model.parameters(), plan())
    with pytest.raises(ValueError, match=name):
        prepare(Accelerator(cpu=True, **options), model, optimizer, optimizer.loader(records()))


@pytest.mark.parametrize(
    "kind", [DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM]
)
def test_engines_that_cut_models_up_are_refused(
    kind: DistributedType, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = dp.attach(linear())
    optimizer = dp.ClippedSGD(model.parameters(), plan())
    monkeypatch.setattr(Accelerator, "distributed_type", kind)
    with pytest.raises(ValueError, match=f"distributed_type .*{kind.value}"):
        prepare(Accelerator(cpu=True), model, optimizer, optimizer.loader(records()))


def test_the_accelerator_clips_no_gradients_any_more() -> None:
    accelerator, model = Accelerator(cpu=True), dp.attach(linear())
    optimizer = dp.ClippedSGD(model.parameters(), plan())
    prepare(accelerator, model, optimizer, optimizer.loader(records()))
    with pytest.raises(PrivacyError, match="clip of the plan"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(PrivacyError, match="clip of the plan"):
        accelerator.clip_grad_value_(model.parameters(), 1.0)


def test_batches_come_on_the_device_of_the_accelerator() -> None:
    model = dp.attach(linear())
    optimizer = dp.ClippedSGD(model.parameters(), plan())
    loader = _Placed(optimizer.loader(records()), torch.device("meta"))
    assert {tensor.device.type for tensor in next(iter(loader))} == {"meta"}
    assert len(loader) == 1
    assert len(loader.dataset) == N
    optimizer.discard()
    accelerator = Accelerator(cpu=True)
    accelerator.state.device = torch.device("meta")
    with pytest.raises(ValueError, match="before the optimizer is made"):
        prepare(accelerator, model, optimizer, optimizer.loader(records()))


def _two(rank: int, noise: float) -> dict[str, Any]:
    warnings.simplefilter("default")
    # as torchrun does
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    made = plan(noise) if not noise else plan(noise, sampling="poisson", batch_size=4, steps=9)
    answer, optimizer = loop(accelerator, made, rows=3)
    return {
        "answer": answer,
        "ledger": optimizer.accountant.ledger.digest(),
        "charges": len(optimizer.accountant),
    }


@pytest.mark.weekly
def test_two_processes_make_the_steps_of_one(tmp_path: Path) -> None:
    first, second = launch(_two, 2, tmp_path, 0.0)
    assert torch.equal(first["answer"], second["answer"])
    torch.testing.assert_close(first["answer"], descent(), rtol=0, atol=1e-9)
    assert first["ledger"] == second["ledger"]
    assert first["charges"] == 3


@pytest.mark.slow
def test_two_processes_have_one_noise_and_one_ledger(tmp_path: Path) -> None:
    first, second = launch(_two, 2, tmp_path, 1.0)
    assert torch.equal(first["answer"], second["answer"])
    assert (first["ledger"], first["charges"]) == (second["ledger"], 9)


def test_a_budget_is_enough_around_a_torch_optimizer() -> None:
    model = linear()
    adam = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = DataLoader(records(), 4, shuffle=True)
    accelerator = Accelerator(cpu=True)
    given = {"epsilon": 3.0, "delta": 1e-3, "epochs": 2}
    model, optimizer, loader = prepare(accelerator, model, adam, data, **given)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.binary_cross_entropy_with_logits(model(x), y))
            optimizer.step()
    assert (optimizer.steps, optimizer.finalized, optimizer.plan.batch_size) == (6, True, 4)
    assert optimizer.accountant.get_epsilon(1e-3) == optimizer.plan.epsilon() <= 3.0
    assert optimizer.rule.settings()["optimizer"] == "AdamW"


def test_bfloat16_of_the_accelerator_runs_the_forward() -> None:
    model = nn.Sequential(linear().float())
    seen = []
    model[0].register_forward_hook(lambda layer, args, output: seen.append(output.dtype))
    dp.attach(model, loss_reduction="sum")
    optimizer = dp.ClippedSGD(model.parameters(), plan(sampling="poisson", batch_size=4))
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    loader = optimizer.loader(records(), steps=3)
    model, optimizer, loader = prepare(accelerator, model, optimizer, loader)
    for x, y in loader:
        scores = model(x.float())
        assert scores.dtype is torch.float32
        loss = nn.functional.binary_cross_entropy_with_logits
        accelerator.backward(loss(scores, y.float(), reduction="sum"))
        optimizer.step()
    assert set(seen) == {torch.bfloat16}
    assert optimizer._isolation.level == "slots"


def test_bfloat16_around_the_forward_works_with_a_summed_loss() -> None:
    answers = []
    for half in (False, True):
        model = dp.attach(linear().float(), loss_reduction="sum")
        optimizer = dp.ClippedSGD(model.parameters(), plan(steps=1))
        accelerator = Accelerator(cpu=True)
        model, optimizer, loader = prepare(
            accelerator, model, optimizer, optimizer.loader(records(), steps=1)
        )
        for x, y in loader:
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                scores = model(x.float())
            loss = nn.functional.binary_cross_entropy_with_logits(
                scores.float(), y.float(), reduction="sum"
            )
            accelerator.backward(loss)
            optimizer.step()
        answers.append(numbers(model))
    torch.testing.assert_close(answers[0], answers[1], rtol=0, atol=2e-3)
