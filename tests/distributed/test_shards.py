"""Shards: each of several processes has records of its own, that no other one sees; their union is one data set."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from scipy import stats
from torch import Tensor, nn
from torch.multiprocessing import start_processes
from torch.utils.data import Dataset, TensorDataset

import torch_dpsco as dp
from tests.problems import slots_of
from tests.processes import (
    DIM,
    SECONDS,
    N,
    backward,
    full,
    holder,
    launch,
    layer,
    message,
    numbers,
    records,
    released_by_one,
    run_rank,
    train,
    union,
)
from torch_dpsco.accounting.designs import Draw
from torch_dpsco.errors import (
    PrivacyError,
    SequenceError,
    UnitError,
    UnknownSamplerError,
    UtilityWarning,
)
from torch_dpsco.rows import GradBatch
from torch_dpsco.sampling import PrivateLoader, RankAssignedSampler, RankSampler
from torch_dpsco.sampling.slots import capacity
from torch_dpsco.step import distributed
from torch_dpsco.step.checks import World
from torch_dpsco.step.oracle import Release

FALSE_ALARM = 1e-6  # of each statistical check
KINDS = ("poisson", "full", "allocated")
STEPS = {"poisson": 8, "full": 8, "allocated": 4}


# -- what the ranks do ------------------------------------------------------------------------------------------------


def share(rank: int, world: int) -> Tensor:
    """Positions of the records that a rank has: none, then blocks in descending order."""
    return torch.arange(N).flip(0).chunk(world - 1)[rank - 1] if rank else torch.arange(0)


def shard_of(rank: int, world: int) -> TensorDataset:
    return TensorDataset(*(tensor[share(rank, world)] for tensor in records().tensors))


def built(kind: str, model: nn.Module, **options: Any) -> dp.PrivateOptimizer:
    options = {"noise": 1.0, **options}
    if kind == "full":
        return full(model, **options)
    if kind == "allocated":
        return holder(model, batch_size=16, sampling="allocated", epochs=2, **options)
    return holder(model, average="uniform", **options)


def repeatable(kind: str, model: nn.Module) -> dp.PrivateOptimizer:
    """The same noise in each run."""
    optimizer = built(kind, model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UtilityWarning)  # of the seed
        optimizer._noise = torch.Generator().manual_seed(3)
    return optimizer


def everything(rank: int) -> dict[str, Any]:
    world = dist.get_world_size()
    data = shard_of(rank, world)
    found: dict[str, Any] = {}
    for kind in KINDS:
        torch.manual_seed(1), np.random.seed(1)  # noqa: NPY002  (what naive samplers draw by)
        model = layer()
        optimizer = repeatable(kind, model)
        run = train(
            model,
            optimizer,
            optimizer.loader(data, shard=N, steps=STEPS[kind], isolation="none"),
        )
        optimizer.finalize()
        found[kind] = run | {
            "answer": numbers(model),
            "ledger": optimizer.accountant.ledger.digest(),
        }
        found[kind]["said"] = " ".join(str(optimizer.report(1e-3)).split())
    return found | {
        "fit": fitted(data),
        "law": drawn_often(data),
        "by ids": with_ids(rank, data),
    }


def drawn_often(data: TensorDataset) -> list[list[int]]:
    """The draws of a loader of 400 steps, of none of which a step is made."""
    loader = holder(layer(), noise=1.0, batch_size=6).loader(data, shard=N, steps=400)
    return [data.tensors[2][indices].tolist() for _, indices in loader.batch_sampler.draws()]


class Rows(Dataset[Any]):
    """Map-style, read record by record."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        x, y, _ = self.data[index]
        return x.float(), y.float()


