"""The import rules of docs/architecture.md, and the house rules that a reader relies on, checked on the syntax.

Why it matters for privacy: the formulas (`accounting.analysis`, `*_numbers`) can be read and tested without torch, the
update rules cannot reach private rows because they cannot reach an oracle, and Opacus is touched in few places.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import torch_dpsco

ROOT = Path(__file__).parents[1]
PACKAGE = "torch_dpsco"
_SPEC = importlib.util.spec_from_loader(
    "size", importlib.machinery.SourceFileLoader("size", str(ROOT / ".ci/size"))
)
assert _SPEC is not None
size = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(size)  # type: ignore[union-attr]
# Files import from their own row or from rows above it (but for those that gather public names).
ORDER = (
    "errors acts shown _validate compat native",
    "accounting.analysis",
    "algorithms.correlated_numbers"
    " algorithms.heavy_tailed_numbers algorithms.holder_numbers algorithms.localized_numbers"
    " algorithms.output_sgd_numbers algorithms.user_numbers",
    "problem",
    "accounting",
    "noise trial rows sampling rules prox losses algorithms.mechanisms step.exact_noise",
    "step.oracle algorithms.clips algorithms.oracles",
    "step algorithms estimators show.look streams",
    "oracles",
    "diagnosis audits",
    "show train private_loop statistics",
    "statistics.held_out",
    "statistics.prepare",
    "statistics.study statistics.results statistics.conformal statistics.search statistics.scores",
    "show.cli show.tables __main__ integrations fast shuffle_model",
)

LEAVES = {f"{PACKAGE}.{name}" for name in ("_validate", "errors")}
ANALYSIS = f"{PACKAGE}.accounting.analysis"
ACCOUNTING = f"{PACKAGE}.accounting"
OPACUS_CONTACT = [
    f"{PACKAGE}.compat",
    f"{PACKAGE}.rows",
    f"{ACCOUNTING}.accountant",
    f"{PACKAGE}.integrations",
]
# Models and losses of users are run on made-up batches; whatever they raise becomes a finding or a verdict.
MAY_CATCH_ALL = f"{PACKAGE}.trial"


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted((ROOT / PACKAGE).rglob("*.py"))}
PACKAGES = {name for name, path in FILES.items() if path.name == "__init__.py"}


def parsed(name: str) -> ast.Module:
    return ast.parse(FILES[name].read_text(encoding="utf-8"))


def imports(tree: ast.Module, name: str) -> set[str]:
    """Returns the absolute names of all modules imported anywhere in a module (in functions and type checks too)."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                own_package = name if name in PACKAGES else name.rpartition(".")[0]
                anchor = own_package.split(".")[: len(own_package.split(".")) - node.level + 1]
                base = ".".join([*anchor, base] if base else anchor)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                found.add(inner if inner in FILES else base)
    return found


@cache
def imported(name: str) -> set[str]:
    return imports(parsed(name), name)


def reachable(name: str) -> set[str]:
    """Returns every module that a module imports, directly or through modules of the package."""
    seen: set[str] = set()
    queue = [name]
    while queue:
        for target in imported(queue.pop()) - seen:
            seen.add(target)
            if target in FILES:
                queue.append(target)
    return seen


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def outside_of(targets: set[str], allowed: list[str]) -> set[str]:
    """Returns the imports that are neither in the standard library nor inside one of the allowed packages."""
    return {
        target
        for target in targets
        if target.split(".")[0] not in sys.stdlib_module_names
        and not any(inside(target, package) for package in allowed)
    }


def those_inside(targets: set[str], *packages: str) -> set[str]:
    return {target for target in targets if any(inside(target, package) for package in packages)}


def below(*packages: str) -> list[str]:
    return [name for name in FILES if any(inside(name, package) for package in packages)]


def row(name: str) -> int:
    """Returns the place of a module in ORDER: that of the longest name which it is inside of."""
    places = [
        (len(own), i)
        for i, line in enumerate(ORDER)
        for own in line.split()
        if inside(name, f"{PACKAGE}.{own}")
    ]
    assert places, f"{name} has no place in ORDER"
    return max(places)[1]


