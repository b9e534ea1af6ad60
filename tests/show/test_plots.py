"""Pictures of plans: they draw the plan's own figures, change no setting, and say what they need."""

from __future__ import annotations

import dataclasses
import pickle
import sys

import numpy as np
import pytest
import torch

import torch_dpsco as dp
from torch_dpsco.show import plots

matplotlib = pytest.importorskip("matplotlib")
N, BUDGET, LOSS = 64, dp.Budget(2.0, 1e-4), dp.losses.Logistic()


def holder(**kind):
    problem = LOSS.problem(bound_x=2.0, radius=3.0)
    return dp.HolderSGD.plan(
        **{"problem": problem, "n": N, "batch_size": N, "epochs": 4, "budget": BUDGET, **kind}
    )


def localized():
    curved = dp.Problem(smoothness=1.0, strong_convexity=0.5, radius=3.0)
    own = {"clip": 1.0, "reg": 0.1, "max_steps": 3, "min_phase": 9}
    return dp.LocalizedSGD.plan(problem=curved, n=N, budget=BUDGET, dim=4, **own)


def output():
    return dp.OutputPerturbation.plan(
        model=torch.nn.Linear(3, 1), loss=LOSS, n=N, bound_x=1.0, budget=BUDGET
    )


def lines_of(figure):
    return {line.get_label(): line.get_xydata() for line in figure.axes[1].get_lines()}


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("make", [holder, localized, output])
def test_every_plan_draws_noise_and_epsilon(make):
    figure = make().plot()
    assert [axes.get_title() for axes in figure.axes] == ["Noise beside signal", "What is spent"]
    assert plots.encoded(figure, "png").startswith(b"\x89PNG")


@pytest.mark.parametrize("make", [holder, localized])
def test_the_curve_ends_at_the_epsilon_of_the_plan(make):
    plan = make()
    drawn = lines_of(plan.plot())
    assert tuple(drawn["this plan"][-1]) == (plan.steps, plan.epsilon())
    assert drawn["budget: 2"][0][1] == BUDGET.epsilon


def test_one_release_says_what_it_costs():
    shown = output().plot().axes[1].texts[0].get_text()
    assert shown == "one release:\nepsilon at delta 0.0001: 2"


def test_the_plan_of_clipped_users_draws_its_noise():
    plan = dp.UserClippedSGD.plan(
        n=N, budget=dp.Budget(2.0, 1e-4, unit="user"), clip=1.0, lr=1.0, steps=2
    )
    (share,) = plan.plot().axes[0].get_lines()[0].get_xdata()
    assert share == plan.noise_multiplier / N


def test_what_is_not_known_beforehand_is_said():
    plan = dataclasses.replace(holder(), steps=None)
    assert (
        plan.plot()
        .axes[1]
        .texts[0]
        .get_text()
        .startswith("not known beforehand:\nthe run has no last step")
    )


def test_no_setting_is_changed_and_no_style_is_taken_over():
    with matplotlib.rc_context({"text.color": "white", "figure.facecolor": "black"}):
        before = dict(matplotlib.rcParams)
        figure = plots.figure("x", plots.words("y", "z"))
        assert dict(matplotlib.rcParams) == before
    assert figure.get_facecolor() == (1.0, 1.0, 1.0, 1.0)
    assert figure.axes[0].texts[0].get_color() == "black"


def test_the_same_picture_is_the_same_file():
    first, second = (
        plots.encoded(plots.figure("x", plots.words("y", "$z$")), "svg") for _ in range(2)
    )
    assert first == second


def test_notebooks_show_a_picture_and_files_keep_it():
    drawn = plots.figure("x", plots.words("y", "z"))
    again = pickle.loads(pickle.dumps(drawn))
    assert drawn._repr_svg_() == again._repr_svg_() == plots.encoded(drawn, "svg").decode()


def test_lines_differ_without_color():
    drawn = [plots.Line(str(k), [0, 1], [0.0, k]) for k in range(4)]
    axes = plots.figure("x", plots.lines("a", "b", "c", drawn)).axes[0]
    assert len({(line.get_linestyle(), line.get_marker()) for line in axes.get_lines()}) == 4


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'torch_dpsco\[plots\]'"):
        plots.figure("x", plots.words("y", "z"))


@pytest.mark.parametrize("name", ["income_$_per_$m", r"50 \% of $x^2$"])
def test_names_are_drawn_as_they_are(name):
    """Nothing of a name is read as mathematics, wherever it stands: two dollars would be, and may raise."""
    drawn = plots.figure(
        name,
        plots.lines(
            name,
            name,
            name,
            [plots.Line(name, [0, 1], [0, 1])],
            limit=(name, 0.5),
            mark=(name, 0.5, 0.5),
        ),
        plots.dots(name, name, [name], {name: [1.0]}, (name, 2.0)),
        plots.ranges(name, name, [name], np.ones(1), np.array([[0.0, 2.0]]), name),
        plots.words(name, name),
    )
    drawn.draw_without_rendering()
    named = [text for text in drawn.findobj(matplotlib.text.Text) if text.get_text() == name]
    assert len(named) >= 18
    assert not any(text.get_parse_math() for text in named)
