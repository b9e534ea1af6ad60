"""The examples as a newcomer runs them, and the README that quotes them: printed figures are recomputed here."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import inspect
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import dp_accounting
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from sklearn.metrics import accuracy_score, roc_auc_score
from torch import nn

import torch_dpsco as dp
from torch_dpsco.accounting.calibrate import rounded_up
from torch_dpsco.accounting.events import PoissonGaussian

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
README = (ROOT / "README.md").read_text(encoding="utf-8")
START = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
NAMES = ["existing_loop", "logistic_regression"]
# integrations/test_hf_examples.py, test_adult.py, test_flights.py, test_linear_examples.py, ...
TESTED_ELSEWHERE = {
    *("adult", "flights", "from_opacus", "linear_regression", "quantile_regression", "svm"),
    *("heavy_tailed_regression", "lasso", "shuffle_model", "user_level"),
    *("torchrun", "ray_train", "spark", "shards"),  # tests/integrations/test_launchers.py
    *("accelerate_loop", "hf_trainer", "lightning_module"),
    *(
        "study",
        "adversarial",
        "estimators",
        "out_of_core",
        "output_perturbation",
        "tilted",
        "private_head",
    ),
    "pictures",
}
N, EPSILON, DELTA = 32_561, 1.0, 1e-5


def load(name: str) -> ModuleType:
    """Imports a script by its path; it finds `adult` beside itself, as it does when it is run."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        spec.loader.exec_module(module)
        sys.modules.pop("adult", None)
    return module


class Run(NamedTuple):
    """One quick run: what it returned and printed, and the models that it trained, the private one last."""

    figures: dict[str, float]
    text: str
    models: list[nn.Module]


def run_quick(name: str, folder: Path) -> Run:
    module, models = load(name), []

    def spied(function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            result = function(*args, **options)
            models.append(result[0] if isinstance(result, tuple) else result)
            return result

        return call

    text = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(text):
        patch.chdir(folder)
        if name == "logistic_regression":
            patch.setattr(module, "fit_baseline", spied(module.fit_baseline))
            patch.setattr(module.dp, "fit", spied(module.dp.fit))
        else:
            patch.setattr(module, "before", spied(module.before))
            patch.setattr(module, "after", spied(module.after))
        details = ["--details"] if name == "logistic_regression" else []
        figures = module.main(["--quick", *details])
    if name == "logistic_regression":
        models.reverse()
    return Run(figures, text.getvalue(), models)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("of_a_newcomer")


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Run]:
    return {name: run_quick(name, folder) for name in NAMES}


@pytest.fixture(scope="module")
def adult() -> ModuleType:
    return load("adult")


@pytest.fixture(scope="module")
def data(adult: ModuleType) -> Any:
    return adult.load_adult()


