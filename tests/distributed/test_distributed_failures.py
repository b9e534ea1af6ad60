"""Several processes as one run: what fails or is refused on one rank is so on all, and what goes on goes on on all."""

from __future__ import annotations

import copy
import itertools
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.multiprocessing import start_processes
from torch.utils.data import DataLoader, Subset, TensorDataset

import torch_dpsco as dp
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
    run_rank,
    train,
    union,
)
from torch_dpsco import native
from torch_dpsco.accounting.designs import Draw
from torch_dpsco.algorithms.clips import AdaptiveClipped, AutoClip
from torch_dpsco.errors import PrivacyError, SequenceError, UtilityWarning
from torch_dpsco.rules import SGD, TorchRule
from torch_dpsco.step import distributed as agreement
from torch_dpsco.step.oracle import Clipped

# -- what the ranks do ------------------------------------------------------------------------------------------------


def failures(rank: int, folder: str) -> dict[str, Any]:
    checks: tuple[Any, ...] = (
        missing_rows,
        failed_chunk,
        failed_charge,
        failed_release,
        over_budget,
        given_up,
    )
    checks += (other_draw, other_lr, other_call)
    # of steps that failed after their charge, which say so on their rank
    warnings.filterwarnings("ignore", ".*was charged and did not end")
    found = {check.__name__: check(rank) for check in checks}
    found |= {
        "refused": refusals(rank),
        "continued": continued(rank),
        "ledger file": ledger_file(rank, folder),
        "others": others(rank),
    }
    return found


def offered(optimizer: dp.PrivateOptimizer, loader: Any, steps: int, most: int) -> Iterator[Any]:
    """Yields batches until the steps are made, at most so many; after a draw that was given up it starts again."""
    batches = iter(loader)
    for _ in range(most):
        if optimizer.steps == steps:
            return
        try:
            batch = next(batches)
        except SequenceError:
            batches = iter(loader)
            batch = next(batches)
        yield batch


def missing_rows(rank: int) -> dict[str, Any]:
    """Rank 1 forgets one backward; all give that draw up, and go on with it together."""
    model = layer()
    optimizer = full(model, noise=1.0)
    errors = []
    for k, (x, y, _) in enumerate(
        offered(optimizer, optimizer.loader(records(), steps=3), 3, 9)
    ):
        if (rank, k) != (1, 1):
            backward(model, optimizer, x, y)
        try:
            optimizer.step()
        except SequenceError as error:
            errors.append((k, str(error)))
    return {
        "errors": errors,
        "steps": optimizer.steps,
        "charged": len(optimizer.accountant),
        "answer": numbers(model),
    }


def failed_chunk(rank: int) -> dict[str, Any]:
    """Rank 1 fails in the first of several chunks: it says so when the others are done, and all begin again."""
    model = layer()
    optimizer = full(model, noise=1.0)
    errors = []
    loader = optimizer.loader(records(), steps=2, physical_batch_size=9)
    for k, (x, y, _) in enumerate(offered(optimizer, loader, 1, 20)):
        if (rank, k) != (1, 0):
            backward(model, optimizer, x, y)
        try:
            optimizer.step()
        except SequenceError as error:
            errors.append((k, str(error)))
    return {
        "errors": errors,
        "steps": optimizer.steps,
        "charged": len(optimizer.accountant),
        "answer": numbers(model),
    }


def steps_of(model: nn.Module, optimizer: dp.PrivateOptimizer, steps: int) -> list[str]:
    errors = []
    for x, y, _ in offered(optimizer, optimizer.loader(records(), steps=steps), steps, steps):
        backward(model, optimizer, x, y)
        try:
            optimizer.step()
        except PrivacyError as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


def failed_charge(rank: int) -> dict[str, Any]:
    """Rank 1 cannot charge: nobody waits for its sum; the ledgers differ from then on, and no step is made any more."""
    model = layer()
    optimizer = full(model, noise=1.0)
    send, sent = agreement.Group.send, []

    def noted(group: agreement.Group, said: Tensor, of: int = 0) -> None:
        send(group, said, of)
        sent.append(said.clone())

    agreement.Group.send = noted
    if rank == 1:

        def refuse(*args: Any, **options: Any) -> None:
            raise PrivacyError("no disk")

        optimizer.accountant.authorize = refuse
    errors = steps_of(model, optimizer, 2)
    agreement.Group.send = send
    return {"errors": errors, "sent": sent[-2:]}


