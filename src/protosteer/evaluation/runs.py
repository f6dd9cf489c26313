"""A run folder: everything about one experiment, written so that the process may be killed at any moment.

    manifest.json            what was run, with what, on what
    metrics.json             figures of every seed, their mean and standard deviation; there when all is done
    log.txt                  what was said, with times
    seed-0/matrix.csv        accuracy on every task after every task
    seed-0/metrics.json      figures and diagnosis; there when the seed is done
    seed-0/task-01.protosteer  the model after each task
    seed-0/unfinished/       what an interrupted run needs to go on; gone when the seed is done

Every file is written whole or not at all, in an order that leaves nothing out: first the model of a task,
then the embeddings that its evaluation made, then its row of the matrix.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save
from torch import Tensor

from protosteer.errors import RunError
from protosteer.evaluation import manifest, metrics
from protosteer.evaluation.protocol import Row, Run
from protosteer.running.resume import SECONDS, Bookmark
from protosteer.util.files import remove_leftovers, write_atomically

MANIFEST, METRICS, LOG, LOCK = "manifest.json", "metrics.json", "log.txt", ".protosteer.lock"
REMOVED = ".removed-"  # seeds on their way out


class SeedFolder:
    """The part of a run folder that belongs to one seed; the `Store` of `protocol.run_stream`."""

    def __init__(self, path: Path, suffix: str, bookmark_seconds: float = SECONDS):
        self.path = path
        self.suffix = suffix
        self.bookmark_seconds = bookmark_seconds
        self.unfinished = path / "unfinished"

    def rows(self) -> list[Row]:
        path = self.unfinished / "rows.json"
        return [Row(**row) for row in read_json(path)] if path.is_file() else []

    def save_rows(self, rows: list[Row]) -> None:
        write_json(self.unfinished / "rows.json", [dataclasses.asdict(row) for row in rows])

    def learned(self, task: int) -> tuple[bytes, float] | None:
        path = self._model(task)
        if not path.is_file():
            return None
        return path.read_bytes(), float(read_json(self._seconds(task)))

    def save_learned(self, task: int, state: bytes, seconds: float) -> None:
        write_json(self._seconds(task), seconds)
        write_atomically(self._model(task), state)
        self.bookmark(task).clear()

    def embeddings(self) -> list[Mapping[str, Tensor]]:
        """Those behind the rows that there are; an evaluation that was cut off is made, and counted, anew."""
        return [load_file(self._embeddings(task)) for task in range(len(self.rows()))]

    def save_embeddings(self, task: int, embeddings: Mapping[str, Tensor]) -> None:
        whole = {name: tensor.contiguous() for name, tensor in embeddings.items()}
        write_atomically(self._embeddings(task), save(whole))

    def bookmark(self, task: int) -> Bookmark:
        return Bookmark(self.unfinished / f"training-{task + 1:03}.safetensors", self.bookmark_seconds)

    def figures(self) -> dict[str, Any] | None:
        """Figures of the seed, if it is done."""
        path = self.path / METRICS
        return read_json(path) if path.is_file() else None

    def finish(self, seed: int, run: Run) -> dict[str, Any]:
        figures = {"seed": seed, **run.to_dict()}
        write_atomically(self.path / "matrix.csv", matrix_csv(run.matrix).encode())
        write_json(self.path / METRICS, figures)
        self.clean()
        return figures

    def clean(self) -> None:
        """A seed that is done needs nothing to go on from."""
        shutil.rmtree(self.unfinished, ignore_errors=True)
        remove_leftovers(self.path)

    def _embeddings(self, task: int) -> Path:
        return self.unfinished / f"embeddings-{task + 1:03}.safetensors"

    def _model(self, task: int) -> Path:
        return self.path / f"task-{task + 1:02}{self.suffix}"

    def _seconds(self, task: int) -> Path:
        return self.unfinished / f"seconds-{task + 1:03}.json"


class RunFolder:
    """One experiment: a configuration and its seeds."""

    def __init__(self, path: Path):
        self.path = path

    @property
    def manifest(self) -> dict[str, Any] | None:
        """What the folder says of itself; None if it is no run folder."""
        file = self.path / MANIFEST
        if not file.is_file():
            return None
        known = read_json(file)
        if not isinstance(known, dict) or known.get("format") != manifest.FORMAT:
            told = known.get("format") if isinstance(known, dict) else None
            raise RunError(
                f"{file} has run format {told}, this version knows {manifest.FORMAT}; choose another folder"
            )
        if not {"configuration", "seeds", "sessions"} <= known.keys() or not known["sessions"]:
            raise RunError(f"{file} is incomplete: it was altered by hand; choose another folder")
        return {**known, "configuration": manifest.in_todays_terms(known["configuration"])}

    def seed(self, seed: int, suffix: str, bookmark_seconds: float = SECONDS) -> SeedFolder:
        return SeedFolder(self.path / f"seed-{seed}", suffix, bookmark_seconds)

    def open(
        self,
        configuration: dict[str, Any],
        circumstances: dict[str, Any],
        command: Sequence[str],
        seeds: Sequence[int] | None,
        resume: bool,
        overwrite: bool,
    ) -> tuple[list[int], list[str]]:
        """Make the folder ready, or refuse; returns the seeds to run and what the user should know.

        seeds: None means those that the folder has, or else seed 0.
        """
        old = self.manifest
        if old is None:
            first = list(seeds or [0])
            self._write_manifest(configuration, circumstances, command, first, [])
            return first, [f"{self.path} holds no run to go on with; a new one begins"] if resume else []
        if overwrite:
            self._remove(old)
            first = list(seeds or [0])
            self._write_manifest(configuration, circumstances, command, first, [])
            return first, [f"the run that {self.path} held has been removed"]
        changed = manifest.differences(old["configuration"], configuration)
        if changed:
            shown = "; ".join(changed[:6]) + (f"; and {len(changed) - 6} more" if len(changed) > 6 else "")
            raise RunError(
                f"{self.path} holds a run of another configuration ({shown}); choose another out=, or "
                "overwrite=True to remove it"
            )
        if not resume:
            state = "finished" if self._finished(old["seeds"]) else "unfinished"
            remedy = (
                "resume=True adds seeds that are missing"
                if state == "finished"
                else "resume=True goes on with it"
            )
            raise RunError(
                f"{self.path} holds a {state} run of this configuration; {remedy}, overwrite=True removes "
                "it, or choose another out="
            )
        wanted = list(seeds or old["seeds"])
        together = [*old["seeds"], *(seed for seed in wanted if seed not in old["seeds"])]
        changed = manifest.differences(old["sessions"][-1]["circumstances"], circumstances)
        if self._finished(wanted):
            return wanted, []
        self._write_manifest(configuration, circumstances, command, together, old["sessions"])
        if changed:
            return wanted, [
                f"the run goes on under other circumstances ({'; '.join(changed[:4])}): figures may differ "
                "in their last bits"
            ]
        return wanted, []

    def finish(self) -> dict[str, Any]:
        """Figures over all seeds that are done, as `run --json` prints them."""
        _, done = read_run(self.path)
        mean, std = metrics.over_seeds(done)
        figures = {"mean": mean, "std": std, "seeds": done}
        write_json(self.path / METRICS, figures)
        return figures

    def log(self, line: str) -> None:
        with (self.path / LOG).open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Two processes must not write to one folder; the system drops the lock of a process that dies."""
        self._require_ours()
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / LOCK).open("a") as file:
            try:
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except ImportError:  # not on Windows
                pass
            except OSError as error:
                raise RunError(
                    f"another process is writing to {self.path}; wait for it, or choose another out="
                ) from error
            self._tidy()
            yield

    def _finished(self, seeds: Sequence[int]) -> bool:
        return all((self.path / f"seed-{seed}" / METRICS).is_file() for seed in seeds)

    def _require_ours(self) -> None:
        """Nothing is written to, or removed from, a folder that holds other things and no run."""
        if self.path.exists() and not self.path.is_dir():
            raise RunError(f"{self.path} is a file; choose a folder with out=")
        if not self.path.is_dir() or (self.path / MANIFEST).is_file():
            return
        begun = (LOCK, f".{MANIFEST}.")  # of a run that was killed before it had a manifest
        strangers = sorted(p.name for p in self.path.iterdir() if not p.name.startswith(begun))
        if strangers:
            raise RunError(
                f"{self.path} holds other things ({', '.join(strangers[:3])}) and no run; choose another out="
            )

    def _tidy(self) -> None:
        """What killed processes left of files that were being written or seeds that were being removed."""
        for name in (MANIFEST, METRICS):
            remove_leftovers(self.path, name)
        for path in self.path.glob(f"{REMOVED}seed-*"):
            shutil.rmtree(path)

    def _remove(self, old: dict[str, Any]) -> None:
        """What runs have written, and nothing else that a user may have put there.

        A seed vanishes at once, by a change of its name, so that a kill leaves no half of it.
        """
        for seed in old["seeds"]:
            path = self.path / f"seed-{seed}"
            if path.is_dir():
                path.rename(path.with_name(f"{REMOVED}{path.name}-{time.time_ns()}"))
        for name in (METRICS, LOG, MANIFEST):
            (self.path / name).unlink(missing_ok=True)
        self._tidy()

    def _write_manifest(
        self,
        configuration: dict[str, Any],
        circumstances: dict[str, Any],
        command: Sequence[str],
        seeds: Sequence[int],
        sessions: list[dict[str, Any]],
    ) -> None:
        session = {
            "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": list(command),
            "circumstances": circumstances,
        }
        write_json(
            self.path / MANIFEST,
            {
                "format": manifest.FORMAT,
                "configuration": configuration,
                "seeds": list(seeds),
                "sessions": [*sessions, session],
            },
        )


def read_run(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Configuration and the figures of every finished seed of a run folder."""
    folder = RunFolder(path)
    known = folder.manifest
    if known is None:
        raise RunError(f"{path} is not a run folder: it has no {MANIFEST}; give a folder that `run` wrote")
    files = [path / f"seed-{seed}" / METRICS for seed in known["seeds"]]
    done = [read_json(file) for file in files if file.is_file()]
    if not done:
        raise RunError(f"{path} has no finished seed; go on with the run by resume=True")
    return known["configuration"], done


def matrix_csv(matrix: metrics.Matrix) -> str:
    """One line per moment; what had not been learned by then is left empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["after_task", *(f"task_{j + 1}" for j in range(len(matrix)))])
    for i, row in enumerate(matrix):
        writer.writerow([i + 1, *row, *[""] * (len(matrix) - len(row))])
    return text.getvalue()


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read ({error}); the folder was altered by hand") from error


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, (json.dumps(value, indent=1) + "\n").encode())
