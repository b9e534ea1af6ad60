"""Tiny runs of the optimizers for heavy-tailed gradients, and the checks that all of them must pass.

The model is a linear one with bias on 3 features, records carry their number, and the loss is half the squared error.
"""

from __future__ import annotations

import io
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpsco as dp
from tests.streams import seeded_sampler
from torch_dpsco.accounting.ledger import Ledger
from torch_dpsco.algorithms.heavy_plan import ClippedPlan
from torch_dpsco.errors import SequenceError
from torch_dpsco.sampling import OnePassSampler, PrivateLoader

DIM = 4  # with the bias
LOSS = dp.losses.Squared()
DELTA = 1e-4
PROBLEM = dp.Problem(smoothness=2.0, strong_convexity=0.5, pl_constant=0.5)
DTYPES = {
    torch.float32: 3e-4,
    torch.float64: 1e-12,
}  # and the error of rounding (clips are a little short in float32)


def records(n: int, dtype: torch.dtype = torch.float32) -> TensorDataset:
    """Returns n records with heavy tails: features, targets, and the numbers of the records."""
    draw = np.random.default_rng(n)
    x, noise = draw.standard_t(2.5, (n, DIM - 1)), draw.standard_t(2.5, (n, 1))
    y = x @ np.array([[1.0], [-2.0], [0.5]]) + 1.0 + noise
    return TensorDataset(
        torch.tensor(x, dtype=dtype), torch.tensor(y, dtype=dtype), torch.arange(n)
    )


def model(dtype: torch.dtype = torch.float32, reduction: str = "mean") -> nn.Linear:
    """Returns an attached model with fixed weights."""
    layer = nn.Linear(DIM - 1, 1, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[0.3, -0.2, 0.1]]))
        layer.bias.fill_(-0.4)
    return dp.attach(layer, loss_reduction=reduction)


def gradient_of(data: TensorDataset) -> Callable[[np.ndarray, int], np.ndarray]:
    """Returns the gradient at w of one record, in numpy, for the literal algorithms."""
    x, y = (t.double().numpy() for t in data.tensors[:2])
    features = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    return lambda w, i: (features[i] @ w - y[i, 0]) * features[i]


def joint(layer: nn.Module) -> np.ndarray:
    """Returns all parameters as one float64 vector."""
    return np.concatenate([p.detach().double().numpy().ravel() for p in layer.parameters()])


def made(cls: Any, params: Iterable[Any], **kind: Any) -> Any:
    """Returns an optimizer of this plan; what is no number of a plan is given to the class."""
    names = ("rule", "prox", "reg", "accountant", "generator")
    own = {name: kind.pop(name) for name in names if name in kind}
    kind = repeatable(kind) if issubclass(cls.plans, ClippedPlan) else kind
    return cls(params, cls.plan(**kind), **own)


