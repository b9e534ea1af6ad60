"""torch_dpsco: private model fitting in PyTorch, calibrated from the loss.

import torch_dpsco as dp

dp.attach(model)                                     # per-sample gradients
plan = dp.HolderSGD.plan(problem=..., n=..., budget=dp.Budget(1.0, 1e-5))
optimizer = dp.HolderSGD(model.parameters(), plan)
for x, y in optimizer.loader(dataset): ...           # an ordinary training loop
"""

from importlib import import_module
from typing import TYPE_CHECKING

from torch_dpsco import errors, losses, oracles, prox, rules, sampling
from torch_dpsco import statistics as statistics
from torch_dpsco import streams as streams
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.designs import (
    Assigned,
    Cyclic,
    Disjoint,
    Fixed,
    Full,
    Parts,
    Poisson,
    Shuffled,
)
from torch_dpsco.algorithms.correlated import CorrelatedSGD
from torch_dpsco.algorithms.heavy_plan import Pilot
from torch_dpsco.algorithms.heavy_tailed import AcceleratedSGD, ClippedSGD, ProximalSGD
from torch_dpsco.algorithms.holder import HolderSGD
from torch_dpsco.algorithms.localized import LocalizedSGD
from torch_dpsco.algorithms.output_sgd import BoltOnPSGD, HolderOutputSGD
from torch_dpsco.algorithms.user_clipped import UserClippedSGD
from torch_dpsco.algorithms.user_filtered import LocalizedUserSGD, UserFilteredSGD
from torch_dpsco.audit import audit, audit_outputs, audit_training
from torch_dpsco.doctor import doctor
from torch_dpsco.estimators.schema import Schema
from torch_dpsco.estimators.solved import NoisyGD, ObjectivePerturbation, OutputPerturbation
from torch_dpsco.fast import CompiledRows
from torch_dpsco.losses.per_record import per_record
from torch_dpsco.make_private import make_private
from torch_dpsco.problem import Phase, Problem, Schedule
from torch_dpsco.rows.attach import attach, detach
from torch_dpsco.show import loggers as loggers
from torch_dpsco.step.step import PrivateOptimizer, public
from torch_dpsco.train import fit

__version__ = "0.1.0"

__all__ = [
    "AcceleratedSGD",
    "Accountant",
    "Assigned",
    "BoltOnPSGD",
    "Budget",
    "ClippedSGD",
    "CompiledRows",
    "CorrelatedSGD",
    "Cyclic",
    "Disjoint",
    "Fixed",
    "Full",
    "HolderOutputSGD",
    "HolderSGD",
    "LocalizedSGD",
    "LocalizedUserSGD",
    "NoisyGD",
    "ObjectivePerturbation",
    "OutputPerturbation",
    "Parts",
    "Phase",
    "Pilot",
    "Poisson",
    "PrivateOptimizer",
    "Problem",
    "ProximalSGD",
    "Schedule",
    "Schema",
    "Shuffled",
    "UserClippedSGD",
    "UserFilteredSGD",
    "attach",
    "audit",
    "audit_outputs",
    "audit_training",
    "detach",
    "doctor",
    "errors",
    "fit",
    "loggers",
    "losses",
    "make_private",
    "oracles",
    "per_record",
    "prox",
    "public",
    "rules",
    "sampling",
    "score",
    "study",
]

if TYPE_CHECKING:
    from torch_dpsco.statistics.scores import score
    from torch_dpsco.statistics.study import study
else:  # or type checkers would take every name for one that exists

    def __getattr__(name: str) -> object:
        if name in (
            "score",
            "study",
        ):  # on first use: they import scikit-learn, as estimators do
            place = "scores" if name == "score" else "study"
            return getattr(import_module(f"torch_dpsco.statistics.{place}"), name)
        for place in (errors, sampling):
            if hasattr(place, name):
                raise AttributeError(
                    f"dp has no {name!r}: it is dp.{place.__name__.rpartition('.')[2]}.{name}"
                )
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
