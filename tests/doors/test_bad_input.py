"""A table of bad input: every public callable, every argument, values of every kind.

Each bad call must raise an error of the library that names the argument, its value or its type, or be in the table of
values that are fine (`accepted.py`); and it must leave parameters and ledgers alone. The table is made from signatures,
so that a new public callable fails here until it has a good call, and a new argument is tried at once.
"""

from __future__ import annotations

import inspect
import math
import warnings
import zlib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import torch_dpsco as dp
from tests.doors.accepted import accepted
from tests.doors.bad import VALUES, arguments_of, fits, judge
from tests.doors.calls import CALLS, DIM, LOSS
from tests.doors.public import bare, public_callables
from tests.doors.shared import made
from torch_dpsco.accounting import events
from torch_dpsco.show import loggers
from torch_dpsco.show.cli import main
from torch_dpsco.step.run import CommonOptimizer

FEW = 5  # values per argument in the default run
# what nobody calls with arguments of their own; `family.*` is all of a family
EXEMPT = {
    # results, and what they are made of
    *(
        "show.preview.*",
        "statistics.[!p]*",
        "audits.OneRunResult",
        "audits.Audit",
        "step.plan.Plan",
    ),
    "accounting.report.PrivacyReport",
    *("accounting.statement.Statement", "accounting.statement.Statement.promising"),
    *(
        "accounting.analysis.risk.Risk",
        "estimators.Released",
        "statistics.conformal.ConformalSets",
    ),
    *(
        "statistics.search.SearchPlan",
        "statistics.results.Study",
        "statistics.study.StudyPlan",
        "show.look.Check",
        "show.look.Finding",
        "estimators.Table",
    ),
    # hooks, which the library calls
    *(
        "losses.*.*",
        "oracles.MeanOracle",
        "oracles.ClippedMean",
        "oracles.*.*",
        "rules.UpdateRule",
        "rules.*.*",
    ),
    *(
        f"{kind}.*"
        for kind in (
            "Poisson",
            "Fixed",
            "Shuffled",
            "Assigned",
            "Cyclic",
            "Full",
            "Parts",
        )
    ),
    *(f"estimators.{column}.*" for column in ("Number", "Date", "Category", "Ordered")),
    *("statistics.prepare.PrivateTransformer", "CompiledRows.prepare", "CompiledRows.step"),
    # hooks that other libraries call
    "integrations.lightning.PrivateTraining.*",
    "integrations.opacus.DPOptimizer.*",
    *("integrations.transformers.PrivateTrainer", "integrations.transformers.PrivateTrainer.*"),
    # parts that plans, optimizers and loaders of the library make or use
    *(f"Accountant.{name}" for name in ("continue_from", "end", "marked", "require_planned")),
    "sampling.early_partition",
    *("Problem.require", "errors.warn", "show.loggers.in_single"),
    *(f"oracles.{name}" for name in ("Charge", "Release", "clip_weights", "joint_norm")),
    *("oracles.UserFiltered", "shuffle_model.ShuffledMedian"),
    *(f"rules.{name}" for name in ("trained", "absorb", "averaged")),
    *(
        f"sampling.{kind}Sampler"
        for kind in ("Assigned", "Design", "OnePass", "Parts", "Rank", "RankAssigned")
    ),
    *(
        f"sampling.{name}"
        for name in (
            "Chunk",
            "DrawLog",
            "Partition",
            "Slots",
            "Spilled",
            "UserLoader",
        )
    ),
    *(f"sampling.{name}" for name in ("adapt", "fingerprint", "make_sampler", "partition_name")),
    *(
        f"sampling.{name}"
        for name in ("poisson_positions", "records_of", "require_divisible", "user_ids")
    ),
    *(
        "sampling.*Sampler.*",
        "sampling.Chunk.*",
        "sampling.DrawLog.*",
        "sampling.Slots.*",
    ),
    *(
        "integrations.parquet.ParquetRows.gather",
        "prox.*.*",
        "sampling.RecordIds.*",
        "sampling.PrivateLoader.read_only",
    ),
    # hooks of estimators, which plan and fit call
    *("estimators.*.make_loss", "estimators.*.task_options"),
    # of solvers and objectives
    "estimators.solvers.Solution",
    # what needs an engine, 200 canaries or two processes: test_engines, test_canaries, test_fsdp
    *(
        "integrations.engines.ray_partitions",
        "audits.check_training",
        "integrations.fsdp.*",
    ),
}


