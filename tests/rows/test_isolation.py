"""A record's row depends on no other record, not in its last bits either: blocks of fixed size, filled up with nothing.

Matrix libraries choose kernels by the number of rows. What one record more does to the last bits of all others, a kink
of the loss or an indicator function makes as large as it likes; so it must do nothing.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import torch_dpsco as dp
from tests.algorithms import user_runs as runs
from tests.problems import make_optimizer
from torch_dpsco.accounting.designs import (
    Assigned,
    AssignedParts,
    Design,
    Fixed,
    Full,
    Parts,
    Poisson,
)
from torch_dpsco.accounting.events import ADJACENCIES, Adjacency
from torch_dpsco.algorithms import oracles
from torch_dpsco.errors import SequenceError
from torch_dpsco.rows import DenseBlock, GradBatch
from torch_dpsco.sampling import (
    AssignedSampler,
    FullSampler,
    PrivateLoader,
    Slots,
)
from torch_dpsco.sampling.samplers import DesignSampler
from torch_dpsco.sampling.slots import capacity
from torch_dpsco.step.run import sizes_are_private

FALSE_ALARM = 1e-6


class BySize(nn.Module):
    """Numbers whose last bits depend on how many rows there are, as those of a matrix product do."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (1e-6 if len(x) % 2 else -1e-6)


class Shift(nn.Module):
    def __init__(self, by: Tensor) -> None:
        super().__init__()
        self.register_buffer("by", by)

    def forward(self, x: Tensor) -> Tensor:
        return x - self.by


def emulated_kink() -> tuple[nn.Module, Tensor]:
    """Returns a net, and a record at its kink: of which side it is, the number of rows decides."""
    net = nn.Sequential(nn.Linear(4, 1, bias=False), BySize(), nn.ReLU(), nn.Linear(1, 1))
    nn.init.zeros_(net[0].weight)
    nn.init.constant_(net[3].weight, 100.0)
    return net, torch.ones(4)


def real_kink() -> tuple[nn.Module, Tensor]:
    """Returns the same for the kernels of this machine, where they differ between 15 and 16 rows (MKL's do)."""
    torch.manual_seed(0)
    first, x = nn.Linear(784, 100), torch.randn(784)
    with torch.no_grad():
        fewer, more = (first(x.expand(size, -1).contiguous())[0] for size in (15, 16))
        by = torch.where(
            fewer == more, torch.maximum(fewer, more) + 1.0, torch.minimum(fewer, more)
        )
        last = nn.Linear(100, 1)
        nn.init.constant_(last.weight, 100.0)
    return nn.Sequential(first, Shift(by), nn.ReLU(), last), x


def clipped_sum(
    net: nn.Module, x: Tensor, size: int, *, rows: str = "auto", **loader: object
) -> Tensor:
    """Returns the clipped sum over `size` equal records, drawn with certainty from a design of 16."""
    model = dp.attach(net, rows=rows, loss_reduction="sum")
    optimizer = make_optimizer(model, Poisson(16, 16), adjacency="add_remove")
    before = torch.cat([p.detach().flatten().double() for p in model.parameters()])
    for (batch,) in optimizer.loader(
        TensorDataset(x.expand(size, -1).contiguous()), steps=1, **loader
    ):
        model(batch).sum().backward()
        optimizer.step()
    after = torch.cat([p.detach().flatten().double() for p in dp.detach(model).parameters()])
    return 16.0 * (before - after)


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize("rows", ["auto", "dense"])
@pytest.mark.parametrize("kink", [emulated_kink, real_kink])
def test_a_record_more_moves_the_sum_of_a_kinked_net_by_one_clip(kink, rows):
    """The counterexample: 15 records at a kink, and a 16th that moved the sum by 15 clips."""
    fewer, more = (clipped_sum(*kink(), size, rows=rows) for size in (15, 16))
    assert torch.linalg.vector_norm(more - fewer) <= 1.01


def test_without_filling_up_a_record_more_moves_all_others():
    fewer, more = (clipped_sum(*emulated_kink(), size, isolation="none") for size in (15, 16))
    assert torch.linalg.vector_norm(more - fewer) > 10.0


