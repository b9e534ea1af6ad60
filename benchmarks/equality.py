"""Whether the variants that are timed do the same work: without noise all must make the same update.

    python benchmarks/equality.py            # a few seconds
    python benchmarks/equality.py --smoke

The clip is the median norm of the per-sample gradients, so that half of the records are clipped. The reference forms
them by torch.func (vmap of grad) in double precision. The ways of `defaults.py` draw from a data set that is the batch,
at rate 1, with the loaders that they have. A figure is |update - reference| / |reference|. It is not 0:
Opacus adds 1e-6 to norms, and ours enlarges both factors of a norm by the worst-case error of float32, 2^-14 each, so
that a clipped row is up to 1.23e-4 shorter than its clip. More than 1.5e-4 is an error.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence

import torch
from cases import Case, cases, everyday
from defaults import WAYS
from peers import Peer, add_options, started
from timing import table
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import TensorDataset
from variants import CAN_COMPILE, VARIANTS, Setting, compiled_step, fit

TOLERANCE = 1.5e-4
PIECE = 16  # per-sample gradients that the reference holds at once


def per_sample_gradients(case: Case, model: nn.Module) -> list[Tensor]:
    """Returns flat double-precision gradients of the records, in pieces (PIECE, number of parameters)."""
    model = copy.deepcopy(model).double()
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    inputs, targets = case.batch

    def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return case.loss(functional_call(model, values, (x[None],)), y[None])

    each = vmap(grad(loss), in_dims=(None, 0, 0))
    pieces = []
    batch = [part.double() if part.is_floating_point() else part for part in (inputs, targets)]
    for x, y in zip(*(part.split(PIECE) for part in batch), strict=True):
        found = each({name: p.detach() for name, p in params.items()}, x, y)
        pieces.append(torch.cat([g.flatten(1) for g in found.values()], dim=1))
    return pieces


def clip_and_reference(case: Case, model: nn.Module) -> tuple[float, Tensor]:
    """Returns the median norm, and the mean of the gradients clipped at it."""
    pieces = per_sample_gradients(case, model)
    clip = float(torch.cat([piece.norm(dim=1) for piece in pieces]).median())
    total = sum((clip / piece.norm(dim=1)).clamp(max=1.0) @ piece for piece in pieces)
    return clip, total / len(case.batch[0])


def update(case: Case, variant: str, setting: Setting) -> Tensor:
    """Returns the parameters before the step minus those after it, flat, over lr."""
    model = case.model()
    before = flat(model)
    if variant == "fit":
        fit(case, model, setting, 1)
    elif variant == "vectorized":  # what is compiled
        compiled_step(case, model, setting, backend=None)()
    else:
        VARIANTS[variant](case, model, setting)()
    return (before - flat(model)) / setting.lr


def default_update(case: Case, name: str, setting: Setting) -> Tensor:
    """Returns the same of a way of `defaults.py`, on a data set of which every record is drawn."""
    model = case.model()
    before = flat(model)
    next(WAYS[name].start(case, model, TensorDataset(*case.batch), setting, 1))
    return (before - flat(model)) / setting.lr


def default_errors(case: Case) -> dict[str, float]:
    """Returns the relative error of each private way whose noise is given."""
    clip, reference = clip_and_reference(case, case.model())
    setting = Setting(clip=clip, noise_multiplier=0.0, lr=0.1)
    noisy = ("plain", "DataLoader", "make_private")  # the last gets a budget
    names = [name for name, way in WAYS.items() if name not in noisy and way.suits(case)]
    updates = {name: default_update(case, name, setting) for name in names}
    return {
        name: float((own - reference).norm() / reference.norm()) for name, own in updates.items()
    }


def flat(model: nn.Module) -> Tensor:
    return torch.cat(
        [p.detach().double().flatten() for p in model.parameters() if p.requires_grad]
    )


def errors(case: Case, peers: Sequence[Peer] = ()) -> dict[str, float]:
    """Returns the relative error of each variant; peers say it of themselves."""
    clip, reference = clip_and_reference(case, case.model())
    setting = Setting(clip=clip, noise_multiplier=0.0, lr=0.1)
    names = (
        [name for name in VARIANTS if name != "plain"] + ["fit"] + ["vectorized"] * CAN_COMPILE
    )
    found = {name: update(case, name, setting) for name in names}
    for peer in peers:
        for name in peer.private_variants:
            found[name] = peer.update(case, name, setting)
    return {
        name: float((own - reference).norm() / reference.norm()) for name, own in found.items()
    }


def tables(*, smoke: bool, peers: Sequence[Peer] = ()) -> dict[str, str]:
    """Returns the tables "equality" and "equality-modes"; raises AssertionError if a variant makes another update."""
    nets = [case for case in everyday(smoke=smoke) if not case.name.startswith("GPT-2")]
    return {
        "equality": checked({case.name: default_errors(case) for case in few(nets)}),
        "equality-modes": checked(
            {case.name: errors(case, peers) for case in few(cases(smoke=smoke))}
        ),
    }


def checked(found: dict[str, dict[str, float]]) -> str:
    """Returns a table of errors, none of which may be above the tolerance."""
    wrong = [
        (case, name, e)
        for case, line in found.items()
        for name, e in line.items()
        if not e <= TOLERANCE
    ]
    if wrong:
        raise AssertionError(f"these do other work than the reference: {wrong}")
    names = list(dict.fromkeys(name for line in found.values() for name in line))
    rows = [
        [case, *(f"{line[name]:.0e}" if name in line else "-" for name in names)]
        for case, line in found.items()
    ]
    return table(["case", *names], rows)


def few(chosen: Sequence[Case]) -> list[Case]:
    """Returns a case of each kind: what is equal at one size is equal at the others."""
    skipped = ("100/", "10000/", "1000/4096")
    return [case for case in chosen if not case.name.split()[-1].startswith(skipped)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="small models")
    add_options(parser)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    with started(args) as peers:
        print(*tables(smoke=args.smoke, peers=peers).values(), sep="\n\n")


if __name__ == "__main__":
    main()