def of_place(name: str) -> str:
    """Returns the last two parts of a name, without its variant: `dp.fit[user]` is `dp.fit`."""
    return ".".join(name.partition("[")[0].split(".")[-2:])


def without_a_call(names: dict[str, Any]) -> list[str]:
    """Returns those of the public callables that the table calls neither by their name nor by another of theirs."""
    places = {of_place(name) for name in CALLS}
    left = [
        name for name in names if of_place(name if "." in name else f"dp.{name}") not in places
    ]
    left = [name for name in left if not any(fnmatchcase(name, pattern) for pattern in EXEMPT)]
    ends = {name.rpartition(".")[2] for name in left}
    known = {
        bare(CALLS[name]()[0]) for name in CALLS if of_place(name).rpartition(".")[2] in ends
    }
    return [name for name in left if bare(names[name]) not in known]


def test_every_public_callable_has_a_good_call() -> None:
    names = public_callables()
    assert len(names) > 500
    assert not without_a_call(names)


def test_what_is_exempt_is_there() -> None:
    names = public_callables()
    assert not [
        pattern for pattern in EXEMPT if not any(fnmatchcase(name, pattern) for name in names)
    ]


def test_a_new_public_function_or_method_needs_a_good_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fresh(self: Any, value: int) -> None: ...

    def method(self: Any, value: int) -> None: ...

    fresh.__module__ = method.__module__ = "torch_dpsco.show.loggers"
    monkeypatch.setattr(loggers, "fresh", fresh, raising=False)
    monkeypatch.setattr(dp.Accountant, "fresh", method, raising=False)
    names = {name: value for name, value in public_callables().items() if name.endswith("fresh")}
    assert sorted(without_a_call(names)) == ["Accountant.fresh", "show.loggers.fresh"]


def test_the_plans_of_every_optimizer_are_in_the_table() -> None:
    optimizers = [
        name
        for name in dp.__all__
        if inspect.isclass(value := getattr(dp, name)) and hasattr(value, "plans")
    ]
    wanted = [f"dp.{name}.plan" for name in optimizers]
    assert len(wanted) == 15
    assert not [name for name in wanted if name not in CALLS]


@pytest.fixture(autouse=True)
def _quietly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)  # where the paths that are accepted are made
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.cases(3, 1)
@pytest.mark.parametrize("name", CALLS)
def test_each_good_call_is_good(name: str) -> None:
    function, arguments = CALLS[name]()
    function(**arguments)


def watched(
    function: Any, arguments: dict[str, Any]
) -> tuple[list[torch.Tensor], list[dp.Accountant]]:
    """Returns the parameters and ledgers that a call can reach."""
    tensors, ledgers = [], []
    for value in (*arguments.values(), getattr(function, "__self__", None)):
        if isinstance(value, torch.nn.Module):
            tensors += list(value.parameters())
        elif isinstance(value, CommonOptimizer):
            tensors += value.param_groups[0]["params"]
            ledgers.append(value.accountant)
        elif isinstance(value, list) and value and isinstance(value[0], torch.nn.Parameter):
            tensors += value
        elif isinstance(value, dp.Accountant):
            ledgers.append(value)
        elif isinstance(getattr(value, "accountant", None), dp.Accountant):
            ledgers.append(value.accountant)
    return tensors, ledgers


def mistakes(name: str, labels: Any) -> list[str]:
    """Returns what is wrong with the refusals of one callable; `labels(argument)` are the values to try."""
    function, _ = CALLS[name]()
    found = []
    for argument, annotation in arguments_of(function):
        for label in labels(argument):
            if accepted(name, argument, label, annotation, fits(label, annotation)):
                continue
            function, arguments = CALLS[name]()
            arguments[argument] = VALUES[label]()
            tensors, ledgers = watched(function, arguments)
            before = [p.detach().clone() for p in tensors], [len(ledger) for ledger in ledgers]
            verdict = judge(function, arguments, argument)
            if verdict.outcome:
                found.append(
                    f"{name}({argument}={label}): {verdict.outcome} {verdict.detail[:200]}"
                )
            moved = not all(map(torch.equal, before[0], tensors)) or before[1] != [
                len(ledger) for ledger in ledgers
            ]
            if moved and verdict.outcome != "accepted":
                found.append(
                    f"{name}({argument}={label}): a refused call has moved or charged something"
                )
    return found


def few(name: str) -> Any:
    """Returns a choice of values for each argument of a callable, another one for each."""
    every = list(VALUES)
    return lambda argument: every[
        zlib.crc32(f"{name}.{argument}".encode()) % 8 :: len(every) // FEW
    ]


