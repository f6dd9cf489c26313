"""Rows of image files as tables: the same facts in Parquet, CSV and JSON; bad files have rows of their own."""

from __future__ import annotations

import csv
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from photo_toys import EVIDENCE, photos, taught
from protosteer.data.image_lists import read_paths
from protosteer.data.images import FileImages
from protosteer.errors import DataError, SettingsError
from protosteer.learner import Learner
from protosteer.workflows.prediction_rows import Embeddings, Predictions, told
from protosteer.workflows.prediction_table import write_table

pa = pytest.importorskip("pyarrow", reason="tables in Parquet need pyarrow")


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = photos(tmp_path_factory.mktemp("photos") / "spring", ["ant", "bee", "cat"], 5)
    (folder / "bee" / "02.png").write_bytes(b"no image")
    return [str(path) for path in sorted(folder.rglob("*.png"))]


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> Learner:
    return taught(
        photos(tmp_path_factory.mktemp("taught") / "spring", ["ant", "bee", "cat"]), settings=EVIDENCE
    )


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
    assert "cannot be read as an image" in rows[bad[0]]["error"] and rows[bad[0]]["label"] is None
    good = [name for name in names if not name.endswith("bee/02.png")]
    whole = learner.predict(FileImages(good, learner.backbone.preprocessing))
    for row, wanted in zip(
        [r for r in rows if not r["error"]], told(good, whole, learner, 2, None, False), strict=True
    ):
        assert row["label"] == wanted["label"] and row["task"] == wanted["task"]
        assert row["probability"] == pytest.approx(wanted["probability"], abs=1e-5)
    lines = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert [{**dict.fromkeys(rows[0]), **line} for line in lines] == rows
    with (tmp_path / "x.csv").open(newline="") as file:
        cells = list(csv.DictReader(file))
    assert [c["label"] for c in cells] == [r["label"] or "" for r in rows]
    assert [float(c["probability_2"]) for c in cells if not c["error"]] == [
        r["top"][1]["probability"] for r in rows if r["top"]
    ]


def test_embeddings_are_the_backbones(learner, names, tmp_path):
    maker = Embeddings(learner.backbone)
    for suffix in ("parquet", "csv"):
        write_table(tmp_path / f"e.{suffix}", maker, maker.rows(names))
    rows = [row for row in read_parquet(tmp_path / "e.parquet") if not row["error"]]
    images = FileImages([row["path"] for row in rows], learner.backbone.preprocessing)
    assert torch.allclose(
        torch.tensor([r["embedding"] for r in rows]), learner.backbone.embed_set(images), atol=1e-6
    )
    assert rows[0]["sha256"] == hashlib.sha256(Path(names[0]).read_bytes()).hexdigest()
    import pyarrow.parquet

    kind = pyarrow.parquet.read_schema(tmp_path / "e.parquet").field("embedding").type
    assert kind == pa.list_(pa.float32(), learner.backbone.dim)
    with (tmp_path / "e.csv").open(newline="") as file:
        first = next(csv.DictReader(file))
    assert np.float32(first["embedding_0"]) == np.float32(rows[0]["embedding"][0])


def test_a_table_is_whole_or_not_there_and_never_replaces_one(learner, names, tmp_path):
    maker, path = Predictions(learner), tmp_path / "x.parquet"

    def broken():
        yield from maker.rows(names[:2])
        raise DataError("the disk is on fire")

    with pytest.raises(DataError, match="on fire"):
        write_table(path, maker, broken())
    assert list(tmp_path.iterdir()) == []
    path.write_bytes(b"mine")
    with pytest.raises(DataError, match="exists already"):
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
    with pytest.raises(SettingsError, match=r"pip install 'protosteer\[parquet\]'"):
        write_table(tmp_path / "x.parquet", maker, maker.rows(names))
    assert list(tmp_path.iterdir()) == []
