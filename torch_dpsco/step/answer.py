"""What optimizers have in common whose iterates are secret, and whose only release is their answer."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from torch_dpsco.accounting.accountant import Accountant
from torch_dpsco.accounting.designs import Design
from torch_dpsco.accounting.report import OneRelease
from torch_dpsco.accounting.statement import Statement
from torch_dpsco.errors import SequenceError
from torch_dpsco.noise import noise_generator
from torch_dpsco.step import checks
from torch_dpsco.step.checks import world_size
from torch_dpsco.step.plan import FromPlan
from torch_dpsco.step.run import CommonOptimizer


class AnswerOptimizer(FromPlan, CommonOptimizer):
    """Base of optimizers of one release.

    Args:
        params: one group.
        defaults: of torch.
        plan: from the class's own `plan`.
        design: how batches are drawn.
        steps: how many are planned; 0 where there are none.
        accountant: ledger to charge.
        generator: of the noise; None for a secret one.
    """

    # PRIVACY: the noise is calibrated for these (test_what_the_noise_was_calibrated_for_cannot_be_reassigned)
    _fixed: ClassVar[frozenset[str]] = frozenset(
        {"_plan", "plan", "accountant", "adjacency", "design", "event", "planned_steps"}
    )

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        plan: Any,
        design: Design,
        steps: int,
        accountant: Accountant,
        generator: torch.Generator | None,
    ) -> None:
        super().__init__(params, defaults)
        if world_size() > 1:
            raise SequenceError(
                f"world_size must be 1 for this optimizer (got {world_size()}): HolderSGD and"
                " ClippedSGD run in several processes, on Poisson or full batches"
            )
        self._plan = plan
        self.__dict__["plan"] = plan  # over the class method: optimizer.plan is what it has made
        self._params: tuple[nn.Parameter, ...] = tuple(self.param_groups[0]["params"])
        self._noise = noise_generator(checks.one_device(self._params), generator)
        self._seeded = generator is not None
        self.design = design
        self.planned_steps = steps
        self.event = plan.event()
        self._steps = 0
        self._finalized = False
        accountant.require_unit("example", plan.adjacency)
        self.adjacency = checks.agreed_adjacency(plan.adjacency, accountant, design)
        checks.require_one_step(accountant, self.adjacency, self.event)
        self.accountant = accountant

    def report(self, delta: float | None = None) -> Statement:
        """Returns what is guaranteed, in plain words; delta defaults to the budget's."""
        run = OneRelease(
            type(self).__name__,
            self.design,
            self.event,
            self._steps,
            self.planned_steps,
            self._finalized,
        )
        return self._statement(run, delta, run.ahead())

    def state_dict(self) -> dict[str, Any]:
        """Returns torch's state, which is empty, once the answer is released; raises SequenceError before."""
        if not self._finalized:
            # PRIVACY: averages are of secret iterates (test_nothing_is_saved_before_the_answer)
            raise SequenceError(
                "nothing may be saved before finalize(): all is secret. An interrupted run starts"
                " again, since nothing was released or charged"
            )
        return super().state_dict()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # PRIVACY: two answers of one secret run would be two releases
        # (test_a_run_cannot_be_copied, test_a_solved_run_cannot_be_copied)
        raise SequenceError(
            "a run of secret iterates must not be copied: it has one release; make a new optimizer"
        )

    def __copy__(self) -> Any:
        return self.__deepcopy__({})

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__deepcopy__({})
