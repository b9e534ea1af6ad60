"""Output perturbation: solve to a certified accuracy, add noise once.

    release  w_hat + z,   |w_hat - w*| <= r certified,   z calibrated to Delta + 2 r

with w* the minimizer of J (see `estimators.task`), which one record moves by at most Delta. Any solver may be used and
none is trusted. Noise is drawn after the solver has ended, from a stream of its own.

The regularizer where none is given is that of the least bound on the risk of a linear model. The noise z on the weights
moves the score of a row by <x, z>, of the std s|x| only, however many weights there are: for a K-norm noise of scale b,
s = b sqrt(d + 1). By Taylor's formula for each record, and since z has mean 0,

    E F(w + z) - F(w) <= min(beta s^2 / 2, L s)      beta >= phi'' |x|^2,  L >= |phi'| |x|

to which the regularizer adds (lam / 2) R^2 for a model of norm R. Tilted and adversarial objectives are treated as if
they had the sum form, with their constants: no privacy rests on this.

Differs from the paper (Lowy and Razaviyayn, Algorithms 1, 5, 6, 7) in: 1. a certificate at run time in place of an
accuracy in expectation, with which the paper's claim is false; 2. the data's part of the gradients alone moves the
minimizer; 3. analytic Gaussian noise by default; 4. sum form; 5. <x, z> in the bound on the risk, where its schedules
have |z|, which is sqrt(d) times larger and shrinks models more than it has to.

Source: docs/proofs/output.md#how-far-a-minimizer-moves, docs/proofs/output.md#certified-points,
docs/proofs/output.md#default-regularizer.

Output perturbation: constants of losses, and how far one record moves the minimizer.

Lemma. Let F and F' be mu-strongly convex on a closed convex set, w and w' their minimizers there. Then

    ||w - w'|| <= ||s - s'|| / mu,

s and s' subgradients of F and F' at w', s' that of the optimality condition: <s', w - w'> >= 0, and <t, w' - w> >= 0
for the t of F at w, so that mu ||w - w'||^2 <= <s - t, w' - w> <= <s - s', w' - w>. Whatever the two objectives share
cancels in s - s': regularizers, shifts, and the losses of the shared records.

Differs from the paper in: 1. only the data-dependent loss counts, where the paper takes L + lam R for L. 2. Adding or
removing a record is covered, for a public divisor. 3. Inexact minimizers are covered by a certificate of the distance,
or by a failure probability: an accuracy in expectation is no bound. 4. Every figure is rounded up.

Diameters bound ||grad l(w, z) - grad l(w, z')|| over two records, which may be less than 2 L. A robust loss of a
margin, max over the attacks v of phi(y w.(x + v)), is phi(y w.x - rho |w|_*) with the dual norm of the attacks. With
u a subgradient of that norm, rho u has the length rho for attacks in the Euclidean norm, and at most rho sqrt(d) for
those in the maximum norm. Such a maximum of smooth losses is not smooth (the norm has a kink at w = 0): it is smoothed
by a public nu, which leaves the privacy constants as they are.

Source: docs/proofs/output.md, from docs/proofs/output.md#how-far-a-minimizer-moves on,
docs/proofs/output.md#clipped-residuals, docs/proofs/output.md#robust-losses.

Tilted objectives (1/tau) log mean_i e^(tau l_i(w)) + psi(w): weights, curvature and sensitivity.

The gradient is the mean of the losses' gradients with weights v_i proportional to e^(tau l_i); the Hessian is that of
the weighted mean plus tau times the covariance of the gradients under v. tau > 0 stresses the largest losses, tau < 0
the smallest, tau = 0 is the mean. If all losses lie in an interval of length r for every w that may be a minimizer,
then with C = e^(|tau| r)

    v_i <= C / (C + n - 1).

One record replaced: with g the v-mean of the others, the gradients at one point differ by v_n g_n - v'_n g'_n +
(v'_n - v_n) g. If v_n >= v'_n this is v_n times the difference of g_n and a convex combination of g'_n and g: at most
D v_n, D the diameter of the gradients.

One record added to n: the gradients differ by v (g_z - g), v <= C / (C + n). The empty data set has no weighted mean:
there the first record moves the gradient by its length L, so that without a public n_min >= 1 the bound is max(D, L).

Differs from the paper in: 1. tau < 0 is covered. 2. The diameter counts, and the exact supremum of the weight instead
of min(1, C/n). 3. Adding or removing a record is covered.

Source: docs/proofs/output.md#tilted-means
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.gaussian import gaussian_sigma, sensitivity_factor
from torch_dpsco.accounting.analysis.rounding import (
    asks_exact,
    exact_grid,
    require_gaussian,
    safe,
    scaled_up,
    with_grid,
)
from torch_dpsco.accounting.designs import is_exact
from torch_dpsco.accounting.events import ADD_REMOVE, REPLACE_ONE, Gaussian, KNorm
from torch_dpsco.errors import CalibrationError, ConditionError
from torch_dpsco.estimators.records import Records, project
from torch_dpsco.estimators.solvers import check_tolerance, solve, solver_tolerance
from torch_dpsco.estimators.task import KINK, LinearPlan, LinearTask, build_objective
from torch_dpsco.noise import Source, gaussian_vector
from torch_dpsco.step.exact_noise import exact_release, knorm_vector
from torch_dpsco.step.plan import exact_cost

_SCORE = 5.0  # norm times bound on rows of a model to be had: probabilities up to 0.993
_GRID = tuple(10.0 ** (power / 4) for power in range(-32, 13))


def least_risk_reg(task: LinearTask) -> float:
    """Returns the regularizer, in sum form, of the least bound; a search over public numbers.

    Args:
        task: its reg is not read.

    Raises:
        CalibrationError: nothing is proved for any regularizer.

    Example:
        >>> import torch_dpsco as dp
        >>> from torch_dpsco.estimators.task import LinearTask
        >>> from torch_dpsco.estimators.preparation import Preparation
        >>> task = LinearTask(loss=dp.losses.Logistic(), preparation=Preparation(1.0), dim=10, n=10_000,
        ...                   budget=dp.Budget(1.0, 1e-6))
        >>> 10 < least_risk_reg(task) < 1000
        True
    """
    bound = task.preparation.bound + task.attack_reach
    base = 0.0
    if task.tilt < 0 and task.lipschitz is not None:
        base = safe(-task.tilt * task.lipschitz**2) * (
            1 + 1e-6
        )  # what a negative tilt takes of the curvature
    best = math.nan
    least = math.inf
    refusal: CalibrationError = ConditionError(
        f"reg must be given: no default has a finite bound for {task.loss!r}"
    )
    for factor in _GRID:
        reg = task.n * (base + factor * bound**2)
        try:
            risk = _risk(task, plan_output(replace(task, reg=reg)), bound)
        except OverflowError:  # e^(tilt range)
            continue
        except CalibrationError as error:
            refusal = error
            continue
        if risk < least:
            best = reg
            least = risk
    if math.isinf(least):
        raise refusal
    return best


def _risk(task: LinearTask, plan: OutputPlan, bound: float) -> float:
    """Returns a bound on E F(w + z) - F(w) of a plan's noise z, F without its regularizer, and what that costs."""
    grown = (bound / task.preparation.bound) ** 2
    spread = plan.noise_and_signal[0]
    lipschitz = task.lipschitz_at_minimizers(plan.reg) * math.sqrt(grown)
    moved = lipschitz * spread
    if task.smoothness is not None:
        moved = min(
            moved, (task.smoothness * grown + abs(task.tilt) * lipschitz**2) / 2 * spread**2
        )
    radius = min(task.radius, _SCORE / bound)
    return moved + plan.reg / task.n / 2 * radius**2


