"""AboveThreshold (the sparse vector technique), halting at the first query below its threshold.

    rho ~ Lap(b1) once for the run;    query t passes iff s_t + nu_t >= theta + rho,    nu_t ~ Lap(b2) anew

and the first query that does not pass is the last one that is answered. Only the answers are released.

Privacy of what is computed, not of an idealized version: noises are exact draws of the discrete Laplace law on the grid
of step D / 2^32, D the sensitivity (`laplace`); scores, threshold and noises are fractions, compared exactly. Shift rho
by D: it stays on the grid, costs D / b1, and every query that passed on D passes on its neighbor; shift the nu of the
halting query by 2 D, which costs 2 D / b2. So a run is (D / b1 + 2 D / b2)-DP for any number of adaptive queries.

Accuracy: with g the step, t = scale / g and L ~ Lap(scale) continuous, a draw is below L + g in stochastic order: for
k >= 1, P(draw >= k g) = e^(-k/t) / (1 + e^(-1/t)) <= e^(-(k-1)/t) / 2 = P(L + g >= k g), and for k <= 0 the complement
e^(-(1-k)/t) / (1 + e^(-1/t)) >= e^(-(1-k)/t) / 2. Hence a query that lies m below the threshold passes with at most the
probability of the continuous mechanism at m - 2 g.

Differs from the paper in: 1. the scales are given, for the true sensitivity (docs/errata.md, paper 3, E2); 2. discrete
noise.

Source: docs/proofs/accounting.md#above-threshold; Lyu, Su and Li 2017, algorithm 7.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from torch_dpsco import _validate as check
from torch_dpsco.accounting.analysis.rounding import upper
from torch_dpsco.accounting.analysis.svt import bad_pass_probability
from torch_dpsco.accounting.events import AboveThreshold as AboveThresholdEvent
from torch_dpsco.accounting.events import Adjacency
from torch_dpsco.errors import SequenceError
from torch_dpsco.mechanisms.discrete import draw_laplace
from torch_dpsco.rng import Source

_STEPS = 2**32  # of the grid within the sensitivity
_SPARE = 8  # grid steps by which a bound of bad passes is worse: twice what is needed


class AboveThreshold:
    """One run: a noisy threshold, and at most `steps` answers up to the first "below".

    A copy (deepcopy, pickle) forgets the noisy threshold: it is another run, that must be charged again. `state` keeps
    it, and is as confidential as the data.

    Args:
        threshold: theta, finite.
        threshold_scale: b1 > 0.
        query_scale: b2 > 0.
        sensitivity: D > 0 of every query under the adjacencies that are charged.
        steps: most queries that are answered, >= 1.

    Guarantee:
        `event(adjacencies)`, once for the whole run, and for a copy or a restart again.

    Example:
        >>> import torch
        >>> run = AboveThreshold(8.0, threshold_scale=1e-3, query_scale=1e-3, sensitivity=2, steps=10)
        >>> generator = torch.Generator().manual_seed(0)
        >>> run.passes(9, generator), run.passes(7, generator), run.halted
        (True, False, True)
    """

    def __init__(
        self,
        threshold: float | Fraction,
        *,
        threshold_scale: float,
        query_scale: float,
        sensitivity: float | Fraction,
        steps: int,
    ) -> None:
        check.finite(threshold=threshold)
        check.positive(sensitivity=sensitivity)
        self.threshold = Fraction(threshold)
        self.sensitivity = Fraction(sensitivity)
        self.threshold_scale = check.positive(threshold_scale=threshold_scale)
        self.query_scale = check.positive(query_scale=query_scale)
        self.steps = check.positive_count(steps=steps)
        self._step = self.sensitivity / _STEPS
        self._rho: Fraction | None = None
        self._asked = 0
        self._halted = False

    @property
    def halted(self) -> bool:
        """Whether a query was below the threshold: public."""
        return self._halted

    @property
    def asked(self) -> int:
        """Number of queries that were answered: public."""
        return self._asked

    def event(self, *adjacencies: Adjacency) -> AboveThresholdEvent:
        """Returns what a whole run costs under adjacencies for which the sensitivity holds."""
        # PRIVACY: rounded up (test_the_event_is_never_below_the_exact_sensitivity)
        sens = dict.fromkeys(adjacencies, upper(self.sensitivity))
        return AboveThresholdEvent(self.threshold_scale, self.query_scale, sens)

    def bad_pass(self, score: float) -> float:
        """Returns a bound of the probability that some query of a score below `score` passes in a whole run."""
        # PRIVACY: 2 grid steps for the discrete law, and 2^-30 D > 2 g for the rounding of the difference
        # (test_bad_passes_of_the_discrete_law_are_below_the_bound)
        margin = float(self.threshold - Fraction(score) - _SPARE * self._step)
        return bad_pass_probability(margin, self.steps, self.threshold_scale, self.query_scale)

    def passes(self, score: float | Fraction, generator: Source) -> bool:
        """Answers a query; the first False is the last answer.

        Args:
            score: of the private data, exact; moves by at most `sensitivity`.
            generator: of the noise.

        Raises:
            SequenceError: the run has halted, or all its queries are answered.
        """
        if self._halted:
            # PRIVACY: the budget of the run is spent (test_halting_is_permanent)
            raise SequenceError("the run has halted: nothing more may be answered")
        if self._asked >= self.steps:
            raise SequenceError(f"all {self.steps} planned queries are answered: plan more steps")
        self.start(generator)
        assert self._rho is not None
        self._asked += 1
        # PRIVACY: fresh for each query, and compared without rounding
        # (test_answers_have_the_probabilities_of_the_exact_integrals)
        nu = draw_laplace(self.query_scale, self._step, generator)
        self._halted = Fraction(score) + nu < self.threshold + self._rho
        return not self._halted

    def start(self, generator: Source) -> None:
        """Draws the noisy threshold, if that was not done; nothing is released by it."""
        if self._rho is None:
            self._rho = draw_laplace(self.threshold_scale, self._step, generator)

    def lose(self, *, halted: bool) -> bool:
        """Counts a query that an interrupted run may have answered, and notes whether it was below the threshold.

        The answers of the others are "above": an answer that was not noted before it was shown was not shown. So the
        answers that anybody has seen, before and after, are those of one run with one noisy threshold, and no more
        than `steps`: what `event` pays for. Returns whether the run has halted, as it must where its threshold is not
        known any more.
        """
        self._asked += not self._halted
        self._halted = self._halted or halted or self._rho is None
        return self._halted

    def state(self) -> dict[str, Any]:
        """Returns integers that a checkpoint must keep. CONFIDENTIAL: it holds the noise of the threshold."""
        noise = None if self._rho is None else int(self._rho / self._step)
        return {
            "threshold_noise": noise,
            "asked": self._asked,
            "halted": self._halted,
            "confidential": True,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved state.

        Raises:
            SequenceError: this run has already answered more than the saved one, or is another one: queries would be
                answered twice by one noisy threshold, which is charged for one halt.
        """
        noise = state["threshold_noise"]
        asked = check.count(asked=state["asked"])
        halted = bool(state["halted"])
        rho = None if noise is None else noise * self._step
        rolled_back = asked < self._asked or (self._halted and not halted)
        if (self._asked or self._halted) and (rolled_back or rho != self._rho):
            # PRIVACY: each return to an earlier state could halt again (test_a_run_cannot_be_rolled_back)
            raise SequenceError(
                "state must be a later one of this run of the noisy test: make a new optimizer"
            )
        self._rho = rho
        self._asked = asked
        self._halted = halted

    def __getstate__(self) -> dict[str, Any]:
        # PRIVACY: two runs with one noisy threshold may halt twice (test_a_copy_is_a_new_run)
        return {**self.__dict__, "_rho": None, "_asked": 0}
