"""What leaves the house predicts as the model does, and tells nothing else."""

import ast
import io
import json
import pickle
from pathlib import Path

import joblib
import numpy as np
import pytest
import torch

from tests.estimators.models import SETTINGS, make, rows, targets
from torch_dpsco.errors import PrivacyError
from torch_dpsco.estimators import Category, LogisticRegression, Number, Schema, released
from torch_dpsco.estimators.released import Released


def fitted(name="LogisticRegression", **changes):
    X = rows()
    return make(name, **changes).fit(X, targets(name, X))


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("prepare", ["auto", None])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_file_predicts_as_its_model_also_beyond_the_bound(name, prepare, tmp_path):
    public = (
        {} if prepare else {"feature_center": (0.5, -1.0, 0.0), "feature_scale": (2.0, 1.0, 0.1)}
    )
    model, X = fitted(name, prepare=prepare, **public), 3 * rows(60)
    Released.of(model).save(tmp_path / "m.json")
    read = Released.load(tmp_path / "m.json")
    assert read.coef == tuple(map(tuple, np.atleast_2d(model.coef_)))
    for method in ("decision_function", "predict_proba"):
        if hasattr(model, method) and hasattr(read, method):
            np.testing.assert_allclose(
                getattr(read, method)(X), getattr(model, method)(X), rtol=1e-9, atol=1e-9
            )
    if read.kind == "regressor":
        np.testing.assert_allclose(read.predict(X), model.predict(X), rtol=1e-9, atol=1e-9)
    else:
        assert read.predict(X).tolist() == model.predict(X).tolist()


def test_a_file_has_these_fields_and_no_true_number_of_records(tmp_path):
    X = rows(113)
    Released.of(make("LogisticRegression").fit(X, targets("LogisticRegression", X))).save(
        tmp_path / "m.json"
    )
    text = (tmp_path / "m.json").read_text()
    wanted = (
        "format version kind coef intercept classes bound_x center scale link names card schema"
    )
    assert list(json.loads(text)) == wanted.split()
    assert " 113" not in text
    assert not any(repr(float(value)) in text for value in X.ravel())


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_pickle_holds_no_training_value_and_predicts_alike(name):
    X = rows()
    model = fitted(name)
    data = pickle.dumps(model)
    assert not any(
        value.tobytes() in data or value.tobytes()[::-1] in data for value in X.ravel()
    )
    assert pickle.loads(data).predict(X).tolist() == model.predict(X).tolist()


def kept_by_joblib(value):
    file = io.BytesIO()
    joblib.dump(value, file)
    return joblib.load(io.BytesIO(file.getvalue())), file.getvalue()


def kept_by_torch(value):
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False), file.getvalue()


@pytest.mark.parametrize("keep", [kept_by_joblib, kept_by_torch])
def test_joblib_and_torch_keep_models_and_what_is_published_of_them(keep):
    X, model = rows(), fitted()
    for value in (model, Released.of(model)):
        read, data = keep(value)
        assert read.predict(X).tolist() == value.predict(X).tolist()
        assert not any(number.tobytes() in data for number in X.ravel())


def test_a_pickle_holds_no_ledger():
    from torch_dpsco import Accountant

    model = fitted(accountant=Accountant(adjacency="add_remove"))
    with pytest.raises(PrivacyError, match="accountant must not be pickled"):
        pickle.dumps(model)


def test_other_classes_are_refused_by_name():
    class Own(LogisticRegression):
        pass

    for model in (Own(), object()):
        with pytest.raises(
            ValueError, match=f"must be one of LogisticRegression.*{type(model).__name__}"
        ):
            Released.of(model)
    with pytest.raises(ValueError, match="must be fitted"):
        Released.of(make("Ridge"))


