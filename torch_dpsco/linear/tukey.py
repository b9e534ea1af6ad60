"""Least squares without bounds: a deep one among the models of many parts of the records (TukeyEM).

Each record is put into one of m parts at random, whatever the others are. Least squares are fitted to each part, and a
point that is deep among the m models is released, or "none" where too few of them agree. A record moves one model,
anywhere; so nothing need be known of rows and targets.

Differs from the paper (Amin et al. 2022) in: parts are drawn independently, so that add_remove holds as well; models
and draws are on a lattice, with exact arithmetic; the constants.

Source: docs/proofs/tukey.md
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.stated import ApproxDP
from torch_dpsco.errors import ConditionError, UtilityWarning
from torch_dpsco.linear.objectives.base import Records
from torch_dpsco.linear.solvers.certificates import project
from torch_dpsco.linear.task import LinearPlan, LinearTask
from torch_dpsco.losses import Squared
from torch_dpsco.mechanisms.tukey import draw_deep, from_lattice, on_lattice
from torch_dpsco.noise import uniform
from torch_dpsco.rng import Source, stream_of
from torch_dpsco.theory.linear.tukey import TukeyNumbers, tukey_numbers

NO_BOUND = 1e50  # rows and targets beyond are clipped: squares of them are finite
_RIDGE = 1e-9  # of a part, beside a Gram matrix with ones on its diagonal
_ABSENT = 0.1  # spreads of the targets, in which weights of features that a part lacks are spread


@dataclass(frozen=True, kw_only=True)
class TukeyPlan(LinearPlan):
    """Public numbers of one release.

    Args:
        numbers: of parts, check and draw.
    """

    numbers: TukeyNumbers

    mechanism = "tukey"

    def __post_init__(self) -> None:
        object.__setattr__(self, "numbers", TukeyNumbers(*self.numbers))  # a list, where it was saved
        super().__post_init__()
        _require_covered(self.task)
        numbers = self.numbers
        check.open_interval(1.0, 1e6, base=numbers.base), check.open_interval(0.0, 1.0, rarity=numbers.rarity)
        check.positive(scale=numbers.scale), check.positive_count(threshold=numbers.threshold)
        if not 2 <= check.count(depth=numbers.depth) <= (check.count(parts=numbers.parts) + 1) // 2:
            raise ValueError(f"depth must be in 2..(parts + 1)/2 (got {numbers.depth} of {numbers.parts})")

    @property
    def reg(self) -> float:
        """0: there is none."""
        return 0.0

    def own_event(self) -> ApproxDP:
        """Returns what check and draw cost."""
        # PRIVACY: of the numbers of the release (test_an_edited_plan_is_refused_or_charges_what_it_draws)
        return ApproxDP(self.numbers.epsilon, self.numbers.delta, (self.task.adjacency,))

    @property
    def noise_and_signal(self) -> tuple[float, float, str]:
        """How many models a draw is off the deepest point, for each parameter, and of how many."""
        return 1.0 / (self.numbers.base - 1.0), self.numbers.parts / 2, "the depth of a median"

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yields what is to be said beside the promise."""
        task, numbers = self.task, self.numbers
        yield "model", f"{task.loss}: {task.parameters} parameters, no bounds on rows and targets"
        yield (
            "noise",
            f"{numbers.parts} models, each of about {task.n // numbers.parts} records; a point of depth "
            f"{numbers.depth} and more among them is drawn, or 'none' where fewer than about {numbers.threshold} moved "
            f"models would empty the deep region",
        )
        yield "exact noise", "chosen: all numbers of the draw are integers"
        most = f"n_max={task.n_max} bounds their number" if task.adjacency == "add_remove" else f"n={task.n}"
        yield "assumed", f"all settings were chosen without a look at the records; {most}"

    def draw(self, solved: Records, generator: Source) -> Tensor:
        """Fits all parts, draws a deep model: returns it, or 0 with a warning for "none"; see `LinearPlan`."""
        # PRIVACY: whatever the other records are (test_a_record_moves_one_model,
        # test_a_table_without_bounds_is_fitted_and_charged_once)
        parts = torch.from_numpy(stream_of(generator).integers(self.numbers.parts, solved.count))
        absent = 2 * uniform((self.numbers.parts, solved.dim), generator) - 1
        points = [[on_lattice(value) for value in model.tolist()] for model in models_of(solved, parts, absent)]
        found = draw_deep(points, self.numbers, generator)
        if found is None:
            warnings.warn(
                "too few models of parts agree: the released answer is 'none', and weights are 0. State bounds, or "
                "take a larger epsilon or more records",
                UtilityWarning,
                stacklevel=2,
            )
            return torch.zeros(solved.dim, dtype=torch.float64, device=solved.device)
        point = torch.tensor([from_lattice(number) for number in found], dtype=torch.float64, device=solved.device)
        return project(point, self.task.radius)


def plan_tukey(task: LinearTask) -> TukeyPlan:
    """Returns the numbers of TukeyEM for a task with the squared loss.

    Args:
        task: its public numbers; delta > 0, without reg. Its noise is exact.

    Raises:
        ConditionError: another loss, delta = 0, a regularizer, or units that are measured.
        InfeasibleError: n is too small.

    Guarantee:
        The event of the plan, for the task's adjacency. Nothing is assumed of rows and targets.
    """
    _require_covered(task)
    numbers = tukey_numbers(task.target.epsilon, task.target.delta, task.n, task.width)
    return TukeyPlan(task=task, numbers=numbers)


def _require_covered(task: LinearTask) -> None:
    if not isinstance(task.loss, Squared) or task.residual_clip is not None or task.tilt or task.attack_radius:
        raise ConditionError(f"mechanism 'tukey' needs the squared loss, as it is (got {task.loss!r})")
    if task.pure:
        raise ConditionError("mechanism 'tukey' needs delta > 0: its check may fail")
    if task.reg is not None or task.prepare is not None:
        raise ConditionError("mechanism 'tukey' needs neither reg nor prepare: give None")


def models_of(records: Records, parts: Tensor, absent: Tensor) -> list[Tensor]:
    """Returns the least squares (d,) of each part of the records: NOT private.

    Args:
        records: n of them.
        parts: (n,) integers below m.
        absent: (m, d) numbers in [-1, 1], drawn without a look at the records, for features that are 0 in all of a
            part. Were all their weights 0, no box around the others would be much larger than the next one.
    """
    sizes = torch.bincount(parts, minlength=len(absent)).tolist()
    order = torch.argsort(parts, stable=True).to(records.device)
    return [_model(records, *of) for of in zip(torch.split(order, sizes), absent, strict=True)]


def _model(records: Records, chosen: Tensor, absent: Tensor) -> Tensor:
    # PRIVACY: of these rows alone, to the last bit (test_a_record_moves_one_model)
    rows, weights, targets = records.select(chosen).contiguous(), records.weights[chosen], records.targets[chosen]
    gram = (rows * weights.unsqueeze(1)).T @ rows
    scale = gram.diagonal().sqrt()
    lacks = scale == 0
    scale = torch.where(lacks, 1.0, scale)
    gram = gram / scale / scale.unsqueeze(1)
    gram.diagonal().add_(_RIDGE)
    moment = rows.T @ (weights * targets) / scale
    # PRIVACY: an error would tell of the data (test_no_value_raises_in_a_deep_model)
    answer: Tensor = torch.linalg.solve_ex(gram, moment).result / scale
    spread = (targets - targets.mean()).square().mean().sqrt() / torch.where(lacks, torch.inf, scale).amin()
    return torch.where(lacks, _ABSENT * spread * absent.to(answer), answer)
