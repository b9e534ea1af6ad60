"""Users on several processes: how far one moves the sum, what is refused or fails on all ranks, and what goes on."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from tests.distributed.user_shards import (
    CLIP,
    OWNER,
    USERS,
    backward,
    built,
    patched,
    rows,
    shard_of,
    share,
    summed_layer,
    train,
)
from tests.processes import N, launch, layer, message, numbers, records
from torch_dpsco.accounting.events import ADD_REMOVE, REPLACE_ONE
from torch_dpsco.algorithms.oracles import UserMean
from torch_dpsco.errors import PrivacyError, SequenceError, UtilityWarning
from torch_dpsco.rows import GradBatch
from torch_dpsco.sampling import RankSampler, UserLoader
from torch_dpsco.step import distributed
from torch_dpsco.step.oracle import Clipped, ClippedMean

FALSE_ALARM = 1e-6


# -- what the ranks do -------------------------------------------------------------------------------------------------


def failures(rank: int) -> dict[str, Any]:
    return {
        "moved": moved(rank),
        "refused": refusals(rank),
        "told": [told(rank, more) for more in (0, 3)],
        "missing": missing_rows(rank),
        "charge": failed_charge(rank, "authorize"),
        "clip": failed_charge(rank, "summed"),
        "moved on": moved_on(rank),
        "noise": [noise_alone(rank, mutated) for mutated in (False, True)],
    }


def mean_of(data: TensorDataset, users: Any, adjacency: str, shard: int = USERS) -> Tensor:
    """Returns the released mean of one step on all users, without noise."""
    model = layer()
    optimizer = built("full", model, noise=0.0, adjacency=adjacency)
    for x, y, _, ids in optimizer.loader(data, users, shard=shard, steps=1):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step(users=ids)
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def moved(rank: int) -> dict[str, float]:
    """How far a user of many long rows moves the mean of all ranks, over the declared bound of its relation."""
    mine, users = shard_of(rank)
    few = users < USERS - 1
    own = (
        TensorDataset(*(tensor[few] for tensor in mine.tensors)),
        users[few],
    )  # the last user is not there
    bounds = {relation: sensitivity(relation) for relation in (ADD_REMOVE, REPLACE_ONE)}

    def with_user(value: float, *places: int) -> tuple[TensorDataset, Tensor]:
        return rows(own, USERS - 1, 5, value) if rank in places else own

    def share_of(
        one: tuple[TensorDataset, Tensor], other: tuple[TensorDataset, Tensor], relation: str
    ) -> float:
        gap = mean_of(*one, relation) - mean_of(*other, relation)
        return float(gap.norm()) / bounds[relation]

    found = {f"added to {k}": share_of(own, with_user(9.0, k), ADD_REMOVE) for k in (0, 1)}
    found["replaced"] = share_of(with_user(9.0, 1), with_user(-9.0, 1), REPLACE_ONE)
    found["replaced elsewhere"] = share_of(with_user(9.0, 0), with_user(-9.0, 1), REPLACE_ONE)
    for name, mutate in MUTATIONS.items():
        undo = mutate()
        found[name] = share_of(
            own, with_user(9.0, *((0, 1) if name == "on two ranks" else (1,))), ADD_REMOVE
        )
        undo()
    return found


def sensitivity(adjacency: str) -> float:
    oracle = Clipped(CLIP, 0.0, USERS)
    oracle.open([p.detach() for p in layer().parameters()])
    return oracle.sensitivity(adjacency)


def rows_for_users() -> Callable[[], None]:
    """Clips each record, as if it were a user's mean."""
    add = UserMean.observe

    def each(self: UserMean, rows: GradBatch, users: Tensor) -> None:
        self.__dict__["n_users"] = 10 * N
        UserMean.discard(self)
        add(self, rows, torch.arange(len(users)))

    return patched(UserMean, "observe", each)


MUTATIONS: dict[str, Callable[[], Callable[[], None]]] = {
    "on two ranks": lambda: patched(distributed.Ranks, "_require_own_ids", lambda *args: None),
    "unclipped": lambda: patched(
        ClippedMean, "weights", lambda self, norms, clip: torch.ones_like(norms)
    ),
    "by record": rows_for_users,
}


