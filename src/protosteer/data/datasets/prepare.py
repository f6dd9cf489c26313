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
        with replacing(root / info.name, math.inf):  # another process may be downloading it
            if info.locate(root) is None:
                _fetch_missing(info, root, say)
        folder = info.locate(root)
    if folder is None:
        message = f"{info.title} was fetched into {root / info.name}, but files are missing; remove that folder"
        raise DataError(message, code="incomplete-folder", path=root / info.name)
    return folder, verify(info, folder)


def verify(info: DatasetInfo, folder: Path) -> dict[str, str]:
    """Compute checksums of a data set's files by name: md5 if an official one is known, else sha256."""
    paths = info.find(folder) or []
    return {path.name: _verify_file(path, info) for path in paths if path.is_file()}


def _verify_file(path: Path, info: DatasetInfo) -> str:
    official = info.official.get(path.name)
    if official is None:
        return f"sha256:{file_hash(path, 'sha256')}"
    actual = file_hash(path, "md5")
    if actual == official:
        return f"md5:{actual}"
    unzipped_md5 = info.official.get(path.stem) if path.suffix == ".gz" else None
    if unzipped_md5 and hashlib.md5(content(path), usedforsecurity=False).hexdigest() == unzipped_md5:
        return f"md5:{unzipped_md5}"  # the official content in another gzip file
    message = (
        f"{path} has md5 {actual}, but the official file has {official}; "
        f"remove it and run: protosteer datasets get {info.name}"
    )
    raise DataError(message, code="checksum", path=path)


def _fetch_missing(info: DatasetInfo, root: Path, say: Say) -> None:
    """Download and unpack a data set; an archive that the user put there is used and not removed."""
    target = root / info.name
    if not info.files:
        message = f"{info.title} is not in {root} and cannot be downloaded: {_by_hand(info, target)}"
        raise DataError(message, code="missing-dataset", name=info.name)
    for remote in info.accepted:
        if remote.folder and (archive := _find_user_file(remote, target, root)):
            unpack(archive, remote.folder, target)
            return
    for remote in info.files:
        if remote.folder and (target / remote.folder).exists():
            message = f"{target / remote.folder} is there but lacks files; remove it and try again"
            raise DataError(message, code="incomplete-folder", path=target / remote.folder)
        user_file = _find_user_file(remote, target, root)
        try:
            archive = user_file or fetch(remote, target, say)
        except DataError as error:
            message = f"{error}; without a network {_by_hand(info, target)}"
            raise DataError(message, code="download-failed", name=remote.name) from error
        if remote.folder:
            unpack(archive, remote.folder, target)
            if not user_file:
                archive.unlink()


def _find_user_file(remote: Remote, target: Path, root: Path) -> Path | None:
    """Return the path of a file that the user put into `target`, or of an archive in `root`; None if there is none."""
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
