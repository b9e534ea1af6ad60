"""What a private optimizer checks when it is built, before anything is spent; and the process of a run of one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, IterableDataset

from torch_dpsco import compat
from torch_dpsco._validate import positive_count, shown
from torch_dpsco.accounting.accountant import WAYS_ON, Accountant
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.calibrate import rounded_up
from torch_dpsco.accounting.designs import Assigned, Design, Draw, Parts, Poisson, Undeclared
from torch_dpsco.accounting.events import (
    ADD_REMOVE,
    REPLACE_ONE,
    ZERO_OUT,
    Adjacency,
    Event,
    check_adjacency,
)
from torch_dpsco.errors import (
    AdjacencyError,
    InfeasibleError,
    SequenceError,
    UnitError,
    UnknownSamplerError,
    outside,
    warn,
)
from torch_dpsco.noise import Source
from torch_dpsco.problem import Schedule
from torch_dpsco.rows.layers.recorded import require_whole
from torch_dpsco.sampling import (
    DesignSampler,
    Partition,
    RankAssignedSampler,
    RankSampler,
    make_sampler,
)
from torch_dpsco.step.oracle import MeanOracle, Phased, Release

_NOTHING = "params must hold a parameter that requires a gradient (got none)"


def check_call(closure: Any, users: Any = None) -> None:
    """Checks the types of the arguments of a step."""
    if closure is not None and not callable(closure):
        raise ValueError(f"closure must be a function or None (got {shown(closure)})")
    if users is not None and not isinstance(users, Tensor):
        raise ValueError(f"users must be a Tensor or None (got {shown(users)})")


def listed(params: Any) -> list[Any]:
    """Returns parameters, or groups of them, as a list; raises ValueError for anything else, a model for instance."""
    if isinstance(params, (Tensor, str, Mapping)) or not isinstance(params, Iterable):
        raise ValueError(
            "params must be parameters or groups of them, as model.parameters() (got"
            f" {shown(params)})"
        )
    items = list(params)
    for item in items:
        inner = item.get("params") if isinstance(item, dict) else [item]
        if isinstance(inner, Iterator):
            item["params"] = inner = list(inner)
        for p in (
            [inner] if isinstance(inner, Tensor) or not isinstance(inner, Iterable) else inner
        ):
            tensor = p[-1] if isinstance(p, tuple) and p else p
            if not isinstance(tensor, Tensor):
                raise ValueError(
                    f"params must hold tensors, as model.parameters() does (got {shown(p)})"
                )
            if isinstance(tensor, nn.UninitializedParameter):
                raise ValueError(
                    "params must have their shapes (got one of a lazy module): run the model once"
                    " on a made-up batch of the data's shape, model(torch.zeros(2, ...)), before"
                    " its optimizer is made"
                )
            if compat.is_sharded(tensor):
                raise ValueError(
                    f"params must be whole (got a shard, {type(tensor).__name__}): rows are clipped"
                    " and noised for whole parameters; give every process the whole"
                    " model, without FSDP or parallelize_module, or cut it by"
                    " torch_dpsco.integrations.fsdp.fully_shard, see docs/distributed.md"
                )
    if not items:
        raise ValueError(_NOTHING)
    return items


def number_of_records(dataset: Dataset[Any]) -> int:
    """Returns len(dataset); raises ValueError for a stream, from which no batch can be sampled."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ValueError(
            f"dataset must be map-style, to be sampled from (got {type(dataset).__name__}, without"
            " a length): dp.sampling.Spilled(stream) reads a stream once into private files"
        )
    return len(dataset)


def problem_of_shard(shard: int | None, held: int, adjacency: Adjacency, unit: str) -> str:
    """Returns why a data set cannot be taken as the shard of one of several processes, "" if it can.

    Args:
        shard: declared by the user.
        held: records, or users, that the data set has.
        adjacency: of the guarantee.
        unit: what is protected.
    """
    things = "records" if unit == "example" else f"{unit}s"
    if shard is None:
        # PRIVACY: users whose records are on several ranks would count once on each
        # (test_users_without_a_shard_are_refused_on_all_ranks,
        # test_users_need_a_shard_in_several_processes)
        return _UNSHARED if unit != "example" and world_size() > 1 else ""
    positive_count(shard=shard)
    if (
        adjacency != ADD_REMOVE and held > shard
    ):  # else it is private, and shard a reference, as n is
        return (
            f"shard must be how many {things} this process has at most (declared {shard}, the data"
            " set has more)"
        )
    return ""