@pytest.mark.cases(3, 1)
@pytest.mark.parametrize("name", CALLS)
def test_some_bad_values_of_every_argument_are_refused(name: str) -> None:
    assert not mistakes(name, few(name))


@pytest.mark.cases(0, 2)
@pytest.mark.parametrize("name", CALLS)
def test_all_bad_values_of_every_argument_are_refused(name: str) -> None:
    assert not mistakes(name, lambda argument: VALUES)


def a_model() -> torch.nn.Linear:
    return torch.nn.Linear(DIM, 1)


def fits_on(data: Any, loss: Any = LOSS, **changes: Any) -> Any:
    """Makes a fit of a fresh run, with another data set, loss or argument."""
    function, arguments = CALLS["dp.fit"]()
    return function(**arguments | {"dataset": data, "loss_fn": loss} | changes)


def changed(name: str, **arguments: Any) -> Any:
    function, good = CALLS[name]()
    return function(**good | arguments)


X, Y = torch.randn(24, DIM), torch.ones(24, 1)
COMPLEX = X.to(torch.complex64)
REAL_RECORDS = (
    r"dataset must give real numbers \(got torch.complex64\): give torch.view_as_real\(x\)"
)
TO_BE_NAMED = {
    "a budget that is a number": (
        lambda: changed("dp.HolderSGD.plan", budget=1.0),
        r"budget must be a Budget, as Budget\(1.0, 1e-5\) \(got 1.0\)",
    ),
    "a budget that is a tuple": (
        lambda: changed("dp.BoltOnPSGD.plan", budget=(1.0, 1e-5)),
        r"budget must be a Budget.*\(got \(1.0, 1e-05\)\)",
    ),
    "a loss for a problem": (
        lambda: changed("dp.HolderSGD.plan", problem=LOSS),
        r"problem must be a Problem, as losses.Logistic\(\).problem\(bound_x=...\) \(got Logistic\)",
    ),
    "a budget for an accountant": (
        lambda: changed("dp.ClippedSGD", accountant=dp.Budget(1.0, 1e-5)),
        r"accountant must be an Accountant, .*\(got Budget\)",
    ),
    "a prox": (
        lambda: changed("dp.ClippedSGD", prox=3),
        r"prox must be a Prox of torch_dpsco.prox.*\(got 3\)",
    ),
    "a rule": (
        lambda: changed("dp.ClippedSGD", rule="sgd"),
        r"rule must be an UpdateRule of torch_dpsco.rules.*\(got 'sgd'\)",
    ),
    "a design": (
        lambda: changed("dp.ClippedSGD.plan", sampling=6),
        r"sampling must be text or a Design of torch_dpsco.*\(got 6\)",
    ),
    "a design of an oracle": (
        lambda: changed("dp.PrivateOptimizer", design=6),
        r"design must be a Design of torch_dpsco.*\(got 6\)",
    ),
    "a schedule": (
        lambda: changed("dp.PrivateOptimizer", schedule=[dp.Phase(2)]),
        r"schedule must be a Schedule.*\(got list\)",
    ),
    "a generator of numpy": (
        lambda: changed("dp.ClippedSGD", generator=np.random.default_rng(0)),
        r"generator must be a Generator of torch.*\(got Generator\)",
    ),
    "a loader given to fit": (
        lambda: fits_on(DataLoader(TensorDataset(X, Y))),
        r"dataset must be a map-style data set.*\(got DataLoader\)",
    ),
    "a torch optimizer given to fit": (
        lambda: fits_on(
            TensorDataset(X, Y), optimizer=torch.optim.SGD(a_model().parameters(), lr=0.1)
        ),
        r"optimizer must be a PrivateOptimizer.*\(got SGD\)",
    ),
    "a model for parameters": (
        lambda: changed("dp.HolderSGD", params=a_model()),
        r"params must be parameters.*as model.parameters\(\) \(got Linear\)",
    ),
    "a loss of make_private": (
        lambda: changed("dp.make_private", loss=3),
        r"loss must be a function \(got 3\)",
    ),
    "steps left of no event": (
        lambda: changed("dp.Accountant.max_steps", event=None),
        r"event must be a value of torch_dpsco.accounting.events \(got None\)",
    ),
    "steps past the pass": (
        lambda: dp.AcceleratedSGD.plan(
            n=64, lr=0.1, clip=1.0, noise_multiplier=2.0, batch_size=8, steps=9
        ),
        r"steps must be <= 8, one pass of Assigned\(batch_size=8, n=64, .*\) \(got 9\)$",  # it makes no more passes
    ),
    "thresholds of a pilot": (
        lambda: dp.Pilot(c_min=2.0, c_max=1.0),
        r"c_max must be > c_min=2 \(got 1\)",
    ),
    "a threshold of a pilot": (lambda: dp.Pilot(c_min=-1.0), r"c_min must be > 0 \(got -1.0\)"),
    "a dimension": (
        lambda: changed("dp.HolderSGD.plan", dim=-1),
        r"dim must be an integer >= 0 \(got -1\)",
    ),
    "a flag": (
        lambda: dp.attach(a_model(), batch_first=3),
        r"batch_first must be True or False \(got 3\)",
    ),
    "a repeated number": (
        lambda: events.Repeat(3, 2),
        r"event must be a value of torch_dpsco.accounting.events \(got 3\)",
    ),
    "double data": (
        lambda: fits_on(TensorDataset(X.double(), Y)),
        r"got inputs float64\[3\] and targets float32\[1\], where parameters are float32.*match dtypes",
    ),
    "wide labels": (lambda: fits_on(TensorDataset(X, Y.expand(24, 2))), r"targets float32\[2\]"),
    "flat labels": (
        lambda: fits_on(TensorDataset(X, Y.view(-1)), torch.nn.BCEWithLogitsLoss()),
        r"targets float32\[\]",
    ),
    "a class of losses": (
        lambda: fits_on(TensorDataset(X, Y), torch.nn.MSELoss),
        r"loss_fn must be made first, as MSELoss\(\) \(got class MSELoss\)",
    ),
    "records that are no pairs": (
        lambda: fits_on(TensorDataset(X)),
        r"dataset must give \(input, target\) pairs \(got tuple of 1\)",
    ),
    "no accelerator": (
        lambda: changed("accelerate.prepare", accelerator=None),
        r"accelerator must be an Accelerator \(got None\)",
    ),
    "lists for tensors": (
        lambda: dp.per_record(torch.nn.BCEWithLogitsLoss())([0.1], [1.0]),
        r"output and target must hold tensors with one entry per record, and nothing else \(got 0.1\)",
    ),
    "a number of levels": (
        lambda: changed("estimators.Category", levels=3),
        r"levels must be a list.*\(got 3\)",
    ),
    "no file": (
        lambda: changed("estimators.Released.load", path=None),
        r"path must be text.* or a path \(got None\)",
    ),
    "an output that is no number": (
        lambda: dp.audit_outputs([math.nan] * 50, [1.0] * 50, delta=0.0),
        r"outputs must be finite \(got others in first\)",
    ),
    "no features": (
        lambda: changed("parquet.parquet_blocks", features=[]),
        r"features must name one column or more \(got none\)",
    ),
    "a column that is not there": (
        lambda: changed("engines.dask_partitions", sample_weight="b"),
        r"sample_weight must be in the table, once each \(got 'b', of \['a', 'y'\]\)",
    ),
    "a setting of no study": (
        lambda: changed("dp.study", nonsense=3),
        r"nonsense must be an argument of study, or a setting of LogisticRegression \(got nonsense=3\)",
    ),
    "features of complex numbers": (lambda: fits_on(TensorDataset(COMPLEX, Y)), REAL_RECORDS),
    "labels of complex numbers": (
        lambda: fits_on(TensorDataset(X, Y.to(torch.complex64))),
        REAL_RECORDS,
    ),
    "records of complex numbers in a loop": (
        lambda: made("dp.HolderSGD").loader(TensorDataset(COMPLEX, Y)),
        REAL_RECORDS,
    ),
    "records of complex numbers that come one by one": (
        lambda: next(iter(made("dp.HolderSGD").loader(list(zip(COMPLEX, Y, strict=True))))),
        REAL_RECORDS,
    ),
    "complex targets of a loss": (
        lambda: LOSS(Y, Y.to(torch.complex64)),
        r"target must be real \(got torch.complex64\)",
    ),
    "complex targets of torch's losses": (
        lambda: dp.per_record(torch.nn.BCEWithLogitsLoss())(Y, Y.to(torch.complex64)),
        r"target must be real \(got torch.complex64\)",
    ),
}


