"""fastDP as a peer: run by `peers.py` with the interpreter of an environment that has fastDP, torch and numpy.

fastDP (awslabs/fast-differential-privacy) is installed from its sources; it is not on PyPI. It runs as its README says,
with clipping mode "MixOpt" and the clipping function of Abadi et al., which is the others'.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable

import numpy as np
import torch
from cases import Case, cases
from fastDP import PrivacyEngine
from torch import nn


def private_step(
    case: Case, path: str, setting: dict[str, float]
) -> tuple[nn.Module, Callable[[], None]]:
    """Returns a model with the weights in the file, and a step."""
    model = case.build()
    with np.load(path) as arrays, torch.no_grad():
        for k, p in enumerate(model.parameters()):
            p.copy_(torch.from_numpy(arrays[f"p{k}"]))
        inputs, targets = (torch.from_numpy(arrays[name]) for name in ("inputs", "targets"))
    optimizer = torch.optim.SGD(model.parameters(), lr=setting["lr"])
    engine = PrivacyEngine(
        model,
        batch_size=len(inputs),
        sample_size=100 * len(inputs),
        epochs=1,
        max_grad_norm=setting["clip"],
        noise_multiplier=setting["noise_multiplier"],
        clipping_mode="MixOpt",
        clipping_fn="Abadi",
        loss_reduction="mean",
    )
    engine.attach(optimizer)

    def step() -> None:
        case.loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def flat(model: nn.Module) -> np.ndarray:
    return torch.cat([p.detach().double().flatten() for p in model.parameters()]).numpy()


def main() -> None:
    out, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    known = {case.name: case for smoke in (False, True) for case in cases(smoke=smoke)}
    model, step, lr = nn.Module(), lambda: None, 1.0

    def answer(**found: object) -> None:
        print(json.dumps(found), file=out, flush=True)

    answer(versions=f"fastDP, torch {torch.__version__}")
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "prepare":
            model, step = private_step(
                known[request["case"]], request["path"], request["setting"]
            )
            lr = request["setting"]["lr"]
            answer()
        elif request["do"] == "time":
            step()  # warms caches
            start = time.process_time()
            for _ in range(request["repeats"]):
                step()
            answer(seconds=(time.process_time() - start) / request["repeats"])
        else:
            before = flat(model)
            step()
            np.save(request["path"], (before - flat(model)) / lr)
            answer()


if __name__ == "__main__":
    main()
