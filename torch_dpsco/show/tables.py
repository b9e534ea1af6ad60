"""The commands for tables: from a file to a schema, a look, a model that may be published, and its predictions."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_dpsco.show.commands import (
    Result,
    by_option,
    command,
    loaded,
    option,
    require_new,
    say,
    there,
    value,
    write,
)

if TYPE_CHECKING:
    from torch_dpsco.estimators.schema import Schema

_DIALECT = {
    "separator": "between cells: , ; | or tab",
    "decimal": "sign of numbers: . or ,",
    "thousands": "sign between groups of digits: . , ' space or none",
    "quote": "around cells: \" ' or none",
    "encoding": "as utf-8, utf-16, latin-1 or cp1252",
    "sheet": "of .xlsx files; default the first one",
}
_SIGNS = {"tab": "\t", "space": " ", "none": ""}
_KINDS = "private, .csv (.tsv, .txt), .xlsx or .parquet"


def add_tables(commands: Any) -> None:
    """Adds the four commands."""
    for add in (_add_init, _add_check, _add_fit, _add_predict):
        _add_dialect(add(commands))


def _add_dialect(parser: argparse.ArgumentParser) -> None:
    """Adds how the file writes its cells, in place of what the schema says about it."""
    group = parser.add_argument_group("how TABLE is written, in place of what the schema says")
    for name, text in _DIALECT.items():
        group.add_argument(option(name), default=argparse.SUPPRESS, metavar="SIGN", help=text)


def _add_init(commands: Any) -> argparse.ArgumentParser:
    init = command(commands, _init, "init table.csv --out schema.toml --target died")
    init.add_argument("table", metavar="TABLE", help=_KINDS)
    init.add_argument("--out", required=True, metavar="FILE", help="new file, as schema.toml")
    init.add_argument("--target", metavar="NAME", help="column that is to be predicted")
    init.add_argument("--ids", metavar="NAME", help="column that says whose row it is")
    init.add_argument(
        "--public",
        metavar="OTHER",
        help="PUBLIC table with the same columns, to take ranges and levels from",
    )
    return init


def _add_check(commands: Any) -> argparse.ArgumentParser:
    check = command(commands, _check, "check table.csv --schema schema.toml")
    check.add_argument("table", metavar="TABLE", help=_KINDS)
    check.add_argument("--schema", metavar="FILE", help="as dpsco init writes it")
    return check


def _add_fit(commands: Any) -> argparse.ArgumentParser:
    fit = command(commands, _fit, "fit table.csv --schema schema.toml --epsilon 1 --out study")
    fit.add_argument("table", metavar="TABLE", help=_KINDS)
    fit.add_argument("--schema", metavar="FILE", help="as dpsco init writes it")
    fit.add_argument("--epsilon", type=value, required=True, help="> 0, of all of it together")
    fit.add_argument(
        "--out",
        required=True,
        metavar="FOLDER",
        help="new or empty: model, card, summary and picture",
    )
    fit.add_argument("--delta", type=value, default=1e-6, help="far below 1/n; default 1e-6")
    fit.add_argument(
        "--adjacency",
        help="default zero_out, where the number of units is public",
    )
    fit.add_argument("--n", type=value, help="public number of units, needed under add_remove")
    fit.add_argument(
        "--model", help="class of torch_dpsco.estimators; default by the schema's target"
    )
    fit.add_argument(
        "--ledger",
        metavar="FILE",
        help="ledger file, kept for all that is released about these data; default TABLE.ledger beside the FOLDER",
    )
    fit.add_argument(
        "--unchecked",
        action="store_true",
        help="do not look first whether the schema can read the table",
    )
    for name in ("metric", "holdout", "level", "intervals"):
        fit.add_argument(
            option(name), type=value, default=argparse.SUPPRESS, help="see dp.study"
        )
    return fit


def _add_predict(commands: Any) -> argparse.ArgumentParser:
    predict = command(
        commands, _predict, "predict study/model.json new.csv --out predictions.csv"
    )
    predict.add_argument("model", metavar="MODEL.json", help="as dpsco fit writes it")
    predict.add_argument("table", metavar="TABLE", help="whose rows are predicted")
    predict.add_argument(
        "--out", metavar="FILE", help="new .csv file; else predictions are printed"
    )
    return predict


# -- commands ----------------------------------------------------------------------------------------------------------


def _init(args: argparse.Namespace) -> Result:
    """Writes a schema with questions: names, kinds and dialect as the table has them, and no number of it."""
    from torch_dpsco.show.first_schema import drafted

    require_new(out=args.out)
    for path in filter(None, (args.table, args.public)):
        _require_extras(path)
    public = None if args.public is None else there("public", args.public)
    given = {"target": args.target, "ids": args.ids, "public": public}
    try:
        draft = drafted(there("TABLE", args.table), _dialect(args), **given)
    except ValueError as error:
        raise ValueError(_with_line(error)) from error
    text = str(draft)
    write(args.out, text.encode())
    asked = sum(line.partition("#")[0].count('"?"') for line in text.splitlines())
    lines = [
        f"Looked up in {args.table}, without noise. {args.out} and models made by it tell others:",
        *(f"  {name:10} {what}" for name, what in draft.looked_up.items()),
        f'{asked} questions are open in {args.out}: answer each "?" from public knowledge. Then',
        f"  dpsco check {args.table} --schema {args.out}",
    ]
    return "\n".join(lines), 0


def _check(args: argparse.Namespace) -> Result:
    """Says what a schema cannot read of a table. NOT private: for who holds the table, and nobody else."""
    schema = _schema(args)
    try:
        found = schema.check(args.table)
    except ValueError as error:
        return by_option(_with_line(error), vars(args)), 1
    stops = "dpsco fit would stop here, before anything is spent"
    goes_on = f"dpsco fit {args.table} --schema {args.schema} --epsilon 1 --out study"
    return f"{found}\n{stops if found.stops else f'next: {goes_on}'}", int(found.stops)


def _fit(args: argparse.Namespace) -> Result:
    """Fits a model to a private table by one budget, after showing the plan, and writes what may be published."""
    import torch_dpsco as dp
    from torch_dpsco import estimators

    schema = _schema(args, "matplotlib")
    unit = "example" if schema.rows_per_unit == 1 else "user"
    budget = dp.Budget(args.epsilon, args.delta, args.adjacency, unit=unit)
    given = {
        name: vars(args)[name]
        for name in ("metric", "holdout", "level", "intervals")
        if name in args
    }
    if args.model is not None:
        if args.model not in estimators.__all__:
            raise ValueError(
                f"model must be one of {', '.join(estimators.__all__)} (got {args.model!r})"
            )
        given["model"] = getattr(estimators, args.model)
    is_new = not Path(args.out).exists()
    folder = _new_folder(args.out)
    show = partial(say, sys.stdout)
    # PRIVACY: without one a second run on the table would not know of the first
    # (test_a_second_fit_without_a_ledger_is_noticed)
    beside = folder.absolute().parent / f"{Path(args.table).stem}.ledger"
    ledger = args.ledger or os.path.relpath(beside)
    given |= {"n": args.n, "show": show, "ledger_path": ledger, "check": not args.unchecked}
    try:
        study = dp.study(args.table, schema, budget, **given)
    except BaseException:
        if is_new:
            with suppress(OSError):  # a ledger may be in it
                folder.rmdir()
        raise
    try:
        study.save(folder)
    except OSError:
        say(sys.stdout, study.released().json())  # what was paid for is not lost with the disk
        raise
    results = study.summary().removeprefix(str(study.plan)).lstrip("\n")
    return (
        f"{results}\nwritten to {args.out}: what is in this folder may be published\nwhat was"
        f" spent on these data is in {ledger} and {ledger}.* (confidential): later runs need it",
        0,
    )


def _predict(args: argparse.Namespace) -> Result:
    """Predicts the rows of a table by a published model; a row that cannot be read has an empty line."""
    import csv
    import io

    import numpy as np

    from torch_dpsco.estimators.released import Released
    from torch_dpsco.estimators.schema import Schema

    require_new(out=args.out)
    model: Released = loaded("MODEL.json", Released.load, args.model)
    if model.schema is None:
        raise ValueError(
            f"MODEL.json must be one with a schema, as dpsco fit writes it (got {args.model!r})"
        )
    _require_extras(there("TABLE", args.table))
    rows = _told(Schema.from_dict(model.schema), args).features(args.table)
    whole = np.asarray(np.isfinite(rows).all(1))
    columns = {"prediction": model.predict(rows[whole])}
    if model.kind in ("probabilities", "softmax"):
        chances = model.predict_proba(rows[whole])
        columns |= {
            f"probability of {label}": chances[:, k] for k, label in enumerate(model.classes)
        }
    found = zip(*(column.tolist() for column in columns.values()), strict=True)
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(columns)
    lines.writerows(next(found) if known else [""] * len(columns) for known in whole.tolist())
    note = (
        "note: the model may be published, the table may not. If these are rows that the model was"
        " fitted to, do not publish their predictions beside what is true of them: nothing"
        " protects what that tells about these people"
    )
    if args.out is None:
        say(sys.stderr, note)
        return text.getvalue().rstrip("\n"), 0
    write(args.out, text.getvalue().encode())
    return f"{len(rows)} predictions written to {args.out}\n{note}", 0


def _with_line(error: ValueError) -> str:
    """Returns what is wrong with a table and in which line: for who holds it."""
    line = getattr(error, "line", None)
    return f"{error}{'' if line is None else f' (line {line})'}"


# -- files -------------------------------------------------------------------------------------------------------------


def _dialect(args: argparse.Namespace) -> dict[str, str]:
    """Returns the fields of a dialect that are given as options."""
    given = {name: vars(args)[name] for name in _DIALECT if name in args}
    return {name: _SIGNS.get(sign, sign) for name, sign in given.items()}


def _told(schema: Schema, args: argparse.Namespace) -> Schema:
    """Returns a schema with the dialect of the options."""
    given: Any = _dialect(args)
    return replace(schema, dialect=replace(schema.dialect, **given)) if given else schema


def _schema(args: argparse.Namespace, *needed: str) -> Schema:
    """Returns the schema that is given, after it was seen whether files and packages are there."""
    from torch_dpsco.estimators.schema import Schema

    if args.schema is None or not Path(args.schema).is_file():
        lacks = "given" if args.schema is None else f"a file that is there (got {args.schema!r})"
        raise ValueError(
            f"schema must be {lacks}: dpsco init {args.table} --out"
            f" {args.schema or 'schema.toml'} writes one, whose questions you answer"
        )
    found: Schema = loaded("schema", Schema.load, args.schema)
    _require_extras(there("TABLE", args.table), *needed)
    return _told(found, args)


def _require_extras(path: str, *needed: str) -> None:
    """Raises ImportError, before anything else is done, for packages that are not installed."""
    reader = {".xlsx": "openpyxl", ".parquet": "pyarrow"}.get(Path(path).suffix.lower())
    names = [*needed, *([] if reader is None else [reader])]
    if missing := [name for name in names if importlib.util.find_spec(name) is None]:
        raise ImportError(
            f"{' and '.join(missing)} must be installed: pip install 'torch_dpsco[tables]'"
        )


def _new_folder(path: str) -> Path:
    """Returns a folder that is new or empty; raises ValueError where nothing can be written to it."""
    folder = Path(path)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"out must be a new or empty folder (got {path!r})")
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise ValueError(f"out must be a folder that can be written to (got {path!r})")
    return folder
