"""Update rules on private means."""

from torch_dpsco.rules.accelerated import Accelerated
from torch_dpsco.rules.anchored import Anchored
from torch_dpsco.rules.base import AVERAGES, UpdateRule
from torch_dpsco.rules.sgd import SGD, ScheduledSGD, TorchRule

__all__ = ["AVERAGES", "SGD", "Accelerated", "Anchored", "ScheduledSGD", "TorchRule", "UpdateRule"]
