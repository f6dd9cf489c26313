"""The log of changes of a model file, and earlier versions of it, if the user keeps them.

Beside `shop.protosteer` lie `shop.protosteer.history`, one JSON object per line, and, if versions are kept, the folder
`shop.protosteer.versions`. A version is the file as it was before a change, byte by byte. `forget` removes classes from
versions too, and their names from the log.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protosteer.errors import ModelFileError, ProtosteerWarning
from protosteer.model import file as model_file
from protosteer.model.records import TaskRecord
from protosteer.model.schema import LOG_ENTRY, MAX_COUNT, check
from protosteer.util.files import (
    copy_synced,
    move_synced,
    open_regular,
    read_regular,
    real,
    sync_folder,
    write_atomically,
)

FORGOTTEN = "(forgotten)"  # in place of a name in the log
MAX_NAMES = 100  # classes named in an entry
MAX_VERSIONS = 1_000
MAX_LINE = 2**16  # bytes of the log that are read for its last line
_STATE = {"keep_versions": (0, MAX_VERSIONS), "last_version": (0, MAX_COUNT)}  # what the last line of the log says
_DAMAGED = (TypeError, ValueError, RecursionError)  # a line cut off by a crash, edited by hand, or forged


@dataclass(frozen=True)
class Entry:
    """One change of a model file.

    Attributes:
        date: When, ISO 8601 in UTC.
        command: What made it.
        added: Images that classes gained, for at most `MAX_NAMES` classes.
        removed: Images that classes lost.
        renamed: New names of classes by old names; of joined classes, one for several.
        classes: How many classes the model had afterwards.
        version: Name of the file that holds the model before the change, if one was kept.
    """

    date: str
    command: str
    added: dict[str, int]
    removed: dict[str, int]
    renamed: dict[str, str]
    classes: int
    version: str | None = None


def beside(model: Path) -> Path:
    """Return where the log of a model file is."""
    return real(model).with_name(f"{real(model).name}.history")


def versions_folder(model: Path) -> Path:
    """Return where versions of a model file are kept."""
    return real(model).with_name(f"{real(model).name}.versions")


def read(model: Path) -> tuple[list[Entry], int]:
    """Return the changes of a model file, the oldest first, and how many versions are kept."""
    entries, keep = [], 0
    try:
        lines = read_regular(beside(model)).decode(errors="replace").splitlines()
    except OSError:
        return [], 0
    for line in lines:
        try:
            values = json.loads(line)
            if isinstance(values, dict) and "keep_versions" in values:
                check(values["keep_versions"], (0, MAX_VERSIONS), "keep_versions")
                keep = values["keep_versions"]
            check(values, LOG_ENTRY, "the entry's")
            entries.append(_entry(values))
        except _DAMAGED:
            continue
    return entries, keep


def _last_state(model: Path) -> tuple[int, int]:
    """Return how many versions are kept, and the greatest number of a version so far.

    Both are in the last line of the log, so that the cost of a change does not grow with the log. A log without them, of
    an earlier release, is read from its start.
    """
    try:
        with open_regular(beside(model)) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_LINE))
            values = json.loads(file.read().splitlines()[-1])
        check(values, _STATE, "the line's")
        return values["keep_versions"], values["last_version"]
    except (OSError, LookupError, *_DAMAGED):
        entries, keep = read(model)
        return keep, max((_number(entry.version) for entry in entries if entry.version), default=0)


def _number(version: str) -> int:
    return int(version.partition(".")[0])


def _entry(values: Mapping[str, Any]) -> Entry:
    version = values.get("version")
    is_valid = isinstance(version, str) and re.fullmatch(r"\d{1,12}\.protosteer", version)
    return Entry(**{field: values[field] for field in LOG_ENTRY}, version=version if is_valid else None)


def keep_versions(model: Path, count: int) -> None:
    """Keep this many versions from now on; 0 removes all."""
    _append(model, {}, count)
    _prune(model, count)


def versions(model: Path) -> list[Path]:
    """Return the kept versions, the oldest first."""
    return sorted(versions_folder(model).glob("[0-9]*.protosteer"))


def keep_version(model: Path, at_least: int = 0) -> str | None:
    """Keep the current model file as a version, if versions are kept; return its name, or None."""
    num_kept, last_number = _last_state(model)
    keep = max(num_kept, at_least)
    if not keep or not model.exists():
        return None
    folder = versions_folder(model)
    folder.mkdir(exist_ok=True)
    number = 1 + max([last_number, *(_number(path.name) for path in versions(model))])  # never used before
    place = folder / f"{number:06}.protosteer"
    try:
        os.link(real(model), place)  # the model is replaced by a new file, so that the old one can be shared
    except OSError:
        copy_synced(real(model), place)
    sync_folder(folder)
    _prune(model, keep)
    return place.name


def drop_version(model: Path, version: str | None) -> None:
    """Remove a version that was kept for a change that failed."""
    if version is not None:
        with contextlib.suppress(OSError):
            (versions_folder(model) / version).unlink()
            _prune(model, MAX_VERSIONS)


def log(
    model: Path,
    command: str,
    before: Sequence[TaskRecord],
    after: Sequence[TaskRecord],
    renamed: Mapping[str, str] | None = None,
    version: str | None = None,
    hidden: set[str] | None = None,
) -> None:
    """Add a change to the log, without the names in `hidden`; a warning says if that fails, since the model is written."""
    names, unchanged = dict(renamed or {}), {*before} & {*after}
    old_tasks, new_tasks = ([task for task in tasks if task not in unchanged] for tasks in (before, after))
    losses, gains = _images(old_tasks, names), _images(new_tasks, {})
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    classes = len({name for task in after for name in task.classes.names})
    entry = Entry(now, command, _limit_names(gains - losses), _limit_names(losses - gains), names, classes, version)
    try:
        _append(model, _hide_names(entry, hidden or set()))
    except OSError as error:
        message = f"the change of {model} could not be logged in {beside(model).name} ({error.strerror})"
        warnings.warn(message, ProtosteerWarning, stacklevel=2)


def _images(tasks: Iterable[TaskRecord], renamed: Mapping[str, str]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for task in tasks:
        for name, images in zip(task.classes.names, task.classes.images.tolist(), strict=True):
            counts[renamed.get(name, name)] += int(images)
    return counts


def _limit_names(counts: Counter[str]) -> dict[str, int]:
    return dict(list(counts.items())[:MAX_NAMES])


def _append(model: Path, values: Mapping[str, Any], keep: int | None = None) -> None:
    """Add a line to the log, which has the access rights of the model; `keep` None: the number of versions stays."""
    num_kept, last_number = _last_state(model)
    state = {"keep_versions": num_kept if keep is None else keep}
    state["last_version"] = max(last_number, _number(values.get("version") or "0"))
    mode = real(model).stat().st_mode & 0o777 if model.exists() else 0o600
    handle = os.open(beside(model), os.O_WRONLY | os.O_APPEND | os.O_CREAT, mode)
    with open(handle, "w", encoding="utf-8") as file:
        file.write(json.dumps({**values, **state}) + "\n")


def _prune(model: Path, keep: int) -> None:
    for path in versions(model)[: -keep or None]:
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not empty, or not there
        versions_folder(model).rmdir()


def undo(model: Path) -> Path:
    """Replace the model file by the last kept version, byte by byte; the caller holds the lock of `transaction`.

    Raises:
        ModelFileError: No version is kept.
    """
    paths, logged = versions(model), {entry.version for entry in read(model)[0]}
    while paths and paths[-1].name not in logged and paths[-1].read_bytes() == real(model).read_bytes():
        paths.pop().unlink()  # its change was killed before it was made
    if not paths:
        message = (
            f"no earlier version of {model} is kept, so nothing can be undone; to keep some from now on: "
            "history with keep_versions=5"
        )
        raise ModelFileError(message, code="no-version", path=model)
    old_tasks, new_tasks = (model_file.read(path).memory.tasks if path.exists() else () for path in (model, paths[-1]))
    move_synced(paths[-1], real(model))
    _prune(model, max(read(model)[1], len(paths)))
    log(model, "undo", old_tasks, new_tasks)
    return paths[-1]


def forget_in_versions(model: Path, names: Iterable[str], classes: Iterable[str], task: str | None = None) -> int:
    """Remove forgotten classes from kept versions and their names from the log; return how many versions changed.

    Older names of a class count as well. A version that cannot be cleaned, or has nothing else, is removed.

    Args:
        model: The model file.
        names: The forgotten classes.
        classes: Classes that the model still has.
        task: If a whole task was forgotten, its name.
    """
    entries, keep = read(model)
    version_names, all_names, num_changed = set(names), set(names), 0
    orphans = {*versions(model)} - {versions_folder(model) / entry.version for entry in entries if entry.version}
    for orphan in orphans:  # the log does not say under which names it has the classes
        orphan.unlink()
    for entry in reversed(entries):
        sources = {source for source, target in entry.renamed.items() if target in version_names}
        version_names = sources | (version_names - {*entry.renamed.values()})
        all_names |= version_names
        place = versions_folder(model) / entry.version if entry.version else None
        if place is not None and place.exists():
            num_changed += _clean(place, version_names, task)
    hidden = all_names - {*classes}
    lines: list[Mapping[str, Any]] = [{"keep_versions": keep}, *(_hide_names(entry, hidden) for entry in entries)]
    if entries:
        write_atomically(beside(model), "".join(json.dumps(line) + "\n" for line in lines).encode())
    _prune(model, MAX_VERSIONS)
    return num_changed


def _clean(place: Path, names: set[str], task: str | None) -> bool:
    """Remove classes, or a task, from a version; return whether it had any of them."""
    try:
        version = model_file.read(place)
    except ModelFileError:
        place.unlink()
        return True
    memory = version.memory
    owners = [t for t in memory.tasks if names & {*t.class_names} and (task is None or t.name == task)]
    if not owners:
        # If the task had another name then, its classes cannot be told from those of other tasks.
        doubtful = task is not None and bool(names & {*memory.classes}) and task not in memory.task_names
        if doubtful:
            place.unlink()
        return doubtful
    for owner in owners:
        memory.remove(owner, names & {*owner.class_names})
    if len(memory):
        version.write(place)
    else:
        place.unlink()
    return True


def _hide_names(entry: Entry, names: set[str]) -> Mapping[str, Any]:
    def counts(images_by_class: Mapping[str, int]) -> dict[str, int]:
        counts_shown = {name: count for name, count in images_by_class.items() if name not in names}
        lost = sum(count for name, count in images_by_class.items() if name in names)
        return counts_shown | ({FORGOTTEN: lost} if lost else {})

    def hide(name: str) -> str:
        return FORGOTTEN if name in names else name

    renamed = {hide(old_name): hide(new_name) for old_name, new_name in entry.renamed.items()}
    return {**vars(entry), "added": counts(entry.added), "removed": counts(entry.removed), "renamed": renamed}
