"""Several processes, one private run: each clips and sums its own rows, and draws the noise of its own coordinates.

What the ranks of a run tell each other: one call of torch.distributed for each thing, compared before it is used.

Every rank makes the same calls in the same order. Each comparison starts with the name of the call, so that ranks at
different places of a script find out instead of taking one message for another.

In a torch.distributed process group of W > 1 ranks (the default one) every rank runs the same script,
with the whole data set, and its optimizer joins the others by itself. One step:

    1 each rank takes the rows of its part of the draw (`sampling.RankSampler`), clips and adds them
    2 all ranks compare step, draw, settings, clip, noise and ledger (`agreement`); a rank that failed says so
    3 every rank charges the same event to its own ledger
    4 the sums are added in float64, a slice on each rank, which adds the noise to it by a key that rank 0 has drawn
      for this release, and every rank gets the noisy mean
    5 every rank makes the same update, so that the models stay equal to the last bit

A rank that fails in 1 takes part in 2, one that fails in 3 in 4, and then all ranks raise and discard the batch, so
that none waits for a sum that does not come. A rank that has died breaks the connection, and the others raise too.

Guarantee: that of the optimizer in one process, with the same event: the union of the draws is a draw of the design,
the sum over ranks is that of one process up to roundings that the declared error covers (`ClippedMean.share`), and the
noise is that of one process. The ranks trust each other: partial sums without noise and the keys of noise and batches
pass between them, unencrypted, as torch.distributed sends them. Assumes that every rank reads the same records in the
same order; for data in memory that is compared. Each may have a shard instead, records of its own: then each record is
on one rank, which does not depend on its values; where records have ids, that none is on two is compared. Users are on
one rank with all their records, which is compared; their clipped means are added as rows are.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from torch_dpsco import native
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.designs import Assigned, Draw
from torch_dpsco.errors import PrivacyError, SequenceError, UnitError, UnknownSamplerError
from torch_dpsco.noise import SliceStream, Source, sampling_key, stream_of
from torch_dpsco.sampling import (
    DesignSampler,
    Partition,
    RankAssignedSampler,
    RankSampler,
    RecordIds,
    require_divisible,
)
from torch_dpsco.sampling.samplers import SEVERAL, SPREAD
from torch_dpsco.step.checks import World
from torch_dpsco.step.oracle import ClippedMean, MeanOracle, Release

_READ_ROWS = 1024  # of a data set in memory are compared over the ranks, at equal distances

# what is compared in each collective call
_CALLS = {
    "construction": ("settings", "parameters", "ledger", "arithmetic"),
    "loader": ("steps", "data"),
    "step": ("settings", "steps", "draw", "charges", "mechanism"),
    "release": (),
    "finalize": ("settings", "steps", "parameters", "ledger"),
}
# and what to do where it differs
_ADVICE = {
    "settings": "make the optimizer with the same arguments on every rank",
    "parameters": (
        "build the model after the same torch.manual_seed on every rank, or load the same weights,"
        " and write to the parameters on all ranks or none"
    ),
    "ledger": (
        "give every rank a new Accountant with the same arguments, rank 0 alone one with a ledger"
        " file, and charge nothing on some ranks only"
    ),
    "arithmetic": (
        "install the same builds of torch and torch_dpsco, the accelerator included, on every rank"
    ),
    "steps": (
        "give the same steps= on every rank, call optimizer.step() for every batch on every rank,"
        " and load a checkpoint on all of them"
    ),
    "data": (
        "give every rank the whole data set, its records in the same order, or shard= (and record_ids=) on"
        " all ranks"
    ),
    "draw": "iterate over the loader and call optimizer.discard() in the same way on every rank",
    "charges": "charge nothing on some ranks only",
    "mechanism": (
        "set lr in the same way on every rank, and write to the parameters on all of them or none"
    ),
}
_WIDTH = 2 + max(map(len, _CALLS.values()))


class Group:
    """The process group, seen from one of its ranks.

    Args:
        device: of the parameters.

    Raises:
        SequenceError: the group cannot send tensors of that device, nor of the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.rank = dist.get_rank()
        self.processes = dist.get_world_size()
        self.first = self.rank == 0
        self.device = _device_of_messages(device)

    def compare(self, call: str, problem: str = "", **values: int) -> None:
        """Raises SequenceError, on all ranks, unless all make this call, are ready for it and give the same values.

        Args:
            call: its name, see `_CALLS`.
            problem: why this rank is not ready, if it is not.
            values: 64-bit integers, by the names in `_CALLS`.
        """
        given = [values[name] for name in _CALLS[call]]
        table = self.exchange(call, ready=not problem, values=given)
        if problem:
            raise SequenceError(problem)
        for rank, (number, ready, *_) in enumerate(table):
            other = list(_CALLS)[number]
            if other != call:
                raise SequenceError(
                    f"all ranks must make the same calls in the same order (rank {rank} is in a"
                    f" {other}, rank {self.rank} in a {call}): run the same script on every rank"
                )
            if not ready:
                raise SequenceError(
                    f"rank {rank} has given this {call} up, so that no rank makes it: see its error"
                )
        for place, name in enumerate(_CALLS[call], start=2):
            others = [rank for rank, row in enumerate(table) if row[place] != table[0][place]]
            if others:
                raise SequenceError(
                    f"{name} must be equal on all ranks (rank {others[0]} differs from 0):"
                    f" {_ADVICE[name]}"
                )

    def exchange(self, call: str, *, ready: bool, values: Sequence[int] = ()) -> list[list[int]]:
        """Returns what each rank says: the number of the call, whether it is ready, and the values to compare."""
        said = [list(_CALLS).index(call), int(ready), *values]
        message = torch.zeros(_WIDTH, dtype=torch.int64)
        message[: len(said)] = torch.tensor(said)
        return [row.tolist() for row in self.gather(message)]

    def gather(self, message: Tensor) -> list[Tensor]:
        """Returns the messages of all ranks, which have one shape."""
        message = message.to(self.device)
        table = [torch.empty_like(message) for _ in range(self.processes)]
        self._call(dist.all_gather, table, message)
        return table

    def send(self, message: Tensor, of: int = 0) -> None:
        """Overwrites a message by that of one rank, wherever it is."""
        there = message.to(self.device)
        self._call(dist.broadcast, there, src=of)
        if there is not message:
            message.copy_(there)
            there.zero_()  # a key, maybe

    def send_object(self, thing: Any) -> Any:
        """Returns the thing of rank 0."""
        things = [thing]
        self._call(dist.broadcast_object_list, things, src=0, device=self.device)
        return things[0]

    def add_up(self, message: Tensor, to: int = 0) -> None:
        """Leaves the sum of the messages of all ranks on one of them, and nothing of use on the others."""
        self._call(dist.reduce, message, dst=to)

    def _call(self, function: Callable[..., Any], *args: Any, **options: Any) -> None:
        try:
            function(*args, **options)
        except (RuntimeError, ValueError) as error:
            raise SequenceError(
                f"the other ranks cannot be reached, one may have ended or failed: {error}"
            ) from error


