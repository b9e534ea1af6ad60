"""The private part of an optimizer's state dict: versioned, and tied to the mechanism by a digest."""

from __future__ import annotations

import hashlib
import json
from typing import Any

__all__ = ["add_private_state", "split_private_state"]

_KEY = "dpsco"
_VERSION = 1


def _digest(settings: list[Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def add_private_state(state: dict[str, Any], settings: list[Any], private: dict[str, Any]) -> dict[str, Any]:
    """Returns a torch optimizer's state dict with the private part added.

    Args:
        state: of `torch.optim.Optimizer.state_dict`.
        settings: public constants that fix the mechanism, JSON-codable.
        private: tensors and primitives.
    """
    return {**state, _KEY: {"version": _VERSION, "digest": _digest(settings), **private}}


def split_private_state(state: dict[str, Any], settings: list[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (torch's part, private part) of a state dict.

    Raises:
        ValueError: no private part, another version, or a mechanism with other settings.
    """
    private = state.get(_KEY)
    if private is None or private.get("version") != _VERSION:
        raise ValueError(f"state_dict must be a private optimizer's, version {_VERSION} (got {sorted(state)})")
    if private["digest"] != _digest(settings):
        raise ValueError("state_dict must be of the same plan: noise, clip, sampling, rule or schedule differ")
    return {key: value for key, value in state.items() if key != _KEY}, private
