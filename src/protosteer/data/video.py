"""Sample frames of a video file with PyAV, which is the extra `video`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from PIL import Image

from protosteer.errors import DataError
from protosteer.util.text import one_line


def frames(path: Path, per_second: float = 1.0) -> Iterator[tuple[float, Image.Image]]:
    """Yield times in seconds and upright RGB frames, at most so many per second.

    Raises:
        DataError: The file is no video, or PyAV is not installed.
    """
    try:
        import av
    except ImportError as error:
        message = f"{path} is a video; to read it: pip install 'protosteer[video]'"
        raise DataError(message, code="missing-extra", name="video") from error
    following, found = 0.0, False
    try:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            for frame in container.decode(stream):
                seconds = float(frame.time or 0.0)
                if seconds + 1e-6 >= following:
                    found, following = True, (int(seconds * per_second + 1e-6) + 1) / per_second
                    image = frame.to_image()
                    yield seconds, image.rotate(frame.rotation, expand=True) if frame.rotation else image
    except (av.FFmpegError, IndexError, OSError) as error:
        if not found:
            message = f"{path} cannot be read as a video; replace or remove it ({one_line(str(error))})"
            raise DataError(message, code="unreadable-video", path=path) from error
    if not found:
        raise DataError(f"{path} has no frames; replace or remove it", code="unreadable-video", path=path)