def blocks(kind: str, page: str = README) -> list[str]:
    """Returns the code blocks of a kind ("" for those without one) of a page."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    found = [text for name, text in fenced if name == kind]
    assert found, f"the page has no block of kind {kind!r}"
    return found


def spent(text: str) -> tuple[str, dict[str, str], int, PoissonGaussian]:
    """Returns the quoted epsilon, those of other adjacencies, the number of steps and their event."""
    assert "-differential privacy, add_remove: the data set has one example more or less" in text
    quoted = re.search(r"^spent: \((\S+), 1e-05\)-diff", text, flags=re.MULTILINE)[1]
    others = dict(
        re.findall(r"^  (zero_out|replace_one): epsilon (\S+)$", text, flags=re.MULTILINE)
    )
    events = re.findall(
        r"^  event: (\d+) x PoissonGaussian\(noise_multiplier=(\S+), q=(\S+)\)$",
        text,
        re.MULTILINE,
    )
    assert len(events) == 1
    steps, noise, rate = events[0]
    return quoted, others, int(steps), PoissonGaussian(float(noise), float(rate))


def assert_spent_is_true(text: str, slack: float = 1e-3) -> None:
    """Recomputes all epsilons from the printed event, and bounds the quoted one by the privacy loss distribution."""
    quoted, others, steps, event = spent(text)
    accountant = dp.Accountant(adjacency="add_remove")
    accountant.record(event, steps)
    assert set(others) == {"zero_out", "replace_one"}
    for adjacency, shown in {"add_remove": quoted, **others}.items():
        true = accountant.get_epsilon(DELTA, adjacency=adjacency)
        assert true <= float(shown) <= (1 + slack) * true
    judge = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    gaussian = dp_accounting.GaussianDpEvent(event.noise_multiplier)
    judge.compose(dp_accounting.PoissonSampledDpEvent(event.q, gaussian), steps)
    assert judge.get_epsilon(DELTA) <= float(quoted) <= EPSILON


# -- the scripts ------------------------------------------------------------------------------------------------------


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*NAMES, *TESTED_ELSEWHERE}


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_one_page_that_says_how_to_run_it(name: str) -> None:
    source = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) < 120
    docstring = ast.get_docstring(ast.parse(source))
    for command in (f"python examples/{name}.py ", f"python examples/{name}.py --quick"):
        assert command in docstring


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("name", NAMES)
def test_an_example_spends_what_it_prints_and_no_more_than_its_budget(
    name: str, runs: dict[str, Run]
) -> None:
    figures, text, _ = runs[name]
    assert_spent_is_true(text)
    quoted, others, _, _ = spent(text)
    assert rounded_up(figures["epsilon"]) == quoted
    assert 0.99 * EPSILON < figures["epsilon"] <= EPSILON
    if "epsilon_replace_one" in figures:
        assert rounded_up(figures["epsilon_replace_one"]) == others["replace_one"]


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("name", NAMES)
def test_printed_scores_are_those_returned_and_those_of_the_trained_models(
    name: str, runs: dict[str, Run], data: Any
) -> None:
    figures, text, models = runs[name]
    labels = data.test_labels.numpy()
    for line, prefix, model in zip(
        ("not private", "private"), ("baseline_", ""), models, strict=True
    ):
        printed = re.search(
            rf"^{line}\s+(?:accuracy )?(0\.\d{{4}})\s+(?:AUC )?(0\.\d{{4}})$", text, re.MULTILINE
        )
        with torch.no_grad():
            scores = model(data.test_features).squeeze(1).numpy()
        recomputed = {
            "accuracy": accuracy_score(labels, scores > 0),
            "auc": roc_auc_score(labels, scores),
        }
        for kind, shown in zip(("accuracy", "auc"), printed.groups(), strict=True):
            assert float(shown) == pytest.approx(recomputed[kind], abs=5.1e-5)
            assert figures.get(f"{prefix}{kind}", recomputed[kind]) == pytest.approx(
                recomputed[kind], abs=1e-9
            )


def test_the_private_model_has_learned_and_the_other_is_better(runs: dict[str, Run]) -> None:
    for run in runs.values():
        assert 0.7 < run.figures["auc"] < run.figures["baseline_auc"] + 0.01
    loop = runs["existing_loop"].figures
    assert (
        loop["auc"] > loop["baseline_auc"] - 0.03
    )  # equal steps and rates: the noise costs little


def test_noise_and_steps_of_the_logistic_example_are_known_in_advance(
    runs: dict[str, Run],
) -> None:
    problem = dp.losses.Logistic().problem(bound_x=3.61)
    budget = dp.Budget(EPSILON, DELTA, adjacency="add_remove")
    plan = dp.HolderSGD.plan(problem=problem, n=N, budget=budget, epochs=0.1, dim=66)
    _, _, steps, event = spent(runs["logistic_regression"].text)
    assert (steps, event) == (
        plan.steps,
        PoissonGaussian(plan.noise_multiplier, plan.batch_size / N),
    )
    assert f"\n{steps} steps in " in runs["logistic_regression"].text


def test_the_verdict_of_the_logistic_example_is_that_of_its_figures(
    runs: dict[str, Run],
) -> None:
    figures, text, _ = runs["logistic_regression"]
    verdict = text.split(" s\n\n")[1]
    changed = [
        100 * (figures[kind] - figures[f"baseline_{kind}"]) for kind in ("accuracy", "auc")
    ]
    said = re.search(
        r"Privacy and the short run changed accuracy by (\S+) and AUC by (\S+) points", verdict
    )
    assert tuple(map(float, said.groups())) == pytest.approx(changed, abs=0.0051)
    assert f"right about {100 * figures['accuracy']:.1f} % of the people" in verdict
    _, _, steps, event = spent(text)
    accountant = dp.Accountant(adjacency="add_remove")
    accountant.record(event, steps)
    right = float(re.search(r"wins at most (\S+) % of even bets", verdict)[1])
    assert (
        50 * (1 + accountant.get_delta(0.0))
        <= right
        <= 50 * (1 + accountant.get_delta(0.0)) + 0.11
    )
    assert "whether one given person is in the data" in verdict


def test_the_card_of_the_logistic_example_is_where_it_says(
    runs: dict[str, Run], folder: Path
) -> None:
    shown = runs["logistic_regression"].text.split()[-1]
    assert shown == "privacy_card.md"
    assert "differential privacy for one example (add_remove: added or removed)" in (
        folder / shown
    ).read_text(encoding="utf-8")


def test_without_matplotlib_the_card_of_the_logistic_example_is_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert Path("privacy_card.md") == load("logistic_regression").CARD


def test_a_file_that_is_there_is_not_taken_for_the_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.md").write_text("mine", encoding="utf-8")
    with pytest.raises(SystemExit):
        load("logistic_regression").main(["--quick", "--card", "mine.md"])
    assert "--card must be a new file (got mine.md)" in capsys.readouterr().err
    assert Path("mine.md").read_text(encoding="utf-8") == "mine"


@pytest.mark.weekly
def test_the_options_of_the_logistic_example_reach_the_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main, card = load("logistic_regression").main, tmp_path / "card.json"
    options = [
        "--quick",
        "--details",
        "--epsilon",
        "0.5",
        "--delta",
        "1e-6",
        "--adjacency",
        "replace_one",
        "--epochs",
        "3",
    ]
    figures = main([*options, "--card", str(card)])
    shown = capsys.readouterr().out
    assert shown.endswith(f": {card}\n")
    assert "which of two records one given person has" in shown
    assert card.is_file()
    assert 0.495 < figures["epsilon"] == figures["epsilon_replace_one"] <= 0.5
    assert (
        f"spent: ({rounded_up(figures['epsilon'])}, 1e-06)-differential privacy, replace_one"
        in shown
    )


# -- the README and docs/start.md -------------------------------------------------------------------------------------


def source_lines(module: ModuleType, name: str) -> list[str]:
    return inspect.getsource(getattr(module, name)).splitlines()


def test_the_diff_of_the_start_is_that_of_the_example() -> None:
    lines = blocks("diff", START)[0].splitlines()
    module = load("existing_loop")
    before, after = source_lines(module, "before"), source_lines(module, "after")
    removed, added, common = ([line[1:] for line in lines if line[0] == sign] for sign in "-+ ")
    assert len(removed) == 4
    assert len(added) > 0
    assert len(removed) + len(added) + len(common) == len(lines)
    assert [line for line in before if line in removed] == removed
    assert [line for line in after if line in added] == added
    for line in common:
        assert line in before
        assert line in after
    assert not set(removed) & set(after)
    assert not set(added) & set(before)
    # ... and nothing else is different but the promises of the private run and what it returns
    rest = [line for line in after if line not in added and line not in before]
    allowed = (
        "def after",
        '"""',
        "budget = dp.Budget(",
        "problem = dp.losses.",
        "return model, optimizer",
    )
    assert [line for line in rest if not line.strip().startswith(allowed)] == []


