"""Keywords of other libraries, and what they are called here: for errors of a first call.

From scikit-learn, Opacus, TensorFlow Privacy, diffprivlib and OpenDP. An unknown keyword that is one of them is
answered with our word and how its value is to be converted; all others are left to Python.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable
from typing import Any, TypeVar, cast

_Class = TypeVar("_Class", bound=type)

_PLAN = "the plan has it: the optimizer's class .plan(...)"
# Theirs: (ours, what is to be known), of which the first that a callable takes is named; "" for no keyword at all.
_WORDS: dict[str, tuple[tuple[str, str], ...]] = {
    "C": (("reg", "reg = 1 / C, of the sum of the losses"),),
    "alpha": (
        ("reg", "of the sum of the losses plus reg/2 |w|^2, where squared losses are r^2/2"),
    ),
    "weight_decay": (("reg", "of a plan or optimizer"),),
    "penalty": (("reg", "the penalty is reg/2 |w|^2"),),
    "max_iter": (("", "solvers stop when the answer is certified"),),
    "tol": (("", "solvers stop when the answer is certified"),),
    "random_state": (("", "noise comes from the operating system, and cannot be repeated"),),
    "data_norm": (("bound_x", "public"),),
    "bounds_X": (
        (
            "bound_x",
            "a public bound on the norm of rows; see also feature_center and feature_scale",
        ),
    ),
    "bounds_y": (("bound_y", "targets are clipped to [-bound_y, bound_y]"),),
    "l2_norm_clip": (
        ("clip", "the same number"),
        ("problem", "losses.<Loss>().problem(bound_x=...) has the clip"),
    ),
    "eps": (("epsilon", ""), ("budget", "Budget(epsilon, delta)")),
    "target_delta": (("delta", ""), ("budget", "Budget(epsilon, delta)")),
    "sample_rate": (
        ("batch_size", "sample_rate times n"),
        ("", "the batch size of the data loader has it"),
    ),
    "expected_batch_size": (("batch_size", ""), ("", "the batch size of the data loader has it")),
    "noise_multiplier": (("budget", "the noise follows from it"), ("", _PLAN)),
    "num_microbatches": (("", "each record is clipped by itself"),),
    "poisson_sampling": (("sampling", "'poisson', 'full' or 'allocated'"),),
    "clipping": (
        ("clip", "a number: all parameters are clipped together"),
        ("", "all parameters together"),
    ),
    "epsilon": (("budget", "Budget(epsilon, delta)"),),
    "delta": (("budget", "Budget(epsilon, delta)"),),
    "intervals": (
        ("", "confidence intervals are proved for LogisticRegression, HuberRegressor and Ridge"),
    ),
    "groups": (("users", "the id of the user of each record"),),
    "n": (("n_users", "the public number of users"), ("", _PLAN)),
}
for _theirs in ("max_grad_norm", "clipping_norm", "clip_norm", "norm_clip", "max_norm"):
    _WORDS[_theirs] = _WORDS["l2_norm_clip"]
for _theirs in ("target_epsilon", "privacy_budget"):
    _WORDS[_theirs] = _WORDS["eps"]
for _theirs in ("l2_reg", "lam"):
    _WORDS[_theirs] = _WORDS["alpha"]
for _ours in ("epochs", "batch_size", "lr", "clip", "budget", "problem", "n"):
    _WORDS.setdefault(_ours, (("", _PLAN),))


def require_ours(name: str, given: Iterable[str], taken: Collection[str]) -> None:
    """Raises TypeError for keywords of others, all of them together, with our words.

    Args:
        name: of what is called.
        given: keywords.
        taken: those that it takes.

    Example:
        >>> require_ours("LogisticRegression", ["C"], ["n", "reg"])
        Traceback (most recent call last):
        ...
        TypeError: LogisticRegression has no C: take reg (reg = 1 / C, of the sum of the losses)
    """
    answers = [answer for word in given if word not in taken and (answer := _answer(word, taken))]
    if answers:
        raise TypeError(f"{name} has no {'; no '.join(answers)}")


def _answer(word: str, taken: Collection[str]) -> str:
    for ours, how in _WORDS.get(word, ()):
        if ours in taken:
            return f"{word}: take {ours}{f' ({how})' if how else ''}"
        if not ours and how is not _PLAN:
            return f"{word}: leave it out ({how})"
        if not ours and "optimizer" in taken:
            return f"{word}: {how}"
    return ""


def in_our_words(cls: _Class) -> _Class:
    """Makes the `__init__` of a dataclass answer keywords of others."""
    own = cast(Any, cls).__init__

    @functools.wraps(own)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        require_ours(cls.__name__, kwargs, cls.__dataclass_fields__)  # type: ignore[attr-defined]
        own(self, *args, **kwargs)

    cast(Any, cls).__init__ = init
    return cls
