"""Private optimizers: drop-in subclasses of `torch.optim.Optimizer`."""

from torch_dpsco.optim.holder import HolderSGD
from torch_dpsco.step.step import PrivateOptimizer

__all__ = ["HolderSGD", "PrivateOptimizer"]
