"""Users on several processes: each has all records of its own users, and clips their means; their union is one run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import torch_dpsco as dp
from tests.distributed.user_shards import (
    CLIP,
    OWNER,
    USERS,
    built,
    shard_of,
    share,
    summed_layer,
    train,
)
from tests.problems import slots_of
from tests.processes import DIM, launch, layer, numbers, records, released_by_one
from torch_dpsco.accounting.designs import Draw
from torch_dpsco.algorithms.oracles import UserClipped
from torch_dpsco.errors import UnitError
from torch_dpsco.rows import DenseBlock, GradBatch
from torch_dpsco.sampling import PoissonSampler, RankSampler, UserLoader
from torch_dpsco.sampling.slots import capacity
from torch_dpsco.step import checks
from torch_dpsco.step.checks import World
from torch_dpsco.step.oracle import Clipped, Release

FALSE_ALARM = 1e-6  # of each statistical check
KINDS = ("poisson", "full")


# -- what the ranks do -------------------------------------------------------------------------------------------------


def repeatable(kind: str, model: nn.Module) -> dp.UserClippedSGD:
    optimizer = built(kind, model)
    optimizer._noise = torch.Generator().manual_seed(3)
    return optimizer


def everything(rank: int) -> dict[str, Any]:
    world = dist.get_world_size()
    data, users = shard_of(rank, world)
    found: dict[str, Any] = {}
    for kind in KINDS:
        torch.manual_seed(1), np.random.seed(1)  # noqa: NPY002  (what naive samplers draw by)
        model = summed_layer()
        optimizer = repeatable(kind, model)
        run = train(
            model, optimizer, optimizer.loader(data, users, shard=USERS, isolation="none")
        )
        optimizer.finalize()
        found[kind] = run | {
            "answer": numbers(model),
            "ledger": optimizer.accountant.ledger.digest(),
        }
        found[kind] |= {
            "charged": len(optimizer.accountant),
            "said": " ".join(str(optimizer.report(1e-3)).split()),
        }
    return found | {"fit": fitted(data, users), "law": drawn_often(data, users), "page": shown()}


def shown() -> dict[str, Any]:
    """What the block of docs/distributed.md about users leaves."""
    page = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text(encoding="utf-8")
    block = page.split("### Shards of users")[1].split("```python\n")[1].split("```")[0]
    x = torch.randn(16, DIM, generator=torch.Generator().manual_seed(dist.get_rank()))
    scope: dict[str, Any] = {
        "torch": torch,
        "nn": nn,
        "dist": dist,
        "dp": dp,
        "dim": DIM,
        "loss": dp.losses.Logistic(),
    }
    scope["own"] = TensorDataset(x, x[:, :1].sign())
    torch.manual_seed(0)
    exec(block, scope)
    return {"steps": scope["optimizer"].steps, "answer": numbers(scope["model"])}


def drawn_often(data: TensorDataset, users: Tensor) -> list[list[int]]:
    """Users in the draws of a loader of 400 steps, of none of which a step is made."""
    loader = built("poisson", layer(), steps=400).loader(data, users, shard=USERS)
    mine = users.unique().numpy()
    return [mine[places].tolist() for _, places in loader.batch_sampler.draws()]


class Rows(Dataset[Any]):
    """Map-style, read record by record."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        x, y, _ = self.data[index]
        return x.float(), y.float()


def fitted(data: TensorDataset, users: Tensor) -> dict[str, Any]:
    """`fit` under add_remove with names of users, where a rank may have no record to show."""
    torch.manual_seed(3)
    model = nn.Linear(DIM, 1)
    budget = dp.Budget(2.0, 1e-3, adjacency="add_remove", unit="user")
    plan = dp.UserClippedSGD.plan(
        n=20, clip=CLIP, lr=0.1, budget=budget, batch_size=5, steps=4, sampling="poisson"
    )
    optimizer = dp.UserClippedSGD(model.parameters(), plan)
    names = [f"user {i}" for i in users.tolist()]
    dp.fit(
        model, optimizer, Rows(data), dp.losses.Logistic(), users=names, shard=12, progress=False
    )
    facts = {"steps": optimizer.steps, "ledger": optimizer.accountant.ledger.digest()}
    return facts | {"answer": numbers(model)}


# -- as one process ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of three ranks, the first one without users."""
    return launch(everything, 3, tmp_path_factory.mktemp("together"))


