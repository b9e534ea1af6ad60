"""Random masks of a model's forward that nobody knows, whatever was drawn before.

After `torch.manual_seed` the masks of a dropout layer are known, and those of a record depend on how many numbers were
drawn before: for the rows before it, and in earlier steps. Where batches come in several sizes that is private, so that
one record more would move all others. So forwards of such models draw from a state of torch's generator (a Mersenne
Twister) that is fresh from the system's randomness for each of them, and the state of before is put back.
"""

from __future__ import annotations

import secrets

import numpy as np
import torch
from torch import Tensor

_WORDS = 624
_START = 24  # bytes before them
_SEED = 5489


def secret_state() -> Tensor:
    """Returns a state for `torch.set_rng_state` with 19,968 random bits.

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
