"""torch_dpsco: private model fitting in PyTorch, calibrated from the loss.

import torch_dpsco as dp

dp.attach(model)                                     # per-sample gradients
plan = dp.HolderSGD.plan(problem=..., n=..., budget=dp.Budget(1.0, 1e-5))
optimizer = dp.HolderSGD(model.parameters(), plan)
for x, y in optimizer.loader(dataset): ...           # an ordinary training loop
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from torch_dpsco import fast, show, statistics, streams  # noqa: F401 - they register what they add
from torch_dpsco.acts import register

__version__ = "0.1.0"

if TYPE_CHECKING:
    from torch_dpsco import errors as errors
    from torch_dpsco import losses as losses
    from torch_dpsco import oracles as oracles
    from torch_dpsco import prox as prox
    from torch_dpsco import rules as rules
    from torch_dpsco import sampling as sampling
    from torch_dpsco.accounting.accountant import Accountant as Accountant
    from torch_dpsco.accounting.budgets import Budget as Budget
    from torch_dpsco.accounting.designs import Assigned as Assigned
    from torch_dpsco.accounting.designs import Cyclic as Cyclic
    from torch_dpsco.accounting.designs import Disjoint as Disjoint
    from torch_dpsco.accounting.designs import Fixed as Fixed
    from torch_dpsco.accounting.designs import Full as Full
    from torch_dpsco.accounting.designs import Parts as Parts
    from torch_dpsco.accounting.designs import Poisson as Poisson
    from torch_dpsco.accounting.designs import Shuffled as Shuffled
    from torch_dpsco.algorithms.correlated import CorrelatedSGD as CorrelatedSGD
    from torch_dpsco.algorithms.heavy_plan import Pilot as Pilot
    from torch_dpsco.algorithms.heavy_tailed import AcceleratedSGD as AcceleratedSGD
    from torch_dpsco.algorithms.heavy_tailed import ClippedSGD as ClippedSGD
    from torch_dpsco.algorithms.heavy_tailed import ProximalSGD as ProximalSGD
    from torch_dpsco.algorithms.holder import HolderSGD as HolderSGD
    from torch_dpsco.algorithms.localized import LocalizedSGD as LocalizedSGD
    from torch_dpsco.algorithms.output_sgd import BoltOnPSGD as BoltOnPSGD
    from torch_dpsco.algorithms.output_sgd import HolderOutputSGD as HolderOutputSGD
    from torch_dpsco.algorithms.user_clipped import UserClippedSGD as UserClippedSGD
    from torch_dpsco.algorithms.user_filtered import LocalizedUserSGD as LocalizedUserSGD
    from torch_dpsco.algorithms.user_filtered import UserFilteredSGD as UserFilteredSGD
    from torch_dpsco.audits.repeated import audit as audit
    from torch_dpsco.audits.repeated import audit_outputs as audit_outputs
    from torch_dpsco.audits.repeated import audit_training as audit_training
    from torch_dpsco.diagnosis import doctor as doctor
    from torch_dpsco.estimators.schema import Schema as Schema
    from torch_dpsco.estimators.solved import NoisyGD as NoisyGD
    from torch_dpsco.estimators.solved import ObjectivePerturbation as ObjectivePerturbation
    from torch_dpsco.estimators.solved import OutputPerturbation as OutputPerturbation
    from torch_dpsco.fast.compiled import CompiledRows as CompiledRows
    from torch_dpsco.losses.per_record import per_record as per_record
    from torch_dpsco.private_loop import make_private as make_private
    from torch_dpsco.problem import Phase as Phase
    from torch_dpsco.problem import Problem as Problem
    from torch_dpsco.problem import Schedule as Schedule
    from torch_dpsco.rows.attach import attach as attach
    from torch_dpsco.rows.attach import detach as detach
    from torch_dpsco.show import loggers as loggers
    from torch_dpsco.statistics.scores import score as score
    from torch_dpsco.statistics.study import study as study
    from torch_dpsco.step.step import PrivateOptimizer as PrivateOptimizer
    from torch_dpsco.step.step import public as public
    from torch_dpsco.train import fit as fit

# public names, and the file that each is imported from when it is first used
_PLACES = {
    "AcceleratedSGD": "algorithms.heavy_tailed",
    "Accountant": "accounting.accountant",
    "Assigned": "accounting.designs",
    "BoltOnPSGD": "algorithms.output_sgd",
    "Budget": "accounting.budgets",
    "ClippedSGD": "algorithms.heavy_tailed",
    "CompiledRows": "fast.compiled",
    "CorrelatedSGD": "algorithms.correlated",
    "Cyclic": "accounting.designs",
    "Disjoint": "accounting.designs",
    "Fixed": "accounting.designs",
    "Full": "accounting.designs",
    "HolderOutputSGD": "algorithms.output_sgd",
    "HolderSGD": "algorithms.holder",
    "LocalizedSGD": "algorithms.localized",
    "LocalizedUserSGD": "algorithms.user_filtered",
    "NoisyGD": "estimators.solved",
    "ObjectivePerturbation": "estimators.solved",
    "OutputPerturbation": "estimators.solved",
    "Parts": "accounting.designs",
    "Phase": "problem",
    "Pilot": "algorithms.heavy_plan",
    "Poisson": "accounting.designs",
    "PrivateOptimizer": "step.step",
    "Problem": "problem",
    "ProximalSGD": "algorithms.heavy_tailed",
    "Schedule": "problem",
    "Schema": "estimators.schema",
    "Shuffled": "accounting.designs",
    "UserClippedSGD": "algorithms.user_clipped",
    "UserFilteredSGD": "algorithms.user_filtered",
    "attach": "rows.attach",
    "audit": "audits.repeated",
    "audit_outputs": "audits.repeated",
    "audit_training": "audits.repeated",
    "detach": "rows.attach",
    "doctor": "diagnosis",
    "fit": "train",
    "make_private": "private_loop",
    "per_record": "losses.per_record",
    "public": "step.step",
    "score": "statistics.scores",
    "study": "statistics.study",
}
_PARTS = ("errors", "loggers", "losses", "oracles", "prox", "rules", "sampling")
__all__ = sorted((*_PLACES, *_PARTS))


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def _load_all() -> None:
    for name in __all__:
        getattr(sys.modules[__name__], name)


register("plan.kinds", _load_all)  # a saved plan is read by the name of its class

if "opacus.accountants" in sys.modules:  # whose registry is to know ours
    import_module(f"{__name__}.accounting.accountant")

if not TYPE_CHECKING:  # or type checkers would take every name for one that exists

    def __getattr__(name: str) -> object:
        place = f"{__name__}.{'show.' if name == 'loggers' else ''}{name}"
        if name in _PLACES:
            found = getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
        elif not name.startswith("_") and find_spec(place):
            found = import_module(place)
        else:
            raise _unknown(name)
        globals()[name] = found
        return found


def _unknown(name: str) -> AttributeError:
    """Returns the error for a name that there is not, or elsewhere."""
    for place in () if name.startswith("_") else ("errors", "sampling"):
        if hasattr(import_module(f"{__name__}.{place}"), name):
            return AttributeError(f"dp has no {name!r}: it is dp.{place}.{name}")
    return AttributeError(f"module {__name__!r} has no attribute {name!r}")
