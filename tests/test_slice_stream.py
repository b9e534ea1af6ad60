"""The bits of a release that several processes draw in slices: its cipher, its places, its key."""

from __future__ import annotations

import copy
import os
import pickle
from itertools import combinations

import numpy as np
import pytest
import torch
from scipy import stats

from tests.fast.keystream import keystream
from tests.streams import gaussians
from tests.test_native import needed
from torch_dpsco import native
from torch_dpsco.errors import PrivacyError
from torch_dpsco.noise import Keystream, SliceStream
from torch_dpsco.step.exact_noise import discrete_gaussian

FALSE_ALARM = 1e-6
KEY = bytes(range(32))
SIZES = (8, 1, 64, 65, 0, 4096, 72)  # of reads


@pytest.fixture(params=["C", "SHAKE256"])
def each_cipher(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test with the accelerator, and without it."""
    if request.param == "SHAKE256":
        monkeypatch.setattr(native, "_found", lambda: (None, "off"))
    elif not native.is_available():
        pytest.skip(f"the accelerator is {native.status()}")
    return str(request.param)


def stream(rank: int, key: bytes = KEY) -> SliceStream:
    bits = SliceStream(rank)
    bits.key.copy_(torch.tensor(list(key)))
    return bits


def in_c(key: bytes, label: int, kind: int, place: int, blocks: int) -> bytes:
    out = np.zeros(64 * blocks + 64, np.uint8)
    held = torch.tensor(list(key), dtype=torch.uint8)
    native._call("chacha", held, label, kind, place, blocks, out.ctypes.data)
    assert not out[64 * blocks :].any()  # nothing is written beyond
    return out[: 64 * blocks].tobytes()


# -- the cipher -------------------------------------------------------------------------------------------------------


@needed
def test_the_block_in_c_is_that_of_rfc_8439_section_2_3_2() -> None:
    label = int.from_bytes(bytes.fromhex("000000090000004a"), "little")
    assert in_c(KEY, label, 0, 1, 1).hex() == (
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )


@needed
@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("blocks", [1, 7, 8, 9, 64])
@pytest.mark.parametrize("place", [0, 3, 2**32 - 4, 2**32, 5 * 2**32 - 1])
def test_blocks_in_c_are_those_of_the_plain_cipher(kind: int, blocks: int, place: int) -> None:
    """Where the counter ends, the nonce goes on: also in the middle of what is made together."""
    key, label = os.urandom(32), int.from_bytes(os.urandom(7), "little")
    expected = b""
    for here in range(place, place + blocks):
        nonce = (label % 2**32, label >> 32, kind + 2 * (here >> 32))
        counter = np.array([here % 2**32], np.uint32)
        expected += keystream(key, counter, nonce).T.tobytes()
    assert in_c(key, label, kind, place, blocks) == expected


@needed
def test_blocks_in_c_are_those_of_openssl() -> None:
    ciphers = pytest.importorskip("cryptography.hazmat.primitives.ciphers")
    bits = stream(3)
    start = bytes(4) + (3 << 20).to_bytes(8, "little") + b"\1\0\0\0"
    cipher = ciphers.Cipher(ciphers.algorithms.ChaCha20(KEY, start), None)
    assert bits.read(100_003) == cipher.encryptor().update(bytes(100_003))


# -- places -----------------------------------------------------------------------------------------------------------


def test_no_block_of_a_slice_is_drawn_twice(each_cipher: str) -> None:
    """Of one key no read of a rank, and no two ranks, have the same 8 bytes at the start of a block."""
    reads = [bits.read(size) for bits in map(stream, (0, 1, 2, 1019)) for size in SIZES * 2]
    heads = [data[at : at + 8] for data in reads for at in range(0, len(data) - 7, 64)]
    assert [len(data) for data in reads] == list(SIZES * 8)
    assert len(heads) == len(set(heads)) > 4 * 64


@needed
def test_a_stream_that_begins_again_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    chacha = native.chacha
    monkeypatch.setattr(
        native, "chacha", lambda key, label, place, blocks: chacha(key, label, 0, blocks)
    )
    with pytest.raises(AssertionError):
        test_no_block_of_a_slice_is_drawn_twice("C")


@pytest.mark.parametrize("ranks", list(combinations((0, 1, 2, 255, 1019), 2)))
def test_ranks_have_nonces_of_their_own_on_hosts_and_devices(ranks: tuple[int, int]) -> None:
    """A device takes a label for each 2^30 numbers, 2^20 on a rank, and 0 for the last word; a host has odd ones."""
    first, second = (SliceStream(rank).label for rank in ranks)
    assert second - first >= 2**20
    assert 0 <= first < second < 2**31 - 2**20  # labels of a device are int32


def test_slices_of_a_key_are_independent(each_cipher: str) -> None:
    """Correlations of the slices of three ranks, whose standard deviation is 1/sqrt(n), and their chi-squares."""
    size, key = 40_000, os.urandom(32)
    drawn = torch.stack([gaussians(size, stream(rank, key)) for rank in range(4)])
    products = drawn @ drawn.T / size
    limit = stats.norm.isf(FALSE_ALARM / 2) / size**0.5
    assert float((products - torch.eye(4, dtype=torch.float64)).abs().max()) < 1.5 * limit


def test_exact_noise_of_a_slice_is_a_function_of_key_and_rank(each_cipher: str) -> None:
    one, again, other = (
        discrete_gaussian(3000, 20, stream(rank).read).tolist() for rank in (1, 1, 2)
    )
    assert one == again
    assert sum(a == b for a, b in zip(one, other, strict=True)) < 5


# -- the key ----------------------------------------------------------------------------------------------------------


def test_the_key_of_a_release_is_overwritten(each_cipher: str) -> None:
    """Nothing is drawn after that, by nobody: not by a key of zeros either."""
    bits = stream(0)
    memory = bits.key
    bits.read(64)
    bits.erase()
    assert not memory.any()
    bits.erase()
    with pytest.raises(ValueError, match=r"memory for C must be 32|key must have 32 bytes"):
        bits.read(64)
    with pytest.raises(ValueError, match="broadcast"):
        bits.fill(memoryview(bytearray(32)))


def test_a_device_takes_the_key_away() -> None:
    """Else the same labels could be drawn a second time."""
    bits, memory = stream(1), torch.zeros(8, dtype=torch.int32)
    held = bits.key
    bits.fill(memory.numpy().data)
    assert memory.numpy().tobytes() == KEY
    assert not held.any()
    with pytest.raises(ValueError, match="broadcast"):
        bits.fill(memory.numpy().data)


def test_a_key_is_not_copied_saved_or_shown() -> None:
    bits = stream(1)
    for call in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(PrivacyError, match="must not be copied or saved"):
            call(bits)
    assert all(word not in f"{bits} {bits!r}" for word in ("tensor", "31", "key"))


def test_keys_are_drawn_from_the_operating_system_into_their_memory() -> None:
    keys = [SliceStream(0) for _ in range(3)]
    for bits in keys:
        Keystream().fill(bits.key.numpy().data)
    assert len({bits.key.numpy().tobytes() for bits in keys}) == 3
