"""Segments of videos: the best sequence of classes, and real frames of a clip."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from conftest import tiny_backbone
from expect import expect_cli_error, expect_error
from photo_toys import photos
from protosteer.cli import main
from protosteer.data.image_files import images_below
from protosteer.errors import DataError, SettingsError
from protosteer.learner import Learner
from protosteer.workflows.video_segments import cut_segments, predict_video, read_frames, smooth_classes


@pytest.mark.parametrize("seed", range(5))
def test_no_sequence_of_classes_is_better(seed: int) -> None:
    logs = torch.randn(6, 3, generator=torch.Generator().manual_seed(seed)).double().log_softmax(dim=1)

    def value(labels: tuple[int, ...]) -> float:
        changes = sum(a != b for a, b in itertools.pairwise(labels))
        return float(sum(logs[t, label] for t, label in enumerate(labels))) - 0.7 * changes

    best = max(itertools.product(range(3), repeat=6), key=value)
    assert value(tuple(smooth_classes(logs, 0.7))) == pytest.approx(value(best))


def test_one_odd_frame_makes_no_segment() -> None:
    shares = torch.tensor([[0.9, 0.1]] * 5 + [[0.2, 0.8]] + [[0.9, 0.1]] * 4 + [[0.05, 0.95]] * 6)
    first, second = cut_segments([float(t) for t in range(16)], shares, ["ant", "bee"])
    assert (first.label, first.start, first.end, first.frames) == ("ant", 0.0, 10.0, 10)
    assert (second.label, second.start, second.end) == ("bee", 10.0, 15.0)
    assert first.probability == pytest.approx(0.83) and second.probability == pytest.approx(0.95)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A clip of six seconds that shows an ant, then a bee, and a model of both."""
    av = pytest.importorskip("av")
    root = tmp_path_factory.mktemp("video")
    photos(root / "train", ["ant", "bee"])
    with av.open(str(root / "clip.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=5)
        stream.width = stream.height = 64
        stream.pix_fmt, stream.bit_rate = "yuv420p", 2_000_000
        for name in ("ant", "bee"):
            with Image.open(images_below(root / "train" / name)[0]) as image:
                picture = np.asarray(image.convert("RGB").resize((64, 64), Image.Resampling.NEAREST))
            for _ in range(15):
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return root


def test_frames_are_sampled(place: Path) -> None:
    times = [seconds for seconds, _ in read_frames(place / "clip.mp4", 2.0)]
    assert len(times) == 12 and times == sorted(times) and times[0] == 0.0
    assert next(read_frames(place / "clip.mp4", 1.0))[1].size == (64, 64)
    (place / "text.mp4").write_text("no film")
    with expect_error("unreadable-video", DataError, path=place / "text.mp4"):
        list(read_frames(place / "text.mp4", 1.0))
    with expect_error("bad-frame-rate", SettingsError):
        predict_video(Learner(tiny_backbone()), place / "clip.mp4", 0.0)


def test_a_clip_is_predicted_by_its_segments(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, clip = place / "m.protosteer", place / "clip.mp4"
    assert main(["learn", str(model), str(place / "train"), "--preset", "instant", "--backbone", "nano"]) == 0
    capsys.readouterr()
    assert main(["predict", str(model), str(clip), "--json", "--per-second", "5"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["label"] for row in rows] == ["ant", "bee"] and rows[1]["start"] == pytest.approx(3.0, abs=0.5)
    assert main(["predict", str(model), str(clip), "--csv"]) == main(["predict", str(model), str(clip)]) == 0
    expect_cli_error("conflicting-options", "predict", model, clip, place / "train")
