"""Noise of the kernel for CUDA: its keystream, its law, its keys, and when it is used.

Without a device the kernel runs on the CPU, under the interpreter of Triton (tests/conftest.py).
"""

from __future__ import annotations

import io
import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats

from tests.fast.keystream import ideal, keystream
from tests.streams import Counted, seeded
from torch_dpsco import acts, native
from torch_dpsco.errors import PrivacyError
from torch_dpsco.fast import on_device, rows_on_device
from torch_dpsco.noise import Keystream, SliceStream, add_normal_, add_normals_, normal_
from torch_dpsco.rows import DenseBlock, GradBatch
from torch_dpsco.step.oracle import Clipped

triton = pytest.importorskip("triton", "3.8", "kernels were tried with triton 3.8")
tl = pytest.importorskip("triton.language")
kernels = pytest.importorskip("torch_dpsco.fast.kernels")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FALSE_ALARM = 1e-6
interpreted = pytest.mark.skipif(DEVICE.type == "cuda", reason="looks into the interpreter")
mpmath.mp.prec = 400


@triton.jit
def words_of(out, key, first, n0, n1, n2, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    words = kernels.keystream(key, lane.to(tl.uint32) + first.to(tl.uint32), n0, n1, n2)
    for place in tl.static_range(16):
        tl.store(out + lane * 16 + place, words[place].to(tl.int32, bitcast=True))


def ints(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.int32).to(DEVICE)


def stream_of_kernel(key: bytes, first: int, nonce: bytes, blocks: int) -> bytes:
    out = torch.zeros(blocks * 16, dtype=torch.int32, device=DEVICE)
    start, nonces = np.array([first], np.uint32).view(np.int32), np.frombuffer(nonce, np.int32)
    words_of[(1,)](out, ints(key), int(start[0]), *nonces.tolist(), blocks)
    return out.cpu().numpy().tobytes()


class Given:
    """A source of one key, which notes the memory that it was written to."""

    label = 0

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.memory: list[Any] = []

    def fill(self, memory: memoryview) -> None:
        self.memory.append(np.asarray(memory))
        self.memory[-1][:] = np.frombuffer(self.key, np.int32)


def further(key: bytes, counter: Any, label: int, pair: int) -> list[int]:
    return keystream(key, counter, (pair, label, 0))[:, 0].tolist()


def expected(key: bytes, size: int, label: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns the numbers of a key and their radii, by arithmetic of 400 bits."""
    blocks = -(-size // 10)
    counters = np.arange(blocks, dtype=np.uint32)
    drawn = keystream(key, counters, (0, label, 0))
    values, radii = np.empty((10, blocks)), np.empty((10, blocks))
    for i in range(blocks):
        more = partial(further, key, counters[i : i + 1], label)
        values[:, i], radii[:, i] = ideal(drawn[:, i].tolist(), more)
    return values.ravel()[:size], radii.ravel()[:size]


def drawn(key: bytes, size: int, scale: float = 1.0) -> torch.Tensor:
    out = torch.zeros(size, device=DEVICE)
    on_device.draw(out, scale, ints(key))
    return out.cpu().double()


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that make many numbers: the interpreter takes a second for each, whatever its size."""
    monkeypatch.setattr(on_device, "LANES", 8192)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, wide: None) -> list[int]:
    """Noise for tensors of the device of these tests is the kernel's; gives the sizes of what it was drawn for."""
    sizes: list[int] = []
    draw = on_device.draw

    def noted(out: torch.Tensor, scale: float, key: torch.Tensor, label: int = 0) -> None:
        sizes.append(out.numel())
        draw(out, scale, key, label)

    assert on_device.status(DEVICE) == "in use"  # tried once
    monkeypatch.setattr(native, "DEVICES", (DEVICE.type,))
    monkeypatch.setattr(on_device, "draw", noted)
    return sizes


# -- the keystream ----------------------------------------------------------------------------------------------------


def test_the_block_is_that_of_rfc_8439_section_2_3_2():
    found = stream_of_kernel(bytes(range(32)), 1, bytes.fromhex("000000090000004a00000000"), 1)
    assert found.hex() == (
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )


def test_the_stream_encrypts_as_rfc_8439_section_2_4_2():
    text = (
        b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the"
        b" future, sunscreen would be it."
    )
    found = stream_of_kernel(bytes(range(32)), 1, bytes.fromhex("000000000000004a00000000"), 2)
    assert bytes(a ^ b for a, b in zip(text, found, strict=False)).hex() == (
        "6e2e359a2568f98041ba0728dd0d6981e97e7aec1d4360c20a27afccfd9fae0b"
        "f91b65c5524733ab8f593dabcd62b3571639d624e65152ab8f530c359f0861d8"
        "07ca0dbf500d6a6156a38e088a22b65e52bc514d16ccf806818ce91ab7793736"
        "5af90bbf74a35be6b40b8eedf2785e42874d"
    )


@pytest.mark.parametrize("first", [0, 2**31 - 3, 2**32 - 256])
def test_blocks_are_those_of_openssl(first):
    ciphers = pytest.importorskip("cryptography.hazmat.primitives.ciphers")
    key, nonce = os.urandom(32), os.urandom(12)
    start = first.to_bytes(4, "little") + nonce
    cipher = ciphers.Cipher(ciphers.algorithms.ChaCha20(key, start), None)
    assert stream_of_kernel(key, first, nonce, 256) == cipher.encryptor().update(bytes(64 * 256))


def test_blocks_are_those_of_the_plain_cipher():
    key, nonce = os.urandom(32), os.urandom(12)
    counters = np.arange(64, dtype=np.uint32) + np.uint32(2**32 - 64)
    plain = keystream(key, counters, tuple(np.frombuffer(nonce, np.uint32).tolist()))
    assert stream_of_kernel(key, 2**32 - 64, nonce, 64) == plain.T.tobytes()


# -- the numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.cases(5, 4)
@pytest.mark.parametrize("size", [1, 9, 10, 11, 15, 16, 17, 1280, 1281])
def test_every_number_gets_its_noise_once(size):
    """Whatever the size, and none beside the tensor."""
    key = os.urandom(32)
    whole = torch.arange(size + 2048, dtype=torch.float32, device=DEVICE)
    on_device.draw(whole[1024 : 1024 + size], 1.0, ints(key))
    moved = whole.cpu().double().numpy() - np.arange(size + 2048)
    assert not moved[:1024].any()
    assert not moved[1024 + size :].any()
    values, _ = expected(key, size)
    assert np.abs(moved[1024 : 1024 + size] - values).max() < 2e-4  # sums are of float32


def test_numbers_are_within_the_stated_error_of_the_exact_ones(wide):
    key, size = os.urandom(32), 4097
    values, radii = expected(key, size)
    assert (np.abs(drawn(key, size).numpy() - values) <= 2.0**-20 * radii).all()
    assert len(np.unique(values)) == size


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize(
    ("word", "side"), [(621285, "tail"), (393134, "tail"), (92188, "middle")]
)
def test_the_tail_of_the_kernel_is_reached_in_small_steps(word, side):
    """Keys of which a pair of the first block is at an edge: 192 bits more of it count."""
    key = word.to_bytes(4, "little") + bytes(28)
    values, radii = expected(key, 10)
    assert (radii.max() > 5.2) if side == "tail" else (radii.min() < 2e-3)
    assert (np.abs(drawn(key, 10).numpy() - values) <= 2.0**-20 * radii).all()


def of_words(monkeypatch: pytest.MonkeyPatch, words: list[int], more: list[int]) -> torch.Tensor:
    """Returns the ten numbers of a block of these words, where all pairs at edges have the same further words."""

    def given(key: Any, counter: Any, n0: Any, n1: Any, n2: Any) -> Any:
        own = more if int(getattr(n0, "value", n0)) else words
        return [counter * 0 + word for word in own]

    monkeypatch.setattr(kernels, "keystream", given)
    return drawn(bytes(32), 10)


@interpreted
@pytest.mark.parametrize("low", [0, 1, 2**32 - 1])
@pytest.mark.parametrize(
    "high", [0, 2**11, 2**12 - 1, 2**12, 2**31 - 1, 2**31, 2**32 - 2**12, 2**32 - 1]
)
def test_words_of_every_kind_are_within_the_stated_error(monkeypatch, low, high):
    """Next to the edges, to sqrt(1/2), and to the quarters of a turn."""
    turns = [0, 1, 2**29, 2**29 - 1, 2**30, 2**31, 2**32 - 1, 3 * 2**30 + 2**29]
    for start in (0, 3):
        words = [w for turn in turns[start : start + 5] for w in (low, high, turn)] + [0]
        more = [7, 0, 5, 2**31, 9, 2**32 - 1] + [0] * 10
        values, radii = ideal(words, lambda pair, more=more: more)
        found = of_words(monkeypatch, words, more)
        assert (np.abs(found.numpy() - values) <= 2.0**-20 * np.array(radii)).all()


@interpreted
@pytest.mark.parametrize("zeros", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("v", [0, 2**64 - 1])
def test_what_is_drawn_beyond_64_bits_counts(monkeypatch, zeros, v):
    """V, or 1 - V, down to 2^-205, below which it is with probability 2^-204."""
    more = [*[0] * zeros, *[2**31 + 12345] * (6 - zeros), *[0] * 10]
    more = [more[place] for place in (1, 0, 3, 2, 5, 4)] + [
        0
    ] * 10  # the highest word is the second
    words = [w for turn in range(5) for w in (v % 2**32, v >> 32, turn % 4 * 2**30 + 99)] + [0]
    values, radii = ideal(words, lambda pair: more)
    assert (radii[0] > 9.4) if v == 0 else (radii[0] < 2.0**-31)
    found = of_words(monkeypatch, words, more)
    assert (np.abs(found.numpy() - values) <= 2.0**-20 * np.array(radii)).all()


@interpreted
def test_pairs_at_edges_have_further_bits_of_their_own(monkeypatch):
    words = [w for turn in range(5) for w in (0, 0, turn % 4 * 2**30 + 99)] + [0]

    def more(pair: int) -> list[int]:
        return [pair * 2**28 + 5] * 16

    def given(key: Any, counter: Any, n0: Any, n1: Any, n2: Any) -> Any:
        pair = int(getattr(n0, "value", n0))
        return [counter * 0 + word for word in (more(pair) if pair else words)]

    values, radii = ideal(words, more)
    assert len(set(radii)) == 5
    monkeypatch.setattr(kernels, "keystream", given)
    found = drawn(bytes(32), 10)
    assert (np.abs(found.numpy() - values) <= 2.0**-20 * np.array(radii)).all()


@interpreted
def test_a_kernel_without_further_bits_is_caught(monkeypatch):
    def dull(key: Any, counter: Any, pair: Any, label: Any, n: Any) -> Any:
        return tl.sqrt_rn(
            kernels._log(n.to(tl.float32) * 2.0**-64, 1.0 - n.to(tl.float32) * 2.0**-64) * -2.0
        )

    monkeypatch.setattr(kernels, "_refined", dull)
    with pytest.raises(AssertionError):
        test_what_is_drawn_beyond_64_bits_counts(monkeypatch, 1, 0)
    with pytest.raises(AssertionError):
        test_the_tail_of_the_kernel_is_reached_in_small_steps(92188, "middle")


@pytest.mark.cases(1, 2)
@pytest.mark.parametrize("scale", [1e-28, 0.37, 3e29])
def test_a_scale_multiplies_the_numbers(scale):
    key = os.urandom(32)
    values, radii = expected(key, 10)
    assert (np.abs(drawn(key, 10, scale).numpy() / scale - values) <= 2.0**-20 * radii).all()


@pytest.mark.real_entropy
def test_noise_of_the_kernel_has_the_law_of_the_gaussian(here):
    """Of fresh keys; false-alarm rate 6e-6."""
    values = normal_(torch.empty(81_920, device=DEVICE).view(-1, 2).t(), 3.0, Keystream())
    assert here == [81_920]
    scaled = values.cpu().double().flatten().numpy() / 3.0
    assert stats.kstest(scaled, "norm").pvalue > FALSE_ALARM
    low, high = stats.chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], len(scaled))
    assert low < (scaled**2).sum() < high
    assert abs(scaled.mean()) < stats.norm.isf(FALSE_ALARM / 2) / math.sqrt(len(scaled))
    cells = np.histogram(stats.norm.cdf(scaled), bins=500, range=(0, 1))[0]
    assert stats.chisquare(cells).pvalue > FALSE_ALARM
    tail = int((np.abs(scaled) > 3.5).sum())
    law = stats.binom(len(scaled), 2 * stats.norm.sf(3.5))
    assert min(law.cdf(tail), law.sf(tail - 1)) > FALSE_ALARM / 2


