"""Means of users: collected in any pieces, by own rows alone, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch

from tests.algorithms.users import same
from torch_dpsco.algorithms.oracles import UserClipped, UserFiltered
from torch_dpsco.errors import SequenceError
from torch_dpsco.rows import DenseBlock, GradBatch
from torch_dpsco.rows.attach import attach
from torch_dpsco.step.oracle import Clipped


def unopened(n_users=3, expected=3):
    return UserClipped(Clipped(1.0, 0.0, expected), n_users)


def opened(n_users=6, expected=6, dim=2, dtype=torch.float32):
    oracle = unopened(n_users, expected)
    oracle.open([torch.zeros(dim, dtype=dtype)])
    return oracle


def add(users, rows, ids):
    users.observe(GradBatch([DenseBlock(rows)]), torch.tensor(ids))


def test_means_are_those_of_own_rows_in_order_of_appearance():
    users = opened()
    add(users, torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 0.0]]), [4, 0, 4])
    add(users, torch.tensor([[0.0, 1.0]]), [4])
    means, counts = users._take()
    assert counts.tolist() == [1, 3]
    torch.testing.assert_close(means, torch.tensor([[3.0, 4.0], [2.0, 1.0]]))


def test_memory_grows_with_users_beyond_those_expected():
    users, rows = (
        opened(n_users=1000, expected=2),
        torch.randn(40, 2, generator=torch.Generator().manual_seed(0)),
    )
    ids = [997, 3, 3, 0, *range(100, 136)]
    for k in range(0, 40, 3):
        add(users, rows[k : k + 3], ids[k : k + 3])
    means, counts = users._take()
    assert (len(means), sorted(counts.tolist())) == (39, [1] * 38 + [2])
    torch.testing.assert_close(means.sum(0), rows.sum(0) - (rows[1] + rows[2]) / 2)


@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38])
def test_the_mean_of_a_user_is_the_same_to_the_last_bit_whatever_others_hold(value):
    rows = torch.randn(30, 2, generator=torch.Generator().manual_seed(0))
    ids = [0] * 10 + [1] * 20
    plain, spoiled = opened(), opened()
    add(plain, rows, ids)
    other = rows.clone()
    other[:10] = value
    for k in range(30):
        add(spoiled, other[k : k + 1], ids[k : k + 1])
    assert torch.equal(plain._take()[0][1], spoiled._take()[0][1])


def test_a_batch_that_was_discarded_or_taken_is_forgotten():
    users = opened()
    for forget in (users.discard, users._take, lambda: users.open([torch.zeros(2)])):
        add(users, torch.ones(1, 2), [3])
        forget()
        assert [len(part) for part in users._take()] == [0, 0]


def test_rows_without_ids_are_refused():
    with pytest.raises(SequenceError, match="users must be given"):
        opened().observe(GradBatch([DenseBlock(torch.ones(1, 2))]), None)


@pytest.mark.parametrize(
    "ids", [torch.tensor([6]), torch.tensor([-1]), torch.tensor([0, 1]), torch.tensor([0.0])]
)
def test_ids_out_of_range_are_refused(ids):
    users = opened()
    with pytest.raises(ValueError, match="users must be"):
        users.observe(GradBatch([DenseBlock(torch.ones(1, 2))]), ids)
    for one in (6, -1):
        with pytest.raises(ValueError, match="users must be"):
            add(users, torch.ones(2, 2), [3, one])
    assert len(users._take()[0]) == 0


def test_rows_of_another_shape_and_unopened_batches_are_refused():
    with pytest.raises(ValueError, match="those of the query"):
        add(opened(), torch.ones(1, 3), [0])
    with pytest.raises(SequenceError, match="no logical batch"):
        unopened().observe(GradBatch([DenseBlock(torch.ones(1, 2))]), torch.tensor([0]))


def test_more_users_than_the_filter_is_for_are_refused():
    """A phase on some of the users takes their ids as they are, and never more of them than its bounds are for."""
    for users in (8, 9):
        oracle = UserFiltered(same(8), ids=20)
        oracle.open([torch.zeros(1)])
        oracle.observe(
            GradBatch([DenseBlock(torch.zeros(users, 1))]), users=torch.arange(users) + 11
        )
        if users == 8:
            assert not oracle.release(torch.Generator().manual_seed(0)).halted
        else:
            with pytest.raises(SequenceError, match="users must be at most 8 in a step"):
                oracle.release(torch.Generator().manual_seed(0))


@pytest.mark.parametrize("rows", ["auto", "dense"])
def test_rows_of_a_mean_loss_are_known_and_refused_where_users_are_compared(rows):
    """Three records instead of two change the last bits of the other users' rows: 1/B is rounded."""
    x = torch.tensor([[0.1], [0.7], [0.3]])
    for reduction in ("mean", "sum"):
        model = attach(torch.nn.Linear(1, 1, bias=False), rows=rows, loss_reduction=reduction)
        torch.nn.init.ones_(model.weight)
        for exact in (True, False):
            users = UserFiltered(same(8)) if exact else unopened()
            users.open(list(model.parameters()))
            getattr((model(x) ** 2).flatten(), reduction)().backward()
            batch = GradBatch.consume(list(model.parameters()))
            assert batch.averaged is (reduction == "mean")
            if exact and batch.averaged:
                with pytest.raises(SequenceError, match="rows must be of a sum loss"):
                    users.observe(batch, torch.arange(3))
            else:
                users.observe(batch, torch.arange(3))
