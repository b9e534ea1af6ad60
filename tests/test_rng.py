from __future__ import annotations

import numpy as np
import pytest
import torch

from torch_dpsco.accounting.designs import Poisson
from torch_dpsco.errors import UtilityWarning
from torch_dpsco.rng import noise_generator, sampling_generator
from torch_dpsco.sampling import PoissonSampler

pytestmark = pytest.mark.real_entropy
WORDS, OFFSET = 624, 24  # the generator of the CPU: 624 words in fields of 8 bytes


def words_of(generator: torch.Generator) -> np.ndarray:
    state = generator.get_state().numpy()
    return state[OFFSET : OFFSET + 8 * WORDS].copy().view(np.uint64)


def draw(generator: torch.Generator, size: int = 8) -> list[float]:
    return torch.empty(size, dtype=torch.float64).normal_(generator=generator).tolist()


def batches(sampler: PoissonSampler) -> list[list[int]]:
    return [indices.tolist() for _, indices in sampler.draws()]


def test_cpu_noise_generator_uses_every_state_word():
    """The words drawn from the operating system are the state of the Mersenne Twister, and all of them matter."""
    generator = noise_generator()
    words = words_of(generator)
    twister = np.random.MT19937()
    twister.state = {"bit_generator": "MT19937", "state": {"key": words.astype(np.uint32), "pos": WORDS}}
    expected = twister.random_raw(3 * WORDS) % 2**16
    assert torch.randint(2**16, (3 * WORDS,), generator=generator).tolist() == expected.tolist()


def test_every_state_word_is_the_operating_systems(monkeypatch):
    drawn: list[bytes] = []
    monkeypatch.setattr(
        "torch_dpsco.rng._random_bytes", lambda size: drawn.append(np.random.default_rng(size).bytes(size)) or drawn[-1]
    )
    generator = noise_generator()
    [words] = [block for block in drawn if len(block) == 4 * WORDS]
    assert words_of(generator).tolist() == np.frombuffer(words, dtype=np.uint32).tolist()


def test_every_bit_of_the_state_is_drawn_anew():
    """False alarm 1e-9: each of 19,968 bits stays at one value over 48 draws with probability 2^-47."""
    drawn = np.stack([words_of(noise_generator()) for _ in range(48)])
    assert (drawn < 2**32).all()
    bits = np.unpackbits(drawn.astype(np.uint32).view(np.uint8).reshape(48, -1), axis=1)
    assert bits.shape[1] == 32 * WORDS == 19_968
    assert bits.any(axis=0).all()
    assert not bits.all(axis=0).any()


def test_manual_seed_keeps_32_bits_and_noise_generators_keep_more():
    """Why seeds are not used: s and s + 2^32 give one stream, so that noise could be enumerated."""
    first, second = (torch.Generator().manual_seed(seed) for seed in (7, 7 + 2**32))
    assert draw(first) == draw(second)
    streams = [tuple(draw(noise_generator())) for _ in range(20)]
    assert len(set(streams)) == 20
    assert len({noise_generator().initial_seed() for _ in range(20)}) == 20


def test_no_seed_reproduces_a_noise_generator():
    """The words are independent of the seed that the generator reports."""
    generator = noise_generator()
    assert draw(torch.Generator().manual_seed(generator.initial_seed())) != draw(generator)


def test_noise_does_not_follow_global_seeds_nor_disturb_global_streams():
    noises, draws = [], []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002
        noises.append(draw(noise_generator()))
        draws.append(batches(PoissonSampler(Poisson(50, 1000))))
        after = torch.rand(3).tolist(), np.random.random(3).tolist()  # noqa: NPY002
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    assert noises[0] != noises[1]
    assert draws[0] != draws[1]
    assert after == (torch.rand(3).tolist(), np.random.random(3).tolist())  # noqa: NPY002


def test_a_generator_of_the_callers_is_used_as_it_is_and_warns():
    own = torch.Generator().manual_seed(3)
    with pytest.warns(UtilityWarning, match="generator= makes the noise repeatable"):
        used = noise_generator("cpu", own)
    assert used is own
    assert draw(used) == draw(torch.Generator().manual_seed(3))


def test_a_generator_on_another_device_is_refused():
    with pytest.raises(ValueError, match=r"generator must be on meta, where the parameters are \(got cpu\)"):
        noise_generator("meta", torch.Generator())


def test_a_device_may_be_named_or_given():
    for device in ("cpu", torch.device("cpu"), "cpu:0"):
        assert noise_generator(device).device.type == "cpu"


def test_batches_repeat_only_with_a_seed_and_that_warns():
    fresh = [sampling_generator().integers(2**63, size=4).tolist() for _ in range(2)]
    assert fresh[0] != fresh[1]
    seeded = []
    for seed in (5, 5, 5 + 2**32, 5 + 2**64):
        with pytest.warns(UtilityWarning, match="seed= makes the batches repeatable"):
            seeded.append(sampling_generator(seed).integers(2**63, size=4).tolist())
    assert seeded[0] == seeded[1]
    assert len({tuple(s) for s in seeded}) == 3
