"""Min-max problems with known solutions; every pair that leaves is certified."""

from __future__ import annotations

import math

import pytest
import torch

from torch_dpsco.errors import NotCertifiedError
from torch_dpsco.losses import Logistic
from torch_dpsco.objectives import Adversarial
from torch_dpsco.solvers import solve
from torch_dpsco.solvers.minimax import Saddle, extragradient, gradient_descent_max_oracle, minimax_appa


def bilinear(seed, dim=3, size=4, mu=0.5, curvature=0.0):
    """H = mu/2 |w|^2 + <a, w> + <v, A w - c> - curvature/2 |v|^2 over the box |v_i| <= 1, and its solution."""
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(size, dim, generator=generator, dtype=torch.float64)
    a, c = torch.randn(dim, generator=generator).double(), torch.randn(size, generator=generator).double()
    smoothness = float(torch.linalg.matrix_norm(A, 2)) + mu + curvature

    def response(w):
        pull = A @ w - c
        return (pull / curvature).clamp(-1, 1) if curvature else pull.sign()

    saddle = Saddle(
        descent=lambda w, v: mu * w + a + A.T @ v,
        ascent=lambda w, v: A @ w - c - curvature * v,
        project=lambda v: v.clamp(-1, 1),
        highest=torch.sign,
        strong_convexity=mu,
        smoothness=smoothness,
        diameter=2 * math.sqrt(size),
        error=1e-13,
        best_response=response,
    )
    # the dual in v alone: max of <-c, v> - |a + A^T v|^2/(2 mu) - curvature/2 |v|^2, by long projected ascent
    v = torch.zeros(size, dtype=torch.float64)
    step = 1 / (smoothness**2 / mu + curvature)
    for _ in range(4_000):
        v = (v + step * (-c - A @ (a + A.T @ v) / mu - curvature * v)).clamp(-1, 1)
    return saddle, -(a + A.T @ v) / mu, smoothness**2 / curvature if curvature else None


STARTS = torch.ones(3, dtype=torch.float64), torch.full((4,), 5.0, dtype=torch.float64)


@pytest.mark.representatives(1)
@pytest.mark.parametrize("solver", [extragradient, minimax_appa])
@pytest.mark.parametrize("curvature", [0.0, 1.0])
def test_saddle_solvers_end_certified_near_the_true_solution(solver, curvature):
    for seed in range(2):
        saddle, exact, _ = bilinear(seed, curvature=curvature)
        for tolerance in (0.3, 0.02):
            solution = solver(saddle, *STARTS, tolerance)
            assert solution.certificate.proves(tolerance)
            assert float((solution.w - exact).norm()) <= tolerance
            assert bool((solution.v.abs() <= 1 + 1e-12).all())


def test_descent_with_an_exact_maximum_ends_certified():
    for seed in range(4):
        saddle, exact, curvature = bilinear(seed, curvature=1.0)
        solution = gradient_descent_max_oracle(saddle, STARTS[0], 1e-4, smoothness=curvature + 0.5)
        assert solution.certificate.proves(1e-4)
        assert float((solution.w - exact).norm()) <= 1e-4


def test_saddle_certificates_cover_the_true_distance_at_random_pairs():
    for seed in range(6):
        saddle, exact, _ = bilinear(seed)
        generator = torch.Generator().manual_seed(seed)
        for scale in (1.0, 1e-2, 1e-4):
            for _ in range(20):
                w = exact + scale * torch.randn(3, generator=generator, dtype=torch.float64)
                v = torch.randn(4, generator=generator, dtype=torch.float64).clamp(-1, 1)
                assert float((w - exact).norm()) <= saddle.certificate(w, v).distance + 1e-7


def test_a_problem_that_is_not_what_it_promises_is_refused():
    saddle, _, _ = bilinear(0)
    broken = Saddle(**{**vars(saddle), "descent": lambda w, v: w * math.nan})
    with pytest.raises(NotCertifiedError, match="no certificate"):
        extragradient(broken, *STARTS, 0.1)
    with pytest.raises(ValueError, match="best_response"):
        gradient_descent_max_oracle(Saddle(**{**vars(saddle), "best_response": None}), STARTS[0], 0.1, 1.0)
    with pytest.raises(ValueError, match="float64"):
        saddle.certificate(STARTS[0].float(), STARTS[1])
    with pytest.raises(ValueError, match="strong_convexity"):
        Saddle(**{**vars(saddle), "strong_convexity": 0.0})


def test_the_closed_form_of_a_linear_attack_is_a_saddle_value_for_one_record():
    """One record: the solution of the closed form is the best w against its own worst attack."""
    X, y = torch.tensor([[1.0, 0.5]], dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    objective = Adversarial(Logistic(), X, y, attack_radius=0.3, reg=0.2, normalizer=1)
    w = solve(objective, 1e-9).w
    attacked = X[0] - 0.3 * w / w.norm()
    slope = -torch.sigmoid(-(attacked @ w)) * attacked + 0.2 * w
    assert float(slope.norm()) <= 1e-8
