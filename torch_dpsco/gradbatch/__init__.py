"""Per-sample gradients: dense rows from Opacus' grad samplers and factored rows of Linear layers, one interface."""

from torch_dpsco.gradbatch.base import FLOAT64, Block, Summation, plan_summation, row_norms
from torch_dpsco.gradbatch.batch import GradBatch, clear_rows, has_rows, retire_forwards
from torch_dpsco.gradbatch.dense import DenseBlock
from torch_dpsco.gradbatch.factored import FactoredBlock
from torch_dpsco.gradbatch.ghost import GhostBlock, GhostHooks, ghost_backward
from torch_dpsco.gradbatch.linear import FactoredLinear, PassCounter, Tape
from torch_dpsco.gradbatch.neighbors import Points, neighbor_counts
from torch_dpsco.gradbatch.wrapped import forget_wrappers, require_unwrapped

__all__ = [
    "FLOAT64",
    "Block",
    "DenseBlock",
    "FactoredBlock",
    "FactoredLinear",
    "GhostBlock",
    "GhostHooks",
    "GradBatch",
    "PassCounter",
    "Points",
    "Summation",
    "Tape",
    "clear_rows",
    "forget_wrappers",
    "ghost_backward",
    "has_rows",
    "neighbor_counts",
    "plan_summation",
    "require_unwrapped",
    "retire_forwards",
    "row_norms",
]