def theory_reg(task: LinearTask) -> float:
    """Returns the paper's regularizer for Lipschitz losses on a ball, in sum form: n L / (R sqrt(1 + 1/q)).

    The paper's ratio of noise to size is q = d / (epsilon n) for delta = 0, else sqrt(d) (c + sqrt(c^2 + epsilon)) /
    (epsilon n) with c^2 = log(2 / (sqrt(16 delta + 1) - 1)).

    Args:
        task: its reg is not read; delta < 1/2.

    Raises:
        ValueError: no radius R, or a delta out of range.

    Source: docs/proofs/output.md#published-schedules (Proposition 2.7 of the paper).

    Example:
        >>> import torch_dpsco as dp
        >>> from torch_dpsco.estimators.preparation import Preparation
        >>> task = LinearTask(loss=dp.losses.Logistic(), preparation=Preparation(1.0), dim=10, n=1000, radius=2.0,
        ...                   budget=dp.Budget(1.0, 0.0))
        >>> round(theory_reg(task), 3)
        49.752
    """
    radius = task.radius
    if math.isinf(radius):
        raise ValueError(
            "radius must be given for reg='theory', which is for models in a ball (got inf)"
        )
    epsilon = task.target.epsilon
    delta = task.target.delta
    ratio = task.parameters / epsilon
    if delta > 0:
        root = math.sqrt(16 * check.open_interval(0.0, 0.5, delta=delta) + 1)
        square = math.log((root + 1) / (8 * delta))
        ratio = (
            math.sqrt(task.parameters)
            * (math.sqrt(square) + math.sqrt(square + epsilon))
            / epsilon
        )
    lipschitz = task.lipschitz or task.problem.grad_bound(radius)
    return task.n * lipschitz / (radius * math.sqrt(1 + task.n / ratio))


