"""The exported folder predicts as the learner does, without protosteer or torch; it is whole or not there."""

import importlib.util
import io
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from conftest import easy_task, tiny_backbone
from expect import expect_error
from protosteer.backbones import Backbone
from protosteer.data.transforms import Preprocessing
from protosteer.errors import LearnerError, ProtosteerError, WeightsError
from protosteer.evidence import kernel_ridge as ridging
from protosteer.export.onnx import export_onnx
from protosteer.learner import Learner
from protosteer.model.class_table import ClassTable
from protosteer.model.memory import Memory
from protosteer.rules import RULES, EvidenceRule
from protosteer.settings import Settings
from protosteer.util import files
from protosteer.workflows.ood import Rejection, threshold

onnx = pytest.importorskip("onnx", reason="onnx is not installed (extra `onnx`)")
onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (extra `onnx`)")
from protosteer.assets import onnx_predict  # noqa: E402 (needs onnxruntime)
from protosteer.export import onnx_graph  # noqa: E402 (needs onnx)

pytestmark = pytest.mark.slow

FILES = ["README.md", "embedding.onnx", "model.json", "predict.py", "prototypes.npz"]
QUICK = Settings.preset(
    "paper", epochs=1, batch_size=16, neck_hidden=32, augmentation="crop", centroids=2, independent=True
)
OTHER_PROCESS = """
import json, sys
import numpy as np
import predict
paths = json.load(sys.stdin)
model = predict.Model()
found = [found for i in range(0, len(paths), 64) for found in model.predict(paths[i : i + 64])]
images = np.stack([predict.read_image(path, model.about["preprocessing"]) for path in paths])
scores, similarities = (array.tolist() for array in model.match(images))
print(json.dumps({"found": found, "scores": scores, "similarities": similarities, "modules": sorted(sys.modules)}))
"""


def digit_files(folder: Path, digits: list[int], start: int, count: int) -> Path:
    """Class folders of PNG files, `count` images of each digit from the `start`-th on."""
    data = load_digits()
    for digit in digits:
        (folder / f"digit {digit}").mkdir(parents=True, exist_ok=True)
        for n, image in enumerate(data.images[data.target == digit][start : start + count]):
            Image.fromarray((image * 15).astype(np.uint8)).save(folder / f"digit {digit}" / f"{n}.png")
    return folder


def pictures(folder: Path) -> list[str]:
    return sorted(map(str, folder.rglob("*.png")))


