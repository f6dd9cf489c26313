"""Wrong command lines: exit code 2, one line on standard error, a stable error code, and no file changes."""

import shlex
from pathlib import Path

import pytest
from PIL import Image

from expect import expect_cli_error
from photo_toys import photos
from protosteer.cli import main

# None: the code belongs to a layer below, whose own tests assert it.
MISTAKES: dict[str, str | None] = {
    # The command line itself.
    "demo --seed -1": "usage",
    "demo --seed x": "usage",
    "demo photos --backbone x --json --nonsense": "usage",
    "demo --backbone mini": "conflicting-options",
    "backbones nano": "usage",
    "datasets get": "usage",
    "datasets get svnh": "unknown-dataset",
    "datasets get imagenet-subset": "missing-dataset",
    # learn
    "learn shop.protosteer": "missing-argument",
    "learn '' spring": "empty-path",
    "learn shop.protosteer ''": "empty-path",
    "learn shop.protosteer nowhere": "no-class-folders",
    "learn spring summer": "model-is-folder",
    "learn new spring --set epoch=3": "unknown-setting",
    "learn new spring --set epochs": "not-a-pair",
    "learn new spring --holdout 0.9": "usage",
    "learn new spring --preset slow": "unknown-preset",
    "learn new spring --threads 100000": "too-many-threads",
    "learn new spring --engine cluster": "unknown-engine",
    "learn new spring --address auto": "address-without-ray",
    "learn new spring --backbone auto --weights x": "conflicting-options",
    "learn new spring summer --name x": "conflicting-options",
    "learn new spring --adapted nowhere": "no-adapted-backbone",
    "learn new spring --adapted shop.protosteer": "not-adapted-backbone",
    "learn text spring": "damaged-model",
    "learn new .": "nested-folders",
    "learn nowhere shop.protosteer": "model-not-first",
    "predict shop.protosteer spring --out spring/ant": "out-among-images",
    "learn shop.protosteer/new spring": "cannot-write",
    "learn loop spring": "link-loop",
    # predict, embed
    "predict shop.protosteer ''": "empty-path",
    "predict '' spring": "empty-path",
    "predict shop.protosteer spring --csv --json": "conflicting-options",
    "predict shop.protosteer spring --json --out x.csv": "conflicting-options",
    "predict shop.protosteer spring --engine ray": "engine-without-out",
    "predict shop.protosteer spring --explain --out x.csv": "conflicting-options",
    "predict shop.protosteer spring --out x.txt": "bad-suffix",
    "predict shop.protosteer spring --out taken.csv": "file-exists",
    "predict shop.protosteer spring --reject 1.5": "bad-reject",
    "predict shop.protosteer '*.jpg'": "no-such-file",
    "predict shop.protosteer none.jpg": "no-such-file",
    "predict shop.protosteer spring text.png": "unreadable-files",
    "predict shop.protosteer spring --weights none.safetensors": "other-backbone",
    "predict none.protosteer spring": None,
    "embed nowhere spring --out x.csv": "download-failed",
    # correct
    "correct shop.protosteer --undo": None,
    "correct shop.protosteer spring/ant/00.png --undo": "not-corrected",
    "correct shop.protosteer spring/ant/00.png": "missing-argument",
    "correct shop.protosteer spring/ant/00.png bee --undo": "conflicting-options",
    "correct shop.protosteer none.png bee": "missing-file",
    "correct shop.protosteer none.png --undo": "no-such-file",
    "correct shop.protosteer spring/ant/00.png ' '": "bad-name",
    # suggest
    "suggest shop.protosteer": "conflicting-options",
    "suggest shop.protosteer spring --check spring": "conflicting-options",
    "suggest shop.protosteer spring --json --out x.csv": "conflicting-options",
    "suggest shop.protosteer spring --out x.txt": "bad-suffix",
    "suggest shop.protosteer spring --out taken.csv": "file-exists",
    "suggest shop.protosteer spring --reject 1.5": "bad-reject",
    # Options are checked before a model is read.
    "predict text spring --reject 2": "bad-reject",
    "sort text spring sorted --reject -1": "bad-reject",
    "serve text --reject nan": "bad-reject",
    "predict text spring --device tpu": "no-such-device",
    "suggest shop.protosteer --check loose": "loose-image",
    "suggest shop.protosteer nowhere": "no-such-file",
    # forget, merge, inspect, export, serve, adapt
    "forget shop.protosteer": "conflicting-options",
    "forget shop.protosteer ant --task spring": "conflicting-options",
    "forget shop.protosteer ant yak": None,
    "forget shop.protosteer --task winter": None,
    "forget shop.protosteer ant --backup taken.csv": "file-exists",
    "merge shop.protosteer -o new": "missing-argument",
    "merge shop.protosteer shop.protosteer -o new": None,
    "merge shop.protosteer other.protosteer -o taken.csv": "file-exists",
    "merge shop.protosteer other.protosteer -o new --rename yak=x": None,
    "merge shop.protosteer other.protosteer -o new --rename yak": "not-a-pair",
    "merge shop.protosteer other.protosteer -o new --rename cat=": "not-a-pair",
    "merge shop.protosteer other.protosteer -o new --rename cat=x --rename cat=y": "named-twice",
    "merge shop.protosteer other.protosteer -o new --rename cat=x --rename dog=x": None,
    "inspect shop.protosteer --plot x.pdf": "not-a-png",
    "inspect none.protosteer": None,
    "serve shop.protosteer --token secret": "conflicting-options",
    "adapt spring -o taken.csv": "file-exists",
    "adapt nowhere -o new": "no-class-folders",
    "adapt spring -o new --set prompts=false": "prompts-off",
    "adapt single -o new": "one-class",
    # run, compare
    "run": "no-stream",
    "run split-digit": "unknown-stream",
    "run split-digits --set epohcs=3": "unknown-setting",
    "run split-digits --base 2": "base-without-increment",
    "run split-digits --tasks 11": "too-few-classes",
    "run split-digits --class-order nonsense": "bad-class-order",
    "run split-digits --method ncm --set epochs=3": "unknown-setting",
    "run split-digits --set seed=3": "seed-not-seeds",
    "run split-digits --resume --overwrite": "resume-and-overwrite",
    "run split-digits --preset quick": "unknown-preset",
    "run split-digits --preset fast --method ncm": "unknown-preset",
    "run folder:nowhere": "no-class-folders",
    "run domains:nowhere --method ncm": "no-folder",
    "run split-digits --class-orders 1,1": "bad-class-orders",
    "run split-digits --sweep epochs": "bad-sweep",
    "run split-digits --method text.py:Mine": "no-plugin-file",
    "run split-digits --method ncm --settings published": "no-published-settings",
    "evaluate-run spring": "not-a-run",
    "tune ncm split-digits --grid centroids=0": "setting-out-of-bounds",
    "compare spring": "not-a-run",
    "compare spring --csv --json": "conflicting-options",
    "compare spring --latex --markdown": "conflicting-options",
    "compare spring --plot x.pdf": "not-a-png",
    "bench --threads 100000": "too-many-threads",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, folders of images, and files that are neither."""
    root = tmp_path_factory.mktemp("mistakes")
    photos(root / "spring", ["ant", "bee"], 3)
    photos(root / "summer", ["cat", "dog"], 3)
    photos(root / "single", ["ant"], 3)
    photos(root / "loose", ["ant"], 1)
    Image.new("RGB", (8, 8)).save(root / "loose" / "x.png")
    for name in ("text", "text.png", "taken.csv"):
        (root / name).write_text("neither a model nor an image")
    (root / "loop").symlink_to("loop")
    for model, folder in (("shop", "spring"), ("other", "summer")):
        words = ["learn", str(root / f"{model}.protosteer"), str(root / folder), "--preset", "instant"]
        assert main([*words, "--backbone", "nano"]) == 0
    return root


def contents(root: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in root.rglob("*")}


@pytest.mark.parametrize(("line", "code"), MISTAKES.items(), ids=MISTAKES)
def test_a_mistake_has_its_code_and_changes_nothing(line, code, place, monkeypatch):
    monkeypatch.chdir(place)
    before = contents(place)
    expect_cli_error(code, *shlex.split(line))
    assert contents(place) == before
