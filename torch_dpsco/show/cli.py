"""The command line, `dpsco` or `python -m torch_dpsco`: studies of tables, plans, reports, ledgers, diagnoses, audits.

Exit codes: 0 all is well, 1 something wrong was found, 2 the command cannot be carried out as it was given.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from torch_dpsco.errors import AdjacencyError, PrivacyError, UnitError, UtilityWarning
from torch_dpsco.show.commands import (
    Result,
    by_option,
    command,
    option,
    require_new,
    say,
    there,
    value,
    write,
)
from torch_dpsco.show.tables import add_tables

_AUDIT = ("delta", "trials", "confidence", "seed")
_PICTURE = "write the picture too: .svg, .png or .pdf (needs matplotlib)"


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: its words; default those of the process.

    Returns:
        The exit code.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    known: Collection[str] | None = None
    try:
        for word in words:
            if "\0" in word:
                raise ValueError(
                    f"a word of a command must be text without null characters (got {word!r})"
                )
        args = _parser().parse_args(words)
        if args.run is not _plan:  # whose options are those of a class
            known = vars(args)
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: say(sys.stderr, f"warning: {message}")
            result: Result = args.run(args)
    except (ValueError, TypeError, OSError, ImportError, AdjacencyError, UnitError) as error:
        say(sys.stderr, f"dpsco: {by_option(str(error), known)}")
        return 2
    except PrivacyError as error:
        say(sys.stderr, f"dpsco: {error}")
        return 1
    say(sys.stdout, result[0])
    return result[1]


def _parser() -> _Parser:
    parser = _Parser(
        prog="dpsco", description="Plans and checks of differentially private fitting."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (add_tables, _add_plan, _add_ledger, _add_scripts):
        add(commands)
    return parser


def _add_plan(commands: Any) -> None:
    """Adds `dpsco plan`."""
    plan = command(
        commands,
        _plan,
        "plan HolderSGD --loss logistic --bound-x 1 --n 10000 --epsilon 1 --delta 1e-6",
    )
    plan.add_argument(
        "algorithm", metavar="ALGORITHM", help="class of the optimizer, such as HolderSGD"
    )
    plan.add_argument(
        "options",
        nargs=argparse.REMAINDER,
        metavar="...",
        help="see dpsco plan ALGORITHM --help",
    )


def _add_ledger(commands: Any) -> None:
    """Adds `dpsco report` and `dpsco ledger check`."""
    report = command(commands, _report, "report run.ledger --delta 1e-6")
    report.add_argument("--delta", type=value, required=True, help="in [0, 1)")
    report.add_argument("--adjacency", help="default that of the ledger")
    report.add_argument("--plot", metavar="FILE", help=_PICTURE)
    ledger = commands.add_parser(
        "ledger", help="See dpsco ledger check --help.", allow_abbrev=False
    )
    check = command(
        ledger.add_subparsers(required=True, metavar="COMMAND"),
        _check,
        "ledger check run.ledger",
    )
    for one in (report, check):
        one.add_argument("ledger", metavar="LEDGER", help="the file")
    report.add_argument("--json", action="store_true", help="print JSON")


def _add_scripts(commands: Any) -> None:
    """Adds `dpsco doctor` and `dpsco audit`."""
    doctor = command(commands, _doctor, "doctor script.py:parts")
    audit = command(
        commands, _audit, "audit script.py:noisy --delta 1e-5 --trials 1000 --claim 1"
    )
    for one in (doctor, audit):
        one.add_argument("target", metavar="SCRIPT.py:FUNCTION", help="called without arguments")
    for name in _AUDIT:
        needed = name in ("delta", "trials")
        default = argparse.SUPPRESS
        audit.add_argument(
            option(name), type=value, default=default, required=needed, help="of dp.audit"
        )
    audit.add_argument(
        "--claim",
        type=float,
        metavar="EPSILON",
        help="exit with 1 if the bound refutes this epsilon",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")


# -- commands ----------------------------------------------------------------------------------------------------------


def _plan(args: argparse.Namespace) -> Result:
    """Prints the plan of a run: noise, steps, epsilon under each adjacency, assumptions."""
    import torch_dpsco as dp

    kinds = {name: kind for name in dp.__all__ if hasattr(kind := getattr(dp, name), "plans")}
    kinds = {name: kind for name, kind in kinds.items() if "model" not in _names(kind.plan)}
    if args.algorithm not in kinds:
        raise ValueError(f"ALGORITHM must be one of {', '.join(kinds)} (got {args.algorithm!r})")
    kind = kinds[args.algorithm]
    losses = {
        name.lower(): loss
        for name, loss in vars(dp.losses).items()
        if hasattr(loss, "problem") and not inspect.isabstract(loss)
    }
    own = {*_names(kind.plan), "epsilon", "delta", "adjacency"} - {"budget"}
    promises: set[str] = set()
    if "problem" in own:
        promises = {
            name for made in (dp.Problem, *losses.values()) for name in _names(made)
        } - own
        own = own | promises - {"exact_grad_bound", "problem"}
    parser = _options_of_plan(kind, own, losses if promises else {})
    given = vars(parser.parse_args(args.options))
    as_json, file, picture = (given.pop(name) for name in ("json", "save", "plot"))
    require_new(save=file, plot=picture)

    plan = _made_plan(kind, given, promises, losses)
    text = json.dumps(plan.to_dict(), indent=2)
    if file:
        write(file, f"{text}\n".encode())
    _draw(plan.plot, picture)
    return text if as_json else str(plan), 0


def _options_of_plan(
    kind: Any, own: set[str], losses: dict[str, Any]
) -> argparse.ArgumentParser:
    """Returns the options of a plan: the arguments of a class, and what promises are made of."""
    parser = _Parser(
        prog=f"dpsco plan {kind.__name__}",
        allow_abbrev=False,
        description=inspect.getdoc(kind.plan),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name in sorted(own):
        parser.add_argument(option(name), type=value, metavar="VALUE", default=argparse.SUPPRESS)
    if losses:
        parser.add_argument("--loss", choices=losses, default=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print what --save writes")
    parser.add_argument(
        "--save", metavar="FILE", help="write the plan as JSON, for Plan.from_dict"
    )
    parser.add_argument("--plot", metavar="FILE", help=_PICTURE)
    return parser


def _made_plan(
    kind: Any, given: dict[str, Any], promises: set[str], losses: dict[str, Any]
) -> Any:
    """Returns the plan of these options, with the budget and the promises that are among them."""
    import torch_dpsco as dp

    def budget(epsilon: float, delta: float, adjacency: Any = None) -> dp.Budget:
        return dp.Budget(epsilon, delta, adjacency, unit=kind.plans.unit)

    if given.keys() & {"epsilon", "delta"}:
        given["budget"] = _made(budget, given)
    if "loss" in given:
        given["problem"] = _made(_made(losses[given.pop("loss")], given).problem, given)
    elif promises & given.keys():
        given["problem"] = _made(dp.Problem, given)
    plan = _made(kind.plan, given)
    if given:
        name, value = given.popitem()
        raise ValueError(f"{name} must be left out: nothing here takes it (got {value!r})")
    return plan


def _report(args: argparse.Namespace) -> Result:
    """Says what was spent, from a ledger file, which is left as it is."""
    from torch_dpsco.accounting.accountant import Accountant
    from torch_dpsco.accounting.events import check_adjacency
    from torch_dpsco.accounting.ledger import write_state
    from torch_dpsco.accounting.ledger_file import LedgerCopy
    from torch_dpsco.accounting.statement import finite
    from torch_dpsco.show import card

    require_new(plot=args.plot)
    book = LedgerCopy(there("LEDGER", args.ledger)).book
    if args.adjacency:
        book.config["adjacency"] = check_adjacency(args.adjacency)
    accountant = Accountant(
        adjacency=book.config.get("adjacency"), unit=book.config.get("unit", "example")
    )
    accountant.load_state_dict(write_state(book))
    report = accountant.report(args.delta)
    _draw(partial(card.draw, report), args.plot)
    if not args.json:
        return str(report), 0
    names = [field.name for field in fields(report) if field.name not in ("charges", "spent")]
    shown = {name: getattr(report, name) for name in names}
    return (
        json.dumps(
            finite(shown | {"epsilon": report.epsilon, "events": report.events}), indent=2
        ),
        0,
    )


def _check(args: argparse.Namespace) -> Result:
    """Says whether a ledger file is whole, and changes nothing."""
    from torch_dpsco.accounting.ledger_file import LedgerCopy

    with warnings.catch_warnings():
        warnings.simplefilter("error", UtilityWarning)  # no mark
        try:
            book = LedgerCopy(there("LEDGER", args.ledger)).book
        except UtilityWarning as doubt:
            return str(doubt), 1
    return (
        f"whole: ledger {book.id}, {len(book.ledger)} events, no fewer than its mark knows of",
        0,
    )


def _doctor(args: argparse.Namespace) -> Result:
    """Looks for mistakes in a training script; the function returns the arguments of dp.doctor, as a tuple or dict."""
    from torch_dpsco.diagnosis import doctor

    call = _call(doctor, args.target, {})
    diagnosis = doctor(*call.args, **call.kwargs)
    text = (
        json.dumps([asdict(finding) for finding in diagnosis.findings], indent=2)
        if args.json
        else str(diagnosis)
    )
    return text, int(bool(diagnosis.critical))


def _audit(args: argparse.Namespace) -> Result:
    """Bounds epsilon from below by experiment; the function returns a mechanism and a pair of inputs for dp.audit."""
    from torch_dpsco.audits import audit

    call = _call(audit, args.target, {name: vars(args)[name] for name in _AUDIT if name in args})
    mechanism = call.arguments["mechanism"]
    call.arguments["mechanism"] = lambda given: _tried(
        "the mechanism", partial(mechanism, given)
    )
    found = replace(audit(*call.args, **call.kwargs), claimed=args.claim)
    return str(found), int(args.claim is not None and found.contradicts())


# -- words and values --------------------------------------------------------------------------------------------------


def _draw(make: Callable[[], Any], path: str | None) -> None:
    """Writes a figure as its suffix says."""
    from torch_dpsco.show import plots

    if path is None:
        return
    if (kind := Path(path).suffix.removeprefix(".")) not in ("svg", "png", "pdf"):
        raise ValueError(f"plot must end in .svg, .png or .pdf (got {path!r})")
    write(path, plots.encoded(make(), kind))


def _names(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def _made(function: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Returns the function's value of those given that it takes, which are taken out."""
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.default is parameter.empty and name not in given:
            raise ValueError(f"{name if name != 'problem' else 'loss'} must be given")
    return function(**_taken(function, given))