@pytest.mark.real_entropy
def test_numbers_of_one_block_are_independent(wide):
    """Cosines and sines of one pair, and of two pairs of a block, by cells and squares; false-alarm rate 6e-6."""
    values = drawn(os.urandom(32), 81_920).numpy().reshape(10, -1)
    for one, other in ((0, 5), (0, 1), (4, 8)):
        first, second = stats.norm.cdf(values[one]), stats.norm.cdf(values[other])
        cells = np.histogram2d(first, second, bins=8, range=[[0, 1], [0, 1]])[0].ravel()
        assert stats.chisquare(cells).pvalue > FALSE_ALARM
        assert stats.pearsonr(values[one] ** 2, values[other] ** 2).pvalue > FALSE_ALARM


@interpreted
def test_no_two_blocks_have_one_counter_and_one_nonce(monkeypatch):
    """Where every pair is at an edge."""
    monkeypatch.setattr(on_device, "LANES", 16)
    seen: list[tuple[int, ...]] = []

    def noted(key: Any, counter: Any, n0: Any, n1: Any, n2: Any) -> Any:
        nonce = [int(getattr(n, "value", n)) for n in (n0, n1, n2)]
        seen.extend((lane, *nonce) for lane in counter.handle.data.tolist())
        return [counter * 0] * 16

    monkeypatch.setattr(kernels, "keystream", noted)
    parts = [
        torch.zeros(n, device=DEVICE) for n in (321, 7)
    ]  # of 33 blocks, three programs; of one
    monkeypatch.setattr(on_device, "status", lambda device: on_device.IN_USE)
    on_device.add_normal_(parts, 1.0, Keystream())
    assert len(seen) == len(set(seen)) == 4 * 16 * 6