def load_script(folder: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("exported_predict", folder / "predict.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_script(folder: Path, *words: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """In another process, which finds the folder and installed packages but not this source tree."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, input=given, capture_output=True, text=True
    )


Mixed = tuple[Learner, Path, list[str]]


def mixed_learner(root: Path) -> Learner:
    """Learn tasks with prompts of every kind, one with none and a few-shot class, by CPP inference."""
    kinds: list[dict[str, Any]] = [
        {"prompt_length": 1},
        {"prompt_length": 3, "prompt_from_layer": 2},
        {"prompt_length": 2, "prompt_kind": "shallow"},
        {"prompts": False},
    ]
    learner = Learner(Backbone.load("nano"), QUICK)
    for t, kind in enumerate(kinds):
        learner.settings = QUICK.replace(**kind)
        learner.learn(digit_files(root / f"task {t}", [2 * t, 2 * t + 1], 0, 20), name=f"task {t}")
    learner.settings = QUICK.replace(neighbours=5)
    learner.add_class("digit 8", pictures(digit_files(root / "few", [8], 0, 6)))
    return learner


def evidence_learner(root: Path) -> Learner:
    """Learn a prompt for all classes, tasks with prompts of their own, one with none, a class of a handful."""
    patch = pytest.MonkeyPatch()
    patch.setitem(RULES, "evidence", EvidenceRule(min_pass_weight=0.0))  # so that both views are there
    learner = Learner(Backbone.load("nano"), QUICK.replace(rule="evidence", independent=False))
    for t, digits in enumerate([[4, 5], [0, 1], [2, 3]]):  # names of classes do not come in their order
        learner.learn(digit_files(root / f"task {t}", digits, 0, 20 + 10 * t), name=f"task {t}")
    learner.add_class("digit 6", pictures(digit_files(root / "few", [6], 0, 6)))
    learner.add_class("digit 7", pictures(digit_files(root / "one", [7], 0, 1)))
    assert len(learner.reader.classifier.passes) == 2
    patch.undo()
    return learner


def exported(make: Callable[[Path], Learner], root: Path) -> Mixed:
    """Export a learner, and write 200 images."""
    export_onnx(learner := make(root), root / "exported")
    return learner, root / "exported", pictures(digit_files(root / "test", list(range(10)), 100, 20))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Mixed:
    """A model by CPP inference, exported; and 200 images."""
    return exported(mixed_learner, tmp_path_factory.mktemp("mixed"))


def test_another_process_predicts_the_same_without_protosteer_and_torch(mixed: Mixed) -> None:
    learner, folder, paths = mixed
    assert len(paths) == 200
    done = run_script(folder, "-c", OTHER_PROCESS, given=json.dumps(paths))
    assert not done.returncode, done.stderr
    theirs, ours = json.loads(done.stdout), learner.predict(paths)
    assert not {"torch", "protosteer"} & set(theirs["modules"])
    assert max(map(len, ours.candidates)) > 3, "images should try several prompts each"
    labels, probabilities, similarities, unknown = zip(*theirs["found"], strict=True)
    assert list(labels) == ours.labels
    torch.testing.assert_close(torch.tensor(theirs["scores"]), ours.scores, rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.tensor(similarities), ours.scores.amax(1), rtol=0, atol=1e-5)
    rejection, greatest = Rejection(learner, 0.05), ours.scores.amax(1).tolist()
    assert list(unknown) == [rejection.unknown(*one) for one in zip(ours.labels, greatest, strict=True)]
    torch.testing.assert_close(torch.tensor(probabilities), ours.probabilities.amax(1), rtol=0, atol=1e-5)


def test_an_image_alone_is_predicted_as_among_others(mixed: Mixed) -> None:
    _, folder, paths = mixed
    model = load_script(folder).Model()
    for path, (label, share, similarity, unknown) in zip(paths[::40], model.predict(paths[::40]), strict=True):
        assert model.predict([path])[0] == (label, pytest.approx(share), pytest.approx(similarity), unknown)


def test_arrays_are_plain_and_copies_of_a_prompt_are_stored_once(mixed: Mixed) -> None:
    learner, folder, _ = mixed
    with np.load(folder / "prototypes.npz", allow_pickle=False) as file:
        arrays = dict(file)
    # None, deep, late, shallow; the few-shot class has a copy.
    assert arrays["prompts"].shape == (4, 3, 3, 128)
    assert arrays["task_prompts"].tolist()[:4] == [1, 2, 3, 0] and len(arrays["task_prompts"]) == 5
    assert arrays["enters"].sum(axis=2).tolist() == [[0, 0, 0], [1, 1, 1], [0, 3, 3], [2, 0, 0]]
    assert np.allclose(np.linalg.norm(arrays["keys"], axis=1), 1)
    assert arrays["record_tasks"].tolist() == learner.reader.index.record_tasks.tolist()


def test_weights_are_in_the_network_file_and_once(mixed: Mixed) -> None:
    learner, folder, _ = mixed
    path = folder / "embedding.onnx"
    onnx.checker.check_model(str(path), full_check=True)
    assert 0 < path.stat().st_size - 4 * learner.backbone.parameters < 30_000
    properties = {item.key: item.value for item in onnx.load(str(path)).metadata_props}
    assert properties == {"backbone": "nano", "fingerprint": learner.backbone.fingerprint}
    about = json.loads((folder / "model.json").read_text(encoding="utf-8"))
    assert about["backbone"] == {"name": "nano", "fingerprint": learner.backbone.fingerprint}
    assert about["labels"] == learner.classes and about["tasks"] == learner.tasks
    assert (about["neighbours"], about["temperature"]) == (5, 0.6)


@pytest.fixture(scope="module")
def by_evidence(tmp_path_factory: pytest.TempPathFactory) -> Mixed:
    """A model of the default classifier, exported; and 200 images."""
    return exported(evidence_learner, tmp_path_factory.mktemp("evidence"))


def test_by_evidence_another_process_predicts_the_same(by_evidence: Mixed) -> None:
    learner, folder, paths = by_evidence
    done = run_script(folder, "-c", OTHER_PROCESS, given=json.dumps(paths))
    assert not done.returncode, done.stderr
    theirs, ours = json.loads(done.stdout), learner.predict(paths)
    assert not {"torch", "protosteer"} & set(theirs["modules"])
    assert set(ours.passes.tolist()) >= {1, 2, 3}, "images should take every way there is"
    labels, probabilities, similarities, unknown = zip(*theirs["found"], strict=True)
    assert list(labels) == ours.labels
    best = ours.scores.argmax(1, keepdim=True)
    torch.testing.assert_close(torch.tensor(theirs["scores"]), ours.scores, rtol=0, atol=1e-3)
    torch.testing.assert_close(torch.tensor(theirs["similarities"]), ours.similarities, rtol=0, atol=1e-4)
    torch.testing.assert_close(torch.tensor(probabilities), ours.probabilities.amax(1), rtol=0, atol=1e-3)
    own = ours.similarities.gather(1, best)[:, 0]
    torch.testing.assert_close(torch.tensor(similarities), own, rtol=0, atol=1e-4)
    limit = threshold(learner, 0.05)
    greatest = ours.similarities.amax(1)
    clear = (greatest - limit).abs() > 1e-4
    assert torch.equal(torch.tensor(unknown)[clear], (greatest < limit)[clear]) and 0 < sum(unknown) < len(paths)


def test_by_evidence_too_many_points_leave_the_ridge_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ridging, "MAX_PROTOTYPES", 3)
    monkeypatch.setattr(ridging, "LANDMARKS", 3)
    learner = Learner(tiny_backbone(), Settings.preset("instant"))
    learner.learn(easy_task(["ant", "bee"]))
    export_onnx(learner, tmp_path / "exported")
    with np.load(tmp_path / "exported" / "prototypes.npz", allow_pickle=False) as arrays:
        assert "view0_means" in arrays.files and "view0_points" not in arrays.files
    model, paths = load_script(tmp_path / "exported").Model(), save_images(tmp_path)
    ours = learner.predict(paths)
    labels, probabilities, *_ = zip(*model.predict(paths), strict=True)
    assert list(labels) == ours.labels
    torch.testing.assert_close(torch.tensor(probabilities), ours.probabilities.amax(1), rtol=0, atol=1e-4)