class Summed(World):
    """One process that sums the parts of all ranks: its own one, and those of others by copies of the model."""

    alone = False

    def __init__(
        self, model: nn.Module, others: list[list[tuple[list[int], list[int]]]]
    ) -> None:
        self.model, self.others, self.step = model, others, 0

    def release(self, oracle: Any, noise: Any) -> Release:
        copies = [copy.deepcopy(oracle) for _ in self.others]
        summed = oracle.summed()
        total = torch.zeros(summed._dim, dtype=torch.float64)
        users = summed.write_sum(total)
        for apart, part in zip(copies, self.others, strict=True):
            self.observe(apart, part[self.step][1])
            own = torch.zeros_like(total)
            users += apart.summed().write_sum(own)
            total += own
        self.step += 1
        return released_by_one(summed, total, users, noise, 1 + len(self.others))

    def observe(self, oracle: Any, positions: list[int]) -> None:
        """Takes the rows of a part at the same parameters."""
        model = dp.attach(nn.Linear(DIM, 1, dtype=torch.float64), loss_reduction="sum")
        model.load_state_dict(self.model.state_dict())
        oracle.open([p.detach() for p in model.parameters()])
        if positions:
            x, y, _ = (tensor[positions] for tensor in records().tensors)
            with torch.enable_grad():
                nn.functional.mse_loss(model(x), y, reduction="sum").backward()
            oracle.observe(GradBatch.consume(list(model.parameters())), OWNER[positions])


def summed(kind: str, parts: list[list[tuple[list[int], list[int]]]]) -> Tensor:
    """Returns the path of one process on the parts that ranks have drawn."""
    model = summed_layer()
    optimizer = repeatable(kind, model)
    optimizer.oracle.clipping.share(len(parts))
    loader = optimizer.loader(records(), OWNER, isolation="none")
    sampler = loader.batch_sampler
    draws = sampler.draws

    def recorded() -> Iterator[tuple[Draw, np.ndarray]]:
        for (draw, _), (users, _) in zip(draws(), parts[0], strict=True):
            yield (
                Draw(len(users), draw.partition, draw.part, draw.index),
                np.array(users, dtype=np.int64),
            )

    sampler.draws = recorded
    optimizer._world = Summed(model, parts[1:])
    return train(model, optimizer, loader)["path"]


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("kind", KINDS)
def test_shards_of_users_release_bit_for_bit_what_one_process_releases_that_sums_the_same_parts(
    kind: str, together: list[dict[str, Any]]
) -> None:
    ranks = [rank[kind] for rank in together]
    path = summed(kind, [rank["drawn"] for rank in ranks])
    for rank in ranks:
        assert torch.equal(rank["path"], path)
        assert torch.equal(rank["answer"], ranks[0]["answer"])
        assert (rank["ledger"], rank["charged"]) == (ranks[0]["ledger"], 4)
        assert f"{len(ranks)} processes that trust each other" in rank["said"]
        assert "all records of a user on one, whatever their values" in rank["said"]


def test_users_are_drawn_with_all_their_records_where_they_are(
    together: list[dict[str, Any]],
) -> None:
    world = len(together)
    for rank, found in enumerate(together):
        mine = set(share(rank, world).tolist())
        for kind in KINDS:
            for users, positions in found[kind]["drawn"]:
                assert set(users) <= mine
                assert (
                    sorted(positions)
                    == torch.isin(OWNER, torch.tensor(users)).nonzero()[:, 0].tolist()
                )
            if kind != "poisson":
                assert {user for users, _ in found[kind]["drawn"] for user in users} == mine
    assert together[0]["poisson"]["drawn"] == [([], [])] * 4


def test_the_union_of_the_draws_of_users_is_a_poisson_draw(
    together: list[dict[str, Any]],
) -> None:
    """Tests of size 1e-6: how often each user is drawn, and how often pairs of users of two ranks are together."""

    def check(mine: Callable[[np.ndarray], np.ndarray]) -> None:
        drawn = np.zeros((400, USERS), dtype=np.int64)
        for rank in together:
            for k, users in enumerate(rank["law"]):
                assert len(set(users)) == len(users)
                drawn[k, users] += 1
        drawn = mine(drawn)
        law = stats.binom(len(drawn), 0.25)
        assert law.ppf(FALSE_ALARM / 4 / USERS) <= drawn.sum(axis=0).min()
        assert drawn.sum(axis=0).max() <= law.isf(FALSE_ALARM / 4 / USERS)
        first, second = share(1, 3), share(2, 3)[:5]
        pairs = (drawn[:, first] & drawn[:, second]).sum()
        law = stats.binom(len(drawn) * 5, 1 / 16)
        assert law.ppf(FALSE_ALARM / 4) <= pairs <= law.isf(FALSE_ALARM / 4)

    def alike(drawn: np.ndarray) -> np.ndarray:
        """Draws of which those of one rank are copies of the other's."""
        drawn[:, share(2, 3)[:5]] = drawn[:, share(1, 3)]
        return drawn

    check(lambda drawn: drawn)
    with pytest.raises(AssertionError):
        check(alike)