def noise_alone(rank: int, mutated: bool) -> Tensor:
    """Returns a released mean of 20,000 coordinates over rows of zeros; `mutated`: every rank adds noise to its sum."""
    if mutated and rank:
        write_sum = Clipped.write_sum

        def noisy(self: Clipped, out: Tensor) -> int:
            out += self.noise_std * torch.randn(
                out.shape, generator=torch.Generator().manual_seed(rank)
            )
            return write_sum(self, out)

        Clipped.write_sum = noisy
    x = torch.zeros(4, 20_000)
    model = layer(inputs=20_000, dtype=torch.float32)
    model.bias.requires_grad_(False)
    plan = dp.UserClippedSGD.plan(
        n=4, clip=CLIP, lr=0.1, noise_multiplier=2.0, sampling="full", steps=1
    )
    optimizer = dp.UserClippedSGD(model.parameters(), plan)
    optimizer._noise = torch.Generator().manual_seed(100 + rank)
    for features, target, ids in optimizer.loader(
        TensorDataset(x, x[:, :1]), torch.arange(4) // 2 + 2 * rank, shard=4
    ):
        nn.functional.mse_loss(model(features), target).backward()
        optimizer.step(users=ids)
    return model.weight.grad[0].double() / optimizer.oracle.clipping.noise_std


def refusals(rank: int) -> dict[str, str]:
    data, users = shard_of(rank)
    names = [f"user {i}" for i in users.tolist()]
    twice = ["user 0" if name == "user 11" else name for name in names]
    params = list(layer().parameters())

    def own_sampler() -> None:
        sampler = RankSampler(dp.Poisson(4, USERS), rank=rank, processes=2, key=bytes(32))
        built("poisson", layer()).bind(UserLoader(records(), sampler, OWNER))

    def loader(users: Any, kind: str = "poisson", **options: Any) -> Callable[[], Any]:
        plan = {name: options.pop(name) for name in ("adjacency", "n") if name in options}
        return lambda: built(kind, layer(), **plan).loader(
            data, users, **{"shard": USERS} | options
        )

    def planned(kind: Any, **options: Any) -> Callable[[], Any]:
        budget = dp.Budget(8.0, 1e-5, unit="user")
        return lambda: kind(params, kind.plan(budget=budget, **{"n": 500} | options))

    near: dict[str, Any] = {
        "pair_radius": 0.5,
        "problem": dp.Problem(lipschitz=1.0, radius=1.0),
        "dim": 6,
    }
    near |= {"n": 5000, "reg": 0.1, "phases": 1, "max_steps": 2}
    refused: dict[str, Callable[[], Any]] = {
        "names on two": loader(twice),
        "numbers on two": loader(users.clamp(max=9), "full", adjacency="add_remove"),
        "too many": loader(names, n=12),
        "too many under add_remove": loader(names, n=12, adjacency="add_remove"),
        "out of range": loader(users + 1 - rank),
        "no shard": loader(users, shard=None),
        "bound": loader(users, shard=8),
        "kind": loader([(i,) for i in users.tolist()]),
        "sampler": own_sampler,
        "votes": planned(dp.UserClippedSGD),
        "filtered": planned(dp.UserFilteredSGD, pair_radius=0.5, lr=1.0, steps=2),
        "localized": planned(dp.LocalizedUserSGD, **near),
        "allocated": lambda: built("poisson", layer(), sampling="allocated"),
        "fixed": lambda: built("poisson", layer(), sampling="fixed"),
        "one pass": lambda: built("poisson", layer(), sampling="shuffled"),
        "default of one pass": lambda: built("poisson", layer(), sampling=None),
    }
    return {name: message((PrivacyError, ValueError), call) for name, call in refused.items()}