# -- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.real_entropy
def test_no_release_repeats_the_noise_of_another(here):
    numbers = [
        normal_(torch.empty(4, 500, device=DEVICE).t(), 1.0, Keystream()) for _ in range(2)
    ]
    both = torch.cat(numbers).cpu().double().flatten()
    assert len(both.unique()) >= len(both) - 4
    assert abs(stats.pearsonr(*both.view(2, -1).numpy()).statistic) < 0.2


def test_a_slice_is_drawn_by_the_key_of_all_ranks_under_labels_of_its_own(here):
    """And only once: the key goes to the device, which has the same labels for it each time."""
    key = os.urandom(32)
    bits = SliceStream(3)
    bits.key.copy_(torch.tensor(list(key)))
    outs = [torch.zeros(size, device=DEVICE) for size in (25, 7)]
    add_normals_(outs, 2.0, bits)
    for place, out in enumerate(outs):
        expected = torch.zeros_like(out)
        on_device.draw(expected, 2.0 * (1.0 + 2.0**-22), ints(key), (3 << 20) + place)
        assert torch.equal(out, expected)
    assert here[:2] == [25, 7]
    with pytest.raises(ValueError, match="broadcast"):
        add_normals_(outs, 2.0, bits)


@pytest.mark.parametrize("fails", [False, True])
def test_keys_are_overwritten(monkeypatch, fails):
    """On the device and on the host, even where the kernel ends with an error."""
    source, keys = Given(bytes(range(1, 33))), []

    def noted(out: torch.Tensor, scale: float, key: torch.Tensor, label: int) -> None:
        assert key.cpu().numpy().tobytes() == source.key
        keys.append(key)
        if fails:
            raise RuntimeError("the device is gone")

    assert on_device.status(DEVICE) == "in use"
    monkeypatch.setattr(on_device, "draw", noted)
    out = torch.zeros(7, device=DEVICE)
    if fails:
        with pytest.raises(RuntimeError, match="the device is gone"):
            on_device.add_normal_([out], 1.0, source)
    else:
        assert on_device.add_normal_([out], 1.0, source)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    assert len(keys) == len(source.memory) == 1
    assert not keys[0].any()
    assert not source.memory[0].any()


