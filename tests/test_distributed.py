"""Several processes as one run: Poisson batches drawn in parts, sums added once, noise drawn once, failures shared.

The ranks are gloo processes on this machine, forked from a server that has imported the package; each launch makes
many checks, whose results come back as tensors and words. A launch that hangs fails.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import itertools
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from opacus.utils.batch_memory_manager import BatchMemoryManager
from scipy import stats
from torch import Tensor, nn
from torch.multiprocessing import start_processes
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Subset, TensorDataset

import torch_dpsco as dp
from tests.streams import gaussians, seeded
from torch_dpsco import agreement, distributed
from torch_dpsco.accounting.designs import Draw
from torch_dpsco.gradbatch import DenseBlock, GradBatch
from torch_dpsco.oracles import AdaptiveClipped, AutoClip, Clipped
from torch_dpsco.rules import SGD, TorchRule
from torch_dpsco.sampling import RankSampler
from torch_dpsco.sampling import distributed as parts

EXAMPLES = Path(__file__).parents[1] / "examples"
SECONDS = 60  # for a launch; a hang must fail
FALSE_ALARM = 1e-6  # of each statistical check, whose seeds are fixed besides
N, DIM = 64, 5


# -- launching --------------------------------------------------------------------------------------------------------


def _rank(rank: int, work: Callable[..., Any], world: int, folder: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    dist.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=SECONDS / 3)
    )
    torch.save(work(rank, *args), f"{folder}/{rank}")
    dist.destroy_process_group()


def launch(work: Callable[..., Any], world: int, folder: Path, *args: Any) -> list[Any]:
    """Returns what `work(rank, *args)` returns on each rank."""
    set_forkserver_preload(["torch_dpsco", "pytest", "scipy.stats"])
    running = start_processes(
        _rank, (work, world, str(folder), args), nprocs=world, join=False, start_method="forkserver"
    )
    end = time.monotonic() + SECONDS
    while not running.join(timeout=1.0):
        if time.monotonic() > end:
            for process in running.processes:
                process.kill()
            pytest.fail(f"{work.__name__} hangs")
    return [torch.load(folder / str(rank)) for rank in range(world)]


def message(kind: type[BaseException], call: Callable[[], Any]) -> str:
    """Returns what an error of that kind says; any other outcome fails the launch."""
    try:
        call()
    except kind as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"no {kind.__name__} was raised")


# -- a run ------------------------------------------------------------------------------------------------------------


def records(n: int = N) -> TensorDataset:
    """(features, target, position), in float64, so that sums in another order agree to 1e-12."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(n, DIM, dtype=torch.float64, generator=generator)
    y = (torch.rand(n, 1, generator=generator) < 0.5).double()
    return TensorDataset(x, y, torch.arange(n))


def layer(seed: int = 0, *, inputs: int = DIM, dtype: torch.dtype = torch.float64) -> nn.Linear:
    torch.manual_seed(seed)
    return dp.attach(nn.Linear(inputs, 1, dtype=dtype))


def holder(model: nn.Module, noise: float = 0.0, batch_size: int = 6, n: int = N, **options: Any) -> dp.HolderSGD:
    problem = dp.losses.Squared().problem(bound_x=3.0, bound_y=2.0)  # its clip follows the iterate
    return dp.HolderSGD(
        model.parameters(),
        dp.HolderSGD.plan(lr=0.01, problem=problem, noise_multiplier=noise, batch_size=batch_size, n=n, **options),
    )


def full(model: nn.Module, n: int = N, noise: float = 0.0, **options: Any) -> dp.ClippedSGD:
    return dp.ClippedSGD(
        model.parameters(), 0.1, clip=0.5, noise_multiplier=noise, batch_size=n, design=dp.Full(n), **options
    )


