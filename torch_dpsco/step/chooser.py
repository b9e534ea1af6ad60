"""One chooser for all plans: what is not given of a run, from public numbers, in four stages.

    design, steps = choose_design(scale, budget, given)
    noise = choose_noise(budget, design, steps, given)
    pace = choose_pace(scale, design, steps, noise)   step size and momentum
    clip = choose_clip(problem, n, budget, dim)       where rows are cut, as a share of the bound that is promised

Each is a function of promises about one record, of n, the budget and what is `Given`. `Scale` and `UserScale` are the
promises as the step rule takes them; without one the defaults of a plan's class hold. Privacy does not rest on the
rule: noise is calibrated afterwards, for the design and the number of steps that come out.

How far, in how many steps and how fast noisy gradient descent is to go, from its noise and from nothing private.

    H = D / s             the horizon: step sizes add up to it (h T = H); s is the norm of the noise of all steps' mean
    h <= T / (5 L)        where the loss is L-smooth, so that momentum carries such steps, and T^2 >= 5 L H
    m = (L h - 1)/(L h + 1),  lr = h (1 - m) = 2 h/(L h + 1) <= 2/L

T steps of equal total budget have noise of variance T s^2 each, hence s^2 for their mean, whatever T is: more steps
cost time alone. The average of the iterates has excess risk of at most D^2/(2 H) + H s^2/2 + terms that vanish with T,
which H = D/s minimizes.

Proof: docs/proofs/steps.md#horizon, docs/proofs/steps.md#momentum. Three numbers are choices, not theory: the distance
D (`usual_distance`), the clip (`clip_share`) and the number of passes, see docs/proofs/steps.md#choices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from torch_dpsco import _validate as check
from torch_dpsco._validate import shown
from torch_dpsco.accounting import calibrate
from torch_dpsco.accounting.budgets import Budget, one_budget
from torch_dpsco.accounting.designs import (
    Assigned,
    Design,
    Fixed,
    Full,
    Poisson,
    Shuffled,
)
from torch_dpsco.accounting.events import (
    ZERO_OUT,
    Adjacency,
    check_adjacency,
)
from torch_dpsco.errors import AdjacencyError, UnitError
from torch_dpsco.problem import (
    LEAST,
    MOST,
    SETTLED,
    Pace,
    Problem,
    TableGradBound,
    smooth_pace,
    steps_to,
)
from torch_dpsco.rules import AVERAGES
from torch_dpsco.step import checks

USUAL_BATCH = 512  # without the step rule
USUAL_EPOCHS = 10
_FEW_ROWS = 1e6  # gradients of rows in a run, at least
_MOST_ROWS = 2e7
_LEAST_USERS = 1024  # in a batch
_SHORT = 0.25  # rows are longer than the mean, and so are their gradients


_GIVEN: Mapping[str, Callable[..., Any]] = {
    "n": check.positive_count,
    "batch_size": check.positive_count,
    "steps": check.positive_count,
    "epochs": check.positive,
    "noise_multiplier": check.nonnegative,
}


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a caller gives of a run; None for what is to be chosen.

    Args:
        n: public number of records or users.
        adjacency: of the guarantee.
        sampling: "poisson", "fixed", "shuffled", "assigned" (one pass), "allocated" (passes that are fixed before the
            first) or "full"; or a design, which has its numbers.
        batch_size: expected size of a batch.
        steps: number of steps, in place of epochs.
        epochs: passes over the data.
        noise_multiplier: noise std on the sum over the clip.
    """

    n: int
    adjacency: Adjacency
    sampling: str | Design | None = None
    batch_size: int | None = None
    steps: int | None = None
    epochs: float | None = None
    noise_multiplier: float | None = None

    def __post_init__(self) -> None:
        check.ranges(self, _GIVEN)

    def sampled(self) -> Design:
        """Returns the design of a word and its numbers, of Poisson batches where nothing is said."""
        word = self.sampling or "poisson"
        if isinstance(word, Design):
            if self.batch_size not in (None, word.batch_size):
                raise ValueError(
                    f"batch_size must be {word.batch_size}, that of {word} (got {self.batch_size})"
                )
            return checks.declared(word, self.n, word.batch_size)
        check.choice((*SAMPLING, "full"), sampling=word)
        if word == "full":
            if self.batch_size not in (None, self.n):
                raise ValueError(
                    f"batch_size must be n={self.n} for full batches (got {self.batch_size})"
                )
            return Full(self.n)
        return SAMPLING[word](self.n if self.batch_size is None else self.batch_size, self.n)

    def in_passes(self, design: Design, default: float | None = None) -> Design:
        """Returns an "allocated" design with as many passes as the steps, or epochs, need; others as they are."""
        if self.sampling != "allocated" or not isinstance(design, Assigned):
            return design
        if self.steps is not None:
            return replace(design, passes=math.ceil(self.steps / design.batches))
        passes = default if self.epochs is None else self.epochs
        if passes is None:
            raise ValueError(
                "epochs or steps must be given for sampling='allocated': passes are fixed before"
                " the first"
            )
        return replace(design, passes=math.ceil(passes))

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
        return steps

    def require_one_length(self) -> None:
        """Raises ValueError where steps and epochs are given both."""
        if self.steps is not None and self.epochs is not None:
            raise ValueError(
                f"steps and epochs must not be given both (got {self.steps} and {self.epochs})"
            )


