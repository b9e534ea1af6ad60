"""Which sizes of batches give every record the same bits: assumption (A2), tested on made-up records.

F_s(i, x) is what the kernels compute for record x in row i of a batch of s rows. Batches may have any of the sizes in S
if F_s(i, x) depends neither on s in S nor on i, to the last bit. Two things decide it. Kernels of elementwise functions
run another exp on the last numbers of a tensor than on the others, for few values only, so that a rule takes care of
them: the numbers of a batch, and of the part of each thread, are a multiple of what a vector of the CPU holds. What
matrix products, and all else, do is tested: the same made-up records in batches of several sizes, at other places, at
random parameters. Source: docs/proofs/record_isolation.md#batches-of-several-sizes.
"""

from __future__ import annotations

import itertools
import pickle
import random
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_dpsco.compat import DispatchMode, tree_leaves
from torch_dpsco.errors import SequenceError
from torch_dpsco.native import HALF
from torch_dpsco.sampling.loader import Sizes, torch_settings
from torch_dpsco.trial import SEED, Leaf, Refused, SyntheticBatches, attempt

RECORDS = (
    2500  # made up: a dependence of 1 % of them is missed with probability .99^2500 < 2e-11
)
_FEWEST = 700  # of models whose steps are long: .99^700 < 1e-3
_BATCHES = 8  # of a usual size, whose records are computed twice, unless these are fewer
_GRIDS = (4, 8, 16, 32)
_LEAST = 8  # rows
_KINDS = (1000, 127, 30, 10, 5, 3)  # of integers, most first
_MOST_SIZES = 16  # from half of a usual batch to twice of it, about
_GRAIN = 32768  # numbers that torch leaves to one thread
_VECTORS = {torch.float32: 32, torch.float64: 16}
_WORDS = 624  # of the state of a Mersenne Twister
_START = 24  # bytes before them
_SEED = 5489
AUTOCAST = (
    "model must not run under autocast (got torch.autocast on the CPU), as it did not in its first step: run all"
    " steps alike, or give isolation='slots' to optimizer.loader(...)"
)
# elementwise functions without torch's tag for them
_UNTAGGED = frozenset(
    """
    binary_cross_entropy binary_cross_entropy_backward glu glu_backward log_sigmoid_backward log_sigmoid_forward
    smooth_l1_loss smooth_l1_loss_backward
    """.split()  # noqa: SIM905
)
# elementwise functions that IEEE 754 defines to the last bit, or that only choose and copy
_EXACT = frozenset(
    """
    abs add bitwise_and bitwise_not bitwise_or ceil clamp clamp_max clamp_min clone copy _to_copy detach div eq fill
    floor ge gt hardtanh hardtanh_backward isfinite isinf isnan le leaky_relu leaky_relu_backward logical_and
    logical_not logical_or lt masked_fill maximum minimum mul ne neg ones_like relu round rsub sign sqrt square sub
    threshold threshold_backward trunc where zero zeros_like
    """.split()  # noqa: SIM905
)

# of which a result hides all but few bits of what it was computed from
_STEP_FUNCTIONS = frozenset(
    """
    argmax argmin argsort bucketize ceil eq floor floor_divide ge gt heaviside le lt ne round searchsorted sgn sign
    signbit sort topk trunc
    """.split()  # noqa: SIM905
)


def _other_streams() -> bytes:
    """Returns the states of the random streams of python and numpy."""
    return pickle.dumps((random.getstate(), np.random.get_state()))  # noqa: NPY002


class DrawsError(Exception):
    """A model draws random numbers in a way that cannot be left out."""


class ChoosesError(Exception):
    """A model goes on with some of the values, whose number depends on all records."""


