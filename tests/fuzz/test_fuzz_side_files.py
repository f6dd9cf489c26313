"""Logs, certificates and adapted backbones that someone has changed: used, skipped or rejected in one line."""

import functools
import json
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
import torch
from targets import TARGETS, Target, try_out
from targets import mutate as mutate_bytes
from test_fuzz_models import change_header
from test_fuzz_models import mutate as mutate_model
from test_fuzz_models import seeds as models

from conftest import tiny_backbone
from protosteer.errors import ProtosteerError
from protosteer.model import certificate, history
from protosteer.model import file as model_file
from protosteer.report.history import overview
from protosteer.settings import Settings
from protosteer.workflows import shared_prompt, sort_files

ENTRY = {
    "date": "2026-11-18T12:00:00+00:00",
    "command": "learn",
    "removed": {},
    "renamed": {"cat": "dog"},
    "classes": 3,
}
STEP = {
    "from": "FOLDER/in/a.png",
    "to": "cat/a.png",
    "mode": "move",
    "folder": "cat",
    "version": [3, 5],
    "xmp": "cat/a.png.xmp",
}


def lines(*values: object) -> bytes:
    return "".join(json.dumps(value) + "\n" for value in values).encode()


def mutate_lines(data: bytes, random: Random) -> bytes:
    """Change values of one line, or bytes."""
    if random.randrange(3) == 0:
        return mutate_bytes(data, random)
    values = [json.loads(line) for line in data.splitlines()]
    change_header(random.choice(values), random)
    return lines(*values)


def in_folder(check: Callable[[Path, bytes], None]) -> Callable[[bytes], None]:
    """What is rejected is rejected in one line; nothing outside of the folder changes."""

    def checked(data: bytes) -> None:
        with TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                check(Path(folder), data.replace(b"FOLDER", os.fsencode(folder)))
            except ProtosteerError as error:
                assert "\n" not in str(error)

    return checked


def check_history(folder: Path, data: bytes) -> None:
    model = folder / "m.protosteer"
    model.write_bytes(models()[1])
    history.beside(model).write_bytes(data)
    overview(history.read(model)[0], [])
    history.forget_in_versions(model, ["cat"], ["eel"])
    history.keep_version(model, 1)
    history.undo(model)


def check_sort_log(folder: Path, data: bytes) -> None:
    (folder / "out" / "cat").mkdir(parents=True)
    (folder / "out" / "cat" / "a.png").write_bytes(b"abc")
    (folder / "out" / sort_files.LOG).write_bytes(data)

    def move(source: Path, target: Path) -> None:
        """A log says where files are put back: a forged one may say anything, but here it has no effect."""
        assert Path(target).is_absolute()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sort_files, "move_synced", move)
        patch.setattr(Path, "mkdir", lambda *_, **__: None)
        sort_files.undo_sort(folder / "out")


def check_adapted(folder: Path, data: bytes) -> None:
    (folder / "b").write_bytes(data)
    found = shared_prompt.read(folder / "b")
    json.dumps(found.describe() | {"path": ""})
    found.prompt_for(tiny_backbone())


@functools.cache
def adapted_seeds() -> Sequence[bytes]:
    backbone = tiny_backbone()
    prompt = torch.zeros(backbone.prompt_shape(1))
    header = model_file.backbone_header(backbone)
    with TemporaryDirectory() as folder:
        path = Path(folder, "b")
        shared_prompt.Adapted(path, header, Settings.preset("fast"), ["cat", "dog"], 8, prompt).write(path)
        return [path.read_bytes()]


def check_certificate(folder: Path, data: bytes) -> None:
    (folder / "c.json").write_bytes(data)
    model = folder / "m.protosteer"
    model.write_bytes(models()[1])
    certificate.check(certificate.read(folder / "c.json"), model, model_file.read(model).memory)


def certificate_seeds() -> Sequence[bytes]:
    removed = [{"class": "cat", "task": "first", "sha256": "0" * 64}]
    about = {"forgotten": ["cat"], "removed": removed, "left": [{"task": "b", "sha256": "1" * 64}], "exact": True}
    return [lines({"format": certificate.FORMAT, **about, "sha256_after": "2" * 64})]


def mutate_certificate(data: bytes, random: Random) -> bytes:
    """Change it, and make its checksum right again."""
    contents = json.loads(data)
    change_header(contents, random)
    return lines({**contents, "checksum": certificate._checksum(contents)})


TARGETS["history"] = Target(
    lambda: [lines({"keep_versions": 2}, {**ENTRY, "added": {"cat": 2}, "version": "000001.protosteer"})],
    in_folder(check_history),
    mutate_lines,
)
TARGETS["sort-log"] = Target(lambda: [lines(STEP, {**STEP, "mode": "copy"})], in_folder(check_sort_log), mutate_lines)
TARGETS["certificate"] = Target(certificate_seeds, in_folder(check_certificate), mutate_certificate)
TARGETS["adapted"] = Target(adapted_seeds, in_folder(check_adapted), mutate_model)


@pytest.mark.parametrize("name", ["history", "sort-log", "certificate", "adapted"])
def test_side_files(name: str) -> None:
    try_out(name, examples=60)
