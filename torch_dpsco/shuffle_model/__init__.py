"""The shuffle model of paper 2's appendix I, simulated: oracles whose noise is random bits that users add.

No training needs it. It is here for who studies it, on the hooks that an oracle of yours has, too.
"""

from torch_dpsco.acts import public_names
from torch_dpsco.shuffle_model.numbers import (
    COORDINATES,
    VECTORS,
    ShuffleParameters,
    shuffle_cost,
    shuffle_parameters,
)
from torch_dpsco.shuffle_model.oracles import ShuffledClipped, ShuffledMedian

__all__ = [
    "COORDINATES",
    "VECTORS",
    "ShuffleParameters",
    "ShuffledClipped",
    "ShuffledMedian",
    "shuffle_cost",
    "shuffle_parameters",
]

__dir__ = public_names(__name__)