def _taken(function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    return {name: given.pop(name) for name in _names(function) if name in given}


def _call(
    function: Callable[..., Any], target: str, options: Mapping[str, Any]
) -> inspect.BoundArguments:
    """Returns the arguments of a function: those that a function of a script returns, and options."""
    path, _, name = target.rpartition(":")
    spec = (
        importlib.util.spec_from_file_location(Path(path).stem, path)
        if Path(path).is_file()
        else None
    )
    if spec is None or spec.loader is None:
        raise ValueError(
            f"SCRIPT.py:FUNCTION must name a file and a function in it (got {target!r})"
        )
    script = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(Path(path).parent))
    _tried(path, partial(spec.loader.exec_module, script))
    if not callable(make := getattr(script, name, None)):
        raise ValueError(f"SCRIPT.py:FUNCTION must name a function of {path} (got {name!r})")
    made = _tried(target, make)
    values, named = ((), made) if isinstance(made, Mapping) else (made, {})
    try:
        return inspect.signature(function).bind(*values, **{**named, **options})
    except TypeError as error:
        takes = f"what dp.{function.__name__} takes, as a tuple or a dict"
        raise ValueError(
            f"SCRIPT.py:FUNCTION must return {takes}: {error} (got {target!r})"
        ) from error


def _tried(what: str, call: Callable[[], Any]) -> Any:
    """Returns what code of the user returns; raises ValueError, in one sentence, whatever it raises."""
    from torch_dpsco.trial import Refused, attempt

    if isinstance(found := attempt(what, call), Refused):
        raise ValueError(f"{found}: run it by itself for the traceback") from found.error
    return found
