"""One chooser for all plans: what is not given of a run, from public numbers, in four stages.

    design, steps = choose_design(scale, budget, given)
    noise = choose_noise(budget, design, steps, given)
    pace = choose_pace(scale, design, steps, noise)   step size and momentum
    clip = choose_clip(problem, n, budget, dim)       where rows are cut, as a share of the bound that is promised

Each is a function of promises about one record, of n, the budget and what is `Given`. `Scale` and `UserScale` are the
promises as the step rule takes them; without one the defaults of a plan's class hold. Privacy does not rest on the
rule: noise is calibrated afterwards, for the design and the number of steps that come out.

Source: `step.pace`, docs/proofs/steps.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch

from torch_dpsco import _validate as check
from torch_dpsco._validate import shown
from torch_dpsco.accounting import calibrate
from torch_dpsco.accounting.budgets import Budget
from torch_dpsco.accounting.designs import (
    Assigned,
    Design,
    Fixed,
    Full,
    Poisson,
    Shuffled,
)
from torch_dpsco.accounting.events import (
    ADD_REMOVE,
    REPLACE_ONE,
    ZERO_OUT,
    Adjacency,
    check_adjacency,
)
from torch_dpsco.errors import AdjacencyError, UnitError
from torch_dpsco.losses.base import TableGradBound
from torch_dpsco.problem import Problem
from torch_dpsco.step import checks
from torch_dpsco.step import pace as theory
from torch_dpsco.step.pace import Pace

_FEW_ROWS = 1e6  # gradients of rows in a run, at least
_MOST_ROWS = 2e7
_LEAST_USERS = 1024  # in a batch
_SHORT = 0.25  # rows are longer than the mean, and so are their gradients


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a caller gives of a run; None for what is to be chosen.

    Args:
        n: public number of records or users; None where no sampling is claimed.
        adjacency: of the guarantee.
        sampling: "poisson", "fixed", "shuffled", "assigned" (one pass), "allocated" (passes that are fixed before the
            first) or "full"; or a design, which has its numbers.
        batch_size: expected size of a batch.
        steps: number of steps, in place of epochs.
        epochs: passes over the data.
        noise_multiplier: noise std on the sum over the clip.
    """

    n: int | None
    adjacency: Adjacency
    sampling: str | Design | None = None
    batch_size: int | None = None
    steps: int | None = None
    epochs: float | None = None
    noise_multiplier: float | None = None

    def __post_init__(self) -> None:
        if self.n is not None:
            check.positive_count(n=self.n)

    @property
    def word(self) -> str | Design:
        """How batches are drawn: Poisson ones where nothing is said."""
        return self.sampling or "poisson"

    def sampled(self) -> Design:
        """Returns the design of a word and its numbers; without n none is claimed."""
        word = self.word
        if isinstance(word, Design):
            if self.batch_size not in (None, word.batch_size):
                raise ValueError(
                    f"batch_size must be {word.batch_size}, that of {word} (got {self.batch_size})"
                )
            return checks.declared(word, self.n, word.batch_size)
        check.choice((*SAMPLING, "full"), sampling=word)
        if self.n is None:
            return self._undeclared()
        if word == "full":
            if self.batch_size not in (None, self.n):
                raise ValueError(
                    f"batch_size must be n={self.n} for full batches (got {self.batch_size})"
                )
            return Full(self.n)
        return SAMPLING[word](self.n if self.batch_size is None else self.batch_size, self.n)

    def _undeclared(self) -> Design:
        if self.adjacency == ADD_REMOVE:
            raise AdjacencyError(
                "n must be given under add_remove: a public number, for reference"
            )
        if self.batch_size is None:
            raise ValueError("batch_size must be given where n is not")
        return checks.declared(None, None, self.batch_size)

    def in_passes(self, design: Design, default: float | None = None) -> Design:
        """Returns an "allocated" design with as many passes as the steps, or epochs, need; others as they are."""
        if self.sampling != "allocated" or not isinstance(design, Assigned):
            return design
        if self.steps is not None:
            steps = check.positive_count(steps=self.steps)
            return replace(design, passes=math.ceil(steps / design.batches))
        passes = default if self.epochs is None else self.epochs
        if passes is None:
            raise ValueError(
                "epochs or steps must be given for sampling='allocated': passes are fixed before"
                " the first"
            )
        return replace(design, passes=math.ceil(check.positive(epochs=passes)))

    def steps_in(
        self, design: Design, default: float | None = None, *, once: bool = False
    ) -> int | None:
        """Returns the number of steps: given, or of so many passes; None where neither is and there is no default.

        Designs of one pass, or of passes that are counted, have these as default, and no more. `once`: no other
        sampling can be advised, since all runs are of one pass.
        """
        self.require_one_length()
        steps = self.steps
        if steps is None:
            passes = default if self.epochs is None else self.epochs
            if self.epochs is None and design.one_pass:
                return design.steps_per_epoch
            if passes is None:
                return None
            steps = calibrate.epoch_steps(design, passes)
        if design.one_pass and steps > design.steps_per_epoch:
            passed = "one pass" if getattr(design, "passes", 1) == 1 else "the passes"
            more = "" if once else ": for more passes take sampling='allocated' or 'poisson'"
            raise ValueError(
                f"steps must be <= {design.steps_per_epoch}, {passed} of {design} (got"
                f" {steps}){more}"
            )
        return check.positive_count(steps=steps)

    def require_one_length(self) -> None:
        """Raises ValueError where steps and epochs are given both."""
        if self.steps is not None and self.epochs is not None:
            raise ValueError(
                f"steps and epochs must not be given both (got {self.steps} and {self.epochs})"
            )


