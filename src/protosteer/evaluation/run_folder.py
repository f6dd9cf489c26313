"""A run folder, as docs/runs.md shows it, written so that the process may be killed at any moment.

What an interrupted run needs to go on is in `seed-0/unfinished/`, which is gone when the seed is done. Every
file is written whole or not at all, in an order that leaves nothing out: first the model of a task, then the
embeddings that its evaluation made, then its row of the matrix.
"""

from __future__ import annotations

import contextlib
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
from protosteer.runtime.checkpoint import SECONDS, CheckpointFile
from protosteer.util.files import remove_leftovers, write_atomically
from protosteer.util.text import listed

MANIFEST, METRICS, LOG, LOCK = "manifest.json", "metrics.json", "log.txt", ".protosteer.lock"


class SeedFolder:
    """The part of a run folder that belongs to one seed: what `protocol.run_stream` goes on from."""

    def __init__(self, path: Path, suffix: str, bookmark_seconds: float = SECONDS):
        self.path = path
        self.suffix = suffix
        self.bookmark_seconds = bookmark_seconds
        self.unfinished = path / "unfinished"

    def rows(self) -> list[dict[str, Any]]:
        path = self.unfinished / "rows.json"
        rows = read_json(path) if path.is_file() else []
        return rows if self._model(len(rows) - 1).is_file() else []

    def save_rows(self, rows: list[dict[str, Any]]) -> None:
        write_json(self.unfinished / "rows.json", rows)

    def learned(self, task: int) -> tuple[bytes, float] | None:
        """The state after a task, and the seconds that learning it took."""
        if not self._model(task).is_file():
            return None
        return self._model(task).read_bytes(), float(read_json(self._kept("seconds", task)))

    def save_learned(self, task: int, state: bytes, seconds: float) -> None:
        write_json(self._kept("seconds", task), seconds)
        write_atomically(self._model(task), state)
        self.checkpoint(task).clear()

    def embeddings(self) -> list[Mapping[str, Tensor]]:
        """Those behind the rows that there are; an evaluation that was cut off is made, and counted, anew."""
        return [load_file(self._kept("embeddings", task)) for task in range(len(self.rows()))]

    def save_embeddings(self, task: int, embeddings: Mapping[str, Tensor]) -> None:
        whole = {name: tensor.contiguous() for name, tensor in embeddings.items()}
        write_atomically(self._kept("embeddings", task), save(whole))

    def checkpoint(self, task: int) -> CheckpointFile:
        return CheckpointFile(self._kept("training", task), self.bookmark_seconds)

    def finish(self, figures: dict[str, Any]) -> None:
        matrix = figures["matrix"]  # in a line, what had not been learned by then is left empty
        lines: list[list[Any]] = [["after_task", *(f"task_{j + 1}" for j in range(len(matrix)))]]
        lines += [[i + 1, *row, *[""] * (len(matrix) - len(row))] for i, row in enumerate(matrix)]
        text = "".join(",".join(map(str, line)) + "\n" for line in lines)
        write_atomically(self.path / "matrix.csv", text.encode())
        write_json(self.path / METRICS, figures)

    def clean(self) -> None:
        """A seed that is done needs nothing to go on from."""
        shutil.rmtree(self.unfinished, ignore_errors=True)
        remove_leftovers(self.path)

    def _model(self, task: int) -> Path:
        return self.path / f"task-{task + 1:02}{self.suffix}"

    def _kept(self, kind: str, task: int) -> Path:
        suffix = "json" if kind == "seconds" else "safetensors"
        return self.unfinished / f"{kind}-{task + 1:03}.{suffix}"


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
        whole = isinstance(known, dict) and known.keys() >= {"configuration", "seeds", "sessions"}
        if not whole or known.get("format") != manifest.FORMAT or not known["sessions"]:
            raise RunError(
                f"{file} is not of run format {manifest.FORMAT}, the one that this version knows, or was altered by "
                "hand; choose another folder"
            )
        return {**known, "configuration": manifest.in_todays_terms(known["configuration"])}

    def seed(self, seed: int) -> Path:
        return self.path / f"seed-{seed}"

    def finished(self, *seeds: int) -> bool:
        return all((self.seed(seed) / METRICS).is_file() for seed in seeds)

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
        old, said = self.manifest, []
        if old and overwrite:
            self._remove(old["seeds"])
            old, said = None, [f"the run that {self.path} held has been removed"]
        elif resume and not old:
            said = [f"{self.path} holds no run to go on with; a new one begins"]
        known: list[int] = old["seeds"] if old else []
        wanted = list(seeds or known or [0])
        if old:
            self._check_same(old, configuration, resume)
            if self.finished(*wanted):
                return wanted, []
            earlier = {"processes": 1, **old["sessions"][-1]["circumstances"]}  # as older versions had it
            changed = manifest.differences(earlier, circumstances)
            if changed:
                said = [
                    f"the run goes on under other circumstances ({listed(changed, 4)}): figures may differ "
                    "in their last bits"
                ]
        session = {
            "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": list(command),
            "circumstances": circumstances,
        }
        whole = {
            "format": manifest.FORMAT,
            "configuration": configuration,
            "seeds": [*known, *(seed for seed in wanted if seed not in known)],
            "sessions": [*(old["sessions"] if old else []), session],
        }
        write_json(self.path / MANIFEST, whole)
        return wanted, said

    def check(self, configuration: dict[str, Any], resume: bool, overwrite: bool) -> None:
        """Refuse what `open` would refuse; nothing is written."""
        self._require_ours()
        old = self.manifest
        if old and not overwrite:
            self._check_same(old, configuration, resume)

    def _check_same(self, old: dict[str, Any], configuration: dict[str, Any], resume: bool) -> None:
        changed = manifest.differences(old["configuration"], configuration)
        if changed:
            raise RunError(
                f"{self.path} holds a run of another configuration ({listed(changed, 6)}); choose another "
                "out=, or overwrite=True to remove it"
            )
        if not resume:
            done = self.finished(*old["seeds"])
            remedy = "resume=True adds seeds that are missing" if done else "resume=True goes on with it"
            raise RunError(
                f"{self.path} holds {'a finished' if done else 'an unfinished'} run of this configuration; {remedy}, "
                "overwrite=True removes it, or choose another out="
            )

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
            for name in (MANIFEST, METRICS):  # that a killed process was writing
                remove_leftovers(self.path, name)
            yield

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

    def _remove(self, seeds: Sequence[int]) -> None:
        """What runs have written, and nothing else that a user may have put there.

        The manifest goes last, and a seed's figures first: what a kill leaves is not taken for a finished
        run.
        """
        for seed in seeds:
            (self.seed(seed) / METRICS).unlink(missing_ok=True)
            shutil.rmtree(self.seed(seed), ignore_errors=True)
        for name in (METRICS, LOG, MANIFEST):
            (self.path / name).unlink(missing_ok=True)


def read_run(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Configuration and the figures of every finished seed of a run folder."""
    folder = RunFolder(path)
    known = folder.manifest
    if known is None:
        raise RunError(f"{path} is not a run folder: it has no {MANIFEST}; give a folder that `run` wrote")
    done = [read_json(folder.seed(s) / METRICS) for s in known["seeds"] if folder.finished(s)]
    if not done:
        raise RunError(f"{path} has no finished seed; go on with the run by resume=True")
    return known["configuration"], done


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read ({error}); the folder was altered by hand") from error


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, (json.dumps(value, indent=1) + "\n").encode())