_UNSHARED = (
    "shard must be given with users in a run of several processes, each of which has all records of"
    " users of its own: how many users it has at most"
)


def problem_of_users(users: int, design: Design, adjacency: Adjacency) -> str:
    """Returns why users with these numbers, 0 to users - 1, cannot be drawn, "" if they can."""
    if users <= design.n:
        return ""
    if adjacency != ADD_REMOVE:
        return f"users must be < n={design.n} (got a larger id, or more users)"
    return (
        f"users must be numbered below n={design.n}, the reference (got a larger id, or more"
        " users): number them without gaps, and give an n that is large enough"
    )


def one_device(params: Sequence[nn.Parameter]) -> torch.device:
    """Returns the device of the parameters; raises ValueError if they are on several, or not real floating tensors."""
    if not any(p.requires_grad for p in params):
        raise ValueError(_NOTHING)
    for p in params:
        if p.is_meta:
            raise ValueError(
                "params must hold values (got one on the meta device): give the model a device"
                " first"
            )
        if not p.is_floating_point():
            raise ValueError(f"params must be real floating tensors (got {p.dtype})")
    if len({id(p) for p in params}) < len(params):
        raise ValueError("params must hold each parameter once (got one twice)")
    devices = {p.device for p in params}
    if len(devices) != 1:
        raise ValueError(f"params must be on one device (got {sorted(map(str, devices))})")
    return devices.pop()


def agreed_adjacency(
    adjacency: Adjacency | None, accountant: Accountant | None, design: Design
) -> Adjacency:
    """Returns the adjacency of the guarantee; raises AdjacencyError if the accountant has another one."""
    usual = REPLACE_ONE if isinstance(design, Undeclared) else ZERO_OUT
    if accountant is None:
        return check_adjacency(adjacency or usual)
    accountant.settle(adjacency or usual)
    if adjacency is not None and adjacency != accountant.adjacency:
        raise AdjacencyError(
            f"adjacency must be {accountant.adjacency!r}, the accountant's (got {adjacency!r})"
        )
    return accountant.adjacency


def declared(design: Design | None, n: int | None, batch_size: int) -> Design:
    """Returns the given design, or Poisson batches of n records; without both warns that nothing is amplified."""
    if design is not None:
        if n is not None and n != design.n:
            raise ValueError(f"n must be {design.n}, that of the design (got {n})")
        return design
    if n is not None:
        return Poisson(batch_size, n)
    warn(
        "no sampling declared: every step is charged as an unsampled Gaussian under replace_one;"
        " give n= (Poisson batches from optimizer.loader(dataset)) to spend far less",
        stacklevel=3,
    )
    return Undeclared(batch_size)


def require_one_step(
    accountant: Accountant,
    adjacency: Adjacency,
    step: Event,
    what: str = "one step with this noise",
) -> None:
    """Checks that a step (or `what` is said) has a guarantee and fits the budget.

    Raises:
        PrivacyError: something was released under a planned budget, and the step was not planned before.
        AdjacencyError: the step has no guarantee under this adjacency.
        InfeasibleError: it does not fit; says what is on the ledger, or names the smallest epsilon that would admit it.
    """
    if not accountant.interrupted:
        accountant.require_planned(step)
    try:
        accountant.ledger.cost(adjacency, extra=step)
    except AdjacencyError as error:
        raise AdjacencyError(
            f"{error}; give n= (Poisson batches, every adjacency), another sampling=, or"
            " adjacency='replace_one'"
        ) from error
    budget = accountant.budget
    # what an earlier process has paid for is resumed, or given again
    going_on = accountant.interrupted or accountant.is_running
    if budget is None or going_on or accountant.admits(step):
        return
    needed = accountant.ledger.evaluate(budget.delta, budget.adjacency, extra=step).epsilon
    if needed <= budget.epsilon:
        raise InfeasibleError(
            f"mode must leave room for {what} (got {budget.mode!r}, which spends more than its"
            f" epsilon of {rounded_up(needed, 6)} at delta={budget.delta:g}); take mode='planned',"
            " other orders, or more noise"
        )
    if len(accountant):
        raise InfeasibleError(
            f"accountant must have budget left for {what}: {accountant.holdings}. {WAYS_ON}"
        )
    if math.isinf(needed):
        raise InfeasibleError(
            f"noise must be larger for {what} at delta={budget.delta:g} ({budget.adjacency}): no epsilon would do, with"
            " so little noise"
        )
    raise InfeasibleError(
        f"epsilon must be >= {rounded_up(needed, 6)} for {what} at delta={budget.delta:g} "
        f"({budget.adjacency}; got {budget.epsilon:g}); raise epsilon or the noise"
    )