class Draws(NamedTuple):
    """How batches are drawn, and how often; None for no limit but the budget."""

    design: Design
    steps: int | None


class Promises(Protocol):
    """What the step rule knows of the rows, or the users."""

    def steps(self, n: int, budget: Budget) -> int:
        """Returns the number of steps that is wanted."""

    def least_steps(self, design: Design) -> int:
        """Returns the number of steps that these batches ask for at least."""

    def batch_size(self, given: Given, n: int, budget: Budget, wanted: int) -> int | None:
        """Returns the size of batches for the wanted steps; None for that of the design, or n."""

    def pace(self, design: Design, steps: int, noise: float) -> Pace:
        """Returns the step size and the momentum of these steps."""


# -- the four stages --------------------------------------------------------------------------------------------------


def choose_design(
    promises: Promises | None, budget: Budget | None, given: Given, default: float | None = None
) -> Draws:
    """Returns how batches are drawn, by `quietest` where no sampling is given, and the number of steps.

    Args:
        promises: for the step rule; None without it.
        budget: that the rule meets.
        given: what is not to be chosen.
        default: passes over the data without the rule; None for no limit.
    """
    if promises is not None and budget is not None:
        given = with_steps(promises, budget, with_batches(promises, budget, given))
    design = given.in_passes(given.sampled(), default)
    steps = given.steps_in(design, default)
    return Draws(design if given.sampling else quietest(design, steps), steps)


def choose_noise(
    budget: Budget | None, design: Design, steps: int | None, given: Given | None = None
) -> float:
    """Returns the noise multiplier that is given, or else the least one of the budget."""
    if given is not None and given.noise_multiplier is not None:
        return check.nonnegative(noise_multiplier=given.noise_multiplier)
    if budget is None:
        raise ValueError(
            "budget or noise_multiplier must be given: the target, or noise of your own"
        )
    return noise_for(budget, design, steps)


def choose_pace(promises: Promises, draws: Draws, noise: float) -> Pace:
    """Returns the step size and the momentum of the step rule."""
    assert draws.steps is not None  # under a rule there is a last step
    return promises.pace(draws.design, draws.steps, noise)


def choose_clip(problem: Problem, n: int, budget: Budget, dim: int | None) -> float:
    """Returns the share of the bound at which rows are clipped: 1 but for losses of one score.

    Their clipped gradients are those of a loss.
    """
    return theory.clip_share(loudness(n, budget, dim)) if problem.is_glm else 1.0