def public_size(n: int | None, sampling: str | Design | None) -> int:
    """Returns the public number of records: that of a design where none is given."""
    if n is None and isinstance(sampling, Design):
        n = sampling.n
    if n is None:
        raise ValueError("n must be given: the public number of records")
    return n


@dataclass(frozen=True, kw_only=True)
class Task(Given):
    """What a plan on records is asked for; an algorithm adds what is its own.

    Args:
        problem: promised constants.
        budget: target; the noise is chosen for it unless it is given, and then the budget only limits the run.
        lr: step size, without momentum.
        average: which iterates are the answer.
        dim: number of parameters.
        distance: bound on, or guess of, |w_1 - w*|.
    """

    problem: Problem
    budget: Budget | None
    lr: float | None
    average: str | None
    dim: int | None
    distance: float | None

    def __post_init__(self) -> None:
        super().__post_init__()
        check.choice((*AVERAGES, None), average=self.average)
        require_target(self.budget, self.noise_multiplier)
        check.ranges(self, {"distance": check.positive})

    @property
    def goal(self) -> Budget | None:
        """The budget that noise is chosen for; None where noise is given."""
        return self.budget if self.noise_multiplier is None else None

    def sized(self) -> Given:
        """Returns this with batches of 512 records, where nothing is said of them."""
        said = self.batch_size is not None or self.sampling == "full"
        if said or isinstance(self.sampling, Design):
            return self
        return replace(self, batch_size=min(USUAL_BATCH, self.n))


class Draws(NamedTuple):
    """How batches are drawn, and how often; None for no limit but the budget."""

    design: Design
    steps: int | None


# -- the four stages --------------------------------------------------------------------------------------------------


def choose_design(
    promises: Scale | UserScale | None,
    budget: Budget | None,
    given: Given,
    default: float | None = None,
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
    budget: Budget | None, design: Design, steps: int | None, given: Given
) -> float:
    """Returns the noise multiplier that is given, or else the least one of the budget."""
    require_target(budget, given.noise_multiplier)
    if given.noise_multiplier is not None:
        return given.noise_multiplier
    assert budget is not None  # or there was no target
    return noise_for(budget, design, steps)


def require_target(budget: Budget | None, noise_multiplier: float | None) -> None:
    """Raises ValueError where there is neither noise of the caller's nor a budget to choose it for."""
    if noise_multiplier is None and budget is None:
        raise ValueError(
            "budget or noise_multiplier must be given: the target, or noise of your own"
        )


def require_planned(budget: Budget) -> None:
    """Raises ValueError for a budget that is not spent by a plan."""
    if budget.mode != "planned":
        raise ValueError(
            f"budget must be of mode 'planned', to be spent by a plan (got {budget.mode!r})"
        )


def choose_pace(promises: Scale | UserScale, draws: Draws, noise: float) -> Pace:
    """Returns the step size and the momentum of the step rule."""
    assert draws.steps is not None  # under a rule there is a last step
    return promises.pace(draws.design, draws.steps, noise)


def choose_clip(problem: Problem, n: int, budget: Budget, dim: int | None) -> float:
    """Returns the share of the bound at which rows are clipped: 1 but for losses of one score.

    Their clipped gradients are those of a loss.
    """
    return clip_share(loudness(n, budget, dim)) if problem.is_glm else 1.0


# -- what the stages share --------------------------------------------------------------------------------------------


