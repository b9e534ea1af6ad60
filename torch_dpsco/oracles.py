"""Mean oracles: from per-sample gradients to a private mean."""

from torch_dpsco.acts import public_names
from torch_dpsco.algorithms.clips import (
    AdaptiveClipped,
    AutoClip,
    PilotClipped,
    QuantilePilot,
)
from torch_dpsco.algorithms.oracles import (
    Coordinatewise,
    CorrelatedClipped,
    UserClipped,
    UserFiltered,
)
from torch_dpsco.algorithms.user_numbers import UserFilter
from torch_dpsco.step.oracle import (
    Charge,
    Clipped,
    ClippedMean,
    HolderClipped,
    MeanOracle,
    Phased,
    Release,
    clip_weights,
    joint_norm,
)

__all__ = [
    "AdaptiveClipped",
    "AutoClip",
    "Charge",
    "Clipped",
    "ClippedMean",
    "Coordinatewise",
    "CorrelatedClipped",
    "HolderClipped",
    "MeanOracle",
    "Phased",
    "PilotClipped",
    "QuantilePilot",
    "Release",
    "UserClipped",
    "UserFilter",
    "UserFiltered",
    "clip_weights",
    "joint_norm",
]

__dir__ = public_names(__name__)
