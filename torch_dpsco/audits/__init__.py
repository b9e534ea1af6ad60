"""Audits: lower bounds, with stated confidence, on the epsilon of anything that runs.

`repeated` compares many runs on two neighboring inputs; `one_run` guesses, after one run, which canaries were in it,
and makes and scores them for any loop.
"""

from torch_dpsco.acts import public_names
from torch_dpsco.audits.one_run import (
    OneRunAudit,
    OneRunResult,
    canaries,
    check_training,
    epsilon_of_guesses,
    loss_scores,
    mu_of_guesses,
)
from torch_dpsco.audits.repeated import Audit, audit, audit_outputs, audit_training

__all__ = [
    "Audit",
    "OneRunAudit",
    "OneRunResult",
    "audit",
    "audit_outputs",
    "audit_training",
    "canaries",
    "check_training",
    "epsilon_of_guesses",
    "loss_scores",
    "mu_of_guesses",
]

__dir__ = public_names(__name__)