def test_a_standard_deviation_is_not_rounded_down_on_its_way_to_the_kernel(monkeypatch):
    scales: list[float] = []
    assert on_device.status(DEVICE) == "in use"
    monkeypatch.setattr(on_device, "draw", lambda out, scale, *_: scales.append(scale))
    stds = [1.0, 0.1, 1.0 + 2.0**-26, 3e-29, 1 / 3, 2.0**99]
    for std in stds:
        on_device.add_normal_([torch.zeros(1, device=DEVICE)], std, Given(bytes(32)))
    for std, scale in zip(stds, scales, strict=True):
        assert std <= float(np.float32(scale)) <= std * (1.0 + 2.0**-21)


def test_each_tensor_of_a_key_and_each_piece_has_its_own_nonce(monkeypatch):
    source, seen = Given(os.urandom(32)), []
    assert on_device.status(DEVICE) == "in use"
    monkeypatch.setattr(on_device, "_MOST", 5)
    monkeypatch.setattr(
        on_device, "draw", lambda out, scale, key, label: seen.append((len(out), label))
    )
    on_device.add_normal_([torch.zeros(n, device=DEVICE) for n in (12, 5, 3)], 1.0, source)
    assert seen == [(5, 0), (5, 1), (2, 2), (5, 3), (3, 4)]
    assert len(source.memory) == 1


