"""Noisy gradient descent on a strongly convex objective: a cost that converges with the number of steps.

Full-batch steps w <- w - eta (g(w) + s N(0, I)) on a sum objective that is mu-strongly convex and beta-smooth, with
0 < eta < 2 / beta: the noiseless map is c-Lipschitz, c = max(|1 - eta mu|, |1 - eta beta|) < 1, so that later steps
forget. If only the last iterate is released, its cost stays below that of about 2 / (1 - c) steps.

Shifted interpolation. On two neighboring data sets the maps are c-Lipschitz and differ by at most eta S everywhere. Let
z_0 = 0, z_(k+1) = c z_k + eta S - a_(k+1) >= 0 and z_T = 0: z_k bounds the distance that is left between the chains
when a_k of it has been handed to the noise of step k, at the price of GDP with level a_k / (eta s). The last iterates
are GDP with level sqrt(sum a_k^2) / (eta s). The constraint is sum c^(T-k) a_k = eta S (1 - c^T) / (1 - c), so that by
Cauchy-Schwarz a_k proportional to c^(T-k) is the best (all z_k >= 0, since a_k increases with k), and

    mu = (S/s) sqrt( (1 - c^T) / (1 + c^T) * (1 + c) / (1 - c) ).

Quadratic objectives with gradients that differ by a constant attain it.

Source: docs/proofs/output.md#noisy-gradient-descent; Bok, Su and Altschuler 2024 (the method is theirs).
"""

from __future__ import annotations

import math

from torch_dpsco import _validate

_ROUNDING = 1e-14  # relative: more than that of a few operations


def noisy_gd_mu(steps: float, contraction: float, sensitivity: float, noise_std: float) -> float:
    """Returns mu of the last iterate of noisy gradient descent, rounded up.

    With x = log(1/c) it is (S/s) sqrt(tanh(T x / 2) / tanh(x / 2)), at most (S/s) sqrt(T), the cost of releasing all.

    Args:
        steps: T, an integer >= 0, or inf for the limit.
        contraction: c in [0, 1], a Lipschitz constant of the noiseless step on every data set; 1: it does not expand.
        sensitivity: S >= 0, bound on how far the sum gradients of neighboring data sets differ, at every point.
        noise_std: s > 0, std per coordinate of the noise on the sum gradient.

    Returns:
        mu >= 0; inf if c = 1 and T = inf.

    Raises:
        ValueError: an argument is out of range.

    Guarantee: mu-GDP of the last iterate alone, under the adjacency under which S holds, if c and S are promised for
        all points (or each step projects on a public convex set, and for all points of it), the start is public, every
        step uses all records, and no other iterate, and no function of one, is released. Never together with
        amplification by sampling.

    Source: docs/proofs/output.md#noisy-gradient-descent

    Example:
        >>> round(noisy_gd_mu(steps=50, contraction=0.9, sensitivity=1.0, noise_std=2.0), 6)
        2.168246
    """
    total = math.inf if steps == math.inf else float(_validate.count(steps=steps))
    contraction = _validate.between(0.0, 1.0, contraction=contraction)
    sensitivity = _validate.nonnegative(sensitivity=sensitivity)
    noise_std = _validate.positive(noise_std=noise_std)
    if sensitivity == 0 or total == 0:
        return 0.0
    if contraction == 0 or total == 1:
        growth = 1.0
    elif contraction == 1:
        growth = math.sqrt(total)
    else:
        rate = -math.log(contraction)
        growth = math.sqrt(math.tanh(total * rate / 2) / math.tanh(rate / 2))
    # PRIVACY: rounded up, and the quotient first: it may be subnormal (test_mu_is_the_exact_formula_rounded_up)
    return math.nextafter(sensitivity / noise_std, math.inf) * growth * (1 + _ROUNDING)
