"""Audits: lower bounds, with stated confidence, on the epsilon of anything that runs.

`repeated` compares many runs on two neighboring inputs; `one_run` guesses, after one run, which canaries were in it.
"""

from torch_dpsco.audit.one_run import OneRunAudit, OneRunResult, epsilon_of_guesses
from torch_dpsco.audit.repeated import Audit, audit, audit_outputs, audit_training

__all__ = [
    "Audit",
    "OneRunAudit",
    "OneRunResult",
    "audit",
    "audit_outputs",
    "audit_training",
    "epsilon_of_guesses",
]
