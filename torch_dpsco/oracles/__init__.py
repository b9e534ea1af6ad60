"""Mean oracles: from per-sample gradients to a private mean."""

from torch_dpsco.oracles.adaptive import AdaptiveClipped, AutoClip
from torch_dpsco.oracles.base import Charge, MeanOracle, Release, clip_weights, joint_norm
from torch_dpsco.oracles.clipped import Clipped, ClippedMean
from torch_dpsco.oracles.coordinatewise import Coordinatewise
from torch_dpsco.oracles.correlated import CorrelatedClipped
from torch_dpsco.oracles.exact import Exact
from torch_dpsco.oracles.holder import HolderAbsolute, HolderClipped
from torch_dpsco.oracles.phased import Phased, PilotClipped, QuantilePilot
from torch_dpsco.oracles.shuffled import ShuffledClipped, ShuffledMedian
from torch_dpsco.oracles.users.clipped import UserClipped
from torch_dpsco.oracles.users.filtered import Filter, UserFiltered
from torch_dpsco.oracles.users.search import UserSearched

__all__ = [
    "AdaptiveClipped",
    "AutoClip",
    "Charge",
    "Clipped",
    "ClippedMean",
    "Coordinatewise",
    "CorrelatedClipped",
    "Exact",
    "Filter",
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
    "UserFiltered",
    "UserSearched",
    "clip_weights",
    "joint_norm",
]