def failed_release(rank: int) -> list[str]:
    """Rank 0 fails while it makes the noise."""
    model = layer()
    optimizer = full(model, noise=1.0)

    def refuse(part: Tensor, bits: Any) -> None:
        raise SequenceError("no noise")

    optimizer.oracle.noised = (
        refuse  # of the object, as a fault would: the class is the one that was checked
    )
    return steps_of(model, optimizer, 1)


def over_budget(rank: int) -> dict[str, Any]:
    model = layer()
    optimizer = full(model, noise=15.0, accountant=dp.Accountant(dp.Budget(1.0, 1e-3)))
    errors = steps_of(model, optimizer, 50)
    facts = {
        "steps": optimizer.steps,
        "charged": len(optimizer.accountant),
        "kinds": sorted({e[:14] for e in errors}),
    }
    return facts | {"answer": numbers(model), "spent": optimizer.report().epsilon}


def given_up(rank: int) -> list[str]:
    """Rank 1 gives one draw up by itself, which then comes again: the ranks stay together."""
    model = layer()
    optimizer = full(model, noise=1.0)
    loader = optimizer.loader(records(), steps=3)
    if rank == 1:
        next(iter(loader))
        optimizer.discard()
    x, y, _ = next(iter(loader))
    backward(model, optimizer, x, y)
    optimizer.step()
    return [len(optimizer.accountant), *numbers(model).tolist()]


def other_draw(rank: int) -> list[str]:
    """Rank 1 has another draw than rank 0."""
    model = layer()
    optimizer = full(model, noise=1.0)
    loader = optimizer.loader(records(), steps=3)
    draws = loader.batch_sampler.draws
    loader.batch_sampler.draws = lambda: itertools.islice(draws(), rank, None)
    x, y, _ = next(iter(loader))
    backward(model, optimizer, x, y)
    return [message(SequenceError, optimizer.step), str(len(optimizer.accountant))]


def other_lr(rank: int) -> list[str]:
    model = layer()
    optimizer = full(model, noise=1.0)
    optimizer.param_groups[0]["lr"] = 0.1 + 0.1 * rank
    return steps_of(model, optimizer, 1)


def other_call(rank: int) -> list[str]:
    """Rank 1 ends while rank 0 makes a step."""
    model = layer()
    optimizer = full(model, noise=1.0)
    for x, y, _ in optimizer.loader(records(), steps=1):
        backward(model, optimizer, x, y)
        return [message(SequenceError, optimizer.step if rank == 0 else optimizer.finalize)]
    return []


