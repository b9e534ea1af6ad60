"""Samplers that carry a design, loaders that log every draw, and the log by which a step uses exactly one."""

from torch_dpsco.acts import public_names
from torch_dpsco.sampling.datasets import Spilled
from torch_dpsco.sampling.loader import (
    PrivateLoader,
    UserLoader,
    adapt,
    user_ids,
)
from torch_dpsco.sampling.one_pass import (
    AssignedSampler,
    DisjointSampler,
    OnePassSampler,
    Partition,
    PartsSampler,
    RankAssignedSampler,
    early_partition,
    make_sampler,
    partition_name,
)
from torch_dpsco.sampling.samplers import (
    Chunk,
    DesignSampler,
    DrawLog,
    FixedSampler,
    FullSampler,
    PoissonSampler,
    RankSampler,
    RecordIds,
    ShuffledSampler,
    fingerprint,
    poisson_positions,
    records_of,
    require_divisible,
)
from torch_dpsco.sampling.slots import Slots

__all__ = [
    "AssignedSampler",
    "Chunk",
    "DesignSampler",
    "DisjointSampler",
    "DrawLog",
    "FixedSampler",
    "FullSampler",
    "OnePassSampler",
    "Partition",
    "PartsSampler",
    "PoissonSampler",
    "PrivateLoader",
    "RankAssignedSampler",
    "RankSampler",
    "RecordIds",
    "ShuffledSampler",
    "Slots",
    "Spilled",
    "UserLoader",
    "adapt",
    "early_partition",
    "fingerprint",
    "make_sampler",
    "partition_name",
    "poisson_positions",
    "records_of",
    "require_divisible",
    "user_ids",
]

__dir__ = public_names(__name__)
