"""The private part of an optimizer's state dict: versioned, and tied to the mechanism by a digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import MutableMapping, Sequence
from typing import Any

from torch import Tensor

from torch_dpsco.accounting.book import read_state
from torch_dpsco.errors import PrivacyError
from torch_dpsco.secret import SecretState

_KEY = "dpsco"
_VERSION = 3


def _digest(settings: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def _short(settings: dict[str, Any], name: str) -> str:
    text = repr(settings.get(name))
    return text if len(text) <= 80 else f"{text[:77]}..."


def add_private_state(state: dict[str, Any], settings: dict[str, Any], private: dict[str, Any]) -> dict[str, Any]:
    """Returns a torch optimizer's state dict with the private part added.

    Args:
        state: of `torch.optim.Optimizer.state_dict`.
        settings: public constants that fix the mechanism, JSON-codable.
        private: tensors and primitives.
    """
    fixed = {"version": _VERSION, "settings": settings, "digest": _digest(settings)}
    # PRIVACY: (test_a_state_with_secrets_says_so_by_its_type_and_shows_none)
    kind = SecretState if private["confidential"] else dict
    return kind({**state, _KEY: kind(fixed | private)})


def split_private_state(state: dict[str, Any], settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (torch's part, private part) of a state dict.

    Raises:
        ValueError: no private part, another version, or a mechanism with other settings.
    """
    private = state.get(_KEY)
    if private is None or private.get("version") not in (2, _VERSION):
        raise ValueError(f"state_dict must be a private optimizer's, version 2 or {_VERSION} (got {sorted(state)})")
    if private["digest"] != _digest(settings):
        saved = private["settings"]
        differ = [name for name in sorted({*saved, *settings}) if saved.get(name) != settings.get(name)]
        details = "; ".join(f"{name}: {_short(settings, name)} here, {_short(saved, name)} there" for name in differ)
        raise ValueError(
            f"state_dict must be of the same plan (got another one: {details or 'its digest is wrong'}); make the "
            f"optimizer with the arguments of the saved run"
        )
    return {key: value for key, value in state.items() if key != _KEY}, private


def require_charged(private: dict[str, Any], *, shared: bool) -> None:
    """Raises PrivacyError unless the ledger of a state holds the charges of its steps; see `split_private_state`.

    Args:
        private: private part of the state.
        shared: whether steps share a charge.
    """
    steps, ledger = private["t"], read_state(private["ledger"])
    marked = ledger.releases.get(private.get("run", ""), private.get("since", steps))
    if len(ledger.ledger) < (min(steps, 1) if shared else steps) or marked < steps:
        # PRIVACY: a checkpoint whose ledger was emptied or exchanged (test_steps_without_their_charges_are_refused)
        raise PrivacyError(
            f"state_dict must hold the charges of its {steps} steps (got a ledger of {len(ledger.ledger)} events): "
            f"its ledger was emptied or is another one"
        )


def require_run(private: dict[str, Any]) -> None:
    """Raises ValueError for a state of version 2, which does not name its run."""
    if "run" not in private:
        raise ValueError(f"state_dict must be of version {_VERSION} to be resumed (got {private['version']})")


def restore_averages(state: MutableMapping[Tensor, Any], saved: dict[str, Any], params: Sequence[Tensor]) -> None:
    """Puts the averages back in float64: torch casts what it loads to the dtype of the parameters."""
    for p, index in zip(params, (i for group in saved["param_groups"] for i in group["params"]), strict=True):
        average = saved["state"].get(index, {}).get("average")
        if average is not None:
            state[p]["average"] = average.to(p.device, copy=True)
