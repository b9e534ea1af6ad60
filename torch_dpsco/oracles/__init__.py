"""Mean oracles: from per-sample gradients to a private mean."""

from torch_dpsco.oracles.absolute import HolderAbsolute
from torch_dpsco.oracles.adaptive import AdaptiveClipped
from torch_dpsco.oracles.auto import AutoClip
from torch_dpsco.oracles.base import MeanOracle, Release
from torch_dpsco.oracles.clipped import Clipped, ClippedMean, HolderClipped, clip_weights, joint_norm
from torch_dpsco.oracles.coordinatewise import Coordinatewise, median_of_means
from torch_dpsco.oracles.exact import Exact
from torch_dpsco.oracles.phased import Phased
from torch_dpsco.oracles.pilot import PilotClipped, QuantilePilot
from torch_dpsco.oracles.shuffled import ShuffledClipped, ShuffledMedian

__all__ = [
    "AdaptiveClipped",
    "AutoClip",
    "Clipped",
    "ClippedMean",
    "Coordinatewise",
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
    "clip_weights",
    "joint_norm",
    "median_of_means",
]
