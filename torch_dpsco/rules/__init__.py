"""Update rules on private means."""

from torch_dpsco.rules.base import AVERAGES, UpdateRule
from torch_dpsco.rules.sgd import SGD, TorchRule

__all__ = ["AVERAGES", "SGD", "TorchRule", "UpdateRule"]