def without_the_accelerator(rank: int) -> None:
    """Makes an optimizer, on rank 1 with other arithmetic."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "arithmetic", lambda: "torch" if rank else "C")
        full(layer())


def refusals(rank: int) -> dict[str, str]:
    """Everything that is refused before a step, one word for each."""
    data, used = records(), dp.Accountant()
    if rank:
        used.record(dp.Poisson(1, 5).draw_event(Clipped(1.0, 1.0, 1).event(), Draw(0)))
    order = torch.randperm(N, generator=torch.Generator().manual_seed(rank))
    shuffled = TensorDataset(*(t[order] for t in data.tensors))

    def own(design: Any, oracle: Any) -> Callable[[], Any]:
        params = list(layer().parameters())
        return lambda: dp.PrivateOptimizer(params, 0.1, oracle=oracle, rule=SGD(), design=design)

    adaptive = AdaptiveClipped(1.0, 1.0, 6, count_noise=5.0)
    all_positions = DataLoader(data, batch_sampler=dp.sampling.PoissonSampler(dp.Poisson(6, N)))
    poisson = holder(layer(), noise=1.0)
    refused = {
        "clip": lambda: own(dp.Full(N), Clipped(1.0 + rank, 1.0, N))(),
        "weights": lambda: full(layer(seed=rank)),
        "ledger": lambda: full(layer(), accountant=used),
        "arithmetic": lambda: without_the_accelerator(rank),
        "order": lambda: full(layer()).loader(shuffled),
        "subset": lambda: full(layer()).loader(Subset(data, order.tolist())),
        "steps": lambda: full(layer()).loader(data, steps=3 + rank),
        "fixed": own(dp.Fixed(6, N), Clipped(1.0, 1.0, 6)),
        "shuffled": own(dp.Shuffled(6, N), Clipped(1.0, 1.0, 6)),
        "one pass": lambda: dp.ClippedSGD(
            layer().parameters(),
            dp.ClippedSGD.plan(
                lr=0.1, clip=1.0, noise_multiplier=1.0, batch_size=8, n=N, sampling="shuffled"
            ),
        ),
        "adaptive": own(dp.Poisson(6, N), adaptive),
        "sampler": lambda: poisson.bind(all_positions),
        "users": lambda: dp.UserClippedSGD(  # who vote on the clip
            layer().parameters(),
            dp.UserClippedSGD.plan(n=500, budget=dp.Budget(8.0, 1e-3, unit="user")),
        ),
        "replicated": lambda: dp.attach(nn.parallel.DistributedDataParallel(nn.Linear(2, 1))),
        "row free": lambda: dp.BoltOnPSGD(
            nn.Linear(DIM, 1).parameters(),
            dp.BoltOnPSGD.plan(
                problem=dp.losses.Logistic().problem(bound_x=2.0, radius=2.0),
                n=N,
                dim=DIM + 1,
                budget=dp.Budget(1.0, 1e-3),
            ),
        ),
    }
    return {name: message((PrivacyError, ValueError), call) for name, call in refused.items()}


def continued(rank: int) -> dict[str, Any]:
    """A checkpoint of rank 0 goes on on all ranks, and so does a copy; Opacus' memory manager splits draws."""
    model = layer()
    optimizer = holder(model, noise=1.0, average="uniform")
    train(model, optimizer, optimizer.loader(records(), steps=3))
    states = [(model.state_dict(), optimizer.state_dict())]
    dist.broadcast_object_list(states, src=0)
    other = layer(seed=7)
    second = holder(other, noise=1.0, average="uniform")
    other.load_state_dict(states[0][0])
    second.load_state_dict(states[0][1])
    train(other, second, second.loader(records(), steps=2))
    other, second = copy.deepcopy((other, second))
    loader = second.loader(records(), steps=4)
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=2, optimizer=second
    ) as batches:
        found = train(other, second, batches)
    second.finalize()
    ledger = second.accountant.ledger.digest()
    return {
        "steps": second.steps,
        "charged": len(second.accountant),
        "answer": numbers(other),
        "ledger": ledger,
    } | found


def others(rank: int) -> dict[str, Any]:
    """Other optimizers, rules and oracles; a schedule of step sizes; chunks; the printed statement."""
    answers, said = [], ""
    for kind in ("proximal", "adam"):
        model = layer()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UtilityWarning)  # no theorem is left
            if kind == "proximal":
                plan = dp.ClippedSGD.plan(
                    lr=0.1, clip=0.5, noise_multiplier=1.0, sampling=dp.Poisson(6, N)
                )
                optimizer = dp.ClippedSGD(model.parameters(), plan, prox=dp.prox.L1(0.01))
            else:
                inner = torch.optim.Adam(model.parameters(), lr=0.1)
                optimizer = dp.PrivateOptimizer(
                    inner.param_groups,
                    0.1,
                    oracle=AutoClip(0.5, 1.0, 6),
                    rule=TorchRule(inner),
                    design=dp.Poisson(6, N),
                )
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
            for _ in range(2):
                train(
                    model,
                    optimizer,
                    optimizer.loader(records(), steps=3).in_parts(2),
                )
                schedule.step()
        optimizer.finalize()
        said = str(optimizer.report(1e-3))
        answers.append(numbers(model))
    return {"answer": torch.cat(answers), "steps": optimizer.steps, "said": said}