def test_labels_change_the_noise_of_a_key():
    key, numbers = os.urandom(32), []
    for label in (0, 7):
        out = torch.zeros(100, device=DEVICE)
        on_device.draw(out, 1.0, ints(key), label)
        numbers.append(out.cpu().double().numpy())
    values, radii = expected(key, 100, 7)
    assert (np.abs(numbers[1] - values) <= 2.0**-20 * radii).all()
    assert abs(stats.pearsonr(*numbers).statistic) < 0.55  # false-alarm rate below 1e-8


@pytest.mark.real_entropy
def test_keys_fill_the_memory_that_they_are_given():
    first, second = np.zeros(8, np.int32), np.zeros(8, np.int32)
    for memory in (first, second):
        Keystream().fill(memory.data)
        assert np.count_nonzero(memory) >= 6  # false-alarm rate 1e-27
    assert first.tobytes() != second.tobytes()


def test_a_key_that_is_not_whole_is_refused(monkeypatch):
    monkeypatch.setattr("builtins.open", lambda *_, **__: io.BytesIO(b"too few"))
    with pytest.raises(OSError, match="too few bytes: no noise was drawn"):
        Keystream().fill(np.zeros(8, np.int32).data)


# -- when it is used --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", ["whole", "scalar", "none", "turned", "gaps", "column"])
def test_tensors_of_any_shape_and_stride_get_noise(here, cut):
    """At their own numbers only."""
    base = torch.full((6, 80), 100.0, device=DEVICE)
    views = {"whole": base, "scalar": base[2, 3], "none": base[:0], "turned": base.t()}
    views |= {"gaps": base[:, ::2], "column": base[:, 5]}
    out = views[cut]
    assert add_normal_(out, 1.0, Keystream()) is out
    assert here == [out.numel()]
    moved = (base != 100.0).sum()
    assert int(moved) == int((out != 100.0).sum()) >= 0.98 * out.numel()
    assert bool(((out - 100.0).abs() < 20.0).all())
    assert len(out.reshape(-1).unique()) >= 0.9 * out.numel()


@pytest.mark.parametrize("other", ["stream", "generator", "float64", "tiny", "huge", "device"])
def test_other_noise_comes_from_the_host(here, monkeypatch, other):
    """What must be the same on every device, or has more bits than float32."""
    source: Any = Counted(seeded(1)) if other == "stream" else Keystream()
    if other == "generator":
        source = torch.Generator().manual_seed(1)
    if other == "device":
        monkeypatch.setattr(native, "DEVICES", ())
    std = {"tiny": 2.0**-101, "huge": 2.0**101}.get(other, 1.0)
    real = torch.float64 if other == "float64" else torch.float32
    out = torch.zeros(2, 50, dtype=real, device=DEVICE)
    add_normal_(out, std, source)
    assert here == []
    assert len(out.unique()) > 90


def test_memory_that_is_given_back_holds_no_noise(here, monkeypatch):
    """The copy of a tensor whose numbers do not lie side by side."""
    held: list[torch.Tensor] = []
    known = acts.act("noise.on_device")

    def noted(parts: list[torch.Tensor], std: float, keys: Any) -> bool:
        held.extend(parts)
        return bool(known(parts, std, keys))

    monkeypatch.setitem(acts._KNOWN, "noise.on_device", noted)
    out = torch.empty(30, 20, device=DEVICE).t()
    normal_(out, 1.0, Keystream())
    assert len(held) == 1
    assert not held[0].any()
    assert bool((out != 0).all())


