"""What a study says of itself: results in words, predictions, pictures and cards, without a further charge."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

import torch_dpsco as dp
from tests.statistics.test_study import COST, SCHEMA, frame, made
from torch_dpsco.errors import ConditionError
from torch_dpsco.estimators import Category, LinearSVC, Number, Schema
from torch_dpsco.estimators.released import Released

THREE = Schema(
    {"age": Number(17, 90), "sex": Category(["f", "m"])},
    target="died",
    labels=["no", "yes", "?"],
)
REAL = Schema({"age": Number(17, 90), "sex": Category(["f", "m"])}, **COST)


@pytest.fixture(scope="module")
def found() -> Any:
    return made(budget=dp.Budget(2.0, 1e-6))


def test_a_threshold_is_one_of_probabilities(found: Any) -> None:
    table = frame(200)
    chances = found.predict_proba(table)[:, 1]
    assert np.unique(chances).size > 20
    for threshold in (0.1, 0.5, float(np.sort(chances)[50])):
        said = found.predict(table, threshold=threshold)
        assert (said == np.where(chances >= threshold, "yes", "no")).all()
    assert (found.predict(table, threshold=0.5) == found.predict(table)).all()


def test_a_released_file_takes_a_threshold_too(found: Any, tmp_path: Any) -> None:
    found.released().save(tmp_path / "model.json")
    read = Released.load(tmp_path / "model.json")
    table = frame(50)
    assert (read.predict(table, threshold=0.2) == found.predict(table, threshold=0.2)).all()


@pytest.mark.parametrize("threshold", [0.0, 1.0, -1.0, float("nan"), "0.5"])
def test_a_threshold_that_is_no_probability_is_refused(found: Any, threshold: Any) -> None:
    with pytest.raises(ValueError, match="threshold must be"):
        found.predict(frame(5), threshold=threshold)


@pytest.mark.parametrize("schema", [THREE, REAL])
def test_a_threshold_is_for_two_labels(schema: Schema) -> None:
    with pytest.raises(ValueError, match="threshold must be left out but for two labels"):
        made(schema).predict(frame(5), threshold=0.5)


def test_a_threshold_is_for_probabilities() -> None:
    with pytest.raises(ValueError, match="kind must have probabilities"):
        made(model=LinearSVC).predict(frame(5), threshold=0.5)


def test_the_calibration_covers_how_often_it_came_true(found: Any) -> None:
    groups = found.calibration()
    assert groups == found.score.calibration()
    assert len(groups) >= 2
    assert groups[0].share.value < groups[-1].share.value
    total = sum(one.records for one in groups)
    assert total == pytest.approx(
        800, abs=12 * found.score.noise_std * found.score.counts.size**0.5
    )


@pytest.mark.parametrize(
    ("schema", "more", "words"),
    [
        (SCHEMA, {"model": LinearSVC}, "model must have probabilities .*got LinearSVC"),
        (SCHEMA, {"metric": "accuracy"}, "metric must be 'auc' .*got 'accuracy'"),
        (REAL, {}, "model must have probabilities .*got Ridge"),
    ],
)
def test_what_the_score_does_not_tell_is_not_made_up(
    schema: Schema, more: dict[str, Any], words: str
) -> None:
    study = made(schema, **more)
    with pytest.raises(ConditionError, match=words):
        study.calibration()
    assert "came true" not in study.summary()
    assert "by chance" not in study.summary() or more.get("model") is LinearSVC


def test_a_summary_says_what_is_new(found: Any) -> None:
    text = found.summary()
    assert str(found.plan) not in text
    assert not set(str(found.plan).splitlines()) & set(text.splitlines())
    first, base, *_, last = text.splitlines()
    assert first == f"LogisticRegression of 'died': {found.score}"
    assert base.startswith("'yes' is the truth of ")
    assert last.startswith("spent on all of it: epsilon 2 at delta 1e-06 for one example;")
    assert "per 1 of 17 to 90" in text
    assert str(found) == text


def test_results_spend_nothing_more(found: Any, tmp_path: Any) -> None:
    pytest.importorskip("matplotlib")
    ledger = found.model.accountant.ledger
    before = ledger.digest()
    found.summary()
    found.plot()
    found.calibration()
    found.coefficients()
    found.predict_proba(frame(3))
    found.save(tmp_path / "study")
    assert ledger.digest() == before


@pytest.mark.parametrize("suffix", ["html", "md", "json", "pdf"])
def test_a_card_says_no_more_than_the_ledger(found: Any, tmp_path: Any, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"card.{suffix}"
    found.save_card(path)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        found.save_card(path)
    found.save_card(path, overwrite=True)
    content = path.read_bytes()
    if suffix == "pdf":
        assert content.startswith(b"%PDF")
        return
    text = content.decode()
    assert "Privacy card: LogisticRegression of" in text
    figures = found.report().figures
    said = {float(number) for number in re.findall(r"[Ee]psilon is ([\d.]+):", text)}
    assert said == {figures.epsilon}
    assert "auc 0.9" in text
    for number in re.findall(r"wins at most ([\d.]+) %", text):
        assert float(number) >= 50 + 50 * figures.advantage
    if suffix == "json":
        assert json.loads(text)["title"] == found.report().title


def test_the_report_of_a_study_has_its_pictures(found: Any, tmp_path: Any) -> None:
    pytest.importorskip("matplotlib")
    found.save_card(tmp_path / "card.html")
    text = (tmp_path / "card.html").read_text(encoding="utf-8")
    first = [
        re.search(rf'alt="{title}', text) for title in ("What the model says", "How good it")
    ]
    assert all(first)
    assert text.index('alt="What the model says') < text.index('alt="What a test can find out')


def test_the_picture_says_what_the_score_and_the_risk_say(found: Any) -> None:
    pytest.importorskip("matplotlib")
    says, good, bet = found.plot().axes
    assert good.get_lines()[0].get_xdata() == pytest.approx([found.score.value])
    ends = sorted(
        x for line in good.collections for segment in line.get_segments() for x, _ in segment
    )
    assert ends == pytest.approx(found.score.interval)
    assert 0.5 in good.get_lines()[-1].get_xdata()
    figures = found.report().figures
    assert bet.get_lines()[0].get_xdata() == pytest.approx([50 + 50 * figures.advantage])
    assert "spent" not in " ".join(axes.get_title() for axes in (says, good, bet))


def test_a_real_target_is_drawn_and_told_without_a_base_rate() -> None:
    pytest.importorskip("matplotlib")
    study = made(REAL)
    _, good, _ = study.plot().axes
    assert good.get_xlabel() == "less is better"
    assert [line.get_label() for line in good.get_lines()].count("by chance: 0.5") == 0
    assert "is the truth of" not in study.summary()
    assert "add to the cost" in study.summary()
