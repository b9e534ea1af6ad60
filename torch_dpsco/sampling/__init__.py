"""Samplers that carry a design, loaders that log every draw, and the log by which a step uses exactly one."""

from torch_dpsco.sampling.draws import Chunk, DrawLog, fingerprint, records_of
from torch_dpsco.sampling.loader import (
    BoundedLoader,
    PhysicalBatches,
    PrivateLoader,
    adapt,
    bounded,
)
from torch_dpsco.sampling.one_pass import (
    AssignedSampler,
    DisjointSampler,
    OnePassSampler,
    Partition,
    PartsSampler,
    RankAssignedSampler,
    make_sampler,
    partition_name,
)
from torch_dpsco.sampling.record_ids import RecordIds
from torch_dpsco.sampling.samplers import (
    DesignSampler,
    FixedSampler,
    FullSampler,
    PoissonSampler,
    RankSampler,
    ShuffledSampler,
    poisson_positions,
    require_divisible,
)
from torch_dpsco.sampling.slots import Isolation, Slots
from torch_dpsco.sampling.spilled import Spilled
from torch_dpsco.sampling.streamed import Streamed
from torch_dpsco.sampling.users import UserLoader, user_ids

__all__ = [
    "AssignedSampler",
    "BoundedLoader",
    "Chunk",
    "DesignSampler",
    "DisjointSampler",
    "DrawLog",
    "FixedSampler",
    "FullSampler",
    "Isolation",
    "OnePassSampler",
    "Partition",
    "PartsSampler",
    "PhysicalBatches",
    "PoissonSampler",
    "PrivateLoader",
    "RankAssignedSampler",
    "RankSampler",
    "RecordIds",
    "ShuffledSampler",
    "Slots",
    "Spilled",
    "Streamed",
    "UserLoader",
    "adapt",
    "bounded",
    "fingerprint",
    "make_sampler",
    "partition_name",
    "poisson_positions",
    "records_of",
    "require_divisible",
    "user_ids",
]