def with_batches(promises: Scale | UserScale, budget: Budget, given: Given) -> Given:
    """Returns what is given, with the batch size of the step rule where there is none."""
    if given.batch_size is not None or isinstance(given.sampling, Design):
        return given
    wanted = given.steps or promises.steps(given.n, budget)
    return replace(given, batch_size=promises.batch_size(given, budget, wanted))


def with_steps(promises: Scale | UserScale, budget: Budget, given: Given) -> Given:
    """Returns what is given, with the number of steps of the step rule where passes do not say it."""
    if given.steps is not None or given.epochs is not None:
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
        return self.distance / (self.bound * loudness(n, budget, self.dim))

    def steps(self, n: int, budget: Budget) -> int:
        """Returns the number of steps by the horizon."""
        return steps_to(self.horizon(n, budget), self.smoothness)

    def least_steps(self, design: Design) -> int:
        """Returns those of the usual passes; none of all records at once."""
        if design.batch_size >= design.n:
            return 0
        return calibrate.epoch_steps(design, usual_passes(design.n))

    def batch_size(self, given: Given, budget: Budget, wanted: int) -> int | None:
        """Returns the size such that the steps make 20 passes, or 1e6 gradients if these are more, at most 2e7."""
        n = given.n
        if given.sampling == "full":
            return None
        if given.sampling == "assigned":
            share = 1.0 / one_pass(self, n, budget, momentum=True, secret=True)
        elif given.epochs is None:
            share = max(usual_passes(n), _FEW_ROWS / n) / wanted
        else:
            share = given.epochs / wanted
        return min(n, max(1, math.ceil(share * n)))

    def pace(self, design: Design, steps: int, noise: float) -> Pace:
        """Returns step size and momentum for the noise of the mean of all steps, sampling included."""
        sampled = design.batch_size < design.n
        level = noise_of_mean(
            noise, self.bound, design.batch_size, steps, self.dim, sampled=sampled
        )
        if self.smoothness is None:
            return rough_pace(self.distance, level, steps, self.bound)
        return smooth_pace(self.distance / level, steps, self.smoothness)


def usual_passes(n: int) -> float:
    """Returns 20, fewer of more than a million records."""
    return min(PASSES, max(1.0, _MOST_ROWS / n))


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

    def __post_init__(self) -> None:
        check.ranges(self, {"distance": check.positive})

    def steps(self, n: int, budget: Budget) -> int:
        """Returns the number of steps by the noise."""
        return relative_steps(loudness(n, budget, self.dim))

    def least_steps(self, design: Design) -> int:
        """Returns 0: batches ask for none."""
        return 0

    def batch_size(self, given: Given, budget: Budget, wanted: int) -> int | None:
        """Returns the size such that the steps make 20 passes, of 1024 users at least; None for all of them."""
        if given.sampling not in (None, "poisson", "fixed"):
            return None
        share = (PASSES if given.epochs is None else given.epochs) / wanted
        return min(given.n, max(_LEAST_USERS, math.ceil(share * given.n)))

    def pace(self, design: Design, steps: int, noise: float) -> Pace:
        """Returns step size and momentum for the noise of the mean of all steps."""
        level = noise_of_mean(noise, 1.0, design.batch_size, steps, self.dim, sampled=False)
        pace = relative_pace(level, steps, self.distance)
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
        dim = dim or USUAL_DIM * table.loss.num_scores
    smooth = problem.smoothness is not None
    if distance is None:
        distance = usual_distance(at_zero, rows, problem.bound_y if real else None, smooth)
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
    return Scale(1.0, usual_distance(1.0, rows, None, smooth=True), smoothness, dim)