def test_each_rule_has_a_format_of_its_own(mixed: Mixed, by_evidence: Mixed) -> None:
    abouts = [json.loads((folder / "model.json").read_bytes()) for _, folder, _ in (mixed, by_evidence)]
    assert [(about["format"], about["rule"]) for about in abouts] == [
        ("protosteer-onnx-3", "paper"),
        ("protosteer-onnx-5", "evidence"),
    ]
    assert "neighbours" not in abouts[1] and abouts[1]["temperature"] == 1.0
    # Without a prompt, and under the first task's, which is stored once though it is the one for all classes.
    assert sorted(view["prompt"] for view in abouts[1]["views"]) == [0, 1]


def odd_images(folder: Path) -> list[str]:
    """Files of the modes and shapes that need care."""
    generator = np.random.default_rng(0)
    colour = Image.fromarray(generator.integers(0, 256, (37, 90, 3), dtype=np.uint8))
    mask = Image.fromarray(generator.integers(0, 256, (37, 90), dtype=np.uint8))
    turned = Image.Exif()
    turned[0x0112] = 6
    colour.save(folder / "turned.jpg", exif=turned)
    colour.convert("CMYK").save(folder / "print.tif")
    colour.convert("1").save(folder / "bits.png")
    colour.quantize(16).save(folder / "palette.png", transparency=3)
    Image.merge("RGBA", [*colour.split(), mask]).save(folder / "clear.png")
    Image.merge("LA", [mask, mask]).save(folder / "grey.png")
    Image.fromarray(generator.integers(0, 2**16, (40, 33), dtype=np.uint16)).save(folder / "deep.png")
    Image.fromarray(generator.integers(0, 2**16, (40, 33), dtype=np.int32)).save(folder / "wide.tif")
    Image.fromarray(generator.random((40, 33), dtype=np.float32)).save(folder / "float.tif")
    colour.resize((3, 401)).save(folder / "ribbon.png")
    colour.resize((1, 1)).save(folder / "dot.png")
    return sorted(map(str, folder.iterdir()))


