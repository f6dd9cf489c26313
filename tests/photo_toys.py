"""Folders of pictures, as a user has them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_digits

from conftest import easy_task, tiny_backbone
from protosteer.learner import Learner
from protosteer.settings import Settings
from protosteer.workflows.folder_scan import scan_folder
from protosteer.workflows.learn_folder import learn_folder

QUICK = Settings.preset("paper", epochs=2, batch_size=8, neck_hidden=16, augmentation="none", centroids=2)
ALONE = QUICK.replace(independent=True)
EVIDENCE = QUICK.replace(rule="evidence", feature_layers="several")


def photos(folder: Path, classes: list[str], per_class: int = 8, seed: int = 0) -> Path:
    """One folder per class with small PNG files, images of `easy_task`."""
    images, labels = easy_task(classes, per_class, seed)
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        path = folder / label / f"{i % per_class:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
    return folder


DIGIT_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def digit_photos(
    folder: Path, classes: Sequence[int] | Mapping[str, int], count: int = 10, skip: int = 0, side: int = 32
) -> Path:
    """One folder per class with PNG files of handwritten digits.

    classes: digits, whose folders are called zero to nine; or names and the digit of each.
    """
    data = load_digits()
    named = classes if isinstance(classes, Mapping) else {DIGIT_NAMES[digit]: digit for digit in classes}
    for name, digit in named.items():
        (folder / name).mkdir(parents=True)
        for i, image in enumerate(data.images[data.target == digit][skip : skip + count], 1):
            picture = Image.fromarray((255 - 15 * image).astype("uint8"))
            picture.resize((side, side)).save(folder / name / f"{i:02}.png")
    return folder


def taught(*folders: Path, settings: Settings = QUICK, holdout: float = 0.25) -> Learner:
    """A learner that was taught folders one after the other; each is a task."""
    learner = Learner(tiny_backbone(), settings)
    for folder in folders:
        learn_folder(learner, scan_folder(folder, learner.memory), holdout=holdout)
    return learner


def file_bytes(learner: Learner, place: Path) -> bytes:
    """What the learner's model file would hold."""
    path = place / "bytes.protosteer"
    learner.save(path)
    data = path.read_bytes()
    path.unlink()
    return data