@pytest.mark.parametrize("case", TO_BE_NAMED)
def test_what_is_meant_otherwise_is_said(case: str) -> None:
    make, message = TO_BE_NAMED[case]
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "name", ["LogisticRegression.fit", "Ridge.fit", "LogisticRegression.predict"]
)
@pytest.mark.parametrize("argument", ["X", "y"])
def test_complex_tables_are_refused_by_estimators(name: str, argument: str) -> None:
    function, good = CALLS[f"estimators.{name}"]()
    if argument in good:
        with pytest.raises(
            ValueError, match=rf"{argument} must be real \(got complex numbers\)"
        ):
            function(**good | {argument: good[argument].astype(complex)})


@pytest.mark.parametrize(
    "name", ["dp.score", "conformal.conformal", "statistics.search.PrivateSearch.fit"]
)
@pytest.mark.parametrize("argument", ["X", "y"])
def test_complex_tables_are_refused_by_studies(name: str, argument: str) -> None:
    value = np.asarray(CALLS[name]()[1][argument]).astype(complex)
    with pytest.raises(ValueError, match=rf"{argument} must be real \(got complex numbers\)"):
        changed(name, **{argument: value})


def test_complex_rows_are_refused_by_released_models() -> None:
    with pytest.raises(ValueError, match=r"X must be real \(got complex numbers\)"):
        changed("estimators.Released.predict", X=np.ones((2, DIM), dtype=complex))