@pytest.mark.parametrize("crop, interpolation", [(0.9, "bicubic"), (0.875, "bilinear")])
def test_pixels_are_prepared_alike_to_the_bit(crop: float, interpolation: str, tmp_path: Path) -> None:
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    backbone = tiny_backbone()
    backbone.preprocessing = Preprocessing(35, mean, std, crop, interpolation)
    how = {**backbone.preprocessing.to_dict(), "canvas": backbone.preprocessing.canvas}
    for path in odd_images(tmp_path):
        with Image.open(path) as image:
            ours = backbone.transform(image).numpy()
        assert np.array_equal(onnx_predict.read_image(path, how), ours), path


def small_learner(*tasks: list[str]) -> Learner:
    learner = Learner(tiny_backbone(), QUICK.replace(prompts=False))
    for classes in tasks or [["ant", "bee"]]:
        learner.learn(easy_task(classes))
    return learner


def save_images(folder: Path) -> list[str]:
    images, labels = easy_task(["ant", "bee"], per_class=1, seed=9)
    for image, label in zip(images, labels, strict=True):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / f"{label}.png")
    return pictures(folder)


def test_the_example_prints_a_line_per_image_and_marks_unknown_ones(tmp_path: Path) -> None:
    learner = small_learner()
    paths = save_images(tmp_path)
    similarity = learner.predict(paths).scores.amax(1)
    (task,) = learner.memory.tasks
    between = float(similarity.mean())
    classes = ClassTable.of(replace(record, heldout_similarities=torch.full((10,), between)) for record in task.classes)
    learner.memory = Memory([replace(task, classes=classes)])
    export_onnx(learner, tmp_path / "exported")
    done = run_script(tmp_path, "exported/predict.py", *paths)
    assert not done.returncode, done.stderr
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert [line[:2] for line in lines] == [[paths[0], "ant"], [paths[1], "bee"]]
    assert [float(line[3]) for line in lines] == pytest.approx(similarity.tolist(), abs=1e-4)
    assert [line[4:] == ["unknown"] for line in lines] == (similarity < between).tolist()

    (tmp_path / "text.png").write_text("no image")
    done = run_script(tmp_path, "exported/predict.py", paths[0], "text.png", paths[1])
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-2].startswith("text.png cannot be read as an image")
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == paths


def test_an_earlier_export_is_replaced(tmp_path: Path) -> None:
    folder, messages = tmp_path / "deep" / "down", []
    written = export_onnx(small_learner(), folder, messages.append)
    assert sorted(path.name for path in written) == FILES == sorted(os.listdir(folder))
    assert "greatest difference" in messages[0]
    (folder / "__pycache__").mkdir()
    export_onnx(small_learner(["cat", "dog"]), folder)
    assert json.loads((folder / "model.json").read_bytes())["labels"] == ["cat", "dog"]
    assert sorted(os.listdir(folder)) == FILES and os.listdir(folder.parent) == ["down"]


def test_other_places_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = small_learner()
    full, file, mine, deep = (tmp_path / name for name in ("full", "file", "mine", "deep"))
    full.mkdir()
    deep.mkdir()
    (deep / "model.json").write_text("[" * 100_000)
    (full / "model.json").write_text('{"format": "something else"}')
    file.write_text("precious")
    export_onnx(learner, mine)
    (mine / "notes.txt").write_text("precious")
    before = (mine / "model.json").stat().st_mtime_ns
    for place in (full, file, mine, deep, file / "below"):
        with expect_error("cannot-write", ProtosteerError, path=place):
            export_onnx(learner, place)
    with expect_error("cannot-write", ProtosteerError):
        export_onnx(learner, file / "below", option="--there")
    monkeypatch.chdir(mine)
    with expect_error("cannot-write", ProtosteerError):
        export_onnx(learner, Path("."))
    assert file.read_text() == "precious" and (mine / "model.json").stat().st_mtime_ns == before
    assert sorted(os.listdir(tmp_path)) == ["deep", "file", "full", "mine"]


