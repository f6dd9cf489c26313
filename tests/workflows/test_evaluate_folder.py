"""Evaluation of a labelled folder, against scikit-learn's metrics."""

import csv
import io
import random
from pathlib import Path

import pytest
from sklearn import metrics

from conftest import tiny_backbone
from expect import expect_error
from photo_toys import photos
from protosteer.data.class_folders import read_folder
from protosteer.errors import DataError
from protosteer.learner import Learner
from protosteer.report import evaluate as report
from protosteer.settings import Settings
from protosteer.util.statistics import Accuracy
from protosteer.workflows.evaluate_folder import EvaluatedImage, Evaluation, evaluate_folder
from protosteer.workflows.folder_scan import scan_folder
from protosteer.workflows.learn_folder import learn_folder


def drawn(count: int = 60) -> Evaluation:
    draw = random.Random(0)
    images = [
        EvaluatedImage(Path(f"{i}.png"), draw.choice("abc"), draw.choice("abe"), draw.random(), False)
        for i in range(count)
    ]
    return Evaluation(images, {Path("x.png"): "bad"}, list("abe"))


def test_metrics_are_those_of_scikit_learn() -> None:
    found = drawn()
    truth, said = [i.label for i in found.images], [i.predicted for i in found.images]
    assert found.labels == list("abce") and found.unknown_classes == ["c"]
    assert found.confusion() == metrics.confusion_matrix(truth, said, labels=found.labels).tolist()
    columns = metrics.precision_recall_fscore_support(truth, said, labels=found.labels, zero_division=0)
    for i, one in enumerate(found.per_class().values()):
        values = [one.precision or 0, one.recall or 0, one.f1 or 0]
        assert values == pytest.approx([100 * float(column[i]) for column in columns[:3]])
        assert one.support == columns[3][i]
    assert found.per_class()["e"].recall is None and found.per_class()["c"].precision is None
    assert found.accuracy == Accuracy(sum(a == b for a, b in zip(truth, said, strict=True)), 60)
    counts = [count for *_, count in found.most_confused()]
    assert counts == sorted(counts, reverse=True) and sum(counts) == len(found.mistakes)


def test_a_folder_is_compared_with_the_learners_predictions(tmp_path: Path) -> None:
    learner = Learner(tiny_backbone(), Settings.preset("instant"))
    learn_folder(learner, scan_folder(photos(tmp_path / "train", ["ant", "bee"])))
    folder = photos(tmp_path / "test", ["ant", "bee", "cow"], per_class=3, seed=1)
    (folder / "ant" / "01.png").write_bytes(b"")
    learned = folder / "bee" / "zz.png"
    learned.write_bytes((tmp_path / "train" / "bee" / "00.png").read_bytes())
    files = read_folder(folder)
    found = evaluate_folder(learner, files)
    good = [path for path in files.paths if path.name != "01.png" or path.parent.name != "ant"]
    assert [image.path for image in found.images] == good and found.unknown_classes == ["cow"]
    assert [image.predicted for image in found.images] == learner.predict(good).labels
    assert [image.path for image in found.images if image.learned] == [learned]
    assert [*found.errors] == [folder / "ant" / "01.png"] and len(report.warnings(found)) == 2
    page = report.as_html(found, "<b>")
    assert page.count("data:image/jpeg") == len(found.images) and "<h1>&lt;b&gt;</h1>" in page
    rows = list(csv.DictReader(io.StringIO(report.as_csv(found))))
    assert len(rows) == len(files) and [row["correct"] for row in rows].count("true") == found.accuracy.right
    with expect_error("no-images", DataError):
        evaluate_folder(learner, files.rows([1]))
