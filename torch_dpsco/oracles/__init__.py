"""Mean oracles: from per-sample gradients to a private mean."""

from torch_dpsco.oracles.absolute import HolderAbsolute
from torch_dpsco.oracles.base import MeanOracle, Release
from torch_dpsco.oracles.clipped import Clipped, ClippedMean, HolderClipped, clip_weights, joint_norm
from torch_dpsco.oracles.exact import Exact

__all__ = [
    "Clipped",
    "ClippedMean",
    "Exact",
    "HolderAbsolute",
    "HolderClipped",
    "MeanOracle",
    "Release",
    "clip_weights",
    "joint_norm",
]
