"""Random orders of calls on private optimizers: the rules of the machine of `call_model`."""

from __future__ import annotations

import copy
import io
import pickle
from contextlib import ExitStack

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from opacus.optimizers import DPOptimizer
from torch.utils.data import DataLoader

import torch_dpsco as dp
from tests.contract.call_model import REFUSED, Calls, Net, Session
from tests.contract.reference_model import (
    BATCH,
    FOREIGN,
    Forward,
    N,
    Setup,
    Truth,
    records_in,
    rows_of,
)
from torch_dpsco.accounting.designs import Undeclared
from torch_dpsco.errors import (
    AdjacencyError,
    InfeasibleError,
    PrivacyError,
    SequenceError,
    UnknownSamplerError,
)
from torch_dpsco.sampling import make_sampler

FIXED = ("oracle", "rule", "design", "schedule", "prox", "reg", "adjacency", "accountant")


def setups() -> st.SearchStrategy[Setup]:
    designs = st.sampled_from(
        [
            (dp.Poisson(BATCH, N), "add_remove"),
            (dp.Poisson(BATCH, N), "replace_one"),
            (dp.Fixed(BATCH, N), "replace_one"),
            (dp.Shuffled(BATCH, N), "replace_one"),
            (dp.Disjoint(BATCH, N), "replace_one"),
            (dp.Full(N), "add_remove"),
            (Undeclared(BATCH), "replace_one"),
        ]
    )
    return st.builds(
        lambda design, rows, mean, rule, steps, room, small, nan, oracle: Setup(
            *design,
            rows,
            mean,
            rule,
            steps,
            room,
            3 if small and design[1] == "add_remove" else N,
            nan,
            oracle,
        ),
        designs,
        st.sampled_from(["auto", "dense"]),
        st.booleans(),
        st.sampled_from(["last", "last", "uniform", "adam"]),
        st.sampled_from([None, None, 3]),
        st.sampled_from([None, None, 1, 3]),
        st.booleans(),
        st.booleans(),
        st.sampled_from(["clipped", "clipped", "holder", "automatic"]),
    )


WHO = st.integers(0, 2)
KINDS = st.sampled_from(["private", "bmm", "physical batches"])
MEDDLING = (
    *(
        "a_loader_of_another_design",
        "a_backward_in_eval_mode",
        "pickling",
        "freezing",
        "assigning_what_is_fixed",
    ),
    *(
        "another_lr",
        "wrapping_by_opacus",
        "tampering: grad",
        "tampering: rows",
        "tampering: more rows",
    ),
    *("tampering: other rows", "a_crash_in_the_next_release", "inner_step"),
)