def first_of_31(design: Design, size: int, adjacency: Adjacency, **loader: object) -> Tensor:
    """Returns the first clipped sum of a run on 31 equal records at the kink, `size` of them in that batch."""
    net, x = emulated_kink()
    model = dp.attach(net, loss_reduction="sum")
    optimizer = make_optimizer(model, design, noise=1e-6, adjacency=adjacency)
    before = torch.cat([p.detach().flatten().double() for p in model.parameters()])
    batches = optimizer.loader(TensorDataset(x.expand(31, -1).contiguous()), steps=1, **loader)
    draw_first(batches.batch_sampler, size)
    for (batch,) in batches:
        model(batch).sum().backward()
        optimizer.step()
    after = torch.cat([p.detach().flatten().double() for p in dp.detach(model).parameters()])
    return 16.0 * (before - after)


def draw_first(sampler: DesignSampler, size: int) -> None:
    """Lets the next draw be one of `size` records, by its law given that size."""
    for key in range(1000):  # one in seven is
        if isinstance(sampler, AssignedSampler):
            cut = np.frombuffer(key.to_bytes(32, "big"), dtype=np.uint8).copy()
            sampler.partition = replace(sampler.partition, cut=cut)
        found = next(sampler.draws())
        if len(found[1]) == size:
            break
    if not isinstance(sampler, AssignedSampler):
        sampler.draws = lambda: iter([found])


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize("adjacency", ADJACENCIES)
@pytest.mark.parametrize(
    "design", [Poisson(16, 31), Assigned(16, 31, passes=2)], ids=["poisson", "pass"]
)
def test_who_is_in_a_batch_moves_nobody_else(design, adjacency):
    """Also where neighbors have the same sizes: a record that moved 15 others would show whether it is in their batch.

    What amplifies fixes the sum of the others, whether or not a record is drawn (docs/proofs/record_isolation.md), and
    whichever batch of a pass it picks (docs/proofs/allocation.md).
    """
    fewer, more = (first_of_31(design, size, adjacency) for size in (15, 16))
    assert torch.linalg.vector_norm(more - fewer) <= 1.01
    fewer, more = (first_of_31(design, size, adjacency, isolation="none") for size in (15, 16))
    assert torch.linalg.vector_norm(more - fewer) > 10.0


@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_a_report_on_poisson_batches_that_are_not_filled_up_says_what_that_takes(adjacency):
    """At a kink all others would show whether a record was drawn, under every adjacency, and nothing be amplified."""
    data = TensorDataset(torch.randn(9, 3))
    for design, padding, said in (
        (Poisson(4, 9), False, "must not depend on how many others are in its batch"),
        (Poisson(4, 9), True, "rows, to which all are filled up, compute each row"),
        (Fixed(4, 9), False, "Kernels for batches of one size compute"),
    ):
        if adjacency != "replace_one" and isinstance(design, Fixed):
            continue
        optimizer = make_optimizer(
            dp.attach(nn.Linear(3, 1)), design, noise=1.0, adjacency=adjacency
        )
        optimizer.loader(data, isolation="slots" if padding else "none")
        assert said in " ".join(str(optimizer.report(1e-5)).split())


def test_a_report_on_parts_cut_by_opacus_says_that_they_are_not_filled_up():
    model = dp.attach(nn.Linear(3, 1))
    optimizer = make_optimizer(model, Poisson(8, 9), noise=1.0)
    loader = optimizer.loader(TensorDataset(torch.randn(9, 3)), steps=1)
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=4, optimizer=optimizer
    ) as parts:
        for (x,) in parts:
            model(x).sum(1).mean().backward()
            optimizer.step()
    assert optimizer.steps == 1
    assert "Batches are not filled up to a public size" in " ".join(
        str(optimizer.report(1e-5)).split()
    )