def loudness(n: int, budget: Budget, dim: int | None) -> float:
    """Returns the norm of the noise of the mean of all steps over the clip."""
    return noise_of_mean(release_noise(budget), 1.0, n, 1, dim, sampled=False)


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
        return min(n, one_pass_steps(scale.horizon(n, budget), smoothness, momentum))
    if scale.smoothness is None:
        return max(numbers_of_steps(n))

    def cost(steps: int) -> float:
        noise = noise_of_pass(budget, steps)
        level = noise_of_mean(
            noise, scale.bound, max(1, n // steps), steps, scale.dim, sampled=steps > 1
        )
        return risk(scale.distance, level, steps, smoothness, momentum)

    return min(numbers_of_steps(n), key=cost)


def numbers_of_steps(n: int) -> list[int]:
    """Returns the numbers of batches that a secret pass over n records may have: powers of 2 up to 1024."""
    return [2**k for k in range(MOST.bit_length()) if 2**k <= n]


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


def agreed(
    budget: Budget | None,
    adjacency: Adjacency | None,
    epsilon: float | None = None,
    delta: float | None = None,
    *,
    unit: str = "example",
    default: Adjacency = ZERO_OUT,
) -> tuple[Budget | None, Adjacency]:
    """Returns budget and adjacency of a plan: what one of them says, or the default where neither does.

    Raises:
        UnitError: the budget protects another unit.
        AdjacencyError: it is of another adjacency.
        ValueError: epsilon and delta are given beside a budget, or one of them alone.
    """
    if (epsilon, delta) != (None, None):
        budget = one_budget(budget, epsilon, delta)
    if budget is None:
        return None, check_adjacency(adjacency or default)
    budget = budget.under(adjacency or default, unit)
    if budget.unit != unit:
        raise UnitError(
            f"budget must be of unit {unit!r}: Budget(..., unit={unit!r}) (got {budget.unit!r})"
        )
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


def noise_for(budget: Budget, design: Design, steps: int | None) -> float:
    """Returns the least noise multiplier at which these steps fit the budget."""
    return calibrate.noise_multiplier(
        budget.epsilon,
        budget.delta,
        design=design,
        steps=check.positive_count(steps=steps),
        adjacency=budget.adjacency,
    )


def release_noise(budget: Budget) -> float:
    """Returns the noise multiplier at which one unsampled clipped mean spends the whole budget."""
    return noise_for(budget, Full(1), 1)


def warn_if_buried(
    budget: Budget | None, draws: Draws, noise: float, n: int, dim: int | None
) -> None:
    """Warns where the noise that was chosen for a budget buries the mean of all steps."""
    if budget is not None and dim is not None and draws.steps:
        std = noise / draws.design.batch_size / math.sqrt(draws.steps)
        checks.warn_if_buried(std, n=n, dim=dim, epsilon=budget.epsilon)


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
            f"dim must be the number of parameters, or a model or parameters (got {shown(dim)}),"
            " whose sizes are known: a lazy layer has none before its first forward"
        ) from error
    tensors = [p for g in items for p in (g["params"] if isinstance(g, dict) else [g])]
    return max(1, sum(int((p[1] if isinstance(p, tuple) else p).numel()) for p in tensors))


MOST_OF_USERS = 256
PASSES = 20  # over the data, in batches of 1/PASSES of them times the steps at most
USUAL_DIM = 64  # where nobody says
_FIRST_STEPS = 50.0  # D in units of a first step of size 1/B^2
_TARGETS = 3.0  # and of the targets' bound over B
_ALONG = (
    20.0  # gradients of the mean loss along the way are about that much shorter than the bound
)
_SAMPLED = 4.0  # and deviations of single rows from them
_LOUD = 0.008  # noise from which rows are clipped
_CLIPPED = 0.5  # at half of the bound
_FEW = 5  # steps of one pass
_RELATIVE = 6.0  # of steps in units of a clip
_OSCILLATION = 4.0
_ROUNDS = 200.0


def usual_distance(
    grad_at_zero: float, bound_x: float, bound_y: float | None, smooth: bool
) -> float:
    """Returns the guess of |w_1 - w*| where there is none: 50 first steps, at most six times the targets' bound.

    Args:
        grad_at_zero: bound on gradients at 0, > 0.
        bound_x: B > 0, of rows.
        bound_y: Y > 0, of real targets; None for labels.
        smooth: whether first steps of size 1/B^2 have a meaning; else it is three times the targets' bound, if any.

    Example:
        >>> usual_distance(0.5, 1.0, None, smooth=True)
        25.0
    """
    steps = _FIRST_STEPS * grad_at_zero / bound_x**2
    if bound_y is None:
        return steps
    targets = _TARGETS * bound_y / bound_x
    return min(steps, 2.0 * targets) if smooth else targets


def clip_share(noise: float) -> float:
    """Returns the share of the gradient bound at which the rows of a linear model are clipped.

    1 up to 0.0005, 1/2 from 0.008 on, and proportional to noise^(-1/4) between them.

    Args:
        noise: norm of the noise of all steps' mean over the bound, >= 0.

    Example:
        >>> clip_share(0.0001), clip_share(0.03)
        (1.0, 0.5)
    """
    ratio = noise / _LOUD
    return 1.0 if ratio <= _CLIPPED**4 else max(_CLIPPED, _CLIPPED * ratio**-0.25)