def _device_of_messages(device: torch.device) -> torch.device:
    backends = dict(part.split(":") for part in str(dist.get_backend_config()).split(","))
    if device.type != "cpu" and backends.get(device.type, "gloo") != "gloo":
        return device
    if "cpu" not in backends or backends["cpu"] == "nccl":
        raise SequenceError(
            f"the process group must have a backend for {device.type} tensors, e.g. gloo"
        )
    return torch.device("cpu")


def digest(*things: Any) -> int:
    """Returns 64 bits of the SHA-256 of bytes, and of other things as they print, as a signed integer."""
    found = hashlib.sha256()
    for thing in things:
        content = thing if isinstance(thing, bytes) else repr(thing).encode()
        found.update(len(content).to_bytes(8, "little") + content)
    return int.from_bytes(found.digest()[:8], "little", signed=True)


def read_bytes(tensor: Tensor) -> bytes:
    """Returns the numbers of a tensor, bit by bit."""
    flat = tensor.detach().cpu().reshape(-1).clone()  # one number after the other
    numbers: bytes = flat.view(torch.uint8).numpy().tobytes()
    return numbers


def sight(dataset: Dataset[Any]) -> Iterator[Any]:
    """Yields what shows the order of records without reading many: rows in memory, positions of a Subset, the size."""
    yield type(dataset).__name__
    yield len(dataset)  # type: ignore[arg-type]
    if isinstance(dataset, Subset):
        yield np.asarray(dataset.indices).tobytes()
        yield from sight(dataset.dataset)
    elif isinstance(dataset, TensorDataset):
        for tensor in dataset.tensors:
            yield tensor.shape
            yield read_bytes(tensor[:: max(1, len(tensor) // _READ_ROWS)])


_LEAST = 2**16  # numbers of a slice, of which the noise costs less than a message

# where a step is, and so what the other ranks wait for: nothing yet, this rank's call, its sum
_COLLECTING = "collecting"
_CALLING = "calling"
_AGREED = "agreed"


class Ranks(World):
    """The ranks of the process group.

    Args:
        device: of the parameters.
    """

    alone = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._group = Group(device)
        self._settings: int | None = None
        self._stage = _COLLECTING
        self._sampler: DesignSampler | None = None  # whose key these ranks have drawn

    def begin(self, run: Any) -> None:
        """Raises SequenceError unless all ranks have the same settings, parameters and ledger.

        A rank with an empty ledger takes that of rank 0 over, which may come from a ledger file.
        """
        self._share(run)
        problem = self._take_ledger(run.accountant)
        # PRIVACY: another rank must read a record alike (test_what_ranks_cannot_share_is_refused_on_all)
        here = digest(torch.__version__, native.arithmetic())
        self._group.compare("construction", problem, arithmetic=here, **self._whole(run))

    def _share(self, run: Any) -> None:
        if not isinstance(run.design, Assigned) or not run.design.amplification:
            require_divisible(run.design)
        oracle = run.oracle.adding()
        if oracle is None:
            kind = type(getattr(run.oracle, "clipping", run.oracle)).__name__  # of users' means
            # PRIVACY: counts, votes or groups of one rank's rows would be taken for those of the batch
            # (test_oracles_that_do_more_than_add_rows_are_refused)
            raise SequenceError(
                "oracle must be Clipped, HolderClipped or AutoClip in a run of several processes,"
                " whose releases are sums of rows, or of users' means (UserClippedSGD with clip=),"
                f" with noise of a fixed multiplier (got {kind}): run it in one process,"
                " as users who vote on clips, or are filtered or localized"
            )
        if oracle is not run.oracle:
            require_divisible(run.design)
        oracle.share(self._group.processes)

    def _take_ledger(self, accountant: Accountant) -> str:
        """Returns what is wrong with this rank's ledger, if anything is."""
        journal = accountant._journal
        state, filed = self._group.send_object(
            (accountant.state_dict(), journal.file is not None) if self._group.first else None
        )
        if self._group.first:
            return ""
        if journal.file is not None:
            return (
                "ledger_path must be given on rank 0 only: all ranks charge the same events, which"
                " are written once"
            )
        try:
            if (state["ledger"] or filed) and not len(accountant):
                accountant.load_state_dict(state)
                if filed:
                    journal.follow(state["id"])
        except (PrivacyError, ValueError) as error:
            return f"the ledger of rank 0 cannot be taken over: {error}"
        return ""

    def compare_data(
        self,
        dataset: Dataset[Any],
        steps: int | None,
        *,
        own: str = "",
        counted: bool = True,
        problem: str = "",
    ) -> int:
        """Raises SequenceError where the data set of a rank has another size or, as far as one can see, order."""
        # PRIVACY: two ranks would draw a record that is at different places
        # (test_ranks_with_records_in_another_order_are_refused)
        data = digest("own records", own) if own else digest(*sight(dataset))
        self._group.compare("loader", problem, steps=-1 if steps is None else steps, data=data)
        records: int = len(dataset)  # type: ignore[arg-type]
        # PRIVACY: under add_remove neither the records of a rank nor those of all ranks are a public number
        # (test_under_add_remove_no_rank_tells_how_many_records_it_has)
        if not own or not counted:
            return records
        return sum(
            row[2] for row in self._group.exchange("loader", ready=True, values=[records])
        )

    def _require_own_ids(self, ids: RecordIds, key: bytes, users: int | None = None) -> None:
        """Raises UnitError, on all ranks, if two records have one id, wherever they are.

        Args:
            ids: of the records of this rank.
            key: 32 secret bytes of all ranks.
            users: where ids are those of users, who have several records on one rank: how many there are at most.
        """
        group = self._group
        mine = torch.from_numpy(ids.digests(key).copy())
        if users is not None:
            mine = mine.unique(dim=0)
        counts = [row[2] for row in group.exchange("loader", ready=True, values=[len(mine)])]
        filling = mine.new_zeros(max(counts) - len(mine), 2)
        digests = group.gather(torch.cat([mine, filling]))
        every = torch.cat([table[:count] for table, count in zip(digests, counts, strict=True)])
        if len(every.unique(dim=0)) < len(every):
            # PRIVACY: a record, or a user, that two ranks hold moves a sum by two clips
            # (test_a_record_of_two_ranks_is_refused, test_a_user_of_two_ranks_is_refused)
            raise UnitError(SEVERAL if users is None else SPREAD)
        if users is not None and len(every) > users:
            raise UnitError(f"users of all ranks must be at most n={users} (got more)")

    def sampler(
        self,
        run: Any,
        size: int,
        steps: int | None,
        resume: Partition | None,
        ids: Any = None,
        *,
        shard: bool = False,
    ) -> DesignSampler:
        """Returns the sampler of this rank's positions, or own records, with a key that rank 0 draws."""
        self._share(run)
        group = self._group
        fresh = sampling_key() if resume is None else resume.cut.tobytes()[:32]
        key = torch.tensor(list(fresh), dtype=torch.uint8)
        group.send(key)
        secret = bytes(key.tolist())
        if ids is not None and not shard and not isinstance(run.design, Assigned):
            raise UnknownSamplerError(
                "design must be Assigned for draws by ids: sampling='allocated' (got"
                f" {run.design}); give shard= where each rank has records of its own"
            )
        if ids is not None:
            self._require_own_ids(
                ids, secret, run.design.n if run.oracle.unit == "user" else None
            )
        place: dict[str, Any] = {
            "rank": group.rank,
            "processes": group.processes,
            "key": secret,
            "size": size,
            "steps": steps,
            "own": shard,
        }
        if isinstance(run.design, Assigned):
            self._sampler = RankAssignedSampler(
                run.design, **place, resume=resume, record_ids=ids
            )
        else:
            self._sampler = RankSampler(run.design, **place)
        return self._sampler

    def require_own_draws(self, loader: Any) -> None:
        """Refuses loaders that were not made by `optimizer.loader` in this process."""
        sampler = getattr(loader, "batch_sampler", loader)
        # PRIVACY: ranks that draw from all positions could draw a record twice, and so could ranks that have not
        # agreed on what each of them has (test_a_sampler_of_all_positions_is_refused,
        # test_a_sampler_of_a_shard_that_these_ranks_have_not_agreed_on_is_refused)
        if sampler is None or sampler is not self._sampler:
            raise UnknownSamplerError(
                "loader must draw this rank's positions in a run of several processes (got"
                f" {type(sampler).__name__}): use optimizer.loader(dataset) on every rank"
            )

    def agree(self, run: Any, draw: Draw) -> None:
        """Raises SequenceError on all ranks if one has failed, or is at another step or draw, or has other settings."""
        adding = run.oracle.adding()
        if adding is None or adding.processes != self._group.processes:
            raise SequenceError(
                "batches must come from optimizer.loader(dataset), called in this process group"
            )
        self._stage = _CALLING
        # PRIVACY: else sums of different steps, or of rows clipped differently, would be added
        # (test_ranks_at_different_steps_are_refused)
        self._group.compare(
            "step",
            settings=self._digest_of_settings(run),
            steps=digest(run.steps, run._progress.stills),
            draw=draw.index,
            charges=len(run.accountant),
            mechanism=digest(
                run.oracle.event(),
                run.oracle.metrics(),
                [group["lr"] for group in run.param_groups],
            ),
        )
        self._stage = _AGREED

    def release(self, oracle: MeanOracle, noise: Source) -> Release:
        """Returns the noisy mean; raises SequenceError on all ranks if one could not charge it."""
        summed = oracle.summed()
        self._stage = _CALLING
        answer = Release(self._answer(summed, noise))
        oracle.discard()
        self._stage = _COLLECTING
        return answer

    def _answer(self, oracle: ClippedMean, noise: Source | None) -> list[Tensor]:
        """Adds the sums of all ranks up and noises them, a slice on each rank.

        Without `noise` this rank has failed, and so has the step.
        """
        group = self._group
        # ranks that have charged, rows, sum
        message = torch.zeros(oracle._dim + 2, dtype=torch.float64, device=group.device)
        if noise is not None:
            message[1] = oracle.write_sum(message[2:])
            message[0] = 1
        answer = torch.full_like(message, math.nan, dtype=oracle._dtype)
        width = max(_LEAST, -(-len(message) // group.processes))
        sums = message.split(width)
        slices = answer.split(width)
        bits = SliceStream(group.rank)
        for rank, part in enumerate(sums):
            group.add_up(part, rank)
        try:
            self._send_key(bits, message[:2], oracle, noise)
            # PRIVACY: a sum that gets no noise goes nowhere (test_a_rank_that_cannot_charge_is_sent_no_sum)
            if bits.key.any() and group.rank < len(sums):
                # PRIVACY: drawn once, on one rank (test_noise_of_every_rank_is_caught)
                slices[group.rank].copy_(oracle.noised(sums[group.rank], bits))
        finally:
            bits.erase()
            message.zero_()
            for rank, part in enumerate(slices):
                group.send(part, rank)
        # PRIVACY: a slice without noise is NaN (test_a_rank_that_cannot_make_noise_makes_all_raise)
        if answer[::width].isnan().any():
            raise SequenceError(
                "a rank could not charge or release this step, so that no rank makes it: see its"
                " error"
            )
        return oracle.views(answer[2:].to(self._device))

    def _send_key(
        self, bits: SliceStream, head: Tensor, oracle: ClippedMean, noise: Source | None
    ) -> None:
        """Gives all ranks the key that rank 0 draws for this release, of zeros if a rank has not charged.

        Args:
            bits: to which it is written.
            head: on rank 0: how many ranks have charged, and the rows of all.
            oracle: of the sum.
            noise: of this rank; None if it has failed.
        """
        group = self._group
        try:
            if group.first and noise is not None and head[0] == group.processes:
                oracle.require_rows(int(head[1]))
                # PRIVACY: they are in the slice (test_how_many_rows_there_are_is_told_to_nobody_but_rank_0)
                head.zero_()
                stream_of(noise).fill(bits.key.numpy().data)
        except BaseException:
            # PRIVACY: others would draw by a part of it (test_without_a_key_of_rank_0_nobody_draws)
            bits.key.zero_()
            raise
        finally:
            group.send(bits.key)

    def failed(self, run: Any, *, in_progress: bool) -> None:
        """Takes part in the call that the others wait in, and says that this rank has failed."""
        stage = self._stage
        self._stage = _COLLECTING
        with suppress(
            RuntimeError
        ):  # where the group is broken they fail by themselves; the caller raises its error
            if stage == _AGREED:
                adding = run.oracle.adding()
                assert adding is not None
                self._answer(adding, None)
            elif stage == _COLLECTING and in_progress:
                self._group.exchange("step", ready=False)

    def end(self, run: Any) -> None:
        """Raises SequenceError unless all ranks have made the same steps and have the same parameters and ledger."""
        self._group.compare("finalize", steps=run.steps, **self._whole(run))

    def _whole(self, run: Any) -> dict[str, Any]:
        ledger = run.accountant
        tensors = [
            part
            for g in run.param_groups
            for p in g["params"]
            for part in (p.shape, read_bytes(p))
        ]
        return {
            "settings": self._digest_of_settings(run),
            "parameters": digest(*tensors),
            "ledger": digest(
                ledger.ledger.digest(), ledger.adjacency, ledger.unit, ledger.budget
            ),
        }

    def _digest_of_settings(self, run: Any) -> int:
        if self._settings is None:  # constants of the optimizer
            groups = [
                {key: value for key, value in g.items() if key not in ("params", "lr")}
                for g in run.param_groups
            ]
            self._settings = digest(
                type(run).__name__, json.dumps(run._run.settings(), sort_keys=True), groups
            )
        return self._settings
