"""Sentences with blanks (sentences.toml), and what of a ledger must be true for them to be said."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

import numpy as np

from torch_dpsco.accounting.curves import cost_of
from torch_dpsco.accounting.events import (
    Adjacency,
    ApproxDP,
    ApproxZCDP,
    Failure,
    Gaussian,
    NonPrivate,
    PoissonGaussian,
    RandomAllocation,
    SimpleEvent,
    WORGaussian,
)

# how partitions of random allocation and of studies are named
ASSIGNED = "assigned/"
HELD = "held/"
_GAUSSIANS = (Gaussian, PoissonGaussian, WORGaussian, RandomAllocation)


class Sentence(NamedTuple):
    """A text with blanks, and when it is said.

    Args:
        when: words that must be true; "!" before a word is "not".
        text: the sentence.
        each: name of a list, for each item of which it is said once; "" for once.
    """

    when: str
    text: str
    each: str = ""


@cache
def sentences_of(*place: str) -> tuple[Sentence, ...]:
    """Returns the sentences of a part of sentences.toml, whose line breaks are spaces."""
    part = _file()
    for name in place:
        part = part[name]
    return tuple(Sentence(when, text.replace("\n", " "), *each) for when, text, *each in part)


def titles() -> Iterable[str]:
    """Returns the titles of the sections of a statement."""
    return cast(Iterable[str], _file()["sections"])


@cache
def _file() -> Any:
    text = Path(__file__).with_name("sentences.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@dataclass(frozen=True)
class Words:
    """What is true, and what fills the blanks of sentences.

    Args:
        truths: whether each word that a `when` may have is true.
        figures: what blanks that are no phrases stand for.
    """

    truths: Mapping[str, bool]
    figures: Mapping[str, Any]

    def holds(self, sentence: Sentence) -> bool:
        """Returns whether a sentence may be said."""
        words = sentence.when.split()
        return all(self.truths[word.lstrip("!")] != word.startswith("!") for word in words)

    def said(self, *place: str) -> Iterator[str]:
        """Yields the sentences of a part of the file that may be said, without blanks."""
        for sentence in filter(self.holds, sentences_of(*place)):
            if not sentence.each:
                yield sentence.text.format_map(self)
                continue
            for item in self.figures[sentence.each]:
                words = replace(self, figures={**self.figures, "each": item})
                yield sentence.text.format_map(words)

    def __getitem__(self, blank: str) -> Any:
        if blank in self.figures:
            return self.figures[blank]
        return next(self.said("phrases", blank))


def charged(
    events: Iterable[SimpleEvent],
    adjacency: Adjacency,
    partitions: Collection[tuple[str, str]] = (),
) -> dict[str, bool]:
    """Returns what is true of a ledger.

    Args:
        events: that were charged, each once or more often.
        adjacency: of the guarantee.
        partitions: (name, kind) of each, as of `events.Parallel`.
    """
    costs = {event: cost_of(event, adjacency) for event in events}
    kinds = {kind.__name__: False for kind in get_args(SimpleEvent)}
    kinds.update((type(event).__name__, True) for event in costs)
    gaussians = [event for event in costs if isinstance(event, _GAUSSIANS)]
    # PRIVACY: one release of floating-point noise is enough (test_mixed_ledgers_keep_the_sentence); `GDP` does not tell
    ideal = kinds["GDP"] or not all(event.exact for event in gaussians)
    # a premise of some release may fail
    fails = any(
        event.failure if isinstance(event, Gaussian) else event.probability
        for event in costs
        if isinstance(event, (Gaussian, Failure))
    )
    # nothing is known of some delta but its size: the release may disclose all with that probability
    stated = any(event.delta for event in costs if isinstance(event, (ApproxDP, ApproxZCDP)))
    # where a ratio of probabilities has no bound, each larger one is passed more rarely, which one finite Renyi
    # divergence implies
    impure = [event for event, cost in costs.items() if math.isinf(cost.pure)]
    graded = all(np.isfinite(cost.rdp).any() for cost in costs.values())
    curved = bool(impure) and graded and not (fails or stated)
    cut = {kind for name, kind in partitions if not name.startswith((ASSIGNED, HELD))}
    return kinds | {
        # PRIVACY: bits come from a cipher, those of exact noise too
        # (test_each_sentence_is_printed_if_the_ledger_implies_it_and_only_then)
        "noisy": any(not isinstance(event, (NonPrivate, Failure)) for event in costs),
        "exact": any(event.exact for event in gaussians),
        "ideal": ideal,
        "laplace_noise": kinds["Laplace"] or kinds["AboveThreshold"],
        "fails": fails,
        "stated": stated,
        "curved": curved,
        "all_gaussian": curved and all(isinstance(event, _GAUSSIANS) for event in impure),
        "all_pure": bool(costs) and not (impure or fails or stated),
        "assigned_parts": any(name.startswith(ASSIGNED) for name, _ in partitions),
        "held_parts": any(name.startswith(HELD) for name, _ in partitions),
        "positional_parts": "positional" in cut,
        "keyed_parts": "keyed" in cut,
    }