def with_named_reg(task: LinearTask, reg: str, mechanism: str) -> LinearTask:
    """Returns a task with a regularizer that is named: "theory" for `theory_reg`, of output perturbation."""
    check.choice(("theory",), reg=reg)
    if mechanism != OutputPlan.mechanism:
        raise ValueError(
            f"reg='theory' is of output perturbation, not of {mechanism!r}: give a number, or take"
            " OutputPerturbation or mechanism='output'"
        )
    return replace(task, reg=theory_reg(task))


@dataclass(frozen=True, kw_only=True)
class OutputPlan(LinearPlan):
    """Public numbers of one release.

    Args:
        noise_scale: std of Gaussian noise, or scale of the K-norm's.
        secure: "exact" for noise in integers on a public grid; None for floating point.
    """

    noise_scale: float
    secure: str | None = None

    mechanism = "output"

    @property
    def sensitivity(self) -> float:
        """Delta, how far one record moves the minimizer."""
        return self._moves.minimizer

    @property
    def distance(self) -> float:
        """r, that the solver has to certify."""
        return self._moves.distance

    @cached_property
    def _moves(self) -> _Moves:
        """How far one record moves things, and the certificate that is asked for."""
        sensitivity, mu = _sensitivity(self.task, self.reg)
        distance = solver_tolerance(sensitivity, mu) / mu
        # PRIVACY: by public numbers, so that no data set can fail it
        # (test_a_tolerance_below_the_rounding_is_not_planned)
        check_tolerance(mu * distance, _rounding(self.task, self.reg))
        # PRIVACY: both minimizers are approximate (test_the_noise_covers_what_the_solver_left)
        answer = certified_sensitivity(sensitivity, mu, mu * distance)
        return _Moves(mu, sensitivity, distance, answer)

    @property
    def moved(self) -> float:
        """How far one record moves what is released."""
        # PRIVACY: rounding to the grid moves the answer too (test_the_grid_is_in_the_sensitivity_of_exact_plans)
        return with_grid(self._moves.answer, asks_exact(self.secure))

    def own_event(self) -> Gaussian | KNorm:
        """Returns what the release alone costs: a pure epsilon is what was asked for, where the noise costs no more."""
        scale = check.positive(noise_scale=self.noise_scale)
        moved = self.moved
        adjacency = self.task.adjacency
        if self.task.pure:
            # margin: a quotient rounded up (docs/proofs/rounding.md#model-of-arithmetic)
            spent = math.nextafter(moved / scale, math.inf)
            # PRIVACY: the epsilon of the noise that is drawn (test_an_edited_plan_is_refused_or_charges_what_it_draws)
            epsilon = max(self.task.target.epsilon, spent)
            return KNorm(epsilon, self.task.parameters, adjacencies=(adjacency,))
        return Gaussian(scale, {adjacency: moved}, exact=asks_exact(self.secure))

    @property
    def noise_and_signal(self) -> tuple[float, float, str]:
        """As in `LinearPlan`; an answer without records is 0."""
        task = self.task
        std = self.noise_scale * (math.sqrt(task.parameters + 1) if task.pure else 1.0)
        return std, min(task.radius, task.n * self.sensitivity), "the answer"

    @property
    def risk_bound(self) -> tuple[float, float] | None:
        """(a, b): the expected mean loss is at most a + b |w|^2 above that of any w in the ball; None if not proved.

        The loss is that of rows as they are clipped. Source: docs/proofs/output.md#risk-of-a-noisy-minimizer,
        docs/proofs/output.md#default-regularizer.
        """
        task = self.task
        changed = task.tilt or task.attack_radius or task.residual_clip or task.prepare
        if changed or task.adjacency == ADD_REMOVE:
            return None
        left = self.distance
        if math.isfinite(task.radius):
            lipschitz = task.lipschitz or task.problem.grad_bound(task.radius)
            return lipschitz * (self._noise_norms[0] + left), self.reg / task.n / 2
        lipschitz = task.lipschitz_at_minimizers(self.reg)
        bend = math.inf if task.smoothness is None else task.smoothness / 2
        moved = bend * self._noise_norms[1]
        missed = lipschitz * left
        if task.lipschitz is None:
            missed += bend * left**2
        else:
            moved = min(moved, lipschitz * self._noise_norms[0])
        return moved + missed, self.reg / task.n / 2

    @property
    def _noise_norms(self) -> tuple[float, float]:
        """E|z| and E|z|^2, at most; of <x, z> over |x|, where the answer has one score and is not projected."""
        dim = self.task.parameters
        scale = self.noise_scale
        if self.task.num_scores == 1 and math.isinf(self.task.radius):
            spread = self.noise_and_signal[0]
            return spread, spread**2
        if self.task.pure:
            return dim * scale, dim * (dim + 1) * scale**2
        return math.sqrt(dim) * scale, dim * scale**2

    def _expected(self) -> str:
        """Returns the bound on the risk in words, "" for none."""
        bound = self.risk_bound
        if bound is None:
            return ""
        fixed, squared = bound
        radius = self.task.radius
        if math.isinf(radius):
            return (
                f"mean loss of the answer at most {fixed:.3g} + {squared:.3g} |w|^2 above that of any"
                " model w"
            )
        most = fixed + squared * radius**2
        return f"excess risk of the answer at most {most:.3g} over models of norm up to {radius:.3g}"

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yields what is to be said beside the promise."""
        yield from super().lines()
        if expected := self._expected():
            yield "expected", expected
        if not self.task.pure:
            yield exact_cost(self.secure)

    def solve(self, records: Records, start: Tensor | None = None) -> Tensor:
        """Returns a point that is certified to be as near to the minimizer as planned: NOT private.

        Raises:
            NotCertifiedError: an internal error, see `estimators.solvers.solve`; outside of the guarantee.
        """
        objective = build_objective(self.task, self.reg, records)
        if objective.strong_convexity < self._moves.strong_convexity * (1 - 1e-12):
            raise ConditionError(
                "objective must be that of the plan: its strong convexity is less than planned"
            )
        return solve(objective, self.distance, radius=self.task.radius, start=start).w

    def draw(self, solved: Tensor, generator: Source) -> Tensor:
        """Draws the noise and returns the private vector; see `LinearPlan`."""
        released = self.own_event()
        if is_exact(released):
            return project(exact_release(solved, released, generator), self.task.radius)
        draw = knorm_vector if isinstance(released, KNorm) else gaussian_vector
        return project(solved + draw(len(solved), self.noise_scale, generator), self.task.radius)


def plan_output(task: LinearTask, secure: str | None = None) -> OutputPlan:
    """Returns the numbers of output perturbation for a task.

    Args:
        task: its public numbers.
        secure: "exact" for noise drawn in integers (delta > 0); see docs/proofs/exact_gaussian.md.

    Raises:
        ConditionError: nothing is proved for these settings, e.g. tilts under add_remove without n_min.
        MissingConstantError: the loss needs a radius.

    Guarantee:
        The event of the plan, for a task's adjacency, if the released point is certified within `distance`.
    """
    task = _smooth(task)
    if task.reg is None:
        task = replace(task, reg=least_risk_reg(task))
    draft = OutputPlan(task=task, noise_scale=1.0, secure=secure)
    moved = draft.moved
    if task.pure:
        require_gaussian(secure)
        return replace(draft, noise_scale=moved / task.target.epsilon * (1 + 1e-15))
    if task.noise_multiplier is not None:
        sigma = task.noise_multiplier * moved
    elif task.prepare is not None:
        sigma = safe(moved / task.level)
    else:
        sigma = gaussian_sigma(task.target.epsilon, task.target.delta, moved)
    if asks_exact(secure):
        exact_grid(sigma, moved, task.parameters)  # raises before anything is spent
    return replace(draft, noise_scale=sigma)


class _Moves(NamedTuple):
    """How far one record moves things.

    Args:
        strong_convexity: of the objective that is solved, in its own form.
        minimizer: how far the minimizer moves.
        distance: between minimizer and answer, certified.
        answer: how far the answer moves.
    """

    strong_convexity: float
    minimizer: float
    distance: float
    answer: float


def _smooth(task: LinearTask) -> LinearTask:
    """Returns the task, with a public smoothing of a loss that has a kink, as a certificate needs it."""
    if task.smoothness is not None:
        return task
    smooth = task.loss.smoothed(KINK * (task.bound_y or 1.0))
    if smooth is None:
        raise ConditionError(
            f"loss must be smooth, Hinge or Pinball to be certified (got {task.loss!r})"
        )
    return replace(task, loss=smooth)


def _rounding(task: LinearTask, reg: float) -> float:
    """Returns what rounding may hide from a certificate, for public numbers."""
    lipschitz = task.lipschitz_at_minimizers(reg)
    norm = task.minimizer_radius(reg)
    share = 1.0 / task.n if task.tilt else 1.0  # tilted objectives are means
    return share * task.gradient_rounding(
        reg, norm, lipschitz, dim=task.parameters, most=task.most_records
    )


def _sensitivity(task: LinearTask, reg: float) -> tuple[float, float]:
    """Returns (Delta, mu) of the objective with this regularizer."""
    if task.tilt:
        return _tilted(task, reg)
    if task.attack_radius:
        bound = task.preparation.bound
        rho = task.attack_reach
        link = task.loss.grad_bound(math.inf, 1.0, 1.0)
        spread = adversarial_gradient_diameter(bound, rho, link)
        steepest = adversarial_lipschitz(bound, rho, link)
        return erm_sensitivity(steepest, reg, 1, task.adjacency, spread), reg
    lipschitz = task.lipschitz_at_minimizers(reg)
    diameter = 2 * lipschitz
    if task.clipped is None and task.adjacency == REPLACE_ONE:
        own = task.loss.gradient_diameter(task.minimizer_radius(reg), task.preparation.bound)
        diameter = min(diameter, own)
    return erm_sensitivity(lipschitz, reg, 1, task.adjacency, diameter), reg


def _tilted(task: LinearTask, reg: float) -> tuple[float, float]:
    lam = reg / task.n
    lipschitz = task.lipschitz
    if lipschitz is None:
        raise ConditionError(f"loss must be Lipschitz to be tilted (got {task.loss!r})")
    if task.adjacency == ADD_REMOVE and task.n_min is None:
        raise ConditionError(
            "n_min must be given for tilts under add_remove: a public lower bound on the records"
        )
    lipschitz *= 1 + 2.1e-9  # as the objective takes it: norms of clipped rows are rounded
    span = task.loss_range(lam)
    delta = tilted_sensitivity(
        task.tilt, span, task.n, lipschitz, lam, adjacency=task.adjacency, n_min=task.n_min or 0
    )
    return delta, tilted_strong_convexity(task.tilt, lipschitz, lam)


def erm_sensitivity(
    lipschitz: float,
    strong_convexity: float,
    n: int,
    adjacency: str = "replace_one",
    gradient_diameter: float | None = None,
) -> float:
    """Returns a bound on ||w(X) - w(X')||, w(X) the minimizer of (1/n) sum_i l(w, x_i) + psi(w).

    D / (mu n), where one record is replaced; L / (mu n), where one is added, removed or set to zero and n is a public
    constant. In the minimizer psi cancels, so that L and D are those of l alone.

    Args:
        lipschitz: L > 0, bound on the subgradients of l at every possible minimizer.
        strong_convexity: mu > 0, of the whole objective (lam for psi = lam/2 |w|^2).
        n: the divisor, >= 1: the number of records under replace_one and zero_out, any public constant otherwise.
        adjacency: "replace_one", "zero_out" or "add_remove".
        gradient_diameter: D > 0, bound on the distance of two records' gradients at a possible minimizer; default 2 L.
            Used as it is given, for replace_one only.

    Returns:
        The l2 sensitivity, in the unit of w, rounded up.

    Raises:
        ValueError: an argument is out of range.

    Guarantee: holds for every pair of neighbors, for minimizers over R^d or over one closed convex set. Under
        add_remove the objective must divide by the constant n, never by the number of records.

    Source: docs/proofs/output.md#how-far-a-minimizer-moves

    Example:
        >>> round(erm_sensitivity(lipschitz=1.0, strong_convexity=0.1, n=1000), 9)
        0.02
    """
    jump = sensitivity_factor(adjacency) * lipschitz
    if gradient_diameter is not None and adjacency == "replace_one":
        jump = gradient_diameter
    # PRIVACY: the sensitivity of every output perturbation (test_no_pair_of_quadratics_moves_further)
    return safe(jump / strong_convexity / n)


def certified_sensitivity(sensitivity: float, strong_convexity: float, grad_tol: float) -> float:
    """Returns Delta + 2 g / mu: released points with a subgradient of norm <= g lie within g / mu of the minimizer.

    Args:
        sensitivity: Delta > 0, of exact minimizers.
        strong_convexity: mu > 0, of the whole objective.
        grad_tol: g > 0, public, reached on EVERY data set and for every seed of the solver.

    Guarantee: the sensitivity of the certified points, if the noise is drawn after the solver has ended, from a stream
        of its own.

    Source: docs/proofs/output.md#certified-points

    Example:
        >>> round(certified_sensitivity(sensitivity=0.02, strong_convexity=0.1, grad_tol=1e-7), 9)
        0.020002
    """
    # PRIVACY: both points may be off, in opposite directions (test_an_approximate_minimizer_moves_by_twice_its_error)
    return safe(sensitivity + 2 * grad_tol / strong_convexity)


def adversarial_lipschitz(
    bound_x: float, attack_radius: float, link_lipschitz: float = 1.0
) -> float:
    """Returns L_phi (B + a), the Lipschitz constant of max over the attacks v of phi(y w.(x + v)).

    Args:
        bound_x: B > 0, bound on the Euclidean norm of x.
        attack_radius: a >= 0, bound on the Euclidean norm of an attack: rho sqrt(d) in the maximum norm.
        link_lipschitz: L_phi > 0; phi nonincreasing.

    Source: docs/proofs/output.md#robust-losses

    Example:
        >>> round(adversarial_lipschitz(1.0, 0.5), 9)
        1.5
    """
    return safe(link_lipschitz * (bound_x + attack_radius))


def adversarial_gradient_diameter(
    bound_x: float, attack_radius: float, link_lipschitz: float = 1.0
) -> float:
    """Returns L_phi max(2 B, B + a): bounds the distance of the robust gradients of two records with |x| <= B.

    A gradient is s (xi - a u), s in [0, L_phi], |xi| <= B, |u| <= 1 and u the same for both records (a subgradient of
    the norm at w, chosen without looking at the data). The distance is convex in both s, hence largest at their ends:
    2 B L_phi, where both are L_phi, or (B + a) L_phi, where one is 0. So a <= B costs no noise.

    Args: as in `adversarial_lipschitz`.

    Source: docs/proofs/output.md#robust-losses

    Example:
        >>> round(adversarial_gradient_diameter(1.0, 3.0), 9)
        4.0
    """
    # PRIVACY: holds for two gradients at one w (test_no_pair_of_robust_gradients_is_further_apart)
    return safe(link_lipschitz * max(2 * bound_x, bound_x + attack_radius))


def tilted_max_weight(tilt: float, loss_range: float, n: int) -> float:
    """Returns C / (C + n - 1), C = e^(|tau| r): the largest weight of one of n records, which is attained.

    Args:
        tilt: tau, finite.
        loss_range: r >= 0, length of an interval that holds all losses at every possible minimizer.
        n: >= 1.

    Source: docs/proofs/output.md#tilted-means

    Example:
        >>> round(tilted_max_weight(tilt=1.0, loss_range=2.0, n=100), 9)
        0.06945316
    """
    exponent = abs(tilt) * loss_range
    others = (n - 1) * math.exp(-scaled_up(exponent, 1))
    # margin: rounded up, subnormal exponentials included (docs/proofs/rounding.md#model-of-arithmetic)
    return min(1.0, scaled_up(1 / (1 + others * (1 - 1e-15)), 4))


def tilted_strong_convexity(tilt: float, lipschitz: float, strong_convexity: float) -> float:
    """Returns mu for tau >= 0, mu - |tau| L^2 for tau < 0: the covariance of vectors of length <= L is at most L^2.

    Args:
        tilt: tau, finite.
        lipschitz: L > 0, at every w on the segments between possible minimizers.
        strong_convexity: mu > 0, of the regularizer or of every loss.

    Raises:
        ValueError: an argument is out of range.
        ConditionError: the result is not positive: the objective need not be convex.

    Source: docs/proofs/output.md#tilted-means

    Example:
        >>> round(tilted_strong_convexity(-0.05, lipschitz=1.0, strong_convexity=0.1), 9)
        0.05
    """
    mu = strong_convexity
    square = lipschitz**2
    loss = scaled_up(max(-tilt, 0.0) * square, 4)
    if loss >= mu:
        raise ConditionError(
            f"tilt = {tilt:g} needs strong_convexity > {loss:g} (got {mu:g}): use a larger reg, or"
            f" a tilt above {-mu / square:g}"
        )
    return (mu - loss) * (1 - 1e-15) if loss else mu


def tilted_sensitivity(
    tilt: float,
    loss_range: float,
    n: int,
    lipschitz: float,
    strong_convexity: float,
    adjacency: str = "replace_one",
    n_min: int = 0,
) -> float:
    """Returns a bound on how far one record moves the minimizer of a tilted objective.

    (D / mu_tau) C / (C + n - 1) if one of n records is replaced, (D / mu_tau) C / (C + n_min) if one is added to at
    least n_min, D / mu_tau if nothing is known about their number; D = 2 L.

    Args:
        tilt: tau, finite.
        loss_range: r >= 0, length of an interval that holds all losses at every possible minimizer.
        n: >= 1, public, for replace_one; ignored for add_remove.
        lipschitz: L > 0.
        strong_convexity: mu > 0, of the regularizer.
        adjacency: "replace_one" or "add_remove"; "zero_out" is that of replace_one, since a null record has a weight.
        n_min: public bound from below on the size of every data set of the universe; add_remove only. 0 for none: the
            first record moves the gradient from 0.

    Returns:
        The l2 sensitivity, rounded up.

    Raises:
        ValueError: an argument is out of range.
        ConditionError: mu_tau <= 0 (tau < 0).

    Guarantee: for every pair of neighbors. For tau < 0 L must bound the gradients on the segment between two
        minimizers: on R^d, or on the ball that objective and solver are constrained to.

    Source: docs/proofs/output.md#tilted-means

    Example:
        >>> round(tilted_sensitivity(1.0, 2.0, 100, lipschitz=1.0, strong_convexity=0.1), 9)
        1.389063193
    """
    diameter = 2 * lipschitz
    mu = tilted_strong_convexity(tilt, lipschitz, strong_convexity)
    others = n_min + 1 if adjacency == ADD_REMOVE else n
    return safe(diameter / mu * tilted_max_weight(tilt, loss_range, others))