# -- what the stages share --------------------------------------------------------------------------------------------


def with_batches(promises: Promises, budget: Budget, given: Given) -> Given:
    """Returns what is given, with the batch size of the step rule where there is none."""
    if given.n is None or given.batch_size is not None or isinstance(given.sampling, Design):
        return given
    wanted = given.steps or promises.steps(given.n, budget)
    return replace(given, batch_size=promises.batch_size(given, given.n, budget, wanted))


def with_steps(promises: Promises, budget: Budget, given: Given) -> Given:
    """Returns what is given, with the number of steps of the step rule where passes do not say it."""
    if given.n is None or given.steps is not None or given.epochs is not None:
        return given
    design = given.sampled()
    if given.sampling != "allocated" and design.one_pass:
        return given
    steps = max(promises.steps(given.n, budget), promises.least_steps(design))
    if given.sampling == "allocated":  # a pass that is begun costs as much as a whole one
        steps += -steps % design.batches
    return replace(given, steps=steps)


@dataclass(frozen=True)
class Scale:
    """What a run on records is measured by.

    Args:
        bound: on gradients of rows, clipped.
        distance: guess of |w_1 - w*|.
        smoothness: of the loss; None for kinks.
        dim: number of parameters; None for a usual one.
    """

    bound: float
    distance: float
    smoothness: float | None
    dim: int | None

    def horizon(self, n: int, budget: Budget) -> float:
        """Returns the sum of the step sizes of a run on all records."""
        return self.distance / theory.noise_of_mean(
            release_noise(budget), self.bound, n, 1, self.dim, sampled=False
        )

    def steps(self, n: int, budget: Budget) -> int:
        """Returns the number of steps by the horizon."""
        return theory.steps_to(self.horizon(n, budget), self.smoothness)

    def least_steps(self, design: Design) -> int:
        """Returns those of the usual passes; none of all records at once."""
        if design.batch_size >= design.n:
            return 0
        return calibrate.epoch_steps(design, _passes(design.n))

    def batch_size(self, given: Given, n: int, budget: Budget, wanted: int) -> int | None:
        """Returns the size such that the steps make 20 passes, or 1e6 gradients if these are more, at most 2e7."""
        if given.sampling == "full":
            return None
        if given.sampling == "assigned":
            share = 1.0 / one_pass(self, n, budget, momentum=True, secret=True)
        elif given.epochs is None:
            share = max(_passes(n), _FEW_ROWS / n) / wanted
        else:
            share = given.epochs / wanted
        return min(n, max(1, math.ceil(share * n)))

    def pace(self, design: Design, steps: int, noise: float) -> Pace:
        """Returns step size and momentum for the noise of the mean of all steps, sampling included."""
        sampled = design.batch_size < design.n
        level = theory.noise_of_mean(
            noise, self.bound, design.batch_size, steps, self.dim, sampled=sampled
        )
        if self.smoothness is None:
            return theory.rough_pace(self.distance, level, steps, self.bound)
        return theory.smooth_pace(self.distance / level, steps, self.smoothness)


def _passes(n: int) -> float:
    return min(theory.PASSES, max(1.0, _MOST_ROWS / n))


@dataclass(frozen=True)
class UserScale:
    """What a run on users is measured by, whose gradients nothing is known of: units of the clip.

    Args:
        clip: of means of users; 1 where a search keeps to its units.
        distance: guess of |w_1 - w*|, in such units; None for the usual one.
        dim: number of parameters; None for a usual one.
    """

    clip: float
    distance: float | None
    dim: int | None

    def steps(self, n: int, budget: Budget) -> int:
        """Returns the number of steps by the noise."""
        return theory.relative_steps(loudness(n, budget, self.dim))

    def least_steps(self, design: Design) -> int:
        """Returns 0: batches ask for none."""
        return 0

    def batch_size(self, given: Given, n: int, budget: Budget, wanted: int) -> int | None:
        """Returns the size such that the steps make 20 passes, of 1024 users at least; None for all of them."""
        if given.sampling not in (None, "poisson", "fixed"):
            return None
        share = (theory.PASSES if given.epochs is None else given.epochs) / wanted
        return min(n, max(_LEAST_USERS, math.ceil(share * n)))

    def pace(self, design: Design, steps: int, noise: float) -> Pace:
        """Returns step size and momentum for the noise of the mean of all steps."""
        level = theory.noise_of_mean(
            noise, 1.0, design.batch_size, steps, self.dim, sampled=False
        )
        pace = theory.relative_pace(level, steps, self.distance)
        return Pace(pace.lr / self.clip, pace.momentum)


