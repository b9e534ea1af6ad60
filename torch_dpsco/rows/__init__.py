"""Per-sample gradients: dense rows from Opacus' grad samplers and rows that layers record themselves, one interface."""

from torch_dpsco.rows.batch import (
    GradBatch,
    attachments,
    clear_rows,
    forget_wrappers,
    has_rows,
    require_unwrapped,
    retire_forwards,
)
from torch_dpsco.rows.blocks import (
    FLOAT64,
    Block,
    DenseBlock,
    FactoredBlock,
    SequenceBlock,
    Summation,
    input_factors,
    is_queued,
    plan_summation,
    row_norm,
    row_norms,
    weighted_rows,
)
from torch_dpsco.rows.forwards import PassCounter
from torch_dpsco.rows.layers.kinds import ItemBlock
from torch_dpsco.rows.layers.recorded import Tape

__all__ = [
    "FLOAT64",
    "Block",
    "DenseBlock",
    "FactoredBlock",
    "GradBatch",
    "ItemBlock",
    "PassCounter",
    "SequenceBlock",
    "Summation",
    "Tape",
    "attachments",
    "clear_rows",
    "forget_wrappers",
    "has_rows",
    "input_factors",
    "is_queued",
    "plan_summation",
    "require_unwrapped",
    "retire_forwards",
    "row_norm",
    "row_norms",
    "weighted_rows",
]
