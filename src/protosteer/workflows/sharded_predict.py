"""Write predictions or embeddings of many image files, one Parquet file per shard.

Shards are cut from the sorted file names, so that the same call makes the same ones. A shard is written atomically,
and its name contains a digest of its input. So a call that was stopped, or a worker that died, loses nothing and
duplicates nothing.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protosteer.data.hf_arrow import pyarrow
from protosteer.data.image_files import image_version
from protosteer.errors import DataError, SettingsError
from protosteer.runtime.executor import Executor, Job
from protosteer.util.files import remove_leftovers, write_atomically, writing
from protosteer.util.text import listed, one_line
from protosteer.workflows.learner_spec import LearnerSpec
from protosteer.workflows.prediction_table import Embeddings, Predictions, RowMaker, write_parquet

SHARD = 1024  # files, about
_NAME = re.compile(r"part-\d{5,}-[0-9a-f]{16}\.parquet")


def predictions_from_spec(spec: LearnerSpec, top: int, reject: float | None) -> Predictions:
    """Make prediction rows in the process of a worker."""
    return Predictions(spec.learner(), top, reject)


def embeddings_from_spec(spec: LearnerSpec, layers: str) -> Embeddings:
    """Make embedding rows, of the "last" layer or of "several", in the process of a worker."""
    return Embeddings(spec.learner().backbone.reading(layers))


@dataclass(frozen=True)
class ShardCounts:
    """Numbers of shards that were complete already and that were written, and of unreadable files in the latter."""

    complete: int
    written: int
    unreadable: int


def write_shards(
    engine: Executor,
    maker: RowMaker,
    make_remote: Callable[[], RowMaker],
    about: Sequence[Any],
    names: Sequence[str],
    out: str,
    size: int = SHARD,
    on_progress: Callable[[int, int], None] = lambda done, of: None,
) -> ShardCounts:
    """Write the rows of all files to folder `out`, one Parquet file per shard.

    Args:
        engine: Writes the shards.
        maker: Makes rows in this process.
        make_remote: Makes the same maker in another process.
        about: What else the rows depend on, as plain data.
        names: The image files.
        out: A path or a URI.
        size: Files of a shard; rounded up so that no chunk of images is cut.
        on_progress: Gets the number of files that are done, and of all.

    Raises:
        DataError: The folder holds shards of another model, other files or other options.
    """
    target = open_target(out)
    shards = _shards(sorted(names), -(-size // maker.chunk) * maker.chunk, (maker.kind, maker.width, *about))
    with writing(Path(out), "out="):
        shard_files = target.names()
    _reject_other_shards(out, shard_files, shards)
    jobs = [Job(f"shard {i}", (file, part)) for i, (file, part) in enumerate(shards.items()) if file not in shard_files]
    total, written, unreadable = len(names), 0, 0
    done = total - sum(len(job.arguments[1]) for job in jobs)

    def on_done(job: Job, num_errors: int) -> None:
        nonlocal done, written, unreadable
        done, written, unreadable = done + len(job.arguments[1]), written + 1, unreadable + num_errors
        on_progress(done, total)

    on_progress(done, total)
    make = functools.partial(_shard_writer, make_remote if engine.is_remote else lambda: maker, out)
    engine.run(make, jobs, on_done)
    return ShardCounts(len(shards) - written, written, unreadable)


def _shard_writer(make: Callable[[], RowMaker], out: str) -> Callable[[str, list[str]], int]:
    """Return a function that writes one shard and returns how many of its files cannot be read."""
    maker, target = make(), open_target(out)

    def work(file: str, names: list[str]) -> int:
        rows, buffer = list(maker.rows(names)), io.BytesIO()
        write_parquet(buffer, maker, rows)
        with writing(Path(out), "out="):
            target.put(file, buffer.getvalue())
        return sum("error" in row for row in rows)

    return work


def _shards(names: Sequence[str], size: int, about: Sequence[Any]) -> dict[str, list[str]]:
    """Map the file name of each shard to the image files that it covers."""
    shards = {}
    for number, start in enumerate(range(0, len(names), size)):
        part = list(names[start : start + size])
        digest = hashlib.sha256(repr([*about, number, size]).encode())
        for name in part:
            digest.update(repr((os.fsencode(name), *_version(name))).encode())
        shards[f"part-{number:05}-{digest.hexdigest()[:16]}.parquet"] = part
    return shards


def _version(name: str) -> tuple[int, ...]:
    """Return a value that changes when the file changes; an empty tuple if there is no file."""
    try:
        return image_version(Path(name))
    except OSError:
        return ()


def _reject_other_shards(out: str, shard_files: Sequence[str], shards: dict[str, list[str]]) -> None:
    """Raise if there are shards of another call: a reader takes all shards of a folder for one table."""
    foreign = sorted(name for name in shard_files if _NAME.fullmatch(name) and name not in shards)
    if foreign:
        message = (
            f"{out} holds shards of another model, other files or other options ({listed(foreign, 2)}); remove "
            "them, or choose another out="
        )
        raise DataError(message, code="other-shards", path=out)


class _Folder:
    def __init__(self, path: Path):
        self.path = path

    def names(self) -> list[str]:
        self.path.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.path)  # of processes that were killed
        return [path.name for path in self.path.iterdir()]

    def put(self, name: str, data: bytes) -> None:
        write_atomically(self.path / name, data)


class _Uri:
    """A URI that pyarrow can write to, such as s3://bucket/folder."""

    def __init__(self, uri: str):
        pa = pyarrow()
        try:
            self.system, self.path = pa.fs.FileSystem.from_uri(uri)
        except (OSError, ValueError) as error:
            message = f"{uri} cannot be written to ({one_line(str(error))}); choose another out="
            raise SettingsError(message, code="bad-uri", uri=uri) from error
        self.fs = pa.fs

    def names(self) -> list[str]:
        self.system.create_dir(self.path)
        infos = self.system.get_file_info(self.fs.FileSelector(self.path))
        return [info.base_name for info in infos]

    def put(self, name: str, data: bytes) -> None:
        temporary = f"{self.path}/.{name}.{os.getpid()}.tmp"
        with self.system.open_output_stream(temporary) as file:
            file.write(data)
        self.system.move(temporary, f"{self.path}/{name}")


def open_target(out: str) -> _Folder | _Uri:
    """Open the place where shards are written: a folder of this machine, or a URI."""
    if "://" in out:
        return _Uri(out)
    pyarrow()  # raises before anything is written
    if Path(out).exists() and not Path(out).is_dir():
        raise SettingsError(
            f"{out} is a file; shards need a folder: choose another out=", code="not-a-folder", path=out
        )
    return _Folder(Path(out))
