from __future__ import annotations

import copy
import itertools
import math
import os
import pickle
from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats

from tests.streams import picks, seeded
from torch_dpsco.accounting.designs import Poisson
from torch_dpsco.errors import PrivacyError, UtilityWarning
from torch_dpsco.noise import (
    KeyedStream,
    Keystream,
    Repeatable,
    Stream,
    noise_generator,
    rank_generator,
    stream_of,
)
from torch_dpsco.sampling import PoissonSampler

FALSE_ALARM = 1e-6
KEY = bytes(range(32))


class Words(Stream):
    """Gives the words of a list, one after another, and then those of another stream."""

    def __init__(self, words: list[int]) -> None:
        self.left = list(words)

    def read(self, size: int) -> bytes:
        given, self.left = self.left[: size // 8], self.left[size // 8 :]
        return np.array(given, dtype=np.uint64).tobytes() + os.urandom(size - 8 * len(given))


# -- where bits come from ---------------------------------------------------------------------------------------------


@pytest.mark.real_entropy
def test_a_fork_draws_other_bits_than_its_parent_and_its_siblings():
    """With the parent's generator in use, and each child asked for the bytes that the parent draws next."""
    stream, drawn = Keystream(), []
    stream.read(16)
    for _ in range(3):
        receive, send = os.pipe()
        child = os.fork()
        if not child:
            os.write(send, stream.read(32))
            os._exit(0)
        os.waitpid(child, 0)
        drawn += [os.read(receive, 32), stream.read(32)]
        os.close(receive)
        os.close(send)
    assert [len(block) for block in drawn] == [32] * 6
    assert len(set(drawn)) == 6


@pytest.mark.real_entropy
def test_copies_of_the_default_stream_draw_bits_of_their_own():
    stream = noise_generator()
    others = [copy.copy(stream), copy.deepcopy(stream), pickle.loads(pickle.dumps(stream))]
    assert len({each.read(32) for each in (stream, *others)}) == 4
    assert stream.__dict__ == {"device": torch.device("cpu")}  # nothing that could be saved


@pytest.mark.real_entropy
def test_every_bit_is_drawn_anew():
    """False alarm 2e-9: each of 19,968 bits stays at one value over 44 draws with probability 2^-43."""
    drawn = np.unpackbits(
        np.frombuffer(Keystream().read(44 * 2496), dtype=np.uint8).reshape(44, -1), axis=1
    )
    assert drawn.any(axis=0).all()
    assert not drawn.all(axis=0).any()


@pytest.mark.real_entropy
def test_noise_and_batches_do_not_follow_global_seeds_nor_disturb_global_streams():
    noises, draws = [], []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002
        noises.append(noise_generator().read(64))
        draws.append(
            [indices.tolist() for _, indices in PoissonSampler(Poisson(50, 1000)).draws()]
        )
        after = torch.rand(3).tolist(), np.random.random(3).tolist()  # noqa: NPY002
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    assert noises[0] != noises[1]
    assert draws[0] != draws[1]
    assert after == (torch.rand(3).tolist(), np.random.random(3).tolist())  # noqa: NPY002


def test_a_generator_of_the_callers_is_repeatable_and_warns():
    drawn = []
    for seed in (3, 3, 4):
        with pytest.warns(UtilityWarning, match="generator= makes the noise repeatable"):
            used = noise_generator("cpu", torch.Generator().manual_seed(seed))
        assert isinstance(used, Repeatable)
        drawn.append(used.read(100))
    assert drawn[0] == drawn[1] != drawn[2]
    assert stream_of(torch.Generator().manual_seed(3)).read(100) == drawn[0]
    assert stream_of(used) is used


def test_a_generator_on_another_device_is_refused():
    with pytest.raises(
        ValueError, match=r"generator must be on meta, where the parameters are \(got cpu\)"
    ):
        noise_generator("meta", torch.Generator())


def test_a_device_may_be_named_or_given():
    for device in ("cpu", torch.device("cpu"), "cpu:0"):
        assert noise_generator(device).device.type == "cpu"


@pytest.mark.parametrize(
    "stream",
    [Keystream(), KeyedStream(KEY, "a"), seeded(0), picks(0)],
    ids=["fresh", "keyed", "seeded", "picks"],
)
def test_bytes_are_uniform_and_as_many_as_asked_for(stream):
    """Bits of each place of a byte, and bytes; false-alarm rate 2e-6."""
    for size in (0, 1, 7, 8, 33):
        assert len(stream.read(size)) == size
    drawn = np.frombuffer(stream.read(65_536), dtype=np.uint8)
    assert stats.chisquare(np.bincount(drawn, minlength=256)).pvalue > FALSE_ALARM
    pairs = np.bincount(drawn[::2] // 16 * 16 + drawn[1::2] // 16, minlength=256)
    assert stats.chisquare(pairs).pvalue > FALSE_ALARM


# -- keyed streams ----------------------------------------------------------------------------------------------------


def test_a_keyed_stream_is_the_same_for_all_who_have_the_key():
    first, second = (KeyedStream(KEY, "x") for _ in range(2))
    assert [first.read(n) for n in (5, 5, 100)] == [second.read(n) for n in (5, 5, 100)]


def test_no_call_of_a_keyed_stream_repeats_another():
    """Neither of its own nor of another key or label, whatever the sizes."""
    keys = [
        KEY,
        *(
            bytes(KEY[k] ^ (1 << k % 8) if k == place else KEY[k] for k in range(32))
            for place in range(32)
        ),
    ]
    streams = [KeyedStream(key, label) for key in keys for label in ("", "a", "b")]
    drawn = [stream.read(size)[:16] for stream in streams for size in (16, 200, 16)]
    assert len(set(drawn)) == len(drawn) == 3 * 3 * 33


def test_a_keyed_stream_is_not_copied():
    stream = rank_generator(KEY, 3)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(PrivacyError, match="must not be copied or saved"):
            copied(stream)
    with pytest.raises(ValueError, match="key must have 32 bytes"):
        KeyedStream(b"short", "a")


# -- picks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 2, 3, 10, 2**31 + 1, 3 * 2**61, 2**63])
def test_integers_are_exactly_uniform(limit):
    drawn = picks(2).integers(limit, 20_000)
    assert drawn.dtype == np.int64
    assert len(drawn) == 20_000
    assert ((drawn >= 0) & (drawn < limit)).all()
    if limit <= 10:
        assert (
            limit == 1
            or stats.chisquare(np.bincount(drawn, minlength=limit)).pvalue > FALSE_ALARM
        )
    else:
        assert stats.kstest(drawn / limit, "uniform").pvalue > FALSE_ALARM


def test_words_beyond_the_last_multiple_are_drawn_again():
    limit = 3 * 2**61  # two of them fit: a quarter of all words is left over
    source = Words([2 * limit, 2 * limit - 1, 2**64 - 1, limit, 5, 7])
    assert source.integers(limit, 4).tolist() == [limit - 1, 0, 5, 7]


@pytest.mark.slow
def test_permutations_are_exactly_uniform():
    """All orders of 4; and keys of which two agree are drawn again."""
    stream, draws = picks(3), 24_000
    counts = Counter(tuple(stream.permutation(4).tolist()) for _ in range(draws))
    assert set(counts) == set(itertools.permutations(range(4)))
    assert stats.chisquare(list(counts.values())).pvalue > FALSE_ALARM
    assert Words([7, 9, 7, 3, 1, 2]).permutation(3).tolist() == [1, 2, 0]
    assert stream.permutation(0).tolist() == []
    assert sorted(stream.permutation(1000).tolist()) == list(range(1000))


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(("size", "count"), [(6, 2), (6, 5), (40, 2), (5, 0), (5, 5), (0, 0)])
def test_subsets_are_exactly_uniform(size, count):
    stream, most = picks(4), math.comb(size, count)
    counts = Counter(tuple(stream.subset(size, count).tolist()) for _ in range(40 * most))
    assert all(list(chosen) == sorted(set(chosen)) and len(chosen) == count for chosen in counts)
    assert all(0 <= place < size for chosen in counts for place in chosen)
    if most > 1:
        observed = list(counts.values()) + [0] * (most - len(counts))
        assert stats.chisquare(observed).pvalue > FALSE_ALARM


def test_positions_drawn_twice_leave_a_subset_of_its_size():
    class Stuck(Words):
        def read(self, size: int) -> bytes:
            return (
                np.full(size // 8, 5, dtype=np.uint64).tobytes()
                if self.left.pop()
                else os.urandom(size)
            )

    source = Stuck([0, 1, 1])
    assert len(set(source.subset(1000, 8).tolist())) == 8
    assert not source.left
