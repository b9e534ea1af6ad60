"""The command line: what each command prints, its exit codes, and one sentence for each bad usage."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import torch_dpsco as dp
from torch_dpsco.accounting.events import PoissonGaussian
from torch_dpsco.estimators.schema import Category, Number
from torch_dpsco.show import commands
from torch_dpsco.show.cli import main
from torch_dpsco.step.plan import Plan

PAGE = (Path(__file__).parents[2] / "docs" / "command_line.md").read_text(encoding="utf-8")
COMMANDS = [
    line
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
]
SCRIPT = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
BUDGET = "--n 10000 --epsilon 1 --delta 1e-6"
LOGISTIC = f"plan HolderSGD --loss logistic --bound-x 1 {BUDGET}"


def write_tables(rows: int = 400) -> None:
    """Writes a private table, a public one and their schema."""
    draws = np.random.default_rng(0)
    age, sex = draws.integers(17, 91, rows), draws.choice(["f", "m"], rows)
    lines = [
        f"{k},{a},{s},{'yes' if a > 50 else 'no'}"
        for k, (a, s) in enumerate(zip(age, sex, strict=True))
    ]
    Path("table.csv").write_text("\n".join(["id,age,sex,died", *lines]))
    Path("open.csv").write_text('sex,age,died,note\nf,20,no,"fell\nm,90,yes,\n')
    Path("new.csv").write_text("sex,age\nf,20\nm,90\nm,?\n")
    kinds = {"age": Number(17, 90), "sex": Category(["f", "m"])}
    dp.Schema(kinds, target="died", labels=["no", "yes"], ids="id", unit="patient").save(
        "schema.toml"
    )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the page's script and a ledger file, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("script.py").write_text(
        f"{SCRIPT}\n\ndef loud():\n    return {{'mechanism': float, 'pair': (0.0, 1.0)}}\n\n\ndef broken():\n"
        "    raise KeyError('x')\n\n\ndef few():\n    return (1,)\n\n\ndef coupled():\n"
        "    return parts() | {'loss': lambda s, y: torch.logsumexp(y * s, 0).sum()}\n"
    )
    write_tables()
    accountant = dp.Accountant(adjacency="add_remove", ledger_path="run.ledger")
    accountant.authorize(PoissonGaussian(2.0, 0.01), 10)
    yield accountant
    sys.modules.pop("script", None)


def run(capsys, words: str) -> tuple[int, str, str]:
    code = main(shlex.split(words))
    return code, *capsys.readouterr()


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_page_find_nothing_wrong(command, folder, capsys):
    assert command.startswith("dpsco ")
    if command.startswith("dpsco init"):
        Path("schema.toml").unlink()
    if command.startswith("dpsco predict"):
        (fit,) = [one for one in COMMANDS if one.startswith("dpsco fit")]
        assert run(capsys, fit.removeprefix("dpsco "))[0] == 0
    code, out, err = run(capsys, command.removeprefix("dpsco "))
    assert (code, err) == (0, "")
    assert out.strip()


@pytest.mark.weekly
def test_a_table_becomes_a_folder_that_may_be_published(folder, capsys):
    code, out, err = run(
        capsys,
        "fit table.csv --schema schema.toml --epsilon 4 --out study --ledger study.ledger",
    )
    assert (code, err) == (0, "")
    assert out.index("Study of 'died'") < out.index(" of 'died': auc ")
    assert {path.name for path in Path("study").iterdir()} == {
        "model.json",
        "report.html",
        "summary.txt",
        "study.svg",
    }
    assert "for one patient" in Path("study/report.html").read_text()
    assert "whole: ledger" in run(capsys, "ledger check study.ledger")[1]
    code, out, err = run(capsys, "predict study/model.json new.csv")
    assert code == 0
    assert "nothing protects what that tells about these people" in err
    first, *rows = out.splitlines()
    assert first == "prediction,probability of no,probability of yes"
    assert [row.partition(",")[0] for row in rows] == ["no", "yes", ""]
    assert run(capsys, "predict study/model.json new.csv --out study/model.json")[0] == 2
    assert "quotes enclose whole cells" in run(capsys, "predict study/model.json open.csv")[2]


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (f"{LOGISTIC} --save run.ledger", "--save"),
        (f"{LOGISTIC} --save plan.json --plot run.ledger", "--plot"),
        (f"{LOGISTIC} --save link", "--save"),
        ("report run.ledger --delta 1e-6 --plot run.ledger", "--plot"),
        ("predict study/model.json new.csv --out run.ledger", "--out"),
    ],
)
def test_no_command_overwrites_a_file(words, option, folder, capsys):
    """It may be a ledger: one that is written over forgets what was spent."""
    Path("link").symlink_to("nowhere")
    before = Path("run.ledger").read_bytes()
    code, out, err = run(capsys, words)
    assert (code, out) == (2, "")
    assert err.startswith(f"dpsco: {option} must be a new file (got ")
    assert Path("run.ledger").read_bytes() == before
    assert not Path("plan.json").exists()
    assert not Path("nowhere").exists()


def test_a_file_that_came_meanwhile_is_left_as_it_is(tmp_path):
    """Between the check of the options and the end of a fit somebody may have made a ledger of that name."""
    ledger = tmp_path / "run.ledger"
    ledger.write_bytes(b"spent")
    with pytest.raises(FileExistsError):
        commands.write(str(ledger), b"answer")
    assert ledger.read_bytes() == b"spent"


def test_a_table_that_cannot_be_read_is_refused_unless_told(folder, capsys):
    text = Path("table.csv").read_text().replace("yes", "Yes").replace("no", "No")
    Path("table.csv").write_text(text)
    words = "fit table.csv --schema schema.toml --epsilon 4 --out study --ledger study.ledger"
    code, out, err = run(capsys, words)
    assert (code, out) == (2, "")
    assert "STOPS A STUDY: died: 100.0% of values are none of the labels" in err
    assert err.splitlines()[-1].startswith(
        "dpsco: the table must be one that its schema can read"
    )
    assert not Path("study.ledger").exists()
    code, out, err = run(capsys, f"{words} --unchecked")
    assert (code, err) == (0, "")


@pytest.mark.slow
def test_a_plan_is_that_of_the_class(folder, capsys):
    problem = dp.losses.Logistic().problem(bound_x=1.0)
    plan = dp.HolderSGD.plan(
        problem=problem, n=10_000, budget=dp.Budget(1.0, 1e-6, "add_remove")
    )
    code, out, _ = run(capsys, f"{LOGISTIC} --adjacency add_remove --json --save plan.json")
    assert code == 0
    assert (
        Plan.from_dict(json.loads(out))
        == plan
        == Plan.from_dict(json.loads(Path("plan.json").read_text()))
    )
    assert run(capsys, f"{LOGISTIC} --adjacency add_remove")[1] == f"{plan}\n"


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(
    "words",
    [
        f"HolderSGD --lipschitz 1 --lr 0.1 {BUDGET}",
        f"HolderOutputSGD --loss hinge --power 1.5 --bound-x 1 --radius 10 --dim 11 {BUDGET}",
        f"NetSGD --dim 1000 {BUDGET}",
        f"CorrelatedSGD --clip 1 --lr 0.1 --radius inf --epochs 2 --batch-size 100 {BUDGET}",
        "UserClippedSGD --n 1000 --clip 1 --lr 0.1 --epochs 2 --batch-size 100 --epsilon 1 --delta 1e-6",
        "ClippedSGD --n 1000 --clip 1 --lr 0.1 --noise-multiplier 2 --batch-size 100 --adjacency zero_out",
    ],
)
def test_options_follow_the_class(words, capsys):
    code, out, err = run(capsys, f"plan {words}")
    assert (code, err) == (0, "")
    assert "epsilon" in out


def test_a_report_says_what_the_accountant_says(folder, capsys):
    assert run(capsys, "report run.ledger --delta 1e-6") == (0, f"{folder.report(1e-6)}\n", "")
    found = json.loads(
        run(capsys, "report run.ledger --delta 1e-6 --json --adjacency replace_one")[1]
    )
    assert found["adjacency"] == "replace_one"
    assert found["epsilon"] == folder.get_epsilon(1e-6, adjacency="replace_one")
    assert found["ledger_id"] == folder.ledger_id


def test_reading_a_ledger_changes_nothing(folder, capsys):
    names = ("run.ledger", "run.ledger.mark")
    before = [(Path(name).read_bytes(), Path(name).stat().st_mtime_ns) for name in names]
    assert (
        run(capsys, "ledger check run.ledger")[0]
        == run(capsys, "report run.ledger --delta 1e-6")[0]
        == 0
    )
    assert [(Path(name).read_bytes(), Path(name).stat().st_mtime_ns) for name in names] == before
    folder.authorize(PoissonGaussian(2.0, 0.01))  # the run goes on
    assert "11 events" in run(capsys, "ledger check run.ledger")[1]


def test_a_ledger_that_is_not_whole_is_found(folder, capsys):
    file, mark = Path("run.ledger"), Path("run.ledger.mark")
    content, marked = file.read_bytes(), mark.read_bytes()
    whole_lines = content.splitlines(keepends=True)
    for name, damaged, kept in (
        ("cut", b"".join(whole_lines[:-1]), marked),
        ("torn", content[:-5], marked),
        ("altered", content.replace(b'"count": 10', b'"count": 1'), marked),
        ("mark", content, marked.replace(b'"events": ', b'"events": 9')),  # both of its slots
    ):
        file.write_bytes(damaged), mark.write_bytes(kept)
        code, out, err = run(capsys, "ledger check run.ledger")
        assert (code, out, err.count("\n")) == (1, "", 1), name
        assert file.read_bytes() == damaged
    file.write_bytes(content), mark.unlink()
    code, out, _ = run(capsys, "ledger check run.ledger")
    assert code == 1
    assert "has no mark" in out
    assert not mark.exists()


def test_critical_findings_and_refuted_claims_end_with_1(folder, capsys):
    code, out, _ = run(capsys, "doctor script.py:coupled")
    assert code == 1
    assert "CRITICAL: coupled records" in out
    code, out, _ = run(capsys, "doctor script.py:coupled --json")
    assert (code, json.loads(out)[0]["name"], json.loads(out)[0]["severity"]) == (
        1,
        "coupled-records",
        "critical",
    )
    audit = "audit script.py:loud --delta 1e-5 --trials 200 --claim 1 --seed 3"
    code, out, _ = run(capsys, audit)
    assert code == 1
    assert "REFUTED" in out


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("suffix", "start"), [("svg", b"<?xml"), ("png", b"\x89PNG"), ("pdf", b"%PDF")]
)
def test_pictures_are_written_as_their_suffix_says(suffix, start, folder, capsys):
    pytest.importorskip("matplotlib")
    for words in (LOGISTIC, "report run.ledger --delta 1e-6"):
        assert run(capsys, f"{words} --plot drawn.{suffix}")[0] == 0
        assert Path(f"drawn.{suffix}").read_bytes().startswith(start)
        Path(f"drawn.{suffix}").unlink()


@pytest.mark.cases(10, 5)
@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "COMMAND"),
        ("plan Holder", "ALGORITHM must be one of .*HolderSGD.* \\(got 'Holder'\\)"),
        ("plan NoisyGD", "ALGORITHM must be"),
        ("plan HolderSGD --foo 3", "--foo 3"),
        (f"plan HolderSGD {BUDGET}", "--loss must be given"),
        (f"plan HolderSGD --loss logistic {BUDGET}", "--bound-x must be given"),
        (f"plan HolderSGD --loss logistc {BUDGET}", "--loss: invalid choice: 'logistc'"),
        (f"{LOGISTIC} --width 2", "--width must be left out: .* \\(got 2\\)"),
        (f"{LOGISTIC} --n ten", "--n must be an integer \\(got 'ten'\\)"),
        ("plan CorrelatedSGD --n 10 --lr 1 --clip 1 --epsilon 1", "--delta must be given"),
        ("report run.ledger", "--delta"),
        ("report run.ledger --delta 2", "--delta must be in \\[0, 1\\) \\(got 2.0\\)"),
        ("report run.ledger --delta 1e-6 --adjacency no", "adjacency must be .*'no'"),
        (
            f"{LOGISTIC} --plot drawn.gif",
            "--plot must end in .svg, .png or .pdf \\(got 'drawn.gif'\\)",
        ),
        ("report nowhere --delta 1e-6", "LEDGER must be .*'nowhere'"),
        ("ledger check nowhere", "LEDGER must be .*'nowhere'"),
        ("doctor script.py", "SCRIPT.py:FUNCTION must name"),
        (
            "doctor script.py:nothing",
            "SCRIPT.py:FUNCTION must name a function of script.py \\(got 'nothing'\\)",
        ),
        ("doctor script.py:few", "must return what dp.doctor takes, .*'loss'"),
        ("doctor script.py:broken", "script.py:broken raised KeyError: 'x'"),
        ("audit script.py:loud --delta 1e-5", "--trials"),
        ("fit table.csv --schema schema.toml --epsilon 1", "--out"),
        (
            "fit table.csv --schema schema.toml --epsilon no --out o",
            "--epsilon must be a number .*'no'",
        ),
        (
            "fit table.csv --schema nowhere --epsilon 1 --out o",
            "--schema must be a file that is there .*'nowhere'",
        ),
        (
            "fit nowhere.csv --schema schema.toml --epsilon 1 --out o",
            "TABLE must be a file .*'nowhere.csv'",
        ),
        (
            "fit new.csv --schema schema.toml --epsilon 1 --out o",
            "column 'died' must be in TABLE, once .got it 0 times.: names must be those of",
        ),
        ("fit open.csv --schema schema.toml --epsilon 1 --out o", "quotes enclose whole cells"),
        (
            "fit table.csv --schema table.csv --epsilon 1 --out o",
            "--schema must be a TOML file",
        ),
        (
            "fit table.csv --schema schema.toml --epsilon 1 --out .",
            "--out must be a new or empty folder",
        ),
        (
            "fit table.csv --schema schema.toml --epsilon 1 --out o --model Lasso",
            "--model must be one of .*'Lasso'",
        ),
        (
            "fit table.csv --schema schema.toml --epsilon 1 --out o --model Ridge",
            "--model must be one for 2 labels, .*Ridge",
        ),
        (
            "fit table.csv --schema schema.toml --epsilon 1 --out o --adjacency add_remove",
            "--n must be given",
        ),
        ("fit table.csv --schema schema.toml --epsilon 1 --out o --level 2", "--level must be"),
        ("predict nowhere new.csv", "MODEL.json must be a file"),
        (
            "fit schema.toml --schema schema.toml --epsilon 1 --out o",
            "TABLE must be a table with named columns, or the path of",
        ),
        (
            "predict schema.toml new.csv",
            "MODEL.json must be of JSON that Released.save wrote",
        ),
        (
            "audit script.py:loud --delta 1e-5 --trials 2",
            "--trials must be >= 8 a side \\(got 2\\)",
        ),
    ],
)
def test_a_bad_usage_is_one_sentence(words, says, folder, capsys):
    code, out, err = run(capsys, words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert re.search(says, err), err


@pytest.mark.parametrize(
    "command",
    [
        "",
        "init",
        "check",
        "fit",
        "predict",
        "plan",
        "plan HolderSGD",
        "report",
        "ledger check",
        "doctor",
        "audit",
    ],
)
def test_help_is_printed(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([*command.split(), "--help"])
    assert end.value.code == 0
    assert "usage: dpsco" in capsys.readouterr().out


@pytest.mark.weekly
def test_the_package_runs_as_a_module():
    words = [sys.executable, "-m", "torch_dpsco", "--help"]
    done = subprocess.run(
        words, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    assert "usage: dpsco" in done.stdout


def test_the_console_script_is_declared():
    setup = (Path(__file__).parents[2] / "setup.cfg").read_text(encoding="utf-8")
    assert f"console_scripts =\n    dpsco = {main.__module__}:{main.__name__}\n" in setup


def test_a_refused_fit_says_why_where_a_ledger_is_in_its_folder(folder, capsys, monkeypatch):
    """The folder that the ledger was made in stays, and hides nothing."""

    def study(*args, ledger_path, **given):
        dp.Accountant(ledger_path=ledger_path).close()
        raise ValueError("the reason")

    monkeypatch.setattr(dp, "study", study)
    fit = "fit table.csv --schema schema.toml --epsilon 4 --out new"
    assert run(capsys, f"{fit} --ledger new/kept.ledger")[::2] == (2, "dpsco: the reason\n")
    assert Path("new/kept.ledger").exists()
    assert run(capsys, f"{fit.removesuffix('new')}other")[::2] == (2, "dpsco: the reason\n")
    assert not Path("other").exists()
