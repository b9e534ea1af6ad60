"""The clipped mean: each line of its table of edge cases, and one number behind noise, sensitivity and event."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import torch_dpsco as dp
from tests.problems import released
from tests.streams import gaussians, seeded
from torch_dpsco import native
from torch_dpsco.accounting.events import ADD_REMOVE, ADJACENCIES, REPLACE_ONE, ZERO_OUT
from torch_dpsco.errors import SequenceError
from torch_dpsco.rows import Block, DenseBlock, FactoredBlock, GradBatch, plan_summation
from torch_dpsco.step.oracle import Clipped, clip_weights, joint_norm

UNITS = {ADD_REMOVE: 1, ZERO_OUT: 1, REPLACE_ONE: 2}
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
CLIP = 2.0


def batch(*blocks: Tensor) -> GradBatch:
    return GradBatch([DenseBlock(block) for block in blocks])


def mean(rows: Tensor, clip: float = CLIP, size: int = 1) -> Tensor:
    """Returns the noiseless mean of rows of one parameter, in float64."""
    return released(Clipped(clip, 0.0, size), [torch.zeros(rows.shape[1])], [batch(rows)])


# -- the table, line by line ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_row_inside_the_clip_is_unchanged(dtype):
    for length in (0.999, 0.5, 1e-3):
        row = (torch.tensor([[0.6, -0.8]]) * CLIP * length).to(dtype)
        assert torch.equal(mean(row), row[0].double())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scale", [1.001, 3.0, 1e4, 1e18])
def test_a_row_past_the_clip_is_scaled_to_the_clip(dtype, scale):
    if dtype == torch.float16:
        scale = min(scale, 1e4)
    row = (torch.tensor([[0.6, -0.8, 0.0]]) * CLIP * scale).to(dtype)
    got, double = mean(row), row[0].double()
    assert CLIP * (1 - 2e-4) <= torch.linalg.vector_norm(got) <= CLIP
    torch.testing.assert_close(got / got.norm(), double / double.norm(), rtol=1e-12, atol=1e-15)


BAD = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("bad", [*BAD, 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_non_finite_rows_contribute_nothing(bad, dtype):
    if dtype == torch.float64 and bad == 3e38:
        bad = 1e300
    good = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    spoiled = torch.full((3, 3), 0.25, dtype=dtype)
    spoiled[:, 1] = bad
    spoiled[2, 0] = -bad
    rows = torch.cat([spoiled[:1], good[:2], spoiled[1:], good[2:]])
    assert torch.equal(mean(rows, size=4), mean(good, size=4))
    assert torch.equal(mean(spoiled), torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("where", ["acts", "backprops", "other parameter"])
def test_a_row_that_is_not_finite_in_one_parameter_is_dropped_in_all(bad, where):
    parts = {
        "acts": torch.ones(3, 2),
        "backprops": torch.ones(3, 2),
        "other parameter": torch.ones(3, 4),
    }

    def blocks(index: list[int]) -> list[Block]:
        acts, backprops, other = (part[index] for part in parts.values())
        return [FactoredBlock(acts, backprops), DenseBlock(other)]

    query = [torch.zeros(2, 2), torch.zeros(2), torch.zeros(4)]
    parts[where][1, 0] = bad
    parts["backprops" if where == "acts" else "acts"][1] = 0.0  # 0 * inf must not survive as NaN
    oracle = Clipped(CLIP, 0.0, 3)
    everything = released(oracle, query, [GradBatch(blocks([0, 1, 2]))])
    assert torch.equal(everything, released(oracle, query, [GradBatch(blocks([0, 2]))]))
    assert everything.isfinite().all()


def test_zero_and_subnormal_rows_are_unchanged():
    for dtype in (torch.float32, torch.float64):
        tiny = torch.finfo(dtype).smallest_normal
        rows = torch.tensor([[0.0, 0.0], [tiny / 8, tiny], [-tiny / 2, 3 * tiny]], dtype=dtype)
        assert torch.equal(mean(rows), rows.double().sum(0))
        assert torch.equal(mean(rows[:1]), torch.zeros(2, dtype=torch.float64))


def test_what_underflows_cannot_pass_a_tiny_clip():
    row = torch.full((1, 100), 2.0**-70)  # its float32 square is 0
    assert torch.linalg.vector_norm(mean(row, clip=2.0**-69)) <= 2.0**-69


@pytest.mark.parametrize("observed", [False, True])
def test_an_empty_batch_releases_noise_only(observed):
    for noise in (0.0, 1.5):
        oracle = Clipped(CLIP, noise, 4)
        oracle.open([torch.zeros(3, 2), torch.zeros(())])
        if observed:
            oracle.observe(batch(torch.zeros(0, 3, 2), torch.zeros(0)))
        answer = oracle.release(torch.Generator().manual_seed(1))
        flat = torch.cat([part.flatten() for part in answer.mean])
        assert [part.shape for part in answer.mean] == [(3, 2), ()]
        assert not answer.halted
        expected = (
            gaussians(7, seeded(1), oracle.noise_std, torch.float32) if noise else torch.zeros(7)
        )
        assert torch.equal(flat, expected)
        assert bool(flat.any()) is (noise > 0)


def test_without_noise_the_mean_is_exact_and_epsilon_infinite():
    oracle = Clipped(CLIP, 0.0, 2)
    rows = torch.tensor([[1.0, 0.5], [0.25, -0.5]], dtype=torch.float64)
    torch.testing.assert_close(mean(rows, size=2), rows.mean(0), rtol=1e-15, atol=0)
    accountant = dp.Accountant()
    accountant.record(oracle.event())
    assert accountant.get_epsilon(1e-5) == math.inf


@pytest.mark.parametrize("clip", [0.0, -1.0, math.inf, math.nan, None, "1"])
def test_a_clip_that_is_not_positive_and_finite_is_refused(clip):
    with pytest.raises(ValueError, match="clip must be"):
        Clipped(clip, 1.0, 1)


def test_other_bad_numbers_are_named():
    for noise in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="noise_multiplier must be"):
            Clipped(1.0, noise, 1)
    for size in (0, -1, 1.5):
        with pytest.raises(ValueError, match="batch_size must be"):
            Clipped(1.0, 1.0, size)


# -- weights ----------------------------------------------------------------------------------------------------------

positive = st.floats(min_value=1e-150, max_value=1e150)


@given(st.lists(positive, min_size=1, max_size=8), positive)
def test_clip_weights_are_min_of_one_and_clip_over_norm(norms, clip):
    weights = clip_weights(torch.tensor(norms, dtype=torch.float64), clip)
    for norm, weight in zip(norms, weights.tolist(), strict=True):
        assert math.isclose(weight, min(1.0, clip / norm), rel_tol=1e-9, abs_tol=1e-300)
        assert weight <= 1.0
        assert Fraction(weight) * Fraction(norm) <= Fraction(clip)


def test_clip_weights_drop_what_has_no_norm():
    norms = torch.tensor([math.nan, math.inf, 0.0, 1e-320, 1e308, 2.0], dtype=torch.float64)
    assert clip_weights(norms, 1.0).tolist()[:4] == [0.0, 0.0, 1.0, 1.0]
    assert clip_weights(norms, 1e-300).isfinite().all()
    assert clip_weights(norms, 1e300).tolist()[5] == 1.0


def test_the_joint_norm_is_an_upper_bound_and_inf_where_it_is_none():
    parts = [torch.tensor([3.0]), torch.tensor([[0.0, 4.0]]), torch.tensor(12.0)]
    assert 13.0 <= joint_norm(parts) <= 13.0 * (1 + 1.3e-4)
    for bad in BAD:
        assert joint_norm([torch.zeros(2), torch.tensor([bad])]) == math.inf


# -- one number behind noise, sensitivity and event -------------------------------------------------------------------


@pytest.mark.parametrize("adjacency", ADJACENCIES)
@pytest.mark.parametrize(
    ("clip", "noise", "size", "dim"),
    [(0.5, 1.1, 8, 3), (1e-6, 0.3, 512, 10**4), (7.0, 4.0, 1, 1)],
)
def test_sensitivity_noise_and_event_agree(in_torch, adjacency, clip, noise, size, dim):
    oracle = Clipped(clip, noise, size)
    oracle.open([torch.zeros(dim)])
    error = plan_summation(size, dim).error
    assert oracle.sensitivity(adjacency) == pytest.approx(
        UNITS[adjacency] * clip * (1 + error) / size, rel=1e-14
    )
    event = oracle.event()
    ratio = oracle.noise_std / oracle.sensitivity(adjacency)
    assert ratio == pytest.approx(event.sigma / event.sensitivity(adjacency), rel=1e-14)
    assert ratio == pytest.approx(noise / UNITS[adjacency], rel=1e-14)


def test_the_summation_is_planned_for_all_parameters_together(in_torch):
    oracle = Clipped(1.0, 1.0, 512)
    oracle.open([torch.zeros(100, 50), torch.zeros(5000)])
    assert oracle.sensitivity(ADD_REMOVE) == (1 + plan_summation(512, 10_000).error) / 512
    oracle.open([torch.zeros(10)])  # planned anew
    assert oracle.sensitivity(ADD_REMOVE) == (1 + plan_summation(512, 10).error) / 512


def test_the_clip_acts_on_the_joint_norm_of_all_parameters():
    oracle = Clipped(1.0, 0.0, 1)
    got = released(
        oracle,
        [torch.zeros(1), torch.zeros(1)],
        [batch(torch.tensor([[3.0]]), torch.tensor([[4.0]]))],
    )
    torch.testing.assert_close(
        got, torch.tensor([0.6, 0.8], dtype=torch.float64), rtol=2e-4, atol=0
    )


def test_metrics_and_settings_are_public_constants():
    oracle = Clipped(0.5, 2.0, 4)
    assert oracle.metrics() == {}
    with pytest.raises(SequenceError, match="no logical batch was opened"):
        _ = oracle.clip
    with pytest.raises(SequenceError):
        oracle.observe(batch(torch.ones(1, 2)))
    oracle.open([torch.zeros(2)])
    before = oracle.metrics()
    assert before == {"clip": 0.5, "noise_std": oracle.noise_std}
    oracle.observe(batch(torch.full((3, 2), 1e6)))
    assert oracle.metrics() == before
    oracle.release(torch.Generator())
    assert oracle.metrics() == before
    assert oracle.settings() == {"oracle": "Clipped", "clip": 0.5, "noise_multiplier": 2.0}


# -- the logical batch ------------------------------------------------------------------------------------------------


def test_physical_batches_add_up_and_each_release_starts_anew():
    rows = torch.randn(7, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    oracle, query = Clipped(CLIP, 0.0, 7), [torch.zeros(3, dtype=torch.float64)]
    whole = released(oracle, query, [batch(rows)])
    parts = released(oracle, query, [batch(part) for part in rows.split(3)])
    torch.testing.assert_close(parts, whole, rtol=1e-13, atol=1e-15)
    assert torch.equal(released(oracle, query, []), torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize(
    "forget", [Clipped.discard, lambda oracle: oracle.open([torch.zeros(2)])]
)
def test_discarded_rows_are_in_no_release(forget):
    oracle = Clipped(CLIP, 0.0, 1)
    oracle.open([torch.zeros(2)])
    oracle.observe(batch(torch.ones(1, 2)))
    forget(oracle)
    assert not oracle.release(torch.Generator()).mean[0].any()


def test_observing_does_not_change_the_rows():
    rows = torch.randn(6, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    before = rows.clone()
    mean(rows, clip=0.1)
    assert torch.equal(rows, before)


def test_more_rows_than_the_bound_covers_are_refused():
    limit = plan_summation(1, 1).max_rows
    oracle = Clipped(CLIP, 0.0, 1)
    oracle.open([torch.zeros(1)])
    oracle.observe(batch(torch.zeros(limit - 1, 1)))
    oracle.observe(batch(torch.zeros(1, 1)))
    with pytest.raises(SequenceError, match=f"at most {limit} rows"):
        oracle.observe(batch(torch.zeros(1, 1)))


@pytest.mark.parametrize("dtype", FLOATS)
def test_answers_are_in_float32_or_the_precision_of_the_parameters(dtype):
    oracle = Clipped(CLIP, 1.0, 1)
    oracle.open([torch.zeros(2, dtype=dtype), torch.zeros(1)])
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    assert {part.dtype for part in oracle.release(torch.Generator()).mean} == {expected}


def test_a_copy_of_an_oracle_has_its_own_batch():
    oracle = Clipped(CLIP, 0.0, 1)
    oracle.open([torch.zeros(1)])
    oracle.observe(batch(torch.ones(1, 1)))
    twin = copy.deepcopy(oracle)
    twin.discard()
    assert oracle.release(torch.Generator()).mean[0].item() == 1.0
    assert twin.release(torch.Generator()).mean[0].item() == 0.0


def test_a_release_ends_the_batch():
    oracle = Clipped(CLIP, 0.0, 1)
    oracle.open([torch.zeros(1)])
    oracle.observe(batch(torch.ones(1, 1)))
    assert [oracle.release(torch.Generator()).mean[0].item() for _ in range(2)] == [1.0, 0.0]


def test_calls_before_open_are_refused():
    oracle = Clipped(clip=1.0, noise_multiplier=1.0, batch_size=2)
    with pytest.raises(SequenceError, match="no logical batch was opened"):
        oracle.observe(GradBatch([DenseBlock(torch.ones(1, 2))]))
    with pytest.raises(SequenceError, match="no logical batch was opened"):
        oracle.release(torch.Generator())


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda oracle: pickle.loads(pickle.dumps(oracle))],
    ids=["copy", "file"],
)
def test_releases_of_copied_oracles_have_noise(copied):
    oracle = Clipped(1.0, 1.0, batch_size=1)
    oracle.open([torch.zeros(3), torch.zeros(1)])
    oracle.release(torch.Generator())
    twin = copied(oracle)
    for _ in range(2):
        twin.open([torch.zeros(3), torch.zeros(1)])
        twin.observe(GradBatch([DenseBlock(torch.zeros(1, 3)), DenseBlock(torch.zeros(1, 1))]))
        parts = twin.release(torch.Generator().manual_seed(1)).mean
        assert len({*torch.cat(parts).tolist(), 0.0}) == 5


def moved(how, model):
    if how == "another dtype":
        model.double().float()
    elif how == "zeros":
        for p in model.parameters():
            p.grad.data = torch.zeros_like(p.grad)


@pytest.mark.parametrize("how", ["nothing", "another dtype", "zeros"])
def test_a_gradient_that_is_pointed_elsewhere_leaves_the_noise_in_the_next_release(how):
    """`Module.to` and the like re-point p.grad.data. False alarm: below 1e-9 (Gaussians within 1e-12)."""
    model = dp.attach(torch.nn.Linear(4, 1))
    optimizer = dp.PrivateOptimizer(
        model.parameters(),
        0.1,
        oracle=Clipped(1.0, 100.0, 8),
        rule=dp.rules.SGD(),
        design=dp.Full(8),
        adjacency="replace_one",
    )
    gradients, x = [], torch.ones(8, 4)
    for _ in optimizer.loader(torch.utils.data.TensorDataset(x), steps=4):
        model(x).sum().backward()
        optimizer.step()
        gradients.append(torch.cat([p.grad.flatten().clone() for p in model.parameters()]))
        moved(how, model)
    for before, after in itertools.pairwise(gradients):
        assert (after - before).abs().min() > 1e-12
        assert (
            after - before
        ).std() > 1e-3  # the mean of clipped rows is the same in all steps, the noise is not


def test_large_sums_become_releases_with_fresh_noise_in_every_coordinate(in_torch):
    """False alarm: below 1e-7 (standard deviations and means within 6 of their own standard deviations)."""
    shapes, row = [(400, 400), (3,)], 1e-3
    oracle, generator, known = Clipped(1.0, 1.0, 2), torch.Generator(), []
    generator.seed()
    for _ in range(2):
        oracle.open([torch.zeros(shape) for shape in shapes])
        oracle.observe(
            GradBatch([DenseBlock(*(torch.full((2, *shape), row) for shape in shapes))])
        )
        assert (
            oracle._means[0].dtype == torch.float32
        )  # of the release too, so that it takes the noise in place
        summed = oracle._means[0].clone()
        torch.testing.assert_close(summed, torch.full(shapes[0], row))
        large, small = oracle.release(generator).mean
        assert [large.shape, small.shape] == [torch.Size(shape) for shape in shapes]
        known.append((large, (large - summed).flatten(), small))
    std = oracle.noise_std
    for _, noise, _ in known:
        for piece in noise.split(2**16):
            assert abs(piece.std() / std - 1) < 6 / math.sqrt(2 * len(piece))
            assert abs(piece.mean()) < 6 * std / math.sqrt(len(piece))
    (first, noise, _), (second, other, _) = known
    assert first.data_ptr() != second.data_ptr()
    for one, two in ((noise, other), (noise[: 2**16], noise[2**16 : 2**17])):
        assert abs(torch.dot(one, two)) < 6 * std**2 * math.sqrt(len(one))
    for noise_multiplier, means in ((0.0, True), (1.0, False)):
        oracle = Clipped(1.0, noise_multiplier, 2)
        oracle.open([torch.zeros(shape) for shape in shapes])
        if means:
            oracle.observe(
                GradBatch([DenseBlock(*(torch.full((2, *shape), row) for shape in shapes))])
            )
        large, _ = oracle.release(generator).mean
        assert torch.all(large == summed) if means else large.std() > 0.4


# -- rows of one score ------------------------------------------------------------------------------------------------


@pytest.mark.cases(19, 9)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 2, 1025])
@pytest.mark.parametrize(
    "clip", [1e-300, 1e-20, 2.0**-39, 1e-6, 1e-3, 1.0, 2.0**39, 1e20, 1e300]
)
def test_rows_of_one_huge_feature_are_clipped(clip, width, dtype):
    # weights C / |x| are subnormal numbers for some of them, which rounding may double
    least, share = float(torch.finfo(dtype).max), 0.0
    for exponent in (1e-30, 1e-12, 1e-6, 0.03, 0.3, 0.7, 0.99):
        value = (
            least**exponent
            if exponent < 0.1
            else least**0.5 * exponent
            if width > 1
            else least * exponent
        )
        for batch_size in (1, 100):
            features = torch.zeros(2, width, dtype=dtype)
            features[0, 0] = value
            oracle = Clipped(clip, 0.0, batch_size)
            oracle.open([torch.zeros(1, width, dtype=dtype), torch.zeros(1, dtype=dtype)])
            slopes = torch.full((2, 1), min(1e3 * clip, least), dtype=dtype).clamp(min=1.0)
            slopes[1] = 0.0
            oracle.observe(GradBatch([FactoredBlock(features, slopes)]))
            moved = torch.zeros(width + 1, dtype=torch.float64)
            oracle.write_sum(moved)
            scale = float(moved.abs().max()) or 1.0
            share = max(
                share, scale * float((moved / scale).norm()) / oracle.sensitivity("zero_out")
            )
    assert share <= 1.0
    # past that range slopes of that dtype cannot reach the clip, or weights below 2^-126 count as 0
    assert share > 0.9 or not 1e-30 < clip < 1e19


SCORES = {
    "short": [0.1, -0.2, 0.0, 0.05],
    "long": [3.0, -0.1, 100.0, -7.0],
    "zero": [0.0, 0.0, 0.0, 0.0],
    "not finite": [math.nan, 0.5, math.inf, -0.1],
    "tiny": [2.0**-149, -(2.0**-130), 1.0, 2.0**-126],
}


@pytest.mark.cases(32, 16)
@pytest.mark.parametrize(
    "features",
    [[1.0, -2.0], [0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0], [1e30, -1e30]],
    ids=str,
)
@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("cls", [Clipped, dp.oracles.AutoClip])
@pytest.mark.parametrize("where", ["as it is", "in torch"])
def test_linear_rows_are_clipped_dropped_and_summed_as_all_others(
    where, cls, name, features, request
):
    if where == "in torch":
        request.getfixturevalue("in_torch")
    slopes = torch.tensor(SCORES[name])
    acts = torch.tensor([[0.5, 0.25], features, [-1.0, 2.0], [3.0, 0.0]])
    block = FactoredBlock(acts, slopes[:, None])
    rows = GradBatch([block])
    assert (rows.clipped_sum(0.5, 1.0) is not None) is native.is_available()
    query = [torch.zeros(1, 2), torch.zeros(1)]
    others = GradBatch([DenseBlock(part) for part in block.dense()])
    assert others.clipped_sum(0.5, 1.0) is None

    def answer(batch: GradBatch) -> Tensor:
        oracle = Clipped(0.5, 0.0, 4) if cls is Clipped else cls(0.5, 0.0, 4, offset=0.1)
        return released(oracle, query, [batch, batch])

    torch.testing.assert_close(
        answer(rows), answer(others), rtol=0, atol=1e-4
    )  # norms are bounds, 2^-14 apart
    assert torch.isfinite(answer(rows)).all()
