"""Private runs on shards of FSDP 2: released sums, noise, failures, memory, and what is refused."""

from __future__ import annotations

import copy
import gc
import math
import os
import time
import warnings
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing import start_processes
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from tests.processes import SECONDS, launch, message, run_rank
from torch_dpsco import rules
from torch_dpsco.errors import PrivacyError, SequenceError
from torch_dpsco.integrations import fsdp
from torch_dpsco.noise import SliceStream, normal_
from torch_dpsco.step.oracle import ClippedMean

pytestmark = pytest.mark.skipif(
    torch.__version__.startswith("2.6."), reason="fully_shard of torch 2.6 needs a GPU"
)
N, WORDS, TIMES, CLIP, BATCH, STEPS = 60, 11, 3, 0.5, 12, 3
WAIT = timedelta(seconds=20)
loss = nn.functional.mse_loss


class Words(nn.Module):
    """Layers of several kinds, one of them in a block, and a weight that two ranks cannot share."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(WORDS, 6)
        self.block = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 5), nn.Tanh())
        self.head = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.block(self.items(x)).mean(dim=1))
        return out


def plain() -> Words:
    torch.manual_seed(0)
    return Words().double()


class Adapted(nn.Module):
    """Frozen weights, one of them used in two layers, and trained ones beside them, as with LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(WORDS, 6)
        self.block = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.Tanh())
        self.back = nn.Linear(6, WORDS, bias=False)
        self.back.weight = self.items.weight
        self.requires_grad_(False)
        self.adapter = nn.ModuleList([nn.Linear(6, 2, bias=False), nn.Linear(2, 6)])

    def forward(self, x: Tensor) -> Tensor:
        out = self.items(x)
        down, up = self.adapter
        out = self.block(out) + up(down(out))
        found: Tensor = self.back(out).mean(dim=1).mean(dim=1, keepdim=True)
        return found


def unattached() -> Adapted:
    torch.manual_seed(0)
    return Adapted().double()


def adapted() -> nn.Module:
    return dp.attach(unattached(), check_first_step=False)


def attached() -> nn.Module:
    return dp.attach(plain(), check_first_step=False)


def records() -> TensorDataset:
    """(words, target, position): zeros, which fill batches up, are at no position but 0."""
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(1, WORDS, (N, TIMES), generator=generator)
    target = torch.randn(N, 1, dtype=torch.float64, generator=generator)
    return TensorDataset(words, target, torch.arange(N))


RULES: dict[str, Callable[[], Any]] = {
    "sgd": rules.SGD,
    "momentum": lambda: rules.Momentum(),
    "adam": lambda: rules.AdamBC(0.1),
}
LAYERS: dict[str, Callable[[Any], list[nn.Module]]] = {
    "children": lambda model: [],
    "block": lambda model: [model.block],  # the other weights are in the group of the root
    "each": lambda model: [
        model.items,
        model.block,
        *model.block,
        model.head,
        model,
        model.head,
    ],
}


def run_on(
    model: nn.Module, noise: float = 0.0, layers: Any = (), rule: Any = None, **options: Any
) -> dp.ClippedSGD:
    params = fsdp.fully_shard(model, layers, timeout=WAIT)
    given = {"sampling": "poisson", "batch_size": BATCH, "steps": STEPS + 2}
    plan = dp.ClippedSGD.plan(lr=0.1, clip=CLIP, noise_multiplier=noise, n=N, **given)
    own = {} if rule is None else {"rule": rule}
    return dp.ClippedSGD(params, plan, **own, **options)


def backward(model: nn.Module, x: Tensor, y: Tensor) -> None:
    loss(model(x), y).backward()


def shards_of(optimizer: dp.ClippedSGD) -> list[Tensor]:
    return [p.detach().clone() for p in optimizer.param_groups[0]["params"]]


def wholes(model: Any) -> list[Any]:
    return [p for p in model._dpsco.params if hasattr(p, "dpsco_shard")]


# -- what the ranks do ------------------------------------------------------------------------------------------------


