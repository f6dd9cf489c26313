"""Run folders (docs/how-to/benchmarks.md): a configuration and its seeds, each in a `SeedFolder`."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from protosteer.errors import RunError
from protosteer.evaluation import manifest, metrics
from protosteer.evaluation.seed_folder import (
    LOSSES,
    MAX_ITEMS,
    METRICS,
    NUMBER,
    PERCENTAGES,
    RELIABILITY,
    read_json,
    reading,
    require_triangle,
    table,
    write_json,
)
from protosteer.model.schema import check
from protosteer.util.files import read_regular, remove_leftovers
from protosteer.util.text import listed, printable

MANIFEST, LOG, LOCK = "manifest.json", "log.txt", ".protosteer.lock"

_SEED = (0, 2**63)
_NAMES = [4096, 1, MAX_ITEMS]
# A folder may be another's: names of folders and files are made of what it says. See `model.schema.check`.
_MANIFEST = {
    "format": (manifest.FORMAT, manifest.FORMAT),
    "seeds": [_SEED, 0, MAX_ITEMS],
    "sessions": [{"circumstances": table}, 1, MAX_ITEMS],
    "configuration": {
        "method": 200,
        "settings": table,
        "stream": {
            "name": 4096,
            "options?": table,
            "class_order": _NAMES,
            "tasks": [{"classes": _NAMES}, 1, MAX_ITEMS],
        },
        "backbone": {
            "name": 200,
            "fingerprint": 128,
            "image_size": (1, 2**20),
            "preprocessing": {"crop": (0.0, 1.0)},
        },
    },
}
_MOMENT = {
    **dict.fromkeys(("passes_per_image?", "bytes?", "train_seconds?", "eval_seconds?"), NUMBER),
    "losses?": LOSSES,
}
_FIGURES = {
    "seed": _SEED,
    "matrix": [PERCENTAGES, 1, MAX_ITEMS],
    **dict.fromkeys(("last_accuracy", "last_forgetting"), NUMBER),
    "after_each_task?": [_MOMENT, 0, MAX_ITEMS],
    "diagnosis?": {"mean?": table},
    "reliability?": RELIABILITY,
}


class RunFolder:
    """The folder of one experiment: a configuration and its seeds."""

    def __init__(self, path: Path):
        self.path = path

    @property
    def manifest(self) -> dict[str, Any] | None:
        """The manifest; None if this is no run folder."""
        file = self.path / MANIFEST
        if not file.is_file():
            return None
        known = read_json(file)
        try:
            check(known, _MANIFEST, "its")
        except TypeError as error:
            message = f"{file} is not of run format {manifest.FORMAT}, or was altered ({error}); choose another folder"
            raise RunError(message, code="bad-manifest", path=file) from error
        return {**known, "configuration": manifest.upgraded(known["configuration"])}

    def seed(self, seed: int) -> Path:
        """Return the folder of a seed."""
        return self.path / f"seed-{seed}"

    def finished(self, *seeds: int) -> bool:
        """Return whether these seeds are finished."""
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
        """Prepare the folder for a run.

        Args:
            configuration: What determines the results.
            circumstances: What may change their last bits.
            command: The command line.
            seeds: The seeds; None: those of the folder, or seed 0.
            resume: Continue the run in the folder.
            overwrite: Remove the run in the folder.

        Returns:
            The seeds to run, and messages for the user.

        Raises:
            RunError: The folder holds another run (code "other-configuration" or "run-exists").
        """
        old, messages = self.manifest, []
        if old and overwrite:
            self._remove(old["seeds"])
            old, messages = None, [f"removed the previous run in {self.path}"]
        elif resume and not old:
            messages = [f"{self.path} holds no run to resume; starting a new one"]
        known: list[int] = old["seeds"] if old else []
        wanted = list(seeds or known or [0])
        if old:
            self._check_same(old, configuration, resume)
            if self.finished(*wanted):
                return wanted, []
            added = {"processes": 1, "commit": circumstances["commit"]}  # which older versions did not record
            earlier = {**added, **old["sessions"][-1]["circumstances"]}
            changed = manifest.differences(earlier, circumstances)
            if changed:
                messages = [
                    f"resuming under other circumstances ({listed(changed, 4)}): results may differ, if only in their last bits"
                ]
        session = {
            "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": list(command),
            "circumstances": circumstances,
        }
        contents = {
            "format": manifest.FORMAT,
            "configuration": configuration,
            "seeds": [*known, *(seed for seed in wanted if seed not in known)],
            "sessions": [*(old["sessions"] if old else []), session],
        }
        write_json(self.path / MANIFEST, contents)
        return wanted, messages

    def check(self, configuration: dict[str, Any], resume: bool, overwrite: bool) -> None:
        """Raise what `open` would raise; nothing is written."""
        self._require_ours()
        old = self.manifest
        if old and not overwrite:
            self._check_same(old, configuration, resume)

    def _check_same(self, old: dict[str, Any], configuration: dict[str, Any], resume: bool) -> None:
        changed = manifest.differences(old["configuration"], configuration)
        if changed:
            message = (
                f"{self.path} holds a run of another configuration ({listed(changed, 6)}); choose another "
                "out=, or overwrite=True to remove it"
            )
            raise RunError(message, code="other-configuration", path=self.path, changed=changed)
        if not resume:
            done = self.finished(*old["seeds"])
            remedy = "resume=True adds missing seeds" if done else "resume=True continues it"
            message = (
                f"{self.path} holds {'a finished' if done else 'an unfinished'} run of this configuration; {remedy}, "
                "overwrite=True removes it, or choose another out="
            )
            raise RunError(message, code="run-exists", path=self.path, finished=done)

    def finish(self) -> dict[str, Any]:
        """Write and return the metrics over all finished seeds, as `run --json` prints them."""
        _, done = read_run(self.path)
        mean, std = metrics.over_seeds(done)
        figures = {"mean": mean, "std": std, "seeds": done}
        write_json(self.path / METRICS, figures)
        return figures

    def log(self, line: str) -> None:
        """Append a line to the log."""
        with (self.path / LOG).open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder against other processes; the lock of a process that dies is released."""
        self._require_ours()
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / LOCK).open("a") as file:
            try:
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except ImportError:  # not on Windows
                pass
            except OSError as error:
                message = f"another process is writing to {self.path}; wait for it, or choose another out="
                raise RunError(message, code="run-in-use", path=self.path) from error
            for name in (MANIFEST, METRICS):  # that a killed process was writing
                remove_leftovers(self.path, name)
            yield

    def _require_ours(self) -> None:
        """Raise if the folder holds other files and no run."""
        if self.path.exists() and not self.path.is_dir():
            raise RunError(f"{self.path} is a file; choose a folder with out=", code="not-a-folder", path=self.path)
        if not self.path.is_dir() or (self.path / MANIFEST).is_file():
            return
        ours = (LOCK, f".{MANIFEST}.")  # of a run that was killed before it had a manifest
        others = sorted(p.name for p in self.path.iterdir() if not p.name.startswith(ours))
        if others:
            message = f"{self.path} holds other files ({', '.join(others[:3])}) and no run; choose another out="
            raise RunError(message, code="foreign-files", path=self.path, files=others)

    def _remove(self, seeds: Sequence[int]) -> None:
        """Remove what runs have written, but no file of the user's.

        A seed's metrics are removed first and the manifest last, so a kill in between leaves no finished run.
        """
        for seed in seeds:
            (self.seed(seed) / METRICS).unlink(missing_ok=True)
            shutil.rmtree(self.seed(seed), ignore_errors=True)
        for name in (METRICS, LOG, MANIFEST):
            (self.path / name).unlink(missing_ok=True)


def read_run(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read the configuration, and the metrics of every finished seed, of a run folder.

    Raises:
        RunError: It is no run folder (code "not-a-run"), or has no finished seed (code "no-finished-seed").
    """
    folder = RunFolder(path)
    known = folder.manifest
    if known is None:
        message = f"{path} is not a run folder: it has no {MANIFEST}; pass a folder that `run` wrote"
        raise RunError(message, code="not-a-run", path=path)
    done = [_read_figures(folder.seed(s) / METRICS) for s in known["seeds"] if folder.finished(s)]
    if not done:
        message = f"{path} has no finished seed; continue the run with resume=True"
        raise RunError(message, code="no-finished-seed", path=path)
    return known["configuration"], done


def _read_figures(path: Path) -> dict[str, Any]:
    """Read the metrics of a seed: numbers, or null, and what else is known by name."""
    with reading(path):
        figures = json.loads(read_regular(path))
        check(figures, _FIGURES, "its")
        causes = (figures.get("diagnosis") or {}).get("mean") or {}
        for name, value in [*figures.items(), *causes.items()]:
            if type(value) in (int, float):
                check(value, NUMBER, f"its {printable(name)}")
        require_triangle(figures["matrix"])
        return dict(figures)
