"""Ghost rows: norms of a first backward and weighted sums of a second one are those of explicit rows, and certified."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from tests.problems import column, make_optimizer
from tests.rows.test_rows import MODELS, built, loop, losses, mlp, trained
from torch_dpsco.accounting.designs import Undeclared
from torch_dpsco.errors import SequenceError
from torch_dpsco.rows import FLOAT64, GradBatch, has_rows
from torch_dpsco.rows import ghost as ghost_block

CLIP = 0.25


def ghost(model: nn.Module) -> nn.Module:
    return dp.attach(model, rows="ghost")


def mean_of(model: nn.Module, each: Tensor, clip: float = CLIP) -> Tensor:
    """Returns the clipped mean, without noise, that a step releases for these losses."""
    ours = make_optimizer(model, Undeclared(len(each)), clip=clip)
    dp.ghost_backward(model, each)
    ours.step()
    return torch.cat([p.grad.flatten() for p in trained(model)])


def clipped_mean(rows: list[Tensor], clip: float = CLIP) -> Tensor:
    """Returns the mean of explicit rows."""
    flat = torch.cat([part.flatten(1) for part in rows], dim=1)
    return (flat * (clip / torch.linalg.vector_norm(flat, dim=1, keepdim=True)).clamp(max=1.0)).mean(0)


@pytest.mark.parametrize("name", MODELS)
def test_clipped_means_are_those_of_explicit_rows(name: str) -> None:
    model, x = built(name)
    expected = clipped_mean(loop(copy.deepcopy(model), x))
    torch.testing.assert_close(mean_of(ghost(model), losses(model, x)), expected, rtol=1e-7, atol=1e-9)
    assert not has_rows(trained(model))


@pytest.mark.parametrize("shape", [(16,), (16, 1)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_clipped_sums_stay_below_their_bound_for_losses_with_and_without_a_column(
    shape: tuple[int, ...], reduction: str
) -> None:
    # docs/proofs/rounding.md#ghost-rows
    # Opacus 1.6 multiplies coefficients (B,) by losses (B, 1), so that this sum is several times B C
    torch.manual_seed(0)
    model, x, y = nn.Linear(10, 1), 5.0 * torch.randn(16, 10), torch.ones(16, 1)
    twin, criterion = copy.deepcopy(model), nn.BCEWithLogitsLoss(reduction="none")
    rows = [torch.autograd.grad(criterion(twin(x[i]), y[i]).sum(), list(twin.parameters())) for i in range(16)]
    expected = clipped_mean([torch.stack(parts) for parts in zip(*rows, strict=True)], clip=0.1)
    dp.attach(model, rows="ghost", loss_reduction=reduction)
    mean = mean_of(model, criterion(model(x), y).reshape(shape), clip=0.1)
    torch.testing.assert_close(mean, expected, rtol=2.0**-12, atol=0.0)  # float32 norms carry 2^-14
    assert torch.linalg.vector_norm(16 * mean) <= 16 * 0.1 * (1 + 1e-6)


@pytest.mark.parametrize("shape", [(), (4, 3), (4, 1, 1), (1, 4)], ids=str)
def test_losses_of_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    model = ghost(nn.Linear(2, 3))
    out = model(torch.ones(4, 2))
    each = {(): out.sum(), (4, 3): out, (4, 1, 1): out[:, :1, None], (1, 4): out[:, 0][None]}[shape]
    with pytest.raises(ValueError, match=r"shape \(B,\) or \(B, 1\) .*losses.flatten\(1\).sum\(1\)"):
        dp.ghost_backward(model, each)
    assert not has_rows(trained(model))


def test_losses_that_are_not_one_per_record_are_refused() -> None:
    model = ghost(mlp())
    out = model(torch.ones(4, 3))
    with pytest.raises(SequenceError, match="one per record of the batch"):
        dp.ghost_backward(model, out.flatten())
    assert not has_rows(trained(model))


@pytest.mark.parametrize("reduction", [torch.sum, torch.mean], ids=["sum", "mean"])
@pytest.mark.parametrize("name", ["mlp", "convolution", "layer norm"])
def test_a_plain_backward_is_refused(name: str, reduction: Callable[[Tensor], Tensor]) -> None:
    model, x = built(name)
    ours = make_optimizer(ghost(model), Undeclared(len(x)))
    before = [p.detach().clone() for p in trained(model)]
    with pytest.raises(SequenceError, match=r"needs dp\.ghost_backward\(model, losses\)"):
        reduction(losses(model, x)).backward()
    with pytest.raises(SequenceError, match="per-sample gradients are missing"):
        ours.step()
    assert all(p.grad is None for p in trained(model))
    assert all(map(torch.equal, before, trained(model)))
    assert len(ours.accountant) == ours.steps == 0


def test_a_layer_that_is_called_by_itself_has_no_plain_backward_either() -> None:
    model = ghost(mlp())
    with pytest.raises(SequenceError, match=r"dp\.ghost_backward"):
        model[0](torch.ones(4, 3)).sum().backward()


def test_only_norms_are_kept_between_the_passes() -> None:
    model, x = built("convolution")
    dp.ghost_backward(ghost(model), losses(model, x))
    assert has_rows(trained(model))
    for p in trained(model):
        assert p.grad is None
        assert p.grad_sample is None
        assert not hasattr(p, "_current_grad_sample")
    with pytest.raises(SequenceError, match="rows are not available with rows='ghost'"):
        GradBatch.consume(trained(model)).dense()


@pytest.mark.parametrize("name", ["mlp", "convolution", "sequences"])
@pytest.mark.parametrize("factor", [0.5, 100.0, math.nan, math.inf])
def test_rows_that_grow_between_the_passes_do_not_pass_the_clip(name: str, factor: float) -> None:
    model, x = built(name, torch.float32)
    dp.ghost_backward(ghost(model), losses(model, x))
    rows = GradBatch.consume(trained(model))
    (block,) = rows.blocks
    promised = rows.norms()
    for layer, kept in block._layers.items():
        block._layers[layer] = [[part * factor for part in parts] for parts in kept]
    weights = torch.zeros(len(x), dtype=torch.float64)
    weights[1] = 1.0
    total = torch.cat([part.flatten().double() for part in rows.weighted_sum(weights)])
    assert torch.linalg.vector_norm(total) <= promised[1]
    assert torch.linalg.vector_norm(total) > 0 or not math.isfinite(factor)


def test_what_is_shortened_is_not_longer_than_was_promised() -> None:
    promised, again = torch.rand(2, 200, dtype=torch.float64).sort(0).values
    for old, new, factor in zip(promised, again, ghost_block._shortening(promised, again), strict=True):
        assert Fraction(float(new)) * Fraction(float(factor)) <= Fraction(float(old))


@pytest.mark.parametrize("name", ["mlp", "layer used twice", "sequences", "convolution", "embedding"])
def test_norms_are_upper_bounds_of_the_exact_ones(name: str) -> None:
    model, x = built(name, torch.float32)
    rows = loop(copy.deepcopy(model), x)
    exact = torch.linalg.vector_norm(torch.cat([part.flatten(1).double() for part in rows], dim=1), dim=1)
    dp.ghost_backward(ghost(model), losses(model, x))
    norms = GradBatch.consume(trained(model)).norms()
    assert (norms >= exact * (1 - 1e-5)).all()  # the loop rounds in another way
    torch.testing.assert_close(norms, exact, rtol=2e-4, atol=0.0)


def test_a_layer_used_twice_has_one_norm() -> None:
    # rows of two uses cancel here: factors of one use would promise less, or more, than the sum has
    model, x = built("layer used twice")
    dp.ghost_backward(ghost(model), losses(model, x))
    (block,) = GradBatch.consume(trained(model)).blocks
    assert sorted(block._norms) == [(0,), (1,), (2, 3)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("name", ["mlp", "convolution", "sequences"])
def test_a_bad_record_counts_nothing_and_touches_no_other(name: str, bad: float) -> None:
    model, x = built(name, torch.float32)
    twin, good = copy.deepcopy(model), x.clone()
    x[2] = bad
    good[2] = 0.0
    there = mean_of(ghost(model), losses(model, x), clip=1e6)
    each = losses(ghost(twin), good)
    keep = torch.ones(len(x))
    keep[2] = 0.0
    without = mean_of(twin, each * keep, clip=1e6)
    tolerance = 2e6 / len(x) if bad == 1e30 else 1e-6  # a finite row may count up to its clip
    assert torch.linalg.vector_norm(there - without) <= tolerance


@pytest.mark.parametrize("name", ["mlp", "convolution", "sequences", "embedding"])
def test_a_replaced_record_moves_the_mean_by_at_most_two_clips(name: str) -> None:
    model, x = built(name, torch.float32)
    twin, other = copy.deepcopy(model), x.clone()
    other[0] = 100 * x[0] if x.is_floating_point() else 6 - x[0]
    moved = mean_of(ghost(model), losses(model, x)) - mean_of(ghost(twin), losses(twin, other))
    ours = make_optimizer(ghost(built(name, torch.float32)[0]), Undeclared(len(x)), clip=CLIP)
    ours.oracle.open(list(ours._trained()))
    assert torch.linalg.vector_norm(moved.double()) <= ours.oracle.sensitivity("replace_one")


def test_physical_batches_and_empty_draws_make_the_same_step() -> None:
    data = column(*[float(i) for i in range(12)])
    moves = []
    for rows, physical in (("auto", None), ("ghost", None), ("ghost", 2)):
        torch.manual_seed(0)
        model = dp.attach(nn.Linear(1, 1), rows=rows, loss_reduction="sum")
        ours = make_optimizer(model, dp.Full(12))
        for (x,) in ours.loader(data, steps=3, physical_batch_size=physical):
            each = 0.01 * model(x).square()
            each.sum().backward() if rows == "auto" else dp.ghost_backward(model, each)
            ours.step()
        moves.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(moves[0], moves[1])
    torch.testing.assert_close(moves[0], moves[2])

    model = ghost(nn.Linear(1, 1))
    ours = make_optimizer(model, dp.Poisson(1, 1000), noise=1.0)
    sizes = []
    for (x,) in ours.loader(TensorDataset(torch.ones(1000, 1)), steps=40, padding=False):
        sizes.append(len(x))
        dp.ghost_backward(model, model(x))
        ours.step()
    assert 0 in sizes  # probability of none below 0.64^40 < 1e-7
    assert ours.steps == len(ours.accountant) == 40


def test_uses_that_need_rows_are_refused() -> None:
    model = ghost(nn.Linear(1, 1))
    users = torch.tensor([0, 0, 1, 1])
    uses = (GradBatch.dense, lambda rows: rows.add_by(users, torch.zeros(2, 2)))
    for use in uses:
        dp.ghost_backward(model, losses(model, torch.ones(4, 1)))
        with pytest.raises(SequenceError, match="rows are not available with rows='ghost'"):
            use(GradBatch.consume(trained(model)))


def test_an_optimizer_that_needs_rows_says_so_before_it_charges() -> None:
    model = ghost(nn.Linear(1, 1))
    oracle = dp.oracles.Coordinatewise(CLIP, 1.0, 4, groups=2)
    ours = dp.PrivateOptimizer(model.parameters(), 1.0, oracle=oracle, rule=dp.rules.SGD(), design=dp.Disjoint(4, 4))
    for (x,) in ours.loader(column(1.0, 2.0, 3.0, 4.0), steps=1):
        dp.ghost_backward(model, losses(model, x))
        with pytest.raises(SequenceError, match="attach the model with rows='auto' for this optimizer"):
            ours.step()
    assert len(ours.accountant) == ours.steps == 0


def test_a_term_on_the_weights_is_refused() -> None:
    for name in ("mlp", "convolution"):
        model, x = built(name)
        each = losses(ghost(model), x)
        with pytest.raises(SequenceError, match="is not the sum of its per-sample gradients"):
            dp.ghost_backward(model, each + next(model.parameters()).square().sum())
        assert not has_rows(trained(model))


def test_unused_parameters_and_inputs_with_gradients_are_refused() -> None:
    model = ghost(nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1)]))
    model.forward = lambda x: model[0](x)
    with pytest.raises(SequenceError, match=r"missing for parameter 2 .*requires_grad_\(False\)"):
        dp.ghost_backward(model, model(torch.ones(2, 3)))


def test_each_backward_needs_its_own_forward_and_step() -> None:
    model, x = built("mlp")
    ours = make_optimizer(ghost(model), Undeclared(len(x)))
    each = losses(model, x)
    dp.ghost_backward(model, each)
    with pytest.raises(SequenceError, match="norms of an earlier ghost_backward wait"):
        dp.ghost_backward(model, losses(model, x))
    assert not has_rows(trained(model))
    each = losses(model, x)
    dp.ghost_backward(model, each)
    ours.step()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        dp.ghost_backward(model, each)
    each = losses(model, x)
    ours.discard()
    with pytest.raises(SequenceError, match="a backward must follow its own forward"):
        dp.ghost_backward(model, each)
    with pytest.raises(SequenceError, match="per-sample gradients are missing"):
        ours.step()
    assert ours.steps == 1


def test_other_attachments_and_evaluation_have_no_ghost_backward() -> None:
    for model in (nn.Linear(2, 1), dp.attach(nn.Linear(2, 1))):
        with pytest.raises(SequenceError, match=r"needs dp\.attach\(model, rows='ghost'\)"):
            dp.ghost_backward(model, model(torch.ones(2, 2)))
    model = ghost(nn.Linear(2, 1))
    for forward in (torch.no_grad()(model), model.eval()):
        with pytest.raises(SequenceError, match=r"model\.train\(\)"):
            dp.ghost_backward(model, forward(torch.ones(2, 2)))


def test_parameters_may_be_in_any_order() -> None:
    model, x = built("mlp")
    expected = clipped_mean(loop(copy.deepcopy(model), x))
    groups = [{"params": list(model[2].parameters())}, {"params": list(model[0].parameters())[::-1]}]
    oracle = dp.oracles.Clipped(CLIP, 0.0, len(x))
    ours = dp.PrivateOptimizer(groups, 1.0, oracle=oracle, rule=dp.rules.SGD(), design=Undeclared(len(x)))
    dp.ghost_backward(ghost(model), losses(model, x))
    ours.step()
    torch.testing.assert_close(torch.cat([p.grad.flatten() for p in trained(model)]), expected)


def test_an_optimizer_of_a_part_of_the_parameters_is_refused() -> None:
    model = ghost(mlp())
    dp.ghost_backward(model, losses(model, torch.ones(2, 3)))
    with pytest.raises(SequenceError, match="exactly the model's trainable parameters"):
        GradBatch.consume(list(model[0].parameters()))
    assert not has_rows(trained(model[0]))


def test_a_model_is_neither_copied_nor_detached_with_a_graph_on_it() -> None:
    model = ghost(mlp())
    dp.ghost_backward(model, losses(model, torch.ones(2, 3)))
    with pytest.raises(SequenceError, match="saved or copied between steps"):
        copy.deepcopy(model)
    dp.detach(model)
    assert not has_rows(trained(model))
    assert not any("ghost" in name for p in model.parameters() for name in p.__dict__)
    model(torch.ones(2, 3)).sum().backward()
    assert model[0].weight.grad is not None


def test_rows_of_weight_zero_are_left_out() -> None:
    model, x = built("mlp")
    expected = loop(copy.deepcopy(model), x)
    dp.ghost_backward(ghost(model), losses(model, x))
    weights = torch.tensor([0.0, 0.5, 1e-300, 2.0, 0.0], dtype=torch.float64)
    sums = GradBatch.consume(trained(model)).weighted_sum(weights, FLOAT64)
    for ours, rows in zip(sums, expected, strict=True):
        torch.testing.assert_close(ours, 0.5 * rows[1] + 2.0 * rows[3])


def test_loops_that_call_backward_themselves_refuse_ghost_rows() -> None:
    data, problem = TensorDataset(torch.randn(8, 3), torch.ones(8, 1)), dp.losses.Logistic().problem(bound_x=2.0)
    loss, sgd, loader = (
        nn.BCEWithLogitsLoss(),
        torch.optim.SGD,
        torch.utils.data.DataLoader(data, batch_size=4, shuffle=True),
    )
    model = nn.Linear(3, 1)
    with pytest.raises(SequenceError, match=r"rows must not be 'ghost' .*dp\.ghost_backward"):
        dp.make_private(
            model,
            sgd(model.parameters(), lr=0.1),
            loader,
            problem=problem,
            budget=dp.Budget(1.0, 1e-3),
            n=8,
            rows="ghost",
        )
    ours = make_optimizer(ghost(model), dp.Full(8))  # it was left as it was
    with pytest.raises(SequenceError, match="rows must not be 'ghost'"):
        dp.fit(model, ours, data, loss, steps=1, progress=False)
    assert ours.steps == len(ours.accountant) == 0
