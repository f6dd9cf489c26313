"""One row per image file: the same values in text, JSON, CSV and Parquet; bad files have rows of their own."""

import csv
import dataclasses
import hashlib
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import easy_task, tiny_backbone
from expect import expect_error
from photo_toys import EVIDENCE, photos, taught
from protosteer.data.image_lists import read_paths
from protosteer.data.images import FileImages
from protosteer.errors import DataError, SettingsError
from protosteer.learner import Learner
from protosteer.settings import Settings
from protosteer.workflows.ood import Rejection
from protosteer.workflows.prediction_table import (
    Embeddings,
    PredictionRow,
    Predictions,
    as_csv,
    as_text,
    csv_columns,
    prediction_rows,
    write_table,
)

pa = pytest.importorskip("pyarrow", reason="tables in Parquet need pyarrow")


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = photos(tmp_path_factory.mktemp("photos") / "spring", ["ant", "bee", "cat"], 5)
    (folder / "bee" / "02.png").write_bytes(b"no image")
    return [str(path) for path in sorted(folder.rglob("*.png"))]


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> Learner:
    return taught(photos(tmp_path_factory.mktemp("taught") / "spring", ["ant", "bee", "cat"]), settings=EVIDENCE)


def read_parquet(path: Path) -> list[dict]:
    import pyarrow.parquet

    return pyarrow.parquet.read_table(path).to_pylist()


def test_all_kinds_of_files_say_the_same_and_bad_files_have_rows(learner, names, tmp_path):
    maker = Predictions(learner, top=2, reject=0.05)
    for suffix in ("parquet", "csv", "jsonl"):
        write_table(tmp_path / f"x.{suffix}", maker, maker.rows(names))
    rows = read_parquet(tmp_path / "x.parquet")
    assert [row["path"] for row in rows] == names
    bad = [i for i, row in enumerate(rows) if row["error"]]
    assert [names[i] for i in bad] == [name for name in names if name.endswith("bee/02.png")]
    assert rows[bad[0]]["label"] is None
    good = [name for name in names if not name.endswith("bee/02.png")]
    whole = learner.predict(FileImages(good, learner.backbone.preprocessing))
    for row, wanted in zip([r for r in rows if not r["error"]], prediction_rows(learner, whole, good, 2), strict=True):
        assert row["label"] == wanted.label and row["task"] == wanted.task
        assert row["probability"] == pytest.approx(wanted.probability, abs=1e-5)
    lines = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert [{**dict.fromkeys(rows[0]), **line} for line in lines] == rows
    with (tmp_path / "x.csv").open(newline="") as file:
        cells = list(csv.DictReader(file))
    assert [c["label"] for c in cells] == [r["label"] or "" for r in rows]
    assert [float(c["probability_2"]) for c in cells if not c["error"]] == [
        r["top"][1]["probability"] for r in rows if r["top"]
    ]


@pytest.mark.parametrize("layers", ["last", "several"])
def test_embeddings_are_the_backbones(learner, names, tmp_path, layers):
    backbone = learner.backbone.reading(layers)
    maker = Embeddings(backbone)
    for suffix in ("parquet", "csv"):
        write_table(tmp_path / f"e.{suffix}", maker, maker.rows(names))
    rows = [row for row in read_parquet(tmp_path / "e.parquet") if not row["error"]]
    images = FileImages([row["path"] for row in rows], backbone.preprocessing)
    assert torch.allclose(torch.tensor([r["embedding"] for r in rows]), backbone.embed_set(images), atol=1e-6)
    assert rows[0]["sha256"] == hashlib.sha256(Path(names[0]).read_bytes()).hexdigest()
    import pyarrow.parquet

    kind = pyarrow.parquet.read_schema(tmp_path / "e.parquet").field("embedding").type
    assert kind == pa.list_(pa.float32(), backbone.width)
    with (tmp_path / "e.csv").open(newline="") as file:
        first = next(csv.DictReader(file))
    assert np.float32(first["embedding_0"]) == np.float32(rows[0]["embedding"][0])


def test_a_table_is_whole_or_not_there_and_never_replaces_one(learner, names, tmp_path):
    maker, path = Predictions(learner), tmp_path / "x.parquet"

    def broken():
        yield from maker.rows(names[:2])
        raise DataError("the disk is on fire", code="fire")

    with expect_error("fire"):
        write_table(path, maker, broken())
    assert list(tmp_path.iterdir()) == []
    path.write_bytes(b"mine")
    with expect_error("file-exists", DataError, path=path):
        write_table(path, maker, maker.rows(names[:2]))
    assert path.read_bytes() == b"mine" and list(tmp_path.iterdir()) == [path]


def test_a_table_is_a_list_of_its_images(learner, names, tmp_path):
    maker = Predictions(learner)
    for suffix in ("parquet", "csv", "jsonl"):
        write_table(tmp_path / f"x.{suffix}", maker, maker.rows(names[:3]))
        assert read_paths(tmp_path / f"x.{suffix}") == [Path(name) for name in names[:3]]


