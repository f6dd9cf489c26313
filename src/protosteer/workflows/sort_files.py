"""Sort image files into class folders by their predictions, tag them with XMP side files, and undo both.

Every step is logged before it is made, in `.protosteer-sort.jsonl` of the folder that files go to. So a second run skips
what is sorted already, and `undo_sort` removes copies, links and side files, and moves files back.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from protosteer.data.image_files import is_image
from protosteer.errors import DataError, SettingsError
from protosteer.learner import Learner
from protosteer.model.schema import SORT_STEP, check
from protosteer.util.files import copy_synced, move_synced, read_regular
from protosteer.workflows.ood import is_calibrated
from protosteer.workflows.prediction_table import Predictions, Row

UNKNOWN, UNSURE = "_unknown", "_unsure"  # folders of images that get no class
MODES = ("copy", "move", "link")
LOG = ".protosteer-sort.jsonl"
_CHUNK = 256  # files that are predicted before they are sorted
_XMP = """<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?>
<x:xmpmeta xmlns:x="adobe:ns:meta/">
 <rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">
  <rdf:Description rdf:about="" xmlns:dc="http://purl.org/dc/elements/1.1/"
    xmlns:digiKam="http://www.digikam.org/ns/1.0/" xmlns:lr="http://ns.adobe.com/lightroom/1.0/">
   <dc:subject><rdf:Bag><rdf:li>{name}</rdf:li></rdf:Bag></dc:subject>
   <digiKam:TagsList><rdf:Seq><rdf:li>{name}</rdf:li></rdf:Seq></digiKam:TagsList>
   <lr:hierarchicalSubject><rdf:Bag><rdf:li>{name}</rdf:li></rdf:Bag></lr:hierarchicalSubject>
  </rdf:Description>
 </rdf:RDF>
</x:xmpmeta>
<?xpacket end="w"?>
"""


@dataclass(frozen=True)
class SortOptions:
    """How files are sorted.

    Attributes:
        out: The folder for class folders; None: files stay where they are, and only get side files.
        mode: "copy", "move" or "link" (symbolic links).
        at_least: Probability below which an image goes to `_unsure`.
        reject: Share of known images that may go to `_unknown`; None: none.
        xmp: Write an XMP side file with the class as tag, for images that get one.
    """

    out: Path | None
    mode: str = "copy"
    at_least: float = 0.0
    reject: float | None = 0.05
    xmp: bool = False

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            message = f"mode = {self.mode!r}: choose one of {', '.join(MODES)}"
            raise SettingsError(message, code="unknown-mode", name=self.mode)
        if not 0.0 <= self.at_least <= 1.0:
            message = f"at_least = {self.at_least}: give a probability from 0 to 1, such as 0.9"
            raise SettingsError(message, code="bad-probability", value=self.at_least)
        if self.out is None and not self.xmp:
            raise SettingsError(
                "there is nothing to do: name a folder for the files, or ask for XMP side files", code="nothing-to-do"
            )


@dataclass
class SortCounts:
    """What was done: images by folder, side files, files sorted before, and what is wrong with unreadable ones."""

    folders: Counter[str] = field(default_factory=Counter)
    side_files: int = 0
    other_side_files: int = 0  # of other programs, which stay as they are
    sorted_before: int = 0
    errors: dict[str, str] = field(default_factory=dict)


class Sorter:
    """Sorts files of one folder; `counts` are the results so far."""

    def __init__(self, learner: Learner, source: Path, options: SortOptions):
        """Prepare sorting.

        Raises:
            DataError: The folder for class folders is the source itself.
        """
        if options.out is not None and options.out.resolve() == source.resolve():
            message = f"{source} cannot be sorted into itself; name another folder"
            raise DataError(message, code="sort-into-itself", path=source)
        self.options, self.source, self.counts = options, source, SortCounts()
        reject = options.reject if is_calibrated(learner) else None
        self._predictions = Predictions(learner, 1, reject)
        self._root = options.out or (source if source.is_dir() else source.parent)
        self._done = {(step["from"], *step["version"]) for step in self._finished_steps(read_log(self._root))}

    def sort(self, paths: Iterable[Path], on_file: Callable[[int], None] = lambda count: None) -> None:
        """Sort image files; those below the folder for class folders, and those sorted before, are skipped.

        Args:
            paths: The files.
            on_file: Is given how many files are done.
        """
        out, queue = self.options.out, []
        for path in paths:
            if out is None or not path.resolve().is_relative_to(out.resolve()):
                with contextlib.suppress(OSError):  # gone meanwhile
                    is_new = (str(path.resolve()), *_version(path)) not in self._done
                    queue += [path] if is_new else []
                    self.counts.sorted_before += not is_new
        count = 0
        for start in range(0, len(queue), _CHUNK):
            for row in self._predictions.rows([str(path) for path in queue[start : start + _CHUNK]]):
                self._sort_one(Path(row["path"]), row)
                on_file(count := count + 1)

    def _finished_steps(self, steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the steps that were made: a process may have been killed after it logged the last one."""
        out = self.options.out
        if out is not None and steps and not os.path.lexists(out / (steps[-1].get("to") or "")):
            return steps[:-1]
        return steps

    def _sort_one(self, path: Path, row: Row) -> None:
        if "error" in row:
            self.counts.errors[row["path"]] = row["error"]
            return
        unsure = row["probability"] < self.options.at_least
        folder = UNKNOWN if row["unknown"] else UNSURE if unsure else folder_name(row["label"])
        tagged = self.options.xmp and folder not in (UNKNOWN, UNSURE)
        step: dict[str, Any] = {"from": str(path.resolve()), "version": _version(path), "label": row["label"]}
        step |= {"probability": row["probability"], "folder": folder, "mode": self.options.mode}
        target = path
        if self.options.out is not None:
            target = _free(self.options.out / folder / path.name)
            step["to"] = str(target.relative_to(self.options.out))
        side = target.with_name(f"{target.name}.xmp")
        if tagged and side.exists():
            self.counts.other_side_files += 1
            tagged = False
        if tagged:
            step["xmp"] = str(side.relative_to(self._root))
        _log(self._root, step)
        if self.options.out is not None:
            _place_file(path, target, self.options.mode)
        if tagged:
            side.write_text(_XMP.format(name=escape(row["label"])), encoding="utf-8")
            self.counts.side_files += 1
        self._done.add((step["from"], *step["version"]))
        self.counts.folders[folder] += 1


