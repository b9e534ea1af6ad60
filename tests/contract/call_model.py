"""What calls on private optimizers must do: a small model, and the actions of which random orders are made.

`Session.verdict` predicts a step from public rules alone (it uses the rows of one draw, once); `Calls` makes the call
and compares: a refused action changes neither parameters nor ledger, a legal one works, and after every action the
reference model (`Truth`) holds the ledger against what was really released.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis.stateful import RuleBasedStateMachine, invariant
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor
from torch.utils.data import DataLoader

import torch_dpsco as dp
from tests.contract.reference_model import (
    BATCH,
    DELTA,
    Chunk,
    Drawn,
    Forward,
    Setup,
    Source,
    Stream,
    Truth,
    honest,
    records_in,
    rows_of,
    stacked,
)
from torch_dpsco.errors import BudgetExceeded, SequenceError
from torch_dpsco.sampling import make_sampler

DRAWS, PARTS = 9, 4  # per iteration of a loader, of one pass
REFUSED = (SequenceError,)


@dataclass(eq=False)
class Net:
    """A model, and the rows that its parameters must hold now."""

    model: torch.nn.Module
    dense: bool
    pending: list[Forward] = field(default_factory=list)
    unknown: bool = False  # whether the user has put rows there that the model does not follow
    age: int = 0  # grows when rows are used or dropped: older forwards are stale
    waiting: bool = False  # dense layers keep one forward at a time
    wrapped: bool = False  # by an Opacus optimizer
    shown: bool = False  # released() is running
    allowed: list[Tensor | None] = field(
        default_factory=lambda: [None, None]
    )  # what p.grad may hold, besides None

    def clear(self) -> None:
        """Forgets rows that were used, or given up."""
        self.pending, self.unknown = [], False
        self.age += 1

    def reset(self) -> None:
        self.clear()
        self.waiting = False

    def parameters(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


class Session:
    """A private optimizer in use."""

    def __init__(self, net: Net, opt: dp.PrivateOptimizer, setup: Setup, steps: int = 0) -> None:
        self.net, self.opt, self.setup = net, opt, setup
        self.steps, self.finalized = steps, False
        self.source: Source | None = None
        self.place: int | None = (
            None  # draws of its pass that are used; None where it has none yet
        )
        self.sealed = False  # whether that pass is one that a checkpoint or a copy goes on with
        self.stream: Stream | None = None
        self.older: Stream | None = None
        self.old: list[Any] = []  # batches of earlier steps
        self.states: list[tuple[Any, int, bool, int | None]] = []
        self.held: Drawn | None = None  # the draw that the next step must use
        self.given_up = False  # and whether it must be delivered again for that
        self.forget()

    def forget(self) -> None:
        self.collected: list[Forward] = []
        self.opened: Drawn | None = None  # the draw that they are of
        self.used = self.draw_rows = 0  # rows used of the chunk, of its draw

    def drop(self) -> None:
        """What discard() does."""
        if self.source is not None:
            self.source.chunk = None
        self.given_up = self.held is not None
        self.forget()
        self.net.reset()

    def use_up(self) -> None:
        """What a release does to its draw."""
        if self.source is not None:
            self.source.made += 1
            self.place = self.source.made
        self.held, self.given_up = None, False

    @property
    def chunk(self) -> Chunk | None:
        return self.source.chunk if self.source is not None else None

    def verdict(self, partial: bool) -> str:
        """Returns what a step (or accumulate) must do: release, collect, spent, refused, closed."""
        if self.net.wrapped or self.net.shown:
            return "closed"
        if self.setup.steps is not None and self.steps >= self.setup.steps:
            return "over"
        if self.finalized:
            return "closed"
        rows = sum(len(forward.records) for forward in self.net.pending)
        if self.net.unknown:
            return "unknown"
        if not self.setup.declared:
            one = len(self.net.pending) == 1 and rows <= BATCH
            return "release" if one and not partial else "refused"
        chunk = self.chunk
        if chunk is None or (not self.net.pending and chunk.limit and not self.used):
            return "refused"
        if self.used + rows > chunk.limit or self.draw_rows + rows > len(chunk.drawn.records):
            return "refused"
        if self.opened is not None and self.opened is not chunk.drawn:
            return "refused"
        if self.net.pending and self.setup.private_mean:
            return "refused"
        if partial or not chunk.last:
            return "collect"
        return "release" if self.draw_rows + rows == len(chunk.drawn.records) else "refused"

    def given(self) -> list[Forward]:
        return self.collected + self.net.pending


class Calls(RuleBasedStateMachine):
    """Optimizers on one accountant (copies, or several on one model), and what can be done with them."""

    def begin(self, setup: Setup) -> None:
        self.setup = setup
        self.accountant = dp.Accountant(setup.budget(), adjacency=setup.adjacency)
        self.truth = Truth(setup, self.accountant)
        model = setup.model()
        net = Net(model, setup.rows == "dense")
        self.waiting: tuple[Session, Forward] | None = None
        self.sessions = [
            Session(net, setup.optimizer(model, self.truth, self.accountant), setup)
        ]

    def pick(self, who: int) -> Session:
        return self.sessions[who % len(self.sessions)]

    # -- how actions are held against the model -----------------------------------------------------------------------

    def world(self) -> list[Any]:
        tensors = [p for s in self.sessions for p in s.net.parameters()]
        ledger = (
            self.accountant.ledger.digest(),
            len(self.accountant),
            len(self.truth.releases),
        )
        return [tensors, ledger, [(s.opt.steps, s.opt.finalized) for s in self.sessions]]

    def unchanged(self, before: list[Any]) -> None:
        now = self.world()
        assert now[1:] == before[1:], "the ledger or a counter has changed"
        assert all(torch.equal(a, b) for a, b in zip(before[0], now[0], strict=True)), (
            "a parameter has changed"
        )

    def refused(self, action: Callable[[], Any], errors: Any = REFUSED) -> None:
        """The action must raise, and change neither parameters nor ledger."""
        before = self.world()
        with pytest.raises(errors):
            action()
        self.unchanged(before)

    def harmless(self, action: Callable[[], Any]) -> Any:
        """The action must not raise, and change neither parameters nor ledger."""
        before = self.world()
        result = action()
        self.unchanged(before)
        return result

    @invariant()
    def the_truth_is_kept(self) -> None:
        if not hasattr(self, "truth"):
            return
        self.truth.check()
        for s in self.sessions:
            for p, allowed in zip(s.net.model.parameters(), s.net.allowed, strict=True):
                private = p.grad is None or (
                    allowed is not None and torch.equal(p.grad, allowed)
                )
                assert private, "p.grad holds what was never released"

    # -- batches ------------------------------------------------------------------------------------------------------

    def new_source(self, s: Session, kind: str) -> None:
        if not self.setup.declared:
            return
        steps, dataset = PARTS if self.setup.one_pass else DRAWS, self.setup.dataset()
        if s.held is not None and not s.given_up:
            self.refused(lambda: s.opt.loader(dataset, steps=steps))
            return
        if self.setup.one_pass and (kind == "resumed" or s.held is not None):
            self._resumed_source(s, kind)
            return
        if kind == "torch":
            sampler = make_sampler(self.setup.design, size=len(dataset), steps=steps)
            loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=stacked)
            s.opt.bind(loader)
        else:
            size = 2 if kind == "physical" else None
            loader = s.opt.loader(
                dataset, steps=steps, physical_batch_size=size, isolation="none"
            )
        self.truth.watch(loader.batch_sampler)
        self._rebound(s, Source(loader, self.truth))

    def _resumed_source(self, s: Session, kind: str) -> None:
        def resumed() -> Any:
            return s.opt.loader(
                self.setup.dataset(),
                resume=True,
                physical_batch_size=2 if kind == "physical" else None,
            )

        # a run that is saved before its first step has one partition, with which every loader goes on
        if s.held is not None and (s.steps or not s.sealed):
            self.refused(lambda: s.opt.loader(self.setup.dataset(), steps=PARTS))
        if s.place == PARTS or (s.place is None and s.steps):
            self.refused(resumed)
            return
        loader = resumed()
        s.sealed = True
        self.truth.watch(loader.batch_sampler)
        self._rebound(s, Source(loader, self.truth, s.place or 0))

    def _rebound(self, s: Session, source: Source) -> None:
        s.source, s.place = source, source.made
        s.forget()

    def new_stream(self, s: Session, kind: str) -> None:
        if not self.setup.declared:
            return
        if s.source is None or (s.source.one_pass and s.given_up):
            self.new_source(s, "private" if kind in ("bmm", "physical batches") else kind)
        source = s.source
        if source is None:
            return
        s.older = (
            None if kind == "bmm" or (s.stream is not None and s.stream.parts) else s.stream
        )
        if kind == "bmm" and getattr(source.loader, "physical_batch_size", None) is None:
            manager: Any = BatchMemoryManager(
                data_loader=source.loader, max_physical_batch_size=2, optimizer=s.opt
            )
            s.stream = Stream(source, manager.__enter__(), parts=True)
        elif kind == "physical batches" and hasattr(source.loader, "in_parts"):
            s.stream = Stream(source, source.loader.in_parts(2))
        else:
            s.stream = Stream(source, source.loader)

    def advance(self, s: Session) -> None:
        """Fetches a batch, and checks that this is refused while another one waits."""
        if not self.setup.declared:
            return
        if s.stream is None:
            self.new_stream(s, "private")
        stream = s.stream
        if stream is None:
            return
        source = stream.source
        if source is not s.source:
            s.stream = None
            if not stream.parts:  # the manager's flags would go to the new loader
                self.refused(stream.next, (*REFUSED, StopIteration))
            return
        if (
            stream.begun
            and source.newest is not stream
            and (stream.parts or source.newest.parts)
        ):
            s.stream = None  # the manager's flags are for its own iteration
            return
        if not stream.begun:
            stream.begun, source.newest = True, stream
            if s.held is not None and not s.given_up:
                s.stream = None
                self.refused(stream.next)
                return
            s.drop()
            if source.one_pass and source.used_up:
                s.stream = None
                over = self.setup.steps is not None and s.steps >= self.setup.steps
                self.refused(stream.next, StopIteration if over else REFUSED)
                return
            source.used_up = True
        elif source.chunk is not None or s.given_up or not self._goes_on(s, stream):
            self.refused(stream.next, (*REFUSED, StopIteration))
            s.stream = None
            return
        again = s.held if s.given_up else None
        try:
            source.chunk = self.harmless(lambda: stream.next(again))
            part = stream.parts and stream.seen > len(source.chunk.x)
            if s.finalized or not part:  # no batch is of a forward before its delivery
                s.net.age += 1
        except StopIteration:
            s.stream = None
        else:
            s.held, s.given_up, source.delivering = source.chunk.drawn, False, stream
            if source.one_pass:
                assert self.truth.place(s.held) == source.made, "a pass goes on at another place"

    @staticmethod
    def _goes_on(s: Session, stream: Stream) -> bool:
        """Whether an iteration that has begun may deliver: the rest of its draw in progress; else only a new draw."""
        if s.held is not None:
            return stream.source.delivering is stream
        return stream.drawn is None or stream.seen == len(stream.drawn.records)

    # -- rows ---------------------------------------------------------------------------------------------------------

    def forward(self, s: Session, x: Tensor, drawn: Drawn | None) -> Forward | None:
        net = s.net
        if net.wrapped or (net.dense and net.waiting):
            self.refused(lambda: self.setup.loss(net.model, x))
            return None
        net.waiting = True
        loss = self.harmless(lambda: self.setup.loss(net.model, x))
        return Forward(loss, records_in(x), drawn, net.age)

    def backward(self, s: Session, f: Forward) -> None:
        net = s.net
        if f.age < net.age or (net.dense and f.done):
            self.refused(
                lambda: f.loss.backward(retain_graph=True), RuntimeError
            )  # torch's own where parameters moved
            net.reset()
            return
        self.harmless(lambda: f.loss.backward(retain_graph=True))
        net.waiting, f.done = False, True
        if f not in net.pending:  # rows of one forward are summed
            net.pending.append(f)

    def feed(self, s: Session, x: Tensor, drawn: Drawn | None) -> Forward | None:
        f = self.forward(s, x, drawn)
        if f is not None:
            self.backward(s, f)
        return f

    def current(self, s: Session) -> tuple[Tensor, Drawn | None]:
        """Returns the rows that come next, with their draw."""
        if self.setup.declared:
            return (s.chunk.x, s.chunk.drawn) if s.chunk is not None else (rows_of([]), None)
        x = self.setup.dataset().tensors[0][self.truth.rng.permutation(self.setup.size)[:BATCH]]
        return x, Drawn(records_in(x))

    # -- steps --------------------------------------------------------------------------------------------------------

    def stepping(self, s: Session, action: Callable[[], Any], partial: bool = False) -> str:
        """Makes a step or accumulate and returns what became of it."""
        verdict = s.verdict(partial)
        net, chunk = s.net, s.chunk
        drawn = chunk.drawn if chunk is not None else None
        if not self.setup.declared and net.pending:
            drawn = net.pending[0].drawn
        if verdict == "unknown":
            return self._unknown(s, action, drawn)
        given = s.given()
        if verdict == "release" and not self.truth.affords(drawn or Drawn(())):
            verdict = "spent"
        counts = Counter(i for f in given for i in f.records if i >= 0)
        self.truth.context = drawn, counts, honest(given, drawn)
        if verdict == "release":
            self._release(s, action)
        elif verdict == "collect":
            self.harmless(action)
        else:
            self.refused(action, BudgetExceeded if verdict == "spent" else REFUSED)
        self._after(s, verdict, drawn, partial)
        return verdict

    def _release(self, s: Session, action: Callable[[], Any]) -> None:
        if self.truth.crashing:
            self._crash(s, action)
            return
        number, before = len(self.truth.releases), s.net.parameters()
        action()
        assert len(self.truth.releases) == number + 1, "a legal step released nothing"
        mean = self.truth.releases[-1].mean
        trained = [p for p in s.net.model.parameters() if p.requires_grad]
        for p, m in zip(trained, mean, strict=True):
            assert p.grad is not None, "a release left no p.grad"
            assert torch.equal(p.grad, m), "p.grad is not the released mean"
        s.steps += 1
        s.finalized = s.steps == self.setup.steps
        if s.finalized:
            assert all(torch.equal(p, s.opt.rule.answer(p, s.opt.state)) for p in trained), (
                "the answer is not installed"
            )
        if self.setup.rule == "last" or (self.setup.rule == "uniform" and not s.finalized):
            lr = s.opt.param_groups[0]["lr"]
            old = [
                b
                for b, p in zip(before, s.net.model.parameters(), strict=True)
                if p.requires_grad
            ]
            for p, b, m in zip(trained, old, mean, strict=True):
                torch.testing.assert_close(p.detach(), b - lr * m)
        s.net.allowed = [
            None if p.grad is None else p.grad.clone() for p in s.net.model.parameters()
        ]
        if s.chunk is not None:
            s.old.append(s.chunk.x)
            s.source.chunk = None
        s.use_up()
        s.forget()
        s.net.clear()

    def _crash(self, s: Session, action: Callable[[], Any]) -> None:
        # a run that was rolled back by load_state_dict pays for its steps again, and for this one once more
        again = self.accountant.marked(s.opt.run) > s.steps
        before = self.world()
        with pytest.raises(MemoryError):
            action()
        now = self.world()
        assert now[1][1] == before[1][1] + 1, "a crash after the charge must leave it charged"
        assert all(torch.equal(a, b) for a, b in zip(before[0], now[0], strict=True)), (
            "a parameter has changed"
        )
        if again:
            assert s.opt.steps == s.steps, "a step that is made again was counted"
            s.drop()
            return
        s.steps += 1  # it is lost
        assert s.opt.steps == s.steps, "a step that was charged and failed was not counted"
        s.use_up()
        s.drop()

    def _after(self, s: Session, verdict: str, drawn: Drawn | None, partial: bool) -> None:
        net, chunk = s.net, s.chunk
        if verdict in ("over", "refused", "spent"):
            s.drop()
        elif verdict == "collect":
            rows = sum(len(f.records) for f in net.pending)
            s.collected += net.pending
            s.opened = drawn
            s.draw_rows += rows
            s.used += rows
            chunk.taken = True
            if not partial:
                s.source.chunk, s.used = None, 0
            net.clear()

    def _unknown(self, s: Session, action: Callable[[], Any], drawn: Drawn | None) -> str:
        """Rows that nobody has promised anything about: refused without a trace, or charged as ever."""
        self.truth.context = None, None, False
        before = self.world()
        released = len(self.truth.releases)
        crashes = self.truth.crashes
        try:
            action()
        except (RuntimeError, ValueError, MemoryError):
            if len(self.truth.releases) == released and not self.truth.crashes:
                self.unchanged(before)
        s.steps, s.finalized = s.opt.steps, s.opt.finalized
        s.net.allowed = [
            None if p.grad is None else p.grad.clone() for p in s.net.model.parameters()
        ]
        if (
            len(self.truth.releases) > released
            and self.setup.charges_passes
            and drawn is not None
        ):
            self.truth.charges[-1] = drawn.charge, drawn.records
        if len(self.truth.releases) > released or self.truth.crashes > crashes:
            s.use_up()
        s.opt.discard()
        s.drop()
        return "unknown"

    # -- liveness -----------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """After any order, a new iteration and an ordinary step work again, unless there is nothing left to spend."""
        if (
            not hasattr(self, "truth") or sys.exc_info()[0] is not None
        ):  # a failure is on its way
            return
        self.truth.crashing = False
        for s in self.sessions:
            s.opt.discard()
            s.drop()
            self.new_source(s, "private")
            self.new_stream(s, "private")
            self.advance(s)
            x, drawn = self.current(s)
            self.feed(s, x, drawn)
            verdict = self.stepping(s, s.opt.step)
            assert (
                verdict in ("release", "spent", "over", "closed") or self.setup.private_mean
            ), verdict
            self.the_truth_is_kept()
        self.accountant.report(DELTA)
