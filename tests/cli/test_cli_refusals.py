"""What is refused in one line before anything is loaded, and files that are none."""

import io
import os
from pathlib import Path

import pytest
from PIL import Image

from conftest import tiny_backbone
from expect import expect_cli_error
from protosteer.cli.predict import find_files
from protosteer.data.images import ForgivingFiles


@pytest.mark.parametrize(
    "pair",
    ["epochs=999999999999", "batch_size=1e9", "neck_hidden=123456789", f"seed={'9' * 5000}", f"temperature={'9' * 400}",
     "prompt_length=100000", "neck_layers=1000", f"epochs={'[' * 100000}", "centroids=10000000", "neighbours=1000000"],
)  # fmt: skip
def test_absurd_settings(pair: str, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "photos" / name / "x.png")
    said = expect_cli_error(None, "learn", tmp_path / "m", tmp_path / "photos", "--set", pair)
    last = said.splitlines()[-1]
    assert last.startswith(f"error: {pair.split('=')[0]}") and len(last) < 200


def pipe_in_a_list(tmp_path: Path) -> list[Path]:
    os.mkfifo(tmp_path / "pipe.png")
    Image.new("RGB", (8, 8), "red").save(tmp_path / "good.png")
    return [tmp_path / "pipe.png", Path("/dev/zero"), tmp_path, tmp_path / "good.png"]


def test_pipes_devices_and_folders_in_a_list_are_told_and_the_others_read(tmp_path, monkeypatch) -> None:
    paths = pipe_in_a_list(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(map(str, paths))))
    images = ForgivingFiles(find_files(["-"]), tiny_backbone().preprocessing)
    assert images.pixels(range(4))[3, 0].min() == 255
    assert sorted(images.errors) == [0, 1, 2] and images.errors[0]
