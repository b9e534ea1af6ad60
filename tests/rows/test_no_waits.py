"""Steps on a device that is queued: nothing of them is read on the host, and sums are those of the CPU.

There is no such device here, so that tensors of the CPU are taken for queued ones, and a dispatch mode notes every
operation that would wait.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import torch_dpsco as dp
from torch_dpsco.errors import SequenceError
from torch_dpsco.rows import (
    FLOAT64,
    Block,
    DenseBlock,
    FactoredBlock,
    GradBatch,
    SequenceBlock,
)
from torch_dpsco.rows.layers.kinds import coalesced
from torch_dpsco.rows.means import Source, averaged

_WAITS = {
    "_local_scalar_dense",
    "nonzero",
    "equal",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "is_nonzero",
}
N = 400


class Watch(TorchDispatchMode):
    """Counts the operations that would wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.__name__.split(".")[0]
        by_mask = name in ("index", "index_put", "index_put_") and any(
            t is not None and t.dtype == torch.bool for t in args[1]
        )
        if name in _WAITS or by_mask:
            self.found[name] += 1
        self.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes every tensor for one of a device that is queued."""
    for module in ("rows.batch", "rows.layers.kinds", "rows.means", "step.oracle"):
        monkeypatch.setattr(f"torch_dpsco.{module}.is_queued", lambda tensor: True)
    monkeypatch.setattr("torch_dpsco.native.suits", lambda *tensors: False)


class Words(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 8, **options)
        self.norm = nn.LayerNorm(8)
        self.mixed = nn.Linear(8, 8)
        self.out = nn.Linear(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.mixed(self.norm(self.table(ids))).mean(1))


def pixels() -> Tensor:
    return torch.randn(N, 1, 8, 8)


def ids() -> Tensor:
    return torch.randint(30, (N, 5))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Linear(20, 4), lambda: torch.randn(N, 20)),
    "mlp": (
        lambda: nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 4)),
        lambda: torch.randn(N, 20),
    ),
    "cnn": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4)),
        pixels,
    ),
    "words": (Words, ids),
    "padded words": (lambda: Words(padding_idx=0), ids),
}


def plan(**options: Any) -> Any:
    return dp.ClippedSGD.plan(
        lr=0.1,
        noise_multiplier=1.0,
        batch_size=64,
        n=N,
        adjacency="add_remove",
        steps=60,
        sampling="poisson",
        **options,
    )


def private(name: str, *, auto: bool) -> tuple[nn.Module, Any, Any]:
    """Returns model, optimizer and loader of a case."""
    torch.manual_seed(1)
    make, inputs = CASES[name]
    model = make()
    data = TensorDataset(inputs(), torch.randint(4, (N,)))
    if auto:  # clip by normalization; Adam reads its steps from tensors of the CPU
        plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loader = DataLoader(data, batch_size=64, shuffle=True)
        return dp.make_private(model, plain, loader, epsilon=8.0, delta=1e-5, verbose=False)
    dp.attach(model)
    optimizer = dp.ClippedSGD(model.parameters(), plan(clip=1.0))
    return model, optimizer, optimizer.loader(data, steps=14)


def watched(name: str, *, auto: bool = False) -> list[Watch]:
    """Returns what each step of a loop does, but for the first four."""
    model, optimizer, loader = private(name, auto=auto)
    seen = []
    for x, y in chain.from_iterable(repeat(loader, 2 if auto else 1)):
        with Watch() as watch:
            optimizer.zero_grad()
            nn.CrossEntropyLoss()(model(x), y).backward()
            optimizer.step()
        seen.append(watch)
    return seen[4:]


@pytest.mark.parametrize("auto", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_step_reads_nothing_of_a_queued_device(name: str, auto: bool, queued: None) -> None:
    steps = watched(name, auto=auto)
    assert len(steps) >= 10
    assert min(watch.calls for watch in steps) > 50  # the mode has seen them
    waits = [watch.found for watch in steps if watch.found]
    # targets that are ignored are looked for where the number of passes has doubled
    assert len(waits) <= math.log2(len(steps))
    assert all(found == {"_local_scalar_dense": 1} for found in waits)


def test_the_watch_sees_what_waits_elsewhere() -> None:
    """The test above can fail: on the CPU, where numbers are read, the same steps do."""
    assert all(watch.found["_local_scalar_dense"] for watch in watched("words"))


@pytest.mark.parametrize("number", [7, 8])
def test_ignored_targets_leave_the_rows_of_others_alone(number: int, queued: None) -> None:
    """They are found in pass 8; in pass 7 a mean is over all targets, of which some count 0."""
    rows = []
    for target in (torch.arange(8) % 4, torch.tensor([0, 1, 2, -100, -100, 1, 2, 3])):
        scores = torch.linspace(-1.0, 1.0, 32).view(8, 4).requires_grad_()
        output = averaged(scores, Source(8, SimpleNamespace(number=number)))
        loss = nn.CrossEntropyLoss()(output, target)
        if number == 8 and target.min() < 0:
            with pytest.raises(SequenceError, match="loss must be the mean"):
                loss.backward()
            return
        loss.backward()
        rows.append(scores.grad)
    others = [0, 1, 2, 5, 6, 7]
    assert torch.equal(rows[1][others], rows[0][others])
    assert not rows[1][3:5].any()


@pytest.mark.parametrize("net", [False, True])
def test_fit_reads_nothing_of_a_queued_device(net: bool, queued: None) -> None:
    model = (
        nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 4)) if net else nn.Linear(20, 4)
    )
    data = TensorDataset(torch.randn(N, 20), torch.randint(4, (N,)))
    found = []
    for steps in (4, 14):
        own = copy.deepcopy(model)
        optimizer = dp.ClippedSGD(own.parameters(), plan(clip=1.0))
        with Watch() as watch:
            dp.fit(own, optimizer, data, nn.CrossEntropyLoss(), progress=False, steps=steps)
        found.append(watch)
    first, second = found
    assert second.calls > first.calls + 100
    # of what precedes the first step; targets that are ignored are looked for in pass 8
    assert second.found - first.found <= Counter({"_local_scalar_dense": 1})


def blocks(seed: int) -> list[Block]:
    """Returns a block of each kind, with 12 rows of which some are not finite."""
    torch.manual_seed(seed)
    acts, slopes = torch.randn(12, 5), torch.randn(12, 3)
    times, grads = torch.randn(12, 4, 5), torch.randn(12, 4, 3)
    dense = torch.randn(12, 3, 2)
    records = torch.randint(12, (40,))
    uses = torch.randn(40, 3)
    acts[1, 2] = torch.inf
    slopes[2, 0] = torch.nan
    times[3, 1, 1] = torch.nan
    grads[4, 2, 2] = torch.inf
    dense[5] = torch.nan
    uses[records == 6] = torch.nan
    return [
        DenseBlock(dense),
        FactoredBlock(acts, slopes),
        SequenceBlock(times, grads, torch.Size([3, 5])),
        coalesced(records, torch.randint(7, (40,)), uses, 12, 7),
    ]


def sums(rows: GradBatch) -> tuple[Tensor, list[Tensor]]:
    norms = rows.norms()
    weights = torch.where(norms.isfinite(), (1.0 / norms).clamp(max=1.0), 0.0)
    weights[0] = 0.0
    return norms, rows.weighted_sum(weights, FLOAT64)


@pytest.mark.parametrize("index", [None, slice(0, 9), torch.tensor([0, 2, 3, 5, 8, 11])])
@pytest.mark.parametrize("seed", range(5))
def test_rows_that_do_not_count_are_zeros_on_a_device(
    seed: int, index: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found() -> tuple[Tensor, list[Tensor]]:
        made = blocks(seed)
        order = list(range(sum(len(block.shapes) for block in made)))
        rows = GradBatch(made, order)
        return sums(rows if index is None else rows.among(index))

    norms, expected = found()
    for module in ("rows.batch", "rows.layers.kinds"):
        monkeypatch.setattr(f"torch_dpsco.{module}.is_queued", lambda tensor: True)
    same, queued_sums = found()
    torch.testing.assert_close(same, norms, rtol=1e-12, atol=0.0, equal_nan=True)
    for ours, theirs in zip(queued_sums, expected, strict=True):
        assert bool(torch.isfinite(ours).all())
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("padding", [None, 0])
def test_words_step_as_on_the_cpu(padding: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained() -> list[Tensor]:
        torch.manual_seed(3)
        model = Words(padding_idx=padding)
        dp.attach(model, loss_reduction="sum")
        x, y = ids()[:64], torch.randint(4, (64,))
        nn.CrossEntropyLoss(reduction="sum")(model(x), y).backward()
        rows = GradBatch.consume(list(model.parameters()))
        return sums(rows)[1]

    expected = trained()
    for module in ("rows.batch", "rows.layers.kinds"):
        monkeypatch.setattr(f"torch_dpsco.{module}.is_queued", lambda tensor: True)
    for ours, theirs in zip(trained(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