NUMBERS = [
    name
    for name in FILES
    if name != PACKAGE and row(name) == row(f"{PACKAGE}.algorithms.holder_numbers")
]  # the formulas of all algorithms


def offenders(
    wrong: Callable[[str], Iterable[str]], names: Iterable[str] = FILES
) -> dict[str, list[str]]:
    """Returns what is wrong in each module in which something is."""
    return {name: found for name in names if (found := sorted(wrong(name)))}


def test_the_analysis_imports_only_checks_errors_numpy_and_scipy():
    allowed = [*LEAVES, ANALYSIS, "numpy", "scipy"]
    assert offenders(lambda name: outside_of(imported(name), allowed), below(ANALYSIS)) == {}


def test_the_numbers_of_algorithms_import_only_the_analysis_besides():
    allowed = [*LEAVES, ANALYSIS, *NUMBERS, "numpy", "scipy"]
    assert offenders(lambda name: outside_of(imported(name), allowed), NUMBERS) == {}


def test_formulas_and_ledger_do_not_reach_torch():
    names = [*below(ACCOUNTING), *NUMBERS]
    assert offenders(lambda name: those_inside(reachable(name), "torch"), names) == {}


_WITHOUT_TORCH = """
import importlib, sys, types

package = types.ModuleType("torch_dpsco")  # in place of the file that gathers the public names
package.__path__ = [sys.argv[1]]
sys.modules.update(torch_dpsco=package, torch=None, opacus=None)
for name in sys.argv[2:]:
    importlib.import_module(name)
"""


def test_accounting_is_imported_and_asked_where_there_is_no_torch():
    modules = below(ACCOUNTING)
    asked = (
        "from torch_dpsco.accounting.accountant import Accountant\n"
        "from torch_dpsco.accounting.events import Gaussian\n"
        "accountant = Accountant(adjacency='replace_one')\n"
        "accountant.authorize(Gaussian(1.0, {'replace_one': 1.0}))\n"
        "assert 4 < accountant.get_epsilon(1e-5) < 5\n"
    )
    command = [sys.executable, "-c", _WITHOUT_TORCH + asked, str(ROOT / PACKAGE), *modules]
    subprocess.run(command, check=True)


@pytest.mark.slow
def test_imports_follow_the_order_of_the_architecture():
    names = [name for name in FILES if name not in (PACKAGE, f"{PACKAGE}.estimators")]
    upwards = offenders(
        lambda name: {
            t for t in imported(name) - {PACKAGE} if t in FILES and row(t) > row(name)
        },
        names,
    )
    assert upwards == {}


# The outer ring registers itself, in `acts` and the like.
OUTER = tuple(f"{PACKAGE}.{name}" for name in size.OUTER)


def test_nothing_inside_imports_the_outer_ring():
    inner = [name for name in FILES if name not in below(*OUTER, f"{PACKAGE}.__main__")]
    inner.remove(PACKAGE)  # it gathers the public names
    assert offenders(lambda name: those_inside(imported(name), *OUTER), inner) == {}


def test_rules_and_oracles_do_not_know_each_other():
    rules = f"{PACKAGE}.rules"
    gathered = imported(f"{PACKAGE}.oracles") - {PACKAGE, f"{PACKAGE}.acts"}
    assert offenders(lambda name: those_inside(reachable(name), *gathered), below(rules)) == {}
    assert offenders(lambda name: those_inside(reachable(name), rules), gathered) == {}


def test_opacus_is_imported_only_at_the_contact_points():
    names = [name for name in FILES if name not in below(*OPACUS_CONTACT)]
    assert offenders(lambda name: those_inside(imported(name), "opacus"), names) == {}


