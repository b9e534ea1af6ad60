"""Samplers that carry a design, loaders that log every draw, and the log by which a step uses exactly one."""

from torch_dpsco.sampling.draws import Chunk, DrawLog
from torch_dpsco.sampling.loader import BoundedLoader, PhysicalBatches, PrivateLoader, accept_empty_draws, bounded
from torch_dpsco.sampling.samplers import (
    DesignSampler,
    DisjointSampler,
    FixedSampler,
    FullSampler,
    PoissonSampler,
    ShuffledSampler,
    make_sampler,
    poisson_positions,
)

__all__ = [
    "BoundedLoader",
    "Chunk",
    "DesignSampler",
    "DisjointSampler",
    "DrawLog",
    "FixedSampler",
    "FullSampler",
    "PhysicalBatches",
    "PoissonSampler",
    "PrivateLoader",
    "ShuffledSampler",
    "accept_empty_draws",
    "bounded",
    "make_sampler",
    "poisson_positions",
]
