"""Per-sample gradients: dense rows from Opacus' grad samplers and rows that layers record themselves, one interface."""

from torch_dpsco.gradbatch.base import (
    FLOAT64,
    Block,
    Summation,
    plan_summation,
    row_norm,
    row_norms,
    weighted_rows,
)
from torch_dpsco.gradbatch.batch import GradBatch, clear_rows, has_rows, retire_forwards
from torch_dpsco.gradbatch.dense import DenseBlock
from torch_dpsco.gradbatch.factored import FactoredBlock, LinearRows, input_factors, linear_factors
from torch_dpsco.gradbatch.ghost import GhostBlock, GhostHooks, ghost_backward
from torch_dpsco.gradbatch.gram import SequenceBlock
from torch_dpsco.gradbatch.items import ItemBlock
from torch_dpsco.gradbatch.linear import FactoredLinear
from torch_dpsco.gradbatch.neighbors import Points, mean_rounding, neighbor_counts
from torch_dpsco.gradbatch.passes import PassCounter
from torch_dpsco.gradbatch.recorded import Tape
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
    "ItemBlock",
    "LinearRows",
    "PassCounter",
    "Points",
    "SequenceBlock",
    "Summation",
    "Tape",
    "clear_rows",
    "forget_wrappers",
    "ghost_backward",
    "has_rows",
    "input_factors",
    "linear_factors",
    "mean_rounding",
    "neighbor_counts",
    "plan_summation",
    "require_unwrapped",
    "retire_forwards",
    "row_norm",
    "row_norms",
    "weighted_rows",
]