PATHS = {
    "dp.Accountant": "ledger_path",
    "dp.study": "ledger_path",
    "StudyPlan.run": "ledger_path",
    "dp.fit": "checkpoint",
    "dp.Schema.save": "path",
    "dp.Schema.load": "path",
    "estimators.Released.save": "path",
    "estimators.Released.load": "path",
    "Statement.save": "path",
    "statistics.results.Study.save": "folder",
    "statistics.results.Study.save_card": "path",
    "opacus.PrivacyEngine.save_checkpoint": "path",
    "opacus.PrivacyEngine.load_checkpoint": "path",
    "parquet.parquet_blocks": "source",
    "parquet.ParquetRows": "source",
    "tar.TarRows": "paths",
    "dp.Schema.read": "frame",
}


@pytest.mark.parametrize("path", [1, "a\0b", b"abc"])
@pytest.mark.parametrize("name", PATHS)
def test_no_number_and_no_null_character_is_a_path(name: str, path: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{PATHS[name]} must (be|give) .*\(got "):
        changed(name, **{PATHS[name]: path})
    assert not list(Path.cwd().iterdir())


@pytest.mark.parametrize("name", ["dp.study", "StudyPlan.run"])
def test_the_ledger_of_a_study_has_any_path(name: str) -> None:
    changed(name, ledger_path=Path("ledger")).model.accountant.close()
    assert Path("ledger").is_file()


def test_no_path_like_with_a_null_character_is_a_path() -> None:
    with pytest.raises(
        ValueError,
        match=r"path must be text or a path, without null characters \(got PosixPath\)",
    ):
        changed("dp.Schema.save", path=Path("a\0b"))


@pytest.mark.parametrize(
    "words",
    [["report", "a\0b"], ["fit", "t.csv", "--schema", "s", "--epsilon", "1", "--out", "\0"]],
)
def test_no_null_character_is_a_word_of_a_command(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert "must be text without null characters (got" in capsys.readouterr().err


def test_missing_arguments_are_named_together() -> None:
    with pytest.raises(
        TypeError,
        match=r"missing [34] required keyword-only arguments: .*'problem'.*'dim'",
    ):
        dp.BoltOnPSGD.plan()


def test_records_that_do_not_fit_are_described() -> None:
    function, arguments = CALLS["dp.fit"]()
    before = [p.detach().clone() for p in arguments["model"].parameters()]
    with pytest.raises(ValueError, match="must go together") as caught:
        function(**arguments | {"dataset": TensorDataset(X.double(), Y)})
    assert "24" not in str(caught.value)  # nor the number of rows of a draw
    assert len(arguments["optimizer"].accountant) == 0
    assert all(map(torch.equal, before, arguments["model"].parameters()))


@pytest.mark.parametrize(
    ("value", "words"),
    [(np.float64(0.5), 0.5), (torch.tensor(0.5), 0.5), (np.int64(2), 2.0), (1, 1.0)],
)
def test_numbers_of_numpy_and_torch_are_numbers(value: Any, words: float) -> None:
    plan = changed("dp.ClippedSGD.plan", lr=value)
    optimizer = changed("dp.ClippedSGD", plan=plan)
    assert optimizer.param_groups[0]["lr"] == words
