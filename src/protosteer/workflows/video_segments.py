"""Predict a video, which PyAV reads (the extra `video`): its frames, and segments of one class each.

Frames of a segment are independent observations of one class, so their log-probabilities are summed. The classes of all
frames are chosen together, such that the sum is greatest when every change of class costs `CHANGE_COST` (Viterbi).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from protosteer.errors import DataError, SettingsError
from protosteer.learner import Learner
from protosteer.runtime.progress import OnStage, Stage
from protosteer.util.text import one_line

CHANGE_COST = 3.0  # nats: frames must favour another class 20 to 1 before it begins
MIN_PROBABILITY = 1e-4  # of a class in one frame, so that a single frame cannot rule it out
_CHUNK = 64  # frames in memory at once


@dataclass(frozen=True)
class Segment:
    """Part of a video that shows one class.

    Attributes:
        start: Time of its first frame, in seconds.
        end: Time of the next segment's first frame, or of the video's last one.
        label: The class.
        probability: Mean over its frames.
        frames: How many were predicted.
    """

    start: float
    end: float
    label: str
    probability: float
    frames: int


def predict_video(
    learner: Learner, path: Path, per_second: float = 1.0, on_stage: OnStage | None = None
) -> list[Segment]:
    """Predict the segments of a video.

    Args:
        learner: The model.
        path: The video file.
        per_second: How many frames of each second are looked at.
        on_stage: Is given the number of frames done.

    Raises:
        DataError: The file cannot be read, or PyAV is not installed.
        SettingsError: The number of frames is not positive.
    """
    if not 0.0 < per_second <= 100.0:
        message = f"per_second = {per_second}: give how many frames of a second are looked at, such as 1"
        raise SettingsError(message, code="bad-frame-rate", value=per_second)
    times: list[float] = []
    parts: list[Tensor] = []
    remaining = read_frames(path, per_second)
    while chunk := list(itertools.islice(remaining, _CHUNK)):
        prediction = learner.predict([image for _, image in chunk])
        dense = torch.zeros(len(chunk), len(prediction.classes), dtype=torch.double)
        parts.append(dense.scatter_(1, prediction.class_ids, prediction.probabilities.double()))
        times += [seconds for seconds, _ in chunk]
        if on_stage:
            on_stage(Stage("", "frames", len(times), len(times)))
    return cut_segments(times, torch.cat(parts), learner.classes)


def cut_segments(times: list[float], probabilities: Tensor, classes: list[str]) -> list[Segment]:
    """Cut T frames at `times` with probabilities [T, C] into segments of one class each."""
    labels = smooth_classes(probabilities.clamp(min=MIN_PROBABILITY).log(), CHANGE_COST)
    starts = [0, *(t for t in range(1, len(labels)) if labels[t] != labels[t - 1]), len(labels)]
    parts = []
    for start, stop in zip(starts, starts[1:], strict=False):
        mean = float(probabilities[start:stop, labels[start]].mean())
        end = times[stop] if stop < len(times) else times[-1]
        parts.append(Segment(times[start], end, classes[labels[start]], mean, stop - start))
    return parts


def smooth_classes(log_probabilities: Tensor, cost: float) -> list[int]:
    """Return the classes [T] with the greatest sum of log-probabilities [T, C] minus `cost` for every change."""
    score = log_probabilities[0]
    came_from = []
    for row in log_probabilities[1:]:
        top = int(score.argmax())
        stay = score >= score[top] - cost
        came_from.append(torch.arange(len(row)).where(stay, top))
        score = score.where(stay, score[top] - cost) + row
    labels = [int(score.argmax())]
    for origins in reversed(came_from):
        labels.append(int(origins[labels[-1]]))
    return labels[::-1]


def read_frames(path: Path, per_second: float) -> Iterator[tuple[float, Image.Image]]:
    """Yield times in seconds and upright RGB frames, at most so many per second.

    Raises:
        DataError: The file is no video, or PyAV is not installed.
    """
    try:
        import av
    except ImportError as error:
        message = f"{path} is a video; to read it: pip install 'protosteer[video]'"
        raise DataError(message, code="missing-extra", name="video") from error
    following, has_frames = 0.0, False
    try:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            for frame in container.decode(stream):
                seconds = float(frame.time or 0.0)
                if seconds + 1e-6 >= following:
                    has_frames, following = True, (int(seconds * per_second + 1e-6) + 1) / per_second
                    image = frame.to_image()
                    yield seconds, image.rotate(frame.rotation, expand=True) if frame.rotation else image
    except (av.FFmpegError, IndexError, OSError) as error:
        if not has_frames:
            message = f"{path} cannot be read as a video; replace or remove it ({one_line(str(error))})"
            raise DataError(message, code="unreadable-video", path=path) from error
    if not has_frames:
        raise DataError(f"{path} has no frames; replace or remove it", code="unreadable-video", path=path)