def names_of_dp(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("dp."):
            yield re.match(r"[\w.]+", ast.unparse(node))[0]


def test_readme_and_start_name_only_what_exists() -> None:
    source = "\n".join(blocks("python") + blocks("python", START))
    found = set(names_of_dp(ast.parse(source)))
    assert {"dp.Budget", "dp.HolderSGD.plan", "dp.fit", "dp.make_private"} <= found
    for name in found:
        thing: Any = dp
        for part in name.split(".")[1:]:
            assert hasattr(thing, part), f"{name} does not exist"
            thing = getattr(thing, part)


def printed_by(block: str, scope: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    exec(compile(block, "README.md", "exec"), scope)
    return capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:::lightning")
def test_every_python_block_of_the_readme_prints_what_stands_below_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the order of the page, in one namespace that is empty before: a name that the page does not define fails."""
    scope: dict[str, Any] = {}
    study, plan, loop, trainer = (printed_by(block, scope, capsys) for block in blocks("python"))
    _, shown = blocks("")
    score = re.compile(
        r"auc (0\.\d{3}) \+- 0\.\d{3} \(95 %: 0\.\d{3} to 0\.\d{3}; by chance 0\.5\)\n"
    )
    # about 4,000 patients are scored: sampling and noise move it by .006
    assert abs(float(score.fullmatch(study)[1]) - float(score.fullmatch(shown)[1])) < 0.04
    assert scope["study"].report().figures.epsilon <= 1.0
    assert plan.startswith("NetPlan: privacy for one example")
    assert loop == ""  # verbose=False
    assert "epsilon: 3.000" in trainer  # in its bar
    for made in (scope["optimizer"], scope["private"].optimizer):
        assert 2.99 < made.report().epsilon <= 3.0
    inputs, labels = scope["data"].tensors
    assert float((scope["net"](inputs).argmax(1) == labels).double().mean()) > 0.8


def test_the_readme_is_a_door_and_not_the_house() -> None:
    assert len(README.splitlines()) <= 165
    for block in blocks("python"):
        code = [
            line
            for line in block.splitlines()
            if line and not line.startswith(("import", "from"))
        ]
        assert len(code) <= 12


@pytest.mark.slow
def test_every_python_block_of_the_start_runs_as_it_stands(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the order of the page, in one namespace that is empty before: a name that the page does not define fails."""
    torch.manual_seed(
        0
    )  # where lines of the doctor are broken depends on the digits of a figure
    scope: dict[str, Any] = {}
    tour, doctor = (printed_by(block, scope, capsys) for block in blocks("python", START))
    plan = dp.HolderSGD.plan(problem=scope["problem"], n=N, budget=scope["budget"])
    assert str(plan) in tour
    assert (
        "(1, 1e-05)-differential privacy for one example (replace_one: replaced by any other)."
        in tour
    )
    shown = next(block for block in blocks("", START) if block.startswith("CRITICAL"))
    for line in shown.splitlines():
        assert re.sub(r"\d\.\d+|\.\.\.$", "", line)[:60] in re.sub(r"\d\.\d+", "", doctor)


@pytest.mark.slow
def test_the_tour_of_the_start_learns_its_data_and_spends_its_budget(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Labels that the loss does not take cost the budget and leave an accuracy of 0.5, without a word."""
    scope: dict[str, Any] = {}
    shown = printed_by(blocks("python", START)[0], scope, capsys)
    model, optimizer = scope["model"], scope["optimizer"]
    assert str(optimizer.report()) in shown
    assert optimizer.report().epsilon <= 1.0
    assert (optimizer.steps, optimizer.finalized) == (scope["plan"].steps, True)
    assert scope["private_sgd"].steps == 0
    assert float(scope["features"].norm(dim=1).max()) <= 3.47 * (1 + 1e-6)
    with torch.no_grad():
        right = (model(scope["features"]) > 0) == (scope["labels"] > 0)
    assert float(right.double().mean()) > 0.8


@pytest.mark.slow
def test_the_figures_of_the_readme_are_those_of_a_run(adult: ModuleType, data: Any) -> None:
    # It was printed once: later accounting may be up to 2 % tighter, but the README must never say less than is true.
    shown = next(block for block in blocks("") if block.startswith("test set of"))
    problem = dp.losses.Logistic().problem(bound_x=adult.ROW_NORM_BOUND)
    plan = dp.HolderSGD.plan(
        problem=problem, n=N, budget=dp.Budget(EPSILON, DELTA, adjacency="add_remove"), dim=66
    )
    assert f"\n{plan.steps} steps in " in shown
    accountant = dp.Accountant(adjacency="add_remove")
    accountant.record(PoissonGaussian(plan.noise_multiplier, plan.batch_size / N), plan.steps)
    promised = re.search(r"^\((\S+), 1e-05\)-differential privacy for one", shown, re.MULTILINE)
    assert accountant.get_epsilon(DELTA) <= float(promised[1]) == EPSILON
    bets = float(re.search(r"wins at most (\S+) % of even bets", shown)[1])
    assert 0 <= bets - 50 * (1 + accountant.get_delta(0.0)) <= 0.11
    model = adult.fit_baseline(data.train_features, data.train_labels)
    scores = model(data.test_features)
    baseline = (adult.accuracy(scores, data.test_labels), adult.auc(scores, data.test_labels))
    line = re.search(r"^not private +(\S+) +(\S+)$", shown, flags=re.MULTILINE)
    assert tuple(map(float, line.groups())) == pytest.approx(baseline, abs=3e-4)
