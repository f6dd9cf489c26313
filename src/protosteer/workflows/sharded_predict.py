"""Many image files, a shard at a time: each becomes one Parquet file, whose name says what went in.

Shards are made of the files' names in sorted order, so that the same call makes the same ones. A shard is there
whole or not at all, and one that is there is not made again: a call that was stopped, or a worker that died,
loses nothing and doubles nothing.
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
from protosteer.workflows.learner_spec import Carried
from protosteer.workflows.prediction_table import Embeddings, Predictions, RowMaker, write_parquet

SHARD = 1024  # files, about
_NAME = re.compile(r"part-\d{5,}-[0-9a-f]{16}\.parquet")


def carried_predictions(carried: Carried, top: int, reject: float | None) -> Predictions:
    return Predictions(carried.learner(), top, reject)


def carried_embeddings(carried: Carried) -> Embeddings:
    return Embeddings(carried.learner().backbone)


@dataclass(frozen=True)
class Outcome:
    """How many shards were there already, and files that could not be read, of those that were made now."""

    kept: int
    made: int
    unreadable: int


def write_shards(
    engine: Executor,
    maker: RowMaker,
    carried: Callable[[], RowMaker],
    about: Sequence[Any],
    names: Sequence[str],
    out: str,
    size: int = SHARD,
    on_progress: Callable[[int, int], None] = lambda done, of: None,
) -> Outcome:
    """The rows of all files, in folder `out`, a path or a URI.

    carried: makes the same maker in another process. about: what else the rows depend on, as plain data.
    size: files of a shard; rounded up so that no chunk of images is cut.
    """
    place = open_place(out)
    wanted = _shards(sorted(names), -(-size // maker.chunk) * maker.chunk, (maker.kind, maker.width, *about))
    with writing(Path(out), "out="):
        there = place.names()
    _refuse_strangers(out, there, wanted)
    jobs = [
        Job(f"shard {i}", (file, some)) for i, (file, some) in enumerate(wanted.items()) if file not in there
    ]
    total, made, unreadable = len(names), 0, 0
    done = total - sum(len(job.arguments[1]) for job in jobs)

    def on_done(job: Job, bad: int) -> None:
        nonlocal done, made, unreadable
        done, made, unreadable = done + len(job.arguments[1]), made + 1, unreadable + bad
        on_progress(done, total)

    on_progress(done, total)
    make = functools.partial(_shard_maker, carried if engine.elsewhere else lambda: maker, out)
    engine.run(make, jobs, on_done)
    return Outcome(len(wanted) - made, made, unreadable)


def _shard_maker(make: Callable[[], RowMaker], out: str) -> Callable[[str, list[str]], int]:
    """Makes one shard after the other; of each, the number of files that could not be read."""
    maker, place = make(), open_place(out)

    def work(file: str, names: list[str]) -> int:
        rows, whole = list(maker.rows(names)), io.BytesIO()
        write_parquet(whole, maker, rows)
        with writing(Path(out), "out="):
            place.put(file, whole.getvalue())
        return sum("error" in row for row in rows)

    return work


def _shards(names: Sequence[str], size: int, about: Sequence[Any]) -> dict[str, list[str]]:
    """The names of each shard, by the name of its file."""
    found = {}
    for number, start in enumerate(range(0, len(names), size)):
        some = list(names[start : start + size])
        digest = hashlib.sha256(repr([*about, number, size]).encode())
        for name in some:
            digest.update(repr((os.fsencode(name), *_version(name))).encode())
        found[f"part-{number:05}-{digest.hexdigest()[:16]}.parquet"] = some
    return found


def _version(name: str) -> tuple[int, ...]:
    """Changes when a file does; empty of one that is not there."""
    try:
        return image_version(Path(name))
    except OSError:
        return ()


def _refuse_strangers(out: str, there: Sequence[str], wanted: dict[str, list[str]]) -> None:
    """Whoever reads the folder takes all of its shards for one table."""
    strangers = sorted(name for name in there if _NAME.fullmatch(name) and name not in wanted)
    if strangers:
        raise DataError(
            f"{out} holds shards of another model, other files or other options ({listed(strangers, 2)}); remove "
            "them, or choose another out="
        )


# Places for shards


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
    """A place that pyarrow knows how to reach, such as s3://bucket/folder."""

    def __init__(self, uri: str):
        pa = pyarrow()
        try:
            self.system, self.path = pa.fs.FileSystem.from_uri(uri)
        except (OSError, ValueError) as error:
            raise SettingsError(
                f"{uri} is no place to write to ({one_line(str(error))}); choose another out="
            ) from error
        self.fs = pa.fs

    def names(self) -> list[str]:
        self.system.create_dir(self.path)
        found = self.system.get_file_info(self.fs.FileSelector(self.path))
        return [info.base_name for info in found]

    def put(self, name: str, data: bytes) -> None:
        temporary = f"{self.path}/.{name}.{os.getpid()}.tmp"
        with self.system.open_output_stream(temporary) as file:
            file.write(data)
        self.system.move(temporary, f"{self.path}/{name}")


def open_place(out: str) -> _Folder | _Uri:
    if "://" in out:
        return _Uri(out)
    pyarrow()  # complains before anything is made
    if Path(out).exists() and not Path(out).is_dir():
        raise SettingsError(f"{out} is a file; shards need a folder: choose another out=")
    return _Folder(Path(out))
