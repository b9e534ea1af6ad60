"""What is lost where private draws take the place of a torch DataLoader's own.

| the loader's | what happens | why |
|---|---|---|
| `shuffle=True`, `drop_last=` with it | nothing | a pass over all records in random order; draws have no last batch |
| sampler or batch sampler | raises | records that it leaves out would be drawn, and weights be lost |
| `shuffle=False`, `generator=`, `worker_init_fn=` | warns | nobody may know which records are drawn when |

Time outs, prefetching and how workers are started change no batch.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from torch_dpsco.errors import UnknownSamplerError, warn

PART = "torch.utils.data.Subset(dataset, indices) is a part of the data"
WEIGHTS = (
    "weights of classes belong into the loss, as nn.BCEWithLogitsLoss(pos_weight=...) or "
    "dp.per_record(nn.CrossEntropyLoss(weight=...))"
)
_WAYS_OUT = {
    SubsetRandomSampler: PART,
    WeightedRandomSampler: WEIGHTS,
    DistributedSampler: "leave it away, optimizers divide their draws among processes",
    RandomSampler: f"shuffle=True, and say by epochs= or steps= how long a run is; {PART}",
}


def require_replaceable(loader: DataLoader[Any], name: str = "data_loader") -> None:
    """Raises UnknownSamplerError where what a loader chooses would be lost; warns where an order is.

    Args:
        loader: of a map-style data set.
        name: by which the caller knows it.
    """
    found = _chooses(loader)
    if found is not None:
        way_out = _WAYS_OUT.get(type(found), f"{PART}; {WEIGHTS}")
        # PRIVACY: records that it leaves out would be drawn (test_no_door_drops_a_sampler)
        raise UnknownSamplerError(
            f"{name} must have a fixed batch_size and no sampler of its own (got"
            f" {type(found).__name__}), which private draws from all records would replace:"
            f" {way_out}"
        )
    lost = list(_not_kept(loader))
    if lost:
        warn(
            f"{', '.join(lost)} of {name} cannot be kept, since private batches are drawn at"
            " random, anew in each run: say shuffle=True if the order does not matter; if it does,"
            " a record must hold all that belongs together",
            stacklevel=4,
        )


def _chooses(loader: DataLoader[Any]) -> Any:
    """Returns what of a loader decides which records come how often, None where each comes once in a pass."""
    if type(loader).__iter__ is not DataLoader.__iter__:
        return loader
    if loader.batch_size is None:
        return loader if loader.batch_sampler is None else loader.batch_sampler
    sampler = loader.sampler
    if type(sampler) not in (RandomSampler, SequentialSampler):
        return sampler
    records = len(loader.dataset)  # type: ignore[arg-type]
    # one over other indices, as SequentialSampler(range(80)), is a choice too
    whole = len(sampler) == len(sampler.data_source) == records  # type: ignore[attr-defined, arg-type]
    return None if whole and not getattr(sampler, "replacement", False) else sampler


def _not_kept(loader: DataLoader[Any]) -> list[str]:
    found = []
    several = (loader.batch_size or 1) < len(loader.dataset)  # type: ignore[arg-type]
    if several and type(loader.sampler) is SequentialSampler:
        found.append("the order (shuffle=False)")
    if loader.generator is not None or getattr(loader.sampler, "generator", None) is not None:
        found.append("generator")
    if loader.num_workers and loader.worker_init_fn is not None:
        found.append("worker_init_fn")
    return found