def noise_of_mean(
    noise_multiplier: float,
    clip: float,
    batch_size: int,
    steps: int,
    dim: int | None,
    sampled: bool,
) -> float:
    """Returns s, the norm of the noise of the mean of all steps, that of sampling included.

    Args:
        noise_multiplier: z > 0, std on the sum over the clip.
        clip: C > 0.
        batch_size: b.
        steps: T.
        dim: d; None for a usual one.
        sampled: whether batches are not all rows.
    """
    added = noise_multiplier * math.sqrt(dim or USUAL_DIM) / batch_size
    return (
        clip / math.sqrt(steps) * math.hypot(added, sampled / (_SAMPLED * math.sqrt(batch_size)))
    )


def rough_pace(distance: float, noise: float, steps: int, grad_bound: float) -> Pace:
    """Returns step size and momentum for a loss with kinks: h = D/sqrt(T^2 s^2 + T g^2), g = grad_bound/20.

    Args:
        distance: D > 0.
        noise: s > 0.
        steps: T.
        grad_bound: > 0, of rows.

    Example:
        >>> pace = rough_pace(distance=1.0, noise=1e-9, steps=400, grad_bound=20.0)
        >>> round(pace.lr, 9), pace.momentum
        (0.00125, 0.975)
    """
    moved = math.hypot(steps * noise, math.sqrt(steps) * grad_bound / _ALONG)
    momentum = max(0.0, 1.0 - 2.0 * SETTLED / steps)
    return Pace(distance / moved * (1.0 - momentum), momentum)


def one_pass_steps(horizon: float, smoothness: float, momentum: bool) -> int:
    """Returns the number of batches of one pass, whose noise grows with it: H(T) = H/sqrt(T).

    Args:
        horizon: H of one step on all records.
        smoothness: L > 0.
        momentum: whether steps may be T/(5 L), or 1/(2 L) at most.
    """
    reach = horizon * smoothness
    steps = (
        math.pow(SETTLED * reach, 2.0 / 5.0) if momentum else math.pow(2.0 * reach, 2.0 / 3.0)
    )
    return min(MOST, max(_FEW, math.ceil(steps)))


def risk(distance: float, noise: float, steps: int, smoothness: float, momentum: bool) -> float:
    """Returns D^2/(2 H) + H s^2/2 at the best horizon H that so many steps reach, by which numbers of steps compare.

    Args:
        distance: D > 0.
        noise: s > 0, of the mean of all steps.
        steps: T.
        smoothness: L > 0.
        momentum: as in `one_pass_steps`.

    Example:
        >>> risk(1.0, 0.1, 100, 1.0, momentum=True), risk(1.0, 0.1, 4, 1.0, momentum=True) > 0.1
        (0.1, True)
    """
    largest = steps / SETTLED if momentum else 0.5
    horizon = min(distance / noise, steps * largest / smoothness)
    return distance**2 / (2.0 * horizon) + horizon * noise**2 / 2.0


def relative_steps(noise: float) -> int:
    """Returns T, between 64 and 256, for means in units of a clip, where no smoothness is known: sqrt(200/noise).

    Args:
        noise: norm of the noise of the mean of all steps, in units of the clip, > 0.
    """
    return min(MOST_OF_USERS, max(LEAST, math.ceil(math.sqrt(_ROUNDS / noise))))


def relative_pace(noise: float, steps: int, distance: float | None = None) -> Pace:
    """Returns step size and momentum for means in units of a clip: h = D min(1/(T s), T/40).

    The second bound keeps a step lr = h (1 - m) below D/4.

    Args:
        noise: s > 0, in units of the clip.
        steps: T.
        distance: D > 0; default 6, for rows of norms of about 1 to 3.

    Example:
        >>> pace = relative_pace(noise=0.1, steps=100)
        >>> round(pace.lr, 9), pace.momentum
        (0.06, 0.9)
    """
    slow = min(1.0, 2.0 * SETTLED / steps)
    step = min(1.0 / (steps * noise), 1.0 / (_OSCILLATION * slow))
    return Pace((distance or _RELATIVE) * step * slow, 1.0 - slow)