def scale_of_problem(
    problem: Problem, clip: float, distance: float | None, dim: int | None
) -> Scale | None:
    """Returns the scale of a loss of the table; None where the promises do not say it.

    Args:
        problem: promises of one record.
        clip: share of the bound on gradients that is left.
        distance: guess of |w_1 - w*|; default the usual one, at most the radius.
        dim: number of parameters; default 64 for each score.
    """
    at_zero = problem.grad_at_zero
    rows = problem.bound_x
    if not at_zero or rows is None:
        return None
    table = problem.exact_grad_bound
    real = False
    if isinstance(table, TableGradBound):
        real = table.loss.target_kind == "real"
        dim = dim or theory.USUAL_DIM * table.loss.num_scores
    smooth = problem.smoothness is not None
    if distance is None:
        distance = theory.usual_distance(at_zero, rows, problem.bound_y if real else None, smooth)
        distance = min(distance, problem.radius)
    bound = problem.lipschitz or problem.grad_bound(
        distance
    )  # noise may follow the iterate, as far as it goes
    return Scale(clip * bound, distance, problem.smoothness or None, dim)


def scale_of_clip(
    problem: Problem, clip: float | None, distance: float | None, dim: int | None, by: str
) -> Scale:
    """Returns the scale of rows that are clipped, in units of the clip, which nobody needs to know.

    Args:
        problem: that promises a smoothness, and maybe a ball.
        clip: C; None where it is not known yet: gradients are then taken to be four times as long as a distance that is
            given says, smoothness times it.
        distance: guess of |w_1 - w*|; default the radius, or else the usual one.
        dim: number of parameters.
        by: name of the class.
    """
    (smoothness,) = problem.require("smoothness", by=by)
    known = min(distance or math.inf, problem.radius)
    if math.isfinite(known):
        return Scale(1.0, _SHORT / smoothness if clip is None else known / clip, smoothness, dim)
    rows = problem.bound_x or math.sqrt(smoothness)
    return Scale(1.0, theory.usual_distance(1.0, rows, None, smooth=True), smoothness, dim)


def loudness(n: int, budget: Budget, dim: int | None) -> float:
    """Returns the norm of the noise of the mean of all steps over the clip."""
    return theory.noise_of_mean(release_noise(budget), 1.0, n, 1, dim, sampled=False)