@pytest.mark.parametrize("wrong", ["numbers", "missing", "broken", "off"])
def test_a_kernel_of_other_numbers_is_not_used(monkeypatch, wrong):
    on_device.status.cache_clear()
    if wrong == "numbers":
        answers = (*on_device._ANSWERS[:9], on_device._ANSWERS[9] + 1e-5)
        monkeypatch.setattr(on_device, "_ANSWERS", answers)
        said = "its numbers are wrong"
    elif wrong == "missing":
        monkeypatch.setitem(sys.modules, "torch_dpsco.fast.kernels", None)
        said = "the kernel raised ModuleNotFoundError"
    elif wrong == "off":
        monkeypatch.setenv("TORCH_DPSCO_NATIVE", "off")
        said = "off (TORCH_DPSCO_NATIVE=off)"
    else:
        monkeypatch.setattr(on_device, "_tried", lambda device: math.nan)
        said = "its numbers are wrong"
    assert said in on_device.status(DEVICE)
    monkeypatch.setattr(native, "DEVICES", (DEVICE.type,))
    out = torch.zeros(20, 30, device=DEVICE).t()
    assert not on_device.add_normal_([out], 1.0, Keystream())
    add_normal_(out, 1.0, Keystream())
    assert len(out.flatten().unique()) > 590
    on_device.status.cache_clear()


def test_a_release_of_a_large_sum_takes_its_noise_where_it_lies(here, monkeypatch):
    """And its event, noise and answer are those of the host."""
    monkeypatch.setattr(native, "_found", lambda: (None, "off"))
    monkeypatch.setattr(native, "have_kernels", lambda devices: False)
    monkeypatch.setattr(rows_on_device, "usable", lambda device: False)
    keys: list[Any] = []
    fill = Keystream.fill
    monkeypatch.setattr(
        Keystream, "fill", lambda s, memory: (keys.append(memory), fill(s, memory))
    )
    rows = [
        torch.full((4, 33_000), 1e-3, device=DEVICE),
        torch.zeros(4, 5, device=DEVICE),
        torch.zeros(4, 32_769, device=DEVICE),
    ]
    events = []
    for on in (True, False):
        monkeypatch.setattr(native, "DEVICES", (DEVICE.type,) if on else ())
        oracle = Clipped(1.0, 2.0, 4)
        oracle.open([part[0] for part in rows])
        oracle.observe(GradBatch([DenseBlock(*rows)]))
        events.append((oracle.event(), oracle.noise_std, oracle.sensitivity("add_remove")))
        mean = oracle.release(Keystream()).mean[0].cpu().double().numpy()
        assert stats.kstest((mean - 1e-3) / oracle.noise_std, "norm").pvalue > FALSE_ALARM
    assert events[0] == events[1]
    assert here[-2:] == [33_000, 32_769]
    assert len(keys) == len(here) - 1  # one for both


def test_noise_is_not_captured_in_a_graph(here, monkeypatch):
    """A test of it on CUDA is in tests/test_cuda.py."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    out = torch.zeros(3, 5, device=DEVICE).t()
    with pytest.raises(PrivacyError, match="must not be captured in a CUDA graph"):
        add_normal_(out, 1.0, Keystream())
    assert not out.any()


# -- the code that a device runs --------------------------------------------------------------------------------------

COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from torch_dpsco.fast.kernels import add_gaussians
types = {"out": "*fp32", "n": "i32", "scale": "fp32", "key": "*i32", "label": "i32", "LANES": "constexpr"}
source = ASTSource(add_gaussians, signature=types, constexprs={"LANES": 128})
print(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"])
"""


@pytest.mark.slow
def test_the_kernel_is_compiled_for_cuda_with_rounded_arithmetic_only(tmp_path: Path):
    """No approximate function, no flushing to zero, and no memory of a thread's own, where keystream might be left."""
    place = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    code = subprocess.run(
        [sys.executable, "-c", COMPILED],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | place,
    ).stdout
    assert {"div.rn.f32", "sqrt.rn.f32", "cvt.rn.f32.u64"} <= set(code.split())
    for word in ("approx", ".ftz", "div.full", "st.local", "sin.", "cos.", "lg2."):
        assert word not in code
