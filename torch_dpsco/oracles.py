"""Mean oracles: from per-sample gradients to a private mean."""

from torch_dpsco.algorithms.correlated_oracle import CorrelatedClipped
from torch_dpsco.algorithms.holder_oracle import HolderAbsolute, HolderClipped
from torch_dpsco.algorithms.oracles import (
    AdaptiveClipped,
    AutoClip,
    Coordinatewise,
    ShuffledClipped,
    ShuffledMedian,
)
from torch_dpsco.algorithms.pilot_oracle import PilotClipped, QuantilePilot
from torch_dpsco.algorithms.user_filter_oracles import UserFilter, UserFiltered, UserSearched
from torch_dpsco.algorithms.user_oracles import UserClipped
from torch_dpsco.step.oracle import (
    Charge,
    Clipped,
    ClippedMean,
    MeanOracle,
    Release,
    clip_weights,
    joint_norm,
)
from torch_dpsco.step.phased import Exact, Phased

__all__ = [
    "AdaptiveClipped",
    "AutoClip",
    "Charge",
    "Clipped",
    "ClippedMean",
    "Coordinatewise",
    "CorrelatedClipped",
    "Exact",
    "HolderAbsolute",
    "HolderClipped",
    "MeanOracle",
    "Phased",
    "PilotClipped",
    "QuantilePilot",
    "Release",
    "ShuffledClipped",
    "ShuffledMedian",
    "UserClipped",
    "UserFilter",
    "UserFiltered",
    "UserSearched",
    "clip_weights",
    "joint_norm",
]