def private_uses(tree: ast.Module) -> Iterator[str]:
    """Yields what a module takes from torch or Opacus under a private name."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        for name in names:
            root, *rest = name.split(".")
            if (
                root in ("torch", "opacus")
                and "(" not in name
                and any(part.startswith("_") and part[1:2] != "_" for part in rest)
            ):
                yield name


@pytest.mark.weekly
def test_private_names_of_torch_and_opacus_are_in_compat_only():
    names = [name for name in FILES if name != f"{PACKAGE}.compat"]
    assert offenders(lambda name: private_uses(parsed(name)), names) == {}


@pytest.mark.slow
def test_private_attributes_of_modules_and_parameters_are_listed():
    """Hooks, counters and versions that other people's objects keep under a private name: no more than these."""
    known = {
        *("_parameters", "_buffers", "_modules"),  # of modules
        *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
        *("_version", "_post_accumulate_grad_hooks"),  # of parameters
        *(
            "_is_last_step_skipped",
            "autograd_grad_sample_hooks",
            "_forward_counter",
        ),  # of Opacus
    }
    telling = ("hooks", "_counter", "_version", "_parameters", "_buffers", "_skipped")

    def unknown(name: str) -> set[str]:
        return {
            node.attr
            for node in ast.walk(parsed(name))
            if isinstance(node, ast.Attribute)
            and node.attr.startswith("_")
            and node.attr.endswith(telling)
            and ast.unparse(node.value) not in ("self", "cls")
        } - known

    assert offenders(unknown, [name for name in FILES if name != f"{PACKAGE}.compat"]) == {}


@pytest.mark.slow
def test_every_module_has_a_docstring_and_at_most_500_lines_of_code():
    def wrong(name: str) -> Iterator[str]:
        if len((ast.get_docstring(parsed(name)) or "").split()) < 3:
            yield "no docstring"
        lines = size.lines_of_code(FILES[name])
        if lines > size.MOST_LINES:
            yield f"{lines} lines of code"

    assert offenders(wrong) == {}


@pytest.mark.slow
def test_only_packages_and_modules_that_pass_names_on_list_what_they_export():
    def wrong(name: str) -> Iterator[str]:
        body = parsed(name).body
        lists = [
            n
            for n in body
            if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"
        ]
        taken = {
            alias.asname or alias.name
            for n in body
            if isinstance(n, ast.ImportFrom)
            for alias in n.names
        }
        if lists and not taken & set(ast.literal_eval(lists[0].value)):
            yield "__all__ of names of its own"

    apart = {
        *PACKAGES,
        f"{PACKAGE}.compat",
        f"{PACKAGE}.estimators.reading",
    }
    assert offenders(wrong, [name for name in FILES if name not in apart]) == {}


# the doors of loops, which show their plan once unless they are told not to
_MAY_PRINT = (f"{PACKAGE}.private_loop", f"{PACKAGE}.train")