def one_pass(scale: Scale, n: int, budget: Budget, momentum: bool, secret: bool = False) -> int:
    """Returns the number of batches of one pass.

    Args:
        scale: what it is measured by.
        n: public number of records.
        budget: to be met.
        momentum: whether steps have it.
        secret: whether each record draws its batch secretly, so that more batches have less noise each.
    """
    smoothness = scale.smoothness or 1.0
    if not secret:
        return min(n, theory.one_pass_steps(scale.horizon(n, budget), smoothness, momentum))
    if scale.smoothness is None:
        return max(numbers_of_steps(n))

    def risk(steps: int) -> float:
        noise = noise_of_pass(budget, steps)
        level = theory.noise_of_mean(
            noise, scale.bound, max(1, n // steps), steps, scale.dim, sampled=steps > 1
        )
        return theory.risk(scale.distance, level, steps, smoothness, momentum)

    return min(numbers_of_steps(n), key=risk)


def numbers_of_steps(n: int) -> list[int]:
    """Returns the numbers of batches that a secret pass over n records may have: powers of 2 up to 1024."""
    return [2**k for k in range(theory.MOST.bit_length()) if 2**k <= n]


def noise_of_pass(budget: Budget, steps: int) -> float:
    """Returns about the noise multiplier of so many steps of a secret pass: that of Poisson batches by Renyi orders.

    To compare numbers of steps by; the noise of the run is calibrated for what is chosen.
    """
    return calibrate.noise_multiplier(
        *(budget.epsilon, budget.delta),
        design=Poisson(1, steps),
        steps=steps,
        adjacency=budget.adjacency,
        method="rdp",
    )


SAMPLING: dict[str, type[Poisson] | type[Fixed] | type[Shuffled] | type[Assigned]] = {
    "poisson": Poisson,
    "fixed": Fixed,
    "shuffled": Shuffled,
    "assigned": Assigned,
    "allocated": Assigned,
}


def usual_adjacency(n: int | None) -> Adjacency:
    """Returns the adjacency where none is said; without n, where nothing is known of batches, replaced records."""
    return REPLACE_ONE if n is None else ZERO_OUT


def agreed(
    budget: Budget | None,
    adjacency: Adjacency | None,
    unit: str = "example",
    default: Adjacency = ZERO_OUT,
) -> tuple[Budget | None, Adjacency]:
    """Returns budget and adjacency of a plan: what one of them says, or the default where neither does.

    Raises:
        UnitError: the budget protects another unit.
        AdjacencyError: it is of another adjacency.
    """
    if budget is None:
        return None, check_adjacency(adjacency or default)
    if budget.unit != unit:
        raise UnitError(
            f"budget must be of unit {unit!r}: Budget(..., unit={unit!r}) (got {budget.unit!r})"
        )
    budget = budget.under(adjacency or default)
    if adjacency not in (None, budget.adjacency):
        raise AdjacencyError(
            f"adjacency must be {budget.adjacency!r}, the budget's, or None (got {adjacency!r})"
        )
    return budget, budget.adjacency


def quietest(design: Design, steps: int | None) -> Design:
    """Returns the design of about the least noise for steps on these batches, which plans take where none is given.

    Args:
        design: Poisson batches; others are returned as they are.
        steps: number of steps; None for no limit.

    Returns:
        All records, where a batch holds them; random allocation for exactly one pass, where it has up to 17 % less
        noise; else Poisson batches: in several passes random allocation differs from them by a few per cent (by a tenth
        in large batches at large epsilon), and takes far longer to calibrate.
    """
    if not isinstance(design, Poisson):
        return design
    if design.batch_size == design.n:
        return Full(design.n)
    return Assigned(design.batch_size, design.n) if steps == design.batches else design


def noise_for(budget: Budget, design: Design, steps: int | None, rtol: float = 1e-4) -> float:
    """Returns the least noise multiplier at which these steps fit the budget, up to rtol."""
    return calibrate.noise_multiplier(
        budget.epsilon,
        budget.delta,
        design=design,
        steps=check.positive_count(steps=steps),
        adjacency=budget.adjacency,
        rtol=rtol,
    )


def release_noise(budget: Budget) -> float:
    """Returns the noise multiplier at which one unsampled clipped mean spends the whole budget."""
    return noise_for(budget, Full(1), 1)


def dimension(dim: Any) -> int | None:
    """Returns the number of parameters: a number, or a model or parameters that are counted; None for None."""
    if dim is None:
        return None
    if isinstance(dim, (int, float)):
        return int(check.positive_count(dim=dim))
    try:
        items = checks.listed(dim.parameters() if isinstance(dim, torch.nn.Module) else dim)
    except ValueError as error:
        raise ValueError(
            f"dim must be the number of parameters, or a model or parameters (got {shown(dim)})"
        ) from error
    tensors = [p for g in items for p in (g["params"] if isinstance(g, dict) else [g])]
    return max(1, sum(int((p[1] if isinstance(p, tuple) else p).numel()) for p in tensors))