def told(rank: int, more: int) -> list[list[int]]:
    """What this rank hears and says when a loader is made under add_remove; `more`: records of a user of rank 1."""
    heard: list[list[int]] = []
    gather, send = distributed.Group.gather, distributed.Group.send

    def gathered(group: distributed.Group, said: Tensor) -> list[Tensor]:
        table = gather(group, said)
        heard.extend(row.tolist() for row in table)
        return table

    def sent(group: distributed.Group, said: Tensor) -> None:
        send(group, said)
        heard.append(said.tolist())

    undo = [
        patched(distributed.Group, "gather", gathered),
        patched(distributed.Group, "send", sent),
    ]
    undo.append(patched(distributed, "sampling_key", lambda: bytes(32)))
    data, users = rows(shard_of(rank), int(share(rank, 2)[0]), more * rank, 1.0)
    built("poisson", layer(), adjacency="add_remove").loader(data, users, shard=USERS)
    for call in undo:
        call()
    return heard


def missing_rows(rank: int) -> dict[str, Any]:
    """Rank 1 forgets a backward; all give that draw up, and it comes again."""
    model = summed_layer()
    optimizer = built("full", model)
    loader = optimizer.loader(*shard_of(rank), shard=USERS, steps=2, isolation="none")
    x, y, _, ids = next(iter(loader))
    if rank == 0:
        backward(model, optimizer, x, y)
    said = message(SequenceError, lambda: optimizer.step(users=ids))
    charged = len(optimizer.accountant)
    for x, y, _, ids in loader:
        backward(model, optimizer, x, y)
        optimizer.step(users=ids)
    return {
        "said": said,
        "charged": [charged, len(optimizer.accountant)],
        "answer": numbers(model),
    }


def failed_charge(rank: int, what: str) -> dict[str, Any]:
    """Rank 1 cannot charge, or cannot clip after the charge: no sum is released."""
    model = summed_layer()
    optimizer = built("full", model)
    before = numbers(model)
    if rank:

        def refuse(*args: Any, **options: Any) -> None:
            raise PrivacyError("no disk")

        setattr(optimizer.accountant if what == "authorize" else optimizer.oracle, what, refuse)
    x, y, _, ids = next(iter(optimizer.loader(*shard_of(rank), shard=USERS, isolation="none")))
    backward(model, optimizer, x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UtilityWarning)  # of a step that is lost
        said = message(PrivacyError, lambda: optimizer.step(users=ids))
    return {
        "said": said,
        "stands": torch.equal(before, numbers(model)),
        "sums": optimizer.oracle.clipping._means,
    }


def moved_on(rank: int) -> dict[str, Any]:
    """A checkpoint of rank 0 goes on on all ranks, whose users are on other ranks now; then copies of them."""
    model = summed_layer()
    optimizer = built("full", model)
    train(model, optimizer, optimizer.loader(*shard_of(rank), shard=USERS, steps=2))
    states = [(model.state_dict(), optimizer.state_dict())]
    dist.broadcast_object_list(states, src=0)
    other = summed_layer(seed=7)
    second = built("full", other)
    other.load_state_dict(states[0][0])
    second.load_state_dict(states[0][1])
    train(other, second, second.loader(*shard_of(1 - rank), shard=USERS, steps=1))
    other, second = copy.deepcopy((other, second))
    train(other, second, second.loader(*shard_of(rank), shard=USERS, steps=1))
    second.finalize()
    return {"charged": len(second.accountant), "answer": numbers(other)}


# -- sensitivity and noise ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch(failures, 2, tmp_path_factory.mktemp("failures"))


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("name", ["added to 0", "added to 1", "replaced", "replaced elsewhere"])
def test_a_user_moves_the_mean_of_all_ranks_by_at_most_the_declared_bound(
    name: str, failed: list[dict[str, Any]]
) -> None:
    """And as far as that: the user's mean is longer than the clip."""
    for rank in failed:
        assert 0.99 < rank["moved"][name] <= 1.0


@pytest.mark.parametrize("name", sorted(MUTATIONS))
def test_users_who_are_clipped_in_another_way_or_on_two_ranks_move_it_further(
    name: str, failed: list[dict[str, Any]]
) -> None:
    for rank in failed:
        assert rank["moved"][name] > 1.5