def trained(rank: int) -> dict[str, Any]:
    found = {}
    for how, layers in LAYERS.items():
        for rule, make in RULES.items():
            model = attached()
            old = [weakref.ref(p) for p in model.parameters()]
            optimizer = run_on(model, layers=layers(model), rule=make())
            params = optimizer.param_groups[0]["params"]
            path = []
            for x, y, position in optimizer.loader(records(), steps=STEPS, isolation="slots"):
                before = shards_of(optimizer)
                backward(model, x, y)
                optimizer.step()
                drawn = position[x.any(dim=1)].tolist()
                path.append((drawn, before, [p.grad.clone() for p in params]))
            gc.collect()
            found[f"{how}, {rule}"] = {
                "path": path,
                "after": shards_of(optimizer),
                "seen": [p.full_tensor().detach().clone() for p in model.parameters()],
                "sizes": sum(p.numel() for p in params),
                "state": [
                    t.numel() <= p.numel() or t.numel() == 1
                    for p in params
                    for t in optimizer.state[p].values()
                    if isinstance(t, Tensor)
                ],
                "old": sum(ref() is not None for ref in old),
                "memory": sum(p.untyped_storage().size() for p in wholes(model)),
                "ledger": len(optimizer.accountant),
            }
    return found


def in_parts(rank: int) -> dict[str, Any]:
    """An adapter on frozen weights, draws in parts of five rows, of which this rank has more in some draws."""
    model = adapted()
    old = [weakref.ref(p) for p in model.parameters()]
    optimizer = run_on(model, layers=[model.block, model.adapter])
    loader = optimizer.loader(records(), steps=STEPS, isolation="slots", physical_batch_size=5)
    path: list[Any] = []
    batches: list[int] = []
    drawn: list[int] = []
    before = shards_of(optimizer)
    for k, (x, y, position) in enumerate(loader, start=1):
        drawn += position[x.any(dim=1)].tolist()
        backward(model, x, y)
        optimizer.step()
        if optimizer.steps > len(path):
            grads = [p.grad.clone() for p in optimizer.param_groups[0]["params"]]
            path.append((drawn, before, grads))
            batches.append(k)
            drawn, before = [], shards_of(optimizer)
    parts: list[Any] = [*model.named_parameters()]
    gc.collect()
    return {
        "path": path,
        "batches": batches,
        "smaller": loader.in_parts(3).slots.parts,
        "room": loader.slots.capacity,
        "held": sum(p.to_local().numel() for _, p in parts),
        "whole": sum(p.numel() for _, p in parts),
        "after": {name: p.full_tensor().detach() for name, p in parts},
        "old": sum(ref() is not None for ref in old),
    }


