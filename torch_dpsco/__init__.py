"""torch_dpsco: private model fitting in PyTorch, calibrated from the loss.

import torch_dpsco as dp

dp.attach(model)                                     # per-sample gradients
plan = dp.HolderSGD.plan(problem=..., n=..., budget=dp.Budget(1.0, 1e-5))
optimizer = dp.HolderSGD(model.parameters(), plan)
for x, y in optimizer.loader(dataset): ...           # an ordinary training loop
"""

from torch_dpsco import losses, oracles, prox, rules
from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.budgets.budget import Budget
from torch_dpsco.accounting.designs import Disjoint, Fixed, Full, Poisson, Shuffled
from torch_dpsco.accounting.parts import Assigned, Cyclic, Parts
from torch_dpsco.accounting.report.figures import PrivacyReport
from torch_dpsco.accounting.report.statement import Statement
from torch_dpsco.audit import Audit, audit, audit_outputs, audit_training
from torch_dpsco.doctor import Diagnosis, Finding, doctor
from torch_dpsco.errors import (
    AdjacencyError,
    BudgetExceeded,
    CalibrationError,
    ConditionError,
    DpscoError,
    InfeasibleError,
    MissingConstantError,
    NotCertifiedError,
    PrivacyError,
    SequenceError,
    UnitError,
    UnknownSamplerError,
    UtilityWarning,
)
from torch_dpsco.linear.optimizers import NoisyGD, ObjectivePerturbation, OutputPerturbation
from torch_dpsco.make_private import make_private
from torch_dpsco.optim.compiled import CompiledRows
from torch_dpsco.optim.correlated import CorrelatedSGD
from torch_dpsco.optim.heavy_tailed import AcceleratedSGD, ClippedSGD, ProximalSGD
from torch_dpsco.optim.holder import HolderSGD
from torch_dpsco.optim.localized import LocalizedSGD
from torch_dpsco.optim.output_sgd import BoltOnPSGD, HolderOutputSGD
from torch_dpsco.optim.pilot import Pilot
from torch_dpsco.optim.step import PrivateOptimizer
from torch_dpsco.optim.user_clipped import UserClippedSGD
from torch_dpsco.optim.user_filtered import UserFilteredSGD
from torch_dpsco.optim.user_localized import LocalizedUserSGD
from torch_dpsco.per_record import per_record
from torch_dpsco.problem import Problem
from torch_dpsco.rows import ghost_backward
from torch_dpsco.rows.attach import attach, detach
from torch_dpsco.sampling import (
    DisjointSampler,
    FixedSampler,
    FullSampler,
    PhysicalBatches,
    PoissonSampler,
    PrivateLoader,
    ShuffledSampler,
)
from torch_dpsco.schedule import Phase, Schedule
from torch_dpsco.train import fit

__version__ = "0.1.0"

__all__ = [
    "AcceleratedSGD",
    "Accountant",
    "AdjacencyError",
    "Assigned",
    "Audit",
    "BoltOnPSGD",
    "Budget",
    "BudgetExceeded",
    "CalibrationError",
    "ClippedSGD",
    "CorrelatedSGD",
    "CompiledRows",
    "ConditionError",
    "Diagnosis",
    "Cyclic",
    "Disjoint",
    "DisjointSampler",
    "DpscoError",
    "Finding",
    "Fixed",
    "FixedSampler",
    "Full",
    "FullSampler",
    "HolderOutputSGD",
    "HolderSGD",
    "InfeasibleError",
    "LocalizedSGD",
    "LocalizedUserSGD",
    "MissingConstantError",
    "NotCertifiedError",
    "Parts",
    "Phase",
    "Pilot",
    "PhysicalBatches",
    "Poisson",
    "PoissonSampler",
    "PrivacyError",
    "PrivacyReport",
    "PrivateLoader",
    "PrivateOptimizer",
    "Problem",
    "ProximalSGD",
    "Schedule",
    "SequenceError",
    "Shuffled",
    "ShuffledSampler",
    "Statement",
    "UnitError",
    "UnknownSamplerError",
    "UserClippedSGD",
    "UserFilteredSGD",
    "UtilityWarning",
    "attach",
    "audit",
    "audit_outputs",
    "audit_training",
    "detach",
    "doctor",
    "fit",
    "ghost_backward",
    "losses",
    "make_private",
    "oracles",
    "per_record",
    "prox",
    "rules",
    "NoisyGD",
    "ObjectivePerturbation",
    "OutputPerturbation",
]
