"""Mean oracles: from per-sample gradients to a private mean."""

from torch_dpsco.oracles.absolute import HolderAbsolute
from torch_dpsco.oracles.adaptive import AdaptiveClipped
from torch_dpsco.oracles.auto import AutoClip
from torch_dpsco.oracles.base import Charge, MeanOracle, Release
from torch_dpsco.oracles.centered import Centered
from torch_dpsco.oracles.clipped import Clipped, ClippedMean
from torch_dpsco.oracles.coordinatewise import Coordinatewise, median_of_means
from torch_dpsco.oracles.correlated import CorrelatedClipped
from torch_dpsco.oracles.exact import Exact
from torch_dpsco.oracles.holder import HolderClipped
from torch_dpsco.oracles.phased import Phased
from torch_dpsco.oracles.pilot import PilotClipped, QuantilePilot
from torch_dpsco.oracles.shuffled import ShuffledClipped, ShuffledMedian
from torch_dpsco.oracles.user_filtered import Filter, UserFiltered
from torch_dpsco.oracles.user_poisson import AdaptiveRadius, PoissonTest, UserPoissonFiltered
from torch_dpsco.oracles.user_search import UserSearched
from torch_dpsco.oracles.weights import clip_weights, joint_norm

__all__ = [
    "AdaptiveClipped",
    "AdaptiveRadius",
    "AutoClip",
    "Centered",
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
    "PoissonTest",
    "QuantilePilot",
    "Release",
    "ShuffledClipped",
    "ShuffledMedian",
    "UserFiltered",
    "UserPoissonFiltered",
    "UserSearched",
    "clip_weights",
    "joint_norm",
    "median_of_means",
]
