"""Audits: lower bounds, with stated confidence, on the epsilon of anything that runs on two neighboring inputs.

    run the mechanism on both inputs, many times, in random order
    half of the outputs choose a test: a score, a threshold, and which side is to score high
    the other half counts how often the test says "high" on each side; Clopper-Pearson intervals bound both rates
    (epsilon, delta)-DP bounds the ratio of such rates, so that their bounds bound epsilon

A lower bound above the epsilon that somebody claims refutes the claim. One below it proves nothing: the accounting does
that, an audit finds its bugs. What is audited is the code as it runs: sampling, clipping, noise, update, answer.

`audit` takes a function; `audit_outputs` outputs that are there already, e.g. of a vectorized simulation;
`audit_training` makes the function and the score from a private optimizer and one record, the canary.

Source: Jagielski, Ullman, Oprea 2020 and Nasr et al. 2021 (likelihood-ratio and canary attacks with Clopper-Pearson
intervals).
"""

from torch_dpsco.audit.bound import Audit
from torch_dpsco.audit.experiments import audit, audit_outputs, audit_training

__all__ = ["Audit", "audit", "audit_outputs", "audit_training"]
