"""Private optimizers: drop-in subclasses of `torch.optim.Optimizer`."""

from torch_dpsco.optim.base import PrivateOptimizer
from torch_dpsco.optim.holder import HolderSGD

__all__ = ["HolderSGD", "PrivateOptimizer"]
