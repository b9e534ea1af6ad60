"""`fully_shard` (FSDP 2) for private runs: each process keeps its part of the parameters and of the rule's state.

    model = dp.attach(model, check_first_step=False)  # on every rank, the whole model
    optimizer = dp.ClippedSGD(fully_shard(model), plan)  # after init_process_group
    loader = optimizer.loader(dataset, isolation="slots")

The layers run under FSDP, which puts their whole weights together for each forward and backward. A backward leaves rows
of whole layers, so that norms and clips are those of one process, and gives FSDP no gradient to reduce. The optimizer
trains this rank's parts alone, plain parameters in the memory of FSDP's shards:

    1 each rank clips and adds the rows of its own records
    2 all compare step, draw, settings and ledger, and charge, as without shards (`step.distributed`)
    3 of the sums, part r goes to rank r alone, which adds it up, draws its noise, and moves its shard

Each forward waits for all ranks. So a draw comes in a public number of batches of a public size on every rank (slots),
whether or not the rank has records in them. Weights travel in a process group of their own, so that a rank in a forward
and one in a step cannot take one message for another.

Guarantee: that of a run of several processes without shards: the same rows, sums, event and noise, each number of which
is drawn once, by the rank that holds its coordinate (label = rank, counter = place in the shard). Weights are public;
what they are put together for tells nothing, since all ranks make the same forwards. Should ranks take weights of one
layer for those of another, as after an error in a forward, rows are still those of public weights, and clipped.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh

from torch_dpsco._validate import typed
from torch_dpsco.accounting.designs import Poisson
from torch_dpsco.compat import backward_number
from torch_dpsco.errors import SequenceError
from torch_dpsco.noise import SliceStream, Source
from torch_dpsco.prox import Identity
from torch_dpsco.rows.attach import is_attached
from torch_dpsco.rows.batch import OWNERS, Owners, attachments
from torch_dpsco.rows.layers.recorded import is_recorded, require_whole
from torch_dpsco.rules import SGD, AdamBC, Momentum
from torch_dpsco.step.distributed import Group, Ranks, digest, read_bytes
from torch_dpsco.step.oracle import Clipped, ClippedMean

_PAGE = "see docs/distributed.md#shards-of-the-model"
_WHOLE = f"to be sharded: give every process the whole model, without fully_shard ({_PAGE})"
_NUMBERS = itertools.count()  # of the models that are sharded, the same on all ranks


@typed
def fully_shard(
    model: nn.Module, layers: Sequence[nn.Module] = (), *, timeout: timedelta | None = None
) -> list[nn.Parameter]:
    """Shards an attached model, in place, and returns what a private optimizer trains: this rank's part of each weight.

    Collective: call it on every rank, after `init_process_group`.

    Args:
        model: attached with check_first_step=False; its trained weights are in layers that record their own rows.
        layers: modules inside whose weights are put together one after another, so that no rank holds all of them at
            once, as the blocks of a transformer; default the children of the model.
        timeout: until a rank that waits in a forward for another one raises; default that of torch.

    Raises:
        SequenceError: one process, or, on all ranks: a model that is not attached as above or was used, other weights
            on some rank, trained weights that are shared or in layers without own rows, layers that share a weight.
    """
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        raise SequenceError(
            "fully_shard needs several processes: call init_process_group before"
        )
    if not is_attached(model):
        raise SequenceError(
            "model must be attached: call dp.attach(model, check_first_step=False) on every rank"
        )
    attachment: Any = model._dpsco
    device = attachment.params[0].device
    names = {m: name for name, m in model.named_modules()}
    together: list[nn.Module] = []
    problem = ""
    try:
        _require_fit(model, attachment)
        together = _together(names, layers or [*model.children()])
    except (SequenceError, ValueError) as error:
        problem = str(error)
    params = [] if problem else list(model.parameters())
    weights = [digest(p.shape, p.requires_grad, read_bytes(p)) for p in params]
    # else ranks would put parts of different models together, or wait for different layers
    Group(device).compare(
        "construction",
        problem,
        settings=digest(*(names[m] for m in together)),
        parameters=digest(*weights),
        ledger=0,
        arithmetic=0,
    )
    group: Any = dist.new_group(timeout=timeout)
    mesh = DeviceMesh.from_group(group, device.type)
    for m in together:
        fsdp.fully_shard(m, mesh=mesh, reshard_after_forward=True)
    model.register_forward_pre_hook(_start_anew, prepend=True)
    return _taken_over(model, attachment)


def _start_anew(model: Any, args: Any) -> None:
    """Lets a forward begin with no layer's weights together: an error in the last backward may have left some so."""
    if model._dpsco.passes.number and backward_number() == -1:
        model.reset_iter_state()