def noised(rank: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model = dp.attach(nn.Linear(401, 100), check_first_step=False)
    optimizer = run_on(model, noise=2.0)
    x = torch.randn(N, 401, generator=torch.Generator().manual_seed(1))
    found: list[dict[str, Any]] = []
    noising, made, reading = ClippedMean.noised, SliceStream.__init__, SliceStream.read
    bits_of: list[SliceStream] = []

    def noting(oracle: ClippedMean, part: Tensor, bits: Any) -> Tensor:
        said = {"key": bits.key.clone(), "label": bits.label, "part": part.clone(), "read": []}
        found.append(said)
        answer = noising(oracle, part, bits)
        said |= {"answer": answer.clone(), "std": oracle.noise_std, "blocks": bits._block}
        return answer

    def making(bits: SliceStream, rank: int) -> None:
        made(bits, rank)
        bits_of.append(bits)

    def read(bits: SliceStream, size: int) -> bytes:
        if found:
            found[-1]["read"].append((bits._block, -(-size // 64)))
        return reading(bits, size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ClippedMean, "noised", noting)
        patch.setattr(SliceStream, "__init__", making)
        patch.setattr(SliceStream, "read", read)
        data = TensorDataset(x, x[:, :100])
        for features, target in optimizer.loader(data, steps=STEPS, isolation="slots"):
            backward(model, features, target)
            optimizer.step()
            released = [p.grad.flatten() for p in optimizer.param_groups[0]["params"]]
            found[-1]["released"] = torch.cat(released)
            found[-1]["erased"] = not len(bits_of[-1].key)
    return found


def continued(rank: int, folder: str) -> dict[str, Any]:
    """A run of three steps, one of them after its processes have started anew."""

    def begun(weights: dict[str, Tensor] | None = None) -> tuple[Any, Any]:
        whole = plain()
        if weights is not None:
            whole.load_state_dict(weights)
        model = dp.attach(whole, check_first_step=False)
        path = Path(f"{folder}/spent") if rank == 0 else None
        accountant = dp.Accountant(ledger_path=path)
        return model, run_on(model, 1.0, rule=RULES["adam"](), accountant=accountant)

    def numbers(optimizer: Any) -> list[Tensor]:
        kept = [*optimizer.state.values()]
        return [t.clone() for held in kept for t in held.values() if isinstance(t, Tensor)]

    def train(model: Any, optimizer: Any, steps: int) -> None:
        loader = optimizer.loader(records(), steps=steps, isolation="slots", resume=True)
        for x, y, _ in loader:
            backward(model, x, y)
            optimizer.step()

    model, optimizer = begun()
    train(model, optimizer, 2)
    before = numbers(optimizer) + shards_of(optimizer)
    weights = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    torch.save(optimizer.state_dict(), f"{folder}/state {rank}")
    dist.barrier()
    optimizer.accountant.close()
    model, optimizer = begun(weights)
    other = torch.load(f"{folder}/state {1 - rank}")
    said = message(ValueError, lambda: optimizer.resume(other))
    lost = optimizer.resume(torch.load(f"{folder}/state {rank}"))
    after = numbers(optimizer) + shards_of(optimizer)
    train(model, optimizer, 1)
    return {
        "said": said,
        "lost": lost,
        "same": all(map(torch.equal, before, after)) and len(before) == len(after),
        "steps": optimizer.steps,
        "charged": len(optimizer.accountant),
    }


FAULTS = (
    "charge of rank 1",
    "noise of rank 1",
    "key",
    "rows of rank 1",
    "moved weights",
    "exchanged weights",
)


def spoil(
    fault: str, rank: int, model: Any, optimizer: dp.ClippedSGD, patch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise SequenceError(f"no {fault}")

    if fault == "key":
        patch.setattr(optimizer, "_noise", None) if not rank else None  # which no stream is
    if rank == 1 and fault == "charge of rank 1":
        patch.setattr(optimizer.accountant, "authorize", refuse)
    if rank == 1 and fault == "noise of rank 1":
        patch.setattr(ClippedMean, "noised", refuse)
    if rank == 1 and fault == "rows of rank 1":
        optimizer.zero_grad()
    if rank == 1 and fault == "moved weights":
        p = optimizer.param_groups[0]["params"][0]
        p.data = p.data.clone()
    if rank == 1 and fault == "exchanged weights":
        new = {name: p.detach().clone() for name, p in model.state_dict().items()}
        model.load_state_dict(new, assign=True)


def failing(rank: int, folder: str) -> dict[str, Any]:
    warnings.filterwarnings("ignore", ".*was charged and did not end")
    found = {}
    for fault in FAULTS:
        path = Path(f"{folder}/{fault}")
        accountant = dp.Accountant(ledger_path=path if rank == 0 else None)
        model = attached()
        optimizer = run_on(model, noise=1.0, accountant=accountant)
        before = shards_of(optimizer)
        (x, y, _), *_ = optimizer.loader(records(), steps=1, isolation="slots")
        backward(model, x, y)
        with pytest.MonkeyPatch.context() as patch:
            spoil(fault, rank, model, optimizer, patch)
            said = message((SequenceError, PrivacyError, AttributeError), optimizer.step)
        after = shards_of(optimizer)
        charged = len(accountant)
        accountant.close()
        found[fault] = {
            "said": said,
            "charged": charged,
            "filed": len(dp.Accountant(ledger_path=path)) if rank == 0 else charged,
            "moved": not all(map(torch.equal, before, after)),
        }
    return found


class Boom(Exception):
    """What a script raises."""


def recovered(rank: int) -> dict[str, Any]:
    """Errors in a forward and in a backward of all ranks, after which the same loop goes on."""
    fail = ""

    def stop(grad: Tensor) -> None:
        raise Boom

    def spoil(module: Any, args: Any, output: Tensor) -> None:
        if fail == "forward":
            raise Boom
        if fail == "backward":
            output.register_hook(stop)

    found = {}
    for fault in ("forward", "backward"):
        model = attached()
        model.block[1].register_forward_hook(spoil)
        optimizer = run_on(model, layers=[model.items, *model.block, model.head])
        path = []
        loader = optimizer.loader(records(), steps=STEPS, isolation="slots")
        for k, (x, y, position) in enumerate(loader):
            if k == 1:
                fail = fault
                with pytest.raises(Boom):
                    backward(model, x, y)
                fail = ""
                optimizer.zero_grad()
            drawn = position[x.any(dim=1)].tolist()
            before = shards_of(optimizer)
            backward(model, x, y)
            optimizer.step()
            path.append((drawn, before, [p.grad.clone() for p in optimizer._params]))
        found[fault] = path
    return found


class Writer(nn.Module):
    """Writes the sign of the batch to a weight of its layer."""

    def __init__(self, *, trained: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1).requires_grad_(trained)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.layer.weight.mul_(x.sum().sign())
        out: Tensor = self.layer(x)
        return out


def written(rank: int) -> list[tuple[str, int]]:
    found = []
    for trained in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 1), Writer(trained=trained))
        optimizer = run_on(dp.attach(model, check_first_step=False))
        x = torch.ones(N, 5)
        (a, b), *_ = optimizer.loader(TensorDataset(x, x[:, :1]), steps=1, isolation="slots")
        said = message(PrivacyError, lambda: backward(model, a, b))  # noqa: B023
        found.append((said, len(optimizer.accountant)))
    return found


def interrupted(rank: int) -> dict[str, Any]:
    """Rank 1 is interrupted before it has its noise, and after all know that the others have theirs."""
    warnings.filterwarnings("ignore", ".*was charged and did not end")
    found = {}
    errors = SequenceError, KeyboardInterrupt

    def interrupt(*args: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    for place in ((ClippedMean, "noised"), (dp.ClippedSGD, "_move")):
        model = attached()
        optimizer = run_on(model, noise=1.0)
        before = shards_of(optimizer)
        said = []
        moved = []
        for again in (False, True):
            (x, y, _), *_ = optimizer.loader(records(), steps=1, isolation="slots")
            backward(model, x, y)
            with pytest.MonkeyPatch.context() as patch:
                if rank == 1 and not again:
                    patch.setattr(*place, interrupt)
                try:
                    optimizer.step()
                    said.append("made")
                except errors as error:
                    said.append(f"{type(error).__name__}: {error}")
            moved.append(not all(map(torch.equal, before, shards_of(optimizer))))
            dist.barrier()
        found[place[1]] = said, moved, len(optimizer.accountant)
    return found


def swapped(rank: int) -> tuple[str, str]:
    """Weights of one shape in another order on rank 1, and a model that rank 1 has used."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    params = fsdp.fully_shard(dp.attach(model, check_first_step=False), timeout=WAIT)
    plan = dp.ClippedSGD.plan(
        lr=0.1, clip=CLIP, noise_multiplier=1.0, n=N, batch_size=6, steps=2, sampling="poisson"
    )
    order = params[::-1] if rank else params
    said = message(SequenceError, lambda: dp.ClippedSGD(order, plan))
    used = attached()
    if rank:
        used(torch.ones(2, TIMES, dtype=torch.int64))
    return said, message(SequenceError, lambda: fsdp.fully_shard(used))


def dying(rank: int, folder: str, where: str) -> None:
    """Rank 1 ends while it draws its noise, or before a forward in which the other one waits."""
    path = Path(f"{folder}/spent")
    accountant = dp.Accountant(ledger_path=path if rank == 0 else None)
    warnings.filterwarnings("ignore", ".*was charged and did not end")
    model = attached()
    optimizer = run_on(model, noise=1.0, accountant=accountant)
    before = shards_of(optimizer)
    (x, y, _), *_ = optimizer.loader(records(), steps=1, isolation="slots")
    if rank == 1 and where == "forward":
        os._exit(0)
    if rank == 1:
        SliceStream.read = lambda self, size: os._exit(0)  # type: ignore[method-assign]

    def step() -> None:
        backward(model, x, y)
        optimizer.step()

    said = message((SequenceError, RuntimeError), step)
    charged = len(accountant)
    accountant.close()
    filed = len(dp.Accountant(ledger_path=path))
    moved = not all(map(torch.equal, before, shards_of(optimizer)))
    torch.save({"said": said, "charged": charged, "filed": filed, "moved": moved}, f"{folder}/0")
    os._exit(0)


def refusals(rank: int) -> dict[str, tuple[str, int]]:
    """What is said of each thing that needs whole vectors, and how much is charged by then."""
    warnings.simplefilter("ignore")
    found: dict[str, tuple[str, int]] = {}
    errors = (SequenceError, ValueError)

    def plan(kind: Any = dp.ClippedSGD, **options: Any) -> Any:
        given = {"lr": 0.1, "clip": CLIP, "noise_multiplier": 1.0, "n": N, "batch_size": BATCH}
        given |= {"sampling": "poisson", "steps": 4}
        return kind.plan(**(given | options))

    def cut(model: nn.Module | None = None) -> list[nn.Parameter]:
        return fsdp.fully_shard(attached() if model is None else model, timeout=WAIT)

    def note(name: str, call: Callable[[], Any], optimizer: Any = None) -> None:
        charged = 0 if optimizer is None else len(optimizer.accountant)
        found[name] = message(errors, call), charged

    def made(**options: Any) -> Callable[[], Any]:
        own = {k: options.pop(k) for k in ("rule", "prox", "reg") if k in options}
        return lambda: dp.ClippedSGD(cut(), plan(**options), **own)

    problem = dp.losses.Squared().problem(bound_x=3.0, bound_y=2.0)
    holder = dp.HolderSGD.plan(
        lr=0.01, problem=problem, noise_multiplier=1.0, n=N, batch_size=BATCH, steps=2
    )
    note("clip at the iterate", lambda: dp.HolderSGD(cut(), holder))
    note("full batches", made(sampling="full", batch_size=None))
    note("allocated", made(sampling="allocated"))
    note("average", made(rule=rules.SGD(average="uniform")))
    note("another rule", made(rule=rules.Accelerated()))
    far = attached()
    parts = cut(far)
    old = [p.detach().clone() for p in parts]
    note("prox", lambda: dp.ClippedSGD(parts, plan(), prox=dp.prox.Ball(1e-3)))
    assert all(map(torch.equal, old, parts))
    note("reg", made(reg=0.1))
    note("exact", made(secure="exact"))
    note("some shards", lambda: dp.ClippedSGD(cut()[:2], plan()))
    other = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    note("shards and others", lambda: dp.ClippedSGD([other, *cut()], plan()))
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[0].weight = tied[1].weight
    checked = dp.attach(plain())
    note("checked", lambda: cut(checked))
    note("plain", lambda: cut(plain()))
    note("tied", lambda: cut(dp.attach(tied, check_first_step=False)))
    dense = dp.attach(plain(), rows="dense", check_first_step=False)
    note("dense", lambda: cut(dense))
    share = adapted()
    note("layers", lambda: fsdp.fully_shard(share, [share.items, share.back]))
    note("others", lambda: fsdp.fully_shard(attached(), [nn.Linear(2, 2)]))
    twice = attached()
    cut(twice)
    note("twice", lambda: cut(twice))
    torch.manual_seed(rank)
    note("other weights", lambda: cut(dp.attach(Words(), check_first_step=False)))
    mine = attached()
    note("its weights", lambda: dp.ClippedSGD((cut(mine), mine.parameters())[1], plan()))

    model = attached()
    optimizer = dp.ClippedSGD(cut(model), plan())
    data = records()
    loaders = {
        "default isolation": {},
        "no isolation": {"isolation": "none"},
        "own records": {"isolation": "slots", "shard": N},
    }
    half = TensorDataset(*(t[rank::2] for t in data.tensors))
    for name, options in loaders.items():
        held = half if "shard" in options else data
        call = partial(optimizer.loader, held, **options)
        note(name, call, optimizer)
    two = TensorDataset(*data.tensors[:2])
    note("fit", lambda: dp.fit(model, optimizer, two, loss, steps=1), optimizer)
    note("detach", lambda: dp.detach(model), optimizer)
    note("doctor", lambda: dp.doctor(model, loss, None, optimizer), optimizer)
    note("copy", lambda: copy.deepcopy(optimizer), optimizer)

    def public() -> None:
        with dp.public(model):
            pass

    note("public", public, optimizer)
    note("plain step", torch.optim.SGD(model.parameters(), lr=0.1).step, optimizer)
    (x, y, _), *_ = optimizer.loader(data, steps=1, isolation="slots")
    optimizer.signal_skip_step(do_skip=False)
    backward(model, x, y)
    note("parts", optimizer.step, optimizer)
    return found


def leaking(rank: int) -> dict[str, Any]:
    """A term of the loss on the weights, and a backward in eval mode: gradients that are no rows."""
    found = {}
    for name in ("term", "eval"):
        model = attached()
        optimizer = run_on(model)
        (x, y, _), *_ = optimizer.loader(records(), steps=1, isolation="slots")

        def spoiled(model: Any = model, name: str = name, x: Tensor = x, y: Tensor = y) -> None:
            model.train(name == "term")
            value = loss(model(x), y)
            if name == "term":
                value = value + sum(p.to_local().square().sum() for p in model.parameters())
            value.backward()

        said = message(SequenceError, spoiled)
        found[name] = said, all(p.grad is None for p in model._dpsco.params)
        dist.barrier()
    model = attached()
    fsdp.fully_shard(model, timeout=WAIT)
    for handle in model._dpsco.handles:  # nothing of ours drops or refuses a gradient then
        handle.remove()
    backward(model.eval(), *records().tensors[:2])
    found["nothing dropped"] = "", all(p.grad is None for p in model.parameters())
    return found


def shown(rank: int) -> dict[str, Any]:
    """What the block of docs/distributed.md leaves."""
    page = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text(encoding="utf-8")
    block = page.split("## Shards of the model")[1].split("```python\n")[1].split("```")[0]
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    scope: dict[str, Any] = {"nn": nn, "dp": dp, "dim": 3, "loss": loss}
    scope |= {"dataset": TensorDataset(x, x[:, :1]), "budget": dp.Budget(4.0, 1e-3)}
    torch.manual_seed(0)
    exec(block, scope)
    optimizer = scope["optimizer"]
    said = " ".join(str(optimizer.report(1e-3)).split())
    return {"steps": optimizer.steps, "charged": len(optimizer.accountant), "said": said}


# -- tests ------------------------------------------------------------------------------------------------------------


def joined(parts: list[list[Tensor]]) -> list[Tensor]:
    return [torch.cat(pair) for pair in zip(*parts, strict=True)]


def clipped_mean(model: nn.Module, weights: list[Tensor], drawn: list[int]) -> list[Tensor]:
    """The clipped sum, record by record, over the batch size."""
    trained = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        for p, w in zip(trained, weights, strict=True):
            p.copy_(w)
    total = [torch.zeros_like(p) for p in trained]
    x, y, _ = records().tensors
    for i in drawn:
        grads = torch.autograd.grad(loss(model(x[i : i + 1]), y[i : i + 1]), trained)
        norm = float(torch.cat([g.flatten() for g in grads]).norm())
        for t, g in zip(total, grads, strict=True):
            t += g * min(1.0, CLIP / norm) / BATCH
    return total


def require_sums(paths: list[list[Any]], model: nn.Module) -> None:
    drawn = 0
    for parts in zip(*paths, strict=True):
        both = [i for own, _, _ in parts for i in own]
        assert len(set(both)) == len(both)
        drawn += len(both)
        expected = clipped_mean(model, joined([before for _, before, _ in parts]), both)
        released = joined([grads for _, _, grads in parts])
        for a, b in zip(released, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    assert drawn > 0


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch(trained, 2, tmp_path_factory.mktemp("runs"))


KINDS = [f"{how}, {rule}" for how in LAYERS for rule in RULES]


@pytest.mark.parametrize("kind", KINDS)
def test_the_released_sums_are_those_of_one_process(
    kind: str, runs: list[dict[str, Any]]
) -> None:
    require_sums([run[kind]["path"] for run in runs], plain())
    assert [run[kind]["ledger"] for run in runs] == [STEPS] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_fsdp_sees_what_the_optimizer_moves(kind: str, runs: list[dict[str, Any]]) -> None:
    moved = joined([run[kind]["after"] for run in runs])
    start = list(plain().parameters())
    assert not any(torch.equal(a, b) for a, b in zip(moved, start, strict=True))
    for run in runs:
        assert all(map(torch.equal, run[kind]["seen"], moved))


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_holds_its_shards_alone(kind: str, runs: list[dict[str, Any]]) -> None:
    whole = sum(p.numel() for p in plain().parameters())
    sizes = [run[kind]["sizes"] for run in runs]
    assert sum(sizes) == whole
    assert max(sizes) < 0.6 * whole
    for run in runs:
        assert all(run[kind]["state"])
        assert bool(run[kind]["state"]) == ("sgd" not in kind)
        assert not run[kind]["old"]
        assert not run[kind]["memory"]


def test_the_number_of_forwards_is_public(tmp_path: Path) -> None:
    ranks = launch(in_parts, 2, tmp_path)
    for run in ranks:
        each = -(-run["room"] // 5)
        assert run["batches"] == [each * k for k in range(1, STEPS + 1)]
        assert run["smaller"] == -(-run["room"] // 3) > each
    require_sums([run["path"] for run in ranks], unattached())


def test_frozen_weights_are_sharded_and_stay(tmp_path: Path) -> None:
    ranks = launch(in_parts, 2, tmp_path)
    start = dict(unattached().named_parameters())
    for run in ranks:
        assert run["after"].keys() == start.keys()
        for name, value in run["after"].items():
            assert torch.equal(value, start[name]) != start[name].requires_grad, name
        assert run["held"] < 0.7 * run["whole"]
        assert not run["old"]


def test_each_number_of_the_noise_is_drawn_once_by_the_key_of_rank_0(tmp_path: Path) -> None:
    ranks = launch(noised, 2, tmp_path)
    for step in zip(*ranks, strict=True):
        assert torch.equal(step[0]["key"], step[1]["key"])
        assert step[0]["key"].any()
        assert [part["label"] for part in step] == [0, 1 << 20]
        assert sum(len(part["part"]) for part in step) == 402 * 100
        for rank, part in enumerate(step):
            end = 0
            for start, blocks in part["read"]:
                assert start == end  # no block is read twice
                end += blocks
            assert end == part["blocks"] > 0
            assert part["erased"]
            bits = SliceStream(rank)
            bits.key.copy_(part["key"])
            again = normal_(torch.empty_like(part["answer"]), part["std"], bits, part["part"])
            assert torch.equal(again, part["answer"])
            assert torch.equal(part["released"], part["answer"])
    keys = {bytes(part["key"].tolist()) for part in ranks[0]}
    assert len(keys) == STEPS
    noise = [(p["answer"].double() - p["part"]) / p["std"] for rank in ranks for p in rank]
    n = len(noise[0])
    for i, a in enumerate(noise):
        assert abs(float(a.square().mean()) - 1.0) < 6.0 * math.sqrt(2.0 / n)
        for b in noise[:i]:
            assert abs(float((a * b).mean())) < 6.0 / math.sqrt(n)


def test_each_rank_goes_on_from_its_own_checkpoint(tmp_path: Path) -> None:
    for rank, run in enumerate(launch(continued, 2, tmp_path, str(tmp_path))):
        assert f"shards: '{rank} of 2' here, '{1 - rank} of 2' there" in run["said"]
        assert run["same"]
        assert run["steps"] == 2 + run["lost"] + 1
        assert run["charged"] >= run["steps"]


def test_after_an_error_in_forward_or_backward_the_same_loop_is_right(tmp_path: Path) -> None:
    ranks = launch(recovered, 2, tmp_path)
    for fault in ("forward", "backward"):
        require_sums([run[fault] for run in ranks], plain())


def test_a_forward_that_writes_to_weights_in_shards_is_refused(tmp_path: Path) -> None:
    for found in launch(written, 2, tmp_path):
        for said, charged in found:
            assert "a training forward must not change buffers or weights" in said
            assert not charged


def test_an_interrupted_rank_is_not_left_behind(tmp_path: Path) -> None:
    first, other = launch(interrupted, 2, tmp_path)
    (said, _), moved, charged = first["noised"]
    assert "a rank could not charge or release this step" in said
    assert moved == [False, True]
    assert charged == 2
    assert other["noised"] == (["KeyboardInterrupt: ", "made"], moved, 2)
    said, moved, charged = first["_move"]
    assert said[0] == "made"
    assert "steps must be equal on all ranks" in said[1]
    assert moved == [True, True]  # by the first step alone
    assert other["_move"][0][0] == "KeyboardInterrupt: "
    assert "steps must be equal on all ranks" in other["_move"][0][1]
    assert other["_move"][1] == [False, False]
    assert charged == other["_move"][2] == 1


def test_ranks_with_other_parts_or_models_are_refused_on_all(tmp_path: Path) -> None:
    (first, used), (other, own) = launch(swapped, 2, tmp_path)
    assert "parameters must be equal on all ranks" in first
    assert first == other
    assert "rank 1 has given this construction up" in used
    assert "model must be sharded once, and before its first forward" in own


def test_a_rank_that_fails_moves_no_shard_and_the_ledger_knows(tmp_path: Path) -> None:
    ranks = launch(failing, 2, tmp_path, str(tmp_path))
    found = ("rows of rank 1", "moved weights", "exchanged weights")
    before = dict.fromkeys(found, 0)  # all ranks find out before they charge
    for fault in FAULTS:
        for rank, run in enumerate(ranks):
            assert not run[fault]["moved"], fault
            refused = fault == "charge of rank 1" and rank == 1
            assert run[fault]["charged"] == (0 if refused else before.get(fault, 1)), fault
            assert run[fault]["filed"] == run[fault]["charged"]
        assert "given this step up" in ranks[0][fault]["said"] or before.get(fault, 1), fault


@pytest.mark.parametrize(("where", "charged"), [("forward", 0), ("noise", 1)])
def test_a_rank_that_dies_ends_the_other(where: str, charged: int, tmp_path: Path) -> None:
    set_forkserver_preload(["torch_dpsco", "pytest", "scipy.stats"])
    args = (dying, 2, str(tmp_path), (str(tmp_path), where))
    running = start_processes(run_rank, args, nprocs=2, join=False, start_method="forkserver")
    end = time.monotonic() + SECONDS
    while not running.join(timeout=1.0):
        if time.monotonic() > end:
            for process in running.processes:
                process.kill()
            pytest.fail("a rank hangs")
    found = torch.load(tmp_path / "0")
    assert found["charged"] == found["filed"] == charged
    assert not found["moved"]


WORDS_OF = {
    "clip at the iterate": "oracle must be Clipped",
    "full batches": "design must be Poisson",
    "allocated": "design must be Poisson",
    "average": "without an average",
    "another rule": "rule must be SGD, Momentum or AdamBC",
    "prox": "prox must be None",
    "reg": "reg must be 0",
    "exact": "secure must be None",
    "some shards": "all of them",
    "shards and others": "all of them",
    "checked": "check_first_step=False",
    "plain": "model must be attached",
    "tied": "each trained weight must be in one layer",
    "dense": "each trained weight must be in one layer",
    "layers": "layers must have no weight in common",
    "others": "layers must be modules inside of the model",
    "twice": "model must be sharded once",
    "other weights": "parameters must be equal on all ranks",
    "its weights": "params must be whole",
    "default isolation": "as many batches on every rank",
    "no isolation": "as many batches on every rank",
    "own records": "shard= needs whole parameters",
    "fit": "model must not be sharded",
    "detach": "a model in shards must stay attached",
    "doctor": "model must not be sharded",
    "copy": "a copy needs whole parameters",
    "public": "dp.public needs whole parameters",
    "plain step": "a plain optimizer must not step",
    "parts": "a draw in parts (BatchMemoryManager) needs whole parameters",
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[str, int]]]:
    return launch(refusals, 2, tmp_path_factory.mktemp("refused"))


def test_what_needs_whole_vectors_is_refused_by_name_before_a_charge(refused: Any) -> None:
    for found in refused:
        assert found.keys() == WORDS_OF.keys()
        for name, (said, charged) in found.items():
            assert WORDS_OF[name] in said, (name, said)
            assert not charged, name


def test_a_model_in_shards_stays_attached(refused: Any) -> None:
    assert all(found["detach"][0].startswith("SequenceError: a model in") for found in refused)


def test_a_gradient_that_is_no_row_is_refused_and_stays_on_its_rank(tmp_path: Path) -> None:
    for found in launch(leaking, 2, tmp_path):
        assert found.keys() == {"term", "eval", "nothing dropped"}
        assert all(dropped for _, dropped in found.values())


def test_the_page_shows_a_run(tmp_path: Path) -> None:
    for found in launch(shown, 2, tmp_path):
        assert found["steps"] == found["charged"] == 4
        assert "2 processes that trust each other" in found["said"]


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"model": "net"}, "model"),
        ({"layers": 3}, "layers"),
        ({"layers": ["head"]}, "layers"),
        ({"timeout": 20.0}, "timeout"),
    ],
)
def test_wrong_types_are_refused_by_name(wrong: dict[str, Any], field: str) -> None:
    given = {"model": attached(), "layers": [], "timeout": WAIT}
    with pytest.raises((TypeError, ValueError), match=field):
        fsdp.fully_shard(**(given | wrong))


def test_one_process_needs_no_shards() -> None:
    with pytest.raises(SequenceError, match="several processes"):
        fsdp.fully_shard(attached())