def fitted(data: TensorDataset) -> dict[str, Any]:
    """`fit` under add_remove, where batches are filled up and the first rank's data set has no record to show."""
    torch.manual_seed(3)
    model = nn.Linear(DIM, 1)
    loss = dp.losses.Logistic()
    budget = dp.Budget(2.0, 1e-3, adjacency="add_remove")
    plan = dp.HolderSGD.plan(
        problem=loss.problem(bound_x=3.0), n=50, budget=budget, batch_size=8
    )
    optimizer = dp.HolderSGD(model.parameters(), plan)
    dp.fit(model, optimizer, Rows(data), loss, shard=50, progress=False)
    facts = {
        "steps": optimizer.steps,
        "planned": plan.steps,
        "ledger": optimizer.accountant.ledger.digest(),
    }
    return facts | {"answer": numbers(model)}


def with_ids(rank: int, data: TensorDataset) -> dict[str, Any]:
    """Ids in a Poisson design: unique over all ranks, or refused on all."""
    names = [f"record {i}" for i in data.tensors[2].tolist()]
    twice = ["record 0" if name == "record 63" else name for name in names]
    model = layer()
    optimizer = built("poisson", model)
    wrong = message(UnitError, lambda: optimizer.loader(data, record_ids=twice, shard=N))
    pairs = TensorDataset(*data.tensors[:2])
    fitted = message(
        UnitError,
        lambda: dp.fit(
            model,
            optimizer,
            pairs,
            nn.MSELoss(),
            record_ids=twice,
            shard=N,
            steps=1,
            progress=False,
        ),
    )
    alone = message(UnknownSamplerError, lambda: optimizer.loader(data, record_ids=names))
    other = message(
        SequenceError,
        lambda: optimizer.loader(data, record_ids=names if rank else None, shard=N),
    )
    run = train(
        model,
        optimizer,
        optimizer.loader(data, record_ids=names, shard=N, steps=3, isolation="none"),
    )
    return {
        "wrong": wrong,
        "fit": fitted,
        "alone": alone,
        "other": other,
        "answer": numbers(model),
        "drawn": run["drawn"],
    }


def failures(rank: int) -> dict[str, Any]:
    return {
        "refused": refusals(rank),
        "told": [told(rank, extra) for extra in (0, 1)],
        "moved": moved(rank),
        "passes": passes(rank),
        "places": common_places(rank),
    }


def refusals(rank: int) -> dict[str, str]:
    data, everyone = shard_of(rank, 2), records()

    def with_sampler() -> None:
        optimizer = built("poisson", layer())
        sampler = RankSampler(dp.Poisson(6, N), rank=rank, processes=2, key=bytes(32), own=True)
        optimizer.bind(PrivateLoader(everyone, sampler))

    refused: dict[str, Callable[[], Any]] = {
        "sampler": with_sampler,
        "mixed": lambda: built("poisson", layer()).loader(
            data if rank else everyone, shard=N if rank else None
        ),
        "total": lambda: built("poisson", layer()).loader(everyone, shard=N),
        "bound": lambda: built("poisson", layer()).loader(data, shard=N - 1),
    }
    return {name: message((PrivacyError, ValueError), call) for name, call in refused.items()}


def told(rank: int, extra: int) -> list[list[int]]:
    """What this rank hears and says when loaders are made under add_remove; `extra`: rank 1 has a record more."""
    heard: list[list[int]] = []
    gather, send, add_up, key = (
        distributed.Group.gather,
        distributed.Group.send,
        distributed.Group.add_up,
        distributed.sampling_key,
    )

    def gathered(group: distributed.Group, said: Tensor) -> list[Tensor]:
        table = gather(group, said)
        heard.extend(row.tolist() for row in table)
        return table

    def sent(group: distributed.Group, said: Tensor, of: int = 0) -> None:
        send(group, said, of)
        heard.append(said.tolist())

    def added(group: distributed.Group, said: Tensor, to: int = 0) -> None:
        heard.append(said.tolist())
        add_up(group, said, to)

    group = distributed.Group
    group.gather, group.send, group.add_up, distributed.sampling_key = (
        gathered,
        sent,
        added,
        lambda: bytes(32),
    )
    data = TensorDataset(*(tensor[: 5 + extra * rank] for tensor in records().tensors))
    for kind in KINDS:
        built(kind, layer(), adjacency="add_remove").loader(data, shard=N)
    group.gather, group.send, group.add_up, distributed.sampling_key = gather, send, add_up, key
    return heard


