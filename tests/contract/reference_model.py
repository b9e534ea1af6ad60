"""What really happened, kept apart from the library's own bookkeeping.

Record i is the vector SCALE * e_i, the loss is a score, and the noise is so small (std 0.05 of the clip) that a
released mean can be read: its coordinate i is the number of times that record i is in the release. So `Truth` knows
from the releases alone which records were used, and from the samplers' draws which ones could have been.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from tests.streams import picks
from torch_dpsco.accounting.designs import Design, Undeclared
from torch_dpsco.accounting.events import Repeat, clipped_gaussian
from torch_dpsco.algorithms.clips import AutoClip
from torch_dpsco.step.oracle import Clipped, HolderClipped

N, BATCH, FOREIGN = 24, 6, 3  # records, expected batch size, ids of rows that are in no data set
CLIP, NOISE, SCALE, DELTA = 1.0, 0.05, 8.0, 1e-3


@dataclass(frozen=True)
class Setup:
    """One configuration: the private optimizer and its environment."""

    design: Design
    adjacency: str
    rows: str = "auto"
    mean: bool = True
    rule: str = "last"
    steps: int | None = None
    room: int | None = None  # steps that the budget admits; passes where a design charges those
    size: int = N
    nan: bool = False
    oracle: str = "clipped"

    @property
    def declared(self) -> bool:
        return not isinstance(self.design, Undeclared)

    @property
    def charges_passes(self) -> bool:
        return isinstance(self.design, (dp.Shuffled, dp.Disjoint))

    @property
    def one_pass(self) -> bool:
        return isinstance(self.design, dp.Disjoint)

    @property
    def private_mean(self) -> bool:
        """Whether a mean loss divides rows by a private number; those of one output that `attach` records may be."""
        by_chance = self.adjacency == "add_remove" or isinstance(self.design, dp.Poisson)
        return self.mean and by_chance and self.rows == "dense"

    def budget(self) -> dp.Budget | None:
        """Returns the budget that admits exactly `room` steps (passes)."""
        if self.room is None:
            return None
        return dp.Budget(
            epsilon(self.design, self.adjacency, self.room) * (1 + 1e-9),
            DELTA,
            adjacency=self.adjacency,
        )

    def model(self) -> nn.Linear:
        model = nn.Linear(N + FOREIGN, 1)
        for p in model.parameters():
            nn.init.zeros_(p)
        return dp.attach(model, rows=self.rows, loss_reduction="mean" if self.mean else "sum")

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        scores = model(x)
        return scores.mean() if self.mean else scores.sum()

    def optimizer(
        self, model: nn.Module, truth: Truth, accountant: dp.Accountant, **changes: Any
    ) -> Any:
        params, rule = (
            list(model.parameters()),
            dp.rules.SGD(self.rule if self.rule != "adam" else "last"),
        )
        if self.rule == "adam":
            inner = torch.optim.Adam(params, lr=0.1)
            params, rule = inner.param_groups, dp.rules.TorchRule(inner)
        return dp.PrivateOptimizer(
            params,
            0.1,
            oracle=watched(
                self.oracle, changes.get("noise", NOISE), self.design.batch_size, truth
            ),
            rule=rule,
            design=self.design,
            schedule=dp.Schedule((dp.Phase(changes.get("steps", self.steps)),)),
            accountant=accountant,
        )

    def dataset(self) -> TensorDataset:
        """Returns the records: the same object each time, as a shuffled pass that is begun demands."""
        return _records(self.size, self.nan and self.size > 0)


@cache
def _records(size: int, nan: bool) -> TensorDataset:
    features = rows_of(range(size))
    if nan:
        features[-1] = float("nan")
    return TensorDataset(features)


def rows_of(records: Any) -> Tensor:
    """Returns the features of records (ids past N are foreign rows)."""
    return SCALE * torch.eye(N + FOREIGN)[torch.tensor(list(records), dtype=torch.long)]


def records_in(x: Tensor) -> tuple[int, ...]:
    """Returns the ids of the rows of a batch; rows with NaN, which contribute nothing, are -1."""
    return tuple(-1 if row.isnan().any() else int(row.argmax()) for row in x)


def stacked(items: list[Any]) -> list[Tensor]:
    """Collates also an empty batch."""
    return [torch.stack([x for (x,) in items]) if items else rows_of([])]


@cache
def epsilon(design: Design, adjacency: str, count: int) -> float:
    """Returns epsilon of `count` releases (of passes, where no record is twice in one)."""
    if not count:
        return 0.0
    base, accountant = clipped_gaussian(NOISE), dp.Accountant(adjacency=adjacency)
    passes = isinstance(design, (dp.Shuffled, dp.Disjoint))
    accountant.record(
        Repeat(base.only("replace_one", "zero_out"), count)
        if passes
        else design.event(base, count)
    )
    return accountant.get_epsilon(DELTA)


@dataclass(eq=False)
class Drawn:
    """One draw of a sampler (or, without one, one batch that the user made)."""

    records: tuple[int, ...]
    charge: Any = None  # draws of the same charge are parts of one pass
    used: bool = False


@dataclass(frozen=True)
class Seen:
    """One release as it was when it was made."""

    counts: Counter[int]
    roundoff: float
    charged: int  # events in the ledger before its noise was drawn
    draw: Drawn | None
    expected: Counter[int] | None  # None: nobody can say
    honest: bool  # whether the user gave rows of the draw only, each once
    mean: list[Tensor]


class Truth:
    """Draws and releases of all optimizers that share one accountant."""

    def __init__(self, setup: Setup, accountant: dp.Accountant) -> None:
        self.setup, self.accountant = setup, accountant
        self.fresh: list[Drawn] = []  # draws since somebody looked
        self.releases: list[Seen] = []
        self.checked = self.crashes = 0
        self.crashing = False
        self.charged = 0  # events in the ledger when the release in progress began
        self.rng = np.random.default_rng(0)
        self.passes: dict[Any, list[tuple[int, ...]]] = {}  # the draws of each pass, in order
        self.charges: list[
            tuple[Any, tuple[int, ...]]
        ] = []  # of each charge its pass, and its records
        self.context: tuple[Drawn | None, Counter[int] | None, bool] = (None, Counter(), True)

    def __deepcopy__(self, memo: Any) -> Truth:
        return self  # copies release about the same records

    def watch(self, sampler: Any) -> None:
        """Notes each draw where it is dealt, and makes it repeatable: hypothesis replays what has failed."""
        sampler.rng = picks(int(self.rng.integers(2**32)))
        dealt = sampler.dealt

        def noted() -> Iterator[Any]:
            for drawn in dealt():
                charge = drawn[0].partition if self.setup.charges_passes else None
                records = tuple(np.asarray(drawn[1]).tolist())
                self.fresh.append(Drawn(records, charge))
                if self.setup.one_pass and records not in self.passes.setdefault(charge, []):
                    self.passes[charge].append(records)
                yield drawn

        sampler.dealt = noted

    def place(self, draw: Drawn) -> int:
        """Returns how many draws of its pass are before a draw."""
        return self.passes[draw.charge].index(draw.records)

    def charge(self, draw: Drawn | None) -> None:
        self.charges.append(self._charge_of(draw))

    def _charge_of(self, draw: Drawn | None) -> tuple[Any, tuple[int, ...]]:
        known = draw is not None and self.setup.charges_passes
        return (draw.charge, draw.records) if known else (len(self.charges), ())

    def spent(self, *more: tuple[Any, tuple[int, ...]]) -> int:
        """Returns how many releases are paid: of each pass those of the part with the most."""
        most: dict[Any, int] = {}
        for (name, _), count in Counter([*self.charges, *more]).items():
            most[name] = max(most.get(name, 0), count)
        return sum(most.values())

    def affords(self, draw: Drawn) -> bool:
        """Returns whether the budget has room for a release from this draw."""
        return self.setup.room is None or self.spent(self._charge_of(draw)) <= self.setup.room

    def before_release(self) -> None:
        self.charged = len(self.accountant)
        self.charge(self.context[0])
        if self.crashing:
            self.crashing = False
            self.crashes += 1
            raise MemoryError("injected")

    def after_release(self, mean: list[Tensor], batch_size: int) -> None:
        sums = mean[0].flatten().double() * batch_size / CLIP
        assert bool(sums.isfinite().all()), "a release is not finite"
        counts = sums.round()
        self.releases.append(
            Seen(
                Counter({i: int(c) for i, c in enumerate(counts.tolist()) if c}),
                float((sums - counts).abs().max()),
                self.charged,
                *self.context,
                [m.clone() for m in mean],
            )
        )

    def check(self) -> None:
        """Raises AssertionError if a release or the ledger is not what it must be."""
        for index in range(self.checked, len(self.releases)):
            self._check_release(index, self.releases[index])
        if (
            len(self.releases) > self.checked
            or len(self.accountant) != len(self.releases) + self.crashes
        ):
            self._check_ledger()
        self.checked = len(self.releases)

    def _check_release(self, index: int, seen: Seen) -> None:
        assert seen.charged > index, "a release was not charged before its noise was drawn"
        # rows have 0.992 of the clip in their own coordinate, or all of it while the bias is frozen
        assert seen.roundoff < 0.45, f"a row is not within the clip ({seen.roundoff})"
        if seen.honest:
            assert all(count == 1 for count in seen.counts.values()), (
                f"a record counts twice: {seen.counts}"
            )
            assert seen.draw is not None, "a release without a draw"
            strangers = seen.counts.keys() - set(seen.draw.records)
            assert not strangers, f"a release holds records of another draw: {strangers}"
        if seen.draw is not None:
            assert seen.counts.total() <= max(len(seen.draw.records), 0), (
                "a release holds more rows than were drawn"
            )
            assert not seen.draw.used, "a draw was released twice"
            seen.draw.used = True
        if seen.expected is not None:
            assert seen.counts == seen.expected, (
                f"{seen.counts} were released, {seen.expected} were given"
            )

    def _check_ledger(self) -> None:
        releases = len(self.releases)
        assert len(self.accountant) >= releases, (
            "the ledger holds fewer charges than there were releases"
        )
        assert len(self.accountant) == releases + self.crashes, (
            "the ledger holds charges that nothing was released for"
        )
        spent, setup = self.accountant.get_epsilon(DELTA), self.setup
        uses = releases
        if setup.charges_passes:  # a record is in one part of a pass: what it is in counts
            record_uses: Counter[int] = Counter()
            for seen in self.releases:
                record_uses.update(seen.counts.keys() if seen.honest else ())
            uses = max(record_uses.values(), default=0)
        assert spent >= epsilon(setup.design, setup.adjacency, uses) * (1 - 1e-12), (
            "the ledger is under the truth"
        )
        budget = self.accountant.budget
        assert budget is None or spent <= budget.epsilon, "the budget was passed"


class Watched:
    """An oracle with a witness to its releases."""

    truth: Truth
    batch_size: int

    def release(self, generator: torch.Generator) -> Any:
        self.truth.before_release()
        answer = super().release(generator)  # type: ignore[misc]
        self.truth.after_release(answer.mean, self.batch_size)
        return answer


class WatchedClipped(Watched, Clipped): ...


class WatchedHolder(Watched, HolderClipped): ...


class WatchedAuto(Watched, AutoClip): ...


def watched(kind: str, noise: float, batch_size: int, truth: Truth) -> Any:
    """Returns an oracle of a kind that bounds rows at CLIP: those of long rows are CLIP long, or a little less."""
    oracle: Any = {
        "clipped": lambda: WatchedClipped(CLIP, noise, batch_size),
        "holder": lambda: WatchedHolder(dp.Problem(lipschitz=CLIP), noise, batch_size),
        "automatic": lambda: WatchedAuto(CLIP, noise, batch_size),
    }[kind]()
    oracle.truth = truth
    return oracle


@dataclass(eq=False)
class Chunk:
    """A delivered batch."""

    x: Tensor
    drawn: Drawn
    limit: int  # most rows that a step may use from it
    last: bool
    taken: bool = False


class Source:
    """A loader, and the batch of it that waits for its step; `made` draws of its pass are used."""

    def __init__(self, loader: Any, truth: Truth, made: int = 0) -> None:
        self.loader, self.truth, self.one_pass, self.made = (
            loader,
            truth,
            truth.setup.one_pass,
            made,
        )
        self.chunk: Chunk | None = None
        self.used_up = False
        self.newest: Stream | None = None
        self.delivering: Stream | None = None  # the last batch


class Stream:
    """One iteration of a source, or of a manager around it that cuts its draws into parts."""

    def __init__(self, source: Source, batches: Any, parts: bool = False) -> None:
        self.source, self.iterator, self.parts = source, iter(batches), parts
        self.begun = False
        self.drawn: Drawn | None = None
        self.seen = 0

    def next(self, again: Drawn | None = None) -> Chunk:
        """Returns the next batch, of the draw that was given up if there is one; raises what the loader raises."""
        fresh = self.source.truth.fresh
        fresh.clear()
        x = next(self.iterator)[0]
        if fresh or again is not None:
            self.drawn, self.seen = again or fresh[-1], 0
        assert self.drawn is not None
        self.seen += len(x)
        size = len(self.drawn.records)
        return Chunk(x, self.drawn, size if self.parts else len(x), last=self.seen == size)


@dataclass(eq=False)
class Forward:
    """A loss that waits for its backward."""

    loss: Tensor
    records: tuple[int, ...]
    drawn: Drawn | None  # None: rows that no loader gave, or gave for another step
    age: int
    done: bool = False  # whether its backward was run


def honest(forwards: list[Forward], drawn: Drawn | None) -> bool:
    """Whether the rows are those of the draw, each once."""
    records = [i for f in forwards for i in f.records if i >= 0]
    return (
        drawn is not None
        and all(f.drawn is drawn for f in forwards)
        and len(set(records)) == len(records)
    )
