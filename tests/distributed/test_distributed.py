"""Several processes as one run: Poisson batches drawn in parts, sums added once, noise drawn once."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from scipy import stats
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import torch_dpsco as dp
from tests.processes import (
    DIM,
    N,
    backward,
    empties,
    full,
    holder,
    launch,
    layer,
    message,
    numbers,
    records,
    run_of,
    train,
    trajectory,
    union,
)
from tests.streams import gaussians, seeded
from torch_dpsco.accounting.designs import Draw
from torch_dpsco.errors import SequenceError, UnitError, UnknownSamplerError, UtilityWarning
from torch_dpsco.integrations import fsdp
from torch_dpsco.noise import SliceStream
from torch_dpsco.rows import DenseBlock, GradBatch
from torch_dpsco.sampling import RankSampler, RecordIds
from torch_dpsco.step import checks, distributed
from torch_dpsco.step.oracle import Clipped

FALSE_ALARM = 1e-6  # of each statistical check, whose seeds are fixed besides


# -- what the ranks do ------------------------------------------------------------------------------------------------


def same_as_one(rank: int) -> dict[str, Any]:
    found = {kind: trajectory(kind) for kind in ("poisson", "full")}
    found["chunks"] = trajectory("poisson", physical_batch_size=1)
    found["full chunks"] = trajectory(
        "full", physical_batch_size=5 + rank
    )  # as many chunks as each rank likes
    found["allocated"], found["by ids"] = allocated(), allocated_by_ids(rank)
    return found | {
        "empties": empties(),
        "fit": fitted(rank),
        "largest": [largest_tensor(n) for n in (200, 2000)],
    }


def allocated() -> dict[str, Any]:
    """Two passes of secret draws; the second loop goes on with the loader of the first."""
    model = layer()
    optimizer = holder(model, noise=1.0, batch_size=16, sampling="allocated", epochs=2)
    loader = optimizer.loader(records(), isolation="none")
    found = [train(model, optimizer, loader)["drawn"] for _ in range(2)]
    optimizer.finalize()
    events = [
        f"{count} x {event}" for _, _, event, count in optimizer.accountant.ledger.entries()
    ]
    return {"drawn": found, "answer": numbers(model), "events": events, "steps": optimizer.steps}


def allocated_by_ids(rank: int) -> dict[str, Any]:
    """The same where each rank has records of its own: most are on the last one, in descending order."""
    x, y, position = records().tensors
    last = dist.get_world_size() - 1
    mine = (
        torch.arange(3 * rank, 3 * rank + 3)
        if rank < last
        else torch.arange(N - 1, 3 * last - 1, -1)
    )
    data = TensorDataset(x[mine], y[mine], position[mine])
    model = layer()
    optimizer = holder(model, noise=1.0, batch_size=16, sampling="allocated", epochs=2)
    shared = (
        [f"record {min(i, N - 2)}" for i in mine.tolist()],
        [f"record {i + (i == 2)}" for i in mine.tolist()],
    )
    wrong = [
        message(UnitError, lambda ids=ids: optimizer.loader(data, record_ids=ids))
        for ids in shared
    ]
    fewer = TensorDataset(*(tensor[:2] for tensor in data.tensors))
    wrong.append(message(UnitError, lambda: optimizer.loader(fewer, record_ids=mine[:2])))
    others = message(
        SequenceError, lambda: optimizer.loader(data, record_ids=mine if rank else None)
    )
    ids = [f"record {i}" for i in mine.tolist()]
    found = [
        train(model, optimizer, optimizer.loader(data, record_ids=ids, isolation="none"))[
            "drawn"
        ]
    ]
    found.append(
        train(
            model,
            optimizer,
            optimizer.loader(data, record_ids=ids, resume=True, isolation="none"),
        )["drawn"]
    )
    cut = optimizer._batch.partition.cut
    optimizer.finalize()
    events = [
        f"{count} x {event}" for _, _, event, count in optimizer.accountant.ledger.entries()
    ]
    facts = {
        "drawn": found,
        "answer": numbers(model),
        "events": events,
        "steps": optimizer.steps,
    }
    return facts | {"wrong": wrong, "others": others, "cut": torch.from_numpy(cut)}


def fitted(rank: int) -> dict[str, Any]:
    """`fit` with a budget, from float32; what each rank writes to its terminal."""
    x, y, _ = records().tensors
    data = TensorDataset(x.float(), y.float())
    torch.manual_seed(3)
    model = nn.Linear(DIM, 1)
    budget = dp.Budget(2.0, 1e-3)
    optimizer = dp.HolderSGD(
        model.parameters(),
        dp.HolderSGD.plan(
            problem=dp.losses.Logistic().problem(bound_x=3.0), n=N, budget=budget, batch_size=8
        ),
    )
    shown = io.StringIO()
    with contextlib.redirect_stderr(shown):
        dp.fit(model, optimizer, data, dp.losses.Logistic(), physical_batch_size=3)
    spent = optimizer.report().figures
    facts = {
        "steps": optimizer.steps,
        "planned": optimizer.schedule.steps,
        "epsilon": spent.epsilon,
    }
    return facts | {
        "answer": numbers(model),
        "shown": shown.getvalue(),
        "ledger": optimizer.accountant.ledger.digest(),
    }


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.numel = max(self.numel, leaf.numel())
        return result


def largest_tensor(n: int) -> tuple[int, int]:
    """Returns (largest tensor of a step on n records in chunks of 16, number of draws of noise)."""
    x = torch.randn(n, 40, generator=torch.Generator().manual_seed(n))
    model = layer(inputs=40, dtype=torch.float32)
    optimizer = full(model, n, noise=1.0)
    releases = count_noise(optimizer)
    loader = iter(optimizer.loader(TensorDataset(x, x[:, :1]), steps=1, physical_batch_size=16))
    mode = Largest()
    for features, target in loader:
        with mode:
            backward(model, optimizer, features, target)
            optimizer.step()
    assert optimizer.steps == 1
    return mode.numel, len(releases)


def count_noise(optimizer: dp.PrivateOptimizer) -> list[int]:
    """Returns a list that grows with each release of the oracle on this rank, and each slice of one."""
    made: list[int] = []

    def counting(method: Any) -> Any:
        def counted(*args: Any) -> Any:
            made.append(1)
            return method(*args)

        return counted

    for name in ("release", "noised"):
        setattr(optimizer.oracle, name, counting(getattr(optimizer.oracle, name)))
    return made


def noise_alone(rank: int, mutated: bool) -> Tensor:
    """Returns a released mean of 20,000 coordinates over empty rows; `mutated`: every rank adds noise to its sum."""
    if mutated and rank:
        write_sum = Clipped.write_sum

        def noisy(self: Clipped, out: Tensor) -> int:
            n_rows = write_sum(self, out)
            own = torch.Generator().manual_seed(100 + rank)
            out += self.noise_std * torch.randn(out.shape, generator=own, dtype=out.dtype)
            return n_rows

        Clipped.write_sum = noisy
    x = torch.zeros(4, 20_000)
    model = layer(inputs=20_000, dtype=torch.float32)
    model.bias.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UtilityWarning)  # of the seed
        optimizer = full(model, 4, noise=2.0, generator=torch.Generator().manual_seed(rank))
    for features, target in optimizer.loader(TensorDataset(x, x[:, :1]), steps=1):
        backward(model, optimizer, features, target)
        optimizer.step()
    return model.weight.grad[0].double() / optimizer.oracle.noise_std


def noise_once(rank: int) -> dict[str, Any]:
    return {
        "noise": noise_alone(rank, mutated=False),
        "mutated": noise_alone(rank, mutated=True),
    }


# -- as one process ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[2, 3], ids=["two", "three"])
def together(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    return launch(same_as_one, request.param, tmp_path_factory.mktemp("together"))


def replayed(kind: str, draws: Sequence[Sequence[int]]) -> dict[str, Any]:
    """One process on given batches."""
    model = layer()
    optimizer = run_of(kind, model)
    loader = optimizer.loader(records(), steps=len(draws))

    def recorded() -> Iterator[tuple[Draw, np.ndarray]]:
        for draw in draws:
            yield Draw(len(draw)), np.array(draw, dtype=np.int64)

    loader.batch_sampler.draws = recorded
    result = train(model, optimizer, loader)
    optimizer.finalize()
    return result | {"answer": numbers(model), "ledger": optimizer.accountant.ledger.digest()}


@pytest.mark.weekly
@pytest.mark.parametrize("run", ["poisson", "full", "chunks", "full chunks"])
def test_the_result_is_that_of_one_process_on_the_union_of_the_draws(
    run: str, together: list[dict[str, Any]]
) -> None:
    ranks = [rank[run] for rank in together]
    draws = union(ranks)
    assert len(draws) == 8
    one = replayed("full" if "full" in run else "poisson", draws)
    for rank in ranks:
        torch.testing.assert_close(rank["path"], one["path"], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(rank["answer"], one["answer"], rtol=1e-12, atol=1e-12)
        assert rank["ledger"] == one["ledger"]
        assert torch.equal(rank["path"], ranks[0]["path"])
    if "full" in run:
        assert draws == [list(range(N))] * 8
    assert (len({tuple(draw) for draw in draws}) == 1) == ("full" in run)


def test_each_rank_draws_its_own_positions_only(together: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(together):
        for run in ("poisson", "full", "chunks"):
            assert {i % len(together) for draw in found[run]["drawn"] for i in draw} == {rank}


def test_ranks_with_equal_seeds_draw_different_places(together: list[dict[str, Any]]) -> None:
    places = [
        [[i // len(together) for i in draw] for draw in rank["poisson"]["drawn"]]
        for rank in together
    ]
    assert all(own != places[0] for own in places[1:])


def test_passes_of_secret_draws_are_charged_once_and_hold_each_record_once(
    together: list[dict[str, Any]],
) -> None:
    for rank in together:
        found = rank["allocated"]
        assert found["events"] == ["2 x RandomAllocation(noise_multiplier=1.0, steps=4)"]
        assert found["steps"] == 8
        assert torch.equal(found["answer"], together[0]["allocated"]["answer"])
    passes = []
    for k in range(2):
        parts = [rank["allocated"]["drawn"][k] for rank in together]
        batches = [
            sorted(i for part in drawn for i in part) for drawn in zip(*parts, strict=True)
        ]
        assert sorted(i for batch in batches for i in batch) == list(range(N))
        passes.append(batches)
    assert passes[0] != passes[1]


def test_ranks_with_own_records_make_passes_of_all_of_them(
    together: list[dict[str, Any]],
) -> None:
    """The batches are those that the ids pick under the common key, on whatever rank."""
    key = together[0]["by ids"]["cut"].numpy().tobytes()
    assert len(key) == 33
    for k in range(2):
        picks = RecordIds([f"record {i}" for i in range(N)]).picks(key[:32], k, 4)
        parts = [rank["by ids"]["drawn"][k] for rank in together]
        batches = [
            sorted(i for part in drawn for i in part) for drawn in zip(*parts, strict=True)
        ]
        assert batches == [np.flatnonzero(picks == batch).tolist() for batch in range(4)]
        assert {i for draw in parts[0] for i in draw} == {0, 1, 2}
    for rank in together:
        found = rank["by ids"]
        assert found["events"] == ["2 x RandomAllocation(noise_multiplier=1.0, steps=4)"]
        assert (found["steps"], found["cut"].tolist()) == (8, list(key))
        assert torch.equal(found["answer"], together[0]["by ids"]["answer"])


def test_a_record_of_two_ranks_is_refused(together: list[dict[str, Any]]) -> None:
    """On all ranks, whether one or two hold it; so are other numbers of records than declared, and other calls."""
    for rank in together:
        found = rank["by ids"]
        assert [text[:15] for text in found["wrong"]] == ["UnitError: reco"] * 2 + [
            "UnitError: n mu"
        ]
        assert "data must be equal on all ranks" in found["others"]


def test_t13_empty_draws_are_steps_on_every_rank(together: list[dict[str, Any]]) -> None:
    ranks = [rank["empties"] for rank in together]
    for rank in ranks:
        assert (rank["steps"], rank["charged"], len(rank["drawn"])) == (32, 32, 32)
        assert [] in rank["drawn"]
        assert torch.equal(
            rank["path"], ranks[0]["path"]
        )  # with noise, which is the same everywhere
        assert torch.equal(rank["answer"], ranks[0]["answer"])
    assert any(draw for rank in ranks for draw in rank["drawn"])


def test_fit_makes_the_planned_steps_within_the_budget_and_shows_one_bar(
    together: list[dict[str, Any]],
) -> None:
    ranks = [rank["fit"] for rank in together]
    for rank in ranks:
        assert rank["steps"] == rank["planned"] > 0
        assert 1.9 < rank["epsilon"] == ranks[0]["epsilon"] <= 2.0
        assert rank["ledger"] == ranks[0]["ledger"]
        assert torch.equal(rank["answer"], ranks[0]["answer"])
    assert "epsilon" in ranks[0]["shown"]
    assert [rank["shown"] for rank in ranks[1:]] == [""] * (len(ranks) - 1)


def test_memory_does_not_grow_with_the_batch_and_noise_is_drawn_on_one_rank(
    together: list[dict[str, Any]],
) -> None:
    for rank, found in enumerate(together):
        assert found["largest"] == [(16 * 40, int(rank == 0))] * 2


def test_memory_of_one_process_does_not_grow_with_the_batch() -> None:
    assert [largest_tensor(n) for n in (200, 2000)] == [(16 * 40, 1)] * 2


# -- noise ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def noises(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    return launch(noise_once, 2, tmp_path_factory.mktemp("noise"))


def check_that_noise_is_of_one_process(noise: Tensor) -> None:
    """`noise` in units of its std: a chi-square test on the sum of squares, both sides."""
    total = float(noise.square().sum())
    law = stats.chi2(len(noise))
    assert law.ppf(FALSE_ALARM / 2) < total < law.isf(FALSE_ALARM / 2)


@pytest.mark.slow
def test_noise_is_drawn_once_and_every_rank_gets_the_same(
    noises: list[dict[str, Tensor]],
) -> None:
    first, second = (rank["noise"] for rank in noises)
    assert torch.equal(first, second)
    check_that_noise_is_of_one_process(first)
    bits = SliceStream(0)
    seeded(0).fill(bits.key.numpy().data)  # of rank 0's generator alone
    own = gaussians(2 + len(first), bits, dtype=torch.float32)[2:]
    torch.testing.assert_close(first, own.double(), rtol=1e-5, atol=1e-5)


def test_noise_of_every_rank_is_caught(noises: list[dict[str, Tensor]]) -> None:
    for rank in noises:
        with pytest.raises(AssertionError):
            check_that_noise_is_of_one_process(rank["mutated"])


# -- in one process ---------------------------------------------------------------------------------------------------


def test_an_optimizer_made_before_the_process_group_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = layer()
    optimizer = full(model, noise=1.0)
    loader = optimizer.loader(records(), steps=1)
    (x, y, _), *_ = loader
    backward(model, optimizer, x, y)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    for call in (optimizer.step, lambda: optimizer.loader(records())):
        with pytest.raises(
            SequenceError, match="world_size must be 1 for an optimizer made in one process"
        ):
            call()
    assert len(optimizer.accountant) == optimizer.steps == 0


def test_the_part_of_a_rank_is_no_batch_of_one_process() -> None:
    sampler = RankSampler(dp.Full(N), rank=0, processes=2, key=bytes(32))
    with pytest.raises(UnknownSamplerError, match="got the part of one of several processes"):
        full(layer()).bind(DataLoader(records(), batch_sampler=sampler))


def test_without_other_processes_nothing_is_shared() -> None:
    assert checks.is_first()
    optimizer = full(layer())
    assert type(optimizer._world) is checks.World
    assert optimizer.oracle.processes == 1


def rows_of(n: int, dim: int, seed: int) -> GradBatch:
    return GradBatch(
        [DenseBlock(torch.randn(n, dim, generator=torch.Generator().manual_seed(seed)))]
    )


@pytest.mark.parametrize("processes", [2, 3])
def test_the_rounding_of_a_sum_over_processes_stays_within_the_declared_error(
    in_torch: None, processes: int
) -> None:
    """float32 only where all processes together have no more rows than the plan has room for."""
    batch_size, dim = 64, 4096
    oracles = [Clipped(1.0, 0.0, batch_size) for _ in range(processes)]
    exact = Clipped(1.0, 0.0, batch_size)
    query = [torch.zeros(dim)]
    room = Clipped(1.0, 0.0, batch_size)
    room.open(query)
    rows = room._summation.rows
    assert room._summation.vector_tile  # float32 is planned
    for count, float32 in ((rows // processes, True), (rows // processes + 1, False)):
        total = torch.zeros(dim, dtype=torch.float64)
        expected = torch.zeros(dim, dtype=torch.float64)
        for seed, oracle in enumerate(oracles):
            oracle.share(processes)
            oracle.open(query)
            oracle.observe(rows_of(count, dim, seed))
            part = torch.zeros(dim, dtype=torch.float64)
            assert oracle.write_sum(part) == count
            total += part
            exact.open(query)
            exact.share(1020)  # which leaves no room for float32
            exact.observe(rows_of(count, dim, seed))
            part = torch.zeros(dim, dtype=torch.float64)
            exact.write_sum(part)
            expected += part
        gap = float((total - expected).norm()) * batch_size
        assert gap <= room._summation.error / 2
        assert (gap > 1e-9) == float32
    oracles[0].require_rows(rows)
    answer = oracles[0].noised(total, torch.Generator())  # without noise
    torch.testing.assert_close(answer, total.float(), rtol=1e-6, atol=0.0)
    assert f"{processes} processes that trust each other" in oracles[0].assumptions[0]
    with pytest.raises(SequenceError, match="a logical batch must have at most"):
        oracles[0].require_rows(oracles[0]._summation.max_rows + 1)
    with pytest.raises(ValueError, match="processes must be <= 1020"):
        oracles[0].share(1021)


def test_several_processes_replace_all_that_one_process_does() -> None:
    """A method that `Ranks` inherits would run as if the process were alone: noise drawn twice, draws not agreed on."""
    public = {
        name
        for name, member in vars(checks.World).items()
        if callable(member) and name[0] != "_"
    }
    assert len(public) >= 8
    of_shards = {
        "common",
        "require_whole",
    }  # each of these ranks has whole parameters, as one alone
    assert public - of_shards <= set(vars(distributed.Ranks))
    assert of_shards <= set(vars(fsdp.Shards))