def backward(model: nn.Module, optimizer: dp.PrivateOptimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    if len(x):
        nn.functional.mse_loss(model(x), y).backward()


def numbers(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def train(model: nn.Module, optimizer: dp.PrivateOptimizer, batches: Any) -> dict[str, Any]:
    """Returns the positions of each draw, and the parameters after each step."""
    drawn: list[list[int]] = [[]]
    path = []
    for x, y, position in batches:
        backward(model, optimizer, x, y)
        drawn[-1] += position.tolist()
        before = optimizer.steps
        optimizer.step()
        if optimizer.steps > before:
            drawn.append([])
            path.append(numbers(model))
    return {"drawn": drawn[:-1], "path": torch.stack(path)}


def run_of(kind: str, model: nn.Module, **options: Any) -> dp.PrivateOptimizer:
    return holder(model, average="uniform", **options) if kind == "poisson" else full(model, **options)


def trajectory(kind: str, **options: Any) -> dict[str, Any]:
    """One run without noise; the numpy and torch seeds of the ranks are equal."""
    torch.manual_seed(1), np.random.seed(1)  # noqa: NPY002  (what naive samplers draw by)
    model = layer()
    optimizer = run_of(kind, model)
    result = train(model, optimizer, optimizer.loader(records(), steps=8, **options))
    optimizer.finalize()
    return result | {"answer": numbers(model), "ledger": optimizer.accountant.ledger.digest()}


def empties() -> dict[str, Any]:
    """T13: 64 records in batches of 2, so that most ranks draw nothing in most steps."""
    model = layer()
    optimizer = holder(model, noise=1.0, batch_size=2)
    result = train(model, optimizer, optimizer.loader(records()))
    optimizer.finalize()
    return result | {"steps": optimizer.steps, "charged": len(optimizer.accountant), "answer": numbers(model)}


# -- what the ranks do ------------------------------------------------------------------------------------------------


def same_as_one(rank: int) -> dict[str, Any]:
    found = {kind: trajectory(kind) for kind in ("poisson", "full")}
    found["chunks"] = trajectory("poisson", physical_batch_size=1)
    found["full chunks"] = trajectory("full", physical_batch_size=5 + rank)  # as many chunks as each rank likes
    return found | {"empties": empties(), "fit": fitted(rank), "largest": [largest_tensor(n) for n in (200, 2000)]}


def fitted(rank: int) -> dict[str, Any]:
    """`fit` with a budget, from float32; what each rank writes to its terminal."""
    x, y, _ = records().tensors
    data = TensorDataset(x.float(), y.float())
    torch.manual_seed(3)
    model = nn.Linear(DIM, 1)
    budget = dp.Budget(2.0, 1e-3)
    optimizer = dp.HolderSGD(
        model.parameters(),
        dp.HolderSGD.plan(problem=dp.losses.Logistic().problem(bound_x=3.0), n=N, budget=budget, batch_size=8),
    )
    shown = io.StringIO()
    with contextlib.redirect_stderr(shown):
        dp.fit(model, optimizer, data, dp.losses.Logistic(), physical_batch_size=3)
    spent = optimizer.privacy_spent()
    facts = {"steps": optimizer.steps, "planned": optimizer.schedule.steps, "epsilon": spent.epsilon}
    return facts | {"answer": numbers(model), "shown": shown.getvalue(), "ledger": optimizer.accountant.ledger.digest()}


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
    """Returns a list that grows with each release of the oracle on this rank."""
    release, made = optimizer.oracle.release, [0]
    made.clear()

    def counted(noise: torch.Generator) -> Any:
        made.append(1)
        return release(noise)

    optimizer.oracle.release = counted
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
        warnings.simplefilter("ignore", dp.UtilityWarning)  # of the seed
        optimizer = full(model, 4, noise=2.0, generator=torch.Generator().manual_seed(rank))
    for features, target in optimizer.loader(TensorDataset(x, x[:, :1]), steps=1):
        backward(model, optimizer, features, target)
        optimizer.step()
    return model.weight.grad[0].double() / optimizer.oracle.noise_std


def noise_once(rank: int) -> dict[str, Any]:
    return {"noise": noise_alone(rank, mutated=False), "mutated": noise_alone(rank, mutated=True)}


# -- failures ---------------------------------------------------------------------------------------------------------


def failures(rank: int, folder: str) -> dict[str, Any]:
    checks: tuple[Any, ...] = (missing_rows, failed_chunk, failed_charge, failed_release, over_budget, given_up)
    checks += (other_draw, other_lr, other_call)
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
        except dp.SequenceError:
            batches = iter(loader)
            batch = next(batches)
        yield batch


def missing_rows(rank: int) -> dict[str, Any]:
    """Rank 1 forgets one backward; all give that draw up, and go on with it together."""
    model = layer()
    optimizer = full(model, noise=1.0)
    errors = []
    for k, (x, y, _) in enumerate(offered(optimizer, optimizer.loader(records(), steps=3), 3, 9)):
        if (rank, k) != (1, 1):
            backward(model, optimizer, x, y)
        try:
            optimizer.step()
        except dp.SequenceError as error:
            errors.append((k, str(error)))
    return {"errors": errors, "steps": optimizer.steps, "charged": len(optimizer.accountant), "answer": numbers(model)}


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
        except dp.SequenceError as error:
            errors.append((k, str(error)))
    return {"errors": errors, "steps": optimizer.steps, "charged": len(optimizer.accountant), "answer": numbers(model)}


def steps_of(model: nn.Module, optimizer: dp.PrivateOptimizer, steps: int) -> list[str]:
    errors = []
    for x, y, _ in offered(optimizer, optimizer.loader(records(), steps=steps), steps, steps):
        backward(model, optimizer, x, y)
        try:
            optimizer.step()
        except dp.PrivacyError as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


def failed_charge(rank: int) -> dict[str, Any]:
    """Rank 1 cannot charge: nobody waits for its sum; the ledgers differ from then on, and no step is made any more."""
    model = layer()
    optimizer = full(model, noise=1.0)
    send, sent = agreement.Group.send, []

    def noted(group: agreement.Group, said: Tensor) -> None:
        send(group, said)
        sent.append(said.clone())

    agreement.Group.send = noted
    if rank == 1:

        def refuse(*args: Any, **options: Any) -> None:
            raise dp.PrivacyError("no disk")

        optimizer.accountant.authorize = refuse
    errors = steps_of(model, optimizer, 2)
    agreement.Group.send = send
    return {"errors": errors, "sent": sent[-1]}


def failed_release(rank: int) -> list[str]:
    """Rank 0 fails while it makes the noise."""
    model = layer()
    optimizer = full(model, noise=1.0)

    def refuse(noise: torch.Generator) -> None:
        raise dp.SequenceError("no noise")

    optimizer.oracle.release = refuse  # of the object, as a fault would: the class is the one that was checked
    return steps_of(model, optimizer, 1)


def over_budget(rank: int) -> dict[str, Any]:
    model = layer()
    optimizer = full(model, noise=30.0, accountant=dp.Accountant(dp.Budget(1.0, 1e-3)))
    errors = steps_of(model, optimizer, 50)
    facts = {"steps": optimizer.steps, "charged": len(optimizer.accountant), "kinds": sorted({e[:14] for e in errors})}
    return facts | {"answer": numbers(model), "spent": optimizer.privacy_spent().epsilon}


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
    return [message(dp.SequenceError, optimizer.step), str(len(optimizer.accountant))]


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
        return [message(dp.SequenceError, optimizer.step if rank == 0 else optimizer.finalize)]
    return []


def refusals(rank: int) -> dict[str, str]:
    """Everything that is refused before a step, one word for each."""
    data, used = records(), dp.Accountant()
    if rank:
        used.record(dp.Poisson(1, 5).draw_event(Clipped(1.0, 1.0, 1).event(), Draw(0)))
    order = torch.randperm(N, generator=torch.Generator().manual_seed(rank))
    shuffled = TensorDataset(*(t[order] for t in data.tensors))

    def own(design: Any, oracle: Any, schedule: Any = None) -> Callable[[], Any]:
        params = list(layer().parameters())
        return lambda: dp.PrivateOptimizer(params, 0.1, oracle=oracle, rule=SGD(), design=design, schedule=schedule)

    adaptive = AdaptiveClipped(1.0, 1.0, 6, count_noise=5.0)
    smooth = dp.Schedule((dp.Phase(3, smoothing=0.1),))
    all_positions = DataLoader(data, batch_sampler=dp.PoissonSampler(dp.Poisson(6, N)))
    poisson = holder(layer(), noise=1.0)
    refused = {
        "clip": lambda: own(dp.Full(N), Clipped(1.0 + rank, 1.0, N))(),
        "weights": lambda: full(layer(seed=rank)),
        "ledger": lambda: full(layer(), accountant=used),
        "order": lambda: full(layer()).loader(shuffled),
        "subset": lambda: full(layer()).loader(Subset(data, order.tolist())),
        "steps": lambda: full(layer()).loader(data, steps=3 + rank),
        "fixed": own(dp.Fixed(6, N), Clipped(1.0, 1.0, 6)),
        "shuffled": own(dp.Shuffled(6, N), Clipped(1.0, 1.0, 6)),
        "one pass": lambda: dp.ClippedSGD(layer().parameters(), 0.1, clip=1.0, noise_multiplier=1.0, batch_size=6, n=N),
        "adaptive": own(dp.Poisson(6, N), adaptive),
        "smoothing": own(dp.Poisson(6, N), Clipped(1.0, 1.0, 6), smooth),
        "sampler": lambda: poisson.bind(all_positions),
        "users": lambda: dp.UserClippedSGD(
            layer().parameters(), 0.1, clip=1.0, noise_multiplier=1.0, batch_size=6, n_users=N
        ),
        "replicated": lambda: dp.attach(nn.parallel.DistributedDataParallel(nn.Linear(2, 1))),
        "row free": lambda: dp.BoltOnPSGD.calibrated(
            nn.Linear(DIM, 1).parameters(),
            problem=dp.losses.Logistic().problem(bound_x=2.0, radius=2.0),
            n=N,
            budget=dp.Budget(1.0, 1e-3),
        ),
    }
    return {name: message((dp.PrivacyError, ValueError), call) for name, call in refused.items()}


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
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=2, optimizer=second) as batches:
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
            warnings.simplefilter("ignore", dp.UtilityWarning)  # no theorem is left
            if kind == "proximal":
                oracle, options = Clipped(0.5, 1.0, 6), {"prox": dp.prox.L1(0.01)}
                optimizer = dp.ProximalSGD(model.parameters(), 0.1, oracle=oracle, design=dp.Poisson(6, N), **options)
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
                train(model, optimizer, dp.PhysicalBatches(optimizer.loader(records(), steps=3), 2))
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
    return {"charged": charged, "everywhere": message(dp.SequenceError, lambda: full(layer(), accountant=own))}


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
    return message(dp.SequenceError, optimizer.step) + f" {len(optimizer.accountant)} {optimizer.steps}"


# -- as one process ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[2, 3], ids=["two", "three"])
def together(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch(same_as_one, request.param, tmp_path_factory.mktemp("together"))


def union(ranks: Sequence[dict[str, Any]]) -> list[list[int]]:
    return [sorted(i for part in drawn for i in part) for drawn in zip(*(rank["drawn"] for rank in ranks), strict=True)]


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


@pytest.mark.parametrize("run", ["poisson", "full", "chunks", "full chunks"])
def test_the_result_is_that_of_one_process_on_the_union_of_the_draws(run: str, together: list[dict[str, Any]]) -> None:
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
    places = [[[i // len(together) for i in draw] for draw in rank["poisson"]["drawn"]] for rank in together]
    assert all(own != places[0] for own in places[1:])


def test_t13_empty_draws_are_steps_on_every_rank(together: list[dict[str, Any]]) -> None:
    ranks = [rank["empties"] for rank in together]
    for rank in ranks:
        assert (rank["steps"], rank["charged"], len(rank["drawn"])) == (32, 32, 32)
        assert [] in rank["drawn"]
        assert torch.equal(rank["path"], ranks[0]["path"])  # with noise, which is the same everywhere
        assert torch.equal(rank["answer"], ranks[0]["answer"])
    assert any(draw for rank in ranks for draw in rank["drawn"])


def test_fit_makes_the_planned_steps_within_the_budget_and_shows_one_bar(together: list[dict[str, Any]]) -> None:
    ranks = [rank["fit"] for rank in together]
    for rank in ranks:
        assert rank["steps"] == rank["planned"] > 0
        assert 1.9 < rank["epsilon"] == ranks[0]["epsilon"] <= 2.0
        assert rank["ledger"] == ranks[0]["ledger"]
        assert torch.equal(rank["answer"], ranks[0]["answer"])
    assert "epsilon" in ranks[0]["shown"]
    assert [rank["shown"] for rank in ranks[1:]] == [""] * (len(ranks) - 1)


def test_memory_does_not_grow_with_the_batch_and_noise_is_drawn_on_one_rank(together: list[dict[str, Any]]) -> None:
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


def test_noise_is_drawn_once_and_every_rank_gets_the_same(noises: list[dict[str, Tensor]]) -> None:
    first, second = (rank["noise"] for rank in noises)
    assert torch.equal(first, second)
    check_that_noise_is_of_one_process(first)
    own = gaussians(len(first), seeded(0), dtype=torch.float32)
    torch.testing.assert_close(first, own.double(), rtol=1e-5, atol=1e-5)  # of rank 0's generator alone


def test_noise_of_every_rank_is_caught(noises: list[dict[str, Tensor]]) -> None:
    for rank in noises:
        with pytest.raises(AssertionError):
            check_that_noise_is_of_one_process(rank["mutated"])


# -- streams ----------------------------------------------------------------------------------------------------------

RATE, DRAWS, RANKS = 0.1, 4000, 3
SIZE = 20 * RANKS


def inclusions(key: bytes) -> np.ndarray:
    """Returns which positions are in which draws: (DRAWS, SIZE) bool, joined over the ranks."""
    found = np.zeros((DRAWS, SIZE), dtype=bool)
    for rank in range(RANKS):
        design = dp.Poisson(round(RATE * SIZE), SIZE)
        sampler = RankSampler(design, rank=rank, processes=RANKS, key=key, steps=DRAWS)
        for k, (draw, indices) in enumerate(sampler.draws()):
            assert (draw.size, draw.index) == (len(indices), k)
            assert set(indices % RANKS) <= {rank}
            found[k, indices] = True
    return found


def check_that_positions_are_independent(found: np.ndarray) -> None:
    """Chi-square on each position's count and on the sizes; pairs of ranks at the same place as often as by chance."""
    q = stats.binom(DRAWS, RATE)
    counts = found.sum(axis=0)
    assert stats.chi2.sf(((counts - q.mean()) ** 2 / q.var()).sum(), SIZE) > FALSE_ALARM / 3
    sizes = np.bincount(found.sum(axis=1), minlength=SIZE + 1)
    expected = DRAWS * stats.binom(SIZE, RATE).pmf(np.arange(SIZE + 1))
    kept = expected > 10
    observed, wanted = [np.append(part[kept], part[~kept].sum()) for part in (sizes, expected)]
    assert stats.chi2.sf(((observed - wanted) ** 2 / wanted).sum(), len(wanted) - 1) > FALSE_ALARM / 3
    for a in range(RANKS):
        for b in range(a):
            joint = int((found[:, a::RANKS] & found[:, b::RANKS]).sum())
            trials = DRAWS * SIZE // RANKS
            assert stats.binomtest(joint, trials, RATE**2).pvalue > FALSE_ALARM / 9


def test_the_union_over_ranks_is_a_poisson_draw() -> None:
    check_that_positions_are_independent(inclusions(bytes(range(32))))


def test_equal_streams_of_ranks_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = parts.rank_generator
    monkeypatch.setattr(parts, "rank_generator", lambda key, rank: generator(key, 0))
    with pytest.raises(AssertionError):
        check_that_positions_are_independent(inclusions(bytes(range(32))))


def test_streams_differ_by_rank_and_by_each_bit_of_the_key() -> None:
    keys = [bytes(32), *((1 << bit).to_bytes(32, "little") for bit in (0, 127, 128, 255))]
    first = {tuple(parts.rank_generator(key, rank).words(2)) for key in keys for rank in range(50)}
    assert len(first) == 50 * len(keys)
    again = parts.rank_generator(keys[1], 3).words(2)
    assert tuple(again) in first
    with pytest.raises(ValueError, match="key must have 32 bytes"):
        parts.rank_generator(b"", 0)


def test_a_copy_of_a_rank_sampler_draws_other_batches() -> None:
    sampler = RankSampler(dp.Poisson(16, 32), rank=1, processes=2, key=bytes(32), steps=20)
    copied = copy.deepcopy(sampler)
    draws = [[indices.tolist() for _, indices in s.draws()] for s in (sampler, copied)]
    assert draws[0] != draws[1]
    assert {i % 2 for draw in draws[1] for i in draw} == {1}
    assert [draw.index for draw, _ in sampler.draws()] == list(range(20, 40))  # numbered across iterations


def test_more_ranks_than_records_draw_nothing() -> None:
    sampler = RankSampler(dp.Full(2), rank=2, processes=3, key=bytes(32), steps=2)
    assert [(draw.size, len(indices)) for draw, indices in sampler.draws()] == [(0, 0), (0, 0)]


@pytest.mark.parametrize("design", [dp.Fixed(2, 8), dp.Shuffled(2, 8), dp.Disjoint(2, 8), dp.Assigned(2, 8)], ids=str)
def test_designs_whose_positions_depend_on_each_other_are_refused(design: Any) -> None:
    with pytest.raises(dp.UnknownSamplerError, match="design must be Poisson or Full in a run of several processes"):
        RankSampler(design, rank=0, processes=2, key=bytes(32))


def test_ranks_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="rank must be < processes=2"):
        RankSampler(dp.Full(8), rank=2, processes=2, key=bytes(32))


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("failures")
    return launch(failures, 2, folder, str(folder))


def assert_equal_on_ranks(ranks: Sequence[dict[str, Any]], *names: str) -> None:
    for rank in ranks[1:]:
        assert torch.equal(rank["answer"], ranks[0]["answer"])
        assert [rank[name] for name in names] == [ranks[0][name] for name in names]


def test_a_rank_without_rows_makes_all_raise_and_all_go_on_together(failed: list[dict[str, Any]]) -> None:
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


def test_a_rank_that_cannot_charge_makes_all_raise_and_ends_the_run(failed: list[dict[str, Any]]) -> None:
    first, second = (rank["failed_charge"]["errors"] for rank in failed)
    assert second[0] == "PrivacyError: no disk"
    assert "a rank could not charge or release this step" in first[0]
    for errors in (first, second):
        assert "charges must be equal on all ranks (rank 1 differs from 0)" in errors[1]


def test_a_rank_that_cannot_charge_is_sent_no_sum(failed: list[dict[str, Any]]) -> None:
    for rank in failed:
        assert len(rank["failed_charge"]["sent"]) == DIM + 1 + 2  # the answer that was not given
        assert not rank["failed_charge"]["sent"].any()


def test_a_rank_that_cannot_make_noise_makes_all_raise(failed: list[dict[str, Any]]) -> None:
    assert failed[0]["failed_release"] == ["SequenceError: no noise"]
    assert "a rank could not charge or release this step" in failed[1]["failed_release"][0]


def test_a_budget_ends_all_ranks_at_the_same_step(failed: list[dict[str, Any]]) -> None:
    ranks = [rank["over_budget"] for rank in failed]
    assert_equal_on_ranks(ranks, "steps", "charged", "spent")
    assert 0 < ranks[0]["steps"] == ranks[0]["charged"] < 50
    assert ranks[0]["spent"] <= 1.0
    assert all(rank["kinds"] == ["BudgetExceeded"] for rank in ranks)


def test_a_rank_that_gives_a_draw_up_gets_the_same_one_again(failed: list[dict[str, Any]]) -> None:
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
        ("steps", "SequenceError: steps must be equal on all ranks"),
        ("fixed", "UnknownSamplerError: design must be Poisson or Full"),
        ("shuffled", "UnknownSamplerError: design must be Poisson or Full"),
        ("one pass", "UnknownSamplerError: design must be Poisson or Full"),
        ("smoothing", "SequenceError: smoothing must be 0"),
        ("replicated", "ValueError: model must not be replicated"),
        ("row free", "SequenceError: world_size must be 1 for this optimizer"),
    ],
)
def test_what_ranks_cannot_share_is_refused_on_all(name: str, words: str, failed: list[dict[str, Any]]) -> None:
    for rank in failed:
        assert words in rank["refused"][name]


@pytest.mark.parametrize("name", ["order", "subset"])
def test_ranks_with_records_in_another_order_are_refused(name: str, failed: list[dict[str, Any]]) -> None:
    for rank in failed:
        assert "data must be equal on all ranks" in rank["refused"][name]


def test_a_sampler_of_all_positions_is_refused(failed: list[dict[str, Any]]) -> None:
    for rank in failed:
        assert "loader must draw this rank's positions" in rank["refused"]["sampler"]


@pytest.mark.parametrize("name", ["adaptive", "users"])
def test_oracles_that_do_more_than_add_rows_are_refused(name: str, failed: list[dict[str, Any]]) -> None:
    for rank in failed:
        assert "oracle must be Clipped, HolderClipped or AutoClip" in rank["refused"][name]


def test_checkpoints_copies_and_the_memory_manager_go_on_on_all_ranks(failed: list[dict[str, Any]]) -> None:
    ranks = [rank["continued"] for rank in failed]
    assert_equal_on_ranks(ranks, "steps", "charged", "ledger")
    assert (ranks[0]["steps"], ranks[0]["charged"]) == (9, 9)
    assert torch.equal(ranks[0]["path"], ranks[1]["path"])
    assert [len(draw) for draw in union(ranks)] != [0] * 4


def test_other_optimizers_rules_and_chunks_stay_equal_on_all_ranks(failed: list[dict[str, Any]]) -> None:
    ranks = [rank["others"] for rank in failed]
    assert_equal_on_ranks(ranks, "steps", "said")
    assert ranks[0]["steps"] == 6
    assert "2 processes that trust each other read the same records in the same order" in ranks[0]["said"]


def test_one_rank_keeps_the_ledger_file_and_the_others_take_it_over(failed: list[dict[str, Any]]) -> None:
    for rank in failed:
        assert rank["ledger file"]["charged"] == [2, 4]
    assert "rank 1 has given this construction up" in failed[0]["ledger file"]["everywhere"]
    assert "ledger_path must be given on rank 0 only" in failed[1]["ledger file"]["everywhere"]


def test_a_rank_that_dies_makes_the_others_raise(tmp_path: Path) -> None:
    set_forkserver_preload(["torch_dpsco", "pytest", "scipy.stats"])
    running = start_processes(_rank, (dying, 3, str(tmp_path), ()), nprocs=3, join=False, start_method="forkserver")
    for process in running.processes:
        process.join(SECONDS)
        assert process.exitcode == 0
    for rank in (0, 1):
        said = torch.load(tmp_path / str(rank))
        assert "the other ranks cannot be reached" in said
        assert said.endswith(" 1 1")  # charges and steps: nothing of the broken step


# -- the example ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_example_trains_one_model_on_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its children are forked from the server that has the package already; `main` compares their models."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    for name in ("adult", "distributed"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("distributed")
    monkeypatch.setattr(module, "START_METHOD", "forkserver")
    figures = module.main(["--quick"])
    for name in ("adult", "distributed"):
        del sys.modules[name]
    assert figures["steps"] == 7
    assert 0.99 < figures["epsilon"] <= 1.0
    assert figures["auc"] > 0.7


# -- in one process ---------------------------------------------------------------------------------------------------


def test_an_optimizer_made_before_the_process_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = layer()
    optimizer = full(model, noise=1.0)
    loader = optimizer.loader(records(), steps=1)
    (x, y, _), *_ = loader
    backward(model, optimizer, x, y)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    for call in (optimizer.step, lambda: optimizer.loader(records())):
        with pytest.raises(dp.SequenceError, match="world_size must be 1 for an optimizer made in one process"):
            call()
    assert len(optimizer.accountant) == optimizer.steps == 0


def test_the_part_of_a_rank_is_no_batch_of_one_process() -> None:
    sampler = RankSampler(dp.Full(N), rank=0, processes=2, key=bytes(32))
    with pytest.raises(dp.UnknownSamplerError, match="got the part of one of several processes"):
        full(layer()).bind(DataLoader(records(), batch_sampler=sampler))


def test_without_other_processes_nothing_is_shared() -> None:
    assert isinstance(distributed.join(torch.device("cpu")), distributed.Alone)
    assert distributed.is_first()
    assert full(layer()).oracle.processes == 1


def rows_of(n: int, dim: int, seed: int) -> GradBatch:
    return GradBatch([DenseBlock(torch.randn(n, dim, generator=torch.Generator().manual_seed(seed)))])


@pytest.mark.parametrize("processes", [2, 3])
def test_the_rounding_of_a_sum_over_processes_stays_within_the_declared_error(processes: int) -> None:
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
    oracles[0].replace_sum(total, rows)
    answer = oracles[0].release(torch.Generator()).mean[0]  # without noise
    torch.testing.assert_close(answer, total.float(), rtol=1e-6, atol=0.0)
    assert f"{processes} processes that trust each other" in oracles[0].assumptions[0]
    with pytest.raises(dp.SequenceError, match="a logical batch must have at most"):
        oracles[0].replace_sum(total, oracles[0]._summation.max_rows + 1)
    with pytest.raises(ValueError, match="processes must be <= 1020"):
        oracles[0].share(1021)