def folder_name(label: str) -> str:
    """Return a folder name for a class, valid on any system, without separators and unlike `_unknown` and `_unsure`."""
    name = "".join("_" if c in '<>:"/\\|?*' or not c.isprintable() else c for c in label).strip(" ")
    name = name.rstrip(".") or "_"
    name = f"_{name[1:]}" if name.startswith(".") else name
    return f"{name}_" if name in (UNKNOWN, UNSURE) else name


def _version(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def _free(path: Path) -> Path:
    """Return the path, or one with a number if it is taken; nothing is overwritten."""
    number, free = 2, path
    while os.path.lexists(free):
        free, number = path.with_name(f"{path.stem} ({number}){path.suffix}"), number + 1
    return free


def _place_file(path: Path, target: Path, mode: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if mode == "link":
        target.symlink_to(path.resolve())
    elif mode == "move":
        move_synced(path, target)
    else:
        copy_synced(path, target)


def _log(root: Path, step: dict[str, Any]) -> None:
    root.mkdir(parents=True, exist_ok=True)
    with open(root / LOG, "a", encoding="utf-8") as file:
        file.write(json.dumps(step) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_log(root: Path) -> list[dict[str, Any]]:
    """Return the steps that were made in a folder, the oldest first."""
    try:
        lines = read_regular(root / LOG).decode(errors="replace").splitlines()
    except OSError:
        return []
    steps = []
    for line in lines:
        with contextlib.suppress(TypeError, ValueError, RecursionError):  # cut off by a crash, or forged
            step = json.loads(line)
            check(step, SORT_STEP, "the step's")
            steps.append(step)
    return steps


def undo_sort(root: Path) -> tuple[int, list[str]]:
    """Take back all that was sorted into a folder: remove copies, links and side files, move files back.

    A copy that was changed since stays; so does a moved file whose old place is taken.

    Returns:
        How many files were taken back, and those that stay.

    Raises:
        DataError: Nothing was sorted there.
    """
    steps = read_log(root)
    if not steps:
        raise DataError(f"nothing was sorted into {root}; there is nothing to undo", code="not-sorted", path=root)
    stay, taken_back = [], 0
    for step in reversed(steps):
        try:
            taken_back += _undo_step(root, step)
        except (OSError, ValueError):  # the latter of names with a null byte
            stay.append(str(root / (step.get("to") or "")))
    (root / LOG).unlink()
    return taken_back, stay


def _undo_step(root: Path, step: dict[str, Any]) -> bool:
    """Undo one step; return whether there was anything to undo. An `OSError` says that a file has to stay."""
    target, side = _path_inside(root, step.get("to")), _path_inside(root, step.get("xmp"))
    if side is not None:
        side.unlink(missing_ok=True)
    if target is None or not os.path.lexists(target):
        return target is None
    if not _take_back(target, Path(step["from"]), step):
        raise FileExistsError(f"{target} was changed, or its place is taken")
    with contextlib.suppress(OSError):  # other files are in it
        target.parent.rmdir()
    return True


def _path_inside(root: Path, name: str | None) -> Path | None:
    """Return the path of a logged file; None if it is not below the folder, since the log may be forged."""
    if name is None or not (root / name).parent.resolve().is_relative_to(root.resolve()):
        return None
    return root / name


def _take_back(target: Path, source: Path, step: dict[str, Any]) -> bool:
    if step["mode"] == "move":
        if not source.is_absolute() or os.path.lexists(source):  # what we log is absolute
            return False
        source.parent.mkdir(parents=True, exist_ok=True)
        move_synced(target, source)
        return True
    if not target.is_symlink() and _version(target) != step["version"]:
        return False
    target.unlink()
    return True


def watch(source: Path, stop: Any = None) -> Iterator[list[Path]]:
    """Yield image files of a folder as they appear or change, some at a time, until Ctrl-C.

    Raises:
        DataError: The extra `watch` is not installed.
    """
    try:
        from watchfiles import Change
        from watchfiles import watch as changes
    except ImportError as error:
        message = "to watch a folder: pip install 'protosteer[watch]'"
        raise DataError(message, code="missing-extra", name="watch") from error
    for batch in changes(source, stop_event=stop, raise_interrupt=True):
        paths: Sequence[Path] = sorted({Path(name) for change, name in batch if change != Change.deleted})
        if images := [path for path in paths if is_image(path)]:
            yield images
