"""Sizes of micro-batches take the least expected time, and rows that are left without a backward reach one step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from tests.problems import make_optimizer
from torch_dpsco.accounting.designs import Assigned, Parts, Undeclared
from torch_dpsco.errors import SequenceError
from torch_dpsco.fast import compiled
from torch_dpsco.fast import compiled as micro_batches
from torch_dpsco.fast.compiled import micro_batch_size
from torch_dpsco.rows import GradBatch, has_rows
from torch_dpsco.rows.batch import forget_rows, leave_rows


def expected_parts(mean: int, size: int) -> float:
    """Returns E[ceil(n / size)] for n of the law of Poisson, term by term."""
    terms = (
        math.exp(n * math.log(mean) - mean - math.lgamma(n + 1)) * math.ceil(n / size)
        for n in range(20 * mean)
    )
    return math.fsum(terms)


@pytest.mark.parametrize("mean", [1, 5, 64])
@pytest.mark.parametrize("size", [1, 7, 64, 77])
def test_parts_of_poisson_batches_are_counted_by_their_law(mean: int, size: int) -> None:
    rel = 1e-9 if mean <= 32 * size else 0.01
    assert micro_batches._poisson_parts(mean, size) == pytest.approx(
        expected_parts(mean, size), rel=rel
    )


@pytest.mark.parametrize(
    ("design", "physical", "dim", "expected"),
    [
        (dp.Full(64), None, 100, 64),
        (dp.Full(1000), None, 100, 500),  # a divisor: nothing is filled up
        (dp.Full(1000), 100, 100, 100),
        (dp.Full(100), 1000, 100, 100),
        (Undeclared(48), None, 100, 48),
        (None, None, 100, 16),
        (None, None, 2**20, 8),
        (dp.Full(64), None, 2**20, 8),  # rows of that many parameters take 32 MiB (the least)
        (dp.Poisson(64, 10**4), 32, 100, 32),
        (
            Parts(((dp.Full(100), 1), (dp.Full(50), 1000)), n=200),
            None,
            100,
            50,
        ),  # 100 records are two parts
        (Parts(((dp.Full(100), 1000), (dp.Full(50), 1)), n=200), None, 100, 100),
    ],
)
def test_sizes_of_micro_batches_fit_the_batches(
    design: Any, physical: int | None, dim: int, expected: int
) -> None:
    assert micro_batch_size(nn.Linear(dim, 1, bias=False), design, physical) == expected


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("mean", [8, 64, 300])
def test_no_other_size_is_expected_to_be_faster(mean: int) -> None:
    def cost(size: int) -> float:
        return expected_parts(mean, size) * (size + 8)

    chosen = micro_batch_size(nn.Linear(10, 1), dp.Poisson(mean, 100 * mean))
    assert chosen == micro_batch_size(nn.Linear(10, 1), Assigned(mean, 100 * mean))
    assert chosen > mean  # most batches are one part
    assert cost(chosen) <= 1.001 * min(cost(size) for size in range(4, 2 * mean, 1 + mean // 50))


def left(params: list[Tensor], seed: int = 0, n: int = 6) -> list[Tensor]:
    made = torch.Generator().manual_seed(seed)
    return [torch.randn(n, *p.shape, generator=made) for p in params]


def test_left_rows_are_taken_in_the_order_of_the_optimizer() -> None:
    params = [nn.Parameter(torch.zeros(shape)) for shape in ((3, 2), (3,), (1100,))]
    rows = left(params)
    leave_rows(params, rows)
    assert has_rows(params)
    taken = GradBatch.consume(params[::-1])
    assert not has_rows(params)
    assert (taken.passes, taken.averaged, len(taken)) == (1, False, 6)
    for mine, theirs in zip(taken.dense(), rows[::-1], strict=True):
        assert torch.equal(mine, theirs)
    weights = torch.linspace(0.0, 1.0, 6, dtype=torch.float64)
    for total, part in zip(taken.weighted_sum(weights), rows[::-1], strict=True):
        torch.testing.assert_close(total, torch.einsum("b,b...->...", weights, part.double()))
    exact = torch.cat([part.double().flatten(1) for part in rows], dim=1).norm(dim=1)
    assert (taken.norms() >= exact).all()
    torch.testing.assert_close(taken.norms(), exact, rtol=2.0**-13, atol=0.0)
    leave_rows(params, rows)
    with pytest.raises(SequenceError, match="gradients are missing for parameter 3"):
        GradBatch.consume([*params, nn.Parameter(torch.zeros(2))])


def test_rows_are_not_left_beside_others() -> None:
    params = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))]
    leave_rows(params, left(params))
    with pytest.raises(SequenceError, match="rows are waiting for a step already"):
        leave_rows(params, left(params))
    forget_rows(params)
    assert not has_rows(params)
    params[1].grad_sample = torch.ones(6, 3)  # type: ignore[attr-defined]
    forget_rows(params)  # those of others stay
    with pytest.raises(SequenceError, match="rows are waiting for a step already"):
        leave_rows(params, left(params))


def test_a_left_row_that_is_not_finite_contributes_nothing() -> None:
    params = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))]
    means = []
    for keep in ([0, 1, 2, 3, 4, 5], [0, 1, 3, 4]):
        rows = left(params)
        rows[0][2, 1], rows[1][5, 0] = math.nan, math.inf
        ours = make_optimizer(nn.ParameterList(params), dp.Full(6), clip=0.5)
        next(iter(ours.loader(TensorDataset(torch.ones(6, 1)), steps=1)))
        dropped = [index for index in range(6) if index not in keep]
        for part in rows:
            part[dropped] = 0.0
        leave_rows(params, rows)
        ours.step()
        means.append(torch.cat([p.grad for p in params]))
    torch.testing.assert_close(*means, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_compiled_rows_choose_their_size_by_the_design_of_the_optimizer() -> None:
    data = TensorDataset(torch.ones(40, 3), torch.ones(40, 1))
    cases = [
        (dp.Full(40), 40),
        (dp.Poisson(5, 40), micro_batch_size(nn.Linear(3, 1), dp.Poisson(5, 40))),
    ]
    for design, expected in cases:
        model = nn.Linear(3, 1)
        ours, rows = (
            make_optimizer(model, design),
            dp.CompiledRows(model, nn.MSELoss(), backend=None),
        )
        for x, y in ours.loader(data, steps=20):
            rows.step(ours, x, y)
        assert rows.micro_batch_size == expected
    plan = dp.UserClippedSGD.plan(lr=0.1, clip=0.2, noise_multiplier=0.0, n=4)
    users = dp.UserClippedSGD(model.parameters(), plan)
    rows = dp.CompiledRows(model, nn.MSELoss(), backend=None)
    for x, y, ids in users.loader(data, torch.arange(40) // 10, steps=1):
        rows.step(users, x, y, users=ids)
    assert rows.micro_batch_size == 16  # 4 users have 40 records


@pytest.mark.slow
def test_records_of_any_layout_run_one_program() -> None:
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(inputs)
        return graph.forward

    model = nn.Linear(3, 1)
    rows = dp.CompiledRows(model, nn.MSELoss(), micro_batch_size=4, backend=backend)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    layouts = [x, x.t().contiguous().t(), torch.cat([x, x], dim=1)[:, 3:], x[:1].expand(4, 3)]
    rows.prepare(x, x[:, :1])
    for part in layouts:
        found = rows._rows(part, part[:, :1], slice(0, 4))
        expected = rows._call(rows._eager, part, part[:, :1])
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs)
    assert len(graphs) == 1


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(("physical", "expected"), [(None, 20), (5, 5)])
def test_fit_compiles_micro_batches_that_fit_its_batches(
    physical: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def spy(*args: Any, micro_batch_size: int) -> Any:
        sizes.append(micro_batch_size)
        rows = dp.CompiledRows(*args, micro_batch_size=micro_batch_size, backend=None)
        monkeypatch.setattr(rows, "prepare", lambda *batch: None)
        return rows

    monkeypatch.setattr(compiled, "CompiledRows", spy)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    data = TensorDataset(torch.linspace(-1, 1, 60).view(20, 3), torch.ones(20, 1))
    ours = make_optimizer(model, dp.Full(20))
    dp.fit(
        model,
        ours,
        data,
        nn.MSELoss(),
        steps=2,
        progress=False,
        compile=True,
        physical_batch_size=physical,
    )
    assert sizes == [expected]
    assert ours.steps == len(ours.accountant) == 2
