"""Plans for gradient perturbation with Hoelder-smooth losses: step size, risk bound, and the plan itself.

Source: docs/proofs/holder.md#risk-of-gradient-perturbation; Wang, Lei, Ying, Zhang, Algorithm 2.
"""

from __future__ import annotations

import math

from torch_dpsco import _validate as check
from torch_dpsco.theory.holder.schedules import lr_theorem
from torch_dpsco.theory.output_sgd.plan import plan_output

__all__ = ["average_risk_bound", "balanced_lr", "lr_theorem", "plan_output"]


def balanced_lr(distance: float, steps: int, grad_bound: float, dim: int, noise_std: float) -> float:
    """Returns the step size D / sqrt(T (G^2 + d s^2)) that balances the two terms of `average_risk_bound`.

    Args:
        distance: D > 0, guess of |w_1 - w*|; the radius of the feasible set is one.
        steps: T >= 1.
        grad_bound: G >= 0, bound on per-sample gradient norms.
        dim: d >= 1, number of parameters.
        noise_std: s >= 0, std of the noise on the mean gradient.

    Example:
        >>> balanced_lr(distance=1.0, steps=100, grad_bound=1.0, dim=1, noise_std=0.0)
        0.1
    """
    second_moment = (
        check.nonnegative(grad_bound=grad_bound) ** 2
        + check.positive_count(dim=dim) * check.nonnegative(noise_std=noise_std) ** 2
    )
    if second_moment == 0:
        raise ValueError("grad_bound must be > 0 when there is no noise (got 0)")
    return check.positive(distance=distance) / math.sqrt(check.positive_count(steps=steps) * second_moment)


def average_risk_bound(
    distance: float, steps: int, lr: float, grad_bound: float, dim: int, noise_std: float, batch_size: int
) -> float:
    """Returns a bound on the expected excess empirical risk of the uniform average of w_1..w_T.

    D^2/(2 eta T) + (eta/2) (G^2 (1 + 1/b) + d s^2), for convex losses, projected steps and no clipping bias. Proof: the
    expected square of the noisy mean is at most the bracket (the variance of a Poisson batch of expected size b with
    divisor b is at most G^2/b); sum the usual inequality for projected stochastic gradient steps.

    Args:
        distance: D, bound on |w_1 - w*|.
        steps: T.
        lr: eta.
        grad_bound: G, bound on per-sample gradient norms over the feasible set.
        dim: d.
        noise_std: s, std of the noise on the mean gradient.
        batch_size: b.
    """
    second_moment = grad_bound**2 * (1.0 + 1.0 / batch_size) + dim * noise_std**2
    return distance**2 / (2.0 * lr * steps) + 0.5 * lr * second_moment