def _together(names: dict[nn.Module, str], layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Returns the modules whose weights are put together one after another: inner ones before outer ones, all last.

    Args:
        names: of all modules of the model, itself the first.
        layers: as given.
    """
    if not names.keys() >= {*layers}:
        raise ValueError(
            "layers must be modules inside of the model (got others): name children of it, or"
            " modules inside of these"
        )
    model = next(iter(names))
    called = [m for layer in layers for m in _called(layer)]
    inner = sorted(dict.fromkeys(called), key=lambda m: names[m].count("."), reverse=True)
    found = [m for m in inner if m is not model and list(m.parameters())] + [model]
    held: dict[nn.Module, nn.Module] = {}
    for outer in found:
        for m in outer.modules():
            held.setdefault(m, outer)
    homes: dict[Tensor, nn.Module] = {}
    for m, outer in held.items():
        for name, p in m._parameters.items():
            if p is not None and homes.setdefault(p, outer) is not outer:
                raise ValueError(
                    f"layers must have no weight in common (got {name!r} of {names[m]!r}): name a"
                    " module that has all uses of it inside, or none that has one"
                )
    return found


def _called(module: nn.Module) -> list[nn.Module]:
    """Returns a module, or those in a container that is never called itself."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return [m for child in module.children() for m in _called(child)]
    return [module]


def _require_fit(model: nn.Module, attachment: Any) -> None:
    if not hasattr(fsdp.FSDPModule, "reset_iter_state"):
        raise SequenceError(
            f"fully_shard needs a newer torch (got {torch.__version__}): 2.14.1 is tested"
        )
    if attachment.asked:
        raise SequenceError(
            "model must be attached with check_first_step=False, since shards cannot be copied for"
            " the check: dp.doctor, or a step of one process, looks at the same model"
        )
    if attachment.passes.number or attachment.cut:
        raise SequenceError(
            "model must be sharded once, and before its first forward: attach a new one, load the"
            " weights, and shard it"
        )
    for name, m in model.named_modules():
        require_whole(m, name)
        tape: Any = getattr(m, "tape", None)
        if is_recorded(m) and tape.trial is not None:
            raise ValueError(
                f"all trained layers must be of the library's own kinds (got {type(m).__name__} {name!r}),"
                f" which need no trial {_WHOLE}"
            )
    if attachment.dense:
        raise ValueError(
            "each trained weight must be in one layer, which records its own rows (got a weight of several"
            f" layers, or of one with Opacus' rows) {_WHOLE}"
        )
    if len(kinds := {str(p.dtype) for p in attachment.params}) > 1:
        raise ValueError(
            f"trained weights must be of one dtype (got {', '.join(sorted(kinds))})"
        )
    if any(OWNERS in p.__dict__ for p in model.parameters()):
        raise SequenceError(
            "model must be sharded before its optimizer is made, which trains what fully_shard"
            " returns"
        )


def _taken_over(model: nn.Module, attachment: Any) -> list[nn.Parameter]:
    """Returns the shards as plain parameters, to which rows and marks of the weights are led."""
    cut: dict[str, Any] = dict(model.named_parameters())
    whole: dict[str, Any] = {}
    for m in model.modules():
        if isinstance(m, fsdp.FSDPModule):
            # PRIVACY: no raw gradient leaves its rank, wherever one may come from
            # (test_a_gradient_that_is_no_row_is_refused_and_stays_on_its_rank)
            m.set_requires_gradient_sync(False)
            m.unshard()  # makes the whole weights of its layers, which FSDP keeps as objects
            now = model.named_parameters()
            whole |= {name: p for name, p in now if p is not cut[name]}
            m.reshard()
    shards: list[nn.Parameter] = []
    number = next(_NUMBERS)
    for name, p in cut.items():
        if not p.requires_grad:
            continue
        shard = nn.Parameter(p.data.to_local().detach())
        shard.dpsco_world = Shards  # type: ignore[attr-defined]
        shard.dpsco_whole = p  # type: ignore[attr-defined]
        shard.dpsco_name = number, name  # type: ignore[attr-defined]
        whole[name].dpsco_shard = shard
        owned = Owners()  # so that whoever asks for the run of a weight finds that of its shard
        for t in (shard, p, whole[name]):
            t.__dict__[OWNERS] = owned
        shards.append(shard)
    attachment.cut = (*shards, *cut.values(), *whole.values())
    attachment.watched = ("_buffers",)  # the weights of a layer are exchanged within its forward
    attachment.params = [t for t in attachment.cut if t.requires_grad]
    attachment.hook_parameters()
    return shards


def _parts(whole: Sequence[Tensor], rank: int, processes: int) -> Iterator[Tensor]:
    """Yields the parts of one rank, cut as FSDP cuts: the first dimension in equal pieces, the last ones smaller."""
    for t in whole:
        size = -(-len(t) // processes)
        yield t[rank * size : (rank + 1) * size]


class Shards(Ranks):
    """The ranks of a run whose parameters are shards."""

    query: list[Tensor]

    def begin(self, run: Any) -> None:
        """Raises SequenceError for a run that reads whole vectors; else as `Ranks.begin`."""
        self._params = run._params
        if problem := _problem(run):
            raise SequenceError(f"{problem} in a run on shards ({_PAGE})")
        self._require_shared()
        self.own = {"shards": f"{self._group.rank} of {self._group.processes}"}
        # in no memory; a clip that is fixed reads no values
        self.query = [p.new_zeros(()).expand(p.dpsco_whole.shape) for p in self._params]
        super().begin(run)

    def _require_shared(self) -> None:
        there = [p.dpsco_whole._local_tensor for p in self._params]
        moved = [t.data_ptr() != p.data_ptr() for t, p in zip(there, self._params, strict=True)]
        for attachment in attachments(self._params):
            known = {id(t) for t in attachment.cut}
            moved += [id(q) not in known for q in attachment.layers[0].parameters()]
        if any(moved):
            raise SequenceError(
                "weights of a sharded model must stay where they are (got ones that were moved or"
                " exchanged, by model.to or load_state_dict(assign=True)): load them before"
                " fully_shard"
            )

    def require_whole(self, what: str) -> None:
        """Raises SequenceError for what needs whole vectors."""
        raise SequenceError(
            f"{what} needs whole parameters, and must be left out in a run on shards ({_PAGE})"
        )

    def sampler(self, run: Any, *args: Any, shard: bool = False, **options: Any) -> Any:
        """Refuses records of each rank's own, whose batches may differ in size; else as `Ranks.sampler`."""
        if shard:
            self.require_whole("shard=")
        return super().sampler(run, *args, **options)

    def require_own_draws(self, loader: Any) -> None:
        """As `Ranks.require_own_draws`, and lets all draws come in a public number of batches."""
        super().require_own_draws(loader)
        isolation: Any = getattr(loader, "isolation", None)
        slots = getattr(isolation, "slots", None)
        if slots is None or isolation.open:
            raise SequenceError(
                "each draw must be as many batches on every rank: use optimizer.loader(dataset,"
                " isolation='slots')"
            )
        # PRIVACY: every batch is a forward, which all ranks see (test_the_number_of_forwards_is_public)
        slots.public = True

    def common(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns rank 0's checkpoint, whose ledger is that of the file, with what this rank's rule has kept."""
        if len({int(steps) for steps in self._group.gather(torch.tensor([state["steps"]]))}) > 1:
            raise SequenceError(
                "state_dict must be of the same step on all ranks: load the newest one that all have"
            )
        first: dict[str, Any] = self._group.send_object(state)
        return first | {"rule": state["rule"]}

    def agree(self, run: Any, draw: Any) -> None:
        """As `Ranks.agree`, for shards that are where they were."""
        self._require_shared()
        if self._params[0].dpsco.first.compiled:
            self.require_whole("torch.compile")
        if run._isolation.slots is None:
            self.require_whole("a draw in parts (BatchMemoryManager)")
        super().agree(run, draw)

    def _whole(self, run: Any) -> dict[str, Any]:
        # shards are different by design, but each must be of the same weight, in the same group
        weights = [
            (i, p.dpsco_name) for i, g in enumerate(run.param_groups) for p in g["params"]
        ]
        return {**super()._whole(run), "parameters": digest(*weights)}

    def _answer(self, oracle: ClippedMean, noise: Source | None) -> list[Tensor]:
        """Adds part r of all sums up on rank r, which noises it; without `noise` this rank has failed."""
        group = self._group
        mine = self._reduced(oracle, charged=noise is not None)
        bits = SliceStream(group.rank)
        answer: Tensor | None = None
        try:
            self._send_key(bits, mine[:2], oracle, noise)
            # PRIVACY: a sum that gets no noise goes nowhere
            # (test_a_rank_that_fails_moves_no_shard_and_the_ledger_knows)
            if noise is not None and bits.key.any():
                answer = oracle.noised(mine[2:], bits)
        finally:
            bits.erase()
            mine.zero_()
            said = group.exchange("release", ready=answer is not None)
        if answer is None or any(row[:2] != said[group.rank][:2] for row in said):
            raise SequenceError(
                "a rank could not charge or release this step, so that no rank makes it: see its"
                " error"
            )
        parts = answer.to(self._device).split([p.numel() for p in self._params])
        return [part.view(p.shape) for part, p in zip(parts, self._params, strict=True)]

    def _reduced(self, oracle: ClippedMean, *, charged: bool) -> Tensor:
        """Returns this rank's part of the sum, behind two numbers for rank 0 alone: ranks that charged, and rows."""
        group = self._group
        total = torch.zeros(oracle._dim, dtype=torch.float64, device=group.device)
        rows = oracle.write_sum(total) if charged else 0
        oracle.discard()
        mine = total.new_zeros(0)
        head = total.new_tensor([float(charged), float(rows)])
        for rank in range(group.processes):
            parts = _parts(oracle.views(total), rank, group.processes)
            flat = [part.reshape(-1) for part in parts]
            message = torch.cat([head * (rank == 0), *flat])
            group.add_up(message, rank)
            if rank == group.rank:
                mine = message
            else:
                message.zero_()
        total.zero_()
        return mine


def _problem(run: Any) -> str:
    """Returns what of a run needs whole vectors, "" if nothing does."""
    held = run._run
    whole = {
        "oracle must be Clipped, at a fixed clip": type(held.oracle) is Clipped,
        "rule must be SGD, Momentum or AdamBC without an average": (
            type(held.rule) in (SGD, Momentum, AdamBC) and held.rule.average == "last"
        ),
        "design must be Poisson batches": type(held.design) is Poisson,
        "prox must be None": isinstance(held.prox, Identity),
        "reg must be 0": not held.reg,
        "secure must be None": held.secure is None,
        "the schedule must have one phase": len(held.schedule.phases) == 1,
        "params must be what fully_shard returned, all of them": (
            {id(p) for p in run._params} == _shards_beside(run._params)
        ),
    }
    for what, right in whole.items():
        if not right:
            return what
    return ""


def _shards_beside(params: Sequence[nn.Parameter]) -> set[int]:
    """Returns the shards, by their ids, of all models of which some are given."""
    beside = (p for attachment in attachments(params) for p in attachment.params)
    return {id(p) for p in beside if hasattr(p, "dpsco_whole")}