def repeatable(kind: dict[str, Any]) -> dict[str, Any]:
    """Returns arguments of a plan whose draws may be seeded: known batches, or assigned ones that hide nobody."""
    adjacency = kind.get("adjacency") or (
        kind["budget"].adjacency if kind.get("budget") else "replace_one"
    )
    kind = {"sampling": "assigned" if adjacency == "add_remove" else "shuffled"} | kind
    if (
        kind["sampling"] != "assigned"
        or isinstance(kind.get("clip"), dp.Pilot)
        or kind.get("mode")
    ):
        return kind
    n, size, steps = kind.get("n"), kind.get("batch_size"), kind.get("steps")
    if not n or (size is None) == (steps is None):
        return kind
    parts = steps if size is None else None
    return kind | {
        "batch_size": None,
        "sampling": dp.Assigned(size or n // steps, n, parts, amplification=False),
    }


@dataclass
class Run:
    """A model and its optimizer; `batches` notes the numbers of the records of each step."""

    model: nn.Module
    opt: dp.PrivateOptimizer
    batches: list[list[int]] = field(default_factory=list)

    @property
    def n(self) -> int:
        return self.opt.design.n

    def seeded(self, seed: int = 1, physical: int | None = None) -> PrivateLoader:
        """Returns a bound loader of repeatable draws, for all steps that are planned."""
        data = records(self.n, next(self.model.parameters()).dtype)
        sampler = seeded_sampler(
            self.opt.design, size=self.n, steps=self.opt.schedule.steps, seed=seed
        )
        return self.opt.bind(PrivateLoader(data, sampler, physical_batch_size=physical))

    def resumed(self) -> PrivateLoader:
        return self.opt.loader(
            records(self.n, next(self.model.parameters()).dtype), resume=True, isolation="none"
        )

    def train(self, loader: Iterable[Any] | None = None, steps: int | None = None) -> Run:
        """Makes steps; all of an iteration if their number is not given."""
        # zip asks the counter first: a batch that no step uses must not be fetched
        made = itertools.count() if steps is None else range(steps)
        for _, (x, y, number) in zip(
            made, self.seeded() if loader is None else loader, strict=False
        ):
            self.opt.zero_grad()
            if len(x):
                LOSS(
                    self.model(x), y, reduction="mean" if self.model._dpsco.mean else "sum"
                ).backward()
            before = self.opt.steps
            self.opt.step()
            if self.opt.steps > before or not self.batches:
                self.batches.append(number.tolist())
            else:  # a further chunk of a draw
                self.batches[-1] += number.tolist()
        return self

    def answer(self) -> np.ndarray:
        with self.opt.released():
            return joint(self.model)


Build = Callable[..., Run]


def parts_used(run: Run) -> list[Counter[int]]:
    """Returns, per part of the design, how often each record was in a step."""
    design, batches = run.opt.design, iter(run.batches)
    if not isinstance(design, dp.Parts):
        return [Counter(itertools.chain(*batches))]
    return [
        Counter(itertools.chain(*itertools.islice(batches, draws))) for _, draws in design.parts
    ]


def assert_disjoint(used: Sequence[Counter[int]]) -> None:
    for first, second in itertools.combinations(used, 2):
        assert not first.keys() & second.keys(), "a record is in two parts"


def saved(run: Run) -> dict[str, Any]:
    """Returns what a file of the run gives back."""
    file = io.BytesIO()
    torch.save({"model": run.model.state_dict(), "opt": run.opt.state_dict()}, file)
    file.seek(0)
    state: dict[str, Any] = torch.load(file, weights_only=True)
    return state


def reloaded(run: Run, build: Build, **changes: Any) -> Run:
    """Returns what a fresh process makes of a checkpoint."""
    state, fresh = saved(run), build(**changes)
    fresh.model.load_state_dict(state["model"])
    fresh.opt.load_state_dict(state["opt"])
    fresh.batches = [list(batch) for batch in run.batches]
    return fresh


# -- checks -----------------------------------------------------------------------------------------------------------


def check_resumption(build: Build, *, exact: bool = True) -> None:
    """A run without noise that is saved after any step goes on with the unused records, to the same answer."""
    whole = build().train()
    steps = whole.opt.steps
    assert steps == whole.opt.schedule.steps
    for k in range(1, steps):
        first = build()
        first.train(first.seeded(), k)
        other = reloaded(first, build)
        assert (other.opt.steps, other.opt.accountant.ledger.digest()) == (
            k,
            first.opt.accountant.ledger.digest(),
        )
        assert np.array_equal(other.answer(), first.answer())
        other.train(other.resumed())
        assert other.opt.steps == steps
        assert other.opt.accountant.ledger.digest() == whole.opt.accountant.ledger.digest()
        if exact:
            assert other.batches == whole.batches
            np.testing.assert_array_equal(other.answer(), whole.answer())
        assert_disjoint(parts_used(other))
        with pytest.raises(SequenceError):
            other.train(other.resumed())


def check_ledger(build: Build, budget: dp.Budget) -> None:
    """What is spent and what is ahead are together what is planned, all along, and at the end all of the budget."""
    run = build()
    opt, delta, adjacency = run.opt, budget.delta, budget.adjacency
    planned = Ledger([opt.ahead()]).epsilon(delta, adjacency)
    assert planned <= budget.epsilon
    spent = 0.0
    for batch in run.seeded():
        run.train([batch])
        report = opt.report()
        ledger = opt.accountant.ledger
        assert str(report)
        assert report.markdown()
        now = ledger.epsilon(delta, adjacency)
        assert spent * (1 - 1e-12) <= now <= planned * (1 + 1e-12)
        assert ledger.evaluate(delta, adjacency, extra=opt.ahead()).epsilon == pytest.approx(
            planned, rel=1e-9
        )
        spent = now
    assert opt.steps == opt.schedule.steps
    assert budget.epsilon * (1 - 1e-3) <= spent <= budget.epsilon
    assert opt.report().epsilon == spent
    opt.finalize()
    assert str(opt.report())


def check_interrupted_fit(build: Build, at: int) -> None:
    """`fit` that is interrupted goes on with the unused records and charges them once."""
    whole, broken = build(), build()
    data = records(whole.n)
    pairs = TensorDataset(*data.tensors[:2])
    interrupted = []

    def loss(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if broken.opt.steps == at and not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt
        return LOSS(scores, targets)

    dp.fit(whole.model, whole.opt, pairs, LOSS, progress=False)
    with pytest.raises(KeyboardInterrupt):
        dp.fit(broken.model, broken.opt, pairs, loss, progress=False)
    assert (broken.opt.steps, broken.opt.finalized) == (at, False)
    dp.fit(broken.model, broken.opt, pairs, loss, progress=False)
    for run in (whole, broken):
        assert run.opt.finalized
        assert run.opt.steps == run.opt.schedule.steps == len(run.opt.accountant)
        partitions = {name for name, _, _, _ in run.opt.accountant.ledger.entries()}
        assert len(partitions) == 1
        assert run.opt.report().epsilon <= run.opt.accountant.budget.epsilon


def check_chunks(build: Build) -> None:
    """Draws that come in chunks of two rows make the steps of whole draws."""
    whole, chunked = build(dtype=torch.float64), build(dtype=torch.float64)
    whole.train(whole.seeded())
    chunked.train(chunked.seeded(physical=2))
    np.testing.assert_allclose(chunked.answer(), whole.answer(), rtol=0, atol=1e-10)
    assert chunked.opt.accountant.ledger.digest() == whole.opt.accountant.ledger.digest()
    assert len(whole.batches) == whole.opt.steps


def check_other_plans(build: Build, *changes: dict[str, Any]) -> None:
    """A checkpoint of another plan is refused, and leaves everything as it is."""
    state = saved(build().train())["opt"]
    for change in changes:
        other = build(**change)
        before = joint(other.model)
        with pytest.raises(ValueError, match="same plan"):
            other.opt.load_state_dict(state)
        assert (len(other.opt.accountant), other.opt.steps) == (0, 0)
        assert np.array_equal(joint(other.model), before)


def sampler_of(loader: PrivateLoader) -> OnePassSampler:
    sampler = loader.batch_sampler
    assert isinstance(sampler, OnePassSampler)
    return sampler