def require_budget(accountant: Accountant, budget: Budget) -> None:
    """Raises AdjacencyError unless the accountant has this budget, or none, and the budget's adjacency."""
    held = accountant.budget
    if held is not None and held.under(budget.adjacency) != budget:
        raise AdjacencyError(f"accountant must have the budget {budget}, or none (got {held})")
    accountant.settle(budget.adjacency)
    if accountant.adjacency != budget.adjacency:
        raise AdjacencyError(
            f"accountant must have the budget's adjacency {budget.adjacency!r} (got"
            f" {accountant.adjacency!r})"
        )


def require_double(params: Sequence[nn.Parameter]) -> None:
    """Raises ValueError unless all parameters are trained, in double precision."""
    for p in params:
        if p.dtype != torch.float64 or not p.requires_grad:
            # PRIVACY: rounding moves iterates that nobody noises (test_single_precision_is_refused)
            raise ValueError(
                f"params must be torch.float64 and all trained (got {p.dtype}): the noise covers"
                " one record's effect and that of rounding, which only double precision keeps"
                " small; use model.double()"
            )


def require_same_parts(oracle: MeanOracle, design: Design, schedule: Schedule) -> None:
    """Checks that an oracle divides by the sizes of the design's batches, phase by phase.

    Raises:
        ValueError: other divisors, or other numbers of steps.
    """
    if not isinstance(design, Parts):
        if oracle.batch_size != design.batch_size:
            raise ValueError(
                f"batch_size must be {design.batch_size}, that of the design (got"
                f" {oracle.batch_size})"
            )
        return
    phases = oracle.phases if isinstance(oracle, Phased) else ()
    if [(o.batch_size, k) for o, k in phases] != [
        (part.batch_size, k) for part, k in design.parts
    ]:
        raise ValueError(
            f"oracle must be Phased, with the batch sizes and steps of {design} (got {oracle})"
        )
    steps = [phase.steps for phase in schedule.phases]
    if len(steps) > 1 and steps != [k for _, k in phases]:
        raise ValueError(
            f"schedule must have the steps of the parts of {design} (got {schedule})"
        )


def require_universe(design: Design, adjacency: Adjacency, size: int) -> None:
    """Raises UnitError if a data set does not have the declared number of records although that number is public."""
    if not isinstance(design, Undeclared) and adjacency != ADD_REMOVE and size != design.n:
        raise UnitError(
            f"n must be the number of records under {adjacency} (declared {design.n}, the data set"
            f" has {size}); declare the right one, or use adjacency='add_remove', where n is a"
            " public reference"
        )


def warn_if_buried(
    noise_std: float,
    signal: float = 1.0,
    *,
    n: int,
    dim: int,
    epsilon: float,
    of: str = "the mean of all steps, in units of the clip,",
) -> None:
    """Warns that noise buries the signal of a planned run, by public numbers.

    Losses of n records change to first order along their n gradients only (exactly so for one linear score), so that
    noise matters in at most m = min(dim, n) directions, where its root mean square is noise_std sqrt(m). What T steps
    tell of the data are means of clipped rows. No weighting of them has less noise than their average, which has 1/T of
    the variance of a step, nor a longer signal than the clip, for which all rows of all steps must be clipped and
    parallel. Where noise is longer even than that, most of the way that parameters go is noise, on EVERY data set. In
    rho-zCDP, for full batches under replace_one, that is n < sqrt(2 m/rho): the order below which no private algorithm
    beats, on the worst data, an answer that ignores them (Bassily, Smith and Thakurta 2014). Only data that are known
    to span far fewer than m directions could still be learned: from a model of fewer parameters.

    Args:
        noise_std: std per coordinate of the noise: on the average of all steps, or on the answer.
        signal: bound on the norm of what it is added to; inf where none is public, which never warns.
        n: public number of records (or users).
        dim: number of parameters.
        epsilon: of the budget.
        of: what both are about.
    """
    noise = noise_std * math.sqrt(min(dim, n))
    if noise > signal:
        warn(
            f"noise buries the signal: {of} has noise of norm {noise:.3g} beside a signal of at"
            f" most {signal:.3g} (n={n}, epsilon={epsilon:g}, dim={dim}): use more data, a larger"
            " epsilon or fewer parameters (for one noised answer also smaller steps or more"
            " regularization)",
            stacklevel=outside(),
        )


