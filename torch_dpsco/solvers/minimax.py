"""min over w, max over v in S of H(w, v): three solvers for callables, and the saddle certificate C4.

H is mu-strongly convex in w and concave in v. Linear models under attack need none of this: `objectives.Adversarial`
has the inner maximum in closed form.

Differs from the paper in: a maximum of smooth functions is smooth only if H is strongly concave in v
(docs/errata.md#paper-4-lowy-razaviyayn-output-perturbation, E4), so that no rate is promised; the momentum of
the proximal-point method is a heuristic. Privacy rests on C4 alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torch_dpsco._validate import nonnegative, positive, positive_count
from torch_dpsco.errors import NotCertifiedError
from torch_dpsco.solvers.certificates import Certificate, saddle_certificate

__all__ = ["Saddle", "SaddleSolution", "extragradient", "gradient_descent_max_oracle", "minimax_appa"]

_CHECK = 10  # steps between certificates


@dataclass(frozen=True)
class Saddle:
    """A min-max problem; w and v are float64 tensors of any shapes.

    Attributes:
        descent: (w, v) -> grad_w H.
        ascent: (w, v) -> grad_v H.
        project: v -> nearest point of S, a convex compact set.
        highest: linear function g -> a maximizer of <g, v> over S.
        strong_convexity: mu > 0, in w.
        smoothness: l, Lipschitz constant of (grad_w H, grad_v H).
        diameter: of S.
        error: bound on the rounding of ||grad_w H|| and of <grad_v H, v' - v>, which only the caller can know.
        best_response: w -> argmax over v of H(w, v), where it is known.
    """

    descent: Callable[[Tensor, Tensor], Tensor]
    ascent: Callable[[Tensor, Tensor], Tensor]
    project: Callable[[Tensor], Tensor]
    highest: Callable[[Tensor], Tensor]
    strong_convexity: float
    smoothness: float
    diameter: float
    error: float
    best_response: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        for name in ("strong_convexity", "smoothness", "diameter"):
            positive(**{name: getattr(self, name)})
        nonnegative(error=self.error)

    def certificate(self, point: Tensor, adversary: Tensor) -> Certificate:
        """C4 at (w, v).

        Raises:
            ValueError: if a tensor is not float64.
        """
        if point.dtype != torch.float64 or adversary.dtype != torch.float64:
            raise ValueError(f"points must be float64 (got {point.dtype}, {adversary.dtype})")
        slope = self.ascent(point, adversary)
        gap = float((slope * (self.highest(slope) - adversary)).sum())
        size = float(torch.linalg.vector_norm(self.descent(point, adversary)))
        return saddle_certificate(size, gap, self.strong_convexity, self.error)


@dataclass(frozen=True)
class SaddleSolution:
    """A certified pair; not private, and not to be shown.

    Attributes:
        w, v: the pair.
        certificate: of ||w - w*||.
    """

    w: Tensor = field(repr=False)
    v: Tensor = field(repr=False)
    certificate: Certificate = field(repr=False)


def extragradient(saddle: Saddle, point: Tensor, adversary: Tensor, tolerance: float) -> SaddleSolution:
    """Extragradient steps of size 1/(4 l); averages and last iterates are certified in turn.

    Args:
        saddle: the problem.
        point: w_0, float64.
        adversary: v_0, float64; projected first.
        tolerance: r > 0, distance of w to the minimizer of max_v H.

    Returns:
        A pair with certificate.distance <= tolerance.

    Raises:
        NotCertifiedError: if a value is not finite, or the pair is not certified after the number of steps that the
            constants promise: a violated promise, outside of any guarantee.

    Source:
        docs/proofs/output.md#a-saddle-gap-certifies

    Example:
        >>> into_box = lambda v: v.clamp(-1, 1)
        >>> box = Saddle(lambda w, v: w - v, lambda w, v: -w - v, into_box, torch.sign, 1.0, 2.0, 2.0, 1e-15)
        >>> start = torch.ones(1, dtype=torch.float64)
        >>> bool(extragradient(box, start, start, 1e-3).w.abs() <= 1e-3)
        True
    """
    distance, step = positive(tolerance=tolerance), 1 / (4 * saddle.smoothness)
    adversary = saddle.project(adversary)
    sums, count, span = (torch.zeros_like(point), torch.zeros_like(adversary)), 0, _CHECK
    for index in range(_most_steps(saddle, point, adversary, distance)):
        if index % _CHECK == 0:
            pairs = [(point, adversary)] + ([(sums[0] / count, sums[1] / count)] if count else [])
            found = _first_certified(saddle, pairs, distance)
            if found is not None:
                return found
            if count >= span:  # averages restart over doubling spans: a bad start is forgotten
                sums, count, span = (torch.zeros_like(point), torch.zeros_like(adversary)), 0, 2 * span
        ahead = point - step * saddle.descent(point, adversary)
        raised = saddle.project(adversary + step * saddle.ascent(point, adversary))
        point, adversary = (
            point - step * saddle.descent(ahead, raised),
            saddle.project(adversary + step * saddle.ascent(ahead, raised)),
        )
        sums, count = (sums[0] + ahead, sums[1] + raised), count + 1
    raise _refusal()


def gradient_descent_max_oracle(saddle: Saddle, point: Tensor, tolerance: float, smoothness: float) -> SaddleSolution:
    """Gradient descent on G(w) = max_v H(w, v) with an exact inner maximum: grad G = grad_w H(w, v(w)).

    Args:
        saddle: the problem, with `best_response`.
        point: w_0, float64.
        tolerance: r > 0.
        smoothness: beta of G, which is NOT that of H: beta + beta_wv^2/mu_v if H is mu_v-strongly concave.

    Returns:
        A pair with certificate.distance <= tolerance, C1 at an exact maximum: the gap of C4 without its ascent part.

    Raises:
        ValueError: if there is no best response.
        NotCertifiedError: as for `extragradient`.

    Source:
        docs/proofs/output.md#a-saddle-gap-certifies, docs/proofs/output.md#robust-losses
    """
    distance, beta = positive(tolerance=tolerance), positive(smoothness=smoothness)
    if saddle.best_response is None:
        raise ValueError("best_response must be given")
    mu = saddle.strong_convexity
    first = float(torch.linalg.vector_norm(saddle.descent(point, saddle.best_response(point)))) + saddle.error
    steps = 2 * math.ceil(beta / mu * max(1.0, math.log(max(beta * first / (mu * mu * distance), 2.0)))) + 16
    for _ in range(4 * steps):
        adversary = saddle.best_response(point)
        gradient = saddle.descent(point, adversary)
        found = _first_certified(saddle, [(point, adversary)], distance)
        if found is not None:
            return found
        point = point - gradient / beta
    raise _refusal()


def minimax_appa(
    saddle: Saddle, point: Tensor, adversary: Tensor, tolerance: float, rounds: int = 200
) -> SaddleSolution:
    """Accelerated proximal points: w_{t+1} solves min_w max_v H + l ||w - w~_t||^2, w~ extrapolates.

    The inner problem has condition 3 and is solved by extragradient steps on the pair; what the outer loop does not
    reach within its rounds is left to `extragradient`, which ends certified.

    Args:
        saddle: the problem.
        point: w_0, float64.
        adversary: v_0, float64; projected first.
        tolerance: r > 0.
        rounds: outer steps at most.

    Returns:
        A pair with certificate.distance <= tolerance.

    Raises:
        NotCertifiedError: as for `extragradient`.

    Source:
        docs/proofs/output.md#a-saddle-gap-certifies; after Lin, Jin and Jordan 2020.
    """
    distance, prox = positive(tolerance=tolerance), saddle.smoothness
    root = 2 * math.sqrt(max(saddle.smoothness / saddle.strong_convexity, 1.0))
    momentum, step = (root - 1) / (root + 1), 1 / (4 * (saddle.smoothness + 2 * prox))
    adversary, center = saddle.project(adversary), point
    for _ in range(positive_count(rounds=rounds)):
        last = point
        for _ in range(_CHECK):
            ahead = point - step * (saddle.descent(point, adversary) + 2 * prox * (point - center))
            raised = saddle.project(adversary + step * saddle.ascent(point, adversary))
            turn = saddle.descent(ahead, raised) + 2 * prox * (ahead - center)
            point, adversary = point - step * turn, saddle.project(adversary + step * saddle.ascent(ahead, raised))
        found = _first_certified(saddle, [(point, adversary)], distance)
        if found is not None:
            return found
        center = point + momentum * (point - last)
    return extragradient(saddle, point, adversary, distance)


def _first_certified(saddle: Saddle, pairs: list[tuple[Tensor, Tensor]], distance: float) -> SaddleSolution | None:
    for point, adversary in pairs:
        if not bool(torch.isfinite(point).all()):
            raise NotCertifiedError("a value is not finite: the problem is not what it promises")
        certificate = saddle.certificate(point, adversary)
        if certificate.proves(distance):
            return SaddleSolution(point, adversary, certificate)
    return None


def _most_steps(saddle: Saddle, point: Tensor, adversary: Tensor, distance: float) -> int:
    """Steps after which the averages of extragradient are certified, many times over.

    The gap of the average of T steps over a set of squared diameter D^2 is at most 2 l D^2/T, and the saddle point lies
    within ||grad_w H||/mu + (l/mu) diam(S) of the start. C4 sees the gradient, whose square is 2 l times the gap.
    """
    mu, smooth = saddle.strong_convexity, saddle.smoothness
    first = float(torch.linalg.vector_norm(saddle.descent(point, adversary))) + saddle.error
    reach = (first + smooth * saddle.diameter) / mu + saddle.diameter
    gap = mu * distance * distance / 2
    if not math.isfinite(reach):
        raise _refusal()
    return 64 + 64 * math.ceil(min(2 * smooth * reach * reach / gap * (smooth / mu), 1e9))


def _refusal() -> NotCertifiedError:
    return NotCertifiedError("no certificate: the promised constants are violated, or float64 is too coarse")