def test_a_file_is_not_overwritten_unless_asked(tmp_path):
    model = Released.of(fitted())
    model.save(tmp_path / "m.json")
    with pytest.raises(FileExistsError):
        model.save(tmp_path / "m.json")
    model.save(tmp_path / "m.json", overwrite=True)


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format", "pickle"), ("version", 2), ("version", True), ("kind", "tree"), ("kind", []), ("coef", 1),
        ("coef", []), ("coef", [[]]), ("coef", [["1"] * 3]), ("coef", [[1e999] * 3]), ("coef", [[10**400] * 3]),
        ("coef", [[True] * 3]), ("intercept", []), ("intercept", ["x"]), ("classes", [0]), ("classes", [0, 0]),
        ("classes", [[], {}]), ("classes", [0, None]), ("bound_x", 0), ("bound_x", "1"), ("center", [1.0]),
        ("scale", [0.0, 1.0, 1.0]), ("names", ["a"]), ("names", [1, 2, 3]), ("card", []), ("extra", 1),
        ("link", 1), ("link", []), ("link", {}), ("link", {"clip": -1.0}),
        ("link", {"clip": 1.0, "bound_x": 1.0, "center": [1.0], "scale": None, "intercept": 0.0, "whole": False,
                  "before": None}),
        ("link", {"clip": -1.0, "bound_x": 1.0, "center": None, "scale": None, "intercept": 0.0, "whole": False,
                  "before": None}),
        ("link", {"clip": 1.0, "bound_x": 1.0, "center": None, "scale": None, "intercept": 0.0, "whole": False,
                  "before": None, "more": 1}),
    ],
)  # fmt: skip
def test_hostile_files_are_refused_by_field(field, value, tmp_path):
    path = tmp_path / "m.json"
    Released.of(fitted()).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(ValueError, match=field):
        Released.load(path)


def test_a_missing_field_and_what_is_no_json_are_refused(tmp_path):
    path = tmp_path / "m.json"
    Released.of(fitted()).save(path)
    facts = json.loads(path.read_text())
    for field in facts:
        path.write_text(
            json.dumps({name: value for name, value in facts.items() if name != field})
        )
        with pytest.raises(ValueError, match=field):
            Released.load(path)
    path.write_text("{}")
    with pytest.raises(
        ValueError, match=r"format must be .*as Released.save .*got None in '.*m.json'"
    ):
        Released.load(path)
    for text in (b"\x80\x04.", b"[" * 100_000, b"", b"[]", b'"torch_dpsco.estimators.released"'):
        path.write_bytes(text)
        with pytest.raises(ValueError, match="must be"):
            Released.load(path)


def test_rows_of_another_form_are_refused():
    model = Released.of(fitted())
    for X in ([[1.0]], [1.0, 2.0, 3.0], [[np.nan, 0.0, 0.0]]):
        with pytest.raises(ValueError, match="X must be"):
            model.predict(X)


def test_nothing_is_unpickled_and_scikit_learn_is_not_needed():
    tree = ast.parse(Path(released.__file__).read_text())
    found = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    found |= {
        name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for name in node.names
    }
    assert not any(name.split(".")[0] in ("sklearn", "pickle") for name in found)


@pytest.mark.slow
def test_a_model_with_a_schema_reads_tables(tmp_path):
    schema = Schema(
        {"age": Number(17, 90), "sex": Category(["f", "m"])}, target="y", labels=["no", "yes"]
    )
    frame = {"age": np.arange(17, 90).repeat(20), "sex": ["f", "m"] * 730}
    table = schema.read(frame | {"y": ["no" if age < 50 else "yes" for age in frame["age"]]})
    model = LogisticRegression(epsilon=4.0, n=1460, **schema.settings()).fit(table.X, table.y)
    Released.of(
        model, schema=schema, card=model.report().named("patient", one_row_per_unit=True)
    ).save(tmp_path / "m.json")
    read = Released.load(tmp_path / "m.json")
    assert read.predict(frame).tolist() == model.predict(table.X).tolist()
    assert read.predict(table.X).tolist() == model.predict(table.X).tolist()
    assert np.allclose(
        read.predict_proba(frame), model.predict_proba(table.X), rtol=0, atol=1e-9
    )
    assert read.card["guarantee"]["unit_name"] == "patient"
    with pytest.raises(ValueError, match="X must have values that the schema can read"):
        read.predict({"age": ["?"], "sex": ["f"]})
    with pytest.raises(ValueError, match="column 'sex'"):
        read.predict({"age": [20]})
    text = (tmp_path / "m.json").read_text()
    for old, new, words in (
        ('"number"', '"code"', "kind of column 'age'"),
        ('"f"', '"m"', "levels must be"),
        ('"schema": {', '"schema": 3, "x": {', "x must not be in the file"),
    ):
        (tmp_path / "m.json").write_text(text.replace(old, new))
        with pytest.raises(ValueError, match=words):
            Released.load(tmp_path / "m.json")