def test_without_pyarrow_one_line_says_so(learner, names, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    maker = Predictions(learner)
    with pytest.raises(SettingsError):
        write_table(tmp_path / "x.parquet", maker, maker.rows(names))
    assert list(tmp_path.iterdir()) == []


ODD = 'a "b", c.png'


@pytest.fixture(scope="module", params=["paper", "evidence"])
def toy(request: pytest.FixtureRequest) -> Learner:
    """Classes ant and bee of task spring, and cat, by either rule."""
    paper = request.param == "paper"
    settings = Settings.preset("paper", prompts=False, centroids=2) if paper else Settings.preset("instant")
    learner = Learner(tiny_backbone(), settings)
    learner.learn(easy_task(["ant", "bee"]), name="spring")
    learner.add_class("cat", easy_task(["cat"], per_class=5)[0])
    return learner


def predicted(learner: Learner, top: int = 2, rejection: Rejection | None = None):
    prediction = learner.predict(easy_task(["bee", "cat"], per_class=1, seed=40)[0])
    return prediction, list(prediction_rows(learner, prediction, [ODD, "b.png"], top, rejection, True))


def test_a_row_holds_what_the_prediction_says(toy):
    prediction, (row, _) = predicted(toy, top=10)
    ranking = prediction.ranked(3)[0]
    assert [(one["label"], one["probability"], one["similarity"]) for one in row.top] == ranking
    assert (row.label, row.probability, row.similarity) == ranking[0] and row.label == "bee"
    assert (row.path, row.task, row.energy) == (ODD, "spring", float(prediction.energy[0]))
    why = row.explanation
    assert (why["runner_up"], why["runner_up_similarity"]) == (ranking[1][0], pytest.approx(ranking[1][2]))
    assert why["candidates"] == prediction.candidates[0]
    assert list(row.to_dict())[:9] == [
        "path", "label", "probability", "similarity", "energy", "unknown", "task", "passes", "top",
    ]  # fmt: skip


def test_text_shows_probabilities_or_similarities(toy):
    evidence = toy.settings.rule == "evidence"
    prediction, (row, _) = predicted(toy)
    (_, share, similarity), (other, less, unlike) = prediction.ranked(2)[0]
    first, second = (
        (f"{100 * share:.1f} %", f"{100 * less:.1f} %") if evidence else (f"{similarity:.3f}", f"{unlike:.3f}")
    )
    line, why = as_text(row.to_dict(), evidence).split("\n")
    assert line == f"{ODD}: bee {first}  ({other} {second})" and other in why


def test_csv_has_as_many_fields_as_its_header_and_keeps_odd_paths(toy):
    columns = csv_columns(Predictions(toy, top=2), explain=True)
    text = "\n".join([",".join(columns), *(as_csv(row.to_dict(), columns) for row in predicted(toy)[1])])
    table = list(csv.reader(io.StringIO(text)))
    assert {len(row) for row in table} == {len(table[0])} and table[1][0] == ODD


def test_csv_holds_no_control_characters():
    row = PredictionRow("a\x1b[31m\n\x85b,\udce9.png", "\x1b]0;x\x07cat", 0.5, 0.5, 0.5, False, "t", 1, [{}])
    text = as_csv(row.to_dict(), ["path", "label", "unknown"])
    assert text == '"a?[31m??b,\udce9.png",?]0;x?cat,false'  # bytes that are no text stay, to find the file


def test_cpp_inference_explains_which_centroid_won():
    learner = Learner(tiny_backbone(), Settings.preset("paper", prompts=False, centroids=2))
    learner.learn(easy_task(["ant", "bee"]), name="spring")
    prediction, (row, _) = predicted(learner)
    index, why = learner.reader.index, row.explanation
    own = index.values[index.value_classes == learner.classes.index("bee")]
    similarities = torch.nn.functional.normalize(prediction.embeddings[:1], dim=1) @ own.T
    assert why["centroid"] == int(similarities.argmax()) + 1 and why["centroids"] == len(own)
    assert why["centroid_similarity"] == pytest.approx(row.similarity, abs=1e-6)
    assert why["margin"] == pytest.approx(row.similarity - row.top[1]["similarity"], abs=1e-6)


@pytest.mark.parametrize("settings", [Settings.preset("paper", prompts=False), Settings.preset("instant")])
def test_a_model_of_one_class_has_no_runner_up(settings):
    learner = Learner(tiny_backbone(), settings)
    learner.learn(easy_task(["ant"]))
    prediction = learner.predict(easy_task(["ant"], per_class=1)[0])
    (row,) = prediction_rows(learner, prediction, ["a.png"], 3, explain=True)
    assert row.explanation["runner_up"] is None
    assert as_text(row.to_dict(), settings.rule == "evidence").count("\n") == 1


def test_the_greatest_similarity_of_any_class_decides_what_is_unknown():
    toy = Learner(tiny_backbone(), Settings.preset("instant"))
    toy.learn(easy_task(["ant", "bee"]))
    prediction = toy.predict(easy_task(["bee"], per_class=1, seed=40)[0])
    greatest = float(prediction.similarities.max())
    rolled = dataclasses.replace(prediction, similarities=prediction.similarities.roll(1, dims=1))
    rejection = Rejection(toy, 0.05)
    for limit, unknown in ((greatest + 1e-4, True), (greatest - 1e-4, False)):
        rejection.threshold = limit
        (row,) = prediction_rows(toy, rolled, ["a.png"], 2, rejection)
        assert row.unknown is unknown and row.similarity < greatest
        assert ("unknown" in as_text(row.to_dict(), True)) == unknown