def ledger_file(rank: int, folder: str) -> dict[str, Any]:
    """Rank 0 alone keeps a ledger file; a later run takes its charges over on all ranks."""
    charged = []
    for _ in range(2):
        accountant = dp.Accountant(ledger_path=f"{folder}/ledger" if rank == 0 else None)
        model = layer()
        optimizer = full(model, noise=1.0, accountant=accountant)
        train(model, optimizer, optimizer.loader(records(), steps=2))
        optimizer.finalize()
        charged.append(len(accountant))
        accountant.close()
    own = dp.Accountant(ledger_path=f"{folder}/ledger{rank}")
    return {
        "charged": charged,
        "everywhere": message(SequenceError, lambda: full(layer(), accountant=own)),
    }


def dying(rank: int) -> str:
    """Rank 2 ends in the middle of a run, without a word."""
    model = layer()
    optimizer = full(model, noise=1.0)
    for k, (x, y, _) in enumerate(optimizer.loader(records(), steps=2)):
        if (rank, k) == (2, 1):
            os._exit(0)
        backward(model, optimizer, x, y)
        if k == 0:
            optimizer.step()
    return (
        message(SequenceError, optimizer.step)
        + f" {len(optimizer.accountant)} {optimizer.steps}"
    )


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("failures")
    return launch(failures, 2, folder, str(folder))


def assert_equal_on_ranks(ranks: Sequence[dict[str, Any]], *names: str) -> None:
    for rank in ranks[1:]:
        assert torch.equal(rank["answer"], ranks[0]["answer"])
        assert [rank[name] for name in names] == [ranks[0][name] for name in names]


@pytest.mark.weekly
def test_a_rank_without_rows_makes_all_raise_and_all_go_on_together(
    failed: list[dict[str, Any]],
) -> None:
    ranks = [rank["missing_rows"] for rank in failed]
    assert_equal_on_ranks(ranks, "steps", "charged")
    assert (ranks[0]["steps"], ranks[0]["charged"]) == (3, 3)
    ((k, other),), ((k_own, own),) = ranks[0]["errors"], ranks[1]["errors"]
    assert k == k_own == 1
    assert "rank 1 has given this step up" in other
    assert "per-sample gradients are missing" in own


def test_a_rank_that_fails_in_a_chunk_is_waited_for_and_all_begin_the_draw_again(
    failed: list[dict[str, Any]],
) -> None:
    ranks = [rank["failed_chunk"] for rank in failed]
    assert_equal_on_ranks(ranks, "steps", "charged")
    assert (ranks[0]["steps"], ranks[0]["charged"]) == (1, 1)
    ((k, other),), ((k_own, own),) = ranks[0]["errors"], ranks[1]["errors"]
    assert (k, k_own) == (3, 0)  # of 4 chunks of 32 records
    assert "rank 1 has given this step up" in other
    assert "per-sample gradients are missing" in own


def test_a_rank_that_cannot_charge_makes_all_raise_and_ends_the_run(
    failed: list[dict[str, Any]],
) -> None:
    first, second = (rank["failed_charge"]["errors"] for rank in failed)
    assert second[0] == "PrivacyError: no disk"
    assert "a rank could not charge or release this step" in first[0]
    for errors in (first, second):
        assert "steps must be equal on all ranks (rank 1 differs from 0)" in errors[1]


def test_a_rank_that_cannot_charge_is_sent_no_sum(failed: list[dict[str, Any]]) -> None:
    for rank in failed:
        key, answer = rank["failed_charge"]["sent"]
        assert key.tolist() == [0] * 32  # that was not drawn
        assert len(answer) == 2 + DIM + 1
        assert answer.isnan().all()  # that was not given


def test_a_rank_that_cannot_make_noise_makes_all_raise(failed: list[dict[str, Any]]) -> None:
    assert failed[0]["failed_release"] == ["SequenceError: no noise"]
    assert "a rank could not charge or release this step" in failed[1]["failed_release"][0]


def test_a_budget_ends_all_ranks_at_the_same_step(failed: list[dict[str, Any]]) -> None:
    ranks = [rank["over_budget"] for rank in failed]
    assert_equal_on_ranks(ranks, "steps", "charged", "spent")
    assert 0 < ranks[0]["steps"] == ranks[0]["charged"] < 50
    assert ranks[0]["spent"] <= 1.0
    assert all(rank["kinds"] == ["BudgetExceeded"] for rank in ranks)