def moved(rank: int) -> dict[str, Any]:
    """A checkpoint of rank 0 goes on on all ranks, whose records are on other ranks now; then copies of them."""
    model = layer()
    optimizer = built("poisson", model)
    train(model, optimizer, optimizer.loader(shard_of(rank, 2), shard=N, steps=3))
    states = [(model.state_dict(), optimizer.state_dict())]
    dist.broadcast_object_list(states, src=0)
    other = layer(seed=7)
    second = built("poisson", other)
    other.load_state_dict(states[0][0])
    second.load_state_dict(states[0][1])
    first = train(other, second, second.loader(shard_of(1 - rank, 2), shard=N, steps=2))
    other, second = copy.deepcopy((other, second))
    loader = second.loader(shard_of(rank, 2), shard=N, steps=2)
    found = train(other, second, loader.in_parts(2))
    second.finalize()
    facts = {"steps": second.steps, "charged": len(second.accountant), "answer": numbers(other)}
    return facts | {
        "ledger": second.accountant.ledger.digest(),
        "drawn": first["drawn"] + found["drawn"],
    }


def passes(rank: int) -> dict[str, Any]:
    """A pass over shards goes on over the same shards, and over nothing else."""
    model = layer()
    optimizer = built("allocated", model)
    data = shard_of(rank, 2)
    found = train(model, optimizer, optimizer.loader(data, shard=N, steps=2, isolation="none"))[
        "drawn"
    ]
    state = optimizer.state_dict()
    again: dict[str, Callable[[], Any]] = {
        "whole": lambda: optimizer.loader(records(), resume=True),
        "ids": lambda: optimizer.loader(data, resume=True, record_ids=data.tensors[2]),
        "moved": lambda: optimizer.loader(shard_of(1 - rank, 2), shard=N, resume=True),
        "crash": lambda: built("allocated", layer()).load_state_dict(state),
    }
    wrong = {name: message((PrivacyError, ValueError), call) for name, call in again.items()}
    found += train(
        model, optimizer, optimizer.loader(data, shard=N, steps=2, resume=True, isolation="none")
    )["drawn"]
    common = built("allocated", model := layer())
    train(model, common, common.loader(records(), steps=2, isolation="none"))
    turned = TensorDataset(*(tensor.flip(0) for tensor in records().tensors))
    wrong["turned"] = message(PrivacyError, lambda: common.loader(turned, resume=True))
    return {"wrong": wrong, "drawn": found}


def common_places(rank: int) -> str:
    """A draw of shards was given up; now all ranks have all records, as many as each shard had."""
    half = TensorDataset(*(tensor[:32] for tensor in records().tensors))
    optimizer = built("full", layer(), adjacency="add_remove")
    next(iter(optimizer.loader(half, shard=N)))
    optimizer.discard()
    return message(SequenceError, lambda: optimizer.loader(half))


def dying(rank: int) -> str:
    """Rank 2 ends after its backward, without a word."""
    model = layer()
    optimizer = built("poisson", model)
    for k, (x, y, _) in enumerate(optimizer.loader(shard_of(rank, 3), shard=N, steps=2)):
        backward(model, optimizer, x, y)
        if (rank, k) == (2, 1):
            os._exit(0)
        if k == 0:
            optimizer.step()
    return (
        message(SequenceError, optimizer.step)
        + f" {len(optimizer.accountant)} {optimizer.steps}"
    )


