"""On CUDA: what `fit` and loops train, that sums move by no more than they declare, norms, noise, checkpoints.

Skipped where there is no device. Everything is compared with the same on the CPU, or with exact arithmetic there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from tests.contract.registry import ROWS
from tests.contract.runs import LOSS, STEPS, Run
from tests.streams import Counted, Picked, seeded
from torch_dpsco.errors import PrivacyError
from torch_dpsco.fast import on_device, rows_on_device
from torch_dpsco.noise import Keystream, add_normal_, normal_
from torch_dpsco.rows import DenseBlock, FactoredBlock, GradBatch, row_norms
from torch_dpsco.step.oracle import Clipped

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.filterwarnings("ignore::torch_dpsco.errors.UtilityWarning"),
]


def trained(row: Any, device: str) -> Run:
    """Returns a run on a device, with the batches and the noise of a seed."""
    run = row.make(model=row.model().to(device))
    run.opt._noise = Counted(seeded(5))
    run.opt._noise.device = torch.device(device)  # as that of the optimizer's own source
    for features, labels, *_ in run.loader(1, STEPS):
        run.opt.zero_grad()
        run.backward((features.to(device), labels.to(device)))
        run.opt.step()
    return run


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_steps_on_cuda_are_those_on_the_cpu(row):
    there, here = trained(row, "cuda"), trained(row, "cpu")
    assert there.ledger() == here.ledger()
    for found, expected in zip(there.answer(), here.answer(), strict=True):
        assert found.is_cuda
        assert bool(torch.isfinite(found).all())
        if "quiet" not in row.lacks:  # else what is drawn depends on bits of sums
            torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)


def networks() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    norm = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 3),
    )
    words = nn.Sequential(nn.Embedding(20, 8), nn.LayerNorm(8), nn.Flatten(), nn.Linear(40, 3))
    return {
        "linear": (nn.Linear(6, 3), (6,)),
        "mlp": (nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3)), (6,)),
        "cnn": (norm, (1, 4, 4)),
        "words": (words, (5,)),
    }


@pytest.mark.parametrize("name", ["linear", "mlp", "cnn", "words"])
@pytest.mark.parametrize("compiled", [False, True])
def test_fit_trains_networks_where_their_parameters_are(name, compiled):
    model, shape = networks()[name]
    torch.backends.cudnn.allow_tf32 = False  # or a mean loss is refused
    inputs = torch.randint(20, (200, *shape)) if name == "words" else torch.randn(200, *shape)
    data = TensorDataset(inputs, torch.randint(3, (200,)))
    model = model.cuda()
    before = [p.detach().clone() for p in model.parameters()]
    plan = dp.HolderSGD.plan(
        problem=dp.Problem(lipschitz=1.0),
        n=200,
        budget=dp.Budget(4.0, 1e-4),
        batch_size=40,
        epochs=2,
        lr=0.1,
    )
    optimizer = dp.HolderSGD(model.parameters(), plan)
    dp.fit(model, optimizer, data, nn.CrossEntropyLoss(), progress=False, compile=compiled)
    assert optimizer.steps == 10
    assert all(
        p.is_cuda and not torch.equal(p, old)
        for p, old in zip(model.parameters(), before, strict=True)
    )


@pytest.mark.parametrize("size", [64, 4096])
@pytest.mark.parametrize("form", ["dense", "outer"])
def test_one_record_more_moves_a_sum_on_cuda_by_what_is_declared(size, form):
    rows, width = size + 1, 4000
    oracle, moved = Clipped(1.0, 0.0, size), []
    # partial sums of equal rows are all rounded in one direction
    vectors = torch.full((rows, width), 1.0000077, device="cuda")
    for part in (vectors, vectors[1:]):
        if form == "dense":
            block, query = DenseBlock(part), [torch.zeros(width, device="cuda")]
        else:
            block = FactoredBlock(part, torch.full((len(part), 3), 0.7, device="cuda"))
            query = [torch.zeros(3, width, device="cuda"), torch.zeros(3, device="cuda")]
        oracle.open(query)
        oracle.observe(GradBatch([block]))
        released = oracle.release(seeded(1)).mean
        moved.append(torch.cat([mean.double().cpu().flatten() for mean in released]))
    room = 2.0**-23 * float(moved[0].norm())  # of the release, rounded to float32
    assert (
        0.9 / size
        < float((moved[0] - moved[1]).norm())
        <= oracle.sensitivity("add_remove") + room
    )


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1.0, 1e15])
@pytest.mark.parametrize("width", [1, 3, 1025, 5000])
def test_norms_on_cuda_are_never_below_the_exact_norm(scale, width):
    rows = torch.randn(300, width, generator=torch.Generator().manual_seed(width)) * scale
    bounds = row_norms(rows.cuda()).cpu()
    exact = torch.linalg.vector_norm(rows.double() / scale, dim=1) * scale
    assert bool((bounds >= exact * (1.0 - 1e-12)).all())
    assert bool((bounds <= exact * 1.001 + 2.0**-63 * width**0.5).all())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_rows_that_are_not_finite_count_for_nothing_on_cuda(value):
    rows = torch.ones(5, 4, device="cuda")
    rows[2, 1] = value
    oracle = Clipped(1.0, 0.0, 4)
    oracle.open([torch.zeros(4, device="cuda")])
    oracle.observe(GradBatch([DenseBlock(rows)]))
    [mean] = oracle.release(seeded(1)).mean
    torch.testing.assert_close(mean.cpu(), torch.full((4,), 0.5), rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("real", [torch.float32, torch.float64])
def test_noise_on_cuda_is_that_of_the_same_bits(real):
    here, there = (
        normal_(
            torch.empty(70_001, dtype=real, device=device),
            1.5,
            Picked(np.random.default_rng(3)),
        )
        for device in ("cpu", "cuda")
    )
    torch.testing.assert_close(there.cpu(), here, rtol=1e-6, atol=0.0)
    mean = torch.arange(70_001, dtype=torch.float64, device="cuda")
    moved = normal_(torch.empty_like(there), 1.5, Picked(np.random.default_rng(3)), mean)
    torch.testing.assert_close(moved.double() - mean, there.double(), rtol=0.0, atol=1e-2)


def test_kernels_are_found_right_on_cuda():
    """Else noise comes from the host, and sums from torch, without a word."""
    device = torch.device("cuda", 0)
    assert on_device.status(device) == "in use"
    assert rows_on_device.usable(device)


def test_noise_is_drawn_on_cuda_and_nothing_waits_for_it():
    """False-alarm rate 2e-6."""
    out = torch.zeros(2**20 + 3, device="cuda")
    add_normal_(out, 2.0, Keystream())  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        add_normal_(out.zero_(), 2.0, Keystream())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    scaled = out.cpu().double().numpy() / 2.0
    assert stats.kstest(scaled, "norm").pvalue > 1e-6
    low, high = stats.chi2.ppf([5e-7, 1 - 5e-7], len(scaled))
    assert low < (scaled**2).sum() < high


def test_noise_is_not_captured_in_a_graph():
    out = torch.zeros(100, device="cuda")
    add_normal_(out, 1.0, Keystream())
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(PrivacyError, match="must not be captured"), torch.cuda.graph(graph):
        add_normal_(out, 1.0, Keystream())


def test_exact_noise_is_released_on_cuda():
    model = dp.attach(nn.Linear(3, 1).cuda())
    plan = dp.HolderSGD.plan(
        problem=LOSS.problem(bound_x=2.0),
        n=100,
        budget=dp.Budget(1.0, 1e-3),
        batch_size=20,
        epochs=1,
        secure="exact",
    )
    optimizer = dp.HolderSGD(model.parameters(), plan)
    data = TensorDataset(torch.randn(100, 3), torch.ones(100, 1))
    dp.fit(model, optimizer, data, LOSS, progress=False)
    assert optimizer.steps == 5
    assert bool(torch.isfinite(model.weight).all())


def test_a_run_on_cuda_goes_on_from_its_checkpoint(tmp_path: Path):
    data = TensorDataset(torch.randn(100, 3), torch.ones(100, 1))
    plan = dp.HolderSGD.plan(
        problem=LOSS.problem(bound_x=2.0),
        n=100,
        budget=dp.Budget(1.0, 1e-3),
        batch_size=20,
        epochs=2,
    )

    def run() -> tuple[nn.Module, dp.HolderSGD]:
        model = nn.Linear(3, 1).cuda()
        accountant = dp.Accountant(dp.Budget(1.0, 1e-3), ledger_path=tmp_path / "ledger")
        optimizer = dp.HolderSGD(model.parameters(), plan, accountant=accountant)
        dp.fit(
            model, optimizer, data, LOSS, progress=False, checkpoint=tmp_path / "run", every=2
        )
        return model, optimizer

    model, optimizer = run()
    assert optimizer.steps == 10
    optimizer.accountant.close()
    again, _ = run()
    assert torch.equal(again.weight, model.weight)


@pytest.mark.parametrize("name", ["linear", "mlp", "cnn"])
def test_steps_on_cuda_wait_for_nothing(name):
    model, shape = networks()[name]
    model = dp.attach(model.cuda())
    plan = dp.ClippedSGD.plan(
        lr=0.1, clip=1.0, noise_multiplier=1.0, batch_size=64, n=400, adjacency="add_remove"
    )
    optimizer = dp.ClippedSGD(model.parameters(), plan)
    inputs, labels = torch.randn(400, *shape), torch.randint(3, (400,))
    data = TensorDataset(inputs.cuda(), nn.functional.one_hot(labels).float().cuda())
    try:
        for k, (x, y) in enumerate(optimizer.loader(data, steps=15)):
            optimizer.zero_grad()
            nn.BCEWithLogitsLoss()(model(x), y).backward()
            optimizer.step()
            if k == 4:
                torch.cuda.set_sync_debug_mode("error")
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("isolation", ["rounded", "slots", "none"])
def test_batches_for_cuda_are_gathered_into_pinned_memory(isolation):
    model = dp.attach(nn.Linear(6, 3).cuda(), loss_reduction="sum")
    plan = dp.ClippedSGD.plan(
        lr=0.1, clip=1.0, noise_multiplier=1.0, batch_size=64, n=400, adjacency="add_remove"
    )
    optimizer = dp.ClippedSGD(model.parameters(), plan)
    data = TensorDataset(torch.randn(400, 6), torch.randint(3, (400,)))
    for x, y in optimizer.loader(data, steps=3, isolation=isolation):
        assert x.is_pinned()
        assert y.is_pinned()
        nn.CrossEntropyLoss(reduction="sum")(model(x.cuda()), y.cuda()).backward()
        optimizer.step()