def test_a_rank_that_gives_a_draw_up_gets_the_same_one_again(
    failed: list[dict[str, Any]],
) -> None:
    first, second = (rank["given_up"] for rank in failed)
    assert first == second
    assert first[0] == 1


def test_ranks_at_different_steps_are_refused(failed: list[dict[str, Any]]) -> None:
    for rank in failed:
        text, charged = rank["other_draw"]
        assert "draw must be equal on all ranks (rank 1 differs from 0)" in text
        assert charged == "0"
        assert "mechanism must be equal on all ranks" in rank["other_lr"][0]
    assert "rank 1 is in a finalize, rank 0 in a step" in failed[0]["other_call"][0]
    assert "rank 0 is in a step, rank 1 in a finalize" in failed[1]["other_call"][0]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("clip", "SequenceError: settings must be equal on all ranks"),
        ("weights", "SequenceError: parameters must be equal on all ranks"),
        ("ledger", "SequenceError: ledger must be equal on all ranks"),
        ("arithmetic", "SequenceError: arithmetic must be equal on all ranks"),
        ("steps", "SequenceError: steps must be equal on all ranks"),
        ("fixed", "UnknownSamplerError: design must be Poisson or Full"),
        ("shuffled", "UnknownSamplerError: design must be Poisson or Full"),
        ("one pass", "UnknownSamplerError: design must be Poisson or Full"),
        ("replicated", "ValueError: model must not be replicated"),
        ("row free", "SequenceError: world_size must be 1 for this optimizer"),
    ],
)
def test_what_ranks_cannot_share_is_refused_on_all(
    name: str, words: str, failed: list[dict[str, Any]]
) -> None:
    for rank in failed:
        assert words in rank["refused"][name]


@pytest.mark.parametrize("name", ["order", "subset"])
def test_ranks_with_records_in_another_order_are_refused(
    name: str, failed: list[dict[str, Any]]
) -> None:
    for rank in failed:
        assert "data must be equal on all ranks" in rank["refused"][name]


def test_a_sampler_of_all_positions_is_refused(failed: list[dict[str, Any]]) -> None:
    for rank in failed:
        assert "loader must draw this rank's positions" in rank["refused"]["sampler"]


@pytest.mark.parametrize("name", ["adaptive", "users"])
def test_oracles_that_do_more_than_add_rows_are_refused(
    name: str, failed: list[dict[str, Any]]
) -> None:
    for rank in failed:
        assert "oracle must be Clipped, HolderClipped or AutoClip" in rank["refused"][name]


def test_checkpoints_copies_and_the_memory_manager_go_on_on_all_ranks(
    failed: list[dict[str, Any]],
) -> None:
    ranks = [rank["continued"] for rank in failed]
    assert_equal_on_ranks(ranks, "steps", "charged", "ledger")
    assert (ranks[0]["steps"], ranks[0]["charged"]) == (9, 9)
    assert torch.equal(ranks[0]["path"], ranks[1]["path"])
    assert [len(draw) for draw in union(ranks)] != [0] * 4


def test_other_optimizers_rules_and_chunks_stay_equal_on_all_ranks(
    failed: list[dict[str, Any]],
) -> None:
    ranks = [rank["others"] for rank in failed]
    assert_equal_on_ranks(ranks, "steps", "said")
    assert ranks[0]["steps"] == 6
    assert (
        "2 processes that trust each other read the same records in the same order"
        in ranks[0]["said"]
    )


def test_one_rank_keeps_the_ledger_file_and_the_others_take_it_over(
    failed: list[dict[str, Any]],
) -> None:
    for rank in failed:
        assert rank["ledger file"]["charged"] == [2, 4]
    assert "rank 1 has given this construction up" in failed[0]["ledger file"]["everywhere"]
    assert "ledger_path must be given on rank 0 only" in failed[1]["ledger file"]["everywhere"]


@pytest.mark.slow
def test_a_rank_that_dies_makes_the_others_raise(tmp_path: Path) -> None:
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