class ScaledBySize(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (1.0 + 2.0**-40 * (len(x) % 2))


def score_with(rows_of_last: int, monkeypatch: pytest.MonkeyPatch, **loader: object) -> float:
    """Returns the concentration score of 30 users, half of them at exactly tau from the others."""
    n, scores = 30, []
    plain = oracles.neighbor_counts
    with monkeypatch.context() as patch:
        patch.setattr(
            oracles,
            "neighbor_counts",
            lambda *given: scores.append(plain(*given)) or scores[-1],
        )
        run = runs.filtered(runs.quiet(n, steps=1))
        ids = torch.cat([torch.arange(n), torch.full((rows_of_last - 1,), n - 1)])
        data = runs.dataset(torch.tensor([[0.5, 0.0], [-0.5, 0.0]])[ids % 2])
        scale = ScaledBySize()
        for x, y, users in run.opt.loader(data, ids, steps=1, **loader):
            run.opt.zero_grad()
            runs.linear_loss(scale(run.model(x)), y).backward()
            run.opt.step(users=users)
    return float(scores[0].sum()) / n


@pytest.mark.filterwarnings("ignore:users disagree:torch_dpsco.errors.UtilityWarning")
def test_a_user_of_two_rows_moves_the_score_of_the_filter_as_one_of_one_row(monkeypatch):
    """The counterexample: all users of one side were at tau from the other with one number of rows, and not with two.

    Declared is 2 (n - 1)/n; the user's mean stays where it is, so that the score must too.
    """
    assert score_with(1, monkeypatch) == score_with(2, monkeypatch)
    assert (
        abs(
            score_with(1, monkeypatch, isolation="none")
            - score_with(2, monkeypatch, isolation="none")
        )
        > 10.0
    )


# -- the filling ------------------------------------------------------------------------------------------------------


class Normalized(nn.Module):
    """Divides a record by its length: the row of a record of zeros is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x / torch.linalg.vector_norm(x, dim=1, keepdim=True))


def _forward(
    net: nn.Module, optimizer: dp.PrivateOptimizer, batch: list[Tensor], kind: str
) -> None:
    x, y = batch
    if kind == "compiled":
        dp.CompiledRows(net, nn.MSELoss(), backend=None, micro_batch_size=5).step(
            optimizer, x, y
        )
        return
    losses = (net(x) - y).square().mean(1)
    (losses.mean() if net._dpsco.mean else losses.sum()).backward()
    optimizer.step()


def test_a_mean_of_a_private_number_is_refused():
    """Of 20,000 rows of 1024 slopes alike, one more moved the sum by 1.041 clips: all norms are rounded otherwise."""
    data = TensorDataset(torch.randn(9, 3))
    for adjacency, padding, outputs, raises in (
        ("add_remove", False, 2, True),
        ("add_remove", True, 2, False),
        ("add_remove", False, 1, False),  # one slope times inputs: in the declared rounding
        (
            "replace_one",
            False,
            2,
            True,
        ),  # it moves with the record, whose draw must not show in the others
        ("zero_out", False, 2, True),
        ("replace_one", True, 2, False),
        ("fixed", False, 2, False),
    ):
        model = dp.attach(nn.Linear(3, outputs))
        fixed = adjacency == "fixed"
        design, adjacency = (Fixed(8, 9), "replace_one") if fixed else (Poisson(8, 9), adjacency)
        optimizer = make_optimizer(model, design, adjacency=adjacency)
        for (x,) in optimizer.loader(data, steps=1, isolation="slots" if padding else "none"):
            model(x).mean(1).mean().backward()
            refused = pytest.raises(
                SequenceError, match="must be a sum where the number of rows is private"
            )
            with refused if raises else nullcontext():
                optimizer.step()
        assert len(optimizer.accountant) == (not raises)


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize(
    "net", [Normalized, lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))]
)
@pytest.mark.parametrize("kind", ["auto", "dense", "compiled"])
@pytest.mark.parametrize("most", [None, 5])
def test_rows_of_the_filling_contribute_exactly_nothing(net, kind, most):
    x, y = torch.randn(11, 3), torch.randn(11, 2)
    answers = []
    torch.manual_seed(0)
    start = net().state_dict()
    for padding in (True, False):
        model = net()
        model.load_state_dict(start)
        if kind != "compiled":
            dp.attach(model, rows=kind, loss_reduction="mean" if padding else "sum")
        optimizer = make_optimizer(model, Poisson(16, 16), adjacency="add_remove", clip=0.5)
        for batch in optimizer.loader(
            TensorDataset(x, y),
            steps=1,
            isolation="slots" if padding else "none",
            physical_batch_size=most,
        ):
            _forward(model, optimizer, batch, kind)
        assert optimizer.steps == 1
        answers.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert bool(torch.isfinite(answers[0]).all())
    torch.testing.assert_close(*answers, rtol=1e-5, atol=1e-6)


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.MSELoss(reduction="sum")])
def test_the_filling_contributes_nothing_in_closed_form(loss):
    data, answers = TensorDataset(torch.randn(11, 3), torch.randn(11, 1)), []
    for padding in (True, False):
        model = nn.Linear(3, 1)
        nn.init.zeros_(model.weight), nn.init.ones_(model.bias)
        optimizer = make_optimizer(model, Poisson(16, 16), adjacency="add_remove", clip=0.5)
        dp.fit(
            model,
            optimizer,
            data,
            loss,
            steps=2,
            loss_reduction=loss.reduction,
            progress=False,
            isolation="slots" if padding else "none",
        )
        answers.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*answers, rtol=1e-5, atol=1e-6)


def test_a_draw_without_records_is_a_step_of_noise_with_a_block_of_filling():
    model = dp.attach(nn.Linear(2, 1), loss_reduction="sum")
    optimizer = make_optimizer(model, Poisson(1, 10**6), adjacency="add_remove")
    before = model.weight.detach().clone()
    for (x,) in optimizer.loader(TensorDataset(torch.ones(3, 2)), steps=3, isolation="slots"):
        assert len(x) == capacity(optimizer.design) == optimizer.outstanding_rows
        model(x).sum().backward()
        optimizer.step()
    for _ in optimizer.loader(TensorDataset(torch.ones(3, 2)), steps=1):
        optimizer.step()  # without a backward, too
    assert optimizer.steps == 4
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("cut", [lambda x: x[:-1], lambda x: torch.cat([x, x[:1]])])
def test_fewer_rows_than_were_delivered_are_refused(cut):
    model = dp.attach(nn.Linear(2, 1), loss_reduction="sum")
    optimizer = make_optimizer(model, Poisson(16, 16), adjacency="add_remove")
    for (x,) in optimizer.loader(TensorDataset(torch.ones(9, 2)), steps=1):
        model(cut(x)).sum().backward()
        with pytest.raises(SequenceError, match="rows"):
            optimizer.step()
    assert len(optimizer.accountant) == 0


class Counting(DenseBlock):
    """Rows whose norms depend on how many there are."""

    def norms(self) -> Tensor:
        return super().norms() + len(self)

    def select(self, index: Tensor) -> DenseBlock:
        return Counting(self.rows[0][index])


def test_norms_do_not_depend_on_how_many_rows_count():
    block = Counting(torch.randn(8, 3))
    for index in (torch.arange(5), torch.tensor([1, 4])):
        rows = GradBatch([block]).among(index)
        assert torch.equal(rows.norms(), block.norms()[index])
        assert torch.equal(rows.dense()[0], block.rows[0][index])
        part = rows.among(torch.tensor([1]))
        assert torch.equal(part.norms(), block.norms()[index[1:2]])
        users = torch.zeros(len(index), dtype=torch.int64)
        sums = torch.zeros(1, 3)
        rows.unscaled(2.0).add_by(users, sums)
        assert torch.allclose(sums[0], block.rows[0][index].sum(0) / 2)


# -- slots ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_places_are_uniform_without_replacement():
    slots = Slots(Poisson(2, 10**6), physical_batch_size=4)
    slots.capacity, draws = 4, 20_000
    pairs = np.array([slots.places(2) for _ in range(draws)])
    found = np.bincount(4 * pairs[:, 0] + pairs[:, 1], minlength=16)
    different = found[[i for i in range(16) if i % 5]]
    assert different.sum() == draws
    assert stats.chisquare(different).pvalue > FALSE_ALARM


@pytest.mark.parametrize("mean", [1, 8, 64, 256, 4096])
def test_a_draw_is_larger_than_the_capacity_with_a_probability_below_two_to_the_minus_forty(
    mean,
):
    for design in (Poisson(mean, 10**5), Assigned(mean, 10**5)):
        assert stats.binom.sf(capacity(design), 10**5, mean / 10**5) < 2.0**-40
    for processes in (2, 3):
        own = math.ceil(10**5 / processes)
        assert (
            stats.binom.sf(
                capacity(Poisson(mean, 10**5), processes=processes), own, mean / 10**5
            )
            < 2.0**-40
        )


def test_capacities_of_phases_are_those_of_the_largest():
    design = Parts(((Poisson(8, 1000), 3), (Poisson(64, 1000), 2)), n=2000)
    assert capacity(design) == capacity(Poisson(64, 1000))
    assert 17 < capacity(Poisson(16, 16)) <= capacity(Full(16))  # a neighbor has one record more


def test_a_draw_that_overflows_is_split_into_more_blocks_of_the_same_size():
    model = dp.attach(nn.Linear(2, 1, bias=False), loss_reduction="sum")
    nn.init.zeros_(model.weight)
    optimizer = make_optimizer(model, Poisson(16, 16), adjacency="add_remove", clip=10.0)
    sizes = []
    for (x,) in optimizer.loader(
        TensorDataset(torch.ones(130, 2)), steps=2, isolation="slots"
    ):  # true size far above the reference
        sizes.append(len(x))
        model(x).sum().backward()
        optimizer.step()
    assert sizes == [65] * 4 == [capacity(optimizer.design)] * 4
    assert optimizer.steps == 2
    torch.testing.assert_close(model.weight.detach(), torch.full((1, 2), -2 * 130 / 16.0))


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("most", [None, 1, 100])
@pytest.mark.parametrize("n_users", [3, 40, 500])
def test_the_slots_of_a_user_do_not_depend_on_the_rows_of_others(n_users, most):
    rng = np.random.default_rng(n_users)
    slots = Slots(Full(n_users), of_users=True, physical_batch_size=most)
    places = slots.places(n_users)

    def of_first(sizes: np.ndarray) -> list[list[int]]:
        """Returns the slots of the rows of each user but the last, in the order in which they are added up."""
        owner = np.repeat(np.arange(n_users), sizes)
        found: list[list[tuple[int, int]]] = [[] for _ in range(n_users)]
        for rows, taken in slots.of_users(sizes, places):
            assert len(set(taken.tolist())) == len(taken)
            assert not len(taken) or 0 <= taken.min() <= taken.max() < slots.block
            for row, place in zip(rows.tolist(), taken.tolist(), strict=True):
                found[owner[row]].append(
                    (row - int((np.cumsum(sizes) - sizes)[owner[row]]), place)
                )
        assert [[nth for nth, _ in own] for own in found] == [
            list(range(size)) for size in sizes
        ]
        return [[place for _, place in own] for own in found[:-1]]

    sizes = rng.integers(0, 9, n_users)
    sizes[0] = 700
    changed = [of_first(np.append(sizes[:-1], last)) for last in (0, 1, 2, 50, 3000)]
    assert all(other == changed[0] for other in changed)


def test_blocks_of_users_are_of_few_rows_more_than_the_users_have():
    sizes = np.full(3000, 50)
    slots = Slots(Full(3000), of_users=True)
    assert len(list(slots.of_users(sizes, slots.places(3000)))) * slots.block < 2 * sizes.sum()
    assert Slots(Full(3000), of_users=True, dim=10**9).block == 64


def test_shared_records_have_the_same_rows_to_the_last_bit_on_neighboring_data(monkeypatch):
    """With the kernels of this machine, and slots as they are coupled: a record more takes a free one."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(300, 70), nn.ReLU(), nn.Linear(70, 3))
    data, seen = torch.randn(61, 300), []
    monkeypatch.setattr(
        dp.oracles.Clipped,
        "observe",
        lambda self, rows, users=None: seen.append((rows, rows.norms())),
    )
    for size in (60, 61):
        model = dp.attach(net, loss_reduction="sum")
        optimizer = make_optimizer(model, Poisson(64, 64), adjacency="add_remove")
        loader = optimizer.loader(TensorDataset(data[:size]), steps=1)
        loader.slots._rng = np.random.default_rng(5)
        loader.slots.capacity = 64
        for (x,) in loader:
            model(x).square().sum().backward()
            optimizer.step()
        dp.detach(model)
    (fewer, norms), (more, other_norms) = seen
    places = np.random.default_rng(5).permutation(64)
    shared = torch.from_numpy(
        np.argsort(np.argsort(places[:61]))[:60]
    )  # where they are among 61, in order of slots
    own = torch.from_numpy(np.argsort(np.argsort(places[:60])))
    for a, b in zip(fewer.dense(), more.dense(), strict=True):
        assert torch.equal(a[own], b[shared])
    assert torch.equal(norms[own], other_norms[shared])


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("unit", ["example", "user"])
def test_a_draw_that_is_delivered_again_has_the_places_that_it_had(workers, unit):
    """By the same loader, a new one, and a new one after one that does not fill batches up."""
    params, data = (
        dp.attach(nn.Linear(1, 1)).parameters(),
        TensorDataset(1.0 + torch.arange(64.0)[:, None]),
    )
    if unit == "user":
        optimizer = dp.UserClippedSGD(
            params,
            dp.UserClippedSGD.plan(lr=0.1, clip=1.0, noise_multiplier=1.0, batch_size=16, n=32),
        )
    else:
        optimizer = make_optimizer(
            dp.attach(nn.Linear(1, 1)), Poisson(16, 64), adjacency="add_remove"
        )
    users = [torch.arange(64) % 32] if unit == "user" else []

    def loader(**keywords: object) -> PrivateLoader:
        return optimizer.loader(data, *users, steps=4, num_workers=workers, **keywords)

    first = loader()
    kept, *_ = next(iter(first))
    assert len(kept) == first.slots.block
    for make in (lambda: first, loader, lambda: loader(isolation="none"), loader):
        optimizer.discard()
        again, *_ = next(iter(make()))
        if len(again) == len(kept):
            assert torch.equal(again, kept)
        else:  # nothing but the records, in their own order
            assert torch.equal(again.sort(dim=0).values, kept[kept > 0].sort().values[:, None])


def test_smaller_blocks_of_a_draw_that_is_delivered_again_have_its_places():
    optimizer = make_optimizer(
        dp.attach(nn.Linear(1, 1)), Poisson(16, 64), adjacency="add_remove"
    )
    loader = optimizer.loader(TensorDataset(1.0 + torch.arange(64.0)[:, None]), steps=1)
    (whole,) = next(iter(loader))
    optimizer.discard()
    log, parts = loader.batch_sampler.log, []
    for (part,) in loader.in_parts(8):
        parts += [(value.item(), k) for k, value in enumerate(part) if value > 0]
        log.take()
        log.taken = None  # used, as a part of the draw
    assert len(parts) == int((whole > 0).sum())
    block = loader.in_parts(8).slots.block
    assert all(whole[slot::block].eq(value).any() for value, slot in parts)


def test_a_draw_in_small_blocks_comes_in_as_many_as_its_fullest_slot_holds() -> None:
    slots = Slots(Poisson(16, 4096), physical_batch_size=4)
    for _ in range(50):
        places = slots.places(16)
        blocks = list(slots.of_records(places))
        assert len(blocks) == np.bincount(places % 4).max()
        assert sorted(np.concatenate([part for part, _ in blocks])) == list(range(16))
        for part, found in blocks:
            assert np.array_equal(found, np.unique(places[part] % 4))


# -- which loaders fill up -------------------------------------------------------------------------------------------


def loader_of(adjacency: str, design: Design | None = None, **keywords: object) -> object:
    model = dp.attach(nn.Linear(2, 1))
    optimizer = make_optimizer(model, design or Poisson(4, 16), adjacency=adjacency)
    return optimizer.loader(TensorDataset(torch.ones(16, 2)), **keywords)


def test_batches_are_filled_up_where_the_number_of_records_in_them_is_private():
    assert loader_of("add_remove").slots.block == capacity(Poisson(4, 16)) == 40
    assert (
        loader_of("replace_one").slots.block == 40
    )  # who is drawn is private, if only who is replaced is not
    assert loader_of("zero_out").slots.block == 40
    for design in (Fixed(4, 16), Full(16)):
        assert loader_of("replace_one", design).slots is None
        assert loader_of("replace_one", design, isolation="slots").slots is not None
    for part, filled in ((Poisson(4, 8), True), (Fixed(4, 8), False)):
        assert (
            sizes_are_private(Parts(((Full(8), 1), (part, 2)), 16), "replace_one", "example")
            == filled
        )
    assert loader_of("add_remove", isolation="none").slots is None
    assert loader_of("add_remove", physical_batch_size=6).slots.block == 6
    assert len(next(iter(loader_of("add_remove", steps=1).in_parts(8)))[0]) == 8
    run = runs.clipped(5)
    assert run.opt.loader(*runs.agreeing(5)).slots is not None
    with pytest.raises(ValueError, match="isolation"):
        loader_of("add_remove", isolation="yes")


class Words(Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, place: int) -> tuple[Tensor, str]:
        return torch.ones(2), "word"


def test_batches_that_cannot_be_filled_up_are_refused_by_name():
    optimizer = make_optimizer(
        dp.attach(nn.Linear(2, 1)), Poisson(16, 16), adjacency="add_remove"
    )
    with pytest.raises(ValueError, match="isolation='none'"):
        next(iter(optimizer.loader(Words())))
    optimizer.discard()
    x, words = next(iter(optimizer.loader(Words(), isolation="none")))
    assert len(x) == len(words) == 16


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_other_data_sets_are_filled_up(workers):
    class Squares(Dataset):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, place: int) -> dict[str, Tensor]:
            return {"x": torch.tensor([1.0 + place]), "y": torch.tensor(1.0 + place**2)}

    optimizer = make_optimizer(
        dp.attach(nn.Linear(1, 1)), Poisson(16, 16), adjacency="add_remove"
    )
    batch = next(iter(optimizer.loader(Squares(), num_workers=workers)))
    assert batch["x"].shape == (capacity(optimizer.design), 1)
    for x, y in zip(batch["x"][:, 0].tolist(), batch["y"].tolist(), strict=True):
        assert y == (1.0 + (x - 1.0) ** 2 if x else 0.0)
    assert sorted(batch["x"][:, 0].tolist()) == [0.0] * (capacity(optimizer.design) - 12) + [
        1.0 + k for k in range(12)
    ]


