"""Peak memory of training at default settings, above data and model, beside plain torch SGD and Opacus.

    python benchmarks/memory.py            # about half a minute
    python benchmarks/memory.py --large    # a model of 124 million parameters, of which few are trained; half an hour
    python benchmarks/memory.py --large --few 60    # the same with a shorter test of sizes; minutes
    python benchmarks/memory.py --smoke

torch's profiler reports every allocation and release of torch's CPU allocator, also those inside of kernels; the peak
of their running sum is taken over the making of optimizer and loader and three steps, in a process of its own for each
way to train (`defaults.py`). So it counts gathered batches, activations, rows, gradients, noise and what a library
keeps between steps; not the model, the data set, the interpreter, or what numpy and the matrix library allocate for
themselves. It is exact, which resident memory is not (its peak counts pages that the allocator keeps, and whatever else
has run in the process); sizes of Poisson batches are random. `fit` is all of `dp.fit`, with its probes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from cases import Case, everyday, fine_tuned, long
from defaults import WAYS, Way
from timing import digits, table
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import Dataset, TensorDataset
from variants import Setting

import torch_dpsco as dp
from torch_dpsco.sampling import loader
from torch_dpsco.trial import sizes

GOAL = 1.25  # times plain, plus one buffer of the size of the parameters
MIB = 2**20
STEPS = 3
os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler reports on its own start otherwise
NAMES = [name for name in WAYS if name != "DataLoader"]
MOST = 50_000_000  # numbers of a data set: "logistic 10000/4096" has more


def peak(run: Callable[[], object]) -> int:
    """Returns the most bytes of torch's CPU allocator that were in use at once, above those in use before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    in_use = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        in_use += event.nbytes()
        most = max(most, in_use)
    return most


def step_peak(case: Case, name: str) -> int:
    """Returns the peak of a few steps of a way to train, with its optimizer and loader."""
    torch.set_num_threads(1)
    model, data = case.model(), TensorDataset(*case.data)

    def run() -> None:
        for _ in (Way(trainer) if name == "PrivateTrainer" else WAYS[name]).start(
            case, model, data, Setting(), STEPS
        ):
            pass

    return peak(run)


def in_own_process(case: Case, variant: str) -> int:
    with multiprocessing.get_context("fork").Pool(1, _take, (case, variant)) as pool:
        return pool.apply(_measure)


_job: list[tuple[Case, str]] = []  # of a process that lives for one job


def _take(case: Case, variant: str) -> None:
    _job[:] = [(case, variant)]


def _measure() -> int:
    return step_peak(*_job[0])


def tables(*, smoke: bool) -> dict[str, str]:
    """Returns the table "memory"."""
    rows = []
    for case in (*long(smoke=smoke), *everyday(smoke=smoke)):
        batch = sum(part.numel() * part.element_size() for part in case.batch)
        if batch // case.size * case.records > 4 * MOST:
            continue
        names = [name for name in NAMES if WAYS[name].suits(case)]
        bytes_of = {name: in_own_process(case, name) for name in names}
        trained = [p for p in case.model().parameters() if p.requires_grad]
        buffer = sum(p.numel() * p.element_size() for p in trained)
        own = (bytes_of["ours, mean"] - buffer) / bytes_of["plain"]
        line = [digits(bytes_of[name] / MIB) if name in names else "-" for name in NAMES]
        sizes = [digits(batch / MIB), digits(buffer / MIB)]
        rows.append([case.name, *sizes, *line, digits(own), f"<= {GOAL}"])
    heads = ["case, MiB", "batch", "parameters", *NAMES, "(ours - parameters) / plain", "goal"]
    return {"memory": table(heads, rows)}


def large(*, smoke: bool, few: int | None = None) -> str:
    """Returns a table of a large model of which few parameters are trained, itself included.

    Args:
        smoke: a small one.
        few: made-up records of the test of sizes; its peak is that of its largest batch, whatever their number.
    """
    rows = []
    names = ["plain", "ours, mean", "make_private", "PrivateTrainer", "Opacus"]
    loader._LARGE = 0 if smoke else loader._LARGE
    sizes._FEWEST = sizes.RECORDS = few or sizes._FEWEST
    for case in fine_tuned(smoke=smoke):
        model = sum(p.numel() * p.element_size() for p in case.model().parameters())
        bytes_of = {name: in_own_process(case, name) for name in names}
        ratios = [(model + bytes_of[name]) / (model + bytes_of["plain"]) for name in names[1:]]
        line = [digits(bytes_of[name] / MIB) for name in names]
        rows.append([case.name, digits(model / MIB), *line, *map(digits, ratios)])
    heads = ["case, MiB", "model", *names, *(f"{name}, with the model" for name in names[1:])]
    return table(heads, rows)


class _Named(Dataset[Any]):
    """Records as a Trainer takes them."""

    def __init__(self, data: TensorDataset) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        words, label = self._data[index]
        return {"input_ids": words, "labels": label}


def trainer(
    case: Case, model: Any, data: TensorDataset, setting: Setting, steps: int
) -> Iterator[None]:
    """A run of `PrivateTrainer`, with the batch size of the case for its rows at once."""
    from transformers import TrainingArguments

    from torch_dpsco.integrations.transformers import PrivateTrainer

    off: Any = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "use_cpu": True}
    own: Any = {"optim": "sgd", "lr_scheduler_type": "constant", "learning_rate": setting.lr}
    rows: Any = {"per_device_train_batch_size": case.size, "max_grad_norm": 0}
    plan = dp.ClippedSGD.plan(
        lr=setting.lr,
        clip=setting.clip,
        noise_multiplier=setting.noise_multiplier,
        adjacency="add_remove",
        batch_size=case.size,
        n=len(data),
        steps=steps,
    )
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(folder, max_steps=steps, **off, **own, **rows)
        PrivateTrainer(model.model, args, train_dataset=_Named(data), plan=plan).train()
    yield


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="small models")
    parser.add_argument(
        "--large", action="store_true", help="a large model, little of it trained"
    )
    parser.add_argument("--few", type=int, help="made-up records, of a large model")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    if args.large:
        print(large(smoke=args.smoke, few=args.few))
        return
    print(tables(smoke=args.smoke)["memory"])


if __name__ == "__main__":
    main()