def forbidden(tree: ast.Module, name: str) -> Iterator[str]:
    """Yields what no module of the package may contain."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "print"
            and name not in _MAY_PRINT
        ):
            yield f"line {node.lineno}: print"
        if isinstance(node, ast.ExceptHandler):
            caught = ast.unparse(node.type) if node.type else ""
            last = node.body[-1]
            cleans_up = (
                caught == "BaseException" and isinstance(last, ast.Raise) and last.exc is None
            )
            allowed = caught == "Exception" and name == MAY_CATCH_ALL
            if caught in {"", "Exception", "BaseException"} and not cleans_up and not allowed:
                yield f"line {node.lineno}: except {caught}"
        if isinstance(node, ast.Global):
            yield f"line {node.lineno}: global"
        named = getattr(node, "attr", getattr(node, "id", getattr(node, "name", None)))
        if isinstance(named, str) and (
            named == "meta_path"
            or (named.startswith("register_module_") and named.endswith("_hook"))
        ):
            yield f"line {node.lineno}: {named}"
        if (
            isinstance(node, ast.Attribute)
            and node.attr == "__class__"
            and not isinstance(node.ctx, ast.Load)
        ):
            yield f"line {node.lineno}: __class__"
    bars = [f"{PACKAGE}.{place}" for place in ("train", "show.bar")]
    if name not in bars and any(inside(target, "tqdm") for target in imports(tree, name)):
        yield "tqdm outside train.py and bar.py"


def test_no_prints_but_plans_no_blanket_except_nothing_global_no_progress_bar_outside_of_train_and_bar():
    assert offenders(lambda name: forbidden(parsed(name), name)) == {}


def test_the_top_level_has_at_most_47_names_and_says_where_others_are():
    names = [
        name
        for name in torch_dpsco.__all__
        if not isinstance(getattr(torch_dpsco, name), ModuleType)
    ]
    assert len(names) <= 47
    for name, where in (("BudgetExceeded", "dp.errors"), ("PoissonSampler", "dp.sampling")):
        with pytest.raises(AttributeError, match=rf"dp has no '{name}': it is {where}\.{name}"):
            getattr(torch_dpsco, name)
    with pytest.raises(AttributeError, match="module 'torch_dpsco' has no attribute 'Typo'"):
        _ = torch_dpsco.Typo


# -- what is loaded ---------------------------------------------------------------------------------------------------

_HEAVY = (
    *("torch", "opacus", "scipy", "sklearn", "pandas", "matplotlib", "tqdm"),
    *(f"{PACKAGE}.{part}" for part in ("accounting", "rows", "step", "estimators", "diagnosis")),
)
# models, and what they are fitted by, need no loop of training
_OF_TRAINING = ("train", "private_loop", "diagnosis", "audits", "algorithms", "fast.compiled")
_SAVED = """
import torch_dpsco as dp
problem = dp.losses.Logistic().problem(bound_x=1.0)
plan = dp.HolderSGD.plan(problem=problem, n=100, noise_multiplier=1.0, steps=3, batch_size=10)
print(json.dumps(plan.to_dict()))
"""
_READ = """
from torch_dpsco.step.plan import Plan
saved = json.loads(sys.argv[1])
assert "torch_dpsco.algorithms.holder" not in sys.modules
print(Plan.from_dict(saved).to_dict() == saved)
"""


def said(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", f"import json, sys\n{code}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def loaded_by(code: str) -> set[str]:
    return set(said(f"{code}\nprint(*sys.modules)").split())


def test_the_package_loads_nothing_before_it_is_asked() -> None:
    assert those_inside(loaded_by("import torch_dpsco"), *_HEAVY) == set()
    found = loaded_by("import torch_dpsco as dp; dp.Budget(1.0, 1e-6)")
    assert f"{ACCOUNTING}.budgets" in found
    assert those_inside(found, "torch", "opacus", f"{PACKAGE}.step") == set()


@pytest.mark.slow
def test_estimators_load_nothing_of_training_loops() -> None:
    found = loaded_by("import torch_dpsco.estimators.models")
    assert (
        those_inside(found, "opacus", *(f"{PACKAGE}.{part}" for part in _OF_TRAINING)) == set()
    )


def test_public_names_are_there_for_type_checkers_for_dir_and_for_use() -> None:
    checked = next(
        node
        for node in parsed(PACKAGE).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    homes = {
        alias.asname: node.module
        for node in checked.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(homes, key=str) == torch_dpsco.__all__
    shown = [name for name in dir(torch_dpsco) if not name.startswith("__")]
    assert shown == torch_dpsco.__all__
    for name, home in homes.items():
        value = getattr(torch_dpsco, name)
        assert value is getattr(importlib.import_module(home), name)
        # a module of this name would take its place in the package as soon as it is imported
        assert isinstance(value, ModuleType) or f"{PACKAGE}.{name}" not in FILES


@pytest.mark.slow
def test_a_saved_plan_is_read_before_its_optimizer_was_used() -> None:
    assert said(_READ, said(_SAVED)) == "True\n"


# The checks themselves: each must see what it is there to see.


def test_imports_are_found_wherever_they_hide():
    source = """
import os.path
from torch import nn
from torch_dpsco import errors, __doc__
from . import _validate
from .accounting import analysis
def f():
    import scipy.special as sp
    if TYPE_CHECKING:
        from ..oracles import base
