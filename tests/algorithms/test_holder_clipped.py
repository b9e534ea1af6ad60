"""The clip that follows from promised constants: at the public iterate, over the feasible set, or the paper's."""

from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import torch_dpsco as dp
from tests.problems import released
from torch_dpsco.errors import MissingConstantError
from torch_dpsco.rows import DenseBlock, GradBatch
from torch_dpsco.step.oracle import HolderClipped

INF = math.inf
HOLDER = {
    "holder_exponent": 0.5,
    "holder_constant": 2.0,
    "grad_at_zero": 1.0,
}  # G(r) = 1 + 2 sqrt(r)


def clip_at(oracle: HolderClipped, *norms: float) -> list[float]:
    """Returns the clips at iterates of these norms, spread over two parameters."""
    clips = []
    for norm in norms:
        oracle.open([torch.tensor([0.6 * norm]), torch.tensor([[0.0, -0.8 * norm]])])
        clips.append(oracle.clip)
    return clips


def bounds(*norms: float) -> list[float]:
    return [pytest.approx(1 + 2 * math.sqrt(norm), rel=2e-4) for norm in norms]


def test_an_adaptive_clip_follows_the_iterate():
    oracle = HolderClipped(dp.Problem(**HOLDER), 1.0, 4)
    assert clip_at(oracle, 0.0, 1.0, 4.0, 1e6) == bounds(0.0, 1.0, 4.0, 1e6)
    assert oracle.metrics() == {"clip": oracle.clip, "noise_std": oracle.noise_std}


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=5))
def test_an_adaptive_clip_is_never_below_the_promised_bound(values):
    problem = dp.Problem(**HOLDER)
    oracle = HolderClipped(problem, 1.0, 4)
    oracle.open([torch.tensor(values)])
    assert oracle.clip >= problem.grad_bound(math.hypot(*values))


def test_the_event_is_the_same_wherever_the_iterate_is():
    oracle = HolderClipped(dp.Problem(**HOLDER), 1.5, 4)
    events = set()
    for norm in (0.0, 3.0, 50.0):
        [clip] = clip_at(oracle, norm)
        assert 1.5 * clip / 4 <= oracle.noise_std <= 1.5 * clip / 4 * (1 + 1e-3)
        events.add(oracle.event())
    assert len(events) == 1


def test_inside_of_a_ball_the_adaptive_clip_stops_at_its_boundary():
    oracle = HolderClipped(dp.Problem(**HOLDER, radius=4.0), 1.0, 4, radius=4.0)
    at_boundary = dp.Problem(**HOLDER).grad_bound(4.0)
    assert clip_at(oracle, 1.0) == bounds(1.0)
    # a projected iterate may be rounded past the boundary
    assert clip_at(oracle, 4.0, 4.0001, 1e9) == [at_boundary] * 3


@pytest.mark.parametrize("noise", ["constant"])
def test_a_constant_clip_ignores_the_iterate(noise):
    oracle = HolderClipped(dp.Problem(**HOLDER, radius=4.0), 1.0, 4, noise=noise, radius=4.0)
    first, *others = clip_at(oracle, 0.0, 2.0, 1e9, INF, math.nan)
    assert first == pytest.approx(5.0, rel=1e-12)
    assert first >= 5.0
    assert others == [first] * 4


@pytest.mark.parametrize(
    ("promised", "feasible"), [(1.0, 9.0), (9.0, 1.0), (1.0, INF), (INF, 1.0)]
)
@pytest.mark.parametrize("noise", ["adaptive", "constant"])
def test_the_smaller_of_promised_and_feasible_radius_counts(promised, feasible, noise):
    oracle = HolderClipped(
        dp.Problem(**HOLDER, radius=promised), 1.0, 4, noise=noise, radius=feasible
    )
    assert clip_at(oracle, 100.0) == [pytest.approx(3.0, rel=1e-12)]


def test_a_lipschitz_constant_that_ends_inside_of_the_feasible_set_still_clips():
    for noise in ("adaptive", "constant"):
        oracle = HolderClipped(
            dp.Problem(lipschitz=2.0, radius=1.0), 1.0, 4, noise=noise, radius=5.0
        )
        assert clip_at(oracle, 0.0, 1.0, 5.0, 1e9) == [2.0] * 4


