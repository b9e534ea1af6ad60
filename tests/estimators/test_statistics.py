"""AdaSSP: what one record does to the three statistics, their noise, and the ridge."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
import torch
from scipy import stats
from torch import Tensor

import torch_dpsco as dp
from tests.reference.papers.output import adassp_plan_of_the_paper
from torch_dpsco.accounting.analysis.gaussian import gaussian_mu
from torch_dpsco.estimators.least_squares import AdaSSPPlan, adassp_constants, plan_adassp
from torch_dpsco.estimators.preparation import Preparation
from torch_dpsco.estimators.records import Records
from torch_dpsco.estimators.task import LinearTask, make_records
from torch_dpsco.noise import gaussian_vector
from torch_dpsco.step.exact_noise import symmetric_noise

DRAWS = [
    f"torch_dpsco.{module}.gaussian_vector"
    for module in ("estimators.least_squares", "step.exact_noise")
]
BOUND, TARGET = 1.5, 2.0
NAN, INF = math.nan, math.inf
RECORDS = (
    (BOUND, 0.0, TARGET),
    (BOUND, 0.0, -INF),
    (0.0, -BOUND, TARGET),
    (1e308, 1e308, 1e308),
    (BOUND * math.cos(0.3), BOUND * math.sin(0.3), TARGET),
    (0.1, 0.2, -0.3),
    (NAN, 1.0, 1.0),
    (1.0, 1.0, NAN),
)


def task(adjacency: str = "add_remove", **settings: object) -> LinearTask:
    given = {
        "loss": dp.losses.Squared(),
        "preparation": Preparation(BOUND),
        "bound_y": TARGET,
        "dim": 2,
        "n": 4,
    }
    return LinearTask(
        **(given | {"budget": dp.Budget(1.0, 1e-6, adjacency=adjacency)} | settings)
    )


def statistics(records: Records, plan: AdaSSPPlan) -> Tensor:
    """lambda_min, X'X in the coordinates that the noise is independent in, X'y: each over its std."""
    given, (least, gram, moment) = plan.constants, plan.statistics(records)
    rows, columns = torch.triu_indices(records.dim, records.dim, 1)
    parts = [
        gram.new_tensor([least / given.std_lmin]),
        gram.diagonal() / given.std_xtx_diag,
        gram[rows, columns] / given.std_xtx_offdiag,
        moment / given.std_xty,
    ]
    return torch.cat(parts)


def levels(given: LinearTask, plan: AdaSSPPlan) -> list[float]:
    """GDP levels of the joint release, over neighbors."""
    shared = [(0.0, 0.4, 1.0), (0.9, -0.1, -2.0), (-0.3, 0.9, 0.5)]

    def released(records: list[tuple[float, ...]]) -> Tensor:
        table = torch.tensor(records, dtype=torch.float64)
        targets = table[:, 2]
        if (
            given.num_scores > 1
        ):  # 2 and -2 are classes of 3, the last one and none; 1e308 and NaN are unknown
            targets = torch.where(targets.abs() < 3, targets.round(), -1.0).long()
        return statistics(make_records(given, table[:, :2], targets), plan)

    found = []
    for rest in (shared, [(BOUND, 0.0, TARGET), (BOUND, 0.0, TARGET), (0.0, BOUND, TARGET)]):
        with_it = [released([*rest, record]) for record in RECORDS]
        if given.adjacency == "add_remove":
            found += [float((one - released(rest)).norm()) for one in with_it]
        elif given.adjacency == "zero_out":
            found += [float((one - with_it[-1]).norm()) for one in with_it]
        else:
            found += [float((one - other).norm()) for one, other in permutations(with_it, 2)]
    return found


CLASSES = {"loss": dp.losses.SoftmaxCrossEntropy(3), "bound_y": None}


@pytest.mark.cases(3, 1)
@pytest.mark.parametrize("kind", [{}, CLASSES], ids=["real", "classes"])
@pytest.mark.parametrize("intercept", [0.0, 0.8])
@pytest.mark.parametrize("adjacency", ["add_remove", "zero_out", "replace_one"])
def test_no_record_moves_the_three_statistics_by_more_than_the_level(
    adjacency: str, intercept: float, kind: dict[str, object]
) -> None:
    given = task(adjacency, preparation=Preparation(BOUND, intercept=intercept), **kind)
    plan = plan_adassp(given)
    found = levels(given, plan)
    assert gaussian_mu(1.0, 1e-6) * (1 - 1e-13) < plan.event().mu <= gaussian_mu(1.0, 1e-6)
    assert max(found) <= plan.event().mu
    assert max(found) > 0.8 * plan.event().mu


def test_the_published_noise_is_enough_for_the_statistics_together() -> None:
    given = task()
    plan = adassp_plan_of_the_paper(given)
    assert max(levels(given, plan)) <= math.sqrt(3) * (1 / 3) / math.sqrt(math.log(6e6))
    assert max(levels(given, plan)) <= gaussian_mu(1.0, 1e-6)


def test_the_noise_of_the_matrix_has_its_stds_and_is_symmetric() -> None:
    """Chi-square, false alarms: 1e-6 each."""
    plan = plan_adassp(task(dim=150))
    noise = symmetric_noise(
        150,
        plan.constants.std_xtx_diag,
        plan.constants.std_xtx_offdiag,
        torch.Generator().manual_seed(3),
    )
    assert torch.equal(noise, noise.T)
    rows, columns = torch.triu_indices(150, 150, 1)
    for values, std in (
        (noise.diagonal(), plan.constants.std_xtx_diag),
        (noise[rows, columns], plan.constants.std_xtx_offdiag),
    ):
        low, high = stats.chi2.ppf([5e-7, 1 - 5e-7], len(values))
        assert low <= float((values / std).square().sum()) <= high


def test_each_statistic_gets_its_noise_once(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[int, float]] = []

    def counted(dim: int, std: float, generator: torch.Generator) -> Tensor:
        drawn.append((dim, std))
        return gaussian_vector(dim, std, generator)

    for draw in DRAWS:
        monkeypatch.setattr(draw, counted)
    given = task(dim=3)
    plan = plan_adassp(given)
    release(given, plan, torch.ones(4, 3))
    numbers = plan.constants
    wanted = [
        (1, numbers.std_lmin),
        (9, numbers.std_xtx_offdiag),
        (3, numbers.std_xtx_diag),
        (3, numbers.std_xty),
    ]
    assert sorted(drawn) == sorted(wanted)


def release(given: LinearTask, plan: AdaSSPPlan, rows: Tensor, seed: int = 0) -> Tensor:
    records = make_records(given, rows, torch.ones(len(rows)))
    return plan.release(
        records, dp.Accountant(given.budget), torch.Generator().manual_seed(seed)
    )


def test_without_noise_the_ridge_alone_shrinks_the_solution(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for draw in DRAWS:
        monkeypatch.setattr(
            draw, lambda dim, std, generator: torch.zeros(dim, dtype=torch.float64)
        )
    rows = torch.tensor([[1.0, 0.0], [0.0, 0.5], [0.3, 0.3]], dtype=torch.float64)
    for reg in (None, 7.0):
        given = task(reg=reg)
        plan = plan_adassp(given)
        gram = rows.T @ rows
        least = float(torch.linalg.eigvalsh(gram)[0])
        ridge = (
            plan.constants.lam_cap - max(0.0, least - plan.constants.lmin_shift) + (reg or 0.0)
        )
        wanted = torch.linalg.solve(
            gram + ridge * torch.eye(2, dtype=torch.float64), rows.sum(0)
        )
        torch.testing.assert_close(release(given, plan, rows), wanted)
    many = torch.ones(40_000, 2, dtype=torch.float64) * torch.tensor([[1.0, 0.0]])
    many[::2] = torch.tensor([0.0, 1.0], dtype=torch.float64)
    given = task(n=40_000)
    wanted = torch.linalg.lstsq(
        many, torch.ones(40_000, 1, dtype=torch.float64)
    ).solution.flatten()
    torch.testing.assert_close(
        release(given, plan_adassp(given), many), wanted
    )  # the ridge is 0, not negative


def test_a_noisy_matrix_that_is_not_positive_definite_is_solved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = plan_adassp(task())
    huge = -1e6 * plan.constants.std_xtx_diag

    def against(dim: int, std: float, generator: torch.Generator) -> Tensor:
        size = huge if std == plan.constants.std_xtx_diag else 0.0
        return torch.full((dim,), size, dtype=torch.float64)

    for draw in DRAWS:
        monkeypatch.setattr(draw, against)
    answer = release(task(), plan, torch.eye(2, dtype=torch.float64))
    torch.testing.assert_close(
        answer, torch.full((2,), 10 / plan.constants.lam_cap, dtype=torch.float64)
    )


def test_rounding_is_in_the_noise_of_the_statistics() -> None:
    count = 3000
    given = task(n=count, n_max=count)
    plan = plan_adassp(given)
    exact_std = adassp_constants(1.0, 1e-6, BOUND, TARGET, 2)
    spare = [have / want - 1 for have, want in zip(plan.constants, exact_std, strict=True)]
    rows = torch.randn(count, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    targets = torch.linspace(-5, 5, count, dtype=torch.float64)
    records = make_records(given, rows, targets)
    prepared = torch.cat([block for _, block in records.blocks()])
    for k in range(2):
        exact = math.fsum((prepared[:, k] * records.targets).tolist())
        error = abs(float(records.combine(records.targets)[k]) - exact)
        assert 2 * error <= spare[3] * BOUND * TARGET
        exact = math.fsum((prepared[:, k] * prepared[:, 1]).tolist())
        assert 2 * abs(float(records.gram(records.weights)[k, 1]) - exact) <= spare[1] * BOUND**2
    assert min(spare) > count * 2.0**-53 * 1024


def test_without_noise_classes_are_regressed_on_their_indicators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for draw in DRAWS:
        monkeypatch.setattr(
            draw, lambda dim, std, generator: torch.zeros(dim, dtype=torch.float64)
        )
    draws = torch.Generator().manual_seed(4)
    rows, labels = (
        torch.randn(40_000, 2, generator=draws, dtype=torch.float64) / 5,
        torch.arange(40_000) % 3,
    )
    rows[:, 0] += 0.1 * labels
    given = task(n=40_000, **CLASSES)
    plan, records = (
        plan_adassp(given),
        make_records(given, rows, torch.where(torch.arange(40_000) > 9, labels, 7)),
    )
    prepared, known = (
        torch.cat([block for _, block in records.blocks()]),
        torch.nn.functional.one_hot(labels).double(),
    )
    known[:10] = 1 / 3  # of an unknown class: a null record
    wanted = torch.linalg.lstsq(
        prepared, known - 1 / 3
    ).solution.T  # the ridge is 0 for so many records
    answer = plan.release(records, dp.Accountant(given.budget), torch.Generator())
    torch.testing.assert_close(answer.view(3, 2), 3 * wanted)


def test_the_noise_of_moments_of_classes_adds_up_to_0_and_has_its_std(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chi-square with 2 of 3 degrees of freedom per row, false alarms: 1e-6."""
    dim = 400
    given = task(dim=dim, **CLASSES)
    plan = plan_adassp(given)
    monkeypatch.setattr(torch.linalg, "eigvalsh", lambda gram: gram.diagonal())
    identity = torch.eye(dim, dtype=torch.float64)
    monkeypatch.setattr(torch.linalg, "eigh", lambda gram: (identity.diagonal(), identity))
    monkeypatch.setattr("torch_dpsco.estimators.least_squares.symmetric_noise", lambda *_: 0.0)
    records = make_records(given, torch.zeros(4, dim), torch.zeros(4, dtype=torch.int64))
    answer = plan.release(
        records, dp.Accountant(given.budget), torch.Generator().manual_seed(6)
    ).view(3, dim)
    assert float(answer.sum(0).abs().max()) < 1e-9
    scale = float(answer.norm()) / (
        3 * plan.constants.std_xty
    )  # times 1 + ridge, which its own noise decides
    low, high = stats.chi2.ppf([5e-7, 1 - 5e-7], 2 * dim)
    most = plan.constants.lam_cap + 1
    least = plan.constants.lam_cap - 6 * plan.constants.std_lmin + 1
    assert (
        math.sqrt(low) / most
        <= scale
        <= math.sqrt(high) / max(least, plan.constants.lam_cap / 10)
    )