"""
    assert imports(ast.parse(source), f"{PACKAGE}.step.chooser") >= {
        "os.path",
        "torch",
        "scipy.special",
    }
    at_top = imports(
        ast.parse("from . import _validate\nfrom .accounting import analysis"),
        f"{PACKAGE}.problem",
    )
    assert at_top == {f"{PACKAGE}._validate", ANALYSIS}
    in_package = imports(
        ast.parse("from .accounting import analysis\nfrom . import errors"), PACKAGE
    )
    assert in_package == {ANALYSIS, f"{PACKAGE}.errors"}
    from_inner = imports(
        ast.parse("from ..oracles import base\nfrom ...errors import X"), f"{ANALYSIS}.convert"
    )
    assert from_inner == {f"{ACCOUNTING}.oracles", f"{PACKAGE}.errors"}
    of_package = imports(
        ast.parse("from torch_dpsco import errors, __doc__"), f"{PACKAGE}.problem"
    )
    assert of_package == {f"{PACKAGE}.errors", PACKAGE}


def test_forbidden_things_are_found():
    source = """
from tqdm import tqdm
from torch.nn.modules.module import register_module_backward_hook as taken
def f():
    global state
    sys.meta_path.insert(0, None)
    torch.nn.modules.module.register_module_forward_pre_hook(f)
    f.__class__ = f.__class__
    print("x")
    try:
        pass
    except Exception as error:
        pass
    try:
        pass
    except:
        pass
    try:
        pass
    except BaseException:
        raise ValueError
    try:
        pass
    except BaseException:
        clean_up()
        raise
"""
    found = list(forbidden(ast.parse(source), f"{PACKAGE}.sampling"))
    things = sorted(item.split(": ")[1] for item in found if item.startswith("line"))
    assert things == [
        "__class__",
        "except ",
        "except BaseException",
        "except Exception",
        "global",
        "meta_path",
        "print",
        "register_module_backward_hook",
        "register_module_forward_pre_hook",
    ]
    assert "tqdm outside train.py and bar.py" in found
    assert list(forbidden(ast.parse("from tqdm import tqdm"), f"{PACKAGE}.train")) == []


def test_private_names_are_found_however_they_are_taken():
    source = """
import torch._dynamo
from torch.utils._pytree import tree_map
from torch import _foreach_add_
torch._C._x()
torch.__version__
opacus.optimizers.optimizer._check(1)
"""
    found = set(private_uses(ast.parse(source)))
    assert {
        "torch._dynamo",
        "torch.utils._pytree.tree_map",
        "torch._foreach_add_",
        "torch._C._x",
    } <= found
    assert "opacus.optimizers.optimizer._check" in found
    assert "torch.__version__" not in found


def test_everything_is_caught_in_one_place_only():
    handlers = [
        node for node in ast.walk(parsed(MAY_CATCH_ALL)) if isinstance(node, ast.ExceptHandler)
    ]
    assert [ast.unparse(node.type) for node in handlers] == ["Exception"]
    assert len(list(forbidden(parsed(MAY_CATCH_ALL), f"{PACKAGE}.diagnosis.probe"))) == 1


def test_foreign_packages_are_told_from_the_standard_library():
    targets = {
        "math",
        "collections.abc",
        "numpy.typing",
        "numpydoc",
        "torch.nn",
        f"{PACKAGE}.errors",
        ANALYSIS,
    }
    assert outside_of(targets, [*LEAVES, "numpy"]) == {"numpydoc", "torch.nn", ANALYSIS}


def test_the_package_is_where_this_test_looks():
    assert {PACKAGE, ANALYSIS, *LEAVES} <= set(FILES)


@pytest.mark.parametrize(
    "name", ["", *(f".{name}" for name in torch_dpsco.__all__ if name.islower())]
)
def test_dir_is_what_exists_and_is_public(name: str) -> None:
    place = torch_dpsco if not name else getattr(torch_dpsco, name[1:])
    if not isinstance(place, ModuleType):
        return
    shown = [word for word in dir(place) if not word.startswith("__")]
    assert shown
    for word in shown:
        assert not word.startswith("_")
        value = getattr(place, word)
        home = value.__name__ if isinstance(value, ModuleType) else value.__module__
        assert home.startswith(PACKAGE), word