def test_fit_trains_on_shards_of_users_of_which_one_is_empty(
    together: list[dict[str, Any]],
) -> None:
    ranks = [rank["fit"] for rank in together]
    for rank in ranks:
        assert rank["steps"] == 4
        assert rank["ledger"] == ranks[0]["ledger"]
        assert torch.equal(rank["answer"], ranks[0]["answer"])


def test_the_block_of_the_page_makes_one_run_of_users(together: list[dict[str, Any]]) -> None:
    for rank in together:
        assert rank["page"]["steps"] == 4
        assert torch.equal(rank["page"]["answer"], together[0]["page"]["answer"])


# -- rounding ----------------------------------------------------------------------------------------------------------


def test_the_rounding_of_a_sum_of_users_over_processes_stays_within_the_declared_error(
    in_torch: None,
) -> None:
    """float32 only where the users of both processes have room for it; each has two equal rows."""
    batch_size, dim, processes = 64, 4096, 2
    query, declared = [torch.zeros(dim)], Clipped(1.0, 0.0, batch_size)
    declared.open(query)
    room = declared._summation.rows
    assert declared._summation.vector_tile  # float32 is planned
    for count, float32 in ((room // processes, True), (room // processes + 1, False)):
        total, expected = torch.zeros(2, dim, dtype=torch.float64)
        for seed in range(processes):
            means = torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))
            users = UserClipped(Clipped(1.0, 0.0, batch_size), n_users=count)
            users.clipping.share(processes)
            users.open(query)
            users.observe(
                GradBatch([DenseBlock(torch.cat([means, means]))]), torch.arange(count).repeat(2)
            )
            exact = Clipped(1.0, 0.0, batch_size)
            exact.share(1020)  # which leaves no room for float32
            exact.open(query)
            exact.observe(GradBatch([DenseBlock(means)]))
            for oracle, out in ((users.summed(), total), (exact, expected)):
                part = torch.zeros(dim, dtype=torch.float64)
                assert oracle.write_sum(part) == count  # users, not rows
                out += part
        gap = float((total - expected).norm()) * batch_size
        assert gap <= declared._summation.error / 2
        assert (gap > 1e-9) == float32


# -- in one process ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("unit", "processes", "said"), [("user", 2, True), ("user", 1, False), ("example", 2, False)]
)
def test_users_need_a_shard_in_several_processes(
    unit: str, processes: int, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "world_size", lambda: processes)
    problem = checks.problem_of_shard(None, 5, "replace_one", unit)
    assert problem.startswith("shard must be given with users in a run of several") is said


def test_one_process_takes_its_shard_of_users_for_all_there_are() -> None:
    """Users of the universe without records included."""
    there = OWNER != 3
    data, users = TensorDataset(*(tensor[there] for tensor in records().tensors)), OWNER[there]
    paths = []
    for options in ({}, {"shard": USERS}):
        model = summed_layer()
        optimizer = repeatable("full", model)
        loader = optimizer.loader(data, users, isolation="none", **options)
        assert loader.batch_sampler.size == USERS
        paths.append(train(model, optimizer, loader)["path"])
    assert torch.equal(*paths)
    with pytest.raises(UnitError, match="shard must be how many users this process has at most"):
        built("full", layer()).loader(records(), OWNER, shard=USERS - 1)


@pytest.mark.parametrize("design", [dp.Poisson(4, USERS), dp.Full(USERS)])
def test_the_blocks_of_a_rank_have_room_for_a_draw_of_the_users_it_declares(design: Any) -> None:
    optimizer = built("poisson" if isinstance(design, dp.Poisson) else "full", layer())
    own = RankSampler(design, rank=1, processes=4, key=bytes(32), own=True)
    for most in (USERS, 5):
        assert slots_of(optimizer, own, records=most).capacity == capacity(design, records=most)


def test_a_loader_of_users_numbers_those_of_a_shard_only() -> None:
    """Their ids stay as they are; a sampler of all users takes ids for positions."""
    data = TensorDataset(torch.arange(4.0))
    ids = torch.tensor([7, 3, 7, 11])
    sampler = RankSampler(
        dp.Full(12), rank=0, processes=2, key=bytes(32), size=3, steps=1, own=True
    )
    ((x, users),) = UserLoader(data, sampler, ids)
    assert (x.tolist(), users.tolist()) == ([1.0, 0.0, 2.0, 3.0], [3, 7, 7, 11])
    with pytest.raises(UnitError, match="users must be < n=3"):
        UserLoader(data, PoissonSampler(dp.Poisson(2, 3)), ids)
