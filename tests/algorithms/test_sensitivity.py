"""How far one record can move a release: never further than the sensitivity that the oracle declares."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import torch_dpsco as dp
from tests.problems import Folded, TwoHeads, column, gradients, make_optimizer, released
from torch_dpsco.accounting.designs import Undeclared
from torch_dpsco.errors import SequenceError
from torch_dpsco.rows import DenseBlock, FactoredBlock, GradBatch
from torch_dpsco.step.oracle import Clipped


def scores() -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


@pytest.mark.parametrize("own_loader", [True, False])
def test_a_release_never_joins_parts_of_two_draws(own_loader):
    # every record's gradient is clipped to -1, and all draws hold 2 of 3 records: some record is in both
    model = dp.attach(scores(), loss_reduction="sum")
    opt = make_optimizer(model, dp.Fixed(2, 3), adjacency="zero_out")
    data = column(1.0, 1.0, 1.0)
    if own_loader:
        loader = opt.loader(data, steps=4)
    else:
        loader = opt.bind(
            DataLoader(data, batch_sampler=dp.sampling.FixedSampler(opt.design, steps=4))
        )
    batches = iter(loader)

    def half_of_a_batch(finish):
        (x,) = next(batches)
        (-1e6 * model(x[:1])).sum().backward()
        finish()

    def two_halves():
        half_of_a_batch(opt.accumulate)
        # the caller's code failed here, and goes on with the next batch
        half_of_a_batch(opt.step)

    with pytest.raises(SequenceError, match="the previous batch was not used"):
        two_halves()
    assert len(opt.accountant) == 0
    assert model.weight.item() == 0.0


def test_a_skipped_batch_is_charged_or_refused():
    # at most one record of each pass is left out; what a record's releases cost must be in the ledger
    for _ in range(40):
        model = dp.attach(scores(), loss_reduction="sum")
        opt = make_optimizer(model, dp.Shuffled(1, 2), noise=1.0)
        used: Counter[float] = Counter()
        try:
            loader = opt.bind(
                DataLoader(
                    column(1.0, 2.0),
                    batch_sampler=dp.sampling.ShuffledSampler(opt.design, steps=3),
                )
            )
            for (x,) in itertools.islice(loader, 1, None):
                model(x).sum().backward()
                opt.step()
                used[x.item()] += 1
        except SequenceError:
            continue
        mu_of_one = 2.0  # replace_one, noise_multiplier 1
        assert opt.accountant.get_mu() ** 2 >= mu_of_one**2 * max(used.values()) * (1 - 1e-9)


@pytest.mark.parametrize("rows", ["auto", "dense"])
@pytest.mark.parametrize("sizes", [(2, 3, 2), (3, 3, 3)])
def test_rows_of_different_passes_are_never_joined(rows, sizes):
    first, both, last = sizes

    def mean(value: float) -> torch.Tensor:
        model = dp.attach(TwoHeads(), rows=rows, loss_reduction="sum")
        x = torch.zeros(both, 1)
        x[0] = value
        for inputs, heads in (
            (torch.zeros(first, 1), "a"),
            (x, "ab"),
            (torch.zeros(last, 1), "b"),
        ):
            model(inputs, heads).sum().backward()
        params = list(model.parameters())
        return released(oracle, params, [GradBatch.consume(params)])

    oracle = Clipped(1.0, 0.0, batch_size=first + both + last)
    try:
        moved = torch.linalg.vector_norm(mean(1e3) - mean(-1e3))
    except SequenceError:
        return  # refused: the rows of the two heads come from different passes
    assert moved <= oracle.sensitivity("replace_one")


@pytest.mark.parametrize("rows", ["auto", "dense"])
def test_a_record_with_several_rows_is_refused_without_a_declared_sampling(rows):
    def weight(value: float) -> torch.Tensor:
        model = dp.attach(Folded(), rows=rows, loss_reduction="sum")
        nn.init.zeros_(model.layer.weight)
        opt = make_optimizer(model, Undeclared(2))
        x = torch.zeros(2, 10, 1)
        x[0] = value
        model(x).sum().backward()
        opt.step()
        assert opt.oracle.sensitivity("replace_one") < 1.1
        return model.layer.weight.detach().clone()

    with pytest.raises(SequenceError):
        weight(1e3)


@pytest.mark.parametrize("rows", ["auto", "dense"])
def test_more_rows_than_a_batch_has_are_refused_without_a_declared_sampling(rows):
    model = dp.attach(nn.Linear(1, 1), rows=rows, loss_reduction="sum")
    opt = make_optimizer(model, Undeclared(2))
    model(torch.ones(3, 1)).sum().backward()
    with pytest.raises(SequenceError, match="at most batch_size=2 rows"):
        opt.step()


@pytest.mark.cases(3, 1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", ["auto", "dense"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_one_record_more_moves_the_mean_by_at_most_one_clip(dtype, rows, reduction):
    # equal records just inside the clip: if 1/B rounds, all rows move together when B changes
    def batch(size: int) -> GradBatch:
        model = dp.attach(scores().to(dtype), rows=rows, loss_reduction=reduction)
        return gradients(model, torch.full((size, 1), 0.37, dtype=dtype), reduction)

    try:
        batch(1)
    except (ValueError, SequenceError):
        return  # refused: the mean couples the rows too much in this precision
    for size in (99, 300, 500, 3000):
        fewer, more = batch(size), batch(size + 1)
        oracle = Clipped(1.0001 * float(more.norms().max()), 0.0, batch_size=256)
        query = [torch.zeros(1, 1)]
        moved = torch.linalg.vector_norm(
            released(oracle, query, [more]) - released(oracle, query, [fewer])
        )
        assert moved <= oracle.sensitivity("add_remove")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_mean_in_half_precision_is_refused(dtype):
    with pytest.raises(
        ValueError, match="loss_reduction must be 'sum' for half-precision parameters"
    ):
        dp.attach(nn.Linear(2, 1).to(dtype))


@pytest.mark.cases(10, 2)
@pytest.mark.parametrize("clip", [1.01e-20, 1e-19, 1e-15, 1e-12, 1.0, 1e15])
@pytest.mark.parametrize("outputs", [10_000, 1_440_000])
def test_one_factored_row_of_tiny_products_moves_the_mean_by_at_most_one_clip(clip, outputs):
    # |a| is as large as its norm allows, so that the clipped b underflows in float32
    block = FactoredBlock(torch.full((1, 1), 1.8e19), torch.full((1, outputs), 1e-7), bias=False)
    oracle = Clipped(clip, 0.0, batch_size=128)
    moved = torch.linalg.vector_norm(
        released(oracle, [torch.zeros(outputs, 1)], [GradBatch([block])])
    )
    assert moved <= oracle.sensitivity("zero_out")


def test_rows_of_another_shape_than_the_query_are_refused():
    # broadcasting one clipped coordinate to 100 would move the mean by 10 clips
    oracle = Clipped(1.0, 0.0, batch_size=1)
    with pytest.raises((ValueError, SequenceError)):
        released(oracle, [torch.zeros(100)], [GradBatch([DenseBlock(torch.full((1, 1), 5.0))])])
