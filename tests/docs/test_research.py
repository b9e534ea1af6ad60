"""The page of what is not in the library: its theorem on exact laws, and its figures, which are computed ones."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from torch_dpsco.algorithms.correlated_numbers import least_error

ROOT = Path(__file__).parents[2]
STEPS, RATE, STD = 7, 0.4, 0.8


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import banded
        import near_linear

        yield {"banded": banded, "near_linear": near_linear}
        for name in ("banded", "near_linear"):
            del sys.modules[name]


def rows_of(name: str) -> list[list[str]]:
    """Returns the rows of all tables of a section, cell by cell."""
    text = (ROOT / "docs" / "research.md").read_text(encoding="utf-8")
    section = text.partition(f"## {name}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]


# -- banded noise on sampled batches ----------------------------------------------------------------------------------


def steps_of(part: int, parts: int) -> list[int]:
    return list(range(part, STEPS, parts))


def normal_ratio(value: np.ndarray, mean: np.ndarray) -> float:
    """Returns the density of N(mean, STD^2) at a value over that of N(0, STD^2)."""
    return math.exp(float(value @ mean - mean @ mean / 2.0) / STD**2)


@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_block_is_a_sampled_release(part: int) -> None:
    """The ratio of a whole adaptive run, over all coins, is a product of those of sampled Gaussian releases."""
    c = np.array(least_error(STEPS, 3).coefficients)
    times = steps_of(part, 3)
    rng = np.random.default_rng(part)
    for _ in range(20):
        v = STD * rng.standard_normal((STEPS, 2)) + rng.integers(2)
        # rows of norm 1 that are chosen by what was released before
        rows = [np.array([math.cos(a), math.sin(a)]) for a in (v[:t].sum() for t in times)]
        whole = 0.0
        for coins in itertools.product((0, 1), repeat=len(times)):
            mean = np.zeros((STEPS, 2))
            for coin, t, row in zip(coins, times, rows, strict=True):
                length = min(3, STEPS - t)
                mean[t : t + length] += coin * c[:length, None] * row
            chance = math.prod(RATE if coin else 1.0 - RATE for coin in coins)
            whole += chance * normal_ratio(v.ravel(), mean.ravel())
        blocks = 1.0
        for t, row in zip(times, rows, strict=True):
            length = min(3, STEPS - t)
            move = c[:length, None] * row
            assert np.linalg.norm(move) <= least_error(STEPS, 3).norm
            blocks *= 1.0 - RATE + RATE * normal_ratio(v[t : t + length].ravel(), move.ravel())
        assert whole == pytest.approx(blocks, rel=1e-9)


@pytest.mark.parametrize(("bands", "covered"), [(2, True), (3, False)])
def test_more_bands_than_parts_are_not_covered(bands: int, covered: bool) -> None:
    """With rate 1 the run is one Gaussian release, whose length the blocks do not reach if they overlap."""
    noise = least_error(STEPS, bands)
    column = np.zeros(STEPS)
    for t in steps_of(0, 2):
        length = min(bands, STEPS - t)
        column[t : t + length] += noise.coefficients[:length]
    blocks = len(steps_of(0, 2)) * noise.norm**2
    assert (column @ column <= blocks) == covered


@pytest.mark.slow
@pytest.mark.parametrize("size", [(10_000, 500, 10), (32_561, 512, 3)])
def test_quoted_noise_of_bands_is_computed_noise(
    scripts: dict[str, ModuleType],
    size: tuple[int, int, int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    scripts["banded"].print_noise((size,))
    quoted = rows_of("Banded noise on sampled batches")
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][
        1:
    ]
    lines = [line for line in printed if not line.startswith("| ---")]
    assert len(lines) == 3
    for line in lines:
        assert [cell.strip() for cell in line.strip("| ").split("|")] in quoted


# -- user level in near-linear time -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bounds(scripts: dict[str, ModuleType]) -> list[dict[str, str]]:
    head, *rows = rows_of("User level in near-linear time")
    return [dict(zip(head, row, strict=True)) for row in rows if "-" not in row[0]]


@pytest.mark.slow
def test_quoted_bounds_are_computed_ones(
    scripts: dict[str, ModuleType], bounds: list[dict[str, str]]
) -> None:
    near = scripts["near_linear"]
    row = next(row for row in bounds if (row["d"], row["n"], row["m"]) == ("10", "1000", "1000"))
    for name in ("clipped", "filtered", "iterates", "loop"):
        assert near.shown(getattr(near, name)(1000, 1000, 10).risk) == row[name]
    assert f"from {near.least_users()} users on" in (ROOT / "docs/research.md").read_text()


def test_what_the_page_concludes_is_in_its_table(bounds: list[dict[str, str]]) -> None:
    assert len(bounds) == 30
    for row in bounds:
        risk = {
            name: 1.0 if "> 1" in row[name] else float(row[name])
            for name in ("clipped", "one pass", "iterates", "loop")
        }
        assert risk["clipped"] < min(risk["iterates"], risk["loop"])
        if int(row["m"]) <= 10_000:
            assert risk["one pass"] < min(risk["iterates"], risk["loop"])


def test_averages_of_groups_are_as_close_as_the_page_says() -> None:
    """Averages of SGD on fresh rows, which are signs: the worst pair of 60 is within tau but with probability 0.001."""
    rng = np.random.default_rng(5)
    rows, eta, groups, failure = 400, 0.05, 60, 0.001
    w, total = np.zeros(groups), np.zeros(groups)
    for _ in range(rows):
        total += w
        w -= eta * np.sign(rng.random(groups) - 0.5)  # linear losses, which spread the most
    averages = total / rows
    pairs = groups * (groups - 1) / 2
    tau = eta * math.sqrt(rows * 4 / 3) * (1 + math.sqrt(math.log(pairs / failure)))
    assert np.ptp(averages) <= tau
    assert np.ptp(averages) > tau / 8  # and it is no empty bound
