"""Find a data set's files, verify their checksums, and download or unpack what is missing."""

from __future__ import annotations

import hashlib
import math
from contextlib import suppress
from pathlib import Path

from protosteer.data.datasets.base import DatasetInfo
from protosteer.data.datasets.idx import content
from protosteer.data.downloads import Remote, Say, fetch, to_stderr, unpack
from protosteer.errors import DataError
from protosteer.util.files import file_hash, replacing


def get_dataset(info: DatasetInfo, root: Path, say: Say = to_stderr) -> tuple[Path, dict[str, str]]:
    """Locate a data set below `root`, or download it; return its folder and the verified checksum of each file."""
    folder = info.locate(root)
    if folder is None:
        with suppress(OSError):  # the download says so
            root.mkdir(parents=True, exist_ok=True)
        with replacing(root / info.name, math.inf):  # another process may be at it
            if info.locate(root) is None:
                _obtain(info, root, say)
        folder = info.locate(root)
    if folder is None:
        message = f"{info.title} was fetched into {root / info.name}, but files are missing; remove that folder"
        raise DataError(message, code="incomplete-folder", path=root / info.name)
    return folder, verify(info, folder)


def verify(info: DatasetInfo, folder: Path) -> dict[str, str]:
    """Compute checksums of a data set's files by name: md5 if an official one is known, else sha256."""
    paths = info.find(folder) or []
    return {path.name: _verified(path, info) for path in paths if path.is_file()}


def _verified(path: Path, info: DatasetInfo) -> str:
    official = info.official.get(path.name)
    if official is None:
        return f"sha256:{file_hash(path, 'sha256')}"
    actual = file_hash(path, "md5")
    if actual == official:
        return f"md5:{actual}"
    plain = info.official.get(path.stem) if path.suffix == ".gz" else None
    if plain and hashlib.md5(content(path), usedforsecurity=False).hexdigest() == plain:
        return f"md5:{plain}"  # the official content in another gzip file
    message = (
        f"{path} has md5 {actual}, but the official file has {official}; "
        f"remove it and run: protosteer datasets get {info.name}"
    )
    raise DataError(message, code="checksum", path=path)


def _obtain(info: DatasetInfo, root: Path, say: Say) -> None:
    """Download and unpack; an archive that the user put there is used, and stays."""
    target = root / info.name
    if not info.files:
        message = f"{info.title} is not in {root} and cannot be downloaded: {_by_hand(info, target)}"
        raise DataError(message, code="missing-dataset", name=info.name)
    for remote in info.accepted:
        if remote.folder and (archive := _given(remote, target, root)):
            unpack(archive, remote.folder, target)
            return
    for remote in info.files:
        if remote.folder and (target / remote.folder).exists():
            message = f"{target / remote.folder} is there but lacks files; remove it and try again"
            raise DataError(message, code="incomplete-folder", path=target / remote.folder)
        given = _given(remote, target, root)
        try:
            archive = given or fetch(remote, target, say)
        except DataError as error:
            message = f"{error}; without a network {_by_hand(info, target)}"
            raise DataError(message, code="download-failed", name=remote.name) from error
        if remote.folder:
            unpack(archive, remote.folder, target)
            if not given:
                archive.unlink()


def _given(remote: Remote, target: Path, root: Path) -> Path | None:
    """Return the file if the user put it there; an official archive may also lie beside the folder."""
    folders = [target, root] if remote.folder else [target]
    path = next((folder / remote.name for folder in folders if (folder / remote.name).is_file()), None)
    if path and remote.folder and remote.md5 and (actual := file_hash(path, "md5")) != remote.md5:
        message = f"{path} has md5 {actual}, but the official file has {remote.md5}; remove it"
        raise DataError(message, code="checksum", path=path)
    return path


def _by_hand(info: DatasetInfo, target: Path) -> str:
    if info.by_hand:
        return info.by_hand.format(folder=target)
    files = ", ".join(file.describe() for file in info.files)
    pages = dict.fromkeys(file.pages[0] for file in info.files)
    return f"put {files} from {', '.join(pages)} into {target}"