def test_a_lipschitz_constant_serves_iterates_that_are_rounded_past_its_radius():
    oracle = HolderClipped(
        dp.Problem(lipschitz=2.0, grad_at_zero=1.0, radius=4.0), 1.0, 4, radius=4.0
    )
    assert clip_at(oracle, 1.0, 4.0, 4.0001) == [2.0] * 3


def test_a_bound_that_is_the_same_everywhere_needs_no_finite_iterate():
    oracle = HolderClipped(dp.Problem(lipschitz=2.0), 1.0, 4)
    assert clip_at(oracle, INF, math.nan) == [2.0, 2.0]


@pytest.mark.parametrize("bad", [INF, -INF, math.nan, 3e38])
def test_a_diverged_iterate_is_refused_where_the_clip_follows_it(bad):
    for radius in (INF, 4.0):
        oracle = HolderClipped(dp.Problem(**HOLDER, radius=radius), 1.0, 4, radius=radius)
        with pytest.raises(ValueError, match="the iterate must be finite"):
            oracle.open([torch.zeros(2), torch.tensor([bad, bad])])


@pytest.mark.parametrize(
    ("problem", "noise", "radius", "missing"),
    [
        (dp.Problem(), "adaptive", INF, "lipschitz"),
        (dp.Problem(smoothness=1.0, grad_at_zero=1.0), "constant", 3.0, "holder_constant"),
        (dp.Problem(holder_exponent=0.5, holder_constant=2.0), "adaptive", 3.0, "grad_at_zero"),
        (dp.Problem(**HOLDER), "constant", INF, "finite radius"),
    ],
)
def test_missing_constants_are_named(problem, noise, radius, missing):
    with pytest.raises(MissingConstantError, match=re.escape(missing)):
        HolderClipped(problem, 1.0, 4, noise=noise, radius=radius)


def test_bad_arguments_are_named():
    problem = dp.Problem(lipschitz=1.0)
    with pytest.raises(ValueError, match="noise must be one of adaptive, constant"):
        HolderClipped(problem, 1.0, 4, noise="none")
    for radius in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="radius must be > 0"):
            HolderClipped(problem, 1.0, 4, radius=radius)


def test_with_false_promises_rows_are_clipped_all_the_same():
    problem = dp.Problem(lipschitz=0.5)
    for noise in ("adaptive", "constant"):
        oracle = HolderClipped(problem, 0.0, 1, noise=noise)
        rows = GradBatch([DenseBlock(torch.tensor([[300.0, 400.0]]))])
        assert torch.linalg.vector_norm(released(oracle, [torch.zeros(2)], [rows])) <= 0.5


@pytest.mark.parametrize(
    "loss", [dp.losses.Logistic(), dp.losses.Huber(0.7)], ids=["Logistic", "Huber"]
)
def test_with_true_promises_nothing_is_clipped(loss):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 3, generator=generator, dtype=torch.float64)
    x = x / x.norm(dim=1, keepdim=True) * (1 - 1e-3)
    y = torch.sign(torch.randn(50, 1, generator=generator, dtype=torch.float64))
    bound_y = {} if isinstance(loss, dp.losses.Logistic) else {"bound_y": 1.0}
    problem = loss.problem(bound_x=1.0, radius=5.0, **bound_y)
    w = torch.randn(1, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    grads = [
        torch.autograd.grad(loss(x[i : i + 1] @ w.t(), y[i : i + 1]), w)[0] for i in range(50)
    ]
    rows = torch.stack(grads)
    for noise in ("adaptive", "constant"):
        oracle = HolderClipped(problem, 0.0, 50, noise=noise, radius=5.0)
        mean: Tensor = released(oracle, [w.detach()], [GradBatch([DenseBlock(rows)])])
        torch.testing.assert_close(mean, rows.mean(0).flatten(), rtol=1e-12, atol=1e-15)


def test_settings_tell_other_promises_apart():
    def settings(problem: dp.Problem, **options: object) -> str:
        return repr(HolderClipped(problem, 1.0, 4, **options).settings())

    one = dp.Problem(**HOLDER, radius=2.0)
    exact = dp.Problem(**HOLDER, radius=2.0, exact_grad_bound=abs)
    seen = [
        settings(one),
        settings(one, radius=1.0),
        settings(one, noise="constant"),
        settings(dp.Problem(**HOLDER)),
        settings(exact),
    ]
    assert len(set(seen)) == len(seen)
    assert settings(one) == settings(dp.Problem(**HOLDER, radius=2.0))
