"""What is refused in one line before anything is loaded, and files that are none."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from PIL import Image

from conftest import tiny_backbone
from protosteer.cli import main
from protosteer.cli.predict import find_files
from protosteer.data.images import ForgivingFiles
from protosteer.errors import SettingsError
from protosteer.runtime.device import choose_device


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main([str(word) for word in words]) == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1 and shown.err.startswith("error: ") and shown.out == ""
    return shown.err


@pytest.mark.parametrize(
    "words", [("predict", "m", ""), ("predict", "", "x"), ("learn", "m", ""), ("learn", "", "f")]
)
def test_an_empty_path_is_not_the_current_folder(
    words: tuple[str, ...], tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (8, 8)).save(tmp_path / "x.png")
    assert "the path is empty" in refused(capsys, *words)


def test_absurd_numbers_of_threads(capsys, tmp_path) -> None:
    for command in (["predict", "m", "x"], ["learn", "m", "f"], ["bench"]):
        assert "give at most" in refused(capsys, *command, "--threads", 100000)


@pytest.mark.parametrize(
    "pair",
    ["epochs=999999999999", "batch_size=1e9", "neck_hidden=123456789", f"seed={'9' * 5000}", f"temperature={'9' * 400}",
     "prompt_length=100000", "neck_layers=1000", f"epochs={'[' * 100000}", "centroids=10000000", "neighbours=1000000"],
)  # fmt: skip
def test_absurd_settings(pair: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "ab":
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "photos" / name / "x.png")
    assert main(["learn", str(tmp_path / "m"), str(tmp_path / "photos"), "--set", pair]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"error: {pair.split('=')[0]}") and len(last) < 200


def test_a_device_without_numbers_is_refused() -> None:
    with pytest.raises(SettingsError, match="'meta' cannot be used"):
        choose_device("meta")
    assert choose_device("cpu").type == "cpu"


def pipe_in_a_list(tmp_path: Path) -> list[Path]:
    os.mkfifo(tmp_path / "pipe.png")
    Image.new("RGB", (8, 8), "red").save(tmp_path / "good.png")
    return [tmp_path / "pipe.png", Path("/dev/zero"), tmp_path, tmp_path / "good.png"]


def test_pipes_devices_and_folders_in_a_list_are_told_and_the_others_read(tmp_path, monkeypatch) -> None:
    paths = pipe_in_a_list(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(map(str, paths))))
    images = ForgivingFiles(find_files(["-"]), tiny_backbone().preprocessing)
    assert images.pixels(range(4))[3, 0].min() == 255
    assert sorted(images.errors) == [0, 1, 2] and "not a regular file" in images.errors[0]