class _Watched(DispatchMode):  # type: ignore[misc]
    """Notes elementwise functions whose last numbers may be computed in another way, and leaves random masks out.

    Args:
        rows: of the batch.
        passes: of the model, as in `Trial`.
    """

    def __init__(self, rows: int, passes: Any) -> None:
        super().__init__()
        self.rows = rows
        self._passes = passes
        self.widths: set[tuple[int, torch.dtype]] = set()  # numbers per record
        self.random = False
        self.hides = ""  # what hides the order in which sums were added

    @property
    def in_forward(self) -> bool:
        """Whether the forward of the model runs, where masks may be drawn."""
        return self._passes is not None and self._passes.tag is not None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs an operation."""
        name = func.overloadpacket.__name__
        if torch.Tag.nondeterministic_seeded in func.tags:
            if name == "bernoulli_" and self.in_forward:
                self.random = True
                return args[0].fill_(1.0)
            places = [k for k, a in enumerate(func._schema.arguments) if a.name == "dropout_p"]
            chosen = {k: args[k] for k in places if k < len(args)}
            if not places or any(chosen.values()) or (kwargs or {}).get("dropout_p"):
                raise DrawsError(name)
        if _chooses(func, args) and (self.in_forward or _differentiable(args)):
            # PRIVACY: how many others are chosen moves the end (test_a_model_that_chooses_values_keeps_slots)
            raise ChoosesError(name)
        result = func(*args, **(kwargs or {}))
        if self._hides(name, args, result):
            self.hides = name
        if name in _UNTAGGED:
            # PRIVACY: sums of them have the end of a batch too (test_a_loss_without_a_tag_is_an_elementwise_function)
            for leaf in args:
                self._note(leaf)
        elif torch.Tag.pointwise in func.tags and not _is_exact(name.rstrip("_"), args):
            self._note(result)
        return result

    def _hides(self, name: str, args: tuple[Any, ...], result: Any) -> bool:
        """Returns whether a result is rounded to few bits, or tells only on which side of a step a number is."""
        found = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        if any(t.dtype in HALF for t in found):
            return True
        real = any(isinstance(t, Tensor) and t.is_floating_point() for t in args)
        whole_numbers = name == "_to_copy" and any(not t.is_floating_point() for t in found)
        return real and self.in_forward and (name in _STEP_FUNCTIONS or whole_numbers)

    def run(
        self, answers: Callable[[list[Tensor]], Sequence[Tensor]], made: list[Tensor]
    ) -> Sequence[Tensor]:
        """Returns answers without random masks."""
        with self if self.random else nullcontext():
            return answers(made)

    def _note(self, result: Any) -> None:
        if isinstance(result, Tensor) and result.is_complex():
            result = torch.view_as_real(result.detach().resolve_conj())
        known = isinstance(result, Tensor) and result.dtype in _VECTORS
        if known and not result.numel() % self.rows:
            self.widths.add((result.numel() // self.rows, result.dtype))


def _is_exact(name: str, args: tuple[Any, ...]) -> bool:
    """Returns whether an elementwise function gives the same bits in a vector of the CPU and outside of one."""
    if any(isinstance(t, Tensor) and t.is_complex() for t in args):
        return False
    return name in _EXACT or (name == "pow" and args[1:] == (2,))


def _chooses(func: Any, args: tuple[Any, ...]) -> bool:
    """Returns whether an operation picks values, of which others decide how many there are."""
    if func.overloadpacket.__name__ != "index":
        return torch.Tag.dynamic_output_shape in func.tags
    # by integers there are as many as these are, whatever their values
    masks = (torch.bool, torch.uint8)
    return any(isinstance(t, Tensor) and t.dtype in masks for t in args[1])


def _differentiable(args: tuple[Any, ...]) -> bool:
    return any(isinstance(t, Tensor) and t.requires_grad for t in tree_leaves(args))


def whole(numbers: int, unit: int, threads: int) -> bool:
    """Returns whether an elementwise kernel computes all numbers of a tensor in full vectors, in each thread."""
    parts = min(threads, -(-numbers // _GRAIN)) or 1
    return numbers % unit == 0 and -(-numbers // parts) % unit == 0


@dataclass(frozen=True)
class Trial:
    """A training pass that can be made over made-up records.

    Args:
        answers: of a batch of made-up tensors: tensors with a row for each record.
        leaves: what the tensors look like.
        usual: rows of a usual batch.
        most: rows of a batch at most.
        passes: of the attached model, a `rows.PassCounter`: whether its loss is a mean over the batch, which powers of
            2 divide exactly, or is made exact for all sizes; and whether its forward runs. None without one.
        before: numbers by record, and types, of tensors that the loop makes of a batch before the loss.
    """

    answers: Callable[[list[Tensor]], Sequence[Tensor]]
    leaves: Sequence[Leaf]
    usual: int
    most: int
    passes: Any = None
    before: Sequence[tuple[int, torch.dtype]] = ()

    def sizes(self) -> Sizes | str:
        """Returns sizes under which records are apart, or in words why there are none; never raises."""
        if any(leaf.device.type != "cpu" for leaf in self.leaves):
            return "batches of several sizes are tested on the CPU only"
        if torch.is_autocast_enabled("cpu"):
            return "batches of several sizes are not tested under autocast"
        if self.most < _LEAST:
            return f"batches of fewer than {_LEAST} rows come in one size"
        *_, flushes = torch_settings()
        if flushes and torch.get_num_threads() > 1:
            # PRIVACY: torch flushes in the thread that asked (test_numbers_that_one_thread_flushes_keep_slots)
            return "torch.set_flush_denormal is of one thread, and there are several"
        found = attempt("batches of several sizes", self._found)
        if isinstance(found, Refused):  # only the kind: messages may quote shapes
            return f"batches of several sizes raise {type(found.error).__name__} for made-up records"
        return found

    def _found(self) -> Sizes | str:
        watched = _Watched(13, self.passes)
        made = SyntheticBatches(self.leaves, 13, None).batch()
        other_streams = _other_streams()
        with watched:
            self.answers(made)
        if _other_streams() != other_streams:
            # PRIVACY: those of a record depend on how many came before it
            # (test_random_numbers_of_python_and_numpy_keep_slots)
            return "the loop draws random numbers of python or numpy"
        # PRIVACY: elementwise functions of the loop itself (test_what_a_loop_does_to_targets_counts)
        watched.widths.update(self.before)
        if watched.hides:
            # PRIVACY: one record in thousands shows in what order its sums were added
            # (test_half_precisions_keep_slots, test_steps_in_a_model_keep_slots)
            return f"half precisions and steps ({watched.hides}) hide what the test looks for"
        if watched.random:
            secret_state()  # or none can be made
        kinds = self._kinds(watched)
        records = max(_FEWEST, min(RECORDS, _BATCHES * self.usual))
        mean = self.passes is not None and self.passes.mean
        for exact in (True, False) if mean else (False,):
            if mean:
                self.passes.exact_means = exact
            for grid in _GRIDS:
                sizes = self._admitted(grid, watched.widths, powers=mean and not exact)
                same = partial(self._same_bits, sizes, records, watched, kinds)
                found = attempt("batches of several sizes", same) if sizes else False
                if found is True:
                    return Sizes(sizes, torch_settings(), records, exact, watched.random)
                if isinstance(found, Refused) and isinstance(found.error, SequenceError):
                    break  # the loss is no exact mean, in whatever sizes
        return "bits of a record depend on the number of rows, or on its place"

    def _kinds(self, watched: _Watched) -> dict[int, int]:
        """Returns how many integers the model takes, of some numbers that are tried, by place."""
        found: dict[int, int] = {}
        for k, leaf in enumerate(self.leaves):
            whole_numbers = not leaf.dtype.is_floating_point and leaf.dtype is not torch.bool
            if leaf.is_number or leaf.dim is None or leaf.counts or not whole_numbers:
                continue
            for kinds in (n for n in _KINDS if n <= torch.iinfo(leaf.dtype).max):
                made = SyntheticBatches(self.leaves, 13, None).batch()
                made[k].fill_(kinds - 1)
                answers = attempt("larger integers", partial(watched.run, self.answers, made))
                if not isinstance(answers, Refused) and all(
                    bool(t.isfinite().all()) for t in answers
                ):
                    found[k] = kinds
                    break
        return found

    def _admitted(
        self, grid: int, widths: set[tuple[int, torch.dtype]], *, powers: bool
    ) -> list[int]:
        """Returns the sizes on a grid that the rules admit; of powers of 2 alone where a mean divides by them."""
        threads = torch.get_num_threads()
        last = max(self.most, self.usual)
        found: list[int] = []
        # PRIVACY: no more than can all be tested (test_all_sizes_are_tested)
        grid *= max(1, self.usual // (_MOST_SIZES * grid))
        least = max(_LEAST, self.usual // 2)
        for size in range(-(-least // grid) * grid, 64 * last, grid):
            if powers and size & (size - 1):
                continue
            if all(whole(size * d, _VECTORS[kind], threads) for d, kind in widths):
                found.append(size)
                if size >= last:  # a draw comes in one batch
                    break
        return found

    def _same_bits(
        self, sizes: Sequence[int], records: int, watched: _Watched, kinds: Mapping[int, int]
    ) -> bool:
        """Returns whether made-up records have the same bits in batches of several sizes and at several places.

        Each is computed twice: in sizes that increase, and in sizes that decrease, from another record on. It ends
        with the first bit that differs.
        """
        # PRIVACY: odd, or records would keep their places in vectors (test_places_in_vectors_are_tested)
        shift = sizes[0] // 3 | 1
        passes = [
            self._passes(watched, sizes, 0, kinds),
            self._passes(watched, sizes[::-1], shift, kinds),
        ]
        held = _left(next(passes[0]), shift)  # of one pass, until the other has come so far
        compared = 0
        made = 1
        kept: list[Tensor] = []
        # PRIVACY: all sizes, the last two of which may have been begun only (test_all_sizes_are_tested)
        while compared < records or made < len(sizes) + 2:
            bits = next(passes[1])
            made += 1
            rows = min(len(held[0]), len(bits[0]))
            pairs = zip(held, bits, strict=True)
            if not all(torch.equal(a[:rows], b[:rows]) for a, b in pairs):
                return False
            kept.append(torch.cat([t[:rows, :1].long() for t in bits], dim=1))
            compared += rows
            if len(bits[0]) > rows:
                held = bits
                passes.reverse()
            held = _left(held, rows)
            del bits  # all that is large, before the next batch is computed
        # PRIVACY: few of them show nothing about others (test_few_different_records_keep_slots)
        return len(torch.cat(kept).unique(dim=0)) >= min(records, _FEWEST) // 4

    def _passes(
        self, watched: _Watched, sizes: Sequence[int], start: int, kinds: Mapping[int, int]
    ) -> Iterator[list[Tensor]]:
        """Yields the bits of the answers of batches whose sizes take turns, from a record on, without end."""
        for size in itertools.cycle(sizes):
            # nothing else holds them: what is large goes as soon as it was looked at
            yield [
                _bits(t)
                for t in watched.run(
                    self.answers, self._made(start, size, min(sizes) // 4 + 8, kinds)
                )
                if len(t) == size
            ]
            start += size

    def _made(self, start: int, size: int, rows: int, kinds: Mapping[int, int]) -> list[Tensor]:
        """Returns some of endlessly many records, which are made up `rows` at a time, so that few others have to be."""
        scales = [(1.0, -1.0, 1e-2, -1e-2)[k % 4] for k in range(rows)]
        numbers = {k: scales for k, leaf in enumerate(self.leaves) if _scaled(leaf)}
        skipped = start % rows
        parts = [
            SyntheticBatches(self.leaves, rows, None, kinds=kinds, seed=SEED + first).batch(
                numbers
            )
            for first in range(start - skipped, start + size, rows)
        ]
        made = []
        for leaf, *same in zip(self.leaves, *parts, strict=True):
            t = same[0]
            if leaf.dim is not None:
                t = torch.cat(same, leaf.dim)
                t = t.narrow(leaf.dim, skipped * leaf.places, size * leaf.places).clone()
            made.append(t)
        return made


def _scaled(leaf: Leaf) -> bool:
    return leaf.dim is not None and leaf.is_number and not leaf.target and not leaf.counts


def _left(bits: list[Tensor], rows: int) -> list[Tensor]:
    """Returns copies of all but the first rows: the next batch may be written over them. What they are of is freed."""
    return [bits.pop(0)[rows:].clone() for _ in range(len(bits))]


def _bits(rows: Tensor) -> Tensor:
    """Returns (B, numbers) integers of the bits of an answer."""
    real = torch.view_as_real(rows) if rows.is_complex() else rows
    flat = real.detach().reshape(len(rows), -1)
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return flat.view(kinds[flat.element_size()])


def secret_state() -> Tensor:
    """Returns a state for `torch.set_rng_state` with 19,968 random bits, so that nobody knows the masks of a forward.

    After `torch.manual_seed` the masks of dropout are known, and those of a record depend on how many numbers were
    drawn before: for the rows before it, and in earlier steps. In batches of several sizes that is private, and a
    record more would move all others. So each forward draws from a state of its own, and that of before is put back.

    Raises:
        RuntimeError: torch holds states in another way than it did.
    """
    state = torch.Generator().manual_seed(_SEED).get_state()
    words = state[_START : _START + 8 * _WORDS].numpy().view(np.uint64)
    # PRIVACY: elsewhere the words may not be the state (test_the_state_of_masks_is_the_one_that_torch_draws_from)
    following = 1812433253 * (_SEED ^ (_SEED >> 30)) + 1
    if len(words) != _WORDS or words[0] != _SEED or words[1] != following % 2**32:
        raise RuntimeError(
            f"states of torch's generator must be those of a Mersenne Twister (got {len(state)} bytes): give"
            " isolation='slots' to optimizer.loader(...), or leave random layers out"
        )
    words[:] = np.frombuffer(secrets.token_bytes(4 * _WORDS), dtype=np.uint32)
    return state
