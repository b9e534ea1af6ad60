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
from torch_dpsco.acts import public_names, register

__version__ = "0.1.0"

if TYPE_CHECKING:  # isort: off
    from torch_dpsco import (
        audits as audits,
        errors as errors,
        estimators as estimators,
        losses as losses,
        oracles as oracles,
        prox as prox,
        rules as rules,
        sampling as sampling,
    )
    from torch_dpsco.accounting.accountant import Accountant as Accountant
    from torch_dpsco.accounting.budgets import Budget as Budget
    from torch_dpsco.accounting.designs import (
        Assigned as Assigned,
        Cyclic as Cyclic,
        Disjoint as Disjoint,
        Fixed as Fixed,
        Full as Full,
        Parts as Parts,
        Poisson as Poisson,
        Shuffled as Shuffled,
    )
    from torch_dpsco.algorithms.correlated import CorrelatedSGD as CorrelatedSGD
    from torch_dpsco.algorithms.heavy_plan import Pilot as Pilot
    from torch_dpsco.algorithms.heavy_tailed import (
        AcceleratedSGD as AcceleratedSGD,
        ClippedSGD as ClippedSGD,
        ProximalSGD as ProximalSGD,
    )
    from torch_dpsco.algorithms.holder import HolderSGD as HolderSGD
    from torch_dpsco.algorithms.localized import LocalizedSGD as LocalizedSGD
    from torch_dpsco.algorithms.nets import NetSGD as NetSGD
    from torch_dpsco.algorithms.output_sgd import (
        BoltOnPSGD as BoltOnPSGD,
        HolderOutputSGD as HolderOutputSGD,
    )
    from torch_dpsco.algorithms.prepared import standardize as standardize
    from torch_dpsco.algorithms.users import UserClippedSGD as UserClippedSGD
    from torch_dpsco.algorithms.users import (
        LocalizedUserSGD as LocalizedUserSGD,
        UserFilteredSGD as UserFilteredSGD,
    )
    from torch_dpsco.audits.repeated import (
        audit as audit,
        audit_outputs as audit_outputs,
        audit_training as audit_training,
    )
    from torch_dpsco.diagnosis import doctor as doctor
    from torch_dpsco.estimators.schema import Schema as Schema
    from torch_dpsco.estimators.solved import (
        NoisyGD as NoisyGD,
        ObjectivePerturbation as ObjectivePerturbation,
        OutputPerturbation as OutputPerturbation,
    )
    from torch_dpsco.fast.compiled import CompiledRows as CompiledRows
    from torch_dpsco.fast.private_layers import private_layers as private_layers
    from torch_dpsco.losses.per_record import per_record as per_record
    from torch_dpsco.private_loop import make_private as make_private
    from torch_dpsco.problem import Phase as Phase, Problem as Problem, Schedule as Schedule
    from torch_dpsco.rows.attach import attach as attach, detach as detach
    from torch_dpsco.show import loggers as loggers
    from torch_dpsco.statistics.scores import score as score
    from torch_dpsco.statistics.study import study as study
    from torch_dpsco.step.step import (
        PrivateOptimizer as PrivateOptimizer,
        public as public,
        same_records as same_records,
    )
    from torch_dpsco.train import fit as fit

# files, and the public names that are imported from them when they are first used
_HOMES = {
    "accounting.accountant": "Accountant",
    "accounting.budgets": "Budget",
    "accounting.designs": "Assigned Cyclic Disjoint Fixed Full Parts Poisson Shuffled",
    "algorithms.correlated": "CorrelatedSGD",
    "algorithms.heavy_plan": "Pilot",
    "algorithms.heavy_tailed": "AcceleratedSGD ClippedSGD ProximalSGD",
    "algorithms.holder": "HolderSGD",
    "algorithms.localized": "LocalizedSGD",
    "algorithms.nets": "NetSGD",
    "algorithms.output_sgd": "BoltOnPSGD HolderOutputSGD",
    "algorithms.prepared": "standardize",
    "algorithms.users": "LocalizedUserSGD UserClippedSGD UserFilteredSGD",
    "audits.repeated": "audit audit_outputs audit_training",
    "diagnosis": "doctor",
    "estimators.schema": "Schema",
    "estimators.solved": "NoisyGD ObjectivePerturbation OutputPerturbation",
    "fast.compiled": "CompiledRows",
    "fast.private_layers": "private_layers",
    "losses.per_record": "per_record",
    "private_loop": "make_private",
    "problem": "Phase Problem Schedule",
    "rows.attach": "attach detach",
    "statistics.scores": "score",
    "statistics.study": "study",
    "step.step": "PrivateOptimizer public same_records",
    "train": "fit",
}
_PLACES = {name: home for home, names in _HOMES.items() for name in names.split()}
_PARTS = (
    "audits",
    "errors",
    "estimators",
    "loggers",
    "losses",
    "oracles",
    "prox",
    "rules",
    "sampling",
)
__all__ = sorted((*_PLACES, *_PARTS))

__dir__ = public_names(__name__)


def _load_all() -> None:
    for name in __all__:
        getattr(sys.modules[__name__], name)


register("plan.kinds", _load_all)  # a saved plan is read by the name of its class

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
