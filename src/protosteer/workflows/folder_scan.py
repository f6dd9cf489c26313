"""Scan a folder of class folders, a list or a saved image set: what is new, known, copied or unreadable."""

from __future__ import annotations

import dataclasses
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protosteer.data import decode_cache
from protosteer.data.class_folders import Files
from protosteer.data.decode_cache import DecodedCache
from protosteer.data.hf_arrow import is_set
from protosteer.data.image_files import SKIP_REASONS, image_bytes, in_threads, opened, skipped_files
from protosteer.data.image_lists import is_list
from protosteer.data.images import FileImages, ImageSet
from protosteer.data.sources import read_labelled
from protosteer.data.transforms import Preprocessing
from protosteer.errors import DataError, LearnerError
from protosteer.model.memory import Memory
from protosteer.model.records import TaskRecord
from protosteer.util.files import digest
from protosteer.util.text import check_name
from protosteer.workflows.duplicates import find_duplicates, thumbnails
from protosteer.workflows.known_files import KnownFiles

_COMPARED = Preprocessing(64, (0.5,) * 3, (0.5,) * 3)  # what images are compared by before a backbone is chosen


@dataclass(frozen=True)
class FolderScan:
    """What a folder of class folders, a list or a saved image set holds, before anything is learned.

    Attributes:
        folder: The folder or list.
        files: Readable files that are new, class by class.
        digests: Digests of the contents of all readable files.
        unreadable: Files that do not decode.
        reasons: Why each of them does not.
        other_files: Files that are no images, by what they are.
        copies: Files that show the same picture as another one; they are not learned.
        originals: The file that each of them copies.
        known: Classes that the model has already, and their tasks.
        already_learned: Files that their class was learned from, or evaluated with, before.
        learned_as_other_class: Files that another class was learned from, with its name; they are learned too.
        preprocessing: What `canvases` were decoded for.
        canvases: Decoded images, as far as they fit into the decode cache.
    """

    folder: Path
    files: Files
    digests: dict[Path, int]
    unreadable: Files
    reasons: dict[Path, str]
    other_files: dict[str, list[Path]]
    copies: Files
    originals: Files
    known: dict[str, list[str]]
    already_learned: list[Path]
    learned_as_other_class: dict[Path, str]
    preprocessing: Preprocessing | None = None
    canvases: dict[Path, Tensor] = field(default_factory=dict, compare=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without decoded images, for another process."""
        return {**vars(self), "canvases": {}}

    @property
    def counts(self) -> dict[str, int]:
        """Readable new images of each class."""
        return dict(Counter(self.files.labels))

    @property
    def skipped(self) -> dict[str, list[Path]]:
        """Files that are not learned since they are no readable images, by reason."""
        paths: dict[str, list[Path]] = {}
        for path in self.unreadable.paths:
            paths.setdefault(self.reasons[path], []).append(path)
        return paths | self.other_files

    @property
    def files_and_copies(self) -> Files:
        """New files and copies of them: a later scan must not take a copy for a new image."""
        files, copies = self.files, self.copies
        return Files([*files.paths, *copies.paths], [*files.labels, *copies.labels])

    def images(self, files: Files, preprocessing: Preprocessing) -> ImageSet:
        """Return some of the files as images; images that the scan has decoded are not decoded again."""
        images = DecodedCache(FileImages(files.paths, preprocessing))
        if preprocessing == self.preprocessing:
            rows = enumerate(files.paths)
            images.store({row: self.canvases[path] for row, path in rows if path in self.canvases})
        return images

    def without_known(self) -> FolderScan:
        """Return the scan without classes that the model knows already."""

        def rows(files: Files) -> list[int]:
            return [i for i, label in enumerate(files.labels) if label not in self.known]

        files, copies = self.files.rows(rows(self.files)), rows(self.copies)
        other_classes = self.learned_as_other_class
        return dataclasses.replace(
            self,
            files=files,
            unreadable=self.unreadable.rows(rows(self.unreadable)),
            copies=self.copies.rows(copies),
            originals=self.originals.rows(copies),
            known={},
            already_learned=[],
            learned_as_other_class={path: other_classes[path] for path in files.paths if path in other_classes},
        )

    def check_new(self) -> None:
        """Raise a LearnerError if there is nothing to learn."""
        if not len(self.files):
            message = f"every image of {self.folder} was learned or held out already; there is nothing to learn"
            raise LearnerError(message, code="no-new-images", path=self.folder)


def scan_folder(
    folder: str | Path,
    memory: Memory | None = None,
    on_file: Callable[[int, int], None] = lambda done, of: None,
    files: Files | None = None,
    name: str | None = None,
    preprocessing: Preprocessing | None = None,
) -> FolderScan:
    """Read every image of a folder of class folders, a list or a saved image set once.

    Args:
        folder: The folder, list or saved set.
        memory: What the model knows. Classes of an unfinished task that learning would resume are not known.
        on_file: Is given how many files are done, and of how many.
        files: What `read_labelled` returned for the folder, if it was called already.
        name: Of the task to be, if it is not the folder's.
        preprocessing: The backbone's, if it is known: then files are decoded for learning already.

    Returns:
        What the folder holds: images by class, files that are skipped and why, copies.

    Raises:
        DataError: A class has no readable image, or a name cannot be used.
    """
    folder = Path(folder)
    files = files or read_labelled(folder)
    for label in dict.fromkeys(files.labels):
        check_name(label, f"a class of {folder},")
    if name is not None:
        check_name(name, "the task")
    contents = _ReadFiles.of(files, preprocessing, on_file)
    readable, unreadable = (
        files.rows(i for i, path in enumerate(files.paths) if path in mapping)
        for mapping in (contents.digests, contents.reasons)
    )
    _reject_unreadable_class(folder, readable.labels, unreadable, contents.reasons)
    unfinished = unfinished_task(memory, folder, files.labels, name) if memory else None
    base = Memory(task for task in memory.tasks if task is not unfinished) if memory else Memory()
    known_files = KnownFiles.find(base.tasks, readable, contents.digests)
    rows = sorted({*range(len(readable))} - {*known_files.same_class})
    new_files = readable.rows(rows)
    copies = _copies(new_files, contents)
    originals = [i for i in range(len(new_files)) if i not in copies]
    owners = base.owners
    return FolderScan(
        folder=folder,
        files=new_files.rows(originals),
        digests=contents.digests,
        unreadable=unreadable,
        reasons=contents.reasons,
        other_files=skipped_files(folder) if folder.is_dir() and not is_set(folder) else {},
        copies=new_files.rows(copies),
        originals=new_files.rows(copies.values()),
        known={label: owners[label] for label in dict.fromkeys(files.labels) if label in owners},
        already_learned=[readable.paths[i] for i in known_files.same_class],
        learned_as_other_class={
            new_files.paths[i]: known_files.other_class[rows[i]]
            for i in originals
            if rows[i] in known_files.other_class
        },
        preprocessing=preprocessing,
        canvases=contents.canvases,
    )


def _reject_unreadable_class(
    folder: Path, classes: Sequence[str], unreadable: Files, reasons: Mapping[Path, str]
) -> None:
    """Raise if a class is not among the `classes` of readable images."""
    class_names = set(unreadable.labels) - set(classes)
    if class_names:
        name = min(class_names)
        reason = reasons[unreadable.paths[unreadable.labels.index(name)]]
        message = f"class '{name}' of {folder} has no image that can be read ({reason}); replace its files or remove it"
        raise DataError(message, code="unreadable-class", name=name)


@dataclass
class _ReadFiles:
    """Results of one pass over all files.

    Attributes:
        digests: Digests of the contents of readable files.
        thumbnails: Their thumbnails.
        canvases: Decoded images, as far as they fit into the decode cache.
        reasons: Why the other files cannot be read.
    """

    digests: dict[Path, int] = field(default_factory=dict)
    thumbnails: dict[Path, Tensor] = field(default_factory=dict)
    canvases: dict[Path, Tensor] = field(default_factory=dict)
    reasons: dict[Path, str] = field(default_factory=dict)

    @classmethod
    def of(cls, files: Files, preprocessing: Preprocessing | None, on_file: Callable[[int, int], None]) -> _ReadFiles:
        """Read every file once; with a backbone's preprocessing, decode it for learning already."""
        contents, canvas_bytes = cls(), 0
        results = in_threads(lambda path: _read(path, preprocessing or _COMPARED), files.paths)
        for count, (path, result) in enumerate(zip(files.paths, results, strict=True), 1):
            if isinstance(result, str):
                contents.reasons[path] = result
            else:
                contents.digests[path], canvas = result
                contents.thumbnails[path] = thumbnails(canvas[None])[0]
                if preprocessing is not None and canvas_bytes + canvas.nbytes <= decode_cache.BUDGET:
                    contents.canvases[path] = canvas
                    canvas_bytes += canvas.nbytes
            on_file(count, len(files))
        return contents


def _copies(files: Files, contents: _ReadFiles) -> dict[int, int]:
    """Map rows to the rows that they copy; a class whose images are all copies of other classes' keeps them."""
    if not len(files):
        return {}
    stack = torch.stack([contents.thumbnails[path] for path in files.paths])
    copies = find_duplicates([contents.digests[path] for path in files.paths], stack)
    originals = {label for row, label in enumerate(files.labels) if row not in copies}
    return {row: of for row, of in copies.items() if files.labels[row] in originals}


def _read(path: Path, preprocessing: Preprocessing) -> tuple[int, Tensor] | str:
    """Read a file once; return its digest and decoded image, or the reason why it is unreadable."""
    try:
        content = image_bytes(path)
        with opened(path, content) as image:
            return digest(content), preprocessing.to_canvas(image)
    except DataError as error:
        return SKIP_REASONS.get(error.code, SKIP_REASONS["unreadable-image"])
    except OSError as error:
        return f"cannot be opened: {error.strerror}"


def unfinished_task(memory: Memory, folder: Path, labels: Iterable[str], name: str | None) -> TaskRecord | None:
    """Return the unfinished task that learning a folder resumes, if there is one.

    The task has the given name, or the folder's. It has all the classes in `labels`, except those of other tasks.
    """
    names, owners = set(labels), memory.owners
    for task in memory.tasks:
        is_named = task.name == name if name is not None else names_folder(task, folder)
        classes = set(task.class_names)
        if task.metadata.unfinished and is_named and classes <= names and names - classes <= owners.keys():
            return task
    return None


def default_name(folder: Path) -> str:
    """Return the default name of a task: the folder's, or the list's without its suffix."""
    path = Path(os.path.abspath(folder))
    return path.stem if is_list(path) else path.name


def names_folder(task: TaskRecord, folder: Path) -> bool:
    """Return whether a task is named after a folder; a number follows if the name was taken."""
    return re.fullmatch(rf"{re.escape(default_name(folder))}(-\d+)?", task.name) is not None