# -- as one process ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[2, 3], ids=["two", "three"])
def together(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    return launch(everything, request.param, tmp_path_factory.mktemp("together"))


class Summed(World):
    """One process that sums the parts of all ranks: its own one, and those of others by copies of the model."""

    alone = False

    def __init__(self, model: nn.Module, others: list[list[list[int]]]) -> None:
        self.model, self.others, self.step = model, others, 0

    def release(self, oracle: Any, noise: Any) -> Release:
        total, rows = torch.zeros(oracle._dim, dtype=torch.float64), 0
        rows += oracle.write_sum(total)
        for part in self.others:
            apart = copy.deepcopy(oracle)
            self.observe(apart, part[self.step])
            own = torch.zeros_like(total)
            rows += apart.write_sum(own)
            total += own
        self.step += 1
        return released_by_one(oracle, total, rows, noise, 1 + len(self.others))

    def observe(self, oracle: Any, positions: list[int]) -> None:
        """Takes the rows of a part at the same parameters."""
        model = dp.attach(nn.Linear(DIM, 1, dtype=torch.float64))
        model.load_state_dict(self.model.state_dict())
        oracle.discard()
        oracle.open([p.detach() for p in model.parameters()])
        if positions:
            x, y, _ = (tensor[positions] for tensor in records().tensors)
            with torch.enable_grad():
                nn.functional.mse_loss(model(x), y).backward()
            oracle.observe(GradBatch.consume(list(model.parameters())))


def summed(kind: str, parts: list[list[list[int]]]) -> Tensor:
    """Returns the path of one process on the parts that ranks have drawn."""
    model = layer()
    optimizer = repeatable(kind, model)
    optimizer.oracle.share(len(parts))
    loader = optimizer.loader(records(), steps=len(parts[0]), isolation="none")
    sampler = loader.batch_sampler
    name = sampler.draws

    def recorded() -> Iterator[tuple[Draw, np.ndarray]]:
        for (draw, _), part in zip(name(), parts[0], strict=True):
            yield (
                Draw(len(part), draw.partition, draw.part, draw.index),
                np.array(part, dtype=np.int64),
            )

    sampler.draws = recorded
    optimizer._world = Summed(model, parts[1:])
    return train(model, optimizer, loader)["path"]


@pytest.mark.weekly
@pytest.mark.parametrize("kind", KINDS)
def test_shards_release_bit_for_bit_what_one_process_releases_that_sums_the_same_parts(
    kind: str, together: list[dict[str, Any]]
) -> None:
    ranks = [rank[kind] for rank in together]
    path = summed(kind, [rank["drawn"] for rank in ranks])
    for rank in ranks:
        assert torch.equal(rank["path"], path)
        assert torch.equal(rank["answer"], ranks[0]["answer"])
        assert rank["ledger"] == ranks[0]["ledger"]
        assert f"{len(ranks)} processes that trust each other" in rank["said"]
        assert "a shard each: a record on one, whatever its values" in rank["said"]


def test_each_record_is_drawn_where_it_is_and_a_rank_without_records_takes_part(
    together: list[dict[str, Any]],
) -> None:
    world = len(together)
    for rank, found in enumerate(together):
        mine = set(share(rank, world).tolist())
        for kind in KINDS:
            assert len(found[kind]["drawn"]) == len(found[kind]["path"]) == STEPS[kind]
            assert {i for draw in found[kind]["drawn"] for i in draw} <= mine
    assert together[0]["poisson"]["drawn"] == [[]] * 8
    assert union([rank["full"] for rank in together]) == [list(range(N))] * 8
    once = [i for draw in union([rank["allocated"] for rank in together]) for i in draw]
    assert sorted(once) == list(range(N))


def test_the_union_of_the_draws_of_shards_has_the_law_of_the_design(
    together: list[dict[str, Any]],
) -> None:
    check_that_draws_are_poisson(union([{"drawn": rank["law"]} for rank in together]), 6 / N)


def test_shards_whose_draws_are_copies_of_each_other_are_caught(
    together: list[dict[str, Any]],
) -> None:
    """The second half of the records is drawn where the first half is."""
    own = [
        [i for i in draw if i < N // 2]
        for draw in union([{"drawn": rank["law"]} for rank in together])
    ]
    with pytest.raises(AssertionError):
        check_that_draws_are_poisson(
            [sorted(draw + [i + N // 2 for i in draw]) for draw in own], 6 / N
        )


def check_that_draws_are_poisson(draws: list[list[int]], rate: float) -> None:
    """Tests of size 1e-6: how often each record is drawn, and the spread of the sizes."""
    drawn = np.zeros((len(draws), N), dtype=np.int64)
    for k, draw in enumerate(draws):
        assert len(set(draw)) == len(draw)
        drawn[k, draw] = 1
    law, tail = stats.binom(len(draws), rate), FALSE_ALARM / 4 / N
    assert law.ppf(tail) <= drawn.sum(axis=0).min() <= drawn.sum(axis=0).max() <= law.isf(tail)
    # pairs of records that are in the two halves: each is drawn together with probability rate^2, independently
    pairs = (drawn[:, : N // 2] & drawn[:, N // 2 :]).sum()
    law = stats.binom(len(draws) * (N // 2), rate**2)
    assert law.ppf(FALSE_ALARM / 4) <= pairs <= law.isf(FALSE_ALARM / 4)


def test_fit_trains_on_shards_of_which_one_is_empty(together: list[dict[str, Any]]) -> None:
    ranks = [rank["fit"] for rank in together]
    for rank in ranks:
        assert rank["steps"] == rank["planned"] > 0
        assert rank["ledger"] == ranks[0]["ledger"]
        assert torch.equal(rank["answer"], ranks[0]["answer"])


def test_a_record_that_two_shards_hold_is_refused_by_its_id(
    together: list[dict[str, Any]],
) -> None:
    """On all ranks, in a Poisson design; so are ids on some ranks only, and ids without shards."""
    for found in (rank["by ids"] for rank in together):
        assert "ids must be unique" in found["wrong"]
        assert "ids must be unique" in found["fit"]
        assert "give shard= where each rank has records of its own" in found["alone"]
        assert "data must be equal on all ranks" in found["other"]
        assert torch.equal(found["answer"], together[0]["by ids"]["answer"])
    assert any(draw for draw in union([rank["by ids"] for rank in together]))


# -- what is refused, and what goes on --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch(failures, 2, tmp_path_factory.mktemp("failures"))


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sampler", "UnknownSamplerError: loader must draw this rank's positions"),
        ("mixed", "SequenceError: data must be equal on all ranks"),
        ("total", f"UnitError: n must be the number of records under zero_out (declared {N}"),
    ],
)
def test_what_shards_cannot_share_is_refused_on_all_ranks(
    name: str, words: str, failed: list[dict[str, Any]]
) -> None:
    for rank in failed:
        assert words in rank["refused"][name]


def test_a_sampler_of_a_shard_that_these_ranks_have_not_agreed_on_is_refused(
    failed: list[dict[str, Any]],
) -> None:
    for rank in failed:
        assert "loader must draw this rank's positions" in rank["refused"]["sampler"]


def test_a_shard_above_its_declared_number_is_refused_where_that_is_public(
    failed: list[dict[str, Any]],
) -> None:
    assert "rank 1 has given this loader up" in failed[0]["refused"]["bound"]
    assert f"declared {N - 1}, the data set has more" in failed[1]["refused"]["bound"]


def test_under_add_remove_no_rank_tells_how_many_records_it_has(
    failed: list[dict[str, Any]],
) -> None:
    for rank in failed:
        without, with_one_more = rank["told"]
        assert without == with_one_more
        assert len(without) > 3 * len(KINDS)


def test_a_poisson_run_goes_on_after_records_have_moved_to_other_ranks(
    failed: list[dict[str, Any]],
) -> None:
    """Each draw is of the records where they are: no draw depends on an earlier one."""
    first, second = (rank["moved"] for rank in failed)
    for name in ("steps", "charged", "ledger"):
        assert first[name] == second[name]
    assert (first["steps"], first["charged"]) == (7, 7)
    assert torch.equal(first["answer"], second["answer"])
    assert second["drawn"][:2] == [[]] * 2
    assert first["drawn"][2:] == [[]] * 2


def test_a_pass_over_shards_goes_on_over_the_same_shards_only(
    failed: list[dict[str, Any]],
) -> None:
    for rank in failed:
        wrong = rank["passes"]["wrong"]
        assert "with shard= if from shards" in wrong["ids"]
        assert "Error" in wrong["whole"]
        assert "of another size" in wrong["moved"]
        assert "Error" in wrong["crash"]
    assert sorted(i for draw in failed[1]["passes"]["drawn"] for i in draw) == list(range(N))


def test_ranks_go_on_with_their_records_in_their_order_only(
    failed: list[dict[str, Any]],
) -> None:
    """All of them turn their common data set round: they are alike, but a place has another record now."""
    for rank in failed:
        assert "dataset must hold the records of the run" in rank["passes"]["wrong"]["turned"]


def test_ranks_go_on_with_a_partition_of_their_common_key_only() -> None:
    place: dict[str, Any] = {"rank": 0, "processes": 2, "own": True, "size": 9}
    begun = RankAssignedSampler(dp.Assigned(16, N), **place, key=bytes(32)).so_far
    assert (
        RankAssignedSampler(dp.Assigned(16, N), **place, key=bytes(32), resume=begun).so_far
        is not None
    )
    with pytest.raises(SequenceError, match="got a partition of another key"):
        RankAssignedSampler(dp.Assigned(16, N), **place, key=bytes([1]) * 32, resume=begun)


def test_a_draw_of_a_shard_is_no_draw_of_all_records(failed: list[dict[str, Any]]) -> None:
    for rank in failed:
        assert "use a loader of the same data set" in rank["places"]


@pytest.mark.slow
def test_a_rank_that_dies_with_its_shard_makes_the_others_raise(tmp_path: Path) -> None:
    set_forkserver_preload(["torch_dpsco", "pytest", "scipy.stats"])
    running = start_processes(
        run_rank, (dying, 3, str(tmp_path), ()), nprocs=3, join=False, start_method="forkserver"
    )
    for process in running.processes:
        process.join(SECONDS)
        assert process.exitcode == 0
    for rank in (0, 1):
        said = torch.load(tmp_path / str(rank))
        assert "the other ranks cannot be reached" in said
        assert said.endswith(" 1 1")  # charges and steps: nothing of the broken step


# -- in one process ---------------------------------------------------------------------------------------------------


def test_one_process_takes_its_shard_for_all_there_is() -> None:
    model = layer()
    optimizer = built("full", model)
    found = train(
        model, optimizer, optimizer.loader(records(), shard=N, steps=1, record_ids=range(N))
    )
    assert found["drawn"] == [list(range(N))]
    with pytest.raises(UnitError, match="ids must be unique"):
        optimizer.loader(records(), shard=N, record_ids=[0] * N)
    with pytest.raises(
        UnitError, match="shard must be how many records this process has at most"
    ):
        optimizer.loader(records(), shard=N - 1)
    with pytest.raises(UnitError, match="n must be the number of records"):
        built("full", layer()).loader(
            TensorDataset(*(t[:9] for t in records().tensors)), shard=N
        )


@pytest.mark.parametrize("design", [dp.Poisson(64, 1000), dp.Full(1000), dp.Assigned(100, 1000)])
def test_blocks_of_a_shard_have_room_for_a_draw_of_its_declared_number(design: Any) -> None:
    """Of at most 250 records, and a neighbor's one more; whole draws where nothing is declared."""
    assert capacity(design, records=1000) == capacity(design, records=5000) == capacity(design)
    room = capacity(design, records=250)
    assert room < capacity(design)
    rate = 1.0 if isinstance(design, dp.Full) else design.batch_size / design.n
    assert stats.binom.sf(room, 251, rate) < 2.0**-40
    assert capacity(design, records=1) >= 2


def test_the_blocks_of_a_rank_with_a_shard_have_room_for_all_it_declares() -> None:
    optimizer = built("poisson", layer())
    place: dict[str, Any] = {"rank": 1, "processes": 4, "key": bytes(32)}
    own = RankSampler(optimizer.design, **place, own=True)
    rooms = [slots_of(optimizer, own, records=most).capacity for most in (N, N // 2)]
    assert rooms == [capacity(optimizer.design), capacity(optimizer.design, records=N // 2)]
    assert slots_of(optimizer, RankSampler(optimizer.design, **place)).capacity < rooms[1]