def warn_of_void_theorem(what: str, stacklevel: int) -> None:
    """Warns that a plan's bound on the risk is none of the run, once for each reason; privacy does not rest on it."""
    message = f"{what}: privacy is unchanged, but the plan's utility theorem does not apply"
    warn(message, stacklevel=stacklevel + 1)


def require_same_parameters(model: nn.Module, optimizer: Optimizer) -> None:
    """Raises an error unless the optimizer trains exactly the model's trainable parameters, and whole ones."""
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    owned = {
        id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad
    }
    if trained != owned or any(
        map(compat.is_sharded, model.parameters())
    ):  # FSDP 1 may keep them, as shards
        for name, module in model.named_modules():
            require_whole(module, name)
        raise SequenceError(
            "the optimizer must train exactly the model's trainable parameters (model"
            f" {len(trained)}, optimizer {len(owned)}, in common {len(trained & owned)}): make the"
            " optimizer after the last change of the model (private_layers, adapters, a new head),"
            " and freeze the others with requires_grad_(False)"
        )


_AVAILABLE = dist.is_available()  # a property of the build of torch


def world_size() -> int:
    """Returns the number of processes of the process group, 1 without one."""
    return dist.get_world_size() if _AVAILABLE and dist.is_initialized() else 1


def is_first() -> bool:
    """Returns whether this process is rank 0, or alone."""
    return world_size() == 1 or dist.get_rank() == 0


class World:
    """The processes that make one run together: this one alone. `Ranks` replaces every method where there are more."""

    alone = True
    own: Mapping[str, Any] = {}  # settings of this process alone
    query: Sequence[Tensor] | None = (
        None  # shapes of the whole parameters, where these are shards
    )

    def begin(self, run: Any) -> None:
        """Makes sure that all ranks have built the same optimizer on the same parameters."""

    def compare_data(
        self,
        dataset: Dataset[Any],
        steps: int | None,
        *,
        own: str = "",
        counted: bool = True,
        problem: str = "",
    ) -> int:
        """Makes sure that all ranks draw from the same records, equally often; returns how many there are.

        Args:
            dataset: of this process.
            steps: of an iteration.
            own: how each rank knows that its records are its own: "ids", "shard", "shard, ids"; "" if all have all.
            counted: whether the records of all ranks are; else those of this rank.
            problem: why this rank's records cannot be taken, if they cannot.
        """
        self._require_alone()
        if problem:
            raise UnitError(problem)
        return len(dataset)  # type: ignore[arg-type]

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
        """Returns the sampler of this process."""
        if shard and ids is not None and not isinstance(run.design, Assigned):
            ids.require_unique()
            ids = None
        return make_sampler(run.design, size=size, steps=steps, resume=resume, record_ids=ids)

    def require_own_draws(self, loader: Any) -> None:
        """Raises UnknownSamplerError for a loader that draws what other processes may draw too, or only a part."""
        if isinstance(
            getattr(loader, "batch_sampler", loader), (RankSampler, RankAssignedSampler)
        ):
            raise UnknownSamplerError(
                "loader must draw whole batches (got the part of one of several processes)"
            )

    def require_whole(self, what: str) -> None:
        """Raises SequenceError for what reads whole parameters, where this process has shards of them."""

    def common(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns the private part of a checkpoint, as all processes know it."""
        return state

    def agree(self, run: Any, draw: Draw) -> None:
        """Makes sure that all ranks have the rows of the same step, before anything is charged."""
        self._require_alone()

    def release(self, oracle: MeanOracle, noise: Source) -> Release:
        """Returns the noisy mean of the rows of all processes."""
        return oracle.release(noise)

    def failed(self, run: Any, *, in_progress: bool) -> None:
        """Lets the other ranks fail too, if they wait for this one; its own error is raised by the caller."""

    def end(self, run: Any) -> None:
        """Makes sure that all ranks end with the same answer and the same ledger."""

    def _require_alone(self) -> None:
        if world_size() > 1:
            # PRIVACY: W runs that do not know of each other would each release a mean of the same records
            # (test_an_optimizer_made_before_the_process_group_is_refused)
            raise SequenceError(
                f"world_size must be 1 for an optimizer made in one process (got {world_size()}):"
                " call torch.distributed.init_process_group before the optimizer is made"
            )


def world_of(params: Sequence[Any], device: torch.device, several: type[Any]) -> World:
    """Returns the processes of a run: of a kind that parameters which are shards know, of `several`, or this one."""
    kinds: list[Any] = [p.dpsco_world for p in params if hasattr(p, "dpsco_world")]
    if world_size() > 1:
        kinds.append(several)
    return kinds[0](device) if kinds else World()
