"""What a filter must beat: clipping users' gradients, around 0 or a public center, and item-level noise.

Centered clipping, g = c + (1/n) sum_j (x_j - c) min(1, C/|x_j - c|) with c a function of earlier releases, moves by
2C/n when a user is replaced and by C/(qn) when one is added to Poisson samples with the fixed divisor qn. No test, no
failure, no halt. User-level DP-SGD is the case c = 0.

The filter has less noise than full-batch clipping at C if C > `break_even_clip`: a mean gradient several times the
largest distance of honest users. Near an optimum the mean gradient vanishes, and clipping wins.

Source: docs/proofs/user_level.md#clipped-means-of-users, docs/proofs/user_level.md#when-the-filter-wins.
"""

from __future__ import annotations

import math

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.gaussian import gaussian_mu
from torch_dpsco.theory.user_filter import UserFilterPlan


def centered_sensitivity(clip: float, n_users: int, adjacency: str, sample_rate: float = 1.0) -> float:
    """Returns the L2 sensitivity of the mean of rows clipped at C around a public center.

    Args:
        clip: C > 0.
        n_users: n, the divisor over q; public.
        adjacency: "replace_one" (2C/n over q), "add_remove" or "zero_out" (C/n over q; the divisor does not move).
        sample_rate: q in (0, 1].

    Source: docs/proofs/user_level.md#clipped-means-of-users.

    Example:
        >>> centered_sensitivity(1.0, 100, "replace_one"), centered_sensitivity(1.0, 100, "add_remove", 0.5)
        (0.02, 0.02)
    """
    kind = check.choice(("replace_one", "add_remove", "zero_out"), adjacency=adjacency)
    users = check.positive_count(n_users=n_users) * check.positive(sample_rate=sample_rate)
    if sample_rate > 1:
        raise ValueError(f"sample_rate must be in (0, 1] (got {sample_rate})")
    return (2 if kind == "replace_one" else 1) * check.positive(clip=clip) / users


def clipping_noise_std(
    n_users: int, steps: int, epsilon: float, delta: float, clip: float, adjacency: str = "replace_one"
) -> float:
    """Returns the noise of T full-batch means of clipped users' gradients, all of (epsilon, delta) spent on them.

    Source: docs/proofs/user_level.md#when-the-filter-wins.

    Example:
        >>> round(clipping_noise_std(2000, 100, 1.0, 1e-6, 1.0) * 2000)
        84
    """
    sensitivity = centered_sensitivity(clip, n_users, adjacency)
    return sensitivity * math.sqrt(check.positive_count(steps=steps)) / gaussian_mu(epsilon, delta) * (1 + 1e-14)


def break_even_clip(plan: UserFilterPlan) -> float:
    """Returns the C at which full-batch clipping of users needs the noise of the plan, under replace_one.

    Source: docs/proofs/user_level.md#when-the-filter-wins.
    """
    return plan.noise_std / clipping_noise_std(plan.n_users, plan.steps, plan.epsilon, plan.delta, 1.0)