@pytest.mark.parametrize(
    "design",
    [
        *(Poisson(100, 100), Poisson(90, 100), Poisson(80, 100), Poisson(30, 32)),
        *(Poisson(1, 2), Poisson(250, 500)),
    ],
    ids=str,
)
def test_a_record_more_than_declared_overflows_as_rarely(design):
    n = design.n + 1
    room = capacity(design)
    assert stats.binom.sf(room, n, design.batch_size / design.n) < 2.0**-40
    mean = design.batch_size / design.n * n
    excess = room / mean - 1.0  # the bound of the proof, which says less than the law
    rare = mean * ((1.0 + excess) * math.log1p(excess) - excess)
    assert room >= n or rare >= 60 * math.log(2)


def test_a_part_of_assigned_records_overflows_as_rarely():
    design = AssignedParts(((Full(3000), 1), (Assigned(1000, 27_000), 27)), 30_000)
    overflows = stats.binom.sf([capacity(design), capacity(Full(3000))], 30_001, 0.1)
    assert (
        overflows[0] < 2.0**-60 < overflows[1]
    )  # the room of a part of a known number of records is too small
    assert capacity(design) < 3600


def test_few_batches_of_a_small_divisor_overflow_as_rarely():
    """The divisor says nothing about how many records are in one of two batches."""
    assert stats.binom.sf(capacity(Assigned(100, 10_000, 2)), 10_001, 0.5) < 2.0**-40
    assert capacity(Assigned(6000, 10_000, 2)) >= 6000


def test_a_filled_block_of_all_records_has_them_at_their_places():
    x = torch.arange(20.0).reshape(20, 1) + 1
    design = Full(20)
    loader = PrivateLoader(TensorDataset(x), FullSampler(design, steps=1), slots=Slots(design))
    orders = []
    for _ in range(3):
        [(rows,)] = loader.read_only([x])
        kept = rows.flatten()[rows.flatten() > 0]
        assert sorted(kept.tolist()) == x.flatten().tolist()
        loader.batch_sampler.log.use_up()
        orders.append(kept.tolist())
        loader = PrivateLoader(
            TensorDataset(x), FullSampler(design, steps=1), slots=Slots(design)
        )
    assert (
        orders[0] != x.flatten().tolist() or orders[1] != x.flatten().tolist()
    )  # in order by chance: 1 in 20!^2
