"""Libraries that live in environments of their own: one process each, that takes its turns in the rounds of the others.

    python benchmarks/performance.py --python-jax ENV/bin/python      # jax, jax-privacy
    python benchmarks/performance.py --python-fastdp ENV/bin/python   # fastDP and torch

or the environment variables TORCH_DPSCO_PYTHON_JAX and TORCH_DPSCO_PYTHON_FASTDP. The interpreter runs
`peer_<name>.py`, which reads a request a line (JSON) from its standard input and answers a line: CPU seconds of a step
in its own process, or the update that a step made. Models, weights and batches are the same (`cases.py`); a peer gets
the weights in a file. A peer that is absent or does not start is said to be not installed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cases import Case
from timing import Slot
from torch import Tensor
from variants import Setting

__all__ = ["PEERS", "Peer", "add_options", "started"]

PEERS: dict[str, tuple[str, ...]] = {  # variants of each; those marked * are not private
    "jax": ("jax*", "jax-privacy"),
    "fastdp": ("fastDP",),
}
ENVIRONMENT = "TORCH_DPSCO_PYTHON_{}"


class Peer:
    """A process of another library.

    Args:
        name: of PEERS.
        python: interpreter of its environment.
        folder: for files that are exchanged.

    Raises:
        OSError: the interpreter does not start, or it has not what the peer needs.
    """

    def __init__(self, name: str, python: str, folder: Path) -> None:
        self.name, self.variants, self._folder = name, PEERS[name], folder
        self.private_variants = [
            variant for variant in self.variants if not variant.endswith("*")
        ]
        script = Path(__file__).with_name(f"peer_{name}.py")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
        self._process = subprocess.Popen(
            [python, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        try:
            self.versions: str = self._read()["versions"]
        except OSError:
            self.close()
            raise

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise OSError(f"the process of {self.name} ended")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise OSError(f"{self.name}: {answer['error']}")
        return answer

    def ask(self, **request: Any) -> dict[str, Any]:
        """Sends a request and returns the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def prepare(self, case: Case, variant: str, setting: Setting) -> None:
        """Hands a case over: weights and batch in a file."""
        path = self._folder / "case.npz"
        arrays = {f"p{k}": p.detach().numpy() for k, p in enumerate(case.model().parameters())}
        np.savez(path, inputs=case.batch[0].numpy(), targets=case.batch[1].numpy(), **arrays)
        self.ask(
            do="prepare",
            case=case.name,
            variant=variant,
            path=str(path),
            setting=asdict(setting),
        )

    def slot(self, case: Case, variant: str, setting: Setting) -> Slot:
        """Returns turns of a variant of the peer."""
        self.prepare(case, variant, setting)
        key = {"case": case.name, "variant": variant}
        return Slot(
            lambda repeats: float(self.ask(do="time", repeats=repeats, **key)["seconds"])
        )

    def update(self, case: Case, variant: str, setting: Setting) -> Tensor:
        """Returns (parameters before - after) / lr of one step, flat, in the layout and order of the torch model."""
        self.prepare(case, variant, setting)
        path = self._folder / "update.npy"
        self.ask(do="update", case=case.name, variant=variant, path=str(path))
        return torch.from_numpy(np.load(path)).double()

    def close(self) -> None:
        """Ends the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that name interpreters."""
    for name in PEERS:
        variable = ENVIRONMENT.format(name.upper())
        parser.add_argument(
            f"--python-{name}",
            default=os.environ.get(variable, ""),
            help=f"interpreter with {name}; or {variable}",
        )


@contextmanager
def started(args: argparse.Namespace) -> Iterator[Sequence[Peer]]:
    """Starts the peers that are there, and ends them."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        found = []
        for name in PEERS:
            python = getattr(args, f"python_{name}")
            if not python:
                continue
            try:
                peer = Peer(name, python, Path(folder))
            except OSError as error:
                print(f"{name} is left out: {error}")
                continue
            stack.callback(peer.close)
            found.append(peer)
        yield found