class CallOrders(Calls):
    """Random legal and illegal orders."""

    @initialize(setup=setups())
    def start(self, setup: Setup) -> None:
        self.begin(setup)

    # -- batches ------------------------------------------------------------------------------------------------------

    @rule(
        who=WHO,
        kind=KINDS,
        another=st.sampled_from(["", "", "private", "physical", "torch", "resumed"]),
    )
    def new_iteration(self, who: int, kind: str, another: str) -> None:
        s = self.pick(who)
        if another:
            self.new_source(s, another)
        self.new_stream(s, kind)
        self.advance(s)

    @rule(who=WHO)
    def next_batch(self, who: int) -> None:
        self.advance(self.pick(who))

    @precondition(lambda self: any(s.older is not None for s in self.sessions))
    @rule(who=WHO)
    def an_older_iteration(self, who: int) -> None:
        s = self.pick(who)
        if s.older is not None:
            s.stream, s.older = s.older, s.stream
            self.advance(s)

    def a_loader_of_another_design(self, s: Session) -> None:
        other = DataLoader(
            self.setup.dataset(),
            batch_sampler=make_sampler(dp.Poisson(5, N), size=self.setup.size),
        )
        self.refused(lambda: s.opt.bind(other), AdjacencyError)
        self.refused(
            lambda: s.opt.bind(DataLoader(self.setup.dataset(), batch_size=6)),
            UnknownSamplerError,
        )

    # -- rows ---------------------------------------------------------------------------------------------------------

    @rule(
        who=WHO, part=st.sampled_from(["whole", "whole", "first half", "second half", "nothing"])
    )
    def rows_of_the_batch(self, who: int, part: str) -> None:
        s = self.pick(who)
        x, drawn = self.current(s)
        half = len(x) // 2
        part_of = {
            "whole": slice(None),
            "first half": slice(half),
            "second half": slice(half, None),
        }
        self.feed(s, x[part_of.get(part, slice(0))], drawn)

    @rule(who=WHO, kind=st.sampled_from(["foreign", "more", "twice", "one of another step"]))
    def rows_from_elsewhere(self, who: int, kind: str) -> None:
        s = self.pick(who)
        x, drawn = self.current(s)
        foreign = rows_of(range(N, N + FOREIGN))
        if kind == "twice":
            self.feed(s, x, drawn)
            self.feed(s, x, drawn)
        elif kind == "one of another step" and s.old:
            self.feed(s, s.old[-1], None)
        else:
            self.feed(s, foreign if kind == "foreign" else torch.cat([x, foreign]), None)

    @rule(who=WHO, backward=st.booleans())
    def a_forward_that_waits(self, who: int, backward: bool) -> None:
        if backward and self.waiting is not None:
            self.backward(*self.waiting)
            return
        s = self.pick(who)
        f = self.forward(s, *self.current(s))
        if f is not None:
            self.waiting = s, f

    def a_backward_in_eval_mode(self, s: Session) -> None:
        net, x = s.net, self.setup.dataset().tensors[0][:2]
        net.model.eval()
        # Opacus' own error where another forward waits for its backward
        self.refused(
            lambda: self.setup.loss(net.model, x).backward(),
            RuntimeError if net.waiting else REFUSED,
        )
        net.model.train()
        with torch.no_grad():
            self.harmless(lambda: net.model(x))
        if net.dense:
            self.discard(s)

    @rule(who=WHO, how=st.sampled_from(["discard", "break off", "to none", "to zero"]))
    def giving_up(self, who: int, how: str) -> None:
        s = self.pick(who)
        if how == "break off":
            s.stream = None
        elif how == "discard":
            self.discard(s)
        else:
            self.harmless(lambda: s.opt.zero_grad(set_to_none=how == "to none"))
            s.net.pending, s.net.unknown = [], False

    def discard(self, s: Session) -> None:
        self.harmless(s.opt.discard)
        s.drop()

    def tampering(self, s: Session, what: str) -> None:
        params = list(s.net.model.parameters())
        if what == "grad":
            if (
                s.net.waiting or self.waiting
            ):  # a backward would be refused, as one of a loss with a term on the weights
                self.discard(s)
            s.net.allowed = [torch.ones_like(p) for p in params]
            for p, own in zip(params, s.net.allowed, strict=True):
                p.grad = own.clone()
            return
        for other in self.sessions:  # whose rows they would be is for one optimizer to say
            if other.net is s.net and other is not s:
                self.discard(other)
        s.net.unknown = True
        rows = {"rows": 2, "more rows": N + 1, "other rows": 2}[what]
        for p in params:
            shape = (rows, 2) if what == "other rows" else (rows, *p.shape)
            p.grad_sample = torch.zeros(shape)

    def freezing(self, s: Session) -> None:
        # in the midst of a batch it is refused, or asks for this
        for other in self.sessions:
            if other.net is s.net:
                self.discard(other)
        s.net.model.bias.requires_grad_(not s.net.model.bias.requires_grad)

    # -- steps --------------------------------------------------------------------------------------------------------

    @rule(who=WHO)
    def step(self, who: int) -> None:
        s = self.pick(who)
        self.stepping(s, s.opt.step)

    @rule(who=WHO)
    def accumulate(self, who: int) -> None:
        s = self.pick(who)
        self.stepping(s, s.opt.accumulate, partial=True)

    @rule(who=WHO, kind=KINDS)
    def an_ordinary_step(self, who: int, kind: str) -> None:
        self.ordinary_step(self.pick(who), kind)

    def ordinary_step(self, s: Session, kind: str) -> None:
        if s.stream is None:
            self.new_stream(s, kind)
        if s.chunk is None:
            self.advance(s)
        s.opt.zero_grad()
        s.net.pending, s.net.unknown = [], False
        x, drawn = self.current(s)
        self.feed(s, x, drawn)
        self.stepping(s, s.opt.step)

    @rule(who=WHO, kind=KINDS, give_up=st.integers(0, 7))
    def ordinary_steps(self, who: int, kind: str, give_up: int) -> None:
        for k in range(4):
            s = self.pick(who)
            if k == give_up:
                self.advance(s)
                self.discard(s)
                self.advance(s)
            self.ordinary_step(s, kind)

    @rule(who=WHO)
    def a_step_in_halves(self, who: int) -> None:
        s = self.pick(who)
        if s.chunk is None:
            self.advance(s)
        x, drawn = self.current(s)
        for part, action, partial in (
            (x[::2], s.opt.accumulate, True),
            (x[1::2], s.opt.step, False),
        ):
            self.feed(s, part, drawn)
            self.stepping(s, action, partial)

    @rule(who=WHO, kind=st.sampled_from(["good", "lazy", "broken"]))
    def step_with_closure(self, who: int, kind: str) -> None:
        s = self.pick(who)
        if s.net.unknown or s.net.waiting or s.verdict(False) in ("closed", "over"):
            return
        if kind == "broken":
            self.refused(lambda: s.opt.step(lambda: 1 / 0), ZeroDivisionError)
            return
        x, drawn = self.current(s)
        if kind == "good":
            s.net.pending = [Forward(torch.zeros(()), records_in(x), drawn, s.net.age)]

        def closure() -> float:
            if kind == "good":
                s.opt.zero_grad()
                self.setup.loss(s.net.model, x).backward()
            return 1.25

        values: list[float] = []
        if self.stepping(s, lambda: values.append(s.opt.step(closure))) in (
            "release",
            "collect",
        ):
            assert values == [1.25] or self.truth.crashes, "the loss of the closure was lost"

    def a_crash_in_the_next_release(self, s: Session) -> None:
        self.truth.crashing = True

    # -- the answer, checkpoints, copies ------------------------------------------------------------------------------

    @rule(
        who=WHO,
        inside=st.sampled_from(["nothing", "step", "accumulate", "finalize", "nested", "error"]),
    )
    def released(self, who: int, inside: str) -> None:
        s = self.pick(who)
        self.waiting = None  # torch refuses its backward: parameters are written to
        before = self.world()
        with ExitStack() as stack:
            if inside == "error":
                stack.enter_context(pytest.raises(ZeroDivisionError))
            with s.opt.released():
                s.net.shown = True
                if inside in ("step", "accumulate"):
                    self.refused(getattr(s.opt, inside))
                elif inside == "finalize":
                    self.refused(s.opt.finalize)
                elif inside == "nested":
                    with s.opt.released():
                        pass
                    self.refused(s.opt.step)
                elif inside == "error":
                    raise ZeroDivisionError
        s.net.shown = False
        self.unchanged(before)

    @precondition(lambda self: len(self.truth.releases) > 1)
    @rule(who=WHO)
    def finalize(self, who: int) -> None:
        s = self.pick(who)
        if s.finalized:
            self.harmless(s.opt.finalize)
            return
        events = len(self.accountant)
        s.opt.finalize()
        assert len(self.accountant) == events
        s.finalized = True
        s.drop()

    @rule(
        who=WHO,
        what=st.sampled_from(
            ["save", "load", "to and fro", "other noise", "other steps", "another run"]
        ),
    )
    def checkpoints(self, who: int, what: str) -> None:
        s = self.pick(who)
        if what == "to and fro":
            self.save(s)
            self.ordinary_step(s, "private")
            self.load(s)
            self.advance(s)  # of the loop that was on its way
        elif what in ("save", "load"):
            getattr(self, what)(s)
        else:
            self.load_another_run(s, what)

    def save(self, s: Session) -> None:
        file = io.BytesIO()
        self.harmless(lambda: torch.save(s.opt.state_dict(), file))
        file.seek(0)
        s.sealed = True
        s.states.append((torch.load(file, weights_only=True), s.steps, s.finalized, s.place))

    def load(self, s: Session) -> None:
        if not s.states:
            return
        state, s.steps, s.finalized, place = s.states[-1]
        before = self.world()
        s.opt.load_state_dict(state)
        after = self.world()
        assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True)), (
            "a parameter has changed"
        )
        assert before[1] == after[1], "loading has changed the ledger"
        s.drop()
        if "partition" in state["dpsco"]:
            s.place = place
            if s.opt._batch._log.again is None:
                s.held, s.given_up, s.source = (
                    None,
                    False,
                    None,
                )  # it is of another place than the checkpoint's

    def load_another_run(self, s: Session, what: str) -> None:
        other = dp.Accountant(adjacency=self.setup.adjacency)
        model = self.setup.model()
        changes = {
            "other noise": {"noise": 0.07},
            "other steps": {"steps": 77},
            "another run": {},
        }[what]
        opt = self.setup.optimizer(model, Truth(self.setup, other), other, **changes)
        if what != "another run":
            self.refused(lambda: s.opt.load_state_dict(opt.state_dict()), ValueError)
        elif len(self.accountant):
            other.record(opt.oracle.event().only(self.setup.adjacency))
            self.refused(lambda: s.opt.load_state_dict(opt.state_dict()), PrivacyError)
            s.drop()

    @precondition(lambda self: len(self.sessions) < 3)
    @rule(who=WHO)
    def deepcopy(self, who: int) -> None:
        s = self.pick(who)
        if s.net.pending or s.net.unknown or (s.net.dense and s.net.waiting):
            self.refused(lambda: copy.deepcopy((s.net.model, s.opt)))  # it would hold records
            return
        model, opt = self.harmless(lambda: copy.deepcopy((s.net.model, s.opt)))
        fresh = Session(Net(model, s.net.dense), opt, self.setup, s.steps)
        fresh.finalized, fresh.place = s.finalized, s.place
        s.sealed = fresh.sealed = True
        self.sessions.append(fresh)

    @precondition(lambda self: len(self.sessions) < 3)
    @rule(who=WHO, loader=st.sampled_from(["its own", "the same", "the same, resumed"]))
    def a_second_optimizer(self, who: int, loader: str) -> None:
        s = self.pick(who)
        if loader == "the same, resumed":
            self.ordinary_step(s, "private")
        spent = self.setup.room is not None and self.truth.spent() >= self.setup.room
        if spent and self.setup.charges_passes:
            return
        if spent and not self.resumable():
            self.refused(
                lambda: self.setup.optimizer(s.net.model, self.truth, self.accountant),
                InfeasibleError,
            )
            return
        fresh = Session(
            s.net, self.setup.optimizer(s.net.model, self.truth, self.accountant), self.setup
        )
        s.net.wrapped = False
        self.sessions.append(fresh)
        if (
            loader != "its own" and s.source is not None
        ):  # each of its draws is for one of the two
            if s.held is not None:
                self.refused(lambda: fresh.opt.bind(s.source.loader))
                return
            fresh.opt.bind(s.source.loader)
            fresh.stream = (
                None if s.stream is not None and s.stream.parts else s.stream
            )  # flags go to one of them
            self._rebound(fresh, s.source)
            s.source = s.stream = s.older = None
            if loader == "the same, resumed":
                self.new_iteration(len(self.sessions) - 1, "private", "resumed")

    def resumable(self) -> bool:
        """Whether the ledger has a run that was not finalized: an optimizer is built, and each charge is decided."""
        return any(
            self.accountant.marked(s.opt.run) and not s.opt.finalized for s in self.sessions
        )

    def pickling(self, s: Session) -> None:
        self.refused(lambda: pickle.dumps(s.opt), PrivacyError)
        s.sealed = (
            True  # as for a copy, the records of its pass were looked at before it was refused
        )

    # -- meddling -----------------------------------------------------------------------------------------------------

    def inner_step(self, s: Session) -> None:
        if self.setup.rule != "adam":
            return
        self.waiting = None
        before = self.world()
        events = len(self.accountant)
        try:
            s.opt.rule.optimizer.step()
        except SequenceError:  # a plain optimizer on an attached model
            self.unchanged(before)
        else:  # the last private mean once more: post-processing
            assert len(self.accountant) == events

    def assigning_what_is_fixed(self, s: Session) -> None:
        for name in FIXED:
            self.refused(
                lambda name=name: setattr(s.opt, name, getattr(s.opt, name)),
                (PrivacyError, AttributeError),
            )
        for name in ("noise_multiplier", "batch_size", "clip"):
            self.refused(
                lambda name=name: setattr(s.opt.oracle, name, 1), (PrivacyError, AttributeError)
            )

    def another_lr(self, s: Session) -> None:
        for group in s.opt.param_groups:
            group["lr"] /= 2

    def wrapping_by_opacus(self, s: Session) -> None:
        if s.net.unknown:
            return
        wrapper = DPOptimizer(
            optimizer=s.opt,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            expected_batch_size=BATCH,
            loss_reduction="sum",
        )
        s.net.wrapped = True
        self.refused(
            wrapper.step, (*REFUSED, ValueError)
        )  # Opacus' own error where it finds no rows
        self.refused(s.opt.step)
        self.the_truth_is_kept()
        self.discard(s)

    @rule(who=WHO, how=st.sampled_from(MEDDLING))
    def meddling(self, who: int, how: str) -> None:
        s = self.pick(who)
        if how.startswith("tampering: "):
            self.tampering(s, how.removeprefix("tampering: "))
        else:
            getattr(self, how)(s)