def test_the_noise_on_users_is_that_of_one_rank(failed: list[dict[str, Any]]) -> None:
    """A chi-square test of size 1e-6 on the sum of squares, which noise of every rank does not pass."""
    law = stats.chi2(20_000)
    assert torch.equal(*(rank["noise"][0] for rank in failed))
    for rank in failed:
        once, mutated = (float(noise.square().sum()) for noise in rank["noise"])
        assert law.ppf(FALSE_ALARM / 2) < once < law.isf(FALSE_ALARM / 2)
        assert mutated > law.isf(FALSE_ALARM / 2)


# -- what is refused, and what goes on ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["names on two", "numbers on two"])
def test_a_user_of_two_ranks_is_refused(name: str, failed: list[dict[str, Any]]) -> None:
    for rank in failed:
        assert (
            "UnitError: users must be on one rank each, with all of their records"
            in rank["refused"][name]
        )


def test_users_without_a_shard_are_refused_on_all_ranks(failed: list[dict[str, Any]]) -> None:
    for rank in failed:
        assert (
            "shard must be given with users in a run of several" in rank["refused"]["no shard"]
        )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("too many", "UnitError: users of all ranks must be at most n=12"),
        (
            "too many under add_remove",
            "UnitError: users of all ranks must be at most n=12",
        ),
        (
            "kind",
            "UnitError: record_ids must be integers, strings or bytes, one id each (got a tuple)",
        ),
        ("sampler", "UnknownSamplerError: loader must draw this rank's positions"),
        ("votes", "(got AdaptiveClipped): run it in one process, as users who vote on clips"),
        (
            "filtered",
            "(got UserFiltered): run it in one process, as users who vote on clips, or are filtered",
        ),
        ("localized", "UnknownSamplerError: design must be Poisson or Full"),
        ("allocated", "UnknownSamplerError: design must be Poisson or Full"),
        ("fixed", "UnknownSamplerError: design must be Poisson or Full"),
        ("one pass", "UnknownSamplerError: design must be Poisson or Full"),
        (
            "default of one pass",
            "give the plan n= and sampling='poisson' or 'full'",
        ),
    ],
)
def test_what_users_of_several_ranks_cannot_share_is_refused(
    name: str, words: str, failed: list[dict[str, Any]]
) -> None:
    for rank in failed:
        assert words in rank["refused"][name]


def test_what_one_rank_refuses_is_given_up_by_the_others(failed: list[dict[str, Any]]) -> None:
    refused = [rank["refused"] for rank in failed]
    assert "rank 1 has given this loader up" in refused[0]["bound"]
    assert (
        "shard must be how many users this process has at most (declared 8"
        in refused[1]["bound"]
    )
    assert "rank 0 has given this loader up" in refused[1]["out of range"]
    assert "users must be < n=16 (got a larger id" in refused[0]["out of range"]


def test_no_rank_tells_how_many_records_a_user_has(failed: list[dict[str, Any]]) -> None:
    for rank in failed:
        assert rank["told"][0] == rank["told"][1]
        assert len(rank["told"][0]) > 4


def test_a_rank_that_fails_before_the_charge_fails_for_all_and_the_draw_comes_again(
    failed: list[dict[str, Any]],
) -> None:
    first, second = (rank["missing"] for rank in failed)
    assert "rank 1 has given this step up" in first["said"]
    assert "SequenceError" in second["said"]
    assert first["charged"] == second["charged"] == [0, 2]
    assert torch.equal(first["answer"], second["answer"])


@pytest.mark.parametrize("what", ["charge", "clip"])
def test_a_rank_that_cannot_charge_or_clip_releases_no_sum_of_users(
    what: str, failed: list[dict[str, Any]]
) -> None:
    first, second = (rank[what] for rank in failed)
    assert "a rank could not charge or release this step" in first["said"]
    assert "no disk" in second["said"]
    for rank in (first, second):
        assert rank["stands"]
        assert rank["sums"] is None


def test_a_run_goes_on_after_users_have_moved_to_other_ranks(
    failed: list[dict[str, Any]],
) -> None:
    first, second = (rank["moved on"] for rank in failed)
    assert first["charged"] == second["charged"] == 4
    assert torch.equal(first["answer"], second["answer"])