@pytest.mark.parametrize("moment", ["third file", "last rename"])
def test_an_interrupted_export_leaves_what_was_there(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "exported"
    export_onnx(small_learner(), folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    write, rename = files.write_atomically, Path.rename

    def stopped_write(path: Path, data: bytes) -> None:
        if path.name == "model.json":
            raise KeyboardInterrupt
        write(path, data)

    def stopped_rename(path: Path, target: Path) -> Path:
        if path.name == "new":
            raise KeyboardInterrupt
        return rename(path, target)

    if moment == "third file":
        monkeypatch.setattr(files, "write_atomically", stopped_write)
    else:
        monkeypatch.setattr(files, "_exchange", lambda *_: False)
        monkeypatch.setattr(Path, "rename", stopped_rename)
    with pytest.raises(KeyboardInterrupt):
        export_onnx(small_learner(["cat", "dog"]), folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert os.listdir(tmp_path) == ["exported"]


def test_a_network_that_computes_something_else_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_graph, "_gelu", lambda graph, x: graph.op("Relu", x))
    with expect_error("onnx-mismatch", ProtosteerError):
        export_onnx(small_learner(), tmp_path / "exported")
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with expect_error("nothing-learned", LearnerError):
        export_onnx(Learner(tiny_backbone()), tmp_path / "exported")
    with monkeypatch.context() as patch:
        patch.setattr(onnx_graph, "_MAX_BYTES", 1000)
        with expect_error("weights-too-large", WeightsError):
            export_onnx(small_learner(), tmp_path / "exported")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with expect_error("missing-extra", ProtosteerError):
        export_onnx(small_learner(), tmp_path / "exported")
    assert not list(tmp_path.iterdir())


def test_equal_models_give_equal_files(tmp_path: Path) -> None:
    a, b = (export_onnx(small_learner(), tmp_path / name) for name in "ab")
    assert [path.read_bytes() for path in a] == [path.read_bytes() for path in b]


def test_real_deit_tiny_on_cifar(shared: Path, tmp_path: Path) -> None:
    weights = shared / "weights" / "deit_tiny_patch16_224.safetensors"
    archive = shared / "data" / "cifar100_lossless.zip"
    for path in (weights, archive):
        if not path.is_file():
            pytest.skip(f"no shared data: {path} does not exist")
    with zipfile.ZipFile(archive) as file:
        strip = Image.open(io.BytesIO(file.read("cifar-100-python/test/000.webp"))).convert("RGB")
    # The strip holds 500 images, one below the other. Four are classes, of which shifted copies are learned.
    pixels = torch.from_numpy(np.array(strip)).reshape(500, 32, 32, 3).permute(0, 3, 1, 2)
    settings = QUICK.replace(batch_size=8, learning_rate=1e-4)
    learner = Learner(Backbone.load("deit_tiny_patch16_224", weights=weights), settings)
    for classes in (range(2), range(2, 4)):
        copies = [pixels[n].roll(shift, dims=2) for n in classes for shift in (-6, -2, 2, 6)]
        learner.learn((torch.stack(copies), [f"picture {n}" for n in classes for _ in range(4)]))
    for n in range(12):
        strip.crop((0, 32 * n, 32, 32 * n + 32)).save(tmp_path / f"{n:02}.png")
    paths = pictures(tmp_path)
    export_onnx(learner, tmp_path / "exported")
    done = run_script(tmp_path / "exported", "-c", OTHER_PROCESS, given=json.dumps(paths))
    assert not done.returncode, done.stderr
    theirs, ours = json.loads(done.stdout), learner.predict(paths)
    assert [label for label, *_ in theirs["found"]] == ours.labels
    assert ours.labels[:4] == [f"picture {n}" for n in range(4)]
    torch.testing.assert_close(torch.tensor(theirs["scores"]), ours.scores, rtol=0, atol=1e-4)
